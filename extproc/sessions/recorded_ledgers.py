"""A store in memory in which sessions have spent what they had spent live when each request came."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from extproc.metrics import Metrics
from extproc.sessions.call_digests import UNKNOWN, KnownLedger, ShownCalls
from extproc.store.memory import MemoryStore
from extproc.store.rules.session import KILLED_BY_ERRORS, Ledger, Limits, Standing, Step


class RecordedStore(MemoryStore):
    """The `memory://` store, which is told what live ledgers said, because a log does not show how requests ended."""

    def __init__(self, metrics: Metrics, max_entries: int, clock: Callable[[], int]) -> None:
        """See `MemoryStore`."""
        super().__init__(metrics, max_entries, clock)
        self._known: dict[bytes, KnownLedger] = {}

    def expect(self, shapes: Mapping[bytes, bytes], shown: ShownCalls | None) -> None:
        """Take what was recorded of the next request; `shapes` are those of its sessions' guards, by the request's name."""
        ledgers = shown.ledgers if shown is not None else {}
        self._known = {call: ledgers[shape] for call, shape in shapes.items() if call and shape in ledgers}

    def _step(self, asked: Step, now: int) -> Standing:
        known = self._known.pop(asked.call, None)
        if known is not None and known.cost != UNKNOWN:
            key = asked.shared if known.shared else asked.key
            ledger = self._take_ledger(key, asked.limits, now)
            if ledger is not None:
                _restore(ledger, known, asked.limits)
                self._keep_ledger(key, ledger, now)
        return super()._step(asked, now)


def _restore(ledger: Ledger, known: KnownLedger, limits: Limits) -> None:
    """Set what depends on how earlier requests ended."""
    ledger.open = []
    ledger.cost, ledger.reserved, ledger.consecutive_errors = known.cost, known.reserved, known.errors
    if not ledger.killed and 0 <= limits.errors <= max(known.errors, known.ended):
        ledger.killed = KILLED_BY_ERRORS
