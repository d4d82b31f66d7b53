"""A request body as JSON, decoded lazily and once for all detectors and descriptors.

Decoding takes bounded time for any body. A body that exceeds a bound (`inspect_limit`) or is not
JSON (`not_json`) is not inspected. Both are exceptions with the reason why the request is not
counted.

Numbers are compared by their exact value: `1`, `1.0` and `1e0` are equal, and integers keep all
digits. If a key is repeated in an object, the last one wins, as in most parsers (RFC 8259 section 4
leaves it open).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import msgspec

from extproc.request.http import write_claim

MAX_CONTAINERS: Final = 100_000
"""Maximum number of `[` and `{` in a body to inspect. Decoding this many takes 10 to 20 ms, and so
does copying them."""

MAX_MEMBERS: Final = 50_000
"""Maximum number of object members in a body that is decoded as a whole. Sorting them takes longer
than decoding."""

WORTH_COUNTING: Final = 256 * 2**10
"""Shorter bodies, in bytes, are not checked: they hardly exceed the bounds, and counting takes half
as long as decoding."""

UNITS: Final = 50_000
"""Units that one reader may use for a body. A unit is about 0.4 microseconds of work, so all of
them take about 20 ms."""

STEP: Final = 10
"""Units for a message or a part of one, and for a number with a fraction to normalize."""

MAX_STEPS: Final = UNITS // STEP
"""Maximum number of messages in a conversation that is read message by message."""

MAX_VALUES: Final = 250_000
"""Maximum number of commas outside of strings in a body to inspect, which bounds the small values
in its lists."""

_MAX_TEXTS: Final = 100_000
"""Maximum number of strings with commas in a body whose values are counted."""

_PIECE: Final = 65_536
"""Bytes of a body to search at once. With this size, removing rare bytes takes a quarter of the
time of counting them."""

_OTHERS: Final = bytes([byte for byte in range(256) if byte not in b'",'])
"""All bytes except quotes and commas."""

MAX_WIDE: Final = 20_000
"""Maximum number of object members that Loopguard itself sorts in one value; sorting them takes 10
ms."""

_MANY_MEMBERS: Final = 256
"""Loopguard itself sorts the members of larger objects: msgspec's time may grow with the square of
their number."""

_WORTH_CHARGING: Final = 256
_VALUES_PER_UNIT: Final = 4

_SHORT_NUMBER: Final = 32
_LONGEST_WEIGHED: Final = 1_024

MAX_DIGITS: Final = 640
"""Maximum number of digits of an integer in a body. Like most parsers, Loopguard rejects longer
ones."""

_PLACE = re.compile(r"(?:0|[1-9][0-9]{0,8})\Z")  # of an array's element (RFC 6901 section 4)
_NUMBER = re.compile(r"(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?\Z")

Json: TypeAlias = Any
"""A decoded value: dict, list, str, int, bool, None, or Raw for a number with a fraction or an
exponent."""

ABSENT: Final = msgspec.Raw()
"""A missing raw value."""

_NESTING: Final = frozenset((dict, list))
_MISSING: Final[Json] = object()


NO_MESSAGES: Final = "no_messages"
"""The reason for a body whose messages have no API's format."""

NO_HISTORY: Final = frozenset({NO_MESSAGES, "no_history"})
"""Reasons that mean that a body contains no conversation."""


def limit_integers() -> None:
    """Reject longer integers in this process: parsing them takes quadratic time."""
    sys.set_int_max_str_digits(MAX_DIGITS)


