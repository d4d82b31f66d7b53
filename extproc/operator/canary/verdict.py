"""The verdict on a candidate, by its new refusals: keep watching, safe or too strict.

Flags set the limits.
"""
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
    """The conditions for a safe candidate, each a flag of `loopguard canary status`."""

    min_requests: int = option(
        "1000", _parse_count, "requests that pass today to compare before a verdict", "N"
    )
    max_new_refusals: float = option(
        "0.001", _parse_share, "maximum share of these that a safe canary refuses", "SHARE"
    )
    max_new_loops: int | None = option(None, _parse_count, "maximum new loops (default: any)", "N")
    max_new_tenants: int | None = option(
        None, _parse_count, "maximum tenants with new refusals (default: any)", "N"
    )
    max_new_sessions: int | None = option(
        None, _parse_count, "maximum sessions with new refusals (default: any)", "N"
    )
    confidence: float = option("0.95", _parse_share, "confidence level of all bounds", "SHARE")


class Bounds(NamedTuple):
    """A share and its bounds; the share is None without data."""

    share: float | None
    low: float
    high: float


def find_bounds(part: int, whole: int, confidence: float = 0.95) -> Bounds:
    """The share of a part, with its Wilson score interval.

    With p the share, n the whole and z the normal quantile of the confidence:
    (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n). Unlike the normal approximation
    p +- z sqrt(p(1-p)/n), it is useful for p = 0 as well. (E. B. Wilson, Probable inference, the
    law of succession, and statistical inference, JASA 22, 1927.)
    """
    if not whole:
        return Bounds(None, 0.0, 1.0)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, spread = part / whole, z * z / whole
    center = (share + spread / 2) / (1 + spread)
    half = math.sqrt(max(0.0, share * (1 - share)) * spread + spread * spread / 4) / (1 + spread)
    low = 0.0 if not part else max(0.0, center - half)
    return Bounds(share, low, 1.0 if part == whole else min(1.0, center + half))


class Evidence(NamedTuple):
    """The counts that the verdict depends on.

    Attributes:
        refusals: new refusals.
        went_on: compared requests that passed.
        loops, tenants, sessions: numbers of them with new refusals.
        exact: whether these are exact, not estimates.
    """

    refusals: int
    went_on: int
    loops: int
    tenants: int = 0
    sessions: int = 0
    exact: bool = True

    def write(self) -> str:
        """The number of new loops as text."""
        if not self.loops:
            return "no new loops"
        return (
            f"{'' if self.exact else 'about '}{self.loops:,} new "
            f"loop{'' if self.loops == 1 else 's'}"
        )


class CanaryVerdict(NamedTuple):
    """The verdict's word, a summary with the number of new loops, and the reasons as sentences."""

    word: str
    summary: str
    reasons: list[str]


def judge(evidence: Evidence, rules: Rules) -> CanaryVerdict:
    """Too strict if the candidate certainly breaks a rule, safe if it certainly keeps all rules."""
    word, reasons = _decide(evidence, rules)
    return CanaryVerdict(word, f"{evidence.write()}: {word.replace('_', ' ')}", reasons)


def _decide(evidence: Evidence, rules: Rules) -> tuple[str, list[str]]:
    broken = [
        f"it refuses {number} {what} that pass today; the limit is {limit}"
        for number, what, limit in (
            (evidence.loops, "loops", rules.max_new_loops),
            (evidence.tenants, "tenants", rules.max_new_tenants),
            (evidence.sessions, "sessions", rules.max_new_sessions),
        )
        if limit is not None and number > limit
    ]
    if broken:
        return TOO_STRICT, broken
    share, by_share = _judge_share(evidence, rules)
    return share, [by_share]


def _judge_share(evidence: Evidence, rules: Rules) -> tuple[str, str]:
    """The verdict by the share of passed requests that the candidate would refuse.

    A minimum number is required because the requests of a loop are not independent: one stuck agent
    proves little.
    """
    went_on, limit = evidence.went_on, rules.max_new_refusals
    allowed = f"of the requests that pass today; the limit is {limit:.3%}"
    if went_on < rules.min_requests:
        return (
            KEEP_WATCHING,
            f"compared {went_on} of the {rules.min_requests} requests that a verdict needs",
        )
    bounds = find_bounds(evidence.refusals, went_on, rules.confidence)
    if bounds.low > limit:
        return TOO_STRICT, f"it refuses at least {bounds.low:.3%} {allowed}"
    if bounds.high <= limit:
        return SAFE, f"it refuses at most {bounds.high:.3%} {allowed}"
    return KEEP_WATCHING, f"it refuses between {bounds.low:.3%} and {bounds.high:.3%} {allowed}"
