"""The page on the admin port, in a real browser where there is one."""

from __future__ import annotations

import html
import http.client
import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from extproc.decision import ToolFailure
from extproc.engine.orders import BLOCK, GRANT, ActiveOverride, Target
from extproc.ext_proc.service import Service
from extproc.metrics import Metrics
from extproc.operator.admin.loop_page import draw_charts, route_page
from extproc.operator.admin.loop_report import LoopPages
from extproc.operator.admin.pages import make_app
from extproc.operator.admin.server import AdminServer
from extproc.operator.admin.session_report import SessionPages
from extproc.operator.board import Board
from extproc.operator.conversation_rows import ConversationDocument
from extproc.operator.incident_rows import IncidentDocument
from extproc.operator.loop_rows import MINUTES, Line, LoopDocument
from extproc.operator.session_rows import SessionDocument
from extproc.operator.session_table import RunName
from extproc.sessions.prices import Prices
from extproc.settings import parse_address
from extproc.store.memory import MemoryStore
from extproc.store.rules.session import LIMITS, Standing
from tests.support.documents import policy
from tests.support.harness import PATIENCE
from tests.support.messages import body, headers
from tests.support.pages import Outline
from tests.support.service import exchange, make_service, repeat

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
BROWSER = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: the page in a browser is NOT tested")

SCRIPT = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
USER: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}
CALL = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "search_the_web", "arguments": "{}"}}]}
FOUND = {"role": "tool", "tool_call_id": "1", "content": "nothing"}
CONVERSATION = json.dumps({"model": "gpt-4o", "messages": [CALL, FOUND] * 4}).encode()


def note_session(service: Service, name: str = "ann", **changes: Any) -> None:  # noqa: ANN401  # fields of a session
    """A session that has met a limit."""
    tools, limit = ((b"t", name, 3),), LIMITS.index("max_calls_per_tool")
    standing = Standing(limit, 3, 3, b"t", steps=1_234, blocks=1, cost=2 * 10**9, estimated=1, tools=tools)
    run = RunName("a" * 16, "agents", "enforce", "5" * 16)._replace(**changes)
    service.reporter.sessions.note(run, [("x-user-id", name)], standing, name, (name,), b"", time.time())


def make_night(name: str = "storm") -> Service:
    """A service after a storm, a stuck agent, a shadow policy's verdicts and an hour of both."""
    chat = {"pathExact": "/v1/chat/completions"}
    service = make_service(
        policy("webhooks", {"pathPrefix": "/hook"}, action="warn", escalate={"reject": 20}, **USER),
        policy("agents", chat, similarity="tool_calls", **USER),
        policy("agents-canary", chat, mode="shadow", action="throttle", **USER),
        show_callers=True,
    )
    repeat(
        service, headers("/hook/billing", x_user_id=name, attributes={"xds.route_name": "hooks"}), body(b"{}" * 2_000), times=60
    )
    for _ in range(7):
        exchange(service, headers("/v1/chat/completions", x_user_id="agent-7"), body(CONVERSATION))
    _draw_hour(service.reporter.loops.curves)
    return service


def _draw_hour(curves: dict[tuple[str, str, str], Line]) -> None:
    """An hour as it might have been, before what happened now."""
    for place, curve in enumerate(curves.values()):
        for ago in range(1, MINUTES - 15 * place):
            curve.counts[-1 - ago] = max(0, 40 - ago + (ago * 7) % 11)


@contextmanager
def serving(service: Service, looked: threading.Event | None = None, orders: Sequence[ActiveOverride] = ()) -> Iterator[str]:
    """The URL of a page about this service, with these orders in force; `looked` is set when the page is requested."""

    def shows() -> bool:
        if looked is not None:
            looked.set()
        return service.reporter.show_callers

    store = MemoryStore(Metrics())
    incidents = Board("incidents", IncidentDocument, service.reporter.incidents, store, shows)
    loops = Board("loops", LoopDocument, service.reporter.loops, store, shows)
    conversations = Board("conversations", ConversationDocument, service.reporter.conversations, store, shows)
    pages = LoopPages(loops, Prices(None), shows, incidents, conversations=conversations)
    sessions = SessionPages(Board("sessions", SessionDocument, service.reporter.sessions, store, shows), shows)
    pages.list_orders = sessions.list_orders = lambda: orders
    server = AdminServer(make_app(Metrics(), [route_page(pages, sessions), *pages.list_routes(), *sessions.list_routes()]))
    try:
        yield f"http://{server.start(parse_address('127.0.0.1:0'))}/"
    finally:
        server.stop()


