"""The verdict about a candidate: keep watching, safe or too strict, by rules that flags change."""
# interpreted: tells operators, not requests

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

from extproc.options import option, parse_integer, parse_number

KEEP_WATCHING = "keep_watching"
SAFE = "safe"
TOO_STRICT = "too_strict"


_parse_count = parse_integer(0)
_parse_share = parse_number(lambda share: 0 <= share < 1, "a number from 0 to below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """When a candidate is safe; each attribute is a flag of `loopguard canary status`."""

    min_requests: int = option("1000", _parse_count, "requests that pass today to compare before a verdict", "N")
    max_extra_refusals: float = option("0.001", _parse_share, "maximum share of these that a safe canary refuses", "SHARE")
    max_new_tenants: int | None = option(None, _parse_count, "maximum tenants that it newly refuses (default: any)", "N")
    max_new_sessions: int | None = option(None, _parse_count, "maximum sessions that it newly refuses (default: any)", "N")
    confidence: float = option("0.95", _parse_share, "confidence level of the interval", "SHARE")


class Bounds(NamedTuple):
    """A share and its bounds; the share is None while nothing has been seen."""

    share: float | None
    low: float
    high: float


def find_bounds(part: int, whole: int, confidence: float = 0.95) -> Bounds:
    """The share of a part, with Wilson's score interval.

    With p the share, n the whole and z the normal quantile of the confidence: (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) /
    (1 + z^2/n). Unlike the textbook's p +- z sqrt(p(1-p)/n) it says something of p = 0 as well. (E. B. Wilson, Probable
    inference, the law of succession, and statistical inference, JASA 22, 1927.)
    """
    if not whole:
        return Bounds(None, 0.0, 1.0)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, spread = part / whole, z * z / whole
    center = (share + spread / 2) / (1 + spread)
    half = math.sqrt(max(0.0, share * (1 - share)) * spread + spread * spread / 4) / (1 + spread)
    low = 0.0 if not part else max(0.0, center - half)
    return Bounds(share, low, 1.0 if part == whole else min(1.0, center + half))


class CanaryVerdict(NamedTuple):
    """One of the three words, and why, in sentences."""

    word: str
    reasons: list[str]


def judge(extra: int, went_on: int, tenants: int, sessions: int, rules: Rules) -> CanaryVerdict:
    """The verdict by a candidate's extra refusals, as a share of the compared requests that passed.

    Too strict is what breaks a rule for certain, safe what keeps all of them for certain; between the two, and below the
    minimum number of requests, keep watching.
    """
    bounds, most = find_bounds(extra, went_on, rules.confidence), rules.max_extra_refusals
    broken = [
        f"it newly refuses {number} {what}; the limit is {limit}"
        for number, what, limit in ((tenants, "tenants", rules.max_new_tenants), (sessions, "sessions", rules.max_new_sessions))
        if limit is not None and number > limit
    ]
    if went_on < rules.min_requests:
        return CanaryVerdict(KEEP_WATCHING, [f"compared {went_on} of the {rules.min_requests} requests that a verdict needs"])
    if bounds.low > most:
        broken.insert(0, f"it refuses at least {bounds.low:.3%} of the requests that pass today; the limit is {most:.3%}")
    if broken:
        return CanaryVerdict(TOO_STRICT, broken)
    if bounds.high <= most:
        return CanaryVerdict(
            SAFE, [f"it refuses at most {bounds.high:.3%} of the requests that pass today; the limit is {most:.3%}"]
        )
    reach = f"between {bounds.low:.3%} and {bounds.high:.3%}"
    return CanaryVerdict(KEEP_WATCHING, [f"it refuses {reach} of the requests that pass today; the limit is {most:.3%}"])
