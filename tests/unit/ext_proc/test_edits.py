"""Edits of bodies: each is verified and bounded, and one that goes wrong keeps the decision and the session's metadata."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import extproc.ext_proc.changes.changes
from extproc.ext_proc.budget import InspectionBudget
from extproc.ext_proc.changes.edits import NotEdited
from extproc.ext_proc.changes.narrow import narrow
from extproc.ext_proc.changes.steer import steer
from extproc.ext_proc.service import Service
from extproc.pb.external_processor_pb2 import ProcessingResponse
from extproc.request.document import NotCounted
from extproc.request.http import HttpRequest
from extproc.request.patch import AMBIGUOUS, MAX_BYTES, UNVERIFIED, Patch, Value
from tests.support.documents import policy
from tests.support.edit_fuzzer import try_one
from tests.support.engine import ANY
from tests.support.extent import deepen
from tests.support.messages import body, headers, make_marks
from tests.support.service import decoded, exchange, make_service, metadata_of, sample
from tests.support.turn_writers import Did, as_anthropic, as_chat

_EXAMPLES = 3_000
_REQUEST = HttpRequest("POST", "/v1/x")


def put_note(old: bytes) -> bytes:
    """A body that is steered."""
    return b"".join(steer(_REQUEST, old, "note", make_marks))


_TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("run", "look")]


def ask(service: Service, data: bytes, **more: Any) -> ProcessingResponse:  # noqa: ANN401  # as `headers`
    """The answer to one request of a session; `more` are headers."""
    return decoded(exchange(service, headers("/v1/x", x_team="t", x_session_id="s", **more), body(data))[-1])


def repeat(service: Service, data: bytes, **more: Any) -> ProcessingResponse:  # noqa: ANN401  # as `headers`
    """The answer to the second of two equal requests."""
    return [ask(service, data, **more) for _ in range(2)][-1]


def status(answer: ProcessingResponse) -> int:
    """Of the refusal, 200 for none."""
    return answer.immediate_response.status.code if answer.HasField("immediate_response") else 200


def changed(answer: ProcessingResponse) -> bytes:
    """The body that Envoy is told to send on; empty where it is told of none."""
    return answer.request_body.response.body_mutation.body


def steering(**loop: Any) -> dict[str, Any]:  # noqa: ANN401  # keys of loop_detection
    """A policy that steers from the second request on, whatever is in its body, and counts what sessions cost."""
    made = policy("steer", ANY, **{"action": "steer", "threshold_identical_requests": 2, **loop})
    made["spec"]["session_limits"] = {"max_steps": 1_000}
    return made


def narrowing(*, every: bool) -> dict[str, Any]:
    """A policy that takes a tool away, or all of them, because the history shows a call."""
    limits: dict[str, Any] = {"max_tool_calls": 1, "max_tool_calls_mode": "finish"}
    return {
        "id": "narrow",
        "spec": {"selector": ANY, "session_limits": limits if every else {"max_calls_per_tool": {"run": 1}}},
    }


def called(**more: object) -> bytes:
    """A request whose history shows a call of a tool that it offers."""
    return json.dumps({**as_chat([Did((("run", {}),), ("seen",))]), "tools": _TOOLS, **more}).encode()


def nested(depth: int, inner: str = '"a"', behind: str = "") -> bytes:
    """A result in a result, and so on."""
    opening, closing = '[{"type":"tool_result","tool_use_id":"1","content":', f"}}{behind}]"
    return f'{{"messages":[{{"role":"user","content":{opening * depth}{inner}{closing * depth}}}]}}'.encode()


# --- what comes out is right


@pytest.mark.slow
@pytest.mark.parametrize("first", deepen(range(0, _EXAMPLES, 500), 0, 500))
def test_edits_of_nearly_right_bodies_change_what_they_should(first: int) -> None:
    """Python's own parser finds the old body in the new one, with all its keys, except for the notes or the tools."""
    for seed in range(first, first + 500):
        try_one(seed)


