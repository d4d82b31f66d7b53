"""What one request costs in the service, without any transport."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from statistics import median
from time import time

from extproc.engine.engine import Engine
from extproc.engine.orders import BLOCK, ActiveOverride, Overrides, Target, hash_descriptor
from extproc.ext_proc.service import Service
from extproc.ext_proc.stream import Stream
from extproc.pb.external_processor_pb2 import ProcessingRequest
from tests.bench import samples
from tests.bench.report import Row, progress
from tests.bench.timing import at_one_clock, cpu_us, difference, interleaved

TITLE = "engine: the guard's own work per request (POST 1 KB, 16 headers, one policy, counts in memory)"

_LIMIT_US = 15
_OVERRIDES_LIMIT_US = 3
_SESSION_LIMIT_US = 6
_SESSION_STEPS = 20
_CALLS = (5, 20)
_AROUND = 3
"""Of a number of calls: this many more and less are taken together."""

class _Fixture:
    """Distinct requests, and the work to be timed on all of them; every round counts in a store of its own."""

    def __init__(self, count: int) -> None:
        self.engine = samples.engine([samples.policy()])
        self.limited = samples.engine([samples.budget()])
        self.turns = samples.engine([samples.talk()])
        self.limited_turns = samples.engine([samples.budget(similarity="turns")])
        self.count = count
        self.pairs = self._make_pairs(1_000)
        self.runs = self._make_pairs(count // _SESSION_STEPS)

    def _make_pairs(self, users: int) -> list[tuple[bytes, bytes]]:
        """The two messages of each request, of users that take turns."""
        return [
            (samples.headers_message(user=f"user-{number % users}"), samples.body_message(samples.chat_body(number)))
            for number in range(self.count)
        ]

    def whole(self, overrides: Overrides | None = None) -> float:
        """Streams from the first byte to the last, perhaps with overrides to be looked up."""
        return self._ask(self.engine, self.pairs, overrides)

    def session(self, engine: Engine) -> float:
        """The same of sessions."""
        return self._ask(engine, self.runs)

    def _ask(self, engine: Engine, pairs: list[tuple[bytes, bytes]], overrides: Overrides | None = None) -> float:
        serving = samples.service(engine)
        serving.overrides = overrides

        def work() -> None:
            for headers, body in pairs:
                stream = Stream(serving)
                stream.receive(headers)
                stream.receive(body)
                stream.close()

        spent = at_one_clock(lambda: cpu_us(work, self.count))
        _check_all_counted(serving, self.count)
        return spent

    def parsing(self) -> float:
        """What any server would have to do."""
        pairs, parse = self.pairs, ProcessingRequest.FromString

        def work() -> None:
            for headers, body in pairs:
                parse(headers)
                parse(body)

        return at_one_clock(lambda: cpu_us(work, self.count))


class _Agents:
    """Agents that take turns, each with a history that has grown by one call since its last request."""

    def __init__(self, count: int) -> None:
        engines = {True: samples.engine([samples.budget(similarity="turns")]), False: samples.engine([samples.talk()])}
        self._services = {limited: samples.service(engine) for limited, engine in engines.items()}
        self._heads = [samples.headers_message(user=f"user-{number}", length=0) for number in range(count)]
        self._bodies: list[bytes] = []
        self.calls = 0

    def add_call(self) -> None:
        """Have all of them call a tool once more."""
        self.calls += 1
        self._bodies = [samples.body_message(samples.agent_body(number, self.calls)) for number in range(len(self._heads))]

    def ask(self, *, limited: bool) -> float:
        """Microseconds for a request of each."""
        serving = self._services[limited]

        def work() -> None:
            for headers, body in zip(self._heads, self._bodies, strict=True):
                stream = Stream(serving)
                stream.receive(headers)
                stream.receive(body)
                stream.close()

        spent = cpu_us(work, len(self._heads))
        _check_all_counted(serving, self.calls * len(self._heads))
        return spent


def _measure_agents(count: int, calls: Sequence[int]) -> dict[int, tuple[float, float]]:
    """The cost of session limits on top of `turns`, and of `turns` alone, in microseconds, for each number of calls."""
    agents = _Agents(count)
    late: dict[int, list[tuple[float, float]]] = {number: [] for number in calls}
    for number in range(1, max(calls) + _AROUND + 1):
        agents.add_call()
        alone, limited = agents.ask(limited=False), agents.ask(limited=True)
        for middle in calls:
            if abs(number - middle) <= _AROUND:
                late[middle].append((limited - alone, alone))
    return {middle: (median(more for more, _ in got), median(alone for _, alone in got)) for middle, got in late.items()}


def _make_overrides() -> Overrides:
    """A thousand of four shapes, as operators mix them; none holds for a request that is measured."""
    targets = [
        *(Target(descriptors=(("x-user-id", hash_descriptor("x-user-id", f"other-{number}")),)) for number in range(250)),
        *(Target(caller=f"{number:016x}") for number in range(250)),
        *(Target(fingerprint=f"{number:08x}") for number in range(250)),
        *(Target(caller=f"{number:016x}", fingerprint=f"{number:08x}") for number in range(250)),
    ]
    ends = time() + 3_600
    return Overrides([ActiveOverride(str(number), BLOCK, target, "", 0, ends, "", "") for number, target in enumerate(targets)])


def _check_all_counted(serving: Service, count: int) -> None:
    """Were requests refused or not counted, the figure would be of something else."""
    labels = {"policy": "policy-00000", "mode": "enforce", "action": "allow"}
    if serving.metrics.registry.get_sample_value("loopguard_requests_total", labels) != count:
        raise RuntimeError("not every request was counted and let through")


def run(*, quick: bool) -> list[Row]:
    """Measure whole streams, compared with parsing alone and with one another."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)  # as the server does once it listens
    fixture = _Fixture(500 if quick else 2_000)
    rounds = 7 if quick else 25
    progress("engine: whole streams", 1, 2)
    overrides = _make_overrides()
    works = {
        "whole": fixture.whole,
        "overridden": lambda: fixture.whole(overrides),
        "unlimited": lambda: fixture.session(fixture.engine),
        "limited": lambda: fixture.session(fixture.limited),
        "turns": lambda: fixture.session(fixture.turns),
        "limited turns": lambda: fixture.session(fixture.limited_turns),
        "parsing": fixture.parsing,
    }
    found = interleaved(rounds, works)
    progress("engine: agents", 2, 2)
    agents = _measure_agents(50 if quick else 200, _CALLS)
    return [
        Row("own work per request", difference(found, "whole", "parsing"), "us", _LIMIT_US, "a whole stream beyond parsing"),
        Row(
            "1,000 overrides: extra cost",
            difference(found, "overridden", "whole"),
            "us",
            _OVERRIDES_LIMIT_US,
            "of four shapes; two are looked up when the headers come, two with the body",
        ),
        Row(
            "session limits in addition to turns",
            difference(found, "limited turns", "turns"),
            "us",
            _SESSION_LIMIT_US,
            f"of steps, tool calls, one tool and money, in sessions of {_SESSION_STEPS} steps",
        ),
        Row(
            "session limits in addition to exact",
            difference(found, "limited", "unlimited"),
            "us",
            _SESSION_LIMIT_US,
            "which does not inspect the body",
        ),
        *(
            Row(f"  with turns, in a history of {calls} calls", more, "us", note=f"turns: {alone:.3g} us")
            for calls, (more, alone) in agents.items()
        ),
        Row("parsing both messages", median(found["parsing"]), "us", note="every server must do this"),
    ]
