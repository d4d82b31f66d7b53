"""Policies applied to requests: `prepare` finds what is to be counted, `decide` turns counts into an answer.

Pure: no clock, no asyncio, no store. The steps between are the service's: learn the body, `seal` the check with it, let the
store count the hits. Enforcing and shadow policies are kept in two lanes all the way, so that nothing that happens to a shadow
policy can reach the answer.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import groupby

from extproc.decision import Action, Decision, Outcome, strictest
from extproc.fingerprint import NO_BODY, Body, canonical_query, joined_descriptors, request_head, too_long
from extproc.plan import Entry, Plan
from extproc.policy.loader import PolicySet
from extproc.policy.routes import Index
from extproc.request import MAX_DESCRIPTOR, HttpRequest
from extproc.similarity.document import Document, NotCounted
from extproc.windows import UNCOUNTED, Count, Hit

_MANY_OBJECTS = 32_768
"""A body of so many bytes may hold enough objects for the garbage collector to become a nuisance."""


class Check:
    """One request under way through the engine.

    Attributes:
        request: the request.
        scope: attachment name in every key.
        enforcing: the detectors that will count it and whose answer counts.
        shadow: the detectors that will count it and whose answer never does.
        needs_body: some fingerprint includes the body, or some descriptor stands in it.
        inspects: a body of so many bytes at most has to be kept to be looked into, 0 for none.
        left_out: (policy, detector, reason) of what matched and does not count this request; no detector where all are meant.
        failures: (policy, error) of shadow policies whose evaluation raised.
    """

    __slots__ = ("_whole", "enforcing", "failures", "inspects", "left_out", "needs_body", "request", "scope", "shadow")

    def __init__(self, request: HttpRequest, scope: str) -> None:
        """Start with nothing matched."""
        self.request = request
        self.scope = scope
        self.enforcing: list[Entry] = []
        self.shadow: list[Entry] = []
        self.needs_body = False
        self.inspects = 0
        self.left_out: list[tuple[str, str, str]] = []
        self.failures: list[tuple[str, Exception]] = []
        self._whole = False

    def admit(self, plan: Plan, values: list[tuple[str, str]]) -> None:
        """Every detector of the plan will count this request."""
        joined = joined_descriptors(values)
        lane = self._lane(plan)
        for detector in plan.detectors:
            lane.append(Entry(plan, detector, values, joined))
        if plan.needs_body:
            self.needs_body = True
            if plan.inspects:
                self.inspects = max(self.inspects, plan.inspects)
                self._whole = self._whole or plan.needs_whole

    @property
    def only_shadow_needs_body(self) -> bool:
        """Every enforcing policy could decide without the body that shadow policies need."""
        return bool(self.enforcing) and not any(entry.needs_body for entry in self.enforcing)

    def split(self) -> Check:
        """Take the shadow policies that need the body out, into a check of their own."""
        watching = Check(self.request, self.scope)
        watching.shadow = [entry for entry in self.shadow if entry.needs_body]
        watching.needs_body, watching.inspects, watching._whole = True, self.inspects, self._whole  # its own kind
        self.shadow = [entry for entry in self.shadow if not entry.needs_body]
        self.needs_body = False
        return watching

    def seal(self, body: Body | None, reason: str = "", content: bytes | memoryview | None = None) -> None:
        """Work out the fingerprints, now that the body is known or known to stay unknown.

        Args:
            body: None when it is not known: detectors that need it do not count the request.
            reason: why the body is not known, for `uncounted`.
            content: the body's bytes, None where there are more than `inspects`.
        """
        request = self.request
        query = canonical_query(request.query_pairs()) if request.query else ""
        head = request_head(request.method, request.path, query)
        if body is None and self.needs_body:
            self.left_out += [entry.left_out(reason) for entry in (*self.enforcing, *self.shadow) if entry.needs_body]
            self.enforcing = [entry for entry in self.enforcing if not entry.needs_body]
            self.shadow = [entry for entry in self.shadow if not entry.needs_body]
        known = body if body is not None else NO_BODY
        if not self.inspects or content is None:
            self._seal(head, known, None)
        elif len(content) < _MANY_OBJECTS or not gc.isenabled():
            self._seal(head, known, Document(content, whole=self._whole))
        else:
            gc.disable()  # it would walk what is being decoded again and again, for longer than decoding takes
            try:
                self._seal(head, known, Document(content, whole=self._whole))
            finally:
                gc.enable()

    def _seal(self, head: str, known: Body, document: Document | None) -> None:
        """Seal every entry, or say why it does not count."""
        for entry in (*self.enforcing, *self.shadow):
            try:
                entry.seal(head, known, document, self.scope)
            except NotCounted as why:
                self._lane(entry.plan).remove(entry)
                self.left_out.append(entry.left_out(why.reason))
            except Exception as error:
                if not entry.plan.shadow:
                    raise
                self.shadow.remove(entry)
                self.failures.append((entry.plan.id, error))

    def _lane(self, plan: Plan) -> list[Entry]:
        return self.shadow if plan.shadow else self.enforcing

    @property
    def uncounted(self) -> list[tuple[str, str]]:
        """(policy, reason), each once, of policies of which a detector does not count this request."""
        return list(dict.fromkeys((policy, reason) for policy, _, reason in self.left_out)) if self.left_out else []

    @property
    def compared_exactly(self) -> list[str]:
        """The policies that compared the body byte for byte, because it is not what their similarity is for."""
        if not self.inspects:
            return []
        return list(dict.fromkeys(entry.plan.id for entry in (*self.enforcing, *self.shadow) if entry.compared_exactly))

    def give_up(self, reason: str) -> None:
        """Nobody counts this request."""
        self.left_out += [entry.left_out(reason) for entry in (*self.enforcing, *self.shadow)]


class Engine:
    """All policies of one load, immutable: a reload builds another.

    Attributes:
        plans: enabled policies in bundle order.
        claims: the JWT claims that policies read.
        uses_address: some policy reads the peer's address.
        uses_routes: some policy selects by Envoy's route name.
        ids: of all policies, also of those that are not enabled.
    """

    def __init__(self, policies: PolicySet, now: datetime, *, shadow: bool = False) -> None:
        """Compile.

        Args:
            policies: what the loader returned.
            now: decides whether a `global_shadow` still holds.
            shadow: force every policy into shadow mode.
        """
        self.plans = [
            Plan(policy, shadow=shadow or source.shadowed(now) or policy.spec.mode == "shadow")
            for source in policies.sources
            for policy in source.policies
            if policy.spec.detectors()
        ]
        read = {(descriptor.source, descriptor.argument) for plan in self.plans for descriptor in plan.descriptors}
        self.claims = frozenset(argument for source, argument in read if source == "jwt")
        self.uses_address = any(source == "ip" for source, _ in read)
        self.uses_routes = any(plan.selector.routes is not None for plan in self.plans)
        self.ids = frozenset(policy.id for source in policies.sources for policy in source.policies)
        self._places = {plan.id: place for place, plan in enumerate(self.plans)}
        self._index = Index((plan.selector, plan) for plan in self.plans)

    def match(self, request: HttpRequest) -> Sequence[Plan]:
        """The policies whose selectors take the request, in bundle order."""
        return self._index.match(request.method, request.authority, request.path, request.route)

    def unknown(self, names: Sequence[str]) -> list[str]:
        """The ids that no enabled policy has."""
        return [name for name in names if name not in self._places]

    def _named(self, names: Sequence[str]) -> list[Plan]:
        """Policies by their ids, in bundle order; unknown ones are passed over."""
        return [self.plans[place] for place in sorted(self._places[name] for name in names if name in self._places)]

    def prepare(
        self, request: HttpRequest, scope: str = "", pinned: Sequence[str] = (), handed_over: Engine | None = None
    ) -> Check | None:
        """Match policies and read descriptors; None when no policy matches.

        Args:
            request: the request.
            scope: attachment name, so that a gateway and a sidecar on one store do not count a request twice.
            pinned: ids of the policies that apply, in place of those whose selectors match; unknown ones are passed over.
            handed_over: the policies that came with the request's route; they take the place of those with the same id.
        """
        plans = self._named(pinned) if pinned else self.match(request)
        if handed_over is not None:
            own = {plan.id: plan for plan in handed_over.match(request)}
            plans = [own.pop(plan.id, plan) for plan in plans if plan.id in own or plan.id not in handed_over.ids]
            plans += own.values()
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
        if plan.bypass and plan.bypassed(request):
            check.left_out.append((plan.id, "", "bypass"))
            return
        if too_long(request.target, request.query):
            check.left_out.append((plan.id, "", "target_too_long"))
            return
        values = []
        for descriptor in plan.descriptors:
            value = descriptor.read(request, descriptor.argument)
            if len(value) > MAX_DESCRIPTOR:
                check.left_out.append((plan.id, "", "descriptor_too_long"))
                return
            if value:
                values.append((descriptor.name, value))
            elif plan.skip_missing:
                check.left_out.append((plan.id, "", "missing_descriptor"))
                return
        check.admit(plan, values)


def hits(entries: Sequence[Entry]) -> list[Hit]:
    """What the store is asked to count for one lane of a sealed check."""
    return [entry.hit for entry in entries if entry.hit is not None]


def per_policy(trace: Sequence[Outcome]) -> Iterable[Outcome]:
    """The strictest outcome of each policy, whose detectors stand side by side in the trace."""
    if len(trace) < 2:  # noqa: PLR2004  # nothing to group, as for most requests
        return trace
    return [strictest(list(group)) for _, group in groupby(trace, key=lambda outcome: (outcome.policy, outcome.mode))]


def decide(check: Check, counts: Sequence[Count], shadow_counts: Sequence[Count] | None = ()) -> Decision:
    """The answer to a request that has been counted.

    Args:
        check: sealed.
        counts: of the `hits` of `check.enforcing`, in their order.
        shadow_counts: of those of `check.shadow`; None when they could not be had.
    """
    trace = [entry.detector.outcome(entry, count) for entry, count in _counted(check.enforcing, counts)]
    loops = [outcome for outcome in trace if outcome.action is not Action.ALLOW]
    lead = strictest(loops) if loops else None
    warning = bool(loops) and any(outcome.action is Action.WARN for outcome in loops)
    if shadow_counts is None or not check.shadow:
        return Decision(lead, warning, None, trace)
    watching: list[Outcome] = []
    for entry, count in _counted(check.shadow, shadow_counts):
        try:
            watching.append(entry.detector.outcome(entry, count))
        except Exception as error:  # noqa: BLE001  # whatever it is, a shadow policy has no effect
            check.failures.append((entry.plan.id, error))
    shadow_loops = [outcome for outcome in watching if outcome.action is not Action.ALLOW]
    return Decision(lead, warning, strictest(shadow_loops) if shadow_loops else None, [*trace, *watching])


def _counted(entries: Sequence[Entry], counts: Sequence[Count]) -> Iterable[tuple[Entry, Count]]:
    """Every entry with its count, in which nothing stands where nothing was to be counted."""
    if len(entries) != len(counts):
        left = iter(counts)
        counts = [next(left) if entry.hit is not None else UNCOUNTED for entry in entries]
    return zip(entries, counts, strict=True)
