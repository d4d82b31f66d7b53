"""Bodies compared by meaning: all spellings of a value are equal, different values never."""

import json
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, strategies as st

from extproc.detectors.canonical import Canonical
from extproc.policy.bundle import LoopDetection
from extproc.request.document import (
    MAX_CONTAINERS,
    MAX_DIGITS,
    MAX_MEMBERS,
    MAX_STEPS,
    Document,
    NotCounted,
    find,
    split_pointer,
    write_canonical,
)
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.messages import body, headers
from tests.support.model_requests import SCALARS, VALUES, Number, spelled
from tests.support.service import decoded, exchange, make_service, sample


def meaning(value: Any) -> Any:  # noqa: ANN401  # any JSON value
    """A value to compare, with types that Python would mix up kept apart."""
    if isinstance(value, Number):
        return ("number", value.mantissa * Fraction(10) ** value.exponent)
    if isinstance(value, bool | str | None):
        return (type(value).__name__, value)
    if isinstance(value, int | Fraction):
        return ("number", Fraction(value))
    if isinstance(value, list):
        return ("array", [meaning(item) for item in value])
    return ("object", {name: meaning(item) for name, item in value.items()})


def compared(text: str | bytes, *ignored: str) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    found, _ = Canonical(
        LoopDetection(similarity="canonical", ignore_fields=list(ignored))
    ).compare(Document(data))
    assert found is not None
    return found


def leaves(value: Any, place: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:  # noqa: ANN401  # any JSON value
    items: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return (
        [leaf for step, item in items for leaf in leaves(item, (*place, step))]
        if items
        else [place]
    )


# Any JSON value
def replaced(value: Any, place: Sequence[str | int], by: Any) -> Any:  # noqa: ANN401
    if not place:
        return by
    copy = value.copy()
    copy[place[0]] = replaced(value[place[0]], place[1:], by)
    return copy


def pointer(place: Sequence[str | int]) -> str:
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in place)


@given(VALUES, VALUES, st.data())
def test_bodies_are_equal_exactly_if_their_meanings_are(
    one: Any,  # noqa: ANN401  # any JSON value
    other: Any,  # noqa: ANN401  # any JSON value
    data: st.DataObject,
) -> None:
    texts = [spelled(data.draw, value) for value in (one, other)]

    assert (compared(texts[0]) == compared(texts[1])) == (meaning(one) == meaning(other))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1", "1.0", True),
        ("1", "10e-1", True),
        ("1", "0.001E+3", True),
        ("0", "-0", True),
        ("0", "-0.0e7", True),
        ("100", "1e2", True),
        ("1" + "0" * 639, "1e639", True),
        ("18446744073709551616", "1844674407370955161.6e1", True),
        ('"/"', '"\\/"', True),
        ('"\u00e9"', '"\\u00E9"', True),
        ('"\U0001f600"', '"\\ud83d\\uDE00"', True),
        ('{"a":1,"b":2}', '\r\n{ "b" : 2 ,\t"\\u0061" : 1 }', True),
        ('{"a":1,"a":2}', '{"a":2}', True),  # the last of a duplicate key counts
        ('{"a":2,"b":0,"a":1}', '{"b":0,"a":1}', True),
        ('{"a":{"x":1},"a":{"y":2}}', '{"a":{"y":2}}', True),
        ('{"a":1,"\\u0061":null}', '{"a":null}', True),
        ('[{"a":[1],"a":[]}]', '[{"a":[]}]', True),
        ("1", "true", False),
        ("0", "false", False),
        ("1", '"1"', False),
        ("null", '"null"', False),
        ("null", "0", False),
        ("null", '""', False),
        ("[]", "{}", False),
        ("[]", "[null]", False),
        ('{"a":null}', "{}", False),
        ("[1,2]", "[2,1]", False),
        ("[[1],2]", "[1,[2]]", False),
        ('["a,b"]', '["a","b"]', False),
        ("1", "-1", False),
        ("9007199254740993", "9007199254740992", False),  # as doubles these are one
        ("0.1", "0.1000000000000000055511151231257827", False),
        ("1e400", "1e401", False),
        ("1e-400", "0", False),
        ("9" * 599 + "8", "9" * 600, False),
        ('"\u00e9"', '"e\u0301"', False),
        ('"a"', '"A"', False),
        ('"a"', '"a "', False),
        ('"\\u0000"', '""', False),
        ('"\\\\u0061"', '"a"', False),
        ('{"a":1}', '{"A":1}', False),
        ('{"a":{"b":1}}', '{"a":{},"b":1}', False),
    ],
)
def test_spellings_are_equal_and_values_differ(one: str, other: str, same: bool) -> None:
    assert (compared(one) == compared(other)) is same


