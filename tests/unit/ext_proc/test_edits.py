"""Edits are verified and bounded; a failing edit keeps the decision and the metadata."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st

import extproc.ext_proc.changes.changes
from extproc.ext_proc.budget import InspectionBudget
from extproc.ext_proc.changes.changes import Changes
from extproc.ext_proc.service import Service
from extproc.pb.external_processor_pb2 import ProcessingResponse
from extproc.request.document import NotCounted
from extproc.request.patch import MAX_BYTES, UNVERIFIED, Patch, Value
from tests.support.documents import policy
from tests.support.edit_fuzzer import try_one
from tests.support.engine import ANY
from tests.support.extent import deepen
from tests.support.messages import body, headers
from tests.support.service import decoded, exchange, make_service, metadata_of, sample, status
from tests.support.steering import changed
from tests.support.turn_writers import Did, as_anthropic, as_chat

_TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {}}} for name in ("run", "look")
]


def ask(service: Service, data: bytes, path: str = "/v1/x", **more: Any) -> ProcessingResponse:  # noqa: ANN401  # as `headers`
    return decoded(
        exchange(service, headers(path, x_team="t", x_session_id="s", **more), body(data))[-1]
    )


def repeat(service: Service, data: bytes, path: str = "/v1/x", **more: Any) -> ProcessingResponse:  # noqa: ANN401  # as above
    return [ask(service, data, path, **more) for _ in range(2)][-1]


def steering(**loop: Any) -> dict[str, Any]:  # noqa: ANN401  # keys of loop_detection
    made = policy("steer", ANY, **{"action": "steer", "threshold_identical_requests": 2, **loop})
    made["spec"]["session_limits"] = {"max_steps": 1_000}
    return made


def narrowing(*, every: bool) -> dict[str, Any]:
    limits: dict[str, Any] = {"max_tool_calls": 1, "max_tool_calls_mode": "finish"}
    return {
        "id": "narrow",
        "spec": {
            "selector": ANY,
            "session_limits": limits if every else {"max_calls_per_tool": {"run": 1}},
        },
    }


def called(**more: object) -> bytes:
    return json.dumps(
        {**as_chat([Did((("run", {}),), ("seen",))]), "tools": _TOOLS, **more}
    ).encode()


def nested(depth: int, inner: str = '"a"', behind: str = "") -> bytes:
    opening, closing = '[{"type":"tool_result","tool_use_id":"1","content":', f"}}{behind}]"
    content = f"{opening * depth}{inner}{closing * depth}"
    return f'{{"messages":[{{"role":"user","content":{content}}}]}}'.encode()


def put_note(old: bytes) -> bytes:
    return changed(repeat(make_service(steering()), old))


# ---- The new body


@pytest.mark.slow
@pytest.mark.parametrize("first", deepen(range(0, 3_000, 500), 0, 500))
def test_edits_of_nearly_right_bodies_change_nothing_else(first: int) -> None:
    for seed in range(first, first + 500):
        try_one(seed)


@pytest.mark.parametrize("depth", [1, 2, 300])
def test_note_is_put_behind_the_outermost_result(depth: int) -> None:
    new = put_note(nested(depth, behind=',{"type":"text","text":"behind"}'))

    (block, behind) = json.loads(new)["messages"][0]["content"]
    assert "gateway" in (block["content"] if depth == 1 else block["content"][-1]["text"])
    assert (behind, new.count(b"gateway")) == ({"type": "text", "text": "behind"}, 1)


def test_result_without_content_gets_the_note() -> None:
    blocks = [{"type": "tool_result", "tool_use_id": "1"}, {"type": "text", "text": "go on"}]
    new = json.loads(
        put_note(json.dumps({"messages": [{"role": "user", "content": blocks}]}).encode())
    )

    result, text = new["messages"][0]["content"]
    assert result == blocks[0] | {"content": result["content"]}
    assert "gateway" in result["content"]
    assert text == blocks[1]


def find(patch: Patch, *path: str | int) -> Value:
    value = patch.root
    for step in path:
        value = (
            patch.open_fields(value)[step]
            if isinstance(step, str)
            else patch.open_items(value)[step]
        )
    return value


def move_end(value: Value, by: int) -> Value:
    return Value(value.part, value.key, value.at, value.start, value.end + by)


Step = Callable[[Patch], object]
WRONG: dict[str, list[Step]] = {
    "in the middle of a text": [lambda patch: patch.extend(move_end(find(patch, "a"), -2), b"x")],
    "a key that is there": [lambda patch: patch.append(patch.root, b"1", "a")],
    "no value": [lambda patch: patch.replace(find(patch, "a"), b"")],
    "a member more": [lambda patch: patch.replace(find(patch, "a"), b'1,"z":2')],
    "one edit in the other": [
        lambda patch: patch.replace(find(patch, "b", 0), b"1"),
        lambda patch: patch.change(patch.root, {"b": None}),
    ],
    "into a neighbour": [lambda patch: patch.replace(move_end(find(patch, "b", 0), 2), b"1")],
    "text behind a list": [lambda patch: patch.extend(find(patch, "b"), b"more")],
    "a tail that is not as in JSON": [
        lambda patch: patch.extend(find(patch, "a"), b'"'),
        lambda patch: patch.change(patch.root, {"e": b"0"}),
    ],
}


@pytest.mark.parametrize("steps", WRONG.values(), ids=WRONG)
def test_wrong_edit_gives_no_body(steps: list[Step]) -> None:
    patch = Patch(b'{"a":"some text","b":[{"c":1},2],"d":[]}')
    for step in steps:
        step(patch)

    with pytest.raises(NotCounted, match=UNVERIFIED):
        patch.apply()


def test_changes_keep_commas_space_and_order() -> None:
    patch = Patch(rb' { "a" : [ 1 , 2 ,3 ] , "b" : { } , "c": "x" , "d" : [ ] } ')
    assert len(patch.open_items(find(patch, "a"))) == 3
    patch.remove(find(patch, "a"), {0, 2})
    patch.open_items(find(patch, "d"))
    patch.append(find(patch, "d"), b"true")
    patch.change(find(patch, "b"), {"n": b"null", "m": b'"\xc3\xa9"'})
    patch.extend(find(patch, "c"), rb"\"\n")
    patch.change(patch.root, {"e": b"0"})

    expected = (
        rb' { "a" : [ 2 ] , "b" : {"n":null,"m":"%b" } , "c": "x\"\n" , "d" : [true ],"e":0 } '
        % b"\xc3\xa9"
    )
    assert b"".join(patch.apply()) == expected


_TEXTS = st.lists(
    st.sampled_from(['{"', '"', "\\", "}", "]", ",", ":", "{", '":{"', "a"]), max_size=6
).map("".join)
_VALUES = st.recursive(
    _TEXTS | st.integers(-1, 1),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(
    st.lists(st.dictionaries(_TEXTS, _VALUES, max_size=3) | _VALUES, max_size=4),
    st.sampled_from([None, 0, 1]),
)
def test_list_items_begin_and_end_as_for_a_parser(values: list[Any], indent: int | None) -> None:
    separators = (",", ":") if indent == 0 else None
    patch = Patch(json.dumps({"a": values}, indent=indent or None, separators=separators).encode())

    found = [patch.data[value.start : value.end] for value in patch.open_items(find(patch, "a"))]

    assert [json.loads(data) for data in found] == values


# ---- Bodies that are not edited


_AWS = (
    "AWS4-HMAC-SHA256 Credential=A/20260101/us-east-1/bedrock/aws4_request, "
    "SignedHeaders=host, Signature=0"
)


@pytest.mark.parametrize(
    ("signature", "signed"),
    [
        ({"authorization": _AWS}, True),
        ({"authorization": "AWS4-ECDSA-P256-SHA256 Credential=A"}, True),
        ({"authorization": "TC3-HMAC-SHA256 Credential=A"}, True),
        ({"authorization": 'Signature keyId="k"'}, True),
        ({"authorization": _AWS, "x_amz_content_sha256": "0" * 64}, True),
        ({"authorization": _AWS, "x_amz_content_sha256": "UNSIGNED-PAYLOAD"}, False),
        (
            {"authorization": _AWS, "x_amz_content_sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER"},
            False,
        ),
        ({"signature_input": 'sig=("content-digest");keyid="k"', "signature": "sig=:AA==:"}, True),
        ({"authorization": "Bearer AWS4-HMAC-SHA256"}, False),
        ({"authorization": "Basic AAAA"}, False),
        ({"path": "/x?X-Amz-Signature=0&X-Amz-Date=1"}, True),  # a presigned URL
    ],
)
def test_signed_body_is_not_edited(signature: dict[str, str], signed: bool) -> None:
    """It passes with a warning, or is refused if it must lose its tools."""
    strict, watched = (
        make_service(steering(), narrowing(every=True)),
        make_service(narrowing(every=False)),
    )

    answers = [ask(strict, called(), **signature), ask(watched, called(), **signature)]
    told = repeat(make_service(steering()), called(), **signature)

    assert [status(answer) for answer in answers] == ([429, 200] if signed else [200, 200])
    assert [changed(answer) != b"" for answer in (answers[1], told)] == [not signed] * 2
    assert metadata_of(told)["action"] == ("warn" if signed else "steer")
    for service in (strict, watched):
        assert sample(service, "unnarrowed_total", policy="narrow", reason="signed_body") == signed


def test_body_above_the_policys_own_bound_is_not_edited() -> None:
    service = make_service(steering(max_inspect_bytes=100), policy("looks", ANY, similarity="tail"))

    answer = repeat(service, called())

    assert (changed(answer), metadata_of(answer)["action"]) == (b"", "warn")
    assert sample(service, "unsteered_total", policy="steer", reason="inspect_limit") == 1


_LONG = Did((("run", {}),), ("a" * (2**20 - 2**12),))
_TYPED = b'{"messages":[{"role":"user","content":[{"content":"a","type":%b}]}]}'
BOUNDS: dict[str, tuple[bytes, str]] = {
    "all levels together": (nested(400, '"' + "a" * (MAX_BYTES - 2**16) + '"'), "inspect_limit"),
    "a long text": (
        b'{"messages":[{"role":"user","content":"%b"}]}' % (b"a" * MAX_BYTES),
        "inspect_limit",
    ),
    "many blocks": (
        b'{"messages":[{"role":"user","content":[%b{}]}]}' % (b'{"type":"text"},' * 10_000),
        "inspect_limit",
    ),
    "many numbers": (
        b'{"messages":[{"role":"user","content":[%b0]}]}' % (b"0," * 500_000),
        "inspect_limit",
    ),
    "many messages": (b'{"messages":[%b0]}' % (b"0," * 500_000), "inspect_limit"),
    "many members": (
        b'{"messages":[{"role":"user",%b"content":"a"}]}'
        % b"".join([b'"%d":0,' % number for number in range(20_000)]),
        "inspect_limit",
    ),
    "no text in the body": (b'{"messages":[{"role":"user","content":"a"}],"\x80":0}', "not_json"),
    "no text in a message": (b'{"messages":[{"role":"user","content":"a","\x80":0}]}', "not_json"),
    # a body of the size that policies look into by default, which is nearly all one result
    "a long result": (json.dumps(as_chat([_LONG])).encode(), ""),
    "a long result in blocks": (json.dumps(as_anthropic([_LONG])).encode(), ""),
    # a KiB of small values, escapes or blanks takes longer than a KiB of text
    "letters": (_TYPED % (b'"%b"' % (b"a" * 2**19)), ""),
    "words": (_TYPED % (b'"%b"' % (b"a b\\n" + b"one word by another, so it goes " * 2**14)), ""),
    "numbers": (_TYPED % (b"[%b0]" % (b"0," * 2**18)), "inspect_limit"),
    "escapes": (_TYPED % (b'"%b"' % (b"\\n" * 2**18)), "inspect_limit"),
    "blanks": (_TYPED % (b"[%b0]" % (b" " * 2**19)), "inspect_limit"),
}


@pytest.mark.parametrize(("data", "reason"), BOUNDS.values(), ids=BOUNDS)
def test_body_that_takes_too_long_is_not_edited(data: bytes, reason: str) -> None:
    service = make_service(steering(max_inspect_bytes=2 * MAX_BYTES))

    answer = repeat(service, data)

    assert (len(changed(answer)) > len(data)) is not bool(reason)
    assert sample(service, "unsteered_total", policy="steer", reason=reason) == bool(reason)


@pytest.mark.parametrize("looks", [{}, {"similarity": "tail"}])
def test_no_body_is_edited_without_inspection_time(looks: dict[str, str]) -> None:
    service = make_service(steering(**looks))
    first = ask(service, called())
    service.budget.spend("", 10.0)

    answer = ask(service, called())

    assert (status(first), changed(answer)) == (200, b"")
    if not looks:  # the others do not count it
        assert metadata_of(answer)["action"] == "warn"
        assert sample(service, "unsteered_total", policy="steer", reason="inspect_budget") == 1


# ---- Failing edits


def test_request_losing_all_tools_is_refused_without_time() -> None:
    spent = InspectionBudget(0.0)
    spent.spend("", 1e9)
    for every in (True, False):
        service = make_service(narrowing(every=every))
        service.changes = Changes(service.reporter, spent)

        assert status(ask(service, called())) == (429 if every else 200)
        assert sample(service, "unnarrowed_total", policy="narrow", reason="inspect_budget") == 1


_CHOSEN = called(tool_choice={"type": "function", "function": {"name": "run"}, "more": 1})
# By where the byte is: a body, why a tool cannot be taken out of it, why it gets no note, and
# whether it is refused where all tools have to go.
_BAD_BYTES = {
    "top level": (called(more=1).replace(b'"more"', b'"\x80"'), "not_json", "not_json", True),
    "tools": (called().replace(b'"parameters"', b'"\x80"'), "not_json", "", True),
    "tool_choice": (
        _CHOSEN.replace(b'"more"', b'"\x80"'),
        "not_json",
        "",
        False,
    ),  # which is replaced
    "messages": (
        called().replace(b'"role": "tool"', b'"\x80": 1, "role": "tool"'),
        "",
        "not_json",
        False,
    ),
}


@pytest.mark.parametrize("position", _BAD_BYTES)
def test_invalid_byte_fails_only_edits_that_read_it(position: str) -> None:
    data, narrowed, steered, refused = _BAD_BYTES[position]
    services = [
        make_service(made) for made in (steering(), narrowing(every=False), narrowing(every=True))
    ]

    told, fewer, none = repeat(services[0], data), ask(services[1], data), ask(services[2], data)

    assert [changed(answer) == b"" for answer in (told, fewer, none)] == [
        steered != "",
        narrowed != "",
        refused,
    ]
    assert metadata_of(told)["action"] == ("warn" if steered else "steer")
    assert status(none) == (429 if refused else 200)
    assert refused or json.loads(changed(none).replace(b"\x80", b"?"))["tool_choice"] == "none"
    assert sample(services[0], "unsteered_total", policy="steer", reason=steered) == (steered != "")
    assert sample(services[1], "unnarrowed_total", policy="narrow", reason=narrowed) == (
        narrowed != ""
    )
    assert sample(services[2], "unnarrowed_total", policy="narrow", reason="not_json") == refused
    assert all(json.loads(metadata_of(answer)["sessions"]) for answer in (told, fewer))
    assert [
        sample(service, "fail_open_total", reason="internal_error") for service in services
    ] == [0, 0, 0]


@pytest.mark.parametrize(
    ("half", "place"),
    [
        (rb"\ud800", b"Fix it."),
        (rb"\udc00", b"seen"),
        (rb"x\uD83D", b"look"),
        (rb"x\uD83D", b"seen"),
    ],
)
def test_body_with_half_a_surrogate_pair_is_edited(half: bytes, place: bytes) -> None:
    data = called().replace(place, half)

    fewer, none = [
        changed(ask(make_service(narrowing(every=every)), data)) for every in (False, True)
    ]
    noted = put_note(data)

    for new, tools in ((fewer, 1), (none, 2)):
        assert json.loads(new)["messages"] == json.loads(data)["messages"]
        assert len(json.loads(new)["tools"]) == tools
    assert half in fewer
    end = noted.index(b"gateway")
    start = noted.rindex(rb"\n\n", 0, end)
    assert data.startswith(noted[:start])
    assert noted.endswith(data[start:])


@pytest.mark.sources
@pytest.mark.parametrize(
    "error",
    [
        UnicodeDecodeError("utf-8", b"\x80", 0, 1, "no"),
        RecursionError(),
        MemoryError(),
        KeyError("x"),
    ],
)
def test_internal_error_in_an_edit_keeps_the_decision(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What steers warns, what has to lose all tools is refused, and sessions learn of each call."""

    def fail(*_: object) -> bytes:
        raise error

    monkeypatch.setattr(extproc.ext_proc.changes.changes, "add_note", fail)
    monkeypatch.setattr(extproc.ext_proc.changes.changes, "take_out", fail)
    steers, narrows = [make_service(made) for made in (steering(), narrowing(every=False))]
    strict = make_service(narrowing(every=True), steering())

    told, fewer = repeat(steers, called()), ask(narrows, called())

    assert [status(answer) for answer in (told, fewer, ask(strict, called()))] == [200, 200, 429]
    assert metadata_of(told)["action"] == "warn"
    assert all(json.loads(metadata_of(answer)["sessions"]) for answer in (told, fewer))
    assert sample(steers, "unsteered_total", policy="steer", reason="internal_error") == 1
    for service in (narrows, strict):
        assert sample(service, "unnarrowed_total", policy="narrow", reason="internal_error") == 1


@pytest.mark.sources
def test_error_after_the_count_keeps_session_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    service = make_service(steering())
    monkeypatch.setattr(service.reporter, "report", None)

    answer = ask(service, called())

    assert status(answer) == 200
    assert json.loads(metadata_of(answer)["sessions"])[0]["policy"] == "steer"
    assert sample(service, "fail_open_total", reason="internal_error") == 1
