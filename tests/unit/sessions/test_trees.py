"""Limits on trees of agents, with the headers of Claude Code, Codex and opencode."""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
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
    Grant,
    Overrides,
    Target,
    hash_descriptor,
)
from extproc.ext_proc.service import Service
from extproc.operator.overrides import parse_order, read_override, write_override
from extproc.operator.row_events import SessionEvents
from extproc.pb.external_processor_pb2 import ProcessingResponse
from extproc.policy.presets import find_preset
from extproc.sessions.names import hash_session
from extproc.store.rules.tree import AGENT_LIMITS, AgentLimits, Tree, TreeStep
from tests.support.orders import apply_orders, order
from tests.support.service import headers_of, make_service, sample, status
from tests.support.session_limits import TOOL, ask, describe, limited, nameless, told, turns
from tests.support.turn_writers import Did, as_chat

ROOT = "root"


def claude(agent: str = "", parent: str = "", root: str = ROOT) -> dict[str, str]:
    named = {"x_claude_code_agent_id": agent, "x_claude_code_parent_agent_id": parent}
    return {
        "x_claude_code_session_id": root,
        **{name: value for name, value in named.items() if value},
    }


def codex(agent: str = "", parent: str = "", root: str = ROOT) -> dict[str, str]:
    """The headers of Codex, where the root is an agent, too."""
    started = {"x_codex_parent_thread_id": parent or root} if agent else {}
    return {"session_id": root, "thread_id": agent or root, **started}


def opencode(agent: str = "", parent: str = "", root: str = ROOT) -> dict[str, str]:
    """The headers of opencode, which names only the parent."""
    return (
        {"x_session_id": agent, "x_parent_session_id": parent or root}
        if agent
        else {"x_session_id": root}
    )


CLIENTS = [claude, codex, opencode]


IN_ROOT = Target(session=hash_session("header:x-claude-code-session-id", ROOT))
OF_CALLER = Target(caller=hash_descriptor("x-team", "t"))


def loops(similarity: str) -> dict[str, Any]:
    loop = {
        "enabled": True,
        "similarity": similarity,
        "threshold_identical_requests": 3,
        "action": "reject",
    }
    loop |= {"window_seconds": 60} if similarity == "exact" else {}
    return {
        "id": "loops",
        "spec": {
            "selector": {"pathPrefix": "/"},
            "limit_keys": ["header:x-team"],
            "loop_detection": loop,
        },
    }


def send(service: Service, number: int, **names: str) -> ProcessingResponse:
    return ask(service, turns(1, number=str(number)), session="", **names)


def send_all(service: Service, requests: Sequence[dict[str, str]]) -> list[str]:
    answers = [send(service, number, **names) for number, names in enumerate(requests)]
    return [
        headers_of(answer).get("x-loopguard-limit", "") if status(answer) != 200 else ""
        for answer in answers
    ]


NAMED = {
    "keys": ["header:x-run"],
    "agent_keys": ["header:x-agent"],
    "parent_keys": ["header:x-parent"],
}
PAIRS = [("a", ROOT), ("b", "a"), ("c", "b")]
CASES: dict[str, tuple[dict[str, Any], Sequence[dict[str, str]], list[str]]] = {
    **{
        f"{client.__name__}: {name}": (limits, [client(*names) for names in requests], expected)
        for client in CLIENTS
        for name, limits, requests, expected in (
            (
                "an agent beyond the limit is refused, others are not",
                {"max_agents": 2},
                ["", "a", "b", "c", "b", "", "c", "a"],
                ["", "", "", "max_agents", "", "", "max_agents", ""],
            ),
            (
                "depth is counted along parents, and an unknown one is not below the root itself",
                {"max_depth": 2},
                ["", "a", "ba", "cb", "da", "e"],
                ["", "", "", "max_depth", "", ""],
            ),
            (
                "all agents of a root pass six requests together",
                {"max_steps": 6},
                ["", "a", "b", "ca"] * 3,
                [""] * 6 + ["max_steps"] * 6,
            ),
        )
    },
    "other clients name agents by keys of the policy": (
        {"session": NAMED, "max_depth": 2},
        [
            {"x_run": ROOT},
            *({"x_run": ROOT, "x_agent": name, "x_parent": parent} for name, parent in PAIRS),
        ],
        ["", "", "", "max_depth"],
    ),
    "clients that name only the parent": (
        {"session": (NAMED | {"keys": ["header:x-parent", "header:x-agent"]}), "max_depth": 2},
        [{"x_agent": ROOT}, *({"x_agent": name, "x_parent": parent} for name, parent in PAIRS)],
        ["", "", "", "max_depth"],
    ),
    "cycles and unknown parents are handled": (
        {"max_agents": 2, "max_depth": 5},
        [
            *(opencode(name, parent) for name, parent in ("ab", "ba", "aa", "ca", "dc")),
            *({**opencode(name, "b"), "team": "other"} for name in "acd"),
        ],
        ["", "", "", "", "max_agents", "", "", "max_agents"],
    ),
}


