"""Runs recorded requests through the engine, and through a store in memory that uses the log's clock."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from extproc.cli.replay.records import Recorded, RecordedEnd
from extproc.decision import Action, Decision
from extproc.detectors.digests import (
    NOT_RECORDED,
    DamagedDigestError,
    Digest,
    DigestReader,
    UnknownTurnsError,
    find_other_key,
)
from extproc.detectors.turns import Turns
from extproc.engine.budget_candidates import BudgetCandidate
from extproc.engine.budget_settlements import list_budget_settlements
from extproc.engine.candidates import LoopCandidate, RecordedBody, SessionCandidate
from extproc.engine.counting import HERE, Counting, Counts
from extproc.engine.engine import Engine
from extproc.engine.evaluation import CandidateGroup, Evaluation
from extproc.engine.settlements import Entry
from extproc.metrics import Metrics
from extproc.request.document import NotCounted
from extproc.request.hash_key import PROCESS_KEY, HashKey, RecordedKey
from extproc.request.http import HttpRequest, explain_unknowable_body
from extproc.sessions.call_digests import CallReader, ShownCalls
from extproc.sessions.recorded_ledgers import RecordedStore
from extproc.store.rules.budget import Take
from extproc.store.rules.session import FAILED, REFUSED, SUCCEEDED, Settlement

_MOST_LISTS = 200_000
"""Lists of turns that are kept for later requests to go on from, at 1 KB or less each."""


_MOST_OPEN = 100_000
"""Requests whose end is still to come, at 500 bytes each; above that, the next end comes early."""


class Replayed:
    """The policies, and a store in memory that uses the log's clock."""

    def __init__(self, engine: Engine, max_entries: int, key: HashKey = PROCESS_KEY, pinned: Sequence[str] = ()) -> None:
        """Start with an empty store; `pinned` policies judge all requests, whatever their selectors."""
        self._engine = engine
        self._pinned = pinned
        self._key = key
        self._recorded_key = RecordedKey(key.secret)
        self._metrics = Metrics()
        self._digests = DigestReader(_MOST_LISTS)
        self._calls = CallReader(_MOST_LISTS)
        self._problems: list[tuple[str, str]] = []
        self._now = 0  # by the log
        self._store = RecordedStore(self._metrics, max_entries, lambda: self._now)

    @property
    def evictions(self) -> int:
        """The number of live fingerprints dropped for lack of room, which makes some counts too low."""
        return int(self._metrics.registry.get_sample_value("loopguard_store_evictions_total") or 0)

    def take_problems(self) -> list[tuple[str, str]]:
        """What was wrong with the newest record: kinds as in `logs.PROBLEMS`, each with an example."""
        found, self._problems = self._problems, []
        return found

    def _prepare(self, recorded: Recorded, request: HttpRequest, body: RecordedBody | None) -> Evaluation | None:
        """Evaluate a recorded request up to the point where it is counted; None if no policy matches it."""
        key = self._recorded_key if recorded.partial else self._key
        evaluation = self._engine.prepare(request, pinned=self._pinned, key=key)
        if evaluation is None:
            return None
        self._now = recorded.time
        content = recorded.content
        if body is not None:
            evaluation.recorded = body
            for group in evaluation.groups:
                self._find_tenants(group, recorded.record.tenants, body)
                self._check_settings(group, body)
        if content is None:
            evaluation.read_body(recorded.sums, recorded.unknown, None, "no_body")
            return evaluation
        # This reads headers that a partial record does not have; they were read when it was recorded.
        reason = explain_unknowable_body(evaluation.request) if evaluation.needs_body and not recorded.partial else ""
        evaluation.read_body(None if reason else evaluation.sum_up(content), reason, content)
        return evaluation

    def _read_digests(self, recorded: Recorded) -> RecordedBody | None:
        """What was recorded of the body; None if only checksums were."""
        record = recorded.record
        if not record.turns and not record.tenants and not record.limits:
            return None
        found: dict[bytes, Digest | NotCounted] = {}
        ends = recorded.end is not None
        for text in record.turns.split(",") if record.turns else ():
            try:
                digest = self._digests.read(text)
            except NotCounted as why:
                found[b""] = why.renew()
                if why.reason == NOT_RECORDED:
                    self._problems.append(("unrecorded_turns", ""))
            except (DamagedDigestError, UnknownTurnsError) as error:
                found[b""] = NotCounted(NOT_RECORDED)
                self._problems.append(("earlier_turns" if isinstance(error, UnknownTurnsError) else "damaged_turns", ""))
            else:
                found[digest.shape] = digest
        if recorded.content is not None:
            return RecordedBody(record.sessions, {}, None, ends=ends)
        return RecordedBody(record.sessions, found, self._read_calls(record.limits) if record.limits else None, ends=ends)

    def _read_calls(self, text: str) -> ShownCalls | NotCounted:
        """What was recorded of the tool calls, or why it is not known."""
        try:
            shown = self._calls.read(text)
        except (DamagedDigestError, UnknownTurnsError) as error:
            self._problems.append(("earlier_calls" if isinstance(error, UnknownTurnsError) else "damaged_calls", ""))
            return NotCounted(NOT_RECORDED)
        if shown.unreadable == NOT_RECORDED:
            self._problems.append(("unrecorded_calls", ""))
            return NotCounted(NOT_RECORDED)
        return shown

    def _check_settings(self, group: CandidateGroup, body: RecordedBody) -> None:
        """Note detectors that would have seen other turns, and session guards that would have seen other sessions."""
        for candidate in group.candidates:
            if isinstance(candidate, SessionCandidate) and (key := body.find_other_key(candidate.limiter)):
                self._problems.append(("other_settings", _tell(candidate.plan.id, key)))
        for candidate in group.candidates if body.digests else ():
            if not isinstance(candidate, LoopCandidate) or not isinstance(candidate.detector.similarity, Turns):
                continue
            detector, rings = candidate.detector, candidate.plan.rings
            key = find_other_key(body.digests, candidate.detector.similarity.ignored, detector.max_inspect_bytes)
            if not key and candidate.looks_for_session and rings is not None and rings.id not in body.sessions:
                key = "" if b"" in body.digests else "session.keys"
            if key:
                self._problems.append(("other_settings", _tell(detector.policy, key)))

    def _find_tenants(self, group: CandidateGroup, tenants: Mapping[str, str], body: RecordedBody) -> None:
        """Give a group's candidates the hashes that their callers had live."""
        for candidate in group.candidates:
            tenant = tenants.get(candidate.plan.callers)
            if tenant and not candidate.plan.reads_body:
                body.tenants[candidate.caller] = tenant


