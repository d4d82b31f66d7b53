"""What loops cost: tokens are estimated from bytes, money from a rate that is configured or that a package knows."""
# interpreted: looks at a loop's first request; msgspec makes its Struct of annotations

from __future__ import annotations

from functools import lru_cache

import msgspec

from extproc.apis.usage import find_model
from extproc.sessions.rates import look_up


class _Body(msgspec.Struct):
    model: str = ""


_decode = msgspec.json.Decoder(_Body).decode


def read_model(path: str, content: bytes | memoryview | None) -> str:
    """The model that a request asks, empty where it does not say."""
    try:
        named = _decode(content).model if content else ""
    except (msgspec.MsgspecError, ValueError, RecursionError):
        named = ""
    return find_model(path, named)


class Prices:
    """Rates for input tokens."""

    def __init__(self, per_million: float | None) -> None:
        """Take that rate for every model, in US dollars; None asks the package genai-prices, where it is installed."""
        self._per_million = per_million

    def estimate(self, model: str, tokens: int) -> float | None:
        """What this many input tokens cost in US dollars, None where no rate is known."""
        rate = self._per_million if self._per_million is not None else _find_rate(model)
        return None if rate is None else rate * tokens / 1_000_000


@lru_cache(maxsize=1_000)
def _find_rate(model: str) -> float | None:
    """The package's rate for a million input tokens; clients choose a model's name, so what is not known is kept as well."""
    tiers = look_up(model)
    return float(tiers[-1][1].input) if tiers else None
