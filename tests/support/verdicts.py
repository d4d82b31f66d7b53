"""The rule of `turns` once more, slow and obvious, and random conversations to compare.

It shares nothing with the engine: no hashes, no caches, no texts. Each result's worth is known,
    because it was made up.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from tests.support.turn_writers import SHAPES, STYLES, Did, as_text

READS, CHANGES = "reads", "changes"
TOOLS = {
    "view": READS,
    "list_files": READS,
    "tweak": "",
    "poll": "",
    "edit": CHANGES,
    "mcp__disk__write_file": CHANGES,
}

COMPLAINT = (
    "1 validation error for P\nn\n  No number [type=int_type, input_value=!, input_type=str]"
)
# Results and their worth; `@` is a number, `!` differs in each turn, and `~` is a duration that
# does, too.
RESULTS = {
    COMPLAINT: "fatal",
    "ok": "fine",
    "": "empty",
    "No matches found": "empty",
    '{"results": []}': "empty",
    "3 tests, 2 of them red ~": "fine",
    "a page of text. " * 20: "long",
    "pod-1   Running   ~\n" * 12: "fine",
    "error: boom ~": "fatal",
    "error: boom, and all that led to it. " * 9: "fatal, long",
    "error: 503 Service Unavailable ~": "passing",
    "error: connection refused": "passing",
    "error: rate limited, try again later": "passing",
    "error: request timed out": "passing",
    "error: no such customer ~": "missing",
    "404 not found": "missing",
    "error: job @ is broken": "fatal",
    "error: 1@ of 200 tests failed": "fatal",
}

# A program's usual words; see RESULTS.
WORDS = {
    f"Correct your answer: {COMPLAINT}": "fatal",
    "continue": "fine",
    "Heartbeat @: anything new?": "fine",
    "read the list and work on it. " * 9: "long",
    "error: no command was found in what you wrote": "fatal",
}


@dataclass(frozen=True)
class Turn:
    """A turn of an agent.

    Attributes:
        tool: called tool; empty for mere speech.
        argument: of the tool, or what the agent says.
        result: of the tool, or what the user answers.
        worth: of the result, as in RESULTS.
    """

    tool: str
    argument: str
    result: str
    worth: str = "fine"

    @property
    def action(self) -> tuple[str, str]:
        return self.tool, self.argument

    @property
    def failed(self) -> bool:
        return "fatal" in self.worth or self.worth in {"passing", "missing"}

    @property
    def kind(self) -> str:
        """The result without numbers that count nothing."""
        counts = "tests failed" in self.result
        return (
            self.result
            if counts
            else "".join(letter for letter in self.result if not letter.isdigit())
        )

    @property
    def role(self) -> str:
        """The tool's effect on state; none if the call fails."""
        role = TOOLS.get(self.tool, "")
        return "" if role == CHANGES and self.failed else role


@dataclass(frozen=True)
class Rules:
    """Settings of a detector.

    Attributes:
        ladder: actions and thresholds, mildest first.
        weak: `weak_threshold`.
        offers: requests declare tools.
        max_cycle: as in the policy.
        tools: thresholds of single tools.
        forced: requests force a tool.
    """

    ladder: tuple[tuple[str, int], ...] = (("steer", 3), ("reject", 7))
    weak: int | None = 14
    offers: bool = True
    max_cycle: int = 10
    tools: tuple[tuple[str, int], ...] = ()
    forced: bool = False

    def at(self, step: int) -> Thresholds:
        """Thresholds of a step of the ladder, by tool; "" is for all others."""
        threshold, first = self.ladder[step][1], self.ladder[0][1]
        return {"": threshold, **{tool: own + threshold - first for tool, own in self.tools}}

    def patient(self, threshold: int) -> Thresholds:
        return {"": threshold, **{tool: max(own, threshold) for tool, own in self.tools}}

    def count_seen(self, newest: Turn) -> int:
        """The number of turns examined: 32, or enough for a tool with a threshold of its own."""
        own = self.at(len(self.ladder) - 1).get(newest.tool or "nothing", 0)
        return max(32, 2 * own + 4)


Thresholds = dict[str, int]


def _of(turn: Turn, thresholds: Thresholds) -> int:
    return thresholds.get(turn.tool, thresholds[""])


