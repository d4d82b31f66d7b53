"""A complete Envoy bootstrap, made from policies: what `loopguard envoy-config` prints.

The template at the end is the document; its comments go out with it, because whoever runs Envoy reads those and not this file.
The code only works out what depends on the policies: which paths Envoy shows to Loopguard, and what those routes are called.
Any other request never meets Loopguard, and is not buffered either.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import NamedTuple

from extproc.errors import UsageError
from extproc.policy.bundle import Policy
from extproc.policy.loader import PolicySet
from extproc.settings import Address, address

_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?\Z")
_WINDOW = range(65_535, 2**31)
"""What an HTTP/2 flow-control window may be, in bytes (RFC 9113 section 6.5.2): request bodies are buffered in one."""

_BODY_MODES = {"strict": "BUFFERED", "tolerant": "BUFFERED_PARTIAL"}
_UPSTREAM_PROTOCOLS = {
    "http1": "explicit_http_config: {http_protocol_options: {}}",
    "http2": "explicit_http_config: {http2_protocol_options: {}}",
    "as-client": "use_downstream_protocol_config: {http_protocol_options: {}, http2_protocol_options: {}}",
}
_FAILURE_MODES = {"allow": "true", "deny": "false"}
_SHADOW_MODES = ("off", "observability", "partial")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvoyOptions:
    """What the bootstrap is to say that no policy knows; every field is a flag.

    Attributes:
        upstream: where guarded and unguarded requests go, `HOST:PORT`.
        upstream_protocol: what it speaks: `http1`, `http2`, or `as-client` where it speaks both.
        upstream_tls: speak TLS to it and verify its certificate.
        upstream_ca: the file with the certificates that may have signed it, on the machine where Envoy runs.
        listen: where Envoy listens, `IP:PORT`.
        admin: where Envoy's own admin page listens, `IP:PORT`.
        endpoints: each Loopguard, `HOST:PORT` or `unix:/path`.
        body_mode: what becomes of a body above the limit: `strict` refuses it, `tolerant` lets it through uncounted.
        buffer_limit: largest request body that is looked at, in bytes.
        failure_mode: what becomes of a request that Loopguard did not answer for: `allow` or `deny`.
        shadow_mode: how to keep Loopguard out of the way: `observability` shows it requests that do not wait, `partial` waits
            for it and refuses no body; `off` is neither.
    """

    upstream: str
    upstream_protocol: str = "http1"
    upstream_tls: bool = False
    upstream_ca: str = "/etc/ssl/certs/ca-certificates.crt"
    listen: str = "127.0.0.1:10000"
    admin: str = "127.0.0.1:9901"
    endpoints: tuple[str, ...] = ("127.0.0.1:50051",)
    body_mode: str = "strict"
    buffer_limit: int = 10 * 2**20
    failure_mode: str = "allow"
    shadow_mode: str = "off"


_DEFAULTS = EnvoyOptions(upstream="")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `loopguard envoy-config`: one for each option, and the policies."""

    def flag(name: str, metavar: str, text: str, *, default: object = None, required: bool = False) -> None:
        shown = "" if default is None else f" (default {default})"
        parser.add_argument(f"--{name}", default=default, required=required, metavar=metavar, help=text + shown)

    parser.add_argument("--policy", action="append", required=True, metavar="PATH", help="policy file or directory; repeatable")
    flag("upstream", "HOST:PORT", "where the requests go", required=True)
    text = "what it speaks: http2 for gRPC; as-client: both, each request goes on in the client's"
    flag("upstream-protocol", "http1|http2|as-client", text, default=_DEFAULTS.upstream_protocol)
    parser.add_argument("--upstream-tls", action="store_true", help="speak TLS to it and verify its certificate")
    flag("upstream-ca", "PATH", "whose certificates to trust then", default=_DEFAULTS.upstream_ca)
    flag("listen", "IP:PORT", "where Envoy listens", default=_DEFAULTS.listen)
    flag("admin", "IP:PORT", "where Envoy's own admin page listens", default=_DEFAULTS.admin)
    parser.add_argument(
        "--endpoints",
        action="append",
        metavar="HOST:PORT|unix:/PATH,...",
        help=f"where Loopguard listens; repeatable or separated by commas (default {_DEFAULTS.endpoints[0]})",
    )
    text = "what becomes of a body above the limit: strict refuses it with 413, tolerant lets it through uncounted"
    flag("body-mode", "strict|tolerant", text, default=_DEFAULTS.body_mode)
    flag("buffer-limit", "BYTES", "largest request body that is looked at", default=_DEFAULTS.buffer_limit)
    text = "what becomes of a request that Loopguard did not answer for"
    flag("failure-mode", "allow|deny", text, default=_DEFAULTS.failure_mode)
    text = (
        "only look on: observability: requests never wait, nothing is enforced; partial: no body is refused, for serve --shadow"
    )
    flag("shadow-mode", "|".join(_SHADOW_MODES), text, default=_DEFAULTS.shadow_mode)


