"""Requests for which nothing names a session: reported, and limited where a policy says so, for each caller."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.commands.sessions import write_report
from extproc.cli.main import main
from extproc.ext_proc.service import Service
from extproc.metrics import Metrics
from extproc.operator.session_rows import merge_sessions
from extproc.sessions.rates import Usage
from extproc.store.memory import MemoryStore
from tests.support.bundles import check, plain, refused, spec
from tests.support.service import make_service, sample
from tests.support.session_limits import (
    Request,
    ask,
    describe,
    kept,
    limited,
    nameless,
    settle,
    status,
    told,
    turns,
    unnamed,
)

PRICES = {"*": {"input": 1_000_000, "output": 1_000_000}}


def send(service: Service, count: int, first: int = 1, **more: str) -> list[int]:
    """What becomes of that many different requests that name no session."""
    return nameless(service, many(count, first, **more))


def many(count: int, first: int = 1, **more: str) -> list[Request]:
    """That many different requests that name no session."""
    return [(kept(number), more) for number in range(first, first + count)]


def with_spec(document: dict[str, Any], **more: object) -> dict[str, Any]:
    """A policy with more keys."""
    document["spec"] |= more
    return document


CASES: dict[str, tuple[dict[str, Any], Sequence[Request], list[int]]] = {
    "each call counts once, whichever conversation shows it again": (unnamed(max_tool_calls=4), many(5), [200] * 3 + [429] * 2),
    "a shadow policy only counts": (unnamed("shadow", max_steps=1), many(3), [200] * 3),
    "unknown callers are not one": (with_spec(unnamed(max_steps=1), missing_descriptor="share"), many(3, team=""), [200] * 3),
    "what is limited may pass uncounted": (with_spec(unnamed(max_steps=2), uncountable="reject"), many(3), [200, 200, 429]),
    "sessions use up nothing of them, nor they of sessions": (
        with_spec(unnamed(limits={"max_steps": 1}, max_steps=50), session={"max_sessions_per_tenant": 1}),
        [*many(3), *((turns(1), {"session": name}) for name in "abc"), *many(3, 4)],
        [200] * 9,
    ),
}


@pytest.mark.parametrize(("document", "requests", "expected"), CASES.values(), ids=CASES)
def test_requests_without_a_session_are_limited(
    document: dict[str, Any], requests: Sequence[Request], expected: list[int]
) -> None:
    service = make_service(document)

    assert nameless(service, requests) == expected
    limited_ones = sample(service, "session_limits_total", policy="agents", mode="shadow", limit="max_steps", action="reject")
    assert limited_ones == (2 if document["spec"]["mode"] == "shadow" else 0)


def test_requests_of_no_session_share_the_limits_of_their_caller() -> None:
    service = make_service(unnamed(max_steps=3))

    assert send(service, 5) == [200, 200, 200, 429, 429]
    assert send(service, 1, team="other") == [200]
    assert [status(ask(service, turns(number))) for number in range(1, 6)] == [200] * 5
    answer = ask(service, kept(9), session="")
    assert told(answer)["limit"] == "max_steps"
    assert "name no session have used 3 of their 3 steps" in told(answer)["message"]
    assert sample(service, "session_limits_total", policy="agents", mode="enforce", limit="max_steps", action="reject") == 3
    assert sample(service, "session_unnamed_total", policy="agents", mode="enforce") == 7


def test_they_are_never_unlimited_in_silence(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    """Without limits of their own they pass, with a count, a line in the log once a minute, and a row of each caller."""
    service = make_service(limited(max_steps=1))

    with caplog.at_level(logging.WARNING):
        assert send(service, 4) == [200] * 4
        assert send(service, 2, team="other") == [200] * 2

    assert [line.getMessage() for line in caplog.records] == [
        "nothing names the session of requests; they pass: unnamed_limits would limit them"
    ]
    assert sample(service, "uncounted_total", policy="agents", reason="unnamed") == 6
    assert sample(service, "session_unnamed_total", policy="agents", mode="enforce") == 6
    shown = describe(service)
    assert sorted((row["session"], row["unnamed_requests"], row["total_step_count"]) for row in shown) == [
        ("unnamed", 2, 0),
        ("unnamed", 4, 0),
    ]
    assert "4 requests for which nothing names a session" in "\n".join(write_report({"problem": None, "sessions": shown}))
    assert capsys.readouterr().out == ""


def test_limited_ones_have_a_row_as_well() -> None:
    service = make_service(unnamed(max_steps=2))

    send(service, 4)

    (row,) = describe(service)
    assert (row["session"], row["unnamed_requests"], row["total_step_count"], row["total_block_count"]) == ("unnamed", 4, 2, 2)


def test_replicas_add_up_what_they_have_seen() -> None:
    one, other = make_service(limited(max_steps=1)), make_service(limited(max_steps=1))
    send(one, 2)
    send(other, 3)

    every = [row for service in (one, other) for row in service.reporter.sessions.make_document(shows_callers=False).rows]

    assert [row.unnamed for row in merge_sessions(every, 0)] == [5]


def test_a_busy_caller_begins_anew_after_idle_seconds() -> None:
    """The time runs from the first of the requests: one that never rests is not refused for ever."""
    now = [0]
    store = MemoryStore(Metrics(), clock=lambda: now[0])
    service = make_service(with_spec(unnamed(max_steps=4), session={"idle_seconds": 60}), store=store)

    found = []
    for number in range(12):
        now[0] = number * 10_000
        found += send(service, 1, first=number + 1)

    assert found == [200] * 4 + [429] * 2 + [200] * 4 + [429] * 2


def test_money_of_no_session_is_limited() -> None:
    service = make_service(unnamed(limits={"max_steps": 99, "prices": PRICES}, max_cost_per_session=1e4))

    settle(service, ask(service, kept(1), session=""), Usage(20_000, 0))

    assert send(service, 1, first=2) == [429]
    assert status(ask(service, turns(2))) == 200


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"unnamed_limits": {"max_steps": 1}}, "unnamed_limits needs session_limits"),
        ({"session_limits": {"max_steps": 1}, "unnamed_limits": {}}, "unnamed_limits needs at least one of max_steps"),
        ({"session_limits": {"max_steps": 1}, "unnamed_limits": {"max_steps": 1, "max_calls_per_tool": {}}}, "unknown key"),
    ],
)
def test_what_is_written_wrongly_is_refused(keys: dict[str, Any], problem: str) -> None:
    error = refused(spec(**keys))[-1]

    assert error.pointer.startswith("/spec/unnamed_limits")
    assert problem in error.message


def test_validate_says_what_passes_unlimited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(limited(max_steps=1)))
    assert main(["validate", str(file)]) == 0
    assert "unnamed_limits would limit them" in capsys.readouterr().err

    file.write_text(json.dumps(unnamed(max_steps=1)))
    assert main(["validate", str(file)]) == 0
    assert "unnamed_limits" not in capsys.readouterr().err
    assert not plain(check(unnamed(max_steps=1)).warnings)
