"""After a refusal the next request that shows something new passes: in every API, whatever is new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.support.looping import encoded
from tests.support.loops import STATELESS, WRITERS, Guard, Write
from tests.support.turn_writers import SHAPES, Did

STUCK = Did((("run", {"a": 1}),), ("error: no such file",))
OTHER = Did((("edit", {"b": 2}),), ("changed",))

every_shape = pytest.mark.parametrize("write", SHAPES.values(), ids=SHAPES)
every_writer = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)


def send(guard: Guard, body: dict[str, Any], now: float = 0) -> str:
    """What is done about a request."""
    return guard.send(encoded(body), now)


def messages_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Where a body's messages stand."""
    found: list[dict[str, Any]] = next(body[key] for key in ("messages", "input", "contents") if key in body)
    return found


def say(body: dict[str, Any], role: str, text: str) -> dict[str, Any]:
    """A body with one more message behind the others, as its API writes one."""
    if "contents" in body:
        message: dict[str, Any] = {"role": "model" if role == "assistant" else role, "parts": [{"text": text}]}
    elif "inferenceConfig" in body:
        message = {"role": role, "content": [{"text": text}]}
    else:
        message = {"role": role, "content": text}
    messages_of(body).append(message)
    return body


@every_writer
def test_words_behind_a_result_lead_back(write: Write) -> None:
    """Under `turns`, text after the newest results lets the agent continue; the same request without it stays refused."""
    guard = Guard(similarity="turns")

    assert send(guard, write([STUCK] * 3)) == "reject"
    assert send(guard, write([*[STUCK] * 2, STUCK._replace(user="Try the other branch.")])) == "allow"
    assert send(guard, write([STUCK] * 3)) == "reject"


@pytest.mark.parametrize("similarity", STATELESS)
@pytest.mark.parametrize("role", ["user", "assistant", "system", "developer"])
@every_shape
def test_a_message_leads_back(write: Write, role: str, similarity: str) -> None:
    """The user's, or what the agent itself says instead of calling again. To `turns`, what its program notes is nothing new."""
    guard = Guard(similarity=similarity)
    noted = similarity == "turns" and role in {"system", "developer"}

    assert send(guard, write([STUCK] * 3)) == "reject"
    expected = "reject" if noted else "allow"
    assert send(guard, say(write([STUCK] * 3), role, "I was stopped. Let me ask for help.")) == expected


@every_shape
def test_the_beginning_of_the_next_answer_leads_nowhere(write: Write) -> None:
    """A client may start the model's answer with a word; that is not a new message."""
    guard = Guard(similarity="turns")

    assert send(guard, say(write([STUCK] * 3), "assistant", "{")) == "reject"


@pytest.mark.parametrize("shape", ["chat", "anthropic", "bedrock"])
def test_neither_does_what_the_model_has_begun_with_before(shape: str) -> None:
    """A longer beginning is known by the answers before it, which begin with it."""
    guard = Guard(similarity="turns")
    begun = [STUCK._replace(thought="Let me think about it: once more.")] * 3

    assert send(guard, say(SHAPES[shape](begun), "assistant", "Let me think about it:")) == "reject"


@pytest.mark.parametrize("similarity", STATELESS)
@every_shape
def test_another_result_leads_back(write: Write, similarity: str) -> None:
    """The same call that brings back something new passes, and again when it brings back the same as before."""
    guard = Guard(similarity=similarity)

    assert send(guard, write([STUCK] * 4)) == "reject"
    assert send(guard, write([*[STUCK] * 3, STUCK._replace(results=("error: permission denied",))])) == "allow"


@every_writer
def test_what_changes_by_itself_leads_nowhere(write: Write) -> None:
    """A result that differs in a time or an id alone is not new."""
    guard = Guard(similarity="turns")
    turns = [STUCK._replace(results=(f"error: no such file /tmp/x{number} after {number}.2s",)) for number in range(4)]

    assert send(guard, write(turns)) == "reject"


@every_writer
def test_new_calls_that_bring_the_same_error_lead_nowhere(write: Write) -> None:
    """Whatever is tried: as long as the same error comes back, the request stays refused; a result without it passes."""
    guard = Guard(similarity="turns")
    tried = [Did((("run", {"a": number}),), ("error: no such file",)) for number in range(8)]

    assert [send(guard, write(tried[:times])) for times in (5, 6, 7, 8)] == ["allow", "reject", "reject", "reject"]
    assert send(guard, write([*tried[:6], Did((("run", {"a": 9}),), ("done",))])) == "allow"


@pytest.mark.parametrize("similarity", STATELESS)
@every_shape
def test_a_cooldown_holds_while_the_newest_turn_is_the_one_that_tripped_it(write: Write, similarity: str) -> None:
    """In a history that is too short to be a loop as well; another turn passes, and so do words behind it."""
    guard = Guard(similarity=similarity, cooldown_seconds=60)
    attempts: Sequence[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("reject", lambda: write([STUCK] * 3)),
        ("reject", lambda: write([STUCK])),
        ("allow", lambda: write([STUCK, OTHER])),
        ("allow", lambda: write([STUCK._replace(user="Try the other branch.")])),
        ("allow", lambda: write([STUCK._replace(results=("found",))])),
        ("allow", lambda: write([Did((*STUCK.calls, *OTHER.calls), (*STUCK.results, *OTHER.results))])),
        ("allow", lambda: write([Did((*OTHER.calls, *STUCK.calls), (*OTHER.results, *STUCK.results))])),
        ("reject", lambda: write([OTHER, STUCK])),
    ]

    assert [send(guard, made()) for _, made in attempts] == [expected for expected, _ in attempts]
    assert send(guard, write([STUCK]), 61) == "allow"
