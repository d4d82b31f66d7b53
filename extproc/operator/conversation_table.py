"""Looping conversations, for people: what each has cost and spared, whichever policies and detectors see it.

Rows of the table of loops cannot be added up, because a request may be part of several. Here, each request is counted once.
Only requests that are acted on cost anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from time import time
from typing import Final

from extproc.apis import open_conversation
from extproc.decision import Action, Decision, Outcome
from extproc.detectors.turn import digest
from extproc.engine.exchange import Exchange
from extproc.engine.guards import Guard, SessionGuard
from extproc.engine.orders import hash_descriptor
from extproc.engine.settlements import LoopCost, find_reserved
from extproc.operator.conversation_rows import MAX_LOOPS, PACE_SECONDS, ConversationDocument, ConversationRow
from extproc.operator.loop_table import PATH_SHOWN, find_agent, find_guard, name_repeated
from extproc.operator.openings import read_opening
from extproc.operator.table import NAME_SHOWN, NAMES_SHOWN, Table
from extproc.request.document import Document, NotCounted
from extproc.request.http import cut_text
from extproc.sessions.limits import UNNAMED, SessionSubject
from extproc.sessions.rates import estimate_tokens, read_model

_OPENING: Final = 8
"""Bytes of the digest of how a conversation opens."""


class ConversationTable(Table[ConversationRow, ConversationDocument]):
    """The looping conversations of one process, by caller and conversation."""

    def note(self, exchange: Exchange, decision: Decision, acted: Sequence[Outcome]) -> None:
        """Note a request, given the outcomes about loops that are not ALLOW. What is decided in two parts is counted once."""
        now, again = time(), exchange.find_conversation_key()
        key = again or name_conversation(exchange, decision.trace)
        row = self.use(key)
        failure = exchange.failure
        if row is None and failure is not None and _are_widespread(acted):
            key = ("", f"{failure.tool}\n{failure.digest}")  # those of an incident share a row, or they would fill the table
            row = self.use(key)
        exchange.conversation_key = key
        if row is None:
            row = ConversationRow(tenant=key[0], conversation=key[1], first=now, last=now, paced=now)
            self.put(key, row)
        if not row.path:
            request, candidate = exchange.request, find_guard(exchange, acted[0])
            row.path = cut_text(request.path, PATH_SHOWN)
            row.model = cut_text(read_model(request.path, exchange.content), NAME_SHOWN)
            if key[0]:
                row.session, row.agent = _find_session(exchange), find_agent(request, candidate)
                row.descriptors = [
                    (cut_text(name, NAME_SHOWN), hash_descriptor(name, value))
                    for name, value in (candidate.values[:NAMES_SHOWN] if candidate is not None else ())
                ]
        _describe(row, exchange, acted, now)
        row.last = now
        if not again:
            refused = decision.action is Action.REJECT or exchange.enforcing.forbidden is not None
            _count(row, exchange, now, refused=refused)
            row.action, row.shadow = decision.action.value, ""
        if decision.shadow is not None:
            row.shadow = decision.shadow.action.value

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

    def settle(self, spent: LoopCost, now: float, *, estimated: bool) -> None:
        """Note what a request has cost that this replica, or another one, has noted with its estimate."""
        row = self.use(spent.key)
        if row is None:
            row = ConversationRow(tenant=spent.key[0], conversation=spent.key[1], first=now, last=now, paced=now)
            self.put(spent.key, row)
        row.cost += spent.cost - spent.reserved
        row.estimated += (spent.cost if estimated else 0) - spent.reserved
        row.prompt += spent.prompt - spent.estimated_prompt

    def make_document(self, *, shows_callers: bool) -> ConversationDocument:  # noqa: ARG002  # it has none
        """See `Table`; the largest conversation comes first."""
        return ConversationDocument(sorted(self.copy(), key=lambda row: -(row.size + row.refused_size)))


def _count(row: ConversationRow, exchange: Exchange, now: float, *, refused: bool) -> None:
    size = exchange.size
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


def _describe(row: ConversationRow, exchange: Exchange, acted: Sequence[Outcome], now: float) -> None:
    """Note which loops the request is part of, and whether their tool fails for many."""
    for outcome in acted:
        repeats = name_repeated(outcome.repeat, outcome.fingerprint)
        name = (outcome.policy, outcome.detector, outcome.mode, outcome.tenant, repeats)
        if name not in row.loops and not is_widespread(outcome):
            row.loops = [*row.loops[1 - MAX_LOOPS :], name]
            row.tools = [cut_text(tool, NAME_SHOWN) for tool in outcome.list_tools()[:NAMES_SHOWN]] or row.tools
    failure = exchange.failure
    if failure is None:
        row.tool = row.failure = ""
        return
    row.tool, row.failure = cut_text(failure.tool, NAME_SHOWN), failure.digest
    if exchange.fails_for_many:
        row.failing = now


def is_widespread(outcome: Outcome) -> bool:
    """Whether a request is part of an incident, and of no loop of its own."""
    return outcome.repeat is not None and outcome.repeat.widespread


def _are_widespread(acted: Sequence[Outcome]) -> bool:
    return all(is_widespread(outcome) for outcome in acted)


def name_conversation(exchange: Exchange, trace: Sequence[Outcome]) -> tuple[str, str]:
    """The key of a request's row: the caller, and what distinguishes the conversation.

    All outcomes of a request have one row, so the first detector names the caller, whether it acts or not.
    """
    first = trace[0]
    for outcome in trace:
        if not isinstance(outcome.subject, SessionSubject):
            first = outcome
            break
    named = _find_name(exchange) or _find_opening(exchange.plain)
    return first.tenant, named or f"#{name_repeated(first.repeat, first.fingerprint)}"


def _find_name(exchange: Exchange) -> str:
    """The hash of the name of the request's session, as detectors know it, or else its limits; empty for none."""
    named = ""
    for candidate in _list_named(exchange):
        if not isinstance(candidate, SessionGuard):
            return candidate.session
        named = named or candidate.session
    return named


def _find_session(exchange: Exchange) -> str:
    """The same, as limits know it, or else detectors: orders about sessions mean these."""
    named = ""
    for candidate in _list_named(exchange):
        if isinstance(candidate, SessionGuard):
            return candidate.session
        named = named or candidate.session
    return named


def _list_named(exchange: Exchange) -> list[Guard]:
    return [each for group in exchange.groups for each in group.active if each.session not in {"", UNNAMED}]


def _find_opening(document: Document | None) -> str:
    """A digest of how the conversation of a document opens, after `=`; empty if unknown."""
    if document is None or document.shortened:
        return ""
    try:
        conversation = open_conversation(document)
        return "" if conversation.elsewhere else f"={digest(read_opening(conversation), _OPENING).hex()}"
    except NotCounted:
        return ""
