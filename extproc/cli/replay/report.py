"""Counts the decisions of a replay, in bounded memory, and makes the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from heapq import nlargest
from typing import Any, Generic, Protocol, TypeVar

from extproc.cli.packed import FilePlace
from extproc.cli.replay.judge import Judge
from extproc.cli.replay.logs import HARMLESS, PROBLEMS, LogEntry, Logs
from extproc.decision import DONE, Action, Decision, Outcome
from extproc.engine.engine import Engine
from extproc.engine.exchange import Exchange, group_by_policy
from extproc.logs import escape_controls
from extproc.operator.after_notes import ARMS, NoteFollower, describe_after
from extproc.operator.sketch import Sketch
from extproc.request.http import HttpRequest

VERSION = 1
WORDS = dict(reversed(DONE.items()))
"""The word for each action, strictest first."""

_MAX_OFFENDERS = 10_000
_MAX_REASONS = 64
_OTHER = "other"
_SHOWN = 200
_EXACT = 4_096
"""Number of callers up to which counts are exact."""
_MAX_EXAMPLES = 5


class _Policy:
    def __init__(self) -> None:
        self.actions: Counter[Action] = Counter()
        self.rules: Counter[str] = Counter()
        self.after: dict[str, Counter[str]] = {arm: Counter() for arm in ARMS}
        self.uncounted: Counter[str] = Counter()
        self.uncountable = 0
        self.failed = 0
        self.held_ms = 0
        self.tenants = Sketch(size=_EXACT)
        self.touched = Sketch(size=_EXACT)

    @property
    def loops(self) -> int:
        return self.actions.total() - self.actions[Action.ALLOW]


class _Offender:
    def __init__(self) -> None:
        self.count = 0
        self.actions: Counter[Action] = Counter()
        self.highest = 0
        self.first = self.last = 0
        self.method = self.path = self.detector = ""
        self.example: FilePlace | None = None

    def add(self, entry: LogEntry, outcome: Outcome, request: HttpRequest) -> None:
        self.count += 1
        self.actions[outcome.action] += 1
        self.highest = max(self.highest, outcome.count)
        self.last = entry.time
        if self.example is None:
            self.first, self.example = entry.time, entry.place
            self.method, self.path, self.detector = (
                request.method[:_SHOWN],
                request.path[:_SHOWN],
                outcome.detector,
            )


class Ranked(Protocol):
    """An item of `Top`."""

    count: int


Key = TypeVar("Key")
Item = TypeVar("Item", bound=Ranked)


class Top(Generic[Key, Item]):
    """The items with the highest counts.

    At the limit the lower half is dropped, and starts at 0 if it returns.

    Attributes:
        dropped: the highest dropped count, by which any count may be too low.
    """

    def __init__(self, limit: int, make: Callable[[], Item]) -> None:
        self.dropped = 0
        self._limit = limit
        self._make = make
        self._items: dict[Key, Item] = {}

    def get_or_add(self, key: Key) -> Item:
        item = self._items.get(key)
        if item is None:
            if len(self._items) >= self._limit:
                kept = dict(self.list_first(self._limit // 2))
                self.dropped = max(
                    self.dropped,
                    *[self._items[other].count for other in self._items.keys() - kept.keys()],
                )
                self._items = kept
            item = self._items[key] = self._make()
        return item

    def list_first(self, count: int) -> list[tuple[Key, Item]]:
        return nlargest(count, self._items.items(), key=lambda pair: pair[1].count)


class ReplayReport:
    def __init__(self, engine: Engine) -> None:
        self._policies = {(plan.id, plan.mode): _Policy() for plan in engine.plans}
        self._modes = {plan.id: plan.mode for plan in engine.plans}
        self._offenders: Top[tuple[str, str, str, str], _Offender] = Top(_MAX_OFFENDERS, _Offender)
        self._failures: list[str] = []
        self._requests = 0
        self._follower = NoteFollower()

    def add(self, entry: LogEntry, judged: tuple[Exchange, Decision] | None) -> None:
        self._requests += 1
        if judged is None:
            return
        exchange, decision = judged
        for change in self._follower.follow(exchange, decision):
            self._get_policy(change.outcome.policy, change.outcome.mode).after[change.arm][
                change.after
            ] += 1
        for outcome in group_by_policy(decision.trace):
            self._add_outcome(entry, outcome, exchange.request)
        for policy, reason in exchange.list_uncounted():
            uncounted = self._get_policy(policy).uncounted
            uncounted[
                reason if reason in uncounted or len(uncounted) < _MAX_REASONS else _OTHER
            ] += 1
        if exchange.enforcing.forbidden is not None and decision.action is not Action.REJECT:
            self._get_policy(exchange.enforcing.forbidden[0]).uncountable += 1
        for group in exchange.groups:
            for policy, error in group.failures:
                text = f"{entry.place}: {policy}: {type(error).__name__}: {error}"
                self._get_policy(policy).failed += 1
                if len(self._failures) < _MAX_EXAMPLES:
                    self._failures.append(escape_controls(text))

    def _get_policy(self, policy: str, mode: str = "") -> _Policy:
        return self._policies.setdefault((policy, mode or self._modes[policy]), _Policy())

    def _add_outcome(self, entry: LogEntry, outcome: Outcome, request: HttpRequest) -> None:
        action, tenant = outcome.action, outcome.tenant
        policy = self._policies.get((outcome.policy, outcome.mode)) or self._get_policy(
            outcome.policy, outcome.mode
        )
        policy.actions[action] += 1
        policy.tenants.add(tenant)
        if action is Action.ALLOW:
            return
        policy.held_ms += outcome.delay_ms
        if outcome.repeat is not None and outcome.repeat.rule:
            policy.rules[outcome.repeat.rule] += 1
        policy.touched.add(tenant)
        self._offenders.get_or_add((outcome.policy, outcome.mode, tenant, outcome.fingerprint)).add(
            entry, outcome, request
        )

    def make_document(self, logs: Logs, judge: Judge, top: int) -> dict[str, Any]:
        """The report as JSON, with the `top` worst offenders."""
        return {
            "replay": VERSION,
            "log": {
                "lines": logs.lines,
                "requests": self._requests,
                "unmatched": judge.unmatched,
                "killed": judge.killed,
                "first": _write_time(logs.first),
                "last": _write_time(logs.last),
                "problems": {
                    kind: {
                        "lines": found.count,
                        "what": PROBLEMS[kind],
                        "harmless": kind in HARMLESS,
                        "first": [escape_controls(str(place)) for place in found.places],
                        **(
                            {"example": escape_controls(next(iter(found.names)))[:_SHOWN]}
                            if found.names
                            else {}
                        ),
                    }
                    for kind in PROBLEMS
                    if (found := logs.problems.by_kind.get(kind)) is not None
                },
            },
            "policies": [_describe_policy(*key, policy) for key, policy in self._policies.items()],
            "worst": [
                _describe_offender(*key, offender)
                for key, offender in self._offenders.list_first(top)
            ],
            "too_low_by": self._offenders.dropped,
            "evicted": judge.evictions,
            "failures": self._failures,
        }


def _describe_policy(name: str, mode: str, policy: _Policy) -> dict[str, Any]:
    return {
        "policy": name,
        "mode": mode,
        "requests": policy.actions.total(),
        "loops": policy.loops,
        **_describe_actions(policy.actions),
        "held_seconds": round(policy.held_ms / 1000, 1),
        "rules": dict(policy.rules.most_common()),
        "after_notes": {
            arm: describe_after(counts, 0) for arm, counts in policy.after.items() if counts
        },
        "uncounted": dict(policy.uncounted.most_common()),
        "refused_uncountable": policy.uncountable,
        "failed": policy.failed,
        "tenants": policy.tenants.count(),
        "tenants_touched": policy.touched.count(),
        "tenants_exact": policy.tenants.exact and policy.touched.exact,
    }


def _describe_actions(actions: Counter[Action]) -> dict[str, int]:
    return {word: actions[action] for action, word in WORDS.items()}


def _describe_offender(
    policy: str, mode: str, tenant: str, fingerprint: str, offender: _Offender
) -> dict[str, Any]:
    return {
        "policy": policy,
        "mode": mode,
        "detector": offender.detector,
        "tenant": tenant,
        "fingerprint": fingerprint,
        "requests": offender.count,
        **_describe_actions(offender.actions),
        "highest_count": offender.highest,
        "method": escape_controls(offender.method),
        "path": escape_controls(offender.path),
        "first": _write_time(offender.first),
        "last": _write_time(offender.last),
        "example": escape_controls(str(offender.example)),
    }


def _write_time(milliseconds: int | None) -> str | None:
    if milliseconds is None:
        return None
    return (
        datetime.fromtimestamp(milliseconds / 1000, UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )
