"""Edits a JSON body in a few places, and leaves every other byte unchanged.

A body is edited in parts: everything around its messages, and each message that changes. A part is
JSON by itself, and its values are located by offsets. msgspec finds the length of each value, so
there is no parser here: after a bracket, blanks and a key follows a value of known length. Nothing
recurses.

A change replaces bytes between two offsets of the body. Each changed part is decoded again and
compared with the original, so an edit is either correct or not made. All levels of an edit share
one reader's units; see `Inspection`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from msgspec import Raw, ValidationError, json

from extproc.request.document import (
    INSPECTION,
    UNITS,
    NotCounted,
    NotJson,
    check_containers,
    check_members,
    mend,
)

MAX_BYTES: Final = 2 * 2**20
"""Maximum length of a body to edit, in bytes. Work that is not charged, such as counting brackets,
takes 3 ms for it."""

_VALUE: Final = 5
_KIB: Final = 5
"""Units for a value that is visited or decoded, and for each KiB decoded."""

_WORTH_WEIGHING: Final = UNITS - UNITS // 3
_DENSE_BITS: Final = 4
_ESCAPE_BITS: Final = 3
_SPACE_BITS: Final = 1
"""If fewer units would be left, a dense body is not edited, because each of its bytes takes up to
three times as long. A body is dense if it has, on average, more than one comma or bracket, one
backslash, or one blank in that power of 2 bytes."""

AMBIGUOUS: Final = "ambiguous_body"
"""The reason for a body that two parsers may read differently; no API's client writes one."""

UNVERIFIED: Final = "unverified"
"""The reason for an edit that would change more than intended."""

_MOST_KEPT: Final = 64
_INSPECT_LIMIT: Final = "inspect_limit"

_LONGEST_NAME: Final = 1_024
"""Maximum length of a tool's name or a kind, in bytes; longer ones are unknown."""

_SPACE: Final = b" \t\n\r"
_BLANK: Final = 0x20
_COMMA: Final = 0x2C
_QUOTE: Final = 0x22
_OPEN_LIST: Final = 0x5B
_OPEN_OBJECT: Final = 0x7B
_NULL: Final = 0x6E
"""Bytes between values, and the first bytes of values."""

_SMALL: Final = 8_192
"""Values of up to this many bytes are copied, because creating a view takes longer."""

_KEY: Final = re.compile(
    rb'[ \t\n\r]*+,?[ \t\n\r]*+("[^"\\]*+(?:\\.[^"\\]*+)*+")[ \t\n\r]*+:[ \t\n\r]*+', re.DOTALL
)
_COLON: Final = b'": '
"""Between key and value in the output of Python's `json`; most other programs write no blank."""

_NEXT: Final = re.compile(rb"[ \t\n\r]*+,?[ \t\n\r]*+")
_END: Final = re.compile(rb"[ \t\n\r]*+\}\Z")

_decode_fields: Final = json.Decoder(dict[str, Raw]).decode
_decode_items: Final = json.Decoder(list[Raw]).decode
_decode_text: Final = json.Decoder(str).decode
_decode_raw: Final = json.Decoder(Raw).decode

_Splice = tuple[int, int, bytes]
"""A replacement of the bytes between two offsets."""


class _Change:
    """The changes of a value.

    Attributes:
        new: the value that replaces it; None if it stays.
        tail: text to append to a string, as in JSON.
        added: new members or elements, each with its key.
        gone: positions of the members or elements to remove.
    """

    def __init__(self) -> None:
        self.new: bytes | None = None
        self.tail = b""
        self.added: list[tuple[str, bytes]] = []
        self.gone: Collection[int] = ()


