"""The settings of `serve`: flag, else environment (`LOOPGUARD_<NAME>`), else default."""
# interpreted: read once, at startup

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from ipaddress import ip_address
from typing import Any, Literal, NamedTuple

from extproc import options
from extproc.logs import LogFormat
from extproc.options import ENVIRONMENT_ONLY, choice, option, parse_integer, parse_seconds, switch

ENV_PREFIX = "LOOPGUARD_"
_NOT_OURS = ("SERVICE_", "PORT", "TEST_", "COMPILED")
"""Variables of Kubernetes for a Service named `loopguard`, and of tests and installs."""


_HOST_PORT = re.compile(r"(?P<host>[^\s:\[\]/]*|\[[0-9A-Fa-f:.]+(?:%\w+)?\]):(?P<port>[0-9]{1,5})")
_DNS_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")


@dataclass(frozen=True, slots=True)
class Address:
    """The address to listen on: `host:port` or `unix:/path`."""

    text: str
    host: str = ""
    port: int = 0

    @property
    def is_unix(self) -> bool:
        """Whether it is a Unix socket rather than TCP."""
        return self.text.startswith("unix:")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        if self.is_unix or self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_address(text: str) -> Address:
    """Parse `host:port`, `[::1]:port`, `:port` (all interfaces; 0: any) or `unix:/path`."""
    if text.startswith("unix:/"):
        return Address(text)
    found = _HOST_PORT.fullmatch(text)
    # 16 bits
    if found is None or text.startswith("unix:") or int(found["port"]) > 65_535:  # noqa: PLR2004
        raise ValueError("must be HOST:PORT or unix:/PATH")
    host, port = found["host"], found["port"]
    return Address(text if host else f"[::]:{port}", host.strip("[]") or "::", int(port))


class SubjectName(NamedTuple):
    """A name in a certificate: a subjectAltName (RFC 5280 section 4.2.1.6).

    Attributes:
        kind: `DNS`, `URI` or `IP Address`, as in Python's `ssl`.
        value: the name; in lower case for `DNS`, in its shortest form for `IP Address`.
    """

    kind: str
    value: str


MAX_SHOWN = 200
"""Maximum length of a repeated result in `/loops`, in characters."""

_parse_positive = parse_integer(1)
_parse_delay = parse_seconds(0, 86_400)
_parse_timeout = parse_seconds(0.001, 60)  # no client waits longer than a minute


def _parse_price(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text):
        raise ValueError("must be US dollars per million input tokens, such as 2.50")
    return float(text)


def _parse_shown(text: str) -> int:
    if not re.fullmatch("[0-9]{1,3}", text) or int(text) > MAX_SHOWN:
        raise ValueError(f"must be a number of characters, at most {MAX_SHOWN}")
    return int(text)


def is_scope(text: str) -> bool:
    """Whether the text is a valid attachment name."""
    return re.fullmatch(r"[A-Za-z0-9_.-]{0,64}", text) is not None


def _parse_scope(text: str) -> str:
    if not is_scope(text):
        raise ValueError("must be at most 64 of the characters A-Z a-z 0-9 _ . -")
    return text


def parse_subject_name(text: str) -> SubjectName:
    """Parse a URI such as a SPIFFE ID, an IP address or a DNS name; else raise ValueError."""
    if "://" in text:
        return SubjectName("URI", text)
    try:
        return SubjectName("IP Address", str(ip_address(text)))
    except ValueError:
        pass
    if not _DNS_NAME.fullmatch(text):
        raise ValueError(
            "must be a DNS name, an IP address or a URI such as "
            "spiffe://cluster.local/ns/gateways/sa/envoy"
        )
    return SubjectName("DNS", text.lower())


def parse_subject_names(text: str) -> tuple[SubjectName, ...]:
    """Parse subject names separated by commas; raises ValueError as `parse_subject_name` does."""
    return tuple(parse_subject_name(item.strip()) for item in text.split(",") if item.strip())


def _parse_paths(text: str) -> tuple[str, ...]:
    return tuple(path for path in text.split(os.pathsep) if path)


