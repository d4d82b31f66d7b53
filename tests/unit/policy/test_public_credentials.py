"""What `validate` says about callers that only an AWS access key id tells apart, and about the order of `first_of`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from extproc.policy.presets import find_preset
from tests.support.budget_policies import bucket, limited
from tests.support.bundles import check
from tests.support.documents import bundle, policy

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
def test_strangers_can_show_a_public_id(selector: dict[str, Any], keys: list[Any], expected: bool) -> None:
    """Only where AWS's API can be called, and nothing verified is beside the credential."""
    warnings = [each.message for each in check(bundle(policy("p", selector, limit_keys=keys))).warnings]

    assert any("AWS access key id, which is no secret" in message for message in warnings) is expected


BREAKER = {"enabled": True, "spend_rate_threshold_per_minute": 3, "auto_reset_after_minutes": 5}
RULES = limited(bucket(name="safe", keys=[VERIFIED]), bucket(name="open", keys=["credential"]))
OPEN = limited(bucket(name="open", keys=["credential"]), identity="r")
BOTH = limited(bucket(name="both", keys=["credential", "jwt:sub"]), identity="q", circuit_breaker=BREAKER)
PRESETS = [
    json.loads(Path(find_preset(name)).read_text()) for name in ("agents", "sessions", "interactive", "agentic", "canary")
]


@pytest.mark.parametrize(
    ("document", "places"),
    [
        (
            bundle(RULES, BOTH, OPEN),
            ["/policies/0/spec/rules/1/limit_keys", "/policies/1/spec/circuit_breaker", "/policies/2/spec/rules/0/limit_keys"],
        ),
        *((preset, []) for preset in PRESETS),
    ],
)
def test_rules_and_breakers_are_judged_by_their_own_keys(document: object, places: list[str]) -> None:
    """The breaker has the callers of the first key alone; presets ask for what is verified first."""
    assert [each.pointer for each in check(document).warnings if "AWS access key id" in each.message] == places


@pytest.mark.parametrize("order", [["credential", "jwt:sub"], ["jwt:sub", "credential"]])
def test_a_note_says_that_claims_are_tried_first(order: list[str]) -> None:
    """Where the order in the file is not the one that applies."""
    found = check(bundle(policy("p", {"pathPrefix": "/v1/"}, limit_keys=[{"first_of": order, "name": "caller"}])))

    told = [note.message for note in found.notes if "order of caller" in note.message]
    assert ["so the order of caller is jwt:sub, credential" in each for each in told] == [True] * (order[0] == "credential")
