"""Turns an access log entry into settlements for the ledgers of its request's sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from extproc.engine.engine import Engine
from extproc.sessions.limits import SessionLimiter
from extproc.sessions.rates import Usage
from extproc.store.rules.session import FAILED, MAX_RESERVE, SUCCEEDED, WITHDRAWN, Settlement
from extproc.store.rules.take_back import TakeBack

_CALL: Final = 16
_SHADOW: Final = "shadow"


class Entry:
    """One completed request; never changed.

    Attributes:
        sessions: descriptions of its sessions, which the guard sent to Envoy.
        status: status of the response; 0 for none.
        counted: for a failed or unsent request, the counts that include it if policies do not count failures.
        failed: the upstream failed, or the connection to it: 5xx, or cut off.
        request_bytes: length of the request's body.
        response_bytes: length of the response's body.
        model: the model's name in the response; empty if missing.
        usage: its tokens.
        estimated: some token counts are estimated from the lengths of the bodies.
        refused: Loopguard refused it.
        model_ms: time that the upstream took, in milliseconds; 0 if unknown.
        unsent: another filter refused it, or its client left, before anything of it reached an upstream.
        budgets: what it has reserved of budgets, as sent to Envoy.
        most_output: the most tokens that its response can have, if it is a stream that does not report them; else 0.
        cut: the client left, or time was up, before it was known what the upstream had used.
        absurd: the response reports more than any model can use.
    """

    __slots__ = (
        "absurd",
        "budgets",
        "counted",
        "cut",
        "estimated",
        "failed",
        "model",
        "model_ms",
        "most_output",
        "refused",
        "request_bytes",
        "response_bytes",
        "sessions",
        "status",
        "unsent",
        "usage",
    )

    def __init__(  # noqa: PLR0913  # a record
        self,
        sessions: tuple[dict[str, Any], ...],
        status: int,
        failed: bool,  # noqa: FBT001  # a field
        request_bytes: int,
        response_bytes: int,
        model: str,
        usage: Usage,
        estimated: bool,  # noqa: FBT001  # a field
        refused: bool,  # noqa: FBT001  # a field
        counted: Sequence[TakeBack] = (),
        model_ms: int = 0,
        unsent: bool = False,  # noqa: FBT001, FBT002  # a field
        budgets: tuple[dict[str, Any], ...] = (),
        most_output: int = 0,
        cut: bool = False,  # noqa: FBT001, FBT002  # a field
        absurd: bool = False,  # noqa: FBT001, FBT002  # a field
    ) -> None:
        self.most_output = most_output
        self.cut = cut
        self.absurd = absurd
        self.unsent = unsent
        self.budgets = budgets
        self.counted = counted
        self.model_ms = model_ms
        self.sessions = sessions
        self.status = status
        self.failed = failed
        self.request_bytes = request_bytes
        self.response_bytes = response_bytes
        self.model = model
        self.usage = usage
        self.estimated = estimated
        self.refused = refused


class Settled:
    """A completed request that one policy let through; never changed.

    Attributes:
        settlement: the settlement for the ledger.
        policy: the policy's id.
        mode: `enforce` or `shadow`.
        tenant: hash of the caller.
        session: hash of the session's name.
        model: the model in the response, or else in the request.
        waits: what the ledger has reserved stands for now, because nothing says what was used.
    """

    __slots__ = ("mode", "model", "policy", "session", "settlement", "tenant", "waits")

    def __init__(  # noqa: PLR0913  # a record
        self, settlement: Settlement, policy: str, mode: str, tenant: str, session: str, model: str, *, waits: bool
    ) -> None:
        self.waits = waits
        self.settlement = settlement
        self.policy = policy
        self.mode = mode
        self.tenant = tenant
        self.session = session
        self.model = model


def list_settlements(engine: Engine, entry: Entry) -> list[Settled]:
    """The settlements for the sessions whose policies still exist."""
    made = [_settle(engine, named, entry) for named in entry.sessions]
    return [settled for settled in made if settled is not None]


def _settle(engine: Engine, named: dict[str, Any], entry: Entry) -> Settled | None:
    guard = _find_guard(engine, named)
    if guard is None:
        return None
    key, call = named.get("name"), read_call(named.get("call"))
    if not isinstance(key, str) or not guard.owns(key) or not call:
        return None
    asked = named.get("model")
    model = guard.rates.choose_name(entry.model, asked if isinstance(asked, str) else "")
    cost = guard.rates.find_cost(model, entry.usage)
    reserved = _read_reserved(named) if entry.cut else 0
    _, renewed, tenant = key.rsplit(":", 2)
    session = renewed.rpartition(".")[2]
    outcome = FAILED if entry.failed else WITHDRAWN if entry.unsent else SUCCEEDED
    usage = entry.usage
    tokens = usage.input, usage.output, usage.cache_read, usage.cache_write
    limits, estimated = guard.find_limits(session), entry.estimated
    settlement = Settlement(key, limits, call, max(cost, reserved), estimated, outcome, tokens, entry.model_ms)
    waits = outcome == SUCCEEDED and cost < reserved
    return Settled(settlement, guard.policy, guard.mode, tenant, session, model, waits=waits)


def _read_reserved(named: dict[str, Any]) -> int:
    """What a call has reserved, in nano-dollars; 0 if another program wrote the metadata."""
    reserved = named.get("reserve")
    return int(reserved) if isinstance(reserved, (int, float)) and 0 <= reserved <= MAX_RESERVE else 0


def _find_guard(engine: Engine, named: dict[str, Any]) -> SessionLimiter | None:
    """The guard that let the request through, in the mode that it had then."""
    policy = named.get("policy")
    plan = engine.find_plan(policy) if isinstance(policy, str) else None
    if plan is not None and plan.watching is not None and named.get("mode") == _SHADOW:
        plan = plan.watching
    return plan.limiter if plan is not None else None


def read_call(text: object) -> bytes:
    """The bytes of a call's name; empty if invalid."""
    if not isinstance(text, str) or len(text) != 2 * _CALL:
        return b""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""
