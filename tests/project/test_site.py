"""`make docs`: the documentation as a site."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--config-file",
        str(ROOT / ".mkdocs.yml"),
        "--site-dir",
        str(folder),
    ]
    subprocess.run(command, check=True)  # strict: a broken link is an error
    return folder


def test_every_page_is_in_the_menu(site: Path) -> None:
    chapters = [
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "examples").glob("*/README.md"),
        ROOT / "helm/loopguard/README.md",
    ]
    pages = [
        path.relative_to(ROOT).as_posix()
        for path in (*chapters, ROOT / "README.md", ROOT / "CHANGELOG.md")
    ]
    menu = (ROOT / ".mkdocs.yml").read_text(encoding="utf-8")

    assert [page for page in pages if page not in menu] == []
    for page in pages:
        assert (
            (site / re.sub(r"README$", "index", page.removesuffix(".md")))
            .with_suffix(".html")
            .exists()
        ), page


def test_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href|srcset)=\"?([^\" >]+)",
            page.read_text(),
        )
        assert loaded
        assert [address for address in loaded if re.match(r"(https?:)?//", address)] == [], page
