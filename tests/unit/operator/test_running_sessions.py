"""A session goes on while any of its agents does, whatever was refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from extproc.cli.commands.sessions import write_report
from extproc.operator.admin.reports import Selection
from extproc.operator.admin.run_report import explain_end
from extproc.operator.admin.session_report import describe_session, report_sessions
from extproc.operator.agents import MAX_SHOWN
from extproc.operator.board import View, unpack_all
from extproc.operator.session_rows import SessionDocument, SessionRow, merge_sessions
from extproc.operator.session_table import SessionTable
from extproc.store.rules.session import LIMITS, Standing
from extproc.store.rules.tree import TreeStanding
from tests.support.operated import operate
from tests.support.service import make_service
from tests.support.session_limits import ask, limited, turns

TENANT, SESSION = "a" * 16, "5" * 16
NOW = 1_000.0


def note(table: SessionTable, now: float, agent: str = "", limit: str = "", **changes: Any) -> None:  # noqa: ANN401  # of a request
    """One request of an agent of the session, which a limit may refuse."""
    standing = changes.pop("standing", None) or Standing(
        LIMITS.index(limit) if limit else 0,
        9,
        8,
        steps=4,
        blocks=int(bool(limit)),
        age_ms=round(now % 1_000) * 1_000,
        tree=TreeStanding(8, 1),
    )
    name = {"tenant": TENANT, "policy": "p", "mode": "enforce", "session": SESSION, **changes}
    table.note(
        (name["tenant"], name["policy"], name["mode"], name["session"]), [], standing, "m", (), agent.encode(), now, agent=agent
    )


def merge(*tables: SessionTable) -> list[SessionRow]:
    """What replicas with these tables know together, through their boards."""
    packed = {str(place): table.make_document(shows_callers=True).pack() for place, table in enumerate(tables)}
    return merge_sessions((row for document in unpack_all(packed, SessionDocument).values() for row in document.rows), 0)


def explain(table: SessionTable, now: float) -> str | None:
    """Why the only session ended."""
    (row,) = merge(table)
    return explain_end(row, now)


@pytest.mark.parametrize("limit", ["max_agents", "max_concurrent_agents", "max_spawns_per_minute", "max_depth", "max_steps"])
def test_refused_agents_end_no_session_with_active_ones(limit: str) -> None:
    """Until the last of them has been quiet for a minute."""
    table = SessionTable()
    note(table, NOW, "one")
    note(table, NOW + 30, "two", limit)

    assert [explain(table, NOW + seconds) for seconds in (31, 59, 61)] == [
        None, None, "steps" if limit == "max_steps" else "refused",
    ]  # fmt: skip


def test_only_agent_that_is_refused_ends_the_session() -> None:
    """Its earlier requests keep nothing running."""
    table = SessionTable()
    note(table, NOW, "one")
    note(table, NOW + 1, "one", "max_tool_calls")

    assert explain(table, NOW + 2) == "refused"


def test_session_itself_goes_on_when_its_agent_is_refused() -> None:
    """What has no agent's name is the session itself, which no limit of agents refuses."""
    table = SessionTable()
    note(table, NOW)
    note(table, NOW + 1, "one", "max_agents")

    assert (explain(table, NOW + 2), explain(table, NOW + 61)) == (None, "refused")


def test_shadow_refusals_end_no_session() -> None:
    """They refuse nothing, and the session goes on for as long as it sends requests."""
    table = SessionTable()
    note(table, NOW, mode="shadow")
    note(table, NOW + 1, "", "max_steps", mode="shadow")
    note(table, NOW + 1, mode="shadow", standing=Standing(1, steps=4, killed=1))

    assert explain(table, NOW + 2) is None


def test_kill_ends_a_session_with_active_agents() -> None:
    """Each of them is refused from then on."""
    table = SessionTable()
    note(table, NOW, "one")
    note(table, NOW + 1, "two", standing=Standing(1, steps=4, killed=1))

    assert explain(table, NOW + 2) == "killed"