class NotCounted(Exception):  # not an error: the request continues uncounted
    """The request is not counted.

    Attributes:
        reason: as in `uncounted_total`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def renew(self) -> NotCounted:
        """A copy to store or raise again.

        A raised exception refers to all frames that it passed, and so to the body.
        """
        return NotJson() if isinstance(self, NotJson) else NotCounted(self.reason)


class NotJson(NotCounted):
    """The body is not JSON."""

    def __init__(self) -> None:
        super().__init__("not_json")


class Inspection:
    """The remaining units of a reader. Each reader begins with all units.

    Content that another reader has read is cached, but costs the same. So no result depends on
    other readers: a shadow policy neither uses up an enforcing policy's units nor is affected by
    them.

    Attributes:
        left: remaining units.
    """

    def __init__(self) -> None:
        self.left = 0

    def begin(self) -> None:
        """Begin to read, with all units."""
        self.left = UNITS

    def recall(self) -> int:
        """Begin to reread what is already charged; returns the units to restore afterwards."""
        left, self.left = self.left, UNITS
        return left

    def take(self, units: int) -> None:
        """Charge units.

        Raises:
            NotCounted: not enough are left.
        """
        self.left -= units
        if self.left < 0:
            raise NotCounted("inspect_limit")


INSPECTION: Final = Inspection()
"""The current reader's units. Only one thread inspects bodies, one reader at a time. `Document` and
`open_conversation` reset it, so no body is read without it."""


def walk(count: int) -> None:
    """Charge this many messages or parts of messages; raises NotCounted if there are too many."""
    INSPECTION.take(count * STEP)


def charge(text: bytes | msgspec.Raw) -> None:
    """Charge JSON that is decoded from a string in a body, which `check_containers` does not count.

    Raises:
        NotCounted: not enough units are left.
    """
    if len(text) > _WORTH_CHARGING:
        written = bytes(text)
        INSPECTION.take(written.count(b",") // _VALUES_PER_UNIT + written.count(b"{"))


def hook_number(text: str) -> msgspec.Raw:
    """The `float_hook` of decoders: normalize a number with a fraction or an exponent.

    Raises:
        NotCounted: there are too many. A long one counts as several.
    """
    INSPECTION.take(STEP + STEP * (min(len(text), _LONGEST_WEIGHED) // _SHORT_NUMBER))
    return write_number(text)


_decode: Final = msgspec.json.Decoder(float_hook=hook_number).decode
_encode: Final = msgspec.json.Encoder(order="sorted").encode


# An escaped, unpaired surrogate (RFC 8259, section 8.2). Cutting a string in JavaScript may leave
# one, and most parsers accept it. The pattern starts with a literal, which the engine finds fast.
_HALF = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|[c-fC-F](?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD].)[0-9a-fA-F]{2})"
)
_MOST_HALVES: Final = 2_000
"""Maximum number of halves to replace in one body."""

_MOST_ESCAPED: Final = 256
"""Maximum number of backslashes to count before a half."""

_FIRST_HALF: Final = 8
"""Halves are U+D800 to U+DFFF; they become U+E000 to U+E7FF."""


def mend(data: bytes | memoryview | msgspec.Raw | str) -> bytes | None:
    """Replace unpaired surrogates in JSON by private characters of equal length; None if none."""
    raw = data.encode() if isinstance(data, str) else bytes(data)
    mended = _HALF.sub(_mend_half, raw, _MOST_HALVES)
    return None if mended == raw else mended


def _mend_half(found: re.Match[bytes]) -> bytes:
    half, start = found.group(), found.start()
    before = found.string[max(0, start - _MOST_ESCAPED) : start]
    if (len(before) - len(before.rstrip(b"\\"))) % 2:  # the backslash itself is escaped
        return half
    return rb"\ue%x" % (int(half[3:4], 16) - _FIRST_HALF) + half[4:]


class Document:
    """A body to inspect.

    A detector's input never depends on what other detectors read, so a shadow policy cannot change
    what an enforcing one sees: even if the whole body cannot be decoded or is too large, a
    requested part is still decoded.

    Attributes:
        conversation: the result of `open_conversation`, or its exception.
        shortened: older messages were left out.
        prefills: an assistant message at the end is the start of the answer; see `Endpoint`.
    """

    def __init__(self, data: bytes | memoryview, *, shortened: bool = False) -> None:
        self._data = data if isinstance(data, bytes) else data.tobytes()
        self._value: Json = _MISSING  # or the exception that decoding raised
        self._fits: bool | None = len(self._data) <= WORTH_COUNTING or None
        self.conversation: Any = None
        self.shortened = shortened
        self.prefills = False

    def __len__(self) -> int:
        """The body's length in bytes."""
        return len(self._data)

    def __bytes__(self) -> bytes:
        """The body as received."""
        return self._data

    def value(self) -> Json:
        """The whole body, decoded.

        Raises:
            NotCounted: it is not JSON, or too large.
        """
        if self._value is _MISSING:
            self._value = self._decode()
        if isinstance(self._value, NotCounted):
            raise self._value.renew()
        return self._value

    def may_be_json(self) -> bool:
        """Whether it begins like an object or an array.

        Another parser may accept it even if msgspec does not.
        """
        return self._data.lstrip()[:1] in (b"{", b"[")

    def data(self) -> bytes:
        """The raw body, for readers that do not decode all of it; each begins with all units.

        Raises:
            NotCounted: it contains too many objects, arrays or values.
        """
        INSPECTION.begin()
        if self._fits is None:
            self._fits = not holds_many(self._data)
        if not self._fits:
            raise NotCounted("inspect_limit")
        return self._data

    def _decode(self) -> Json:
        """The value, or the NotCounted that decoding raises."""
        left = INSPECTION.left
        try:  # separate units, because one reader decodes the value for all
            data = self.data()
            check_members(data)
            return decode_json(data)
        except NotCounted as failure:
            return failure.renew()
        finally:
            INSPECTION.left = left


