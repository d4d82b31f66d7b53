"""The cost of model calls, in nano-dollars."""

import tracemalloc
from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction

import pytest
from genai_prices import Usage as Counted, calc_price
from hypothesis import given, strategies as st

from extproc.sessions.rates import DEAREST, Rates, TokenPrice, Usage, look_up

_MILLION = Usage(1_000_000, 0, 0, 0)


def price(text: str) -> TokenPrice:
    return TokenPrice(*map(Decimal, text.split()))


_TOKENS = st.integers(0, 10**9)
_DOLLARS = st.decimals(0, 1_000, places=9)


@given(
    st.tuples(_DOLLARS, _DOLLARS, _DOLLARS, _DOLLARS), st.tuples(_TOKENS, _TOKENS, _TOKENS, _TOKENS)
)
def test_costs_equal_exact_arithmetic(
    dollars: tuple[Decimal, ...], tokens: tuple[int, ...]
) -> None:
    exact = sum(Fraction(rate) * 1_000 * count for rate, count in zip(dollars, tokens, strict=True))

    found = Rates({"m": TokenPrice(*dollars)}, None).find_cost("m", Usage(*tokens))

    assert found == int((exact + Fraction(1, 2)).__floor__())


PATTERNS = {"*": "5 0", "gpt-*": "4 0", "gpt-4?1": "3 0", "gpt-4o*": "2 0", "gpt-4o": "1 0"}


@pytest.mark.parametrize(
    ("prices", "unknown", "model", "usage", "cost"),
    [
        # A whole name before patterns, a longer pattern before a shorter one, and `*` last, in
        # whatever order
        *(
            (PATTERNS, None, model, _MILLION, dollars * 10**9)
            for model, dollars in {
                "gpt-4o": 1,
                "gpt-4o-mini": 2,
                "gpt-4.1": 3,
                "gpt-5": 4,
                "o3": 5,
                "GPT-4o": 5,
                "": 5,
            }.items()
        ),
        (
            {"m": "2 8"},
            None,
            "m",
            Usage(1, 0, 1, 1),
            3 * 2_000,
        ),  # caches cost what input does unless a price says more
        (
            {"m": "2.5 10 0.25 3.125"},
            None,
            "m",
            Usage(1_000, 200, 30, 4),
            2_500_000 + 2_000_000 + 7_500 + 12_500,
        ),
        (
            {"gpt-4*": "1 1"},
            None,
            "gpt-4o",
            _MILLION,
            10**9,
        ),  # a policy's price overrides the package's
        ({"gpt-5*": "1 1"}, None, "gpt-4o", _MILLION, 25 * 10**8),
        ({}, "3 4", "made-up", _MILLION, 3 * 10**9),
        (
            {},
            None,
            "made-up",
            _MILLION,
            DEAREST.input * 10**9,
        ),  # a name that is made up is no way around a limit
        ({}, None, "", Usage(0, 1_000_000, 0, 0), DEAREST.output * 10**9),
    ],
)
def test_most_specific_price_applies(
    prices: dict[str, str], unknown: str | None, model: str, usage: Usage, cost: int
) -> None:
    rates = Rates(
        {pattern: price(text) for pattern, text in prices.items()},
        price(unknown) if unknown else None,
    )

    assert rates.find_cost(model, usage) == cost


@pytest.mark.parametrize(
    "model",
    [
        "gpt-4o",
        "gpt-5.1",
        "claude-sonnet-4-5-20250929",
        "gemini-2.5-pro",
        "claude-opus-4-5",
        "deepseek-chat",
    ],
)
@pytest.mark.parametrize(
    "counts", [(1_234, 567, 0, 0), (5, 77, 150_000, 0), (9, 10, 180_001, 20_001), (0, 0, 0, 0)]
)
def test_default_prices_are_those_of_genai_prices(
    model: str, counts: tuple[int, int, int, int]
) -> None:
    usage = Usage(*counts)
    if look_up(model)[-1][1].cache_write is None:
        usage = usage._replace(cache_write=0)
    prompt = usage.input + usage.cache_read + usage.cache_write
    counted = Counted(
        input_tokens=prompt,
        output_tokens=usage.output,
        cache_read_tokens=usage.cache_read,
        cache_write_tokens=usage.cache_write,
    )
    dollars = calc_price(counted, model_ref=model).total_price

    assert Rates({}, None).find_cost(model, usage) == int(
        (dollars * 10**9).quantize(Decimal(1), ROUND_HALF_UP)
    )


@pytest.mark.parametrize(
    "model",
    ["us.anthropic.claude-sonnet-4-5-20250929-v1:0", "amazon.nova-lite-v1:0", "openai/gpt-4o"],
)
def test_models_of_bedrock_and_openrouter_have_prices(model: str) -> None:
    assert look_up(model)


@pytest.mark.slow
def test_invented_model_names_do_not_fill_memory() -> None:
    rates = Rates({"*": price("1 1")}, None)
    tracemalloc.start()

    found = {rates.find_cost(f"{number}" + "m" * 1_000, _MILLION) for number in range(5_000)}

    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == {10**9}
    assert grown < 2_000_000


@pytest.mark.parametrize(
    ("own", "asked", "chosen"),
    [
        ("m-2024-08-06", "m", "m"),
        ("m", "other", "m"),
        ("", "m", "m"),
        ("m-2024-08-06", "other", "m-2024-08-06"),
    ],
)
def test_model_is_priced_by_the_name_with_a_price(own: str, asked: str, chosen: str) -> None:
    for rates in (
        Rates({"m": price("1 1"), "*": price("9 9")}, None),
        Rates({"m": price("1 1")}, price("9 9")),
    ):
        assert rates.choose_name(own, asked) == chosen
