"""The commands' client of the admin endpoints. The first client imports httpx."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic
from typing import Any, Final

from extproc.errors import LoopguardError, UsageError
from extproc.operator.admin.local_token import read_token
from extproc.settings import ENV_PREFIX, Address, find_unknown, parse_address

_SECONDS = 10.0
_WHOLE_SECONDS = 60.0
_MOST_BYTES = 64 * 2**20
_MOST_SHOWN = 500
_PLAIN: Final = {"accept-encoding": "identity"}
"""Uncompressed, because the size of a compressed reply is unknown until it is decompressed."""

_DEFAULT = "http://127.0.0.1:9900"
_FLAG = "--admin"
_ADMIN, _SOCKET = f"{ENV_PREFIX}ADMIN", f"{ENV_PREFIX}ADMIN_SOCKET"
_WANTED = "http://HOST:PORT or unix:/PATH"
# Kubernetes sets these variables for a Service
_MISSPELT = re.compile(f"{_ADMIN}(?!_SERVICE_|_PORT)")


def add_admin_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names running servers, for `open_clients`."""
    parser.add_argument(
        "--admin",
        action="append",
        metavar="URL|unix:/PATH",
        help=(
            f"admin port or socket of a running server; repeatable (default: {_SOCKET} or "
            f"{_ADMIN}, else {_DEFAULT})"
        ),
    )


def open_clients(admin: Sequence[str] | None, flag: str = _FLAG) -> list[AdminClient]:
    """Clients of these servers, else of the default one; raises UsageError for a bad address."""
    return (
        [AdminClient(text, flag) for text in admin]
        if admin
        else [AdminClient(*find_admin(os.environ))]
    )


def find_admin(environ: Mapping[str, str]) -> tuple[str, str]:
    """The address from the environment and its variable, else the default address and the flag.

    Orders must not reach the wrong server, so malformed values and misspelt variables raise
    UsageError.
    """
    if path := environ.get(_SOCKET):
        return path if path.startswith("unix:") else f"unix:{path}", _SOCKET
    text = environ.get(_ADMIN, "")
    if not text:
        if misspelt := [warning for warning in find_unknown(environ) if _MISSPELT.match(warning)]:
            raise UsageError(misspelt[0])
        return _DEFAULT, _FLAG
    if "://" in text or text.startswith("unix:"):
        return text, _ADMIN
    try:
        address = parse_address(text)
    except ValueError:
        raise UsageError(f"{_ADMIN} must be {_WANTED} or HOST:PORT, not {text!r}") from None
    # Recognised, not bound
    host = "127.0.0.1" if address.host in ("::", "0.0.0.0") else address.host  # noqa: S104
    return (
        f"http://[{host}]:{address.port}" if ":" in host else f"http://{host}:{address.port}",
        _ADMIN,
    )


