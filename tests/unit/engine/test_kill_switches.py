"""Kill switches of drop-in bundles: whom they stop, for how long, and what the client gets."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.main import main
from extproc.engine.engine import Engine
from extproc.engine.handover import POLICY_ATTRIBUTE
from extproc.errors import BundleErrors
from extproc.ext_proc.service import Service
from extproc.metrics import Metrics
from extproc.policy.loader import PolicySet, parse
from extproc.request.http import HttpRequest
from extproc.settings import Settings
from extproc.store.memory import MemoryStore
from tests.support.documents import bundle
from tests.support.kill_switches import GUARDED, switch
from tests.support.messages import headers
from tests.support.service import decoded, exchange, headers_of, sample

NOW = datetime(2026, 6, 1, tzinfo=UTC)
SOON = "2026-06-01T01:00:00Z"
BAD: dict[str, Any] = {"x_user_id": "bad"}
TEAM: dict[str, Any] = {"x_team": "t"}
OVERRIDE = {"enabled": True, "reason": "drill", "expires_at": SOON}


def load(*switches: Mapping[str, object], **more: object) -> PolicySet:
    text = json.dumps(bundle(GUARDED, kill_switches=list(switches), **more)).encode()
    return parse({"b.json": text}, NOW)


def make_service(policies: PolicySet, **settings: Any) -> Service:  # noqa: ANN401  # of the process
    metrics = Metrics()
    store = MemoryStore(metrics)
    chosen = Settings(**settings)
    return Service(Engine(policies, NOW, shadow=chosen.shadow), store, store, metrics, chosen)


def place_of(caplog: pytest.LogCaptureFixture) -> str:
    places = [
        vars(line)["fields"]["place"] for line in caplog.records if line.message == "kill switch"
    ]
    return places[-1].rpartition("/")[2] if places else ""


@pytest.mark.parametrize(
    ("switches", "path", "named", "place"),
    [
        ([switch()], "/guarded", BAD, "0"),
        ([switch()], "/guarded", {"x_user_id": "badx"}, ""),
        ([switch()], "/guarded", {}, ""),
        ([switch("header:X-User-Id")], "/guarded", BAD, "0"),
        ([switch("header:host", "host")], "/guarded", {}, "0"),
        ([switch("header:host", "hostx")], "/guarded", {}, ""),
        (
            [switch("jwt:org_id", "org-1")],
            "/guarded",
            {"authorization": "Bearer e30.eyJvcmdfaWQiOiJvcmctMSJ9.x"},
            "0",
        ),
        (
            [switch("jwt:org_id", "org")],
            "/guarded",
            {"authorization": "Bearer e30.eyJvcmdfaWQiOiJvcmctMSJ9.x"},
            "",
        ),
        ([switch("jwt:org_id")], "/guarded", {}, ""),
        ([switch("query:key", "a b")], "/guarded?x=1&key=a+b", {}, "0"),
        ([switch("query:key", "a b")], "/guarded?x=1&key=a+bx", {}, ""),
        ([switch("query:q")], "/guarded?q=", {}, ""),
        ([switch("query:q")], "/guarded?q=bad", {}, "0"),
        (
            [switch("query:q")],
            "/guarded?" + "&" * 20_000 + "q=bad",
            {},
            "",
        ),  # takes too long to read
        (
            [switch("ip:address", "10.0.0.1")],
            "/guarded",
            {"attributes": {"source.address": "10.0.0.1:7"}},
            "0",
        ),
        (
            [switch("ip:address", "10.0.0.1")],
            "/guarded",
            {"attributes": {"source.address": "10.0.0.10:7"}},
            "",
        ),
        (
            [switch("ip:country", "10.0.0.1")],
            "/guarded",
            {"attributes": {"source.address": "10.0.0.1:7"}},
            "",
        ),
        (
            [switch(route="/guarded/a")],
            "/guarded//%61?b=1",
            BAD,
            "0",
        ),  # the whole path in any spelling
        ([switch(route="/guarded/a")], "/guarded/a/b", BAD, ""),
        ([switch(route="/guarded/a")], "/guarded", BAD, ""),
        ([switch("header:x-team", "t"), switch()], "/guarded", BAD | TEAM, "0"),  # the first wins
        (
            [switch("header:x-team", "u"), switch(route="/guarded"), switch()],
            "/guarded",
            BAD | TEAM,
            "1",
        ),
        ([switch(), switch(), switch("header:x-team", "t")], "/guarded", TEAM, "2"),
        (
            [switch("header:authorization", "Bearer sk-1")],
            "/",
            {"authorization": "Bearer sk-1"},
            "0",
        ),
        (
            [switch("header:authorization", "Bearer sk-1")],
            "/",
            {"authorization": "bearer sk-1"},
            "0",
        ),
        (
            [switch("header:authorization", "Bearer sk-1")],
            "/",
            {"authorization": "BEARER   sk-1 "},
            "0",
        ),
        (
            [switch("header:authorization", "Bearer sk-1")],
            "/",
            {"authorization": "Token sk-1"},
            "0",
        ),
        ([switch("header:authorization", "Bearer sk-1")], "/", {"authorization": "sk-1"}, "0"),
        ([switch("header:authorization", "sk-1")], "/", {"authorization": "Bearer sk-1"}, "0"),
        (
            [switch("header:authorization", "Bearer sk-1")],
            "/",
            {"authorization": "Bearer sk-10"},
            "",
        ),
        ([switch("header:authorization", "Bearer sk-1")], "/", {"authorization": "Bearer"}, ""),
        ([switch("header:authorization", "Bearer sk-1")], "/", {"authorization": ""}, ""),
        ([switch(description="why", **{"x-ticket": "7"})], "/guarded", BAD, "0"),
    ],
)
def test_switch_stops_the_caller_it_names(
    switches: list[Any],
    path: str,
    named: dict[str, Any],
    place: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Values are compared exactly, except for the scheme of a credential."""
    service = make_service(load(*switches), allow_unverified_jwt=True)

    exchange(service, headers(path, **named))

    assert place_of(caplog) == place


