"""All checks: every function `check_...` of these files, in the order of the report.

Each takes a filter that calls Loopguard, with its guarded routes and the policies' needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from extproc.cli.envoy_check.checks import (
    answers,
    callers,
    clusters,
    detours,
    filters,
    late,
    limits,
    order,
    routes,
)
from extproc.cli.envoy_check.config import Guard
from extproc.cli.envoy_check.findings import Finding

_FILES = (detours, late, order, filters, limits, callers, routes, clusters, answers)

CHECKS: tuple[Callable[[Guard], Iterator[Finding]], ...] = tuple(
    check for file in _FILES for name, check in vars(file).items() if name.startswith("check_")
)
