"""The wheel and its release, builds that fail, and `make` where it cannot run."""

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.build import describe_build
from hatch_build import select_modules
from tests.conftest import find_builds
from tests.support import ROOT
from tests.support.harness import Process
from tests.support.image import COMPILED, compile_only, needs_a_compiler, send_context

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


@pytest.mark.deep
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


@pytest.mark.deep
def test_hot_path_is_compiled() -> None:
    chosen = set(select_modules())

    assert {f"extproc/{name}.py" for name in HOT} <= chosen
    assert not {f"extproc/{name}.py" for name in ("server", "policy/loader", "cli/main")} & chosen


@pytest.mark.deep
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


@pytest.mark.deep
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


@pytest.mark.deep
def test_wheel_is_pure_python_by_default(tmp_path: Path) -> None:
    wheels, _ = build_wheel(tmp_path, LOOPGUARD_COMPILED="", CC="/nonexistent/cc")

    assert wheels == [f"extproc_loopguard-{PROJECT['project']['version']}-py3-none-any.whl"]


@pytest.mark.deep
@pytest.mark.parametrize("compiler", ["/nonexistent/cc", "false"])
def test_compiling_without_compiler_fails(tmp_path: Path, compiler: str) -> None:
    wheels, said = build_wheel(tmp_path, LOOPGUARD_COMPILED="1", CC=compiler)

    assert wheels == []
    assert re.search(
        f"no C compiler works here, or Python's headers are missing: .*{compiler}", said
    )
    assert "Without LOOPGUARD_COMPILED=1, it is plain Python." in said


@pytest.mark.deep
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


@pytest.mark.deep
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


@pytest.mark.deep
@pytest.mark.sources
@pytest.mark.compiled
def test_tests_run_installed_package(tmp_path: Path) -> None:
    wheel = distribution("extproc-loopguard").read_text("WHEEL")
    assert wheel is not None
    expected = describe_build("compiled" if "Root-Is-Purelib: false" in wheel else "pure Python")

    asked = Process([sys.executable, "-P", "-m", "extproc.cli", "--version"], tmp_path / "log")

    assert asked.wait() == 0
    assert asked.output() == f"loopguard {PROJECT['project']['version']} ({expected})\n"


OWNER = ROOT / ".ci" / "owner.env"
RELEASE = ROOT / ".ci" / "release"
WORKFLOWS = [*sorted((ROOT / ".github" / "workflows").glob("*.yml")), ROOT / ".gitlab-ci.yml"]


def read_owner() -> dict[str, str]:
    return dict(re.findall(r"^([A-Z_]+)=(.*)$", OWNER.read_text(), re.MULTILINE))


