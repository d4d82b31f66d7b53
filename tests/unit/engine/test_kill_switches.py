"""The kill switches of drop-in bundles: which callers they stop, by what, for how long, and what a client is told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.main import main
from extproc.engine.engine import Engine
from extproc.errors import BundleErrors
from extproc.ext_proc.service import Service
from extproc.metrics import Metrics
from extproc.policy.loader import PolicySet, parse
from extproc.request.http import HttpRequest, StatedFacts
from extproc.settings import Settings
from extproc.store.memory import MemoryStore
from tests.support.documents import bundle
from tests.support.kill_switches import GUARDED, switch
from tests.support.messages import headers
from tests.support.service import decoded, exchange

NOW = datetime(2026, 6, 1, tzinfo=UTC)
SOON = "2026-06-01T01:00:00Z"
LATE = "2026-06-01T02:00:00Z"


def load(*switches: Mapping[str, object], **more: object) -> PolicySet:
    """A bundle with these kill switches."""
    text = json.dumps(bundle(GUARDED, kill_switches=list(switches), **more)).encode()
    return parse({"b.json": text}, NOW)


def find(policies: PolicySet, target: str = "/guarded", *, now: datetime = NOW, **more: Any) -> str | None:  # noqa: ANN401
    """Where the kill switch stands that holds for a request; `x_a` is the header `x-a`."""
    facts = StatedFacts(address=more.pop("address", ""), claims=more.pop("claims", {}))
    values = {name.replace("_", "-"): value.encode() for name, value in more.items()}
    found = Engine(policies, NOW).find_switch(HttpRequest("GET", target, "api", values, facts), now.timestamp())
    return found.place.rpartition("/")[2] if found is not None else None


@pytest.mark.parametrize(
    ("key", "value", "request_with"),
    [
        ("header:x-user-id", "bad", {"x_user_id": "bad"}),
        ("header:X-User-Id", "bad", {"x_user_id": "bad"}),
        ("header:host", "api", {}),
        ("jwt:org_id", "org-1", {"claims": {"org_id": "org-1"}}),
        ("query:key", "a b", {"target": "/guarded?x=1&key=a+b"}),
        ("ip:address", "10.0.0.1", {"address": "10.0.0.1"}),
    ],
)
def test_a_switch_names_a_caller(key: str, value: str, request_with: dict[str, Any]) -> None:
    """Each kind of descriptor can select the caller that a switch stops; its value is compared exactly."""
    assert find(load(switch(key, value)), **request_with) == "0"
    assert find(load(switch(key, f"{value}x")), **request_with) is None


def test_a_caller_without_the_descriptor_is_not_stopped() -> None:
    """Nothing is no value."""
    assert find(load(switch(), switch("jwt:org_id"), switch("query:q")), target="/guarded?q=") is None


def test_a_route_is_the_whole_path() -> None:
    """A switch with a route stops requests to that path in any spelling, and to no other."""
    policies = load(switch(route="/guarded/a"))

    assert find(policies, "/guarded//%61?b=1", x_user_id="bad") == "0"
    assert find(policies, "/guarded/a/b", x_user_id="bad") is None
    assert find(policies, "/guarded", x_user_id="bad") is None


def test_the_first_of_the_bundle_wins() -> None:
    """Of several that hold, the one that stands first is told."""
    assert find(load(switch("header:x-team", "t"), switch()), x_user_id="bad", x_team="t") == "0"
    assert find(load(switch("header:x-team", "u"), switch(route="/guarded"), switch()), x_user_id="bad", x_team="t") == "1"
    assert find(load(switch(), switch(), switch("header:x-team", "t")), x_team="t") == "2"


def test_a_switch_ends_while_the_server_runs() -> None:
    """From `expires_at` on a switch does nothing, without a reload."""
    policies = load(switch(expires_at=SOON))

    assert find(policies, now=NOW + timedelta(minutes=59), x_user_id="bad") == "0"
    assert find(policies, now=NOW + timedelta(minutes=60), x_user_id="bad") is None


def test_an_override_switches_them_off_while_it_holds() -> None:
    """`kill_switch_override` spares all callers; when it ends, the switches act, without a reload."""
    policies = load(switch(), kill_switch_override={"enabled": True, "reason": "drill", "expires_at": SOON})

    assert find(policies, x_user_id="bad") is None
    assert find(policies, now=NOW + timedelta(hours=1), x_user_id="bad") == "0"
    assert find(load(switch(), kill_switch_override={"enabled": False}), x_user_id="bad") == "0"


def test_a_query_that_takes_long_to_read_is_not_read() -> None:
    """A hostile query delays no other request: it counts as one without the parameter, which its client could have left out."""
    policies = load(switch("query:q"))

    assert find(policies, "/guarded?q=bad") == "0"
    assert find(policies, "/guarded?" + "&" * 20_000 + "q=bad") is None


def make_service(policies: PolicySet, **settings: Any) -> Service:  # noqa: ANN401  # of the process
    """A service for these policies."""
    metrics = Metrics()
    store = MemoryStore(metrics)
    chosen = Settings(**settings)
    return Service(Engine(policies, NOW, shadow=chosen.shadow), store, store, metrics, chosen)


def killed(service: Service, mode: str) -> float | None:
    """How many requests were stopped, or would have been."""
    labels = {"scope_key": "header:x-user-id", "mode": mode}
    return service.metrics.registry.get_sample_value("loopguard_kill_switched_total", labels)


def test_a_switch_is_asked_before_anything_else(caplog: pytest.LogCaptureFixture) -> None:
    """A request is refused on its headers, whether a policy matches it or not; nothing is counted, one line is logged."""
    service = make_service(load(switch(reason="abuse")))

    for path in ("/guarded", "/elsewhere"):
        (reply,) = exchange(service, headers(path, x_user_id="bad"))
        answer = decoded(reply)

        assert reply.done
        assert answer.immediate_response.status.code == 429
        sent = {item.header.key: item.header.raw_value for item in answer.immediate_response.headers.set_headers}
        assert sent["Retry-After"] == b"3600"
        assert sent["X-Fairvisor-Reason"] == b"kill_switch"
        assert b"abuse" not in answer.immediate_response.body
    assert killed(service, "enforce") == 2
    assert service.metrics.decisions == {}
    (line,) = [vars(record)["fields"] for record in caplog.records if record.getMessage() == "kill switch"]
    assert line == {
        "place": "b.json: /kill_switches/0",
        "mode": "enforce",
        "scope_key": "header:x-user-id",
        "reason": "abuse",
        "requests": 1,
    }


def test_in_shadow_a_switch_is_reported_and_does_nothing() -> None:
    """`serve --shadow` never acts: the request is passed on to the policies."""
    service = make_service(load(switch()), shadow=True)

    answers = [decoded(exchange(service, headers("/guarded", end=True, x_user_id="bad"))[-1]) for _ in range(3)]

    assert not any(answer.HasField("immediate_response") for answer in answers)
    assert (killed(service, "enforce"), killed(service, "shadow")) == (None, 3)
    assert service.metrics.decisions == {("p", "shadow", "allow"): 2, ("p", "shadow", "reject"): 1}


def test_a_global_shadow_is_about_policies() -> None:
    """`kill_switch_override` is what switches kill switches off."""
    assert find(load(switch(), global_shadow={"enabled": True, "expires_at": LATE}), x_user_id="bad") == "0"


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
def test_a_refusal_has_the_shape_of_its_api(path: str, shape: dict[str, Any]) -> None:
    """The path or the headers say which API is called; its clients find the reason where they look for it."""
    message = headers(path, x_user_id="bad", mcp_protocol_version="2025-06-18")
    (reply,) = exchange(make_service(load(switch())), message)

    document = json.loads(decoded(reply).immediate_response.body)
    for key, value in shape.items():
        assert value.items() <= document[key].items() if isinstance(value, dict) else document[key] == value
    assert "kill_switch" in document["error"]["message"]


def test_a_switch_comes_with_a_route_as_well(caplog: pytest.LogCaptureFixture) -> None:
    """A bundle in the metadata of a route has kill switches for the route's requests."""
    service = make_service(load())
    carried = json.dumps(bundle(kill_switches=[switch()]))
    attribute = {"xds.route_metadata.filter_metadata['loopguard']['policy_json']": carried}

    (stopped,) = exchange(service, headers("/", attributes=attribute, x_user_id="bad"))
    (other,) = exchange(service, headers("/", x_user_id="bad"))

    assert decoded(stopped).immediate_response.status.code == 429
    assert not decoded(other).HasField("immediate_response")
    assert "refused" not in caplog.text


