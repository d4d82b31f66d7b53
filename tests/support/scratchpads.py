"""Scratchpads: programs that write all steps of an agent into one message, by their own templates.

The module under test names the versions that these were read from, or rendered with.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

TASK = "How many lamps are there?"


class Step(NamedTuple):
    """A step: a tool with its argument, and the result."""

    tool: str
    argument: str
    result: str


def _number(steps: Sequence[Step]) -> list[tuple[int, str, Step]]:
    return [
        (number, f"I should look once more, in way {number}.", step)
        for number, step in enumerate(steps, 1)
    ]


def _react(steps: Sequence[Step]) -> str:
    done = [
        f"Thought: {thought}\nAction: {tool}\nAction Input: {argument}\nObservation: {result}\n"
        for _, thought, (tool, argument, result) in _number(steps)
    ]
    return f"Question: {TASK}\n{''.join(done)}Thought:"


def _react_in_steps(steps: Sequence[Step]) -> str:
    done = [
        f"Step {number}:\nThought: {thought}\nAction: {tool}[{argument}]\nObservation: {result}\n\n"
        for number, thought, (tool, argument, result) in _number(steps)
    ]
    return f"Question: {TASK}\n{''.join(done)}Do the next step now."


def _dspy(steps: Sequence[Step]) -> str:
    done = [
        f"[[ ## thought_{number - 1} ## ]]\n{thought}\n\n[[ ## tool_name_{number - 1} ## ]]\n{tool}"
        f"\n\n[[ ## tool_args_{number - 1} ## ]]\n{json.dumps({'query': argument})}\n\n"
        f"[[ ## observation_{number - 1} ## ]]\n{result}\n\n"
        for number, thought, (tool, argument, result) in _number(steps)
    ]
    answer = (
        "Respond with the corresponding output fields, starting with `[[ ## next_thought ## ]]`"
    )
    return (
        f"[[ ## question ## ]]\n{TASK}\n\n[[ ## trajectory ## ]]\n{''.join(done)}{answer}, then "
        f"`[[ ## next_tool_name ## ]]`, and then `[[ ## completed ## ]]`."
    )


def _dspy_xml(steps: Sequence[Step]) -> str:
    done = [
        f"<thought_{number}>\n{thought}\n</thought_{number}>\n\n<tool_name_{number}>\n{tool}\n"
        f"</tool_name_{number}>\n\n<tool_args_{number}>\n{json.dumps({'query': argument})}\n"
        f"</tool_args_{number}>\n\n<observation_{number}>\n{result}\n</observation_{number}>\n\n"
        for number, thought, (tool, argument, result) in _number(steps)
    ]
    return (
        f"<question>\n{TASK}\n</question>\n\n<trajectory>\n{''.join(done).strip()}\n</trajectory>\n\n"
        "Respond with the corresponding output fields wrapped in XML tags `<next_thought>`."
    )


def _dspy_avatar(steps: Sequence[Step]) -> str:
    done = [
        f"[[ ## action_{number} ## ]]\n"
        f"{json.dumps({'tool_name': tool, 'tool_input_query': argument})}\n\n"
        f"[[ ## result_{number} ## ]]\n{result}\n\n"
        for number, _, (tool, argument, result) in _number(steps)
    ]
    return (
        f"[[ ## goal ## ]]\n{TASK}\n\n{''.join(done)}Respond with the corresponding output fields."
    )


def _dspy_rlm(steps: Sequence[Step]) -> str:
    done = [
        f"=== Step {number} ===\nReasoning: {thought}\n"
        f"Code:\n```python\n{tool}({argument!r})\n```\n"
        f"Output ({len(result):,} chars):\n{result}\n"
        for number, thought, (tool, argument, result) in _number(steps)
    ]
    return (
        f"[[ ## variables_info ## ]]\n{TASK}\n\n[[ ## repl_history ## ]]\n{''.join(done)}\n"
        f"[[ ## iteration ## ]]\n{len(steps)}/20\n\nRespond with the corresponding output fields."
    )


def _xml(steps: Sequence[Step]) -> str:
    done = [
        f"<tool>{tool}</tool><tool_input>{argument}</tool_input><observation>{result}</observation>"
        for tool, argument, result in steps
    ]
    return f"Begin!\n\nQuestion: {TASK}\n{''.join(done)}"


def _plan_and_execute(steps: Sequence[Step]) -> str:
    done = [
        f"(Step(value={f'{tool} {argument}'!r}), StepResponse(response={result!r}))"
        for tool, argument, result in steps
    ]
    return f"Previous steps: steps=[{', '.join(done)}]\n\nCurrent objective: value={TASK!r}\n\n"


def _self_ask(steps: Sequence[Step]) -> str:
    done = [
        f"\nFollow up: {tool} {argument}\nIntermediate answer: {result}"
        for tool, argument, result in steps
    ]
    return f"Question: {TASK}\nAre followup questions needed here: Yes.{''.join(done)}"


def _steps(steps: Sequence[Step]) -> str:
    done = [
        f"Step {number}: {tool} {argument}\nResult: {result}\n"
        for number, _, (tool, argument, result) in _number(steps)
    ]
    return f"{TASK}\n{''.join(done)}\nWhat is the next step?"


def _marked_steps(steps: Sequence[Step]) -> str:
    done = [
        f"## Step {number}. {tool} {argument}\n**Output:** {result}\n\n"
        for number, _, (tool, argument, result) in _number(steps)
    ]
    return f"{TASK}\n{''.join(done)}Answer with one step."


def _json(steps: Sequence[Step]) -> str:
    done = [
        {"thought": thought, "action": tool, "action_input": argument, "observation": result}
        for _, thought, (tool, argument, result) in _number(steps)
    ]
    return f"Task: {TASK}\nScratchpad: {json.dumps(done)}\nWhat is your next action?"


def _json_lines(steps: Sequence[Step]) -> str:
    done = [
        json.dumps(
            {"reasoning": thought, "tool": {"name": tool, "input": argument}, "tool_output": result}
        )
        for _, thought, (tool, argument, result) in _number(steps)
    ]
    return json.dumps({"task": TASK}) + "\n" + "\n".join(done)


def _json_history(steps: Sequence[Step]) -> str:
    done = [
        {"tool_name": tool, "tool_args": {"q": argument}, "tool_result": result}
        for tool, argument, result in steps
    ]
    return json.dumps({"task": TASK, "history": done}, indent=1)


def _tell(result: str) -> str:
    if "error" in result:
        return f"`error`\n  - **Reason:** {result}\n"
    return f"`success`\n  - **Output:** {result}"


def _progress(steps: Sequence[Step]) -> str:
    done = [
        f"* Step {number}: Executed `{tool}(query={argument!r})`\n"
        f'  - **Reasoning:** "{thought}"\n  - **Status:** {_tell(result)}'
        for number, thought, (tool, argument, result) in _number(steps)
    ]
    return "## Progress on your Task so far\n\n" + "\n\n".join(done)


def in_chat(text: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    return {"model": "m", "messages": messages}


def _in_system(steps: Sequence[Step]) -> dict[str, Any]:
    """The messages of AutoGPT: nothing of the assistant, and the history before the last two."""
    said = [
        ("system", "You are Lamp-GPT."),
        ("user", f'"""{TASK}"""'),
        ("system", _progress(steps)),
        ("system", f"## Clock\nThe current time and date is Fri Jun  7 09:42:{len(steps):02} 2024"),
        ("user", "Determine exactly one command to use next, and respond using the JSON schema."),
    ]
    return {"model": "m", "messages": [{"role": role, "content": text} for role, text in said]}


TEXTS: dict[str, Callable[[Sequence[Step]], str]] = {
    "ReAct": _react,
    "ReAct, numbered": _react_in_steps,
    "DSPy": _dspy,
    "DSPy, XML": _dspy_xml,
    "DSPy, Avatar": _dspy_avatar,
    "DSPy, RLM": _dspy_rlm,
    "XML": _xml,
    "plan and execute": _plan_and_execute,
    "self-ask": _self_ask,
    "steps": _steps,
    "marked steps": _marked_steps,
    "a JSON list": _json,
    "JSON lines": _json_lines,
    "a JSON object": _json_history,
}


def _write_chat(name: str, steps: Sequence[Step]) -> dict[str, Any]:
    return in_chat(TEXTS[name](steps))


FORMS: dict[str, Callable[[Sequence[Step]], dict[str, Any]]] = {
    **{name: partial(_write_chat, name) for name in TEXTS},
    "AutoGPT": _in_system,
}
