"""What shadow policies may cost: time, waiting and errors.

`test_same_answers.py` proves that they change no answer.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from time import perf_counter
from typing import Any

import pytest

from extproc.ext_proc.budget import BURST_SECONDS
from extproc.store.rules.session import Question
from tests.support.documents import policy
from tests.support.looping import looping
from tests.support.messages import body, encoded, headers
from tests.support.service import (
    FailingStore,
    decoded,
    exchange,
    list_uncounted,
    make_service,
    repeat,
    sample,
)

ROOT = {"pathExact": "/"}
USER: dict[str, Any] = {"limit_keys": ["header:x-user-id"], "threshold_identical_requests": 2}
LIVE, WATCHES = policy("live", ROOT, **USER), policy("watches", ROOT, mode="shadow", **USER)
READS = {**USER, "similarity": "tail"}
LIVE_READER, SHADOW_READER = (
    policy("live", ROOT, **READS),
    policy("watches", ROOT, mode="shadow", **READS),
)


class Silent(FailingStore):
    """A store that never answers about keys of shadow policies."""

    def hit(
        self, hits: Sequence[Question], now: int | None = None
    ) -> list[Any] | Awaitable[list[Any]]:
        """Count, or wait for ever."""
        if any("shadow:" in hit.key for hit in hits):
            return asyncio.Event().wait()  # type: ignore[return-value]  # it never comes
        return super().hit(hits, now)


@pytest.mark.parametrize("later", [False, True])
def test_answer_leaves_at_deadline_of_shadow_policies(later: bool) -> None:
    service = make_service(LIVE, WATCHES, store=Silent(failing="never", later=later))

    answers = [
        decoded(exchange(service, headers(x_user_id="ann"), body(b"x"))[-1]) for _ in range(2)
    ]

    assert [answer.immediate_response.status.code for answer in answers] == [0, 429]
    assert list_uncounted(service, "watches") == {"shadow_deadline": 2}
    assert sample(service, "requests_total", policy="live", mode="enforce", action="allow") == 1


@pytest.mark.parametrize("later", [False, True])
def test_store_errors_of_shadow_policies_are_counted(later: bool) -> None:
    service = make_service(LIVE, WATCHES, store=FailingStore("shadow:", later=later))

    exchange(service, headers(x_user_id="ann"), body(b"x"))

    assert sample(service, "store_errors_total", kind="connection") == 1
    assert sample(service, "requests_total", policy="live", mode="enforce", action="allow") == 1


def test_body_read_only_by_shadow_policies_shapes_no_refusal() -> None:
    call = encoded(
        {
            "jsonrpc": "2.0",
            "id": 7,
            "method": "tools/call",
            "params": {"name": "grep", "arguments": {}},
        }
    )

    alone, beside = [
        repeat(service, headers(x_user_id="ann"), body(call), times=2)
        for service in (make_service(LIVE), make_service(LIVE, SHADOW_READER))
    ]

    assert alone.immediate_response.status.code == 429
    assert alone.immediate_response == beside.immediate_response


def test_shadow_inspection_costs_enforcing_policies_no_time() -> None:
    alone, beside = make_service(SHADOW_READER), make_service(LIVE_READER, SHADOW_READER)

    for service in (alone, beside):
        exchange(service, headers(x_user_id="ann"), body(looping(3)))
        service.budget.spend("x-user-id=ann", BURST_SECONDS - 1e-9)

    assert alone.budget.allows("x-user-id=ann", 0.0)
    assert not alone.budget.allows("x-user-id=ann", 0.0, shadow=True)
    assert not beside.budget.allows("x-user-id=ann", 0.0)


def test_shadow_policies_without_time_left_count_nothing() -> None:
    service = make_service(LIVE_READER, SHADOW_READER)
    service.budget.allows("x-user-id=ann", perf_counter())
    service.budget.spend("x-user-id=ann", 1_000, shadow=True)

    answers = [
        decoded(exchange(service, headers(x_user_id="ann"), body(looping(3)))[-1]) for _ in range(2)
    ]

    assert [answer.immediate_response.status.code for answer in answers] == [0, 429]
    assert (list_uncounted(service, "live"), list_uncounted(service, "watches")) == (
        {},
        {"inspect_budget": 2},
    )
