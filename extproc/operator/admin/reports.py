"""Common parts of reports: access to callers' values, selection by query, and common fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Generic, NamedTuple, TypeAlias

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from extproc.engine.orders import ActiveOverride
from extproc.operator.admin.pages import Page, is_near, send_page
from extproc.operator.board import AnyDocument, Board, View
from extproc.operator.budget_rows import BudgetRow
from extproc.operator.loop_rows import Loop
from extproc.operator.session_rows import SessionRow
from extproc.operator.standing_orders import OrderIndex

VERSION = 1
"""Version of the JSON. Fields may be added to a version, but none changes its meaning."""

MAX_ROWS = 1_000

Sorts: TypeAlias = Mapping[str, Callable[[dict[str, Any]], Any]]
OLDEST_FIRST = "first"
"""The only order that starts with the smallest value."""


class Selection(NamedTuple):
    """The requested part of a table.

    Attributes:
        caller: selects callers by a prefix of their hash, the hash of a single value, an alias, a
            label or, if values are shown, a value or `NAME=VALUE`.
        sort: one of the table's sort keys; empty for the first.
        orders: the orders to show with the rows; None for the active ones.
    """

    policy: str = ""
    caller: str = ""
    tool: str = ""
    sort: str = ""
    limit: int = MAX_ROWS
    orders: Sequence[ActiveOverride] | None = None


class TablePages(Generic[AnyDocument]):
    """The pages about a table.

    Attributes:
        path: path of the report.
        sorts: sort keys of the report.
        may_see_callers: returns whether a client may see callers' values, if these are shown at
            all.
        list_orders: returns the active orders.
        summarize: returns the coverage summary of the report; see `CoveragePages`.
    """

    path: str
    sorts: Sorts

    def __init__(self, board: Board[AnyDocument], shows_callers: Callable[[], bool]) -> None:
        self._board = board
        self._shows_callers = shows_callers
        self.may_see_callers: Callable[[Request], bool] = is_near
        self.list_orders: Callable[[], Sequence[ActiveOverride]] = list
        self.summarize: Callable[[], list[dict[str, Any]]] = list

    def report(self, request: Request, selection: Selection) -> dict[str, Any]:
        """The rows of the table that a request selects."""
        raise NotImplementedError

    def list_routes(self) -> list[Route]:
        """The route of the report; a request's query is its selection."""

        def send(request: Request) -> Response:
            return send_page(
                Page(
                    HTTPStatus.OK,
                    self.report(request, read_selection(request.query_params, self.sorts)),
                )
            )

        return [Route(self.path, send)]

    def _index_orders(self, selection: Selection) -> OrderIndex:
        return OrderIndex(self.list_orders() if selection.orders is None else selection.orders)

    def _sees_callers(self, request: Request) -> bool:
        return self._shows_callers() and self.may_see_callers(request)


def read_selection(query: Mapping[str, str], sorts: Sorts) -> Selection:
    """Parse a query; raises HTTPException (400) if it is invalid."""
    sort, limit = query.get("sort", next(iter(sorts))), query.get("limit", str(MAX_ROWS))
    if sort not in sorts:
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"sort must be one of {', '.join(sorts)}")
    if not (re.fullmatch("[0-9]{1,4}", limit) and 1 <= int(limit) <= MAX_ROWS):
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"limit must be 1 to {MAX_ROWS}")
    return Selection(
        query.get("policy", ""), query.get("caller", ""), query.get("tool", ""), sort, int(limit)
    )


def select(
    rows: Iterable[dict[str, Any]], selection: Selection, sorts: Sorts
) -> list[dict[str, Any]]:
    """The selected rows, sorted; the limit is not applied."""
    sort = selection.sort or next(iter(sorts))
    return sorted(
        (row for row in rows if matches(row, selection)),
        key=sorts[sort],
        reverse=sort != OLDEST_FIRST,
    )


def matches(row: Mapping[str, Any], selection: Selection) -> bool:
    """Whether a row is selected."""
    if selection.policy not in ("", row["policy"]):
        return False
    # Sessions are not separated by tool
    if selection.tool and selection.tool not in row.get("tools", [selection.tool]):
        return False
    shown, chosen = row["descriptors"] or {}, selection.caller
    pairs = [f"{name}={value}" for name, value in shown.items()]
    known = [row["alias"], *row["names"], *(row["labels"] or {}).values()]
    return row["caller"].startswith(chosen) or chosen in (
        *known,
        *shown.values(),
        *pairs,
        ", ".join(pairs),
    )


def describe_caller(row: Loop | SessionRow | BudgetRow, *, shows_callers: bool) -> dict[str, Any]:
    """Describe a row's caller; `names` has all names that orders and pages use for it."""
    return {
        "caller": row.tenant,
        "names": list_names(row),
        "alias": row.alias or None,
        "labels": dict(row.labels) or None,
        "credentials": row.credentials,
        "descriptors": dict(row.caller) if shows_callers and row.caller else None,
    }


def list_names(row: Loop | SessionRow | BudgetRow) -> list[str]:
    """All names that orders can use for a row's caller; its own hash comes first."""
    return [row.tenant, *row.parts, *([row.alias] if row.alias else [])]


def describe_view(view: View[Any], now: float) -> dict[str, Any]:
    """The first fields of a report."""
    return {
        "version": VERSION,
        "at": write_time(now),
        "replica": view.replica,
        "replicas": view.replicas,
        "problem": view.problem or None,
        "left_out": view.document.left_out,
    }


def write_time(seconds: float) -> str:
    """A time, in seconds since 1970, in the format of RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
