"""The endpoints of overrides: anyone may read them, and those with a credential may add and revoke them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from extproc.errors import StoreError
from extproc.operator.admin.credentials import Credentials
from extproc.operator.admin.pages import Page, read_json, route_page, send_page
from extproc.operator.overrides import BadOrderError, OverrideService, describe_override

T = TypeVar("T")

_ANSWER_SECONDS = 5.0
"""Time for the data path's event loop, and for its store, to answer, in seconds."""


def route_overrides(
    service: OverrideService, credentials: Credentials, find_loop: Callable[[], asyncio.AbstractEventLoop]
) -> list[Route]:
    """`/overrides`: GET lists, POST adds, DELETE of one revokes it; `find_loop` returns the service's event loop."""

    def list_all() -> Page:
        return Page(HTTPStatus.OK, {"overrides": [describe_override(override) for override in service.list_standing()]})

    async def give(request: Request) -> Response:
        who = await asyncio.to_thread(credentials.check, request)
        order = await read_json(request)
        override, notes = await _ask(service.give(order, who), find_loop())
        return send_page(Page(HTTPStatus.CREATED, {**describe_override(override), "notes": notes}))

    async def revoke(request: Request) -> Response:
        who = await asyncio.to_thread(credentials.check, request)
        name = request.path_params["name"]
        if not await _ask(service.revoke(name, who), find_loop()):
            return send_page(Page(HTTPStatus.NOT_FOUND, {"error": f"there is no override {name}; it may have ended"}))
        return send_page(Page(HTTPStatus.OK, {"revoked": name}))

    return [
        route_page("/overrides", list_all),
        Route("/overrides", give, methods=["POST"]),
        Route("/overrides/{name}", revoke, methods=["DELETE"]),
    ]


async def _ask(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    """The service's answer, from its own event loop; raises HTTPException if it refuses, or takes too long."""
    asked = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            return await asked
    except BadOrderError as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None
    except StoreError as error:
        full = error.kind == "full"
        raise HTTPException(HTTPStatus.CONFLICT if full else HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from None
    except TimeoutError:
        raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "no answer in time; check whether it took effect") from None