def check_containers(data: bytes | memoryview | str) -> None:
    """Check the number of objects, arrays and values in JSON.

    Raises:
        NotCounted: there are too many.
    """
    if len(data) > WORTH_COUNTING and holds_many(
        data.encode() if isinstance(data, str) else bytes(data)
    ):
        raise NotCounted("inspect_limit")


def holds_many(data: bytes) -> bool:
    """Whether JSON has over MAX_CONTAINERS objects and arrays, or MAX_VALUES commas."""
    containers = commas = 0
    for start in range(0, len(data), _PIECE):
        piece = data[start : start + _PIECE]
        size = len(piece)
        containers += 2 * size - len(piece.replace(b"[", b"")) - len(piece.replace(b"{", b""))
        if containers > MAX_CONTAINERS:
            return True
        if commas <= MAX_VALUES:
            commas += size - len(piece.replace(b",", b""))
    if commas <= MAX_VALUES:
        return False
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # from left to right, as parsers do
    marks = data.translate(None, _OTHERS).replace(b'""', b"")
    if marks.count(b'"') > 2 * _MAX_TEXTS:
        return True
    return sum([outside.count(b",") for outside in marks.split(b'"')[::2]]) > MAX_VALUES


def check_members(data: bytes) -> None:
    """Check the number of object members in JSON.

    Raises:
        NotCounted: there are too many.
    """
    least = 2 * MAX_MEMBERS  # each has at least two quotes and a colon
    if len(data) > least and data.count(b":") > MAX_MEMBERS and data.count(b'"') > least:
        packed = data.translate(None, b" \t\r\n").replace(rb"\\", b"")
        # A key with an escaped quote is in a string
        if packed.count(b'":') - packed.count(rb"\":") > MAX_MEMBERS:
            raise NotCounted("inspect_limit")


def decode_json(data: bytes | memoryview | msgspec.Raw | str, decode: Any = _decode) -> Json:  # noqa: ANN401  # msgspec's own
    """Decode JSON.

    Raises:
        NotCounted: it is not JSON, is nested hundreds of levels deep, has numbers of hundreds of
            digits, or is too large.
        msgspec.ValidationError: its types are not those that `decode` expects.
    """
    try:
        return _decode_strictly(data, decode)
    except NotJson:
        mended = mend(data)
        if mended is None:
            raise
    return _decode_strictly(mended, decode)


def _decode_strictly(data: bytes | memoryview | msgspec.Raw | str, decode: Any) -> Json:  # noqa: ANN401  # msgspec's own
    try:
        return decode(data)
    except msgspec.ValidationError:
        if decode is _decode:  # an integer with more digits than Python accepts
            raise NotJson from None
        raise
    except (ValueError, RecursionError):  # errors of msgspec and Unicode are ValueErrors
        raise NotJson from None


def open_value(value: Json) -> Json:
    """Decode a raw value; any other value is unchanged."""
    if type(value) is not msgspec.Raw:
        return value
    return None if value is ABSENT else decode_json(value)


