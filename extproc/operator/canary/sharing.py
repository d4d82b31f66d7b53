"""Shares canary counts: each replica publishes its own in the store, and reports merge all."""
# interpreted: tells operators, not requests

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from time import time

from extproc.errors import LoopguardError, StoreError
from extproc.logs import make_extra
from extproc.operator.canary.pairs import Pair, Pairs
from extproc.operator.canary.states import State, decode_state, encode_state, read_state
from extproc.store import Store
from extproc.store.rules.documents import BOARDS

_LOG = logging.getLogger("loopguard")

_EVERY_SECONDS = 5.0
"""Publishing interval.

A replica that is killed loses up to this much; a draining one publishes first.
"""

KEEP_SECONDS = 86_400.0
"""How long the counts of a replica that has stopped are used."""

_REFRESH_SECONDS = 3_600.0
"""Interval at which unchanged counts are published again, so that they do not expire."""


class Sharing:
    """Publishes this replica's counts, and collects those of all replicas."""

    def __init__(self, pairs: Pairs, store: Store, replica: str) -> None:
        self._pairs = pairs
        self._store = store
        self._replica = replica
        self._published: dict[str, tuple[int, float]] = {}  # by identity: (requests counted, time)
        self._trouble = ""

    async def run(self) -> None:
        """Publish changes until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_SECONDS)
            await self.publish()

    async def publish(self) -> None:
        """Publish changes. A failure is logged once; the next call tries again."""
        try:
            for pair in self._pairs.list_pairs():
                await self._publish_pair(pair)
        except Exception as error:  # noqa: BLE001  # must not affect requests
            self._report(str(error))
        else:
            self._report("")

    async def _publish_pair(self, pair: Pair) -> None:
        identity, now = pair.pairing.identity, time()
        progress = pair.live_counted + pair.compared
        before, at = self._published.get(identity, (0, now))
        if progress == before and now - at < _REFRESH_SECONDS:
            return
        document = encode_state(read_state(pair, now))
        await self._store.documents.put(
            BOARDS, _name_board(pair), self._replica, document, KEEP_SECONDS
        )
        self._published[identity] = progress, now

    def _report(self, trouble: str) -> None:
        if trouble and not self._trouble:
            _LOG.warning(
                "canary counts cannot be shared, each replica has its own",
                extra=make_extra(error=trouble),
            )
        self._trouble = trouble

    async def collect(self) -> dict[str, list[State]]:
        """The counts by replica; this replica's are always current."""
        pairs = self._pairs.list_pairs()
        found = {self._replica: [read_state(pair, time()) for pair in pairs]}
        for pair in pairs:
            try:
                shared = await self._store.documents.read(BOARDS, _name_board(pair))
            except StoreError as error:
                self._report(str(error))
                break
            for replica, state in _decode_all(
                shared.documents if shared is not None else {}
            ).items():
                if replica != self._replica and state.pairing == pair.pairing:
                    found.setdefault(replica, []).append(state)
        return found


def _name_board(pair: Pair) -> str:
    return f"canary:{pair.pairing.identity}"


def _decode_all(documents: Mapping[str, bytes]) -> dict[str, State]:
    """Decode documents; invalid ones, such as those of another version, are logged and left out."""
    states = {}
    for replica, document in documents.items():
        try:
            states[replica] = decode_state(document)
        except LoopguardError as error:
            _LOG.warning(
                "the state of a canary cannot be read",
                extra=make_extra(replica=replica, error=str(error)),
            )
    return states
