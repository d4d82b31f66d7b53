"""Limits of requests without a session, and of first requests, until they continue."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from extproc.cli.commands.sessions import write_report
from extproc.cli.main import main
from extproc.metrics import Metrics
from extproc.operator.session_rows import merge_sessions
from extproc.sessions.rates import Usage
from extproc.store.memory import MemoryStore
from tests.support.bundles import check, plain, refused, spec
from tests.support.examples import examples
from tests.support.service import make_service, sample, status
from tests.support.session_limits import (
    TOOL,
    WRITERS,
    Request,
    ask,
    changed,
    describe,
    kept,
    limited,
    nameless,
    settle,
    told,
    turns,
    unnamed,
    write,
)

PRICES = {"*": {"input": 10_000, "output": 10_000}}  # a cent for each token


def prompt(text: str) -> bytes:
    return continue_task(text, 0)


def continue_task(text: str, turns: int) -> bytes:
    messages = [{"role": "user", "content": text}]
    for number in range(turns):
        messages += [
            {"role": "assistant", "content": f"step {number}"},
            {"role": "user", "content": "go on"},
        ]
    return json.dumps({"model": "m", "messages": messages, "tools": [TOOL]}).encode()


def prompts(*texts: object) -> list[bytes]:
    return [prompt(f"{text}") for text in texts]


STARTS: dict[str, tuple[dict[str, Any], Sequence[Request], list[int]]] = {
    **{
        f"a plain loop ends, {writer.__name__}": (
            unnamed(max_steps=5),
            [write([], writer)] * 100 + [(write([], writer), {"team": "other"})],
            [200] * 20 + [429] * 80 + [200],  # three retries of each step are free, as everywhere
        )
        for writer in WRITERS
    },
    "different prompts add up": (unnamed(max_steps=5), prompts(*range(10)), [200] * 5 + [429] * 5),
    "starts and unknown conversations add up": (
        unnamed(max_steps=4),
        [data for at in range(3) for data in (prompt(f"Do {at}"), kept(at + 1))],
        [200] * 4 + [429] * 2,
    ),
    "sessions still have all their limits": (
        unnamed(limits={"max_steps": 3}, max_steps=50),
        [continue_task("Task", turns) for turns in range(5)],
        [200] * 3 + [429] * 2,
    ),
    "a retried turn leaves room once": (
        unnamed(max_steps=3),
        [*prompts("a", "b", "c"), *[continue_task("a", 1)] * 4, *prompts("d", "e")],
        [200] * 8 + [429],
    ),
    "an unseen start leaves no room": (
        unnamed(max_steps=2),
        [prompt("a"), continue_task("x", 1), continue_task("y", 1), *prompts("b", "c")],
        [200] * 4 + [429],
    ),
    "a named session is not limited as unnamed": (
        unnamed(max_steps=1),
        [(prompt("Hi"), {"session": f"s{number}"}) for number in range(9)],
        [200] * 9,
    ),
    "a refused start takes no room": (
        unnamed(limits={"max_steps": 9, "max_tool_calls": 1}, max_steps=1),
        [*prompts("a", "b", "b"), continue_task("a", 1), continue_task("a", 2), *prompts("b", "c")],
        [200, 429, 429, 200, 200, 200, 429],
    ),
    "shadow policies only report starts": (
        unnamed("shadow", max_steps=1),
        prompts(*"abc"),
        [200] * 3,
    ),
    "without unnamed limits, they are only sessions": (
        limited(max_steps=2),
        prompts("Hi") * 100,
        [200] * 100,
    ),
}


@settings(deadline=None, max_examples=examples(60))
@given(
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=30),
    random=st.randoms(use_true_random=False),
)
def test_only_conversations_that_have_not_continued_are_counted(
    lengths: list[int], random: Random
) -> None:
    service, left, waiting = (
        make_service(unnamed(max_steps=4)),
        dict(enumerate(lengths)),
        set[int](),
    )
    sent = dict.fromkeys(left, 0)

    while left:
        number = random.choice(list(left))
        (passed,) = nameless(service, [continue_task(f"Task {number}", sent[number])])
        assert passed == (429 if not sent[number] and len(waiting) == 4 else 200)
        if passed == 429 or sent[number] == left[number]:
            del left[number]
        waiting.discard(number)
        if passed == 200 and not sent[number]:
            waiting.add(number)
        sent[number] += 1
    assert sample(service, "session_unnamed_total", policy="agents", mode="enforce") == 0


@pytest.mark.parametrize("late", [False, True])
def test_cost_of_a_start_moves_to_its_conversation(late: bool) -> None:
    service = make_service(
        unnamed(limits={"max_cost_per_session": 50, "prices": PRICES}, max_cost_per_session=20)
    )

    for number in range(5):
        answer = ask(service, prompt(f"Task {number}"), session="")
        if not late:
            settle(service, answer, Usage(1_500, 0))
        assert nameless(service, [continue_task(f"Task {number}", 1)]) == [200]
        if late:
            settle(service, answer, Usage(1_500, 0))
        assert status(answer) == 200

    settle(service, ask(service, continue_task("Task 0", 2), session=""), Usage(4_000, 0))
    assert nameless(service, [continue_task("Task 0", 3)]) == [429]


def test_tools_that_need_approval_are_forbidden_at_starts() -> None:
    answer = ask(
        make_service(unnamed(limits={"max_calls_per_tool": {"run": 0}}, max_steps=9)),
        prompt("Hi"),
        session="",
    )

    assert changed(answer)["tool_choice"] == "none"


def many(count: int, first: int = 1, **more: str) -> list[Request]:
    return [(kept(number), more) for number in range(first, first + count)]


def with_spec(document: dict[str, Any], **more: object) -> dict[str, Any]:
    document["spec"] |= more
    return document


NAMELESS: dict[str, tuple[dict[str, Any], Sequence[Request], list[int]]] = {
    "each call counts once, whichever conversation shows it again": (
        unnamed(max_tool_calls=4),
        many(5),
        [200] * 3 + [429] * 2,
    ),
    "a shadow policy only counts": (unnamed("shadow", max_steps=1), many(3), [200] * 3),
    "unknown callers are not one": (
        with_spec(unnamed(max_steps=1), missing_descriptor="share"),
        many(3, team=""),
        [200] * 3,
    ),
    "limited requests may pass uncounted": (
        with_spec(unnamed(max_steps=2), uncountable="reject"),
        many(3),
        [200, 200, 429],
    ),
    "sessions and unnamed requests have separate limits": (
        with_spec(
            unnamed(limits={"max_steps": 1}, max_steps=50), session={"max_sessions_per_tenant": 1}
        ),
        [*many(3), *((turns(1), {"session": name}) for name in "abc"), *many(3, 4)],
        [200] * 9,
    ),
}


@pytest.mark.parametrize(
    ("document", "requests", "expected"), (STARTS | NAMELESS).values(), ids=STARTS | NAMELESS
)
def test_requests_without_a_session_are_limited(
    document: dict[str, Any], requests: Sequence[Request], expected: list[int]
) -> None:
    service = make_service(document)

    assert nameless(service, requests) == expected
    shadowed = sample(
        service,
        "session_limits_total",
        policy="agents",
        mode="shadow",
        limit="max_steps",
        action="reject",
    )
    assert shadowed == (2 if document["spec"]["mode"] == "shadow" else 0)


def test_unnamed_requests_share_the_limits_of_their_caller() -> None:
    service = make_service(unnamed(max_steps=3))

    assert nameless(service, many(5)) == [200, 200, 200, 429, 429]
    assert nameless(service, many(1, team="other")) == [200]
    assert [status(ask(service, turns(number))) for number in range(1, 6)] == [200] * 5
    answer = ask(service, kept(9), session="")
    assert told(answer)["limit"] == "max_steps"
    assert "name no session have used 3 of their 3 steps" in told(answer)["message"]
    assert (
        sample(
            service,
            "session_limits_total",
            policy="agents",
            mode="enforce",
            limit="max_steps",
            action="reject",
        )
        == 3
    )
    assert sample(service, "session_unnamed_total", policy="agents", mode="enforce") == 7
    assert sorted(
        (row["unnamed_requests"], row["total_step_count"], row["total_block_count"])
        for row in describe(service)
        if row["session"] == "unnamed"
    ) == [(1, 1, 0), (6, 3, 3)]


def test_unlimited_unnamed_requests_are_counted_and_logged(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    service = make_service(limited(max_steps=1))

    with caplog.at_level(logging.WARNING):
        assert nameless(service, many(4)) == [200] * 4
        assert nameless(service, many(2, team="other")) == [200] * 2

    assert [line.getMessage() for line in caplog.records] == [
        "nothing names the session of requests; they pass: unnamed_limits would limit them"
    ]
    assert sample(service, "uncounted_total", policy="agents", reason="unnamed") == 6
    assert sample(service, "session_unnamed_total", policy="agents", mode="enforce") == 6
    shown = describe(service)
    assert sorted(
        (row["session"], row["unnamed_requests"], row["total_step_count"]) for row in shown
    ) == [("unnamed", 2, 0), ("unnamed", 4, 0)]
    assert "4 requests for which nothing names a session" in "\n".join(
        write_report({"problem": None, "sessions": shown})
    )
    assert capsys.readouterr().out == ""


def test_rows_of_unnamed_requests_add_up_over_replicas() -> None:
    one, other = make_service(limited(max_steps=1)), make_service(limited(max_steps=1))
    nameless(one, many(2))
    nameless(other, many(3))

    every = [
        row
        for service in (one, other)
        for row in service.reporter.sessions.make_document(shows_callers=False).rows
    ]

    assert [row.unnamed for row in merge_sessions(every, 0)] == [5]


def test_limits_of_unnamed_requests_renew_after_idle_seconds() -> None:
    now = [0]
    store = MemoryStore(Metrics(), clock=lambda: now[0])
    service = make_service(
        with_spec(unnamed(max_steps=4), session={"idle_seconds": 60}), store=store
    )

    found = []
    for number in range(12):
        now[0] = number * 10_000
        found += nameless(service, many(1, number + 1))

    assert found == [200] * 4 + [429] * 2 + [200] * 4 + [429] * 2


def test_cost_of_unnamed_requests_is_limited() -> None:
    service = make_service(
        unnamed(
            limits={"max_steps": 99, "prices": {"*": {"input": 1_000_000, "output": 1_000_000}}},
            max_cost_per_session=1e4,
        )
    )

    settle(service, ask(service, kept(1), session=""), Usage(20_000, 0))

    assert nameless(service, many(1, 2)) == [429]
    assert status(ask(service, turns(2))) == 200


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"unnamed_limits": {"max_steps": 1}}, "unnamed_limits needs session_limits"),
        (
            {"session_limits": {"max_steps": 1}, "unnamed_limits": {}},
            "unnamed_limits needs at least one of max_steps",
        ),
        (
            {
                "session_limits": {"max_steps": 1},
                "unnamed_limits": {"max_steps": 1, "max_calls_per_tool": {}},
            },
            "unknown key",
        ),
    ],
)
def test_invalid_unnamed_limits_are_rejected(keys: dict[str, Any], problem: str) -> None:
    error = refused(spec(**keys))[-1]

    assert error.pointer.startswith("/spec/unnamed_limits")
    assert problem in error.message


def test_validate_warns_about_unlimited_unnamed_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(limited(max_steps=1)))
    assert main(["validate", str(file)]) == 0
    assert "unnamed_limits would limit them" in capsys.readouterr().err

    file.write_text(json.dumps(unnamed(max_steps=1)))
    assert main(["validate", str(file)]) == 0
    assert "unnamed_limits" not in capsys.readouterr().err
    assert not plain(check(unnamed(max_steps=1)).warnings)