def test_refused_agents_never_push_out_active_ones() -> None:
    """On neither of two replicas, and not when their rows are merged, however many agents are refused."""
    tables = SessionTable(), SessionTable()
    for place, table in enumerate(tables):
        note(table, NOW, f"active {place}")
        for number in range(3 * MAX_SHOWN):
            note(table, NOW + number / 10, f"{place} {number}", "max_agents")

    (row,) = merge(*tables)

    assert len(row.agents) == MAX_SHOWN
    assert {agent.name for agent in row.agents if not agent.refused} == {"active 0", "active 1"}
    assert explain_end(row, NOW + 50) is None


def test_session_whose_agents_did_not_fit_is_not_called_ended() -> None:
    """Which agents are active is unknown then."""
    table = SessionTable()
    note(table, NOW, "one")
    note(table, NOW + 1, "two", "max_agents")
    (row,) = merge(table)
    row.agents, row.calls, row.events = [], [], []

    assert (explain_end(row, NOW + 2), explain_end(row, NOW + 62)) == (None, "refused")


def test_sessions_begun_by_an_agent_keep_it_running() -> None:
    """An agent may be known by its first words alone: it is a session of its own, and may have begun others."""
    table, now = SessionTable(), time.time()
    for session in ("1", "2", "3"):
        note(table, now - 30, session=session * 16, standing=Standing(steps=1))
    for session in ("1", "2"):
        note(table, now - 20, "", "max_steps", session=session * 16)
        table.link((TENANT, "p", "enforce", session * 16), [str(int(session) + 1) * 16])

    view = View(SessionDocument(merge(table)), "a", ["a"], "")
    report = report_sessions(view, Selection(), shows_callers=True, now=now)

    assert {session["session"][0]: session["ended"] for session in report["sessions"]} == {"1": None, "2": None, "3": None}


def test_running_explosion_is_not_headed_refused() -> None:
    """The page of the session says how many agents are active, and the command that it goes on."""
    table, now = SessionTable(), time.time()
    for agent in ("one", "two"):
        note(table, now, agent)
    note(table, now, "three", "max_agents")
    made = operate(table, shows=True)
    page, listed = made.read(f"/sessions/{SESSION}"), made.ask("/sessions")

    assert f"<h1>Session <code>{SESSION}</code>: 2 active agents</h1>" in page
    assert "goes on, although refused: max_agents, 9 of 8" in write_report(listed)[0]


CLIENTS: dict[str, Callable[[str], dict[str, str]]] = {
    "claude": lambda agent: {"x_claude_code_session_id": "root", **({"x_claude_code_agent_id": agent} if agent else {})},
    "codex": lambda agent: {"session_id": "root", "thread_id": agent or "root"},
    "opencode": lambda agent: {"x_session_id": agent, "x_parent_session_id": "root"} if agent else {"x_session_id": "root"},
}
"""Programs, and the headers in which they name an agent; the session itself has no name."""


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("limit", ["max_agents", "max_concurrent_agents", "max_spawns_per_minute"])
def test_explosion_of_a_real_programs_agents_goes_on(client: str, limit: str) -> None:
    """Agents that were let in work, whatever is refused around them; in shadow mode as well."""
    for mode in ("enforce", "shadow"):
        limits: dict[str, Any] = {limit: 2}
        service = make_service(limited(mode, **limits))
        for number, agent in enumerate(["", "a", "b", *[f"more {number}" for number in range(9)], "a", "more 1"]):
            ask(service, turns(1, number=str(number)), session="", **CLIENTS[client](agent))
        (row,) = SessionDocument.merge([service.reporter.sessions.make_document(shows_callers=False)], time.time()).rows

        session = describe_session(row, shows_callers=False)

        assert (session["ended"], session["exploding"], session["refused"]["limit"]) == (None, True, limit)
        assert explain_end(row, time.time() + 61) == "refused"
