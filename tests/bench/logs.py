"""What `loopguard replay` takes for an access log of a million requests: how many a second, and how much memory.

It runs in a process of its own (`python -m tests.bench.logs COUNT`), because memory that another section left behind would be
used again and hide the growth.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from time import thread_time

from extproc.cli.replay.judge import Judge
from extproc.cli.replay.logs import Logs
from extproc.cli.replay.report import ReplayReport
from tests.bench import samples
from tests.bench.processes import run_module
from tests.bench.report import Row, progress
from tests.bench.timing import resident_mb

TITLE = "logs: replay of an access log of 1,000,000 requests, one in ten of them part of a loop"

_MILLION = 1_000_000
_LIMIT_GROWTH_MB = 30
_TENTH = 10
_PER_SECOND = 500
_START = 1_763_812_345


def run(*, quick: bool) -> list[Row]:
    """Replay one log in a fresh process."""
    count = _MILLION // 10 if quick else _MILLION
    progress(f"logs: {count:,} requests", 1, 1)
    found = run_module("tests.bench.logs", str(count))
    return [
        Row("replay of a log: requests a second", found["rate"], "/s", note=f"{count:,} requests, {found['log_mb']:.0f} MB"),
        Row("replay of a log: memory at its end", found["mb"], "MB"),
        Row("replay of a log: grown since its first tenth", found["grown_mb"], "MB", _LIMIT_GROWTH_MB),
    ]


def replay(log: Path, count: int) -> dict[str, float]:
    """Replay a log; its memory after the first tenth and at the end. Raises RuntimeError if a request was not replayed."""
    engine = samples.engine([samples.policy()])
    judge, report = Judge(engine, _MILLION), ReplayReport(engine)
    early = 0.0
    started = thread_time()
    with ExitStack() as stack:
        logs = Logs([str(log)], 5, stack)
        for number, entry in enumerate(logs.read()):
            report.add(entry, judge.judge(entry.recorded))
            if number == count // _TENTH:
                early = resident_mb()
    spent = thread_time() - started
    document = report.make_document(logs, judge, 10)
    (policy,) = document["policies"]
    if policy["requests"] != count or not policy["loops"] or document["log"]["problems"]:
        raise RuntimeError(f"{policy['requests']} of {count} requests were counted, {policy['loops']} of them loops")
    return {"rate": count / spent, "mb": resident_mb(), "grown_mb": resident_mb() - early, "log_mb": log.stat().st_size / 1e6}


def write_log(file: Path, count: int) -> None:
    """An access log as Envoy writes it, with `--record`."""
    with file.open("w", encoding="utf-8") as log:
        for number in range(count):
            body = f"{0 if number % _TENTH == 0 else number:08x}"  # always the same of every tenth caller
            record = {
                "record": 1,
                "time": _START + number / _PER_SECOND,
                "method": "POST",
                "authority": samples.HOST,
                "path": samples.PATH,
                "route": "guarded:/v1/chat/completions",
                "address": "afd0982b7ea7968c",
                "headers": {"x-user-id": blake2b(b"%d" % (number % 1000), digest_size=8).hexdigest()},
                "claims": {},
                "body_bytes": 1024,
                "body_crc32": body,
                "body_adler32": body,
            }
            line = {"authority": samples.HOST, "method": "POST", "path": samples.PATH, "status": 200, "loop_record": record}
            log.write(json.dumps(line) + "\n")


def main(count: int) -> None:
    """Print what was found."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "access.log"
        write_log(file, count)
        print(json.dumps(replay(file, count)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
