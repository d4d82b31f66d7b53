"""Orders about callers: their effect on requests, and how they are given, stored and shown."""

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from itertools import count as count_up
from typing import Any

import pytest

from extproc.engine.orders import (
    ALLOW,
    BLOCK,
    GRANT,
    MAX_GRANT,
    RELEASE,
    Target,
    hash_descriptor,
    sum_agent_grants,
    sum_grants,
)
from extproc.errors import BadOrderError
from extproc.ext_proc.service import Service
from extproc.operator import overrides
from extproc.operator.admin.row_states import read_time
from extproc.operator.overrides import (
    Seen,
    describe_override,
    parse_order,
    read_override,
    write_override,
)
from extproc.pb.external_processor_pb2 import ProcessingResponse
from extproc.request.fingerprint import hash_tenant
from extproc.sessions.session_limits import BUDGET_KEYS
from tests.support.documents import policy
from tests.support.engine import ANY, make_engine
from tests.support.messages import body, headers
from tests.support.operated import ALL, Ahead, Away, Operated, send
from tests.support.orders import USER, apply_orders, order
from tests.support.service import (
    CHAT,
    FailingStore,
    decoded,
    exchange,
    headers_of,
    make_service,
    sample,
    status,
)
from tests.support.session_limits import ask as ask_in_session, limited, told, turns
from tests.support.sessions import agents, send_all, turn
from tests.support.windows import WINDOW_TYPES

GUARDED = policy("p", ANY, **USER)
BY_NAME = {"x-user-id": "ann"}


def ask(
    service: Service, user: str = "ann", data: bytes = b"{}", path: str = CHAT
) -> ProcessingResponse:
    return decoded(exchange(service, headers(path, x_user_id=user), body(data))[-1])


def count(service: Service, kind: str, mode: str = "enforce") -> float:
    return sample(service, "overridden_total", policy="p", mode=mode, kind=kind)


def operate(replicas: int = 1, *policies: dict[str, Any]) -> Operated:
    return Operated(*(policies or (GUARDED,)), replicas=replicas)


# What holds for a request


CALL = (
    b'{"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "%s", '
    b'"arguments": {}}}'
)
CALLER, SESSION = hash_tenant("x-team=t|x-user-id=ann"), hash_descriptor("header:x-session-id", "s")


@pytest.mark.parametrize(
    ("target", "holds"),
    [
        ({"caller": CALLER}, True),
        ({"caller": "e" * 16}, False),
        ({"caller": BY_NAME}, True),
        ({"caller": {"x-user-id": "bob"}}, False),
        ({"caller": {"x-org": "ann"}}, False),
        ({"caller": {"x-team": "t", **BY_NAME}}, True),
        ({"session": SESSION}, True),
        ({"session": "b" * 16}, False),
        ({"fingerprint": "0" * 8}, False),
        ({"tool": "read"}, True),
        ({"tool": "write"}, False),
        ({"caller": CALLER, "tool": "read", "session": SESSION}, True),
        ({"caller": CALLER, "tool": "write"}, False),
        ({"caller": BY_NAME, "policy": "p"}, True),
        ({"caller": BY_NAME, "policy": "other"}, False),
    ],
)
def test_override_needs_everything_it_names(target: dict[str, Any], holds: bool) -> None:
    keys: dict[str, Any] = {
        "limit_keys": ["header:x-user-id", "header:x-team"],
        "session": {"keys": ["header:x-session-id"]},
    }
    one = operate(1, policy("p", ANY, similarity="mcp", **keys))
    one.give(kind="block", **target)

    send(one.service, 1, CALL % b"read", x_user_id="ann", x_team="t", x_session_id="s")

    assert count(one.service, "block") == holds


def test_override_ends_at_its_time() -> None:
    assert send(apply_orders(make_service(GUARDED), order(BLOCK, lasts=-1))) == [200]


def test_one_of_ten_thousand_overrides_is_found() -> None:
    users = [
        Target(descriptors=(("x-user-id", hash_descriptor("x-user-id", f"u{number}")),))
        for number in range(10_000)
    ]
    service = apply_orders(make_service(GUARDED), *[order(BLOCK, target) for target in users])

    assert (send(service, x_user_id="u7"), send(service)) == ([429], [200])


# Allow


def test_allowed_callers_loop_passes_and_is_counted() -> None:
    service = apply_orders(make_service(GUARDED), order(ALLOW))

    assert send(service, 5) == [200] * 5
    assert send(service, 3, x_user_id="bob") == [200, 200, 429]
    assert service.metrics.decisions == {
        ("p", "enforce", "allow"): 7,
        ("p", "enforce", "reject"): 1,
    }
    assert count(service, "allow") == 3
    assert send(apply_orders(service)) == [429]  # it was counted all the while
    assert send(apply_orders(make_service(GUARDED), order(ALLOW), order(BLOCK))) == [429]


