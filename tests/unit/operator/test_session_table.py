"""The table of sessions: its rows, its bounds, how replicas merge it, and what operators see."""

import json
import random
import re
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest

from extproc.cli.main import main
from extproc.engine.orders import GRANT, ActiveOverride, Grant, Target
from extproc.errors import LoopguardError
from extproc.operator.admin.client import AdminClient
from extproc.operator.admin.reports import Selection
from extproc.operator.admin.run_report import describe_steps, explain_end, order_timeline
from extproc.operator.admin.session_report import describe_session, report_sessions
from extproc.operator.board import View, unpack_all
from extproc.operator.session_rows import MAX_CALLS, SessionDocument, SessionRow
from extproc.operator.session_table import SessionTable
from extproc.operator.table import MAX_ROWS
from extproc.store.rules.documents import MAX_DOCUMENT
from extproc.store.rules.session import LIMITS, Standing
from tests.support.command import find_misfits, find_missing
from tests.support.operated import operate
from tests.support.pages import Outline
from tests.support.session_runs import SESSION, TENANT, USAGE, list_rows, name_call, note, settle

OTHER = "b" * 16
DOLLAR = 10**9
SEARCH = b"srch"


def report(*rows: SessionRow, shown: bool = True, **selection: Any) -> dict[str, Any]:  # noqa: ANN401  # fields of a selection
    view = View(SessionDocument(list(rows)), "a", ["a"], "")
    return report_sessions(view, Selection(**selection), shows_callers=shown, now=2_000.0)


# What is known of a run


def test_session_row_has_newest_counts_and_calls() -> None:
    table = SessionTable()
    note(table, Standing(steps=1, reserved=7, age_ms=0), 1, now=1_000)
    note(
        table,
        Standing(steps=2, tool_calls=1, age_ms=5_000, tools=((SEARCH, "search", 1),)),
        2,
        now=1_005,
    )
    settle(
        table,
        Standing(steps=2, tool_calls=1, cost=3 * DOLLAR, estimated=DOLLAR, age_ms=6_000),
        1,
        now=1_006,
        status=503,
    )

    (session,) = report(*list_rows(table))["sessions"]

    assert (
        session
        | {
            "total_step_count": 2,
            "total_tool_calls": 1,
            "actual_cost": 3,
            "estimated_cost": 1,
            "reserved_cost": 0,
            "started": "1970-01-01T00:16:40Z",
            "last_seen": "1970-01-01T00:16:45Z",
            "killed": None,
            "refused": None,
            "descriptors": {"x-team": "red"},
        }
        == session
    )
    assert [(call.status, call.tokens, call.settled) for call in table.copy()[0].calls] == [
        (503, USAGE, True),
        (0, None, False),
    ]


def test_refusal_is_no_call_and_names_its_limit() -> None:
    table = SessionTable()
    note(table, Standing(steps=1), 1)
    for blocks in range(1, 100):
        limit = LIMITS.index("max_calls_per_tool")
        refused = Standing(
            limit, 5, 4, SEARCH, steps=1, blocks=blocks, tools=((SEARCH, "search", 5),)
        )
        note(table, refused, 1 + blocks, now=1_000.0 + blocks)

    (session,) = report(*list_rows(table))["sessions"]

    assert [call.name for call in table.copy()[0].calls] == [name_call(1)]
    assert (
        session
        | {
            "total_block_count": 99,
            "tool_call_counts": {"search": 5},
            "refused": {
                "at": "1970-01-01T00:18:19Z",
                "limit": "max_calls_per_tool",
                "used": 5,
                "allowed": 4,
                "tool": "search",
                "agent": None,
            },
        }
        == session
    )


def test_waiting_request_meets_no_limit() -> None:
    table, cost = SessionTable(), LIMITS.index("max_cost_per_session")
    note(table, Standing(steps=1), 1)
    note(table, Standing(cost, 10, 10, steps=1, cost=9, reserved=1))
    (row,) = list_rows(table)
    assert (row.refusal, explain_end(row, 1_000), [event.limit for event in row.events]) == (
        None,
        None,
        [LIMITS[cost]],
    )

    note(table, Standing(cost, 10 * DOLLAR + 1, 10 * DOLLAR, blocks=1, cost=10 * DOLLAR + 1))
    (session,) = report(*list_rows(table))["sessions"]
    assert (session["refused"]["used"], session["refused"]["allowed"], session["actual_cost"]) == (
        10.000000001,
        10,
        10.000000001,
    )


