"""Settings for all tests, and what runs where."""

from __future__ import annotations

import gc
import re
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

import extproc
from extproc.cli.main import describe_version
from extproc.request.document import limit_integers
from hatch_build import select_modules
from tests.support import ROOT
from tests.support.command import GOOD, written

# These machines are noisy: how long an example takes says nothing about the code.
settings.register_profile("loopguard", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quarter", settings.get_profile("loopguard"), max_examples=25)
settings.register_profile("quick", settings.get_profile("loopguard"), max_examples=10)
settings.load_profile("loopguard")

limit_integers()  # as the command does
gc.disable()  # until all tests are collected: what is imported stays

sys.path.append(str(ROOT / "envoy"))  # scripts, and what agents and their models share

TESTS = ROOT / "tests"
_SDKS = re.compile(
    r"^ *(?:import|from) (?:anthropic|openai|google import genai|mcp|fastmcp|tests\.support\.(?:agents|frameworks|sdks))\b",
    re.MULTILINE,
)
_DRIVERS = 3


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--build`, by which `make test` divides the tests."""
    parser.addoption("--build", choices=["sources", "compiled"], help="only what `make test` runs on this build")


@cache
def find_drivers() -> dict[str, str]:
    """Which of a few workers has a module that drives agents, by its path."""
    driving = [path for path in sorted(TESTS.rglob("test_*.py")) if _SDKS.search(path.read_text(encoding="utf-8"))]
    return {path.relative_to(ROOT).as_posix(): f"agents {place % _DRIVERS}" for place, path in enumerate(driving)}


@cache
def find_sharing(path: str) -> str:
    """What stays with one worker: a `module` whose tests share servers, else a `function`, or a single long `test`."""
    if path.startswith("tests/doors/") or 'scope="module"' in (ROOT / path).read_text():
        return "module"
    return "test" if path.startswith("tests/project/") else "function"


class Scopes(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """What shares servers stays with one worker; all else is divided finely, so that no worker is left with a long module.

    Three workers have all modules that drive agents: each of their SDKs takes a second to import.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        if driver := find_drivers().get(path):
            return driver
        sharing = find_sharing(path)
        if sharing == "module":
            return path
        return nodeid if sharing == "test" else nodeid.partition("[")[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Every third worker takes from the end: what goes through a door often waits, and units never do."""
        if self.nodes.index(node) % 3 == 2:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scopes:
    """How `-n` divides the tests."""
    return Scopes(config, log)


def pytest_report_header() -> str:
    """Which Loopguard is tested: the sources, or an installed wheel."""
    return f"{describe_version()}, from {Path(extproc.__file__).parent}"


@cache
def find_compiled() -> set[str]:
    """The rooms that hold what is compiled, and the modules at the root that are, by what their units are called."""
    places = [Path(module).parts[1] for module in select_modules()]
    return {f"test_{place}" if place.endswith(".py") else place for place in places}


@cache
def find_builds(path: Path) -> set[str]:
    """What `make test` runs a module on, by its folder; `make test-pure` runs all of them on the sources.

    What goes through a door runs on the compiled wheel, and so do the units of compiled rooms; all else runs on the sources.
    """
    kind, room, *_ = path.relative_to(TESTS).parts
    match kind:
        case "unit":
            return {"compiled"} if room in find_compiled() else {"sources"}
        case "project":
            return {"sources"}
        case _:
            return {"compiled"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave modules alone that do not run on a build, unless they have a mark for it: each worker would import them."""
    build = config.getoption("--build")
    if build and collection_path.suffix == ".py" and collection_path.name.startswith("test_"):
        return (build not in find_builds(collection_path) and f"mark.{build}" not in collection_path.read_text()) or None
    return None


def mark_repetitions(items: list[pytest.Item]) -> None:
    """What goes through the default transport is `deep` on the other one, apart from the tests of the transports themselves."""
    for item in items:
        parameters = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
        if "grpcio" in parameters and item.path.parent.name != "transport":
            item.add_marker(pytest.mark.deep)


@pytest.hookimpl(tryfirst=True)  # `-m` chooses afterwards
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Keep what runs on a build; the mark of a test takes precedence over its folder."""
    mark_repetitions(items)
    items.sort(key=lambda item: not item.nodeid.startswith("tests/doors/store/"))  # those wait longest, so not last
    build = config.getoption("--build")
    if not build:
        return
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        builds = {"sources", "compiled"} & marks or find_builds(item.path)
        (kept if build in builds else left).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def pytest_collection_finish() -> None:
    """Take what was imported out of the garbage collector's rounds: with the SDKs these are a million objects."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing from the environment in which the tests run, and nothing left of what `serve` does to its process."""
    for name in ("POLICY", "LISTEN", "ADMIN", "STORE", "ALLOW_UNENFORCED"):
        monkeypatch.delenv(f"LOOPGUARD_{name}", raising=False)
    hangup = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, hangup)


@pytest.fixture
def good(tmp_path: Path) -> str:
    """A file with a policy that has neither errors nor warnings."""
    return written(tmp_path / "good.json", GOOD)