@pytest.mark.parametrize(
    ("more", "minutes", "place"),
    [
        ({"kill_switches": [switch(expires_at=SOON)]}, 59, "0"),
        ({"kill_switches": [switch(expires_at=SOON)]}, 60, None),
        ({"kill_switch_override": OVERRIDE}, 59, None),
        ({"kill_switch_override": OVERRIDE}, 60, "0"),
        ({"kill_switch_override": {"enabled": False}}, 0, "0"),
        ({"global_shadow": OVERRIDE}, 0, "0"),
    ],
)
def test_switches_and_overrides_end_without_a_reload(
    more: dict[str, Any], minutes: int, place: str | None
) -> None:
    text = json.dumps(bundle(GUARDED, **{"kill_switches": [switch()], **more})).encode()
    engine = Engine(parse({"b.json": text}, NOW), NOW)

    found = engine.find_switch(
        HttpRequest("GET", "/", "", {"x-user-id": b"bad"}), NOW.timestamp() + minutes * 60
    )

    assert (found and found.place[-1]) == place


def killed(service: Service, mode: str) -> float:
    return sample(service, "kill_switched_total", scope_key="header:x-user-id", mode=mode)


def test_switch_refuses_on_headers_and_counts_nothing(caplog: pytest.LogCaptureFixture) -> None:
    service = make_service(load(switch(reason="abuse")))

    for path in ("/guarded", "/elsewhere"):
        (reply,) = exchange(service, headers(path, x_user_id="bad"))
        answer = decoded(reply)

        assert reply.done
        assert answer.immediate_response.status.code == 429
        sent = headers_of(answer)
        assert (sent["Retry-After"], sent["X-Fairvisor-Reason"]) == ("3600", "kill_switch")
        assert b"abuse" not in answer.immediate_response.body
    assert killed(service, "enforce") == 2
    assert service.metrics.decisions == {}
    (line,) = [
        vars(record)["fields"] for record in caplog.records if record.getMessage() == "kill switch"
    ]
    assert line == {
        "place": "b.json: /kill_switches/0",
        "mode": "enforce",
        "scope_key": "header:x-user-id",
        "reason": "abuse",
        "requests": 1,
    }


