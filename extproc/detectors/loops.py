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

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final, Generic, TypeVar

from extproc.apis import open_conversation
from extproc.apis.conversation import OTHER_ROLE
from extproc.decision import WEAK, Repeat
from extproc.detectors.arguments import THOUGHTS, is_for_thinking
from extproc.detectors.tools import CHANGES, READS, Limit, ToolLimits, count_rounds
from extproc.detectors.turn import (
    NORMALIZED,
    PASSING,
    RAW,
    REST,
    AnyTurn,
    Reading,
    Reduced,
    ShownTurns,
    Turn,
    decode_turn,
    digest,
    encode_turn,
    fail_alike,
    finds_nothing,
    get_failure_id,
    leave_out_last,
    may_fail_alike,
    same_action,
    same_result,
    same_turn,
    weigh,
    weigh_apart,
)
from extproc.request.document import Document, NotCounted

USUAL_TURNS: Final = 32
"""Number of turns that are read if no tool's threshold needs more, and that a ring contains."""

MAX_TURNS: Final = 64
"""Maximum number of turns to read."""

DEFAULT_MAX_CYCLE: Final = 10
MIN_CYCLE: Final = 2
_PREFILLED_WORDS: Final = 2
Step = TypeVar("Step")
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

_MIN_SIMILAR: Final = 6
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
    return max(_MIN_SIMILAR, 2 * threshold)


class Newest(Generic[Step]):
    """Turns or calls, newest first, taken lazily from their source."""

    def __init__(self, source: Iterator[Step]) -> None:
        self._source = source
        self._taken: list[Step] = []

    def at(self, place: int) -> Step | None:
        """The step at a place, 0 being the newest; None if there are fewer."""
        taken = self._taken
        if len(taken) <= place:
            for step in self._source:
                taken.append(step)
                if len(taken) > place:
                    break
            else:
                return None
        return taken[place]

    def newest(self, count: int) -> list[Step]:
        """The newest steps: `count`, or all."""
        self.at(count - 1)
        return self._taken[:count]

    def is_cycle(self, length: int, span: int, same: Callable[[Step, Step], bool]) -> bool:
        """Whether a cycle fills this span, given that the newest step equals the one before it."""
        for place in range(1, span - length):
            step, before = self.at(place), self.at(place + length)
            if step is None or before is None or not same(step, before):
                return False
        members = self.newest(length)
        return not any(
            same(one, other) for place, one in enumerate(members) for other in members[:place]
        )


_UNKNOWN: Final = frozenset({"", OTHER_ROLE})
"""Speakers of thoughts, and of messages that no API has."""


class History(Newest[AnyTurn]):
    """The turns of a request, or of a session.

    Attributes:
        elsewhere: the server stores earlier turns.
        after: reference to what the request continues there; may be empty.
        acted: places of turns with the newest one's action, among the first `compared` turns.
        again: those of turns that equal the newest one.
        compared: number of turns compared with the newest one, including itself.
        reading: reads the turns of a request; None for other turns.
    """

    def __init__(
        self,
        source: Iterator[AnyTurn],
        reading: Reading | None = None,
        *,
        elsewhere: bool = False,
        after: bytes = b"",
    ) -> None:
        """The turns come from a source: a request's `reading`, or the store's entries."""
        self._source = source
        self._taken = []
        self.acted: list[int] = []
        self.again: list[int] = []
        self.compared = 1
        self.reading = reading
        self._since: int | None = None
        self.elsewhere = elsewhere
        self.after = after

    def read_prompt(self) -> str:
        """The user's text in the newest message of the request; empty if that is not a user's."""
        return self.reading.read_words() if self.reading is not None else ""

    def count_complaints(self) -> int:
        """See `Reading`."""
        return self.reading.count_complaints(MAX_TURNS) if self.reading is not None else 0

    def is_forced(self) -> bool:
        """Whether the request forces a tool or a schema."""
        return self.reading is not None and self.reading.conversation.forces_form()

    def shows_newest(self) -> bool:
        """Whether the newest turn can be compared.

        Its action is shown, or it is referenced and has results, or a person has spoken since.
        """
        newest = self.at(0)
        if not isinstance(newest, Turn) or newest.known or not newest.answered:
            return True
        return newest.referenced and (newest.returned or self.count_since_person() == 0)

    def names_speakers(self) -> bool:
        """Whether any message has a known speaker; otherwise it is no conversation of any API."""
        speakers = self.reading.conversation.list_speakers() if self.reading is not None else []
        return not _UNKNOWN.issuperset(speakers)

    def is_prefilled(self) -> bool:
        """Whether the newest turn is a prefill, the start of the model's answer: not a turn yet.

        A prefill has at most two words, or begins an earlier answer, too. Any other text is new.
        """
        newest = self.at(0)
        if not isinstance(newest, Turn) or not only_speaks(newest):
            return False
        said = newest.said
        begun = any(
            turn.said.startswith(said)
            for turn in self.newest(USUAL_TURNS)[1:]
            if isinstance(turn, Turn)
        )
        return begun or len(said.split()) <= _PREFILLED_WORDS

    def store_newest(self, *, named: bool) -> KeptTurn | None:
        """The turn that the session stores for later requests; None if there is no new one.

        `named`: the session has a name.
        """
        place = 0
        if only_speaks(self.at(0)):
            if not self.is_prefilled():
                return None
            place = 1
        turn = self.at(place)
        if not isinstance(turn, Turn) or only_speaks(turn):
            return None
        return KeptTurn(self, place, turn.reduce(), turn.identify() if named else None)

    def count_since_person(self) -> int:
        """The number of turns since a person's newest message; MAX_TURNS if none was read."""
        if self._since is None:
            words: list[bytes] = []
            with suppress(NotCounted):  # older unreadable turns do not matter
                for place in range(MAX_TURNS):
                    turn = self.at(place)
                    if turn is None:
                        break
                    words.append(turn.words)
            self._since = next(
                (place for place, said in enumerate(words) if said and words.count(said) == 1),
                MAX_TURNS,
            )
        return self._since


