"""Reservations of sessions and budgets, from the answer to a request until they are settled.

A session reserves a step and its cost, a budget an amount. If the request is not forwarded, both
are given back at once. If it is, its metadata lists the reservations, and Envoy's access log
repeats them when the request has ended. Then they are settled, or given back if another filter
refused the request. The metadata also lists windows from which failed requests are removed.
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
from extproc.engine.guards import CALLS, LoopGuard, SessionGuard
from extproc.engine.plan import Plan
from extproc.sessions.rates import Usage, estimate_tokens
from extproc.store.rules.back_to_back import (
    BACK_TO_BACK,
    LEFT_OUT,
    NAME,
    REFUSED as TURNED_AWAY,
    Begin,
    End,
)
from extproc.store.rules.budget import HIGHEST, Take
from extproc.store.rules.session import (
    FAILED,
    MAX_RESERVE,
    NANO_DOLLARS,
    REFUSED,
    SUCCEEDED,
    WITHDRAWN,
    Settlement,
)
from extproc.store.rules.take_back import COUNTED, TakeBack

BUDGETS: Final = "budgets"
"""Metadata key: a request's reservations in the budgets of a policy."""

_OWN: Final = "own"
"""Metadata key: the request is its session's own, not an agent's, so its input is compared."""

_LOOP: Final = "loop"
"""Metadata key: the request's row of loops (caller and conversation), and the estimated tokens of
its prompt."""

_SHADOW: Final = "shadow"
_CALL: Final = 16
_RESERVED: Final = 5
_PAIR: Final = 2
_LOOPING: Final = 3
_LONGEST_NAME: Final = 256
_MOST_POLICIES: Final = 16
_MOST_RESERVED: Final = 64
"""Maximum number of reservations to read per policy."""

_LONGEST_KEY: Final = 1_024
_KEY_OF_OURS: Final = re.compile(r"(shadow:)?(loop|chain2):.{1,1000}[0-9a-f]{2}")

_NAME_OF_OURS: Final = re.compile(f"[0-9a-f]{{{2 * NAME}}}")

_encode: Final = json.Encoder().encode
_decode: Final = json.Decoder(list[dict[str, Any]]).decode


