"""What a request's secret is, and that nothing but a keyed hash of it is read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType

import pytest

import extproc.apis  # noqa: F401  # which say where each API's secret stands
from extproc.cli.replay.judge import Judge
from extproc.cli.replay.records import parse_line
from extproc.engine.recording import record_body, record_head
from extproc.ext_proc.answers.metadata import write_metadata
from extproc.pb.external_processor_pb2 import ProcessingResponse
from extproc.request.fingerprint import NO_BODY
from extproc.request.hash_key import HashKey
from extproc.request.http import HttpRequest, StatedFacts, compile_descriptors
from extproc.request.limit_keys import FirstOf
from extproc.request.secrets import extract_secret
from tests.support.bundles import check, plain, refused, spec
from tests.support.documents import policy
from tests.support.engine import ANY, make_engine
from tests.support.service import metadata_of

KEY = HashKey(bytes(range(32)))
CALLER = FirstOf(first_of=["jwt:sub", "credential", "header:x-user-id"], name="caller")

CHAT, MESSAGES, GEMINI = "/v1/chat/completions", "/v1/messages", "/v1beta/models/m:generateContent"
BEDROCK = "/model/m/converse"
SIGNED = "AWS4-HMAC-SHA256 Credential=AKIAEXAMPLE/20260101/us-east-1/bedrock/aws4_request, SignedHeaders=host, Signature="


def ask(path: str = "/", claims: Mapping[str, str] = MappingProxyType({}), /, **headers: str) -> HttpRequest:
    """A request with these headers."""
    named = {name.replace("_", "-"): value.encode() for name, value in headers.items()}
    request = HttpRequest("POST", path, "host", named, StatedFacts(claims=claims))
    request.hash_key = KEY
    return request


def read(request: HttpRequest, key: str | FirstOf = "credential") -> str:
    """A request's value for one limit key."""
    (found,) = compile_descriptors([key])
    return found.read(request, found.argument)


def test_a_hash_tells_secrets_and_keys_apart() -> None:
    """Equal only for the same secret under the same key."""
    other = HashKey(bytes(32))

    found = {key.hide(secret) for key in (KEY, other) for secret in ("sk-1", "sk-2", "")}

    assert len(found) == 6
    assert KEY.hide("sk-1") == HashKey(KEY.secret).hide("sk-1")


@pytest.mark.parametrize(
    ("path", "headers", "secret"),
    [
        (CHAT, {"authorization": "Bearer right", "x_api_key": "other", "x_goog_api_key": "other"}, "right"),
        (CHAT, {"x_api_key": "other", "api_key": "right"}, "right"),  # Azure
        (MESSAGES, {"authorization": "Bearer other", "x_api_key": "right"}, "right"),
        (MESSAGES, {"authorization": "Bearer right"}, "right"),
        (GEMINI, {"authorization": "Bearer other", "x_goog_api_key": "right"}, "right"),
        (f"{GEMINI}?key=right", {"authorization": "Bearer other"}, "right"),
        (BEDROCK, {"authorization": f"{SIGNED}ab12", "x_api_key": "other"}, "AKIAEXAMPLE"),
        ("/other", {"authorization": "Bearer right", "x_api_key": "other", "api_key": "other"}, "right"),
        ("/other", {"x_goog_api_key": "other", "api_key": "other", "x_api_key": "right"}, "right"),
        ("/other?key=other", {"x_goog_api_key": "other", "api_key": "right"}, "right"),
        ("/other?key=other", {"x_goog_api_key": "right"}, "right"),
        ("/other?a=b&key=right", {"x_user_id": "other"}, "right"),
        (CHAT, {"authorization": "Bearer", "api_key": "right"}, "right"),  # which SDKs send whose key is empty
    ],
)
def test_a_credential_is_what_the_api_of_the_path_asks_for(path: str, headers: dict[str, str], secret: str) -> None:
    """Its own header goes first, then those that others use."""
    assert read(ask(path, **headers)) == KEY.hide(secret)


def test_a_request_without_a_secret_has_none() -> None:
    """Neither an empty header nor one of another purpose is a credential."""
    assert read(ask(CHAT, x_user_id="ann", cookie="c=1", authorization="")) == ""


@pytest.mark.parametrize(
    ("value", "secret"),
    [
        ("bearer  sk-1 ", "sk-1"),
        ("Basic YTpi", "YTpi"),
        ("sk-1", "sk-1"),
        ("Basic", ""),
        ("", ""),
        (f"{SIGNED}1", "AKIAEXAMPLE"),
        ("aws4-hmac-sha256 SignedHeaders=host,Credential=AK2/x, Signature=1", "AK2"),
        ("AWS4-ECDSA-P256-SHA256 Credential=AK3, Signature=1", "AK3"),
        ("AWS4-HMAC-SHA256 Signature=1", "Signature=1"),
    ],
)
def test_the_secret_of_a_header(value: str, secret: str) -> None:
    """It stands behind the scheme; a signature, which is another one with every request, is none."""
    assert extract_secret(value) == secret


@pytest.mark.parametrize(
    "key",
    [
        "credential",
        *(
            f"header:{name}"
            for name in ("authorization", "proxy-authorization", "cookie", "x-api-key", "api-key", "x-goog-api-key")
        ),
        "query:key",
    ],
)
def test_keys_of_that_kind_have_hashes_for_values(key: str) -> None:
    """Whatever key a policy names, the secret is read as 16 hex digits that need the hash key."""
    name = key.partition(":")[2].replace("-", "_")
    request = ask("/?key=sk-1" if key == "query:key" else "/", **({} if key in ("credential", "query:key") else {name: "sk-1"}))
    if key == "credential":
        request = ask("/", authorization="Bearer sk-1")

    assert read(request, key) == KEY.hide("sk-1")
    assert re.fullmatch("[0-9a-f]{16}", KEY.hide("sk-1"))
    assert KEY.hide("sk-1") != HashKey(bytes(32)).hide("sk-1")


