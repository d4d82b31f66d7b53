"""When turns are a loop.

A turn is what the assistant does in one message (without its thoughts), and everything behind that up to its next message:
results of tools, observations, what the user says. Two turns are equal when both are. With a threshold t, the newest turn is
part of a loop when

- REPEAT: it stands t times among the last 2t + 4 turns, and at most t - 2 turns between the first and the last of these t are
  new (not seen before among the last 32 turns, and more than thoughts): who edits and runs the same tests again has new turns
  in between;
- CYCLE: the last turns are a cycle of 2 to `max_cycle` different turns that came round t times, from length 5 on max(2, t - 1);
- ERROR: the last 2t results are the same error, whatever was done; 6 at least of complaints to an assistant that only talks.

A person's word starts anew: turns up to the newest of them are not looked at. It is what a user says who answers no call and no
action, in words that stand there once, digits left out; words that come again are a program's. And what only looks is no
repetition of what looked before something changed, as far as the tools tell by their names, or the request by hints.

A loop is strong if one of its results is an error or long. An error that passes by itself is none in this sense; nor is what
was not found, where something else was looked for each time. All other loops are weak.

What the request shows is enough; nothing is counted. Where it shows less than there was, because its history was condensed or
is kept by the server, a ring of the newest turn of each request before it supplies the rest. Of a turn whose action is not
known, it cannot be said whether it was seen before, and it is part of no cycle.

Turns are read from the newest to the oldest, and no further than a loop could still be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Final, Generic, TypeVar

from extproc.apis import open_conversation
from extproc.decision import WEAK, Repeat
from extproc.detectors.arguments import THOUGHTS, is_for_thinking
from extproc.detectors.extra_rules import MIN_SIMILAR, NOTED_TURNS, Recent, find_extra, find_similar_error
from extproc.detectors.tools import CHANGES, READS, Limit, ToolLimits, count_rounds
from extproc.detectors.turn import (
    NORMALIZED,
    RAW,
    REST,
    AnyTurn,
    Reading,
    Reduced,
    Turn,
    decode_turn,
    digest,
    encode_turn,
    get_failure_id,
    leave_out_last,
    same_action,
    same_result,
    same_turn,
    weigh,
    weigh_apart,
)
from extproc.request.document import Document, NotCounted

MAX_TURNS: Final = 32
"""This many turns are looked at, and as many as a ring holds."""

DEFAULT_MAX_CYCLE: Final = 10
MIN_CYCLE: Final = 2
_PREFILLED_WORDS: Final = 2
Step = TypeVar("Step")
REPEAT: Final = "repeat"
RESULT: Final = "result"
CYCLE: Final = "cycle"
ERROR: Final = "error"
"""The rules; RESULT is REPEAT where what was done is not known."""


class Newest(Generic[Step]):
    """Turns, or calls, the newest first; they are taken from their source as far as is asked for."""

    def __init__(self, source: Iterator[Step]) -> None:
        self._source = source
        self._taken: list[Step] = []

    def at(self, place: int) -> Step | None:
        """The step at a place, 0 being the newest; None where there are fewer."""
        while len(self._taken) <= place:
            step = next(self._source, None)
            if step is None:
                return None
            self._taken.append(step)
        return self._taken[place]

    def newest(self, count: int) -> list[Step]:
        """This many steps, or as many as there are."""
        self.at(count - 1)
        return self._taken[:count]

    def is_cycle(self, length: int, span: int, same: Callable[[Step, Step], bool]) -> bool:
        """Whether a cycle of different steps fills this span, where the newest equals the one this many steps before it."""
        for place in range(1, span - length):
            step, before = self.at(place), self.at(place + length)
            if step is None or before is None or not same(step, before):
                return False
        members = self.newest(length)
        return not any(same(one, other) for place, one in enumerate(members) for other in members[:place])


class History(Newest[AnyTurn]):
    """The turns of a request, or of a session.

    Attributes:
        elsewhere: the server keeps what was before them.
        after: what the request goes on from there; empty where nothing says so.
        again: places of turns that equal the newest one, among those that were `compared` with it.
        compared: this many turns.
    """

    def __init__(
        self, source: Iterator[AnyTurn], reading: Reading | None = None, *, elsewhere: bool = False, after: bytes = b""
    ) -> None:
        """Take turns from a source, which is a request's `reading`, or what the store remembers."""
        self._source = islice(source, MAX_TURNS)
        self._taken = []
        self.again: list[int] = []
        self.compared = 1
        self._reading = reading
        self._since: int | None = None
        self.elsewhere = elsewhere
        self.after = after

    def read_words(self) -> str:
        """What the user says in the request's newest message; empty if it is anything else."""
        return self._reading.read_words() if self._reading is not None else ""

    def count_since_person(self) -> int:
        """How many turns stand behind the newest word of a person; all that are looked at where there is none."""
        if self._since is None:
            words: list[bytes] = []
            with suppress(NotCounted):  # what is too far back to be read says nothing
                for place in range(MAX_TURNS):
                    turn = self.at(place)
                    if turn is None:
                        break
                    words.append(turn.words)
            self._since = next((place for place, said in enumerate(words) if said and words.count(said) == 1), MAX_TURNS)
        return self._since


