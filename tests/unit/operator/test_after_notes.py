"""What comes after the first note of a loop, counted from what each request shows."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from extproc.decision import Action
from extproc.ext_proc.service import Service
from extproc.operator.admin.loop_report import ENDED_SECONDS, describe_history, describe_loops
from extproc.operator.admin.reports import Selection
from extproc.operator.after_notes import (
    BEGUN,
    LANDED,
    REFUSED,
    TURNED,
    WENT_ON,
    find_change,
    write_after,
)
from extproc.operator.canary.report import describe_canaries
from extproc.operator.canary.states import read_state
from extproc.operator.canary.verdict import Rules
from extproc.operator.loop_rows import LoopDocument
from extproc.operator.session_table import SessionTable
from extproc.sessions.rates import Prices, Usage
from extproc.store.rules.session import Standing
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.messages import body, headers
from tests.support.service import exchange, make_service
from tests.support.session_runs import note, settle
from tests.support.turn_writers import Did, as_chat

LADDER: dict[str, Any] = {
    "similarity": "turns",
    "action": "steer",
    "escalate": {"land": 5, "reject": 6},
    "limit_keys": ["header:x-user-id"],
}
STUCK = Did((("read", {"path": "a"}),), ("error: no such file",))
OTHER = Did((("list", {}),), ("a.txt b.txt",))
ALLOW, WARN, STEER, THROTTLE, LAND, REJECT = Action


def ask(service: Service, value: dict[str, Any], more: dict[str, Any]) -> None:
    exchange(service, headers("/v1/chat/completions", **more), body(json.dumps(value).encode()))


def converse(
    service: Service, task: str, turns: Sequence[Did], *, again: int = 1, user: str = "ann"
) -> None:
    for count in range(1, len(turns) + 1):
        shown = [
            turn._replace(thought=f"{task} {number}", number=number)
            for number, turn in enumerate(turns[:count], 1)
        ]
        value = as_chat(shown)
        value["messages"][1]["content"] = task
        for _ in range(again):
            ask(service, value, {"x-user-id": user})


def count_changes(service: Service) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for metric in service.metrics.after_notes.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                key = (sample.labels["arm"], sample.labels["after"])
                found[key] = found.get(key, 0) + int(sample.value)
    return found


@pytest.mark.parametrize(
    ("now", "before", "earlier", "change"),
    [
        (STEER, ALLOW, ALLOW, BEGUN), (STEER, WARN, ALLOW, BEGUN), (STEER, STEER, ALLOW, WENT_ON),
        (STEER, STEER, STEER, ""), (THROTTLE, STEER, STEER, ""), (ALLOW, STEER, ALLOW, TURNED),
        (ALLOW, THROTTLE, STEER, TURNED), (LAND, STEER, STEER, LANDED),
        (REJECT, STEER, STEER, REFUSED), (REJECT, LAND, STEER, ""), (ALLOW, LAND, STEER, ""),
        (STEER, REJECT, ALLOW, ""),
        (ALLOW, ALLOW, ALLOW, ""), (REJECT, ALLOW, ALLOW, ""),
    ],
)  # fmt: skip
def test_three_requests_tell_how_an_episode_changes(
    now: Action, before: Action, earlier: Action, change: str
) -> None:
    assert find_change(now, before, earlier) == change


CONVERSATIONS: dict[str, tuple[list[list[Did]], int, dict[str, int]]] = {
    "each way out": (
        [
            [*[STUCK] * 3, OTHER, OTHER],
            [*[STUCK] * 4, OTHER],
            [STUCK] * 8,
            [STUCK] * 3,
            [STUCK, OTHER, STUCK],
        ],
        1,
        {BEGUN: 4, WENT_ON: 2, TURNED: 2, LANDED: 1},
    ),
    "without an error": (
        [[*[Did((("read", {"path": "a"}),), ("A line of the file.\n" * 20,))] * 3, OTHER]],
        1,
        {BEGUN: 1, TURNED: 1},
    ),
    "other actions, the same error": (
        [
            [
                *[
                    Did((("read", {"path": f"{number}"}),), ("error: invalid syntax",))
                    for number in range(6)
                ],
                OTHER,
            ]
        ],
        1,
        {BEGUN: 1, TURNED: 1},
    ),
    "each request sent twice": ([[*[STUCK] * 3, OTHER]], 2, {BEGUN: 1, TURNED: 1}),
}


@pytest.mark.parametrize(
    ("conversations", "again", "changes"), CONVERSATIONS.values(), ids=CONVERSATIONS
)
def test_each_end_of_an_episode_is_counted_once(
    conversations: list[list[Did]], again: int, changes: dict[str, int]
) -> None:
    service = make_service(policy("p", ANY, **LADDER))

    for number, turns in enumerate(conversations):
        converse(service, f"task {number}", turns, again=again)

    assert count_changes(service) == {("noted", change): count for change, count in changes.items()}


@pytest.mark.slow
def test_steer_share_splits_conversations_alike_on_all_replicas() -> None:
    halves: list[list[str]] = []
    for _ in range(2):
        halves.append([])
        for number in range(20):
            service = make_service(policy("p", ANY, **LADDER, steer_share=50))
            converse(service, f"task {number}", [*[STUCK] * 3, OTHER])
            ((arm, first), (same, last)) = count_changes(service)
            assert (same, {first, last}) == (arm, {BEGUN, TURNED})
            halves[-1].append(arm)

    assert halves[0] == halves[1]
    assert 2 < halves[0].count("noted") < 18


def test_conversations_without_notes_still_land() -> None:
    service = make_service(policy("p", ANY, **LADDER, steer_share=0))

    converse(service, "one", [*[STUCK] * 3, OTHER])
    converse(service, "two", [STUCK] * 5)

    assert count_changes(service) == {
        ("not_noted", BEGUN): 2,
        ("not_noted", WENT_ON): 1,
        ("not_noted", TURNED): 1,
        ("not_noted", LANDED): 1,
    }
    assert {key[3] for key in service.reporter.loops.after} == {"same_error"}
    assert {action for *_, action, _ in service.metrics.detections} == {"warn", "land"}


def test_uneditable_body_is_in_neither_half() -> None:
    service = make_service(policy("p", ANY, **LADDER))
    signed = {
        "signature-input": 'sig=("content-digest")',
        "content-digest": "sha-256=:x:",
        "x-user-id": "ann",
    }

    for turns in ([STUCK] * 3, [*[STUCK] * 3, OTHER]):
        value = as_chat(turns)
        ask(service, value, signed)

    assert {
        sample.labels["policy"]
        for metric in service.metrics.unsteered.collect()
        for sample in metric.samples
    } == {"p"}
    assert count_changes(service) == {}


def test_windowed_detector_counts_first_note_and_what_followed() -> None:
    loop: dict[str, Any] = {
        "threshold_identical_requests": 2,
        "action": "steer",
        "escalate": {"reject": 4},
    }
    service = make_service(policy("p", ANY, similarity="canonical", window_seconds=60, **loop))
    data = json.dumps(as_chat([STUCK])).encode()

    for _ in range(5):
        exchange(service, headers("/v1/chat/completions"), body(data))

    assert count_changes(service) == {
        ("noted", BEGUN): 1,
        ("noted", WENT_ON): 1,
        ("noted", REFUSED): 1,
    }


def test_replicas_add_up_episodes() -> None:
    one, other = make_service(policy("p", ANY, **LADDER)), make_service(policy("p", ANY, **LADDER))
    converse(one, "one", [STUCK] * 3)
    converse(one, "two", [STUCK] * 3)
    shown = [
        turn._replace(thought=f"one {number}", number=number)
        for number, turn in enumerate([*[STUCK] * 3, OTHER], 1)
    ]
    value = as_chat(shown)
    value["messages"][1]["content"] = "one"
    ask(other, value, {"x-user-id": "ann"})

    documents = [
        service.reporter.loops.make_document(shows_callers=False) for service in (other, one)
    ]
    merged = LoopDocument.merge(documents, documents[0].rows[0].last)

    turned, stuck = sorted(merged.loops, key=lambda loop: -len(loop.after))
    assert [(loop.tools, loop.count, loop.total) for loop in (turned, stuck)] == [
        (["read"], 3, 1)
    ] * 2
    for later, left in ((0, {"open": 1, "ended": 0}), (ENDED_SECONDS, {"open": 0, "ended": 1})):
        now = stuck.last + later
        none, one_left = (
            {"begun": 1, "went_on": 0, "turned_round": 0, "landed": 0, "refused": 0},
            {"open": 0, "ended": 0},
        )
        (total,) = describe_history(merged, Selection(), now)["after_notes"]
        about = {
            "policy": "p",
            "detector": "default",
            "mode": "enforce",
            "cause": "same_error",
            "arm": "noted",
        }
        assert total == {**about, **none, "begun": 2, "turned_round": 1, **left}
        described = describe_loops([turned, stuck], Prices(None), [], shows_callers=False, now=now)
        assert described[0]["after_notes"] == {"noted": {**none, "turned_round": 1, **one_left}}
        assert (
            described[1] | {"after_notes": {"noted": {**none, **left}}, "tokens_after_note": None}
            == described[1]
        )


@pytest.mark.parametrize(("settled", "told"), [(4, (240, 360)), (3, (240, None))])
def test_report_has_tokens_before_and_after_a_note(
    settled: int, told: tuple[int, int | None]
) -> None:
    service = make_service(policy("p", ANY, **LADDER, session={"keys": ["header:x-user-id"]}))
    converse(service, "one", [*[STUCK] * 3, OTHER])
    document = service.reporter.loops.make_document(shows_callers=False)
    (row,) = document.loops
    table, known = SessionTable(), {"tenant": row.tenant, "session": row.session}
    for number, (second, tokens) in enumerate(((-2, 100), (-1, 100), (0, 150), (1, 170)), 1):
        standing, now = Standing(steps=number), row.first + second
        note(table, standing, number, now=now, **known)
        if number <= settled:
            settle(table, standing, number, now=now, usage=Usage(tokens, 20, 0, 0), **known)

    runs = table.make_document(shows_callers=False).rows
    (loop,) = describe_loops(document.loops, Prices(None), runs, shows_callers=False, now=row.last)

    assert (loop["tokens_before_note"], loop["tokens_after_note"]) == told


def test_canary_counts_episodes_it_would_have_steered() -> None:
    live = policy("live", ANY, similarity="turns", limit_keys=["header:x-user-id"])
    candidate = policy("next", ANY, mode="shadow", **LADDER)
    service = make_service(live, candidate)
    service.pairs.follow(service.engine.pairings, 0)

    converse(service, "one", [*[STUCK] * 3, OTHER])

    (canary,) = describe_canaries(
        [read_state(pair, 1) for pair in service.pairs.list_pairs()], Rules()
    )
    counts = canary["after_notes"]["candidate"]["not_noted"]
    assert canary["after_notes"]["live"] == {}
    assert write_after(counts, noted=False) == "not steered 1: 1 turned round"
