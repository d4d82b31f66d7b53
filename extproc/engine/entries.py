"""Whether Envoy's access log entries arrive. Without them, `back_to_back` counts nothing.

Until the first entry arrives, and again after entries have stopped, detectors with
`only_without_entries` act. Entries of a replica's requests may go to another replica, so replicas
tell each other that entries arrive (see `ReplicaWatch`).
"""

from __future__ import annotations

from typing import Final

STOPPED_SECONDS: Final = 120.0
_ENOUGH: Final = 10
"""Entries have stopped if this many requests began in STOPPED_SECONDS without one; a few may be
long."""

_FRESH_SECONDS: Final = 10.0


class Entries:
    """What one replica knows; times in seconds of a clock that never goes back.

    Attributes:
        arrive: entries arrive, here or at another replica.
    """

    def __init__(self) -> None:
        self.arrive = False
        self._waiting = 0  # requests that have begun since the last entry
        self._since = 0.0  # when the first of them began
        self._own_at = float("-inf")

    def note_begun(self, now: float) -> bool:
        """Note a request that an entry is to report; returns whether entries have stopped."""
        if not self._waiting:
            self._since = now
        self._waiting += 1
        stopped = self._waiting >= _ENOUGH and now - self._since >= STOPPED_SECONDS
        if stopped:
            self.arrive = False
        return stopped

    def note_entry(self, now: float, *, own: bool = True) -> None:
        """Note that an entry has arrived, here or at another replica."""
        self.arrive, self._waiting = True, 0
        if own:
            self._own_at = now

    def is_fresh(self, now: float) -> bool:
        """Whether an entry arrived here recently."""
        return now - self._own_at < _FRESH_SECONDS
