"""Reported usage replaces what was estimated."""

import asyncio
import json
from typing import Any

import pytest

from extproc.budgets.costs import BUCKET_UNITS, Anchors
from extproc.errors import PartlyAwayError, StoreError
from extproc.ext_proc.judging import Later
from extproc.ext_proc.service import Service
from extproc.ext_proc.stream import Stream
from extproc.store.pending import Pending
from extproc.store.rules.session import Question
from tests.support.budget_policies import (
    ask,
    bucket,
    chat,
    limited,
    refused,
    rule,
    serve,
    settle,
    tell,
    tokens_left,
)
from tests.support.messages import headers
from tests.support.orders import apply_orders, order
from tests.support.service import CHAT, FailingStore, make_service, metadata_of, sample

LLM = rule("token_bucket_llm", tokens_per_minute=10_000, tokens_per_day=1_000_000)


@pytest.mark.parametrize(
    ("told", "used"),
    [
        ({"input": 100, "output": 20}, 120),
        ({"input": 100, "output": 20, "cached": 90}, 120),
        ({"input": 100, "output": 20, "cache_read": 500, "cache_write": 30}, 650),
        ({"input": 9_000, "output": 20_000}, 29_000),
    ],
)
def test_usage_replaces_the_estimate(told: dict[str, int], used: int) -> None:
    service, clock = serve(limited(LLM))

    tell(service, ask(service, content=chat("hello")), told=told)
    clock.now += 3 * 60_000  # the bucket fills, the day does not
    answer = ask(service, content=chat("", max_tokens=1))

    assert refused(answer) == ""
    assert sample(service, "budget_used_total", policy="p", mode="enforce", rule="r") == 2 * used
    service.follow(
        make_service(
            limited(rule("token_bucket_llm", tokens_per_minute=10**8, tokens_per_day=1_000_000))
        ).engine
    )
    clock.now += 60_000
    assert tokens_left(service) == 1_000_000 - used - 1


def reserved(service: Service, text: str, **more: Any) -> int:  # noqa: ANN401  # headers
    """The tokens reserved for the prompt of a request, which is then given back."""
    answer = ask(service, content=chat(text, max_tokens=1), **more)
    tell(service, answer, status=0)
    (policy,) = json.loads(metadata_of(answer)["sessions"])
    return max(int(each[3]) for each in policy["budgets"]) // BUCKET_UNITS - 1


@pytest.mark.parametrize(
    ("estimated", "counted", "later", "corrected"),
    [
        (100, 150, 200, 250),  # as many tokens more as before, for what has been added since
        (100, 150, 50, 75),  # in proportion, after a compaction
        (100, 40, 200, 140),
        (100, 1, 50, 1),
        (10, 50_000, 12, 50_002),  # the provider keeps the conversation
        (100, 100, 7, 7),
    ],
)
def test_estimate_is_corrected_by_the_last_error(
    estimated: int, counted: int, later: int, corrected: int
) -> None:
    anchors = Anchors()
    anchors.learn("one", 1, 1_000_000)

    anchors.learn("one", estimated, counted)

    assert anchors.correct("one", later) == corrected
    assert anchors.correct("other", later) == later


def test_session_reserves_by_its_last_prompt() -> None:
    service, _ = serve(limited(rule("token_bucket_llm", tokens_per_minute=1_000_000)))
    text = "word " * 400
    plain = reserved(service, text)

    tell(
        service,
        ask(service, content=chat(text), x_session_id="s"),
        told={"input": 700, "cached": 600, "output": 20},
    )

    assert reserved(service, text, x_session_id="s") == 700
    assert reserved(service, text + "more", x_session_id="s") == 701
    assert reserved(service, text, x_session_id="t") == plain
    assert reserved(service, text, x_session_id="s", key="k2") == plain
    assert reserved(service, text) == plain


USED = {"told": {"input": 700, "output": 20}}


@pytest.mark.parametrize(
    ("damage", "entry", "used"),
    [
        *(({"prompt": number}, USED, 720) for number in ("12", -1, 0, True)),
        ({"session": 5}, USED, 720),
        ({}, {"status": 503}, 0),
        ({}, {"status": 0}, 0),
        ({}, {}, None),
        ({}, {"told": {"input": 0, "output": 20}}, 20),
    ],
)
def test_entry_without_prompt_tokens_corrects_no_estimate(
    damage: dict[str, Any], entry: dict[str, Any], used: int | None
) -> None:
    service, _ = serve(limited(rule("token_bucket_llm", tokens_per_minute=1_000_000)))
    text = "word " * 400
    plain = reserved(service, text)
    (policy,) = json.loads(
        metadata_of(ask(service, content=chat(text), x_session_id="s"))["sessions"]
    )

    settle(service, sessions=[policy | damage], **entry)

    found = sample(service, "budget_used_total", policy="p", mode="enforce", rule="r")
    assert found == used or (used is None and found > 0)
    assert reserved(service, text, x_session_id="s") == plain


