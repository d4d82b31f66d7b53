"""Settings for all tests, and which build each runs on."""

import gc
import logging
import re
import signal
import sys
from collections import Counter
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
    r"^ *(?:import|from) (?:anthropic|openai|google import genai|mcp|fastmcp"
    r"|tests\.support\.(?:agents|frameworks|sdks))\b",
    re.MULTILINE,
)
_DRIVERS = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--build", choices=["sources", "compiled"], help="only what `make test` runs on this build"
    )
    parser.addoption("--cases", type=int, help="only this number of cases of each test")


@cache
def find_drivers() -> dict[str, str]:
    """Modules that drive agents, on few workers: their SDKs take a second to import."""
    driving = [
        path
        for path in sorted(TESTS.rglob("test_*.py"))
        if _SDKS.search(path.read_text(encoding="utf-8"))
    ]
    return {
        path.relative_to(ROOT).as_posix(): f"agents {place % _DRIVERS}"
        for place, path in enumerate(driving)
    }


@cache
def find_sharing(path: str) -> str:
    """What one worker runs: a `module` that shares servers, a `function`, or a slow `test`."""
    if path.startswith("tests/doors/") or 'scope="module"' in (ROOT / path).read_text():
        return "module"
    return "test" if path.startswith("tests/project/") else "function"


class Scopes(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Tests that share servers run on one worker; all others are split finely."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        if driver := find_drivers().get(path):
            return driver
        sharing = find_sharing(path)
        if sharing == "module":
            return path
        return nodeid if sharing == "test" else nodeid.partition("[")[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Every third worker takes from the end: doors often wait, and units never do."""
        if self.nodes.index(node) % 3 == 2:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scopes:
    return Scopes(config, log)


def pytest_report_header() -> str:
    return f"{describe_version()}, from {Path(extproc.__file__).parent}"


@cache
def find_compiled() -> set[str]:
    """The compiled rooms, and the compiled modules at the root by the names of their unit tests."""
    places = [Path(module).parts[1] for module in select_modules()]
    return {f"test_{place}" if place.endswith(".py") else place for place in places}


@cache
def find_builds(path: Path) -> set[str]:
    """The builds that `make test` runs a module on, by its folder.

    `make test-pure` runs all on the sources.

    Doors and units of compiled rooms run on the compiled wheel, all else on the sources.
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
    """Do not import modules that do not run on the build."""
    build = config.getoption("--build")
    if build and collection_path.suffix == ".py" and collection_path.name.startswith("test_"):
        return (
            build not in find_builds(collection_path)
            and f"mark.{build}" not in collection_path.read_text()
        ) or None
    return None


def mark_repetitions(items: list[pytest.Item]) -> None:
    """Tests through the second transport are `deep`, except those of the transports themselves."""
    for item in items:
        parameters = (
            item.callspec.params.values()
            if isinstance(item, pytest.Function) and hasattr(item, "callspec")
            else ()
        )
        if "grpcio" in parameters and item.path.parent.name != "transport":
            item.add_marker(pytest.mark.deep)


@pytest.hookimpl(tryfirst=True)  # `-m` chooses afterwards
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Keep what runs on the build; a test's mark overrides its folder."""
    mark_repetitions(items)
    # Those wait longest, so not last
    items.sort(key=lambda item: not item.nodeid.startswith("tests/doors/store/"))
    build, cases = config.getoption("--build"), config.getoption("--cases")
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    seen = Counter[str]()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        builds = {"sources", "compiled"} & marks or find_builds(item.path)
        test = item.nodeid.partition("[")[0]
        seen[test] += 1
        runs = (not build or build in builds) and (not cases or seen[test] <= cases)
        (kept if runs else left).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def pytest_collection_finish() -> None:
    """Keep imports out of garbage collections: with the SDKs, they are a million objects."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No settings from the environment, and no handler of signals that `serve` leaves."""
    for name in ("POLICY", "LISTEN", "ADMIN", "STORE", "ALLOW_UNENFORCED"):
        monkeypatch.delenv(f"LOOPGUARD_{name}", raising=False)
    hangup = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, hangup)


@pytest.fixture(autouse=True)
def _same_logs() -> Iterator[None]:
    """No handler of logs that a command leaves: its stream is closed."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def good(tmp_path: Path) -> str:
    return written(tmp_path / "good.json", GOOD)
