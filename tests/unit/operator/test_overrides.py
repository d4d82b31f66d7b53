"""What operators order about callers: what is found for a request, what becomes of it, and how orders are given and kept."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any, TypeVar

import pytest

from extproc.engine.orders import (
    ALLOW,
    BLOCK,
    GRANT,
    KILL,
    MAX_GRANT,
    RELEASE,
    ActiveOverride,
    Caller,
    Grant,
    Overrides,
    Target,
    find_kill,
    find_kind,
    hash_descriptor,
    select,
    sum_agent_grants,
    sum_grants,
    sum_tool_grants,
)
from extproc.errors import BadOrderError, StoreError
from extproc.ext_proc.service import Service
from extproc.operator import overrides
from extproc.operator.overrides import (
    OverrideService,
    Seen,
    describe_override,
    parse_order,
    read_override,
    write_override,
)
from extproc.pb.external_processor_pb2 import ProcessingResponse
from extproc.request.fingerprint import hash_tenant
from extproc.sessions.session_limits import BUDGET_KEYS
from extproc.store.rules.documents import ORDERS
from tests.support.documents import policy
from tests.support.engine import ANY, make_engine
from tests.support.messages import body, headers
from tests.support.orders import ANN, USER, Replicas, apply_orders, order
from tests.support.service import FailingStore, decoded, exchange, make_service, metadata_of
from tests.support.session_limits import ask as ask_in_session
from tests.support.session_limits import limited, told, turns
from tests.support.sessions import agents, send_all, turn
from tests.support.windows import WINDOW_TYPES

T = TypeVar("T")


def ask(service: Service, user: str = "ann", data: bytes = b"", path: str = "/") -> ProcessingResponse:
    """The last answer to a request with a body."""
    return decoded(exchange(service, headers(path, x_user_id=user), body(data))[-1])


def find_status(answer: ProcessingResponse) -> int:
    """What becomes of a request: the status of its refusal, or 200."""
    return answer.immediate_response.status.code if answer.HasField("immediate_response") else 200


def send(service: Service, times: int, user: str = "ann") -> list[int]:
    """What becomes of equal requests, one after the other."""
    return [find_status(ask(service, user)) for _ in range(times)]


def find_headers(answer: ProcessingResponse) -> dict[str, str]:
    """Of a refusal."""
    sent = answer.immediate_response.headers.set_headers
    return {item.header.key: item.header.raw_value.decode() for item in sent}


def count(service: Service, kind: str, mode: str = "enforce", name: str = "p") -> float:
    """How many requests overrides of a kind have decided."""
    labels = {"policy": name, "mode": mode, "kind": kind}
    return service.metrics.registry.get_sample_value("loopguard_overridden_total", labels) or 0


# What holds for a request


def find_by_head(standing: Overrides, name: str, now: float, caller: Caller) -> list[ActiveOverride]:
    """What holds for a caller under a policy."""
    return select(standing.find_by_head(caller), name, now)


def find(standing: Overrides, name: str = "p", *, ahead: float = 0) -> list[str]:
    """The names of what holds for a request of which all is known."""
    values = [("x-user-id", "ann"), ("x-team", "t")]
    head = name, time.time() + ahead, Caller(["f" * 16], values)
    found = [*find_by_head(standing, *head), *standing.find_by_body(*head, "a" * 16, "0" * 8, ("search", "read"))]
    return [override.name for override in found]


@pytest.mark.parametrize(
    ("target", "holds"),
    [
        (Target(caller="f" * 16), True),
        (Target(caller="e" * 16), False),
        (ANN, True),
        (Target(descriptors=(("x-user-id", hash_descriptor("x-user-id", "bob")),)), False),
        (Target(descriptors=(("x-org", hash_descriptor("x-org", "ann")),)), False),
        (Target(descriptors=(("x-team", hash_descriptor("x-team", "t")), *ANN.descriptors)), True),
        (Target(session="a" * 16), True),
        (Target(session="b" * 16), False),
        (Target(fingerprint="0" * 8), True),
        (Target(tool="read"), True),
        (Target(tool="write"), False),
        (Target(caller="f" * 16, tool="read", fingerprint="0" * 8), True),
        (Target(caller="f" * 16, tool="write"), False),
    ],
)
def test_all_that_is_named_must_hold(target: Target, holds: bool) -> None:
    """An override holds for a request that has everything it names, whatever else the request has."""
    assert bool(find(Overrides([order(BLOCK, target)]))) is holds


def test_a_head_tells_of_callers_alone() -> None:
    """Before its body is known a request has no session, fingerprint or tool that anything could be about."""
    targets = [Target(session="a" * 16), Target(fingerprint="0" * 8), Target(tool="read"), ANN._replace(tool="read")]
    of_body, of_head = Overrides([order(BLOCK, target) for target in targets]), Overrides([order(BLOCK)])
    head = "p", time.time(), Caller([hash_tenant("x-user-id=ann")], [("x-user-id", "ann")])
    body = "a" * 16, "0" * 8, ("read",)

    assert (len(find_by_head(of_body, *head)), len(of_body.find_by_body(*head, *body))) == (0, 4)
    assert (len(find_by_head(of_head, *head)), len(of_head.find_by_body(*head, *body))) == (1, 0)
    assert (of_body.blocks_heads, of_head.blocks_heads) == (False, True)


def test_one_policy_or_all() -> None:
    """An override about one policy leaves the others alone."""
    standing = Overrides([order(ALLOW, about="p", name="one"), order(BLOCK, name="all")])

    assert find(standing) == ["one", "all"]
    assert find(standing, "q") == ["all"]


def test_an_override_ends_by_itself() -> None:
    """It is not found after its end, without having been removed."""
    standing = Overrides([order(BLOCK, lasts=60)])

    assert find(standing, ahead=58) == ["o"]
    assert find(standing, ahead=61) == []


def test_the_number_of_overrides_does_not_matter() -> None:
    """Ten thousand overrides of one shape are one look-up."""
    users = [Target(descriptors=(("x-user-id", hash_descriptor("x-user-id", f"u{number}")),)) for number in range(10_000)]
    standing = Overrides([order(BLOCK, target) for target in [*users, ANN]])

    assert len(standing) == 1
    assert find(standing) == ["o"]


def test_one_descriptor_is_a_caller_of_one() -> None:
    """The hash of a value alone is the tenant that logs show, where callers are told apart by nothing else."""
    assert hash_descriptor("x-user-id", "ann") == hash_tenant("x-user-id=ann")


# Allow


def test_an_allowed_caller_is_never_acted_on() -> None:
    """A loop of an allowed caller is let through, reported as allowed, and counted; that of another is refused."""
    service = apply_orders(make_service(policy("p", ANY, **USER)), order(ALLOW))

    assert send(service, 5) == [200] * 5
    assert send(service, 3, "bob") == [200, 200, 429]
    assert service.metrics.decisions == {("p", "enforce", "allow"): 7, ("p", "enforce", "reject"): 1}
    assert count(service, "allow") == 3
    assert find_status(ask(apply_orders(service))) == 429  # it was counted all the while


@pytest.mark.parametrize("action", ["reject", "throttle", "warn", "steer"])
def test_no_action_is_taken_about_an_allowed_caller(action: str) -> None:
    """Neither refused, nor held, nor warned of, nor given a note."""
    service = apply_orders(make_service(policy("p", ANY, action=action, **USER)), order(ALLOW))

    replies = [exchange(service, headers(x_user_id="ann"), body(b"{}"))[-1] for _ in range(4)]

    assert {(reply.hold_ms, reply.answer) for reply in replies} == {(0, replies[0].answer)}
    assert not decoded(replies[-1]).HasField("dynamic_metadata")


def test_a_shadow_policy_allows_as_well() -> None:
    """What a shadow policy would have done about an allowed caller is nothing, as in force it will be."""
    service = apply_orders(make_service(policy("p", ANY, mode="shadow", **USER)), order(ALLOW))

    send(service, 3)

    assert service.metrics.decisions == {("p", "shadow", "allow"): 3}
    assert count(service, "allow", "shadow") == 1


def test_an_allowed_caller_may_be_uncountable() -> None:
    """A policy that lets nothing pass uncounted lets the allowed pass."""
    strict = policy("p", ANY, similarity="canonical", **USER)
    strict["spec"]["uncountable"] = "reject"
    service = make_service(strict)
    message = headers(x_user_id="ann", content_encoding="unheard-of")

    refused = find_status(decoded(exchange(service, message, body(b"{}"))[-1]))
    allowed = find_status(decoded(exchange(apply_orders(service, order(ALLOW)), message, body(b"{}"))[-1]))

    assert (refused, allowed) == (415, 200)


# Block


def test_a_blocked_caller_is_refused_on_its_headers(caplog: pytest.LogCaptureFixture) -> None:
    """The first request is refused with a reason of its own before its body is waited for; nothing is counted."""
    service = apply_orders(make_service(policy("p", ANY, **USER)), order(BLOCK, lasts=90)._replace(reason="runaway", who="eve"))

    (reply,) = exchange(service, headers(x_user_id="ann"))
    answer = decoded(reply)

    assert find_status(answer) == 429
    assert find_headers(answer)["Retry-After"] in ("89", "90")
    assert find_headers(answer)["X-Fairvisor-Reason"] == "blocked"
    assert find_headers(answer)["x-loopguard-policy"] == "p"
    assert b"runaway" not in answer.immediate_response.body
    assert json.loads(answer.immediate_response.body)["error"]["code"] == "blocked"
    assert send(service, 1, "bob") == [200]
    assert service.metrics.decisions == {("p", "enforce", "allow"): 1}
    assert count(service, "block") == 1
    (line,) = [vars(record)["fields"] for record in caplog.records if record.getMessage() == "blocked"]
    assert line == {"override": "o", "policy": "p", "reason": "runaway", "who": "eve", "requests": 1}


@pytest.mark.parametrize(("status", "expected", "waits"), [("auto", 400, False), (429, 429, True), (403, 429, True)])
def test_a_block_is_final_where_the_policy_leaves_the_status_open(status: int | str, expected: int, waits: bool) -> None:
    """`auto` is a 400, which no client sends again, and so without a time to wait."""
    service = apply_orders(make_service(policy("p", ANY, **USER, reject_status=status)), order(BLOCK))

    answer = ask(service)

    assert find_status(answer) == expected
    assert ("Retry-After" in find_headers(answer)) == waits


def test_a_block_beats_an_allow() -> None:
    """A caller that is both allowed and blocked is blocked."""
    assert send(apply_orders(make_service(policy("p", ANY, **USER)), order(ALLOW), order(BLOCK)), 1) == [429]


def test_a_blocked_request_is_known_by_its_body() -> None:
    """A fingerprint is blocked once the body has come, and no other request of the caller is."""
    service = make_service(policy("p", ANY, action="warn", threshold_identical_requests=2, **USER))
    ask(service, data=b"same")
    fingerprint = str(metadata_of(ask(service, data=b"same"))["fingerprint"])
    apply_orders(service, order(BLOCK, Target(fingerprint=fingerprint)))

    assert find_status(ask(service, data=b"same")) == 429
    assert find_status(ask(service, data=b"other")) == 200


def test_a_blocked_caller_does_not_hide_behind_a_body() -> None:
    """A request that cannot be counted is refused all the same, because the headers name its caller."""
    service = apply_orders(make_service(policy("p", ANY, similarity="canonical", **USER)), order(BLOCK))

    assert find_status(decoded(exchange(service, headers(x_user_id="ann", upgrade="websocket"))[-1])) == 429


def test_a_caller_in_the_body_is_blocked_once_it_is_known() -> None:
    """Where limit keys stand in the body, the block waits for it."""
    service = make_service(policy("p", ANY, limit_keys=["header:x-user-id", "body:/org"]))
    tenant = hash_tenant("/org=o|x-user-id=ann")
    apply_orders(service, order(BLOCK, Target(caller=tenant)))

    assert find_status(ask(service, data=b'{"org": "o"}')) == 429
    assert find_status(ask(service, data=b'{"org": "p"}')) == 200


def test_a_shadow_policy_blocks_no_request() -> None:
    """A block that holds in a shadow policy alone has no effect."""
    service = make_service(policy("p", ANY, mode="shadow", **USER), policy("q", {"pathExact": "/q"}, **USER))
    apply_orders(service, order(BLOCK))

    assert send(service, 1) == [200]
    assert find_status(ask(service, path="/q")) == 429
    assert find_status(ask(apply_orders(service, order(BLOCK, about="p")), path="/q")) == 200


CALL = b'{"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "%s", "arguments": {}}}'


def test_a_blocked_tool_is_a_call_that_failed() -> None:
    """Of an MCP server one tool is blocked: the model reads that in the shape of a result, and the others work."""
    service = apply_orders(make_service(policy("p", ANY, similarity="mcp", **USER)), order(BLOCK, Target(tool="search")))

    answer = json.loads(ask(service, data=CALL % b"search").immediate_response.body)

    assert (answer["id"], answer["result"]["isError"]) == (7, True)
    assert "blocked" in answer["result"]["content"][0]["text"]
    assert find_status(ask(service, data=CALL % b"read")) == 200


# Release


@pytest.mark.parametrize("window_type", WINDOW_TYPES)
@pytest.mark.parametrize("cooldown", [0, 600])
def test_a_released_caller_begins_anew(window_type: str, cooldown: int) -> None:
    """Counts and cooldowns of every window are forgotten, once: the next loop is refused again; others are not released."""
    service = make_service(policy("p", ANY, window_type=window_type, cooldown_seconds=cooldown, **USER))
    assert send(service, 4) == send(service, 4, "bob") == [200, 200, 429, 429]

    apply_orders(service, order(RELEASE))

    assert send(service, 4) == [200, 200, 429, 429]
    assert send(service, 1, "bob") == [429]
    apply_orders(service, order(RELEASE, since=1))
    assert send(service, 3) == [200, 200, 429]


def test_one_loop_is_released() -> None:
    """A release of a fingerprint leaves the caller's other loops where they are."""
    service = make_service(policy("p", ANY, **USER))
    for data in (b"a", b"b"):
        for _ in range(3):
            answer = ask(service, data=data)
    apply_orders(service, order(RELEASE, Target(fingerprint=find_headers(answer)["x-loopguard-fingerprint"])))

    assert find_status(ask(service, data=b"b")) == 200
    assert find_status(ask(service, data=b"a")) == 429


