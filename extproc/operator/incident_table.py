"""Incidents: a tool that fails in the same way for many sessions is the failure of its server, and not a loop of each agent.

Only loops are looked at whose newest result is an error. They are of one incident if policy, tool and error are equal. It takes
ENOUGH sessions within minutes, of which a caller counts for MOST_OF_CALLER: so it takes several callers, and none of them can
spare itself from refusals. As long as the incident lasts, its loops get the strictest action that ends no run; but only
for LONGEST_SECONDS, after which there is a REST_SECONDS for which they are refused, whatever its callers do.

A caller begins only its share of the rows, as in any table, so it never pushes out what others have begun.
"""

from __future__ import annotations

from math import inf
from typing import Final

from extproc.apis import open_conversation
from extproc.decision import Action, Decision, Outcome, ToolFailure, decide
from extproc.detectors.chain import read_transcript
from extproc.detectors.turn import digest
from extproc.engine.exchange import Exchange
from extproc.engine.guards import LoopGuard
from extproc.operator.loop_rows import INCIDENT_SECONDS, SKETCHED, IncidentDocument, IncidentRow
from extproc.operator.loop_table import find_guard, read_opening
from extproc.operator.sketch import Sketch
from extproc.operator.table import NAME_SHOWN, Table
from extproc.request.document import Document, NotCounted
from extproc.request.http import cut_text

ENOUGH: Final = 5
MOST_OF_CALLER: Final = 4

LONGEST_SECONDS: Final = 1_800
REST_SECONDS: Final = 3_600

_MAX_ROWS: Final = 400
_MAX_OF_CALLER: Final = 40
_MOST_CALLERS: Final = 16
"""Maximum number of callers whose sessions are remembered; these are enough for an incident."""


class FailingTool:
    """One tool that fails in one way; it may become an incident.

    Attributes:
        last: when a request was part of it, in seconds since 1970.
        began: when it became an incident the last time; 0 if it never has.
        standing: there were enough sessions at its last request.
        requests: that were part of it.
        spared: of these, the ones that would have been refused.
        callers, sessions: all of them.
    """

    def __init__(self) -> None:
        self.last = self.began = 0.0
        self.standing = False
        self.requests = self.spared = 0
        self.callers = Sketch(size=SKETCHED)
        self.sessions = Sketch(size=SKETCHED)
        self._spares_until = -inf
        self._recent: dict[str, dict[str, float]] = {}  # by caller: when each session was last part of it

    def note(self, caller: str, session: str, now: float, *, refused: bool) -> bool:
        """Note a request at `now`; returns whether an incident spares it. `refused`: otherwise, it would be refused."""
        self.last = now
        self.requests += 1
        self.callers.add(caller)
        self.sessions.add(session)
        self._forget(now - INCIDENT_SECONDS)
        recent = self._recent
        if caller in recent or len(recent) < _MOST_CALLERS:
            own = recent.setdefault(caller, {})
            if session in own or len(own) < MOST_OF_CALLER:
                own[session] = now
        if sum([len(own) for own in recent.values()]) < ENOUGH:
            self.standing = False
        elif not self.standing:
            self.standing, self.began = True, now
            if now > self._spares_until + REST_SECONDS:
                self._spares_until = now + LONGEST_SECONDS
        spares = self.standing and now < self._spares_until
        if spares and refused:
            self.spared += 1
        return spares

    def _forget(self, before: float) -> None:
        for caller, own in list(self._recent.items()):
            for session, last in list(own.items()):
                if last < before:
                    del own[session]
            if not own:
                del self._recent[caller]


class IncidentTable(Table[FailingTool, IncidentDocument]):
    """The failing tools that one process knows, by first caller, policy, tool and error."""

    def __init__(self) -> None:
        super().__init__(_MAX_ROWS, _MAX_OF_CALLER)
        self._keys: dict[tuple[str, ...], tuple[str, ...]] = {}  # by policy, tool and error

    def weigh(self, exchange: Exchange, decision: Decision, now: float) -> Decision:
        """The decision, changed for loops that are part of an incident; `now` is in seconds since 1970."""
        enforcing: list[Outcome] = []
        watching: list[Outcome] = []
        found = False
        for outcome in decision.trace:
            weighed = self._weigh(exchange, outcome, now)
            found = found or weighed is not outcome
            (enforcing if outcome.mode == "enforce" else watching).append(weighed)
        return decide(enforcing, watching) if found else decision

    def _weigh(self, exchange: Exchange, outcome: Outcome, now: float) -> Outcome:
        repeat, document = outcome.repeat, exchange.plain
        candidate = None
        if outcome.action is not Action.ALLOW and repeat is not None and document is not None:
            candidate = find_guard(exchange, outcome)
        if repeat is None or document is None or not isinstance(candidate, LoopGuard):
            return outcome
        try:
            failure = candidate.detector.similarity.find_failure(document)
            session = "" if failure is None else _name_session(document, candidate)
        except NotCounted:  # not all of it can be read
            return outcome
        if failure is None:
            return outcome
        failing, refused = self.find(outcome.policy, failure, outcome.tenant), outcome.action is Action.REJECT
        spares = failing.note(outcome.tenant, session, now, refused=refused)
        exchange.failure, exchange.fails_for_many = failure, exchange.fails_for_many or failing.standing
        if not spares:
            return outcome
        return candidate.detector.be_patient(outcome, repeat)

    def find(self, policy: str, failure: ToolFailure, caller: str) -> FailingTool:
        """The row of a failure; a new one belongs to this caller."""
        name = (policy, cut_text(failure.tool, NAME_SHOWN), failure.digest)
        key = self._keys.get(name)
        found = self.use(key) if key is not None else None
        if found is None:
            found = FailingTool()
            key = (caller, *name)
            self._keys[name] = key
            self.put(key, found)
        return found

    def list_incidents(self) -> list[IncidentRow]:
        """All current and past incidents, newest first; may be called from any thread."""
        rows = []
        for (_, policy, tool, failure), row in self._rows.items():
            if row.began:
                hashes = row.callers.list_kept(), row.sessions.list_kept()
                rows.append(IncidentRow(policy, tool, failure, row.began, row.last, *hashes, row.requests, row.spared))
        return sorted(rows, key=lambda row: -row.began)

    def make_document(self, *, shows_callers: bool) -> IncidentDocument:  # noqa: ARG002  # it has none
        """See `Table`."""
        return IncidentDocument(self.list_incidents())

    def _forget(self, key: tuple[str, ...]) -> None:
        super()._forget(key)
        self._keys.pop(key[1:], None)


def _name_session(document: Document, candidate: LoopGuard) -> str:
    """The session of a request, 16 hex digits: of its name, or else of what its user and its assistant said first."""
    named = candidate.session.encode()
    if not named:
        conversation = open_conversation(document)
        read_transcript(conversation)
        named = read_opening(conversation)
    return digest(b"%b %b" % (candidate.tenant.encode(), named)).hex()
