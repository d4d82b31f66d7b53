"""Namespaces restrict the policies of a folder, and overlaps name policies of different files that meet."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from extproc.engine.engine import Engine
from extproc.errors import BundleErrors, UsageError
from extproc.policy.loader import PolicySet, parse
from extproc.policy.namespaces import Namespace, parse_namespace, read_namespaces
from extproc.policy.overlaps import MAX_PAIRS, find_overlaps
from tests.support.documents import bundle, policy

NOW = datetime(2026, 6, 1, tzinfo=UTC)


def load(*namespaces: str, **files: object) -> PolicySet:
    """Parse files `a/p.json` and so on."""
    data = {f"{name}/p.json": json.dumps(document).encode() for name, document in files.items()}
    return parse(data, NOW, namespaces=[parse_namespace(text) for text in namespaces])


def find_errors(*namespaces: str, **files: object) -> list[str]:
    """The errors of such files."""
    with pytest.raises(BundleErrors) as caught:
        load(*namespaces, **files)
    return [str(error) for error in caught.value.errors]


def select(**selector: Any) -> dict[str, Any]:  # noqa: ANN401  # any selector
    """A policy with this selector."""
    return policy("b-p", selector, limit_keys=["jwt:org"])


def test_a_namespace_is_parsed() -> None:
    """Every kind, several of each, hosts and paths as selectors have them."""
    found = parse_namespace("teams/b=host:B.example.com:8443,path:/b//x,path:/c,route:chat,id:b-")

    assert found == Namespace("teams/b", ("b.example.com",), ("/b/x", "/c"), ("chat",), ("b-",))


@pytest.mark.parametrize(
    "text", ["", "b", "=path:/b", "b=", "b=path:", "b=path:b", "b=host:*.example.com", "b=port:80", "b=path:/b,,"]
)
def test_what_is_no_namespace_is_an_error(text: str) -> None:
    """A mistake is told with the form that is right, and never leaves a folder unrestricted."""
    with pytest.raises(UsageError, match="must be PATH=host:NAME"):
        read_namespaces([text], ["b"])


@pytest.mark.parametrize(("path", "paths"), [("p/b", ["p"]), ("p", ["p/b.json"]), ("./p/b/", ["q", "p/b"])])
def test_a_namespace_belongs_to_a_policy_path(path: str, paths: list[str]) -> None:
    """It is one of them, below one, or above."""
    assert read_namespaces([f"{path}=id:b-"], paths) == (Namespace(path, ids=("b-",)),)


@pytest.mark.parametrize(("path", "paths"), [("p/b", ["p/bees"]), ("q", ["p"])])
def test_a_namespace_of_no_policy_path_is_an_error(path: str, paths: list[str]) -> None:
    """A misspelt folder must not leave a team unrestricted."""
    with pytest.raises(UsageError, match=f"--namespace-of {path}: no policy path includes it"):
        read_namespaces([f"{path}=id:b-"], paths)


@pytest.mark.parametrize(
    ("namespace", "selector"),
    [
        ("path:/b", {"pathExact": "/b"}),
        ("path:/b", {"pathPrefixes": ["/b/x", "/b/y"]}),
        ("path:/b,path:/c", {"pathPrefixes": ["/b", "/c"], "hosts": ["any.example.com"]}),
        ("host:b.example.com", {"pathPrefix": "/", "hosts": ["B.example.com"]}),
        ("route:chat,route:embed", {"routes": ["embed"]}),
    ],
)
def test_a_policy_within_its_namespace_is_good(namespace: str, selector: dict[str, Any]) -> None:
    """Where it selects no more than the namespace has, nothing is said."""
    assert load(f"b={namespace}", b=select(**selector)).sources[0].namespace == "b"


@pytest.mark.parametrize(
    ("namespace", "selector", "error"),
    [
        ("path:/b", {"pathPrefix": "/"}, "/spec/selector: must name a path, and only paths below /b, those of b"),
        ("path:/b/", {"pathPrefix": "/b"}, "/spec/selector: must name a path, and only paths below /b/, those of b"),
        ("path:/b", {"routes": ["r"]}, "/spec/selector: must name a path, and only paths below /b, those of b"),
        ("path:/b", {"pathExact": "/b/../a"}, "/spec/selector: must name a path, and only paths below /b, those of b"),
        ("host:b.com", {"pathPrefix": "/"}, "/spec/selector/hosts: must name only b.com, the hosts of b"),
        (
            "host:b.com",
            {"pathPrefix": "/", "hosts": ["b.com", "a.com"]},
            "/spec/selector/hosts: must name only b.com, the hosts of b",
        ),
        ("route:chat", {"routes": ["chat", "a"]}, "/spec/selector/routes: must name only chat, the routes of b"),
        ("id:c-", {"pathPrefix": "/"}, "/id: must begin with c-, as all ids in b do"),
    ],
)
def test_a_policy_beyond_its_namespace_is_an_error(namespace: str, selector: dict[str, Any], error: str) -> None:
    """Each kind that the namespace names applies, and the error stands where it is mended."""
    assert find_errors(f"b={namespace}", b=select(**selector)) == [f"b/p.json: {error}"]


def test_ids_of_a_namespace_are_its_own() -> None:
    """No other file may use them, so that none can be taken before the team needs it."""
    assert find_errors("b=id:b-", a=select(pathPrefix="/")) == ["a/p.json: /id: must not begin with b-: these ids belong to b"]


@pytest.mark.parametrize(
    ("namespace", "route", "good"),
    [
        ("path:/b", "/b/x", True),
        ("path:/b", "/a", False),
        ("path:/b", None, False),
        ("path:/b,host:b.com", "/b", False),
        ("id:b-", "/b", False),
    ],
)
def test_kill_switches_stay_within_the_paths(namespace: str, route: str | None, good: object) -> None:
    """A kill switch has a path and no host, so only a namespace of paths can have one."""
    switch = {"scope_key": "header:x", "scope_value": "y", **({"route": route} if route else {})}
    own = select(pathPrefix="/b", **({"hosts": ["b.com"]} if "host" in namespace else {}))
    file = bundle(own, kill_switches=[switch])
    if good:
        assert load(f"b={namespace}", b=file).sources[0].kill_switches
    else:
        assert [error.partition(": ")[2].partition(": ")[0] for error in find_errors(f"b={namespace}", b=file)] in (
            ["/kill_switches/0"],
            ["/kill_switches/0/route"],
        )


def test_callers_are_named_within_a_namespace() -> None:
    """A team's aliases name callers of its own policies only; those of files outside of any namespace are everyone's."""
    hashes = [character * 16 for character in "abc"]
    files = {}
    for name, own in (("a", hashes[:2]), ("b", hashes[:1]), ("c", hashes[2:])):
        files[name] = policy(f"{name}-p", {"pathPrefix": "/"})
        files[name]["spec"]["aliases"] = dict.fromkeys(own, f"{name}-names")
    engine = Engine(load("a=id:a-", "b=id:b-", **files), NOW)
    named = {plan.id: plan.aliases for plan in engine.plans}

    assert named == {
        "a-p": {hashes[0]: "a-names", hashes[1]: "a-names", hashes[2]: "c-names"},
        "b-p": {hashes[0]: "b-names", hashes[2]: "c-names"},
        "c-p": {hashes[2]: "c-names"},
    }


def test_a_namespace_is_compared_within_itself() -> None:
    """A shadow policy with another team's selector is no canary of that team's, and takes none from it."""
    shadow = policy("b-shadow", {"pathPrefix": "/"})
    shadow["spec"]["mode"] = "shadow"
    live = policy("a-live", {"pathPrefix": "/"})
    apart = Engine(load("b=id:b-", a=live, b=shadow), NOW).pairings
    together = Engine(load(a=live, b=shadow), NOW).pairings
    also = policy("b-live", {"pathPrefix": "/"})
    shadow_a = {**shadow, "id": "a-shadow"}
    undisturbed = Engine(load("b=id:b-", a=[live, shadow_a], b=also), NOW).pairings

    assert ([*apart], [(pair.live, pair.candidate) for pair in together]) == ([], [("a-live", "b-shadow")])
    assert [(pair.live, pair.candidate) for pair in undisturbed] == [("a-live", "a-shadow")]
    named = {**shadow, "spec": {**shadow["spec"], "canary_of": "a-live"}}
    assert [error.partition(": ")[2] for error in find_errors("b=id:b-", a=live, b=named)] == [
        "/spec/canary_of: canary_of must name a policy of the same namespace, and 'a-live' is outside of it"
    ]


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        ({"pathExact": "/a"}, {"pathExact": "/a"}, True),
        ({"pathExact": "/a"}, {"pathExact": "/b"}, False),
        ({"pathPrefix": "/"}, {"pathExact": "/a/b"}, True),
        ({"pathPrefix": "/a"}, {"pathPrefix": "/a/b"}, True),
        ({"pathPrefix": "/a/"}, {"pathExact": "/a"}, False),
        ({"pathPrefix": "/a"}, {"pathPrefix": "/ab"}, False),
        ({"pathPrefixes": ["/x", "/a"]}, {"pathPrefixes": ["/y", "/a/b"]}, True),
        ({"pathPrefix": "/", "methods": ["GET"]}, {"pathPrefix": "/", "methods": ["POST"]}, False),
        ({"pathPrefix": "/", "hosts": ["a.com"]}, {"pathPrefix": "/", "hosts": ["b.com"]}, False),
        ({"pathPrefix": "/", "hosts": ["a.com", "b.com"]}, {"pathPrefix": "/a", "hosts": ["b.com"]}, True),
        ({"routes": ["r"]}, {"routes": ["r", "s"]}, True),
        ({"routes": ["r"]}, {"routes": ["s"]}, False),
        ({"routes": ["r"]}, {"pathPrefix": "/"}, False),
        ({"routes": ["r"], "pathPrefix": "/"}, {"pathPrefix": "/a", "routes": ["r"]}, True),
        ({"apis": "any"}, {"pathPrefix": "/a"}, True),
        ({"apis": "any"}, {"apis": ["openai"], "pathPrefix": "/a"}, True),
        ({"apis": ["ollama"]}, {"apis": ["openai"]}, False),
    ],
)
def test_overlaps_are_found(one: dict[str, Any], other: dict[str, Any], meet: object) -> None:
    """Two selectors meet whichever comes first, and the policies of one file never do."""
    first, second = policy("p", one), policy("q", other)
    both = [find_overlaps(load(a=a, b=b).sources) for a, b in ((first, second), (second, first))]

    assert [bool(found) for found in both] == [meet, meet]
    assert find_overlaps(load(a=[first, second]).sources) == []


def test_of_many_overlaps_the_first_are_reported() -> None:
    """One for each two files, to a bound; thousands of policies on one path are compared in bounded steps."""
    alike = {name: [policy(f"{name}-{number}", {"pathPrefix": "/"}) for number in range(600)] for name in "ab"}
    many = {f"f{number:02}": policy(f"p-{number}", {"pathPrefix": "/"}) for number in range(30)}

    (found,) = find_overlaps(load(**alike).sources)
    assert str(found).endswith("each counts and acts: a-0 (a/p.json) and b-0 (b/p.json)")
    assert len(find_overlaps(load(**many).sources)) == MAX_PAIRS
