"""HTTP servers that give any answer, also hostile ones."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple

from tests.support.listening import Handler, Listener


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    write: Callable[[], Iterator[bytes]]


def reply(body: object, status: int = 200) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Answer(status, {"content-type": "application/json"}, lambda: iter([data]))


def flood() -> Iterator[bytes]:
    yield b'{"a":"'
    while True:
        yield b"x" * 2**16


@contextmanager
def answering(answer: Answer | Mapping[str, Answer], *, tls: bool = False) -> Iterator[str]:
    class Serving(Handler):
        def serve(self) -> None:
            self.read_body()
            status, headers, write = (
                answer if isinstance(answer, Answer) else answer[self.path.partition("?")[0]]
            )
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(OSError):  # the client has had enough
                for piece in write():
                    self.wfile.write(piece)

    server = Listener(Serving, tls=tls)
    try:
        yield f"http{'s' if tls else ''}://{server.address}"
    finally:
        server.stop()
