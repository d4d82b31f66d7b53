"""Replicas on one store, with admin ports: what operators see, and their orders."""

import asyncio
import json
import re
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from threading import Thread
from typing import Any, TypeVar

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from extproc.engine.orders import ActiveOverride
from extproc.errors import StoreError
from extproc.ext_proc.service import Service
from extproc.metrics import Metrics
from extproc.operator.admin.budget_report import BudgetPages
from extproc.operator.admin.canary_page import CanaryPages
from extproc.operator.admin.client import AdminClient
from extproc.operator.admin.coverage_report import CoveragePages, ServerState
from extproc.operator.admin.credentials import Credentials
from extproc.operator.admin.loop_page import route_page
from extproc.operator.admin.loop_report import LoopPages
from extproc.operator.admin.order_page import OrderPages
from extproc.operator.admin.overrides import route_overrides
from extproc.operator.admin.pages import make_app
from extproc.operator.admin.server import AdminServer
from extproc.operator.admin.session_report import SessionPages
from extproc.operator.admin.sign_in import SignIn
from extproc.operator.board import Board
from extproc.operator.budget_rows import BudgetDocument, BudgetRow
from extproc.operator.canary.sharing import Sharing
from extproc.operator.coverage_rows import CoverageDocument
from extproc.operator.loop_rows import IncidentDocument, LoopDocument
from extproc.operator.overrides import OverrideService
from extproc.operator.session_rows import SessionDocument
from extproc.operator.session_table import SessionTable
from extproc.server import find_seen
from extproc.sessions.rates import Prices
from extproc.settings import parse_address
from extproc.store.memory import MemoryStore
from extproc.store.rules.documents import ORDERS, make_replica_name
from tests.support.service import CHAT, make_service, send as service_send

T = TypeVar("T")

DOCUMENTS: dict[str, type[Any]] = {
    "loops": LoopDocument,
    "sessions": SessionDocument,
    "incidents": IncidentDocument,
    "coverage": CoverageDocument,
    "budgets": BudgetDocument,
}
# A record
STATE = ServerState(
    "memory", "ok", False, True, 2, ["policies/a.json: /policies/0: unknown key 'thresold'"], 0
)


@cache
def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, daemon=True).start()
    return loop


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, _start_loop()).result(60)


NOTHING, COUNTS, ALL = range(3)


class Ahead:
    """A clock for tables and orders that a test moves forward, in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        for module in ("reporting", "loop_table", "overrides"):
            monkeypatch.setattr(f"extproc.operator.{module}.time", self)

    def __call__(self) -> float:
        return time.time() + self.seconds


class Away:
    """A store that is down: for nothing, for counts, or for all."""

    def __init__(self) -> None:
        self.away = NOTHING
        self._memory = MemoryStore(Metrics())

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # of a store
        if self.away == ALL or (self.away == COUNTS and name == "hit"):
            raise StoreError("away", kind="connection")
        return getattr(self._memory, name)


def send(
    service: Service,
    times: int = 1,
    data: bytes = b"{}",
    path: str = CHAT,
    **named: Any,  # noqa: ANN401  # of `headers`
) -> list[int]:
    """Statuses of equal requests, Ann's unless headers are given."""
    return service_send(service, [data] * times, path=path, **(named or {"x_user_id": "ann"}))


