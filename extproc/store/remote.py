"""A store on servers: shards, and refusals that need no round trip.

- **Shards.** Each server has a share of the keys, and its own health. While one is unavailable,
  only its keys cannot be counted; a call with keys of several shards gets the answers of the
  others.
- **Known refusals.** See `known_refusals`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from extproc.errors import PartlyAwayError, StoreError
from extproc.metrics import Metrics
from extproc.store.backend import RedisBackend, find_part
from extproc.store.care import classify_persistence, read_setting
from extproc.store.known_refusals import KnownRefusals
from extproc.store.link import RedisReply
from extproc.store.pending import Pending
from extproc.store.pushes import AnyPush
from extproc.store.remote_documents import RemoteDocuments
from extproc.store.rules.back_to_back import Begin
from extproc.store.rules.budget import Take
from extproc.store.rules.chain import Trail
from extproc.store.rules.session import Question, Settlement, Step
from extproc.store.rules.take_back import TakeBack
from extproc.store.rules.windows import Count, Hit
from extproc.store.scripts import (
    CountAnswer,
    ScriptCall,
    count_call,
    interval_call,
    push_call,
    session_call,
    take_back_call,
    take_call,
)
from extproc.store.shard import Finish, Shard
from extproc.store.side_connections import SideConnections
from extproc.store.topology import Layout, ShardServers

_MOST_SHOWN = 3


class _JoinedAnswers(Pending):
    """The answers of several shards."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self._answers: list[Any] = [None] * calls
        self._parts: list[Pending] = []
        self._away = 0
        self._lost: StoreError | None = None

    def add(self, positions: list[int], part: Pending) -> None:
        self._away += 1
        self._parts.append(part)
        part.then(partial(self._take, positions, part))

    def miss(self, error: StoreError) -> None:
        """Note that a shard failed."""
        self._lost = self._lost or error

    def cancel(self) -> None:
        """See `Pending`."""
        super().cancel()
        for part in self._parts:
            part.cancel()

    def _take(self, positions: list[int], part: Pending) -> None:
        self._away -= 1
        if part.error is not None:
            self.miss(part.error)
        else:
            for position, answer in zip(positions, part.result(), strict=True):
                self._answers[position] = answer
        if self._away:
            return
        if self._lost is None:
            self.settle(self._answers)
        elif any(answer is not None for answer in self._answers):
            self.settle(
                None, PartlyAwayError(str(self._lost), kind=self._lost.kind, answers=self._answers)
            )
        else:
            self.settle(None, self._lost)


