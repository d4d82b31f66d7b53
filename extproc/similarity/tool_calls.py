"""Similarity `tool_calls`: a tool called again and again with the same arguments and the same result.

An agent's request carries its own history, so one request is enough to see the loop that it is in; nothing has to be counted.
Two calls are equal when tool, canonical arguments and result are: the same call that brings back something new is progress.

The history is walked from the newest call to the oldest, and no further than a loop could still be found.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar, NamedTuple

from extproc.decision import Outcome, Repeat
from extproc.policy.objects import JsonObject, Place
from extproc.similarity.base import Similarity
from extproc.similarity.conversation import (
    arguments,
    chat_calls,
    content,
    conversation,
    only_text,
    parts,
    result,
)
from extproc.similarity.document import Document, NotCounted
from extproc.similarity.keys import SimilarityKeys, ToolCallsKeys
from extproc.similarity.shapes.structs import CALL, RESULT, Part

MAX_NAME = 256
"""So much of a tool's name is matched with the patterns of `tools` and shown, in characters."""

NO_CALLS = "no calls that count: none since the user's last message, or only of tools that are allowed"
_SEPARATOR = b"\xff"  # never in UTF-8


class Rule(NamedTuple):
    """What holds for the calls of one tool; see `ToolCallsKeys`."""

    threshold: int
    window_calls: int
    reason: str = ""
    allow: bool = False


class Call:
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
            self._arguments = arguments(self._value)
        return self._arguments

    def outcome(self) -> bytes:
        """The result in one spelling, empty when there is none."""
        if self._outcome is None:
            self._outcome = b""
            if self._answer is not None:
                failed = b"error" if self._answer.failed else b"result"
                self._outcome = failed + _SEPARATOR + result(self._answer.value)
        return self._outcome

    def same(self, other: Call, *, results: bool) -> bool:
        """Whether both are one call made twice; calls whose results are unknown never are, where `results` count."""
        if self is other:
            return True
        if self.name != other.name or self.arguments() != other.arguments():
            return False
        return not results or (self.outcome() != b"" and self.outcome() == other.outcome())

    def named(self, *, results: bool) -> bytes:
        """All that is compared, for a fingerprint."""
        spelled = self.name.encode() + _SEPARATOR + self.arguments()
        return spelled + _SEPARATOR + self.outcome() if results else spelled


class ToolCalls(Similarity):
    """A detector's settings, ready to look into conversations."""

    keys: ClassVar[type[JsonObject]] = ToolCallsKeys
    looks: ClassVar[bool] = True
    stateless: ClassVar[bool] = True

    def __init__(self, keys: SimilarityKeys) -> None:
        """See `Similarity`."""
        self._rule = Rule(keys.threshold_identical_requests or 0, keys.window_calls)
        self._max_cycle = keys.max_cycle
        self._results = keys.compare_results
        self._reset = keys.reset_on_user_message
        self._named = {
            name: Rule(
                tool.threshold or self._rule.threshold, tool.window_calls or self._rule.window_calls, tool.reason, tool.allow
            )
            for name, tool in keys.tools.items()
        }
        self._patterns = [(name.split("*"), rule) for name, rule in self._named.items() if "*" in name]
        self._cooldown = keys.cooldown_seconds > 0  # then a call may be refused that does not loop
        self._fewest = min(rule.threshold for rule in (self._rule, *self._named.values()))
        self._longest = max(rule.window_calls for rule in (self._rule, *self._named.values()))

    def compare(self, document: Document) -> tuple[bytes, Repeat | None]:
        """What is repeated, empty when nothing is that matters, and how often; see `Similarity`."""
        history = _History(self._counted(document))
        if history.at(self._fewest - 1) is None and not self._cooldown:
            return b"", None  # too few calls for any loop
        best = self._most_repeated(history)
        if best is not None and not best[1].looping:
            return self._cycle(history) or best
        return best or (b"", None)

    def show(self, document: Document) -> list[str]:
        """The calls that are looked at, the oldest first; see `Similarity`."""
        found = list(islice(self._counted(document), self._longest))
        named = [call.named(results=self._results).replace(_SEPARATOR, b" | ").decode() for call in reversed(found)]
        return named or [NO_CALLS]

    def describe(self, repeat: Repeat | None) -> str:
        """See `Similarity`."""
        if repeat is None:
            return "no call of the last turn, or fewer calls than any threshold"
        return f"{', '.join(repeat.tools)}: {repeat.count} of {repeat.calls} calls"

    def tell(self, outcome: Outcome, method: str, path: str) -> str:
        """See `Similarity`; what the tools were called with and what they said stays out of it."""
        repeat = outcome.repeat
        if repeat is None:
            return super().tell(outcome, method, path)
        reason = f" {repeat.reason.strip()}" if repeat.reason.strip() else ""
        return (
            f"Loop detected: {_name_calls(repeat)}, so this request was refused.{reason} Neither calling again nor waiting "
            "will bring anything new: change the approach or the arguments, or finish with the result you have so far."
        )

    @staticmethod
    def find_errors(loop: dict[str, Any], place: Place) -> Iterator[tuple[Place, str]]:
        """Thresholds that a window of so many calls can never reach; see `Similarity`."""
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

    def _counted(self, document: Document) -> Iterator[Call]:
        """The calls of a conversation that may be part of a loop, the newest first."""
        if conversation(document).elsewhere:
            raise NotCounted("no_history")
        found = calls(document, reset=self._reset)
        return (call for call in found if not self.rule(call.name).allow) if self._named else found

    def rule(self, name: str) -> Rule:
        """What holds for a tool: its own entry of `tools`, else the first pattern that takes its name, else the detector's."""
        if not self._named:
            return self._rule
        name = name[:MAX_NAME]
        rule = self._named.get(name)
        if rule is None:
            rule = next((rule for pattern, rule in self._patterns if _matches(name, pattern)), self._rule)
        return rule

    def _most_repeated(self, history: _History) -> tuple[bytes, Repeat] | None:
        """Of the last turn's calls the one that loops, or else stands most often among the calls of its window."""
        candidates: list[tuple[Call, Repeat]] = []
        for place in range(self._longest):
            call = history.at(place)
            if call is None or call.turn:
                break
            rule = self.rule(call.name)
            if place >= rule.window_calls or any(call.same(other, results=self._results) for other, _ in candidates):
                continue
            among = history.newest(rule.window_calls)
            count = sum([call.same(other, results=self._results) for other in among])
            repeat = Repeat((call.name[:MAX_NAME],), count, len(among), rule.threshold, self._results, rule.reason)
            candidates.append((call, repeat))
        if not candidates:
            return None
        call, repeat = max(candidates, key=lambda candidate: (candidate[1].looping, candidate[1].count))
        return call.named(results=self._results), repeat

    def _cycle(self, history: _History) -> tuple[bytes, Repeat] | None:
        """The shortest cycle of different calls that has come round often enough, in the name of its newest call."""
        for length in range(2, self._max_cycle + 1):
            if not self._same(history, 0, length):
                continue
            members = history.newest(length)
            if not self._all_different(members):
                continue
            rules = [self.rule(call.name) for call in members]
            rounds = max(rule.threshold for rule in rules)
            if all(self._same(history, place, place + length) for place in range(1, length * (rounds - 1))):
                names = tuple(call.name[:MAX_NAME] for call in reversed(members))
                reason = next((rule.reason for rule in rules if rule.reason), "")
                repeat = Repeat(names, rounds, length * rounds, rounds, self._results, reason)
                return members[0].named(results=self._results), repeat
        return None

    def _same(self, history: _History, newer: int, older: int) -> bool:
        one, other = history.at(newer), history.at(older)
        return one is not None and other is not None and one.same(other, results=self._results)

    def _all_different(self, members: list[Call]) -> bool:
        return not any(one.same(other, results=self._results) for place, one in enumerate(members) for other in members[:place])


