"""Orders for a server without a token file, which shares a token with its user's commands."""

import html
import re
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from extproc.cli.main import main
from tests.support.documents import bundle, policy
from tests.support.harness import Loopguard, Stack, stack

POLICY = policy(
    "p", {"pathPrefix": "/"}, limit_keys=["header:x-user-id"], threshold_identical_requests=3
)
BROWSER = {"accept": "text/html"}


@pytest.fixture
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("runtime")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder / "loopguard"


@pytest.fixture
def running(runtime: Path) -> Iterator[Stack]:
    """Envoy and a server that was started as README starts it."""
    with stack(bundle(POLICY)) as made:
        assert runtime.is_dir()
        yield made


def ask(running: Stack, user: str) -> int:
    return running.send("/x", method="POST", body=b"{}", headers={"x-user-id": user}).status


def list_commands(loopguard: Loopguard) -> list[str]:
    page = loopguard.get("/", **BROWSER)[1]
    return [
        html.unescape(command) for command in re.findall(r"</button> <code>([^<]*)</code>", page)
    ]


def test_commands_on_the_page_run_without_a_token_flag(running: Stack) -> None:
    assert [ask(running, "bob") for _ in range(4)][-1] == 429
    page = running.loopguard.get("/", **BROWSER)[1]
    assert "as its user." in page
    (free,) = [
        command
        for command in list_commands(running.loopguard)
        if command.startswith("loopguard allow ")
    ]

    assert main(shlex.split(free)[1:]) == 0

    assert ask(running, "bob") == 200
    assert all(
        main(shlex.split(command)[1:]) == 0
        for command in dict.fromkeys(list_commands(running.loopguard))
    )
    assert f"--admin 127.0.0.1:{running.loopguard.admin_port}" in free


def test_localhost_means_127_0_0_1(running: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the name means ::1 first, another user could wait there for the token."""
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *more: resolve("::1" if host == "localhost" else host, *more),
    )

    assert (
        main(["block", "--tool", "t", "--admin", f"localhost:{running.loopguard.admin_port}"]) == 0
    )


def test_missing_token_file_asks_for_a_restart(
    running: Stack, runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = runtime.iterdir()
    assert f"admin_token_file={file} " in running.loopguard.output()
    file.unlink()

    assert main(["block", "--tool", "t", "--admin", running.loopguard.admin_url]) == 1

    assert f"503: {file}: No such file or directory; restart the server" in capsys.readouterr().err


def test_each_server_has_and_removes_its_own_token(runtime: Path, tmp_path: Path) -> None:
    servers = [Loopguard(tmp_path, listen=f"unix:{tmp_path}/{name}.sock") for name in "ab"]
    files = {int(file.stem): file.read_text() for file in runtime.iterdir()}
    for server in servers:
        server.stop()

    assert files.keys() == {server.admin_port for server in servers}
    assert len(set(files.values())) == 2
    assert list(runtime.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--admin", "0.0.0.0:0"], []])
def test_port_is_read_only_without_a_safe_folder(
    arguments: list[str], runtime: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If other machines can connect, or other users can use the folder; the page says so."""
    if not arguments:
        runtime.mkdir(mode=0o755)
    server = Loopguard(tmp_path, *arguments)
    try:
        assert main(
            ["block", "--tool", "t", "--admin", f"http://localhost:{server.admin_port}"]
        ) == (1 if arguments else 2)
        assert "This server takes no orders" in server.get("/", **BROWSER)[1]
        said = capsys.readouterr().err
        if arguments:
            assert "403: this port is read-only: start the server with --admin-token-file" in said
            assert "admin_token_file" not in server.output()
        else:
            assert f"{runtime} must be a folder of this user alone, with mode 700" in said
            assert "no orders over this admin port without --admin-token-file" in server.output()
    finally:
        server.stop()


def test_server_with_token_file_shares_no_token(runtime: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("correct-horse-battery-staple\n")
    server = Loopguard(tmp_path, "--admin-token-file", str(tokens))
    page = server.get("/", **BROWSER)[1]
    server.stop()

    assert "Run the commands where the token file is." in page
    assert not runtime.exists()
