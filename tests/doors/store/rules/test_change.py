"""What is written only if nothing else has changed it: the script on real servers, beside a plain reading of it in Python."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.store.rules import read_script
from extproc.store.rules.change import GARBAGE_MS, READ, State, charge, read_usage
from tests.support.servers import REDIS, SERVER, Server, server

Question: TypeAlias = tuple[list[str], tuple[int | bytes, ...]]
NOW, LIFE, ROOM = 1_000_000, 60_000, 100
PUT, KEEP, SEE, CHARGE, PASS = "put", "keep", "see", "charge", "pass"


class Plain:
    """The script in Python, on a dict, one question at a time."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def run(self, questions: Sequence[Question]) -> list[bytes | list[bytes]]:
        """What each question is answered; the values of a conflict without the time."""
        return [self._ask(keys, arguments) for keys, arguments in questions]

    def _ask(self, keys: list[str], arguments: tuple[int | bytes, ...]) -> bytes | list[bytes]:
        now = int(arguments[1])
        found = [self.values.get(key, b"") for key in keys]
        parts = list(zip(keys, found, arguments[2::3], arguments[3::3], arguments[4::3], strict=True)) if now != READ else []
        same = [
            value == old if int(life) >= 0 else int(life) == -1 or read_usage(value, now)[1] <= int(new)
            for _, value, old, new, life in parts
        ]
        if now == READ or not all(same):
            return found
        for key, value, old, new, life in parts:
            if int(life) > 0:
                self.values[key] = bytes(new) if isinstance(new, bytes) else b""
            elif int(life) < -1:
                self.values[key] = charge(value, int(old), 2**52, -int(life), now) or b""
        return b""


@pytest.fixture(scope="module", params=["valkey", "redis"])
def one(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of each kind."""
    if request.param == "redis" and REDIS is None:
        pytest.skip("Debian's redis-server is not installed: run on Valkey alone")
    with server(binary=REDIS if request.param == "redis" and REDIS else SERVER) as made:
        yield made


def run(one: Server, questions: Sequence[Question]) -> list[bytes | list[bytes]]:
    """The same on a server; the arguments stand once if they are the same for all."""
    keys = [key for each, _ in questions for key in each]
    given = {arguments for _, arguments in questions}
    arguments = given.pop() if len(given) == 1 else tuple(word for _, words in questions for word in words)
    with one.client() as client:
        answers = client.eval(read_script("change"), len(keys), *keys, *arguments)
    return [answer if not isinstance(answer, list) else answer[:-1] for answer in answers]


def make_question(values: dict[str, bytes], moves: Sequence[tuple[str, str]], number: int) -> Question:
    """A question that has read these values, and does something with each key; `usage` is an account."""
    state = State(values)
    for key, move in moves:
        if key == "usage":
            state.charge(key, 10, ROOM, LIFE, NOW)
        elif move == PUT:
            state.put(key, b"\1%d" % number, LIFE)
        elif move in (SEE, KEEP):
            state.get(key)
    return list(values), state.list_arguments(NOW)


MOVES = st.lists(st.tuples(st.sampled_from(["a", "b", "usage"]), st.sampled_from([PUT, SEE, PASS])), max_size=4)


@given(st.lists(st.tuples(MOVES, st.integers(0, 3), st.booleans()), min_size=1, max_size=12))
def test_a_server_writes_what_nothing_has_changed(one: Server, asked: list[tuple[list[tuple[str, str]], int, bool]]) -> None:
    """For any questions, some of which have read what has changed since, and some in one command."""
    plain, keys, seen = Plain(), ["a", "b", "usage"], [dict.fromkeys(["a", "b", "usage"], b"")]
    one.client().flushall()
    batch: list[Question] = []
    for number, (moves, ago, waits) in enumerate(asked):
        batch.append(make_question(seen[max(0, len(seen) - 1 - ago)], moves, number))
        if not waits:
            assert run(one, batch) == plain.run(batch)
            batch = []
            seen.append({key: plain.values.get(key, b"") for key in keys})
            assert run(one, [(keys, (3, READ))]) == [[plain.values.get(key, b"") for key in keys]]


def test_all_is_written_or_nothing(one: Server) -> None:
    """One key that has changed keeps the others as they were; a key that there was not is a state, too."""
    one.client().flushall()
    none = {"a": b"", "b": b"", "usage": b""}
    first = make_question(none, [("a", PUT), ("usage", CHARGE)], 1)
    second = make_question(none, [("a", SEE), ("b", PUT), ("usage", CHARGE)], 2)
    third = make_question(none, [("b", PUT), ("usage", CHARGE)], 3)

    written, conflict, beside = run(one, [first, second, third])
    values = [bytes(value) for value in run(one, [(list(none), (3, READ))])[0]]

    assert (written, beside) == (b"", b"")
    assert conflict[:2] == [b"\x011", b""]
    assert values[:2] == [b"\x011", b"\x013"]
    assert struct.unpack(">BBQIQ", values[2])[2:] == (NOW, LIFE, 20)
    assert LIFE < one.client().pttl("a") <= LIFE + GARBAGE_MS


def test_an_account_is_charged_as_long_as_there_is_room(one: Server) -> None:
    """Whoever else has charged it meanwhile: together they never have more."""
    one.client().flushall()
    asked = [
        make_question({f"k{number}": b"", "usage": b""}, [(f"k{number}", PUT), ("usage", CHARGE)], 0) for number in range(12)
    ]

    answers = run(one, asked)

    assert [answer == b"" for answer in answers] == [True] * 10 + [False] * 2


def test_a_first_key_alone_is_changed(one: Server) -> None:
    """While a hash slot moves, a server may have no other."""
    one.client().flushall()
    keys, arguments = make_question({"a": b"", "b": b""}, [("a", PUT), ("b", PUT)], 1)

    assert run(one, [(keys[:1], (2, READ))]) == [[b""]]
    assert run(one, [(keys[:1], arguments)]) == [b""]
    assert run(one, [(keys, (2, READ))]) == [[b"\x011", b""]]
