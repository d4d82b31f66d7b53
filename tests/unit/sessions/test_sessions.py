"""What a request does not show, the ring of its session supplies: sessions of a policy, from the headers to the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from extproc.engine.evaluation import Evaluation
from extproc.errors import StoreError
from extproc.ext_proc.wire import parse_message, read_request
from extproc.request.fingerprint import NO_BODY
from tests.support.documents import policy
from tests.support.engine import ANY, make_engine
from tests.support.messages import headers
from tests.support.service import FailingStore, make_service, metadata_of, sample
from tests.support.sessions import STUCK, USER, agents, ask, send, send_all, turn
from tests.support.turn_writers import Did, as_anthropic, as_chat, as_responses


def test_a_loop_spans_condensed_histories() -> None:
    """The third equal turn of a session is refused, although each request shows one."""
    service = make_service(agents())

    assert send_all(service, [turn(n) for n in range(1, 5)], session_id="s") == [200, 200, 429, 429]
    assert send(service, turn(5, Did((("edit", {}),), ("ok",))), session_id="s") == 200
    assert sample(service, "requests_total", policy="agents", mode="enforce", action="reject") == 2


def compacted(count: int, *, summary: str) -> bytes:
    """A request whose history begins with a summary, behind which so many turns were added."""
    made = as_chat([STUCK._replace(number=n, thought=f"Thought {summary} {n}.") for n in range(count)])
    start = [{"role": "user", "content": "What did we do so far?"}, {"role": "assistant", "content": summary}]
    return json.dumps({**made, "messages": [*start, *made["messages"]]}).encode()


def test_a_summary_of_the_assistant_s_goes_on_with_its_session() -> None:
    """A history that is compacted every two turns hides no loop; without a session's name, it would."""
    bodies = [compacted(count, summary=summary) for summary in "abc" for count in range(3)]

    assert send_all(make_service(agents()), bodies, session_id="s") == [200] * 4 + [429] * 2 + [200] + [429] * 2
    assert send_all(make_service(agents()), bodies) == [200] * 9


def test_runs_of_one_task_one_after_the_other_are_no_compacted_history() -> None:
    """An agent whose history is compacted to the same words after each turn sends the same, so it is not stopped either."""
    start = as_chat([])
    requests = [start, as_chat([STUCK])] * 5

    assert send_all(make_service(agents()), [json.dumps(each).encode() for each in requests], session_id="s") == [200] * 10


@pytest.mark.parametrize(("keys", "named"), [({}, {}), ({"session": None}, {"session_id": "s"})], ids=["request", "policy"])
def test_without_a_session_a_request_is_all_that_is_known(keys: dict[str, Any], named: dict[str, str]) -> None:
    """Where the request names none, or the policy has none, turns of which each request shows one are not brought together."""
    service = make_service(agents(**keys))

    assert send_all(service, [turn(n) for n in range(1, 6)], **named) == [200] * 5


def test_a_session_never_takes_the_place_of_a_caller() -> None:
    """Two anonymous callers with the same session name may be two sessions; a policy for a single caller has no such doubt."""
    shared = make_service(agents(missing_descriptor="share", limit_keys=["header:x-org"]))
    single = make_service(agents(limit_keys=[]))

    assert send_all(shared, [turn(n) for n in range(1, 5)], session_id="s") == [200] * 4
    assert send_all(shared, [turn(n) for n in range(1, 4)], session_id="s", x_org="o") == [200, 200, 429]
    assert send_all(single, [turn(n) for n in range(1, 4)], session_id="s") == [200, 200, 429]


@pytest.mark.parametrize(
    "written",
    [
        lambda n: {
            "previous_response_id": f"r{n}",
            "input": [{"type": "function_call_output", "call_id": f"c{n}", "output": "x"}],
        },
        lambda n: {
            "thread": {"type": "continue", "previous_message_id": f"m{n}"},
            "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"t{n}", "content": "x"}]}],
        },
    ],
    ids=["previous_response_id", "thread"],
)
def test_a_history_on_the_server_needs_a_session(written: Any) -> None:  # noqa: ANN401  # a body from its number
    """Without one the request is not counted; with one, equal results in a row are a loop."""
    service = make_service(agents())
    bodies = [json.dumps(written(n)).encode() for n in range(4)]

    assert send_all(service, bodies) == [200] * 4
    assert sample(service, "uncounted_total", policy="agents", reason="no_history") == 4
    assert send_all(service, bodies, x_session_id="s") == [200, 200, 429, 429]
    assert sample(service, "uncounted_total", policy="agents", reason="no_history") == 4


