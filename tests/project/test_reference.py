from __future__ import annotations

from pathlib import Path

import pytest

from docs import generate


def test_reference_is_current() -> None:
    assert generate.PAGE.read_text() == generate.make_page(), "run make reference"


def test_generate_reports_and_replaces_stale_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "reference.md"
    page.write_text("old")
    monkeypatch.setattr(generate, "PAGE", page)

    stale = generate.main(["--check"]), page.read_text(), capsys.readouterr().err
    made = generate.main([]), generate.main(["--check"])

    assert stale == (1, "old", "reference.md is out of date: run python docs/generate.py\n")
    assert made == (0, 0)
    assert page.read_text() == generate.make_page()
