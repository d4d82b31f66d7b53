"""`/budgets`: callers' usage of their budgets, as JSON."""

from __future__ import annotations

from collections.abc import Callable
from time import time
from typing import Any

from starlette.requests import Request

from extproc.operator.admin.reports import (
    Selection,
    Sorts,
    TablePages,
    describe_caller,
    describe_view,
    list_names,
    select,
    write_time,
)
from extproc.operator.admin.row_commands import suggest_for_budget
from extproc.operator.admin.row_states import is_healthy
from extproc.operator.budget_rows import BudgetDocument, BudgetRow
from extproc.operator.overrides import describe_override
from extproc.operator.standing_orders import NO_ORDERS, OrderIndex, ShownRow
from extproc.store.rules.budget import FOREVER, PERIOD

SORTS: Sorts = {
    "used": lambda row: (
        row["open"],
        row["used_up"],
        not is_healthy(row),
        row["used_percent"],
        row["refused"],
        row["last_seen"],
    ),
    "refused": lambda row: (row["refused"], row["used_percent"]),
    "last": lambda row: row["last_seen"],
}
"""Sort keys. The tightest, largest or latest comes first."""

_DIGITS = 9
_MS = 1_000

NO_BUDGETS = "no policy has a budget (rules, fallback_limit or circuit_breaker)"
_NO_CALLERS = "no request of a caller with a budget in the last hour"


class BudgetPages(TablePages[BudgetDocument]):
    """The page about budgets.

    Attributes:
        has_budgets: returns whether any active policy has budgets.
    """

    path, sorts = "/budgets", SORTS
    has_budgets: Callable[[], bool] = staticmethod(lambda: True)

    def report(self, request: Request, selection: Selection) -> dict[str, Any]:
        """The JSON of `/budgets`; if it is empty, `note` says why."""
        now, view, exist = time(), self._board.view(), self.has_budgets()
        rows, orders = view.document.rows, self._index_orders(selection)
        shown = self._sees_callers(request)
        found = select(
            (describe_budget(row, now, shows_callers=shown, orders=orders) for row in rows),
            selection,
            SORTS,
        )
        total = {
            "budgets": len(found),
            "callers": len({row["caller"] for row in found}),
            "used_up": sum(row["used_up"] for row in found),
            "open_breakers": sum(row["open"] for row in found),
            "refused": sum(row["refused"] for row in found),
        }
        note = None
        if not found:
            note = (
                f"none of {len(rows)} budgets matches"
                if rows
                else _NO_CALLERS
                if exist
                else NO_BUDGETS
            )
        return {
            **describe_view(view, now),
            "known": len(rows),
            "note": note,
            "exist": exist,
            "total": total,
            "budgets": found[: selection.limit],
        }


def describe_budget(
    row: BudgetRow, now: float, *, shows_callers: bool, orders: OrderIndex = NO_ORDERS
) -> dict[str, Any]:
    """Describe a caller's budget at `now`, in seconds since 1970."""
    left, reset, opened = row.find_left(now), row.find_reset_ms(now), row.find_open_ms(now) != 0
    # A token budget is rarely exactly zero, so it is also used up if the newest request asked for
    # more than is left.
    short = row.refused_at >= row.last and row.asked > left and not row.is_over(now)
    # What orders may name
    named = ShownRow({row.policy}, list_names(row), dict(row.hashes), budgets={row.rule})
    described = {
        **describe_caller(row, shows_callers=shows_callers),
        "policy": row.policy,
        "mode": row.mode,
        "rule": row.rule,
        "budget": row.budget,
        "per": row.words,
        "unit": row.unit or None,
        "limit": _convert(row.limit, row),
        "used": _convert(row.limit - left, row),
        "estimated": _convert(max(0, min(row.estimated, row.limit - left)), row)
        if row.kind == PERIOD
        else None,
        "left": _convert(left, row),
        "used_percent": round(max(0.0, (row.limit - left) * 100 / max(1, row.limit)), 1),
        "open": opened,
        "used_up": not opened and (left <= 0 or short),
        "reset_seconds": None if reset == FOREVER else -(-reset // _MS),
        "stage": (row.stage or None) if not row.is_over(now) else None,
        "requests": row.requests,
        "refused": row.refused,
        "last_refused": write_time(row.refused_at) if row.refused_at else None,
        "first_seen": write_time(row.first),
        "last_seen": write_time(row.last),
        "orders": [describe_override(order) for order in orders.find(named)],
    }
    grant, orderable = row.write_grant(now), row.orderable
    return {
        **described,
        "commands": suggest_for_budget(described, grant=grant, orderable=orderable),
    }


def _convert(amount: int, row: BudgetRow) -> float:
    value = round(amount / row.units, _DIGITS)
    return int(value) if value.is_integer() else value
