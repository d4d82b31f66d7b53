"""What a session has used, and whether its limits allow more: pure, with `now` in milliseconds.

Each session has a ledger. A request of the session asks for a `Step`; a `Settlement` reports its
outcome later. Money is counted in nano-dollars, 1e-9 $.

Every store answers as `Ledger.take_step` and `Ledger.settle` do. A ledger is stored as one packed
value, the same in all stores except for the byte order of numbers: a head, the identities of the
newest requests, reservations for calls that are not settled, the number of calls of each tool, the
tools' names, marks of the newest histories, and the newest tool calls. A new ledger takes 190
bytes, and any ledger 10 KB at most, plus its tools' names.

The cost of a request is known when it has been answered. Until then it reserves the average cost of
the session's answers or, before the first, the request's own estimate. So concurrent requests
cannot all spend the same rest of a limit. A request that is refused only because of reservations
may be let through later, so it does not count towards `Limits.blocks`.

The totals of tokens, failures and the model's time are part of the ledger, and change in the same
step as the cost. So all replicas show the same totals, and a restart loses none. So are the tokens
of the prompt in the session's first and newest answer, without those of retries, side requests and
agents, and without estimates.

To find out which calls of a history are new, the first rule that applies is used:

1. The history continues one of the newest that were shown. Its first calls match the mark of that
   history, which is the number of its calls and the sum of their digests, and the last of them is
   known by its id. This is the usual case, and needs no search.
2. Some ids are known. So ids are stable, and calls with unknown ids are new, wherever they are. If
   the ledger has forgotten calls, those before the first known one are older, and were already
   counted.
3. No id is known, or there are none, because some clients and gateways make new ids for each
   request. If the first calls match the mark of the history that was shown last, the calls behind
   them are new. Else, if all calls are the newest ones that were counted, none is new. Else those
   of the last turn are new, because earlier requests have shown the others. Marks do not depend on
   the order of calls that were made at once. While ids seem stable, this rule needs several turns,
   and earlier turns that are known in this way: in any other history, an agent has begun again with
   the same call, under an id of its own.
4. Nothing is known: all calls are new.

Without stable ids, these cannot be told apart:

- The first turn sent again with new ids before there is a second one, and the same calls made
  again: they count again.
- A history without its oldest calls that shows the same calls as the last one, and that last
  history again: it does not count.
- An agent that begins with the same calls as the previous agent in its session, and that agent:
  they count once.

Calls that a ledger has forgotten count again if they are shown again. This needs a history that the
ledger does not recognize: it knows no id among the newest 512 calls, and does not know the history
as it was before its last turn.

A ledger is forgotten some time after the last request that was let through; refused requests do not
prolong it. If the clock is set back, the same happens as to rings: see `ring.push`.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple, TypeAlias

from extproc.store.rules.back_to_back import Begin, End
from extproc.store.rules.budget import Take
from extproc.store.rules.root import ROOT_SIZE, RootSearch, pack_search
from extproc.store.rules.take_back import TakeBack
from extproc.store.rules.tree import (
    AGENT_LIMITS,
    ANSWER_SIZE,
    ROOT,
    Tree,
    TreeStanding,
    TreeStep,
    pack_tree,
    read_tree,
    weigh_tree,
)
from extproc.store.rules.windows import Hit

LIMITS: Final = (
    "",
    "killed",
    "max_steps",
    "max_tool_calls",
    "max_cost_per_session",
    "max_calls_per_tool",
    "loop_detection",
    *AGENT_LIMITS,
)
"""The limits in the order in which they are checked; the first one means none."""

_FIRST_OF_AGENTS: Final = LIMITS.index(AGENT_LIMITS[0])

KILLED: Final = ("", "consecutive_blocks", "consecutive_errors")
"""Reasons for killing a session; the first one means that it is not killed."""

NANO_DOLLARS: Final = 10**9
RECORD: Final = 15
"""Bytes of a tool call: digests of its id (6, or `NO_ID`), of the tool's name (4), and of tool and
arguments (4), and the number of steps since the call before it (1): 0 in the same answer, and 255
for any more."""

NO_ID: Final = bytes(6)
"""The id of a call without an id."""

MAX_RETRIES_PER_STEP: Final = 3
"""Number of repetitions of a request that are not steps.

The next one is a step, which may be repeated as often.
"""

OFFERS_TOOLS: Final = 1
OFFERS_NONE: Final = 2
"""Whether a request offers tools.

In a session whose agent has tools, a request without tools is a side request, such as for a title,
a router or a summary. It counts as a repetition of the newest step, so their number per step is
limited likewise.
"""

SUCCEEDED: Final = 0
FAILED: Final = 1
"""A 5xx status, or no response at all."""

REFUSED: Final = 2
"""Another guard of Loopguard refused it, so it was not a step."""

WITHDRAWN: Final = 4
"""Its client left, or Envoy refused it, before it was forwarded: neither a step nor a refusal."""

JOINED: Final = 5
"""The conversation that it began has continued, so it is no longer a request without a session.

The settlement has the first `CONVERSATION` bytes of the call's name, and the cost that the ledger
may already have settled.
"""

CONVERSATION: Final = 8
"""Bytes of a call's name that name the conversation, if the call begins one."""


Tokens: TypeAlias = tuple[int, int, int, int]
NO_TOKENS: Final[Tokens] = (0, 0, 0, 0)
"""Tokens of input, output, cache reads and cache writes."""


