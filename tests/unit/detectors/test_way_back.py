"""After a refusal the next request that shows something new passes: in every API, whatever is new."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.looping import encoded
from tests.support.loops import STATELESS, WRITERS, Guard, Write
from tests.support.told import tell
from tests.support.turn_writers import SHAPES, Did

STUCK = Did((("run", {"a": 1}),), ("error: no such file",))
OTHER = Did((("edit", {"b": 2}),), ("changed",))

every_shape = pytest.mark.parametrize("write", SHAPES.values(), ids=SHAPES)
every_writer = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)


def act(body: dict[str, Any], similarity: str = "turns") -> str:
    """What is done about a request."""
    return tell(body, similarity=similarity).action


def say(body: dict[str, Any], role: str, text: str) -> dict[str, Any]:
    """A body with one more message behind the others, as its API writes one."""
    if "contents" in body:
        message: dict[str, Any] = {"role": "model" if role == "assistant" else role, "parts": [{"text": text}]}
    elif "inferenceConfig" in body:
        message = {"role": role, "content": [{"text": text}]}
    else:
        message = {"role": role, "content": text}
    messages = next(body[key] for key in ("messages", "input", "contents") if key in body)
    messages.append(message)
    return body


@every_writer
def test_words_behind_a_result_lead_back(write: Write) -> None:
    """Under `turns`, text after the newest results lets the agent continue; the same request without it stays refused."""
    said = STUCK._replace(user="Try the other branch.")

    assert [act(write(turns)) for turns in ([STUCK] * 3, [STUCK, STUCK, said], [STUCK, said, STUCK])] == [
        "reject",
        "allow",
        "allow",
    ]


@pytest.mark.parametrize("similarity", STATELESS)
@pytest.mark.parametrize("role", ["user", "assistant", "system", "developer"])
@every_shape
def test_a_message_leads_back(write: Write, role: str, similarity: str) -> None:
    """The user's, or what the agent itself says instead of calling again. To `turns`, what its program notes is nothing new."""
    noted = similarity == "turns" and role in {"system", "developer"}
    body = say(write([STUCK] * 3), role, "I was stopped. Let me ask for help.")

    assert act(body, similarity) == ("reject" if noted else "allow")


@pytest.mark.parametrize("shape", SHAPES)
def test_the_beginning_of_the_next_answer_leads_nowhere(shape: str) -> None:
    """A client may start the model's answer with a word, or with more, which is known by the answers before that begin so."""
    begun = [STUCK._replace(thought="Let me think about it: once more.")] * 3

    assert act(say(SHAPES[shape]([STUCK] * 3), "assistant", "{")) == "reject"
    if shape in {"chat", "anthropic", "bedrock"}:
        assert act(say(SHAPES[shape](begun), "assistant", "Let me think about it:")) == "reject"


@pytest.mark.parametrize("similarity", STATELESS)
@every_shape
def test_another_result_leads_back(write: Write, similarity: str) -> None:
    """The same call that brings back something new passes."""
    assert act(write([STUCK] * 4), similarity) == "reject"
    assert act(write([*[STUCK] * 3, STUCK._replace(results=("error: permission denied",))]), similarity) == "allow"


@every_writer
def test_new_calls_that_bring_the_same_error_lead_nowhere(write: Write) -> None:
    """Whatever is tried: as long as the same error comes back, the request stays refused; a result without it passes."""
    tried = [Did((("run", {"a": number}),), ("error: no such file",)) for number in range(8)]

    assert [act(write(tried[:times])) for times in (5, 6, 7, 8)] == ["allow", "reject", "reject", "reject"]
    assert act(write([*tried[:6], Did((("run", {"a": 9}),), ("done",))])) == "allow"


@pytest.mark.parametrize("similarity", STATELESS)
@every_shape
def test_a_cooldown_holds_while_the_newest_turn_is_the_one_that_tripped_it(write: Write, similarity: str) -> None:
    """In a history that is too short to be a loop as well; another turn passes, and so do words behind it."""
    guard = Guard(similarity=similarity, cooldown_seconds=60)
    attempts: Sequence[tuple[str, list[Did]]] = [
        ("reject", [STUCK] * 3),
        ("reject", [STUCK]),
        ("allow", [STUCK, OTHER]),
        ("allow", [STUCK._replace(user="Try the other branch.")]),
        ("allow", [STUCK._replace(results=("found",))]),
        ("allow", [Did((*STUCK.calls, *OTHER.calls), (*STUCK.results, *OTHER.results))]),
        ("allow", [Did((*OTHER.calls, *STUCK.calls), (*OTHER.results, *STUCK.results))]),
        ("reject", [OTHER, STUCK]),
    ]

    assert [guard.send(encoded(write(turns))) for _, turns in attempts] == [expected for expected, _ in attempts]
    assert guard.send(encoded(write([STUCK])), 61) == "allow"
