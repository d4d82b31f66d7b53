"""Asks a remote store by compare-and-set: reads the keys of questions, applies their rules here, and writes the result.

Questions with equal keys that arrive before their keys have been read are answered by one read and one write. Those whose keys
are in use wait. So only replicas can come into conflict; then the server has written nothing, and answers with newer values, to
which the rules are applied. Nothing else is tried again: a write that was not answered may have counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from extproc.errors import CONFLICT, StoreError
from extproc.metrics import Metrics
from extproc.store.link import blame_bug
from extproc.store.pending import Pending
from extproc.store.pushes import AnyPush
from extproc.store.rules.chain import ChainLink, follow
from extproc.store.rules.change import READ, State
from extproc.store.rules.ring import Push, push_in
from extproc.store.rules.root import RootSearch, search_in
from extproc.store.scripts import ScriptCall, change_call

_MOST: Final = 256
"""Maximum number of questions in one read and write, because the event loop applies their rules at once."""

Ask: TypeAlias = Callable[[ScriptCall], Pending]
"""Adds a call to the next round trip of its server; raises StoreError if that is unavailable."""


def list_keys(pushed: AnyPush) -> tuple[str, ...]:
    """The keys that a question may read or change."""
    if isinstance(pushed, Push):
        return (pushed.key,)
    if isinstance(pushed, RootSearch):
        return (pushed.key, pushed.parent_key)
    return tuple([key for key in (pushed.key, pushed.before, pushed.own, *pushed.parents) if key])


def apply(state: State, pushed: AnyPush, now: int) -> Any:  # noqa: ANN401  # each kind has an answer of its own
    """Answer a question, and change the state."""
    if isinstance(pushed, Push):
        return push_in(state, pushed, now)
    if isinstance(pushed, RootSearch):
        return search_in(state, pushed)
    return follow(state.get, state.put, state.charge, pushed, now)


class _Questions(Pending):
    """Questions of one request that depend on one another, and until when they are tried."""

    __slots__ = ("asked", "deadline", "keys", "now")

    def __init__(self, asked: list[AnyPush], keys: dict[str, None], now: int | None, deadline: float) -> None:
        super().__init__()
        self.asked = asked
        self.keys = keys
        self.now = now
        self.deadline = deadline


class _Exchange:
    """A read and a write.

    Attributes:
        keys: those in use, in their order, the accounts last.
        held: those of them that no other exchange may use.
        questions: answered by it.
        behind: those that wait for its keys.
        joinable: the keys have not been read yet.
    """

    __slots__ = ("behind", "held", "joinable", "keys", "questions")

    def __init__(self, first: _Questions) -> None:
        self.held = first.keys
        accounts = [pushed.usage for pushed in first.asked if isinstance(pushed, ChainLink)]
        self.keys = tuple(dict.fromkeys([*first.keys, *accounts]))
        self.questions = [first]
        self.behind: list[_Questions] = []
        self.joinable = True


class Changes:
    """Questions that are answered by compare-and-set."""

    def __init__(self, ask: Ask, metrics: Metrics, timeout: float) -> None:
        """Send calls by `ask`; a question is tried again for `timeout` seconds."""
        self._ask = ask
        self._metrics = metrics
        self._timeout = timeout
        self._users: dict[str, _Exchange] = {}  # the exchange that uses a key, or behind which a question waits for it

    def push(self, asked: Sequence[AnyPush], now: int | None) -> list[tuple[list[int], Pending]]:
        """Ask; returns the places of questions that depend on one another, and their pending answers.

        Raises:
            StoreError: from the pending answers.
        """
        deadline = asyncio.get_running_loop().time() + self._timeout
        found: list[tuple[list[int], Pending]] = []
        for places, keys in _join([list_keys(pushed) for pushed in asked]):
            questions = _Questions([asked[place] for place in places], keys, now, deadline)
            found.append((places, questions))
            self._enter(questions)
        return found

    def _enter(self, questions: _Questions) -> None:
        """Ask, or wait for keys that are in use."""
        users = self._users
        for key in questions.keys:
            user = users.get(key)
            if user is not None:
                if user.joinable and len(user.questions) < _MOST and questions.keys.keys() <= user.held.keys():
                    user.questions.append(questions)
                    return
                user.behind.append(questions)
                for wanted in questions.keys:
                    users.setdefault(wanted, user)
                return
        exchange = _Exchange(questions)
        for key in questions.keys:
            users[key] = exchange
        self._send(exchange, (len(exchange.keys), READ), None)

    def _send(self, exchange: _Exchange, arguments: tuple[int | bytes, ...], answers: list[Any] | None) -> None:
        """Read, or write what leads to these answers."""
        try:
            reply = self._ask(change_call(exchange.questions[0].asked[0], exchange.keys, arguments))
        except StoreError as error:
            self._finish(exchange, error)
            return
        if reply.done:
            self._take(exchange, answers, reply)
        else:
            reply.then(partial(self._take, exchange, answers, reply))

    def _take(self, exchange: _Exchange, answers: list[Any] | None, reply: Pending) -> None:
        """Process the server's answer: nothing if it has written, else the keys' values and its time."""
        if reply.error is not None:
            self._finish(exchange, reply.error)
            return
        [values] = reply.result()
        if not values:
            self._finish(exchange, None, answers or [])
            return
        try:
            if answers is not None:
                self._drop_late(exchange)
            self._apply(exchange, values)
        except Exception as bug:  # noqa: BLE001  # the callers must get an answer
            self._finish(exchange, blame_bug(bug))

    def _drop_late(self, exchange: _Exchange) -> None:
        """Refuse questions that other replicas have disturbed for too long; nothing of them was counted."""
        now = asyncio.get_running_loop().time()
        late = [questions for questions in exchange.questions if questions.deadline <= now]
        exchange.questions = [questions for questions in exchange.questions if questions.deadline > now]
        self._metrics.store_conflicts.inc(len(late))
        for questions in late:
            questions.settle(None, StoreError("other replicas changed the same state all the time", kind=CONFLICT))

    def _apply(self, exchange: _Exchange, values: list[bytes]) -> None:
        """Answer the questions from these values, and write what changes."""
        exchange.joinable = False
        exchange.questions = [questions for questions in exchange.questions if not questions.done]
        exchange.keys = exchange.keys[: len(values) - 1]  # while a hash slot moves, the first key alone can be had
        state, here = State(dict(zip(exchange.keys, values, strict=False))), int(values[-1])
        answers: list[Any] = []
        now = here
        for questions in exchange.questions:
            now = here if questions.now is None else questions.now
            answers.append([apply(state, pushed, now) for pushed in questions.asked])
        if state.is_changed:
            self._send(exchange, state.list_arguments(now), answers)
        else:
            self._finish(exchange, None, answers)

    def _finish(self, exchange: _Exchange, error: StoreError | None, answers: Sequence[Any] = ()) -> None:
        """Let go of the keys, give the answers or the error, and let those behind enter."""
        users = self._users
        behind = exchange.behind
        for keys in [exchange.held, *[questions.keys for questions in behind]]:
            for key in keys:
                if users.get(key) is exchange:
                    del users[key]
        for questions in behind:
            if not questions.done:
                self._enter(questions)
        for place, questions in enumerate(exchange.questions):
            if error is None:
                questions.settle(answers[place])
            else:
                questions.settle(None, StoreError(str(error), kind=error.kind))


def _join(keys: list[tuple[str, ...]]) -> list[tuple[list[int], dict[str, None]]]:
    """The places of questions that share keys, directly or by way of others, and their keys."""
    joined: list[tuple[list[int], dict[str, None]]] = []
    for place, mine in enumerate(keys):
        places, all_keys, others = [place], dict.fromkeys(mine), []
        for group in joined:
            if group[1].keys().isdisjoint(all_keys):
                others.append(group)
            else:
                places, all_keys = [*group[0], *places], {**group[1], **all_keys}
        joined = [*others, (places, all_keys)]
    return [(sorted(places), keys) for places, keys in joined]