class RemoteStore:
    """A store on servers that share the keys; see `Store`."""

    def __init__(
        self, layout: Layout, prefix: str, metrics: Metrics, timeout: float, *, whole: bool = False
    ) -> None:
        """Start without connections.

        Every key begins with `prefix`, and a request waits at most `timeout` seconds. With `whole`,
        a request is not counted at all while one of its shards is known to be unavailable, because
        it will be refused.
        """
        self._layout = layout
        self._prefix = prefix
        self._side_connections = SideConnections(layout, prefix)
        self.documents = RemoteDocuments(self._side_connections, self._check_side)
        self._metrics = metrics
        self._timeout = timeout
        self._whole = whole
        self._shards: dict[str, Shard] = {}
        self._by_part: list[Shard] = []
        self._retiring: set[asyncio.Task[None]] = set()
        self._known_refusals = KnownRefusals(self._settle)
        self._finish: Finish = self._learn  # looking up a method makes a new object each time
        self._seen = -1
        self._assign()
        self._only = self._by_part[0] if len(self._by_part) == 1 else None

    @property
    def tags(self) -> Sequence[str]:
        """Hash tags over which keys are spread; empty for a single server."""
        return self._layout.tags

    async def start(self) -> None:
        """Try each server once, so that a wrong address or password is reported now."""
        tried: list[Shard] = []
        while new := [shard for shard in self._shards.values() if shard not in tried]:
            tried += new
            await asyncio.gather(*[shard.start() for shard in new])
            self._assign()

    def hit(
        self, hits: Sequence[Question], now: int | None = None
    ) -> list[Any] | Awaitable[list[Any]]:
        """Count every hit once; answers at once if the verdict is certain.

        Raises:
            StoreError: no server counts any of them. If only some do, the awaitable raises
                PartlyAwayError.
        """
        # All of a request or nothing. Settlements and take-backs are always sent.
        if self._whole and self._only is None:
            for question in hits:
                if isinstance(question, Hit | Step | Begin) or (
                    isinstance(question, Take) and not question.settles
                ):
                    self._find(question.key).check_open()
        if now is not None:
            return self._ask(
                self._join_takes([self._make_call(hit, now) for hit in hits], now), _take_answers
            )
        if not self._known_refusals.knows_any:
            return self._ask(
                self._join_takes([self._make_call(hit, None) for hit in hits], None), self._finish
            )
        known = [self._known_refusals.answer(hit) if isinstance(hit, Hit) else None for hit in hits]
        asked = self._join_takes(
            [self._make_call(hit, None) for place, hit in enumerate(hits) if known[place] is None],
            None,
        )
        if not asked:
            return known
        counts = self._ask(asked, self._finish)
        return counts if len(asked) == len(hits) else _merge(known, counts)

    def push(
        self, pushes: Sequence[AnyPush], now: int | None = None
    ) -> Sequence[Sequence[bytes] | Trail] | Awaitable[Sequence[Sequence[bytes] | Trail]]:
        """Push every entry once; raises StoreError as `hit` does."""
        return (
            self._ask([push_call(pushed, now) for pushed in pushes], lambda _, answers: answers)
            if pushes
            else []
        )

    async def share_secret(self, name: str, secret: bytes) -> bytes:
        """See `Store`."""
        self._check_side(name)
        key = self._side_connections.name_key("secret", name)
        _, found = await self._side_connections.ask(
            name, [("SET", key, secret, "NX"), ("GET", key)]
        )
        if not isinstance(found, bytes) or len(found) != len(secret):
            raise StoreError(
                f"the value of {key} is not a secret of {len(secret)} bytes", kind="response"
            )
        return found

    async def share_marks(self, mark: bytes) -> dict[str, bytes]:
        """See `KeepingStore`."""
        return {
            name: await self.share_secret(name, mark)
            for name in self._side_connections.list_subjects("epoch")
        }

    async def read_persistence(self) -> list[str]:
        """See `KeepingStore`; `unknown` for a server whose user may not ask."""
        found = []
        for name in self._side_connections.list_subjects("epoch"):
            self._check_side(name)
            info = await self._ask_server(name, "INFO", "persistence")
            points = await self._ask_server(name, "CONFIG", "GET", "save")
            found.append(
                classify_persistence(
                    info.decode() if isinstance(info, bytes) else "", read_setting(points)
                )
            )
        return found

    async def _ask_server(self, subject: str, *command: str) -> RedisReply:
        """The reply of the subject's server to a command; None if it rejects the command."""
        try:
            [reply] = await self._side_connections.ask(subject, [command])
        except StoreError as error:
            if error.kind in ("connection", "timeout"):
                raise
            return None
        return reply

    def health(self) -> str:
        """`ok`, or a description of the trouble."""
        owners = dict.fromkeys(self._layout.owners)
        away = [
            shard
            for name, shard in self._shards.copy().items()
            if name in owners and shard.trouble is not None
        ]
        if not away:
            return "ok"
        if len(away) == len(owners):
            return f"unavailable: {away[0].trouble}"
        shown = "; ".join([f"{shard.name}: {shard.trouble}" for shard in away[:_MOST_SHOWN]])
        return f"{len(away)} of {len(owners)} shards unavailable: {shown}"

    async def close(self) -> None:
        """Report refusals that were counted here, then drop the connections."""
        self._known_refusals.close()
        await asyncio.gather(*[shard.close() for shard in self._shards.values()], *self._retiring)
        await self._layout.close()

    def _assign(self) -> None:
        """Open a shard for each server that has keys, and retire shards without keys."""
        self._seen = self._layout.changes
        owners, metrics = self._layout.owners, self._metrics
        for name in dict.fromkeys(owners):
            if name not in self._shards:
                self._shards[name] = self._open(name, alone=len(owners) == 1)
        self._by_part = [self._shards[name] for name in owners]
        for name in [name for name in self._shards if name not in owners]:
            shard = self._shards.pop(name)
            metrics.store_up.remove(shard.name)
            retiring = asyncio.get_running_loop().create_task(shard.retire())
            self._retiring.add(retiring)
            retiring.add_done_callback(self._retiring.discard)
        for shard in self._shards.values():
            shard.sharing = len(self._shards)

    def _open(self, name: str, *, alone: bool) -> Shard:
        backend = RedisBackend(ShardServers(self._layout, name), self._prefix)
        shard = Shard(name, backend, self._metrics, self._timeout, self._forget_told, alone=alone)
        self._metrics.store_up.labels(shard.name).set_function(lambda: float(shard.trouble is None))
        return shard

    def _find(self, key: str) -> Shard:
        return self._list_shards()[find_part(key, len(self._layout.tags))]

    def _check_side(self, subject: str) -> None:
        self._list_shards()[self._side_connections.find_part(subject)].check_open()

    def _list_shards(self) -> list[Shard]:
        if self._layout.changes != self._seen:
            self._assign()
        return self._by_part

    def _forget_told(self, lost: Shard) -> None:
        self._known_refusals.forget_told(lambda key: self._find(key) is lost)

    def _ask(self, calls: list[ScriptCall], finish: Finish) -> Pending:
        """Add calls to the next round trip of each shard; raises StoreError if all are down."""
        if self._only is not None:
            return self._only.ask(calls, finish)
        shares: dict[Shard, list[int]] = {}
        for position, call in enumerate(calls):
            shares.setdefault(self._find(call.subject.key), []).append(position)
        if len(shares) == 1:
            return next(iter(shares)).ask(calls, finish)
        joined, lost = _JoinedAnswers(len(calls)), 0
        for shard, positions in shares.items():
            try:
                joined.add(
                    positions, shard.ask([calls[position] for position in positions], finish)
                )
            except StoreError as error:
                joined.miss(error)
                lost += 1
                if lost == len(shares):
                    raise
        return joined

    def _settle(self, hit: Hit, times: int) -> None:
        with suppress(StoreError):  # keys that cannot be counted owe nothing
            self._ask([count_call(hit, 0, None, times)], self._finish)

    def _make_call(self, asked: Question, now: int | None) -> ScriptCall:
        if isinstance(asked, Hit):
            return count_call(asked, 1, now, self._known_refusals.take_owed(asked))
        if isinstance(asked, Take):
            return take_call(asked, now)
        if isinstance(asked, Step | Settlement):
            return session_call(asked, now)
        return take_back_call(asked) if isinstance(asked, TakeBack) else interval_call(asked, now)

    def _join_takes(self, calls: list[ScriptCall], now: int | None) -> list[ScriptCall]:
        """Group the takes in each hash slot. Takes are the last calls."""
        # One take is a group
        if len(calls) < 2 or not isinstance(calls[-2].subject, Take):  # noqa: PLR2004
            return calls
        tags = len(self._layout.tags)
        begun: set[int] = set()
        for place, call in enumerate(calls):
            if isinstance(call.subject, Take) and not call.subject.settles:
                part = find_part(call.subject.key, tags)
                if part in begun:
                    calls[place] = take_call(call.subject, now, joined=True)
                begun.add(part)
        return calls

    def _learn(self, calls: list[ScriptCall], answers: list[Any]) -> list[Any]:
        for place, call in enumerate(calls):
            answer, subject = answers[place], call.subject
            if isinstance(answer, CountAnswer) and isinstance(subject, Hit):
                self._known_refusals.learn(subject, answer.answer, answer.stands_ms, call.owed)
                answers[place] = answer.answer
        return answers


def _take_answers(_: list[ScriptCall], answers: list[Any]) -> list[Any]:
    for place, answer in enumerate(answers):
        if isinstance(answer, CountAnswer):
            answers[place] = answer.answer
    return answers


async def _merge(known: list[Count | None], asked: Awaitable[list[Any]]) -> list[Any]:
    try:
        fresh = iter(await asked)
    except PartlyAwayError as error:
        fresh = iter(error.answers)
        error.answers = [answer if answer is not None else next(fresh) for answer in known]
        raise
    return [answer if answer is not None else next(fresh) for answer in known]
