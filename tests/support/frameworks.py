"""Agents as frameworks run them: each has a task and two tools, returns what the model said last, or raises what stopped it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from fake_model import NAME, USER
from pydantic import SecretStr

from tests.support.sdks import run_node

if TYPE_CHECKING:
    from agents import OpenAIChatCompletionsModel, OpenAIResponsesModel

TASK = "Tell me when it is done."
MOST_TURNS = 20


class Errand(NamedTuple):
    """What an agent is to do for a user: two tools, and the URL of the API without its `/v1`."""

    url: str
    user: str
    check: Callable[[], str]
    ask_colleague: Callable[[], str]


Run: TypeAlias = Callable[[Errand], str]


def run_langchain(errand: Errand) -> str:
    """LangChain's `create_agent`, which is a graph of LangGraph's."""
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model=NAME, base_url=f"{errand.url}/v1", api_key=SecretStr("none"), default_headers={USER: errand.user}, max_retries=2
    )
    agent: Any = create_agent(model, tools=[_document(errand.check, "check"), _document(errand.ask_colleague, "ask_colleague")])
    state = agent.invoke({"messages": [{"role": "user", "content": TASK}]}, {"recursion_limit": 2 * MOST_TURNS})
    return str(state["messages"][-1].content)


def _run_openai_agent(errand: Errand, model: type[OpenAIChatCompletionsModel | OpenAIResponsesModel]) -> str:
    import agents
    import openai

    agents.set_tracing_disabled(disabled=True)
    client = openai.AsyncOpenAI(api_key="none", base_url=f"{errand.url}/v1", default_headers={USER: errand.user})
    tools: Any = [
        agents.function_tool(_document(errand.check, "check")),
        agents.function_tool(_document(errand.ask_colleague, "ask_colleague")),
    ]
    agent = agents.Agent(name="worker", model=model(NAME, client), tools=tools)
    return str(agents.Runner.run_sync(agent, TASK, max_turns=MOST_TURNS).final_output)


def run_openai_agent(errand: Errand) -> str:
    """openai-agents, chat completions."""
    from agents import OpenAIChatCompletionsModel

    return _run_openai_agent(errand, OpenAIChatCompletionsModel)


def run_openai_responses_agent(errand: Errand) -> str:
    """openai-agents, Responses."""
    from agents import OpenAIResponsesModel

    return _run_openai_agent(errand, OpenAIResponsesModel)


def run_pydantic_agent(errand: Errand) -> str:
    """pydantic-ai."""
    import openai
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    client = openai.AsyncOpenAI(api_key="none", base_url=f"{errand.url}/v1", default_headers={USER: errand.user})
    agent = Agent(OpenAIChatModel(NAME, provider=OpenAIProvider(openai_client=client)))
    agent.tool_plain(_document(errand.check, "check"))
    agent.tool_plain(_document(errand.ask_colleague, "ask_colleague"))
    return agent.run_sync(TASK).output


def run_anthropic_runner(errand: Errand) -> str:
    """Anthropic's own tool runner."""
    from anthropic import Anthropic, beta_tool

    client = Anthropic(api_key="none", base_url=errand.url, default_headers={USER: errand.user})
    tools = [beta_tool(_document(errand.check, "check")), beta_tool(_document(errand.ask_colleague, "ask_colleague"))]
    messages: Any = [{"role": "user", "content": TASK}]
    runner = client.beta.messages.tool_runner(
        model=NAME, max_tokens=1024, messages=messages, tools=tools, max_iterations=MOST_TURNS
    )
    last = runner.until_done()
    return "".join([block.text for block in last.content if block.type == "text"])


class NodeError(Exception):
    """What ended a run in JavaScript."""


def run_node_agent(sdk: str, errand: Errand) -> str:
    """An SDK of JavaScript, in a process of its own, whose tools bring back what ours do."""
    results = {"check": errand.check(), "ask_colleague": errand.ask_colleague()}
    answer = run_node("run.mjs", [sdk, errand.url, errand.user, TASK], results)
    if "error" in answer:
        raise NodeError(answer["error"])
    return str(answer["text"])


def _document(tool: Callable[[], str], name: str) -> Callable[[], str]:
    """A tool that frameworks take: they read its name and what it says about itself."""

    def call() -> str:
        return tool()

    call.__name__ = name
    call.__doc__ = f"Tool {name}."
    return call


FRAMEWORKS: dict[str, Run] = {
    "langchain": run_langchain,
    "openai-agents": run_openai_agent,
    "openai-agents, responses": run_openai_responses_agent,
    "pydantic-ai": run_pydantic_agent,
    "anthropic tool runner": run_anthropic_runner,
    "node, openai": partial(run_node_agent, "openai"),
    "node, anthropic": partial(run_node_agent, "anthropic"),
    "node, vercel": partial(run_node_agent, "vercel"),
}
