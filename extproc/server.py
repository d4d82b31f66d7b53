"""Assemble the server, listen, and drain."""
# interpreted: starts and stops the process

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from http import HTTPStatus
from pkgutil import resolve_name
from typing import Any, Protocol

from extproc.build import BUILD, describe_build
from extproc.engine.engine import Engine
from extproc.errors import StoreError
from extproc.ext_proc.service import Service
from extproc.logs import make_extra
from extproc.memory import read_memory
from extproc.metrics import Metrics
from extproc.operator.admin.budget_report import BudgetPages
from extproc.operator.admin.canary_page import CanaryPages
from extproc.operator.admin.coverage_report import WATCHING, CoveragePages, ServerState
from extproc.operator.admin.credentials import Credentials
from extproc.operator.admin.local_token import write_token
from extproc.operator.admin.loop_page import route_page as route_loop_page
from extproc.operator.admin.loop_report import LoopPages
from extproc.operator.admin.order_page import OrderPages
from extproc.operator.admin.overrides import route_overrides
from extproc.operator.admin.pages import Page, make_app, route_page, route_probes
from extproc.operator.admin.reports import list_names
from extproc.operator.admin.server import AdminServer
from extproc.operator.admin.session_report import SessionPages
from extproc.operator.admin.sign_in import SignIn
from extproc.operator.board import Board, View
from extproc.operator.budget_rows import BudgetDocument, BudgetRow
from extproc.operator.canary.sharing import Sharing
from extproc.operator.coverage_rows import CoverageDocument
from extproc.operator.events import open_events
from extproc.operator.loop_rows import IncidentDocument, Loop, LoopDocument
from extproc.operator.overrides import OverrideService, Seen, describe_override
from extproc.operator.row_events import BudgetEvents, IncidentEvents, LoopEvents, SessionEvents
from extproc.operator.session_rows import SessionDocument, SessionRow
from extproc.policy.loader import Unenforced
from extproc.reload import RefusedReload, Reloader
from extproc.request.hash_key import read_hash_key
from extproc.sessions.rates import Prices
from extproc.settings import Address, Settings
from extproc.store import open_store, redact_url
from extproc.store.care import StoreCare
from extproc.store.key_sharing import KeySharing
from extproc.store.memory import MemoryStore
from extproc.store.replicas import ReplicaWatch
from extproc.store.rules.documents import make_replica_name
from extproc.transport.health import Health
from extproc.transport.tls import Certificates, open_certificates

_LOG = logging.getLogger("loopguard")

_STALLED_SECONDS = 10
"""If the event loop stalls for this long, /healthz fails and the process is restarted."""

_YOUNG_OBJECTS = 10_000
"""New objects between garbage collections (default: 700): open requests are not garbage yet."""

SWITCH_SECONDS = 0.0002
"""How long a thread keeps the interpreter lock while another waits for it (default: 5 ms). Threads
load policies and make admin pages, and the event loop waits for them. On a busy machine, half of
these waits take 10 ms or more; with this value, 1.5 to 3 ms. Lower values gain nothing. The threads
need no more CPU time.
"""

_LOOK_SECONDS = 1.0

_ENTRIES_ARRIVE = b"1"
"""Tells other replicas that access log entries arrive."""

_LAST_WORDS_SECONDS = 1.0
"""Time for requests that are let through at the end of the drain to send their answer."""

_TRANSPORTS = {
    "fast": "extproc.transport.fast:FastServer",
    "grpcio": "extproc.transport.grpcio:GrpcServer",
}


class Transport(Protocol):
    """Serves gRPC on one address."""

    async def start(self, address: Address, certificates: Certificates | None = None) -> str:
        """Listen, with mutual TLS if there are certificates; returns the real address.

        Raises LoopguardError if that fails.
        """

    async def stop(self, grace: float) -> None:
        """Refuse new calls, give those in flight `grace` seconds to finish, then end them."""


