"""Agents of every framework whose model never stops: limits of two replicas end their sessions.

The preset `agents` is used with nothing but an API key: each key is a caller, and each run a
conversation.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from fake_model import USER, Answer, Call, Script

from extproc.policy.presets import find_preset
from tests.support.agents import DONE, Gate, again, same
from tests.support.documents import bare_policy, bundle
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

CHECK = Call("check")
STEPS = 4


def limited(identity: str, **limits: Any) -> dict[str, Any]:  # noqa: ANN401  # of a policy
    keys = [f"header:{USER}"]
    limits = {"reject_status": "auto", **limits}
    return bare_policy(
        identity, f"/{identity}/", limit_keys=keys, session={"keys": keys}, session_limits=limits
    )


PRESET: dict[str, Any] = json.loads(Path(find_preset("agents")).read_text())
PRESET["spec"]["selector"]["pathPrefix"] = "/preset"
PRESET["spec"]["session_limits"] = {"max_steps": 9, "reject_status": 400}
for _detector in PRESET["spec"]["loop_detection"]:
    _detector["reject_status"] = 400  # which no SDK retries

REPLICAS = 2
POLICIES = bundle(
    PRESET,
    limited("steps", max_steps=STEPS),
    limited("calls", max_tool_calls=2),
    limited("finish", max_tool_calls=2, max_tool_calls_mode="finish"),
    limited("tool", max_calls_per_tool={"check": 2}),
    limited("loop", loop_detection={"window": 5, "threshold": 3}),
    bare_policy(
        "alone",
        "/alone/",
        limit_keys=["credential"],
        session_limits={"max_steps": STEPS, "reject_status": "auto"},
    ),
)


RUNS: dict[str, Run] = FRAMEWORKS | {
    "anthropic": run_messages_agent,
    "gemini": run_gemini_agent,
    "bedrock": run_bedrock_agent,
    "bedrock, signed": partial(run_bedrock_agent, signature="v4"),
    "ollama": run_ollama_agent,
}

# They declare their tools once, for a thread on the server
THREADS = (
    "anthropic tool runner",
    "node, anthropic",
)

# They send their whole history, and have a key.
SHOWING = [name for name in RUNS if name not in (*THREADS, "bedrock")]

ONE_OF_EACH_API = ("langchain", "openai-agents, responses", "anthropic", "gemini", "ollama")
DECLARING = [name for name in RUNS if name not in (*THREADS, "bedrock, signed")]
# Its model says nothing beside its calls, so its runs are equal; none of them may loop.
SILENT = "openai-agents, responses"


def run(gate: Gate, name: str, policy: str, user: str, script: Script) -> str:
    """The text that an agent's run ends with."""
    gate.model.scripts[user] = script
    return RUNS[name](Errand(f"{gate.url}/{policy}", user, same, lambda: "It is done."))


FOREVER = again([CHECK])


def while_offered(gate: Gate, user: str) -> Script:
    """A model that calls the offered tools in turn, and answers when none is offered."""

    def answer(number: int) -> Answer:
        tools = list_offered(json.loads(gate.model.bodies[user]))
        return [Call(tools[number % len(tools)])] if tools else DONE

    return answer


def list_offered(body: Any) -> list[str]:  # noqa: ANN401  # a request of any API
    choice = body.get("tool_choice", {})
    mode = body.get("toolConfig", {}).get("functionCallingConfig", {}).get("mode")
    if (
        choice == "none"
        or mode == "NONE"
        or (isinstance(choice, dict) and choice.get("type") == "none")
    ):
        return []
    listed = body.get("tools") or body.get("toolConfig", {}).get("tools") or []
    return [str(name) for tool in listed for name in _list_names(tool)]


def _list_names(tool: dict[str, Any]) -> list[str]:
    named = tool.get("functionDeclarations") or [
        tool.get("function") or tool.get("toolSpec") or tool
    ]
    return [one["name"] for one in named]


@pytest.mark.parametrize(
    "name", deepen(RUNS, "langchain", SILENT, "anthropic", "gemini", "bedrock")
)
def test_endless_run_ends_at_its_step_limit(gate: Gate, name: str, user: dict[str, str]) -> None:
    sent, refused = (
        gate.sent(),
        gate.stack.total("session_limits_total", policy="steps", action="reject"),
    )

    with pytest.raises(Exception, match=f"this session has used {STEPS} of its {STEPS} steps"):
        run(gate, name, "steps", user[USER], FOREVER)

    assert gate.model.asked[user[USER]] == STEPS
    assert gate.sent() - sent == STEPS + 1
    assert gate.stack.total("session_limits_total", policy="steps", action="reject") == refused + 1
    assert all(
        replica.metric("requests_total", policy="steps") > 0 for replica in gate.stack.replicas
    )


