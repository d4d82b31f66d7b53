"""What `validate` says about shares of few callers and canaries of no policy, and what the presets compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from extproc.engine.engine import Engine
from extproc.engine.ramp import Ramp, tell_share
from extproc.policy.loader import load
from extproc.request.http import HttpRequest, compile_descriptors
from tests.support.command import Run, written
from tests.support.documents import bundle, policy
from tests.support.engine import ANY, NOW

KEYS = ["header:x-user-id"]


def share(**more: Any) -> list[dict[str, Any]]:  # noqa: ANN401  # fields of a policy
    """A policy."""
    return [policy("p", ANY, limit_keys=KEYS, **more)]


def canary(prefix: str, **more: Any) -> list[dict[str, Any]]:  # noqa: ANN401  # as above
    """A shadow policy beside two that enforce."""
    live = [policy(name, {"pathPrefix": path}, limit_keys=KEYS) for name, path in (("live", "/v1"), ("other", "/v2"))]
    return [*live, policy("new", {"pathPrefix": prefix}, mode="shadow", limit_keys=KEYS, **more)]


WHOLE = "/policies/0/spec/enforce_percent: a hash chooses whole callers: of 3 callers, it acts on none in {} of all cases"
ALONE = '2.json) is in shadow mode, and `loopguard canary` compares it with no policy: "canary_of": "live" would'


@pytest.mark.parametrize(
    ("policies", "said", "hint"),
    [
        (share(enforce_percent=5), WHOLE.format("86%"), "`loopguard doctor` says on how many it acts"),
        (share(enforce_percent=50), WHOLE.format("12%"), "`loopguard doctor` says on how many it acts"),
        (share(enforce_percent=100), "", "whole callers"),
        (share(), "", "whole callers"),
        (canary("/v1/chat"), ALONE, "compares it with no policy"),
        (canary("/v1/chat", canary_of="live"), "", "compares it with no policy"),
        (canary("/v3"), "", "compares it with no policy"),
    ],
)
def test_validate_notes_shares_and_canaries_of_none(
    policies: list[dict[str, Any]], said: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The policies are good, but may act on no caller, or be compared with no policy."""
    for number, each in enumerate(policies):
        written(tmp_path / f"{number}.json", bundle(each))

    run = Run(capsys, "validate", str(tmp_path))

    assert (run.code, hint in run.err) == (0, bool(said))
    assert said in run.err


def test_preset_canary_beside_the_default_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `loopguard init` prints both."""
    for preset in ("agents", "canary"):
        written(tmp_path / f"{preset}.json", Run(capsys, "init", "--preset", preset).out.encode())

    engine = Engine(load([str(tmp_path)], NOW), NOW)

    assert [(pairing.live, pairing.candidate, pairing.percent) for pairing in engine.pairings] == [("agents", "canary", 0)]


@pytest.mark.parametrize(
    ("users", "inside", "outside"),
    [([str(number) for number in range(5_000)] * 2, 1_000, 1_000), (["ann"] * 9 + [None], 1, 0)],
    ids=["many", "one, and one without a name"],
)
def test_callers_of_a_share_are_remembered_up_to_a_bound(users: list[str | None], inside: int, outside: int) -> None:
    """Each once; what is beyond is neither inside nor outside."""
    ramp = Ramp(50, compile_descriptors(KEYS), "p")
    for user in users:
        ramp.find_place(HttpRequest("GET", "/", "", {} if user is None else {"x-user-id": user.encode()}))

    assert sorted((len(ramp.inside), len(ramp.outside))) == sorted((inside, outside))


def test_share_is_told_in_words() -> None:
    """Nothing is said to be wrong before a caller was seen."""
    assert [tell_share(5, *seen) for seen in ((0, 0), (0, 1), (2, 7))] == [
        "enforce_percent 5 acts on 0 of 0 callers",
        "enforce_percent 5 acts on 0 of 1 caller, so it enforces nothing yet",
        "enforce_percent 5 acts on 2 of 7 callers",
    ]
