"""What the real Envoy sends us, frame by frame: far below everything that we allow a peer."""

from __future__ import annotations

import re
import socket
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from extproc.transport import http2
from extproc.transport.grpc import GrpcConnection, MessageReceived
from extproc.transport.headers import MAX_BLOCK
from extproc.transport.health import EXT_PROC, HEALTH
from extproc.transport.http2 import Http2Limits
from tests.support.documents import bundle, policy
from tests.support.harness import PATIENCE, Stack, eventually, stack


class Recorder:
    """Stands between Envoy and Loopguard, passes everything on and keeps account.

    Attributes:
        frames: of Envoy's, by type.
        messages: in them.
        impatient: connections that would have been ended with a twentieth of the patience, and none coming back by itself.
        largest_block: the most bytes of a HEADERS frame.
    """

    def __init__(self) -> None:
        self.frames: Counter[int] = Counter()
        self.messages = self.impatient = self.largest_block = 0
        self._lock = threading.Lock()
        self._listening: socket.socket

    def edit(self, configuration: str) -> str:
        """Envoy's configuration, with this in Loopguard's place."""
        path = re.search(r"path: \"?(/\S+loopguard\.sock)", configuration)
        assert path is not None
        recorder = str(Path(path[1]).with_name("recorder.sock"))
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(recorder)
        self._listening.listen()
        threading.Thread(target=self._accept, args=(path[1],), daemon=True).start()
        return configuration.replace(path[1], recorder)

    def _accept(self, target: str) -> None:
        while True:
            try:
                envoy, _ = self._listening.accept()
            except OSError:
                return
            guard = socket.socket(socket.AF_UNIX)
            guard.connect(target)
            threading.Thread(target=self._pass_on, args=(envoy, guard, self._observe()), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(guard, envoy, len), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, note: Callable[[bytes], object]) -> None:
        try:
            while data := source.recv(65_536):
                note(data)
                sink.sendall(data)
        except OSError:
            pass
        sink.close()

    def _observe(self) -> Callable[[bytes], object]:
        """What is to be done with what Envoy sends on a new connection."""
        limits = Http2Limits(patience=Http2Limits().patience // 20, patience_per_second=0)
        connection = GrpcConnection({f"/{EXT_PROC}/Process".encode(): False, f"/{HEALTH}/Check".encode(): True}, limits)
        rest = bytearray()
        greeted = False

        def note(data: bytes) -> None:
            nonlocal greeted
            rest.extend(data)
            if not greeted:
                del rest[: len(http2.PREFACE)]
                greeted = True
            with self._lock:
                self._count(rest)
                self._replay(connection, data)

        return note

    def _count(self, data: bytearray) -> None:
        while len(data) >= 9 and len(data) >= 9 + (size := int.from_bytes(data[:3], "big")):
            self.frames[data[3]] += 1
            if data[3] == http2.HEADERS:
                self.largest_block = max(self.largest_block, size)
            del data[: 9 + size]

    def _replay(self, connection: GrpcConnection, data: bytes) -> None:
        connection.receive(data)
        while True:
            event = connection.next_event()
            self.messages += isinstance(event, MessageReceived)
            if event is None:
                if not connection.unfinished:
                    self.impatient += connection.ended
                    return
                connection.receive(b"")


POLICIES = bundle(
    policy("reject", {"pathPrefix": "/reject"}),
    policy("hold", {"pathPrefix": "/hold"}, action="throttle", threshold_identical_requests=2),
)


def _hang_up(made: Stack, number: int) -> None:
    """A client that is gone before its answer, some before they have sent their body."""
    with made.connect() as client:
        client.sendall(b"POST /hold HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % (number % 2) + b"x" * (number % 3 % 2))


def test_an_honest_envoy_never_comes_near_a_limit() -> None:
    """Requests of all kinds, many at a time, and clients that hang up use less than a twentieth of the patience."""
    recorder = Recorder()
    with stack(POLICIES, edit=recorder.edit) as made, ThreadPoolExecutor(32) as clients:
        hung_up = [clients.submit(_hang_up, made, number) for number in range(200)]
        answers = [
            clients.submit(made.send, f"/reject/{number % 150}", method="POST", body=b"x" * (number % 5 * 40_000))
            for number in range(600)
        ]
        assert {answer.result(PATIENCE).status for answer in answers} == {200, 429}
        for each in hung_up:
            each.result(PATIENCE)
        eventually(lambda: made.loopguard.metric("streams_in_flight") == 0, "the end of all streams")

    assert recorder.frames[http2.HEADERS] > 700
    assert recorder.messages > 1_000
    assert recorder.impatient == 0
    assert recorder.largest_block < MAX_BLOCK / 50
    assert recorder.frames[http2.PRIORITY] + recorder.frames[http2.CONTINUATION] == 0
    assert recorder.frames[http2.PING] < 100  # one where a stream begins after a moment's silence
