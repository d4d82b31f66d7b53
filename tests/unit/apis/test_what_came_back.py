"""Results and prefills are read wherever an API has them; gateway and `explain` agree."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.agreement import AGENTS, ask_preset, judge_alone, judge_live
from tests.support.service import make_service
from tests.support.turn_writers import Did, Writer, as_anthropic, as_chat

_WORDS = [
    *("alpha", "birch", "cedar", "drift", "ember", "frost", "grove", "hazel", "ivory"),
    *("jolly", "koala", "lemon", "mango", "noble", "otter", "piano", "quilt"),
]
_ERROR = "cat: x: No such file or directory"
_TIMES = 17

Turn = Callable[[str, int], list[dict[str, Any]]]
"""Writes the messages of a turn, given what comes back and the turn's number."""


def _judge(
    path: str,
    key: str,
    head: list[Any],
    turn: Turn,
    values: list[str],
    tail: list[Any] | None = None,
) -> list[str]:
    """The verdicts on a growing conversation; gateway and explain have to agree."""
    bodies, messages = [], head
    for number, value in enumerate(values):
        messages = [*messages, *turn(value, number)]
        bodies.append({"model": "m", key: [*messages, *(tail or [])]})
    live = judge_live(bodies, path)

    assert live == [judge_alone(value, path) for value in bodies]
    return live


def _gemini(result: str, image: str, data: dict[str, Any]) -> Turn:
    def write(value: str, _: int) -> list[dict[str, Any]]:
        file = {name: content.replace("@", value) for name, content in data.items()}
        given = {"name": "look", "response": {"url": "http://x"}, "parts": [{image: file}]}
        called = {"functionCall": {"name": "look", "args": {}}}
        return [{"role": "model", "parts": [called]}, {"role": "user", "parts": [{result: given}]}]

    return write


def _ollama(value: str, _: int) -> list[dict[str, Any]]:
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "look", "arguments": {}}}],
    }
    return [called, {"role": "tool", "content": "screen", "images": [value * 5]}]


def _ollama_observed(value: str, _: int) -> list[dict[str, Any]]:
    said = {"role": "user", "content": "screen", "images": [value * 5]}
    return [{"role": "assistant", "content": "Action: look[]"}, said]


_GEMINI = (
    "/v1beta/models/m:generateContent",
    "contents",
    [{"role": "user", "parts": [{"text": "Fix it."}]}],
)
_CHAT = ("/api/chat", "messages", [{"role": "user", "content": "Fix it."}])
_INLINE, _FILE = {"mimeType": "image/png", "data": "@"}, {"fileUri": "gs://@"}
_SCREENS = {
    "gemini": (*_GEMINI, _gemini("functionResponse", "inlineData", _INLINE)),
    "gemini, file": (*_GEMINI, _gemini("functionResponse", "fileData", _FILE)),
    "gemini, snake case": (*_GEMINI, _gemini("function_response", "inline_data", _INLINE)),
    "gemini, file in snake case": (*_GEMINI, _gemini("function_response", "file_data", _FILE)),
    "ollama": (*_CHAT, _ollama),
    "ollama, observed": (*_CHAT, _ollama_observed),
}


@pytest.mark.slow
@pytest.mark.parametrize("screen", _SCREENS.values(), ids=_SCREENS)
def test_screenshots_are_part_of_results(screen: tuple[str, str, list[Any], Turn]) -> None:
    assert set(_judge(*screen, _WORDS)) == {"allow"}
    assert _judge(*screen, ["alpha"] * _TIMES)[2:] == ["steer"] * 11 + ["land"] * 2 + ["reject"] * 2


def test_removed_image_makes_no_turn_new() -> None:
    """Programs drop older screenshots."""

    def ask(values: list[str], kept: int) -> str:
        path, key, messages = _CHAT
        for number, value in enumerate(values, 1):
            called, result = _ollama(value, number)
            if number <= len(values) - kept:
                del result["images"]
            messages = [*messages, called, result]
        return judge_alone({"model": "m", key: messages}, path)

    assert [ask(["alpha"] * _TIMES, kept) for kept in (1, 2, 5)] == ["reject"] * 3
    assert ask(_WORDS, 2) == "allow"


