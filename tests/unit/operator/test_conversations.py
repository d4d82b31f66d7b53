"""One row per caller and conversation: no detector or replica counts a request twice."""

import json
import random
import shlex
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import asdict

from extproc.cli.main import make_parser
from extproc.engine.orders import ALLOW, BLOCK, KILL, RELEASE, ActiveOverride, Target
from extproc.ext_proc.service import Service
from extproc.operator.admin.row_commands import suggest_for_loop, suggest_for_session
from extproc.operator.board import unpack_all
from extproc.operator.loop_rows import (
    INCIDENT_SECONDS,
    MAX_LOOPS,
    ConversationRow,
    Loop,
    LoopDocument,
)
from extproc.operator.standing_orders import OrderIndex, ShownRow, concerns
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.messages import body, headers
from tests.support.operated import Ahead, Operated
from tests.support.orders import USER, apply_orders, order
from tests.support.service import CHAT, decoded, exchange, make_service
from tests.support.turn_writers import Did, as_chat

TURNS: dict[str, Any] = {
    "similarity": "turns",
    "action": "steer",
    "escalate": {"reject": 5},
    "session": {},
    **USER,
}


def write_agent(times: int, task: str = "a", *, error: str = "") -> bytes:
    turns = [
        Did((("search", {"q": task}),), (error or "nothing found",), "", f"{task}: {n}", n)
        for n in range(1, times + 1)
    ]
    return json.dumps(as_chat(turns)).encode()


def send(service: Service, content: bytes, user: str = "ann", session: str = "") -> bool:
    """Whether a request of an agent is forwarded."""
    head = (
        headers(CHAT, x_user_id=user, x_session_id=session)
        if session
        else headers(CHAT, x_user_id=user)
    )
    answers = exchange(service, head, body(content))
    return bool(decoded(answers[-1]).WhichOneof("response") != "immediate_response")


def look(
    *services: Service,
    orders: Sequence[ActiveOverride] = (),
    price: float | None = None,
    **query: Any,  # noqa: ANN401  # of a URL
) -> dict[str, Any]:
    for service in services:
        service.reporter.show_callers = True
    return Operated(services=services, orders=orders, price=price).ask("/loops", **query)


# Three policies that see the same looper.
WATCHED = [
    policy("agents", ANY, **TURNS),
    policy("storm", ANY, action="warn", threshold_identical_requests=2, **USER),
    policy("canary", ANY, mode="shadow", **{**TURNS, "action": "land"}),
]


def test_conversation_is_one_row_for_all_policies() -> None:
    service, sent = make_service(*WATCHED), [write_agent(times) for times in (1, 2, 3, 3, 4, 5, 6)]
    forwarded = [send(service, content) for content in sent]
    acted = [place for place in range(len(sent)) if place > 1]

    report = look(service, price=1_000_000.0)

    (row,) = report["conversations"]
    assert forwarded == [True] * 5 + [False] * 2
    assert len({loop["policy"] for loop in row["loops"]}) == 3
    assert sum(loop["requests"] for loop in row["loops"]) > len(acted)
    assert (row["requests"], row["requests_sent_on"], row["requests_not_sent_on"]) == (5, 3, 2)
    size = sum(len(sent[place]) for place in acted if forwarded[place])
    assert (
        row
        | {
            "input_tokens_sent_on": size // 4,
            "cost_sent_on_usd": size // 4,
            "input_tokens_not_sent_on": size * 2 // 3 // 4,
            "action": "reject",
            "shadow": "reject",
            "tools": ["search"],
        }
        == row
    )
    assert report["total"]["requests"] == 5