@pytest.mark.parametrize("action", ["reject", "throttle", "warn", "steer"])
def test_allowed_caller_gets_no_action_of_any_kind(action: str) -> None:
    service = apply_orders(make_service(policy("p", ANY, action=action, **USER)), order(ALLOW))

    replies = [exchange(service, headers(x_user_id="ann"), body(b"{}"))[-1] for _ in range(4)]

    assert {(reply.hold_ms, reply.answer) for reply in replies} == {(0, replies[0].answer)}
    assert not decoded(replies[-1]).HasField("dynamic_metadata")


def test_shadow_policy_applies_allow_and_release() -> None:
    service = make_service(policy("p", ANY, mode="shadow", **USER))
    send(apply_orders(service, order(ALLOW)), 3)
    assert (service.metrics.decisions, count(service, "allow", "shadow")) == (
        {("p", "shadow", "allow"): 3},
        1,
    )
    send(apply_orders(service), 1)
    send(apply_orders(service, order(RELEASE)), 2)

    assert service.metrics.decisions == {("p", "shadow", "allow"): 5, ("p", "shadow", "reject"): 1}


def test_allowed_caller_passes_uncounted() -> None:
    strict = policy("p", ANY, similarity="canonical", **USER)
    strict["spec"]["uncountable"] = "reject"
    service = make_service(strict)
    sent: dict[str, Any] = {"x_user_id": "ann", "content_encoding": "unheard-of"}

    assert send(service, **sent) == [415]
    assert send(apply_orders(service, order(ALLOW)), **sent) == [200]


# Block


def test_blocked_caller_is_refused_on_headers(caplog: pytest.LogCaptureFixture) -> None:
    service = apply_orders(
        make_service(GUARDED), order(BLOCK, lasts=90, reason="runaway", who="eve")
    )

    (reply,) = exchange(service, headers(x_user_id="ann"))
    answer = decoded(reply)

    assert status(answer) == 429
    assert headers_of(answer)["Retry-After"] in ("89", "90")
    assert headers_of(answer)["X-Fairvisor-Reason"] == "blocked"
    assert headers_of(answer)["x-loopguard-policy"] == "p"
    assert b"runaway" not in answer.immediate_response.body
    assert json.loads(answer.immediate_response.body)["error"]["code"] == "blocked"
    assert send(service, 1, x_user_id="bob") == [200]
    assert service.metrics.decisions == {("p", "enforce", "allow"): 1}
    assert count(service, "block") == 1
    (line,) = [
        vars(record)["fields"] for record in caplog.records if record.getMessage() == "blocked"
    ]
    assert line == {
        "override": "o",
        "policy": "p",
        "reason": "runaway",
        "who": "eve",
        "requests": 1,
    }


@pytest.mark.parametrize(
    ("chosen", "expected", "waits"), [("auto", 400, False), (429, 429, True), (403, 429, True)]
)
def test_block_with_automatic_status_is_a_final_400(
    chosen: int | str, expected: int, waits: bool
) -> None:
    service = apply_orders(
        make_service(policy("p", ANY, **USER, reject_status=chosen)), order(BLOCK)
    )

    answer = ask(service)

    assert (status(answer), "Retry-After" in headers_of(answer)) == (expected, waits)


def test_blocked_caller_with_uncountable_body_is_refused() -> None:
    service = apply_orders(
        make_service(policy("p", ANY, similarity="canonical", **USER)), order(BLOCK)
    )

    assert (
        status(decoded(exchange(service, headers(x_user_id="ann", upgrade="websocket"))[-1])) == 429
    )


def test_caller_named_in_the_body_is_blocked_there() -> None:
    service = make_service(policy("p", ANY, limit_keys=["header:x-user-id", "body:/org"]))
    apply_orders(service, order(BLOCK, Target(caller=hash_tenant("/org=o|x-user-id=ann"))))

    assert [send(service, 1, data) for data in (b'{"org": "o"}', b'{"org": "p"}')] == [[429], [200]]


def test_shadow_policy_blocks_no_request() -> None:
    service = make_service(
        policy("p", ANY, mode="shadow", **USER), policy("q", {"pathExact": "/q"}, **USER)
    )
    apply_orders(service, order(BLOCK))

    assert (send(service), send(service, path="/q")) == ([200], [429])
    assert send(apply_orders(service, order(BLOCK, about="p")), path="/q") == [200]


def test_blocked_mcp_tool_is_a_failed_call() -> None:
    service = apply_orders(
        make_service(policy("p", ANY, similarity="mcp", **USER)),
        order(BLOCK, Target(tool="search")),
    )

    answer = json.loads(ask(service, data=CALL % b"search").immediate_response.body)

    assert (answer["id"], answer["result"]["isError"]) == (7, True)
    assert "blocked" in answer["result"]["content"][0]["text"]
    assert send(service, 1, CALL % b"read") == [200]


# Release