def test_row_says_what_killed_the_session() -> None:
    table = SessionTable()
    told = []
    for standing in (
        Standing(1, blocks=5, steps=3, killed=1),
        Standing(1, blocks=6, steps=3, killed=2),
        Standing(steps=1),
        Standing(1),
        Standing(steps=2),
    ):
        note(table, standing)
        told.append(
            [
                (row["killed"], row["total_step_count"])
                for row in report(*list_rows(table))["sessions"]
            ]
        )

    assert told == [
        [("consecutive_blocks", 3)],
        [("consecutive_errors", 3)],
        [(None, 1)],
        [("operator", 1)],
        [(None, 2)],
    ]


def test_settlement_without_ledger_changes_no_counts() -> None:
    table = SessionTable()
    note(table, Standing(1, steps=4, blocks=2, killed=1), 1)
    note(table, Standing(1), 2)
    settle(table, Standing(), 1, usage=None)

    (session,) = report(*list_rows(table))["sessions"]

    assert (session["killed"], session["total_step_count"], session["total_block_count"]) == (
        "operator",
        4,
        2,
    )


def test_restarted_session_shows_only_new_calls() -> None:
    table = SessionTable()
    note(
        table,
        Standing(LIMITS.index("max_steps"), 9, 9, steps=9, blocks=1, age_ms=60_000),
        1,
        now=1_000,
    )
    note(table, Standing(steps=9, age_ms=61_000), 2, now=1_001)
    note(table, Standing(steps=1, age_ms=0), 3, now=1_100)

    (row,) = list_rows(table)

    assert [call.name for call in row.calls] == [name_call(3)[:4]]
    assert row.refusal is None


# Bounds


def test_sessions_calls_and_events_are_bounded() -> None:
    table = SessionTable()
    for number in range(MAX_ROWS + 10):
        note(table, Standing(steps=1), tenant=f"{number:016x}")
    for number in range(1, 201):
        note(table, Standing(steps=number, age_ms=number * 1_000), number, now=1_000.0 + number)
        note(
            table,
            Standing(2 + number % 2, number, number, steps=number, age_ms=number * 1_000),
            now=1_000.0 + number,
        )
        settle(table, Standing(steps=number), 1_000 + number, tenant="settled")
    (settled,) = [run for run in table.copy() if run.name.tenant == "settled"]
    (row,) = [row for row in list_rows(table) if row.tenant == TENANT]

    shown = describe_steps(row)

    assert (len(table.copy()), len(settled.calls)) == (MAX_ROWS, MAX_CALLS)
    assert (shown["earlier_steps"], len(shown["steps"]), len(shown["events"])) == (
        200 - MAX_CALLS,
        MAX_CALLS,
        32,
    )


def test_client_chosen_text_in_rows_is_cut() -> None:
    table = SessionTable()
    long = "\udcff" + "x" * 10_000
    note(table, Standing(steps=1), caller=[(long, long)] * 20, model=long, tools=(long,))

    (row,) = list_rows(table)

    assert [len(value) for value in row.caller[0]] == [133, 133]
    assert (
        len(row.caller),
        len(row.calls[0].model),
        [len(tool) for tool in row.calls[0].tools],
    ) == (8, 133, [133])
    assert row.calls[0].model.startswith("\\udcffx")


# Replicas


def test_session_rows_of_replicas_are_merged() -> None:
    here, there = SessionTable(), SessionTable()
    note(here, Standing(steps=1, age_ms=0), 1, now=1_000)
    note(there, Standing(steps=2, age_ms=1_000), 2, now=1_001, caller=[], model="", tools=())
    settle(
        there,
        Standing(steps=2, cost=5, age_ms=2_000),
        1,
        now=1_002,
        model="gpt-4o-mini",
        status=200,
    )
    settle(
        here,
        Standing(steps=2, cost=9, age_ms=3_000),
        2,
        now=1_003,
        model="o3",
        usage=None,
        status=0,
    )

    for tables in ((here, there), (there, here)):
        (row,) = list_rows(*tables)
        assert (row.steps, row.cost, row.began, row.last, row.caller) == (
            2,
            9,
            1_000,
            1_001,
            [("x-team", "red")],
        )
        assert [
            (call.at, call.model, call.tools, call.status, call.tokens, call.settled)
            for call in row.calls
        ] == [
            (1_000, "gpt-4o", ["search"], 200, (100, 20, 30, 40), True),
            (1_001, "o3", [], 0, None, True),
        ]
    note(there, Standing(LIMITS.index("max_steps"), 1, 1, steps=1, blocks=1), now=1_004)
    note(here, Standing(1), now=1_005)
    for tables in ((here, there), (there, here)):
        (session,) = report(*list_rows(*tables))["sessions"]
        assert (session["killed"], session["refused"]["limit"], session["total_block_count"]) == (
            "operator",
            "killed",
            1,
        )
    assert list_rows(here, there, since=1_006) == []


