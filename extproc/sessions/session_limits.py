"""`session` and `session_limits`: a request's session, its limits, and prices.

The names of the limits are those in session files of in-process SDKs.
"""
# interpreted: runs at start and at reload; pydantic makes its models of annotations, which compiled
# classes do not keep

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from extproc.objects import MAX_SECONDS, InspectBytes, JsonObject, Place, Status
from extproc.request.clients import AGENTS, CACHE_KEY, ROOT_HEADERS, SESSION_HEADERS, USER_ID
from extproc.request.limit_keys import BODY, HEADER, VENDOR_SESSION, AgentKey, SessionKey

MAX_COUNT: Final = 1_000_000_000
MAX_TOOL_CALLS: Final = 10_000
MAX_WINDOW: Final = 500
"""Maximum number of steps to compare; a ledger remembers `session.MAX_RECORDS` calls."""

MAX_TOOLS: Final = 64
"""Maximum number of tools with counts of their own."""

MAX_COST: Final = 1_000_000.0
"""Dollars; nano-dollars then stay exact in all calculations."""

MAX_GROWTH: Final = 1_000

ANY_MODEL: Final = "*"

_COUNTED = ("max_steps", "max_tool_calls", "max_cost_per_session")
"""Limits on what a session uses up."""

_AGENTS = ("max_agents", "max_depth", "max_concurrent_agents", "max_spawns_per_minute")
"""Limits on the agents of a session."""

_NOTICED = (*_COUNTED, "max_agents")
"""Limits for which a note can name the remaining amount."""

_LIMITS = (
    *_COUNTED,
    "max_calls_per_tool",
    "max_input_growth",
    "loop_detection",
    "circuit_breaker",
    *_AGENTS,
)

_CONVERSATIONS = [
    f"{BODY}:/conversation",  # of the Responses API: its id, or an object that contains it
    f"{BODY}:/conversation/id",
    f"{BODY}:/metadata/session_id",
    USER_ID,
]

CONVERSATION_KEYS = [
    *(f"{HEADER}:{name}" for name in SESSION_HEADERS),
    VENDOR_SESSION,
    *_CONVERSATIONS,
]
"""Default names of a conversation; body fields come last."""

BUDGET_KEYS = [
    *(f"{HEADER}:{name}" for name in ROOT_HEADERS),
    VENDOR_SESSION,
    CACHE_KEY,  # after the headers
    *_CONVERSATIONS,
]
"""Defaults for `session_limits`.

Agents count toward their parent's session, so that comes first.
"""

_MAX_SESSIONS = 10_000

MAX_AGENTS: Final = 1_000
"""Highest agent limit; a tree remembers `tree.MAX_AGENTS`."""

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Rate = Annotated[float, Field(ge=0, le=MAX_COST, allow_inf_nan=False)]
Dollars = Annotated[float, Field(gt=0, le=MAX_COST, allow_inf_nan=False)]
Tool = Annotated[str, Field(min_length=1, max_length=256)]
Model = Annotated[str, Field(min_length=1, max_length=256)]


class Session(JsonObject):
    """Which conversation a request belongs to, within its caller.

    Attributes:
        keys: limit keys; the first that a request has names its session. `header:x-*-session-id` is
            any such header, the first by name. `session_limits` look for the session that started
            the agent: `x-claude-code-session-id`, `x-parent-session-id` and `session-id` go first,
            then the others without `x-claude-code-agent-id`, `thread-id` as the last header and
            `body:/prompt_cache_key` as the first body field.
        idle_seconds: a session ends after this long without a request.
        max_sessions_per_tenant: sessions that a caller may begin within `idle_seconds` before
            further ones end sooner.
        agent_keys: limit keys outside the body; the first that a request has names the agent, below
            the session that `keys` name. A value equal to the session's stands for the session
            itself. Default: the headers of Claude Code, Codex and opencode.
        parent_keys: the same for the agent that started this one. Without one, that is the session.
            If a key is also in `keys`, it names a parent that may itself be an agent.
    """

    keys: Annotated[list[SessionKey], Field(min_length=1)] = CONVERSATION_KEYS
    idle_seconds: Annotated[int, Field(gt=0, le=MAX_SECONDS)] = 3600
    max_sessions_per_tenant: Annotated[int, Field(ge=1, le=MAX_COUNT)] = _MAX_SESSIONS
    agent_keys: Annotated[list[AgentKey], Field(min_length=1)] | None = None
    parent_keys: Annotated[list[AgentKey], Field(min_length=1)] | None = None

    @property
    def has_own_keys(self) -> bool:
        """Whether the policy sets `keys`."""
        return "keys" in self.model_fields_set

    def list_budget_keys(self) -> list[str]:
        """The limit keys for `session_limits`."""
        return self.keys if self.has_own_keys else BUDGET_KEYS


