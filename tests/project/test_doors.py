import ast

import pytest

from tests.support.inside import (
    IMPORTED,
    count_private,
    find_imported,
    find_test_imports,
    read_tests,
)

FILES = read_tests()


def test_tests_import_only_listed_modules() -> None:
    found = set().union(*map(find_imported, FILES.values()))
    listed = {
        f"{room}/{name}" if room else name
        for room, names in IMPORTED.items()
        for name in names.split()
    }

    assert (sorted(found - listed), sorted(listed - found)) == ([], [])


def test_tests_import_and_patch_nothing_private() -> None:
    assert {path: number for path, tree in FILES.items() if (number := count_private(tree))} == {}


def test_no_module_imports_a_test_module() -> None:
    assert {path: found for path, tree in FILES.items() if (found := find_test_imports(tree))} == {}


@pytest.mark.parametrize(
    ("source", "private", "imported", "shared"),
    [
        ("patch.setattr(thing, '_inside', 1)", 1, set(), []),
        ("patch.setattr(thing, 'outside', '_')", 0, set(), []),
        ("from extproc.settings import _inside, Settings", 1, {"settings"}, []),
        ("from extproc.policy import loader", 0, {"policy/loader"}, []),
        ("import extproc.cli.main", 0, {"cli/main"}, []),
        ("from tests.unit.test_logs import find", 0, set(), ["tests.unit.test_logs.find"]),
        ("from tests.unit import test_logs", 0, set(), ["tests.unit.test_logs"]),
        ("import tests.unit.test_logs", 0, set(), ["tests.unit.test_logs"]),
        ("from tests.support.messages import body", 0, set(), []),
    ],
)
def test_count_private_finds_imports_and_patches(
    source: str, private: int, imported: set[str], shared: list[str]
) -> None:
    tree = ast.parse(source)

    assert (count_private(tree), find_imported(tree), find_test_imports(tree)) == (
        private,
        imported,
        shared,
    )
