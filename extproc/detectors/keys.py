"""Keys of loop_detection entries: of all similarities, and of each."""
# interpreted: pydantic creates models from annotations, which compiled classes do not keep

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field

from extproc.detectors.arguments import THOUGHTS
from extproc.detectors.tools import Limit, ToolLimits
from extproc.objects import MAX_SECONDS, MAX_THRESHOLD, NO_ITEMS, JsonObject, Pointer

MAX_CALLS = 200
"""Maximum number of calls or messages that a detector compares."""

MAX_CYCLE = 16

MIN_WEAK, MAX_WEAK = 2, 14
"""Even with other turns in between, 32 turns are enough to detect this many repeats."""


Threshold = Annotated[int, Field(ge=2, le=MAX_THRESHOLD)]


class Escalation(JsonObject):
    """Stricter actions, the mildest first, each with a higher threshold.

    Attributes:
        steer: threshold of `steer`.
        throttle: threshold of `throttle`.
        land: threshold of `land`.
        reject: threshold of `reject`.
    """

    steer: Threshold | None = None
    throttle: Threshold | None = None
    land: Threshold | None = None
    reject: Threshold | None = None

    def list_steps(self) -> list[tuple[str, int]]:
        """Actions and their thresholds, mildest first."""
        steps = [(name, getattr(self, name)) for name in type(self).model_fields]
        return [(name, threshold) for name, threshold in steps if threshold is not None]


class LoopKeys(JsonObject):
    """Keys that all similarities share.

    Attributes:
        threshold_identical_requests: number of the first identical request (turn, call) to act on,
            at least 2; required, except with `turns`, where the default is 3.
        escalate: stricter actions at higher thresholds.
        cooldown_seconds: repeats of a request that was acted on are acted on for this long, even if
            the window is empty.
    """

    threshold_identical_requests: Threshold | None = None
    escalate: Escalation = Escalation()
    cooldown_seconds: Annotated[int, Field(ge=0, le=MAX_SECONDS)] = 0


class CanonicalKeys(LoopKeys):
    """Keys of `canonical`.

    Attributes:
        ignore_fields: with `canonical`: JSON Pointers to values to ignore; `*` matches any one
            step.
    """

    ignore_fields: list[Pointer] = NO_ITEMS


class TailKeys(LoopKeys):
    """Keys of `tail`.

    Attributes:
        tail_messages: with `tail`: number of messages to compare.
    """

    tail_messages: Annotated[int, Field(ge=1, le=MAX_CALLS)] = 3


class Tool(JsonObject):
    """Rules for the calls of one tool, or of all tools whose names match.

    Attributes:
        threshold: replaces `threshold_identical_requests`.
        window_calls: replaces `window_calls` of `tool_calls`.
        reason: added to the message for the model.
        allow: `true` exempts this tool.
    """

    threshold: Annotated[int, Field(ge=2, le=MAX_CALLS)] | None = None
    window_calls: Annotated[int, Field(ge=2, le=MAX_CALLS)] | None = None
    reason: Annotated[str, Field(max_length=256)] = ""
    allow: bool = False

    def raise_by(self, more: int) -> Self:
        """A copy with the threshold, if any, raised by `more`."""
        return (
            self
            if self.threshold is None
            else self.model_copy(update={"threshold": self.threshold + more})
        )


class ToolsKeys(LoopKeys):
    """Keys of similarities that look at tools.

    Attributes:
        tools: with `tool_calls`, `turns` and `mcp`: rules by tool name; `*` matches anything.
    """

    tools: dict[Annotated[str, Field(min_length=1)], Tool] = {}


class McpKeys(ToolsKeys):
    """Keys of `mcp`.

    Attributes:
        trust_headers: with `mcp`: from MCP 2026-07-28 on, `Mcp-Method` and `Mcp-Name` decide which
            requests are not counted. Only for servers that refuse requests whose headers and body
            disagree.
    """

    trust_headers: bool = False


