"""Session limits where no header names a session: each conversation is known by what it shows, and has limits of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from time import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.engine.orders import KILL, ActiveOverride, Overrides, Target
from extproc.engine.settlements import Entry, list_settlements
from extproc.ext_proc.service import Service
from extproc.operator.admin.session_report import describe_session
from extproc.operator.session_rows import merge_sessions
from extproc.sessions.rates import Usage
from tests.support.examples import examples
from tests.support.service import make_service, metadata_of, sample
from tests.support.session_limits import TOOL, ask, limited, status, told
from tests.support.turn_writers import Did, as_anthropic, as_bedrock, as_chat, as_gemini, as_ollama, as_responses

PRICES = {"*": {"input": 1_000_000, "output": 1_000_000}}
WRITERS = [as_chat, as_responses, as_anthropic, as_gemini, as_bedrock, as_ollama]


def write(done: Sequence[Did], writer: Any = as_chat, window: int = 0) -> bytes:  # noqa: ANN401  # of turn_writers
    """The request behind these turns, of which the client sends the newest alone where it keeps a window."""
    return json.dumps({**writer(done[-window:] if window else done), "tools": [TOOL]}).encode()


def do(*steps: object) -> list[Did]:
    """A turn for each, equal where these are."""
    return [Did((("run", {"step": step}),), (f"did {step}",), number=at) for at, step in enumerate(steps, 1)]


def send(service: Service, data: bytes, **named: str) -> int:
    """What becomes of a request that names no session."""
    return status(ask(service, data, session="", **named))


@pytest.mark.parametrize("writer", WRITERS)
def test_a_conversation_has_so_many_steps(writer: Any) -> None:  # noqa: ANN401  # of turn_writers
    """In the form of every API; another conversation of the caller, and the same one of another caller, have their own."""
    service = make_service(limited(max_steps=4))
    done, other = do(*range(9)), do("x", *range(9))

    assert [send(service, write(done[:at], writer)) for at in range(7)] == [200] * 4 + [429] * 3
    assert [send(service, write(other[:at], writer)) for at in range(6)] == [200] * 4 + [429] * 2
    assert [send(service, write(done[:at], writer), team="other") for at in range(6)] == [200] * 4 + [429] * 2
    assert sample(service, "session_unnamed_total", policy="agents", mode="enforce") == 0


_PLANS = st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=8), min_size=1, max_size=8)


@settings(deadline=None, max_examples=examples(100))
@given(plans=_PLANS, most=st.integers(1, 6), random=st.randoms(use_true_random=False))
def test_runs_of_one_task_have_limits_of_their_own(plans: list[list[str]], most: int, random: Random) -> None:
    """Eight at once, equal to the byte until they part, in any order: each has its steps, and not one more."""
    service = make_service(limited(max_steps=most))
    runs = [do(*plan) for plan in plans]
    left = dict.fromkeys(range(len(runs)), 0)
    passed = [0] * len(runs)

    while left:
        number = random.choice(list(left))
        at, run = left[number], runs[number]
        answer = send(service, write(run[:at]))
        passed[number] += answer == 200
        if answer == 429 or at == len(run):
            del left[number]
        else:
            left[number] = at + 1

    assert passed == [min(most, len(run) + 1) for run in runs]


@pytest.mark.parametrize("window", [3, 5, 8])
def test_a_window_of_the_last_messages_is_no_way_out(window: int) -> None:
    """The steps count on, although none of them shows more than the window."""
    service = make_service(limited(max_steps=12))
    done = do(*range(40))

    found = [send(service, write(done[:at], window=window)) for at in range(20)]

    assert found == [200] * 12 + [429] * 8


def test_a_history_that_is_not_known_begins_with_what_it_shows() -> None:
    """Such as after a restart of a replica that counts for itself."""
    done = do(*range(9))

    steps = [send(make_service(limited(max_steps=6)), write(done[:at])) for at in (5, 6)]
    calls = [send(make_service(limited(max_tool_calls=6)), write(done[:at])) for at in (5, 6)]

    assert steps == calls == [200, 429]


def test_a_conversation_that_grew_in_the_dark_does_not_begin_anew() -> None:
    """Turns that Loopguard has not seen count with those that it has, as soon as a request shows them."""
    service = make_service(limited(max_steps=6))
    done = do(*range(9))

    found = [send(service, write(done[:at])) for at in (0, 1, 4, 5, 6)]

    assert found == [200, 200, 200, 200, 429]


def test_retries_are_no_steps() -> None:
    """As in sessions with a name."""
    service = make_service(limited(max_steps=3))
    done = do(*range(9))

    found = [send(service, write(done[:at])) for at in (0, 1, 1, 1, 1, 2, 2, 3, 3)]

    assert found == [200] * 7 + [429] * 2


def test_what_conversations_cost_is_counted_apart() -> None:
    """The access log settles a request with the session that the chain has named."""
    service = make_service(limited(max_cost_per_session=1e4, prices=PRICES))
    first, other = do("x", "y"), do("z", "y")

    for done in (first, other):
        answer = ask(service, write(done[:1]), session="")
        assert status(answer) == 200
        if done is first:
            named = tuple(json.loads(metadata_of(answer)["sessions"]))
            entry = Entry(named, 200, False, 0, 0, "", Usage(20_000, 0), estimated=False, refused=False)
            (settled,) = list_settlements(service.engine, entry)
            service.counting.settle([settled.settlement], lambda _: None)

    assert [send(service, write(done)) for done in (first, other)] == [429, 200]


def test_the_breaker_counts_per_conversation() -> None:
    """Refusals in a row end one, and no other."""
    service = make_service(limited(max_steps=2, circuit_breaker={"consecutive_blocks": 2}))
    done, other = do(*range(9)), do("x", *range(9))

    found = [told(ask(service, write(done[:at]), session=""))["limit"] for at in range(2, 6)]

    assert found == ["max_steps", "max_steps", "killed", "killed"]
    assert send(service, write(other[:1])) == 200


def test_operators_find_a_conversation_and_stop_it() -> None:
    """`/sessions` has its name, by which it is killed."""
    service = make_service(limited(max_steps=9))
    done, other = do(*range(9)), do("x", *range(9))
    for run in (done, other):
        for at in range(3):
            send(service, write(run[:at]))
    rows = merge_sessions(service.reporter.sessions.make_document(shows_callers=False).rows, 0)
    found = [describe_session(row, shows_callers=False) for row in rows]
    assert sorted(row["total_step_count"] for row in found) == [3, 3]
    now = time()
    name = found[0]["session"]
    service.overrides = Overrides([ActiveOverride("o", KILL, Target(session=name), "", now, now + 60, "", "")])

    answers = [ask(service, write(run[:3]), session="") for run in (done, other)]

    assert sorted(status(answer) for answer in answers) == [200, 429]
    (stopped,) = [told(answer) for answer in answers if status(answer) == 429]
    assert "an operator has stopped this session" in stopped["message"]


def test_a_named_session_has_its_own_limits_whatever_it_shows() -> None:
    """Several conversations in it count together, as before."""
    service = make_service(limited(max_steps=4))

    found = [status(ask(service, write(run[:at]))) for at in range(4) for run in (do(1, 2, 3, 4), do("x", 2, 3, 4))]

    assert found == [200] * 2 + [200] * 3 + [429] * 3
