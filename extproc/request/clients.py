"""Facts about clients: agent programs, SDKs and gateways. `make test-clients` runs many of them.

To support a client that names its sessions in its own header, add the header here.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple


class Client(NamedTuple):
    """A client and its reaction to status 429 with the header `x-should-retry: false`.

    Attributes:
        name: for messages.
        header: the header by which it is recognized.
        part: part of the header's value; empty for any value.
        retries: it retries; otherwise it stops and shows the message.
    """

    name: str
    header: str
    part: bytes
    retries: bool


CLIENTS: Final = (
    Client("Claude Code", "user-agent", b"claude-cli/", retries=False),
    Client("Vercel AI SDK (2 retries)", "user-agent", b"ai-sdk/", retries=True),
    Client("every AWS SDK (2 retries)", "amz-sdk-request", b"", retries=True),
    Client(
        "Google Gen AI SDKs, if told to retry (4 retries)",
        "x-goog-api-client",
        b"google-genai-sdk/",
        retries=True,
    ),
    Client("SDKs made by Fern, such as Cohere's (2 retries)", "x-fern-sdk-name", b"", retries=True),
)

ENDED_BY_NOT_FOUND: Final = (b"COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",)
"""Words in the prompts of agent programs that retry a 400 or 429 for minutes, but stop at a 404:
mini-swe-agent."""

PARENT_SESSION: Final = "x-parent-session-id"
"""Header with the `x-session-id` of an agent's parent in opencode."""

_GATEWAYS: Final = (
    "x-litellm-session-id",
    "helicone-session-id",
    "agent-session-id",  # Envoy AI Gateway
    "mcp-session-id",
    "x-bf-session-id",
)

SESSION_HEADERS: Final = (
    "x-claude-code-agent-id",  # first: each agent has its own history
    "thread-id",  # Codex; early for the same reason
    "x-session-id",  # opencode: one for each agent
    "x-claude-code-session-id",
    "session-id",  # Codex
    "x-session-affinity",  # opencode
    *_GATEWAYS,
)
"""Headers in which clients and gateways name a conversation by default, in the order in which they
are tried."""

AGENT_HEADERS: Final = ("x-claude-code-agent-id", "thread-id")
"""Headers that distinguish agents of one session."""

ROOT_HEADERS: Final = (
    "x-claude-code-session-id",
    PARENT_SESSION,
    "session-id",
    "x-session-id",
    "x-session-affinity",
    *_GATEWAYS,
    "thread-id",
)
"""Headers of the session that started an agent, in the order in which they are tried."""


class AgentHeaders(NamedTuple):
    """How a client identifies the agent of a session that sends a request.

    Attributes:
        root: names the session that started all its agents.
        agent: names the agent. In requests of the root itself, it is missing or equals `root`.
        parent: names the agent that started it; missing if the root did. If it is the same header
            as `root`, the client does not name the root, only each agent's parent by its `agent`.
    """

    root: str
    agent: str
    parent: str


AGENTS: Final = (
    AgentHeaders(
        "x-claude-code-session-id", "x-claude-code-agent-id", "x-claude-code-parent-agent-id"
    ),
    AgentHeaders("session-id", "thread-id", "x-codex-parent-thread-id"),
    AgentHeaders(PARENT_SESSION, "x-session-id", PARENT_SESSION),  # opencode
)

USER_ID: Final = "body:/metadata/user_id"
"""Limit key of the field in which some clients, such as Claude Code, name a session, alone or with
the user."""

CACHE_KEY: Final = "body:/prompt_cache_key"
"""Limit key of the field in which Codex names its session. Other programs use one value for all
sessions."""

INJECTED_TAGS: Final = frozenset(
    {"system-reminder", "system_reminder", "environment_details", "environment_context"}
)
"""Tags of text that Claude Code, Cline and Codex inject, even if a client sends only text and no
results."""

SUMMARIES: Final = (
    b"This session is being continued from a previous conversation",  # Claude Code
    b"Another language model started to solve this problem",  # Codex
    b"<state_snapshot>",  # Qwen Code and its model
    b"Here is a summary of the conversation to date",  # LangChain
)
"""Beginnings of a user's message with which clients replace a history that became too long."""

CALL_ID_LINE: Final = "Call id: "
"""Start of a line with a counter that smolagents writes before an observation."""

FAILED_CALL: Final = re.compile(
    r"Error:\n(?:Error executing (?:tool|request to team member) '([\w.-]{1,256})' with arguments "
    r"([^\n]{0,4096}?): "
    r"|Unknown tool ([\w.-]{1,256}), )"
)
"""How smolagents' ToolCallingAgent reports a failed call, which is missing from its history."""
