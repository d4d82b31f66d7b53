"""Reads files of JSON lines, or of one JSON document, in bounded memory, and counts what cannot be read.

A file is a document if its first line is no JSON value by itself. Nothing in a file is ever run or followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Final

import msgspec

from extproc.cli.packed import DAMAGES, PackedFile, is_bomb, open_packed
from extproc.cli.scan.transcripts import BAD_JSON, ScannedPlace, mend_value

LONGEST: Final = 32 * 2**20
"""Longest line or document that is read, in bytes."""

_PLACES = 3
_CHUNK = 2**20
_MARK = b"\xef\xbb\xbf"
_ANY: Final = msgspec.json.Decoder(msgspec.Raw)
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])

PROBLEMS: Final = {
    "too_long": "longer than {longest}: skipped; give the file in lines, one JSON value each",
    "not_json": "not JSON: damaged, or cut off",
    "unreadable": "cannot be read: check the permissions",
    "damaged": "cannot be decompressed from here on: compress the file again",
    "bomb": "decompressed, more than a thousand times as large as its file: not read from here on",
    "link": "a link that leads out of the folder: not followed; give what it leads to as well",
    "foreign": "not a file of JSON",
    "unknown": "JSON, but not Claude Code, Codex, Gemini CLI, ATIF, OTLP, or requests to a model",
    "unknown_kind": "of an unknown kind: ignored",
    "form": "messages in the form of no API: ignored",
    "no_conversation": "a request without a conversation: ignored",
    "failed": "cannot be read because of a mistake in Loopguard: please report it",
    "unread": "requests or calls that cannot be judged",
}
"""What may be wrong with a line or a file, after `N lines: `."""

HARMLESS: Final = frozenset({"foreign", "unknown_kind", "no_conversation", "unknown", "form", "link"})
"""Problems that are normal in folders that hold other files as well."""


class Unread(msgspec.Struct):
    """One kind of problem.

    Attributes:
        count: how often.
        names: what it was, in the words of the file, and how often; at most 20.
        places: the first ones.
    """

    count: int = 0
    names: dict[str, int] = {}
    places: list[ScannedPlace] = []


_MOST_NAMES = 20


class UnreadLines:
    """Problems with lines and files, by kind."""

    def __init__(self) -> None:
        self.by_kind: dict[str, Unread] = {}

    def add(self, kind: str, place: ScannedPlace, name: str = "", count: int = 1) -> None:
        """Note one."""
        found = self.by_kind.setdefault(kind, Unread())
        found.count += count
        if name and (name in found.names or len(found.names) < _MOST_NAMES):
            found.names[name] = found.names.get(name, 0) + count
        if len(found.places) < _PLACES:
            found.places.append(place)

    def merge(self, others: dict[str, Unread]) -> None:
        """Add those of another process."""
        for kind, other in others.items():
            found = self.by_kind.setdefault(kind, Unread())
            found.count += other.count
            for name, count in other.names.items():
                if name in found.names or len(found.names) < _MOST_NAMES:
                    found.names[name] = found.names.get(name, 0) + count
            found.places = [*found.places, *other.places][:_PLACES]


def read_values(
    file: str, unread: UnreadLines, advance: Callable[[int], object], longest: int = LONGEST
) -> Iterator[tuple[ScannedPlace, bytes]]:
    """The JSON values of a file, each with its place: its lines, or one document, or the values of a list.

    Args:
        file: its path.
        unread: where to count what cannot be read.
        advance: is told how many bytes were read since the last time.
        longest: maximum length of a line or document, in bytes.
    """
    start = ScannedPlace(file, 1)
    try:
        with Path(file).open("rb") as raw:
            yield from _Values(file, raw, open_packed(raw), unread, advance, longest).read()
    except (EOFError, *DAMAGES):
        unread.add("damaged", start)
    except OSError as error:
        unread.add("unreadable", start, error.strerror or "")


class _Values:
    def __init__(  # noqa: PLR0913  # all that is known of a file
        self,
        file: str,
        raw: BufferedReader,
        source: PackedFile,
        unread: UnreadLines,
        advance: Callable[[int], object],
        longest: int,
    ) -> None:
        self._file, self._raw, self._source = file, raw, source
        self._unread, self._advance, self._longest = unread, advance, longest
        self._line = self._told = 0

    def read(self) -> Iterator[tuple[ScannedPlace, bytes]]:
        first = self._read_line()
        while first is not None and not first.strip():
            first = self._read_line()
        if first is None:
            return
        first = mend_value(first.removeprefix(_MARK))
        if not first.lstrip().startswith((b"{", b"[")):
            self._unread.add("foreign", ScannedPlace(self._file, 1))
            return
        if is_json(first):
            yield from self._open(first)
        else:
            document = self._read_document(first)
            if document is not None:
                if document:
                    yield from self._open(document)
                return
            yield ScannedPlace(self._file, self._line), first
        while (line := self._read_line()) is not None:
            if not line or line.isspace():
                continue
            yield ScannedPlace(self._file, self._line), mend_value(line)
        self._tell()

    def _open(self, value: bytes) -> Iterator[tuple[ScannedPlace, bytes]]:
        place = ScannedPlace(self._file, self._line)
        if not value.lstrip().startswith(b"["):
            yield place, value
            return
        for raw in _LIST.decode(value):
            yield place, bytes(raw)

    def _read_document(self, first: bytes) -> bytes | None:
        """The whole file, if it is one JSON document; empty for one that is too long.

        None if it has lines; the source is then behind the first one.
        """
        behind = self._source.tell()
        pieces, size = [first], len(first)
        while size <= self._longest and (piece := self._source.read(_CHUNK)):
            pieces.append(piece)
            size += len(piece)
        if size > self._longest and first.strip() in (b"{", b"["):
            self._unread.add("too_long", ScannedPlace(self._file, 1))
            return b""
        whole = mend_value(b"".join(pieces))
        if size <= self._longest and is_json(whole):
            self._tell()
            return whole
        self._source.seek(behind)
        return None

    def _read_line(self) -> bytes | None:
        """The next line; None at the end or where a bomb begins, and empty for one that is too long."""
        line = self._source.readline(self._longest)
        if not line:
            return None
        if is_bomb(self._source, self._raw):
            self._unread.add("bomb", ScannedPlace(self._file, self._line + 1))
            return None
        self._line += 1
        if len(line) == self._longest and not line.endswith(b"\n"):
            self._unread.add("too_long", ScannedPlace(self._file, self._line))
            while line and not line.endswith(b"\n") and not is_bomb(self._source, self._raw):
                line = self._source.readline(_CHUNK)
                self._tell()
            return b""
        if not self._line % 256:
            self._tell()
        return line

    def _tell(self) -> None:
        at = self._raw.tell()
        self._advance(at - self._told)
        self._told = at


def is_json(value: bytes) -> bool:
    """Whether these bytes are a JSON value."""
    try:
        _ANY.decode(value)
    except BAD_JSON:
        return False
    return True
