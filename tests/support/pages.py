"""Pages of the admin port."""

import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from extproc.operator.admin.coverage_report import ServerState
from tests.support.harness import Stack


class Outline(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.loads: list[str] = []
        self.handlers: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.loads += [
            value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")
        ]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def list_loops(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The detectors' values behind the rows of `/loops`."""
    return [loop for row in report["conversations"] for loop in row["loops"]]


PAGES = [
    "/",
    "/metrics",
    "/loops",
    "/sessions",
    "/policies",
    "/readyz",
    "/coverage",
    "/canary",
    "/canary/states",
    "/overrides",
]


def look_around(made: Stack, events: Path) -> Iterator[tuple[str, bytes]]:
    for guard in made.replicas:
        for page in PAGES + [
            f"/sessions/{run['session']}"
            for run in json.loads(guard.get("/sessions")[1])["sessions"]
        ]:
            for accept in ("*/*", "text/html"):
                status, text = guard.get(page, accept=accept)
                assert status == 200, (page, text)
                yield f"{page} as {accept}", text.encode()
        yield "Loopguard's log", guard.output().encode()
    yield "the access log", made.envoy.output().encode()
    yield "events", events.read_bytes()


STATE = ServerState(
    "shared", "ok", watching=False, limits_sessions=False, acting=1, refused=[], unenforced=0
)
