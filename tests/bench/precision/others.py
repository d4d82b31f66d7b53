"""How other programs detect loops, to compare them with policies on the same conversations.

Each rule is written from its program's documentation and behaviour, with its defaults. Where these
differ, the rule finds more: no rule compares thoughts or the order of arguments, and an action that
is written as text is a call. gemini-cli's check by a model, and OpenRouter's notes, are left out.

A rule sees what its program would see: all answers in order, even if requests leave some out.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from typing import NamedTuple

from extproc.apis import open_conversation
from extproc.apis.contents import is_injected, list_texts, read_arguments, read_result
from extproc.apis.conversation import ASSISTANT, Message
from extproc.apis.messages import CALL, RESULT
from extproc.detectors.actions import read_text_action
from extproc.detectors.arguments import THOUGHTS
from extproc.detectors.turn import HARNESS, Reading
from extproc.request.document import INSPECTION, Document, NotCounted, write_canonical


class Step(NamedTuple):
    """An answer of the model, and what came back.

    Attributes:
        said: the answer's text.
        calls: tools and arguments.
        results: whether the API marks each as an error, and its text. After an answer without a
            call, it is the user's message.
    """

    said: str
    calls: Sequence[tuple[str, bytes]] = ()
    results: Sequence[tuple[bool, str]] = ()


class Rule(NamedTuple):
    """A rule of another program.

    Attributes:
        count: how often the newest step repeats, by this rule.
        acts: the count at which the agent is warned, or its call refused.
        ends: the count at which its run ends.
    """

    count: Callable[[Sequence[Step]], int]
    acts: int
    ends: int


def read_steps(body: bytes) -> Iterator[Step]:
    """The steps that a request shows, newest first, also those of a history in one message."""
    document = Document(body)
    behind: list[Message] = []
    newer: Step | None = None
    with suppress(NotCounted):
        conversation = open_conversation(document)
        reading = Reading(conversation, document, frozenset())
        for message in reading.unfolded if reading.in_text else conversation.read_backwards():
            INSPECTION.begin()
            if message.speaker != ASSISTANT:
                behind.append(message)
            elif behind or not conversation.prefilled:
                step = _read_step(message, behind[::-1])
                if behind or newer is None or not newer.calls or step.calls:
                    yield step
                    newer = step
                behind = []


def _read_step(message: Message, behind: Sequence[Message]) -> Step:
    parts = message.read_parts()
    said = "\n".join(list_texts(parts))
    calls = [
        (part.name, write_canonical(read_arguments(part.value)))
        for part in parts
        if part.kind == CALL
    ]
    if not calls:
        name, action = read_text_action(said, THOUGHTS)
        calls = [(name, action)] if name else []
    results: list[tuple[bool, str]] = []
    for answer in behind:
        parts = answer.read_parts()
        results += [(part.failed, read_result(part.value)) for part in parts if part.kind == RESULT]
        beside = [text for text in list_texts(parts) if not is_injected(text)]
        if beside and answer.speaker not in HARNESS:
            failed, result = results.pop() if results else (False, "")
            results.append((failed, "\n".join([result, *beside]).strip()))
    return Step(said, calls, results)


def _skip_to_user(steps: Sequence[Step]) -> Sequence[Step]:
    """The steps after the user's last message."""
    asked = [place for place, step in enumerate(steps, 1) if not step.calls and step.results]
    return steps[asked[-1] if asked else 0 :]


def _repeats(items: Sequence[object], times: int, period: int = 1) -> bool:
    """Whether the last items are a cycle of this length that occurs so many times."""
    newest = items[-times * period :]
    return len(newest) == times * period and newest[period:] == newest[:-period]


def find_stuck(steps: Sequence[Step]) -> int:
    """OpenHands' stuck detector: the last 20 events after the user's last message.

    Stuck is the same action with the same observation 4 times, or with errors 3 times; 3 messages
    of the agent in a row; or two actions with their observations in turn, 6 in all.
    docs.openhands.dev/sdk/guides/agent-stuck-detector
    """
    events: list[tuple[str, object]] = []
    for step in _skip_to_user(steps):
        events += [("action", call) for call in step.calls] or [("message", step.said)]
        events += [("error" if failed else "result", text) for failed, text in step.results]
    events = events[-20:]
    actions = [event for event in events if event[0] == "action"]
    results = [event for event in events if event[0] in ("error", "result")]
    return int(
        (_repeats(actions, 4) and _repeats(results, 4))
        or (_repeats(actions, 3) and [kind for kind, _ in results[-3:]] == ["error"] * 3)
        or [kind for kind, _ in events[-3:]] == ["message"] * 3
        or (_repeats(actions, 3, 2) and _repeats(results, 3, 2))
    )