def test_the_newest_release_counts() -> None:
    """Of several that hold for a request the newest begins its count, whatever the order in which they are known."""
    older, newer = (
        order(RELEASE, name="older"),
        order(RELEASE, Target(caller=hash_tenant("x-user-id=ann")), since=5, name="newer"),
    )
    service = apply_orders(make_service(policy("p", ANY, **USER)), newer)
    assert send(service, 3) == [200, 200, 429]

    assert send(apply_orders(service, older, newer), 1) == [429]
    assert send(apply_orders(service, newer, older), 1) == [429]


def test_what_a_shadow_policy_counted_is_released() -> None:
    """Shadow counts begin anew as well."""
    service = make_service(policy("p", ANY, mode="shadow", **USER))
    send(service, 3)
    apply_orders(service, order(RELEASE))
    send(service, 2)

    assert service.metrics.decisions == {("p", "shadow", "allow"): 4, ("p", "shadow", "reject"): 1}


def test_a_released_session_s_ring_begins_anew() -> None:
    """What earlier requests of a session have shown is forgotten, and with it the cooldown."""
    service = make_service(agents(cooldown_seconds=600))
    assert send_all(service, [turn(n) for n in range(1, 5)], session_id="s") == [200, 200, 429, 429]

    apply_orders(service, order(RELEASE, Target(session=hash_descriptor("header:session-id", "s"))))

    assert send_all(service, [turn(n) for n in range(5, 8)], session_id="s") == [200, 200, 429]
    assert send_all(service, [turn(8)], session_id="t") == [429]  # the caller's other sessions still cool down


