"""Which policies the index of selectors finds for a request, and at what cost."""

import timeit
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, strategies as st

from extproc.engine.engine import Index
from extproc.policy.bundle import Selector
from extproc.policy.outline import SlimSelector
from extproc.request.fingerprint import normalize_path

Request = tuple[str, str, str, str]  # method, authority, path, route


def index(*selectors: Mapping[str, Any]) -> Index[int]:
    return Index(
        (SlimSelector(Selector(**selector), {}), number)
        for number, selector in enumerate(selectors)
    )


PATHS: list[tuple[dict[str, str], list[str], list[str]]] = [
    ({"pathExact": "/v1"}, ["/v1"], ["/v1/", "/", "/V1", "/v1/x", ""]),
    ({"pathExact": "/v1/"}, ["/v1/"], ["/v1", "/v1//"]),
    (
        {"pathPrefix": "/v1/"},
        ["/v1/", "/v1/x", "/v1//", "/v1/x/y/z"],
        ["/v1", "/v1x/", "/v2/x", "/x/v1/"],
    ),
    (
        {"pathPrefix": "/v1"},
        ["/v1", "/v1/", "/v1/x", "/v1//x"],
        ["/v1x", "/v", "/", "/V1/x", "/x/v1"],
    ),
    (
        {"pathPrefix": "/a//b"},
        ["/a/b", "/a/b/c"],
        ["/a//b", "/a/bc", "/a/"],
    ),  # as requests' paths are by then
    ({"pathPrefix": "/a//"}, ["/a/", "/a/b"], ["/a", "/b"]),
    ({"pathExact": "/%61/./b"}, ["/a/b"], ["/%61/./b"]),
    ({"pathPrefix": "/"}, ["/", "//", "/x", "/x/y/"], ["*", ""]),
    ({"pathExact": "/x", "pathPrefix": "/v1/"}, ["/x", "/v1/y"], ["/x/", "/v1"]),
    ({"pathExact": "/v1/x", "pathPrefix": "/v1"}, ["/v1/x", "/v1/y"], ["/w"]),
]


@pytest.mark.parametrize(("selector", "taken", "refused"), PATHS)
def test_selector_matches_exact_path_or_prefix(
    selector: dict[str, str], taken: list[str], refused: list[str]
) -> None:
    """An exact path matches itself, a prefix what lies below it; with both, either will do."""
    found = {path: list(index(selector).match("GET", "h", path)) for path in taken + refused}

    assert found == {path: [0] for path in taken} | {path: [] for path in refused}


FIELDS: list[tuple[dict[str, list[str]], Request, list[int]]] = [
    ({"hosts": ["API.Example.COM.:443"]}, ("GET", "Api.example.com.:8443", "/", ""), [0]),
    ({"hosts": ["api.example.com"]}, ("GET", "example.com", "/", ""), []),
    ({"hosts": ["api.example.com"]}, ("GET", "", "/", ""), []),
    ({"hosts": ["[2001:DB8::1]:443"]}, ("GET", "[2001:db8::1]:8080", "/", ""), [0]),
    ({"hosts": ["a", "b"]}, ("GET", "b:1", "/", ""), [0]),
    ({"methods": ["post"]}, ("POST", "", "/", ""), [0]),
    ({"methods": ["POST"]}, ("post", "", "/", ""), []),  # methods are case-sensitive
    ({"routes": ["llm"]}, ("GET", "", "/", "llm"), [0]),
    ({"routes": ["llm"]}, ("GET", "", "/", "LLM"), []),
    ({"hosts": ["a"], "methods": ["GET"], "routes": ["r"]}, ("GET", "a", "/", "r"), [0]),
    ({"hosts": ["a"], "methods": ["GET"], "routes": ["r"]}, ("GET", "a", "/", "s"), []),
    ({"hosts": ["a"], "methods": ["GET"], "routes": ["r"]}, ("PUT", "a", "/", "r"), []),
    ({"hosts": ["a"], "methods": ["GET"], "routes": ["r"]}, ("GET", "b", "/", "r"), []),
]


@pytest.mark.parametrize(("fields", "request_", "expected"), FIELDS)
def test_selector_matches_hosts_methods_and_routes(
    fields: dict[str, list[str]], request_: Request, expected: list[int]
) -> None:
    assert list(index({"pathPrefix": "/", **fields}).match(*request_)) == expected


