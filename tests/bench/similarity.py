"""What it costs to inspect a body, compared with decoding the same bytes with msgspec, which is the lower bound."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import msgspec

from extproc.apis import LIST_PATHS, open_conversation
from extproc.apis.conversation import Conversation
from extproc.apis.excerpt import Excerpt
from extproc.detectors import make_similarity
from extproc.detectors.chain import find_place
from extproc.detectors.results import MAX_NORMALIZED, normalize
from extproc.ext_proc.budget import InspectionBudget
from extproc.ext_proc.stream import Stream
from extproc.ext_proc.transaction import Reply
from extproc.metrics import Metrics
from extproc.pb.external_processor_pb2 import ProcessingResponse
from extproc.policy.bundle import LoopDetection
from extproc.request.document import Document
from extproc.server import freeze_objects
from extproc.sessions.names import Rings
from extproc.store.memory import MemoryStore
from tests.bench import samples
from tests.bench.report import Row, progress
from tests.bench.timing import cpu_us, interleaved, ratio

TITLE = "similarity: inspecting an agent's request, vs. msgspec decoding the same bytes"

_LIMITS = {"canonical": 8, "tail": 1.5, "tool_calls": 1.5, "turns": 1.2}
_LONG_MS = 20
_PIECE = 65_536
_SIZES = (1_000, 10_000, 70_000, 500_000)
_PROSE = "The pool was closed before the last request came back, so the test saw an error in place of the answer. "
_CODE = 'def put(self, key):\n    if key is None:\n        raise KeyError("no key")\n    return self.rows[key]\n'
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
    properties = {"path": {"type": "string", "description": "relative path"}, "limit": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": ["path"]}
    return {
        "type": "function",
        "function": {"name": f"tool_{number}", "description": "Reads a file of the work tree.", "parameters": parameters},
    }


def _turn(number: int, result: str) -> list[dict[str, Any]]:
    """The assistant calls a tool, which brings back something new."""
    call = f"call_{number:08d}"
    function = {"name": "tool_0", "arguments": json.dumps({"path": f"src/file{number}.py", "limit": 200})}
    return [
        {"role": "assistant", "content": None, "tool_calls": [{"id": call, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call, "content": f"{number}: {result}"},
    ]


_NUMBERS = [[(row * 7919 + column * 104_729) % 99_991 for column in range(8)] for row in range(400)]
_RESULTS = {
    "prose": _PROSE * 160,
    "indented code": _CODE * 160,
    "a table of integers": "\n".join(" ".join(map(str, row)) for row in _NUMBERS),
    "a table of fractions": "\n".join(" | ".join(f"{number / 100:.2f}" for number in row) for row in _NUMBERS),
    "a log": "\n".join(
        f"2026-11-22T06:14:{row % 60:02d}.{row:03d}Z INFO request {row} took {row % 50} ms" for row in range(300)
    ),
    "a listing": "\n".join(
        f"-rw-r--r-- 1 root root {row[1]:8d} Nov {row[0] % 28:2d} 06:14 file{row[2]}.py" for row in _NUMBERS
    ),
    "tests": "\n".join(f"tests/test_{row % 9}.py::test_{row} PASSED [{row // 4:3d}%] (0.{row:03d}s)" for row in range(300)),
}
"""What tools bring back, each longer than what is normalised of it."""

_NORMALIZED_US_PER_KB = 25
_CHAIN_US = 15


def request(size: int, result: str = _PROSE * 12) -> bytes:
    """A chat completion request of an agent, as long as the agent is old.

    The smallest is its first: prompts, one tool, no history. The others have a longer prompt, eight tools, and as many turns as
    make up about `size` bytes.
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
    """Measure every mode on every size, and decoding in the same run."""
    rows = []
    for number, size in enumerate(_SIZES, 1):
        progress(f"similarity: {size // 1000} KB", number, len(_SIZES) + 1)
        rows += _measure(request(size), f"{size // 1000} KB", quick=quick, limited=True)
    progress("similarity: indented code", len(_SIZES) + 1, len(_SIZES) + 1)
    rows += _measure(request(10_000, _CODE * 12), "10 KB, results of indented code", quick=quick, limited=False)
    rows += [_measure_normalizing(name, text[:MAX_NORMALIZED], quick=quick) for name, text in _RESULTS.items()]
    return [*rows, _measure_chain(quick=quick), *_measure_long(quick=quick), *_measure_steering(quick=quick)]


