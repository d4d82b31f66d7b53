"""Changes of a JSON body that leave every other byte as it was: members and elements are taken out, values replaced or added.

What two parsers may read in two ways, such as a key that stands twice in an object, is not changed at all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from extproc.encodings import list_encodings, split_mark
from extproc.request import HttpRequest
from extproc.similarity.document import Document
from extproc.similarity.shapes.places import Member, Value, open_items, open_members

AMBIGUOUS: Final = "ambiguous_body"
"""Of a body that two readers may read in two ways, as no client of an API writes it."""

_MOST_OPENED: Final = 10_000
"""Most members and elements that are looked at in one body; each takes two to four microseconds."""

_MOST_COMMAS: Final = 100_000
"""Most commas in a list that is looked at: no more elements than that are told apart, which takes 10 ms."""


class NotEdited(Exception):  # says what becomes of the request
    """The body cannot be changed.

    Attributes:
        reason: why, as `unsteered_total` and `unnarrowed_total` show it.
    """

    def __init__(self, reason: str) -> None:
        """Say why."""
        super().__init__(reason)
        self.reason = reason


def open_document(request: HttpRequest, body: bytes | memoryview, document: Document | None) -> tuple[bytes, Document]:
    """A request's body to be changed: its byte order mark, which is no part of its JSON, and the rest.

    Args:
        request: whose body it is.
        body: all of it.
        document: the same, as somebody has looked into it, which saves doing it again.

    Raises:
        NotEdited: it is compressed.
    """
    if list_encodings(request.headers.get("content-encoding", b"")):
        raise NotEdited("content_encoding")
    if document is not None:
        return b"", document
    mark, rest = split_mark(bytes(body))
    return mark, Document(rest)


class _Edit(NamedTuple):
    """What stands in place of some bytes."""

    start: int
    end: int
    text: bytes


class Edits:
    """The changes of one body."""

    def __init__(self, body: bytes) -> None:
        """Start without any."""
        self._body = body
        self._edits: list[_Edit] = []
        self._left = _MOST_OPENED

    def open_object(self, value: Value) -> dict[str, Member]:
        """The members of an object by their keys, in their order.

        Raises:
            NotEdited: it is no object, has too many, or a key stands twice.
        """
        members = open_members(value)
        self._count(value, b"{}", len(members))
        found = {member.key: member for member in members}
        if len(found) < len(members):
            raise NotEdited(AMBIGUOUS)
        return found

    def open_list(self, value: Value) -> list[Member]:
        """The elements of a list, in their order, as members without keys.

        Raises:
            NotEdited: it is no list, or has too many.
        """
        if value.body.count(b",", value.start, value.end) > _MOST_COMMAS:
            raise NotEdited("inspect_limit")
        items = open_items(value, self._left + 1)
        self._count(value, b"[]", len(items))
        return [Member("", item.start, item) for item in items]

    def _count(self, value: Value, brackets: bytes, found: int) -> None:
        """See that what was found is all, and not too much."""
        self._left -= found
        if self._left < 0:
            raise NotEdited("inspect_limit")
        if not found and b"".join(bytes(value.raw).split()) != brackets:
            raise NotEdited(AMBIGUOUS)

    def replace(self, value: Value, text: bytes) -> None:
        """Put another value in place of one."""
        self._edits.append(_Edit(value.start, value.end, text))

    def remove(self, members: Sequence[Member], gone: Collection[int]) -> None:
        """Take members of one object, or elements of one list, out of it, by their places."""
        kept = False  # something in front of the next one
        for place, member in enumerate(members):
            if place not in gone:
                kept = True
            elif kept:
                self._edits.append(_Edit(members[place - 1].value.end, member.value.end, b""))
            else:
                end = members[place + 1].start if place + 1 < len(members) else member.value.end
                self._edits.append(_Edit(member.start, end, b""))

    def change(self, value: Value, fields: Mapping[str, Member], changes: Mapping[str, bytes | None]) -> None:
        """Give members of an object other values, new ones among them, or take them out (None)."""
        members = list(fields.values())
        gone = {place for place, member in enumerate(members) if changes.get(member.key, b"") is None}
        self.remove(members, gone)
        empty = len(gone) == len(members)
        for key, text in changes.items():
            if text is not None and key in fields:
                self.replace(fields[key].value, text)
            elif text is not None:
                end = members[-1].value.end if members else value.start + 1
                self._edits.append(_Edit(end, end, b'%b"%b":%b' % (b"" if empty else b",", key.encode(), text)))
                empty = False

    def apply(self) -> bytes:
        """The body with all changes, of which none reaches into another."""
        parts = []
        done = 0
        for edit in sorted(self._edits, key=lambda edit: (edit.start, edit.end)):
            parts += [self._body[done : edit.start], edit.text]
            done = edit.end
        return b"".join([*parts, self._body[done:]])
