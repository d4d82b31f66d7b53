"""Findings of `loopguard check-envoy`."""

import copy
import io
import json
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from extproc.cli.main import main
from tests.support.command import written
from tests.support.documents import bundle, policy

Json = Any
Edit = Callable[[Json], object]


class Finding(NamedTuple):
    code: str
    pointer: str
    hurts: bool
    problem: str
    right: str
    routes: list[str]


class Route(NamedTuple):
    name: str
    modes: list[str]


class Report(NamedTuple):
    good: bool
    routes: list[Route]
    findings: list[Finding]


class UnreadConfigurationError(Exception):
    pass


def report(document: Json, policies: Json = None, *flags: str) -> Report:
    with TemporaryDirectory() as folder, redirect_stdout(io.StringIO()) as printed:
        arguments = [*flags, written(Path(folder) / "envoy.json", document)]
        if policies:
            arguments += ["--policy", written(Path(folder) / "policies.json", policies)]
        code = main(["check-envoy", "--json", *arguments])
    if code > 1:
        raise UnreadConfigurationError
    told = json.loads(printed.getvalue())
    assert code == (not told["good"])
    found = [
        Finding(
            item["code"],
            item["pointer"],
            kind == "findings",
            item["problem"],
            item["right"],
            item["routes"],
        )
        for kind in ("findings", "notes")
        for item in told[kind]
    ]
    return Report(
        told["good"], [Route(item["route"], item["body_modes"]) for item in told["routes"]], found
    )


def found(document: Json, policies: Json = None, *flags: str) -> list[tuple[str, str, bool]]:
    """Code and place of each finding, and whether it is a problem."""
    return [item[:3] for item in report(document, policies, *flags).findings]


def codes(document: Json, policies: Json = None) -> list[str]:
    """Codes of findings, then codes of notes in parentheses."""
    return [
        item.code if item.hurts else f"({item.code})"
        for item in report(document, policies).findings
    ]


# Delays requests for 30 s at most.
CHAT = bundle(
    policy("chat", {"pathPrefix": "/chat"}, action="throttle", limit_keys=["header:x-user-id"])
)

MANAGER = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config"


def find(document: Json, pointer: str) -> Json:
    for step in pointer.split("/")[1:]:
        document = document[int(step) if isinstance(document, list) else step]
    return document


def put(pointer: str, value: Json) -> Edit:
    above, _, last = pointer.rpartition("/")

    def edit(document: Json) -> None:
        place = find(document, above)
        place[int(last) if isinstance(place, list) else last] = copy.deepcopy(value)

    return edit


def drop(pointer: str) -> Edit:
    above, _, last = pointer.rpartition("/")

    def edit(document: Json) -> None:
        place = find(document, above)
        place.pop(int(last) if isinstance(place, list) else last)

    return edit


def insert(pointer: str, value: Json) -> Edit:
    above, _, last = pointer.rpartition("/")
    return lambda document: find(document, above).insert(int(last), copy.deepcopy(value))


def add_filter(kind: str, *, place: int = 1, **config: Json) -> Edit:
    """An edit that adds the HTTP filter `it`, by default after Loopguard's."""
    made = {"@type": f"type.googleapis.com/envoy.extensions.filters.http.{kind}", **config}
    return insert(f"{MANAGER}/http_filters/{place}", {"name": "it", "typed_config": made})


def edited(document: Json, *edits: Edit) -> Json:
    made = copy.deepcopy(document)
    for edit in edits:
        edit(made)
    return made


def without_an_end(document: Json) -> None:
    manager = find(document, MANAGER)
    del manager["request_timeout"]
    manager["stream_idle_timeout"] = "0s"
