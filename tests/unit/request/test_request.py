"""Requests as policies see them, and the descriptors that tell callers apart."""

import json
from base64 import urlsafe_b64encode
from urllib.parse import parse_qsl

import pytest
from hypothesis import given, strategies as st

from extproc.request.http import (
    MAX_TOKEN,
    HttpRequest,
    StatedFacts,
    compile_descriptors,
    decode_claims,
    write_claim,
)

REQUEST = HttpRequest(
    "POST",
    "/p?org=first&org=second&Org=upper&empty=&x-user=%41+%2B",
    "api.example.com:8443",
    {"x-user": b"Ann", "x-empty": b"", "x-bytes": b"\xff\xc3\xa9", "host": b"from-the-map"},
    StatedFacts(address="2001:db8::1", claims={"org_id": "org-abc", "Sub": "U"}),
)


@pytest.mark.parametrize(
    ("key", "name", "value"),
    [
        ("jwt:org_id", "org_id", "org-abc"),
        ("jwt:Sub", "sub", "U"),  # claims are case-sensitive, names in the composite are lower-case
        ("jwt:sub", "sub", ""),
        ("header:x-user", "x-user", "Ann"),
        ("header:x-empty", "x-empty", ""),
        ("header:x-missing", "x-missing", ""),
        ("header:x-bytes", "x-bytes", "\udcff\u00e9"),
        ("header:host", "host", "api.example.com:8443"),
        ("query:org", "org", "first"),
        ("query:Org", "org", "upper"),
        ("query:empty", "empty", ""),
        ("query:x-user", "x-user", "A +"),
        ("ip:address", "address", "2001:db8::1"),
    ],
)
def test_each_source_of_descriptors_is_read(key: str, name: str, value: str) -> None:
    """The name follows the source; the first of repeated values counts; empty means missing."""
    (found,) = compile_descriptors([key])

    assert (found.name, found.read(REQUEST, found.argument)) == (name, value)


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (["jwt:org_id", "header:x-user"], ["org_id", "x-user"]),
        (["jwt:org_id", "header:org_id", "query:other"], ["jwt:org_id", "header:org_id", "other"]),
        (["jwt:Org", "jwt:org"], ["jwt:Org", "jwt:org"]),
        (["ip:address", "query:ADDRESS"], ["ip:address", "query:ADDRESS"]),
        (["jwt:org_id", "jwt:org_id"], ["org_id"]),
        ([], []),
    ],
)
def test_equal_descriptor_names_are_written_in_full(keys: list[str], names: list[str]) -> None:
    assert [found.name for found in compile_descriptors(keys)] == names


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("text", "text"),
        ("", ""),
        (True, "true"),
        (False, "false"),
        (42, "42"),
        (42.0, "42"),  # as protobuf's Struct carries it
        (1e21, "1000000000000000000000"),
        (-0.5, "-0.5"),
        (None, ""),
        ([1], ""),
        ({"a": 1}, ""),
    ],
)
def test_scalar_claims_become_text(value: object, text: str) -> None:
    assert write_claim(value) == text


def bearer(payload: bytes, scheme: str = "Bearer") -> str:
    return f"{scheme} e30.{urlsafe_b64encode(payload).rstrip(b'=').decode()}.c2ln"


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer "])
def test_unverified_token_is_decoded(scheme: str) -> None:
    """The scheme is case-insensitive; claims that are empty or not scalar are left out."""
    claims = {
        "org_id": "\u00e9\u00ff?>",
        "n": 7,
        "admin": True,
        "aud": ["a"],
        "none": None,
        "empty": "",
    }

    found = decode_claims(bearer(json.dumps(claims).encode(), scheme))

    assert found == {"org_id": "\u00e9\u00ff?>", "n": "7", "admin": "true"}


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer a.b",
        "Bearer a.b.c.d",
        "Basic e30.e30.e30",
        "Bearer e30.!.x",
        "Bearer e30.\u00e9.x",
        bearer(b"[]"),
        bearer(b"null"),
        bearer(b"{"),
        bearer(b"\xff"),
        bearer(b"[" * 10_000),
        bearer(b'{"n": ' + b"1" * 5_000 + b"}"),
        bearer(b'{"org_id": "' + b"x" * MAX_TOKEN + b'"}'),
    ],
)
def test_invalid_token_has_no_claims(authorization: str) -> None:
    assert decode_claims(authorization) == {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(
    st.one_of(
        st.text(),
        st.binary().map(bearer),
        JSON.map(lambda value: bearer(json.dumps(value).encode())),
    )
)
def test_claims_of_any_token_can_be_encoded(authorization: str) -> None:
    found = decode_claims(authorization)

    assert all(text.encode("utf-8", "surrogateescape") for text in found.values())


def test_surrogates_in_tokens_stay_different() -> None:
    found = [
        decode_claims(bearer(rf'{{"a": "\u{code}"}}'.encode()))["a"] for code in ("d800", "dfff")
    ]

    assert len({text.encode("utf-8", "surrogateescape") for text in found}) == 2


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        ("/", "/", ""),
        ("/a?", "/a", ""),
        ("/a?b?c", "/a", "b?c"),
        ("/a%3Fb", "/a%3Fb", ""),
        ("//a/../b?c//../d", "/b", "c//../d"),  # as a server would read it
        ("*", "*", ""),
        ("", "", ""),
        ("http://h", "/", ""),
        ("http://h/", "/", ""),
        ("HTTPS://h:8443/a/b?c=/d", "/a/b", "c=/d"),
        ("http://h?c=/d/e", "/", "c=/d/e"),
        ("/login?next=http://h/x", "/login", "next=http://h/x"),
        ("login?next=http://h/x", "login", "next=http://h/x"),
    ],
)
def test_targets_are_split(target: str, path: str, query: str) -> None:
    """A target in absolute form loses its scheme and host."""
    request = HttpRequest("GET", target)

    assert (request.path, request.query) == (path, query)


@pytest.mark.parametrize(
    ("query", "pairs"),
    [
        ("", []),
        ("a=1&b=2&a=0", [("a", "1"), ("b", "2"), ("a", "0")]),
        ("a=1+2&b+c=%2B", [("a", "1 2"), ("b c", "+")]),
        ("a&b=&=c&=", [("a", ""), ("b", ""), ("", "c"), ("", "")]),
        ("&&a=1&", [("a", "1")]),
        ("a=b=c", [("a", "b=c")]),
        ("a;b=1", [("a;b", "1")]),
        ("%61=%C3%A9", [("a", "\u00e9")]),
        ("a=%zz%", [("a", "%zz%")]),
        ("a=%FF&b=%C3", [("a", "\udcff"), ("b", "\udcc3")]),
    ],
)
def test_queries_are_decoded(query: str, pairs: list[tuple[str, str]]) -> None:
    """`+` is a space, blanks are kept, invalid escapes stay, bytes that are not UTF-8 survive."""
    assert HttpRequest("GET", f"/?{query}").read_query() == pairs


@given(st.text(alphabet=st.sampled_from("ab=&+%41fF\u00e9\udcff"), max_size=20))
def test_query_is_read_as_standard_library_reads_it(query: str) -> None:
    expected = parse_qsl(query, keep_blank_values=True, errors="surrogateescape")

    assert HttpRequest("GET", f"/?{query}").read_query() == expected
