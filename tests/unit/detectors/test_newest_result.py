"""Clients that keep all of their own messages but only the newest result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.looping import encoded
from tests.support.loops import WRITERS
from tests.support.scanning import scan_values
from tests.support.service import make_service
from tests.support.session_limits import ask, limited, status
from tests.support.sessions import STUCK, agents, send, send_all
from tests.support.turn_writers import Did, Writer, as_chat

WORK = [Did((("read", {"file": name}),), (f"text of {name}",)) for name in "ab"]


def write(done: Sequence[Did], writer: Writer = as_chat) -> dict[str, Any]:
    """The request after these turns, with only the newest result."""
    told = [turn._replace(number=number, thought=turn.thought or f"Thought {number}.") for number, turn in enumerate(done, 1)]
    body = writer([*[turn._replace(results=()) for turn in told[:-1]], *told[-1:]])
    if "messages" in body:
        body["messages"] = [message for message in body["messages"] if message != {"role": "user", "content": ""}]
    return body


def list_requests(turns: Sequence[Did], writer: Writer = as_chat) -> list[bytes]:
    return [encoded(write(turns[:count], writer)) for count in range(len(turns) + 1)]


def read_files(count: int, start: int = 0) -> list[Did]:
    return [Did((("read", {"file": f"f{number}"}),), (f"text {number}",)) for number in range(start, start + count)]


@pytest.mark.parametrize("shape", WRITERS)
def test_loop_with_only_newest_result_is_refused(shape: str) -> None:
    service = make_service(agents(session=None))

    answers = send_all(service, list_requests([*WORK, *[STUCK] * 6], WRITERS[shape]))

    assert answers == [200] * 5 + [429] * 4


@pytest.mark.parametrize("shape", ["chat", "text, react"])
def test_work_with_only_newest_result_passes(shape: str) -> None:
    service = make_service(agents(session=None))

    assert send_all(service, list_requests(read_files(12), WRITERS[shape])) == [200] * 13


def write_in_parts(rounds: int) -> bytes:
    """A chat with five messages of the assistant before each call, and only the newest result."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Fix it."}]
    for at in range(rounds):
        messages += [{"role": "assistant", "content": f"Part {part} of {at}."} for part in range(5)]
        call = {"id": f"c{at}", "type": "function", "function": {"name": "run", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    if rounds:
        messages.append({"role": "tool", "tool_call_id": f"c{rounds - 1}", "content": "3 failed"})
    return encoded({"messages": messages})


def test_loop_with_six_messages_per_answer_is_refused() -> None:
    service = make_service(agents(session=None))

    answers = send_all(service, [write_in_parts(rounds) for rounds in range(6)])

    assert answers == [200] * 3 + [429] * 3


@pytest.mark.parametrize("step", [2, 3])
def test_loop_is_refused_if_some_requests_are_missing(step: int) -> None:
    """Between two requests the client adds up to six messages, and it clears older results."""
    service = make_service(agents(session=None))
    turns = [STUCK._replace(results=("[cleared]",), thought=f"Thought {number}.") for number in range(5 * step)]

    bodies = [
        as_chat([*turns[: end - 1], STUCK._replace(thought=f"Thought {end - 1}.")]) for end in range(step, 5 * step + 1, step)
    ]
    answers = send_all(service, [encoded(body) for body in bodies])

    assert answers == [200] * 2 + [429] * 3


def write_parallel(rounds: int, *, interleaved: bool) -> bytes:
    """Rounds of eight parallel calls, each followed by its output or all outputs at the end; older outputs are cleared."""
    items: list[dict[str, Any]] = [{"role": "user", "content": "Fix it."}]
    for at in range(rounds):
        for call in range(8):
            made = {"type": "function_call", "call_id": f"c{at}-{call}", "name": "run", "arguments": json.dumps({"n": call})}
            text = f"error: part {call} failed" if at == rounds - 1 else "[cleared]"
            items += [made, {"type": "function_call_output", "call_id": f"c{at}-{call}", "output": text}]
    if not interleaved:
        items = sorted(items[1:], key=lambda item: (item["call_id"].partition("-")[0], item["type"] != "function_call"))
        items = [{"role": "user", "content": "Fix it."}, *items]
    return encoded({"input": items})


@pytest.mark.parametrize("interleaved", [False, True])
def test_loop_of_eight_parallel_calls_is_refused(interleaved: bool) -> None:  # a parameter
    service = make_service(agents(session=None))

    answers = send_all(service, [write_parallel(rounds, interleaved=interleaved) for rounds in range(4)])

    assert answers == [200] * 3 + [429]


def test_requests_that_begin_midway_have_no_parent() -> None:
    service = make_service(agents(session=None))
    begun = [[*read_files(3, 10 * number), STUCK] for number in range(9)]

    assert send_all(service, list_requests([])) == [200]
    assert [send(service, encoded(write(turns))) for turns in begun] == [200] * 9


def test_scan_follows_clients_with_newest_result(tmp_path: Path) -> None:
    (run,) = scan_values(tmp_path, [json.loads(body) for body in list_requests([*WORK, *[STUCK] * 6])]).runs

    assert [(loop.rule, loop.begins, loop.ends) for loop in run.loops] == [("repeat", 3, 9)]


STEPS = {
    "whole history": ([encoded(as_chat(read_files(count))) for count in range(7)], 4),
    "newest result": (list_requests(read_files(6)), 4),
    "a jump of three turns": ([encoded(as_chat(read_files(count))) for count in (0, 1, 4, 5, 6)], 2),
}


@pytest.mark.parametrize("client", STEPS)
def test_session_steps_count_requests_of_any_client(client: str) -> None:
    """Consecutive messages of the assistant are one turn of a history; each request is one step."""
    bodies, passed = STEPS[client]
    service = make_service(limited(max_steps=4))

    answers = [status(ask(service, body, session="")) for body in bodies]

    assert answers == [200] * passed + [429] * (len(bodies) - passed)
