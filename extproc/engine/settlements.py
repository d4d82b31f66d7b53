"""What requests reserve of sessions and budgets, from the answer to the request until it is settled.

A session reserves a step and its cost, a budget an amount. If the request is not sent on, both are given back at once. If it
is, its metadata names what it has reserved. Envoy's access log repeats that when the request has ended, and then it is settled,
or given back if another filter refused the request. Windows that count no failures are named, too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from msgspec import MsgspecError, json

from extproc.apis import read_path
from extproc.budgets.guard import BudgetLimit, BudgetRules
from extproc.budgets.subject import DOLLAR_UNIT
from extproc.engine.budget_guard import BudgetGuard
from extproc.engine.engine import Engine
from extproc.engine.exchange import Exchange
from extproc.engine.guards import CALLS, SessionGuard
from extproc.engine.plan import Plan
from extproc.sessions.rates import Usage, estimate_tokens
from extproc.store.rules.budget import HIGHEST, Take
from extproc.store.rules.session import FAILED, MAX_RESERVE, NANO_DOLLARS, SUCCEEDED, WITHDRAWN, Settlement
from extproc.store.rules.take_back import COUNTED, TakeBack

BUDGETS: Final = "budgets"
"""Key in metadata: what a request has reserved of the budgets of a policy."""

_LOOP: Final = "loop"
"""Key in metadata: the request's row of loops (caller and conversation), and the tokens of its prompt, estimated."""

_SHADOW: Final = "shadow"
_CALL: Final = 16
_RESERVED: Final = 5
_PAIR: Final = 2
_LOOPING: Final = 3
_LONGEST_NAME: Final = 256
_MOST_POLICIES: Final = 16
_MOST_RESERVED: Final = 64
"""Reservations read per policy."""

_LONGEST_KEY: Final = 1_024
_KEY_OF_OURS: Final = re.compile(r"(shadow:)?(loop|chain2):.{1,1000}[0-9a-f]{2}")

_encode: Final = json.Encoder().encode
_decode: Final = json.Decoder(list[dict[str, Any]]).decode


class Entry(NamedTuple):
    """One completed request.

    Attributes:
        calls: what it has reserved of sessions and budgets, as `describe_calls` told Envoy.
        status: status of the response; 0 for none.
        failed: the upstream failed, or the connection to it: 5xx, or cut off.
        request_bytes: length of the request's body.
        response_bytes: length of the response's body.
        model: the model's name in the response; empty if missing.
        usage: its tokens.
        estimated: some token counts are estimated from the lengths of the bodies.
        refused: Loopguard refused it.
        counted: for a failed or unsent request, the counts that include it if policies do not count failures.
        model_ms: time that the upstream took, in milliseconds; 0 if unknown.
        unsent: another filter refused it, or its client left, before anything of it reached an upstream.
        most_output: the most tokens that its response can have, if it is a stream that does not report them; else 0.
        cut: the client left, or time was up, before it was known what the upstream had used.
        absurd: the response reports more than any model can use.
    """

    calls: Sequence[dict[str, Any]] = ()
    status: int = 0
    failed: bool = False
    request_bytes: int = 0
    response_bytes: int = 0
    model: str = ""
    usage: Usage = Usage(0, 0)
    estimated: bool = True
    refused: bool = False
    counted: Sequence[TakeBack] = ()
    model_ms: int = 0
    unsent: bool = False
    most_output: int = 0
    cut: bool = False
    absurd: bool = False


class LoopCost(NamedTuple):
    """What a request of a loop has cost, in nano-dollars, and the tokens of its prompt, each beside its estimate.

    Attributes:
        key: see `Exchange.conversation_key`.
    """

    key: tuple[str, str]
    cost: int
    reserved: int
    prompt: int
    estimated_prompt: int


