"""Opens files that may be compressed with gzip or zstd, which their first bytes tell."""
# interpreted: works on files

from __future__ import annotations

import gzip
import sys
import zlib
from io import BufferedReader
from typing import Final, TypeAlias

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PackedFile: TypeAlias = BufferedReader | gzip.GzipFile | zstd.ZstdFile

DAMAGES: Final = (zlib.error, gzip.BadGzipFile, zstd.ZstdError)
"""What readers raise for damaged data; for data that is cut off, they raise EOFError."""

_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_WINDOW: Final = 27
"""Largest window that zstd's own command accepts by default, as the power of 2 of its bytes."""

_FREE: Final = 2**28
_MOST_PER_BYTE: Final = 1_032
"""Most that one byte of gzip can become (deflate); zstd could go a hundred times further. A file below `_FREE` may."""


def open_packed(raw: BufferedReader) -> PackedFile:
    """The decompressed content of an open file, or the file itself; raises OSError if it cannot be read."""
    start = raw.peek(len(_ZSTD))
    if start.startswith(_GZIP):
        return gzip.GzipFile(fileobj=raw)
    if start.startswith(_ZSTD):
        return zstd.ZstdFile(raw, options={zstd.DecompressionParameter.window_log_max: _WINDOW})
    return raw


def is_bomb(source: PackedFile, raw: BufferedReader) -> bool:
    """Whether what was read so far is far more than a file of this size usually contains."""
    return source is not raw and source.tell() > _FREE + _MOST_PER_BYTE * raw.tell()