def judge(turns: Sequence[Turn], rules: Rules) -> str:
    """The action on the request that ends with these turns."""
    seen = _since_a_person_spoke(list(turns)[-rules.count_seen(turns[-1]) :])
    loops = [
        (step, strong)
        for step in range(len(rules.ladder))
        for strong in _loops(seen, rules.at(step), rules)
    ]
    if not loops:
        return _note(rules) if seen and _is_noted(seen, rules) else "allow"
    last = len(rules.ladder) - 1
    reach = last if rules.weak is None else _reach(seen, rules, rules.weak, last)
    if reach < 0 and not any(strong for _, strong in loops):
        return _mildest(rules)
    step = max(step if strong else min(step, max(reach, 0)) for step, strong in loops)
    lands = rules.ladder[step][0] == "land" and not rules.forced
    return rules.ladder[step if lands or rules.ladder[step][0] != "land" else step - 1][0]


def _note(rules: Rules) -> str:
    first = rules.ladder[0][0]
    return first if first in {"warn", "steer"} else "warn"


def _is_noted(seen: list[Turn], rules: Rules) -> bool:
    own = _of(seen[-1], rules.at(0))
    return (
        _fails_alike(seen, max(6, own))
        or _repairs_nothing(seen, max(8, own), rules)
        or _brings_nothing_new(seen, rules)
        or _goes_round(seen, rules)
        or _changes_alike(seen[-max(5, own) :], max(5, own))
        or _finds_nothing(seen, max(8, own))
        or _only_talks(seen, own)
    )


def _only_talks(turns: list[Turn], threshold: int) -> bool:
    last = turns[-max(10, threshold) :]
    said = {"".join(letter for letter in turn.result if not letter.isdigit()) for turn in last}
    return (
        len(last) == max(10, threshold) and len(said) == 1 and not any(turn.tool for turn in last)
    )


def _fails_alike(turns: list[Turn], times: int) -> bool:
    last = turns[-times - 4 :]
    return (
        last[-1].failed
        and sum(turn.failed and turn.kind == last[-1].kind for turn in last) >= times
    )


def _repairs_nothing(turns: list[Turn], times: int, rules: Rules) -> bool:
    """Whether an error that does not pass came back, after turns that cannot have repaired it."""
    newest, count = turns[-1], 0
    if not newest.failed or newest.worth == "passing" or (rules.offers and not newest.tool):
        return False
    for place in reversed(range(max(0, len(turns) - 32), len(turns))):
        turn, before = turns[place], turns[:place]
        alike = turn.failed and turn.kind == newest.kind
        if turn.role == READS:
            count += alike and turn.action == newest.action
        elif alike:
            count += 1
        elif turn not in before and not (
            turn.failed and any(older.failed and older.kind == turn.kind for older in before)
        ):
            break
    return count >= times


def _changes_alike(last: list[Turn], times: int) -> bool:
    return (
        len(last) == times
        and len({turn.action for turn in last}) == 1
        and len(last[-1].argument) > 60
        and last[-1].role == CHANGES
    )


def _goes_round(turns: list[Turn], rules: Rules) -> bool:
    """Whether two to four actions came in turn, and most results of each, and the newest, agree."""
    for length in range(2, min(4, rules.max_cycle) + 1):
        rounds = max(3, *[_of(turn, rules.at(0)) for turn in turns[-length:]])
        span = turns[-length * rounds :]
        if len(span) < length * rounds or length * rounds > 32:
            continue
        members = [span[place::length] for place in range(length)]
        if (
            all(len({turn.action for turn in each}) == 1 for each in members)
            and len({each[0].action for each in members}) == length
            and all(2 * max(each.count(turn) for turn in each) > rounds for each in members)
            and 2 * span.count(span[-1]) > rounds
        ):
            return True
    return False


def _finds_nothing(turns: list[Turn], times: int) -> bool:
    """Whether a tool that reads got the same empty answer for enough different questions."""
    asked = {
        turn.action
        for turn in turns[-times - 4 :]
        if (turn.role, turn.result) == (READS, turns[-1].result)
    }
    return turns[-1].role == READS and turns[-1].worth == "empty" and len(asked) >= times


