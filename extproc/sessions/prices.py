"""The cost of loops: tokens are estimated from bytes, money from a configured rate or from a package's."""
# interpreted: runs for a loop's first request; msgspec makes its Struct of annotations

from __future__ import annotations

from functools import lru_cache

import msgspec

from extproc.apis.usage import find_model
from extproc.sessions.rates import look_up


class _Body(msgspec.Struct):
    model: str = ""


_decode = msgspec.json.Decoder(_Body).decode


def read_model(path: str, content: bytes | memoryview | None) -> str:
    """The model in a request; empty if it names none."""
    try:
        named = _decode(content).model if content else ""
    except (msgspec.MsgspecError, ValueError, RecursionError):
        named = ""
    return find_model(path, named)


class Prices:
    """Rates for input tokens."""

    def __init__(self, per_million: float | None) -> None:
        """Use this rate for every model, in US dollars. None uses the package genai-prices."""
        self._per_million = per_million

    def estimate(self, model: str, tokens: int) -> float | None:
        """The cost of this many input tokens in US dollars; None if no rate is known."""
        rate = self._per_million if self._per_million is not None else _find_rate(model)
        return None if rate is None else rate * tokens / 1_000_000


@lru_cache(maxsize=1_000)
def _find_rate(model: str) -> float | None:
    """The package's rate for a million input tokens. Unknown models are cached, too, because clients choose the names."""
    tiers = look_up(model)
    return float(tiers[-1][1].input) if tiers else None
