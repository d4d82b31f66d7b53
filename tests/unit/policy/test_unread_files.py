"""Files in a policy folder that look like policies but are not read are named."""

import asyncio
import json
import logging
from pathlib import Path

import pytest

from extproc.metrics import Metrics
from extproc.policy.bundle import make_schema
from extproc.policy.files import find_unread
from extproc.reload import Reloader
from extproc.settings import Settings
from tests.support.command import Run, written
from tests.support.documents import policy

UNREAD = (
    "LEGAL.JSON",
    "agents",
    "policies.jsonl",
    "search.yaml",
    "shop.jsonc",
    "team/ops.yml",
    "team/ops.json.disabled",
)
PROSE = (
    "LICENSE",
    "README.md",
    "README.txt",
    "team/notes.rst",
    "agents.json~",
    ".hidden.yaml",
    ".git/config",
)
WHY = "is not read: policies are JSON, in files whose names end in .json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A policy that is read, the schema that it names, and files beside them."""
    for name in (*UNREAD, *PROSE):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    written(
        tmp_path / "agents.json",
        {"$schema": "./s.json", **policy("a", {"pathPrefix": "/"}, limit_keys=["jwt:org"])},
    )
    (tmp_path / "s.json").write_text(json.dumps(make_schema()))
    return tmp_path


def test_only_possible_policies_are_named_as_unread(folder: Path) -> None:
    assert sorted(error.file for error in find_unread([str(folder)])) == sorted(
        str(folder / name) for name in UNREAD
    )
    assert find_unread([str(folder / "search.yaml")]) == []


@pytest.mark.parametrize(("flags", "start"), [([], "warning: "), (["--strict"], "")])
def test_validate_names_unread_files(
    flags: list[str], start: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(capsys, "validate", *flags, str(folder))

    assert (run.code, run.out) == (len(flags), "" if flags else "good: 1 policy in 2 files\n")
    assert {f"{start}{folder / name}: /: {WHY}" for name in UNREAD} <= set(run.err.splitlines())
    assert (
        flags or f"note: {folder / 's.json'}: /: is a JSON Schema, so it has no policies" in run.err
    )


def test_other_commands_name_unread_files(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    explained = Run(capsys, "explain", "--policy", str(folder), "http://localhost/v1/models")
    empty = Run(capsys, "validate", str(tmp_path / "team"))

    assert f"{folder / 'search.yaml'}: /: {WHY}" in explained.err
    assert (empty.code, f"warning: {tmp_path / 'team/ops.yml'}: /: {WHY}" in empty.err) == (1, True)


def test_serve_names_each_unread_file_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "loopguard"):
        reloader = Reloader(Settings(policy=(str(folder),)), Metrics())
        asyncio.run(reloader.reload(lambda _: None))
        (folder / "late.yaml").write_text("{}")
        for _ in range(2):
            asyncio.run(reloader.reload(lambda _: None))

    assert [
        caplog.messages.count(f"{folder / name}: /: {WHY}") for name in (*UNREAD, "late.yaml")
    ] == [1] * (len(UNREAD) + 1)
