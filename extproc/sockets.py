"""Listening sockets, with errors that explain themselves."""
# interpreted: runs once, at startup

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Final

from extproc.errors import LoopguardError
from extproc.settings import Address

BACKLOG: Final = 1_024
"""Length of the kernel's queue of connections to accept."""


def open_listening_socket(
    address: Address, flag: str = "--listen", *, mode: int | None = None
) -> socket.socket:
    """Open a socket that listens on `address`, given by `flag`; raises LoopguardError.

    A stale Unix socket is replaced. The socket's file gets `mode`, or the umask's default.
    """
    try:
        if address.is_unix:
            return _bind_unix(address.text.removeprefix("unix:"), mode)
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        both = family is socket.AF_INET6 and address.host == "::" and socket.has_dualstack_ipv6()
        made = socket.create_server(
            (address.host, address.port), family=family, backlog=BACKLOG, dualstack_ipv6=both
        )
        # Connections inherit it; no answer waits for an ACK
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made  # noqa: TRY300  # in one piece
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise LoopguardError(
            f"cannot listen on {address.text}: {reason}; choose another with {flag}"
        ) from None


def keep_alive(connection: socket.socket, probe_seconds: int = 10) -> None:
    """Make the kernel detect a vanished peer within a minute, by probes at this interval."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 30),
        ("TCP_KEEPINTVL", probe_seconds),
        ("TCP_KEEPCNT", 3),
    ):
        if hasattr(socket, option):  # Linux has them all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _bind_unix(path: str, mode: int | None) -> socket.socket:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            Path(path).unlink(missing_ok=True)
        else:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    made = socket.socket(socket.AF_UNIX)
    try:
        made.bind(path)
        if mode is not None:
            Path(path).chmod(mode)  # before any client can connect
        made.listen(BACKLOG)
    except BaseException:
        made.close()
        raise
    return made
