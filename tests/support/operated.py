"""Replicas with budgets, and what operators see of them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from extproc.engine.orders import ActiveOverride
from extproc.ext_proc.service import Service
from extproc.metrics import Metrics
from extproc.operator.admin.budget_report import report_budgets
from extproc.operator.admin.reports import Selection
from extproc.operator.board import View, unpack_all
from extproc.operator.budget_rows import BudgetDocument
from extproc.operator.overrides import OverrideService
from extproc.operator.standing_orders import NO_ORDERS, OrderIndex
from extproc.store.memory import MemoryStore
from tests.support.budget_policies import REJECT, rule
from tests.support.service import make_service

DAY = {"period": "1d", "staged_actions": [{"threshold_percent": 50, "action": "warn"}, *REJECT]}


def daily(budget: float = 10, name: str = "daily", **more: Any) -> dict[str, Any]:  # noqa: ANN401  # further keys
    """A rule for a day's requests."""
    return rule("cost_based", name, **{"budget": budget, **DAY, **more})


class Operated:
    """Replicas on one store, with the same clock as people, and what operators see of them."""

    def __init__(self, *policies: dict[str, Any], replicas: int = 1) -> None:
        self.store = MemoryStore(Metrics())
        self.services = [make_service(*policies, store=self.store) for _ in range(replicas)]
        self.givers = [OverrideService(self.store, service, service.metrics) for service in self.services]
        for giver in self.givers:
            giver.list_budgets = lambda: self.view(shows_callers=False).document.rows

    @property
    def service(self) -> Service:
        """The first replica."""
        return self.services[0]

    def view(self, *, shows_callers: bool = True) -> View[BudgetDocument]:
        """What all replicas know together, through their boards."""
        tables = [service.reporter.budgets for service in self.services]
        packed = {str(place): each.make_document(shows_callers=shows_callers).pack() for place, each in enumerate(tables)}
        found = BudgetDocument.merge(unpack_all(packed, BudgetDocument).values(), time.time())
        return View(found, "0", sorted(packed), "")

    def report(self, *orders: ActiveOverride, shown: bool = True, exist: bool = True, **selection: Any) -> dict[str, Any]:  # noqa: ANN401  # fields of a selection
        """The JSON of `/budgets`."""
        index = OrderIndex(orders) if orders else NO_ORDERS
        view = self.view(shows_callers=shown)
        return report_budgets(view, Selection(**selection), shows_callers=shown, now=time.time(), orders=index, exist=exist)

    def give(self, replica: int = 0, **order: Any) -> tuple[ActiveOverride, list[str]]:  # noqa: ANN401  # an order
        """Give a grant."""
        return asyncio.run(self.givers[replica].give({"kind": "grant", **order}, "eve"))