class Value:
    """The position of a value in a part of a body.

    Attributes:
        part: the part.
        key: the key of an object's member; empty elsewhere.
        at: the offset in the part at which the member starts, with its key's quote; elsewhere the
            value's own.
        start: the offset at which the value starts.
        end: the offset after it.
        children: its members or elements, in order; None if they have not been read.
        change: its own change, if any.
    """

    # It has no reference to its parent, so a body is freed without garbage collection.
    def __init__(self, part: Part, key: str, at: int, start: int, end: int) -> None:
        self.part = part
        self.key = key
        self.at = at
        self.start = start
        self.end = end
        self.children: list[Value] | None = None
        self.change: _Change | None = None

    def list_splices(self) -> list[_Splice]:
        """Its change, as replacements of bytes of the part."""
        change = self.change
        if change is None:
            return []
        if change.new is not None:
            return [(self.start, self.end, change.new)]
        if change.tail:
            return [(self.end - 1, self.end - 1, change.tail)]
        members, gone = self.children or [], change.gone
        splices = _list_removals(members, gone)
        if change.added:
            end = members[-1].end if members else self.start + 1
            written = [
                b'"%b":%b' % (key.encode(), text) if key else text for key, text in change.added
            ]
            comma = b"," if len(members) > len(gone) else b""
            splices.append((end, end, comma + b",".join(written)))
        return splices


class Part:
    """A part of a body that is JSON by itself.

    Attributes:
        text: its bytes, with unpaired surrogates replaced.
    """

    def __init__(self, text: bytes, offset: int, gap: int = 0, left_out: int = 0) -> None:
        """Create a part.

        Args:
            text: bytes of the body.
            offset: their offset in the body.
            gap: the offset in the part at which bytes of the body are left out.
            left_out: the number of these bytes.
        """
        self.text = text
        self._offset = offset
        self._gap = gap
        self._left_out = left_out

    def find(self, offset: int) -> int:
        """The offset in the body for one in the part."""
        return self._offset + offset + (self._left_out if offset > self._gap else 0)


Fields = dict[str, Value]
Pieces = list[bytes | memoryview]


class Around(NamedTuple):
    """The layout of a body around its messages.

    Attributes:
        size: the length of the bytes around them.
        members: the body's members, as the `key`, `at`, `start` and `end` of each value; empty if
            there are too many to keep.
    """

    size: int
    members: Sequence[tuple[str, int, int, int]]


