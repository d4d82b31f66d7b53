"""How much memory counts, caches and tables may take: half of the container's limit.

The other half is for the program itself, its policies, operators' orders and requests in progress.
`SHARES` divides the first half. Each part tracks its size in bytes and drops its oldest entries.
"""
# interpreted: read once, at startup

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

SHARES: Final = {"counts": 0.5, "messages": 0.25, "tables": 0.25}
"""Shares of that half: counts of the memory store, or of this process while a shared store is
down; cached messages of active conversations; tables of the admin port, with other replicas'."""

MOST_MESSAGES: Final = 64 * 2**20
"""Maximum bytes for cached messages; more memory does not improve the hit rate."""

_USUAL: Final = 512 * 2**20
"""With at least this many bytes, tables have their usual size."""

_CGROUP: Final = Path("/sys/fs/cgroup")
_NO_LIMIT: Final = 2**60
"""cgroups v1 shows a number near 2**63 for no limit."""

_MEBIBYTE: Final = 2**20


class Memory(NamedTuple):
    """The memory limit of a process.

    Attributes:
        limit: bytes that the process may use.
        source: what sets the limit.
    """

    limit: int
    source: str

    def share(self, part: str) -> int:
        """The bytes for a part of `SHARES`."""
        return int(self.limit / 2 * SHARES[part])

    @property
    def messages(self) -> int:
        """The bytes for cached messages."""
        return min(MOST_MESSAGES, self.share("messages"))

    def scale(self, most: int) -> int:
        """The number of rows for a table that usually has `most`."""
        return max(1, min(most, most * self.limit // _USUAL))

    def describe(self) -> str:
        """The limit and the shares, for people."""
        shares = {**{part: self.share(part) for part in SHARES}, "messages": self.messages}
        parts = ", ".join(f"{part} {size // _MEBIBYTE}" for part, size in shares.items())
        return (
            f"{sum(shares.values()) // _MEBIBYTE} MiB of {self.limit // _MEBIBYTE} "
            f"({self.source}): {parts}"
        )


@cache
def read_memory() -> Memory:
    """The memory limit of this process, found at the first call."""
    return find_memory()


def find_memory(cgroups: Path = _CGROUP, own: Path = Path("/proc/self/cgroup")) -> Memory:
    """Find the lowest limit: of the machine, the process (`ulimit -d`, `-v`), and its cgroups."""
    machine = Memory(
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "the machine's memory"
    )
    limits = [machine, *_list_own_limits()]
    for file in _list_limit_files(cgroups, own):
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


def _list_limit_files(cgroups: Path, own: Path) -> Iterator[Path]:
    """The limit files of the process's cgroup and of those above it.

    A line of `/proc/self/cgroup` is `0::/PATH` in version 2 and `N:memory:/PATH` in version 1
    (cgroups(7)). In a container, the path may be the host's, and only the root is visible.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in ["0::/", "1:memory:/", *lines]:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (
            (cgroups / "memory", "memory.limit_in_bytes")
            if controllers
            else (cgroups, "memory.max")
        )
        folder = root / path.lstrip("/")
        for each in [folder, *folder.parents]:
            if each.is_relative_to(root):
                yield each / name