class Settled(NamedTuple):
    """What the store is told about one reservation, and what is reported when it has answered.

    Attributes:
        asked: the question; in a list of these, takes come last.
        policy: the policy's id.
        mode: `enforce` or `shadow`.
        stands: there is nothing to tell the store, or nothing is known of the usage: what was reserved stands.
        tenant: hash of the caller.
        session: hash of the session's name.
        model: the model in the response, or else in the request.
        rule: of a budget's settlement: the rule's name.
        used: what was used, in the rule's unit; 0 if the cost was known before the response.
        estimated: what had been estimated, likewise.
        limit: of a budget's settlement: the limit.
        loop: the request's cost, if it is part of a loop, and this is the reservation that prices it.
    """

    asked: Settlement | TakeBack | Take
    policy: str = ""
    mode: str = ""
    stands: bool = False
    tenant: str = ""
    session: str = ""
    model: str = ""
    rule: str = ""
    used: float = 0
    estimated: float = 0
    limit: BudgetLimit | None = None
    loop: LoopCost | None = None


def list_give_backs(
    sessions: Sequence[SessionGuard], budgets: Sequence[BudgetGuard], outcome: int
) -> tuple[list[Settled], list[Take]]:
    """What gives back all that a request has reserved, once, which was then REFUSED or WITHDRAWN.

    The second list is of what this process has taken from budgets itself, because the store was unavailable.
    """
    given: list[Settled] = []
    here: list[Take] = []
    for each in sessions:
        if each.is_let_through:
            limits = each.limiter.find_limits(each.session)
            asked = Settlement(each.name_ledger(), limits, each.call, 0, estimated=False, outcome=outcome)
            given.append(Settled(asked, each.plan.id, each.limiter.mode, False, each.tenant, each.session, each.model))
    for budget in budgets:
        for one in budget.reserved:
            taken = one.taken
            if taken is not None and taken.granted:
                take = one.take.settle(one.take.amount, taken.start)
                if taken.here is None:
                    given.append(Settled(take))
                else:
                    here.append(take)
        budget.reserved = []
    return given, here


def describe_calls(exchange: Exchange) -> str:
    """What the access log has to repeat of a request that is sent on, as JSON; empty for nothing.

    It is a list of objects: of each session's call, of the counts that include the request, and of the budgets of each policy.
    """
    described: list[dict[str, object]] = [
        {
            "policy": each.plan.id,
            "mode": each.limiter.mode,
            "name": each.name_ledger(),
            "call": each.call.hex(),
            "model": each.model,
            "reserve": each.reserve,
        }
        for each in exchange.sessions
        if each.is_let_through
    ]
    looping = [*exchange.conversation_key, estimate_tokens(exchange.sums.length)] if exchange.is_priced else None
    if looping is not None and described:
        described[0][_LOOP], looping = looping, None
    if not exchange.counts_failed:
        every = [guard for group in exchange.groups for guard in group.active]
        if counted := [pair for guard in every for pair in guard.list_counted()]:
            described.append({COUNTED: counted})
    for each in exchange.budgets:
        if (found := _describe_budget(each)) is not None:
            if looping is not None and find_dollars(each) >= 0:
                found[_LOOP], looping = looping, None
            described.append(found)
    return _encode(described).decode() if described else ""


def find_reserved(exchange: Exchange) -> int:
    """What a request is estimated to cost, in nano-dollars, as its sessions or else its budgets have it; -1 if none has."""
    for session in exchange.sessions:
        if session.is_let_through:
            return session.reserve
    return max([find_dollars(budget) for budget in exchange.budgets], default=-1)


def find_dollars(budget: BudgetGuard) -> int:
    """What a request has reserved of a budget in dollars, in nano-dollars; -1 if that is none of its budgets."""
    for each in budget.reserved:
        if each.limit.unit == DOLLAR_UNIT and each.taken is not None and each.taken.granted:
            return each.take.amount * NANO_DOLLARS // each.limit.units
    return -1