def test_a_window_local_to_a_replica_is_released() -> None:
    """While the store is away the replica's own counts begin anew, on every replica that knows of the release."""
    service = make_service(policy("p", ANY, **USER), store=FailingStore("loop:"))
    assert send(service, 3) == [200, 200, 429]

    assert send(apply_orders(service, order(RELEASE)), 3) == [200, 200, 429]


# Kill and grant

SESSION = Target(session="a" * 16)


def find_all(*standing: ActiveOverride, name: str = "p", session: str = "a" * 16) -> list[ActiveOverride]:
    """What holds for a request of a session of Ann's."""
    found = Overrides(standing)
    head = name, time.time(), Caller([hash_tenant("x-user-id=ann")], [("x-user-id", "ann")])
    return [*find_by_head(found, *head), *found.find_by_body(*head, session, "0" * 8, ())]


def test_a_session_is_killed_and_the_others_are_not() -> None:
    """A kill holds for the session that it names, or for every session of the caller that it names."""
    one, all_of_ann = order(KILL, SESSION), order(KILL)

    assert find_kill(find_all(one)) is one
    assert find_kill(find_all(one, session="b" * 16)) is None
    assert find_kill(find_all(order(ALLOW), all_of_ann, session="b" * 16)) is all_of_ann


def test_a_newer_release_undoes_a_kill() -> None:
    """Whichever of the two was ordered last counts, and the newest of several kills."""
    kill, release, again = order(KILL, SESSION), order(RELEASE, SESSION, since=5), order(KILL, since=9)

    assert find_kill(find_all(kill, release)) is None
    assert find_kill(find_all(kill, release, again)) is again
    assert find_kind(find_all(kill, release, again), KILL) is again


