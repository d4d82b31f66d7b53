"""Similarity `tool_calls`: a tool called again and again with the same arguments and the same result.

An agent's request carries its own history, so one request is enough to see the loop that it is in; nothing has to be counted.
Two calls are equal when tool, canonical arguments and result are: the same call that brings back something new is progress.

The history is walked from the newest call to the oldest, and no further than a loop could still be found.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from extproc.apis import open_conversation
from extproc.apis.contents import is_injected, read_arguments, read_result, unpack
from extproc.apis.conversation import ASSISTANT, OTHER_ROLE, TOOL
from extproc.apis.messages import CALL, RESULT, TEXT, Message, Part
from extproc.decision import Repeat
from extproc.detectors.actions import MAX_NAME
from extproc.detectors.base import HistorySimilarity
from extproc.detectors.keys import MAX_CALLS, SimilarityKeys, ToolCallsKeys
from extproc.detectors.tools import Limit, count_rounds
from extproc.objects import JsonObject, Place
from extproc.request.document import Document, NotCounted, write_canonical
from extproc.request.quoting import quote_all

_MOST_CALLS = MAX_CALLS
"""This many calls are looked at in all."""

NO_CALLS = "no calls that count: none since the user's last message, or only of tools that are allowed"
_SEPARATOR = b"\xff"  # never in UTF-8
_NEXT_CALL = b"\xfe"
_NOT_SAID = frozenset({TOOL, "function", OTHER_ROLE})
_INSTEAD = "change the approach or the arguments, or finish with the result you have so far."


class ShownCall:
    """One call in a conversation.

    Attributes:
        name: of the tool.
        turn: 0 in the assistant's last turn, 1 in the one before that, and so on.
    """

    __slots__ = ("_answer", "_arguments", "_outcome", "_value", "name", "turn")

    def __init__(self, call: Part, answer: Part | None, turn: int) -> None:
        """Nothing is brought into one spelling before it is compared; `answer` is what came back, as far as it has."""
        self.name = call.name
        self.turn = turn
        self._value = call.value
        self._answer = answer
        self._arguments: bytes | None = None
        self._outcome: bytes | None = None

    def arguments(self) -> bytes:
        """The arguments in one spelling."""
        if self._arguments is None:
            self._arguments = write_canonical(read_arguments(self._value))
        return self._arguments

    def outcome(self) -> bytes:
        """The result in one spelling, empty when there is none."""
        if self._outcome is None:
            self._outcome = b""
            if self._answer is not None:
                failed = b"error" if self._answer.failed else b"result"
                self._outcome = failed + _SEPARATOR + read_result(self._answer.value).encode()
        return self._outcome

    def same(self, other: ShownCall, *, results: bool) -> bool:
        """Whether both are one call made twice; calls whose results are unknown never are, where `results` count."""
        if self is other:
            return True
        if self.name != other.name or self.arguments() != other.arguments():
            return False
        return not results or (self.outcome() != b"" and self.outcome() == other.outcome())

    def spell(self, *, results: bool) -> bytes:
        """All that is compared, for a fingerprint."""
        spelled = self.name.encode() + _SEPARATOR + self.arguments()
        return spelled + _SEPARATOR + self.outcome() if results else spelled


class ToolCalls(HistorySimilarity):
    """A detector's settings, ready to look into conversations."""

    keys: ClassVar[type[JsonObject]] = ToolCallsKeys

    def __init__(self, keys: SimilarityKeys) -> None:
        self._limits = keys.make_limits(self.default_threshold)
        self._max_cycle = keys.max_cycle
        self._results = keys.compare_results
        self._reset = keys.reset_on_user_message
        self._cooldown = keys.cooldown_seconds > 0  # then a call may be refused that does not loop
        stricter = [ToolCalls(raised) for raised in keys.list_steps(self.default_threshold)[1:]]
        self._stricter = list(enumerate(stricter, 1))[::-1]

    def compare(self, document: Document) -> tuple[bytes, Repeat | None]:
        """What is repeated, empty when nothing is that matters, and how often; see `Similarity`."""
        history = _History(self._list_counted(document), results=self._results)
        if history.at(self._limits.lowest - 1) is None and not self._cooldown:
            return b"", None  # too few calls for any loop
        for step, rules in self._stricter:
            found = rules.find_loop(history)
            if found is not None and found.looping:
                return history.spell_newest(), found._replace(step=step)
        found = self.find_loop(history)
        return (b"", None) if found is None else (history.spell_newest(), found)

    def find_loop(self, history: _History) -> Repeat | None:
        """The call that loops, by these thresholds alone, or else the one that is made most often; None where none counts."""
        best = self._find_most_repeated(history)
        if best is not None and not best.looping:
            return self._cycle(history) or best
        return best

    def show(self, document: Document) -> list[str]:
        """The calls that are looked at, the oldest first; see `Similarity`."""
        found = _History(self._list_counted(document), results=self._results).newest(self._limits.widest)
        named = [call.spell(results=self._results).replace(_SEPARATOR, b" | ").decode() for call in reversed(found)]
        return named or [NO_CALLS]

    def describe(self, repeat: Repeat | None) -> str:
        """See `Similarity`."""
        if repeat is None:
            return "no call of the last turn, or fewer calls than any threshold"
        return f"{quote_all(repeat.tools)}: {repeat.count} of {repeat.calls} calls"

    def explain(self, repeat: Repeat) -> tuple[str, str, str]:
        """See `HistorySimilarity`."""
        return _name_calls(repeat), "calling again", f": {_INSTEAD}"

    @staticmethod
    def find_errors(loop: dict[str, Any], place: Place) -> Iterator[tuple[Place, str]]:
        """Thresholds that a window of this many calls can never reach; see `Similarity`."""
        threshold, window = loop.get("threshold_identical_requests"), loop.get("window_calls", 10)
        tools = loop.get("tools")
        limits: list[tuple[Place, Any, Any]] = [((*place, "threshold_identical_requests"), threshold, window)]
        for name, tool in tools.items() if isinstance(tools, dict) else ():
            if isinstance(tool, dict) and tool.get("allow") is not True and not {"threshold", "window_calls"}.isdisjoint(tool):
                own, last = tool.get("threshold"), tool.get("window_calls")
                limits.append(((*place, "tools", name), threshold if own is None else own, window if last is None else last))
        for where, least, most in limits:
            if isinstance(least, int) and isinstance(most, int) and least > most:
                never = f"a threshold of {least} is never reached among the last {most} calls"
                yield where, f"{never}; raise window_calls or lower it"

    def _list_counted(self, document: Document) -> Iterator[ShownCall]:
        """The calls of a conversation that may be part of a loop, the newest first."""
        conversation = open_conversation(document)
        if conversation.elsewhere:
            raise NotCounted("no_history")
        for call in read_calls(conversation.read_backwards(), reset=self._reset):
            if not self._find_limit(call).allow:
                yield call  # a generator expression would be read to its end at once, where this is compiled

    def _find_limit(self, call: ShownCall) -> Limit:
        return self._limits.of((call.name[:MAX_NAME],))

    def _find_most_repeated(self, history: _History) -> Repeat | None:
        """Of the last turn's calls the one that loops, or else stands most often among the calls of its window."""
        candidates: list[Repeat] = []
        for place in range(self._limits.widest):
            call = history.at(place)
            if call is None or call.turn:
                break
            limit = self._find_limit(call)
            shared = limit is self._limits.default
            if shared and place >= limit.window_calls:
                continue
            # A tool with an entry of its own has a window of its own calls: what else is called does not push them out.
            among = history.newest(limit.window_calls) if shared else history.newest_of(call.name, limit.window_calls)
            equal = [other for other in among if call.same(other, results=self._results)]
            count = len(equal)
            if count >= limit.threshold and self._is_work(history, equal[: limit.threshold]):
                count = limit.threshold - 1
            found = Repeat((call.name[:MAX_NAME],), count, len(among), limit.threshold, self._results, limit.reason)
            candidates.append(found)
        return max(candidates, key=lambda candidate: (candidate.looping, candidate.count), default=None)

    def _is_work(self, history: _History, equal: Sequence[ShownCall]) -> bool:
        """Whether too much that is new was done between equal calls, the newest first: edit, run, edit, run."""
        kept = {call.turn for call in equal}
        between = [turn for turn in range(equal[0].turn + 1, equal[-1].turn) if turn not in kept]
        allowed = len(equal) - 2
        if len(between) <= allowed:
            return False
        rounds = history.read_rounds(results=self._results)
        return sum([rounds[turn] not in rounds[turn + 1 :] for turn in between if rounds[turn]]) > allowed

    def _cycle(self, history: _History) -> Repeat | None:
        """The shortest cycle of different calls that has come round often enough."""
        for length in range(2, self._max_cycle + 1):
            if not self._same(history, 0, length):
                continue
            members = history.newest(length)
            if not self._all_different(members):
                continue
            limits = [self._find_limit(call) for call in members]
            rounds = count_rounds(length, max(limit.threshold for limit in limits))
            if all(self._same(history, place, place + length) for place in range(1, length * (rounds - 1))):
                names = tuple(call.name[:MAX_NAME] for call in reversed(members))
                reason = next((limit.reason for limit in limits if limit.reason), "")
                return Repeat(names, rounds, length * rounds, rounds, self._results, reason)
        return None

    def _same(self, history: _History, newer: int, older: int) -> bool:
        one, other = history.at(newer), history.at(older)
        return one is not None and other is not None and one.same(other, results=self._results)

    def _all_different(self, members: list[ShownCall]) -> bool:
        return not any(one.same(other, results=self._results) for place, one in enumerate(members) for other in members[:place])


