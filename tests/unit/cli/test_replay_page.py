"""The page of `loopguard replay --html`: whole by itself, true to the report, and harmless whatever a log holds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.main import main
from extproc.cli.replay.page import draw_chart, render_page
from tests.support.access_logs import USER, make_record, write_lines
from tests.support.documents import bundle, policy

SCRIPT = "</title><script>document.title='owned'</script><img src=x onerror=alert(1)>\"'"

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


class Parsed(HTMLParser):
    """A page's tags with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep it."""
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        """Keep it."""
        self.text += data


def write_page(folder: Path, lines: list[dict[str, Any]]) -> str:
    """The page about a log."""
    document = bundle(policy("loud", {"pathPrefix": "/"}, **USER), policy("quiet", {"pathExact": "/none"}, **USER))
    (folder / "policies.json").write_text(json.dumps(document))
    (folder / "access.log").write_bytes(write_lines([*lines, "nonsense"]))
    arguments = ["--policy", str(folder / "policies.json"), "--html", str(folder / "page.html"), str(folder / "access.log")]
    assert main(["replay", *arguments]) == 0
    return (folder / "page.html").read_text()


def make_hostile(document: Any) -> Any:  # noqa: ANN401  # JSON
    """A report in which every text but the times is a script."""
    if isinstance(document, dict):
        kept = ("first", "last") if "lines" in document and "requests" in document else ()
        return {key: value if key in kept else make_hostile(value) for key, value in document.items()}
    if isinstance(document, list):
        return [make_hostile(value) for value in document]
    return SCRIPT if isinstance(document, str) else document


def make_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """A report that has something of everything."""
    write_page(folder, [make_record(number) for number in range(9)] + [make_record(headers={})])
    capsys.readouterr()
    main(["replay", "--policy", str(folder / "policies.json"), "--json", str(folder / "access.log")])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report | {"evicted": 1, "failures": ["ValueError"]}


def test_the_page_says_what_the_report_says(tmp_path: Path) -> None:
    """Each policy has a section, with a chart where there is something to be drawn, and the loops are in it."""
    page = Parsed(write_page(tmp_path, [make_record(number) for number in range(5)]))

    assert "loud" in page.text
    assert "quiet" in page.text
    assert "3 of 5 requests are part of a loop (60.00%)" in page.text
    assert "access.log:6" in page.text
    bars = [attributes["class"] for tag, attributes in page.tags if tag == "rect"]
    assert (bars.count("passed"), bars.count("refused")) == (2, 6)  # three of those are the caller's own


def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    """No script, no link, no image, nothing that is loaded; its own policy forbids the rest."""
    page = write_page(tmp_path, [make_record(number) for number in range(5)])
    parsed = Parsed(page)

    assert {tag for tag, _ in parsed.tags} & {"script", "link", "img", "iframe", "object", "a", "use", "image"} == set()
    assert [
        name for _, attributes in parsed.tags for name in attributes if name in {"src", "href"} or name.startswith("on")
    ] == []
    assert re.findall(r"url\(|@import|https?://", page) == []
    assert "default-src 'none'" in page


def test_whatever_is_in_a_log_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With scripts in every name of a report the page has the tags that it has without them."""
    report = make_report(tmp_path, capsys)
    report["policies"] = [{key: value for key, value in item.items() if key != "uncounted"} | {"uncounted": {SCRIPT: 1}}
                          for item in report["policies"]]  # fmt: skip

    plain, hostile = Parsed(render_page(report)), Parsed(render_page(make_hostile(report)))

    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in plain.tags]
    assert hostile.text.count("<script>") > 10


def test_a_log_of_one_moment_is_drawn() -> None:
    """A chart has no division by the length of a log that has none, and one request among thousands is to be seen."""
    timeline = {"seconds": 1, "points": [[100, 10_000, 1, 0, 0, 0]]}

    chart = draw_chart(timeline, (100.5, 100.5), 900, 150, [2, 3, 4, 5, 1])

    (bar,) = chart.bars
    assert [part.kind for part in bar.parts] == ["refused", "passed"]
    assert min(part.height for part in bar.parts) >= 2
    assert sum(part.height for part in bar.parts) == 150
    assert chart.highest == 10_001


def test_a_place_that_cannot_be_written_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not after ten minutes of reading."""
    code = main(["replay", "--policy", "p.json", "--html", str(tmp_path / "nowhere" / "page.html"), "access.log"])

    assert code == 2
    assert "--html cannot be written to" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, BROWSERS)),
    reason="no chromium is installed: the page is NOT looked at in a browser (apt-get install chromium)",
)
def test_a_browser_shows_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real browser draws it without running anything: its title is still its own, and bars have places."""
    file = tmp_path / "page.html"
    file.write_text(render_page(make_hostile(make_report(tmp_path, capsys))))
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]

    done = subprocess.run(
        [browser, *flags, "--dump-dom", file.as_uri()], capture_output=True, text=True, check=True, timeout=120
    )

    assert "<title>Loopguard replay</title>" in done.stdout
    assert "owned" not in re.sub(r"&lt;script&gt;.*?&lt;/script&gt;", "", done.stdout)
    assert done.stdout.count("<rect") > 10