@pytest.mark.parametrize(
    ("status", "sent", "kept"), [(403, False, 3), (0, False, 3), (403, True, 2), (200, True, 2)]
)
def test_fixed_cost_is_returned_if_another_filter_refuses(
    status: int, sent: bool, kept: int
) -> None:  # a parameter
    detector = {
        "enabled": True,
        "window_seconds": 60,
        "threshold_identical_requests": 9,
        "count_failed": False,
    }
    service, _ = serve(limited(bucket(per_second=0.001), loop_detection=detector))
    answer = ask(service)

    tell(service, answer, status=status, took=(0.1, 0.2) if sent else None)

    assert metadata_of(ask(service))["ratelimit_remaining"] == str(kept - 1)
    assert sample(service, "access_log_entries_total", result="unknown") in (None, 0)


def test_repeated_entry_counts_once() -> None:
    service, clock = serve(limited(LLM))
    other = make_service(limited(LLM), store=service.counting.store)
    answer = ask(service, content=chat("x" * 4_000, max_tokens=1_000))

    for taken_by in (service, other, service):
        tell(taken_by, answer, told={"input": 100, "output": 20})
    clock.now += 1

    assert tokens_left(service) == 10_000 - 120
    assert sample(service, "budget_used_total", policy="p", mode="enforce", rule="r") == 2 * 120
    assert sample(other, "budget_used_total", policy="p", mode="enforce", rule="r") == 0
    assert [
        sample(each, "access_log_entries_total", result="unknown") for each in (service, other)
    ] == [2, 2]


def test_entry_of_an_older_version_is_settled() -> None:
    service, _ = serve(limited(LLM))
    (described,) = json.loads(metadata_of(ask(service, content=chat("hello")))["sessions"])
    del described["call"]

    settle(service, sessions=[described], told={"input": 5, "output": 5})

    assert sample(service, "budget_used_total", policy="p", mode="enforce", rule="r") == 20


def test_shadow_refusals_are_not_settled() -> None:
    shadow = limited(
        rule("token_bucket_llm", tokens_per_minute=10, name="s"), identity="s", mode="shadow"
    )
    service, _ = serve(limited(LLM), shadow)

    answer = ask(service, content=chat("x" * 400))
    told = metadata_of(answer)

    assert told["shadow_action"] == "reject"
    assert [each["policy"] for each in json.loads(told["sessions"])] == ["p"]


KEY = "budget1:p:r:tpm::aaaaaaaaaaaaaaaa"
DESCRIBED: dict[str, Any] = {
    "budgets": [["r", "tpm", KEY, 3, 5]],
    "policy": "p",
    "mode": "enforce",
    "model": "m",
}


@pytest.mark.parametrize(
    "forged",
    [
        {"budgets": 1},
        {"budgets": [1]},
        {"budgets": [[]]},
        {"budgets": [["r", "tpm", "session:p:r:aaaaaaaaaaaaaaaa", 3, 5]]},
        {"budgets": [["r", "tpm", "budget1:q:r:tpm::aaaaaaaaaaaaaaaa", 3, 5]]},
        {"budgets": [["gone", "tpm", "budget1:p:gone:tpm::aaaaaaaaaaaaaaaa", 3, 5]]},
        {"budgets": [["r", "tpm", "budget1:p:" + "r" * 9_000, 3, 5]]},
        *(
            {"budgets": [["r", "tpm", KEY, value, 5]]}
            for value in (-1, 1e300, "3", None, True, 10**17)
        ),
        *({"budgets": [["r", "tpm", KEY, 3, value]]} for value in (-1, 0.5, "3", None)),
        {"policy": "q"},
        {"policy": 5},
    ],
)
def test_forged_metadata_settles_nothing(forged: dict[str, Any]) -> None:
    service, _ = serve(limited(LLM))

    settle(service, sessions=[DESCRIBED | forged])

    assert sample(service, "access_log_entries_total", result="unknown") == 1
    assert tokens_left(service) == 10_000


