"""Header blocks (HPACK, RFC 7541): a decoder, and an encoder that writes only literals.

Loopguard sets SETTINGS_HEADER_TABLE_SIZE to 0. Once the peer's encoder has shrunk its table, a
block's meaning depends on its bytes alone, on every connection. The meaning of a field without a
reference to the dynamic table always does. Envoy repeats nearly all of its fields and most of its
blocks, so both are cached by their bytes, for all connections. The cache is exact.

All work for a peer is bounded: the bytes of a block before and after decoding, the number of its
    fields, and the cache.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from extproc.bounded import Memo
from extproc.errors import ProtocolError

COMPRESSION_ERROR: Final = 0x9
ENHANCE_YOUR_CALM: Final = 0xB

MAX_BLOCK: Final = 65_536
"""Maximum bytes of a header block and its fields (RFC 9113 6.5.2); Envoy accepts 60 KiB."""

MAX_FIELDS: Final = 256
"""Maximum number of fields in a block; Envoy accepts 100."""

# Kinds of fields. Pseudo-header fields are bits, to detect repeated ones.
REGULAR: Final = 0
METHOD: Final = 1
SCHEME: Final = 2
PATH: Final = 4
AUTHORITY: Final = 8
_NEEDED: Final = METHOD | SCHEME | PATH
_PSEUDO: Final = _NEEDED | AUTHORITY
CONTENT_LENGTH: Final = 16
CONTENT_TYPE: Final = 32
TE: Final = 64
MALFORMED: Final = 128

_KINDS: Final = {
    b":method": METHOD,
    b":scheme": SCHEME,
    b":path": PATH,
    b":authority": AUTHORITY,
    b"content-length": CONTENT_LENGTH,
    b"content-type": CONTENT_TYPE,
    b"te": TE,
}
_CONNECTION_FIELDS: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)
_LENGTH_DIGITS: Final = 18

_TABLE_SIZE: Final = 4_096
_ENTRY_OVERHEAD: Final = 32
"""Bytes that RFC 7541 section 4.1 adds to a field."""

_OBJECTS: Final = 300
"""Memory of a field or block, in addition to its bytes."""

_MAX_UPDATES: Final = 2
"""Maximum table size updates at a block's start: the smallest, the last (RFC 7541 4.2)."""

_INTEGER_BITS: Final = 28

# The first bits of a field (RFC 7541 section 6).
_INDEXED: Final = 0x80
_INDEXING: Final = 0x40
_TABLE_SIZE_UPDATE: Final = 0x20
_TABLE_SIZE_MASK: Final = 0xE0
_HUFFMAN: Final = 0x80


class Field:
    """One header field.

    Attributes:
        name: lower-case unless it is malformed.
        value: the field's value.
        size: in bytes, counted as in RFC 7541 section 4.1.
        kind: the kind of field.
        encoded: its bytes in a block if it is a literal without references, else empty.
    """

    def __init__(self, name: bytes, value: bytes) -> None:
        self.name = name
        self.value = value
        self.size = len(name) + len(value) + _ENTRY_OVERHEAD
        self.encoded = b""
        self.kind = classify(name, value)


def classify(name: bytes, value: bytes) -> int:
    """A field's kind; MALFORMED if no request may have it (RFC 9113 sections 8.2 and 8.3)."""
    kind = classify_name(name)
    # CR, LF, NUL; compiled code reads literals fastest
    if 13 in value or 10 in value or 0 in value:  # noqa: PLR2004
        return MALFORMED
    if kind == REGULAR:
        return REGULAR
    if kind == TE:
        return REGULAR if value.lower() == b"trailers" else MALFORMED
    if kind == CONTENT_LENGTH:
        return kind if value.isdigit() and len(value) <= _LENGTH_DIGITS else MALFORMED
    return MALFORMED if kind & _NEEDED and not value else kind


