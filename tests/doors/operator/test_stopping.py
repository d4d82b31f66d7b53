"""Callers that an operator has stopped, through the real Envoy."""

from collections.abc import Iterator

import pytest

from tests.support.documents import bundle
from tests.support.harness import Stack, stack
from tests.support.kill_switches import GUARDED, switch


@pytest.fixture(scope="module", params=["fast", "grpcio"])
def running(request: pytest.FixtureRequest) -> Iterator[Stack]:
    switches = [switch(), switch(value="half", route="/alone")]
    with stack(bundle(GUARDED, kill_switches=switches), "--transport", request.param) as made:
        yield made


def test_kill_switch_refuses_on_headers_through_envoy(running: Stack) -> None:
    before = len(running.upstream.seen)

    answer = running.send("/guarded", method="POST", body=b"{}", headers={"x-user-id": "bad"})

    assert (answer.status, answer.headers["retry-after"], answer.headers["x-fairvisor-reason"]) == (
        429,
        "3600",
        "kill_switch",
    )
    assert answer.json()["error"]["code"] == "kill_switch"
    assert len(running.upstream.seen) == before
    assert running.send("/guarded", headers={"x-user-id": "good"}).status == 200
    entry = running.envoy.logged("/guarded", status=429)
    assert (entry["loop_action"], entry["loop_reason"]) == ("reject", "kill_switch")
    assert (
        running.loopguard.metric(
            "kill_switched_total", scope_key="header:x-user-id", mode="enforce"
        )
        >= 1
    )


def test_printed_envoy_configuration_guards_the_switchs_path(running: Stack) -> None:
    assert running.send("/alone", headers={"x-user-id": "half"}).status == 429
    assert running.send("/guarded/alone", headers={"x-user-id": "half"}).status == 200
