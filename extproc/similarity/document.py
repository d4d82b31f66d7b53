"""A request body as JSON: decoded once, however many detectors and descriptors look into it, and not before one does.

Whatever a client sends is taken in bounded time: what is too much of anything is not looked into (`inspect_limit`), what is not
JSON says so (`not_json`), and both are exceptions that name the reason under which a policy does not count the request.

Numbers are compared by their exact value, whatever their spelling: `1`, `1.0` and `1e0` are one number, and integers keep all
of their digits. Of a key that stands twice in an object the last one counts, which is what the parsers of the field do
(RFC 8259 section 4 leaves it open).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import msgspec

from extproc.request import claim_text

MAX_CONTAINERS = 100_000
"""Most `[` and `{` in a body that is looked into: decoding as many takes 25 ms, four times as many would take 80 ms."""

MAX_FRACTIONS = 10_000
"""Most numbers with a fraction or an exponent in one, each of which is brought into one spelling by us."""

MAX_DIGITS = 640
"""Longest integer in one, in digits; a longer one is not JSON to us, nor to most."""

sys.set_int_max_str_digits(MAX_DIGITS)  # reading and writing take time that grows with the square of the digits

_PLACE = re.compile(r"(?:0|[1-9][0-9]{0,8})\Z")  # of an array's element (RFC 6901 section 4)
_NUMBER = re.compile(r"(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?\Z")

Json: TypeAlias = Any
"""A decoded value: dict, list, str, int, bool, None, or Raw, which stands for a number with a fraction or an exponent."""

_MISSING: Json = object()


class NotCounted(Exception):  # says what becomes of the request
    """The request is not counted.

    Attributes:
        reason: why, as `uncounted_total` shows it.
    """

    def __init__(self, reason: str) -> None:
        """Say why."""
        super().__init__(reason)
        self.reason = reason


class NotJson(NotCounted):
    """The body is not JSON, as far as anybody can tell."""

    def __init__(self) -> None:
        """The reason is always the same."""
        super().__init__("not_json")


class Head(msgspec.Struct, gc=False):
    """The keys in which a conversation stands, with its messages left as they are: most of them are never looked at."""

    model: str | None = None
    messages: list[msgspec.Raw] | None = None
    input: list[msgspec.Raw] | str | None = None
    prompt: msgspec.Raw = msgspec.Raw()
    previous_response_id: msgspec.Raw = msgspec.Raw()
    conversation: msgspec.Raw = msgspec.Raw()


class _Fractions:
    """Spells numbers with a fraction or an exponent, so many of them; used by one thread at a time."""

    left = MAX_FRACTIONS

    def spell(self, text: str) -> msgspec.Raw:
        self.left -= 1
        if self.left < 0:
            raise NotCounted("inspect_limit")
        return _spelled(text)


_fractions = _Fractions()
_decode_any = msgspec.json.Decoder(float_hook=_fractions.spell).decode
_decode_head = msgspec.json.Decoder(Head).decode
_encode = msgspec.json.Encoder(order="sorted").encode


class Document:
    """A body that can be looked into.

    What one detector gets never depends on what others asked for, so that a shadow policy cannot change what an enforcing one
    sees: where the whole body cannot be decoded, or holds too much, its head is decoded all the same.
    """

    __slots__ = ("_data", "_failure", "_head", "_value", "_whole")

    def __init__(self, data: bytes | memoryview, *, whole: bool = False) -> None:
        """Nothing is decoded yet; `whole` says that somebody is going to ask for `value`."""
        self._data = data
        self._whole = whole
        self._failure: NotCounted | None = None
        self._head: Head | None = None
        self._value: Json = _MISSING

    def __len__(self) -> int:
        """The body's length in bytes."""
        return len(self._data)

    def value(self) -> Json:
        """The whole body, decoded.

        Raises:
            NotCounted: it is not JSON, or too much of it.
        """
        _fractions.left = MAX_FRACTIONS
        if self._failure is not None:
            raise self._failure
        if self._value is _MISSING:
            try:
                self._check_containers()
                self._value = decoded(self._data)
            except NotCounted as failure:
                self._failure = failure
                raise
        return self._value

    def head(self) -> Head | Json:
        """The body as `Head`, or as `value` does, whichever is at hand.

        Raises:
            NotCounted: as `value`.
        """
        if self._whole and self._failure is None:
            try:
                return self.value()
            except NotCounted:
                pass
        _fractions.left = MAX_FRACTIONS
        if self._head is None:
            try:
                self._check_containers()
                self._head = decoded(self._data, _decode_head)
            except msgspec.ValidationError:  # of other types than a conversation's
                return self.value()
        return self._head

    def _check_containers(self) -> None:
        if len(self._data) > MAX_CONTAINERS:  # a shorter one cannot hold more
            data = bytes(self._data)
            if data.count(b"[") + data.count(b"{") > MAX_CONTAINERS:
                raise NotCounted("inspect_limit")


