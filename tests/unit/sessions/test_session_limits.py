"""The keys of `session_limits`, and the errors in them."""

from typing import Any

import pytest

from extproc.sessions.session_limits import SessionLimits
from tests.support.bundles import check, plain, refused, spec

LIMITS: dict[str, Any] = {
    "max_steps": 20,
    "max_tool_calls": 50,
    "max_tool_calls_mode": "narrow",
    "max_calls_per_tool": {"issue_refund": 1, "send_email": 5},
    "max_cost_per_session": 10.0,
    "loop_detection": {"window": 5, "threshold": 3},
    "circuit_breaker": {"consecutive_blocks": 5, "consecutive_errors": 3},
}


def load(**spec_: Any) -> SessionLimits:  # noqa: ANN401  # keys of the spec
    loaded = check(spec(**spec_))
    assert loaded.warnings == ()
    limits = loaded.sources[0].policies[0].spec.session_limits
    assert limits is not None
    return limits


def test_format_of_in_process_sdks_loads_unchanged() -> None:
    limits = load(
        loop_detection=None, session={"keys": ["header:x-session-id"]}, session_limits=LIMITS
    )

    assert limits.model_dump(include=set(LIMITS)) == LIMITS
    assert limits.needs_answers()


def test_prices_are_loaded_per_model() -> None:
    prices = {
        "gpt-*": {"input": 2.5, "output": 10},
        "*": {"input": 1, "output": 4, "cache_read": 0.1, "cache_write": 1.25},
    }
    limits = load(session_limits={"max_cost_per_session": 1, "prices": prices})

    assert (limits.prices["gpt-*"].output, limits.prices["*"].cache_write) == (10, 1.25)
    assert not load(session_limits={"max_steps": 1}).needs_answers()


def recent(**more: object) -> dict[str, Any]:
    return {"loop_detection": {"window": 5, "threshold": 3, **more}}


PRICE = '{"input", "output", "cache_read", "cache_write"}'
NOTICE = '{"max_steps", "max_tool_calls", "max_cost_per_session", "max_agents"}'

