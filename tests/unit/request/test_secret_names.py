"""Which names of headers and parameters say that the value is a secret, and that such a value is shown nowhere."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import pytest

import extproc.apis  # noqa: F401  # which say where each API's secret stands
from extproc.cli.main import main
from extproc.cli.replay.judge import Judge
from extproc.cli.replay.records import parse_line
from extproc.engine.orders import Target
from extproc.engine.recording import record_body, record_head
from extproc.operator.admin.loop_report import describe_loops
from extproc.operator.events import LoopEvents
from extproc.operator.overrides import parse_order
from extproc.request.callers import compile_shown, list_others
from extproc.request.fingerprint import NO_BODY
from extproc.request.hash_key import PROCESS_KEY, HashKey
from extproc.request.http import HttpRequest, compile_descriptors
from extproc.request.secrets import extract_secret, find_secrets, may_stand_in_query, says_secret
from extproc.sessions.prices import Prices
from tests.support.documents import policy
from tests.support.engine import ANY, make_engine
from tests.support.messages import body, headers
from tests.support.service import exchange, make_service
from tests.support.session_limits import limited

SECRET = "sk-very-secret"
HIDDEN = PROCESS_KEY.hide(SECRET)

SECRETS = [
    "ocp-apim-subscription-key", "x-litellm-api-key", "x-portkey-api-key", "cf-aig-authorization", "helicone-auth",
    "x-amz-security-token", "api_key", "access_token", "key", "apikey", "apiKey", "APIKey", "X-API-KEY", "accessToken",
    "AWSAccessKeyId", "x-accesstoken", "private-token", "x-vault-token", "client_secret", "clientSecret", "secretid",
    "set-cookie", "cookie2", "x-session-cookie", "oauth_token", "OAuth2", "x-authz", "authentication", "authorisation",
    "X-HTTP-AUTHORIZATION", "basicauth", "auth[token]", "x-auth", "authKey", "api_tokens", "tokens_key", "x-author-token",
    "password", "x-goog-credential", "X-Amz-Signature", "sig", "jwt", "id_token", "idempotency-key", "key2",
]  # fmt: skip
OPEN = [
    "x-author", "author", "authors", "x-authority", "authenticity", "coauthored-by", "max_tokens", "maxTokens", "tokens",
    "x-token-estimate", "tokenCount", "token_limit", "tokenizer", "monkey", "x-monkey-id", "Turkey", "donkeys", "keyboard",
    "keyword", "hockey", "secretary", "x-portkey-provider", "x-user-id", "design", "x-session-id", "", "-", "model",
]  # fmt: skip


@pytest.mark.parametrize("name", SECRETS)
def test_a_name_that_says_secret_is_one(name: str) -> None:
    """However it is spelled."""
    assert says_secret(name)
    assert find_secrets({name, "page"}) == {name}


@pytest.mark.parametrize("name", OPEN)
def test_a_word_that_only_looks_alike_is_none(name: str) -> None:
    """Callers and labels of these names stay readable."""
    assert not says_secret(name)


def test_a_long_name_is_judged_in_linear_time() -> None:
    """Clients choose the names of parameters. Quadratic work would take minutes here."""
    assert not any(says_secret(part * 20_000) for part in ("mon", "kE", "a_", "token_limit_x", "author"))


@pytest.mark.parametrize(
    ("header", "value", "secret"),
    [
        ("helicone-auth", "Bearer sk-1", "sk-1"),
        ("x-litellm-api-key", "bearer sk-1", "sk-1"),
        ("x-team-key", "blue team", "blue team"),
        ("cookie", "a=b; c=d", "a=b; c=d"),
        ("proxy-authorization", "Custom sk-1", "sk-1"),
    ],
)
def test_only_authorization_has_schemes_of_any_name(header: str, value: str, secret: str) -> None:
    """Values of other headers that begin with equal words must not become one caller."""
    assert extract_secret(value, header) == secret


LOOPING: dict[str, Any] = {"enabled": True, "window_seconds": 60, "threshold_identical_requests": 2}


@pytest.mark.parametrize("name", [name for name in SECRETS if name.replace("-", "").replace("_", "").isalnum()])
def test_a_secret_is_nowhere_though_callers_are_shown(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """As a header and as a parameter: not in logs, events, rows or composites; its hash is."""
    caplog.set_level(logging.WARNING)
    keys = [f"header:{name}", f"query:{name}"]
    service = make_service(policy("p", ANY, limit_keys=keys, labels=keys[:1], **LOOPING), show_callers=True)
    asked = headers(f"/v1/x?a=b&{name}={SECRET}")
    asked.request_headers.headers.headers.add(key=name.lower(), raw_value=SECRET.encode())
    for _ in range(3):
        exchange(service, asked, body(b"{}"))
    document = service.reporter.loops.make_document(shows_callers=True)
    rows = describe_loops(document, Prices(None), [], shows_callers=True, now=time.time())
    events: list[Any] = []
    LoopEvents(lambda *event: events.append(event[2]), lambda: True).look(service.reporter.loops.copy(), time.time())
    logged = [vars(record)["fields"] for record in caplog.records]

    assert [[*shown.values()] for shown in (rows[0]["descriptors"], logged[0]["descriptors"], events[0]["caller"])] == [
        [HIDDEN, HIDDEN]
    ] * 3
    assert SECRET not in f"{rows}{logged}{events}"


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", ["x-litellm-api-key", "x-auth-session-id"])
def test_records_have_hashes_that_replay_alike(name: str, plain: bool) -> None:  # a parameter
    """Of headers and of every parameter, read by a policy or not."""
    engine = make_engine(limited(max_steps=3, session={"keys": ["header:x-*-session-id", f"header:{name}"]}))
    request = HttpRequest("POST", f"/v1/x?accessToken={SECRET}&a=b", "host", {name: SECRET.encode()})
    request.hash_key = PROCESS_KEY
    live = engine.prepare(request)
    assert live is not None
    live.read_body(NO_BODY)
    record = record_head(request, request.facts, live.plans, plain=plain)
    record_body(record, NO_BODY, "", 1.0)
    replayed = Judge(engine, 100, HashKey()).judge(parse_line(json.dumps({"loop_record": record}).encode()))

    assert SECRET not in json.dumps(record)
    assert f"accessToken={HIDDEN}" in record["query"]
    assert record["headers"][name] == HIDDEN
    assert replayed is not None


def test_explain_shows_the_hash_of_every_such_value(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:  # noqa: ANN401
    """Of labels, in the composite and in its query."""
    file = tmp_path / "p.json"
    keys, labels = ["header:x-portkey-api-key"], ["header:helicone-auth"]
    file.write_text(json.dumps(policy("p", ANY, limit_keys=keys, labels=labels, **LOOPING)))
    sent = ["-H", f"x-portkey-api-key: {SECRET}", "-H", f"helicone-auth: Bearer {SECRET}"]

    assert main(["explain", "--policy", str(file), *sent, f"http://h/v1/x?access_token={SECRET}&page=2"]) == 0
    shown = capsys.readouterr().out
    assert "access_token=" in shown
    assert "page=2" in shown
    assert SECRET not in shown


def test_each_of_several_such_secrets_is_a_caller() -> None:
    """As for the credentials of known APIs: a junk header in front must not make a new caller."""
    key: Any = {"first_of": ["header:x-portkey-api-key", "header:helicone-auth"], "name": "caller"}
    engine = make_engine(policy("p", ANY, limit_keys=[key]))
    request = HttpRequest("POST", "/", "host", {"x-portkey-api-key": b"junk", "helicone-auth": b"Bearer sk-1"})
    evaluation = engine.prepare(request)
    assert evaluation is not None
    plan = evaluation.plans[0]
    first = plan.list_values(request)

    assert first == [("caller", f"header:x-portkey-api-key:{PROCESS_KEY.hide('junk')}")]
    assert plan.list_other_callers(request, first) == [[("caller", f"header:helicone-auth:{PROCESS_KEY.hide('sk-1')}")]]
    assert list_others(compile_shown(compile_descriptors(["header:x-portkey-api-key"])), request, first) == []


def test_an_order_by_value_finds_caller_and_session() -> None:
    """Its secret is hashed as those of requests are; a claim of such a name is no secret."""
    named = {"x-litellm-api-key": SECRET}
    by_hash = parse_order({"kind": "block", "caller": {"x-litellm-api-key": HIDDEN}}, "", 0, [])
    session = parse_order({"kind": "block", "session": {"header:x-chat-token": SECRET}}, "", 0, [])
    plans = make_engine(policy("p", ANY, limit_keys=["jwt:key"])).plans
    claim = [parse_order({"kind": "block", "caller": {"key": SECRET}}, "", 0, known).target for known in (plans, [])]
    engine = make_engine(limited(max_steps=3, session={"keys": ["header:x-chat-token"]}))
    evaluation = engine.prepare(HttpRequest("POST", "/", "host", {"x-chat-token": SECRET.encode(), "x-team": b"t"}))
    assert evaluation is not None
    evaluation.read_body(NO_BODY)

    assert parse_order({"kind": "block", "caller": named}, "", 0, []).target == by_hash.target
    assert [candidate.session for candidate in evaluation.sessions] == [session.target.session]
    assert claim[0] != claim[1]


@pytest.mark.parametrize("value", ["gold", PROCESS_KEY.hide("gold")], ids=["value", "hash"])
def test_a_match_may_name_a_secret_or_its_hash(value: str) -> None:
    """A rule that names `x-auth-plan` compares what the bundle says."""
    config = {"tokens_per_second": 1, "burst": 9}
    rule = {"name": "r", "limit_keys": ["ip:address"], "algorithm": "token_bucket", "algorithm_config": config}
    spec = {"selector": ANY, "mode": "enforce", "rules": [{**rule, "match": {"header:x-auth-plan": value}}]}
    engine = make_engine({"id": "p", "spec": spec})
    (plan,) = engine.plans
    assert plan.budget is not None
    (planned,) = plan.budget.rules

    asked = [HttpRequest("POST", "/", "host", {"x-auth-plan": plan.encode()}) for plan in ("gold", "free")]
    assert [planned.matches(request) for request in asked] == [True, False]


def test_generated_logs_leave_out_queries_with_secrets() -> None:
    """A policy that reads one says that clients send it."""
    keys = ["credential", "query:key", "query:access_token", "query:page", "header:x-api-key"]

    assert [may_stand_in_query(key) for key in keys] == [True, True, True, False, False]


@pytest.mark.parametrize("key", ["body:/api_key", "body:/user/accessToken"])
def test_a_secret_in_a_body_is_read_as_its_hash(key: str) -> None:
    """By policies and by rules, which therefore agree about the caller; an order by value finds it."""
    content = json.dumps({"api_key": SECRET, "user": {"accessToken": SECRET}}).encode()
    config = {"tokens_per_second": 1, "burst": 9}
    rule = {"name": "r", "limit_keys": [key], "algorithm": "token_bucket", "algorithm_config": config}
    document = policy("p", ANY, limit_keys=[key])
    document["spec"]["rules"] = [rule]
    engine = make_engine(document)
    evaluation = engine.prepare(HttpRequest("POST", "/", "host"))
    assert evaluation is not None
    evaluation.read_body(evaluation.sum_up(content), "", content)
    candidate = evaluation.enforcing.candidates[0]
    name = key.partition(":")[2].lower()
    order = parse_order({"kind": "block", "caller": {name: SECRET}}, "", 0, engine.plans)

    assert candidate.values == [(name, HIDDEN)]
    assert candidate.list_credentials() == [HIDDEN]
    assert candidate.tenant == evaluation.budgets[0].reserved[0].tenant == HIDDEN
    assert order.target == Target(caller=HIDDEN)


def test_a_session_named_by_a_cache_key_is_found_by_its_value() -> None:
    """Names of sessions are hashed as they are, wherever they stand."""
    key = "body:/prompt_cache_key"
    engine = make_engine(limited(max_steps=3, session={"keys": [key]}))
    evaluation = engine.prepare(HttpRequest("POST", "/", "host", {"x-team": b"t"}))
    assert evaluation is not None
    content = b'{"prompt_cache_key": "c-1"}'
    evaluation.read_body(evaluation.sum_up(content), "", content)
    order = parse_order({"kind": "kill", "session": {key: "c-1"}}, "", 0, engine.plans)

    assert [candidate.session for candidate in evaluation.sessions] == [order.target.session]
