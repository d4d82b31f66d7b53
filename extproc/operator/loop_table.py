"""Looping conversations for operators: their costs, savings and loops, and the actions taken.

Only requests that a policy acts on are recorded here, so others cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from time import time
from typing import Final

from msgspec.structs import replace

from extproc.apis import open_conversation
from extproc.apis.conversation import Conversation
from extproc.decision import Action, Decision, Outcome, Repeat
from extproc.detectors.chain import Transcript
from extproc.detectors.turn import digest
from extproc.engine.exchange import Exchange
from extproc.engine.guards import Guard, LoopGuard, SessionGuard
from extproc.engine.orders import hash_descriptor
from extproc.engine.settlements import LoopCost, find_reserved
from extproc.operator.loop_rows import (
    MAX_LOOPS,
    MINUTES,
    MOST_TIMES,
    PACE_SECONDS,
    ConversationRow,
    Line,
    Loop,
    LoopDocument,
    NoteLabels,
    merge_lines,
)
from extproc.operator.rows import merge
from extproc.operator.table import (
    NAME_SHOWN,
    NAMES_SHOWN,
    UNKNOWN,
    KnownAs,
    Table,
    cut_caller,
    find_known,
)
from extproc.request.clients import AGENT_HEADERS
from extproc.request.document import Document, NotCounted
from extproc.request.http import HttpRequest, cut_text
from extproc.sessions.limits import UNNAMED, SessionSubject
from extproc.sessions.rates import estimate_tokens, read_model

_MAX_CURVES: Final = 1_000
PATH_SHOWN: Final = 256

_FAST: Final = 1.0
"""If a loop's requests are closer than this, in seconds, its refusal is not computed anew."""

_OPENING: Final = 8
"""Length of the digest of a conversation's opening, in bytes."""


