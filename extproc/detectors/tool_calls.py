"""Similarity `tool_calls`: a tool called repeatedly with the same arguments and the same result.

An agent's request contains its history, so one request is enough to detect a loop, and nothing is
counted. Two calls are equal if tool, canonical arguments and result are: the same call with a new
result is progress.

The history is read from the newest call on, and only while a loop is possible.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

from extproc.apis import open_conversation
from extproc.apis.contents import is_injected, read_arguments, read_result
from extproc.apis.conversation import ASSISTANT, OTHER_ROLE, TOOL, Message
from extproc.apis.messages import CALL, RESULT, TEXT, Part
from extproc.decision import Repeat
from extproc.detectors.actions import MAX_NAME
from extproc.detectors.base import HistorySimilarity
from extproc.detectors.history import Newest
from extproc.detectors.keys import MAX_CALLS, SimilarityKeys, ToolCallsKeys
from extproc.detectors.loops import MIN_CYCLE
from extproc.detectors.tools import Limit, count_rounds
from extproc.detectors.turn import digest_images
from extproc.objects import JsonObject, Place
from extproc.request.document import ABSENT, Document, NotCounted, open_value, write_canonical
from extproc.request.quoting import quote_all

NO_CALLS: Final = (
    "no calls that count: none since the user's last message, or only of tools that are allowed"
)
_SEPARATOR: Final = b"\xff"  # never in UTF-8
_NEXT_CALL: Final = b"\xfe"
_NOT_SAID: Final = frozenset({TOOL, "function", OTHER_ROLE})
_INSTEAD: Final = "change the approach or the arguments, or finish with the result you have so far."


class ShownCall:
    """One call in a conversation; its canonical form is computed lazily.

    Attributes:
        name: the tool's name.
        turn: 0 in the assistant's last turn, 1 in the one before that, and so on.
    """

    def __init__(self, call: Part, answer: Part | None, turn: int) -> None:
        """`answer` is the call's result, if there is one."""
        self.name = call.name
        self.turn = turn
        self._call = call
        self._answer = answer
        self._arguments: bytes | None = None
        self._outcome: bytes | None = None

    @property
    def arguments(self) -> bytes:
        """The arguments in canonical form."""
        if self._arguments is None:
            self._arguments = write_canonical(read_arguments(self._call.value))
        return self._arguments

    def read_result(self) -> str:
        """The result as text; empty if there is none."""
        return read_result(self._answer.value) if self._answer is not None else ""

    @property
    def outcome(self) -> bytes:
        """The result in canonical form; empty if there is none."""
        if self._outcome is None:
            self._outcome = b""
            if self._answer is not None:
                failed = b"error" if self._answer.failed else b"result"
                self._outcome = failed + _SEPARATOR + self.read_result().encode()
        return self._outcome

    def same(self, other: ShownCall, *, results: bool) -> bool:
        """Whether two calls are equal; with `results`, calls without a result never are."""
        if self is other:
            return True
        if self.name != other.name or self.arguments != other.arguments:
            return False
        if not results:
            return True
        if self.images != other.images and self.images and other.images:
            return False
        return (self.outcome != b"" or self.images != b"") and self.outcome == other.outcome

    @property
    def images(self) -> bytes:
        """A digest of the images beside the result; empty if there are none. See `Part`."""
        return (
            digest_images(self._answer)
            if self._answer is not None and self._answer.images is not ABSENT
            else b""
        )

    def spell(self, *, results: bool) -> bytes:
        """All that is compared, for a fingerprint."""
        spelled = self.name.encode() + _SEPARATOR + self.arguments
        return spelled + _SEPARATOR + self.outcome if results else spelled


