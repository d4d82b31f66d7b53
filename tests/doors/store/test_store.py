"""What every store must do, and what only the memory store promises; time is an argument."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.engine.evaluation import Evaluation
from extproc.errors import StoreError, UsageError
from extproc.metrics import Metrics
from extproc.request.fingerprint import NO_BODY
from extproc.request.http import HttpRequest
from extproc.store import open_store, orders, remote_orders
from extproc.store.boards import MAX_DOCUMENT, MAX_REPLICAS
from extproc.store.ledger import Limits, add_up
from extproc.store.memory import MemoryStore
from extproc.store.orders import MAX_ORDER
from extproc.store.windows import Count, Hit, Push
from tests.support.documents import policy
from tests.support.engine import make_engine
from tests.support.ledger import CASES, LIMITS_OF_ALL_KINDS, MOVES, Book, in_session, limit, play, settle_step, tell
from tests.support.records import replace
from tests.support.servers import REDIS, Driver, cluster, server
from tests.support.session_calls import MOVES as AGENT_MOVES
from tests.support.session_calls import Client, Move, follow, in_memory
from tests.support.windows import (
    COOLDOWN_STEPS,
    PUSH_STEPS,
    PUSHES,
    STEPS_BACK,
    WINDOW_TYPES,
    cooldown_hits,
    make_hit,
    make_push,
    oracle,
    oracle_of,
    place_pushes,
    rings_of,
)


def _on_one() -> Iterator[str]:
    with server() as one:
        yield f"redis://127.0.0.1:{one.port}"


def _on_a_cluster() -> Iterator[str]:
    with cluster() as nodes:
        yield "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes[:2])


def _on_debians() -> Iterator[str]:
    if REDIS is None:
        pytest.skip("Debian's redis-server is not installed: counted on Valkey alone")
    with server(binary=REDIS) as one:
        yield f"redis://127.0.0.1:{one.port}"


STORES: dict[str, Callable[[], Iterator[str]]] = {
    "memory": lambda: iter(["memory://"]),
    "valkey": _on_one,
    "redis": _on_debians,
    "cluster": _on_a_cluster,
}
"""Every store by name, with the servers that it needs: one body of tests drives them all."""


@pytest.fixture(scope="module", params=STORES)
def opened(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """Each store, started once."""
    with contextmanager(STORES[request.param])() as url:
        driver = Driver(url)
        yield driver
        driver.close()


@pytest.fixture
def store(opened: Driver) -> Driver:
    """Each store, empty."""
    return opened.fresh()


_CONFIGURATIONS = st.tuples(
    st.sampled_from(WINDOW_TYPES),
    st.sampled_from([(3, 0, True), (2, 7_000, True), (3, 30_000, False), (2, 0, False)]),
    st.sampled_from([4, 100]),
)


@given(
    # Two keys at a time, so that each is hit often enough for its windows to end, and long gaps beside short ones.
    steps=st.lists(_CONFIGURATIONS, min_size=2, max_size=2).flatmap(
        lambda keys: st.lists(
            st.tuples(st.sampled_from(keys), st.integers(0, 1_000) | st.integers(2_000, 12_000) | st.integers(-12_000, 0)),
            min_size=10,
            max_size=40,
        )
    )
)
def test_a_store_answers_as_the_windows_do(
    opened: Driver, steps: list[tuple[tuple[str, tuple[int, int, bool], int], int]]
) -> None:
    """Interleaved keys of every window type get the answers that each would get alone, by definition and from memory."""
    store, memory = opened.fresh(), open_store("memory://", Metrics())
    now = 1_000_000
    hits: dict[str, Hit] = {}
    history: dict[str, list[int]] = {}
    answers: dict[str, list[Count]] = {}
    for (window_type, (threshold, cooldown, refused), count_to), gap in steps:
        now += gap
        key = f"{window_type}:{threshold}:{cooldown}:{refused}:{count_to}"
        shape: dict[str, Any] = {"threshold": threshold, "cooldown_ms": cooldown, "count_refused": refused}
        hit = hits.setdefault(key, make_hit(window_type, key=key, count_to=count_to, **shape))
        history.setdefault(key, []).append(now)
        found = store.count([hit], now)
        answers.setdefault(key, []).extend(found)
        assert memory.hit([hit], now) == found

    roomy = [key for key, hit in hits.items() if hit.count_to == 100]  # the definition knows no bound
    assert {key: oracle(hits[key], history[key]) for key in roomy} == {key: answers[key] for key in roomy}


@given(steps=COOLDOWN_STEPS)
def test_a_store_keeps_a_cooldown_and_nothing_else(opened: Driver, steps: list[tuple[bool, int]]) -> None:
    """Where requests say themselves that they are loops, every store acts on the same ones, and says how long it will."""
    store = opened.fresh()

    answers = [store.count([hit], now)[0] for hit, now in cooldown_hits(steps)]

    assert answers == oracle_of(cooldown_hits(steps))


@pytest.mark.parametrize("window_type", ["sliding_ttl", "fixed"])
@pytest.mark.parametrize("cooldown", [0, 7_000])
def test_a_threshold_of_one_trips_every_store_at_once(store: Driver, window_type: str, cooldown: int) -> None:
    """The first request of a key is acted on where the threshold says so, and every later one."""
    hit = make_hit(window_type, threshold=1, cooldown_ms=cooldown)
    times = [1_000, 1_001, 5_000, 9_000, 30_000]

    answers = [store.count([hit], now)[0] for now in times]

    assert answers == oracle(hit, times)
    assert [answer.looping for answer in answers] == [True] * 5


@pytest.mark.parametrize("window_type", WINDOW_TYPES)
@pytest.mark.parametrize(("_", "hit", "times", "__"), STEPS_BACK, ids=[case[0] for case in STEPS_BACK])
def test_a_clock_that_is_set_back(store: Driver, window_type: str, _: str, hit: Hit, times: list[int], __: object) -> None:
    """After a failover to a server whose clock is behind, every store answers as the definition does, in every window."""
    hit = replace(hit, window_type=window_type)

    assert [store.count([hit], now)[0] for now in times] == oracle(hit, times)


def test_hits_of_one_request_are_counted_in_one_go(store: Driver) -> None:
    """Answers come in the order of the hits, each key counted for itself."""
    hits = [make_hit(kind, key=kind) for kind in WINDOW_TYPES]
    store.count(hits[:1], 0)

    answers = store.count(hits, 1)

    assert [answer.count for answer in answers] == [2, 1, 1]


def test_requests_at_the_same_time_count_once_each(store: Driver) -> None:
    """A thousand concurrent requests take the numbers 1 to 1000."""

    async def all_at_once() -> list[Sequence[Count]]:
        return await asyncio.gather(*(store.ask([make_hit()], 5) for _ in range(1_000)))

    assert sorted(answer.count for (answer,) in store.run(all_at_once())) == list(range(1, 1_001))


@pytest.mark.parametrize("window_type", WINDOW_TYPES)
def test_the_store_has_a_clock_of_its_own(store: Driver, window_type: str) -> None:
    """Without a time given, requests in quick succession are one loop, whose Nth request is the first acted on."""
    hit = make_hit(window_type, window_ms=60_000)

    answers = [store.run(store.ask([hit], None))[0] for _ in range(5)]

    assert [(answer.count, answer.looping) for answer in answers] == [(1, False), (2, False), (3, True), (4, True), (5, True)]


def _calls(times: int, *, user: str = "ann", result: str = "no such file") -> Evaluation:
    """A conversation in which the same call was made so often, as a policy with a cooldown of 60 s looks at it."""
    loop: dict[str, Any] = {"similarity": "tool_calls", "cooldown_seconds": 60, "window_seconds": None}
    turn = [
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "read_file", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": result},
    ]
    data = json.dumps({"messages": [{"role": "user", "content": "go"}, *turn * times], "user": user}).encode()
    engine = make_engine(policy("p", {"pathPrefix": "/"}, limit_keys=["body:/user"], **loop))
    check = engine.prepare(HttpRequest("POST", "/v1/chat/completions"))
    assert check is not None
    check.seal(NO_BODY.plus(data), content=data)
    return check


def test_a_loop_of_calls_trips_the_cooldown_for_its_caller(store: Driver) -> None:
    """The same call in a shorter history is refused while the cooldown lasts and not after it; others are not touched."""

    def action(seconds: float, check: Evaluation) -> str:
        hits = [hit for hit in check.enforcing.list_hits() if isinstance(hit, Hit)]
        return check.decide(store.count(hits, int(seconds * 1_000) + 1_000_000)).action.value

    answers = [
        action(0, _calls(2)),
        action(1, _calls(3)),
        action(2, _calls(1)),
        action(3, _calls(1, user="bob")),
        action(4, _calls(2, result="found")),
        action(40, _calls(4)),
        action(60.999, _calls(1)),
        action(61, _calls(1)),
        action(62, _calls(3)),
    ]

    assert answers == ["allow", "reject", "reject", "allow", "allow", "reject", "reject", "allow", "reject"]


@pytest.mark.parametrize("case", PUSHES)
def test_a_ring_in_every_store(store: Driver, case: str) -> None:
    """Every store keeps the newest entries, each request's once, until nothing has been pushed for a while."""
    for now, pushed, expected in PUSHES[case]:
        assert b" ".join(store.push([pushed], now)[0]) == expected.encode()


