"""The rooms of the package, and their imports."""

import ast
from collections.abc import Iterator
from functools import cache

from tests.support import ROOT as CHECKOUT

ROOT = CHECKOUT / "extproc"

# From the ground up: a room imports from those before it. Modules at the root that import no room
# are below all of them; those that do, which build and run the server, are below the command alone.
ROOMS = (
    "request",
    "apis",
    "store",
    "detectors",
    "sessions",
    "budgets",
    "policy",
    "engine",
    "operator",
    "ext_proc",
    "transport",
    "cli",
)

GENERATED = "pb"
# By name below the package, such as `store/memory`; a folder's name is its `__init__.py`.
FILES = {
    str(
        file.relative_to(ROOT).parent
        if file.name == "__init__.py"
        else file.relative_to(ROOT).with_suffix("")
    ): file
    for file in sorted(ROOT.rglob("*.py"))
    if file.relative_to(ROOT).parts[0] != GENERATED and file != ROOT / "__init__.py"
}


@cache
def find_imports(source: str) -> frozenset[str]:
    return frozenset(list_imports(ast.parse(source)))


def list_imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            # `from extproc.policy import rules` names a module, `from extproc.errors import X` a
            # thing in one.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            below = name.split(".")
            if below[0] == "extproc" and below[1:]:
                yield GENERATED if below[1] == GENERATED else find_module("/".join(below[1:]))


def find_module(name: str) -> str:
    """The module of a name, or the module that defines it."""
    while "/" in name and name not in FILES:
        name = name.rpartition("/")[0]
    return name


def find_floor(name: str) -> int:
    room = name.split("/", maxsplit=1)[0]
    if room in ROOMS:
        return ROOMS.index(room) + (2 if room == ROOMS[-1] else 1)
    rooms = {target.split("/")[0] for target in find_imports(FILES[name].read_text())} & {*ROOMS}
    return len(ROOMS) if rooms else 0
