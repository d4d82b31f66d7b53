"""Session limits as specified; the numbers of cases are those of the specification."""

import json
from collections.abc import Sequence
from time import time
from typing import Any

import pytest

from extproc.engine.orders import Overrides
from extproc.ext_proc.service import Service
from extproc.operator.overrides import parse_order, read_override, write_override
from extproc.operator.row_events import SessionEvents
from extproc.operator.session_rows import merge_sessions
from extproc.pb.external_processor_pb2 import ProcessingResponse
from extproc.sessions.rates import Usage
from tests.support.command import find_missing
from tests.support.messages import body, headers
from tests.support.service import (
    decoded,
    exchange,
    headers_of,
    make_service,
    metadata_of,
    sample,
    status,
)
from tests.support.session_limits import (
    ask,
    changed,
    describe,
    limit_of,
    limited,
    settle,
    told,
    turns,
)
from tests.support.turn_writers import Did, as_anthropic, as_chat

Calls = Sequence[tuple[str, int]]  # of one answer: tools, each with a number as its argument

PHASES = ("search", "collect", "scan")


def declare(*tools: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": tool, "parameters": {}}} for tool in tools]


def show(steps: Sequence[Calls], *tools: str) -> bytes:
    done = [
        Did(tuple((tool, {"n": number}) for tool, number in calls), ("ok",) * len(calls), number=at)
        for at, calls in enumerate(steps, 1)
    ]
    return json.dumps({**as_chat(done), "tools": declare(*(tools or PHASES))}).encode()


def list_offered(answer: ProcessingResponse) -> list[str]:
    """The tools that an edited request still offers, sorted; none if it forbids calls."""
    body = changed(answer)
    return (
        []
        if body.get("tool_choice") == "none"
        else sorted(tool["function"]["name"] for tool in body.get("tools", []))
    )


def show_each(steps: Sequence[Calls]) -> list[bytes]:
    return [show(steps[:count]) for count in range(len(steps) + 1)]


FIVE = {"loop_detection": {"window": 5, "threshold": 3}}
THREE: list[Calls] = [[("search", at) for at in range(3)], [("scan", at) for at in range(3)]]
NARROW = {"max_tool_calls": 1, "max_tool_calls_mode": "narrow"}
RUNS = [turns(number) for number in range(6)]
STUCK: list[Calls] = [[("search", 1)]]
LOST = [
    json.dumps(
        {
            **as_chat([Did((("search", {"n": 1}), ("scan", {"n": at})), ("ok", "ok"), number=at)]),
            "tools": [],
        }
    ).encode()
    for at in (1, 2, 3)
]
CASES: dict[str, tuple[dict[str, Any], Sequence[bytes], int, tuple[str, int, int] | None]] = {
    "1: steps, whatever a history has lost": (
        {"max_steps": 3},
        [*RUNS[:4], show([])],
        3,
        ("max_steps", 3, 3),
    ),
    "2: one tool call": ({"max_tool_calls": 1}, RUNS[:2], 1, ("max_tool_calls", 1, 1)),
    "2: a total that equals the limit": (
        {"max_tool_calls": 4},
        RUNS[:5],
        4,
        ("max_tool_calls", 4, 4),
    ),
    "2: each call of an answer": (
        {"max_tool_calls": 4},
        show_each(THREE),
        2,
        ("max_tool_calls", 6, 4),
    ),
    "3: narrow does not apply to steps": (
        {"max_steps": 1, **NARROW},
        RUNS[:2],
        1,
        ("max_steps", 1, 1),
    ),
    "3: narrow without limits of tools": (NARROW, RUNS[:2], 1, ("max_tool_calls", 1, 1)),
    "6: equal calls beside others": (
        FIVE,
        show_each([[("search", 1), ("scan", at)] for at in range(3)]),
        3,
        ("loop_detection", 3, 3),
    ),
    "6: in a row": (FIVE, [show(STUCK * 3)], 0, ("loop_detection", 3, 3)),
    "6: in one answer": (FIVE, [show([[("search", 1)] * 3])], 0, ("loop_detection", 3, 3)),
    "6: other arguments": (FIVE, [show([[("search", at)] for at in range(9)])], 1, None),
    "6: other tools": (FIVE, [show([[(PHASES[at], 1)] for at in (0, 1, 2)] * 2)], 1, None),
    "6: outside of the window": (
        FIVE,
        [show([*STUCK * 2, *([("scan", at)] for at in range(3)), *STUCK])],
        1,
        None,
    ),
    "6: with pauses": (
        FIVE,
        [
            show(
                [
                    *([("search", 1), ("scan", at)] for at in (1, 2)),
                    *([("scan", at)] for at in (3, 4)),
                    *STUCK,
                ]
            )
        ],
        0,
        ("loop_detection", 3, 3),
    ),
    "6: the newest step differs": (FIVE, [show([*STUCK * 3, [("scan", 1)]])], 1, None),
    "6: steps that a history has lost": (FIVE, LOST, 2, ("loop_detection", 3, 3)),
    "ours: three retries are no steps": ({"max_steps": 1}, [RUNS[1]] * 5, 4, ("max_steps", 1, 1)),
    "ours: three retries of each step": ({"max_steps": 5}, [RUNS[1]] * 22, 20, ("max_steps", 5, 5)),
    **{
        f"ours: half a character hides no calls: {cut!r}": (
            {"max_tool_calls": 3},
            [body.replace(b"result 1", b"result " + cut) for body in RUNS[1:4]],
            2,
            ("max_tool_calls", 3, 3),
        )
        for cut in (rb"\ud83d", rb"\uDCFF", rb"\ude00\ud83d")
    },
}


@pytest.mark.parametrize(("limits", "bodies", "passed", "refused"), CASES.values(), ids=CASES)
def test_requests_pass_up_to_the_limit(
    limits: dict[str, Any],
    bodies: Sequence[bytes],
    passed: int,
    refused: tuple[str, int, int] | None,
) -> None:
    service = make_service(limited(**limits))

    answers = [ask(service, data) for data in bodies]

    assert [status(answer) for answer in answers] == [200] * passed + [429] * (len(bodies) - passed)
    assert refused is None or limit_of(answers[-1]) == refused


def test_narrow_offers_only_tools_with_calls_left() -> None:
    limits: dict[str, Any] = {
        "max_calls_per_tool": {"collect": 3, "scan": 2},
        "max_tool_calls": 15,
        "max_tool_calls_mode": "narrow",
    }
    service = make_service(limited(**limits))
    steps: list[Calls] = []
    offered = {}
    for at in range(21):
        answer = ask(service, show(steps))
        if status(answer) != 200:
            break
        offered[at] = list_offered(answer) or list(PHASES)
        wanted = ("search" if at < 15 else "collect", "scan")
        steps.append([(next(tool for tool in (*wanted, "collect") if tool in offered[at]), at)])

    assert limit_of(answer) == ("max_tool_calls", 20, 15)
    assert {at: tools for at, tools in offered.items() if at >= 15} == {
        15: ["collect", "scan"],
        16: ["collect", "scan"],
        17: ["collect", "scan"],
        18: ["scan"],
        19: ["scan"],
    }


PHASE = {"max_calls_per_tool": {"collect": 3}, "max_tool_calls": 2, "max_tool_calls_mode": "narrow"}
AT_ONCE: list[Calls] = [[("search", at) for at in range(5)]]
COLLECTED: list[Calls] = [*AT_ONCE, [("collect", 1)]]
USED_UP: list[Calls] = [
    [("collect", 1), ("collect", 2), ("scan", 1)],
    *([("search", at)] for at in range(9)),
]


@pytest.mark.parametrize(
    ("limits", "sent", "found"),
    [
        (  # one answer has used up the total
            PHASE,
            [AT_ONCE, COLLECTED, [*COLLECTED, [("search", 9)]]],
            [["collect"], ["collect"], ("max_tool_calls", 7, 2)],
        ),
        (
            {"max_calls_per_tool": {"collect": 2, "scan": 1}},
            [USED_UP, [*USED_UP, [("scan", 2)]]],
            [["search"], ("max_calls_per_tool", 2, 1)],
        ),
    ],
)
def test_each_tool_has_its_own_count(
    limits: dict[str, Any], sent: list[list[Calls]], found: list[object]
) -> None:
    service = make_service(limited(**limits))

    answers = [ask(service, show(steps)) for steps in sent]

    assert [
        list_offered(answer) if status(answer) == 200 else limit_of(answer) for answer in answers
    ] == found


def test_anthropic_answer_is_limited_to_one_call() -> None:
    service = make_service(limited(max_calls_per_tool={"scan": 1}))
    sent = {**as_anthropic([]), "tools": [{"name": "scan", "input_schema": {"type": "object"}}]}
    held = {"type": "auto", "disable_parallel_tool_use": True}

    assert changed(ask(service, json.dumps(sent).encode())) == {**sent, "tool_choice": held}


@pytest.mark.parametrize(
    ("limits", "twice"),
    [
        (
            {"max_calls_per_tool": {"scan": 1}},
            show([], "scan").replace(b'"name": "scan"', b'"name": "scan", "name": "run"'),
        ),
        (
            {"max_steps": 3, "usage": "request"},
            b'{"stream":true,"stream_options":{},"stream_options":{},"messages":[{"role":"user","content":"hi"}]}',
        ),
    ],
    ids=["held to one call", "asked for its usage"],
)
def test_ambiguous_body_passes_unedited(limits: dict[str, Any], twice: bytes) -> None:
    service = make_service(limited(**limits))

    answer = ask(service, twice)

    assert (status(answer), changed(answer)) == (200, {})
    assert sample(service, "unnarrowed_total", policy="agents", reason="ambiguous_body") == (
        "usage" not in limits
    )


PRICES = {"*": {"input": 10, "output": 50}}


def test_request_after_the_cost_limit_is_refused() -> None:
    service = make_service(limited(max_cost_per_session=1.0, prices=PRICES))
    sent = show([])

    for usage, status_ in (
        (Usage(10_000, 0), 200),
        (Usage(0, 6_000), 200),
        (Usage(40_000, 0), 500),
        (Usage(90_000, 0), 200),
    ):
        settle(service, ask(service, sent), usage, status_)

    refused = ask(service, show([[("scan", 1)]]))
    assert limit_of(refused) == ("max_cost_per_session", 1.7, 1.0)
    assert headers_of(refused)["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("asked", "known", "passed"),
    [
        ({}, [], 12),  # nothing says what an answer costs: 0.05 dollars each, for 1,000 tokens
        ({"max_tokens": 5_600}, [], 4),
        ({"max_completion_tokens": 5_600}, [], 4),
        ({"max_tokens": 5_600}, [Usage(0, 2_000)], 9),
        ({}, [Usage(0, 5_600), Usage(0, 5_600)], 2),
    ],
    ids=["size", "max_tokens", "max_completion_tokens", "cheaper average", "dearer average"],
)
def test_concurrent_requests_reserve_their_cost(
    asked: dict[str, Any], known: list[Usage], passed: int
) -> None:
    service = make_service(limited(max_cost_per_session=1.0, prices=PRICES))
    for number, usage in enumerate(known):
        settle(service, ask(service, show([], str(number))), usage)

    answers = [
        ask(service, json.dumps({**json.loads(turns(number)), **asked}).encode())
        for number in range(12)
    ]

    assert [status(answer) for answer in answers] == [200] * passed + [429] * (12 - passed)


@pytest.mark.parametrize(
    ("options", "path", "asked"),
    [
        ({"stream": True}, "/v1/chat/completions", {"include_usage": True}),
        ({"stream": True, "stream_options": None}, "/v1/completions", {"include_usage": True}),
        (
            {"stream": True, "stream_options": {"a": 1}},
            "/v1/chat/completions",
            {"a": 1, "include_usage": True},
        ),
        (
            {"stream": True, "stream_options": {"include_usage": False}},
            "/v1/chat/completions",
            {"include_usage": True},
        ),
        ({"stream": True, "stream_options": {"include_usage": True}}, "/v1/chat/completions", None),
        ({"stream": True, "stream_options": 3}, "/v1/chat/completions", None),
        ({"stream": False}, "/v1/chat/completions", None),
        ({"stream": True}, "/v1/messages", None),
        ({"stream": True}, "/v1/responses", None),
    ],
)
def test_stream_is_asked_for_its_usage(options: dict[str, Any], path: str, asked: Any) -> None:  # noqa: ANN401  # JSON
    sent = {**json.loads(show([])), **options}
    data = json.dumps(sent).encode()
    given: list[tuple[Any, dict[str, Any]]] = [(asked, {"usage": "request"}), (None, {})]
    for wanted, usage in given:
        service = make_service(limited(max_steps=3, **usage))

        answer = decoded(
            exchange(service, headers(path, x_team="t", x_session_id="s"), body(data))[-1]
        )

        assert changed(answer) == ({} if wanted is None else {**sent, "stream_options": wanted})
        assert metadata_of(answer)["sessions"]


def test_request_refused_by_reservations_may_be_retried() -> None:
    limits: dict[str, Any] = {
        "max_cost_per_session": 1.0,
        "prices": PRICES,
        "circuit_breaker": {"consecutive_blocks": 2},
    }
    service = make_service(limited(**limits, reject_status=402))
    dear = json.loads(show([])) | {"max_tokens": 30_000}
    first = ask(service, json.dumps(dear).encode())

    waiting = [ask(service, show([[("scan", at)]])) for at in (1, 2, 3)]
    settle(service, first, Usage(0, 1_000))

    assert [status(answer) for answer in waiting] == [429] * 3
    said = headers_of(waiting[0])
    assert (said["Retry-After"], said.get("x-should-retry")) == ("5", None)
    assert "Send this request again" in told(waiting[0])["message"]
    assert status(ask(service, show([[("scan", 1)]]))) == 200


@pytest.mark.parametrize(
    ("fails", "killed"),
    [((200, 500, 500), True), ((500, 200, 500), False)],
    ids=["in a row", "reset"],
)
def test_consecutive_errors_kill_the_session(fails: Sequence[int], killed: bool) -> None:
    service = make_service(limited(circuit_breaker={"consecutive_errors": 2}))
    for number, each in enumerate(fails):
        settle(service, ask(service, turns(number)), Usage(0, 0), each)

    answers = [ask(service, turns(number)) for number in (8, 9)]

    assert [status(answer) for answer in answers] == [429 if killed else 200] * 2
    assert not killed or {told(answer)["limit"] for answer in answers} == {"killed"}


def test_report_shows_the_state_of_a_session() -> None:
    service = make_service(
        limited(max_steps=2, prices=PRICES, circuit_breaker={"consecutive_blocks": 2})
    )
    for number, steps in enumerate(
        [[], [[("scan", 1), ("search", 1)]], [[("scan", 2)]], [[("scan", 3)]]]
    ):
        answer = ask(service, show(steps))
        if status(answer) == 200:
            settle(service, answer, Usage(10_000, 200 * number, 30, 4))

    (shown,) = describe(service)

    expected = {
        "total_step_count": 2,
        "total_tool_calls": 4,
        "actual_cost": 0.21068,
        "tool_call_counts": {"scan": 3, "search": 1},
        "total_block_count": 2,
        "consecutive_block_count": 2,
        "killed": "consecutive_blocks",
        "ended": "killed",
        "limits": {"max_steps": 2},
    }
    assert {name: shown[name] for name in expected} == expected
    assert [
        shown["usage"][f"{kind}_tokens"]
        for kind in ("input", "output", "cache_read", "cache_write")
    ] == [20_000, 200, 60, 8]


def test_report_shows_tools_and_errors_of_each_step() -> None:
    service = make_service(limited(max_steps=9))
    did = Did(
        (("scan", {"n": 1}), ("search", {"n": 1})), ("Error: no such host", "3 found"), number=1
    )
    for sent in (as_chat([did]), as_chat([did, did._replace(number=2, results=("ok", "ok"))])):
        ask(service, json.dumps(sent).encode())
    flagged = as_anthropic([Did((("scan", {"n": 1}),), ("no luck",), number=1)])
    flagged["messages"][-1]["content"][0]["is_error"] = True
    ask(service, json.dumps(flagged).encode(), session="flagged")

    rows = merge_sessions(service.reporter.sessions.make_document(shows_callers=False).rows, 0)

    assert {tuple((*call.tools, call.errors) for call in row.calls) for row in rows} == {
        (("scan", "search", 1), ("scan", "search", 0)), (("scan", 1),),
    }  # fmt: skip


def order(service: Service, **grant: Any) -> None:  # noqa: ANN401  # of an order
    given = parse_order({"kind": "grant", "key": "k", **grant}, "ann", time(), service.engine.plans)
    service.overrides = Overrides([read_override(given.name, write_override(given))])


def find_event(service: Service) -> dict[str, Any]:
    emitted: list[Any] = []
    SessionEvents(lambda *event: emitted.append(event), lambda: False).look(
        service.reporter.sessions.copy()
    )
    return dict(emitted[-1][2])


def test_tool_with_limit_zero_needs_a_grant() -> None:
    service = make_service(limited(max_calls_per_tool={"refund": 0}))
    tools = ("search", "refund")
    name = {"session": {"header:x-session-id": "s"}, "caller": {"x-team": "t"}}

    assert list_offered(ask(service, show([], *tools))) == ["search"]
    order(service, **name, tools={"refund": 1})
    assert list_offered(ask(service, show([[("search", 1)]], *tools))) == ["refund", "search"]
    assert list_offered(ask(service, show([], *tools), session="other")) == ["search"]
    assert list_offered(ask(service, show([[("search", 1)], [("refund", 1)]], *tools))) == [
        "search"
    ]


def test_refusal_and_event_have_the_grant_command() -> None:
    service = make_service(limited(max_calls_per_tool={"refund": 0}))
    steps: list[Calls] = [[("refund", 1), ("refund", 2)]]

    message = told(ask(service, show(steps, "refund")))["message"]
    event = find_event(service)

    command = event["grant"]
    assert (
        find_missing(
            message,
            "the tool refund was called 2 times in this session without approval",
            f"approve it with `{command}`.",
        )
        == []
    )
    assert (event["gen_ai.tool.name"], event["limit"], event["used"]) == (
        "refund",
        "max_calls_per_tool",
        2,
    )
    words = command.split()
    assert words[:3] + words[4:5] + words[6:] == [
        "loopguard",
        "grant",
        "--session",
        "--caller",
        "--tool",
        "refund=2",
    ]
    order(service, session=words[3], caller=words[5], tools={"refund": 2})
    assert [
        status(ask(service, show(steps, "refund"), session=session)) for session in ("s", "other")
    ] == [200, 429]


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {}}}
    for name in ("scan", "search")
]