def test_switch_in_shadow_is_only_reported() -> None:
    """`serve --shadow` passes the request on to the policies."""
    service = make_service(load(switch()), shadow=True)

    answers = [
        decoded(exchange(service, headers("/guarded", end=True, x_user_id="bad"))[-1])
        for _ in range(3)
    ]

    assert not any(answer.HasField("immediate_response") for answer in answers)
    assert (killed(service, "enforce"), killed(service, "shadow")) == (0, 3)
    assert service.metrics.decisions == {("p", "shadow", "allow"): 2, ("p", "shadow", "reject"): 1}


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/messages", {"type": "error"}),
        ("/mcp", {"jsonrpc": "2.0", "id": None}),
        ("/v1beta/models/m:generateContent", {"error": {"code": 429}}),
        ("/v1/chat/completions", {"error": {"code": "kill_switch"}}),
    ],
    ids=["Anthropic", "MCP", "Gemini", "OpenAI"],
)
def test_refusal_by_switch_has_shape_of_its_api(path: str, shape: dict[str, Any]) -> None:
    message = headers(path, x_user_id="bad", mcp_protocol_version="2025-06-18")
    (reply,) = exchange(make_service(load(switch())), message)

    document = json.loads(decoded(reply).immediate_response.body)
    for key, value in shape.items():
        assert (
            value.items() <= document[key].items()
            if isinstance(value, dict)
            else document[key] == value
        )
    assert "kill_switch" in document["error"]["message"]


def test_route_may_carry_a_switch() -> None:
    service = make_service(load())
    attribute = {POLICY_ATTRIBUTE: json.dumps(bundle(kill_switches=[switch()]))}

    answers = [
        exchange(service, headers("/", attributes=given, x_user_id="bad"))
        for given in (attribute, {})
    ]

    assert [decoded(answer).immediate_response.status.code for (answer,) in answers] == [429, 0]


KEYS = ("scope_key", "scope_value", "route", "reason", "expires_at")
KEY = (
    "scope_key must be 'jwt:<claim>', 'header:<name>', 'query:<name>' (names of letters, "
    "digits, '_' and '-') or 'ip:address'"
)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (switch("user"), [("scope_key", f"{KEY}, not 'user'")]),
        (switch("body:/user"), [("scope_key", f"{KEY}, not 'body:/user'")]),
        (switch("header:x user"), [("scope_key", f"{KEY}, not 'header:x user'")]),
        (switch(value=""), [("scope_value", "scope_value must not be empty")]),
        ({"scope_value": "v"}, [("scope_key", "scope_key is required")]),
        (
            {"scope_key": "jwt:a", "scope_value": 1},
            [("scope_value", "scope_value must be a string, not 1")],
        ),
        (switch(route="guarded"), [("route", "route must start with '/', not 'guarded'")]),
        (switch(reason=7), [("reason", "reason must be a string, not 7")]),
        (switch(ttl="x"), [("ttl", f"unknown key; known keys are {', '.join(KEYS)}")]),
        (switch(expiresat="x"), [("expiresat", "unknown key; did you mean expires_at?")]),
        (
            "bad",
            [
                (
                    "",
                    (
                        "it must be an object "
                        f"{{{', '.join(f'{chr(34)}{key}{chr(34)}' for key in KEYS)}}}, not 'bad'"
                    ),
                )
            ],
        ),
    ],
)
def test_bad_switch_is_an_error_at_its_place(entry: Any, expected: list[tuple[str, str]]) -> None:  # noqa: ANN401  # any JSON
    with pytest.raises(BundleErrors) as failure:
        load(switch(), entry)

    found = [
        (error.pointer.removeprefix("/kill_switches/1").removeprefix("/"), error.message)
        for error in failure.value.errors
    ]
    assert found == expected


def test_switch_that_cannot_act_is_reported() -> None:
    policies = load(
        switch("ip:country", "XX"), switch(expires_at="2026-05-31T00:00:00Z"), switch(route="/v1/")
    )

    derived = (
        "the descriptor ip:country cannot be derived by Loopguard, so this kill switch stops no one"
    )
    assert [(part.pointer, part.message) for part in policies.unenforced] == [
        ("/kill_switches/0", derived)
    ]
    assert [(part.pointer, part.message.partition(":")[0]) for part in policies.warnings] == [
        ("/kill_switches/1/expires_at", "expired at 2026-05-31T00"),
        (
            "/kill_switches/2/route",
            "'/v1/' is compared with the whole path of a request; it is not a prefix",
        ),
    ]


def test_explain_names_the_switch_that_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "b.json"
    file.write_text(json.dumps(bundle(GUARDED, kill_switches=[switch(reason="abuse")])))
    asked = ["explain", "--policy", str(file), "-H", "x-user-id: bad", "http://h/guarded"]

    assert main(asked) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"kill switch  {file}: /kill_switches/0 (header:x-user-id)",
        "reason       abuse",
        "decision     reject with 429 (Retry-After: 3600)",
        "",
    ]
    assert main([*asked, "--shadow"]) == 0
    assert "report: would reject with 429" in (printed := capsys.readouterr().out)
    assert "policy       p (shadow)" in printed