def test_release_resets_all_budgets() -> None:
    breaker = {"enabled": True, "spend_rate_threshold_per_minute": 2}
    service, _ = serve(limited(bucket(burst=9, keys=["header:x-user-id"]), circuit_breaker=breaker))

    def send(times: int) -> list[str]:
        return [refused(ask(service, "", x_user_id="ann")) for _ in range(times)]

    before = send(3)
    apply_orders(service, order("release"))
    released = send(2)
    apply_orders(service, order("allow"))
    allowed = send(9)

    assert before == ["", "circuit_breaker_open", "circuit_breaker_open"]
    assert (released, allowed) == (["", "circuit_breaker_open"], [""] * 9)


class Slow(FailingStore):
    def __init__(self) -> None:
        super().__init__("no key")
        self._waiting: list[Pending | None] = []
        self._answers: list[Any] = []

    def waits_for(self, *pending: Pending | None) -> list[Any]:
        """Delay the next calls by these (None: no delay); returns the list of their answers."""
        self._waiting = [*pending]
        return self._answers

    # Questions, and answers to come
    def hit(self, hits: Any, now: int | None = None) -> Any:  # noqa: ANN401
        answers = self._memory.hit(hits, now)
        if not self._waiting:
            return answers
        self._answers.append(answers)
        waiting = self._waiting.pop(0)
        return answers if waiting is None else waiting


SLOW = bucket(burst=9, per_second=0.001)


def test_client_that_leaves_before_the_decision_pays_nothing() -> None:
    store = Slow()
    service = make_service(limited(SLOW), store=store)
    pending = Pending()
    kept = store.waits_for(pending)
    stream = Stream(service)

    reply = stream.receive(headers(CHAT, x_api_key="k").SerializeToString())
    assert isinstance(reply, Later)
    reply.cancel()
    stream.close()
    pending.settle(*kept)

    assert metadata_of(ask(service))["ratelimit_remaining"] == "8"


@pytest.mark.parametrize(
    "answered", [(), (0,), (1,), (0, 1)], ids=["none", "enforcing", "shadow", "both"]
)
def test_cancelled_task_pays_nothing(answered: tuple[int, ...]) -> None:
    store = Slow()
    service = make_service(
        limited(SLOW), limited(SLOW | {"name": "s"}, identity="s", mode="shadow"), store=store
    )
    waiting = Pending(), Pending()
    kept = store.waits_for(*waiting)
    reply: Any = Stream(service).receive(headers(CHAT, x_api_key="k").SerializeToString())

    async def leave() -> None:
        task = asyncio.ensure_future(reply)
        await asyncio.sleep(0)
        for place in answered:
            waiting[place].settle(kept[place])
        for _ in range(2 if len(answered) == 1 else 0):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for place in {0, 1} - {*answered}:
            waiting[place].settle(kept[place])

    asyncio.run(leave())

    assert metadata_of(ask(service))["ratelimit_remaining"] == "8"
    assert [
        row.left // row.units
        for row in service.reporter.budgets.make_document(shows_callers=False).rows
    ] == [8, 8]


class HalfAway(FailingStore):
    """A store of two servers; the one with the second rule is down."""

    def __init__(self) -> None:
        super().__init__("no key")

    def hit(self, hits: Any, now: int | None = None) -> list[Any]:  # noqa: ANN401  # questions
        asked: list[Question] = [hit for hit in hits if ":away:" not in hit.key]
        answers = iter(self._memory.hit(asked, now) if asked else [])
        found = [None if ":away:" in hit.key else next(answers) for hit in hits]
        if None in found:
            raise PartlyAwayError("away", kind="connection", answers=found)
        return found


def test_refusal_with_half_the_store_away_is_undone() -> None:
    service = make_service(
        limited(bucket(burst=9), bucket(burst=1, name="away", per_second=0.001)), store=HalfAway()
    )

    answers = [refused(ask(service)) for _ in range(5)]
    service.follow(make_service(limited(bucket(burst=9))).engine)

    assert answers == ["", *["token_bucket_exceeded"] * 4]
    assert metadata_of(ask(service))["ratelimit_remaining"] == "7"


def test_settlement_that_the_store_rejects_is_counted() -> None:
    service, _ = serve(limited(LLM))
    answer = ask(service, content=chat("hello"))
    service.counting.store = FailingStore(error=StoreError("down", kind="timeout"))

    tell(service, answer, told={"input": 1, "output": 1})

    assert sample(service, "budget_lost_total") == 2
