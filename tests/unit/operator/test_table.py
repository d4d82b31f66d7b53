"""Recent entries are kept, and the quietest make room."""

import tracemalloc
from dataclasses import dataclass

from hypothesis import given, strategies as st

from extproc.operator.table import Table

MOST, SHARE = 8, 3


@dataclass
class Seen:
    last: float = 0.0
    key: tuple[str, ...] = ()


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 4)), max_size=200))
def test_longest_unused_row_makes_room(uses: list[tuple[str, int]]) -> None:
    """The oldest row of its own tenant if that has more than its share, else of all."""
    table: Table[Seen, None] = Table(MOST, SHARE)
    order: list[tuple[str, ...]] = []  # the quietest first
    for tenant, number in uses:
        key = (tenant, str(number))
        if key in order:
            order.remove(key)
        order.append(key)
        if table.use(key) is None:
            table.put(key, Seen(key=key))
        own = [each for each in order if each[0] == tenant]
        if len(own) > SHARE:
            order.remove(own[0])
        elif len(order) > MOST:
            del order[0]

        assert [row.key for row in table.copy()] == order


def test_old_rows_are_dropped() -> None:
    table: Table[Seen, None] = Table(MOST, SHARE)
    for number in range(MOST):
        tenant = "a" if number < SHARE else str(number)
        table.put((tenant, str(number)), Seen(10 * number))
    table.use(("a", "0"))

    table.drop_quiet(10 * SHARE)
    for number in range(SHARE):
        table.put(("a", f"new {number}"), Seen(100))

    assert [row.last for row in table.copy()] == [30, 40, 50, 60, 70, 100, 100, 100]


def test_tenants_without_rows_take_no_memory() -> None:
    table: Table[Seen, None] = Table(MOST, SHARE)
    tracemalloc.start()
    for number in range(5_000):
        table.put((f"{number:016x}", ""), Seen())
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert used < 100_000
