"""Settings for all tests, and the stack that most end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from extproc.similarity.document import limit_integers
from tests.documents import bundle, policy

if TYPE_CHECKING:
    from tests.harness import Stack

# These machines are noisy: how long an example takes says nothing about the code.
settings.register_profile("loopguard", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("loopguard")

limit_integers()  # as the command does

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
