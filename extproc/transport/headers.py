"""Header blocks (HPACK, RFC 7541): a decoder, and literals for what we send.

We ask for a SETTINGS_HEADER_TABLE_SIZE of 0. Once the peer's encoder has shrunk its table to that, a block means the same
wherever it stands. A field without a reference into the dynamic table always does. Envoy repeats nearly all of its fields and
most of its blocks, so both are remembered by their bytes; such a cache is exact, and all connections share one.

What a peer may make us do is bounded: the bytes of a block before and after decoding, its fields, and what the cache holds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, Generic, TypeVar

from extproc.errors import ProtocolError

COMPRESSION_ERROR: Final = 0x9
ENHANCE_YOUR_CALM: Final = 0xB

MAX_BLOCK: Final = 65_536
"""Most bytes of a header block and, as RFC 9113 section 6.5.2 counts them, of its fields; Envoy itself takes 60 KiB."""

MAX_FIELDS: Final = 256
"""Most fields of a block; Envoy itself takes 100."""

# Kinds of fields, found out once. Pseudo-header fields are bits, so that a second one of a name shows.
REGULAR: Final = 0
METHOD: Final = 1
SCHEME: Final = 2
PATH: Final = 4
AUTHORITY: Final = 8
CONTENT_LENGTH: Final = 16
CONTENT_TYPE: Final = 32
MALFORMED: Final = 64

_KINDS: Final = {
    b":method": METHOD,
    b":scheme": SCHEME,
    b":path": PATH,
    b":authority": AUTHORITY,
    b"content-length": CONTENT_LENGTH,
    b"content-type": CONTENT_TYPE,
}
_CONNECTION_FIELDS: Final = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"})
_LENGTH_DIGITS: Final = 18

_TABLE_SIZE: Final = 4_096
_ENTRY_OVERHEAD: Final = 32
"""What RFC 7541 section 4.1 adds to the bytes of a field."""

_MAX_UPDATES: Final = 2
"""Table size updates at the start of a block: the smallest size and the last one (RFC 7541 section 4.2)."""

_INTEGER_BITS: Final = 28

# First bits of a field (RFC 7541 section 6).
_INDEXED: Final = 0x80
_INDEXING: Final = 0x40
_TABLE_SIZE_UPDATE: Final = 0x20
_TABLE_SIZE_MASK: Final = 0xE0


class Field:
    """One header field, and what kind of field it is."""

    __slots__ = ("kind", "name", "value")

    def __init__(self, name: bytes, value: bytes) -> None:
        """Find out what it is."""
        self.name = name
        self.value = value
        self.kind = classify(name, value)


def classify(name: bytes, value: bytes) -> int:
    """A field's kind; MALFORMED is what no request may hold (RFC 9113 sections 8.2 and 8.3)."""
    kind = _KINDS.get(name, REGULAR)
    if not name or name != name.lower() or (name[0] == ord(":") and not kind):
        return MALFORMED
    if name in _CONNECTION_FIELDS or (name == b"te" and value != b"trailers"):
        return MALFORMED
    if kind in (METHOD, SCHEME, PATH) and not value:
        return MALFORMED
    if kind == CONTENT_LENGTH and not (value.isdigit() and len(value) <= _LENGTH_DIGITS):
        return MALFORMED
    return MALFORMED if b"\n" in value or b"\r" in value or b"\0" in value else kind


_T = TypeVar("_T")


class _Known(Generic[_T]):
    """What was decoded before, by its bytes. It starts anew when it is full: whatever is frequent is soon back."""

    def __init__(self, limit: int) -> None:
        self.found: dict[bytes, _T] = {}
        self.size = 0
        self._limit = limit

    def keep(self, encoded: bytes, decoded: _T, size: int) -> None:
        """Remember; `size` is what that costs, in bytes."""
        if self.size + size > self._limit:
            self.found.clear()
            self.size = 0
        if size <= self._limit:
            self.found[encoded] = decoded
            self.size += size


