"""What a check has to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from extproc.cli.envoy_check.document import ConfigPlace

Code: TypeAlias = Literal[
    "answers",
    "attributes",
    "buffer-limit",
    "circuit-breakers",
    "client-address",
    "client-header",
    "cluster",
    "content-length",
    "envoy-headers",
    "escaped-slashes",
    "expect",
    "failure-mode",
    "filter-order",
    "forged-marks",
    "health-checks",
    "http2",
    "http2-window",
    "idle-timeout",
    "jwt",
    "kept-bodies",
    "late-route",
    "message-timeout",
    "metadata",
    "nothing-guarded",
    "observing",
    "outcomes",
    "overrides",
    "path-spelling",
    "processing-mode",
    "request-timeout",
    "retries",
    "routes-missing",
    "told-limit",
    "twice",
    "unguarded",
    "upgrades",
    "usage",
]
"""What findings are called, in the order of the alphabet."""

CODES: tuple[Code, ...] = get_args(Code)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that would hurt, or that whoever attaches Loopguard should know.

    Attributes:
        code: its name, by which it can be ignored.
        place: where it stands, or would have to stand.
        problem: what is, and what comes of it.
        right: what would be right, in Envoy's words where it is a setting.
        routes: the names of those that it is about; empty where it is about all that are guarded.
        hurts: whether it is a finding; else it is a note, which is no reason to fail.
    """

    code: Code
    place: ConfigPlace
    problem: str
    right: str = ""
    routes: Sequence[str] = ()
    hurts: bool = True


def note(code: Code, place: ConfigPlace, problem: str, right: str = "", routes: Sequence[str] = ()) -> Finding:
    """A finding that does not hurt."""
    return Finding(code, place, problem, right, routes, hurts=False)
