"""The report as an HTML page without scripts or external resources; contents are escaped."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from extproc.cli.commands import write_number
from extproc.cli.scan.report import GROUPS
from extproc.cli.scan.show import (
    list_problems,
    list_rows,
    list_steps,
    summarize,
    write_path,
)
from extproc.operator.admin.row_states import write_money

_ROWS = 50


def render_scan(document: Mapping[str, Any]) -> str:
    groups = [(group, list_rows(document, group, _ROWS)) for group in GROUPS]
    highest = {
        group: max((row["after_note"]["tokens"] for row in rows), default=0) or 1
        for group, rows in groups
    }
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = "{:,}".format
    folder = files("extproc.cli.scan")
    environment.globals["style"] = Markup(folder.joinpath("page.css").read_text(encoding="utf-8"))  # noqa: S704  # our own file
    template = environment.from_string(folder.joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(
        document=document,
        summary=summarize(document),
        groups=groups,
        highest=highest,
        problems=list_problems(document["problems"]),
        list_steps=list_steps,
        write_money=write_money,
        write_number=write_number,
        write_path=write_path,
    )
