"""Limits of sessions against a plain model of their rules: two replicas on one store, and whatever sessions may do."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from hypothesis import example, given
from hypothesis import strategies as st

from extproc.engine.settlements import Entry
from extproc.metrics import Metrics
from extproc.pb.external_processor_pb2 import ProcessingResponse
from extproc.sessions.rates import Usage
from extproc.store.memory import MemoryStore
from extproc.store.rules.session import Standing
from tests.support.service import make_service, metadata_of
from tests.support.session_limits import ask, limited, status
from tests.support.turn_writers import Did, as_chat

TEAMS = ("red", "red", "red", "blue")
SESSIONS = ("a", "a", "a", "b", "c")
TOOLS = ("look", "pay")
IDENTITIES = 16
FREE_RETRIES = 3
BYTES_PER_TOKEN = 4
ANSWER = 1_000
THRESHOLD = 2
"""Equal requests of a tenant, for the detector beside the limits."""

NANO_DOLLARS = 10**9
PRICES = {"*": {"input": 1_000_000, "output": 1_000_000}}
"""A dollar for each token."""


class Called(NamedTuple):
    """A call of a tool, which is known by the number of its turn and its place there; no two sessions make equal ones."""

    number: int
    place: int
    tool: str
    argument: str


class Ask(NamedTuple):
    """A request.

    Attributes:
        team: whose.
        session: its name.
        replica: that Envoy asks.
        new: tools and arguments of calls since the last request, made at once.
        kept: this many turns are left of the history, where it is condensed.
        again: the team's newest request but this many is sent once more, maybe in another session; -1 for none.
    """

    team: str
    session: str
    replica: int
    new: Sequence[tuple[str, int]] = ()
    kept: int = 99
    again: int = -1


class Bill(NamedTuple):
    """What became of one of the requests that were let through, the newest being 0.

    Attributes:
        call: which one.
        replica: that hears of it.
        tokens: of the answer.
        failed: the upstream has.
        estimated: the answer did not tell its tokens.
    """

    call: int
    replica: int
    tokens: int
    failed: bool = False
    estimated: bool = False


class Numbers(NamedTuple):
    """What a ledger shows to people; money in dollars."""

    steps: int = 0
    tool_calls: int = 0
    blocks: int = 0
    consecutive_blocks: int = 0
    consecutive_errors: int = 0
    cost: int = 0
    estimated: int = 0
    reserved: int = 0
    killed: int = 0


@dataclass
class Plain:
    """One ledger, as the documents tell its rules."""

    limits: dict[str, Any]
    steps: int = 0
    recent: dict[tuple[str, bytes], int] = field(default_factory=dict)
    calls: list[Called] = field(default_factory=list)
    open: dict[int, int] = field(default_factory=dict)
    cost: int = 0
    paid: int = 0
    estimated: int = 0
    blocks: int = 0
    blocks_in_row: int = 0
    errors_in_row: int = 0
    killed: int = 0
    went_on: int = 0

    def take(self, identity: tuple[str, bytes], shown: Sequence[Called]) -> str:
        """The limit that refuses a request, empty for none."""
        self.calls += [call for call in shown if call not in self.calls]
        limit = self._find_limit(identity, shown)
        if limit:
            self.refuse(waits=limit == "max_cost_per_session" and self.cost < self.limits[limit])
        return limit

    def _find_limit(self, identity: tuple[str, bytes], shown: Sequence[Called]) -> str:
        limits = self.limits
        if self.killed:
            return "killed"
        if self.steps >= limits.get("max_steps", 10**9) and not self._is_free(identity):
            return "max_steps"
        if len(self.calls) >= limits.get("max_tool_calls", 10**9) and not self._goes_on(identity):
            return "max_tool_calls"
        if self.cost + sum(self.open.values()) / NANO_DOLLARS >= limits.get("max_cost_per_session", 10**9):
            return "max_cost_per_session"
        called = Counter(call.tool for call in self.calls)
        if any(called[tool] > most for tool, most in limits.get("max_calls_per_tool", {}).items()):
            return "max_calls_per_tool"
        return "loop_detection" if self._loops(shown) else ""

    def _is_free(self, identity: tuple[str, bytes]) -> bool:
        return self.recent.get(identity, FREE_RETRIES) < FREE_RETRIES

    def _goes_on(self, identity: tuple[str, bytes]) -> bool:
        mode = self.limits.get("max_tool_calls_mode")
        if mode == "finish":
            return self._is_free(identity) or not self.went_on
        called = Counter(call.tool for call in self.calls)
        left = any(called[tool] < most for tool, most in self.limits.get("max_calls_per_tool", {}).items())
        return mode == "narrow" and left and not 0 < self.went_on <= self._count_others()

    def _count_others(self) -> int:
        return sum(call.tool not in self.limits.get("max_calls_per_tool", {}) for call in self.calls)

    def _loops(self, shown: Sequence[Called]) -> bool:
        if not shown or "loop_detection" not in self.limits:
            return False
        threshold = int(self.limits["loop_detection"]["threshold"])
        ordered = [*[call for call in self.calls if call not in shown], *shown]
        steps = list(dict.fromkeys(call.number for call in ordered))[-int(self.limits["loop_detection"]["window"]) :]
        recent = Counter(call[2:] for call in ordered if call.number in steps)
        return any(recent[call[2:]] >= threshold for call in shown if call.number == shown[-1].number)

    def refuse(self, *, waits: bool = False) -> None:
        """One more request was, maybe for as long as others are open."""
        self.blocks += 1
        self.blocks_in_row += not waits
        if not self.killed and self.blocks_in_row >= self._read_breaker("consecutive_blocks"):
            self.killed = 1

    def let_through(self, number: int, identity: tuple[str, bytes], reserve: int) -> None:
        """One more request was."""
        is_at_cap = len(self.calls) >= self.limits.get("max_tool_calls", 10**9)
        if self._is_free(identity):
            self.recent[identity] += 1
        else:
            self.steps += 1
            self.recent.pop(identity, None)
            self.recent = dict([*self.recent.items(), (identity, 0)][-IDENTITIES:])
            self.went_on = self.went_on or self._count_others() + 1 if is_at_cap else 0
        self.open[number] = self.cost * NANO_DOLLARS // self.paid if self.paid else reserve * NANO_DOLLARS
        self.blocks_in_row = 0

    def settle(self, number: int, bill: Bill) -> None:
        """Know what became of a request, once."""
        if self.open.pop(number, None) is None:
            return
        self.cost += bill.tokens
        self.paid += bill.tokens > 0
        self.estimated += bill.tokens if bill.estimated else 0
        self.errors_in_row = self.errors_in_row + 1 if bill.failed else 0
        if not self.killed and self.errors_in_row >= self._read_breaker("consecutive_errors"):
            self.killed = 2

    def show(self) -> Numbers:
        """As people see it."""
        money = (self.cost, self.estimated, sum(self.open.values()) // NANO_DOLLARS)
        rows = (self.blocks, self.blocks_in_row, self.errors_in_row)
        return Numbers(self.steps, len(self.calls), *rows, *money, self.killed)

    def _read_breaker(self, name: str) -> int:
        return int(self.limits.get("circuit_breaker", {}).get(name, 10**9))


class World:
    """Two replicas and the plain model, which get the same input."""

    def __init__(self, limits: dict[str, Any], most_sessions: int, *, detects: bool) -> None:
        """Nothing has happened yet."""
        self.limits = limits
        self._threshold = THRESHOLD if detects else 10**9
        document = limited(session={"max_sessions_per_tenant": most_sessions}, prices=PRICES, **limits)
        if detects:
            document["spec"]["loop_detection"] = {
                "enabled": True,
                "window_seconds": 3600,
                "threshold_identical_requests": THRESHOLD,
            }
        store = MemoryStore(Metrics())
        self._replicas = [make_service(document, store=store) for _ in range(2)]
        self.plain: dict[tuple[str, str], Plain] = {}
        self._histories: dict[tuple[str, str], list[list[Called]]] = {}
        self._sent: dict[str, list[tuple[bytes, list[Called]]]] = {}
        self._seen: Counter[tuple[str, bytes]] = Counter()
        self._passed: list[tuple[ProcessingResponse, tuple[str, str]]] = []
        self._numbers = count(1)

    def ask(self, asked: Ask) -> None:
        """Send a request, and compare what becomes of it."""
        name = (asked.team, asked.session)
        body, shown = self._write(name, asked)
        ledger = self._find_ledger(name)
        limit = ledger.take((asked.session, body), shown)
        self._seen[asked.team, body] += 1
        detected = self._seen[asked.team, body] >= self._threshold

        answer = ask(self._replicas[asked.replica], body, asked.session, asked.team)

        assert status(answer) == (429 if limit or detected else 200), (limit, detected)
        if limit:
            assert detected or metadata_of(answer)["limit"] == limit
        elif detected:
            ledger.refuse()  # and it was no step
        else:
            ledger.let_through(len(self._passed), (asked.session, body), len(body) // BYTES_PER_TOKEN + ANSWER)
            self._passed.append((answer, name))

    def bill(self, bill: Bill) -> None:
        """Hear what became of a request; nothing where none was let through."""
        if not self._passed:
            return
        number = len(self._passed) - 1 - bill.call % len(self._passed)
        answer, name = self._passed[number]
        named = tuple(json.loads(metadata_of(answer)["sessions"]))
        usage = Usage(0, bill.tokens)
        entry = Entry(named, 500 if bill.failed else 200, bill.failed, 0, 0, "", usage, bill.estimated, refused=False)

        self._replicas[bill.replica].settle_entry(entry)

        self._find_ledger(name).settle(number, bill)

    def _write(self, name: tuple[str, str], asked: Ask) -> tuple[bytes, list[Called]]:
        sent = self._sent.setdefault(asked.team, [])
        if 0 <= asked.again < len(sent):
            return sent[-1 - asked.again]
        history = self._histories.get(name, [])[-asked.kept :] if asked.kept else []
        number = next(self._numbers)
        new = [Called(number, place, tool, "-".join((*name, str(wanted)))) for place, (tool, wanted) in enumerate(asked.new)]
        self._histories[name] = history = [*history, new] if new else history
        done = [
            Did(tuple((call.tool, {"n": call.argument}) for call in turn), ("ok",) * len(turn), number=turn[0].number)
            for turn in history
        ]
        tools = [{"type": "function", "function": {"name": tool}} for tool in TOOLS]
        body = json.dumps({**as_chat(done), "tools": tools, "nonce": next(self._numbers)}).encode()
        sent.append((body, [call for turn in history for call in turn]))
        return sent[-1]

    def _find_ledger(self, name: tuple[str, str]) -> Plain:
        return self.plain.setdefault(name, Plain(self.limits))

    def list_shown(self) -> list[Numbers]:
        """What the replicas show of each ledger, the newest that one of them knows."""
        newest: dict[tuple[str, str], Any] = {}
        for service in self._replicas:
            for run in service.reporter.sessions.copy():
                known = newest.setdefault((run.name.tenant, run.name.session), run)
                newest[run.name.tenant, run.name.session] = max(known, run, key=lambda run: float(run.told))
        return sorted(read_numbers(run.standing) for run in newest.values())


def read_numbers(standing: Standing) -> Numbers:
    money = (standing.cost, standing.estimated, standing.reserved)
    cost, estimated, reserved = [amount // NANO_DOLLARS for amount in money]
    rows = (standing.blocks, standing.consecutive_blocks, standing.consecutive_errors)
    return Numbers(standing.steps, standing.tool_calls, *rows, cost, estimated, reserved, standing.killed)


counts = st.integers(1, 6)
LIMITS = st.fixed_dictionaries(
    {"max_steps": st.sampled_from([2, 5, 20, 20])},
    optional={
        "max_tool_calls": counts,
        "max_cost_per_session": st.integers(500, 6_000),
        "max_calls_per_tool": st.fixed_dictionaries({"pay": st.integers(0, 3)}),
        "loop_detection": st.sampled_from([{"window": 5, "threshold": 3}, {"window": 2, "threshold": 2}]),
        "circuit_breaker": st.fixed_dictionaries({}, optional={"consecutive_blocks": counts, "consecutive_errors": counts}),
    },
)
CALLS = st.lists(st.tuples(st.sampled_from(TOOLS), st.integers(0, 2)), max_size=2)
ASKS = st.builds(
    Ask,
    team=st.sampled_from(TEAMS),
    session=st.sampled_from(SESSIONS),
    replica=st.integers(0, 1),
    new=CALLS,
    kept=st.sampled_from([99, 99, 99, 99, 1, 0]),
    again=st.sampled_from([-1, -1, -1, 0, 1]),
)
BILLS = st.builds(Bill, st.integers(0, 5), st.integers(0, 1), st.integers(0, 300), st.booleans(), st.booleans())


@given(
    limits=LIMITS,
    mode=st.sampled_from(["block", "narrow", "finish"]),
    most_sessions=st.integers(1, 3),
    detects=st.booleans(),
    events=st.lists(ASKS | ASKS | BILLS, min_size=10, max_size=30),
)
@example(
    limits={"max_steps": 2},
    mode="block",
    most_sessions=1,
    detects=True,
    events=[Ask("red", "a", 0), Ask("red", "b", 1), Ask("red", "b", 0, again=0)],
)
def test_sessions_are_limited_as_the_rules_say(
    limits: dict[str, Any],
    mode: str,
    most_sessions: int,
    detects: bool,
    events: Sequence[Ask | Bill],
) -> None:
    """Whatever is sent, by any caller, again or in part, to either replica, and whatever becomes of it."""
    if "max_tool_calls" in limits:
        limits = {**limits, "max_tool_calls_mode": mode}
    world = World(limits, most_sessions, detects=detects)

    for event in events:
        if isinstance(event, Ask):
            world.ask(event)
        else:
            world.bill(event)
        assert world.list_shown() == sorted(ledger.show() for ledger in world.plain.values())
