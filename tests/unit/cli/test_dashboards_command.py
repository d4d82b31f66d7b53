"""`loopguard dashboards` writes what the chart installs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.chart import CHART
from tests.support.command import Run


def test_dashboards_writes_what_the_chart_installs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a" / "b"

    run = Run(capsys, "dashboards", str(folder))

    installed = {path.name: path.read_bytes() for path in (*CHART.glob("dashboards/*"), *CHART.glob("alerts/*"))}
    written = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert (run.code, sorted(run.out.splitlines())) == (0, sorted(map(str, folder.iterdir())))
    assert b"slack_configs" in written.pop("alertmanager.yaml")
    assert written == installed


def test_changed_file_is_only_replaced_with_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = tmp_path / next(CHART.glob("alerts/*")).name
    rules.write_text("mine")

    refused, left = Run(capsys, "dashboards", str(tmp_path)), list(tmp_path.iterdir())
    again = [Run(capsys, "dashboards", *flags, str(tmp_path)).code for flags in (["--force"], [])]

    assert (refused.code, refused.complaint) == (2, f"loopguard: {rules}: exists with other content; --force replaces it")
    assert (left, again) == ([rules], [0, 0])
    assert "LoopguardLoopSurge" in rules.read_text()


def test_folder_that_is_a_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "file").write_text("")

    run = Run(capsys, "dashboards", str(file))

    assert (run.code, run.complaint) == (2, f"loopguard: {file}: File exists")