def _describe_budget(budget: BudgetGuard) -> dict[str, object] | None:
    """See `describe_calls`; of each reservation, the names of rule and limit, its key, amount and start.

    With a log of failures, costs that are known before the response are given back if another filter refuses the request.
    """
    logged = budget.budget.needs_body or not budget.plan.counts_failed
    reserved: list[tuple[str, str, str, int, int]] = []
    for each in budget.reserved:
        taken = each.taken
        if (logged or each.rule.cost.measured) and taken is not None and taken.granted and taken.here is None:
            reserved.append((each.rule.name, each.limit.suffix, each.take.key, each.take.amount, taken.start))
    if not reserved:
        return None
    found: dict[str, object] = {BUDGETS: reserved, "policy": budget.plan.id, "mode": budget.budget.mode}
    estimate = budget.estimate
    found |= {"model": estimate.model, "call": CALLS.name().hex()}
    if estimate.answer and read_path(budget.request.path).longest_answers:
        found["most"] = estimate.answer * estimate.copies
    if budget.root and estimate.prompt:
        found |= {"session": budget.root, "prompt": estimate.prompt}
    return found


def read_calls(text: object) -> Sequence[dict[str, Any]]:
    """Read what `describe_calls` wrote; empty for what others wrote."""
    try:
        return _decode(text)[:_MOST_POLICIES] if isinstance(text, str) else ()
    except (MsgspecError, ValueError, RecursionError):
        return ()


def read_counted(named: object) -> list[TakeBack]:
    """Read the counts in one of its objects."""
    pairs = named if isinstance(named, list) else []
    texts = [pair for pair in pairs if isinstance(pair, list) and len(pair) == _PAIR and isinstance(pair[1], str)]
    return [TakeBack(key, str(kind)) for kind, key in texts[:_MOST_POLICIES] if _KEY_OF_OURS.fullmatch(key) is not None]


def list_settlements(engine: Engine, entry: Entry) -> tuple[list[Settled], int]:
    """What a request that has ended settles, and the number of its calls that no policy in force knows."""
    settled = [Settled(counted) for counted in entry.counted]
    unknown = 0
    for named in entry.calls:
        plan = _find_plan(engine, named)
        found = [] if plan is None else _settle_call(plan, named, entry)
        unknown += not found
        settled += [each for each in found if not each.stands]
    return settled, unknown


def _find_plan(engine: Engine, named: dict[str, Any]) -> Plan | None:
    """The policy that let the request through, in the mode that it had then."""
    policy = named.get("policy")
    plan = engine.find_plan(policy) if isinstance(policy, str) else None
    return plan.watching if plan is not None and plan.watching is not None and named.get("mode") == _SHADOW else plan


def _settle_call(plan: Plan, named: dict[str, Any], entry: Entry) -> list[Settled]:
    """The settlements of a call; none if another program wrote the metadata, or its limits do not exist any more."""
    if BUDGETS in named:
        return [] if plan.budget is None else _settle_budgets(plan.budget.guard, named, entry)
    guard, key, call = plan.limiter, named.get("name"), _read_call(named)
    if guard is None or not isinstance(key, str) or not guard.owns(key) or not call:
        return []
    model = guard.rates.choose_name(entry.model, _read_model(named))
    cost, reserved = guard.rates.find_cost(model, entry.usage), _read_reserved(named) if entry.cut else 0
    _, renewed, tenant = key.rsplit(":", 2)
    session = renewed.rpartition(".")[2]
    outcome = FAILED if entry.failed else WITHDRAWN if entry.unsent else SUCCEEDED
    limits = guard.find_limits(session)
    asked = Settlement(key, limits, call, max(cost, reserved), entry.estimated, outcome, entry.usage, entry.model_ms)
    stands = outcome == SUCCEEDED and cost < reserved
    spent = 0 if entry.unsent else max(cost, reserved)
    loop = _read_loop(named, spent, _read_reserved(named), entry)
    return [Settled(asked, guard.policy, guard.mode, stands, tenant, session, model, loop=loop)]