def _measure_long(*, quick: bool) -> list[Row]:
    """What a history takes of which only the end is read, whole or in the pieces in which Envoy streams it."""
    body = json.loads(request(70_000))
    body["messages"] += [message for number in range(3_000) for message in _turn(number, _PROSE * 12)]
    data = memoryview(json.dumps(body).encode())
    compare, most = make_similarity(_loop("turns")).compare, 2**20

    def read(excerpt: Excerpt, left: memoryview | bytes) -> None:
        found = excerpt.write(left)
        assert found is not None
        compare(Document(found, shortened=True))

    def read_in_pieces() -> None:
        excerpt, kept = Excerpt(LIST_PATHS, most), bytearray()
        for place in range(0, len(data), _PIECE):
            if len(kept) + _PIECE > most:
                excerpt.shorten(kept)
            kept += data[place : place + _PIECE]
        read(excerpt, bytes(kept))

    works = {"at once": lambda: read(Excerpt(LIST_PATHS, most), data), "in pieces": read_in_pieces}
    times = 5 if quick else 25
    return [
        Row(
            f"{len(data) / 1e6:.0f} MB, turns reads the newest messages, {name}",
            median([cpu_us(work, 1) / 1_000 for _ in range(times)]),
            "ms",
            _LONG_MS,
        )
        for name, work in works.items()
    ]


def _measure_chain(*, quick: bool) -> Row:
    """What it takes to find a conversation by what a request shows, and to keep its turn in memory."""
    rings, store = Rings("p", None, namespace=""), MemoryStore(Metrics())
    body, times = request(39_000), 20 if quick else 100

    def follow(conversations: Sequence[Conversation]) -> None:
        for conversation in conversations:
            place = find_place(conversation, prefilled=False)
            if place is not None:
                store.push([rings.chains.make_link("default", "", "0" * 16, "", place, bytes(31))])

    spent = []
    for _ in range(9 if quick else 25):
        opened = [open_conversation(Document(body)) for _ in range(times)]
        spent.append(cpu_us(partial(follow, opened), times))
    return Row("39 KB, the chain in memory", median(spent), "us", _CHAIN_US)