def _name_calls(repeat: Repeat) -> str:
    """Which tools were called, and how often."""
    names = ", ".join(repeat.tools)
    if not repeat.looping:
        return f"{names} was called in a loop, and this same call stays refused for a while"
    if len(repeat.tools) > 1:
        return f"the last {repeat.calls} tool calls were {repeat.count} rounds of the same {len(repeat.tools)} calls ({names})"
    same = "the same arguments and the same result" if repeat.results else "the same arguments"
    return f"{repeat.count} of the last {repeat.calls} tool calls were {names} with {same}"


class _History:
    """Calls, the newest first, taken from the conversation as far as somebody asks for them."""

    def __init__(self, source: Iterator[Call]) -> None:
        self._source = source
        self._taken: list[Call] = []

    def at(self, place: int) -> Call | None:
        """The call at a place, 0 being the newest."""
        while len(self._taken) <= place:
            call = next(self._source, None)
            if call is None:
                return None
            self._taken.append(call)
        return self._taken[place]

    def newest(self, count: int) -> list[Call]:
        """So many calls, or as many as there are."""
        self.at(count - 1)
        return self._taken[:count]


def calls(document: Document, *, reset: bool) -> Iterator[Call]:
    """The calls of a conversation, the newest first.

    Args:
        document: in which the conversation stands.
        reset: stop at the last message of the user's own; one that only carries results is not.
    """
    answers: defaultdict[str, deque[Part]] = defaultdict(deque)  # ids need not be unique: then the order decides
    turn, calling, silent = 0, False, True
    for message in conversation(document).backwards(document):
        said = None if message.tool_calls else content(message)  # whose calls stand beside what it says
        if reset and message.role == "user" and only_text(message, said):
            return
        found = chat_calls(message) if message.tool_calls else parts(message, said)
        if reset and message.role == "user" and not (found and all(part.kind == RESULT for part in found)):
            return
        for part in reversed(found):
            if part.kind == RESULT:
                if calling:
                    turn, calling = turn + 1, False
                    answers.clear()
                answers[part.id].append(part)
            elif part.kind == CALL:
                calling, silent = True, False
                yield Call(part, answers[part.id].popleft() if answers[part.id] else None, turn)
        if silent and message.role == "assistant" and not answers:
            turn, silent = 1, False  # it has said something since, and calls nothing


def _matches(name: str, pattern: Sequence[str]) -> bool:
    """Whether a name is the pattern's parts with anything between them; in linear time, because clients choose names."""
    first, *between, last = pattern
    if len(name) < len(first) + len(last) or not name.startswith(first) or not name.endswith(last):
        return False
    place, end = len(first), len(name) - len(last)
    for part in between:
        place = name.find(part, place, end)
        if place < 0:
            return False
        place += len(part)
    return True
