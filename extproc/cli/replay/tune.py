"""What other windows and thresholds of one detector would have done to recorded traffic, in one pass.

Fingerprints depend on neither, so the engine matches and compares each request once, and counts it once for each window. If a
threshold affects counts, because of a cooldown or because refused requests do not count, requests are counted for each pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from extproc.cli.replay.advice import write_detector
from extproc.cli.replay.judge import Replayed
from extproc.cli.replay.records import Recorded
from extproc.engine.candidates import Candidate, LoopCandidate
from extproc.engine.engine import Engine
from extproc.operator.sketch import Sketch
from extproc.policy.bundle import Policy
from extproc.request.hash_key import PROCESS_KEY, HashKey
from extproc.store.rules.windows import Hit

FEWEST_REQUESTS = 1_000
FEWEST_TENANTS = 20
"""With fewer, a recommendation comes with a warning."""

_KEPT = 1_024


class WindowPair(NamedTuple):
    """A window and a threshold, the number of requests that they would have acted on, and the number of their tenants."""

    window_seconds: int
    threshold: int
    requests: int
    tenants: int


class Recommendation(NamedTuple):
    """The recommended pair, or None, and why."""

    pair: WindowPair | None
    reason: str


class _Cell:
    """What one pair would have done so far."""

    def __init__(self) -> None:
        self.requests = 0
        self.tenants = Sketch(size=_KEPT)


class Sweep(Replayed):
    """Counts one detector's requests for all pairs; `uncounted` is the number of those of its policy that it cannot count."""

    def __init__(  # noqa: PLR0913  # what is tried, and with what
        self,
        engine: Engine,
        target: tuple[str, str],
        windows: Sequence[int],
        thresholds: Sequence[int],
        max_entries: int,
        key: HashKey = PROCESS_KEY,
    ) -> None:
        """Start with an empty store, whose entries all windows share; `target` is a policy and its detector."""
        super().__init__(engine, max_entries, key)
        self.requests = self.uncounted = 0
        self.tenants = Sketch(size=4 * _KEPT)
        self._target = target
        self._windows = windows
        self._thresholds = thresholds
        self._cells = {(window, threshold): _Cell() for window in windows for threshold in thresholds}

    def add(self, recorded: Recorded) -> None:
        """Count one request."""
        evaluation = self._prepare(recorded, recorded.make_request(), self._read_digests(recorded))
        if evaluation is None:
            return
        candidates = [each for group in evaluation.groups for each in group.candidates if isinstance(each, LoopCandidate)]
        found = [each for each in candidates if (each.plan.id, each.detector.name) == self._target]
        for candidate in found:
            self.requests += 1
            self.tenants.add(candidate.tenant)
            if isinstance(candidate.hit, Hit):
                self._count(candidate, candidate.hit)
        if not found and any(plan.id == self._target[0] for plan in evaluation.plans):
            self.uncounted += 1

    def _count(self, candidate: Candidate, hit: Hit) -> None:
        own = candidate.subject.threshold  # a tool's own threshold, which is not varied
        for window in self._windows:
            if hit.cooldown_ms or not hit.count_refused:
                acted = [self._ask(hit, window, own or threshold)[1] for threshold in self._thresholds]
            else:
                count, _ = self._ask(hit, window, self._thresholds[-1])
                acted = [count >= (own or threshold) for threshold in self._thresholds]
            for threshold, looping in zip(self._thresholds, acted, strict=True):
                if looping:
                    cell = self._cells[window, threshold]
                    cell.requests += 1
                    cell.tenants.add(candidate.tenant)

    def _ask(self, hit: Hit, window: int, threshold: int) -> tuple[int, bool]:
        """Count a request under the pair's own key; returns the count, and whether the store sees a loop."""
        key = f"{hit.key}:{window}:{threshold}"
        count_to = max(hit.count_to, threshold)
        asked = Hit(key, hit.window_type, window * 1000, threshold, hit.cooldown_ms, hit.count_refused, count_to)
        (found,) = self._store.hit((asked,))
        return found.count, found.looping

    def list_pairs(self) -> list[WindowPair]:
        """What each pair would have done, by window and then by threshold."""
        return [WindowPair(*key, cell.requests, cell.tenants.count()) for key, cell in self._cells.items()]


def recommend(pairs: Sequence[WindowPair], requests: int, tenants: int, percent: float) -> Recommendation:
    """The pair that acts on the most requests of few callers, and why.

    Among pairs that act on equally many, the shortest window wins, then the highest threshold: the mildest pair that is enough.

    `percent` is the share of callers whose requests may be acted on; one caller is always allowed.
    """
    allowed = max(1, int(tenants * percent / 100))
    bound = f"{allowed:,} of {tenants:,} callers ({percent:g}%)"
    acting = [pair for pair in pairs if pair.requests]
    if not acting:
        return Recommendation(
            None, f"no pair would have acted on any of {requests:,} requests: this log has no loop that a window finds"
        )
    fitting = [pair for pair in acting if pair.tenants <= allowed]
    stricter = [pair for pair in acting if pair.tenants > allowed]
    if not fitting:
        least = min(stricter, key=lambda pair: pair.tenants)
        text = f"each pair that acts touches more than {bound}; {_describe(least)} touches {least.tenants:,}"
        return Recommendation(None, f"{text}. Look at the worst offenders of a replay: their repetition may be intended")
    best = max(fitting, key=lambda pair: (pair.requests, -pair.window_seconds, pair.threshold))
    text = (
        f"{_describe(best)} acts on {best.requests:,} of {requests:,} requests, "
        f"the most of all pairs that touch at most {bound}; it touches {best.tenants:,}"
    )
    if stricter:
        following = min(stricter, key=lambda pair: (pair.tenants, pair.requests))
        text += f". The next one, {_describe(following)}, touches {following.tenants:,}"
    if requests < FEWEST_REQUESTS or tenants < FEWEST_TENANTS:
        enough = f"{FEWEST_REQUESTS:,} requests of {FEWEST_TENANTS} callers"
        text += f". This is little traffic: results are more reliable from {enough} on"
    return Recommendation(best, text)


def _describe(pair: WindowPair) -> str:
    return f"{pair.threshold} within {pair.window_seconds} s"


def write_policy(policy: Policy, detector: str, pair: WindowPair) -> dict[str, Any]:
    """The policy with this pair as the detector's window and threshold."""
    return write_detector(
        policy, detector, {"window_seconds": pair.window_seconds, "threshold_identical_requests": pair.threshold}
    )
