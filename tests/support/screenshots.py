"""Screenshots in docs/images, of a scene through the real Envoy and two replicas, and of a scan.

`python -m tests.support.screenshots` writes them; it needs Chromium.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

from extproc.cli.main import main
from tests.support import ROOT
from tests.support.browser import CHROMIUM, Browser, browsing
from tests.support.harness import Loopguard, eventually, stack
from tests.support.night import POLICIES, Scene
from tests.support.servers import server
from tests.support.usage import Model, whole

FOLDER = ROOT / "docs" / "images"
SIZES = {"loops": (1100, 700), "session": (1100, 560), "phone": (375, 480)}
SCAN = (1060, 400)
SCHEMES = ("light", "dark")

_TOKENS = 60_250
# The bytes of these tokens.
_CONTEXT = "Word " * 48_000

_ANSWER = whole(model="gpt-4o", usage={"prompt_tokens": _TOKENS, "completion_tokens": 214})
_ROW = "[...document.querySelectorAll('.row')].find(row => row.innerText.includes('spender-7'))"
_LINK = f"{_ROW}.querySelector(\"a[href^='/sessions/']\").getAttribute('href')"


@contextmanager
def playing() -> Iterator[str]:
    model = Model()
    model.reply = _ANSWER
    try:
        with server() as valkey:
            flags = ("--store", f"redis://{valkey.address}", "--show-callers", "--price", "2.50")
            with stack(POLICIES, *flags, replicas=2, upstream=model.address) as made:
                scene = Scene(made, "7", "crm.find", context=_CONTEXT)
                scene.begin()
                eventually(lambda: _has_settled(made.loopguard), "what the answers have cost")
                asked = ["--admin", made.loopguard.admin_url]
                main(
                    [
                        "kill",
                        "--session",
                        f"header:x-session-id=session-{scene.who}",
                        "--reason",
                        "runaway, incident 7",
                        *asked,
                    ]
                )
                main(
                    [
                        "allow",
                        "--caller",
                        "x-user-id=poller-7",
                        "--for",
                        "2h",
                        "--reason",
                        "waits for a build",
                        *asked,
                    ]
                )
                eventually(lambda: scene.run(7) == 429 and scene.poll() == 200, "the orders")
                eventually(
                    lambda: "crm.find" in made.loopguard.get("/")[1], "all of it on the page"
                )
                yield made.loopguard.admin_url
    finally:
        model.stop()


def _has_settled(loopguard: Loopguard) -> bool:
    sessions = json.loads(loopguard.get("/sessions")[1])["sessions"]
    return any(session["usage"]["input_tokens"] >= 6 * _TOKENS for session in sessions)


def take_all(browser: Browser, url: str, folder: Path) -> list[Path]:
    taken = []
    for name, (width, height) in SIZES.items():
        browser.resize(width, height, phone=name == "phone")
        for scheme in SCHEMES:
            browser.prefer(scheme)
            browser.open(f"{url}/")
            browser.run("paused = true")
            if name == "session":
                browser.open(f"{url}{browser.run(_LINK)}")
            if name == "phone":
                browser.run(f"{_ROW}.scrollIntoView()")
            taken.append(folder / f"{name}-{scheme}.png")
            browser.take_screenshot(taken[-1])
    return taken


def take_scan(browser: Browser, folder: Path) -> list[Path]:
    taken = []
    with tempfile.TemporaryDirectory(prefix="lg") as name:
        page = Path(name) / "scan.html"
        with chdir(ROOT):  # so that no path of this machine is in the picture
            main(["scan", "examples/transcripts", "--html", str(page)])
        browser.resize(*SCAN)
        for scheme in SCHEMES:
            browser.prefer(scheme)
            browser.open(page.as_uri())
            taken.append(folder / f"scan-{scheme}.webp")
            browser.take_screenshot(taken[-1])
    return taken


if __name__ == "__main__":
    if CHROMIUM is None:
        sys.exit("chromium is not installed (Debian: chromium)")
    FOLDER.mkdir(exist_ok=True)
    with playing() as page, browsing() as tab:
        for path in [*take_all(tab, page, FOLDER), *take_scan(tab, FOLDER)]:
            # A command
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")  # noqa: T201
