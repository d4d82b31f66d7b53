"""Documents, and the secret that replicas share, in every store; time is an argument."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from extproc.errors import StoreError
from extproc.store.memory import MemoryStore
from extproc.store.rules.documents import (
    BOARDS,
    KINDS,
    MAX_DOCUMENT,
    MAX_ORDER,
    MAX_REPLICAS,
    ORDERS,
)
from tests.support.servers import Driver


class Published(NamedTuple):
    """One step on a board, on a made-up clock in milliseconds."""

    now: int
    replica: str
    document: bytes
    seconds: float


ON_BOARDS: dict[str, tuple[list[Published], int, dict[str, bytes]]] = {
    "none": ([], 1_000, {}),
    "one": ([Published(1_000, "a", b"\x00\xff\r\n", 60)], 1_000, {"a": b"\x00\xff\r\n"}),
    "two": (
        [Published(1_000, "a", b"x", 60), Published(1_001, "b", b"", 60)],
        1_002,
        {"a": b"x", "b": b""},
    ),
    "the last word counts": (
        [Published(1_000, "a", b"x", 60), Published(1_001, "a", b"y", 60)],
        1_002,
        {"a": b"y"},
    ),
    "to the last millisecond": ([Published(1_000, "a", b"x", 60)], 60_999, {"a": b"x"}),
    "forgotten": (
        [Published(1_000, "a", b"x", 60), Published(2_000, "b", b"y", 60)],
        61_000,
        {"b": b"y"},
    ),
    "kept by the next word": (
        [Published(1_000, "a", b"x", 60), Published(2_000, "a", b"y", 60)],
        61_000,
        {"a": b"y"},
    ),
    "a longer word first": (
        [Published(1_000, "a", b"x", 90), Published(2_000, "b", b"y", 60)],
        62_000,
        {"a": b"x"},
    ),
    "the one that expires first makes room": (
        [
            Published(1_000, str(number), b"x", 60 + number)
            for number in range(MAX_REPLICAS, -1, -1)
        ],
        1_000,
        {str(number): b"x" for number in range(MAX_REPLICAS + 1) if number != 1},
    ),
    "as long as may be": (
        [Published(1_000, "\u00e9" * 127, b"x" * MAX_DOCUMENT, 60)],
        1_000,
        {"\u00e9" * 127: b"x" * MAX_DOCUMENT},
    ),
}
"""What is published, and what is on the board then."""


@pytest.mark.parametrize("case", ON_BOARDS)
def test_board_cases_hold_in_every_store(store: Driver, case: str) -> None:
    steps, now, expected = ON_BOARDS[case]
    for moment, replica, document, seconds in steps:
        store.run(
            store.store.documents.put(
                BOARDS, store.name("board"), replica, document, seconds, moment
            )
        )

    assert store.read(BOARDS, store.name("board"), now) == expected
    assert store.read(BOARDS, store.name("another"), now) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_documents_use_the_clock_of_the_store(store: Driver, kind: str) -> None:
    store.run(store.store.documents.put(kind, store.name("subject"), "a", b"x", 3_600))

    assert store.read(kind, store.name("subject")) == {"a": b"x"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "more"), [("a", 1), ("", 0), ("a" * 256, 0), ("\u00e9" * 128, 0)])
def test_document_or_name_that_is_too_long_is_rejected(
    store: Driver, kind: str, name: str, more: int
) -> None:
    with pytest.raises(StoreError) as error:
        store.run(
            store.store.documents.put(
                kind, store.name("subject"), name, bytes(KINDS[kind].max_bytes + more), 60
            )
        )

    assert error.value.kind == "too_large"
    assert store.read(kind, store.name("subject")) == {}


class Ordered(NamedTuple):
    """One step in a book of orders, at a time in milliseconds; without a document, a revocation."""

    now: int
    name: str
    document: bytes | None = b"x"
    seconds: float = 60


BOOKS: dict[str, tuple[list[Ordered], int, dict[str, bytes]]] = {
    "nothing": ([], 1_000, {}),
    "one": ([Ordered(1_000, "a", b"\x00\xff\r\n")], 1_000, {"a": b"\x00\xff\r\n"}),
    "two": ([Ordered(1_000, "a"), Ordered(1_001, "b", b"")], 1_002, {"a": b"x", "b": b""}),
    "the last word counts": ([Ordered(1_000, "a"), Ordered(1_001, "a", b"y")], 1_002, {"a": b"y"}),
    "taken back": (
        [Ordered(1_000, "a"), Ordered(1_000, "b"), Ordered(1_001, "a", None)],
        1_002,
        {"b": b"x"},
    ),
    "taken back and given again": (
        [Ordered(1_000, "a"), Ordered(1_001, "a", None), Ordered(1_002, "a")],
        1_003,
        {"a": b"x"},
    ),
    "to the last millisecond": ([Ordered(1_000, "a")], 60_999, {"a": b"x"}),
    "ended": ([Ordered(1_000, "a"), Ordered(2_000, "b")], 61_000, {"b": b"x"}),
    "shortened": ([Ordered(1_000, "a"), Ordered(2_000, "a", b"y", 1)], 3_000, {}),
    "as long as may be": ([Ordered(1_000, "a", b"x" * MAX_ORDER)], 1_000, {"a": b"x" * MAX_ORDER}),
}
"""What is ordered, and what stands then."""


@pytest.mark.parametrize("case", BOOKS)
def test_order_cases_hold_in_every_store(store: Driver, case: str) -> None:
    steps, now, expected = BOOKS[case]
    for moment, name, document, seconds in steps:
        if document is None:
            assert store.run(store.store.documents.drop(ORDERS, store.name("book"), name, moment))
        else:
            store.run(
                store.store.documents.put(
                    ORDERS, store.name("book"), name, document, seconds, moment
                )
            )

    found = store.run(store.store.documents.read(ORDERS, store.name("book"), "never", now))

    assert found is not None
    assert found.documents == expected
    assert (
        store.run(store.store.documents.read(ORDERS, store.name("book"), found.version, now))
        is None
    )
    assert store.run(store.store.documents.read(ORDERS, store.name("another"), "", now)) is None


def test_missing_or_expired_order_cannot_be_revoked(store: Driver) -> None:
    store.run(store.store.documents.put(ORDERS, store.name("book"), "a", b"x", 60, 1_000))

    assert not store.run(store.store.documents.drop(ORDERS, store.name("book"), "b", 1_000))
    assert not store.run(store.store.documents.drop(ORDERS, store.name("book"), "a", 61_000))


def test_replicas_share_the_first_secret(store: Driver) -> None:
    """The first one; in memory, where there is no other replica, each process has its own."""
    name, first, second = store.name("secret"), b"\x00\xff\r\n" * 8, b"x" * 32

    found = [store.run(store.store.share_secret(name, secret)) for secret in (first, second)]

    assert found == ([first, second] if isinstance(store.store, MemoryStore) else [first, first])


def test_number_of_orders_is_bounded(store: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new order is rejected; an existing one may be changed, and an expired one makes room."""
    monkeypatch.setitem(KINDS, ORDERS, KINDS[ORDERS]._replace(max_documents=3))
    book = store.name("book")
    for number in range(3):
        store.run(store.store.documents.put(ORDERS, book, str(number), b"x", 60 + number, 1_000))

    with pytest.raises(StoreError) as error:
        store.run(store.store.documents.put(ORDERS, book, "more", b"x", 60, 60_999))
    store.run(store.store.documents.put(ORDERS, book, "2", b"y", 600, 60_999))
    store.run(store.store.documents.put(ORDERS, book, "more", b"x", 60, 61_000))

    assert error.value.kind == "full"
    assert sorted(store.read(ORDERS, book, 61_000).items()) == [
        ("1", b"x"),
        ("2", b"y"),
        ("more", b"x"),
    ]


def test_thousands_of_orders_are_read(store: Driver) -> None:
    book = store.name("book")

    async def fill() -> None:
        for number in range(2_500):
            await store.store.documents.put(ORDERS, book, str(number), b"x", 60)

    store.run(fill())

    assert len(store.read(ORDERS, book)) == 2_500
