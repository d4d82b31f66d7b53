"""Orders of operators about callers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from extproc.engine.orders import ActiveOverride, Grant, Overrides, Target, hash_descriptor
from extproc.ext_proc.service import Service
from extproc.metrics import Metrics
from extproc.operator.overrides import OverrideService
from extproc.store.memory import MemoryStore
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.service import make_service

T = TypeVar("T")

USER: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}


ANN = Target(descriptors=(("x-user-id", hash_descriptor("x-user-id", "ann")),))


def order(  # what an order says
    kind: str,
    target: Target = ANN,
    *,
    name: str = "o",
    about: str = "",
    since: float = 0,
    lasts: float = 60,
    reason: str = "",
    who: str = "",
    grant: Grant | None = None,
) -> ActiveOverride:
    """An override that began a moment ago; `since` tells several apart."""
    now = time.time()
    return ActiveOverride(name, kind, target, about, now - 1 + since / 1000, now + lasts, reason, who, grant or Grant())


def apply_orders(service: Service, *standing: ActiveOverride) -> Service:
    """The service with these overrides in force."""
    service.overrides = Overrides(standing) if standing else None
    return service


class Replicas:
    """Some replicas on one store, each with its service for overrides, on one event loop."""

    def __init__(self, number: int, *policies: dict[str, Any]) -> None:
        self.store = MemoryStore(Metrics())
        self.services = [make_service(*(policies or (policy("p", ANY, **USER),)), store=self.store) for _ in range(number)]
        self.givers = [OverrideService(self.store, service, service.metrics) for service in self.services]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something."""
        return asyncio.run(work)

    def give(self, replica: int = 0, *, who: str = "eve", **given: Any) -> tuple[ActiveOverride, list[str]]:  # noqa: ANN401  # an order
        """Give an order to a replica."""
        return self.run(self.givers[replica].give(given, who))

    def refresh(self) -> None:
        """Every replica asks the store once."""
        for giver in self.givers:
            self.run(giver.refresh())
