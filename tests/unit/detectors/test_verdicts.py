"""The whole rule of `turns`, from a request to an action, against a second, slow statement of it.

`tests/support/verdict_fuzzer.py` tries as many conversations as one likes.
"""

from __future__ import annotations

from random import Random

import pytest

from tests.support.extent import deepen
from tests.support.verdict_fuzzer import look, make_detector, try_alone, try_remembered, try_tools
from tests.support.verdicts import Rules, Turn, judge, write


@pytest.mark.slow
@pytest.mark.parametrize("seed", deepen(range(8), 0, 1))
def test_a_request_alone_gets_the_verdict_of_the_second_statement(seed: int) -> None:
    """Weak and strong loops, persons who speak, tools that only look or change something: in chats and in texts."""
    dice = Random(seed)
    for _ in range(250):
        try_alone(dice)


@pytest.mark.slow
@pytest.mark.parametrize("seed", deepen(range(8), 0, 1))
def test_thresholds_of_tools_give_the_verdict_of_the_second_statement(seed: int) -> None:
    """Up to 30, for which 64 turns are looked at."""
    dice = Random(seed)
    for _ in range(150):
        try_tools(dice)


def test_a_similar_error_stays_a_note_where_a_weak_loop_may_be_refused() -> None:
    """`weak_threshold` is about loops. Here a patient rule sees one that the first rule does not."""
    failed, spoken = Turn("edit", "a", "error: request timed out", "passing"), "OK, next."
    heartbeats = [Turn("", spoken, f"Heartbeat {number}: anything new?") for number in (2, 3)]
    turns = [failed] * 4 + [heartbeats[0], failed, heartbeats[1], failed]
    rules = Rules((("reject", 3),), weak=5)

    assert look(make_detector(rules), write(turns, "chat", offers=True)) == judge(turns, rules) == "warn"


@pytest.mark.slow
@pytest.mark.parametrize("seed", deepen(range(4), 0))
@pytest.mark.parametrize("chained", [False, True], ids=["ring", "chain"])
def test_what_the_store_remembers_gives_the_same_verdict(seed: int, chained: bool) -> None:
    """Of a client that clears old results: strength, words of persons and roles of tools survive in the entries."""
    dice = Random(f"{seed} {chained}")
    for _ in range(12):
        try_remembered(dice, chained=chained)
