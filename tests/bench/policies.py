"""What a request costs with 10,000 policies, compared with 10: the index must make their number irrelevant."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from extproc.engine.engine import Engine
from extproc.request.http import HttpRequest
from extproc.server import freeze_objects
from tests.bench import samples
from tests.bench.report import Row, progress
from tests.bench.timing import cpu_us, interleaved, ratio

TITLE = "policies: a request that matches one of 10,000 policies, vs. one of 10"

_MANY = 10_000
_FEW = 10
_LIMIT = 1.3


class Shape(NamedTuple):
    """How policies differ from each other, and the request that meets the nth of them."""

    name: str
    selector: Callable[[int], dict[str, Any]]
    path: Callable[[int], str]
    host: Callable[[int], str]


def _same_host(_: int) -> str:
    return samples.HOST


SHAPES = (
    Shape("distinct exact paths", lambda n: {"pathExact": f"/v1/tools/{n:05d}"}, lambda n: f"/v1/tools/{n:05d}", _same_host),
    Shape(
        "distinct prefixes",
        lambda n: {"pathPrefix": f"/v1/agents/{n:05d}/"},
        lambda n: f"/v1/agents/{n:05d}/run",
        _same_host,
    ),
    Shape(
        "one path, distinct hosts",
        lambda n: {"pathExact": samples.PATH, "hosts": [f"h{n:05d}.example.com"]},
        lambda _: samples.PATH,
        lambda n: f"h{n:05d}.example.com",
    ),
)


class _Side:
    """One engine and requests that meet its policies.

    They all meet the same few policies in both engines: what is measured is the lookup among many, not how cold the
    processor's cache is for a policy that has not been used recently.
    """

    def __init__(self, shape: Shape, policies: int, requests: int) -> None:
        self.engine: Engine = samples.engine([samples.policy(n, shape.selector(n)) for n in range(policies)])
        met = [n * policies // _FEW for n in range(_FEW)]
        numbers = [(met[number % _FEW], number) for number in range(requests)]
        self.requests = [
            HttpRequest("POST", shape.path(n), shape.host(n), {"x-user-id": b"user-%d" % number}) for n, number in numbers
        ]
        self.streams = [
            (
                samples.headers_message(shape.path(n), host=shape.host(n), user=f"user-{number}"),
                samples.body_message(samples.chat_body(number)),
            )
            for n, number in numbers
        ]
        if any(self.engine.prepare(request) is None for request in self.requests):
            raise RuntimeError(f"{shape.name}: a request meets no policy")

    def prepare(self) -> float:
        """Matching and descriptors alone."""
        prepare = self.engine.prepare
        return cpu_us(lambda: [prepare(request) for request in self.requests], len(self.requests))

    def stream(self) -> float:
        """Whole streams, in a store of their own."""
        serving = samples.service(self.engine)
        samples.process(serving, self.streams[0])

        def work() -> None:
            for pair in self.streams[1:]:
                samples.process(serving, pair)

        return cpu_us(work, len(self.streams) - 1)


def run(*, quick: bool) -> list[Row]:
    """Measure every shape, few and many policies in turn."""
    rows = []
    for number, shape in enumerate(SHAPES, 1):
        progress(f"policies: {shape.name}", number, len(SHAPES))
        rows += _measure(shape, rounds=9 if quick else 25, requests=500 if quick else 2_000)
    return rows


def _measure(shape: Shape, rounds: int, requests: int) -> list[Row]:
    few, many = _Side(shape, _FEW, requests), _Side(shape, _MANY, requests)
    freeze_objects()  # as in a server
    prepare = interleaved(rounds, {"few": few.prepare, "many": many.prepare})
    stream = interleaved(rounds, {"few": few.stream, "many": many.stream})
    return [
        Row(f"prepare, {shape.name}", ratio(prepare, "many", "few"), "x", _LIMIT, _us(prepare)),
        Row(f"whole stream, {shape.name}", ratio(stream, "many", "few"), "x", _LIMIT, _us(stream)),
    ]


def _us(found: dict[str, list[float]]) -> str:
    return f"{median(found['many']):.1f} us vs. {median(found['few']):.1f} us"