@pytest.mark.parametrize("depth", [1, 2, 3, 300])
def test_a_result_in_a_result_is_content_like_any_other(depth: int) -> None:
    """The note stands behind the text of the outermost, which is the one that the model was sent."""
    old = nested(depth, behind=',{"type":"text","text":"behind"}')

    new = put_note(old).decode()

    (block, behind) = json.loads(new)["messages"][0]["content"]
    said = block["content"] if depth == 1 else block["content"][-1]["text"]
    assert "note" in said
    assert behind == {"type": "text", "text": "behind"}
    assert new.count("note") == new.count("gateway") == 1


def test_a_result_without_content_gets_one() -> None:
    """Whatever stands behind it."""
    blocks = [{"type": "tool_result", "tool_use_id": "1"}, {"type": "text", "text": "go on"}]
    new = json.loads(put_note(json.dumps({"messages": [{"role": "user", "content": blocks}]}).encode()))

    result, text = new["messages"][0]["content"]
    assert result == blocks[0] | {"content": result["content"]}
    assert "note" in result["content"]
    assert text == blocks[1]


def test_a_note_that_stands_in_a_response_of_its_own_is_not_written_twice() -> None:
    """Gemini's structured result keeps one member for it."""
    parts = [{"functionResponse": {"name": "f", "response": {"a": 1}}}]
    once = put_note(json.dumps({"contents": [{"role": "user", "parts": parts}]}).encode())

    assert put_note(once) == once


def find(patch: Patch, *path: str | int) -> Value:
    """A value of a body."""
    value = patch.root
    for step in path:
        value = patch.open_fields(value)[step] if isinstance(step, str) else patch.open_items(value)[step]
    return value


def cut_short(patch: Patch) -> None:
    """A place in the middle of a text."""
    text = find(patch, "a")
    patch.extend(Value("a", text.at, text.start, text.end - 2, patch.root), b"x")


def write_twice(patch: Patch) -> None:
    """A key that is there already."""
    patch.append(patch.root, b"1", "a")


def write_none(patch: Patch) -> None:
    """No value."""
    patch.replace(find(patch, "a"), b"")


def write_two(patch: Patch) -> None:
    """A member more than was meant."""
    patch.replace(find(patch, "a"), b'1,"z":2')


def take_what_changes(patch: Patch) -> None:
    """Two edits, one in the other."""
    patch.replace(find(patch, "b", 0), b"1")
    patch.change(patch.root, {"b": None})


def reach_into_another(patch: Patch) -> None:
    """A value that ends in its neighbour."""
    items = find(patch, "b")
    patch.replace(Value("", items.start, items.start + 1, items.end + 5, items), b"1")


def extend_a_list(patch: Patch) -> None:
    """Text that is appended to no string."""
    patch.extend(find(patch, "b"), b"more")


def end_a_text(patch: Patch) -> None:
    """A tail that is not as in JSON, beside another change."""
    patch.extend(find(patch, "a"), b'"')
    patch.change(patch.root, {"e": b"0"})


@pytest.mark.parametrize(
    "wrong",
    [cut_short, write_twice, write_none, write_two, take_what_changes, reach_into_another, extend_a_list, end_a_text],
)
def test_an_edit_that_is_wrong_is_none(wrong: Callable[[Patch], None]) -> None:
    """Whatever mistake leads to it, the body does not come out."""
    patch = Patch(b'{"a":"some text","b":[{"c":1},2],"d":[]}')

    wrong(patch)

    with pytest.raises(NotCounted, match=UNVERIFIED):
        patch.apply()


def test_changes_are_written_where_they_belong() -> None:
    """Members and elements go with their commas, new ones come last, and the space between others stays."""
    patch = Patch(rb' { "a" : [ 1 , 2 ,3 ] , "b" : { } , "c": "x" , "d" : [ ] } ')
    assert len(patch.open_items(find(patch, "a"))) == 3
    patch.remove(find(patch, "a"), {0, 2})
    patch.open_items(find(patch, "d"))
    patch.append(find(patch, "d"), b"true")
    patch.change(find(patch, "b"), {"n": b"null", "m": b'"\xc3\xa9"'})
    patch.extend(find(patch, "c"), rb"\"\n")
    patch.change(patch.root, {"e": b"0"})

    assert (
        b"".join(patch.apply())
        == rb' { "a" : [ 2 ] , "b" : {"n":null,"m":"' + b"\xc3\xa9" + rb'" } , "c": "x\"\n" , "d" : [true ],"e":0 } '
    )


