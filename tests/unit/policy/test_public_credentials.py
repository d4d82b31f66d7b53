"""What `validate` says about callers that only an AWS access key id tells apart, and about the order of `first_of`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from extproc.policy.loader import PolicySet
from extproc.policy.presets import find_preset
from tests.support.budget_policies import bucket, limited
from tests.support.bundles import check
from tests.support.documents import bundle, policy

ANYONE = {"first_of": ["credential", "header:x-user-id"], "name": "caller"}
VERIFIED = {"first_of": ["jwt:sub", "credential"], "name": "caller"}


def warned(found: PolicySet) -> list[str]:
    """Where a stranger can act as a caller."""
    return [warning.pointer for warning in found.warnings if "AWS access key id, which is no secret" in warning.message]


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
def test_strangers_can_show_a_public_id(selector: dict[str, Any], keys: list[Any], expected: bool) -> None:  # of a table
    """Only where AWS's API can be called, and nothing verified is beside the credential."""
    assert bool(warned(check(bundle(policy("p", selector, limit_keys=keys))))) is expected


def test_rules_and_the_circuit_breaker_are_judged_by_their_own_keys() -> None:
    """A rule has callers of its own; the breaker has those of the first key alone."""
    breaker = {"enabled": True, "spend_rate_threshold_per_minute": 3, "auto_reset_after_minutes": 5}
    safe, open_ = bucket(name="safe", keys=[VERIFIED]), bucket(name="open", keys=["credential"])

    both = bucket(name="both", keys=["credential", "jwt:sub"])
    found = check(bundle(limited(safe, open_), limited(both, identity="q", circuit_breaker=breaker)))

    assert warned(found) == ["/policies/0/spec/rules/1/limit_keys", "/policies/1/spec/circuit_breaker"]


@pytest.mark.parametrize("name", ["agents", "sessions", "interactive", "agentic", "canary"])
def test_presets_ask_for_what_is_verified_first(name: str) -> None:
    """So nothing has to be said about them."""
    assert warned(check(json.loads(Path(find_preset(name)).read_text()))) == []


def test_a_note_says_that_claims_are_tried_first() -> None:
    """The order in the file is not the one that applies."""
    swapped = {"first_of": ["credential", "jwt:sub"], "name": "caller"}

    found, same = [check(bundle(policy("p", {"pathPrefix": "/v1/"}, limit_keys=[key]))) for key in (swapped, VERIFIED)]

    assert any("so the order of caller is jwt:sub, credential" in note.message for note in found.notes)
    assert not any("order of caller" in note.message for note in same.notes)