@pytest.mark.parametrize("window_type", WINDOW_TYPES)
@pytest.mark.parametrize("cooldown", [0, 600])
def test_release_clears_counts_and_cooldowns_once(window_type: str, cooldown: int) -> None:
    service = make_service(
        policy("p", ANY, window_type=window_type, cooldown_seconds=cooldown, **USER)
    )
    assert send(service, 4) == send(service, 4, x_user_id="bob") == [200, 200, 429, 429]

    apply_orders(service, order(RELEASE))

    assert send(service, 4) == [200, 200, 429, 429]
    assert send(service, 1, x_user_id="bob") == [429]
    apply_orders(service, order(RELEASE, since=1))
    assert send(service, 3) == [200, 200, 429]


@pytest.mark.parametrize(("kind", "refused"), [(RELEASE, b"a"), (BLOCK, b"b")])
def test_order_by_fingerprint_leaves_other_loops(kind: str, refused: bytes) -> None:
    service = make_service(policy("p", ANY, action="reject" if kind == RELEASE else "warn", **USER))
    for data in (b"a", b"b"):
        send(service, 3, data)
    (name,) = [loop.fingerprint for loop in service.reporter.loops.list_loops()][1:]
    apply_orders(service, order(kind, Target(fingerprint=name)))

    assert {data: send(service, 1, data) for data in (b"a", b"b")} == {b"a": [200], b"b": [200]} | {
        refused: [429]
    }


def test_newest_of_several_releases_applies() -> None:
    older = order(RELEASE, name="older")
    newer = order(RELEASE, Target(caller=hash_tenant("x-user-id=ann")), since=5, name="newer")
    service = apply_orders(make_service(GUARDED), newer)
    assert send(service, 3) == [200, 200, 429]

    assert send(apply_orders(service, older, newer), 1) == [429]
    assert send(apply_orders(service, newer, older), 1) == [429]


def test_release_clears_the_sessions_ring() -> None:
    service = make_service(agents(cooldown_seconds=600))
    assert send_all(service, [turn(n) for n in range(1, 5)], session_id="s") == [200, 200, 429, 429]

    apply_orders(service, order(RELEASE, Target(session=hash_descriptor("header:session-id", "s"))))

    assert send_all(service, [turn(n) for n in range(5, 8)], session_id="s") == [200, 200, 429]
    # The caller's other sessions still cool down
    assert send_all(service, [turn(8)], session_id="t") == [429]


def test_release_clears_local_windows_without_a_store() -> None:
    service = make_service(GUARDED, store=FailingStore("loop:"))
    assert send(service, 3) == [200, 200, 429]

    assert send(apply_orders(service, order(RELEASE)), 3) == [200, 200, 429]


# Kill and grant


TARGET: dict[str, Any] = {"caller": {"x-team": "t"}, "session": {"header:x-session-id": "s"}}


def send_steps(service: Service, numbers: Iterable[int], session: str = "s") -> list[str]:
    """Which limit refuses each of these requests of a session, empty for none."""
    answers = [ask_in_session(service, turns(number), session) for number in numbers]
    return [str(told(answer)["limit"]) if status(answer) != 200 else "" for answer in answers]


def test_killed_session_is_refused_everywhere_until_released() -> None:
    both = operate(2, limited(max_steps=3))
    assert send_steps(both.services[0], range(2)) == ["", ""]

    both.give(kind="kill", **TARGET)
    both.refresh()

    for service in both.services:
        refused = told(ask_in_session(service, turns(5), "s"))
        assert refused["limit"] == "killed"
        assert "an operator has stopped this session" in refused["message"]
        assert send_steps(service, [6], "other") == [""]
    (killed,) = [row for row in both.ask("/sessions")["sessions"] if row["killed"]]
    assert (killed["killed"], killed["session"]) == ("operator", SESSION)
    both.give(1, kind="release", **TARGET)
    both.refresh()
    assert send_steps(both.services[0], range(5)) == ["", "", "", "max_steps", "max_steps"]
    both.give(kind="kill", caller=TARGET["caller"])
    assert send_steps(both.services[0], [7], "other") == ["killed"]


LOOP: dict[str, Any] = {
    "enabled": True,
    "similarity": "turns",
    "threshold_identical_requests": 3,
    "action": "reject",
}
GUARDS: dict[str, dict[str, Any]] = {
    "loops": {"loop_detection": LOOP},
    "exact": {"loop_detection": LOOP | {"similarity": "exact", "window_seconds": 60}},
    "limits": {"session_limits": {"max_steps": 1_000}},
}


@pytest.mark.parametrize("guard", GUARDS.values(), ids=GUARDS)
@pytest.mark.parametrize("kind", ["kill", "block"])
def test_kill_of_a_root_ends_its_tree_everywhere(kind: str, guard: dict[str, Any]) -> None:
    both = operate(
        2, {"id": "p", "spec": {"selector": ANY, "limit_keys": ["header:x-team"], **guard}}
    )
    key, tasks = "header:x-claude-code-session-id", count_up()

    def ask_everywhere(root: str) -> set[int]:
        agents = [{"x_claude_code_agent_id": agent} for agent in ("a", "b", f"new {next(tasks)}")]
        asked = [
            (service, {"x_claude_code_session_id": root, **names})
            for service in both.services
            for names in ({}, *agents)
        ]
        return {
            status(ask_in_session(service, turns(0, number=next(tasks)), "", **names))
            for service, names in asked
        }

    assert ask_everywhere("root") == {200}
    assert both.give(kind=kind, session={key: "root"})[1] == []
    both.refresh()
    assert (ask_everywhere("root"), ask_everywhere("other")) == ({429}, {200})
    both.give(1, kind="release", session={key: "root"})
    both.refresh()
    assert ask_everywhere("root") == ({200} if kind == "kill" else {429})