def test_unnamed_conversations_are_distinguished_by_opening_or_repetition() -> None:
    service = make_service(
        policy("agents", ANY, **TURNS), policy("p", {"pathPrefix": "/poll"}, **USER)
    )
    for user, task in (("ann", "a"), ("ann", "b"), ("bob", "a")):
        for times in (3, 4):
            send(service, write_agent(times, task), user)
    send(service, write_agent(3, "c"), session="one")
    for path in ("/poll/a", "/poll/b"):
        for _ in range(5):
            exchange(service, headers(path, x_user_id="ann", end=True))

    rows = look(service)["conversations"]

    assert sorted((row["requests"], row["session"] is None) for row in rows) == [
        (1, False),
        *[(2, True)] * 3,
        *[(3, True)] * 2,
    ]
    assert sorted((row["path"], len(row["loops"])) for row in rows if row["requests"] == 3) == [
        ("/poll/a", 1),
        ("/poll/b", 1),
    ]


def test_request_decided_in_two_parts_counts_once() -> None:
    head = policy("head", ANY, action="warn", threshold_identical_requests=2, body="ignore", **USER)
    service = make_service(
        head, policy("canary", ANY, mode="shadow", threshold_identical_requests=2, **USER)
    )
    for _ in range(3):
        exchange(service, headers("/", x_user_id="ann"), body(b"{}"))

    (row,) = look(service)["conversations"]

    assert (row["requests"], row["action"], row["shadow"]) == (2, "warn", "reject")
    assert [loop["policy"] for loop in row["loops"]] == ["canary", "head"]


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["ann", "bob"]),
        st.integers(1, 6),
        st.sampled_from("ab"),
        st.integers(0, 1),
        st.booleans(),
    ),
    max_size=25,
)


@pytest.mark.slow
@given(ACTS)
def test_each_request_counts_once_on_any_replica(
    acts: list[tuple[str, int, str, int, bool]],
) -> None:
    services = [make_service(*WATCHED), make_service(*WATCHED)]
    acted = forwarded = size = 0
    for user, times, task, place, named in acts:
        service, content = services[place], write_agent(times, task)
        before = sum(loop.total for loop in service.reporter.loops.list_loops())
        passes = send(service, content, user, task if named else "")
        if sum(loop.total for loop in service.reporter.loops.list_loops()) > before:
            acted, forwarded, size = acted + 1, forwarded + passes, size + passes * len(content)

    report = look(*services)

    rows = report["conversations"]
    assert len({(row["caller"], row["conversation"]) for row in rows}) == len(rows)
    for sums in (
        report["total"],
        {name: sum(row[name] for row in rows) for name in ("requests", "requests_sent_on")},
    ):
        assert (sums["requests"], sums["requests_sent_on"]) == (acted, forwarded)
    assert 0 <= size - 4 * report["total"]["input_tokens_sent_on"] <= 4 * len(rows)
    seen = [tuple(loop["fingerprint"] for loop in row["loops"]) for row in rows]
    assert all(seen)


NOW = 1_000_000.0


def write_loop(repeats: str) -> Loop:
    name: Any = {
        "policy": "p",
        "detector": "d",
        "mode": "enforce",
        "tenant": "a" * 16,
        "repeats": repeats,
    }
    texts: Any = dict.fromkeys(("session", "fingerprint", "method", "path", "route", "model"), "")
    return Loop(
        **name,
        **texts,
        tools=[],
        caller=[],
        first=NOW,
        last=NOW,
        count=1,
        requests={},
        size=0,
        stopped=0,
        stopped_size=0,
    )


ROWS = st.builds(
    lambda who, first, lasts, sent, refused, pace, loops: ConversationRow(
        "a" * 16,
        who,
        "",
        "",
        "/",
        "",
        [],
        [],
        [write_loop(loop) for loop in dict.fromkeys(loops)],
        NOW + first,
        NOW + first + lasts,
        sent + refused,
        100 * sent,
        refused,
        50 * refused,
        float(pace),
        NOW + first + lasts,
    ),
    st.sampled_from("xyz"),
    st.integers(0, 600),
    st.integers(0, 600),
    st.integers(1, 9),
    st.integers(0, 9),
    st.integers(0, 1_000),
    st.lists(st.sampled_from("abcdefghijkl"), max_size=MAX_LOOPS),
)


