"""Findings of checks, and their codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from extproc.cli.envoy_check.document import ConfigPlace

CODES = {
    "alias": "An unguarded route rewrites its path to a guarded one.",
    "answers": "Envoy does not carry out refusals or warnings.",
    "attributes": "Loopguard does not receive client addresses or route names.",
    "buffer-limit": "A body that passes today gets a 413, or passes uncounted.",
    "caller-headers": "Loopguard does not get headers by which policies tell callers apart.",
    "circuit-breakers": "Above this number of concurrent requests, Envoy skips Loopguard.",
    "client-address": "Clients can choose their address.",
    "client-header": "Clients do not receive the warning header.",
    "cluster": "Loopguard's cluster is missing.",
    "content-length": "Upstreams get chunked bodies, because Envoy removes the header.",
    "envoy-headers": "Clients can multiply their requests with `x-envoy-` headers.",
    "escaped-slashes": "`%2F` can bypass the guarded routes if the upstream reads it as a slash.",
    "expect": "Clients that send `Expect: 100-continue` wait before they send the body.",
    "failure-mode": (
        "The configuration does not say what happens to requests while Loopguard is down."
    ),
    "filter-order": "The filter is behind the router.",
    "forged-marks": "Clients can send headers that only Loopguard should set.",
    "health-checks": "Envoy keeps calling a Loopguard that drains or hangs.",
    "host-port": "A client that adds a port to the host takes an unguarded virtual host.",
    "http2": "The cluster does not use HTTP/2, which gRPC needs.",
    "http2-window": "As `buffer-limit`, for HTTP/2 and HTTP/3: the limit is the stream's window.",
    "idle-timeout": "A throttled request ends because its stream is idle.",
    "jwt": (
        "`jwt:` keys are always missing: tokens are not verified, verified too late, or their "
        "claims are not forwarded."
    ),
    "kept-bodies": "An upstream can receive part of an upload twice.",
    "late-refusal": "A filter refuses or changes requests after Loopguard has counted them.",
    "late-route": "A filter can choose the route after Loopguard was skipped.",
    "message-timeout": "A throttled request fails because Envoy does not wait long enough.",
    "metadata": "Envoy drops what Loopguard reports about its decisions.",
    "mirrors": "Envoy sends copies of guarded requests to another cluster.",
    "not-judged": (
        "Something is not understood, so nothing is known about the requests that it concerns."
    ),
    "notes": (
        "Loopguard cannot add notes to the bodies that it gets, so steered requests get warnings."
    ),
    "nothing-guarded": "No route calls Loopguard.",
    "observing": "The filter only observes.",
    "outcomes": (
        "A policy depends on costs or errors, but Loopguard does not learn how requests end."
    ),
    "overrides": "A route has overrides that Envoy ignores.",
    "path-parameters": "`;x=1` can bypass the guarded routes if the upstream ignores it.",
    "path-spelling": "Another spelling of a path can bypass the guarded routes.",
    "processing-mode": (
        "Loopguard does not get headers, whole bodies and trailers, or gets responses."
    ),
    "request-timeout": "A stalled upload never ends, or a throttled request ends with 408.",
    "retries": "Envoy retries requests, and each counts once.",
    "routes-missing": "The routes come from RDS and are not in the file.",
    "second-listener": "Another listener leads to the same upstream without Loopguard.",
    "skipped": "A matcher around the filter skips Loopguard for some requests.",
    "told-limit": (
        "Loopguard does not know the buffer limit of partly buffered bodies, or assumes "
        "a larger one."
    ),
    "twice": "Two filters call Loopguard for the same request.",
    "unguarded": (
        "A route that does not call Loopguard takes requests that a policy selects, or a "
        "guarded route."
    ),
    "unmatched": "A guarded route sends requests that no policy matches.",
    "upgrades": "WebSockets use a filter chain without Loopguard.",
    "usage": "Tokens in answers are not read, so costs are estimated.",
}
"""Meanings of findings by code, in alphabetical order."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem, or something worth knowing, for an Envoy with Loopguard.

    Attributes:
        code: the name for `--ignore`.
        problem: what is wrong, and its consequence.
        right: the repair, in Envoy's words if it is a setting.
        routes: names of the routes concerned; empty for all guarded routes.
        hurts: False for a note, which does not fail the check.
    """

    code: str
    place: ConfigPlace
    problem: str
    right: str = ""
    routes: Sequence[str] = ()
    hurts: bool = True


def note(
    code: str, place: ConfigPlace, problem: str, right: str = "", routes: Sequence[str] = ()
) -> Finding:
    return Finding(code, place, problem, right, routes, hurts=False)


def report_unknown(place: ConfigPlace, what: str, routes: Sequence[str] = ()) -> Finding:
    return note(
        "not-judged",
        place,
        f"{what} cannot be judged",
        "look at it; --ignore not-judged if it is good",
        routes,
    )