class Limits:
    """Limits of one session; -1 for none. Never changed.

    Attributes:
        idle_ms: time after the last request that was let through at which a session is forgotten,
            in milliseconds.
        max_sessions: number of sessions that a caller may begin within `idle_ms` before later ones
            end sooner.
        steps: number of requests that are let through.
        tool_calls: number of calls of all tools together.
        narrows: at `tool_calls`, the guard keeps the tools in `tools` that have calls left; without
            any, a request is refused.
        finishes: at `tool_calls`, one more request is let through, from which the guard removes all
            tools.
        cost: in nano-dollars.
        tools: digests of tools' names and the number of calls allowed, sorted.
        window: number of newest steps in which equal calls are counted.
        threshold: number of calls equal to one of the newest step from which on a request is
            refused.
        blocks: number of consecutive refusals that kills the session.
        errors: number of consecutive failures that kills the session.
        ends: the session ends `idle_ms` after it began, even if it is active.
    """

    def __init__(  # noqa: PLR0913  # a record
        self,
        idle_ms: int,
        max_sessions: int,
        *,
        steps: int = -1,
        tool_calls: int = -1,
        narrows: bool = False,
        finishes: bool = False,
        cost: int = -1,
        tools: tuple[tuple[bytes, int], ...] = (),
        window: int = -1,
        threshold: int = -1,
        blocks: int = -1,
        errors: int = -1,
        ends: bool = False,
    ) -> None:
        self.idle_ms = idle_ms
        self.max_sessions = max_sessions
        self.steps = steps
        self.tool_calls = tool_calls
        self.narrows = narrows
        self.finishes = finishes
        self.cost = cost
        self.tools = tools
        self.window = window
        self.threshold = threshold
        self.blocks = blocks
        self.errors = errors
        self.ends = ends

    def with_tools(self, tools: tuple[tuple[bytes, int], ...]) -> Limits:
        """A copy with these limits for tools."""
        return Limits(
            self.idle_ms,
            self.max_sessions,
            steps=self.steps,
            tool_calls=self.tool_calls,
            narrows=self.narrows,
            finishes=self.finishes,
            cost=self.cost,
            tools=tools,
            window=self.window,
            threshold=self.threshold,
            blocks=self.blocks,
            errors=self.errors,
            ends=self.ends,
        )


class Step:
    """One request of a session, as a question to the store; never changed.

    Attributes:
        key: the key of the session's ledger; it ends in two hex digits of the caller.
        caller: the key of the number of sessions that the caller has begun; it ends in the same two
            digits.
        limits: the limits of the session.
        identity: a digest of the request, 8 bytes; repeating one of the session's last 16 is a
            retry `MAX_RETRIES_PER_STEP` times.
        call: an unguessable name of this request, 16 bytes, for its settlement.
        reserve: estimated cost, in nano-dollars, for a session without an average.
        calls: the tool calls that its history shows, oldest first and no id twice, `RECORD` bytes
            each.
        total: the sum of the digests of tool and arguments of each call, as numbers.
        newest: number of calls in the last step; earlier requests have shown the others.
        tools: the digest and the name of each tool among them.
        grants: additions to the limits of steps, tool calls and cost.
        offer: `OFFERS_TOOLS`, `OFFERS_NONE`, or 0 if unknown.
        earlier: number of steps with which a new ledger of the session begins.
        tree: its place in the session's tree of agents; None if these have no limits.
        search: finds the session at the root of the agent that asks; see `move_step`. None if the
            session is known.
    """

    def __init__(  # noqa: PLR0913  # a record
        self,
        key: str,
        caller: str,
        limits: Limits,
        identity: bytes,
        call: bytes,
        reserve: int,
        calls: bytes,
        total: int,
        newest: int,
        tools: tuple[tuple[bytes, str], ...],
        grants: tuple[int, int, int],
        offer: int = 0,
        earlier: int = 0,
        tree: TreeStep | None = None,
        search: RootSearch | None = None,
    ) -> None:
        self.search = search
        self.tree = tree
        self.earlier = earlier
        self.offer = offer
        self.total = total
        self.newest = newest
        self.key = key
        self.caller = caller
        self.limits = limits
        self.identity = identity
        self.call = call
        self.reserve = reserve
        self.calls = calls
        self.tools = tools
        self.grants = grants


class Settlement(NamedTuple):
    """The outcome of a request that was let through, as a question to the store; never changed.

    Attributes:
        key: the key of the ledger in which it was counted.
        limits: the limits of the session.
        call: the step's.
        cost: in nano-dollars, in place of the reserved amount.
        estimated: the cost is estimated.
        outcome: `SUCCEEDED`, `FAILED`, `REFUSED`, `WITHDRAWN` or `JOINED`.
        tokens: of input, output, cache reads and cache writes.
        model_ms: time that the upstream took, in milliseconds.
        measured: the tokens are reported, and the request is the session's own, not an agent's.
    """

    key: str
    limits: Limits
    call: bytes
    cost: int
    estimated: bool
    outcome: int
    tokens: Tokens = NO_TOKENS
    model_ms: int = 0
    measured: bool = False


class Standing:
    """The state of a session after a step or a settlement; never changed.

    Attributes:
        limit: the limit that refuses the request, an index into `LIMITS`; 0 if it is let through.
        used: use of that limit; of a request that is let through, what it reserves, in
            nano-dollars.
        allowed: the limit, including grants.
        tool: the digest of the tool that `max_calls_per_tool` or `loop_detection` is about; else
            empty.
        steps: requests that were let through.
        tool_calls: calls that the session's histories have shown.
        blocks: requests that were refused.
        consecutive_blocks: refusals since the last request that was let through.
        consecutive_errors: failures since the last success.
        cost: settled cost, in nano-dollars.
        estimated: the estimated part of the cost.
        reserved: reserved for calls that are not settled yet.
        killed: the reason, an index into `KILLED`.
        age_ms: time since the session began, in milliseconds.
        crowded: it ends sooner, because its caller has begun more than `Limits.max_sessions`.
        retry: the request repeats one of the session's last 16, or is a side request, so it is not
            a step. Of a settlement: no call of its name was open.
        tools: the digest, the name and the number of calls of each tool, up to 64 tools: those with
            limits of their own, and the others that came first. A name has up to 64 characters.
        tree: of its agents; None if they have no limits, and after a settlement.
        root: the name of the session in which the request was counted, 8 bytes; empty if the
            question said it.
        tokens: of all settled calls.
        model_ms: time that the upstream took for all settled calls, in milliseconds.
        failures: number of failed calls.
        first_input: tokens of the prompt in the session's first measured answer; 0 before it.
        newest_input: the same of the newest one.
    """

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
        crowded: bool = False,  # noqa: FBT001, FBT002  # a field
        retry: bool = False,  # noqa: FBT001, FBT002  # a field
        tools: tuple[tuple[bytes, str, int], ...] = (),
        tokens: Tokens = (0, 0, 0, 0),  # compiled classes need literals in signatures
        model_ms: int = 0,
        failures: int = 0,
        tree: TreeStanding | None = None,
        root: bytes = b"",
        first_input: int = 0,
        newest_input: int = 0,
    ) -> None:
        self.tree = tree
        self.root = root
        self.tokens = tokens
        self.model_ms = model_ms
        self.failures = failures
        self.first_input = first_input
        self.newest_input = newest_input
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
        self.crowded = crowded
        self.retry = retry
        self.tools = tools

    @property
    def waits(self) -> bool:
        """Whether only reservations refuse the request, so that it may be let through later."""
        return self.limit == _MONEY and self.cost < self.allowed

    def __eq__(self, other: object) -> bool:
        """Compare all fields: stores are compared by their answers."""
        return isinstance(other, Standing) and self._list() == other._list()

    def __hash__(self) -> int:
        """Hash the fields that equality compares."""
        return hash(self._list())

    def __repr__(self) -> str:
        """All fields with their names, because there are many."""
        shown = zip(_FIELDS, self._list(), strict=True)
        return f"Standing({', '.join(f'{name}={value!r}' for name, value in shown)})"

    def _list(self) -> tuple[object, ...]:
        return tuple([getattr(self, name) for name in _FIELDS])


