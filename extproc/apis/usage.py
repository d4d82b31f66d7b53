"""What determines a call's cost: the request's model, and the token counts of the response.

- Each API has its own places for the same count. `envoy-config` turns them into rules for Envoy.
- If the response is one document, Envoy passes single counts by name.
- From a stream, it passes whole objects as text, by their place. Envoy copies its rules for streams
  with each request, and tries each on each event: a rule for each count would take twice as long as
  a few for objects.
- The values come from a model, or from a client that poses as one, so everything is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

from msgspec import MsgspecError, json

USAGE_NAMESPACE: Final = "loopguard.usage"
"""Metadata namespace of Envoy's filters."""

MODEL: Final = "model"
"""The model's key in this namespace."""

GATEWAY_NAMESPACE: Final = "io.envoy.ai_gateway"
"""Metadata namespace of Envoy AI Gateway, which also reads token counts in answers."""

GATEWAY_MODEL: Final = "model_name_override"
"""The model's key in that namespace."""

_GATEWAY_COUNTS: Final = {
    b"llm_input_token": "input",
    b"llm_output_token": "output",
    b"llm_cached_input_token": "cached",
    b"llm_cache_creation_input_token": "cache_write",
}
"""Its keys, as documented. The input includes all other counts of the prompt; the output includes
thoughts."""

COUNTS: Final = ("input", "output", "cached", "cache_read", "cache_write", "thoughts", "tool_input")
"""Names of counts. `input` is the whole prompt, including `cached` tokens. APIs that exclude cached
tokens from their `input` report them as `cache_read` and `cache_write`. `thoughts` and `tool_input`
are not part of other counts."""

LONGEST_MODEL: Final = 256
"""Maximum length of a model's name, in characters."""

_LONGEST_ENCODED: Final = 9 * LONGEST_MODEL
"""Maximum length before decoding: a character of three UTF-8 bytes takes nine characters."""

_ANYWHERE: Final = ("/models/", "/model/")

_MAX_OBJECT: Final = 8_192
"""Maximum length in characters; APIs write a tenth of that."""

_decode: Final = json.Decoder(dict[str, Any]).decode

Finder = Callable[[str], str]
"""Returns the model in a path; empty if there is none."""


FINDERS: Final[list[tuple[str, Finder]]] = []
"""For APIs whose paths name the model: a word in such paths, and the function. Each API adds its
own."""


def find_model(path: str, named: str = "") -> str:
    """The model of a request; empty if unknown.

    If the path names a model, that model answers, whatever the body says. Otherwise the body names
    it. Paths are decoded, because SDKs write `%3A` for a colon.

    Args:
        path: the request's path.
        named: the model in the body; empty if it has none or is unreadable.
    """
    for word, find in FINDERS:
        if word in path:
            model = find(path)
            if model:
                return model
    return named[:LONGEST_MODEL] or find_behind(path, *_ANYWHERE)


def find_behind(path: str, *collections: str) -> str:
    """The name after one of these words in a path, such as `/models/`."""
    for collection in collections:
        if collection in path:
            return decode_name(path.partition(collection)[2].partition("/")[0].partition(":")[0])
    return ""


def decode_name(name: str) -> str:
    """Decode a name from a path, and cut it to LONGEST_MODEL."""
    return unquote(name[:_LONGEST_ENCODED])[:LONGEST_MODEL]


class Counts:
    """Reads the counts that Envoy passes."""

    def __init__(self, places: Mapping[str, Sequence[str]], objects: Sequence[str]) -> None:
        """Prepare to read.

        Args:
            places: keys joined by dots, for each of COUNTS.
            objects: objects in events that contain some of these places, in the stream's order.
        """
        self._counts = {name.encode(): name for name in places}
        self._objects = [(place.encode(), _find_within(place, places)) for place in objects]

    def read(self, told: dict[bytes, object]) -> dict[str, float]:
        """The counts that Envoy passed, by the names in COUNTS; their values are unchecked."""
        counts: dict[str, float] = {}
        for key, count in told.items():
            if isinstance(count, float) and key in self._counts:
                counts[self._counts[key]] = count
        for key, within in self._objects:
            text = told.get(key)
            if isinstance(text, str) and len(text) <= _MAX_OBJECT:
                _read_object(text, within, counts)
        return counts


def read_gateway_counts(told: dict[bytes, object]) -> dict[str, float]:
    """The counts of Envoy AI Gateway, by the names in COUNTS; empty if it reports only zeros."""
    counts: dict[str, float] = {}
    for key, name in _GATEWAY_COUNTS.items():
        count = told.get(key)
        if isinstance(count, float):
            counts[name] = count
    if not (counts.get("input") or counts.get("output")):
        return {}
    if "input" in counts:
        counts["input"] -= counts.get("cache_write", 0.0)
    return counts


def _find_within(place: str, places: Mapping[str, Sequence[str]]) -> list[tuple[str, list[str]]]:
    """The counts in an object, and the keys that lead to each."""
    return [
        (name, inside.removeprefix(f"{place}.").split("."))
        for name, insides in places.items()
        for inside in insides
        if inside.startswith(f"{place}.")
    ]


def _read_object(text: str, within: list[tuple[str, list[str]]], counts: dict[str, float]) -> None:
    """Add an object's counts, replacing earlier ones; a text that is not an object has none."""
    try:
        found: dict[str, object] = _decode(text)
    except (MsgspecError, ValueError, RecursionError):
        return
    for name, keys in within:
        count = _find_count(found, keys) if keys[0] in found else None
        if count is not None:
            counts[name] = count


def _find_count(found: object, keys: list[str]) -> float | None:
    for key in keys:
        if not isinstance(found, dict):
            return None
        found = found.get(key)
    return _parse_count(found)


def _parse_count(value: object) -> float | None:
    """Convert a value, which may be a text, to a number as Envoy does."""
    try:
        return float(value) if isinstance(value, (int, float, str)) else None
    except (ValueError, OverflowError):
        return None
