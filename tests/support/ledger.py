"""A plain model of session limits, and moves to try them."""

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from extproc.store.rules.session import (
    FAILED,
    JOINED,
    KILLED,
    LIMITS,
    MAX_RETRIES_PER_STEP,
    OFFERS_NONE,
    OFFERS_TOOLS,
    REFUSED,
    SUCCEEDED,
    WITHDRAWN,
    Limits,
    Settlement,
    Standing,
    Step,
    add_up,
)
from tests.support.records import replace

# A minute without requests ends the session.
NO_LIMITS = Limits(60_000, 100)


def limit(**limits: Any) -> Limits:  # noqa: ANN401  # the fields of Limits
    return Limits(
        **{"idle_ms": NO_LIMITS.idle_ms, "max_sessions": NO_LIMITS.max_sessions, **limits}
    )


def digest(name: str) -> bytes:
    return name.encode()[:4].ljust(4, b".")


def make_record(number: int, tool: str = "read", arguments: str = "a", since: int = 1) -> bytes:
    """Tool call of a number; a turn has eight.

    `since` is the number of steps since the call before.
    """
    return (number + 8).to_bytes(6) + digest(tool) + digest(tool[:2] + arguments) + bytes((since,))


def make_step(number: int, limits: Limits, calls: Sequence[bytes] = (), **changes: Any) -> Step:  # noqa: ANN401  # Step's own
    """Request of a number, in a session of a caller whose digits are 7f."""
    shown = sorted({record[6:10] for record in calls})
    tools = tuple((tool, tool.decode("latin-1").rstrip(".")) for tool in shown)
    keys = ("session:p::s1:7f", "sessions:p::7f")
    identity, name = number.to_bytes(8), (number + 2**32).to_bytes(16)
    joined = b"".join(calls)
    turns = [int.from_bytes(record[:6]) // 8 for record in calls]
    newest = turns.count(turns[-1]) if turns else 0
    return replace(
        Step(*keys, limits, identity, name, 0, joined, add_up(joined), newest, tools, (0, 0, 0)),
        **changes,
    )


def settle_step(step: Step, outcome: int = SUCCEEDED, cost: int = 0, **changes: Any) -> Settlement:  # noqa: ANN401  # its own
    return replace(
        Settlement(step.key, step.limits, step.call, cost, estimated=False, outcome=outcome),
        **changes,
    )


class Account:
    """One session, on lists and sets that keep everything."""

    def __init__(self, now: int, earlier: int = 0) -> None:
        self.began = self.last = now
        self.steps: list[dict[str, Any]] = []  # those that were let through, retries included
        self.open: list[dict[str, Any]] = []
        self.identities: dict[bytes, int] = {}
        self.offers: dict[bytes, int] = {}
        self.records: list[bytes] = []
        self.tools: dict[bytes, list[Any]] = {}
        self.count = earlier
        self.blocks = self.row = self.errors = self.narrowed = self.halvings = 0
        self.cost = self.estimated = self.paid = self.failures = self.model_ms = 0
        self.tokens = [0, 0, 0, 0]
        self.inputs: list[int] = []
        self.killed = 0

    def close_old(self, now: int) -> None:
        """Charge the reservation where a settlement is overdue."""
        while self.open and (len(self.open) > 32 or now - self.open[0]["now"] >= 600_000):
            reserve = self.open.pop(0)["reserve"]
            self.cost += reserve
            self.paid += reserve > 0
            self.estimated += reserve

    def learn(self, asked: Step) -> list[bytes]:
        shown = [asked.calls[at : at + 15] for at in range(0, len(asked.calls), 15)]
        for record in shown:
            if record[:6] not in [known[:6] for known in self.records]:
                self.records.append(record)
                name = dict(asked.tools).get(record[6:10], "")
                self.tools.setdefault(record[6:10], [name, 0])[1] += 1
        return shown

    def judge(  # noqa: PLR0911  # a limit each
        self, asked: Step, shown: list[bytes], retry: bool
    ) -> tuple[int, int, int, bytes]:
        limits, (steps, calls, cost) = asked.limits, asked.grants
        total, spent = len(self.records), self.cost + sum(step["reserve"] for step in self.open)
        looping = self.find_loops(asked, shown) if limits.threshold >= 0 else []
        over = [
            (tool, most) for tool, most in limits.tools if self.tools.get(tool, ["", 0])[1] > most
        ]
        if self.killed:
            return (
                1,
                *((self.row, limits.blocks) if self.killed == 1 else (self.errors, limits.errors)),
                b"",
            )
        if limits.steps >= 0 and not retry and self.count >= limits.steps + steps:
            return 2, self.count, limits.steps + steps, b""
        if (
            limits.tool_calls >= 0
            and total >= limits.tool_calls + calls
            and not self.goes_on(limits, retry)
        ):
            return 3, total, limits.tool_calls + calls, b""
        if limits.cost >= 0 and spent >= limits.cost + cost:
            return 4, spent, limits.cost + cost, b""
        if over:
            return 5, self.tools[over[0][0]][1], over[0][1], over[0][0]
        if looping:
            return 6, looping[0][0], limits.threshold, looping[0][1]
        return 0, 0, 0, b""

    def find_loops(self, asked: Step, shown: list[bytes]) -> list[tuple[int, bytes]]:
        older = [
            record for record in self.records if record[:6] not in [known[:6] for known in shown]
        ]
        steps: list[list[bytes]] = [[]]
        for record in [*older, *shown]:
            steps += [[] for _ in range(record[14])]
            steps[-1].append(record[10:14])
        recent = [pair for step in steps[-asked.limits.window :] for pair in step]
        counted = [
            (recent.count(record[10:14]), record[6:10])
            for record in shown[len(shown) - asked.newest :]
        ]
        return [(count, tool) for count, tool in counted if count >= asked.limits.threshold]

    def goes_on(self, limits: Limits, retry: bool) -> bool:
        if limits.finishes:
            return retry or not self.narrowed
        left = [tool for tool, most in limits.tools if self.tools.get(tool, ["", 0])[1] < most]
        return limits.narrows and bool(left) and not 0 < self.narrowed <= self.count_others(limits)

    def count_others(self, limits: Limits) -> int:
        limited = [tool for tool, _ in limits.tools]
        return len([record for record in self.records if record[6:10] not in limited])

    def block(self, limits: Limits, *, waits: bool = False) -> None:
        self.blocks += 1
        self.row += not waits
        if waits:
            return
        if limits.blocks >= 0 and self.row >= limits.blocks and not self.killed:
            self.killed = 1

    def step(self, asked: Step, now: int) -> Standing:
        self.close_old(now)
        shown = self.learn(asked)
        identity = self.sort_out(asked)
        retry = self.identities.get(identity, MAX_RETRIES_PER_STEP) < MAX_RETRIES_PER_STEP
        identity = identity if retry else asked.identity
        verdict = self.judge(asked, shown, retry)
        if verdict[0]:
            self.block(asked.limits, waits=verdict[0] == 4 and self.cost < verdict[2])
        else:
            self.count += not retry
            times = self.identities[identity] + 1 if retry else 0
            others = {
                known: number
                for known, number in self.identities.items()
                if retry or known != identity
            }
            self.identities = dict(list({**others, identity: times}.items())[-16:])
            self.offers |= {} if retry else {identity: asked.offer}
            limits = asked.limits
            allowed = limits.tool_calls + asked.grants[1] if limits.tool_calls >= 0 else -1
            first = 0 <= allowed <= len(self.records) and not self.narrowed and not retry
            if first:
                self.narrowed = self.count_others(limits) + 1
            elif len(self.records) < allowed:
                self.narrowed = 0
            reserve = self.cost // self.paid if self.paid else asked.reserve
            kept: dict[str, Any] = {
                "call": asked.call,
                "identity": identity,
                "now": now,
                "reserve": reserve,
            }
            kept |= {"retry": retry, "first": first}
            self.open.append(kept | {"last": self.last, "row": self.row})
            self.row, self.last = 0, now
            verdict = (0, reserve, 0, b"")
            self.close_old(now)
        if self.killed or self.blocks or self.judge(asked, shown, False)[0]:
            self.halvings = 0
        return self.stand(now, verdict, retry)

    def sort_out(self, asked: Step) -> bytes:
        """The step that a request repeats, if any.

        The first request with tools ends the steps before it.
        """
        offered = [self.offers[known] for known in self.identities]
        if (
            asked.offer == OFFERS_NONE
            and OFFERS_TOOLS in offered
            and asked.identity not in self.identities
        ):
            return list(self.identities)[-1]
        if (
            asked.offer == OFFERS_TOOLS
            and set(offered) == {OFFERS_NONE}
            and self.count == len(offered) <= 3
        ):
            self.count = 0
            self.identities, self.inputs = {}, []
            for step in self.open:
                step["retry"] = True
        return asked.identity

    def settle(self, asked: Settlement, now: int) -> Standing:
        found = [step for step in self.open if step["call"] == asked.call]
        for step in found:
            self.open.remove(step)
            self.finish(step, asked)
        self.close_old(now)
        if self.killed or 0 <= asked.limits.cost <= self.cost + sum(
            step["reserve"] for step in self.open
        ):
            self.halvings = 0
        return self.stand(now, (0, 0, 0, b""), not found)

    def finish(self, step: dict[str, Any], asked: Settlement) -> None:
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
        self.paid += asked.cost > 0
        self.tokens = [total + more for total, more in zip(self.tokens, asked.tokens, strict=True)]
        self.model_ms += asked.model_ms
        prompt = sum(asked.tokens) - asked.tokens[1]
        self.inputs += [prompt] if prompt and asked.measured and not step["retry"] else []
        self.failures += asked.outcome == FAILED
        self.estimated += asked.cost if asked.estimated else 0
        self.errors = self.errors + 1 if asked.outcome == FAILED else 0
        if asked.limits.errors >= 0 and self.errors >= asked.limits.errors and not self.killed:
            self.killed = 2

    def stand(self, now: int, verdict: tuple[int, int, int, bytes], retry: bool) -> Standing:
        reserved = sum(step["reserve"] for step in self.open)
        counts = (
            self.count,
            len(self.records),
            self.blocks,
            self.row,
            self.errors,
            self.cost,
            self.estimated,
            reserved,
        )
        tools = tuple((tool, name, count) for tool, (name, count) in self.tools.items())
        age, tokens = (
            max(0, now - self.began),
            (self.tokens[0], self.tokens[1], self.tokens[2], self.tokens[3]),
        )
        return Standing(
            *verdict,
            *counts,
            self.killed,
            age,
            self.halvings > 0,
            retry,
            tools,
            tokens,
            self.model_ms,
            self.failures,
            None,
            b"",
            *((self.inputs[0], self.inputs[-1]) if self.inputs else (0, 0)),
        )


class Book:
    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._begun: dict[str, list[int]] = {}

    def find(self, key: str, limits: Limits, now: int) -> Account | None:
        account = self._accounts.get(key)
        if (
            account is not None
            and abs(now - (account.began if limits.ends else account.last))
            >= limits.idle_ms // 2**account.halvings
        ):
            del self._accounts[key]
        return self._accounts.get(key)

    def ask(self, asked: Step | Settlement, now: int) -> Standing:
        account = self.find(asked.key, asked.limits, now)
        if isinstance(asked, Settlement):
            return account.settle(asked, now) if account is not None else Standing(retry=True)
        if account is None:
            began = self._begun.get(asked.caller, [])
            began = [*(began if began and abs(now - began[0]) < asked.limits.idle_ms else []), now]
            self._begun[asked.caller] = began
            account = self._accounts[asked.key] = Account(now, asked.earlier)
            most = asked.limits.max_sessions
            if len(began) > most:
                lasts = abs(now - began[0]) * most // len(began)
                account.halvings = next(
                    (times for times in range(6) if asked.limits.idle_ms // 2**times <= lasts), 6
                )
        return account.step(asked, now)


Asking = Callable[[Step | Settlement, int], Standing]


_TOOL_NAMES = ("read", "send", "list", "refund")


LIMITS_OF_ALL_KINDS = st.builds(
    Limits,
    idle_ms=st.sampled_from([60_000, 3_600_000]),
    max_sessions=st.integers(1, 3),
    steps=st.just(-1) | st.integers(1, 6),
    tool_calls=st.just(-1) | st.integers(1, 6),
    narrows=st.booleans(),
    finishes=st.sampled_from([False, False, True]),
    cost=st.just(-1) | st.integers(1, 50),
    tools=st.dictionaries(
        st.sampled_from([digest(name) for name in _TOOL_NAMES]), st.integers(1, 3), max_size=2
    ).map(lambda tools: tuple(sorted(tools.items()))),
    window=st.integers(2, 6),
    threshold=st.just(-1) | st.integers(2, 4),
    blocks=st.just(-1) | st.integers(1, 4),
    errors=st.just(-1) | st.integers(1, 3),
    ends=st.booleans(),
)


_GAPS = st.integers(0, 5_000) | st.sampled_from([59_999, 60_000, 599_999, 600_000, -1_000, -70_000])


_MOVES = (
    "step",
    "step",
    "step",
    "side",
    "side",
    "retry",
    "compact",
    "branch",
    "settle",
    "fail",
    "refuse",
    "withdraw",
)


# Session (of four), move, a number that varies it, and milliseconds since the move before.
MOVES = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(_MOVES), st.integers(0, 4), _GAPS), max_size=60
)


