"""The cost of a request to a budget, in integers.

A cost is known before the request is forwarded, or estimated and settled after the response.
Clients supply some of these numbers, so all of them are bounded.
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
"""Periods and breakers count in millionths of the rule's unit."""

BUCKET_UNITS: Final = 3_000_000
"""Buckets count in thirds of a millionth. A whole number per minute is then a whole number per
millisecond."""

_MOST_SESSIONS: Final = 4_096

_NANO_PER_UNIT: Final = 1_000
"""Nano-dollars in a micro-dollar."""

_NUMBER: Final = re.compile(r"[0-9.eE+-]{1,32}")


def read_amount(text: str, default: float) -> float:
    """Parse a positive number from a client, capped at MAX_AMOUNT; else return the default."""
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
    """Convert an amount to whole units."""
    return round(amount * units)


class Estimate(NamedTuple):
    """The tokens of a request, estimated before its response.

    Attributes:
        prompt: tokens of the prompt.
        answer: the client's limit for the length of an answer; 0 if it sets none.
        model: the model's name.
        copies: number of answers that the client asks for.
    """

    prompt: int
    answer: int
    model: str
    copies: int = 1


class Anchors:
    """Corrects estimates of prompts by the newest counted prompt of the same session.

    An estimate knows neither the language of a text nor the messages that the provider stores.
    """

    def __init__(self) -> None:
        self._counts: Memo[str, tuple[int, int]] = Memo(_MOST_SESSIONS)

    def learn(self, session: str, estimated: int, counted: int) -> None:
        """Record what a response counted, and the estimate (at least 1) made before it."""
        self._counts.put(session, (estimated, counted))

    def correct(self, session: str, estimated: int) -> int:
        """Add the error of the session's last estimate, less if the new prompt is shorter."""
        known = self._counts.get(session)
        if known is None:
            return estimated
        before, counted = known
        return max(1, estimated + (counted - before) * min(estimated, before) // before)


def estimate_prompt(document: Document | None, size: int) -> int:
    """Estimate a prompt's tokens; `size` is the body's length in bytes, for unreadable bodies."""
    characters = size
    if document is not None:
        try:
            characters = count_characters(open_conversation(document), bytes(document))
        except NotCounted:
            characters = len(document)
    return -(-characters // CHARACTERS_PER_TOKEN)


class CostKey:
    """Where a rule finds the cost of a request.

    Attributes:
        measured: one of `rule_keys.MEASURED` if the cost is known only after the response, else
            empty.
        rates: prices, for costs in dollars.
        limit_key: the header or parameter with the cost, as a limit key; else empty.
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
        """The cost of each request, in units; 0 if it varies."""
        return max(1, scale(self._fixed, units)) if self._source == FIXED else 0

    def read(self, request: HttpRequest) -> float:
        """The cost of a request that is not measured."""
        if self._source == FIXED:
            return self._fixed
        if self._source == "header":
            return read_amount(request.read_header(self._name).strip(), self._default)
        return read_amount(request.read_parameter(self._name), self._default)

    def weigh(self, usage: Usage, model: str, units: int) -> int:
        """The cost in units of tokens that were counted or estimated."""
        if self.measured == DOLLARS and self.rates is not None:
            nano = self.rates.find_cost(model, usage)
            return min(nano * units // (PERIOD_UNITS * _NANO_PER_UNIT), MAX_AMOUNT * units)
        prompt = usage.prompt
        tokens = (
            usage.output
            if self.measured == OUTPUT
            else prompt
            if self.measured == INPUT
            else prompt + usage.output
        )
        return min(tokens, MAX_AMOUNT) * units
