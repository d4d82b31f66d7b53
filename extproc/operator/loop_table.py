"""Looping conversations, for people: what each has cost and spared, its loops, and what happened to their requests.

Only requests that are acted on cost anything.
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
from extproc.engine.guards import Guard, SessionGuard
from extproc.engine.orders import hash_descriptor
from extproc.engine.settlements import LoopCost, find_reserved
from extproc.operator.loop_rows import (
    MAX_LOOPS,
    MINUTES,
    PACE_SECONDS,
    ConversationRow,
    Line,
    Loop,
    LoopDocument,
    NoteLabels,
    merge_lines,
)
from extproc.operator.rows import merge
from extproc.operator.table import NAME_SHOWN, NAMES_SHOWN, UNKNOWN, KnownAs, Table, cut_caller, find_known
from extproc.request.clients import AGENT_HEADERS
from extproc.request.document import Document, NotCounted
from extproc.request.http import HttpRequest, cut_text
from extproc.sessions.limits import UNNAMED, SessionSubject
from extproc.sessions.rates import estimate_tokens, read_model

_MAX_CURVES: Final = 1_000
PATH_SHOWN: Final = 256

_OPENING: Final = 8
"""Bytes of the digest of how a conversation opens."""


class LoopTable(Table[ConversationRow, LoopDocument]):
    """The looping conversations of one process, by caller and conversation, and curves by policy, mode and action.

    Each request is counted once in its conversation, and in each loop that it is part of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.curves: dict[tuple[str, str, str], Line] = {}
        self.after: dict[NoteLabels, int] = {}

    def note(self, exchange: Exchange, decision: Decision, acted: Sequence[Outcome]) -> list[tuple[Outcome, Loop]]:
        """Note a request, given the outcomes about loops that are not ALLOW; returns its loops.

        What is decided in two parts is counted once.
        """
        now, again, failure = time(), exchange.find_conversation_key(), exchange.failure
        key = again or name_conversation(exchange, decision.trace)
        row = self.use(key)
        if row is None:
            if failure is not None and all(is_widespread(outcome) for outcome in acted):
                key = (
                    "",
                    f"{failure.tool}\n{failure.digest}",
                )  # those of an incident share a row, or they would fill the table
            row = self._open_row(key, now)
        exchange.conversation_key = key
        if not row.path:
            request, candidate = exchange.request, find_guard(exchange, acted[0])
            row.path = cut_text(request.path, PATH_SHOWN)
            row.model = cut_text(read_model(request.path, exchange.content), NAME_SHOWN)
            if key[0]:  # orders about sessions mean those of limits
                row.session, row.agent = _find_name(exchange, limited=True), find_agent(request, candidate)
                row.descriptors = [
                    (cut_text(name, NAME_SHOWN), hash_descriptor(name, value))
                    for name, value in (candidate.values[:NAMES_SHOWN] if candidate is not None else ())
                ]
        row.last = now
        loops: list[tuple[Outcome, Loop]] = []
        for outcome in acted:
            self._draw(outcome, int(now) // 60)
            if not is_widespread(outcome):  # its row is the incident's
                loop = _open_loop(row, exchange, outcome, name_repeated(outcome.repeat, outcome.fingerprint), now)
                _count_in_loop(loop, exchange.sums.length, outcome, now, stops=outcome is decision.lead)
                loops.append((outcome, loop))
        row.tool, row.failure = (cut_text(failure.tool, NAME_SHOWN), failure.digest) if failure is not None else ("", "")
        if failure is not None and exchange.fails_for_many:
            row.failing = now
        if not again:
            refused = decision.action is Action.REJECT or exchange.enforcing.forbidden is not None
            _count(row, exchange, now, refused=refused)
            row.action, row.shadow = decision.action.value, ""
        if decision.shadow is not None:
            row.shadow = decision.shadow.action.value
        return loops

    def note_allowed(self, exchange: Exchange, decision: Decision) -> None:
        """Note a request that an operator's order lets through, if its conversation is known and it has not been noted."""
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
        self, exchange: Exchange, decision: Decision, outcome: Outcome, repeats: str, fingerprint: str, labels: NoteLabels
    ) -> None:
        """Note what came after the first note of a loop, which another replica may have acted on; see `AfterNote`."""
        now = time()
        if labels in self.after or len(self.after) < _MAX_CURVES:
            self.after[labels] = self.after.get(labels, 0) + 1
        row = self._open_row(exchange.find_conversation_key() or name_conversation(exchange, decision.trace), now)
        loop = _open_loop(row, exchange, outcome, repeats, now)
        if not loop.requests:
            loop.fingerprint = fingerprint
        *_, loop.cause, arm, after = labels
        name = f"{arm} {after}"
        loop.after[name] = loop.after.get(name, 0) + 1

    def settle(self, spent: LoopCost, now: float, *, estimated: bool) -> None:
        """Note what a request has cost that this replica, or another one, has noted with its estimate."""
        row = self._open_row(spent.key, now)
        row.cost += spent.cost - spent.reserved
        row.estimated += (spent.cost if estimated else 0) - spent.reserved
        row.prompt += spent.prompt - spent.estimated_prompt

    def _open_row(self, key: tuple[str, ...], now: float) -> ConversationRow:
        row = self.use(key)
        if row is None:
            row = ConversationRow(tenant=key[0], conversation=key[1], first=now, last=now, paced=now)
            self.put(key, row)
        return row

    def list_loops(self) -> list[Loop]:
        """The loops of all conversations, each once."""
        return merge([loop for row in self.copy() for loop in row.loops if loop.requests])

    def make_document(self, *, shows_callers: bool) -> LoopDocument:
        """The table as it is now, the largest conversation first; without callers' values unless they may be shown."""
        rows = sorted(self.copy(), key=lambda row: -(row.size + row.refused_size))
        if not shows_callers:
            rows = [replace(row, loops=[replace(loop, caller=[]) for loop in row.loops]) for row in rows]
        minute = int(time()) // 60
        return LoopDocument(rows, merge_lines(self.curves.copy().values(), minute), after=list(self.after.copy().items()))

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


