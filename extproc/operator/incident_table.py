"""Incidents: if a tool fails alike for many sessions, its server is at fault, not each agent.

Only loops whose newest result is an error are considered. They belong to the same incident if
policy, tool and error are equal. An incident needs ENOUGH sessions within INCIDENT_SECONDS. A
caller counts for at most MOST_OF_CALLER of them, so that it needs several callers and none can
create one to avoid refusals. During an incident, its loops get the strictest action that does not
end a run. After LONGEST_SECONDS, its loops are refused for REST_SECONDS.

As in any table, a caller can create only its share of the rows, so it cannot evict those of others.
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
"""Maximum callers whose sessions are remembered; more than an incident needs."""


class FailingTool:
    """A tool that fails with a certain error, which may become an incident.

    Attributes:
        last: time of the last affected request, in seconds since 1970.
        began: start of the newest incident; 0 if there was none.
        standing: whether there is an incident, as of the last request.
        requests: number of affected requests.
        spared: affected requests that would otherwise have been refused.
        callers, sessions: all affected callers and sessions.
    """

    def __init__(self) -> None:
        self.last = self.began = 0.0
        self.standing = False
        self.requests = self.spared = 0
        self.callers = Sketch(size=SKETCHED)
        self.sessions = Sketch(size=SKETCHED)
        self._spares_until = -inf
        self._recent: dict[
            str, dict[str, float]
        ] = {}  # by caller: when each session was last part of it

    def note(self, caller: str, session: str, now: float, *, refused: bool) -> bool:
        """Note a request at `now`; returns whether an incident spares it.

        `refused` if it would be refused otherwise.
        """
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
    """The failing tools seen by this process, by first caller, policy, tool and error."""

    def __init__(self) -> None:
        super().__init__(_MAX_ROWS, _MAX_OF_CALLER)
        self._keys: dict[tuple[str, ...], tuple[str, ...]] = {}  # by policy, tool and error

    def weigh(self, exchange: Exchange, decision: Decision, now: float) -> Decision:
        """The decision, with milder actions for loops in an incident."""
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
        except NotCounted:  # the body is partly unreadable
            return outcome
        if failure is None:
            return outcome
        failing, refused = (
            self.find(outcome.policy, failure, outcome.tenant),
            outcome.action is Action.REJECT,
        )
        spares = failing.note(outcome.tenant, session, now, refused=refused)
        exchange.failure, exchange.fails_for_many = (
            failure,
            exchange.fails_for_many or failing.standing,
        )
        if not spares:
            return outcome
        return candidate.detector.be_patient(outcome, repeat)

    def find(self, policy: str, failure: ToolFailure, caller: str) -> FailingTool:
        """The row of a failure; a new row counts towards this caller's share."""
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
                rows.append(
                    IncidentRow(
                        policy,
                        tool,
                        failure,
                        row.began,
                        row.last,
                        *hashes,
                        row.requests,
                        row.spared,
                    )
                )
        return sorted(rows, key=lambda row: -row.began)

    # It has none
    def make_document(self, *, shows_callers: bool) -> IncidentDocument:  # noqa: ARG002
        """See `Table`."""
        return IncidentDocument(self.list_incidents())

    def _forget(self, key: tuple[str, ...]) -> None:
        super()._forget(key)
        self._keys.pop(key[1:], None)


def _name_session(document: Document, candidate: LoopGuard) -> str:
    """The hash of the session's name, else of the conversation's opening, in 16 hex digits."""
    named = candidate.session.encode()
    if not named:
        conversation = open_conversation(document)
        read_transcript(conversation)
        named = read_opening(conversation)
    return digest(b"%b %b" % (candidate.tenant.encode(), named)).hex()
