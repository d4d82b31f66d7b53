"""Agents like recorded ones: two of five write their actions as text, and half of the bodies change what they sent before.

A quarter of the bodies has less than 4 KB, most have 10 to 64 KB, some more; the average is 39 KB. No header names a session.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

_SYSTEM = "You are an agent that works in a repository. Read before you write, and run the tests after each change. "
_PROSE = "The pool was closed before the last request came back, so the test saw an error in place of the answer.\n"
_CODE = 'def put(self, key):\n    if key is None:\n        raise KeyError("no key")\n    return self.rows[key]\n'
_FILES = ("store", "cache", "server", "client", "pool", "loader", "index", "parser")
_WORDS = ("retries", "timeouts", "the lock", "an empty key", "the order of rows", "unicode names", "a closed pool")


class Agent(NamedTuple):
    """One run.

    Attributes:
        number: of the agent.
        path: of the API.
        bodies: of its successive requests.
    """

    number: int
    path: str
    bodies: list[bytes]


def make_agents(count: int, first: int = 0) -> list[Agent]:
    """Agents of all kinds, with numbers from `first` on; those of one number are always the same."""
    return [_make_agent(number, Random(number)) for number in range(first, first + count)]


def take_turns(agents: list[Agent]) -> Iterator[tuple[Agent, bytes]]:
    """The requests of all, as they come when all work side by side."""
    for step in range(max(len(agent.bodies) for agent in agents)):
        for agent in agents:
            if step < len(agent.bodies):
                yield agent, agent.bodies[step]


def _make_agent(number: int, random: Random) -> Agent:
    kind = number % 5
    small = number % 4 > 0  # they are soon done
    write = (_write_chat, _write_chat, _write_texts, _write_texts, _write_anthropic)[kind]
    turns = random.randint(2, 8) if small else random.randint(16, 56)
    system = _SYSTEM * (5 if small else random.randint(40, 120))
    tools = [] if kind in (2, 3) else [_declare(place) for place in range(2 if small else random.randint(6, 14))]
    messages: list[tuple[str, str, str]] = []
    task = f"Task {number}: make {random.choice(_FILES)} work with {random.choice(_WORDS)}."
    bodies = []
    for turn in range(turns):
        bodies.append(json.dumps(write(system, tools, task, messages)).encode())
        messages.append((*_act(turn, random), _find(random, small=small)))
    return Agent(number, "/v1/messages" if kind == 4 else "/v1/chat/completions", bodies)


def _act(turn: int, random: Random) -> tuple[str, str]:
    """What is said, and the command."""
    file, words = random.choice(_FILES), random.choice(_WORDS)
    said = f"Step {turn}: I look at how {file} treats {words}. " * random.randint(1, 4)
    command = random.choice(
        [
            f"sed -n '{turn * 40 + 1},{turn * 40 + 40}p' src/{file}.py",
            f"grep -rn '{words}' src/{file}.py tests",
            "python -m pytest -q tests/test_store.py",
            f"cat > src/{file}.py <<'EOF'\n{_CODE * random.randint(1, 6)}EOF",
        ]
    )
    return said, command


def _find(random: Random, *, small: bool) -> str:
    """What comes back: mostly little, now and then a file."""
    lines = random.choice((1, 2, 4)) if small else random.choice((2, 5, 10, 20, 40, 60, 250))
    kind = random.randrange(4)
    if kind == 0:
        return "".join(f"{random.randrange(999)}: {_PROSE}" for _ in range(max(lines // 2, 1)))
    if kind == 1:
        return f"# version {random.randrange(9_999)}\n" + _CODE * max(lines // 4, 1)
    if kind == 2:
        start = random.randrange(9_999)
        return "\n".join(f"2026-11-22T06:14:{row % 60:02d}.{start:04d}Z INFO request {row + start} ok" for row in range(lines))
    passed = "\n".join(f"tests/test_{row % 9}.py::test_{row} PASSED [{row:3d}%]" for row in range(lines))
    return f"{passed}\n1 failed, {lines} passed in {random.randrange(99)}.{random.randrange(99)}s\nError: exit code 1"


def _declare(place: int) -> dict[str, Any]:
    properties = {"command": {"type": "string", "description": _SYSTEM}, "seconds": {"type": "integer", "description": _PROSE}}
    return {"name": f"tool_{place}", "description": _SYSTEM * 2, "input_schema": {"type": "object", "properties": properties}}


def _write_chat(system: str, tools: list[dict[str, Any]], task: str, messages: list[tuple[str, str, str]]) -> dict[str, Any]:
    """OpenAI's: each body goes on from the one before."""
    written: list[dict[str, Any]] = [{"role": "system", "content": system}, {"role": "user", "content": task}]
    for place, (said, command, found) in enumerate(messages):
        call = {"name": "tool_0", "arguments": json.dumps({"command": command, "seconds": 60})}
        calls = [{"id": f"call_{place:024d}", "type": "function", "function": call}]
        written.append({"role": "assistant", "content": said, "tool_calls": calls})
        written.append({"role": "tool", "tool_call_id": f"call_{place:024d}", "content": found})
    declared = [{"type": "function", "function": {"name": tool["name"], "parameters": tool["input_schema"]}} for tool in tools]
    return {"model": "gpt-5", "messages": written, "tools": declared, "temperature": 0, "stream": True}


def _write_texts(system: str, _: list[dict[str, Any]], task: str, messages: list[tuple[str, str, str]]) -> dict[str, Any]:
    """Actions in code blocks; what was found more than ten turns ago is left out."""
    written = [{"role": "system", "content": system}, {"role": "user", "content": task}]
    for place, (said, command, found) in enumerate(messages):
        shown = found if place >= len(messages) - 10 else "Old output omitted."
        written.append({"role": "assistant", "content": f"{said}\n\n```bash\n{command}\n```"})
        written.append({"role": "user", "content": f"<returncode>0</returncode>\n<output>\n{shown}\n</output>"})
    return {"messages": written, "model": "qwen3-coder", "temperature": 0.2}


def _write_anthropic(
    system: str, tools: list[dict[str, Any]], task: str, messages: list[tuple[str, str, str]]
) -> dict[str, Any]:
    """Anthropic's, whose marks of what is to be cached move along."""
    written: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": task}]}]
    for place, (said, command, found) in enumerate(messages):
        use = {"type": "tool_use", "id": f"toolu_{place:024d}", "name": "tool_0", "input": {"command": command, "seconds": 60}}
        written.append({"role": "assistant", "content": [{"type": "text", "text": said}, use]})
        result = {"type": "tool_result", "tool_use_id": f"toolu_{place:024d}", "content": found}
        written.append({"role": "user", "content": [result]})
    written[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    return {
        "model": "claude-opus-5",
        "max_tokens": 8192,
        "system": [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}],
        "messages": written,
        "tools": tools,
        "stream": True,
    }
