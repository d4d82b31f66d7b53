"""Costs of measuring answers: access log entries, and the first byte of a stream for clients."""

import http.client
import json
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

from extproc.cli.envoy_config.options import EnvoyOptions
from extproc.ext_proc.service import Service
from extproc.options import read_options
from extproc.pb.als_pb2 import StreamAccessLogsMessage
from tests.bench import samples
from tests.bench.report import Row, progress
from tests.bench.timing import at_one_clock, cpu_us, process_cpu, ratio, spread
from tests.support.envoy_logs import add_entry
from tests.support.harness import PATIENCE, Envoy, Loopguard, eventually, write_policies
from tests.support.listening import Handler, Listener

TITLE = (
    "answers: knowing what they cost (entries of the access log; a stream through the real "
    "Envoy, with its filters and without)"
)

_LIMIT_US = 15
_LIMIT_FIRST_BYTE = 1.1
# Entries in a message, which Envoy fills up to 16 KiB.
_IN_MESSAGE = 20

_COUNTS = {
    "prompt_tokens": 1_200,
    "completion_tokens": 34,
    "total_tokens": 1_234,
    "prompt_tokens_details": {"cached_tokens": 1_024, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 20, "audio_tokens": 0},
}
# What Envoy reads in the events of a stream.
_TOLD = {"model": "gpt-4o-2024-08-06", "usage": json.dumps(_COUNTS)}

_PATH = "/v1/chat/completions"
_EVENT = (
    b'data: {"model": "gpt-4o", "choices": [{"index": 0, "delta": {"content": "word"}}], '
    b'"usage": null}\n\n'
)
_USAGE = b"data: %b\n\n" % json.dumps({"model": "gpt-4o", "choices": [], "usage": _COUNTS}).encode()
_EVENTS = 50
_CPU_NOTE = f"of {_EVENTS + 3} events; with filters the access log as well"
_WARM_UP = 50


def _make_message(serving: Service, numbers: range) -> bytes:
    message = StreamAccessLogsMessage()
    for number in numbers:
        sent = [
            samples.headers_message(user=f"user-{number}"),
            samples.body_message(samples.chat_body(number)),
        ]
        add_entry(
            message, _TOLD, sizes=(1_024, 8_000), headers={"content-type": "text/event-stream"}
        )
        metadata = message.http_logs.log_entry[-1].common_properties.metadata.filter_metadata
        metadata["loopguard"].Clear()
        metadata["loopguard"].MergeFrom(
            samples.process(serving, sent).dynamic_metadata["loopguard"]  # type: ignore[arg-type]  # a Struct
        )
    return message.SerializeToString()


def _measure_entries(count: int) -> float:
    """Microseconds for an entry, from its bytes to the settled session in memory."""
    serving = samples.service(samples.engine([samples.budget()]))
    messages = [
        _make_message(serving, range(start, start + _IN_MESSAGE))
        for start in range(0, count, _IN_MESSAGE)
    ]

    def work() -> None:
        for message in messages:
            serving.access_log.receive(message)

    spent = at_one_clock(lambda: cpu_us(work, count))
    taken = serving.metrics.registry.get_sample_value(
        "loopguard_access_log_entries_total", {"result": "taken"}
    )
    if taken != count:
        raise RuntimeError(f"{taken} of {count} entries were taken")
    return spent


# Set when the client has the first byte; the model sends the rest afterwards.
_READ = threading.Event()


class _Model(Handler):
    protocol_version = "HTTP/1.1"

    def serve(self) -> None:
        self.read_body()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self._write(_EVENT)
        _READ.wait(PATIENCE)
        for event in [*[_EVENT] * _EVENTS, _USAGE, b"data: [DONE]\n\n", b""]:
            self._write(event)

    def _write(self, event: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))


@contextmanager
def _running_envoy(folder: Path, model: str, address: str, *, reads: bool) -> Iterator[Envoy]:
    policy = samples.budget()
    if not reads:
        limits = policy["spec"]["session_limits"]
        del limits["max_cost_per_session"], limits["unknown_model"]
    folder.mkdir()
    write_policies(folder, json.loads(samples.bundle([policy])))
    flags = {
        "upstream": model,
        "listen": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "endpoints": [address],
    }
    envoy = Envoy(folder, read_options(EnvoyOptions, flags))
    try:
        eventually(
            lambda: envoy.stat("cluster.loopguard.membership_healthy"), "a healthy Loopguard"
        )
        yield envoy
    finally:
        envoy.stop()


