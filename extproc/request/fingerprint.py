"""The fingerprint, which is equal for requests that count as the same.

A request's composite is `METHOD|path|query|body|descriptors`, percent-encoded so that equal
composites mean equal parts. Its CRC32 is the fingerprint that people see. The counter's key adds a
64-bit check and a hash of the caller, so that a CRC32 collision never causes a refusal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final

from zlib_ng.zlib_ng import adler32, crc32

MAX_TARGET = 65_536
"""Maximum length of a path with query, in bytes (Envoy's default for all headers together is 60
KiB)."""

MAX_MARKS = 10_000
"""Maximum number of `&`, and of `%`, in a query.

They determine the decoding time: 19 ms with the maximum of both. 64 KiB of them would take 29 ms,
and twice that on a busy machine. No client may delay others for longer than 50 ms.
"""

_IN_PATH = str.maketrans({"%": "%25", "|": "%7C"})
_IN_PAIR = str.maketrans({"%": "%25", "|": "%7C", "=": "%3D", "&": "%26"})


_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_ENCODED = re.compile("%[0-9A-Fa-f]{2}")
_PARAMETERS = re.compile("(?:;|%3B)[^/]*")
_SLASHES = re.compile("//+")


# Compiled code reads a module's constant directly, but looks up an imported name.
_crc32: Final = crc32
_adler32: Final = adler32

_WORD: Final = 2**32 - 1

_LONGEST_KNOWN: Final = 2_048
_MAX_KNOWN: Final = 1_024
"""Maximum length of a cached caller's descriptors, in characters, and number of cached callers.
Without the cache, the benchmark's row "own work per request" gets 9 % worse for recurring callers.
"""


class Body:
    """Length and checksums of a body, computed at once or in chunks with `plus`; immutable."""

    def __init__(
        self, length: int, crc32: int, adler32: int, rest: bytes | memoryview = b""
    ) -> None:
        """`rest` is the body's end, which is added to the checksums when they are needed."""
        self.length = length
        self._crc32 = crc32
        self._adler32 = adler32
        self._rest = rest

    def plus(self, chunk: bytes | memoryview) -> Body:
        """The body with `chunk` appended."""
        return Body(
            self.length + len(chunk), _crc32(chunk, self.crc32), _adler32(chunk, self.adler32)
        )

    def _sum_up(self) -> None:
        rest, self._rest = self._rest, b""
        self._crc32, self._adler32 = _crc32(rest, self._crc32), _adler32(rest, self._adler32)

    @property
    def crc32(self) -> int:
        """The CRC32, as in zlib."""
        if self._rest:
            self._sum_up()
        return self._crc32

    @property
    def adler32(self) -> int:
        """The Adler-32."""
        if self._rest:
            self._sum_up()
        return self._adler32


NO_BODY: Final = Body(0, 0, 1)
"""No body, and the start of a body in chunks (RFC 1950: Adler-32 starts at 1)."""


def normalize_path(path: str) -> str:
    """Normalize a path as a server would, so that different spellings are equal.

    Percent-encoded characters that need no encoding are decoded, the hex digits of others are in
    upper case, and dot segments are removed (RFC 3986 section 6.2.2). Then slashes are merged, as
    by Envoy's `merge_slashes`.

    >>> normalize_path("/v1//chat/%2e/x/../complet%69ons%2f")
    '/v1/chat/completions%2F'
    """
    if len(path) > MAX_TARGET or not path.startswith("/"):
        return path
    if "%" in path:
        path = _ENCODED.sub(_decode_unreserved, path)
    if "/." in path:
        path = _remove_dot_segments(path)
    return _SLASHES.sub("/", path) if "//" in path else path


def drop_parameters(path: str) -> str:
    """Remove path parameters from a normalized path, as servers do (RFC 3986 section 3.3).

    >>> drop_parameters("/v1/chat;a=1/completions;b%3Bc")
    '/v1/chat/completions'
    """
    return normalize_path(_PARAMETERS.sub("", path))