@pytest.mark.slow
def test_document_above_the_board_limit_drops_old_calls_first() -> None:
    noise = random.Random(0)
    table = SessionTable()
    tools = tuple((bytes([place]), noise.randbytes(32).hex(), place) for place in range(20))
    for number in range(MAX_ROWS):
        for _ in range(40 if number >= MAX_ROWS - 150 else 1):
            standing = Standing(steps=number, tools=tools if number % 2 else tools[:1])
            note(
                table,
                standing,
                noise.randrange(2**63),
                now=1_000.0 + number,
                tenant=f"{number:016x}",
            )
    roomy = SessionTable()
    for number in range(150):
        for _ in range(64):
            note(
                roomy,
                Standing(steps=1),
                noise.randrange(2**63),
                now=1_000 + noise.random(),
                tenant=f"{number:016x}",
            )

    packed = {
        name: each.make_document(shows_callers=True).pack()
        for name, each in (("full", table), ("roomy", roomy))
    }
    found, whole = unpack_all(packed, SessionDocument).values()

    assert max(len(document) for document in packed.values()) <= MAX_DOCUMENT
    assert (len(whole.rows), whole.left_out) == (150, 0)
    assert 20 < sum(bool(row.calls) for row in whole.rows) < 150
    assert len(found.rows) + found.left_out == MAX_ROWS
    assert found.left_out == 0 or not any(row.calls for row in found.rows)
    assert [row.last for row in found.rows] == sorted(
        (row.last for row in found.rows), reverse=True
    )


# What people are shown


def test_report_adds_up_and_can_be_selected_and_sorted() -> None:
    table = SessionTable()
    note(table, Standing(steps=1, cost=3 * DOLLAR, tool_calls=7), now=1_003)
    note(
        table,
        Standing(1, steps=5, cost=DOLLAR, estimated=DOLLAR, blocks=2, killed=1),
        policy="q",
        now=1_002,
    )
    note(
        table, Standing(steps=3, tool_calls=9), tenant=OTHER, caller=[("x-team", "blue")], now=1_001
    )
    rows = list_rows(table)

    assert report(*rows)["total"] == {
        "sessions": 3,
        "callers": 2,
        "killed": 1,
        "total_step_count": 9,
        "total_tool_calls": 16,
        "total_block_count": 2,
        "actual_cost": 4,
        "estimated_cost": 1,
    }
    found: dict[tuple[str, str], list[dict[str, Any]]] = {
        ("p", TENANT): [{}, {"sort": "cost"}],
        ("q", TENANT): [{"sort": "steps"}, {"sort": "blocks"}, {"policy": "q"}],
        ("p", OTHER): [
            {"sort": "tool_calls"},
            *({"caller": caller} for caller in ("x-team=blue", "blue", OTHER[:4])),
        ],
    }
    for first, selections in found.items():
        for selection in selections:
            session = report(*rows, **selection)["sessions"][0]
            assert (session["policy"], session["caller"]) == first, selection
    assert report(*rows, shown=False, caller="blue")["sessions"] == []
    assert report(*rows, caller="team=blue").items() >= {"sessions": [], "known": 3}.items()
    assert (
        len(report(*rows, limit=1)["sessions"]),
        report(*rows, limit=1)["total"]["sessions"],
    ) == (1, 3)


def admin_of(
    table: SessionTable, *, shows: bool = False, orders: Sequence[ActiveOverride] = ()
) -> AbstractContextManager[AdminClient]:
    return operate(table, shows=shows, orders=orders).connect()


