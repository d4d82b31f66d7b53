"""Requests of sessions in replicas' tables, and the rows that replicas show together."""

from typing import Any

from extproc.operator.board import unpack_all
from extproc.operator.session_rows import SessionDocument, SessionRow, merge_sessions
from extproc.operator.session_table import RunName, SessionTable
from extproc.sessions.rates import Usage
from extproc.store.rules.session import Standing

TENANT, SESSION = "a" * 16, "5" * 16
USAGE = Usage(100, 20, 30, 40)


def name_call(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _name_run(changes: dict[str, Any]) -> RunName:
    known = {"tenant": TENANT, "policy": "p", "mode": "enforce", "session": SESSION}
    return RunName(**{field: changes.pop(field, value) for field, value in known.items()})


def note(
    table: SessionTable,
    standing: Standing,
    call: int = 0,
    *,
    now: float = 1_000.0,
    **changes: Any,  # noqa: ANN401
) -> None:
    name = _name_run(changes)
    fields: dict[str, Any] = {
        "caller": [("x-team", "red")],
        "model": "gpt-4o",
        "tools": ("search",),
    }
    table.note(name=name, standing=standing, call=name_call(call), now=now, **(fields | changes))


def settle(
    table: SessionTable,
    standing: Standing,
    call: int = 0,
    *,
    now: float = 1_000.0,
    **changes: Any,  # noqa: ANN401
) -> None:
    name = _name_run(changes)
    fields: dict[str, Any] = {"model": "gpt-4o", "status": 200, "usage": USAGE}
    table.settle(name=name, standing=standing, call=name_call(call), now=now, **(fields | changes))


def list_rows(*tables: SessionTable, since: float = 0) -> list[SessionRow]:
    """The rows of all replicas, read through their boards."""
    packed = {
        str(place): table.make_document(shows_callers=True).pack()
        for place, table in enumerate(tables)
    }
    documents = unpack_all(packed, SessionDocument)
    return merge_sessions((row for document in documents.values() for row in document.rows), since)