class Server:
    """One running Loopguard.

    Attributes:
        app: the pages of the admin port, as an ASGI application.
    """

    def __init__(self, settings: Settings) -> None:
        """Load the policies and open the store, without listening; raises LoopguardError."""
        self._settings = settings
        self._metrics = metrics = Metrics()
        self._certificates = open_certificates(settings, metrics)
        self._store = store = open_store(settings.store, metrics, settings)
        key = read_hash_key(settings.hash_key_file)
        shares = not (settings.hash_key_file or isinstance(store, MemoryStore))
        self._key_sharing = KeySharing(key, store) if shares else None
        self._store_care = StoreCare(store, metrics)
        self._reloader = Reloader(settings, metrics)
        # Counts while a shared store is down; a memory store needs no other.
        local = store if isinstance(store, MemoryStore) else MemoryStore(metrics)
        self.service = Service(self._reloader.engine, store, local, metrics, settings, key)
        metrics.list_unenforced = lambda: [
            (part.policy, part.part) for part in self._list_unenforced()
        ]
        self._overrides = OverrideService(store, self.service, metrics)
        self._health = Health()
        # Import only the chosen one.
        transport: Callable[[Service, Health], Transport] = resolve_name(
            _TRANSPORTS[settings.transport]
        )
        self._grpc = transport(self.service, self._health)
        replica = make_replica_name()
        self._sharing = Sharing(self.service.pairs, store, replica)
        self._events = open_events(settings, f"loopguard/{replica}", metrics)
        reporter = self.service.reporter
        loops = Board("looping", LoopDocument, reporter.loops, store, self._shows_callers, replica)
        sessions = Board(
            "sessions", SessionDocument, reporter.sessions, store, self._shows_callers, replica
        )
        incidents = Board(
            "incidents", IncidentDocument, reporter.incidents, store, self._shows_callers, replica
        )
        coverage = Board(
            "coverage", CoverageDocument, reporter.coverage, store, self._shows_callers, replica
        )
        budgets = Board(
            "budgets", BudgetDocument, reporter.budgets, store, self._shows_callers, replica
        )
        self._replicas = ReplicaWatch(store, replica, self._needs_replicas, self._note_replicas)
        self._replicas.news, self._replicas.hear = self._tell_entries, self._hear_of_entries
        self._boards: list[Board[Any]] = [loops, sessions, incidents, coverage, budgets]
        self._overrides.list_seen = lambda: find_seen(loops.view(), sessions.view(), budgets.view())
        self._overrides.list_budgets = lambda: budgets.view().document.rows
        loop_pages = LoopPages(
            loops, Prices(settings.price or None), self._shows_callers, incidents, sessions
        )
        session_pages = SessionPages(sessions, self._shows_callers)
        budget_pages = BudgetPages(budgets, self._shows_callers)
        budget_pages.has_budgets = self._has_budgets
        loop_pages.list_orders = session_pages.list_orders = budget_pages.list_orders = (
            self._overrides.list_standing
        )
        coverage_pages = CoveragePages(
            coverage, self._read_coverage_state, self._reloader.locate_policies
        )
        loop_pages.summarize = session_pages.summarize = coverage_pages.summarize
        self._credentials = Credentials(settings.admin_token_file, settings.admin_socket)
        canary_pages = CanaryPages(self._sharing, lambda: self._loop)
        order_pages = OrderPages(
            self._overrides,
            SignIn(self._credentials, key),
            (loop_pages, session_pages, budget_pages),
            lambda: self._loop,
        )
        routes = [
            route_page("/healthz", self._healthz),
            route_page("/readyz", self._readyz),
            route_page("/policies", self._policies),
            route_probes(reporter.probes),
            route_loop_page(loop_pages, session_pages, budget_pages),
            *loop_pages.list_routes(),
            *session_pages.list_routes(),
            *budget_pages.list_routes(),
            *coverage_pages.list_routes(),
            *canary_pages.list_routes(),
            *route_overrides(self._overrides, self._credentials, lambda: self._loop),
            *order_pages.list_routes(),
        ]
        self.app = make_app(metrics, routes, self._credentials)
        self._admin = AdminServer(self.app)
        self._stop = asyncio.Event()
        self._skip_delay = asyncio.Event()
        self._skip_grace = asyncio.Event()
        self._beat = time.monotonic()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain; raises LoopguardError if it cannot listen."""
        sys.setswitchinterval(SWITCH_SECONDS)
        self._loop = loop = asyncio.get_running_loop()
        await self._store.start()
        with suppress(StoreError):  # `follow` tries again
            await self._overrides.refresh()
        if self._key_sharing is not None:
            await self._key_sharing.refresh()
        await self._store_care.look()
        admin = self._admin.start(self._settings.admin, self._settings.admin_socket)
        if self._settings.admin.is_local:
            self._credentials.local_address = admin
        listening = await self._grpc.start(self._settings.listen, self._certificates)
        token_file = self._settings.admin_token_file or self._share_token(admin)
        self._guard_the_port()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        loop.add_signal_handler(signal.SIGUSR1, self._on_show_callers)
        work = (
            self._reloader.watch(self._swap),
            self._heartbeat(),
            self._sharing.run(),
            *(board.share() for board in self._boards),
            self._overrides.follow(),
            self._replicas.run(),
            self._store_care.run(),
            self._watch_for_events(),
            *([self._key_sharing.run()] if self._key_sharing is not None else []),
        )
        tasks = [asyncio.create_task(each) for each in work]
        self._health.set(serving=True)
        freeze_objects()
        plans = self.service.engine.plans
        _LOG.info(
            "serving",
            extra=make_extra(
                listen=listening,
                admin=admin,
                admin_token_file=token_file,
                policies=len(plans),
                store=redact_url(self._settings.store),
                hash_key=self._name_key_source(),
                build=describe_build(),
                memory=read_memory().describe(),
            ),
        )
        if self._settings.watches:
            _LOG.warning(WATCHING)
        try:
            await self._stop.wait()
            await self._drain()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._sharing.publish()
            for board in self._boards:
                await board.publish()
            await self._replicas.leave()
            await self._store.close()
            self._credentials.end_sharing()  # while the port is still this server's
            self._admin.stop()
            if self._events is not None:
                await asyncio.to_thread(self._events.close)
            if self._certificates is not None:
                self._certificates.stop()
        _LOG.info("stopped")

    def _share_token(self, admin: str) -> str | None:
        """Write a token for this user's commands, if only local clients can connect."""
        if not self._settings.admin.is_local:
            return None
        try:
            path = write_token(int(admin.rpartition(":")[2]))
        except OSError as error:
            _LOG.warning(
                "no orders over this admin port without --admin-token-file",
                extra=make_extra(error=str(error)),
            )
            return None
        self._credentials.share(path)
        return str(path)

    def _name_key_source(self) -> str:
        if self._settings.hash_key_file:
            return "file"
        return (
            "store" if self._key_sharing is not None and self._key_sharing.is_shared else "process"
        )

    def _guard_the_port(self) -> None:
        """Watch the certificates, or warn if there are none and other machines can connect."""
        listen = self._settings.listen
        if self._certificates is not None:
            self._certificates.watch()
        elif not (listen.is_local or self._settings.allow_plaintext):
            _LOG.warning(
                "anyone who can reach this port can submit requests under any caller's identity: "
                "set --tls-cert, --tls-key and"
                " --tls-client-ca, listen on a Unix socket, or set --allow-plaintext if a mesh or "
                "network policy limits access",
                extra=make_extra(listen=listen.text),
            )

    def _on_stop(self, number: int) -> None:
        """First signal: drain; Ctrl-C skips the delay. A second signal skips all waiting."""
        if self._stop.is_set() or number == signal.SIGINT:
            self._skip_delay.set()
        if self._stop.is_set():
            self._skip_grace.set()
        self._stop.set()

    def _on_hangup(self) -> None:
        _LOG.info("SIGHUP: reloading policies")
        self._reloading = asyncio.create_task(self._reloader.reload(self._swap, force=True))

    def _on_show_callers(self) -> None:
        reporter = self.service.reporter
        reporter.show_callers = not reporter.show_callers
        _LOG.warning(
            "SIGUSR1: callers are "
            f"{'shown by their values' if reporter.show_callers else 'shown by a hash'}"
        )

    def _shows_callers(self) -> bool:
        return self.service.reporter.show_callers

    def _swap(self, engine: Engine) -> None:
        if self._events is not None:
            watched = {plan.id for plan in self.service.engine.plans if plan.shadow}
            for plan in engine.plans:
                if plan.id in watched and not plan.shadow:
                    self._events.emit(
                        "policy_promoted", plan.id, {"policy": plan.id, "mode": plan.mode}
                    )
        self.service.follow(engine)

    async def _watch_for_events(self) -> None:
        """Send events: about loops and the store within a second, about orders at once."""
        if self._events is None:
            return
        emit = self._events.emit
        self._overrides.emit = lambda kind, override: emit(
            kind, override.name, describe_override(override)
        )
        self._store_care.emit = lambda told: emit(
            "store_emptied", redact_url(self._settings.store), told
        )
        loops, sessions = (
            LoopEvents(emit, self._shows_callers),
            SessionEvents(emit, self._shows_callers),
        )
        incidents, budgets = (
            IncidentEvents(emit, self._shows_callers),
            BudgetEvents(emit, self._shows_callers),
        )
        health = "ok"
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            loops.look(self.service.reporter.loops.list_loops(), time.time())
            sessions.look(self.service.reporter.sessions.copy())
            incidents.look(self.service.reporter.incidents.list_incidents())
            budgets.look(self.service.reporter.budgets.copy(), time.time())
            now = self._store.health()
            if (now == "ok") != (health == "ok"):
                emit(
                    "store_back" if now == "ok" else "store_lost",
                    redact_url(self._settings.store),
                    {"health": now},
                )
            health = now

    async def _drain(self) -> None:
        """Fail health checks while still serving, let open streams finish, then end the rest."""
        self._health.set(serving=False)
        _LOG.info("draining", extra=make_extra(streams=self.service.streams))
        await _wait(self._skip_delay, self._settings.drain_delay)
        stopping = asyncio.create_task(
            self._grpc.stop(self._settings.drain_timeout + _LAST_WORDS_SECONDS)
        )
        grace = asyncio.create_task(_wait(self._skip_grace, self._settings.drain_timeout))
        await asyncio.wait({stopping, grace}, return_when=asyncio.FIRST_COMPLETED)
        # Let held requests and unfinished uploads through instead of cutting them off
        self.service.release()
        await stopping
        grace.cancel()

    async def _heartbeat(self) -> None:
        while True:
            self._beat = time.monotonic()
            self.service.reporter.coverage.roll(time.time())
            await asyncio.sleep(1)

    def _healthz(self) -> Page:
        silent = time.monotonic() - self._beat
        if silent > _STALLED_SECONDS:
            return Page(
                HTTPStatus.SERVICE_UNAVAILABLE, {"status": "stalled", "seconds": round(silent)}
            )
        return Page(HTTPStatus.OK, {"status": "ok"})

    def _readyz(self) -> Page:
        status = (
            "draining" if self._stop.is_set() else "ready" if self._health.serving else "starting"
        )
        code = HTTPStatus.OK if status == "ready" else HTTPStatus.SERVICE_UNAVAILABLE
        unenforced = len(self._list_unenforced())
        missing: dict[str, Any] = {"unenforced": unenforced} if unenforced else {}
        if refused := [file for file in self._reloader.refusals if file]:
            missing["refused"] = refused
        return Page(
            code,
            {
                "status": status,
                "build": BUILD,
                "store": self._store.health(),
                **missing,
                **self._tell_watching(),
            },
        )

    def _tell_watching(self) -> dict[str, str]:
        return {"watching": WATCHING} if self._settings.watches else {}

    def _policies(self) -> Page:
        sources = [
            {
                "file": source.file,
                "sha256": source.sha256,
                "bundle_version": _drop_zero_fraction(source.bundle_version),
                "expires_at": source.expires_at.isoformat() if source.expires_at else None,
                "policies": policies,
            }
            for source, policies in self._reloader.list_policies()
        ]
        modes = {plan.id: plan.mode for plan in self.service.engine.plans}
        refusal = self._reloader.refusal
        refused = refusal and {**_describe_refusal(refusal), "files": self._list_refused()}
        unenforced = [asdict(part) for part in self._list_unenforced()]
        found = {"modes": modes, "refused": refused, "unenforced": unenforced, "files": sources}
        found["overlaps"] = [overlap._asdict() for overlap in self._reloader.overlaps]
        return Page(HTTPStatus.OK, {**found, **self._tell_watching()})

    def _list_refused(self) -> list[dict[str, Any]]:
        refusals = self._reloader.refusals.items()
        return [
            {"file": file, "in_force": self._reloader.keeps(file), **_describe_refusal(refusal)}
            for file, refusal in refusals
            if file
        ]

    def _list_unenforced(self) -> list[Unenforced]:
        """Parts that --allow-unenforced ignores, also of policies handed over by routes."""
        return [*self._reloader.unenforced, *self.service.handed_over.list_unenforced()]

    def _read_coverage_state(self) -> ServerState:
        plans, refusal, care = self.service.engine.plans, self._reloader.refusal, self._store_care
        limits_sessions = any(plan.limiter is not None for plan in plans)
        return ServerState(
            store="memory" if isinstance(self._store, MemoryStore) else "shared",
            health=self._store.health(),
            watching=self._settings.watches,
            limits_sessions=limits_sessions,
            acting=sum(not plan.shadow for plan in plans),
            refused=refusal.errors if refusal is not None else [],
            unenforced=len(self._list_unenforced()),
            ramps=[
                (
                    plan.id,
                    plan.ramp.percent,
                    len(plan.ramp.inside),
                    len(plan.ramp.inside) + len(plan.ramp.outside),
                )
                for plan in [*plans, *self.service.handed_over.list_plans()]
                if plan.ramp is not None
            ],
            persistence=care.persistence,
            must_keep=limits_sessions
            or self._has_budgets()
            or bool(self._overrides.list_standing()),
            emptied=care.emptied,
            kept_since=care.since,
        )

    def _has_budgets(self) -> bool:
        plans = [*self.service.engine.plans, *self.service.handed_over.list_plans()]
        return any(plan.budget is not None for plan in plans)

    def _needs_replicas(self) -> bool:
        if isinstance(self._store, MemoryStore):
            return False
        plans = [*self.service.engine.plans, *self.service.handed_over.list_plans()]
        return any(plan.budget is not None or plan.spans for plan in plans)

    def _tell_entries(self) -> bytes:
        return _ENTRIES_ARRIVE if self.service.entries.is_fresh(time.monotonic()) else b""

    def _hear_of_entries(self, told: list[bytes]) -> None:
        if _ENTRIES_ARRIVE in told:
            self.service.note_entry(own=False)

    def _note_replicas(self, number: int) -> None:
        self.service.counting.replicas = number
        self._metrics.replicas.set(number)


