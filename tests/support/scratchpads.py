"""Scratchpads: programs that write all steps of an agent into one message, by their own templates.

The module under test names the versions that these were read from, or rendered with.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from tests.support.turn_writers import Did

TASK = "How many lamps are there?"


class Step(NamedTuple):
    """A step: a tool with its argument, the result, and a thought unless it may be made up."""

    tool: str
    argument: str
    result: str
    thought: str = ""


class Form(NamedTuple):
    """How a program writes its steps: each from its number, a thought and the step."""

    head: str
    write: Callable[[int, str, Step], str]
    tail: str
    between: str = ""


def _write(form: Form, steps: Sequence[Step]) -> str:
    done = [
        form.write(number, step.thought or f"I should look once more, in way {number}.", step)
        for number, step in enumerate(steps, 1)
    ]
    return form.head + form.between.join(done) + form.tail.replace("{count}", str(len(steps)))


def _tell(result: str) -> str:
    if "error" in result:
        return f"`error`\n  - **Reason:** {result}\n"
    return f"`success`\n  - **Output:** {result}"


_DSPY = "Respond with the corresponding output fields"
_PROGRESS = Form(
    "## Progress on your Task so far\n\n",
    lambda number, thought, step: (
        f"* Step {number}: Executed `{step.tool}(query={step.argument!r})`\n"
        f'  - **Reasoning:** "{thought}"\n  - **Status:** {_tell(step.result)}'
    ),
    "",
    "\n\n",
)
_FORMS: dict[str, Form] = {
    "ReAct": Form(
        f"Question: {TASK}\n",
        lambda _, thought, step: (
            f"Thought: {thought}\nAction: {step.tool}\nAction Input: {step.argument}\n"
            f"Observation: {step.result}\n"
        ),
        "Thought:",
    ),
    "ReAct, numbered": Form(
        f"Question: {TASK}\n",
        lambda number, thought, step: (
            f"Step {number}:\nThought: {thought}\nAction: {step.tool}[{step.argument}]\n"
            f"Observation: {step.result}\n\n"
        ),
        "Do the next step now.",
    ),
    "DSPy": Form(
        f"[[ ## question ## ]]\n{TASK}\n\n[[ ## trajectory ## ]]\n",
        lambda number, thought, step: (
            f"[[ ## thought_{number - 1} ## ]]\n{thought}\n\n"
            f"[[ ## tool_name_{number - 1} ## ]]\n{step.tool}\n\n"
            f"[[ ## tool_args_{number - 1} ## ]]\n{json.dumps({'query': step.argument})}\n\n"
            f"[[ ## observation_{number - 1} ## ]]\n{step.result}\n\n"
        ),
        f"{_DSPY}, starting with `[[ ## next_thought ## ]]`, then `[[ ## next_tool_name ## ]]`, "
        "and then `[[ ## completed ## ]]`.",
    ),
    "DSPy, XML": Form(
        f"<question>\n{TASK}\n</question>\n\n<trajectory>\n",
        lambda number, thought, step: (
            f"<thought_{number}>\n{thought}\n</thought_{number}>\n\n"
            f"<tool_name_{number}>\n{step.tool}\n</tool_name_{number}>\n\n"
            f"<tool_args_{number}>\n{json.dumps({'query': step.argument})}\n"
            f"</tool_args_{number}>\n\n"
            f"<observation_{number}>\n{step.result}\n</observation_{number}>"
        ),
        f"\n</trajectory>\n\n{_DSPY} wrapped in XML tags `<next_thought>`.",
        "\n\n",
    ),
    "DSPy, Avatar": Form(
        f"[[ ## goal ## ]]\n{TASK}\n\n",
        lambda number, _, step: (
            f"[[ ## action_{number} ## ]]\n"
            f"{json.dumps({'tool_name': step.tool, 'tool_input_query': step.argument})}\n\n"
            f"[[ ## result_{number} ## ]]\n{step.result}\n\n"
        ),
        f"{_DSPY}.",
    ),
    "DSPy, RLM": Form(
        f"[[ ## variables_info ## ]]\n{TASK}\n\n[[ ## repl_history ## ]]\n",
        lambda number, thought, step: (
            f"=== Step {number} ===\nReasoning: {thought}\n"
            f"Code:\n```python\n{step.tool}({step.argument!r})\n```\n"
            f"Output ({len(step.result):,} chars):\n{step.result}\n"
        ),
        f"\n[[ ## iteration ## ]]\n{{count}}/20\n\n{_DSPY}.",
    ),
    "XML": Form(
        f"Begin!\n\nQuestion: {TASK}\n",
        lambda _, __, step: (
            f"<tool>{step.tool}</tool><tool_input>{step.argument}</tool_input>"
            f"<observation>{step.result}</observation>"
        ),
        "",
    ),
    "plan and execute": Form(
        "Previous steps: steps=[",
        lambda _, __, step: (
            f"(Step(value={f'{step.tool} {step.argument}'!r}), "
            f"StepResponse(response={step.result!r}))"
        ),
        f"]\n\nCurrent objective: value={TASK!r}\n\n",
        ", ",
    ),
    "self-ask": Form(
        f"Question: {TASK}\nAre followup questions needed here: Yes.",
        lambda _, __, step: (
            f"\nFollow up: {step.tool} {step.argument}\nIntermediate answer: {step.result}"
        ),
        "",
    ),
    "steps": Form(
        f"{TASK}\n",
        lambda number, _, step: (
            f"Step {number}: {step.tool} {step.argument}\nResult: {step.result}\n"
        ),
        "\nWhat is the next step?",
    ),
    "marked steps": Form(
        f"{TASK}\n",
        lambda number, _, step: (
            f"## Step {number}. {step.tool} {step.argument}\n**Output:** {step.result}\n\n"
        ),
        "Answer with one step.",
    ),
    "a JSON list": Form(
        f"Task: {TASK}\nScratchpad: [",
        lambda _, thought, step: json.dumps(
            {
                "thought": thought,
                "action": step.tool,
                "action_input": step.argument,
                "observation": step.result,
            }
        ),
        "]\nWhat is your next action?",
        ", ",
    ),
    "JSON lines": Form(
        json.dumps({"task": TASK}) + "\n",
        lambda _, thought, step: json.dumps(
            {
                "reasoning": thought,
                "tool": {"name": step.tool, "input": step.argument},
                "tool_output": step.result,
            }
        ),
        "",
        "\n",
    ),
}


def _json_history(steps: Sequence[Step]) -> str:
    done = [
        {"tool_name": tool, "tool_args": {"q": argument}, "tool_result": result}
        for tool, argument, result, _ in steps
    ]
    return json.dumps({"task": TASK, "history": done}, indent=1)


def in_chat(text: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    return {"model": "m", "messages": messages}


def _in_system(steps: Sequence[Step]) -> dict[str, Any]:
    """The messages of AutoGPT: nothing of the assistant, and the history before the last two."""
    said = [
        ("system", "You are Lamp-GPT."),
        ("user", f'"""{TASK}"""'),
        ("system", _write(_PROGRESS, steps)),
        ("system", f"## Clock\nThe current time and date is Fri Jun  7 09:42:{len(steps):02} 2024"),
        ("user", "Determine exactly one command to use next, and respond using the JSON schema."),
    ]
    return {"model": "m", "messages": [{"role": role, "content": text} for role, text in said]}


TEXTS: dict[str, Callable[[Sequence[Step]], str]] = {
    **{name: partial(_write, form) for name, form in _FORMS.items()},
    "a JSON object": _json_history,
}


def _write_chat(name: str, steps: Sequence[Step]) -> dict[str, Any]:
    return in_chat(TEXTS[name](steps))


def as_scratchpad(turns: Sequence[Did], name: str) -> dict[str, Any]:
    """A chat whose turns, each with one call, are steps of a form in TEXTS."""
    steps = [
        Step(turn.calls[0][0], json.dumps(turn.calls[0][1]), "\n".join(turn.results), turn.thought)
        for turn in turns
    ]
    return in_chat(TEXTS[name](steps).replace(TASK, "Fix it."))


FORMS: dict[str, Callable[[Sequence[Step]], dict[str, Any]]] = {
    **{name: partial(_write_chat, name) for name in TEXTS},
    "AutoGPT": _in_system,
}