class Entry(NamedTuple):
    """One completed request.

    Attributes:
        calls: its reservations, as written by `describe_calls`.
        status: status of the response; 0 if there was none.
        failed: the upstream or the connection to it failed: a 5xx status, or cut off.
        request_bytes: length of the request's body.
        response_bytes: length of the response's body.
        model: the model's name in the response; empty if missing.
        usage: its tokens.
        estimated: some token counts are estimated from the lengths of the bodies.
        refused: Loopguard refused it.
        counted: ends of intervals and, for a failed or unsent request, counters to undo if
            policies do not count failures.
        model_ms: time that the upstream took, in milliseconds; 0 if unknown.
        unsent: another filter refused it, or its client left, before any of it reached an upstream.
        most_output: maximum tokens of its response, if it is a stream that does not report them;
            else 0.
        cut: the client left, or a timeout struck, before the usage was known.
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
    counted: Sequence[TakeBack | End] = ()
    model_ms: int = 0
    unsent: bool = False
    most_output: int = 0
    cut: bool = False
    absurd: bool = False


class LoopCost(NamedTuple):
    """The cost of a request in a loop, in nano-dollars, and its prompt's tokens, with estimates.

    Attributes:
        key: see `Exchange.conversation_key`.
    """

    key: tuple[str, str]
    cost: int
    reserved: int
    prompt: int
    estimated_prompt: int


class Settled(NamedTuple):
    """One settlement for the store, and the report that follows its answer.

    Attributes:
        asked: the question; in a list of these, takes come last.
        policy: the policy's id.
        mode: `enforce` or `shadow`.
        stands: the reservation stands; there is nothing to settle, or the usage is unknown.
        tenant: hash of the caller.
        session: hash of the session's name.
        model: the model in the response, or else in the request.
        rule: for a budget: the rule's name.
        used: what was used, in the rule's unit; 0 if the cost was known before the response.
        estimated: the earlier estimate, likewise.
        limit: for a budget: the limit.
        loop: the request's cost, if this reservation prices a request in a loop.
    """

    asked: Settlement | TakeBack | End | Take
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
    """Questions that give back all reservations of a request that was REFUSED or WITHDRAWN.

    The second list is for this process, which has counted them while the store was unavailable.
    """
    given: list[Settled] = []
    here: list[Take] = []
    for each in sessions:
        if each.is_let_through:
            limits = each.limiter.find_limits(each.session)
            asked = Settlement(
                each.name_ledger(), limits, each.call, 0, estimated=False, outcome=outcome
            )
            given.append(
                Settled(
                    asked,
                    each.plan.id,
                    each.limiter.mode,
                    False,
                    each.tenant,
                    each.session,
                    each.model,
                )
            )
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


def list_withdrawn(exchange: Exchange, outcome: int) -> list[Settled]:
    """Questions that end the intervals of a request that was REFUSED or WITHDRAWN."""
    ended: list[Settled] = []
    for group in exchange.groups:
        for guard in group.active:
            begun = guard.hit
            if isinstance(guard, LoopGuard) and isinstance(begun, Begin):
                stays = outcome == REFUSED and guard.detector.counts_refused
                how = TURNED_AWAY if stays else LEFT_OUT
                ended.append(Settled(End(begun.key, begun.name, how, begun.window_ms)))
    return ended


def describe_calls(exchange: Exchange) -> str:
    """What the access log must repeat about a forwarded request, as JSON; may be empty.

    It is a list of objects: one for each session's call, one for counters, and one for
    each policy with budgets.
    """
    described: list[dict[str, object]] = [
        {
            "policy": each.plan.id,
            "mode": each.limiter.mode,
            "name": each.name_ledger(),
            "call": each.call.hex(),
            "model": each.model,
            "reserve": each.reserve,
            **({_OWN: True} if each.limiter.growth and not each.agent_name else {}),
        }
        for each in exchange.sessions
        if each.is_let_through
    ]
    looping = (
        [*exchange.conversation_key, estimate_tokens(exchange.sums.length)]
        if exchange.is_priced
        else None
    )
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
    """A request's estimated cost in nano-dollars, by its sessions or else budgets; -1 if none."""
    for session in exchange.sessions:
        if session.is_let_through:
            return session.reserve
    return max([find_dollars(budget) for budget in exchange.budgets], default=-1)


def find_dollars(budget: BudgetGuard) -> int:
    """A request's reservation in a budget in dollars, in nano-dollars; -1 if there is none."""
    for each in budget.reserved:
        if each.limit.unit == DOLLAR_UNIT and each.taken is not None and each.taken.granted:
            return each.take.amount * NANO_DOLLARS // each.limit.units
    return -1


def _describe_budget(budget: BudgetGuard) -> dict[str, object] | None:
    """The object of `describe_calls` for budgets.

    A reservation is written as the names of rule and limit, its key, amount and start. If failures
    are removed from counts, costs that were known before the response are listed, too, to be given
    back if another filter refuses the request.
    """
    logged = budget.budget.needs_body or not budget.plan.counts_failed
    reserved: list[tuple[str, str, str, int, int]] = []
    for each in budget.reserved:
        taken = each.taken
        if (
            (logged or each.rule.cost.measured)
            and taken is not None
            and taken.granted
            and taken.here is None
        ):
            reserved.append(
                (each.rule.name, each.limit.suffix, each.take.key, each.take.amount, taken.start)
            )
    if not reserved:
        return None
    found: dict[str, object] = {
        BUDGETS: reserved,
        "policy": budget.plan.id,
        "mode": budget.budget.mode,
    }
    estimate = budget.estimate
    found |= {"model": estimate.model, "call": CALLS.name().hex()}
    if estimate.answer and read_path(budget.request.path).longest_answers:
        found["most"] = estimate.answer * estimate.copies
    if budget.root and estimate.prompt:
        found |= {"session": budget.root, "prompt": estimate.prompt}
    return found


