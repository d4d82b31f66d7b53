"""Loopguard missing, overloaded, broken or stopping: what a client notices (nothing, where that can be had)."""

from __future__ import annotations

import signal
import threading

import pytest

from tests.documents import bundle, policy
from tests.harness import PATIENCE, Stack, eventually, stack

REJECT = bundle(policy("p", {"pathPrefix": "/"}))

_BUG = """
import extproc.service
def bug(*_):
    raise RuntimeError("a bug")
extproc.service.decide = bug
"""


@pytest.mark.parametrize(("failure_mode", "status"), [("allow", 200), ("deny", 500)])
def test_a_dead_server_is_what_failure_mode_says(failure_mode: str, status: int) -> None:
    """With Loopguard killed, Envoy lets requests through or refuses them, as it was configured."""
    with stack(REJECT, failure_mode=failure_mode) as made:
        assert made.send("/").status == 200

        made.loopguard.signal(signal.SIGKILL)
        made.loopguard.wait()

        assert made.send("/").status == status


def test_an_internal_error_never_reaches_the_client() -> None:
    """Even where Envoy is fail-closed, a bug of ours lets the request through; it is counted and logged."""
    with stack(REJECT, preamble=_BUG, failure_mode="deny") as made:
        statuses = [made.send("/", method="POST", body=b"x").status for _ in range(4)]

        assert statuses == [200] * 4
        assert made.loopguard.metric("fail_open_total", reason="internal_error") == 4
        assert "a bug" in made.loopguard.output()


def test_overload_lets_requests_through() -> None:
    """While --max-streams is used up by a held request, a loop passes unharmed and is counted as overload."""
    holding = bundle(
        policy("hold", {"pathExact": "/hold"}, action="throttle", threshold_identical_requests=100),
        policy("p", {"pathPrefix": "/p"}),
    )
    with stack(holding, "--max-streams", "1", "--drain-timeout", "0", failure_mode="deny") as made:
        for _ in range(99):
            assert made.send("/hold").status == 200
        held = threading.Thread(target=made.send, args=("/hold",), daemon=True)
        held.start()
        eventually(lambda: made.loopguard.metric("throttled_in_flight") == 1, "a hold")

        statuses = [made.send("/p").status for _ in range(5)]

        assert statuses == [200] * 5
        assert made.loopguard.metric("overload_total") == 5
        made.loopguard.stop()
        held.join(PATIENCE)


def _traffic(made: Stack, statuses: list[int], stop: threading.Event) -> threading.Thread:
    """Distinct requests one after the other until `stop`, on a thread of their own."""

    def send() -> None:
        while not stop.is_set():
            statuses.append(made.send(f"/p?n={len(statuses)}").status)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_sigterm_drains() -> None:
    """Told to stop, Loopguard says so, serves until Envoy has turned away, lets holds run to their end, and exits 0."""
    holding = bundle(
        policy("hold", {"pathExact": "/hold"}, action="throttle", threshold_identical_requests=40),
        policy("p", {"pathPrefix": "/p"}),
    )
    with stack(holding, "--drain-delay", "3", failure_mode="allow") as made:
        for _ in range(39):
            made.send("/hold")
        statuses: list[int] = []
        held, stop = made.connect(), threading.Event()
        held.sendall(b"GET /hold HTTP/1.1\r\nhost: h\r\n\r\n")  # held for 4 s, longer than the delay
        eventually(lambda: made.loopguard.metric("throttled_in_flight") == 1, "a hold")
        traffic = _traffic(made, statuses, stop)

        made.loopguard.signal(signal.SIGTERM)
        eventually(lambda: made.loopguard.get("/readyz")[0] == 503, "not ready")
        eventually(lambda: made.envoy.stat("cluster.loopguard.membership_healthy") == 0, "Envoy's notice")
        served = made.loopguard.metric("requests_total", policy="p")
        answer = held.makefile("rb").readline()
        code = made.loopguard.wait()
        stop.set()
        traffic.join(PATIENCE)

        assert code == 0
        assert answer == b"HTTP/1.1 200 OK\r\n"
        assert served > 0
        assert set(statuses) == {200}
        held.close()


def test_a_second_signal_does_not_wait() -> None:
    """Asked twice, Loopguard lets held requests through at once and exits 0."""
    holding = bundle(policy("hold", {"pathExact": "/hold"}, action="throttle", threshold_identical_requests=100))
    with stack(holding, "--drain-delay", "600", "--drain-timeout", "600") as made:
        for _ in range(99):
            made.send("/hold")
        answers: list[int] = []
        held = threading.Thread(target=lambda: answers.append(made.send("/hold").status))
        held.start()  # held for 10 s
        eventually(lambda: made.loopguard.metric("throttled_in_flight") == 1, "a hold")

        made.loopguard.signal(signal.SIGTERM)
        made.loopguard.wait_for("draining")
        made.loopguard.signal(signal.SIGTERM)

        assert made.loopguard.wait() == 0
        held.join(PATIENCE)
        assert answers == [200]


def test_a_policy_changed_under_traffic_acts_on_the_next_request() -> None:
    """A file edited while requests run is taken within a moment; counts survive; a bad edit changes nothing."""
    with stack(bundle(policy("p", {"pathPrefix": "/"}, threshold_identical_requests=5))) as made:
        assert [made.send("/").status for _ in range(3)] == [200] * 3

        made.write_policies(bundle(policy("p", {"pathPrefix": "/"}, threshold_identical_requests=4)))
        eventually(lambda: made.loopguard.metric("policy_reloads_total", result="ok") == 1, "the reload")
        assert made.send("/").status == 429

        made.write_policies('{"bundle_version": 1, "policies": [{"id": "p"}]}')
        eventually(lambda: made.loopguard.metric("policy_reloads_total", result="error") == 1, "the refusal")
        assert made.send("/").status == 429
        assert "/policies/0/spec: spec is required" in made.loopguard.output()
