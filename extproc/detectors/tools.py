"""What holds for some tools in place of a detector's own threshold, by the tool's name, in which `*` stands for anything."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from extproc.bounded import Memo
from extproc.objects import Place

READS, CHANGES = 64, 128
"""Flags: a tool only looks; it changes what others may look at."""

_READING: Final = frozenset(
    ("read", "get", "list", "ls", "dir", "cat", "head", "view", "show", "open", "find", "search", "grep",
     "glob", "tree", "pwd", "stat", "describe", "fetch", "query", "lookup", "look", "status", "check", "inspect",
     "count", "exists", "diff")
)  # fmt: skip  # one list
_CHANGING: Final = frozenset(
    ("write", "edit", "create", "update", "delete", "remove", "insert", "append", "replace", "patch", "apply", "move",
     "rename", "copy", "mkdir", "rmdir", "rm", "mv", "cp", "touch", "tee", "ln", "chmod", "chown", "put", "post",
     "set", "add", "save", "upload", "send", "commit", "push", "merge", "submit", "install", "uninstall", "drop",
     "alter")
)  # fmt: skip  # one list
_OWN: Final = frozenset({"todo", "todos", "think", "thought", "plan", "note", "notes", "memory"})
"""What an agent writes for itself changes nothing for its tools."""

_NAME_WORD: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_MOST_ROLES: Final = 1_024
_LONGEST_ROLE: Final = 64
"""Longest name that is remembered, in characters; clients choose names."""

_ROLES: Final[Memo[str, int]] = Memo(_MOST_ROLES)

_LONG_CYCLE = 5
"""A cycle of this many calls or turns needs one round less."""


def count_rounds(length: int, threshold: int) -> int:
    """How often a cycle has to come round to be a loop."""
    return threshold if length < _LONG_CYCLE else max(2, threshold - 1)


class Limit(NamedTuple):
    """What holds for what a turn or a call does; see `Tool`."""

    threshold: int
    reason: str = ""
    allow: bool = False
    window_calls: int = 0


class ToolLimits:
    """A detector's threshold, and what its `tools` say in its place.

    Attributes:
        default: of tools without an entry.
        lowest: of the thresholds.
        widest: of the windows, in calls.
    """

    def __init__(self, threshold: int, tools: dict[str, Limit] | None = None, window_calls: int = 0) -> None:
        """Names of `tools` may hold `*` for anything; an exact name goes first, then the first pattern."""
        self._tools = tools or {}
        self.default = Limit(threshold, window_calls=window_calls)
        self.lowest = min([threshold, *[limit.threshold for limit in self._tools.values()]])
        self.widest = max([window_calls, *[limit.window_calls for limit in self._tools.values()]])
        self._patterns = [(name.split("*"), limit) for name, limit in self._tools.items() if "*" in name]

    def of(self, names: Sequence[str]) -> Limit:
        """What holds where several tools are used at once: the highest threshold, and one that is allowed allows all."""
        if not self._tools or not names:
            return self.default
        if len(names) == 1:
            return self._of_one(names[0])
        limits = [self._of_one(name) for name in names]
        reason = next((limit.reason for limit in limits if limit.reason), "")
        return Limit(max([limit.threshold for limit in limits]), reason, any(limit.allow for limit in limits))

    def _of_one(self, name: str) -> Limit:
        limit = self._tools.get(name)
        if limit is None:
            limit = next((limit for pattern, limit in self._patterns if matches(name, pattern)), self.default)
        return limit


def find_role(names: Sequence[str], hints: Mapping[str, bool]) -> int:
    """READS where all of these tools only look, CHANGES where one changes something, else 0; `hints` go before names."""
    role = READS if names else 0
    for name in names:
        hint = hints.get(name) if hints else None
        found = _ROLES.get(name) if hint is None else READS if hint else CHANGES
        if found is None:
            found = _read_role(name)
        if found == CHANGES:
            return CHANGES
        role &= found
    return role


def _read_role(name: str) -> int:
    """What the first verb in a name says: `mcp__git__create_branch` changes something. Two verbs may say nothing together."""
    words = [word.lower() for word in _NAME_WORD.findall(name[-256:].rpartition("__")[2])]
    verb = next((word for word in words if word in _READING or word in _CHANGING), "")
    if not verb or not _OWN.isdisjoint(words):
        role = 0
    elif verb in _CHANGING:
        role = CHANGES
    else:
        role = READS if _CHANGING.isdisjoint(words) else 0
    if len(name) <= _LONGEST_ROLE:
        _ROLES.put(name, role)
    return role


def find_window_errors(loop: dict[str, Any], place: Place) -> Iterator[tuple[Place, str]]:
    """A window of their own that `tools` of one raw loop_detection entry ask for: the place of each, and whose key it is."""
    tools = loop.get("tools")
    for name, tool in tools.items() if isinstance(tools, dict) else ():
        if isinstance(tool, dict) and tool.get("window_calls") is not None:
            yield (*place, "tools", name, "window_calls"), "window_calls belongs to similarity tool_calls"


def matches(name: str, pattern: Sequence[str]) -> bool:
    """Whether a name is the pattern's parts with anything between them; in linear time, because clients choose names."""
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