def decoded(data: bytes | memoryview | msgspec.Raw | str, decode: Any = _decode_any) -> Json:  # noqa: ANN401  # msgspec's own
    """JSON, decoded; a part of a body that has been decoded as a whole shares its bounds.

    Raises:
        NotCounted: it is not JSON (also: nested hundreds of levels deep, numbers of thousands of digits), or too much of it.
        msgspec.ValidationError: its types are not those that `decode` expects.
    """
    try:
        return decode(data)
    except msgspec.ValidationError:
        if decode is _decode_any:  # an integer beyond what Python takes
            raise NotJson from None
        raise
    except (ValueError, RecursionError):  # msgspec's and Unicode's errors are ValueErrors
        raise NotJson from None


def canonical(value: Json, ignore: Sequence[Sequence[str]] = ()) -> bytes:
    """The one spelling of a value, without what the pointers of `ignore` (each as `steps`) name: equal bytes, equal values."""
    for pointer in ignore:
        value = without(value, pointer)
    return _encode(value)


def steps(pointer: str) -> list[str]:
    """The steps of a JSON Pointer (RFC 6901), unescaped."""
    return [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]


def without(value: Json, pointer: Sequence[str]) -> Json:
    """A copy, as far as it has to be one, without what the pointer names; its step `*` stands for any one.

    Array elements are replaced by null, so that the others keep their places.
    """
    step, rest = pointer[0], pointer[1:]
    if isinstance(value, dict):
        if step != "*" and step not in value:
            return value
        if rest:
            return value | {name: without(value[name], rest) for name in (value if step == "*" else (step,))}
        return {} if step == "*" else {name: item for name, item in value.items() if name != step}
    if isinstance(value, list):
        return [
            (without(item, rest) if rest else None) if step in ("*", str(place)) else item for place, item in enumerate(value)
        ]
    return value


def find(value: Json, pointer: Sequence[str]) -> str:
    """The scalar that a pointer leads to, as text; empty where there is none."""
    for step in pointer:
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and _PLACE.match(step) and int(step) < len(value):
            value = value[int(step)]
        else:
            return ""
    return bytes(value).decode() if isinstance(value, msgspec.Raw) else claim_text(value)


@lru_cache(maxsize=4096)
def _spelled(text: str) -> msgspec.Raw:
    """The one spelling of a number that has a fraction or an exponent: an integer's, or digits and an exponent.

    >>> [bytes(_spelled(text)) for text in ("1.50", "15e-1", "1.0", "-0.0", "1e3", "1e999")]
    [b'15e-1', b'15e-1', b'1', b'0', b'1000', b'1e999']
    """
    sign, whole, fraction, exponent = _NUMBER.match(text).groups(default="")  # type: ignore[union-attr]  # msgspec has checked
    digits = (whole + fraction).lstrip("0")
    kept = digits.rstrip("0")
    if not kept:
        return msgspec.Raw(b"0")
    try:
        power = int(exponent or 0) - len(fraction) + len(digits) - len(kept)
    except ValueError:  # an exponent of thousands of digits
        raise NotJson from None
    if power >= 0 and len(kept) + power <= MAX_DIGITS:
        return msgspec.Raw(f"{sign}{kept}{'0' * power}".encode())
    return msgspec.Raw(f"{sign}{kept}e{power}".encode())
