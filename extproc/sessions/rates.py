"""The cost of model calls, in integers of nano-dollars (1e-9 US dollars), so that sums never drift.

A rate is found by the model's name: first the policy's own, then that of the package genai-prices, if it is installed, then the
policy's for unknown models. Some APIs call one model by several names; a price for any of them is used. Rates are cached by
name, because the package takes 100 us for a look-up: without that, the benchmark's row "session limits in addition to exact"
takes ten times as long.
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
"""An estimate, and shown as one everywhere: most of a request's body is English text in JSON."""

_NANO_PER_MILLION: Final = 1_000
"""One dollar per million tokens is this many nano-dollars per token."""

_MAX_MODELS: Final = 1_000
"""The cache is bounded, because clients choose the names of models."""

ANY_MODEL: Final = "*"

_VAGUE: Final = 0
_PACKAGE: Final = 1
_POLICY: Final = 2
"""Sources of a model's price: none for this model in particular, the package, or the policy."""

_PROVIDERS: Final = (("", None), (".", "aws"), ("/", "openrouter"))
"""Providers whose names to look up in the package, and what such names contain. The package does not guess the last two."""

_WELL_KNOWN: Final = "gpt-4o"
_SHORT: Final = 1_000
_decode_body: Final[Callable[[bytes | memoryview], Any]] = json.Decoder(defstruct("Body", [("model", str, "")])).decode


class Usage(NamedTuple):
    """The tokens of one call. Each counts in one place only, however the API counts them.

    Attributes:
        input: tokens of the prompt that no cache was used for.
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
"""The price of unknown models. Large models in wide use cost no more, so an unknown name is no way around a limit."""


class _Rate:
    """A price in integers: nano-dollars for `per` tokens, in prompts of more than `above` tokens; never changed."""

    def __init__(self, above: int, price: list[int], per: int) -> None:
        self.above = above
        self.input, self.output, self.cache_read, self.cache_write = price
        self.per = per


class Rates:
    """The rates of one policy."""

    def __init__(self, prices: Mapping[str, TokenPrice], unknown: TokenPrice | None) -> None:
        """Compile them, and load the package, which takes a while.

        Args:
            prices: by patterns of models' names, in the syntax of fnmatch. The most specific pattern wins: the one with the
                most literal characters.
            unknown: for models that match no pattern and are not in the package; None means DEAREST.
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
        """The same, of numbers of tokens in the order of `Usage`."""
        rate = self._choose(model, plain + read + written)
        total = plain * rate.input + output * rate.output + read * rate.cache_read + written * rate.cache_write
        return _divide(total, rate.per)

    def find_known_cost(self, model: str, usage: Usage) -> int | None:
        """The cost of a call in nano-dollars; None if there is no price for this model in particular."""
        return self.find_cost(model, usage) if self._look_up(model)[0] != _VAGUE else None

    def choose_name(self, answered: str, asked: str) -> str:
        """Choose the name, in response or request, with the better source of a price; the response's if both are equal."""
        return asked if asked and self._look_up(answered)[0] < self._look_up(asked)[0] else answered or asked

    def _choose(self, model: str, prompt: int) -> _Rate:
        """The rate for a prompt of this many tokens."""
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
        """The source of a model's rates, and the rates: that for the longest prompts first; the last one is for all prompts."""
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
    """Rates for input tokens, of loops that no policy with limits of money prices.

    Attributes:
        is_fixed: an operator has set a rate, for all loops.
    """

    def __init__(self, per_million: float | None) -> None:
        """Use this rate for every model, in US dollars. None uses the package genai-prices."""
        self.is_fixed = per_million is not None
        self._per_million = per_million
        self._rates = Rates({}, None)

    def estimate(self, model: str, tokens: int) -> float | None:
        """The cost of this many input tokens in US dollars, by the rate of short prompts; None if no rate is known."""
        if self._per_million is not None:
            return self._per_million * tokens / 1_000_000
        known = self._rates.find_known_cost(model, Usage(_SHORT, 0))
        return None if known is None else known * tokens / (_SHORT * NANO_DOLLARS)


def _divide(total: int, per: int) -> int:
    """A quotient, rounded half up."""
    return (2 * total + per) // (2 * per)


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
        prices for prompts of more than this many tokens, longest prompts first. The last one, with -1, is for all prompts.
    """
    from genai_prices import Usage as Counted  # noqa: PLC0415  # takes 0.2 s to import
    from genai_prices import calc_price  # noqa: PLC0415  # same

    for provider in [provider for mark, provider in _PROVIDERS if model and mark in model]:
        try:
            found: Any = calc_price(Counted(input_tokens=1), model_ref=model, provider_id=provider).model_price
        except (LookupError, ValueError):
            continue
        if found.input_mtok is not None and found.output_mtok is not None:
            return [(above, _read_price(found, above)) for above in sorted(_list_tiers(found), reverse=True)]
    return []


def _list_tiers(found: Any) -> set[int]:  # noqa: ANN401  # the package's ModelPrice has its fields only at run time
    """The prompt lengths, in tokens, above which other prices apply; -1 is the first."""
    priced = (getattr(found, f"{name}_mtok") for name in TokenPrice._fields)
    return {-1, *(tier.start for price in priced for tier in getattr(price, "tiers", ()))}


def _read_price(found: Any, above: int) -> TokenPrice:  # noqa: ANN401  # as above
    """The package's price for prompts just above this length."""
    return TokenPrice._make(_read_tier(getattr(found, f"{name}_mtok"), above) for name in TokenPrice._fields)


def _read_tier(price: Any, above: int) -> Any:  # noqa: ANN401  # a Decimal, or tiers of them, or None
    if not hasattr(price, "tiers"):
        return price
    return next((tier.price for tier in reversed(price.tiers) if tier.start <= above), price.base)


def _rank(pattern: str) -> tuple[int, bool]:
    """Order patterns by how specific they are."""
    fixed = sum(char not in "*?" for char in pattern)
    return fixed, fixed == len(pattern)


def _compile(price: TokenPrice, above: int = -1) -> _Rate:
    """A price in integers, exactly."""
    exact = [Fraction(price.input if rate is None else rate) * _NANO_PER_MILLION for rate in price]
    per = lcm(*(rate.denominator for rate in exact))
    return _Rate(above, [int(rate * per) for rate in exact], per)
