"""The whole rule of `turns`, from a request to an action, against a second, slow statement of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from random import Random

import pytest

from extproc.decision import STRONG, Repeat
from extproc.detectors import make_similarity
from extproc.detectors.loops import USUAL_TURNS
from extproc.detectors.similar_turns import find_action_cycle, find_long_action
from extproc.detectors.tools import Limit, ToolLimits
from extproc.detectors.turns import Turns
from extproc.engine.plan import Detector
from extproc.policy.bundle import LoopDetection
from extproc.request.document import Document
from extproc.store.rules.ring import Push, Ring, push
from extproc.store.rules.windows import UNCOUNTED
from tests.support import verdicts
from tests.support.chains import CHAINS, Model
from tests.support.extent import deepen
from tests.support.verdicts import MadeUp, Rules, Turn, judge, write

MANY = int(os.environ.get("LOOPGUARD_CONVERSATIONS", "0"))
"""Conversations to try in all; 100,000 take some minutes."""

LADDERS: list[tuple[tuple[str, int], ...]] = [
    (("steer", 3), ("land", 5), ("reject", 7)),
    (("steer", 3), ("reject", 7)),
    (("steer", 2), ("throttle", 4), ("reject", 6)),
    (("reject", 3),),
    (("steer", 3),),
    (("warn", 3), ("steer", 5), ("reject", 8)),
]
RULES = [
    Rules(ladder, weak, offers, max_cycle)
    for ladder in LADDERS
    for weak in (None, 14, max(ladder[0][1], 5))
    for offers in (True, False)
    for max_cycle in (10, 3)
]
TOOLS: list[tuple[tuple[str, int], ...]] = [
    (("poll", 20),),
    (("poll", 25), ("tweak", 15)),
    (("edit", 2), ("view", 22), ("poll", 14)),
]
PATIENT = [Rules(rules.ladder, rules.weak, rules.offers, rules.max_cycle, tools) for rules in RULES for tools in TOOLS]
PATIENT += [Rules((("reject", 3),), weak, tools=(("poll", most), ("view", 5))) for weak in (None, 14) for most in (20, 30)]
"""With thresholds of tools."""

SHAPES = ["chat", "anthropic", "responses", "fence", "react"]


def make_detector(rules: Rules) -> Detector:
    """The detector of a policy with these settings."""
    (action, threshold), *later = rules.ladder
    loop = LoopDetection.model_validate(
        {
            "enabled": True,
            "similarity": "turns",
            "threshold_identical_requests": threshold,
            "action": action,
            "escalate": dict(later),
            "weak_threshold": rules.weak,
            "max_cycle": rules.max_cycle,
            "tools": {tool: {"threshold": threshold} for tool, threshold in rules.tools},
        }
    )
    return Detector("p", "turns", loop, make_similarity(loop), shadow=False, namespace="")


def act(detector: Detector, found: Repeat | None) -> str:
    """What is done about a request."""
    return detector.judge("0" * 8, "0" * 16, UNCOUNTED, detector.similarity, found).action.value


def look(detector: Detector, body: bytes) -> str:
    """The same of a request that is seen alone."""
    return act(detector, detector.similarity.compare(Document(body))[1])


DETECTORS = [make_detector(rules) for rules in RULES]
PATIENT_DETECTORS = [make_detector(rules) for rules in PATIENT]


def try_alone(dice: Random) -> None:
    """One conversation, at a few of its requests."""
    turns = MadeUp(dice).conversation()
    place = dice.randrange(len(RULES))
    rules, shape = RULES[place], dice.choice(SHAPES)
    for end in {len(turns), dice.randrange(1, len(turns) + 1)}:
        body = write(turns[:end], shape, offers=rules.offers)
        assert look(DETECTORS[place], body) == judge(turns[:end], rules), (rules, shape, turns[:end])


def try_tools(dice: Random) -> None:
    """One conversation with a policy that has thresholds for tools."""
    place = dice.randrange(len(PATIENT))
    rules, shape = PATIENT[place], dice.choice(["chat", "anthropic", "responses"])
    turns = MadeUp(dice).conversation(most=90, around=[threshold for _, threshold in rules.tools])
    for end in {len(turns), dice.randrange(1, len(turns) + 1)}:
        body = write(turns[:end], shape, offers=rules.offers)
        assert look(PATIENT_DETECTORS[place], body) == judge(turns[:end], rules), (rules, shape, turns[:end])


def follow(turns: Sequence[Turn], detector: Detector, shape: str, *, offers: bool, chained: bool) -> list[str]:
    """What is done about each request of a conversation that shows two results at most; the store knows the others."""
    similarity, model, ring = detector.similarity, Model(), None
    assert isinstance(similarity, Turns)
    kept: Ring | None = ring
    done = []
    for end in range(1, len(turns) + 1):
        body = write(turns[:end], shape, offers=offers, cleared=True)
        _, found, memory = similarity.compare_in_session(Document(body))
        assert memory is not None
        assert memory.place is not None
        if chained:
            entries = model.ask(CHAINS.make_link("turns", "", "00", "", memory.place, memory.entry)).entries
        else:
            kept, entries = push(kept, Push("ring", memory.entry, memory.identity, USUAL_TURNS, 1_000), 0)
        done.append(act(detector, memory.recall(entries) if memory.waits else found))
    return done


def try_remembered(dice: Random, *, chained: bool) -> None:
    """One conversation, request by request."""
    turns = MadeUp(dice).conversation(most=30)
    place = dice.randrange(len(RULES))
    rules, shape = RULES[place], dice.choice(["chat", "anthropic", "responses"])
    found = follow(turns, DETECTORS[place], shape, offers=rules.offers, chained=chained)
    expected = [judge(turns[: end + 1], rules) for end in range(len(turns))]
    assert found == expected, (rules, shape, turns[: [a == b for a, b in zip(found, expected, strict=True)].index(False) + 1])


@pytest.mark.slow
@pytest.mark.parametrize("seed", deepen(range(8), 0, 1))
def test_a_request_alone_gets_the_verdict_of_the_second_statement(seed: int) -> None:
    """Weak and strong loops, persons who speak, tools that only look or change something: in chats and in texts."""
    dice = Random(seed)
    for _ in range(max(250, MANY // 10)):
        try_alone(dice)


@pytest.mark.slow
@pytest.mark.parametrize("seed", deepen(range(8), 0, 1))
def test_thresholds_of_tools_give_the_verdict_of_the_second_statement(seed: int) -> None:
    """Up to 30, for which 64 turns are looked at."""
    dice = Random(seed)
    for _ in range(max(150, MANY // 20)):
        try_tools(dice)


@pytest.mark.parametrize("seed", deepen(range(4), 0))
def test_rules_of_similar_actions_agree_with_the_second_statement(seed: int) -> None:
    """These are rules that no policy uses yet."""
    dice = Random(seed)
    for _ in range(max(100, MANY // 10)):
        turns = MadeUp(dice).conversation()
        rules, threshold = dice.choice(RULES), dice.choice([2, 3, 5])
        similarity = make_detector(rules).similarity
        assert isinstance(similarity, Turns)
        recent = similarity.rule.read(Document(write(turns, dice.choice(SHAPES), offers=rules.offers))).newest(USUAL_TURNS)
        limits, limit = ToolLimits(threshold, {}, 0), Limit(threshold)

        found = find_long_action(recent, limit), find_action_cycle(recent, limits, limit, normalized=True)

        strong = [[each.strength == STRONG for each in (one,) if each is not None] for one in found]
        shown = turns[-USUAL_TURNS:]
        expected = [statement(shown, threshold, rules) for statement in (verdicts.find_long_action, verdicts.find_action_cycle)]
        assert strong == expected, (rules, threshold, turns)


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
    for _ in range(max(12, MANY // 40)):
        try_remembered(dice, chained=chained)
