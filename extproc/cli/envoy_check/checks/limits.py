"""Checks limits of the size and time of requests."""

from __future__ import annotations

from collections.abc import Iterator

from extproc.cli.envoy_check.config import Guard, GuardedRoute
from extproc.cli.envoy_check.document import ConfigPlace
from extproc.cli.envoy_check.findings import Finding, note
from extproc.ext_proc.stream import BUFFER_LIMIT_METADATA
from extproc.ext_proc.upload import SMALLEST_LIMIT

_DEFAULT_LIMIT = 2**20
_DEFAULT_WINDOW = 2**24
"""Envoy 1.40's default; older versions have 256 MiB for HTTP/2."""

_DEFAULT_IDLE = 300.0


def check_buffer_limit(guard: Guard) -> Iterator[Finding]:
    """A buffered body above the limit gets a 413.

    For HTTP/2 and HTTP/3, see `check_http2_window`.
    """
    if not _speaks_http1(guard):
        return
    listener = guard.manager.listener.get("per_connection_buffer_limit_bytes")
    for mode, hurts in (("BUFFERED", True), ("BUFFERED_PARTIAL", False)):
        small = [
            route
            for route in guard.guarded
            if route.body_mode == mode and _find_limit(guard, route) < guard.needs.uploads
        ]
        if small:
            limit = min(_find_limit(guard, route) for route in small)
            outcome = (
                "gets a 413 from Envoy, although it would pass on unguarded routes"
                if hurts
                else "passes uncounted"
            )
            yield Finding(
                "buffer-limit",
                listener,
                f"a body above {limit:,.0f} bytes {outcome}",
                f"per_connection_buffer_limit_bytes: {guard.needs.uploads}",
                [route.name for route in small],
                hurts=hurts,
            )


def _find_limit(guard: Guard, route: GuardedRoute) -> float:
    """The buffer limit of a route: the listener's, which a route or its host can only raise."""
    limit = guard.manager.listener.get("per_connection_buffer_limit_bytes").number(_DEFAULT_LIMIT)
    return max(
        limit,
        *(level.get("request_body_buffer_limit").number(0) for level in route.route.levels[:2]),
    )


def _is_quic(guard: Guard) -> bool:
    return guard.manager.listener.get("udp_listener_config", "quic_options").is_there


def _speaks_http1(guard: Guard) -> bool:
    return guard.manager.place.get("codec_type").text("AUTO") in ("AUTO", "HTTP1") and not _is_quic(
        guard
    )


def _find_window(guard: Guard) -> ConfigPlace | None:
    """The setting of the stream window; None for HTTP/1 alone. The listener has that of HTTP/3."""
    manager, name = guard.manager, "initial_stream_window_size"
    if _is_quic(guard):
        return manager.listener.get(
            "udp_listener_config", "quic_options", "quic_protocol_options", name
        )
    return (
        None
        if manager.place.get("codec_type").text() == "HTTP1"
        else manager.place.get("http2_protocol_options", name)
    )


def check_http2_window(guard: Guard) -> Iterator[Finding]:
    """With HTTP/2 and HTTP/3, the stream's window limits buffered bodies."""
    window = _find_window(guard)
    buffered = [route.name for route in guard.guarded if route.body_mode == "BUFFERED"]
    if not buffered or window is None:
        return
    version, options = (
        (3, "quic_protocol_options") if _is_quic(guard) else (2, "http2_protocol_options")
    )
    right = (
        f"{options}: {{initial_stream_window_size: {guard.needs.uploads}, "
        f"max_concurrent_streams: 100}}"
    )
    limit = window.number(_DEFAULT_WINDOW)
    if limit < guard.needs.uploads:
        problem = (
            f"an HTTP/{version} body above {limit:,.0f} bytes gets a 413 from Envoy: the "
            "stream's window is the limit"
        )
        yield Finding("http2-window", window, problem, right, buffered)
    elif not window.is_there and not _is_quic(guard):
        problem = (
            "each stream of HTTP/2 may buffer as much as Envoy's default window: 16 MiB, in "
            "older ones 256 MiB"
        )
        yield note("http2-window", window, problem, right)


