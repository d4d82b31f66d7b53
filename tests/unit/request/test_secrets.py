"""Which secret a request shows, which names are secret, and that only hashes are shown."""

import json
import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

import extproc.apis  # noqa: F401  # which say where each API's secret stands
from extproc.cli.main import main
from extproc.cli.replay.judge import Judge
from extproc.cli.replay.records import parse_line
from extproc.operator.row_events import LoopEvents
from extproc.pb.external_processor_pb2 import ProcessingRequest
from extproc.request.hash_key import PROCESS_KEY, HashKey
from extproc.request.http import HttpRequest, StatedFacts, compile_descriptors
from extproc.request.limit_keys import FirstOf
from extproc.request.secrets import extract_secret, find_secrets, may_stand_in_query, says_secret
from tests.support.bundles import check, plain, refused, spec
from tests.support.documents import policy
from tests.support.engine import ANY, make_engine
from tests.support.messages import body, headers
from tests.support.operated import Operated
from tests.support.service import (
    decoded,
    exchange,
    list_uncounted,
    make_service,
    metadata_of,
    status,
)
from tests.support.session_limits import limited

KEY = HashKey(bytes(range(32)))
CALLER = FirstOf(first_of=["jwt:sub", "credential", "header:x-user-id"], name="caller")
SECRET = "sk-very-secret"
HIDDEN = PROCESS_KEY.hide(SECRET)

CHAT, MESSAGES, GEMINI = "/v1/chat/completions", "/v1/messages", "/v1beta/models/m:generateContent"
BEDROCK = "/model/m/converse"
SIGNED = (
    "AWS4-HMAC-SHA256 Credential=AKIAEXAMPLE/20260101/us-east-1/bedrock/aws4_request, "
    "SignedHeaders=host, Signature="
)
LOOPING: dict[str, Any] = {"enabled": True, "window_seconds": 60, "threshold_identical_requests": 2}

SECRETS = [
    "ocp-apim-subscription-key",
    "x-litellm-api-key",
    "x-portkey-api-key",
    "cf-aig-authorization",
    "helicone-auth",
    "x-amz-security-token",
    "api_key",
    "access_token",
    "key",
    "apikey",
    "apiKey",
    "APIKey",
    "X-API-KEY",
    "accessToken",
    "AWSAccessKeyId",
    "x-accesstoken",
    "private-token",
    "x-vault-token",
    "client_secret",
    "clientSecret",
    "secretid",
    "set-cookie",
    "cookie2",
    "x-session-cookie",
    "oauth_token",
    "OAuth2",
    "x-authz",
    "authentication",
    "authorisation",
    "X-HTTP-AUTHORIZATION",
    "basicauth",
    "auth[token]",
    "x-auth",
    "authKey",
    "api_tokens",
    "tokens_key",
    "x-author-token",
    "password",
    "x-goog-credential",
    "X-Amz-Signature",
    "sig",
    "jwt",
    "id_token",
    "idempotency-key",
    "key2",
]
OPEN = [
    "x-author",
    "author",
    "authors",
    "x-authority",
    "authenticity",
    "coauthored-by",
    "max_tokens",
    "maxTokens",
    "tokens",
    "x-token-estimate",
    "tokenCount",
    "token_limit",
    "tokenizer",
    "monkey",
    "x-monkey-id",
    "Turkey",
    "donkeys",
    "keyboard",
    "keyword",
    "hockey",
    "secretary",
    "x-portkey-provider",
    "x-user-id",
    "design",
    "x-session-id",
    "",
    "-",
    "model",
]


@pytest.mark.parametrize("name", [*SECRETS, *OPEN])
def test_name_tells_whether_its_value_is_secret(name: str) -> None:
    assert says_secret(name) is (name in SECRETS)
    assert find_secrets({name, "page"}) == ({name} if name in SECRETS else set())


def test_long_name_is_judged_in_linear_time() -> None:
    """Clients choose the names of parameters. Quadratic work would take minutes here."""
    assert not any(
        says_secret(part * 20_000) for part in ("mon", "kE", "a_", "token_limit_x", "author")
    )


def test_policy_keys_tell_whether_queries_hold_secrets() -> None:
    keys = ["credential", "query:key", "query:access_token", "query:page", "header:x-api-key"]

    assert [may_stand_in_query(key) for key in keys] == [True, True, True, False, False]


def ask(
    path: str = "/", claims: Mapping[str, str] = MappingProxyType({}), /, **sent: str
) -> HttpRequest:
    named = {name.replace("_", "-"): value.encode() for name, value in sent.items()}
    request = HttpRequest("POST", path, "host", named, StatedFacts(claims=claims))
    request.hash_key = KEY
    return request


def read(request: HttpRequest, key: str | FirstOf = "credential") -> str:
    """A request's value for one limit key."""
    (found,) = compile_descriptors([key])
    return found.read(request, found.argument)


