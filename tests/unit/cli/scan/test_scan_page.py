"""The page of `loopguard scan --html`: whole by itself, true to the report, and harmless whatever a transcript holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.scan.page import render_scan
from tests.support.command import Run
from tests.support.pages import Outline
from tests.support.transcripts import FORMATS, AgentSession, write_lines
from tests.support.turn_writers import Did

ATTACKS = (
    "</title><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\"'><svg onload=alert(1)>",
    "</pre></style><style>*{background:url(//evil)}</style>",
    "javascript:alert(1)//",
    "{{ 7 * 7 }}{% include 'x' %}",
    "&lt;script&gt;<!--<script>",
    "\x00\x1b[31m\u202e<b>",
    "<a href='//evil'>x</a><iframe src=//evil>",
)


def make_session(attack: str) -> AgentSession:
    """A loop with an attack in every name and text."""
    turn = Did(((attack, {attack: attack}),), (f"Error: {attack} " * 20,))
    return AgentSession([turn] * 8, name=attack, project=attack, agent=attack, model=attack)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_names_and_contents_are_text(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No element, no attribute and no address on the page comes from a transcript."""
    plain = write_lines(tmp_path / "plain.jsonl", [line for _ in ATTACKS for line in FORMATS[name](make_session("plain" * 5))])
    hostile = write_lines(tmp_path / "x.jsonl", [line for attack in ATTACKS for line in FORMATS[name](make_session(attack))])
    page = tmp_path / "page.html"

    run = Run(capsys, "scan", "--show", "--html", str(page), str(hostile))

    assert run.code == 0
    assert "\x1b" not in run.out
    outline = Outline(page.read_text())
    assert (outline.loads, outline.handlers) == ([], [])
    Run(capsys, "scan", "--show", "--html", str(page), str(plain))
    assert set(outline.elements) == set(Outline(page.read_text()).elements)
    assert "script" not in outline.elements
    assert "img" not in outline.elements


def make_hostile(document: Any, key: str = "") -> Any:  # noqa: ANN401  # JSON
    """A report in which every text is an attack, but the times, which are read as such."""
    if isinstance(document, dict):
        return {name: make_hostile(value, name) for name, value in document.items()}
    if isinstance(document, list):
        return [make_hostile(value) for value in document]
    return ATTACKS[1] if isinstance(document, str) and key not in {"first", "last", "began"} else document


def test_every_text_of_a_report_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever part of the report it is."""
    file = write_lines(tmp_path / "f.jsonl", FORMATS["codex"](make_session("plain")))
    file.write_bytes(file.read_bytes() + b"{\n")
    report = json.loads(Run(capsys, "scan", "--json", str(file)).out)

    page = render_scan(make_hostile(report))

    assert "img" not in Outline(page).elements
    assert page.count("&lt;img src=x") > 10


def test_the_page_is_whole_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has all that the report says, and a policy that forbids it to load or run anything."""
    file = write_lines(tmp_path / "f.jsonl", FORMATS["claude code"](make_session("sharpen")))
    page = tmp_path / "page.html"

    Run(capsys, "scan", "--html", str(page), str(file))

    text = page.read_text()
    assert "default-src 'none'; style-src 'unsafe-inline'" in text
    assert "1 of 1 conversation looped." in text
    assert "1. sharpen: the same input, the same result, 7 turns" in text
    assert "http" not in text.replace("http-equiv", "")
