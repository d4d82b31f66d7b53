"""Edits a JSON body in a few places, and leaves every other byte unchanged.

msgspec finds the length of each value, so no parser of our own has to walk over offsets: a bracket, space and a key are
followed by a value of known length. Nothing recurses, no value is decoded twice on the way down, and all work on one body is
charged to one budget of steps. Changed parts are decoded again and compared with the original, so an edit is either correct or
not made. A text that is only appended to strings is not decoded, because it comes as in JSON.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Raw, ValidationError, defstruct, json
from zlib_ng.zlib_ng import crc32

from extproc.bounded import Memo
from extproc.request.document import INSPECTION, NotCounted, NotJson, check_containers, check_members, mend

MAX_BYTES: Final = 2 * 2**20
"""Maximum length of a body to edit, in bytes: work that is not charged, such as counting brackets, takes 3 ms for it."""

MAX_STEPS: Final = 8_448
"""Maximum steps of one edit: one for each KiB that is decoded, and one for each value that is visited."""

_DENSE_BITS: Final = 4
_DENSE_STEPS: Final = MAX_STEPS // 3
_ESCAPE_BITS: Final = 3
_SPACE_BITS: Final = 1
"""Maximum steps for a body that takes up to three times as long for each byte: one of these powers of 2 bytes contains, on
average, more than one comma or bracket, more than one backslash, or more than one blank."""

AMBIGUOUS: Final = "ambiguous_body"
"""The reason for a body that two parsers may read differently; no API's client writes one."""

UNVERIFIED: Final = "unverified"
"""The reason for an edit that would change more than intended."""

_INSPECT_LIMIT: Final = "inspect_limit"
_MAX_SPACE: Final = 256
_FAR: Final = 16_384
"""Of a list that is read backwards: the maximum white space before an element, and the length of one to look for, in bytes."""

_STEP_BITS: Final = 10
_RAW_BITS: Final = 4
_HALF_BITS: Final = 3
"""2 to the power of these costs one step: bytes to decode, elements to skip, and escapes that may be halves of a pair."""

_LONGEST_NAME: Final = 1_024
"""Maximum length of a tool's name or a kind, in bytes; longer ones are unknown."""

_SPACE: Final = b" \t\n\r"
_QUOTE: Final = 0x22
_EMPTY: Final = b'""'
_OPEN_LIST: Final = 0x5B
_OPEN_OBJECT: Final = 0x7B
_NULL: Final = 0x6E
"""First bytes of values."""

_SMALL: Final = 8_192
"""Values of up to this many bytes are copied, because making a view takes longer."""

_ANSWER_BYTES: Final = 800
_PLACE_BYTES: Final = 400
"""What Python's objects take: of small texts, far more than the texts themselves."""

_KEY: Final = re.compile(rb'[ \t\n\r]*+,?[ \t\n\r]*+("[^"\\]*+(?:\\.[^"\\]*+)*+")[ \t\n\r]*+:[ \t\n\r]*+', re.DOTALL)
_NEXT: Final = re.compile(rb"[ \t\n\r]*+,?[ \t\n\r]*+")
_END: Final = re.compile(rb"[ \t\n\r]*+\}\Z")
_SPACED: Final = b'": '
"""What is between key and value in the output of Python's `json`; other programs write no space."""

_FIRST: Final = re.compile(rb'\[[ \t\n\r]*+(\{[ \t\n\r]*+"[^"\\]{1,64}+")')
_OPENING: Final = b'{"'
"""How a list's first object begins, with its first key, and any object without white space."""

_decode_fields: Final = json.Decoder(dict[str, Raw]).decode
_decode_items: Final = json.Decoder(list[Raw]).decode
_decode_objects: Final = json.Decoder(list[defstruct("Element", [], gc=False)]).decode  # type: ignore[misc]  # made at run time
_decode_text: Final = json.Decoder(str).decode
_decode_raw: Final = json.Decoder(Raw).decode

_Edit = tuple[int, int, bytes]
"""Replacement for the bytes from an offset to another one."""

_Members = list[tuple[str, int, int, int]]
"""Keys of an object's members, and the attributes `at`, `start` and `end` of each."""


class Around:
    """What is known of bodies that are equal but for their messages.

    Attributes:
        text: the bytes around the messages.
        members: the body's members, with offsets as if there were no messages.
        shape: what `find_conversation` has found in such a body; None if it was not asked.
    """

    __slots__ = ("members", "shape", "text")

    def __init__(self, text: bytes, members: _Members) -> None:
        self.text = text
        self.members = members
        self.shape: object = None


