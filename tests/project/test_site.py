"""The documentation as a site: every page is there, links lead somewhere, and nothing is loaded from elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support import ROOT

MKDOCS = [sys.executable, "-m", "mkdocs", "build"]


def build(folder: Path, project: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build the site into a folder."""
    command = [*MKDOCS, "--config-file", str(project / ".mkdocs.yml"), "--site-dir", str(folder)]
    outside = {**os.environ, "NO_MKDOCS_2_WARNING": "1", **environment}
    return subprocess.run(command, env=outside, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, without warnings, and with an address of the sources."""
    folder = tmp_path_factory.mktemp("site")
    done = build(folder, SOURCE_URL="https://code.example.com/loopguard")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_in_the_menu(site: Path) -> None:
    """Each page of docs/ is built and can be found, and the first one is the README."""
    pages = {page.with_suffix(".html").name for page in (ROOT / "docs").glob("*.md")}
    menu = re.sub(r"!ENV \[.*\]", '""', (ROOT / ".mkdocs.yml").read_text())
    entries = yaml.safe_load(menu)["nav"]
    named = {name for each in entries for name in ([each] if isinstance(each, str) else next(iter(each.values())))}

    assert {page.name for page in site.glob("*.html")} == pages | {"index.html", "404.html"}
    assert {Path(name).with_suffix(".html").name for name in named} == pages | {"index.html"}
    assert "stops runaway AI agents at the gateway" in (site / "index.html").read_text()
    assert (site / "search" / "search_index.json").stat().st_size > 100_000


def test_nothing_comes_from_elsewhere(site: Path) -> None:
    """Scripts, styles, fonts and images are the site's own; only links that a reader follows leave it."""
    found = []
    for page in site.glob("*.html"):
        loaded = re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href|srcset)=\"?([^\" >]+)", page.read_text())
        assert loaded
        found += [(page.name, address) for address in loaded if re.match(r"(https?:)?//", address)]

    assert found == []


def test_links_to_files_beside_the_pages_lead_to_the_sources(site: Path) -> None:
    """Links between pages stay within the site."""
    text = (site / "index.html").read_text()

    assert 'href="https://code.example.com/loopguard/blob/main/helm/loopguard/README.md"' in text
    assert 'href="mesh.html' in text


@pytest.mark.deep
def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    """Strict: a page that links to one that is not there is no site."""
    for name in (".mkdocs.yml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs" / "scan.md").open("a") as page:
        page.write("\n[gone](no-such-page.md)\n")

    done = build(tmp_path / "site", tmp_path)

    assert done.returncode != 0
    assert "no-such-page.md" in done.stdout + done.stderr
