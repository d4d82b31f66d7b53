"""Recorded requests through the engine, and through a store in memory whose clock is the log's."""

from __future__ import annotations

from collections.abc import Sequence

from extproc.counting import HERE, Counting, Counts
from extproc.decision import Decision
from extproc.engine import Engine
from extproc.evaluation import Evaluation, Lane
from extproc.fingerprint import NO_BODY
from extproc.metrics import Metrics
from extproc.replay.records import Recorded
from extproc.request import explain_unknowable_body
from extproc.store.memory import MemoryStore
from extproc.windows import Count, Hit, Push


class RecordedStore:
    """The store in memory, at the time of the log; see `Store`.

    Attributes:
        now: in milliseconds since 1970.
    """

    def __init__(self, memory: MemoryStore) -> None:
        """Start at no time at all."""
        self.now = 0
        self._memory = memory

    def hit(self, hits: Sequence[Hit], now: int | None = None) -> list[Count]:  # noqa: ARG002  # of tests of other stores
        """Count at the time of the log."""
        return self._memory.hit(hits, self.now)

    def push(self, pushes: Sequence[Push], now: int | None = None) -> list[list[bytes]]:  # noqa: ARG002  # same
        """Push at the time of the log."""
        return self._memory.push(pushes, self.now)

    def health(self) -> str:
        """Memory is always well."""
        return "ok"

    async def start(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """Nothing to let go of."""


def prepare(engine: Engine, recorded: Recorded) -> Evaluation | None:
    """A recorded request as far as it can be known without counting it; None when no policy matches it."""
    evaluation = engine.prepare(recorded.make_request())
    if evaluation is None:
        return None
    content = recorded.content
    if content is None:
        evaluation.seal(recorded.sums, recorded.unknown, None, "no_body")
        return evaluation
    # Of a partial record the headers are not known that this looks at; whoever recorded it knew them.
    reason = explain_unknowable_body(evaluation.request) if evaluation.needs_body and not recorded.partial else ""
    evaluation.seal(None if reason else NO_BODY.plus(content), reason, content)
    return evaluation


class Judge:
    """Decides about requests, one after the other.

    Attributes:
        evictions: live fingerprints that were dropped for want of room, so that some counts are too low.
    """

    def __init__(self, engine: Engine, max_entries: int) -> None:
        """Nothing has been counted.

        Args:
            engine: the policies.
            max_entries: of the store.
        """
        self._engine = engine
        self._metrics = Metrics()
        memory = MemoryStore(self._metrics, max_entries)
        self._store = RecordedStore(memory)
        self._counting = Counting(self._store, memory, self._metrics, reject=False)

    @property
    def evictions(self) -> int:
        """See the class."""
        return int(self._metrics.registry.get_sample_value("loopguard_store_evictions_total") or 0)

    def judge(self, recorded: Recorded) -> tuple[Evaluation, Decision] | None:
        """What the policies make of the next request; None when none matches it."""
        evaluation = prepare(self._engine, recorded)
        if evaluation is None:
            return None
        self._store.now = recorded.time
        counts, shadow_counts = self._count(evaluation.enforcing), self._count(evaluation.shadow)
        return evaluation, evaluation.decide(counts, shadow_counts)

    def _count(self, lane: Lane) -> Counts:
        counts = self._counting.count(lane)
        if not isinstance(counts, HERE):
            raise TypeError("counts in memory are there at once")
        return counts