def _parse_words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of `loopguard serve`; each is a flag and an environment variable."""

    policy: tuple[str, ...] = option(
        (),
        _parse_paths,
        (
            "policy file or directory; repeatable (in the environment separated by ':'); default: "
            "the "
            "preset agents in shadow mode"
        ),
        "PATH",
        gather=tuple,
    )
    namespace_of: tuple[str, ...] = option(
        (),
        _parse_words,
        "policies below PATH may only select these hosts, paths and routes, and their ids must "
        "start with PREFIX; repeatable"
        " (in the environment separated by spaces)",
        "PATH=host:NAME,path:/PREFIX,route:NAME,id:PREFIX",
        gather=tuple,
    )
    listen: Address = option(
        "127.0.0.1:50051", parse_address, "where Envoy connects (gRPC)", "HOST:PORT|unix:/PATH"
    )
    tls_cert: str = option("", str, "server certificate chain; turns on mutual TLS", "PATH")
    tls_key: str = option("", str, "private key of the server certificate", "PATH")
    tls_client_ca: str = option("", str, "CA certificates to verify clients with", "PATH")
    tls_client_san: tuple[SubjectName, ...] = option(
        (),
        parse_subject_names,
        "accept only clients with one of these subjectAltNames; repeatable or separated by commas",
        "DNS|IP|URI,...",
        gather=",".join,
    )
    allow_plaintext: bool = switch("do not warn about a port without TLS")
    transport: Literal["fast", "grpcio"] = choice(
        "gRPC server: fast is built in, grpcio is the reference", "fast", "grpcio"
    )
    admin: Address = option(
        "127.0.0.1:9900",
        parse_address,
        "the admin port: the page of loops, /metrics and others",
        "HOST:PORT",
    )
    admin_token_file: str = option(
        "",
        str,
        (
            "file of tokens, one per line, for orders over the admin port and on its page; default "
            "on loopback: one for this server's user, for commands"
        ),
        "PATH",
    )
    admin_socket: str = option(
        "", str, "also serve the admin port on a Unix socket, for this server's user only", "PATH"
    )
    store: str = option("memory://", str, "where counts are kept", "URL")
    store_timeout: float = option(
        0.05, _parse_timeout, "how long a request waits for the store", "SECONDS"
    )
    store_password: str = option(
        "", str, "password of the store, if it is not in the URL", ENVIRONMENT_ONLY
    )
    store_password_file: str = option(
        "", str, "file with the password of the store, read on every connect", "PATH"
    )
    hash_key_file: str = option(
        "",
        str,
        (
            "key of keyed hashes, the same for all replicas (default: they share one through the "
            "store)"
        ),
        "PATH",
    )
    scope: str = option(
        "", _parse_scope, "processes with different scopes count separately in one store", "NAME"
    )
    on_store_error: Literal["allow", "reject"] = choice(
        "while the store is down, allow: count in this process; reject: answer 503",
        "allow",
        "reject",
    )
    on_bad_file: Literal["exit", "skip"] = choice(
        (
            "if a policy file has errors at startup, exit: end the process; skip: start with the "
            "other files"
        ),
        "exit",
        "skip",
    )
    shadow: bool = switch("force every policy into shadow mode: count and report, never act")
    record: bool = switch(
        "add a record of each matched request, with hashed callers, to the access log"
    )
    allow_unverified_jwt: bool = switch(
        "read jwt: limit keys from bearer tokens with unverified signatures"
    )
    allow_unenforced: bool = switch(
        "start even if parts of a bundle are not enforced, such as rules with ip:country"
    )
    max_streams: int = option(
        20_000, _parse_positive, "maximum open streams; further requests pass at once", "N"
    )
    max_connections: int = option(
        10_000,
        _parse_positive,
        "maximum connections; beyond it, the longest idle ones are closed",
        "N",
    )
    max_throttled: int = option(
        10_000,
        _parse_positive,
        "maximum throttled requests at once; a tenth of that per tenant",
        "N",
    )
    drain_delay: float = option(
        5.0,
        _parse_delay,
        "after SIGTERM, how long to keep serving with health NOT_SERVING",
        "SECONDS",
    )
    drain_timeout: float = option(
        35.0, _parse_delay, "after the delay, time for open streams to finish", "SECONDS"
    )
    log_format: LogFormat = choice("format of log lines", "text", "json")
    log_level: str = choice(
        "lowest level to log", "debug", "info", "warning", "error", default="info"
    )
    show_callers: bool = switch(
        "show the values of limit keys in logs and /loops, not only hashes (SIGUSR1 toggles it)"
    )
    show_results: int = option(
        0,
        _parse_shown,
        "show the first N characters, at most 200, of the result that a loop repeats, in /loops to "
        "local requests",
        "N",
    )
    events: str = option(
        "", str, "send events to other programs, as CloudEvents", "FILE|-|https://..."
    )
    events_secret_file: str = option("", str, "file with the secret that signs events", "PATH")
    events_ca: str = option("", str, "CA certificates to verify the receiver with", "PATH")
    price: float = option(
        0.0,
        _parse_price,
        "US dollars per million input tokens, in /loops; default: from genai-prices",
        "USD",
    )

    @property
    def watches(self) -> bool:
        """Whether no policy is given, so that the preset is used in shadow mode."""
        return not self.policy


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each setting. Flags that are not given stay out of the namespace."""
    options.add_flags(parser, Settings, ENV_PREFIX)


def find_unknown(environ: Mapping[str, str]) -> list[str]:
    """A warning for each variable with the prefix that is not a setting and may be misspelt."""
    known = [item.name.upper() for item in fields(Settings)]
    found = []
    for variable in sorted(environ):
        name = variable.removeprefix(ENV_PREFIX)
        if variable.startswith(ENV_PREFIX) and name not in known and not name.startswith(_NOT_OURS):
            close = difflib.get_close_matches(name, known, n=1)
            found.append(
                f"{variable} is not a setting"
                + (f"; did you mean {ENV_PREFIX}{close[0]}?" if close else "")
            )
    return found


def read_settings(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """Read settings from flags and the environment; UsageError names the flag or variable."""
    return options.read_options(Settings, flags, environ, ENV_PREFIX)
