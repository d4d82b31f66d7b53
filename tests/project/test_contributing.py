"""CONTRIBUTING.md: its recipes name the files that the example of each stands in."""

from __future__ import annotations

import re

import pytest

from tests.support import ROOT

PAGE = ROOT / "CONTRIBUTING.md"
EXAMPLES = {
    "A detector": (("extproc", "tests/support"), r'detectors\.tail|"tail"|\bTail\b|, tail,'),
    "An API": (("extproc", "tests/unit/cli"), r"Ollama's own|apis.ollama|\"eval_count\"|/api/generate\""),
    "A session limit": (("extproc",), r'max_steps|"--steps"|"steps": "steps"|grant\.steps'),
    "A kind of state in the store": (
        ("extproc/store", "tests/support"),
        r"rules\.root import|\broot\.(py|lua)|`root`|for a root\b",
    ),
    "A field of a refusal": (("extproc", "tests/unit/ext_proc"), r"x-loopguard-count"),
    "A command": (("extproc",), r"\bhealthcheck\b"),
}
"""For each recipe the folders in which its example is looked for, and how it is found."""


def read_recipes() -> dict[str, list[str]]:
    """The files that each recipe lists, by its heading."""
    sections = re.split(r"^### (.+)$", PAGE.read_text().partition("## Rules for compiled code")[0], flags=re.MULTILINE)[1:]
    return {heading: list_paths(text) for heading, text in zip(sections[::2], sections[1::2], strict=True)}


def list_paths(text: str) -> list[str]:
    """The paths in a list, `a.{b,c}` being two."""
    items = re.findall(r"^- (.+)$", text, re.MULTILINE)
    return [path for item in items for word in re.findall(r"`([^` ]*[./][^` ]+)`", item) for path in expand(word)]


def expand(word: str) -> list[str]:
    """As a shell does it."""
    before, brace, rest = word.partition("{")
    choices, _, after = rest.partition("}")
    return [f"{before}{choice}{after}" for choice in choices.split(",")] if brace else [word]


@pytest.mark.parametrize("heading", EXAMPLES)
def test_a_recipe_lists_every_file_of_its_example(heading: str) -> None:
    """What a newcomer has to change is listed, and nothing else."""
    folders, pattern = EXAMPLES[heading]
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.*") if "pb" not in file.parts]
    files = [file for file in files if file.suffix in {".py", ".lua", ".json"}]
    found = {str(file.relative_to(ROOT)) for file in files if re.search(pattern, file.read_text())}
    listed = read_recipes()[heading]

    assert {path for path in listed if path.startswith(("extproc/", *folders))} == found
    assert [path for path in listed if not (ROOT / path).is_file()] == []


def test_every_recipe_is_checked() -> None:
    """A new one is, too."""
    assert read_recipes().keys() == EXAMPLES.keys()
