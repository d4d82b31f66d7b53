"""The page and `loopguard top` agree on what costs money, and on what is done about a row."""

import json
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest

from extproc.cli.main import main
from extproc.decision import ToolFailure
from extproc.ext_proc.service import Service
from extproc.operator.admin.budget_report import describe_budget
from extproc.operator.admin.row_states import is_healthy, list_burning
from extproc.operator.admin.run_report import is_exploding
from extproc.operator.budget_rows import BudgetRow
from extproc.operator.session_table import SessionTable
from extproc.sessions.rates import Usage
from extproc.store.rules.budget import BUCKET, PERIOD
from extproc.store.rules.session import LIMITS, Standing
from extproc.store.rules.tree import TreeStanding
from tests.support.budget_policies import ask, bucket, limited
from tests.support.command import find_missing
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.messages import body, headers
from tests.support.operated import Ahead, Operated, send
from tests.support.pages import Outline
from tests.support.service import exchange, make_service
from tests.support.session_limits import (
    ask as ask_session,
    limited as session_limited,
    settle as settle_session,
    turns,
)
from tests.support.session_runs import SESSION, TENANT, note
from tests.support.turn_writers import Did, as_chat


def note_agents(
    table: SessionTable, agents: Sequence[tuple[str, str]], *, mode: str = "enforce"
) -> None:
    for agent, limit in agents:
        standing = Standing(
            LIMITS.index(limit) if limit else 0, 9, 8, steps=4, cost=10**9, tree=TreeStanding(2, 7)
        )
        note(table, standing, now=time.time(), agent=agent, policy="agents", mode=mode, caller=[])


def make_night() -> Service:
    """A loop, a failing tool, an explosion of agents, a used-up budget and a healthy one."""
    service = make_service(
        policy(
            "loops",
            {"pathPrefix": "/hook"},
            threshold_identical_requests=2,
            limit_keys=["header:x-user-id"],
        ),
        limited(bucket(0.001, 2, keys=["header:x-user-id"]), identity="team"),
        show_callers=True,
    )
    for _ in range(3):
        exchange(service, headers("/hook", x_user_id="storm"), body(b"{}"))
    for user, times in (("runner", 3), ("walker", 1)):
        for _ in range(times):
            ask(service, x_user_id=user)
    failing = service.reporter.incidents.find("loops", ToolFailure("<script>crm", "0" * 16), TENANT)
    for number in range(6):
        failing.note(f"{number:016x}", f"{number:016x}", time.time(), refused=True)
    note_agents(service.reporter.sessions, [("one", ""), ("two", ""), ("three", "max_agents")])
    return service


@pytest.mark.slow
def test_page_headline_has_everything_that_burns_money() -> None:
    made = Operated(services=[make_night()])
    text, other = made.read(), made.read(policy="other")

    assert (
        find_missing(
            text,
            "<h1>1 active loop, 1 failing tool, 1 explosion of agents, 1 used-up budget</h1>",
            "<title>4 active",
        )
        == []
    )
    names = ["Failing tools", "Explosions of agents", "Budgets", "Loops", "Sessions"]
    assert [name for name in re.findall("<h2>([^<]*)</h2>", text) if name in names] == names
    failing = text.partition("<h2>Failing tools</h2>")[2].partition("<h2>")[0]
    assert [failing.count(part) for part in ('<tbody class="row"', "loopguard block --tool ")] == [
        1,
        1,
    ]
    assert (
        find_missing(
            failing,
            "fails for 6 sessions of 6 callers",
            '<td class="number" data-name="not refused">2</td>',
        )
        == []
    )
    assert Outline(text).elements.count("script") == 1
    assert "Failing tools" not in other
    section = text.partition("<h2>Explosions of agents</h2>")[2].partition("<h2>")[0]
    assert (
        find_missing(
            section,
            '<b>2 active agents</b> of 2, <span class="reject">7 requests refused</span>',
            f"loopguard kill --caller {TENANT} --session {SESSION}",
        )
        == []
    )
    budgets = text.partition("<h2>Budgets</h2>")[2].partition("<h2>")[0]
    tight, _, healthy = budgets.partition("<details")
    assert ("runner" in tight, "walker" in tight) == (True, False)
    assert find_missing(healthy, "2 healthy budgets</summary>", "walker") == []


def test_no_active_loops_is_said_if_nothing_else_burns(capsys: pytest.CaptureFixture[str]) -> None:
    made = Operated(limited(bucket(0.001, 2, keys=["header:x-user-id"])))
    ask(made.service, x_user_id="walker")
    calm = made.read()
    for _ in range(3):
        ask(made.service, x_user_id="runner")
    with made.listen() as url:
        assert main(["top", "--once", "--admin", url]) == 0

    assert "<h1>No active loops</h1>" in calm
    assert "<h1>1 used-up budget</h1>" in made.read()
    assert (
        capsys.readouterr().out.splitlines()[1]
        == "no loop in the last hour, 1 used-up budget; 1 replica"
    )