@pytest.mark.parametrize(("limits", "requests", "expected"), CASES.values(), ids=CASES)
def test_agents_are_limited_per_root(
    limits: dict[str, Any], requests: Sequence[dict[str, str]], expected: list[str]
) -> None:
    service = make_service(limited(**limits))

    assert send_all(service, requests) == expected
    assert "team" in requests[-1] or len(service.reporter.sessions.copy()) == 1


def run_orchestrator(width: int, waves: int, seconds: int) -> tuple[int, set[str]]:
    """Agents that the preset admits, and its limits that refuse others.

    They start in waves, and ask every five seconds.
    """
    limits = json.loads(Path(find_preset("sessions")).read_text())["spec"]["session_limits"]
    allowed, tree = AgentLimits(*[limits.get(name, -1) for name in AGENT_LIMITS]), Tree()
    refused: set[str] = set()
    for at in range(0, waves * seconds, 5):
        for number in range(width):
            agent = (at // seconds * width + number + 1).to_bytes(8)
            _, limit, _, _ = tree.admit(TreeStep("", allowed, agent, b""), at * 1000, passes=True)
            refused |= {AGENT_LIMITS[limit]} if limit >= 0 else set()
    return tree.agents, refused


@pytest.mark.parametrize("width", [1, 2, 4, 6, 8, 10])
@pytest.mark.parametrize("seconds", [10, 30, 120])
@pytest.mark.parametrize("waves", [2, 20])
def test_preset_refuses_no_agent_of_an_orchestrator(width: int, waves: int, seconds: int) -> None:
    assert run_orchestrator(width, waves, seconds) == (width * waves, set())


@pytest.mark.parametrize(
    ("runaway", "admitted", "limit"),
    [
        ((188, 1, 5), 60, "max_spawns_per_minute"),
        ((60, 3, 60), 180, "max_concurrent_agents"),
        ((19, 19, 30), 200, "max_agents"),
    ],
    ids=["188 at once", "60 a minute", "361 in ten minutes"],
)
def test_preset_ends_runaway_agents(
    runaway: tuple[int, int, int], admitted: int, limit: str
) -> None:
    assert run_orchestrator(*runaway) == (admitted, {limit})


def test_refused_agent_is_told_it_was_not_started() -> None:
    service = make_service(limited(max_agents=2))
    send_all(service, [claude(), claude("a"), claude("b")])

    message = told(send(service, 99, **claude("d")))["message"]

    assert message.startswith(
        "Agent limit reached: this session has started 2 of its 2 agents. This agent was not "
        "started."
    )
    assert sample(service, "session_agents_total", policy="agents", mode="enforce") == 2


def test_agents_with_equal_requests_take_separate_steps() -> None:
    service = make_service(limited(max_steps=3))

    found = [status(ask(service, turns(0), session="", **claude(agent))) for agent in "abacd"]

    assert found == [200, 200, 200, 200, 429]


@pytest.mark.parametrize(
    ("kind", "client"), [(kind, client) for kind in (KILL, BLOCK) for client in CLIENTS]
)
# As above
def test_order_for_a_root_stops_its_whole_tree(kind: str, client: Any) -> None:  # noqa: ANN401
    service = make_service(limited(max_agents=9))
    agents = [client(), client("a"), client("b", "a"), client("c", "b")]
    send_all(service, agents)
    (root,) = [run.name.session for run in service.reporter.sessions.copy()]
    apply_orders(service, order(kind, Target(session=root)))

    answers = [
        send(service, number, **names)
        for number, names in enumerate([*agents, client("d"), client(root="other")])
    ]

    assert [status(answer) for answer in answers] == [429] * 5 + [200]


def test_kill_of_an_agent_spares_its_session() -> None:
    service = make_service(limited(max_agents=9))
    requests = [claude(), claude("a"), claude("b")]
    send_all(service, requests)
    agent = describe(service)[0]["agents"]["tree"][1]["agent"]
    apply_orders(service, order(KILL, Target(session=agent)))

    assert [status(send(service, number, **names)) for number, names in enumerate(requests)] == [
        200,
        200,
        429,
    ]
    assert agent == hash_session("header:x-claude-code-agent-id", "b")


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        ([(KILL, IN_ROOT)], 429),
        ([(KILL, IN_ROOT), (RELEASE, IN_ROOT)], 200),
        ([(KILL, IN_ROOT), (RELEASE, OF_CALLER)], 200),
        ([(KILL, IN_ROOT), (KILL, OF_CALLER)], 429),
        ([(KILL, OF_CALLER)], 200),
        ([(KILL, IN_ROOT), (ALLOW, OF_CALLER)], 429),
    ],
)
def test_release_ends_a_kill_without_session_limits(
    orders: Sequence[tuple[str, Target]], expected: int
) -> None:
    given = [
        order(kind, target, name=f"o{at}", since=at * 100)
        for at, (kind, target) in enumerate(orders)
    ]
    service = apply_orders(make_service(loops("turns")), *given)

    assert status(send(service, 1, **claude("a"))) == expected