class Patch:
    """One body, and changes to it.

    Attributes:
        data: the original bytes.
        root: the whole value.
    """

    def __init__(
        self, data: bytes, messages: tuple[int, int] | None = None, around: Around | None = None
    ) -> None:
        """Open a body, without changes.

        Args:
            data: the body.
            messages: offsets between which it is known to have only whole elements of a list, all
                valid JSON. They are not read, except those that `open_element` opens.
            around: the layout of another body with the same bytes around its messages; used if the
                lengths are equal.

        Raises:
            NotCounted: it is not JSON, too long, or has a repeated key.
        """
        if len(data) > MAX_BYTES:
            raise NotCounted(_INSPECT_LIMIT)
        INSPECTION.begin()
        check_containers(data)
        check_members(data)
        self.data = data
        self._weighed = False
        if messages is None:
            whole = Part(data, 0)
        else:
            start, end = messages
            whole = Part(data[:start] + data[end:], 0, start, end - start)
        start = len(whole.text) - len(whole.text.lstrip(_SPACE))
        self.root = Value(whole, "", start, start, max(start, len(whole.text.rstrip(_SPACE))))
        self._roots = [self.root]
        self._changed: list[Value] = []
        if around is not None and around.members and around.size == len(whole.text):
            # Charged as if read
            self.take(_VALUE * (1 + len(around.members)) + (around.size * _KIB >> 10))
            self.root.children = [Value(whole, *member) for member in around.members]
        elif self.is_object(self.root):
            self._open_object(self.root)  # this checks that keys are UTF-8
        else:
            self._read(self.root, _decode_raw)

    def describe_around(self) -> Around:
        """The layout around the messages, for other bodies with the same layout."""
        found = self.root.children or []
        members = (
            [(member.key, member.at, member.start, member.end) for member in found]
            if len(found) <= _MOST_KEPT
            else []
        )
        return Around(len(self.root.part.text), members)

    def take(self, units: int) -> None:
        """Charge this many units.

        Raises:
            NotCounted: not enough are left.
        """
        INSPECTION.take(units)
        if INSPECTION.left < _WORTH_WEIGHING and not self._weighed:
            self._weighed = True
            if _is_dense(self.data):
                raise NotCounted(_INSPECT_LIMIT)

    # --- reading

    def is_text(self, value: Value | None) -> bool:
        """Whether a value is a string."""
        return value is not None and _begins(value, _QUOTE)

    def is_list(self, value: Value | None) -> bool:
        """Whether a value is a list."""
        return value is not None and _begins(value, _OPEN_LIST)

    def is_object(self, value: Value | None) -> bool:
        """Whether a value is an object."""
        return value is not None and _begins(value, _OPEN_OBJECT)

    def is_null(self, value: Value) -> bool:
        """Whether a value is null."""
        return _begins(value, _NULL)

    def read_raw(self, value: Value) -> Raw:
        """The bytes of a value, with unpaired surrogates replaced."""
        return Raw(value.part.text[value.start : value.end])

    def read_text(self, value: Value | None) -> str:
        """A name or another short string; empty for other values.

        Raises:
            NotCounted: it is invalid UTF-8, or too long.
        """
        if value is None or value.end - value.start > _LONGEST_NAME or not self.is_text(value):
            return ""
        text: str = self._read(value, _decode_text)
        return text

    def open_element(self, start: int, end: int) -> Value:
        """An element of a list, by its offsets in the body; its changes are verified separately."""
        self.take(_VALUE)
        root = Value(Part(self.data[start:end], start), "", 0, 0, end - start)
        self._roots.append(root)
        return root

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
        if value.children is None:
            part, place = value.part, value.start + 1
            items: list[Raw] = self._read(value, _decode_items)
            self.take(_VALUE * len(items))
            value.children = []
            for item in items:
                start = place + (part.text[place] == _COMMA)
                start += part.text[start] == _BLANK
                if part.text[start] <= _BLANK or part.text[start] == _COMMA:  # unusual blanks
                    # Matches everywhere
                    start = _NEXT.match(part.text, place).end()  # type: ignore[union-attr]
                place = start + len(item)
                value.children.append(Value(part, "", start, start, place))
        return value.children

    def _open_object(self, value: Value) -> list[Value]:
        """The members of an object, in order.

        A member is located by its bytes after its key. No JSON value is the beginning of another,
        except a number, and after that neither a comma nor the end would follow. If a key is
        repeated, msgspec returns only one of its values, so bytes are left over.
        """
        if value.children is not None:
            return value.children
        fields: dict[str, Raw] = self._read(value, _decode_fields)
        self.take(_VALUE * len(fields))
        part, text, end, place = value.part, value.part.text, value.end, value.start + 1
        found: list[Value] = []
        quote, colon = b'"', _COLON if text.find(_COLON, place, end) >= 0 else b'":'
        for name, item in fields.items():
            key = quote + name.encode() + colon  # the usual form, which takes a third of the time
            at, start = place + len(quote) - 1, place + len(key)
            if not (
                text.startswith(key, place) and text.startswith(item, start) and "\\" not in name
            ):
                match = _KEY.match(text, place, end)
                if match is None or not text.startswith(item, match.end()):
                    raise NotCounted(AMBIGUOUS)
                at, start = match.start(1), match.end()
            place = start + len(item)
            found.append(Value(part, name, at, start, place))
            quote = b', "' if colon is _COLON else b',"'
        # More than blanks and a bracket is left
        if place + 1 != end and _END.match(text, place, end) is None:
            raise NotCounted(AMBIGUOUS)
        value.children = found
        return found

    def _read(self, value: Value, decode: Any) -> Any:  # noqa: ANN401  # msgspec's own
        """Decode a value; raises as `decode` does."""
        part = value.part
        try:
            return self.decode(_view(part.text, value.start, value.end), decode)
        except NotJson:
            self.take(part.text.count(rb"\ud") + part.text.count(rb"\uD"))
            mended = mend(part.text)
            if mended is None:
                raise
            part.text = mended
        return self.decode(_view(part.text, value.start, value.end), decode)

    # Msgspec's own
    def decode(self, raw: bytes | memoryview | Raw, decode: Any) -> Any:  # noqa: ANN401
        """Decode a part of the body.

        Raises:
            NotCounted: it is not JSON, or too large.
            ValidationError: it has another type than expected.
        """
        self.take(_VALUE + (len(raw) * _KIB >> 10))
        try:
            return decode(raw)
        except ValidationError:
            raise
        except (ValueError, RecursionError):  # errors of msgspec and Unicode are ValueErrors
            raise NotJson from None

    # --- changing

    def extend(self, text: Value, tail: bytes) -> None:
        """Append to a string; `tail` is written as in JSON."""
        self._mark(text).tail = tail

    def append(self, value: Value, text: bytes, key: str = "") -> None:
        """Append an element to an opened list, or a member with that key to an object."""
        self._mark(value).added.append((key, text))

    def replace(self, value: Value, text: bytes) -> None:
        """Replace a value, unless it is equal."""
        if text != value.part.text[value.start : value.end]:
            self._mark(value).new = text

    def remove(self, value: Value, gone: Collection[int]) -> None:
        """Remove members of an object, or elements of a list, by their indexes.

        Call this only once per value.
        """
        if gone:
            self._mark(value).gone = gone

    def change(self, value: Value, changes: Mapping[str, bytes | None]) -> None:
        """Set, add or (None) remove members of an object. Call this only once per object."""
        members = self._open_object(value)
        fields = {member.key: member for member in members}
        self.remove(
            value,
            {place for place, member in enumerate(members) if changes.get(member.key, b"") is None},
        )
        for key, text in changes.items():
            if text is not None and key in fields:
                self.replace(fields[key], text)
            elif text is not None:
                self.append(value, text, key)

    def count_changes(self) -> int:
        """The number of changed values."""
        return len(self._changed)

    def _mark(self, value: Value) -> _Change:
        """The change of a value, created if missing."""
        if value.change is None:
            value.change = _Change()
            self._changed.append(value)
        return value.change

    def foresee(self, values: Sequence[Value]) -> None:
        """Check that enough units are left to verify changes of these values; raises NotCounted."""
        costs: dict[Part, int] = {}
        for value in values:
            at, size = [root for root in self._roots if root.part is value.part][0], 0  # noqa: RUF015  # compiled, it is a list anyway
            while at is not value and at.children:
                size += at.end - at.start
                at = [child for child in at.children if child.start <= value.start < child.end][0]  # noqa: RUF015  # as above
            if not self.is_text(value):
                size += value.end - value.start
            costs[value.part] = max(costs.get(value.part, 0), size)
        if INSPECTION.left < sum(costs.values()) * _KIB >> 10:
            raise NotCounted(_INSPECT_LIMIT)

    def apply(self) -> Pieces:
        """Apply all changes, which must not overlap.

        The pieces are the new body; a single one if nothing changes.

        Raises:
            NotCounted: anything else would change, or checking this is too expensive.
        """
        splices: list[_Splice] = []
        for root in self._roots:
            part = root.part
            if changed := [value for value in self._changed if value.part is part]:
                own = sorted([splice for value in changed for splice in value.list_splices()])
                self._verify(
                    root,
                    b"".join(_splice(part.text, own)),
                    sorted([value.start for value in changed]),
                )
                splices += [(part.find(start), part.find(end), text) for start, end, text in own]
        splices.sort()
        done = 0
        for place, splice in enumerate(splices):
            if splice[0] < done or (place and splice == splices[place - 1]):
                raise NotCounted(UNVERIFIED)
            done = splice[1]
        return _splice(self.data, splices) if splices else [self.data]

    def _verify(self, root: Value, text: bytes, starts: list[int]) -> None:
        """Decode a part's new text, and check that only the values at `starts` have changed."""
        left: list[tuple[Value, bytes]] = [(root, text)]
        try:
            while left:
                value, new = left.pop()
                change = value.change
                if change is not None and change.new is not None:
                    same = new == change.new
                elif change is not None and change.tail:
                    self.decode(b'"%b"' % change.tail, _decode_text)
                    same = new == b'%b%b"' % (
                        root.part.text[value.start : value.end - 1],
                        change.tail,
                    )
                else:
                    same = self._compare(value, new, starts, left)
                if not same:
                    raise NotCounted(UNVERIFIED)
        except (NotJson, ValidationError):
            raise NotCounted(UNVERIFIED) from None

    def _compare(
        self, value: Value, new: bytes, starts: list[int], left: list[tuple[Value, bytes]]
    ) -> bool:
        """Whether an object or list has the expected members.

        Members with changes inside are appended to `left`.
        """
        kept, added = value.children or [], list[tuple[str, bytes]]()
        if value.change is not None:
            gone, added = value.change.gone, value.change.added
            kept = [child for place, child in enumerate(kept) if place not in gone]
        items: list[Raw]
        if self.is_object(value):
            fields: dict[str, Raw] = self.decode(new, _decode_fields)
            if list(fields) != [child.key for child in kept] + [key for key, _ in added]:
                return False
            items = list(fields.values())
        else:
            items = self.decode(new, _decode_items)
        if len(items) != len(kept) + len(added) or [bytes(item) for item in items[len(kept) :]] != [
            text for _, text in added
        ]:
            return False
        text = value.part.text
        for child, item in zip(kept, items, strict=False):
            if bisect_left(starts, child.start) < bisect_left(starts, child.end):
                left.append((child, bytes(item)))
            elif len(item) != child.end - child.start or not text.startswith(item, child.start):
                return False
        return True


