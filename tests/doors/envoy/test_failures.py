"""Loopguard missing, overloaded, broken or stopping, and what clients notice of it: nothing, where that is possible."""

from __future__ import annotations

import json
import signal
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.support.documents import bundle, policy
from tests.support.harness import Loopguard, eventually, stack, write_policies

SERVED = b"HTTP/1.1 200 OK\r\n"
REJECT = bundle(policy("p", {"pathPrefix": "/"}))

_BUG = """
from extproc.metrics import Metrics
make = Metrics.__init__
def break_it(self):
    make(self)
    self.decision_seconds = None
Metrics.__init__ = break_it
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
        assert made.repeat("/", 4, body=b"x") == [200] * 4
        assert made.loopguard.metric("fail_open_total", reason="internal_error") == 4
        assert "internal error, request let through" in made.loopguard.output()


_STALLED = b"POST /p/slow HTTP/1.1\r\nhost: h\r\ncontent-length: 4\r\n\r\nhal"


def test_stalled_uploads_do_not_switch_the_guard_off() -> None:
    """However many uploads stall, a loop is still refused; an upload that was given up is served when it is complete."""
    with stack(REJECT, "--max-streams", "3", failure_mode="deny") as made:
        stalled = [made.connect() for _ in range(5)]
        for connection in stalled:
            connection.sendall(_STALLED)
        eventually(lambda: made.loopguard.metric("uncounted_total", reason="overload") == 2, "two uploads given up")

        assert made.repeat("/p", 4) == [200, 200, 429, 429]
        assert made.loopguard.metric("overload_total") == 3
        for connection in stalled:
            connection.sendall(b"f")
            assert connection.makefile("rb").readline() == SERVED
            connection.close()


def test_an_upload_that_stalls_ends_but_an_answer_may_take_its_time() -> None:
    """Envoy's request_timeout is over as soon as the request is received: only then is an answer waited for, without end."""

    def hasty(config: str) -> str:
        assert "request_timeout: 60s" in config
        return config.replace("request_timeout: 60s", "request_timeout: 0.5s")

    with stack(REJECT, edit=hasty) as made, made.connect() as slow, made.connect() as stalled:
        slow.sendall(b"POST /hang HTTP/1.1\r\nhost: h\r\ncontent-length: 1\r\n\r\nx")
        eventually(lambda: made.upstream.seen, "the request at the upstream")
        stalled.sendall(_STALLED)
        refusal = stalled.makefile("rb").readline()
        made.upstream.release.set()

        assert refusal == b"HTTP/1.1 408 Request Timeout\r\n"
        assert slow.makefile("rb").readline() == SERVED
        eventually(lambda: made.loopguard.metric("uncounted_total", reason="aborted") == 1, "the upload's end")


def test_sigterm_drains() -> None:
    """Told to stop, Loopguard says so, serves until Envoy has turned away, lets holds run to their end, and exits 0."""
    holding = bundle(
        policy("hold", {"pathExact": "/hold"}, action="throttle", threshold_identical_requests=40),
        policy("p", {"pathPrefix": "/p"}),
    )
    with stack(holding, "--drain-delay", "3", failure_mode="allow") as made, made.connect() as held:
        made.repeat("/hold", 39)
        held.sendall(b"GET /hold HTTP/1.1\r\nhost: h\r\n\r\n")  # held for 4 s, longer than the delay
        eventually(lambda: made.loopguard.metric("throttled_in_flight") == 1, "a hold")

        made.loopguard.signal(signal.SIGTERM)
        statuses: list[int] = []

        def turns_away() -> bool:
            statuses.append(made.send(f"/p?n={len(statuses)}").status)
            return made.envoy.stat("cluster.loopguard.membership_healthy") == 0

        eventually(lambda: made.loopguard.get("/readyz")[0] == 503, "not ready")
        eventually(turns_away, "Envoy's notice")
        served = made.loopguard.metric("requests_total", policy="p")
        assert held.makefile("rb").readline() == SERVED
        assert made.loopguard.wait() == 0
        assert set(statuses) == {200}
        assert served > 0


@pytest.mark.parametrize("transport", ["fast", "grpcio"])
def test_an_upload_that_outlasts_the_drain_goes_on(transport: str) -> None:
    """Even where Envoy is fail-closed, a request whose body is still coming when Loopguard stops reaches its upstream."""
    arguments = ("--transport", transport, "--drain-timeout", "0")
    with stack(REJECT, *arguments, failure_mode="deny") as made, made.connect() as client:
        client.sendall(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 4\r\n\r\nab")
        eventually(lambda: made.loopguard.metric("streams_in_flight") == 1, "the upload")

        made.loopguard.stop()
        client.sendall(b"cd")

        assert client.makefile("rb").readline() == SERVED
        assert made.upstream.seen[-1].body == b"abcd"


def test_a_second_signal_does_not_wait() -> None:
    """Asked twice, Loopguard lets held requests through at once and exits 0."""
    holding = bundle(policy("hold", {"pathExact": "/hold"}, action="throttle", threshold_identical_requests=100))
    with stack(holding, "--drain-delay", "600", "--drain-timeout", "600") as made, made.connect() as held:
        made.repeat("/hold", 99)
        held.sendall(b"GET /hold HTTP/1.1\r\nhost: h\r\n\r\n")  # held for 10 s
        eventually(lambda: made.loopguard.metric("throttled_in_flight") == 1, "a hold")

        made.loopguard.signal(signal.SIGTERM)
        made.loopguard.wait_for("draining")
        made.loopguard.signal(signal.SIGTERM)

        assert made.loopguard.wait() == 0
        assert held.makefile("rb").readline() == SERVED


def test_a_policy_changed_under_traffic_acts_on_the_next_request() -> None:
    """A file edited while requests run is taken within a moment; counts survive; a bad edit changes nothing."""
    with stack(bundle(policy("p", {"pathPrefix": "/"}, threshold_identical_requests=5))) as made:
        assert made.repeat("/", 3) == [200] * 3

        made.write_policies(bundle(policy("p", {"pathPrefix": "/"}, threshold_identical_requests=4)))
        eventually(lambda: made.loopguard.metric("policy_reloads_total", result="ok") == 1, "the reload")
        assert made.send("/").status == 429

        made.write_policies('{"bundle_version": 1, "policies": [{"id": "p"}]}')
        eventually(lambda: made.loopguard.metric("policy_reloads_total", result="error") == 1, "the refusal")
        assert made.send("/").status == 429
        assert "/policies/0/spec: spec is required" in made.loopguard.output()


_STALLING = """
import time
from extproc import server
server._STALLED_SECONDS = 0.2
server.Server._on_hangup = lambda self: time.sleep(60)
"""


def test_a_stalled_data_path_is_told(tmp_path: Path) -> None:
    """While the event loop that serves requests stands still, `/healthz` says so."""
    write_policies(tmp_path, bundle(policy("p", {"pathExact": "/a"})))
    loopguard = Loopguard(tmp_path, preamble=_STALLING)
    try:
        eventually(lambda: loopguard.get("/healthz")[0] == HTTPStatus.OK, "health")  # on a busy machine, it may stand still
        loopguard.signal(signal.SIGHUP)
        eventually(lambda: loopguard.get("/healthz")[0] == HTTPStatus.SERVICE_UNAVAILABLE, "the stall")
        told = json.loads(loopguard.get("/healthz")[1])
    finally:
        loopguard.signal(signal.SIGKILL)
        loopguard.stop()

    assert told["status"] == "stalled"