def write_canonical(value: Json, ignore: Sequence[Sequence[str]] = ()) -> bytes:
    """The canonical JSON of a value, without the parts that `ignore` (split pointers) names.

    Equal bytes mean equal values.

    Raises:
        NotCounted: it is nested too deeply, contains a raw value that is not UTF-8, or has objects
            with too many members.
    """
    for pointer in ignore:
        value = remove_at(value, pointer)
    try:
        found = _list_wide(value) if type(value) in _NESTING else []
        if sum([len(wide) for wide in found]) > MAX_WIDE:
            raise NotCounted("inspect_limit")
        for wide in found:
            members = sorted(wide.items())  # in place: nothing depends on the order of members
            wide.clear()
            wide.update(members)
        written = _encode(value)
        if not written.isascii():
            written.decode()  # msgspec copies raw values without checking them
    except (RecursionError, UnicodeDecodeError):
        # It was decoded on a shallower stack, or not at all
        raise NotJson from None
    return written


def _list_wide(value: Json) -> list[dict[str, Json]]:
    """The objects with very many members in a value, including itself."""
    # Comprehensions, and dict | list, would take five times as long.
    found: list[dict[str, Json]] = []
    left: list[Json] = [value]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            if len(item) > _MANY_MEMBERS:
                found.append(item)
            for inner in item.values():
                if isinstance(inner, (dict, list)):
                    left.append(inner)  # noqa: PERF401
        elif not _NESTING.isdisjoint(map(type, item)):
            for inner in item:
                if isinstance(inner, (dict, list)):
                    left.append(inner)  # noqa: PERF401
    return found


def split_pointer(pointer: str) -> list[str]:
    """The steps of a JSON Pointer (RFC 6901), unescaped."""
    return [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]


def remove_at(value: Json, pointer: Sequence[str]) -> Json:
    """A value without the part that the pointer names; a step `*` matches any key or index.

    Only changed containers are copied. Array elements become null, so that others keep their
    indexes.
    """
    step, rest = pointer[0], pointer[1:]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if step == "*" and rest and _NESTING.isdisjoint(map(type, inner)):
        return value
    if isinstance(value, dict) and (step == "*" or step in value):
        if rest:
            return value | {
                name: remove_at(value[name], rest) for name in (value if step == "*" else (step,))
            }
        return {} if step == "*" else {name: item for name, item in value.items() if name != step}
    if isinstance(value, list) and step == "*":
        return (
            [remove_at(item, rest) if type(item) in _NESTING else item for item in value]
            if rest
            else [None] * len(value)
        )
    if isinstance(value, list) and _PLACE.match(step) and int(step) < len(value):
        place = int(step)
        return [
            *value[:place],
            remove_at(value[place], rest) if rest else None,
            *value[place + 1 :],
        ]
    return value


def find(value: Json, pointer: Sequence[str]) -> str:
    """The scalar at a pointer, as text; empty if there is none."""
    for step in pointer:
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and _PLACE.match(step) and int(step) < len(value):
            value = value[int(step)]
        else:
            return ""
    return bytes(value).decode() if isinstance(value, msgspec.Raw) else write_claim(value)


def write_number(text: str) -> msgspec.Raw:
    """Normalize a number with fraction or exponent to an integer, or to digits and an exponent.

    >>> [bytes(write_number(text)) for text in ("1.50", "15e-1", "1.0", "-0.0", "1e3", "1e999")]
    [b'15e-1', b'15e-1', b'1', b'0', b'1000', b'1e999']
    """
    sign, whole, fraction, exponent = _NUMBER.match(text).groups(default="")  # type: ignore[union-attr]  # msgspec has checked it
    digits = (whole + fraction).lstrip("0")
    kept = digits.rstrip("0")
    if not kept:
        return msgspec.Raw(b"0")
    try:
        power = int(exponent or 0) - len(fraction) + len(digits) - len(kept)
    except ValueError:  # an exponent with thousands of digits
        raise NotJson from None
    if power >= 0 and len(kept) + power <= MAX_DIGITS:
        return msgspec.Raw(f"{sign}{kept}{'0' * power}".encode())
    return msgspec.Raw(f"{sign}{kept}e{power}".encode())
