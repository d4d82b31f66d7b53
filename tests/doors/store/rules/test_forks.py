"""Forks of conversations in every store are those of `follow`; time is an argument."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.detectors.chain import ChainPlace, ShownMessage
from extproc.store.rules.chain import ChainLink
from tests.support.chains import CHAINS, Model, ask_store
from tests.support.servers import Driver

NODES = ("a", "b", "c")
ENTRIES = [b"", *(bytes((kind,)) + end * 7 for kind in (0, 1) for end in (b"x", b"y", b"z"))]


def make_link(shown: list[str], entry: bytes, fresh: bytes) -> ChainLink:
    """What a session limit asks about a request that shows these messages of the assistant."""
    place = ChainPlace(b"u" * 16, [ShownMessage([message.encode() * 16], []) for message in shown])
    return CHAINS.make_link("session", "", "00", "", place, entry if shown else b"", fresh)


@given(
    asked=st.lists(st.tuples(st.lists(st.sampled_from(NODES), max_size=4), st.sampled_from(ENTRIES), st.integers(0, 90_000)))
)
def test_a_store_names_forks_as_the_definition_does(opened: Driver, asked: list[tuple[list[str], bytes, int]]) -> None:
    """For any requests, every store answers the same."""
    store, model, now = opened.fresh(), Model(), 10_000_000

    for number, (shown, entry, gap) in enumerate(asked, 1):
        now += gap
        link = make_link(shown, entry, number.to_bytes(8))
        assert ask_store(store, link, now) == model.ask(link, now), (shown, entry)


def test_each_fork_has_a_name_of_its_own(store: Driver) -> None:
    """The first request at a node goes on with the conversation, the others are named by what they end in."""
    begun = ask_store(store, make_link([], b"", b"N" * 8), 1).name
    names = [ask_store(store, make_link(["a"], entry, b"F" * 8), 2).name for entry in ENTRIES[1:4] * 2]

    assert begun == b"N" * 8
    assert names[:3] == [begun, *ENTRIES[2:4]]
    assert names[4:] == ENTRIES[2:4]
