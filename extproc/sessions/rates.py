"""The cost of model calls, in integers of nano-dollars (1e-9 US dollars), so that sums are exact.

A model's rate is looked up by name: in the policy's prices, in the package genai-prices, and last
in the policy's price for unknown models. Some APIs have several names for a model; a price for any
of them is used. Rates are cached by name, because the package takes 100 us per look-up: without the
cache, the benchmark's row "session limits in addition to exact" takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from fnmatch import fnmatchcase
from fractions import Fraction
from math import lcm
from typing import Any, Final, NamedTuple

from msgspec import MsgspecError, defstruct, json

from extproc.apis import list_models
from extproc.apis.usage import find_model
from extproc.bounded import Memo
from extproc.store.rules.session import NANO_DOLLARS

BYTES_PER_TOKEN: Final = 4
"""An estimate, and displayed as one. Most request bodies are English text in JSON."""

_NANO_PER_MILLION: Final = 1_000
"""One dollar per million tokens is this many nano-dollars per token."""

_MAX_MODELS: Final = 1_000
"""Bounds the cache, because clients choose the names of models."""

ANY_MODEL: Final = "*"

_VAGUE: Final = 0
_PACKAGE: Final = 1
_POLICY: Final = 2
"""The source of a price: unspecific, the package, or the policy."""

_PROVIDERS: Final = (("", None), (".", "aws"), ("/", "openrouter"))
"""Providers to try in the package, each with a part of its models' names. The package itself does
not guess the last two."""

_WELL_KNOWN: Final = "gpt-4o"
_SHORT: Final = 1_000
_decode_body: Final[Callable[[bytes | memoryview], Any]] = json.Decoder(
    defstruct("Body", [("model", str, "")])
).decode


class Usage(NamedTuple):
    """The tokens of one call. Each is counted once, whatever the API's own counting.

    Attributes:
        input: uncached tokens of the prompt.
        output: tokens of the response, including thoughts.
        cache_read: tokens of the prompt that were read from a cache.
        cache_write: tokens of the prompt that were written to a cache.
    """

    input: int
    output: int
    cache_read: int = 0
    cache_write: int = 0

    @property
    def prompt(self) -> int:
        """All tokens of the prompt."""
        return self.input + self.cache_read + self.cache_write


class TokenPrice(NamedTuple):
    """US dollars per million tokens of each kind; None means the price of `input`."""

    input: Decimal
    output: Decimal
    cache_read: Decimal | None = None
    cache_write: Decimal | None = None


DEAREST: Final = TokenPrice(Decimal(15), Decimal(75), Decimal("1.5"), Decimal("18.75"))
"""The price of unknown models. Large models in wide use cost no more, so an unknown name does not
evade a limit."""


class _Rate:
    """An immutable price: nano-dollars for `per` tokens, in prompts of more than `above` tokens."""

    def __init__(self, above: int, price: list[int], per: int) -> None:
        self.above = above
        self.input, self.output, self.cache_read, self.cache_write = price
        self.per = per


class Rates:
    """The rates of one policy."""

    def __init__(self, prices: Mapping[str, TokenPrice], unknown: TokenPrice | None) -> None:
        """Compile the prices and load the package, which takes a while.

        Args:
            prices: by fnmatch pattern of the model's name. The most specific pattern wins: the one
                with the most literal characters.
            unknown: for models without any other price; None means DEAREST.
        """
        by_pattern = sorted(prices.items(), key=lambda item: _rank(item[0]), reverse=True)
        self._prices = [(pattern, (_compile(price),)) for pattern, price in by_pattern]
        self._unknown = (_compile(unknown or DEAREST),)
        self._known: Memo[str, tuple[int, tuple[_Rate, ...]]] = Memo(_MAX_MODELS // 2)
        look_up(_WELL_KNOWN)

    def find_cost(self, model: str, usage: Usage) -> int:
        """The cost of a call in nano-dollars, rounded once, half up."""
        return self.weigh(model, usage.input, usage.output, usage.cache_read, usage.cache_write)

    def weigh(self, model: str, plain: int, output: int, read: int = 0, written: int = 0) -> int:
        """As `find_cost`, given numbers of tokens in the order of `Usage`."""
        rate = self._choose(model, plain + read + written)
        total = (
            plain * rate.input
            + output * rate.output
            + read * rate.cache_read
            + written * rate.cache_write
        )
        return (2 * total + rate.per) // (2 * rate.per)  # rounds half up

    def find_known_cost(self, model: str, usage: Usage) -> int | None:
        """The cost of a call in nano-dollars; None if the model has no specific price."""
        return self.find_cost(model, usage) if self._look_up(model)[0] != _VAGUE else None

    def choose_name(self, answered: str, asked: str) -> str:
        """The name with the better source of a price; of equal ones, the response's."""
        return (
            asked
            if asked and self._look_up(answered)[0] < self._look_up(asked)[0]
            else answered or asked
        )

    def _choose(self, model: str, prompt: int) -> _Rate:
        """The rate for a prompt of this length."""
        rates = self._look_up(model)[1]
        for rate in rates:
            if prompt > rate.above:
                return rate
        return rates[-1]

    def _look_up(self, model: str) -> tuple[int, tuple[_Rate, ...]]:
        known = self._known.get(model)
        if known is None:
            known = self._find(model)
            self._known.put(model, known)
        return known

    def _find(self, model: str) -> tuple[int, tuple[_Rate, ...]]:
        """The source of a model's rates, and the rates: longest prompts first, the last for any."""
        names = list_models(model)
        for pattern, rates in self._prices:
            for name in names:
                if fnmatchcase(name, pattern):
                    return _VAGUE if pattern == ANY_MODEL else _POLICY, rates
        for name in names:
            tiers = look_up(name)
            if tiers:
                return _PACKAGE, tuple([_compile(price, above) for above, price in tiers])
        return _VAGUE, self._unknown


