"""Conversations of agents, as each API writes them."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Did(NamedTuple):
    """A turn. Two are equal if `calls`, `results` and `user` are.

    Attributes:
        calls: tools and arguments, called at once.
        results: result of each call; fewer where some are missing.
        user: the user's words after the results.
        thought: different in every turn.
        number: used in ids; 0 for the turn's place in the request.
    """

    calls: tuple[tuple[str, dict[str, Any]], ...]
    results: tuple[str, ...] = ()
    user: str = ""
    thought: str = ""
    number: int = 0


Writer = Callable[[Sequence[Did]], dict[str, Any]]


_SEPARATORS = ((", ", ": "), (",", ":"), (",\n ", " : "))


def _spelled(arguments: dict[str, Any], number: int) -> str:
    """Arguments in a spelling that changes from turn to turn."""
    items = list(arguments.items())
    return json.dumps(
        dict(items[::-1] if number % 2 else items), separators=_SEPARATORS[number % 3]
    )


def _numbered(turns: Sequence[Did]) -> list[tuple[int, Did]]:
    return [(turn.number or place, turn) for place, turn in enumerate(turns, 1)]


def as_chat(turns: Sequence[Did]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Fix it."},
    ]
    for number, turn in _numbered(turns):
        calls = [
            {
                "id": f"c{number}-{place}",
                "type": "function",
                "function": {"name": name, "arguments": _spelled(given, number)},
            }
            for place, (name, given) in enumerate(turn.calls)
        ]
        messages.append({"role": "assistant", "content": turn.thought or None, "tool_calls": calls})
        for place, result in enumerate(turn.results):
            text: Any = [{"type": "text", "text": result}] if number % 2 else result
            messages.append({"role": "tool", "tool_call_id": f"c{number}-{place}", "content": text})
        if turn.user:
            messages.append({"role": "user", "content": turn.user})
    return {"model": "m", "messages": messages}


def as_ollama(turns: Sequence[Did]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Fix it."}]
    for _, turn in _numbered(turns):
        calls = [{"function": {"name": name, "arguments": given}} for name, given in turn.calls]
        messages.append(
            {"role": "assistant", "content": "", "thinking": turn.thought, "tool_calls": calls}
        )
        messages += [
            {"role": "tool", "tool_name": "t", "content": result} for result in turn.results
        ]
        if turn.user:
            messages.append({"role": "user", "content": turn.user})
    return {"model": "m", "stream": False, "messages": messages}


def as_responses(turns: Sequence[Did]) -> dict[str, Any]:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Fix it."}]}
    ]
    for number, turn in _numbered(turns):
        items.append(
            {
                "type": "reasoning",
                "id": f"rs_{number}",
                "summary": [],
                "encrypted_content": turn.thought,
            }
        )
        if turn.thought:
            said = [{"type": "output_text", "text": turn.thought}]
            items.append(
                {"type": "message", "id": f"m{number}", "role": "assistant", "content": said}
            )
        items += [
            {
                "type": "function_call",
                "id": f"fc{number}-{place}",
                "call_id": f"c{number}-{place}",
                "name": name,
                "arguments": _spelled(given, number),
            }
            for place, (name, given) in enumerate(turn.calls)
        ]
        items += [
            {"type": "function_call_output", "call_id": f"c{number}-{place}", "output": result}
            for place, result in enumerate(turn.results)
        ]
        if turn.user:
            items.append({"type": "message", "role": "user", "content": turn.user})
    return {"model": "m", "input": items}


def as_anthropic(turns: Sequence[Did]) -> dict[str, Any]:
    """Anthropic's messages, with the reminders that Claude Code adds to results."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Fix it."}]
    for number, turn in _numbered(turns):
        blocks: list[dict[str, Any]] = [
            {"type": "thinking", "thinking": turn.thought, "signature": f"s{number}"}
        ]
        blocks += [{"type": "text", "text": turn.thought}] if turn.thought else []
        blocks += [
            {"type": "tool_use", "id": f"toolu_{number}_{place}", "name": name, "input": given}
            for place, (name, given) in enumerate(turn.calls)
        ]
        messages.append({"role": "assistant", "content": blocks})
        said: list[dict[str, Any]] = [
            {"type": "tool_result", "tool_use_id": f"toolu_{number}_{place}", "content": result}
            for place, result in enumerate(turn.results)
        ]
        if said and number % 2:
            said.append(
                {
                    "type": "text",
                    "text": f"<system-reminder>\nThis is turn {number}.\n</system-reminder>",
                }
            )
        said += [{"type": "text", "text": turn.user}] if turn.user else []
        if said:
            messages.append({"role": "user", "content": said})
    return {"model": "m", "max_tokens": 9, "messages": messages}


