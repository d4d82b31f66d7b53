"""Whether notes help, measured on the real Envoy with two replicas: a model that heeds notes, and one that does not."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.operator.after_notes import AFTER
from extproc.request.notes import OPENING
from tests.support.command import Run
from tests.support.documents import bundle, policy
from tests.support.harness import Stack, eventually, stack
from tests.support.servers import server
from tests.support.turn_writers import Did, as_chat

PATH = "/v1/chat/completions"
LADDER: dict[str, Any] = {
    "similarity": "turns", "action": "steer", "escalate": {"land": 5, "reject": 6}, "limit_keys": ["header:x-user-id"],
}  # fmt: skip
POLICIES = bundle(
    policy("live", {"pathExact": PATH}, **LADDER),
    policy("next", {"pathExact": PATH}, mode="shadow", canary_of="live", **{**LADDER, "escalate": {"reject": 4}}),
)
STUCK = Did((("read", {"path": "a"}),), ("error: no such file",))
OTHER = Did((("list", {}),), ("a.txt b.txt",))


def run_agent(made: Stack, task: str, *, heeds: bool) -> int:
    """Six requests at most; its model takes another step once it reads a note, or never."""
    turns: list[Did] = []
    for number in range(1, 7):
        noted = heeds and bool(turns) and OPENING.encode() in made.upstream.seen[-1].body
        turns.append((OTHER if noted else STUCK)._replace(thought=f"{task} {number}", number=number))
        value = as_chat(turns)
        value["messages"][1]["content"] = task
        answer = made.post(PATH, value, {"x-user-id": task})
        if answer.status != 200 or noted:
            break
    return answer.status


def count_as(*counts: int) -> dict[str, int]:
    """Changes with these counts."""
    return dict(zip(AFTER, counts, strict=True))


def test_both_models_are_counted_wherever_their_requests_went(capsys: pytest.CaptureFixture[str]) -> None:
    """Metrics, `/loops`, the page and the canary's status have the same numbers."""
    with server() as valkey, stack(POLICIES, "--store", f"redis://{valkey.address}", replicas=2) as made:
        statuses = [run_agent(made, f"task {number}", heeds=number < 3) for number in range(5)]

        def count(policy: str, after: str, arm: str) -> float:
            return made.total("after_notes_total", policy=policy, after=after, arm=arm, cause="same_error")

        assert statuses == [200] * 3 + [429] * 2
        assert [count("live", after, "noted") for after in AFTER] == [5, 2, 3, 2, 0]
        assert [count("next", after, "not_noted") for after in AFTER] == [5, 0, 3, 0, 2]
        same = {"detector": "default", "cause": "same_error", "open": 0, "ended": 0}
        rows = [
            {"policy": "live", "mode": "enforce", "arm": "noted", **same, **count_as(5, 2, 3, 2, 0)},
            {"policy": "next", "mode": "shadow", "arm": "not_noted", **same, **count_as(5, 0, 3, 0, 2)},
        ]
        eventually(lambda: made.replicas[0].ask("/loops")["after_notes"] == rows, "what both have seen")
        assert "After the first note" in made.replicas[1].get("/")[1]

        said = ("live: steered 5: 3 turned round, 2 landed\n", "candidate: not steered 5: 3 turned round, 2 refused\n")

        def shows_status() -> bool:
            out = Run(capsys, "canary", "status", "--admin", made.replicas[1].admin_url).out
            return all(line in out for line in said)

        eventually(shows_status, "the canary's status")
