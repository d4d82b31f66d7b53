"""What Envoy reads in answers: where each API says how many tokens a call took, and under which name Loopguard is told.

`extproc/access_log.py` says what the names mean. Where an answer says a thing several times, the last one counts: what streams
say about output grows.
"""

from __future__ import annotations

from collections.abc import Iterator

from extproc.access_log import USAGE_NAMESPACE

_NUMBER = "NUMBER"
_TEXT = "STRING"

_PLACES = {
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
    "model": ["model", "message.model", "response.model", "modelVersion"],
}
"""OpenAI's chat completions and responses, Anthropic's messages, Gemini's contents, Bedrock's Converse, Ollama's own."""


def write_rules() -> str:
    """Envoy's rules for an answer, whole or an event of it."""
    return "\n".join(_list_rules())


def write_event_rules() -> str:
    """The same as the content parser for events takes them."""
    return "\n".join(f"- rule: {rule.removeprefix('- ')}" for rule in _list_rules())


def _list_rules() -> Iterator[str]:
    for name, places in _PLACES.items():
        kind = _TEXT if name == "model" else _NUMBER
        for place in places:
            keys = ", ".join(f"{{key: {key}}}" for key in place.split("."))
            put = f"{{metadata_namespace: {USAGE_NAMESPACE}, key: {name}, type: {kind}}}"
            yield f"- {{selectors: [{keys}], on_present: {put}}}"
