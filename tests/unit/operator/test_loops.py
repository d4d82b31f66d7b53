"""The table of loops: its rows, its bounds, how replicas merge it, and what operators see."""

import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from select import select
from typing import Any, BinaryIO

import pytest

from extproc.cli.main import main
from extproc.decision import ToolFailure
from extproc.errors import LoopguardError
from extproc.ext_proc.service import Service
from extproc.operator.admin.client import AdminClient
from extproc.operator.admin.loop_report import describe_loops
from extproc.operator.board import unpack_all
from extproc.operator.loop_rows import (
    MINUTES,
    ConversationRow,
    Line,
    Loop,
    LoopDocument,
    merge_lines,
)
from extproc.sessions.rates import Prices, read_model
from extproc.store.rules.documents import MAX_DOCUMENT
from tests.support.command import find_missing
from tests.support.documents import policy
from tests.support.harness import PATIENCE
from tests.support.messages import body, headers
from tests.support.operated import Operated
from tests.support.service import exchange, make_service, repeat

ANY = {"pathPrefix": "/"}
BY_USER: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}
ON_ROUTE = {"xds.route_name": "llm"}
STUCK = {
    "role": "assistant",
    "tool_calls": [{"id": "1", "function": {"name": "search", "arguments": '{"q": "a"}'}}],
}
FOUND = {"role": "tool", "tool_call_id": "1", "content": "nothing"}


def make_row(**changes: Any) -> Loop:  # noqa: ANN401  # fields of Loop
    now = time.time()
    fields: dict[str, Any] = {
        "policy": "p",
        "detector": "default",
        "mode": "enforce",
        "tenant": "0" * 16,
        "repeats": "abcd",
        "session": "",
        "fingerprint": "abcd",
        "method": "POST",
        "path": "/v1",
        "route": "",
        "model": "",
        "tools": [],
        "caller": [],
        "first": now - 100,
        "last": now,
        "count": 5,
        "requests": {"reject": 3},
        "size": 400,
        "stopped": 3,
        "stopped_size": 300,
    }
    return Loop(**{**fields, **changes})


def make_conversation(loop: Loop) -> ConversationRow:
    return ConversationRow(
        loop.tenant,
        f"#{loop.repeats}",
        loops=[loop],
        first=loop.first,
        last=loop.last,
        requests=loop.total,
    )


def test_loop_is_one_row_per_policy_with_actions() -> None:
    service = make_service(
        policy("p", ANY, **BY_USER, escalate={"reject": 5}, action="warn"),
        policy("canary", ANY, mode="shadow", **BY_USER),
    )
    table, sent = (
        service.reporter.loops,
        (headers("/v1/chat?x=1", x_user_id="ann"), body(b"12345678")),
    )
    repeat(service, *sent, times=2)
    assert (table.list_loops(), table.curves) == ([], {})
    repeat(service, *sent, times=5)

    loop, canary = table.list_loops()

    assert (loop.policy, loop.detector, loop.mode, loop.method, loop.path) == (
        "p",
        "default",
        "enforce",
        "POST",
        "/v1/chat",
    )
    assert loop.caller == [("x-user-id", "ann")]
    assert (loop.requests, loop.total, loop.count) == ({"warn": 2, "reject": 3}, 5, 7)
    assert (loop.size, loop.stopped, loop.stopped_size) == (40, 3, 24)
    assert loop.first <= loop.last
    assert (canary.mode, canary.requests, canary.stopped) == ("shadow", {"reject": 5}, 0)
    minute = int(time.time()) // 60  # or the one before, if a new one has just begun
    assert {key: sum(curve.list_counts(minute)[-2:]) for key, curve in table.curves.items()} == {
        ("p", "enforce", "warn"): 2,
        ("p", "enforce", "reject"): 3,
        ("canary", "shadow", "reject"): 5,
    }