def make_table(session: str = SESSION) -> SessionTable:
    """A session of three steps, the last one under way, that was refused after them."""
    table, now = SessionTable(), time.time()
    for call in range(1, 4):
        note(
            table,
            Standing(steps=call, tools=((SEARCH, "se\x1b[2Jarch", call),)),
            call,
            now=now,
            session=session,
        )
    settle(
        table,
        Standing(steps=3, tool_calls=3, cost=2 * DOLLAR, tools=((SEARCH, "se\x1b[2Jarch", 3),)),
        1,
        now=now,
        session=session,
    )
    settle(table, Standing(), 2, now=now, session=session, usage=None, status=0)
    refused = Standing(
        2,
        3,
        3,
        steps=3,
        tool_calls=3,
        blocks=1,
        cost=2 * DOLLAR,
        tools=((SEARCH, "se\x1b[2Jarch", 3),),
    )
    note(table, refused, now=now, session=session)
    return table


def test_run_report_lists_each_step() -> None:
    with admin_of(make_table(), shows=True) as client:
        # These are about loops
        (listed,) = client.ask("/sessions", params={"tool": "other", "price": "x"})["sessions"]
        (run,) = client.ask(f"/sessions/{SESSION}")["sessions"]
        hidden = [
            client.ask(path, headers={"host": "evil.example"})
            for path in ("/sessions", f"/sessions/{SESSION}")
        ]
        with pytest.raises(LoopguardError, match="answered 404: no session 6666 is known here"):
            client.ask("/sessions/6666")

    steps = [
        (step["model"], step["tools"], step["status"], step["input_tokens"], step["settled"])
        for step in run["steps"]
    ]
    assert steps == [
        ("gpt-4o", ["search"], 200, 100, True),
        ("gpt-4o", ["search"], None, None, True),
        ("gpt-4o", ["search"], None, None, False),
    ]
    assert (
        run["steps"][0].items()
        >= {"output_tokens": 20, "cache_read_tokens": 30, "cache_write_tokens": 40}.items()
    )
    assert (run["descriptors"], [page["sessions"][0]["descriptors"] for page in hidden]) == (
        {"x-team": "red"},
        [None, None],
    )
    assert {**listed, **{key: run[key] for key in ("steps", "earlier_steps", "events")}} == run


