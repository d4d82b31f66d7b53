"""Loopguard missing, overloaded, broken or stopping, as clients of the real Envoy see it."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import bundle, policy
from tests.support.harness import envoy_version, eventually, stack

SERVED = b"HTTP/1.1 200 OK\r\n"
REJECT = bundle(policy("p", {"pathPrefix": "/"}))

needs_duplex = pytest.mark.skipif(envoy_version() < (1, 38), reason="duplex mode needs Envoy 1.38")


@pytest.mark.parametrize(("failure_mode", "status"), [("allow", 200), ("deny", 500)])
def test_failure_mode_decides_when_loopguard_is_dead(failure_mode: str, status: int) -> None:
    with stack(REJECT, failure_mode=failure_mode) as made:
        assert made.send("/").status == 200

        made.loopguard.signal(signal.SIGKILL)
        made.loopguard.wait()

        assert made.send("/").status == status


_STALLED = b"POST /p/slow HTTP/1.1\r\nhost: h\r\ncontent-length: 4\r\n\r\nhal"


def test_loops_are_refused_beside_stalled_uploads() -> None:
    """An upload that was given up is served once it is complete."""
    with stack(REJECT, "--max-streams", "3", failure_mode="deny") as made:
        stalled = [made.connect() for _ in range(5)]
        for connection in stalled:
            connection.sendall(_STALLED)
        eventually(
            lambda: made.loopguard.metric("uncounted_total", reason="overload") == 2,
            "two uploads given up",
        )

        assert made.repeat("/p", 4) == [200, 200, 429, 429]
        assert made.loopguard.metric("overload_total") == 3
        for connection in stalled:
            connection.sendall(b"f")
            assert connection.makefile("rb").readline() == SERVED
            connection.close()


def test_stalled_upload_ends_but_slow_answer_does_not() -> None:
    """Envoy's request_timeout ends when the request is received."""

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
        eventually(
            lambda: made.loopguard.metric("uncounted_total", reason="aborted") == 1,
            "the upload's end",
        )


def test_sigterm_serves_until_envoy_turns_away() -> None:
    """Holds run to their end, and the exit code is 0."""
    holding = bundle(
        policy("hold", {"pathExact": "/hold"}, action="throttle", threshold_identical_requests=40),
        policy("p", {"pathPrefix": "/p"}),
    )
    with stack(holding, "--drain-delay", "3", failure_mode="allow") as made, made.connect() as held:
        made.repeat("/hold", 39)
        # Held for 4 s, longer than the delay
        held.sendall(b"GET /hold HTTP/1.1\r\nhost: h\r\n\r\n")
        eventually(lambda: made.loopguard.metric("throttled_in_flight") == 1, "a hold")

        made.loopguard.signal(signal.SIGTERM)
        statuses: list[int] = []

        def turns_away() -> bool:
            statuses.append(made.send(f"/p?n={len(statuses)}").status)
            return made.envoy.stat("cluster.loopguard.membership_healthy") == 0

        eventually(lambda: made.loopguard.get("/readyz")[0] == 503, "not ready")
        eventually(turns_away, "Envoy's notice")
        served = made.loopguard.metric("requests_total", policy="p")
        assert (held.makefile("rb").readline(), made.loopguard.wait()) == (SERVED, 0)
        assert set(statuses) == {200}
        assert served > 0


@pytest.mark.parametrize("transport", ["fast", "grpcio"])
@pytest.mark.parametrize("body_mode", ["strict", pytest.param("duplex", marks=needs_duplex)])
def test_answer_after_a_stop_is_served(body_mode: str, transport: str) -> None:
    drain = ["--drain-delay", "3", "--drain-timeout", "1"]
    with (
        stack(
            REJECT, "--transport", transport, *drain, failure_mode="deny", body_mode=body_mode
        ) as made,
        ThreadPoolExecutor(1) as pool,
    ):
        made.loopguard.signal(signal.SIGTERM)
        made.loopguard.wait_for("draining")
        sent = pool.submit(made.post, "/hang")
        eventually(lambda: made.upstream.seen, "the request at the upstream")
        assert made.loopguard.wait() == 0
        made.upstream.release.set()

        assert sent.result().status == 200


def test_second_signal_ends_holds_at_once() -> None:
    holding = bundle(
        policy("hold", {"pathExact": "/hold"}, action="throttle", threshold_identical_requests=100)
    )
    with (
        stack(holding, "--drain-delay", "600", "--drain-timeout", "600") as made,
        made.connect() as held,
    ):
        made.repeat("/hold", 99)
        held.sendall(b"GET /hold HTTP/1.1\r\nhost: h\r\n\r\n")  # held for 10 s
        eventually(lambda: made.loopguard.metric("throttled_in_flight") == 1, "a hold")

        made.loopguard.signal(signal.SIGTERM)
        made.loopguard.wait_for("draining")
        made.loopguard.signal(signal.SIGTERM)

        assert (made.loopguard.wait(), held.makefile("rb").readline()) == (0, SERVED)


def guard(identity: str, prefix: str, threshold: int) -> dict[str, Any]:
    return policy(identity, {"pathPrefix": prefix}, threshold_identical_requests=threshold)


def test_changed_policies_apply_and_bad_ones_are_refused(tmp_path: Path) -> None:
    """Counts survive.

    A file that takes another team's requests is refused as a whole, and its last good policies act.
    """
    file = tmp_path / "b" / "b.json"
    file.parent.mkdir()
    file.write_text(json.dumps(guard("b-1", "/b", 3)))
    flags = ("--policy", str(file.parent), "--namespace-of", f"{file.parent}=path:/b,id:b-")
    with stack(bundle(guard("a-1", "/", 5)), *flags) as made:
        metric = made.loopguard.metric
        assert made.repeat("/a", 3) == [200] * 3

        made.write_policies(bundle(guard("a-1", "/", 4)))
        eventually(lambda: metric("policy_reloads_total", result="ok") == 1, "the reload")
        assert made.send("/a").status == 429

        file.write_text(json.dumps([guard("b-1", "/b", 2), guard("b-2", "/", 1)]))
        eventually(lambda: metric("policy_reloads_total", result="error") >= 1, "the refusal")
        assert (made.send("/a").status, made.repeat("/b", 3)) == (429, [200, 200, 429])
        told = made.loopguard.ask("/policies")
        assert [(each["file"], each["in_force"]) for each in told["refused"]["files"]] == [
            (str(file), True)
        ]
        assert told["modes"].keys() == {"a-1", "b-1"}
        assert made.loopguard.ask("/readyz")["refused"] == [str(file)]
        assert metric("policy_file_refused", file=str(file)) == 1
        assert f"{file}: " in made.loopguard.output()


_STALLING = """
import time
from extproc import server
server._STALLED_SECONDS = 0.2
server.Server._on_hangup = lambda self: time.sleep(60)
"""


def test_healthz_reports_a_stalled_event_loop() -> None:
    with stack(REJECT, preamble=_STALLING) as made:
        health = partial(made.loopguard.get, "/healthz")
        eventually(lambda: health()[0] == 200, "health")  # on a busy machine, it may stand still
        made.loopguard.signal(signal.SIGHUP)
        eventually(lambda: health()[0] == 503, "the stall")
        told = json.loads(health()[1])
        made.loopguard.signal(signal.SIGKILL)

    assert told["status"] == "stalled"
