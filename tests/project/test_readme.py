"""README and docs: commands run, examples load, links work.

A reader types the console lines of a page from top to bottom, in a copy of the project. Addresses
are free ones of this machine, and commands that cannot run here are in NOT_TYPED and checked
otherwise.
"""

import os
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from doctest import ELLIPSIS, OutputChecker
from functools import cache
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import pytest
import trustme
import yaml
from redis import CredentialProvider

from extproc.cli.commands import COMMANDS
from extproc.cli.main import main
from tests.support import ROOT
from tests.support.chart import CHART, merged, rendered
from tests.support.harness import Process, Upstream, eventually
from tests.support.servers import Server, free_port

pytestmark = pytest.mark.compiled  # readers start the command, as a wheel installs it

README = ROOT / "README.md"
REFERENCE = ROOT / "docs" / "reference.md"
PAGES = [README, ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md")), CHART / "README.md"]

_FENCE = re.compile(
    r"^```(?P<language>\w*)(?: (?P<name>\S+))?\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


every_page = pytest.mark.parametrize("page", PAGES, ids=page_id)


class Example(NamedTuple):
    """A fenced block: its language, the file that the text names, and its text."""

    language: str
    name: str
    text: str


def read_examples(page: Path, language: str) -> list[Example]:
    found = (
        Example(match["language"], match["name"] or "", match["text"])
        for match in _FENCE.finditer(page.read_text())
    )
    return [example for example in found if example.language == language]


def read_prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


class Line(NamedTuple):
    command: str
    shown: str


def read_lines(page: Path) -> Iterator[Line]:
    for block in read_examples(page, "console"):
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command = re.match(r"(?:.*\\\n)*.*\n", part)
            assert command is not None
            yield Line(command[0].strip(), part[command.end() :])


# ---- What cannot be typed here


@cache
def read_help() -> str:
    """The help of all commands, and the source of the bench's."""
    with redirect_stdout(StringIO()) as told:
        for command in (*COMMANDS, "canary status"):
            with suppress(SystemExit):
                main([*command.split(), "--help"])
    return told.getvalue() + (ROOT / "tests" / "bench" / "__main__.py").read_text()


def find_unknown_flags(flags: Iterable[str]) -> list[str]:
    return [flag for flag in sorted(set(flags)) if not re.search(rf"{flag}\b", read_help())]


def _has_flags(command: str) -> None:
    assert find_unknown_flags(re.findall(r"--[a-z0-9-]+", command)) == []


def _has_a_project(command: str) -> None:
    extras = re.fullmatch(r"\.(?:\[(\w+)\])?", shlex.split(command, comments=True)[-1])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras is not None
    assert extras[1] is None or extras[1] in project["optional-dependencies"]


def _has_an_image(command: str) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    ports = re.findall(r"--publish \d+:(\d+)", command)
    arguments = re.sub(r"^docker run .*? loopguard\b", "", command).split()
    mounted = re.findall(r"--volume \S+?:([^\s:]+)", command)

    assert set(ports) <= set(
        re.findall(r"\d+", re.findall(r"^EXPOSE (.*)$", dockerfile, re.MULTILINE)[0])
    )
    assert all(path in arguments for path in mounted)
    assert not mounted or arguments[0] in COMMANDS


def _renders(command: str) -> None:
    words = shlex.split(command.partition("|")[0], comments=True)
    assert ROOT / words[3] == CHART
    values: dict[str, Any] = {}
    for place, value in (pair.split("=") for flag, pair in pairwise(words) if flag == "--set"):
        below: Any = value
        for step in reversed(place.split(".")):
            below = {step: below}
        values = merged(values, below)
    made = rendered(values)
    templates = [name for flag, name in pairwise(words) if flag == "-s"]
    assert [name for name in templates if f"loopguard/{name}" not in made] == []


class Instead(NamedTuple):
    why: str
    check: Callable[[str], None]


# By the start of the command.
NOT_TYPED: Mapping[str, Instead] = {
    "make bench": Instead("it measures for minutes, and nothing else may run then", _has_flags),
    "make prompt-cache": Instead("it installs real clients and runs them for minutes", _has_flags),
    "loopguard canary": Instead(
        "its exit code says what it found; tests/doors/operator/test_canary_stack.py asks",
        _has_flags,
    ),
    "LOOPGUARD_COMPILED=1 pip install": Instead("it would compile for minutes", _has_a_project),
    "pip install": Instead("it would change the environment that the tests run in", _has_a_project),
    "docker": Instead(
        (
            "it takes a Docker daemon and a registry; tests/project/test_dockerfile.py reads the "
            "Dockerfile"
        ),
        _has_an_image,
    ),
    "helm": Instead("it takes a cluster", _renders),
}


def _instead(command: str) -> Instead | None:
    return next(
        (instead for start, instead in NOT_TYPED.items() if command.startswith(start)), None
    )


# ---- The reader


@dataclass(frozen=True)
class Stays:
    """A command that runs until it is ended.

    Attributes: ready: output after which the reader continues. ends: commands that the reader
    ends first, because they use the same ports.
    """

    ready: str
    ends: tuple[str, ...]


# By the start of the command. Each has a terminal of its own.
STAYING: Mapping[str, Stays] = {
    "make run": Stays("Ctrl-C stops everything", ("make run",)),
    "loopguard serve": Stays("serving listen=", ("make run", "loopguard serve")),
    "envoy": Stays("all dependencies initialized. starting workers", ("make run", "envoy")),
}

_DEMO = "127.0.0.1:10000"
_PROVIDER = "api.anthropic.com:443"
_UPSTREAM = "127.0.0.1:8080"
_VALKEY = "10.0.0.5:6379"


# A reader's `envoy`: the real one, with patience for a busy machine.
_PATIENT_ENVOY = f"""#!{sys.executable}
import json, os, sys
sys.path.append({str(ROOT)!r})
import yaml
from tests.support.harness import ENVOY, be_patient
arguments = sys.argv[1:]
if "-c" in arguments:
    place = arguments.index("-c") + 1
    with open(arguments[place]) as file:
        configuration = yaml.safe_load(file)
    be_patient(configuration)
    arguments[place] = arguments[place] + ".patient.json"
    with open(arguments[place], "w") as file:
        json.dump(configuration, file)
os.execv(ENVOY, [ENVOY, *arguments])
"""

# A reader's `claude`: an agent on the provider's SDK that repeats a failing call.
_CLAUDE = f"""#!{sys.executable}
import anthropic
turn = [
    {{"role": "assistant", "content": [
        {{"type": "tool_use", "id": "a", "name": "read", "input": {{"path": "app.py"}}}}
    ]}},
    {{"role": "user", "content": [
        {{"type": "tool_result", "tool_use_id": "a", "content": "error: no such file"}}
    ]}},
]
messages = [{{"role": "user", "content": "What does app.py do?"}}, *turn * 3]
anthropic.Anthropic(api_key="key").messages.create(model="m", max_tokens=9, messages=messages)
"""


class Reader:
    def __init__(self, folder: Path, page: Path, addresses: Mapping[str, str]) -> None:
        self.folder = folder
        self._addresses = {
            **addresses,
            "/run/loopguard": str(folder),
            "127.0.0.1:9911": "127.0.0.1:0",
            "127.0.0.1:9912": "127.0.0.1:0",
        }
        self._staying: dict[str, Process] = {}
        self._terminals = 0
        self._envoy_admin = f"127.0.0.1:{free_port()}"
        programs = folder / "bin"
        programs.mkdir()
        for program, text in (("envoy", _PATIENT_ENVOY), ("claude", _CLAUDE)):
            (programs / program).write_text(text)
            (programs / program).chmod(0o755)
        path = [str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]
        self._environment = {
            "PATH": os.pathsep.join(path),
            "HOME": str(folder),
            "CLAUDE_CONFIG_DIR": str(folder / ".claude"),
            "LOOPGUARD_LISTEN": f"127.0.0.1:{free_port()}",
            "LOOPGUARD_ADMIN": f"127.0.0.1:{free_port()}",
            "LOOPGUARD_DRAIN_DELAY": "0",
        }
        (folder / ".claude").mkdir()
        (folder / ".claude" / "projects").symlink_to(
            ROOT / "examples" / "transcripts" / "claude-code"
        )
        for name in ("envoy", "examples", "helm"):
            (folder / name).symlink_to(ROOT / name)
        self._save_examples(page)

    def _save_examples(self, page: Path) -> None:
        (self.folder / "policies").mkdir()
        for number, example in enumerate(read_examples(page, "json")):
            (self.folder / (example.name or f"policies/{number}.json")).write_text(example.text)
        if not any((self.folder / "policies").iterdir()):
            shutil.copy(ROOT / "envoy" / "policy.json", self.folder / "policies")
        shutil.copy(ROOT / "envoy" / "policy.json", self.folder / "bundle.json")

    def type(self, command: str) -> str:
        """Run a command, which must succeed. Returns its output, nothing for one that stays."""
        here = self._localise(command)
        if stays := next(
            (stays for start, stays in STAYING.items() if command.startswith(start)), None
        ):
            for typed in [typed for typed in self._staying if typed.startswith(stays.ends)]:
                self._staying.pop(typed).stop()
            self._leave_running(command, here).wait_for(stays.ready)
            if any(typed.startswith("envoy") for typed in self._staying):
                eventually(self._is_used, "Loopguard is healthy for Envoy")
            return ""
        environment = {**os.environ, **self._environment}
        done = subprocess.run(
            ["bash", "-c", here],
            check=False,
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.replace("\r\n", "\n")

    def _localise(self, command: str) -> str:
        for theirs, ours in self._addresses.items():
            command = command.replace(theirs, ours)
        if command.startswith("loopguard envoy-config"):
            listen = (
                ""
                if "--snippet" in command
                else f"--listen {self._addresses[_DEMO]} --admin {self._envoy_admin}"
            )
            endpoint = self._environment["LOOPGUARD_LISTEN"]
            return command.replace("envoy-config", f"envoy-config {listen} --endpoints {endpoint}")
        if command.startswith("make run"):
            given = re.search(r"ARGS='(.*?)'", command)
            ports = (
                f"--port {self._addresses[_DEMO].rpartition(':')[2]} --envoy-admin-port 0 "
                "--loopguard-port 0"
            )
            flags = (
                f"{ports} --loopguard-admin-port 0 --upstream-port 0 {given[1] if given else ''}"
            )
            return f"{shlex.quote(sys.executable)} envoy/demo.py {flags}"
        if command.startswith("make demo-agent"):
            (given,) = re.findall(r"ARGS='(.*?)'", command)
            return f"{shlex.quote(sys.executable)} envoy/agent_demo.py {given}"
        return (
            command.replace("envoy -c", "envoy --use-dynamic-base-id -c")
            if command.startswith("envoy")
            else command
        )

    def _leave_running(self, typed: str, command: str) -> Process:
        self._terminals += 1
        log = self.folder / f"terminal-{self._terminals}.log"
        process = self._staying[typed] = Process(
            ["bash", "-c", f"cd {self.folder} && exec {command}"], log, self._environment
        )
        return process

    def _is_used(self) -> bool:
        with urlopen(f"http://{self._envoy_admin}/clusters") as answer:
            return (
                "\nloopguard::" in (told := answer.read().decode())
                and "health_flags::/failed" not in told
            )

    def end(self) -> list[str]:
        """Close all terminals. Returns the commands that had ended by themselves."""
        ended = [command for command, process in self._staying.items() if not process.runs()]
        for process in reversed(self._staying.values()):
            process.stop()
        return ended


@pytest.fixture(scope="session")
def valkey() -> Iterator[Server]:
    made = Server()
    yield made
    made.stop()


@pytest.fixture
def reader(page: Path, valkey: Server) -> Iterator[Reader]:
    authority, tls = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(tls)
    upstream, provider = Upstream(), Upstream(tls)
    with tempfile.TemporaryDirectory(
        prefix="lgread"
    ) as folder:  # its name is short enough for a socket's path
        authority.cert_pem.write_to_path(f"{folder}/ca.pem")
        addresses = {
            _DEMO: f"127.0.0.1:{free_port()}",
            _UPSTREAM: upstream.address,
            _PROVIDER: (
                f"{provider.address.replace('127.0.0.1', 'localhost')} --upstream-tls "
                f"--upstream-ca {folder}/ca.pem"
            ),
            _VALKEY: valkey.address,
        }
        made = Reader(Path(folder), page, addresses)
        yield made
        made.end()
    upstream.stop()
    provider.stop()


# In a refusal; on a busy machine it may read otherwise.
_MOMENT = "within a second"


@pytest.mark.deep
@pytest.mark.skipif(
    shutil.which("curl") is None,
    reason="curl is not installed: the commands of README and docs are NOT tested",
)
@every_page
def test_commands_of_page_run(page: Path, reader: Reader) -> None:
    for command, shown in read_lines(page):
        if _instead(command) is None:
            printed = reader.type(command)

            wanted = shown.replace(_MOMENT, "within ...")
            matches = not shown or OutputChecker().check_output(
                wanted, f"{printed.strip()}\n", ELLIPSIS
            )
            assert matches, f"$ {command}\n{printed}"

    assert reader.end() == []


NOT_HERE = {
    command: instead
    for page in PAGES
    for command, _ in read_lines(page)
    if (instead := _instead(command))
}


@pytest.mark.parametrize("command", NOT_HERE)
def test_untyped_commands_exist(command: str) -> None:
    NOT_HERE[command].check(command)


# ---- Examples


@every_page
def test_policies_of_page_are_valid(reader: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["validate", str(reader.folder / "policies")])

    told = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
    assert (code, told) == (0, [])


@every_page
def test_yaml_of_page_parses(page: Path) -> None:
    assert [
        each
        for each in read_examples(page, "yaml")
        if not isinstance(yaml.safe_load(each.text), dict | list)
    ] == []


def test_credential_provider_in_docs_works() -> None:
    (example,) = read_examples(ROOT / "docs" / "operations.md", "python")
    names: dict[str, Any] = {}
    exec(example.text, names)  # noqa: S102  # the page's own text

    assert isinstance(names["make"](), CredentialProvider)


# ---- Completeness


def test_documented_flags_exist() -> None:
    named = {flag for page in PAGES for flag in re.findall(r"`(--[a-z0-9-]+)", page.read_text())}

    assert find_unknown_flags(named - {"--version", "--help", "--set"}) == []  # the last is Helm's


def test_documented_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    text = "\n".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"(?:`|^\$ )(?:\w+=\S+ )?make ([a-z-]+)", text, re.MULTILINE))

    assert "test-pure" in named
    assert [target for target in sorted(named) if f"\n{target}: " not in makefile] == []


# ---- Pages


def test_readme_links_every_page() -> None:
    text = README.read_text()

    assert [page_id(page) for page in PAGES[1:] if f"({page_id(page)})" not in text] == []


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", read_prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_links_resolve(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", read_prose(page)):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        file = page.parent / target if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(link)

    assert broken == []


def test_pictures_are_used() -> None:
    pictures = {path.name for path in (ROOT / "docs" / "images").iterdir()}
    shown = {
        name
        for page in PAGES
        for name in re.findall(r"images/([\w-]+[.](?:png|svg|webp))", page.read_text())
    }

    assert pictures == shown