def find_seen(
    loops: View[LoopDocument], sessions: View[SessionDocument], budgets: View[BudgetDocument]
) -> Seen:
    """The hashes that all replicas have reported."""
    in_sessions: list[Loop | SessionRow] = [*loops.document.loops, *sessions.document.rows]
    rows: list[Loop | SessionRow | BudgetRow] = [
        *in_sessions,
        *[row for row in budgets.document.rows if row.orderable],
    ]
    callers = {(name, row.tenant) for row in rows for name in list_names(row)}
    named = [(row.policy, name) for row in rows for name in list_names(row)]
    in_sessions_named = [(row.policy, row.session) for row in in_sessions]
    looping = [(loop.policy, loop.fingerprint) for loop in loops.document.loops]
    policies: dict[str, set[str]] = {}
    for policy, name in [*named, *in_sessions_named, *looping]:
        policies.setdefault(name, set()).add(policy)
    in_use, fingerprints = ({name for _, name in pairs} for pairs in (in_sessions_named, looping))
    return Seen(Counter(name for name, _ in callers), in_use, fingerprints, policies)


def _describe_refusal(refusal: RefusedReload) -> dict[str, Any]:
    return {"at": refusal.at.isoformat(), "errors": refusal.errors, "count": refusal.count}


def _drop_zero_fraction(number: float | None) -> float | None:
    return int(number) if number is not None and number.is_integer() else number


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def freeze_objects() -> None:
    """Exempt existing, permanent objects from garbage collection, and collect less often."""
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 10, 10)