# Requests whose last one exceeds a limit of 1, and the flag of `loopguard grant` that allows it.
OVER = {
    "max_agents": ([claude(), claude("a"), claude("b")], "--agents 1"),
    "max_depth": ([claude(), claude("a"), claude("b", "a")], "--depth 1"),
    "max_concurrent_agents": ([claude(), claude("a"), claude("b")], "--concurrent-agents 1"),
    "max_spawns_per_minute": ([claude(), claude("a"), claude("b")], "--spawns-per-minute 1"),
}


@pytest.mark.parametrize("limit", OVER)
def test_printed_grant_allows_exactly_one_more_agent(limit: str) -> None:
    limits: dict[str, Any] = {limit: 1}
    service = make_service(limited(**limits))
    requests, flag = OVER[limit]
    others = [{**names, "x_claude_code_session_id": "other"} for names in requests]
    assert send_all(service, [*requests, *others]) == ["", "", limit] * 2
    message = told(send(service, 99, **requests[-1]))["message"]
    events: list[dict[str, Any]] = []
    SessionEvents(lambda *event: events.append(event[2]), lambda: False).look(
        service.reporter.sessions.copy()
    )
    commands = [event["grant"] for event in events]

    (command,) = [
        command
        for command in commands
        if f"The user can ask an operator to allow it with `{command}`." in message
    ]
    parser = argparse.ArgumentParser()
    grant.add_flags(parser)
    options = parser.parse_args(command.split()[2:])
    assert command.endswith(f" {flag}")
    amounts = {
        name: getattr(options, name) for name in Grant._fields if getattr(options, name) is not None
    }
    asked = {"kind": "grant", "session": options.session, "caller": options.caller[0], **amounts}
    given = parse_order(asked, "", time(), service.engine.plans)
    service.overrides = Overrides([read_override(given.name, write_override(given))])

    again = [requests[-1], claude("c", "b"), others[-1]]
    assert send_all(service, again) == ["", limit, limit]
    assert told(send(service, 99, **again[1]))["allowed"] == 2
    (run,) = [session for session in describe(service) if session["granted"]]
    assert (run["limits"], run["granted"]) == ({limit: 1}, {limit: 1})