def play(moves: Sequence[tuple[int, str, int, int]], limits: Limits, ask: Asking) -> list[Standing]:
    """Answers to agents whose histories grow, are condensed, fork, and are sent again."""
    histories: list[list[bytes]] = [[], [], [], []]
    steps: list[list[tuple[Step, str]]] = [[], [], [], []]
    bodies: list[tuple[list[bytes], int]] = [
        ([], 0)
    ] * 4  # of the newest request: what it shows, and what it offers
    answers, now = [], 1_000_000
    for number, (who, move, amount, gap) in enumerate(moves):
        now += gap
        history, done = histories[who], steps[who]
        if move in ("settle", "fail", "refuse", "withdraw"):
            if done:
                outcome = {
                    "settle": SUCCEEDED,
                    "fail": FAILED,
                    "refuse": REFUSED,
                    "withdraw": WITHDRAWN,
                }[move]
                step, key = done[-min(len(done), amount // 2 + 1)]
                used = {
                    "tokens": (amount, number, gap % 7 * amount, amount // 2),
                    "model_ms": number * amount,
                    "measured": gap % 3 > 0,
                }
                settlement = settle_step(
                    step, outcome, amount * 3, key=key, estimated=amount == 4, **used
                )
                answers.append(ask(settlement, now))
            continue
        if move == "compact":
            del history[: min(amount * 2, len(history) - 1)]
        elif move == "branch":
            del history[max(1, len(history) - amount) :]
        elif move == "step":
            tool = _TOOL_NAMES[amount % 4]
            history += [
                make_record(number * 8 + more, tool, f"{who}{amount // 2}", int(not more))
                for more in range(amount)
            ]
        again = done[-1][0].identity if move == "retry" and done else number.to_bytes(8)
        names = {"key": f"session:p::s{who}:7f", "call": number.to_bytes(16), "identity": again}
        offer = (
            OFFERS_NONE
            if move == "side"
            else (who + 1) % 4 and (0, OFFERS_TOOLS, OFFERS_TOOLS)[who % 3]
        )
        shown = list(history) if move != "side" or amount % 2 else []
        if move == "retry" and done:
            shown, offer = bodies[who]
        bodies[who] = shown, offer
        more = {"reserve": amount * 2, "grants": (amount // 3, amount // 4, amount), "offer": offer}
        more["earlier"] = amount * (who == 2)
        asked = make_step(number, limits, shown, **names, **more)
        answers.append(ask(asked, now))
        done.append((asked, asked.key))
    return answers


def tell(standing: Standing) -> str:
    """An answer: which limit, used and allowed, and what has killed the session."""
    refused = (
        f"{LIMITS[standing.limit]} {standing.used}/{standing.allowed}" if standing.limit else "ok"
    )
    tool = f" {standing.tool.decode()}" if standing.tool else ""
    return refused + tool + (f", killed by {KILLED[standing.killed]}" if standing.killed else "")


def call(*tools: str) -> list[bytes]:
    return [make_record(number, tool, str(number)) for number, tool in enumerate(tools)]


def repeat(times: int, *tools: str) -> list[bytes]:
    """A history in which these tools were called this often with the same arguments."""
    return [make_record(number, tools[number % len(tools)]) for number in range(times * len(tools))]


def answer(number: int, *tools: str) -> list[bytes]:
    return [
        make_record(number * 8 + place, tool, since=int(not place))
        for place, tool in enumerate(tools)
    ]


_FIRST = make_step(0, NO_LIMITS)


_TWO_STEPS, _TWO_CALLS, _FINISH = (
    limit(steps=2),
    limit(tool_calls=2),
    limit(tool_calls=1, finishes=True),
)


_NARROW = limit(tool_calls=2, narrows=True, tools=((digest("list"), 2), (digest("send"), 1)))


_TOOLS, _MONEY, _LOOP = (
    limit(tools=((digest("send"), 1),)),
    limit(cost=100),
    limit(window=5, threshold=3),
)


_BLOCKS, _ERRORS = limit(steps=1, blocks=2), limit(errors=2)


_ONE_SESSION = limit(steps=2, max_sessions=1)


# Step's own fields
def in_session(name: str, number: int, limits: Limits, **changes: Any) -> Step:  # noqa: ANN401
    return make_step(number, limits, key=f"session:p::{name}:7f", **changes)


Case = list[tuple[int, Step | Settlement, str]]


# Time, question, and the store's answer.
CASES: dict[str, Case] = {
    "no limits": [
        (number, make_step(number, NO_LIMITS, call("read") * number), "ok") for number in range(40)
    ],
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
        *(
            (number, make_step(1, _TWO_STEPS), "ok") for number in range(5)
        ),  # the last one is the second step
        *((number, make_step(1, _TWO_STEPS), "ok") for number in range(5, 8)),
        (8, make_step(1, _TWO_STEPS), "max_steps 2/2"),
        (9, make_step(1, _TWO_STEPS), "max_steps 2/2"),
    ],
    "each step has retries of its own": [
        *((number, make_step(number % 2, _TWO_STEPS), "ok") for number in range(8)),
        *((number, make_step(number % 2, _TWO_STEPS), "max_steps 2/2") for number in (8, 9)),
    ],
    "a withdrawn retry does not count": [
        (0, make_step(1, limit(steps=1)), "ok"),
        *(
            (number, asked, "ok")
            for number in range(1, 9)
            for asked in (
                make_step(1, limit(steps=1), call=b"retry..1"),
                settle_step(_FIRST, WITHDRAWN, call=b"retry..1"),
            )
        ),
        *(
            (number, asked, "ok")
            for number in range(9, 17)
            for asked in (
                make_step(1, limit(steps=1), call=b"retry..2"),
                settle_step(_FIRST, REFUSED, call=b"retry..2"),
            )
        ),
        *((number, make_step(1, limit(steps=1)), "ok") for number in range(17, 20)),
        (20, make_step(1, limit(steps=1)), "max_steps 1/1"),
    ],
    "a new step that another guard refuses does not count": [
        *((number, make_step(1, _TWO_STEPS), "ok") for number in range(4)),
        (4, make_step(1, _TWO_STEPS, call=b"the fift"), "ok"),
        (5, settle_step(_FIRST, REFUSED, call=b"the fift"), "ok"),
        *((number, make_step(1, _TWO_STEPS), "ok") for number in range(6, 10)),
        (10, make_step(1, _TWO_STEPS), "max_steps 2/2"),
    ],
    "a title before the first step does not count": [
        (0, make_step(1, limit(steps=1), offer=OFFERS_NONE), "ok"),
        (1, make_step(2, limit(steps=1), offer=OFFERS_TOOLS), "ok"),
        (2, make_step(3, limit(steps=1), call("read"), offer=OFFERS_TOOLS), "max_steps 1/1"),
    ],
    "three side requests of a step are free": [
        (0, make_step(1, _TWO_STEPS, offer=OFFERS_TOOLS), "ok"),
        *(
            (number, make_step(number, _TWO_STEPS, offer=OFFERS_NONE), "ok")
            for number in range(2, 5)
        ),
        (5, make_step(5, _TWO_STEPS, offer=OFFERS_NONE), "ok"),  # the second step
        *(
            (number, make_step(number, _TWO_STEPS, offer=OFFERS_NONE), "ok")
            for number in range(6, 9)
        ),
        (9, make_step(9, _TWO_STEPS, offer=OFFERS_NONE), "max_steps 2/2"),
        (10, make_step(10, _TWO_STEPS, offer=OFFERS_TOOLS), "max_steps 2/2"),
    ],
    "without tools there are no side requests": [
        (0, make_step(1, _TWO_STEPS, offer=OFFERS_NONE), "ok"),
        (1, make_step(2, _TWO_STEPS, offer=OFFERS_NONE), "ok"),
        (2, make_step(3, _TWO_STEPS, offer=OFFERS_NONE), "max_steps 2/2"),
    ],
    "a withdrawn title takes no step back": [
        (0, make_step(1, limit(steps=1), offer=OFFERS_NONE), "ok"),
        (1, make_step(2, limit(steps=1), offer=OFFERS_TOOLS), "ok"),
        (2, settle_step(make_step(1, limit(steps=1)), WITHDRAWN), "ok"),
        (3, make_step(3, limit(steps=1), offer=OFFERS_TOOLS), "max_steps 1/1"),
    ],
    "side requests cost money": [
        (0, make_step(1, _MONEY, offer=OFFERS_TOOLS), "ok"),
        (1, make_step(2, _MONEY, offer=OFFERS_NONE, reserve=100), "ok"),
        (2, make_step(3, _MONEY, offer=OFFERS_NONE), "max_cost_per_session 100/100"),
    ],
    "repeating the request 17 requests ago is a step": [
        *((number, make_step(number, limit(steps=17)), "ok") for number in range(17)),
        (17, make_step(1, limit(steps=17)), "ok"),
        (18, make_step(0, limit(steps=17)), "max_steps 17/17"),
    ],
    "idle time ends a session despite refused requests": [
        (0, make_step(1, limit(steps=1)), "ok"),
        (30_000, make_step(2, limit(steps=1)), "max_steps 1/1"),
        (59_999, make_step(3, limit(steps=1)), "max_steps 1/1"),
        (60_000, make_step(4, limit(steps=1)), "ok"),
    ],
    "a session with a fixed end stops although it is active": [
        (0, make_step(1, limit(steps=2, ends=True)), "ok"),
        (59_999, make_step(2, limit(steps=2, ends=True)), "ok"),
        (59_999, make_step(3, limit(steps=2, ends=True)), "max_steps 2/2"),
        (60_000, make_step(4, limit(steps=2, ends=True)), "ok"),
        (60_001, make_step(5, limit(steps=2, ends=True)), "ok"),
        (119_999, make_step(6, limit(steps=2, ends=True)), "max_steps 2/2"),
        (120_000, make_step(7, limit(steps=2, ends=True)), "ok"),
    ],
    "a step that another guard refused does not prolong a session": [
        (0, make_step(1, limit(steps=2)), "ok"),
        (30_000, make_step(2, limit(steps=2)), "ok"),
        (30_001, settle_step(make_step(2, limit(steps=2)), REFUSED), "ok"),
        (30_002, make_step(2, limit(steps=2)), "ok"),
        (30_003, settle_step(make_step(2, limit(steps=2)), REFUSED), "ok"),
        (60_000, make_step(3, limit(steps=1)), "ok"),
    ],
    "tool calls": [
        (0, make_step(1, _TWO_CALLS, call("read")), "ok"),
        (1, make_step(2, _TWO_CALLS, call("read", "list")), "max_tool_calls 2/2"),
        (2, make_step(3, _TWO_CALLS), "max_tool_calls 2/2"),  # also when the history is gone
        (3, make_step(4, _TWO_CALLS, grants=(0, 1, 0)), "ok"),
        (
            4,
            make_step(5, _TWO_CALLS, call("read", "list", "list"), grants=(0, 1, 0)),
            "max_tool_calls 3/3",
        ),
    ],
    "narrow keeps tools with calls of their own left": [
        (0, make_step(1, _NARROW, call("read", "list")), "ok"),
        (1, make_step(2, _NARROW, call("read", "list", "send")), "ok"),
        (2, make_step(3, _NARROW, call("read", "list", "send")), "ok"),
        (
            3,
            make_step(4, _NARROW, call("read", "list", "send", "list")),
            "max_tool_calls 4/2",
        ),  # all are used up
    ],
    "narrow refuses calls of removed tools": [
        (0, make_step(1, _NARROW, call("read", "read")), "ok"),
        (1, make_step(2, _NARROW, call("read", "read", "list")), "ok"),
        (2, make_step(3, _NARROW, call("read", "read", "list", "read")), "max_tool_calls 4/2"),
        (3, make_step(4, _NARROW, call("read", "read", "list", "read"), grants=(0, 3, 0)), "ok"),
        (4, make_step(5, _NARROW, call("read", "read", "list", "read"), grants=(0, 2, 0)), "ok"),
    ],
    "narrow accepts all calls of one answer": [
        (0, make_step(1, _NARROW), "ok"),
        (1, make_step(2, _NARROW, call("read", "read", "read", "read")), "ok"),
        (2, make_step(3, _NARROW, call("read", "read", "read", "read")), "ok"),
        (
            3,
            make_step(4, _NARROW, call("read", "read", "read", "read", "read")),
            "max_tool_calls 5/2",
        ),
    ],
    "narrow without limits of tools refuses": [
        (0, make_step(1, limit(tool_calls=1, narrows=True), call("read")), "max_tool_calls 1/1")
    ],
    "finish allows one step and its retries": [
        (0, make_step(1, _FINISH), "ok"),
        (1, make_step(2, _FINISH, call("read")), "ok"),
        (2, make_step(2, _FINISH, call("read")), "ok"),
        (3, make_step(3, _FINISH, call("read")), "max_tool_calls 1/1"),
        (4, make_step(4, _FINISH, call("read"), grants=(0, 1, 0)), "ok"),
        (5, make_step(5, _FINISH, call("read", "list"), grants=(0, 1, 0)), "ok"),
        (6, make_step(6, _FINISH, call("read", "list"), grants=(0, 1, 0)), "max_tool_calls 2/2"),
    ],
    "a withdrawn last answer can be repeated": [
        (0, make_step(1, _FINISH, call("read")), "ok"),
        (1, settle_step(make_step(1, _FINISH), REFUSED), "ok"),
        (2, make_step(2, _FINISH, call("read")), "ok"),
        (3, settle_step(make_step(2, _FINISH), WITHDRAWN), "ok"),
        (4, make_step(3, _FINISH, call("read")), "ok"),
        (5, make_step(4, _FINISH, call("read")), "max_tool_calls 1/1"),
    ],
    "a side request does not use the last answer": [
        (0, make_step(1, _FINISH, offer=OFFERS_TOOLS), "ok"),
        (1, make_step(2, _FINISH, call("read"), offer=OFFERS_NONE), "ok"),
        (2, make_step(3, _FINISH, call("read"), offer=OFFERS_TOOLS), "ok"),
        (3, make_step(4, _FINISH, call("read"), offer=OFFERS_TOOLS), "max_tool_calls 1/1"),
    ],
    "calls of a tool": [
        (0, make_step(1, _TOOLS, call("read", "send")), "ok"),
        (1, make_step(2, _TOOLS, call("read", "send", "read", "read")), "ok"),
        (2, make_step(3, _TOOLS, [make_record(9, "send", "z")]), "max_calls_per_tool 2/1 send"),
    ],
    "a call counts once, also in a shortened history": [
        (0, make_step(1, _TOOLS, call("send", "read")), "ok"),
        (1, make_step(2, _TOOLS, call("send", "read")[1:]), "ok"),
        (2, make_step(3, _TOOLS, call("send", "read", "list")), "ok"),
    ],
    "reserved money counts as spent": [
        (0, make_step(1, _MONEY, reserve=100), "ok"),
        (1, make_step(2, _MONEY), "max_cost_per_session 100/100"),
        (2, settle_step(make_step(1, _MONEY), cost=99), "ok"),
        (3, make_step(3, _MONEY, reserve=1), "ok"),
        (4, make_step(4, _MONEY), "max_cost_per_session 198/100"),
        (5, make_step(5, _MONEY, grants=(0, 0, 99)), "ok"),
    ],
    "reservations follow the average cost": [
        (0, make_step(1, _MONEY, reserve=70), "ok"),
        (1, make_step(2, _MONEY, reserve=70), "ok"),
        (2, make_step(3, _MONEY), "max_cost_per_session 140/100"),
        (3, settle_step(make_step(1, _MONEY), cost=11), "ok"),
        (
            4,
            settle_step(make_step(2, _MONEY), FAILED),
            "ok",
        ),  # costs nothing, and is no part of the average
        *((number, make_step(number, _MONEY, reserve=70), "ok") for number in range(5, 14)),
        (14, make_step(14, _MONEY), "max_cost_per_session 110/100"),
    ],
    "refusals due to reservations kill no session": [
        (0, make_step(1, limit(cost=100, blocks=2), reserve=100), "ok"),
        *(
            (number, make_step(2, limit(cost=100, blocks=2)), "max_cost_per_session 100/100")
            for number in (1, 2, 3)
        ),
        (4, settle_step(make_step(1, limit(cost=100, blocks=2)), cost=99), "ok"),
        (5, make_step(2, limit(cost=100, blocks=2)), "ok"),
        (6, settle_step(make_step(2, limit(cost=100, blocks=2)), cost=1), "ok"),
        (7, make_step(3, limit(cost=100, blocks=2)), "max_cost_per_session 100/100"),
        (
            8,
            make_step(3, limit(cost=100, blocks=2)),
            "max_cost_per_session 100/100, killed by consecutive_blocks",
        ),
    ],
    "a call is settled once": [
        (0, make_step(1, _MONEY, reserve=10), "ok"),
        *((number, settle_step(make_step(1, _MONEY), cost=50), "ok") for number in (1, 2, 3)),
        (4, settle_step(make_step(2, _MONEY), cost=50), "ok"),  # never asked for
        (5, make_step(3, _MONEY), "ok"),
    ],
    "an overdue reservation is spent": [
        (0, make_step(1, limit(cost=100, idle_ms=3_600_000), reserve=99), "ok"),
        (600_000, make_step(2, limit(cost=100, idle_ms=3_600_000)), "ok"),
        (600_001, settle_step(make_step(1, limit(cost=100, idle_ms=3_600_000)), cost=1), "ok"),
        (600_002, settle_step(make_step(2, limit(cost=100, idle_ms=3_600_000)), cost=1), "ok"),
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
    "refusals of other guards are consecutive refusals": [
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
    "the third equal call in five steps": [
        (0, make_step(1, _LOOP, repeat(2, "read", "list")), "ok"),
        (1, make_step(2, _LOOP, repeat(3, "read", "list")[:5]), "loop_detection 3/3 read"),
        (2, make_step(3, _LOOP, [*repeat(3, "read", "list")[:5], make_record(9, "send")]), "ok"),
    ],
    "equal calls outside the window": [
        (0, make_step(1, limit(window=5, threshold=3), repeat(3, "read", "list", "send")), "ok")
    ],
    # Four at once: the newest of nine equal calls in three steps
    "all calls of a step are in the window": [
        (0, make_step(1, _LOOP, answer(0, "read", "send", "list", "read")[:3], newest=3), "ok"),
        (
            1,
            make_step(
                2, _LOOP, [*answer(0, "read", "a", "b"), *answer(1, "read", "c", "d")], newest=3
            ),
            "ok",
        ),
        (
            2,
            make_step(
                3,
                _LOOP,
                [
                    *answer(0, "read", "a"),
                    *answer(1, "c", "read", "d"),
                    *answer(2, "e", "read", "f"),
                ],
                newest=3,
            ),
            "loop_detection 3/3 read",
        ),
    ],
    "equal calls of one answer": [
        (0, make_step(1, _LOOP, answer(0, "read", "read"), newest=2), "ok"),
        (
            1,
            make_step(2, _LOOP, answer(0, "read", "list", "list", "list"), newest=4),
            "loop_detection 3/3 list",
        ),
    ],
    "steps without calls are in the window": [
        (
            0,
            make_step(1, _LOOP, [make_record(0), make_record(8), make_record(16, since=3)]),
            "loop_detection 3/3 read",
        ),
        (1, make_step(2, _LOOP, [make_record(0), make_record(8), make_record(16, since=4)]), "ok"),
        (
            2,
            make_step(3, _LOOP, repeat(3, "read"), newest=0),
            "ok",
        ),  # the newest step calls nothing
    ],
    "digests that occur within others": [  # in ids, and across items
        (
            0,
            make_step(
                1,
                _LOOP,
                [
                    number.to_bytes(6) + b"xxxx" + bytes([0, 0, 0, number % 5, 1])
                    for number in range(6)
                ],
            ),
            "ok",
        ),
        (
            1,
            make_step(2, limit(tools=((bytes(4), 1),)), [b"abcdef" + bytes(3) + b"\x01xxxx\x01"]),
            "ok",
        ),
    ],
    "equal calls that the history no longer shows": [
        (0, make_step(1, _LOOP, repeat(2, "read")), "ok"),
        (1, make_step(2, _LOOP, repeat(3, "read")[2:]), "loop_detection 3/3 read"),
        (2, make_step(3, _LOOP), "ok"),  # a history without calls
    ],
    "steps that the history no longer shows": [
        (
            0,
            make_step(
                1, _LOOP, [*answer(0, "read", "a", "b"), *answer(1, "c", "d", "read")], newest=3
            ),
            "ok",
        ),
        (
            1,
            make_step(
                2,
                _LOOP,
                [*answer(2, "e", "f"), *answer(3, "g", "h"), *answer(4, "read", "i")],
                newest=2,
            ),
            "loop_detection 3/3 read",
        ),
        (
            2,
            make_step(
                3,
                _LOOP,
                [*answer(4, "read", "i"), *answer(5, "k"), *answer(6, "j", "read")],
                newest=2,
            ),
            "ok",
        ),
    ],
    "sessions of a caller with many end sooner": [
        (0, in_session("a", 1, _ONE_SESSION), "ok"),
        (
            30_000,
            in_session("b", 1, _ONE_SESSION),
            "ok",
        ),  # of two sessions in 30 s, one stays for 15
        (44_999, in_session("b", 2, _ONE_SESSION), "ok"),
        (59_999, in_session("b", 3, _ONE_SESSION), "max_steps 2/2"),
        (60_000, in_session("b", 4, _ONE_SESSION), "max_steps 2/2"),
        (60_001, in_session("a", 2, _ONE_SESSION), "ok"),
    ],
    "the order of the limits": [
        (0, make_step(1, limit(steps=0, tool_calls=0, cost=0), call("send")), "max_steps 0/0"),
        (1, make_step(1, limit(tool_calls=0, cost=0), call("send")), "max_tool_calls 1/0"),
        (
            2,
            make_step(1, limit(cost=0, tools=((digest("send"), 0),)), call("send")),
            "max_cost_per_session 0/0",
        ),
        (
            3,
            make_step(1, limit(tools=((digest("send"), 0),), threshold=1, window=1), call("send")),
            "max_calls_per_tool 1/0 send",
        ),
        (4, make_step(1, limit(threshold=1, window=1), call("send")), "loop_detection 1/1 send"),
    ],
    "a settlement without a step": [(0, settle_step(_FIRST, FAILED, 9), "ok")],
    "a continued conversation takes back only its own step": [
        *((number, make_step(number, _TWO_STEPS), "ok") for number in (0, 1)),
        *((number, settle_step(make_step(number, _TWO_STEPS)), "ok") for number in (0, 1)),
        (2, settle_step(_FIRST, JOINED), "ok"),
        (3, make_step(2, _TWO_STEPS), "ok"),
        (4, make_step(3, _TWO_STEPS), "max_steps 2/2"),
    ],
}
