"""A night shift, on the real Envoy with two replicas and a real Valkey: all that a person sees is the page, or `loopguard top`.

Three agents loop, a client polls honestly, a tool is down, and others work. Each has to be found, understood, and stopped or
freed with the commands that the screen shows, as they are, and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest

from tests.support.browser import BROWSER, Browser, browsing
from tests.support.harness import Stack, eventually, stack
from tests.support.night import POLICIES, Scene
from tests.support.servers import server

pytestmark = pytest.mark.deep  # a person's shell starts a command a dozen times


class Row(NamedTuple):
    """What a screen shows of one thing: its text, and commands to copy, by their first word such as `block`."""

    text: str
    commands: dict[str, str]


class Screen(Protocol):
    """How a person sees the night. `steps` counts what the person does: to look, to copy, to run."""

    steps: int

    def look(self) -> list[Row]:
        """Everything that is wrong."""

    def copy(self, row: Row, verb: str) -> str:
        """A command of a row, as a person takes it from the screen."""


@dataclass
class Shift(Scene):
    """The night of one person, in whose shell these variables are set."""

    environment: dict[str, str] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)

    def type(self, screen: Screen, row: Row, verb: str) -> str:
        """Run a command that a row shows, as it is; returns what it prints."""
        command = screen.copy(row, verb)
        assert command.startswith(f"loopguard {verb} "), command
        screen.steps += 1
        self.done.append(command)
        ran = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, check=False, env={**os.environ, **self.environment}
        )
        assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
        return ran.stdout

    def list_orders(self) -> list[set[str]]:
        """The names of the orders that apply on each replica."""
        documents = [replica.ask("/overrides") for replica in self.made.replicas]
        return [{order["override"] for order in document["overrides"]} for document in documents]


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[Stack, dict[str, str]]]:
    """Envoy, two replicas and Valkey, and the environment of a person's shell."""
    with tempfile.TemporaryDirectory(prefix="lg") as name, server() as valkey:
        tokens = Path(name) / "tokens"
        tokens.write_text("correct-horse-battery-staple")
        flags = ("--store", f"redis://{valkey.address}", "--admin-token-file", str(tokens), "--show-callers")
        with stack(POLICIES, *flags, "--price", "2.50", replicas=2) as parts:
            # `loopguard` is found as in a shell where it is installed; the second replica is asked, which has not seen it all.
            environment = {
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "LOOPGUARD_ADMIN": f"127.0.0.1:{parts.replicas[1].admin_port}",
                "LOOPGUARD_ADMIN_TOKEN_FILE": str(tokens),
            }
            yield parts, environment


class Page:
    """The page, in Chromium."""

    def __init__(self, browser: Browser, url: str) -> None:
        """Nothing is opened yet."""
        self.browser, self.url, self.steps = browser, url, 0

    def look(self) -> list[Row]:
        """Open the page, and read its rows."""
        self.steps += 1
        self.browser.open(self.url)
        found = self.browser.run(
            """[...document.querySelectorAll(".row[data-key^='loop '], .row[data-key^='tool ']")].map(row =>"""
            " [row.innerText, [...row.querySelectorAll('.command code')].map(each => each.innerText)])"
        )
        return [Row(" ".join(text.split()), name_commands(commands)) for text, commands in found]

    def copy(self, row: Row, verb: str) -> str:
        """Click on the button beside a command."""
        self.steps += 1
        text = json.dumps(row.commands[verb])
        self.browser.click(
            f"[...document.querySelectorAll('.command')].find(each => each.querySelector('code').innerText == {text})"
            ".querySelector('button')"
        )
        return eventually(self.browser.paste, "a command on the clipboard")


class Top:
    """`loopguard top` in a terminal."""

    def __init__(self, environment: dict[str, str]) -> None:
        """Nothing is shown yet."""
        self.environment, self.steps = environment, 0

    def look(self) -> list[Row]:
        """Run it once, and read its table and the commands below."""
        self.steps += 1
        environment = {**os.environ, **self.environment, "COLUMNS": "120"}
        done = subprocess.run(
            ["loopguard", "top", "--once", "--commands"], capture_output=True, text=True, check=True, env=environment
        )
        table, *blocks = done.stdout.strip().split("\n\n")
        rows = []
        for block in blocks:
            about = [line.removeprefix("# ") for line in block.splitlines() if line.startswith("# ")]
            commands = [line for line in block.splitlines() if not line.startswith("# ")]
            what, _, whom = about[0].partition("  ")
            lines = [line for line in table.splitlines() if line.startswith(what.partition(" for ")[0]) and whom in line]
            rows.append(Row("\n".join([*about, *lines]), name_commands(commands)))
        return rows

    def copy(self, row: Row, verb: str) -> str:
        """Select it."""
        self.steps += 1
        return row.commands[verb]


def name_commands(commands: Sequence[str]) -> dict[str, str]:
    """Commands by what they do."""
    return {command.split()[1]: command for command in commands}


