"""The guard's own work for one request, without any transport: what two messages cost beyond being parsed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from time import perf_counter_ns

from extproc.engine import decide
from extproc.fingerprint import NO_BODY
from extproc.metrics import Metrics
from extproc.pb.external_processor_pb2 import ProcessingRequest
from extproc.request import HttpRequest
from extproc.service import Service
from extproc.store.memory import MemoryStore
from tests.bench import samples
from tests.bench.report import Row, progress
from tests.bench.timing import cpu_us, difference, interleaved

TITLE = "engine: the guard's own work per request (POST 1 KB, 16 headers, one policy, counts in memory)"

_LIMIT_US = 15
_HEADERS_STEPS = ("parse", "match policies, read descriptors")
_BODY_STEPS = ("parse", "checksums", "fingerprint and key", "count", "decide")


class _Fixture:
    """Distinct requests, and the work to be timed on all of them; every round counts in a store of its own."""

    def __init__(self, count: int) -> None:
        self.engine = samples.engine([samples.policy()])
        self.count = count
        users = [f"user-{number % 1000}" for number in range(count)]
        self.pairs = [
            (samples.headers_message(user=user), samples.body_message(samples.chat_body(number)))
            for number, user in enumerate(users)
        ]
        self.requests = [
            HttpRequest("POST", samples.PATH, samples.HOST, {"x-user-id": user.encode()}, address="203.0.113.7")
            for user in users
        ]

    def whole(self) -> float:
        """Streams from the first byte to the last."""
        serving = samples.service(self.engine)
        pairs = self.pairs

        def work() -> None:
            for headers, body in pairs:
                stream = serving.open()
                stream.receive(headers)
                stream.receive(body)
                stream.close()

        spent = cpu_us(work, self.count)
        _check_all_counted(serving, self.count)
        return spent

    def parsing(self) -> float:
        """What any server would have to do."""
        pairs, parse = self.pairs, ProcessingRequest.FromString

        def work() -> None:
            for headers, body in pairs:
                parse(headers)
                parse(body)

        return cpu_us(work, self.count)

    def steps(self) -> list[float]:
        """The median of every step, in microseconds.

        All steps of one request, then the next request: a step that runs alone in a loop takes half the time, because the
        processor then predicts its every branch.
        """
        serving, store = samples.service(self.engine), MemoryStore(Metrics())
        clocks = [list(self._clock(serving, store, number)) for number in range(self.count)]
        spent = [[end - start for start, end in pairwise(clock)] for clock in clocks]
        return [median(step) / 1000 for step in zip(*spent, strict=True)]

    def _clock(self, serving: Service, store: MemoryStore, number: int) -> Iterator[int]:
        """One request; the clock before the first step and after each."""
        headers, body = self.pairs[number]
        parse, request, stream = ProcessingRequest.FromString, self.requests[number], serving.open()
        yield perf_counter_ns()
        stream.receive(headers)
        yield perf_counter_ns()
        parse(headers)
        yield perf_counter_ns()
        check = self.engine.prepare(request)
        yield perf_counter_ns()
        stream.receive(body)
        yield perf_counter_ns()
        message = parse(body)
        yield perf_counter_ns()
        sums = NO_BODY.plus(message.request_body.body)
        yield perf_counter_ns()
        if check is None:
            raise RuntimeError("the request meets no policy")
        check.seal(sums)
        yield perf_counter_ns()
        counts = store.hit([entry.hit for entry in check.enforcing])
        yield perf_counter_ns()
        decide(check, counts)
        yield perf_counter_ns()
        stream.close()


def _check_all_counted(serving: Service, count: int) -> None:
    """Were requests refused or not counted, the figure would be of something else."""
    labels = {"policy": "policy-00000", "mode": "enforce", "action": "allow"}
    if serving.metrics.registry.get_sample_value("loopguard_requests_total", labels) != count:
        raise RuntimeError("not every request was counted and let through")


def run(*, quick: bool) -> list[Row]:
    """Measure whole streams against parsing alone, then the steps between."""
    fixture = _Fixture(500 if quick else 2_000)
    rounds = 7 if quick else 25
    progress("engine: whole streams", 1, 2)
    found = interleaved(rounds, {"whole": fixture.whole, "parsing": fixture.parsing})
    progress("engine: step by step", 2, 2)
    steps = [median(step) for step in zip(*(fixture.steps() for _ in range(rounds)), strict=True)]
    behind = 1 + len(_HEADERS_STEPS)
    return [
        Row("own work per request", difference(found, "whole", "parsing"), "us", _LIMIT_US),
        Row("parsing both messages", median(found["parsing"]), "us", note="not counted above: every server has to"),
        *_phase("headers", steps[:behind], _HEADERS_STEPS),
        *_phase("body", steps[behind:], _BODY_STEPS),
    ]


def _phase(name: str, steps: list[float], names: tuple[str, ...]) -> list[Row]:
    """One message's whole time, its steps, and what lies between them."""
    whole, *inner = steps
    rest = Row(f"  {name}: everything else", whole - sum(inner), "us")
    return [
        Row(f"{name} message", whole, "us"),
        *(Row(f"  {name}: {step}", spent, "us") for step, spent in zip(names, inner, strict=True)),
        rest,
    ]
