"""Records: what requests with equal heads share."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.bounded import Memo
from extproc.engine import recording
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.recorded import Recorder

pytestmark = pytest.mark.sources  # it looks into a cache, and `Recorder` replaces a method

CHAT = "/v1/chat/completions"
ANN = {"authorization": "Bearer sk-secret", "x_user_id": "ann"}


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> Memo[tuple[object, ...], recording.RecordedHead]:
    """What is kept of heads."""
    kept: Memo[tuple[object, ...], recording.RecordedHead] = Memo(100)
    monkeypatch.setattr(recording, "_HEADS", kept)
    return kept


def make_recorder() -> Recorder:
    """A replica whose policies read a secret, a header and a parameter."""
    keys = ["credential", "header:x-user-id", "query:team"]
    return Recorder(policy("one", ANY, limit_keys=keys, missing_descriptor="share"), policy("two", ANY, limit_keys=keys[1:]))


def test_equal_heads_are_kept_once(heads: Memo[Any, Any]) -> None:
    """Requests of one caller share what is known before the body; all else is each request's own."""
    recorder = make_recorder()

    first, second = (recorder.send({"number": number}, CHAT, **ANN) for number in (1, 2))

    assert len(heads) == 1
    assert {name: value for name, value in first.items() if value != second[name]}.keys() <= {
        "time", "body_crc32", "body_adler32",
    }  # fmt: skip
    assert first["headers"].keys() == {"authorization", "x-user-id"}


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        (CHAT, ANN | {"x_user_id": "bob"}),
        (CHAT, ANN | {"authorization": "Bearer sk-other"}),
        (CHAT, {"x_user_id": "ann"}),
        (f"{CHAT}?team=red", ANN),
        ("/v1/responses", ANN),
    ],
)
def test_other_heads_have_records_of_their_own(path: str, sent: dict[str, str], heads: Memo[Any, Any]) -> None:
    """Whatever a policy reads tells them apart."""
    recorder, other = make_recorder(), make_recorder()
    recorder.send({}, CHAT, **ANN)

    found = recorder.send({}, path, **sent)

    heads._young.clear()
    wanted = other.send({}, path, **sent)
    assert {**found, "time": 0} == {**wanted, "time": 0}


@pytest.mark.parametrize("path", [CHAT, f"{CHAT}?key=sk-secret", f"{CHAT}?k%65y=sk-secret"])
def test_no_secret_is_kept(path: str, heads: Memo[Any, Any]) -> None:
    """Secrets do not outlive their requests, not even in a key."""
    recorder = make_recorder()

    recorder.send({}, path, **ANN)

    assert "sk-secret" not in repr([(key, head.values, head.written) for key, head in heads._young.items()])
