"""State shared by all ext_proc streams: policies, the store, reports, and limits on streams."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from time import monotonic, perf_counter, time

from extproc.engine.counting import Counting
from extproc.engine.engine import Engine
from extproc.engine.entries import Entries
from extproc.engine.handover import HandedOver, RefusedPolicy
from extproc.engine.orders import Overrides
from extproc.engine.plan import Plan
from extproc.engine.settlements import Entry, list_settlements
from extproc.ext_proc.access_log import AccessLog
from extproc.ext_proc.budget import InspectionBudget
from extproc.ext_proc.changes.changes import Changes
from extproc.ext_proc.throttle import Holds
from extproc.ext_proc.upload import UploadMemory
from extproc.metrics import Metrics
from extproc.operator.canary.pairs import Pairs
from extproc.operator.reporting import Reporter
from extproc.request.hash_key import PROCESS_KEY, HashKey
from extproc.settings import Settings
from extproc.store import Store
from extproc.store.memory import MemoryStore
from extproc.store.rules.back_to_back import End


class Waiting:
    """A stream that waits for a body."""

    @property
    def held(self) -> int:
        """The number of bytes that it holds until its body is complete."""
        return 0

    def hand_on(self) -> None:
        """Forward the held bytes: the request continues, and is still counted."""

    def give_up(self, reason: str) -> None:
        """Stop waiting: the request continues uncounted."""


def _count_held(stream: Waiting) -> int:
    return stream.held


class Service:
    """The shared state.

    Attributes:
        engine: the loaded policies; see `follow`.
        key: the key of keyed hashes.
        counting: asks the store.
        metrics: metrics of all events.
        reporter: writes metrics, tables and the log.
        settings: settings of the process.
        holds: places for delayed requests.
        released: `release` was called.
        kept: memory for bodies that have not ended.
        budget: time for inspecting bodies.
        changes: edits bodies.
        pairs: compares shadow policies with enforcing ones.
        overrides: operators' orders, if any; replaced when they change.
        access_log: reads the outcome of requests.
        entries: whether entries arrive.
        handed_over: policies that come with routes.
        streams: number of open streams.
        waiting: streams that wait for a body, oldest first.
        given_up: number of open streams that only have to close or to hand bodies back.
    """

    def __init__(  # noqa: PLR0913  # everything that streams share
        self,
        engine: Engine,
        store: Store,
        local: MemoryStore,
        metrics: Metrics,
        settings: Settings,
        key: HashKey = PROCESS_KEY,
    ) -> None:
        self.engine = engine
        self.key = key
        self.counting = Counting(store, local, metrics, reject=settings.on_store_error == "reject")
        self.metrics = metrics
        self.reporter = Reporter(
            metrics, show_callers=settings.show_callers, show_results=settings.show_results
        )
        self.settings = settings
        self.holds = Holds(settings.max_throttled)
        self.released = False
        self.kept = UploadMemory()
        self.budget = InspectionBudget(perf_counter())
        self.changes = Changes(self.reporter, self.budget)
        self.pairs = Pairs()
        self.pairs.follow(engine.pairings, time())
        self.pairs.show(metrics)
        self.overrides: Overrides | None = None
        self.access_log = AccessLog(self.settle_entry, metrics)
        self.entries = Entries()
        self.streams = 0
        self.waiting: OrderedDict[Waiting, None] = OrderedDict()
        self.given_up = 0
        self.handed_over = HandedOver(
            shadow=settings.shadow, allow_unenforced=settings.allow_unenforced
        )
        metrics.throttled_in_flight.set_function(lambda: self.holds.held)
        metrics.streams_in_flight.set_function(lambda: self.streams)

    def follow(self, engine: Engine) -> None:
        """Replace the policies. Open requests keep those with which they began."""
        self.engine = engine
        self.pairs.follow(engine.pairings, time())
        self._switch_detectors()

    def note_begun(self, plans: Sequence[Plan]) -> None:
        """Note a forwarded request, in case `back_to_back` needs to know its end."""
        if not any(plan.spans for plan in plans):
            return
        arrived = self.entries.arrive
        if self.entries.note_begun(monotonic()):
            self.metrics.access_log_entries.labels("missing").inc()
            if arrived:
                self._switch_detectors()

    def note_entry(self, *, own: bool = True) -> None:
        """Note that an entry for `back_to_back` has arrived, here or at another replica."""
        arrived = self.entries.arrive
        self.entries.note_entry(monotonic(), own=own)
        if not arrived:
            self._switch_detectors()

    def _switch_detectors(self) -> None:
        for plan in [*self.engine.plans, *self.handed_over.list_plans()]:
            plan.note_entries(arrive=self.entries.arrive)

    def make_room(self) -> bool:
        """Give up the stream that has waited longest for a body; returns whether there was one.

        A client can stall an upload forever. That must not turn off the guard for others.
        """
        if not self.waiting:
            return False
        self.metrics.overload.inc()
        next(iter(self.waiting)).give_up("overload")
        return True

    def make_memory(self, size: int, own: int) -> bool:
        """Make room for more bytes of a held body; returns whether there is enough.

        The stream that holds the most bytes forwards its body, unless that is the stream that asks.

        Args:
            size: the number of bytes.
            own: the number of bytes that the asking stream then holds.
        """
        while not self.kept.has_room(size):
            largest = max(self.waiting, key=_count_held, default=None)
            if largest is None or largest.held <= own:
                return False
            largest.hand_on()
        return True

    def settle_entry(self, entry: Entry) -> None:
        """Report a request's outcome to its counters, sessions and budgets."""
        if entry.absurd:
            self.metrics.absurd_usage.inc()
        if entry.counted and isinstance(entry.counted[-1], End):
            self.note_entry()
        settled, unknown = list_settlements(self.engine, entry)
        if unknown:
            self.reporter.report_unknown_calls(unknown)
        self.counting.settle(settled, partial(self.reporter.report_settled, entry))

    def release(self) -> None:
        """End all delays and waits for bodies, from now on, because the server is stopping."""
        self.released = True
        self.holds.release()
        for stream in list(self.waiting):
            stream.give_up("shutdown")

    def compile_handed_over(self, policy_json: str) -> Engine | None:
        """The policies that came with a route; None (counted, logged once) if they are invalid."""
        now = datetime.now(UTC)
        found = self.handed_over.recall(policy_json, now)
        if found is None:
            found = self.handed_over.compile(policy_json, now)
            self._switch_detectors()
            if isinstance(found, RefusedPolicy):
                self.reporter.report_refused_policy(found)
        if isinstance(found, Engine):
            return found
        self.metrics.handover_errors.labels(found.reason).inc()
        return None
