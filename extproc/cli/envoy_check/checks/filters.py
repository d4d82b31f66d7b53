"""Checks the settings of the filter that calls Loopguard."""

from __future__ import annotations

from collections.abc import Iterator

from extproc.cli.envoy_check.config import Guard
from extproc.cli.envoy_check.findings import Finding, note

_JWT = "envoy.filters.http.jwt_authn"
_DEFAULT_MESSAGE_TIMEOUT = 0.2
_PATIENT = 1.0
"""Message timeouts above this, in seconds, are noticed by clients if Loopguard hangs."""


def check_processing_mode(guard: Guard) -> Iterator[Finding]:
    """Loopguard needs headers and whole bodies of requests, and no response bodies."""
    for route in guard.blind:
        problem = (
            "it is on for this route, but sends nothing of its requests: the route is not guarded"
        )
        right = (
            "processing_mode: {request_header_mode: SEND, request_body_mode: BUFFERED, "
            "request_trailer_mode: SEND}"
        )
        place = route.overrides[0].get("processing_mode") if route.overrides else route.mode
        yield Finding("processing-mode", place, problem, right, [route.name])
    for mode in {id(route.mode.value): route.mode for route in guard.guarded}.values():
        routes = [route.name for route in guard.guarded if route.mode.value is mode.value]
        headers, body = mode.get("request_header_mode"), mode.get("request_body_mode")
        if headers.text() == "SKIP":
            problem = "request headers are not sent to Loopguard: nothing is guarded"
            yield Finding("processing-mode", headers, problem, "request_header_mode: SEND", routes)
        for problem in _explain_body_mode(body.text("NONE"), observes=guard.observes):
            right = "request_body_mode: BUFFERED, BUFFERED_PARTIAL or FULL_DUPLEX_STREAMED"
            right = right if not guard.observes else "request_body_mode: STREAMED"
            yield Finding("processing-mode", body, problem, right, routes)
        answers = mode.get("response_body_mode")
        if answers.text("NONE") != "NONE":
            problem = (
                f"{answers.text()} sends Loopguard all answers, which it does not read: "
                "they arrive later, or only as a whole"
            )
            yield Finding("processing-mode", answers, problem, "response_body_mode: NONE", routes)
        trailers = mode.get("request_trailer_mode")
        if trailers.text() != "SEND" and body.text("NONE") != "NONE" and not guard.observes:
            problem = (
                "over HTTP/2, a request with trailers and no body is not counted "
                "(`no_body_phase`): any client can send one"
            )
            settable = not guard.filter.is_of_envoy_gateway
            yield Finding(
                "processing-mode",
                trailers,
                problem,
                "request_trailer_mode: SEND",
                routes,
                hurts=settable,
            )
        early = mode.get("response_header_mode")
        if early.text() == "SKIP" and body.text() == "BUFFERED":
            problem = (
                "Loopguard does not learn of a 413, and counts it as a client that left (`aborted`)"
            )
            yield note("processing-mode", early, problem, "response_header_mode: SEND", routes)


def _explain_body_mode(mode: str, *, observes: bool) -> Iterator[str]:
    if mode == "NONE":
        yield (
            "bodies are not sent: requests with one are not counted (`no_body_phase`), except "
            'with "body": "ignore"'
        )
    elif mode == "GRPC":
        yield (
            f"Envoy does not implement {mode} yet: bodies pass, and requests that have one are "
            "not counted (`body_mode`)"
        )
    elif mode == "STREAMED" and not observes:
        yield (
            "STREAMED sends the start of a request to the upstream before Loopguard has seen "
            "all of it and can refuse it"
        )
    elif observes and mode != "STREAMED":
        yield f"observability_mode does not support {mode}"


def check_notes(guard: Guard) -> Iterator[Finding]:
    """Envoy accepts an edited body only if Envoy or Loopguard has the whole body."""
    steers, partial = (
        guard.needs.steers,
        [route for route in guard.guarded if route.body_mode == "BUFFERED_PARTIAL"],
    )
    if partial and not guard.observes and (steers or not guard.needs.known):
        told = " and ".join(steers) or "policies with steer or land"
        problem = (
            f"notes of {told} become warnings, which no model reads: Envoy takes no edited "
            "bodies with BUFFERED_PARTIAL"
        )
        right = "request_body_mode: FULL_DUPLEX_STREAMED, which has no limit either, or BUFFERED"
        place = partial[0].mode.get("request_body_mode")
        yield Finding(
            "notes", place, problem, right, [route.name for route in partial], hurts=bool(steers)
        )


def check_content_length(guard: Guard) -> Iterator[Finding]:
    """Modes other than BUFFERED remove a header that upstreams may need."""
    place = guard.filter.config.get("allow_content_length_header")
    for mode in ("BUFFERED_PARTIAL", "FULL_DUPLEX_STREAMED"):
        routes = [route.name for route in guard.guarded if route.body_mode == mode]
        if routes and not place.flag():
            problem = (
                f"Envoy removes content-length with {mode}: upstreams get chunked bodies, "
                "which some refuse"
            )
            yield Finding(
                "content-length",
                place,
                problem,
                "allow_content_length_header: true (Envoy 1.38)",
                routes,
            )


