"""The fingerprint: exact examples and properties."""

from random import Random
from typing import Any
from urllib.parse import quote_from_bytes
from zlib import adler32, crc32

import pytest
from hypothesis import given, strategies as st

from extproc.request.fingerprint import (
    NO_BODY,
    identify,
    join_descriptors,
    name_request,
    normalize_path,
    sum_up,
    write_head,
    write_query,
)
from extproc.request.http import HttpRequest

# Text around the characters that the composite gives a meaning to, where mistakes would hide.
AWKWARD = st.text(st.sampled_from("ab%|=&+ 27C\x00é\udcff"), max_size=6)
PAIRS = st.lists(st.tuples(AWKWARD, AWKWARD).filter(lambda pair: pair != ("", "")), max_size=4)
DESCRIPTORS = st.dictionaries(
    st.text(st.sampled_from("ab-_"), min_size=1, max_size=3), AWKWARD.filter(bool), max_size=3
)
METHODS = st.sampled_from(["GET", "POST", "P|T", "P%7CT"])
PATHS = st.text(st.sampled_from("/ab%|7C=&"), max_size=6).map(lambda text: "/" + text)
BODIES = st.binary(max_size=4)


def _query(pairs: list[tuple[str, str]]) -> str:
    """A query that decodes to these pairs."""
    return "&".join(
        "=".join(
            quote_from_bytes(part.encode("utf-8", "surrogateescape"), safe="") for part in pair
        )
        for pair in pairs
    )


def _compose(request: HttpRequest, body: bytes, descriptors: dict[str, str]) -> str:
    head = write_head(request.method, request.path, write_query(request.read_query()))
    return name_request(head, NO_BODY.plus(body), join_descriptors(list(descriptors.items())))[0]


def _composite(
    method: str, path: str, pairs: list[tuple[str, str]], body: bytes, descriptors: dict[str, str]
) -> str:
    return _compose(HttpRequest(method, f"{path}?{_query(pairs)}"), body, descriptors)


@pytest.mark.parametrize(
    ("method", "target", "body", "descriptors", "composite"),
    [
        (
            "POST",
            "/v1/chat/completions",
            b'{"model": "m"}',
            {"user_id": "user-1", "org_id": "org-abc"},
            "POST|/v1/chat/completions||649382c1|org_id=org-abc|user_id=user-1",
        ),
        ("GET", "/", b"", {}, "GET|/||00000000"),
        # `+` and %20 are the same space, blanks stay, reserved characters are encoded, pairs are
        # sorted
        (
            "GET",
            "/p%20q|r?b=2&a=x+y&c&a=%7C%3d%26%25&&b=1&d=e=f",
            b"",
            {},
            "GET|/p%2520q%7Cr|a=x y&a=%7C%3D%26%25&b=1&b=2&c=&d=e%3Df|00000000",
        ),
    ],
    ids=["typical", "empty", "query"],
)
def test_composite_is_as_documented(
    method: str, target: str, body: bytes, descriptors: dict[str, str], composite: str
) -> None:
    """Without a query, body or descriptors: an empty slot, eight zeros, nothing."""
    assert _compose(HttpRequest(method, target), body, descriptors) == composite


def test_crc_collision_shares_fingerprint_but_not_check() -> None:
    one, other = b"plumless", b"buckeroo"  # a well-known CRC32 collision

    assert crc32(one) == crc32(other)
    assert len(one) == len(other)
    first, second = NO_BODY.plus(one), NO_BODY.plus(other)
    named, other_named = name_request("x", first, ""), name_request("x", second, "")
    assert (
        named[:2] == other_named[:2] == (f"x{first.crc32:08x}", f"{crc32(named[0].encode()):08x}")
    )
    assert named[2] != other_named[2]


@given(BODIES, st.binary(max_size=40), st.integers(0, 40))
def test_body_in_chunks_equals_the_whole_body(head: bytes, body: bytes, cut: int) -> None:
    whole = head + body

    made = NO_BODY.plus(whole[:cut]).plus(whole[cut:])

    assert (made.length, made.crc32, made.adler32) == (len(whole), crc32(whole), adler32(whole))


