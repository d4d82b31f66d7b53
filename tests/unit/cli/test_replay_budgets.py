"""Budgets decide in a log without bodies as live ones did, if the log has the tokens of responses."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from extproc.engine.budget_candidates import BUDGETS
from extproc.engine.settlements import Entry
from extproc.ext_proc.answers.metadata import SESSIONS
from extproc.metrics import Metrics
from extproc.sessions.rates import Usage
from extproc.store.memory import MemoryStore
from tests.support.engine import ANY
from tests.support.recorded import Judged, Recorder, Replay

PRICES: dict[str, Any] = {"unknown_model": {"input": 3, "output": 15}}
TOKENS: dict[str, Any] = {"tokens_per_minute": 12_000, "default_max_completion": 3_000}
DOLLARS: dict[str, Any] = {
    "budget": 0.4,
    "period": "1d",
    "cost_key": "usage:dollars",
    "staged_actions": [{"threshold_percent": 100, "action": "reject"}],
    **PRICES,
}


def limit(algorithm: str, mode: str = "enforce", **config: Any) -> dict[str, Any]:  # noqa: ANN401  # JSON
    """A policy with one rule for each user."""
    rule = {"name": "spent", "limit_keys": ["header:x-user-id"], "algorithm": algorithm, "algorithm_config": config}
    return {"id": mode, "spec": {"selector": ANY, "mode": mode, "rules": [rule]}}


def list_actions(judged: Judged | None) -> list[tuple[str, str]]:
    """What each policy does; how much is used differs by the estimates of open requests, which are made without the body."""
    return [(verdict.policy, verdict.action) for verdict in judged.verdicts] if judged is not None else []


class Clock:
    """The time of service and store."""

    def __init__(self) -> None:
        self.now = 1_763_812_345_000


@pytest.mark.parametrize(
    "policies",
    [
        [limit("token_bucket_llm", **TOKENS)],
        [limit("cost_based", **DOLLARS)],
        [limit("token_bucket_llm", **TOKENS), limit("cost_based", "shadow", **DOLLARS)],
    ],
    ids=["tokens a minute", "dollars a day", "and in shadow"],
)
def test_a_replay_spends_as_live(policies: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses use less than was reserved, and what a refused request had reserved is given back."""
    clock, random = Clock(), Random(7)
    monkeypatch.setattr("extproc.ext_proc.transaction.time", lambda: clock.now / 1000)
    recorder = Recorder(*policies, store=MemoryStore(Metrics(), clock=lambda: clock.now))
    lines = []
    for number in range(120):
        clock.now += random.choice([2_000, 4_000])
        recorder.send({"messages": [{"role": "user", "content": f"task {number}"}]}, x_user_id=f"u{number % 2}")
        end: dict[str, Any] = {}
        reserved = tuple([each for each in json.loads(recorder.metadata.get(SESSIONS, "[]")) if BUDGETS in each])
        if reserved:
            usage = Usage(random.choice([300, 2_000]), random.choice([20, 400]))
            end = {"loop_usage": {"input": usage.input, "output": usage.output}, "status": 200, "duration_ms": 1_000}
            clock.now += 1_000
            recorder.service.settle_entry(
                Entry((), 200, False, 0, 0, "", usage, estimated=False, refused=False, budgets=reserved)
            )
            clock.now -= 1_000
        lines.append(json.dumps({**json.loads(recorder.lines[-1]), **end}))

    replay = Replay(*policies)

    assert [list_actions(found) for found in replay.add(lines)] == [list_actions(judged) for judged in recorder.judged]
    assert replay.problems == []
    assert {verdict.action for judged in recorder.judged for verdict in judged.verdicts} == {"allow", "reject"}