def test_hashes_differ_by_secret_and_key() -> None:
    other = HashKey(bytes(32))

    found = {key.hide(secret) for key in (KEY, other) for secret in ("sk-1", "sk-2", "")}

    assert len(found) == 6
    assert all(re.fullmatch("[0-9a-f]{16}", each) for each in found)
    assert KEY.hide("sk-1") == HashKey(KEY.secret).hide("sk-1")


@pytest.mark.parametrize(
    ("key", "request_", "secret"),
    [
        # the API's own header goes first, then those that others use
        (
            "credential",
            ask(CHAT, authorization="Bearer right", x_api_key="other", x_goog_api_key="other"),
            "right",
        ),
        ("credential", ask(CHAT, x_api_key="other", api_key="right"), "right"),  # Azure
        ("credential", ask(MESSAGES, authorization="Bearer other", x_api_key="right"), "right"),
        ("credential", ask(MESSAGES, authorization="Bearer right"), "right"),
        ("credential", ask(GEMINI, authorization="Bearer other", x_goog_api_key="right"), "right"),
        ("credential", ask(f"{GEMINI}?key=right", authorization="Bearer other"), "right"),
        (
            "credential",
            ask(BEDROCK, authorization=f"{SIGNED}ab12", x_api_key="other"),
            "AKIAEXAMPLE",
        ),
        (
            "credential",
            ask("/other", authorization="Bearer right", x_api_key="other", api_key="other"),
            "right",
        ),
        (
            "credential",
            ask("/other", x_goog_api_key="other", api_key="other", x_api_key="right"),
            "right",
        ),
        ("credential", ask("/other?key=other", x_goog_api_key="other", api_key="right"), "right"),
        ("credential", ask("/other?key=other", x_goog_api_key="right"), "right"),
        ("credential", ask("/other?a=b&key=right", x_user_id="other"), "right"),
        (
            "credential",
            ask(CHAT, authorization="Bearer", api_key="right"),
            "right",
        ),  # of SDKs whose key is empty
        ("credential", ask(CHAT, x_user_id="ann", cookie="c=1", authorization=""), ""),
        # whatever key a policy names, a secret is read as its hash
        ("query:key", ask("/?key=sk-1"), "sk-1"),
        *(
            (f"header:{name.replace('_', '-')}", ask("/", **{name: "sk-1"}), "sk-1")
            for name in (
                "authorization",
                "proxy_authorization",
                "cookie",
                "x_api_key",
                "api_key",
                "x_goog_api_key",
            )
        ),
    ],
)
def test_secret_is_read_as_its_hash(key: str, request_: HttpRequest, secret: str) -> None:
    assert read(request_, key) == (KEY.hide(secret) if secret else "")


@pytest.mark.parametrize(
    ("header", "value", "secret"),
    [
        ("authorization", "bearer  sk-1 ", "sk-1"),
        ("authorization", "Basic YTpi", "YTpi"),
        ("authorization", "sk-1", "sk-1"),
        ("authorization", "Basic", ""),
        ("authorization", "", ""),
        # a signature is another one with every request
        ("authorization", f"{SIGNED}1", "AKIAEXAMPLE"),
        (
            "authorization",
            "aws4-hmac-sha256 SignedHeaders=host,Credential=AK2/x, Signature=1",
            "AK2",
        ),
        ("authorization", "AWS4-ECDSA-P256-SHA256 Credential=AK3, Signature=1", "AK3"),
        ("authorization", "AWS4-HMAC-SHA256 Signature=1", "Signature=1"),
        # only `authorization` has schemes of any name: values that begin with equal words must not
        # become one caller
        ("helicone-auth", "Bearer sk-1", "sk-1"),
        ("x-litellm-api-key", "bearer sk-1", "sk-1"),
        ("x-team-key", "blue team", "blue team"),
        ("cookie", "a=b; c=d", "a=b; c=d"),
        ("proxy-authorization", "Custom sk-1", "sk-1"),
    ],
)
def test_scheme_is_no_part_of_a_secret(header: str, value: str, secret: str) -> None:
    assert extract_secret(value, header) == secret
    assert header != "authorization" or extract_secret(value) == secret


@pytest.mark.parametrize(
    ("claims", "sent", "value"),
    [
        ({"sub": "ann"}, {"authorization": "Bearer sk-1", "x_user_id": "bob"}, "jwt:sub:ann"),
        (
            {},
            {"authorization": "Bearer sk-1", "x_user_id": "bob"},
            f"credential:{KEY.hide('sk-1')}",
        ),
        ({}, {"x_user_id": "ann"}, "header:x-user-id:ann"),
        (
            {},
            {"x_user_id": "credential:0011223344556677"},
            "header:x-user-id:credential:0011223344556677",
        ),
        ({}, {}, ""),
    ],
)
def test_first_of_names_the_source_of_its_value(
    claims: dict[str, str], sent: dict[str, str], value: str
) -> None:
    """The value names its source, so that no client can claim to be a caller of another source."""
    assert read(ask("/", claims, **sent), CALLER) == value


