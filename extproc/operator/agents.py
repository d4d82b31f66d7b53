"""Agents in the reports of sessions: those that requests name."""
# interpreted: msgspec makes its classes

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Final

from extproc.operator.rows import MAX, MIN, SUM, Row, merge, newest

MAX_SHOWN: Final = 64
"""Agents of a session that are shown, the newest; its counts include all."""

ACTIVE_SECONDS: Final = 60
"""An agent is shown as active for this long after a request."""


class AgentRow(Row, array_like=True):
    """An agent of a session.

    Attributes:
        name: hash of its name.
        parent: the same of the agent that started it, according to its first request; empty if the session did.
        depth: levels below the session; 0 if unknown, because the policy does not limit agents.
        began: when it was seen first, in seconds since 1970.
        last: when its newest request came.
        requests: how many this replica has seen.
        refused: the limit that refused its newest request; empty for none.
    """

    name: str
    parent: str
    depth: Annotated[int, MAX]
    began: Annotated[float, MIN]
    last: Annotated[float, MAX]
    requests: Annotated[int, SUM] = 0
    refused: Annotated[str, newest("last")] = ""

    def is_active(self, now: float) -> bool:
        """Whether its newest request was let through, and recently; `now` in seconds since 1970."""
        return not self.refused and now - self.last < ACTIVE_SECONDS


def merge_agents(rows: Iterable[AgentRow]) -> list[AgentRow]:
    """One row for each agent, oldest first; those that are refused make room for others, however many they are."""
    merged = merge(sorted(rows, key=lambda row: row.began))
    kept = {row.name for row in sorted(merged, key=lambda row: (not row.refused, row.last))[-MAX_SHOWN:]}
    return [row for row in merged if row.name in kept]


def order_tree(rows: Sequence[AgentRow]) -> list[tuple[int, AgentRow]]:
    """Agents with their levels below the session, each behind its parent, and once, whatever parents clients claim."""
    known = {row.name for row in rows}
    children: dict[str, list[AgentRow]] = {}
    for row in rows:
        children.setdefault(row.parent if row.parent in known and row.parent != row.name else "", []).append(row)
    ordered: list[tuple[int, AgentRow]] = []
    placed: set[str] = set()

    def place(first: Sequence[AgentRow]) -> None:
        waiting = [(1, row) for row in reversed(first)]
        while waiting:
            level, row = waiting.pop()
            if row.name not in placed:
                placed.add(row.name)
                ordered.append((level, row))
                waiting += [(level + 1, child) for child in reversed(children.get(row.name, ()))]

    place(children.get("", ()))
    for row in rows:  # of a circle, the one that came first stands for its root
        place([row] if row.name not in placed else [])
    return ordered
