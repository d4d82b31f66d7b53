"""The wheel: compiled modules, its name, and builds that fail."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from extproc.build import describe_build
from hatch_build import select_modules
from tests.conftest import find_builds
from tests.support import ROOT
from tests.support.harness import Process
from tests.support.image import compile_only, needs_a_compiler, send_context

pytestmark = pytest.mark.deep

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
HOT = (
    "ext_proc/stream",
    "engine/engine",
    "request/fingerprint",
    "store/memory",
    "store/rules/windows",
    "transport/http2",
)


def build_wheel(folder: Path, project: Path = ROOT, **environment: str) -> tuple[list[str], str]:
    flags = ["--verbose", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *flags, str(project)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return [path.name for path in folder.glob("*.whl")], done.stdout + done.stderr


def test_modules_are_compiled_unless_marked_interpreted(tmp_path: Path) -> None:
    for path, text in {
        "room/__init__.py": '"""A room."""\n',
        "room/hot.py": '"""Hot."""\nX = 1\n',
        "room/cold.py": '"""Cold."""\n# interpreted: read once\nX = 1\n',
        "room/unsure.py": '"""Unsure."""\n# interpreted:\nX = 1\n',
        "office/__init__.py": '"""An office."""\n# interpreted, with all below: waits for people\n',
        "office/desk/__init__.py": '"""A desk."""\n',
        "office/desk/drawer.py": '"""A drawer."""\nX = 1\n',
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert select_modules(tmp_path) == [
        f"{tmp_path.name}/room/hot.py",
        f"{tmp_path.name}/room/unsure.py",
    ]


def test_hot_path_is_compiled() -> None:
    chosen = set(select_modules())

    assert {f"extproc/{name}.py" for name in HOT} <= chosen
    assert not {f"extproc/{name}.py" for name in ("server", "policy/loader", "cli/main")} & chosen


def test_no_compiled_module_relies_on_lazy_expressions() -> None:
    """Compiled code evaluates a generator at once: none may leave its function or be cut short."""
    in_part = {"islice", "takewhile", "dropwhile", "iter", "map", "filter", "chain"}
    found = []
    for module in select_modules():
        for node in ast.walk(ast.parse((ROOT / module).read_text())):
            if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom):
                given = [node.value]
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in in_part
            ):
                given = [*node.args]
            else:
                continue
            found += [
                (module, node.lineno) for value in given if isinstance(value, ast.GeneratorExp)
            ]

    assert found == []


def test_doors_are_tested_compiled() -> None:
    """A test module that starts a transport or a server is among the doors, or has the mark."""
    opens = re.compile(
        (
            r"^from (tests\.support\.servers|extproc\.transport\b.*|tests\.support\.harness) "
            r"import "
            r"(.*)$"
        ),
        re.MULTILINE,
    )
    found = {
        file
        for file in (ROOT / "tests").rglob("test_*.py")
        for module, names in opens.findall(file.read_text())
        if module != "tests.support.harness" or {"Loopguard", "stack"} & set(names.split(", "))
    }

    assert [
        file
        for file in found
        if "compiled" not in find_builds(file)
        and "\npytestmark = pytest.mark.compiled" not in file.read_text()
    ] == []


def test_wheel_is_pure_python_by_default(tmp_path: Path) -> None:
    wheels, _ = build_wheel(tmp_path, LOOPGUARD_COMPILED="", CC="/nonexistent/cc")

    assert wheels == [f"extproc_loopguard-{PROJECT['project']['version']}-py3-none-any.whl"]


@pytest.mark.parametrize("compiler", ["/nonexistent/cc", "false"])
def test_compiling_without_compiler_fails(tmp_path: Path, compiler: str) -> None:
    wheels, said = build_wheel(tmp_path, LOOPGUARD_COMPILED="1", CC=compiler)

    assert wheels == []
    assert re.search(
        f"no C compiler works here, or Python's headers are missing: .*{compiler}", said
    )
    assert "Without LOOPGUARD_COMPILED=1, it is plain Python." in said


@needs_a_compiler
def test_unknown_compiler_flags_are_dropped(tmp_path: Path) -> None:
    strict = tmp_path / "strict-cc"
    strict.write_text(
        '#!/bin/sh\ncase " $* " in *" -fpeephole2 "*) echo "error: unknown argument" >&2; exit '
        "1;; esac\n"
        f'exec {shutil.which("cc")} "$@"\n'
    )
    strict.chmod(0o755)
    project = tmp_path / "project"
    send_context(project)
    compile_only(project, "extproc/store/rules/windows.py")

    wheels, said = build_wheel(tmp_path, project, LOOPGUARD_COMPILED="1", CC=str(strict))

    assert "translating 1 modules to C ..." in said
    assert [wheel for wheel in wheels if "-none-any" not in wheel] == wheels != []


@needs_a_compiler
def test_module_with_type_error_fails_build(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    for name in ("extproc", "protos"):
        shutil.copytree(ROOT / name, project / name)
    for name in ("pyproject.toml", "hatch_build.py", "README.md"):
        shutil.copy(ROOT / name, project)
    compile_only(project, "extproc/store/rules/windows.py")
    with (project / "extproc" / "store" / "rules" / "windows.py").open("a") as module:
        module.write("\nCount(1, 2, 3)\n")

    wheels, said = build_wheel(tmp_path, project, LOOPGUARD_COMPILED="1")

    assert wheels == []
    assert re.search(r"extproc/store/rules/windows\.py:\d+: error: ", said)


@pytest.mark.sources
@pytest.mark.compiled
def test_tests_run_installed_package(tmp_path: Path) -> None:
    wheel = distribution("extproc-loopguard").read_text("WHEEL")
    assert wheel is not None
    expected = describe_build("compiled" if "Root-Is-Purelib: false" in wheel else "pure Python")

    asked = Process([sys.executable, "-P", "-m", "extproc.cli", "--version"], tmp_path / "log")

    assert asked.wait() == 0
    assert asked.output() == f"loopguard {PROJECT['project']['version']} ({expected})\n"