def fetch(url: str, **headers: str) -> tuple[dict[str, str], str]:
    """Headers and text of the page."""
    address, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    connection.request("GET", f"/{path}", headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    assert answer.status == 200, text
    return dict(answer.getheaders()), text


def test_the_page_shows_who_loops() -> None:
    """Callers, tools, routes, what became of requests, money where the model's rate is known, and the curves."""
    with serving(make_night()) as url:
        text = re.sub(r"\s+", " ", fetch(url)[1])

    named = ("x-user-id: <b>storm</b>", "search_the_web", "route hooks", "gpt-4o")
    counts = ("<b>17</b> forwarded", "<b>48</b> not forwarded", "41 not forwarded", "41 refused", "17 warned", "would throttle")
    for shown in ("2 active loops", *named, *counts, "2 rows behind it"):
        assert shown in text, shown
    assert text.count("<svg") == 3


def test_the_page_shows_sessions() -> None:
    """What each has used up and what stops it, with a link to its run; narrowed down as the loops are."""
    service = make_night()
    note_session(service, "runner")
    note_session(service, "walker", policy="other", mode="shadow")
    with serving(service) as url:
        text, narrowed = (re.sub(r"\s+", " ", fetch(url + query)[1]) for query in ("", "?policy=other&sort=count"))

    for shown in ("<h2>Sessions</h2>", "x-user-id: <b>runner</b>", "1,234", "~$2.00", "max_calls_per_tool: runner"):
        assert shown in text, shown
    assert f'<a href="/sessions/{"5" * 16}">' in text
    assert "walker" in narrowed
    assert "runner" not in narrowed


def test_each_row_has_the_commands_to_copy_and_the_orders_that_stand() -> None:
    """A browser gives no orders: it shows what to type, and what others have typed."""
    service = make_night()
    note_session(service, "runner")
    (storm,) = [row for row in service.reporter.conversations.copy() if not row.tools]
    block = ActiveOverride("b1", BLOCK, Target(caller=storm.tenant), "", 0, 9e9, "runaway, incident 7", "eve@laptop")
    grant = ActiveOverride("g1", GRANT, Target(session="5" * 16), "", 0, 9e9, "", "")
    with serving(service, orders=[block, grant]) as url:
        text = re.sub(r"\s+", " ", fetch(url)[1])

    for command in (
        f"loopguard block --caller {storm.tenant} --fingerprint ",
        f"loopguard allow --caller {storm.tenant} --fingerprint ",
        "loopguard overrides --revoke b1",
        f"loopguard kill --caller {'a' * 16} --session {'5' * 16}",
        f"loopguard grant --session {'5' * 16} --caller {'a' * 16} --tool runner=1",
        "loopguard overrides --revoke g1",
    ):
        assert text.count(f'<code class="copy">{command}') == 1, command
    assert re.search("block by eve@laptop until <time>[0-9T:+-]+</time>: runaway, incident 7", text)
    assert "grant until <time>" in text


def test_the_page_shows_tools_that_fail_for_many() -> None:
    """One row for all its sessions, above the loops; what a tool is called is text."""
    service = make_night()
    failing = service.reporter.incidents.find("agents", ToolFailure(SCRIPT, "0" * 16), "a" * 16)
    for number in range(6):
        failing.note(f"{number:016x}", f"{number:016x}", time.time(), refused=True)
    with serving(service) as url:
        text, other = fetch(url)[1], fetch(f"{url}?policy=other")[1]

    section = re.sub(r"\s+", " ", text.partition("<h2>Failing tools</h2>")[2].partition("<h2>Loops</h2>")[0])
    assert section.count("<tr>") == 2
    assert '<td class="number" data-name="sessions">6</td>' in section
    assert '<td class="number" data-name="not refused">2</td>' in section
    assert Outline(text).elements.count("script") == 1
    assert "Failing tools" not in other


def test_the_page_of_a_quiet_night() -> None:
    """Without loops the page says that there are none."""
    with serving(make_service(policy("p", {"pathPrefix": "/"}))) as url:
        text = fetch(url)[1]

    assert "No active loops" in text
    assert "No loops in the last hour" in text
    assert "<h2>Sessions</h2>" not in text
    assert "<h2>Failing tools</h2>" not in text


def test_the_page_can_be_narrowed_down() -> None:
    """The form's fields select, and stay filled in."""
    with serving(make_night()) as url:
        text = fetch(f"{url}?tool=search_the_web&sort=last")[1]

    assert "agent-7" in text
    assert "storm" not in text
    assert 'value="search_the_web"' in text
    assert '<option value="last" selected>' in text


def test_scripts_in_names_are_text() -> None:
    """Whatever callers, paths, tools, models, routes and sessions are called, and whatever is asked for, it is text."""
    service = make_night(SCRIPT)
    for loop in service.reporter.loops.copy():
        loop.path = loop.method = loop.route = loop.model = loop.session = loop.fingerprint = SCRIPT
        loop.policy = loop.detector = SCRIPT
        loop.tools = [SCRIPT]
    for row in service.reporter.conversations.copy():
        row.path = row.model = row.agent = row.session = row.conversation = row.action = row.shadow = SCRIPT
        row.tools, row.loops = [SCRIPT], [(SCRIPT, SCRIPT, *name[2:]) for name in row.loops]
    for key, curve in list(service.reporter.loops.curves.items()):
        service.reporter.loops.curves[SCRIPT, key[1], key[2]] = replace(curve, policy=SCRIPT)
    note_session(service, SCRIPT)
    note_session(service, SCRIPT, policy=SCRIPT, tenant=SCRIPT, session=SCRIPT, mode=SCRIPT)
    words = [
        ActiveOverride(SCRIPT, SCRIPT, Target(session=session), "", 0, 9e9, SCRIPT, SCRIPT) for session in (SCRIPT, "5" * 16)
    ]
    with serving(service, orders=words) as url:
        assert f"loopguard overrides --revoke {shlex.quote(SCRIPT)}" in html.unescape(fetch(url)[1])
        outline = Outline(fetch(f"{url}?policy=%3Cscript%3E%22")[1])
        full, run = Outline(fetch(url)[1]), Outline(fetch(f"{url}sessions/{'5' * 16}", accept="text/html")[1])

    assert run.elements.count("script") == 0
    run.elements.append("script")
    for seen in (outline, full, run):
        assert seen.elements.count("script") == 1
        assert "img" not in seen.elements
        assert seen.handlers == []


def test_nothing_is_loaded_from_elsewhere() -> None:
    """The page is all there is, and its policy forbids the browser everything but that."""
    with serving(make_night()) as url:
        (first, text), (second, _) = fetch(url), fetch(url)

    policies = [answer["content-security-policy"] for answer in (first, second)]
    assert Outline(text).loads == ["/loops", "/sessions", "/coverage"]
    assert policies[0].startswith("default-src 'none'; style-src 'nonce-")
    assert policies[0] != policies[1]
    assert "unsafe" not in policies[0]


def test_a_chart_stacks_its_actions() -> None:
    """Each minute is as high as its requests, the most severe action at the bottom; the busiest policy comes first."""
    quiet: dict[str, Any] = {"policy": "a", "mode": "enforce", "action": "warn", "minutes": [0] * 59 + [1]}
    warned: dict[str, Any] = {"policy": "b", "mode": "enforce", "action": "warn", "minutes": [0] * 59 + [3]}
    refused: dict[str, Any] = {"policy": "b", "mode": "enforce", "action": "reject", "minutes": [0] * 58 + [2, 1]}

    busy, other = draw_charts([quiet, warned, refused])

    assert (busy.policy, busy.most, busy.actions) == ("b", 4, [("reject", 3), ("warn", 3)])
    assert [(bar.action, bar.x, bar.height) for bar in busy.bars] == [
        ("reject", 58 * 6, 30.0),
        ("reject", 59 * 6, 15.0),
        ("warn", 59 * 6, 45.0),
    ]
    assert busy.bars[2].y + busy.bars[2].height == busy.bars[1].y
    assert other.policy == "a"


def browse(folder: Path, url: str, *arguments: str) -> str:
    """What Chromium prints when it is sent to a page."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    command = [CHROMIUM or "", *flags, f"--user-data-dir={folder}", *arguments, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@BROWSER
def test_a_browser_shows_it_and_runs_nothing_else(tmp_path: Path) -> None:
    """In Chromium the table and the curves are there, and no script that a client has put into a name has run."""
    with serving(make_night(SCRIPT)) as url:
        page = browse(tmp_path, url, "--dump-dom")

    assert "<title>2 active" in page
    assert page.count("<svg") == 3
    assert "&lt;script&gt;" in page


@BROWSER
def test_the_page_is_live(tmp_path: Path) -> None:
    """What happens while the page is open is on it a moment later, without a reload."""
    service, looked = make_night(), threading.Event()
    with serving(service, looked) as url, ThreadPoolExecutor() as pool:
        # Virtual time: the page's own clock runs ahead once it is loaded.
        printed = pool.submit(browse, tmp_path, url, "--virtual-time-budget=20000", "--dump-dom")
        assert looked.wait(PATIENCE)
        repeat(service, headers("/hook/late", x_user_id="latecomer", end=True), times=4)

        assert "latecomer" in printed.result()


WIDTHS = {"desktop": (1280, 1500), "phone": (390, 2400)}


def take_screenshots(folder: Path, names: Sequence[str] = tuple(WIDTHS)) -> None:
    """For people to look at: `python -m tests.unit.operator.test_page FOLDER`."""
    with serving(make_night(SCRIPT)) as url:
        for name in names:
            width, height = WIDTHS[name]
            shot = folder / f"{name}.png"
            browse(folder / "profile", url, f"--window-size={width},{height}", f"--screenshot={shot}")


if __name__ == "__main__":
    take_screenshots(Path(sys.argv[1]))
