"""Names: one word for one thing in the whole package."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2] / "extproc"


def test_no_two_classes_have_the_same_name() -> None:
    """A class is found by its name alone."""
    modules: dict[str, set[Path]] = defaultdict(set)
    for file in ROOT.rglob("*.py"):
        if file.parent.name != "pb":
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    modules[node.name].add(file.relative_to(ROOT))

    assert {name: files for name, files in modules.items() if len(files) > 1} == {}