class Prices:
    """Prices of input tokens for loops, if no policy has prices.

    Attributes:
        is_fixed: an operator has set one rate for all loops.
    """

    def __init__(self, per_million: float | None) -> None:
        """Use this rate, in US dollars, for every model; None uses the package genai-prices."""
        self.is_fixed = per_million is not None
        self._per_million = per_million
        self._rates = Rates({}, None)

    def estimate(self, model: str, tokens: int) -> float | None:
        """The cost in US dollars of input tokens, at the rate of short prompts; None if unknown."""
        if self._per_million is not None:
            return self._per_million * tokens / 1_000_000
        known = self._rates.find_known_cost(model, Usage(_SHORT, 0))
        return None if known is None else known * tokens / (_SHORT * NANO_DOLLARS)


def read_model(path: str, content: bytes | memoryview | None) -> str:
    """The model in a request; empty if it names none."""
    try:
        named: str = _decode_body(content).model if content else ""
    except (MsgspecError, ValueError, RecursionError):
        named = ""
    return find_model(path, named)


def estimate_tokens(size: int) -> int:
    """Estimate the tokens in this many bytes."""
    return size // BYTES_PER_TOKEN


def look_up(model: str) -> list[tuple[int, TokenPrice]]:
    """A model's prices in the package genai-prices; empty if it is unknown.

    Returns:
        pairs of a prompt length in tokens, and the prices above it; longest first, -1 last.
    """
    from genai_prices import Usage as Counted, calc_price  # noqa: PLC0415  # takes 0.2 s

    for provider in [provider for mark, provider in _PROVIDERS if model and mark in model]:
        try:
            found: Any = calc_price(
                Counted(input_tokens=1), model_ref=model, provider_id=provider
            ).model_price
        except (LookupError, ValueError):
            continue
        if found.input_mtok is not None and found.output_mtok is not None:
            return [
                (above, _read_price(found, above))
                for above in sorted(_list_tiers(found), reverse=True)
            ]
    return []


# The package's ModelPrice has its fields only at run time
def _list_tiers(found: Any) -> set[int]:  # noqa: ANN401
    """The prompt lengths, in tokens, above which prices change; -1 is the first."""
    priced = (getattr(found, f"{name}_mtok") for name in TokenPrice._fields)
    return {-1, *(tier.start for price in priced for tier in getattr(price, "tiers", ()))}


def _read_price(found: Any, above: int) -> TokenPrice:  # noqa: ANN401  # as above
    """The package's price for prompts just above this length."""
    return TokenPrice._make(
        _read_tier(getattr(found, f"{name}_mtok"), above) for name in TokenPrice._fields
    )


# A Decimal, or tiers of them, or None
def _read_tier(price: Any, above: int) -> Any:  # noqa: ANN401
    if not hasattr(price, "tiers"):
        return price
    return next((tier.price for tier in reversed(price.tiers) if tier.start <= above), price.base)


def _rank(pattern: str) -> tuple[int, bool]:
    """Sort key for patterns: the more specific, the higher."""
    fixed = sum(char not in "*?" for char in pattern)
    return fixed, fixed == len(pattern)


def _compile(price: TokenPrice, above: int = -1) -> _Rate:
    """Convert a price to integers, exactly."""
    exact = [Fraction(price.input if rate is None else rate) * _NANO_PER_MILLION for rate in price]
    per = lcm(*(rate.denominator for rate in exact))
    return _Rate(above, [int(rate * per) for rate in exact], per)
