"""The process's settings: flag, else environment (`LOOPGUARD_<NAME>`), else default; frozen once read."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from extproc.errors import UsageError
from extproc.logs import LogFormat

ENV_PREFIX = "LOOPGUARD_"
_NOT_OURS = ("SERVICE_", "PORT", "TEST_")
"""What Kubernetes sets for a Service called `loopguard`, and what only tests read."""

ENVIRONMENT_ONLY = "environment only"
"""In place of a flag's metavar: a secret on a command line is a secret no more."""

_HOST_PORT = re.compile(r"(?P<host>[^\s:\[\]/]*|\[[0-9A-Fa-f:.]+(?:%\w+)?\]):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen: `host:port` or `unix:/path`."""

    text: str
    host: str = ""
    port: int = 0

    @property
    def is_unix(self) -> bool:
        """A Unix socket rather than TCP."""
        return self.text.startswith("unix:")


def address(text: str) -> Address:
    """Parse `host:port`, `[::1]:port`, `:port` (all interfaces) or `unix:/path`; port 0 takes a free one.

    Raises:
        ValueError: it is none of these.
    """
    if text.startswith("unix:/"):
        return Address(text)
    found = _HOST_PORT.fullmatch(text)
    if found is None or text.startswith("unix:") or int(found["port"]) > 65_535:  # noqa: PLR2004  # 16 bits
        raise ValueError("must be HOST:PORT or unix:/PATH")
    host, port = found["host"], found["port"]
    return Address(text if host else f"[::]:{port}", host.strip("[]") or "::", int(port))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("must be a positive integer")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1
    if not 0 <= seconds <= 86_400:  # noqa: PLR2004  # a day
        raise ValueError("must be a number of seconds from 0 to 86400")
    return seconds


def _timeout(text: str) -> float:
    seconds = _seconds(text)
    if not 0.001 <= seconds <= 60:  # noqa: PLR2004  # a minute is more than any client waits
        raise ValueError("must be a number of seconds from 0.001 to 60")
    return seconds


def _switch(text: str) -> bool:
    known = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
        "": False,
    }
    if text.lower() not in known:
        raise ValueError("must be true or false")
    return known[text.lower()]


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return parse


def is_scope(text: str) -> bool:
    """Whether an attachment may be called that."""
    return re.fullmatch(r"[A-Za-z0-9_.-]{0,64}", text) is not None


def _scope(text: str) -> str:
    if not is_scope(text):
        raise ValueError("must be at most 64 of the characters A-Z a-z 0-9 _ . -")
    return text


def _paths(text: str) -> tuple[str, ...]:
    return tuple(path for path in text.split(os.pathsep) if path)


