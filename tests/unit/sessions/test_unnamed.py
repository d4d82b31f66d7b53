"""Requests for which nothing names a session: reported, and limited where a policy says so, for each caller."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.commands.sessions import write_report
from extproc.cli.main import main
from extproc.engine.settlements import Entry, list_settlements
from extproc.ext_proc.service import Service
from extproc.metrics import Metrics
from extproc.operator.admin.session_report import describe_session
from extproc.operator.session_rows import merge_sessions
from extproc.sessions.rates import Usage
from extproc.store.memory import MemoryStore
from extproc.store.rules.session import SUCCEEDED
from tests.support.bundles import check, plain, refused, spec
from tests.support.service import make_service, metadata_of, sample
from tests.support.session_limits import ask, kept, limited, status, told, turns

PRICES = {"*": {"input": 1_000_000, "output": 1_000_000}}


def unnamed(mode: str = "enforce", limits: dict[str, Any] | None = None, **own: Any) -> dict[str, Any]:  # noqa: ANN401  # keys
    """A policy with limits of sessions, and these of requests without one."""
    document = limited(mode, **(limits or {"max_steps": 100}))
    document["spec"] |= {"unnamed_limits": own}
    return document


def send(service: Service, count: int, first: int = 1, **more: str) -> list[int]:
    """What becomes of that many different requests that name no session."""
    return [status(ask(service, kept(number), session="", **more)) for number in range(first, first + count)]


def rows(service: Service) -> list[dict[str, Any]]:
    """What `/sessions` has."""
    found = merge_sessions(service.reporter.sessions.make_document(shows_callers=False).rows, 0)
    return [describe_session(row, shows_callers=False) for row in found]


def test_requests_of_no_session_share_the_limits_of_their_caller() -> None:
    """Those of another caller, and those that name a session, have their own."""
    service = make_service(unnamed(max_steps=3))

    assert send(service, 5) == [200, 200, 200, 429, 429]
    assert send(service, 1, team="other") == [200]
    assert [status(ask(service, turns(number))) for number in range(1, 6)] == [200] * 5
    answer = ask(service, kept(9), session="")
    assert told(answer)["limit"] == "max_steps"
    assert "name no session have used 3 of their 3 steps" in told(answer)["message"]
    assert sample(service, "session_limits_total", policy="agents", mode="enforce", limit="max_steps", action="reject") == 3
    assert sample(service, "session_unnamed_total", policy="agents", mode="enforce") == 7


def test_tool_calls_of_no_session_are_counted() -> None:
    """Each call counts once, whichever conversation shows it again."""
    service = make_service(unnamed(max_tool_calls=4))

    assert send(service, 5) == [200, 200, 200, 429, 429]


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
    shown = rows(service)
    assert sorted((row["session"], row["unnamed_requests"], row["total_step_count"]) for row in shown) == [
        ("unnamed", 2, 0),
        ("unnamed", 4, 0),
    ]
    assert "4 requests for which nothing names a session" in "\n".join(write_report({"problem": None, "sessions": shown}))
    assert capsys.readouterr().out == ""


def test_limited_ones_have_a_row_as_well() -> None:
    """Beside how many there were it says what they have used."""
    service = make_service(unnamed(max_steps=2))

    send(service, 4)

    (row,) = rows(service)
    assert (row["session"], row["unnamed_requests"], row["total_step_count"], row["total_block_count"]) == ("unnamed", 4, 2, 2)


def test_replicas_add_up_what_they_have_seen() -> None:
    """Each knows its own requests alone."""
    one, other = make_service(limited(max_steps=1)), make_service(limited(max_steps=1))
    send(one, 2)
    send(other, 3)

    every = [row for service in (one, other) for row in service.reporter.sessions.make_document(shows_callers=False).rows]

    assert [row.unnamed for row in merge_sessions(every, 0)] == [5]


def test_a_busy_caller_begins_anew_after_idle_seconds() -> None:
    """The time runs from the first of the requests: one that never rests is not refused for ever."""
    now = [0]
    store = MemoryStore(Metrics(), clock=lambda: now[0])
    document = unnamed(max_steps=4)
    document["spec"]["session"] = {"idle_seconds": 60}
    service = make_service(document, store=store)

    found = []
    for number in range(12):
        now[0] = number * 10_000
        found += send(service, 1, first=number + 1)

    assert found == [200] * 4 + [429] * 2 + [200] * 4 + [429] * 2


def test_money_of_no_session_is_limited() -> None:
    """The access log says what a request has cost; the next one is refused."""
    service = make_service(unnamed(limits={"max_steps": 99, "prices": PRICES}, max_cost_per_session=1e4))
    answer = ask(service, kept(1), session="")
    named = tuple(json.loads(metadata_of(answer)["sessions"]))
    entry = Entry(named, 200, False, 0, 0, "", Usage(20_000, 0), estimated=False, refused=False)

    (settled,) = list_settlements(service.engine, entry)
    assert (settled.session, settled.settlement.outcome) == ("unnamed", SUCCEEDED)
    service.counting.settle([settled.settlement], lambda _: None)

    assert send(service, 1, first=2) == [429]
    assert status(ask(service, turns(2))) == 200


def test_sessions_and_requests_without_one_use_up_nothing_of_each_other() -> None:
    """Requests without a session are none that its caller begins."""
    document = unnamed(limits={"max_steps": 1}, max_steps=50)
    document["spec"]["session"] = {"max_sessions_per_tenant": 1}
    service = make_service(document)

    assert send(service, 3) == [200] * 3
    assert [status(ask(service, turns(1), session=name)) for name in "abc"] == [200] * 3
    assert send(service, 3, first=4) == [200] * 3


def test_a_shadow_policy_only_counts() -> None:
    """What it would have refused is in the metrics."""
    service = make_service(unnamed("shadow", max_steps=1))

    assert send(service, 3) == [200] * 3
    assert sample(service, "session_limits_total", policy="agents", mode="shadow", limit="max_steps", action="reject") == 2


def test_unknown_callers_are_not_one() -> None:
    """Where nothing tells callers apart they are reported, and not limited together."""
    document = unnamed(max_steps=1)
    document["spec"]["missing_descriptor"] = "share"
    service = make_service(document)

    assert send(service, 3, team="") == [200] * 3
    assert sample(service, "uncounted_total", policy="agents", reason="unnamed") == 3


def test_a_policy_that_forbids_what_is_not_counted_takes_those_that_are_limited() -> None:
    """`uncountable: reject` refuses them only where nothing limits them."""
    document = unnamed(max_steps=2)
    document["spec"]["uncountable"] = "reject"

    assert send(make_service(document), 3) == [200, 200, 429]


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"unnamed_limits": {"max_steps": 1}}, "unnamed_limits needs session_limits"),
        ({"session_limits": {"max_steps": 1}, "unnamed_limits": {}}, "unnamed_limits needs at least one of max_steps"),
        ({"session_limits": {"max_steps": 1}, "unnamed_limits": {"max_steps": 1, "max_calls_per_tool": {}}}, "unknown key"),
    ],
)
def test_what_is_written_wrongly_is_refused(keys: dict[str, Any], problem: str) -> None:
    """With its place, and what would be right."""
    error = refused(spec(**keys))[-1]

    assert error.pointer.startswith("/spec/unnamed_limits")
    assert problem in error.message


def test_validate_says_what_passes_unlimited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once for all policies, as a note; a policy with both has nothing to be told."""
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(limited(max_steps=1)))
    assert main(["validate", str(file)]) == 0
    assert "unnamed_limits would limit them" in capsys.readouterr().err

    file.write_text(json.dumps(unnamed(max_steps=1)))
    assert main(["validate", str(file)]) == 0
    assert "unnamed_limits" not in capsys.readouterr().err
    assert not plain(check(unnamed(max_steps=1)).warnings)
