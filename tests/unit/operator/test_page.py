"""The page on the admin port, in a real browser where there is one."""

import html
import http.client
import json
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from extproc.engine.orders import ALLOW, BLOCK, GRANT, ActiveOverride, Target
from extproc.ext_proc.service import Service
from extproc.operator.admin.loop_page import draw_charts
from extproc.operator.loop_rows import MINUTES
from extproc.store.rules.session import LIMITS, Standing
from tests.support.browser import BROWSER, Browser, browsing
from tests.support.budget_policies import ask, bucket, limited
from tests.support.command import find_missing
from tests.support.documents import policy
from tests.support.harness import PATIENCE, eventually
from tests.support.messages import body, headers
from tests.support.operated import Operated
from tests.support.orders import USER
from tests.support.pages import Outline
from tests.support.service import exchange, make_service, repeat
from tests.support.session_runs import note

# All pages for people.
PATHS = ("", f"sessions/{'5' * 16}", "canary", "coverage")

CONTROLS = "'a, button, summary, input, select'"
NAMED = (
    "(each => (each.closest('[data-key]')?.dataset.key ?? '') + ' ' + each.tagName + ' ' + "
    "(each.name || each.innerText))"
)
ACTIVE = "document.activeElement"

SCRIPT = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "1", "function": {"name": "search_the_web", "arguments": "{}"}}],
}
FOUND = {"role": "tool", "tool_call_id": "1", "content": "nothing"}
CONVERSATION = json.dumps({"model": "gpt-4o", "messages": [CALL, FOUND] * 4}).encode()


# Fields of a session
def note_session(service: Service, name: str = "ann", **changes: Any) -> None:  # noqa: ANN401
    tools, limit = ((b"t", name, 3),), LIMITS.index("max_calls_per_tool")
    standing = Standing(
        limit, 3, 3, b"t", steps=1_234, blocks=1, cost=2 * 10**9, estimated=1, tools=tools
    )
    known: dict[str, Any] = {
        "caller": [("x-user-id", name)],
        "model": name,
        "tools": (name,),
        "agent": "1" * 16,
    }
    note(
        service.reporter.sessions,
        standing,
        now=time.time(),
        **{"policy": "agents", **known, **changes},
    )


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
        service,
        headers("/hook/billing", x_user_id=name, attributes={"xds.route_name": "hooks"}),
        body(b"{}" * 2_000),
        times=60,
    )
    for _ in range(7):
        exchange(service, headers("/v1/chat/completions", x_user_id="agent-7"), body(CONVERSATION))
    for place, curve in enumerate(service.reporter.loops.curves.values()):
        for ago in range(1, MINUTES - 15 * place):
            curve.counts[-1 - ago] = max(0, 40 - ago + (ago * 7) % 11)
    return service


@contextmanager
def serving(service: Service, orders: Sequence[ActiveOverride] = ()) -> Iterator[str]:
    with Operated(services=[service], orders=orders).listen() as address:
        yield f"http://{address}/"


