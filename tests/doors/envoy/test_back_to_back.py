"""Loops with slow answers behind two Envoys, whose access logs arrive late."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.envoy_config.options import EnvoyOptions
from extproc.options import read_options
from tests.support.documents import bare_policy, bundle
from tests.support.harness import Envoy, Stack, eventually
from tests.support.stacks import open_before_model
from tests.support.usage import whole

PATH = "/v1/chat/completions"
WINDOW_SECONDS = 1
THRESHOLD = 5
TOOK_SECONDS = 0.3
LATE_SECONDS = 3
"""How long the second gateway keeps its access log entries."""

POLICIES = bundle(
    bare_policy(
        "slow",
        "/v1/",
        limit_keys=["header:x-user-id"],
        loop_detection=[
            {
                "enabled": True,
                "name": "back",
                "window_type": "back_to_back",
                "window_seconds": WINDOW_SECONDS,
                "threshold_identical_requests": THRESHOLD,
            },
            {
                "enabled": True,
                "name": "log",
                "window_type": "sliding_log",
                "window_seconds": 60,
                "threshold_identical_requests": 25,
                "only_without_entries": True,
            },
        ],
    )
)
BODY: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "Is it done?"}],
    "tools": [{"type": "function", "function": {"name": "check", "parameters": {}}}],
}


def send_late(text: str) -> str:
    changed = text.replace(
        "buffer_flush_interval: 0.01s", f"buffer_flush_interval: {LATE_SECONDS}s"
    )
    assert changed != text
    return changed


@pytest.fixture(scope="module", params=[1, 2], ids=["memory", "two replicas on Valkey"])
def gateways(request: pytest.FixtureRequest) -> Iterator[list[Stack]]:
    with open_before_model(POLICIES, replicas=request.param) as (made, model):
        model.reply = whole(choices=[])._replace(before=lambda: time.sleep(TOOK_SECONDS))
        folder = made.folder / "other"
        folder.mkdir()
        Path(folder, "policies").symlink_to(made.folder / "policies")
        flags = {
            "upstream": model.address,
            "listen": "127.0.0.1:0",
            "admin": "127.0.0.1:0",
            "endpoints": [replica.address for replica in made.replicas],
        }
        envoy = Envoy(folder, read_options(EnvoyOptions, flags), send_late)
        try:
            other = replace(made, envoy=envoy)
            eventually(
                lambda: envoy.stat("cluster.loopguard.membership_healthy") == len(made.replicas)
            )
            yield [made, other]
        finally:
            envoy.stop()


def run_client(gateways: list[Stack], user: str, number: int, pause: float = 0) -> list[int]:
    """The statuses of equal requests, one after another, through each gateway in turn."""
    statuses = []
    for made, _ in zip(cycle(gateways), range(number), strict=False):
        statuses.append(made.post(PATH, BODY, {"x-user-id": user}).status)
        time.sleep(pause)
    return statuses


def test_only_the_loop_is_refused(gateways: list[Stack]) -> None:
    """It runs beside a monitor, and beside clients that send the same requests at once."""
    with ThreadPoolExecutor(16) as threads:
        loop = threads.submit(run_client, gateways, "loop", 25)
        monitor = threads.submit(run_client, gateways, "monitor", 6, WINDOW_SECONDS + 0.1)
        parallel = [
            threads.submit(run_client, gateways[number % 2 :], "parallel", 3) for number in range(8)
        ]

    late = LATE_SECONDS / TOOK_SECONDS
    statuses = loop.result()
    assert THRESHOLD - 1 <= statuses.index(429) <= THRESHOLD + late + 1
    assert set(statuses[statuses.index(429) :]) == {429}
    assert set(monitor.result()) == {200}
    assert {status for client in parallel for status in client.result()} == {200}
    assert gateways[0].total("access_log_entries_total", result="missing") == 0
