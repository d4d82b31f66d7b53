"""A report as one HTML page, for a browser or an email: no scripts, no external resources, charts in SVG."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from extproc.cli.replay.report import SERIES

WIDTH = 900
HEIGHT = 150
SPARK_WIDTH = 260
SPARK_HEIGHT = 26

_ORDER = [*range(2, len(SERIES) + 1), 1]
"""The columns of a timeline's points, from the bottom of a bar upwards: acted on, then passed."""

_ACTED = _ORDER[:-1]
_NARROWEST = 1.5
_LOWEST = 2.0
"""Minimum width of a bar and height of its parts, so that one request among thousands is visible."""


class PageSection(NamedTuple):
    """A colored part of a bar, for requests of one kind in SERIES."""

    kind: str
    y: float
    height: float


class Bar(NamedTuple):
    """The requests in one period of time; its parts from the bottom upwards."""

    x: float
    width: float
    parts: Sequence[PageSection]
    title: str


class Chart(NamedTuple):
    """Bars over the time of the log; `highest` is the requests of the highest bar, `stretch` the time of each, in words."""

    width: int
    height: int
    bars: Sequence[Bar]
    highest: int
    stretch: str


def render_page(document: dict[str, Any]) -> str:
    """Write a report as a page."""
    template = load_template("extproc.cli.replay")
    log = document["log"]
    span = _read_time(log["first"]), _read_time(log["last"])
    return template.render(
        log=log,
        policies=[(policy, draw_chart(policy["timeline"], span, WIDTH, HEIGHT, _ORDER)) for policy in document["policies"]],
        tenants=[
            (tenant, draw_chart(tenant["timeline"], span, SPARK_WIDTH, SPARK_HEIGHT, _ACTED)) for tenant in document["tenants"]
        ],
        worst=document["worst"],
        evicted=document["evicted"],
        failures=document["failures"],
        kinds=[SERIES[column - 1] for column in _ORDER],
    )


def load_template(package: str) -> Template:
    """The template `page.html` of a package, with the style of all reports; it escapes all values."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = "{:,}".format
    style = files("extproc.cli.replay").joinpath("page.css").read_text(encoding="utf-8")
    environment.globals["style"] = Markup(style)  # noqa: S704  # our own file
    return environment.from_string(files(package).joinpath("page.html").read_text(encoding="utf-8"))


def draw_chart(timeline: dict[str, Any], span: tuple[float, float], width: int, height: int, columns: Sequence[int]) -> Chart:
    """Draw columns of a timeline's points, from the bottom of a bar upwards; `span` is the log's, in seconds since 1970."""
    seconds = timeline["seconds"]
    begin = span[0] // seconds * seconds
    scale = width / max(seconds, span[1] + seconds - begin)
    points = [point for point in timeline["points"] if any(point[column] for column in columns)]
    highest = max((sum(point[column] for column in columns) for point in points), default=0)
    bars = [
        Bar(
            round((point[0] - begin) * scale, 2),
            round(max(_NARROWEST, seconds * scale * 0.92), 2),
            _stack(point, columns, highest, height),
            _describe(point, columns),
        )
        for point in points
    ]
    return Chart(width, height, bars, highest, _write_stretch(seconds))


def _stack(point: Sequence[int], columns: Sequence[int], highest: int, height: int) -> list[PageSection]:
    parts, top = [], float(height)
    for column in columns:
        if point[column]:
            size = min(top, max(_LOWEST, point[column] / highest * height))
            top -= size
            parts.append(PageSection(SERIES[column - 1], round(top, 2), round(size, 2)))
    return parts


def _describe(point: Sequence[int], columns: Sequence[int]) -> str:
    counts = ", ".join(f"{point[column]:,} {SERIES[column - 1]}" for column in columns if point[column])
    return f"{_write_time(point[0])}: {counts}"


def _read_time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _write_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _write_stretch(seconds: int) -> str:
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return "1 second" if seconds == 1 else f"{seconds} seconds"
