"""Trees of agents, from a request's headers to the answer, as Claude Code, Codex and opencode name them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from time import time
from typing import Any

import pytest

from extproc.cli.commands import grant
from extproc.cli.commands.top import order_sessions
from extproc.engine.orders import (
    ALLOW,
    BLOCK,
    GRANT,
    KILL,
    RELEASE,
    ActiveOverride,
    Grant,
    Overrides,
    Target,
    hash_descriptor,
)
from extproc.ext_proc.service import Service
from extproc.operator.admin.session_report import describe_session
from extproc.operator.events import SessionEvents
from extproc.operator.overrides import parse_order, read_override, write_override
from extproc.operator.session_rows import SessionDocument
from extproc.pb.external_processor_pb2 import ProcessingResponse
from extproc.sessions.names import hash_session
from tests.support.messages import body, headers
from tests.support.service import exchange, headers_of, make_service, sample
from tests.support.session_limits import TOOL, ask, limited, status, told, turns
from tests.support.turn_writers import Did, as_chat

ROOT = "root"


def claude(agent: str = "", parent: str = "", root: str = ROOT) -> dict[str, str]:
    """The headers of Claude Code."""
    named = {"x_claude_code_agent_id": agent, "x_claude_code_parent_agent_id": parent}
    return {"x_claude_code_session_id": root, **{name: value for name, value in named.items() if value}}


def codex(agent: str = "", parent: str = "", root: str = ROOT) -> dict[str, str]:
    """Of Codex, whose root is an agent of its own name."""
    started = {"x_codex_parent_thread_id": parent or root} if agent else {}
    return {"session_id": root, "thread_id": agent or root, **started}


def opencode(agent: str = "", parent: str = "", root: str = ROOT) -> dict[str, str]:
    """Of opencode, which names the parent alone."""
    return {"x_session_id": agent, "x_parent_session_id": parent or root} if agent else {"x_session_id": root}


CLIENTS = [claude, codex, opencode]
AMOUNTS = Grant._fields


def loops(similarity: str) -> dict[str, Any]:
    """A policy that only detects loops."""
    loop = {"enabled": True, "similarity": similarity, "threshold_identical_requests": 3, "action": "reject"}
    loop |= {"window_seconds": 60} if similarity == "exact" else {}
    return {"id": "loops", "spec": {"selector": {"pathPrefix": "/"}, "limit_keys": ["header:x-team"], "loop_detection": loop}}


def send(service: Service, number: int, **names: str) -> ProcessingResponse:
    """The answer to a request of its own."""
    return ask(service, turns(1, number=str(number)), session="", **names)


def send_all(service: Service, requests: Sequence[dict[str, str]]) -> list[str]:
    """What limits each of these requests, one after the other; empty for none."""
    answers = [send(service, number, **names) for number, names in enumerate(requests)]
    return [headers_of(answer).get("x-loopguard-limit", "") if status(answer) != 200 else "" for answer in answers]


def describe(service: Service) -> list[dict[str, Any]]:
    """The sessions as reports have them."""
    document = SessionDocument.merge([service.reporter.sessions.make_document(shows_callers=False)], time())
    return [describe_session(row, shows_callers=False) for row in document.rows]


@pytest.mark.parametrize("client", CLIENTS)
def test_an_agent_beyond_the_limit_is_refused_at_its_first_request_and_the_others_go_on(client: Any) -> None:  # noqa: ANN401  # a function
    """Its parent's tool call fails with the reason; the parent, and the agents that have begun, are not refused."""
    service = make_service(limited(max_agents=2))

    found = send_all(
        service, [client(), client("a"), client("b"), client("c"), client("b"), client(), client("c"), client("a")]
    )

    assert found == ["", "", "", "max_agents", "", "", "max_agents", ""]
    message = told(send(service, 99, **client("d")))["message"]
    assert message.startswith("Agent limit reached: this session has started 2 of its 2 agents. This agent was not started.")
    assert sample(service, "session_agents_total", policy="agents", mode="enforce") == 2


@pytest.mark.parametrize("client", CLIENTS)
def test_depth_is_counted_along_parents(client: Any) -> None:  # noqa: ANN401  # as above
    """Agents of agents are below the same root; an agent whose parent is unknown is not below the root itself."""
    service = make_service(limited(max_depth=2))
    requests = [client(), client("a"), client("b", "a"), client("c", "b"), client("d", "a"), client("e")]

    assert send_all(service, requests) == ["", "", "", "max_depth", "", ""]


