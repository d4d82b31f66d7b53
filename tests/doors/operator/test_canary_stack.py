"""Canaries end to end: traffic through the real Envoy, replicas on one Valkey, and the command that says what came of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from extproc.cli.main import main
from tests.support.command import Run
from tests.support.documents import bundle, policy
from tests.support.harness import Loopguard, Stack, eventually, stack
from tests.support.servers import server

USER: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}
DOCUMENT = bundle(
    policy("live", {"pathPrefix": "/v1"}, threshold_identical_requests=4, **USER),
    policy("strict", {"pathPrefix": "/v1"}, mode="shadow", threshold_identical_requests=2, **USER),
    policy("quiet", {"pathPrefix": "/v1"}, mode="shadow", threshold_identical_requests=5, canary_of="live", **USER),
)


def url_of(guard: Loopguard) -> str:
    """Where a guard's admin port is asked."""
    return guard.admin_url


@pytest.fixture(scope="module")
def one() -> Iterator[Stack]:
    """One guard that has seen a loop of ann's and a hundred requests of others."""
    with stack(DOCUMENT) as made:
        for _ in range(5):
            made.send("/v1/chat?key=SECRET", headers={"x-user-id": "ann", "x-session-id": "s-1"})
        for number in range(100):
            made.send("/v1/chat", headers={"x-user-id": f"user-{number}"})
        yield made


def read_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, dict[str, Any]]:
    """The exit code and the canaries of `canary status --json`, by policy."""
    run = Run(capsys, "canary", "status", "--json", *arguments)
    return run.code, {canary["policy"]: canary for canary in json.loads(run.out)["canaries"]}