def test_no_descriptor_or_composite_has_the_secret() -> None:
    """Nor has the query in a composite, whose other values stay."""
    engine = make_engine(policy("p", ANY, limit_keys=["credential", "header:authorization", "query:key", "header:x-api-key"]))
    request = ask("/?key=sk-secret&a=b", authorization="Bearer sk-secret", x_api_key="sk-secret")
    evaluation = engine.prepare(request, key=KEY)
    assert evaluation is not None
    evaluation.read_body(NO_BODY)
    (candidate,) = evaluation.enforcing.candidates

    hidden = KEY.hide("sk-secret")
    assert candidate.composite.startswith(f"POST|/|a=b&key={hidden}|00000000|")
    assert "sk-secret" not in candidate.composite
    assert dict(candidate.values) == dict.fromkeys(["credential", "authorization", "key", "x-api-key"], hidden)


@pytest.mark.parametrize(
    ("claims", "headers", "value"),
    [
        ({"sub": "ann"}, {"authorization": "Bearer sk-1", "x_user_id": "bob"}, "jwt:sub:ann"),
        ({}, {"authorization": "Bearer sk-1", "x_user_id": "bob"}, f"credential:{KEY.hide('sk-1')}"),
        ({}, {"x_user_id": "ann"}, "header:x-user-id:ann"),
        ({}, {"x_user_id": "credential:0011223344556677"}, "header:x-user-id:credential:0011223344556677"),
        ({}, {}, ""),
    ],
)
def test_the_first_of_several_keys(claims: dict[str, str], headers: dict[str, str], value: str) -> None:
    """Its value says where it comes from, so that no client can claim to be a caller of another source."""
    assert read(ask("/", claims, **headers), CALLER) == value


def test_its_name_is_the_descriptors() -> None:
    """Beside a key of the same name it keeps it, and the other is written in full."""
    assert [found.name for found in compile_descriptors([CALLER, "header:x-team"])] == ["caller", "x-team"]
    assert [found.name for found in compile_descriptors([CALLER, "header:caller"])] == ["caller", "header:caller"]


def test_it_is_missing_only_where_none_of_them_is_there() -> None:
    """What is reported as missing is its name."""
    engine = make_engine(policy("p", ANY, limit_keys=[CALLER.model_dump()]))
    here, none = engine.prepare(ask("/", x_user_id="a")), engine.prepare(ask("/"))
    assert here is not None
    assert none is not None

    assert (here.enforcing.missing, here.enforcing.left_out) == ([], [])
    assert (none.enforcing.missing, none.enforcing.left_out) == ([("p", "caller")], [("p", "", "missing_descriptor")])


@pytest.mark.parametrize("place", ["limit_keys", "ramp_by"])
def test_what_is_wrong_with_one_is_told_at_its_place(place: str) -> None:
    """Each element of it is checked, and its name."""
    wrong = {"first_of": ["jwt:sub", "user", "body:/user"], "name": "credential", "more": 1}
    errors = [
        (pointer, message.partition(" ")[0]) for pointer, message in plain(refused(spec(**{place: ["credential", wrong]})))
    ]

    assert sorted(errors) == [
        (f"/spec/{place}/1/first_of/1", "it"),
        (f"/spec/{place}/1/first_of/2", "it"),
        (f"/spec/{place}/1/more", "unknown"),
        (f"/spec/{place}/1/name", "name"),
    ]


def test_a_policy_may_have_it_wherever_callers_are_chosen() -> None:
    """In its own keys, in those of its rules, and where a share of callers is acted on."""
    key = CALLER.model_dump()
    rule = {
        "name": "r",
        "limit_keys": [key],
        "algorithm": "token_bucket",
        "algorithm_config": {"tokens_per_second": 1, "burst": 9},
    }
    found = check(spec(limit_keys=[key], ramp_by=[key], enforce_percent=5, rules=[rule]))
    (chosen,) = found.sources[0].policies

    assert chosen.spec.all_limit_keys() == [CALLER]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    ("path", "headers"),
    [
        (CHAT, {"authorization": "Bearer sk-secret"}),
        (MESSAGES, {"authorization": "Bearer sk-secret"}),
        (BEDROCK, {"authorization": f"{SIGNED}ab12"}),
        (f"{GEMINI}?key=sk-secret&alt=sse", {}),
        ("/other", {"x_goog_api_key": "sk-secret", "cookie": "sk-secret"}),
        ("/other", {"x_user_id": "ann"}),
    ],
)
def test_a_record_has_the_hash_and_replays_as_the_same_caller(
    path: str, headers: dict[str, str], plain: bool
) -> None:  # a parameter
    """A replay needs no key. What a request does not show is not recorded, plain or hashed."""
    keys = ["credential", "header:authorization", "header:cookie", "query:key"]
    engine = make_engine(policy("p", ANY, limit_keys=keys, missing_descriptor="share"))
    request = ask(path, **headers)
    live = engine.prepare(request, key=KEY)
    assert live is not None
    live.read_body(NO_BODY)
    made = record_head(request, request.facts, live.plans, plain=plain)
    record_body(made, NO_BODY, "", 1.0)
    record = metadata_of(ProcessingResponse.FromString(write_metadata({"record": made})))["record"]

    replayed = Judge(engine, 100, HashKey()).judge(parse_line(json.dumps({"loop_record": record}).encode()))

    assert replayed is not None
    assert replayed[0].enforcing.candidates[0].values == live.enforcing.candidates[0].values
    assert "sk-secret" not in json.dumps(record)