@given(steps=PUSH_STEPS)
def test_a_store_keeps_rings_as_the_definition_does(opened: Driver, steps: list[tuple[Push, int]]) -> None:
    """For any pushes, on a clock that may be set back, every store answers the same."""
    store = opened.fresh()

    found = [store.push([pushed], now)[0] for pushed, now in place_pushes(steps)]

    assert found == rings_of(place_pushes(steps))


@pytest.mark.parametrize("case", CASES)
def test_a_session_in_every_store(store: Driver, case: str) -> None:
    """Each limit of a session refuses at its number, in its order, and every store forgets when it should."""
    told = [tell(standing) for now, asked, _ in CASES[case] for standing in store.account([asked], now)]

    assert told == [expected for _, _, expected in CASES[case]]


def test_sessions_and_counters_are_asked_together(store: Driver) -> None:
    """Answers come in the order of what is asked, to each its own kind, and each session is judged by its own limits."""
    sessions = [in_session(str(number), 1, limit(steps=number % 2), roster=f"sessions:p::{number}:7f") for number in range(6)]
    settled = settle_step(sessions[5], cost=7)
    store.account(sessions[4:], 1_000)

    found = store.account([*sessions[:3], settled, sessions[3]], 1_001)
    counted = store.count([make_hit()], 1_002)

    assert [tell(standing) for standing in found] == ["max_steps 0/0", "ok", "max_steps 0/0", "ok", "ok"]
    assert [standing.cost for standing in found] == [0, 0, 0, 7, 0]
    assert [count.count for count in counted] == [1]