_HOSTED: dict[str, Callable[[str], dict[str, Any]]] = {
    "code_interpreter_call": lambda value: {
        "code": "check()",
        "outputs": [{"type": "logs", "logs": value}],
    },
    "file_search_call": lambda value: {
        "queries": ["queue"],
        "results": [{"file_id": "f", "text": value}],
    },
    "image_generation_call": lambda value: {"result": value},
    "web_search_call": lambda value: {
        "action": {"type": "search", "query": "q", "sources": [{"url": value}]}
    },
    "mcp_call": lambda value: {"name": "check", "arguments": "{}", "output": value},
}
_ASKED = {"role": "user", "content": "Check the queue."}
_SAID = {"role": "assistant", "content": [{"type": "output_text", "text": "Nothing new."}]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", _HOSTED)
def test_results_of_hosted_tools_are_compared(kind: str) -> None:
    def write(value: str, number: int) -> list[dict[str, Any]]:
        return [_ASKED, {"type": kind, "id": f"h{number}", **_HOSTED[kind](value)}, _SAID]

    def judge(values: list[str]) -> list[str]:
        return _judge("/v1/responses", "input", [], write, values, [_ASKED])

    assert set(judge(_WORDS)) == {"allow"}
    assert judge(["alpha"] * _TIMES)[-1] == "reject"


_OUTPUTS: dict[str, Callable[[str], Any]] = {
    "shell_call_output": lambda text: [
        {"stdout": "", "stderr": text, "outcome": {"type": "exit", "exit_code": 1}}
    ],
    **dict.fromkeys(
        (
            "local_shell_call_output",
            "apply_patch_call_output",
            "custom_tool_call_output",
            "function_call_output",
        ),
        str,
    ),
}
_RESPONSES = ("/v1/responses", "input", [{"role": "user", "content": "Fix it."}])


@pytest.mark.parametrize("kind", _OUTPUTS)
def test_outputs_of_referenced_calls_are_compared(kind: str) -> None:
    def write(value: str, number: int) -> list[dict[str, Any]]:
        output = {"type": kind, "call_id": f"c{number}", "output": _OUTPUTS[kind](value)}
        return [
            {"type": "item_reference", "id": f"rs_{number}"},
            {"type": "item_reference", "id": f"c_{number}"},
            output,
        ]

    def ask(values: list[str]) -> list[str]:
        messages = _RESPONSES[2]
        found = []
        for number, value in enumerate(values):
            messages = [*messages, *write(value, number)]
            found.append(judge_alone({"model": "m", "input": messages}, "/v1/responses"))
        return found

    assert set(ask([f"{word}: done" for word in _WORDS])) == {"allow"}
    assert ask([_ERROR] * 8) == ["allow"] * 2 + ["steer"] * 2 + ["land"] * 2 + ["reject"] * 2
    if kind != "shell_call_output":  # whose output has no place for a note
        assert _judge(*_RESPONSES, write, [_ERROR] * 8)[6] == "reject"


@pytest.mark.parametrize("kind", _OUTPUTS)
def test_outputs_without_calls_are_uncounted(kind: str) -> None:
    def write(value: str, number: int) -> list[dict[str, Any]]:
        return [{"type": kind, "call_id": f"c{number}", "output": _OUTPUTS[kind](value)}]

    assert set(_judge(*_RESPONSES, write, [_ERROR] * 8)) == {"no_history"}


def test_repeated_text_after_references_is_uncounted() -> None:
    """A repeated text cannot be judged; new words of a person are no loop."""

    def write(value: str, number: int) -> list[dict[str, Any]]:
        return [
            {"type": "item_reference", "id": f"msg_{number}"},
            {"role": "user", "content": value},
        ]

    assert set(_judge(*_RESPONSES, write, _WORDS)) == {"allow"}
    assert _judge(*_RESPONSES, write, ["continue"] * 4)[1:] == ["no_history"] * 3


def test_references_beside_calls_change_nothing() -> None:
    def write(value: str, number: int) -> list[dict[str, Any]]:
        called = {
            "type": "function_call",
            "call_id": f"c{number}",
            "name": "f",
            "arguments": json.dumps({"n": 1}),
        }
        output = {"type": "function_call_output", "call_id": f"c{number}", "output": value}
        return [{"type": "item_reference", "id": f"msg_{number}"}, called, output]

    assert _judge(*_RESPONSES, write, [_ERROR] * 8)[6] == "reject"
    assert set(_judge(*_RESPONSES, write, _WORDS)) == {"allow"}


_START = {"role": "assistant", "content": "Let me check this once more"}
_PREFILLS: dict[str, tuple[str, Writer, dict[str, Any], dict[str, Any]]] = {
    "mistral": ("/v1/chat/completions", as_chat, {**_START, "prefix": True}, {}),
    "vllm": ("/v1/chat/completions", as_chat, _START, {"continue_final_message": True}),
    "anthropic": ("/v1/messages", as_anthropic, _START, {}),
}


@pytest.mark.parametrize("name", _PREFILLS)
def test_loop_with_prefill_is_steered_and_refused(name: str) -> None:
    path, write, start, more = _PREFILLS[name]

    def ask(results: list[str]) -> list[dict[str, Any]]:
        bodies = []
        for end in range(1, len(results) + 1):
            value = write([Did((("read", {"path": "a"}),), (result,)) for result in results[:end]])
            bodies.append({**value, **more, "messages": [*value["messages"], start]})
        return bodies

    stuck = ask(["error: no such thing"] * 7)
    moving = ask(
        [
            f"found {word}"
            for word in ("alpha", "birch", "cedar", "drift", "ember", "frost", "grove")
        ]
    )
    live = judge_live(stuck, path)

    assert live == ["allow"] * 2 + ["steer"] * 2 + ["land"] * 2 + ["reject"]
    assert live == [judge_alone(value, path) for value in stuck]
    assert set(judge_live(moving, path)) == {judge_alone(moving[-1], path)} == {"allow"}

    sent = json.loads(
        ask_preset(make_service(AGENTS), stuck[2], path).request_body.response.body_mutation.body
    )
    assert sent["messages"][-1] == start
    assert "Loop detected" in json.dumps(sent["messages"][-2])


def test_unmarked_last_message_is_a_turn() -> None:
    value = as_chat([Did((("read", {"path": "a"}),), ("error: no such thing",))] * 7)
    value["messages"].append(_START)

    assert judge_alone(value, "/v1/chat/completions") == "allow"