class Cache:
    """Fields and blocks of all connections; each of the two holds at most `limit` bytes."""

    _FIELD_OVERHEAD: Final = 300
    _BLOCK_OVERHEAD: Final = 200
    _POINTER: Final = 8

    def __init__(self, limit: int = 2**20) -> None:
        """Nothing is known yet."""
        self.fields: _Known[Field] = _Known(limit)
        self.blocks: _Known[list[Field]] = _Known(limit)

    def keep_field(self, encoded: bytes, field: Field) -> None:
        """Remember a field that refers to nothing."""
        self.fields.keep(encoded, field, len(encoded) + len(field.name) + len(field.value) + self._FIELD_OVERHEAD)

    def keep_block(self, encoded: bytes, fields: list[Field]) -> None:
        """Remember a block that refers to nothing and changes nothing; its fields may have been forgotten meanwhile."""
        sizes = sum(len(field.name) + len(field.value) + self._FIELD_OVERHEAD + self._POINTER for field in fields)
        self.blocks.keep(encoded, fields, len(encoded) + sizes + self._BLOCK_OVERHEAD)


class Decoder:
    """The receiving end of one connection's header compression."""

    def __init__(self, cache: Cache) -> None:
        """The table starts with the protocol's default size."""
        self._cache = cache
        self._table: list[Field] = []  # the newest first
        self._used = 0
        self._limit = _TABLE_SIZE
        self._allowed = _TABLE_SIZE

    def forbid_table(self) -> None:
        """The peer has acknowledged that our table has size 0."""
        self._allowed = 0

    def decode(self, block: bytes) -> list[Field]:
        """The fields of a block; the caller must not change the list.

        Raises:
            ProtocolError: it is none, or it is too large; the code is HTTP/2's.
        """
        stateless = not self._limit
        if stateless:
            known = self._cache.blocks.found.get(block)
            if known is not None:
                return known
        try:
            fields = self._walk(block)
        except IndexError:
            raise ProtocolError("header block: it ends too early", code=COMPRESSION_ERROR) from None
        if stateless and not self._limit:
            self._cache.keep_block(block, fields)
        return fields

    def _walk(self, block: bytes) -> list[Field]:
        position = self._read_updates(block)
        end, size = len(block), 0
        fields: list[Field] = []
        while position < end:
            start = position
            first = block[position]
            if first >= _INDEXED:
                index, position = read_integer(block, position, 0x7F)
                field = self._find(index)
            else:
                if first & _TABLE_SIZE_MASK == _TABLE_SIZE_UPDATE:
                    raise ProtocolError("header block: a table size update amid fields", code=COMPRESSION_ERROR)
                index, position = read_integer(block, position, 0x3F if first >= _INDEXING else 0x0F)
                at = position
                if not index:
                    position = _skip_string(block, position)
                position = _skip_string(block, position)
                field = self._read_literal(block[start:position], index, at - start)
                if first >= _INDEXING and self._limit:
                    self._insert(field)
            fields.append(field)
            size += len(field.name) + len(field.value) + _ENTRY_OVERHEAD
            if size > MAX_BLOCK or len(fields) > MAX_FIELDS:
                raise ProtocolError("header block: too many fields", code=ENHANCE_YOUR_CALM)
        return fields

    def _read_updates(self, block: bytes) -> int:
        """Apply the table size updates at the block's start; returns where its fields begin."""
        position = updates = 0
        while position < len(block) and block[position] & _TABLE_SIZE_MASK == _TABLE_SIZE_UPDATE:
            size, position = read_integer(block, position, 0x1F)
            updates += 1
            if size > self._allowed or updates > _MAX_UPDATES:
                raise ProtocolError("header block: a table larger than allowed", code=COMPRESSION_ERROR)
            self._limit = size
            self._evict()
        return position

    def _read_literal(self, encoded: bytes, index: int, position: int) -> Field:
        """A literal field from its own bytes; `index` refers to its name, else that stands at `position`."""
        known = self._cache.fields.found.get(encoded)
        if known is not None:
            return known
        if index:
            name = self._find(index).name
        else:
            name, position = _read_string(encoded, position)
        value, _ = _read_string(encoded, position)
        field = Field(name, value)
        if index < len(_STATIC):
            self._cache.keep_field(encoded, field)
        return field

    def _find(self, index: int) -> Field:
        if 0 < index < len(_STATIC):
            return _STATIC[index]
        entry = index - len(_STATIC)
        if not 0 <= entry < len(self._table):
            raise ProtocolError("header block: an index that stands for nothing", code=COMPRESSION_ERROR)
        return self._table[entry]

    def _insert(self, field: Field) -> None:
        self._used += len(field.name) + len(field.value) + _ENTRY_OVERHEAD
        self._table.insert(0, field)
        self._evict()

    def _evict(self) -> None:
        while self._used > self._limit:
            oldest = self._table.pop()
            self._used -= len(oldest.name) + len(oldest.value) + _ENTRY_OVERHEAD