@pytest.mark.parametrize(
    ("most", "granted", "requests", "told"),
    [
        (
            2,
            2,
            [claude("a"), claude("b"), claude("c")],
            ["", "2 of this session's 4", "3 of this session's 4"],
        ),
        (
            3,
            0,
            [claude(), claude("a"), claude("b"), claude()],
            ["", "", *["2 of this session's 3"] * 2],
        ),
    ],
    ids=["with granted ones", "to whichever agent asks"],
)
def test_note_says_how_many_agents_were_started(
    most: int, granted: int, requests: list[dict[str, str]], told: list[str]
) -> None:
    service = make_service(limited(max_agents=most, escalate={"steer": {"max_agents": 2}}))
    apply_orders(service, order(GRANT, IN_ROOT, grant=Grant(agents=granted)))

    answers = [send(service, number, **names) for number, names in enumerate(requests)]

    notes = [answer.request_body.response.body_mutation.body.decode() for answer in answers]
    found = [
        re.search(r"(\d+ of this session's \d+) agents have been started", note) for note in notes
    ]
    assert [each[1] if each else "" for each in found] == told


@pytest.mark.slow
def test_grants_of_agents_end_at_a_thousand() -> None:
    service = make_service(limited(max_agents=999, max_concurrent_agents=1))
    apply_orders(service, order(GRANT, IN_ROOT, grant=Grant(0, 0, 0, 7, 700, 1_000, 7)))

    assert (
        send_all(service, [claude(f"a{number}", f"a{number - 1}") for number in range(1, 1_001)])
        == [""] * 1_000
    )
    refused = told(send(service, 99, **claude("b")))
    assert (refused["limit"], refused["allowed"]) == ("max_agents", 1_000)
    assert "operator" not in refused["message"]


def test_report_shows_the_tree_of_agents() -> None:
    service = make_service(limited(max_agents=3))
    send_all(
        service, [claude(), claude("a"), claude("b"), claude("c", "a"), claude("d"), claude("d")]
    )
    events: list[tuple[str, Any]] = []
    watcher = SessionEvents(lambda kind, _, data: events.append((kind, data)), lambda: False)
    for _ in range(2):
        watcher.look(service.reporter.sessions.copy())

    (session,) = describe(service)
    agents = {hash_session("header:x-claude-code-agent-id", name): name for name in "abcd"}
    tree = [
        (agents[row["agent"]], row["level"], row["requests"], row["refused"])
        for row in session["agents"]["tree"]
    ]
    assert tree == [
        ("a", 1, 1, None),
        ("c", 2, 1, None),
        ("b", 1, 1, None),
        ("d", 1, 2, "max_agents"),
    ]
    assert {
        name: session["agents"][name] for name in ("started", "active", "refused_requests")
    } == {"started": 3, "active": 3, "refused_requests": 2}
    ((kind, data),) = events
    assert (kind, data["limit"], data["agents_started"], data["agent_requests_refused"]) == (
        "agents_limited",
        "max_agents",
        3,
        2,
    )
    assert agents[data["gen_ai.agent.id"]] == "d"


def chat(first: str, calls: Sequence[tuple[str, dict[str, str]]] = ()) -> bytes:
    done = [Did((call,), ("done",), number=number) for number, call in enumerate(calls, 1)]
    made = as_chat(done)
    made["messages"][0] = {"role": "user", "content": first}
    return json.dumps({**made, "tools": [TOOL]}).encode()


def test_unnamed_session_is_linked_to_its_starter() -> None:
    service = make_service(limited(max_steps=9))
    task = "Read every file in this folder, and count the words."
    spawn = [("task", {"description": "count", "prompt": task})]
    first = "Please do it all for me."
    nameless(service, [chat(first), chat(task), chat(first, spawn), chat("Something else again.")])

    sessions = describe(service)

    steps = {each["session"]: each["total_step_count"] for each in sessions}
    ((agent, parent),) = [
        (each["session"], each["started_by"]) for each in sessions if each["started_by"]
    ]
    assert (steps[agent], steps[parent]) == (1, 2)
    for given in (sessions, sessions[::-1]):
        ordered = [session["session"] for session in order_sessions({"sessions": given})]
        assert ordered[ordered.index(parent) + 1] == agent