def test_the_verdict_about_traffic_through_envoy(one: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """The command counts what Envoy's clients have sent: one canary would refuse two requests more, the other one fewer."""
    code, canaries = read_json(capsys, "--admin", url_of(one.loopguard), "--min-requests", "100")

    assert code == 4
    assert {name: canary["verdict"] for name, canary in canaries.items()} == {"strict": "too_strict", "quiet": "keep_watching"}
    assert canaries["strict"]["requests"] | {"uncompared": 0} == {
        "compared": 105, "both": 2, "only_live": 0, "only_candidate": 2, "neither": 101,
        "refused": 2, "went_on": 103, "uncompared": 0,
    }  # fmt: skip
    assert canaries["strict"]["new"] == {"loops": 1, "tenants": 1, "sessions": 1, "of_tenants": 101, "exact": True}
    assert canaries["quiet"]["refusals"] == {"new": 0, "already": 1, "missed": 1}
    (entry,) = canaries["strict"]["disagreements"]
    assert (entry["about"], entry["method"], entry["path"], entry["count"]) == ("new", "GET", "/v1/chat", 2)


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
def test_the_exit_code_is_the_worst_verdict(
    one: Stack, capsys: pytest.CaptureFixture[str], flags: list[str], code: int
) -> None:
    """0 is safe, 3 keep watching, 4 too strict: of several canaries the worst counts."""
    assert Run(capsys, "canary", "status", "--admin", url_of(one.loopguard), *flags).code == code


def test_the_table_for_people(one: Stack, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """People read the verdict, its reason, who would be newly refused, each count with its bounds, and examples."""
    monkeypatch.setenv("COLUMNS", "120")
    out = Run(capsys, "canary", "status", "--admin", url_of(one.loopguard), "--policy", "strict").out

    assert "strict, canary of live: 1 new loop: keep watching" in out
    assert "compared 103 of the 1000 requests that a verdict needs" in out
    assert "new: loops 1, tenants 1 of 101, sessions 1" in out
    assert re.search(r"refusals: new +2 +1\.942% +0\.534% and 6\.805%", out)
    assert re.search(r"new +2 +GET +/v1/chat +[0-9a-f]{16} +default", out)
    assert "SECRET" not in out


def test_a_policy_that_is_no_canary_is_told_the_canaries(one: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """Such as the live one that they are compared with."""
    run = Run(capsys, "canary", "status", "--admin", url_of(one.loopguard), "--policy", "live")

    compared = "no shadow policy live is compared with an enforcing one; compared are: quiet, strict"
    assert (run.code, run.complaint) == (1, f"loopguard: {compared}")


def test_the_admin_port_says_the_same(one: Stack) -> None:
    """/canary has the report under the default rules, /metrics the counts."""
    status, text = one.loopguard.get("/canary")

    canary = json.loads(text)["canaries"][0]
    assert (status, canary["policy"], canary["verdict"]) == (200, "strict", "keep_watching")
    assert one.loopguard.metric("canary_refusals_total", policy="strict", canary_of="live", refusal="extra") == 2


def test_the_same_replica_is_counted_once(one: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """A guard that is named twice is one replica."""
    _, canaries = read_json(capsys, "--admin", url_of(one.loopguard), "--admin", url_of(one.loopguard))

    assert (canaries["strict"]["replicas"], canaries["strict"]["requests"]["compared"]) == (1, 105)


@pytest.mark.parametrize("transport", ["fast", "grpcio"])
def test_replicas_on_one_store_know_each_other(transport: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On a Valkey any replica tells what all have counted, and what one has counted outlives it."""
    with (
        server() as valkey,
        stack(DOCUMENT, "--store", f"redis://{valkey.address}", "--transport", transport, replicas=2) as made,
    ):
        for number in range(40):
            made.send("/v1/chat", headers={"x-user-id": f"user-{number % 8}"})
        first, second = made.replicas
        alone = [guard.metric("canary_requests_total", policy="strict") for guard in made.replicas]

        def compared() -> list[int]:
            both = [read_json(capsys, "--admin", url_of(guard))[1]["strict"] for guard in made.replicas]
            return [canary["requests"]["compared"] for canary in both]

        assert sum(alone) == 40
        assert min(alone) > 0
        eventually(lambda: compared() == [40, 40], "both replicas to know of all requests")

        second.stop()
        _, canaries = read_json(capsys, "--admin", url_of(first))
        assert (canaries["strict"]["replicas"], canaries["strict"]["requests"]["compared"]) == (2, 40)
        assert canaries["strict"]["new"]["tenants"] == 8


def test_replicas_without_a_common_store_are_summed_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Where each counts in its own memory, the command adds up those that it is told of."""
    with stack(DOCUMENT, replicas=2) as made:
        for number in range(30):
            made.send("/v1/chat", headers={"x-user-id": f"user-{number}"})
        flags = [flag for guard in made.replicas for flag in ("--admin", url_of(guard))]

        _, canaries = read_json(capsys, *flags)

        assert (canaries["strict"]["replicas"], canaries["strict"]["requests"]["compared"]) == (2, 30)


def test_a_changed_candidate_is_compared_anew() -> None:
    """A reload that changes the candidate starts its counts at 0, one that changes another policy keeps them."""
    with stack(DOCUMENT) as made:
        made.send("/v1/chat", headers={"x-user-id": "ann"})
        made.write_policies(policy("more", {"pathPrefix": "/more"}), "more.json")
        eventually(lambda: "more" in made.loopguard.get("/policies")[1], "the reload")
        kept = made.loopguard.metric("canary_requests_total", policy="strict")
        changed = json.loads(
            json.dumps(DOCUMENT).replace('"threshold_identical_requests": 2', '"threshold_identical_requests": 3')
        )
        made.write_policies(changed)

        eventually(lambda: made.loopguard.metric("canary_requests_total", policy="strict") == 0, "the reload")
        assert kept == 1
        assert made.loopguard.metric("canary_requests_total", policy="quiet") == 1


# --- What goes wrong


def test_names_with_terminal_commands_are_shown_as_text(
    one: Stack, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Escape sequences and markup in a path are printed as what they are."""
    monkeypatch.setenv("COLUMNS", "200")
    for _ in range(2):
        one.send("/v1/[bold]%1B[31m:smile:", headers={"x-user-id": "eve"})

    main(["canary", "status", "--admin", url_of(one.loopguard), "--policy", "strict"])
    out = capsys.readouterr().out

    assert "/v1/[bold]%1B[31m:smile:" in out
    assert "\x1b" not in out
