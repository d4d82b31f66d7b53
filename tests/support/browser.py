"""A real Chromium: what it shows, clicks, keys, the clipboard, a phone, dark mode.

It speaks the Chrome DevTools Protocol over two pipes, which needs no port and no package.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any

import pytest

from tests.support.harness import PATIENCE, eventually

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
BROWSER = pytest.mark.skipif(
    CHROMIUM is None,
    reason="chromium is not installed (Debian: chromium): pages in a browser are NOT tested",
)

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
)
# Keys that type no character, by the numbers that browsers use.
_KEYS = {"Tab": 9, "Enter": 13, "Escape": 27}

# WCAG 2.2, 1.4.3
_UNREADABLE = """
(() => {
  const parse = text => text.match(/[0-9.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(each => each / 255)
    .map(each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
    .reduce((sum, each, place) => sum + each * [0.2126, 0.7152, 0.0722][place], 0);
  const behind = each => {
    for (; each; each = each.parentElement) {
      const color = parse(getComputedStyle(each).backgroundColor);
      if (color.length === 3 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const found = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode, each = text.parentElement;
    if (!text.data.trim() || !each.checkVisibility() || each.closest("script")) continue;
    const colors = [parse(getComputedStyle(each).color), behind(each)];
    const [more, less] = colors.map(light).sort((a, b) => b - a);
    const ratio = (more + 0.05) / (less + 0.05);
    if (ratio < 4.5) found.push(`${ratio.toFixed(2)}: ${text.data.trim()}`);
  }
  return found;
})()
"""

_WIDE = """
[...document.querySelectorAll("body *")]
  .filter(each => each.getBoundingClientRect().right > innerWidth + 1)
  .map(each => each.outerHTML.slice(0, 200))
"""


class Browser:
    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._rest = b""
        self._last = 0
        self._session = ""
        self.problems: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        origin = "/".join(url.split("/")[:3])
        for permission in ("clipboard-read", "clipboard-write"):
            self._call(
                "Browser.setPermission",
                permission={"name": permission},
                setting="granted",
                origin=origin,
            )
        self._call("Page.navigate", url=url)
        eventually(
            lambda: self.run("location.href != 'about:blank' && document.readyState == 'complete'"),
            url,
        )

    def run(self, script: str) -> Any:  # noqa: ANN401  # whatever it returns
        """The value of a JavaScript expression on the page; promises are awaited."""
        answer = self._call(
            "Runtime.evaluate",
            expression=script,
            returnByValue=True,
            awaitPromise=True,
            userGesture=True,
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def read(self, selector: str = "body") -> str:
        """The visible text of an element, empty while it is missing."""
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def click(self, element: str) -> None:
        found = f"{element}.scrollIntoView({{block: 'center'}}), {element}.getBoundingClientRect()"
        x, y = self.run(f"(box => [box.x + box.width / 2, box.y + box.height / 2])(({found}))")
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        known = _KEYS.get(key)
        text = {} if known and key != "Enter" else {"text": "\r" if known else key}
        about: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": known or ord(key.upper())}
        self._call("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", **about)

    def paste(self) -> str:
        return str(self.run("navigator.clipboard.readText()"))

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )

    def list_unreadable(self) -> list[str]:
        """Texts whose contrast with their background is too low."""
        return list(self.run(_UNREADABLE))

    def list_wide(self) -> list[str]:
        return list(self.run(_WIDE))

    def prefer(self, scheme: str) -> None:
        self._call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def take_screenshot(self, path: Path) -> None:
        shot = self._call("Page.captureScreenshot", format=path.suffix[1:], quality=50)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, **params: object) -> dict[str, Any]:
        self._last += 1
        about = (
            {"sessionId": self._session}
            if self._session and not method.startswith(("Target.", "Browser."))
            else {}
        )
        os.write(
            self._to,
            json.dumps({"id": self._last, "method": method, "params": params, **about}).encode()
            + b"\0",
        )
        while True:
            message = self._receive()
            if message.get("id") == self._last:
                if "error" in message:
                    raise AssertionError(f"{method}: {message['error']}")
                return dict(message["result"])
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        if (
            message.get("method") == "Log.entryAdded"
            and message["params"]["entry"]["level"] == "error"
        ):
            self.problems.append(message["params"]["entry"]["text"])
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(message["params"]["exceptionDetails"]))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select([self._back], [], [], PATIENCE)[0]:
                raise AssertionError("the browser does not answer")
            part = os.read(self._back, 1 << 20)
            if not part:
                raise AssertionError("the browser has ended")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def browsing() -> Iterator[Browser]:
    theirs, ours = os.pipe()
    back, answers = os.pipe()
    with tempfile.TemporaryDirectory(prefix="lg", ignore_cleanup_errors=True) as profile:
        # Chromium reads its orders from file descriptor 3, and answers on 4.
        shell = 'exec 3<&"$0" 4>&"$1"; shift; exec "$@"'
        command = [CHROMIUM or "", *_FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
        process = subprocess.Popen(
            ["bash", "-c", shell, str(theirs), str(answers), *command],
            pass_fds=(theirs, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(answers)
        try:
            yield Browser(ours, back)
        finally:
            os.close(ours)
            os.close(back)  # it ends when its pipes do
            process.wait(PATIENCE)