def test_release_uses_every_owner_setting() -> None:
    used = RELEASE.read_text()

    assert {"VENDOR", "LICENSE", "IMAGE_REGISTRY", "CHART_REGISTRY"} <= read_owner().keys()
    assert [name for name in read_owner() if not re.search(rf"\$\{{?{name}\b", used)] == []
    assert ".ci/owner.env" in (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize("part", ["image", "chart"])
def test_release_names_missing_setting(part: str) -> None:
    done = subprocess.run([RELEASE, part], capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert re.fullmatch(
        (
            r"\w+ is empty: fill it in, in \.ci/owner\.env or, if it is a secret, as a variable of "
            r"CI\n"
        ),
        done.stderr,
    )


@pytest.mark.parametrize("file", [*WORKFLOWS, RELEASE], ids=lambda file: file.name)
def test_workflows_name_no_registry(file: Path) -> None:
    assert (
        re.findall(
            r"://[\w-]+\.[\w.-]+|\b[\w-]+(?:\.[\w-]+)*\.(?:io|com|org|dev)\b", file.read_text()
        )
        == []
    )


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_workflows_call_existing_targets(file: Path) -> None:
    text = file.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

    assert isinstance(yaml.safe_load(text), dict)
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets
    for script in re.findall(r"\.ci/\w+(?=[\s\],])", text):
        assert os.access(ROOT / script, os.X_OK), script
    assert set(re.findall(r"\.ci/release (\w+)", text)) <= {"image", "chart"}


def list_jobs() -> list[tuple[str, dict[str, Any]]]:
    texts = {path.stem: path.read_text() for path in WORKFLOWS if ".github" in path.parts}
    return [
        (f"{stem}/{name}", job)
        for stem, text in texts.items()
        for name, job in yaml.safe_load(text)["jobs"].items()
    ]


@pytest.mark.parametrize(
    "file", [path for path in WORKFLOWS if ".github" in path.parts], ids=lambda file: file.name
)
def test_actions_are_pinned_to_commits(file: Path) -> None:
    used = re.findall(r"uses: (.+)", file.read_text())

    assert used
    assert [
        each
        for each in used
        if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each)
    ] == []


@pytest.mark.parametrize(
    ("name", "job"), list_jobs(), ids=lambda given: given if isinstance(given, str) else ""
)
def test_jobs_that_install_have_no_secret(name: str, job: dict[str, Any]) -> None:
    ran = " ".join(step.get("run", "") for step in job["steps"])
    trusted = "secrets." in str(job) or "id-token" in job.get("permissions", {})

    assert not (trusted and re.search(r"\b(make|pip|\.ci/run)\b", ran)), name


def test_wheels_are_published_without_a_password() -> None:
    job = dict(list_jobs())["release/publish-wheels"]
    pipeline = yaml.safe_load((ROOT / ".gitlab-ci.yml").read_text())["publish-wheels"]

    assert (job["permissions"], job["environment"]) == ({"id-token": "write"}, "release")
    assert "secrets." not in str(job)
    assert "PYPI_ID_TOKEN" in pipeline["id_tokens"]
    assert "TWINE" not in str(pipeline)


@pytest.mark.deep
@needs_a_compiler
def test_wheel_build_is_reproducible(tmp_path: Path) -> None:
    made = []
    for name in ("one", "two"):
        send_context(tmp_path / name)
        compile_only(tmp_path / name, COMPILED)
        flags = ["--no-build-isolation", "--no-deps", "--wheel-dir", str(tmp_path / f"made-{name}")]
        subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "--quiet", *flags, str(tmp_path / name)],
            env={
                **os.environ,
                "LOOPGUARD_COMPILED": "1",
                "SOURCE_DATE_EPOCH": "1795670767",
                "TMPDIR": str(tmp_path),
            },
            check=True,
        )
        (wheel,) = (tmp_path / f"made-{name}").glob("*.whl")
        with zipfile.ZipFile(wheel) as opened:
            hashes = {
                each: hashlib.sha256(opened.read(each)).hexdigest() for each in opened.namelist()
            }
        made.append((wheel.name, hashes, hashlib.sha256(wheel.read_bytes()).hexdigest()))

    assert made[0] == made[1]


OLD = """#!/bin/sh
case "$1" in --version) echo "Python 3.10.12";; -c) exit 1;; *) echo "went on: $*";; esac
"""


def copy_makefile(folder: Path) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    (folder / "extproc").mkdir()


@pytest.mark.parametrize("python", ["old", "missing"])
def test_make_names_required_python(tmp_path: Path, python: str) -> None:
    copy_makefile(tmp_path)
    (tmp_path / "old").write_text(OLD)
    (tmp_path / "old").chmod(0o755)

    run = subprocess.run(
        ["make", "--no-print-directory", ".venv/uv.stamp", f"PYTHON=./{python}"],
        cwd=tmp_path, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False,
    )  # fmt: skip

    told = {"old": "./old is Python 3.10.12", "missing": "./missing is missing"}[python]
    lines = [line for line in run.stderr.splitlines() if not line.startswith("make: ***")]
    assert lines == [
        f"Loopguard needs Python 3.11 or newer; {told}. Name another: make PYTHON=python3.12"
    ]
    assert (run.returncode, run.stdout) == (2, "")
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(
    ("machine", "programs", "runs"),
    [
        ("Linux x86_64", {"getconf": "glibc 2.31"}, True),
        ("Linux aarch64", {"getconf": "glibc 2.41"}, True),
        ("Darwin arm64", {"sw_vers": "15.0"}, True),
        ("Linux x86_64", {"getconf": "glibc 2.28"}, False),
        ("Linux x86_64", {"getconf": ""}, False),  # musl
        ("Linux riscv64", {"getconf": "glibc 2.41"}, False),
        ("Darwin arm64", {"sw_vers": "14.7.1"}, False),
        ("Darwin x86_64", {"sw_vers": "15.0"}, False),
    ],
)
@pytest.mark.parametrize("target", ["run", "demo-agent"])
def test_make_refuses_platforms_without_envoy(
    tmp_path: Path, target: str, machine: str, programs: dict[str, str], *, runs: bool
) -> None:
    copy_makefile(tmp_path)
    for name, says in {"uname": machine, **programs}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho {says}\n")
        (tmp_path / name).chmod(0o755)

    run = subprocess.run(
        ["make", "--no-print-directory", target, "PYTHON=./missing"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )

    first = run.stderr.splitlines()[0]
    assert first.startswith(
        "Loopguard needs Python 3.11" if runs else f"PyPI has no Envoy for this machine ({machine})"
    )
    assert runs or "'loopguard scan' work without Envoy" in first