def follow(history: History, place: int) -> Iterator[AnyTurn]:
    """The turns from a place on."""
    while (turn := history.at(place)) is not None:
        yield turn
        place += 1


class KeptTurn:
    """A request's newest turn, stored in its session's ring.

    Attributes:
        newest: the turn, reduced.
        shown: the number of turns up to it in the request.
        passes_over: some of these are not in the ring, because no request ended with them.
        place: its place among the request's turns.
        entry: its entry for the ring.
        identity: digest of 8 bytes that a retry shares, even with another model; empty if the
            session has no name.
        complete: the request shows as many turns as a ring contains.
        forced: see `Repeat`.
    """

    def __init__(
        self, history: History, place: int, newest: Reduced, identity: bytes | None
    ) -> None:
        """Copies what it needs, without a reference to the request; `identity`: see `Turn`."""
        count, self.passes_over = (
            history.reading.count_turns(USUAL_TURNS) if history.reading is not None else -1,
            False,
        )
        if count < 0:
            turns = history.newest(USUAL_TURNS)
            count = len(turns)
            self.passes_over = True in [
                isinstance(turn, Turn) and not turn.answered for turn in turns[place + 1 :]
            ]
        before = history.at(place + 1)
        self.newest = newest
        self.shown = shown = count - place
        self.forced = history.is_forced()
        self.place = place
        self.entry = encode_turn(newest)
        self.identity = b""
        if identity is not None:
            self.identity = digest(b"%b %d %b %b" % (history.after, shown, identity, self.entry))
        self.complete = place + shown == USUAL_TURNS
        self._before = before.action_hash if before is not None else None

    def extend(
        self, entries: Sequence[bytes], *, followed: bool = False, always: bool = False
    ) -> History | None:
        """The turns up to this one, from a ring's entries; see `Memory.recall`.

        None if they add nothing.

        That is so if no other entry has the same result and too few have a similar failure, unless
        `always`. It is also so if the request shows all of the entries and other turns between
        them; if the chain has `followed` it, that takes more turns than entries.
        """
        if self.passes_over and len(entries) + followed <= self.shown:
            return None
        failure = self.newest.failure_id
        if not always and not self._returns_again(entries):
            alike = (
                [entry for entry in entries if get_failure_id(entry) == failure] if failure else []
            )
            if len(alike) < _MIN_SIMILAR - 1:
                return None
        past = list(entries[-USUAL_TURNS:][::-1])
        if self.entry in past:
            del past[: past.index(self.entry) + 1]
        turns = [decode_turn(entry) for entry in past]
        if (
            self._before is not None and not followed
        ):  # from the request's previous turn on; without it, this is another conversation
            place = next(
                (place for place, turn in enumerate(turns) if turn.action_hash == self._before),
                len(turns),
            )
            del turns[:place]
        return History(iter([self.newest, *turns[: USUAL_TURNS - 1]]))

    def _returns_again(self, entries: Sequence[bytes]) -> bool:
        """Whether another entry of the ring has the same result."""
        own = entries.count(self.entry)
        raw, normalized = self.newest.raw, self.newest.normalized
        others = b"".join([entry for entry in entries if entry != self.entry] if own else entries)
        if (
            own <= 1 and others.find(raw) < 0 and others.find(normalized) < 0
        ):  # the usual case; slices take most of the time
            return False
        same = [
            entry
            for entry in entries
            if entry[RAW:NORMALIZED] == raw or entry[NORMALIZED:REST] == normalized
        ]
        return len(same) > (own > 0)


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
        for place in range(
            history.compared, len(looked_at)
        ):  # shared by the detector's rules, which differ only in thresholds
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
            if (
                len(set(shown.values())) > 1
            ):  # screens change, so older turns without images were different
                again = [place for place in again if place in shown]
        found = None
        if (
            again and MIN_CYCLE <= again[0] <= self._max_cycle
        ):  # a longer cycle would contain the newest turn twice
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
        least = max(_MIN_SIMILAR, limit.threshold)
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
        below = min(
            again, limit.threshold - 1
        )  # it may be more frequent, with many new turns in between
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


def only_speaks(turn: AnyTurn | None) -> bool:
    """Whether the assistant only says something, and nothing follows."""
    return isinstance(turn, Turn) and not turn.answered and not turn.calls
