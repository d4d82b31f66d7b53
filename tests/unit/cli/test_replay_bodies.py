"""`loopguard replay` of records with bodies: every detector, session limits and budgets; without bodies, `exact` alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.main import main
from tests.support.access_logs import USER, make_record, write_lines
from tests.support.budget_policies import bucket, limited
from tests.support.documents import bundle, policy
from tests.support.engine import ANY
from tests.support.messages import body, headers
from tests.support.service import decoded, exchange, make_service, metadata_of
from tests.support.turn_writers import Did, as_chat

pytestmark = pytest.mark.compiled  # logs are judged by what is compiled

STUCK = Did((("search", {"q": "a"}),), ("error: no such index",))
CHAT = "/v1/chat/completions"
SESSION: dict[str, Any] = {"keys": ["header:x-run"]}
POLICIES = {
    "turns": policy("p", ANY, similarity="turns", **USER),
    "tool_calls": policy("p", ANY, similarity="tool_calls", **USER),
    "session_limits": {
        "id": "p",
        "spec": {"selector": ANY, **USER, "session": SESSION, "session_limits": {"max_tool_calls": 3}},
    },
    "budgets": limited(bucket(0.001, 3, keys=["header:x-user-id"])),
}


def replay(folder: Path, capsys: pytest.CaptureFixture[str], document: dict[str, Any], lines: list[Any]) -> dict[str, Any]:
    """What became of the only policy."""
    (folder / "p.json").write_text(json.dumps(bundle(document)))
    (folder / "log").write_bytes(write_lines(lines))
    assert main(["replay", "--policy", str(folder / "p.json"), "--json", str(folder / "log")]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["policies"][0]
    return found


@pytest.mark.parametrize("kind", POLICIES)
def test_records_with_bodies_are_judged_whole(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fourth request is refused, by whichever guard."""
    bodies = [as_chat([STUCK._replace(number=number) for number in range(count)]) for count in range(1, 5)]
    sent = {"path": CHAT, "headers": {"x-user-id": "ann", "x-run": "r"}}
    lines = [make_record(place) | sent | {"body": shown} for place, shown in enumerate(bodies)]

    found = replay(tmp_path, capsys, POLICIES[kind], lines)

    assert (found["requests"], found["uncounted"]) == (4, {})
    assert found["refused"] >= 1


@pytest.mark.parametrize("kind", ["turns", "session_limits"])
def test_access_log_counts_nothing_that_needs_bodies(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report says why, and refuses nothing."""
    service = make_service(POLICIES[kind], record=True)
    content = json.dumps(as_chat([STUCK] * 5)).encode()
    answers = [exchange(service, headers(CHAT, x_user_id="ann", x_run="r"), body(content))[-1] for _ in range(3)]
    lines = [{"loop_record": metadata_of(decoded(answer))["record"]} for answer in answers]

    found = replay(tmp_path, capsys, POLICIES[kind], lines)

    assert found["uncounted"] == {"no_body": 3}
    assert found["refused"] == 0
