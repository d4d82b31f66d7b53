"""What a message to a model or client says about a budget."""

from __future__ import annotations

from math import floor
from typing import Final

from extproc.decision import Advice, Framed, Outcome, Reason

DOLLAR_UNIT: Final = "dollars"
REQUEST_UNIT: Final = "requests"
TOKEN_UNIT: Final = "tokens"  # noqa: S105  # not a password


class BudgetSubject:
    """A budget and a request, for messages; a `Subject`.

    Attributes:
        rule: the rule's name.
        reason: the reason of a refusal.
        limit: the bucket's capacity or the period's budget, in the rule's unit.
        left: the rest of it.
        asked: the cost of the request.
        span: the budget's time in words, such as `a minute`; empty for a limit of a single request.
        reset: seconds until the bucket is full, or the next period begins.
        final: waiting does not help.
        unit: tokens, dollars or requests; empty for other costs.
    """

    def __init__(  # noqa: PLR0913  # a record
        self,
        rule: str,
        reason: Reason,
        limit: float,
        left: float,
        asked: float,
        span: str,
        reset: int,
        unit: str,
        *,
        final: bool = False,
    ) -> None:
        self.rule = rule
        self.reason = reason
        self.limit = limit
        self.left = left
        self.asked = asked
        self.span = span
        self.reset = reset
        self.unit = unit
        self.final = final

    @property
    def threshold(self) -> int | None:
        """See `Subject`."""
        return None

    @property
    def tools(self) -> tuple[str, ...]:
        """See `Subject`."""
        return ()

    @property
    def percent(self) -> float:
        """The percentage of the budget that is used."""
        return max(0.0, (self.limit - self.left) * 100 / self.limit) if self.limit else 100.0

    # A Subject's signature
    def write_message(self, outcome: Outcome, method: str, path: str) -> str:  # noqa: ARG002
        """See `Subject`."""
        if self.reason is Reason.CIRCUIT_BREAKER_OPEN:
            return self._write_open(outcome)
        allowed, asked = _write(self.limit, self.unit), _write(self.asked, self.unit)
        if self.unit in (TOKEN_UNIT, DOLLAR_UNIT):
            asked = f"about {asked}"
        if self.final:
            most = f"at most {allowed}{f' in {self.span}' if self.span else ' for one request'}"
            return (
                f"This request is too large: it needs {asked}, and rule {self.rule} allows {most}. "
                "Do not send it again unchanged: shorten it, or ask for a shorter answer."
            )
        left = _write(max(0.0, self.left), self.unit)
        return (
            f"Budget used up: rule {self.rule} allows {allowed} in {self.span}, {left} of that is "
            "left, "
            f"and this request needs {asked}. Send it again in "
            f"{_write_seconds(outcome.retry_after or 1)}."
        )

    def _write_open(self, outcome: Outcome) -> str:
        opened = (
            f"Spending was stopped because it reached {_write(self.limit, self.unit)} in a minute."
        )
        if outcome.retry_after is None:
            return (
                f"{opened} Do not send this request again: tell the user, and wait for an operator."
            )
        return f"{opened} Send this request again in {_write_seconds(outcome.retry_after)}."

    # A Subject's signature
    def advise(self, outcome: Outcome, method: str, path: str) -> Advice:  # noqa: ARG002
        """See `Subject`."""
        told = f"{self.percent:.0f} % of the budget for {self.span} is used"
        return Advice(
            told,
            "",
            "Finish with what you have, and avoid steps that are not needed.",
            "Budget near its end",
        )

    # A Subject's signature
    def frame(self, message: str, accept: str) -> Framed | None:  # noqa: ARG002
        """See `Subject`."""
        return None


def _write(amount: float, unit: str) -> str:
    if unit == REQUEST_UNIT:
        return f"{floor(amount)} request{'' if floor(amount) == 1 else 's'}"
    shown = f"{amount:.9g}"
    return f"{shown} {unit}" if unit else shown


def _write_seconds(seconds: int) -> str:
    return f"{seconds} second{'' if seconds == 1 else 's'}"