def test_grants_add_to_session_limits_on_every_replica() -> None:
    both = operate(2, limited(max_steps=2))
    assert send_steps(both.services[0], range(3)) == ["", "", "max_steps"]

    both.give(kind="grant", session=TARGET["session"], steps=1)
    given, _ = both.give(1, kind="grant", **TARGET, steps=1)
    both.give(1, kind="grant", **TARGET, steps=9, policy="other")
    both.refresh()

    assert send_steps(both.services[1], [10]) == [""]
    assert send_steps(both.services[0], [11, 12]) == ["", "max_steps"]
    assert send_steps(both.services[1], range(3), "other") == ["", "", "max_steps"]
    assert both.revoke(given["override"])[0] == 200
    both.give(kind="grant", session=TARGET["session"], steps=1, key="again")
    assert send_steps(both.services[0], [13]) == ["max_steps"]


def test_grants_of_one_tools_calls_add_up() -> None:
    both = operate(2, limited(max_calls_per_tool={"run": 1}))
    for replica, tool in ((0, "run"), (1, "run"), (0, "other")):
        both.give(replica, kind="grant", session=TARGET["session"], tools={tool: 1})
    both.refresh()

    assert send_steps(both.services[1], range(5)) == ["", "", "", "", "max_calls_per_tool"]


def test_sum_of_grants_is_bounded() -> None:
    assert sum_grants([order(GRANT, grant=MAX_GRANT)] * 10_000) == MAX_GRANT[:3]
    assert sum_agent_grants([order(BLOCK, grant=MAX_GRANT)]) == (0, 0, 0, 0)


# Orders on several replicas


def last(given: Mapping[str, Any]) -> int:
    return round(read_time(given["ends"]) - read_time(given["since"]))


def test_orders_apply_on_other_replicas_after_polling(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    both = operate(2, policy("p", ANY, threshold_identical_requests=9, **USER))

    given, _ = both.give(kind="block", caller=BY_NAME, seconds=60, reason="runaway")
    assert [send(service) for service in both.services] == [[429], [200]]
    both.refresh()
    assert [send(service) for service in both.services] == [[429], [429]]
    assert both.revoke(given["override"], 1)[0] == 200
    both.refresh()

    assert [send(service) for service in both.services] == [[200], [200]]
    assert [service.overrides for service in both.services] == [None, None]
    told = [
        (record.getMessage(), vars(record)["fields"])
        for record in caplog.records
        if "override " in record.getMessage()
    ]
    assert [(what, line["kind"], line["who"]) for what, line in told] == [
        ("override given", "block", "eve (socket)"),
        ("override revoked", "block", "adam (socket)"),
    ]
    assert (told[0][1]["reason"], told[0][1]["override"]) == ("runaway", given["override"])
    assert "ann" not in caplog.text


def test_known_orders_apply_without_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overrides, "POLL_SECONDS", 0.01)
    clock, store = Ahead(monkeypatch), Away()
    made = Operated(services=[make_service(GUARDED)], store=store)
    given, _ = made.give(kind="block", caller=BY_NAME, seconds=60)
    store.away = ALL

    assert made.post({"kind": "allow", "tool": "t"})[0] == made.revoke(given["override"])[0] == 503
    assert send(made.service) == [429]
    clock.seconds = 61
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(made.givers[0].follow(), 0.2))

    assert made.service.overrides is None
    assert made.list_orders() == []


def test_repeated_order_replaces_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    one, clock = operate(), Ahead(monkeypatch)
    first, _ = one.give(kind="block", caller=BY_NAME, seconds=60)
    clock.seconds = 10
    second, _ = one.give(kind="block", caller=BY_NAME, seconds=60, reason="longer")
    other, _ = one.give(kind="block", caller=BY_NAME, policy="p")

    assert first["override"] == second["override"] != other["override"]
    standing = {order["override"]: order.get("reason", "") for order in one.list_orders()}
    assert standing == {second["override"]: "longer", other["override"]: ""}


