"""Inspecting a body, compared with the lower bound: decoding it with msgspec."""

import json
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import msgspec

from extproc.detectors import make_similarity
from extproc.ext_proc.budget import InspectionBudget
from extproc.ext_proc.stream import Stream
from extproc.policy.bundle import LoopDetection
from extproc.request.document import Document
from extproc.server import freeze_objects
from tests.bench import samples
from tests.bench.report import Row, progress
from tests.bench.timing import cpu_us, interleaved, ratio

TITLE = "similarity: inspecting an agent's request, vs. msgspec decoding the same bytes"

_LIMITS = {"canonical": 8, "tail": 1.5, "tool_calls": 1.5, "turns": 1.2}
_SIZES = (1_000, 10_000, 70_000, 500_000)
_PROSE = (
    "The pool was closed before the last request came back, so the test saw an error in "
    "place of the answer. "
)
_SETTINGS = {
    "temperature": 0.2,
    "top_p": 0.95,
    "max_completion_tokens": 4096,
    "stream": True,
    "stream_options": {"include_usage": True},
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "user": "user-1",
    "metadata": {"session_id": "0a1b2c3d", "agent": "fixer", "step": "7"},
}


def _tool(number: int) -> dict[str, Any]:
    properties = {
        "path": {"type": "string", "description": "relative path"},
        "limit": {"type": "integer"},
    }
    parameters = {"type": "object", "properties": properties, "required": ["path"]}
    return {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": "Reads a file of the work tree.",
            "parameters": parameters,
        },
    }


def _turn(number: int, result: str) -> list[dict[str, Any]]:
    call = f"call_{number:08d}"
    function = {
        "name": "tool_0",
        "arguments": json.dumps({"path": f"src/file{number}.py", "limit": 200}),
    }
    return [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call, "content": f"{number}: {result}"},
    ]


def request(size: int, result: str = _PROSE * 12) -> bytes:
    """A chat completion request of an agent.

    The smallest is its first: prompts, two tools, no history. The others have a longer prompt,
        eight tools, and about `size`
    bytes of turns.
    """
    small = size < 2_000  # bytes
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a helpful coding agent. " * (1 if small else 50)},
        {"role": "user", "content": "Please fix the failing test in tests/test_store.py."},
    ]
    body = {
        "model": "gpt-4o",
        **_SETTINGS,
        "tools": [_tool(number) for number in range(2 if small else 8)],
        "messages": messages,
    }
    while not small and len(json.dumps(body)) < size:
        messages += _turn(len(messages), result)
    return json.dumps(body).encode()


def run(*, quick: bool) -> list[Row]:
    rows = []
    for number, size in enumerate(_SIZES, 1):
        progress(f"similarity: {size // 1000} KB", number, len(_SIZES))
        rows += _measure(request(size), f"{size // 1000} KB", quick=quick)
    return [*rows, *_measure_steering(quick=quick)]


def _stuck(size: int) -> bytes:
    body = json.loads(request(size))
    body["messages"] += _turn(0, _PROSE * 12) * 3
    return json.dumps(body).encode()


def _measure_steering(*, quick: bool) -> list[Row]:
    """The cost of edits, and the cost for requests that get none, in whole streams."""
    freeze_objects()  # as in a server
    size, times = 70_000, 20 if quick else 100
    stuck, at_work = [samples.body_message(body) for body in (_stuck(size), request(size))]
    works = {
        f"{kind} {action}": _Streams(_looking(action), body, times).run
        for kind, body in {"stuck": stuck, "at work": at_work}.items()
        for action in ("warn", "steer")
    }
    found = interleaved(9 if quick else 25, works)
    return [
        Row(
            f"70 KB, {name}",
            ratio(found, more, less),
            "x",
            limit,
            f"{median(found[more]):.0f} us vs. {median(found[less]):.0f} us",
        )
        for name, more, less, limit in (
            ("a steered request vs. a warned one", "stuck steer", "stuck warn", 1.3),
            (
                "a request that is not, under the same policies",
                "at work steer",
                "at work warn",
                1.1,
            ),
        )
    ]


def _looking(action: str) -> dict[str, Any]:
    return samples.policy(similarity="turns", action=action, threshold_identical_requests=3)


class _Streams:
    def __init__(self, policy: dict[str, Any], body: bytes, times: int) -> None:
        self._serving = samples.service(samples.engine([policy]))
        self._messages = samples.headers_message(), body
        self._times = times

    def run(self) -> float:
        # Its share of the time is not what is measured
        self._serving.budget = InspectionBudget(perf_counter())
        return cpu_us(self._send, self._times)

    def _send(self) -> None:
        for _ in range(self._times):
            stream = Stream(self._serving)
            for message in self._messages:
                stream.receive(message)
            stream.close()


def _measure(body: bytes, name: str, *, quick: bool) -> list[Row]:
    data = memoryview(body)  # as the service has it
    works: dict[str, Callable[[], object]] = {"decode": lambda: plain(data)}
    plain = msgspec.json.Decoder().decode
    looks = {similarity: make_similarity(_loop(similarity)) for similarity in _LIMITS}
    for similarity, look in looks.items():
        compare = look.compare
        # A lambda's defaults
        works[similarity] = lambda compare=compare: compare(Document(data))  # type: ignore[misc]

    times = max(5, (20_000 if quick else 100_000) // len(body) * 5)
    found = interleaved(
        9 if quick else 25,
        {
            key: lambda work=work: cpu_us(lambda: [work() for _ in range(times)], times)  # type: ignore[misc]  # a lambda's defaults
            for key, work in works.items()
        },
    )
    note = f"{{:.1f}} us vs. {median(found['decode']):.1f} us"
    return [
        Row(
            f"{name}, {key}",
            ratio(found, key, "decode"),
            "x",
            _LIMITS[key],
            note.format(median(found[key])),
        )
        for key in looks
    ]


def _loop(similarity: str) -> LoopDetection:
    return LoopDetection.model_validate(
        {
            "enabled": True,
            "similarity": similarity,
            "window_seconds": 60,
            "threshold_identical_requests": 5,
        }
    )