def run(options: argparse.Namespace, policies: PolicySet) -> int:
    """Print the bootstrap.

    Returns:
        the exit code.

    Raises:
        UsageError: a flag cannot be used, or a policy selects by a route that cannot be placed.
    """
    given = [item.strip() for text in options.endpoints or () for item in text.split(",")]
    chosen = EnvoyOptions(
        upstream=options.upstream,
        upstream_protocol=options.upstream_protocol,
        upstream_tls=options.upstream_tls,
        upstream_ca=options.upstream_ca,
        listen=options.listen,
        admin=options.admin,
        endpoints=tuple(given) or _DEFAULTS.endpoints,
        body_mode=options.body_mode,
        buffer_limit=_bytes("--buffer-limit", str(options.buffer_limit)),
        failure_mode=options.failure_mode,
        shadow_mode=options.shadow_mode,
    )
    sys.stdout.write(bootstrap(policies, chosen))
    if not any(_acting(policies)):
        sys.stderr.write("warning: no policy has loop_detection enabled, so this guards nothing\n")
    enforcing = [policy.id for policy in _acting(policies) if policy.spec.mode == "enforce"]
    if chosen.shadow_mode == "partial" and enforcing:
        sys.stderr.write(f"warning: these policies would act: {', '.join(enforcing)}; start Loopguard with serve --shadow\n")
    return 0


def bootstrap(policies: PolicySet, options: EnvoyOptions) -> str:
    """The whole configuration as commented YAML.

    Raises:
        UsageError: an option cannot be used, or a policy selects by a route that cannot be placed.
    """
    upstream = _peer("--upstream", options.upstream, "api.example.com:443")
    peers = [_peer("--endpoints", text, "127.0.0.1:50051 or unix:/run/loopguard.sock") for text in options.endpoints]
    resolved = [peer.text for peer in peers if not (peer.is_unix or _is_ip(peer.host))]
    if upstream.is_unix:
        raise UsageError(f"--upstream must be HOST:PORT, such as api.example.com:443, not {options.upstream!r}")
    if resolved and any(peer.is_unix for peer in peers):  # validates, and then Envoy never finds any of them healthy
        raise UsageError(f"--endpoints must not mix Unix sockets with host names such as {resolved[0]!r}; give its IP address")
    shadow = _shadow_mode(options)
    observes = shadow == "observability"  # answers are ignored: there is nothing to hold, to tell or to receive
    named_tls = options.upstream_tls and not _is_ip(upstream.host)
    action = "{cluster: upstream, timeout: 0s, auto_host_rewrite: true}" if named_tls else "{cluster: upstream, timeout: 0s}"
    guards = _guards(policies)
    return _fill(
        _BOOTSTRAP,
        upstream=options.upstream,
        admin=_socket(_local("--admin", options.admin)),
        listen=_socket(_local("--listen", options.listen)),
        buffer_limit=str(options.buffer_limit),
        shadow_note={"observability": _OBSERVABILITY_NOTE, "partial": _PARTIAL_NOTE}.get(shadow, ""),
        buffer_note=_WATERMARK_NOTE if observes else _BUFFER_NOTE,
        request_timeout="" if observes else _REQUEST_TIMEOUT,
        idle_note=_UNHELD_IDLE_NOTE if observes else _IDLE_NOTE,
        details_note="" if observes else _DETAILS_NOTE,
        decisions="" if observes else _DECISIONS,
        client_warning="" if observes else _CLIENT_WARNING,
        receiving="" if observes else _RECEIVING,
        asking=_OBSERVING if observes else _waiting(options, tolerant=shadow == "partial"),
        rewrite_note=_REWRITE_NOTE if named_tls else "",
        routes="".join(_routes(guards, action)),
        loopguard_type="STRICT_DNS" if resolved else "STATIC",
        loopguard_endpoints="\n".join(f"- endpoint: {{address: {_socket(peer)}}}" for peer in peers),
        upstream_type="STATIC" if _is_ip(upstream.host) else "LOGICAL_DNS",
        upstream_protocol=_one_of("--upstream-protocol", options.upstream_protocol, _UPSTREAM_PROTOCOLS),
        upstream_endpoint=f"- endpoint: {{address: {_socket(upstream)}}}",
        upstream_tls=_tls(upstream, options.upstream_ca) if options.upstream_tls else "",
    )


