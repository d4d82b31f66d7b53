"""Gives the guard's own transport what Envoy once said, in this process: `python -P replay.py POLICY REQUESTS NAME=FILE...`.

It is run by its path and imports nothing of the benchmark, so that the interpreter of either build finds that build's
`extproc`. Each file is a recording of this many requests, one read of the socket a line, in base64. For each name on standard
input a line follows on standard output: microseconds of CPU per request.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from time import thread_time

import uvloop

from extproc.server import Server
from extproc.settings import Settings
from extproc.transport.fast import _Peer


class _Answers(asyncio.Transport):
    """Where the guard believes that its answers leave; what it calls are builtins, which cost as little as uvloop's own."""

    is_closing = staticmethod(bool)
    write = staticmethod(len)  # type: ignore[assignment]

    def __init__(self, connection: socket.socket) -> None:
        super().__init__({"socket": connection})

    def close(self) -> None:
        pass


async def replay(policy: str, requests: int, reads: Sequence[bytes]) -> float:
    """Microseconds of CPU per request, of a fresh guard on a fresh connection; raises RuntimeError if one was refused."""
    server = Server(Settings(policy=(policy,)))
    with socket.socket(socket.AF_UNIX) as connection:
        peer = _Peer(server._grpc)  # type: ignore[arg-type]  # the fast one is the default
        peer.connection_made(_Answers(connection))
        gc.collect()
        gc.freeze()  # as the server does once it listens
        started = thread_time()
        for data in reads:
            peer.data_received(data)
        spent = thread_time() - started
        peer.connection_lost(None)
    labels = {"policy": "policy-00000", "mode": "enforce", "action": "allow"}
    counted = server.service.metrics.registry.get_sample_value("loopguard_requests_total", labels)
    if counted != requests:
        raise RuntimeError(f"{counted} of {requests} requests were counted and let through")
    return spent / requests * 1e6


def main(policy: str, requests: int, *recordings: str) -> None:
    """Replay what is asked for."""
    files = dict(recording.split("=", 1) for recording in recordings)
    reads = {name: [b64decode(line) for line in Path(file).read_bytes().splitlines()] for name, file in files.items()}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the server has it
        for line in sys.stdin:
            print(runner.run(replay(policy, requests, reads[line.strip()])), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