class ToolCalls(HistorySimilarity):
    """Finds loops of tool calls, with a detector's settings."""

    keys: ClassVar[type[JsonObject]] = ToolCallsKeys

    def __init__(self, keys: SimilarityKeys) -> None:
        self._limits = keys.make_limits(self.default_threshold)
        self._max_cycle = keys.max_cycle
        self._results = keys.compare_results
        self._reset = keys.reset_on_user_message
        self._cooldown = keys.cooldown_seconds > 0  # a call outside a loop may then be refused
        stricter = [ToolCalls(raised) for raised in keys.list_steps(self.default_threshold)[1:]]
        self._stricter = list(enumerate(stricter, 1))[::-1]

    def compare(self, document: Document) -> tuple[bytes, Repeat | None]:
        """The newest turn's calls, and how often they repeat; empty and None if none can loop."""
        calls = Newest(self._list_counted(document))
        if calls.at(self._limits.lowest - 1) is None and not self._cooldown:
            return b"", None  # too few calls for any loop
        for step, rules in self._stricter:
            found = rules.find_loop(calls)
            if found is not None and found.looping:
                return self._spell_newest(calls), found._replace(step=step)
        found = self.find_loop(calls)
        return (b"", None) if found is None else (self._spell_newest(calls), found)

    def find_loop(self, calls: Newest[ShownCall]) -> Repeat | None:
        """The loop by these thresholds, or else the last turn's most frequent call, if any."""
        best = self._find_most_repeated(calls)
        if best is not None and not best.looping:
            return self._cycle(calls) or best
        return best

    def find_result(self, document: Document) -> str:
        """See `Similarity`."""
        newest = Newest(self._list_counted(document)).at(0)
        return "" if newest is None else newest.read_result()

    def _spell_newest(self, calls: Newest[ShownCall]) -> bytes:
        """What is compared of the newest turn's calls, sorted, because order does not matter."""
        spelled: list[bytes] = []
        while (call := calls.at(len(spelled))) is not None and not call.turn:
            spelled.append(call.spell(results=self._results))
        return _NEXT_CALL.join(sorted(spelled))

    def show(self, document: Document) -> list[str]:
        """The calls that are compared, oldest first; see `Similarity`."""
        found = Newest(self._list_counted(document)).newest(self._limits.widest)
        named = [
            call.spell(results=self._results).replace(_SEPARATOR, b" | ").decode()
            for call in reversed(found)
        ]
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
        """Thresholds that exceed the window and are never reached; see `Similarity`."""
        threshold, window = loop.get("threshold_identical_requests"), loop.get("window_calls", 10)
        tools = loop.get("tools")
        limits: list[tuple[Place, Any, Any]] = [
            ((*place, "threshold_identical_requests"), threshold, window)
        ]
        for name, tool in tools.items() if isinstance(tools, dict) else ():
            if (
                isinstance(tool, dict)
                and tool.get("allow") is not True
                and not {"threshold", "window_calls"}.isdisjoint(tool)
            ):
                own, last = tool.get("threshold"), tool.get("window_calls")
                limits.append(
                    (
                        (*place, "tools", name),
                        threshold if own is None else own,
                        window if last is None else last,
                    )
                )
        for where, least, most in limits:
            if isinstance(least, int) and isinstance(most, int) and least > most:
                never = f"a threshold of {least} is never reached among the last {most} calls"
                yield where, f"{never}; raise window_calls or lower it"

    def _list_counted(self, document: Document) -> Iterator[ShownCall]:
        """The calls that may be part of a loop, newest first; equal parallel calls count as one."""
        conversation = open_conversation(document)
        if conversation.elsewhere:
            raise NotCounted("no_history")
        newer: ShownCall | None = None
        at_once: set[bytes] = set()
        messages = conversation.read_backwards()
        if conversation.prefilled:
            next(messages, None)
        for call in read_calls(messages, reset=self._reset):
            if self._find_limit(call).allow:
                continue
            if newer is None or newer.turn != call.turn:
                at_once = set()
            else:
                at_once.add(newer.spell(results=self._results))
                if call.spell(results=self._results) in at_once:
                    continue
            newer = call
            yield call  # compiled, a generator expression would run to its end

    def _find_limit(self, call: ShownCall) -> Limit:
        return self._limits.of((call.name[:MAX_NAME],))

    def _find_most_repeated(self, calls: Newest[ShownCall]) -> Repeat | None:
        """The last turn's call that loops, or else is the most frequent, if one counts."""
        candidates: list[Repeat] = []
        for place in range(self._limits.widest):
            call = calls.at(place)
            if call is None or call.turn:
                break
            limit = self._find_limit(call)
            shared = limit is self._limits.default
            if shared and place >= limit.window_calls:
                continue
            # A tool with its own entry has a window of its own calls, so that other calls cannot
            # displace them.
            looked_at = calls.newest(limit.window_calls if shared else MAX_CALLS)
            among = (
                looked_at
                if shared
                else [other for other in looked_at if other.name == call.name][: limit.window_calls]
            )
            equal = [other for other in among if self._same(call, other)]
            count = len(equal)
            if count >= limit.threshold and self._is_work(calls, equal[: limit.threshold]):
                count = limit.threshold - 1
            found = Repeat(
                (call.name[:MAX_NAME],),
                count,
                len(among),
                limit.threshold,
                self._results,
                limit.reason,
            )
            candidates.append(found)
        return max(
            candidates, key=lambda candidate: (candidate.looping, candidate.count), default=None
        )

    def _is_work(self, calls: Newest[ShownCall], equal: Sequence[ShownCall]) -> bool:
        """Whether too many new turns between equal calls make them work: edit, run, edit, run."""
        kept = {call.turn for call in equal}
        between = [turn for turn in range(equal[0].turn + 1, equal[-1].turn) if turn not in kept]
        allowed = len(equal) - 2
        if len(between) <= allowed:
            return False
        made: defaultdict[int, set[bytes]] = defaultdict(set)
        for call in calls.newest(MAX_CALLS):
            made[call.turn].add(call.spell(results=self._results))
        rounds = [frozenset(made[turn]) for turn in range(max(made) + 1)]
        return (
            sum([rounds[turn] not in rounds[turn + 1 :] for turn in between if rounds[turn]])
            > allowed
        )

    def _cycle(self, calls: Newest[ShownCall]) -> Repeat | None:
        """The shortest cycle of different calls that has enough rounds, if any."""
        newest, length = calls.at(0), 1
        while newest is not None and length <= self._max_cycle:
            before = calls.at(length)
            if before is not None and self._same(newest, before):
                break
            length += 1
        if not MIN_CYCLE <= length <= self._max_cycle:
            return None
        members = calls.newest(length)
        limits = [self._find_limit(call) for call in members]
        rounds = count_rounds(length, max([limit.threshold for limit in limits]))
        if not calls.is_cycle(length, length * rounds, self._same):
            return None
        names = tuple([call.name[:MAX_NAME] for call in reversed(members)])
        reason = next((limit.reason for limit in limits if limit.reason), "")
        return Repeat(names, rounds, length * rounds, rounds, self._results, reason)

    def _same(self, one: ShownCall, other: ShownCall) -> bool:
        return one.same(other, results=self._results)