class Operated:
    """Replicas.

    Attributes:
        services: one for each replica.
        orders: shown on the pages in place of the real orders.
        says_coverage: reports begin with the share of guarded requests.
        tokens: path of the token file; empty for none.
    """

    def __init__(
        self,
        *policies: dict[str, Any],
        replicas: int = 1,
        services: Sequence[Service] = (),
        store: Any = None,  # noqa: ANN401  # any store
        orders: Sequence[ActiveOverride] | None = None,
        price: float | None = None,
        **settings: Any,  # noqa: ANN401  # of the process
    ) -> None:
        self.store = store or MemoryStore(Metrics())
        self.services = list(services) or [
            make_service(*policies, store=self.store, **settings) for _ in range(replicas)
        ]
        self.givers = [
            OverrideService(self.store, service, service.metrics) for service in self.services
        ]
        for place, giver in enumerate(self.givers):
            giver.list_seen = partial(self._find_hashes, place)
            giver.list_budgets = partial(self._list_budgets, place)
        self.orders = orders
        self.says_coverage = True
        self.tokens = ""
        self._names = [make_replica_name() for _ in self.services]
        self._price = price

    @property
    def service(self) -> Service:
        return self.services[0]

    def ask(
        self,
        path: str,
        replica: int = 0,
        *,
        host: str = "localhost",
        **query: Any,  # noqa: ANN401  # of a URL
    ) -> dict[str, Any]:
        found: dict[str, Any] = (
            self._open(replica).get(path, params=query, headers={"host": host}).json()
        )
        return found

    def read(self, path: str = "/", replica: int = 0, **query: str) -> str:
        return re.sub(
            r"\s+",
            " ",
            self._open(replica).get(path, params=query, headers={"accept": "text/html"}).text,
        )

    def give(
        self,
        replica: int = 0,
        *,
        who: str = "eve",
        **order: Any,  # noqa: ANN401  # as JSON
    ) -> tuple[dict[str, Any], list[str]]:
        status, given = self.post(order, replica, who=who)
        assert status == 201, given
        return given, given.pop("notes")

    def post(
        self, order: object, replica: int = 0, *, who: str = "eve"
    ) -> tuple[int, dict[str, Any]]:
        sent = {"x-loopguard-operator": who, "content-type": "application/json"}
        answer = self._open(replica).post("/overrides", content=json.dumps(order), headers=sent)
        return answer.status_code, answer.json()

    def revoke(
        self, name: str, replica: int = 0, *, who: str = "adam"
    ) -> tuple[int, dict[str, Any]]:
        answer = self._open(replica).delete(
            f"/overrides/{name}", headers={"x-loopguard-operator": who}
        )
        return answer.status_code, answer.json()

    def list_orders(self, replica: int = 0) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = self.ask("/overrides", replica)["overrides"]
        return listed

    def refresh(self) -> None:
        for giver in self.givers:
            run(giver.refresh())

    def put_order(self, name: str, document: bytes) -> None:
        """Write an order to the store, as another version might."""
        run(self.store.documents.put(ORDERS, "overrides", name, document, 60))
        self.refresh()

    def read_orders(self) -> bytes:
        found = run(self.store.documents.read(ORDERS, "overrides"))
        return b"".join(found.documents.values()) if found is not None else b""

    @contextmanager
    def listen(self, replica: int = 0) -> Iterator[str]:
        server = AdminServer(self._make_app(replica))
        try:
            yield server.start(parse_address("127.0.0.1:0"))
        finally:
            server.stop()

    @contextmanager
    def connect(self) -> Iterator[AdminClient]:
        with self.listen() as address:
            client = AdminClient(address)
            try:
                yield client
            finally:
                client.close()

    def _open(self, replica: int) -> TestClient:
        app = self._make_app(replica)

        async def at_socket(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401  # of ASGI
            await app(
                {**scope, "client": ("127.0.0.1", 9), "server": ("/run/admin.sock", None)},
                receive,
                send,
            )

        return TestClient(at_socket, "http://localhost")

    def _open_boards(self, replica: int) -> dict[str, Board[Any]]:
        def open_all(place: int) -> dict[str, Board[Any]]:
            reporter = self.services[place].reporter
            return {
                name: Board(
                    name,
                    kind,
                    getattr(reporter, name),
                    self.store,
                    lambda: reporter.show_callers,
                    self._names[place],
                )
                for name, kind in DOCUMENTS.items()
            }

        async def begin(board: Board[Any]) -> None:
            sharing = asyncio.create_task(board.share())
            await asyncio.sleep(0)
            sharing.cancel()
            with suppress(asyncio.CancelledError):
                await sharing

        own = open_all(replica)
        if len(self.services) > 1:
            for place in range(len(self.services)):
                for board in open_all(place).values() if place != replica else ():
                    run(board.publish())
            for board in own.values():
                run(begin(board))
        return own

    def _find_hashes(self, replica: int) -> Any:  # noqa: ANN401  # of orders
        boards = self._open_boards(replica)
        return find_seen(
            boards["loops"].view(), boards["sessions"].view(), boards["budgets"].view()
        )

    def _list_budgets(self, replica: int) -> list[BudgetRow]:
        found: BudgetDocument = self._open_boards(replica)["budgets"].view().document
        return found.rows

    def _make_app(self, replica: int) -> Starlette:
        service, boards, giver = (
            self.services[replica],
            self._open_boards(replica),
            self.givers[replica],
        )

        def shows() -> bool:
            return service.reporter.show_callers

        loops = LoopPages(
            boards["loops"], Prices(self._price), shows, boards["incidents"], boards["sessions"]
        )
        sessions, budgets = (
            SessionPages(boards["sessions"], shows),
            BudgetPages(boards["budgets"], shows),
        )
        budgets.has_budgets = lambda: any(plan.budget is not None for plan in service.engine.plans)
        coverage = CoveragePages(boards["coverage"], lambda: STATE, dict)
        standing = giver.list_standing if self.orders is None else lambda: self.orders or ()
        loops.list_orders = sessions.list_orders = budgets.list_orders = standing
        if self.says_coverage:
            loops.summarize = sessions.summarize = coverage.summarize
        canaries = CanaryPages(
            Sharing(service.pairs, self.store, self._names[replica]), _start_loop
        )
        credentials = Credentials(self.tokens)
        ordering = OrderPages(
            giver, SignIn(credentials, service.key), (loops, sessions, budgets), _start_loop
        )
        routes = [
            route_page(loops, sessions, budgets),
            *loops.list_routes(),
            *sessions.list_routes(),
            *budgets.list_routes(),
            *coverage.list_routes(),
            *canaries.list_routes(),
            *route_overrides(giver, credentials, _start_loop),
            *ordering.list_routes(),
        ]
        return make_app(service.metrics, routes, credentials)


def operate(
    table: SessionTable, *, shows: bool = False, orders: Sequence[ActiveOverride] = ()
) -> Operated:
    made = Operated(orders=orders, show_callers=shows)
    made.service.reporter.sessions = table
    made.says_coverage = False  # no request was sent
    return made
