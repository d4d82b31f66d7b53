"""The loop guard: one entry of a policy's loop_detection, ready to run.

What is compared (similarity), over what span (window) and what is done (action) are three independent choices.
"""

from __future__ import annotations

from functools import cache

from extproc.decision import Action, Outcome, RefusalForm, Repeat, Subject
from extproc.policy.bundle import COMPLETION, LoopDetection
from extproc.policy.objects import MAX_THRESHOLD
from extproc.similarity import Similarity
from extproc.windows import Count, Hit

DELAY_PER_REQUEST_MS = 100
"""A throttled request is held for its count times this (Fairvisor's loop arithmetic)."""

DISPLAY_COUNT = 1_000
"""How far a `sliding_log` counts at least, so that reports stay truthful well past the threshold."""


@cache
def _make_refusal_form(status: int | str, *, completes: bool) -> RefusalForm:
    """How refusals are made, once for all detectors that make them alike."""
    return RefusalForm(status if isinstance(status, int) else None, completes)


class Detector:
    """What does not depend on the request is worked out once, at the load."""

    __slots__ = (
        "_cooldown_ms",
        "_count_refused",
        "_key",
        "_window_ms",
        "action",
        "looks",
        "max_delay_ms",
        "max_inspect_bytes",
        "mode",
        "name",
        "needs_body",
        "policy",
        "refusal",
        "shadow",
        "similarity",
        "similarity_name",
        "stateless",
        "threshold",
        "window_seconds",
        "window_type",
    )

    def __init__(self, policy: str, name: str, loop: LoopDetection, similarity: Similarity, *, shadow: bool) -> None:
        """Compile; `loop` is enabled, and `similarity` made of it."""
        self.policy = policy
        self.name = name
        self.shadow = shadow
        self.mode = "shadow" if shadow else "enforce"
        self.similarity = similarity
        self.similarity_name = loop.similarity
        self.looks = self.similarity.looks
        self.stateless = self.similarity.stateless
        self.needs_body = loop.body == "include"
        self.max_inspect_bytes = loop.max_inspect_bytes
        self.action = Action(loop.action)
        self.threshold = loop.threshold_identical_requests or self.similarity.default_threshold or 0
        self.window_seconds = loop.window_seconds or 0
        # A stateless one keeps its cooldown alone, which has a beginning and an end.
        self.window_type = "fixed" if self.stateless else loop.window_type
        self.max_delay_ms = loop.max_delay_ms
        self.refusal = _make_refusal_form(loop.reject_status, completes=loop.refuse_as == COMPLETION)
        self._key = f"{'shadow:' if shadow else ''}loop:{policy}:{name}:{self.window_type}:"
        self._window_ms = self.window_seconds * 1000
        self._cooldown_ms = loop.cooldown_seconds * 1000
        # Only a refusal can be left out: a throttled or warned request goes on, so it counts.
        self._count_refused = loop.count_refused or self.action is not Action.REJECT

    def find_threshold(self, subject: Subject) -> int:
        """What holds for this subject."""
        return subject.threshold or self.threshold

    def make_hit(self, scope: str, tenant: str, digest: str, subject: Subject, repeat: Repeat | None = None) -> Hit | None:
        """What the store is asked to count, None for nothing.

        Args:
            scope: attachment name.
            tenant: hash of the descriptors.
            digest: fingerprint and check.
            subject: of the request.
            repeat: what the request itself says about a loop.
        """
        key = f"{self._key}{scope}:{tenant}:{digest}"
        if not self.stateless:
            threshold = self.find_threshold(subject)
            count_refused, count_to = self._count_refused, max(threshold, DISPLAY_COUNT)
            return Hit(key, self.window_type, self._window_ms, threshold, self._cooldown_ms, count_refused, count_to)
        if not self._cooldown_ms or repeat is None:
            return None
        # The request says itself whether it is a loop. The store keeps the cooldown: a loop trips it, others only ask for it.
        threshold = 1 if repeat.looping else MAX_THRESHOLD
        return Hit(key, self.window_type, 0, threshold, self._cooldown_ms, False, threshold)

    def _find_retry_after(self, count: Count, threshold: int, repeat: Repeat | None) -> int | None:
        """Seconds until the same request passes if it is not sent before; None where waiting changes nothing."""
        if repeat is not None and repeat.looping:
            return None  # its history will say the same then
        waits = count.cooldown_ms
        if self.stateless:
            return max(1, -(-waits // 1000))
        counted = count.count if self._count_refused else count.count - 1
        if counted + 1 >= threshold:
            over = self._window_ms - count.span_ms if self.window_type == "fixed" else self._window_ms
            waits = max(waits, over)
        return max(1, -(-waits // 1000))

    def judge(self, fingerprint: str, tenant: str, count: Count, subject: Subject, repeat: Repeat | None = None) -> Outcome:
        """What this detector makes of a request that has been counted."""
        number, looping = count.count, count.looping
        if self.stateless:
            number = repeat.count if repeat is not None else 0
            looping = looping or (repeat is not None and repeat.looping)
        action = self.action if looping else Action.ALLOW
        return Outcome(
            self.policy,
            self.mode,
            action,
            fingerprint,
            tenant,
            number,
            count.span_ms,
            self.window_seconds,
            min(number * DELAY_PER_REQUEST_MS, self.max_delay_ms) if action is Action.THROTTLE else 0,
            self._find_retry_after(count, self.find_threshold(subject), repeat),
            self.refusal,
            self.name,
            subject,
            repeat,
        )
