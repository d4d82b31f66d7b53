"""`loopguard scan` as it is installed, with one process and with two."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.transcripts import AgentSession, write_claude_code, write_codex, write_lines
from tests.support.turn_writers import Did

LOOPGUARD = Path(sys.executable).parent / "loopguard"
MEGABYTES = 17  # fewer are read by one process


@pytest.mark.deep
def test_number_of_processes_does_not_change_the_report(tmp_path: Path) -> None:
    size = number = 0
    while size < MEGABYTES * 2**20:  # every fifth transcript loops
        number += 1
        turns = [Did((("read", {"n": n}),), (f"{number} {n} " * 4_000,)) for n in range(40)]
        turns += [turns[-1]] * (9 if number % 5 == 0 else 0)
        session = AgentSession(turns, name=f"s{number}", seconds=number)
        lines = write_claude_code(session) if number % 2 else write_codex(session)
        size += write_lines(tmp_path / f"p{number % 3}" / f"{number}.jsonl", lines).stat().st_size

    command = [str(LOOPGUARD), "scan", "--json", str(tmp_path), "--jobs"]
    alone, shared = [
        subprocess.run([*command, jobs], capture_output=True, text=True, check=False)
        for jobs in "12"
    ]

    assert (alone.returncode, shared.returncode, shared.stderr) == (0, 0, "")
    report: dict[str, Any] = json.loads(shared.stdout)
    assert (report, report["looped"]) == (json.loads(alone.stdout), report["conversations"] // 5)
    assert report["bytes"] > MEGABYTES * 2**20
