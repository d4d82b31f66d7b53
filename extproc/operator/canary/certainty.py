"""What is certain about a share however often one looks.

An interval such as Wilson's holds for one look. A verdict is asked for again and again, and acted on at the first look that is
certain, so it needs a bound that holds at all looks together: a confidence sequence.
"""
# interpreted: tells operators, not requests

from __future__ import annotations

from math import exp, inf, lgamma, log, log1p

_STEPS = 50
"""Halvings of the range of a bound."""

_NEGLIGIBLE = 1e-18


def find_least(part: int, whole: int, confidence: float) -> float:
    """The share is above this with the given confidence, at all looks together (one-sided).

    A share p can be ruled out, with all below it, once the mean likelihood of the shares above it is 1 / (1 - confidence) times
    its own: for a true share of p or less, that ratio is a supermartingale which begins at 1, and Ville's inequality bounds the
    probability that it ever gets there. (J. Ville, Étude critique de la notion de collectif, 1939; H. Robbins, Statistical
    methods related to the law of the iterated logarithm, Annals of Mathematical Statistics 41, 1970; S. R. Howard et al.,
    Time-uniform, nonparametric, nonasymptotic confidence sequences, Annals of Statistics 49, 2021.)
    """
    if not part:
        return 0.0
    least, most, needed = 0.0, part / whole, -log1p(-confidence)
    for _ in range(_STEPS):
        share = (least + most) / 2
        if weigh(part, whole, share) >= needed:
            least = share
        else:
            most = share
    return least


def find_most(part: int, whole: int, confidence: float) -> float:
    """The share is below this; see `find_least`."""
    return 1.0 - find_least(whole - part, whole, confidence)


def weigh(part: int, whole: int, share: float) -> float:
    """The evidence for a higher share than this one: the logarithm of the ratio in `find_least`."""
    rest = whole - part
    if not 0 < share < 1:
        return inf if share <= 0 < part else -inf
    mean = lgamma(part + 1) + lgamma(rest + 1) - lgamma(whole + 2) + log1p(-find_chance(part + 1, whole + 1, share))
    return mean - log1p(-share) - part * log(share) - rest * log1p(-share)


def find_chance(more: int, whole: int, share: float) -> float:
    """The probability of more than `more` - 1 successes in `whole` trials, for a share below `more` / `whole`; below 1."""
    first = lgamma(whole + 1) - lgamma(more + 1) - lgamma(whole - more + 1) + more * log(share) + (whole - more) * log1p(-share)
    term, chance, odds = exp(first), 0.0, share / (1 - share)
    for successes in range(more, whole + 1):
        chance += term
        term *= (whole - successes) / (successes + 1) * odds
        if term < _NEGLIGIBLE:
            break
    return min(chance, 1 - 1e-15)
