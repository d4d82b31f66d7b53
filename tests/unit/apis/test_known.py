"""A body that continues a known one is read as if nothing was known."""

import json

import pytest
from hypothesis import given, settings, strategies as st

from extproc.apis import hash_first_words, locate_results, open_conversation
from extproc.apis.locate import open_patch
from extproc.apis.messages import Part
from extproc.detectors.chain import read_transcript
from extproc.request.document import Document, NotCounted, open_value
from tests.support.examples import examples
from tests.support.memory import forget
from tests.support.turn_writers import SHAPES, Did

_TURNS = [
    Did(
        (("read", {"path": f"src/{number}.py"}),),
        (f'line {number}: "assistant", "model" ' + "x" * 900 * (number % 4),),
    )
    for number in range(1, 9)
]
_KNOWN = {
    shape: [json.dumps(SHAPES[shape](_TURNS[:count])).encode() for count in (5, 6, 8)]
    for shape in sorted(SHAPES)
}
_CHAT = _KNOWN["chat"][1]
_MESSAGES = _CHAT[_CHAT.index(b"[") + 1 : _CHAT.rindex(b"]")]
_MORE = b'{"role":"user","content":"more"}'


def look(document: Document) -> object:
    """What is read of a body: its messages, their chain links, and the keys beside them."""
    try:
        conversation = open_conversation(document)
        shown = [turn.hash for turn in read_transcript(conversation).turns]
        read = [
            (message.speaker, _write(message.read_parts()))
            for message in conversation.read_backwards()
        ]
    except NotCounted as why:
        return why.reason
    fields = [bytes(conversation.find_field(key) or b"") for key in ("tools", "metadata")]
    return (
        read,
        shown,
        fields,
        conversation.model,
        conversation.before,
        len(conversation),
        conversation.list_speakers(),
    )


def _write(parts: list[Part]) -> list[tuple[str, object, str, str, bool]]:
    return [(part.kind, open_value(part.value), part.name, part.id, part.failed) for part in parts]


def compare(first: list[bytes], body: bytes) -> bool:
    """Reads a body with others known, then without; returns whether anything was known."""
    alone = look(Document(body, shortened=True))
    forget()
    for each in first:
        document = Document(each)
        if not isinstance(look(document), str):
            hash_first_words(document)

    said = hash_first_words(Document(body)) if not isinstance(alone, str) else b""
    known = Document(body)
    assert look(known) == alone
    if not isinstance(alone, str) and open_conversation(known).known is not None:
        assert said == open_conversation(Document(body, shortened=True)).hash_first_words()
    for _ in range(2):  # the second knows what is around the messages
        assert open_root(body, known) == open_root(body, None)
    assert find_places(body, known) == find_places(body, None)
    return not isinstance(alone, str) and open_conversation(known).known is not None


def open_root(body: bytes, document: Document | None) -> object:
    try:
        patch = open_patch(document, body)
        members = patch.open_fields(patch.root).values()
    except NotCounted as why:
        return why.reason
    return [
        (
            member.key,
            *[member.part.find(offset) for offset in (member.at, member.start, member.end)],
        )
        for member in members
    ]


def find_places(body: bytes, document: Document | None) -> object:
    try:
        places = locate_results(open_patch(document, body), document)
    except NotCounted as why:
        return why.reason
    return [(place.offset, place.around, place.key, place.result) for place in places]


@pytest.mark.parametrize("shape", ["anthropic", "bedrock", "chat", "gemini", "responses"])
def test_continued_history_is_known(shape: str) -> None:
    assert compare(_KNOWN[shape][:2], _KNOWN[shape][2])
    one, again = [open_conversation(Document(_KNOWN[shape][2])) for _ in range(2)]
    assert one.known is again.known is not None
    assert compare(_KNOWN[shape], _KNOWN[shape][0])


