"""Requests that another filter of Envoy refuses behind Loopguard: they are no loop, however often they are sent again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.support.budget_policies import bucket
from tests.support.chart.istio import http_manager
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
    manager = http_manager(document)
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


KEYS: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}
PAID = policy("paid", {"pathPrefix": "/c"}, count_failed=False, **KEYS)
PAID["spec"]["rules"] = [bucket(per_second=0.001, burst=5) | KEYS]
TAKEN_BACK = policy("taken-back", {"pathPrefix": "/a"}, count_failed=False, **KEYS)


@pytest.fixture(scope="module")
def made() -> Iterator[Stack]:
    """A stack with other filters behind Loopguard."""
    with stack(bundle(TAKEN_BACK, policy("kept", {"pathPrefix": "/b"}, **KEYS), PAID), edit=add_refusals) as running:
        yield running


def send(made: Stack, path: str, headers: dict[str, str], bodies: Sequence[bytes], *, first: int = 1) -> list[int]:
    """Statuses of requests, each sent once the entry of the one before it has come; before the first one, none does."""
    taken = made.loopguard.metric("access_log_entries_total", result="taken")
    statuses = []
    for number, body in enumerate(bodies, start=1 - first):
        statuses.append(made.post(path, body, headers).status)
        eventually(lambda: made.loopguard.metric("access_log_entries_total", result="taken") >= taken + number)  # noqa: B023
    return statuses


@pytest.mark.parametrize("status", REFUSALS)
def test_what_another_filter_refuses_is_no_loop(made: Stack, status: str) -> None:
    """It never reached the upstream; once it does, the same requests are a loop, and Loopguard's refusals keep counting."""
    user = {"x-user-id": f"user-{status}"}

    refused = send(made, "/a", {**user, **REFUSALS[status]}, [b"x"] * 8)  # the first of a window stays
    passed = made.repeat("/a", 5, body=b"x", headers=user)

    assert refused == [int(status)] * 8
    assert passed[-3:] == [429] * 3
    assert 200 in passed


@pytest.mark.parametrize("status", ["401", "403", "429"])
def test_what_another_filter_refuses_costs_nothing(made: Stack, status: str) -> None:
    """Twelve requests of five are refused elsewhere; each is given back when Envoy has logged it, and five more pass."""
    user, bodies = {"x-user-id": f"payer-{status}"}, [b"%d" % number for number in range(12)]

    refused = send(made, "/c", {**user, **REFUSALS[status]}, bodies, first=0)
    passed = [made.post("/c", b"passed %b" % body, user).status for body in bodies[:6]]

    assert refused == [int(status)] * 12
    assert passed == [200] * 5 + [429]


def test_other_policies_count_what_was_refused(made: Stack) -> None:
    """Without `count_failed: false`, a third request is refused by Loopguard."""
    assert made.repeat("/b", 4, body=b"x", headers={"x-user-id": "other", "x-answer": "401"}) == [401, 401, 429, 429]