def test_grants_add_up() -> None:
    """Each that holds for a session adds to its limits: those of its caller as well, those of other sessions not."""
    grants = [
        order(GRANT, SESSION)._replace(grant=Grant(10, 0, 5, 1, 2, 3, 4)),
        order(GRANT)._replace(grant=Grant(1, 2, 0, agents=40)),
        order(GRANT, about="q")._replace(grant=Grant(100, 100, 100)),
    ]

    assert sum_grants(find_all(*grants, order(BLOCK))) == (11, 2, 5)
    assert sum_grants(find_all(*grants, session="b" * 16)) == (1, 2, 0)
    assert sum_grants(find_all(*grants, name="q")) == (111, 102, 105)
    assert sum_grants([]) == (0, 0, 0)
    assert sum_agent_grants(find_all(*grants, order(BLOCK))) == (1, 42, 3, 4)
    assert sum_agent_grants([order(BLOCK)._replace(grant=MAX_GRANT)]) == (0, 0, 0, 0)


def test_grants_are_bounded_together() -> None:
    """However many are given, what they add stays in the range in which everything is counted exactly."""
    assert sum_grants([order(GRANT)._replace(grant=MAX_GRANT)] * 10_000) == MAX_GRANT[:3]


# The service


class Clock:
    """A clock that tests put forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        """The time."""
        return time.time() + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Their clock."""
    made = Clock()
    monkeypatch.setattr(overrides, "time", made)
    return made


def test_orders_apply_on_every_replica_once_it_has_asked(caplog: pytest.LogCaptureFixture) -> None:
    """An order holds at once where it was given, and elsewhere when the store is asked next; so does its end."""
    caplog.set_level(logging.WARNING)
    both = Replicas(2, policy("p", ANY, threshold_identical_requests=9, **USER))

    given, _ = both.give(kind="block", caller={"x-user-id": "ann"}, seconds=60, reason="runaway")
    assert [send(service, 1) for service in both.services] == [[429], [200]]
    both.refresh()
    assert [send(service, 1) for service in both.services] == [[429], [429]]
    assert both.run(both.givers[1].revoke(given.name, "adam"))
    both.refresh()

    assert [send(service, 1) for service in both.services] == [[200], [200]]
    assert [service.overrides for service in both.services] == [None, None]
    told = [(record.getMessage(), vars(record)["fields"]) for record in caplog.records if "override " in record.getMessage()]
    assert [(what, line["kind"], line["who"]) for what, line in told] == [
        ("override given", "block", "eve"),
        ("override revoked", "block", "adam"),
    ]
    assert (told[0][1]["reason"], told[0][1]["override"]) == ("runaway", given.name)
    assert "ann" not in caplog.text


def test_without_the_store_the_last_known_orders_hold_until_they_end(clock: Clock) -> None:
    """A replica without its store applies the orders it knows until they end, and tells the operator of new ones."""
    store = FailingStore("nothing")
    service = make_service(policy("p", ANY, **USER), store=store)
    giver = OverrideService(store, service, service.metrics)
    asyncio.run(giver.give({"kind": "block", "caller": {"x-user-id": "ann"}, "seconds": 60}, "eve"))
    store._failing = ""

    for ask_store in (giver.refresh(), giver.revoke("x", "eve"), giver.give({"kind": "allow", "tool": "t"}, "eve")):
        with pytest.raises(StoreError):
            asyncio.run(ask_store)
    assert send(service, 1) == [429]
    clock.ahead = 61
    giver._forget_ended()

    assert service.overrides is None
    assert giver.list_standing() == []


def test_the_same_order_again_takes_the_place_of_the_first(clock: Clock) -> None:
    """To block a caller longer is to block it again; a caller is released as often as that is ordered."""
    one = Replicas(1)
    first, _ = one.give(kind="block", caller={"x-user-id": "ann"}, seconds=60)
    clock.ahead = 10
    second, _ = one.give(kind="block", caller={"x-user-id": "ann"}, seconds=60, reason="longer")
    other, _ = one.give(kind="block", caller={"x-user-id": "ann"}, policy="p")

    assert first.name == second.name != other.name
    assert [(standing.name, standing.reason) for standing in one.givers[0].list_standing()] in (
        [(second.name, "longer"), (other.name, "")],
        [(other.name, ""), (second.name, "longer")],
    )


