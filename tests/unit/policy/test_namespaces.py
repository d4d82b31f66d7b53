"""Namespaces restrict a folder's policies; overlaps name policies of different files."""

import json
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any

import pytest

from extproc.engine.engine import Engine
from extproc.errors import BundleErrors, UsageError
from extproc.policy.loader import PolicySet, parse
from extproc.policy.namespaces import Namespace, parse_namespace, read_namespaces
from extproc.policy.overlaps import MAX_PAIRS, find_overlaps
from tests.support.command import fits
from tests.support.documents import bundle, policy

NOW = datetime(2026, 6, 1, tzinfo=UTC)


def load(*namespaces: str, **files: object) -> PolicySet:
    data = {f"{name}/p.json": json.dumps(document).encode() for name, document in files.items()}
    return parse(data, NOW, namespaces=[parse_namespace(text) for text in namespaces])


def find_errors(*namespaces: str, **files: object) -> list[str]:
    with pytest.raises(BundleErrors) as failure:
        load(*namespaces, **files)
    return [str(error) for error in failure.value.errors]


def select(**selector: Any) -> dict[str, Any]:  # noqa: ANN401  # any selector
    return policy("b-p", selector, limit_keys=["jwt:org"])


def test_namespace_has_hosts_paths_routes_and_ids() -> None:
    found = parse_namespace("teams/b=host:B.example.com:8443,path:/b//x,path:/c,route:chat,id:b-")

    assert found == Namespace("teams/b", ("b.example.com",), ("/b/x", "/c"), ("chat",), ("b-",))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "b",
        "=path:/b",
        "b=",
        "b=path:",
        "b=path:b",
        "b=host:*.example.com",
        "b=port:80",
        "b=path:/b,,",
    ],
)
def test_invalid_namespace_is_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="must be PATH=host:NAME"):
        read_namespaces([text], ["b"])


@pytest.mark.parametrize(
    ("path", "paths", "good"),
    [
        ("p/b", ["p"], True),
        ("p", ["p/b.json"], True),
        ("./p/b/", ["q", "p/b"], True),
        ("p/b", ["p/bees"], False),
        ("q", ["p"], False),
    ],
)
def test_namespace_must_belong_to_a_policy_path(path: str, paths: list[str], good: bool) -> None:
    with (
        nullcontext()
        if good
        else pytest.raises(UsageError, match=f"--namespace-of {path}: no policy path includes it")
    ):
        assert read_namespaces([f"{path}=id:b-"], paths) == (Namespace(path, ids=("b-",)),)


def killing(namespace: str, route: str | None) -> tuple[str, dict[str, Any]]:
    """A bundle with a kill switch, whose policy is within the namespace."""
    switch = {"scope_key": "header:x", "scope_value": "y", **({"route": route} if route else {})}
    own = select(pathPrefix="/b", **({"hosts": ["b.com"]} if "host" in namespace else {}))
    return namespace, bundle(own, kill_switches=[switch])


PATHS = "/spec/selector: must name a path, and only paths below {}, those of b"
HOSTS = "/spec/selector/hosts: must name only b.com, the hosts of b"


@pytest.mark.parametrize(
    ("namespace", "document", "error"),
    [
        ("path:/b", select(pathExact="/b"), ""),
        ("path:/b", select(pathPrefixes=["/b/x", "/b/y"]), ""),
        ("path:/b,path:/c", select(pathPrefixes=["/b", "/c"], hosts=["any.example.com"]), ""),
        ("host:b.example.com", select(pathPrefix="/", hosts=["B.example.com"]), ""),
        ("route:chat,route:embed", select(routes=["embed"]), ""),
        ("path:/b", select(pathPrefix="/"), PATHS.format("/b")),
        ("path:/b/", select(pathPrefix="/b"), PATHS.format("/b/")),
        ("path:/b", select(routes=["r"]), PATHS.format("/b")),
        ("path:/b", select(pathExact="/b/../a"), PATHS.format("/b")),
        ("host:b.com", select(pathPrefix="/"), HOSTS),
        ("host:b.com", select(pathPrefix="/", hosts=["b.com", "a.com"]), HOSTS),
        (
            "route:chat",
            select(routes=["chat", "a"]),
            "/spec/selector/routes: must name only chat, the routes of b",
        ),
        ("id:c-", select(pathPrefix="/"), "/id: must begin with c-, as all ids in b do"),
        (*killing("path:/b", "/b/x"), ""),
        (*killing("path:/b", "/a"), "/kill_switches/0/route: …"),
        (*killing("path:/b", None), "/kill_switches/0…"),
        (*killing("path:/b,host:b.com", "/b"), "/kill_switches/0…"),
        (*killing("id:b-", "/b"), "/kill_switches/0…"),
    ],
)
def test_file_outside_its_namespace_is_rejected(
    namespace: str, document: dict[str, Any], error: str
) -> None:
    """A kill switch has a path and no host, so only a namespace of paths can have one."""
    if error:
        (found,) = find_errors(f"b={namespace}", b=document)
        assert fits(found, f"b/p.json: {error}")
    else:
        assert load(f"b={namespace}", b=document).sources[0].namespace == "b"


