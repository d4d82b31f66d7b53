"""Fills the templates from options and guarded routes."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.resources import files

from extproc.apis import write_regex
from extproc.cli.envoy_config.options import EnvoyOptions, is_ip
from extproc.cli.envoy_config.routes import GuardedPath, plan_routes
from extproc.cli.envoy_config.template import cut_parts, fill
from extproc.cli.envoy_config.usage import write_event_rules, write_rules, write_streamed_matchers
from extproc.errors import UsageError
from extproc.policy.loader import PolicySet
from extproc.request.secrets import may_stand_in_query
from extproc.settings import Address, parse_subject_name

_BODY_MODES = {
    "strict": "BUFFERED",
    "tolerant": "BUFFERED_PARTIAL",
    "duplex": "FULL_DUPLEX_STREAMED",
}
_UPSTREAM_PROTOCOLS = {
    "http1": "explicit_http_config: {http_protocol_options: {}}",
    "http2": "explicit_http_config: {http2_protocol_options: {}}",
    "as-client": (
        "use_downstream_protocol_config: {http_protocol_options: {}, http2_protocol_options: {}}"
    ),
}
_SAN_TYPES = {"DNS": "DNS", "URI": "URI", "IP Address": "IP_ADDRESS"}
_ESCAPE = re.compile("%[0-9A-F]{2}")


def render_bootstrap(policies: PolicySet, options: EnvoyOptions) -> str:
    """The whole configuration as commented YAML; raises UsageError for a route without a place."""
    assert options.upstream is not None  # noqa: S101  # checked by the options
    routes = plan_routes(policies)
    tolerant = find_tolerant(routes, options.tolerant_routes)
    upstream = _describe_upstream(options.upstream, options)
    action = (
        "{cluster: upstream, timeout: 0s, auto_host_rewrite: true}"
        if upstream["sni"]
        else "{cluster: upstream, timeout: 0s}"
    )
    return fill(
        read_template("bootstrap"),
        {
            **describe_guard(policies, options),
            **upstream,
            "action": action,
            "guarded_routes": "".join(
                _render_route(
                    route, action, describe_route(policies, options, tolerant=route in tolerant)
                )
                for route in routes
            ),
            "unguarded": not any(route.path == "/" and not route.exact for route in routes),
        },
    )


def find_tolerant(routes: Sequence[GuardedPath], wanted: Sequence[str]) -> set[GuardedPath]:
    """The routes with these names or paths; raises UsageError if one is missing."""
    for one in wanted:
        if not any(one in (route.name, route.path) for route in routes):
            there = ", ".join(dict.fromkeys(route.path or route.name for route in routes)) or "none"
            raise UsageError(
                f"--tolerant-routes: {one!r} is not a guarded route; the guarded routes are {there}"
            )
    return {route for route in routes if route.name in wanted or route.path in wanted}


def describe_guard(policies: PolicySet, options: EnvoyOptions) -> Mapping[str, str | bool]:
    """The templates' values, except those of the routes and the upstream."""
    needed = policies.needs_answers()
    by_name = any(not (endpoint.is_unix or is_ip(endpoint.host)) for endpoint in options.endpoints)
    tolerant, usage = (
        _is_tolerant(options) or bool(options.tolerant_routes),
        _reads_usage(policies, options),
    )
    keeps_length = tolerant or options.body_mode == "duplex"
    hosts = [endpoint.host for endpoint in options.endpoints if endpoint.host]
    names = options.endpoint_san or dict.fromkeys(map(parse_subject_name, hosts))
    return {
        "envoy": "1.38" if keeps_length or usage else "1.36",
        "observing": options.observes,
        "waiting": not options.observes,
        "partial": options.shadow_mode == "partial",
        "cuts": tolerant,
        "keeps_length": keeps_length,
        "failure_mode_allow": str(options.failure_mode == "allow").lower(),
        **_describe_rules(options),
        "outcomes": needed and not options.observes,
        "secret_query": any(
            may_stand_in_query(key)
            for policy in policies.list_acting()
            for key in policy.spec.list_sources()
        ),
        "usage": usage,
        "budgets": any(policy.spec.list_budget_rules() for policy in policies.list_acting()),
        "loopguard_type": "STRICT_DNS" if by_name else "STATIC",
        "loopguard_endpoints": "\n".join(
            f"- endpoint: {{address: {_write_address(endpoint)}}}" for endpoint in options.endpoints
        ),
        # Envoy's certificate for Loopguard, and the accepted ones of Loopguard
        "endpoint_tls": bool(options.endpoint_cert),
        "endpoint_cert": _quote(options.endpoint_cert),
        "endpoint_key": _quote(options.endpoint_key),
        "endpoint_ca": _quote(options.endpoint_ca),
        "endpoint_sans": "\n".join(
            f"- {{san_type: {_SAN_TYPES[name.kind]}, matcher: {{exact: {_quote(name.value)}}}}}"
            for name in names
        ),
        "traced": (options.trace_tags or options.otlp is not None) and not options.observes,
        "collected": options.otlp is not None,
        "collector_type": "STATIC"
        if options.otlp is not None and is_ip(options.otlp.host)
        else "STRICT_DNS",
        "collector": _write_address(options.otlp) if options.otlp is not None else "",
        "listen": _write_address(options.listen),
        "admin": _write_address(options.admin),
        "buffer_limit": str(options.buffer_limit),
    }