def test_every_replica_knows_what_is_killed_and_granted() -> None:
    """A kill and grants that are given here stand there as well, whole, until they are revoked."""
    both = Replicas(2)
    kill, _ = both.give(kind="kill", session="a" * 16)
    grant, _ = both.give(kind="grant", session="a" * 16, steps=10, tool_calls=3, cost=0.1, tools={"pay": 1, "a=b": 2})
    more, _ = both.give(1, kind="grant", caller={"x-user-id": "ann"}, cost=5, seconds=60)
    both.refresh()

    def find_there() -> list[ActiveOverride]:
        return find_all(*both.givers[1].list_standing())

    assert (find_kill(find_there()), sum_grants(find_there())) == (kill, (10, 3, 5_100_000_000))
    assert [round(given.ends - given.since) for given in (kill, grant, more)] == [86_400, 86_400, 60]
    assert describe_override(grant).items() >= {"kind": "grant", "steps": 10, "tool_calls": 3, "cost": 0.1}.items()
    assert describe_override(grant)["tools"] == sum_tool_grants(find_there()) == {"pay": 1, "a=b": 2}
    assert describe_override(kill).keys().isdisjoint({"steps", "tool_calls", "cost"})
    for given in (kill, more):
        both.run(both.givers[0].revoke(given.name, "eve"))
    both.refresh()
    assert (find_kill(find_there()), sum_grants(find_there())) == (None, (10, 3, 100_000_000))


def send_steps(service: Service, numbers: Iterable[int], session: str = "s") -> list[str]:
    """Which limit refuses each of these requests of a session, empty for none."""
    answers = [ask_in_session(service, turns(number), session) for number in numbers]
    return [str(told(answer)["limit"]) if find_status(answer) != 200 else "" for answer in answers]


def test_a_killed_session_is_refused_everywhere_until_it_is_released() -> None:
    """It holds on every replica, from the next request; the caller's other sessions pass, and a release restarts it."""
    both = Replicas(2, limited(max_steps=3))
    target: dict[str, Any] = {"caller": {"x-team": "t"}, "session": {"header:x-session-id": "s"}}
    assert send_steps(both.services[0], range(2)) == ["", ""]

    both.give(kind="kill", **target)
    both.refresh()

    for service in both.services:
        refused = told(ask_in_session(service, turns(5), "s"))
        assert refused["limit"] == "killed"
        assert "an operator has stopped this session" in refused["message"]
        assert send_steps(service, [6], "other") == [""]
    both.give(1, kind="release", **target)
    both.refresh()
    assert send_steps(both.services[0], range(5)) == ["", "", "", "max_steps", "max_steps"]
    (killed,) = [run for run in both.services[1].reporter.sessions.copy() if run.ordered]
    assert killed.name.session == hash_descriptor("header:x-session-id", "s")


def test_a_session_that_was_granted_more_goes_on_where_it_was() -> None:
    """On every replica, by what all grants add; the sessions beside it meet their limit as ever."""
    both = Replicas(2, limited(max_steps=2))
    session = {"header:x-session-id": "s"}
    assert send_steps(both.services[0], range(3)) == ["", "", "max_steps"]

    both.give(kind="grant", session=session, steps=1)
    both.give(1, kind="grant", caller={"x-team": "t"}, session=session, steps=1)
    both.refresh()

    assert send_steps(both.services[1], [10]) == [""]
    assert send_steps(both.services[0], [11, 12]) == ["", "max_steps"]
    assert send_steps(both.services[1], range(3), "other") == ["", "", "max_steps"]


def test_a_grant_given_again_adds_unless_it_has_the_same_key() -> None:
    """Two equal grants are two; one that is sent to several replicas, or sent again for want of an answer, is one."""
    both = Replicas(2)
    for _ in range(2):
        both.give(kind="grant", session="a" * 16, steps=10)
    for giver in (0, 1, 1):
        both.give(giver, kind="grant", session="a" * 16, steps=10, key="k")
    both.give(kind="grant", session="b" * 16, steps=10, key="k")
    both.refresh()

    standing = both.givers[1].list_standing()
    assert sum_grants([grant for grant in standing if grant.target == SESSION]) == (30, 0, 0)
    assert len(standing) == 4


@pytest.mark.parametrize("cost", [1e-12, 0.07, 4.35, 999_999.999999999, 10**6])
def test_dollars_are_exact(cost: float) -> None:
    """An amount in dollars is the nearest number of nano-dollars, and never none."""
    given = parse_order({"kind": "grant", "session": "a" * 16, "cost": cost}, "", 0, [])

    assert given.grant.cost == max(1, int((Decimal(str(cost)) * 10**9).to_integral_value()))


def test_a_kill_is_not_back_when_its_release_has_ended() -> None:
    """A release outlasts the kills that it undoes, wherever they were given, and no others."""
    both = Replicas(2)
    both.give(kind="kill", session="a" * 16, caller={"x-user-id": "ann"}, policy="p")
    released = [
        both.give(1, kind="release", session="a" * 16)[0],
        both.give(1, kind="release", caller={"x-user-id": "ann", "x-team": "t"}, policy="p")[0],
        both.give(1, kind="release", session="b" * 16)[0],
        both.give(1, kind="release", caller={"x-user-id": "bob"})[0],
        both.give(1, kind="release", session="a" * 16, policy="q")[0],
    ]

    assert [round((release.ends - release.since) / 3_600) for release in released] == [24, 24, 1, 1, 1]


