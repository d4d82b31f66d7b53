"""Other filters of Envoy beside Loopguard: filters that refuse requests, and Envoy AI Gateway's."""

import json
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Any

import pytest

from tests.support.budget_policies import bucket
from tests.support.chart.istio import http_manager
from tests.support.documents import bare_policy, bundle, policy, read_yaml
from tests.support.harness import Stack, eventually, stack
from tests.support.stacks import await_session, open_before_model
from tests.support.usage import Model, Reply, whole

_TYPE = "type.googleapis.com/envoy.extensions.filters.http"
_LUA = """
function envoy_on_request(handle)
  local status = handle:headers():get("x-answer")
  if status then handle:respond({[":status"] = status}, "no") end
end
"""
# By status, the header of requests that are answered with it.
REFUSALS = {
    "401": {"x-answer": "401"},
    "429": {"x-answer": "429"},
    "403": {"x-deny": "1"},
    "503": {"x-empty": "1"},
}


def add_refusals(config: str) -> str:
    """A Lua filter and RBAC behind Loopguard, and a route to a cluster without hosts."""
    document = read_yaml(config)
    document["static_resources"]["clusters"].append({"name": "empty", "type": "STATIC"})
    manager = http_manager(document)
    denied = {
        "permissions": [{"any": True}],
        "principals": [{"header": {"name": "x-deny", "present_match": True}}],
    }
    filters: list[dict[str, Any]] = [
        {
            "name": "lua",
            "typed_config": {
                "@type": f"{_TYPE}.lua.v3.Lua",
                "default_source_code": {"inline_string": _LUA},
            },
        },
        {
            "name": "rbac",
            "typed_config": {
                "@type": f"{_TYPE}.rbac.v3.RBAC",
                "rules": {"action": "DENY", "policies": {"p": denied}},
            },
        },
    ]
    manager["http_filters"][-1:-1] = filters
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    empty = json.loads(json.dumps(routes[0]))
    empty["match"]["headers"] = [{"name": "x-empty", "present_match": True}]
    empty |= {"name": "empty", "route": {"cluster": "empty"}}
    routes.insert(0, empty)
    return json.dumps(document)


KEYS: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}
PAID = policy("paid", {"pathPrefix": "/c"}, count_failed=False, **KEYS)
PAID["spec"]["rules"] = [bucket(per_second=0.001, burst=5) | KEYS]
TAKEN_BACK = policy("taken-back", {"pathPrefix": "/a"}, count_failed=False, **KEYS)


@pytest.fixture(scope="module")
def made() -> Iterator[Stack]:
    with stack(
        bundle(TAKEN_BACK, policy("kept", {"pathPrefix": "/b"}, **KEYS), PAID), edit=add_refusals
    ) as running:
        yield running


def send(
    made: Stack, path: str, headers: dict[str, str], bodies: Sequence[bytes], *, first: int = 1
) -> list[int]:
    """Statuses of requests, each sent once the log entry of the one before has come.

    The first ones have no entry.
    """
    taken = made.loopguard.metric("access_log_entries_total", result="taken")
    statuses = []
    for number, body in enumerate(bodies, start=1 - first):
        statuses.append(made.post(path, body, headers).status)
        eventually(
            lambda: (
                made.loopguard.metric("access_log_entries_total", result="taken") >= taken + number  # noqa: B023
            )
        )
    return statuses


@pytest.mark.parametrize("status", REFUSALS)
def test_requests_refused_by_other_filters_are_no_loop(made: Stack, status: str) -> None:
    """Once they reach the upstream they are a loop, and Loopguard's refusals count."""
    user = {"x-user-id": f"user-{status}"}

    # The first of a window stays
    refused = send(made, "/a", {**user, **REFUSALS[status]}, [b"x"] * 8)
    passed = made.repeat("/a", 5, body=b"x", headers=user)

    assert (refused, passed[-3:]) == ([int(status)] * 8, [429] * 3)
    assert 200 in passed


@pytest.mark.parametrize("status", ["401", "403"])
def test_requests_refused_by_other_filters_cost_nothing(made: Stack, status: str) -> None:
    user, bodies = {"x-user-id": f"payer-{status}"}, [b"%d" % number for number in range(12)]

    refused = send(made, "/c", {**user, **REFUSALS[status]}, bodies, first=0)
    passed = [made.post("/c", b"passed %b" % body, user).status for body in bodies[:6]]

    assert (refused, passed) == ([int(status)] * 12, [200] * 5 + [429])


def test_refused_requests_count_without_count_failed_false(made: Stack) -> None:
    assert made.repeat("/b", 4, body=b"x", headers={"x-user-id": "other", "x-answer": "401"}) == [
        401,
        401,
        429,
        429,
    ]


