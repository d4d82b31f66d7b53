"""Two replicas that share a store, behind Envoy: conversations, notes, and retries in an outage."""

import json
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http.client import IncompleteRead
from pathlib import Path
from random import Random
from typing import Any

import pytest

from extproc.operator.after_notes import AFTER
from extproc.policy.presets import find_preset
from extproc.request.notes import OPENING
from tests.support.command import Run
from tests.support.documents import bundle, policy
from tests.support.extent import deepen
from tests.support.harness import Stack, eventually, stack
from tests.support.servers import cluster, server
from tests.support.stacks import open_before_model
from tests.support.turn_writers import SHAPES, Did, as_chat
from tests.support.usage import HUNG_UP, Model, Reply, whole

LOOPS = policy("agents", {"pathPrefix": "/"}, similarity="turns", limit_keys=["header:x-user-id"])
BROKEN = Did((("check", {"build": 7}),), ("the build is broken",))


@pytest.fixture(
    scope="module", params=[server, partial(cluster, fails_over=False)], ids=["valkey", "cluster"]
)
def stacked(request: pytest.FixtureRequest) -> Iterator[Stack]:
    with request.param() as found:
        nodes = found[:2] if isinstance(found, list) else [found]
        scheme = "redis" if len(nodes) == 1 else "redis+cluster"
        url = f"{scheme}://{','.join(node.address for node in nodes)}"
        with stack(bundle(LOOPS), "--store", url, replicas=2) as made:
            yield made


@pytest.mark.parametrize(
    ("shape", "window"),
    deepen(
        [("chat", 0), ("anthropic", 3), ("responses", 3), ("gemini", 0)],
        ("chat", 0),
        ("anthropic", 3),
    ),
)
def test_looping_conversation_is_refused_across_replicas(
    stacked: Stack, shape: str, window: int
) -> None:
    """It runs beside five others of its caller, with older results cleared or messages left out."""
    random = Random(f"{shape}{window}")
    headers = {"x-user-id": f"{shape}-{window}"}
    statuses: list[list[int]] = [[] for _ in range(6)]
    begun = [
        Did((("look", {"at": random.randrange(10**6)}),), (str(random.randrange(10**6)),))
        for _ in range(6)
    ]
    before = [replica.metric("requests_total") for replica in stacked.replicas]
    for count in range(7):
        for place in random.sample(range(6), 6):
            work = (
                [BROKEN] * 8
                if place == 0
                else [BROKEN._replace(results=(f"{place} {turn}",)) for turn in range(8)]
            )
            turns = [begun[place], *work][:count]
            turns = [
                turn._replace(thought=f"{place} thinks {at}", number=at + 1)
                for at, turn in enumerate(turns)
            ]
            shown = (
                turns[-window:]
                if window
                else [turn._replace(results=("[cleared]",)) for turn in turns[:-2]] + turns[-2:]
            )
            statuses[place].append(stacked.post("/v1/x", SHAPES[shape](shown), headers).status)

    assert 429 not in statuses[0][:4]
    assert statuses[0][4:] == [429] * 3
    assert not any(429 in others for others in statuses[1:])
    assert all(
        replica.metric("requests_total") > was
        for replica, was in zip(stacked.replicas, before, strict=True)
    )


PATH = "/v1/chat/completions"
LADDER: dict[str, Any] = {
    "similarity": "turns",
    "action": "steer",
    "escalate": {"land": 5, "reject": 6},
    "limit_keys": ["header:x-user-id"],
}
POLICIES = bundle(
    policy("live", {"pathExact": PATH}, **LADDER),
    policy(
        "next",
        {"pathExact": PATH},
        mode="shadow",
        canary_of="live",
        **{**LADDER, "escalate": {"reject": 4}},
    ),
)
STUCK = Did((("read", {"path": "a"}),), ("error: no such file",))
OTHER = Did((("list", {}),), ("a.txt b.txt",))


