"""A header that changes with every request names no session, for the callers who send it so."""

from __future__ import annotations

import logging

import pytest

from extproc.ext_proc.service import Service
from extproc.sessions.changing import MOST_IN_A_ROW
from tests.support.service import make_service, sample
from tests.support.session_limits import ask, limited, status, turns

KEY = "header:x-session-id"


def play(service: Service, names: list[str], first: int = 1, **more: str) -> list[int]:
    return [status(ask(service, turns(first + number), session=name, **more)) for number, name in enumerate(names)]


def changing(number: int) -> list[str]:
    return [f"r{at}" for at in range(number)]


def test_header_that_changes_with_every_request_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    service = make_service(limited(max_steps=20))

    with caplog.at_level(logging.WARNING):
        found = play(service, changing(30), first=0)
    other = play(service, ["s"] * 21, team="other")

    assert MOST_IN_A_ROW < 20
    assert found == [200] * 20 + [429] * 10
    assert other == [200] * 20 + [429]
    assert sample(service, "session_changing_total", policy="agents", key=KEY) == 1
    assert [line.getMessage() for line in caplog.records if "changes" in line.getMessage()] == [
        f"{KEY} changes with every request of a caller, so it names no session; a default key is left out for that caller"
    ]


@pytest.mark.deep
def test_many_named_conversations_are_not_taken_for_changing() -> None:
    service = make_service(limited(max_steps=100))

    for number in range(1, 7):
        for run in range(200):
            ask(service, turns(number), session=f"run{run}")

    assert sample(service, "session_changing_total", policy="agents", key=KEY) == 0
    assert len(service.reporter.sessions.copy()) == 100


def test_requests_without_history_may_each_have_a_name() -> None:
    service = make_service(limited(max_steps=1))

    found = [status(ask(service, turns(0, user=name), session=name)) for name in changing(40)]

    assert found == [200] * 40


def test_policy_key_that_changes_is_reported_and_used() -> None:
    service = make_service(limited(max_steps=1, session={"keys": [KEY]}))

    assert play(service, changing(30)) == [200] * 30
    assert sample(service, "session_changing_total", policy="agents", key=KEY) >= 1
    assert sample(service, "uncounted_total", policy="agents", reason="unnamed") == 0


def test_next_key_names_the_session() -> None:
    service = make_service(limited(max_steps=20))

    found = play(service, changing(40), x_session_affinity="s")

    assert found == [200] * (MOST_IN_A_ROW + 1 + 20) + [429] * (40 - MOST_IN_A_ROW - 21)