def find(rows: Sequence[Row], *words: str) -> Row:
    """The only row with these words."""
    found = [row for row in rows if all(word in row.text for word in words)]
    assert len(found) == 1, (words, [row.text for row in rows])
    return found[0]


def end_the_night(shift: Shift, screen: Screen) -> None:
    """Find, understand, act, and see that it worked."""
    shift.begin()
    rows = eventually(lambda: has_all(screen.look(), shift), "everything on the screen")
    screen.steps = 1  # a person looks once; a test may come before the replicas have told each other

    # Whom it is about, what repeats, why, and what is done about it.
    storm = find(rows, f"storm-{shift.who}", "/hook/billing", "warn")
    stuck = find(rows, f"stuck-{shift.who}", "book_hotel", "steer")
    spender = find(rows, f"spender-{shift.who}", "search_the_web", "steer")
    poller = find(rows, f"poller-{shift.who}", "/jobs/42", "reject")
    outage = find(rows, f"{shift.tool} fails for 6 sessions of 3 callers", "wait")
    assert not [row.text for row in rows if "healthy" in row.text]

    known = shift.list_orders()[0]
    shift.type(screen, storm, "block")
    shift.type(screen, stuck, "block")
    shift.type(screen, spender, "kill")
    shift.type(screen, poller, "allow")
    shift.type(screen, outage, "block")
    eventually(lambda: all(len(orders - known) == 5 for orders in shift.list_orders()), "all orders everywhere")  # as typed

    assert [shift.storm() for _ in range(4)] == [429] * 4
    assert [shift.chat(turns) for turns in (7, 7, 7, 7)] == [429] * 4
    assert [shift.run(turns) for turns in (7, 7, 1, 2)] == [429] * 4
    assert shift.break_tool(1) == {429}
    assert [shift.poll() for _ in range(8)] == [200] * 8
    assert shift.work() == {200}

    seen = screen.steps
    after = eventually(lambda: has_orders(screen.look(), shift), "all orders on the screen")
    screen.steps = seen + 1
    for words in (("storm", "block"), ("stuck", "block"), ("spender", "kill"), ("poller", "allow")):
        row = find(after, f"{words[0]}-{shift.who}", words[1])
        assert "overrides" in row.commands, row

    # The build is done: what was ordered is taken back from the same screen.
    shift.type(screen, find(after, f"poller-{shift.who}", "allow"), "overrides")
    revoked = shift.done[-1].split()[-1]
    eventually(lambda: not any(revoked in orders for orders in shift.list_orders()), "no allowance any more")
    assert shift.poll() == 429  # it has been counted all the while
    assert len(shift.done) == 6
    # Twice a look; a command is copied, and run.
    assert screen.steps == 2 + 2 * len(shift.done)


def has_all(rows: list[Row], shift: Shift) -> list[Row]:
    """The rows, if everything is in them; replicas need a moment to tell each other."""
    whom = [f"{name}-{shift.who}" for name in ("storm", "stuck", "spender", "poller")]
    shown = all(any(name in row.text for row in rows) for name in (*whom, f"{shift.tool}"))
    return rows if shown else []


def has_orders(rows: list[Row], shift: Shift) -> list[Row]:
    """The rows, if the orders are in them."""
    whom = [f"{name}-{shift.who}" for name in ("storm", "stuck", "spender", "poller")]
    return rows if all(any(name in row.text and "overrides" in row.commands for row in rows) for name in whom) else []


@contextmanager
def shifting(made: tuple[Stack, dict[str, str]], who: str, tool: str) -> Iterator[Shift]:
    """The night of a person."""
    parts, environment = made
    yield Shift(parts, who, tool, environment)


def test_a_night_with_top(made: tuple[Stack, dict[str, str]]) -> None:
    """All that is known is what `loopguard top` prints, and all that is done is commands that it prints."""
    with shifting(made, "eve", "crm_find") as shift:
        end_the_night(shift, Top(shift.environment))


@BROWSER
def test_a_night_with_the_page(made: tuple[Stack, dict[str, str]]) -> None:
    """All that is known is what the page shows in Chromium, and all that is done is commands that are copied from it."""
    with shifting(made, "joe", "erp_lookup") as shift, browsing() as browser:
        screen = Page(browser, f"http://{shift.environment['LOOPGUARD_ADMIN']}/")
        end_the_night(shift, screen)

        # Who has ordered what, also where nothing loops any more, and what a session has done.
        browser.open(screen.url)
        orders = browser.read("main").partition("Orders in force")[2].partition("Sessions")[0]
        for words in ("block", "kill", "(token)", shift.tool):
            assert words in orders, orders
        browser.click("document.querySelector('.row[data-key^=loop] a[href^=\"/sessions/\"]')")
        eventually(lambda: "Timeline" in browser.read("main"), "the session")
        run = browser.read("main")
        for words in ("killed: operator", "search_the_web", "note to the model", "times: killed", "kill by "):
            assert words in run, run
        assert browser.problems == []
