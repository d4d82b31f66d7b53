"""Files in a policy folder that look like policies and are not read are named, never passed over in silence."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from extproc.cli.main import main
from extproc.metrics import Metrics
from extproc.policy.files import find_unread
from extproc.reload import Reloader
from extproc.settings import Settings
from tests.support.documents import policy

UNREAD = ("LEGAL.JSON", "agents", "policies.jsonl", "search.yaml", "shop.jsonc", "team/ops.yml", "team/ops.json.disabled")
PROSE = ("LICENSE", "README.md", "README.txt", "team/notes.rst", "agents.json~", ".hidden.yaml", ".git/config")
WHY = "is not read: policies are JSON, in files whose names end in .json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One policy that is read, and files beside it."""
    for name in (*UNREAD, *PROSE):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "agents.json").write_text(json.dumps(policy("a", {"pathPrefix": "/"}, limit_keys=["jwt:org"])))
    return tmp_path


def test_only_possible_policies_are_named(folder: Path) -> None:
    """Documentation, hidden files and leftovers of editors are not."""
    found = find_unread([str(folder)])

    assert sorted(error.file for error in found) == sorted(str(folder / name) for name in UNREAD)
    assert find_unread([str(folder / "search.yaml")]) == []


@pytest.mark.parametrize("flags", [[], ["--strict"]])
def test_validate_names_unread_files(folder: Path, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """As warnings, and with `--strict` as errors."""
    code = main(["validate", *flags, str(folder)])
    printed = capsys.readouterr()

    start = "" if flags else "warning: "
    assert code == len(flags)
    assert {f"{start}{folder / name}: /: {WHY}" for name in UNREAD} <= set(printed.err.splitlines())
    assert printed.out == ("" if flags else "good: 1 policy in 1 file\n")


def test_a_folder_without_json_names_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the error that nothing is read at all."""
    (tmp_path / "shop.yaml").write_text("id: shop")

    assert main(["validate", str(tmp_path)]) == 1
    assert f"warning: {tmp_path / 'shop.yaml'}: /: {WHY}" in capsys.readouterr().err


def test_explain_names_unread_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As every command that reads policies does."""
    main(["explain", "--policy", str(folder), "http://localhost/v1/models"])

    assert f"{folder / 'search.yaml'}: /: {WHY}" in capsys.readouterr().err


def test_serve_names_each_unread_file_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At start and when one appears, not at every reload."""

    def count(name: str) -> int:
        return [record.getMessage() for record in caplog.records].count(f"{folder / name}: /: {WHY}")

    with caplog.at_level(logging.WARNING, "loopguard"):
        reloader = Reloader(Settings(policy=(str(folder),)), Metrics())
        asyncio.run(reloader.reload(lambda _: None))
        (folder / "late.yaml").write_text("{}")
        asyncio.run(reloader.reload(lambda _: None))
        asyncio.run(reloader.reload(lambda _: None))

    assert [count(name) for name in (*UNREAD, "late.yaml")] == [1] * (len(UNREAD) + 1)
