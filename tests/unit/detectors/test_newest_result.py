"""Clients that keep all of their own messages and only the newest result, through the whole service."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.scanning import scan_values
from tests.support.service import make_service
from tests.support.session_limits import ask, limited, status
from tests.support.sessions import STUCK, agents, send, send_all
from tests.support.turn_writers import SHAPES, STYLES, Did, Writer, as_chat, as_text

WORK = [Did((("read", {"file": name}),), (f"text of {name}",)) for name in "ab"]
TEXTS: dict[str, Writer] = {
    f"text, {name}": lambda turns, style=style: as_text(turns, style)  # type: ignore[misc]
    for name, style in STYLES.items()
}
WRITERS: dict[str, Writer] = {**SHAPES, **TEXTS}


def write(done: Sequence[Did], writer: Writer = as_chat) -> dict[str, Any]:
    """The request after these turns; each has a thought of its own."""
    told = [turn._replace(number=number, thought=turn.thought or f"Thought {number}.") for number, turn in enumerate(done, 1)]
    body = writer([*[turn._replace(results=()) for turn in told[:-1]], *told[-1:]])
    if "messages" in body:
        body["messages"] = [message for message in body["messages"] if message != {"role": "user", "content": ""}]
    return body


def list_requests(turns: Sequence[Did], writer: Writer = as_chat, step: int = 1) -> list[bytes]:
    """The requests after no turn, after `step` turns, and so on."""
    return [json.dumps(write(turns[:count], writer)).encode() for count in range(0, len(turns) + 1, step)]


def read_files(count: int, start: int = 0) -> list[Did]:
    """Turns of an agent at work."""
    return [Did((("read", {"file": f"f{number}"}),), (f"text {number}",)) for number in range(start, start + count)]


@pytest.mark.parametrize("shape", WRITERS)
def test_loop_with_only_newest_result_is_refused(shape: str) -> None:
    """Each request shows one result, and only the chain knows those before it."""
    service = make_service(agents(session=None))

    answers = send_all(service, list_requests([*WORK, *[STUCK] * 6], WRITERS[shape]))

    assert answers == [200] * 5 + [429] * 4


@pytest.mark.parametrize("shape", WRITERS)
def test_work_with_only_newest_result_passes(shape: str) -> None:
    """Nothing repeats."""
    service = make_service(agents(session=None))

    assert send_all(service, list_requests(read_files(12), WRITERS[shape])) == [200] * 13


def test_side_by_side_runs_with_newest_result_pass() -> None:
    """Eight that are equal for three turns, and then part: none is taken for another."""
    service = make_service(agents(session=None))
    runs = [list_requests([*read_files(3), *read_files(8, 100 * run)]) for run in range(8)]

    assert {send(service, body) for bodies in zip(*runs, strict=True) for body in bodies} == {200}


def write_in_parts(rounds: int) -> bytes:
    """A chat in which the assistant speaks five times before each call, and only the newest result stays."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Fix it."}]
    for at in range(rounds):
        messages += [{"role": "assistant", "content": f"Part {part} of {at}."} for part in range(5)]
        call = {"id": f"c{at}", "type": "function", "function": {"name": "run", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    if rounds:
        messages.append({"role": "tool", "tool_call_id": f"c{rounds - 1}", "content": "3 failed"})
    return json.dumps({"model": "m", "messages": messages}).encode()


def test_loop_with_six_messages_per_answer_is_refused() -> None:
    """Each message has a link, and the request before stands six links back."""
    service = make_service(agents(session=None))

    answers = send_all(service, [write_in_parts(rounds) for rounds in range(6)])

    assert answers == [200] * 3 + [429] * 3


@pytest.mark.parametrize("step", [2, 3])
def test_loop_is_refused_where_some_requests_are_not_seen(step: int) -> None:
    """Between two requests the client adds up to six messages, and it clears older results."""
    service = make_service(agents(session=None))
    turns = [STUCK._replace(results=("[cleared]",), thought=f"Thought {number}.") for number in range(5 * step)]

    bodies = [
        as_chat([*turns[: end - 1], STUCK._replace(thought=f"Thought {end - 1}.")]) for end in range(step, 5 * step + 1, step)
    ]
    answers = send_all(service, [json.dumps(body).encode() for body in bodies])

    assert answers == [200] * 2 + [429] * 3


def write_parallel(rounds: int, *, interleaved: bool) -> bytes:
    """Rounds of eight calls at once, each followed by its output, or all outputs at the end; older outputs are cleared."""
    items: list[dict[str, Any]] = [{"role": "user", "content": "Fix it."}]
    for at in range(rounds):
        for call in range(8):
            made = {"type": "function_call", "call_id": f"c{at}-{call}", "name": "run", "arguments": json.dumps({"n": call})}
            text = f"error: part {call} failed" if at == rounds - 1 else "[cleared]"
            items += [made, {"type": "function_call_output", "call_id": f"c{at}-{call}", "output": text}]
    if not interleaved:
        items = sorted(items[1:], key=lambda item: (item["call_id"].partition("-")[0], item["type"] != "function_call"))
        items = [{"role": "user", "content": "Fix it."}, *items]
    return json.dumps({"model": "m", "input": items}).encode()


@pytest.mark.parametrize("interleaved", [False, True])
def test_loop_of_eight_parallel_calls_is_refused(interleaved: bool) -> None:  # a parameter
    """Adjacent calls are one link; with outputs between them, the request before stands eight links back."""
    service = make_service(agents(session=None))

    answers = send_all(service, [write_parallel(rounds, interleaved=interleaved) for rounds in range(4)])

    assert answers == [200] * 3 + [429]


def test_many_words_before_the_first_request_pass() -> None:
    """Requests that begin in the middle, with the same first words and other histories, have no parent."""
    service = make_service(agents(session=None))
    begun = [[*read_files(3, 10 * number), STUCK] for number in range(9)]

    assert send_all(service, list_requests([])) == [200]
    assert [send(service, json.dumps(write(turns)).encode()) for turns in begun] == [200] * 9


def test_scan_follows_clients_with_newest_result(tmp_path: Path) -> None:
    """A log of their requests is one run, and its loop is found."""
    (run,) = scan_values(tmp_path, [json.loads(body) for body in list_requests([*WORK, *[STUCK] * 6])]).runs

    assert [(loop.rule, loop.begins, loop.ends) for loop in run.loops] == [("repeat", 3, 9)]


STEPS = {
    "whole history": ([json.dumps(as_chat(read_files(count))).encode() for count in range(7)], 4),
    "newest result": (list_requests(read_files(6)), 4),
    "a jump of three turns": ([json.dumps(as_chat(read_files(count))).encode() for count in (0, 1, 4, 5, 6)], 2),
}
"""Requests, and how many of them pass with four steps each."""


@pytest.mark.parametrize("client", STEPS)
def test_steps_of_session_limits_by_client(client: str) -> None:
    """Consecutive messages of the assistant are one turn in what a history shows; each request is one step."""
    bodies, passed = STEPS[client]
    service = make_service(limited(max_steps=4))

    answers = [status(ask(service, body, session="")) for body in bodies]

    assert answers == [200] * passed + [429] * (len(bodies) - passed)