@pytest.mark.parametrize("client", CLIENTS)
def test_the_limits_of_a_root_count_for_all_its_agents(client: Any) -> None:  # noqa: ANN401  # as above
    """With `max_steps: 6`, a parent, its two children and a grandchild pass six requests together."""
    service = make_service(limited(max_steps=6))
    agents = [client(), client("a"), client("b"), client("c", "a")]

    found = send_all(service, [*agents, *agents, *agents])

    assert found == [""] * 6 + ["max_steps"] * 6
    assert len(service.reporter.sessions.copy()) == 1


def test_agents_with_the_same_task_take_steps_of_their_own() -> None:
    """Equal requests of two agents do not repeat each other; those of one agent do."""
    service = make_service(limited(max_steps=3))
    task = turns(0)

    found = [status(ask(service, task, session="", **claude(agent))) for agent in ("a", "b", "a", "c", "d")]

    assert found == [200, 200, 200, 200, 429]


def test_other_clients_name_agents_by_keys_of_the_policy() -> None:
    """Also where they name only the parent: then it is one of the session's keys, too."""
    named = {"keys": ["header:x-run"], "agent_keys": ["header:x-agent"], "parent_keys": ["header:x-parent"]}
    chained = {
        "keys": ["header:x-parent", "header:x-agent"],
        "agent_keys": ["header:x-agent"],
        "parent_keys": ["header:x-parent"],
    }
    pairs = [("a", ROOT), ("b", "a"), ("c", "b")]
    whole = [{"x_run": ROOT}, *[{"x_run": ROOT, "x_agent": name, "x_parent": parent} for name, parent in pairs]]
    parents = [{"x_agent": ROOT}, *[{"x_agent": name, "x_parent": parent} for name, parent in pairs]]

    assert send_all(make_service(limited(session=named, max_depth=2)), whole) == ["", "", "", "max_depth"]
    assert send_all(make_service(limited(session=chained, max_depth=2)), parents) == ["", "", "", "max_depth"]


@pytest.mark.parametrize(("kind", "client"), [(kind, client) for kind in (KILL, BLOCK) for client in CLIENTS])
def test_an_order_about_a_root_ends_its_whole_tree(kind: str, client: Any) -> None:  # noqa: ANN401  # as above
    """From the next request on, of whichever agent; other sessions of the caller go on."""
    service, now = make_service(limited(max_agents=9)), time()
    agents = [client(), client("a"), client("b", "a"), client("c", "b")]
    send_all(service, agents)
    (root,) = [run.name.session for run in service.reporter.sessions.copy()]
    service.overrides = Overrides([ActiveOverride("o", kind, Target(session=root), "", now, now + 60, "", "")])

    answers = [
        status(send(service, number, **names)) for number, names in enumerate([*agents, client("d"), client(root="other")])
    ]

    assert answers == [429] * 5 + [200]


def test_an_agent_is_stopped_without_its_session() -> None:
    """An order can name one agent, by the hash that reports show."""
    service, now = make_service(limited(max_agents=9)), time()
    requests = [claude(), claude("a"), claude("b")]
    send_all(service, requests)
    agent = describe(service)[0]["agents"]["tree"][1]["agent"]
    service.overrides = Overrides([ActiveOverride("o", KILL, Target(session=agent), "", now, now + 60, "", "")])

    assert [status(send(service, number, **names)) for number, names in enumerate(requests)] == [200, 200, 429]
    assert agent == hash_session("header:x-claude-code-agent-id", "b")


@pytest.mark.parametrize("similarity", ["turns", "exact"])
@pytest.mark.parametrize("kind", [KILL, BLOCK])
def test_an_order_about_a_root_concerns_agents_where_only_loops_are_detected(kind: str, similarity: str) -> None:
    """A policy without session_limits knows the root that a request names."""
    service, now = make_service(loops(similarity)), time()
    root = hash_session("header:x-claude-code-session-id", ROOT)
    service.overrides = Overrides([ActiveOverride("o", kind, Target(session=root), "", now, now + 60, "", "")])

    assert [status(send(service, 1, **names)) for names in (claude(), claude("a"), claude(root="other"))] == [429, 429, 200]


