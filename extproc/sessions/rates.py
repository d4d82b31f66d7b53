"""What calls of models cost, in integers of nano-dollars (1e-9 US dollars), so that sums never drift.

A rate is found by the model's name: the policy's own first, then what the package genai-prices knows, where it is installed,
then the policy's for unknown models. Some APIs call one model by several names, and a price for any of them is taken.
What was found is kept by name: the package takes 100 us to look.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from fnmatch import fnmatchcase
from fractions import Fraction
from math import lcm
from typing import Any, Final, NamedTuple

from extproc.apis import list_models
from extproc.bounded import Memo

BYTES_PER_TOKEN: Final = 4
"""An estimate, and said to be one wherever it is shown: what a request's body holds is mostly English text in JSON."""

_NANO_PER_MILLION: Final = 1_000
"""A dollar for a million tokens is this many nano-dollars for one."""

_MAX_MODELS: Final = 1_000
"""Clients choose a model's name, so what is kept by name is bounded."""

ANY_MODEL: Final = "*"

_VAGUE: Final = 0
_PACKAGE: Final = 1
_POLICY: Final = 2
"""Who tells a model's price: no source for this one alone, the package, or the policy."""

_PROVIDERS: Final = (("", None), (".", "aws"), ("/", "openrouter"))
"""Whose names of models the package is asked for, and what is in them: it guesses, but does not guess these two."""

_WELL_KNOWN: Final = "gpt-4o"


class Usage(NamedTuple):
    """The tokens of one call, each in one place alone, whichever way the API counts them.

    Attributes:
        input: of the prompt, without those that a cache took part in.
        output: of the answer, thoughts included.
        cache_read: of the prompt that came from a cache.
        cache_write: of the prompt that went into one.
    """

    input: int
    output: int
    cache_read: int = 0
    cache_write: int = 0


class TokenPrice(NamedTuple):
    """US dollars for a million tokens of each kind; None costs what input does."""

    input: Decimal
    output: Decimal
    cache_read: Decimal | None = None
    cache_write: Decimal | None = None


DEAREST: Final = TokenPrice(Decimal(15), Decimal(75), Decimal("1.5"), Decimal("18.75"))
"""For a model of which nothing at all is known. Large models in wide use cost no more than that, so no name is a way around."""


class _Rate:
    """A Price in integers: this many nano-dollars for `per` tokens, in prompts of more than `above` tokens; never changed."""

    __slots__ = ("above", "cache_read", "cache_write", "input", "output", "per")

    def __init__(self, above: int, price: list[int], per: int) -> None:
        self.above = above
        self.input, self.output, self.cache_read, self.cache_write = price
        self.per = per


class Rates:
    """The rates of one policy."""

    def __init__(self, prices: Mapping[str, TokenPrice], unknown: TokenPrice | None) -> None:
        """Compile them, and load the package, which takes a while.

        Args:
            prices: by pattern of models' names, as fnmatch has them. The most specific pattern wins: the one with the most
                characters that stand for themselves.
            unknown: for models that are in none of these patterns and not in the package; None: DEAREST.
        """
        by_pattern = sorted(prices.items(), key=lambda item: _rank(item[0]), reverse=True)
        self._prices = [(pattern, (_compile(price),)) for pattern, price in by_pattern]
        self._unknown = (_compile(unknown or DEAREST),)
        self._known: Memo[str, tuple[int, tuple[_Rate, ...]]] = Memo(_MAX_MODELS // 2)
        look_up(_WELL_KNOWN)

    def find_cost(self, model: str, usage: Usage) -> int:
        """What a call cost in nano-dollars, rounded half up once."""
        rate = self._choose(model, usage.input + usage.cache_read + usage.cache_write)
        total = (
            usage.input * rate.input
            + usage.output * rate.output
            + usage.cache_read * rate.cache_read
            + usage.cache_write * rate.cache_write
        )
        return _divide(total, rate.per)

    def estimate(self, model: str, input_bytes: int, output_bytes: int) -> int:
        """The same for a call of which nothing but the sizes of its bodies is known."""
        prompt = estimate_tokens(input_bytes)
        rate = self._choose(model, prompt)
        return _divide(prompt * rate.input + estimate_tokens(output_bytes) * rate.output, rate.per)

    def choose_name(self, answered: str, asked: str) -> str:
        """Of a model's two names the one whose price is known best: by the policy, else by the package; its own if both are."""
        return asked if asked and self._find_teller(answered) < self._find_teller(asked) else answered or asked

    def _find_teller(self, model: str) -> int:
        """Who tells its price."""
        return self._look_up(model)[0]

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
        """Who tells what holds for a model, and that: the rate for the longest prompts first; the last one is for all."""
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


def _divide(total: int, per: int) -> int:
    """A quotient, rounded half up."""
    return (2 * total + per) // (2 * per)


def estimate_tokens(size: int) -> int:
    """Tokens in this many bytes."""
    return size // BYTES_PER_TOKEN


def look_up(model: str) -> list[tuple[int, TokenPrice]]:
    """What the package genai-prices knows about a model; empty where that is nothing, or where it is not installed.

    Returns:
        Prices for prompts of more than this many tokens, those for the longest first. The last one is for all: it has -1.
    """
    try:
        from genai_prices import Usage as Counted  # noqa: PLC0415  # optional, and takes 0.2 s to import
        from genai_prices import calc_price  # noqa: PLC0415
    except ImportError:
        return []
    for provider in [provider for mark, provider in _PROVIDERS if model and mark in model]:
        try:
            found: Any = calc_price(Counted(input_tokens=1), model_ref=model, provider_id=provider).model_price
        except (LookupError, ValueError):
            continue
        if found.input_mtok is not None and found.output_mtok is not None:
            return [(above, _read_price(found, above)) for above in sorted(_list_tiers(found), reverse=True)]
    return []


def _list_tiers(found: Any) -> set[int]:  # noqa: ANN401  # the package's ModelPrice has its fields at run time alone
    """From above how many tokens of a prompt on other prices hold; -1 is the first."""
    priced = (getattr(found, f"{name}_mtok") for name in TokenPrice._fields)
    return {-1, *(tier.start for price in priced for tier in getattr(price, "tiers", ()))}


def _read_price(found: Any, above: int) -> TokenPrice:  # noqa: ANN401  # as above
    """The package's price for prompts that are just longer than this."""
    return TokenPrice._make(_read_tier(getattr(found, f"{name}_mtok"), above) for name in TokenPrice._fields)


def _read_tier(price: Any, above: int) -> Any:  # noqa: ANN401  # a Decimal, or tiers of them, or None
    if not hasattr(price, "tiers"):
        return price
    return next((tier.price for tier in reversed(price.tiers) if tier.start <= above), price.base)


def _rank(pattern: str) -> tuple[int, bool]:
    """Orders patterns by how specific they are."""
    fixed = sum(char not in "*?" for char in pattern)
    return fixed, fixed == len(pattern)


def _compile(price: TokenPrice, above: int = -1) -> _Rate:
    """A Price in integers, exactly."""
    exact = [Fraction(rate) * _NANO_PER_MILLION for rate in _list_rates(price)]
    per = lcm(*(rate.denominator for rate in exact))
    return _Rate(above, [int(rate * per) for rate in exact], per)


def _list_rates(price: TokenPrice) -> Iterator[Decimal]:
    for rate in price:
        yield price.input if rate is None else rate
