"""Edits a request's body: removes or forbids tools, forbids several calls at once, asks for usage, and adds a note.

Impossible edits are counted, and the request continues without them, unless a session's limits forbid all of its tools.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Final

from extproc.decision import Action, Decision, Outcome
from extproc.engine.exchange import Exchange
from extproc.ext_proc.answers.go_on import NARROWED, STEERED
from extproc.ext_proc.budget import InspectionBudget
from extproc.ext_proc.changes.edits import NotEdited
from extproc.ext_proc.changes.narrow import forbid_tools, narrow
from extproc.ext_proc.changes.steer import steer, write_note
from extproc.ext_proc.changes.usage import request_usage
from extproc.operator.reporting import Reporter
from extproc.request.patch import AMBIGUOUS, Patch, Pieces

OBSERVED: Final = "observed"
NOTHING: Final = "no_body"
"""Reasons why a body cannot be edited: the request is only observed, or has none."""

_MOST_SECONDS: Final = 0.05
"""More than all edits of a request take. Beyond this, a tenant does not pay for other processes' use of the processor."""

_INSPECT_LIMIT: Final = "inspect_limit"
_NOTHING_DONE: Final = frozenset({OBSERVED, NOTHING})


class Original:
    """A request's body as it came.

    Attributes:
        content: the whole body; None if it cannot be edited.
        why: the reason for None, as in `unsteered_total`.
    """

    __slots__ = ("content", "why")

    def __init__(self, content: bytes | memoryview | None, why: str = "") -> None:
        self.content = content
        self.why = why

    def read(self, most: int) -> bytes | memoryview:
        """The whole body.

        Raises:
            NotEdited: it cannot be edited, or is longer than `most` bytes.
        """
        if self.content is None:
            raise NotEdited(self.why)
        if len(self.content) > most:
            raise NotEdited(_INSPECT_LIMIT)
        return self.content


class Changed:
    """The result of an edit.

    Attributes:
        body: the new body in pieces; None if it is unchanged.
        marks: headers that tell the upstream about the edit.
    """

    __slots__ = ("body", "marks")

    def __init__(self, body: Pieces | None, marks: tuple[bytes, ...]) -> None:
        self.body = body
        self.marks = marks


UNCHANGED: Final = Changed(None, ())


