"""Clients that retry while their upstream is down: the preset `agents` on the real Envoy, two replicas and Valkey."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http.client import IncompleteRead
from pathlib import Path
from typing import Any

import pytest

from extproc.policy.presets import find_preset
from tests.support.harness import Stack, eventually
from tests.support.stacks import open_before_model
from tests.support.turn_writers import Did, as_chat
from tests.support.usage import HUNG_UP, Model, Reply, whole

MOST = 22
"""Requests: the preset delays the fifth, and refuses the twentieth."""

BEGINS = {"model": "m", "messages": [{"role": "user", "content": "Tell me when it is done."}]}
GOES_ON = as_chat([Did((("check", {}),), ("pending",))])


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[Stack, Model]]:
    """Envoy before a model, two replicas, Valkey."""
    with open_before_model(json.loads(Path(find_preset("agents")).read_text()), replicas=2) as opened:
        yield opened


@pytest.mark.parametrize("failure", [whole(error={})._replace(status=529), HUNG_UP], ids=["5xx", "cut off"])
@pytest.mark.parametrize("body", [BEGINS, GOES_ON], ids=["begins", "goes on"])
def test_retries_in_an_outage_are_no_loop(made: tuple[Stack, Model], body: dict[str, Any], failure: Reply) -> None:
    """Each is taken back once Envoy has logged it; when the upstream is back, the same request again and again is a loop."""
    one, model = made
    send = partial(
        one.post, "/v1/chat/completions", body, {"authorization": f"Bearer {failure.status}-{len(body['messages'])}"}
    )
    count = partial(one.total, "access_log_entries_total", result="taken")
    loops, logged = one.total("loops_detected_total"), count()
    model.reply = failure
    for number in range(MOST):
        with suppress(IncompleteRead):
            assert send().status not in (400, 429)
        if number:  # the first of a window stays
            eventually(lambda: count() >= logged + number, "an entry")  # noqa: B023
    assert one.total("loops_detected_total") == loops

    model.reply = whole(object="chat.completion", choices=[])
    eventually(lambda: send() and one.total("loops_detected_total") > loops, "a loop")
