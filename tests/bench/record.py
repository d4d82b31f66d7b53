"""What `--record` costs a request of an agent: the same requests with and without it, in turns."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from itertools import count
from statistics import median
from typing import Any

from extproc.ext_proc.service import Service
from extproc.ext_proc.stream import Stream
from extproc.settings import Settings
from tests.bench import samples
from tests.bench.agents import make_agents, take_turns
from tests.bench.report import Row, progress
from tests.bench.timing import cpu_us, difference, interleaved, ratio, spread

TITLE = "record: agents' requests (most 10 to 64 KB, no header names sessions) with --record, vs. without"

_AGENTS = 20
_TASK = b"Task "
_SALTS = count(10_000)
"""Every round has conversations that were never seen before, which differ in nothing but a number."""


def run(*, quick: bool) -> list[Row]:
    """Measure a policy with `turns`, and one that has session limits, too."""
    limited = samples.agents()
    turns = {**limited, "spec": {key: value for key, value in limited["spec"].items() if key != "session_limits"}}
    agents = [(agent.path, agent.number, body) for agent, body in take_turns(make_agents(_AGENTS))]
    rows = []
    for number, (name, policy) in enumerate({"turns": turns, "turns and session limits": limited}.items(), 1):
        progress(f"record: {name}", number, 2)
        works: dict[str, Callable[[], float]] = {
            kind: partial(_measure, policy, agents, record=kind == "recorded") for kind in ("recorded", "plain")
        }
        _measure(policy, agents, record=True)
        found = interleaved(4 if quick else 16, works)
        more = f"{median(found['plain']):.0f} us without, {difference(found, 'recorded', 'plain'):+.1f} us with"
        note = f"{more}, {spread(found, 'recorded', 'plain')}"
        rows.append(Row(f"{name}: CPU with --record / without", ratio(found, "recorded", "plain"), "x", note=note))
    return rows


def _measure(policy: dict[str, Any], agents: list[tuple[str, int, bytes]], *, record: bool) -> float:
    """Microseconds of CPU for each request of agents that work side by side, from their first requests on."""
    serving = samples.service(samples.engine([policy]), Settings(record=record))
    salt = b"%b%d-" % (_TASK, next(_SALTS))
    requests = [
        (
            samples.headers_message(
                path, user=f"u{number}", length=len(body), more={"authorization": f"Bearer sk-{number:040d}"}
            ),
            samples.body_message(body.replace(_TASK, salt, 1)),
        )
        for path, number, body in agents
    ]
    gc.collect()
    gc.disable()
    try:
        return cpu_us(partial(_process, serving, requests), len(requests))
    finally:
        gc.enable()


def _process(serving: Service, requests: list[tuple[bytes, bytes]]) -> None:
    for head, body in requests:
        stream = Stream(serving)
        stream.receive(head)
        stream.receive(body)
        stream.close()