class _Landing:
    """Forbids all tools of a body that gets a note.

    Attributes:
        began: the note has a place, so an error from then on is about the tools.
        narrowed: there were tools to forbid.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.began = False
        self.narrowed = False

    def forbid_tools(self, patch: Patch) -> None:
        """Forbid them; raises as `narrow.forbid_tools` does."""
        self.began = True
        self.narrowed = forbid_tools(patch, self._path)


class Changes:
    """Changes the bodies of requests that have been decided."""

    def __init__(self, reporter: Reporter, budget: InspectionBudget) -> None:
        self._reporter = reporter
        self._budget = budget

    def apply(self, exchange: Exchange, decision: Decision, original: Original) -> tuple[Decision, Changed]:
        """Edit a request's body as its policies require.

        Returns:
            the decision, which differs if an edit was impossible, and the result of the edits.
        """
        tenant = exchange.find_tenant()
        began = perf_counter()  # the thread's clock is a system call, which takes about 1 us
        if original.content is not None and not self._budget.allows(tenant, began):
            original = Original(None, "inspect_budget")
        changed = UNCHANGED
        if exchange.is_narrowed:
            decision, changed = self._narrow(exchange, decision, original)
        if exchange.asks_usage and decision.action is not Action.REJECT:
            changed = self._request_usage(exchange, original, changed)
        if decision.steer is not None and decision.action is not Action.REJECT:
            decision, changed = self._steer(exchange, decision, decision.steer, original, changed)
        self._budget.spend(tenant, min(perf_counter() - began, _MOST_SECONDS))
        return decision, changed

    def _narrow(self, exchange: Exchange, decision: Decision, original: Original) -> tuple[Decision, Changed]:
        """Remove or forbid tools of the request, or refuse it if that is impossible and none may be called."""
        sessions = exchange.enforcing.sessions
        narrowed = [(session, session.narrowing) for session in sessions if session.narrowing is not None]
        strict = [session for session, narrowing in narrowed if narrowing.every]
        tools = {tool for _, narrowing in narrowed for tool in narrowing.tools}
        kept = (
            frozenset.intersection(*[narrowing.kept for _, narrowing in narrowed if narrowing.every]) if strict else frozenset()
        )
        scarce = {tool for _, narrowing in narrowed for tool in narrowing.scarce}
        most = min([session.plan.steers for session in strict or [session for session, _ in narrowed]])
        try:
            without = None if strict else tools
            whole, document = original.read(most), exchange.document
            body = narrow(exchange.request, whole, without, kept=kept - tools, scarce=scarce, document=document)
        except Exception as error:  # noqa: BLE001  # no error may undo the decision
            why = self._find_reason(error)
            self._reporter.report_unnarrowed([session.plan.id for session, _ in narrowed], why)
            emptied = strict or [session for session, narrowing in narrowed if narrowing.tools and why == AMBIGUOUS]
            if why in _NOTHING_DONE or not emptied:
                return decision, UNCHANGED  # if the model calls such a tool, the next request is refused
            return decision.refuse_instead(emptied[0].refuse_unnarrowed()), UNCHANGED
        return decision, UNCHANGED if body == original.content else Changed([body], (NARROWED,))

    def _request_usage(self, exchange: Exchange, original: Original, changed: Changed) -> Changed:
        """Ask for the usage of a stream. If that is impossible, its cost is estimated, and reported as such."""
        most = max([plan.steers for plan in exchange.list_asking()])
        try:
            body = b"".join(changed.body) if changed.body is not None else original.read(most)
            pieces = request_usage(exchange.request, body, exchange.document)
        except Exception as error:  # noqa: BLE001  # no error may undo the decision
            self._find_reason(error)
            return changed
        return changed if len(pieces) == 1 else Changed(pieces, changed.marks)

    def _steer(
        self, exchange: Exchange, decision: Decision, outcome: Outcome, original: Original, changed: Changed
    ) -> tuple[Decision, Changed]:
        """Add a note to the request, or let it continue with a warning if that is impossible."""
        try:
            guard = exchange.find_guard(outcome)
            body = b"".join(changed.body) if changed.body is not None else original.read(guard.plan.steers)
            note = write_note(outcome, exchange, guard.compiled)
            make_marks = partial(exchange.make_marks, guard)
            marks = *changed.marks, STEERED
            if outcome.action is Action.LAND:
                add_note = partial(steer, exchange.request, body, note, make_marks, exchange.document)
                return decision, self._land(exchange, outcome, add_note, marks)
            return decision, Changed(steer(exchange.request, body, note, make_marks, exchange.document), marks)
        except Exception as error:  # noqa: BLE001  # no error may undo the decision
            self._reporter.report_unsteered(decision, self._find_reason(error))
            return decision.warn_instead(), changed

    def _land(self, exchange: Exchange, outcome: Outcome, add_note: Callable[..., Pieces], marks: tuple[bytes, ...]) -> Changed:
        """Add a note and forbid all tools; where that is impossible, the note has to do. Raises what `steer` does."""
        landing = _Landing(exchange.request.path)
        try:
            noted = add_note(landing.forbid_tools)
        except Exception as error:
            if not landing.began:
                raise
            self._reporter.report_unnarrowed([outcome.policy], self._find_reason(error))
            return Changed(add_note(), marks)
        return Changed(noted, tuple(dict.fromkeys((*marks, NARROWED))) if landing.narrowed else marks)

    def _find_reason(self, error: Exception) -> str:
        """The reason why a body was not edited; internal errors are logged."""
        if isinstance(error, NotEdited):
            return error.reason
        self._reporter.report_failure("a body could not be changed, the decision stands", error)
        return "internal_error"
