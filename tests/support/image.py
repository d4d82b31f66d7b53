"""Builds and runs the image without a container engine.

- Instructions are read from the Dockerfile; an unknown one fails.
- A stage's root is a folder; absolute paths of instructions are moved below it.
- A new virtual environment in front of PATH stands for the base image's Python, and this machine's
  C compiler for the builder's.
- A container is a process with the image's user and environment, which cannot write any file.

It does not show that the base image exists or that its libc suits the wheels.
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from string import Template
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from hatch_build import select_modules
from tests.support import ROOT
from tests.support.harness import PATIENCE

DOCKERFILE = ROOT / "Dockerfile"
AS_ROOT = os.getuid() == 0
# The only module that is compiled for the tested image: it has no imports, whose types would be
# checked, too.
COMPILED = "extproc/tallies.py"


def instructions() -> list[tuple[str, str]]:
    lines = (
        line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")
    )
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (keyword, rest.strip())
        for keyword, _, rest in (line.partition(" ") for line in joined.splitlines() if line)
    ]


def left_out(path: str, rules: list[str]) -> bool:
    """Whether .dockerignore excludes a path: the last rule for it or a folder above decides."""
    out = False
    for rule in rules:
        pattern = (
            re.escape(rule.removeprefix("!")).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
        )
        if re.fullmatch(f"{pattern}(?:/.*)?", path):
            out = not rule.startswith("!")
    return out


def ignore_rules() -> list[str]:
    return [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]


def compile_only(project: Path, module: str) -> None:
    """Limit compilation to one module in a copy of the project: all of them take minutes."""
    for path in select_modules(project / "extproc"):
        if path != module:
            with (project / path).open("a", encoding="utf-8") as file:
                file.write("\n# interpreted: left out of this build\n")


def send_context(target: Path) -> None:
    """Copy the files that a container engine would be sent."""
    rules = ignore_rules()

    def ignored(folder: str, names: list[str]) -> list[str]:
        return [
            name for name in names if left_out(str((Path(folder) / name).relative_to(ROOT)), rules)
        ]

    shutil.copytree(ROOT, target, ignore=ignored)


@dataclass
class Image:
    root: Path
    environment: dict[str, str]
    user: str = ""
    ports: Sequence[str] = ()
    health: Sequence[str] = ()
    entrypoint: Sequence[str] = ()
    command: Sequence[str] = ()


def build(folder: Path, path: str) -> Image:  # noqa: C901, PLR0912  # an instruction each
    """Carry out the Dockerfile in a folder; `path` is the base images' PATH.

    Stages share one root, because an environment runs only where it was made.
    """
    context, root, stage, workdir = folder / "context", folder / "root", "", "/"
    send_context(context)
    compile_only(context, COMPILED)
    image = Image(root, {})

    def move(text: str) -> str:
        return re.sub(r"(?<![\w./}*-])/(?=\w)", f"{root}/", text)

    for keyword, rest in instructions():
        match keyword:
            case "FROM":
                base, _, name = rest.partition(" AS ")
                assert base in ("${BUILD_IMAGE}", "${PYTHON_IMAGE}"), (
                    "a Python that we do not stand for"
                )
                if stage:
                    root.rename(folder / stage)
                root.mkdir()
                stage, workdir, image = name, "/", Image(root, {"PATH": path})
            case "WORKDIR":
                workdir = rest
                Path(move(workdir)).mkdir(parents=True)
            case "COPY":
                *sources, target = rest.split()
                origin = (
                    folder / sources.pop(0).removeprefix("--from=")
                    if rest.startswith("--from=")
                    else context
                )
                _copy(origin, sources, Path(move(str(PurePosixPath(workdir) / target))))
            case "RUN":
                environment = {**outside(), **image.environment}
                subprocess.run(
                    ["/bin/sh", "-c", move(rest)], cwd=move(workdir), env=environment, check=True
                )
            case "ENV":
                words = [
                    Template(word).substitute(image.environment) for word in shlex.split(move(rest))
                ]
                image.environment.update(
                    (name, value) for name, _, value in (word.partition("=") for word in words)
                )
            case "USER":
                image.user = rest
            case "EXPOSE":
                image.ports = rest.split()
            case "HEALTHCHECK":
                # The other form needs a shell
                image.health = json.loads(rest.partition(" CMD ")[2])
            case "ENTRYPOINT":
                image.entrypoint = json.loads(rest)
            case "CMD":
                image.command = json.loads(rest)
            case _:
                assert keyword in ("ARG", "LABEL"), f"{keyword} is not understood"
    shutil.rmtree(folder / "build")  # the image has to do without
    return image


def _copy(origin: Path, sources: Sequence[str], target: Path) -> None:
    for source in sources:
        found = origin / source.lstrip("/")
        if found.is_dir():
            shutil.copytree(found, target, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy(found, target)


def outside() -> dict[str, str]:
    needed = re.compile(r"PIP_(?!FIND_LINKS)\w+|\w+_PROXY", re.IGNORECASE)
    return {name: value for name, value in os.environ.items() if needed.fullmatch(name)}


def numbers(user: str) -> dict[str, Any]:
    uid, _, gid = user.partition(":")
    return {"user": int(uid), "group": int(gid), "extra_groups": []} if AS_ROOT else {}


def base_python(user: str) -> str:
    """An interpreter that the image's user can run; the tests' may be in another user's home."""
    test = "import ensurepip, sys; assert sys.version_info >= (3, 11)"
    for candidate in (
        f"{sysconfig.get_config_var('BINDIR')}/python3",
        "/usr/bin/python3",
        "/usr/local/bin/python3",
    ):
        try:
            subprocess.run(
                [candidate, "-c", test], capture_output=True, check=True, cwd="/", **numbers(user)
            )
        except (OSError, subprocess.CalledProcessError):
            continue
        return candidate
    pytest.skip("no Python 3.11 with ensurepip that every user may run: the image is NOT tested")


def find_compiler(python: str) -> bool:
    code = "import sysconfig as s; print(s.get_path('include'), s.get_config_var('CC').split()[0])"
    include, compiler = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    return Path(include, "Python.h").exists() and shutil.which(compiler) is not None


needs_a_compiler = pytest.mark.skipif(
    not find_compiler(sys.executable), reason="no C compiler works here: NOT tested"
)


class Container:
    def __init__(self, image: Image) -> None:
        self._image = image
        self._environment = {**image.environment, "LOOPGUARD_DRAIN_DELAY": "0"}
        for name in ("LOOPGUARD_LISTEN", "LOOPGUARD_ADMIN"):
            host, _, port = image.environment[name].rpartition(":")
            assert host == "0.0.0.0", "unreachable from outside"  # noqa: S104  # compared
            assert port in image.ports
            with socket.create_server((host, 0)) as free:
                self._environment[name] = f"{host}:{free.getsockname()[1]}"

    def start(self, words: Sequence[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["/usr/bin/prlimit", "--fsize=0", *words],  # it may write into pipes, not into files
            cwd=self._image.root,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **numbers(self._image.user),
        )

    def run(self, words: Sequence[str]) -> tuple[int, str]:
        process = self.start(words)
        output, _ = process.communicate(timeout=PATIENCE)
        return process.returncode, output.strip()

    def get(self, path: str) -> str:
        port = self._environment["LOOPGUARD_ADMIN"].rpartition(":")[2]
        try:
            with urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE) as answer:
                text: str = answer.read().decode()
                return text
        except URLError:
            return ""
