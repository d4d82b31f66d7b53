"""SDKs and agent programs that send an API key and nothing else, through the real Envoy, two replicas and Valkey.

Nothing is set but a policy. Each key is a caller, and each run a conversation, however they are interleaved.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_model import Call

from extproc.policy.presets import find_preset
from tests.support.agents import Gate, again
from tests.support.documents import bundle
from tests.support.extent import deepen
from tests.support.frameworks import (
    FRAMEWORKS,
    Errand,
    Run,
    run_bedrock_agent,
    run_gemini_agent,
    run_messages_agent,
    run_ollama_agent,
)

STEPS = 9
LOOPED = 7
"""The preset refuses the seventh equal turn, before the steps are used up."""

SILENT = "openai-agents, responses"
"""Here the model says nothing beside its calls, so that runs are equal for as long as they go: none of them loops."""

RUNS: dict[str, Run] = {
    **{name: FRAMEWORKS[name] for name in ("openai-agents", "openai-agents, responses", "pydantic-ai", "langchain")},
    "anthropic": run_messages_agent,
    "google-genai": run_gemini_agent,
    "boto3": partial(run_bedrock_agent, signature="v4"),
    "ollama": run_ollama_agent,
}


PRESET: dict[str, Any] = json.loads(Path(find_preset("agents")).read_text())
PRESET["spec"]["session_limits"] = {"max_steps": STEPS, "reject_status": 400}
for _detector in PRESET["spec"]["loop_detection"]:
    _detector["reject_status"] = 400  # which no SDK retries
POLICIES, REPLICAS = bundle(PRESET), 2


@pytest.mark.parametrize("name", deepen(RUNS, "anthropic"))
def test_each_caller_and_each_conversation_by_itself(gate: Gate, name: str) -> None:
    """Two keys have three runs each of one task, all at once: those that get on use up their steps, one is in a loop."""
    keys = [f"sk-{name.replace(' ', '').replace(',', '-')}-{letter}" for letter in "ab"]
    for key in keys:
        gate.model.scripts[key] = again([Call("check")])

    def run(key: str, number: int) -> tuple[int, str]:
        """How often the tool was called, and what ended the run."""
        results: list[str] = []

        def check() -> str:
            results.append(f"{len(results)} of run {number}" if number else "no such build: the name is not known here")
            return results[-1]

        with pytest.raises(Exception, match=r".") as ended:
            RUNS[name](Errand(gate.url, "", check, lambda: "It is done.", key))
        return len(results), str(ended.value)

    numbers = range(1, 4) if name == SILENT else range(3)
    runs = [(key, number) for number in numbers for key in keys]
    with ThreadPoolExecutor(len(runs)) as pool:
        ends = list(pool.map(run, *zip(*runs, strict=True)))

    for (_, number), (made, said) in zip(runs, ends, strict=True):
        loops = "turns were check with the same input and the same result"
        assert (f"used {STEPS} of its {STEPS} steps" if number else loops) in said
        assert made == (STEPS if number else LOOPED), said
    asked = sum(STEPS if number else LOOPED for number in numbers)
    assert [gate.model.asked[key] for key in keys] == [asked] * len(keys)
    assert all(replica.metric("requests_total", policy="agents") > 0 for replica in gate.stack.replicas)
