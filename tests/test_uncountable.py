"""What clients do so that a request cannot be counted, through the real Envoy: it is counted all the same, or refused."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

import pytest

from tests.documents import bundle, policy
from tests.harness import Stack, stack

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


@pytest.mark.parametrize(
    ("data", "more"),
    [
        (gzip.compress(PLAIN, mtime=0), {"content-encoding": "gzip"}),
        (DATA.encode("utf-8-sig"), {}),
        (DATA.encode("utf-16"), {}),
    ],
    ids=["gzip", "BOM", "UTF-16"],
)
def test_a_disguise_is_seen_through(strict: Stack, user: dict[str, str], data: bytes, more: dict[str, str]) -> None:
    """Another spelling of the same body is the same body."""
    plain = {"content-type": "application/json", **user}

    statuses = [
        strict.send("/", method="POST", body=body, headers=headers).status
        for body, headers in ((PLAIN, plain), (data, plain | more), (PLAIN, plain), (data, plain | more))
    ]

    assert statuses == [200, 200, 429, 429]


def test_json_that_claims_to_be_grpc_is_counted(strict: Stack, user: dict[str, str]) -> None:
    """A content type alone makes no gRPC request: the third is refused, in gRPC's way, as the client has asked for it."""
    headers = {"content-type": "application/grpc", **user}

    answers = [strict.send("/", method="POST", body=PLAIN, headers=headers) for _ in range(3)]

    assert [answer.headers.get("grpc-status") for answer in answers] == [None, None, "8"]


@pytest.mark.parametrize(
    ("target", "data", "more", "status", "why"),
    [
        ("/", b"not gzip", {"content-encoding": "gzip"}, 415, "content_encoding"),
        ("/", gzip.compress(b" " * 2_000_000, mtime=0), {"content-encoding": "gzip"}, 413, "inspect_limit"),
        ("/", PLAIN + b" " * LIMIT, {}, 413, "inspect_limit"),
        (f"/?{'&' * 10_001}", PLAIN, {}, 400, "target_too_long"),
        ("/", PLAIN, {"x-user-id": ""}, 400, "missing_descriptor"),
    ],
    ids=["not gzip", "bomb", "padding", "query", "nobody"],
)
def test_what_cannot_be_counted_is_refused(
    strict: Stack, user: dict[str, str], target: str, data: bytes, more: dict[str, str], status: int, why: str
) -> None:
    """The first such request does not reach the upstream, and its refusal says what is wrong with it."""
    answer = strict.send(target, method="POST", body=data, headers={"content-type": "application/json", **user, **more})

    assert answer.status == status
    assert answer.headers["x-fairvisor-reason"] == "uncountable"
    assert json.loads(answer.body)["error"]["code"] == why
