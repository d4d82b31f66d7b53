"""What hides a loop: which turn is the first that `turns` notices, and that it refuses, whatever varies."""

from __future__ import annotations

import json

from extproc.detectors.loops import TurnRule
from extproc.detectors.tools import ToolLimits
from extproc.request.document import Document
from tests.bench.report import Row
from tests.support.evasions import EVASIONS, TURNS
from tests.support.turn_writers import Did, as_chat

TITLE = (
    f"evasion: the turn, of {TURNS}, from which a loop is noticed (threshold 3) and refused (threshold 7), by what varies in it"
)


def run(*, quick: bool) -> list[Row]:  # noqa: ARG001  # it takes no time
    """A row for each."""
    rows = []
    for name, write in EVASIONS.items():
        turns = [write(number) for number in range(TURNS)]
        noticed, refused = find_first(turns, 3), find_first(turns, 7)
        rows.append(
            Row(
                name,
                noticed,
                "turns",
                note=f"refused from {refused} on" if refused else "never refused" if noticed else "hides it",
            )
        )
    return rows


def find_first(turns: list[Did], threshold: int) -> int:
    """The first turn, from 1 on, with which these are a loop; 0 where none is."""
    rule = TurnRule(ToolLimits(threshold))
    for end in range(1, len(turns) + 1):
        if rule.find_loop(rule.read(Document(json.dumps(as_chat(turns[:end])).encode()))) is not None:
            return end
    return 0
