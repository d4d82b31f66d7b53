"""Authorizes changes over the admin port: with a token, or over the server's Unix socket.

On loopback, a server without a token file writes one for its own user; see `local_token`.

Other sites cannot make changes through a user's browser (CSRF): it sends no token by itself, and a
page's requests are recognized by their headers. Forms of the server's own pages use `sign_in`.
"""

from __future__ import annotations

import hmac
import re
import shlex
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request

from extproc.errors import UsageError

OPERATOR_HEADER = "x-loopguard-operator"
"""The operator's name, as claimed by the client."""

_LEAST_TOKEN = 16
_MOST_BYTES = 65_536
_LONGEST_NAME = 48
_ODD = re.compile(r"[^A-Za-z0-9_.@+-]")
_USUAL_ADDRESSES = ("", "127.0.0.1:9900", "localhost:9900")
_BROWSERS = ("origin", "sec-fetch-site")
"""Headers that browsers send with a page's requests, and other clients do not send."""


class Asking(NamedTuple):
    """How a page's commands reach the server.

    Attributes:
        admin: the flag with the server's address; empty for the default.
        token: the flag with the token file, only for orders; empty if none is needed.
        how: a sentence that explains how to give orders.
    """

    admin: str
    token: str
    how: str


class Credentials:
    """The tokens in a file.

    The file is read for each request with a token, so changing it needs no restart.

    Attributes:
        local_address: the admin port's address if only this machine can connect, else empty. A
            page's commands use it instead of `Host`, which may be a tunnel's, or resolve to another
            server when the command sends its token.
    """

    def __init__(self, path: str, socket_path: str = "") -> None:
        """Check the file, which has one token per line. Without a file, TCP is read-only.

        Args:
            path: the file; empty for none.
            socket_path: the server's Unix socket; empty for none.

        Raises:
            UsageError: the file cannot be read, or a token is too short.
        """
        self._path = path
        self._socket_path = socket_path
        self.local_address = ""
        self._shared: Path | None = None
        if path:
            try:
                self._read()
            except (OSError, ValueError) as error:
                raise UsageError(f"--admin-token-file {path}: {_explain(error)}") from None

    def share(self, path: Path) -> None:
        """Use the token file that the server has written for its own user."""
        self._path, self._shared = str(path), path

    def end_sharing(self) -> None:
        """Remove the shared token file."""
        if self._shared is not None:
            self._shared.unlink(missing_ok=True)

    def explain(self, request: Request) -> Asking:
        """How a page's commands reach this server."""
        address = self.local_address or request.headers.get("host", "")
        admin = "" if address in _USUAL_ADDRESSES else f" --admin {shlex.quote(address)}"
        here = "Run the commands on the server's machine, as its user."
        if self._shared is not None:
            return Asking(admin, "", here)
        if self._path and self.local_address:
            return Asking(
                admin,
                f" --token-file {shlex.quote(self._path)}",
                "Run the commands where the token file is.",
            )
        if self._path:
            return Asking(
                admin,
                "",
                "Add --token-file PATH to the commands, a file with a token of this server.",
            )
        if self._socket_path:
            return Asking(f" --admin {shlex.quote(f'unix:{self._socket_path}')}", "", here)
        return Asking(
            admin,
            "",
            "This server takes no orders: start it with --admin-token-file or --admin-socket.",
        )

    @property
    def signs_in(self) -> bool:
        """Whether operators can sign in to the page: with --admin-token-file."""
        return bool(self._path) and self._shared is None

    def check(self, request: Request) -> str:
        """The operator's name and kind of credential; raises HTTPException if unauthorized."""
        if any(header in request.headers for header in _BROWSERS):
            raise HTTPException(
                HTTPStatus.FORBIDDEN,
                "browsers cannot make changes; use the loopguard command or curl",
            )
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind != "application/json":
            raise HTTPException(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "content-type must be application/json"
            )
        name = clean_name(request.headers.get(OPERATOR_HEADER, ""))
        # The Unix socket's address has no port. File permissions protect the socket.
        server = request.scope.get("server")
        if server is not None and server[1] is None:
            return f"{name} (socket)"
        self._check_token(request)
        return f"{name} (token)"

    def _check_token(self, request: Request) -> None:
        if not self._path:
            raise HTTPException(
                HTTPStatus.FORBIDDEN,
                (
                    "this port is read-only: start the server with --admin-token-file, or use "
                    "--admin-socket"
                ),
            )
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        tokens = self.list_tokens()
        given = shown.strip().encode("utf-8", "surrogateescape")
        # Constant time: always compare with all tokens
        good = [hmac.compare_digest(given, token) for token in tokens]
        if scheme.lower() != "bearer" or not any(good):
            challenge = {"www-authenticate": 'Bearer realm="loopguard"'}
            source = self._shared or "--admin-token-file"
            hint = f"this needs a token from {source}"
            if not shown:
                hint = (
                    "no token given: set "
                    f"--token-file{f' {self._shared}' if self._shared else ''}, or use "
                    "--admin-socket"
                )
            raise HTTPException(HTTPStatus.UNAUTHORIZED, hint, challenge)

    def list_tokens(self) -> list[bytes]:
        """The current tokens; raises HTTPException if the file is unusable."""
        try:
            return self._read()
        except (OSError, ValueError) as error:
            told = (
                f"{self._shared or 'the token file'}: "
                f"{_explain(error)}{'; restart the server' if self._shared else ''}"
            )
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, told) from None

    def _read(self) -> list[bytes]:
        """The tokens; raises OSError, or ValueError if a token is too short."""
        with Path(self._path).open("rb") as file:
            tokens = [line.strip() for line in file.read(_MOST_BYTES).splitlines() if line.strip()]
        if not tokens or any(len(token) < _LEAST_TOKEN for token in tokens):
            raise ValueError(f"each line must hold a token of at least {_LEAST_TOKEN} characters")
        return tokens


def clean_name(given: str) -> str:
    """An operator's name, as claimed, for the log."""
    return _ODD.sub("?", given.strip() or "somebody")[:_LONGEST_NAME]


def _explain(error: OSError | ValueError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