def read_calls(text: object) -> Sequence[dict[str, Any]]:
    """Parse the output of `describe_calls`; empty for anything else."""
    try:
        return _decode(text)[:_MOST_POLICIES] if isinstance(text, str) else ()
    except (MsgspecError, ValueError, RecursionError):
        return ()


def read_counted(named: object, lasted_ms: int) -> list[TakeBack | End]:
    """Parse the counters that need to know a request's end.

    `lasted_ms` is as in `End`; all but intervals only need to know that the request failed.
    """
    counters = named if isinstance(named, list) else []
    found: list[TakeBack | End] = []
    for counter in counters[:_MOST_POLICIES]:
        if not isinstance(counter, list) or not all(isinstance(text, str) for text in counter):
            continue
        if len(counter) < _PAIR or _KEY_OF_OURS.fullmatch(counter[1]) is None:
            continue
        if len(counter) == _PAIR and counter[0] != BACK_TO_BACK and lasted_ms == LEFT_OUT:
            found.append(TakeBack(counter[1], counter[0]))
        elif len(counter) > _PAIR and _NAME_OF_OURS.fullmatch(counter[2]) is not None:
            found.append(End(counter[1], bytes.fromhex(counter[2]), lasted_ms))
    return found


def list_settlements(engine: Engine, entry: Entry) -> tuple[list[Settled], int]:
    """The settlements of an ended request, and the number of its calls without a loaded policy."""
    settled = [Settled(counted) for counted in entry.counted]
    unknown = 0
    for named in entry.calls:
        plan = _find_plan(engine, named)
        found = [] if plan is None else _settle_call(plan, named, entry)
        unknown += not found
        settled += [each for each in found if not each.stands]
    return settled, unknown


def _find_plan(engine: Engine, named: dict[str, Any]) -> Plan | None:
    """The policy that let the request through, in its mode at that time."""
    policy = named.get("policy")
    plan = engine.find_plan(policy) if isinstance(policy, str) else None
    return (
        plan.watching
        if plan is not None and plan.watching is not None and named.get("mode") == _SHADOW
        else plan
    )


def _settle_call(plan: Plan, named: dict[str, Any], entry: Entry) -> list[Settled]:
    """The settlements of a call; none if the metadata is forged, or its limits no longer exist."""
    if BUDGETS in named:
        return [] if plan.budget is None else _settle_budgets(plan.budget.guard, named, entry)
    guard, key, call = plan.limiter, named.get("name"), _read_call(named)
    if guard is None or not isinstance(key, str) or not guard.owns(key) or not call:
        return []
    model = guard.rates.choose_name(entry.model, _read_model(named))
    cost, reserved = (
        guard.rates.find_cost(model, entry.usage),
        _read_reserved(named) if entry.cut else 0,
    )
    _, renewed, tenant = key.rsplit(":", 2)
    session = renewed.rpartition(".")[2]
    outcome = FAILED if entry.failed else WITHDRAWN if entry.unsent else SUCCEEDED
    limits = guard.find_limits(session)
    asked = Settlement(
        key,
        limits,
        call,
        max(cost, reserved),
        entry.estimated,
        outcome,
        entry.usage,
        entry.model_ms,
        named.get(_OWN) is True and not entry.estimated,
    )
    stands = outcome == SUCCEEDED and cost < reserved
    spent = 0 if entry.unsent else max(cost, reserved)
    loop = _read_loop(named, spent, _read_reserved(named), entry)
    return [Settled(asked, guard.policy, guard.mode, stands, tenant, session, model, loop=loop)]


def _settle_budgets(guard: BudgetRules, named: dict[str, Any], entry: Entry) -> list[Settled]:
    """The settlements of a policy's budgets whose rules still exist.

    They also correct its `anchors`.
    """
    reserved, call, session = named[BUDGETS], _read_call(named).hex(), named.get("session")
    model, most, prompt = (
        entry.model or _read_model(named),
        _read_whole(named.get("most")),
        _read_whole(named.get("prompt")),
    )
    counted = not (entry.refused or entry.unsent or entry.estimated) and entry.usage.prompt > 0
    settled: list[Settled] = []
    for place, each in enumerate(reserved[:_MOST_RESERVED] if isinstance(reserved, list) else ()):
        found = _settle_budget(
            guard, each, entry, model, most, f"{call}.{place}" if call else "", named
        )
        if found is not None:
            settled.append(found)
            if prompt and counted:
                guard.anchors.learn(
                    f"{found.asked.key.rpartition(':')[2]}:{session}", prompt, entry.usage.prompt
                )
    return settled


