"""The guard for a policy's budgets. Pure, like `guards`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from extproc.apis import read_options, read_path
from extproc.apis.conversation import Options
from extproc.apis.usage import LONGEST_MODEL, find_model
from extproc.budgets.costs import Estimate
from extproc.budgets.guard import (
    NOTHING,
    BudgetLimit,
    BudgetRule,
    BudgetRules,
    Reservation,
    read_hint,
)
from extproc.budgets.subject import BudgetSubject
from extproc.decision import Outcome
from extproc.engine.budget_plan import EVERYONE, BudgetPlan, PlannedRule
from extproc.engine.guards import Answer, Guard, renew
from extproc.engine.orders import ActiveOverride, sum_raises
from extproc.engine.plan import Plan
from extproc.engine.reading import Reading
from extproc.request.callers import Values, list_others
from extproc.request.document import Document, NotCounted
from extproc.request.http import HttpRequest, cut_text
from extproc.sessions.rates import Usage

_MOST_DIGITS: Final = 12


class BudgetGuard(Guard):
    """The budgets of one policy, for one request.

    Attributes:
        budget: the policy's budgets.
        estimate: tokens of the request, if a rule depends on them.
        lacks_caller: a rule does not count the request, because its caller is unknown.
        reserved: what the request takes from each budget; empty if it is not counted.
        request: the request.
        root: the name of the session at the root of its agents; empty if there is none, or if no
            cost is measured.
        oversize: why the request is too large even for a full budget; None if it is not.
    """

    def __init__(
        self, plan: Plan, budget: BudgetPlan, values: Values, descriptors: str, request: HttpRequest
    ) -> None:
        super().__init__(plan, budget.guard, values, descriptors, (), NOTHING)
        self.budget: BudgetRules = budget.guard
        self.reserved: list[Reservation] = []
        self.lacks_caller = False
        self.oversize: BudgetSubject | None = None
        self.needs_body = budget.needs_body
        self._plan = budget
        self.root = ""
        caller = None if plan.reads_body else descriptors
        self._named: Sequence[str] = (
            plan.root_names.read(request, caller) if budget.guard.needs_body else ()
        )
        self.request = request
        self._chosen: list[tuple[PlannedRule, Values]] = []
        self._exchange: Reading | None = None
        self.estimate = _NO_TOKENS

    def follow(self, values: Values, descriptors: str, place: int) -> BudgetGuard:
        """See `Guard`.

        It has only rules that distinguish the callers; the first guard asks about the others.
        """
        other = BudgetGuard(self.plan, self._plan, values, descriptors, self.request)
        other._follow(self)
        for planned, head in self._chosen:
            others = list_others(planned.shown, self.request, head)
            if place < len(others):
                other._chosen.append((planned, others[place]))
        return other

    @property
    def is_needed(self) -> bool:
        """Whether a rule applies."""
        return len(self._chosen) > 0

    def is_about(self, tenant: str) -> bool:
        """See `Guard`. Rules may have other limit keys than the policy."""
        return tenant == self.tenant or tenant in [each.tenant for each in self.reserved]

    def choose(self, missing: list[tuple[str, str]]) -> bool:
        """Choose the rules that apply, while the head is available; returns whether there are any.

        Raises:
            NotCounted: a value that identifies the caller is too long.
        """
        request, policy = self.request, self.plan.id
        calls = not self.budget.needs_body or (
            request.method != "HEAD" and read_path(request.path).asks_model
        )
        asked = self._plan.choose(request)
        if self.budget.breaker is not None and (
            calls or not self.budget.breaker_rule.cost.measured
        ):
            asked = [*asked, self._plan.breaker or EVERYONE]
        for planned in asked:
            if planned.rule.cost.measured and not calls:
                continue  # no model is called, so there is nothing to measure
            values = (
                self.values
                if self.plan.tells_apart_as(planned, self.values)
                else planned.read(request, policy, missing)
            )
            if values is not None:
                self._chosen.append((planned, values))
            else:
                self.lacks_caller = True
        return self.is_needed

    def counts_without_body(self) -> bool:
        """See `Guard`. Costs are then estimated."""
        return any(not planned.body for planned, _ in self._chosen)

    def read(self, exchange: Reading, missing: list[tuple[str, str]]) -> None:
        """See `Guard`."""
        self._exchange = exchange
        self.body_crc32 = exchange.sums.crc32
        self.tenant = self.plan.callers.name_caller(self.values, self.caller)
        if self._standing is not None:
            self.name_request()
            self._look_up(self._standing)
        document = exchange.look(shadow=self.plan.shadow)
        if document is not None and len(document) > self.plan.inspects:
            document = None
        first = self.first
        if isinstance(first, BudgetGuard):
            self.estimate = first.estimate
        else:
            self.estimate = self._estimate(exchange, document)
        estimate = self.estimate
        if self.budget.needs_body:
            with suppress(NotCounted):  # replay: the session was not recorded
                self.root = exchange.find_session(
                    self.plan.root_names, self._named, document, self.plan, self.caller
                )
        reserved: list[Reservation] = []
        for planned, head in self._chosen:
            values: Values | None = head
            if planned.body:
                values = planned.read_body(
                    document, head, self.plan.id, missing, exchange.request.hash_key
                )
            if values is not None:
                tenant = self.tenant if values is self.values else planned.name_caller(values)
                self._reserve(reserved, planned, tenant, estimate, exchange.scope)
            else:
                self.lacks_caller = True
        if self.oversize is None or self.is_allowed:
            self.reserved = reserved

    def _reserve(
        self,
        reserved: list[Reservation],
        planned: PlannedRule,
        tenant: str,
        plain: Estimate,
        scope: str,
    ) -> None:
        """Append reservations for a rule's limits."""
        orders = self._list_orders(planned, tenant) if self.overrides else self.overrides
        renewed = renew(tenant, orders) if orders else tenant
        breaker, estimate = self.budget.breaker, plain
        if self.root:
            prompt = self.budget.anchors.correct(f"{renewed}:{self.root}", plain.prompt)
            estimate = plain._replace(prompt=prompt)
        if planned is self._plan.breaker or planned is EVERYONE:
            if breaker is not None:
                amount = self._find_amount(self.budget.breaker_rule, breaker, estimate)
                key = f"{breaker.place}{scope}:{renewed}"
                reserved.append(Reservation(self.budget.breaker_rule, breaker, key, amount, tenant))
            return
        rule = planned.rule
        if rule.cost.measured:
            self.oversize = self.oversize or rule.find_oversize(plain, rule.find_answer(plain))
        for limit in rule.limits:
            amount = limit.flat or self._find_amount(rule, limit, estimate)
            each = Reservation(rule, limit, f"{limit.place}{scope}:{renewed}", amount, tenant)
            if orders and (raised := sum_raises(orders, rule.name)):
                each.take = each.take.raise_limit(round(raised * limit.units))
            reserved.append(each)

    def _find_amount(self, rule: BudgetRule, limit: BudgetLimit, estimate: Estimate) -> int:
        """The cost in a limit's units. A guessed answer never exceeds the limit."""
        if not rule.cost.measured:
            return max(1, round(rule.cost.read(self.request) * limit.units))
        prompt, answer, model = estimate.prompt, rule.find_answer(estimate), estimate.model
        amount = rule.cost.weigh(Usage(prompt, answer), model, limit.units)
        if amount <= limit.limit or estimate.answer:
            return amount
        return min(amount, max(limit.limit, rule.cost.weigh(Usage(prompt, 0), model, limit.units)))

    def _estimate(self, exchange: Reading, document: Document | None) -> Estimate:
        """Estimate the tokens of the request, if a rule depends on them."""
        if not self.budget.needs_body:
            return _NO_TOKENS
        size, options = exchange.sums.length, Options(0, 1, "")
        if not size:
            told = self.request.read_header("content-length")
            size = (
                int(told) if told.isascii() and told.isdecimal() and len(told) < _MOST_DIGITS else 0
            )
        if document is not None:
            try:
                options = read_options(document, read_path(self.request.path).longest_answers)
            except NotCounted:
                document = None
        prompt = exchange.estimate_prompt(document, size)
        if any(planned.rule.hints for planned, _ in self._chosen):
            prompt = max(prompt, read_hint(self.request))
        model = cut_text(find_model(self.request.path, options.model), LONGEST_MODEL)
        return Estimate(prompt, options.longest, model, options.copies)

    def let_go(self) -> None:
        """See `Guard`."""
        self._exchange = None

    def name_request(self) -> None:
        """See `Guard`. Computed lazily."""
        exchange = self._exchange
        if exchange is not None and not self.fingerprint:
            self.composite, self.fingerprint, _ = exchange.name(exchange.sums, self.caller)

    def judge(self, count: Answer) -> Outcome:  # noqa: ARG002  # `Reservation` has its answers
        """See `Guard`."""
        if self.oversize is not None or [each for each in self.reserved if each.is_refused]:
            self.name_request()
        outcome = self.budget.judge(self.fingerprint, self.tenant, self.reserved, self.oversize)
        self.subject = outcome.subject
        return outcome

    def list_other_names(self) -> list[str]:
        """See `Guard`. The callers of its rules that the head identifies."""
        return [planned.name_caller(values) for planned, values in self._chosen if not planned.body]

    def _list_orders(self, planned: PlannedRule, tenant: str) -> Sequence[ActiveOverride]:
        """The orders that apply to a rule: none about other rules' callers or values it ignores."""
        values = next((values for chosen, values in self._chosen if chosen is planned), [])
        if not values:
            return self.overrides
        names, aliases = (
            [tenant, self.tenant, *planned.callers.list_parts(values)],
            self.plan.aliases,
        )
        own = {"", *names, *[aliases[name] for name in names if name in aliases]}
        return [order for order in self.overrides if order.target.caller in own]

    def find_values(self, tenant: str) -> Values:
        """The descriptors by which its rules know a caller, by name; only those in the head."""
        if tenant == self.tenant:
            return self.values
        return next(
            (
                values
                for planned, values in self._chosen
                if values and planned.name_caller(values) == tenant
            ),
            [],
        )

    def find_parts(self, tenant: str) -> list[str]:
        """The names of those values; see `list_parts`."""
        if tenant == self.tenant:
            return self.list_parts()
        chosen = [each for each in self._chosen if each[0].name_caller(each[1]) == tenant]
        return next((planned.callers.list_parts(values) for planned, values in chosen), [])


_NO_TOKENS: Final = Estimate(0, 0, "")
