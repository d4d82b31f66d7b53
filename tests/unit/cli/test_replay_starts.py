"""`loopguard replay` and `loopguard explain` judge starts of conversations as the gateway does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.main import main
from tests.support.access_logs import USER, make_record, write_lines
from tests.support.documents import bundle
from tests.support.engine import ANY
from tests.support.messages import body, headers
from tests.support.service import decoded, exchange, make_service
from tests.support.session_limits import status

CHAT = "/v1/chat/completions"
LIMITED = {"id": "p", "spec": {"selector": ANY, **USER, "session_limits": {"max_steps": 9}, "unnamed_limits": {"max_steps": 2}}}


def write(text: str, turns: int = 0) -> dict[str, Any]:
    """A request that shows this many turns."""
    messages = [{"role": "user", "content": text}]
    for number in range(turns):
        messages += [{"role": "assistant", "content": f"step {number}"}, {"role": "user", "content": "go on"}]
    return {"model": "m", "messages": messages}


TRAFFIC = [write(f"Task {number}", turns) for number in range(4) for turns in range(3)] + [write(text) for text in "abcd"]
"""Four conversations, then four single requests, of which two are too many."""


def test_replay_refuses_what_the_gateway_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Conversations that go on leave room for others in both."""
    (tmp_path / "p.json").write_text(json.dumps(bundle(LIMITED)))
    lines = [make_record(at) | {"path": CHAT, "body": sent} for at, sent in enumerate(TRAFFIC)]
    (tmp_path / "log").write_bytes(write_lines(lines))
    service = make_service(LIMITED)

    assert main(["replay", "--policy", str(tmp_path / "p.json"), "--json", str(tmp_path / "log")]) == 0
    replayed = json.loads(capsys.readouterr().out)["policies"][0]
    sent = [exchange(service, headers(CHAT, x_user_id="ann"), body(json.dumps(each).encode()))[-1] for each in TRAFFIC]

    assert [status(decoded(answer)) for answer in sent] == [200] * 14 + [429] * 2
    assert (replayed["requests"], replayed["refused"]) == (16, 2)


@pytest.mark.parametrize("turns", [0, 1])
def test_explain_shows_both_limits_of_a_start(turns: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of its session, and those that it shares until it goes on."""
    (tmp_path / "p.json").write_text(json.dumps(LIMITED))
    data = json.dumps(write("Hi", turns))

    asked = ["explain", "--policy", str(tmp_path / "p.json"), "-X", "POST", "-H", "x-user-id: ann", "-d", data]
    assert main([*asked, f"http://localhost{CHAT}"]) == 0

    shown = capsys.readouterr().out
    assert "up to 9 steps, then reject" in shown
    assert ("unnamed" in shown) == ("up to 2 steps, then reject" in shown) == (turns == 0)
