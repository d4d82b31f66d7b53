"""Canaries end to end: the real Envoy, replicas on one Valkey, and `loopguard canary status`."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.command import Run, find_missing
from tests.support.documents import bundle, policy
from tests.support.harness import Stack, eventually, stack
from tests.support.servers import server

USER: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}
DOCUMENT = bundle(
    policy("live", {"pathPrefix": "/v1"}, threshold_identical_requests=4, **USER),
    policy("strict", {"pathPrefix": "/v1"}, mode="shadow", threshold_identical_requests=2, **USER),
    policy(
        "quiet",
        {"pathPrefix": "/v1"},
        mode="shadow",
        threshold_identical_requests=5,
        canary_of="live",
        **USER,
    ),
)


# A path that a careless terminal would obey.
ODD = "/v1/[bold]%1B[31m:smile:"


@pytest.fixture(scope="module")
def one() -> Iterator[Stack]:
    """One guard that has seen a loop of ann's and a hundred requests of others."""
    with stack(DOCUMENT) as made:
        for _ in range(5):
            made.send(f"{ODD}?key=SECRET", headers={"x-user-id": "ann", "x-session-id": "s-1"})
        for number in range(100):
            made.send("/v1/chat", headers={"x-user-id": f"user-{number}"})
        yield made


def read_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, dict[str, Any]]:
    run = Run(capsys, "canary", "status", "--json", *arguments)
    return run.code, {canary["policy"]: canary for canary in json.loads(run.out)["canaries"]}


def test_canary_status_counts_traffic_through_envoy(
    one: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    twice = ["--admin", one.loopguard.admin_url] * 2  # one replica
    code, canaries = read_json(capsys, *twice, "--min-requests", "100")

    assert (code, canaries["strict"]["replicas"]) == (4, 1)
    assert {name: canary["verdict"] for name, canary in canaries.items()} == {
        "strict": "too_strict",
        "quiet": "keep_watching",
    }
    assert canaries["strict"]["requests"] | {"uncompared": 0} == {
        "compared": 105, "both": 2, "only_live": 0, "only_candidate": 2, "neither": 101,
        "refused": 2, "went_on": 103, "uncompared": 0,
    }  # fmt: skip
    assert canaries["strict"]["new"] == {
        "loops": 1,
        "tenants": 1,
        "sessions": 1,
        "of_tenants": 101,
        "exact": True,
    }
    assert canaries["quiet"]["refusals"] == {"new": 0, "already": 1, "missed": 1}
    (entry,) = canaries["strict"]["disagreements"]
    assert (entry["about"], entry["method"], entry["path"], entry["count"]) == (
        "new",
        "GET",
        ODD,
        2,
    )
    canary = one.loopguard.ask("/canary")["canaries"][0]
    # Under the default rules
    assert (canary["policy"], canary["verdict"]) == (
        "strict",
        "keep_watching",
    )
    assert (
        one.loopguard.metric(
            "canary_refusals_total", policy="strict", canary_of="live", refusal="extra"
        )
        == 2
    )


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ([], 3),
        (["--min-requests", "100"], 4),
        (["--min-requests", "100", "--policy", "quiet"], 3),
        (["--min-requests", "100", "--policy", "quiet", "--max-new-refusals", "0.05"], 0),
        (["--min-requests", "100", "--max-new-refusals", "0.5"], 0),
        (["--min-requests", "100", "--max-new-refusals", "0.5", "--max-new-tenants", "0"], 4),
    ],
)
def test_exit_code_is_the_worst_verdict(
    one: Stack, capsys: pytest.CaptureFixture[str], flags: list[str], code: int
) -> None:
    assert Run(capsys, "canary", "status", "--admin", one.loopguard.admin_url, *flags).code == code


def test_canary_status_prints_verdict_reasons_and_examples(
    one: Stack, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = Run(
        capsys, "canary", "status", "--admin", one.loopguard.admin_url, "--policy", "strict"
    ).out

    assert (
        find_missing(
            out,
            "strict, canary of live: 1 new loop: keep watching",
            "compared 103 of the 1000 requests that a verdict needs",
            "new: loops 1, tenants 1 of 101, sessions 1",
        )
        == []
    )
    assert re.search(r"refusals: new +2 +1\.942% +0\.534% and 6\.805%", out)
    assert re.search(rf"new +2 +GET +{re.escape(ODD)} +[0-9a-f]{{16}} +default", out)
    assert "SECRET" not in out
    assert "\x1b" not in out
    every = Run(capsys, "canary", "status", "--admin", one.loopguard.admin_url).out
    assert every.count("only the candidate acts") == every.count(", canary of live") == 2


def test_policy_without_canary_lists_the_canaries(
    one: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(capsys, "canary", "status", "--admin", one.loopguard.admin_url, "--policy", "live")

    compared = (
        "no shadow policy live is compared with an enforcing one; compared are: quiet, strict"
    )
    assert (run.code, run.complaint) == (1, f"loopguard: {compared}")


@pytest.mark.parametrize("transport", ["fast", "grpcio"])
def test_replicas_on_one_store_share_canary_counts(
    transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        server() as valkey,
        stack(
            DOCUMENT, "--store", f"redis://{valkey.address}", "--transport", transport, replicas=2
        ) as made,
    ):
        for number in range(40):
            made.send("/v1/chat", headers={"x-user-id": f"user-{number % 8}"})
        first, second = made.replicas
        alone = [guard.metric("canary_requests_total", policy="strict") for guard in made.replicas]

        def compared() -> list[int]:
            both = [
                read_json(capsys, "--admin", guard.admin_url)[1]["strict"]
                for guard in made.replicas
            ]
            return [canary["requests"]["compared"] for canary in both]

        assert sum(alone) == 40
        assert min(alone) > 0
        eventually(lambda: compared() == [40, 40], "both replicas to know of all requests")

        second.stop()
        _, canaries = read_json(capsys, "--admin", first.admin_url)
        assert (canaries["strict"]["replicas"], canaries["strict"]["requests"]["compared"]) == (
            2,
            40,
        )
        assert canaries["strict"]["new"]["tenants"] == 8


def test_command_adds_up_replicas_without_common_store(capsys: pytest.CaptureFixture[str]) -> None:
    with stack(DOCUMENT, replicas=2) as made:
        for number in range(30):
            made.send("/v1/chat", headers={"x-user-id": f"user-{number}"})
        flags = [flag for guard in made.replicas for flag in ("--admin", guard.admin_url)]

        _, canaries = read_json(capsys, *flags)

        assert (canaries["strict"]["replicas"], canaries["strict"]["requests"]["compared"]) == (
            2,
            30,
        )