def _name_calls(repeat: Repeat) -> str:
    """Which tools were called, and how often."""
    names = quote_all(repeat.tools)
    if not repeat.looping:
        return f"{names} was called in a loop, and this same call stays refused for a while"
    if len(repeat.tools) > 1:
        return f"the last {repeat.calls} tool calls were {repeat.count} rounds of the same {len(repeat.tools)} calls ({names})"
    same = "the same arguments and the same result" if repeat.results else "the same arguments"
    return f"{repeat.count} of the last {repeat.calls} tool calls were {names} with {same}"


class _History:
    """Calls, the newest first, taken from the conversation as far as is asked; one made several times at once is one."""

    def __init__(self, source: Iterator[ShownCall], *, results: bool) -> None:
        self._source = source
        self._results = results
        self._taken: list[ShownCall] = []
        self._at_once: set[bytes] = set()  # of the last turn that was taken, where it has several

    def at(self, place: int) -> ShownCall | None:
        """The call at a place, 0 being the newest."""
        while len(self._taken) <= place:
            call = next(self._source, None)
            if call is None:
                return None
            if self._is_first(call):
                self._taken.append(call)
        return self._taken[place]

    def _is_first(self, call: ShownCall) -> bool:
        """Whether it has not been taken in the same turn."""
        if not self._taken or self._taken[-1].turn != call.turn:
            self._at_once = set()
            return True
        self._at_once.add(self._taken[-1].spell(results=self._results))
        return call.spell(results=self._results) not in self._at_once

    def newest(self, count: int) -> list[ShownCall]:
        """This many calls, or as many as there are."""
        self.at(count - 1)
        return self._taken[:count]

    def newest_of(self, name: str, count: int) -> list[ShownCall]:
        """This many calls of one tool, or as many as there are among those that are looked at."""
        return [call for call in self.newest(_MOST_CALLS) if call.name == name][:count]

    def spell_newest(self) -> bytes:
        """All that is compared of the newest turn, whose calls have no order."""
        spelled: list[bytes] = []
        while (call := self.at(len(spelled))) is not None and not call.turn:
            spelled.append(call.spell(results=self._results))
        return _NEXT_CALL.join(sorted(spelled))

    def read_rounds(self, *, results: bool) -> list[frozenset[bytes]]:
        """What was called in each turn, the newest first, as far as calls are looked at."""
        calls = self.newest(_MOST_CALLS)
        rounds: list[set[bytes]] = [set() for _ in range(calls[-1].turn + 1)] if calls else []
        for call in calls:
            rounds[call.turn].add(call.spell(results=results))
        return [frozenset(made) for made in rounds]