@given(METHODS, PATHS, PAIRS, BODIES, DESCRIPTORS, st.randoms())
def test_order_of_query_and_descriptors_does_not_matter(
    method: str,
    path: str,
    pairs: list[tuple[str, str]],
    body: bytes,
    descriptors: dict[str, str],
    random: Random,
) -> None:
    shuffled_pairs = random.sample(pairs, len(pairs))
    shuffled = dict(random.sample([*descriptors.items()], len(descriptors)))

    assert _composite(method, path, pairs, body, descriptors) == _composite(
        method, path, shuffled_pairs, body, shuffled
    )


Parts = tuple[str, str, list[tuple[str, str]], bytes, dict[str, str]]
REQUESTS: st.SearchStrategy[Parts] = st.tuples(METHODS, PATHS, PAIRS, BODIES, DESCRIPTORS)


def _identity(request: Parts) -> object:
    method, path, pairs, body, descriptors = request
    return method, normalize_path(path), sorted(pairs), crc32(body), descriptors


@given(REQUESTS, REQUESTS, st.tuples(*[st.booleans()] * 5))
def test_composites_are_equal_exactly_if_requests_are(
    one: Parts, drawn: Parts, take: tuple[bool, ...]
) -> None:
    """That is: method, normal path, decoded pairs, CRC32 of the body and descriptors."""
    other: Any = tuple(
        mine if same else theirs for mine, theirs, same in zip(one, drawn, take, strict=True)
    )

    assert (_composite(*one) == _composite(*other)) == (_identity(one) == _identity(other))


@given(REQUESTS, REQUESTS, st.tuples(*[st.booleans()] * 3))
def test_retry_is_identified_by_path_body_and_session(
    one: Parts, drawn: Parts, take: tuple[bool, ...]
) -> None:
    (session, path, _, body, _), (session_2, path_2, _, body_2, _) = one, drawn
    other = (
        path if take[0] else path_2,
        body if take[1] else body_2,
        session if take[2] else session_2,
    )

    mine = path, body, session
    names = [
        identify(write_head("POST", where, ""), NO_BODY.plus(what), sum_up(whose))
        for where, what, whose in (mine, other)
    ]

    assert [len(name) for name in names] == [8, 8]
    assert (names[0] == names[1]) == (mine == other)


@pytest.mark.parametrize(
    ("path", "normal"),
    [
        ("/v1/chat/complet%69ons", "/v1/chat/completions"),
        ("//v1///chat//completions", "/v1/chat/completions"),
        ("/./v1/./chat/x/../completions", "/v1/chat/completions"),
        ("/%2e/v1/%2E%2e/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/.", "/v1/chat/completions/"),
        ("/v1/chat/completions/..", "/v1/chat/"),
        ("/../../a", "/a"),
        ("/a//../b", "/a/b"),  # dot segments first, as RFC 3986 has it, and Envoy
        ("/a%2fb%3f%25", "/a%2Fb%3F%25"),  # reserved characters mean something else when decoded
        ("/a%2", "/a%2"),
        ("/a%zz.%7E%5f", "/a%zz.~_"),
        ("/.hidden/..data/...", "/.hidden/..data/..."),
        ("/a/", "/a/"),
        ("/", "/"),
        ("*", "*"),
        ("", ""),
    ],
)
def test_path_is_normalized_as_a_server_would(path: str, normal: str) -> None:
    assert normalize_path(path) == normalize_path(normal) == normal


@given(
    st.lists(
        st.sampled_from(["/", "//", "/.", "/..", "a", "%61", "%2e", "%2F", ".", "%25", "b"]),
        max_size=12,
    )
)
def test_normal_path_has_no_dots_or_empty_segments(parts: list[str]) -> None:
    normal = normalize_path("/" + "".join(parts))

    assert normalize_path(normal) == normal
    assert not {".", ".."} & set(normal.split("/"))
    assert "//" not in normal
