"""`loopguard scan` as it is installed: several processes, bounded memory, and the same report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.transcripts import AgentSession, write_claude_code, write_codex, write_lines
from tests.support.turn_writers import Did

LOOPGUARD = Path(sys.executable).parent / "loopguard"
MEGABYTES = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many transcripts as are worth two processes, of which every fifth loops."""
    made = tmp_path_factory.mktemp("transcripts")
    size = number = 0
    while size < MEGABYTES * 2**20:
        number += 1
        turns = [Did((("read", {"n": n}),), (f"{number} {n} " * 4_000,)) for n in range(40)]
        turns += [turns[-1]] * (9 if number % 5 == 0 else 0)
        session = AgentSession(turns, name=f"s{number}", seconds=number)
        lines = write_claude_code(session) if number % 2 else write_codex(session)
        size += write_lines(made / f"p{number % 3}" / f"{number}.jsonl", lines).stat().st_size
    return made


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder with nothing in it."""
    return subprocess.run([LOOPGUARD, "scan", *arguments], capture_output=True, text=True, check=False, cwd="/")


@pytest.mark.deep
def test_processes_find_the_same(folder: Path) -> None:
    """The report does not depend on how the files are shared."""
    alone, shared = [run("--jobs", jobs, "--json", str(folder)) for jobs in ("1", "2")]

    assert (alone.returncode, shared.returncode, shared.stderr) == (0, 0, "")
    report: dict[str, Any] = json.loads(shared.stdout)
    assert report == json.loads(alone.stdout)
    assert report["looped"] == report["conversations"] // 5
    assert report["bytes"] > MEGABYTES * 2**20


@pytest.mark.deep
def test_memory_does_not_grow_with_the_files(folder: Path) -> None:
    """A file of 2 GB in one line, beside others, takes no more than the others alone."""
    code = (
        "import re, sys; from extproc.cli.main import main; main(sys.argv[1:]);"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1], file=sys.stderr)"
    )
    large = folder / "large.jsonl"
    peaks = []
    for _ in range(2):
        arguments = ["scan", "--jobs", "1", "--json", str(folder)]
        done = subprocess.run([sys.executable, "-P", "-c", code, *arguments], capture_output=True, text=True, check=True)
        peaks.append(int(done.stderr.split()[-1]) / 1024)
        large.write_bytes(b'{"type":"user"')
        os.truncate(large, 2**31)
    large.unlink()

    assert json.loads(done.stdout)["problems"]["too_long"]["count"] == 1
    assert peaks[1] - peaks[0] < 120
