"""The stack that most end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.documents import bundle, policy
from tests.support.harness import Stack, stack
from tests.support.receivers import CA

if TYPE_CHECKING:
    from tests.support.agents import Gate

_USER: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}
_numbers = count()

SHARED_BUNDLE = bundle(
    policy("reject", {"pathPrefix": "/reject"}, **_USER),
    policy("chat", {"pathExact": "/v1/chat/completions", "methods": ["POST"]}, **_USER),
    policy("messages", {"pathExact": "/v1/messages", "methods": ["POST"]}, **_USER),
    policy("teapot", {"pathExact": "/teapot"}, reject_status=418, cooldown_seconds=90, **_USER),
    policy("throttle", {"pathPrefix": "/throttle"}, action="throttle", max_delay_ms=400, **_USER),
    policy(
        "long", {"pathExact": "/long"}, action="throttle", threshold_identical_requests=300, **_USER
    ),
    policy("warn", {"pathPrefix": "/warn"}, action="warn", **_USER),
    policy("beside", {"pathExact": "/beside"}, **_USER),
    policy(
        "canary", {"pathExact": "/beside"}, mode="shadow", threshold_identical_requests=2, **_USER
    ),
)


@pytest.fixture(scope="module", autouse=True)
def _one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A single certificate authority: each SDK client takes 30 ms to read the usual ones."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.getbasetemp() / "authority.pem"
        if not path.exists():
            CA.cert_pem.write_to_path(str(path))
        patch.setenv("SSL_CERT_FILE", str(path))
        yield


@pytest.fixture(scope="session", params=["fast", "grpcio"])
def shared(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """One stack for each transport, for tests that change only the counts of their own user."""
    with stack(SHARED_BUNDLE, "--transport", request.param) as made:
        yield made


@pytest.fixture(scope="module")
def gate(request: pytest.FixtureRequest) -> Iterator[Gate]:
    """Envoy before a fake model, with a module's POLICIES and number of REPLICAS."""
    from tests.support.agents import open_gate  # here: the SDKs that it imports take seconds

    with open_gate(
        request.module.POLICIES, replicas=getattr(request.module, "REPLICAS", 1)
    ) as made:
        yield made


@pytest.fixture
def user() -> dict[str, str]:
    """Headers of a user that no other test uses."""
    return {"x-user-id": f"user-{next(_numbers)}"}
