"""Policies applied to requests: `prepare` finds what is to be counted, `decide` turns counts into an answer.

Pure: no clock, no asyncio, no store. The steps between are the service's: learn the body, `seal` the check with it, let the
store count the hits. Enforcing and shadow policies are kept in two lanes all the way, so that nothing that happens to a shadow
policy can reach the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from extproc.decision import Action, Decision, Outcome, strictest
from extproc.fingerprint import (
    NO_BODY,
    Body,
    canonical_query,
    composite,
    digest,
    joined_descriptors,
    request_head,
    tenant,
    too_long,
)
from extproc.policy.bundle import UNSUPPORTED_KEYS, LoopDetection, Policy
from extproc.policy.loader import PolicySet
from extproc.policy.routes import Index
from extproc.request import MAX_DESCRIPTOR, HttpRequest, descriptors
from extproc.windows import Count, Hit

DELAY_PER_REQUEST_MS = 100
"""A throttled request is held for its count times this (Fairvisor's loop arithmetic)."""

DISPLAY_COUNT = 1_000
"""How far a `sliding_log` counts at least, so that reports stay truthful well past the threshold."""


class Plan:
    """One policy, ready to run: everything that does not depend on the request is worked out once."""

    def __init__(self, policy: Policy, loop: LoopDetection, *, shadow: bool) -> None:
        """Compile a policy; `loop` is its enabled loop_detection."""
        self.id = policy.id
        self.selector = policy.spec.selector
        self.shadow = shadow
        self.mode = "shadow" if shadow else "enforce"
        self.action = Action(loop.action)
        self.threshold = loop.threshold_identical_requests or 0
        self.window_seconds = loop.window_seconds or 0
        self.window_type = loop.window_type
        self.max_delay_ms = loop.max_delay_ms
        self.reject_status = loop.reject_status
        self.needs_body = loop.body == "include"
        self.skip_missing = policy.spec.missing_descriptor == "skip"
        self.descriptors = descriptors([key for key in policy.spec.all_limit_keys() if key not in UNSUPPORTED_KEYS])
        self._key = f"{'shadow:' if shadow else ''}loop:{policy.id}:default:{loop.window_type}:"
        self._window_ms = self.window_seconds * 1000
        self._cooldown_ms = loop.cooldown_seconds * 1000
        # Only a refusal can be left out: a throttled or warned request goes on, so it counts.
        self._count_refused = loop.count_refused or self.action is not Action.REJECT
        self._count_to = max(self.threshold, DISPLAY_COUNT)

    def hit(self, scope: str, tenant: str, fingerprint: str, check: str) -> Hit:
        """What the store is asked to count."""
        return Hit(
            f"{self._key}{scope}:{tenant}:{fingerprint}{check}",
            self.window_type,
            self._window_ms,
            self.threshold,
            self._cooldown_ms,
            self._count_refused,
            self._count_to,
        )

    def outcome(self, entry: Entry, count: Count) -> Outcome:
        """What this policy makes of the request."""
        action = self.action if count.looping else Action.ALLOW
        return Outcome(
            self.id,
            self.mode,
            action,
            entry.fingerprint,
            entry.tenant,
            count.count,
            count.span_ms,
            self.window_seconds,
            min(count.count * DELAY_PER_REQUEST_MS, self.max_delay_ms) if action is Action.THROTTLE else 0,
            -(-count.cooldown_ms // 1000) or self.window_seconds or None,
            self.reject_status,
        )


class Entry:
    """One matched policy's part in a request; everything below `descriptors` is set by `Check.seal`.

    Attributes:
        plan: the policy.
        descriptors: joined, as the composite has them.
        composite: the whole composite.
        fingerprint: its CRC32, 8 hex digits.
        tenant: hash of the descriptors, 16 hex digits.
        body_crc32: of the body as this policy sees it.
        hit: what the store is asked to count.
    """

    __slots__ = ("body_crc32", "composite", "descriptors", "fingerprint", "hit", "plan", "tenant")

    composite: str
    fingerprint: str
    tenant: str
    body_crc32: int
    hit: Hit

    def __init__(self, plan: Plan, descriptors: str) -> None:
        """Not sealed yet."""
        self.plan = plan
        self.descriptors = descriptors

    def seal(self, head: str, body: Body, scope: str) -> None:
        """Work out the names; `head` comes from `fingerprint.request_head`."""
        self.body_crc32 = body.crc32
        self.composite = composite(head, body, self.descriptors)
        self.fingerprint, check = digest(self.composite, body)
        self.tenant = tenant(self.descriptors)
        self.hit = self.plan.hit(scope, self.tenant, self.fingerprint, check)


class Check:
    """One request under way through the engine.

    Attributes:
        request: the request.
        scope: attachment name in every key.
        enforcing: the policies that will count it and whose answer counts.
        shadow: the policies that will count it and whose answer never does.
        needs_body: some fingerprint includes the body.
        uncounted: (policy, reason) of matched policies that do not count this request.
        failures: (policy, error) of shadow policies whose evaluation raised.
    """

    __slots__ = ("enforcing", "failures", "needs_body", "request", "scope", "shadow", "uncounted")

    def __init__(self, request: HttpRequest, scope: str) -> None:
        """Start with nothing matched."""
        self.request = request
        self.scope = scope
        self.enforcing: list[Entry] = []
        self.shadow: list[Entry] = []
        self.needs_body = False
        self.uncounted: list[tuple[str, str]] = []
        self.failures: list[tuple[str, Exception]] = []

    def seal(self, body: Body | None, reason: str = "") -> None:
        """Work out the fingerprints, now that the body is known or known to stay unknown.

        Args:
            body: None when it is not known: policies that need it do not count the request.
            reason: why the body is not known, for `uncounted`.
        """
        request = self.request
        query = canonical_query(request.query_pairs()) if request.query else ""
        head = request_head(request.method, request.path, query)
        if body is None and self.needs_body:
            self.uncounted += [(entry.plan.id, reason) for entry in (*self.enforcing, *self.shadow) if entry.plan.needs_body]
            self.enforcing = [entry for entry in self.enforcing if not entry.plan.needs_body]
            self.shadow = [entry for entry in self.shadow if not entry.plan.needs_body]
        for entry in self.enforcing:
            entry.seal(head, body if body is not None and entry.plan.needs_body else NO_BODY, self.scope)
        for entry in self.shadow[:]:
            try:
                entry.seal(head, body if body is not None and entry.plan.needs_body else NO_BODY, self.scope)
            except Exception as error:  # noqa: BLE001  # whatever it is, a shadow policy has no effect
                self.shadow.remove(entry)
                self.failures.append((entry.plan.id, error))

    def give_up(self, reason: str) -> None:
        """Nobody counts this request."""
        self.uncounted += [(entry.plan.id, reason) for entry in (*self.enforcing, *self.shadow)]


class Engine:
    """All policies of one load, immutable: a reload builds another.

    Attributes:
        plans: enabled policies in bundle order.
        claims: the JWT claims that policies read.
        uses_address: some policy reads the peer's address.
        uses_routes: some policy selects by Envoy's route name.
    """

    def __init__(self, policies: PolicySet, now: datetime, *, shadow: bool = False) -> None:
        """Compile.

        Args:
            policies: what the loader returned.
            now: decides whether a `global_shadow` still holds.
            shadow: force every policy into shadow mode.
        """
        self.plans = [
            Plan(policy, loop, shadow=shadow or source.shadowed(now) or policy.spec.mode == "shadow")
            for source in policies.sources
            for policy in source.policies
            if (loop := policy.spec.loop_detection) is not None and loop.enabled
        ]
        read = {(descriptor.source, descriptor.argument) for plan in self.plans for descriptor in plan.descriptors}
        self.claims = frozenset(argument for source, argument in read if source == "jwt")
        self.uses_address = any(source == "ip" for source, _ in read)
        self.uses_routes = any(plan.selector.routes is not None for plan in self.plans)
        self._index = Index((plan.selector, plan) for plan in self.plans)

    def prepare(self, request: HttpRequest, scope: str = "") -> Check | None:
        """Match policies and read descriptors; None when no policy matches.

        Args:
            request: the request.
            scope: attachment name, so that a gateway and a sidecar on one store do not count a request twice.
        """
        plans = self._index.match(request.method, request.authority, request.path, request.route)
        if not plans:
            return None
        check = Check(request, scope)
        for plan in plans:
            try:
                self._admit(check, plan)
            except Exception as error:
                if not plan.shadow:
                    raise
                check.failures.append((plan.id, error))
        return check

    @staticmethod
    def _admit(check: Check, plan: Plan) -> None:
        """Make the plan a candidate, or say why it does not count this request."""
        request = check.request
        if too_long(request.target, request.query):
            check.uncounted.append((plan.id, "target_too_long"))
            return
        values = []
        for descriptor in plan.descriptors:
            value = descriptor.read(request, descriptor.argument)
            if len(value) > MAX_DESCRIPTOR:
                check.uncounted.append((plan.id, "descriptor_too_long"))
                return
            if value:
                values.append((descriptor.name, value))
            elif plan.skip_missing:
                check.uncounted.append((plan.id, "missing_descriptor"))
                return
        entry = Entry(plan, joined_descriptors(values))
        (check.shadow if plan.shadow else check.enforcing).append(entry)
        check.needs_body = check.needs_body or plan.needs_body


def decide(check: Check, counts: Sequence[Count], shadow_counts: Sequence[Count] = ()) -> Decision:
    """The answer to a request that has been counted.

    Args:
        check: sealed.
        counts: of `check.enforcing`, in its order.
        shadow_counts: of `check.shadow`; empty when they could not be had.
    """
    trace = [entry.plan.outcome(entry, count) for entry, count in zip(check.enforcing, counts, strict=True)]
    loops = [outcome for outcome in trace if outcome.action is not Action.ALLOW]
    lead = strictest(loops) if loops else None
    warning = bool(loops) and any(outcome.action is Action.WARN for outcome in loops)
    if not shadow_counts:
        return Decision(lead, warning, None, trace)
    watching: list[Outcome] = []
    for entry, count in zip(check.shadow, shadow_counts, strict=True):
        try:
            watching.append(entry.plan.outcome(entry, count))
        except Exception as error:  # noqa: BLE001  # whatever it is, a shadow policy has no effect
            check.failures.append((entry.plan.id, error))
    shadow_loops = [outcome for outcome in watching if outcome.action is not Action.ALLOW]
    return Decision(lead, warning, strictest(shadow_loops) if shadow_loops else None, [*trace, *watching])