def read_integer(block: bytes, position: int, mask: int) -> tuple[int, int]:
    """An integer whose prefix is `mask` (RFC 7541 section 5.1), and where it ends.

    Raises:
        IndexError: it ends too early.
        ProtocolError: it is larger than anything here can be.
    """
    value = block[position] & mask
    position += 1
    if value < mask:
        return value, position
    shift = 0
    while True:
        byte = block[position]
        position += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004  # 7 bits a byte
            return value, position
        shift += 7
        if shift > _INTEGER_BITS:
            raise ProtocolError("header block: an integer too large", code=COMPRESSION_ERROR)


def _skip_string(block: bytes, position: int) -> int:
    length, position = read_integer(block, position, 0x7F)
    if position + length > len(block):
        raise IndexError
    return position + length


def _read_string(block: bytes, position: int) -> tuple[bytes, int]:
    """A string that is known to be whole, and where it ends."""
    coded = block[position] >= 0x80  # noqa: PLR2004  # the first bit
    length, position = read_integer(block, position, 0x7F)
    text = block[position : position + length]
    return decode_huffman(text) if coded else text, position + length


def decode_huffman(data: bytes) -> bytes:
    """A string in HPACK's Huffman code (RFC 7541 section 5.2).

    Raises:
        ProtocolError: it holds the end-of-string symbol, or is not padded as it has to be.
    """
    out: list[int] = []
    window, have = 0, 0  # the last bytes, and how many of their bits are still to be decoded
    for byte in data:
        window = (window << 8 | byte) & _WINDOW
        have += 8
        while have >= 8:  # noqa: PLR2004  # a short code's most bits
            entry = _SHORT[window >> have - 8 & 0xFF]
            if not entry:
                entry = _find_long(window, have)
                if not entry:
                    break
            have -= entry >> 8
            out.append(entry & 0xFF)
    while have:
        entry = _SHORT[(window << 8 | 0xFF) >> have & 0xFF]
        if not entry or entry >> 8 > have:
            break
        have -= entry >> 8
        out.append(entry & 0xFF)
    padding = (1 << have) - 1
    if have > 7 or window & padding != padding:  # noqa: PLR2004  # less than a byte
        raise ProtocolError("header block: Huffman padding", code=COMPRESSION_ERROR)
    return bytes(out)


def _find_long(window: int, have: int) -> int:
    """The entry of a code longer than a byte at the start of what is to be decoded, 0 when it needs more bits."""
    bits = (window << _LONGEST >> have) & (1 << _LONGEST) - 1
    group = bisect_right(_FIRST_CODES, bits) - 1
    length = _GROUP_LENGTHS[group]
    if length > have:
        return 0
    symbol = _SYMBOLS[_GROUP_STARTS[group] + (bits - _FIRST_CODES[group] >> _LONGEST - length)]
    if symbol == _END_OF_STRING:
        raise ProtocolError("header block: end of string within one", code=COMPRESSION_ERROR)
    return length << 8 | symbol