class Price(JsonObject):
    """What a model costs, in dollars per million tokens.

    Attributes:
        input: input tokens that are not cached.
        output: output tokens.
        cache_read: input tokens read from a cache. Default: `input`.
        cache_write: input tokens written to a cache. Default: `input`.
    """

    input: Rate
    output: Rate
    cache_read: Rate | None = None
    cache_write: Rate | None = None


class RecentCalls(JsonObject):
    """Repeated calls of a tool with the same arguments, whatever they return.

    Attributes:
        window: number of newest steps to look at, with all of their calls, at most 500.
        threshold: number of calls equal to one of the newest step to refuse at.
    """

    window: Annotated[int, Field(ge=2, le=MAX_WINDOW)]
    threshold: Annotated[int, Field(ge=2, le=MAX_WINDOW)]


class SessionBreaker(JsonObject):
    """What kills a session, until it is released or ends.

    Attributes:
        consecutive_blocks: refused requests in a row.
        consecutive_errors: upstream failures in a row: a 5xx status, or none.
    """

    consecutive_blocks: Count | None = None
    consecutive_errors: Count | None = None


class Notice(JsonObject):
    """Where an action starts before a limit is reached.

    Attributes:
        max_steps: from this step.
        max_tool_calls: from this tool call.
        max_cost_per_session: from this cost in dollars.
        max_agents: from this agent.
    """

    max_steps: Count | None = None
    max_tool_calls: Count | None = None
    max_cost_per_session: Dollars | None = None
    max_agents: Count | None = None


class SessionEscalation(JsonObject):
    """Milder actions before a limit is reached.

    Attributes:
        warn: from where requests get a warning header.
        steer: from where they get a note with what is left.
    """

    warn: Notice = Notice()
    steer: Notice = Notice()


class SessionLimits(JsonObject):
    """What a session can use; requests beyond a limit are refused.

    Attributes:
        max_steps: maximum requests; refused ones and up to three retries of each don't count.
        max_tool_calls: maximum tool calls, each counted once; then requests are refused.
        max_tool_calls_mode: `narrow` lets a session at `max_tool_calls` continue with tools that
            have calls left in `max_calls_per_tool`; `finish` lets one more request pass for a last
            answer, with tool calls forbidden.
        max_calls_per_tool: maximum calls by tool name; used-up tools are removed. 0: only with a
            grant.
        max_cost_per_session: maximum cost in dollars; the next request is refused.
        max_input_growth: from this multiple of the input tokens of its first answer, a session's
            requests get a note to compact. Refuses nothing.
        loop_detection: repeated calls that are too many.
        circuit_breaker: what kills a session.
        max_agents: maximum agents that a session starts, directly or through other agents; further
            ones are refused at their first request.
        max_depth: maximum levels of agents; 1 allows only those that the session itself starts.
        max_concurrent_agents: maximum agents with a request in the last `agent_idle_seconds`.
        max_spawns_per_minute: maximum agents that start within a minute.
        agent_idle_seconds: how long an agent is active after a request.
        prices: by model name; `*` matches anything, and the longest match counts.
        unknown_model: fallback price for models without one.
        reject_status: as in `loop_detection`.
        max_inspect_bytes: longest body in which tool calls are counted. Default: the largest
            `max_inspect_bytes` of the policy's detectors, at least 1 MiB.
        escalate: milder actions before a limit is reached.
        usage: `request` makes streams report their usage, if their API does so only on request.
            Otherwise their cost is estimated. Clients get one more event.
    """

    max_steps: Count | None = None
    max_tool_calls: Annotated[int, Field(ge=1, le=MAX_TOOL_CALLS)] | None = None
    max_tool_calls_mode: Literal["block", "narrow", "finish"] = "block"
    max_calls_per_tool: Annotated[
        dict[Tool, Annotated[int, Field(ge=0, le=MAX_TOOL_CALLS)]], Field(max_length=MAX_TOOLS)
    ] = {}
    max_cost_per_session: Dollars | None = None
    max_input_growth: Annotated[int, Field(ge=2, le=MAX_GROWTH)] | None = None
    loop_detection: RecentCalls | None = None
    circuit_breaker: SessionBreaker | None = None
    max_agents: Annotated[int, Field(ge=0, le=MAX_AGENTS)] | None = None
    max_depth: Annotated[int, Field(ge=0, le=MAX_AGENTS)] | None = None
    max_concurrent_agents: Annotated[int, Field(ge=1, le=MAX_AGENTS)] | None = None
    max_spawns_per_minute: Annotated[int, Field(ge=1, le=MAX_AGENTS)] | None = None
    agent_idle_seconds: Annotated[int, Field(ge=1, le=3_600)] = 60
    prices: dict[Model, Price] = {}
    unknown_model: Price | None = None
    reject_status: Status = 429
    max_inspect_bytes: InspectBytes | None = None
    escalate: SessionEscalation = SessionEscalation()
    usage: Literal["request"] | None = None

    def needs_answers(self) -> bool:
        """Whether a limit depends on responses: on tokens, failures, or requested usage."""
        breaker, asked = self.circuit_breaker, self.usage is not None
        return (
            asked
            or self.max_cost_per_session is not None
            or self.max_input_growth is not None
            or (breaker is not None and breaker.consecutive_errors is not None)
        )

    def limits_agents(self) -> bool:
        """Whether there is an agent limit."""
        return any(getattr(self, name) is not None for name in _AGENTS)