def test_top_has_everything_that_burns_money(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with Operated(services=[make_night()]).listen() as url:
        assert main(["top", "--once", "--commands", "--admin", url]) == 0
    printed = capsys.readouterr().out

    assert (
        "1 of 1 loop active, 1 failing tool, 1 explosion of agents, 1 used-up budget, 1 caller; 1 "
        "replica"
    ) in printed
    assert re.search(
        rf"^2 agents, 7 refused +[0-9]s reject +{TENANT} +\$1\.00", printed, re.MULTILINE
    )
    assert re.search(r"^ +2 healthy budgets$", printed, re.MULTILINE)
    assert f"loopguard kill --caller {TENANT} --session {SESSION} --admin {url}" in printed
    assert "walker" not in printed


@pytest.mark.parametrize(("mode", "now"), [("enforce", "steer"), ("shadow", "(would steer)")])
def test_growing_session_is_shown_until_it_compacts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, mode: str, now: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    made = Operated(session_limited(mode, max_input_growth=3))

    def show(number: int, tokens: int) -> tuple[str, ...]:
        answer = ask_session(made.service, turns(number))
        settle_session(made.service, answer, Usage(tokens, 9))
        ask_session(made.service, turns(number + 1))
        with made.listen() as url:
            for command in ("top", "doctor", "sessions"):
                main([command, "--admin", url])
        return capsys.readouterr().out, made.read()

    calm = show(1, 12_000)
    told, page = show(3, 39_600)
    compacted = show(5, 14_000)

    assert re.search(rf"^input 3\.3x its first +[0-9]s {re.escape(now)} ", told, re.MULTILINE)
    assert "no loop in the last hour, 1 growing session; 1 replica" in told
    assert re.search(
        r"note: agents: 1 of [0-9]+ requests \(grown input\) are in sessions whose input", told
    )
    assert "<h1>1 growing session</h1>" in page
    assert "<b>3.3</b> times its first input</div>" in page
    assert ["growing" in text or "x its first" in text for text in (*calm, *compacted)] == [
        False
    ] * 4


@pytest.mark.parametrize(
    ("agents", "mode", "allowed", "exploding"),
    [
        ([("one", ""), ("two", "max_agents")], "enforce", 0, True),
        ([("one", ""), ("two", "max_spawns_per_minute")], "shadow", 0, True),
        ([("one", ""), ("two", "")], "enforce", 0, False),
        ([("one", ""), ("two", "max_steps")], "enforce", 0, False),
        ([(f"{number}", "") for number in range(32)], "enforce", 0, True),
        ([(f"{number}", "") for number in range(31)], "enforce", 0, False),
        ([(f"{number}", "") for number in range(40)], "enforce", 100, False),
    ],
)
def test_explosion_is_more_agents_than_allowed_or_usual(
    agents: list[tuple[str, str]], mode: str, allowed: int, exploding: bool
) -> None:
    table = SessionTable()
    note_agents(table, agents, mode=mode)
    (row,) = table.make_document(shows_callers=True).rows
    row.limits = [("max_agents", "", allowed)] if allowed else []

    assert (is_exploding(row, time.time()), is_exploding(row, time.time() + 61)) == (
        exploding,
        False,
    )


def make_budget(**changes: Any) -> BudgetRow:  # noqa: ANN401  # fields of a row
    """A budget of 1,000 tokens a day, of which 200 are left."""
    fields: dict[str, Any] = {
        "kind": PERIOD,
        "limit": 1_000,
        "span": 86_400_000,
        "start": 1_000_000,
        "left": 200,
        "told": 1_010.0,
        "last": 1_010.0,
        "requests": 9,
    }
    return BudgetRow(TENANT, "p", "enforce", "r", "1d", **{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "used_up", "healthy"),
    [
        ({"left": 0}, True, False),
        ({"left": 300}, False, True),
        ({"left": 200}, False, False),
        (
            {"left": 900, "refused": 1, "refused_at": 1_010.0, "asked": 950},
            True,
            False,
        ),  # every request asks for as much
        (
            {"left": 900, "refused": 1, "refused_at": 1_009.0, "asked": 950},
            False,
            False,
        ),  # a smaller one has passed since
        (
            {
                "kind": BUCKET,
                "rate": 1,
                "left": 900,
                "refused": 1,
                "refused_at": 1_010.0,
                "asked": 950,
            },
            False,
            False,
        ),  # it fills
    ],
)
def test_budget_smaller_than_the_refused_request_is_used_up(
    changes: dict[str, Any], used_up: bool, healthy: bool
) -> None:
    row = describe_budget(make_budget(**changes), 1_011.0, shows_callers=False)

    assert (row["used_up"], is_healthy(row)) == (used_up, healthy)


def test_words_for_what_burns_agree_with_their_numbers() -> None:
    assert list_burning(0, 0, 0, None) == []
    assert list_burning(1, 2, 1, {"used_up": 1_000, "open_breakers": 1}) == [
        "1 failing tool", "2 explosions of agents", "1 growing session", "1,000 used-up budgets",
        "1 open breaker",
    ]  # fmt: skip


# What is done now


LOOP: dict[str, Any] = {"similarity": "turns", "limit_keys": ["header:x-user-id"]}
STEERS = policy("live", ANY, action="steer", escalate={"reject": 6}, **LOOP)
SHADOW = policy("shadow", ANY, mode="shadow", **LOOP)


def loop(made: Operated, users: str = "a", tasks: str = "1", times: int = 4) -> None:
    for user in users:
        for task in tasks:
            did = [
                Did((("crm", {"q": task}),), ("error: it is down",), "", f"{task}: {n}", n)
                for n in range(1, times + 1)
            ]
            send(made.service, 1, json.dumps(as_chat(did)).encode(), x_user_id=user)


def read_now(made: Operated, capsys: pytest.CaptureFixture[str]) -> list[str]:
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
    """Orders come first, but a grant or a release only until the next request."""
    clock, made = Ahead(monkeypatch), Operated(*policies)
    clock.seconds = -ago
    loop(made)
    # Whole minutes are left, even if this takes some seconds
    for seconds, kind in enumerate(kinds, 20):
        clock.seconds = seconds
        if kind == "request":
            loop(made)
        else:
            more: dict[str, Any] = {"steps": 1} if kind == "grant" else {}
            made.give(
                kind=kind,
                caller={"x-user-id": "a"},
                seconds=None if kind == "release" else 1_800,
                **more,
            )

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