_TEXTS = st.lists(st.sampled_from(['{"', '"', "\\", "}", "]", ",", ":", "{", '":{"', "a"]), max_size=6).map("".join)
_VALUES = st.recursive(
    _TEXTS | st.integers(-1, 1),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(_TEXTS, _VALUES, max_size=3) | _VALUES, max_size=4), st.sampled_from([None, 0, 1]))
def test_a_list_is_read_backwards_as_it_stands(values: list[Any], indent: int | None) -> None:
    """Whatever its texts look like, each element begins and ends where a parser says."""
    separators = (",", ":") if indent == 0 else None
    patch = Patch(json.dumps({"a": values}, indent=indent or None, separators=separators).encode())

    found = [patch.data[value.start : value.end] for value in patch.open_newest(find(patch, "a"))]

    assert [json.loads(data) for data in found] == values[::-1]


# --- what is not changed


_AWS = "AWS4-HMAC-SHA256 Credential=A/20260101/us-east-1/bedrock/aws4_request, SignedHeaders=host, Signature=0"


@pytest.mark.parametrize(
    ("signature", "signed"),
    [
        ({"authorization": _AWS}, True),
        ({"authorization": "AWS4-ECDSA-P256-SHA256 Credential=A"}, True),
        ({"authorization": "TC3-HMAC-SHA256 Credential=A"}, True),
        ({"authorization": 'Signature keyId="k"'}, True),
        ({"authorization": _AWS, "x_amz_content_sha256": "0" * 64}, True),
        ({"authorization": _AWS, "x_amz_content_sha256": "UNSIGNED-PAYLOAD"}, False),
        ({"authorization": _AWS, "x_amz_content_sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER"}, False),
        ({"signature_input": 'sig=("content-digest");keyid="k"', "signature": "sig=:AA==:"}, True),
        ({"authorization": "Bearer AWS4-HMAC-SHA256"}, False),
        ({"authorization": "Basic AAAA"}, False),
    ],
)
def test_a_signed_body_stays_as_it_is(signature: dict[str, str], signed: bool) -> None:
    """The client's signature fits only the old body: it passes with a warning, or is refused if it must lose its tools."""
    service = make_service(steering(), narrowing(every=True))
    watched = make_service(narrowing(every=False))

    answers = [ask(service, called(), **signature), ask(watched, called(), **signature)]
    told = repeat(make_service(steering()), called(), **signature)

    assert [status(answer) for answer in answers] == ([429, 200] if signed else [200, 200])
    assert [changed(answer) != b"" for answer in (answers[1], told)] == [not signed] * 2
    assert metadata_of(told)["action"] == ("warn" if signed else "steer")
    assert sample(service, "unnarrowed_total", policy="narrow", reason="signed_body") == signed
    assert sample(watched, "unnarrowed_total", policy="narrow", reason="signed_body") == signed


def test_a_signature_in_the_query_is_one() -> None:
    """As in a presigned URL."""
    with pytest.raises(NotEdited, match="signed_body"):
        steer(HttpRequest("POST", "/x?X-Amz-Signature=0&X-Amz-Date=1"), called(), "note", make_marks)


def test_a_policy_changes_no_body_that_is_above_its_own_bound() -> None:
    """Whatever other policies look into."""
    service = make_service(steering(max_inspect_bytes=100), policy("looks", ANY, similarity="tail"))

    answer = [ask(service, called()) for _ in range(2)][-1]

    assert (changed(answer), metadata_of(answer)["action"]) == (b"", "warn")
    assert sample(service, "unsteered_total", policy="steer", reason="inspect_limit") == 1


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (nested(400, '"' + "a" * (MAX_BYTES - 2**16) + '"'), "inspect_limit"),
        (b'{"messages":[{"role":"user","content":"%b"}]}' % (b"a" * MAX_BYTES), "inspect_limit"),
        (b'{"messages":[{"role":"user","content":[%b{}]}]}' % (b'{"type":"text"},' * 10_000), "inspect_limit"),
        (b'{"messages":[{"role":"user","content":[%b0]}]}' % (b"0," * 500_000), "inspect_limit"),
        (b'{"messages":[%b0]}' % (b"0," * 500_000), "inspect_limit"),
        (
            b'{"messages":[{"role":"user",%b"content":"a"}]}' % b"".join([b'"%d":0,' % n for n in range(20_000)]),
            "inspect_limit",
        ),
        (b'{"messages":[{"role":"user","content":"a"}],"\x80":0}', "not_json"),
        (b'{"messages":[{"role":"user","content":"a","\x80":0}]}', "not_json"),
    ],
)
def test_what_is_too_much_is_left_alone(data: bytes, reason: str) -> None:
    """All levels of a body share one number of steps."""
    with pytest.raises(NotEdited, match=reason):
        put_note(data)


