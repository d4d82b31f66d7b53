"""Shared by the commands for operators' orders: flags, and the request to the admin port."""

from __future__ import annotations

import argparse
import getpass
import os
import socket
import sys
from pathlib import Path
from typing import Any

from extproc.errors import UsageError
from extproc.logs import escape_controls
from extproc.operator.admin.client import AdminClient, add_admin_flag, open_clients
from extproc.operator.admin.commands import read_duration
from extproc.settings import ENV_PREFIX

_OPERATOR_HEADER = "x-loopguard-operator"


def add_order_flags(
    parser: argparse.ArgumentParser, *, lasts: str = "", sessions: bool = False
) -> None:
    """Add an order's flags: --for lasts `lasts`; --fingerprint and --tool unless `sessions`."""
    parser.add_argument(
        "--caller",
        action="append",
        default=[],
        metavar="NAME=VALUE|HASH",
        help=(
            "a limit key of the caller and its value, as `explain` prints it, repeatable; or its "
            "hash, from a page or a log"
        ),
    )
    parser.add_argument(
        "--session",
        metavar="KEY=VALUE|HASH",
        help="a session, such as header:x-session-id=abc, or its hash",
    )
    if not sessions:
        parser.add_argument(
            "--fingerprint", metavar="HEX", help="the fingerprint of a loop, from a log or refusal"
        )
        parser.add_argument("--tool", metavar="NAME", help="only requests that call this tool")
    parser.add_argument("--policy", metavar="ID", help="only under this policy (default: all)")
    parser.add_argument("--reason", metavar="TEXT", help="reason, for the log and other operators")
    if lasts:
        text = f"duration, such as 90s, 30m, 2h, 1d (default {lasts})"
        parser.add_argument("--for", dest="duration", default=lasts, metavar="DURATION", help=text)
    add_asking_flags(parser)


def add_asking_flags(parser: argparse.ArgumentParser) -> None:
    add_admin_flag(parser)
    parser.add_argument(
        "--token-file",
        metavar="PATH",
        help="file whose first token is sent to an admin port (default: "
        f"{ENV_PREFIX}ADMIN_TOKEN_FILE, else that of a server on"
        " this machine, for its own user); a socket needs none",
    )


def give(kind: str, options: argparse.Namespace, **more: object) -> int:
    """Send an order with the `more` fields that are not None to every server."""
    order = make_order(kind, options) | {
        name: value for name, value in more.items() if value is not None
    }
    for client in open_clients(options.admin):
        given = client.ask(
            "/overrides", method="POST", body=order, headers=make_headers(options, client)
        )
        for note in given.get("notes", []):
            print(escape_controls(f"note: {note}"), file=sys.stderr)
        print(escape_controls(f"{kind} {given['override']} until {given['ends']}"))
    return 0


def make_order(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """An order for `POST /overrides`; raises UsageError."""
    about: dict[str, Any] = {
        "caller": _read_caller(options.caller),
        "session": _split(options.session, "--session")
        if options.session and "=" in options.session
        else options.session,
    }
    about |= {name: getattr(options, name) for name in ("fingerprint", "tool") if name in options}
    if not any(about.values()):
        *flags, last = [f"--{name}" for name in about]
        raise UsageError(f"give a target: {', '.join(flags)} or {last}")
    order = {"kind": kind, **about, "policy": options.policy, "reason": options.reason}
    if duration := getattr(options, "duration", None):
        order["seconds"] = read_duration(duration)
    return {key: value for key, value in order.items() if value}


def make_headers(options: argparse.Namespace, client: AdminClient) -> dict[str, str]:
    """The headers with the operator's name and token; raises UsageError for a bad token file."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user in a container may have no name
        user = str(os.getuid())
    headers = {
        _OPERATOR_HEADER: f"{user}@{socket.gethostname()}".encode("ascii", "replace").decode()
    }
    variable = f"{ENV_PREFIX}ADMIN_TOKEN_FILE"
    path, origin = (
        options.token_file or os.environ.get(variable, ""),
        "--token-file" if options.token_file else variable,
    )
    if path:
        try:
            tokens = Path(path).read_text().split()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{origin} {path}: cannot be read: {error}") from None
        if not tokens:
            raise UsageError(f"{origin} {path}: it contains no token")
        headers["authorization"] = f"Bearer {tokens[0]}"
    elif token := client.read_local_token():
        headers["authorization"] = f"Bearer {token}"
    return headers


def _read_caller(given: list[str]) -> str | dict[str, str] | None:
    if len(given) == 1 and "=" not in given[0]:
        return given[0]
    pairs: dict[str, str] = {}
    for text in given:
        pairs |= _split(text, "--caller")
    return pairs or None


def _split(text: str, flag: str) -> dict[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise UsageError(f"{flag} must be NAME=VALUE or 16 hex digits, not {text!r}")
    return {name: value}
