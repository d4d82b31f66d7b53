"""Reads JSON lines, or a JSON document, in bounded memory, and counts problems.

A file is a document if its first line is not a complete JSON value. Nothing in a file is executed
or followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from extproc.cli.packed import DAMAGES, LONGEST, FilePlace, PackedLines, Problems
from extproc.cli.scan.transcripts import BAD_JSON, mend_value

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
"""Problems with lines and files, as text after `N lines: `."""

HARMLESS: Final = frozenset(
    {"foreign", "unknown_kind", "no_conversation", "unknown", "form", "link"}
)
"""Problems that are normal in folders with other files."""


def read_values(
    file: str, problems: Problems, advance: Callable[[int], object], longest: int = LONGEST
) -> Iterator[tuple[FilePlace, bytes]]:
    """The JSON values of a file: its lines, its document, or the items of its list.

    Args:
        file: the path.
        problems: counts problems.
        advance: called with the number of bytes read since the last call.
        longest: maximum bytes of a line or document.
    """
    try:
        with Path(file).open("rb") as raw:
            lines, told = PackedLines(file, raw, problems, longest), 0
            for place, value in _read(lines, problems, longest):
                yield place, value
                if not place.line % 256:
                    advance(lines.tell() - told)
                    told = lines.tell()
            advance(lines.tell() - told)
    except (EOFError, *DAMAGES):
        problems.add("damaged", FilePlace(file, 1))
    except OSError as error:
        problems.add("unreadable", FilePlace(file, 1), error.strerror or "")


def _read(
    lines: PackedLines, problems: Problems, longest: int
) -> Iterator[tuple[FilePlace, bytes]]:
    reading = lines.read()
    first = next(reading, None)
    if first is None:
        return
    first, place = mend_value(first.removeprefix(_MARK)), lines.place
    if not first.lstrip().startswith((b"{", b"[")):
        problems.add("foreign", place._replace(line=1))
        return
    document = first if is_json(first) else _read_document(lines, first, problems, longest)
    if document == b"":
        return
    if document is not None and document.lstrip().startswith(b"["):
        for value in _LIST.decode(document):
            yield place, bytes(value)
    else:
        yield place, first if document is None else document
    for line in reading:
        yield lines.place, mend_value(line)


def _read_document(
    lines: PackedLines, first: bytes, problems: Problems, longest: int
) -> bytes | None:
    """The whole file if it is a JSON document, or empty if that is too long.

    None for a file of lines; the source is then after the first line.
    """
    behind = lines.source.tell()
    pieces, size = [first], len(first)
    while size <= longest and (piece := lines.source.read(_CHUNK)):
        pieces.append(piece)
        size += len(piece)
    if size > longest and first.strip() in (b"{", b"["):
        problems.add("too_long", lines.place._replace(line=1))
        return b""
    whole = mend_value(b"".join(pieces)) if size <= longest else b""
    if is_json(whole):
        return whole
    lines.source.seek(behind)
    return None


def is_json(value: bytes) -> bool:
    try:
        _ANY.decode(value)
    except BAD_JSON:
        return False
    return True
