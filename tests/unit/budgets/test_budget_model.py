"""Random rules, requests and settlements on two replicas, against a plain model of what the documents say."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from fractions import Fraction
from math import ceil
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from extproc.metrics import Metrics
from extproc.pb.external_processor_pb2 import ProcessingResponse
from extproc.store.memory import MemoryStore
from tests.support.budget_policies import Clock, ask, chat, limited, refused, rule, tell
from tests.support.service import headers_of, make_service

SPANS = {"5m": timedelta(minutes=5), "1h": timedelta(hours=1), "1d": timedelta(days=1), "7d": timedelta(days=7)}
DEFAULT_ANSWER = 1_000


class Sent(NamedTuple):
    """A request.

    Attributes:
        gap: milliseconds since the one before.
        caller: its key, and its team, which may be missing.
        cost: its header `x-cost`.
        length: of its text.
        most: its `max_tokens`; 0 for none.
        replica: which replica gets it.
        late: number of requests after which it is settled; None for never.
        used: tokens that its response reports.
    """

    gap: int
    caller: tuple[str, str]
    cost: int
    length: int
    most: int
    replica: int
    late: int | None
    used: tuple[int, int]


def reject_at(percent: int) -> list[dict[str, Any]]:
    low = [{"threshold_percent": percent, "action": "reject"}] if percent < 100 else []
    return [*low, {"threshold_percent": 100, "action": "reject"}]


RATES = st.sampled_from([0.5, 1, 2])
COSTS = st.sampled_from(["fixed", "header:x-cost"])
RULES = st.one_of(
    st.builds(
        lambda rate, burst, source: rule("token_bucket", rps=rate, burst=burst, cost_source=source),
        RATES, st.integers(2, 9), COSTS,
    ),
    st.builds(
        lambda budget, period, key, percent: rule(
            "cost_based", budget=budget, period=period, cost_key=key, staged_actions=reject_at(percent)
        ),
        st.integers(2, 30), st.sampled_from([*SPANS]), COSTS, st.sampled_from([50, 100]),
    ),
    st.builds(
        lambda budget, period: rule(
            "cost_based", budget=budget, period=period, cost_key="usage:tokens", staged_actions=reject_at(100)
        ),
        st.integers(50, 3_000), st.sampled_from([*SPANS]),
    ),
    st.builds(
        lambda minute, more, day: rule(
            "token_bucket_llm", tokens_per_minute=minute, burst_tokens=minute + more, **({"tokens_per_day": day} if day else {})
        ),
        st.sampled_from([60, 300, 1_200]), st.sampled_from([0, 900]), st.sampled_from([0, 2_500]),
    ),
)  # fmt: skip
KEYED = st.tuples(RULES, st.sampled_from([["header:x-api-key"], ["header:x-team"], ["header:x-team", "header:x-api-key"]]))
SENT = st.builds(
    Sent,
    st.one_of(st.integers(0, 3_000), st.sampled_from([59_999, 300_000, 3_599_000, 86_400_000, 604_800_000])),
    st.tuples(st.sampled_from("ab"), st.sampled_from(["", "t"])),
    st.integers(1, 12),
    st.sampled_from([0, 4, 41, 400]),
    st.sampled_from([0, 0, 10, 500]),
    st.integers(0, 1),
    st.none() | st.integers(0, 5),
    st.tuples(st.integers(0, 200), st.integers(0, 900)),
)


class Bucket:
    """A bucket: its level, at any moment."""

    def __init__(self, per_second: Fraction, burst: int) -> None:
        self.most = burst
        self._per_second = per_second
        self._level = Fraction(burst)
        self._at = 0

    def look(self, now: int) -> Fraction:
        """What is left."""
        self._level = min(Fraction(self.most), self._level + self._per_second * Fraction(now - self._at, 1_000))
        self._at = now
        return self._level

    def wait(self, cost: int, now: int) -> int:
        """Milliseconds until a cost fits."""
        return ceil((cost - self.look(now)) / self._per_second * 1_000)

    def add(self, amount: int, now: int, taken_at: int) -> None:  # noqa: ARG002  # as of a period
        """Take, if negative, or give back."""
        self._level = min(Fraction(self.most), self.look(now) + amount)


class Period:
    """All that was used, by the period of the calendar."""

    def __init__(self, period: str, budget: Fraction) -> None:
        self.most = budget
        self._span = SPANS[period]
        self._used: dict[datetime, int] = {}

    def _find(self, now: int) -> datetime:
        moment = datetime.fromtimestamp(now / 1_000, UTC)
        midnight = moment.replace(hour=0, minute=0, second=0, microsecond=0)
        if self._span.days == 7:
            return midnight - timedelta(days=(moment.weekday() + 1) % 7)
        return midnight + (moment - midnight) // self._span * self._span

    def look(self, now: int) -> Fraction:
        """What is left."""
        return self.most - self._used.get(self._find(now), 0)

    def wait(self, cost: int, now: int) -> int:  # noqa: ARG002  # as of a bucket
        """Milliseconds until the next period."""
        return round((self._find(now) + self._span).timestamp() * 1_000) - now

    def add(self, amount: int, now: int, taken_at: int) -> None:  # noqa: ARG002  # as of a bucket
        """Take, if negative, or give back, in the period in which it was taken."""
        start = self._find(taken_at)
        self._used[start] = max(0, self._used.get(start, 0) - amount)


class Model:
    """All rules, by the documents."""

    def __init__(self, rules: list[dict[str, Any]]) -> None:
        self._rules = rules
        self._kept: dict[tuple[int, int, str], Bucket | Period] = {}

    def _list_kept(self, number: int, caller: tuple[str, str]) -> list[Bucket | Period]:
        one, config = self._rules[number], self._rules[number]["algorithm_config"]
        named = "|".join(caller[key == "header:x-team"] for key in one["limit_keys"])
        if one["algorithm"] == "token_bucket":
            made: list[Bucket | Period] = [Bucket(Fraction(config["rps"]), config["burst"])]
        elif one["algorithm"] == "cost_based":
            share = Fraction(config["staged_actions"][0]["threshold_percent"], 100)
            made = [Period(config["period"], config["budget"] * share)]
        else:
            made = [Bucket(Fraction(config["tokens_per_minute"], 60), config["burst_tokens"])]
            made += [Period("1d", Fraction(config["tokens_per_day"]))] if "tokens_per_day" in config else []
        return [self._kept.setdefault((number, place, named), each) for place, each in enumerate(made)]

    def _find_cost(self, number: int, sent: Sent, kept: list[Bucket | Period]) -> tuple[int, bool]:
        """What a request costs a rule, and whether that is settled."""
        config = self._rules[number]["algorithm_config"]
        source = config.get("cost_key", config.get("cost_source", "usage:tokens"))
        if source != "usage:tokens":
            return (sent.cost if source.startswith("header") else 1), False
        prompt, most = -(-sent.length // 4), int(min(each.most for each in kept))
        return prompt + (sent.most or max(0, min(DEFAULT_ANSWER, most - prompt))), True

    def ask(self, sent: Sent, now: int) -> tuple[list[tuple[Bucket | Period, int]], int | None]:
        """Decide; returns what is settled later, and for a refusal the milliseconds to wait, -1 for ever. None: it passes."""
        takes: list[tuple[Bucket | Period, int, bool]] = []
        for number, one in enumerate(self._rules):
            if "header:x-team" not in one["limit_keys"] or sent.caller[1]:
                kept = self._list_kept(number, sent.caller)
                cost, settled = self._find_cost(number, sent, kept)
                takes += [(each, cost, settled) for each in kept]
        short = [(each, cost) for each, cost, _ in takes if each.look(now) < cost]
        if short:
            return [], -1 if any(cost > each.most for each, cost in short) else max(
                each.wait(cost, now) for each, cost in short
            )
        for each, cost, _ in takes:
            each.add(-cost, now, now)
        return [(each, cost) for each, cost, settled in takes if settled], None


@given(keyed=st.lists(KEYED, min_size=1, max_size=3), sent=st.lists(SENT, max_size=30))
def test_rules_are_as_the_documents_say(keyed: list[tuple[dict[str, Any], list[str]]], sent: list[Sent]) -> None:
    """Each request passes or waits as long as it should, whichever replica it gets to, and whatever becomes of the others."""
    rules = [made | {"name": f"r{number}", "limit_keys": keys} for number, (made, keys) in enumerate(keyed)]
    clock = Clock()
    store = MemoryStore(Metrics(), clock=clock)
    services, model = [make_service(limited(*rules), store=store) for _ in range(2)], Model(rules)
    passed: dict[int, tuple[ProcessingResponse, list[tuple[Bucket | Period, int]], int]] = {}
    for place, request in enumerate(sent):
        clock.now += request.gap
        for number, (answer, takes, taken_at) in passed.items():
            if takes and place - number - 1 == sent[number].late:
                read, written = sent[number].used
                tell(services[1 - sent[number].replica], answer, told={"input": read, "output": written})
                for kept, cost in takes:
                    kept.add(cost - read - written, clock.now, taken_at)

        team = {"x_team": request.caller[1]} if request.caller[1] else {}
        content = chat("x" * request.length, **({"max_tokens": request.most} if request.most else {}))
        answer = ask(services[request.replica], request.caller[0], content=content, x_cost=f"{request.cost}", **team)
        takes, wait = model.ask(request, clock.now)

        told = headers_of(answer) if refused(answer) else {}
        assert bool(told) is (wait is not None)
        if wait is None:
            passed[place] = answer, takes, clock.now
        else:
            assert told.get("Retry-After") == (f"{max(1, ceil(wait / 1_000))}" if wait >= 0 else None)
