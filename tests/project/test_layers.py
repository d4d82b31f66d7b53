"""Which room may import which."""

from graphlib import CycleError, TopologicalSorter

import pytest

from tests.support import ROOT as CHECKOUT
from tests.support.rooms import FILES, GENERATED, ROOMS, find_floor, find_imports


def find_violations(name: str, source: str) -> list[str]:
    found = []
    for target in sorted({*find_imports(source)} - {name}):
        if target == GENERATED:
            allowed = name.split("/", maxsplit=1)[0] in {"ext_proc", "transport"}
        else:
            allowed = target in FILES and find_floor(target) <= find_floor(name)
        if not allowed:
            found.append(f"{name} imports {target}")
    return found


def test_every_folder_is_a_room() -> None:
    assert sorted({name.split("/")[0] for name in FILES if "/" in name}) == sorted(ROOMS)


def test_unit_tests_mirror_modules() -> None:
    for place in (CHECKOUT / "tests" / "unit").glob("[!_.]*"):
        assert (
            place.name in ROOMS if place.is_dir() else place.stem.removeprefix("test_") in FILES
        ), place


@pytest.mark.parametrize("name", FILES)
def test_modules_import_from_lower_rooms(name: str) -> None:
    assert find_violations(name, FILES[name].read_text()) == []


def test_imports_have_no_circle() -> None:
    imports = {
        name: {*find_imports(file.read_text())} - {name, GENERATED} for name, file in FILES.items()
    }
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")