@given(st.lists(st.lists(ROWS, max_size=4), min_size=1, max_size=4), st.randoms())
def test_rows_of_replicas_add_up_in_any_order(
    replicas: list[list[ConversationRow]], chance: random.Random
) -> None:
    later, before = NOW + 1_300, [asdict(row) for rows in replicas for row in rows]
    documents = [LoopDocument(rows, []) for rows in replicas]
    once = LoopDocument.merge(documents, NOW)
    chance.shuffle(documents)
    packed = {str(n): each.pack() for n, each in enumerate(documents)}
    again = LoopDocument.merge(unpack_all(packed, LoopDocument).values(), NOW)

    every = [row for rows in replicas for row in rows]
    for merged in (once, again):
        assert sorted(row.conversation for row in merged.rows) == sorted(
            {row.conversation for row in every}
        )
        for field in ("requests", "size", "refused", "refused_size"):
            assert sum(getattr(row, field) for row in merged.rows) == sum(
                getattr(row, field) for row in every
            )
        assert sum(row.find_pace(later) for row in merged.rows) == pytest.approx(
            sum(row.find_pace(later) for row in every)
        )
        for row in merged.rows:
            own = [each for each in every if each.conversation == row.conversation]
            assert (row.first, row.last) == (
                min(each.first for each in own),
                max(each.last for each in own),
            )
            assert (
                len(row.loops)
                == len({loop.name for loop in row.loops})
                == min(MAX_LOOPS, len({loop.name for each in own for loop in each.loops}))
            )
    assert [asdict(row) for row in every] == before
    assert LoopDocument.merge([*documents, LoopDocument([], [], 2)], NOW + 9_000) == LoopDocument(
        [], [], 2
    )


def test_highest_current_cost_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, service = (
        Ahead(monkeypatch),
        make_service(policy("p", ANY, action="warn", threshold_identical_requests=2, **USER)),
    )
    for ago, user, size, times in ((900, "was", 4_000, 9), (0, "is", 400, 5)):
        clock.seconds = -ago
        for _ in range(times):
            exchange(service, headers("/", x_user_id=user), body(b"x" * size))

    for sort, expected in (
        ("now", [4, 8]),
        ("", [4, 8]),
        ("cost", [8, 4]),
        ("first", [8, 4]),
        ("last", [4, 8]),
    ):
        query: dict[str, Any] = {"sort": sort} if sort else {}
        rows = look(service, **query)["conversations"]
        assert [row["requests"] for row in rows] == expected, sort
    assert [row["looping"] for row in rows] == [True, False]
    paces = [row["input_tokens_per_minute"] for row in rows]
    assert paces == [pytest.approx(400, rel=0.3), 0]  # it decays while the test waits


def test_selection_keeps_whole_conversations() -> None:
    service = make_service(*WATCHED)
    for times in (3, 4):
        send(service, write_agent(times))
    send(service, write_agent(3), "bob")

    queries: list[tuple[dict[str, Any], int]] = [
        ({"policy": "canary"}, 2),
        ({"tool": "search"}, 2),
        ({"caller": "x-user-id=bob"}, 1),
        ({"policy": "storm"}, 0),
        ({"tool": "other"}, 0),
        ({"limit": "1"}, 1),
    ]
    for query, callers in queries:
        assert len(look(service, **query)["conversations"]) == callers, query
    (bob,) = look(service, caller="x-user-id=bob")["conversations"]
    assert [loop["policy"] for loop in bob["loops"]] == ["canary", "agents"]
    assert (
        look(service, sort="age")["error"]
        == "sort must be one of now, cost, spared, requests, count, last, first"
    )


@pytest.mark.parametrize(("threshold", "would"), [(3, ["strict"]), (8, [])])
def test_row_names_canaries_that_would_refuse_it(threshold: int, would: list[str]) -> None:
    strict = {
        **TURNS,
        "action": "reject",
        "escalate": {},
        "threshold_identical_requests": threshold,
    }
    service = make_service(
        policy("live", ANY, **TURNS),
        policy("strict", ANY, mode="shadow", canary_of="live", **strict),
    )
    for times in range(1, 5):
        send(service, write_agent(times))

    (row,) = look(service)["conversations"]

    assert (row["would_be_refused_by"], row["tools"], row["count"]) == (would, ["search"], 4)


