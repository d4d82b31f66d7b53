"""Every server, and every way to it, answers any questions as the memory store does."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from extproc.store.pushes import AnyPush
from extproc.store.rules.back_to_back import LEFT_OUT, REFUSED as TURNED_AWAY, End
from extproc.store.rules.documents import KINDS
from extproc.store.rules.root import RootSearch
from extproc.store.rules.session import FAILED, JOINED, REFUSED, SUCCEEDED, WITHDRAWN, move_step
from extproc.store.rules.take_back import CHAIN, LOG, TALLY, TakeBack
from extproc.store.rules.tree import AgentLimits, TreeStep
from tests.doors.store.rules.conftest import SERVERS
from tests.support.back_to_back import make_begin
from tests.support.budgets import NOON, make_breaker, make_bucket, make_period
from tests.support.chains import Sent, make_link, place_link
from tests.support.examples import examples
from tests.support.ledger import limit, make_step, repeat, settle_step
from tests.support.records import replace
from tests.support.servers import Driver
from tests.support.windows import WINDOW_TYPES, make_hit, make_push

_DIGITS = ("00", "55", "aa")
"""The ends of three callers' keys, which a cluster has on three primaries."""

_LIMITS = limit(
    steps=6, tool_calls=9, cost=60, threshold=3, window=5, blocks=3, errors=2, max_sessions=1
)
_AGENTS = AgentLimits(depth=2, agents=3, concurrent=2)
_ROOT_MS = 10**9
"""Longer than any example lasts, because a server forgets roots by its own clock."""

_OUTCOMES = (SUCCEEDED, FAILED, REFUSED, WITHDRAWN, JOINED)


class _Player:
    """Asks a store; what became of earlier requests is asked about later."""

    def __init__(self, store: Driver) -> None:
        self._store = store
        self._open: list[Any] = []
        self._shown: tuple[str, ...] = ()
        self.moves: dict[str, Callable[[int, int, int, int], Any]] = {
            "request": self._request,
            "agent": self._agent,
            "settle": self._settle,
            "fail": self._fail,
            "begin": self._begin,
            "push": self._push,
            "document": self._write,
        }

    def _ask(self, asked: list[Any], now: int) -> list[Any]:
        return list(self._store.settled(lambda store: store.hit(asked, now)))

    def _name(self, name: str, who: int) -> str:
        return self._store.name(f"{name}:{_DIGITS[who]}")

    def _make_search(self, agent: bytes, parent: bytes, who: int) -> RootSearch:
        own, above = self._name(f"root:{agent.hex()}", who), self._name(f"root:{parent.hex()}", who)
        return RootSearch(own, above, parent, _ROOT_MS)

    def _request(self, number: int, who: int, amount: int, now: int) -> list[Any]:
        shape: dict[str, Any] = {
            "threshold": 2,
            "cooldown_ms": (0, 3_000, 0)[who],
            "count_refused": who != 1,
            "count_to": 4,
        }
        hit = make_hit(WINDOW_TYPES[who], key=self._name("hit", who), **shape)
        step = make_step(number, _LIMITS, repeat(amount, "read", "list"), reserve=amount)
        step = replace(step, key=self._name("session", who), caller=self._name("caller", who))
        takes = [
            replace(
                (make_bucket, make_breaker)[amount % 2](amount),
                key=self._name(f"budget{amount % 2}", who),
            )
        ]
        takes.append(replace(make_period(amount, limit=30), key=self._name("period", who)))
        answers = self._ask([hit, step, *takes], now)
        self._open.append(settle_step(step, _OUTCOMES[number % 5], amount * 3))
        for take, taken in zip(takes, answers[2:], strict=True):
            if taken.granted:
                settled = take.settle(amount - 2, taken.start)
                self._open.append(
                    replace(
                        settled, marker=self._name(f"settled{number}", who) if number % 3 else ""
                    )
                )
        return answers

    def _agent(self, number: int, who: int, amount: int, now: int) -> list[Any]:
        agent, parent = (number % 5 + 1).to_bytes(8), (amount + 1).to_bytes(8)
        search = self._make_search(agent, parent, who)
        tree = TreeStep(self._name(f"tree:{parent.hex()}", who), _AGENTS, agent, parent)
        step = make_step(number, _LIMITS, search=search, tree=tree)
        step = replace(
            step, key=self._name(f"session:{parent.hex()}", who), caller=self._name("caller", who)
        )
        answers = self._ask([step], now)
        self._open.append(settle_step(move_step(step, answers[0].root), SUCCEEDED, amount))
        return answers

    def _settle(self, _: int, __: int, amount: int, now: int) -> list[Any]:
        return self._ask([self._open[-amount % len(self._open)]], now) if self._open else []

    def _fail(self, _: int, who: int, __: int, now: int) -> list[Any]:
        link = place_link(
            self._store, make_link(Sent("u", self._shown, "entry  0"), caller=_DIGITS[who])
        )
        return self._ask(
            [TakeBack(self._name("hit", who), (TALLY, LOG, TALLY)[who]), TakeBack(link.key, CHAIN)],
            now,
        )

    def _begin(self, number: int, who: int, amount: int, now: int) -> list[Any]:
        """A request that begins, and the end of another, which may come later or again."""
        begun = make_begin(number + 1, key=self._name("run", who), cooldown_ms=(0, 3_000, 0)[who])
        lasted = (amount * 400, LEFT_OUT, TURNED_AWAY)[number % 3]
        self._open.append(End(begun.key, begun.name, lasted, begun.window_ms))
        return self._ask([begun], now)

    def _push(self, number: int, who: int, amount: int, now: int) -> Any:  # noqa: ANN401  # answers
        self._shown = (*self._shown, "ab"[amount % 2])[:amount]
        link = make_link(Sent("u", self._shown, f"entry {amount % 2:2}"), caller=_DIGITS[who])
        asked: list[AnyPush] = [
            make_push(str(number), str(amount), key=self._name("ring", who)),
            place_link(self._store, link._replace(fresh=number.to_bytes(8))),
            self._make_search((number % 5).to_bytes(8), amount.to_bytes(8), who),
        ]
        return list(self._store.settled(lambda store: store.push(asked, now)))

    def _write(self, number: int, who: int, amount: int, now: int) -> Any:  # noqa: ANN401  # answers
        kind, subject = list(KINDS)[number % 2], self._store.name(f"subject{who}")
        if number % 3:
            return self._store.put(kind, subject, str(amount), bytes((number,)), amount * 10, now)
        dropped = self._store.run(self._store.store.documents.drop(kind, subject, str(amount), now))
        return dropped, self._store.read(kind, subject, now)


