"""Agents whose history the server keeps, on the real SDKs, through the real Envoy, two Loopguards and Valkey."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
from fake_model import NAME, USER

from tests.support.agents import CHECK, DONE, Gate, again, fresh, same, told
from tests.support.documents import bundle, policy

if TYPE_CHECKING:
    import anthropic
    import openai

POLICIES = bundle(policy("agents", {"pathPrefix": "/"}, similarity="turns", limit_keys=[f"header:{USER}"], session={}))
REPLICAS = 2
Agent = Callable[[str, dict[str, str], Callable[..., str]], Iterator[object]]


def responses_agent(url: str, named: dict[str, str], check: Callable[..., str]) -> Iterator[object]:
    """OpenAI's SDK, Responses: each request continues the one before, and carries only the newest results."""
    import openai

    client = openai.OpenAI(api_key="none", base_url=f"{url}/v1", default_headers=named)
    tools: Any = [{"type": "function", "name": CHECK.tool, "parameters": {"type": "object"}}]
    reply = client.responses.create(model=NAME, input="Tell me when it is done.", tools=tools)
    while True:
        yield reply
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return
        said: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": check()} for call in calls]
        reply = client.responses.create(model=NAME, input=said, previous_response_id=reply.id, tools=tools)


def threads_agent(url: str, named: dict[str, str], check: Callable[..., str]) -> Iterator[object]:
    """Anthropic's SDK and its tool runner, which keeps the conversation in a thread of the server's."""
    import anthropic

    @anthropic.beta_tool(name=CHECK.tool)
    def run(build: int, *, verbose: bool) -> str:  # noqa: ARG001  # what CHECK is called with
        """Check."""
        return check()

    client = anthropic.Anthropic(api_key="none", base_url=url, default_headers=named)
    messages: Any = [{"role": "user", "content": "Tell me when it is done."}]
    yield from client.beta.messages.tool_runner(model=NAME, max_tokens=99, messages=messages, tools=[run])


AGENTS: dict[str, Agent] = {"previous_response_id": responses_agent, "threads": threads_agent}
every_agent = pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)


def play(
    gate: Gate, agent: Agent, named: dict[str, str], check: Callable[..., str]
) -> tuple[list[object], openai.APIStatusError | anthropic.APIStatusError | None]:
    """Run an agent to its end, or to its refusal."""
    import anthropic
    import openai

    turns: list[object] = []
    try:
        for turn in islice(agent(f"http://127.0.0.1:{gate.stack.envoy.port}", named, check), 12):
            turns.append(turn)  # noqa: PERF402  # what came before a refusal is kept
    except (openai.APIStatusError, anthropic.APIStatusError) as refusal:
        return turns, refusal
    return turns, None


@every_agent
def test_a_stuck_agent_is_stopped_whichever_replica_it_meets(gate: Gate, agent: Agent, user: dict[str, str]) -> None:
    """The results of three requests are enough, each of which shows one."""
    gate.model.scripts[user[USER]] = again([CHECK])

    turns, refusal = play(gate, agent, {**user, "x-session-id": "s"}, same)

    assert len(turns) == gate.model.asked[user[USER]] == 3
    assert refusal is not None
    assert refusal.status_code == 429
    assert "3 of the last 3 turns returned the same result" in str(refusal)
    assert sum(replica.metric("requests_total") for replica in gate.stack.replicas) > 0


@every_agent
def test_an_agent_that_gets_on_is_left_alone(gate: Gate, agent: Agent, user: dict[str, str]) -> None:
    """Results that change are progress."""
    gate.model.scripts[user[USER]] = told(*[[CHECK]] * 8, DONE)

    turns, refusal = play(gate, agent, {**user, "x-session-id": "s"}, fresh())

    assert refusal is None
    assert len(turns) == 9
