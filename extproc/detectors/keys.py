"""The keys of a loop_detection entry that belong to one similarity each, and those that all of them may read."""
# interpreted: pydantic makes its models of annotations, which compiled classes do not keep

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field

from extproc.detectors.actions import THOUGHTS
from extproc.detectors.tools import Limit, ToolLimits
from extproc.objects import MAX_SECONDS, MAX_THRESHOLD, NO_ITEMS, JsonObject, Pointer

MAX_CALLS = 200
"""Most calls, and most messages, that a detector compares with each other."""

MAX_CYCLE = 16


Threshold = Annotated[int, Field(ge=2, le=MAX_THRESHOLD)]


class Escalation(JsonObject):
    """What is done later on, each from a threshold of its own: the stricter, the later.

    Attributes:
        steer: tell the model with this identical request.
        throttle: hold it.
        reject: refuse it.
    """

    steer: Threshold | None = None
    throttle: Threshold | None = None
    reject: Threshold | None = None

    def list_steps(self) -> list[tuple[str, int]]:
        """Actions and their thresholds, the mildest first."""
        steps = [("steer", self.steer), ("throttle", self.throttle), ("reject", self.reject)]
        return [(name, threshold) for name, threshold in steps if threshold is not None]


class LoopKeys(JsonObject):
    """What any similarity may read.

    Attributes:
        threshold_identical_requests: the first identical request that is acted on; with `tool_calls`, the first call.
        escalate: stricter actions, by the first identical request that meets them.
        cooldown_seconds: after a trip the fingerprint stays acted on that long, even when its window has emptied.
    """

    threshold_identical_requests: Threshold | None = None
    escalate: Escalation = Escalation()
    cooldown_seconds: Annotated[int, Field(ge=0, le=MAX_SECONDS)] = 0


class CanonicalKeys(LoopKeys):
    """Of `canonical`.

    Attributes:
        ignore_fields: of `canonical`: JSON Pointers to what is not compared; `*` stands for any one step.
    """

    ignore_fields: list[Pointer] = NO_ITEMS


class TailKeys(LoopKeys):
    """Of `tail`.

    Attributes:
        tail_messages: of `tail`: so many messages are compared.
    """

    tail_messages: Annotated[int, Field(ge=1, le=MAX_CALLS)] = 3


class Tool(JsonObject):
    """What holds for the calls of one tool, or of all whose names match, in place of the detector's own.

    Attributes:
        threshold: in place of `threshold_identical_requests`.
        window_calls: in place of `window_calls`.
        reason: said to the model that is refused.
        allow: calls of this tool are never part of a loop.
    """

    threshold: Annotated[int, Field(ge=2, le=MAX_CALLS)] | None = None
    window_calls: Annotated[int, Field(ge=2, le=MAX_CALLS)] | None = None
    reason: Annotated[str, Field(max_length=256)] = ""
    allow: bool = False

    def raise_by(self, more: int) -> Self:
        """The same with a higher threshold, where it has one."""
        return self if self.threshold is None else self.model_copy(update={"threshold": self.threshold + more})


class ToolsKeys(LoopKeys):
    """Of those that look at what tools do; `mcp` has no others.

    Attributes:
        tools: of `tool_calls`, `turns` and `mcp`: by tool name, in which `*` stands for anything.
    """

    tools: dict[Annotated[str, Field(min_length=1)], Tool] = {}


class HistoryKeys(ToolsKeys):
    """Of those that look at what tools did before.

    Attributes:
        max_cycle: of `tool_calls` and `turns`: longest cycle of different calls or turns that is looked for; 1 for none.
    """

    max_cycle: Annotated[int, Field(ge=1, le=MAX_CYCLE)] = 10


class ToolCallsKeys(HistoryKeys):
    """Of `tool_calls`.

    Attributes:
        window_calls: of `tool_calls`: among so many of the newest calls.
        reset_on_user_message: of `tool_calls`: calls before the user's last message are not looked at.
        compare_results: of `tool_calls`: False: calls are equal whatever they brought back.
    """

    window_calls: Annotated[int, Field(ge=2, le=MAX_CALLS)] = 10
    reset_on_user_message: bool = True
    compare_results: bool = True


class TurnsKeys(HistoryKeys):
    """Of `turns`.

    Attributes:
        normalize_results: of `turns`: False: results are compared byte for byte, with all timestamps, durations and ids.
        ignore_arguments: of `turns`: arguments of these names are thoughts, which are never the same twice.
    """

    normalize_results: bool = True
    # A list as a default would be copied item by item for each policy: a tenth of the time of a load.
    ignore_arguments: list[str] = Field(
        default_factory=lambda: sorted(THOUGHTS), json_schema_extra={"default": [*sorted(THOUGHTS)]}
    )


class SimilarityKeys(CanonicalKeys, TailKeys, ToolCallsKeys, TurnsKeys):
    """All of them.

    Attributes:
        similarity: what makes requests identical.
    """

    similarity: Literal["exact", "canonical", "tail", "tool_calls", "turns", "mcp"] = "exact"

    def list_steps(self, default: int | None) -> list[Self]:
        """These keys with the threshold of each action in place of their own, the lowest first.

        The thresholds of `tools` are raised by as much: a tool that is given more time, or less, escalates as others do.

        Args:
            default: the threshold of an entry that has none.
        """
        first = self.threshold_identical_requests or default or 0
        return [self, *[self._raise_by(threshold - first, threshold) for _, threshold in self.escalate.list_steps()]]

    def make_limits(self, default: int | None) -> ToolLimits:
        """What holds for which tool; `default` as above."""
        threshold, window = self.threshold_identical_requests or default or 0, self.window_calls
        tools = {
            name: Limit(tool.threshold or threshold, tool.reason, tool.allow, tool.window_calls or window)
            for name, tool in self.tools.items()
        }
        return ToolLimits(threshold, tools, window)

    def _raise_by(self, more: int, threshold: int) -> Self:
        tools = {name: tool.raise_by(more) for name, tool in self.tools.items()}
        raised = {"threshold_identical_requests": threshold, "tools": tools, "escalate": Escalation()}
        return self.model_copy(update=raised)
