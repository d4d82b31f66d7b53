"""Records the outcome of the marked requests of `loopguard check-envoy --probe`.

Marks are only recorded while an operator follows their probe, and have no other effect, so sending
one gains a client nothing.
"""

# interpreted: notes the requests of `check-envoy --probe`

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any, Final

from extproc.engine.exchange import Exchange
from extproc.request.http import HttpRequest

PROBE_HEADER: Final = "x-loopguard-probe"
"""`ID.NUMBER`: the probe's id and the request's number."""

_SECONDS: Final = 600
_MOST_PROBES: Final = 8
_MOST_MARKS: Final = 5_000
_LONGEST_MARK: Final = 64


class Probes:
    """The probes that operators follow.

    Attributes:
        open: whether there are any. Otherwise, requests are not examined.
    """

    def __init__(self) -> None:
        self.open = False
        self._seen: dict[str, dict[str, dict[str, Any]]] = {}  # by probe and mark
        self._ends: dict[str, float] = {}

    def follow(self, probe: str) -> dict[str, dict[str, Any]]:
        """The outcomes of a probe's requests, by mark.

        Extends the recording to ten minutes from now. Thread-safe.
        """
        now = monotonic()
        for name, end in list(self._ends.items()):
            if end <= now or (
                probe not in self._ends
                and len(self._ends) >= _MOST_PROBES
                and end == min(self._ends.values())
            ):
                self._ends.pop(name, None)
                self._seen.pop(name, None)
        self._ends[probe] = now + _SECONDS
        seen = self._seen.setdefault(probe, {})
        self.open = True
        return {mark: dict(found) for mark, found in seen.copy().items()}

    def note_match(self, request: HttpRequest, policies: Sequence[str]) -> None:
        """Note the policies that match a request, if it belongs to a probe."""
        mark = request.read_header(PROBE_HEADER)
        seen = self._find(mark)
        if seen is not None and (mark in seen or len(seen) < _MOST_MARKS):
            seen[mark] = {"matched": list(policies), "counted": [], "left_out": {}}

    def note(self, exchange: Exchange) -> None:
        """Note which policies counted a probe's request, and why others did not."""
        mark = exchange.request.read_header(PROBE_HEADER)
        seen = self._find(mark)
        found = seen.get(mark) if seen is not None else None
        if found is None:
            return
        for group in exchange.groups:
            counted = {candidate.plan.id for candidate in group.active}
            found["counted"] = [*found["counted"], *sorted(counted - {*found["counted"]})]
        found["left_out"] = {**found["left_out"], **dict(exchange.list_uncounted())}

    def _find(self, mark: str) -> dict[str, dict[str, Any]] | None:
        """The recorded requests of a mark's probe; None if no operator follows it."""
        probe = mark.partition(".")[0]
        if not mark or len(mark) > _LONGEST_MARK or self._ends.get(probe, 0.0) <= monotonic():
            self.open = any(end > monotonic() for end in list(self._ends.values()))
            return None
        return self._seen.get(probe)
