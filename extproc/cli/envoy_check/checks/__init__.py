"""All checks: every function `check_...` of these files, in their order, which is that of what they find.

Each takes a filter that asks Loopguard, with the routes on which it does, and what policies need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from extproc.cli.envoy_check.checks import answers, callers, clusters, filters, late, limits, routes
from extproc.cli.envoy_check.config import Guard
from extproc.cli.envoy_check.findings import Finding

_FILES = (late, filters, limits, callers, routes, clusters, answers)

CHECKS: tuple[Callable[[Guard], Iterator[Finding]], ...] = tuple(
    check for file in _FILES for name, check in vars(file).items() if name.startswith("check_")
)
