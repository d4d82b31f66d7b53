"""Windows by brute force."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from extproc.store.rules.ring import Push
from extproc.store.rules.windows import Count, Hit
from tests.support.records import replace

WINDOW_TYPES = ("sliding_ttl", "sliding_log", "fixed")


# Hit's own fields
def make_hit(window_type: str = "sliding_ttl", **changes: Any) -> Hit:  # noqa: ANN401
    return replace(
        Hit("key", window_type, 10_000, 3, 0, count_refused=True, count_to=100), **changes
    )


def oracle(hit: Hit, times: list[int]) -> list[Count]:
    """Keep every counted request and look at all of them each time."""
    return oracle_of([(hit, now) for now in times])


def oracle_of(steps: Sequence[tuple[Hit, int]]) -> list[Count]:
    """The same for hits of one key with different thresholds."""
    counted: list[int] = []
    tripped = -(10**12)
    answers = []
    for hit, now in steps:
        ahead = counted[-1] - now if counted else 0  # by so much, at least, was the clock set back
        if ahead > 0:
            counted = [time - ahead for time in counted] if ahead < hit.window_ms else []
        if tripped > now:
            tripped = now if tripped - now < hit.cooldown_ms else -(10**12)
        cooling_until = tripped + hit.cooldown_ms
        window: list[int] = []
        if hit.window_type == "sliding_log":
            # What has left does not come back
            counted = [time for time in counted if now - time < hit.window_ms]
            window = counted[:]
        else:
            # Runs: each request joins the window of the one before, or starts another
            for time in counted:
                anchor = (
                    window[0]
                    if window and hit.window_type == "fixed"
                    else window[-1]
                    if window
                    else time
                )
                window = [*window, time] if time - anchor < hit.window_ms else [time]
            if (
                window
                and now - (window[0] if hit.window_type == "fixed" else window[-1]) >= hit.window_ms
            ):
                window = []
        count = len(window) + 1
        cooling = now < cooling_until
        looping = cooling or count >= hit.threshold
        if not cooling and len(window) < hit.threshold <= count:
            tripped, cooling_until = now, now + hit.cooldown_ms
        answers.append(
            Count(count, looping, max(0, cooling_until - now), now - window[0] if window else 0)
        )
        if hit.count_refused or not looping:
            counted.append(now)
    return answers


# Whether each request is a loop, and the milliseconds since the one before.
COOLDOWN_STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 60)), min_size=1, max_size=30)


def cooldown_hits(
    steps: Sequence[tuple[bool, int]], cooldown_ms: int = 50
) -> list[tuple[Hit, int]]:
    """Hits that have a cooldown and no count, as `tool_calls` sends them."""
    hit = Hit("key", "fixed", 0, 1, cooldown_ms, False, 1)
    loop = {True: hit, False: replace(hit, threshold=10**9, count_to=10**9)}
    return [
        (loop[looping], 1_000 + sum(gap for _, gap in steps[: place + 1]))
        for place, (looping, _) in enumerate(steps)
    ]


# A hit, its times, and count, looping, cooldown and span each time; `set back` is about the clock.
COUNTS: dict[str, tuple[Hit, list[int], list[tuple[int, bool, int, int]]]] = {
    (
        "set back by less than the window: simultaneous with the last request, then on by the new "
        "clock"
    ): (
        make_hit(threshold=4),
        [50_000, 51_000, 46_000, 47_000],
        [(1, False, 0, 0), (2, False, 0, 1_000), (3, False, 0, 1_000), (4, True, 0, 2_000)],
    ),
    "set back by the window: what was counted is forgotten, so a rare request is no loop": (
        make_hit(),
        [50_000, 51_000, 41_000, 42_000],
        [(1, False, 0, 0), (2, False, 0, 1_000), (1, False, 0, 0), (2, False, 0, 1_000)],
    ),
    "set back in a cooldown, by less: it goes on, no longer than from its start": (
        make_hit(window_ms=3_000, cooldown_ms=20_000),
        [50_000, 50_000, 50_000, 60_000, 45_000, 64_999, 65_000],
        [
            *[(1, False, 0, 0), (2, False, 0, 0), (3, True, 20_000, 0), (1, True, 10_000, 0)],
            *[(1, True, 20_000, 0), (1, True, 1, 0), (2, False, 0, 1)],
        ],
    ),
    "set back in a cooldown, by more: it is over": (
        make_hit(window_ms=3_000, cooldown_ms=20_000),
        [50_000, 50_000, 50_000, 30_000],
        [(1, False, 0, 0), (2, False, 0, 0), (3, True, 20_000, 0), (1, False, 0, 0)],
    ),
    "set back where refusals are not counted: the window ends by the new clock": (
        make_hit(count_refused=False),
        [50_000, 51_000, 52_000, 46_000, 55_999, 56_000],
        [
            *[(1, False, 0, 0), (2, False, 0, 1_000), (3, True, 0, 2_000), (3, True, 0, 1_000)],
            *[(3, True, 0, 10_999), (1, False, 0, 0)],
        ],
    ),
    **{
        f"{kind}: the third request is the first acted on": (
            make_hit(kind),
            [0, 1, 2, 3],
            [(1, False, 0, 0), (2, False, 0, 1), (3, True, 0, 2), (4, True, 0, 3)],
        )
        for kind in WINDOW_TYPES
    },
    **{
        f"{kind}: refusals that are not counted": (
            make_hit(kind, count_refused=False),
            [0, 1, 5_000, 9_000, 10_001],
            [
                (1, False, 0, 0),
                (2, False, 0, 1),
                (3, True, 0, 5_000),
                (3, True, 0, 9_000),
                (1, False, 0, 0),
            ],
        )
        for kind in WINDOW_TYPES
    },
    **{
        f"{kind}: a cooldown outlasts its window": (
            make_hit(kind, cooldown_ms=60_000),
            [0, 1, 2, 30_000, 60_001, 60_002],
            [
                *[(1, False, 0, 0), (2, False, 0, 1), (3, True, 60_000, 2)],
                *[(1, True, 30_002, 0), (1, True, 1, 0), (2, False, 0, 1)],
            ],
        )
        for kind in WINDOW_TYPES
    },
}


# Push's own fields
def make_push(entry: str, request: str = "", **changes: Any) -> Push:  # noqa: ANN401
    """A push of an entry to a ring of 3 kept for 10 s, by a new request unless one is named."""
    made = Push("ring", entry.encode(), (request or entry).rjust(8).encode(), 3, 10_000)
    return made._replace(**changes)


# Pushes to one ring, their times, and the entries that each finds, separated by spaces.
PUSHES: dict[str, list[tuple[int, Push, str]]] = {
    "entries stand in their order": [
        (0, make_push("a"), "a"),
        (1, make_push("b"), "a b"),
        (2, make_push("c"), "a b c"),
    ],
    "equal entries of several requests all stand": [
        (0, make_push("a", "1"), "a"),
        (1, make_push("a", "2"), "a a"),
    ],
    "the newest are kept": [
        *[
            (0, make_push("a"), "a"),
            (1, make_push("b"), "a b"),
            (2, make_push("c"), "a b c"),
            (3, make_push("d"), "b c d"),
        ],
        *[(4, make_push("e"), "c d e")],
    ],
    "a request that is sent again pushes nothing": [
        *[
            (0, make_push("a"), "a"),
            (1, make_push("b"), "a b"),
            (2, make_push("a"), "a b"),
            (3, make_push("b"), "a b"),
        ],
        *[(4, make_push("other", "a"), "a b"), (5, make_push("c"), "a b c")],
    ],
    "a request that is remembered no more pushes again": [
        *[
            (0, make_push("a"), "a"),
            (1, make_push("b"), "a b"),
            (2, make_push("c"), "a b c"),
            (3, make_push("d"), "b c d"),
        ],
        *[(4, make_push("a"), "c d a")],
    ],
    "a ring is forgotten some time after its last push": [
        *[
            (0, make_push("a"), "a"),
            (9_999, make_push("b"), "a b"),
            (19_998, make_push("c"), "a b c"),
        ],
        *[(29_998, make_push("d"), "d"), (29_999, make_push("a"), "d a")],
    ],
    "a retry keeps a ring alive": [
        *[(0, make_push("a"), "a"), (6_000, make_push("a"), "a"), (12_000, make_push("b"), "a b")],
    ],
    "a clock that is set back a little forgets nothing": [
        *[
            (50_000, make_push("a"), "a"),
            (40_001, make_push("b"), "a b"),
            (50_000, make_push("c"), "a b c"),
        ],
    ],
    "a clock that is set back far forgets": [
        (50_000, make_push("a"), "a"),
        (40_000, make_push("b"), "b"),
    ],
    "a ring that is made smaller keeps the newest, and remembers no others": [
        *[(0, make_push("a"), "a"), (1, make_push("b"), "a b"), (2, make_push("c"), "a b c")],
        *[
            (3, make_push("c", size=2), "b c"),
            (4, make_push("a", size=2), "c a"),
            (5, make_push("d", size=3), "c a d"),
        ],
    ],
    "a ring of one": [
        (0, make_push("a", size=1), "a"),
        (1, make_push("a", size=1), "a"),
        (2, make_push("b", size=1), "b"),
    ],
    "entries may be empty, long and of any bytes": [
        (0, make_push("", "1"), ""),
        (1, make_push("\0" * 64, "2"), " " + "\0" * 64),
        (
            2,
            make_push("\r\n*3")._replace(request=bytes(range(248, 256))),
            " " + "\0" * 64 + " \r\n*3",
        ),
        (3, make_push("x")._replace(request=bytes(range(248, 256))), " " + "\0" * 64 + " \r\n*3"),
    ],
}


_REQUESTS = st.integers(0, 6).map(lambda number: bytes([number] * 8))


# Pushes to one ring, each with the time since the one before.
PUSH_STEPS = st.tuples(st.integers(1, 4), st.integers(5, 50)).flatmap(
    lambda ring: st.lists(
        st.tuples(
            st.builds(
                Push,
                st.just("ring"),
                st.binary(max_size=64),
                _REQUESTS,
                st.just(ring[0]),
                st.just(ring[1]),
            ),
            st.integers(0, 20) | st.integers(-60, 60),
        ),
        max_size=30,
    )
)


def rings_of(steps: Sequence[tuple[Push, int]]) -> list[list[bytes]]:
    answers: list[list[bytes]] = []
    kept: list[tuple[bytes, bytes]] = []
    before: int | None = None
    for pushed, now in steps:
        if before is not None and abs(now - before) >= pushed.ttl_ms:
            kept = []
        if pushed.request not in [request for request, _ in kept]:
            kept = [*kept, (pushed.request, pushed.entry)][-pushed.size :]
        before = now
        answers.append([entry for _, entry in kept])
    return answers


def place_pushes(steps: Sequence[tuple[Push, int]]) -> list[tuple[Push, int]]:
    return [
        (pushed, 100_000 + sum(gap for _, gap in steps[: place + 1]))
        for place, (pushed, _) in enumerate(steps)
    ]
