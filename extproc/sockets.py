"""Listening sockets, with errors that say why."""
# interpreted: opens a server's sockets, once

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Final

from extproc.errors import LoopguardError
from extproc.settings import Address

BACKLOG: Final = 1_024
"""Length of the kernel's queue of connections that are not accepted yet."""

_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


def open_listening_socket(address: Address, flag: str = "--listen", *, mode: int | None = None) -> socket.socket:
    """A socket that listens on `address`; a Unix socket that no process listens on any more is replaced.

    Args:
        address: where to listen.
        flag: of the command that chose it, for errors.
        mode: of a Unix socket's file; None for what the umask leaves.

    Raises:
        LoopguardError: the address cannot be listened on; the message says why.
    """
    try:
        if address.is_unix:
            return _bind_unix(address.text.removeprefix("unix:"), mode)
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        both = family is socket.AF_INET6 and address.host == "::" and socket.has_dualstack_ipv6()
        made = socket.create_server((address.host, address.port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # what is accepted has it too: no answer waits for an ACK
        return made  # noqa: TRY300  # in one piece
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise LoopguardError(f"cannot listen on {address.text}: {reason}; choose another with {flag}") from None


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel detect within a minute that a peer's machine is gone."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
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
            Path(path).chmod(mode)  # before anybody can connect
        made.listen(BACKLOG)
    except BaseException:
        made.close()
        raise
    return made