def check_failure_mode(guard: Guard) -> Iterator[Finding]:
    """Requests should pass while Loopguard is down, unless the configuration says otherwise."""
    place = guard.filter.config.get("failure_mode_allow")
    if place.flag():
        return
    if guard.observes:
        problem = "requests fail with 500 while Loopguard is down, although it only observes"
        yield Finding("failure-mode", place, problem, "failure_mode_allow: true")
        return
    problem = (
        "while Loopguard is down, requests on guarded routes get a 500, or a 504 if it is too slow"
    )
    # Dumps and Envoy Gateway omit defaults, so a missing value may be a choice.
    chosen = (
        place.is_there
        or guard.manager.resources.version is not None
        or guard.filter.is_of_envoy_gateway
    )
    yield Finding(
        "failure-mode",
        place,
        problem,
        "failure_mode_allow: true; or set it to false, if that is intended",
        hurts=not chosen,
    )


def check_message_timeout(guard: Guard) -> Iterator[Finding]:
    """Envoy must wait longer for a throttled request than for other answers."""
    if guard.observes:
        return
    usual, longest = (
        guard.filter.config.get("message_timeout"),
        guard.filter.config.get("max_message_timeout"),
    )
    timeout = usual.seconds(_DEFAULT_MESSAGE_TIMEOUT)
    patience = max(timeout, longest.seconds(0))
    untimed = [route.name for route in guard.guarded if route.body_mode == "FULL_DUPLEX_STREAMED"]
    if untimed:
        problem = (
            "no timeout bounds Loopguard's answers in FULL_DUPLEX_STREAMED: if Loopguard "
            "hangs, requests wait"
        )
        yield note(
            "message-timeout",
            usual,
            problem,
            "BUFFERED, if such requests should pass instead",
            untimed,
        )
    if patience < guard.needs.hold and len(untimed) < len(list(guard.guarded)):
        problem = (
            f"a throttled request takes up to {guard.needs.hold:g} s, but Envoy waits only "
            f"{patience:g} s: it fails"
        )
        yield Finding(
            "message-timeout",
            longest,
            problem,
            f"max_message_timeout: {max(35, guard.needs.hold):g}s",
        )
    if timeout > _PATIENT:
        problem = f"if Loopguard hangs, each request waits {timeout:g} s for it"
        yield note(
            "message-timeout",
            usual,
            problem,
            "message_timeout: 0.2s, and max_message_timeout for throttled requests",
        )


def check_answers(guard: Guard) -> Iterator[Finding]:
    """Envoy must carry out refusals and warnings."""
    config = guard.filter.config
    place = config.get("disable_immediate_response")
    if place.flag():
        yield Finding(
            "answers", place, "each refusal becomes a 500", "disable_immediate_response: false"
        )
    rules = config.get("mutation_rules", "disallow_all")
    if rules.flag():
        yield Finding(
            "answers",
            rules,
            "refusals lose their headers, and warnings never arrive",
            "disallow_all: false",
        )
    if guard.observes:
        yield note(
            "observing",
            config.get("observability_mode"),
            "it only observes: no request waits for Loopguard, and none is refused",
        )


def check_metadata(guard: Guard) -> Iterator[Finding]:
    """Access logs and clients get Loopguard's decisions from metadata."""
    place = guard.filter.config.get("metadata_options", "receiving_namespaces", "untyped")
    if "loopguard" not in place.names() and not guard.observes:
        problem = (
            "Envoy drops Loopguard's metadata: no header for clients, nothing for the access log"
        )
        yield Finding("metadata", place, problem, "receiving_namespaces: {untyped: [loopguard]}")


def check_attributes(guard: Guard) -> Iterator[Finding]:
    """Envoy sends addresses and route names only if the filter requests them."""
    place = guard.filter.config.get("request_attributes")
    if guard.needs.reads("ip:") and "source.address" not in place.names():
        problem = (
            "policies with ip:address do not get the address, so callers without other "
            "limit keys are not counted"
        )
        yield Finding(
            "attributes",
            place,
            problem,
            "request_attributes: [source.address, xds.route_name]",
            hurts=guard.needs.known,
        )
    if guard.needs.names_routes and "xds.route_name" not in place.names():
        problem = "policies that select routes by name do not get the name: they never match"
        yield Finding(
            "attributes", place, problem, "request_attributes: [source.address, xds.route_name]"
        )


def check_claims(guard: Guard) -> Iterator[Finding]:
    """`jwt:` keys need claims that jwt_authn has verified before and forwards to Loopguard."""
    filters = list(guard.manager.filters)
    verifiers = [item for item in filters if item.is_a("jwt_authn.v3.JwtAuthentication")]
    if not guard.needs.reads("jwt:"):
        return
    if not verifiers and not guard.needs.requires("jwt:"):
        return  # other keys identify the callers
    if not verifiers:
        problem = (
            "policies have jwt: keys, and no filter verifies a token here: these keys are "
            "always missing"
        )
        yield Finding(
            "jwt",
            guard.manager.place.get("http_filters"),
            problem,
            f"{_JWT} before {guard.filter.name}",
        )
        return
    if filters.index(verifiers[0]) > filters.index(guard.filter):
        problem = "it verifies tokens after Loopguard is called: jwt: keys are always missing"
        yield Finding("jwt", verifiers[0].place, problem, f"before {guard.filter.name}")
    for name, provider in verifiers[0].config.get("providers").entries():
        place = provider.get("payload_in_metadata")
        if not place.text():
            yield Finding(
                "jwt",
                place,
                f"the claims of provider {name} are not stored for Loopguard",
                "payload_in_metadata: claims",
            )
    forwarded = guard.filter.config.get("metadata_options", "forwarding_namespaces", "untyped")
    if _JWT not in forwarded.names():
        yield Finding(
            "jwt",
            forwarded,
            "verified claims are not forwarded to Loopguard",
            f"forwarding_namespaces: {{untyped: [{_JWT}]}}",
        )
