"""How much memory this process may fill with what requests make it remember: half of what its container may use.

The other half is for the program itself, its policies, operators' orders and requests under way. `SHARES` divides the first
half; each part knows the size of what it keeps, in bytes, and drops the oldest.
"""
# interpreted: read once, at the start

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

SHARES: Final = {"counts": 0.5, "messages": 0.25, "tables": 0.25}
"""Parts of that half: the store in memory, or the counts of this process while a shared store is away; messages of
conversations that are under way; and what people look at: tables, and the reports of other replicas."""

MOST_MESSAGES: Final = 64 * 2**20
"""More memory for messages, in bytes, makes no more of them known."""

_USUAL: Final = 512 * 2**20
"""A process that may use this many bytes or more has tables of the usual size."""

_CGROUP: Final = Path("/sys/fs/cgroup")
_NO_LIMIT: Final = 2**60
"""Version 1 of cgroups writes a number near 2**63 for no limit."""

_MEBIBYTE: Final = 2**20


class Memory(NamedTuple):
    """Memory of a process.

    Attributes:
        limit: bytes that the process may use.
        source: what sets the limit.
    """

    limit: int
    source: str

    def share(self, part: str) -> int:
        """The bytes that a part of `SHARES` may take."""
        return int(self.limit / 2 * SHARES[part])

    @property
    def messages(self) -> int:
        """The bytes that cached messages may take."""
        return min(MOST_MESSAGES, self.share("messages"))

    def scale(self, most: int) -> int:
        """The size of a table that usually has `most` rows."""
        return max(1, min(most, most * self.limit // _USUAL))

    def describe(self) -> str:
        """The limit and the shares, for people."""
        shares = {**{part: self.share(part) for part in SHARES}, "messages": self.messages}
        parts = ", ".join(f"{part} {size // _MEBIBYTE}" for part, size in shares.items())
        return f"{sum(shares.values()) // _MEBIBYTE} MiB of {self.limit // _MEBIBYTE} ({self.source}): {parts}"


@cache
def read_memory() -> Memory:
    """The memory of this process, as it was at the first call."""
    return find_memory()


def find_memory(cgroups: Path = _CGROUP, own: Path = Path("/proc/self/cgroup")) -> Memory:
    """Find the lowest limit: of the machine, of the process (`ulimit -d`, `ulimit -v`), or of its cgroup or one above it."""
    machine = Memory(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "the machine's memory")
    limits = [machine, *_list_own_limits()]
    for file in _list_files(cgroups, own):
        try:
            text = file.read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            continue
        if text.isdecimal() and 0 < int(text) < _NO_LIMIT:
            limits.append(Memory(int(text), str(file)))
    return min(limits)


def _list_own_limits() -> Iterator[Memory]:
    for name, kind in (("ulimit -d", resource.RLIMIT_DATA), ("ulimit -v", resource.RLIMIT_AS)):
        soft, _ = resource.getrlimit(kind)
        if soft not in (resource.RLIM_INFINITY, 0):
            yield Memory(soft, name)


def _list_files(cgroups: Path, own: Path) -> Iterator[Path]:
    """The files with limits of the process's cgroup and of those above it.

    A line of `/proc/self/cgroup` is `0::/PATH` for version 2 and `N:memory:/PATH` for version 1 (cgroups(7)). In a container,
    the path may be that of the host, and only the root is visible.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in ["0::/", "1:memory:/", *lines]:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (cgroups / "memory", "memory.limit_in_bytes") if controllers else (cgroups, "memory.max")
        folder = root / path.lstrip("/")
        for each in [folder, *folder.parents]:
            if each.is_relative_to(root):
                yield each / name
