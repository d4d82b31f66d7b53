"""What calls of models cost, to the nano-dollar."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction

import pytest
from genai_prices import Usage as Counted
from genai_prices import calc_price
from hypothesis import given
from hypothesis import strategies as st

from extproc.sessions.rates import DEAREST, Rates, TokenPrice, Usage, look_up

_MILLION = Usage(1_000_000, 0, 0, 0)


def price(text: str) -> TokenPrice:
    """Input and output, and caches where they are said."""
    return TokenPrice(*map(Decimal, text.split()))


def test_each_kind_of_token_has_its_rate() -> None:
    """Input, output, cache reads and cache writes are counted once each."""
    rates = Rates({"m": price("2.5 10 0.25 3.125")}, None)

    assert rates.find_cost("m", Usage(1, 0, 0, 0)) == 2_500
    assert rates.find_cost("m", Usage(0, 1, 0, 0)) == 10_000
    assert rates.find_cost("m", Usage(0, 0, 1, 0)) == 250
    assert rates.find_cost("m", Usage(0, 0, 0, 1)) == 3_125
    assert rates.find_cost("m", Usage(1_000, 200, 30, 4)) == 2_500_000 + 2_000_000 + 7_500 + 12_500


def test_caches_cost_what_input_does_unless_a_price_says_more() -> None:
    """A policy that names input and output alone charges for every token of a prompt."""
    rates = Rates({"m": price("2 8")}, None)

    assert rates.find_cost("m", Usage(1, 0, 1, 1)) == 3 * 2_000


def test_a_part_of_a_nano_dollar_is_rounded_half_up_once_per_call() -> None:
    """Not once for each kind of token, and not down."""
    rates = Rates({"m": price("0.0125 0.0004")}, None)

    assert rates.find_cost("m", Usage(1, 0, 0, 0)) == 13
    assert rates.find_cost("m", Usage(1, 1, 0, 0)) == 13
    assert rates.find_cost("m", Usage(3, 1, 0, 0)) == 38
    assert rates.find_cost("m", Usage(0, 1, 0, 0)) == 0


_TOKENS = st.integers(0, 10**9)
_DOLLARS = st.decimals(0, 1_000, places=9)


@given(st.tuples(_DOLLARS, _DOLLARS, _DOLLARS, _DOLLARS), st.tuples(_TOKENS, _TOKENS, _TOKENS, _TOKENS))
def test_costs_are_those_of_exact_arithmetic(dollars: tuple[Decimal, ...], tokens: tuple[int, ...]) -> None:
    """Whatever the rates and however many tokens, nothing drifts."""
    exact = sum(Fraction(rate) * 1_000 * count for rate, count in zip(dollars, tokens, strict=True))

    found = Rates({"m": TokenPrice(*dollars)}, None).find_cost("m", Usage(*tokens))

    assert found == int((exact + Fraction(1, 2)).__floor__())


@pytest.mark.parametrize(
    ("model", "dollars"),
    [("gpt-4o", 1), ("gpt-4o-mini", 2), ("gpt-4.1", 3), ("gpt-5", 4), ("o3", 5), ("GPT-4o", 5), ("", 5)],
)
def test_the_most_specific_pattern_wins(model: str, dollars: int) -> None:
    """A whole name before patterns, a longer pattern before a shorter one, and `*` last, in whatever order they are given."""
    given = {"*": "5 0", "gpt-*": "4 0", "gpt-4?1": "3 0", "gpt-4o*": "2 0", "gpt-4o": "1 0"}
    rates = Rates({pattern: price(text) for pattern, text in given.items()}, None)

    assert rates.find_cost(model, _MILLION) == dollars * 10**9


@pytest.mark.parametrize(
    "model",
    ["gpt-4o", "gpt-5.1", "claude-sonnet-4-5-20250929", "gemini-2.5-pro", "claude-opus-4-5", "deepseek-chat"],
)
@pytest.mark.parametrize("counts", [(1_234, 567, 0, 0), (5, 77, 150_000, 0), (9, 10, 180_001, 20_001), (0, 0, 0, 0)])
def test_the_packages_prices_are_the_packages(model: str, counts: tuple[int, int, int, int]) -> None:
    """What genai-prices itself makes of a call is its cost, long prompts' tiers included."""
    usage = Usage(*counts)
    has_writes = look_up(model)[-1][1].cache_write is not None
    if not has_writes:
        usage = usage._replace(cache_write=0)
    prompt = usage.input + usage.cache_read + usage.cache_write
    counted = Counted(
        input_tokens=prompt,
        output_tokens=usage.output,
        cache_read_tokens=usage.cache_read,
        cache_write_tokens=usage.cache_write,
    )
    dollars = calc_price(counted, model_ref=model).total_price

    assert Rates({}, None).find_cost(model, usage) == int((dollars * 10**9).quantize(Decimal(1), ROUND_HALF_UP))


@pytest.mark.parametrize("model", ["us.anthropic.claude-sonnet-4-5-20250929-v1:0", "amazon.nova-lite-v1:0", "openai/gpt-4o"])
def test_names_of_models_at_bedrock_and_openrouter_are_known(model: str) -> None:
    """They have spellings of their own, which the package does not guess."""
    assert look_up(model)


def test_a_policys_price_overrides_the_packages() -> None:
    """A policy can state the prices of a contract."""
    assert Rates({"gpt-4*": price("1 1")}, None).find_cost("gpt-4o", _MILLION) == 10**9
    assert Rates({"gpt-5*": price("1 1")}, None).find_cost("gpt-4o", _MILLION) == 25 * 10**8


def test_an_unknown_model_costs_what_the_policy_says() -> None:
    """Else what the dearest do: a name that is made up is no way around a limit."""
    assert Rates({}, price("3 4")).find_cost("made-up", _MILLION) == 3 * 10**9
    assert Rates({}, None).find_cost("made-up", _MILLION) == DEAREST.input * 10**9
    assert Rates({}, None).find_cost("", Usage(0, 1_000_000, 0, 0)) == DEAREST.output * 10**9


def test_what_is_not_known_is_estimated_at_four_bytes_a_token() -> None:
    """The size of a request stands for its tokens."""
    assert Rates({"m": price("1 2")}, None).estimate("m", 403, 10) == 100 * 1_000 + 10 * 2_000


def test_names_that_clients_make_up_are_not_kept_without_end() -> None:
    """What is kept by name is bounded, and answers stay the same."""
    rates = Rates({"*": price("1 1")}, None)
    for number in range(2_500):
        assert rates.find_cost(f"m{number}", _MILLION) == 10**9

    assert len(rates._known) <= 1_000


def test_a_model_is_priced_by_the_name_that_has_a_price() -> None:
    """Its own name counts; what it was asked as, where nothing but a price for all is known of its own."""
    for rates in (Rates({"m": price("1 1"), "*": price("9 9")}, None), Rates({"m": price("1 1")}, price("9 9"))):
        assert rates.choose_name("m-2024-08-06", "m") == "m"
        assert rates.choose_name("m", "other") == "m"
        assert rates.choose_name("", "m") == "m"
        assert rates.choose_name("m-2024-08-06", "other") == "m-2024-08-06"
