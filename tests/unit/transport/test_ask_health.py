"""`loopguard healthcheck` without a gRPC library: what it makes of answers, good and bad."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from extproc.errors import UsageError
from extproc.server import _find_transport
from extproc.settings import parse_address
from extproc.transport.ask_health import ask_health
from extproc.transport.grpc import encode_trailers, frame_message
from extproc.transport.headers import encode
from extproc.transport.http2 import make_head

SERVING = frame_message(b"\x08\x01")
HEADERS = encode([(b":status", b"200"), (b"content-type", b"application/grpc")])


def frame(kind: int, flags: int, payload: bytes, stream: int = 1) -> bytes:
    """One frame."""
    return make_head(len(payload), kind, flags) + stream.to_bytes(4) + payload


SETTINGS = frame(4, 0, b"", 0)
START = SETTINGS + frame(1, 4, HEADERS)
END = frame(1, 5, encode_trailers(0))


def ask(answer: bytes, timeout: float = 20, *, hang: bool = False) -> str:
    """The status that a server's bytes are read as."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = threading.Event()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(2**16)
                connection.sendall(answer)
                if hang:
                    done.wait()
                else:
                    with suppress(OSError):  # the client may have left
                        connection.shutdown(socket.SHUT_WR)
                        while connection.recv(2**16):  # so that what is left is no reset
                            pass

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            return ask_health(parse_address(f"127.0.0.1:{server.getsockname()[1]}"), timeout)
        finally:
            done.set()
            thread.join()


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (START + frame(0, 0, SERVING) + END, "SERVING"),
        (START + frame(0, 0, frame_message(b"\x08\x02")) + END, "NOT_SERVING"),
        (START + frame(0, 0, SERVING[:3]) + frame(6, 0, b"12345678", 0) + frame(0, 0, SERVING[3:]) + END, "SERVING"),
        (
            START
            + frame(0, 8, b"\2" + SERVING + b"\0\0")
            + frame(1, 1, encode_trailers(0)[:5])
            + frame(9, 4, encode_trailers(0)[5:]),
            "SERVING",
        ),
        (SETTINGS + frame(1, 5, encode_trailers(12, "no such service", only=True)), "UNIMPLEMENTED: no such service"),
        (SETTINGS + frame(1, 5, encode([(b":status", b"404")])), "UNKNOWN: HTTP status 404"),
        (SETTINGS + frame(3, 0, b"\0\0\0\2"), "UNAVAILABLE: the server ended the call"),
        (SETTINGS + frame(7, 0, b"\0" * 8, 0), "UNAVAILABLE: the server ended the call"),
        (START, "UNAVAILABLE: the server closed the connection"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "UNAVAILABLE: the server does not speak HTTP/2"),
    ],
)
def test_an_answer_is_read_as_it_is_meant(answer: bytes, status: str) -> None:
    """Whole, in parts, padded, with pings between them; and each way in which a server gives no answer, in one line."""
    assert ask(answer) == status


def test_a_server_that_says_nothing_is_waited_for_no_longer_than_asked() -> None:
    """The time is for the whole call."""
    assert ask(START, 0.05, hang=True) == "DEADLINE_EXCEEDED: no answer within 0.05 s"


def test_a_transport_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without grpcio, `--transport grpcio` is a usage error; an import that fails for another reason is told as it is."""

    def missing(name: str) -> Callable[[str], object]:
        def resolve(_: str) -> object:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        return resolve

    monkeypatch.setattr("extproc.server.resolve_name", missing("grpc.aio"))
    with pytest.raises(UsageError, match=r"--transport grpcio needs another package: pip install '\.\[grpcio\]'"):
        _find_transport("grpcio")
    monkeypatch.setattr("extproc.server.resolve_name", missing("other"))
    with pytest.raises(ModuleNotFoundError, match="other"):
        _find_transport("grpcio")
