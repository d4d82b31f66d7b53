"""Shadow policies whose counts never come: the answer waits for them only until a deadline, which is counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Sequence
from typing import Any

import pytest

from extproc.store.rules.session import Question
from tests.support.documents import policy
from tests.support.messages import body, headers
from tests.support.service import FailingStore, decoded, exchange, make_service, sample

USER: dict[str, Any] = {"limit_keys": ["header:x-user-id"], "threshold_identical_requests": 2}


class Silent(FailingStore):
    """A store that never answers about keys of shadow policies."""

    def __init__(self, *, later: bool) -> None:
        super().__init__(failing="never", later=later)

    def hit(self, hits: Sequence[Question], now: int | None = None) -> list[Any] | Awaitable[list[Any]]:
        """Count, or wait for ever."""
        if any("shadow:" in hit.key for hit in hits):
            return _wait_for_ever()
        return super().hit(hits, now)


async def _wait_for_ever() -> list[Any]:
    await asyncio.Event().wait()
    return []


@pytest.mark.parametrize("later", [False, True])
def test_the_answer_leaves_at_the_deadline(later: bool) -> None:
    live = policy("live", {"pathExact": "/"}, **USER)
    service = make_service(live, policy("watches", {"pathExact": "/"}, mode="shadow", **USER), store=Silent(later=later))

    answers = [decoded(exchange(service, headers(x_user_id="ann"), body(b"x"))[-1]) for _ in range(2)]

    assert [answer.immediate_response.status.code for answer in answers] == [0, 429]
    assert sample(service, "uncounted_total", policy="watches", reason="shadow_deadline") == 2
    assert sample(service, "requests_total", policy="live", mode="enforce", action="allow") == 1


def test_a_body_that_only_shadow_policies_inspect_does_not_shape_refusals() -> None:
    """What only a shadow policy has read tells an enforcing one's refusal neither its format nor its status."""
    call = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "grep", "arguments": {}}}
    live = policy("live", {"pathExact": "/mcp"}, **USER)
    watching = policy("watches", {"pathExact": "/mcp"}, mode="shadow", similarity="canonical", **USER)

    told = [
        decoded([exchange(service, headers("/mcp", x_user_id="ann"), body(json.dumps(call).encode()))[-1] for _ in range(2)][1])
        for service in (make_service(live), make_service(live, watching))
    ]

    assert told[0].immediate_response.status.code == 429
    assert told[0].immediate_response == told[1].immediate_response
