"""Budgets in every store; time is an argument."""

import asyncio
import inspect
from collections.abc import Callable
from time import time
from typing import Any

import pytest
from hypothesis import given

from extproc.ext_proc.stream import Stream
from extproc.store.rules.budget import Taken
from tests.support.budget_policies import bucket, limited, refused
from tests.support.budgets import (
    CASES,
    MONTH,
    NOON,
    REQUESTS,
    Model,
    Sent,
    ask_store,
    list_asked,
    make_breaker,
    make_bucket,
    make_month,
    make_period,
    make_takes,
    shown,
)
from tests.support.messages import body, headers
from tests.support.records import replace
from tests.support.servers import Driver
from tests.support.service import decoded, make_service, sample
from tests.support.windows import make_hit


@pytest.mark.parametrize("case", CASES)
def test_budget_cases_hold_in_every_store(store: Driver, case: str) -> None:
    for asked, expected in CASES[case]:
        answers = ask_store(store, asked.takes, asked.now)
        assert [shown(answer) for answer in answers if not asked.takes[0].settles] == expected


@given(sent=REQUESTS)
def test_budgets_equal_a_plain_model(opened: Driver, sent: list[Sent]) -> None:
    store, model, now = opened.fresh(), Model(), NOON
    answers: list[list[Taken]] = []
    for place, request in enumerate(sent):
        now += request.gap
        for settlement in list_asked(sent, answers, place, now):
            assert ask_store(store, [settlement], now)[0].granted is model.settle(settlement, now)
        takes = make_takes(request)
        answers.append(ask_store(store, takes, now))
        assert [shown(answer) for answer in answers[-1]] == model.ask(takes, now)


def test_month_follows_the_clock_of_the_server(store: Driver) -> None:
    (taken,) = ask_store(store, [make_month()], None)

    assert taken.start in MONTH.find(round(time() * 1000))


def test_simultaneous_requests_never_take_too_much(store: Driver) -> None:
    takes, hit = [make_bucket(3, limit=100), make_period(1, limit=50)], make_hit(threshold=1_000)

    async def crowd() -> list[Any]:
        async def one() -> Any:  # noqa: ANN401  # answers
            asked: list[Any] = [
                replace(hit, key=store.key(hit)),
                *[replace(take, key=store.name(take.key)) for take in takes],
            ]
            return await store.later(lambda on: on.hit(asked, NOON))

        return await asyncio.gather(*[one() for _ in range(200)])

    answers = store.run(crowd())

    granted = [answer for answer in answers if answer[1].granted]
    assert len(granted) == 33
    assert all(answer[1].granted is answer[2].granted for answer in answers)
    assert sorted(answer[0].count for answer in answers) == list(range(1, 201))
    assert ask_store(store, takes, NOON)[1].left == 50 - 33


def test_marked_and_unmarked_settlements_share_a_call(store: Driver) -> None:
    bucket, period, breaker = make_bucket(9), make_period(9), make_breaker(9)
    ask_store(store, [bucket, period, breaker], NOON)
    settlements = [
        bucket.settle(2, NOON, "a"),
        period.settle(3, NOON),
        breaker.settle(4, NOON, "b"),
    ]

    first = ask_store(store, settlements, NOON)
    again = ask_store(store, settlements, NOON)

    assert [answer.granted for answer in first] == [True, True, True]
    assert [answer.granted for answer in again] == [False, True, False]
    assert [
        taken.left
        for taken in ask_store(store, [make_bucket(0), make_period(0), make_breaker(0)], NOON)
    ] == [3, 7, 5]


@pytest.mark.parametrize("name", ["memory", "cluster"])
def test_refused_request_takes_nothing_from_other_rules(
    drivers: Callable[[str], Driver], name: str
) -> None:
    """Also on a cluster, where the rules of a request are in different slots."""
    store = drivers(name).fresh()
    rules = [bucket(0.001, 2, name="caller"), bucket(0.001, 1, name="team", keys=["header:x-team"])]
    service = make_service(
        limited(*rules, identity=store.name("").replace(":", "-")), store=store.store
    )

    async def send(key: str, team: str) -> str:
        stream = Stream(service)
        answer = None
        for message in (headers("/x", x_api_key=key, x_team=team), body(b"{}")):
            reply = stream.receive(message.SerializeToString())
            answer = await reply if inspect.isawaitable(reply) else reply
            if answer.done:
                break
        stream.close()
        assert answer is not None
        return refused(decoded(answer))

    first = [store.run(send("greedy", f"used-{number}")) for number in range(2)]
    teams = [
        (store.run(send("greedy", f"{number}")), store.run(send(f"new-{number}", f"{number}")))
        for number in range(20)
    ]

    assert (first, teams) == (["", ""], [("token_bucket_exceeded", "")] * 20)
    assert sample(service, "budget_lost_total") == 0


def test_periods_begin_by_the_calendar(store: Driver) -> None:
    """Without an argument, periods begin when the calendar says so."""
    (first,) = ask_store(store, [make_period(1)], None)

    assert first.granted
    assert first.start % 300_000 == 0
    assert 0 < first.reset_ms <= 300_000
