"""The flags of `loopguard envoy-config`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from ipaddress import ip_address

from extproc.errors import UsageError
from extproc.options import choice, option, require_together, switch
from extproc.settings import Address, SubjectName, parse_address, parse_subject_names

_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?\Z")
HTTPS = 443
_WINDOW = range(65_535, 2**31)
"""Valid HTTP/2 flow-control windows (RFC 9113 section 6.5.2), which limit buffered bodies."""


def is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _parse_fitting(text: str, fits: Callable[[Address], object], wanted: str) -> Address:
    try:
        address = parse_address(text)
    except ValueError:
        address = None
    if address is None or not fits(address):
        raise ValueError(f"must be {wanted}")
    return address


def _may_be_peer(address: Address) -> object:
    return address.is_unix or (
        address.port and (is_ip(address.host) or _HOST_NAME.match(address.host))
    )


def _parse_peer(text: str, example: str = "127.0.0.1:50051 or unix:/run/loopguard.sock") -> Address:
    peer = _parse_fitting(text, _may_be_peer, f"HOST:PORT, such as {example}")
    if text.startswith(":"):
        raise ValueError(f"must name a host, such as {example}")
    return peer


def _parse_endpoints(text: str) -> tuple[Address, ...]:
    peers = tuple(_parse_peer(item.strip()) for item in text.split(","))
    resolved = [peer.text for peer in peers if not (peer.is_unix or is_ip(peer.host))]
    # Envoy accepts the mix, but none becomes healthy
    if resolved and any(peer.is_unix for peer in peers):
        raise ValueError(
            f"must not mix Unix sockets with host names such as {resolved[0]!r}: give its IP "
            "address"
        )
    return peers


def _parse_server(text: str, example: str) -> Address:
    peer = _parse_peer(text, example)
    if peer.is_unix:
        raise ValueError(f"must be HOST:PORT, such as {example}")
    return peer


def _parse_collector(text: str) -> Address:
    peer = _parse_server(text, "127.0.0.1:4317")
    if peer.port == HTTPS:
        raise ValueError(
            "must be a collector that speaks gRPC without TLS, such as one beside Envoy that "
            "sends spans on"
        )
    return peer


def _parse_local(text: str) -> Address:
    wanted = "IP:PORT, such as 127.0.0.1:10000 or 0.0.0.0:10000"
    return _parse_fitting(text, lambda local: not local.is_unix and is_ip(local.host), wanted)


def _parse_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError("must be names, separated by commas")
    return names


def _parse_bytes(text: str) -> int:
    if not text.isdecimal() or int(text) not in _WINDOW:
        raise ValueError(f"must be a number of bytes from {_WINDOW[0]} to {_WINDOW[-1]}")
    return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvoyOptions:
    upstream: Address | None = option(
        None,
        partial(_parse_server, example="api.example.com:443"),
        "where requests go; required for a bootstrap",
        "HOST:PORT",
    )
    upstream_protocol: str = choice(
        "protocol of the upstream: http2 for gRPC; as-client: the client's",
        "http1",
        "http2",
        "as-client",
    )
    upstream_tls: bool = switch(
        "use TLS to the upstream and verify its certificate; always so on port 443"
    )
    upstream_ca: str = option(
        "/etc/ssl/certs/ca-certificates.crt",
        str,
        "CA certificates to verify the upstream with",
        "PATH",
    )
    listen: Address = option("127.0.0.1:10000", _parse_local, "where Envoy listens", "IP:PORT")
    admin: Address = option(
        "127.0.0.1:9901", _parse_local, "where Envoy's admin page listens", "IP:PORT"
    )
    endpoints: tuple[Address, ...] = option(
        "127.0.0.1:50051",
        _parse_endpoints,
        "where Loopguard listens; repeatable or separated by commas",
        "HOST:PORT|unix:/PATH,...",
        gather=",".join,
    )
    endpoint_cert: str = option(
        "", str, "client certificate chain of Envoy for Loopguard; turns on mutual TLS", "PATH"
    )
    endpoint_key: str = option("", str, "private key of that certificate", "PATH")
    endpoint_ca: str = option("", str, "CA certificates to verify Loopguard with", "PATH")
    endpoint_san: tuple[SubjectName, ...] = option(
        (),
        parse_subject_names,
        (
            "accepted names in Loopguard's certificate; repeatable or separated by commas; "
            "default: "
            "the endpoints' hosts"
        ),
        "DNS|IP|URI,...",
        gather=",".join,
    )
    body_mode: str = choice(
        "what happens to a body above the limit: strict refuses it with 413, tolerant lets it "
        "through uncounted; "
        "duplex has no limit, and Loopguard holds bodies instead of Envoy",
        "strict",
        "tolerant",
        "duplex",
    )
    buffer_limit: int = option(10 * 2**20, _parse_bytes, "largest request body to inspect", "BYTES")
    tolerant_routes: tuple[str, ...] = option(
        (),
        _parse_names,
        "tolerant routes beside strict ones, such as uploads: by name, or by the path in their "
        "policies; repeatable or "
        "separated by commas",
        "NAME|/PATH,...",
        gather=",".join,
    )
    failure_mode: str = choice(
        "what happens to a request that Loopguard did not answer", "allow", "deny"
    )
    shadow_mode: str = choice(
        (
            "count without enforcing: observability: requests never wait; partial: no body is "
            "refused, for serve --shadow"
        ),
        "off",
        "observability",
        "partial",
    )
    usage: str = choice(
        "where cost limits get tokens from: exact: Envoy 1.38 or newer reads them in answers; "
        "estimated: the sizes of requests and answers",
        "exact",
        "estimated",
    )
    trace_tags: bool = switch("put Loopguard's decisions on Envoy's spans, as tags of its tracing")
    otlp: Address | None = option(
        None,
        _parse_collector,
        "send Envoy's spans to this OpenTelemetry collector (OTLP over gRPC), with these tags",
        "HOST:PORT",
    )
    snippet: bool = switch(
        "print the parts that an existing configuration needs, each with its place"
    )
    routes: tuple[str, ...] = option(
        (),
        _parse_names,
        (
            "with --snippet: names of the routes to guard; repeatable or separated by commas; "
            "default: from the policies' paths"
        ),
        "NAME,...",
        gather=",".join,
    )

    @property
    def observes(self) -> bool:
        return self.shadow_mode == "observability"

    @property
    def speaks_tls(self) -> bool:
        return self.upstream_tls or (self.upstream is not None and self.upstream.port == HTTPS)

    def __post_init__(self) -> None:
        if self.snippet:
            mine = (
                "upstream",
                "upstream_protocol",
                "upstream_tls",
                "upstream_ca",
                "listen",
                "admin",
                "otlp",
            )
            self._refuse(mine, "with --snippet, because they are in that configuration")
        elif self.upstream is None:
            raise UsageError(
                "envoy-config needs --upstream HOST:PORT, or --snippet for an existing "
                "configuration"
            )
        else:
            self._refuse(
                ("routes",),
                "without --snippet, because policies name the routes of a whole bootstrap",
            )
            if not self.speaks_tls:
                self._refuse(("upstream_ca",), "without --upstream-tls")
        require_together(self, ("endpoint_cert", "endpoint_key", "endpoint_ca"), ("endpoint_san",))
        if (
            self.endpoint_cert
            and not self.endpoint_san
            and any(endpoint.is_unix for endpoint in self.endpoints)
        ):
            raise UsageError(
                "--endpoint-cert needs --endpoint-san as well, because a Unix socket has no name"
            )
        if self.shadow_mode != "off":
            why = f"where --shadow-mode {self.shadow_mode} decides that"
            self._refuse(("failure_mode", "body_mode", "tolerant_routes"), why)
        if self.observes:
            self._refuse(
                ("trace_tags", "otlp"),
                "where --shadow-mode observability has Envoy ignore all answers",
            )
        if self.body_mode == "tolerant":
            self._refuse(("tolerant_routes",), "where --body-mode tolerant makes all of them so")
        if self.body_mode == "duplex":
            self._refuse(("tolerant_routes",), "where --body-mode duplex has no limit")

    def _refuse(self, names: Sequence[str], why: str) -> None:
        for item in fields(self):
            given = getattr(self, item.name)
            if item.name in names and given != item.default:
                told = f"{given!r}" if isinstance(given, str) else "given"
                raise UsageError(
                    f"--{item.name.replace('_', '-')} must be left out {why}, not {told}"
                )
