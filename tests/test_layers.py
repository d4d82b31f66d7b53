"""The floors of the house: which file may import which."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "extproc"

# From the ground up; a folder stands for all of its files. A file imports from lower floors, or from its own folder or
# neighbours on its own floor where that is the root folder.
FLOORS: list[set[str]] = [
    {"errors", "request", "decision", "settings", "metrics", "logs"},
    {"policy", "fingerprint", "windows"},
    {"similarity"},
    {"plan", "engine", "handover", "store"},
    {"service", "wire", "answers"},
    {"transport"},
    {"reload", "admin", "server"},
    {"replay", "envoy_config", "cli"},
]
FLOOR = {name: number for number, floor in enumerate(FLOORS) for name in floor}

GENERATED = "pb"
MAY_READ_PB = {"service", "wire", "answers", "transport"}

FILES = sorted(file for file in ROOT.rglob("*.py") if file.relative_to(ROOT).parts[0] not in {GENERATED, "__init__.py"})


def unit(parts: tuple[str, ...]) -> str:
    """The floor plan's name for a module of the package: its file in the root folder, or its folder."""
    return parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[tuple[str, ...]]:
    """Every module of the package that is imported anywhere in a file, as path below the package."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            # `from extproc import settings` names a module, `from extproc.errors import X` a thing in one.
            names = [f"extproc.{alias.name}" for alias in node.names] if node.module == "extproc" else [node.module or ""]
        yield from (tuple(name.split(".")[1:]) for name in names if name.startswith("extproc."))


def violations(name: str, source: str) -> list[str]:
    """What a unit of the package imports against the rule."""
    found = []
    for target in {unit(parts) for parts in imports(ast.parse(source))}:
        if target == GENERATED:
            allowed = name in MAY_READ_PB
        else:
            neighbours = {name, target} <= {file.stem for file in ROOT.glob("*.py")} or name == target
            allowed = FLOOR[target] < FLOOR[name] or (FLOOR[target] == FLOOR[name] and neighbours)
        if not allowed:
            found.append(f"{name} imports {target}")
    return found


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(ROOT)) for file in FILES])
def test_a_file_imports_from_lower_floors_or_its_own_folder(file: Path) -> None:
    """No file reaches up, across to another folder of its floor, or into generated code that is not its business."""
    name = unit(file.relative_to(ROOT).parts)

    assert name in FLOOR, "a new file needs a floor"
    assert violations(name, file.read_text()) == []


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("engine", "from extproc.store import Store", ["engine imports store"]),
        ("store", "import extproc.engine", ["store imports engine"]),
        ("policy", "from extproc.windows import Hit", ["policy imports windows"]),
        ("policy", "from extproc.policy.bundle import Policy\nfrom extproc import errors", []),
        ("settings", "def f():\n    from extproc import cli", ["settings imports cli"]),
        ("settings", "from extproc.logs import LogFormat", []),
        ("server", "from extproc.pb import base_pb2", ["server imports pb"]),
        ("transport", "from extproc.pb.health_pb2 import X\nfrom extproc.service import Service", []),
    ],
)
def test_the_rule_finds_what_breaks_it(name: str, source: str, expected: list[str]) -> None:
    """Imports of every form, at any depth, are held to the rule."""
    assert violations(name, source) == expected


def test_there_are_files_to_look_at() -> None:
    """The rule is not kept by looking at nothing."""
    assert {"engine.py", "cli.py", "loader.py", "memory.py", "grpcio.py"} <= {file.name for file in FILES}
