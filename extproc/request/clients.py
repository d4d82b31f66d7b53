"""What is known about clients: agent programs, SDKs and gateways. `make test-clients` runs many of them.

Each fact says whose it is. A new client that names its sessions in a header of its own is added here, and nowhere else.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple


class Client(NamedTuple):
    """A client that is known for what it does with a refusal of status 429 and the header `x-should-retry: false`.

    Attributes:
        name: for people.
        header: the header by which it is recognized.
        part: part of the header's value; empty for any value.
        retries: it tries again; otherwise it stops, and shows the message.
    """

    name: str
    header: str
    part: bytes
    retries: bool


CLIENTS: Final = (
    Client("Claude Code", "user-agent", b"claude-cli/", retries=False),
    Client("Vercel AI SDK (2 retries)", "user-agent", b"ai-sdk/", retries=True),
    Client("every AWS SDK (2 retries)", "amz-sdk-request", b"", retries=True),
    Client("Google Gen AI SDKs, if told to retry (4 retries)", "x-goog-api-client", b"google-genai-sdk/", retries=True),
    Client("SDKs made by Fern, such as Cohere's (2 retries)", "x-fern-sdk-name", b"", retries=True),
)

ENDED_BY_NOT_FOUND: Final = (b"COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",)
"""Words in the prompts of agent programs that retry a 400 or 429 for minutes, but end at once on a 404: mini-swe-agent."""

PARENT_SESSION: Final = "x-parent-session-id"
"""Header in which an agent of opencode names the `x-session-id` of its parent."""

_GATEWAYS: Final = (
    "x-litellm-session-id",
    "helicone-session-id",
    "agent-session-id",  # Envoy AI Gateway
    "mcp-session-id",
    "x-bf-session-id",
)

SESSION_HEADERS: Final = (
    "x-claude-code-agent-id",  # first: an agent that another one started has a history of its own
    "thread-id",  # Codex; early for the same reason
    "x-session-id",  # opencode, in which each agent has its own
    "x-claude-code-session-id",
    "session-id",  # Codex
    "x-session-affinity",  # opencode
    *_GATEWAYS,
)
"""Headers by which clients and gateways name a conversation unasked, in the order in which they are tried."""

AGENT_HEADERS: Final = ("x-claude-code-agent-id", "thread-id")
"""The headers among these that distinguish agents of one session."""

ROOT_HEADERS: Final = (
    "x-claude-code-session-id",
    PARENT_SESSION,
    "session-id",
    "x-session-id",
    "x-session-affinity",
    *_GATEWAYS,
    "thread-id",
)
"""The same for the session that started an agent."""


class AgentHeaders(NamedTuple):
    """How a client tells which agent of a session sends a request.

    Attributes:
        root: names the session that started all its agents.
        agent: names the agent. In requests of the root itself it is missing, or has the same value as `root`.
        parent: names the agent that started it; missing if that is the root. It may be the same header as `root`: such a client
            names no root, but each agent's parent by its `agent`.
    """

    root: str
    agent: str
    parent: str


AGENTS: Final = (
    AgentHeaders("x-claude-code-session-id", "x-claude-code-agent-id", "x-claude-code-parent-agent-id"),
    AgentHeaders("session-id", "thread-id", "x-codex-parent-thread-id"),
    AgentHeaders(PARENT_SESSION, "x-session-id", PARENT_SESSION),  # opencode
)

USER_ID: Final = "body:/metadata/user_id"
"""Limit key of the field in which some clients, such as Claude Code, name a session, alone or beside the user."""

CACHE_KEY: Final = "body:/prompt_cache_key"
"""Limit key of the field in which Codex names its session; other programs send the same one in all sessions."""

INJECTED_TAGS: Final = frozenset({"system-reminder", "system_reminder", "environment_details", "environment_context"})
"""Tags of text that the harnesses of Claude Code, Cline and Codex inject, even if a client sends only text and no results."""

CALL_ID_LINE: Final = "Call id: "
"""Start of a line with a counter that smolagents writes before an observation."""

FAILED_CALL: Final = re.compile(
    r"Error:\n(?:Error executing (?:tool|request to team member) '([\w.-]{1,256})' with arguments ([^\n]{0,4096}?): "
    r"|Unknown tool ([\w.-]{1,256}), )"
)
"""How smolagents' ToolCallingAgent reports a failed call, which it leaves out of the history."""
