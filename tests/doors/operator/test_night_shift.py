"""An operator with `loopguard top` or a phone: the real Envoy, two replicas, a real Valkey.

Three agents loop, a client polls honestly, a tool is down, and others work. Each has to be found,
understood, and stopped or freed with the commands that the screen shows, as they are, or with the
page's buttons, and nothing else.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.browser import BROWSER, Browser, browsing
from tests.support.harness import Stack, eventually, stack
from tests.support.night import POLICIES, Scene
from tests.support.pages import TOKEN
from tests.support.servers import server

pytestmark = pytest.mark.deep  # a person's shell starts a command a dozen times


class Row(NamedTuple):
    """A row of `top`: its text, and commands to copy, by their first word such as `block`."""

    text: str
    commands: dict[str, str]


@dataclass
class Shift(Scene):
    """The night of one person, in whose shell these variables are set."""

    environment: dict[str, str]

    def enter(self, command: str) -> str:
        environment = {**os.environ, **self.environment, "COLUMNS": "120"}
        ran = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, check=False, env=environment
        )
        assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
        return ran.stdout

    def order(self, row: Row, verb: str) -> str:
        command = row.commands[verb]
        assert command.startswith(f"loopguard {verb} "), command
        self.enter(command)
        return command

    def look(self) -> list[Row]:
        table, *blocks = self.enter("loopguard top --once --commands").strip().split("\n\n")
        rows = []
        for block in blocks:
            about = [
                line.removeprefix("# ") for line in block.splitlines() if line.startswith("# ")
            ]
            commands = [line for line in block.splitlines() if not line.startswith("# ")]
            what, _, whom = about[0].partition("  ")
            lines = [
                line
                for line in table.splitlines()
                if line.startswith(what.partition(" for ")[0]) and whom in line
            ]
            rows.append(
                Row(
                    "\n".join([*about, *lines]),
                    {command.split()[1]: command for command in commands},
                )
            )
        return rows

    def look_for(self, *words: str, verb: str = "") -> list[Row]:
        """The rows, once each word is in one with a command of that verb."""
        rows = self.look()
        shown = [row for row in rows if not verb or verb in row.commands]
        return rows if all(any(word in row.text for row in shown) for word in words) else []

    def check_orders(self) -> None:
        """All but the poller and the healthy ones are refused."""
        assert [self.storm() for _ in range(4)] == [429] * 4
        assert [self.chat(turns) for turns in (7, 7, 7, 7)] == [429] * 4
        assert [self.run(turns) for turns in (7, 7, 1, 2)] == [429] * 4
        assert self.break_tool(1) == {429}
        assert [self.poll() for _ in range(8)] == [200] * 8
        assert self.work() == {200}

    def list_orders(self) -> list[set[str]]:
        documents = [replica.ask("/overrides") for replica in self.made.replicas]
        return [{order["override"] for order in document["overrides"]} for document in documents]


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[Stack, dict[str, str]]]:
    """Envoy, two replicas and Valkey, and the environment of a person's shell."""
    with tempfile.TemporaryDirectory(prefix="lg") as name, server() as valkey:
        tokens = Path(name) / "tokens"
        tokens.write_text(TOKEN)
        flags = (
            "--store",
            f"redis://{valkey.address}",
            "--admin-token-file",
            str(tokens),
            "--show-callers",
        )
        with stack(POLICIES, *flags, "--price", "2.50", replicas=2) as parts:
            # `loopguard` is found as in a shell where it is installed; the second replica is asked,
            # which has not seen it all.
            environment = {
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "LOOPGUARD_ADMIN": f"127.0.0.1:{parts.replicas[1].admin_port}",
                "LOOPGUARD_ADMIN_TOKEN_FILE": str(tokens),
            }
            yield parts, environment


def find(rows: Sequence[Row], *words: str) -> Row:
    found = [row for row in rows if all(word in row.text for word in words)]
    assert len(found) == 1, (words, [row.text for row in rows])
    return found[0]


