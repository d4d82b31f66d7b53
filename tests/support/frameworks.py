"""Agents run by frameworks.

Each has a task and two tools, returns the model's last words, or raises the refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from fake_model import NAME, USER
from pydantic import SecretStr
from tool_agents import Job, messages_agent

from tests.support.sdks import open_bedrock, run_node

if TYPE_CHECKING:
    from agents import OpenAIChatCompletionsModel, OpenAIResponsesModel

TASK = "Tell me when it is done."
MOST_TURNS = 20


class Errand(NamedTuple):
    """A task of an agent.

    Attributes:
        url: the API's URL without `/v1`.
        user: the user, empty for a caller known by its key alone.
        check: a tool.
        ask_colleague: a second tool.
        key: API key.
    """

    url: str
    user: str
    check: Callable[[], str]
    ask_colleague: Callable[[], str]
    key: str = "none"

    @property
    def headers(self) -> dict[str, str]:
        return {USER: self.user} if self.user else {}


Run: TypeAlias = Callable[[Errand], str]


def run_langchain(errand: Errand) -> str:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model=NAME,
        base_url=f"{errand.url}/v1",
        api_key=SecretStr(errand.key),
        default_headers=errand.headers,
        max_retries=2,
    )
    agent: Any = create_agent(
        model,
        tools=[_document(errand.check, "check"), _document(errand.ask_colleague, "ask_colleague")],
    )
    state = agent.invoke(
        {"messages": [{"role": "user", "content": TASK}]}, {"recursion_limit": 2 * MOST_TURNS}
    )
    return str(state["messages"][-1].content)


def _run_openai_agent(
    errand: Errand, model: type[OpenAIChatCompletionsModel | OpenAIResponsesModel]
) -> str:
    import agents
    import openai

    agents.set_tracing_disabled(disabled=True)
    client = openai.AsyncOpenAI(
        api_key=errand.key, base_url=f"{errand.url}/v1", default_headers=errand.headers
    )
    tools: Any = [
        agents.function_tool(_document(errand.check, "check")),
        agents.function_tool(_document(errand.ask_colleague, "ask_colleague")),
    ]
    agent = agents.Agent(name="worker", model=model(NAME, client), tools=tools)
    return str(agents.Runner.run_sync(agent, TASK, max_turns=MOST_TURNS).final_output)


def run_openai_agent(errand: Errand) -> str:
    from agents import OpenAIChatCompletionsModel

    return _run_openai_agent(errand, OpenAIChatCompletionsModel)


def run_openai_responses_agent(errand: Errand) -> str:
    from agents import OpenAIResponsesModel

    return _run_openai_agent(errand, OpenAIResponsesModel)


def run_pydantic_agent(errand: Errand) -> str:
    import openai
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    client = openai.AsyncOpenAI(
        api_key=errand.key, base_url=f"{errand.url}/v1", default_headers=errand.headers
    )
    agent = Agent(OpenAIChatModel(NAME, provider=OpenAIProvider(openai_client=client)))
    agent.tool_plain(_document(errand.check, "check"))
    agent.tool_plain(_document(errand.ask_colleague, "ask_colleague"))
    return agent.run_sync(TASK).output


def run_anthropic_runner(errand: Errand) -> str:
    from anthropic import Anthropic, beta_tool

    client = Anthropic(api_key=errand.key, base_url=errand.url, default_headers=errand.headers)
    tools = [
        beta_tool(_document(errand.check, "check")),
        beta_tool(_document(errand.ask_colleague, "ask_colleague")),
    ]
    messages: Any = [{"role": "user", "content": TASK}]
    runner = client.beta.messages.tool_runner(
        model=NAME, max_tokens=1024, messages=messages, tools=tools, max_iterations=MOST_TURNS
    )
    last = runner.until_done()
    return "".join([block.text for block in last.content if block.type == "text"])


def run_gemini_agent(errand: Errand) -> str:
    from google import genai
    from google.genai import types

    def check() -> str:
        return errand.check()

    def ask_colleague() -> str:
        return errand.ask_colleague()

    options = types.HttpOptions(base_url=errand.url, headers=errand.headers)
    client = genai.Client(api_key=errand.key, http_options=options)
    calling = types.AutomaticFunctionCallingConfig(maximum_remote_calls=20)
    config = types.GenerateContentConfig(
        tools=[check, ask_colleague], automatic_function_calling=calling
    )
    return (
        client.models.generate_content(model=NAME, contents="Is it done?", config=config).text or ""
    )


def run_bedrock_agent(errand: Errand, signature: str | None = None) -> str:
    import botocore

    client = open_bedrock(
        errand.url,
        errand.headers,
        errand.key,
        signature_version=signature or botocore.UNSIGNED,
    )
    results = {"check": errand.check, "ask_colleague": errand.ask_colleague}
    tools = [
        {"toolSpec": {"name": name, "inputSchema": {"json": {"type": "object"}}}}
        for name in results
    ]
    messages: list[Any] = [{"role": "user", "content": [{"text": "Is it done?"}]}]
    for _ in range(MOST_TURNS):
        message = client.converse(modelId=NAME, messages=messages, toolConfig={"tools": tools})[
            "output"
        ]["message"]
        messages.append(message)
        calls = [block["toolUse"] for block in message["content"] if "toolUse" in block]
        if not calls:
            return str(message["content"][0]["text"])
        said = [
            {"toolUseId": call["toolUseId"], "content": [{"text": results[call["name"]]()}]}
            for call in calls
        ]
        messages.append({"role": "user", "content": [{"toolResult": one} for one in said]})
    return ""


def run_messages_agent(errand: Errand) -> str:
    tools = {
        "check": lambda **_: errand.check(),
        "ask_colleague": lambda **_: errand.ask_colleague(),
    }
    job = Job(errand.url, errand.user, ["Is it done?"], tools, key=errand.key)
    *_, last = messages_agent(job)
    return last.text


def run_ollama_agent(errand: Errand) -> str:
    import ollama

    client = ollama.Client(
        host=errand.url, headers={"authorization": f"Bearer {errand.key}", **errand.headers}
    )
    tools = [_document(errand.check, "check"), _document(errand.ask_colleague, "ask_colleague")]
    messages: list[Any] = [{"role": "user", "content": TASK}]
    for _ in range(MOST_TURNS):
        message = client.chat(model=NAME, messages=messages, tools=tools).message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = errand.check() if call.function.name == "check" else errand.ask_colleague()
            messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
    return ""


class NodeError(Exception):
    pass


def run_node_agent(sdk: str, errand: Errand) -> str:
    """A JavaScript SDK in a process of its own, with tools that return what ours do."""
    results = {"check": errand.check(), "ask_colleague": errand.ask_colleague()}
    answer = run_node("run.mjs", [sdk, errand.url, errand.user, TASK], results)
    if "error" in answer:
        raise NodeError(answer["error"])
    return str(answer["text"])


def _document(tool: Callable[[], str], name: str) -> Callable[[], str]:
    """A tool with a name and a docstring, which frameworks read."""

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
