"""Builds and runs the image without a container engine.

- Instructions are read from the Dockerfile; an unknown one fails.
- A stage's root is a folder; absolute paths of instructions are moved below it.
- A new virtual environment in front of PATH stands for the base image's Python, and this machine's C compiler for the
  builder's.
- A container is a process with the image's user and environment, which cannot write any file.

It does not show that the base image exists or that its libc suits the wheels.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
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
COMPILED = "extproc/tallies.py"
"""What is compiled of the image that is tested: it imports nothing, whose types would be looked at as well."""


def instructions() -> list[tuple[str, str]]:
    lines = (line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#"))
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(keyword, rest.strip()) for keyword, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def left_out(path: str, rules: list[str]) -> bool:
    """Whether .dockerignore excludes a path: the last rule that matches the path or a folder above it decides."""
    out = False
    for rule in rules:
        pattern = re.escape(rule.removeprefix("!")).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
        if re.fullmatch(f"{pattern}(?:/.*)?", path):
            out = not rule.startswith("!")
    return out


def ignore_rules() -> list[str]:
    return [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]


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
        return [name for name in names if left_out(str((Path(folder) / name).relative_to(ROOT)), rules)]

    shutil.copytree(ROOT, target, ignore=ignored)


@dataclass
class Image:
    root: Path
    environment: dict[str, str]
    folder: str = "/"
    labels: dict[str, str] = field(default_factory=dict)
    user: str = ""
    ports: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def path(self, text: str) -> Path:
        return self.root / (PurePosixPath(self.folder) / text).relative_to("/")

    def moved(self, text: str) -> str:
        return re.sub(r"(?<![\w./}*-])/(?=\w)", f"{self.root}/", text)


class Build:
    def __init__(self, folder: Path, path: str) -> None:
        self._folder = folder
        self._path = path
        self._stages: dict[str, Path] = {}
        self._name = ""
        self._arguments: dict[str, str] = {}
        send_context(folder / "context")
        compile_only(folder / "context", COMPILED)

    def run(self) -> Image:
        carry_out: dict[str, Callable[[str], None]] = {
            "ARG": self._arg,
            "FROM": self._from,
            "WORKDIR": self._workdir,
            "COPY": self._copy,
            "RUN": self._run,
            "ENV": self._env,
            "LABEL": lambda rest: self.image.labels.update(self._pairs(rest)),
            "EXPOSE": lambda rest: self.image.ports.extend(rest.split()),
            "USER": lambda rest: setattr(self.image, "user", rest),
            "HEALTHCHECK": lambda rest: setattr(self.image, "health", exec_form(rest.partition(" CMD ")[2])),
            "ENTRYPOINT": lambda rest: setattr(self.image, "entrypoint", exec_form(rest)),
            "CMD": lambda rest: setattr(self.image, "command", exec_form(rest)),
        }
        for keyword, rest in instructions():
            carry_out[keyword](rest)
        for stage in self._stages.values():  # the image has to do without them
            shutil.rmtree(stage)
        return self.image

    def _arg(self, rest: str) -> None:
        name, _, default = rest.partition("=")
        self._arguments[name] = default

    def _from(self, rest: str) -> None:
        """Stages share one folder, because an environment runs only where it was made."""
        base, _, name = rest.partition(" AS ")
        assert base in ("${BUILD_IMAGE}", "${PYTHON_IMAGE}"), "a Python that we do not stand for"
        root = self._folder / "root"
        if self._name:
            self._stages[self._name] = root.rename(self._folder / f"stage-{self._name}")
        root.mkdir()
        self._name = name or "image"
        self.image = Image(root, {"PATH": self._path})

    def _workdir(self, rest: str) -> None:
        self.image.folder = rest
        self.image.path("").mkdir(parents=True)

    def _copy(self, rest: str) -> None:
        flags = [word for word in rest.split() if word.startswith("--")]
        *sources, target = (word for word in rest.split() if not word.startswith("--"))
        origin = self._folder / "context"
        for flag in flags:
            name, _, value = flag.partition("=")
            assert name == "--from", f"{flag} is not understood"
            origin = self._stages[value]
        for source in sources:
            found = origin / source.lstrip("/")
            if found.is_dir():
                shutil.copytree(found, self.image.path(target), symlinks=True, dirs_exist_ok=True)
            else:
                assert target.endswith("/"), "else it is not a folder"
                shutil.copy(found, self.image.path(target))

    def _run(self, rest: str) -> None:
        environment = {**outside(), **self._arguments, **self.image.environment}
        done = subprocess.run(
            ["/bin/sh", "-c", self.image.moved(rest)],
            cwd=self.image.path(""),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"RUN {rest}\n{done.stdout}{done.stderr}"

    def _env(self, rest: str) -> None:
        self.image.environment.update(self._pairs(self.image.moved(rest)))

    def _pairs(self, rest: str) -> dict[str, str]:
        known = {**self._arguments, **self.image.environment}
        words = (Template(word).substitute(known) for word in shlex.split(rest))
        return {name: value for name, _, value in (word.partition("=") for word in words)}


def exec_form(text: str) -> list[str]:
    words: list[str] = json.loads(text)
    return words


def outside() -> dict[str, str]:
    needed = re.compile(r"PIP_(?!FIND_LINKS)\w+|\w+_PROXY", re.IGNORECASE)
    return {name: value for name, value in os.environ.items() if needed.fullmatch(name)}


def numbers(user: str) -> dict[str, Any]:
    uid, _, gid = user.partition(":")
    return {"user": int(uid), "group": int(gid), "extra_groups": []} if AS_ROOT else {}


def base_python(user: str) -> str:
    """An interpreter that the image's user can run; that of the tests may be in another user's home."""
    test = "import ensurepip, sys; assert sys.version_info >= (3, 11)"
    for candidate in (f"{sysconfig.get_config_var('BINDIR')}/python3", "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            subprocess.run([candidate, "-c", test], capture_output=True, check=True, cwd="/", **numbers(user))
        except (OSError, subprocess.CalledProcessError):
            continue
        return candidate
    pytest.skip("no Python 3.11 with ensurepip that every user may run: the image is NOT tested")


def find_compiler(python: str) -> bool:
    code = "import sysconfig as s; print(s.get_path('include'), s.get_config_var('CC').split()[0])"
    include, compiler = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return Path(include, "Python.h").exists() and shutil.which(compiler) is not None


needs_a_compiler = pytest.mark.skipif(not find_compiler(sys.executable), reason="no C compiler works here: NOT tested")


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

    def start(self, words: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["/usr/bin/prlimit", "--fsize=0", *words],  # it may write into pipes, not into files
            cwd=self._image.root,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **numbers(self._image.user),
        )

    def run(self, words: list[str]) -> tuple[int, str]:
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