_START = b'{"messages":[' + _MESSAGES
_BODIES = [
    b'{"messages":[' + _MESSAGES + b"," + _MORE + b"]}",
    b'{"messages":[' + _MESSAGES + b" ,\n" + _MORE + b' ], "model":"m", "tools":[1]}',
    b'{"messages":[' + _MESSAGES + _MORE + b"]}",
    b'{"messages":[' + _MESSAGES + b",]}",
    b'{"messages":[' + _MESSAGES + b",,{}]}",
    b'{"messages":[' + _MESSAGES + b"}]}",
    b'{"messages":[' + _MESSAGES + b"]",
    b'{"messages":[' + _MESSAGES + b'],"messages":[' + _MORE + b"]}",
    b'{"messages":[' + _MESSAGES + b'],"m\\u0065ssages":[' + _MORE + b"]}",
    b'{"messages":[' + _MESSAGES + b'],"messages":null}',
    b'{"messages":[' + _MESSAGES + b'],"contents":[{"role":"user","parts":[{"text":"x"}]}]}',
    b'{"messages":[' + _MESSAGES + b"," + _MORE + b',3,"x"]}',
    b'{"messages":[' + _MESSAGES + b',{"role":7}]}',
    b'{"messages":[' + _MESSAGES + b',null],"model":{}}',
    b'{"metadata":{"messages":['
    + _MESSAGES
    + b']},"messages":['
    + _MESSAGES
    + b","
    + _MORE
    + b"]}",
    b'[{"messages":[' + _MESSAGES + b"]}]",
    b'{"messages":[' + _MESSAGES + b"," + _MORE + b'],"thread":{"previous_message_id":"m"}}',
    b'{"messages":[' + _MESSAGES + b',{"role":"user","content":"\\ud800"}]}',
    b'{"messages":[' + _MESSAGES + b".5," + _MORE + b"]}",
    b'{"messages":[' + _MESSAGES + b"e5]}",
]
_TAILS = [
    b'],"tools":[1]}',
    b'],"tools":[2]}',
    b'] ,"tools":[1]}',
    b'],"metadata":{},"tools":[1]}',
    b'],"metadata":["],"],"tools":[1]}',
    b'],"messages":[' + _MORE + b'],"tools":[1]}',
    b'],"metadata":{"messages":[' + _MORE + b'],"tools":[1]}',
    b"," + _MORE + b'],"tools":[1]}',
    b"," + _MORE + b'],"tools":[2]}',
    b"," + _MORE + b',],"tools":[1]}',
    b',],"tools":[1]}',
    b'"],"tools":[1]}',
    b"]}",
]
_BESIDE = b'{"messages":[' + _MORE + b'],"metadata":"assistant","tools":[1]}'
_CASES = [
    *(
        ([start + _MESSAGES + b"]}", start + _MESSAGES + b"]}}", _CHAT], body)
        for body in _BODIES
        for start in [body[: body.index(_MESSAGES)]]
    ),
    *(
        ([known + end], _START + tail)
        for tail in _TAILS
        for end in (b'],"tools":[1]}', b"]}")
        for known in (_START, _START.replace(b"src/5.py", b"src/x.py"))
    ),
    *(
        ([_BESIDE], body) for body in (_BESIDE, _BESIDE.replace(b"[1]", b"[2]"))
    ),  # no message has that word
]


@pytest.mark.parametrize(("known", "body"), _CASES, ids=range(len(_CASES)))
def test_bytes_around_known_messages_are_read(known: list[bytes], body: bytes) -> None:
    compare(known, body)


@settings(max_examples=examples(200))
@given(st.sampled_from(sorted(_KNOWN)), st.data())
def test_changed_bytes_are_read_as_if_unknown(shape: str, data: st.DataObject) -> None:
    body = data.draw(st.sampled_from(_KNOWN[shape]))
    at, end = sorted(data.draw(st.tuples(*[st.integers(0, len(body))] * 2)))
    piece = data.draw(
        st.sampled_from(
            [b"", b" ", b"0", b'"', b"]", b"{}", b",", b"\\", b'"assistant"', body[at:end] * 2]
        )
    )
    changed = body[:at] + piece + body[data.draw(st.sampled_from([at, at + 1, end])) :]

    compare([*_KNOWN[shape], changed][:: data.draw(st.sampled_from([1, -1]))], changed)
    compare([changed], body)