def follow(history: History, place: int) -> Iterator[AnyTurn]:
    """The turns from a place on."""
    while (turn := history.at(place)) is not None:
        yield turn
        place += 1


class KeptTurn:
    """What is kept of a request for its session: the turn that it brings, and where in the ring that belongs.

    Attributes:
        newest: that turn.
        place: of it among those that the request shows.
        entry: the same for the ring.
        identity: digest of 8 bytes; a request that is sent again, or to another model, brings the same; empty where the session
            has no name.
        complete: the request shows all the turns that are looked at.
        in_text: as of the turn.
    """

    __slots__ = ("_before", "complete", "entry", "identity", "in_text", "newest", "place")

    def __init__(self, history: History, place: int, newest: Turn, *, named: bool) -> None:
        """Take what is needed of the history, and let go of the request."""
        shown = len(history.newest(MAX_TURNS)) - place
        before = history.at(place + 1)
        self.newest = newest.reduce()
        self.in_text = newest.in_text
        self.place = place
        self.entry = encode_turn(self.newest)
        self.identity = b""
        if named:
            self.identity = digest(b"%b %d %b %b" % (history.after, shown, newest.identify(), self.entry))
        self.complete = place + shown == MAX_TURNS
        self._before = before.action_hash if before is not None else None

    def extend(self, entries: Sequence[bytes], *, followed: bool = False, always: bool = False) -> History | None:
        """The turns up to this one, as far as a ring's entries have them; see `Memory.recall`.

        None if no other entry has the same result, nor enough of them one that failed alike, because then there is no loop;
        `always`: there may be one all the same.
        """
        newest, failure = self.newest, self.newest.failure_id
        same = [
            entry for entry in entries if entry[RAW:NORMALIZED] == newest.raw or entry[NORMALIZED:REST] == newest.normalized
        ]
        if not always and len(same) <= (self.entry in entries):
            alike = [entry for entry in entries if get_failure_id(entry) == failure] if failure else []
            if len(alike) < MIN_SIMILAR - 1:
                return None
        past = list(entries[-MAX_TURNS:][::-1])
        if self.entry in past:
            del past[: past.index(self.entry) + 1]
        turns = [decode_turn(entry) for entry in past]
        if (
            self._before is not None and not followed
        ):  # what it shows besides must be among what was before, else that was another conversation
            place = next((place for place, turn in enumerate(turns) if turn.action_hash == self._before), len(turns))
            del turns[:place]
        return History(iter([self.newest, *turns]))