class HistoryKeys(ToolsKeys):
    """Keys of similarities that look at the history of tool calls.

    Attributes:
        max_cycle: with `tool_calls` and `turns`: longest cycle to look for; 1 turns cycles off.
    """

    max_cycle: Annotated[int, Field(ge=1, le=MAX_CYCLE)] = 10


class ToolCallsKeys(HistoryKeys):
    """Keys of `tool_calls`.

    Attributes:
        window_calls: with `tool_calls`: number of newest calls to look at.
        reset_on_user_message: with `tool_calls`: ignore calls before the user's last message.
        compare_results: with `tool_calls`: `false` ignores what the calls returned.
    """

    window_calls: Annotated[int, Field(ge=2, le=MAX_CALLS)] = 10
    reset_on_user_message: bool = True
    compare_results: bool = True


class TurnsKeys(HistoryKeys):
    """Keys of `turns`.

    Attributes:
        weak_threshold: with `turns`: until a weak loop (talk, or short or slightly changing results
            without errors) has repeated this often, it gets the mildest action at most. Default: no
            exception.
        normalize_results: with `turns`: `false` compares results byte for byte.
        ignore_arguments: with `turns`: arguments that hold thoughts, and are not compared.
        incidents: with `turns`: `false` also refuses loops of a tool that fails in the same way for
            many sessions.
    """

    weak_threshold: Annotated[int, Field(ge=MIN_WEAK, le=MAX_WEAK)] | None = None
    normalize_results: bool = True
    incidents: bool = True
    # A list as default would be copied for each policy, in a tenth of the load time.
    ignore_arguments: list[str] = Field(
        default_factory=lambda: sorted(THOUGHTS), json_schema_extra={"default": [*sorted(THOUGHTS)]}
    )


class SimilarityKeys(CanonicalKeys, TailKeys, ToolCallsKeys, TurnsKeys, McpKeys):
    """All keys of any similarity.

    Attributes:
        similarity: what makes requests identical.
    """

    similarity: Literal["exact", "canonical", "prompt", "tail", "tool_calls", "turns", "mcp"] = (
        "exact"
    )

    @property
    def steers(self) -> bool:
        """Whether a loop may get a note before anything stricter happens."""
        return self.escalate.steer is not None

    def list_steps(self, default: int | None) -> list[Self]:
        """These keys, then a copy for each stricter action with its threshold, lowest first.

        The thresholds of `tools` are raised by the same number, so that all tools escalate in equal
        steps.

        Args:
            default: the threshold of an entry without one.
        """
        first = self.threshold_identical_requests or default or 0
        return [
            self,
            *[
                self._raise_by(threshold - first, threshold)
                for _, threshold in self.escalate.list_steps()
            ],
        ]

    def make_limits(self, default: int | None) -> ToolLimits:
        """The limits of tools; `default`: the threshold of an entry without one."""
        threshold, window = self.threshold_identical_requests or default or 0, self.window_calls
        tools = {
            name: Limit(
                tool.threshold or threshold, tool.reason, tool.allow, tool.window_calls or window
            )
            for name, tool in self.tools.items()
        }
        return ToolLimits(threshold, tools, window)

    def wait_until(self, threshold: int) -> Self:
        """A copy with lower thresholds raised to this one."""
        tools = {
            name: tool
            if tool.threshold is None
            else tool.model_copy(update={"threshold": max(tool.threshold, threshold)})
            for name, tool in self.tools.items()
        }
        update = {
            "threshold_identical_requests": threshold,
            "tools": tools,
            "escalate": Escalation(),
        }
        return self.model_copy(update=update)

    def _raise_by(self, more: int, threshold: int) -> Self:
        tools = {name: tool.raise_by(more) for name, tool in self.tools.items()}
        raised = {
            "threshold_identical_requests": threshold,
            "tools": tools,
            "escalate": Escalation(),
        }
        return self.model_copy(update=raised)
