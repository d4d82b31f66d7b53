"""A model that cannot help itself: it gets out of a loop only if the note names the cause, and does what that says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
from fake_model import USER, Answer, Call, find_note

from tests.support.agents import DONE, Gate
from tests.support.documents import bundle, policy

PATH = "/v1/chat/completions"
MUTE = "/mute"
"""Before the path: a note that does not name the cause."""

Args = Mapping[str, Any]


def steering(name: str, prefix: str, **more: object) -> dict[str, Any]:
    """A policy that adds notes, and refuses four turns later."""
    loop = {"similarity": "turns", "action": "steer", "escalate": {"reject": 7}, **more}
    return policy(name, {"pathPrefix": prefix}, **loop, limit_keys=[f"header:{USER}"])  # type: ignore[arg-type]  # a policy's keys


POLICIES = bundle(steering("named", "/v1/"), steering("mute", f"{MUTE}/", steer_note="Stop: {what}."))


class Trap(NamedTuple):
    """A loop, and its way out.

    Attributes:
        tools: schemas by name.
        run: what a call brings back, by its tool, its arguments, and the tools that were called before.
        stuck: the calls that the model makes over and over.
        named: the cause, as the note has it.
        escape: what the model does then.
    """

    tools: Mapping[str, Any]
    run: Callable[[str, Args, list[str]], str]
    stuck: list[Call]
    named: str
    escape: Callable[[re.Match[str]], Answer]


def _search(fields: Args, *required: str, **more: object) -> dict[str, Any]:
    return {"search": {"type": "object", "properties": fields, "required": list(required), **more}}


def _takes(right: Args) -> Callable[[str, Args, list[str]], str]:
    """A tool that says nothing of what is wrong with other arguments than these."""
    return lambda tool, given, _: "3 rows" if (tool, given) == ("search", right) else "Error: invalid arguments"


_TEXT = {"type": "string"}
_FILTER = {"anyOf": [{"$ref": "#/$defs/filter"}, {"type": "null"}]}
_DEFS = {"filter": {"type": "object", "properties": {"date": _TEXT}, "required": ["date"]}}

TRAPS: dict[str, Trap] = {
    "missing argument": Trap(
        _search({"query": _TEXT}, "query"),
        _takes({"query": "a"}),
        [Call("search")],
        r"search left out (\w+), which is required",
        lambda found: [Call("search", {found[1]: "a"})],
    ),
    "missing inside": Trap(
        _search({"filter": _FILTER}, **{"$defs": _DEFS}),
        _takes({"filter": {"date": "a"}}),
        [Call("search", {"filter": {}})],
        r"search left out filter\.(\w+), which is required",
        lambda found: [Call("search", {"filter": {found[1]: "a"}})],
    ),
    "unknown argument": Trap(
        _search({"max_results": {"type": "integer"}}, additionalProperties=False),
        _takes({"max_results": 3}),
        [Call("search", {"maxResults": 3})],
        r"no argument named maxResults\. Did you mean (\w+)\?",
        lambda found: [Call("search", {found[1]: 3})],
    ),
    "wrong type": Trap(
        _search({"limit": {"type": "integer"}}),
        _takes({"limit": 3}),
        [Call("search", {"limit": "3"})],
        r"(\w+) must be an integer",
        lambda found: [Call("search", {found[1]: 3})],
    ),
    "value": Trap(
        _search({"mode": {"enum": ["ro", "rw"]}}),
        _takes({"mode": "ro"}),
        [Call("search", {"mode": "read"})],
        r"mode must be (\w+) or rw",
        lambda found: [Call("search", {"mode": found[1]})],
    ),
    "unknown tool": Trap(
        _search({}),
        lambda tool, _, __: "3 rows" if tool == "search" else f"Error: unknown tool {tool}",
        [Call("serach")],
        r"no tool named serach\. Did you mean (\w+)\?",
        lambda found: [Call(found[1])],
    ),
    "same error": Trap(
        _search({}) | {"index": {}},
        lambda tool, _, before: "3 rows" if (tool, "index" in before) == ("search", True) else "Error: run index first",
        [Call("search")],
        "The error was \u201cError: run (\\w+) first\u201d each time",
        lambda found: [Call(found[1]), Call("search")],
    ),
    "outage": Trap(
        _search({}) | {"wait": {}},
        lambda tool, _, before: "3 rows" if tool == "search" and "wait" in before else "HTTP 503 Service Unavailable",
        [Call("search")],
        r"failure may be temporary: .* (Wait) before you try again",
        lambda found: [Call(found[1].lower()), Call("search")],
    ),
    "same answer": Trap(
        _search({}),
        lambda *_: "3 rows",
        [Call("search")],
        "The result was \u201c(3 rows)\u201d each time, and the same call will not change that",
        lambda _: DONE,
    ),
    "cycle": Trap(
        _search({}) | {"look": {}},
        lambda tool, *_: f"3 rows of {tool}",
        [Call("look"), Call("search")],
        "The steps are look, (search), over and over",
        lambda _: DONE,
    ),
}


def run_agent(gate: Gate, user: str, trap: Trap, path: str) -> tuple[int, list[str], str]:
    """The last status, the results of all calls, and the last words."""

    def answer(number: int) -> Answer:
        found = re.search(trap.named, find_note(gate.model.bodies[user]))
        if found is not None:
            gate.model.scripts[user] = lambda _: DONE
            return trap.escape(found)
        return [trap.stuck[number % len(trap.stuck)]]

    gate.model.scripts[user] = answer
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in trap.tools.items()]
    messages: list[Any] = [{"role": "user", "content": "Find it."}]
    results: list[str] = []
    called: list[str] = []
    while (reply := gate.stack.post(path, {"messages": messages, "tools": tools}, {USER: user})).status == 200:
        messages.append(message := reply.json()["choices"][0]["message"])
        if not message.get("tool_calls"):
            return 200, results, message["content"]
        for call in message["tool_calls"]:
            name = call["function"]["name"]
            results.append(trap.run(name, json.loads(call["function"]["arguments"]), called))
            called.append(name)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": results[-1]})
    return reply.status, results, ""


@pytest.mark.parametrize("name", TRAPS)
def test_a_note_that_names_the_cause_leads_out_of_the_loop(gate: Gate, name: str, user: dict[str, str]) -> None:
    """The model does what the first note says; after that its tool answers, and it finishes."""
    trap = TRAPS[name]

    status, results, said = run_agent(gate, user[USER], trap, PATH)

    assert (status, said) == (200, DONE)
    assert results[-1].startswith("3 rows")
    assert gate.model.asked[user[USER]] == 3 * len(trap.stuck) + (1 if name in {"same answer", "cycle"} else 2)


def test_a_note_that_does_not_name_it_does_not(gate: Gate, user: dict[str, str]) -> None:
    """An operator's own note without the cause: the same model goes on until it is refused."""
    status, results, _ = run_agent(gate, user[USER], TRAPS["missing argument"], MUTE + PATH)

    assert (status, results) == (429, ["Error: invalid arguments"] * 7)
