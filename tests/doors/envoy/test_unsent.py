"""Requests that another filter of Envoy refuses behind Loopguard: they are no loop, however often they are sent again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.budget_policies import bucket
from tests.support.documents import bundle, policy, read_yaml
from tests.support.harness import Stack, eventually, stack

_TYPE = "type.googleapis.com/envoy.extensions.filters.http"
_LUA = """
function envoy_on_request(handle)
  local status = handle:headers():get("x-answer")
  if status then handle:respond({[":status"] = status}, "no") end
end
"""
REFUSALS = {"401": {"x-answer": "401"}, "429": {"x-answer": "429"}, "403": {"x-deny": "1"}, "503": {"x-empty": "1"}}
"""By status, the header of requests that are answered so."""


def add_refusals(config: str) -> str:
    """The same configuration with a Lua filter and RBAC behind Loopguard, and a route to a cluster without hosts."""
    document = read_yaml(config)
    document["static_resources"]["clusters"].append({"name": "empty", "type": "STATIC"})
    manager = document["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    denied = {"permissions": [{"any": True}], "principals": [{"header": {"name": "x-deny", "present_match": True}}]}
    filters: list[dict[str, Any]] = [
        {"name": "lua", "typed_config": {"@type": f"{_TYPE}.lua.v3.Lua", "default_source_code": {"inline_string": _LUA}}},
        {
            "name": "rbac",
            "typed_config": {"@type": f"{_TYPE}.rbac.v3.RBAC", "rules": {"action": "DENY", "policies": {"p": denied}}},
        },
    ]
    manager["http_filters"][-1:-1] = filters
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    empty = json.loads(json.dumps(routes[0]))
    empty["match"]["headers"] = [{"name": "x-empty", "present_match": True}]
    empty |= {"name": "empty", "route": {"cluster": "empty"}}
    routes.insert(0, empty)
    return json.dumps(document)


@pytest.fixture(scope="module")
def made() -> Any:  # noqa: ANN401  # a generator
    """A stack with other filters behind Loopguard."""
    key: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}
    document = bundle(
        policy("taken-back", {"pathPrefix": "/a"}, count_failed=False, **key), policy("kept", {"pathPrefix": "/b"}, **key)
    )
    paid = policy("paid", {"pathPrefix": "/c"}, count_failed=False, **key)
    paid["spec"]["rules"] = [bucket(per_second=0.001, burst=5) | key]
    document["policies"].append(paid)
    with stack(document, edit=add_refusals) as running:
        yield running


def repeat(made: Stack, path: str, headers: dict[str, str], times: int) -> list[int]:
    """Statuses of equal requests, each sent once the entry of the one before it has come."""
    taken = made.loopguard.metric("access_log_entries_total", result="taken")
    statuses = []
    for number in range(1, times + 1):
        statuses.append(made.send(path, method="POST", body=b"x", headers=headers).status)
        if path == "/a" and number > 1:  # the first of a window stays
            expected = taken + number - 1
            eventually(lambda: made.loopguard.metric("access_log_entries_total", result="taken") >= expected)  # noqa: B023
    return statuses


@pytest.mark.parametrize("status", REFUSALS)
def test_what_another_filter_refuses_is_no_loop(made: Stack, status: str) -> None:
    """It never reached the upstream; once it does, the same requests are a loop, and Loopguard's refusals keep counting."""
    user = {"x-user-id": f"user-{status}"}

    refused = repeat(made, "/a", {**user, **REFUSALS[status]}, 8)
    passed = [made.send("/a", method="POST", body=b"x", headers=user).status for _ in range(5)]

    assert refused == [int(status)] * 8
    assert passed[-3:] == [429] * 3
    assert 200 in passed


@pytest.mark.parametrize("status", ["401", "403", "429"])
def test_what_another_filter_refuses_costs_nothing(made: Stack, status: str) -> None:
    """Twelve requests of five are refused elsewhere; each is given back when Envoy has logged it, and five more pass."""
    user, taken = {"x-user-id": f"payer-{status}"}, made.loopguard.metric("access_log_entries_total", result="taken")

    def send(text: str, **more: str) -> int:
        return made.send("/c", method="POST", body=text.encode(), headers={**user, **more}).status

    refused = []
    for number in range(12):
        refused.append(send(f"refused {number}", **REFUSALS[status]))
        eventually(lambda: made.loopguard.metric("access_log_entries_total", result="taken") > taken + number)  # noqa: B023
    passed = [send(f"passed {number}") for number in range(6)]

    assert refused == [int(status)] * 12
    assert passed == [200] * 5 + [429]


def test_other_policies_count_what_was_refused(made: Stack) -> None:
    """Without `count_failed: false`, a third request is refused by Loopguard."""
    found = repeat(made, "/b", {"x-user-id": "other", "x-answer": "401"}, 4)

    assert found == [401, 401, 429, 429]
