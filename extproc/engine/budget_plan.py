"""The budgets of a policy, with the limit keys of each rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from extproc.budgets.guard import ONE, BudgetRule, BudgetRules
from extproc.budgets.rule_keys import Rule
from extproc.policy.bundle import Spec
from extproc.request.callers import Values, compile_shown, find_hidden, find_names
from extproc.request.document import Document, NotCounted, NotJson
from extproc.request.fingerprint import join_descriptors
from extproc.request.hash_key import HashKey, is_hidden
from extproc.request.http import MAX_DESCRIPTOR, Descriptor, HttpRequest, compile_plainly
from extproc.request.limit_keys import UNSUPPORTED_KEYS, list_sources
from extproc.request.secrets import CREDENTIAL

HeadDescriptors: TypeAlias = tuple[Descriptor, ...]
BodyDescriptors: TypeAlias = tuple[tuple[Descriptor, list[str]], ...]


class PlannedRule:
    """A rule and how it identifies callers.

    Attributes:
        rule: the rule.
        head: descriptors in the request's head.
        body: descriptors in its body, with their pointers.
        shown: descriptors in the head with possibly several values in a request.
        callers: names its callers.
    """

    def __init__(
        self,
        rule: BudgetRule,
        keys: Rule,
        head: HeadDescriptors,
        body: BodyDescriptors,
        missing: str = "",
    ) -> None:
        """`missing` is the policy's `missing_descriptor`.

        If it is empty, a rule skips requests that lack a key.
        """
        match = keys.match or {}
        self._missing = missing
        asked = [*keys.limit_keys, *match]
        self.rule = rule
        self.head = head
        self.body = body
        self.shown = compile_shown(head)
        self.callers = find_names((*head, *[descriptor for descriptor, _ in body]))
        # If a rule ignored a key that Loopguard cannot derive, it would merge callers.
        self._never = any(UNSUPPORTED_KEYS.issuperset(list_sources([key])) for key in asked)
        self._match = (
            () if self._never else tuple([_compile_match(*pair) for pair in match.items()])
        )

    @property
    def matched(self) -> list[Descriptor]:
        """The descriptors of its `match`."""
        return [descriptor for descriptor, _ in self._match]

    @property
    def always_matches(self) -> bool:
        """Whether it has no `match`."""
        return not (self._never or self._match)

    def matches(self, request: HttpRequest) -> bool:
        """Whether its `match` applies."""
        if self._never or not self._match:
            return not self._never
        return all(
            descriptor.read(request, descriptor.argument) == value
            for descriptor, value in self._match
        )

    def name_caller(self, values: Values) -> str:
        """The name of a caller; see `CallerNames`."""
        return self.callers.name_caller(values, join_descriptors(values))

    def read(
        self, request: HttpRequest, policy: str, missing: list[tuple[str, str]]
    ) -> Values | None:
        """The caller's descriptors in the head; None if too many are missing to count the request.

        Raises:
            NotCounted: a value is too long.
        """
        values: Values = []
        for descriptor in self.head:
            _add(values, descriptor, descriptor.read(request, descriptor.argument), policy, missing)
        return (
            values
            if self._is_sufficient(values, len(self.head), may_follow=len(self.body) > 0)
            else None
        )

    def _is_sufficient(self, values: Values, keys: int, *, may_follow: bool) -> bool:
        """Whether these values identify the caller, by `missing_descriptor`.

        `may_follow`: the body may add some.
        """
        if len(values) == keys or self._missing == "share":
            return True
        return self._missing == "require_one" and (may_follow or len(values) > 0)

    def read_body(
        self,
        document: Document | None,
        values: Values,
        policy: str,
        missing: list[tuple[str, str]],
        key: HashKey,
    ) -> Values | None:
        """`values` and the descriptors in the body; None as for `read`.

        `key` is for hashes of secrets.
        """
        try:
            found = document.value() if document is not None else None
        except NotJson:
            found = None
        values = [*values]
        for descriptor, pointer in self.body:
            _add(values, descriptor, find_hidden(found, descriptor, pointer, key), policy, missing)
        return (
            values
            if self._is_sufficient(values, len(self.head) + len(self.body), may_follow=False)
            else None
        )


def _compile_match(key: str, value: str) -> tuple[Descriptor, str]:
    """A descriptor and its required value.

    A secret may be given in plain text or, as shown elsewhere, as its hash.
    """
    return compile_plainly(key, hidden=key == CREDENTIAL or is_hidden(value)), value


def _add(
    values: Values, descriptor: Descriptor, value: str, policy: str, missing: list[tuple[str, str]]
) -> None:
    """Add a descriptor's value, or note that it is missing."""
    if len(value) > MAX_DESCRIPTOR:
        raise NotCounted("descriptor_too_long")
    if value:
        values.append((descriptor.name, value))
    elif (policy, descriptor.key) not in missing:
        missing.append((policy, descriptor.key))


EVERYONE: Final = PlannedRule(
    ONE, Rule(name="all", algorithm="token_bucket", algorithm_config={}), (), ()
)
"""All callers, for a circuit breaker without limit keys."""


class BudgetPlan:
    """The budgets of a policy and how they identify callers.

    Attributes:
        guard: the budgets.
        rules: the rules without the fallback.
        fallback: None if there is none.
        breaker: identifies callers of the circuit breaker; None if it is off, or all callers share
            it.
        needs_body: a rule needs the body.
    """

    def __init__(
        self,
        guard: BudgetRules,
        spec: Spec,
        descriptors: Sequence[tuple[HeadDescriptors, BodyDescriptors]],
    ) -> None:
        """`descriptors`: those of `Spec.list_budget_rules`, then any of the circuit breaker."""
        self.guard = guard
        self._always = False
        keys = spec.list_budget_rules()
        missing = spec.missing_descriptor if "missing_descriptor" in spec.model_fields_set else ""
        planned = [
            PlannedRule(rule, own, head, body, missing)
            for rule, own, (head, body) in zip(guard.rules, keys, descriptors, strict=False)
        ]
        self.fallback = planned.pop() if spec.fallback_limit is not None else None
        self.rules = planned
        self._always = len(planned) > 0 and all(rule.always_matches for rule in planned)
        self.breaker: PlannedRule | None = None
        if guard.breaker is not None and len(descriptors) > len(keys):
            owner = next(rule for rule in spec.rules if rule.limit_keys)
            first = owner.model_copy(update={"limit_keys": owner.limit_keys[:1], "match": None})
            self.breaker = PlannedRule(guard.breaker_rule, first, *descriptors[-1], missing)
        every = [*planned, self.fallback, self.breaker]
        self.needs_body = guard.needs_body or (guard.steers and not guard.shadow)
        self.needs_body = self.needs_body or any(rule.body for rule in every if rule is not None)

    def list_reads(self) -> list[Descriptor]:
        """What it reads from the head besides the limit keys."""
        rules = [*self.rules, *([self.fallback] if self.fallback is not None else [])]
        costs = [key for planned in rules for key in planned.rule.list_reads()]
        return [
            *[descriptor for planned in rules for descriptor in planned.matched],
            *map(compile_plainly, costs),
        ]

    def choose(self, request: HttpRequest) -> list[PlannedRule]:
        """The rules that apply to a request; the fallback if none does."""
        if self._always:  # usually
            return self.rules
        chosen = [rule for rule in self.rules if rule.matches(request)]
        if not chosen and self.fallback is not None and self.fallback.matches(request):
            return [self.fallback]
        return chosen