@pytest.mark.parametrize("grant", [b"7", b'["x"]', b"[Infinity]", b"{}", b"[-5, 1e30]", b"[1, 2, 3]", b"[0,0,0,-1,9e9,1,1,1]"])
def test_what_another_version_grants_stays_in_bounds(grant: bytes) -> None:
    """Whatever stands in the store as a grant, it is passed over, or adds between nothing and the bounds."""
    one = Replicas(1)
    known = write_override(order(GRANT, SESSION)).replace(b"[0, 0, 0, 0, 0, 0, 0]", grant)
    assert grant in known
    one.run(one.store.documents.put(ORDERS, "overrides", "odd", known, 60))
    one.refresh()

    standing = one.givers[0].list_standing()
    total = [*sum_grants(standing), *sum_agent_grants(standing)]
    assert all(0 <= given <= most for given, most in zip(total, MAX_GRANT, strict=True))


def test_what_was_ordered_before_there_were_grants_is_read() -> None:
    """An override that a version without grants has written is applied."""
    given = order(BLOCK)
    older = json.loads(write_override(given))
    del older["grant"]

    assert read_override("o", json.dumps(older).encode()) == given


def test_a_release_stands_until_nothing_is_left_of_what_was_counted() -> None:
    """It stands longer than every window, cooldown and session that it is about, so that no count from before comes back."""
    long = policy("long", ANY, window_seconds=7_200, cooldown_seconds=9_000, **USER)
    patient = agents(session={"idle_seconds": 10_000})
    one = Replicas(1, policy("p", ANY, **USER), long, patient)

    stands = {name: one.give(kind="release", caller={"x-user-id": "ann"}, policy=name)[0] for name in ("p", "long", "agents")}
    stands["all"] = one.give(kind="release", caller={"x-user-id": "ann"})[0]

    seconds = {name: round(override.ends - override.since) for name, override in stands.items()}
    assert seconds == {"p": 3_600, "long": 9_060, "agents": 10_060, "all": 10_060}


def test_orders_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the bound an order is refused without the store being asked; one that stands may be given again."""
    monkeypatch.setattr(overrides, "MAX_ORDERS", 2)
    one = Replicas(1)
    for tool in ("a", "b", "a"):
        one.give(kind="allow", tool=tool)

    with pytest.raises(StoreError) as error:
        one.give(kind="allow", tool="c")

    assert error.value.kind == "full"
    assert len(one.givers[0].list_standing()) == 2


def test_the_store_is_told_no_names() -> None:
    """The values of callers are neither in the store nor in lists."""
    one = Replicas(1)
    given, _ = one.give(kind="block", caller={"X-User-Id": "ann"}, session={"header:X-Session-Id": "secret"})

    document = write_override(given)

    assert b"ann" not in document
    assert b"secret" not in document
    assert "secret" not in json.dumps(describe_override(given))
    assert read_override(given.name, document) == given
    assert describe_override(given)["caller"] == {"x-user-id": hash_descriptor("x-user-id", "ann")}
    assert given.target.session == hash_descriptor("header:x-session-id", "secret")


@pytest.mark.parametrize("document", [b"", b"[]", b"7", b"{}", b'{"kind": "block"}', b"\xff", b'{"descriptors": []}'])
def test_what_another_version_has_ordered_is_passed_over(document: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the store holds, overrides that are understood apply, and the rest is logged."""
    one = Replicas(1)
    one.run(one.store.documents.put(ORDERS, "overrides", "odd", document, 60))
    one.give(kind="block", caller={"x-user-id": "ann"})

    assert send(one.services[0], 1) == [429]
    assert "an override in the store is not understood" in caplog.text


def test_a_kind_that_is_not_known_does_nothing() -> None:
    """A newer version may give orders that this one has no idea of."""
    assert send(apply_orders(make_service(policy("p", ANY, **USER)), order("pardon")), 3) == [200, 200, 429]