def read_calls(messages: Iterator[Message], *, reset: bool) -> Iterator[ShownCall]:
    """The calls of a conversation, the newest first.

    Args:
        messages: the newest first.
        reset: stop where anybody but the model last said something.
    """
    answers: defaultdict[str, deque[Part]] = defaultdict(deque)  # ids need not be unique: then the order decides
    turn, calling, silent = 0, False, True
    for message in _read_since_somebody_spoke(messages) if reset else messages:
        for part in reversed(message.read_parts()):
            if part.kind == RESULT:
                if calling:
                    turn, calling = turn + 1, False
                    answers.clear()
                answers[part.id].append(part)
            elif part.kind == CALL:
                calling, silent = True, False
                yield ShownCall(part, answers[part.id].popleft() if answers[part.id] else None, turn)
        if silent and message.speaker == ASSISTANT and not answers:
            turn, silent = 1, False  # it has said something since, and calls nothing


def _read_since_somebody_spoke(messages: Iterator[Message]) -> Iterator[Message]:
    """The same up to where anybody but the model says something.

    Results are not said, nor is text beside them that is wholly wrapped in a tag: that is the agent's own program.
    """
    answered = wrapped = False  # since the message of the model's that comes next
    for message in messages:
        parts = message.read_parts()
        if message.speaker == ASSISTANT:
            if wrapped and not answered:
                return
            answered = wrapped = False
        elif message.speaker not in _NOT_SAID:
            if not parts or any(_is_said(part) for part in parts):
                return
            wrapped = True
        for part in parts:
            answered = answered or part.kind == RESULT
        yield message


def _is_said(part: Part) -> bool:
    """Whether a part of a message is what a person says; text that is wholly wrapped in a tag is the program's."""
    if part.kind != TEXT:
        return part.kind != RESULT
    text = unpack(part.value)
    return not (isinstance(text, str) and is_injected(text.strip()))