# The Huffman code (RFC 7541 appendix B) is canonical: the lengths of its codes say it all. One letter each, "a" for 5 bits.
_CODE_LENGTHS: Final = [
    letter - ord("a") + 5
    for letter in b"isxxxxxxxtzxxzxxxxxxxxzxxxxxxxxxbffhibdgffdgdbbbaaabbbbbbbcdkbhfibccccccccccccccccccccccdc"
    b"dioijbkabababbbaccbbbabcbaabccccckgjixprpprrrsrssssststtrstssssqrsrsstrqprrssqsrrtqrssqqrq"
    b"srssprrrsrrsvvporsruvvvwwvtuoqvwwvwtqqvvxwwwptpqrqqsrruuttvsvwvvwwwwwxwwwwwvz"
]
_LONGEST: Final = 30
_WINDOW: Final = 2 ** (_LONGEST + 8) - 1
_END_OF_STRING: Final = 256
_SYMBOLS: Final = sorted(range(257), key=lambda symbol: (_CODE_LENGTHS[symbol], symbol))
_GROUP_LENGTHS: Final = sorted(set(_CODE_LENGTHS))
_GROUP_STARTS: Final = [
    sum(length < shortest for length in _CODE_LENGTHS) for shortest in _GROUP_LENGTHS
]  # where a length's first symbol stands
_FIRST_CODES: Final = [
    0,
    *accumulate(_CODE_LENGTHS.count(length) << _LONGEST - length for length in _GROUP_LENGTHS[:-1]),
]  # a length's first code, filled up with zeros
_SHORT: Final = [0] * 256
"""What begins with these 8 bits: the code's length and its symbol, 0 where the code is longer."""

_STATIC_TABLE: Final = b"""
:authority:
:method: GET
:method: POST
:path: /
:path: /index.html
:scheme: http
:scheme: https
:status: 200
:status: 204
:status: 206
:status: 304
:status: 400
:status: 404
:status: 500
accept-charset:
accept-encoding: gzip, deflate
accept-language:
accept-ranges:
accept:
access-control-allow-origin:
age:
allow:
authorization:
cache-control:
content-disposition:
content-encoding:
content-language:
content-length:
content-location:
content-range:
content-type:
cookie:
date:
etag:
expect:
expires:
from:
host:
if-match:
if-modified-since:
if-none-match:
if-range:
if-unmodified-since:
last-modified:
link:
location:
max-forwards:
proxy-authenticate:
proxy-authorization:
range:
referer:
refresh:
retry-after:
server:
set-cookie:
strict-transport-security:
transfer-encoding:
user-agent:
vary:
via:
www-authenticate:
"""


def _fill_short() -> None:
    code = 0
    for symbol in _SYMBOLS:
        length = _CODE_LENGTHS[symbol]
        if length > 8:  # noqa: PLR2004  # bits
            return
        for index in range(code, code + (1 << 8 - length)):
            _SHORT[index] = length << 8 | symbol
        code += 1 << 8 - length


def _read_static() -> list[Field]:
    """RFC 7541 appendix A, which counts from 1."""
    found = [Field(b"", b"")]
    for line in _STATIC_TABLE.split(b"\n")[1:-1]:
        name, _, value = line[1:].partition(b":")
        found.append(Field(line[:1] + name, value.strip()))
    return found


_fill_short()
_STATIC: Final = _read_static()


def encode(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """A header block of literals that are never indexed (RFC 7541 section 6.2.2): it means the same everywhere."""
    return b"".join(b"\0" + _encode_length(len(name)) + name + _encode_length(len(value)) + value for name, value in headers)


def _encode_length(value: int) -> bytes:
    """A string length: an integer with a prefix of 7 bits (RFC 7541 section 5.1)."""
    if value < 127:  # noqa: PLR2004  # what the prefix holds
        return bytes((value,))
    value -= 127
    made = bytearray((127,))
    while value >= 128:  # noqa: PLR2004  # 7 bits a byte
        made.append(value & 127 | 128)
        value >>= 7
    made.append(value)
    return bytes(made)