def check_told_limit(guard: Guard) -> Iterator[Finding]:
    """With the buffer limit, Loopguard can tell a cut body from one that ends in trailers."""
    partial = [route for route in guard.guarded if route.body_mode == "BUFFERED_PARTIAL"]
    if not partial or guard.observes:
        return
    names, window = [route.name for route in partial], _find_window(guard)
    limits = [_find_limit(guard, route) for route in partial if _speaks_http1(guard)]
    limits += [window.number(_DEFAULT_WINDOW)] if window is not None else []
    limit = int(min(limits))
    place = guard.filter.config.get("grpc_service", "initial_metadata")
    told = [
        item.get("value").text()
        for item in place.items()
        if item.get("key").text() == BUFFER_LIMIT_METADATA
    ]
    known = int(told[0]) if told and told[0].isdigit() else SMALLEST_LIMIT
    right = f'initial_metadata: [{{key: {BUFFER_LIMIT_METADATA}, value: "{limit}"}}]'
    if known > limit:
        problem = (
            f"Envoy cuts bodies off above {limit:,} bytes, but Loopguard takes bodies up to "
            f"{known:,} bytes as complete"
        )
        yield Finding(
            "told-limit", place, f"{problem}: different requests look equal", right, names
        )
    elif not told and known < limit:
        problem = (
            f"a body above {known:,} bytes that comes without its length and ends in "
            "trailers is not counted"
        )
        yield note(
            "told-limit",
            place,
            f"{problem} (`body_truncated`): an HTTP/2 client can send one",
            right,
            names,
        )


def check_request_timeout(guard: Guard) -> Iterator[Finding]:
    """A timeout must end stalled uploads, but not throttled requests."""
    place = guard.manager.place.get("request_timeout")
    timeout = place.seconds(0)
    if guard.observes:
        return
    if 0 < timeout < guard.needs.hold:
        problem = (
            f"a throttled request is held for up to {guard.needs.hold:g} s, but Envoy "
            f"answers 408 after {timeout:g} s"
        )
        yield Finding(
            "request-timeout",
            place,
            problem,
            f"request_timeout: {max(60, guard.needs.hold + 1):g}s",
        )
    for route in guard.guarded if not timeout else ():
        idle, name = _find_idle(guard, route), "max_stream_duration"
        ends = (
            route.route.place.get("route", name, name),
            guard.manager.place.get("common_http_protocol_options", name),
        )
        if not idle.seconds(_DEFAULT_IDLE) and not any(place.seconds(0) for place in ends):
            problem = "a stalled upload stays buffered, and open in Loopguard, without a limit"
            yield Finding(
                "request-timeout",
                idle,
                problem,
                "idle_timeout: 300s in the route's action",
                [route.name],
            )


def _find_idle(guard: Guard, route: GuardedRoute) -> ConfigPlace:
    own = route.route.place.get("route", "idle_timeout")
    return own if own.is_there else guard.manager.place.get("stream_idle_timeout")


def check_idle_timeout(guard: Guard) -> Iterator[Finding]:
    """An idle timeout must not end a throttled request, whose stream is idle."""
    for route in guard.guarded:
        nearest = _find_idle(guard, route)
        timeout = nearest.seconds(_DEFAULT_IDLE)
        if 0 < timeout < guard.needs.hold and not guard.observes:
            problem = (
                f"a throttled request is held for up to {guard.needs.hold:g} s, but ends "
                f"after {timeout:g} s without activity"
            )
            yield Finding(
                "idle-timeout",
                nearest,
                problem,
                f"at least {guard.needs.hold + 1:g}s",
                [route.name],
            )


def check_expect(guard: Guard) -> Iterator[Finding]:
    """An upstream that gets the headers after the body cannot answer `Expect: 100-continue`."""
    place = guard.manager.place.get("proxy_100_continue")
    waiting = [
        route.name
        for route in guard.guarded
        if route.body_mode.startswith(("BUFFERED", "FULL_DUPLEX"))
    ]
    if place.flag() and waiting and not guard.observes:
        problem = (
            "a client that sends Expect: 100-continue waits: the upstream should answer, "
            "but sees nothing before the body"
        )
        yield note(
            "expect", place, problem, "proxy_100_continue: false, so that Envoy answers", waiting
        )
