"""CONTRIBUTING.md: its recipes name the files that the example of each stands in."""

from __future__ import annotations

import re

import pytest

from tests.support import ROOT

PAGE = ROOT / "CONTRIBUTING.md"
EXAMPLES = {
    "A detector": ("extproc", r'detectors\.tail|"tail"|\bTail\b'),
    "An API": ("extproc", r"Ollama's own|apis.ollama"),
    "A session limit": ("extproc", r"max_steps"),
    "A kind of state in the store": ("extproc/store", r"rules\.ring\b|ring\.(py|lua)"),
    "A field of a refusal": ("extproc", r"x-loopguard-count"),
    "A command": ("extproc", r"\bhealthcheck\b"),
}
"""For each recipe where its example is looked for, and how it is found."""


def read_recipes() -> dict[str, list[str]]:
    """The files that each recipe lists, by its heading."""
    sections = re.split(r"^### (.+)$", PAGE.read_text().partition("## Rules for compiled code")[0], flags=re.MULTILINE)[1:]
    return {heading: list_paths(text) for heading, text in zip(sections[::2], sections[1::2], strict=True)}


def list_paths(text: str) -> list[str]:
    """The paths in front of the colons of a list."""
    items = re.findall(r"^- (.+?)(?::|$)", text, re.MULTILINE)
    return [path for item in items for path in re.findall(r"`([^`]+)`", item)]


@pytest.mark.parametrize("heading", EXAMPLES)
def test_a_recipe_lists_every_file_of_its_example(heading: str) -> None:
    """What a newcomer has to change is listed, and nothing else."""
    folder, pattern = EXAMPLES[heading]
    files = [file for file in (ROOT / folder).rglob("*") if file.suffix in {".py", ".lua"} and "pb" not in file.parts]
    found = {str(file.relative_to(ROOT)) for file in files if re.search(pattern, file.read_text())}
    listed = read_recipes()[heading]

    assert {path for path in listed if path.startswith("extproc/")} == found
    assert [path for path in listed if not (ROOT / path).is_file()] == []


def test_every_recipe_is_checked() -> None:
    """A new one is, too."""
    assert read_recipes().keys() == EXAMPLES.keys()
