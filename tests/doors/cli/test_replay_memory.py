"""The memory of `loopguard replay`, in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.access_logs import USER, make_record, write_lines
from tests.support.documents import bundle, policy
from tests.support.engine import ANY


@pytest.mark.deep
def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    """Ten times the log, of ten times as many callers, paths and loops, takes next to nothing more."""
    (tmp_path / "policies.json").write_text(json.dumps(bundle(policy("p", ANY, window_seconds=1, **USER))))
    peaks = []
    for count in (5_000, 50_000):
        log = tmp_path / "access.log"
        log.write_bytes(write_lines(make_record(n / 300, f"u{n // 3}", path=f"/v1/{n // 3}") for n in range(count)))
        code = (
            "import re, sys; from extproc.cli.main import main; main(sys.argv[1:]);"
            # Of this program alone: getrusage() begins with what the process was before, a copy of the one that tests.
            "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1], file=sys.stderr)"
        )
        arguments = ["replay", "--policy", str(tmp_path / "policies.json"), "--json", str(log)]
        done = subprocess.run([sys.executable, "-P", "-c", code, *arguments], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["policies"][0]["loops"] == count // 3
        peaks.append(int(done.stderr.split()[-1]) / 1024)

    assert peaks[1] - peaks[0] < 20
