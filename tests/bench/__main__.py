"""`make bench`: run the benchmark and print its tables."""

import argparse
import logging
import sys
import traceback
from collections.abc import Sequence
from time import perf_counter

from extproc.cli.main import describe_version
from tests.bench import (
    answers,
    engine,
    envoy,
    hostile,
    memory,
    redis,
    reload,
    scan,
    similarity,
)
from tests.bench.report import Section, table, verdict

_SECTIONS = {
    "engine": (engine.TITLE, engine.run),
    "similarity": (similarity.TITLE, similarity.run),
    "memory": (memory.TITLE, memory.run),
    "scan": (scan.TITLE, scan.run),
    "reload": (reload.TITLE, reload.run),
    "hostile": (hostile.TITLE, hostile.run),
    "redis": (redis.TITLE, redis.run),
    "envoy": (envoy.TITLE, envoy.run),
    "answers": (answers.TITLE, answers.run),
}

_EPILOG = """examples:
  make bench                                           everything, a few minutes
  make bench ARGS=--quick                              the same with fewer rounds
  make bench ARGS='--only envoy --only engine'         two sections
  .venv/bin/python -m tests.bench --only similarity    the same in pure Python

The costs of two servers are measured side by side, in turns, and compared as a ratio. Figures in
microseconds are CPU time of this machine and mean little on another. exit code: 0 measured (also
when a requirement was missed), 1 the benchmark failed"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    print(f"measured: {describe_version()}\n", flush=True)
    # Loops are detected by the thousand, and their lines would hide the progress.
    logging.disable(logging.WARNING)
    sections: dict[str, Section] = {}
    failed = []
    for name in options.only or _SECTIONS:
        title, run = _SECTIONS[name]
        started = perf_counter()
        try:
            rows = run(quick=options.quick)
        except Exception:  # noqa: BLE001  # one broken section must not cost the others' figures
            traceback.print_exc()
            failed.append(name)
            continue
        sections[name] = Section(title, perf_counter() - started, rows)
        print(table(sections[name]), end="\n\n", flush=True)
    print(verdict(sections))
    for name in failed:
        print(f"FAILED {name}: see above", file=sys.stderr)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tests.bench",
        description="What Loopguard costs, compared with a server that does nothing.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds, a tenth of the fingerprints"
    )
    parser.add_argument(
        "--only", action="append", choices=tuple(_SECTIONS), help="this section; repeatable"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