def _brings_nothing_new(turns: list[Turn], rules: Rules) -> bool:
    """Whether the last turn repeats a recent one, and at most one of the last 2t + 2 is new."""
    thresholds = rules.at(0)
    own = _of(turns[-1], thresholds)
    if (
        turns[-1] not in turns[-rules.max_cycle - 1 : -1]
        or len(turns) < 2 * own + 2
        or len(set(turns[-6:])) < 3
    ):
        return False
    new = 0
    for place in range(len(turns) - 2 * own - 2, len(turns)):
        turn, before = turns[place], turns[:place]
        changed = [at for at, older in enumerate(before) if older.role == CHANGES]
        if turn.role == READS and changed:
            before = before[changed[-1] + 1 :]
        new += turn not in before or _of(turn, thresholds) > own
    return new <= 1


def _mildest(rules: Rules) -> str:
    first = rules.ladder[0][0]
    return first if len(rules.ladder) > 1 or first in {"warn", "steer"} else "warn"


def _reach(seen: list[Turn], rules: Rules, weak: int, last: int) -> int:
    """The last step that a weak loop may reach by now, -1 for none."""
    if last <= 1:
        return last if _loops(seen, rules.patient(weak), rules, full=32) else -1
    if _loops(seen, rules.patient(weak + 2), rules, full=32):
        return last
    return 1 if _loops(seen, rules.patient(weak), rules, full=30) else -1


def _since_a_person_spoke(turns: list[Turn]) -> list[Turn]:
    """The turns after the newest words that were said only once."""
    said = [
        "".join(letter for letter in turn.result if not letter.isdigit())
        for turn in turns
        if not turn.tool
    ]
    for place in reversed(range(len(turns))):
        turn = turns[place]
        if (
            not turn.tool
            and said.count("".join(letter for letter in turn.result if not letter.isdigit())) == 1
        ):
            return turns[place + 1 :]
    return turns


def _loops(turns: list[Turn], thresholds: Thresholds, rules: Rules, full: int = 0) -> list[bool]:
    """The loops that the last turn is part of, and whether each is strong.

    `full` is the number of turns for a cycle.
    """
    if not turns:
        return []
    own = _of(turns[-1], thresholds)
    talks = [False] if _only_talks(turns, own) and len(turns[-1].result.split()) >= 8 else []
    return [
        *_repeats(turns, own, rules),
        *_cycles(turns, thresholds, rules, full),
        *_errors(turns, own, rules),
        *talks,
    ]


def _repeats(turns: list[Turn], threshold: int, rules: Rules) -> list[bool]:
    newest, window = turns[-1], 2 * threshold + 4
    equal = [
        place for place in range(max(0, len(turns) - window), len(turns)) if turns[place] == newest
    ]
    if newest.role == READS and len(equal) >= threshold:
        changed = [place for place in range(equal[0], len(turns)) if turns[place].role == CHANGES]
        equal = [place for place in equal if not changed or place > changed[-1]]
    if len(equal) < threshold:
        return []
    counted = equal[-threshold:]
    between = [place for place in range(counted[0], counted[-1]) if place not in equal]
    new = [place for place in between if turns[place] not in turns[:place]]
    if len(new) > threshold - 2:
        return []
    return [_is_strong([newest], rules)]


def _cycles(turns: list[Turn], thresholds: Thresholds, rules: Rules, full: int) -> list[bool]:
    found = []
    for length in range(2, rules.max_cycle + 1):
        threshold = max(_of(turn, thresholds) for turn in turns[-length:])
        rounds = threshold if length < 5 else max(2, threshold - 1)
        needed = min(length * rounds, full) if full else length * rounds
        if needed > 32 or len(turns) < needed:
            continue
        span = turns[-needed:]
        if (
            all(span[place] == span[place - length] for place in range(length, needed))
            and len(set(span[-length:])) == length
        ):
            found.append(_is_strong(span, rules))
    return found


def _errors(turns: list[Turn], threshold: int, rules: Rules) -> list[bool]:
    count = 2 * threshold if turns[-1].tool else max(6, 2 * threshold)
    last = turns[-count:]
    if len(last) < count or not last[-1].failed or len({turn.result for turn in last}) > 1:
        return []
    if last[-1].worth == "missing" and 2 * len({turn.action for turn in last}) > len(last):
        return [False]
    return [_is_strong(last, rules)]


def _is_strong(turns: Sequence[Turn], rules: Rules) -> bool:
    """Whether a turn brings back a permanent error, or much text.

    An agent with tools that only talks does not.
    """
    return any(
        turn.worth in {"fatal", "long", "fatal, long", "missing"}
        and (turn.tool or not rules.offers)
        for turn in turns
    )


