"""Turns an access log entry into settlements for the budgets from which its request took an estimate."""

from __future__ import annotations

from typing import Any, Final

from extproc.budgets.guard import BudgetRules
from extproc.engine.budget_candidates import BUDGETS
from extproc.engine.engine import Engine
from extproc.engine.settlements import Entry, read_call
from extproc.store.rules.budget import HIGHEST, Take

_SHADOW: Final = "shadow"
_FIELDS: Final = 5
_MOST: Final = 64
"""Reservations read per policy."""

_LONGEST_KEY: Final = 1_024


class SettledBudget:
    """What a response has used of one budget; never changed.

    Attributes:
        take: the settlement.
        policy: the policy's id.
        mode: `enforce` or `shadow`.
        rule: the rule's name.
        used: what was used, in the rule's unit; 0 if the cost was known before the response.
        estimated: what had been estimated, likewise.
    """

    @property
    def changes(self) -> bool:
        """Whether there is anything to tell the store."""
        return self.take.amount != 0 or self.estimated > 0

    __slots__ = ("estimated", "mode", "policy", "rule", "take", "used")

    def __init__(self, take: Take, policy: str, mode: str, rule: str, used: float, estimated: float) -> None:  # noqa: PLR0913  # a record
        self.take = take
        self.policy = policy
        self.mode = mode
        self.rule = rule
        self.used = used
        self.estimated = estimated


def list_budget_settlements(engine: Engine, entry: Entry) -> list[SettledBudget]:
    """The settlements for budgets whose policies and rules still exist."""
    settled: list[SettledBudget] = []
    for named in entry.budgets:
        guard = _find_guard(engine, named)
        reserved = named.get(BUDGETS)
        if guard is None or not isinstance(reserved, list):
            continue
        asked = named.get("model")
        model = entry.model or (asked if isinstance(asked, str) else "")
        session, prompt, most = named.get("session"), _read_prompt(named, entry), _read_most(named)
        call = read_call(named.get("call")).hex()
        for place, each in enumerate(reserved[:_MOST]):
            found = _settle(guard, each, entry, model, most, f"{call}.{place}" if call else "")
            if found is None:
                continue
            settled.append(found)
            if prompt:
                guard.anchors.learn(f"{found.take.key.rpartition(':')[2]}:{session}", prompt, entry.usage.prompt)
    return settled


def _find_guard(engine: Engine, named: dict[str, Any]) -> BudgetRules | None:
    """The guard that let the request through, in the mode that it had then."""
    policy = named.get("policy")
    plan = engine.find_plan(policy) if isinstance(policy, str) else None
    if plan is not None and plan.watching is not None and named.get("mode") == _SHADOW:
        plan = plan.watching
    return plan.budget.guard if plan is not None and plan.budget is not None else None


def _settle(  # noqa: PLR0913  # everything that decides
    guard: BudgetRules, reserved: object, entry: Entry, model: str, most: int, call: str
) -> SettledBudget | None:
    """One settlement; None if another program wrote the metadata, or the rule does not exist any more.

    A stream that does not report its output is charged for as many tokens as its bytes can be, and not for more than the
    request allowed. If the answer was cut off, or is not to be believed, the reservation is the least that is charged.
    """
    if not isinstance(reserved, list) or len(reserved) != _FIELDS:
        return None
    rule, suffix, key, amount, start = reserved
    if not (isinstance(rule, str) and isinstance(suffix, str) and isinstance(key, str) and guard.owns(key)):
        return None
    if not (_is_whole(amount) and _is_whole(start)) or len(key) > _LONGEST_KEY:
        return None
    known = guard.find_limit(rule, suffix)
    if known is None:
        return None
    owner, limit = known
    free = entry.refused or entry.unsent
    if not owner.cost.measured:
        take = limit.make_take(key, amount).settle(amount if free else 0, start, call)
        return SettledBudget(take, guard.policy, guard.mode, owner.name, 0, 0)
    usage = entry.usage
    if entry.most_output > usage.output:
        usage = usage._replace(output=min(entry.most_output, max(most, usage.output)) if most else entry.most_output)
    used = 0 if free else owner.cost.measure(usage, model, limit.units)
    if (entry.cut or entry.absurd) and not free:
        used = max(used, amount)
    take = limit.make_take(key, amount).settle(amount - used, start, call)
    return SettledBudget(take, guard.policy, guard.mode, owner.name, used / limit.units, amount / limit.units)


def _read_prompt(named: dict[str, Any], entry: Entry) -> int:
    """The estimated tokens of a session's prompt, if the response counted them, else 0."""
    prompt = named.get("prompt")
    counted = not (entry.refused or entry.unsent or entry.estimated) and entry.usage.prompt > 0
    return prompt if counted and _is_whole(prompt) and isinstance(prompt, int) else 0


def _read_most(named: dict[str, Any]) -> int:
    """The most tokens that the request allowed for its answer; 0 if that is unknown."""
    most = named.get("most")
    return most if _is_whole(most) and isinstance(most, int) else 0


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= HIGHEST
