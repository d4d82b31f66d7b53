"""`loopguard dashboards`: what the chart installs, for those who have no Helm."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.cli.commands.dashboards import FILES
from extproc.cli.main import main
from tests.support.chart import CHART


def test_it_writes_what_the_chart_installs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Dashboard and alerts are the chart's own, to the byte, with an example beside them; the paths are printed."""
    folder = tmp_path / "a" / "b"

    code = main(["dashboards", str(folder)])

    assert code == 0
    assert capsys.readouterr().out.splitlines() == [str(folder / name) for name in FILES]
    installed = {path.name: path.read_bytes() for path in (*CHART.glob("dashboards/*"), *CHART.glob("alerts/*"))}
    written = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert b"slack_configs" in written.pop("alertmanager.yaml")
    assert written == installed


def test_it_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If a file has been changed, it stays and no other file is written, unless --force is given."""
    rules = tmp_path / FILES[1]
    rules.write_text("mine")

    refused = main(["dashboards", str(tmp_path)])
    error = capsys.readouterr().err
    kept = rules.read_text()
    forced = main(["dashboards", "--force", str(tmp_path)])
    again = main(["dashboards", str(tmp_path)])

    assert (refused, kept) == (2, "mine")
    assert error == f"loopguard: {rules}: exists with other content; --force replaces it\n"
    assert (forced, again) == (0, 0)
    assert "LoopguardLoopSurge" in rules.read_text()


def test_a_folder_that_cannot_be_one_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line and exit code 2."""
    (file := tmp_path / "file").write_text("")

    code = main(["dashboards", str(file)])

    assert code == 2
    assert capsys.readouterr().err == f"loopguard: {file}: File exists\n"