def test_loop_row_has_tool_model_and_route_cut() -> None:
    service = make_service(policy("p", ANY, similarity="tool_calls", **BY_USER), show_callers=True)
    agent = {"messages": [STUCK, FOUND] * 4}
    path, odd = "/v1/chat/completions", "/models/\udcff/v1/chat/completions"
    for sent, user, value in (
        (path, "bob", {**agent, "model": "gpt-4o"}),
        (odd, "bob\udcfe", agent),
        (f"/{'a' * 60_000}{path}", "b" * 8_000, agent),
    ):
        exchange(
            service,
            headers(sent, x_user_id=user, attributes=ON_ROUTE),
            body(json.dumps(value).encode()),
        )

    (found,) = unpack_all(
        {"r": service.reporter.loops.make_document(shows_callers=True).pack()}, LoopDocument
    ).values()

    loops = {len(row.caller[0][1]): row for row in found.loops}
    assert (loops[3].tools, loops[3].model, loops[3].route) == (["search"], "gpt-4o", "llm")
    assert (loops[9].path, loops[9].model) == ("/models/\\udcff/v1/chat/completions", "\\udcff")
    assert (loops[9].caller, len(loops[128].path)) == ([("x-user-id", "bob\\udcfe")], 256)


@pytest.mark.slow
def test_loop_is_logged_at_powers_of_two(caplog: pytest.LogCaptureFixture) -> None:
    service = make_service(policy("p", ANY, **BY_USER))
    with caplog.at_level(logging.WARNING):
        repeat(service, headers("/v1", x_user_id="ann", end=True, attributes=ON_ROUTE), times=22)
        for number in range(300):
            repeat(service, headers(f"/storm/{number}", x_user_id="storm", end=True), times=3)
        repeat(service, headers("/stuck", x_user_id="stuck", end=True), times=3)

    lines = [vars(record)["fields"] for record in caplog.records]
    assert [line["requests"] for line in lines[:5]] == [1, 2, 4, 8, 16]
    assert (lines[0]["path"], lines[0]["route"], lines[-1]["path"]) == ("/v1", "llm", "/stuck")
    assert len(lines) < 100
    assert "ann" not in str(lines)


def test_curve_has_the_last_hour_by_minute() -> None:
    curve = Line("p", "enforce", "reject", 100, [0] * MINUTES)
    for minute in (100, 100, 103):
        curve.add(minute)

    assert curve.list_counts(103)[-4:] == [2, 0, 0, 1]
    assert sum(curve.list_counts(103)) == 3
    assert curve.list_counts(160)[:4] == [0, 0, 1, 0]

    curve.add(103 + MINUTES)
    assert sum(curve.list_counts(103 + MINUTES)) == 1
    old, new = (
        Line("p", "enforce", "reject", 100 + at, [0] * 58 + counts)
        for at, counts in enumerate(([1, 2], [4, 8]))
    )
    assert merge_lines([old, new], 101)[0].counts[-3:] == [1, 6, 8]


def test_published_table_has_callers_only_if_shown() -> None:
    service = make_service(policy("p", ANY, **BY_USER))
    repeat(service, headers("/a", x_user_id="secret", end=True), times=3)
    hidden, shown = (
        service.reporter.loops.make_document(shows_callers=shows) for shows in (False, True)
    )

    found = unpack_all({"b": shown.pack(), "c": hidden.pack(), "broken": b"x"}, LoopDocument)

    assert found == {"b": shown, "c": hidden}
    assert "secret" not in str(hidden)
    assert "secret" in str(shown)


def test_documents_above_the_memory_bound_are_left_out() -> None:
    packed = {
        "a": LoopDocument([make_conversation(make_row())], []).pack(),
        "b": zlib.compress(bytes(10**7), 9),
    }

    assert list(unpack_all(packed, LoopDocument, 10_000)) == ["a"]
    assert not unpack_all(packed, LoopDocument, 10)


