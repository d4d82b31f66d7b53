"""Detectors of turns with sessions: a session's ring of turns completes cut histories."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from extproc.errors import StoreError
from extproc.metrics import Metrics
from extproc.store.memory import MemoryStore
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.service import FailingStore, make_service, metadata_of, sample
from tests.support.sessions import STUCK, agents, ask, send, send_all, turn
from tests.support.turn_writers import Did, as_anthropic, as_chat


def compacted(count: int, *, summary: str) -> bytes:
    made = as_chat(
        [STUCK._replace(number=n, thought=f"Thought {summary} {n}.") for n in range(count)]
    )
    start = [
        {"role": "user", "content": "What did we do so far?"},
        {"role": "assistant", "content": summary},
    ]
    return json.dumps({**made, "messages": [*start, *made["messages"]]}).encode()


EDIT = Did((("edit", {}),), ("ok",))
QUIET = STUCK._replace(results=("nothing new",))
S: dict[str, Any] = {"session_id": "s"}
KEYS = agents(session={"keys": ["body:/metadata/session", "query:session", "header:x-run"]})
COMPACTED = [compacted(count, summary=summary) for summary in "abc" for count in range(3)]
ONE_TASK = [json.dumps(as_chat(done)).encode() for done in ([], [STUCK])] * 5
OTHER_MODEL = json.dumps({**json.loads(turn(1)), "model": "other", "stream": True}).encode()


# Of `headers`
def shown(*numbers: int, **named: Any) -> list[tuple[bytes, dict[str, Any]]]:  # noqa: ANN401
    return [(turn(number), named) for number in numbers]


def written(number: int) -> bytes:
    return json.dumps({**json.loads(turn(number)), "metadata": {"session": "s"}}).encode()


CASES: dict[str, tuple[dict[str, Any], Sequence[tuple[bytes, dict[str, Any]]], list[int]]] = {
    "a loop spans condensed histories": (
        agents(),
        [*shown(1, 2, 3, 4, **S), (turn(5, EDIT), S)],
        [200, 200, 429, 429, 200],
    ),
    "a history compacted every two turns hides no loop": (
        agents(),
        [(data, S) for data in COMPACTED],
        [200] * 4 + [429] * 2 + [200] + [429] * 2,
    ),
    "without a session, compacting hides a loop": (
        agents(),
        [(data, {}) for data in COMPACTED],
        [200] * 9,
    ),
    "consecutive runs of one task are no compacted history": (
        agents(),
        [(data, S) for data in ONE_TASK],
        [200] * 10,
    ),
    "without a session, only the request counts": (agents(), shown(1, 2, 3, 4, 5), [200] * 5),
    "the same for a policy without sessions": (
        agents(session=None),
        shown(1, 2, 3, 4, 5, **S),
        [200] * 5,
    ),
    "a session does not replace a caller": (
        agents(missing_descriptor="share", limit_keys=["header:x-org"]),
        [*shown(1, 2, 3, 4, **S), *shown(1, 2, 3, x_org="o", **S)],
        [200] * 6 + [429],
    ),
    "a policy without callers uses the session": (
        agents(limit_keys=[]),
        shown(1, 2, 3, **S),
        [200, 200, 429],
    ),
    "a retry with any model is no turn": (
        agents(),
        [*shown(1, 1, **S), (OTHER_MODEL, S), *shown(1, 2, 3, **S)],
        [200] * 5 + [429],
    ),
    "each started agent has its own history": (
        agents(),
        [
            (turn(n), {"x_claude_code_session_id": "s", "x_claude_code_agent_id": f"a{n}"})
            for n in range(5)
        ],
        [200] * 5,
    ),
    "a session belongs to its caller": (
        agents(),
        [*shown(1, 2, x_user_id="bob", **S), *shown(3, 4, 5, **S)],
        [200] * 4 + [429],
    ),
    "keys are tried in order, also in the body": (
        KEYS,
        [
            *((written(number), {"x_run": "r1"}) for number in (1, 2)),
            *shown(3, 4, x_run="s"),
            *shown(5, path="/?session=s", x_run="s"),
            (written(6), {"x_run": "r2"}),
        ],
        [200] * 5 + [429],
    ),
    "a loop in the ring starts the cooldown of all sessions": (
        agents(cooldown_seconds=60),
        [*shown(1, 2, 3, **S), *shown(4, session_id="t"), (turn(5, EDIT), S)],
        [200, 200, 429, 429, 200],
    ),
}


@pytest.mark.parametrize(("document", "requests", "expected"), CASES.values(), ids=CASES)
def test_session_completes_the_history_of_a_request(
    document: dict[str, Any], requests: Sequence[tuple[bytes, dict[str, Any]]], expected: list[int]
) -> None:
    service = make_service(document)

    assert [send(service, data, **named) for data, named in requests] == expected
    assert sample(
        service, "requests_total", policy="agents", mode="enforce", action="reject"
    ) == expected.count(429)


@pytest.mark.parametrize(
    "written",
    [
        lambda n: {
            "previous_response_id": f"r{n}",
            "input": [{"type": "function_call_output", "call_id": f"c{n}", "output": "x"}],
        },
        lambda n: {
            "thread": {"type": "continue", "previous_message_id": f"m{n}"},
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": f"t{n}", "content": "x"}],
                }
            ],
        },
    ],
    ids=["previous_response_id", "thread"],
)
# A body from its number
def test_history_on_the_server_needs_a_session(written: Any) -> None:  # noqa: ANN401
    service = make_service(agents())
    bodies = [json.dumps(written(n)).encode() for n in range(4)]

    assert send_all(service, bodies) == [200] * 4
    assert sample(service, "uncounted_total", policy="agents", reason="no_history") == 4
    assert send_all(service, bodies, x_session_id="s") == [200, 200, 429, 429]
    assert sample(service, "uncounted_total", policy="agents", reason="no_history") == 4


def test_plain_prompt_has_no_history() -> None:
    service = make_service(agents())

    assert (
        send_all(service, [json.dumps({"prompt": "Go on."}).encode()] * 3, session_id="s")
        == [200] * 3
    )
    assert sample(service, "uncounted_total", policy="agents", reason="no_history") == 3


def test_ring_expires_with_its_session() -> None:
    now = [0]
    service = make_service(
        agents(session={"idle_seconds": 7}), store=MemoryStore(Metrics(), clock=lambda: now[0])
    )

    found = []
    for number, gap in enumerate((0, 6_999, 6_999, 7_000, 1), 1):
        now[0] += gap
        found.append(send(service, turn(number), **S))

    assert found == [200, 200, 429, 200, 200]


def test_shadow_policy_has_its_own_ring() -> None:
    service = make_service(
        agents(mode="shadow"), policy("loops", ANY, threshold_identical_requests=100)
    )
    answers = [ask(service, turn(n), session_id="s") for n in range(1, 4)]

    found = metadata_of(answers[-1])

    assert not answers[-1].HasField("immediate_response")
    assert (found["shadow_action"], found["shadow_policy"], found["shadow_count"]) == (
        "reject",
        "agents",
        3,
    )


DOWN = StoreError("down", kind="timeout")
SHADOWED = [agents(mode="shadow"), agents() | {"id": "own"}]


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize(
    ("policies", "failing", "error", "counted"),
    [
        ([agents()], "", DOWN, (3, 3)),  # a ring of this process takes the place of the store's
        (SHADOWED, "shadow:", DOWN, (3, 3)),
        (SHADOWED, "shadow:", ZeroDivisionError("a bug"), (0, 0)),
    ],
    ids=["down", "down for shadow policies", "a bug for shadow policies"],
)
def test_loop_is_found_while_the_store_is_down(
    policies: list[dict[str, Any]],
    failing: str,
    error: Exception,
    counted: tuple[int, int],
    later: bool,
) -> None:
    service = make_service(*policies, store=FailingStore(failing, error, later=later))

    assert send_all(service, [turn(n) for n in range(1, 4)], session_id="s") == [200, 200, 429]
    found = (
        sample(service, "store_errors_total", kind="timeout"),
        sample(service, "fail_open_total", reason="store_error"),
    )
    assert found == counted


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
def test_on_store_error_reject_refuses_what_needs_the_ring(later: bool) -> None:
    store = FailingStore(error=StoreError("down", kind="timeout"), later=later)
    service = make_service(agents(), store=store, on_store_error="reject")
    whole = json.dumps(as_chat([Did((("edit", {"n": n}),), ("ok",)) for n in range(32)])).encode()
    loop = json.dumps(as_anthropic([STUCK] * 3)).encode()

    assert send_all(service, [turn(1), whole, loop], session_id="s") == [503, 200, 429]
    assert send(service, turn(1)) == 200


def test_bug_in_the_store_counts_as_internal_error() -> None:
    service = make_service(agents(), store=FailingStore(error=ZeroDivisionError("a bug")))

    assert send(service, turn(1), session_id="s") == 200
    assert sample(service, "fail_open_total", reason="internal_error") == 1


def test_store_failure_without_waiting_request_is_counted() -> None:
    service = make_service(
        agents(), store=FailingStore(error=StoreError("down", kind="timeout"), later=True)
    )
    edits = [Did((("edit", {"n": n}),), ("ok",)) for n in range(31)]

    ask(service, json.dumps(as_chat([*edits, QUIET._replace(number=98)])).encode(), session_id="s")

    assert sample(service, "store_errors_total", kind="timeout") == 1
    assert sample(service, "fail_open_total", reason="store_error") == 0
    assert send_all(service, [turn(99, QUIET), turn(100, QUIET)], session_id="s") == [200, 429]