_FIELDS: Final = (
    *("limit", "used", "allowed", "tool"),
    *("steps", "tool_calls", "blocks", "consecutive_blocks", "consecutive_errors"),
    *("cost", "estimated", "reserved"),
    *("killed", "age_ms", "crowded", "retry", "tools", "tree"),
    *("tokens", "model_ms", "failures", "root", "first_input", "newest_input"),
)


Question: TypeAlias = Hit | Begin | Step | Settlement | TakeBack | End | Take
"""Questions that one call to a store may mix.

A hit or a `Begin` is answered with a `Count`, the others with a `Standing`.
"""

# In the byte order of most processors, which takes a third of the time. Remote stores use network
# byte order.
_VERSION: Final = 6
_HEAD: Final = struct.Struct("<BQQQQQQQQQQIIIIIIIIIIBBBBBBHH")
"""Version; last, began, cost, estimated, reserved; tokens, of four kinds; model_ms; steps,
tool_calls, narrowed_at, blocks, consecutive_blocks, consecutive_errors, paid, failures,
first_input, newest_input; killed, renewed, halvings; and the numbers of identities, reservations,
tools, bytes of tools' names, and marks."""

_HEAD_SIZE: Final = _HEAD.size
_RESERVATION: Final = struct.Struct("<16s8sQQIIB")
"""The call's name and identity; when it was reserved, and how much; and what a take-back restores:
ms since the step before it, consecutive blocks, and two bits: it was a retry; it was the first step
after all tool calls were used up."""

_RESERVED: Final = _RESERVATION.size
_Reservation: TypeAlias = tuple[bytes, bytes, int, int, int, int, int]
_RETRY: Final = 1
_NARROWED: Final = 2

_TOOL: Final = struct.Struct(">4sI")
_COUNTED: Final = _TOOL.size
_BEGUN: Final = struct.Struct("<QQI")
"""When a caller's newest session began, when the first did, and the number since then."""

_IDENTITY: Final = 8
_REPEATED: Final = _IDENTITY + 1
"""Bytes of an identity and of its repetitions since the step, plus `_OFFER` times the offer."""

_OFFER: Final = 64

_IDENTITIES: Final = 16
_OPEN: Final = 32
_OPEN_MS: Final = 600_000
"""Maximum number of unsettled calls, and maximum time until a settlement.

After that, the reserved amount is the cost.
"""

_TOOLS: Final = 64
_ID: Final = 6
_NAME: Final = 10
"""Where the digest of the tool's name ends in a record."""

_PAIR: Final = 4
KNOWN: Final = RECORD - (_NAME - _ID)
"""Bytes of a counted tool call: a record without the tool's name."""

_RECORDS: Final = 256
MAX_RECORDS: Final = 512
"""A session's newest `_RECORDS` tool calls are recognized, or more if a limit is higher.

A history's newest `MAX_RECORDS` are examined individually.
"""

_FEW: Final = 16
_SPARE_RECORDS: Final = 64
_MARK: Final = 8
_MARKS: Final = 256
_NEWEST_MARKS: Final = 4
"""Number of histories to try first: most requests continue one of these, as agents take turns."""

_MONEY: Final = LIMITS.index("max_cost_per_session")
_MAX_SHOWN: Final = 2**16 - 1
_SUM_BITS: Final = 48
_SUM: Final = 2**_SUM_BITS - 1
_MOST_TOOLS: Final = 255
_TOOL_NAME: Final = 64
_MAX: Final = 2**32 - 1
MAX_MONEY: Final = 2**52
"""Nano-dollars, some millions of dollars: the scripts of stores calculate in doubles."""

MAX_RESERVE: Final = MAX_MONEY // (2 * _OPEN)
_MOST_HALVINGS: Final = 6
"""Maximum number of times that a session's idle time is halved: an hour becomes a minute."""


def enter(state: bytes | None, limits: Limits, now: int) -> tuple[bytes, int]:
    """Begin a session of a caller; returns the new state, and how often its idle time is halved.

    If a caller begins more than `max_sessions` within `idle_ms`, each later session is kept for
    about the time in which the caller begins that many. So the oldest idle sessions go first, and
    about `max_sessions` are kept. Sessions that were refused or killed, or have used up a limit,
    are kept for `idle_ms`: they must not end because of new ones.
    """
    began, count = now, 0
    if state is not None:
        _, began, count = _BEGUN.unpack(state)
    if abs(now - began) >= limits.idle_ms:
        began, count = now, 0
    count = min(count + 1, _MAX)
    halvings = 0
    if count > limits.max_sessions:
        lasts = abs(now - began) * limits.max_sessions // count
        while halvings < _MOST_HALVINGS and limits.idle_ms >> halvings > lasts:
            halvings += 1
    return _BEGUN.pack(now, began, count), halvings


def move_step(asked: Step, root: bytes) -> Step:
    """Move a step from the session of its agent's parent to the session at the root.

    Their keys differ only in the session's name, and are in one hash slot.
    """
    search, place = asked.search, asked.tree
    if search is None or search.parent == root:
        return asked
    old, new = f"{search.parent.hex()}:", f"{root.hex()}:"
    if place is not None:
        agent, parent = place.agent, search.parent
        if agent == root:  # in a cycle, the root itself is not an agent
            agent = parent = ROOT
        place = TreeStep(place.key.replace(old, new, 1), place.limits, agent, parent)
    return Step(
        asked.key.replace(old, new, 1),
        asked.caller,
        asked.limits,
        asked.identity,
        asked.call,
        asked.reserve,
        asked.calls,
        asked.total,
        asked.newest,
        asked.tools,
        asked.grants,
        asked.offer,
        asked.earlier,
        place,
    )