def _shadow_mode(options: EnvoyOptions) -> str:
    """How to keep Loopguard out of the way.

    Raises:
        UsageError: there is no such way, or another flag is against it.
    """
    mode = options.shadow_mode
    if mode not in _SHADOW_MODES:
        raise UsageError(f"--shadow-mode must be one of {', '.join(_SHADOW_MODES)}, not {mode!r}")
    for flag, given, default in (
        ("--failure-mode", options.failure_mode, _DEFAULTS.failure_mode),
        ("--body-mode", options.body_mode, _DEFAULTS.body_mode),
    ):
        if mode != "off" and given != default:
            raise UsageError(f"{flag} must be left out where --shadow-mode {mode} decides that, not {given!r}")
    return mode


def _waiting(options: EnvoyOptions, *, tolerant: bool) -> str:
    """The part of the filter that has requests wait for Loopguard's answer."""
    body_mode = "tolerant" if tolerant else options.body_mode
    return _fill(
        _WAITING,
        body_mode=_one_of("--body-mode", body_mode, _BODY_MODES),
        content_length=_CONTENT_LENGTH if body_mode == "tolerant" else "",
        failure_mode_allow=_one_of("--failure-mode", options.failure_mode, _FAILURE_MODES),
    )


class _Guard(NamedTuple):
    """A path that Envoy shows to Loopguard.

    Attributes:
        path: as the policies have it.
        exact: the path alone, not what is below it.
        policies: the ids that asked for it.
        name: Envoy's name of the route.
    """

    path: str
    exact: bool
    policies: tuple[str, ...]
    name: str

    def match(self) -> str:
        """The route's match, which agrees with what the selectors mean."""
        if self.exact:
            return f"{{path: {_quoted(self.path)}}}"
        if self.path.endswith("/"):
            return f"{{prefix: {_quoted(self.path)}}}"
        return f"{{path_separated_prefix: {_quoted(self.path)}}}"


class _Place(NamedTuple):
    """Where policies are anchored."""

    path: str
    exact: bool

    def around(self) -> Iterator[_Place]:
        """This place and every prefix that its requests have, the longest first."""
        yield self
        yield _Place(self.path, exact=False)
        for end in range(len(self.path) - 1, -1, -1):
            if self.path[end] == "/":
                yield _Place(self.path[: end + 1], exact=False)
                yield _Place(self.path[:end], exact=False)

    def rank(self) -> tuple[bool, int]:
        """Orders places as Envoy has to try them: exact paths, then prefixes, the longest first."""
        return not self.exact, -len(self.path)


_EVERYWHERE = _Place("/", exact=False)