def as_gemini(turns: Sequence[Did]) -> dict[str, Any]:
    """Gemini's generateContent, which matches results to calls by order."""
    contents: list[dict[str, Any]] = [{"role": "user", "parts": [{"text": "Fix it."}]}]
    for number, turn in _numbered(turns):
        parts: list[dict[str, Any]] = [
            {"text": turn.thought, "thought": True, "thoughtSignature": f"s{number}"}
        ]
        parts += [{"functionCall": {"name": name, "args": given}} for name, given in turn.calls]
        contents.append({"role": "model", "parts": parts})
        said: list[dict[str, Any]] = [
            {"functionResponse": {"name": turn.calls[place][0], "response": {"output": result}}}
            for place, result in enumerate(turn.results)
        ]
        said += [{"text": turn.user}] if turn.user else []
        if said:
            contents.append({"role": "user", "parts": said})
    return {"contents": contents, "generationConfig": {"temperature": 0.5}}


def as_bedrock(turns: Sequence[Did]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"text": "Fix it."}]}]
    for number, turn in _numbered(turns):
        blocks: list[dict[str, Any]] = [
            {"reasoningContent": {"reasoningText": {"text": turn.thought}}}
        ]
        blocks += [{"text": turn.thought}] if turn.thought else []
        blocks += [
            {"toolUse": {"toolUseId": f"t{number}-{place}", "name": name, "input": given}}
            for place, (name, given) in enumerate(turn.calls)
        ]
        messages.append({"role": "assistant", "content": blocks})
        said: list[dict[str, Any]] = [
            {
                "toolResult": {
                    "toolUseId": f"t{number}-{place}",
                    "content": [{"text": result}],
                    "status": "success",
                }
            }
            for place, result in enumerate(turn.results)
        ]
        said += [{"text": turn.user}] if turn.user else []
        if said:
            messages.append({"role": "user", "content": said})
    return {
        "system": [{"text": "Be brief."}],
        "messages": messages,
        "inferenceConfig": {"maxTokens": 9},
    }


SHAPES: dict[str, Writer] = {
    "chat": as_chat,
    "ollama": as_ollama,
    "responses": as_responses,
    "anthropic": as_anthropic,
    "gemini": as_gemini,
    "bedrock": as_bedrock,
}
PATHS = {
    "chat": "/v1/chat/completions",
    "ollama": "/api/chat",
    "responses": "/v1/responses",
    "anthropic": "/v1/messages",
    "gemini": "/v1beta/models/m:generateContent",
    "bedrock": "/model/m/converse",
}


def _command(turn: Did) -> str:
    name, given = turn.calls[0]
    return " ".join([name, *[f"--{key}={json.dumps(value)}" for key, value in given.items()]])


def _write_arguments(turn: Did, form: str, between: str = "\n") -> str:
    return between.join([form.format(key, json.dumps(v)) for key, v in turn.calls[0][1].items()])


