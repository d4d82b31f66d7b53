"""What one session has used up, and what its limits say to that: pure, exact, with `now` as an argument in milliseconds.

A ledger is kept for each session. A request of the session asks for a `Step`; a `Settlement` says later what became of it.
Money is counted in nano-dollars, 1e-9 $.
"""

from __future__ import annotations

from typing import Final, NamedTuple

LIMITS: Final = (
    "",
    "killed",
    "max_steps",
    "max_tool_calls",
    "max_cost_per_session",
    "max_calls_per_tool",
    "loop_detection",
)
"""The limits in the order in which they are looked at; the first one stands for none."""

KILLED: Final = ("", "consecutive_blocks", "consecutive_errors")
"""What kills a session; the first one stands for nothing."""

RECORD: Final = 14
"""Bytes of a tool call: digests of its id (6), of the tool's name (4), and of tool and arguments (4)."""

SUCCEEDED: Final = 0
FAILED: Final = 1
"""A 5xx status, or none at all."""

REFUSED: Final = 2
"""Another guard of ours refused it: it was no step after all."""


class Limits(NamedTuple):
    """What one session may use up; -1 where there is no limit.

    Attributes:
        idle_ms: how long after its last request that was let through a session is forgotten, in milliseconds.
        max_sessions: how many a tenant may begin within `idle_ms`; all further ones share one ledger.
        steps: requests that are let through.
        tool_calls: calls of tools, all in all.
        narrows: too many tool calls refuse nothing by themselves, because the guard takes the tools away.
        cost: in nano-dollars.
        tools: the digest of a tool's name and how often it may be called, sorted.
        window: among so many of the newest tool calls,
        threshold: so many equal ones are too many.
        blocks: so many refusals in a row kill the session.
        errors: so many failures in a row do.
    """

    idle_ms: int
    max_sessions: int
    steps: int
    tool_calls: int
    narrows: bool
    cost: int
    tools: tuple[tuple[bytes, int], ...]
    window: int
    threshold: int
    blocks: int
    errors: int


class Step:
    """One request of a session, asked of the store as a hit is; never changed.

    Attributes:
        key: of the session's ledger; it ends in two hex digits of the tenant.
        roster: of what is known about the tenant's sessions; it ends in the same two digits.
        shared: of the ledger of the sessions that are too many; it ends in the same two digits.
        limits: what the session may use up.
        identity: 8 bytes, a digest of the request; one of the session's last 16 again is a retry.
        call: 8 bytes, a name for this request, for its settlement.
        reserve: what it is estimated to cost, in nano-dollars.
        calls: the tool calls that its history shows, oldest first, `RECORD` bytes each.
        tools: the digest and the name of each tool among them.
        grants: what is added to the limits of steps, tool calls and cost.
    """

    __slots__ = ("call", "calls", "grants", "identity", "key", "limits", "reserve", "roster", "shared", "tools")

    def __init__(  # noqa: PLR0913  # a record
        self,
        key: str,
        roster: str,
        shared: str,
        limits: Limits,
        identity: bytes,
        call: bytes,
        reserve: int,
        calls: bytes,
        tools: tuple[tuple[bytes, str], ...],
        grants: tuple[int, int, int],
    ) -> None:
        """Keep them as given."""
        self.key = key
        self.roster = roster
        self.shared = shared
        self.limits = limits
        self.identity = identity
        self.call = call
        self.reserve = reserve
        self.calls = calls
        self.tools = tools
        self.grants = grants


class Settlement:
    """What became of a request that was let through, asked of the store as a hit is; never changed.

    Attributes:
        key: of the ledger that it was counted in.
        limits: what the session may use up.
        call: the step's.
        cost: in nano-dollars, in place of what was reserved.
        estimated: nobody said what it cost.
        outcome: `SUCCEEDED`, `FAILED` or `REFUSED`.
    """

    __slots__ = ("call", "cost", "estimated", "key", "limits", "outcome")

    def __init__(  # noqa: PLR0913  # a record
        self,
        key: str,
        limits: Limits,
        call: bytes,
        cost: int,
        estimated: bool,  # noqa: FBT001  # a field
        outcome: int,
    ) -> None:
        """Keep them as given."""
        self.key = key
        self.limits = limits
        self.call = call
        self.cost = cost
        self.estimated = estimated
        self.outcome = outcome


class Standing:
    """How a session stands after a step or a settlement; never changed.

    Attributes:
        limit: the one that refuses the request, an index into `LIMITS`; 0 where it is let through.
        used: of that limit.
        allowed: by that limit, with what was granted.
        tool: the digest of the tool that `max_calls_per_tool` or `loop_detection` is about, else empty.
        steps: requests that were let through.
        tool_calls: those that the session's histories have shown.
        blocks: requests that were refused.
        consecutive_blocks: those since the last one that was let through.
        consecutive_errors: failures since the last success.
        cost: what was settled, in nano-dollars.
        estimated: how much of that is estimated.
        reserved: for calls that are not settled yet.
        killed: by what, an index into `KILLED`.
        age_ms: since the session began, in milliseconds.
        shared: it was counted in the ledger that too many sessions share.
        retry: the request repeats one of the session's last 16.
        tools: the digest, the name and the number of calls of each tool, up to 64 of them: those with limits of their own
            and the first others to come. A name has up to 64 characters.
    """

    __slots__ = (
        "age_ms",
        "allowed",
        "blocks",
        "consecutive_blocks",
        "consecutive_errors",
        "cost",
        "estimated",
        "killed",
        "limit",
        "reserved",
        "retry",
        "shared",
        "steps",
        "tool",
        "tool_calls",
        "tools",
        "used",
    )

    def __init__(  # noqa: PLR0913  # a record
        self,
        limit: int = 0,
        used: int = 0,
        allowed: int = 0,
        tool: bytes = b"",
        steps: int = 0,
        tool_calls: int = 0,
        blocks: int = 0,
        consecutive_blocks: int = 0,
        consecutive_errors: int = 0,
        cost: int = 0,
        estimated: int = 0,
        reserved: int = 0,
        killed: int = 0,
        age_ms: int = 0,
        shared: bool = False,  # noqa: FBT001, FBT002  # a field
        retry: bool = False,  # noqa: FBT001, FBT002  # a field
        tools: tuple[tuple[bytes, str, int], ...] = (),
    ) -> None:
        """Keep them as given."""
        self.limit = limit
        self.used = used
        self.allowed = allowed
        self.tool = tool
        self.steps = steps
        self.tool_calls = tool_calls
        self.blocks = blocks
        self.consecutive_blocks = consecutive_blocks
        self.consecutive_errors = consecutive_errors
        self.cost = cost
        self.estimated = estimated
        self.reserved = reserved
        self.killed = killed
        self.age_ms = age_ms
        self.shared = shared
        self.retry = retry
        self.tools = tools