def classify_name(name: bytes) -> int:
    """The kind of fields with that name."""
    kind = _KINDS.get(name, REGULAR)
    if (
        not name
        or name != name.lower()
        or (name.startswith(b":") and not kind)
        or name in _CONNECTION_FIELDS
    ):
        return MALFORMED
    return kind


class Block:
    """A header block, read as a request (RFC 9113 section 8.3).

    Attributes:
        fields: in order; do not modify.
        malformed: whether it is not a request; it may be trailers.
        method: the request's method; the other pseudo-header fields likewise.
        path: as the peer sent it.
        content_type: empty if missing.
        content_length: -1 if missing.
        size: the size of all fields.
    """

    def __init__(self, fields: list[Field], size: int, like: Block | None = None) -> None:
        self.fields = fields
        self.size = size
        self.method = self.path = self.content_type = b""
        self.content_length = -1
        if like is None:
            self.malformed = not self._read()
            return
        self.method, self.path, self.content_type = like.method, like.path, like.content_type
        self.content_length, self.malformed = like.content_length, like.malformed

    def _read(self) -> bool:
        seen, regular = 0, False
        for field in self.fields:
            kind = field.kind
            if kind == MALFORMED:
                return False
            if kind & _PSEUDO:
                if regular or seen & kind:
                    return False
                seen |= kind
                if kind == METHOD:
                    self.method = field.value
                elif kind == PATH:
                    self.path = field.value
                continue
            regular = True
            if kind == CONTENT_TYPE:
                self.content_type = field.value
            elif kind == CONTENT_LENGTH and not self._read_length(int(field.value)):
                return False
        needed = AUTHORITY if self.method == b"CONNECT" else _NEEDED
        return seen & needed == needed

    def _read_length(self, length: int) -> bool:
        """Set the content-length; returns False if it contradicts an earlier one."""
        before, self.content_length = self.content_length, length
        return before in (-1, length)


class _Model:
    """A block without references in which a single field was new.

    Traced requests differ in just one field.

    Attributes:
        start: the bytes before the new field.
        end: the bytes after it.
        place: its position among all fields.
        block: the whole block.
        size: the size of the other fields, counted as in RFC 7541 section 4.1.
        plain: whether the new field is an ordinary header.
    """

    def __init__(self, start: bytes, end: bytes, place: int, block: Block) -> None:
        self.start = start
        self.end = end
        self.place = place
        self.block = block
        self.size = block.size - block.fields[place].size
        self.plain = block.fields[place].kind == REGULAR


