"""A policy that acts on a share of its callers: which callers, and how the share grows."""

import json
from typing import Any

import pytest

from extproc.cli.main import main
from extproc.engine.ramp import Ramp
from extproc.request.http import HttpRequest, compile_descriptors
from tests.support.documents import bundle, policy
from tests.support.harness import Stack, eventually, stack
from tests.support.servers import server

USER = "x-user-id"
KEYS = [f"header:{USER}"]


def ramped(percent: int, **more: Any) -> dict[str, Any]:  # noqa: ANN401  # keys of the policy
    return bundle(
        policy("p", {"pathPrefix": "/"}, enforce_percent=percent, limit_keys=KEYS, **more),
        policy(
            "w",
            {"pathExact": "/warned"},
            action="warn",
            limit_keys=KEYS,
            threshold_identical_requests=2,
        ),
    )


def find_users(lowest: int, highest: int, count: int) -> list[str]:
    """Callers of policy p whose places are within these bounds."""
    ramp = Ramp(1, compile_descriptors(KEYS), "p")
    named = (f"user-{number}" for number in range(10_000))
    found = [
        name
        for name in named
        if lowest <= ramp.find_place(HttpRequest("GET", "/", "", {USER: name.encode()})) <= highest
    ]
    return found[:count]


def send(made: Stack, user: str, path: str, times: int = 3) -> list[int]:
    return [made.send(path, headers={USER: user}).status for _ in range(times)]


def test_replicas_enforce_on_the_same_callers_with_kept_counts() -> None:
    insiders, later, outsiders = find_users(1, 50, 4), find_users(51, 75, 4), find_users(76, 100, 4)
    with (
        server() as valkey,
        stack(
            ramped(50, keep_counts=True), "--store", f"redis://{valkey.address}/0", replicas=2
        ) as made,
    ):
        for user in insiders:
            assert send(made, user, "/a", 5) == [200, 200, 429, 429, 429]
        for user in later + outsiders:
            assert send(made, user, "/a", 5) == [200] * 5
        for mode in ("enforce", "shadow"):
            assert all(
                replica.metric("requests_total", policy="p", mode=mode) for replica in made.replicas
            )

        made.write_policies(ramped(75, keep_counts=True))
        eventually(
            lambda: all(
                replica.metric("policy_enforce_percent", policy="p") == 75
                for replica in made.replicas
            ),
            "the larger share on every replica",
        )

        for user in insiders + later:
            assert send(made, user, "/a", 2) == [429, 429]
        for user in outsiders:
            assert send(made, user, "/a", 2) == [200, 200]


def run(capsys: pytest.CaptureFixture[str], made: Stack, *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    code = main([*arguments, "--admin", made.loopguard.admin_url])
    return code, capsys.readouterr().out


def test_doctor_reports_a_share_without_callers(capsys: pytest.CaptureFixture[str]) -> None:
    policies = bundle(
        policy("live", {"pathPrefix": "/"}, limit_keys=KEYS),
        policy("p", {"pathPrefix": "/"}, enforce_percent=5, canary_of="live", limit_keys=KEYS),
    )
    with stack(policies) as made:
        for user in find_users(6, 100, 3):
            made.send("/a", headers={USER: user})
        told = eventually(lambda: made.loopguard.ask("/coverage")["findings"], "findings")
        code, doctor = run(capsys, made, "doctor")
        _, canary = run(capsys, made, "canary", "status")
        made.send("/a", headers={USER: find_users(1, 5, 1)[0]})
        _, later = run(capsys, made, "doctor")
        _, counted = run(capsys, made, "canary", "status", "--json")

    (finding,) = [each for each in told if each["reason"] == "enforces_on_none"]
    assert finding["level"] == "problem"
    assert finding["place"].endswith("/policies/1/spec/enforce_percent")
    assert code == 1
    assert "p: enforce_percent 5 acts on 0 of 3 callers, so it enforces nothing yet" in doctor
    assert "enforce_percent 5 acts on 0 of 3 callers, so it enforces nothing yet" in canary
    assert "enforce_percent" not in later
    (shown,) = json.loads(counted)["canaries"]
    assert shown["acts_on"] == {
        "percent": 5,
        "callers": 1,
        "of": 4,
        "text": "enforce_percent 5 acts on 1 of 4 callers",
    }
