"""How Loopguard tells callers apart, through Envoy: claims, addresses, routes, bodies, keys."""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.documents import bundle, policy
from tests.support.harness import Stack, stack
from tests.support.tokens import KEY, sign


def _with_jwt_authn(jwks: Path) -> Callable[[str], str]:
    """Enables the jwt_authn filter in the bootstrap's comment, with a key of ours."""
    jwks.write_text(json.dumps({"keys": [KEY]}))

    def edit(config: str) -> str:
        start = config.index("# - name: envoy.filters.http.jwt_authn")
        end = config.index("- name: envoy.filters.http.ext_proc")
        filled = config[start:end].replace("/etc/envoy/jwks.json", str(jwks))
        return (
            config[:start]
            + re.sub(r"^( *)# ", r"\1", filled, flags=re.MULTILINE).removeprefix("# ")
            + config[end:]
        )

    return edit


def test_claims_verified_by_envoy_tell_tenants_apart(tmp_path: Path) -> None:
    document = bundle(policy("p", {"pathPrefix": "/"}, limit_keys=["jwt:org_id", "jwt:level"]))
    token = partial(sign, iss="https://idp.example.com/", aud="llm-gateway")
    with stack(document, edit=_with_jwt_authn(tmp_path / "jwks.json")) as made:
        ann = made.repeat("/", 2, headers=token(org_id="org-a", level=7, jti="1"))
        bob = made.repeat("/", 3, headers=token(org_id="org-b", level=7))
        forged = made.repeat("/", 3, headers=token(b"another key", org_id="org-a", level=7))
        ann += made.repeat("/", 1, headers=token(org_id="org-a", level=7, jti="2"))

        assert ann == bob == [200, 200, 429]
        assert forged == [401] * 3


BYPASSED = policy("bypassed", {"pathPrefix": "/bypassed"})
BYPASSED["spec"]["bypass"] = [{"header": "X-Health-Check"}]
STRICT = policy("strict", {"pathPrefix": "/strict"}, limit_keys=["header:x-user-id"])
STRICT["spec"]["uncountable"] = "reject"
POLICIES = bundle(
    policy("address", {"pathPrefix": "/address"}, limit_keys=["ip:address"]),
    policy("llm", {"pathPrefix": "/v1/", "routes": ["llm"]}, threshold_identical_requests=2),
    policy("elsewhere", {"pathPrefix": "/v2/"}, threshold_identical_requests=1_000),
    policy(
        "member",
        {"pathPrefix": "/member"},
        limit_keys=["body:/model", "header:model"],
        body="ignore",
    ),
    policy("secret", {"pathPrefix": "/secret"}, limit_keys=["credential"]),
    BYPASSED,
    STRICT,
)


@pytest.fixture(scope="module")
def made() -> Iterator[Stack]:
    with stack(POLICIES) as running:
        yield running


def test_forged_forwarding_header_does_not_change_the_address(made: Stack) -> None:
    forged = [{"x-forwarded-for": f"203.0.113.{number}"} for number in range(4)]

    assert [made.send("/address", headers=headers).status for headers in forged] == [
        200,
        200,
        429,
        429,
    ]


def test_policy_selects_by_the_name_of_a_route(made: Stack) -> None:
    assert (made.repeat("/v1/x", 3), made.repeat("/v2/x", 3)) == ([200, 429, 429], [200, 200, 200])
    assert made.envoy.logged("/v1/x", status=429)["route"] == "llm"


def test_policy_by_route_alone_sees_every_path() -> None:
    with stack(bundle(policy("by-name", {"routes": ["main"]}))) as made:
        assert made.repeat("/anything", 3) == [200, 200, 429]


def test_body_member_tells_callers_apart(made: Stack) -> None:
    """Although the policy ignores bodies otherwise.

    A header of the same name is another descriptor.
    """
    bodies = [{"model": model, "n": number} for number in range(3) for model in ("a|b=c&d%", "b")]

    assert [made.post("/member", each).status for each in bodies] == [200, 200, 200, 200, 429, 429]
    assert made.post("/member", bodies[0], {"model": "x"}).status == 200


def test_bypassed_upload_reaches_the_upstream_whole(made: Stack) -> None:
    body = b"x" * 1_000_000

    assert made.repeat("/bypassed", 4, body=body, headers={"x-health-check": "1"}) == [200] * 4
    assert made.upstream.seen[-1].body == body


def test_changing_header_does_not_make_a_new_caller(made: Stack) -> None:
    def ask(secret: str, number: int) -> int:
        headers = {"authorization": f"Bearer {secret}", "x-api-key": f"junk-{number}"}
        return made.post("/secret/v1/messages", b"same", headers).status

    assert [ask("sk-ann", number) for number in range(3)] == [200, 200, 429]
    assert ask("sk-bob", 3) == 200


@pytest.mark.parametrize(
    "connection", ["x-user-id", "close, X-User-Id", "keep-alive,x-user-id , te"]
)
def test_client_that_hides_its_limit_key_is_refused(
    made: Stack, user: dict[str, str], connection: str
) -> None:
    """Headers that `Connection` names are gone before any filter of Envoy's runs."""
    answers = [
        made.post("/strict", {"messages": []}, {"connection": connection, **user}) for _ in range(2)
    ]

    assert [(answer.status, answer.json()["error"]["code"]) for answer in answers] == [
        (400, "missing_descriptor")
    ] * 2


def test_headers_that_envoy_sets_cannot_be_hidden() -> None:
    def named(config: str) -> str:
        caller = '{key: x-caller, value: "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%"}'
        value = f"{{header: {caller}, append_action: OVERWRITE_IF_EXISTS_OR_ADD}}"
        first = "- remove: x-fairvisor-warning\n"
        assert first in config
        return config.replace(first, f"- append: {value}\n              {first}", 1)

    guarded = bundle(
        policy("p", {"pathPrefix": "/"}, limit_keys=["header:x-caller", "header:x-user-id"])
    )
    with stack(guarded, edit=named) as made:
        headers = {"connection": "x-caller, x-user-id", "x-caller": "mine", "x-user-id": "ann"}
        statuses = [made.send("/", headers=headers).status for _ in range(3)]
        seen = made.upstream.seen[-1]

    assert statuses == [200, 200, 429]
    assert seen.header("x-user-id") is None
    assert seen.header("x-caller") not in (None, "mine")
