"""Clocks for a busy machine: CPU time instead of wall time, interleaved rounds, medians."""

import os
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from statistics import median, quantiles
from time import clock_gettime, thread_time
from typing import TypeVar

T = TypeVar("T")

# The clock of a process' CPU time in nanoseconds (Linux, posix-timers_types.h).
_CPU_CLOCK = 2
_MEGABYTE = bytes(2**20)
# For a megabyte; 1,100 to 1,700 were seen on the machine that the limits were set on.
_HASH_US = 1_300
_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 1_000_000


def cpu_us(work: Callable[[], object], count: int) -> float:
    started = thread_time()
    work()
    return (thread_time() - started) / count * 1e6


def measure_clock() -> float:
    """How slow the processor is now: 1 if it hashes a megabyte in the time that limits assume.

    The clock of a shared machine varies by half. A hash needs nothing but the clock, so a figure
    divided by this is the same at every speed.
    """
    return cpu_us(lambda: blake2b(_MEGABYTE).digest(), 1) / _HASH_US


def at_one_clock(measure: Callable[[], float]) -> float:
    before = measure_clock()
    spent = measure()
    return spent / ((before + measure_clock()) / 2)


def interleaved(rounds: int, works: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """Run every work once a round, A B A B, so that a slow moment hits all of them."""
    found: dict[str, list[T]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            found[name].append(work())
    return found


def ratio(found: Mapping[str, list[float]], name: str, reference: str) -> float:
    """The median over the rounds of one figure divided by another."""
    return median(one / other for one, other in zip(found[name], found[reference], strict=True))


def spread(found: Mapping[str, list[float]], name: str, reference: str) -> str:
    """The middle half of the ratios, in words."""
    low, _, high = quantiles(
        (one / other for one, other in zip(found[name], found[reference], strict=True)), n=4
    )
    return f"half of the rounds {low:.2f} to {high:.2f}"


def difference(found: Mapping[str, list[float]], name: str, reference: str) -> float:
    """The median over the rounds of one figure less another."""
    return median(one - other for one, other in zip(found[name], found[reference], strict=True))


def process_cpu(pid: int) -> float:
    # /proc/<pid>/stat has the same, in hundredths of a second
    return clock_gettime(~pid << 3 | _CPU_CLOCK)


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_MB
