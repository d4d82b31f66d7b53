"""A gRPC client on the HTTP/2 core, without sockets."""

from typing import TypeAlias

from extproc.transport import http2
from extproc.transport.grpc import Call, GrpcConnection, MessageReceived
from extproc.transport.headers import Cache, Decoder, encode
from extproc.transport.http2 import Http2Limits, Pool
from tests.support.http2 import HELLO, frame

STREAMING, SINGLE = b"/test.Service/Stream", b"/test.Service/Ask"


METHODS = {STREAMING: False, SINGLE: True}


Seen: TypeAlias = tuple[str, int, bytes]


def call(stream: int = 1, path: bytes = STREAMING, flags: int = 0, **changed: bytes) -> bytes:
    fields = {
        ":method": b"POST",
        ":scheme": b"http",
        ":path": path,
        "content-type": b"application/grpc",
        "x-loopguard-a": b"b",
    }
    fields["te"] = b"trailers"
    for name, value in changed.items():
        fields[":method" if name == "method" else name.replace("_", "-")] = value
    pairs = [(name.encode(), value) for name, value in fields.items()]
    return frame(http2.HEADERS, http2.END_HEADERS | flags, stream, encode(pairs))


def body(stream: int, content: bytes, flags: int = 0) -> bytes:
    return frame(http2.DATA, flags, stream, content)


class Peer:
    def __init__(self, limits: Http2Limits | None = None, pool: Pool | None = None) -> None:
        self.connection = GrpcConnection(METHODS, limits, pool=pool)
        self.calls: dict[int, Call] = {}
        self.frames: list[tuple[int, int, int, bytes]] = []
        self._decoder = Decoder(Cache())
        self.receive(HELLO)

    def receive(self, *data: bytes, answer: bytes | None = None, step: int = 0) -> list[Seen]:
        """Process frames until nothing is left to do.

        Each message is answered with `answer`, if there is one.
        """
        received = b"".join(data)
        parts = (
            [received[start : start + step] for start in range(0, len(received), step)]
            if step
            else [received]
        )
        return [seen for part in parts for seen in self._receive(part, answer)]

    def _receive(self, data: bytes, answer: bytes | None) -> list[Seen]:
        seen: list[Seen] = []
        self.connection.receive(data)
        while True:
            event = self.connection.next_event()
            if event is not None:
                self.calls[event.call.number] = event.call
                content = event.message if isinstance(event, MessageReceived) else b""
                seen.append((type(event).__name__, event.call.number, content))
                if answer is not None and isinstance(event, MessageReceived):
                    self.connection.answer(event.call, answer)
            elif self.connection.unfinished:
                self.connection.receive(b"")
            else:
                self._read()
                return seen

    def _read(self) -> None:
        data = self.connection.data_to_send()
        while data:
            size = int.from_bytes(data[:3], "big")
            self.frames.append(
                (data[3], data[4], int.from_bytes(data[5:9], "big"), data[9 : 9 + size])
            )
            data = data[9 + size :]

    def headers(self, stream: int) -> list[dict[bytes, bytes]]:
        self._read()
        blocks = [
            payload
            for kind, _, number, payload in self.frames
            if kind == http2.HEADERS and number == stream
        ]
        return [
            {field.name: field.value for field in self._decoder.decode(block).fields}
            for block in blocks
        ]

    def content(self, stream: int) -> bytes:
        self._read()
        return b"".join(
            payload
            for kind, _, number, payload in self.frames
            if kind == http2.DATA and number == stream
        )

    def status(self, stream: int) -> int | None:
        found = [
            int(block[b"grpc-status"]) for block in self.headers(stream) if b"grpc-status" in block
        ]
        assert len(found) <= 1
        return found[0] if found else None