def measure_known(text: bytes, places: int) -> int:
    """At least the memory of an answer about a JSON text of which this many places are kept, in bytes."""
    return len(text) + _ANSWER_BYTES + _PLACE_BYTES * places


_KNOWN: Final[Memo[int, Around]] = Memo(4 * 2**20, lambda _, around: measure_known(around.text, len(around.members)))
"""By the CRC32 of the bytes around the messages, which hardly differ from one request of an agent to the next."""


class Value:
    """The position of a value in a body.

    Attributes:
        key: the key of an object's member; empty elsewhere.
        at: the offset at which the member starts, with its key's quote; elsewhere the value's own.
        start: the offset at which the value starts.
        end: the offset behind it.
        within: the object or list that contains it; None if an edit of it is verified without its surroundings.
    """

    __slots__ = ("at", "end", "key", "start", "within")

    def __init__(self, key: str, at: int, start: int, end: int, within: Value | None) -> None:
        self.key = key
        self.at = at
        self.start = start
        self.end = end
        self.within = within


Fields = dict[str, Value]
Pieces = list[bytes | memoryview]


class Patch:
    """One body, and changes to it.

    Attributes:
        data: the original bytes.
        root: the whole value, without white space around it.
        around: what is known of it without its messages, if these were checked before.
    """

    __slots__ = (
        "_added", "_checked", "_children", "_gone", "_left", "_more", "_new", "_span", "_tails", "_text", "around",
        "data", "root",
    )  # fmt: skip

    def __init__(self, data: bytes, checked: tuple[int, int] | None = None) -> None:
        """Open a body, without changes.

        Args:
            data: the body.
            checked: offsets between which it is known to have nothing but whole elements of a list, all of them JSON. That
                list has to be a member of the body's object. It is then not decoded again, but charged like all others.

        Raises:
            NotCounted: it is not JSON, or too long, or has a repeated key.
        """
        if len(data) > MAX_BYTES:
            raise NotCounted(_INSPECT_LIMIT)
        INSPECTION.begin()
        check_containers(data)
        check_members(data)
        self.data = data
        self._text = data  # the same length, but readable for msgspec
        self._checked = checked
        self.around: Around | None = None
        self._span = (0, 0)  # of the messages
        self._left = _DENSE_STEPS
        self._more = MAX_STEPS - _DENSE_STEPS
        self._children: dict[Value, list[Value]] = {}
        self._gone: dict[Value, Collection[int]] = {}
        self._new: dict[Value, bytes] = {}
        self._added: dict[Value, list[tuple[str, bytes]]] = {}
        self._tails: dict[Value, bytes] = {}
        start = len(data) - len(data.lstrip(_SPACE))
        self.root = Value("", start, start, max(start, len(data.rstrip(_SPACE))), None)
        try:
            if checked is not None:
                self._open_around(checked[0], checked[1])
            else:
                self._validate()
        except NotJson:
            self.take((data.count(rb"\ud") + data.count(rb"\uD")) >> _HALF_BITS)
            mended = mend(data)
            if mended is None:
                raise
            self._text = mended
            self._checked = None
            self._validate()

    def _validate(self) -> None:
        """Check that all of it is JSON; only the objects that are opened need be UTF-8."""
        if self.is_object(self.root):
            self._open_object(self.root)
        else:
            self.decode(self._text, _decode_raw)

    def _open_around(self, start: int, end: int) -> None:
        """Open the root, decoding only what is around some elements of a list that is one of its members."""
        root, without = self.root, end - start
        short = b"".join([self._text[:start], self._text[end:]])
        size = root.end - root.start
        self.take((size >> _STEP_BITS) - (size - without >> _STEP_BITS))
        name = crc32(short)  # much faster than Python's hash
        around = _KNOWN.get(name)
        if around is None or around.text != short:
            listed = self._list_members(short, Value("", root.start, root.start, root.end - without, None))
            around = Around(short, [(member.key, member.at, member.start, member.end) for member in listed])
            _KNOWN.put(name, around)
        else:
            self.take(1 + (size - without >> _STEP_BITS) + len(around.members))  # as if they were decoded
        self.around, self._span = around, (start, end)

    def _place_around(self, members: _Members) -> list[Value]:
        """The members of the body's object."""
        start, end = self._span
        without = end - start
        return [
            Value(
                key,
                at + without if at > start else at,
                begins + without if at > start else begins,
                ends + without if ends > start else ends,
                self.root,
            )
            for key, at, begins, ends in members
        ]

    def take(self, steps: int) -> None:
        """Charge this many steps.

        Raises:
            NotCounted: there are not enough left.
        """
        self._left -= steps
        if self._left < 0:
            self._add_steps()
            if self._left < 0:
                raise NotCounted(_INSPECT_LIMIT)

    def _add_steps(self) -> None:
        """Add the steps that only a body has which is not dense; most edits take fewer, so it is rarely counted."""
        if self._more and not self._is_dense():
            self._left += self._more
        self._more = 0

    def _is_dense(self) -> bool:
        data, size = self.data, len(self.data)
        if data.count(b",") + data.count(b"[") + data.count(b"{") > size >> _DENSE_BITS:
            return True
        blanks = data.count(b" ") + data.count(b"\n") + data.count(b"\t") + data.count(b"\r")
        return blanks > size >> _SPACE_BITS or data.count(b"\\") > size >> _ESCAPE_BITS

    # --- reading

    def is_text(self, value: Value | None) -> bool:
        """Whether a value is a string."""
        return value is not None and self._begins(value, _QUOTE)

    def is_list(self, value: Value | None) -> bool:
        """Whether a value is a list."""
        return value is not None and self._begins(value, _OPEN_LIST)

    def is_object(self, value: Value | None) -> bool:
        """Whether a value is an object."""
        return value is not None and self._begins(value, _OPEN_OBJECT)

    def is_long(self, value: Value) -> bool:
        """Whether a value is too long to be a name or a kind."""
        return value.end - value.start > _LONGEST_NAME

    def is_null(self, value: Value) -> bool:
        """Whether a value is null."""
        return self._begins(value, _NULL)

    def _begins(self, value: Value, byte: int) -> bool:
        return value.start < len(self._text) and self._text[value.start] == byte  # the whole value may be empty

    def read_raw(self, value: Value) -> Raw:
        """The bytes of a value, except for unpaired surrogates."""
        return Raw(self._text[value.start : value.end])

    def shorten(self, value: Value) -> bytes:
        """An object without its long members, which is enough to see its kind; other values become null.

        Raises:
            NotCounted: a key is repeated, or the object is too large.
        """
        if not self.is_object(value):
            return b"null"
        members = [member for member in self._open_object(value) if not self.is_long(member)]
        return b"{%b}" % b",".join([self._text[member.at : member.end] for member in members])

    def read_text(self, value: Value | None) -> str:
        """A name or another short string; empty for other values.

        Raises:
            NotCounted: it is invalid UTF-8, or too long.
        """
        if value is None or self.is_long(value) or not self.is_text(value):
            return ""
        text: str = self.decode(self._text[value.start : value.end], _decode_text)
        return text

    def open_fields(self, value: Value | None) -> Fields:
        """The members of an object by key, in order; empty for other values.

        Raises:
            NotCounted: a key is repeated, or the object is too large.
        """
        if value is None or not self.is_object(value):
            return {}
        return {child.key: child for child in self._open_object(value)}

    def open_items(self, value: Value) -> list[Value]:
        """The elements of a list, in order; empty for other values.

        Raises:
            NotCounted: there are too many.
        """
        if not self.is_list(value):
            return []
        found = self._children.get(value)
        if found is None:
            text, found = self._text, []
            items = self._decode_items(value, 0)
            self.take(len(items))
            place = value.start + 1
            for item in items:
                start = _NEXT.match(text, place).end()  # type: ignore[union-attr]  # matches everywhere
                place = start + len(item)
                found.append(Value("", start, start, place, value))
            self._children[value] = found
        return found

    def list_items(self, value: Value) -> list[tuple[int, int]]:
        """Where the elements of a list are that was opened, from its start on; for `open_known_items`."""
        return [(item.start - value.start, item.end - value.start) for item in self._children[value]]

    def open_known_items(self, value: Value, places: Sequence[tuple[int, int]]) -> list[Value]:
        """The elements of a list with the same bytes as one that was opened before, of this body or of another."""
        at = value.start
        found = self._children[value] = [Value("", at + start, at + start, at + end, value) for start, end in places]
        return found

    def count_left(self) -> int:
        """The number of steps that are left."""
        return self._left + self._more

    def open_known(self, start: int, end: int) -> Value:
        """An element of a list, by its offsets; as after `open_newest`, an edit of it is verified without the others."""
        self.take(1)
        return Value("", start, start, end, None)

    def open_newest(self, value: Value) -> Iterator[Value]:
        """The elements of a list, last first; an edit of one is verified without the others.

        Raises:
            NotCounted: there are too many, or too much space between them.
        """
        text, place, count = self._text, value.end - 1, 0
        items: list[Raw] | None = None if self.is_list(value) else []
        first = _FIRST.match(text, value.start, value.end)
        openings = [first[1], _OPENING] if first is not None else [_OPENING]
        while place > value.start:
            self.take(1)
            end = self._skip_space_backwards(place)
            element = self._find_object(openings, value.start, end) if items is None else None
            if element is None:
                if items is None:
                    items = self._decode_items(value, _RAW_BITS)
                    self.take(len(items) >> _RAW_BITS)
                if count == len(items):
                    break
                start = end - len(items[-1 - count])
                element = Value("", start, start, end, None)
            count += 1
            place = self._skip_space_backwards(element.start) - 1
            oldest = place == value.start if items is None else count == len(items)
            if oldest != (place == value.start) or not text.startswith(b"[" if oldest else b",", place):
                raise NotCounted(AMBIGUOUS)
            yield element

    def _find_object(self, openings: Sequence[bytes], start: int, end: int) -> Value | None:
        """The element of a list that ends at an offset, if it is an object that begins like these; None if that is unclear.

        This saves decoding the list. Only one start is possible: no object's JSON ends in a shorter object's. From outside a
        string, that one would have a bracket too many, and from inside, its strings would be what is between the other's.

        Args:
            openings: likely first bytes.
            start: the offset of the list.
            end: the offset behind the element.
        """
        text = self._text
        if not text.endswith(b"}", start, end):
            return None
        for opening in openings:
            place = text.rfind(opening, max(start, end - _FAR), end)
            if place < 0:
                continue
            found = Value("", place, place, end, None)
            try:
                self._open_object(found)
            except NotJson:
                continue
            except NotCounted as why:
                if why.reason != AMBIGUOUS:  # which is left to those who open it
                    raise
            return found
        return None

    def _skip_space_backwards(self, place: int) -> int:
        """The start of the space before an offset; with too much space, the offsets do not add up, which is noticed."""
        space = self._text[max(0, place - _MAX_SPACE) : place]
        return place - len(space) + len(space.rstrip(_SPACE))

    def _decode_items(self, value: Value, bits: int) -> list[Raw]:
        """The raw elements of a list; 2 to the power of `bits` take a step, and too many have to be objects."""
        raw = self._view(value)
        commas = 0
        if len(raw) > 2 * self._left << bits:  # an element takes two bytes with its comma
            commas = self._text.count(b",", value.start, value.end)
        if commas >= self._left << bits:
            self._add_steps()
        if commas >= self._left << bits:
            try:
                count = len(self.decode(raw, _decode_objects))
            except ValidationError:
                raise NotCounted(_INSPECT_LIMIT) from None
            if count > self._left << bits:
                raise NotCounted(_INSPECT_LIMIT)
        items: list[Raw] = self.decode(raw, _decode_items)
        return items

    def _open_object(self, value: Value) -> list[Value]:
        """The members of an object, in order."""
        found = self._children.get(value)
        if found is None:
            if value is self.root and self.around is not None:
                found = self._place_around(self.around.members)
            else:
                found = self._list_members(self._text, value)
            self._children[value] = found
        return found

    def _list_members(self, text: bytes, value: Value) -> list[Value]:
        """The members of an object in a text, in order.

        A member is found by its bytes behind its key. No JSON value is the beginning of another, except a number, and that
        would be followed by neither a comma nor the end. Of a repeated key, msgspec returns one value, so bytes are left over.
        """
        end, found = value.end, list[Value]()
        fields: dict[str, Raw] = self.decode(_view(text, value.start, end), _decode_fields)
        self.take(len(fields))
        place, before = value.start + 1, b'"'
        comma, colon = b',"', b'":'
        for name, item in fields.items():
            key = before + name.encode()
            start = place + len(key)
            if not found and text[start : start + len(_SPACED)] == _SPACED:
                comma, colon = b', "', _SPACED
            key = key + colon  # compiled, `+=` of bytes takes twice as long
            at, start = place + len(before) - 1, place + len(key)
            if not (text[place:start] == key and text.startswith(item, start) and "\\" not in name):
                match = _KEY.match(text, place, end)  # it is written in an unusual way
                if match is None or not text.startswith(item, match.end()):
                    raise NotCounted(AMBIGUOUS)
                at, start = match.start(1), match.end()
            place = start + len(item)
            found.append(Value(name, at, start, place, value))
            before = comma
        if place + 1 != end and _END.match(text, place, end) is None:  # only a bracket is left, or also space
            raise NotCounted(AMBIGUOUS)
        return found

    def _view(self, value: Value) -> bytes | memoryview:
        """The bytes of a value."""
        return _view(self._text, value.start, value.end)

    def decode(self, raw: bytes | memoryview | Raw, decode: Any) -> Any:  # noqa: ANN401  # msgspec's own
        """Decode a part of the body.

        Raises:
            NotCounted: it is not JSON, or too large.
            ValidationError: it is of another type than expected.
        """
        self.take(1 + (len(raw) >> _STEP_BITS))
        try:
            return decode(raw)
        except ValidationError:
            raise
        except (ValueError, RecursionError):  # errors of msgspec and Unicode are ValueErrors
            raise NotJson from None

    # --- changing

    def extend(self, text: Value, tail: bytes) -> None:
        """Append to a string; the tail is as in JSON."""
        self._tails[text] = tail

    def append(self, value: Value, text: bytes, key: str = "") -> None:
        """Append an element to a list, or a member with that key to an object."""
        self._added.setdefault(value, []).append((key, text))

    def replace(self, value: Value, text: bytes) -> None:
        """Replace a value, unless it is the same."""
        if text != self._text[value.start : value.end]:
            self._new[value] = text

    def remove(self, value: Value, gone: Collection[int]) -> None:
        """Remove members of an object, or elements of a list, by their indexes. Call this only once for each value."""
        if gone:
            self._gone[value] = gone

    def change(self, value: Value, changes: Mapping[str, bytes | None]) -> None:
        """Set, add or (None) remove members of an object. Call this only once for each object."""
        members = self._open_object(value)
        fields = {member.key: member for member in members}
        self.remove(value, {place for place, member in enumerate(members) if changes.get(member.key, b"") is None})
        for key, text in changes.items():
            if text is not None and key in fields:
                self.replace(fields[key], text)
            elif text is not None:
                self.append(value, text, key)

    def count_changes(self) -> int:
        """The number of values that change."""
        return len(self._tails) + len(self._added) + len(self._new) + len(self._gone)

    def apply(self) -> Pieces:
        """Apply all changes, which must not overlap. Joined, the pieces are the new body; only one if nothing changes.

        Raises:
            NotCounted: they would change anything else, or this is too expensive to check.
        """
        edits = sorted(self._list_edits())
        if not edits:
            return [self.data]
        done = 0
        for place, edit in enumerate(edits):
            if edit[0] < done or (place and edit == edits[place - 1]):
                raise NotCounted(UNVERIFIED)
            done = edit[1]
        try:
            self._verify(edits)
        except (NotJson, ValidationError):
            raise NotCounted(UNVERIFIED) from None
        return _cut(self.data, edits, 0, len(self.data))

    def _list_edits(self) -> list[_Edit]:
        """The changes as replacements of bytes."""
        edits: list[_Edit] = [(value.start, value.end, text) for value, text in self._new.items()]
        for text, tail in self._tails.items():
            edits.append((text.end - 1, text.end - 1, tail))
        for value, gone in self._gone.items():
            edits += _list_removals(self._children[value], gone)
        for value, added in self._added.items():
            members, gone = self._children[value], self._gone.get(value, ())
            end = members[-1].end if members else value.start + 1
            written = [b'"%b":%b' % (key.encode(), text) if key else text for key, text in added]
            comma = b"," if len(members) > len(gone) else b""
            edits.append((end, end, comma + b",".join(written)))
        return edits

    def _verify(self, edits: Sequence[_Edit]) -> None:
        """Check, by decoding, that only the intended parts have changed.

        Each value with a change inside is decoded, starting from the outermost one that is verified as a whole. The bytes
        around that one are unchanged, because no edit reaches beyond it. The root is one of these if it changes, and so is a
        message inside it that was found without the root.
        """
        if not (self._new or self._gone or self._added):
            self._verify_tails()
            return
        touched: set[Value] = set()
        wholes: dict[Value, None] = {}
        for value in [*self._new, *self._tails, *self._gone, *self._added]:
            at = value
            touched.add(at)
            while at.within is not None:
                at = at.within
                touched.add(at)
            wholes[at] = None
        if self._checked is not None and any(value is not self.root and self._is_around(value) for value in touched):
            self._checked = None
        left: list[tuple[Value, bytes]] = [(whole, self._write(whole, edits)) for whole in wholes]
        while left:
            value, new = left.pop()
            if value in self._new:
                same = new == self._new[value]
            elif value not in touched:
                apart = [whole for whole in wholes if value.start <= whole.start and whole.end <= value.end]
                kept = [edit for edit in edits if any(it.start <= edit[0] and edit[1] <= it.end for it in apart)]
                same = new == self._write(value, kept)
            elif value in self._tails:
                old, tail = self._text[value.start : value.end - 1], self._tails[value] + b'"'
                self.decode(b'"' + tail, _decode_text)
                same = new == old + tail
            else:
                same = self._compare(value, new, left)
            if not same:
                raise NotCounted(UNVERIFIED)

    def _verify_tails(self) -> None:
        """Check that all values that are extended are strings, as they were decoded; the rest of the body is the same."""
        for value in self._tails:
            if not self.is_text(value) or self._text[value.end - 1] != _QUOTE or value.end - value.start < len(_EMPTY):
                raise NotCounted(UNVERIFIED)

    def _is_around(self, value: Value) -> bool:
        """Whether a value contains the messages that were checked before."""
        return self._checked is not None and value.start < self._checked[0] and self._checked[1] < value.end

    def _write(self, value: Value, edits: Sequence[_Edit]) -> bytes:
        """A value after its edits, without the messages that were checked before, whose edits are verified separately."""
        text, start, end = self._text, value.start, value.end
        if self._checked is None or not self._is_around(value):
            if not edits:
                return text[start:end]
            inside = [edit for edit in edits if edit[0] >= start and edit[1] <= end]
            return b"".join(_cut(text, inside, start, end))
        first, last = self._checked
        before = [edit for edit in edits if edit[0] >= start and edit[1] <= first]
        behind = [edit for edit in edits if edit[0] >= last and edit[1] <= end]
        return b"".join([*_cut(text, before, start, first), *_cut(text, behind, last, end)])

    def _compare(self, value: Value, new: bytes, left: list[tuple[Value, bytes]]) -> bool:
        """Whether an object or a list has the expected members; members still to be compared are added to `left`."""
        children, gone, added = self._children[value], self._gone.get(value, ()), self._added.get(value, [])
        kept = [child for place, child in enumerate(children) if place not in gone]
        keys = [child.key for child in kept] + [key for key, _ in added]
        items: list[Raw]
        if self.is_object(value):
            fields: dict[str, Raw] = self.decode(new, _decode_fields)
            if list(fields) != keys:
                return False
            items = list(fields.values())
        else:
            items = self.decode(new, _decode_items)
            if len(items) != len(keys):
                return False
        left += [(child, bytes(item)) for child, item in zip(kept, items, strict=False)]
        return [bytes(item) for item in items[len(kept) :]] == [text for _, text in added]


def _view(text: bytes, start: int, end: int) -> bytes | memoryview:
    """The bytes between two offsets; long ones are not copied."""
    return text[start:end] if end - start <= _SMALL else memoryview(text)[start:end]


def _list_removals(members: Sequence[Value], gone: Collection[int]) -> list[_Edit]:
    """The edits that remove members, each with one comma."""
    edits: list[_Edit] = []
    kept = False  # a member before the next one
    for place, member in enumerate(members):
        if place not in gone:
            kept = True
        elif kept:
            edits.append((members[place - 1].end, member.end, b""))
        else:
            end = members[place + 1].at if place + 1 < len(members) else member.end
            edits.append((member.at, end, b""))
    return edits


def _cut(data: bytes, edits: Sequence[_Edit], start: int, end: int) -> Pieces:
    """The part of a body between two offsets, with replacements, which are in order, in pieces that are not copied."""
    whole = memoryview(data)
    pieces: Pieces = []
    for begins, ends, text in edits:
        pieces += [whole[start:begins], text]
        start = ends
    pieces.append(whole[start:end])
    return pieces