NOT_JSON = [
    b"",
    b" ",
    b"hello",
    b"{",
    b'{"a":1}}',
    b'{"a":1} x',
    b'{"a":1}{"a":1}',
    b'{"a":1,}',
    b"[1,]",
    b"{'a':1}",
    b"\xef\xbb\xbf{}",
    "{}".encode("utf-16"),
    b'{"a":NaN}',
    b"Infinity",
    b"-",
    b"01",
    b"1.",
    b".5",
    b"+1",
    b"0x10",
    b'"\xff"',
    b'{"\xff":1}',
    b'"\xed\xa0\x80"',
    b'"\\x"',
    b'"\\u12g4"',
    b'"a\nb"',
    b'"open',
    b"{} // comment",
    b"\x00",
    b"[" * 100_000,
    b"[" * 100_000 + b"]" * 100_000,
    b"9" * (MAX_DIGITS + 1),
    b"1e" + b"9" * (MAX_DIGITS + 1),
]


_ESCAPES = [
    "\\ud83d",
    "\\uDE00",
    "\\ude00",
    "\\ud83e",
    "\\\\",
    "\\n",
    "\\u0061",
    "u",
    "d83d",
    "\u00e9",
]


@given(
    st.lists(st.sampled_from(_ESCAPES), max_size=8), st.lists(st.sampled_from(_ESCAPES), max_size=8)
)
def test_half_of_a_surrogate_pair_is_a_character(one: list[str], other: list[str]) -> None:
    """JSON may hold them (RFC 8259, section 8.2).

    Texts are equal exactly if they are for Python.
    """
    texts = ['{"a":"' + "".join(pieces) + '"}' for pieces in (one, other)]
    found = [
        Canonical(LoopDetection(similarity="canonical")).compare(Document(text.encode()))[0]
        for text in texts
    ]

    for text, compared in zip(texts, found, strict=True):
        # Behind an escaped backslash what looks like the first half of a pair is none
        if compared is None:
            assert re.search(r"\\\\[uU]?d83[de]\\u[dD][eE]00", text), text
    if None not in found:
        assert (found[0] == found[1]) == (json.loads(texts[0]) == json.loads(texts[1]))


@pytest.mark.parametrize("data", NOT_JSON, ids=lambda data: repr(data[:24]))
def test_body_that_is_not_json_has_no_canonical_form(data: bytes) -> None:
    looks = Canonical(LoopDetection(similarity="canonical"))

    assert looks.compare(Document(data)) == (None, None)
    if data:
        assert looks.show(Document(data)) == ["the body byte for byte: it is not JSON"]


def test_loop_in_other_spellings_is_refused() -> None:
    service = make_service(
        policy(
            "p",
            ANY,
            similarity="canonical",
            ignore_fields=["/metadata/request_id", "/messages/*/id"],
        )
    )
    bodies = [
        b'{"model":"m","messages":[{"id":"1","content":"hi"}],"metadata":{"request_id":"a"}}',
        b'{ "metadata": {}, "messages": [{"content": "\\u0068i", "id": "2"}], "model": "m" }',
        b'{"model":"m","messages":[{"content":"Hi"}],"metadata":{"request_id":"c"}}',
        b'{"model":"m","messages":[{"content":"hi"}],"metadata":{"request_id":"c"}}',
    ]

    answers = [
        decoded(exchange(service, headers(), body(data))[-1]).WhichOneof("response")
        for data in bodies
    ]

    assert answers == ["request_body"] * 3 + ["immediate_response"]
    assert sample(service, "compared_exactly_total", policy="p") == 0


