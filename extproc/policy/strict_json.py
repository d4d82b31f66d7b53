"""JSON by RFC 8259, stricter than Python's parser.

NaN is an error, and repeated keys are reported.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, NoReturn

from extproc.objects import Place


class NotJsonError(ValueError):
    """The bytes are not JSON that a policy file may contain; the message says why."""


class Decoded(NamedTuple):
    """A document and its repeated keys.

    Attributes:
        document: the document; the last value of a repeated key wins, as in most parsers.
        repeated: the place of every repeated key, in document order.
    """

    document: Any
    repeated: list[Place]


def decode(data: bytes) -> Decoded:
    """Decode a JSON document in UTF-8, with or without a byte order mark.

    Raises NotJsonError if it is invalid.
    """
    repeating: list[_Repeating] = []
    build = partial(_build_object, repeating)
    try:
        document = json.loads(
            data.decode("utf-8-sig"), object_pairs_hook=build, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise NotJsonError(_explain(error)) from None
    return Decoded(document, list(_find_repeated(document)) if repeating else [])


def write_pointer(place: Place) -> str:
    """Write a place as a JSON Pointer (RFC 6901)."""
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in place)


class _Repeating(dict[str, Any]):
    repeated: tuple[str, ...] = ()


def _build_object(repeating: list[_Repeating], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    marked = _Repeating(made)
    marked.repeated = tuple(
        name for name, times in Counter(name for name, _ in pairs).items() if times > 1
    )
    repeating.append(marked)
    return marked


def _refuse_constant(constant: str) -> NoReturn:
    raise NotJsonError(f"is not JSON: {constant} is not a JSON number")


def _explain(error: ValueError | RecursionError) -> str:
    match error:
        case UnicodeDecodeError():
            return f"is not UTF-8 (byte {error.start})"
        case json.JSONDecodeError():
            return f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        case NotJsonError():
            return str(error)
        case RecursionError():
            return "is nested too deeply to be a policy file"
    return "has a number with thousands of digits"  # int() limits their number


def _find_repeated(document: Any) -> Iterator[Place]:  # noqa: ANN401  # raw JSON
    """Find repeated keys in document order.

    This does not recurse: the parser allows more depth than Python.
    """
    waiting: list[tuple[Place, Any]] = [((), document)]
    while waiting:
        place, value = waiting.pop()
        for name in value.repeated if isinstance(value, _Repeating) else ():
            yield (*place, name)
        listed = enumerate(value) if isinstance(value, list) else ()
        items: Iterable[tuple[str | int, Any]] = (
            value.items() if isinstance(value, dict) else listed
        )
        waiting += reversed([((*place, step), item) for step, item in items])
