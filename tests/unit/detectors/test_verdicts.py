"""The whole rule of `turns`, from a request to an action, against a second, slow statement of it.

`tests/support/verdict_fuzzer.py` tries any number of conversations.
"""

from random import Random

import pytest

from tests.support.extent import deepen
from tests.support.verdict_fuzzer import look, make_detector, try_alone, try_remembered, try_tools
from tests.support.verdicts import Rules, Turn, judge, write


@pytest.mark.slow
@pytest.mark.parametrize("seed", deepen(range(8), 0, 1))
def test_single_request_gets_the_expected_verdict(seed: int) -> None:
    dice = Random(seed)
    for _ in range(250):
        try_alone(dice)


@pytest.mark.slow
@pytest.mark.parametrize("seed", deepen(range(8), 0, 1))
def test_thresholds_of_tools_give_the_expected_verdict(seed: int) -> None:
    dice = Random(seed)
    for _ in range(150):
        try_tools(dice)


def test_similar_error_stays_a_note_beside_weak_loop() -> None:
    """`weak_threshold` is about loops.

    Here a patient rule sees one that the first rule does not.
    """
    failed, spoken = Turn("edit", "a", "error: request timed out", "passing"), "OK, next."
    heartbeats = [Turn("", spoken, f"Heartbeat {number}: anything new?") for number in (2, 3)]
    turns = [failed] * 4 + [heartbeats[0], failed, heartbeats[1], failed]
    rules = Rules((("reject", 3),), weak=5)

    assert (
        look(make_detector(rules), write(turns, "chat", offers=True))
        == judge(turns, rules)
        == "warn"
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", deepen(range(4), 0))
@pytest.mark.parametrize("chained", [False, True], ids=["ring", "chain"])
def test_condensed_conversation_gets_the_expected_verdict(seed: int, chained: bool) -> None:
    dice = Random(f"{seed} {chained}")
    for _ in range(12):
        try_remembered(dice, chained=chained)
