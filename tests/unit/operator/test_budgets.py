"""Budgets for operators: the table behind `/budgets`, its events, and one-time grants."""

import argparse
import json
import shlex
import time
from collections.abc import Mapping
from typing import Any

import pytest

from extproc.budgets.commands import SOME_REQUESTS, write_budget_grant
from extproc.cli.commands import grant
from extproc.cli.commands.ordering import make_order
from extproc.cli.main import main, make_parser
from extproc.engine.settlements import Settled
from extproc.operator.admin.budget_report import NO_BUDGETS
from extproc.operator.admin.row_commands import suggest_for_session
from extproc.operator.admin.row_states import read_time
from extproc.operator.budget_rows import BudgetRow
from extproc.operator.row_events import BudgetEvents
from extproc.operator.table import MAX_ROWS, MAX_TENANT_ROWS
from extproc.store.rules.budget import BUCKET, MAX_RAISED, PERIOD, Take
from tests.support.budget_policies import ask, bucket, daily, limited, refused
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.operated import COUNTS, NOTHING, Away, Operated

DAY = 86_400


def operate(*policies: dict[str, Any], **more: Any) -> Operated:  # noqa: ANN401  # as Operated
    return Operated(*policies, show_callers=True, **more)


def list_budgets(made: Operated, **query: Any) -> list[dict[str, Any]]:  # noqa: ANN401  # as ask
    rows: list[dict[str, Any]] = made.ask("/budgets", **query)["budgets"]
    return rows


def pick(row: Mapping[str, Any], *names: str) -> list[Any]:
    return [row[name] for name in names]


def use_up(made: Operated, times: int) -> str:
    for _ in range(times):
        ask(made.service)
    return str(list_budgets(made)[0]["caller"])


# What /budgets shows


def test_tightest_budget_is_listed_first() -> None:
    made = operate(
        limited(daily(keys=["header:x-user"]), daily(4, "small", keys=["header:x-team"]))
    )
    for _ in range(5):
        ask(made.service, x_user="ann", x_team="red")
    ask(made.service, x_user="bob", x_team="blue")

    report = made.ask("/budgets")
    first = report["budgets"][0]

    shown = [
        pick(row, "rule", "limit", "used", "left", "refused", "stage", "descriptors")
        for row in report["budgets"]
    ]
    assert shown == [
        ["small", 4, 4, 0, 1, "reject", {"x-team": "red"}],
        ["daily", 10, 4, 6, 0, None, {"x-user": "ann"}],
        ["small", 4, 1, 3, 0, None, {"x-team": "blue"}],
        ["daily", 10, 1, 9, 0, None, {"x-user": "bob"}],
    ]
    assert first["used_percent"] == 100.0
    assert first["commands"]["free"] == (
        f"loopguard grant --caller {first['caller']} --policy p --budget small --amount 5 --for 1d"
    )
    assert 0 < first["reset_seconds"] <= 86_400
    assert report["total"] == {
        "budgets": 4,
        "callers": 4,
        "used_up": 1,
        "open_breakers": 0,
        "refused": 1,
    }
    assert list_budgets(made, host="evil.example")[0]["descriptors"] is None
    assert len(list_budgets(made, limit=1)) == 1


def test_empty_report_has_the_reason() -> None:
    made = operate(limited(daily()))

    assert made.ask("/budgets")["note"] == "no request of a caller with a budget in the last hour"
    assert Operated(policy("p", ANY)).ask("/budgets")["note"] == NO_BUDGETS
    ask(made.service)
    assert made.ask("/budgets")["note"] is None
    assert made.ask("/budgets", policy="other")["note"] == "none of 1 budgets matches"


def test_replicas_add_up_one_row() -> None:
    made = operate(limited(daily(2)), replicas=2)
    for place in (0, 1, 0, 1):
        ask(made.services[place])

    (row,) = list_budgets(made)

    assert pick(row, "left", "used", "refused", "requests") == [0, 2, 2, 4]


def test_refused_and_settled_amounts_are_not_used() -> None:
    loop = {
        "enabled": True,
        "window_seconds": 60,
        "threshold_identical_requests": 2,
        "action": "reject",
    }
    made = operate(limited(daily(), loop_detection=loop))
    for _ in range(5):
        ask(made.service)
    (row,) = list_budgets(made)
    (kept,) = made.service.reporter.budgets.copy()
    budget, settlement = made.service.engine.plans[0].budget, kept.make_credit(500_000)
    assert budget is not None

    settled = Settled(
        settlement,
        "p",
        "enforce",
        tenant=kept.tenant,
        rule="daily",
        limit=budget.guard.rules[0].limits[0],
    )
    made.service.reporter.budgets.settle(settled, settlement, time.time(), estimated=False)

    assert row["used"] == 1
    assert list_budgets(made)[0]["used"] == 0.5