def _tell(policy: str, key: str) -> str:
    return f"{policy}: set its {key} to what it was in the policy of serve --record"


class Judge(Replayed):
    """Decides about requests one by one; counts those that no policy matches, and those that a kill switch stops."""

    def __init__(
        self,
        engine: Engine,
        max_entries: int,
        key: HashKey = PROCESS_KEY,
        pinned: Sequence[str] = (),
        *,
        tries: bool = False,
    ) -> None:
        """See `Replayed`; `tries`: refusals are only tried, so all requests stay steps of their sessions."""
        super().__init__(engine, max_entries, key, pinned)
        self._tries = tries
        self.unmatched = self.killed = 0
        self._open: list[tuple[int, int, Settlement | Take]] = []
        self._ended = 0
        self._counting = Counting(self._store, self._store, self._metrics, reject=False)

    def judge(self, recorded: Recorded) -> tuple[Evaluation, Decision] | None:
        """What the policies decide about the next request; None if no policy is asked."""
        request, body = recorded.make_request(), self._read_digests(recorded)  # later requests go on from these
        if self._is_killed(request, recorded.time):
            self.killed += 1
            return None
        evaluation = self._prepare(recorded, request, body)
        if evaluation is None:
            self.unmatched += 1
            return None
        shown = body.shown if body is not None and isinstance(body.shown, ShownCalls) else None
        self._settle_until(recorded.time)
        self._store.expect({each.call: each.limiter.shape for each in evaluation.sessions}, shown)
        counts, shadow_counts = self._count(evaluation.enforcing), self._count(evaluation.shadow)
        decision = evaluation.decide(counts, shadow_counts)
        if evaluation.sessions and not (self._take_back(evaluation, decision, shown) or recorded.end is None):
            self._expect_end(evaluation, recorded.time, recorded.end, shown)
        if evaluation.budgets and not self._tries:
            refused = self._give_back(evaluation, decision)
            if recorded.end is not None:
                paid = [budget for budget in evaluation.budgets if budget not in refused]
                self._expect_payment(paid, recorded.time, recorded.end)
        return evaluation, decision

    def _give_back(self, evaluation: Evaluation, decision: Decision) -> Sequence[BudgetCandidate]:
        """Give back what a refused request took from budgets; of a request that only shadow policies refuse, from theirs.

        Returns these budgets.
        """
        refused = decision.action is Action.REJECT or evaluation.enforcing.forbidden is not None
        in_shadow = decision.shadow is not None and decision.shadow.action is Action.REJECT
        budgets = evaluation.budgets if refused else evaluation.shadow.budgets if in_shadow else []
        takes = [take for budget in budgets for take in budget.list_give_backs(here=False)]
        if takes:
            self._store.hit(takes)
        return budgets

    def _expect_payment(self, budgets: Sequence[BudgetCandidate], time: int, end: RecordedEnd) -> None:
        """Remember to settle what a request took from budgets."""
        described = [text for budget in budgets if (text := budget.describe_reserved())]
        if not described:
            return
        named = tuple([json.loads(text) for text in described])
        estimated = end.estimated and any(budget.budget.needs_body for budget in budgets)
        if estimated:
            self._problems.append(("estimated_tokens", ""))
        entry = Entry((), end.status, end.failed, 0, 0, end.model, end.usage, estimated, refused=False, budgets=named)
        self._expect(time + end.duration_ms, [each.take for each in list_budget_settlements(self._engine, entry)])

    def _expect(self, time: int, questions: Sequence[Settlement | Take]) -> None:
        for question in questions:
            self._ended += 1
            heappush(self._open, (time, self._ended, question))
        while len(self._open) > _MOST_OPEN:
            self._settle_until(self._open[0][0])

    def _expect_end(self, evaluation: Evaluation, time: int, end: RecordedEnd, shown: ShownCalls | None) -> None:
        """Remember to settle a request with ledgers that were not recorded as these policies would have them."""
        for each in evaluation.sessions:
            if (
                each.is_let_through
                and each.limiter.needs_answers
                and (shown is None or each.limiter.shape not in shown.ledgers)
            ):
                outcome = FAILED if end.failed else SUCCEEDED
                settlement = each.settle(end.model, end.usage, outcome, estimated=end.estimated)
                if end.estimated:
                    self._problems.append(("estimated_tokens", ""))
                self._expect(time + end.duration_ms, [settlement])

    def _settle_until(self, time: int) -> None:
        """Settle the requests that have ended by now."""
        now = self._now
        while self._open and self._open[0][0] <= time:
            self._now, _, question = heappop(self._open)
            self._store.hit([question])
        self._now = now

    def _take_back(self, evaluation: Evaluation, decision: Decision, shown: ShownCalls | None) -> bool:
        """Tell ledgers if a request that they let through is refused: as it was live, if policies decide as they did there.

        Returns whether it is.
        """
        if self._tries:
            return False
        refused = decision.action is Action.REJECT or evaluation.enforcing.forbidden is not None
        if shown is not None and shown.rejected == (decision.action is Action.REJECT):
            refused = shown.refused
        if refused:
            self._store.hit([each.take_back(REFUSED) for each in evaluation.sessions if each.is_let_through])
        return refused

    def _is_killed(self, request: HttpRequest, time: int) -> bool:
        try:
            return self._engine.find_switch(request, time / 1000) is not None
        except NotCounted:  # the switch needs an unrecorded value; killed requests are never recorded
            return False

    def _count(self, group: CandidateGroup) -> Counts:
        counts = self._counting.count(group)
        if not isinstance(counts, HERE):
            raise TypeError("counts in memory are there at once")
        return counts
