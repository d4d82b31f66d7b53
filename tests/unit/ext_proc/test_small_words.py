"""Words that people and programs read: singulars, and what a loop is called."""

import json
from typing import Any

import pytest

from extproc.cli.commands.sessions import write_report
from extproc.operator.admin.row_states import count
from tests.support.budget_policies import serve
from tests.support.documents import policy
from tests.support.messages import body, headers
from tests.support.service import (
    decoded,
    exchange,
    headers_of,
    make_service,
    metadata_of,
    sample,
    status,
)
from tests.support.session_limits import ask, limited, told
from tests.support.turn_writers import Did, as_chat

CALL = (
    b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "search", '
    b'"arguments": {"q": "x"}}}'
)


# ---- Counts


@pytest.mark.parametrize(
    ("similarity", "said"),
    [
        (
            "exact",
            "this identical request (POST /v1) has been sent again during the cooldown of its loop",
        ),
        (
            "mcp",
            "search has been called again with the same arguments during the cooldown of its loop",
        ),
    ],
)
def test_refusal_in_a_cooldown_does_not_say_1_times(similarity: str, said: str) -> None:
    loops: dict[str, Any] = {
        "threshold_identical_requests": 2,
        "window_seconds": 1,
        "cooldown_seconds": 60,
    }
    service, clock = serve(policy("p", {"pathPrefix": "/"}, similarity=similarity, **loops))
    sent = headers("/v1", method="POST", content_type="application/json"), body(CALL)
    exchange(service, *sent)
    first = str(decoded(exchange(service, *sent)[-1]).immediate_response.body)
    clock.now += 5_000

    again = str(decoded(exchange(service, *sent)[-1]).immediate_response.body)

    assert "2 times" in first
    assert said in again
    assert "1 times" not in again


def test_reports_and_refusals_use_the_singular() -> None:
    paid = json.dumps(as_chat([Did((("pay", {}),), ("paid",))])).encode()
    refused = ask(make_service(limited(max_calls_per_tool={"pay": 0})), paid)
    session: dict[str, Any] = {
        "session": "s",
        "caller": "c",
        "alias": None,
        "labels": None,
        "descriptors": None,
        "policy": "p",
        "mode": "enforce",
        "total_step_count": 1,
        "total_tool_calls": 1,
        "actual_cost": 0,
        "estimated_cost": 0,
        "reserved_cost": 0,
        "total_block_count": 0,
        "started": "",
        "last_seen": "",
        "unnamed_requests": 0,
        "started_by": None,
        "killed": None,
        "refused": None,
        "granted": {},
        "limits": {},
        "orders": [],
        "agents": {"tree": [], "refused_requests": 0},
        "ended": None,
        "events": [],
        "tool_call_counts": {"pay": 1},
        "steps": [],
        "earlier_steps": 0,
        "usage": {
            "total_seconds": 1,
            "model_seconds": 1,
            "tool_seconds": 0,
            "failed_answers": 0,
            "input_tokens": 1,
            "output_tokens": 1,
            "cache_read_tokens": 0,
            "cache_write_tokens": 0,
        },
    }

    assert (count(1, "loop"), count(1_234, "loop"), count(0, "loop")) == (
        "1 loop",
        "1,234 loops",
        "0 loops",
    )
    assert "the tool pay was called once in this session" in told(refused)["message"]
    assert "  called 1 time: pay" in write_report({"problem": None, "sessions": [session]})


# ---- The detector of sessions


def test_loop_of_a_session_is_refused_as_a_loop() -> None:
    service = make_service(limited(loop_detection={"window": 5, "threshold": 3}, max_steps=4))
    done = [
        Did((("search", {"q": 1}),), (f"result {number}",), number=number) for number in range(3)
    ]

    answers = [ask(service, json.dumps(as_chat(done[:number])).encode()) for number in range(4)]

    refused = answers[3]
    assert [status(answer) for answer in answers] == [200, 200, 200, 429]
    assert (headers_of(refused)["X-Fairvisor-Reason"], refused.immediate_response.details) == (
        "loop_detected",
    ) * 2
    assert metadata_of(refused)["reason"] == "loop_detected"
    assert (told(refused)["error"], told(refused)["limit"], told(refused)["used"]) == (
        "recursive_loop_detected", "loop_detection", 3,
    )  # fmt: skip
    assert told(refused)["message"].startswith(
        "Loop detected: the tool search was called 3 times with the same arguments"
    )
    assert told(refused)["message"].endswith("(recursive_loop_detected)")
    assert (
        sample(service, "loops_detected_total", policy="agents", mode="enforce", action="reject")
        == 1
    )

    other = make_service(limited(max_steps=1))
    assert [
        status(ask(other, json.dumps(as_chat(done[:number])).encode())) for number in range(2)
    ] == [200, 429]
    assert (
        sample(other, "loops_detected_total", policy="agents", mode="enforce", action="reject") == 0
    )
