"""`/canary`: the report about canaries, as JSON for programs, and as a page for browsers."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from http import HTTPStatus
from time import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from extproc.operator.admin.html import prefers_html, send_html
from extproc.operator.admin.pages import Page, send_page
from extproc.operator.admin.reports import write_time
from extproc.operator.canary.verdict import SAFE

Files = Mapping[str, str]
"""The file of each policy that has one, by the policy's id."""


def route_canary(describe: Callable[[], list[dict[str, Any]]], list_files: Callable[[], Files]) -> Route:
    """The route; `describe` makes the report about each canary."""

    def send(request: Request) -> Response:
        canaries = describe()
        if not prefers_html(request):
            return send_page(Page(HTTPStatus.OK, {"canaries": canaries}))
        files = list_files()
        rows = [{**canary, "commands": suggest_for_canary(canary, files.get(canary["policy"], ""))} for canary in canaries]
        return send_html("canary.html", write_time(time()), canaries=rows)

    return Route("/canary", send)


def suggest_for_canary(canary: Mapping[str, Any], file: str) -> dict[str, str]:
    """The next steps with a canary, by purpose: a policy is promoted by editing its file, where it is safe."""
    policy = shlex.quote(canary["policy"])
    found = {"judge": f"loopguard canary status --policy {policy}", "review": f"loopguard canary review --policy {policy}"}
    if canary["verdict"] == SAFE and file:
        found["promote"] = f"loopguard promote {shlex.quote(file)} --policy {policy} --percent 25 --write"
    return found