# ---- Orders


def test_order_is_shown_in_its_row() -> None:
    service = make_service(policy("agents", ANY, **TURNS))
    assert send(apply_orders(service, order(ALLOW)), write_agent(9, "allowed before it looped"))
    apply_orders(service)
    for times in (3, 4, 5):
        send(service, write_agent(times))
    allow = order(ALLOW, who="eve@host", reason="known")
    apply_orders(service, allow)
    assert send(service, write_agent(6))

    (row,) = look(service, orders=[allow, order(ALLOW, Target(caller="b" * 16))])["conversations"]

    assert [(each["kind"], each["who"], each["reason"]) for each in row["orders"]] == [
        ("allow", "eve@host", "known")
    ]
    assert (row["action"], row["requests"], row["requests_sent_on"]) == ("allow", 4, 3)
    assert row["commands"]["revoke"] == "loopguard overrides --revoke o"


@pytest.mark.parametrize(("kind", "ending"), [(BLOCK, "free"), (KILL, "free"), (ALLOW, "revoke")])
def test_blocked_row_is_freed_by_revoking(kind: str, ending: str) -> None:
    orders = [{"override": "newer", "kind": RELEASE}, {"override": "it", "kind": kind}]
    about = {"caller": "a" * 16, "session": "", "loops": []}

    commands = suggest_for_loop({**about, "orders": orders[kind == ALLOW :]}, limited=False)

    assert commands[ending] == "loopguard overrides --revoke it"
    assert ("loopguard allow" in commands["free"]) is (ending == "revoke")


def test_suggested_commands_are_valid_and_as_narrow_as_possible() -> None:
    service = make_service(policy("agents", ANY, **TURNS), policy("p", ANY, **USER))
    send(service, write_agent(3), session="s")
    for _ in range(3):
        exchange(service, headers("/poll", x_user_id="bob", end=True))
    send(service, write_agent(3, "b"), "cid")

    commands = {
        row["descriptors"]["x-user-id"]: row["commands"] for row in look(service)["conversations"]
    }

    shapes = {user: [_shape(command) for command in own.values()] for user, own in commands.items()}
    assert shapes == {
        "ann": ["block --caller --session --for", "allow --caller --session --for"],
        "bob": ["block --caller --fingerprint --for", "allow --caller --fingerprint --for"],
        "cid": ["block --caller --fingerprint --for", "allow --caller --fingerprint --for"],
    }


@pytest.mark.parametrize(
    ("limit", "tool", "used", "allowed", "flags"),
    [
        ("max_steps", "", 5, 5, "--steps"),
        ("max_tool_calls", "", 9, 8, "--tool-calls"),
        ("max_cost_per_session", "", 1, 1, "--cost"),
        ("max_calls_per_tool", "refund now", 1, 0, "--tool"),
        ("max_agents", "", 8, 8, "--agents"),
        ("max_depth", "", 3, 2, "--depth"),
        ("max_concurrent_agents", "", 4, 4, "--concurrent-agents"),
        ("max_spawns_per_minute", "", 4, 4, "--spawns-per-minute"),
        ("loop_detection", "", 3, 3, ""),
    ],
)
def test_refused_session_gets_a_grant_or_a_release(
    limit: str, tool: str, used: int, allowed: int, flags: str
) -> None:
    refused = {"limit": limit, "tool": tool or None, "used": used, "allowed": allowed}
    row: dict[str, Any] = {
        "caller": "a" * 16,
        "session": "5" * 16,
        "killed": None,
        "refused": refused,
        "orders": [],
    }
    row |= {"actual_cost": 1, "total_step_count": 5}

    command = suggest_for_session(row, named=True)["free"]

    words = _shape(command).split()
    assert words[0] == ("grant" if flags else "release")
    assert set(words[1:]) == {"--caller", "--session", flags} - {""}


