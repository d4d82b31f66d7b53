"""How Loopguard tells callers apart, through the real Envoy: verified claims, trusted addresses, named routes."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import bundle, policy
from tests.support.harness import Stack, envoy_version, eventually, stack

_KEY = b"a key that only this test knows, and long enough for HS256"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _token(key: bytes, **claims: Any) -> dict[str, str]:  # noqa: ANN401  # whatever a claim holds
    """An authorization header with a signed JWT."""
    payload = {"iss": "https://idp.example.com/", "aud": "llm-gateway", "exp": 4_000_000_000, **claims}
    parts = [_base64(json.dumps(part).encode()) for part in ({"alg": "HS256", "kid": "k"}, payload)]
    signature = hmac.new(key, ".".join(parts).encode(), hashlib.sha256).digest()
    return {"authorization": f"Bearer {'.'.join([*parts, _base64(signature)])}"}


def _with_jwt_authn(jwks: Path) -> Callable[[str], str]:
    """Envoy's jwt_authn filter as the bootstrap's own comment has it, with a key of ours."""
    jwks.write_text(json.dumps({"keys": [{"kty": "oct", "alg": "HS256", "kid": "k", "k": _base64(_KEY)}]}))

    def edit(config: str) -> str:
        start = config.index("# - name: envoy.filters.http.jwt_authn")
        end = config.index("- name: envoy.filters.http.ext_proc")
        filled = config[start:end].replace("/etc/envoy/jwks.json", str(jwks))
        return config[:start] + re.sub(r"^( *)# ", r"\1", filled, flags=re.MULTILINE).removeprefix("# ") + config[end:]

    return edit


def _statuses(made: Stack, headers: dict[str, str], times: int = 3, path: str = "/") -> list[int]:
    return [made.send(path, headers=headers).status for _ in range(times)]


def test_claims_that_envoy_verified_tell_tenants_apart(tmp_path: Path) -> None:
    """Each org has its own count, whatever token of its it shows; a token with a forged signature never gets this far."""
    document = bundle(policy("p", {"pathPrefix": "/"}, limit_keys=["jwt:org_id", "jwt:level"]))
    with stack(document, edit=_with_jwt_authn(tmp_path / "jwks.json")) as made:
        ann = _statuses(made, _token(_KEY, org_id="org-a", level=7, jti="1"), 2)
        bob = _statuses(made, _token(_KEY, org_id="org-b", level=7))
        forged = _statuses(made, _token(b"another key", org_id="org-a", level=7))
        ann += _statuses(made, _token(_KEY, org_id="org-a", level=7, jti="2"), 1)

        assert bob == [200, 200, 429]
        assert ann == [200, 200, 429]
        assert forged == [401] * 3


def test_a_forged_forwarding_header_is_no_other_address() -> None:
    """`ip:address` is the peer that Envoy trusts: a client that makes up X-Forwarded-For keeps its one count."""
    with stack(bundle(policy("p", {"pathPrefix": "/"}, limit_keys=["ip:address"]))) as made:
        statuses = [made.send("/", headers={"x-forwarded-for": f"203.0.113.{number}"}).status for number in range(4)]

        assert statuses == [200, 200, 429, 429]


def test_a_policy_can_name_a_route() -> None:
    """A selector with `routes` sees the requests of that Envoy route alone."""
    document = bundle(
        policy("llm", {"pathPrefix": "/v1/", "routes": ["llm"]}, threshold_identical_requests=2),
        policy("elsewhere", {"pathPrefix": "/v2/"}, threshold_identical_requests=1_000),
    )
    with stack(document) as made:
        assert _statuses(made, {}, path="/v1/x") == [200, 429, 429]
        assert _statuses(made, {}, path="/v2/x") == [200, 200, 200]
        assert made.envoy.logged("/v1/x", status=429)["route"] == "llm"


def test_headers_and_query_parameters_tell_callers_apart(shared: Stack, user: dict[str, str]) -> None:
    """A header in any case is the same descriptor; another value is another count."""
    for _ in range(2):
        assert shared.send("/reject/case", headers=user).status == 200

    assert shared.send("/reject/case", headers={"X-USER-ID": user["x-user-id"]}).status == 429
    assert shared.send("/reject/case", headers={"x-user-id": user["x-user-id"].upper()}).status == 200


def _with_spec(made: dict[str, Any], **spec: object) -> dict[str, Any]:
    made["spec"] |= spec
    return made


BODY_KEYS = bundle(
    policy("model", {"pathPrefix": "/model"}, limit_keys=["body:/model", "header:model"], body="ignore"),
    policy("session", {"pathPrefix": "/session"}, limit_keys=["body:/metadata/session_id"], missing_descriptor="share"),
    policy("one", {"pathPrefix": "/one"}, limit_keys=["body:/user", "header:x-user-id"], body="ignore"),
    policy("skip", {"pathPrefix": "/skip"}, limit_keys=["body:/users/0/na~1me"], missing_descriptor="skip", body="ignore"),
    policy("small", {"pathPrefix": "/small"}, limit_keys=["body:/user"], body="ignore", max_inspect_bytes=1_000),
    _with_spec(
        policy("bypass", {"pathPrefix": "/bypass"}, threshold_identical_requests=2),
        bypass=[{"header": "X-Health-Check"}, {"pathPrefix": "/bypass/jobs/", "methods": ["GET"]}],
    ),
)


@pytest.fixture(scope="module")
def by_body() -> Iterator[Stack]:
    """A stack whose policies read callers from the body, or do not count some requests."""
    if envoy_version() < (1, 38):
        pytest.skip("tolerant mode needs Envoy 1.38")
    with stack(BODY_KEYS, body_mode="tolerant", buffer_limit=65_535) as made:
        yield made


def _posted(made: Stack, path: str, body: object, **headers: str) -> int:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return made.send(path, method="POST", body=data, headers=headers).status


def test_a_member_of_the_body_tells_callers_apart(by_body: Stack) -> None:
    """Envoy hands the body over although the policy ignores it otherwise; a header of the same name is another descriptor."""
    bodies = [{"model": model, "n": number} for number in range(3) for model in ("a|b=c&d%", "b")]

    statuses = [_posted(by_body, "/model", each) for each in bodies]
    other = _posted(by_body, "/model", bodies[0], model="x")

    assert statuses == [200, 200, 200, 200, 429, 429]
    assert other == 200


def test_callers_named_nowhere_are_not_taken_for_one(by_body: Stack) -> None:
    """By default a request with none of its policy's descriptors is not counted; each lack of one is, by its key."""
    anonymous = [_posted(by_body, "/one", {"n": number % 2}) for number in range(8)]
    by_header = [_posted(by_body, "/one", {"n": 1}, **{"x-user-id": "ann"}) for _ in range(3)]
    by_member = [_posted(by_body, "/one", {"user": "ann"}) for _ in range(3)]

    assert (anonymous, by_header, by_member) == ([200] * 8, [200, 200, 429], [200, 200, 429])
    eventually(lambda: by_body.loopguard.metric("uncounted_total", policy="one", reason="missing_descriptor") == 8)
    assert by_body.loopguard.metric("missing_descriptor_total", policy="one", key="body:/user") == 11
    assert by_body.loopguard.metric("missing_descriptor_total", policy="one", key="header:x-user-id") == 11
    assert by_body.loopguard.output().count("requests have no header:x-user-id: do clients send it") == 1


