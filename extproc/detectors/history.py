"""The turns of a request, newest first, and the turn that a session's ring stores.

A request may not show all of its conversation's turns: its history was condensed, or is on the
server. Then a ring with the newest turn of each earlier request supplies the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final, Generic, TypeVar

from extproc.apis.conversation import OTHER_ROLE
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
)
from extproc.request.document import NotCounted

USUAL_TURNS: Final = 32
"""Number of turns that are read if no tool's threshold needs more, and that a ring contains."""

MAX_TURNS: Final = 64
"""Maximum number of turns to read."""

MIN_SIMILAR: Final = 6
"""Minimum number of similar failures in a loop."""

_PREFILLED_WORDS: Final = 2
Step = TypeVar("Step")


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
            if len(alike) < MIN_SIMILAR - 1:
                return None
        past = list(entries[-USUAL_TURNS:][::-1])
        if self.entry in past:
            del past[: past.index(self.entry) + 1]
        turns = [decode_turn(entry) for entry in past]
        # From the request's previous turn on; without it, this is another conversation
        if self._before is not None and not followed:
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
        # The usual case; slices take most of the time
        if own <= 1 and others.find(raw) < 0 and others.find(normalized) < 0:
            return False
        same = [
            entry
            for entry in entries
            if entry[RAW:NORMALIZED] == raw or entry[NORMALIZED:REST] == normalized
        ]
        return len(same) > (own > 0)


def only_speaks(turn: AnyTurn | None) -> bool:
    """Whether the assistant only says something, and nothing follows."""
    return isinstance(turn, Turn) and not turn.answered and not turn.calls
