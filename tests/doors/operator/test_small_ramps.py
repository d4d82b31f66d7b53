"""A share of few callers may be none of them: `canary`, its page and `doctor` say on how many a policy acts."""

from __future__ import annotations

import json

import pytest

from extproc.cli.main import main
from extproc.engine.ramp import Ramp
from extproc.request.http import HttpRequest, compile_descriptors
from tests.support.documents import bundle, policy
from tests.support.harness import Stack, eventually, stack

USER = "x-user-id"
KEYS = [f"header:{USER}"]
PERCENT = 5


def find_users(*, inside: bool, count: int) -> list[str]:
    """Callers that the policy acts on, or only watches."""
    ramp = Ramp(PERCENT, compile_descriptors(KEYS), "strict")
    named = (f"user-{number}" for number in range(10_000))
    found = [
        name for name in named if ramp.covers(ramp.find_place(HttpRequest("GET", "/", "", {USER: name.encode()}))) == inside
    ]
    return found[:count]


def run(capsys: pytest.CaptureFixture[str], made: Stack, *arguments: str) -> tuple[int, str]:
    """The exit code and the output of a command that asks the server."""
    capsys.readouterr()
    code = main([*arguments, "--admin", made.loopguard.admin_url])
    return code, capsys.readouterr().out


def test_policy_that_acts_on_none_of_few_callers_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """Until one is in the share; then the policy acts on some of them, and there is nothing to report."""
    policies = bundle(
        policy("live", {"pathPrefix": "/"}, limit_keys=KEYS),
        policy("strict", {"pathPrefix": "/"}, enforce_percent=PERCENT, canary_of="live", limit_keys=KEYS),
    )
    with stack(policies) as made:
        for user in find_users(inside=False, count=3):
            made.send("/a", headers={USER: user})
        told = eventually(lambda: made.loopguard.ask("/coverage")["findings"], "findings")
        code, doctor = run(capsys, made, "doctor")
        _, canary = run(capsys, made, "canary", "status")
        made.send("/a", headers={USER: find_users(inside=True, count=1)[0]})
        _, later = run(capsys, made, "doctor")
        _, counted = run(capsys, made, "canary", "status", "--json")

    (finding,) = [each for each in told if each["reason"] == "enforces_on_none"]
    assert finding["level"] == "problem"
    assert finding["place"].endswith("/policies/1/spec/enforce_percent")
    assert code == 1
    assert "strict: enforce_percent 5 acts on 0 of 3 callers, so it enforces nothing yet" in doctor
    assert "enforce_percent 5 acts on 0 of 3 callers, so it enforces nothing yet" in canary
    assert "enforce_percent" not in later
    (shown,) = json.loads(counted)["canaries"]
    assert shown["acts_on"] == {"percent": 5, "callers": 1, "of": 4, "text": "enforce_percent 5 acts on 1 of 4 callers"}


def test_share_of_a_policy_that_is_no_canary_is_reported_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    """`canary status` has nothing to compare, and says why the policy does nothing."""
    with stack(bundle(policy("strict", {"pathPrefix": "/"}, enforce_percent=PERCENT, limit_keys=KEYS))) as made:
        for user in find_users(inside=False, count=3):
            made.send("/a", headers={USER: user})
        assert main(["canary", "status", "--admin", made.loopguard.admin_url]) == 1

    assert "; strict: enforce_percent 5 acts on 0 of 3 callers, so it enforces nothing yet\n" in capsys.readouterr().err
