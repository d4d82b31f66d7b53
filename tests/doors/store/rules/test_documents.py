"""Documents, and the secret that replicas share, in every store; time is an argument."""

from typing import NamedTuple

import pytest

from extproc.errors import StoreError
from extproc.store.memory import MemoryStore
from extproc.store.rules.documents import BOARDS, KINDS, MAX_REPLICAS, ORDERS
from tests.support.servers import Driver


class Written(NamedTuple):
    """One document at a time in milliseconds; without a document, a removal."""

    now: int
    name: str
    document: bytes | None = b"x"
    seconds: float = 60


A, B = Written(1_000, "a"), Written(2_000, "b")
CASES: dict[str, tuple[list[Written], int, dict[str, bytes]]] = {
    "none": ([], 1_000, {}),
    "one": ([A._replace(document=b"\x00\xff\r\n")], 1_000, {"a": b"\x00\xff\r\n"}),
    "two": ([A, B._replace(document=b"")], 2_000, {"a": b"x", "b": b""}),
    "replaced": ([A, A._replace(document=b"y")], 1_000, {"a": b"y"}),
    "removed": ([A, B, Written(2_001, "a", None)], 2_002, {"b": b"x"}),
    "removed and written again": ([A, Written(1_001, "a", None), A], 1_001, {"a": b"x"}),
    "until the last millisecond": ([A], 60_999, {"a": b"x"}),
    "expired": ([A, B], 61_000, {"b": b"x"}),
    "prolonged": ([A, Written(2_000, "a", b"y")], 61_000, {"a": b"y"}),
    "shortened": ([A, Written(2_000, "a", b"y", 1)], 3_000, {}),
    "the older one expires later": ([A._replace(seconds=90), B], 62_000, {"a": b"x"}),
    "the longest name": ([Written(1_000, "\u00e9" * 127)], 1_000, {"\u00e9" * 127: b"x"}),
}
"""What is written, and what is read then."""


def write(store: Driver, kind: str, written: Written) -> None:
    name, documents = store.name("subject"), store.store.documents
    if written.document is None:
        assert store.run(documents.drop(kind, name, written.name, written.now))
    else:
        store.put(kind, name, written.name, written.document, written.seconds, written.now)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_document_cases_hold_in_every_store(store: Driver, kind: str, case: str) -> None:
    steps, now, expected = CASES[case]
    for written in steps:
        write(store, kind, written)

    name, documents = store.name("subject"), store.store.documents
    found = store.run(documents.read(kind, name, "never", now))

    assert found is not None
    assert found.documents == expected
    assert store.run(documents.read(kind, name, found.version, now)) is None
    assert store.run(documents.read(kind, store.name("another"), "", now)) is None


def test_full_board_drops_what_expires_first(store: Driver) -> None:
    for number in range(MAX_REPLICAS, -1, -1):
        write(store, BOARDS, Written(1_000, str(number), seconds=60 + number))

    found = store.read(BOARDS, store.name("subject"), 1_000)

    assert found.keys() == {str(number) for number in range(MAX_REPLICAS + 1) if number != 1}


@pytest.mark.parametrize("kind", KINDS)
def test_longest_document_fits_by_the_clock_of_the_store(store: Driver, kind: str) -> None:
    longest = b"x" * KINDS[kind].max_bytes

    store.put(kind, store.name("subject"), "a", longest, 3_600)

    assert store.read(kind, store.name("subject")) == {"a": longest}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "more"), [("a", 1), ("", 0), ("a" * 256, 0), ("\u00e9" * 128, 0)])
def test_document_or_name_that_is_too_long_is_rejected(
    store: Driver, kind: str, name: str, more: int
) -> None:
    with pytest.raises(StoreError) as error:
        store.put(kind, store.name("subject"), name, bytes(KINDS[kind].max_bytes + more), 60)

    assert (error.value.kind, store.read(kind, store.name("subject"))) == ("too_large", {})


def test_missing_or_expired_order_cannot_be_revoked(store: Driver) -> None:
    write(store, ORDERS, A)

    for name, now in (("b", 1_000), ("a", 61_000)):
        assert not store.run(store.store.documents.drop(ORDERS, store.name("subject"), name, now))


def test_replicas_share_the_first_secret(store: Driver) -> None:
    """In memory, where there is no other replica, each process has its own."""
    name, first, second = store.name("secret"), b"\x00\xff\r\n" * 8, b"x" * 32

    found = [store.run(store.store.share_secret(name, secret)) for secret in (first, second)]

    assert found == ([first, second] if isinstance(store.store, MemoryStore) else [first, first])


def test_number_of_orders_is_bounded(store: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new order is rejected; an existing one may be changed, and an expired one makes room."""
    monkeypatch.setitem(KINDS, ORDERS, KINDS[ORDERS]._replace(max_documents=3))
    for number in range(3):
        write(store, ORDERS, Written(1_000, str(number), seconds=60 + number))

    with pytest.raises(StoreError) as error:
        write(store, ORDERS, Written(60_999, "more"))
    write(store, ORDERS, Written(60_999, "2", b"y", 600))
    write(store, ORDERS, Written(61_000, "more"))

    assert error.value.kind == "full"
    assert store.read(ORDERS, store.name("subject"), 61_000) == {"1": b"x", "2": b"y", "more": b"x"}


def test_thousands_of_orders_are_read(store: Driver) -> None:
    book = store.name("book")

    async def fill() -> None:
        for number in range(2_500):
            await store.store.documents.put(ORDERS, book, str(number), b"x", 60)

    store.run(fill())

    assert len(store.read(ORDERS, book)) == 2_500