def _is_tolerant(options: EnvoyOptions) -> bool:
    return options.shadow_mode == "partial" or (
        options.shadow_mode == "off" and options.body_mode == "tolerant"
    )


def describe_route(
    policies: PolicySet, options: EnvoyOptions, *, tolerant: bool
) -> Mapping[str, str | bool]:
    """The values of a guarded route; `tolerant` for a tolerant route beside strict ones."""
    observes = options.observes  # answers are ignored
    buffered = _BODY_MODES["tolerant" if tolerant or _is_tolerant(options) else options.body_mode]
    return {
        "usage": _reads_usage(policies, options),
        "bounded": not observes,
        "tolerant": tolerant,
        "body_mode": "STREAMED" if observes else buffered,
        "response_headers": "SKIP" if observes else "SEND",
    }


def _reads_usage(policies: PolicySet, options: EnvoyOptions) -> bool:
    return policies.needs_usage() and options.usage == "exact" and not options.observes


def write_shared_parts(options: EnvoyOptions) -> dict[str, str]:
    """The parts that are the same for every Envoy, as YAML, for the Helm chart.

    `entries` and `usage` report costs, `tracing` puts decisions on spans, and `cluster` is
    Loopguard's.
    """
    values = defaultdict[str, str | bool](
        str,
        {
            **_describe_rules(options),
            "waiting": True,
            "outcomes": True,
            "usage": True,
            "traced": True,
        },
    )
    found = cut_parts(read_template("bootstrap"), values)
    return {name: found[name] for name in ("entries", "usage", "tracing", "cluster")}


def _describe_rules(options: EnvoyOptions) -> Mapping[str, str]:
    return {
        "event_rules": write_event_rules(),
        "answer_rules": write_rules(),
        "streamed_matchers": write_streamed_matchers(),
        # A number with at least as many digits as the limit is at least a tenth of it.
        "large_digits": str(len(str(options.buffer_limit))),
    }


def _describe_upstream(upstream: Address, options: EnvoyOptions) -> Mapping[str, str | bool]:
    """The upstream's values.

    With TLS, its certificate must be for the host name, or for the address if it has none.
    """
    host, tls = upstream.host, options.speaks_tls
    return {
        "upstream": upstream.text,
        "upstream_type": "STATIC" if is_ip(host) else "LOGICAL_DNS",
        "upstream_address": _write_address(upstream),
        "upstream_protocol": _UPSTREAM_PROTOCOLS[options.upstream_protocol],
        "upstream_tls": tls,
        "upstream_ca": _quote(options.upstream_ca),
        "sni": _quote(host.rstrip(".")) if tls and not is_ip(host) else "",
        "san": _quote(host) if tls and is_ip(host) else "",
    }


def _render_route(route: GuardedPath, action: str, shown: Mapping[str, str | bool]) -> str:
    values = {
        "policies": ", ".join(route.policies) or "kill_switches",
        "name": _quote(route.name),
        "match": _write_match(route),
        "action": action,
    }
    # The bootstrap bounds all routes
    return fill(read_template("guarded_route"), {**values, **shown, "bounded": False})


def _write_match(route: GuardedPath) -> str:
    """A `RouteMatch` that matches the same paths as the selector."""
    if route.api:
        return f"{{safe_regex: {{regex: {_quote(write_regex(route.api))}}}}}"
    if "%" in route.path:
        return f"{{safe_regex: {{regex: {_quote(_write_regex(route))}}}}}"
    if route.exact:
        return f"{{path: {_quote(route.path)}}}"
    if route.path.endswith("/"):
        return f"{{prefix: {_quote(route.path)}}}"
    return f"{{path_separated_prefix: {_quote(route.path)}}}"


def _write_regex(route: GuardedPath) -> str:
    """A regex that accepts both cases of hex digits in escapes, which Envoy does not normalize."""
    path = _ESCAPE.sub(
        lambda found: "".join(_either_case(digit) for digit in found[0]), re.escape(route.path)
    )
    if route.exact:
        return path
    return f"{path}.*" if route.path.endswith("/") else f"{path}(/.*)?"


def _either_case(digit: str) -> str:
    return f"[{digit}{digit.lower()}]" if digit.isupper() else digit


def _write_address(place: Address) -> str:
    if place.is_unix:
        return f"{{pipe: {{path: {_quote(place.text.removeprefix('unix:'))}}}}}"
    both = ", ipv4_compat: true" if place.host == "::" else ""
    return f"{{socket_address: {{address: {_quote(place.host)}, port_value: {place.port}{both}}}}}"


def _quote(text: str) -> str:
    """Quote a string for YAML: as JSON, with Unicode line breaks escaped, too."""
    return "".join(
        char if char.isprintable() else f"\\U{ord(char):08x}"
        for char in json.dumps(text, ensure_ascii=False)
    )


def read_template(name: str) -> str:
    return (files("extproc.cli.envoy_config") / "templates" / f"{name}.yaml").read_text(
        encoding="utf-8"
    )