STYLES: dict[str, Callable[[Did], str]] = {
    "fence": lambda did: f"DISCUSSION\n{did.thought}\n\n```bash\n{_command(did)}\n```",
    "fences": lambda did: (
        f"{did.thought}. It looks like\n```\n{did.thought}\n```\nso I "
        f"run:\n\n```sh\n{_command(did)}\n```\n"
    ),
    "inline fence": lambda did: (
        f"{did.thought} In summary, the next action I will perform is ```{_command(did)}```"
    ),
    "json": lambda did: json.dumps(
        {"thought": did.thought, "action": did.calls[0][0], "action_input": did.calls[0][1]}
    ),
    "json in prose": lambda did: (
        f"Thought: {did.thought}\nAction:\n"
        + json.dumps({"name": did.calls[0][0], "arguments": did.calls[0][1]}, indent=2)
    ),
    "json in a fence": lambda did: (
        "```json\n"
        + json.dumps({"tool": did.calls[0][0], "args": did.calls[0][1], "reasoning": did.thought})
        + "\n```"
    ),
    "commands": lambda did: json.dumps(
        {
            "state_analysis": did.thought,
            "explanation": did.thought,
            "commands": [
                {"keystrokes": _command(did) + "\n", "is_blocking": True, "timeout_sec": 5}
            ],
            "is_task_complete": False,
        },
        indent=1,
    ),
    "tags": lambda did: f"{did.thought}\n<execute_bash>\n{_command(did)}\n</execute_bash>",
    "parameters": lambda did: (
        f"<think>{did.thought}</think>{did.thought}\n<function={did.calls[0][0]}>\n"
        + _write_arguments(did, "<parameter={}>{}</parameter>")
        + "\n</function>"
    ),
    "invoke": lambda did: (
        f'{did.thought}\n<function_calls>\n<invoke name="{did.calls[0][0]}">'
        + _write_arguments(did, '<parameter name="{}">{}</parameter>', "")
        + "</invoke>\n</function_calls>"
    ),
    "nested tags": lambda did: (
        f"<thinking>\n{did.thought}\n</thinking>\n\n<{did.calls[0][0]}>\n"
        + _write_arguments(did, "<{0}>{1}</{0}>")
        + f"\n</{did.calls[0][0]}>"
    ),
    "react": lambda did: (
        f"Thought: {did.thought}\nAction: {did.calls[0][0]}\n"
        f"Action Input: {json.dumps(did.calls[0][1])}\n"
    ),
    "numbered react": lambda did: (
        f"Thought {len(did.thought)}: {did.thought}\nAction {len(did.thought)}: "
        f"{did.calls[0][0]}[{did.calls[0][1]}]"
    ),
    "code tag": lambda did: (
        f"Thought: {did.thought}\n<code>\n```py\nprint({_command(did)!r})\n```\n</code>"
    ),
}


def as_text(turns: Sequence[Did], style: Callable[[Did], str]) -> dict[str, Any]:
    """A chat whose actions are text, and whose results are the user's messages."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Fix it."}]
    for turn in turns:
        messages.append({"role": "assistant", "content": style(turn)})
        said = [*turn.results, turn.user] if turn.user else turn.results
        if said:
            messages.append({"role": "user", "content": "\n".join(said)})
    return {"model": "m", "messages": messages}


def as_observed(turns: Sequence[Did]) -> dict[str, Any]:
    """As browser agents: thoughts among a call's arguments, results as messages of the user."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Browse."},
        {"role": "user", "content": "Find it."},
    ]
    for number, turn in _numbered(turns):
        state = {
            "evaluation_previous_goal": turn.thought,
            "memory": turn.thought,
            "next_goal": turn.thought,
        }
        calls = [
            {
                "id": f"c{number}-{place}",
                "type": "function",
                "function": {
                    "name": "AgentOutput",
                    "arguments": json.dumps({"current_state": state, "action": [{name: given}]}),
                },
            }
            for place, (name, given) in enumerate(turn.calls)
        ]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": ""} for call in calls]
        said = "\n".join([*turn.results, turn.user])
        if turn.results or turn.user:
            messages.append(
                {"role": "user", "content": f"[Current state]\n{said}\nCurrent step: {number}/20"}
            )
    return {"model": "m", "messages": messages}
