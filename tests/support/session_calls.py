"""Agents whose number of tool calls is known."""

import json
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from hypothesis import strategies as st

from extproc.metrics import Metrics
from extproc.request.document import Document
from extproc.sessions.history import read_tool_calls
from extproc.store.memory import MemoryStore
from extproc.store.rules.session import Standing, Step
from tests.support.ledger import Asking, limit
from tests.support.turn_writers import SHAPES, Did

LIMITS = limit(tool_calls=300)


Call = tuple[str, dict[str, Any]]


class Move(NamedTuple):
    """A turn of an agent, and what its client sends.

    Attributes:
        calls: tool calls made at once; none repeats the history with new words of the user.
        condensed: number of turns that remain afterwards; -1 for all.
        back: number of turns removed first.
    """

    calls: tuple[Call, ...]
    condensed: int = -1
    back: int = 0


class Client:
    def __init__(  # ways of clients
        self,
        shape: str,
        *,
        ids: str,
        most_turns: int = 10**9,
        first_turns: int = 0,
        seed: int = 0,
        first_id: int = 0,
    ) -> None:
        """Start a conversation.

        Args:
            shape: API.
            ids: `last`, or new ones in each request (`anew`).
            most_turns: number of the newest turns sent,
            first_turns: and of the oldest.
            seed: shuffles calls that were made at once, differently in each request; 0 does not.
            first_id: number of the first id.
        """
        self._shape = shape
        self._ids = ids
        self._most = most_turns
        self._first = first_turns
        self._order = Random(seed) if seed else None
        self._turns: list[Did] = []
        self._number = first_id
        self.made = 0

    def send(self, move: Move) -> bytes:
        del self._turns[len(self._turns) - move.back :]
        if move.calls:
            self._number += 1
            self._turns.append(
                Did(move.calls, tuple("ok" for _ in move.calls), number=self._number)
            )
            self.made += len(move.calls)
        if len(self._turns) > self._first + self._most:
            self._turns = [*self._turns[: self._first], *self._turns[-self._most :]]
        shown = self._turns
        if self._ids == "anew":
            self._number += len(shown)
            shown = [turn._replace(number=self._number + place) for place, turn in enumerate(shown)]
            self._number += len(shown)
        body = SHAPES[self._shape](shown)
        if self._order is not None:
            _shuffle(body, self._order)
        if move.condensed >= 0:
            self._turns = self._turns[len(self._turns) - move.condensed :]
        return json.dumps({**body, "nonce": self._number, "metadata": self.made}).encode()


def _shuffle(value: Any, order: Random) -> None:  # noqa: ANN401  # JSON
    if isinstance(value, dict):
        for item in value.values():
            _shuffle(item, order)
    elif isinstance(value, list):
        kinds = [_is_call(item) for item in value]
        start = 0
        while start < len(value):
            end = start
            while end < len(value) and kinds[end]:
                end += 1
            part = value[start:end]
            order.shuffle(part)
            value[start:end] = part
            start = end + 1
        for item in value:
            _shuffle(item, order)


def _is_call(item: Any) -> bool:  # noqa: ANN401  # JSON
    return isinstance(item, dict) and (
        item.get("type") in ("tool_use", "function_call", "function")
        or bool({"toolUse", "functionCall"} & item.keys())
    )


def follow(
    client: Client, moves: Sequence[Move], ask: Asking, key: str = "session:p::s1:7f"
) -> list[tuple[int, int]]:
    found = []
    for number, move in enumerate(moves, 1):
        standing = ask(make_request(client.send(move), number, key), 1_000 + number)
        found.append((standing.tool_calls, client.made))
    return found


def make_request(body: bytes, number: int, key: str = "session:p::s1:7f") -> Step:
    calls = read_tool_calls(Document(body))
    name = number.to_bytes(8)
    keys = (key, "sessions:p::7f")
    return Step(
        *keys,
        LIMITS,
        name,
        name,
        0,
        calls.records,
        calls.total,
        calls.newest,
        calls.tools,
        (0, 0, 0),
    )


def in_memory() -> Asking:
    store = MemoryStore(Metrics())

    def ask(asked: Any, now: int) -> Standing:  # noqa: ANN401  # a question
        standing: Standing = store.hit([asked], now)[0]
        return standing

    return ask


_CALLS = st.tuples(st.sampled_from(["read", "poll"]), st.sampled_from([{}, {"a": 1}]))


TURNS = st.lists(_CALLS, max_size=3).map(tuple)


MOVES = st.lists(st.builds(Move, TURNS, st.just(-1), st.just(0)), max_size=25)
