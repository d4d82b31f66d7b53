"""What `loopguard check-envoy` finds."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.cli.envoy_check.config import find_resources
from extproc.cli.envoy_check.document import ConfigPlace
from extproc.cli.envoy_check.inspect import CheckReport, inspect
from extproc.cli.envoy_check.needs import find_needs
from extproc.cli.main import main
from tests.support.documents import bundle, policy
from tests.support.envoy_config import loaded

UPLOADS = 10 * 2**20


Json = Any


def report(document: Json, policies: Json = None, **more: Any) -> CheckReport:  # noqa: ANN401  # of `inspect`
    """What is found."""
    needs = find_needs(loaded(policies) if policies else None, UPLOADS)
    return inspect(find_resources(ConfigPlace(document)), needs, **more)


def found(document: Json, policies: Json = None, **more: Any) -> list[tuple[str, str, bool]]:  # noqa: ANN401  # as above
    """Code and place of each finding, and whether it is a problem."""
    return [(item.code, item.place.pointer, item.hurts) for item in report(document, policies, **more).findings]


CHAT = bundle(policy("chat", {"pathPrefix": "/chat"}, action="throttle", limit_keys=["header:x-user-id"]))
"""Holds requests for 30 s at most."""

MANAGER = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config"


def find(document: Json, pointer: str) -> Json:
    """What stands there."""
    for step in pointer.split("/")[1:]:
        document = document[int(step) if isinstance(document, list) else step]
    return document


def without_an_end(document: Json) -> None:
    """Nothing ends an upload that stalls."""
    manager = find(document, MANAGER)
    del manager["request_timeout"]
    manager["stream_idle_timeout"] = "0s"


def run(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    """Exit code, output, and errors."""
    code = main(["check-envoy", *flags])
    printed = capsys.readouterr()
    return code, printed.out, printed.err
