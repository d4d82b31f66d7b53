"""The preset `sessions` ends a loop of one prompt, and lets those through that only look like one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from extproc.ext_proc.service import Service
from extproc.policy.presets import find_preset
from tests.support.budget_policies import CHAT, Clock, chat, serve
from tests.support.messages import body, headers
from tests.support.service import decoded, exchange, headers_of
from tests.support.session_limits import status


@pytest.fixture
def preset() -> tuple[Service, Clock]:
    """The preset as it is, and its clock."""
    return serve(json.loads(Path(find_preset("sessions")).read_text()))


def send(service: Service, content: bytes, key: str = "k") -> int:
    """What becomes of a request with an API key and nothing else."""
    return status(decoded(exchange(service, headers(CHAT, authorization=f"Bearer {key}"), body(content))[-1]))


@pytest.mark.parametrize("changes", [False, True], ids=["equal", "with a seed and attempts"])
def test_a_plain_loop_is_refused(preset: tuple[Service, Clock], changes: bool) -> None:
    """The 25th of a minute and all that follow; another caller goes on."""
    service, clock = preset
    found = []

    for number in range(100):
        content = chat(f"Fetch the page (attempt {number})", seed=number) if changes else chat("Fetch the page")
        found.append(send(service, content))
        clock.now += 2_000

    assert found == [200] * 24 + [429] * 76
    assert send(service, chat("Fetch the page"), key="other") == 200


def test_a_refused_loop_hears_when_it_may_go_on(preset: tuple[Service, Clock]) -> None:
    """By a window, unlike a session that is at its limit."""
    for _ in range(24):
        send(preset[0], chat("Hi"))

    answer = decoded(exchange(preset[0], headers(CHAT, authorization="Bearer k"), body(chat("Hi")))[-1])

    assert headers_of(answer)["X-Fairvisor-Reason"] == "loop_detected"
    assert int(headers_of(answer)["Retry-After"]) > 0


def test_documents_with_one_question_pass(preset: tuple[Service, Clock]) -> None:
    """Each is asked once, by one key, all at once."""
    texts = [f"Section {number}. The supplier pays {number * 7} euros.\n\nWho pays?" for number in range(200)]

    assert [send(preset[0], chat(text)) for text in texts] == [200] * 200


def test_twenty_samples_at_once_pass(preset: tuple[Service, Clock]) -> None:
    """Again a minute later, too."""
    service, clock = preset

    for _ in range(3):
        assert [send(service, chat("Name a colour.")) for _ in range(20)] == [200] * 20
        clock.now += 60_001


@pytest.mark.parametrize("gap", [5, 10, 45])
def test_a_monitor_passes(preset: tuple[Service, Clock], gap: int) -> None:
    """For as long as it asks."""
    service, clock = preset
    found = []

    for _ in range(500):
        found.append(send(service, chat("Still there?")))
        clock.now += gap * 1_000

    assert found == [200] * 500


@pytest.mark.parametrize("task", ["Mend issue {}.", "Look into the queue."], ids=["different tasks", "one task"])
def test_300_agents_of_one_key_pass(preset: tuple[Service, Clock], task: str) -> None:
    """Within an hour, each for some steps, five at a time."""
    service, clock = preset
    found = []

    for start in range(0, 300, 5):
        for steps in range(4):
            for number in range(start, start + 5):
                messages = [{"role": "user", "content": task.format(number)}]
                for step in range(steps):
                    said = f"agent {number}, step {step}"
                    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
                found.append(send(service, json.dumps({"model": "m", "messages": messages}).encode()))
            clock.now += 15_000

    assert found == [200] * 1_200
