"""Pages of the admin port, outlined."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any


class Outline(HTMLParser):
    """The elements of a page, and what they would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.loads: list[str] = []
        self.handlers: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """One element."""
        self.elements.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def list_loops(report: dict[str, Any]) -> list[dict[str, Any]]:
    """What each detector says, behind the rows of `/loops`."""
    return [loop for row in report["conversations"] for loop in row["loops"]]
