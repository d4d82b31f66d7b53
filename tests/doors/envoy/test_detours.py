"""Requests that pass Loopguard on a real Envoy do so where `check-envoy` says it: by a finding, or by a note."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from tests.support.check_envoy import MANAGER, Json, find, report
from tests.support.documents import bundle, policy
from tests.support.envoy_config import verdict
from tests.support.harness import envoy_version, stack
from tests.support.routes import (
    ROUTES,
    before,
    by_template,
    good,
    header,
    regex,
    rewriting,
    templated,
    treed,
    wrapped,
)

CHAT = bundle(policy("chat", {"pathPrefix": "/chat"}, limit_keys=["header:x-user-id"]))
USER = {"x-user-id": "ann"}


def never(document: Json) -> Json:
    """The guarded route takes no request."""
    find(document, f"{ROUTES}/0/match")["runtime_fraction"] = {"default_value": {"numerator": 0}}
    return document


def shift(match: Json, rewrite: Json) -> Callable[[Json], Json]:
    """An unguarded route that rewrites its path."""

    def edit(document: Json) -> Json:
        before(match, document)
        find(document, f"{ROUTES}/0/route").update(rewrite)
        return document

    return edit


DETOURS: Mapping[str, tuple[Callable[[Json], Json], str, dict[str, str], str]] = {
    "case": (lambda made: before({"prefix": "/CHAT", "case_sensitive": False}, made), "/chat/x", {}, "unguarded"),
    "template": (lambda made: before(templated("/{x=**}"), made), "/chat/x", {}, "unguarded"),
    "RE2": (lambda made: before({"safe_regex": {"regex": "/[[:alpha:]]+/x"}}, made), "/chat/x", {}, "not-judged"),
    "tree": (lambda made: treed(made, guarded=False), "/chat/x", {"x-tier": "gold"}, "not-judged"),
    "fraction": (never, "/chat/x", {}, "unguarded"),
    "matcher": (lambda made: wrapped(made, header("x-skip")), "/chat/x", {"x-skip": "yes"}, "skipped"),
    "alias by regex": (shift({"prefix": "/alias/"}, regex("^/alias/(.*)$", "/chat/\\1")), "/alias/x", {}, "alias"),
    "alias by root": (shift({"prefix": "/alias/"}, {"prefix_rewrite": "/"}), "/alias/chat/x", {}, "alias"),
    "alias by template": (shift(templated("/alias/{x=**}"), by_template("/chat/{x}")), "/alias/x", {}, "alias"),
}


def keep(edit: Callable[[Json], Json], kept: list[Json]) -> Callable[[str], str]:
    """For `stack`: a changed configuration, which is kept as well."""

    def change(text: str) -> str:
        kept.append(edit(yaml.safe_load(text)))
        return json.dumps(kept[0])

    return change


def open_host(document: Json) -> Json:
    """The virtual host for all others is not guarded."""
    hosts = find(document, f"{MANAGER}/route_config/virtual_hosts")
    hosts[0]["domains"] = ["api.example"]
    hosts.append({"name": "rest", "domains": ["*"], "routes": [{**hosts[0]["routes"][1], "name": "open"}]})
    return document


def test_a_port_in_the_host_that_passes_loopguard_is_told() -> None:
    """Envoy takes the virtual host for all others, which is not guarded."""
    policies = bundle(policy("chat", {"pathPrefix": "/chat", "hosts": ["api.example"]}, limit_keys=["header:x-user-id"]))
    kept: list[Json] = []
    with stack(policies, edit=keep(open_host, kept)) as running:
        answers = [running.send("/chat/x", headers={**USER, "host": f"api.example{port}"}).status for port in ("", ":1")]
        asked = running.loopguard.metric("requests_total")

    assert (answers, asked) == ([200, 200], 1)
    assert [finding.code for finding in report(kept[0], policies).findings] == ["host-port"]


@pytest.mark.parametrize("name", DETOURS)
def test_a_request_that_passes_loopguard_is_told(name: str) -> None:
    """It reaches the upstream under a guarded path, Loopguard is not asked, and the check says why."""
    edit, path, headers, code = DETOURS[name]
    kept: list[Json] = []
    with stack(CHAT, edit=keep(edit, kept)) as running:
        answer = running.send(path, headers={**USER, **headers})
        asked = running.loopguard.metric("requests_total") + running.loopguard.metric("unmatched_total")

    assert (answer.status, asked, running.upstream.seen[-1].target) == (200, 0, "/chat/x")
    for policies in (None, CHAT):
        assert code in [finding.code for finding in report(kept[0], policies).findings]


def ignore_case(document: Json) -> Json:
    """The guarded route takes paths in any case."""
    find(document, f"{ROUTES}/0/match")["case_sensitive"] = False
    return document


def test_a_guarded_request_that_matches_no_policy_is_told() -> None:
    """Envoy sends `/CHAT` to Loopguard, whose policies are for `/chat`."""
    kept: list[Json] = []
    with stack(CHAT, edit=keep(ignore_case, kept)) as running:
        running.send("/CHAT/x", headers=USER)
        assert running.loopguard.metric("unmatched_total") == 1

    assert [finding.code for finding in report(kept[0], CHAT).findings] == ["unmatched"]


@pytest.mark.parametrize(
    "document",
    [
        treed(good(), guarded=True),
        wrapped(good(), header("x-skip")),
        rewriting({"prefix": "/alias/"}, {"path_rewrite": "/chat/%REQ(x-model)%"}),
        rewriting({"prefix": "/alias/"}, regex("(.*)", "/images/\\1")),
        rewriting(templated("/alias/{x=**}"), by_template("/{x}")),
    ],
)
def test_envoy_accepts_what_is_checked(document: Json, tmp_path: Path) -> None:
    """The configurations of the tests are real ones."""
    if "path_rewrite" in json.dumps(document) and envoy_version() < (1, 38):
        pytest.skip("needs Envoy 1.38")
    assert verdict(json.dumps(document), tmp_path).endswith(" OK\n")
