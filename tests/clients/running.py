"""Installs a client and runs it through the real Envoy and Loopguard."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.clients.catalog import DONE, NPM, Client
from tests.clients.model import TASK, Given, Model, serve_model
from tests.support import ROOT
from tests.support.harness import Stack, stack

INSTALLED: Final = ROOT / ".venv" / "clients"
_MOST_SECONDS: Final = 240
# Seconds that a client may run in all, and after a refusal; then it is killed.
_AFTER_REFUSAL: Final = 60

# Path prefixes by script, as behind a gateway.
_PREFIXES: Final = {"obey": "/gateway", "work": "/teams/a/llm"}

_FOLDER_OF_COMMANDS: Final = {NPM: "node_modules/.bin"}
_MARK: Final = "recursive_loop_detected"
_OF_TERMINALS: Final = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|[\s│┃|╎]+")


class NotInstalled(Exception):
    pass


class Run(NamedTuple):
    """A run of a client.

    Attributes:
        script: what the model did.
        given: what it gave and read, by conversation.
        refused: number of steps before the first refusal; 0 for none.
        retries: number of requests refused after the first one.
        acted: number of requests that Loopguard acted on.
        seconds: from the first refusal, else from the start, to the end.
        killed: it did not end by itself.
        shown: the refusal's message was on its screen.
        code: exit code.
        finished: the model's last words were on its screen.
        compacted: the client asked the model for a summary of its history.
        told: the agent that should have started another has read why it was not started.
        requests: number of model requests.
        turns: number of those that are turns of an agent.
        screen: its output.
    """

    script: str
    given: Mapping[str, Given]
    refused: int
    retries: int
    acted: int
    seconds: float
    killed: bool
    shown: bool
    code: int
    finished: bool
    compacted: bool
    told: bool
    requests: int
    turns: int
    screen: str


def install(client: Client) -> Path:
    """Install a client unless it is. Returns the folder of its commands; raises NotInstalled."""
    folder = INSTALLED / client.folder
    commands = folder / _FOLDER_OF_COMMANDS.get(client.source, "bin")
    stamp, wanted = folder / "installed", "\n".join(client.packages)
    if stamp.exists() and stamp.read_text() == wanted:
        return commands
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if client.source == NPM:
        if shutil.which("npm") is None:
            raise NotInstalled("npm is not on this machine")
        _try(
            "npm",
            "install",
            "--prefix",
            str(folder),
            "--no-audit",
            "--no-fund",
            "--loglevel",
            "error",
            *client.packages,
        )
    else:
        _try(sys.executable, "-m", "venv", str(folder))
        _try(
            str(commands / "python"),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            *client.packages,
        )
    stamp.write_text(wanted)
    return commands


def _try(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise NotInstalled(f"{command[0]} failed: {lines[-1] if lines else done.returncode}")


class Zoo(NamedTuple):
    client: Client
    commands: Path
    model: Model
    stack: Stack


@contextlib.contextmanager
def opened(
    client: Client, commands: Path, limits: Mapping[str, object] | None = None
) -> Iterator[Zoo]:
    """Envoy and Loopguard before a model, with the preset of `init` or with session limits."""
    command = [str(Path(sys.executable).parent / "loopguard"), "init", "--preset", "agents"]
    policy = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    if limits is not None:
        limited = {
            "session_limits": {**limits, "reject_status": "auto"},
            "limit_keys": ["credential"],
        }
        policy = {"id": "limits", "spec": {"selector": {"pathPrefix": "/"}, **limited}}
    model = Model(client)
    with serve_model(model) as port, stack(policy, upstream=f"127.0.0.1:{port}") as guarded:
        yield Zoo(client, commands, model, guarded)


def run(zoo: Zoo, script: str) -> Run:
    client, envoy = zoo.client, zoo.stack.envoy
    with tempfile.TemporaryDirectory(prefix="zoo", ignore_cleanup_errors=True) as name:
        home, work = Path(name, "home"), Path(name, "work")
        home.mkdir()
        work.mkdir()
        for number in range(1, 21):
            (work / f"file{number}.txt").write_text(
                f"Chapter {number}\n" + f"The story of the {number}. day. " * number + "\n"
            )
        zoo.model.begin(script, str(work))
        known = {
            "{url}": f"http://127.0.0.1:{envoy.port}{_PREFIXES.get(script, '')}",
            "{key}": f"sk-ant-{client.name.replace('/', '-')}-{script}",
            "{home}": str(home),
            "{work}": str(work),
            "{bin}": str(zoo.commands),
            "{prompt}": TASK,
        }
        for path, text in client.files.items():
            file = Path(_fill(path, known))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(_fill(text, known))
        environment = {
            "PATH": f"{zoo.commands}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(home),
            "TMPDIR": str(home),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "COLUMNS": "1000",
            "LOOPGUARD_ZOO_URL": known["{url}"],
            **{
                name: value
                for name, value in os.environ.items()
                if name.startswith("SSL_CERT") or name == "NODE_EXTRA_CA_CERTS"
            },
            **{name: _fill(value, known) for name, value in client.environment.items()},
        }
        if client.before:
            before = [_fill(word, known) for word in client.before]
            subprocess.run(
                before,
                cwd=work,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=60,
                check=False,
            )
        seen = len(_list_entries(zoo.stack))
        return _watch(
            zoo, [_fill(word, known) for word in client.command], environment, Path(name), seen
        )


def _watch(
    zoo: Zoo, command: list[str], environment: Mapping[str, str], folder: Path, seen: int
) -> Run:
    screen = folder / "screen"
    started = time.time()
    refusals: list[float] = []
    with screen.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder / "work",
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        while process.poll() is None:
            now = time.time()
            refusals = [entry.time for entry in _list_entries(zoo.stack)[seen:] if entry.refused]
            if now > started + _MOST_SECONDS or (refusals and now > refusals[0] + _AFTER_REFUSAL):
                break
            time.sleep(0.05)
        ended = time.time()
    finally:
        killed = process.poll() is None
        with contextlib.suppress(ProcessLookupError):
            # The whole session: some clients leave helpers behind
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        _end_strays(folder / "home")
    time.sleep(0.2)  # until Envoy has written its log
    entries = _list_entries(zoo.stack)[seen:]
    refusals = [entry.time for entry in entries if entry.refused]
    model, text = zoo.model, screen.read_text(errors="replace")
    plain = _OF_TERMINALS.sub("", text)
    return Run(
        model.script,
        model.given,
        len(
            [
                step
                for given in model.given.values()
                for step in given.steps
                if step < refusals[0] + 0.001
            ]
        )
        if refusals
        else 0,
        max(len(refusals) - 1, 0),
        len([entry for entry in entries if entry.acted]),
        ended - (refusals[0] if refusals else started),
        killed,
        _MARK in plain,
        code,
        _OF_TERMINALS.sub("", DONE) in plain and model.ended,
        model.compacted,
        model.told,
        model.requests,
        model.turns,
        text,
    )


def _end_strays(home: Path) -> None:
    """End processes that a client has started in sessions of their own, such as cline's daemon."""
    mark = f"HOME={home}\0".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark in environment.read_bytes():
                os.kill(int(environment.parent.name), signal.SIGKILL)


def _fill(text: str, known: Mapping[str, str]) -> str:
    for name, value in known.items():
        text = text.replace(name, value)
    return text


class _Entry(NamedTuple):
    time: float
    refused: bool
    acted: bool


def _list_entries(guarded: Stack) -> list[_Entry]:
    found = []
    for line in guarded.envoy.output().splitlines():
        if line.startswith("{") and line.endswith("}"):
            entry: dict[str, Any] = json.loads(line)
            moment = datetime.fromisoformat(entry["time"]).timestamp()
            action = entry.get("loop_action") or ""
            # This status sends a client from WebSockets to HTTP
            if entry["status"] != HTTPStatus.UPGRADE_REQUIRED:
                found.append(_Entry(moment, action == "reject", bool(action)))
    return found