def test_document_above_the_board_limit_keeps_largest_rows() -> None:
    noise = random.Random(0)
    loops = [
        make_row(path=noise.randbytes(128).hex(), repeats=f"{size}", size=size)
        for size in range(999, -1, -1)
    ]
    rows = [make_conversation(loop) for loop in loops]

    packed = LoopDocument(rows, []).pack()
    (found,) = unpack_all({"b": packed}, LoopDocument).values()

    assert len(packed) <= MAX_DOCUMENT
    assert 0 < len(found.rows) < 1_000
    assert (found.rows, found.left_out) == (rows[: len(found.rows)], 1_000 - len(found.rows))


def test_loop_rows_of_replicas_are_merged() -> None:
    now = time.time()
    here = make_row(
        first=now - 50,
        last=now - 10,
        count=5,
        requests={"reject": 2},
        size=20,
        stopped=2,
        stopped_size=20,
    )
    there = make_row(
        first=now - 90,
        last=now,
        count=9,
        requests={"reject": 3, "warn": 1},
        size=40,
        stopped=3,
        stopped_size=30,
    )
    stale = make_row(repeats="old", last=now - 4_000)

    replicas = [
        LoopDocument([make_conversation(loop) for loop in own], [])
        for own in ([here, stale], [there])
    ]
    (merged,) = LoopDocument.merge(replicas, now).loops

    assert (merged.first, merged.last, merged.count) == (now - 90, now, 9)
    assert (merged.requests, merged.size, merged.stopped, merged.stopped_size) == (
        {"reject": 5, "warn": 1},
        60,
        5,
        50,
    )
    assert here.requests == {"reject": 2}


def test_cost_needs_a_known_or_given_price() -> None:
    rows = [
        make_row(model="gpt-4o", size=4_000_000, stopped_size=2_000_000),
        make_row(repeats="x", model="unknown"),
    ]

    given, known = (
        describe_loops(rows, Prices(price), [], shows_callers=False, now=time.time())
        for price in (2.0, None)
    )

    assert [loop["cost_usd"] for loop in given] == [2.0, 0.0002]
    assert known[0]["cost_usd"] > 0
    assert known[0]["cost_not_sent_on_usd"] == known[0]["cost_usd"] / 2
    assert known[1]["cost_usd"] is None


@pytest.mark.parametrize(
    ("path", "content", "expected"),
    [
        (
            "/v1/chat/completions",
            b'{"messages": [{"model": "inner"}], "model": "gpt-4o"}',
            "gpt-4o",
        ),
        ("/v1beta/models/gemini-2.5-pro:generateContent", None, "gemini-2.5-pro"),
        ("/model/anthropic.claude-sonnet/converse", b"{}", "anthropic.claude-sonnet"),
        ("/v1", b'{"model": 5}', ""),
        ("/v1", b"[" * 100_000, ""),
        ("/v1", b"not json", ""),
        ("/v1", None, ""),
    ],
)
def test_model_is_read_from_body_or_path(path: str, content: bytes | None, expected: str) -> None:
    assert read_model(path, content) == expected


def admin_of(service: Service, price: float | None = None) -> AbstractContextManager[AdminClient]:
    return Operated(services=[service], price=price).connect()


def looping(user: str = "ann", **settings: Any) -> Service:  # noqa: ANN401  # of the process
    service = make_service(policy("p", ANY, **BY_USER), **settings)
    repeat(service, headers("/v1", x_user_id=user), body(b"12345678"), times=3)
    return service


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"sort": "age"}, "sort must be one of now, cost, spared, requests, count, last, first"),
        ({"limit": "0"}, "limit must be 1 to 1000"),
        ({"limit": "many"}, "limit must be 1 to 1000"),
        ({"price": "-1"}, "price must be US dollars per million input tokens, such as 2.50"),
    ],
)
def test_invalid_query_is_refused_with_the_reason(query: Mapping[str, str], message: str) -> None:
    with admin_of(looping()) as client, pytest.raises(LoopguardError) as failure:
        client.ask("/loops", params=query)

    assert str(failure.value).endswith(f"answered 400: {message}")


def run_top(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["top", *arguments]) == 0
    return capsys.readouterr().out


