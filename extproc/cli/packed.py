"""Reads lines of plain, gzip or zstd files in bounded memory, and counts problems with them.

The first bytes of a file tell how it is compressed.
"""
# interpreted: reads files

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
"""Maximum bytes of a line; larger bodies exceed Envoy's buffer limit and reach no policy."""

DAMAGES: Final = (zlib.error, gzip.BadGzipFile, zstd.ZstdError)
"""Exceptions for damaged data; truncated data raises EOFError."""

_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_WINDOW: Final = 27
"""Largest window that the zstd command accepts by default, as a power of 2."""

_FREE: Final = 2**28
_MOST_PER_BYTE: Final = 1_032
"""Maximum expansion of gzip's deflate; zstd can reach more, allowed up to `_FREE` bytes."""

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
        count: number of lines.
        names: details in the file's words, with counts; at most 20.
        places: the first places.
    """

    count: int = 0
    names: dict[str, int] = {}
    places: list[FilePlace] = []


class Problems:
    """Problems with lines and files, by kind."""

    def __init__(self, places: int = 3) -> None:
        """Keep the first `places` places of each kind."""
        self.by_kind: dict[str, Problem] = {}
        self._places = places

    def add(self, kind: str, place: FilePlace, name: str = "", count: int = 1) -> None:
        self.merge({kind: Problem(count, {name: count} if name else {}, [place])})

    def merge(self, others: Mapping[str, Problem]) -> None:
        """Add the problems of another process."""
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
        source: the decompressed content, or the file itself.
        number: number of lines read.
    """

    def __init__(
        self, name: str, raw: BufferedReader, problems: Problems, longest: int = LONGEST
    ) -> None:
        self.number = 0
        self.source: PackedFile = raw
        self._name, self._raw, self._problems, self._longest = name, raw, problems, longest
        start = raw.peek(len(_ZSTD))
        if start.startswith(_GZIP):
            self.source = gzip.GzipFile(fileobj=raw)
        elif start.startswith(_ZSTD):
            self.source = zstd.ZstdFile(
                raw, options={zstd.DecompressionParameter.window_log_max: _WINDOW}
            )

    @property
    def place(self) -> FilePlace:
        """The place of the line read last."""
        return FilePlace(self._name, self.number)

    def tell(self) -> int:
        """The number of bytes read from the file."""
        return self._raw.tell()

    def read(self) -> Iterator[bytes]:
        """The lines, except blank and too long ones, up to a decompression bomb."""
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
        return (
            self.source is not self._raw
            and self.source.tell() > _FREE + _MOST_PER_BYTE * self._raw.tell()
        )
