"""Where a body can be changed, every other byte of which stays.

msgspec finds out how long each value is, so offsets are walked without a parser of our own: behind a bracket, space and a key
comes a value of known length. Nothing recurses, and objects of very many keys are left alone. In whatever does not add up, such
as an object in which a key stands twice with two values, there is no place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from json import dumps
from typing import NamedTuple

from msgspec import Raw, ValidationError, json

from extproc.similarity.document import NotJson, decode_json
from extproc.similarity.shapes.contents import read_string

_MAX_KEYS = 1_000
_MAX_BLOCKS = 100
_MAX_SPACE = 256
_TRIES = 32
_FEW_BYTES = 8_192

_SPACE = b" \t\n\r"
_KEY = re.compile(rb'[ \t\n\r]*+"((?:[^"\\]|\\.)*+)"[ \t\n\r]*+:[ \t\n\r]*+', re.DOTALL)
_COLON = re.compile(rb"[ \t\n\r]*+:[ \t\n\r]*+")
_SPACES = re.compile(rb"[ \t\n\r]*+")
_NEXT = re.compile(rb"[ \t\n\r]*+,")
_END = re.compile(rb"[ \t\n\r]*+\}")

_decode_fields = json.Decoder(dict[str, Raw]).decode
_decode_items = json.Decoder(list[Raw]).decode

_TEXTS = frozenset({"text", "input_text", "output_text"})

TEXT_BLOCK = b'{"type":"text","text":"', b'"}'
INPUT_TEXT_BLOCK = b'{"type":"input_text","text":"', b'"}'
TEXT_PART = b'{"text":"', b'"}'
"""What stands around the text of a new block."""


class Place(NamedTuple):
    """Where a note can be spliced in, as the content of a JSON string.

    Attributes:
        offset: in the body, in bytes.
        opening: what has to stand in front of the note; empty inside of a string that is there.
        closing: what has to stand behind it.
        result: in a result of a tool; else in what somebody says.
    """

    offset: int
    opening: bytes = b""
    closing: bytes = b""
    result: bool = False

    @property
    def continues(self) -> bool:
        """The note goes on a text that is there."""
        return not self.opening


class Value(NamedTuple):
    """A value of a body, left where it stands: what is large is not copied.

    Attributes:
        body: all of it.
        start: the offset at which the value starts.
        end: the offset behind it.
    """

    body: bytes
    start: int
    end: int

    @property
    def raw(self) -> Raw:
        """Its bytes."""
        return Raw(self.body[self.start : self.end])


class Member(NamedTuple):
    """A member of an object.

    Attributes:
        key: unescaped.
        start: the offset at which the key starts, with its quote.
        value: what stands behind it.
    """

    key: str
    start: int
    value: Value


Fields = dict[str, Value]


def splice(body: bytes, places: Sequence[Place], note: str, separator: str = "") -> bytes:
    r"""A body with a note in each of the places, which follow one another; the separator goes between a text and its note.

    >>> splice(b'["a"]', [Place(3)], ' says "b"')
    b'["a says \\"b\\""]'
    """
    written, whole = dumps(note)[1:-1].encode(), memoryview(body)
    between = dumps(separator)[1:-1].encode()
    parts: list[bytes | memoryview] = []
    done = 0
    for place in places:
        parts += [whole[done : place.offset], place.opening or between, written, place.closing]
        done = place.offset
    parts.append(whole[done:])
    return b"".join(parts)


def open_body(body: bytes) -> Value:
    """A whole body."""
    return Value(body, len(body) - len(body.lstrip(_SPACE)), len(body.rstrip(_SPACE)))


def open_members(value: Value) -> list[Member]:
    """The members of an object, in their order; none where it is no object, or does not add up."""
    raw = value.body[value.start : value.end]
    fields = _decode_object(raw)
    if len(fields) > _MAX_KEYS:
        return []
    found: list[Member] = []
    place = 1
    for _ in range(_MAX_KEYS):
        key = _KEY.match(raw, place)
        if key is None:
            return []
        name = _read_key(key.group(1))
        item = fields.get(name)
        if item is None or not raw.startswith(bytes(item), key.end()):
            return []
        start, end = value.start + key.start(1) - 1, value.start + key.end()
        found.append(Member(name, start, Value(value.body, end, end + len(item))))
        following = _NEXT.match(raw, key.end() + len(item))
        if following is None:
            last = _END.match(raw, key.end() + len(item))
            return found if last is not None and last.end() == len(raw) else []
        place = following.end()
    return []


def open_fields(value: Value) -> Fields:
    """The fields of an object by their keys; none where it is no object, or does not add up."""
    return {member.key: member.value for member in open_members(value)}


def open_field(value: Value, key: str) -> Value | None:
    """One field of an object of whatever size, as `open_fields` finds it: its neighbours are walked by msgspec.

    What stands before the key is an object that could end there, and what stands behind its value one that could begin there.
    The key stands in neither, so the value is that of this one.
    """
    raw, quoted = value.body[value.start : value.end], b'"%b"' % key.encode()  # a whole body is no copy
    fields = _decode_object(raw)
    place = raw.find(quoted)
    colon = _COLON.match(raw, place + len(quoted)) if place >= 0 else None
    if key not in fields or colon is None:
        return open_fields(value).get(key)
    start, end = colon.end(), colon.end() + len(fields[key])
    before = _decode_object(raw[:place] + b'"":0}')
    behind = _decode_object(b'{"":0' + raw[end:])
    if not before or not behind or key in before or key in behind:
        return open_fields(value).get(key)
    return Value(value.body, value.start + start, value.start + end)


def _decode_object(raw: bytes) -> dict[str, Raw]:
    """The fields of an object; none where it is none."""
    try:
        fields: dict[str, Raw] = decode_json(raw, _decode_fields)
    except (ValidationError, NotJson):
        return {}
    return fields


def _read_key(key: bytes) -> str:
    return decode_json(b'"%b"' % key) if b"\\" in key else key.decode()


def open_items(value: Value, most: int) -> list[Value]:
    """The first elements of a list, at most so many; none where it is no list."""
    body = value.body
    items = _decode_list(body[value.start : value.end])
    found: list[Value] = []
    place = value.start + 1
    for item in items[:most]:
        start = place + len(_SPACES.match(body, place)[0])  # type: ignore[index]  # matches everywhere
        found.append(Value(body, start, start + len(item)))
        following = _NEXT.match(body, start + len(item))
        place = following.end() if following is not None else value.end
    return found


def open_newest(value: Value, count: int) -> list[Value]:
    """So many of a list's last elements, the newest first; fewer where there are fewer, it is no list, or does not add up."""
    body = value.body
    items = _decode_end(value, count) or _decode_list(body[value.start : value.end])
    found: list[Value] = []
    place = value.end - 1
    for item in items[: -count - 1 : -1]:
        end = _skip_space_backwards(body, place)
        place = end - len(item)
        found.append(Value(body, place, end))
        place = _skip_space_backwards(body, place) - 1
        if body[place] not in b"[,":
            return []
    return found


