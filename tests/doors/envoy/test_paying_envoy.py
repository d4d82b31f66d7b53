"""Nobody passes a budget without paying, on the real Envoy."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.documents import bundle
from tests.support.harness import stack

REJECT = [{"threshold_percent": 100, "action": "reject"}]


def make_policy(identity: str, **more: object) -> dict[str, Any]:
    """Three requests a week for each API key."""
    config = {"budget": 3, "period": "7d", "staged_actions": REJECT}
    rule = {"name": "r", "limit_keys": ["header:x-api-key"], "algorithm": "cost_based", "algorithm_config": config}
    return {"id": identity, "spec": {"selector": {"pathPrefix": f"/{identity}/"}, "rules": [rule], **more}}


POLICIES = bundle(make_policy("shared", missing_descriptor="share"), make_policy("strict", uncountable="reject"))


@pytest.mark.parametrize("headers", [{}, {"connection": "x-api-key", "x-api-key": "k"}, {"x-api-key": ""}])
def test_callers_that_hide_their_key_pay_or_are_refused(headers: dict[str, str]) -> None:
    """Envoy removes what `Connection` names before any filter sees it."""
    with stack(POLICIES) as made:
        shared = [made.send("/shared/x", method="POST", body=b"{}", headers=headers).status for _ in range(8)]
        strict = [made.send("/strict/x", method="POST", body=b"{}", headers=headers).status for _ in range(2)]

        assert shared == [200] * 3 + [429] * 5
        assert strict == [400, 400]
