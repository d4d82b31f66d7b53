"""The guard's own work for one request, in whole streams without a transport."""

import gc
from collections.abc import Iterable, Sequence
from statistics import median
from time import time
from typing import Any

import msgspec

from extproc.engine.orders import BLOCK, ActiveOverride, Overrides, Target, hash_descriptor
from extproc.ext_proc.stream import Stream
from extproc.pb.external_processor_pb2 import ProcessingRequest
from tests.bench import samples
from tests.bench.report import Row, progress
from tests.bench.timing import at_one_clock, cpu_us, difference, interleaved, ratio

TITLE = (
    "engine: the guard's own work per request (POST 1 KB, 16 headers, one policy, counts in memory)"
)

_DECODE = msgspec.json.Decoder().decode

_LIMIT_US = 15
_OVERRIDES_LIMIT_US = 3
_SESSION_LIMIT_US = 6
_RULE_LIMIT = 1.25
_GROWING_LIMIT = 1.6
_GROWING_LIMITS_LIMIT = 1.15
_SESSION_STEPS = 20
_AGENTS, _CALLS = 12, range(32, 64)

_POLICIES: dict[str, list[dict[str, Any]]] = {
    "plain": [samples.policy()],
    "canary": [samples.policy(), samples.canary(threshold_identical_requests=4)],
    "rule": [samples.rule()],
    "limits": [samples.budget()],
    "turns": [samples.talk()],
    "turns, limits": [samples.budget(similarity="turns")],
}

_GROWING: dict[str, list[dict[str, Any]]] = {
    "turns": [samples.policy(similarity="turns")],
    "turns, limits": [samples.budget(similarity="turns")],
}

_Pairs = Sequence[tuple[bytes, bytes]]


def _make_pairs(count: int, users: int) -> _Pairs:
    return [
        (
            samples.headers_message(user=f"user-{number % users}"),
            samples.body_message(samples.chat_body(number)),
        )
        for number in range(count)
    ]


def _measure(
    policies: list[dict[str, Any]], pairs: _Pairs, overrides: Overrides | None = None
) -> float:
    """Microseconds for a stream, from its first byte to its last. Every round has a new store."""
    serving = samples.service(samples.engine(policies))
    serving.overrides = overrides

    def work() -> None:
        for headers, body in pairs:
            stream = Stream(serving)
            stream.receive(headers)
            stream.receive(body)
            stream.close()

    spent = at_one_clock(lambda: cpu_us(work, len(pairs)))
    labels = {"policy": "policy-00000", "mode": "enforce", "action": "allow"}
    if serving.metrics.registry.get_sample_value("loopguard_requests_total", labels) != len(pairs):
        raise RuntimeError("not every request was counted and let through")
    return spent


def _measure_parsing(pairs: _Pairs) -> float:
    def work() -> None:
        for headers, body in pairs:
            ProcessingRequest.FromString(headers)
            ProcessingRequest.FromString(body)

    return at_one_clock(lambda: cpu_us(work, len(pairs)))


def _grow(numbers: Iterable[int]) -> tuple[_Pairs, list[bytes]]:
    """Requests of agents that take turns, for each number of calls made, and their bodies."""
    bodies = [
        (user, samples.agent_body(user, calls)) for calls in numbers for user in range(_AGENTS)
    ]
    pairs = [
        (samples.headers_message(user=f"user-{user}", length=len(body)), samples.body_message(body))
        for user, body in bodies
    ]
    return pairs, [body for _, body in bodies]


def _measure_decoding(bodies: Sequence[bytes]) -> float:
    def work() -> None:
        for body in bodies:
            _DECODE(body)

    return at_one_clock(lambda: cpu_us(work, len(bodies)))


def _run_growing(rounds: int) -> list[Row]:
    pairs, bodies = _grow(_CALLS)
    works = {
        "decode": lambda: _measure_decoding(bodies),
        **{
            name: lambda policies=policies: _measure(policies, pairs)  # type: ignore[misc]  # a lambda's defaults
            for name, policies in _GROWING.items()
        },
    }
    found = interleaved(rounds, works)
    sizes = f"{len(bodies[0]) / 1000:.0f} to {len(bodies[-1]) / 1000:.0f} KB"
    spent = f"{median(found['turns']):.0f} us vs. {median(found['decode']):.0f} us"
    return [
        Row(
            f"agents that grow from {sizes}, turns vs. decoding",
            ratio(found, "turns", "decode"),
            "x",
            _GROWING_LIMIT,
            spent,
        ),
        Row(
            "the same with session limits vs. turns",
            ratio(found, "turns, limits", "turns"),
            "x",
            _GROWING_LIMITS_LIMIT,
        ),
    ]


def _make_overrides() -> Overrides:
    """A thousand orders of four kinds, none of which matches a measured request."""
    targets = [
        *(
            Target(descriptors=(("x-user-id", hash_descriptor("x-user-id", f"other-{number}")),))
            for number in range(250)
        ),
        *(Target(caller=f"{number:016x}") for number in range(250)),
        *(Target(fingerprint=f"{number:08x}") for number in range(250)),
        *(Target(caller=f"{number:016x}", fingerprint=f"{number:08x}") for number in range(250)),
    ]
    ends = time() + 3_600
    return Overrides(
        [
            ActiveOverride(str(number), BLOCK, target, "", 0, ends, "", "")
            for number, target in enumerate(targets)
        ]
    )


def run(*, quick: bool) -> list[Row]:
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)  # as the server does once it listens
    count, rounds = (500, 7) if quick else (2_000, 25)
    pairs, sessions = _make_pairs(count, 1_000), _make_pairs(count, count // _SESSION_STEPS)
    overrides = _make_overrides()
    works = {
        "parsing": lambda: _measure_parsing(pairs),
        "whole": lambda: _measure([samples.policy()], pairs),
        "overrides": lambda: _measure([samples.policy()], pairs, overrides),
        **{
            name: lambda policies=policies: _measure(policies, sessions)  # type: ignore[misc]  # a lambda's defaults
            for name, policies in _POLICIES.items()
        },
    }
    progress("engine: whole streams", 1, 1)
    found = interleaved(rounds, works)
    overridden, on_turns, on_exact = (
        difference(found, *names)
        for names in (("overrides", "whole"), ("turns, limits", "turns"), ("limits", "plain"))
    )
    limits = f"of steps, tool calls, one tool and money, in sessions of {_SESSION_STEPS} steps"
    return [
        Row(
            "own work per request",
            difference(found, "whole", "parsing"),
            "us",
            _LIMIT_US,
            "all but parsing",
        ),
        Row(
            "parsing both messages",
            median(found["parsing"]),
            "us",
            note="every server must do this",
        ),
        Row("1,000 overrides: extra cost", overridden, "us", _OVERRIDES_LIMIT_US, "of four shapes"),
        Row("session limits in addition to turns", on_turns, "us", _SESSION_LIMIT_US, limits),
        Row(
            "session limits in addition to exact",
            on_exact,
            "us",
            _SESSION_LIMIT_US,
            "which does not inspect the body",
        ),
        Row(
            "a rule and the detector vs. the detector",
            ratio(found, "rule", "plain"),
            "x",
            _RULE_LIMIT,
        ),
        Row("a canary and its policy vs. the policy", ratio(found, "canary", "plain"), "x"),
        *_run_growing(rounds),
    ]
