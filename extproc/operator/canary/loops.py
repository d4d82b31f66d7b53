"""A sample of the loops that a candidate would newly refuse, for people to say whether that would be right.

A loop is what `/loops?group=conversation` has a row for: a caller's conversation, or what repeats if no conversation is known.
A person judges it once, however many of its requests would be refused.

Off unless asked for. Loops with the lowest hashes are kept: each has the same chance, on every replica the same ones, and room
is bounded. What was compared is kept only where that was asked for too. It stays in this process, and is shown to anyone who
asks the admin port.
"""
# interpreted: tells operators, not requests

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from extproc.budgets.subject import BudgetSubject
from extproc.decision import Outcome
from extproc.engine.candidates import Candidate, LoopCandidate
from extproc.engine.evaluation import Evaluation
from extproc.operator.conversation_table import name_conversation
from extproc.request.fingerprint import write_crc32
from extproc.request.http import cut_text
from extproc.sessions.limits import SessionSubject

_TEXT = 2_000
_NAME = 128
_DIGEST = 8


def name_loop(evaluation: Evaluation, outcome: Outcome) -> tuple[str, str]:
    """A loop's hash (16 hex digits, the same on all replicas), and its conversation, as in `ConversationRow`."""
    tenant, conversation = name_conversation(evaluation, [outcome])
    text = f"{tenant}\n{conversation}".encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=_DIGEST).hexdigest(), conversation


class SampledLoops:
    """The sampled loops of one pair: at most `size`, with what was compared in them if `bodies` is set."""

    def __init__(self, size: int, *, bodies: bool) -> None:
        self._size = size
        self._bodies = bodies
        self._kept: dict[str, dict[str, Any]] = {}

    def note(  # noqa: PLR0913  # what is known of a refusal
        self, evaluation: Evaluation, outcome: Outcome, loop: str, conversation: str, session: str, now: float
    ) -> None:
        """Note a new refusal.

        Args:
            evaluation: of the request.
            outcome: of the candidate.
            loop: from `name_loop`.
            conversation: likewise.
            session: hash of its name, empty for none.
            now: in seconds since 1970.
        """
        kept = self._kept
        if loop not in kept:
            if len(kept) >= self._size:
                last = max(kept)
                if loop > last:
                    return
                del kept[last]
            names = {"id": loop, "tenant": outcome.tenant, "conversation": conversation, "session": session}
            kept[loop] = {**names, **self._describe(evaluation, outcome, now)}
        row = kept[loop]
        row.update(_describe_measure(outcome), requests=row["requests"] + 1, last=now)

    def list_kept(self) -> list[dict[str, Any]]:
        """All loops of the sample, oldest first."""
        return sorted([dict(row) for row in list(self._kept.values())], key=lambda row: float(row["first"]))

    def _describe(self, evaluation: Evaluation, outcome: Outcome, now: float) -> dict[str, Any]:
        """The loop as the first of its refusals shows it: that is the one to judge."""
        request, repeat = evaluation.request, outcome.repeat
        candidate = _find_candidate(evaluation, outcome)
        cause = evaluation.find_cause(repeat)
        return {
            "policy": outcome.policy,
            "detector": outcome.detector,
            "similarity": candidate.guard.similarity_name,
            "method": cut_text(request.method, _NAME),
            "path": cut_text(request.path, _NAME),
            "fingerprint": outcome.fingerprint,
            "body_crc32": write_crc32(candidate.body_crc32),
            "tools": [cut_text(tool, _NAME) for tool in (repeat.tools if repeat is not None else outcome.subject.tools)],
            "cause": cause.kind if cause is not None else "",
            "rule": repeat.rule if repeat is not None else "",
            "strength": outcome.strength,
            **_describe_measure(outcome),
            "requests": 0,
            "first": now,
            "last": now,
            "compared": _show_compared(evaluation, candidate, bodies=self._bodies),
        }


def _describe_measure(outcome: Outcome) -> dict[str, Any]:
    """The count, turns looked at and time span; or a session's limit or a budget's rule, with used and allowed amounts."""
    subject, repeat = outcome.subject, outcome.repeat
    measure: dict[str, Any] = dict.fromkeys(("count", "turns", "span_seconds", "used", "allowed")) | {"limit": ""}
    if isinstance(subject, SessionSubject):
        used, allowed = subject.shown
        return measure | {"limit": subject.limit, "used": used, "allowed": allowed}
    if isinstance(subject, BudgetSubject):
        return measure | {"limit": subject.rule, "used": subject.limit - subject.left, "allowed": subject.limit}
    if repeat is not None:
        return measure | {"count": outcome.count, "turns": repeat.calls}
    return measure | {"count": outcome.count, "span_seconds": outcome.span_ms / 1000}


def _show_compared(evaluation: Evaluation, candidate: Candidate, *, bodies: bool) -> str | None:
    """What a detector compared in place of the body, or the start of that.

    Empty where checksums or no bodies were compared, None if there is a text that is not to be kept.
    """
    content = evaluation.content
    if content is None or evaluation.plain is None or not isinstance(candidate, LoopCandidate):
        return ""
    if candidate.compared is not None:
        return candidate.detector.similarity.quote(candidate.compared, evaluation.plain, _TEXT) if bodies else None
    if candidate.compared_exactly:  # else it is others that have looked into the body
        return bytes(content[:_TEXT]).decode("utf-8", "replace") if bodies else None
    return ""


def _find_candidate(evaluation: Evaluation, outcome: Outcome) -> Candidate:
    return next(
        candidate
        for candidate in evaluation.shadow.candidates
        if (candidate.plan.id, candidate.guard.name) == (outcome.policy, outcome.detector)
    )
