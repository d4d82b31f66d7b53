"""The reports about canaries, as JSON and HTML."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable
from http import HTTPStatus
from time import time

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from extproc.operator.admin.html import prefers_html, send_html
from extproc.operator.admin.pages import Page, ask, send_page
from extproc.operator.admin.reports import write_time
from extproc.operator.canary.report import describe_canaries
from extproc.operator.canary.sharing import Sharing
from extproc.operator.canary.verdict import Rules


class CanaryPages:
    """`/canary` reports with the default rules; `/canary/states` has the counts of each replica."""

    def __init__(
        self, sharing: Sharing, find_loop: Callable[[], asyncio.AbstractEventLoop]
    ) -> None:
        """`find_loop` returns the event loop that may ask the store."""
        self._sharing = sharing
        self._find_loop = find_loop

    def list_routes(self) -> list[Route]:
        """The routes of both reports."""
        return [Route("/canary", self._show), Route("/canary/states", self._list_states)]

    async def _show(self, request: Request) -> Response:
        replicas = await ask(self._sharing.collect(), self._find_loop())
        canaries = describe_canaries(
            [state for replica in replicas.values() for state in replica], Rules()
        )
        if not prefers_html(request):
            return send_page(Page(HTTPStatus.OK, {"canaries": canaries}))
        for canary in canaries:
            canary["commands"] = {
                "judge": f"loopguard canary status --policy {shlex.quote(canary['policy'])}"
            }
        return send_html(request, "canary.html", write_time(time()), canaries=canaries)

    async def _list_states(self, _: Request) -> Response:
        found = {"replicas": await ask(self._sharing.collect(), self._find_loop())}
        return send_page(Page(HTTPStatus.OK, await run_in_threadpool(msgspec.to_builtins, found)))
