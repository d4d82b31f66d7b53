"""Chains in every store are those of `follow`; time is an argument."""

from hypothesis import given, strategies as st

from extproc.detectors.chain import ChainPlace, Spoken
from extproc.store.memory import MemoryStore
from extproc.store.pushes import AnyPush
from extproc.store.rules.chain import MAX_ENTRIES, ChainLink
from tests.support.chains import CHAINS, STEPS, Model, Sent, ask_store, make_link
from tests.support.servers import Driver
from tests.support.windows import make_push


@given(
    steps=STEPS,
    ttl=st.sampled_from([3_600_000, 400_000, 60_000]),
    most=st.sampled_from([2**26, 3_000]),
)
def test_conversations_equal_their_rule(
    opened: Driver, steps: list[tuple[Sent, int]], ttl: int, most: int
) -> None:
    """For any requests, on a clock that may be set back, except in memory.

    Set back, memory would miss entries that it has swept away.
    """
    store, model, now = opened.fresh(), Model(), 10_000_000
    monotonic = isinstance(opened.store, MemoryStore)

    for number, (sent, gap) in enumerate(steps):
        now += abs(gap) if monotonic else gap
        fresh = number.to_bytes(8, "little") if number % 7 else b""
        link = make_link(sent, ttl_ms=ttl, most=most)._replace(fresh=fresh)
        assert ask_store(store, link, now) == model.ask(link, now), (sent, now)


def test_trail_has_the_newest_entries(store: Driver) -> None:
    shown: tuple[str, ...] = ()
    for number in range(40):
        trail = ask_store(store, make_link(Sent("u", shown, f"e{number}")), 1_000 + number)
        assert (
            trail.entries == [f"e{place}".encode() for place in range(1, number + 1)][-MAX_ENTRIES:]
        )
        assert trail.whole
        shown = (*shown, f"a{number}")


def test_node_without_conversations_lasts_two_minutes(store: Driver) -> None:
    """One that was left is found again for that long; one that others may still leave stays."""
    for _ in range(2):
        ask_store(store, make_link(Sent("u", (), "")), 0)
    ask_store(store, make_link(Sent("u", ("a",), "x")), 0)
    ask_store(store, make_link(Sent("u", ("b",), "y")), 100_000)

    assert ask_store(store, make_link(Sent("u", ("c",), "z")), 219_999).entries == [b"z"]
    assert ask_store(store, make_link(Sent("u", ("d",), "z")), 219_999).whole is False
    assert ask_store(store, make_link(Sent("u", ("a", "d"), "z")), 500_000).entries == [b"x", b"z"]


def test_retry_of_two_turns_is_no_window_of_a_longer_run(store: Driver) -> None:
    once, twice, other = ("b",), ("b", "b"), ("b", "a")
    begun = [Sent("u", (), "")] * 2 + [Sent("u", once, "b!")] * 2
    for now, sent in enumerate([*begun, Sent("u", twice, "b!"), Sent("u", other, "a!")]):
        ask_store(store, make_link(sent), now)

    for now in range(6, 12):
        assert ask_store(store, make_link(Sent("u", other, "a!")), now).entries == [b"b!", b"a!"]


def test_one_call_pushes_to_chains_and_rings(store: Driver) -> None:
    links = [
        make_link(Sent(f"u{number}", ("a",), f"e{number}"), caller=f"{number:02x}")
        for number in range(20)
    ]
    pushes: list[AnyPush] = [make_push("r")._replace(key=store.key(make_push("r"))), *links]

    ring, *trails = store.settled(lambda on: on.push(pushes, 5))

    assert ring == [b"r"]
    assert [trail.entries for trail in trails] == [[f"e{number}".encode()] for number in range(20)]


NODES = ("a", "b", "c")
ENTRIES = [b"", *(bytes((kind,)) + end * 7 for kind in (0, 1) for end in (b"x", b"y", b"z"))]


def make_fork(shown: list[str], entry: bytes, fresh: bytes) -> ChainLink:
    place = ChainPlace(b"u" * 16, [Spoken([message.encode() * 16], []) for message in shown])
    return CHAINS.make_link("session", "", "00", "", place, entry if shown else b"", fresh)


@given(
    asked=st.lists(
        st.tuples(
            st.lists(st.sampled_from(NODES), max_size=4),
            st.sampled_from(ENTRIES),
            st.integers(0, 90_000),
        )
    )
)
def test_names_of_forks_equal_their_rule(
    opened: Driver, asked: list[tuple[list[str], bytes, int]]
) -> None:
    store, model, now = opened.fresh(), Model(), 10_000_000

    for number, (shown, entry, gap) in enumerate(asked, 1):
        now += gap
        link = make_fork(shown, entry, number.to_bytes(8))
        assert ask_store(store, link, now) == model.ask(link, now), (shown, entry)


def test_each_fork_has_its_own_name(store: Driver) -> None:
    begun = ask_store(store, make_fork([], b"", b"N" * 8), 1).name
    names = [
        ask_store(store, make_fork(["a"], entry, b"F" * 8), 2).name for entry in ENTRIES[1:4] * 2
    ]

    assert (begun, names[:3], names[4:]) == (b"N" * 8, [begun, *ENTRIES[2:4]], ENTRIES[2:4])