def _settle_budget(  # noqa: PLR0913  # everything that decides
    guard: BudgetRules,
    reserved: object,
    entry: Entry,
    model: str,
    most: int,
    call: str,
    named: dict[str, Any],
) -> Settled | None:
    """One settlement; None if the metadata is forged, or the rule no longer exists.

    A stream that does not report its output is charged for the tokens that its bytes can contain,
    up to the request's own maximum. If the answer was cut off or its usage is implausible, at least
    the reservation is charged.
    """
    if not isinstance(reserved, list) or len(reserved) != _RESERVED:
        return None
    rule, suffix, key, amount, start = reserved
    if not (
        isinstance(rule, str)
        and isinstance(suffix, str)
        and isinstance(key, str)
        and guard.owns(key)
    ):
        return None
    known = guard.find_limit(rule, suffix)
    if known is None or not (_is_whole(amount) and _is_whole(start)) or len(key) > _LONGEST_KEY:
        return None
    owner, limit = known
    tenant = key.rpartition(":")[2].rpartition(".")[2]
    free = entry.refused or entry.unsent
    if not owner.cost.measured:
        take = limit.make_take(key, amount).settle(amount if free else 0, start, call)
        return Settled(
            take, guard.policy, guard.mode, take.amount == 0, tenant, rule=owner.name, limit=limit
        )
    usage = entry.usage
    if entry.most_output > usage.output:
        usage = usage._replace(
            output=min(entry.most_output, max(most, usage.output)) if most else entry.most_output
        )
    used = 0 if free else owner.cost.weigh(usage, model, limit.units)
    if (entry.cut or entry.absurd) and not free:
        used = max(used, amount)
    take = limit.make_take(key, amount).settle(amount - used, start, call)
    told = used / limit.units, amount / limit.units
    loop = None
    if limit.unit == DOLLAR_UNIT:
        loop = _read_loop(
            named, used * NANO_DOLLARS // limit.units, amount * NANO_DOLLARS // limit.units, entry
        )
    return Settled(
        take,
        guard.policy,
        guard.mode,
        used == amount == 0,
        tenant,
        "",
        "",
        owner.name,
        *told,
        limit,
        loop,
    )


def _read_loop(named: dict[str, Any], cost: int, reserved: int, entry: Entry) -> LoopCost | None:
    """The cost of a request in a loop; None if it is in none, or the metadata is forged."""
    row = named.get(_LOOP)
    if not isinstance(row, list) or len(row) != _LOOPING or not _is_whole(row[2]):
        return None
    tenant, conversation, prompt = row
    if (
        not (isinstance(tenant, str) and isinstance(conversation, str))
        or len(tenant) + len(conversation) > _LONGEST_NAME
    ):
        return None
    return LoopCost(
        (tenant, conversation), cost, reserved, 0 if entry.unsent else entry.usage.prompt, prompt
    )


def _read_model(named: dict[str, Any]) -> str:
    model = named.get("model")
    return model if isinstance(model, str) else ""


def _read_call(named: dict[str, Any]) -> bytes:
    """The name of a call, in bytes; empty if invalid."""
    text = named.get("call")
    if not isinstance(text, str) or len(text) != 2 * _CALL:
        return b""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def _read_reserved(named: dict[str, Any]) -> int:
    """The amount that a call reserved, in nano-dollars; 0 if the metadata is forged."""
    reserved = named.get("reserve")
    return (
        int(reserved) if isinstance(reserved, (int, float)) and 0 <= reserved <= MAX_RESERVE else 0
    )


def _read_whole(value: object) -> int:
    """A valid count; 0 for anything else."""
    return value if _is_whole(value) and isinstance(value, int) else 0


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= HIGHEST
