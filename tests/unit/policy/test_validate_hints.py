"""What `validate` says about policies that are valid but may not do what is meant."""

import json
from pathlib import Path
from typing import Any

import pytest

from extproc.engine.engine import Engine
from extproc.engine.ramp import Ramp
from extproc.policy.loader import load
from extproc.policy.presets import find_preset
from extproc.request.http import HttpRequest, compile_descriptors
from tests.support.budget_policies import bucket, limited
from tests.support.bundles import check
from tests.support.command import Run, written
from tests.support.documents import bundle, policy
from tests.support.engine import ANY, NOW

ANYONE = {"first_of": ["credential", "header:x-user-id"], "name": "caller"}
VERIFIED = {"first_of": ["jwt:sub", "credential"], "name": "caller"}


@pytest.mark.parametrize(
    ("selector", "keys", "expected"),
    [
        ({"pathPrefix": "/"}, ["credential"], True),
        ({"pathPrefix": "/model"}, ["credential"], True),
        ({"pathPrefix": "/model/anthropic.claude/"}, ["credential"], True),
        ({"pathPrefixes": ["/v1/", "/aws/model/"]}, ["credential"], True),
        ({"pathPrefix": "/bedrock"}, ["credential"], True),
        ({"pathExact": "/model/m/converse"}, ["credential"], True),
        ({"routes": ["models"]}, ["credential"], True),
        ({"apis": "any"}, ["credential"], True),
        ({"apis": ["anthropic", "openai"]}, ["credential"], False),
        ({"pathPrefix": "/"}, ["header:authorization"], True),
        ({"pathPrefix": "/"}, [ANYONE], True),
        ({"pathPrefix": "/"}, [VERIFIED], False),
        ({"pathPrefix": "/"}, ["jwt:sub", "credential"], False),
        ({"pathPrefix": "/"}, ["header:x-api-key"], False),
        ({"pathPrefix": "/v1/"}, ["credential"], False),
        ({"pathExact": "/v1/messages"}, ["credential"], False),
    ],
)
def test_warns_if_a_public_aws_id_identifies_callers(
    selector: dict[str, Any], keys: list[Any], expected: bool
) -> None:
    warnings = [
        each.message for each in check(bundle(policy("p", selector, limit_keys=keys))).warnings
    ]

    assert (
        any("AWS access key id, which is no secret" in message for message in warnings) is expected
    )


BREAKER = {"enabled": True, "spend_rate_threshold_per_minute": 3, "auto_reset_after_minutes": 5}
RULES = limited(bucket(name="safe", keys=[VERIFIED]), bucket(name="open", keys=["credential"]))
OPEN = limited(bucket(name="open", keys=["credential"]), identity="r")
BOTH = limited(
    bucket(name="both", keys=["credential", "jwt:sub"]), identity="q", circuit_breaker=BREAKER
)
PRESETS = [
    json.loads(Path(find_preset(name)).read_text())
    for name in ("agents", "sessions", "interactive", "agentic", "canary")
]


@pytest.mark.parametrize(
    ("document", "places"),
    [
        (
            bundle(RULES, BOTH, OPEN),
            [
                "/policies/0/spec/rules/1/limit_keys",
                "/policies/1/spec/circuit_breaker",
                "/policies/2/spec/rules/0/limit_keys",
            ],
        ),
        *((preset, []) for preset in PRESETS),
    ],
)
def test_warns_about_public_ids_by_keys_of_each_rule(document: object, places: list[str]) -> None:
    assert [
        each.pointer for each in check(document).warnings if "AWS access key id" in each.message
    ] == places


@pytest.mark.parametrize("order", [["credential", "jwt:sub"], ["jwt:sub", "credential"]])
def test_notes_that_verified_claims_are_tried_first(order: list[str]) -> None:
    found = check(
        bundle(
            policy("p", {"pathPrefix": "/v1/"}, limit_keys=[{"first_of": order, "name": "caller"}])
        )
    )

    told = [note.message for note in found.notes if "order of caller" in note.message]
    assert ["so the order of caller is jwt:sub, credential" in each for each in told] == [True] * (
        order[0] == "credential"
    )


KEYS = ["header:x-user-id"]


def canary(prefix: str, **more: Any) -> list[dict[str, Any]]:  # noqa: ANN401  # as above
    """A shadow policy beside two that enforce."""
    live = [
        policy(name, {"pathPrefix": path}, limit_keys=KEYS)
        for name, path in (("live", "/v1"), ("other", "/v2"))
    ]
    return [*live, policy("new", {"pathPrefix": prefix}, mode="shadow", limit_keys=KEYS, **more)]


WHOLE = (
    "/policies/0/spec/enforce_percent: a hash chooses whole callers: of 3 callers, it acts on "
    "none in {} of all cases"
)
ALONE = (
    "2.json) is in shadow mode, and `loopguard canary` compares it with no policy: "
    '"canary_of": "live" would'
)


@pytest.mark.parametrize(
    ("policies", "said", "hint"),
    [
        (
            [policy("p", ANY, limit_keys=KEYS, enforce_percent=5)],
            WHOLE.format("86%"),
            "`loopguard doctor` says on how many it acts",
        ),
        (
            [policy("p", ANY, limit_keys=KEYS, enforce_percent=50)],
            WHOLE.format("12%"),
            "`loopguard doctor` says on how many it acts",
        ),
        ([policy("p", ANY, limit_keys=KEYS, enforce_percent=100)], "", "whole callers"),
        ([policy("p", ANY, limit_keys=KEYS)], "", "whole callers"),
        (canary("/v1/chat"), ALONE, "compares it with no policy"),
        (canary("/v1/chat", canary_of="live"), "", "compares it with no policy"),
        (canary("/v3"), "", "compares it with no policy"),
    ],
)
def test_notes_small_shares_and_canaries_without_a_policy(
    policies: list[dict[str, Any]],
    said: str,
    hint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for number, each in enumerate(policies):
        written(tmp_path / f"{number}.json", bundle(each))

    run = Run(capsys, "validate", str(tmp_path))

    assert (run.code, hint in run.err) == (0, bool(said))
    assert said in run.err


def test_preset_canary_is_paired_with_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for preset in ("agents", "canary"):
        written(tmp_path / f"{preset}.json", Run(capsys, "init", "--preset", preset).out.encode())

    engine = Engine(load([str(tmp_path)], NOW), NOW)

    assert [(pairing.live, pairing.candidate, pairing.percent) for pairing in engine.pairings] == [
        ("agents", "canary", 0)
    ]


@pytest.mark.parametrize(
    ("users", "inside", "outside"),
    [([str(number) for number in range(5_000)] * 2, 1_000, 1_000), (["ann"] * 9 + [None], 1, 0)],
    ids=["many", "one, and one without a name"],
)
def test_remembered_callers_of_a_share_are_bounded(
    users: list[str | None], inside: int, outside: int
) -> None:
    ramp = Ramp(50, compile_descriptors(KEYS), "p")
    for user in users:
        ramp.find_place(
            HttpRequest("GET", "/", "", {} if user is None else {"x-user-id": user.encode()})
        )

    assert sorted((len(ramp.inside), len(ramp.outside))) == sorted((inside, outside))
