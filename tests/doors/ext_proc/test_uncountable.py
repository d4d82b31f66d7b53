"""Requests made so that they cannot be counted, through the real Envoy: they are counted anyway, or refused."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.documents import bundle, policy
from tests.support.harness import Stack, stack

DATA = json.dumps({"messages": [{"role": "user", "content": "Grüße"}]}, ensure_ascii=False)
PLAIN = DATA.encode()
LIMIT = 4096

_STRICT = policy(
    "strict", {"pathPrefix": "/"}, limit_keys=["header:x-user-id"], similarity="canonical", max_inspect_bytes=LIMIT
)
_STRICT["spec"]["uncountable"] = "reject"


@pytest.fixture(scope="module", params=["fast", "grpcio"])
def strict(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """A stack whose policy lets nothing pass that it cannot count."""
    with stack(bundle(_STRICT), "--transport", request.param) as made:
        yield made


HOP_BY_HOP = ["x-user-id", "close, X-User-Id", "keep-alive,x-user-id , te"]


@pytest.mark.parametrize("connection", HOP_BY_HOP)
def test_a_client_that_has_envoy_remove_its_limit_key_is_refused(strict: Stack, user: dict[str, str], connection: str) -> None:
    """A header that `Connection` names is gone before any filter of Envoy's runs: the request counts for no caller."""
    headers = {"content-type": "application/json", "connection": connection, **user}

    answers = [strict.send("/", method="POST", body=PLAIN, headers=headers) for _ in range(2)]

    assert [(answer.status, answer.json()["error"]["code"]) for answer in answers] == [(400, "missing_descriptor")] * 2


def test_what_envoy_sets_cannot_be_removed_by_a_client() -> None:
    """A limit key that Envoy provides stays, whatever `Connection` names: its headers are set after those are removed."""

    def named(config: str) -> str:
        caller = '{key: x-caller, value: "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%"}'
        value = f"{{header: {caller}, append_action: OVERWRITE_IF_EXISTS_OR_ADD}}"
        first = "- remove: x-fairvisor-warning\n"
        assert first in config
        return config.replace(first, f"- append: {value}\n              {first}", 1)

    guarded = bundle(policy("p", {"pathPrefix": "/"}, limit_keys=["header:x-caller", "header:x-user-id"]))
    with stack(guarded, edit=named) as made:
        headers = {"connection": "x-caller, x-user-id", "x-caller": "mine", "x-user-id": "ann"}
        statuses = [made.send("/", headers=headers).status for _ in range(3)]
        seen = made.upstream.seen[-1]

    assert statuses == [200, 200, 429]
    assert seen.header("x-user-id") is None
    assert seen.header("x-caller") not in (None, "mine")