def test_a_plain_prompt_has_no_history_in_any_session() -> None:
    """Its text is not read for what was done, and the reason says so."""
    service = make_service(agents())

    assert send_all(service, [json.dumps({"prompt": "Go on."}).encode()] * 3, session_id="s") == [200] * 3
    assert sample(service, "uncounted_total", policy="agents", reason="no_history") == 3


def test_a_retry_is_no_turn() -> None:
    """A request that is sent again, to whichever model, shows nothing new."""
    service = make_service(agents())
    other = json.dumps({**json.loads(turn(1)), "model": "other", "stream": True}).encode()

    assert send_all(service, [turn(1), turn(1), other, turn(1)], session_id="s") == [200] * 4
    assert send_all(service, [turn(2), turn(3)], session_id="s") == [200, 429]


def test_agents_that_another_one_starts_have_a_history_each() -> None:
    """Three of one session that begin with the same call are in no loop."""
    service = make_service(agents())

    found = [send(service, turn(n), x_claude_code_session_id="s", x_claude_code_agent_id=f"a{n}") for n in range(5)]

    assert found == [200] * 5


def test_a_session_is_its_tenant_s_own() -> None:
    """A caller that names another tenant's session neither sees nor changes it."""
    service = make_service(agents())

    assert send_all(service, [turn(1), turn(2)], session_id="s", x_user_id="bob") == [200, 200]
    assert send_all(service, [turn(3), turn(4)], session_id="s") == [200, 200]
    assert send_all(service, [turn(5)], session_id="s") == [429]


def test_the_first_key_that_a_request_has_names_its_session() -> None:
    """Keys are tried in order, in the body as well; two with the same value are two sessions."""
    service = make_service(agents(session={"keys": ["body:/metadata/session", "query:session", "header:x-run"]}))

    def written(number: int) -> bytes:
        return json.dumps({**json.loads(turn(number)), "metadata": {"session": "s"}}).encode()

    assert send_all(service, [written(1), written(2)], x_run="r1") == [200, 200]
    assert send_all(service, [turn(3), turn(4)], x_run="s") == [200, 200]
    assert send_all(service, [turn(5)], path="/?session=s", x_run="s") == [200]
    assert send_all(service, [written(6)], x_run="r2") == [429]


def look(spec: Mapping[str, Any], scope: str = "", **named: Any) -> Evaluation:  # noqa: ANN401  # of `headers`
    """A sealed evaluation of a turn."""
    message = parse_message(headers(**{**USER, **named}).SerializeToString())
    evaluation = make_engine(spec).prepare(read_request(message, allow_unverified_jwt=False), scope)
    assert evaluation is not None
    evaluation.read_body(NO_BODY.plus(turn(1)), content=turn(1))
    return evaluation


def test_a_ring_s_key_has_bounded_parts() -> None:
    """Policy, detector, attachment, tenant, and a hash of however long a name; shadow policies have theirs apart."""
    chain, short = look(agents(), session_id="s").enforcing.list_pushes()
    _, long = look(agents(session={"idle_seconds": 7}), "edge", session_id="s" * 60_000).enforcing.list_pushes()
    _, shadow = look(agents(mode="shadow"), session_id="s").shadow.list_pushes()

    start, tenant, session = short.key.rsplit(":", 2)
    assert start == "ring:agents:default:"
    assert len(tenant) == len(session) == 16
    assert len(long.key) == len(short.key) + len("edge")
    assert shadow.key == f"shadow:{short.key}"
    assert (short.ttl_ms, long.ttl_ms) == (3_600_000, 7_000)
    start, node, own = chain.key.rsplit(":", 2)
    assert start == f"chain2:agents:default::{session}"
    assert (len(node), own) == (32, tenant)


def test_a_loop_that_the_ring_shows_trips_the_cooldown() -> None:
    """After it the same turn stays refused, in a session of its own as well; another turn passes."""
    service = make_service(agents(cooldown_seconds=60))

    assert send_all(service, [turn(n) for n in range(1, 4)], session_id="s") == [200, 200, 429]
    assert send(service, turn(4), session_id="t") == 429
    assert send(service, turn(5, Did((("edit", {}),), ("ok",))), session_id="s") == 200


