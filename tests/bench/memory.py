"""A million live fingerprints in the store in memory: its size, and its longest call.

It runs in a process of its own (`python -m tests.bench.memory COUNT`): memory that another section
    left would be reused and
hide the growth.
"""

import gc
import json
import sys
from hashlib import blake2b
from time import perf_counter_ns

from extproc.engine.plan import Detector
from extproc.metrics import Metrics
from extproc.store.memory import MemoryStore
from extproc.store.rules.windows import Hit
from tests.bench import samples
from tests.bench.processes import run_module
from tests.bench.report import Row, progress
from tests.bench.timing import resident_mb

TITLE = "memory: 1,000,000 live fingerprints in the store in memory"

_MILLION = 1_000_000
_CHUNK = 10_000
_LIMIT_MB = 300
_LIMIT_STALL_MS = 50


def run(*, quick: bool) -> list[Row]:
    count = _MILLION // 10 if quick else _MILLION
    progress("memory", 1, 1)
    found = run_module("tests.bench.memory", str(count))
    note = "" if count == _MILLION else f"projected from {count:,}"
    return [
        Row("memory", found["mb"] * _MILLION / count, "MB", _LIMIT_MB, note),
        Row("longest call", found["longest_ms"], "ms", _LIMIT_STALL_MS, "wall time"),
    ]


def fill(count: int) -> dict[str, float]:
    detector = samples.engine([samples.policy(window_seconds=86_400)]).plans[0].detectors[0]
    store = MemoryStore(Metrics())
    gc.collect()
    gc.freeze()  # as the server does once it has started
    before = resident_mb()
    longest = max(_count(store, _hits(detector, start)) for start in range(0, count, _CHUNK))
    if len(store) != count:
        raise RuntimeError(f"the store has {len(store)} fingerprints, not {count}")
    return {"mb": resident_mb() - before, "longest_ms": longest / 1e6}


def _hits(detector: Detector, start: int) -> list[Hit]:
    hits = []
    for number in range(start, start + _CHUNK):
        tenant = blake2b(b"user_id=user-%d" % (number % 1000), digest_size=8).hexdigest()
        names = blake2b(b"%d" % number, digest_size=12).hexdigest()
        hit = detector.make_hit("", tenant, names, detector.similarity)
        if hit is not None:
            hits.append(hit)
    return hits


def _count(store: MemoryStore, hits: list[Hit]) -> int:
    longest = 0
    for hit in hits:
        before = perf_counter_ns()
        store.hit((hit,))
        longest = max(longest, perf_counter_ns() - before)
    return longest


if __name__ == "__main__":
    print(json.dumps(fill(int(sys.argv[1]))))