SECONDS = "seconds must be a number of seconds from 1 to 2592000"
NO_TARGET = "a target is required: caller, session, fingerprint or tool"
LIMIT_KEY = (
    "must be 'jwt:<claim>', 'header:<name>', 'query:<name>' (names of letters, digits, '_' and '-'), 'ip:address', "
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
CALLER = "caller must be the 16 hex digits of a tenant, as in logs, an alias, or an object of descriptor values by name"


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
                "steps belongs to a grant, not to a kill",
            ],
        ),
        (
            {"kind": "grant", "session": "a" * 16},
            [f"at least one of these is required: {', '.join(KEYS[8:-3])}; or budget and amount"],
        ),
        *(
            ({"kind": "grant", "session": "a" * 16, "tools": tools}, [f"tools must {problem}"])
            for tools, problem in (
                ({}, "be an object of numbers by tool name, of at most 64 tools, not an empty object"),
                ("refund", "be an object of numbers by tool name, of at most 64 tools, not 'refund'"),
                ({str(at): 1 for at in range(65)}, "be an object of numbers by tool name, of at most 64 tools, not an object"),
                ({"": 1}, "have names of 1 to 256 characters, not ''"),
                ({"refund": 0}, "have numbers from 1 to 10000, not 0"),
                ({"refund": True}, "have numbers from 1 to 10000, not true"),
                ({"refund": 10_001}, "have numbers from 1 to 10000, not 10001"),
            )
        ),
        ({"kind": "kill", "session": "a" * 16, "tools": {"refund": 1}}, ["tools belongs to a grant, not to a kill"]),
        (
            {"kind": "grant", "session": "a" * 16, "steps": 0, "tool_calls": 10_001, "cost": 1e6 + 1},
            [
                "steps must be a number from 1 to 1000000000, not 0",
                "tool_calls must be a number from 1 to 10000, not 10001",
                "cost must be dollars, more than 0 and at most 1000000, not 1000001.0",
            ],
        ),
        (
            {"kind": "grant", "session": "a" * 16, "agents": 0, "depth": 1_001, "spawns_per_minute": "2"},
            [
                "depth must be a number from 1 to 1000, not 1001",
                "agents must be a number from 1 to 1000, not 0",
                "spawns_per_minute must be a number from 1 to 1000, not '2'",
            ],
        ),
        (
            {"kind": "grant", "session": "a" * 16, "steps": 1.5, "tool_calls": True, "cost": float("nan"), "key": ""},
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
        ({"kind": "block", "caller": "ann"}, [f"{CALLER}, not 'ann'"]),
        ({"kind": "block", "caller": {}}, [f"{CALLER}, not an empty object"]),
        ({"kind": "block", "caller": {"x": 1}}, [f"{CALLER}, not an object"]),
        ({"kind": "block", "caller": {"x": ""}}, [f"{CALLER}, not an object"]),
        ({"kind": "block", "caller": {str(number): "v" for number in range(17)}}, [f"{CALLER}, not an object"]),
        (
            {"kind": "block", "session": {"a": "b", "c": "d"}},
            ["session must be 16 hex digits, or an object of one value by its key, such as header:x-session-id, not an object"],
        ),
        ({"kind": "block", "session": {"nope:x": "1"}}, [f"session has a key that {LIMIT_KEY}, not 'nope:x'"]),
        ({"kind": "block", "fingerprint": "XYZ"}, ["fingerprint must be 8 hex digits, not 'XYZ'"]),
        ({"kind": "block", "tool": "t" * 257}, [f"tool must be a text of 1 to 256 characters, not '{'t' * 60}...'"]),
        ({"kind": "block", "tool": "t", "policy": "a b"}, ["policy must be the id of a policy, not 'a b'"]),
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
def test_a_bad_order_says_what_would_be_right(given: object, problems: list[str]) -> None:
    """Everything that is wrong is told at once, and nothing is ordered."""
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
def test_half_of_a_surrogate_pair_is_no_text(key: str, make: Callable[[str], object], half: str) -> None:
    """What JSON can spell and UTF-8 cannot hold is refused wherever it stands, and the answer can be written."""
    with pytest.raises(BadOrderError) as error:
        parse_order({"kind": "grant", "session": "a" * 16, "steps": 1, key: make(half)}, "", 0, [])

    problem = str(error.value)
    assert "; " not in problem
    assert problem.startswith(f"{key} must be text that UTF-8 can hold, not '")
    assert "\\ud" in problem
    problem.encode()


def test_an_order_comes_with_notes_about_what_it_will_not_do() -> None:
    """A name that no policy knows, a policy that is not loaded, a shadow policy, and a conversation that cannot forget."""
    one = Replicas(1, policy("p", ANY, **USER), policy("s", ANY, mode="shadow", **USER), agents(limit_keys=["jwt:org"]))

    def remarks(**given: Any) -> list[str]:  # noqa: ANN401  # an order
        return one.give(**given)[1]

    assert remarks(kind="block", caller={"x-user-id": "ann"}) == []
    assert remarks(kind="block", caller={"user": "ann"}) == [
        "no policy identifies callers by user; known descriptors: org, x-user-id",
    ]
    assert remarks(kind="allow", tool="t", policy="gone") == ["no policy gone is loaded"]
    in_shadow = ["the policies it applies to are in shadow mode, so nothing is refused"]
    assert remarks(kind="block", caller={"x-user-id": "ann"}, policy="s") == in_shadow
    (said,) = remarks(kind="release", tool="t")
    assert said.startswith("a release cannot reset loops that a request itself shows, as in agents (default)")


def test_an_order_for_a_session_that_no_policy_finds_has_a_note() -> None:
    """By a key that no policy looks for; for a grant one that has limits."""
    looking = agents(session={"keys": ["header:x-run"]}) | {"id": "looking"}
    counting = Replicas(1, limited(session={"keys": ["header:x-session-id"]}, max_steps=3), looking)

    def remarks(one: Replicas, kind: str, key: str, **given: Any) -> list[str]:  # noqa: ANN401  # an order
        notes = one.give(kind=kind, session={key: "s"}, **given)[1]
        return [note for note in notes if "finds sessions" in note]

    assert remarks(counting, "kill", "header:X-Session-Id") == remarks(counting, "allow", "header:x-run") == []
    assert remarks(counting, "allow", "header:x-sesion") == [
        "no policy finds sessions by header:x-sesion; known keys: header:x-session-id, header:x-run"
    ]
    unlimited = "no policy finds sessions by header:x-run; known keys: header:x-session-id"
    assert remarks(counting, "grant", "header:x-run", steps=1) == [unlimited]
    assert remarks(counting, "kill", "header:x-run") == []
    assert remarks(counting, "kill", "header:x-run", policy="agents") == [unlimited]
    assert remarks(counting, "kill", "jwt:run", policy="gone") == []


NO_LIMITS = "this kill does nothing: no policy has session limits; name a session, or use block"
HEAD_KEYS = [key for key in BUDGET_KEYS if not key.startswith("body:")]
NAMELESS = policy("p", ANY, **USER)
NAMELESS["spec"]["session"] = {"keys": ["body:/conversation"]}
NO_TOOLS = "this allow does nothing: no policy looks at tools (tool_calls, turns and mcp do)"
NOTHING_DONE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a kill without limits": ({"kind": "kill", "caller": {"x-user-id": "ann"}}, [NO_LIMITS]),
    "of all its sessions in one policy": (
        {"kind": "kill", "caller": {"x-user-id": "ann"}, "policy": "p"},
        ["this kill does nothing: policy p has no session limits; name a session, or use block"],
    ),
    "a kill of a session": ({"kind": "kill", "session": {"header:x-session-id": "s"}}, []),
    "a kill of a session by a key that no policy has": (
        {"kind": "kill", "session": {"header:x-run": "s"}},
        [f"no policy finds sessions by header:x-run; known keys: {', '.join(HEAD_KEYS)}"],
    ),
    "a grant": (
        {"kind": "grant", "session": "a" * 16, "steps": 1},
        ["this grant does nothing: no policy has session limits"],
    ),
    "a tool that no policy looks at": ({"kind": "allow", "tool": "t"}, [NO_TOOLS]),
    "no such policy": ({"kind": "kill", "session": "a" * 16, "policy": "gone"}, ["no policy gone is loaded"]),
    "a caller": ({"kind": "block", "caller": {"x-user-id": "ann"}}, []),
}


