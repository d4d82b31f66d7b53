"""Policies change while a server process runs."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import bundle, policy
from tests.support.harness import Loopguard, eventually, write_policies


# Any field of loop_detection
def guard(identity: str = "p", **more: Any) -> dict[str, Any]:  # noqa: ANN401
    return policy(identity, {"pathPrefix": "/"}, limit_keys=["jwt:org"], **more)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Loopguard]:
    write_policies(tmp_path, bundle(guard("a"), bundle_version=202606010007))
    server = Loopguard(tmp_path)
    yield server
    server.stop()


def test_running_server_follows_its_files(tmp_path: Path, running: Loopguard) -> None:
    def shows(identity: str) -> bool:
        status, body = running.get("/policies")
        return status == 200 and identity in json.loads(body)["modes"]

    started = running.metric("policy_reloads_total")
    write_policies(tmp_path, bundle(guard("b"), bundle_version=202606010008))
    eventually(lambda: shows("b"), "the change")
    write_policies(
        tmp_path,
        bundle(
            guard("c", action="explode"), guard("d", window_seconds=0), bundle_version=202606010009
        ),
    )
    eventually(lambda: running.metric("policy_reloads_total", result="error"), "the bad change")
    running.signal(signal.SIGHUP)
    eventually(
        lambda: running.metric("policy_reloads_total", result="error") == 2, "the forced reload"
    )
    write_policies(tmp_path, bundle(guard("e"), bundle_version=202606010006))
    eventually(lambda: shows("e"), "the change back")

    log = running.output()
    assert started == 0
    assert running.metric("policy_reloads_total", result="ok") == 2
    assert running.metric("policy_reloads_total", result="error") == 2
    assert running.metric("policy_info", bundle_version="202606010006") == 1
    assert running.metric("policy_info") == 1
    for message in (
        "action must be one of reject, land, throttle, steer, warn",
        "window_seconds must be a positive integer",
    ):
        assert len(re.findall(rf"error .*{message}", log)) == 2
    assert re.search(
        r"warning bundle_version went down file=\S+ before=202606010008\S* now=202606010006", log
    )
    assert f"{os.sep}policies.json: /policies/0/spec/loop_detection/action: " in log


_STUCK = """
import threading
import extproc.reload as reload
real, times = reload.read_each, []
def read_each(paths):
    times.append(1)
    if len(times) > 1:
        threading.Event().wait()
    return real(paths)
reload.read_each, reload.READ_SECONDS = read_each, 0.1
"""


def test_stuck_file_system_does_not_block_shutdown(tmp_path: Path) -> None:
    write_policies(tmp_path, bundle(guard("a")))
    server = Loopguard(tmp_path, preamble=_STUCK)
    try:
        eventually(
            lambda: server.metric("policy_reloads_total", result="error"), "the failed reload"
        )
        server.signal(signal.SIGTERM)
        code = server.wait()
    finally:
        server.stop()

    assert code == 0
    assert server.output().splitlines()[-1].endswith("info    stopped")