def run_agent(made: Stack, task: str, *, heeds: bool) -> int:
    """The last status of up to six requests of an agent, which may change course on a note."""
    turns: list[Did] = []
    for number in range(1, 7):
        noted = heeds and bool(turns) and OPENING.encode() in made.upstream.seen[-1].body
        turns.append(
            (OTHER if noted else STUCK)._replace(thought=f"{task} {number}", number=number)
        )
        value = as_chat(turns)
        value["messages"][1]["content"] = task
        answer = made.post(PATH, value, {"x-user-id": task})
        if answer.status != 200 or noted:
            break
    return answer.status


def test_reaction_to_notes_is_reported_across_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    """Metrics, `/loops`, the page and the canary's status have the same numbers."""
    with (
        server() as valkey,
        stack(POLICIES, "--store", f"redis://{valkey.address}", replicas=2) as made,
    ):
        statuses = [run_agent(made, f"task {number}", heeds=number < 3) for number in range(5)]

        def count(policy: str, after: str, arm: str) -> float:
            return made.total(
                "after_notes_total", policy=policy, after=after, arm=arm, cause="same_error"
            )

        assert statuses == [200] * 3 + [429] * 2
        assert [count("live", after, "noted") for after in AFTER] == [5, 2, 3, 2, 0]
        assert [count("next", after, "not_noted") for after in AFTER] == [5, 0, 3, 0, 2]
        same = {"detector": "default", "cause": "same_error", "open": 0, "ended": 0}
        rows = [
            {
                "policy": "live",
                "mode": "enforce",
                "arm": "noted",
                **same,
                **dict(zip(AFTER, (5, 2, 3, 2, 0), strict=True)),
            },
            {
                "policy": "next",
                "mode": "shadow",
                "arm": "not_noted",
                **same,
                **dict(zip(AFTER, (5, 0, 3, 0, 2), strict=True)),
            },
        ]
        eventually(
            lambda: made.replicas[0].ask("/loops")["after_notes"] == rows, "what both have seen"
        )
        assert "After the first note" in made.replicas[1].get("/")[1]

        said = (
            "live: steered 5: 3 turned round, 2 landed\n",
            "candidate: not steered 5: 3 turned round, 2 refused\n",
        )

        def shows_status() -> bool:
            out = Run(capsys, "canary", "status", "--admin", made.replicas[1].admin_url).out
            return all(line in out for line in said)

        eventually(shows_status, "the canary's status")


REPEATED = 22  # the preset delays the fifth request, and refuses the twentieth

BEGINS = {"model": "m", "messages": [{"role": "user", "content": "Tell me when it is done."}]}
GOES_ON = as_chat([Did((("check", {}),), ("pending",))])


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[Stack, Model]]:
    with open_before_model(
        json.loads(Path(find_preset("agents")).read_text()), replicas=2
    ) as opened:
        yield opened


@pytest.mark.parametrize(
    ("body", "failure"),
    [(BEGINS, whole(error={})._replace(status=529)), (GOES_ON, HUNG_UP)],
    ids=["5xx", "cut off"],
)
def test_retries_in_an_outage_are_no_loop(
    made: tuple[Stack, Model], body: dict[str, Any], failure: Reply
) -> None:
    """Each is taken back once Envoy has logged it.

    When the upstream is back, repetitions are a loop.
    """
    one, model = made
    caller = {"authorization": f"Bearer {failure.status}-{len(body['messages'])}"}
    send = partial(one.post, "/v1/chat/completions", body, caller)
    count = partial(one.total, "access_log_entries_total", result="taken")
    if body is GOES_ON:  # the first request: equal ones of an unknown conversation are no turns
        one.post("/v1/chat/completions", GOES_ON | {"messages": body["messages"][:2]}, caller)
    loops, logged = one.total("loops_detected_total"), count()
    model.reply = failure
    for number in range(REPEATED):
        with suppress(IncompleteRead):
            assert send().status not in (400, 429)
        if number:  # the first of a window stays
            eventually(lambda: count() >= logged + number, "an entry")  # noqa: B023
    assert one.total("loops_detected_total") == loops

    model.reply = whole(object="chat.completion", choices=[])
    eventually(lambda: send() and one.total("loops_detected_total") > loops, "a loop")