def test_grant_is_shown_before_the_sessions_next_request(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table, now = make_table(), time.time()
    grant = ActiveOverride(
        "g1",
        GRANT,
        Target(session=SESSION),
        "",
        now + 1,
        now + 600,
        "",
        "eve@laptop",
        Grant(steps=20),
    )
    for order in (
        grant,
        grant._replace(since=now - 60),
        grant._replace(target=Target(session="6" * 16)),
    ):
        with admin_of(table, orders=[order]) as client:
            assert main(["sessions", "--admin", client.url]) == 0
    with admin_of(table, orders=[grant]) as client:
        (session,) = client.ask("/sessions")["sessions"]

    first, second, third = capsys.readouterr().out.splitlines()
    assert re.search(
        (
            r"  refused before the grant: max_steps, 3 of 3  order: grant \+20 steps by eve@laptop "
            r"until \S+$"
        ),
        first,
    )
    assert re.search(r"  refused: .*  order: grant \+20 steps", second)
    assert "grant" not in third
    assert [order["override"] for order in session["orders"]] == ["g1"]
    assert session["commands"]["revoke"] == "loopguard overrides --revoke g1"


def make_run() -> tuple[SessionTable, SessionTable]:
    """Two replicas that took turns with a session of three steps, two refusals and a grant."""
    here, there = SessionTable(), SessionTable()
    grant = ActiveOverride(
        "g1",
        GRANT,
        Target(session=SESSION),
        "",
        1_020,
        9e9,
        "no business of readers",
        "ann",
        Grant(cost=5),
    )
    note(here, Standing(steps=1, age_ms=0), 1, now=1_000, tools=())
    settle(
        there,
        Standing(steps=1, cost=3, tokens=USAGE, model_ms=2_000, age_ms=2_500),
        1,
        now=1_002.5,
        model_ms=2_000,
    )
    note(there, Standing(steps=2, model_ms=2_000, age_ms=5_000), 2, now=1_005, errors=1)
    note(there, Standing(steps=2, model_ms=2_000, age_ms=5_500, retry=True), 3, now=1_005.5)
    settle(
        here,
        Standing(steps=2, tokens=USAGE, model_ms=6_000, failures=1, age_ms=9_500),
        2,
        now=1_009.5,
        status=503,
        model_ms=4_000,
    )
    for blocks in (1, 2):
        note(
            here,
            Standing(4, 8, 5, steps=2, blocks=blocks, model_ms=6_000, cost=8, age_ms=11_000),
            now=1_011,
        )
    note(
        here,
        Standing(
            steps=3, model_ms=6_000, tokens=USAGE, cost=8, failures=1, blocks=2, age_ms=20_000
        ),
        4,
        now=1_020,
    )
    for table, now in ((here, 1_020.0), (there, 1_020.5)):
        table.copy()[0].grant([grant], now)
    here.copy()[0].limits = [
        ("max_cost_per_session", "", 5 * DOLLAR),
        ("max_calls_per_tool", "pay", 0),
    ]
    return here, there


def test_run_report_has_times_refusals_and_grants() -> None:
    (row,) = list_rows(*make_run())

    session, steps = describe_session(row, shows_callers=True), describe_steps(row)

    assert [
        (step["tool_seconds"], step["model_seconds"], step["tool_errors"], step["retry"])
        for step in steps["steps"]
    ] == [
        (None, 2, 0, False),
        (3, 4, 1, False),
        (None, None, 0, True),
        (11, None, 0, False),
    ]
    assert session["usage"] == {
        "input_tokens": 100,
        "output_tokens": 20,
        "cache_read_tokens": 30,
        "cache_write_tokens": 40,
        "failed_answers": 1,
        "total_seconds": 20,
        "model_seconds": 6,
        "tool_seconds": 14,
    }
    assert steps["events"] == [
        {
            "at": "1970-01-01T00:16:51Z",
            "refused": "max_cost_per_session",
            "used": 8e-9,
            "allowed": 5e-9,
            "tool": None,
            "times": 2,
        },
        {"at": "1970-01-01T00:17:00Z", "granted": {"max_cost_per_session": 5e-9}},
    ]
    assert (
        session
        | {
            "limits": {"max_cost_per_session": 5, "max_calls_per_tool": {"pay": 0}},
            "granted": {"max_cost_per_session": 5e-9},
        }
        == session
    )
    assert "business" not in str(row)


@pytest.mark.parametrize(
    ("status", "after", "ended"),
    [
        (200, 1, None),
        (200, 59, None),
        (200, 60, "done"),
        (503, 1, "error"),
        (400, 1, "error"),
        (0, 1, "error"),
    ],
)
def test_run_is_done_a_minute_after_its_answer(
    status: int, after: float, ended: str | None
) -> None:
    table = SessionTable()
    note(table, Standing(steps=1), 1, now=1_000)
    settle(table, Standing(steps=1), 1, now=1_000, status=status)

    assert explain_end(list_rows(table)[0], 1_000 + after) == ended


def test_run_report_says_what_stopped_it() -> None:
    found = []
    for standing in (
        Standing(2, 1, 1, steps=1),
        Standing(4, 1, 1, steps=1, cost=1),
        Standing(1, steps=1, killed=1),
        Standing(1),
    ):
        table = SessionTable()
        note(table, Standing(steps=1), 1, now=1_000)
        note(table, standing, now=1_001)
        found.append(explain_end(list_rows(table)[0], 1_002))
    table = SessionTable()
    note(table, Standing(steps=1), 1, now=1_000)
    found += [explain_end(list_rows(table)[0], now) for now in (1_599, 1_600)]
    settle(table, Standing(steps=1), 1, now=1_000, refused=True)
    found.append(explain_end(list_rows(table)[0], 1_001))

    assert found == ["steps", "refused", "killed", "killed", None, "unknown", "refused"]


def test_timeline_orders_steps_and_refusals_of_replicas() -> None:
    one, other = SessionTable(), SessionTable()
    note(one, Standing(steps=1, age_ms=1_000), 1, now=1_001.0)
    note(other, Standing(steps=2, age_ms=2_000), 2, now=1_002.0, action="steer")
    note(one, Standing(2, 3, 3, steps=2, age_ms=3_000), now=1_003.0)
    note(other, Standing(steps=3, age_ms=4_000), 3, now=1_004.0)
    settle(one, Standing(steps=3, age_ms=5_000), 2, now=1_005.0)
    (row,) = list_rows(one, other)

    timeline = order_timeline(row)

    assert [(each.get("refused"), each.get("action"), each.get("status")) for each in timeline] == [
        (False, None, None),
        (False, "steer", 200),
        ("max_steps", None, None),
        (False, None, None),
    ]


def test_browser_gets_a_safe_page_of_a_run() -> None:
    table = make_table()
    tools = ("<script>alert(1)</script>",)
    now = time.time()
    note(
        table,
        Standing(steps=4, age_ms=1),
        9,
        now=now,
        tools=tools,
        errors=2,
        action="steer",
        agent="1" * 16,
    )
    note(table, Standing(steps=5, age_ms=2), 10, now=now, agent="2" * 16, parent="1" * 16)
    with admin_of(table, shows=True) as client:
        page = httpx.get(
            f"http://{client.url}/sessions/{SESSION}", headers={"accept": "text/html,*/*"}
        )

    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert Outline(page.text).elements.count("script") == 1
    assert (
        find_missing(
            page.text,
            "&lt;script&gt;alert(1)&lt;/script&gt;",
            "2 failed",
            "note to the model",
            "2 agents, 2 active",
        )
        == []
    )
    assert f"│ </span><code>{'2' * 16}" in re.sub("├ ", "", page.text)
    assert "x-team: <b>red</b>" in page.text


def run_main(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_sessions_command_prints_sessions_and_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with admin_of(make_table(), shows=True) as client:
        listed = run_main(capsys, "sessions", "--admin", client.url)
        run = run_main(capsys, "sessions", SESSION, "--admin", client.url)
        none = run_main(capsys, "sessions", "--policy", "q", "--admin", client.url)

    assert listed.startswith(
        f"{SESSION}  x-team=red  p  3 steps, 3 tool calls, $2.00, 1 refused  since "
    )
    assert listed.endswith("refused: max_steps, 3 of 3\n")
    assert (
        find_misfits(
            run.splitlines(),
            listed.strip(),
            "  steps: …",
            "…  refused: max_steps, 3 of 3",
            "  called 3 times: se\\x1b[2Jarch",
            "…gpt-4o  200  100 in, 20 out, 30 from cache, 40 into cache  search",
            "…gpt-4o  failed  tokens unknown  search",
            "…gpt-4o  in progress  tokens unknown  search",
        )
        == []
    )
    assert none == "none of 1 session matches\n"


def test_top_shows_agents_as_a_tree(capsys: pytest.CaptureFixture[str]) -> None:
    table, now = make_table(), time.time()
    note(table, Standing(steps=4), 9, now=now, agent="1" * 16)
    note(table, Standing(steps=5), 10, now=now, agent="2" * 16, parent="1" * 16)
    note(table, Standing(LIMITS.index("max_agents"), 2, 2, steps=5), 11, now=now, agent="3" * 16)

    with admin_of(table) as client:
        shown, data = [
            run_main(capsys, "top", "--tree", *flags, "--admin", client.url)
            for flags in (["--once"], ["--json"])
        ]

    lines = [line for line in shown.splitlines() if line.startswith("  ")]
    assert lines[0] == "  2 agents, 2 active"
    assert [line.split("  1 request")[0] for line in lines[1:]] == [
        f"    {'1' * 16}",
        f"      {'2' * 16}",
        f"    {'3' * 16}",
    ]
    assert shown.rstrip().endswith("refused: max_agents")
    (session,) = json.loads(data)["sessions"]
    assert [agent["level"] for agent in session["agents"]["tree"]] == [1, 2, 1]


def test_sessions_command_adds_up_several_servers(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        admin_of(make_table(), shows=True) as one,
        admin_of(make_table("6" * 16)) as two,
        admin_of(SessionTable()) as none,
    ):
        first, both = (
            ["--admin", one.url],
            [flag for each in (one, two, one) for flag in ("--admin", each.url)],
        )
        listed = run_main(capsys, "sessions", *first)
        for caller in ("x-team=red", "red"):
            assert run_main(capsys, "sessions", *first, "--caller", caller) == listed
        assert (
            run_main(capsys, "sessions", *both, "--caller", "x-team=blue")
            == "none of 2 sessions matches\n"
        )
        assert (
            run_main(capsys, "sessions", "--policy", "q", "--admin", none.url)
            == "no session in the last hour\n"
        )
        joined = json.loads(run_main(capsys, "sessions", "--json", *both))

    assert {session["session"] for session in joined["sessions"]} == {SESSION, "6" * 16}
    assert (joined["total"]["actual_cost"], len(joined["replicas"])) == (4, 2)
