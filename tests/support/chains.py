"""Conversations of one caller that no header tells apart, with their true beginnings."""

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from hypothesis import strategies as st

from extproc.detectors.chain import ChainPlace, Spoken
from extproc.sessions.names import Chains
from extproc.store.rules.chain import ChainLink, Trail, follow
from tests.support.servers import Driver

CHAINS = Chains("p", 3_600, namespace="")


class Sent(NamedTuple):
    """The user's first words, the assistant's turns (messages joined by "+"), the newest entry."""

    first: str
    shown: tuple[str, ...]
    entry: str


def make_link(
    sent: Sent, *, caller: str = "00", session: str = "", chains: Chains = CHAINS, **changes: int
) -> ChainLink:
    turns = [Spoken([_widen(message) for message in turn.split("+")], []) for turn in sent.shown]
    place = ChainPlace(_widen(sent.first) if sent.first else b"", turns)
    entry = sent.entry.encode() if sent.shown else b""
    return chains.make_link("default", "", caller, session, place, entry)._replace(**changes)  # type: ignore[arg-type]  # its fields


def _widen(text: str) -> bytes:
    return text.encode().ljust(16, b"\0")


class Model:
    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def ask(self, link: ChainLink, now: int = 0) -> Trail:
        return follow(self.values.get, self._put, link, now)

    def _put(self, key: str, value: bytes, _life: int) -> None:
        self.values[key] = value


class Run:
    def __init__(self, task: str, turns: Sequence[tuple[str, str]], window: int = 0) -> None:
        self.task = task
        self.turns = list(turns)
        self.window = window
        self.at = 0

    @property
    def done(self) -> bool:
        return self.at > len(self.turns)

    def send(self) -> tuple[Sent, list[bytes]]:
        """The next request, and the entries of all turns so far, oldest first."""
        past = self.turns[: self.at]
        self.at += 1
        shown = tuple(message for message, _ in past)
        if self.window:
            shown = shown[-self.window :]
        entries = [entry.encode() for _, entry in past][-32:]
        return Sent(self.task, shown, past[-1][1] if past else ""), entries


def interleave(
    runs: Sequence[Run], how: str, random: Random
) -> list[tuple[Run, Sent, list[bytes]]]:
    """The requests of all runs: one by one (`sequential`), in turn (`lockstep`) or mixed."""
    sent = []
    left = list(runs)
    number = 0
    while left:
        place = (
            0
            if how == "sequential"
            else number % len(left)
            if how == "lockstep"
            else random.randrange(len(left))
        )
        run = left[place]
        sent.append((run, *run.send()))
        number += 1
        if run.done:
            left.remove(run)
            number -= 1
    return sent


_MESSAGES = st.sampled_from(["a", "b", "a+b", "b+a+c"])
_SENT = st.builds(
    Sent,
    st.sampled_from(["u", "v", ""]),
    st.lists(_MESSAGES, max_size=5).map(tuple),
    st.sampled_from(["x", "y", "z" * 64]),
)
# Requests of a caller, each with the milliseconds since the one before.
STEPS = st.lists(
    st.tuples(_SENT, st.integers(0, 50) | st.integers(0, 130_000) | st.integers(-900_000, 900_000)),
    max_size=40,
)


KEYS = ("key", "before", "own", "answer", "usage")


def place_link(store: Driver, link: ChainLink) -> ChainLink:
    changes: dict[str, Any] = {
        name: store.name(getattr(link, name)) for name in KEYS if getattr(link, name)
    }
    return link._replace(parents=tuple(store.name(parent) for parent in link.parents), **changes)


def ask_store(store: Driver, link: ChainLink, now: int) -> Trail:
    placed = place_link(store, link)
    found: Trail = store.settled(lambda on: on.push([placed], now))[0]
    return found