def test_callers_named_nowhere_share_a_count_or_are_not_counted(by_body: Stack) -> None:
    """With `share` a body without the member, with null in it or without JSON is one caller's; with `skip` it has no count."""
    shared = [_posted(by_body, "/session", {"metadata": {"session_id": None}}) for _ in range(3)]
    named = _posted(by_body, "/session", {"metadata": {"session_id": 7}})
    nameless: list[object] = [b"not JSON", {"users": []}, {"users": [{"na/me": {}}]}, b""]
    skipped = [_posted(by_body, "/skip", each) for each in nameless * 2]
    counted = [_posted(by_body, "/skip", {"users": [{"na/me": True}], "n": number}) for number in range(3)]

    assert (shared, named) == ([200, 200, 429], 200)
    assert (skipped, counted) == ([200] * 8, [200, 200, 429])
    eventually(lambda: by_body.loopguard.metric("uncounted_total", policy="skip", reason="missing_descriptor") == 8)


def test_an_unreadable_caller_is_not_taken_for_another(by_body: Stack) -> None:
    """A body past `max_inspect_bytes`, and one past Envoy's buffer, is let through uncounted."""
    padded = [{"user": "ann", "padding": "x" * size} for size in (2_000, 2_000_000)]

    statuses = [_posted(by_body, "/small", each) for each in padded for _ in range(4)]

    assert statuses == [200] * 8
    # Some bodies past Envoy's limit still arrive whole: it stops reading only above it.
    eventually(lambda: by_body.loopguard.metric("uncounted_total", policy="small") == 8)
    assert by_body.loopguard.metric("uncounted_total", policy="small", reason="inspect_limit") >= 4
    assert by_body.loopguard.metric("uncounted_total", policy="small", reason="body_truncated") >= 1


def test_bypassed_requests_are_never_counted(by_body: Stack) -> None:
    """By a header in any case, or by path and method; what has only half of an entry is counted."""
    health = [by_body.send("/bypass", headers={"x-HEALTH-check": ""}).status for _ in range(4)]
    polls = [by_body.send("/bypass/jobs/1").status for _ in range(4)]
    posts = [_posted(by_body, "/bypass/jobs/1", {}) for _ in range(2)]
    others = [by_body.send("/bypass").status for _ in range(2)]

    assert (health, polls) == ([200] * 4, [200] * 4)
    assert (posts, others) == ([200, 429], [200, 429])
    assert by_body.loopguard.metric("uncounted_total", policy="bypass", reason="bypass") == 8


def test_a_bypassed_upload_reaches_the_upstream_as_it_comes(by_body: Stack) -> None:
    """A bypassed request is answered at its headers: a body far above what is inspected arrives whole."""
    body = b"x" * 1_000_000

    answer = by_body.send("/bypass", method="POST", body=body, headers={"x-health-check": "1"})

    assert answer.status == 200
    assert by_body.upstream.seen[-1].body == body