SEGMENTS = st.lists(st.sampled_from(["", "a", "b", "ab"]), max_size=4).map("/".join)
ANCHOR = SEGMENTS.map("/{}".format)
SELECTORS = st.fixed_dictionaries(
    {},
    optional={
        "pathExact": ANCHOR,
        "pathPrefix": ANCHOR,
        "methods": st.lists(st.sampled_from(["GET", "post"]), min_size=1, max_size=3),
        "hosts": st.lists(st.sampled_from(["a", "A.", "b:80", "[::1]"]), min_size=1, max_size=3),
        "routes": st.lists(st.sampled_from(["r", "s"]), min_size=1, max_size=2),
    },
).filter(lambda selector: bool(selector.keys() & {"pathExact", "pathPrefix", "routes"}))
ANCHORS = ("pathExact", "pathPrefix")
REQUESTS = st.tuples(
    st.sampled_from(["GET", "POST", "get"]),
    st.sampled_from(["a", "a.:81", "B", "[::1]:9", "c", ""]),
    st.one_of(ANCHOR, SEGMENTS, st.just("*")),
    st.sampled_from(["r", "s", ""]),
)


def takes(selector: Mapping[str, Any], request: Request) -> bool:
    """A selector's meaning, stated as directly as possible."""
    method, authority, path, route = request
    exact, prefix = (
        None if anchor is None else normalize_path(anchor) for anchor in map(selector.get, ANCHORS)
    )
    by_path = (
        (exact is None and prefix is None)
        or path == exact
        or (
            prefix is not None
            and (
                path == prefix or path.startswith(prefix if prefix.endswith("/") else f"{prefix}/")
            )
        )
    )
    bare = {
        "a": "a",
        "A.": "a",
        "b:80": "b",
        "[::1]": "[::1]",
        "a.:81": "a",
        "B": "b",
        "[::1]:9": "[::1]",
        "c": "c",
        "": "",
    }
    return (
        by_path
        and ("methods" not in selector or method in [name.upper() for name in selector["methods"]])
        and (
            "hosts" not in selector or bare[authority] in [bare[host] for host in selector["hosts"]]
        )
        and ("routes" not in selector or route in selector["routes"])
    )


@given(st.lists(SELECTORS, max_size=8), st.lists(REQUESTS, min_size=1, max_size=8))
def test_index_agrees_with_matching_every_selector(
    selectors: list[dict[str, Any]], requests: list[Request]
) -> None:
    made = index(*selectors)

    for request in requests:
        assert list(made.match(*request)) == [
            number for number, selector in enumerate(selectors) if takes(selector, request)
        ]


def measure(made: Index[int], *request: str) -> float:
    return min(timeit.repeat(lambda: made.match(*request), repeat=50, number=10))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("selector", "request_"),
    [
        ({"pathPrefix": "/v1", "hosts": ["h{}"]}, ("POST", "h7", "/v1/a/b/c/d", "")),
        ({"pathPrefix": "/t/{}/"}, ("POST", "h", "/t/7/x/y/z", "")),
        ({"routes": ["r{}"], "methods": ["POST"]}, ("POST", "h", "/v1", "r7")),
    ],
)
def test_match_time_is_independent_of_policy_count(
    selector: dict[str, Any], request_: Request
) -> None:
    def filled(count: int) -> Index[int]:
        def fill(value: str | list[str], number: int) -> str | list[str]:
            return (
                value.format(number)
                if isinstance(value, str)
                else [item.format(number) for item in value]
            )

        return index(
            *(
                {key: fill(value, number) for key, value in selector.items()}
                for number in range(count)
            )
        )

    few, many = filled(10), filled(2_000)

    assert [*few.match(*request_)] == [*many.match(*request_)] == [7]
    assert measure(many, *request_) < 50 * measure(few, *request_)  # 200 times as many


def test_match_time_is_bounded_by_deepest_prefix() -> None:
    made = index({"pathPrefix": "/a/b"}, {"pathExact": "/x"})

    assert measure(made, "POST", "h", "/a/b" + "/c" * 10_000) < 100 * measure(
        made, "POST", "h", "/a/b/c/d"
    )