def _guards(policies: PolicySet) -> list[_Guard]:
    """The guarded paths, most specific first.

    Raises:
        UsageError: policies ask for route names that one set of routes cannot have.
    """
    places: dict[_Place, list[Policy]] = {}
    by_name_alone: list[Policy] = []
    for policy in _acting(policies):
        anchors = list(_anchors(policy))
        for place in anchors:
            places.setdefault(place, []).append(policy)
        if not anchors:
            by_name_alone.append(policy)
    names = {place: _own_name(place, users) for place, users in places.items()}
    homeless = [policy for policy in by_name_alone if not set(names.values()) & set(_route_names(policy))]
    if homeless:
        places.setdefault(_EVERYWHERE, []).extend(homeless)
        names[_EVERYWHERE] = _name_of_everywhere(homeless, places[_EVERYWHERE])
    return [
        _Guard(place.path, place.exact, tuple(policy.id for policy in places[place]), _name(place, names))
        for place in sorted(places, key=_Place.rank)
    ]


def _acting(policies: PolicySet) -> Iterator[Policy]:
    for source in policies.sources:
        for policy in source.policies:
            if policy.spec.detectors():
                yield policy


def _anchors(policy: Policy) -> Iterator[_Place]:
    selector = policy.spec.selector
    if selector.pathExact is not None:
        yield _Place(selector.pathExact, exact=True)
    if selector.pathPrefix is not None:
        yield _Place(selector.pathPrefix, exact=False)


def _route_names(policy: Policy) -> Sequence[str]:
    return policy.spec.selector.routes or ()


def _own_name(place: _Place, users: Sequence[Policy]) -> str:
    """The first route name that suits every policy anchored here; empty when none of them asks for one."""
    asking = [_route_names(policy) for policy in users if _route_names(policy)]
    if not asking:
        return ""
    common = next((name for name in asking[0] if all(name in names for names in asking)), "")
    if not common:
        told = ", ".join(f"{policy.id} ({' or '.join(_route_names(policy))})" for policy in users if _route_names(policy))
        raise UsageError(
            f"--policy: the path {place.path} can have one route name, but its policies ask for different ones: {told}; "
            "let them share a name, or leave `routes` out"
        )
    return common


def _name_of_everywhere(homeless: Sequence[Policy], users: Sequence[Policy]) -> str:
    """The name of the catch-all route, which is where policies go that select by a route's name alone."""
    wanted = dict.fromkeys(name for policy in homeless for name in _route_names(policy))
    if len(wanted) > 1:
        raise UsageError(
            f"--policy: {', '.join(policy.id for policy in homeless)} select by route alone, and nothing says on which paths "
            f"the routes {', '.join(wanted)} are; add pathExact or pathPrefix to those selectors"
        )
    return _own_name(_EVERYWHERE, users)


def _name(place: _Place, names: Mapping[_Place, str]) -> str:
    """A route's name: its own, else that of the nearest path around it, whose policies see this route's requests too."""
    name = next((names[around] for around in place.around() if names.get(around)), "")
    return name or f"guarded:{place.path}{'' if place.exact else '*'}"


def _routes(guards: Sequence[_Guard], action: str) -> Iterator[str]:
    for guard in guards:
        yield _fill(
            _GUARDED,
            policies=", ".join(guard.policies),
            name=_quoted(guard.name),
            match=guard.match(),
            action=action,
        )
    if not any(guard.path == "/" and not guard.exact for guard in guards):
        yield _fill(_UNGUARDED, action=action)


def _peer(flag: str, text: str, example: str) -> Address:
    """Where Envoy connects to: `HOST:PORT` or `unix:/path`."""
    try:
        peer = address(text)
    except ValueError:
        peer = None
    if peer is None or not (peer.is_unix or (peer.port and (_is_ip(peer.host) or _HOST_NAME.match(peer.host)))):
        raise UsageError(f"{flag} must be HOST:PORT, such as {example}, not {text!r}")
    if text.startswith(":"):
        raise UsageError(f"{flag} must name a host, such as {example}, not {text!r}")
    return peer