def test_a_night_ends_with_the_commands_that_top_shows(made: tuple[Stack, dict[str, str]]) -> None:
    parts, environment = made
    shift = Shift(parts, "eve", "crm_find", environment)
    callers = [f"{name}-eve" for name in ("storm", "stuck", "spender", "poller")]
    shift.begin()
    rows = eventually(lambda: shift.look_for(*callers, "crm_find"), "everything on the screen")

    # Whom it is about, what repeats, why, and what is done about it.
    storm = find(rows, "storm-eve", "/hook/billing", "warn")
    stuck = find(rows, "stuck-eve", "book_hotel", "steer")
    spender = find(rows, "spender-eve", "search_the_web", "steer")
    poller = find(rows, "poller-eve", "/jobs/42", "reject")
    outage = find(rows, "crm_find fails for 6 sessions of 3 callers", "wait")
    assert not [row.text for row in rows if "healthy" in row.text]

    for row, verb in (
        (storm, "block"),
        (stuck, "block"),
        (spender, "kill"),
        (poller, "allow"),
        (outage, "block"),
    ):
        shift.order(row, verb)
    # As typed
    eventually(
        lambda: all(len(orders) == 5 for orders in shift.list_orders()), "all orders everywhere"
    )

    shift.check_orders()

    # The build is done: what was ordered is taken back from the same screen.
    after = eventually(
        lambda: shift.look_for(*callers, verb="overrides"), "all orders on the screen"
    )
    for caller, kind in zip(callers, ("block", "block", "kill", "allow"), strict=True):
        find(after, caller, kind)
    revoked = shift.order(find(after, "poller-eve", "allow"), "overrides").split()[-1]
    eventually(
        lambda: not any(revoked in orders for orders in shift.list_orders()),
        "no allowance any more",
    )
    assert shift.poll() == 429  # it has been counted all the while


def press(browser: Browser, row: str, word: str) -> None:
    """Give the order of a row's button, signing in before the first one."""
    button = (
        f"[...document.querySelectorAll('.row')].find(each => each.innerText.includes('{row}'))"
        f"?.querySelector('.command[data-word={word}] .button')"
    )
    browser.run("scrollTo(0, 0)")
    eventually(lambda: browser.run(f"!!{button}"), f"a button to {word} {row}")
    browser.run("paused = true")  # no row moves away
    browser.click(button)
    asked = eventually(lambda: read_title(browser, "?", "Sign in"), "a confirmation")
    if asked.startswith("Sign in"):
        fill(browser, name="pam", token=TOKEN)
        asked = eventually(lambda: read_title(browser, "?"), "a confirmation")
    assert row.split(maxsplit=1)[0] in browser.read("main")
    assert browser.list_wide() == []
    fill(browser, reason="the night")
    eventually(lambda: read_title(browser, "in force"), "an order in force")


def read_title(browser: Browser, *words: str) -> str:
    title = browser.read("h1")
    return title if any(word in title for word in words) else ""


def fill(browser: Browser, **fields: str) -> None:
    for name, value in fields.items():
        browser.run(f"document.querySelector('[name={name}]').value = '{value}'")
    browser.click("document.querySelector('form.order button')")


@BROWSER
def test_a_night_ends_with_buttons_on_a_phone(made: tuple[Stack, dict[str, str]]) -> None:
    parts, environment = made
    shift = Shift(parts, "pam", "crm_get", environment)
    shift.begin()
    with browsing() as browser:
        browser.resize(390, 844, phone=True)
        for row, word in (
            ("storm-pam", "stop"),
            ("stuck-pam", "stop"),
            ("spender-pam", "stop"),
            ("poller-pam", "free"),
            ("crm_get fails", "stop"),
        ):
            browser.open(parts.replicas[1].admin_url)
            press(browser, row, word)
        assert browser.problems == []
    eventually(
        lambda: all(
            sum(order["who"] == "pam (page)" for order in replica.ask("/overrides")["overrides"])
            == 5
            for replica in parts.replicas
        ),
        "all orders everywhere",
    )

    shift.check_orders()
