"""Similarity `turns`: an agent that repeats actions and gets the same results.

`turn.py` and `loops.py` define turns and loops. An agent's request contains its history, so one
request is enough to detect a loop, and nothing is counted. If the history is condensed or on the
server, the session's ring supplies the turns that the request does not show.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any, ClassVar, Final

from extproc.bounded import Memo
from extproc.decision import STRONG, WEAK, Advice, EarlierLoops, Outcome, Repeat, ToolFailure
from extproc.detectors.arguments import THOUGHTS
from extproc.detectors.base import HistorySimilarity, Memory
from extproc.detectors.chain import (
    ChainPlace,
    begins_with_summary,
    find_place,
    find_place_of_steps,
)
from extproc.detectors.complaints import complains, leave_out_answer
from extproc.detectors.history import (
    MAX_TURNS,
    USUAL_TURNS,
    History,
    KeptTurn,
    follow,
    only_speaks,
)
from extproc.detectors.keys import MIN_WEAK, SimilarityKeys, TurnsKeys
from extproc.detectors.loops import (
    ACTION_CYCLE,
    CYCLE,
    ERROR,
    NOTHING_FOUND,
    NOTHING_NEW,
    REPEAT,
    RESULT,
    SAME_CHANGE,
    SIMILAR_ERROR,
    TALK,
    TurnRule,
    count_errors,
    count_window,
    make_note,
)
from extproc.detectors.nesting import count_endings, count_nested
from extproc.detectors.tools import find_window_errors
from extproc.detectors.turn import MISSING, Turn, digest
from extproc.objects import JsonObject, Place
from extproc.request.document import Document, NotCounted
from extproc.request.quoting import quote_all

MAX_THRESHOLD = 8

MAX_TOOL_THRESHOLD = 30
"""A threshold t needs the last 2t + 4 turns, and at most 64 are read."""

NESTED_PROMPT = "nested_prompt"
REPEATED_ENDING = "repeated_ending"
_IN_PROMPT: Final = frozenset({NESTED_PROMPT, REPEATED_ENDING})
NO_TURNS = "no turns: the assistant has not done anything yet"
_FAILING = "Tool failing"
_WIDESPREAD = (
    "It fails in the same way for other agents at this time, so its server is probably the cause"
)
_WAIT = (
    "Wait before you try it again. Until then, do what does not need it, or stop and report "
    "the result you have so far."
)
_OWN_MISTAKE = re.compile(
    r"\b(?:arguments?|param(?:s|eters?)?|required|validation|schema|usage)\b|-3260[12]\b"
    r"|\b(?:unknown|no such|invalid) tool\b|\bnot a valid tool\b|\bsyntax error\b",
    re.IGNORECASE,
)
"""Agents' own mistakes. Similar agents make the same ones, so they do not mean that the tool's
server fails."""

_SEARCHED = 3_000
_OTHERWISE = "Otherwise, finish with the result you have so far."
_WITHOUT_ERROR = "a result without this error: fix its cause, work around it, or ask for help"
_SHOWN = 400
"""Maximum length of an action and of a result in a shown turn, in characters."""

_NOW_STRICTEST = 2
"""A weak loop gets the strictest action this many repetitions after `weak_threshold`."""


_LOOPED: Final[Memo[tuple[int, bytes], bool]] = Memo(8_192)
"""Whether a request was in a loop, by the detector's number and the request's place in the chain.
At most 4 MB. Without the cache, the benchmark's row "young agents, steering vs. rejecting" takes 20
to 30 % longer."""

_NUMBERS: Final = count()
_NO_LOOPS = EarlierLoops(None, None, b"")
_NO_REPEAT = Repeat((), 0, 0, MAX_THRESHOLD, results=True)


class Turns(HistorySimilarity):
    """Finds loops of turns, with a detector's settings.

    Attributes:
        rule: the rule with the lowest threshold.
        last_step: the number of the strictest action.
        ignored: names of arguments that are thoughts.
        looks_back: a loop, or a history that has left one, comes with the loops before its newest
            turn.
    """

    keys: ClassVar[type[JsonObject]] = TurnsKeys
    remembers: ClassVar[bool] = True
    reads_ends: ClassVar[bool] = True
    default_threshold: ClassVar[int | None] = 3

    def __init__(self, keys: SimilarityKeys) -> None:
        ignored = frozenset(keys.ignore_arguments)
        # The same object, because comparing sets is slow
        self.ignored = THOUGHTS if ignored == THOUGHTS else ignored
        steps = keys.list_steps(self.default_threshold)
        self._strictest = steps[-1].make_limits(self.default_threshold)
        self._most = max(USUAL_TURNS, count_window(self._strictest.highest))
        rules = [self._make_rule(step, notes=place == 0) for place, step in enumerate(steps)]
        self.rule = rules[0]
        self._rules = list(enumerate(rules))[::-1]
        self.last_step = len(rules) - 1
        self._patient = (
            None
            if keys.weak_threshold is None
            else self._make_patient_rules(keys, keys.weak_threshold)
        )
        self._cooldown = keys.cooldown_seconds > 0  # a turn outside a loop may then be refused
        self._finds_failures = keys.incidents
        self.looks_back = keys.steers
        self._number = next(_NUMBERS)

    def _make_patient_rules(
        self, keys: SimilarityKeys, threshold: int
    ) -> list[tuple[int, TurnRule]]:
        """The rules for weak loops, strictest first, each with the step that it allows."""
        if self.last_step <= 1:
            return [(self.last_step, self._make_rule(keys.wait_until(threshold), USUAL_TURNS))]
        strictest = self._make_rule(keys.wait_until(threshold + _NOW_STRICTEST), USUAL_TURNS)
        return [
            (self.last_step, strictest),
            (1, self._make_rule(keys.wait_until(threshold), USUAL_TURNS - _NOW_STRICTEST)),
        ]

    def _make_rule(self, keys: SimilarityKeys, filled: int = 0, *, notes: bool = False) -> TurnRule:
        return TurnRule(
            keys.make_limits(self.default_threshold),
            max_cycle=keys.max_cycle,
            normalize_results=keys.normalize_results,
            ignored=self.ignored,
            filled=filled,
            notes=notes,
            most=self._most,
        )

    def compare(self, document: Document) -> tuple[bytes, Repeat | None]:
        """The newest turn, and how often it repeats; empty if it need not be compared."""
        history = self.rule.read(document)
        newest = history.at(0)
        if newest is None or not newest.known:
            repeated = self._find_in_prompt(history)
            if repeated is not None:
                return repeated
        if history.elsewhere:
            raise NotCounted("no_history")
        if newest is None and not history.names_speakers():
            raise NotCounted("no_messages")
        found = self.find_loop(history)
        if newest is None or (found is None and not self._cooldown):
            return b"", self.look_back(history, found)
        return self.rule.spell(newest), self.look_back(
            history, found or self.rule.count(history, newest)
        )

    def compare_in_session(
        self, document: Document, *, named: bool = True
    ) -> tuple[bytes, Repeat | None, Memory | None]:
        """The newest turn even without a loop, because earlier requests may complete one."""
        history = self.rule.read(document)
        # A plain prompt contains all turns as text
        if history.elsewhere and not (named and history.after):
            return *self.compare(document), None
        found = self.find_loop(history)
        kept = history.store_newest(named=named)
        place = _find_place(history, kept)
        if kept is None:
            begins = place is not None and not place.parents
            return *self.compare(document), TurnMemory(self, None, None, place) if begins else None
        newest = history.at(kept.place)
        if found is None and self._cooldown and newest is not None:
            found = self.rule.count(history, newest)
        if self.looks_back:
            found = self.look_back(history, found, place)
        memory = TurnMemory(self, kept, found, place, asks=self._may_lack(history, kept))
        if named and memory.waits and history.reading is not None:
            memory.resumes = begins_with_summary(history.reading.conversation)
        return self.rule.spell(kept.newest), found, memory

    def _may_lack(self, history: History, kept: KeptTurn) -> bool:
        """Whether the request may omit turns of a loop, or their results."""
        _, strictest = self._rules[0]
        return self.rule.may_loop(kept.newest) and (
            not kept.complete or strictest.may_have_looped(History(follow(history, kept.place)))
        )

    def _find_in_prompt(self, history: History) -> tuple[bytes, Repeat] | None:
        """The loop of a prompt that repeats itself, before the assistant's first turn.

        It is weak, unless the client shows only its complaints about the answers.
        """
        text = history.read_prompt()
        times = history.count_complaints() if complains(text) else 0
        fits = [step for step, rule in self._rules if count_errors(rule.threshold) <= times]
        if fits:
            least = count_errors(self.rule.threshold)
            found = Repeat(
                (),
                times,
                times,
                least,
                results=True,
                rule=ERROR,
                step=max(fits),
                strength=STRONG,
                forced=history.is_forced(),
            )
            return digest(leave_out_answer(text).encode()), found
        times, words = count_nested(text)
        step = max([step for step, rule in self._rules if rule.threshold <= times], default=-1)
        if step >= 0:
            found = Repeat(
                (),
                times,
                times,
                self.rule.threshold,
                results=True,
                rule=NESTED_PROMPT,
                step=step,
                strength=WEAK,
            )
            if self._patient is not None:
                reach = next(
                    (reach for reach, rule in self._patient if rule.threshold <= times), None
                )
                found = found._replace(step=min(step, reach or 0), held=reach is None)
            return digest(words.encode()), found
        times, lines = count_endings(text, self.rule.threshold + 1)
        if not times:
            return None
        return digest(lines), make_note(REPEATED_ENDING, (), times, times)

    def find_loop(self, history: History) -> Repeat | None:
        """The loop that the newest turn is part of, by the strictest rule that finds one."""
        best: Repeat | None = None
        shown = history
        if self._most > USUAL_TURNS:  # some tool's threshold needs more
            history = self._narrow(history)
        for step, rule in self._rules:
            found = rule.find_loop(history)
            if found is None:
                continue
            found = self._limit(found._replace(step=step) if step else found, history)
            if best is None or found.rank > best.rank:
                best = found
            if best.step >= step - 1 and not best.held:
                break
        return best._replace(forced=True) if best is not None and shown.is_forced() else best

    def _narrow(self, history: History) -> History:
        """The turns to compare: more than usual only if the newest turn's tools need them."""
        # Before a prefill, a turn may be in a loop
        newest = history.at(1 if only_speaks(history.at(0)) else 0)
        if newest is None or history.at(self.rule.fewest - 1) is None:
            return history
        most = max(USUAL_TURNS, count_window(self._strictest.of(newest.names).threshold))
        return history if most == self._most else History(islice(follow(history, 0), most))

    def look_back(
        self, history: History, found: Repeat | None, place: ChainPlace | None = None
    ) -> Repeat | None:
        """Add earlier loops of the history to a loop, or to `_NO_REPEAT` if it has left one.

        Most requests are in no loop, nor were those before them; their places in the chain tell.
        """
        left = history.at(1) if self.looks_back else None
        if left is None:
            return found
        looping = found is not None and found.looping
        last: Repeat | None = None
        if looping or place is None or not self.was_in_no_loop(place):
            before = History(follow(history, 1))
            last = self.find_loop(before) if looping or self.rule.may_have_looped(before) else None
        if place is not None and (looping or _LOOPED.get((self._number, place.node)) is None):
            _LOOPED.put((self._number, place.node), looping)
        if last is None:
            return found if found is None else _add_earlier(found, _NO_LOOPS)
        earlier = (
            self.find_loop(History(follow(history, 2)))
            if found is not None and found.looping
            else None
        )
        return _add_earlier(found or _NO_REPEAT, EarlierLoops(last, earlier, self.rule.spell(left)))

    def was_in_no_loop(self, place: ChainPlace) -> bool:
        """Whether this process knows that the previous request was in no loop."""
        return len(place.parents) > 0 and _LOOPED.get((self._number, place.parents[0])) is False

    def _limit(self, found: Repeat, history: History) -> Repeat:
        """The loop; a weak one is limited to the step it may take, or held below its threshold."""
        if self._patient is None or found.strength != WEAK or found.notes_only:
            return found
        reach = next(
            (step for step, rule in self._patient if rule.find_loop(history) is not None), None
        )
        return found._replace(step=min(found.step, reach or 0), held=reach is None)

    def show(self, document: Document) -> list[str]:
        """The turns that are compared, oldest first; see `Similarity`."""
        turns = self._narrow(self.rule.read(document)).newest(MAX_TURNS)
        return [turn.show(_SHOWN) for turn in reversed(turns)] or [NO_TURNS]

    def describe(self, repeat: Repeat | None) -> str:
        """See `Similarity`."""
        if repeat is None or not repeat.calls:
            return "the newest turn is not part of a loop"
        strength = f", {repeat.strength}" if repeat.strength else ""
        return f"{_name(repeat)}: {repeat.count} of {repeat.calls} turns ({repeat.rule}{strength})"

    def explain(self, repeat: Repeat) -> tuple[str, str, str]:
        """See `HistorySimilarity`."""
        what, progress = _explain(repeat)
        return what, "repeating it", f". Progress means {progress}. {_OTHERWISE}"

    def foresee(self, document: Document, repeat: Repeat, more: int) -> tuple[int, int]:  # noqa: ARG002
        """See `Similarity`. The history is continued with the turns that repeat."""
        if repeat.notes_only or repeat.rule in _IN_PROMPT:
            return 0, 0
        history = self._narrow(self.rule.read(document))
        newest = history.at(0)
        if newest is None:
            return 0, 0
        # Only turns that have been compared, so that they need no inspection.
        whole = repeat.strength == WEAK or repeat.rule == CYCLE
        window = count_window(self._strictest.of(newest.names).threshold)
        turns = history.newest(USUAL_TURNS if whole else window)
        period = turns[: repeat.calls]  # the actions of errors and of talk may differ
        if repeat.rule in {REPEAT, RESULT, CYCLE}:
            period = turns[: self.rule.find_distance(turns)]

        def find_after(number: int) -> Repeat | None:
            ahead = (period * (number // len(period) + 1))[-number:] if number else []
            return self.find_loop(History(iter([*ahead, *turns][:MAX_TURNS])))

        def is_refused(number: int) -> bool:
            found = find_after(number)
            return found is not None and found.step == self.last_step and found.rank > 1

        left = bisect_left(range(1, MAX_TURNS), True, key=is_refused) + 1
        last, now = find_after(left), find_after(0)
        if left == MAX_TURNS or last is None:
            return 0, 0
        if now is None or now.count < repeat.count:  # the request omits turns
            left = last.count - repeat.count
        return last.calls if last.rule == CYCLE else last.count, left

    def find_result(self, document: Document) -> str:
        """See `Similarity`."""
        newest = self.rule.read(document).at(0)
        return newest.result if isinstance(newest, Turn) else ""

    def find_failure(self, document: Document) -> ToolFailure | None:
        """See `Similarity`."""
        newest = self.rule.read(document).at(0) if self._finds_failures else None
        if not isinstance(newest, Turn) or not newest.names or not newest.failed:
            return None
        if newest.evidence & MISSING or _OWN_MISTAKE.search(newest.result[:_SEARCHED]):
            return None
        return ToolFailure(" ".join(newest.names), newest.reduce().normalized.hex())

    def advise(self, outcome: Outcome, method: str, path: str) -> Advice:
        """See `HistorySimilarity`. If a tool fails for many sessions, the advice is to wait."""
        repeat = outcome.repeat
        if repeat is None or not repeat.widespread:
            return super().advise(outcome, method, path)
        what, _ = _explain(repeat)
        return Advice(f"{what}. {_WIDESPREAD}", repeat.reason.strip(), _WAIT, _FAILING)

    @staticmethod
    def find_errors(loop: dict[str, Any], place: Place) -> Iterator[tuple[Place, str]]:
        """Thresholds that need more turns than are read, or contradict each other."""
        threshold, tools = loop.get("threshold_identical_requests"), loop.get("tools")
        if isinstance(threshold, int) and threshold > MAX_THRESHOLD:
            where = (*place, "threshold_identical_requests")
            yield (
                where,
                (
                    f"threshold_identical_requests must be <= {MAX_THRESHOLD} with similarity "
                    "turns, "
                    f"not {threshold}"
                ),
            )
        weak = loop.get("weak_threshold")
        least = Turns.default_threshold if threshold is None else threshold
        if isinstance(weak, int) and isinstance(least, int) and MIN_WEAK <= weak < least:
            fits = (
                f"weak_threshold must be >= threshold_identical_requests, which is {least}, "
                f"not {weak}"
            )
            yield (*place, "weak_threshold"), fits
        for name, tool in tools.items() if isinstance(tools, dict) else ():
            if not isinstance(tool, dict):
                continue
            own = tool.get("threshold")
            if isinstance(own, int) and own > MAX_TOOL_THRESHOLD:
                fits = f"threshold must be <= {MAX_TOOL_THRESHOLD} with similarity turns, not {own}"
                more = f"{MAX_TURNS} turns are compared; to permit a tool more, set allow"
                yield (*place, "tools", name, "threshold"), f"{fits}: {more}"
        yield from find_window_errors(loop, place)


def _find_place(history: History, kept: KeptTurn | None) -> ChainPlace | None:
    """The place of a request in the chain; None if the server has its history."""
    reading = history.reading
    if reading is None or history.elsewhere:
        return None
    if reading.in_text:
        return find_place_of_steps(reading.conversation, reading.unfolded)
    conversation = reading.conversation
    prefilled = conversation.prefilled or (kept is not None and kept.place > 0)
    return find_place(conversation, prefilled=prefilled)


class TurnMemory:
    """See `Memory`."""

    def __init__(
        self,
        turns: Turns,
        kept: KeptTurn | None,
        found: Repeat | None,
        place: ChainPlace | None,
        *,
        asks: bool = False,
    ) -> None:
        """`asks`: the store may know turns of a loop that the request omits."""
        self.entry = kept.entry if kept is not None else b""
        self.identity = kept.identity if kept is not None else b""
        self.place = place
        settled = found is not None and found.step == turns.last_step and found.rank > 1
        self.waits = asks and not settled
        self.resumes = False
        self._turns = turns
        self._kept = kept
        self._found = found

    def recall(self, entries: Sequence[bytes], *, followed: bool = False) -> Repeat | None:
        """See `Memory`."""
        found, kept = self._found, self._kept
        turns, place = self._turns, self.place
        always = turns.looks_back and (place is None or not turns.was_in_no_loop(place))
        history = (
            kept.extend(entries, followed=followed, always=always) if kept is not None else None
        )
        recalled = (
            turns.look_back(history, turns.find_loop(history), place)
            if history is not None
            else None
        )
        if recalled is None or (found is not None and found.rank > recalled.rank):
            return found
        return recalled._replace(forced=kept is not None and kept.forced)


def _add_earlier(found: Repeat, before: EarlierLoops) -> Repeat:
    return Repeat._make((*found[:-1], before))  # `_replace` takes three times as long


def _name(repeat: Repeat) -> str:
    named = [tool for tool in repeat.tools if tool]
    return quote_all(named) if named else "the same call" if repeat.tools else "the same message"


def _explain(repeat: Repeat) -> tuple[str, str]:
    """What repeated and how often, and what would be progress."""
    if not repeat.looping:
        what = f"{_name(repeat)} was part of a loop, and this same turn stays refused for a while"
        return what, "another action, or another result"
    return _EXPLAIN[repeat.rule](repeat)


def _explain_repeat(repeat: Repeat) -> tuple[str, str]:
    what = (
        f"{repeat.count} of the last {repeat.calls} turns were {_name(repeat)} with the same "
        "input and the same result"
    )
    return what, "another action or input, or a different result"


def _explain_result(repeat: Repeat) -> tuple[str, str]:
    return (
        f"{repeat.count} of the last {repeat.calls} turns returned the same result",
        "a different result",
    )


def _explain_cycle(repeat: Repeat) -> tuple[str, str]:
    steps = f"{repeat.calls // repeat.count} steps{f' ({_name(repeat)})' if repeat.tools else ''}"
    what = (
        f"the last {repeat.calls} turns were {repeat.count} rounds of the same {steps} with "
        "the same results"
    )
    return what, "a step outside this cycle, or a result that differs from the last round"


def _explain_action_cycle(repeat: Repeat) -> tuple[str, str]:
    what = (
        f"the last {repeat.calls} turns were {repeat.count} rounds of the same actions"
        f"{_list_tried(repeat)}, with mostly the same results"
    )
    return what, "another action, or news from each of these"


def _explain_error(repeat: Repeat) -> tuple[str, str]:
    return (
        (
            f"the last {repeat.count} results were the same error, whatever was "
            f"tried{_list_tried(repeat)}"
        ),
        _WITHOUT_ERROR,
    )


def _list_tried(repeat: Repeat) -> str:
    return f" ({_name(repeat)})" if repeat.tools else ""


def _explain_similar_error(repeat: Repeat) -> tuple[str, str]:
    what = f"{repeat.count} of the last {repeat.calls} results were the same error, but for numbers"
    return f"{what}, whatever was tried{_list_tried(repeat)}", _WITHOUT_ERROR


def _explain_talk(repeat: Repeat) -> tuple[str, str]:
    what = f"the last {repeat.count} answers called no tool, and the same words came back each time"
    return what, "an action, or a last answer that says what you need from a person"


def _explain_nothing_new(repeat: Repeat) -> tuple[str, str]:
    what = (
        f"{repeat.count} of the last {repeat.calls} turns{_list_tried(repeat)} repeat earlier "
        "ones, with the same results"
    )
    return what, "an action that was not tried yet, or a different result"


def _explain_same_change(repeat: Repeat) -> tuple[str, str]:
    what = f"the same change was made {repeat.count} times in a row{_list_tried(repeat)}"
    return what, "a look at what these changes have done, or another action"


def _explain_nothing_found(repeat: Repeat) -> tuple[str, str]:
    what = f"{repeat.count} different look-ups{_list_tried(repeat)} had the same empty result"
    within = f"{what} in the last {repeat.calls} turns"
    return within, "a result, a look elsewhere, or the answer that it was not found"


def _explain_nested_prompt(repeat: Repeat) -> tuple[str, str]:
    what = (
        f"the prompt begins {repeat.count} times with the same words, because each attempt "
        "repeats the one before it"
    )
    return what, "the original prompt, with one new instruction"


def _explain_repeated_ending(repeat: Repeat) -> tuple[str, str]:
    what = f"the prompt ends with the same step {repeat.count} times in a row, ignoring numbers"
    return what, "another action, or a different result"


_EXPLAIN = {
    REPEAT: _explain_repeat,
    RESULT: _explain_result,
    CYCLE: _explain_cycle,
    ACTION_CYCLE: _explain_action_cycle,
    ERROR: _explain_error,
    TALK: _explain_talk,
    NOTHING_NEW: _explain_nothing_new,
    SIMILAR_ERROR: _explain_similar_error,
    SAME_CHANGE: _explain_same_change,
    NOTHING_FOUND: _explain_nothing_found,
    NESTED_PROMPT: _explain_nested_prompt,
    REPEATED_ENDING: _explain_repeated_ending,
}
