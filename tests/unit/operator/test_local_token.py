"""The token that a server shares with its user's commands, and how a page's commands reach it."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.requests import Request

from extproc.operator.admin.credentials import Asking, Credentials
from extproc.operator.admin.local_token import name_token_file, read_token, write_token

PORT = 9900


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "loopguard"


def test_each_start_writes_a_new_token() -> None:
    path = write_token(PORT)
    first = read_token(PORT)

    assert write_token(PORT) == path == name_token_file(PORT)
    assert re.fullmatch(r"[\w-]{43}", first)
    assert read_token(PORT) not in ("", first)
    assert read_token(PORT + 1) == ""


@pytest.mark.parametrize("folder", ["", "missing", "another user's"])
def test_temporary_folder_is_used_without_a_runtime_folder(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if folder == "another user's":
        path = tmp_path / folder if os.getuid() == 0 else Path("/")
        if os.getuid() == 0:
            path.mkdir()
            os.chown(path, 1, 1)
        folder = str(path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", folder)

    assert name_token_file(PORT).parent.name == f"loopguard-{os.getuid()}"


def _link(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to(path.with_name("other"))


def _link_folder(path: Path) -> None:
    path.parent.rename(path.parents[1] / "other")
    path.parent.symlink_to(path.parents[1] / "other")


def _make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


UNSAFE: dict[str, Callable[[Path], None]] = {
    "others read it": lambda path: path.chmod(0o604),
    "a group reads it": lambda path: path.chmod(0o640),
    "a link": _link,
    "a pipe": _make_pipe,
    "others write into the folder": lambda path: path.parent.chmod(0o702),
    "a linked folder": _link_folder,
}


@pytest.mark.parametrize("name", UNSAFE)
def test_unsafe_token_file_is_not_read(name: str) -> None:
    UNSAFE[name](write_token(PORT))

    with pytest.raises(
        OSError,
        match=r"must be a (file|folder) of this user alone, with mode [67]00|Too many levels",
    ):
        read_token(PORT)
    if "folder" in name:
        with pytest.raises(PermissionError, match="must be a folder of this user alone"):
            write_token(PORT)


def _share(address: str) -> Credentials:
    made = Credentials("")
    made.share(write_token(PORT))
    made.local_address = address
    return made


def _configure(address: str) -> Credentials:
    path = name_token_file(PORT).parents[1] / "my tokens"
    path.write_text("correct-horse-battery-staple")
    made = Credentials(str(path))
    made.local_address = address
    return made


HERE = "Run the commands on the server's machine, as its user."


@pytest.mark.parametrize(
    ("make", "host", "admin", "token", "how"),
    [
        (lambda: _share("127.0.0.1:9900"), "tunnel:80", "", False, HERE),
        (lambda: _share("[::1]:9901"), "localhost:9901", " --admin '[::1]:9901'", False, HERE),
        (
            lambda: _configure("localhost:9900"),
            "rebound.example:9900",
            "",
            True,
            "Run the commands where the token file is.",
        ),
        (
            lambda: _configure(""),
            "lg:9900",
            " --admin lg:9900",
            False,
            "Add --token-file PATH to the commands",
        ),
        (
            lambda: Credentials("", "/run/a.sock"),
            "lg:9900",
            " --admin unix:/run/a.sock",
            False,
            HERE,
        ),
        (lambda: Credentials(""), "a;b", " --admin 'a;b'", False, "This server takes no orders"),
    ],
)
def test_page_says_how_to_give_orders(
    make: Callable[[], Credentials], host: str, admin: str, token: bool, how: str, tmp_path: Path
) -> None:
    request = Request({"type": "http", "headers": [(b"host", host.encode())]})

    told = make().explain(request)

    assert told == Asking(admin, f" --token-file '{tmp_path}/my tokens'" if token else "", told.how)
    assert told.how.startswith(how)
