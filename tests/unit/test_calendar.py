"""Periods that begin at midnight in a time zone, against the standard library's calendar."""

from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, strategies as st

from extproc.calendar import Calendar

ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Asia/Kathmandu", "Pacific/Apia"]


@pytest.mark.parametrize("period", ["1d", "7d", "month"])
@given(st.sampled_from(ZONES), st.integers(946_684_800_000, 2_524_608_000_000))
def test_period_begins_and_ends_at_midnight(period: str, name: str, now: int) -> None:
    zone = ZoneInfo(name)
    calendar = Calendar(period, zone)

    start, end = calendar.find(now)

    assert start <= now < end
    assert calendar.find(end)[0] == end
    first = datetime.fromtimestamp(start / 1000, zone)
    before = first - timedelta(milliseconds=1)
    assert (before + timedelta(hours=2)).date() > before.date()
    assert {"1d": True, "7d": first.isoweekday() == 7, "month": first.day == 1}[period]
    days = {"1d": [1], "7d": [7], "month": [28, 29, 30, 31]}[period]
    assert round((end - start) / 86_400_000) in days