def _local(flag: str, text: str) -> Address:
    """Where Envoy listens; it resolves no names for that."""
    try:
        local = address(text)
    except ValueError:
        local = None
    if local is None or local.is_unix or not _is_ip(local.host):
        raise UsageError(f"{flag} must be IP:PORT, such as 127.0.0.1:10000 or 0.0.0.0:10000, not {text!r}")
    return local


def _bytes(flag: str, text: str) -> int:
    if not text.isdecimal() or int(text) not in _WINDOW:
        raise UsageError(f"{flag} must be a number of bytes from {_WINDOW[0]} to {_WINDOW[-1]}, not {text!r}")
    return int(text)


def _one_of(flag: str, text: str, choices: Mapping[str, str]) -> str:
    if text not in choices:
        raise UsageError(f"{flag} must be one of {', '.join(choices)}, not {text!r}")
    return choices[text]


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _socket(place: Address) -> str:
    """Envoy's `Address`."""
    if place.is_unix:
        return f"{{pipe: {{path: {_quoted(place.text.removeprefix('unix:'))}}}}}"
    both = ", ipv4_compat: true" if place.host == "::" else ""
    return f"{{socket_address: {{address: {_quoted(place.host)}, port_value: {place.port}{both}}}}}"


def _tls(upstream: Address, authorities: str) -> str:
    if _is_ip(upstream.host):  # no name to ask for: the certificate has to be made out to the address
        san = f"match_typed_subject_alt_names: [{{san_type: IP_ADDRESS, matcher: {{exact: {_quoted(upstream.host)}}}}}]"
        return _fill(_TLS, sni="", ca=_quoted(authorities), san=san)
    name = upstream.host.rstrip(".")
    sni = f"sni: {_quoted(name)}\n# The certificate has to be made out to that name.\nauto_sni_san_validation: true"
    return _fill(_TLS, sni=sni, ca=_quoted(authorities), san="")


def _quoted(text: str) -> str:
    """A string that YAML takes for exactly that string: as in JSON, with Unicode's own line breaks escaped as well."""
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in json.dumps(text, ensure_ascii=False))


def _fill(template: str, **values: str) -> str:
    """The template with its `$names` replaced.

    A name alone on its line is a block: each of its lines takes on the line's indentation, and an empty block leaves no line.
    """

    def value(found: re.Match[str]) -> str:
        indent, block, inline = found.groups()
        if inline is not None:
            return values[inline]
        lines = values[block].rstrip("\n").split("\n") if values[block] else ()
        return "".join(f"{indent}{line}".rstrip() + "\n" for line in lines)

    return re.sub(r"^( *)\$(\w+)\n|\$(\w+)", value, template, flags=re.MULTILINE)