def test_ids_of_a_namespace_are_reserved() -> None:
    assert find_errors("b=id:b-", a=select(pathPrefix="/")) == [
        "a/p.json: /id: must not begin with b-: these ids belong to b"
    ]


def test_aliases_apply_within_their_namespace() -> None:
    """A team's aliases apply to its own policies, aliases outside any namespace to all."""
    hashes = [character * 16 for character in "abc"]
    files = {}
    for name, own in (("a", hashes[:2]), ("b", hashes[:1]), ("c", hashes[2:])):
        files[name] = policy(f"{name}-p", {"pathPrefix": "/"})
        files[name]["spec"]["aliases"] = dict.fromkeys(own, f"{name}-names")

    named = {
        plan.id: plan.aliases for plan in Engine(load("a=id:a-", "b=id:b-", **files), NOW).plans
    }

    assert named == {
        "a-p": {hashes[0]: "a-names", hashes[1]: "a-names", hashes[2]: "c-names"},
        "b-p": {hashes[0]: "b-names", hashes[2]: "c-names"},
        "c-p": {hashes[2]: "c-names"},
    }


LIVE, SHADOW = (
    select(pathPrefix="/") | {"id": "a-live"},
    select(pathPrefix="/") | {"id": "b-shadow"},
)
SHADOW["spec"]["mode"] = "shadow"


@pytest.mark.parametrize(
    ("namespaces", "files", "pairs"),
    [
        ([], {"a": LIVE, "b": SHADOW}, [("a-live", "b-shadow")]),
        (["b=id:b-"], {"a": LIVE, "b": SHADOW}, []),
        (
            ["b=id:b-"],
            {"a": [LIVE, SHADOW | {"id": "a-shadow"}], "b": LIVE | {"id": "b-live"}},
            [("a-live", "a-shadow")],
        ),
    ],
)
def test_canaries_are_paired_within_their_namespace(
    namespaces: list[str], files: dict[str, object], pairs: list[tuple[str, str]]
) -> None:
    assert [
        (pair.live, pair.candidate) for pair in Engine(load(*namespaces, **files), NOW).pairings
    ] == pairs


def test_canary_of_another_namespace_is_rejected() -> None:
    named = {**SHADOW, "spec": {**SHADOW["spec"], "canary_of": "a-live"}}

    assert [error.partition(": ")[2] for error in find_errors("b=id:b-", a=LIVE, b=named)] == [
        (
            "/spec/canary_of: canary_of must name a policy of the same namespace, and 'a-live' is "
            "outside of it"
        )
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
        (
            {"pathPrefix": "/", "hosts": ["a.com", "b.com"]},
            {"pathPrefix": "/a", "hosts": ["b.com"]},
            True,
        ),
        ({"routes": ["r"]}, {"routes": ["r", "s"]}, True),
        ({"routes": ["r"]}, {"routes": ["s"]}, False),
        ({"routes": ["r"]}, {"pathPrefix": "/"}, False),
        ({"routes": ["r"], "pathPrefix": "/"}, {"pathPrefix": "/a", "routes": ["r"]}, True),
        ({"apis": "any"}, {"pathPrefix": "/a"}, True),
        ({"apis": "any"}, {"apis": ["openai"], "pathPrefix": "/a"}, True),
        ({"apis": ["ollama"]}, {"apis": ["openai"]}, False),
    ],
)
def test_overlapping_policies_of_two_files_are_found(
    one: dict[str, Any], other: dict[str, Any], meet: object
) -> None:
    first, second = policy("p", one), policy("q", other)
    both = [find_overlaps(load(a=a, b=b).sources) for a, b in ((first, second), (second, first))]

    assert [bool(found) for found in both] == [meet, meet]
    assert find_overlaps(load(a=[first, second]).sources) == []


@pytest.mark.slow
def test_reported_overlaps_are_bounded() -> None:
    alike = {
        name: [policy(f"{name}-{number}", {"pathPrefix": "/"}) for number in range(600)]
        for name in "ab"
    }
    many = {f"f{number:02}": policy(f"p-{number}", {"pathPrefix": "/"}) for number in range(30)}

    (found,) = find_overlaps(load(**alike).sources)
    assert str(found).endswith("each counts and acts: a-0 (a/p.json) and b-0 (b/p.json)")
    assert len(find_overlaps(load(**many).sources)) == MAX_PAIRS
