"""Compares the actions of an enforcing policy (live) with those of its shadow (the candidate).

Only the event loop writes the counts. Other threads may see a request in one count and not yet in
another. Memory is bounded: pairs by `pairings.MAX_PAIRINGS`, callers by sketches, disagreements by
`_MAX_DISAGREEMENTS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, TypeAlias

from extproc.decision import Action, Decision, Outcome
from extproc.engine.exchange import Exchange, group_by_policy
from extproc.engine.guards import Guard, SessionGuard
from extproc.metrics import Counts, Metrics
from extproc.operator.after_notes import AfterNote
from extproc.operator.loop_table import name_conversation
from extproc.operator.sketch import Sketch
from extproc.policy.pairings import Pairing
from extproc.request.http import cut_text
from extproc.sessions.names import SessionNames
from extproc.sessions.session_limits import Session

VERDICTS = ("both", "only_live", "only_candidate", "neither")
"""Which of the two policies acts on a request, with any action but ALLOW."""

_ALLOW: Final = Action.ALLOW
_LABELS = ("policy", "canary_of")
_LIVE_ALONE = ("missed", "only_live")

REFUSALS = ("extra", "already", "missed")
"""Refusals by the candidate that are new or made already, and those by live that it misses.

Reports show `extra` as `new`. Metrics and replicas of other versions use `extra`.
"""

LIVE, CANDIDATE = POLICIES = ("live", "candidate")

_MAX_DISAGREEMENTS = 64
SHOWN = 20
_METHOD = 16
_TEXT = 128
"""Maximum length of paths and tool names in characters, because clients choose them."""

_DIGEST = 8

_SENT_ANYWAY: Final = SessionNames(Session().keys, usual=True)
"""Headers that may name the session of a request if no policy looks for one."""

Kind: TypeAlias = tuple[str, str, str, str, str, str]
"""A kind of disagreement: what it is about, method, path, tenant, detector and tool."""


class Disagreements:
    """The most frequent kinds of disagreement, in bounded memory.

    This is the Space-Saving algorithm: a new kind replaces the rarest and inherits its count, which
    is its maximum overcount. (A. Metwally et al., Efficient computation of frequent and top-k
    elements in data streams, ICDT 2005.)
    """

    def __init__(self) -> None:
        self._counts: dict[Kind, tuple[int, int]] = {}

    def add(self, kind: Kind) -> None:
        """Count a request of a kind."""
        count, over = self._counts.get(kind, (0, 0))
        if not count and len(self._counts) >= _MAX_DISAGREEMENTS:
            rarest = min(self._counts, key=lambda kind: self._counts[kind][0])
            count, _ = self._counts.pop(rarest)
            over = count
        self._counts[kind] = (count + 1, over)

    def list_most(self) -> list[tuple[Kind, int, int]]:
        """(kind, count, maximum overcount), most frequent first."""
        listed = [(kind, count, over) for kind, (count, over) in self._counts.copy().items()]
        return sorted(listed, key=lambda entry: (-entry[1], entry[0]))[:SHOWN]


class Pair:
    """An enforcing policy and its candidate, on the requests that the candidate has counted.

    Attributes:
        since: when the first request could be compared, in seconds since 1970.
        both, only_live, only_candidate, neither: compared requests, by which policy acts.
        live_counted: requests that live has counted.
        compared_with_live: those that the candidate has counted as well.
        refused: compared requests that any policy refused.
        extra, already, missed: refusals; see `REFUSALS`.
        tenants: callers of compared requests.
        acting_tenants: callers that the candidate already acts on.
        refused_tenants: callers with new refusals.
        refused_sessions: sessions with new refusals, if named.
        refused_loops: conversations with new refusals, or repeated requests without a known
            conversation.
        after_notes: counts of changes after notes, by `name_after`.
    """

    def __init__(self, pairing: Pairing, now: float) -> None:
        self.pairing = pairing
        self.since = now
        self.both = self.only_live = self.only_candidate = self.neither = 0
        self.live_counted = self.compared_with_live = 0
        self.refused = self.extra = self.already = self.missed = 0
        self.tenants = Sketch()
        self.acting_tenants = Sketch()
        self.refused_tenants = Sketch()
        self.refused_sessions = Sketch()
        self.refused_loops = Sketch()
        self.disagreements = Disagreements()
        self.after_notes: dict[str, int] = {}

    @property
    def labels(self) -> tuple[str, str]:
        """The labels of its metrics."""
        return self.pairing.candidate, self.pairing.live

    @property
    def compared(self) -> int:
        """The number of requests that the candidate has counted."""
        return self.both + self.only_live + self.only_candidate + self.neither

    @property
    def uncompared(self) -> int:
        """The number of requests that live has counted, and the candidate has not, or not yet."""
        return max(0, self.live_counted - self.compared_with_live)

    def compare(self, live: Outcome | None, candidate: Outcome, *, refused: bool) -> str:
        """Count one request; returns the disagreement, or the empty string.

        It is `extra`, `missed`, `only_live` or `only_candidate`. `live` is None if that policy did
        not count the request; `refused` is whether any policy refused it.
        """
        self.tenants.add(candidate.tenant)
        live_acts = False
        if live is not None:
            self.compared_with_live += 1
            live_acts = live.action is not _ALLOW
        if refused:
            self.refused += 1
        acts = candidate.action is not _ALLOW
        if not acts and not live_acts:
            self.neither += 1
            return ""
        refusal = self._compare_refusals(
            live is not None and live.action is Action.REJECT, candidate, refused=refused
        )
        if acts and live_acts:
            self.both += 1
            return refusal
        if acts:
            self.only_candidate += 1
            return refusal or "only_candidate"
        self.only_live += 1
        return refusal or "only_live"

    def _compare_refusals(self, live_refuses: bool, candidate: Outcome, *, refused: bool) -> str:  # noqa: FBT001  # see compare
        """`extra` or `missed`; empty if a refusal is neither."""
        if candidate.action is not Action.REJECT:
            self.missed += int(live_refuses)
            return "missed" if live_refuses else ""
        if live_refuses or refused:
            self.already += 1
            return ""
        self.extra += 1
        self.refused_tenants.add(candidate.tenant)
        return "extra"


class Pairs:
    """All pairs of the active policies."""

    def __init__(self) -> None:
        """Start without policies."""
        self._by_candidate: dict[str, Pair] = {}
        self._by_live: dict[str, list[Pair]] = {}

    def follow(self, pairings: Sequence[Pairing], now: float) -> None:
        """Switch to new pairings; unchanged ones keep their counts.

        `now` is in seconds since 1970.
        """
        known = {pair.pairing: pair for pair in self._by_candidate.values()}
        pairs = [known.get(pairing) or Pair(pairing, now) for pairing in pairings]
        self._by_candidate = {pair.pairing.candidate: pair for pair in pairs}
        self._by_live = {}
        for pair in pairs:
            self._by_live.setdefault(pair.pairing.live, []).append(pair)

    def list_pairs(self) -> list[Pair]:
        """All pairs, in the order of the candidates."""
        return list(self._by_candidate.values())

    def show(self, metrics: Metrics) -> None:
        """Register the counts as metrics."""
        text = "Requests compared by a canary, by which of the two policies acts"
        metrics.show_counts(
            "canary_requests_total",
            text,
            (*_LABELS, "verdict"),
            lambda: self._list_counts(VERDICTS),
        )
        text = "Refusals of a canary: new (its label is extra), made already, or missed"
        metrics.show_counts(
            "canary_refusals_total",
            text,
            (*_LABELS, "refusal"),
            lambda: self._list_counts(REFUSALS),
        )
        text = "Compared requests that were refused, by any policy"
        metrics.show_counts(
            "canary_refused_total",
            text,
            _LABELS,
            lambda: [(pair.labels, pair.refused) for pair in self.list_pairs()],
        )

    def _list_counts(self, names: Sequence[str]) -> list[Counts]:
        return [
            ((*pair.labels, name), getattr(pair, name))
            for pair in self.list_pairs()
            for name in names
        ]

    def compare(self, exchange: Exchange, decision: Decision, *, refused: bool) -> None:
        """Count a decided request, or the decided part of one."""
        trace = group_by_policy(decision.trace)
        exchange.trace = trace
        for outcome in trace:
            for pair in self._by_live.get(outcome.policy, ()):
                pair.live_counted += 1
            tried = self._by_candidate.get(outcome.policy)
            if tried is not None:
                live = _find_outcome(trace, tried.pairing.live) or _find_outcome(
                    exchange.earlier, tried.pairing.live
                )
                _compare(tried, live, outcome, exchange, refused=refused)
        for change in exchange.after_notes:
            self._count_after(change)

    def _count_after(self, change: AfterNote) -> None:
        pairs = [(LIVE, pair) for pair in self._by_live.get(change.outcome.policy, ())]
        if change.outcome.policy in self._by_candidate:
            pairs.append((CANDIDATE, self._by_candidate[change.outcome.policy]))
        for who, pair in pairs:
            name = name_after(who, change.arm, change.after)
            pair.after_notes[name] = pair.after_notes.get(name, 0) + 1


def name_after(who: str, arm: str, after: str) -> str:
    """The name of a count in `Pair.after_notes`."""
    return f"{who} {arm} {after}"


def _compare(
    pair: Pair, live: Outcome | None, candidate: Outcome, exchange: Exchange, *, refused: bool
) -> None:
    """Count one request for a pair. A candidate that enforces for this caller is not compared."""
    if candidate.mode == "enforce":
        pair.compared_with_live += live is not None
        pair.acting_tenants.add(candidate.tenant)
        return
    about = pair.compare(live, candidate, refused=refused)
    if about:
        _keep_disagreement(
            pair, about, exchange, candidate if live is None or about not in _LIVE_ALONE else live
        )


def _find_outcome(trace: Sequence[Outcome], policy: str) -> Outcome | None:
    for outcome in trace:
        if outcome.policy == policy:
            return outcome
    return None


def _keep_disagreement(pair: Pair, about: str, exchange: Exchange, outcome: Outcome) -> None:
    """Record a disagreement; `outcome` is that of the policy with the stricter action."""
    request = exchange.request
    tools = outcome.repeat.tools if outcome.repeat is not None else outcome.subject.tools
    method, path, tool = (
        cut_text(request.method, _METHOD),
        cut_text(request.path, _TEXT),
        cut_text(", ".join(tools), _TEXT),
    )
    pair.disagreements.add((about, method, path, outcome.tenant, outcome.detector, tool))
    if about == "extra":
        session = _find_session(pair, exchange, outcome)
        if session:
            pair.refused_sessions.add(_hash_names(outcome.tenant, session))
        pair.refused_loops.add(_hash_names(*name_conversation(exchange, [outcome])))


def _hash_names(tenant: str, name: str) -> str:
    """The hash of a tenant's name of a session or conversation; other tenants may use it, too."""
    return blake2b(
        f"{tenant}\n{name}".encode("utf-8", "surrogatepass"), digest_size=_DIGEST
    ).hexdigest()


def _find_session(pair: Pair, exchange: Exchange, outcome: Outcome) -> str:
    """The hash of the session of a request that a candidate would refuse; empty if it names none.

    The name is the one that the refusing detector uses, else another guard of the policy (session
    limits first), else the enforcing policy. If none of them looks for sessions, common agent
    headers are used.
    """
    looking = [
        each
        for group in exchange.groups
        for each in group.active
        if each.session and each.plan.id in pair.labels
    ]
    if not looking:
        return _SENT_ANYWAY.find(_SENT_ANYWAY.read(exchange.request), None)

    def rank(each: Guard) -> tuple[bool, bool, bool]:
        return (
            each.plan.id != outcome.policy,
            each.compiled.name != outcome.detector,
            not isinstance(each, SessionGuard),
        )

    return min(looking, key=rank).session