def test_first_of_keeps_its_name() -> None:
    assert [found.name for found in compile_descriptors([CALLER, "header:x-team"])] == [
        "caller",
        "x-team",
    ]
    assert [found.name for found in compile_descriptors([CALLER, "header:caller"])] == [
        "caller",
        "header:caller",
    ]


def test_first_of_is_missing_if_no_key_is_present() -> None:
    service = make_service(policy("p", ANY, limit_keys=[CALLER.model_dump()]))

    exchange(service, headers(end=True, x_user_id="a"))
    assert list_uncounted(service) == {}
    exchange(service, headers(end=True))
    assert list_uncounted(service) == {"missing_descriptor": 1}


@pytest.mark.parametrize("place", ["limit_keys", "ramp_by"])
def test_each_error_in_first_of_has_its_place(place: str) -> None:
    wrong = {"first_of": ["jwt:sub", "user", "body:/user"], "name": "credential", "more": 1}
    errors = [
        (pointer, message.partition(" ")[0])
        for pointer, message in plain(refused(spec(**{place: ["credential", wrong]})))
    ]

    assert sorted(errors) == [
        (f"/spec/{place}/1/first_of/1", "it"),
        (f"/spec/{place}/1/first_of/2", "it"),
        (f"/spec/{place}/1/more", "unknown"),
        (f"/spec/{place}/1/name", "name"),
    ]


CONFIG = {"tokens_per_second": 1, "burst": 1}
RULE = {
    "name": "r",
    "limit_keys": ["header:x-user-id"],
    "algorithm": "token_bucket",
    "algorithm_config": CONFIG,
}


def test_first_of_is_allowed_wherever_callers_are_chosen() -> None:
    key = CALLER.model_dump()
    found = check(
        spec(
            limit_keys=[key], ramp_by=[key], enforce_percent=5, rules=[RULE | {"limit_keys": [key]}]
        )
    )
    (chosen,) = found.sources[0].policies

    assert chosen.spec.all_limit_keys() == [CALLER]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x-litellm-api-key", "clientSecret", "set-cookie"])
