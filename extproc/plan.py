"""One policy, ready to run: what of it does not depend on the request is worked out once, at the load."""

from __future__ import annotations

from extproc.decision import Action, Outcome, Repeat
from extproc.fingerprint import NO_BODY, Body, composite, digest, joined_descriptors, tenant
from extproc.policy.bundle import BODY, MAX_THRESHOLD, UNSUPPORTED_KEYS, Bypass, LoopDetection, Policy
from extproc.policy.routes import below
from extproc.request import MAX_DESCRIPTOR, HttpRequest, descriptors
from extproc.similarity import SIMILARITIES
from extproc.similarity.document import Document, NotCounted, NotJson, find, steps
from extproc.windows import Count, Hit

DELAY_PER_REQUEST_MS = 100
"""A throttled request is held for its count times this (Fairvisor's loop arithmetic)."""

DISPLAY_COUNT = 1_000
"""How far a `sliding_log` counts at least, so that reports stay truthful well past the threshold."""


class Detector:
    """One entry of a policy's loop_detection, ready to run."""

    def __init__(self, policy: str, name: str, loop: LoopDetection, *, shadow: bool) -> None:
        """Compile; `loop` is enabled."""
        self.policy = policy
        self.name = name
        self.shadow = shadow
        self.mode = "shadow" if shadow else "enforce"
        self.similarity = loop.similarity
        self.looks = SIMILARITIES[loop.similarity](loop)
        self.whole = loop.similarity == "canonical"
        self.needs_body = loop.body == "include"
        self.max_inspect_bytes = loop.max_inspect_bytes
        self.action = Action(loop.action)
        self.threshold = loop.threshold_identical_requests or 0
        self.window_seconds = loop.window_seconds or 0
        self.window_type = loop.window_type
        self.max_delay_ms = loop.max_delay_ms
        self.reject_status = loop.reject_status
        self.stateless = loop.similarity == "tool_calls"
        if self.stateless:
            self.window_type = "fixed"  # of the cooldown, which is all that is kept
        self._key = f"{'shadow:' if shadow else ''}loop:{policy}:{name}:{self.window_type}:"
        self._window_ms = self.window_seconds * 1000
        self._cooldown_ms = loop.cooldown_seconds * 1000
        # Only a refusal can be left out: a throttled or warned request goes on, so it counts.
        self._count_refused = loop.count_refused or self.action is not Action.REJECT
        self._count_to = max(self.threshold, DISPLAY_COUNT)

    def hit(self, scope: str, tenant: str, fingerprint: str, check: str, repeat: Repeat | None = None) -> Hit | None:
        """What the store is asked to count, None for nothing; `repeat` is what the request itself says about a loop."""
        key = f"{self._key}{scope}:{tenant}:{fingerprint}{check}"
        if not self.stateless:
            count_refused, count_to = self._count_refused, self._count_to
            return Hit(key, self.window_type, self._window_ms, self.threshold, self._cooldown_ms, count_refused, count_to)
        if not self._cooldown_ms or repeat is None:
            return None
        # The request says itself whether it is a loop. The store keeps the cooldown: a loop trips it, others only ask for it.
        threshold = 1 if repeat.looping else MAX_THRESHOLD
        return Hit(key, self.window_type, 0, threshold, self._cooldown_ms, False, threshold)

    def outcome(self, entry: Entry, count: Count) -> Outcome:
        """What this detector makes of the request."""
        repeat, number, looping = entry.repeat, count.count, count.looping
        if self.stateless:
            number = repeat.count if repeat is not None else 0
            looping = looping or (repeat is not None and repeat.looping)
        action = self.action if looping else Action.ALLOW
        return Outcome(
            self.policy,
            self.mode,
            action,
            entry.fingerprint,
            entry.tenant,
            number,
            count.span_ms,
            self.window_seconds,
            min(number * DELAY_PER_REQUEST_MS, self.max_delay_ms) if action is Action.THROTTLE else 0,
            -(-count.cooldown_ms // 1000) or self.window_seconds or None,
            self.reject_status,
            self.name,
            self.similarity,
            repeat,
        )


class Plan:
    """One policy, ready to run: everything that does not depend on the request is worked out once."""

    def __init__(self, policy: Policy, *, shadow: bool) -> None:
        """Compile."""
        spec = policy.spec
        self.id = policy.id
        self.selector = spec.selector
        self.shadow = shadow
        self.mode = "shadow" if shadow else "enforce"
        self.detectors = [Detector(policy.id, name, loop, shadow=shadow) for name, loop in spec.detectors()]
        self.skip_missing = spec.missing_descriptor == "skip"
        read = descriptors([key for key in spec.all_limit_keys() if key not in UNSUPPORTED_KEYS])
        self.descriptors = [descriptor for descriptor in read if descriptor.source != BODY]
        self.body_descriptors = [(item.name, steps(item.argument)) for item in read if item.source == BODY]
        self.bypass = spec.bypass
        self.needs_body = bool(self.body_descriptors) or any(detector.needs_body for detector in self.detectors)
        self.needs_whole = bool(self.body_descriptors) or any(detector.whole for detector in self.detectors)
        looking = [d.max_inspect_bytes for d in self.detectors if self.body_descriptors or d.looks is not None]
        self.inspects = max(looking, default=0)

    def bypassed(self, request: HttpRequest) -> bool:
        """Whether the policy says that such a request is never counted."""
        return any(_bypasses(entry, request) for entry in self.bypass)


def _bypasses(entry: Bypass, request: HttpRequest) -> bool:
    """Whether a request has all that an entry of `bypass` names; of two paths either."""
    if entry.header is not None and entry.header not in request.headers:
        return False
    if entry.methods is not None and request.method not in entry.methods:
        return False
    if entry.pathExact is None and entry.pathPrefix is None:
        return True
    return request.path == entry.pathExact or (entry.pathPrefix is not None and below(request.path, entry.pathPrefix))


class Entry:
    """One detector's part in a request; everything below `values` is set by `seal`.

    Attributes:
        plan: the policy.
        detector: of it.
        values: the descriptors that the request has, by name.
        composite: the whole composite.
        fingerprint: its CRC32, 8 hex digits.
        tenant: hash of the descriptors, 16 hex digits.
        body_crc32: of the body as this detector compares it.
        repeat: what the request itself says about a loop, None where requests are counted.
        compared: what was compared in place of the body, None where the body was.
        compared_exactly: the body was compared because it is not what the similarity is for.
        hit: what the store is asked to count, None for nothing.
    """

    __slots__ = (
        "body_crc32",
        "compared",
        "compared_exactly",
        "composite",
        "descriptors",
        "detector",
        "fingerprint",
        "hit",
        "plan",
        "repeat",
        "tenant",
        "values",
    )

    composite: str
    fingerprint: str
    tenant: str
    body_crc32: int
    hit: Hit | None

    def __init__(self, plan: Plan, detector: Detector, values: list[tuple[str, str]], descriptors: str) -> None:
        """Not sealed yet."""
        self.plan = plan
        self.detector = detector
        self.values = values
        self.descriptors = descriptors
        self.repeat: Repeat | None = None
        self.compared: bytes | None = None
        self.compared_exactly = False

    @property
    def needs_body(self) -> bool:
        """Without the body this detector cannot count the request."""
        return self.detector.needs_body or bool(self.plan.body_descriptors)

    def seal(self, head: str, body: Body, document: Document | None, scope: str) -> None:
        """Work out the names.

        Args:
            head: from `fingerprint.request_head`.
            body: of the request.
            document: the same to look into; None when it is too large for that.
            scope: attachment name.

        Raises:
            NotCounted: what this detector compares cannot be had.
        """
        detector = self.detector
        if self.plan.body_descriptors:
            self._read_descriptors(inspectable(document, detector))
        if not detector.needs_body:
            body = NO_BODY
        elif detector.looks is not None:
            self.compared, self.repeat = detector.looks.compare(inspectable(document, detector))
            if self.compared is not None:
                body = NO_BODY.plus(self.compared)
            elif body.length:
                self.compared_exactly = True
        self.body_crc32 = body.crc32
        self.composite = composite(head, body, self.descriptors)
        self.fingerprint, check = digest(self.composite, body)
        self.tenant = tenant(self.descriptors)
        self.hit = detector.hit(scope, self.tenant, self.fingerprint, check, self.repeat)

    def left_out(self, reason: str) -> tuple[str, str, str]:
        """This detector, and why it does not count the request."""
        return self.plan.id, self.detector.name, reason

    def _read_descriptors(self, document: Document) -> None:
        """Add the descriptors that stand in the body."""
        try:
            value = document.value()
        except NotJson:
            value = None
        found = [(name, find(value, pointer)) for name, pointer in self.plan.body_descriptors]
        if any(len(text) > MAX_DESCRIPTOR for _, text in found):
            raise NotCounted("descriptor_too_long")
        if self.plan.skip_missing and not all(text for _, text in found):
            raise NotCounted("missing_descriptor")
        self.values = [*self.values, *((name, text) for name, text in found if text)]
        self.descriptors = joined_descriptors(self.values)


def inspectable(document: Document | None, detector: Detector) -> Document:
    """The document, where it is small enough for the detector.

    Raises:
        NotCounted: it is not.
    """
    if document is None or len(document) > detector.max_inspect_bytes:
        raise NotCounted("inspect_limit")
    return document
