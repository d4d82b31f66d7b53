"""How Loopguard tells callers apart, through the real Envoy: claims, addresses, routes, bodies and several credentials."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from tests.support.documents import bundle, policy
from tests.support.harness import envoy_version, stack
from tests.support.tokens import KEY, sign


def _with_jwt_authn(jwks: Path) -> Callable[[str], str]:
    """Envoy's jwt_authn filter as the bootstrap's own comment has it, with a key of ours."""
    jwks.write_text(json.dumps({"keys": [KEY]}))

    def edit(config: str) -> str:
        start = config.index("# - name: envoy.filters.http.jwt_authn")
        end = config.index("- name: envoy.filters.http.ext_proc")
        filled = config[start:end].replace("/etc/envoy/jwks.json", str(jwks))
        return config[:start] + re.sub(r"^( *)# ", r"\1", filled, flags=re.MULTILINE).removeprefix("# ") + config[end:]

    return edit


def test_claims_that_envoy_verified_tell_tenants_apart(tmp_path: Path) -> None:
    """Each org has its own count, whatever token of its it shows; a token with a forged signature never gets this far."""
    document = bundle(policy("p", {"pathPrefix": "/"}, limit_keys=["jwt:org_id", "jwt:level"]))
    token = partial(sign, iss="https://idp.example.com/", aud="llm-gateway")
    with stack(document, edit=_with_jwt_authn(tmp_path / "jwks.json")) as made:
        ann = made.repeat("/", 2, headers=token(org_id="org-a", level=7, jti="1"))
        bob = made.repeat("/", 3, headers=token(org_id="org-b", level=7))
        forged = made.repeat("/", 3, headers=token(b"another key", org_id="org-a", level=7))
        ann += made.repeat("/", 1, headers=token(org_id="org-a", level=7, jti="2"))

        assert ann == bob == [200, 200, 429]
        assert forged == [401] * 3


def test_a_forged_forwarding_header_is_no_other_address() -> None:
    """`ip:address` is the peer that Envoy trusts: a client that makes up X-Forwarded-For keeps its one count."""
    with stack(bundle(policy("p", {"pathPrefix": "/"}, limit_keys=["ip:address"]))) as made:
        forged = [{"x-forwarded-for": f"203.0.113.{number}"} for number in range(4)]
        assert [made.send("/", headers=headers).status for headers in forged] == [200, 200, 429, 429]


def test_a_policy_can_name_a_route() -> None:
    """A selector with `routes` sees the requests of that Envoy route alone."""
    document = bundle(
        policy("llm", {"pathPrefix": "/v1/", "routes": ["llm"]}, threshold_identical_requests=2),
        policy("elsewhere", {"pathPrefix": "/v2/"}, threshold_identical_requests=1_000),
    )
    with stack(document) as made:
        assert made.repeat("/v1/x", 3) == [200, 429, 429]
        assert made.repeat("/v2/x", 3) == [200, 200, 200]
        assert made.envoy.logged("/v1/x", status=429)["route"] == "llm"


@pytest.mark.skipif(envoy_version() < (1, 38), reason="tolerant mode needs Envoy 1.38")
def test_a_member_of_the_body_tells_callers_apart() -> None:
    """Envoy hands the body over although the policy ignores it otherwise; a header of the same name is another descriptor."""
    keys = ["body:/model", "header:model"]
    bodies = [{"model": model, "n": number} for number in range(3) for model in ("a|b=c&d%", "b")]
    with stack(bundle(policy("p", {"pathPrefix": "/"}, limit_keys=keys, body="ignore")), body_mode="tolerant") as made:
        assert [made.post("/", each).status for each in bodies] == [200, 200, 200, 200, 429, 429]
        assert made.post("/", bodies[0], {"model": "x"}).status == 200


def test_a_bypassed_upload_reaches_the_upstream_as_it_comes() -> None:
    """A bypassed request is answered at its headers: a body far above what is inspected arrives whole."""
    body, bypassing = b"x" * 1_000_000, policy("p", {"pathPrefix": "/"})
    bypassing["spec"]["bypass"] = [{"header": "X-Health-Check"}]
    with stack(bypassing) as made:
        assert made.repeat("/", 4, body=body, headers={"x-health-check": "1"}) == [200] * 4
        assert made.upstream.seen[-1].body == body


def test_a_client_behind_junk_is_one_caller() -> None:
    """A header that changes with every request does not make its client a new caller; another client is one."""
    numbers = count()
    with stack(bundle(policy("p", {"pathPrefix": "/"}, limit_keys=["credential"]))) as made:

        def ask(secret: str) -> int:
            headers = {"authorization": f"Bearer {secret}", "x-api-key": f"junk-{next(numbers)}"}
            return made.post("/v1/messages", b"same", headers).status

        assert [ask("sk-ann") for _ in range(3)] == [200, 200, 429]
        assert ask("sk-bob") == 200