def test_a_shadow_policy_has_a_ring_of_its_own() -> None:
    """It sees the loop, touches nothing, and an enforcing policy of the same name would start anew."""
    service = make_service(agents(mode="shadow"), policy("loops", ANY, threshold_identical_requests=100))
    answers = [ask(service, turn(n), session_id="s")[0] for n in range(1, 4)]

    found = metadata_of(answers[-1])

    assert not answers[-1].HasField("immediate_response")
    assert (found["shadow_action"], found["shadow_policy"], found["shadow_count"]) == ("reject", "agents", 3)


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("error", [StoreError("down", kind="timeout"), ZeroDivisionError("a bug")], ids=["down", "bug"])
def test_a_shadow_policy_s_dead_ring_is_its_own_affair(error: Exception, later: bool) -> None:
    """The enforcing policy's verdict stands, whatever becomes of the shadow's."""
    store = FailingStore("shadow:", error, later=later)
    service = make_service(agents(mode="shadow"), agents() | {"id": "own"}, store=store)

    assert send_all(service, [turn(n) for n in range(1, 4)], session_id="s") == [200, 200, 429]


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
def test_while_the_store_is_down_this_process_remembers(later: bool) -> None:
    """A ring of its own takes the place of the store's, and that is counted as any failure is."""
    service = make_service(agents(), store=FailingStore(error=StoreError("down", kind="timeout"), later=later))

    assert send_all(service, [turn(n) for n in range(1, 4)], session_id="s") == [200, 200, 429]
    assert sample(service, "store_errors_total", kind="timeout") == 3
    assert sample(service, "fail_open_total", reason="store_error") == 3


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
def test_what_needs_the_ring_can_be_refused_without_it(later: bool) -> None:
    """`--on-store-error reject` refuses a request that cannot be judged, but not one that shows enough by itself."""
    store = FailingStore(error=StoreError("down", kind="timeout"), later=later)
    service = make_service(agents(), store=store, on_store_error="reject")
    whole = json.dumps(as_chat([Did((("edit", {"n": n}),), ("ok",)) for n in range(32)])).encode()
    loop = json.dumps(as_anthropic([STUCK] * 3)).encode()

    assert send_all(service, [turn(1), whole, loop], session_id="s") == [503, 200, 429]
    assert send(service, turn(1)) == 200


def test_a_bug_in_the_store_is_told_apart() -> None:
    """The request passes, and the failure counts as an internal error."""
    service = make_service(agents(), store=FailingStore(error=ZeroDivisionError("a bug")))

    assert send(service, turn(1), session_id="s") == 200
    assert sample(service, "fail_open_total", reason="internal_error") == 1


def test_only_a_request_that_needs_the_ring_waits_for_the_store() -> None:
    """A request that shows its own loop, or its whole history, is answered at once; a later one still finds its turn."""
    service = make_service(agents(), store=FailingStore("nothing", later=True))
    edits = [Did((("edit", {"n": n}),), ("ok",)) for n in range(31)]
    whole = [
        json.dumps(as_responses([*edits, STUCK._replace(number=number, thought=str(number))])).encode() for number in (98, 99)
    ]

    assert [ask(service, data, session_id="s")[1] for data in whole] == [True, True]
    assert ask(service, turn(100), session_id="s")[1] is False
    assert send(service, turn(101), session_id="s") == 429
    assert ask(service, json.dumps(as_chat([STUCK] * 3)).encode(), session_id="s")[1] is True


def test_a_failure_that_no_request_waits_for_is_counted_all_the_same() -> None:
    """And the turn is kept here, so that a later request finds it while the store is away."""
    service = make_service(agents(), store=FailingStore(error=StoreError("down", kind="timeout"), later=True))
    edits = [Did((("edit", {"n": n}),), ("ok",)) for n in range(31)]

    ask(service, json.dumps(as_chat([*edits, STUCK._replace(number=98)])).encode(), session_id="s")

    assert sample(service, "store_errors_total", kind="timeout") == 1
    assert sample(service, "fail_open_total", reason="store_error") == 0
    assert send_all(service, [turn(99), turn(100)], session_id="s") == [200, 429]
