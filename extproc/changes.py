"""What becomes of a request's body: tools that have no budget left go, and a note for the model comes.

What cannot be done is counted, and the request goes on without it, unless its session may not have any of its tools.
"""

from __future__ import annotations

from functools import partial
from time import thread_time
from typing import Final, NamedTuple

from extproc.answers.edits import AMBIGUOUS, NotEdited
from extproc.answers.go_on import NARROWED, STEERED, Header
from extproc.answers.narrow import narrow
from extproc.answers.steer import steer, write_note
from extproc.budget import InspectionBudget
from extproc.decision import Action, Decision, Outcome
from extproc.evaluation import Evaluation
from extproc.reporting import Reporter

OBSERVED: Final = "observed"
NOTHING: Final = "no_body"
"""Why a body cannot be changed: the request is only watched, or has none."""

_NOTHING_DONE: Final = frozenset({OBSERVED, NOTHING})


class Original(NamedTuple):
    """A request's body as it came.

    Attributes:
        content: all of it; None where it cannot be changed.
        why: it cannot, as `unsteered_total` shows it.
    """

    content: bytes | memoryview | None
    why: str = ""

    def take(self) -> bytes | memoryview:
        """All of it.

        Raises:
            NotEdited: it cannot be changed.
        """
        if self.content is None:
            raise NotEdited(self.why)
        return self.content


class Changed(NamedTuple):
    """What has become of it.

    Attributes:
        body: all of it; None where it is as it was.
        marks: headers that tell the upstream.
    """

    body: bytes | None
    marks: tuple[Header, ...]


UNCHANGED: Final = Changed(None, ())


class Changes:
    """Changes the bodies of requests that have been decided."""

    def __init__(self, reporter: Reporter, budget: InspectionBudget) -> None:
        """Put the parts together.

        Args:
            reporter: is told what cannot be done.
            budget: of time, which this takes out of.
        """
        self._reporter = reporter
        self._budget = budget

    def apply(self, evaluation: Evaluation, decision: Decision, original: Original) -> tuple[Decision, Changed]:
        """Change a request's body as its policies want it.

        Returns:
            the decision, which is another one where that cannot be done, and the body.
        """
        began = thread_time()
        changed = UNCHANGED
        if evaluation.is_narrowed:
            decision, changed = self._narrow(evaluation, decision, original)
        if decision.steer is not None and decision.action is not Action.REJECT:
            decision, changed = self._steer(evaluation, decision, decision.steer, original, changed)
        self._budget.spend(evaluation.find_tenant(), thread_time() - began)
        return decision, changed

    def _narrow(self, evaluation: Evaluation, decision: Decision, original: Original) -> tuple[Decision, Changed]:
        """Take tools out of the request, or refuse it where that cannot be."""
        sessions = evaluation.enforcing.sessions
        narrowed = [(session, session.narrowing) for session in sessions if session.narrowing is not None]
        strictest = next((session for session, narrowing in narrowed if narrowing.every), None)
        tools = {tool for _, narrowing in narrowed for tool in narrowing.tools}
        try:
            body = narrow(evaluation.request, original.take(), None if strictest is not None else tools, evaluation.document)
        except NotEdited as why:
            self._reporter.report_unnarrowed([session.plan.id for session, _ in narrowed], why.reason)
            if why.reason in _NOTHING_DONE or (strictest is None and why.reason != AMBIGUOUS):
                return decision, UNCHANGED  # a tool that is called all the same refuses the next request
            return decision.refuse_instead((strictest or narrowed[0][0]).refuse_unnarrowed()), UNCHANGED
        return decision, UNCHANGED if body == original.content else Changed(body, (NARROWED,))

    def _steer(
        self, evaluation: Evaluation, decision: Decision, outcome: Outcome, original: Original, changed: Changed
    ) -> tuple[Decision, Changed]:
        """Put a note into the request, or let it go on with a warning where it cannot have one."""
        candidate, request = evaluation.find_candidate(outcome), evaluation.request
        note, make_marks = write_note(outcome, request, candidate.guard), partial(evaluation.make_marks, candidate)
        try:
            if changed.body is not None:
                return decision, Changed(steer(request, changed.body, note, make_marks), (*changed.marks, STEERED))
            return decision, Changed(steer(request, original.take(), note, make_marks, evaluation.document), (STEERED,))
        except NotEdited as why:
            self._reporter.report_unsteered(decision, why.reason)
            return decision.warn_instead(), changed