def test_top_prints_a_table_with_escaped_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    service = looping("[red]\x1b[2J", show_callers=True)
    failing = service.reporter.incidents.find("p", ToolFailure("[red]\x1b[2J", "0" * 16), "a" * 16)
    for number in range(6):
        failing.note(f"{number % 2:016x}", f"{number:016x}", time.time() - 130, refused=True)
    with admin_of(service, price=1_000.0) as client:
        printed = run_top(capsys, "--admin", client.url)
        (elsewhere,) = client.ask("/loops", headers={"host": "evil.example"})["conversations"]

    assert elsewhere["descriptors"] is None  # for a page of another site
    assert "1 of 1 loop active, 1 failing tool, 1 caller; 1 replica" in printed
    assert re.search(
        r"^\[red\]\\x1b\[2J fails +2m +shadow: wait +6 in 2 callers", printed, re.MULTILINE
    )
    assert (
        find_missing(
            printed,
            "spent nothing on 0 requests; spared <$0.01, 1 not forwarded",
            " reject ",
            "x-user-id=[red]\\x1b[2J",
        )
        == []
    )
    assert "\x1b" not in printed


def test_top_adds_up_several_servers(capsys: pytest.CaptureFixture[str]) -> None:
    with admin_of(looping("ann")) as one, admin_of(looping("bob")) as other:
        urls = [part for url in (one.url, other.url, one.url) for part in ("--admin", url)]
        report = json.loads(run_top(capsys, "--json", *urls))
        priced = json.loads(
            run_top(capsys, "--json", *urls[:2], "--price", "500000", "--limit", "1")
        )
        none = run_top(capsys, "--once", *urls[:2], "--policy", "other")
    failed = main(["top", "--admin", "unix:/nonexistent.sock"])

    assert [row["requests"] for row in report["conversations"]] == [1, 1]
    assert (report["total"]["conversations"], len(report["replicas"])) == (2, 2)
    assert priced["conversations"][0]["cost_not_sent_on_usd"] == 1.0
    assert "\nnone of 1 loop matches\n" in none
    assert failed == 1
    assert capsys.readouterr().err.startswith("loopguard: cannot ask unix:/nonexistent.sock: ")


@pytest.mark.slow
def test_top_is_live_on_a_terminal() -> None:
    service = looping("ann", show_callers=True)
    ours, theirs = os.openpty()
    with admin_of(service) as client, os.fdopen(ours, "rb", buffering=0) as screen:
        command = [
            sys.executable,
            "-P",
            "-c",
            INTERRUPTIBLE,
            "top",
            "--admin",
            client.url,
            "--interval",
            "0.1",
        ]
        environment = {**os.environ, "COLUMNS": "200", "LINES": "50", "TERM": "xterm"}
        with subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        ) as top:
            os.close(theirs)
            try:
                first = read_until(screen, b"x-user-id=ann")
                repeat(service, headers(x_user_id="latecomer", end=True), times=3)
                read_until(screen, b"x-user-id=latecomer")
                top.send_signal(signal.SIGINT)
                read_until(screen, LEAVE_SCREEN)
                ended = top.wait(PATIENCE)
            finally:
                top.kill()

    assert ENTER_SCREEN in first
    assert ended == 130


# The command with Ctrl-C as in a terminal; tests in a shell's background inherit it ignored.
INTERRUPTIBLE = """import signal, sys
from extproc.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main())
"""

# What a terminal is told to show another screen, and its own again (xterm's control sequences).
ENTER_SCREEN, LEAVE_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"


def read_until(screen: BinaryIO, part: bytes) -> bytes:
    seen, deadline = b"", time.monotonic() + PATIENCE
    while part not in seen:
        ready, _, _ = select([screen], [], [], PATIENCE)
        assert ready, f"nothing is shown behind {seen[-2_000:]!r}"
        assert time.monotonic() < deadline, f"{part!r} was never shown, but {seen[-2_000:]!r}"
        seen += screen.read(65_536)
    return seen
