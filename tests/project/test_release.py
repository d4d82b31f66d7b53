"""Reproducible wheels, and workflows that name no owner."""

import hashlib
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import ROOT
from tests.support.image import COMPILED, compile_only, needs_a_compiler, send_context

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
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