_GATEWAY = """
function envoy_on_request(handle)
  local body = handle:body()
  local model = body and body:getBytes(0, body:length()):match('"model": *"([^"]*)"')
  if model then
    handle:headers():replace("x-ai-eg-model", model)
    handle:clearRouteCache()
  end
end
function envoy_on_response(handle)
  local text = ""
  for chunk in handle:bodyChunks() do text = text .. chunk:getBytes(0, chunk:length()) end
  local metadata = handle:streamInfo():dynamicMetadata()
  local places = {
    input = "prompt_tokens", output = "completion_tokens", cached_input = "cached_tokens"
  }
  for key, place in pairs(places) do
    local found = tonumber(text:match('"' .. place .. '": *(%d+)') or 0)
    metadata:set("io.envoy.ai_gateway", "llm_" .. key .. "_token", found)
  end
  metadata:set("io.envoy.ai_gateway", "model_name_override", "gpt-x")
end
"""
COUNTED = {
    "prompt_tokens": 5_000_000,
    "completion_tokens": 1_000_000,
    "prompt_tokens_details": {"cached_tokens": 1_000_000},
}
COST = 4 + 2 + 0.1  # dollars
PRICES = {"gpt-x": {"input": 1, "cache_read": 0.1, "output": 2}}
LIMITS = {"max_cost_per_session": 3 * COST - 0.01, "prices": PRICES}
AGENTS = bare_policy(
    "agents", "/v1/chat", **KEYS, session={"keys": ["header:x-session-id"]}, session_limits=LIMITS
)
POLICIES = bundle(AGENTS, policy("loops", {"pathPrefix": "/v1/chat"}, **KEYS))


def add_gateway(config: str, *, before: bool) -> str:
    """That filter, and a guarded route for requests with a model; others have one without guard."""
    document = read_yaml(config)
    manager = http_manager(document)
    lua = {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua",
        "default_source_code": {"inline_string": _GATEWAY},
    }
    names = [each["name"] for each in manager["http_filters"]]
    at = names.index("envoy.filters.http.ext_proc")
    manager["http_filters"].insert(
        at if before else at + 1, {"name": "ai-gateway", "typed_config": lua}
    )
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    if before:
        for route in routes[:-1]:
            route["match"]["headers"] = [{"name": "x-ai-eg-model", "present_match": True}]
    return json.dumps(document)


@pytest.fixture(scope="module", params=[True, False], ids=["before", "behind"])
def gateway(request: pytest.FixtureRequest) -> Iterator[tuple[Stack, Model]]:
    def edit(config: str) -> str:
        assert "json_to_metadata" not in config
        return add_gateway(config, before=request.param)

    with open_before_model(POLICIES, edit=edit, usage="estimated") as opened:
        yield opened


def ask_gateway(gateway: tuple[Stack, Model], user: str, number: int, reply: Reply) -> int:
    one, model = gateway
    model.reply = reply
    asked = {"model": "gpt-x", "messages": [{"role": "user", "content": f"go {number}"}]}
    logged = one.loopguard.metric("access_log_entries_total", result="taken")
    status = one.post(
        "/v1/chat/completions", asked, {"x-user-id": user, "x-session-id": user}
    ).status
    if status == HTTPStatus.OK:
        eventually(
            lambda: one.loopguard.metric("access_log_entries_total", result="taken") > logged,
            "an entry",
        )
    return status


def test_loops_beside_an_ai_gateway_are_refused(gateway: tuple[Stack, Model]) -> None:
    assert [ask_gateway(gateway, "ann", 0, whole(object="chat.completion")) for _ in range(4)] == [
        200,
        200,
        429,
        429,
    ]


def test_session_costs_are_those_the_gateway_counts(gateway: tuple[Stack, Model]) -> None:
    reply = whole(object="chat.completion", usage=COUNTED)

    assert [ask_gateway(gateway, "bob", number, reply) for number in range(4)] == [
        200,
        200,
        200,
        429,
    ]
    run = await_session(gateway[0], "bob", actual_cost=pytest.approx(3 * COST), estimated_cost=0)
    assert [run["usage"][f"{name}_tokens"] for name in ("input", "cache_read", "output")] == [
        12_000_000,
        3_000_000,
        3_000_000,
    ]


def test_answers_the_gateway_does_not_count_are_estimated(gateway: tuple[Stack, Model]) -> None:
    """It reports zeros for an answer without usage."""
    assert ask_gateway(gateway, "eve", 1, whole(object="chat.completion")) == 200

    run = await_session(gateway[0], "eve", reserved_cost=0.0)
    assert run["actual_cost"] == run["estimated_cost"] > 0
