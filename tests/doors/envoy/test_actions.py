"""Reject, throttle and warn as a client sees them through the real Envoy."""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from extproc.cli.envoy_check.checks.callers import MARKS
from extproc.ext_proc.answers.let_pass import NARROWED, STEERED
from extproc.pb.external_processor_pb2 import HeaderMutation
from tests.support.documents import bundle, policy
from tests.support.harness import PATIENCE, Stack, eventually, stack

pytestmark = pytest.mark.compiled

on_sources = pytest.mark.sources
"""The door is opened on the sources, too."""


def _chunks(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), 60_000):
        yield data[start : start + 60_000]


def _keep_alive(made: Stack, paths: Sequence[str], user: dict[str, str]) -> tuple[http.client.HTTPConnection, list[int]]:
    """One connection on which these were asked for, one behind the other, and their statuses."""
    connection = http.client.HTTPConnection("127.0.0.1", made.envoy.port, timeout=PATIENCE)
    statuses = []
    for path in paths:
        connection.request("GET", path, headers=user)
        answer = connection.getresponse()
        answer.read()
        statuses.append(answer.status)
    return connection, statuses


@on_sources
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("body", [None, b'{"a": 1}', b"x" * 5_000_000, b""], ids=["none", "small", "5 MB", "empty"])
def test_the_nth_identical_request_is_refused(shared: Stack, user: dict[str, str], body: bytes | None, chunked: bool) -> None:
    """Whatever its body and however it is sent, the third identical request gets a 429 and never reaches the upstream."""
    before = len(shared.upstream.seen)
    sent = [
        shared.send("/reject/x?b=2&a=1", method="POST", headers=user, body=_chunks(body) if chunked and body else body)
        for _ in range(4)
    ]

    assert [answer.status for answer in sent] == [200, 200, 429, 429]
    assert [seen.body for seen in shared.upstream.seen[before:]] == [body or b""] * 2


@on_sources
def test_a_refusal_on_the_wire(shared: Stack, user: dict[str, str]) -> None:
    """Status, headers and body of a refusal are as documented, and Envoy's log says why."""
    shared.repeat("/teapot", 2, headers=user)

    answer = shared.send("/teapot", headers=user)

    assert answer.status == 418
    expected = {
        "content-type": "application/json",
        "retry-after": "90",
        "x-should-retry": "false",
        "x-fairvisor-reason": "loop_detected",
        "x-loopguard-policy": "teapot",
        "x-loopguard-count": "3",
    }
    assert expected.items() <= answer.headers.items()
    assert re.fullmatch("[0-9a-f]{8}", answer.headers["x-loopguard-fingerprint"])
    assert answer.json()["detail"]["cooldown_seconds"] == 90
    assert "3 times within" in answer.json()["error"]["message"]
    entry = shared.envoy.logged("/teapot", status=418)
    assert entry["details"] == "loop_detected"
    assert (entry["loop_action"], entry["loop_policy"], entry["loop_count"]) == ("reject", "teapot", 3)


@on_sources
def test_a_warning_reaches_upstream_and_client(shared: Stack, user: dict[str, str]) -> None:
    """From the threshold on the request carries the warning to the upstream and the response carries it to the client."""
    answers = [shared.post("/warn", b"x", user) for _ in range(3)]
    seen = [item.header("x-fairvisor-warning") for item in shared.upstream.seen[-3:]]

    assert [answer.status for answer in answers] == [200, 200, 200]
    assert [answer.headers.get("x-fairvisor-warning") for answer in answers] == [None, None, "loop_warn"]
    assert seen == [None, None, "loop_warn"]


def test_a_forged_mark_is_removed(shared: Stack, user: dict[str, str]) -> None:
    """A client that sends a mark itself is not believed, whether Loopguard gives one or not, nor is the header doubled."""
    before = len(shared.upstream.seen)
    for path in ("/warn", "/unguarded", "/warn", "/warn"):
        shared.send(path, headers={**user, **dict.fromkeys(MARKS, "loop_warn")})

    forwarded = [
        [(name.lower(), value) for name, value in seen.headers if name.lower() in MARKS]
        for seen in shared.upstream.seen[before:]
    ]
    assert forwarded == [[], [], [], [("x-fairvisor-warning", "loop_warn")]]


