"""What a session's limits say, against a plain reading of their rules; time is an argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.metrics import Metrics
from extproc.store.memory import MemoryStore
from extproc.store.rules.session import (
    FAILED,
    KILLED,
    KNOWN,
    LIMITS,
    MAX_MONEY,
    MAX_RECORDS,
    MAX_RETRIES_PER_STEP,
    REFUSED,
    SUCCEEDED,
    WITHDRAWN,
    Ledger,
    Limits,
    Settlement,
    Standing,
    Step,
    add_up,
    enter,
)
from tests.records import replace

NO_LIMITS = Limits(60_000, 100)
"""A minute without requests ends the session."""


def limit(**limits: Any) -> Limits:  # noqa: ANN401  # the fields of Limits
    """A session's limits: none but these."""
    return Limits(**{"idle_ms": NO_LIMITS.idle_ms, "max_sessions": NO_LIMITS.max_sessions, **limits})


def digest(name: str) -> bytes:
    """A tool's, four bytes that can be read."""
    return name.encode()[:4].ljust(4, b".")


def make_record(number: int, tool: str = "read", arguments: str = "a") -> bytes:
    """A tool call by the number of its id; eight numbers are a turn's."""
    return (number + 8).to_bytes(6) + digest(tool) + digest(tool[:2] + arguments)