_BOOTSTRAP = """\
# Envoy in front of $upstream, with Loopguard watching for loops. Made by `loopguard envoy-config` for Envoy 1.36 and newer.
#
# Which requests Envoy shows to Loopguard is decided by the routes below, what becomes of them by the policies, which Loopguard
# reloads by itself. So make this file again only when the paths or routes in the selectors of policies change.
# After editing it by hand: envoy --mode validate -c FILE
$shadow_note

# Envoy's own page: /stats, /clusters, /config_dump, and also /quitquitquit. Keep it on an address that only operators reach.
admin:
  address: $admin

static_resources:
  listeners:
  - name: ingress
    address: $listen
    $buffer_note
    per_connection_buffer_limit_bytes: $buffer_limit
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: ingress
          # The caller's address is that of the connection. Otherwise anybody could name another in X-Forwarded-For, and be
          # counted as somebody new with every request. Behind a load balancer add xff_num_trusted_hops.
          use_remote_address: true
          # Addresses in private networks are no reason to believe x-envoy-... headers.
          internal_address_config: {}
          # Routes, fingerprints and the upstream all see the path exactly as the client sent it. A path that Envoy tidied up
          # would break signed requests, and would no longer be what the client repeats.
          normalize_path: false
          merge_slashes: false
          $idle_note
          stream_idle_timeout: 900s
          # But the headers of a request come at once or never.
          request_headers_timeout: 10s
          $request_timeout
          # For HTTP/2 requests the buffer limit is the stream's window.
          http2_protocol_options:
            initial_stream_window_size: $buffer_limit
            # One connection's share: Envoy's default is 2^31, and so many buffered bodies.
            max_concurrent_streams: 100
          # Loopguard's warning is Loopguard's to give: a client that sends one is not believed.
          early_header_mutation_extensions:
          - name: envoy.http.early_header_mutation.header_mutation
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation
              mutations:
              - remove: x-fairvisor-warning
          # Realtime APIs. Loopguard lets upgrades through without counting them.
          upgrade_configs:
          - upgrade_type: websocket
          access_log:
          - name: envoy.access_loggers.stdout
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.access_loggers.stream.v3.StdoutAccessLog
              log_format:
                # Fields without a value are left out; older Envoys write null.
                omit_empty_values: true
                json_format:
                  time: "%START_TIME%"
                  client: "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%"
                  method: "%REQ(:METHOD)%"
                  authority: "%REQ(:AUTHORITY)%"
                  # With its query, as fingerprints have it. Where queries hold secrets: %PATH(NQ)%
                  path: "%REQ(:PATH)%"
                  route: "%ROUTE_NAME%"
                  status: "%RESPONSE_CODE%"
                  $details_note
                  details: "%RESPONSE_CODE_DETAILS%"
                  flags: "%RESPONSE_FLAGS%"
                  duration_ms: "%DURATION%"
                  bytes_received: "%BYTES_RECEIVED%"
                  bytes_sent: "%BYTES_SENT%"
                  upstream: "%UPSTREAM_HOST%"
                  $decisions
          http_filters:
          # Policies with jwt: limit keys read the claims that this filter has verified. Fill in, then uncomment:
          # - name: envoy.filters.http.jwt_authn
          #   typed_config:
          #     "@type": type.googleapis.com/envoy.extensions.filters.http.jwt_authn.v3.JwtAuthentication
          #     providers:
          #       idp:
          #         issuer: https://idp.example.com/
          #         audiences: [llm-gateway]
          #         local_jwks: {filename: /etc/envoy/jwks.json}
          #         forward: true
          #         payload_in_metadata: claims
          #     rules:
          #     - match: {prefix: /}
          #       requires: {provider_name: idp}
          - name: envoy.filters.http.ext_proc
            # Off, except on the guarded routes, which turn it on: other requests cost nothing, and are not buffered either.
            disabled: true
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
              grpc_service:
                # No timeout here: it does not bound a stream of messages.
                envoy_grpc: {cluster_name: loopguard}
              $asking
              # For ip:address in limit_keys, and for selectors that name routes.
              request_attributes: [source.address, xds.route_name]
              metadata_options:
                # Verified claims, to Loopguard.
                forwarding_namespaces: {untyped: [envoy.filters.http.jwt_authn]}
                $receiving
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
          route_config:
            name: ingress
            virtual_hosts:
            - name: all
              # Hosts and methods in selectors are Loopguard's to match; here only paths are.
              domains: ["*"]
              $client_warning
              # The first route that matches is taken: exact paths, then prefixes, the longest first. A timeout of 0s is none:
              # an answer may take as long as it streams.
              $rewrite_note
              routes:
              $routes

  clusters:
  - name: loopguard
    # Several endpoints share the requests between them, so they need a store in common: loopguard serve --store redis://...
    type: $loopguard_type
    # Where there is an IPv4 address, it works; an IPv6 address may exist and lead nowhere.
    dns_lookup_family: V4_PREFERRED
    connect_timeout: 0.25s
    load_assignment:
      cluster_name: loopguard
      endpoints:
      - lb_endpoints:
        $loopguard_endpoints
    # gRPC is HTTP/2.
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http2_protocol_options: {}}
    # Every guarded request is a stream here until it is decided, a throttled one for as long as it is held. Past Envoy's
    # default of 1024 Loopguard would not be asked.
    circuit_breakers: &unlimited
      thresholds:
      - {max_connections: 1000000, max_pending_requests: 1000000, max_requests: 1000000}
    # A Loopguard that drains says so here, and gets no new requests; one that is back is used again within a second.
    health_checks:
    - interval: 1s
      no_traffic_interval: 1s
      timeout: 1s
      healthy_threshold: 1
      unhealthy_threshold: 2
      grpc_health_check: {service_name: envoy.service.ext_proc.v3.ExternalProcessor}
    # When none is healthy, failure_mode_allow decides at once. Envoy's default is to try them all the same, and then each
    # request would wait for a timeout.
    common_lb_config: {healthy_panic_threshold: {value: 0}}

  - name: upstream
    type: $upstream_type
    dns_lookup_family: V4_PREFERRED
    connect_timeout: 5s
    load_assignment:
      cluster_name: upstream
      endpoints:
      - lb_endpoints:
        $upstream_endpoint
    # What the upstream speaks; a request is translated where its client speaks another. `--upstream-protocol`, or here:
    #   http1      explicit_http_config: {http_protocol_options: {}}     almost any API; WebSockets
    #   http2      explicit_http_config: {http2_protocol_options: {}}    gRPC needs it
    #   as-client  use_downstream_protocol_config: {http_protocol_options: {}, http2_protocol_options: {}}
    #              for an upstream that speaks both: gRPC beside WebSockets. One that does not answers HTTP/2 clients with 502.
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        $upstream_protocol
    # Answers of models are slow, so many are in flight; how many is for the upstream to limit.
    circuit_breakers: *unlimited
    $upstream_tls
"""

