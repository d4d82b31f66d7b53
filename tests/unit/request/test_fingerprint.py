"""The fingerprint, to the letter and by its properties."""

from __future__ import annotations

from random import Random
from typing import Any
from urllib.parse import quote_from_bytes
from zlib import adler32, crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.request.fingerprint import (
    NO_BODY,
    Body,
    hash_tenant,
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
DESCRIPTORS = st.dictionaries(st.text(st.sampled_from("ab-_"), min_size=1, max_size=3), AWKWARD.filter(bool), max_size=3)
METHODS = st.sampled_from(["GET", "POST", "P|T", "P%7CT"])
PATHS = st.text(st.sampled_from("/ab%|7C=&"), max_size=6).map(lambda text: "/" + text)
BODIES = st.binary(max_size=4)


def _query(pairs: list[tuple[str, str]]) -> str:
    """A query that decodes to these pairs."""
    return "&".join(
        "=".join(quote_from_bytes(part.encode("utf-8", "surrogateescape"), safe="") for part in pair) for pair in pairs
    )


def _compose(request: HttpRequest, body: bytes, descriptors: dict[str, str]) -> str:
    head = write_head(request.method, request.path, write_query(request.read_query()))
    return name_request(head, NO_BODY.plus(body), join_descriptors(list(descriptors.items())))[0]


def _composite(method: str, path: str, pairs: list[tuple[str, str]], body: bytes, descriptors: dict[str, str]) -> str:
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
        (  # `+` and %20 are the same space, blanks stay, reserved characters are encoded, pairs are sorted
            "GET",
            "/p%20q|r?b=2&a=x+y&c&a=%7C%3d%26%25&&b=1&d=e=f",
            b"",
            {},
            "GET|/p%2520q%7Cr|a=x y&a=%7C%3D%26%25&b=1&b=2&c=&d=e%3Df|00000000",
        ),
    ],
    ids=["typical", "empty", "query"],
)
def test_the_composite_is_as_documented(
    method: str, target: str, body: bytes, descriptors: dict[str, str], composite: str
) -> None:
    """An empty query keeps its slot, that of no body is eight zeros, and without descriptors nothing trails."""
    assert _compose(HttpRequest(method, target), body, descriptors) == composite


def test_the_digest_names_crc_and_check() -> None:
    """The fingerprint is the composite's CRC32; the check tells apart what the CRC32 alone does not."""
    one, other = [name_request("POST|/||", Body(length, 0xDEADBEEF, 1), "") for length in (5, 6)]

    assert one[0] == other[0] == "POST|/||deadbeef"
    assert one[1] == other[1] == f"{crc32(one[0].encode()):08x}"
    assert one[2] != other[2]
    assert len(one[2]) == len(hash_tenant("a=b")) == 16


def test_a_crc_collision_does_not_share_a_key() -> None:
    """Two bodies with one CRC32 and one length have one fingerprint but two checks."""
    one, other = b"plumless", b"buckeroo"  # a well-known CRC32 collision

    assert crc32(one) == crc32(other)
    assert len(one) == len(other)
    first, second = NO_BODY.plus(one), NO_BODY.plus(other)
    named, other_named = name_request("x", first, ""), name_request("x", second, "")
    assert named[:2] == other_named[:2]
    assert named[2] != other_named[2]


@given(BODIES, st.binary(max_size=40), st.integers(0, 40))
def test_a_body_in_chunks_is_the_same_body(head: bytes, body: bytes, cut: int) -> None:
    """However a body is split, length and checksums are those of the whole body."""
    whole = head + body

    made = NO_BODY.plus(whole[:cut]).plus(whole[cut:])

    assert (made.length, made.crc32, made.adler32) == (len(whole), crc32(whole), adler32(whole))


@given(METHODS, PATHS, PAIRS, BODIES, DESCRIPTORS, st.randoms())
def test_order_never_matters(
    method: str, path: str, pairs: list[tuple[str, str]], body: bytes, descriptors: dict[str, str], random: Random
) -> None:
    """Query pairs and descriptors may come in any order."""
    shuffled_pairs = random.sample(pairs, len(pairs))
    shuffled = dict(random.sample([*descriptors.items()], len(descriptors)))

    assert _composite(method, path, pairs, body, descriptors) == _composite(method, path, shuffled_pairs, body, shuffled)


Parts = tuple[str, str, list[tuple[str, str]], bytes, dict[str, str]]
REQUESTS: st.SearchStrategy[Parts] = st.tuples(METHODS, PATHS, PAIRS, BODIES, DESCRIPTORS)


def _identity(request: Parts) -> object:
    method, path, pairs, body, descriptors = request
    return method, normalize_path(path), sorted(pairs), crc32(body), descriptors


@given(REQUESTS, REQUESTS, st.tuples(*[st.booleans()] * 5))
def test_composites_are_equal_exactly_when_requests_are(one: Parts, drawn: Parts, take: tuple[bool, ...]) -> None:
    """Equal composites mean equal method, normal path, decoded pairs, body CRC32 and descriptors, and the other way round."""
    other: Any = tuple(mine if same else theirs for mine, theirs, same in zip(one, drawn, take, strict=True))

    assert (_composite(*one) == _composite(*other)) == (_identity(one) == _identity(other))


@given(REQUESTS, REQUESTS, st.tuples(*[st.booleans()] * 3))
def test_a_retry_is_known_by_where_what_and_whose_it_is(one: Parts, drawn: Parts, take: tuple[bool, ...]) -> None:
    """The same body to the same path in the same session has the same 8 bytes, and nothing else has."""
    (session, path, _, body, _), (session_2, path_2, _, body_2, _) = one, drawn
    other = path if take[0] else path_2, body if take[1] else body_2, session if take[2] else session_2

    mine = path, body, session
    names = [identify(write_head("POST", where, ""), NO_BODY.plus(what), sum_up(whose)) for where, what, whose in (mine, other)]

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
def test_a_path_is_read_as_a_server_would(path: str, normal: str) -> None:
    """Every spelling of a path is that path, and normalizing it again changes nothing."""
    assert normalize_path(path) == normalize_path(normal) == normal


@given(st.lists(st.sampled_from(["/", "//", "/.", "/..", "a", "%61", "%2e", "%2F", ".", "%25", "b"]), max_size=12))
def test_no_path_is_normalized_twice(parts: list[str]) -> None:
    """What is normal stays as it is, and no dot segment and no empty segment is left within."""
    normal = normalize_path("/" + "".join(parts))

    assert normalize_path(normal) == normal
    assert not {".", ".."} & set(normal.split("/"))
    assert "//" not in normal
