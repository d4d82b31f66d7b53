"""Orders from the page, over real HTTP: signing in, confirming, and who cannot."""

import html
import operator
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from extproc.cli.commands import ordering
from extproc.cli.main import main
from extproc.errors import BadOrderError
from extproc.operator.admin.commands import read_command
from tests.support.browser import BROWSER, Browser, browsing
from tests.support.budget_policies import ask as ask_budget, bucket, limited as limited_budget
from tests.support.command import find_missing
from tests.support.harness import eventually
from tests.support.operated import ALL, NOTHING, Away, Operated
from tests.support.pages import TOKEN, Outline, Tab
from tests.support.service import status
from tests.support.session_limits import ask, limited, turns

SIGN_IN = "extproc.operator.admin.sign_in"
KILL = "loopguard kill --caller 0123456789abcdef --session 0123456789abcdef"


def operate(folder: Path, *policies: dict[str, Any], **about: Any) -> Operated:  # noqa: ANN401
    made = Operated(*(policies or [limited(max_concurrent_agents=2)]), **about)
    tokens = folder / "tokens"
    tokens.write_text(f"a-token-of-another-operator\n{TOKEN}\n")
    made.tokens = str(tokens)
    return made


@contextmanager
def visiting(made: Operated, replica: int = 0) -> Iterator[Tab]:
    with made.listen(replica) as url:
        tab = Tab(url)
        with tab.client:
            yield tab


def explode(made: Operated) -> dict[str, int]:
    """Statuses of a session's agents, by name."""
    return {
        agent: status(
            ask(
                made.service,
                turns(1, number=agent),
                session="",
                x_claude_code_session_id="root",
                x_claude_code_agent_id=agent,
            )
        )
        for agent in ("a", "b", "c", "d")
    }


