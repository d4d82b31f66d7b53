"""Reads lines of files that may be compressed, in bounded memory, and counts what is wrong with them, for `scan` and `replay`.

The first bytes of a file tell whether it is compressed, with gzip or zstd.
"""
# interpreted: works on files

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Iterator, Mapping
from io import BufferedReader
from typing import Final, NamedTuple, TypeAlias

import msgspec

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PackedFile: TypeAlias = BufferedReader | gzip.GzipFile | zstd.ZstdFile

LONGEST: Final = 32 * 2**20
"""Longest line that is read, in bytes: a body above Envoy's buffer limit does not reach any policy."""

DAMAGES: Final = (zlib.error, gzip.BadGzipFile, zstd.ZstdError)
"""What readers raise for damaged data; for data that is cut off, they raise EOFError."""

_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_WINDOW: Final = 27
"""Largest window that zstd's own command accepts by default, as the power of 2 of its bytes."""

_FREE: Final = 2**28
_MOST_PER_BYTE: Final = 1_032
"""Most that one byte of gzip can become (deflate); zstd could go a hundred times further. A file below `_FREE` may."""

_CHUNK: Final = 2**20
_MOST_NAMES: Final = 20


class FilePlace(NamedTuple):
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"  # as compilers write it


class Problem(msgspec.Struct):
    """One kind of problem with lines.

    Attributes:
        count: how often.
        names: what it was, in the words of the file, and how often; at most 20.
        places: the first ones.
    """

    count: int = 0
    names: dict[str, int] = {}
    places: list[FilePlace] = []


class Problems:
    """Problems with lines and files, by kind."""

    def __init__(self, places: int = 3) -> None:
        """Keep this many places of each kind."""
        self.by_kind: dict[str, Problem] = {}
        self._places = places

    def add(self, kind: str, place: FilePlace, name: str = "", count: int = 1) -> None:
        self.merge({kind: Problem(count, {name: count} if name else {}, [place])})

    def merge(self, others: Mapping[str, Problem]) -> None:
        """Add those of another process."""
        for kind, other in others.items():
            found = self.by_kind.setdefault(kind, Problem())
            found.count += other.count
            for name, count in other.names.items():
                if name in found.names or len(found.names) < _MOST_NAMES:
                    found.names[name] = found.names.get(name, 0) + count
            found.places = [*found.places, *other.places][: self._places]


class PackedLines:
    """The lines of an open file; raises OSError if it cannot be read.

    Attributes:
        source: its decompressed content, or the file itself.
        number: number of lines that were read.
    """

    def __init__(self, name: str, raw: BufferedReader, problems: Problems, longest: int = LONGEST) -> None:
        self.number = 0
        self.source: PackedFile = raw
        self._name, self._raw, self._problems, self._longest = name, raw, problems, longest
        start = raw.peek(len(_ZSTD))
        if start.startswith(_GZIP):
            self.source = gzip.GzipFile(fileobj=raw)
        elif start.startswith(_ZSTD):
            self.source = zstd.ZstdFile(raw, options={zstd.DecompressionParameter.window_log_max: _WINDOW})

    @property
    def place(self) -> FilePlace:
        """That of the line that was read last."""
        return FilePlace(self._name, self.number)

    def tell(self) -> int:
        """The number of bytes read from the file."""
        return self._raw.tell()

    def read(self) -> Iterator[bytes]:
        """All lines that are neither blank nor too long, up to where a bomb begins."""
        while line := self.source.readline(self._longest):
            self.number += 1
            if self._is_bomb():
                self._problems.add("bomb", self.place)
                return
            if len(line) == self._longest and not line.endswith(b"\n"):
                self._problems.add("too_long", self.place)
                while line and not line.endswith(b"\n") and not self._is_bomb():
                    line = self.source.readline(_CHUNK)
            elif not line.isspace():
                yield line

    def _is_bomb(self) -> bool:
        """Whether what was read so far is far more than a file of this size usually contains."""
        return self.source is not self._raw and self.source.tell() > _FREE + _MOST_PER_BYTE * self._raw.tell()
