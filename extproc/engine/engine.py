"""All policies of one load: `prepare` finds those that a request meets. Pure: no clock, no asyncio, no store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from extproc.engine.evaluation import Evaluation
from extproc.engine.kill_switch import KillSwitches, Switch
from extproc.engine.plan import Parts, Plan
from extproc.engine.routes import Index
from extproc.policy.loader import PolicySet
from extproc.policy.pairings import find_pairings
from extproc.request.hash_key import PROCESS_KEY, HashKey
from extproc.request.http import HttpRequest


class Engine:
    """Immutable: a reload builds another.

    Attributes:
        plans: enabled policies in bundle order.
        pairings: the shadow policies among them that are compared with an enforcing one.
    """

    def __init__(self, policies: PolicySet, now: datetime, *, shadow: bool = False) -> None:
        """Compile.

        Args:
            policies: what the loader returned.
            now: decides whether a `global_shadow` still holds.
            shadow: force every policy into shadow mode.
        """
        parts = Parts()
        every = [(source.forces_shadow(now), policy) for source in policies.sources for policy in source.policies]
        guarding = [(forced, policy) for forced, policy in every if policy.spec.is_enabled()]
        entries = [
            (policy.spec.selector, Plan(policy, parts, shadow=shadow or forced or policy.spec.mode == "shadow"))
            for forced, policy in guarding
        ]
        self.plans = [plan for _, plan in entries]
        self._places = {plan.id: place for place, plan in enumerate(self.plans)}
        self._idle = frozenset(policy.id for _, policy in every if not policy.spec.is_enabled())
        self._index = Index(entries)
        self._switches = KillSwitches(policies.sources)
        self._has_switches = len(self._switches) > 0
        self.pairings = find_pairings([policy for _, policy in guarding])
        for pairing in self.pairings:
            for name in (pairing.live, pairing.candidate):
                self.plans[self._places[name]].paired = True

    def list_parts(self) -> list[object]:
        """What it is made of, so that one that is not needed any more can be freed bit by bit."""
        return [*self.plans, *self._index.list_parts(), *self._switches.list_parts()]

    def match(self, request: HttpRequest) -> Sequence[Plan]:
        """The policies whose selectors take the request, in bundle order.

        What opens a WebSocket for model calls is taken whatever the method: it is always GET, and the calls would be POSTs.
        """
        route = request.facts.route() if self._index.uses_routes else ""
        method = None if request.opens_responses else request.method
        return self._index.match(method, request.authority, request.path, route)

    def find_plan(self, policy: str) -> Plan | None:
        """The enabled policy of that id, None for none."""
        place = self._places.get(policy)
        return self.plans[place] if place is not None else None

    def holds(self, policy: str) -> bool:
        """Whether a policy has that id, also one that is not enabled."""
        return policy in self._places or policy in self._idle

    def list_unknown(self, names: Sequence[str]) -> list[str]:
        """The ids that no enabled policy has."""
        return [name for name in names if name not in self._places]

    def find_switch(self, request: HttpRequest, now: float, handed_over: Engine | None = None) -> Switch | None:
        """The first kill switch that holds for a request, before any policy is asked; None for none.

        Args:
            request: the request.
            now: in seconds since 1970.
            handed_over: as `prepare` takes it; its kill switches come behind the others.
        """
        found = self._switches.find(request, now) if self._has_switches else None
        if found is None and handed_over is not None:
            return handed_over.find_switch(request, now)
        return found

    def prepare(
        self,
        request: HttpRequest,
        scope: str = "",
        pinned: Sequence[str] = (),
        handed_over: Engine | None = None,
        key: HashKey = PROCESS_KEY,
    ) -> Evaluation | None:
        """Match policies and read descriptors, after which the request's facts are let go; None when no policy matches.

        Args:
            request: the request.
            scope: attachment name, so that a gateway and a sidecar on one store do not count a request twice.
            pinned: ids of the policies that apply, in place of those whose selectors match; unknown ones are passed over.
            handed_over: the policies that came with the request's route; they take the place of those with the same id.
            key: of keyed hashes.
        """
        plans = self._find_named(pinned) if pinned else self.match(request)
        if handed_over is not None:
            own = {plan.id: plan for plan in handed_over.match(request)}
            plans = [own.pop(plan.id, plan) for plan in plans if plan.id in own or not handed_over.holds(plan.id)]
            plans += own.values()
        if not plans:
            return None
        evaluation = Evaluation(request, scope, key)
        evaluation.plans = plans
        for plan in plans:
            evaluation.admit(plan)
        request.facts = request.facts.let_go()
        return evaluation

    def _find_named(self, names: Sequence[str]) -> list[Plan]:
        """Policies by their ids, in bundle order; unknown ones are passed over."""
        return [self.plans[place] for place in sorted(self._places[name] for name in names if name in self._places)]
