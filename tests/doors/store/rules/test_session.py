"""Sessions in every store are judged as `session` says; time is an argument."""

from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from extproc.store.memory import MemoryStore
from extproc.store.rules.session import (
    CONVERSATION,
    FAILED,
    JOINED,
    MAX_MONEY,
    OFFERS_NONE,
    OFFERS_TOOLS,
    SUCCEEDED,
    WITHDRAWN,
    Limits,
    Settlement,
    Standing,
    Step,
    add_up,
)
from tests.support.examples import examples
from tests.support.ledger import (
    CASES,
    LIMITS_OF_ALL_KINDS,
    MOVES,
    NO_LIMITS,
    Book,
    call,
    digest,
    in_session,
    limit,
    make_record,
    make_step,
    play,
    settle_step,
    tell,
)
from tests.support.records import replace
from tests.support.servers import Driver
from tests.support.session_calls import MOVES as AGENT_MOVES, Client, Move, follow, in_memory


@pytest.mark.parametrize("case", CASES)
def test_session_cases_hold_in_every_store(store: Driver, case: str) -> None:
    told = [
        tell(standing) for now, asked, _ in CASES[case] for standing in store.account([asked], now)
    ]

    assert told == [expected for _, _, expected in CASES[case]]


@given(moves=MOVES, limits=LIMITS_OF_ALL_KINDS)
def test_sessions_equal_a_plain_model(
    opened: Driver, moves: list[tuple[int, str, int, int]], limits: Limits
) -> None:
    store = opened.fresh()
    # Memory may have dropped expired ledgers before the clock is set back.
    if isinstance(store.store, MemoryStore):
        moves = [(who, move, amount, abs(gap)) for who, move, amount, gap in moves]

    found = play(moves, limits, lambda asked, now: store.account([asked], now)[0])

    assert found == play(moves, limits, Book().ask)


@pytest.mark.parametrize("shape", ["chat", "responses", "gemini"])
@settings(max_examples=examples(160))
@given(AGENT_MOVES, st.sampled_from(["last", "anew"]), st.integers(1, 6), st.sampled_from([0, 7]))
def test_calls_are_counted_as_in_memory(
    opened: Driver, shape: str, moves: list[Move], ids: str, most: int, seed: int
) -> None:
    store = opened.fresh()

    def make_client() -> Client:
        return Client(shape, ids=ids, most_turns=most if most < 6 else 10**9, seed=seed)

    found = follow(make_client(), moves, lambda asked, now: store.account([asked], now)[0])

    assert found == follow(make_client(), moves, in_memory())