@pytest.mark.parametrize(
    ("ignored", "one", "other", "same"),
    [
        ("/t", '{"t":1,"a":1}', '{"a":1,"t":[2]}', True),
        ("/t", '{"t":1,"a":1}', '{"a":1}', True),
        ("/t", '{"x":{"t":1}}', '{"x":{"t":2}}', False),
        ("/t", "[1]", "[2]", False),
        ("/t", '{"\\u0074":1}', '{"t":2}', True),
        ("/a/b", '{"a":{"b":1}}', '{"a":{"b":2}}', True),
        ("/a/b", '{"a":{"b":1}}', '{"a":{}}', True),
        ("/a/b", '{"a":{"b":1}}', "{}", False),
        ("/a/b", '{"a":"b"}', '{"a":"c"}', False),
        ("/m/*/id", '{"m":[{"id":1},{"id":2}]}', '{"m":[{"id":3},{}]}', True),
        ("/m/*/id", '{"m":[{"id":1},{"id":2}]}', '{"m":[{"id":1}]}', False),
        ("/m/*/id", '{"m":{"x":{"id":1}}}', '{"m":{"x":{"id":2}}}', True),
        ("/m/*/id", '{"m":[[{"id":1}]]}', '{"m":[[{"id":2}]]}', False),
        ("/m/*/id", '{"m":[1,"id",null,{"id":2}]}', '{"m":[1,"id",null,{}]}', True),
        ("/*/id", '{"a":{"id":1},"b":{"id":1}}', '{"a":{"id":2},"b":{"id":3}}', True),
        ("/*", '{"a":1}', '{"b":2}', True),
        ("/*", "[1,2]", "[3,4]", True),
        ("/*", "[1,2]", "[3]", False),
        ("/0", "[1,2]", "[3,2]", True),
        ("/0", "[1,2]", "[1,3]", False),
        ("/0", "[1,2]", "[2]", False),
        ("/0", '{"0":1}', "{}", True),
        ("/00", "[1]", "[2]", False),
        ("/-1", "[1]", "[2]", False),
        ("/-", "[1]", "[2]", False),
        ("/7", "[1]", "[2]", False),
        ("/a~1b", '{"a/b":1}', '{"a/b":2}', True),
        ("/a~0b", '{"a~b":1}', '{"a~b":2}', True),
        ("/~01", '{"~1":1}', '{"~1":2}', True),
        ("/", '{"":1}', '{"":2}', True),
        ("/*/*/*", '[[[1]],{"a":{"b":2}}]', '[[[3]],{"a":{"c":4}}]', True),
        ("/\u00e9", '{"é":1}', '{"\\u00e9":2}', True),
    ],
)
def test_ignored_fields_are_not_compared(ignored: str, one: str, other: str, same: bool) -> None:
    """`*` is any one step; elements of arrays keep their places."""
    assert (compared(one, ignored) == compared(other, ignored)) is same


@pytest.mark.slow
@given(VALUES, SCALARS, st.data())
def test_pointer_ignores_exactly_its_place(value: Any, leaf: Any, data: st.DataObject) -> None:  # noqa: ANN401  # any JSON
    place, changed = (data.draw(st.sampled_from(leaves(value))) for _ in range(2))
    ignored = [pointer(place)] if place and "*" not in place else []
    other = replaced(value, changed, leaf)

    same = compared(spelled(data.draw, value), *ignored) == compared(
        spelled(data.draw, other), *ignored
    )

    expected = meaning(value) == meaning(other) or (bool(ignored) and changed == place)
    assert same == expected


def test_ignoring_fields_does_not_change_the_document() -> None:
    """Detectors share one decoded body, and none of them changes it."""
    document = Document(b'{"m":[{"id":1,"x":{"id":2}}],"id":3}')
    everything = write_canonical(document.value())

    for ignored in ("/m/*/id", "/m/*/x/id", "/m/0", "/*", "/m/*/*", "/id"):
        write_canonical(document.value(), [split_pointer(ignored)])

    assert write_canonical(document.value()) == everything


