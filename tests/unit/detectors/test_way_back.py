"""After a refusal, the next request that shows something new passes."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.loops import STATELESS, Guard, Write
from tests.support.messages import encoded
from tests.support.told import tell
from tests.support.turn_writers import SHAPES, Did

STUCK = Did((("run", {"a": 1}),), ("error: no such file",))
OTHER = Did((("edit", {"b": 2}),), ("changed",))

every_shape = pytest.mark.parametrize("write", SHAPES.values(), ids=SHAPES)


def act(body: dict[str, Any], similarity: str = "turns") -> str:
    return tell(body, similarity=similarity).action


def say(body: dict[str, Any], role: str, text: str) -> dict[str, Any]:
    """A body with one more message, as its API writes one."""
    if "contents" in body:
        message: dict[str, Any] = {
            "role": "model" if role == "assistant" else role,
            "parts": [{"text": text}],
        }
    elif "inferenceConfig" in body:
        message = {"role": role, "content": [{"text": text}]}
    else:
        message = {"role": role, "content": text}
    messages = next(body[key] for key in ("messages", "input", "contents") if key in body)
    messages.append(message)
    return body


@pytest.mark.parametrize("similarity", STATELESS)
@pytest.mark.parametrize("role", ["user", "assistant", "system", "developer"])
@every_shape
def test_new_message_ends_a_loop(write: Write, role: str, similarity: str) -> None:
    """To `turns`, a note of the program (`system`, `developer`) is nothing new."""
    noted = similarity == "turns" and role in {"system", "developer"}
    body = say(write([STUCK] * 3), role, "I was stopped. Let me ask for help.")

    assert act(body, similarity) == ("reject" if noted else "allow")


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_ends_no_loop(shape: str) -> None:
    begun = [STUCK._replace(thought="Let me think about it: once more.")] * 3

    assert act(say(SHAPES[shape]([STUCK] * 3), "assistant", "{")) == "reject"
    if shape in {"chat", "anthropic", "bedrock"}:
        assert act(say(SHAPES[shape](begun), "assistant", "Let me think about it:")) == "reject"


@pytest.mark.parametrize("similarity", STATELESS)
@every_shape
def test_cooldown_lasts_while_newest_turn_is_same(write: Write, similarity: str) -> None:
    """A history that is too short to be a loop stays refused; another turn or words pass."""
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

    assert [guard.send(encoded(write(turns))) for _, turns in attempts] == [
        expected for expected, _ in attempts
    ]
    assert guard.send(encoded(write([STUCK])), 61) == "allow"