def test_other_replicas_read_all_of_an_order() -> None:
    both = operate(2)
    kill, _ = both.give(kind="kill", session="a" * 16)
    grant, _ = both.give(
        kind="grant", session="a" * 16, steps=10, tool_calls=3, cost=0.1, tools={"pay": 1, "a=b": 2}
    )
    more, _ = both.give(1, kind="grant", caller=BY_NAME, cost=5, seconds=60)
    both.refresh()

    there = {order["override"]: order for order in both.list_orders(1)}
    assert there == {
        order["override"]: there[order["override"]] | order for order in (kill, grant, more)
    }
    assert [last(given) for given in (kill, grant, more)] == [86_400, 86_400, 60]
    expected = {
        "kind": "grant",
        "steps": 10,
        "tool_calls": 3,
        "cost": 0.1,
        "tools": {"pay": 1, "a=b": 2},
    }
    assert grant.items() >= expected.items()
    assert kill.keys().isdisjoint({"steps", "tool_calls", "cost"})


def test_repeated_grant_adds_unless_its_key_is_equal() -> None:
    both = operate(2, limited(max_steps=1))
    for _ in range(2):
        both.give(kind="grant", session=TARGET["session"], steps=1)
    for giver in (0, 1, 1):
        both.give(giver, kind="grant", session=TARGET["session"], steps=1, key="k")
    both.give(kind="grant", session="b" * 16, steps=1, key="k")
    both.refresh()

    assert len(both.list_orders(1)) == 4
    assert send_steps(both.services[1], range(5)) == ["", "", "", "", "max_steps"]


@pytest.mark.parametrize("cost", [1e-12, 0.07, 4.35, 999_999.999999999, 10**6])
def test_dollars_become_the_nearest_nano_dollars(cost: float) -> None:
    given = parse_order({"kind": "grant", "session": "a" * 16, "cost": cost}, "", 0, [])

    assert given.grant.cost == max(1, int((Decimal(str(cost)) * 10**9).to_integral_value()))


@pytest.mark.parametrize(
    ("target", "hours"),
    [
        ({"session": "a" * 16}, 24),
        ({"caller": {**BY_NAME, "x-team": "t"}, "policy": "p"}, 24),
        ({"session": "b" * 16}, 1),
        ({"caller": {"x-user-id": "bob"}}, 1),
        ({"session": "a" * 16, "policy": "q"}, 1),
    ],
)
def test_release_outlasts_the_kills_it_cancels(target: dict[str, Any], hours: int) -> None:
    both = operate(2)
    both.give(kind="kill", session="a" * 16, caller=BY_NAME, policy="p")

    assert round(last(both.give(1, kind="release", **target)[0]) / 3_600) == hours


def test_release_outlasts_everything_counted_before_it() -> None:
    long = policy("long", ANY, window_seconds=7_200, cooldown_seconds=9_000, **USER)
    one = operate(1, GUARDED, long, agents(session={"idle_seconds": 10_000}))

    for about, seconds in (("p", 3_600), ("long", 9_060), ("agents", 10_060), (None, 10_060)):
        assert last(one.give(kind="release", caller=BY_NAME, policy=about)[0]) == seconds


@pytest.mark.parametrize(
    "grant",
    [b"7", b'["x"]', b"[Infinity]", b"{}", b"[-5, 1e30]", b"[1, 2, 3]", b"[0,0,0,-1,9e9,1,1,1]"],
)
def test_grant_of_another_version_stays_in_bounds(grant: bytes) -> None:
    one = operate()
    known = write_override(order(GRANT, Target(session="a" * 16))).replace(
        b"[0, 0, 0, 0, 0, 0, 0]", grant
    )
    assert grant in known
    one.put_order("odd", known)

    standing = one.givers[0].list_standing()
    total = [*sum_grants(standing), *sum_agent_grants(standing)]
    assert all(0 <= given <= most for given, most in zip(total, MAX_GRANT, strict=True))


def test_order_without_grant_fields_is_read() -> None:
    given = order(BLOCK)
    older = json.loads(write_override(given))
    del older["grant"]

    assert read_override("o", json.dumps(older).encode()) == given


@pytest.mark.parametrize(
    "document", [b"", b"[]", b"7", b"{}", b'{"kind": "block"}', b"\xff", b'{"descriptors": []}']
)
def test_unreadable_orders_are_logged_and_skipped(
    document: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    one = operate()
    one.put_order("odd", document)
    one.put_order("newer", write_override(order("pardon", Target(tool="t"))))
    one.give(kind="block", caller=BY_NAME)

    assert send(one.service, 1) == [429]
    assert send(one.service, 3, x_user_id="bob") == [200, 200, 429]
    assert "an override in the store is invalid" in caplog.text


def test_number_of_orders_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overrides, "MAX_ORDERS", 2)
    one = operate()
    for tool in ("a", "b", "a"):
        one.give(kind="allow", tool=tool)

    assert one.post({"kind": "allow", "tool": "c"})[0] == 409
    assert len(one.list_orders()) == 2


def test_store_and_lists_have_no_caller_values() -> None:
    one = operate()
    given, _ = one.give(
        kind="block", caller={"X-User-Id": "ann"}, session={"header:X-Session-Id": "secret"}
    )

    document = one.read_orders()

    assert b"ann" not in document
    assert b"secret" not in document + json.dumps(given).encode()
    assert describe_override(read_override(given["override"], document)) == {
        **given,
        "meets": tuple(given["meets"]),
    }
    assert (
        given
        | {
            "caller": {"x-user-id": hash_descriptor("x-user-id", "ann")},
            "session": hash_descriptor("header:x-session-id", "secret"),
        }
        == given
    )