class UnnamedLimits(JsonObject):
    """What a caller's requests without a session can use together in `idle_seconds`.

    Those that may begin a session are included.

    Attributes:
        max_steps: maximum requests; refused ones and up to three retries of each don't count.
        max_tool_calls: maximum tool calls, each counted once.
        max_cost_per_session: maximum cost in dollars, by the prices of `session_limits`.
    """

    max_steps: Count | None = None
    max_tool_calls: Annotated[int, Field(ge=1, le=MAX_TOOL_CALLS)] | None = None
    max_cost_per_session: Dollars | None = None

    def needs_answers(self) -> bool:
        """See `SessionLimits`."""
        return self.max_cost_per_session is not None


def names_agents(keys: Iterable[str]) -> bool:
    """Whether a known client that names its sessions by these keys also names its agents."""
    return not {f"{HEADER}:{form.root}" for form in AGENTS}.isdisjoint(keys)


# Raw JSON
def find_unnamed_errors(unnamed: Any, limits: Any) -> Iterator[tuple[Place, str]]:  # noqa: ANN401
    """Check a raw `unnamed_limits` against its `session_limits`; yields as `find_limit_errors`."""
    if not isinstance(unnamed, dict):
        return
    if not isinstance(limits, dict):
        yield (
            (),
            (
                "unnamed_limits needs session_limits: it is about requests that have no session of "
                "these"
            ),
        )
    if all(unnamed.get(key) is None for key in _COUNTED):
        yield (), f"unnamed_limits needs at least one of {', '.join(_COUNTED)}"


def find_limit_errors(limits: Any) -> Iterator[tuple[Place, str]]:  # noqa: ANN401  # raw JSON
    """Check the keys of a raw `session_limits` against each other.

    Yields:
        the place below it, and the message.
    """
    if not isinstance(limits, dict):
        return
    if all(limits.get(key) in (None, {}) for key in _LIMITS):
        yield (), f"session_limits needs at least one of {', '.join(_LIMITS)}"
    recent = limits.get("loop_detection")
    if isinstance(recent, dict):
        window, threshold = recent.get("window"), recent.get("threshold")
        if isinstance(window, int) and isinstance(threshold, int) and threshold > window:
            yield (
                ("loop_detection", "threshold"),
                f"threshold must be <= window, which is {window}: it can never be reached",
            )
    if (
        limits.get("max_tool_calls_mode") in ("narrow", "finish")
        and limits.get("max_tool_calls") is None
    ):
        yield ("max_tool_calls_mode",), "max_tool_calls_mode needs max_tool_calls"
    if "agent_idle_seconds" in limits and limits.get("max_concurrent_agents") is None:
        yield ("agent_idle_seconds",), "agent_idle_seconds needs max_concurrent_agents"
    yield from _find_notice_errors(limits)


def _find_notice_errors(limits: dict[str, Any]) -> Iterator[tuple[Place, str]]:
    """Find notices without a limit, or above it."""
    escalate = limits.get("escalate")
    for action in SessionEscalation.model_fields if isinstance(escalate, dict) else ():
        notice = escalate.get(action) if isinstance(escalate, dict) else None
        for key in _NOTICED if isinstance(notice, dict) else ():
            start, limit = notice.get(key) if isinstance(notice, dict) else None, limits.get(key)
            if start is None:
                continue
            if limit is None:
                yield (
                    ("escalate", action, key),
                    f"{key} has no limit, so there is nothing to escalate",
                )
            elif (
                isinstance(start, int | float) and isinstance(limit, int | float) and start > limit
            ):
                yield (
                    ("escalate", action, key),
                    f"must be <= {key}, which is {limit}: requests beyond it are refused",
                )