def test_bucket_fills_between_requests() -> None:
    made = operate(limited(bucket(per_second=1, burst=3)))
    ask(made.service)
    (row,) = made.service.reporter.budgets.make_document(shows_callers=False).rows

    assert row.find_left(row.told) == 2 * row.units
    assert row.find_left(row.told + 0.5) == 2.5 * row.units
    assert row.find_left(row.told + 60) == 3 * row.units
    assert (row.find_reset_ms(row.told), row.find_reset_ms(row.told + 60)) == (1_000, 0)


def test_open_breaker_is_first_and_has_a_release() -> None:
    breaker = {"enabled": True, "spend_rate_threshold_per_minute": 2}
    made = operate(limited(daily(), circuit_breaker=breaker))
    for _ in range(3):
        ask(made.service)

    first, second = list_budgets(made)

    assert pick(first, "rule", "open", "reset_seconds", "refused") == [
        "circuit_breaker",
        True,
        None,
        2,
    ]
    assert first["commands"] == {"free": f"loopguard release --caller {first['caller']} --policy p"}
    assert second["commands"] == {}


def test_table_is_bounded_in_all_and_per_caller() -> None:
    made = operate(limited(*[daily(name=f"r{number}") for number in range(MAX_TENANT_ROWS + 5)]))
    table = made.service.reporter.budgets
    ask(made.service)
    assert len(table.copy()) == MAX_TENANT_ROWS
    for number in range(12):
        ask(made.service, f"caller-{number}")
    ask(made.service)

    rows = table.copy()
    assert (len(rows), rows[-1].requests) == (MAX_ROWS, 1)
    assert list_budgets(made)[0]["used"] == 2


# Events


def test_same_event_is_sent_once_a_minute() -> None:
    made = operate(limited(daily(4), identity="a"))
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
    assert [told[name] for name in ("rule", "limit", "left", "refused", "caller")] == [
        "daily",
        4,
        0,
        1,
        None,
    ]
    assert str(told["command"]).endswith("--policy a --budget daily --amount 5 --for 1d")
    assert look(3, 5) == []
    assert look(1, 64) == [("budget_refused", "a")]


def test_opened_breaker_is_one_event() -> None:
    breaker = {"enabled": True, "spend_rate_threshold_per_minute": 3}
    made = operate(limited(daily(50), circuit_breaker=breaker))
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
def test_same_grant_adds_to_a_budget_once(named: str) -> None:
    made = operate(limited(daily(5)), replicas=2)
    for place in range(7):
        ask(made.services[place % 2])
    ask(made.service, "other")
    row = next(row for row in list_budgets(made) if row["left"] == 0)
    order: dict[str, Any] = {
        "kind": "grant",
        "caller": row["caller"] if named == "hash" else {"x-api-key": "k"},
        "budget": "daily",
        "amount": 3,
        "key": "x",
    }

    given, notes = made.give(**order)
    again = made.give(1, **order)[1]
    answers = [refused(ask(made.services[place % 2])) for place in range(5)]

    assert (notes, again) == ([], ["this grant was given before and is not added again"])
    assert answers == ["", "", "", "budget_exceeded", "budget_exceeded"]
    assert given.items() >= {"kind": "grant", "budget": "daily", "amount": 3}.items()
    assert made.service.overrides is None  # no request has to look for it
    shown = next(row for row in list_budgets(made) if row["orders"])
    assert [order["amount"] for order in shown["orders"]] == [3]
    assert "revoke" not in shown["commands"]
    status, answer = made.revoke(given["override"])
    assert (status, "cannot be revoked" in answer["error"]) == (400, True)


