"""Reject, throttle and warn as a client of the real Envoy sees them."""

import http.client
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from extproc.cli.envoy_check.checks.callers import MARKS
from extproc.ext_proc.answers.let_pass import NARROWED, STEERED
from extproc.pb.external_processor_pb2 import HeaderMutation
from tests.support.documents import bundle, policy
from tests.support.harness import PATIENCE, Stack, eventually, stack

pytestmark = pytest.mark.compiled

on_sources = pytest.mark.sources  # the door is opened on the sources, too


def _keep_alive(
    made: Stack, paths: Sequence[str], user: dict[str, str]
) -> tuple[http.client.HTTPConnection, list[int]]:
    connection = http.client.HTTPConnection("127.0.0.1", made.envoy.port, timeout=PATIENCE)
    statuses = []
    for path in paths:
        connection.request("GET", path, headers=user)
        answer = connection.getresponse()
        answer.read()
        statuses.append(answer.status)
    return connection, statuses


@on_sources
@pytest.mark.parametrize(
    ("body", "chunked"),
    [
        (None, False),
        (b"", False),
        (b'{"a": 1}', False),
        (b"x" * 5_000_000, False),
        (b"x" * 5_000_000, True),
    ],
    ids=["none", "empty", "small", "5 MB", "5 MB in chunks"],
)
def test_third_identical_request_is_refused(
    shared: Stack, user: dict[str, str], body: bytes | None, chunked: bool
) -> None:
    before = len(shared.upstream.seen)

    statuses = [
        shared.send(
            "/reject/x?b=2&a=1",
            method="POST",
            headers=user,
            body=(body[at : at + 60_000] for at in range(0, len(body), 60_000))
            if chunked and body
            else body,
        ).status
        for _ in range(4)
    ]

    assert statuses == [200, 200, 429, 429]
    assert [seen.body for seen in shared.upstream.seen[before:]] == [body or b""] * 2


@on_sources
def test_refusal_has_the_documented_status_headers_and_body(
    shared: Stack, user: dict[str, str]
) -> None:
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
    assert (entry["loop_action"], entry["loop_policy"], entry["loop_count"]) == (
        "reject",
        "teapot",
        3,
    )


@on_sources
def test_warning_reaches_upstream_and_client(shared: Stack, user: dict[str, str]) -> None:
    answers = [shared.post("/warn", b"x", user) for _ in range(3)]
    seen = [item.header("x-fairvisor-warning") for item in shared.upstream.seen[-3:]]

    assert [answer.status for answer in answers] == [200, 200, 200]
    assert [answer.headers.get("x-fairvisor-warning") for answer in answers] == [
        None,
        None,
        "loop_warn",
    ]
    assert seen == [None, None, "loop_warn"]


def test_forged_marks_of_clients_are_removed(shared: Stack, user: dict[str, str]) -> None:
    before = len(shared.upstream.seen)
    for path in ("/warn", "/unguarded", "/warn", "/warn"):
        shared.send(path, headers={**user, **dict.fromkeys(MARKS, "loop_warn")})

    forwarded = [
        [(name.lower(), value) for name, value in seen.headers if name.lower() in MARKS]
        for seen in shared.upstream.seen[before:]
    ]
    assert forwarded == [[], [], [], [("x-fairvisor-warning", "loop_warn")]]


def test_check_envoy_knows_all_marks() -> None:
    written = [
        option.header.key for option in HeaderMutation.FromString(STEERED + NARROWED).set_headers
    ]

    assert set(MARKS) == {"x-fairvisor-warning", *written}


@on_sources
def test_throttled_request_is_held_and_then_served(shared: Stack, user: dict[str, str]) -> None:
    body = b"x" * 5_000_000
    shared.repeat("/throttle", 2, body=body, headers=user)

    started = time.monotonic()
    statuses = shared.repeat("/throttle", 4, body=body, headers=user)
    held = time.monotonic() - started

    assert statuses == [200] * 4
    # Counts 3 and 4, then twice max_delay_ms: the least that the holds themselves take
    assert held > 0.3 + 0.4 + 0.4 + 0.4


def test_hold_may_outlast_envoys_message_timeout() -> None:
    held = policy("held", {"pathPrefix": "/"}, action="throttle", threshold_identical_requests=30)

    def hasty(config: str) -> str:
        return config.replace("message_timeout: 0.2s", "message_timeout: 1.5s", 1)

    with stack(bundle(held), edit=hasty, hasty=True, failure_mode="deny") as made:
        statuses = made.repeat("/", 30)  # the last is held for 3 s

        assert statuses == [200] * 30
        assert (
            made.envoy.stat("http.ingress.ext_proc.loopguard.override_message_timeout_received")
            == 1
        )
        assert made.envoy.stat("http.ingress.ext_proc.loopguard.message_timeouts") == 0


@on_sources
def test_client_that_leaves_frees_its_hold(shared: Stack, user: dict[str, str]) -> None:
    connection, _ = _keep_alive(shared, ["/long"] * 299, user)
    connection.request("GET", "/long", headers=user)  # held for 30 s
    eventually(lambda: shared.loopguard.metric("throttled_in_flight") == 1, "a hold")

    connection.close()

    eventually(lambda: shared.loopguard.metric("throttled_in_flight") == 0, "the end of the hold")
    assert shared.loopguard.metric("streams_in_flight") == 0


def test_holds_cost_no_threads_and_end_with_a_stop() -> None:
    # Holds of 5 s and more last until the server is stopped.
    holding = policy("t", {"pathPrefix": "/"}, action="throttle", threshold_identical_requests=50)
    with stack(bundle(holding), "--drain-timeout", "0") as made:
        _keep_alive(made, ["/"] * 49, {})[0].close()
        tasks = Path(f"/proc/{made.loopguard.pid}/task")
        threads = len(list(tasks.iterdir()))

        held = []
        for number in range(1, 301):
            held.append(made.connect())
            held[-1].sendall(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
            if number % 50 == 0:  # a larger burst could outlast Envoy's message_timeout
                eventually(
                    lambda: made.loopguard.metric("throttled_in_flight") == len(held), "holds"
                )

        assert len(list(tasks.iterdir())) < threads + 10  # a few serve the whole process
        made.loopguard.stop()
        assert {connection.makefile("rb").readline() for connection in held} == {
            b"HTTP/1.1 200 OK\r\n"
        }
        for connection in held:
            connection.close()


@on_sources
def test_connection_stays_usable_after_a_refusal(shared: Stack, user: dict[str, str]) -> None:
    connection, statuses = _keep_alive(
        shared, ["/reject", "/reject", "/reject", "/reject/other"], user
    )
    connection.close()

    assert statuses == [200, 200, 429, 200]