class _Client:
    def __init__(self, envoy: Envoy) -> None:
        self.envoy = envoy
        self._connection = http.client.HTTPConnection("127.0.0.1", envoy.port, timeout=PATIENCE)
        for number in range(_WARM_UP):
            self.measure_first_byte(number)

    def measure_first_byte(self, number: int) -> float:
        """Microseconds from the request to the first byte of the answer's body."""
        body = samples.chat_body(number)
        _READ.clear()
        started = perf_counter()
        self._connection.request(
            "POST",
            _PATH,
            body,
            {"x-user-id": f"user-{started}", "content-type": "application/json"},
        )
        answer = self._connection.getresponse()
        if answer.status != http.client.OK or not answer.read(1):
            raise RuntimeError(f"no stream, but {answer.status}")
        spent = (perf_counter() - started) * 1e6
        _READ.set()
        answer.read()
        return spent

    def close(self) -> None:
        self._connection.close()


def _measure_in_turn(clients: Mapping[str, _Client], requests: int) -> dict[str, float]:
    """The median of each client's requests, sent in turn and in alternating order.

    No request waits for what is left of the one before, such as its access log entry: that one went
        through another Envoy.
    """
    spent: dict[str, list[float]] = {name: [] for name in clients}
    order = list(clients)
    for number in range(requests):
        for name in order:
            spent[name].append(clients[name].measure_first_byte(number))
        order.reverse()
    return {name: median(times) for name, times in spent.items()}


class _Compared(NamedTuple):
    """Microseconds by Envoy: of first bytes, and of CPU for a whole stream with its access log."""

    first_bytes: dict[str, list[float]]
    cpu: dict[str, float]


def _compare_envoys(rounds: int, requests: int) -> _Compared:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lgb")))
        write_policies(folder, json.loads(samples.bundle([samples.budget()])))
        guard = Loopguard(folder)
        stack.callback(guard.stop)
        model = Listener(_Model)
        stack.callback(model.stop)
        clients = {
            name: stack.enter_context(
                closing(
                    _Client(
                        stack.enter_context(
                            _running_envoy(folder / name, model.address, guard.address, reads=reads)
                        )
                    )
                )
            )
            for name, reads in {"with": True, "without": False}.items()
        }
        before = {name: process_cpu(client.envoy.pid) for name, client in clients.items()}
        measured = [_measure_in_turn(clients, requests) for _ in range(rounds)]
        cpu = {
            name: (process_cpu(client.envoy.pid) - before[name]) / (rounds * requests) * 1e6
            for name, client in clients.items()
        }
        if guard.metric("access_log_entries_total", result="taken") < rounds * requests:
            raise RuntimeError("Envoy did not tell of all answers")
    return _Compared({name: [one[name] for one in measured] for name in clients}, cpu)


def run(*, quick: bool) -> list[Row]:
    progress("answers: entries", 1, 2)
    entries: Sequence[float] = [
        _measure_entries(500 if quick else 2_000) for _ in range(5 if quick else 15)
    ]
    progress("answers: first bytes", 2, 2)
    found, cpu = _compare_envoys(6 if quick else 20, 50 if quick else 100)
    note = f"goal 1; {spread(found, 'with', 'without')}"
    return [
        Row(
            "an entry of the access log",
            median(entries),
            "us",
            _LIMIT_US,
            "from its bytes to the ledger in memory",
        ),
        Row(
            "first byte of a stream, with filters vs. without",
            ratio(found, "with", "without"),
            "x",
            _LIMIT_FIRST_BYTE,
            note,
        ),
        *(
            Row(f"first byte of a stream, {name} filters", median(times), "us")
            for name, times in found.items()
        ),
        *(
            Row(f"Envoy's CPU for a stream, {name} filters", time, "us", note=_CPU_NOTE)
            for name, time in cpu.items()
        ),
    ]