def count_detections(steps: Sequence[Step]) -> int:
    """gemini-cli's loop detection: a cycle of 1 to 5 calls occurs 5 times, or an answer chants.

    Calls before the user's last message do not count. The first detection gives the model a hint,
    the second ends the run. github.com/google-gemini/gemini-cli, loopDetectionService.ts
    """
    calls = [call for step in _skip_to_user(steps) for call in step.calls]
    ends = range(1, len(calls) + 1)
    found = [end for end in ends if any(_repeats(calls[:end], 5, n) for n in range(1, 6))]
    newest = steps[-1]
    return (len(found) if found and found[-1] > len(calls) - len(newest.calls) else 0) + (
        _chants(newest.said)
    )


def _chants(text: str) -> bool:
    """Whether 50 characters occur 10 times, 250 apart on average, with at most 5 different gaps.

    Code, tables, lists, headings and quotations interrupt a text.
    """
    plain = re.sub(r"```.*?(?:```|\Z)", "\0", text, flags=re.DOTALL)
    for stretch in re.split(r"\0|^\s*(?:[|*+#>-]|\d+\.\s)", plain, flags=re.MULTILINE):
        places: dict[str, list[int]] = {}
        for place in range(len(stretch) - 49):
            same = places.setdefault(stretch[place : place + 50], [])
            same.append(place)
            last = same[-10:]
            if len(last) == 10 and last[-1] - last[0] <= 9 * 250:
                gaps = {stretch[start:end] for start, end in pairwise(last)}
                if len(gaps) <= 5:
                    return True
    return False


def count_streak(steps: Sequence[Step]) -> int:
    """OpenRouter's doom-loop detection: how often a tool was called with equal arguments.

    Other tools in between do not matter, and equal calls in one answer are one. The third such call
    is refused, and the sixth ends the run. So does a text that six answers have in common, or that
    an answer repeats at its end. openrouter.ai/docs/agent-sdk/call-model/doom-loop-detection
    """
    streaks: dict[str, tuple[object, int]] = {}
    newest = steps[-1]
    for step in steps:
        said = " ".join(step.said.split())
        for name, given in [*dict.fromkeys(step.calls), *([("", said)] if said else [])]:
            before, times = streaks.get(name, (given, 0))
            streaks[name] = given, times + 1 if before == given else 1
    words = newest.said.split()[-400:]
    spoken = [
        streaks.get("", ("", 0))[1] if newest.said.strip() else 0,
        *[_count_at_end(words, period) for period in range(1, 17)],
    ]
    called = [streaks[name][1] for name, _ in newest.calls]
    return max([*called, *[times for times in spoken if times >= 6], 0])


def _count_at_end(words: Sequence[str], period: int) -> int:
    """How often words are repeated at the end, if that makes 12 words or more."""
    times = 1
    while _repeats(words, times + 1, period):
        times += 1
    return times if times * period >= 12 else 0


def count_equal_calls(steps: Sequence[Step]) -> int:
    """A plain counter: how many steps of the conversation have a call of the newest step."""
    return max([sum(call in step.calls for step in steps) for call in steps[-1].calls], default=0)


RULES = {
    "OpenHands": Rule(find_stuck, 1, 1),
    "gemini-cli": Rule(count_detections, 1, 2),
    "OpenRouter": Rule(count_streak, 3, 6),
    "equal calls": Rule(count_equal_calls, 3, 7),
}


def apply_rules(bodies: Sequence[bytes]) -> Iterator[tuple[str, int, bool]]:
    """The rules that act on requests of a conversation, by name, and whether its run ends."""
    steps: list[Step] = []
    before = b""
    for number, body in enumerate(bodies, 1):
        newest = [] if body == before else list(islice(read_steps(body), 1 if steps else None))
        steps, before = [*steps, *newest[::-1]], body
        for name, rule in RULES.items() if newest else ():
            count = rule.count(steps)
            if count >= rule.acts:
                yield name, number, count >= rule.ends