def _shape(command: str) -> str:
    """The words of a command that are the same for each caller; fails if `loopguard` refuses it."""
    program, *arguments = shlex.split(command)
    assert program == "loopguard"
    make_parser(arguments).parse_args(arguments)
    return " ".join(
        word for place, word in enumerate(arguments) if not place or word.startswith("--")
    )


HASHES = st.sampled_from(["1" * 16, "2" * 16])
TARGETS = st.builds(
    Target, st.sampled_from(["", "1" * 16, "2" * 16]),
    st.sampled_from([(), (("a", "1" * 16),), (("a", "1" * 16), ("b", "2" * 16))]),
    st.sampled_from(["", "1" * 16]), st.sampled_from(["", "abcd"]), st.sampled_from(["", "search"]),
)  # fmt: skip
ABOUT = st.builds(
    ShownRow,
    st.sets(st.sampled_from("pq")),
    st.sets(HASHES),
    st.dictionaries(st.sampled_from("ab"), HASHES),
    st.sets(HASHES),
    st.sets(st.sampled_from(["abcd", "ef"])),
    st.sets(st.sampled_from(["search", "read"])),
)


@given(st.lists(st.tuples(TARGETS, st.sampled_from(["", "p"])), max_size=9), ABOUT)
def test_order_index_finds_what_a_full_search_finds(
    targets: list[tuple[Target, str]], about: ShownRow
) -> None:
    named = [(target, policy) for target, policy in targets if any(target)]
    orders = [
        order(BLOCK, target, name=str(n), about=policy, since=n)
        for n, (target, policy) in enumerate(named)
    ]

    found = OrderIndex(orders).find(about)

    assert [each.name for each in found] == [
        each.name for each in reversed(orders) if concerns(each, about)
    ]


# ---- Incidents


def fail(service: Service, users: str, tasks: str, times: int = 5) -> list[bool]:
    """A session of each user about each task, whose tool fails; which requests are forwarded."""
    content = [
        (user, write_agent(times, task, error="error: the database is down"))
        for task in tasks
        for user in users
    ]
    return [send(service, each, user) for user, each in content]


def test_incident_is_one_row_with_its_loops() -> None:
    service = make_service(*WATCHED)
    forwarded = [*fail(service, "abc", "12"), *fail(service, "ab", "1", 6)]
    send(service, write_agent(3), "dora")

    report = look(service)

    (incident,) = report["incidents"]
    assert forwarded == [False] * 4 + [True] * 4
    assert (
        incident
        | {
            "tool": "search",
            "policies": ["agents", "canary"],
            "sessions": 6,
            "callers": 3,
            "not_refused": 4,
            "requests": 8,
            "requests_sent_on": 4,
            "requests_not_sent_on": 4,
        }
        == incident
    )
    assert (len(incident["conversations"]), incident["active"]) == (4, True)
    assert [row["descriptors"] for row in report["conversations"]] == [{"x-user-id": "dora"}]
    assert report["total"]["requests"] == 9
    assert list(incident["commands"].values()) == [
        "loopguard block --tool search --for 30m",
        "loopguard allow --tool search --for 2h",
    ]
    assert look(service, caller="x-user-id=dora")["incidents"] == []
    assert "database" not in json.dumps(report)


@pytest.mark.slow
def test_loop_after_an_incident_is_a_row_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, service = Ahead(monkeypatch), make_service(policy("agents", ANY, **TURNS))
    clock.seconds = -INCIDENT_SECONDS - 100
    fail(service, "abc", "12")
    for number in range(200):
        fail(service, "x", f"{chr(1_000 + number)}")
    clock.seconds = 0

    assert fail(service, "a", "1", 7) == [False]

    report = look(service)
    assert [row["requests"] for row in report["conversations"]] == [2]
    assert (report["incidents"][0]["requests"], len(service.reporter.loops.copy())) == (205, 5)
