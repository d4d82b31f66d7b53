"""The endpoints of overrides. Reading needs no credential; adding and revoking do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from extproc.errors import BadOrderError
from extproc.operator.admin.credentials import Credentials
from extproc.operator.admin.pages import Page, ask, read_json, route_page, send_page
from extproc.operator.overrides import OverrideService, describe_override


def route_overrides(
    service: OverrideService,
    credentials: Credentials,
    find_loop: Callable[[], asyncio.AbstractEventLoop],
) -> list[Route]:
    """`/overrides`.

    GET lists, POST adds, DELETE of one revokes it; `find_loop` returns the service's event loop.
    """

    def list_all() -> Page:
        return Page(
            HTTPStatus.OK,
            {"overrides": [describe_override(override) for override in service.list_standing()]},
        )

    async def give(request: Request) -> Response:
        who = await asyncio.to_thread(credentials.check, request)
        order = await read_json(request)
        try:
            override, notes = await ask(service.give(order, who), find_loop())
        except BadOrderError as error:
            raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None
        return send_page(Page(HTTPStatus.CREATED, {**describe_override(override), "notes": notes}))

    async def revoke(request: Request) -> Response:
        who = await asyncio.to_thread(credentials.check, request)
        name = request.path_params["name"]
        try:
            found = await ask(service.revoke(name, who), find_loop())
        except BadOrderError as error:
            raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None
        if not found:
            return send_page(
                Page(
                    HTTPStatus.NOT_FOUND,
                    {"error": f"there is no override {name}; it may have ended"},
                )
            )
        return send_page(Page(HTTPStatus.OK, {"revoked": name}))

    return [
        route_page("/overrides", list_all),
        Route("/overrides", give, methods=["POST"]),
        Route("/overrides/{name}", revoke, methods=["DELETE"]),
    ]