@given(moves=MOVES, limits=LIMITS_OF_ALL_KINDS)
def test_a_store_keeps_sessions_as_the_rules_say(
    opened: Driver, moves: list[tuple[int, str, int, int]], limits: Limits
) -> None:
    """For any sessions of a tenant, on a clock that may be set back, every store answers as a plain reading of the rules."""
    store = opened.fresh()
    if isinstance(store.store, MemoryStore):  # may have let go, before the clock goes back, of what was to be forgotten
        moves = [(who, move, amount, abs(gap)) for who, move, amount, gap in moves]

    found = play(moves, limits, lambda asked, now: store.account([asked], now)[0])

    assert found == play(moves, limits, Book().ask)


@pytest.mark.parametrize("shape", ["chat", "responses", "gemini"])
@settings(max_examples=40)
@given(AGENT_MOVES, st.sampled_from(["last", "anew"]), st.integers(1, 6), st.sampled_from([0, 7]))
def test_a_store_counts_calls_as_memory_does(
    opened: Driver, shape: str, moves: list[Move], ids: str, most: int, seed: int
) -> None:
    """Whatever clients make of ids and histories, every store tells the calls that are new from the others."""
    store = opened.fresh()

    def make_client() -> Client:
        return Client(shape, ids=ids, most_turns=most if most < 6 else 10**9, seed=seed)

    found = follow(make_client(), moves, lambda asked, now: store.account([asked], now)[0])

    assert found == follow(make_client(), moves, in_memory())


