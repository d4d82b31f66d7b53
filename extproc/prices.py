"""What loops cost: tokens are estimated from bytes, money from a rate that somebody gives or that a package knows."""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

from extproc.rates import look_up

_MAX_MODEL = 128

_IN_PATH = re.compile(r"/models?/([^/:]{1,128})")  # Gemini's and Bedrock's


class _Body(msgspec.Struct):
    model: str = ""


_decode = msgspec.json.Decoder(_Body).decode


def read_model(path: str, content: bytes | memoryview | None) -> str:
    """The model that a request asks, empty where it does not say.

    Args:
        path: of the request.
        content: its body, None where nobody may look into it.
    """
    if found := _IN_PATH.search(path):
        return found[1]
    if not content:
        return ""
    try:
        return _decode(content).model[:_MAX_MODEL]
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""


class Prices:
    """Rates for input tokens."""

    def __init__(self, per_million: float | None) -> None:
        """Take that rate for every model, in US dollars; None asks the package genai-prices, where it is installed."""
        self._per_million = per_million

    def estimate(self, model: str, tokens: int) -> float | None:
        """What so many input tokens cost in US dollars, None where no rate is known."""
        rate = self._per_million if self._per_million is not None else _find_rate(model)
        return None if rate is None else rate * tokens / 1_000_000


@lru_cache(maxsize=1_000)
def _find_rate(model: str) -> float | None:
    """The package's rate for a million input tokens; clients choose a model's name, so what is not known is kept as well."""
    tiers = look_up(model)
    return float(tiers[-1][1].input) if tiers else None
