"""The admin endpoints as an ASGI application, with responses that explain errors.

Endpoints that are plain functions run in threads and do not block each other. `async` endpoints run
on the admin server's event loop and must not compute for long.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Sequence
from http import HTTPStatus
from ipaddress import IPv6Address, ip_address
from typing import Any, NamedTuple, TypeVar

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from extproc.errors import StoreError
from extproc.metrics import Metrics
from extproc.operator.admin.credentials import Credentials
from extproc.operator.probes import Probes

T = TypeVar("T")

MAX_BODY = 65_536
"""Maximum length of a request body in bytes."""

ANSWER_SECONDS = 5.0
"""Timeout for an answer from the data path's event loop and its store."""

_PROBE = re.compile(r"[0-9a-f]{32}")
_HOST = re.compile(r"(?P<host>\[[^\[\]]*\]|[^:\[\]]*)(:[0-9]*)?")
"""The header `Host` (RFC 9110 section 7.2): IPv6 in brackets, and an optional port."""


class Page(NamedTuple):
    """A response; its body is sent as JSON."""

    status: HTTPStatus
    body: Any


def make_app(
    metrics: Metrics, routes: Sequence[Route], credentials: Credentials | None = None
) -> Starlette:
    """The application with `/metrics` and these routes.

    Pages show how to give orders with `credentials`.
    """
    written = {"content-type": CONTENT_TYPE_LATEST}
    every = [
        Route("/metrics", lambda _: Response(generate_latest(metrics.registry), headers=written)),
        *routes,
    ]
    known = ", ".join(dict.fromkeys(route.path for route in every))

    def miss(_: Request, __: Exception) -> Response:
        return PlainTextResponse(f"not found; available: {known}\n", HTTPStatus.NOT_FOUND)

    app = Starlette(
        routes=every, exception_handlers={404: miss, HTTPException: _refuse, Exception: _fail}
    )
    app.state.credentials = credentials or Credentials("")
    return app


def route_page(path: str, make: Callable[[], Page]) -> Route:
    """The route of a page that does not depend on the request."""
    return Route(path, lambda _: send_page(make()))


def route_probes(probes: Probes) -> Route:
    """The route of `check-envoy --probe`; a probe's first request starts its recording."""

    def follow(request: Request) -> Response:
        probe = request.path_params["probe"]
        if not _PROBE.fullmatch(probe):
            return send_page(
                Page(HTTPStatus.BAD_REQUEST, {"error": "a probe's name is 32 hex digits"})
            )
        return send_page(Page(HTTPStatus.OK, {"requests": probes.follow(probe)}))

    return Route("/probes/{probe}", follow)


def send_page(page: Page) -> Response:
    """Convert a page to a response."""
    return Response(
        json.dumps(page.body, indent=2) + "\n", page.status, media_type="application/json"
    )


async def read_body(request: Request) -> bytes:
    """The body; raises HTTPException (413) if it is too long."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise HTTPException(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body must be at most {MAX_BODY} bytes"
            )
    return body


async def read_json(request: Request) -> Any:  # noqa: ANN401  # as json.loads
    """The JSON body; raises HTTPException if it is too long (413) or not JSON (400)."""
    body = await read_body(request)
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(HTTPStatus.BAD_REQUEST, "the body is not JSON") from None


async def ask(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    """Run `work` on the data path's loop; raises HTTPException if the store fails or is slow."""
    asked = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await asked
    except StoreError as error:
        full = error.kind == "full"
        raise HTTPException(
            HTTPStatus.CONFLICT if full else HTTPStatus.SERVICE_UNAVAILABLE, str(error)
        ) from None
    except TimeoutError:
        raise HTTPException(
            HTTPStatus.SERVICE_UNAVAILABLE, "no answer in time; check whether it took effect"
        ) from None


def is_near(request: Request) -> bool:
    """Whether the client is on this machine, and not a remote page in a local browser.

    After DNS rebinding, a remote page's requests also come from loopback, but with the page's own
    name in `Host`.
    """
    if request.client is None:
        return True
    found = _HOST.fullmatch(request.headers.get("host", ""))
    return (
        _is_loopback(request.client.host)
        and found is not None
        and (not found[0] or _is_loopback(found["host"].strip("[]")))
    )


def _is_loopback(text: str) -> bool:
    try:
        address = ip_address(text)
    except ValueError:
        return text.lower() == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def _refuse(_: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    response = send_page(Page(HTTPStatus(error.status_code), {"error": error.detail}))
    response.headers.update(error.headers or {})
    return response


def _fail(_: Request, error: Exception) -> Response:
    """Respond with the error instead of closing the connection; uvicorn logs the traceback."""
    return send_page(Page(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": str(error)}))
