"""Agents made with libraries as their first pages show them, one function each.

Each runs in its client's own environment: `python -P agents.py FUNCTION TASK`; the environment has
the API's address.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

URL = os.environ["LOOPGUARD_ZOO_URL"]
V1 = f"{URL}/v1"
KEY = os.environ.get("OPENAI_API_KEY", "")
MODEL = "gpt-x"
MOST_STEPS = 40


def read_file(path: str) -> str:
    """Read a file.

    Args:
        path: the path of the file.
    """
    return Path(path).read_text()


def smolagents_code(task: str) -> Any:
    from smolagents import CodeAgent, OpenAIServerModel, tool

    model = OpenAIServerModel(MODEL, api_base=V1, api_key=KEY)
    return CodeAgent(tools=[tool(read_file)], model=model, max_steps=MOST_STEPS).run(task)


def smolagents_tools(task: str) -> Any:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(MODEL, api_base=V1, api_key=KEY)
    return ToolCallingAgent(tools=[tool(read_file)], model=model, max_steps=MOST_STEPS).run(task)


def deepagents(task: str) -> Any:
    from deepagents import create_deep_agent
    from deepagents.backends import FilesystemBackend
    from langchain_openai import ChatOpenAI

    agent = create_deep_agent(
        model=ChatOpenAI(model=MODEL), backend=FilesystemBackend(root_dir=".", virtual_mode=False)
    )
    state = agent.invoke({"messages": [("user", task)]}, {"recursion_limit": 10 * MOST_STEPS})
    return state["messages"][-1].content


def pydantic_ai(task: str) -> Any:
    from pydantic_ai import Agent, ModelRetry

    agent = Agent(f"openai-chat:{MODEL}")

    @agent.tool_plain(name="read_file", retries=MOST_STEPS)
    def read(path: str) -> str:
        try:
            return read_file(path)
        except OSError as error:
            raise ModelRetry(str(error)) from error

    return agent.run_sync(task).output


def openai_agents(task: str) -> Any:
    from agents import Agent, Runner, function_tool

    tools = [function_tool(read_file)]
    colleague = Agent(name="colleague", tools=tools, model=MODEL)
    asked = colleague.as_tool("ask_colleague", "Lets a colleague do it.")
    return Runner.run_sync(
        Agent(name="agent", tools=[*tools, asked], model=MODEL), task, max_turns=MOST_STEPS
    ).final_output


def strands(task: str) -> Any:
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    model = OpenAIModel(client_args={"api_key": KEY, "base_url": V1}, model_id=MODEL)
    return Agent(model=model, tools=[tool(read_file)])(task)


def langchain_google(task: str) -> Any:
    from langchain.agents import create_agent
    from langchain.agents.middleware import ToolRetryMiddleware
    from langchain_google_genai import ChatGoogleGenerativeAI

    model = ChatGoogleGenerativeAI(model="gemini-2.5-pro", base_url=URL)
    agent = create_agent(model, [read_file], middleware=[ToolRetryMiddleware(max_retries=0)])
    state = agent.invoke({"messages": [("user", task)]}, {"recursion_limit": 10 * MOST_STEPS})
    return state["messages"][-1].text


def google_adk(task: str) -> Any:
    from google.adk.agents import Agent
    from google.adk.models import Gemini
    from google.adk.runners import InMemoryRunner

    def read(path: str) -> str:
        """Read a file."""
        try:
            return read_file(path)
        except OSError as error:
            return f"Error: {error}"

    read.__name__ = "read_file"
    agent = Agent(name="agent", model=Gemini(model="gemini-2.5-pro", base_url=URL), tools=[read])
    events = asyncio.run(InMemoryRunner(agent=agent, app_name="zoo").run_debug(task, quiet=True))
    return "".join([part.text or "" for event in events[-1:] for part in event.content.parts])


def crewai(task: str) -> Any:
    from crewai import Agent
    from crewai.tools import tool

    agent = Agent(
        role="reader",
        goal="Read files.",
        backstory="Reads.",
        tools=[tool("read_file")(read_file)],
        llm=f"openai/{MODEL}",
        max_iter=MOST_STEPS,
    )
    return agent.kickoff(task).raw


if __name__ == "__main__":
    print(globals()[sys.argv[1]](sys.argv[2]))
