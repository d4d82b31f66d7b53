"""The image: its pins, its lint, and a build of it (see `image`)."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hatch_build import COMPILERS
from tests.support import ROOT
from tests.support.harness import PATIENCE, eventually
from tests.support.image import (
    AS_ROOT,
    COMPILED,
    DOCKERFILE,
    Container,
    Image,
    base_python,
    build,
    find_compiler,
    ignore_rules,
    instructions,
    left_out,
)

pytestmark = pytest.mark.deep

PINS = ROOT / "image.lock.txt"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    user = next(rest for keyword, rest in instructions() if keyword == "USER")
    if not find_compiler(base_python(user)):
        pytest.skip(
            "no C compiler for the Python that stands for the image's: the image is NOT tested"
        )
    # pytest's own folders are for one user only, and a long path would not fit into a script's
    # first line.
    with tempfile.TemporaryDirectory(prefix="lg") as name:
        folder = Path(name)
        folder.chmod(0o755)
        subprocess.run([base_python(user), "-m", "venv", folder / "base"], check=True)
        made = build(folder, f"{folder}/base/bin:/usr/bin:/bin")
        everything = [made.root, *made.root.rglob("*")]
        for path in everything:
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & ~0o222)
        yield made
        for path in everything:  # or only root could remove them
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)


def test_dockerfile_passes_hadolint() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"

    done = subprocess.run(
        [hadolint, "--failure-threshold", "style", "--disable-ignore-pragma", DOCKERFILE],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, "")


def test_dockerignore_sends_sources_only() -> None:
    wanted = [
        "extproc/store/rules/tally.lua",
        "extproc/cli/envoy_config/templates/bootstrap.yaml",
        "protos/base.proto",
        "hatch_build.py",
        "pyproject.toml",
        "README.md",
        "image.lock.txt",
    ]
    unwanted = [
        ".env",
        ".git/config",
        ".venv/bin/python",
        "extproc/pb/old.py",
        "extproc/store/__pycache__/x.pyc",
        "tests/x.py",
    ]

    assert [path for path in (*wanted, *unwanted) if not left_out(path, ignore_rules())] == wanted


def pins() -> dict[str, str]:
    return dict(re.findall(r"^(\S+)==(\S+)", PINS.read_text(), re.MULTILINE))


def test_pins_satisfy_project() -> None:
    asked = map(
        Requirement,
        PROJECT["project"]["dependencies"] + PROJECT["build-system"]["requires"] + COMPILERS,
    )

    pinned = pins()
    wrong = [
        str(need)
        for need in asked
        if not need.specifier.contains(pinned.get(canonicalize_name(need.name), "0"))
    ]

    assert wrong == [], "make image.lock.txt anew, with the command at its top"


def requirements(text: str = PINS.read_text()) -> dict[str, set[str]]:
    lines = re.sub(r"#.*", "", text).replace("\\\n", " ").split("\n")
    return {
        pin: set(hashes)
        for pin, *hashes in (re.split(r" +--hash=", line.strip()) for line in lines if line.strip())
    }


def test_pins_have_hashes() -> None:
    for pin, hashes in requirements().items():
        assert re.fullmatch(
            r"[a-z0-9-]+==[0-9.]+( ; python_(full_)?version < ['\"][0-9.]+['\"])?", pin
        ), pin
        assert hashes, pin
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", value) for value in hashes), pin


def images() -> dict[str, str]:
    return dict(re.findall(r"^ARG (\w+_IMAGE)=(.*)$", DOCKERFILE.read_text(), re.MULTILINE))


def test_image_base_has_no_compiler() -> None:
    bases = re.findall(r"^FROM (.*)$", DOCKERFILE.read_text(), re.MULTILINE)

    assert bases == ["${BUILD_IMAGE} AS build", "${PYTHON_IMAGE}"]
    assert re.fullmatch(r"python:\d+\.\d+", images()["BUILD_IMAGE"])
    assert images()["PYTHON_IMAGE"] == f"{images()['BUILD_IMAGE']}-slim"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_pins_have_wheels_for_image(machine: str) -> None:
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("uv is not installed: whether each pin has a wheel for the image is NOT tested")
    python = images()["BUILD_IMAGE"].removeprefix("python:")
    flags = [
        "--generate-hashes",
        "--no-header",
        "--no-annotate",
        "--only-binary",
        ":all:",
        "--no-cache",
        "--quiet",
    ]

    done = subprocess.run(
        [
            uv,
            "pip",
            "compile",
            "-",
            *flags,
            "--python-version",
            python,
            "--python-platform",
            f"{machine}-manylinux_2_28",
        ],
        input="".join(f"{requirement}\n" for requirement in requirements()),
        env={**os.environ, "UV_DEFAULT_INDEX": find_index()},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    found = requirements(done.stdout)
    assert found
    pinned = {name.partition(" ;")[0]: hashes for name, hashes in requirements().items()}
    assert {name: hashes for name, hashes in pinned.items() if name in found} == found


def find_index() -> str:
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    return next(iter(re.findall(r"\.index-url='(.*)'$", listed, re.MULTILINE)[::-1]), "")


def test_image_has_pinned_packages_and_no_build_tools(image: Image) -> None:
    found = {
        path.name.partition("-")[0].replace("_", "-"): path.name.removesuffix(
            ".dist-info"
        ).partition("-")[2]
        for path in image.root.rglob("*.dist-info")
    }

    assert found.pop("extproc-loopguard") == PROJECT["project"]["version"]
    assert found.items() <= pins().items()
    assert {"uvloop", "pydantic", "grpcio", "genai-prices"} <= found.keys()
    assert not {"pip", "setuptools", "hatchling", "grpcio-tools", "mypy", "librt"} & found.keys()
    assert not [
        path for path in image.root.rglob("extproc*/**/*") if path.suffix in {".c", ".h", ".o"}
    ]


def test_image_is_compiled(image: Image) -> None:
    module = COMPILED.removesuffix(".py").replace("/", ".")
    code, file = Container(image).run(
        ["python", "-c", f"import {module}; print({module}.__file__)"]
    )

    assert (code, Path(file).suffix) == (0, ".so")


def test_image_starts_without_shell(image: Image) -> None:
    (script,) = (path for path in image.root.rglob("bin/loopguard"))

    assert (image.entrypoint, image.command) == (["loopguard"], ["serve"])
    assert image.health == ["loopguard", "healthcheck"]
    assert script.read_text().splitlines()[0] == f"#!{script.parent}/python"


def test_container_watches_and_stops(image: Image) -> None:
    assert all(int(number) > 0 for number in image.user.split(":"))
    container = Container(image)

    before = container.run(image.health)
    process = container.start([*image.entrypoint, *image.command])
    try:
        eventually(lambda: container.get("/readyz") or process.poll() is not None, "readiness")
        assert process.poll() is None, process.communicate()[0]
        policies = container.get("/policies")
        healthy = container.run(image.health)
        status = Path(f"/proc/{process.pid}/status").read_text()
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()

    assert process.returncode == 0, output
    assert "stopped" in output
    assert '"watching"' in policies
    assert (before[0], healthy) == (1, (0, "serving"))
    if not AS_ROOT:
        pytest.skip(
            "not root, so the image ran as the user of the tests and not as its own: that part is "
            "NOT tested"
        )
    for kind, number in zip(("Uid", "Gid"), image.user.split(":"), strict=True):
        assert re.search(rf"^{kind}:(\t{number}){{4}}$", status, re.MULTILINE), status