def _begins(value: Value, byte: int) -> bool:
    text = value.part.text
    return value.start < len(text) and text[value.start] == byte  # the body may be empty


def _is_dense(data: bytes) -> bool:
    size = len(data)
    if data.count(b",") + data.count(b"[") + data.count(b"{") > size >> _DENSE_BITS:
        return True
    blanks = data.count(b" ") + data.count(b"\n") + data.count(b"\t") + data.count(b"\r")
    return blanks > size >> _SPACE_BITS or data.count(b"\\") > size >> _ESCAPE_BITS


def _view(text: bytes, start: int, end: int) -> bytes | memoryview:
    """The bytes between two offsets; long ones are not copied."""
    return text[start:end] if end - start <= _SMALL else memoryview(text)[start:end]


def _list_removals(members: Sequence[Value], gone: Collection[int]) -> list[_Splice]:
    """The replacements that remove members, each with one comma."""
    splices: list[_Splice] = []
    kept = False  # a member before the next one
    for place, member in enumerate(members):
        if place not in gone:
            kept = True
        elif kept:
            splices.append((members[place - 1].end, member.end, b""))
        else:
            end = members[place + 1].at if place + 1 < len(members) else member.end
            splices.append((member.at, end, b""))
    return splices


def _splice(data: bytes, splices: Sequence[_Splice]) -> Pieces:
    """Apply replacements, which are in order; the pieces are not copied."""
    whole = memoryview(data)
    pieces: Pieces = []
    start = 0
    for begins, ends, text in splices:
        pieces += [whole[start:begins], text]
        start = ends
    pieces.append(whole[start:])
    return pieces