_BUFFER_NOTE = """\
# The largest request body that a guarded route can buffer; Envoy's default of 1 MiB is less than long prompts with images.
"""

_WATERMARK_NOTE = """\
# So much of a request may be under way inside Envoy. No body is buffered as a whole, and none is too large.
"""

_IDLE_NOTE = """\
# How long nothing at all may happen on a request: models think before they answer. It has to exceed the longest hold
# of a throttled request, which is 30 s.
"""

_UNHELD_IDLE_NOTE = """\
# How long nothing at all may happen on a request: models think before they answer.
"""

_DETAILS_NOTE = """\
# loop_detected when Loopguard refused the request, request_payload_too_large above the buffer limit.
"""

_DECISIONS = """\
# Set when a policy saw a loop.
loop_action: "%DYNAMIC_METADATA(loopguard:action)%"
loop_reason: "%DYNAMIC_METADATA(loopguard:reason)%"
loop_policy: "%DYNAMIC_METADATA(loopguard:policy)%"
loop_count: "%DYNAMIC_METADATA(loopguard:count)%"
loop_warning: "%DYNAMIC_METADATA(loopguard:warning)%"
# Set when a policy in shadow mode would have acted.
loop_shadow_action: "%DYNAMIC_METADATA(loopguard:shadow_action)%"
loop_shadow_policy: "%DYNAMIC_METADATA(loopguard:shadow_policy)%"
loop_shadow_count: "%DYNAMIC_METADATA(loopguard:shadow_count)%"
# Set on every request that a policy matched, when Loopguard runs with --record.
fingerprint: "%DYNAMIC_METADATA(loopguard:fingerprint)%"
tenant: "%DYNAMIC_METADATA(loopguard:tenant)%"
body_crc32: "%DYNAMIC_METADATA(loopguard:body_crc32)%"
"""

_CLIENT_WARNING = """\
response_headers_to_add:
# Tells the client what Loopguard told the upstream. Without a warning the value is empty, and no header is added.
- header: {key: x-fairvisor-warning, value: "%DYNAMIC_METADATA(loopguard:warning)%"}
  append_action: OVERWRITE_IF_EXISTS_OR_ADD
"""

_RECEIVING = """\
# Decisions, from Loopguard: for the access log and for the header on responses. Others would be dropped.
receiving_namespaces: {untyped: [loopguard]}
"""

_REQUEST_TIMEOUT = """\
# And all of a request in this time, or it ends with 408: an upload that stalls would be buffered, and watched by
# Loopguard, for as long as it likes. The answer may take longer, and so may what streams both ways: the time ends
# when the upstream has the request or an answer begins. Here, too, the longest hold has to fit in. Clients that
# stream a request for longer, as those of gRPC may, need more.
request_timeout: 60s
"""