class TurnRule:
    """The rule, with a detector's settings.

    Attributes:
        threshold: of what no tool does.
    """

    def __init__(  # noqa: PLR0913  # settings
        self,
        limits: ToolLimits,
        *,
        max_cycle: int = DEFAULT_MAX_CYCLE,
        normalize_results: bool = True,
        ignored: frozenset[str] = THOUGHTS,
        filled: int = 0,
        extra: frozenset[str] = frozenset(),
        notes: bool = False,
    ) -> None:
        """Take the settings.

        Args:
            limits: by tool.
            max_cycle: length of the longest cycle.
            normalize_results: leave out what changes by itself.
            ignored: names of arguments that are thoughts.
            filled: a cycle that needs more turns than this is a loop when it fills as many, 0 for none.
            extra: names of further rules.
            notes: look for what gets a note at most, too.
        """
        self._extra = extra
        self._notes = notes
        self._filled = filled
        self._limits = limits
        self._fewest = limits.lowest
        self.threshold = limits.default.threshold
        self._max_cycle = max_cycle
        self._normalized = normalize_results
        self._ignored = ignored

    def read(self, document: Document) -> History:
        """The turns that a request shows.

        Raises:
            NotCounted: there is no conversation, or it cannot be read.
        """
        conversation = open_conversation(document)
        reading = Reading(conversation, document, self._ignored)
        turns = reading.read_turns()
        if document.shortened and conversation.shape.joins is not None:
            turns = leave_out_last(turns)
        history = History(turns, reading, elsewhere=conversation.elsewhere, after=conversation.before.after)
        if conversation.before.in_words:
            newest = history.at(0)
            history.elsewhere = newest is None or not newest.known
        return history

    def find_loop(self, history: History) -> Repeat | None:
        """Whether the newest turn is part of a loop; None where it is not.

        Raises:
            NotCounted: some turn cannot be read.
        """
        newest = history.at(0)
        if newest is None or history.at(self._fewest - 1) is None:
            return None
        found = self._find_loop(history)
        if found is None and _is_prefill(history):
            history = History(iter(history.newest(MAX_TURNS)[1:]))
            found = self._find_loop(history)
        if found is not None and (since := history.count_since_person()) < MAX_TURNS:
            return self._find_loop(History(iter(history.newest(since))))
        return found

    def may_have_looped(self, history: History) -> bool:
        """Whether it is worth looking for a loop: most turns do something new and do not fail."""
        newest = history.at(0)
        if newest is None or history.at(1) is None:
            return False
        if self._extra or not newest.known or newest.failed:
            return True
        return any(same_action(newest, turn) for turn in history.newest(max(2 * self.threshold + 4, self._max_cycle + 1))[1:])

    def may_loop(self, newest: AnyTurn) -> bool:
        """Whether a turn may be part of a loop, whatever was before it."""
        return (newest.known or newest.returned) and not self._limits.of(newest.names).allow

    def _find_loop(self, history: History) -> Repeat | None:
        newest = history.at(0)
        if newest is None or not self.may_loop(newest):
            return None
        limit = self._limits.of(newest.names)
        looked_at = history.newest(max(2 * limit.threshold + 4, self._max_cycle + 1))
        for place in range(history.compared, len(looked_at)):  # rules of one detector differ in thresholds alone
            if same_turn(newest, looked_at[place], normalized=self._normalized):
                history.again.append(place)
            history.compared = place + 1
        again = [place for place in history.again if place < len(looked_at)]
        found = None
        if again and MIN_CYCLE <= again[0] <= self._max_cycle:  # a longer one would hold the newest turn twice
            found = self._cycle(history, again[0])
        if again and found is None:
            found = self._repeat(history, newest, limit, again)
        if found is None:
            found = self._error(history, newest, limit)
        if self._extra and (found is None or found.strength == WEAK):
            recent = Recent(history.newest(MAX_TURNS), self._limits, limit, normalized=self._normalized)
            found = find_extra(self._extra, recent, found)
        if found is None and self._notes and newest.failed:
            recent = Recent(history.newest(NOTED_TURNS + limit.threshold), self._limits, limit, normalized=self._normalized)
            found = find_similar_error(recent)
        return found

    def _repeat(self, history: History, newest: AnyTurn, limit: Limit, again: Sequence[int]) -> Repeat | None:
        """The newest turn stands too often among the last ones, with hardly anything new in between."""
        window = 2 * limit.threshold + 4
        places = [place for place in again if place < window]
        if len(places) + 1 >= limit.threshold and newest.evidence & READS:
            changed = next((place for place in range(places[-1]) if _changes(history, place)), window)
            places = [place for place in places if place < changed]
        if len(places) + 1 < limit.threshold:
            return None
        first = places[limit.threshold - 2]
        new = [place for place in range(1, first) if place not in places and not self._is_no_news(history, place)]
        if len(new) > limit.threshold - 2:
            return None
        turns = history.newest(window)
        measure = weigh if newest.known else weigh_apart
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
        """Whether the turn at a place stands further back as well, or only thinks."""
        turns = history.newest(MAX_TURNS)
        turn = turns[place]
        if turn.names and all(is_for_thinking(name) for name in turn.names):
            return True
        return turn.known and any(same_turn(turn, older, normalized=self._normalized) for older in turns[place + 1 :])

    def _cycle(self, history: History, length: int) -> Repeat | None:
        """The newest turns are a cycle of this many different ones that has come round often enough."""
        members = history.newest(length)
        limits = [self._limits.of(turn.names) for turn in members]
        rounds = count_rounds(length, max([limit.threshold for limit in limits]))
        span = min(length * rounds, self._filled or MAX_TURNS + 1)
        known = not any(limit.allow or not turn.known for limit, turn in zip(limits, members, strict=True))
        if span > MAX_TURNS or not known or not history.is_cycle(length, span, self._same):
            return None
        names = tuple([name for turn in reversed(members) for name in turn.names])
        reason = next((limit.reason for limit in limits if limit.reason), "")
        strength = weigh(history.newest(span))
        return Repeat(names, rounds, span, rounds, results=True, reason=reason, rule=CYCLE, strength=strength)

    def _same(self, one: AnyTurn, other: AnyTurn) -> bool:
        return same_turn(one, other, normalized=self._normalized)

    def _error(self, history: History, newest: AnyTurn, limit: Limit) -> Repeat | None:
        """The last results are the same error, whatever was done."""
        count = 2 * limit.threshold
        if newest.known and not newest.names:
            count = max(MIN_SIMILAR, count)
        turns = history.newest(count)
        if len(turns) < count or not newest.failed:
            return None
        for turn in turns[1:]:
            if not same_result(newest, turn, normalized=self._normalized) or self._limits.of(turn.names).allow:
                return None
        names = tuple(dict.fromkeys([name for turn in reversed(turns) for name in turn.names]))
        spread = 2 * len({turn.reduce().action_hash for turn in turns if turn.known}) > count or not newest.known
        strength = weigh_apart(turns) if spread else weigh(turns)
        return Repeat(names, count, count, count, results=True, reason=limit.reason, rule=ERROR, strength=strength)

    def spell(self, turn: AnyTurn) -> bytes:
        """All of a turn that is compared, for a fingerprint."""
        kept = turn if isinstance(turn, Reduced) else turn.reduce()
        return kept.action_hash + (kept.normalized if self._normalized else kept.raw)

    def count(self, history: History, newest: AnyTurn) -> Repeat:
        """How often the newest turn stands there, where that is no loop."""
        limit = self._limits.of(newest.names)
        turns = history.newest(2 * limit.threshold + 4)
        again = sum([turn is newest or same_turn(newest, turn, normalized=self._normalized) for turn in turns])
        below = min(again, limit.threshold - 1)  # it may stand there often, with much that is new in between
        return Repeat(newest.names, below, len(turns), limit.threshold, True, limit.reason, REPEAT)


