"""Settings for all tests, and the stack that most end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

import extproc
from extproc.cli.main import describe_version
from extproc.request.document import limit_integers
from tests.documents import bundle, policy

if TYPE_CHECKING:
    from tests.harness import Stack

# These machines are noisy: how long an example takes says nothing about the code.
settings.register_profile("loopguard", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# What the sources have been tried with at length, the same code compiled is tried with once more.
settings.register_profile("again", settings.get_profile("loopguard"), max_examples=25)
settings.load_profile(
    "loopguard" if Path(extproc.__file__).is_relative_to(Path(__file__).parent.parent / "extproc") else "again"
)

limit_integers()  # as the command does

# `make test` runs tests on the sources and on the compiled wheel, `make test-pure` all of them on the sources. By module:
DOORS = {
    "test_acceptor", "test_access_log", "test_actions", "test_agent_demo", "test_agents", "test_answers_sdks",
    "test_attach", "test_bodies", "test_canary_stack", "test_check_envoy", "test_cli", "test_demo", "test_descriptors",
    "test_door", "test_envoy_config", "test_failures", "test_grpc", "test_handover", "test_hash_key", "test_headers",
    "test_honest_envoy",
    "test_hostile_bodies", "test_http2", "test_http2_bounds", "test_limits_agents", "test_mcp_agents", "test_mesh",
    "test_night", "test_operations", "test_orders", "test_promote", "test_ramping", "test_readme",
    "test_real_gateway", "test_real_mesh", "test_redis", "test_reload", "test_replay_envoy", "test_sessions_agents",
    "test_sessions_envoy", "test_shadow", "test_soak", "test_steer_agents", "test_steering", "test_stopping",
    "test_store", "test_streams", "test_tls", "test_transport", "test_turns_agents", "test_two_versions", "test_uncountable", "test_usage",
    "test_websockets",
}  # fmt: skip
"""They go through a door of Loopguard, and run on the compiled wheel."""

UNITS = {
    "test_answers", "test_canary", "test_canonical", "test_conversation", "test_detectors", "test_edits", "test_engine",
    "test_escalation", "test_fingerprint", "test_histories", "test_history", "test_isolation", "test_kill_switches",
    "test_ledger", "test_loops", "test_mcp", "test_memo", "test_model_names", "test_narrow", "test_notes",
    "test_overrides", "test_protobuf", "test_ramp", "test_rates", "test_recent", "test_replay", "test_request",
    "test_routes", "test_service", "test_session_calls", "test_session_guard", "test_session_limits",
    "test_session_rules", "test_session_table", "test_sessions", "test_steer", "test_tail", "test_tool_calls",
    "test_turns", "test_turns_memory", "test_way_back", "test_windows", "test_wire",
}  # fmt: skip
"""They call what is compiled, and run on both. All that stand in neither list run on the sources."""

SMOKE = {"test_actions"}
"""The doors that are opened on the sources, too."""


def pytest_report_header() -> str:
    """Which Loopguard is tested: the sources, or an installed wheel."""
    return f"{describe_version()}, from {Path(extproc.__file__).parent}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs where; a test that is marked by itself knows better than its module."""
    for item in items:
        module = item.path.stem
        if not {"sources", "compiled"} & {mark.name for mark in item.iter_markers()}:
            if module not in DOORS - SMOKE:
                item.add_marker("sources")
            if module in DOORS | UNITS:
                item.add_marker("compiled")


_USER: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}
_numbers = count()

SHARED_BUNDLE = bundle(
    policy("reject", {"pathPrefix": "/reject"}, **_USER),
    policy("chat", {"pathExact": "/v1/chat/completions", "methods": ["POST"]}, **_USER),
    policy("messages", {"pathExact": "/v1/messages", "methods": ["POST"]}, **_USER),
    policy("teapot", {"pathExact": "/teapot"}, reject_status=418, cooldown_seconds=90, **_USER),
    policy("throttle", {"pathPrefix": "/throttle"}, action="throttle", max_delay_ms=400, **_USER),
    policy("long", {"pathExact": "/long"}, action="throttle", threshold_identical_requests=300, **_USER),
    policy("warn", {"pathPrefix": "/warn"}, action="warn", **_USER),
    policy("beside", {"pathExact": "/beside"}, **_USER),
    policy("canary", {"pathExact": "/beside"}, mode="shadow", threshold_identical_requests=2, **_USER),
)


@pytest.fixture(scope="session", params=["fast", "grpcio"])
def shared(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """One stack for each transport, for all tests that change nothing but the counts of a user of their own."""
    from tests.harness import stack  # noqa: PLC0415  # unit tests need no Envoy

    with stack(SHARED_BUNDLE, "--transport", request.param) as made:
        yield made


@pytest.fixture
def user() -> dict[str, str]:
    """Headers of a user that no other test uses."""
    return {"x-user-id": f"user-{next(_numbers)}"}