def make_step(number: int, limits: Limits, calls: Sequence[bytes] = (), **changes: Any) -> Step:  # noqa: ANN401  # Step's own
    """The request of that number, in a session of a tenant whose digits are 7f."""
    shown = sorted({record[6:10] for record in calls})
    tools = tuple((tool, tool.decode("latin-1").rstrip(".")) for tool in shown)
    keys = ("session:p::s1:7f", "sessions:p::7f", "session:p::*:7f")
    identity, name = number.to_bytes(8), (number + 2**32).to_bytes(16)
    joined = b"".join(calls)
    turns = [int.from_bytes(record[:6]) // 8 for record in calls]
    newest = turns.count(turns[-1]) if turns else 0
    return replace(Step(*keys, limits, identity, name, 0, joined, add_up(joined), newest, tools, (0, 0, 0)), **changes)


def settle_step(step: Step, outcome: int = SUCCEEDED, cost: int = 0, **changes: Any) -> Settlement:  # noqa: ANN401  # its own
    """What became of a step."""
    return replace(Settlement(step.key, step.limits, step.call, cost, estimated=False, outcome=outcome), **changes)


class Account:
    """One session by the rules, on lists and sets that forget nothing."""

    def __init__(self, now: int) -> None:
        self.began = self.last = now
        self.steps: list[dict[str, Any]] = []  # those that were let through, retries included
        self.open: list[dict[str, Any]] = []
        self.identities: dict[bytes, int] = {}
        self.records: list[bytes] = []
        self.tools: dict[bytes, list[Any]] = {}
        self.count = self.blocks = self.row = self.errors = self.narrowed = 0
        self.cost = self.estimated = 0
        self.killed = 0

    def close_old(self, now: int) -> None:
        """What was not settled in time costs what was reserved."""
        while self.open and (len(self.open) > 32 or now - self.open[0]["now"] >= 600_000):
            reserve = self.open.pop(0)["reserve"]
            self.cost += reserve
            self.estimated += reserve

    def learn(self, asked: Step) -> list[bytes]:
        """Count the tool calls that are new; all that the history shows."""
        shown = [asked.calls[at : at + 14] for at in range(0, len(asked.calls), 14)]
        for record in shown:
            if record[:6] not in [known[:6] for known in self.records]:
                self.records.append(record)
                name = dict(asked.tools).get(record[6:10], "")
                self.tools.setdefault(record[6:10], [name, 0])[1] += 1
        return shown

    def judge(  # noqa: PLR0911  # a limit each
        self, asked: Step, shown: list[bytes], retry: bool
    ) -> tuple[int, int, int, bytes]:
        """The limits in their order."""
        limits, (steps, calls, cost) = asked.limits, asked.grants
        total, spent = len(self.records), self.cost + sum(step["reserve"] for step in self.open)
        equal = 0
        if shown:
            older = [record for record in self.records if record[:6] not in [known[:6] for known in shown]]
            recent = [*older, *shown][-limits.window :] if len(shown) < limits.window else shown[-limits.window :]
            equal = len([record for record in recent if record[10:] == shown[-1][10:]])
        over = [(tool, most) for tool, most in limits.tools if self.tools.get(tool, ["", 0])[1] > most]
        narrowed_before = not limits.narrows or (self.narrowed and total > self.narrowed)
        if self.killed:
            return 1, *((self.row, limits.blocks) if self.killed == 1 else (self.errors, limits.errors)), b""
        if limits.steps >= 0 and not retry and self.count >= limits.steps + steps:
            return 2, self.count, limits.steps + steps, b""
        if limits.tool_calls >= 0 and total > limits.tool_calls + calls and narrowed_before:
            return 3, total, limits.tool_calls + calls, b""
        if limits.cost >= 0 and spent >= limits.cost + cost:
            return 4, spent, limits.cost + cost, b""
        if over:
            return 5, self.tools[over[0][0]][1], over[0][1], over[0][0]
        if limits.threshold >= 0 and equal >= limits.threshold:
            return 6, equal, limits.threshold, shown[-1][6:10]
        return 0, 0, 0, b""

    def block(self, limits: Limits) -> None:
        """A request was refused."""
        self.blocks += 1
        self.row += 1
        if limits.blocks >= 0 and self.row >= limits.blocks and not self.killed:
            self.killed = 1

    def step(self, asked: Step, now: int, shared: bool) -> Standing:
        """One request."""
        self.close_old(now)
        shown = self.learn(asked)
        retry = self.identities.get(asked.identity, MAX_RETRIES_PER_STEP) < MAX_RETRIES_PER_STEP
        verdict = self.judge(asked, shown, retry)
        if verdict[0]:
            self.block(asked.limits)
        else:
            self.count += not retry
            times = self.identities[asked.identity] + 1 if retry else 0
            others = {known: number for known, number in self.identities.items() if retry or known != asked.identity}
            self.identities = dict(list({**others, asked.identity: times}.items())[-16:])
            limits = asked.limits
            met = limits.narrows and len(self.records) >= limits.tool_calls + asked.grants[1]
            first = met and not self.narrowed
            self.narrowed = (self.narrowed or len(self.records)) if met else 0
            kept: dict[str, Any] = {"call": asked.call, "identity": asked.identity, "now": now, "reserve": asked.reserve}
            kept |= {"retry": retry, "first": first}
            self.open.append(kept | {"last": self.last, "row": self.row})
            self.row, self.last = 0, now
            self.close_old(now)
        return self.stand(now, verdict, shared, retry)

    def settle(self, asked: Settlement, now: int) -> Standing:
        """What became of one."""
        found = [step for step in self.open if step["call"] == asked.call]
        for step in found:
            self.open.remove(step)
            self.finish(step, asked)
        self.close_old(now)
        return self.stand(now, (0, 0, 0, b""), False, not found)

    def finish(self, step: dict[str, Any], asked: Settlement) -> None:
        """One that is open."""
        if asked.outcome in {REFUSED, WITHDRAWN}:
            self.count -= not step["retry"]
            if not step["retry"]:
                self.identities.pop(step["identity"], None)
            elif self.identities.get(step["identity"]):
                self.identities[step["identity"]] -= 1
            self.row += step["row"]
            self.narrowed = 0 if step["first"] else self.narrowed
            if self.last == step["now"]:
                self.last = min(step["last"], step["now"])
            if asked.outcome == REFUSED:
                self.block(asked.limits)
            return
        self.cost += asked.cost
        self.estimated += asked.cost if asked.estimated else 0
        self.errors = self.errors + 1 if asked.outcome == FAILED else 0
        if asked.limits.errors >= 0 and self.errors >= asked.limits.errors and not self.killed:
            self.killed = 2

    def stand(self, now: int, verdict: tuple[int, int, int, bytes], shared: bool, retry: bool) -> Standing:
        """Where that leaves it."""
        reserved = sum(step["reserve"] for step in self.open)
        counts = (self.count, len(self.records), self.blocks, self.row, self.errors, self.cost, self.estimated, reserved)
        tools = tuple((tool, name, count) for tool, (name, count) in self.tools.items())
        return Standing(*verdict, *counts, self.killed, max(0, now - self.began), shared, retry, tools)


class Book:
    """All sessions by the rules."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._rosters: dict[str, list[int]] = {}

    def find(self, key: str, limits: Limits, now: int) -> Account | None:
        """One that is not to be forgotten."""
        if key in self._accounts and abs(now - self._accounts[key].last) >= limits.idle_ms:
            del self._accounts[key]
        return self._accounts.get(key)

    def ask(self, asked: Step | Settlement, now: int) -> Standing:
        """What a store is asked."""
        account = self.find(asked.key, asked.limits, now)
        if isinstance(asked, Settlement):
            return account.settle(asked, now) if account is not None else Standing(retry=True)
        key, shared = asked.key, False
        if account is None:
            began = self._rosters.get(asked.roster, [])
            began = began if began and abs(now - began[0]) < asked.limits.idle_ms else []
            shared = len(began) >= asked.limits.max_sessions
            self._rosters[asked.roster] = began if shared else [*began, now]
            key = asked.shared if shared else key
            account = self.find(key, asked.limits, now) if shared else None
            account = self._accounts[key] = account or Account(now)
        return account.step(asked, now, shared)


class Ledgers:
    """All sessions by the functions that the stores share."""

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}

    def ask(self, asked: Step | Settlement, now: int) -> Standing:
        """What a store is asked."""
        key, room, ledger = asked.key, True, self._take(asked.key, asked.limits, now)
        if isinstance(asked, Settlement):
            standing = ledger.settle(asked, now) if ledger is not None else Standing(retry=True)
        else:
            if ledger is None:
                self._kept[asked.roster], room = enter(self._kept.get(asked.roster), asked.limits, now)
            if not room:
                key, ledger = asked.shared, self._take(asked.shared, asked.limits, now)
            ledger = ledger or Ledger(None, now)
            standing = ledger.take_step(asked, now, shared=not room)
        if ledger is not None:
            self._kept[key] = ledger.pack()
        return standing

    def _take(self, key: str, limits: Limits, now: int) -> Ledger | None:
        state = self._kept.pop(key, None)
        ledger = Ledger(state, now) if state is not None else None
        return None if ledger is not None and ledger.is_over(limits, now) else ledger


Asking = Callable[[Step | Settlement, int], Standing]
_TOOL_NAMES = ("read", "send", "list", "refund")
LIMITS_OF_ALL_KINDS = st.builds(
    Limits,
    idle_ms=st.sampled_from([60_000, 3_600_000]),
    max_sessions=st.integers(1, 3),
    steps=st.just(-1) | st.integers(1, 6),
    tool_calls=st.just(-1) | st.integers(1, 6),
    narrows=st.booleans(),
    cost=st.just(-1) | st.integers(1, 50),
    tools=st.dictionaries(st.sampled_from([digest(name) for name in _TOOL_NAMES]), st.integers(1, 3), max_size=2).map(
        lambda tools: tuple(sorted(tools.items()))
    ),
    window=st.integers(2, 6),
    threshold=st.just(-1) | st.integers(2, 4),
    blocks=st.just(-1) | st.integers(1, 4),
    errors=st.just(-1) | st.integers(1, 3),
)
_GAPS = st.integers(0, 5_000) | st.sampled_from([59_999, 60_000, 599_999, 600_000, -1_000, -70_000])
_MOVES = ("step", "step", "step", "retry", "compact", "branch", "settle", "fail", "refuse", "withdraw")
MOVES = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(_MOVES), st.integers(0, 4), _GAPS), max_size=60)
"""Which of four sessions, what it does, a number that makes it vary, and after how many milliseconds."""


def play(moves: Sequence[tuple[int, str, int, int]], limits: Limits, ask: Asking) -> list[Standing]:
    """What agents are told whose histories grow with each step, are compacted, fork, and are sent again."""
    histories: list[list[bytes]] = [[], [], [], []]
    steps: list[list[tuple[Step, str]]] = [[], [], [], []]
    answers, now = [], 1_000_000
    for number, (who, move, amount, gap) in enumerate(moves):
        now += gap
        history, done = histories[who], steps[who]
        if move in ("settle", "fail", "refuse", "withdraw"):
            if done:
                outcome = {"settle": SUCCEEDED, "fail": FAILED, "refuse": REFUSED, "withdraw": WITHDRAWN}[move]
                step, key = done[-min(len(done), amount // 2 + 1)]
                settlement = settle_step(step, outcome, amount * 3, key=key, estimated=amount == 4)
                answers.append(ask(settlement, now))
            continue
        if move == "compact":
            del history[: min(amount * 2, len(history) - 1)]
        elif move == "branch":
            del history[max(1, len(history) - amount) :]
        elif move == "step":
            tool = _TOOL_NAMES[amount % 4]
            history += [make_record(number * 8 + more, tool, f"{who}{amount // 2}") for more in range(amount)]
        again = done[-1][0].identity if move == "retry" and done else number.to_bytes(8)
        names = {"key": f"session:p::s{who}:7f", "call": number.to_bytes(16), "identity": again}
        asked = make_step(number, limits, history, **names, reserve=amount * 2, grants=(amount // 3, amount // 4, amount))
        answers.append(ask(asked, now))
        done.append((asked, asked.shared if answers[-1].shared else asked.key))
    return answers


@settings(max_examples=300)
@given(moves=MOVES, limits=LIMITS_OF_ALL_KINDS)
def test_a_session_is_judged_by_the_rules(moves: list[tuple[int, str, int, int]], limits: Limits) -> None:
    """For any sessions that share a tenant, on a clock that may be set back, they are told what a plain reading says."""
    assert play(moves, limits, Ledgers().ask) == play(moves, limits, Book().ask)


@settings(max_examples=150)
@given(moves=MOVES, limits=LIMITS_OF_ALL_KINDS, entries=st.sampled_from([31, 32, 64, 1_000]))
def test_a_session_in_any_memory_is_judged_by_the_rules(
    moves: list[tuple[int, str, int, int]], limits: Limits, entries: int
) -> None:
    """Whether none, one, two or all of their ledgers are at hand, sessions are told the same; the clock goes forward."""
    store = MemoryStore(Metrics(), entries)
    moves = [(who, move, amount, abs(gap)) for who, move, amount, gap in moves]

    assert play(moves, limits, lambda asked, now: store.hit([asked], now)[0]) == play(moves, limits, Book().ask)


def tell(standing: Standing) -> str:
    """What a request hears: which limit, used and allowed, and what has killed the session."""
    refused = f"{LIMITS[standing.limit]} {standing.used}/{standing.allowed}" if standing.limit else "ok"
    tool = f" {standing.tool.decode()}" if standing.tool else ""
    return refused + tool + (f", killed by {KILLED[standing.killed]}" if standing.killed else "")


def call(*tools: str) -> list[bytes]:
    """A history in which these tools were called, each time with other arguments."""
    return [make_record(number, tool, str(number)) for number, tool in enumerate(tools)]


def repeat(times: int, *tools: str) -> list[bytes]:
    """A history in which the same tools were called so often with the same arguments."""
    return [make_record(number, tools[number % len(tools)]) for number in range(times * len(tools))]


_FIRST = make_step(0, NO_LIMITS)
_TWO_STEPS, _ONE_CALL, _NARROW = limit(steps=2), limit(tool_calls=1), limit(tool_calls=1, narrows=True)
_TOOLS, _MONEY, _LOOP = limit(tools=((digest("send"), 1),)), limit(cost=100), limit(window=5, threshold=3)
_BLOCKS, _ERRORS = limit(steps=1, blocks=2), limit(errors=2)
_TWO_SESSIONS = limit(steps=1, max_sessions=2)


def in_session(name: str, number: int, limits: Limits, **changes: Any) -> Step:  # noqa: ANN401  # Step's own fields
    """A request of another session of the same tenant."""
    return make_step(number, limits, key=f"session:p::{name}:7f", **changes)


Case = list[tuple[int, Step | Settlement, str]]
CASES: dict[str, Case] = {
    "no limits": [(number, make_step(number, NO_LIMITS, call("read") * number), "ok") for number in range(40)],
    "steps": [
        (0, make_step(1, _TWO_STEPS), "ok"),
        (1, make_step(2, _TWO_STEPS), "ok"),
        (2, make_step(3, _TWO_STEPS), "max_steps 2/2"),
        (3, make_step(4, _TWO_STEPS, grants=(1, 0, 0)), "ok"),
        (4, make_step(5, _TWO_STEPS, grants=(1, 0, 0)), "max_steps 3/3"),
    ],
    "a retry is no step": [
        (0, make_step(1, _TWO_STEPS), "ok"),
        (1, make_step(1, _TWO_STEPS), "ok"),
        (2, make_step(2, _TWO_STEPS), "ok"),
        (3, make_step(1, _TWO_STEPS), "ok"),
        (4, make_step(3, _TWO_STEPS), "max_steps 2/2"),
        (5, make_step(3, _TWO_STEPS), "max_steps 2/2"),
    ],
    "three retries of a step are free": [
        *((number, make_step(1, _TWO_STEPS), "ok") for number in range(5)),  # the last one is the second step
        *((number, make_step(1, _TWO_STEPS), "ok") for number in range(5, 8)),
        (8, make_step(1, _TWO_STEPS), "max_steps 2/2"),
        (9, make_step(1, _TWO_STEPS), "max_steps 2/2"),
    ],
    "each step has retries of its own": [
        *((number, make_step(number % 2, _TWO_STEPS), "ok") for number in range(8)),
        *((number, make_step(number % 2, _TWO_STEPS), "max_steps 2/2") for number in (8, 9)),
    ],
    "a retry that goes no further is not used up": [
        (0, make_step(1, limit(steps=1)), "ok"),
        *(
            (number, asked, "ok")
            for number in range(1, 9)
            for asked in (make_step(1, limit(steps=1), call=b"retry..1"), settle_step(_FIRST, WITHDRAWN, call=b"retry..1"))
        ),
        *(
            (number, asked, "ok")
            for number in range(9, 17)
            for asked in (make_step(1, limit(steps=1), call=b"retry..2"), settle_step(_FIRST, REFUSED, call=b"retry..2"))
        ),
        *((number, make_step(1, limit(steps=1)), "ok") for number in range(17, 20)),
        (20, make_step(1, limit(steps=1)), "max_steps 1/1"),
    ],
    "a step whose retries are used up, and that another guard refuses, was none": [
        *((number, make_step(1, _TWO_STEPS), "ok") for number in range(4)),
        (4, make_step(1, _TWO_STEPS, call=b"the fift"), "ok"),
        (5, settle_step(_FIRST, REFUSED, call=b"the fift"), "ok"),
        *((number, make_step(1, _TWO_STEPS), "ok") for number in range(6, 10)),
        (10, make_step(1, _TWO_STEPS), "max_steps 2/2"),
    ],
    "what lies 17 requests back is no retry": [
        *((number, make_step(number, limit(steps=17)), "ok") for number in range(17)),
        (17, make_step(1, limit(steps=17)), "ok"),
        (18, make_step(0, limit(steps=17)), "max_steps 17/17"),
    ],
    "idle time ends a session, and refused requests do not keep it": [
        (0, make_step(1, limit(steps=1)), "ok"),
        (30_000, make_step(2, limit(steps=1)), "max_steps 1/1"),
        (59_999, make_step(3, limit(steps=1)), "max_steps 1/1"),
        (60_000, make_step(4, limit(steps=1)), "ok"),
    ],
    "what another guard refused was no step and does not keep it": [
        (0, make_step(1, limit(steps=2)), "ok"),
        (30_000, make_step(2, limit(steps=2)), "ok"),
        (30_001, settle_step(make_step(2, limit(steps=2)), REFUSED), "ok"),
        (30_002, make_step(2, limit(steps=2)), "ok"),
        (30_003, settle_step(make_step(2, limit(steps=2)), REFUSED), "ok"),
        (60_000, make_step(3, limit(steps=1)), "ok"),
    ],
    "tool calls": [
        (0, make_step(1, _ONE_CALL, call("read")), "ok"),
        (1, make_step(2, _ONE_CALL, call("read", "list")), "max_tool_calls 2/1"),
        (2, make_step(3, _ONE_CALL), "max_tool_calls 2/1"),  # also when the history is gone
        (3, make_step(4, _ONE_CALL, grants=(0, 1, 0)), "ok"),
    ],
    "narrow refuses the calls that are made all the same": [
        (0, make_step(1, _NARROW, call("read")), "ok"),
        (1, make_step(2, _NARROW, call("read")), "ok"),
        (2, make_step(3, _NARROW, call("read", "read")), "max_tool_calls 2/1"),
    ],
    "narrow forgives calls that one answer made at once": [
        (0, make_step(1, _NARROW), "ok"),
        (1, make_step(2, _NARROW, call("read", "read", "read")), "ok"),
        (2, make_step(3, _NARROW, call("read", "read", "read")), "ok"),
        (3, make_step(4, _NARROW, call("read", "read", "read", "read")), "max_tool_calls 4/1"),
        (4, make_step(5, _NARROW, call("read", "read", "read", "read"), grants=(0, 4, 0)), "ok"),
    ],
    "calls of a tool": [
        (0, make_step(1, _TOOLS, call("read", "send")), "ok"),
        (1, make_step(2, _TOOLS, call("read", "send", "read", "read")), "ok"),
        (2, make_step(3, _TOOLS, [make_record(9, "send", "z")]), "max_calls_per_tool 2/1 send"),
    ],
    "a call is counted once, also when older turns are gone": [
        (0, make_step(1, _TOOLS, call("send", "read")), "ok"),
        (1, make_step(2, _TOOLS, call("send", "read")[1:]), "ok"),
        (2, make_step(3, _TOOLS, call("send", "read", "list")), "ok"),
    ],
    "money that is reserved is as good as spent": [
        (0, make_step(1, _MONEY, reserve=100), "ok"),
        (1, make_step(2, _MONEY), "max_cost_per_session 100/100"),
        (2, settle_step(make_step(1, _MONEY), cost=99), "ok"),
        (3, make_step(3, _MONEY, reserve=1), "ok"),
        (4, make_step(4, _MONEY), "max_cost_per_session 100/100"),
        (5, make_step(5, _MONEY, grants=(0, 0, 1)), "ok"),
    ],
    "a call is settled once": [
        (0, make_step(1, _MONEY, reserve=10), "ok"),
        *((number, settle_step(make_step(1, _MONEY), cost=50), "ok") for number in (1, 2, 3)),
        (4, settle_step(make_step(2, _MONEY), cost=50), "ok"),  # never asked for
        (5, make_step(3, _MONEY), "ok"),
    ],
    "what is not settled in time is spent": [
        (0, make_step(1, limit(cost=100, idle_ms=3_600_000), reserve=99), "ok"),
        (600_000, make_step(2, limit(cost=100, idle_ms=3_600_000)), "ok"),
        (600_001, settle_step(make_step(1, limit(cost=100, idle_ms=3_600_000)), cost=1), "ok"),
        (600_002, make_step(3, limit(cost=100, idle_ms=3_600_000), reserve=1), "ok"),
        (600_003, make_step(4, limit(cost=100, idle_ms=3_600_000)), "max_cost_per_session 100/100"),
    ],
    "refusals in a row kill": [
        (0, make_step(1, _BLOCKS), "ok"),
        (1, make_step(2, _BLOCKS), "max_steps 1/1"),
        (2, make_step(1, _BLOCKS), "ok"),  # a retry is let through, and the row ends
        (3, make_step(2, _BLOCKS), "max_steps 1/1"),
        (4, make_step(2, _BLOCKS), "max_steps 1/1, killed by consecutive_blocks"),
        (5, make_step(1, _BLOCKS, grants=(9, 0, 0)), "killed 2/2, killed by consecutive_blocks"),
        (60_002, make_step(1, _BLOCKS), "ok"),
    ],
    "refusals of other guards are in the row": [
        (0, make_step(1, _BLOCKS), "ok"),
        (1, settle_step(make_step(1, _BLOCKS), REFUSED), "ok"),
        (2, make_step(2, _BLOCKS), "ok"),
        (3, settle_step(make_step(2, _BLOCKS), REFUSED), "ok, killed by consecutive_blocks"),
    ],
    "failures in a row kill": [
        *((number, make_step(number, _ERRORS), "ok") for number in range(4)),
        (4, settle_step(make_step(0, _ERRORS), FAILED), "ok"),
        (5, settle_step(make_step(1, _ERRORS), SUCCEEDED), "ok"),
        (6, settle_step(make_step(2, _ERRORS), FAILED), "ok"),
        (7, settle_step(make_step(3, _ERRORS), FAILED), "ok, killed by consecutive_errors"),
        (8, make_step(4, _ERRORS), "killed 2/2, killed by consecutive_errors"),
    ],
    "the third equal call among five": [
        (0, make_step(1, _LOOP, repeat(2, "read", "list")), "ok"),
        (1, make_step(2, _LOOP, repeat(3, "read", "list")[:5]), "loop_detection 3/3 read"),
        (2, make_step(3, _LOOP, [*repeat(3, "read", "list")[:5], make_record(9, "send")]), "ok"),
    ],
    "equal calls that lie too far back": [
        (0, make_step(1, limit(window=5, threshold=3), repeat(3, "read", "list", "send")), "ok")
    ],
    "digests that stand in others": [  # in ids, and across items
        (0, make_step(1, _LOOP, [number.to_bytes(6) + b"xxxx" + bytes([0, 0, 0, number % 5]) for number in range(6)]), "ok"),
        (1, make_step(2, limit(tools=((bytes(4), 1),)), [b"abcdef" + bytes(3) + b"\x01xxxx"]), "ok"),
    ],
    "equal calls that are not shown any more": [
        (0, make_step(1, _LOOP, repeat(2, "read")), "ok"),
        (1, make_step(2, _LOOP, repeat(3, "read")[2:]), "loop_detection 3/3 read"),
        (2, make_step(3, _LOOP), "ok"),  # a history without calls
    ],
    "sessions that are too many share a ledger": [
        (0, in_session("a", 1, _TWO_SESSIONS), "ok"),
        (1, in_session("b", 1, _TWO_SESSIONS), "ok"),
        (2, in_session("c", 1, _TWO_SESSIONS), "ok"),
        (3, in_session("d", 2, _TWO_SESSIONS), "max_steps 1/1"),
        (4, in_session("a", 2, _TWO_SESSIONS), "max_steps 1/1"),
        (60_000, in_session("d", 2, _TWO_SESSIONS), "ok"),
    ],
    "the order of the limits": [
        (0, make_step(1, limit(steps=0, tool_calls=0, cost=0), call("send")), "max_steps 0/0"),
        (1, make_step(1, limit(tool_calls=0, cost=0), call("send")), "max_tool_calls 1/0"),
        (2, make_step(1, limit(cost=0, tools=((digest("send"), 0),)), call("send")), "max_cost_per_session 0/0"),
        (
            3,
            make_step(1, limit(tools=((digest("send"), 0),), threshold=1, window=1), call("send")),
            "max_calls_per_tool 1/0 send",
        ),
        (4, make_step(1, limit(threshold=1, window=1), call("send")), "loop_detection 1/1 send"),
    ],
    "a settlement of nobody's": [(0, settle_step(_FIRST, FAILED, 9), "ok")],
}
"""When, what is asked, and what a store says to it."""


@pytest.mark.parametrize("case", CASES)
def test_a_session_in_memory(case: str) -> None:
    """Each limit refuses at its number, in its order, and forgets when it should."""
    store = MemoryStore(Metrics())

    assert [tell(store.hit([asked], now)[0]) for now, asked, _ in CASES[case]] == [expected for _, _, expected in CASES[case]]


def ask(*questions: Step | Settlement) -> list[Standing]:
    """What a fresh store says to them, a millisecond apart."""
    store = MemoryStore(Metrics())
    return [store.hit([asked], 1_000 + number)[0] for number, asked in enumerate(questions)]


def test_calls_that_are_not_known_any_more_are_not_counted_again() -> None:
    """In a history longer than what is kept of it, what stands before a known call is older, and behind it new."""
    history = [make_record(number, "send" if number == 3 else "read") for number in range(900)]
    limits = limit(tools=((digest("send"), 1),))

    standings = ask(*(make_step(length, limits, history[:length]) for length in (300, 301, 600, 899, 900)))

    assert [(tell(standing), standing.tool_calls) for standing in standings] == [
        ("ok", length) for length in (300, 301, 600, 899, 900)
    ]


def test_as_many_calls_are_known_as_a_limit_needs() -> None:
    """Where a thousand calls are allowed, twice as many are found again in a history that has lost its newest turns."""
    history = [make_record(number, arguments=str(number)) for number in range(900)]
    shown = (history, history[388:420], history[300:330])

    standings = ask(*(make_step(number, limit(tool_calls=1_000), calls) for number, calls in enumerate(shown)))

    assert [standing.tool_calls for standing in standings] == [900, 900, 930]  # of a thousand, the newest 512


def test_tools_are_counted_as_far_as_there_is_room() -> None:
    """64 tools are counted, each by the start of its name; one that has a limit always is."""
    calls = [number.to_bytes(6) + number.to_bytes(4) + bytes(4) for number in range(100)]
    tools = tuple((number.to_bytes(4), "\U0001f600" * number + "\ud800") for number in range(100))
    limits = limit(tools=(((99).to_bytes(4), 5),))

    (standing,) = ask(make_step(1, limits, calls, tools=tools))

    assert standing.tool_calls == 100
    assert [tool for tool, _, _ in standing.tools] == [number.to_bytes(4) for number in (*range(63), 99)]
    assert [name for _, name, _ in standing.tools[:3]] == ["?", "\U0001f600?", "\U0001f600" * 2 + "?"]
    assert standing.tools[-1][1] == "\U0001f600" * 63


def test_money_stays_exact() -> None:
    """Sums that no agent ever spends are cut off where a store would begin to round."""
    steps = [make_step(number, NO_LIMITS, reserve=10**30) for number in range(100)]

    *_, standing = ask(*steps, settle_step(steps[-1], cost=10**30))

    assert standing.cost == MAX_MONEY
    assert standing.reserved <= MAX_MONEY


@pytest.mark.parametrize("number", [0, 1, 20_000])
def test_whatever_a_history_holds_is_taken(number: int) -> None:
    """No number of calls makes a step fail or a ledger grow past its bound."""
    ledger = Ledger(None, 0)
    ledger.take_step(make_step(1, NO_LIMITS, [bytes(14)] * number), 0)
    many = [position.to_bytes(14) for position in range(20_000)]
    ledger.take_step(make_step(2, limit(tool_calls=10**9), many, tools=()), 1)

    assert len(ledger.pack()) < MAX_RECORDS * KNOWN + 1_000


def test_a_ledger_is_bounded() -> None:
    """Whatever a session shows, however long: 9 KB and the names of its tools."""
    limits, state = limit(tool_calls=10**9), b""
    for number in range(1, 400):
        calls = [make_record(at * 8, arguments=str(at)) for at in range(number * 2)]
        ledger = Ledger(state or None, number)
        ledger.take_step(make_step(number, limits, calls, reserve=1), number)
        state = ledger.pack()

    assert len(state) - len(ledger.names) < 9_000


def test_every_call_of_a_long_history_is_counted() -> None:
    """Also by tool, where only the newest are looked at one by one: a session that was not known may have a long past."""
    tools = ["send" if number % 10 == 3 else "read" for number in range(4_900)]
    limits = limit(tool_calls=10**9, tools=((digest("send"), 490),))

    (first, second) = ask(*(make_step(number, limits, call(*tools, *["send"] * number)) for number in range(2)))

    assert (tell(first), first.tool_calls) == ("ok", 4_900)
    assert (tell(second), second.tool_calls) == ("max_calls_per_tool 491/490 send", 4_901)


def test_a_fresh_ledger_is_small() -> None:
    """A session costs little until it has called many tools."""
    ledger = Ledger(None, 0)
    ledger.take_step(make_step(1, NO_LIMITS), 0)

    assert len(ledger.pack()) < 144


def test_sessions_in_memory_are_bounded() -> None:
    """However many begin and whatever they hold, the store keeps no more entries and bytes than it may."""
    store = MemoryStore(Metrics(), max_entries=2_000)
    calls = [make_record(number, "read", str(number)) for number in range(20)]
    for number in range(10_000):
        names = {"key": f"session:p::{number}:7f", "roster": f"sessions:p::{number // 50}:7f"}
        store.hit([make_step(number, NO_LIMITS, calls, **names)], number)

        assert len(store) >= min(number + 1, 200)

    assert len(store) <= 2_000
    assert store._bytes <= 2_000 * 256
