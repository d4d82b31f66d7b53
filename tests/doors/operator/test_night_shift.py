"""An operator with nothing but `loopguard top`: the real Envoy, two replicas, a real Valkey.

Three agents loop, a client polls honestly, a tool is down, and others work. Each has to be found,
understood, and stopped or freed with the commands that the screen shows, as they are, and nothing
else.
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

from tests.support.harness import Stack, eventually, stack
from tests.support.night import POLICIES, Scene
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

    def list_orders(self) -> list[set[str]]:
        documents = [replica.ask("/overrides") for replica in self.made.replicas]
        return [{order["override"] for order in document["overrides"]} for document in documents]


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[Stack, dict[str, str]]]:
    """Envoy, two replicas and Valkey, and the environment of a person's shell."""
    with tempfile.TemporaryDirectory(prefix="lg") as name, server() as valkey:
        tokens = Path(name) / "tokens"
        tokens.write_text("correct-horse-battery-staple")
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
    eventually(
        lambda: all(len(orders) == 5 for orders in shift.list_orders()), "all orders everywhere"
    )  # as typed

    assert [shift.storm() for _ in range(4)] == [429] * 4
    assert [shift.chat(turns) for turns in (7, 7, 7, 7)] == [429] * 4
    assert [shift.run(turns) for turns in (7, 7, 1, 2)] == [429] * 4
    assert shift.break_tool(1) == {429}
    assert [shift.poll() for _ in range(8)] == [200] * 8
    assert shift.work() == {200}

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
