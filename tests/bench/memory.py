"""A million live fingerprints in the store in memory: its size, and its longest call.

It runs in a process of its own (`python -m tests.bench.memory COUNT`): memory that another section left would be reused and
hide the growth.
"""

from __future__ import annotations

import gc
import json
import sys
from hashlib import blake2b
from time import perf_counter_ns, thread_time

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

_REQUIRED = "sliding_ttl"  # the default window; the others for information


def run(*, quick: bool) -> list[Row]:
    rows = []
    kinds = ("sliding_ttl", "sliding_log", "fixed")
    for number, kind in enumerate(kinds, 1):
        progress(f"memory: {kind}", number, len(kinds))
        rows += _rows(kind, _MILLION // 10 if quick else _MILLION)
    return rows


def _rows(kind: str, count: int) -> list[Row]:
    found = run_module("tests.bench.memory", kind, str(count))
    required = kind == _REQUIRED
    note = "" if count == _MILLION else f"projected from {count:,}"
    return [
        Row(f"{kind}: memory", found["mb"] * _MILLION / count, "MB", _LIMIT_MB if required else None, note),
        Row(f"{kind}: longest call", found["longest_ms"], "ms", _LIMIT_STALL_MS if required else None, "wall time"),
        Row(f"{kind}: a new fingerprint", found["first_us"], "us"),
        Row(f"{kind}: a known fingerprint", found["again_us"], "us"),
    ]


def fill(kind: str, count: int) -> dict[str, float]:
    detector = samples.engine([samples.policy(window_type=kind, window_seconds=86_400)]).plans[0].detectors[0]
    store = MemoryStore(Metrics())
    gc.collect()
    gc.freeze()  # as the server does once it has started
    before = resident_mb()
    chunks = range(0, count, _CHUNK)
    first = [_count(store, _hits(detector, start)) for start in chunks]
    grown = resident_mb() - before
    again = [_count(store, _hits(detector, start)) for start in chunks[:: max(1, len(chunks) // 10)]]
    if len(store) != count:
        raise RuntimeError(f"the store keeps {len(store)} fingerprints, not {count}")
    return {
        "mb": grown,
        "longest_ms": max(longest for longest, _ in first) / 1e6,
        "first_us": sum(spent for _, spent in first) / count * 1e6,
        "again_us": sum(spent for _, spent in again) / (len(again) * _CHUNK) * 1e6,
    }


def _hits(detector: Detector, start: int) -> list[Hit]:
    hits = []
    for number in range(start, start + _CHUNK):
        tenant = blake2b(b"user_id=user-%d" % (number % 1000), digest_size=8).hexdigest()
        names = blake2b(b"%d" % number, digest_size=12).hexdigest()
        hit = detector.make_hit("", tenant, names, detector.similarity)
        if hit is not None:
            hits.append(hit)
    return hits


def _count(store: MemoryStore, hits: list[Hit]) -> tuple[int, float]:
    longest = 0
    started = thread_time()
    for hit in hits:
        before = perf_counter_ns()
        store.hit((hit,))
        longest = max(longest, perf_counter_ns() - before)
    return longest, thread_time() - started


if __name__ == "__main__":
    print(json.dumps(fill(sys.argv[1], int(sys.argv[2]))))