def test_secret_is_never_shown_with_show_callers(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [f"header:{name}", f"query:{name}"]
    operated = Operated(
        policy("p", ANY, limit_keys=keys, labels=keys[:1], **LOOPING), show_callers=True
    )
    asked = headers(f"/v1/x?a=b&{name}={SECRET}")
    asked.request_headers.headers.headers.add(key=name.lower(), raw_value=SECRET.encode())
    for _ in range(3):
        exchange(operated.service, asked, body(b"{}"))
    rows = operated.ask("/loops")["conversations"]
    events: list[Any] = []
    look = LoopEvents(lambda *event: events.append(event[2]), lambda: True).look
    look(operated.service.reporter.loops.list_loops(), time.time())
    logged = [
        vars(record)["fields"] for record in caplog.records if record.levelno == logging.WARNING
    ]

    shown = rows[0]["descriptors"], logged[0]["descriptors"], events[0]["caller"]
    assert [[*each.values()] for each in shown] == [[HIDDEN, HIDDEN]] * 3
    assert SECRET not in f"{rows}{logged}{events}{operated.read()}"


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize(
    ("path", "sent"),
    [
        (CHAT, {"authorization": f"Bearer {SECRET}"}),
        (MESSAGES, {"authorization": f"Bearer {SECRET}"}),
        (BEDROCK, {"authorization": f"{SIGNED}ab12"}),
        (f"{GEMINI}?key={SECRET}&alt=sse", {}),
        ("/other", {"x_goog_api_key": SECRET, "cookie": SECRET}),
        ("/other", {"x_user_id": "ann"}),
        (f"/v1/x?accessToken={SECRET}&a=b", {"x_litellm_api_key": SECRET}),
        (f"/v1/x?accessToken={SECRET}&a=b", {"x_auth_session_id": SECRET}),
    ],
)
def test_record_has_hashes_and_replays_as_same_caller(
    path: str, sent: dict[str, Any], shown: bool
) -> None:
    """Secrets are hashed whether or not a policy reads them, even if callers are shown."""
    keys = ["credential", "header:authorization", "header:cookie", "query:key"]
    session = {"keys": ["header:x-*-session-id", "header:x-litellm-api-key"]}
    policies = [
        policy("p", ANY, limit_keys=keys, missing_descriptor="share"),
        limited(max_steps=3, session=session),
    ]
    service = make_service(*policies, record=True, show_callers=shown)

    told = metadata_of(decoded(exchange(service, headers(path, **sent), body(b"{}"))[-1]))

    line = json.dumps({"loop_record": told["record"]}).encode()
    replayed = Judge(make_engine(*policies), 100, HashKey()).judge(parse_line(line))
    assert replayed is not None
    assert replayed[0].enforcing.active[0].tenant == told["tenant"]
    assert SECRET not in json.dumps(told)
    for name in ("x_litellm_api_key", "x_auth_session_id"):
        assert name not in sent or told["record"]["headers"][name.replace("_", "-")] == HIDDEN
    assert "accessToken" not in path or f"accessToken={HIDDEN}" in told["record"]["query"]


def test_explain_shows_hashes_of_secrets(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "p.json"
    keys = ["credential", "query:key", "header:x-portkey-api-key"]
    file.write_text(
        json.dumps(policy("p", ANY, limit_keys=keys, labels=["header:helicone-auth"], **LOOPING))
    )
    named = {
        "x-portkey-api-key": SECRET,
        "helicone-auth": f"Bearer {SECRET}",
        "authorization": f"Bearer {SECRET}",
    }
    sent = [word for header in named.items() for word in ("-H", ": ".join(header))]

    assert (
        main(
            [
                "explain",
                "--policy",
                str(file),
                *sent,
                f"http://h/v1/x?access_token={SECRET}&key={SECRET}&page=2",
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert re.search(
        r"GET\|/v1/x\|access_token=([0-9a-f]{16})&key=\1&page=2\|00000000\|credential=\1\|key=\1\|x-portkey-api-key=\1",
        shown,
    )
    assert SECRET not in shown


def _claiming(value: str) -> ProcessingRequest:
    message = headers()
    message.metadata_context.filter_metadata["envoy.filters.http.jwt_authn"].update(
        {"payload": {"key": value}}
    )
    return message


_LITELLM = policy("p", ANY, limit_keys=["header:x-litellm-api-key"])
_IN_BODY = [
    policy("p", ANY, limit_keys=[key]) for key in ("body:/api_key", "body:/user/accessToken")
]
_CHATTING = [
    limited(max_steps=3, session={"keys": [key]})
    for key in ("header:x-chat-token", "body:/prompt_cache_key")
]


@pytest.mark.parametrize(
    ("made", "order", "message", "data"),
    [
        (
            _LITELLM,
            {"caller": {"x-litellm-api-key": SECRET}},
            headers(x_litellm_api_key=SECRET),
            {},
        ),
        (
            _LITELLM,
            {"caller": {"x-litellm-api-key": HIDDEN}},
            headers(x_litellm_api_key=SECRET),
            {},
        ),
        (
            policy("p", ANY, limit_keys=["jwt:key"]),
            {"caller": {"key": SECRET}},
            _claiming(SECRET),
            {},
        ),
        (_IN_BODY[0], {"caller": {"/api_key": SECRET}}, headers(), {"api_key": SECRET}),
        (
            _IN_BODY[1],
            {"caller": {"/user/accesstoken": SECRET}},
            headers(),
            {"user": {"accessToken": SECRET}},
        ),
        (
            _CHATTING[0],
            {"kind": "kill", "session": {"header:x-chat-token": SECRET}},
            headers(x_chat_token=SECRET, x_team="t"),
            {},
        ),
        (
            _CHATTING[1],
            {"kind": "kill", "session": {"body:/prompt_cache_key": "c-1"}},
            headers(x_team="t"),
            {"prompt_cache_key": "c-1"},
        ),
    ],
)
def test_order_by_secret_finds_caller_and_session(
    made: dict[str, Any], order: dict[str, Any], message: ProcessingRequest, data: dict[str, Any]
) -> None:
    """An order's secret is hashed as those of requests; a claim of such a name is none."""
    operated = Operated(made, record=True)
    sent = message, body(json.dumps(data).encode())
    before = decoded(exchange(operated.service, *sent)[-1])
    operated.give(**{"kind": "block", "seconds": 60, "reason": "r", **order})

    assert status(before) == 200
    assert "body" not in str(made["spec"]["limit_keys"]) or metadata_of(before)["tenant"] == HIDDEN
    assert status(decoded(exchange(operated.service, *sent)[-1])) == 429


@pytest.mark.parametrize("value", ["gold", PROCESS_KEY.hide("gold")], ids=["value", "hash"])
def test_match_may_name_a_secret_or_its_hash(value: str) -> None:
    rule = RULE | {"match": {"header:x-auth-plan": value}}
    service = make_service(
        {"id": "p", "spec": {"selector": ANY, "mode": "enforce", "rules": [rule]}}
    )

    statuses = [
        status(decoded(exchange(service, headers(end=True, x_user_id="ann", x_auth_plan=plan))[-1]))
        for plan in ("gold", "gold", "free", "free")
    ]

    assert statuses == [200, 429, 200, 200]