def _changes(history: History, place: int) -> bool:
    """Whether the turn at a place has changed something."""
    turn = history.at(place)
    return turn is not None and turn.evidence & CHANGES != 0


def keep_newest(history: History, *, named: bool) -> KeptTurn | None:
    """What is kept of a request for its session, which may have a name; None where it brings no turn."""
    place = 0
    if _only_speaks(history.at(0)):
        if not _is_prefill(history):
            return None
        place = 1
    turn = history.at(place)
    return KeptTurn(history, place, turn, named=named) if isinstance(turn, Turn) and not _only_speaks(turn) else None


def _only_speaks(turn: AnyTurn | None) -> bool:
    """The assistant says something, and nothing stands behind it."""
    return isinstance(turn, Turn) and not turn.answered and not turn.action.places


def _is_prefill(history: History) -> bool:
    """The newest turn is how the model is to begin its answer, and so no turn yet.

    That is a word or two, or how it has begun one before; all else that the assistant says behind the results is news.
    """
    newest = history.at(0)
    if not isinstance(newest, Turn) or not _only_speaks(newest):
        return False
    said = newest.said
    begun = any(turn.said.startswith(said) for turn in history.newest(MAX_TURNS)[1:] if isinstance(turn, Turn))
    return begun or len(said.split()) <= _PREFILLED_WORDS
