"""What holds for some tools in place of a detector's own threshold, by the tool's name, in which `*` stands for anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from extproc.objects import Place

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