def _open_loop(row: ConversationRow, exchange: Exchange, outcome: Outcome, repeats: str, now: float) -> Loop:
    """The loop of an outcome; a new one has no counted request, and the oldest makes room."""
    name = outcome.policy, outcome.detector, outcome.mode, outcome.tenant, repeats
    for loop in reversed(row.loops):
        if loop.name == name:
            return loop
    request, candidate = exchange.request, find_guard(exchange, outcome)
    caller, known = cut_caller(candidate.values) if candidate is not None else [], UNKNOWN
    for loop in row.loops:
        if loop.name[:4] == name[:4]:  # the same guard and caller, whose values are kept once
            caller, known = loop.caller, KnownAs(loop.alias, loop.labels, loop.credentials, loop.parts)
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
    """The id that the agent has given itself, unless it identifies the caller, which not everyone may see."""
    agent = next((value for name in AGENT_HEADERS if (value := request.read_header(name))), "")
    hidden = [] if candidate is None else [value for _, value in candidate.values]
    return "" if agent in hidden else cut_text(agent, NAME_SHOWN)


def find_guard(exchange: Exchange, outcome: Outcome) -> Guard | None:
    """The candidate of an outcome, enforcing or not."""
    return (exchange.shadow if outcome.mode == "shadow" else exchange.enforcing).find(outcome)


def name_repeated(repeat: Repeat | None, fingerprint: str) -> str:
    """What requests of one loop share: the fingerprint or, because that changes in a cycle, the cycle's tools."""
    if repeat is not None and len(repeat.tools) > 1:
        return "\n".join(sorted(repeat.tools))[:PATH_SHOWN]
    return fingerprint


def is_widespread(outcome: Outcome) -> bool:
    """Whether a request is part of an incident, and of no loop of its own."""
    return outcome.repeat is not None and outcome.repeat.widespread


def name_conversation(exchange: Exchange, trace: Sequence[Outcome]) -> tuple[str, str]:
    """The key of a request's row: the caller, and what distinguishes the conversation.

    All outcomes of a request have one row, so the first detector names the caller, whether it acts or not.
    """
    first = trace[0]
    for outcome in trace:
        if not isinstance(outcome.subject, SessionSubject):
            first = outcome
            break
    named = _find_name(exchange, limited=False) or _find_opening(exchange.plain)
    return first.tenant, named or f"#{name_repeated(first.repeat, first.fingerprint)}"


def _find_name(exchange: Exchange, *, limited: bool) -> str:
    """The hash of the name of the request's session, as limits (else detectors) know it, or else the others; empty for none."""
    named = [each for group in exchange.groups for each in group.active if each.session not in {"", UNNAMED}]
    for candidate in named:
        if isinstance(candidate, SessionGuard) is limited:
            return candidate.session
    return named[0].session if named else ""


def _find_opening(document: Document | None) -> str:
    """A digest of how the conversation of a document opens, after `=`; empty if unknown."""
    if document is None or document.shortened:
        return ""
    try:
        conversation = open_conversation(document)
        return "" if conversation.elsewhere else f"={digest(read_opening(conversation), _OPENING).hex()}"
    except NotCounted:
        return ""


def read_opening(conversation: Conversation) -> bytes:
    """What the user and the assistant said first, which stays when a conversation grows.

    The assistant's turn is left out if nothing has read the transcript.

    Raises:
        NotCounted: it cannot be read.
    """
    shown = conversation.transcript
    turn = shown.turns[0].hash if isinstance(shown, Transcript) and shown.turns else b""
    return b"%b %b" % (conversation.read_first_words().encode("utf-8", "surrogatepass"), turn)
