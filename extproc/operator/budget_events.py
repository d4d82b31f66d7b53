"""Events about budgets: a stage that a caller reaches, a refusal, and a circuit breaker that opens; see `LoopEvents`."""
# interpreted: works beside the requests

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from extproc.budgets.commands import write_breaker_release, write_budget_grant
from extproc.operator.budget_table import CallerBudget

QUIET_SECONDS = 60
"""The same event about a caller and a rule is not sent again for this long."""

_DIGITS = 9


class BudgetEvents:
    """Sends events about budgets, each once per caller, rule and minute. It only reads the table."""

    def __init__(self, emit: Callable[[str, str, Mapping[str, object]], None], shows_callers: Callable[[], bool]) -> None:
        self._emit = emit
        self._shows_callers = shows_callers
        self._seen: dict[tuple[str, ...], tuple[float, float]] = {}
        self._told: dict[tuple[str, ...], float] = {}
        self._open: set[tuple[str, ...]] = set()

    def look(self, rows: Sequence[CallerBudget], now: float) -> None:
        """Send events about what has happened since the last look; `now` is in seconds since 1970."""
        seen: dict[tuple[str, ...], tuple[float, float]] = {}
        opened: set[tuple[str, ...]] = {row.name for row in rows if row.is_open}
        for row in rows:
            refused_at, staged_at = self._seen.get(row.name, (0.0, 0.0))
            if row.is_open:
                if row.name not in self._open:
                    self._emit("breaker_opened", row.name[1], self._describe(row))
            elif row.refused_at > refused_at:
                self._tell("budget_refused", row, now)
            if row.staged_at > staged_at:
                self._tell("budget_reached", row, now)
            seen[row.name] = row.refused_at, row.staged_at
        self._seen, self._open = seen, opened
        self._told = {name: at for name, at in self._told.items() if now - at < QUIET_SECONDS}

    def _tell(self, kind: str, row: CallerBudget, now: float) -> None:
        """Send an event unless it was sent within the last minute."""
        stage = row.stage if kind == "budget_reached" else ""
        about = (*row.name[:4], kind, stage)
        if now - self._told.get(about, -QUIET_SECONDS) >= QUIET_SECONDS:
            self._told[about] = now
            self._emit(kind, row.name[1], self._describe(row))

    def _describe(self, row: CallerBudget) -> dict[str, object]:
        tenant, policy, mode, rule, budget = row.name
        limit = row.limit
        whole, left = row.take.limit / limit.units, row.left / limit.units
        asked = row.asked / limit.units or max(0.0, whole - left) / max(1, row.requests)
        grant = write_budget_grant(tenant, policy, rule, whole, left, asked)
        release = write_breaker_release(tenant, policy) if row.orderable else None
        return {
            "loopguard.caller": tenant,
            "policy": policy,
            "mode": mode,
            "rule": rule,
            "budget": budget,
            "reason": limit.reason.value,
            "caller": dict(row.caller) if self._shows_callers() else None,
            "alias": row.known.alias or None,
            "labels": dict(row.known.labels) or None,
            "stage": row.stage or None,
            "limit": round(whole, _DIGITS),
            "used": round(whole - left, _DIGITS),
            "left": round(left, _DIGITS),
            "unit": limit.unit or None,
            "reset_seconds": -(-row.reset_ms // 1_000) if row.reset_ms else None,
            "refused": row.refused,
            "command": release if row.is_open else grant,
            "first_seen": row.first,
            "last_seen": row.last,
        }
