"""A rolling upgrade from the release before: its pods and those of this release behind one Envoy, on one Valkey.

docs/operations.md says what is asserted here, under "Upgrade"; tests/project/test_helm_upgrade.py is about the chart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.documents import bundle, policy
from tests.support.harness import Stack, stack, write_policies
from tests.support.servers import server
from tests.support.turn_writers import Did, as_chat
from tests.support.versions import RELEASE_BEFORE, LoopguardBefore, build

USER: dict[str, Any] = {"limit_keys": ["header:x-user-id"], "threshold_identical_requests": 4}
WINDOWS = ("sliding_ttl", "sliding_log", "fixed")
SESSION: dict[str, Any] = {"session": {"keys": ["header:x-session-id"]}, "similarity": "turns"}
POLICIES = bundle(
    *(policy(window, {"pathPrefix": f"/{window}"}, window_type=window, **USER) for window in WINDOWS),
    policy("canonical", {"pathPrefix": "/canonical"}, similarity="canonical", **USER),
    policy("turns", {"pathPrefix": "/v1/chat/completions"}, **SESSION, **USER),
)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Envoy spreads the requests between the two versions."""
    folder = tmp_path_factory.mktemp("before")
    package = build(RELEASE_BEFORE, tmp_path_factory.mktemp("package"))
    write_policies(folder, POLICIES)
    with server() as valkey:
        store = ("--store", f"redis://{valkey.address}")
        old = LoopguardBefore(package, folder, *store, listen=f"unix:{folder}/before.sock")
        try:
            with stack(POLICIES, *store, others=[old]) as made:
                yield made
        finally:
            old.stop()


def send(made: Stack, path: str, bodies: list[Any]) -> list[int]:
    """The status of each, and that both versions were asked."""
    before = [guard.metric("requests_total") for guard in made.replicas]
    headers = {"x-user-id": "ann", "x-session-id": "s", "content-type": "application/json"}
    found = [made.send(path, method="POST", body=json.dumps(body).encode(), headers=headers).status for body in bodies]
    assert all(guard.metric("requests_total") > counted for guard, counted in zip(made.replicas, before, strict=True))
    return found


@pytest.mark.parametrize("path", [*WINDOWS, "canonical"])
def test_both_versions_count_together(both: Stack, path: str) -> None:
    """Whichever version is asked, the fourth equal request is refused, and so are all after it."""
    assert send(both, f"/{path}", [{"model": "m"}] * 8) == [200] * 3 + [429] * 5


def test_both_versions_see_one_history(both: Stack) -> None:
    """Of a named session that shows only its newest turn in each request."""
    shown = [as_chat([Did((("read", {"file": "a"}),), ("no such file",), number=number)]) for number in range(1, 9)]

    found = send(both, "/v1/chat/completions", shown)

    assert found == [200] * 3 + [429] * 5
