"""Changes that hide a loop from `turns`, and changes that do not."""

import json
from pathlib import Path

import pytest

from extproc.detectors.loops import TurnRule
from extproc.detectors.tools import ToolLimits
from extproc.request.document import Document
from tests.support.evasions import EVASIONS, TURNS
from tests.support.turn_writers import Did, as_chat

_PAGE = Path(__file__).parents[3] / "docs" / "detectors.md"


def find_first(turns: list[Did], threshold: int) -> int:
    """The first turn, from 1 on, with which these are a loop; 0 if none is."""
    rule = TurnRule(ToolLimits(threshold))
    for end in range(1, len(turns) + 1):
        if (
            rule.find_loop(rule.read(Document(json.dumps(as_chat(turns[:end])).encode())))
            is not None
        ):
            return end
    return 0


def test_documentation_lists_changes_that_hide_a_loop() -> None:
    hides = [
        name
        for name, write in EVASIONS.items()
        if not find_first([write(number) for number in range(TURNS)], 3)
    ]

    assert "These differences do" in _PAGE.read_text()
    listed = (
        _PAGE.read_text()
        .partition("These differences do")[2]
        .partition("\n\n")[2]
        .partition("\n\n")[0]
    )
    assert listed.splitlines() == [f"- {name}" for name in hides]


def _think(number: int, tool: str = "think") -> Did:
    return Did(((tool, {"thought": f"no. {number}"}),), ("ok",))


def _look(result: str, tool: str = "read_file") -> Did:
    return Did(((tool, {"path": "a"}),), (result,))


@pytest.mark.parametrize(
    ("turns", "loops"),
    [
        ([turn for n in range(3) for turn in (_think(n), _look("same"))], True),
        ([turn for n in range(3) for turn in (_think(n), _think(n + 9), _look("same"))], True),
        ([turn for n in range(3) for turn in (_think(n), _look(f"news no. {n}"))], False),
        ([turn for n in range(3) for turn in (_think(n, "create_note"), _look("same"))], False),
        ([_think(n) for n in range(6)], False),
        ([_think(0)] * 3, True),
    ],
)
def test_thinking_between_equal_turns_hides_no_loop(turns: list[Did], *, loops: bool) -> None:
    assert bool(find_first(turns, 3)) is loops