@dataclass
class MadeUp:
    """Random conversations of every kind."""

    dice: Random
    people: int = field(default=0)

    def turn(self) -> Turn:
        if self.dice.random() < 0.25:
            said = self.dice.choice(["Done.", "OK, next.", "I see."])
            if self.dice.random() < 0.3:
                return self.person(said)
            words = self.dice.choice(list(WORDS))
            return Turn("", said, words.replace("@", str(self.dice.randrange(4))), WORDS[words])
        result = self.dice.choice(list(RESULTS))
        return Turn(
            self.dice.choice(list(TOOLS)),
            self.dice.choice(["a", "b", "a" * 80]),
            result,
            RESULTS[result],
        )

    def person(self, said: str = "Done.") -> Turn:
        self.people += 1
        return Turn("", said, f"please look at {'x' * self.people} as well")

    def fresh(self) -> Turn:
        self.people += 1
        result = self.dice.choice(list(RESULTS))
        return Turn(self.dice.choice(list(TOOLS)), f"n{self.people}", result, RESULTS[result])

    def vary(self, turn: Turn) -> Turn:
        """The same action; another result of a tool."""
        result = self.dice.choice(list(RESULTS))
        return replace(turn, result=result, worth=RESULTS[result]) if turn.tool else turn

    def counted(self) -> Turn:
        """A program's usual words with another number."""
        self.people += 1
        return Turn("", "OK, next.", f"Heartbeat {self.people}: anything new?")

    def conversation(self, most: int = 44, around: Sequence[int] = ()) -> list[Turn]:
        """Work, a loop, and sometimes a turn inside or after it; `around` is nearly met."""
        dice = self.dice
        unit = [self.turn() for _ in range(dice.choice([1, 1, 1, 1, 2, 2, 3, 4, 5, 7]))]
        turns = [
            self.fresh() if dice.random() < 0.6 else self.turn()
            for _ in range(dice.choice([0, 1, 3, 9]))
        ]
        rounds = dice.choice(
            [2, 3, 4, 6, 8, 9, 14, 15, 16, 18, -(-29 // len(unit)), -(-31 // len(unit))]
        )
        if around:
            rounds = dice.choice(
                [rounds, *[each + more for each in around for more in (-1, 0, 1, 2, 4)]]
            )
        tried = dice.choice([1] * 6 + [3, 9, 99])
        disturbed = dice.choice([0.0, 0.12, 0.5] if around else [0.0, 0.12])
        disturbances = [self.person, self.fresh, self.turn, self.counted, self.counted]
        varied = dice.choice([1, 1, 2, 99])
        varying = dice.choice([0.0, 0.0, 0.3])
        for number in range(rounds):
            turns += [
                replace(
                    self.vary(turn) if dice.random() < varying else turn,
                    argument=f"{turn.argument}{number % tried}",
                )
                for turn in unit
            ]
            if dice.random() < disturbed:
                turns.append(dice.choice(disturbances)())
        return [
            replace(turn, result=turn.result.replace("@", str(place // len(unit) % varied)))
            for place, turn in enumerate(turns)
        ][:most]


def write(
    turns: Sequence[Turn],
    shape: str,
    *,
    offers: bool,
    cleared: bool = False,
    forced: bool = False,
) -> bytes:
    """A request that ends with these turns.

    With `cleared`, only the two newest results are kept.
    """
    done = [_do(turn, number) for number, turn in enumerate(turns, 1)]
    if cleared:
        done = [
            turn._replace(results=(f"[cleared {turn.number}]",)) if turn.calls else turn
            for turn in done[:-2]
        ] + done[-2:]
    if shape in SHAPES:
        body = SHAPES[shape](done)
    else:
        body = as_text(done, lambda turn: STYLES[shape](turn) if turn.calls else turn.thought)
    tools: dict[str, Any] = (
        {"tools": [{"type": "function", "function": {"name": "f"}}]} if offers else {}
    )
    if forced:
        tools["tool_choice"] = "required"
    return json.dumps({**body, **tools}).encode()


def _do(turn: Turn, number: int) -> Did:
    result = turn.result.replace("!", f"'no. {number}'").replace(
        "~", f"(took {number}.{number} ms)"
    )
    if not turn.tool:
        return Did((), (), result, turn.argument, number)
    return Did(
        ((turn.tool, {"path": turn.argument, "n": 1}),),
        (result,),
        "",
        f"Thought no. {number}!",
        number,
    )
