"""A header that changes with every request names no session; one that a conversation keeps does, whatever others send."""

from __future__ import annotations

import logging
from itertools import count

import pytest

from extproc.ext_proc.service import Service
from extproc.sessions.changing import MOST_IN_A_ROW
from tests.support.service import make_service, sample
from tests.support.session_limits import ask, limited, status, turns

KEY = "header:x-session-id"


def play(service: Service, names: list[str], team: str = "t", first: int = 1) -> list[int]:
    """What becomes of one conversation, of which each request has another name."""
    return [status(ask(service, turns(first + number), session=name, team=team)) for number, name in enumerate(names)]


def changing(number: int) -> list[str]:
    """This many names."""
    return [f"r{at}" for at in range(number)]


def test_a_header_that_changes_with_every_request_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """From then on its conversation is known by what it shows, and that is counted and logged once."""
    service = make_service(limited(max_steps=20))

    with caplog.at_level(logging.WARNING):
        found = play(service, changing(30), first=0)

    assert found == [200] * 20 + [429] * 10
    assert MOST_IN_A_ROW < 20
    assert sample(service, "session_changing_total", policy="agents", key=KEY) == 1
    assert [line.getMessage() for line in caplog.records if "changes" in line.getMessage()] == [
        f"{KEY} changes with every request of a caller, so it names no session; a default key is left out for that caller"
    ]


def test_no_caller_takes_the_name_of_another_s_sessions() -> None:
    """What one sends says nothing about the header of the others."""
    service = make_service(limited(max_steps=2))
    play(service, changing(20), team="mallory")

    assert play(service, ["s"] * 3) == [200, 200, 429]
    assert sample(service, "session_changing_total", policy="agents", key=KEY) == 1


@pytest.mark.deep
def test_many_conversations_with_a_name_each_stay_what_they_are() -> None:
    """Also if all are equal to the byte, as those of best-of-n, and go on side by side."""
    service = make_service(limited(max_steps=100))

    for number in range(1, 7):
        for run in range(200):
            ask(service, turns(number), session=f"run{run}")

    assert sample(service, "session_changing_total", policy="agents", key=KEY) == 0
    assert len(service.reporter.sessions.copy()) == 100


def test_requests_without_a_history_may_have_a_name_each() -> None:
    """Each is a conversation that begins."""
    service = make_service(limited(max_steps=1))

    assert [status(ask(service, turns(0, user=str(number)), session=name)) for number, name in enumerate(changing(40))] == [
        200
    ] * 40


def test_a_policy_s_own_key_is_only_told_about() -> None:
    """Its operator has said that this is a session."""
    service = make_service(limited(max_steps=1, session={"keys": [KEY]}))

    assert play(service, changing(30)) == [200] * 30
    assert sample(service, "session_changing_total", policy="agents", key=KEY) >= 1
    assert sample(service, "uncounted_total", policy="agents", reason="unnamed") == 0


def test_the_next_key_names_the_session() -> None:
    """What is left out makes way for what the request says elsewhere."""
    service = make_service(limited(max_steps=20))
    numbers = count(1)

    found = [status(ask(service, turns(next(numbers)), session=name, x_session_affinity="s")) for name in changing(40)]

    assert found == [200] * (MOST_IN_A_ROW + 1 + 20) + [429] * (40 - MOST_IN_A_ROW - 21)