def test_reload_keeps_orders() -> None:
    one = operate()
    one.give(kind="block", caller=BY_NAME)
    one.service.engine = make_engine(policy("q", ANY, **USER))

    assert send(one.service, 1) == [429]
    assert sample(one.service, "overrides", kind="block") == 1


# What is told about an order


SECONDS = "seconds must be a number of seconds from 1 to 2592000"
NO_TARGET = "a target is required: caller, session, fingerprint or tool"
LIMIT_KEY = (
    "must be 'jwt:<claim>', 'header:<name>', 'query:<name>' (names of letters, digits, '_' and "
    "'-'), 'ip:address', "
    "'credential' or 'body:/<JSON Pointer>'"
)
KINDS = "kind must be one of release, allow, block, kill, grant"
KEYS = [
    "kind",
    "caller",
    "session",
    "fingerprint",
    "tool",
    "policy",
    "seconds",
    "reason",
    "steps",
    "tool_calls",
    "cost",
    "depth",
    "agents",
    "concurrent_agents",
    "spawns_per_minute",
    "tools",
    "budget",
    "amount",
    "key",
]
WHOLE = "which applies to whole sessions: name a session, or a caller"
CALLERS = (
    "caller must be the 16 hex digits of a tenant, as in logs, an alias, or an object of "
    "descriptor values by name"
)


@pytest.mark.parametrize(
    ("given", "problems"),
    [
        ([], ["an override is an object, not an empty array"]),
        ({}, ["kind is required", NO_TARGET]),
        ({"kind": "pardon", "tool": "t"}, [f"{KINDS}, not 'pardon'"]),
        (
            {"kind": "kill", "tool": "t", "fingerprint": "0" * 8, "steps": 1},
            [
                f"fingerprint cannot be given for a kill, {WHOLE}",
                f"tool cannot be given for a kill, {WHOLE}",
                "steps is only valid for a grant",
            ],
        ),
        (
            {"kind": "grant", "session": "a" * 16},
            [f"at least one of these is required: {', '.join(KEYS[8:-3])}; or budget and amount"],
        ),
        *(
            ({"kind": "grant", "session": "a" * 16, "tools": tools}, [f"tools must {problem}"])
            for tools, problem in (
                (
                    {},
                    (
                        "be an object of numbers by tool name, of at most 64 tools, not an empty "
                        "object"
                    ),
                ),
                (
                    "refund",
                    "be an object of numbers by tool name, of at most 64 tools, not 'refund'",
                ),
                (
                    {str(at): 1 for at in range(65)},
                    "be an object of numbers by tool name, of at most 64 tools, not an object",
                ),
                ({"": 1}, "have names of 1 to 256 characters, not ''"),
                ({"refund": 0}, "have numbers from 1 to 10000, not 0"),
                ({"refund": True}, "have numbers from 1 to 10000, not true"),
                ({"refund": 10_001}, "have numbers from 1 to 10000, not 10001"),
            )
        ),
        (
            {"kind": "kill", "session": "a" * 16, "tools": {"refund": 1}},
            ["tools is only valid for a grant"],
        ),
        (
            {
                "kind": "grant",
                "session": "a" * 16,
                "steps": 0,
                "tool_calls": 10_001,
                "cost": 1e6 + 1,
            },
            [
                "steps must be a number from 1 to 1000000000, not 0",
                "tool_calls must be a number from 1 to 10000, not 10001",
                "cost must be dollars, more than 0 and at most 1000000, not 1000001.0",
            ],
        ),
        (
            {
                "kind": "grant",
                "session": "a" * 16,
                "agents": 0,
                "depth": 1_001,
                "spawns_per_minute": "2",
            },
            [
                "depth must be a number from 1 to 1000, not 1001",
                "agents must be a number from 1 to 1000, not 0",
                "spawns_per_minute must be a number from 1 to 1000, not '2'",
            ],
        ),
        (
            {
                "kind": "grant",
                "session": "a" * 16,
                "steps": 1.5,
                "tool_calls": True,
                "cost": float("nan"),
                "key": "",
            },
            [
                "steps must be a number from 1 to 1000000000, not 1.5",
                "tool_calls must be a number from 1 to 10000, not true",
                "cost must be dollars, more than 0 and at most 1000000, not NaN",
                "key must be a text of 1 to 64 characters, not ''",
            ],
        ),
        ({"kind": ["block"], "tool": "t"}, [f"{KINDS}, not an array"]),
        ({"kind": "block"}, [NO_TARGET]),
        ({"kind": "block", "policy": "p"}, [NO_TARGET]),
        ({"kind": "block", "caller": "ann"}, [f"{CALLERS}, not 'ann'"]),
        ({"kind": "block", "caller": {}}, [f"{CALLERS}, not an empty object"]),
        ({"kind": "block", "caller": {"x": 1}}, [f"{CALLERS}, not an object"]),
        ({"kind": "block", "caller": {"x": ""}}, [f"{CALLERS}, not an object"]),
        (
            {"kind": "block", "caller": {str(number): "v" for number in range(17)}},
            [f"{CALLERS}, not an object"],
        ),
        (
            {"kind": "block", "session": {"a": "b", "c": "d"}},
            [
                (
                    "session must be 16 hex digits, or an object of one value by its key, such as "
                    "header:x-session-id, not an object"
                )
            ],
        ),
        (
            {"kind": "block", "session": {"nope:x": "1"}},
            [f"session has a key that {LIMIT_KEY}, not 'nope:x'"],
        ),
        ({"kind": "block", "fingerprint": "XYZ"}, ["fingerprint must be 8 hex digits, not 'XYZ'"]),
        (
            {"kind": "block", "tool": "t" * 257},
            [f"tool must be a text of 1 to 256 characters, not '{'t' * 60}...'"],
        ),
        (
            {"kind": "block", "tool": "t", "policy": "a b"},
            ["policy must be the id of a policy, not 'a b'"],
        ),
        ({"kind": "allow", "tool": "t", "seconds": 0}, [f"{SECONDS}, not 0"]),
        (
            {"kind": "allow", "tool": "t", "seconds": 1e9},
            [f"{SECONDS}, not 1000000000.0"],
        ),
        ({"kind": "allow", "tool": "t", "seconds": True}, [f"{SECONDS}, not true"]),
        (
            {"kind": "release", "tool": "t", "seconds": 60},
            ["a release takes no seconds: it lasts until everything counted before it has expired"],
        ),
        (
            {"kind": "allow", "tool": "t", "until": 7, "reason": ""},
            [
                f"'until': unknown key; known keys are {', '.join(KEYS)}",
                "reason must be a text of 1 to 256 characters, not ''",
            ],
        ),
    ],
)
def test_invalid_order_reports_every_error(given: object, problems: list[str]) -> None:
    with pytest.raises(BadOrderError) as error:
        parse_order(given, "", 0, [])

    assert str(error.value) == "; ".join(problems)