KEYS = ("scope_key", "scope_value", "route", "reason", "expires_at")
KEY = "scope_key must be 'jwt:<claim>', 'header:<name>', 'query:<name>' (names of letters, digits, '_' and '-') or 'ip:address'"


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (switch("user"), [("scope_key", f"{KEY}, not 'user'")]),
        (switch("body:/user"), [("scope_key", f"{KEY}, not 'body:/user'")]),
        (switch("header:x user"), [("scope_key", f"{KEY}, not 'header:x user'")]),
        (switch(value=""), [("scope_value", "scope_value must not be empty")]),
        ({"scope_value": "v"}, [("scope_key", "scope_key is required")]),
        ({"scope_key": "jwt:a", "scope_value": 1}, [("scope_value", "scope_value must be a string, not 1")]),
        (switch(route="guarded"), [("route", "route must start with '/', not 'guarded'")]),
        (switch(reason=7), [("reason", "reason must be a string, not 7")]),
        (switch(ttl="x"), [("ttl", f"unknown key; known keys are {', '.join(KEYS)}")]),
        (switch(expiresat="x"), [("expiresat", "unknown key; did you mean expires_at?")]),
        ("bad", [("", f"it must be an object {{{', '.join(f'{chr(34)}{key}{chr(34)}' for key in KEYS)}}}, not 'bad'")]),
    ],
)
def test_a_bad_switch_is_an_error_at_its_place(entry: Any, expected: list[tuple[str, str]]) -> None:  # noqa: ANN401  # any JSON
    """Each error is reported with its place, whatever other errors there are."""
    with pytest.raises(BundleErrors) as failure:
        load(switch(), entry)

    found = [
        (error.pointer.removeprefix("/kill_switches/1").removeprefix("/"), error.message) for error in failure.value.errors
    ]
    assert found == expected


def test_annotations_are_allowed() -> None:
    """`description` and `x-...` are allowed beside a switch's own keys."""
    assert find(load(switch(description="why", **{"x-ticket": "7"})), x_user_id="bad") == "0"


def test_what_cannot_act_is_told() -> None:
    """A descriptor that cannot be derived is unenforced; an expired switch and a route like a prefix are warnings."""
    policies = load(switch("ip:country", "XX"), switch(expires_at="2026-05-31T00:00:00Z"), switch(route="/v1/"))

    derived = "the descriptor ip:country cannot be derived by Loopguard, so this kill switch stops no one"
    assert [(part.pointer, part.message) for part in policies.unenforced] == [("/kill_switches/0", derived)]
    assert [(part.pointer, part.message.partition(":")[0]) for part in policies.warnings] == [
        ("/kill_switches/1/expires_at", "expired at 2026-05-31T00"),
        ("/kill_switches/2/route", "'/v1/' is compared with the whole path of a request; it is not a prefix"),
    ]


def test_explain_names_the_switch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A request that a switch stops gets no further, and `explain` says where the switch stands and why it is there."""
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