def _settle_budgets(guard: BudgetRules, named: dict[str, Any], entry: Entry) -> list[Settled]:
    """The settlements of a policy's budgets, as far as their rules still exist; they teach its `anchors`."""
    reserved, call, session = named[BUDGETS], _read_call(named).hex(), named.get("session")
    model, most, prompt = entry.model or _read_model(named), _read_whole(named.get("most")), _read_whole(named.get("prompt"))
    counted = not (entry.refused or entry.unsent or entry.estimated) and entry.usage.prompt > 0
    settled: list[Settled] = []
    for place, each in enumerate(reserved[:_MOST_RESERVED] if isinstance(reserved, list) else ()):
        found = _settle_budget(guard, each, entry, model, most, f"{call}.{place}" if call else "", named)
        if found is not None:
            settled.append(found)
            if prompt and counted:
                guard.anchors.learn(f"{found.asked.key.rpartition(':')[2]}:{session}", prompt, entry.usage.prompt)
    return settled


def _settle_budget(  # noqa: PLR0913  # everything that decides
    guard: BudgetRules, reserved: object, entry: Entry, model: str, most: int, call: str, named: dict[str, Any]
) -> Settled | None:
    """One settlement; None if another program wrote the metadata, or the rule does not exist any more.

    A stream that does not report its output is charged for as many tokens as its bytes can be, and not for more than the
    request allowed. If the answer was cut off, or is not to be believed, the reservation is the least that is charged.
    """
    if not isinstance(reserved, list) or len(reserved) != _RESERVED:
        return None
    rule, suffix, key, amount, start = reserved
    if not (isinstance(rule, str) and isinstance(suffix, str) and isinstance(key, str) and guard.owns(key)):
        return None
    known = guard.find_limit(rule, suffix)
    if known is None or not (_is_whole(amount) and _is_whole(start)) or len(key) > _LONGEST_KEY:
        return None
    owner, limit = known
    tenant = key.rpartition(":")[2].rpartition(".")[2]
    free = entry.refused or entry.unsent
    if not owner.cost.measured:
        take = limit.make_take(key, amount).settle(amount if free else 0, start, call)
        return Settled(take, guard.policy, guard.mode, take.amount == 0, tenant, rule=owner.name, limit=limit)
    usage = entry.usage
    if entry.most_output > usage.output:
        usage = usage._replace(output=min(entry.most_output, max(most, usage.output)) if most else entry.most_output)
    used = 0 if free else owner.cost.weigh(usage, model, limit.units)
    if (entry.cut or entry.absurd) and not free:
        used = max(used, amount)
    take = limit.make_take(key, amount).settle(amount - used, start, call)
    told = used / limit.units, amount / limit.units
    loop = None
    if limit.unit == DOLLAR_UNIT:
        loop = _read_loop(named, used * NANO_DOLLARS // limit.units, amount * NANO_DOLLARS // limit.units, entry)
    return Settled(take, guard.policy, guard.mode, used == amount == 0, tenant, "", "", owner.name, *told, limit, loop)


def _read_loop(named: dict[str, Any], cost: int, reserved: int, entry: Entry) -> LoopCost | None:
    """What a request of a loop has cost; None if it is part of none, or another program wrote the metadata."""
    row = named.get(_LOOP)
    if not isinstance(row, list) or len(row) != _LOOPING or not _is_whole(row[2]):
        return None
    tenant, conversation, prompt = row
    if not (isinstance(tenant, str) and isinstance(conversation, str)) or len(tenant) + len(conversation) > _LONGEST_NAME:
        return None
    return LoopCost((tenant, conversation), cost, reserved, 0 if entry.unsent else entry.usage.prompt, prompt)


def _read_model(named: dict[str, Any]) -> str:
    model = named.get("model")
    return model if isinstance(model, str) else ""


def _read_call(named: dict[str, Any]) -> bytes:
    """The bytes of a call's name; empty if invalid."""
    text = named.get("call")
    if not isinstance(text, str) or len(text) != 2 * _CALL:
        return b""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def _read_reserved(named: dict[str, Any]) -> int:
    """What a call has reserved, in nano-dollars; 0 if another program wrote the metadata."""
    reserved = named.get("reserve")
    return int(reserved) if isinstance(reserved, (int, float)) and 0 <= reserved <= MAX_RESERVE else 0


def _read_whole(value: object) -> int:
    """A number that is written as it should be; else 0."""
    return value if _is_whole(value) and isinstance(value, int) else 0


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= HIGHEST