class Ledger:
    """The unpacked ledger of a session.

    Attributes that are not listed here are those of `Standing`.

    Attributes:
        idle_ms: how long it is kept, according to the last limits.
        halvings: how often that time is halved, if the caller has begun more than
            `Limits.max_sessions`; see `enter`.
        narrowed_at: 1 + the number of calls of tools without limits of their own, when the first
            step was let through after all tool calls were used up; 0 before.
        identities: the newest steps, oldest first, and the number of their repetitions; see
            `_REPEATED`.
        renewed: ids are not stable from one request to the next.
        open: reservations, oldest first.
        counts: a digest and a number for each tool.
        names: the tools' names, each with its length before it.
        paid: number of settled calls that cost something.
        marks: marks of the newest histories, newest last, `_MARK` bytes each: the number of calls,
            and `Step.total`.
        records: the newest tool calls, in the order in which they were first seen, `KNOWN` bytes
            each.
        tree: the session's tree of agents, which is stored beside the ledger; None before it is
            asked for.
    """

    def __init__(self, state: bytes | None, now: int, steps: int = 0, halvings: int = 0) -> None:
        """Unpack a stored ledger, or begin a new one with this many steps."""
        self.idle_ms = 0
        self.halvings = halvings
        self.last = self.began = now
        self.cost = self.estimated = self.reserved = 0
        self.paid = self.failures = self.model_ms = 0
        self.first_input = self.newest_input = 0
        self.tokens = NO_TOKENS
        self.steps = steps
        self.tool_calls = self.narrowed_at = 0
        self.blocks = self.consecutive_blocks = self.consecutive_errors = self.killed = 0
        self.renewed = False
        self.tree: Tree | None = None
        self.identities: dict[bytes, int] = {}
        self.open: list[_Reservation] = []
        self.counts = self.names = self.marks = self.records = b""
        if state is not None:
            self._unpack(state)

    def _unpack(self, state: bytes) -> None:
        # Declared, because struct has no types, and slicing with untyped numbers is slow.
        identities: int
        reservations: int
        tools: int
        names: int
        marks: int
        renewed: int
        given: int
        taken: int
        read: int
        written: int
        (
            _,
            self.last,
            self.began,
            self.cost,
            self.estimated,
            self.reserved,
            given,
            taken,
            read,
            written,
            self.model_ms,
            self.steps,
            self.tool_calls,
            self.narrowed_at,
            self.blocks,
            self.consecutive_blocks,
            self.consecutive_errors,
            self.paid,
            self.failures,
            self.first_input,
            self.newest_input,
            self.killed,
            renewed,
            self.halvings,
            identities,
            reservations,
            tools,
            names,
            marks,
        ) = _HEAD.unpack_from(state)
        self.tokens = given, taken, read, written
        self.renewed = renewed != 0
        start = _HEAD_SIZE
        end = start + identities * _REPEATED
        self.identities = {
            state[at : at + _IDENTITY]: state[at + _IDENTITY] for at in range(start, end, _REPEATED)
        }
        start, end = end, end + reservations * _RESERVED
        self.open = list(_RESERVATION.iter_unpack(state[start:end]))
        start, end = end, end + tools * _COUNTED
        self.counts = state[start:end]
        start, end = end, end + names
        self.names = state[start:end]
        start, end = end, end + marks * _MARK
        self.marks = state[start:end]
        self.records = state[end:]

    def pack(self) -> bytes:
        """The ledger as it is stored."""
        head = _HEAD.pack(
            _VERSION,
            self.last,
            self.began,
            self.cost,
            self.estimated,
            self.reserved,
            *self.tokens,
            self.model_ms,
            self.steps,
            self.tool_calls,
            self.narrowed_at,
            self.blocks,
            self.consecutive_blocks,
            self.consecutive_errors,
            self.paid,
            self.failures,
            self.first_input,
            self.newest_input,
            self.killed,
            self.renewed,
            self.halvings,
            len(self.identities),
            len(self.open),
            len(self.counts) // _COUNTED,
            len(self.names),
            len(self.marks) // _MARK,
        )
        identities = [b"%b%c" % repeated for repeated in self.identities.items()]
        reservations = [_RESERVATION.pack(*reservation) for reservation in self.open]
        return b"".join(
            [head, *identities, *reservations, self.counts, self.names, self.marks, self.records]
        )

    def is_over(self, limits: Limits, now: int) -> bool:
        """Whether the session has ended."""
        return (
            abs(now - (self.began if limits.ends else self.last)) >= limits.idle_ms >> self.halvings
        )

    def is_large(self) -> bool:
        """Whether it has many tool calls or agents, which take a lot of memory unpacked."""
        return len(self.records) > _RECORDS * KNOWN or (
            self.tree is not None and self.tree.is_large()
        )

    def take_step(self, asked: Step, now: int) -> Standing:
        """Let a request through or refuse it, at the store's time `now`."""
        self.idle_ms = asked.limits.idle_ms
        self._close_old(now)
        identity = asked.identity
        times = self.identities.get(identity, -1)
        if asked.calls and times < 0:  # the same request shows the same calls
            self._learn(asked)
        if asked.offer:
            identity = self._sort_out(asked, times)
            times = self.identities.get(identity, -1)
        retry = times >= 0 and times % _OFFER < MAX_RETRIES_PER_STEP
        limit, used, allowed, tool = self._find_limit(asked, retry)
        tree: TreeStanding | None = None
        over, agents_used, agents_allowed = -1, 0, 0
        if asked.tree is not None:
            if self.tree is None:
                self.tree = Tree()
            tree, over, agents_used, agents_allowed = self.tree.admit(
                asked.tree, now, passes=not limit
            )
        if limit:
            self._block(asked.limits, waits=limit == _MONEY and self.cost < allowed)
        elif over >= 0:
            self.blocks = min(self.blocks + 1, _MAX)  # an agent that did not begin kills no session
            limit, used, allowed = _FIRST_OF_AGENTS + over, agents_used, agents_allowed
        else:
            used = self._let_through(asked, identity if retry else asked.identity, retry, now)
        self._close_old(now)
        if self.halvings and (
            self.killed or self.blocks or self._find_limit(asked, retry=False)[0]
        ):
            self.halvings = 0
        standing = self._describe(now, limit, used, allowed, tool, retry)
        standing.tree = tree
        return standing

    def settle(self, asked: Settlement, now: int) -> Standing:
        """Close a call. If it is not open (any more), nothing changes."""
        self.idle_ms = asked.limits.idle_ms
        unknown, joins = True, asked.outcome == JOINED
        for place in range(len(self.open)):
            call = self.open[place][0]
            if call == asked.call or (joins and call[:CONVERSATION] == asked.call[:CONVERSATION]):
                self._close(self.open.pop(place), asked)
                unknown = False
                break
        if joins and unknown:
            self.steps, self.cost = max(self.steps - 1, 0), max(self.cost - asked.cost, 0)
            self.estimated, self.paid = (
                min(self.estimated, self.cost),
                max(self.paid - (asked.cost > 0), 0),
            )
        self._close_old(now)
        if self.killed or 0 <= asked.limits.cost <= self.cost + self.reserved:
            self.halvings = 0
        return self._describe(now, 0, 0, 0, b"", unknown)

    def _sort_out(self, asked: Step, times: int) -> bytes:
        """Tell side requests from steps; returns the identity of the step, or the request's own."""
        if asked.offer != OFFERS_NONE and self.steps > MAX_RETRIES_PER_STEP:
            return asked.identity  # as for nearly all requests
        has_tools = False
        for repeated in self.identities.values():
            if repeated // _OFFER == OFFERS_TOOLS:
                has_tools = True
                break
        if asked.offer == OFFERS_NONE:
            return next(reversed(self.identities)) if has_tools and times < 0 else asked.identity
        none = [repeated // _OFFER == OFFERS_NONE for repeated in self.identities.values()]
        if not has_tools and all(none) and self.steps == len(none) <= MAX_RETRIES_PER_STEP:
            # The first request that offers tools: all before it were side requests, such as for a
            # title.
            self.steps = self.first_input = self.newest_input = 0
            self.identities = {}
            self.open = [(*reservation[:6], reservation[6] | _RETRY) for reservation in self.open]
        return asked.identity

    def _learn(self, asked: Step) -> None:
        calls = cut_calls(asked)
        whole, new = not self.tool_calls, calls
        if not whole:
            whole, new = self._pick_new(asked, calls)
        if whole or len(new) > RECORD:
            numbers = dict(sum_up_older(asked)) if whole else {}
            for at in range(0, len(new), RECORD):
                tool = new[at + _ID : at + _NAME]
                numbers[tool] = numbers.get(tool, 0) + 1
            self._count_tools(numbers, asked)
            self.tool_calls = min(
                self.tool_calls + (len(asked.calls) if whole else len(new)) // RECORD, _MAX
            )
            added = [
                new[at : at + _ID] + new[at + _NAME : at + RECORD]
                for at in range(0, len(new), RECORD)
            ]
            self.records = b"".join([self.records, *added])
        elif new:
            self._count_tools({new[_ID:_NAME]: 1}, asked)
            self.tool_calls = min(self.tool_calls + 1, _MAX)
            self.records += new[:_ID] + new[_NAME:]
        if len(self.records) > _RECORDS * KNOWN:
            self.records = self.records[-count_records(asked) * KNOWN :]
        mark = _write_mark(len(asked.calls) // RECORD, asked.total)
        at = _find(self.marks, mark, _MARK)
        marks = self.marks if at < 0 else self.marks[:at] + self.marks[at + _MARK :]
        self.marks = (marks + mark)[-_MARKS * _MARK :]

    def _pick_new(self, asked: Step, calls: bytes) -> tuple[bool, bytes]:
        """Whether all calls are new, and which of the newest are; see the top of this file."""
        size, newest = len(calls), len(self.marks) - _MARK
        for at in range(newest, max(-1, newest - _NEWEST_MARKS * _MARK), -_MARK):
            end = self._find_mark(asked, calls, at)
            if (
                end > 0
                and self._knows(calls[end - RECORD : end - RECORD + _ID])
                and not self._knows(calls[end : end + _ID])
            ):
                return False, calls[end:]
        named = {calls[at : at + _ID] for at in range(0, size, RECORD)} != {NO_ID}
        if named:
            ids = {self.records[at : at + _ID] for at in range(0, len(self.records), KNOWN)}
            ids.discard(NO_ID)
            places = [at for at in range(0, size, RECORD) if calls[at : at + _ID] in ids]
            if places:
                self.renewed = False
                first, last = places[0] if self._forgot() else 0, places[-1]
                ids.add(NO_ID)
                between = [
                    calls[at : at + RECORD]
                    for at in range(first, last, RECORD)
                    if calls[at : at + _ID] not in ids
                ]
                return False, b"".join([*between, calls[last + RECORD :]])
        lasting = named and not self.renewed
        several = asked.newest * RECORD < len(asked.calls)
        end = self._find_end(asked, calls, lasting=lasting) if several or not lasting else -1
        if end < 0:
            return True, calls
        self.renewed = named
        return False, calls[end:]

    def _knows(self, name: bytes) -> bool:
        return len(name) == _ID and name != NO_ID and _find(self.records, name, KNOWN) >= 0

    def _forgot(self) -> bool:
        return self.tool_calls * KNOWN > len(self.records)

    def _find_end(self, asked: Step, calls: bytes, *, lasting: bool) -> int:
        """The end of the calls that are known by their position; -1 if none are.

        Args:
            asked: the request.
            calls: the newest calls that it shows.
            lasting: ids seem stable.
        """
        shown, size = len(asked.calls) // RECORD, len(calls)
        end = self._find_mark(asked, calls, len(self.marks) - _MARK)
        if end >= 0:
            return end
        if self._are_newest(shown, calls):
            return size
        end = max(0, size - asked.newest * RECORD)
        older, total = shown - asked.newest, asked.total - add_up(calls[end:])
        known = not lasting or self._has_mark(shown, asked.total) or self._has_mark(older, total)
        return (
            end
            if older > 0 and (known or (older > 1 and self._are_newest(older, calls[:end])))
            else -1
        )

    def _find_mark(self, asked: Step, calls: bytes, at: int) -> int:
        """The end of the history that the mark at `at` describes; -1 if they do not match."""
        end = (
            len(calls)
            - (len(asked.calls) // RECORD - _read_number(self.marks, at, at + 2)) * RECORD
        )
        if not 0 < end <= len(calls) or _read_number(
            self.marks, at + 2, at + _MARK
        ) != asked.total - add_up(calls[end:]):
            return -1
        return end

    def _has_mark(self, shown: int, total: int) -> bool:
        return _find(self.marks, _write_mark(shown, total), _MARK) >= 0

    def _are_newest(self, number: int, calls: bytes) -> bool:
        """Whether `number` calls, which end in `calls`, are the newest that were counted."""
        known = len(self.records) // KNOWN
        length = min(number, known)
        if length > len(calls) // RECORD or (number > known and not self._forgot()):
            return False
        pairs = self.records[(known - length) * KNOWN :]
        total = sum(
            [int.from_bytes(pairs[at : at + _PAIR]) for at in range(_ID, len(pairs), KNOWN)]
        )
        return total == add_up(calls[len(calls) - length * RECORD :])

    def _count_tools(self, numbers: dict[bytes, int], asked: Step) -> None:
        # Tools with limits of their own, for which others leave room
        missing: set[bytes] | None = None
        names: dict[bytes, str] = {}
        for tool, number in numbers.items():
            at = _find(self.counts, tool, _COUNTED)
            if at >= 0:
                count = _read_number(self.counts, at + len(tool), at + _COUNTED) + number
                self.counts = (
                    self.counts[:at]
                    + _TOOL.pack(tool, min(count, _MAX))
                    + self.counts[at + _COUNTED :]
                )
                continue
            if missing is None:
                missing = {
                    digest
                    for digest, _ in asked.limits.tools
                    if _find(self.counts, digest, _COUNTED) < 0
                }
                names = dict(pick_names(asked))
            if (
                len(self.counts)
                < (_MOST_TOOLS if tool in missing else _TOOLS - len(missing)) * _COUNTED
            ):
                self.counts += _TOOL.pack(tool, number)
                self.names += pack_name(names.get(tool, ""))
                missing.discard(tool)

    # A limit each
    def _find_limit(self, asked: Step, retry: bool) -> tuple[int, int, int, bytes]:  # noqa: FBT001, PLR0911
        """The limit that refuses a request, its used and allowed amounts, and its tool."""
        limits = asked.limits
        if self.killed:
            by_blocks = self.killed == 1
            used, allowed = (
                (self.consecutive_blocks, limits.blocks)
                if by_blocks
                else (self.consecutive_errors, limits.errors)
            )
            return 1, used, allowed, b""
        allowed = grant(limits.steps, asked.grants[0])
        if 0 <= allowed <= self.steps and not retry:
            return 2, self.steps, allowed, b""
        allowed = grant(limits.tool_calls, asked.grants[1])
        if 0 <= allowed <= self.tool_calls and not self._may_continue(limits, retry):
            return 3, self.tool_calls, allowed, b""
        allowed = grant(limits.cost, asked.grants[2])
        if 0 <= allowed <= self.cost + self.reserved:
            return 4, self.cost + self.reserved, allowed, b""
        for tool, allowed in limits.tools if self.counts else ():
            count = self._count_calls(tool)
            if count > allowed:
                return 5, count, allowed, tool
        if limits.threshold >= 0 and asked.newest:
            equal, tool = self._find_loop(cut_calls(asked), asked.newest, limits)
            if equal:
                return 6, equal, limits.threshold, tool
        return 0, 0, 0, b""

    def _may_continue(self, limits: Limits, retry: bool) -> bool:  # noqa: FBT001  # as stored
        """Whether a session without tool calls left may continue, or finish."""
        if limits.finishes:
            return retry or not self.narrowed_at
        if not limits.narrows or (
            self.narrowed_at and self._count_others(limits) >= self.narrowed_at
        ):
            return False
        return (
            max([allowed - self._count_calls(tool) for tool, allowed in limits.tools], default=0)
            > 0
        )

    def _count_others(self, limits: Limits) -> int:
        """The number of calls of tools without limits of their own."""
        return max(0, self.tool_calls - sum([self._count_calls(tool) for tool, _ in limits.tools]))

    def _count_calls(self, tool: bytes) -> int:
        at = _find(self.counts, tool, _COUNTED)
        return int.from_bytes(self.counts[at + len(tool) : at + _COUNTED]) if at >= 0 else 0

    def _find_loop(self, calls: bytes, newest: int, limits: Limits) -> tuple[int, bytes]:
        """Find a call of the newest step that is repeated too often: how often, or 0, and its tool.

        It is compared with the steps of the history and, if these are few, those of the ledger.
        """
        counts: dict[bytes, int] = {}
        size, back = len(calls), 0
        at = size - RECORD
        while at >= 0 and back < limits.window:
            pair = calls[at + _NAME : at + _NAME + _PAIR]
            counts[pair] = counts.get(pair, 0) + 1
            back += calls[at + RECORD - 1]
            at -= RECORD
        known, shown = self.records, size // RECORD
        if back < limits.window and len(known) > shown * KNOWN:
            ids: set[bytes] = set()
            if self.renewed or calls.startswith(NO_ID, -RECORD):
                known = known[: len(known) - shown * KNOWN]
            else:
                ids = {calls[at : at + _ID] for at in range(0, size, RECORD)}
            at = len(known) - KNOWN
            while at >= 0 and back < limits.window:
                if known[at : at + _ID] not in ids:
                    pair = known[at + _ID : at + _ID + _PAIR]
                    counts[pair] = counts.get(pair, 0) + 1
                    back += known[at + KNOWN - 1]
                at -= KNOWN
        for at in range(max(0, size - newest * RECORD), size, RECORD):
            equal = counts.get(calls[at + _NAME : at + _NAME + _PAIR], 0)
            if equal >= max(limits.threshold, 1):
                return equal, calls[at + _ID : at + _NAME]
        return 0, b""

    def _block(self, limits: Limits, *, waits: bool = False) -> None:
        """Count a refusal; `waits`: only reservations refuse the request."""
        self.blocks = min(self.blocks + 1, _MAX)
        if waits:
            return
        self.consecutive_blocks = min(self.consecutive_blocks + 1, _MAX)
        if not self.killed and 0 <= limits.blocks <= self.consecutive_blocks:
            self.killed = 1

    def _let_through(self, asked: Step, identity: bytes, retry: bool, now: int) -> int:  # noqa: FBT001  # a bit of what is stored
        """Count a request that is let through; returns what it reserves."""
        limits = asked.limits
        if retry:
            self.identities[identity] += 1
        else:
            self.steps = min(self.steps + 1, _MAX)
            self.identities.pop(identity, None)
            self.identities[identity] = asked.offer * _OFFER
            if len(self.identities) > _IDENTITIES:
                del self.identities[next(iter(self.identities))]
        bits = _RETRY if retry else 0
        allowed = grant(limits.tool_calls, asked.grants[1])
        if self.tool_calls < allowed:
            self.narrowed_at = 0
        elif allowed >= 0 and not self.narrowed_at and not retry:
            self.narrowed_at = min(self._count_others(limits) + 1, _MAX)
            bits += _NARROWED
        reserve, quiet = (
            self.cost // self.paid if self.paid else asked.reserve,
            min(max(0, now - self.last), _MAX),
        )
        reserve = min(reserve, MAX_RESERVE)
        self.open.append((asked.call, identity, now, reserve, quiet, self.consecutive_blocks, bits))
        self.reserved += reserve
        self.consecutive_blocks = 0
        self.last = now
        return reserve

    def _close_old(self, now: int) -> None:
        """Settle calls that were not settled in time: their cost is the reserved amount."""
        while self.open and (len(self.open) > _OPEN or now - self.open[0][2] >= _OPEN_MS):
            reserve = self.open.pop(0)[3]
            self.reserved -= reserve
            self._pay(reserve, reserve)

    def _close(self, reservation: _Reservation, asked: Settlement) -> None:
        _, identity, begun, reserve, quiet, blocks, bits = reservation
        self.reserved -= reserve
        if asked.outcome in {REFUSED, WITHDRAWN, JOINED}:
            self._take_back(identity, begun, quiet, blocks, bits)
            if asked.outcome == REFUSED:
                self._block(asked.limits)
            return
        cost = min(asked.cost, MAX_MONEY)
        self._pay(cost, cost if asked.estimated else 0)
        given, taken, read, written = asked.tokens
        before = self.tokens
        self.tokens = before[0] + given, before[1] + taken, before[2] + read, before[3] + written
        if asked.measured and given + read + written and not bits & _RETRY:
            self.newest_input = min(given + read + written, _MAX)
            self.first_input = self.first_input or self.newest_input
        self.model_ms += asked.model_ms
        failed = asked.outcome == FAILED
        self.failures = min(self.failures + failed, _MAX)
        self.consecutive_errors = min(self.consecutive_errors + 1, _MAX) if failed else 0
        if not self.killed and 0 <= asked.limits.errors <= self.consecutive_errors:
            self.killed = 2

    def _pay(self, cost: int, estimated: int) -> None:
        self.cost = min(self.cost + cost, MAX_MONEY)
        self.estimated = min(self.estimated + estimated, MAX_MONEY)
        if cost:
            self.paid = min(self.paid + 1, _MAX)

    def _take_back(self, identity: bytes, begun: int, quiet: int, blocks: int, bits: int) -> None:
        """Undo a step; consecutive refusals before and after it add up."""
        self.consecutive_blocks = min(self.consecutive_blocks + blocks, _MAX)
        if self.last == begun:
            self.last -= quiet
        if bits & _NARROWED:
            self.narrowed_at = 0
        if not bits & _RETRY:
            self.steps = max(self.steps - 1, 0)
            self.identities.pop(identity, None)
        elif self.identities.get(identity, 0) % _OFFER:
            self.identities[identity] -= 1

    def _describe(  # noqa: PLR0913  # values that the ledger does not contain
        self,
        now: int,
        limit: int,
        used: int,
        allowed: int,
        tool: bytes,
        retry: bool,  # noqa: FBT001  # a field
    ) -> Standing:
        return Standing(
            limit,
            used,
            allowed,
            tool,
            self.steps,
            self.tool_calls,
            self.blocks,
            self.consecutive_blocks,
            self.consecutive_errors,
            self.cost,
            self.estimated,
            self.reserved,
            self.killed,
            max(0, now - self.began),
            self.halvings > 0,
            retry,
            list_tools(self.counts, self.names) if self.counts else (),
            self.tokens,
            self.model_ms,
            self.failures,
            first_input=self.first_input,
            newest_input=self.newest_input,
        )


def _write_mark(shown: int, total: int) -> bytes:
    return ((min(shown, _MAX_SHOWN) << _SUM_BITS) + (total & _SUM)).to_bytes(_MARK)


def _read_number(joined: bytes, start: int, end: int) -> int:
    """`int.from_bytes`, but faster for a few bytes."""
    number = 0
    for at in range(start, end):
        number = (number << 8) + joined[at]
    return number


def _find(joined: bytes, start: bytes, width: int) -> int:
    """The offset of the first item with this start among items of one width; -1 for none."""
    if not joined:
        return -1
    at = joined.find(start)
    while at >= 0 and at % width:
        at = joined.find(start, at + 1)
    return at


def grant(limit: int, more: int) -> int:
    """A limit with additional grants; -1 stays unlimited."""
    return min(limit + more, MAX_MONEY) if limit >= 0 else limit


def count_records(asked: Step) -> int:
    """The number of tool calls that are recognized."""
    limits = asked.limits
    highest = max(
        [grant(limits.tool_calls, asked.grants[1]), *[allowed for _, allowed in limits.tools]]
    )
    return min(MAX_RECORDS, max(_RECORDS, highest + _SPARE_RECORDS, limits.window))


def weigh(asked: Step) -> int:
    """The worst-case cost of a step for a store; a short history costs 1."""
    limits, shown = asked.limits, min(len(asked.calls) // RECORD, MAX_RECORDS)
    known = count_records(asked) if shown > _FEW else 0
    own = (4 * shown + known + 4 * max(0, limits.window) + 4 * len(limits.tools)) // 64
    return 1 + own + weigh_tree(asked.tree)


def cut_calls(asked: Step) -> bytes:
    """The newest calls of a history, which are examined individually."""
    calls = asked.calls
    return calls if len(calls) <= MAX_RECORDS * RECORD else calls[-MAX_RECORDS * RECORD :]


def add_up(calls: bytes) -> int:
    """The sum of the digests of tools and arguments; see `Step.total`."""
    total = 0
    for at in range(_NAME, len(calls), RECORD):
        total += _read_number(calls, at, at + _PAIR)
    return total


def sum_up_older(asked: Step) -> list[tuple[bytes, int]]:
    """Calls of each tool before those that are examined individually, for tools with room."""
    most = len(asked.calls) - len(cut_calls(asked))
    if not most:
        return []
    numbers: dict[bytes, int] = {}
    for at in range(0, most, RECORD):
        tool = asked.calls[at + _ID : at + _NAME]
        numbers[tool] = numbers.get(tool, 0) + 1
    limited = {digest for digest, _ in asked.limits.tools}
    return [
        (tool, number)
        for place, (tool, number) in enumerate(numbers.items())
        if place < _TOOLS or tool in limited
    ]


def pick_names(asked: Step) -> list[tuple[bytes, str]]:
    """The tools of a history that may have room, and their names."""
    limited = {digest for digest, _ in asked.limits.tools} if len(asked.tools) > _TOOLS else set()
    return [
        (tool, name)
        for place, (tool, name) in enumerate(asked.tools)
        if place < _TOOLS or tool in limited
    ]


def pack_name(name: str) -> bytes:
    """The start of a tool's name, with its length in bytes before it."""
    encoded = name[:_TOOL_NAME].encode("utf-8", "replace")[:255]
    return bytes((len(encoded),)) + encoded


_STANDING: Final = struct.Struct(">BBBB4sqqIIIIIQQQQQQQQQIIIB")
"""Limit, killed, crowded, retry, tool, used, allowed; steps, tool_calls, blocks,
consecutive_blocks, consecutive_errors; cost, estimated, reserved, age_ms; tokens, of four kinds;
model_ms, failures, first_input, newest_input; and the number of tools that follow, packed as in a
ledger. If `crowded` has the bit `_IN_TREE`, the tree's answer stands before them; then, with the
bit `_OF_ROOT`, the root."""
_CROWDED: Final = 1
_IN_TREE: Final = 2
_OF_ROOT: Final = 4


def read_standing(answer: bytes) -> Standing:
    """Read a remote store's answer; raises ValueError if it is malformed."""
    try:
        limit, killed, bits, retry, tool, used, allowed, *amounts, tools = _STANDING.unpack_from(
            answer
        )
        tree, start = None, _STANDING.size
        if bits & _IN_TREE:
            tree, start = read_tree(answer, start), start + ANSWER_SIZE
        root = answer[start : start + ROOT_SIZE] if bits & _OF_ROOT else b""
        start += len(root)
        names = start + tools * _COUNTED
        listed = list_tools(answer[start:names], answer[names:])
    except (struct.error, IndexError):
        raise ValueError from None
    if limit >= len(LIMITS) or killed >= len(KILLED) or len(listed) != tools:
        raise ValueError
    steps, tool_calls, blocks, consecutive_blocks, consecutive_errors = amounts[:5]
    cost, estimated, reserved, age = amounts[5:9]
    given, taken, read, written, model_ms, failures, first, newest = amounts[9:]
    tool = tool if tool != bytes(len(tool)) else b""
    return Standing(
        limit,
        used,
        allowed,
        tool,
        steps,
        tool_calls,
        blocks,
        consecutive_blocks,
        consecutive_errors,
        cost,
        estimated,
        reserved,
        killed,
        age,
        bits & _CROWDED != 0,
        retry != 0,
        listed,
        (given, taken, read, written),
        model_ms,
        failures,
        tree,
        root,
        first,
        newest,
    )


_QUESTION: Final = struct.Struct(">BBB16s8sQQQqqqqqqqIIIIQ")
_ENDS: Final = 2
_OFFERED: Final = 4
_FINISHES: Final = 16
_MEASURED: Final = 32
"""Flags of a question, beside 1 for `Limits.narrows`; `_OFFERED` is the factor of the offer."""

_STEP: Final = 3
"""The kind of question, beside the outcomes of settlements."""


def pack_question(asked: Step | Settlement) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes]:
    """Pack a question: head, tools with limits, names, newest calls, tools of older calls, place.

    A settlement has its tokens and `model_ms` where a step has its last numbers.
    """
    limits, grants = asked.limits, (0, 0, 0)
    limited = names = calls = older = tree = b""
    flags = limits.narrows + _ENDS * limits.ends + _FINISHES * limits.finishes
    if isinstance(asked, Settlement):
        kind, estimated, identity = asked.outcome, asked.estimated, b""
        money = min(asked.cost, MAX_MONEY)
        records, earlier, shown, newest = asked.tokens
        total = asked.model_ms
        flags += _MEASURED * asked.measured
    else:
        kind, estimated, identity = _STEP, False, asked.identity
        money = min(asked.reserve, MAX_RESERVE)
        records, shown = count_records(asked), len(asked.calls) // RECORD
        newest, total = asked.newest, asked.total
        earlier, tree = asked.earlier, pack_tree(asked.tree) + pack_search(asked.search)
        grants, calls, flags = asked.grants, cut_calls(asked), flags + _OFFERED * asked.offer
        limited = b"".join([_TOOL.pack(tool, allowed) for tool, allowed in limits.tools])
        names = b"".join([tool + pack_name(name) for tool, name in pick_names(asked)])
        if len(asked.calls) > len(calls):
            older = b"".join([_TOOL.pack(tool, number) for tool, number in sum_up_older(asked)])
    head = _QUESTION.pack(
        kind,
        estimated,
        flags,
        asked.call,
        identity,
        money,
        limits.idle_ms,
        limits.max_sessions,
        grant(limits.steps, grants[0]),
        grant(limits.tool_calls, grants[1]),
        grant(limits.cost, grants[2]),
        limits.window,
        limits.threshold,
        limits.blocks,
        limits.errors,
        records,
        earlier,
        shown,
        newest,
        total,
    )
    return head, limited, names, calls, older, tree


def list_tools(counts: bytes, names: bytes) -> tuple[tuple[bytes, str, int], ...]:
    """Unpack tools for `Standing`."""
    tools = []
    at = 0
    for tool, count in _TOOL.iter_unpack(counts):
        end = at + 1 + names[at]
        tools.append((tool, names[at + 1 : end].decode("utf-8", "ignore"), count))
        at = end
    return tuple(tools)