_MOVES = st.sampled_from(
    [
        *["request", "request", "agent", "settle", "settle", "fail", "push", "push", "document"],
        *["begin", "begin"],
    ]
)


@pytest.mark.parametrize("name", SERVERS)
@settings(max_examples=examples(60))
@given(
    moves=st.lists(
        st.tuples(
            _MOVES,
            st.integers(0, 2),
            st.integers(0, 4),
            st.integers(0, 3_000) | st.sampled_from([60_000, 600_000]),
        ),
        min_size=10,
        max_size=50,
    )
)
def test_every_server_answers_as_memory_does(
    drivers: Callable[[str], Driver], name: str, moves: Sequence[tuple[str, int, int, int]]
) -> None:
    players, now = [_Player(drivers(store).fresh()) for store in ("memory", name)], NOON

    for number, (move, who, amount, gap) in enumerate(moves):
        now += gap
        expected, found = [player.moves[move](number, who, amount, now) for player in players]
        assert found == expected, (number, move)


@pytest.mark.parametrize("name", SERVERS)
def test_concurrent_requests_count_once_each(drivers: Callable[[str], Driver], name: str) -> None:
    store = drivers(name).fresh()

    async def ask_all() -> list[Any]:
        async def push(number: int) -> Any:  # noqa: ANN401  # entries
            pushed = make_push(str(number), size=50)
            placed = pushed._replace(key=store.key(pushed))
            return await store.later(lambda on: on.push([placed]))

        return await asyncio.gather(
            *map(push, range(50)), *(store.ask([make_hit()], 5) for _ in range(1_000))
        )

    found = store.run(ask_all())

    assert sorted(len(entries) for (entries,) in found[:50]) == list(range(1, 51))
    assert sorted(answer.count for (answer,) in found[50:]) == list(range(1, 1_001))