def test_a_long_result_gets_its_note() -> None:
    """A body of the size that policies look into by default, nearly all of which is one result."""
    turn = Did((("run", {}),), ("a" * (2**20 - 2**12),))
    for write in (as_chat, as_anthropic):
        data = json.dumps(write([turn])).encode()
        assert len(data) > 2**20 - 2**12
        assert len(put_note(data)) > len(data)


@pytest.mark.parametrize(
    ("value", "noted"),
    [
        (b'"%b"' % (b"a" * 2**19), True),
        (b"[%b0]" % (b"0," * 2**18), False),
        (b'"%b"' % (b"\\n" * 2**18), False),
        (b"[%b0]" % (b" " * 2**19), False),
        (b'"%b"' % (b"a b\\n" + b"one word by another, so it goes " * 2**14), True),
    ],
    ids=["letters", "numbers", "escapes", "blanks", "words"],
)
def test_a_body_that_takes_long_to_read_is_left_alone(value: bytes, noted: bool) -> None:
    """A KiB of small values, escapes or blanks takes longer than a KiB of text, so such a body gets no note."""
    data = b'{"messages":[{"role":"user","content":[{"content":"a","type":%b}]}]}' % value

    if noted:
        assert len(put_note(data)) > len(data)
    else:
        with pytest.raises(NotEdited, match="inspect_limit"):
            put_note(data)


@pytest.mark.parametrize("looks", [{}, {"similarity": "tail"}])
def test_an_edit_asks_for_time_first(looks: dict[str, str]) -> None:
    """Where the time for looking into bodies is used up, none is changed, not even one that need not be looked into."""
    service = make_service(steering(**looks))
    first = ask(service, called())
    service.budget.spend("", 10.0)

    answer = ask(service, called())

    assert (status(first), changed(answer)) == (200, b"")
    if not looks:  # the others do not count it
        assert metadata_of(answer)["action"] == "warn"
        assert sample(service, "unsteered_total", policy="steer", reason="inspect_budget") == 1


