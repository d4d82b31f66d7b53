"""The page of `scan --html` is complete by itself, and harmless whatever a transcript holds."""

from pathlib import Path

import pytest

from tests.support.command import Run, find_missing
from tests.support.extent import deepen
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
    turn = Did(((attack, {attack: attack}),), (f"Error: {attack} " * 20,))
    return AgentSession([turn] * 8, name=attack, project=attack, agent=attack, model=attack)


@pytest.mark.slow
@pytest.mark.parametrize("name", deepen(FORMATS, "claude code", "responses", "otlp messages"))
def test_names_and_contents_are_escaped(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, outlines = tmp_path / "page.html", []
    for attacks in (ATTACKS, ["plain" * 5] * len(ATTACKS)):
        lines = [line for attack in attacks for line in FORMATS[name](make_session(attack))]
        file = write_lines(
            tmp_path / "f.jsonl",
            [*lines, *({"type": attack, "sessionId": "s"} for attack in attacks)],
        )
        run = Run(capsys, "scan", "--show", "--html", str(page), str(file))
        assert (run.code, "\x1b" in run.out) == (0, False)
        outlines.append(Outline(page.read_text()))

    hostile, plain = outlines
    assert (hostile.loads, hostile.handlers, set(hostile.elements)) == ([], [], set(plain.elements))
    assert {"script", "img"} & set(hostile.elements) == set()


def test_page_loads_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_lines(tmp_path / "f.jsonl", FORMATS["claude code"](make_session("sharpen")))
    page = tmp_path / "page.html"

    Run(capsys, "scan", "--html", str(page), str(file))

    text = page.read_text()
    assert (
        find_missing(
            text,
            "default-src 'none'; style-src 'unsafe-inline'",
            "1 of 1 conversation looped.",
            "1. sharpen: the same input, the same result, 7 turns",
        )
        == []
    )
    assert "http" not in text.replace("http-equiv", "")
