"""A session goes on while any of its agents does, whatever was refused."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from extproc.cli.commands.sessions import write_report
from extproc.operator.admin.reports import Selection
from extproc.operator.admin.run_report import explain_end
from extproc.operator.admin.session_report import describe_session, report_sessions
from extproc.operator.board import View
from extproc.operator.session_rows import MAX_AGENTS_SHOWN, SessionDocument
from extproc.operator.session_table import SessionTable
from extproc.store.rules.session import LIMITS, Standing
from extproc.store.rules.tree import TreeStanding
from tests.support import session_runs
from tests.support.operated import operate
from tests.support.service import make_service
from tests.support.session_limits import ask, limited, turns
from tests.support.session_runs import SESSION, TENANT, list_rows

NOW = 1_000.0


def note(table: SessionTable, now: float, agent: str = "", limit: str = "", **changes: Any) -> None:  # noqa: ANN401  # of a name
    known: dict[str, Any] = {
        "steps": 4,
        "blocks": int(bool(limit)),
        "killed": int(limit == "killed"),
    }
    place = LIMITS.index(limit) if limit else 0
    standing = Standing(
        place, 9, 8, age_ms=round(now % 1_000) * 1_000, tree=TreeStanding(8, 1), **known
    )
    session_runs.note(table, standing, now=now, agent=agent, **changes)


AGENT_LIMITS = ("max_agents", "max_concurrent_agents", "max_spawns_per_minute", "max_depth")
# Requests as seconds, agent and limit, and after how many seconds the session has ended, why.
RUNS: dict[str, tuple[list[tuple[float, str, str]], dict[int, str | None]]] = {
    **{
        f"an agent refused by {limit} ends none with active ones": (
            [(0, "one", ""), (30, "two", limit)],
            {31: None, 59: None, 61: "refused"},
        )
        for limit in AGENT_LIMITS
    },
    "nor does one without steps": (
        [(0, "one", ""), (30, "two", "max_steps")],
        {31: None, 59: None, 61: "steps"},
    ),
    "the only agent does": ([(0, "one", ""), (1, "one", "max_tool_calls")], {2: "refused"}),
    "the session itself goes on": (
        [(0, "", ""), (1, "one", "max_agents")],
        {2: None, 61: "refused"},
    ),
    "a kill ends them all": ([(0, "one", ""), (1, "two", "killed")], {2: "killed"}),
}


@pytest.mark.parametrize(("requests", "ends"), RUNS.values(), ids=RUNS)
def test_session_is_running_while_any_agent_is(
    requests: list[tuple[float, str, str]], ends: dict[int, str | None]
) -> None:
    table, shadow = SessionTable(), SessionTable()
    for seconds, agent, limit in requests:
        note(table, NOW + seconds, agent, limit)
        note(shadow, NOW + seconds, agent, limit, mode="shadow")
    (row,), (watched,) = list_rows(table), list_rows(shadow)

    assert {seconds: explain_end(row, NOW + seconds) for seconds in ends} == ends
    assert explain_end(watched, NOW + 2) is None  # shadow policies refuse nothing


def test_refused_agents_never_push_out_active_ones() -> None:
    tables = SessionTable(), SessionTable()
    for place, table in enumerate(tables):
        note(table, NOW, f"active {place}")
        for number in range(3 * MAX_AGENTS_SHOWN):
            note(table, NOW + number / 10, f"{place} {number}", "max_agents")

    (row,) = list_rows(*tables)

    assert len(row.agents) == MAX_AGENTS_SHOWN
    assert {agent.name for agent in row.agents if not agent.refused} == {"active 0", "active 1"}
    assert explain_end(row, NOW + 50) is None


def test_session_with_unpublished_agents_is_running() -> None:
    table = SessionTable()
    note(table, NOW, "one")
    note(table, NOW + 1, "two", "max_agents")
    (row,) = list_rows(table)
    row.agents, row.calls, row.events = [], [], []

    assert (explain_end(row, NOW + 2), explain_end(row, NOW + 62)) == (None, "refused")


def test_sessions_begun_by_an_agent_keep_it_running() -> None:
    table, now = SessionTable(), time.time()
    for session in ("1", "2", "3"):
        note(table, now - 30, session=session * 16)
    for session in ("1", "2"):
        note(table, now - 20, "", "max_steps", session=session * 16)
        table.link((TENANT, "p", "enforce", session * 16), [str(int(session) + 1) * 16])

    view = View(SessionDocument(list_rows(table)), "a", ["a"], "")
    report = report_sessions(view, Selection(), shows_callers=True, now=now)

    assert {session["session"][0]: session["ended"] for session in report["sessions"]} == {
        "1": None,
        "2": None,
        "3": None,
    }


def test_running_explosion_is_shown_as_active() -> None:
    table, now = SessionTable(), time.time()
    for agent in ("one", "two"):
        note(table, now, agent)
    note(table, now, "three", "max_agents")
    made = operate(table, shows=True)
    page, listed = made.read(f"/sessions/{SESSION}"), made.ask("/sessions")

    assert f"<h1>Session <code>{SESSION}</code>: 2 active agents</h1>" in page
    assert "continues, although refused: max_agents, 9 of 8" in write_report(listed)[0]


# Programs, and the headers in which they name an agent; the session itself has no name.
CLIENTS: dict[str, Callable[[str], dict[str, str]]] = {
    "claude": lambda agent: {
        "x_claude_code_session_id": "root",
        **({"x_claude_code_agent_id": agent} if agent else {}),
    },
    "codex": lambda agent: {"session_id": "root", "thread_id": agent or "root"},
    "opencode": lambda agent: (
        {"x_session_id": agent, "x_parent_session_id": "root"}
        if agent
        else {"x_session_id": "root"}
    ),
}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("limit", ["max_agents", "max_concurrent_agents", "max_spawns_per_minute"])
def test_admitted_agents_of_an_explosion_keep_running(client: str, limit: str) -> None:
    for mode in ("enforce", "shadow"):
        limits: dict[str, Any] = {limit: 2}
        service = make_service(limited(mode, **limits))
        for number, agent in enumerate(
            ["", "a", "b", *[f"more {number}" for number in range(9)], "a", "more 1"]
        ):
            ask(service, turns(1, number=str(number)), session="", **CLIENTS[client](agent))
        (row,) = SessionDocument.merge(
            [service.reporter.sessions.make_document(shows_callers=False)], time.time()
        ).rows

        session = describe_session(row, shows_callers=False)

        assert (session["ended"], session["exploding"], session["refused"]["limit"]) == (
            None,
            True,
            limit,
        )
        assert explain_end(row, time.time() + 61) == "refused"
