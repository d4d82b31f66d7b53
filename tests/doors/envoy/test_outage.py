"""Clients that retry while their upstream is down: the preset `agents` on the real Envoy, two replicas and Valkey."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from http.client import IncompleteRead
from pathlib import Path
from typing import Any

import pytest

from extproc.policy.presets import find_preset
from tests.support.harness import Stack, eventually
from tests.support.stacks import open_before_model
from tests.support.turn_writers import Did, as_chat
from tests.support.usage import Model, Reply, whole

MOST = 22
"""Requests: the preset delays the fifth, and refuses the twentieth."""

BEGINS = {"model": "m", "messages": [{"role": "user", "content": "Tell me when it is done."}]}
GOES_ON = as_chat([Did((("check", {}),), ("pending",))])


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[Stack, Model]]:
    """Envoy before a model, two replicas, Valkey."""
    with open_before_model(json.loads(Path(find_preset("agents")).read_text()), replicas=2) as opened:
        yield opened


def hang_up() -> bytes:
    """What a connection ends with."""
    raise ConnectionAbortedError


FAILURES = {
    "5xx": whole(error={"message": "overloaded"})._replace(status=529),
    "cut off": Reply([hang_up], cut=True)._replace(headers={"content-length": "5"}),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("body", [BEGINS, GOES_ON], ids=["begins", "goes on"])
def test_retries_in_an_outage_are_no_loop(made: tuple[Stack, Model], body: dict[str, Any], failure: str) -> None:
    """Each is taken back once Envoy has logged it; when the upstream is back, the same request again and again is a loop."""
    one, model = made
    headers = {"authorization": f"Bearer sk-{failure}-{len(body['messages'])}", "content-type": "application/json"}

    def send() -> int:
        return one.send("/v1/chat/completions", method="POST", body=json.dumps(body).encode(), headers=headers).status

    def add_up(name: str, **labels: str) -> float:
        return sum(replica.metric(name, **labels) for replica in one.replicas)

    loops = add_up("loops_detected_total")
    model.reply = FAILURES[failure]
    logged = add_up("access_log_entries_total", result="taken")
    for number in range(MOST):
        with suppress(IncompleteRead):
            assert send() not in (400, 429)
        if number:  # the first of a window stays
            eventually(lambda: add_up("access_log_entries_total", result="taken") >= logged + number, "an entry")  # noqa: B023
    assert add_up("loops_detected_total") == loops

    model.reply = whole(object="chat.completion", choices=[])
    while (status := send()) == 200:  # delayed for longer and longer
        pass
    assert status in (400, 429)
    assert add_up("loops_detected_total") > loops
