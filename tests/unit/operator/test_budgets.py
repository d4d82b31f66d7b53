"""Budgets for operators: the table behind `/budgets`, its events, and grants that add to a budget once."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Mapping
from typing import Any

import pytest

from extproc.cli.main import main
from extproc.errors import BadOrderError, StoreError
from extproc.operator.admin.budget_report import NO_BUDGETS
from extproc.operator.budget_events import BudgetEvents
from extproc.operator.overrides import describe_override, read_override, write_override
from extproc.operator.table import MAX_ROWS, MAX_TENANT_ROWS
from extproc.store.memory import MemoryStore
from tests.support.budget_policies import ask, bucket, limited, refused
from tests.support.operated import Operated, daily


def pick(row: Mapping[str, Any], *names: str) -> list[Any]:
    """Some fields of a row."""
    return [row[name] for name in names]


# What /budgets shows


def test_callers_are_listed_tightest_first() -> None:
    """By policy and rule, with what is used, left and refused; a refusal names the grant to copy."""
    made = Operated(limited(daily(keys=["header:x-user"]), daily(4, "small", keys=["header:x-team"])))
    for _ in range(5):
        ask(made.service, x_user="ann", x_team="red")
    ask(made.service, x_user="bob", x_team="blue")

    report = made.report()
    first, second, third, fourth = report["budgets"]

    assert pick(first, "rule", "limit", "used", "left", "used_percent", "refused") == ["small", 4, 4, 0, 100.0, 1]
    assert first["descriptors"] == {"x-team": "red"}
    assert (
        first["commands"]["free"] == f"loopguard grant --caller {first['caller']} --policy p --budget small --amount 5 --for 1d"
    )
    assert 0 < first["reset_seconds"] <= 86_400
    assert pick(second, "rule", "used", "descriptors", "stage") == ["daily", 4, {"x-user": "ann"}, None]
    assert pick(third, "rule", "used") == ["small", 1]
    assert pick(fourth, "rule", "used") == ["daily", 1]
    assert report["total"] == {"budgets": 4, "callers": 4, "used_up": 1, "open_breakers": 0, "refused": 1}
    assert made.report(shown=False)["budgets"][0]["descriptors"] is None
    assert len(made.report(limit=1)["budgets"]) == 1


def test_a_caller_whose_row_was_dropped_has_one_again() -> None:
    """Rows are dropped when there are too many; what is remembered of their keys brings none back."""
    made = Operated(limited(daily()))
    ask(made.service, "ann")
    for number in range(MAX_ROWS):
        ask(made.service, f"{number}")

    ask(made.service, "ann")

    rows = made.service.reporter.budgets.copy()
    assert len(rows) == MAX_ROWS
    assert [row.requests for row in rows[-2:]] == [1, 1]
    assert made.report()["budgets"][0]["used"] == 2


def test_an_empty_report_says_why() -> None:
    """No budget, no caller yet, or none that is asked for."""
    made = Operated(limited(daily()))

    assert made.report()["note"] == "no request of a caller with a budget in the last hour"
    assert made.report(exist=False)["note"] == NO_BUDGETS
    ask(made.service)
    assert made.report()["note"] is None
    assert made.report(policy="other")["note"] == "none of 1 budgets matches"


def test_replicas_tell_one_row() -> None:
    """What is left is the newest answer of the store; refusals are added up."""
    made = Operated(limited(daily(2)), replicas=2)
    for place in (0, 1, 0, 1):
        ask(made.services[place])

    (row,) = made.report()["budgets"]

    assert pick(row, "left", "used", "refused", "requests") == [0, 2, 2, 4]


def test_a_refused_request_and_a_settlement_do_not_count_as_used() -> None:
    """A loop gives back what it took; what a response has not used comes back."""
    loop = {"enabled": True, "window_seconds": 60, "threshold_identical_requests": 2, "action": "reject"}
    made = Operated(limited(daily(), loop_detection=loop))
    for _ in range(5):
        ask(made.service)
    (row,) = made.report()["budgets"]
    (kept,) = made.service.reporter.budgets.copy()
    settlement = kept.take.settle(500_000, kept.start)

    made.service.reporter.budgets.settle(settlement)

    assert row["used"] == 1
    assert made.report()["budgets"][0]["used"] == 0.5


def test_a_bucket_fills_while_nobody_looks() -> None:
    """What is left is that of now, not that of the last request."""
    made = Operated(limited(bucket(per_second=1, burst=3)))
    ask(made.service)
    (row,) = made.view().document.rows

    assert row.find_left(row.told) == 2 * row.units
    assert row.find_left(row.told + 0.5) == 2.5 * row.units
    assert row.find_left(row.told + 60) == 3 * row.units
    assert (row.find_reset_ms(row.told), row.find_reset_ms(row.told + 60)) == (1_000, 0)


def test_an_open_breaker_says_how_to_close_it() -> None:
    """It is the first row, and a release is its command."""
    breaker = {"enabled": True, "spend_rate_threshold_per_minute": 2}
    made = Operated(limited(daily(), circuit_breaker=breaker))
    for _ in range(3):
        ask(made.service)

    first, second = made.report()["budgets"]

    assert pick(first, "rule", "open", "reset_seconds", "refused") == ["circuit_breaker", True, None, 2]
    assert first["commands"] == {"free": f"loopguard release --caller {first['caller']} --policy p"}
    assert second["commands"] == {}


def test_the_table_is_bounded() -> None:
    """Whatever clients send: by rows, and by rows of one caller."""
    made = Operated(limited(*[daily(name=f"r{number}") for number in range(MAX_TENANT_ROWS + 5)]))
    ask(made.service)
    assert len(made.service.reporter.budgets.copy()) == MAX_TENANT_ROWS
    for number in range(12):
        ask(made.service, f"caller-{number}")

    assert len(made.service.reporter.budgets.copy()) == MAX_ROWS


# Events


def test_events_are_sent_once_a_minute() -> None:
    """A stage and a refusal, each with the command that helps; the same again only after a minute."""
    made = Operated(limited(daily(4), identity="a"))
    sent: list[tuple[str, str, Mapping[str, object]]] = []
    events = BudgetEvents(lambda *event: sent.append(event), lambda: False)
    now = time.time()

    def look(requests: int, after: float) -> list[tuple[str, str]]:
        for _ in range(requests):
            ask(made.service)
        sent.clear()
        events.look(made.service.reporter.budgets.copy(), now + after)
        return [(kind, subject) for kind, subject, _ in sent]

    assert look(1, 0) == []
    assert look(1, 1) == [("budget_reached", "a")]
    assert look(2, 2) == []
    assert look(1, 3) == [("budget_refused", "a")]
    (_, _, told) = sent[0]
    assert [told[name] for name in ("rule", "limit", "left", "refused", "caller")] == ["daily", 4, 0, 1, None]
    assert str(told["command"]).endswith("--policy a --budget daily --amount 5 --for 1d")
    assert look(3, 5) == []
    assert look(1, 64) == [("budget_refused", "a")]


def test_a_breaker_that_opens_is_an_event_once() -> None:
    """However many requests it refuses after that."""
    breaker = {"enabled": True, "spend_rate_threshold_per_minute": 3}
    made = Operated(limited(daily(50), circuit_breaker=breaker))
    sent: list[tuple[str, str, Mapping[str, object]]] = []
    events = BudgetEvents(lambda *event: sent.append(event), lambda: True)
    for after in range(6):
        ask(made.service)
        events.look(made.service.reporter.budgets.copy(), time.time() + 100 * after)

    ((kind, subject, told),) = sent
    assert (kind, subject, told["rule"]) == ("breaker_opened", "p", "circuit_breaker")
    assert told["command"] == f"loopguard release --caller {told['loopguard.caller']} --policy p"


# Grants


@pytest.mark.parametrize("named", ["hash", "values"])
def test_a_grant_adds_to_a_budget_once(named: str) -> None:
    """On every replica at once: exactly this many requests more, however often the same grant is sent."""
    made = Operated(limited(daily(5)), replicas=2)
    for place in range(7):
        ask(made.services[place % 2])
    ask(made.service, "other")
    row = next(row for row in made.report()["budgets"] if row["left"] == 0)
    order: dict[str, Any] = {
        "caller": row["caller"] if named == "hash" else {"x-api-key": "k"},
        "budget": "daily",
        "amount": 3,
        "key": "x",
    }

    given, notes = made.give(**order)
    again = made.give(1, **order)[1]
    answers = [refused(ask(made.services[place % 2])) for place in range(5)]

    assert notes == []
    assert again == ["this grant was given before, and is not added again"]
    assert answers == ["", "", "", "budget_exceeded", "budget_exceeded"]
    assert describe_override(given).items() >= {"kind": "grant", "budget": "daily", "amount": 3}.items()
    assert read_override(given.name, write_override(given)) == given
    assert made.service.overrides is None  # no request has to look for it
    shown = next(row for row in made.report(given)["budgets"] if row["orders"])
    assert [order["amount"] for order in shown["orders"]] == [3]
    assert "revoke" not in shown["commands"]
    with pytest.raises(BadOrderError, match="cannot be revoked"):
        asyncio.run(made.givers[0].revoke(given.name, "eve"))


def test_a_grant_fills_a_bucket_and_no_more() -> None:
    """A budget holds no more than the whole; the operator is told."""
    made = Operated(limited(bucket(0.001, 3)))
    for _ in range(2):
        ask(made.service)
    caller = made.report()["budgets"][0]["caller"]

    _, notes = made.give(caller=caller, budget="r", amount=3)

    assert len(notes) == 1
    assert "holds no more" in notes[0]
    assert [refused(ask(made.service)) for _ in range(4)] == ["", "", "", "token_bucket_exceeded"]


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        ({"budget": "other"}, "budget must be the name of a rule; policy p has: daily"),
        ({"budget": "circuit_breaker"}, "use release"),
        ({"amount": 11}, "more than the whole budget of 10"),
        ({"amount": 0}, "amount must be a number, more than 0"),
        ({"amount": float("nan")}, "amount must be a number"),
        ({"amount": None}, "a grant of a budget needs an amount"),
        ({"budget": None}, "amount belongs to a budget"),
        ({"caller": "a" * 16}, "no request of this caller met rule daily"),
        ({"policy": None}, "name one of p, q with policy"),
        ({"steps": 3}, "steps cannot be given for a budget"),
        ({"caller": None, "session": "a" * 16}, "needs a caller"),
        ({"kind": "allow"}, "amount belongs to a grant, not to a allow"),
    ],
)
def test_a_grant_that_cannot_be_added_is_refused(order: dict[str, Any], problem: str) -> None:
    """With what would be right, and nothing is added."""
    made = Operated(limited(daily()), limited(daily(), identity="q"))
    ask(made.service)
    caller = made.report()["budgets"][0]["caller"]
    good = {"kind": "grant", "caller": caller, "policy": "p", "budget": "daily", "amount": 1}

    with pytest.raises(BadOrderError) as error:
        asyncio.run(made.givers[0].give({**good, **order}, "eve"))

    assert problem in str(error.value)
    assert made.givers[0].list_standing() == []


def test_a_grant_that_the_store_does_not_take_can_be_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves nothing behind that would keep the next one from being added."""
    made = Operated(limited(daily(2)))
    for _ in range(3):
        ask(made.service)
    order = {"caller": made.report()["budgets"][0]["caller"], "budget": "daily", "amount": 1, "key": "x"}

    def fail(*_: object) -> list[Any]:
        raise StoreError("away", kind="connection")

    with monkeypatch.context() as patched:
        patched.setattr(made.givers[0], "_store", Unable(made.store, fail))
        with pytest.raises(StoreError):
            made.give(**order)
    made.give(**order)

    assert [refused(ask(made.service)) for _ in range(2)] == ["", "budget_exceeded"]


class Unable:
    """A store that keeps documents and counts nothing."""

    def __init__(self, store: MemoryStore, hit: Any) -> None:  # noqa: ANN401  # any function
        self.documents = store.documents
        self.hit = hit


def test_the_log_has_the_command(caplog: pytest.LogCaptureFixture) -> None:
    """A refusal's line names the grant, which the command line takes as it is."""
    made = Operated(limited(daily(2, "per day")))
    for _ in range(3):
        ask(made.service)

    (line,) = [vars(record)["fields"] for record in caplog.records if record.getMessage() == "budget exceeded"]

    assert line["command"] == f"loopguard grant --caller {line['tenant']} --policy p --budget 'per day' --amount 5 --for 1d"
    assert main([*shlex.split(line["command"])[1:], "--admin", "http://127.0.0.1:9"]) == 1  # well formed; no server there


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--budget", "r"], "--budget and --amount belong together"),
        (["--budget", "r", "--amount", "1", "--steps", "2"], "--steps does not go with --budget"),
        ([], "or --budget and --amount"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before any server is asked."""
    assert main(["grant", "--caller", "a" * 16, *flags, "--admin", "http://127.0.0.1:9"]) == 2
    assert problem in capsys.readouterr().err