@pytest.mark.parametrize("seed", range(8))
def test_long_histories_are_counted_as_in_memory(store: Driver, seed: int) -> None:
    order = Random(seed)
    limits = limit(
        tool_calls=order.choice([100, 10**9]),
        tools=tuple(
            (number.to_bytes(4), order.choice([3, 10**6]))
            for number in range(1, order.choice([1, 61]))
        ),
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
            history = [
                order.choice([bytes(6), order.randbytes(6)]) + record[6:] for record in history
            ]
        for place in range(newest):
            pair = order.randint(1, tools).to_bytes(4) + order.randrange(9).to_bytes(4)
            since = bytes((0 if place else order.choice([1, 1, 3]),))
            history.append(
                (order.randbytes(6) if order.random() < 0.9 else bytes(6)) + pair + since
            )
        calls = b"".join(history)
        names = tuple((at.to_bytes(4), f"tool {at}") for at in range(1, tools + 1))
        step = in_session("long", number, limits)
        asked = replace(step, calls=calls, total=add_up(calls), newest=newest, tools=names)

        assert store.account([asked], number) == [memory(asked, number)]


def ask_all(store: Driver, *asked: Step | Settlement) -> list[Standing]:
    return [store.account([one], 1_000 + number)[0] for number, one in enumerate(asked)]


def test_forgotten_calls_are_not_counted_again(store: Driver) -> None:
    """Calls before a known one are older, even those that the ledger has forgotten."""
    history = [make_record(number, "send" if number == 3 else "read") for number in range(900)]
    limits, lengths = limit(tools=((digest("send"), 1),)), (300, 301, 600, 899, 900)

    standings = ask_all(store, *(make_step(length, limits, history[:length]) for length in lengths))

    assert [(tell(standing), standing.tool_calls) for standing in standings] == [
        ("ok", length) for length in lengths
    ]


def test_high_limit_makes_more_calls_known(store: Driver) -> None:
    history = [make_record(number, arguments=str(number)) for number in range(900)]
    shown = (history, history[388:420], history[300:330])

    standings = ask_all(
        store,
        *(make_step(number, limit(tool_calls=1_000), calls) for number, calls in enumerate(shown)),
    )

    # Of a thousand, the newest 512 are known.
    assert [standing.tool_calls for standing in standings] == [900, 900, 930]


def test_number_of_counted_tools_is_bounded(store: Driver) -> None:
    """64 tools are counted, each by the start of its name; one that has a limit always is."""
    calls = [number.to_bytes(6) + number.to_bytes(4) + bytes(5) for number in range(100)]
    tools = tuple((number.to_bytes(4), "\U0001f600" * number + "\ud800") for number in range(100))
    limits = limit(tools=(((99).to_bytes(4), 5),))

    (standing,) = ask_all(store, make_step(1, limits, calls, tools=tools))

    assert standing.tool_calls == 100
    assert [tool for tool, _, _ in standing.tools] == [
        number.to_bytes(4) for number in (*range(63), 99)
    ]
    assert [name for _, name, _ in standing.tools[:3]] == [
        "?",
        "\U0001f600?",
        "\U0001f600" * 2 + "?",
    ]
    assert standing.tools[-1][1] == "\U0001f600" * 63


def test_money_stays_exact(store: Driver) -> None:
    steps = [make_step(number, NO_LIMITS, reserve=10**30) for number in range(100)]

    *_, standing = ask_all(store, *steps, settle_step(steps[-1], cost=10**30))

    assert standing.cost == MAX_MONEY
    assert standing.reserved <= MAX_MONEY


def test_every_call_of_a_long_history_is_counted(store: Driver) -> None:
    """Also by tool, although only the newest are examined individually."""
    tools = ["send" if number % 10 == 3 else "read" for number in range(4_900)]
    limits = limit(tool_calls=10**9, tools=((digest("send"), 490),))

    (first, second) = ask_all(
        store, *(make_step(number, limits, call(*tools, *["send"] * number)) for number in range(2))
    )

    assert (tell(first), first.tool_calls) == ("ok", 4_900)
    assert (tell(second), second.tool_calls) == ("max_calls_per_tool 491/490 send", 4_901)


def test_newest_reservations_stay_open(store: Driver) -> None:
    """Of 33 requests that are not settled, the oldest costs what it has reserved."""
    asked = [make_step(number, limit(), reserve=7) for number in range(33)]
    standings = [store.account([one], 1)[0] for one in asked]

    assert [(standing.cost, standing.reserved) for standing in standings[-2:]] == [
        (0, 32 * 7),
        (7, 32 * 7),
    ]


def test_retry_of_a_forgotten_step_cannot_be_undone(store: Driver) -> None:
    """When the same request is a new step by then, that is no retry which could be undone."""
    retry = make_step(1, limit(), call=bytes(15) + b"r")
    asked = [make_step(1, limit()), retry, *[make_step(number, limit()) for number in range(2, 18)]]
    for one in [*asked, make_step(1, limit(), call=bytes(15) + b"n")]:
        standing = store.account([one], 1)[0]
    (after,) = store.account(
        [Settlement(retry.key, limit(), retry.call, 0, estimated=False, outcome=WITHDRAWN)], 2
    )
    (again,) = store.account([make_step(1, limit(), call=bytes(15) + b"a")], 3)

    assert (standing.steps, standing.retry, after.steps, again.steps, again.retry) == (
        18,
        False,
        18,
        18,
        True,
    )


def test_first_and_newest_input_are_of_steps_with_reported_tokens(store: Driver) -> None:
    def settle(step: Step, tokens: int, outcome: int = SUCCEEDED) -> tuple[int, int]:
        (found,) = store.account(
            [settle_step(step, outcome, tokens=(tokens, 7, 2, 1), measured=tokens != 40)], 1
        )
        return found.first_input, found.newest_input

    title, *steps = [
        make_step(number, limit(), offer=OFFERS_TOOLS if number else OFFERS_NONE)
        for number in range(5)
    ]
    retry = replace(steps[2], call=bytes(15) + b"r")
    late = replace(title, call=bytes(15) + b"t", identity=bytes(7) + b"t")
    store.account([title, late], 1)
    before = settle(title, 500)
    store.account([*steps, retry], 1)
    settled = [(late, 600), (steps[0], 40), (steps[1], 50), (steps[2], 90), (retry, 70)]

    assert before == (503, 503)
    assert [settle(*each) for each in settled] == [(0, 0), (0, 0), (53, 53), (53, 93), (53, 93)]
    assert settle(steps[3], 20, FAILED) == (53, 23)


# --- conversations that go on leave the requests without a session

STARTS = limit(steps=6, cost=40, ends=True)


def name_call(number: int) -> bytes:
    """A name of which the first half names the conversation that the call begins."""
    return number.to_bytes(CONVERSATION) + bytes((number % 256,)) * CONVERSATION


def start(number: int, prompt: int = 0, reserve: int = 0) -> Step:
    return make_step(prompt or number, STARTS, call=name_call(number), reserve=reserve)


def finish(number: int, outcome: int, cost: int = 0) -> Settlement:
    """The outcome of a request; of `JOINED`, only the conversation is known."""
    call = name_call(number)
    given = call[:CONVERSATION].ljust(len(call), b"\0") if outcome == JOINED else call
    return Settlement(
        make_step(1, STARTS).key, STARTS, given, cost, estimated=cost % 2 > 0, outcome=outcome
    )


@pytest.mark.parametrize("settled", [False, True])
def test_start_leaves_with_its_step_and_cost(store: Driver, settled: bool) -> None:
    store.account([start(1), start(2)], 1)
    if settled:
        store.account([finish(1, SUCCEEDED, 30), finish(2, SUCCEEDED, 4)], 2)

    (after,) = store.account([finish(1, JOINED, 30 if settled else 0)], 3)
    (late,) = store.account([finish(1, SUCCEEDED, 30)], 4)

    assert (after.steps, after.cost, after.reserved) == (1, 4 if settled else 0, 0)
    assert (late.steps, late.cost, late.retry) == (1, 4 if settled else 0, True)


def test_steps_and_cost_never_fall_below_zero(store: Driver) -> None:
    """Also if equal prompts, which count as one step, all go on."""
    store.account([start(number, prompt=9) for number in range(1, 5)], 1)
    store.account([finish(number, SUCCEEDED, 3) for number in (1, 2, 3)], 2)

    joined = store.account([finish(number, JOINED, 5) for number in (1, 2, 3)], 3)
    (withdrawn,) = store.account([finish(4, WITHDRAWN)], 4)

    assert [(standing.steps, standing.cost) for standing in (*joined, withdrawn)] == [
        (0, 4),
        (0, 0),
        (0, 0),
        (0, 0),
    ]


_STARTS = st.lists(
    st.tuples(
        st.sampled_from(["start", "start", "again", "settle", "fail", "withdraw", "join", "join"]),
        st.integers(1, 8),
        st.integers(0, 12),
        st.sampled_from([0, 1, 5_000, 59_999, 60_000, 600_000]),
    ),
    max_size=60,
)


@given(_STARTS)
def test_starts_are_counted_as_in_memory(
    opened: Driver, moves: list[tuple[str, int, int, int]]
) -> None:
    store, memory, now = opened.fresh(), in_memory(), 1_000_000
    outcomes = {"settle": SUCCEEDED, "fail": FAILED, "withdraw": WITHDRAWN, "join": JOINED}

    for move, number, amount, gap in moves:
        now += gap
        prompt = 100 if move == "again" else 0
        asked = (
            finish(number, outcomes[move], amount)
            if move in outcomes
            else start(number, prompt, reserve=amount)
        )
        assert store.account([asked], now) == [memory(asked, now)]
