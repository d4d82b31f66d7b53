"""The memory limit of the process, and that it is respected."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from extproc.memory import Memory, find_memory
from extproc.metrics import Metrics
from extproc.store.memory import MemoryStore
from tests.support import ROOT
from tests.support.ledger import limit, make_step

MEBIBYTE = 2**20
MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("own", "files", "limit", "source"),
    [
        ("0::/", {"memory.max": "268435456"}, 256, "memory.max"),
        (
            "0::/pod/a",
            {"memory.max": "max", "pod/memory.max": "134217728", "pod/a/memory.max": "268435456"},
            128,
            "pod/memory.max",
        ),
        ("0::/host/path/that/is/not/seen", {"memory.max": "67108864"}, 64, "memory.max"),
        (
            "5:cpu:/x\n4:memory:/y",
            {"memory/y/memory.limit_in_bytes": "67108864"},
            64,
            "memory/y/memory.limit_in_bytes",
        ),
        (
            "4:memory:/y",
            {"memory/memory.limit_in_bytes": "9223372036854771712"},
            MACHINE // MEBIBYTE,
            "",
        ),
        ("0::/", {"memory.max": "max"}, MACHINE // MEBIBYTE, ""),
        ("nonsense", {"memory.max": "12x"}, MACHINE // MEBIBYTE, ""),
    ],
)
def test_lowest_limit_of_cgroups_applies(
    tmp_path: Path, own: str, files: dict[str, str], limit: int, source: str
) -> None:
    told = write(tmp_path / "cgroup", {**files, "../self": own})

    found = find_memory(told, tmp_path / "self")

    assert found.limit // MEBIBYTE == limit
    assert found.source == (str(told / source) if source else "the machine's memory")


def test_without_cgroups_the_machine_limits(tmp_path: Path) -> None:
    assert find_memory(tmp_path / "none", tmp_path / "nothing") == (MACHINE, "the machine's memory")


def test_shares_are_half_of_the_limit() -> None:
    small, large = Memory(128 * MEBIBYTE, "a"), Memory(8 * 2**30, "b")

    assert sum(small.share(part) for part in ("counts", "messages", "tables")) == 64 * MEBIBYTE
    assert (small.scale(1_000), large.scale(1_000), Memory(1, "c").scale(1_000)) == (250, 1_000, 1)
    assert (small.messages, large.messages) == (16 * MEBIBYTE, 64 * MEBIBYTE)
    assert small.describe() == "64 MiB of 128 (a): counts 32, messages 16, tables 16"


@pytest.mark.slow
def test_store_drops_entries_beyond_its_bytes() -> None:
    store = MemoryStore(Metrics(), max_bytes=2**20)
    for number in range(8_000):
        store.hit([make_step(number, limit(), key=f"session:p::{number:016x}:7f")], number)

    assert store.size <= 2**20
    assert 1_000 < len(store) < 6_000


@pytest.mark.deep
def test_new_callers_do_not_fill_memory() -> None:
    limit = 160 * MEBIBYTE
    code = [sys.executable, "-P", "-m", "tests.support.soak", "12000"]
    grown = subprocess.run(  # our own module
        code,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
        capture_output=True,
        text=True,
        check=True,
    )

    grown_mb = [float(line) for line in grown.stdout.split()]

    assert grown_mb[-1] < limit / 2 / 10**6
    assert grown_mb[-1] - grown_mb[len(grown_mb) // 2] < grown_mb[-1] / 4