def _measure_normalizing(name: str, text: str, *, quick: bool) -> Row:
    """What a result takes whose lines have no shape that is known."""
    found = []
    for number in range(15 if quick else 150):
        mark = chr(97 + number // 26) + chr(97 + number % 26)
        fresh = mark + text.replace("\n", f"\n{mark}")  # no line is known from before
        found.append(cpu_us(partial(normalize, fresh), 1) / (len(fresh) / 1024))
    return Row(f"normalising {name}", median(found), "us/KB", _NORMALIZED_US_PER_KB)


def _stuck(size: int) -> bytes:
    """A request of an agent that has done the same three times."""
    body = json.loads(request(size))
    body["messages"] += _turn(0, _PROSE * 12) * 3
    return json.dumps(body).encode()


def _measure_steering(*, quick: bool) -> list[Row]:
    """The cost of adding a note, and the cost for requests that get none, over whole streams."""
    freeze_objects()  # as in a server
    size, times = 70_000, 20 if quick else 100
    bodies = {"stuck": samples.body_message(_stuck(size)), "at work": samples.body_message(request(size))}
    works = {
        f"{kind}, {action}": _Streams(action, body, times) for kind, body in bodies.items() for action in ("warn", "steer")
    }
    works["stuck, land"] = _Streams("land", bodies["stuck"], times)
    found = interleaved(9 if quick else 25, {name: streams.run for name, streams in works.items()})
    note = "{:.0f} us vs. {:.0f} us"
    return [
        _measure_notes(size, times, quick=quick),
        *[
            Row(
                f"70 KB, {name}",
                ratio(found, f"{kind}, {action}", f"{kind}, warn"),
                "x",
                limit,
                note.format(median(found[f"{kind}, {action}"]), median(found[f"{kind}, warn"])),
            )
            for kind, action, name, limit in (
                ("stuck", "steer", "a steered request vs. a warned one", 1.3),
                ("stuck", "land", "a landed request vs. a warned one", None),
                ("at work", "steer", "a request that is not, under the same policies", 1.1),
            )
        ],
    ]


def _measure_notes(size: int, times: int, *, quick: bool) -> Row:
    """What it costs to recognise a note and to cut it out."""
    steering = _Streams("steer", samples.body_message(_stuck(size)), 1)
    noted = samples.body_message(ProcessingResponse.FromString(steering.answer()).request_body.response.body_mutation.body)
    bodies = {"plain": samples.body_message(_stuck(size)), "noted": noted}
    found = interleaved(9 if quick else 25, {name: _Streams("warn", body, times).run for name, body in bodies.items()})
    note = f"{median(found['noted']):.0f} us vs. {median(found['plain']):.0f} us"
    return Row("70 KB, a request with a note vs. one without", ratio(found, "noted", "plain"), "x", 1.3, note)


class _Streams:
    """The same request again and again, under a policy on turns."""

    def __init__(self, action: str, body: bytes, times: int) -> None:
        policy = samples.policy(similarity="turns", action=action, threshold_identical_requests=3)
        self._serving = samples.service(samples.engine([policy]))
        self._messages = samples.headers_message(), body
        self._times = times

    def answer(self) -> bytes:
        """To the body of one of them."""
        stream = Stream(self._serving)
        try:
            replies = [stream.receive(message) for message in self._messages]
        finally:
            stream.close()
        last = replies[-1]
        assert isinstance(last, Reply)
        return last.join_answer()

    def run(self) -> float:
        """Microseconds for one of them."""
        self._serving.budget = InspectionBudget(perf_counter())  # whose share of the time is not what is measured
        return cpu_us(self._send, self._times)

    def _send(self) -> None:
        for _ in range(self._times):
            stream = Stream(self._serving)
            for message in self._messages:
                stream.receive(message)
            stream.close()


def _measure(body: bytes, name: str, *, quick: bool, limited: bool) -> list[Row]:
    data = memoryview(body)  # as the service has it
    works: dict[str, Callable[[], object]] = {"decode": lambda: plain(data)}
    plain = msgspec.json.Decoder().decode
    looks = {similarity: make_similarity(_loop(similarity)) for similarity in _LIMITS}
    for similarity, look in looks.items():
        compare = look.compare
        works[similarity] = lambda compare=compare: compare(Document(data))  # type: ignore[misc]  # a lambda's defaults

    def all_three() -> None:
        document = Document(data)
        for look in looks.values():
            look.compare(document)

    works["all three at once"] = all_three
    times = max(5, (20_000 if quick else 100_000) // len(body) * 5)
    found = interleaved(
        9 if quick else 25,
        {key: lambda work=work: cpu_us(lambda: [work() for _ in range(times)], times) for key, work in works.items()},  # type: ignore[misc]  # a lambda's defaults
    )
    note = f"{{:.1f}} us vs. {median(found['decode']):.1f} us"
    return [
        Row(
            f"{name}, {key}",
            ratio(found, key, "decode"),
            "x",
            _LIMITS.get(key) if limited else None,
            note.format(median(found[key])),
        )
        for key in works
        if key != "decode"
    ]


def _loop(similarity: str) -> LoopDetection:
    return LoopDetection.model_validate(
        {"enabled": True, "similarity": similarity, "window_seconds": 60, "threshold_identical_requests": 5}
    )