@pytest.mark.sources
def test_without_time_tools_that_have_to_go_are_no_way_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where looking for calls has used up the time, a request is refused none of whose tools may be called any more."""
    spent = InspectionBudget(0.0)
    spent.spend("", 1e9)
    strict, other = make_service(narrowing(every=True)), make_service(narrowing(every=False))
    for service in (strict, other):
        monkeypatch.setattr(service.changes, "_budget", spent)

    assert [status(ask(service, called())) for service in (strict, other)] == [429, 200]
    for service in (strict, other):
        assert sample(service, "unnarrowed_total", policy="narrow", reason="inspect_budget") == 1


# --- what goes wrong


_BAD_BYTES = {
    "top level": (called(more=1).replace(b'"more"', b'"\x80"'), "not_json", "not_json"),
    "tools": (called().replace(b'"parameters"', b'"\x80"'), "not_json", ""),
    "tool_choice": (
        called(tool_choice={"type": "function", "function": {"name": "run"}, "more": 1}).replace(b'"more"', b'"\x80"'),
        "not_json",
        "",
    ),
    "messages": (called().replace(b'"role": "tool"', b'"\x80": 1, "role": "tool"'), "", "not_json"),
}
"""By where the byte is: a body, why a tool cannot be taken out of it, and why it gets no note; empty where that can be done."""


@pytest.mark.parametrize("position", _BAD_BYTES)
def test_a_byte_that_is_no_text_costs_the_edit_alone(position: str) -> None:
    """Only an edit that has to read the place fails, its decision stands, and the session learns of the call."""
    data, narrowed, steered = _BAD_BYTES[position]
    services = [make_service(steering()), make_service(narrowing(every=False))]

    told, fewer = repeat(services[0], data), ask(services[1], data)

    assert [changed(answer) == b"" for answer in (told, fewer)] == [steered != "", narrowed != ""]
    assert metadata_of(told)["action"] == ("warn" if steered else "steer")
    assert sample(services[0], "unsteered_total", policy="steer", reason=steered) == (steered != "")
    assert sample(services[1], "unnarrowed_total", policy="narrow", reason=narrowed) == (narrowed != "")
    assert all(json.loads(metadata_of(answer)["sessions"]) for answer in (told, fewer))
    assert [sample(service, "fail_open_total", reason="internal_error") for service in services] == [0, 0]


@pytest.mark.parametrize("position", _BAD_BYTES)
def test_such_a_byte_is_no_way_around_for_tools_that_have_to_go(position: str) -> None:
    """Where no tool may be called any more, and none can be taken out, the request is refused."""
    data, reason, _ = _BAD_BYTES[position]
    service = make_service(narrowing(every=True))

    answer = ask(service, data)

    read = position in {"messages", "tool_choice"}  # the one is not looked at, the other replaced
    assert status(answer) == (200 if read else 429)
    assert (json.loads(changed(answer).replace(b"\x80", b"?"))["tool_choice"] if read else "none") == "none"
    assert sample(service, "unnarrowed_total", policy="narrow", reason=reason) == (not read)


@pytest.mark.parametrize("half", [rb"\ud800", rb"\udc00", rb"x\uD83D"])
@pytest.mark.parametrize("place", [b"Fix it.", b"seen", b"look"])
@pytest.mark.parametrize("every", [True, False])
def test_half_a_character_does_not_keep_tools_from_going(half: bytes, place: bytes, every: bool) -> None:
    """Wherever it stands, it stays as it was sent."""
    data = called().replace(place, half)

    new = changed(ask(make_service(narrowing(every=every)), data))

    assert json.loads(new)["messages"] == json.loads(data)["messages"]
    assert half in new or (place == b"look" and every)
    assert len(json.loads(new)["tools"]) == (2 if every else 1)


@pytest.mark.sources
@pytest.mark.parametrize(
    "error", [UnicodeDecodeError("utf-8", b"\x80", 0, 1, "no"), RecursionError(), MemoryError(), KeyError("x")]
)
def test_an_error_of_ours_keeps_the_decision(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """What steers warns, what has to lose all of its tools is refused, and any other passes; sessions learn of each call."""

    def fail(*_: object) -> bytes:
        raise error

    monkeypatch.setattr(extproc.ext_proc.changes.changes, "steer", fail)
    monkeypatch.setattr(extproc.ext_proc.changes.changes, "narrow", fail)
    services = [make_service(made) for made in (steering(), narrowing(every=False))]
    strict = make_service(narrowing(every=True), steering())

    told, fewer = repeat(services[0], called()), ask(services[1], called())

    assert [status(answer) for answer in (told, fewer, ask(strict, called()))] == [200, 200, 429]
    assert metadata_of(told)["action"] == "warn"
    assert all(json.loads(metadata_of(answer)["sessions"]) for answer in (told, fewer))
    assert sample(services[0], "unsteered_total", policy="steer", reason="internal_error") == 1
    for service in (services[1], strict):
        assert sample(service, "unnarrowed_total", policy="narrow", reason="internal_error") == 1


@pytest.mark.sources
def test_an_error_behind_the_count_keeps_the_sessions_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request passes, as with any error of ours, and its cost is still counted."""
    service = make_service(steering())
    monkeypatch.setattr(service.reporter, "report", lambda *_: 1 / 0)

    answer = ask(service, called())

    assert status(answer) == 200
    assert json.loads(metadata_of(answer)["sessions"])[0]["policy"] == "steer"
    assert sample(service, "fail_open_total", reason="internal_error") == 1


def test_narrowing_reads_a_key_that_stands_twice_in_two_ways() -> None:
    """Wherever it has to look: it is not done."""
    for twice in ('{"name":"run","name":"look"}', '{"type":"function","function":{"name":"run","n\\u0061me":"run"}}'):
        data = called().replace(b'"tools": [', f'"tools": [{twice}, '.encode())
        with pytest.raises(NotEdited, match=AMBIGUOUS):
            narrow(_REQUEST, data, {"run"})
