"""The loop guard: one entry of a policy's loop_detection, ready to run.

What is compared (similarity), over what span (window) and what is done (action) are three independent choices.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cache

from extproc.decision import COMPLETION, Action, Outcome, RefusalForm, Repeat, Subject
from extproc.detectors import Similarity
from extproc.objects import MAX_THRESHOLD
from extproc.policy.bundle import LoopDetection
from extproc.store.rules.hit import Count, Hit

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
        "_last",
        "_later",
        "_window_ms",
        "actions",
        "looks",
        "max_delay_ms",
        "max_inspect_bytes",
        "mode",
        "name",
        "needs_body",
        "policy",
        "refusal",
        "refuses_later",
        "shadow",
        "similarity",
        "similarity_name",
        "stateless",
        "steer_note",
        "steers",
        "threshold",
        "window_seconds",
        "window_type",
    )

    def __init__(  # noqa: PLR0913  # what the policy says, and its plan
        self, policy: str, name: str, loop: LoopDetection, similarity: Similarity, *, shadow: bool, namespace: str
    ) -> None:
        """Compile; `loop` is enabled, and `similarity` made of it. Every key starts with the namespace."""
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
        steps = loop.list_steps(self.similarity.default_threshold)
        self.threshold = steps[0].threshold_identical_requests or self.similarity.default_threshold or 0
        self.actions = (Action(loop.action), *[Action(name) for name, _ in loop.escalate.list_steps()])
        self.steers = Action.STEER in self.actions
        self.refuses_later = self.steers and self.actions[-1] is Action.REJECT
        self.steer_note = loop.steer_note or ""
        self._later = tuple([(step.threshold_identical_requests or self.threshold) - self.threshold for step in steps])
        self._last = self._later[-1]
        self.window_seconds = loop.window_seconds or 0
        # A stateless one keeps its cooldown alone, which has a beginning and an end.
        self.window_type = "fixed" if self.stateless else loop.window_type
        self.max_delay_ms = loop.max_delay_ms
        self.refusal = _make_refusal_form(loop.reject_status, completes=loop.refuse_as == COMPLETION)
        self._key = f"{namespace}loop:{policy}:{name}:{self.window_type}:"
        self._window_ms = self.window_seconds * 1000
        self._cooldown_ms = loop.cooldown_seconds * 1000
        # Only a refusal can be left out: a request of any other action goes on, so it counts.
        self._count_refused = loop.count_refused or self.actions[-1] is not Action.REJECT

    @property
    def lifetime_seconds(self) -> int:
        """How long after a request something of it may still be counted."""
        return max(self._window_ms, self._cooldown_ms) // 1000

    def list_thresholds(self, subject: Subject) -> list[int]:
        """What holds for this subject: a threshold for each of the actions, the lowest first."""
        first = self._find_threshold(subject)
        return [first + later for later in self._later]

    def _find_threshold(self, subject: Subject) -> int:
        """The lowest of them, which the similarity itself leaves to the detector."""
        return self.threshold if subject is self.similarity else subject.threshold or self.threshold

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
            # From here on the strictest of the actions holds, which the store decides: that one refuses, and trips.
            threshold = self._find_threshold(subject) + self._last
            count_refused, count_to = self._count_refused, max(threshold, DISPLAY_COUNT)
            return Hit(key, self.window_type, self._window_ms, threshold, self._cooldown_ms, count_refused, count_to)
        if not self._cooldown_ms or repeat is None:
            return None
        # The request says itself whether it is a loop. The store keeps the cooldown: a loop that meets the strictest action
        # trips it, others only ask for it.
        threshold = 1 if repeat.looping and repeat.step == len(self._later) - 1 else MAX_THRESHOLD
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

    def _choose_action(self, count: Count, subject: Subject, repeat: Repeat | None) -> Action:
        """The strictest action that holds."""
        if count.looping:
            return self.actions[-1]
        if self.stateless:
            return self.actions[repeat.step] if repeat is not None and repeat.looping else Action.ALLOW
        if len(self.actions) > 1:
            held = bisect_right(self.list_thresholds(subject), count.count)
            return self.actions[held - 1] if held else Action.ALLOW
        return Action.ALLOW

    def judge(self, fingerprint: str, tenant: str, count: Count, subject: Subject, repeat: Repeat | None = None) -> Outcome:
        """What this detector makes of a request that has been counted."""
        number = count.count
        if self.stateless:
            number = repeat.count if repeat is not None else 0
        action = self._choose_action(count, subject, repeat)
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
            self._find_retry_after(count, self._find_threshold(subject) + self._last, repeat),
            self.refusal,
            self.name,
            subject,
            repeat,
        )
