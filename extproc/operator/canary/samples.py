"""A sample of what a candidate would newly refuse, for a person to say whether that would be right.

Off unless asked for. Every refusal has the same chance to be in it, and its room is bounded (J. S. Vitter, Random sampling
with a reservoir, ACM TOMS 11, 1985, algorithm R). Callers stand there as hashes, and what was compared only where that was
asked for too. It stays in this process, and is shown to anyone who asks the admin port.
"""
# interpreted: tells operators, not requests

from __future__ import annotations

import secrets
from random import Random
from time import time
from typing import Any

from extproc.decision import Outcome
from extproc.engine.candidates import Candidate, LoopCandidate
from extproc.engine.evaluation import Evaluation
from extproc.request.fingerprint import write_crc32
from extproc.request.http import cut_text
from extproc.sessions.limits import SessionSubject

_TEXT = 2_000
_NAME = 128


class Samples:
    """Samples of one pair: at most `size`, with what was compared in them if `bodies` is set."""

    def __init__(self, size: int, *, bodies: bool) -> None:
        self._size = size
        self._bodies = bodies
        self._seen = 0
        self._kept: list[dict[str, Any]] = []
        self._random = Random()  # noqa: S311  # a sample, no secret

    def offer(self, evaluation: Evaluation, outcome: Outcome, session: str) -> None:
        """Add a refusal to the sample, or skip it; `session` is the hash of its name, empty for none."""
        self._seen += 1
        place = len(self._kept) if len(self._kept) < self._size else self._random.randrange(self._seen)
        if place < self._size:
            self._kept[place : place + 1] = [self._describe(evaluation, outcome, session)]

    def list_kept(self) -> list[dict[str, Any]]:
        """All samples, oldest first."""
        return sorted(self._kept, key=lambda sample: float(sample["at"]))

    def _describe(self, evaluation: Evaluation, outcome: Outcome, session: str) -> dict[str, Any]:
        request, repeat = evaluation.request, outcome.repeat
        candidate = _find_candidate(evaluation, outcome)
        return {
            "id": secrets.token_hex(8),
            "at": time(),
            "policy": outcome.policy,
            "detector": outcome.detector,
            "similarity": candidate.guard.similarity_name,
            "method": cut_text(request.method, _NAME),
            "path": cut_text(request.path, _NAME),
            "fingerprint": outcome.fingerprint,
            "body_crc32": write_crc32(candidate.body_crc32),
            "tenant": outcome.tenant,
            "session": session,
            **_describe_measure(outcome),
            "tools": [cut_text(tool, _NAME) for tool in (repeat.tools if repeat is not None else outcome.subject.tools)],
            "rule": repeat.rule if repeat is not None else "",
            "strength": outcome.strength,
            "compared": _show_compared(evaluation, candidate) if self._bodies else "",
        }


def _describe_measure(outcome: Outcome) -> dict[str, Any]:
    """The count and its time span; or the session's limit, with used and allowed amounts in its own unit."""
    subject = outcome.subject
    if not isinstance(subject, SessionSubject):
        return {"count": outcome.count, "span_seconds": outcome.span_ms / 1000, "limit": "", "used": None, "allowed": None}
    used, allowed = subject.shown
    return {"count": None, "span_seconds": None, "limit": subject.limit, "used": used, "allowed": allowed}


def _show_compared(evaluation: Evaluation, candidate: Candidate) -> str:
    """What a detector compared in place of the body, or the start of that; empty where checksums or no bodies were compared."""
    content = evaluation.content
    if content is None or evaluation.plain is None or not isinstance(candidate, LoopCandidate):
        return ""
    if candidate.compared is not None:
        return candidate.detector.similarity.quote(candidate.compared, evaluation.plain, _TEXT)
    if candidate.compared_exactly:  # else it is others that have looked into the body
        return bytes(content[:_TEXT]).decode("utf-8", "replace")
    return ""


def _find_candidate(evaluation: Evaluation, outcome: Outcome) -> Candidate:
    return next(
        candidate
        for candidate in evaluation.shadow.candidates
        if (candidate.plan.id, candidate.guard.name) == (outcome.policy, outcome.detector)
    )
