"""HTML pages of the admin port.

All values are escaped. The Content-Security-Policy allows only the page's own style and script, and
no external resources.
"""

from __future__ import annotations

import secrets
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import HTMLResponse

from extproc.logs import escape_controls
from extproc.operator.admin.row_states import (
    count,
    read_time,
    write_left,
    write_money,
    write_now,
    write_refusal,
    write_reset,
)

if TYPE_CHECKING:
    from jinja2 import Template

_POLICY = (
    "default-src 'none'; style-src 'nonce-{0}'; script-src 'nonce-{0}'; connect-src 'self'; "
    "form-action 'self';"
    " base-uri 'none'; frame-ancestors 'none'"
)


REFRESH_SECONDS = 3
"""Refresh interval of a page."""

_HTML = "text/html"

_NOTES = {
    "steer": "note to the model",
    "land": "asked for a last answer",
    "throttle": "delayed",
    "warn": "warned",
}
"""Text for an action on a forwarded request."""


def prefers_html(request: Request) -> bool:
    """Whether a client is a browser, for paths with JSON and HTML."""
    return _HTML in request.headers.get("accept", "")


def send_html(
    request: Request,
    template: str,
    at: str,
    status: HTTPStatus = HTTPStatus.OK,
    **values: object,
) -> HTMLResponse:
    """Render a template with these values; `at` is the report's time in the format of RFC 3339."""
    nonce = secrets.token_urlsafe(16)
    common = {"nonce": nonce, "now": read_time(at), "refresh": REFRESH_SECONDS, "notes": _NOTES}
    credentials = request.app.state.credentials
    html = _load(template).render(
        **common, asking=credentials.explain(request), signs_in=credentials.signs_in, **values
    )
    headers = {
        "content-security-policy": _POLICY.format(nonce),
        "cache-control": "no-store",
        "referrer-policy": "same-origin",  # with `no-referrer`, forms have the Origin `null`
        "x-content-type-options": "nosniff",
    }
    return HTMLResponse(html, status, headers)


@cache
def _load(name: str) -> Template:
    # Rarely needed
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context  # noqa: PLC0415

    loader = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["number"] = lambda number: f"{number:,}"
    environment.filters["count"] = count
    environment.filters["money"] = write_money
    environment.filters["refusal"] = write_refusal
    environment.filters["clean"] = escape_controls
    environment.filters["left"] = write_left
    environment.filters["age"] = pass_context(
        lambda context, text: write_age(context["now"] - read_time(text))
    )
    environment.filters["reset"] = pass_context(
        lambda context, row: write_reset(row, context["now"])
    )
    environment.filters["now"] = pass_context(lambda context, row: write_now(row, context["now"]))
    return environment.get_template(name)


def write_age(seconds: float) -> str:
    """Write how long ago something was, in the largest fitting unit."""
    for unit, length in (("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit} ago"
    return f"{max(0, seconds):.0f} s ago"
