"""Edits a request's body: tools, tool choice, parallel calls, reported usage, and notes.

The table EDITS has a row for each action that edits. Impossible edits are counted, and the request
continues without them, unless a session's limits forbid all of its tools.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Final, NamedTuple

from extproc.apis import open_conversation
from extproc.decision import Action, Decision
from extproc.engine.exchange import Exchange
from extproc.ext_proc.answers.let_pass import NARROWED, STEERED
from extproc.ext_proc.budget import InspectionBudget
from extproc.ext_proc.changes.edits import NotEdited, edit
from extproc.ext_proc.changes.narrow import Tools, take_out
from extproc.ext_proc.changes.steer import add_note, write_note
from extproc.ext_proc.changes.usage import ask_usage
from extproc.operator.reporting import Reporter
from extproc.request.document import WORTH_COUNTING, NotCounted
from extproc.request.patch import AMBIGUOUS, Patch, Pieces

OBSERVED: Final = "observed"
NOTHING: Final = "no_body"
"""Reasons why a body cannot be edited: Envoy sends only a copy, or there is no body."""

_MOST_SECONDS: Final = 0.05
"""Longer than all edits of a request take. A caller is charged for no more, because other processes
may have used the processor."""

_INSPECT_LIMIT: Final = "inspect_limit"
_NOTHING_DONE: Final = frozenset({OBSERVED, NOTHING})


class Original(NamedTuple):
    """A request's body as received.

    Attributes:
        content: the whole body; None if it cannot be edited.
        why: the reason for None, as in `unsteered_total`.
    """

    content: bytes | memoryview | None
    why: str = ""

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


class Changed(NamedTuple):
    """The result of the edits.

    Attributes:
        body: the new body in pieces; None if it is unchanged.
        marks: header mutations that tell the upstream about the edits.
    """

    body: Pieces | None
    marks: tuple[bytes, ...]


UNCHANGED: Final = Changed(None, ())


class Job:
    """A decided request whose body is edited.

    Attributes:
        exchange: the request.
        decision: the decision; an impossible edit may change it.
        original: the body as received.
        changed: the result of the edits.
        noted: the outcome for the note, if any.
        narrowing: the sessions whose limits remove tools from the request.
        strict: those that remove all tools except a few.
        done: the number of completed steps of an edit.
    """

    def __init__(self, exchange: Exchange, decision: Decision, original: Original) -> None:
        self.exchange = exchange
        self.decision = decision
        self.original = original
        self.changed = UNCHANGED
        self.noted = [decision.steer] if decision.steer is not None else []
        self.narrowing = [
            session for session in exchange.enforcing.sessions if session.narrowing is not None
        ]
        self.strict = [
            session
            for session in self.narrowing
            if session.narrowing is not None and session.narrowing.every
        ]
        self.done = 0

    def list_due(self) -> list[str]:
        """The rows of EDITS to apply, in order."""
        due: list[str] = []
        if self.narrowing:
            due.append("finish" if self.strict else "narrow")
        if self.exchange.asks_usage:
            due.append("usage")
        return [*due, *[outcome.action.value for outcome in self.noted]]

    def edit(self, steps: tuple[Step, ...], most: int) -> None:
        """Apply steps to a body of at most `most` bytes. Raises NotEdited, or as the steps do."""
        body = (
            b"".join(self.changed.body)
            if self.changed.body is not None
            else self.original.read(most)
        )
        document, marks = self.exchange.document, list(self.changed.marks)
        if self.noted and document is not None and len(document) <= WORTH_COUNTING:
            with suppress(NotCounted):
                # The note's marks need it anyway; it locates the messages
                open_conversation(document)
        self.done = 0

        def change(patch: Patch) -> None:
            for step in steps:
                if step.change(patch, self):
                    marks.append(step.mark)
                self.done += 1

        pieces = edit(self.exchange.request, body, change, document)
        if len(pieces) > 1 or len(marks) > len(self.changed.marks):
            self.changed = Changed(pieces, tuple(dict.fromkeys([mark for mark in marks if mark])))


class Step(NamedTuple):
    """One change of an open body.

    Attributes:
        change: makes it; returns whether to tell the upstream. May raise NotEdited and NotCounted.
        mark: the header mutation that tells the upstream; empty for none.
    """

    change: Callable[[Patch, Job], bool]
    mark: bytes


class Edit(NamedTuple):
    """One kind of edit.

    Attributes:
        steps: its changes. If a later one is impossible, only the first is made.
        find_most: returns the maximum length of a body to edit, in bytes.
        give_up: reports that the first step is impossible, given the reason; returns the new
            decision.
    """

    steps: tuple[Step, ...]
    find_most: Callable[[Job], int]
    give_up: Callable[[Job, Reporter, str], Decision]


class Changes:
    """Edits the bodies of decided requests."""

    def __init__(self, reporter: Reporter, budget: InspectionBudget) -> None:
        self._reporter = reporter
        self._budget = budget

    def apply(
        self, exchange: Exchange, decision: Decision, original: Original
    ) -> tuple[Decision, Changed]:
        """Edit a request's body as its policies require.

        Returns:
            the decision, which differs if an edit was impossible, and the result of the edits.
        """
        tenant = exchange.find_tenant()
        began = perf_counter()  # the thread's clock would take a system call, about 1 us
        if original.content is not None and not self._budget.allows(tenant, began):
            original = Original(None, "inspect_budget")
        job = Job(exchange, decision, original)
        for name in job.list_due():
            if job.decision.action is not Action.REJECT:
                self._apply(EDITS[name], job)
        self._budget.spend(tenant, min(perf_counter() - began, _MOST_SECONDS))
        return job.decision, job.changed

    def _apply(self, row: Edit, job: Job) -> None:
        """Apply one edit, or its first step."""
        try:
            job.edit(row.steps, row.find_most(job))
        except Exception as error:  # noqa: BLE001  # no error may undo the decision
            why = self._find_reason(error)
            if job.done and len(row.steps) > 1:
                self._reporter.report_unnarrowed([outcome.policy for outcome in job.noted], why)
                self._apply(row._replace(steps=row.steps[:1]), job)
            else:
                job.decision = row.give_up(job, self._reporter, why)

    def _find_reason(self, error: Exception) -> str:
        """The reason why a body was not edited. Internal errors are logged."""
        if isinstance(error, NotEdited):
            return error.reason
        self._reporter.report_failure("a body could not be changed, the decision stands", error)
        return "internal_error"


def _take_out(patch: Patch, job: Job) -> bool:
    narrowings = [session.narrowing for session in job.narrowing if session.narrowing is not None]
    tools = frozenset[str]().union(*[narrowing.tools for narrowing in narrowings])
    kept = [narrowing.kept for narrowing in narrowings if narrowing.every]
    scarce = frozenset[str]().union(*[narrowing.scarce for narrowing in narrowings])
    without = None if job.strict else tools
    given = Tools(without, frozenset.intersection(*kept) - tools if kept else frozenset(), scarce)
    return take_out(patch, job.exchange.request.path, given)


def _add_note(patch: Patch, job: Job) -> bool:
    exchange, outcome = job.exchange, job.noted[0]
    guard = exchange.find_guard(outcome)
    add_note(
        patch,
        lambda data: (
            write_note(outcome, exchange, guard.compiled),
            exchange.make_marks(guard, data),
        ),
        exchange.document,
    )
    return True


def _refuse(job: Job, reporter: Reporter, why: str) -> Decision:
    """Refuse a request if all tools that it would still declare are forbidden."""
    emptied = job.strict
    if why == AMBIGUOUS and not emptied:  # an upstream may see other tools in such a body
        emptied = [
            session
            for session in job.narrowing
            if session.narrowing is not None and session.narrowing.tools
        ]
    reporter.report_unnarrowed([session.plan.id for session in job.narrowing], why)
    if why in _NOTHING_DONE or not emptied:
        return job.decision  # a call of a forbidden tool is refused with the next request
    return job.decision.refuse_instead(emptied[0].refuse_unnarrowed())


def _warn(job: Job, reporter: Reporter, why: str) -> Decision:
    """Let the request continue with a warning."""
    reporter.report_unsteered(job.decision, why)
    return job.decision.warn_instead()


def _find_most(job: Job) -> int:
    return job.exchange.find_guard(job.noted[0]).plan.steers


_NARROW: Final = Edit(
    (Step(_take_out, NARROWED),),
    lambda job: min([session.plan.steers for session in job.strict or job.narrowing]),
    _refuse,
)
_NOTE: Final = Step(_add_note, STEERED)
_FORBID: Final = Step(
    lambda patch, job: take_out(patch, job.exchange.request.path, Tools(None, removes=False)),
    NARROWED,
)
_USAGE: Final = Step(lambda patch, job: ask_usage(patch, job.exchange.request.path), b"")

EDITS: Final[dict[str, Edit]] = {
    "narrow": _NARROW,
    "finish": _NARROW,
    "usage": Edit(
        (_USAGE,),
        lambda job: max([plan.steers for plan in job.exchange.list_asking()]),
        lambda job, _reporter, _why: job.decision,  # the cost is estimated instead
    ),
    "steer": Edit((_NOTE,), _find_most, _warn),
    "land": Edit((_NOTE, _FORBID), _find_most, _warn),
}
"""Edits, by the name of the action or of the session limit's demand."""
