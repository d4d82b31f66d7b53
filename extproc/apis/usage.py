"""Where answers say how many tokens a call took: what Envoy looks for, and what it hands over.

- Each API has places of its own for the same count. `envoy-config` makes Envoy's rules of them.
- Out of an answer in one document Envoy hands over counts, each by its name.
- Out of a stream it hands over whole objects, as text, each under the place where it stood. Envoy copies its rules for streams
  with each request, and tries each on each event: a rule for each count would take twice as long as a few for objects.
- What stands there was written by a model, or by whoever plays one: all of it is bounded.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import MsgspecError, json

USAGE_NAMESPACE: Final = "loopguard.usage"
"""Where Envoy's filters put what they find."""

COUNT_PLACES: Final = {
    "input": [
        *("usage.prompt_tokens", "usage.input_tokens", "message.usage.input_tokens", "response.usage.input_tokens"),
        *("usageMetadata.promptTokenCount", "usage.inputTokens", "prompt_eval_count"),
    ],
    # Not message.usage.output_tokens, which is where a message begins and nothing has been written yet.
    "output": [
        *("usage.completion_tokens", "usage.output_tokens", "response.usage.output_tokens"),
        *("usageMetadata.candidatesTokenCount", "usage.outputTokens", "eval_count"),
    ],
    "cached": [
        *("usage.prompt_tokens_details.cached_tokens", "usage.input_tokens_details.cached_tokens"),
        *("response.usage.input_tokens_details.cached_tokens", "usageMetadata.cachedContentTokenCount"),
    ],
    "cache_read": [
        *("usage.cache_read_input_tokens", "message.usage.cache_read_input_tokens", "usage.cacheReadInputTokens"),
    ],
    "cache_write": [
        *("usage.cache_creation_input_tokens", "message.usage.cache_creation_input_tokens", "usage.cacheWriteInputTokens"),
    ],
    "thoughts": ["usageMetadata.thoughtsTokenCount"],
    "tool_input": ["usageMetadata.toolUsePromptTokenCount"],
}
"""OpenAI's chat completions and responses, Anthropic's messages, Gemini's contents, Bedrock's Converse, Ollama's own. Where an
answer says a thing several times, the last one counts: what streams say about output grows."""

MODEL: Final = "model"

MODEL_PLACES: Final = ("model", "message.model", "response.model", "modelVersion")

EVENT_OBJECTS: Final = ("message.usage", "response.usage", "usage", "usageMetadata")
"""Of events, in the order in which a stream tells them. Ollama's own counts are in no object, and its streams are no events."""

_MAX_OBJECT: Final = 8_192
"""Characters; APIs write a tenth of that."""

_decode: Final = json.Decoder(dict[str, Any]).decode


def _find_within(place: str) -> list[tuple[str, list[str]]]:
    """The counts of an object, and the keys that lead to each."""
    return [
        (name, inside.removeprefix(f"{place}.").split("."))
        for name, places in COUNT_PLACES.items()
        for inside in places
        if inside.startswith(f"{place}.")
    ]


_OBJECTS: Final = [(place.encode(), _find_within(place)) for place in EVENT_OBJECTS]
_COUNTS: Final = [(name.encode(), name) for name in COUNT_PLACES]


def read_counts(told: dict[bytes, object]) -> dict[str, float]:
    """What Envoy has handed over, by the names of `COUNT_PLACES`: any numbers at all."""
    counts: dict[str, float] = {}
    for key, name in _COUNTS:
        count = told.get(key)
        if isinstance(count, float):
            counts[name] = count
    for key, within in _OBJECTS:
        text = told.get(key)
        if isinstance(text, str) and len(text) <= _MAX_OBJECT:
            _read_object(text, within, counts)
    return counts


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