def test_explosion_is_stopped_and_freed_by_buttons(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = operate(tmp_path, show_callers=True)
    assert [explode(made)[agent] for agent in "abcd"] == [200, 200, 429, 429]
    with visiting(made) as tab:
        tab.open("/")
        assert tab.press("stop", "Explosions of agents") == 200
        assert "Sign in to give orders" in tab.page
        assert tab.submit(name="ann", token=TOKEN) == 200
        asked = ("Kill for 24 hours?", "x-team: <b>t</b>", "1 session, 2 active agents")
        assert find_missing(tab.page, *asked, "and its agents are refused", "agents</dd>") == []
        assert made.list_orders() == []

        assert tab.submit(reason="incident 7") == 200

        shown = ("<h1>Kill in force</h1>", "ann (page)", "incident 7")
        assert find_missing(tab.page, *shown) == []
        assert set(explode(made).values()) == {429}
        (order,) = made.list_orders()
        assert (order["who"], order["reason"]) == ("ann (page)", "incident 7")
        assert "override given" in caplog.text

        assert tab.press("revoke") == 200
        assert "<h1>Revoke this kill?</h1>" in tab.page
        assert tab.submit() == 200
        assert f"Order {order['override']} is not in force" in tab.page
        assert made.list_orders() == []
        assert explode(made)["a"] == 200


def test_signed_in_operator_sees_callers_from_elsewhere(tmp_path: Path) -> None:
    made = operate(tmp_path, show_callers=True)
    explode(made)
    with visiting(made) as tab:
        tab.client.headers["host"] = "ops.example"
        tab.open("/")
        assert find_missing(tab.page, "x-team: <b>t</b>", "2 active agents") == ["x-team: <b>t</b>"]
        tab.open("/login")
        tab.submit({"origin": "https://ops.example"}, name="ann", token=TOKEN)
        cookie = next(iter(tab.client.cookies.jar))
        assert cookie.secure
        tab.client.headers["cookie"] = f"{cookie.name}={cookie.value}"  # as over https

        assert tab.open("/") == 200

        assert "x-team: <b>t</b>" in tab.page
        Path(made.tokens).unlink()
        assert tab.open("/") == 200
        assert "x-team: <b>t</b>" not in tab.page


def test_page_without_token_file_takes_no_orders() -> None:
    made = Operated(limited(max_concurrent_agents=2))
    explode(made)
    with visiting(made) as tab:
        tab.open("/")
        assert find_missing(tab.page, "It cannot give orders", "/order?") == ["/order?"]
        for path in ("/login", "/order?command=x", "/orders/x"):
            assert tab.open(path) == 403
            assert "start it with --admin-token-file" in tab.page


FOREIGN: dict[str, tuple[dict[str, str], int]] = {
    "another site": ({"origin": "http://evil.example"}, 403),
    "another port": ({"origin": "http://127.0.0.1:1"}, 403),
    "a frame without an origin": ({"origin": "null"}, 403),
    "no browser": ({}, 403),
    "a sibling site": ({"sec-fetch-site": "same-site"}, 403),
    "a bookmark": ({"sec-fetch-site": "none"}, 403),
    "an own page behind a proxy": (
        {"sec-fetch-site": "same-origin", "origin": "https://ops.example"},
        200,
    ),
}


@pytest.mark.parametrize(("headers", "code"), FOREIGN.values(), ids=FOREIGN)
def test_forms_count_only_from_own_pages(
    headers: dict[str, str], code: int, tmp_path: Path
) -> None:
    made = operate(tmp_path)
    with visiting(made) as tab:
        tab.open("/login")
        assert tab.submit(headers, name="ann", token=TOKEN) == code
        assert tab.sign_in() == 200
        tab.open(f"/order?command={KILL}")

        assert tab.submit(headers) == code

        assert bool(made.list_orders()) == (code == 200)


STALE: dict[str, tuple[dict[str, str], int]] = {
    "no key of the form": ({"form_key": ""}, 403),
    "a wrong key": ({"form_key": "0" * 64}, 403),
    "a key that is no text": ({"form_key": "é"}, 403),
    "another command line": ({"command": "loopguard kill --caller 'x"}, 400),
    "another command": ({"command": "loopguard serve --for 1h"}, 400),
    "no target": ({"command": "loopguard block --for 1h"}, 400),
    "a long reason": ({"reason": "x" * 257}, 400),
    "a long form": ({"reason": "x" * 70_000}, 413),
    "an ended order": ({"command": "loopguard overrides --revoke x"}, 200),
}


@pytest.mark.parametrize(("fields", "code"), STALE.values(), ids=STALE)
def test_wrong_form_gives_no_order(fields: dict[str, str], code: int, tmp_path: Path) -> None:
    made = operate(tmp_path)
    with visiting(made) as tab:
        tab.sign_in()
        tab.open(f"/order?command={KILL}")

        assert tab.submit(**fields) == code

        assert ('role="alert"' in tab.page) == (code != 200)
        assert made.list_orders() == []


def test_lost_store_gives_no_order_and_says_so(tmp_path: Path) -> None:
    store = Away()
    made = operate(tmp_path, store=store)
    with visiting(made) as tab:
        tab.sign_in()
        tab.open(f"/order?command={KILL}")
        store.away = ALL

        assert tab.submit() == 503

        assert find_missing(tab.page, 'role="alert"', "away") == []
        store.away = NOTHING
        assert made.list_orders() == []


def test_form_of_an_older_sign_in_is_refused(tmp_path: Path) -> None:
    made = operate(tmp_path)
    with visiting(made) as tab:
        tab.sign_in()
        tab.open(f"/order?command={KILL}")
        form, older = tab.page, dict(tab.client.cookies)
        tab.sign_in()
        tab.page = form

        assert tab.submit() == 403

        assert "this form is older than your sign-in" in tab.page
        assert dict(tab.client.cookies) != older
        assert made.list_orders() == []


def sign_out(tab: Tab, _: Operated) -> None:
    answer = tab.client.post("/logout", headers={"origin": tab.url})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")


def remove_token(_: Tab, made: Operated) -> None:
    Path(made.tokens).write_text("a-token-of-another-operator\n")


def forge(tab: Tab, _: Operated) -> None:
    ((name, cookie),) = tab.client.cookies.items()
    tab.client.cookies.clear()
    tab.client.cookies.set(name, f"9{cookie}")


def garble(tab: Tab, _: Operated) -> None:
    tab.client.cookies.clear()
    tab.client.headers = httpx.Headers([(b"cookie", b"loopguard_operator=1.2.\xe9.4")])


@pytest.mark.parametrize("end", [sign_out, remove_token, forge, garble])
def test_order_needs_a_valid_sign_in(end: Any, tmp_path: Path) -> None:  # noqa: ANN401
    made = operate(tmp_path)
    with visiting(made) as tab:
        tab.sign_in()
        tab.open(f"/order?command={KILL}")
        end(tab, made)

        assert tab.submit() == 401

        assert find_missing(tab.page, "your sign-in has ended", html.escape(KILL)) == []
        assert made.list_orders() == []
        assert tab.open(f"/order?command={KILL}") == 200
        assert "Sign in to give orders" in tab.page


def test_sign_in_ends_after_eight_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with visiting(operate(tmp_path)) as tab:
        tab.sign_in()
        now = time.time()
        for hours, title in ((7.9, "Kill for"), (8, "Sign in to give orders")):
            monkeypatch.setattr(f"{SIGN_IN}.time", partial(operator.add, now, hours * 3_600))
            tab.open(f"/order?command={KILL}")
            assert title in tab.page


def test_cookie_is_hidden_from_scripts_and_other_sites(tmp_path: Path) -> None:
    with visiting(operate(tmp_path)) as tab:
        form = {"name": "ann <x>", "token": TOKEN}
        cookies = {}
        for scheme in ("http", "https"):
            origin = {"origin": f"{scheme}{tab.url.removeprefix('http')}"}
            answer = tab.client.post("/login", data=form, headers=origin)
            cookies[scheme] = answer.headers["set-cookie"]

    for scheme, cookie in cookies.items():
        value, *attributes = cookie.lower().split("; ")
        assert {"httponly", "samesite=strict", "path=/", "max-age=28800"} <= {*attributes}
        assert ("secure" in attributes) == (scheme == "https")
        assert TOKEN not in value


def test_every_replica_accepts_a_sign_in(tmp_path: Path) -> None:
    made = operate(tmp_path, replicas=2)
    with visiting(made) as tab, visiting(made, 1) as other:
        tab.sign_in()
        other.client.cookies = tab.client.cookies
        other.open(f"/order?command={KILL}")

        assert other.submit() == 200

        assert len(made.list_orders(1)) == 1
        assert tab.open(f"/orders/{made.list_orders(1)[0]['override']}") == 200
        assert "Kill in force" in tab.page


def test_wrong_tokens_are_rate_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with visiting(operate(tmp_path)) as tab:
        assert tab.sign_in() == 200
        for _ in range(5):
            assert tab.sign_in("not-the-token-at-all") == 401
            assert "this is not a token of --admin-token-file" in tab.page
        assert caplog.text.count("sign-in refused") == 5
        assert tab.sign_in() == 429
        assert re.search("too many wrong tokens from your address: try again in [0-9]+ s", tab.page)

        now = time.monotonic()
        monkeypatch.setattr(f"{SIGN_IN}.monotonic", lambda: now + 61)
        assert tab.sign_in() == 200


def test_unusable_token_file_is_explained(tmp_path: Path) -> None:
    made = operate(tmp_path)
    with visiting(made) as tab:
        Path(made.tokens).unlink()

        assert tab.sign_in() == 503

        assert "the token file: No such file or directory" in tab.page


def test_grant_sent_twice_counts_once(tmp_path: Path) -> None:
    made = operate(
        tmp_path, limited_budget(bucket(0.001, 2, name="rate", keys=["header:x-user-id"]))
    )
    statuses = [status(ask_budget(made.service, x_user_id="ann")) for _ in range(3)]
    with visiting(made) as tab:
        tab.sign_in()
        tab.open("/")
        tab.press("free", "Budgets")
        assert find_missing(tab.page, "Grant for 24 hours?", "+ rate", "1 of 1") == ["1 of 1"]
        form = tab.page
        for _ in range(2):
            tab.page = form
            assert tab.submit() == 200

    assert statuses == [200, 200, 429]
    assert len(made.list_orders()) == 1
    assert status(ask_budget(made.service, x_user_id="ann")) == 200


def test_scripts_in_commands_are_escaped(tmp_path: Path) -> None:
    script = "loopguard block --tool '<script>document.title=1</script>' --for 1h"
    with visiting(operate(tmp_path)) as tab:
        tab.open(f"/order?command={script}")
        pages = [tab.page]
        tab.submit(name=script, token=TOKEN)
        pages.append(tab.page)
        assert "All callers that use the tool." in tab.page
        tab.submit(reason=script)
        pages.append(tab.page)
        tab.open(f"/order?command={script}'")
        pages.append(tab.page)

    for page in pages:
        assert Outline(page).elements.count("script") == 0
        assert "&lt;script&gt;" in page


COMMANDS = [
    KILL,
    "loopguard release --session 0123456789abcdef",
    "loopguard block --tool 'my tool' --for 30m",
    "loopguard allow --caller red --fingerprint 01234567 --for 2h",
    "loopguard release --caller 0123456789abcdef --policy p",
    "loopguard grant --session 0123456789abcdef --caller 0123456789abcdef --tool run=x=2 --for 1d",
    "loopguard grant --session 0123456789abcdef --steps 20 --concurrent-agents 3 --for 1d",
    "loopguard grant --caller 0123456789abcdef --cost 7.5 --for 1d",
    "loopguard grant --caller 0123456789abcdef --policy p --budget usd --amount 1.2e+09 --for 1d",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_button_gives_the_order_of_its_command(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []

    class Client:
        def ask(self, _: str, **about: Any) -> dict[str, str]:  # noqa: ANN401
            sent.append(about["body"])
            return {"override": "x", "ends": "y"}

    monkeypatch.setattr(ordering, "open_clients", lambda _: [Client()])
    monkeypatch.setattr(ordering, "make_headers", lambda *_: {})

    assert main(shlex.split(command)[1:]) == 0
    given = read_command(command).order

    assert {"seconds": sent[0].get("seconds"), "key": sent[0].get("key"), **given} == {
        "seconds": None,
        "key": None,
        **sent[0],
    }


@pytest.mark.parametrize("text", ["", "loopguard", "loopguard kill --caller", "a kill --steps x"])
def test_other_text_is_no_command(text: str) -> None:
    with pytest.raises(BadOrderError, match="this is not a command of a row"):
        read_command(text)


def shows(browser: Browser, title: str) -> bool:
    return browser.read("h1") == title


@pytest.mark.deep
@BROWSER
def test_phone_stops_an_explosion(tmp_path: Path) -> None:
    made = operate(tmp_path, show_callers=True)
    explode(made)
    with made.listen() as url, browsing() as browser:
        browser.resize(390, 844, phone=True)
        browser.open(f"http://{url}/")
        browser.click("document.querySelector('[data-key^=agents] .command .button')")
        for title, fields in (
            ("Sign in to give orders", {"name": "ann", "token": TOKEN}),
            ("Kill for 24 hours?", {"reason": "incident 7"}),
            ("Kill in force", {}),
        ):
            eventually(partial(shows, browser, title), title)
            assert browser.list_wide() == browser.list_unreadable() == []
            assert browser.run("document.documentElement.scrollWidth") == 390
            for name, value in fields.items():
                browser.run(f"document.querySelector('[name={name}]').value = '{value}'")
            if fields:
                assert browser.run("document.querySelector('form button').offsetHeight") >= 44
                browser.click("document.querySelector('form button')")
        assert browser.problems == []
    assert set(explode(made).values()) == {429}
