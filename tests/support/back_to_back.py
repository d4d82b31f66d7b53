"""Requests that follow each other, or not: what they count, by definition; and families of them."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from operator import attrgetter
from random import Random
from typing import Any, NamedTuple

from extproc.store.rules.back_to_back import LEFT_OUT, Begin, End
from extproc.store.rules.windows import Count

Ask = Callable[[Begin | End, int], Any]
"""Asks a store, or the rule, at a time in milliseconds."""

WINDOW_MS = 2_000


class Sent(NamedTuple):
    """A request; times in milliseconds.

    Attributes:
        start: when it begins.
        lasts: how long its answer takes; LEFT_OUT if it fails, REFUSED if it is refused.
        late: how long after its end its entry arrives; for each time that it does.
    """

    start: int
    lasts: int
    late: tuple[int, ...] = (0,)

    @property
    def end(self) -> int:
        return self.start + max(0, self.lasts)


def make_begin(number: int = 1, **changes: Any) -> Begin:  # noqa: ANN401  # Begin's own fields
    made = Begin("key:00", number.to_bytes(8), WINDOW_MS, 3, 0)
    return made._replace(**changes)


def make_end(number: int, lasted_ms: int, key: str = "key:00") -> End:
    return End(key, number.to_bytes(8), lasted_ms, WINDOW_MS)


_read_start = attrgetter("start")


def count_by_definition(requests: Sequence[Sent]) -> list[int]:
    """The count of each request once the ends of all are known; 0 if it failed or was refused."""
    counts, run = [], 0
    earlier: list[Sent] = []
    for sent in sorted(requests, key=_read_start):
        if sent.lasts == LEFT_OUT:
            counts.append(0)
            continue
        broken = False
        for other in earlier:
            took = max(0, other.lasts)
            broken |= sent.start < other.end - min(500, max(100, took // 2))
        if earlier:
            broken |= sent.start > max(other.end for other in earlier) + WINDOW_MS
        run = (0 if broken else run) + (sent.lasts >= 0)
        counts.append(run if sent.lasts >= 0 else 0)
        earlier.append(sent)
    return counts


def play(requests: Sequence[Sent], ask: Ask, **shape: Any) -> list[Count]:  # noqa: ANN401  # Begin's
    """Let requests begin and end, with their entries when these arrive; what each is answered."""
    moments: list[tuple[int, int, int, Begin | End]] = []
    answers: list[Count] = []
    for number, sent in enumerate(sorted(requests, key=_read_start), 1):
        heapq.heappush(moments, (sent.start, 1, number, make_begin(number, **shape)))
        ended = make_end(number, sent.lasts, make_begin(**shape).key)
        for late in sent.late:
            heapq.heappush(moments, (sent.end + late, 2, number, ended))
    while moments:
        now, kind, _, asked = heapq.heappop(moments)
        found = ask(asked, now)
        if kind == 1:
            answers.append(found)
    return answers


# Families


def follow(durations: Sequence[int], pause: int, late: int) -> list[Sent]:
    """One after another."""
    starts = accumulate([took + pause for took in durations], initial=1_000)
    return [Sent(start, took, (late,)) for start, took in zip(starts, durations, strict=False)]


def share(durations: Sequence[int], workers: int, late: int) -> list[Sent]:
    """Several workers; each takes the next as soon as it is free."""
    free, sent = [1_000] * workers, []
    for took in durations:
        start = heapq.heappop(free)
        sent.append(Sent(start, took, (late,)))
        heapq.heappush(free, start + took + 5)
    return sent


def _vary(random: Random, number: int, least: int, most: int) -> list[int]:
    return [random.randint(least, most) for _ in range(number)]


LATES = (0, 1_000, 3_000)


def loops() -> Iterator[tuple[str, list[Sent]]]:
    """Programs that send one prompt again as soon as they have the answer."""
    for late in LATES:
        for took in (150, 2_000, 20_000, 62_000, 300_000):
            for pause in (0, 20, 900, 1_900):
                yield f"{took} ms, pause {pause}, late {late}", follow([took] * 60, pause, late)


def pauses() -> dict[str, list[list[Sent]]]:
    """Honest requests with pauses, or side by side."""
    random = Random(7)
    monitors = [
        follow(_vary(random, 60, 300, 1_800), every, late)
        for every in (2_500, 5_000, 20_000, 45_000, 60_000)
        for late in LATES
        for _ in range(3)
    ]
    people = []
    for gap in (20_000, 40_000, 90_000):  # the mean
        for _ in range(12):
            starts = accumulate(int(random.expovariate(1 / gap)) for _ in range(60))
            people.append([Sent(start, random.randint(500, 4_000), (1_000,)) for start in starts])
    at_once = [
        [Sent(1_000 + number, took, (late,)) for number, took in enumerate(durations)]
        for late in LATES
        for size in (5, 16, 20, 100)
        for durations in [_vary(random, size, 700, 60_000) for _ in range(3)]
    ]
    pools = [
        share(_vary(random, 64, least, most), workers, late)
        for late in LATES
        for workers in (2, 4, 16)
        for least, most in ((700, 3_000), (2_000, 20_000), (5_000, 62_000))
        for _ in range(2)
    ]
    rounds = [  # each beginning when the one before is complete
        [
            Sent(begins + number, took, (late,))
            for begins, durations in zip((1_000, 70_000, 140_000), several, strict=True)
            for number, took in enumerate(durations)
        ]
        for late in LATES
        for size in (2, 4, 8, 16)
        for several in [[_vary(random, size, 2_000, 68_500) for _ in range(3)] for _ in range(3)]
    ]
    return {
        "monitors, cron jobs": monitors,
        "people who say “hi” under one key": people,
        "samples side by side": at_once,
        "a pool of workers": pools,
        "rounds of samples": rounds,
    }


def sequences() -> dict[str, list[list[Sent]]]:
    """Honest requests of one worker, which look the same as a loop."""
    random = Random(8)

    def vary(size: int, least: int, most: int) -> list[list[Sent]]:
        return [
            follow(_vary(random, size, least, most), pause, late)
            for pause in (0, 10, 300)
            for late in LATES
            for _ in range(4)
        ]

    return {
        "pass@20": vary(20, 1_000, 30_000),
        "a serial batch of 100": vary(100, 500, 5_000),
        "a load test of 200 requests, one worker": vary(200, 150, 1_500),
    }
