"""Runs recorded requests through the engine and a memory store with the log's clock."""

from __future__ import annotations

from collections.abc import Sequence

from extproc.cli.replay.records import Recorded
from extproc.decision import Action, Decision
from extproc.engine.counting import HERE, Counting, Counts
from extproc.engine.engine import Engine
from extproc.engine.exchange import Exchange, Guards
from extproc.metrics import Metrics
from extproc.request.document import NotCounted
from extproc.request.hash_key import PROCESS_KEY, HashKey, RecordedKey
from extproc.request.http import HttpRequest, explain_unknowable_body
from extproc.store.memory import MemoryStore
from extproc.store.rules.session import REFUSED


class Judge:
    """Decides about requests one by one.

    Counts unmatched requests, and those that a kill switch stops.
    """

    def __init__(
        self,
        engine: Engine,
        max_entries: int,
        key: HashKey = PROCESS_KEY,
        pinned: Sequence[str] = (),
    ) -> None:
        """Start with an empty store; `pinned` policies judge all requests."""
        self.unmatched = self.killed = 0
        self._engine = engine
        self._pinned = pinned
        self._key = key
        self._recorded_key = RecordedKey(key.secret)
        self._metrics = Metrics()
        self._now = 0  # by the log
        self._store = MemoryStore(self._metrics, max_entries, lambda: self._now)
        self._counting = Counting(self._store, self._store, self._metrics, reject=False)

    @property
    def evictions(self) -> int:
        """The number of live fingerprints dropped at capacity, which makes counts too low."""
        return int(self._metrics.registry.get_sample_value("loopguard_store_evictions_total") or 0)

    def judge(self, recorded: Recorded) -> tuple[Exchange, Decision] | None:
        """Decide about the next request; None if no policy matches or a kill switch stops it."""
        request = recorded.make_request()
        if self._is_killed(request, recorded.time):
            self.killed += 1
            return None
        exchange = self._prepare(recorded, request)
        if exchange is None:
            self.unmatched += 1
            return None
        decision = exchange.decide(self._count(exchange.enforcing), self._count(exchange.shadow))
        # A refused request gives back what it took from sessions and budgets; a shadow refusal,
        # from shadow budgets.
        if decision.action is Action.REJECT or exchange.enforcing.forbidden is not None:
            self._counting.give_back(exchange.sessions, exchange.budgets, REFUSED)
        else:
            self._counting.join_sessions(exchange.sessions)
            if decision.shadow is not None and decision.shadow.action is Action.REJECT:
                self._counting.give_back((), exchange.shadow.budgets, REFUSED)
        return exchange, decision

    def _prepare(self, recorded: Recorded, request: HttpRequest) -> Exchange | None:
        """Prepare a request for counting; None if no policy matches."""
        key = self._recorded_key if recorded.partial else self._key
        exchange = self._engine.prepare(request, pinned=self._pinned, key=key)
        if exchange is None:
            return None
        self._now = recorded.time
        content = recorded.content
        if content is None:
            exchange.read_body(recorded.sums, recorded.unknown, None, "no_body")
            return exchange
        # Partial records lack these headers; they were read during recording.
        reason = (
            explain_unknowable_body(exchange.request)
            if exchange.needs_body and not recorded.partial
            else ""
        )
        exchange.read_body(None if reason else exchange.sum_up(content), reason, content)
        return exchange

    def _is_killed(self, request: HttpRequest, time: int) -> bool:
        try:
            return self._engine.find_switch(request, time / 1000) is not None
        except NotCounted:
            # The switch needs a value that was not recorded; killed requests never are
            return False

    def _count(self, group: Guards) -> Counts:
        counts = self._counting.count(group)
        if not isinstance(counts, HERE):
            raise TypeError("counts in memory are there at once")
        return counts
