"""Finds the active overrides that concern a row, to show them with it."""
# interpreted: works beside the requests

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from extproc.engine.orders import ALL_POLICIES, ActiveOverride


class ShownRow(NamedTuple):
    """The parts of a row that orders can name. Callers and their values are hashes.

    Attributes:
        callers: hashes of callers and of their single values, and aliases.
        descriptors: hashes of the caller's values, by name; empty if unknown.
    """

    policies: Collection[str]
    callers: Collection[str]
    descriptors: Mapping[str, str]
    sessions: Collection[str] = ()
    fingerprints: Collection[str] = ()
    tools: Collection[str] = ()
    budgets: Collection[str] = ()


class OrderIndex:
    """Orders by one of their targets, because there may be thousands of orders and rows."""

    def __init__(self, orders: Iterable[ActiveOverride]) -> None:
        self._filed: dict[tuple[str, ...], list[ActiveOverride]] = {}
        for order in orders:
            target = order.target
            values = [("caller", value) for _, value in target.descriptors]
            named = (("session", target.session), ("caller", target.caller), *values)
            more = (("fingerprint", target.fingerprint), ("tool", target.tool))
            key = next((each for each in (*named, *more) if each[1]), ("", ""))
            self._filed.setdefault(key, []).append(order)

    def find(self, about: ShownRow) -> list[ActiveOverride]:
        """The orders that concern a row, newest first."""
        if not self._filed:
            return []
        keys = [
            *(("session", session) for session in about.sessions),
            *(("caller", caller) for caller in about.callers),
            *(("caller", value) for value in about.descriptors.values()),
            *(("fingerprint", fingerprint) for fingerprint in about.fingerprints),
            *(("tool", tool) for tool in about.tools),
        ]
        found = [
            order
            for key in dict.fromkeys(keys)
            for order in self._filed.get(key, ())
            if concerns(order, about)
        ]
        return sorted(found, key=lambda order: -order.since)


NO_ORDERS = OrderIndex(())


def concerns(order: ActiveOverride, about: ShownRow) -> bool:
    """Whether an order may apply to a row's requests."""
    target = order.target
    return (
        (order.policy == ALL_POLICIES or order.policy in about.policies)
        and (not target.caller or target.caller in about.callers)
        and all(
            value in about.callers or about.descriptors.get(name) == value
            for name, value in target.descriptors
        )
        and (not target.session or target.session in about.sessions)
        and (not target.fingerprint or target.fingerprint in about.fingerprints)
        and (not target.tool or target.tool in about.tools)
        and (not order.budget or order.budget in about.budgets)
    )
