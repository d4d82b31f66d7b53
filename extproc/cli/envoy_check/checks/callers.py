"""Checks headers and addresses that clients can forge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from extproc.cli.envoy_check.config import Guard
from extproc.cli.envoy_check.document import ConfigPlace
from extproc.cli.envoy_check.findings import Finding, note, report_unknown
from extproc.cli.envoy_check.paths import matches

MARKS = ("x-fairvisor-warning", "x-loopguard-steered", "x-loopguard-narrowed")
_MULTIPLIERS = ("x-envoy-retry-on", "x-envoy-max-retries")
_NO_NETWORK = "internal_address_config: {cidr_ranges: [{address_prefix: 0.0.0.0, prefix_len: 32}]}"
_EXPLICIT = (1, 36)
"""Since this version of Envoy, no address is internal by default."""


def check_address(guard: Guard) -> Iterator[Finding]:
    """If Envoy trusts X-Forwarded-For, a client can claim any address."""
    manager = guard.manager.place
    place = manager.get("use_remote_address")
    if (
        place.flag()
        or manager.get("original_ip_detection_extensions").is_there
        or not guard.needs.reads("ip:")
    ):
        return
    problem = (
        "Envoy takes the client's address from X-Forwarded-For, so a client can choose its "
        "own ip:address"
    )
    right = "use_remote_address: true, and behind a load balancer xff_num_trusted_hops"
    yield Finding("client-address", place, problem, right, hurts=guard.needs.known)


def check_caller_headers(guard: Guard) -> Iterator[Finding]:
    """Headers that identify callers must reach Loopguard."""
    wanted = guard.needs.list_headers()
    rules = guard.filter.config.get("forward_rules")
    allowed, withheld = rules.get("allowed_headers"), rules.get("disallowed_headers")
    sent = {name: _matches_any(allowed, name) if allowed.is_there else True for name in wanted}
    kept_back = {name: _matches_any(withheld, name) for name in wanted}
    hidden = [name for name in wanted if sent[name] is False or kept_back[name]]
    unknown = [
        name for name in wanted if name not in hidden and None in (sent[name], kept_back[name])
    ]
    if unknown:
        yield report_unknown(
            rules, f"whether these rules keep {' and '.join(unknown)} from Loopguard"
        )
    if hidden:
        problem = (
            f"Loopguard does not get {' and '.join(hidden)}, by which policies tell callers apart"
        )
        yield Finding("caller-headers", rules, problem, "forward_rules that forward them, or none")
    if "authorization" not in wanted or guard.needs.reads("jwt:"):
        return
    for item in guard.manager.filters:
        if item == guard.filter:
            break
        for name, provider in (
            item.config.get("providers").entries()
            if item.is_a("jwt_authn.v3.JwtAuthentication")
            else ()
        ):
            if not provider.get("forward").flag():
                problem = (
                    f"provider {name} takes the token out of authorization, by which "
                    "policies tell callers apart"
                )
                yield Finding(
                    "caller-headers",
                    provider.get("forward"),
                    problem,
                    "forward: true, or jwt: limit keys",
                )


def _matches_any(patterns: ConfigPlace, name: str) -> bool | None:
    """Whether one of a list of StringMatchers matches a header's name; None if unknown."""
    answers = [_match(pattern, name) for pattern in patterns.get("patterns").items()]
    return True if True in answers else None if None in answers else False


def _match(pattern: ConfigPlace, name: str) -> bool | None:
    for form, fits in _FORMS.items():
        if pattern.get(form).is_there:
            return fits(name, pattern.get(form).text().lower())
    return (
        matches(pattern.get("safe_regex", "regex").text(), name)
        if pattern.get("safe_regex").is_there
        else None
    )


_FORMS: Mapping[str, Callable[[str, str], bool]] = {
    "exact": str.__eq__,
    "prefix": str.startswith,
    "suffix": str.endswith,
    "contains": str.__contains__,
}
"""Forms of a StringMatcher besides regular expressions; header names are in lower case."""


def check_envoy_headers(guard: Guard) -> Iterator[Finding]:
    """A client that Envoy treats as internal can make it send one counted request many times."""
    place = guard.manager.place.get("internal_address_config")
    version = guard.manager.resources.version
    if _list_removed_headers(guard).issuperset(_MULTIPLIERS):
        return
    ranges = [item.get("address_prefix").text() for item in place.get("cidr_ranges").items()]
    multiplies = (
        "can make Envoy send one counted request many times, with x-envoy-retry-on and "
        "x-envoy-max-retries"
    )
    # Recognised, not bound
    if ranges and not all(prefix == "0.0.0.0" for prefix in ranges):  # noqa: S104
        yield note(
            "envoy-headers", place, f"a client in {', '.join(ranges)} {multiplies}", _NO_NETWORK
        )
    elif not place.is_there and version is None:
        yield note(
            "envoy-headers",
            place,
            f"before Envoy 1.36, a client in a private network {multiplies}",
            _NO_NETWORK,
        )
    elif not ranges and (place.is_there or (version or _EXPLICIT) < _EXPLICIT):
        yield Finding(
            "envoy-headers", place, f"a client in a private network {multiplies}", _NO_NETWORK
        )


def check_marks(guard: Guard) -> Iterator[Finding]:
    """Clients must not be able to send Loopguard's own headers."""
    missing = [name for name in MARKS if name not in _list_removed_headers(guard)]
    if missing and not guard.observes:
        place = guard.manager.place.get("early_header_mutation_extensions")
        problem = (
            f"a client can send {' and '.join(missing)} itself, and the upstream cannot "
            "tell it from Loopguard's"
        )
        removals = ", ".join(f"{{remove: {name}}}" for name in missing)
        right = f"envoy.http.early_header_mutation.header_mutation with mutations: [{removals}]"
        yield Finding("forged-marks", place, problem, right)


def _list_removed_headers(guard: Guard) -> set[str]:
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