def test_all_marks_are_known() -> None:
    """What Loopguard sets is what no client may send."""
    written = [option.header.key for option in HeaderMutation.FromString(STEERED + NARROWED).set_headers]

    assert set(MARKS) == {"x-fairvisor-warning", *written}


@on_sources
@pytest.mark.parametrize("body", [None, b"x" * 5_000_000], ids=["none", "5 MB"])
def test_a_throttled_request_is_held_and_then_served(shared: Stack, user: dict[str, str], body: bytes | None) -> None:
    """The hold is capped by max_delay_ms, and the request is served in the end."""
    shared.repeat("/throttle", 2, body=body, headers=user)

    started = time.monotonic()
    statuses = shared.repeat("/throttle", 4, body=body, headers=user)
    held = time.monotonic() - started

    assert statuses == [200] * 4
    assert held > 0.3 + 0.4 + 0.4 + 0.4  # counts 3 and 4, then twice the cap: the least that the holds themselves take


def test_a_hold_outlasts_envoys_message_timeout() -> None:
    """Even where Envoy is fail-closed, a request that is held for longer than Envoy waits for an answer is served."""
    held = policy("held", {"pathPrefix": "/"}, action="throttle", threshold_identical_requests=30)

    def hasty(config: str) -> str:
        return config.replace("message_timeout: 0.2s", "message_timeout: 1.5s", 1)

    with stack(bundle(held), edit=hasty, hasty=True, failure_mode="deny") as made:
        statuses = made.repeat("/", 30)  # the last is held for 3 s

        assert statuses == [200] * 30
        assert made.envoy.stat("http.ingress.ext_proc.loopguard.override_message_timeout_received") == 1
        assert made.envoy.stat("http.ingress.ext_proc.loopguard.message_timeouts") == 0


@on_sources
def test_a_client_that_leaves_frees_its_hold(shared: Stack, user: dict[str, str]) -> None:
    """While a request is held the gauge shows it; when its client hangs up the hold is over long before its time."""
    connection, _ = _keep_alive(shared, ["/long"] * 299, user)
    connection.request("GET", "/long", headers=user)  # held for 30 s
    eventually(lambda: shared.loopguard.metric("throttled_in_flight") == 1, "a hold")

    connection.close()

    eventually(lambda: shared.loopguard.metric("throttled_in_flight") == 0, "the end of the hold")
    assert shared.loopguard.metric("streams_in_flight") == 0


def test_a_thousand_holds_cost_no_threads_and_a_stop_serves_them_all() -> None:
    """1,000 held requests add no thread to the process, and when it is told to stop every one of them is let through."""
    # A hold of 5 s and more, so that it lasts until the test ends it by stopping the server.
    holding = policy("t", {"pathPrefix": "/"}, action="throttle", threshold_identical_requests=50)
    with stack(bundle(holding), "--drain-timeout", "0") as made:
        _keep_alive(made, ["/"] * 49, {})[0].close()
        tasks = Path(f"/proc/{made.loopguard.pid}/task")
        threads = len(list(tasks.iterdir()))

        held = []
        for number in range(1, 1_001):
            held.append(made.connect())
            held[-1].sendall(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
            if number % 50 == 0:  # a burst of a thousand would outlast Envoy's message_timeout
                eventually(lambda: made.loopguard.metric("throttled_in_flight") == len(held), "holds")

        assert len(list(tasks.iterdir())) < threads + 10  # a few of them do what takes long, for the whole process
        made.loopguard.stop()
        assert {connection.makefile("rb").readline() for connection in held} == {b"HTTP/1.1 200 OK\r\n"}
        for connection in held:
            connection.close()


@on_sources
def test_a_connection_survives_its_refusals(shared: Stack, user: dict[str, str]) -> None:
    """A keep-alive connection that sends the loop gets its refusals in order and stays usable."""
    connection, statuses = _keep_alive(shared, ["/reject", "/reject", "/reject", "/reject/other"], user)
    connection.close()

    assert statuses == [200, 200, 429, 200]
