"""A grant that raises the limit of a budget for a while, and the grants that pages propose."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
from typing import Any

import pytest

from extproc.budgets.commands import SOME_REQUESTS, write_budget_grant
from extproc.cli.commands import grant
from extproc.cli.commands.ordering import make_order
from extproc.cli.main import make_parser
from extproc.errors import BadOrderError
from extproc.operator.admin.row_commands import suggest_for_session
from extproc.operator.overrides import describe_override, read_override, write_override
from extproc.store.rules.budget import BUCKET, MAX_RAISED, PERIOD, Take
from tests.support.budget_policies import ask, bucket, limited, refused
from tests.support.operated import Operated, daily

DAY = 86_400


def use_up(made: Operated, times: int) -> str:
    """Send as many requests; returns the caller of the first budget."""
    for _ in range(times):
        ask(made.service)
    return str(made.report()["budgets"][0]["caller"])


def read_command(command: str) -> dict[str, Any]:
    """The order that the command line would send."""
    options = make_parser(["grant"]).parse_args(shlex.split(command)[1:])
    return {**make_order("grant", options), "budget": options.budget, "amount": options.amount}


def test_a_grant_raises_a_limit_until_it_ends() -> None:
    """On every replica, beyond the whole budget; what was used stays used."""
    made = Operated(limited(daily(2)), replicas=2)
    caller = use_up(made, 3)

    given, notes = made.give(caller=caller, budget="daily", amount=5, seconds=DAY)
    asyncio.run(made.givers[1].refresh())

    assert (notes, given.ends - given.since, given.meets) == ([], DAY, ("p",))
    assert [refused(ask(made.services[place % 2])) for place in range(6)] == [""] * 5 + ["budget_exceeded"]
    (row,) = made.report(given)["budgets"]
    assert (row["limit"], row["left"], row["orders"][0]["raises"]) == (7, 0, True)
    assert "revoke" in row["commands"]
    assert read_override(given.name, write_override(given)) == given
    assert asyncio.run(made.givers[0].revoke(given.name, "eve"))
    assert refused(ask(made.service)) == "budget_exceeded"


def test_a_raised_limit_is_that_of_one_rule_and_caller() -> None:
    """Neither other rules nor other callers have more."""
    made = Operated(limited(daily(2), {**daily(3), "name": "other"}))
    made.give(caller=use_up(made, 2), budget="daily", amount=9, seconds=DAY)

    assert [refused(ask(made.service)) for _ in range(2)] == ["", "budget_exceeded"]


def test_a_bucket_gets_more_at_once() -> None:
    """Its level would otherwise only rise with time."""
    made = Operated(limited(bucket(0.001, 3)))
    caller = use_up(made, 4)

    made.give(caller=caller, budget="r", amount=5, seconds=DAY)

    assert [refused(ask(made.service)) for _ in range(6)] == [""] * 5 + ["token_bucket_exceeded"]


def test_a_limit_is_raised_for_a_caller_that_was_not_seen() -> None:
    """The operator is told; the first request has it."""
    other = Operated(limited(daily(1)))
    caller = use_up(other, 1)
    made = Operated(limited(daily(1)))

    _, notes = made.give(caller=caller, budget="daily", amount=2, seconds=DAY)

    assert notes == ["no request of this caller met rule daily in the last hour, as far as this server knows"]
    assert [refused(ask(made.service)) for _ in range(4)] == ["", "", "", "budget_exceeded"]


def test_a_limit_is_not_raised_for_a_rule_that_no_policy_has() -> None:
    """As for what is added once."""
    with pytest.raises(BadOrderError, match="budget must be the name of a rule"):
        Operated(limited(daily())).give(caller="a" * 16, budget="other", amount=2, seconds=DAY)


@pytest.mark.parametrize("kind", [BUCKET, PERIOD])
def test_a_raised_limit_stays_exact(kind: int) -> None:
    """Numbers of Lua are; a limit that is above the bound already stays as it is."""
    take = Take("k", kind, 1, 10, 1, DAY)

    assert take.raise_limit(5).limit == 15
    assert take.raise_limit(10**18).limit == MAX_RAISED
    assert Take("k", kind, 1, MAX_RAISED + 1, 1, DAY).raise_limit(5).limit == MAX_RAISED + 1


@pytest.mark.parametrize("used", [2, 3, 40])
@pytest.mark.parametrize("most", [1, 2, 10, 30])
def test_the_proposed_grant_is_enough_for_some_requests(most: int, used: int) -> None:
    """Whatever part of its budget a request takes, and however far the caller is over it."""
    made = Operated(limited(daily(most)))
    caller = use_up(made, used)
    (row,) = made.report()["budgets"]
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
def test_the_proposed_amount_covers_what_was_overspent(limit: float, left: float, asked: float, expected: str) -> None:
    """A budget that cannot hold as much gets a higher limit for a day."""
    assert write_budget_grant("c", "p", "r", limit, left, asked).endswith(f"--budget r {expected}")


def describe(limit: str, used: float, allowed: float, cost: float = 0) -> dict[str, Any]:
    """A row of /sessions, as far as commands depend on it."""
    asked = {"limit": limit, "used": used, "allowed": allowed, "tool": None}
    return {
        "session": "s",
        "caller": "c",
        "killed": None,
        "orders": [],
        "refused": asked,
        "actual_cost": cost,
        "total_step_count": 4,
    }


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (describe("max_steps", 16, 16), "--steps 20"),
        (describe("max_tool_calls", 90, 50), "--tool-calls 60"),
        (describe("max_cost_per_session", 5, 5, cost=5), "--cost 6.3"),
        (describe("max_cost_per_session", 25.5, 5), "--cost 26"),
    ],
)
def test_the_grant_for_a_session_covers_what_was_overspent(row: dict[str, Any], expected: str) -> None:
    """Twenty tool calls do not help a session that is forty over."""
    assert suggest_for_session(row, named=True)["free"] == f"loopguard grant --caller c --session s {expected}"


def test_the_command_sends_seconds_only_if_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """One day is no default of a budget: without --for, the amount is added once."""
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


def test_orders_say_what_they_raise() -> None:
    """In JSON, and in the words of the command line."""
    made = Operated(limited(daily(2)))
    given, _ = made.give(caller=use_up(made, 1), budget="daily", amount=5, seconds=60)

    shown = describe_override(given)
    assert (shown["budget"], shown["amount"], shown["raises"]) == ("daily", 5, True)