@pytest.mark.parametrize(
    ("amount", "seconds", "passes", "notes"), [(3, None, 3, 1), (5, DAY, 6, 0)]
)
def test_grant_fills_a_bucket_up_to_its_limit(
    amount: int, seconds: int | None, passes: int, notes: int
) -> None:
    made = operate(limited(bucket(0.001, 3)))
    caller = use_up(made, 2)

    said = made.give(kind="grant", caller=caller, budget="r", amount=amount, seconds=seconds)[1]

    assert [("cannot exceed its limit" in note) for note in said] == [True] * notes
    assert [refused(ask(made.service)) for _ in range(passes + 1)] == [""] * passes + [
        "token_bucket_exceeded"
    ]


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        ({"budget": "other"}, "budget must be the name of a rule; policy p has: daily"),
        ({"budget": "other", "seconds": DAY}, "budget must be the name of a rule"),
        ({"budget": "circuit_breaker"}, "use release"),
        ({"amount": 11}, "more than the whole budget of 10"),
        ({"amount": 0}, "amount must be a number, more than 0"),
        ({"amount": float("nan")}, "amount must be a number"),
        ({"amount": None}, "a grant of a budget needs an amount"),
        ({"budget": None}, "amount needs a budget"),
        ({"caller": "a" * 16}, "no request of this caller met rule daily"),
        ({"policy": None}, "name one of p, q with policy"),
        ({"steps": 3}, "steps cannot be combined with budget"),
        ({"caller": None, "session": "a" * 16}, "needs a caller"),
        ({"kind": "allow"}, "amount is only valid for a grant"),
    ],
)
def test_invalid_grant_is_refused_with_the_reason(order: dict[str, Any], problem: str) -> None:
    made = operate(limited(daily()), limited(daily(), identity="q"))
    good = {
        "kind": "grant",
        "caller": use_up(made, 1),
        "policy": "p",
        "budget": "daily",
        "amount": 1,
    }

    status, answer = made.post({**good, **order})

    assert (status, problem in answer["error"]) == (400, True)
    assert made.list_orders() == []


def test_grant_that_failed_in_the_store_can_be_repeated() -> None:
    store = Away()
    made = operate(limited(daily(2)), store=store)
    order: dict[str, Any] = {
        "kind": "grant",
        "caller": use_up(made, 3),
        "budget": "daily",
        "amount": 1,
        "key": "x",
    }

    store.away = COUNTS
    failed = made.post(order)[0]
    store.away = NOTHING
    made.give(**order)

    assert failed == 503
    assert [refused(ask(made.service)) for _ in range(2)] == ["", "budget_exceeded"]


def test_log_line_of_a_refusal_has_a_valid_command(caplog: pytest.LogCaptureFixture) -> None:
    made = operate(limited(daily(2, "per day")))
    for _ in range(3):
        ask(made.service)

    (line,) = [
        vars(record)["fields"]
        for record in caplog.records
        if record.getMessage() == "budget exceeded"
    ]

    assert line["command"] == (
        f"loopguard grant --caller {line['tenant']} --policy p --budget 'per day' --amount 5 "
        "--for 1d"
    )
    # Well formed; no server there
    assert main([*shlex.split(line["command"])[1:], "--admin", "http://127.0.0.1:9"]) == 1


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--budget", "r"], "--budget and --amount belong together"),
        (["--budget", "r", "--amount", "1", "--steps", "2"], "--steps does not go with --budget"),
        ([], "or --budget and --amount"),
    ],
)
def test_conflicting_flags_are_a_usage_error(
    flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["grant", "--caller", "a" * 16, *flags, "--admin", "http://127.0.0.1:9"]) == 2
    assert problem in capsys.readouterr().err


# Limits that are raised


def test_grant_with_duration_raises_the_limit_until_it_ends() -> None:
    made = Operated(limited(daily(2), daily(9, "other")), replicas=2)
    caller = use_up(made, 3)

    given, notes = made.give(kind="grant", caller=caller, budget="daily", amount=5, seconds=DAY)
    made.refresh()

    assert (notes, read_time(given["ends"]) - read_time(given["since"]), given["meets"]) == (
        [],
        DAY,
        ["p"],
    )
    assert [refused(ask(made.services[place % 2])) for place in range(6)] == [""] * 5 + [
        "budget_exceeded"
    ]
    row = next(row for row in made.ask("/budgets", 1)["budgets"] if row["rule"] == "daily")
    assert (row["limit"], row["left"], row["orders"][0]["raises"]) == (7, 0, True)
    assert "revoke" in row["commands"]
    assert given.items() >= {"budget": "daily", "amount": 5, "raises": True}.items()
    assert made.revoke(given["override"])[0] == 200
    assert refused(ask(made.service)) == "budget_exceeded"