@pytest.mark.parametrize("half", ["\ud800", "x\udfff"])
@pytest.mark.parametrize(
    ("key", "make"),
    [
        ("caller", lambda half: {"x-user-id": half}),
        ("caller", lambda half: {half: "ann"}),
        ("session", lambda half: {"header:x-session-id": half}),
        ("session", lambda half: {f"header:{half}": "s"}),
        ("tool", str),
        ("reason", str),
        ("key", str),
    ],
)
def test_half_of_a_surrogate_pair_is_refused(
    key: str, make: Callable[[str], object], half: str
) -> None:
    with pytest.raises(BadOrderError) as error:
        parse_order({"kind": "grant", "session": "a" * 16, "steps": 1, key: make(half)}, "", 0, [])

    problem = str(error.value)
    assert "; " not in problem
    assert problem.startswith(f"{key} must be valid Unicode text, not '")
    assert "\\ud" in problem
    problem.encode()


NO_LIMITS = "this kill does nothing: no policy has session limits; name a session, or use block"
HEAD_KEYS = [key for key in BUDGET_KEYS if not key.startswith("body:")]
NAMELESS = policy("p", ANY, **USER)
NAMELESS["spec"]["session"] = {"keys": ["body:/conversation"]}
LOOKING = agents(session={"keys": ["header:x-run"]}) | {"id": "looking"}
COUNTING = [limited(session={"keys": ["header:x-session-id"]}, max_steps=3), LOOKING]
LIMITED = [limited(max_steps=3), policy("q", ANY, **USER)]
MIXED = [GUARDED, policy("s", ANY, mode="shadow", **USER), agents(limit_keys=["jwt:org"])]
UNLIMITED = "no policy finds sessions by header:x-run; known keys: header:x-session-id"
BY_TEAM: dict[str, Any] = {"caller": {"x-team": "t"}}
BY_USER: dict[str, Any] = {"caller": BY_NAME}


def by(key: str) -> dict[str, Any]:
    return {"session": {key: "s"}}


