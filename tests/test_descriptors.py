"""Whom Loopguard tells apart, through the real Envoy: verified claims, trusted addresses, named routes."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.documents import bundle, policy
from tests.harness import Stack, stack

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