@pytest.mark.parametrize(("given", "notes"), NOTHING_DONE.values(), ids=NOTHING_DONE)
def test_an_order_without_effect_has_a_note(given: dict[str, Any], notes: list[str]) -> None:
    """Where no policy has what the order is about."""
    assert Replicas(1).give(**given)[1] == notes


def test_an_order_for_a_session_has_a_note_where_no_policy_knows_sessions_by_then() -> None:
    """Detectors that compare requests alone do not read sessions' names in bodies."""
    one = Replicas(1, NAMELESS)

    assert one.give(kind="block", session="a" * 16)[1] == ["this does nothing: no policy looks for sessions"]


def test_kills_and_grants_are_measured_by_the_policies_that_have_limits() -> None:
    """How another policy tells its callers apart, and what no policy limits, helps neither."""
    one = Replicas(1, limited(max_steps=3), policy("q", ANY, **USER))

    def remarks(**given: Any) -> list[str]:  # noqa: ANN401  # an order
        return one.give(**given)[1]

    assert remarks(kind="kill", caller={"x-team": "t"}) == remarks(kind="grant", caller={"x-team": "t"}, steps=2) == []
    assert remarks(kind="kill", caller={"x-user-id": "ann"}) == [
        "no policy identifies callers by x-user-id; known descriptors: x-team"
    ]
    assert remarks(kind="block", caller={"x-user-id": "ann"}) == []
    assert remarks(kind="grant", caller={"x-team": "t"}, steps=1, tool_calls=2, cost=3) == [
        "granting tool_calls does nothing: no policy has max_tool_calls",
        "granting cost does nothing: no policy has max_cost_per_session",
    ]
    assert remarks(kind="grant", caller={"x-team": "t"}, agents=1, concurrent_agents=1) == [
        "granting agents does nothing: no policy has max_agents",
        "granting concurrent_agents does nothing: no policy has max_concurrent_agents",
    ]
    assert remarks(kind="grant", caller={"x-team": "t"}, tools={"refund": 1}) == [
        "granting calls of refund does nothing: no policy has max_calls_per_tool for it"
    ]


def test_policies_of_routes_have_limits_as_well() -> None:
    """A kill that acts on what came with a route is not said to do nothing."""
    one = Replicas(1)
    text = json.dumps(limited(max_steps=3))
    assert one.services[0].compile_handed_over(text) is not None

    assert one.give(kind="kill", caller={"x-team": "t"})[1] == []


def test_an_order_for_a_hash_that_no_server_has_reported_has_a_note() -> None:
    """A caller, a session or a loop by a hash of its own; by their values there is nothing to compare."""
    one = Replicas(1, limited(max_steps=3, session={"keys": ["header:x-session-id"]}))
    one.givers[0].list_seen = lambda: Seen({"a" * 16: 1}, {"b" * 16}, {"c" * 8})

    def remarks(**given: Any) -> list[str]:  # noqa: ANN401  # an order
        return [note.partition(". ")[0] for note in one.give(kind="block", **given)[1]]

    unknown = "as far as this server knows, this does nothing: the {} was not reported in the last hour"
    assert remarks(caller="a" * 16, session="b" * 16, fingerprint="c" * 8) == []
    assert remarks(caller={"x-team": "t"}, session={"header:x-session-id": "s"}) == []
    assert remarks(caller="b" * 16) == [unknown.format(f"caller {'b' * 16}")]
    assert remarks(session="a" * 16, fingerprint="d" * 8) == [
        unknown.format(f"session {'a' * 16}"),
        unknown.format(f"fingerprint {'d' * 8}"),
    ]


def test_a_reload_keeps_what_is_ordered() -> None:
    """Overrides are not part of the policies."""
    one = Replicas(1)
    one.give(kind="block", caller={"x-user-id": "ann"})
    one.services[0].engine = make_engine(policy("q", ANY, **USER))

    assert send(one.services[0], 1) == [429]
    assert one.services[0].metrics.registry.get_sample_value("loopguard_overrides", {"kind": "block"}) == 1