@pytest.mark.parametrize(
    ("data", "counted"),
    [
        (b"[" + b",".join([b"0.5"] * MAX_STEPS) + b"]", True),
        (b"[" + b",".join([b"0.5"] * (MAX_STEPS + 1)) + b"]", False),
        (b"[" + b",".join([b"5"] * (MAX_STEPS + 1)) + b"]", True),
        (b"[" + b"[],     " * MAX_CONTAINERS + b"0]", False),
        (b"[" + b"[],     " * (MAX_CONTAINERS - 1) + b"0]", True),
        (
            b"{" + b",".join(rb'"%d\\\\" :0' % number for number in range(MAX_MEMBERS + 1)) + b"}",
            False,
        ),
        (b"{" + b",".join(b'"%d":0' % number for number in range(MAX_MEMBERS)) + b"}", True),
        (b'"' + b"06:14:33 " * MAX_MEMBERS + b'"', True),
        (rb'"' + rb"\":0 " * (MAX_MEMBERS + 1) + b'"', True),
    ],
    ids=[
        "fractions",
        "one fraction more",
        "whole numbers",
        "containers",
        "one container less",
        "one member more",
        "members",
        "colons in a string",
        "members in a string",
    ],
)
def test_body_beyond_a_bound_is_uncounted(data: bytes, counted: bool) -> None:
    document = Document(data)

    for _ in range(2):
        assert (_reason(document) == "") is counted
        assert _reason(document) in {"", "inspect_limit"}


def _reason(document: Document) -> str:
    try:
        document.value()
    except NotCounted as why:
        return why.reason
    return ""


def test_longest_numbers_are_exact() -> None:
    longest = "123456789" * 71 + "7"

    assert len(longest) == MAX_DIGITS
    assert compared(longest) == compared(f"{longest[:-1]}.7e1") == longest.encode()
    assert compared(f"{longest}e1") == compared(f"{longest}0.0")


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("/model", "m"),
        ("/n", "15e-1"),
        ("/whole", "1"),
        ("/big", "9" * 600),
        ("/yes", "true"),
        ("/null", ""),
        ("/list", ""),
        ("/list/0", "a"),
        ("/list/1/x~1y", "b"),
        ("/list/00", ""),
        ("/list/-", ""),
        ("/list/9", ""),
        ("/list/x", ""),
        ("/model/0", ""),
        ("/absent/model", ""),
    ],
)
def test_pointer_finds_scalars_as_text(place: str, expected: str) -> None:
    numbers = f'"n":1.50,"whole":1.0,"big":{"9" * 600}'
    text = f'{{"model":"m",{numbers},"yes":true,"null":null,"list":["a",{{"x/y":"b"}}]}}'

    assert find(Document(text.encode()).value(), split_pointer(place)) == expected


@pytest.mark.parametrize("data", [b"{}", b"[1.5]", b'"x"', b"nope"])
def test_memoryview_is_read_like_bytes(data: bytes) -> None:
    view = memoryview(b"before" + data + b"after")[6 : 6 + len(data)]
    looks = Canonical(LoopDetection(similarity="canonical"))

    assert looks.compare(Document(view)) == looks.compare(Document(data))


def test_members_of_wide_objects_are_sorted() -> None:
    members = [(f"k{number:05d}", [0.5, 10**300, None, number]) for number in range(2_000)] + [
        ("", True),
        ("\U0001f600", "é"),
    ]
    given = [
        dict(members),
        dict(reversed(members)),
        dict(sorted(members, key=lambda member: member[0][::-1])),
    ]

    spelled = {
        write_canonical(Document(json.dumps([{"a": [value]}, "b"]).encode()).value())
        for value in given
    }

    (one,) = spelled
    assert json.loads(one) == [{"a": [given[0]]}, "b"]
    assert list(json.loads(one)[0]["a"][0]) == sorted(given[0])