_WAITING = """\
# What becomes of a request when Loopguard is away, too slow or broken. true: it goes on, and counts in the metric
# http.ingress.ext_proc.failure_mode_allowed. false: the client gets 500, or 504 when Loopguard was too slow.
failure_mode_allow: $failure_mode_allow
# Headers and the whole body of the request, nothing of the response. BUFFERED refuses a body above the buffer
# limit with 413; BUFFERED_PARTIAL lets it through, and Loopguard does not count it.
processing_mode:
  request_header_mode: SEND
  request_body_mode: $body_mode
  request_trailer_mode: SKIP
  response_header_mode: SKIP
  response_body_mode: NONE
  response_trailer_mode: SKIP
$content_length
# How long Loopguard may take for an answer. It needs about a millisecond.
message_timeout: 0.2s
# How far it may extend that for a request which it throttles: the longest hold is 30 s, plus a margin of 2 s.
# Without this line every throttled request would fail.
max_message_timeout: 35s
"""

_OBSERVABILITY_NOTE = """\
#
# Made with --shadow-mode observability: Loopguard is shown requests and can do nothing about them, whatever its policies say.
# No request waits for it, none fails without it, and no body is too large. It decides and counts as ever, so its metrics and
# its log say what it would have done. Clients and the access log are told nothing, because Envoy ignores all answers. Envoy
# does not slow clients down for it either: bodies that Loopguard reads more slowly than they come pile up in Envoy's memory.
# To enforce, make this file again without the flag.
"""

_PARTIAL_NOTE = """\
#
# Made with --shadow-mode partial, for `loopguard serve --shadow`: no request fails without Loopguard, and no body gets a 413;
# one above the buffer limit passes uncounted. Requests wait for Loopguard's answer, which takes about a millisecond, and the
# access log has what it would have done. It is Loopguard's own shadow mode that keeps it from acting: without --shadow, what
# an enforcing policy answers is carried out. Needs Envoy 1.38.
"""

_OBSERVING = """\
# Requests go on at once, and answers are ignored. Without failure_mode_allow they would still fail while Loopguard is
# away.
observability_mode: true
failure_mode_allow: true
# Bodies are shown in the pieces in which they come; whole ones can be had only by waiting.
processing_mode:
  request_header_mode: SEND
  request_body_mode: STREAMED
  request_trailer_mode: SKIP
  response_header_mode: SKIP
  response_body_mode: NONE
  response_trailer_mode: SKIP
# How long Loopguard may go on reading when the request is over. It hangs up as soon as it has decided.
deferred_close_timeout: 5s
"""

_GUARDED = """\
# Asked for by: $policies
- name: $name
  match: $match
  route: $action
  typed_per_filter_config:
    envoy.filters.http.ext_proc:
      "@type": type.googleapis.com/envoy.config.route.v3.FilterConfig
      config:
        "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute
        overrides: {}
"""

_UNGUARDED = """\
# Everything else: no policy could match it, so Loopguard never sees it.
- name: unguarded
  match: {prefix: /}
  route: $action
"""

_CONTENT_LENGTH = """\
# Envoy takes content-length away under BUFFERED_PARTIAL, and upstreams that insist on one would get chunks. Needs Envoy 1.38.
allow_content_length_header: true
"""

_REWRITE_NOTE = """\
# The upstream's TLS server goes by its own name, so the host header is changed to it, after Loopguard has seen the client's.
"""

_TLS = """\
transport_socket:
  name: envoy.transport_sockets.tls
  typed_config:
    "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
    $sni
    common_tls_context:
      # Envoy stops at TLS 1.2 as a client unless told otherwise.
      tls_params: {tls_maximum_protocol_version: TLSv1_3}
      validation_context:
        # Without this Envoy would trust any certificate. The path is that of Debian, Ubuntu, Alpine and Envoy's images.
        trusted_ca: {filename: $ca}
        $san
"""