REFUSED: list[tuple[object, str, str]] = [
    (
        {},
        "",
        (
            "session_limits needs at least one of max_steps, max_tool_calls, max_cost_per_session, "
            "max_calls_per_tool"
        ),
    ),
    ({"max_steps": 0}, "/max_steps", "max_steps must be >= 1, not 0"),
    ({"max_tool_calls": 10_001}, "/max_tool_calls", "max_tool_calls must be <= 10000, not 10001"),
    (
        {"max_steps": 1, "max_tool_calls_mode": "narrow"},
        "/max_tool_calls_mode",
        "needs max_tool_calls",
    ),
    ({"max_calls_per_tool": {"a": -1}}, "/max_calls_per_tool/a", "a must be >= 0, not -1"),
    ({"max_steps": 1, "max_turns": 2}, "/max_turns", "unknown key"),
    ({"max_steps": 1, "max_step": 2}, "/max_step", "unknown key; did you mean max_steps?"),
    (
        {"max_steps": 1, "idle_seconds": 2},
        "/idle_seconds",
        "unknown key; idle_seconds belongs in spec/session",
    ),
    (
        {"max_steps": 1, "threshold": 2},
        "/threshold",
        "threshold belongs in spec/session_limits/loop_detection",
    ),
    (recent(window_seconds=3), "/loop_detection/window_seconds", "did you mean window?"),
    (recent(window_calls=3), "/loop_detection/window_calls", "did you mean window?"),
    (
        recent(enabled=True),
        "/loop_detection/enabled",
        "unknown key; known keys are window, threshold",
    ),
    (
        {"max_steps": 1, "circuit_breaker": {"consecutive_block": 2}},
        "/circuit_breaker/consecutive_block",
        "consecutive_blocks?",
    ),
    (
        {"max_steps": 1, "escalate": {"reject": {}}},
        "/escalate/reject",
        "unknown key; known keys are warn, steer",
    ),
    (
        {"max_steps": 1, "escalate": {"warn": {"max_cost": 1}}},
        "/escalate/warn/max_cost",
        "did you mean max_cost_per_session?",
    ),
    (
        {"max_steps": 1, "escalate": {"warn": {"max_tool_call": 1}}},
        "/escalate/warn/max_tool_call",
        "mean max_tool_calls?",
    ),
    (
        {"max_steps": 1, "escalate": {"warn": 5}},
        "/escalate/warn",
        f"warn must be an object {NOTICE}, not 5",
    ),
    (
        {"max_steps": 1, "prices": {"m*": 2.5}},
        "/prices/m*",
        f"m* must be an object {PRICE}, not 2.5",
    ),
    (
        {"max_steps": 1, "prices": {"m": {"input": 1, "output": 2} | {"in": 1}}},
        "/prices/m/in",
        "known keys are input, output, cache_read, cache_write",
    ),
    (
        {"loop_detection": {"window": 3, "threshold": 4}},
        "/loop_detection/threshold",
        "threshold must be <= window",
    ),
    (
        {"circuit_breaker": {"consecutive_errors": 0}},
        "/circuit_breaker/consecutive_errors",
        "must be >= 1, not 0",
    ),
    (
        {"max_steps": 9, "reject_status": 200},
        "/reject_status",
        "reject_status must be >= 400, not 200",
    ),
    (
        {"max_steps": 9, "escalate": {"steer": {"max_steps": 10}}},
        "/escalate/steer/max_steps",
        "must be <= max_steps",
    ),
    (
        {"max_steps": 9, "escalate": {"warn": {"max_tool_calls": 1}}},
        "/escalate/warn/max_tool_calls",
        "has no limit",
    ),
    ({"max_steps": 9, "prices": {"*": {"input": 1}}}, "/prices/*/output", "output is required"),
    ({"max_input_growth": 1}, "/max_input_growth", "max_input_growth must be >= 2, not 1"),
    ({"max_agents": -1}, "/max_agents", "max_agents must be >= 0, not -1"),
    ({"max_depth": 1_001}, "/max_depth", "max_depth must be <= 1000, not 1001"),
    ({"max_concurrent_agents": 0}, "/max_concurrent_agents", "must be >= 1, not 0"),
    ({"max_spawns_per_minute": 1_001}, "/max_spawns_per_minute", "must be <= 1000, not 1001"),
    (
        {"max_agents": 1, "agent_idle_seconds": 5},
        "/agent_idle_seconds",
        "agent_idle_seconds needs max_concurrent_agents",
    ),
    (
        {"max_depth": 1, "escalate": {"steer": {"max_agents": 1}}},
        "/escalate/steer/max_agents",
        "max_agents has no limit",
    ),
]


@pytest.mark.parametrize(
    ("limits", "place", "message"), REFUSED, ids=[place or "empty" for _, place, _ in REFUSED]
)
def test_invalid_key_is_one_error_at_its_place(limits: object, place: str, message: str) -> None:
    (pointer, found), *more = plain(refused(spec(session_limits=limits)))

    assert (pointer, more) == (f"/spec/session_limits{place}", [])
    assert message in found


@pytest.mark.parametrize("keys", [["header:x-run"], ["header:x-session-id", "body:/conversation"]])
def test_agent_limits_without_agent_names_are_warned_about(keys: list[str]) -> None:
    limits = {"max_agents": 3}
    sessions = [
        {"keys": keys},
        {"keys": keys, "agent_keys": ["header:x-a"]},
        {"keys": [*keys, "header:session-id"]},
    ]
    warnings = [
        check(spec(session=session, session_limits=limits)).warnings for session in sessions
    ]

    assert [any("nothing names agents" in told.message for told in each) for each in warnings] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("place", ["agent_keys", "parent_keys"])
def test_agent_keys_in_the_body_are_rejected(place: str) -> None:
    ((pointer, message),) = plain(
        refused(spec(session={place: ["body:/agent"]}, session_limits={"max_agents": 3}))
    )

    assert pointer == f"/spec/session/{place}/0"
    assert "must not be in the body" in message