NOTES: list[tuple[list[dict[str, Any]], dict[str, Any], list[str]]] = [
    ([], {"kind": "kill", **BY_USER}, [NO_LIMITS]),
    (
        [],
        {"kind": "kill", **BY_USER, "policy": "p"},
        ["this kill does nothing: policy p has no session limits; name a session, or use block"],
    ),
    ([], {"kind": "kill", **by("header:x-session-id")}, []),
    (
        [],
        {"kind": "kill", **by("header:x-run")},
        [f"no policy finds sessions by header:x-run; known keys: {', '.join(HEAD_KEYS)}"],
    ),
    (
        [],
        {"kind": "grant", "session": "a" * 16, "steps": 1},
        ["this grant does nothing: no policy has session limits"],
    ),
    (
        [],
        {"kind": "allow", "tool": "t"},
        ["this allow does nothing: no policy looks at tools (tool_calls, turns and mcp do)"],
    ),
    ([], {"kind": "kill", "session": "a" * 16, "policy": "gone"}, ["no policy gone is loaded"]),
    ([], {"kind": "block", **BY_USER}, []),
    (
        [NAMELESS],
        {"kind": "block", "session": "a" * 16},
        ["this does nothing: no policy looks for sessions"],
    ),
    (MIXED, {"kind": "block", **BY_USER}, []),
    (
        MIXED,
        {"kind": "block", "caller": {"user": "ann"}},
        ["no policy identifies callers by user; known descriptors: org, x-user-id"],
    ),
    (MIXED, {"kind": "allow", "tool": "t", "policy": "gone"}, ["no policy gone is loaded"]),
    (
        MIXED,
        {"kind": "block", **BY_USER, "policy": "s"},
        ["the policies it applies to are in shadow mode, so nothing is refused"],
    ),
    (
        MIXED,
        {"kind": "release", "tool": "t"},
        ["a release cannot reset loops that a request itself shows, as in agents (default)"],
    ),
    (COUNTING, {"kind": "kill", **by("header:X-Session-Id")}, []),
    (COUNTING, {"kind": "allow", **by("header:x-run")}, []),
    (
        COUNTING,
        {"kind": "allow", **by("header:x-sesion")},
        [
            (
                "no policy finds sessions by header:x-sesion; known keys: header:x-session-id, "
                "header:x-run"
            )
        ],
    ),
    (COUNTING, {"kind": "grant", **by("header:x-run"), "steps": 1}, [UNLIMITED]),
    (COUNTING, {"kind": "kill", **by("header:x-run")}, []),
    (COUNTING, {"kind": "kill", **by("header:x-run"), "policy": "agents"}, [UNLIMITED]),
    (COUNTING, {"kind": "kill", **by("jwt:run"), "policy": "gone"}, ["no policy gone is loaded"]),
    (LIMITED, {"kind": "kill", **BY_TEAM}, []),
    (LIMITED, {"kind": "grant", **BY_TEAM, "steps": 2}, []),
    (
        LIMITED,
        {"kind": "kill", **BY_USER},
        ["no policy identifies callers by x-user-id; known descriptors: x-team"],
    ),
    (LIMITED, {"kind": "block", **BY_USER}, []),
    (
        LIMITED,
        {"kind": "grant", **BY_TEAM, "steps": 1, "tool_calls": 2, "cost": 3},
        [
            "granting tool_calls does nothing: no policy has max_tool_calls",
            "granting cost does nothing: no policy has max_cost_per_session",
        ],
    ),
    (
        LIMITED,
        {"kind": "grant", **BY_TEAM, "agents": 1, "concurrent_agents": 1},
        [
            "granting agents does nothing: no policy has max_agents",
            "granting concurrent_agents does nothing: no policy has max_concurrent_agents",
        ],
    ),
    (
        LIMITED,
        {"kind": "grant", **BY_TEAM, "tools": {"refund": 1}},
        ["granting calls of refund does nothing: no policy has max_calls_per_tool for it"],
    ),
]


@pytest.mark.parametrize(("policies", "given", "notes"), NOTES)
def test_order_has_notes_about_what_it_cannot_do(
    policies: list[dict[str, Any]], given: dict[str, Any], notes: list[str]
) -> None:
    said = [
        note
        for note in operate(1, *policies).give(**given)[1]
        if "this probably does nothing" not in note
    ]

    assert [note[: len(expected)] for note, expected in zip(said, notes, strict=True)] == notes


def test_kill_counts_limits_of_route_policies() -> None:
    one = operate()
    assert one.service.compile_handed_over(json.dumps(limited(max_steps=3))) is not None

    assert one.give(kind="kill", **BY_TEAM)[1] == []


@pytest.mark.parametrize(
    ("target", "unknown"),
    [
        ({"caller": "a" * 16, "session": "b" * 16, "fingerprint": "c" * 8}, []),
        ({**BY_TEAM, **by("header:x-session-id")}, []),
        ({"caller": "b" * 16}, [f"caller {'b' * 16}"]),
        (
            {"session": "a" * 16, "fingerprint": "d" * 8},
            [f"session {'a' * 16}", f"fingerprint {'d' * 8}"],
        ),
    ],
)
def test_order_for_an_unreported_hash_has_a_note(
    target: dict[str, Any], unknown: list[str]
) -> None:
    one = operate(1, limited(max_steps=3, session={"keys": ["header:x-session-id"]}))
    one.givers[0].list_seen = lambda: Seen({"a" * 16: 1}, {"b" * 16}, {"c" * 8})

    notes = [note.partition(". ")[0] for note in one.give(kind="block", **target)[1]]

    assert notes == [
        f"this probably does nothing: the {each} was not reported in the last hour"
        for each in unknown
    ]
