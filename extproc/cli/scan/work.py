"""Scans files in several processes, largest first."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.sharedctypes import Synchronized
from typing import Any, Final, NamedTuple

from extproc.cli.packed import LONGEST, FilePlace, Problem, Problems
from extproc.cli.scan.files import FoundFile
from extproc.cli.scan.formats import ScannedFile
from extproc.cli.scan.watch import Judging, RunReport
from extproc.errors import LoopguardError
from extproc.request.document import limit_integers

MOST_PROCESSES: Final = 64
_WORTH_SHARING = 2**24
"""Below this number of bytes, one process is faster."""

_BATCH_BYTES = 2**22
_BATCH_FILES = 256
_SECONDS = 0.2


class ScanTask(NamedTuple):
    """Options for all processes.

    Attributes:
        show: whether to show contents.
        since: skip conversations that ended before this time, in milliseconds since 1970.
        longest: maximum bytes of a line.
    """

    show: bool
    since: int = 0
    longest: int = LONGEST


class BatchReport(NamedTuple):
    runs: list[RunReport]
    problems: dict[str, Problem]


def count_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def scan_files(
    files: Sequence[FoundFile], task: ScanTask, processes: int, advance: Callable[[int], object]
) -> Iterator[BatchReport]:
    """Scan files; `advance` is called with the number of bytes read since the last call."""
    batches = _divide(files)
    processes = min(processes, len(batches))
    # Scan here
    if processes < 2 or sum(file.size for file in files) < _WORTH_SHARING:  # noqa: PLR2004
        judging = Judging(show=task.show)
        for batch in batches:
            yield _scan(batch, task, judging, advance)
        return
    context = multiprocessing.get_context("spawn")
    read = context.Value("Q", 0)
    told = 0
    with ProcessPoolExecutor(processes, context, _start, (task, read)) as pool:
        waiting: list[Future[BatchReport]] = [pool.submit(_scan_here, batch) for batch in batches]
        try:
            for each in waiting:  # in order, for a deterministic report
                while not each.done():
                    wait([each], _SECONDS)
                    now = read.value
                    advance(now - told)
                    told = now
                yield each.result()
        except BrokenProcessPool:
            raise LoopguardError(
                "a process ended unexpectedly, perhaps for lack of memory: try --jobs 1"
            ) from None
        except BaseException:  # including Ctrl-C
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise


def _divide(files: Sequence[FoundFile]) -> list[list[str]]:
    batches: list[list[str]] = []
    size = _BATCH_BYTES
    for file in sorted(files, key=lambda each: (-each.size, each.path)):
        if size + file.size > _BATCH_BYTES or len(batches[-1]) >= _BATCH_FILES:
            batches.append([])
            size = 0
        batches[-1].append(file.path)
        size += file.size
    return batches


def _scan(
    batch: Sequence[str], task: ScanTask, judging: Judging, advance: Callable[[int], object]
) -> BatchReport:
    problems, runs = Problems(), []

    def take(report: RunReport) -> None:
        if not task.since or not report.last or report.last >= task.since:
            runs.append(report)

    for file in batch:
        try:
            ScannedFile(judging, problems, take).scan(file, advance, task.longest)
        except Exception as error:  # noqa: BLE001  # an error in one file must not lose the whole report
            problems.add("failed", FilePlace(file, 1), type(error).__name__)
    return BatchReport(runs, problems.by_kind)


_HERE: dict[str, Any] = {}
"""State of a worker process."""


def _start(task: ScanTask, read: Synchronized[int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this process without a traceback
    limit_integers()
    _HERE.update(task=task, read=read, judging=Judging(show=task.show))


def _scan_here(batch: Sequence[str]) -> BatchReport:
    read = _HERE["read"]

    def advance(count: int) -> None:
        with read.get_lock():
            read.value += count

    return _scan(batch, _HERE["task"], _HERE["judging"], advance)
