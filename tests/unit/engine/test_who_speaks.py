"""Of equal actions, a loop speaks before a session, and a session before a budget."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.budget_policies import ask, bucket, chat, limited, refused, serve
from tests.support.service import headers_of

LOOP: dict[str, Any] = {"enabled": True, "window_seconds": 60, "threshold_identical_requests": 2}
KEYS = ["header:x-api-key"]


def session(steps: int) -> dict[str, Any]:
    """Limits of a session that its client names."""
    return {"session": {"keys": ["header:x-session-id"]}, "session_limits": {"max_steps": steps}}


@pytest.mark.parametrize("first", ["loop", "budget", "together"])
def test_a_loop_over_budget_is_told_that_it_loops(first: str) -> None:
    """Not to try again later, in whichever order the policies are."""
    loop = {"id": "l", "spec": {"selector": {"pathPrefix": "/"}, "limit_keys": KEYS, "loop_detection": LOOP}}
    budget = limited(bucket(burst=1, per_second=0.001))
    both = limited(bucket(burst=1, per_second=0.001), loop_detection=LOOP)
    service, _ = serve(*{"loop": [loop, budget], "budget": [budget, loop], "together": [both]}[first])

    answers = [ask(service) for _ in range(2)]

    assert refused(answers[1]) == "loop_detected"
    assert json.loads(answers[1].immediate_response.body)["error"]["code"] == "recursive_loop_detected"
    assert headers_of(answers[1])["Retry-After"] == "60"


def test_a_session_over_budget_is_told_that_it_is_over() -> None:
    """Its end is final; and a loop's words come before it."""
    budget = bucket(burst=1, per_second=0.001)
    service, _ = serve(limited(budget, limit_keys=KEYS, **session(1)))
    looping, _ = serve(limited(budget, limit_keys=KEYS, loop_detection=LOOP, **session(1)))

    answers = [ask(service, content=chat(f"{number}"), x_session_id="s") for number in range(2)]
    looped = [ask(looping, content=chat("a"), x_session_id="s") for _ in range(6)]

    assert refused(answers[1]) == "session_limit_exceeded"
    assert refused(looped[-1]) == "loop_detected"


def test_a_stricter_action_of_a_budget_still_speaks() -> None:
    """A warning about a loop does not undo a refusal."""
    service, _ = serve(limited(bucket(burst=1, per_second=0.001), loop_detection=LOOP | {"action": "warn"}))

    assert [refused(ask(service)) for _ in range(3)] == ["", "token_bucket_exceeded", "token_bucket_exceeded"]
