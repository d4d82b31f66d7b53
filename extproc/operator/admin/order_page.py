"""Orders from browsers: a sign-in, a page that asks for confirmation, and the result.

The buttons of rows lead here with the command that the row shows. Nothing needs a script, and each
form is answered with a redirect, so that reloading a page repeats no order.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from time import time
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from extproc.detectors.base import format_duration
from extproc.engine.orders import GRANT, ActiveOverride
from extproc.errors import BadOrderError
from extproc.operator.admin.budget_report import BudgetPages
from extproc.operator.admin.commands import read_command
from extproc.operator.admin.html import send_html
from extproc.operator.admin.loop_page import describe_order
from extproc.operator.admin.loop_report import LoopPages
from extproc.operator.admin.pages import ask, is_near, read_body
from extproc.operator.admin.reports import Selection, write_time
from extproc.operator.admin.session_report import SessionPages
from extproc.operator.admin.sign_in import Operator, SignIn, check_form, check_origin
from extproc.operator.overrides import OverrideService

_MAX_CALLERS = 20


class OrderPages:
    """The pages that sign operators in and take their orders."""

    def __init__(
        self,
        service: OverrideService,
        sign_in: SignIn,
        reports: tuple[LoopPages, SessionPages, BudgetPages],
        find_loop: Callable[[], asyncio.AbstractEventLoop],
    ) -> None:
        """`find_loop` returns the event loop of `service`."""
        self._service = service
        self._sign_in = sign_in
        self._reports = reports
        self._find_loop = find_loop
        for pages in reports:
            pages.may_see_callers = self._may_see_callers

    def list_routes(self) -> list[Route]:
        """The routes of all pages."""
        return [
            _route("/login", self._show_login),
            _route("/login", self._log_in, "POST"),
            _route("/logout", self._log_out, "POST"),
            _route("/order", self._show_order),
            _route("/order", self._give, "POST"),
            _route("/orders/{name}", self._show_result),
        ]

    async def _show_login(self, request: Request) -> Response:
        self._sign_in.check_enabled()
        return _send(request, "login.html", command=request.query_params.get("command", ""))

    async def _log_in(self, request: Request) -> Response:
        self._sign_in.check_enabled()
        check_origin(request)
        form = await _read_form(request)
        command = form.get("command", "")
        response = _redirect("/order" if command else "/", command=command)
        try:
            await asyncio.to_thread(
                self._sign_in.open, request, form.get("name", ""), form.get("token", ""), response
            )
        except HTTPException as error:
            return _send(request, "login.html", error, command=command)
        return response

    async def _log_out(self, request: Request) -> Response:
        check_origin(request)
        response = _redirect("/")
        self._sign_in.close(response)
        return response

    async def _show_order(self, request: Request) -> Response:
        text = request.query_params.get("command", "")
        operator = await self._find_operator(request)
        if operator is None:
            return _redirect("/login", command=text)
        command, affected, notes = read_command(text), [], []
        if command.revokes:
            planned = await self._find_standing(command.revokes)
        else:
            prepared = await ask(
                self._service.prepare(command.order, _sign(operator)), self._find_loop()
            )
            planned, notes = prepared.override, prepared.notes
            affected = await asyncio.to_thread(self._list_affected, request, planned)
        if planned is None:
            return _redirect(f"/orders/{quote(command.revokes, safe='')}")
        return _send(
            request,
            "order.html",
            operator=operator,
            command=text,
            order=describe_order(planned),
            revokes=command.revokes,
            lasts=format_duration(round((planned.ends - planned.since) * 1_000)),
            affected=affected[:_MAX_CALLERS],
            more=max(0, len(affected) - _MAX_CALLERS),
            remarks=notes,
            key=secrets.token_hex(8),
        )

    async def _give(self, request: Request) -> Response:
        check_origin(request)
        form = await _read_form(request)
        text = form.get("command", "")
        operator = await self._find_operator(request)
        if operator is None:
            ended = HTTPException(
                HTTPStatus.UNAUTHORIZED, "your sign-in has ended, so nothing changed: sign in again"
            )
            return _send(request, "login.html", ended, command=text)
        check_form(operator, form.get("form_key", ""))
        command = read_command(text)
        name = command.revokes
        if name:
            await ask(self._service.revoke(name, _sign(operator)), self._find_loop())
        else:
            order = command.order | ({"reason": form["reason"]} if form.get("reason") else {})
            if order["kind"] == GRANT:
                order["key"] = form.get("key")  # a form that is sent twice counts once
            given, _ = await ask(self._service.give(order, _sign(operator)), self._find_loop())
            name = given.name
        return _redirect(f"/orders/{quote(name, safe='')}")

    async def _show_result(self, request: Request) -> Response:
        name = request.path_params["name"]
        order = await self._find_standing(name)
        return _send(
            request,
            "ordered.html",
            operator=await self._find_operator(request),
            name=name,
            order=None if order is None else describe_order(order),
        )

    async def _find_operator(self, request: Request) -> Operator | None:
        self._sign_in.check_enabled()
        return await asyncio.to_thread(self._sign_in.find, request)

    def _may_see_callers(self, request: Request) -> bool:
        """Whether a request is local, or of a signed-in operator."""
        if is_near(request):
            return True
        try:
            return self._sign_in.find(request) is not None
        except HTTPException:  # the token file is unusable; the page can still be read
            return False

    async def _find_standing(self, name: str) -> ActiveOverride | None:
        """The order, also if another replica has just taken it."""
        await ask(self._service.refresh(), self._find_loop())
        return next((each for each in self._service.list_standing() if each.name == name), None)

    def _list_affected(self, request: Request, planned: ActiveOverride) -> list[dict[str, Any]]:
        """The callers whose rows of the last hour an order concerns, with counts of these."""
        loops, sessions, budgets = self._reports
        selection = Selection(caller=planned.target.caller, orders=[planned])
        found: dict[str, dict[str, Any]] = {}
        for row in [
            *loops.report(request, selection)["conversations"],
            *sessions.report(request, selection)["sessions"],
            *budgets.report(request, selection)["budgets"],
        ]:
            if row["orders"]:
                about = found.setdefault(row["caller"], {"row": row, "loops": 0, "agents": {}})
                about["loops"] += row.get("looping", False)
                if "agents" in row:
                    about["agents"][row["session"]] = row["agents"]["active"]
        return [
            {**about, "sessions": len(about["agents"]), "agents": sum(about["agents"].values())}
            for about in found.values()
        ]


def _route(path: str, show: Callable[[Request], Awaitable[Response]], method: str = "GET") -> Route:
    """A route whose errors are pages."""

    async def explain(request: Request) -> Response:
        try:
            return await show(request)
        except BadOrderError as error:
            problem = HTTPException(HTTPStatus.BAD_REQUEST, str(error))
        except HTTPException as error:
            problem = error
        return _send(request, "problem.html", problem)

    return Route(path, explain, methods=[method])


def _send(
    request: Request, template: str, problem: HTTPException | None = None, **values: object
) -> Response:
    """A page; with a problem, its status, headers and message."""
    status = HTTPStatus.OK if problem is None else HTTPStatus(problem.status_code)
    message = "" if problem is None else problem.detail
    response = send_html(request, template, write_time(time()), status, problem=message, **values)
    response.headers.update((problem.headers if problem is not None else None) or {})
    return response


def _redirect(path: str, **query: str) -> Response:
    given = urlencode({name: value for name, value in query.items() if value})
    return RedirectResponse(f"{path}?{given}" if given else path, HTTPStatus.SEE_OTHER)


async def _read_form(request: Request) -> dict[str, str]:
    return dict(parse_qsl((await read_body(request)).decode("utf-8", "replace")))


def _sign(operator: Operator) -> str:
    """An operator's name for the log."""
    return f"{operator.name} (page)"
