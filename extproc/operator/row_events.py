"""Events about changes in tables.

Tables are polled once a second, so requests do not wait for events.
"""
# interpreted: works beside the requests

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from extproc.decision import SEVERITY, Action
from extproc.operator.budget_rows import BudgetRow
from extproc.operator.loop_rows import IncidentRow, Loop
from extproc.operator.session_table import Run, convert_amount, convert_dollars, name_killer
from extproc.sessions.limits import write_grant
from extproc.store.rules.tree import AGENT_LIMITS

QUIET_SECONDS = 60
"""A loop ends after this time without an action.

Also the minimum interval between equal events of a budget.
"""

_DIGITS = 9


class RowEvents:
    """Compares a table's rows with the previous look and sends events about changes.

    `emit` takes the kind (`events.TYPES`), the policy and the data of an event.
    """

    def __init__(
        self,
        emit: Callable[[str, str, Mapping[str, object]], None],
        shows_callers: Callable[[], bool],
    ) -> None:
        self._emit = emit
        self._shows_callers = shows_callers
        self._told: dict[Any, Any] = {}  # by name
        self._seen: dict[Any, Any] = {}


class LoopEvents(RowEvents):
    """Sends events about loops that begin, escalate or end."""

    def look(self, loops: Sequence[Loop], now: float) -> None:
        """Send events about changes since the last look; `now` is in seconds since 1970."""
        going_on = {loop.name: loop for loop in loops if now - loop.last < QUIET_SECONDS}
        for name, (loop, strictest) in list(self._told.items()):
            if name not in going_on:
                del self._told[name]
                self._emit("loop_ended", loop.policy, self._describe(loop))
            elif _rank(going_on[name]) > strictest:
                self._emit("loop_escalated", loop.policy, self._describe(going_on[name]))
        for name in going_on.keys() - self._told.keys():
            self._emit("loop_began", going_on[name].policy, self._describe(going_on[name]))
        self._told = {name: (loop, _rank(loop)) for name, loop in going_on.items()}

    def _describe(self, loop: Loop) -> dict[str, object]:
        return {
            "gen_ai.agent.id": loop.agent or None,
            "loopguard.caller": loop.tenant,
            "gen_ai.conversation.id": loop.session or None,
            "gen_ai.tool.name": ", ".join(loop.tools) or None,
            "gen_ai.request.model": loop.model or None,
            "policy": loop.policy,
            "detector": loop.detector,
            "mode": loop.mode,
            "caller": dict(loop.caller) if self._shows_callers() else None,
            "alias": loop.alias or None,
            "labels": dict(loop.labels) or None,
            "fingerprint": loop.fingerprint,
            "method": loop.method,
            "path": loop.path,
            "route": loop.route or None,
            "count": loop.count,
            "strength": loop.strength or None,
            "requests": dict(loop.requests),
            "first_seen": loop.first,
            "last_seen": loop.last,
        }


def _rank(loop: Loop) -> int:
    return max(SEVERITY[Action(action)] for action in loop.requests)


class IncidentEvents(RowEvents):
    """Sends events about incidents."""

    def look(self, incidents: Sequence[IncidentRow]) -> None:
        """Send one event for each incident."""
        for row in incidents:
            if self._told.get(row.name) != row.began:
                self._emit("tool_failing", row.policy, self._describe(row))
        self._told = {row.name: row.began for row in incidents}

    def _describe(self, row: IncidentRow) -> dict[str, object]:
        return {
            "gen_ai.tool.name": row.tool,
            "policy": row.policy,
            "callers": row.count_callers(),
            "sessions": row.count_sessions(),
            "requests": row.requests,
            "first_seen": row.began,
            "last_seen": row.last,
        }


class SessionEvents(RowEvents):
    """Sends events about sessions that reach a limit or are killed."""

    def look(self, runs: Sequence[Run]) -> None:
        """Send events about limits that sessions have reached, and kills, since the last look."""
        told = {}
        for run in runs:
            known_limit, known_killer = self._told.get(run.name, ("", ""))
            killer = name_killer(run.standing.killed, ordered=run.ordered)
            limit = (
                run.refusal.limit if run.refusal is not None and run.refusal.at >= run.began else ""
            )
            if killer and killer != known_killer:
                self._emit("session_killed", run.name.policy, self._describe(run))
            elif limit and limit != known_limit and not killer:
                kind = "agents_limited" if limit in AGENT_LIMITS else "session_limited"
                self._emit(kind, run.name.policy, self._describe(run))
            told[run.name] = limit, killer
        self._told = told

    def _describe(self, run: Run) -> dict[str, object]:
        standing, refusal, grant = run.standing, run.refusal, ""
        # `grant` stays empty unless the limit is a tool's own or about agents
        if refusal is not None:
            about = refusal.limit, refusal.tool, refusal.used, refusal.allowed
            grant = write_grant(run.name.session, run.name.tenant, *about)
        return {
            "loopguard.caller": run.name.tenant,
            "gen_ai.conversation.id": run.name.session,
            "gen_ai.agent.id": (refusal.agent or None) if refusal is not None else None,
            "gen_ai.tool.name": (refusal.tool or None) if refusal is not None else None,
            "policy": run.name.policy,
            "mode": run.name.mode,
            "caller": dict(run.caller) if self._shows_callers() else None,
            "alias": run.known.alias or None,
            "labels": dict(run.known.labels) or None,
            "killed": name_killer(standing.killed, ordered=run.ordered) or None,
            "limit": refusal.limit if refusal is not None else None,
            "used": convert_amount(refusal.limit, refusal.used) if refusal is not None else None,
            "allowed": convert_amount(refusal.limit, refusal.allowed)
            if refusal is not None
            else None,
            "grant": grant or None,
            "total_step_count": standing.steps,
            "total_tool_calls": standing.tool_calls,
            "total_block_count": standing.blocks,
            "agents_started": run.tree.agents if run.tree is not None else None,
            "agent_requests_refused": run.tree.refused if run.tree is not None else None,
            "actual_cost": convert_dollars(standing.cost),
            "started": run.began,
            "last_seen": run.last,
        }


class BudgetEvents(RowEvents):
    """Sends events about stages, refusals and open breakers, once per caller, rule and minute."""

    def look(self, rows: Sequence[BudgetRow], now: float) -> None:
        """Send events about changes since the last look; `now` is in seconds since 1970."""
        seen = {row.name: (row.refused_at, row.staged_at, row.is_open) for row in rows}
        for row in rows:
            refused_at, staged_at, was_open = self._seen.get(row.name, (0.0, 0.0, False))
            if row.is_open:
                if not was_open:
                    self._emit("breaker_opened", row.policy, self._describe(row))
            elif row.refused_at > refused_at:
                self._tell("budget_refused", row, now)
            if row.staged_at > staged_at:
                self._tell("budget_reached", row, now)
        self._seen = seen
        self._told = {name: at for name, at in self._told.items() if now - at < QUIET_SECONDS}

    def _tell(self, kind: str, row: BudgetRow, now: float) -> None:
        stage = row.stage if kind == "budget_reached" else ""
        about = (*row.name[:4], kind, stage)
        if now - self._told.get(about, -QUIET_SECONDS) >= QUIET_SECONDS:
            self._told[about] = now
            self._emit(kind, row.policy, self._describe(row))

    def _describe(self, row: BudgetRow) -> dict[str, object]:
        whole, left = row.limit / row.units, row.find_left(row.told) / row.units
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
            "command": row.write_command(row.told),
            "first_seen": row.first,
            "last_seen": row.last,
        }
