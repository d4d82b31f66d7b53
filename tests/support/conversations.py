"""Thousands of agent conversations, side by side under one caller, with the truth known.

A plan says what an agent does and whether it loops. A habit says what its client omits, renews or
repeats. Requests are written as their API has them, so only the plan knows which conversation a
request belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import msgspec

from extproc.detectors.turns import Turns
from extproc.ext_proc.judging import Reply
from extproc.ext_proc.service import Service
from extproc.ext_proc.stream import Stream
from extproc.policy.bundle import LoopDetection
from extproc.request.document import Document
from tests.support.loops import WRITERS
from tests.support.messages import body, headers
from tests.support.scratchpads import TEXTS, as_scratchpad
from tests.support.service import decoded
from tests.support.turn_writers import Did

ORACLE = Turns(LoopDetection(enabled=True, similarity="turns"))
ORDERS = ("sequential", "lockstep", "random")
MESSAGES = ("messages", "input", "contents")
ASSISTANTS = ("assistant", "model")
APIS = [
    *("chat", "ollama", "responses", "anthropic", "gemini", "bedrock", "observed"),
    *("text, fence", "text, json", "text, parameters", "text, react"),
    *("scratchpad, ReAct", "scratchpad, DSPy", "scratchpad, a JSON list"),
]
_WRITERS = WRITERS | {
    f"scratchpad, {name}": lambda turns, name=name: as_scratchpad(turns, name) for name in TEXTS
}


class Habit(NamedTuple):
    """How a client changes the history that it sends.

    Attributes:
        turns: number of the newest turns sent; 0 for all.
        messages: the same in messages, whatever the first one is.
        opening: messages before the first turn are sent, too.
        first: number of the oldest turns that are sent before these.
        kept: number of the newest results sent in full; 0 for all.
        older: characters of other results that are sent; 0 for a placeholder, -1 for no result.
        renews: each request has new ids.
        cuts: only the newest message has thoughts.
        retries: number of times a request may be repeated.
    """

    turns: int = 0
    messages: int = 0
    opening: bool = True
    first: int = 0
    kept: int = 0
    older: int = 0
    renews: bool = False
    cuts: bool = False
    retries: int = 0

    def shorten(self, results: tuple[str, ...]) -> tuple[str, ...]:
        """Older results, as this client sends them."""
        if self.older < 0:
            return ()
        return tuple(
            [f"{each[: self.older]}..." if self.older else "[cleared]" for each in results]
        )


HABITS = {
    "whole": Habit(),
    "whole, retries": Habit(retries=3),
    "ids anew, thoughts cut": Habit(renews=True, cuts=True),
    "newest result kept": Habit(kept=1),
    "newest 2 results kept": Habit(kept=2),
    "2 kept, retries, ids anew, cut": Habit(kept=2, renews=True, cuts=True, retries=2),
    "older results cut": Habit(kept=1, older=8),
    "newest 2 results, no others": Habit(kept=2, older=-1),
    "newest observation only": Habit(kept=1, older=-1),
    "first 2 and last 4 turns": Habit(first=2, turns=4),
    **{f"last {count} turns": Habit(turns=count) for count in range(3, 9)},
    "last 3 turns, no opening": Habit(turns=3, opening=False),
    "last 5 turns, no opening, retries": Habit(turns=5, opening=False, retries=2),
    "last 4 turns, ids anew, cut": Habit(turns=4, renews=True, cuts=True),
}


# A client gives up at the third refusal.
PATIENCE = 3


class Sent(NamedTuple):
    """A request: its run, turns made so far, its body, and whether it is a side request."""

    run: Run
    done: int
    data: bytes
    aside: bool = False


class Run:
    def __init__(
        self, api: str, task: str, turns: Sequence[Did], habit: Habit, *, loops: bool
    ) -> None:
        self.api = api
        self.task = task
        self.turns = list(turns)
        self.habit = habit
        self.loops = loops
        self.asides: list[Callable[[Run, int], bytes]] = []
        self.refusals = 0

    def show_all(self, count: int) -> bytes:
        return _dump(self._write(self.turns[:count]))

    def write(self, count: int, random: Random) -> bytes:
        return _dump(self.write_document(count, random))

    def write_document(self, count: int, random: Random) -> dict[str, Any]:
        habit, turns = self.habit, self.turns[:count]
        if habit.kept:
            turns = [
                turn
                if place >= count - habit.kept
                else turn._replace(results=habit.shorten(turn.results))
                for place, turn in enumerate(turns)
            ]
        if habit.renews:
            first = 3 * random.randrange(10**6)
            turns = [turn._replace(number=first + place) for place, turn in enumerate(turns, 1)]
        if habit.turns and count > habit.first + habit.turns:
            turns = turns[: habit.first] + turns[-habit.turns :]
        document = self._write(turns)
        if habit.cuts:
            _cut_thoughts(document)
        if (habit.messages or not habit.opening) and "scratchpad" not in self.api:
            key = next(key for key in MESSAGES if key in document)
            shown = document[key]
            opening = 0
            while opening < len(shown) and not _is_assistants(shown[opening]):
                opening += 1
            newest = shown[opening:]
            newest = newest[-habit.messages :] if habit.messages else newest
            left_out = count > habit.turns if habit.turns else len(newest) < len(shown) - opening
            document[key] = (shown[:opening] if habit.opening or not left_out else []) + newest
        return document

    def _write(self, turns: Sequence[Did]) -> dict[str, Any]:
        document = _WRITERS[self.api](turns)
        _name_task(document, self.task)
        return document

    def send_all(self, random: Random) -> Iterator[Sent]:
        for count in range(len(self.turns) + 1):
            if self.refusals >= PATIENCE:
                return
            for aside in self.asides if count % 5 == 4 else ():
                yield Sent(self, count, aside(self, count), aside=True)
            data = self.write(count, random)
            for _ in range(1 + random.randint(0, self.habit.retries)):
                yield Sent(self, count, data)


def ask_title(run: Run, count: int) -> bytes:
    return (
        _dump(_WRITERS[run.api]([]) | {"temperature": count})
        if count < 2
        else ask_router(run, count)
    )


def ask_router(run: Run, count: int) -> bytes:
    document = _WRITERS[run.api]([])
    _name_task(document, f"Which model is to do step {count} of {run.task!r}?")
    return _dump(document)


def ask_summary(run: Run, count: int) -> bytes:
    document = run.write_document(count, Random(count))
    key = next(key for key in MESSAGES if key in document)
    said: dict[str, Any] = {"role": "user", "content": f"Sum up {count} turns."}
    if key == "contents":
        said = {"role": "user", "parts": [{"text": f"Sum up {count} turns."}]}
    elif "inferenceConfig" in document:
        said["content"] = [{"text": said["content"]}]
    document[key] = [*document[key], said]
    return _dump(document)


def _dump(document: dict[str, Any]) -> bytes:
    return msgspec.json.encode(document)


def _name_task(document: dict[str, Any], task: str) -> None:
    key = next(key for key in MESSAGES if key in document)
    first = next(message for message in document[key] if message.get("role") == "user")
    first.update(
        msgspec.json.decode(
            _dump(first).decode().replace("Fix it.", task).replace("Find it.", task)
        )
    )


def _is_assistants(message: dict[str, Any]) -> bool:
    return message.get("role") in ASSISTANTS or message.get("type") in {
        "reasoning",
        "function_call",
    }


def _cut_thoughts(document: dict[str, Any]) -> None:
    key = next(key for key in MESSAGES if key in document)
    own = [message for message in document[key] if _is_assistants(message)]
    newest = own[-1] if own else None
    if key == "input":
        thoughts = [message for message in own if message.get("type") == "reasoning"]
        document[key] = [message for message in document[key] if message not in thoughts[:-1]]
    for message in own:
        if message is newest:
            continue
        message.pop("thinking", None)
        message.pop("reasoning_content", None)
        for parts in ("content", "parts"):
            if isinstance(message.get(parts), list):
                message[parts] = [part for part in message[parts] if not _is_thought(part)]


def _is_thought(part: dict[str, Any]) -> bool:
    return (
        part.get("type") == "thinking" or "reasoningContent" in part or part.get("thought") is True
    )


# What agents do.


def word(turns: Sequence[Did], random: Random) -> list[Did]:
    return [turn._replace(thought=f"thought {random.randrange(10**9)}") for turn in turns]


def work(random: Random, count: int) -> list[Did]:
    return [
        Did(
            ((random.choice(["read", "edit", "run"]), {"n": random.randrange(10**6)}),),
            (f"result {random.randrange(10**6)} of the work",),
        )
        for _ in range(count)
    ]


def get_stuck(random: Random, length: int) -> list[Did]:
    name = f"part {random.randrange(10**6)}"
    cycle = [
        Did((("check", {name: part}),), (f"Error: {name}.{part} is broken. " + "It is. " * 30,))
        for part in range(length)
    ]
    return cycle * 8


def fail_alike(random: Random) -> list[Did]:
    name = f"host {random.randrange(10**6)}"
    return [
        Did(
            (("try", {"n": random.randrange(10**6)}),),
            (f"Error: no access to {name}. " + "None. " * 40,),
        )
        for _ in range(10)
    ]


def poll(random: Random) -> list[Did]:
    name = random.randrange(10**6)
    return [
        Did((("status", {"job": name}),), (f"{random.randrange(10**6)} items are left",))
        for _ in range(8)
    ]


def repair(random: Random) -> list[Did]:
    name = random.randrange(10**6)
    test = Did((("test", {"part": name}),), (f"part {name} fails its tests",))
    return [turn for change in work(random, 4) for turn in (change, test)]


INNOCENT: list[Callable[[Random], list[Did]]] = [
    lambda random: work(random, 8),
    poll,
    repair,
    lambda random: [turn for turn in work(random, 4) for _ in range(2)],
]
LOOPING: list[Callable[[Random], list[Did]]] = [
    lambda random: get_stuck(random, 1),
    lambda random: get_stuck(random, 2),
    lambda random: get_stuck(random, 3),
    fail_alike,
]


def make_runs(api: str, habit: Habit, random: Random, each: int = 1) -> list[Run]:
    runs = []
    for number in range(each):
        for loops, plans in ((True, LOOPING), (False, INNOCENT)):
            for plan in plans:
                turns = word([*work(random, random.randint(2, 6)), *plan(random)], random)
                runs.append(
                    Run(
                        api,
                        f"Do {random.choice(['this', 'that', str(number)])}.",
                        turns,
                        habit,
                        loops=loops,
                    )
                )
    return runs


def make_best_of(count: int, api: str, habit: Habit, random: Random) -> list[Run]:
    """Runs of one task that begin alike, byte for byte. The first one ends in a loop."""
    same = word(work(random, random.randint(1, 5)), random)
    plans = [random.choice(LOOPING), *[random.choice(INNOCENT) for _ in range(count - 1)]]
    return [
        Run(
            api,
            "Do the same.",
            [*same, *word([*work(random, 2), *plan(random)], random)],
            habit,
            loops=number == 0,
        )
        for number, plan in enumerate(plans)
    ]


def make_few(count: int, api: str, habit: Habit, random: Random) -> list[Run]:
    """Runs of one task with two possible actions, without text, and two possible results."""
    runs = []
    for _ in range(count):
        turns = [
            Did(
                ((random.choice("ab"), {}),), (random.choice(("Error: x", f"Error: {'y ' * 120}")),)
            )
            for _ in range(random.randint(3, 12))
        ]
        run = Run(api, "Do the same.", turns, habit, loops=False)
        run.loops = any(shows_loop(run.show_all(at)) for at in range(1, len(turns) + 1))
        runs.append(run)
    return runs


def make_twins(count: int, api: str, habit: Habit, random: Random) -> list[Run]:
    """Runs whose agents say the same.

    The first gets the same results over and over, the others get new ones.
    """
    begun = word(work(random, 3), random)
    asked = [
        Did((("status", {"job": 7}),), (), thought=f"thought {random.randrange(10**9)}")
        for _ in range(8)
    ]
    runs = []
    for number in range(count):
        results = [
            f"Error: the job is dead. {'It is. ' * 30}"
            if number == 0
            else f"{random.randrange(10**6)} are left"
            for _ in asked
        ]
        turns = [
            turn._replace(results=(result,)) for turn, result in zip(asked, results, strict=True)
        ]
        runs.append(Run(api, "Do the same.", [*begun, *turns], habit, loops=number == 0))
    return runs


def interleave(runs: Sequence[Run], how: str, random: Random) -> Iterator[Sent]:
    left = [run.send_all(random) for run in runs]
    number = 0
    while left:
        place = (
            0
            if how == "sequential"
            else number % len(left)
            if how == "lockstep"
            else random.randrange(len(left))
        )
        sent = next(left[place], None)
        if sent is None:
            del left[place]
        else:
            number += 1
            yield sent


class Verdicts:
    """Refusals in some runs.

    Attributes:
        refused: refused runs, with the number of turns at the first refusal.
        wrong: refused requests whose history shows no loop.
    """

    def __init__(self) -> None:
        self.refused: dict[Run, int] = {}
        self.wrong: list[Sent] = []

    def take(self, sent: Sent, *, refused: bool) -> None:
        if not refused:
            return
        sent.run.refusals += 1
        self.refused.setdefault(sent.run, sent.done)
        if sent.aside or not shows_loop(sent.run.show_all(sent.done)):
            self.wrong.append(sent)


def shows_loop(data: bytes) -> bool:
    """The truth: whether the newest turn of a complete history is in a loop to refuse."""
    found = ORACLE.compare(Document(data))[1]
    return found is not None and found.looping and not found.notes_only


# Of `headers`
async def judge(service: Service, data: bytes, **named: Any) -> bool:  # noqa: ANN401
    stream = Stream(service)
    try:
        stream.receive(headers(**{"x_user_id": "ann", **named}).SerializeToString())
        reply = stream.receive(body(data).SerializeToString())
        if not isinstance(reply, Reply):
            reply = await reply
    finally:
        stream.close()
    return decoded(reply).HasField("immediate_response")
