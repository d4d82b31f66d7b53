"""Requests that show nothing of what a policy tells callers apart by."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.messages import body, headers
from tests.support.service import decoded, exchange, make_service, sample


@pytest.mark.parametrize(
    ("spec", "acts"),
    [
        ({}, True),
        ({"session": {}}, True),
        ({"missing_descriptor": "skip"}, False),
        ({"uncountable": "reject"}, False),
        ({"cooldown_seconds": 60}, False),
    ],
)
def test_what_counts_nothing_needs_no_caller(spec: dict[str, Any], acts: bool) -> None:  # of a table
    """A loop that a request itself shows needs no caller. Counts need one, or all strangers would share them."""
    loops: dict[str, dict[str, Any]] = {
        "turns": {"similarity": "turns"},
        "again": {"similarity": "canonical", "window_seconds": 60},
    }
    made = policy("p", ANY, limit_keys=["header:x-user-id"], missing_descriptor=spec.get("missing_descriptor", "require_one"))
    made["spec"] |= {key: spec[key] for key in ("session", "uncountable") if key in spec}
    cooldown = {key: spec[key] for key in ("cooldown_seconds",) if key in spec}
    made["spec"]["loop_detection"] = [
        {"name": name, "enabled": True, "threshold_identical_requests": 3, "action": "reject", **loop, **cooldown}
        for name, loop in loops.items()
    ]
    service = make_service(made)
    call = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "search", "arguments": "{}"}}]}
    stuck = json.dumps({"messages": [call, {"role": "tool", "tool_call_id": "1", "content": "nothing"}] * 4}).encode()

    for _ in range(4):
        answer = decoded(exchange(service, headers("/v1/chat/completions"), body(stuck))[-1])

    assert answer.HasField("immediate_response") is (acts or "uncountable" in spec)
    assert sample(service, "loops_detected_total", policy="p", mode="enforce", action="reject") == (4 if acts else 0)
    assert sample(service, "uncounted_total", policy="p", reason="missing_descriptor") == 4