@pytest.mark.parametrize("seed", range(8))
def test_a_store_counts_long_histories_as_memory_does(store: Driver, seed: int) -> None:
    """Also those of which only the newest calls are looked at one by one, with many tools and limits."""
    order = Random(seed)
    limits = limit(
        tool_calls=order.choice([100, 10**9]),
        tools=tuple((number.to_bytes(4), order.choice([3, 10**6])) for number in range(1, order.choice([1, 61]))),
        window=order.choice([5, 500]),
        threshold=order.choice([-1, 3]),
    )
    memory, tools = in_memory(), order.choice([3, 100])
    history: list[bytes] = []
    for number in range(40):
        newest = order.choice([0, 1, 1, 2, 3, 300, 700])
        first = order.randrange(len(history) + 1) if order.random() < 0.2 else 0
        last = order.randrange(first, len(history) + 1) if order.random() < 0.2 else len(history)
        history = history[first:last]
        if order.random() < 0.2:
            history = [order.choice([bytes(6), order.randbytes(6)]) + record[6:] for record in history]
        for _ in range(newest):
            tool = order.randint(1, tools).to_bytes(4)
            history.append((order.randbytes(6) if order.random() < 0.9 else bytes(6)) + tool + order.randrange(9).to_bytes(4))
        calls = b"".join(history)
        names = tuple((at.to_bytes(4), f"tool {at}") for at in range(1, tools + 1))
        step = in_session("long", number, limits)
        asked = replace(step, calls=calls, total=add_up(calls), newest=newest, tools=names)

        assert store.account([asked], number) == [memory(asked, number)]


class Published(NamedTuple):
    """One step on a board, on a made-up clock in milliseconds."""

    now: int
    replica: str
    document: bytes
    seconds: float