class LoopTable(Table[ConversationRow, LoopDocument]):
    """The looping conversations seen by this process, and curves by policy, mode and action.

    A request is counted once in its conversation, and once in each of its loops.
    """

    def __init__(self, results_shown: int = 0) -> None:
        """Create an empty table that shows this number of characters of repeated results."""
        super().__init__()
        self._results_shown = results_shown
        self.curves: dict[tuple[str, str, str], Line] = {}
        self.after: dict[NoteLabels, int] = {}

    def note(
        self, exchange: Exchange, decision: Decision, acted: Sequence[Outcome]
    ) -> list[tuple[Outcome, Loop]]:
        """Note a request and the loop outcomes in it that are not ALLOW; returns its loops.

        A request that is decided in two parts is counted once.
        """
        now, again, failure = time(), exchange.find_conversation_key(), exchange.failure
        key = again or name_conversation(exchange, decision.trace)
        row = self.use(key)
        if row is None:
            if failure is not None and all(is_widespread(outcome) for outcome in acted):
                # Conversations of an incident share a row, otherwise they would fill the table.
                key = ("", f"{failure.tool}\n{failure.digest}")
            row = self._open_row(key, now)
        exchange.conversation_key = key
        if not row.path:
            request, candidate = exchange.request, find_guard(exchange, acted[0])
            row.path = cut_text(request.path, PATH_SHOWN)
            row.model = cut_text(read_model(request.path, exchange.content), NAME_SHOWN)
            if key[0]:  # orders name sessions as limits do
                row.session, row.agent = (
                    _find_name(exchange, limited=True),
                    find_agent(request, candidate),
                )
                row.descriptors = [
                    (cut_text(name, NAME_SHOWN), hash_descriptor(name, value))
                    for name, value in (
                        candidate.values[:NAMES_SHOWN] if candidate is not None else ()
                    )
                ]
        row.last = now
        loops: list[tuple[Outcome, Loop]] = []
        for outcome in acted:
            self._draw(outcome, int(now) // 60)
            if not is_widespread(outcome):  # otherwise counted in the incident's row
                loop = _open_loop(
                    row, exchange, outcome, name_repeated(outcome.repeat, outcome.fingerprint), now
                )
                self._look_into(loop, exchange, outcome, now)
                _count_in_loop(
                    loop, exchange.sums.length, outcome, now, stops=outcome is decision.lead
                )
                loops.append((outcome, loop))
        row.tool, row.failure = (
            (cut_text(failure.tool, NAME_SHOWN), failure.digest)
            if failure is not None
            else ("", "")
        )
        if failure is not None and exchange.fails_for_many:
            row.failing = now
        if not again:
            refused = decision.action is Action.REJECT or exchange.enforcing.forbidden is not None
            _count(row, exchange, now, refused=refused)
            row.action, row.shadow = decision.action.value, ""
        if decision.shadow is not None:
            row.shadow = decision.shadow.action.value
        return loops

    def _look_into(self, loop: Loop, exchange: Exchange, outcome: Outcome, now: float) -> None:
        """Note when a loop will be refused, and the result that it repeats."""
        guard, document = find_guard(exchange, outcome), exchange.plain
        if not isinstance(guard, LoopGuard):
            return
        known = loop.refused_left > 1 and outcome.action is not Action.REJECT
        follows = outcome.count == loop.count + 1 or now - loop.last < _FAST
        if known and follows and outcome.repeat is not None:
            loop.refused_left -= 1
            return
        detector = guard.detector
        try:
            loop.refused_at, loop.refused_left, loop.refused_within = detector.foresee_refusal(
                outcome, document, bare=guard.is_bare
            )
            if self._results_shown and document is not None:
                result = detector.similarity.find_result(document)
                start = " ".join(result[: 8 * self._results_shown].split())
                loop.result = start[: self._results_shown]
        except NotCounted:  # the body is partly unreadable
            loop.refused_at = loop.refused_left = loop.refused_within = 0

    def note_allowed(self, exchange: Exchange, decision: Decision) -> None:
        """Note a request that an override allows, once, if its conversation is known."""
        if exchange.find_conversation_key():
            return
        key = name_conversation(exchange, decision.trace)
        row = self.use(key)
        if row is not None:
            exchange.conversation_key = key
            row.last = now = time()
            row.action, row.shadow = Action.ALLOW.value, ""
            _count(row, exchange, now, refused=False)

    def note_after(  # noqa: PLR0913  # what is known of a change
        self,
        exchange: Exchange,
        decision: Decision,
        outcome: Outcome,
        repeats: str,
        fingerprint: str,
        labels: NoteLabels,
    ) -> None:
        """Note a change after a loop's first note; see `AfterNote`.

        Another replica may have sent the note.
        """
        now = time()
        if labels in self.after or len(self.after) < _MAX_CURVES:
            self.after[labels] = self.after.get(labels, 0) + 1
        row = self._open_row(
            exchange.find_conversation_key() or name_conversation(exchange, decision.trace), now
        )
        loop = _open_loop(row, exchange, outcome, repeats, now)
        if not loop.requests:
            loop.fingerprint = fingerprint
        *_, loop.cause, arm, after = labels
        name = f"{arm} {after}"
        loop.after[name] = loop.after.get(name, 0) + 1

    def settle(self, spent: LoopCost, now: float, *, estimated: bool) -> None:
        """Replace the estimated cost of a request by its cost.

        Another replica may have noted the estimate.
        """
        row = self._open_row(spent.key, now)
        row.cost += spent.cost - spent.reserved
        row.estimated += (spent.cost if estimated else 0) - spent.reserved
        row.prompt += spent.prompt - spent.estimated_prompt

    def _open_row(self, key: tuple[str, ...], now: float) -> ConversationRow:
        row = self.use(key)
        if row is None:
            row = ConversationRow(
                tenant=key[0], conversation=key[1], first=now, last=now, paced=now
            )
            self.put(key, row)
        return row

    def list_loops(self) -> list[Loop]:
        """The loops of all conversations, each once."""
        return merge([loop for row in self.copy() for loop in row.loops if loop.requests])

    def make_document(self, *, shows_callers: bool) -> LoopDocument:
        """A snapshot of the table, largest conversation first.

        Callers' values are left out unless they may be shown.
        """
        rows = sorted(self.copy(), key=lambda row: -(row.size + row.refused_size))
        if not shows_callers:
            rows = [
                replace(row, loops=[replace(loop, caller=[]) for loop in row.loops]) for row in rows
            ]
        minute = int(time()) // 60
        return LoopDocument(
            rows,
            merge_lines(self.curves.copy().values(), minute),
            after=list(self.after.copy().items()),
        )

    def _draw(self, outcome: Outcome, minute: int) -> None:
        key = outcome.policy, outcome.mode, outcome.action.value
        curve = self.curves.get(key)
        if curve is None:
            if len(self.curves) >= _MAX_CURVES:
                return
            curve = self.curves[key] = Line(*key, minute, [0] * MINUTES)
        curve.add(minute)


def _count_in_loop(loop: Loop, size: int, outcome: Outcome, now: float, *, stops: bool) -> None:
    action = outcome.action.value
    loop.requests[action] = loop.requests.get(action, 0) + 1
    loop.fingerprint, loop.count, loop.last = outcome.fingerprint, outcome.count, now
    loop.strength = outcome.strength
    loop.size += size
    if stops and outcome.action is Action.REJECT:
        loop.stopped += 1
        loop.stopped_size += size


def _count(row: ConversationRow, exchange: Exchange, now: float, *, refused: bool) -> None:
    size = exchange.sums.length
    row.requests += 1
    row.times = [*row.times[1 - MOST_TIMES :], now]
    if refused:
        row.refused += 1
        row.refused_size += size
        return
    row.size += size
    row.pace = row.pace * exp(min(0.0, row.paced - now) / PACE_SECONDS) + size
    row.paced = now
    reserved = find_reserved(exchange)
    if reserved >= 0:
        exchange.is_priced = True
        row.cost += reserved
        row.estimated += reserved
        row.priced += size
        row.prompt += estimate_tokens(size)


def _open_loop(
    row: ConversationRow, exchange: Exchange, outcome: Outcome, repeats: str, now: float
) -> Loop:
    """The loop of an outcome.

    A new one starts without requests, and evicts the row's oldest if full.
    """
    name = outcome.policy, outcome.detector, outcome.mode, outcome.tenant, repeats
    for loop in reversed(row.loops):
        if loop.name == name:
            return loop
    request, candidate = exchange.request, find_guard(exchange, outcome)
    caller, known = cut_caller(candidate.values) if candidate is not None else [], UNKNOWN
    for loop in row.loops:
        if loop.name[:4] == name[:4]:  # loops of one guard and caller share these values
            caller, known = (
                loop.caller,
                KnownAs(loop.alias, loop.labels, loop.credentials, loop.parts),
            )
    if known is UNKNOWN and candidate is not None:
        known = find_known(candidate)
    path = cut_text(request.path, PATH_SHOWN)
    opened = Loop(
        policy=outcome.policy,
        detector=outcome.detector,
        mode=outcome.mode,
        tenant=outcome.tenant,
        repeats=repeats,
        session=candidate.session if candidate is not None else "",
        fingerprint=outcome.fingerprint,
        method=cut_text(request.method, NAME_SHOWN),
        path=row.path if row.path == path else path,
        route=cut_text(request.facts.route(), NAME_SHOWN),
        model=cut_text(read_model(request.path, exchange.content), NAME_SHOWN),
        tools=[cut_text(tool, NAME_SHOWN) for tool in outcome.list_tools()[:NAMES_SHOWN]],
        caller=caller,
        first=now,
        last=now,
        count=0,
        requests={},
        size=0,
        stopped=0,
        stopped_size=0,
        **known._asdict(),
        agent=find_agent(request, candidate),
    )
    row.loops = [*row.loops[1 - MAX_LOOPS :], opened]
    row.tools = opened.tools or row.tools
    return opened


def find_agent(request: HttpRequest, candidate: Guard | None) -> str:
    """The agent's self-reported id; empty if it is a caller's value, which may be secret."""
    agent = next((value for name in AGENT_HEADERS if (value := request.read_header(name))), "")
    hidden = [] if candidate is None else [value for _, value in candidate.values]
    return "" if agent in hidden else cut_text(agent, NAME_SHOWN)


def find_guard(exchange: Exchange, outcome: Outcome) -> Guard | None:
    """The guard that produced an outcome."""
    return (exchange.shadow if outcome.mode == "shadow" else exchange.enforcing).find(outcome)


def name_repeated(repeat: Repeat | None, fingerprint: str) -> str:
    """What identifies a loop: its fingerprint or, as that changes in a cycle, a cycle's tools."""
    if repeat is not None and len(repeat.tools) > 1:
        return "\n".join(sorted(repeat.tools))[:PATH_SHOWN]
    return fingerprint


def is_widespread(outcome: Outcome) -> bool:
    """Whether an outcome is part of an incident rather than a loop of its own."""
    return outcome.repeat is not None and outcome.repeat.widespread


def name_conversation(exchange: Exchange, trace: Sequence[Outcome]) -> tuple[str, str]:
    """The key of a request's row: the caller and the conversation.

    All outcomes of a request share a row, so the caller is always that of the first detector, even
    if it does not act.
    """
    first = trace[0]
    for outcome in trace:
        if not isinstance(outcome.subject, SessionSubject):
            first = outcome
            break
    named = _find_name(exchange, limited=False) or _find_opening(exchange.plain)
    return first.tenant, named or f"#{name_repeated(first.repeat, first.fingerprint)}"


def _find_name(exchange: Exchange, *, limited: bool) -> str:
    """The hash of the session's name, as limits or else detectors know it; empty without a name."""
    named = [
        each
        for group in exchange.groups
        for each in group.active
        if each.session not in {"", UNNAMED}
    ]
    for candidate in named:
        if isinstance(candidate, SessionGuard) is limited:
            return candidate.session
    return named[0].session if named else ""


def _find_opening(document: Document | None) -> str:
    """`=` and a digest of the conversation's opening; empty if unknown."""
    if document is None or document.shortened:
        return ""
    try:
        conversation = open_conversation(document)
        return (
            ""
            if conversation.elsewhere
            else f"={digest(read_opening(conversation), _OPENING).hex()}"
        )
    except NotCounted:
        return ""


def read_opening(conversation: Conversation) -> bytes:
    """The first words of the user and the assistant, which stay the same as a conversation grows.

    The assistant's turn is left out if no detector has read the transcript. Raises NotCounted if
    the user's is unreadable.
    """
    shown = conversation.transcript
    turn = shown.turns[0].hash if isinstance(shown, Transcript) and shown.turns else b""
    return b"%b %b" % (conversation.read_first_words().encode("utf-8", "surrogatepass"), turn)
