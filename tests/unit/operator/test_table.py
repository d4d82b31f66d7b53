"""Recent entries are kept, and the quietest make room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.operator.table import Table

MOST, SHARE = 8, 3


class Seen:
    """A row."""

    def __init__(self, last: float = 0.0) -> None:
        self.last = last


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 4)), max_size=200))
def test_the_longest_quiet_entry_makes_room(uses: list[tuple[str, int]]) -> None:
    """Of its own tenant's where that has more than its share, else of all: as a list says that is put in order at each use."""
    table: Table[Seen, None] = Table(MOST, SHARE)
    order: list[tuple[str, str]] = []  # the quietest first
    for tenant, number in uses:
        key = (tenant, str(number))
        if key in order:
            order.remove(key)
        order.append(key)
        if table.use(key) is None:
            table.put(key, Seen())
        own = [each for each in order if each[0] == tenant]
        if len(own) > SHARE:
            order.remove(own[0])
        elif len(order) > MOST:
            del order[0]

        assert [key for key, _ in table._rows.items()] == order
        assert table._tenants.keys() == {tenant for tenant, _ in order}


def test_rows_are_forgotten_whose_last_request_is_old() -> None:
    """Later changes to them do not matter; their tenants get their shares back."""
    table: Table[Seen, None] = Table(MOST, SHARE)
    for number in range(MOST):
        tenant = "a" if number < SHARE else str(number)
        table.put((tenant, str(number)), Seen(10 * number))
    table.use(("a", "0"))

    table.drop_quiet(10 * SHARE)
    for number in range(SHARE):
        table.put(("a", f"new {number}"), Seen(100))

    assert [row.last for row in table.copy()] == [30, 40, 50, 60, 70, 100, 100, 100]