def test_limit_is_raised_for_a_caller_without_requests() -> None:
    other = operate(limited(daily(1)))
    caller = use_up(other, 1)
    made = operate(limited(daily(1)))

    _, notes = made.give(kind="grant", caller=caller, budget="daily", amount=2, seconds=DAY)

    assert notes == ["no known request of this caller met rule daily in the last hour"]
    assert [refused(ask(made.service)) for _ in range(4)] == ["", "", "", "budget_exceeded"]


def read_command(command: str) -> dict[str, Any]:
    options = make_parser(["grant"]).parse_args(shlex.split(command)[1:])
    return {**make_order("grant", options), "budget": options.budget, "amount": options.amount}


@pytest.mark.parametrize("kind", [BUCKET, PERIOD])
def test_raised_limit_stays_within_exact_numbers_of_lua(kind: int) -> None:
    take = Take("k", kind, 1, 10, 1, DAY)

    assert take.raise_limit(5).limit == 15
    assert take.raise_limit(10**18).limit == MAX_RAISED
    assert Take("k", kind, 1, MAX_RAISED + 1, 1, DAY).raise_limit(5).limit == MAX_RAISED + 1


@pytest.mark.parametrize("used", [2, 3, 40])
@pytest.mark.parametrize("most", [1, 2, 10, 30])
def test_suggested_grant_lets_some_requests_through(most: int, used: int) -> None:
    made = Operated(limited(daily(most)))
    caller = use_up(made, used)
    (row,) = made.ask("/budgets")["budgets"]
    command = row["commands"].get("free")
    if command is None:
        assert row["used_percent"] < 80
        return

    made.give(**read_command(command))

    assert row["caller"] == caller
    assert [refused(ask(made.service)) for _ in range(SOME_REQUESTS)] == [""] * SOME_REQUESTS


@pytest.mark.parametrize(
    ("limit", "left", "asked", "expected"),
    [
        (100, 0, 1, "--amount 10"),
        (100, 0.5, 10, "--amount 50"),
        (100, -60, 1, "--amount 65"),
        (100, -450, 1, "--amount 460"),
        (100, 0, 30, "--amount 150 --for 1d"),
        (1, 0.5, 2, "--amount 9.5 --for 1d"),
    ],
)
def test_suggested_amount_covers_overspending(
    limit: float, left: float, asked: float, expected: str
) -> None:
    assert write_budget_grant("c", "p", "r", limit, left, asked).endswith(f"--budget r {expected}")


def describe(limit: str, used: float, allowed: float, cost: float = 0) -> dict[str, Any]:
    """A row of /sessions, as far as commands depend on it."""
    refusal = {"limit": limit, "used": used, "allowed": allowed, "tool": None}
    row: dict[str, Any] = {
        "session": "s",
        "caller": "c",
        "killed": None,
        "orders": [],
        "total_step_count": 4,
    }
    return {**row, "refused": refusal, "actual_cost": cost}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (describe("max_steps", 16, 16), "--steps 20"),
        (describe("max_tool_calls", 90, 50), "--tool-calls 60"),
        (describe("max_cost_per_session", 5, 5, cost=5), "--cost 6.3"),
        (describe("max_cost_per_session", 25.5, 5), "--cost 26"),
    ],
)
def test_suggested_session_grant_covers_overspending(row: dict[str, Any], expected: str) -> None:
    assert (
        suggest_for_session(row, named=True)["free"]
        == f"loopguard grant --caller c --session s {expected}"
    )


def test_budget_grant_has_no_default_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []

    def give(kind: str, options: argparse.Namespace, **more: object) -> int:
        sent.append({**make_order(kind, options), **more})
        return 0

    monkeypatch.setattr(grant, "give", give)
    for more in ("--budget r --amount 1", "--budget r --amount 1 --for 1d", "--steps 1"):
        options = make_parser(["grant"]).parse_args(["grant", "--caller", "a" * 16, *more.split()])
        grant.run(options)

    assert [order.get("seconds") for order in sent] == [None, DAY, DAY]
    assert json.dumps(sent)


def test_grant_covers_what_requests_really_cost() -> None:
    row = BudgetRow(
        "c", "p", "enforce", "r", "1d", units=1_000, kind=PERIOD, limit=500, left=-100,
        asked=4, requests=10, refused=6, start=1, span=100_000,
    )  # fmt: skip

    command = row.write_command(1.0)

    # Five requests of $0.15, and $0.10
    assert command is not None
    assert command.endswith("--amount 0.85 --for 1d")
