"""What is done now about a row, in the same words on the page and in `loopguard top`."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from extproc.cli.main import main
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.operated import Ahead, Operated, send
from tests.support.turn_writers import Did, as_chat

LOOP: dict[str, Any] = {"similarity": "turns", "limit_keys": ["header:x-user-id"]}
STEERS = policy("live", ANY, action="steer", escalate={"reject": 6}, **LOOP)
SHADOW = policy("shadow", ANY, mode="shadow", **LOOP)


def loop(made: Operated, users: str = "a", tasks: str = "1", times: int = 4) -> None:
    for user in users:
        for task in tasks:
            did = [Did((("crm", {"q": task}),), ("error: it is down",), "", f"{task}: {n}", n) for n in range(1, times + 1)]
            send(made.service, 1, json.dumps(as_chat(did)).encode(), x_user_id=user)


def read_now(made: Operated, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What the first row of the page says, and that of `top`."""
    found = re.search(r'data-name="now"><div><span[^>]*>([^<]*)<', made.read())
    with made.listen() as url:
        assert main(["top", "--once", "--admin", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(place for place, line in enumerate(lines) if line.startswith("what repeats"))
    start, end = lines[head].index("now"), lines[head].index("caller")
    assert found is not None
    return [found[1], lines[head + 1][start:end].strip()]


@pytest.mark.parametrize(
    ("policies", "ago", "kinds", "expected"),
    [
        ([STEERS], 0, [], "steer"),
        ([STEERS, SHADOW], 0, [], "steer"),
        ([SHADOW], 0, [], "(would reject)"),
        ([STEERS], 900, [], "over (steer)"),
        ([SHADOW], 900, [], "over"),
        ([STEERS], 0, ["allow", "block"], "blocked 30m"),
        ([STEERS], 0, ["block", "kill"], "killed 30m"),
        ([STEERS], 0, ["grant", "allow"], "allowed 30m"),
        ([STEERS], 0, ["grant"], "granted 30m"),
        ([STEERS], 0, ["grant", "request"], "steer"),
        ([STEERS], 0, ["release"], "released 1h01m"),
    ],
)
def test_page_and_top_show_the_same_state(
    policies: list[dict[str, Any]],
    ago: float,
    kinds: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Orders come first, but a grant or a release only until the next request; what was last done is in brackets."""
    clock, made = Ahead(monkeypatch), Operated(*policies)
    clock.seconds = -ago
    loop(made)
    for seconds, kind in enumerate(kinds, 20):  # whole minutes are left, even if this takes some seconds
        clock.seconds = seconds
        if kind == "request":
            loop(made)
        else:
            more: dict[str, Any] = {"steps": 1} if kind == "grant" else {}
            made.give(kind=kind, caller={"x-user-id": "a"}, seconds=None if kind == "release" else 1_800, **more)

    assert read_now(made, capsys) == [expected] * 2


@pytest.mark.parametrize(
    ("policies", "blocked", "expected"),
    [([STEERS], False, "wait"), ([SHADOW], False, "shadow: wait"), ([STEERS], True, "blocked 30m")],
)
def test_page_and_top_show_the_same_failing_tools(
    policies: list[dict[str, Any]], blocked: bool, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Operated(*policies)
    loop(made, "abc", "12")
    if blocked:
        made.give(kind="block", tool="crm", seconds=1_830)

    assert read_now(made, capsys) == [expected] * 2
