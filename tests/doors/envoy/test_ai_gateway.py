"""Envoy AI Gateway beside Loopguard, before it and behind it.

A filter stands for its ext_proc, and does what that does by its source (internal/extproc/processor_impl.go): it reads the model
in the body, has the route chosen again by it, and puts the tokens of an answer into dynamic metadata, when the answer is over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import pytest

from tests.support.chart.istio import http_manager
from tests.support.documents import bare_policy, bundle, policy, read_yaml
from tests.support.harness import Stack, eventually
from tests.support.stacks import await_session, open_before_model
from tests.support.usage import Model, Reply, whole

_LUA = """
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
  local places = {input = "prompt_tokens", output = "completion_tokens", cached_input = "cached_tokens"}
  for key, place in pairs(places) do
    metadata:set("io.envoy.ai_gateway", "llm_" .. key .. "_token", tonumber(text:match('"' .. place .. '": *(%d+)') or 0))
  end
  metadata:set("io.envoy.ai_gateway", "model_name_override", "gpt-x")
end
"""
COUNTED = {"prompt_tokens": 5_000_000, "completion_tokens": 1_000_000, "prompt_tokens_details": {"cached_tokens": 1_000_000}}
COST = 4 + 2 + 0.1
"""Dollars."""

PRICES = {"gpt-x": {"input": 1, "cache_read": 0.1, "output": 2}}
KEYS: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}
LIMITS = {"max_cost_per_session": 3 * COST - 0.01, "prices": PRICES}
AGENTS = bare_policy("agents", "/v1/chat", **KEYS, session={"keys": ["header:x-session-id"]}, session_limits=LIMITS)
POLICIES = bundle(AGENTS, policy("loops", {"pathPrefix": "/v1/chat"}, **KEYS))


def add_gateway(config: str, *, before: bool) -> str:
    """With that filter, and a route that only requests with a model take; the others have one that is not guarded."""
    document = read_yaml(config)
    manager = http_manager(document)
    lua = {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua",
        "default_source_code": {"inline_string": _LUA},
    }
    names = [each["name"] for each in manager["http_filters"]]
    at = names.index("envoy.filters.http.ext_proc")
    manager["http_filters"].insert(at if before else at + 1, {"name": "ai-gateway", "typed_config": lua})
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    if before:
        for route in routes[:-1]:
            route["match"]["headers"] = [{"name": "x-ai-eg-model", "present_match": True}]
    return json.dumps(document)


@pytest.fixture(scope="module", params=[True, False], ids=["before", "behind"])
def made(request: pytest.FixtureRequest) -> Iterator[tuple[Stack, Model]]:
    """Both filters, and none of Loopguard's own that read answers."""

    def edit(config: str) -> str:
        assert "json_to_metadata" not in config
        return add_gateway(config, before=request.param)

    with open_before_model(POLICIES, edit=edit, usage="estimated") as opened:
        yield opened


def send(made: tuple[Stack, Model], user: str, number: int, reply: Reply) -> int:
    """The status of a request, whose entry has come if it was let through."""
    one, model = made
    model.reply = reply
    asked = {"model": "gpt-x", "messages": [{"role": "user", "content": f"go {number}"}]}
    logged = one.loopguard.metric("access_log_entries_total", result="taken")
    status = one.post("/v1/chat/completions", asked, {"x-user-id": user, "x-session-id": user}).status
    if status == HTTPStatus.OK:
        eventually(lambda: one.loopguard.metric("access_log_entries_total", result="taken") > logged, "an entry")
    return status


def test_loops_are_counted(made: tuple[Stack, Model]) -> None:
    """Also where the guarded route is chosen by the model, and so late."""
    assert [send(made, "ann", 0, whole(object="chat.completion")) for _ in range(4)] == [200, 200, 429, 429]


def test_sessions_cost_what_the_gateway_counts(made: tuple[Stack, Model]) -> None:
    """Tokens that are cached cost less; nothing is estimated."""
    reply = whole(object="chat.completion", usage=COUNTED)

    assert [send(made, "bob", number, reply) for number in range(4)] == [200, 200, 200, 429]
    run = await_session(made[0], "bob", actual_cost=pytest.approx(3 * COST), estimated_cost=0)
    assert [run["usage"][f"{name}_tokens"] for name in ("input", "cache_read", "output")] == [12_000_000, 3_000_000, 3_000_000]


def test_what_the_gateway_does_not_count_is_estimated(made: tuple[Stack, Model]) -> None:
    """It reports zeros for an answer without usage."""
    assert send(made, "eve", 1, whole(object="chat.completion")) == 200

    run = await_session(made[0], "eve", reserved_cost=0.0)
    assert run["actual_cost"] == run["estimated_cost"] > 0
