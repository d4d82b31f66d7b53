"""When turns are a loop.

A turn is one assistant message (without its thoughts), and everything after it up to the next one:
results of tools, observations, the user's words. Two turns are equal if both parts are. With a
threshold t, the newest turn is part of a loop by one of these rules:

- REPEAT: t of the last 2t + 4 turns equal it, itself included, and at most t - 2 turns between the
  first and the last of these are new (more than thoughts, and not seen before in the turns read).
  An agent that edits and runs the same tests has new turns in between.
- CYCLE: the last turns are t rounds of a cycle of 2 to `max_cycle` different turns; max(2, t - 1)
  rounds from length 5 on; at most 32 turns in all.
- ACTION_CYCLE: the last actions are max(3, t) rounds of a cycle of 2 to 4 different actions. In
  more than half of the rounds, each action had the same result; for the newest turn's action, it is
  this turn's. It gets a note at most.
- ERROR: the last 2t results are the same error, whatever the actions; at least 6 complaints to an
  assistant that only talks.
- TALK: in the last max(10, t) turns, the assistant only talks, and hears the same each time, digits
  aside. The loop is weak. Fewer than eight words may be a person's: they get a note at most.
- NOTHING_NEW: it equals one of the `max_cycle` turns before it, at most one of the last 2t + 2
  turns is new, and three or more of the last 6 differ. Turns whose tool may repeat more often
  always are new. It gets a note at most.
- SIMILAR_ERROR: its result is a failure, and max(6, t) of the last max(6, t) + 4 results are the
  same, numbers and actions aside. Or max(8, t) of the last 32 are, since a turn that may have
  repaired something; the failure is not temporary, and reads fail with equal actions. It gets a
  note at most. A turn that only reads or thinks, equals an older one, or fails like one, repairs
  nothing.
- SAME_CHANGE: the last max(5, t) actions are the same change, with arguments of 60 bytes or more,
  whatever their results. It gets a note at most. A ring has no lengths, so the request must show
  these actions.
- NOTHING_FOUND: its tool only reads, and max(8, t) different actions among the last max(8, t) + 4
  had the same empty result as it. It gets a note at most.

Only turns after a person's newest message are read. Such a message does not answer a call or an
action, and occurs only once, digits aside; repeated messages are a program's. If a turn only reads,
equal turns before a change do not count, as far as tools' names or hints tell.

A loop is strong if one of its results is an error, or is long and does not change even in volatile
parts. Temporary errors do not count for this, nor does something that was not found if the actions
differ. All other loops are weak.

The request alone is enough; nothing is counted. If its history was condensed or is on the server, a
ring with the newest turn of each earlier request supplies the rest. A turn with an unknown action
always counts as new, and is never part of a cycle.

The last 32 turns are read. If a threshold of the newest turn's tools needs more, up to 64 turns of
the request are. Turns are read from the newest on, and only while a loop is possible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from extproc.apis import open_conversation
from extproc.decision import WEAK, Repeat
from extproc.detectors.arguments import THOUGHTS, is_for_thinking
from extproc.detectors.history import (
    MAX_TURNS,
    MIN_SIMILAR,
    USUAL_TURNS,
    History,
)
from extproc.detectors.tools import CHANGES, READS, Limit, ToolLimits, count_rounds
from extproc.detectors.turn import (
    PASSING,
    AnyTurn,
    Reading,
    Reduced,
    ShownTurns,
    Turn,
    fail_alike,
    finds_nothing,
    leave_out_last,
    may_fail_alike,
    same_action,
    same_result,
    same_turn,
    weigh,
    weigh_apart,
)
from extproc.request.document import Document

DEFAULT_MAX_CYCLE: Final = 10
MIN_CYCLE: Final = 2
REPEAT: Final = "repeat"
RESULT: Final = "result"
CYCLE: Final = "cycle"
ACTION_CYCLE: Final = "action_cycle"
ERROR: Final = "error"
TALK: Final = "talk"
NOTHING_NEW: Final = "nothing_new"
SIMILAR_ERROR: Final = "similar_error"
SAME_CHANGE: Final = "same_change"
NOTHING_FOUND: Final = "nothing_found"
"""The rules; RESULT is REPEAT for unknown actions."""

_MORE_SIMILAR: Final = 4
_MIN_UNREPAIRED: Final = 8
_MIN_CHANGES: Final = 5
_LONG_ARGUMENTS: Final = 60
"""For SAME_CHANGE: the minimum number of turns, and of bytes; moves and clicks have fewer."""

_MIN_ROUNDS: Final = 3
_MOST_ACTIONS: Final = 4
"""For ACTION_CYCLE: the minimum number of rounds, and the maximum number of actions in each."""

_MIN_SEARCHES: Final = 8
_OTHER_STEPS: Final = 4
"""For NOTHING_FOUND: the minimum number of different actions, and of other turns among them."""

_MIN_TALK: Final = 10
_FEWEST_WORDS: Final = 8
"""Minimum number of turns for TALK, and number of words below which it gets a note at most."""

_NEWEST_STEPS: Final = 6
_FEWEST_STEPS: Final = 3
"""For NOTHING_NEW: the number of newest turns to compare, and the minimum that must differ."""


def count_window(threshold: int) -> int:
    """The number of turns in which a turn must repeat."""
    return 2 * threshold + 4


def count_errors(threshold: int) -> int:
    """The number of equal complaints in a row that are a loop."""
    return max(MIN_SIMILAR, 2 * threshold)


class TurnRule:
    """The rules, with a detector's settings.

    Attributes:
        threshold: the threshold of tools without their own.
        fewest: the minimum number of turns for a loop.
        most: maximum number of turns to read from a request.
    """

    def __init__(  # noqa: PLR0913  # settings
        self,
        limits: ToolLimits,
        *,
        max_cycle: int = DEFAULT_MAX_CYCLE,
        normalize_results: bool = True,
        ignored: frozenset[str] = THOUGHTS,
        filled: int = 0,
        notes: bool = False,
        most: int = USUAL_TURNS,
    ) -> None:
        """Take the settings.

        Args:
            limits: the limits of tools.
            max_cycle: length of the longest cycle.
            normalize_results: ignore volatile parts of results.
            ignored: names of arguments that are thoughts.
            filled: a cycle that needs more turns than this is a loop once it fills this many; 0
                turns this off.
            notes: also look for loops that get a note at most.
            most: maximum number of turns to read from a request.
        """
        self.most = most
        self._notes = notes
        self._filled = filled
        self._limits = limits
        self.fewest = limits.lowest
        self.threshold = limits.default.threshold
        self._max_cycle = max_cycle
        self._normalized = normalize_results
        self._ignored = ignored

    def read(self, document: Document) -> History:
        """The turns of a request.

        Raises:
            NotCounted: there is no conversation, or it is unreadable.
        """
        conversation = open_conversation(document)
        cuts = document.shortened and conversation.shape.joins is not None
        reading = Reading(conversation, document, self._ignored)
        turns: Iterator[Turn] = ShownTurns(reading, self.most + cuts)
        if cuts:
            turns = leave_out_last(turns)
        history = History(
            turns, reading, elsewhere=conversation.elsewhere, after=conversation.before.after
        )
        if not conversation.elsewhere and not history.shows_newest():
            history.elsewhere = True
        if conversation.before.in_words:
            newest = history.at(0)
            history.elsewhere = newest is None or not newest.known
        return history

    def find_loop(self, history: History) -> Repeat | None:
        """The loop that the newest turn is part of, if any.

        Raises:
            NotCounted: a turn is unreadable.
        """
        newest = history.at(0)
        if newest is None or history.at(self.fewest - 1) is None:
            return None
        found = self._find_loop(history)
        if found is None and history.is_prefilled():
            history = History(iter(history.newest(MAX_TURNS)[1:]))
            found = self._find_loop(history)
        if found is not None and (since := history.count_since_person()) < MAX_TURNS:
            return self._find_loop(History(iter(history.newest(since))))
        return found

    def may_have_looped(self, history: History) -> bool:
        """Whether a loop is possible; a quick check, because most turns are new and do not fail."""
        newest = history.at(0)
        if newest is None or history.at(1) is None:
            return False
        if not newest.known or newest.failed or finds_nothing(newest):
            return True
        return any(
            same_action(newest, turn)
            for turn in history.newest(max(count_window(self.threshold), self._max_cycle + 1))[1:]
        )

    def may_loop(self, newest: AnyTurn) -> bool:
        """Whether a turn may be part of a loop, whatever came before."""
        return (newest.known or newest.returned) and not self._limits.of(newest.names).allow

    def _find_loop(self, history: History) -> Repeat | None:
        newest = history.at(0)
        if newest is None or not self.may_loop(newest):
            return None
        limit = self._limits.of(newest.names)
        looked_at = history.newest(max(count_window(limit.threshold), self._max_cycle + 1))
        # Shared by the detector's rules, which differ only in thresholds
        for place in range(history.compared, len(looked_at)):
            if same_action(newest, looked_at[place]):
                history.acted.append(place)
                if same_turn(newest, looked_at[place], normalized=self._normalized):
                    history.again.append(place)
            history.compared = place + 1
        again = [place for place in history.again if place < len(looked_at)]
        if isinstance(newest, Turn) and again and newest.came.images:
            turns = [
                (place, turn.came.images)
                for place, turn in enumerate(looked_at)
                if isinstance(turn, Turn)
            ]
            shown = {place: images for place, images in turns if images}
            # Screens change, so older turns without images were different
            if len(set(shown.values())) > 1:
                again = [place for place in again if place in shown]
        found = None
        # A longer cycle would contain the newest turn twice
        if again and MIN_CYCLE <= again[0] <= self._max_cycle:
            found = self._cycle(history, again[0])
        if again and found is None:
            found = self._repeat(history, newest, limit, again)
        if found is None:
            found = self._error(history, newest, limit) or self._talk(history, newest, limit)
        return self._find_note(history, newest, limit, again) if found is None else found

    def _find_note(
        self, history: History, newest: AnyTurn, limit: Limit, again: Sequence[int]
    ) -> Repeat | None:
        """The loop that gets a note at most."""
        found = None
        if self._notes and again and again[0] <= self._max_cycle:
            found = self._nothing_new(history, limit)
        if self._notes and found is None and history.acted:
            found = self._action_cycle(history, history.acted[0])
        if self._notes and found is None:
            if newest.failed:
                found = self._similar_error(history, limit)
            elif finds_nothing(newest):
                found = self._nothing_found(history, limit)
            else:
                found = self._same_change(history, limit)
        return found

    def _repeat(
        self, history: History, newest: AnyTurn, limit: Limit, again: Sequence[int]
    ) -> Repeat | None:
        """The loop if the newest turn is too frequent, with hardly anything new in between."""
        window = count_window(limit.threshold)
        places = [place for place in again if place < window]
        if len(places) + 1 >= limit.threshold and newest.evidence & READS:
            changed = next(
                (place for place in range(places[-1]) if _changes(history, place)), window
            )
            places = [place for place in places if place < changed]
        if len(places) + 1 < limit.threshold:
            return None
        first = places[limit.threshold - 2]
        new = [
            place
            for place in range(1, first)
            if place not in places and not self._is_no_news(history, place)
        ]
        if len(new) > limit.threshold - 2:
            return None
        turns = history.newest(window)
        measure = (
            weigh
            if newest.known or (isinstance(newest, Turn) and newest.referenced)
            else weigh_apart
        )
        return Repeat(
            newest.names,
            len(places) + 1,
            len(turns),
            limit.threshold,
            results=True,
            reason=limit.reason,
            rule=REPEAT if newest.known else RESULT,
            strength=measure([newest, *[turns[place] for place in places]]),
        )

    def _is_no_news(self, history: History, place: int) -> bool:
        """Whether an equal turn came before the one at this place, or it only thinks."""
        turns = history.newest(MAX_TURNS)
        turn = turns[place]
        if turn.names and all(is_for_thinking(name) for name in turn.names):
            return True
        return turn.known and any(
            same_turn(turn, older, normalized=self._normalized) for older in turns[place + 1 :]
        )

    def _cycle(self, history: History, length: int) -> Repeat | None:
        """The loop if the newest turns are enough rounds of a cycle of this length."""
        members = history.newest(length)
        limit = self._limit_all(members)
        rounds = count_rounds(length, limit.threshold)
        span = min(length * rounds, self._filled or USUAL_TURNS + 1)
        if span > USUAL_TURNS or limit.allow or not history.is_cycle(length, span, self._same):
            return None
        names = tuple([name for turn in reversed(members) for name in turn.names])
        reason, strength = limit.reason, weigh(history.newest(span), length)
        return Repeat(
            names, rounds, span, rounds, results=True, reason=reason, rule=CYCLE, strength=strength
        )

    def _limit_all(self, members: Sequence[AnyTurn]) -> Limit:
        """The limit of a cycle; one with an unknown action is allowed."""
        limits = [self._limits.of(turn.names) for turn in members]
        return Limit(
            max([limit.threshold for limit in limits]),
            next((limit.reason for limit in limits if limit.reason), ""),
            any(limit.allow for limit in limits) or not all(turn.known for turn in members),
        )

    def _action_cycle(self, history: History, length: int) -> Repeat | None:
        """The loop (a note only) if actions are a cycle, and most results are the same."""
        if not MIN_CYCLE <= length <= min(_MOST_ACTIONS, self._max_cycle):
            return None
        members = history.newest(length)
        limit = self._limit_all(members)
        rounds = max(_MIN_ROUNDS, limit.threshold)
        span = length * rounds
        if span > USUAL_TURNS or limit.allow or not history.is_cycle(length, span, same_action):
            return None
        turns = history.newest(span)
        for place in range(length):
            each = turns[place::length]
            agreeing = [
                sum([self._same(one, other) for other in each])
                for one in (each if place else each[:1])
            ]
            if 2 * max(agreeing) <= rounds:
                return None
        return make_note(ACTION_CYCLE, _list_names(members), rounds, span, limit.reason)

    def find_distance(self, turns: Sequence[AnyTurn]) -> int:
        """How many turns before the newest one its equal is; 1 if that is not shown."""
        newest, *others = turns
        return next((place for place, turn in enumerate(others, 1) if self._same(newest, turn)), 1)

    def _same(self, one: AnyTurn, other: AnyTurn) -> bool:
        return same_turn(one, other, normalized=self._normalized)

    def _error(self, history: History, newest: AnyTurn, limit: Limit) -> Repeat | None:
        """The loop if the last results are the same error, whatever the actions."""
        count = 2 * limit.threshold
        if newest.known and not newest.names:
            count = count_errors(limit.threshold)
        turns = history.newest(count)
        if len(turns) < count or not newest.failed:
            return None
        for turn in turns[1:]:
            if (
                not same_result(newest, turn, normalized=self._normalized)
                or self._limits.of(turn.names).allow
            ):
                return None
        spread = (
            2 * len({turn.action_hash for turn in turns if turn.known}) > count or not newest.known
        )
        strength = weigh_apart(turns) if spread else weigh(turns)
        return Repeat(
            _list_names(turns),
            count,
            count,
            count,
            results=True,
            reason=limit.reason,
            rule=ERROR,
            strength=strength,
        )

    def _talk(self, history: History, newest: AnyTurn, limit: Limit) -> Repeat | None:
        """The loop if the assistant only talks and hears the same each time, whatever it says."""
        count = max(_MIN_TALK, limit.threshold)
        if newest.names or history.at(count - 1) is None or not newest.words:
            return None
        if any(turn.words != newest.words for turn in history.newest(count)):
            return None
        if not isinstance(newest, Turn) or len(newest.result.split()) < _FEWEST_WORDS:
            return make_note(TALK, (), count, count, limit.reason) if self._notes else None
        return Repeat(
            (), count, count, count, results=True, reason=limit.reason, rule=TALK, strength=WEAK
        )

    def _nothing_new(self, history: History, limit: Limit) -> Repeat | None:
        """The loop (a note only) if few recent turns are new: a cycle with a varying member."""
        window = 2 * limit.threshold + 2
        turns = history.newest(MAX_TURNS)
        different: list[AnyTurn] = []
        for turn in turns[:_NEWEST_STEPS]:
            if not any(self._same(turn, other) for other in different):
                different.append(turn)
        if len(turns) < window or len(different) < _FEWEST_STEPS:
            return None
        new = 0
        for place in range(window):
            new += self._is_new(turns, place, limit)
            if new > 1:
                return None
        names = _list_names(turns[:window])
        return make_note(NOTHING_NEW, names, window - new, window, limit.reason)

    def _is_new(self, turns: Sequence[AnyTurn], place: int, limit: Limit) -> bool:
        """Whether no older turn equals the one at a place; what is read is new after a change."""
        turn = turns[place]
        own = self._limits.of(turn.names)
        if not turn.known or own.allow or own.threshold > limit.threshold:
            return True
        for older in turns[place + 1 :]:
            if same_turn(turn, older, normalized=self._normalized):
                return False
            if turn.evidence & READS and older.evidence & CHANGES:
                return True
        return True

    def _similar_error(self, history: History, limit: Limit) -> Repeat | None:
        """The loop that gets a note at most, if most recent turns failed like the newest."""
        least = max(MIN_SIMILAR, limit.threshold)
        seen = history.newest(least + _MORE_SIMILAR)
        alike = self._list_alike(seen, least)
        if not alike:
            least = max(_MIN_UNREPAIRED, limit.threshold)
            seen = self._list_unrepaired(history, least)
            alike = [
                turn
                for turn in self._list_alike(seen, least)
                if not turn.evidence & READS or same_action(seen[0], turn)
            ]
        count = len(alike)
        if count < least:
            return None
        names, strength = _list_names(alike), weigh_apart(alike)
        return make_note(SIMILAR_ERROR, names, count, len(seen), limit.reason, strength)

    def _list_alike(self, seen: Sequence[AnyTurn], least: int) -> list[AnyTurn]:
        """The turns that failed like the newest; none if there are fewer than `least`."""
        left = len(seen) - least
        maybe: list[AnyTurn] = []
        for turn in seen:
            if may_fail_alike(seen[0], turn):
                maybe.append(turn)
            else:
                left -= 1
            if left < 0:  # too few are left
                return []
        alike = [
            turn
            for turn in maybe
            if fail_alike(seen[0], turn) and not self._limits.of(turn.names).allow
        ]
        return alike if len(alike) >= least else []

    def _list_unrepaired(self, history: History, least: int) -> list[AnyTurn]:
        """The turns since one that may have repaired something; none if too few failed alike."""
        turns = history.newest(MAX_TURNS)
        seen = turns[:USUAL_TURNS]
        if turns[0].evidence & PASSING or not self._list_alike(seen, least):
            return []
        for place, turn in enumerate(seen):
            if not (
                turn.evidence & READS
                or fail_alike(turns[0], turn)
                or self._is_no_news(history, place)
                or any(fail_alike(turn, older) for older in turns[place + 1 :])
            ):
                return seen[:place]
        return seen

    def _same_change(self, history: History, limit: Limit) -> Repeat | None:
        """The loop (a note only) if the last actions are the same long change."""
        count, newest = max(_MIN_CHANGES, limit.threshold), history.at(0)
        if not isinstance(newest, Turn) or not newest.evidence & CHANGES:
            return None
        size = newest.did.size - sum([len(name) for name in newest.names])
        if size < _LONG_ARGUMENTS or history.at(count - 1) is None:
            return None
        if any(not same_action(newest, turn) for turn in history.newest(count)):
            return None
        return make_note(SAME_CHANGE, newest.names, count, count, limit.reason)

    def _nothing_found(self, history: History, limit: Limit) -> Repeat | None:
        """The loop (a note only) if different look-ups had the same empty result."""
        least = max(_MIN_SEARCHES, limit.threshold)
        seen = history.newest(least + _OTHER_STEPS)
        empty = [
            turn
            for turn in seen
            if same_result(seen[0], turn, normalized=self._normalized)
            and finds_nothing(turn)
            and not self._limits.of(turn.names).allow
        ]
        count = len({turn.action_hash for turn in empty if turn.known})
        if count < least:
            return None
        return make_note(NOTHING_FOUND, _list_names(empty), count, len(seen), limit.reason)

    def spell(self, turn: AnyTurn) -> bytes:
        """All of a turn that is compared, for a fingerprint."""
        kept = turn if isinstance(turn, Reduced) else turn.reduce()
        return kept.action_hash + (kept.normalized if self._normalized else kept.raw)

    def count(self, history: History, newest: AnyTurn) -> Repeat:
        """How often the newest turn occurs, if that is not a loop."""
        limit = self._limits.of(newest.names)
        turns = history.newest(count_window(limit.threshold))
        again = sum(
            [
                turn is newest or same_turn(newest, turn, normalized=self._normalized)
                for turn in turns
            ]
        )
        # It may be more frequent, with many new turns in between
        below = min(again, limit.threshold - 1)
        return Repeat(newest.names, below, len(turns), limit.threshold, True, limit.reason, REPEAT)


def make_note(  # noqa: PLR0913  # fields of a loop
    rule: str,
    names: tuple[str, ...],
    count: int,
    calls: int,
    reason: str = "",
    strength: str = WEAK,
) -> Repeat:
    """A loop that gets a note at most; the fields are those of `Repeat`."""
    found = Repeat(names, count, calls, count, True, reason, rule, strength=strength)
    return found._replace(held=True, notes_only=True)


def _list_names(turns: Sequence[AnyTurn]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([name for turn in reversed(turns) for name in turn.names]))


def _changes(history: History, place: int) -> bool:
    turn = history.at(place)
    return turn is not None and turn.evidence & CHANGES != 0