@pytest.mark.parametrize(
    ("most", "batches", "other", "held"),
    [
        (2, [], 0, False),  # a first request may be answered in parallel
        (1, [], 0, True),  # a tool with one call left is called alone
        (5, [1, 1, 1, 1], 0, True),
        (5, [1, 1, 1], 0, False),
        (7, [3, 1], 0, False),  # the largest batch so far is expected again
        (6, [3, 1], 0, True),
        (10, [7], 0, True),
        (10, [5], 0, False),
        (6, [1, 1, 1, 1], 7, False),  # calls of other tools, or of several answers, make no batch
    ],
)
def test_answer_is_limited_to_one_call_by_largest_batch(
    most: int, batches: list[int], other: int, held: bool
) -> None:
    service = make_service(limited(max_calls_per_tool={"scan": most}))
    done = []
    for number, size in enumerate(batches, 1):
        calls: list[tuple[str, dict[str, Any]]] = [
            ("scan", {"n": f"{number}.{place}"}) for place in range(size)
        ]
        calls += [("search", {"n": f"{number}.{place}"}) for place in range(other)]
        done.append(Did(tuple(calls), tuple("done" for _ in calls), number=number))

    edited = changed(ask(service, json.dumps({**as_chat(done), "tools": TOOLS}).encode()))

    assert (edited.get("parallel_tool_calls") is False) is held
    assert len(edited.get("tools", TOOLS)) == len(TOOLS)
    other_tools = json.dumps({**as_chat(done), "tools": TOOLS[1:]}).encode()
    assert not changed(ask(service, other_tools, session="which does not offer the tool"))
