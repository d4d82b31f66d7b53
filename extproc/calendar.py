"""Months, weeks and days of a time zone, whose lengths differ."""

from __future__ import annotations

from datetime import datetime, timedelta, tzinfo
from typing import Final

_MS: Final = 1000


class Calendar:
    """Periods that begin at midnight in a time zone.

    Attributes:
        period: `1d`, `7d` (weeks begin on Sunday) or `month`.
        zone: the time zone.
    """

    def __init__(self, period: str, zone: tzinfo) -> None:
        self.period = period
        self.zone = zone
        self._start = self._end = 0

    def find(self, now: int) -> tuple[int, int]:
        """Start and end of the period that contains `now`; all in milliseconds since 1970."""
        if not self._start <= now < self._end:
            today = datetime.fromtimestamp(now // _MS, self.zone).date()
            if self.period == "month":
                start = today.replace(day=1)
                end = (start + timedelta(days=31)).replace(day=1)
            else:
                week = self.period == "7d"
                start = today - timedelta(days=today.isoweekday() % 7 if week else 0)
                end = start + timedelta(days=7 if week else 1)
            self._start, self._end = [
                round(datetime(day.year, day.month, day.day, tzinfo=self.zone).timestamp()) * _MS
                for day in (start, end)
            ]
        return self._start, self._end
