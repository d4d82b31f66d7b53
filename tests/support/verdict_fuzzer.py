"""Random conversations, judged by the engine and by the plain rules in `verdicts.py`.

`python -m tests.support.verdict_fuzzer --count 100000 --seed 1` tries many.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from time import monotonic
from typing import Final

from extproc.decision import Repeat
from extproc.detectors import make_similarity
from extproc.detectors.history import USUAL_TURNS
from extproc.detectors.turns import Turns
from extproc.engine.plan import Detector
from extproc.policy.bundle import LoopDetection
from extproc.request.document import Document
from extproc.store.rules.ring import Push, Ring, push
from extproc.store.rules.windows import UNCOUNTED
from tests.support.chains import CHAINS, Model
from tests.support.verdicts import MadeUp, Rules, Turn, judge, write

LADDERS: list[tuple[tuple[str, int], ...]] = [
    (("steer", 3), ("land", 5), ("reject", 7)),
    (("steer", 3), ("reject", 7)),
    (("steer", 2), ("throttle", 4), ("reject", 6)),
    (("reject", 3),),
    (("steer", 3),),
    (("warn", 3), ("steer", 5), ("reject", 8)),
]
RULES: Final = [
    *[
        Rules(ladder, weak, offers, max_cycle)
        for ladder in LADDERS
        for weak in (None, 14, max(ladder[0][1], 5))
        for offers in (True, False)
        for max_cycle in (10, 3)
    ],
    *[Rules(LADDERS[0], weak, forced=True) for weak in (None, 14)],
]
TOOLS: list[tuple[tuple[str, int], ...]] = [
    (("poll", 20),),
    (("poll", 25), ("tweak", 15)),
    (("edit", 2), ("view", 22), ("poll", 14)),
]
PATIENT = [
    Rules(rules.ladder, rules.weak, rules.offers, rules.max_cycle, tools)
    for rules in RULES
    for tools in TOOLS
]
PATIENT += [
    Rules((("reject", 3),), weak, tools=(("poll", most), ("view", 5)))
    for weak in (None, 14)
    for most in (20, 30)
]

SHAPES: Final = ["chat", "anthropic", "responses", "fence", "react"]


def make_detector(rules: Rules) -> Detector:
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
    return detector.judge("0" * 8, "0" * 16, UNCOUNTED, detector.similarity, found).action.value


def look(detector: Detector, body: bytes) -> str:
    return act(detector, detector.similarity.compare(Document(body))[1])


DETECTORS = [make_detector(rules) for rules in RULES]
PATIENT_DETECTORS = [make_detector(rules) for rules in PATIENT]


class OtherVerdictError(AssertionError):
    def __init__(
        self, found: str, expected: str, rules: Rules, shape: str, turns: Sequence[Turn]
    ) -> None:
        told = "\n".join(map(str, turns))
        super().__init__(
            f"found {found}, expected {expected}, by {rules}, written as {shape}, of these "
            f"turns:\n{told}"
        )


def compare(found: str, rules: Rules, shape: str, turns: Sequence[Turn]) -> None:
    expected = judge(turns, rules)
    if found != expected:
        raise OtherVerdictError(found, expected, rules, shape, turns)


def try_alone(dice: Random) -> None:
    turns = MadeUp(dice).conversation()
    place = dice.randrange(len(RULES))
    rules, shape = RULES[place], dice.choice(SHAPES)
    for end in {len(turns), dice.randrange(1, len(turns) + 1)}:
        body = write(turns[:end], shape, offers=rules.offers, forced=rules.forced)
        compare(look(DETECTORS[place], body), rules, shape, turns[:end])


def try_tools(dice: Random) -> None:
    """One conversation under a policy with thresholds for tools."""
    place = dice.randrange(len(PATIENT))
    rules, shape = PATIENT[place], dice.choice(["chat", "anthropic", "responses"])
    turns = MadeUp(dice).conversation(most=90, around=[threshold for _, threshold in rules.tools])
    for end in {len(turns), dice.randrange(1, len(turns) + 1)}:
        body = write(turns[:end], shape, offers=rules.offers)
        compare(look(PATIENT_DETECTORS[place], body), rules, shape, turns[:end])


def follow(
    turns: Sequence[Turn], detector: Detector, shape: str, *, rules: Rules, chained: bool
) -> list[str]:
    """Actions on a conversation whose requests show at most two results; the store has the rest."""
    similarity, model, ring = detector.similarity, Model(), None
    assert isinstance(similarity, Turns)
    kept: Ring | None = ring
    done = []
    for end in range(1, len(turns) + 1):
        body = write(turns[:end], shape, offers=rules.offers, cleared=True, forced=rules.forced)
        _, found, memory = similarity.compare_in_session(Document(body))
        assert memory is not None
        assert memory.place is not None
        if chained:
            entries = model.ask(
                CHAINS.make_link("turns", "", "00", "", memory.place, memory.entry)
            ).entries
        else:
            kept, entries = push(
                kept, Push("ring", memory.entry, memory.identity, USUAL_TURNS, 1_000), 0
            )
        done.append(act(detector, memory.recall(entries) if memory.waits else found))
    return done


def try_remembered(dice: Random, *, chained: bool) -> None:
    turns = MadeUp(dice).conversation(most=dice.choice((30, 44)))
    place = dice.randrange(len(RULES))
    rules, shape = RULES[place], dice.choice(["chat", "anthropic", "responses"])
    found = follow(turns, DETECTORS[place], shape, rules=rules, chained=chained)
    expected = [judge(turns[: end + 1], rules) for end in range(len(turns))]
    if found != expected:
        end = [one == other for one, other in zip(found, expected, strict=True)].index(False) + 1
        raise OtherVerdictError(found[end - 1], expected[end - 1], rules, shape, turns[:end])


_KINDS: Final[list[tuple[int, Callable[[Random], None]]]] = [
    (12, try_alone),
    (6, try_tools),
    (1, partial(try_remembered, chained=False)),
    (1, partial(try_remembered, chained=True)),
]

_PROGRESS_SECONDS: Final = 20


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.verdict_fuzzer", description=__doc__
    )
    parser.add_argument("--count", type=int, default=1_000, help="conversations to try")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="other seeds make other conversations; a difference names its conversation",
    )
    given = parser.parse_args(arguments)
    kinds, weights = [kind for _, kind in _KINDS], [weight for weight, _ in _KINDS]
    told = monotonic()
    for number in range(given.count):
        name = f"{given.seed}.{number}"
        dice = Random(name)
        try:
            dice.choices(kinds, weights)[0](dice)
        except Exception as error:  # noqa: BLE001  # whatever it is, its number is told
            sys.stdout.write(f"conversation {name}: {type(error).__name__}: {error}\n")
            return 1
        if monotonic() - told > _PROGRESS_SECONDS:
            told = monotonic()
            sys.stdout.write(f"{number + 1} of {given.count} conversations\n")
            sys.stdout.flush()
    sys.stdout.write(f"{given.count} conversations have the verdicts of the second statement\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