def test_a_kill_without_session_limits_ends_with_a_release_and_needs_a_session() -> None:
    """Of all sessions of a caller, it holds only where these are limited: other requests of the caller are not theirs."""
    service, now = make_service(loops("turns")), time()
    root = hash_session("header:x-claude-code-session-id", ROOT)

    def ask_after(*orders: tuple[str, Target, float]) -> int:
        given = [ActiveOverride(f"o{at}", kind, target, "", now + at, now + 60, "", "") for kind, target, at in orders]
        service.overrides = Overrides(given)
        return status(send(service, 1, **claude("a")))

    caller = Target(caller=hash_descriptor("x-team", "t"))
    assert ask_after((KILL, Target(session=root), 0)) == 429
    assert ask_after((KILL, Target(session=root), 0), (RELEASE, Target(session=root), 1)) == 200
    assert ask_after((KILL, Target(session=root), 0), (RELEASE, caller, 1)) == 200
    assert ask_after((KILL, Target(session=root), 0), (KILL, caller, 1)) == 429
    assert ask_after((KILL, caller, 0)) == 200
    assert ask_after((KILL, Target(session=root), 0), (ALLOW, caller, 1)) == 429


OVER = {
    "max_agents": ([claude(), claude("a"), claude("b")], "--agents 1"),
    "max_depth": ([claude(), claude("a"), claude("b", "a")], "--depth 1"),
    "max_concurrent_agents": ([claude(), claude("a"), claude("b")], "--concurrent-agents 1"),
    "max_spawns_per_minute": ([claude(), claude("a"), claude("b")], "--spawns-per-minute 1"),
}
"""Requests of which a limit of 1 refuses the last, and what `loopguard grant` allows it with."""


@pytest.mark.parametrize("limit", OVER)
def test_the_refusal_and_the_event_have_the_command_that_lets_the_agent_begin(limit: str) -> None:
    """What both print lets this agent begin, once it asks again; the next one, and other sessions, are refused as before."""
    limits: dict[str, Any] = {limit: 1}
    service = make_service(limited(**limits))
    requests, flag = OVER[limit]
    others = [{**names, "x_claude_code_session_id": "other"} for names in requests]
    assert send_all(service, [*requests, *others]) == ["", "", limit] * 2
    message = told(send(service, 99, **requests[-1]))["message"]
    events: list[dict[str, Any]] = []
    SessionEvents(lambda *event: events.append(event[2]), lambda: False).look(service.reporter.sessions.copy())
    commands = [event["grant"] for event in events]

    (command,) = [command for command in commands if f"The user can ask an operator to allow it with `{command}`." in message]
    options = read_command(command)
    assert command.endswith(f" {flag}")
    amounts = {name: getattr(options, name) for name in AMOUNTS if getattr(options, name) is not None}
    asked = {"kind": "grant", "session": options.session, "caller": options.caller[0], **amounts}
    given = parse_order(asked, "", time(), service.engine.plans)
    service.overrides = Overrides([read_override(given.name, write_override(given))])

    again = [requests[-1], claude("c", "b"), others[-1]]
    assert send_all(service, again) == ["", limit, limit]
    assert told(send(service, 99, **again[1]))["allowed"] == 2
    (run,) = [session for session in describe(service) if session["granted"]]
    assert (run["limits"], run["granted"]) == ({limit: 1}, {limit: 1})


def read_command(command: str) -> argparse.Namespace:
    """The options of a printed `loopguard grant`."""
    parser = argparse.ArgumentParser()
    grant.add_flags(parser)
    return parser.parse_args(command.split()[2:])


def test_a_note_counts_agents_that_were_granted() -> None:
    """`steer` says what is left of all that is allowed."""
    service, now = make_service(limited(max_agents=2, escalate={"steer": {"max_agents": 2}})), time()
    root = hash_session("header:x-claude-code-session-id", ROOT)
    given = ActiveOverride("o", GRANT, Target(session=root), "", now, now + 60, "", "", Grant(agents=2))
    service.overrides = Overrides([given])
    answers = [send(service, number, **names) for number, names in enumerate([claude("a"), claude("b"), claude("c")])]

    notes = [answer.request_body.response.body_mutation.body.decode() for answer in answers]
    told = [next((used for used in (2, 3) if f"{used} of this session's 4 agents" in note), 0) for note in notes]
    assert told == [0, 2, 3]


@pytest.mark.slow
def test_grants_of_agents_end_where_trees_are_exact() -> None:
    """A limit is 1,000 at most, with all grants; then no command is printed. What has no limit gets none."""
    service, now = make_service(limited(max_agents=999, max_concurrent_agents=1)), time()
    root = hash_session("header:x-claude-code-session-id", ROOT)
    given = ActiveOverride("o", GRANT, Target(session=root), "", now, now + 60, "", "", Grant(0, 0, 0, 7, 700, 1_000, 7))
    service.overrides = Overrides([given])

    assert send_all(service, [claude(f"a{number}", f"a{number - 1}") for number in range(1, 1_001)]) == [""] * 1_000
    refused = told(send(service, 99, **claude("b")))
    assert (refused["limit"], refused["allowed"]) == ("max_agents", 1_000)
    assert "operator" not in refused["message"]