def fetch(url: str, **headers: str) -> tuple[dict[str, str], str]:
    address, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    connection.request("GET", f"/{path}", headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    assert answer.status == 200, text
    return dict(answer.getheaders()), text


def test_page_shows_callers_actions_money_and_curves() -> None:
    service = make_night()
    note_session(service, "runner")
    note_session(service, "walker", policy="other", mode="shadow")
    made = Operated(services=[service])
    text, narrowed = made.read(), made.read(tool="search_the_web", sort="last")

    named = (
        "x-user-id: <b>storm</b>",
        "search_the_web",
        "route hooks",
        "gpt-4o",
        "2 active loops",
        "2 rows behind it",
    )
    counts = (
        "<b>17</b> forwarded",
        "<b>48</b> not forwarded",
        "41 not forwarded",
        "41 refused",
        "17 warned",
        "would throttle",
    )
    session = (
        "<h2>Sessions</h2>",
        f'<a href="/sessions/{"5" * 16}">',
        f"<code>{'1' * 16}</code> 1 request,",
        "1,234",
        "~$2.00",
    )
    limit = ("x-user-id: <b>runner</b>", "max_calls_per_tool: runner")
    assert find_missing(text, *named, *counts, *session, *limit) == []
    assert text.count("<svg") == 3
    form = ("agent-7", 'value="search_the_web"', '<option value="last" selected>')
    assert find_missing(narrowed, *form, "storm") == ["storm"]
    assert find_missing(made.read(policy="other", sort="count"), "walker", "runner") == ["runner"]


def test_page_shows_budgets_tightest_first() -> None:
    made = Operated(
        limited(bucket(0.001, 2, name="<b>rate", keys=["header:x-user-id"])), show_callers=True
    )
    unused = made.read()
    for _ in range(3):
        ask(made.service, x_user_id="runner")

    assert "No request of a caller with a budget in the last hour." in unused
    shown = (
        "x-user-id: <b>runner</b>",
        "&lt;b&gt;rate",
        "100 %",
        "2 requests in a burst",
        "--amount 5 --for 1d --admin localhost",
    )
    assert find_missing(made.read(), "<h2>Budgets</h2>", *shown) == []


def test_page_without_loops_says_so() -> None:
    text = Operated(policy("p", {"pathPrefix": "/"})).read()

    sections = [f"<h2>{name}</h2>" for name in ("Sessions", "Failing tools", "Budgets")]
    assert find_missing(text, "No active loops", "No loops in the last hour", *sections) == sections


def test_rows_have_commands_to_copy_and_orders_in_force() -> None:
    service = make_night()
    note_session(service, "runner")
    (storm,) = [row for row in service.reporter.loops.copy() if not row.tools]
    block = ActiveOverride(
        "b1", BLOCK, Target(caller=storm.tenant), "", 0, 9e9, "runaway, incident 7", "eve@laptop"
    )
    grant = ActiveOverride("g1", GRANT, Target(session="5" * 16), "", 0, 9e9, "", "")
    elsewhere = ActiveOverride("e1", ALLOW, Target(tool="deploy"), "agents", 0, 9e9, "", "bob")
    text = Operated(services=[service], orders=[block, grant, elsewhere]).read()

    for command, times in {
        f"loopguard block --caller {storm.tenant} --fingerprint ": 1,
        f"loopguard allow --caller {storm.tenant} --fingerprint ": 0,  # it would not lift the block
        f"loopguard kill --caller {'a' * 16} --session {'5' * 16}": 1,
        f"loopguard grant --session {'5' * 16} --caller {'a' * 16} --tool runner=1": 1,
        "loopguard overrides --revoke b1": 2,  # beside its row, and in the list of orders
        "loopguard overrides --revoke g1": 2,
        "loopguard overrides --revoke e1": 1,
    }.items():
        assert text.count(f"<code>{command}") == times, command
    assert re.search("block by eve@laptop until <time>[0-9T:+-]+</time>: runaway, incident 7", text)
    assert "grant until <time>" in text
    section = text.partition("<h2>Orders in force</h2>")[2].partition("<h2>")[0]
    assert (
        find_missing(
            section,
            "eve@laptop",
            "runaway, incident 7",
            "tool <code>deploy</code>",
            "bob",
            storm.tenant,
        )
        == []
    )


def test_canary_and_coverage_are_pages_for_browsers() -> None:
    made = Operated(services=[make_night()])
    (canary,), coverage = made.ask("/canary")["canaries"], made.ask("/coverage")

    assert canary["requests"]["compared"] == 7
    told = ("agents-canary, canary of agents:", "<b>7</b> requests compared", canary["reasons"][0])
    command = "<code>loopguard canary status --policy agents-canary --admin localhost"
    assert find_missing(made.read("/canary"), *told, command) == []
    assert (
        find_missing(made.read("/coverage"), coverage["line"], "the policy files have errors") == []
    )


def test_scripts_in_names_are_escaped() -> None:
    service = make_night(SCRIPT)
    for loop in [loop for row in service.reporter.loops.copy() for loop in row.loops]:
        loop.path = loop.method = loop.route = loop.model = loop.session = loop.fingerprint = SCRIPT
        loop.policy = loop.detector = SCRIPT
        loop.tools = [SCRIPT]
    for row in service.reporter.loops.copy():
        row.path = row.model = row.agent = row.session = row.conversation = row.action = (
            row.shadow
        ) = SCRIPT
        row.tools = [SCRIPT]
    for key, curve in list(service.reporter.loops.curves.items()):
        service.reporter.loops.curves[SCRIPT, key[1], key[2]] = replace(curve, policy=SCRIPT)
    note_session(service, SCRIPT)
    note_session(service, SCRIPT, policy=SCRIPT, tenant=SCRIPT, session=SCRIPT, mode=SCRIPT)
    words = [
        ActiveOverride(SCRIPT, SCRIPT, Target(session=session), "", 0, 9e9, SCRIPT, SCRIPT)
        for session in (SCRIPT, "5" * 16)
    ]
    with serving(service, orders=words) as url:
        assert f"loopguard overrides --revoke {shlex.quote(SCRIPT)}" in html.unescape(fetch(url)[1])
        outline = Outline(fetch(f"{url}?policy=%3Cscript%3E%22")[1])
        full, run = (
            Outline(fetch(url)[1]),
            Outline(fetch(f"{url}sessions/{'5' * 16}", accept="text/html")[1]),
        )

    for seen in (outline, full, run):
        assert seen.elements.count("script") == 1
        assert "img" not in seen.elements
        assert seen.handlers == []


def test_page_loads_nothing_from_elsewhere() -> None:
    with serving(make_night()) as url:
        (first, text), (second, _) = fetch(url), fetch(url)

    policies = [answer["content-security-policy"] for answer in (first, second)]
    assert Outline(text).loads == ["/", "/canary", "/coverage", "/coverage", "/loops", "/sessions"]
    assert policies[0].startswith("default-src 'none'; style-src 'nonce-")
    assert policies[0] != policies[1]
    assert "unsafe" not in policies[0]


def test_chart_stacks_actions_by_severity() -> None:
    quiet: dict[str, Any] = {
        "policy": "a",
        "mode": "enforce",
        "action": "warn",
        "minutes": [0] * 59 + [1],
    }
    warned: dict[str, Any] = {
        "policy": "b",
        "mode": "enforce",
        "action": "warn",
        "minutes": [0] * 59 + [3],
    }
    refused: dict[str, Any] = {
        "policy": "b",
        "mode": "enforce",
        "action": "reject",
        "minutes": [0] * 58 + [2, 1],
    }

    busy, other = draw_charts([quiet, warned, refused])

    assert (busy.policy, busy.most, busy.actions) == ("b", 4, [("reject", 3), ("warn", 3)])
    assert [(bar.action, bar.x, bar.height) for bar in busy.bars] == [
        ("reject", 58 * 6, 30.0),
        ("reject", 59 * 6, 15.0),
        ("warn", 59 * 6, 45.0),
    ]
    assert (busy.bars[2].y + busy.bars[2].height, other.policy) == (busy.bars[1].y, "a")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One for all tests, because it takes a second to start."""
    with browsing() as made:
        yield made


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    chromium.resize(1280, 900)
    chromium.prefer("light")
    chromium.problems.clear()
    return chromium


@pytest.mark.deep
@BROWSER
def test_chromium_shows_the_page_and_runs_no_injected_script(browser: Browser) -> None:
    with serving(make_night(SCRIPT)) as url:
        browser.open(url)

        assert browser.run("document.title").startswith("2 active")
        assert browser.run("document.querySelectorAll('svg').length") == 3
        assert "<script>" in browser.read("main")
        assert browser.problems == []


@pytest.mark.deep
@BROWSER
def test_page_refreshes_unless_paused(browser: Browser) -> None:
    service = make_night()
    with serving(service) as url:
        browser.open(url)
        assert "latecomer" not in browser.read("main")
        repeat(service, headers("/hook/late", x_user_id="latecomer", end=True), times=4)

        eventually(lambda: "latecomer" in browser.read("main"), "the new loop on the page")
        browser.press("p")
        assert (browser.read("#pause"), browser.read("#said")) == ("go on", "paused")


def find_copied(browser: Browser, word: str) -> str:
    text = browser.paste()
    return text if text.startswith(f"loopguard {word} ") else ""


@pytest.mark.deep
@BROWSER
def test_every_control_works_with_the_keyboard(browser: Browser) -> None:
    service = make_night()
    note_session(service)
    with serving(service) as url:
        browser.open(url)
        browser.run("paused = true")
        missed = set(browser.run(f"[...document.querySelectorAll({CONTROLS})].map({NAMED})"))
        for _ in range(2 * len(missed)):
            browser.press("Tab")
            outlined, name = browser.run(
                f"(each => [getComputedStyle(each).outlineStyle, ({NAMED})(each)])({ACTIVE})"
            )
            assert outlined == "solid" or browser.run(f"{ACTIVE} === document.body"), name
            missed.discard(name)
        assert missed == set()

        browser.press("?")
        listed = browser.read("#keys dl")
        assert (
            browser.run(
                "Object.keys(SHORTCUTS).filter(key => !document.querySelector('#keys "
                "dl').innerText.includes(key))"
            )
            == []
        )
        assert "copy the row's command to stop, free, revoke" in listed
        for key, word in (("s", "block"), ("f", "allow")):
            browser.run("document.activeElement.blur()")
            browser.press("j")
            browser.press(key)
            command = eventually(
                partial(find_copied, browser, word), f"a command to {word} on the clipboard"
            )
            assert command in browser.run(f"{ACTIVE}.closest('.row').innerText")
        key = browser.run(f"{ACTIVE}.closest('.row').dataset.key")
        browser.run("paused = false, document.querySelector('main').dataset.old = 'yes'")
        eventually(lambda: browser.run("!document.querySelector('main').dataset.old"), "a refresh")
        assert browser.run(f"{ACTIVE}.closest('.row').dataset.key") == key
        browser.press("/")
        assert browser.run(f"{ACTIVE}.name") == "caller"
        browser.press("Escape")
        browser.run("document.querySelector(\"[data-key^='session ']\").focus()")
        browser.press("o")
        eventually(lambda: "Timeline" in browser.read(), "the page of the session")
        assert browser.problems == []


@pytest.mark.deep
@BROWSER
def test_command_is_copied_or_selected_without_clipboard_api(browser: Browser) -> None:
    """Browsers have it only on https and localhost."""
    with serving(make_night()) as url:
        browser.open(url)
        browser.run(
            "paused = true; Object.defineProperty(navigator, 'clipboard', { value: undefined })"
        )
        command = browser.read(".command code")

        browser.click("document.querySelector('.command button')")
        eventually(lambda: browser.read("#said") == f"copied: {command}", "a copied command")
        browser.run("document.execCommand = () => false")
        browser.click("document.querySelector('.command button')")
        eventually(
            lambda: browser.read("#said") == f"select and copy: {command}", "what else can be done"
        )
        assert browser.run("getSelection().toString()") == command


@pytest.mark.deep
@BROWSER
@pytest.mark.parametrize("width", [375, 768, 1001, 1280])
def test_page_needs_no_sideways_scrolling(browser: Browser, width: int) -> None:
    service = make_night("x" * 200)
    note_session(service, "y" * 200)
    with serving(service) as url:
        browser.resize(width, 800, phone=width < 1_000)
        for path in PATHS:
            browser.open(url + path)
            browser.run("document.querySelectorAll('details').forEach(each => each.open = true)")

            assert (path, browser.list_wide()) == (path, [])
            assert (
                browser.run("document.documentElement.scrollWidth")
                <= browser.run("innerWidth")
                == width
            )


@pytest.mark.deep
@BROWSER
def test_controls_on_a_phone_fit_a_thumb(browser: Browser) -> None:
    service = make_night()
    note_session(service)
    with serving(service) as url:
        browser.resize(390, 844, phone=True)
        for path in PATHS:
            browser.open(url + path)
            small = browser.run(
                "[...document.querySelectorAll('button, input, select, summary, nav a')]"
                ".filter(each => each.checkVisibility()"
                " && each.getBoundingClientRect().height < 44).map(each => each.outerHTML)"
            )

            assert (path, small) == (path, [])


@pytest.mark.deep
@BROWSER
@pytest.mark.parametrize(
    ("scheme", "paper"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 24, 29)")]
)
def test_text_has_contrast_in_both_color_schemes(browser: Browser, scheme: str, paper: str) -> None:
    service = make_night()
    note_session(service)
    with serving(service) as url:
        browser.prefer(scheme)
        for path in PATHS:
            browser.open(url + path)

            assert browser.run("getComputedStyle(document.body).backgroundColor") == paper
            assert (path, browser.list_unreadable()) == (path, [])
