"""The tool calls that a ledger counts, whatever clients do to ids and histories."""

import re
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from extproc.request.document import Document
from extproc.sessions.history import read_tool_calls
from extproc.store.rules.session import LIMITS as LIMITS_BY_PLACE, RECORD
from tests.support.examples import examples
from tests.support.ledger import limit
from tests.support.model_requests import BODIES
from tests.support.records import replace
from tests.support.session_calls import MOVES, TURNS, Client, Move, follow, in_memory, make_request

WITH_IDS = ("anthropic", "bedrock", "chat", "responses")
WITHOUT_IDS = ("gemini", "ollama")


def number_calls(moves: Sequence[Move]) -> list[Move]:
    """The same where no two calls are equal."""
    return [
        move._replace(
            calls=tuple(
                (tool, {"at": at, "place": place}) for place, (tool, _) in enumerate(move.calls)
            )
        )
        for at, move in enumerate(moves)
    ]


SEEDS = st.sampled_from([0, 0, 7])


@pytest.mark.parametrize("shape", WITH_IDS)
@settings(max_examples=examples(60))
@given(
    st.lists(
        st.builds(
            Move, TURNS, st.sampled_from([-1, -1, -1, 0, 1, 2]), st.sampled_from([0, 0, 0, 1, 3])
        ),
        max_size=25,
    ),
    st.integers(1, 5),
    st.integers(0, 2),
    SEEDS,
)
def test_calls_with_stable_ids_are_counted_once(
    shape: str, moves: list[Move], most: int, first: int, seed: int
) -> None:
    """Also if a history lacks turns, is condensed, shortened, sent again or reordered."""
    client = Client(
        shape, ids="last", most_turns=most if most < 5 else 10**9, first_turns=first, seed=seed
    )

    for counted, made in follow(client, moves, in_memory()):
        assert counted == made


@pytest.mark.parametrize("shape", WITH_IDS + WITHOUT_IDS)
@settings(max_examples=examples(60))
@given(MOVES, SEEDS)
def test_history_with_new_ids_is_counted_once(shape: str, moves: list[Move], seed: int) -> None:
    """Also equal calls in any turns; the first turn is not sent again before the second."""
    first = next((place for place, move in enumerate(moves) if move.calls), len(moves))
    moves = [*moves[: first + 1], Move((("read", {}),)), *moves[first + 1 :]]

    for counted, made in follow(Client(shape, ids="anew", seed=seed), moves, in_memory()):
        assert counted == made


@pytest.mark.parametrize("shape", WITH_IDS + WITHOUT_IDS)
@settings(max_examples=examples(60))
@given(MOVES, st.integers(2, 6), SEEDS)
def test_newest_turns_with_new_ids_are_counted_once(
    shape: str, moves: list[Move], most: int, seed: int
) -> None:
    """Where the oldest ones are gone, as long as no two calls are equal."""
    moves = number_calls([move for move in moves if move.calls])

    for counted, made in follow(
        Client(shape, ids="anew", most_turns=most, seed=seed), moves, in_memory()
    ):
        assert counted == made


@pytest.mark.parametrize("shape", ["chat", "gemini"])
@pytest.mark.parametrize("most", [2, 6, 12])
@pytest.mark.parametrize("kinds", [1, 4, 30])
def test_equal_calls_with_new_ids_are_counted_roughly(shape: str, most: int, kinds: int) -> None:
    """Without the oldest turns, calls do not count again at each request; rare ones are exact."""
    order = Random(kinds)
    moves = [Move((("read", {"a": order.randrange(kinds)}),)) for _ in range(60)]

    counted, made = follow(Client(shape, ids="anew", most_turns=most), moves, in_memory())[-1]

    assert counted <= made
    assert kinds < 30 or abs(counted - made) <= 0.2 * made


def read_body(name: str) -> tuple[bytes, bytes]:
    text = BODIES[name].decode()
    ids = {
        found
        for _, found in re.findall(
            r'"(id|tool_use_id|call_id|tool_call_id|toolUseId)": ?"([^"]+)"', text
        )
    }
    again = text
    for number, known in enumerate(sorted(ids)):
        again = again.replace(f'"{known}"', f'"anew_{number}"')
    return text.encode(), again.encode()


@pytest.mark.parametrize(
    "name",
    [
        *(
            "anthropic_cycle",
            "anthropic_image_result",
            "anthropic_stuck",
            "chat_custom_tool",
            "chat_polling",
            "chat_stuck",
        ),
        "responses_stuck",
    ],
)
def test_histories_of_sdks_are_counted_once(name: str) -> None:
    bodies = read_body(name)
    shown = len(read_tool_calls(Document(bodies[0])).records) // RECORD
    ask = in_memory()

    counted = [
        ask(make_request(body, number), number).tool_calls
        for number, body in enumerate([*bodies, *bodies])
    ]

    assert bodies[0] != bodies[1]
    assert counted == [shown] * 4


@pytest.mark.slow
def test_two_agents_of_a_session_are_both_counted() -> None:
    parent, child = Client("chat", ids="last"), Client("chat", ids="last", first_id=1_000)
    ask, counted = in_memory(), 0
    for at in range(300):
        for client in (parent, child) if at % 40 == 0 else (child,):
            request = make_request(
                client.send(Move((("read", {"at": at % 7}),))), at * 2 + (client is child)
            )
            counted = ask(request, 1_000 + at).tool_calls

    assert counted == parent.made + child.made == 308


def test_runs_with_equal_first_calls_count_each() -> None:
    ask, counted = in_memory(), []
    for run in range(5):
        client = Client("chat", ids="last", first_id=run * 10)
        counted += [ask(make_request(client.send(Move((("status", {}),))), run), run).tool_calls]

    assert counted == [1, 2, 3, 4, 5]


def test_loops_are_found_once_with_ids_made_anew() -> None:
    ask, found = in_memory(), []
    client = Client("chat", ids="anew")
    for number in range(1, 6):
        step = make_request(client.send(Move((("read", {"a": number // 3}),))), number)
        found.append(ask(replace(step, limits=limit(window=9, threshold=3)), number).limit)

    assert [LIMITS_BY_PLACE[index] for index in found] == ["", "", "", "", "loop_detection"]
