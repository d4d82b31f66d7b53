"""What a request costs a budget, in integers: known before it is sent on, or estimated and settled after the response.

Clients write some of these numbers, so everything is bounded.
"""

from __future__ import annotations

import re
from math import isfinite
from typing import Final, NamedTuple

from extproc.apis import open_conversation
from extproc.apis.lengths import CHARACTERS_PER_TOKEN, count_characters
from extproc.bounded import Memo
from extproc.budgets.rule_keys import DOLLARS, FIXED, INPUT, MAX_AMOUNT, OUTPUT, TOKENS
from extproc.request.document import Document, NotCounted
from extproc.request.http import HttpRequest
from extproc.sessions.rates import Rates, Usage

PERIOD_UNITS: Final = 1_000_000
"""Units of 1 in periods and breakers: micro-units."""

BUCKET_UNITS: Final = 3_000_000
"""Units of 1 in buckets: thirds of a micro-unit, of which a whole number a minute is a whole number a millisecond."""

_MOST_SESSIONS: Final = 4_096

_NANO_PER_UNIT: Final = 1_000
"""Nano-dollars in a micro-dollar."""

_NUMBER: Final = re.compile(r"[0-9.eE+-]{1,32}")


def read_amount(text: str, default: float) -> float:
    """A client's positive number, at most MAX_AMOUNT; the default for anything else."""
    if not _NUMBER.fullmatch(text):
        return default
    try:
        amount = float(text)
    except ValueError:
        return default
    if not isfinite(amount):
        return MAX_AMOUNT
    return min(amount, MAX_AMOUNT) if amount > 0 else default


def scale(amount: float, units: int) -> int:
    """An amount in whole units."""
    return round(amount * units)


class Estimate(NamedTuple):
    """The tokens of a request, as far as they are known before its response.

    Attributes:
        prompt: tokens of the prompt.
        answer: the most that the client allows for an answer; 0 if it does not say.
        model: the model's name.
        copies: number of answers that the client asks for.
    """

    prompt: int
    answer: int
    model: str
    copies: int = 1


class Anchors:
    """The newest prompt of each session as its response counted it, which corrects the estimates of later prompts.

    An estimate knows neither the language of a text nor the messages that the provider keeps.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._counts: Memo[str, tuple[int, int]] = Memo(_MOST_SESSIONS)

    def learn(self, session: str, estimated: int, counted: int) -> None:
        """Keep what a response counted, next to the estimate, which is at least 1."""
        self._counts.put(session, (estimated, counted))

    def correct(self, session: str, estimated: int) -> int:
        """An estimate, off by as many tokens as the last one, or in proportion if the prompt is shorter."""
        known = self._counts.get(session)
        if known is None:
            return estimated
        before, counted = known
        return max(1, estimated + (counted - before) * min(estimated, before) // before)


def estimate_prompt(document: Document | None, size: int) -> int:
    """The tokens of a prompt; `size` is the length of the body in bytes, for bodies that cannot be read."""
    characters = size
    if document is not None:
        try:
            characters = count_characters(open_conversation(document), bytes(document))
        except NotCounted:
            characters = len(document)
    return -(-characters // CHARACTERS_PER_TOKEN)


class CostKey:
    """How a rule finds the cost of a request.

    Attributes:
        measured: the cost is known only after the response: one of `rule_keys.MEASURED`; empty if it is known before.
        rates: prices, for dollars.
        limit_key: the header or parameter with the cost, as a limit key; empty if there is none.
    """

    def __init__(self, key: str, fixed: float, default: float, rates: Rates | None = None) -> None:
        """Compile a `cost_key` or `cost_source`."""
        source, _, name = key.partition(":")
        self.measured = key if key in (TOKENS, INPUT, OUTPUT, DOLLARS) else ""
        self.rates = rates
        self.limit_key = "" if self.measured or key == FIXED else key
        self._source = source
        self._name = name
        self._fixed = fixed
        self._default = default

    def find_flat(self, units: int) -> int:
        """What each request costs, in units; 0 if that depends on the request."""
        return max(1, scale(self._fixed, units)) if self._source == FIXED else 0

    def read(self, request: HttpRequest) -> float:
        """The cost of a request, unless it is measured."""
        if self._source == FIXED:
            return self._fixed
        if self._source == "header":
            return read_amount(request.read_header(self._name).strip(), self._default)
        return read_amount(request.read_parameter(self._name), self._default)

    def weigh(self, usage: Usage, model: str, units: int) -> int:
        """The cost in units of what an answer has used, or is estimated to use."""
        if self.measured == DOLLARS and self.rates is not None:
            nano = self.rates.find_cost(model, usage)
            return min(nano * units // (PERIOD_UNITS * _NANO_PER_UNIT), MAX_AMOUNT * units)
        prompt = usage.prompt
        tokens = usage.output if self.measured == OUTPUT else prompt if self.measured == INPUT else prompt + usage.output
        return min(tokens, MAX_AMOUNT) * units
