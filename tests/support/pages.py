"""Pages of the admin port."""

import html
import json
import re
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx

from extproc.operator.admin.coverage_report import ServerState
from tests.support.harness import PATIENCE, Stack


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


TOKEN = "correct-horse-battery-staple"


class Tab:
    """A browser without scripts, which shows the page of `url`."""

    def __init__(self, url: str) -> None:
        self.url = f"http://{url}"
        self.client = httpx.Client(
            base_url=self.url, headers={"accept": "text/html"}, timeout=PATIENCE
        )
        self.page = ""

    def open(self, path: str) -> int:
        return self._show(self.client.get(path, follow_redirects=True))

    def press(self, word: str, section: str = "") -> int:
        """Follow a row's button, the first below the heading `section`."""
        text = self.page.partition(f"<h2>{section}</h2>")[2] if section else self.page
        link = re.findall(rf'<a class="button" href="([^"]*)" aria-label="order to {word}"', text)[
            0
        ]
        return self.open(html.unescape(link))

    def submit(self, headers: Mapping[str, str] | None = None, /, **fields: str) -> int:
        """Send the form that the page shows, as a browser does."""
        hidden = re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)"', self.page)
        (action, *_) = re.findall(r'<form class="order" method="post" action="([^"]*)"', self.page)
        form = {name: html.unescape(value) for name, value in hidden} | fields
        sent = {"origin": self.url} if headers is None else headers
        return self._show(self.client.post(action, data=form, headers=sent, follow_redirects=True))

    def sign_in(self, token: str = TOKEN, name: str = "ann") -> int:
        self.open("/login")
        return self.submit(name=name, token=token)

    def _show(self, answer: httpx.Response) -> int:
        self.page = re.sub(r"\s+", " ", answer.text)
        assert "form-action 'self'" in answer.headers["content-security-policy"]
        return answer.status_code


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
