"""Providers cache a prompt from its start: tools, system, earlier messages. Notes and landings leave all of it as it was."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

import msgspec
import pytest
from fake_model import Answer, Call, FakeModel, fake_model

from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.frameworks import (
    Errand,
    Run,
    run_bedrock_agent,
    run_gemini_agent,
    run_langchain,
    run_messages_agent,
    run_ollama_agent,
    run_openai_agent,
    run_openai_responses_agent,
    run_pydantic_agent,
)
from tests.support.messages import body, headers
from tests.support.model_requests import BODIES
from tests.support.service import decoded, exchange, make_service
from tests.support.steering import FORBIDDEN
from tests.support.turn_writers import PATHS

SDKS: dict[str, Run] = {
    "chat": run_openai_agent,
    "chat of langchain": run_langchain,
    "chat of pydantic-ai": run_pydantic_agent,
    "responses": run_openai_responses_agent,
    "anthropic": run_messages_agent,
    "gemini": run_gemini_agent,
    "bedrock": run_bedrock_agent,
    "ollama": run_ollama_agent,
}
RECORDED = ("chat_stuck", "chat_parallel_calls", "responses_stuck", "responses_parallel_calls", "anthropic_stuck",
            "anthropic_parallel_calls")  # fmt: skip  # one list

_MESSAGES = ("messages", "input", "contents")


@pytest.fixture(scope="module")
def model() -> Iterator[FakeModel]:
    """A model that calls a tool three times."""
    with fake_model() as made:
        yield made


def record(model: FakeModel, name: str) -> bytes:
    """The last request of an SDK's agent, with three calls in its history."""

    def answer(number: int) -> Answer:
        return "Done." if number % 4 == 3 else [Call("check")]

    model.scripts[name] = answer
    SDKS[name](Errand(f"http://127.0.0.1:{model.port}", name, lambda: "pending", lambda: "It is done."))
    return model.bodies[name]


def repeat(data: bytes, api: str, action: str, **loop: str) -> bytes:
    """The body that goes on if its request is the second of two equal ones."""
    service = make_service(policy("p", ANY, action=action, threshold_identical_requests=2, **loop))
    answers = [exchange(service, headers(PATHS[api]), body(data)) for _ in range(2)]
    changed: bytes = decoded(answers[1][-1]).request_body.response.body_mutation.body
    return changed


def split(data: bytes) -> dict[str, bytes]:
    """The members of a body as they stand in it, in order."""
    return {key: bytes(item) for key, item in msgspec.json.decode(data, type=dict[str, msgspec.Raw]).items()}


def split_messages(listed: bytes) -> tuple[list[bytes], list[bytes]]:
    """A list of messages as they stand in it: up to the model's last one, and the newer ones."""
    messages = [bytes(item) for item in msgspec.json.decode(listed, type=list[msgspec.Raw])]
    said = [json.loads(message) for message in messages]
    calls = [str(one.get("type")).endswith("_call") or one.get("role") in ("assistant", "model") for one in said]
    newest = len(calls) - calls[::-1].index(True)
    return messages[:newest], messages[newest:]


def check_prefix(old: bytes, new: bytes, none: dict[str, Any]) -> None:
    """See that nothing but the choice among tools has changed before the newest messages, wherever it stands."""
    before, after = split(old), split(new)
    key = next(key for key in _MESSAGES if key in before)
    earlier, newest = split_messages(before.pop(key))

    kept, noted = split_messages(after.pop(key))
    assert kept == earlier
    assert len(noted) == len(newest)
    assert noted != newest
    assert {name: json.loads(after.pop(name)) for name in none} == none
    assert after == {name: value for name, value in before.items() if name not in none}

    old, new = [cut(data, none) for data in (old, new)]
    start = old.index(newest[0])
    assert new[:start] == old[:start]


def cut(data: bytes, keys: Collection[str]) -> bytes:
    """A body without some members, but with their commas."""
    members = split(data)
    for key in members.keys() & keys:
        data = re.sub(rb'"%b"\s*:\s*%b' % (key.encode(), re.escape(members[key])), b"", data)
    return data


def find_none(api: str, data: bytes, action: str) -> dict[str, Any]:
    """What should be in the body beside the note."""
    declared = any(key in split(data) for key in ("tools", "toolConfig"))
    return FORBIDDEN[api] if action == "land" and declared else {}


both_actions: Callable[..., Any] = pytest.mark.parametrize("action", ["steer", "land"])


@both_actions
@pytest.mark.parametrize("name", SDKS)
def test_no_byte_before_an_sdk_s_newest_message_changes(model: FakeModel, name: str, action: str) -> None:
    """Its tools stay declared, and a landing forbids them if the API can."""
    api, sent = name.partition(" ")[0], record(model, name)
    assert b"ask_colleague" in sent

    check_prefix(sent, repeat(sent, api, action, similarity="turns"), find_none(api, sent, action))


@both_actions
@pytest.mark.parametrize("name", RECORDED)
def test_no_byte_before_recorded_newest_messages_changes(name: str, action: str) -> None:
    """Streamed, with a system prompt, several calls at once, or a choice before the messages."""
    api, sent = name.partition("_")[0], BODIES[name]

    check_prefix(sent, repeat(sent, api, action), find_none(api, sent, action))