def _decode_list(raw: bytes) -> Sequence[Raw]:
    try:
        items: Sequence[Raw] = decode_json(raw, _decode_items)
    except (ValidationError, NotJson):
        return ()
    return items


def _decode_end(value: Value, count: int) -> Sequence[Raw]:
    """At least so many of a list's last elements, where they are objects and few bytes; else none.

    What follows a brace is tried as the rest of a list. Only that of an element is one: inside of an element the brackets do
    not add up, and inside of a string the quotes do not.
    """
    start, first = value.end, max(value.start, value.end - _FEW_BYTES)
    for _ in range(_TRIES):
        start = value.body.rfind(b"{", first, start)
        if start < 0:
            break
        items = _decode_list(b"[" + value.body[start : value.end])
        if len(items) >= count:
            return items
    return ()


def _skip_space_backwards(raw: bytes, place: int) -> int:
    """Where the space in front of a place starts; what has too much of it does not add up."""
    space = raw[max(0, place - _MAX_SPACE) : place]
    return place - len(space) + len(space.rstrip(_SPACE))


def is_text(value: Value | None) -> bool:
    """Whether a value is a string."""
    return value is not None and value.body[value.start] == ord('"')


def is_list(value: Value | None) -> bool:
    """Whether a value is a list."""
    return value is not None and value.body[value.start] == ord("[")


def is_object(value: Value | None) -> bool:
    """Whether a value is an object."""
    return value is not None and value.body[value.start] == ord("{")


def end_text(text: Value, *, result: bool) -> Place:
    """The end of a string."""
    return Place(text.end - 1, result=result)


def append_item(items: Value, item: tuple[bytes, bytes], *, result: bool) -> Place:
    """A new last element of a list, or, with a key in front of it, of an object."""
    opening, closing = item
    inner = items.body[items.start + 1 : items.end - 1]
    return Place(items.end - 1, b"," + opening if inner.strip(_SPACE) else opening, closing, result=result)


Locator = Callable[[Value, Fields], list[Place]]

LOCATORS: dict[str, Locator] = {}
"""By the `type` of a block, or by the one key that names it: where in a result that is one. Every shape adds its own."""


def locate_in_content(content: Value | None, block: tuple[bytes, bytes], *, result: bool) -> list[Place]:
    """The places in what somebody says, or in a result, the newest last: behind its text, and in results that stand in it.

    Args:
        content: a string, or a list of blocks; nothing else has a place.
        block: how the API writes a block of text.
        result: it is one of a tool.
    """
    if content is None or not is_list(content):
        return [end_text(content, result=result)] if content is not None and is_text(content) else []
    text: Place | None = None
    results: list[Place] = []
    for item in open_newest(content, _MAX_BLOCKS):
        fields = open_fields(item)
        results += _locate_result(item, fields)
        found = fields.get("text")
        if text is None and found is not None and is_text(found) and _name_kind(fields) in _TEXTS:
            text = end_text(found, result=result)
    return [text or append_item(content, block, result=result), *reversed(results)]


def _locate_result(item: Value, fields: Fields) -> list[Place]:
    """The places in a block that is a result, the newest first."""
    for name in (_name_kind(fields), *fields):
        locate = LOCATORS.get(name)
        if locate is not None:
            return locate(item, fields)[::-1]
    return []


def _name_kind(fields: Fields) -> str:
    """What a block says that it is; a text where it does not say."""
    return read_string(fields["type"].raw) if "type" in fields else "text"