class AdminClient:
    """A client of one server."""

    def __init__(self, url: str, flag: str = _FLAG) -> None:
        """Does not connect yet.

        Raises UsageError unless `url` is http(s)://HOST:PORT, HOST:PORT or unix:/PATH.
        """
        import httpx  # noqa: PLC0415  # takes 0.2 s

        self.url, self._flag = url, flag
        if url.startswith("unix:/"):
            base, path = "http://localhost", url.removeprefix("unix:")
        else:
            base, path = url if "://" in url else f"http://{url}", None
        try:
            parsed = httpx.URL(base)
            fits = (
                parsed.scheme in ("http", "https")
                and parsed.host
                and parsed.path in ("", "/")
                and not parsed.query
            )
        except (httpx.InvalidURL, ValueError):
            fits = False
        if not fits:
            raise UsageError(f"{flag} must be {_WANTED}, not {url!r}")
        # Reading certificate authorities takes 30 ms, so only for https. Proxy variables and
        # ~/.netrc are not for this server.
        transport = httpx.HTTPTransport(verify=parsed.scheme == "https", trust_env=False, uds=path)
        local = path is None and parsed.scheme == "http" and Address(base, parsed.host).is_local
        # As in `serve`; on ::1, another user's server could capture the token
        if local and parsed.host == "localhost":
            base = str(parsed.copy_with(host="127.0.0.1"))
        self._local_port = parsed.port if local else None
        self._client = httpx.Client(
            base_url=base, transport=transport, timeout=_SECONDS, trust_env=False
        )

    def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        params: Mapping[str, str] | None = None,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:  # noqa: ANN401  # as json.loads
        """The decoded JSON of an endpoint; raises LoopguardError with the server's message."""
        import httpx  # noqa: PLC0415  # as above

        content = None if body is None else json.dumps(body)
        sent = {
            **_PLAIN,
            **({} if body is None else {"content-type": "application/json"}),
            **(headers or {}),
        }
        where = f"{self.url}{path}"
        try:
            with self._client.stream(
                method, path, params=params, content=content, headers=sent
            ) as answer:
                plain = answer.headers.get("content-encoding", "identity") == "identity"
                reply = read_bounded(answer.iter_raw(), where) if plain else b""
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise LoopguardError(
                f"cannot ask {self.url}: {reason}; set {self._flag} to a running server"
            ) from None
        try:
            found = json.loads(reply)
        except (ValueError, RecursionError):
            found = None
        if answer.is_error:
            told = (
                found["error"]
                if isinstance(found, dict) and "error" in found
                else reply.decode(errors="replace").strip()
            )
            raise LoopguardError(
                f"{where} answered {answer.status_code}: "
                f"{str(told)[:_MOST_SHOWN] or answer.reason_phrase}"
            )
        if not isinstance(found, dict):
            raise LoopguardError(f"{where} is not an admin endpoint of Loopguard")
        return found

    def read_local_token(self) -> str:
        """The token of a server on this machine; empty if there is none.

        Raises UsageError if its file is unsafe.
        """
        try:
            return read_token(self._local_port) if self._local_port is not None else ""
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"the token of {self.url} is not used: {error}; restart the server, or set "
                "--token-file"
            ) from None

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def select_params(options: argparse.Namespace, *names: str) -> dict[str, str]:
    """The query of a report: the non-empty flags among `names`."""
    return {name: value for name in names if (value := str(getattr(options, name)))}


def ask_all(clients: Sequence[AdminClient], path: str, params: Mapping[str, str]) -> dict[str, Any]:
    """Merge the reports of all servers.

    Servers that share a store are counted once. Raises as `AdminClient.ask`.
    """
    joined, *others = [client.ask(path, params=params) for client in clients]
    for client, report in zip(clients, [joined, *others], strict=True):
        if "replica" not in report:
            raise LoopguardError(f"{client.url}{path} is not an admin endpoint of Loopguard")
    for report in others:
        if report["replica"] in joined["replicas"]:
            continue
        joined |= {
            name: joined[name] + rows for name, rows in report.items() if isinstance(rows, list)
        }
        joined["problem"] = joined["problem"] or report["problem"]
        for name in joined.keys() & {"left_out", "known"}:
            joined[name] += report[name]
        for name, number in report.get("total", {}).items():
            one = joined["total"].get(name)
            joined["total"][name] = (
                number if one is None else one if number is None else one + number
            )
    return dict(joined)


def read_bounded(pieces: Iterable[bytes], where: str, most: int = _MOST_BYTES) -> bytes:
    """Join a reply; raises LoopguardError if it exceeds `most` bytes or takes over a minute."""
    ends = monotonic() + _WHOLE_SECONDS
    reply = bytearray()
    for piece in pieces:
        reply += piece
        if len(reply) > most or monotonic() > ends:
            what = (
                f"more than {most // 2**20} MiB"
                if len(reply) > most
                else f"for more than {_WHOLE_SECONDS:g} s"
            )
            raise LoopguardError(f"{where} sends {what}, as no admin port does")
    return bytes(reply)