class Cache:
    """Names, fields and blocks of all connections by encoded bytes; at most `limit` bytes each.

    Without it, decoding the headers of a stream takes ten times as long, 1 us of CPU.

    Attributes:
        names: names of fields.
        fields: fields that are literals without references.
        blocks: blocks of such fields.
        before: the fields of the last block that was not cached.
        model: the last such block with a single new field.
    """

    def __init__(self, limit: int = 2**20) -> None:
        self.names: Memo[bytes, bytes] = Memo(limit // 2, _measure_name)
        self.fields: Memo[bytes, Field] = Memo(limit // 2, _measure_field)
        self.blocks: Memo[bytes, Block] = Memo(limit // 2, _measure_block)
        self.before: list[Field] = []
        self.model: _Model | None = None


def _measure_name(encoded: bytes, name: bytes) -> int:
    return len(encoded) + len(name) + _OBJECTS


def _measure_field(encoded: bytes, field: Field) -> int:
    return len(encoded) + field.size + _OBJECTS


def _measure_block(encoded: bytes, block: Block) -> int:
    return len(encoded) + block.size + _OBJECTS * (len(block.fields) + 1)


class Decoder:
    """The receiving end of one connection's header compression.

    Attributes:
        news: number of new fields in the last block, and of tables that it enlarged; if 0, the
            block is cached.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._table: list[Field] = []  # newest first
        self._used = 0
        self._limit = _TABLE_SIZE
        self._allowed = _TABLE_SIZE
        self.news = 0

    def forbid_table(self) -> None:
        """Forbid a dynamic table: the peer has acknowledged a size of 0."""
        self._allowed = 0

    def decode(self, encoded: bytes) -> Block:
        """Decode a block; raises ProtocolError with HTTP/2's code."""
        self.news = 0
        stateless = not self._limit
        if stateless:
            known = self._cache.blocks.get(encoded)
            if known is not None:
                return known
        try:
            block = (self._adapt(encoded) if stateless else None) or self._walk(encoded)
        except IndexError:
            raise ProtocolError("header block: it ends too early", code=COMPRESSION_ERROR) from None
        if stateless and not self.news:
            self._cache.blocks.put(encoded, block)
        return block

    def _adapt(self, block: bytes) -> Block | None:
        """Decode a block that differs from the model in one literal; None for any other block."""
        model = self._cache.model
        if model is None or not (
            block.startswith(model.start) and block.endswith(model.end, len(model.start))
        ):
            return None
        encoded = block[len(model.start) : len(block) - len(model.end)]
        first = encoded[0] if encoded else _INDEXED
        if first >= _INDEXED or first & _TABLE_SIZE_MASK == _TABLE_SIZE_UPDATE:
            return None
        try:
            index, position = read_integer(encoded, 0, 0x3F if first >= _INDEXING else 0x0F)
            middle = position if index else skip_string(encoded, position)
            if skip_string(encoded, middle) != len(encoded):
                return None
        except IndexError:
            return None
        field = self._find_literal(encoded, model.place) or self._read_literal(
            encoded, index, middle
        )
        if model.size + field.size > MAX_BLOCK:
            return None
        fields = model.block.fields.copy()
        fields[model.place] = field
        self._cache.before = fields
        return Block(
            fields,
            model.size + field.size,
            model.block if model.plain and field.kind == REGULAR else None,
        )

    def _walk(self, block: bytes) -> Block:
        position = self._read_updates(block)
        new = new_start = new_end = 0
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
                    raise ProtocolError(
                        "header block: a table size update amid fields", code=COMPRESSION_ERROR
                    )
                index, position = read_integer(
                    block, position, 0x3F if first >= _INDEXING else 0x0F
                )
                middle = position if index else skip_string(block, position)
                position = skip_string(block, middle)
                encoded = block[start:position]
                known = self._find_literal(encoded, len(fields))
                if known is None:
                    new, new_start, new_end = len(fields), start, position
                field = known or self._read_literal(encoded, index, middle - start)
                if first >= _INDEXING and self._limit:
                    self._used += field.size
                    self._table.insert(0, field)
                    self._evict()
            fields.append(field)
            size += field.size
            if size > MAX_BLOCK or len(fields) > MAX_FIELDS:
                raise ProtocolError("header block: too many fields", code=ENHANCE_YOUR_CALM)
        self._cache.before = fields
        found = Block(fields, size)
        if self.news == 1 and not self._limit and new_end:
            self._cache.model = _Model(block[:new_start], block[new_end:], new, found)
        return found

    def _read_updates(self, block: bytes) -> int:
        """Apply table size updates at the block's start; returns the first field's position."""
        position = updates = 0
        while position < len(block) and block[position] & _TABLE_SIZE_MASK == _TABLE_SIZE_UPDATE:
            size, position = read_integer(block, position, 0x1F)
            updates += 1
            if size > self._allowed or updates > _MAX_UPDATES:
                raise ProtocolError(
                    "header block: a table larger than allowed", code=COMPRESSION_ERROR
                )
            self._limit = size
            self.news += size > 0
            self._evict()
        return position

    def _find_literal(self, encoded: bytes, place: int) -> Field | None:
        """A cached literal field; most often it has the same position in the previous block."""
        before = self._cache.before
        if place < len(before) and before[place].encoded == encoded:
            return before[place]
        return self._cache.fields.get(encoded)

    def _read_literal(self, encoded: bytes, index: int, middle: int) -> Field:
        """Read a new literal field: its name at `index`, or spelled out, and its value."""
        self.news += 1
        name = self._find(index).name if index else self._read_name(encoded[1:middle])
        field = Field(name, read_string(encoded[middle:]))
        if index < len(_STATIC):
            field.encoded = encoded
            self._cache.fields.put(encoded, field)
        return field

    def _read_name(self, encoded: bytes) -> bytes:
        name = self._cache.names.get(encoded)
        if name is None:
            name = read_string(encoded)
            self._cache.names.put(encoded, name)
        return name

    def _find(self, index: int) -> Field:
        if 0 < index < len(_STATIC):
            return _STATIC[index]
        entry = index - len(_STATIC)
        if not 0 <= entry < len(self._table):
            raise ProtocolError("header block: an unknown index", code=COMPRESSION_ERROR)
        return self._table[entry]

    def _evict(self) -> None:
        while self._used > self._limit:
            self._used -= self._table.pop().size


def read_integer(block: bytes, position: int, mask: int) -> tuple[int, int]:
    """Read an integer (RFC 7541 section 5.1) whose prefix is `mask`; returns it and its end.

    Raises:
        IndexError: it is cut off.
        ProtocolError: it is larger than any valid value.
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
        if byte < 0x80:  # noqa: PLR2004  # 7 bits per byte
            return value, position
        shift += 7
        if shift > _INTEGER_BITS:
            raise ProtocolError("header block: an integer too large", code=COMPRESSION_ERROR)


def skip_string(block: bytes, position: int) -> int:
    """The end of the string at `position`.

    Raises:
        IndexError: it is cut off.
        ProtocolError: its length is larger than any valid value.
    """
    length, start = read_integer(block, position, 0x7F)
    if start + length > len(block):
        raise IndexError
    return start + length


def read_string(encoded: bytes) -> bytes:
    """Decode a string (RFC 7541 section 5.2); raises ProtocolError for malformed Huffman code."""
    _, start = read_integer(encoded, 0, 0x7F)
    text = encoded[start:]
    return decode_huffman(text) if encoded[0] >= _HUFFMAN else text


def decode_huffman(data: bytes) -> bytes:
    """Decode a string in HPACK's Huffman code (RFC 7541 section 5.2).

    Raises:
        ProtocolError: it contains the end-of-string symbol, or its padding is wrong.
    """
    out: list[str] = []  # joining strings takes a third of the time of joining bytes
    window, have = 0, 0  # the last bytes, and the number of bits to decode
    for place in range(len(data)):  # compiled, faster than an iterator
        window = (window << 8 | data[place]) & _WINDOW
        have += 8
        while have >= _GLANCE:
            index = window >> have - _GLANCE & _GLANCE_MASK
            length = _GLANCE_LENGTHS[index]
            if length:
                out.append(_GLANCE_TEXTS[index])
            else:
                length, symbol = _find_symbol(window, have)
                if not length:
                    break
                out.append(symbol)
            have -= length
    while have:
        length, text = _take_last(window, have)
        if not length:
            break
        out.append(text)
        have -= length
    padding = (1 << have) - 1
    if have > 7 or window & padding != padding:  # noqa: PLR2004  # less than a byte
        raise ProtocolError("header block: Huffman padding", code=COMPRESSION_ERROR)
    return "".join(out).encode("latin-1")


def _take_last(window: int, have: int) -> tuple[int, str]:
    """Like `_find_symbol` at the end, padded with ones; returns two symbols if they are short."""
    if have < _GLANCE:
        index = (window + 1 << _GLANCE - have) - 1 & _GLANCE_MASK
        length = _GLANCE_LENGTHS[index]
        if length <= have:
            return length, _GLANCE_TEXTS[index]
    return _find_symbol(window, have)


def _find_symbol(window: int, have: int) -> tuple[int, str]:
    """The length and symbol of the first code in these bits; length 0 if more bits are needed."""
    more = _LONGEST - have
    bits = (window << more if more > 0 else window >> -more) & (1 << _LONGEST) - 1
    group = bisect_right(_FIRST_CODES, bits) - 1
    length = _GROUP_LENGTHS[group]
    if length > have:
        return 0, ""
    symbol = _SYMBOLS[_GROUP_STARTS[group] + (bits - _FIRST_CODES[group] >> _LONGEST - length)]
    if symbol == _END_OF_STRING:
        raise ProtocolError("header block: end of string within one", code=COMPRESSION_ERROR)
    return length, chr(symbol)


# The Huffman code (RFC 7541 appendix B) is canonical, so the lengths define the codes.
# One letter each; "a" is 5 bits.
_CODE_LENGTHS: Final = [
    letter - ord("a") + 5
    for letter in b"isxxxxxxxtzxxzxxxxxxxxzxxxxxxxxxbffhibdgffdgdbbbaaabbbbbbbcdkbhfibcccccc"
    b"ccccccccccccccccdcdioijbkabababbbaccbbbabcbaabccccckgjixprpprrrsrsssssts"
    b"ttrstssssqrsrsstrqprrssqsrrtqrssqqrqsrssprrrsrrsvvporsruvvvwwvtuoqvwwvwt"
    b"qqvvxwwwptpqrqqsrruuttvsvwvvwwwwwxwwwwwvz"
]
_LONGEST: Final = 30
_WINDOW: Final = 2 ** (_LONGEST + 8) - 1
_END_OF_STRING: Final = 256
_SYMBOLS: Final = sorted(range(257), key=lambda symbol: (_CODE_LENGTHS[symbol], symbol))
_GROUP_LENGTHS: Final = sorted(set(_CODE_LENGTHS))
# The position of each length's first symbol
_GROUP_STARTS: Final = [
    sum(length < shortest for length in _CODE_LENGTHS) for shortest in _GROUP_LENGTHS
]
# Each length's first code, padded with zeros
_FIRST_CODES: Final = [
    0,
    *accumulate(_CODE_LENGTHS.count(length) << _LONGEST - length for length in _GROUP_LENGTHS[:-1]),
]
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


_GLANCE: Final = 12
"""Number of bits to decode at a time: two symbols of usual text."""

_GLANCE_MASK: Final = 2**_GLANCE - 1


def _glance(bits: int) -> tuple[int, str]:
    """Decode up to two symbols; returns the number of their bits and the symbols."""
    first, text = _find_symbol(bits, _GLANCE)
    if not first:
        return 0, ""
    second, more = _find_symbol(bits, _GLANCE - first)
    return first + second, text + more


_GLANCES: Final = [_glance(bits) for bits in range(2**_GLANCE)]
_GLANCE_LENGTHS: Final = [length for length, _ in _GLANCES]
_GLANCE_TEXTS: Final = [text for _, text in _GLANCES]


def _read_static() -> list[Field]:
    """The static table (RFC 7541 appendix A); indexes begin at 1."""
    found = [Field(b"", b"")]
    for line in _STATIC_TABLE.split(b"\n")[1:-1]:
        name, _, value = line[1:].partition(b":")
        found.append(Field(line[:1] + name, value.strip()))
    return found


_STATIC: Final = _read_static()


def encode(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Encode headers as literals without indexing (RFC 7541 6.2.2), for every connection."""
    return b"".join(
        b"\0" + _encode_length(len(name)) + name + _encode_length(len(value)) + value
        for name, value in headers
    )


def _encode_length(value: int) -> bytes:
    """Encode a string length: an integer with a prefix of 7 bits (RFC 7541 section 5.1)."""
    if value < 127:  # noqa: PLR2004  # the largest value of the prefix
        return bytes((value,))
    value -= 127
    made = bytearray((127,))
    while value >= 128:  # noqa: PLR2004  # 7 bits per byte
        made.append(value & 127 | 128)
        value >>= 7
    made.append(value)
    return bytes(made)
