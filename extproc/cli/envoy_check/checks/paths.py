"""Whether another spelling of a path escapes the guarded routes."""

from __future__ import annotations

from collections.abc import Iterator

from extproc.cli.envoy_check.config import Guard
from extproc.cli.envoy_check.findings import Finding, note


def check_spelling(guard: Guard) -> Iterator[Finding]:
    """Envoy chooses the route by the path as the client spelled it."""
    if len(guard.guarded) == len(guard.manager.routes):
        return  # whichever route it is, it is guarded
    examples = {"normalize_path": "/x/../v1/chat", "merge_slashes": "//v1/chat"}
    for name, spelling in examples.items():
        place = guard.manager.place.get(name)
        if not place.flag():
            problem = f"a client that writes {spelling} for /v1/chat takes another route, which may be unguarded"
            yield Finding("path-spelling", place, problem, f"{name}: true")


def check_escaped_slashes(guard: Guard) -> Iterator[Finding]:
    """Only the upstream knows whether %2F is a slash."""
    place = guard.manager.place.get("path_with_escaped_slashes_action")
    if len(guard.guarded) < len(guard.manager.routes) and not place.is_there:
        problem = "Envoy keeps %2F; an upstream that reads it as a slash, as ASGI applications do, sees another path than Envoy"
        yield note(
            "escaped-slashes", place, problem, "path_with_escaped_slashes_action: UNESCAPE_AND_FORWARD, or KEEP_UNCHANGED"
        )