def _name_calls(repeat: Repeat) -> str:
    """Which tools were called, and how often."""
    names = quote_all(repeat.tools)
    if not repeat.looping:
        return f"{names} was called in a loop, and this same call stays refused for a while"
    if len(repeat.tools) > 1:
        return (
            f"the last {repeat.calls} tool calls were {repeat.count} rounds of the same "
            f"{len(repeat.tools)} calls ({names})"
        )
    same = "the same arguments and the same result" if repeat.results else "the same arguments"
    return f"{repeat.count} of the last {repeat.calls} tool calls were {names} with {same}"


def read_calls(messages: Iterator[Message], *, reset: bool) -> Iterator[ShownCall]:
    """The calls of a conversation, newest first.

    Args:
        messages: newest first.
        reset: stop at a person's newest message. Results do not count as such, nor does text beside
            them that is completely wrapped in a tag, because that is from the agent's own program.
    """
    answers: dict[str, list[Part]] = {}  # ids need not be unique; the order then decides
    turn, calling, silent = 0, False, True
    answered = wrapped = False  # since the model's next message
    for message in messages:
        parts = message.read_parts()
        speaks = message.speaker == ASSISTANT
        if reset and (wrapped and not answered if speaks else _is_said(message.speaker, parts)):
            return
        answered, wrapped = (
            not speaks and answered,
            not speaks and (wrapped or message.speaker not in _NOT_SAID),
        )
        for part in reversed(parts):
            kind = part.kind
            if kind == RESULT:
                answered = True
                if calling:
                    turn, calling, answers = turn + 1, False, {}
                answers.setdefault(part.id, []).append(part)
            elif kind == CALL:
                calling, silent = True, False
                waiting = answers.get(part.id)
                yield ShownCall(part, waiting.pop(0) if waiting else None, turn)
        if silent and speaks and not answers:
            turn, silent = 1, False  # it has spoken since, without a call


def _is_said(speaker: str, parts: list[Part]) -> bool:
    """Whether a message is a person's; results are not, nor is text wrapped in a tag."""
    if speaker in _NOT_SAID:
        return False
    for part in parts:
        text = open_value(part.value) if part.kind == TEXT else None
        if part.kind != RESULT and not (isinstance(text, str) and is_injected(text.strip())):
            return True
    return not parts
