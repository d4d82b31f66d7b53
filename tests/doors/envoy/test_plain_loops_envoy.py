"""One prompt again and again, without a session's name: the real Envoy, two replicas and Valkey."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from extproc.policy.presets import find_preset
from tests.support.documents import bare_policy, bundle
from tests.support.harness import Stack, envoy_version, eventually
from tests.support.stacks import open_before_model
from tests.support.usage import Model, whole

pytestmark = pytest.mark.skipif(envoy_version() < (1, 38), reason="this Envoy reads no answers: their costs are NOT tested")

PATH = "/v1/chat/completions"
SHARED = 6
"""Steps of requests without a session; a cent for each token that the model is paid for."""


def limited(identity: str, **unnamed: Any) -> dict[str, Any]:  # noqa: ANN401  # keys
    """A policy of session limits, with these for requests without a session."""
    limits = {"max_steps": 16, "prices": {"*": {"input": 0, "output": 10_000}}}
    return bare_policy(identity, f"/{identity}/", limit_keys=["credential"], session_limits=limits, unnamed_limits=unnamed)


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[Stack, Model]]:
    """Envoy before a model, two replicas, Valkey: the preset `sessions`, and limits of what has no session."""
    preset = json.loads(Path(find_preset("sessions")).read_text())
    policies = bundle(preset, limited("steps", max_steps=SHARED), limited("money", max_cost_per_session=3.0))
    with open_before_model(policies, replicas=2) as opened:
        opened[1].reply = whole(object="chat.completion", choices=[], usage={"prompt_tokens": 0, "completion_tokens": 0})
        yield opened


def send(one: Stack, text: str, turns: int = 0, path: str = PATH, key: str = "k") -> int:
    """What becomes of a request that shows this many turns, with an API key and nothing else."""
    messages = [{"role": "user", "content": text}]
    for number in range(turns):
        messages += [{"role": "assistant", "content": f"{text}, {number}"}, {"role": "user", "content": "go on"}]
    return one.post(path, {"model": "m", "max_tokens": 1, "messages": messages}, {"authorization": f"Bearer {key}"}).status


def test_the_preset_ends_a_plain_loop(made: tuple[Stack, Model]) -> None:
    """Whichever replica judges; a program without retries of its own gets a 429."""
    assert [send(made[0], "Fetch the page", key="loop") for _ in range(60)] == [200] * 24 + [429] * 36


def test_the_preset_lets_documents_and_samples_pass(made: tuple[Stack, Model]) -> None:
    """At once, under one key."""
    texts = [f"Section {number}: {number} euros.\n\nWho pays?" for number in range(200)] + ["Name a colour."] * 20
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda text: send(made[0], text, key="batch"), texts))

    assert found == [200] * 220


def test_single_requests_add_up(made: tuple[Stack, Model]) -> None:
    """Different prompts under one key; three retries of each are free."""
    path = f"/steps{PATH}"

    different = [send(made[0], f"Fetch page {number}", path=path, key="varied") for number in range(20)]
    equal = [send(made[0], "Fetch the page", path=path, key="equal") for _ in range(40)]

    assert different == [200] * SHARED + [429] * (20 - SHARED)
    assert equal == [200] * 4 * SHARED + [429] * (40 - 4 * SHARED)


def test_conversations_leave_room_for_others(made: tuple[Stack, Model]) -> None:
    """Far more than the limit begin under one key, four at a time, and each goes on."""
    path = f"/steps{PATH}"

    def run(number: int) -> list[int]:
        return [send(made[0], f"Task {number}", turns, path, "agents") for turns in range(4)]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, range(60)))

    assert found == [[200] * 4] * 60


def test_costs_of_single_requests_add_up(made: tuple[Stack, Model]) -> None:
    """A dollar each; those of conversations that go on are none of them."""
    one, model = made
    path = f"/money{PATH}"
    model.reply = whole(object="chat.completion", choices=[], usage={"prompt_tokens": 0, "completion_tokens": 100})

    def pay(text: str, turns: int = 0) -> int:
        before = one.total("access_log_entries_total", result="taken")
        status = send(one, text, turns, path, "payer")
        if status == 200:
            eventually(lambda: one.total("access_log_entries_total", result="taken") > before, "an entry")
        return status

    assert [pay(f"Task {number}", turns) for number in range(5) for turns in range(2)] == [200] * 10
    assert [pay(f"Fetch page {number}") for number in range(5)] == [200] * 3 + [429] * 2
