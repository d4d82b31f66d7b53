"""What `validate` says about shares of few callers and canaries of no policy, and what the presets compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.main import main
from extproc.engine.engine import Engine
from extproc.engine.ramp import Ramp, tell_share
from extproc.policy.loader import load
from extproc.request.http import HttpRequest, compile_descriptors
from tests.support.documents import bundle, policy
from tests.support.engine import NOW

KEYS = ["header:x-user-id"]


def validate(folder: Path, capsys: pytest.CaptureFixture[str], *policies: dict[str, Any]) -> tuple[int, str]:
    """The exit code, and what is printed on stderr."""
    for number, each in enumerate(policies):
        (folder / f"{number}.json").write_text(json.dumps(bundle(each)))
    capsys.readouterr()
    return main(["validate", str(folder)]), capsys.readouterr().err


@pytest.mark.parametrize(("percent", "said"), [(5, "on none in 86% of all cases"), (50, "on none in 12% of all cases")])
def test_validate_says_that_a_share_may_be_no_caller(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], percent: int, said: str
) -> None:
    """It is a note: the policy is good."""
    code, notes = validate(tmp_path, capsys, policy("p", {"pathPrefix": "/"}, enforce_percent=percent, limit_keys=KEYS))

    assert code == 0
    assert f"/policies/0/spec/enforce_percent: a hash chooses whole callers: of 3 callers, it acts {said}" in notes
    assert "`loopguard doctor` says on how many it acts" in notes


@pytest.mark.parametrize("more", [{"enforce_percent": 100}, {}])
def test_validate_says_nothing_of_all_callers(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: dict[str, Any]) -> None:
    """A policy that acts on all of them acts on some."""
    assert "whole callers" not in validate(tmp_path, capsys, policy("p", {"pathPrefix": "/"}, limit_keys=KEYS, **more))[1]


def test_validate_names_a_shadow_policy_that_is_compared_with_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If it meets the requests of an enforcing one, it says what would compare them."""
    live = policy("live", {"pathPrefix": "/v1"}, limit_keys=KEYS)
    other = policy("other", {"pathPrefix": "/v2"}, limit_keys=KEYS)
    shadow = policy("new", {"pathPrefix": "/v1/chat"}, mode="shadow", limit_keys=KEYS)

    notes = validate(tmp_path, capsys, live, other, shadow)[1]

    assert '2.json) is in shadow mode, and `loopguard canary` compares it with no policy: "canary_of": "live" would' in notes
    named = policy("new", {"pathPrefix": "/v1/chat"}, mode="shadow", canary_of="live", limit_keys=KEYS)
    assert "compares it with no policy" not in validate(tmp_path, capsys, live, other, named)[1]
    apart = policy("new", {"pathPrefix": "/v3"}, mode="shadow", limit_keys=KEYS)
    assert "compares it with no policy" not in validate(tmp_path, capsys, live, other, apart)[1]


def test_preset_canary_beside_the_default_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `loopguard init` prints both."""
    for preset in ("agents", "canary"):
        assert main(["init", "--preset", preset]) == 0
        (tmp_path / f"{preset}.json").write_text(capsys.readouterr().out)

    engine = Engine(load([str(tmp_path)], NOW), NOW)

    assert [(pairing.live, pairing.candidate, pairing.percent) for pairing in engine.pairings] == [("agents", "canary", 0)]
    assert main(["validate", "--strict", str(tmp_path / "canary.json")]) == 0


def test_callers_of_a_share_are_remembered_up_to_a_bound() -> None:
    """Each once; what is beyond is neither inside nor outside."""
    ramp = Ramp(50, compile_descriptors(KEYS), "p")
    for number in range(5_000):
        for _ in range(2):
            ramp.find_place(HttpRequest("GET", "/", "", {"x-user-id": str(number).encode()}))
    few = Ramp(50, compile_descriptors(KEYS), "p")
    for _ in range(9):
        few.find_place(HttpRequest("GET", "/", "", {"x-user-id": b"ann"}))
    few.find_place(HttpRequest("GET", "/", "", {}))

    assert (len(ramp.inside), len(ramp.outside), len(few.inside | few.outside)) == (1_000, 1_000, 1)


def test_share_is_told_in_words() -> None:
    """Nothing is said to be wrong before a caller was seen."""
    assert [tell_share(5, *seen) for seen in ((0, 0), (0, 1), (2, 7))] == [
        "enforce_percent 5 acts on 0 of 0 callers",
        "enforce_percent 5 acts on 0 of 1 caller, so it enforces nothing yet",
        "enforce_percent 5 acts on 2 of 7 callers",
    ]
