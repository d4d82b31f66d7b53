"""Clients that keep all of their own messages but only the newest result."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.loops import WRITERS
from tests.support.messages import encoded
from tests.support.scanning import scan_values
from tests.support.service import make_service, status
from tests.support.session_limits import ask, limited
from tests.support.sessions import STUCK, agents, send_all
from tests.support.turn_writers import Did, Writer, as_chat

WORK = [Did((("read", {"file": name}),), (f"text of {name}",)) for name in "ab"]


def write(done: Sequence[Did], writer: Writer = as_chat) -> dict[str, Any]:
    """The request after these turns, with only the newest result."""
    told = [
        turn._replace(number=number, thought=turn.thought or f"Thought {number}.")
        for number, turn in enumerate(done, 1)
    ]
    body = writer([*[turn._replace(results=()) for turn in told[:-1]], *told[-1:]])
    if "messages" in body:
        body["messages"] = [
            message for message in body["messages"] if message != {"role": "user", "content": ""}
        ]
    return body


def list_requests(turns: Sequence[Did], writer: Writer = as_chat) -> list[bytes]:
    return [encoded(write(turns[:count], writer)) for count in range(len(turns) + 1)]


def read_files(count: int, start: int = 0) -> list[Did]:
    return [
        Did((("read", {"file": f"f{number}"}),), (f"text {number}",))
        for number in range(start, start + count)
    ]


def write_in_parts(rounds: int) -> bytes:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Fix it."}]
    for at in range(rounds):
        messages += [{"role": "assistant", "content": f"Part {part} of {at}."} for part in range(5)]
        call = {"id": f"c{at}", "type": "function", "function": {"name": "run", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    if rounds:
        messages.append({"role": "tool", "tool_call_id": f"c{rounds - 1}", "content": "3 failed"})
    return encoded({"messages": messages})


def write_parallel(rounds: int, *, interleaved: bool) -> bytes:
    """Rounds of eight parallel calls, each with its output or all outputs at the end.

    Older outputs are cleared.
    """
    items: list[dict[str, Any]] = [{"role": "user", "content": "Fix it."}]
    for at in range(rounds):
        for call in range(8):
            made = {
                "type": "function_call",
                "call_id": f"c{at}-{call}",
                "name": "run",
                "arguments": json.dumps({"n": call}),
            }
            text = f"error: part {call} failed" if at == rounds - 1 else "[cleared]"
            items += [
                made,
                {"type": "function_call_output", "call_id": f"c{at}-{call}", "output": text},
            ]
    if not interleaved:
        items = sorted(
            items[1:],
            key=lambda item: (item["call_id"].partition("-")[0], item["type"] != "function_call"),
        )
        items = [{"role": "user", "content": "Fix it."}, *items]
    return encoded({"input": items})


def skip_requests(step: int) -> list[bytes]:
    """Between two requests the client adds up to six messages, and it clears older results."""
    turns = [
        STUCK._replace(results=("[cleared]",), thought=f"Thought {number}.")
        for number in range(5 * step)
    ]
    return [
        encoded(as_chat([*turns[: end - 1], STUCK._replace(thought=f"Thought {end - 1}.")]))
        for end in range(step, 5 * step + 1, step)
    ]


BEGUN = [encoded(write([*read_files(3, 10 * number), STUCK])) for number in range(9)]
CLIENTS: dict[str, tuple[list[bytes], list[int]]] = {
    **{
        f"a loop, {name}": (list_requests([*WORK, *[STUCK] * 6], writer), [200] * 5 + [429] * 4)
        for name, writer in WRITERS.items()
        if name != "observed"  # whose observations stay
    },
    **{
        f"work, {name}": (list_requests(read_files(12), WRITERS[name]), [200] * 13)
        for name in ("chat", "text, react")
    },
    "six messages for each answer": (
        [write_in_parts(rounds) for rounds in range(6)],
        [200] * 3 + [429] * 3,
    ),
    **{
        f"one request in {step} is seen": (skip_requests(step), [200] * 2 + [429] * 3)
        for step in (2, 3)
    },
    **{
        f"eight parallel calls, {'interleaved' if mixed else 'apart'}": (
            [write_parallel(rounds, interleaved=mixed) for rounds in range(4)],
            [200] * 3 + [429],
        )
        for mixed in (False, True)
    },
    "requests that begin midway": ([*list_requests([]), *BEGUN], [200] * 10),
}


@pytest.mark.parametrize(("requests", "answers"), CLIENTS.values(), ids=CLIENTS)
def test_loop_of_client_with_newest_result_is_refused(
    requests: list[bytes], answers: list[int]
) -> None:
    assert send_all(make_service(agents(session=None)), requests) == answers


def test_scan_follows_clients_with_newest_result(tmp_path: Path) -> None:
    (run,) = scan_values(
        tmp_path, [json.loads(body) for body in list_requests([*WORK, *[STUCK] * 6])]
    ).runs

    assert [(loop.rule, loop.begins, loop.ends) for loop in run.loops] == [("repeat", 3, 9)]


STEPS = {
    "whole history": ([encoded(as_chat(read_files(count))) for count in range(7)], 4),
    "newest result": (list_requests(read_files(6)), 4),
    "a jump of three turns": (
        [encoded(as_chat(read_files(count))) for count in (0, 1, 4, 5, 6)],
        2,
    ),
}


@pytest.mark.parametrize("client", STEPS)
def test_session_steps_count_requests_of_any_client(client: str) -> None:
    """Consecutive messages of the assistant are one turn of a history; each request is one step."""
    bodies, passed = STEPS[client]
    service = make_service(limited(max_steps=4))

    answers = [status(ask(service, body, session="")) for body in bodies]

    assert answers == [200] * passed + [429] * (len(bodies) - passed)
