"""What clients can claim."""

from __future__ import annotations

import re
from collections.abc import Iterator

from extproc.cli.envoy_check.config import Guard
from extproc.cli.envoy_check.document import ConfigPlace
from extproc.cli.envoy_check.findings import Finding, note

MARKS = ("x-fairvisor-warning", "x-loopguard-steered", "x-loopguard-narrowed")
_MULTIPLIERS = ("x-envoy-retry-on", "x-envoy-max-retries")
_NO_NETWORK = "internal_address_config: {cidr_ranges: [{address_prefix: 0.0.0.0, prefix_len: 32}]}"
_EXPLICIT = (1, 36)
"""From this version of Envoy on, no address is internal unless it is configured."""


def check_address(guard: Guard) -> Iterator[Finding]:
    """If Envoy trusts X-Forwarded-For, a client can claim any address, and another one with every request."""
    manager = guard.manager.place
    place = manager.get("use_remote_address")
    if place.flag() or manager.get("original_ip_detection_extensions").is_there or not guard.needs.reads("ip:"):
        return
    problem = "Envoy takes the client's address from X-Forwarded-For, so a client can choose its own ip:address"
    right = "use_remote_address: true, and behind a load balancer xff_num_trusted_hops"
    yield Finding("client-address", place, problem, right, hurts=guard.needs.known)


def check_caller_headers(guard: Guard) -> Iterator[Finding]:
    """Headers that identify callers must reach Loopguard: no rule may keep them back, and no filter may remove them."""
    wanted = guard.needs.list_headers()
    rules = guard.filter.config.get("forward_rules")
    allowed, withheld = rules.get("allowed_headers"), rules.get("disallowed_headers")
    hidden = [name for name in wanted if (allowed.is_there and not _matches(allowed, name)) or _matches(withheld, name)]
    if hidden:
        problem = f"Loopguard does not get {' and '.join(hidden)}, by which policies tell callers apart"
        yield Finding("caller-headers", rules, problem, "forward_rules that forward them, or none")
    if "authorization" not in wanted or guard.needs.reads("jwt:"):
        return
    for item in guard.manager.filters:
        if item == guard.filter:
            break
        for name, provider in item.config.get("providers").entries() if item.is_a("jwt_authn.v3.JwtAuthentication") else ():
            if not provider.get("forward").flag():
                problem = f"provider {name} takes the token out of authorization, by which policies tell callers apart"
                yield Finding("caller-headers", provider.get("forward"), problem, "forward: true, or jwt: limit keys")


def _matches(patterns: ConfigPlace, name: str) -> bool:
    """Whether one of a list of StringMatchers matches the name of a header."""
    for pattern in patterns.get("patterns").items():
        found = [
            name == pattern.get("exact").text().lower(),
            pattern.get("prefix").is_there and name.startswith(pattern.get("prefix").text().lower()),
            pattern.get("suffix").is_there and name.endswith(pattern.get("suffix").text().lower()),
            pattern.get("contains").is_there and pattern.get("contains").text().lower() in name,
            pattern.get("safe_regex").is_there and _matches_regex(pattern.get("safe_regex", "regex").text(), name),
        ]
        if any(found):
            return True
    return False


def _matches_regex(pattern: str, name: str) -> bool:
    """Whether a pattern matches a whole name; patterns that only RE2 understands count as no match."""
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:
        return False


def check_envoy_headers(guard: Guard) -> Iterator[Finding]:
    """A client that Envoy regards as internal can have one request, which is counted once, sent many times."""
    place = guard.manager.place.get("internal_address_config")
    version = guard.manager.resources.version
    if _list_removed(guard).issuperset(_MULTIPLIERS):
        return
    ranges = [item.get("address_prefix").text() for item in place.get("cidr_ranges").items()]
    multiplies = "can make Envoy send one counted request many times, with x-envoy-retry-on and x-envoy-max-retries"
    if ranges and not all(prefix == "0.0.0.0" for prefix in ranges):  # noqa: S104  # recognised, not bound
        yield note("envoy-headers", place, f"a client in {', '.join(ranges)} {multiplies}", _NO_NETWORK)
    elif not place.is_there and version is None:
        yield note("envoy-headers", place, f"before Envoy 1.36, a client in a private network {multiplies}", _NO_NETWORK)
    elif not ranges and (place.is_there or (version or _EXPLICIT) < _EXPLICIT):
        yield Finding("envoy-headers", place, f"a client in a private network {multiplies}", _NO_NETWORK)


def check_marks(guard: Guard) -> Iterator[Finding]:
    """Clients must not send Loopguard's own headers."""
    missing = [name for name in MARKS if name not in _list_removed(guard)]
    if missing and not guard.observes:
        place = guard.manager.place.get("early_header_mutation_extensions")
        problem = f"a client can send {' and '.join(missing)} itself, and the upstream cannot tell it from Loopguard's"
        removals = ", ".join(f"{{remove: {name}}}" for name in missing)
        right = f"envoy.http.early_header_mutation.header_mutation with mutations: [{removals}]"
        yield Finding("forged-marks", place, problem, right)


def _list_removed(guard: Guard) -> set[str]:
    """Request headers that are removed before Loopguard is called."""
    found: set[str] = set()
    for extension in guard.manager.place.get("early_header_mutation_extensions").items():
        found.update(_list_removals(extension.get("typed_config").message()[1].get("mutations")))
    for item in guard.manager.filters:
        if item == guard.filter:
            break
        if item.is_a("header_mutation.v3.HeaderMutation"):
            found.update(_list_removals(item.config.get("mutations", "request_mutations")))
    return found


def _list_removals(mutations: ConfigPlace) -> Iterator[str]:
    return (mutation.get("remove").text().lower() for mutation in mutations.items())