def _option(default: Any, parse: Callable[[str], Any], text: str, metavar: str = "") -> Any:  # noqa: ANN401  # as dataclasses.field
    return field(default=default, metadata={"parse": parse, "help": text, "metavar": metavar})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that `loopguard serve` can be told; each attribute is a flag and an environment variable."""

    policy: tuple[str, ...] = _option(
        (), _paths, "policy file or directory; repeatable (in the environment separated by ':')", "PATH"
    )
    listen: Address = _option(  # noqa: RUF009  # made by dataclasses.field
        Address("127.0.0.1:50051", "127.0.0.1", 50051), address, "where Envoy connects (gRPC)", "HOST:PORT|unix:/PATH"
    )
    transport: Literal["fast", "grpcio"] = _option(
        "fast", _one_of("fast", "grpcio"), "fast: our own lean gRPC server; grpcio: the reference", "fast|grpcio"
    )
    admin: Address = _option(  # noqa: RUF009  # made by dataclasses.field
        Address("127.0.0.1:9900", "127.0.0.1", 9900), address, "/metrics, /healthz, /readyz and /policies", "HOST:PORT"
    )
    store: str = _option("memory://", str, "where counts are kept", "URL")
    store_timeout: float = _option(0.05, _timeout, "what a request waits for the store at most", "SECONDS")
    store_password: str = _option("", str, "password of the store, where it does not stand in the URL", ENVIRONMENT_ONLY)
    store_password_file: str = _option("", str, "file with the password of the store, read at every connect", "PATH")
    scope: str = _option("", _scope, "attachment name: processes of different scopes count apart in one store", "NAME")
    on_store_error: Literal["allow", "reject"] = _option(
        "allow",
        _one_of("allow", "reject"),
        "allow: count in this process while the store is away; reject: answer 503",
        "allow|reject",
    )
    shadow: bool = _option(False, _switch, "force every policy into shadow mode: count and report, never act")
    record: bool = _option(
        False, _switch, "send fingerprint, tenant and body CRC32 of every matched request as dynamic metadata"
    )
    allow_unverified_jwt: bool = _option(
        False, _switch, "jwt: descriptors may come from bearer tokens whose signature nobody checked"
    )
    allow_unenforced: bool = _option(
        False, _switch, "start although parts of a bundle (rules, kill_switches, ...) are not enforced"
    )
    max_streams: int = _option(20_000, _positive, "open streams; past it requests are let through at once", "N")
    max_throttled: int = _option(10_000, _positive, "requests held at once, a tenth of them per tenant", "N")
    drain_delay: float = _option(
        5.0,
        _seconds,
        "after SIGTERM: seconds of full service with health NOT_SERVING, so that Envoy turns away first",
        "SECONDS",
    )
    drain_timeout: float = _option(35.0, _seconds, "after that: seconds that streams in flight may take", "SECONDS")
    log_format: LogFormat = _option(  # noqa: RUF009  # made by dataclasses.field
        "text", _one_of("text", "json"), "log lines for people or machines", "text|json"
    )
    log_level: str = _option(
        "info", _one_of("debug", "info", "warning", "error"), "least severe lines written", "debug|info|warning|error"
    )
    log_descriptors: bool = _option(False, _switch, "detections log descriptor values instead of a hash of them")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each setting; what is not given stays out of the namespace."""
    for item in fields(Settings):
        if item.metadata["metavar"] == ENVIRONMENT_ONLY:
            continue
        flag = "--" + item.name.replace("_", "-")
        default = getattr(item.default, "text", item.default)
        shown = "" if default in (False, (), "") else f" (default {default})"
        text = f"{item.metadata['help']}{shown} [{ENV_PREFIX}{item.name.upper()}]"
        if item.metadata["parse"] is _switch:
            parser.add_argument(flag, dest=item.name, action="store_true", default=argparse.SUPPRESS, help=text)
        else:
            action = "append" if item.name == "policy" else "store"
            metavar = item.metadata["metavar"]
            parser.add_argument(flag, dest=item.name, action=action, default=argparse.SUPPRESS, help=text, metavar=metavar)


def unknown(environ: Mapping[str, str]) -> list[str]:
    """One warning for each variable that looks like a setting and is none; a misspelt one would go unnoticed."""
    known = [item.name.upper() for item in fields(Settings)]
    found = []
    for variable in sorted(environ):
        name = variable.removeprefix(ENV_PREFIX)
        if variable.startswith(ENV_PREFIX) and name not in known and not name.startswith(_NOT_OURS):
            close = difflib.get_close_matches(name, known, n=1)
            found.append(f"{variable} is not a setting" + (f"; did you mean {ENV_PREFIX}{close[0]}?" if close else ""))
    return found


def read(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """Settings from parsed flags and the environment.

    Raises:
        UsageError: a value is unusable; the message names the flag or variable and what would be right.
    """
    values: dict[str, Any] = {}
    for item in fields(Settings):
        parse = item.metadata["parse"]
        variable = ENV_PREFIX + item.name.upper()
        if item.name in flags:
            given, origin = flags[item.name], "--" + item.name.replace("_", "-")
            if not isinstance(given, str):
                values[item.name] = tuple(given) if isinstance(given, list) else given
                continue
        elif variable in environ:
            given, origin = environ[variable], variable
        else:
            continue
        try:
            values[item.name] = parse(given)
        except ValueError as error:
            raise UsageError(f"{origin} {error}, not {given!r}") from None
    return Settings(**values)
