"""Events about budgets: a stage that a caller reaches, a refusal, and a circuit breaker that opens; see `LoopEvents`."""
# interpreted: works beside the requests

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from extproc.budgets.commands import write_breaker_release, write_budget_grant
from extproc.operator.budget_rows import BudgetRow

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

    def look(self, rows: Sequence[BudgetRow], now: float) -> None:
        """Send events about what has happened since the last look; `now` is in seconds since 1970."""
        seen: dict[tuple[str, ...], tuple[float, float]] = {}
        opened: set[tuple[str, ...]] = {row.name for row in rows if row.is_open}
        for row in rows:
            refused_at, staged_at = self._seen.get(row.name, (0.0, 0.0))
            if row.is_open:
                if row.name not in self._open:
                    self._emit("breaker_opened", row.policy, self._describe(row))
            elif row.refused_at > refused_at:
                self._tell("budget_refused", row, now)
            if row.staged_at > staged_at:
                self._tell("budget_reached", row, now)
            seen[row.name] = row.refused_at, row.staged_at
        self._seen, self._open = seen, opened
        self._told = {name: at for name, at in self._told.items() if now - at < QUIET_SECONDS}

    def _tell(self, kind: str, row: BudgetRow, now: float) -> None:
        stage = row.stage if kind == "budget_reached" else ""
        about = (*row.name[:4], kind, stage)
        if now - self._told.get(about, -QUIET_SECONDS) >= QUIET_SECONDS:
            self._told[about] = now
            self._emit(kind, row.policy, self._describe(row))

    def _describe(self, row: BudgetRow) -> dict[str, object]:
        whole, left = row.limit / row.units, row.find_left(row.told) / row.units
        asked = row.asked / row.units or max(0.0, whole - left) / max(1, row.requests)
        grant = write_budget_grant(row.tenant, row.policy, row.rule, whole, left, asked)
        release = write_breaker_release(row.tenant, row.policy) if row.orderable else None
        reset = row.find_reset_ms(row.told)
        return {
            "loopguard.caller": row.tenant,
            "policy": row.policy,
            "mode": row.mode,
            "rule": row.rule,
            "budget": row.budget,
            "reason": row.reason,
            "caller": dict(row.caller) if self._shows_callers() else None,
            "alias": row.alias or None,
            "labels": dict(row.labels) or None,
            "stage": row.stage or None,
            "limit": round(whole, _DIGITS),
            "used": round(whole - left, _DIGITS),
            "left": round(left, _DIGITS),
            "unit": row.unit or None,
            "reset_seconds": -(-reset // 1_000) if reset > 0 else None,
            "refused": row.refused,
            "command": release if row.is_open else grant,
            "first_seen": row.first,
            "last_seen": row.last,
        }
