"""Limits of single tools by name, which replace a detector's; `*` matches anything."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from extproc.objects import Place

READS, CHANGES = 64, 128
"""Flags: a tool only reads; it changes what others may read."""

_READING: Final = frozenset(
    (
        "read",
        "get",
        "list",
        "ls",
        "dir",
        "cat",
        "head",
        "view",
        "show",
        "open",
        "find",
        "search",
        "grep",
        "glob",
        "tree",
        "pwd",
        "stat",
        "describe",
        "fetch",
        "query",
        "lookup",
        "look",
        "status",
        "check",
        "inspect",
        "count",
        "exists",
        "diff",
    )
)
_CHANGING: Final = frozenset(
    (
        "write",
        "edit",
        "create",
        "update",
        "delete",
        "remove",
        "insert",
        "append",
        "replace",
        "patch",
        "apply",
        "move",
        "rename",
        "copy",
        "mkdir",
        "rmdir",
        "rm",
        "mv",
        "cp",
        "touch",
        "tee",
        "ln",
        "chmod",
        "chown",
        "put",
        "post",
        "set",
        "add",
        "save",
        "upload",
        "send",
        "commit",
        "push",
        "merge",
        "submit",
        "install",
        "uninstall",
        "drop",
        "alter",
    )
)
_OWN: Final = frozenset({"todo", "todos", "think", "thought", "plan", "note", "notes", "memory"})
"""Words for an agent's own notes, which other tools do not read."""

_NAME_WORD: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")

_LONG_CYCLE = 5
"""A cycle of at least this many calls or turns needs one round less."""


def count_rounds(length: int, threshold: int) -> int:
    """The number of rounds from which a cycle is a loop."""
    return threshold if length < _LONG_CYCLE else max(2, threshold - 1)


class Limit(NamedTuple):
    """The limit of a tool, or of tools used in parallel; see `Tool`."""

    threshold: int
    reason: str = ""
    allow: bool = False
    window_calls: int = 0


class ToolLimits:
    """A detector's threshold, and the limits in `tools` that replace it.

    Attributes:
        default: the limit of tools without an entry.
        lowest: the lowest threshold.
        highest: the highest threshold.
        widest: the widest window, in calls.
    """

    def __init__(
        self, threshold: int, tools: dict[str, Limit] | None = None, window_calls: int = 0
    ) -> None:
        """Names in `tools` may contain `*` for anything.

        An exact name comes first, then the first matching pattern.
        """
        self._tools = tools or {}
        self.default = Limit(threshold, window_calls=window_calls)
        self.lowest = min([threshold, *[limit.threshold for limit in self._tools.values()]])
        self.highest = max([threshold, *[limit.threshold for limit in self._tools.values()]])
        self.widest = max([window_calls, *[limit.window_calls for limit in self._tools.values()]])
        self._patterns = [
            (name.split("*"), limit) for name, limit in self._tools.items() if "*" in name
        ]

    def of(self, names: Sequence[str]) -> Limit:
        """The limit of parallel tools: the highest threshold; if one is exempt, all are."""
        if not self._tools or not names:
            return self.default
        if len(names) == 1:
            return self._of_one(names[0])
        limits = [self._of_one(name) for name in names]
        reason = next((limit.reason for limit in limits if limit.reason), "")
        return Limit(
            max([limit.threshold for limit in limits]), reason, any(limit.allow for limit in limits)
        )

    def _of_one(self, name: str) -> Limit:
        limit = self._tools.get(name)
        if limit is None:
            limit = next(
                (limit for pattern, limit in self._patterns if matches(name, pattern)), self.default
            )
        return limit


def find_role(names: Sequence[str], hints: Mapping[str, bool]) -> int:
    """READS if all tools only read, CHANGES if one changes something; `hints` override names."""
    role = READS if names else 0
    for name in names:
        hint = hints.get(name) if hints else None
        found = _read_role(name) if hint is None else READS if hint else CHANGES
        if found == CHANGES:
            return CHANGES
        role &= found
    return role


def _read_role(name: str) -> int:
    """The role by a name's first verb: `mcp__git__create_branch` changes something.

    0 if a later verb contradicts reading.
    """
    words = [word.lower() for word in _NAME_WORD.findall(name[-256:].rpartition("__")[2])]
    verb = next((word for word in words if word in _READING or word in _CHANGING), "")
    if not verb or not _OWN.isdisjoint(words):
        return 0
    if verb in _CHANGING:
        return CHANGES
    return READS if _CHANGING.isdisjoint(words) else 0


def find_window_errors(loop: dict[str, Any], place: Place) -> Iterator[tuple[Place, str]]:
    """Find `window_calls` in `tools` of a raw entry; yields each place and why it is wrong."""
    tools = loop.get("tools")
    for name, tool in tools.items() if isinstance(tools, dict) else ():
        if isinstance(tool, dict) and tool.get("window_calls") is not None:
            yield (
                (*place, "tools", name, "window_calls"),
                "window_calls belongs to similarity tool_calls",
            )


def matches(name: str, pattern: Sequence[str]) -> bool:
    """Whether a name matches a pattern's parts with anything between.

    Takes linear time, because clients choose names.
    """
    first, *between, last = pattern
    if len(name) < len(first) + len(last) or not name.startswith(first) or not name.endswith(last):
        return False
    place, end = len(first), len(name) - len(last)
    for part in between:
        place = name.find(part, place, end)
        if place < 0:
            return False
        place += len(part)
    return True