@pytest.mark.parametrize("name", deepen(SHOWING, "langchain", "anthropic", "gemini"))
def test_unnamed_runs_have_separate_steps(gate: Gate, name: str, user: dict[str, str]) -> None:
    for number in (1, 2):
        with pytest.raises(Exception, match=f"this session has used {STEPS} of its {STEPS} steps"):
            run(gate, name, "alone", user[USER], FOREVER)

        assert gate.model.asked[user[USER]] == number * STEPS


@pytest.mark.parametrize(
    ("name", "policy", "asked", "reason"),
    [
        ("langchain", "calls", 2, "this session has used 2 of its 2 tool calls"),
        ("anthropic", "loop", 3, "the tool check was called 3 times with the same arguments"),
        # A request without tools has none to lose: the run is refused if the model calls one
        # anyway.
        *((name, "finish", 3, "this session has used 3 of its 2 tool calls") for name in THREADS),
        # Bedrock wants the tools of a history declared, and has no way to say that none may be
        # called.
        ("bedrock", "finish", 2, "this session has used 2 of its 2 tool calls"),
    ],
)
def test_run_ends_at_its_limit_of_calls(
    gate: Gate, name: str, policy: str, asked: int, reason: str, user: dict[str, str]
) -> None:
    with pytest.raises(Exception, match=reason):
        run(gate, name, policy, user[USER], FOREVER)

    assert gate.model.asked[user[USER]] == asked


@pytest.mark.parametrize(
    "name", deepen([name for name in DECLARING if name != "bedrock"], *ONE_OF_EACH_API)
)
def test_finish_lets_the_framework_end_normally(
    gate: Gate, name: str, user: dict[str, str]
) -> None:
    said = run(gate, name, "finish", user[USER], while_offered(gate, user[USER]))

    assert said == DONE
    assert gate.model.asked[user[USER]] == 3


@pytest.mark.parametrize("name", deepen(DECLARING, *ONE_OF_EACH_API, "bedrock"))
def test_exhausted_tool_is_no_longer_offered(gate: Gate, name: str, user: dict[str, str]) -> None:
    def answer(_: int) -> Answer:
        tools = list_offered(json.loads(gate.model.bodies[user[USER]]))
        return [CHECK] if "check" in tools else DONE

    said = run(gate, name, "tool", user[USER], answer)

    assert said == DONE
    assert gate.model.asked[user[USER]] == 3
    assert list_offered(json.loads(gate.model.bodies[user[USER]])) == ["ask_colleague"]


def test_retry_of_the_sdk_is_no_step(gate: Gate, user: dict[str, str]) -> None:
    numbers = count()

    def fail_twice(_: int) -> Answer:
        if next(numbers) in (1, 2):
            raise ConnectionAbortedError
        return [CHECK]

    with pytest.raises(Exception, match=f"this session has used {STEPS} of its {STEPS} steps"):
        run(gate, "openai-agents", "steps", user[USER], fail_twice)

    assert gate.model.asked[user[USER]] == STEPS + 2


@pytest.mark.parametrize("name", deepen([*ONE_OF_EACH_API, "bedrock, signed"], "anthropic"))
def test_concurrent_runs_of_two_callers_are_separate(gate: Gate, name: str) -> None:
    keys = [f"sk-{name.replace(' ', '').replace(',', '-')}-{letter}" for letter in "ab"]
    for key in keys:
        gate.model.scripts[key] = FOREVER

    def run(key: str, number: int) -> tuple[int, str]:
        """The number of calls of the tool, and what ended the run."""
        results: list[str] = []

        def check() -> str:
            results.append(
                f"{len(results)} of run {number}"
                if number
                else "no such build: the name is not known here"
            )
            return results[-1]

        with pytest.raises(Exception, match=r".") as ended:
            RUNS[name](Errand(f"{gate.url}/preset", "", check, lambda: "It is done.", key))
        return len(results), str(ended.value)

    numbers = (1, 2) if name == SILENT else (0, 1)
    runs = [(key, number) for number in numbers for key in keys]
    with ThreadPoolExecutor(len(runs)) as pool:
        ends = list(pool.map(run, *zip(*runs, strict=True)))

    for (_, number), (made, said) in zip(runs, ends, strict=True):
        loops = "turns were check with the same input and the same result"
        assert ("used 9 of its 9 steps" if number else loops) in said
        assert made == (9 if number else 7), said
    asked = sum(9 if number else 7 for number in numbers)
    assert [gate.model.asked[key] for key in keys] == [asked] * len(keys)
    assert all(
        replica.metric("requests_total", policy="agents") > 0 for replica in gate.stack.replicas
    )
