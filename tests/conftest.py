"""Settings for all tests, and what runs where."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import extproc
from extproc.cli.main import describe_version
from extproc.request.document import limit_integers
from tests.support import ROOT

# These machines are noisy: how long an example takes says nothing about the code.
settings.register_profile("loopguard", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# What the sources have been tried with at length, the same code compiled is tried with once more.
settings.register_profile("again", settings.get_profile("loopguard"), max_examples=25)
settings.load_profile("loopguard" if Path(extproc.__file__).is_relative_to(ROOT / "extproc") else "again")

limit_integers()  # as the command does

sys.path.append(str(ROOT / "envoy"))  # scripts, and what agents and their models share

TESTS = ROOT / "tests"
COMPILED_ROOMS = {"request", "apis", "detectors", "engine", "ext_proc", "store", "sessions", "transport"}
"""The rooms of the package that hold what every request passes through."""


def pytest_report_header() -> str:
    """Which Loopguard is tested: the sources, or an installed wheel."""
    return f"{describe_version()}, from {Path(extproc.__file__).parent}"


def find_builds(path: Path) -> set[str]:
    """What `make test` runs a module on, by its folder; `make test-pure` runs all of them on the sources.

    What goes through a door runs on the compiled wheel, a unit of a room that is compiled on both, all else on the sources.
    """
    kind, room, *_ = path.relative_to(TESTS).parts
    match kind:
        case "unit":
            return {"sources", "compiled"} if room in COMPILED_ROOMS else {"sources"}
        case "project":
            return {"sources"}
        case _:
            return {"compiled"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs where; a test that is marked by itself knows better than its folder."""
    for item in items:
        if not {"sources", "compiled"} & {mark.name for mark in item.iter_markers()}:
            for build in find_builds(item.path):
                item.add_marker(build)
