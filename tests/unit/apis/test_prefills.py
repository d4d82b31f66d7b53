"""A message that starts the model's answer is no turn."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.agreement import AGENTS, ask_preset, judge_alone, judge_live
from tests.support.service import make_service
from tests.support.turn_writers import Did, Writer, as_anthropic, as_chat

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
    moving = ask([f"found {word}" for word in ("alpha", "birch", "cedar", "drift", "ember", "frost", "grove")])
    live = judge_live(stuck, path)

    assert live == ["allow"] * 2 + ["steer"] * 2 + ["land"] * 2 + ["reject"]
    assert live == [judge_alone(value, path) for value in stuck]
    assert set(judge_live(moving, path)) == {judge_alone(moving[-1], path)} == {"allow"}

    sent = json.loads(ask_preset(make_service(AGENTS), stuck[2], path).request_body.response.body_mutation.body)
    assert sent["messages"][-1] == start
    assert "Loop detected" in json.dumps(sent["messages"][-2])


def test_unmarked_last_message_is_a_turn() -> None:
    value = as_chat([Did((("read", {"path": "a"}),), ("error: no such thing",))] * 7)
    value["messages"].append(_START)

    assert judge_alone(value, "/v1/chat/completions") == "allow"