BOARDS: dict[str, tuple[list[Published], int, dict[str, bytes]]] = {
    "nobody": ([], 1_000, {}),
    "one": ([Published(1_000, "a", b"\x00\xff\r\n", 60)], 1_000, {"a": b"\x00\xff\r\n"}),
    "two": ([Published(1_000, "a", b"x", 60), Published(1_001, "b", b"", 60)], 1_002, {"a": b"x", "b": b""}),
    "the last word counts": ([Published(1_000, "a", b"x", 60), Published(1_001, "a", b"y", 60)], 1_002, {"a": b"y"}),
    "to the last millisecond": ([Published(1_000, "a", b"x", 60)], 60_999, {"a": b"x"}),
    "forgotten": ([Published(1_000, "a", b"x", 60), Published(2_000, "b", b"y", 60)], 61_000, {"b": b"y"}),
    "kept by the next word": ([Published(1_000, "a", b"x", 60), Published(2_000, "a", b"y", 60)], 61_000, {"a": b"y"}),
    "a longer word first": ([Published(1_000, "a", b"x", 90), Published(2_000, "b", b"y", 60)], 62_000, {"a": b"x"}),
    "the one that expires first makes room": (
        [Published(1_000, str(number), b"x", 60 + number) for number in range(MAX_REPLICAS, -1, -1)],
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


@pytest.mark.parametrize("case", BOARDS)
def test_a_board_in_every_store(store: Driver, case: str) -> None:
    """Every store shows each replica's last document until it expires, and no more of them than fit."""
    steps, now, expected = BOARDS[case]
    for moment, replica, document, seconds in steps:
        store.run(store.store.publish(store.name("board"), replica, document, seconds, moment))

    assert store.run(store.store.collect(store.name("board"), now)) == expected
    assert store.run(store.store.collect(store.name("another"), now)) == {}


def test_a_board_has_a_clock_of_its_own(store: Driver) -> None:
    """Without a time given, what was published just now is on the board."""
    store.run(store.store.publish(store.name("board"), "a", b"x", 3_600))

    assert store.run(store.store.collect(store.name("board"))) == {"a": b"x"}


@pytest.mark.parametrize(("replica", "length"), [("a", MAX_DOCUMENT + 1), ("", 1), ("a" * 256, 1), ("\u00e9" * 128, 1)])
def test_what_no_board_takes(store: Driver, replica: str, length: int) -> None:
    """A document or a name that is too long is refused in every store, and the board stays as it was."""
    with pytest.raises(StoreError) as error:
        store.run(store.store.publish(store.name("board"), replica, b"x" * length, 60))

    assert error.value.kind == "too_large"
    assert store.run(store.store.collect(store.name("board"))) == {}


class Ordered(NamedTuple):
    """One step in a book of orders, on a made-up clock in milliseconds; without a document the order is taken back."""

    now: int
    name: str
    document: bytes | None = b"x"
    seconds: float = 60


BOOKS: dict[str, tuple[list[Ordered], int, dict[str, bytes]]] = {
    "nothing": ([], 1_000, {}),
    "one": ([Ordered(1_000, "a", b"\x00\xff\r\n")], 1_000, {"a": b"\x00\xff\r\n"}),
    "two": ([Ordered(1_000, "a"), Ordered(1_001, "b", b"")], 1_002, {"a": b"x", "b": b""}),
    "the last word counts": ([Ordered(1_000, "a"), Ordered(1_001, "a", b"y")], 1_002, {"a": b"y"}),
    "taken back": ([Ordered(1_000, "a"), Ordered(1_000, "b"), Ordered(1_001, "a", None)], 1_002, {"b": b"x"}),
    "taken back and given again": ([Ordered(1_000, "a"), Ordered(1_001, "a", None), Ordered(1_002, "a")], 1_003, {"a": b"x"}),
    "to the last millisecond": ([Ordered(1_000, "a")], 60_999, {"a": b"x"}),
    "ended": ([Ordered(1_000, "a"), Ordered(2_000, "b")], 61_000, {"b": b"x"}),
    "shortened": ([Ordered(1_000, "a"), Ordered(2_000, "a", b"y", 1)], 3_000, {}),
    "as long as may be": ([Ordered(1_000, "a", b"x" * MAX_ORDER)], 1_000, {"a": b"x" * MAX_ORDER}),
}
"""What is ordered, and what stands then."""


@pytest.mark.parametrize("case", BOOKS)
def test_orders_in_every_store(store: Driver, case: str) -> None:
    """Every store knows each order until it ends or is taken back; another book has none of them."""
    steps, now, expected = BOOKS[case]
    for moment, name, document, seconds in steps:
        if document is None:
            assert store.run(store.store.drop_order(store.name("book"), name, moment))
        else:
            store.run(store.store.put_order(store.name("book"), name, document, seconds, moment))

    found = store.run(store.store.read_orders(store.name("book"), "never", now))

    assert found is not None
    assert found.documents == expected
    assert store.run(store.store.read_orders(store.name("book"), found.version, now)) is None
    assert store.run(store.store.read_orders(store.name("another"), "", now)) is None


def test_what_does_not_stand_cannot_be_taken_back(store: Driver) -> None:
    """Whoever takes an order back is told whether there was one, also where it has just ended."""
    store.run(store.store.put_order(store.name("book"), "a", b"x", 60, 1_000))

    assert not store.run(store.store.drop_order(store.name("book"), "b", 1_000))
    assert not store.run(store.store.drop_order(store.name("book"), "a", 61_000))


def test_orders_have_a_clock_of_their_own(store: Driver) -> None:
    """Without a time given, what was ordered just now stands."""
    store.run(store.store.put_order(store.name("book"), "a", b"x", 3_600))

    found = store.run(store.store.read_orders(store.name("book"), ""))

    assert found is not None
    assert found.documents == {"a": b"x"}


def test_a_secret_is_agreed_on_in_every_store(store: Driver) -> None:
    """The first that is given; in memory, where there is no other replica, each process has its own."""
    name, first, second = store.name("secret"), b"\x00\xff\r\n" * 8, b"x" * 32

    found = [store.run(store.store.share_secret(name, secret)) for secret in (first, second)]

    assert found == ([first, second] if isinstance(store.store, MemoryStore) else [first, first])


def test_an_order_that_is_too_long_is_refused(store: Driver) -> None:
    """No store takes it, and none is changed by it."""
    with pytest.raises(StoreError) as error:
        store.run(store.store.put_order(store.name("book"), "a", b"x" * (MAX_ORDER + 1), 60))

    assert error.value.kind == "too_large"
    assert store.run(store.store.read_orders(store.name("book"), "")) is None


def test_orders_are_bounded(store: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room, a new order is refused; one that stands may be changed, and one that ended makes room."""
    for module in (orders, remote_orders):
        monkeypatch.setattr(module, "MAX_ORDERS", 3)
    book = store.name("book")
    for number in range(3):
        store.run(store.store.put_order(book, str(number), b"x", 60 + number, 1_000))

    with pytest.raises(StoreError) as error:
        store.run(store.store.put_order(book, "more", b"x", 60, 60_999))
    store.run(store.store.put_order(book, "2", b"y", 600, 60_999))
    store.run(store.store.put_order(book, "more", b"x", 60, 61_000))
    found = store.run(store.store.read_orders(book, "", 61_000))

    assert error.value.kind == "full"
    assert found is not None
    assert sorted(found.documents.items()) == [("1", b"x"), ("2", b"y"), ("more", b"x")]


def test_thousands_of_orders_are_read_whole(store: Driver) -> None:
    """As many as were taken come back, in however many portions."""
    book = store.name("book")

    async def fill() -> None:
        for number in range(2_500):
            await store.store.put_order(book, str(number), b"x", 3_600)  # the first is there when the last is put

    store.run(fill())
    found = store.run(store.store.read_orders(book, ""))

    assert found is not None
    assert len(found.documents) == 2_500


def test_rings_and_counters_are_asked_together(store: Driver) -> None:
    """Pushes of one call have a ring each, in their order, and what is counted meanwhile is not disturbed."""
    pushes = [make_push("a")._replace(key=f"ring-{number}") for number in range(20)]
    store.push(pushes[5:6], 1_000)

    async def both() -> tuple[Sequence[Sequence[bytes]], Sequence[Count]]:
        entries = store.store.push([pushed._replace(key=store.key(pushed), request=b"another.") for pushed in pushes], 1_001)
        counts = store.ask([make_hit()], 1_001)
        return (await entries if inspect.isawaitable(entries) else entries), await counts

    entries, counts = store.run(both())

    assert [len(found) for found in entries] == [2 if number == 5 else 1 for number in range(20)]
    assert [count.count for count in counts] == [1]


def test_pushes_at_the_same_time_all_stand(store: Driver) -> None:
    """Fifty concurrent pushes to one ring leave the fifty entries, each push having seen one more."""

    async def all_at_once() -> list[Any]:
        pushes = [make_push(str(number), size=50) for number in range(50)]
        answers = [store.store.push([pushed._replace(key=store.key(pushed))]) for pushed in pushes]
        return [(await answer if inspect.isawaitable(answer) else answer)[0] for answer in answers]

    found = store.run(all_at_once())

    assert sorted(len(entries) for entries in found) == list(range(1, 51))
    assert {*max(found, key=len)} == {str(number).encode() for number in range(50)}


def _memory(max_entries: int) -> tuple[MemoryStore, Metrics]:
    metrics = Metrics()
    return MemoryStore(metrics, max_entries), metrics


def _counts(store: MemoryStore, now: int, **keys: Hit) -> dict[str, int]:
    return {key: store.hit([replace(hit, key=key)], now)[0].count for key, hit in keys.items()}


def test_the_least_recently_used_goes_first() -> None:
    """Past max_entries the entry that was used longest ago is dropped and counted as an eviction."""
    store, metrics = _memory(3)
    hit = make_hit()
    _counts(store, 0, a=hit)
    _counts(store, 1, b=hit, c=hit)
    _counts(store, 2, a=hit)

    _counts(store, 3, d=hit)

    assert len(store) == 3
    assert metrics.store_evictions._value.get() == 1
    assert _counts(store, 4, a=hit, c=hit, d=hit) == {"a": 3, "c": 2, "d": 2}


def test_the_expired_go_before_the_least_recently_used() -> None:
    """An entry whose short window is over makes room, although one with a long window was used before it."""
    store, metrics = _memory(2)
    long, short = make_hit(window_ms=60_000), make_hit(window_ms=1_000)
    _counts(store, 0, long=long)
    _counts(store, 10, short=short)

    _counts(store, 2_000, fresh=long)

    assert metrics.store_evictions._value.get() == 0
    assert _counts(store, 2_001, long=long) == {"long": 2}


def test_a_running_cooldown_is_not_expired() -> None:
    """A tripped entry stays until its cooldown is over, however short its window."""
    store, _ = _memory(2)
    tripping, other = make_hit(window_ms=100, cooldown_ms=50_000), make_hit(window_ms=100)
    for now in range(3):
        store.hit([tripping], now)
    for now in range(1_000, 10_000, 200):
        store.hit([replace(other, key=f"other-{now}")], now)

    assert store.hit([tripping], 10_000)[0].looping


@pytest.mark.parametrize("max_entries", [10, 5_000])
def test_memory_is_bounded_and_expired_entries_are_swept(max_entries: int) -> None:
    """Ten times more keys than there is room never exceed the bound; once they expire, new traffic sweeps them out."""
    store, _ = _memory(max_entries)
    hit = make_hit()
    for number in range(10 * max_entries):
        store.hit([replace(hit, key=f"key-{number}")], number // 10)
        assert len(store) <= max_entries

    for number in range(2 * max_entries):
        store.hit([replace(hit, key=f"late-{number % 3}", window_ms=1)], 1_000_000 + number * 2)
    assert len(store) < max_entries


def test_rings_are_bounded_together_with_counters() -> None:
    """A ring takes the place of a counter, the least recently used goes first, and an expired ring before it."""
    store, metrics = _memory(3)
    ring, hit = make_push("a"), make_hit()
    store.push([ring], 0)
    _counts(store, 1, b=hit, c=hit)
    store.push([ring], 2)

    _counts(store, 3, d=hit)

    assert metrics.store_evictions._value.get() == 1
    assert store.push([ring._replace(request=b"another.")], 4) == [[b"a", b"a"]]
    assert _counts(store, 5, c=hit, d=hit) == {"c": 2, "d": 2}
    _counts(store, 9_999, c=replace(hit, window_ms=20_000), d=replace(hit, window_ms=20_000))
    assert len(store) == 3


def test_long_rings_leave_room_for_fewer() -> None:
    """Where entries are long, memory is bounded by what they hold rather than by their number."""
    store, _ = _memory(1_000)
    for number in range(1_000):
        for request in range(32):
            pushed = Push(f"ring-{number}", bytes(64), request.to_bytes(8, "big"), 32, 10_000)
            assert len(store.push([pushed], number)[0]) == request + 1

    assert 50 < len(store) < 150
    assert len(store.push([Push("ring-999", b"", bytes(7) + b"x", 32, 10_000)], 1_000)[0]) == 32


_KNOWN = (
    "known are: memory://, redis://, rediss://, unix://, redis+sentinel://, rediss+sentinel://, redis+cluster://, "
    "rediss+cluster://"
)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("etcd://x", f"unknown store etcd://x; {_KNOWN}"),
        ("etcd://me:secret@x/y?z", f"unknown store etcd://x/y; {_KNOWN}"),
        ("memory", f"a store is named by a URL; {_KNOWN}"),
        ("me:secret@x", f"a store is named by a URL; {_KNOWN}"),
        ("memory://?max_entries=0", "cannot use store 'memory://?max_entries=0': max_entries must be a positive integer"),
        ("memory://host", "cannot use store 'memory://host': it takes the form memory://?max_entries=1000000"),
        ("memory://?size=3", "cannot use store 'memory://?size=3': it takes the form memory://?max_entries=1000000"),
    ],
)
def test_a_bad_store_url_says_what_would_be_right(url: str, message: str) -> None:
    """An unknown scheme or option is a usage error that names the forms there are."""
    with pytest.raises(UsageError) as error:
        open_store(url, Metrics())

    assert str(error.value) == message


def test_max_entries_comes_from_the_url() -> None:
    """`?max_entries=` bounds the store."""
    store = open_store("memory://?max_entries=2", Metrics())
    for key in "abc":
        store.hit([make_hit(key=key)], 0)

    assert isinstance(store, MemoryStore)
    assert len(store) == 2