def _decode_unreserved(found: re.Match[str]) -> str:
    char = chr(int(found[0][1:], 16))
    return char if char in _UNRESERVED else found[0].upper()


def _remove_dot_segments(path: str) -> str:
    """Remove dot segments (RFC 3986 section 5.2.4)."""
    kept: list[str] = []
    segments = path.split("/")[1:]
    for segment in segments:
        if segment == "..":
            del kept[-1:]
        elif segment != ".":
            kept.append(segment)
    if segments[-1] in (".", ".."):
        kept.append("")
    return "/" + "/".join(kept)


def is_too_long(target: str, query: str) -> bool:
    """Whether a target is too long for a fingerprint; `query` is its part to decode."""
    if len(target) <= MAX_MARKS:
        return False
    return len(target) > MAX_TARGET or query.count("&") > MAX_MARKS or query.count("%") > MAX_MARKS


def write_query(pairs: Iterable[tuple[str, str]]) -> str:
    """Encode and sort decoded pairs for the composite."""
    return "&".join([_write_pair(name, value) for name, value in sorted(pairs)])


def join_descriptors(values: Sequence[tuple[str, str]]) -> str:
    """Write descriptors for the composite: `name=value`, sorted, joined by `|`."""
    pairs = [_write_pair(name, value) for name, value in values]
    return pairs[0] if len(pairs) == 1 else "|".join(sorted(pairs))


def write_head(method: str, path: str, query: str) -> str:
    """The composite up to the body, `METHOD|path|query|`; `query` comes from `write_query`."""
    if "%" in path or "|" in path or "%" in method or "|" in method:
        method, path = method.translate(_IN_PATH), path.translate(_IN_PATH)
    return f"{method}|{path}|{query}|"


def write_crc32(number: int) -> str:
    """Write a CRC32 as 8 hex digits."""
    return number.to_bytes(4, "big").hex()  # compiled, much faster than formatting


def name_request(head: str, body: Body, descriptors: str) -> tuple[str, str, str]:
    """The names of a request; `head` is from `write_head`, `descriptors` from `join_descriptors`.

    Returns:
        the composite;
        the fingerprint: its CRC32, 8 hex digits, shown in logs, headers and `explain`;
        the check: 64-bit hash of the composite, the body's length and its Adler-32, 16 hex digits.
    """
    composite = f"{head}{body.crc32.to_bytes(4, 'big').hex()}"
    if descriptors:
        composite = f"{composite}|{descriptors}"
    data = composite.encode("utf-8", "surrogateescape")
    check = blake2b(b"%b\0%d\0%d" % (data, body.length, body.adler32), digest_size=8)
    return composite, _crc32(data).to_bytes(4, "big").hex(), check.hexdigest()


def identify(head: str, body: Body, session: int) -> bytes:
    """A digest of 8 bytes that distinguishes a request from the few before it.

    Args:
        head: from `write_head`.
        body: the request's body.
        session: checksum of its session's name, because sessions may share a ledger.
    """
    first, second = sum_up(head) ^ session ^ body.crc32, body.adler32 ^ body.length & _WORD
    return first.to_bytes(4, "big") + second.to_bytes(4, "big")


def sum_up(text: str) -> int:
    """CRC32 of a text."""
    return _crc32(text.encode("utf-8", "surrogateescape"))


def hash_tenant(descriptors: str) -> str:
    """blake2b-64 of the joined descriptors, 16 hex digits.

    Requests of different callers never share a key.
    """
    return (
        _recall_tenant(descriptors)
        if len(descriptors) <= _LONGEST_KNOWN
        else _hash_tenant(descriptors)
    )


def _hash_tenant(descriptors: str) -> str:
    return blake2b(descriptors.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


_recall_tenant: Final = lru_cache(_MAX_KNOWN)(_hash_tenant)


def _write_pair(name: str, value: str) -> str:
    pair = f"{name}={value}"
    if "%" in pair or "|" in pair or "&" in pair or "=" in name or "=" in value:
        return f"{name.translate(_IN_PAIR)}={value.translate(_IN_PAIR)}"
    return pair