def test_a_session_near_its_limit_of_agents_is_told() -> None:
    """`steer` says how many have been started, to whichever agent asks."""
    service = make_service(limited(max_agents=3, escalate={"steer": {"max_agents": 2}}))
    answers = [send(service, number, **names) for number, names in enumerate([claude(), claude("a"), claude("b"), claude()])]

    notes = [answer.request_body.response.body_mutation.body.decode() for answer in answers]
    assert [("2 of this session's 3 agents have been started" in note) for note in notes] == [False, False, True, True]


def test_reports_show_the_tree() -> None:
    """Each agent behind the one that started it, with its refusals; and events tell of the limit once."""
    service = make_service(limited(max_agents=3))
    send_all(service, [claude(), claude("a"), claude("b"), claude("c", "a"), claude("d"), claude("d")])
    events: list[tuple[str, Any]] = []
    watcher = SessionEvents(lambda kind, _, data: events.append((kind, data)), lambda: False)
    for _ in range(2):
        watcher.look(service.reporter.sessions.copy())

    (session,) = describe(service)
    agents = {hash_session("header:x-claude-code-agent-id", name): name for name in "abcd"}
    tree = [(agents[row["agent"]], row["level"], row["requests"], row["refused"]) for row in session["agents"]["tree"]]
    assert tree == [("a", 1, 1, None), ("c", 2, 1, None), ("b", 1, 1, None), ("d", 1, 2, "max_agents")]
    assert {name: session["agents"][name] for name in ("started", "active", "refused_requests")} == {
        "started": 3,
        "active": 3,
        "refused_requests": 2,
    }
    ((kind, data),) = events
    assert (kind, data["limit"], data["agents_started"], data["agent_requests_refused"]) == (
        "agents_limited",
        "max_agents",
        3,
        2,
    )
    assert agents[data["gen_ai.agent.id"]] == "d"


def test_ids_that_a_client_makes_up_stay_below_its_caller() -> None:
    """Another caller's session of the same name has another tree, and circles and strange parents end nowhere."""
    service = make_service(limited(max_agents=2, max_depth=5))

    mine = send_all(
        service, [opencode("a", "b"), opencode("b", "a"), opencode("a", "a"), opencode("c", "a"), opencode("d", "c")]
    )
    others = [status(ask(service, turns(1), session="", team="other", **opencode(name, "b"))) for name in "acd"]

    assert mine == ["", "", "", "", "max_agents"]
    assert others == [200, 200, 429]


def test_shadow_policies_count_agents_and_refuse_none() -> None:
    """What they would have refused is counted."""
    service = make_service(limited("shadow", max_agents=1))

    assert send_all(service, [claude(), claude("a"), claude("b"), claude("c")]) == [""] * 4
    assert sample(service, "session_limits_total", policy="agents", mode="shadow", limit="max_agents", action="reject") == 2


def chat(first: str, calls: Sequence[tuple[str, dict[str, str]]] = ()) -> bytes:
    """A conversation that nothing names."""
    done = [Did((call,), ("done",), number=number) for number, call in enumerate(calls, 1)]
    made = as_chat(done)
    made["messages"][0] = {"role": "user", "content": first}
    return json.dumps({**made, "tools": [TOOL]}).encode()


def test_sessions_without_names_are_linked_by_what_started_them() -> None:
    """Their first words are an argument of a call in the history of the session that shows it; limits know nothing of it."""
    service = make_service(limited(max_steps=9))
    task = "Read every file in this folder, and count the words."
    spawn = [("task", {"description": "count", "prompt": task})]
    bodies = [
        chat("Please do it all for me."),
        chat(task),
        chat("Please do it all for me.", spawn),
        chat("Something else again."),
    ]
    for data in bodies:
        exchange(service, headers("/v1/chat/completions", x_team="t"), body(data))

    steps = {session["session"]: session["total_step_count"] for session in describe(service)}
    links = [(session["total_step_count"], session["started_by"]) for session in describe(service) if session["started_by"]]
    assert [(own, steps[by]) for own, by in links] == [(1, 2)]
    ((agent, parent),) = [(each["session"], each["started_by"]) for each in describe(service) if each["started_by"]]
    for sessions in (describe(service), describe(service)[::-1]):
        ordered = [session["session"] for session in order_sessions({"sessions": sessions})]
        assert ordered[ordered.index(parent) + 1] == agent
