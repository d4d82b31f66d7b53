"""What `loopguard check-envoy` finds."""

from __future__ import annotations

from typing import Any

from extproc.cli.envoy_check.config import find_resources
from extproc.cli.envoy_check.document import ConfigPlace
from extproc.cli.envoy_check.inspect import CheckReport, inspect
from extproc.cli.envoy_check.needs import find_needs
from tests.support.envoy_config import loaded

UPLOADS = 10 * 2**20


Json = Any


def report(document: Json, policies: Json = None, **more: Any) -> CheckReport:  # noqa: ANN401  # of `inspect`
    """What is found."""
    needs = find_needs(loaded(policies) if policies else None, UPLOADS)
    return inspect(find_resources(ConfigPlace(document)), needs, **more)


def found(document: Json, policies: Json = None, **more: Any) -> list[tuple[str, str, bool]]:  # noqa: ANN401  # as above
    """Code and place of each finding, and whether it hurts."""
    return [(item.code, item.place.pointer, item.hurts) for item in report(document, policies, **more).findings]
