"""What a call is billed by: the model that a request asks for, and the tokens that its answer took.

- Each API has places of its own for the same count. `envoy-config` makes Envoy's rules of them.
- Out of an answer in one document Envoy hands over counts, each by its name.
- Out of a stream it hands over whole objects, as text, each under the place where it stood. Envoy copies its rules for streams
  with each request, and tries each on each event: a rule for each count would take twice as long as a few for objects.
- What stands there was written by a model, or by a client that poses as one: all of it is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

from msgspec import MsgspecError, json

USAGE_NAMESPACE: Final = "loopguard.usage"
"""Where Envoy's filters put what they find."""

MODEL: Final = "model"
"""The name under which they put the model."""

COUNTS: Final = ("input", "output", "cached", "cache_read", "cache_write", "thoughts", "tool_input")
"""What answers count. `input` is all of a prompt, of which `cached` came from a cache. Where an API counts what a cache took
part in beside its `input`, that is `cache_read` and `cache_write`. `thoughts` and `tool_input` are in no other count."""

LONGEST_MODEL: Final = 256
"""Of a name, in characters."""

_LONGEST_ENCODED: Final = 9 * LONGEST_MODEL
"""Before it is decoded: a character takes nine, where it is three bytes of UTF-8."""

_ANYWHERE: Final = ("/models/", "/model/")

_MAX_OBJECT: Final = 8_192
"""Characters; APIs write a tenth of that."""

_decode: Final = json.Decoder(dict[str, Any]).decode

Finder = Callable[[str], str]
"""Takes a path; the model that it names, empty where it names none."""


FINDERS: Final[list[tuple[str, Finder]]] = []
"""Of APIs whose paths name the model: a word that has to be in the path, and what finds the name. Every API adds its own."""


def find_model(path: str, named: str = "") -> str:
    """The model that a request asks for, empty where it does not say.

    Where an API names the model in the path, that is the model which answers, whatever else stands in the body. All others name
    it in the body. Names come as SDKs write them, so that `%3A` is a colon.

    Args:
        path: of the request.
        named: in its body, empty where it names none there, or where the body could not be read.
    """
    for word, find in FINDERS:
        if word in path:
            model = find(path)
            if model:
                return model
    return named[:LONGEST_MODEL] or find_behind(path, *_ANYWHERE)


def find_behind(path: str, *collections: str) -> str:
    """The name in a path that follows one of these words, such as `/models/`."""
    for collection in collections:
        if collection in path:
            return decode_name(path.partition(collection)[2].partition("/")[0].partition(":")[0])
    return ""


def decode_name(name: str) -> str:
    """A name that stands in a path, without its percent signs, and no longer than names are."""
    return unquote(name[:_LONGEST_ENCODED])[:LONGEST_MODEL]


class Counts:
    """Reads the counts that Envoy hands over."""

    def __init__(self, places: Mapping[str, Sequence[str]], objects: Sequence[str]) -> None:
        """Get ready.

        Args:
            places: of each of COUNTS, keys joined by dots.
            objects: of events that hold some of these places, in the order in which a stream tells them.
        """
        self._counts = [(name.encode(), name) for name in places]
        self._objects = [(place.encode(), _find_within(place, places)) for place in objects]

    def read(self, told: Mapping[bytes, object]) -> dict[str, float]:
        """What Envoy has handed over, by the names in COUNTS: any numbers at all."""
        counts: dict[str, float] = {}
        for key, name in self._counts:
            count = told.get(key)
            if isinstance(count, float):
                counts[name] = count
        for key, within in self._objects:
            text = told.get(key)
            if isinstance(text, str) and len(text) <= _MAX_OBJECT:
                _read_object(text, within, counts)
        return counts


def _find_within(place: str, places: Mapping[str, Sequence[str]]) -> list[tuple[str, list[str]]]:
    """The counts of an object, and the keys that lead to each."""
    return [
        (name, inside.removeprefix(f"{place}.").split("."))
        for name, insides in places.items()
        for inside in insides
        if inside.startswith(f"{place}.")
    ]


def _read_object(text: str, within: list[tuple[str, list[str]]], counts: dict[str, float]) -> None:
    """Put an object's counts over those of an earlier one; a text that is no object has none."""
    try:
        found = _decode(text)
    except (MsgspecError, ValueError, RecursionError):
        return
    for name, keys in within:
        count = _find_count(found, keys)
        if count is not None:
            counts[name] = count


def _find_count(found: object, keys: list[str]) -> float | None:
    for key in keys:
        if not isinstance(found, dict):
            return None
        found = found.get(key)
    return _parse_count(found)


def _parse_count(value: object) -> float | None:
    """A number as Envoy makes one of a value: out of text as well."""
    try:
        return float(value) if isinstance(value, (int, float, str)) else None
    except (ValueError, OverflowError):
        return None
