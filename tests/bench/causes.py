"""Requests whose cause is expensive to find: many tools, hostile schemas, long arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from extproc.apis import open_conversation
from extproc.decision import Repeat
from extproc.detectors.causes import find_cause
from extproc.detectors.loops import REPEAT
from extproc.request.document import Document
from tests.bench.report import Row
from tests.bench.timing import cpu_us

_LIMIT_MS = 1
_TIMES = 15
_TOOLS = 500
_LIST, _SCHEMA = 262_000, 65_000
"""Lengths of a list of tools and of a schema that are just read, in bytes."""

_LONG = "x" * 50_000
_REPEAT = Repeat(("f",), 3, 3, 3, results=True, rule=REPEAT)


def _fill(item: str, size: int = _SCHEMA) -> list[Any]:
    """As many of this JSON as fit into a number of bytes; `%` is a number."""
    found: list[Any] = json.loads(
        "[" + ",".join([item.replace("%", str(number)) for number in range(size // (len(item) + 1))]) + "]"
    )
    return found[: len(found) * size // max(size, len(json.dumps(found)))]


def _tool(number: int) -> dict[str, Any]:
    properties = {name: {"type": "string", "description": "where to look, or what for, in words"} for name in ("path", "word")}
    return {"type": "object", "properties": properties, "required": ["path", f"option_{number}"]}


def _deep(schema: Any, depth: int) -> Any:  # noqa: ANN401  # JSON
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


def _wrap(value: Any, depth: int) -> Any:  # noqa: ANN401  # JSON
    for _ in range(depth):
        value = {"a": value}
    return value


_CALLED: Mapping[str, tuple[object, object]] = {
    "an argument too few": (_tool(1), {"word": "a"}),
    "required names": ({"required": _fill('"name%"')}, {}),
    "required names, again and again": ({"anyOf": [{"$ref": "#/d"}] * 3_000, "d": {"required": _fill('"%"', 500)}}, {}),
    "properties": ({"properties": {f"name{n}": {} for n in range(4_000)}, "additionalProperties": False}, {"nam": 1}),
    "values of an enum": ({"properties": {"a": {"enum": _fill('"value%"')}}}, {"a": "b"}),
    "values of an enum, again and again": (
        {"properties": {"a": {"anyOf": [{"$ref": "#/d"}] * 3_000}}, "d": {"enum": _fill('"%"', 50)}},
        {"a": "b"},
    ),
    "forms": ({"anyOf": _fill('{"required":["a%"]}')}, {}),
    "forms in forms": ({"anyOf": [{"$ref": "#"}] * 6_000}, {}),
    "forms of one object": ({"anyOf": [{"$ref": "#/d"}] * 4_000, "d": _deep({"required": ["b"]}, 15)}, _wrap({}, 15)),
    "long references": ({"anyOf": [{"$ref": f"#{'/a' * 250}"}] * 100}, {}),
    "fractions": ({"properties": {"a": {"enum": _fill("%.5")}}}, {"a": "b"}),
    "lists": ({"properties": {"a": {"enum": _fill("[]")}}}, {"a": "b"}),
    "long names": (
        {"properties": {_LONG: {"additionalProperties": {"type": "string"}}}},
        {_LONG: {f"{n}": "a" for n in range(500)}},
    ),
    "many arguments": ({"additionalProperties": {"type": "string"}}, {f"name{number}": "a" for number in range(20_000)}),
    "a list of fractions": ({"properties": {"a": {"items": {"type": "number"}}}}, {"a": _fill("%.5", 300_000)}),
}
"""A tool's schema, and what it is called with."""


def _write(tools: object, name: str, arguments: object) -> bytes:
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    result = {"role": "tool", "tool_call_id": "c", "content": "Error: it cannot be done"}
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    return json.dumps({"tools": tools, "messages": messages}).encode()


def _declare(name: str, schema: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def _list_bodies() -> dict[str, bytes]:
    many = [_declare(f"read_file_number_{number}_of_the_folder_in_which_it_stands", _tool(number)) for number in range(_TOOLS)]
    bodies = {
        f"{_TOOLS} tools, an argument too few": _write(
            many, "read_file_number_499_of_the_folder_in_which_it_stands", {"word": "a"}
        ),
        f"{_TOOLS} tools, another one": _write(many, "read_files_number_7_of_any_folder_in_which_they_may_stand", {}),
        "a list of empty tools": _write(_fill("{}", _LIST), "f", {}),
        "a list of tools with a name": _write(_fill('{"name":"f%"}', _LIST), "g", {}),
        "a list of lists of tools": _write([{"functionDeclarations": _fill('{"name":"f%"}', _LIST)}], "g", {}),
    }
    for name, (schema, arguments) in _CALLED.items():
        bodies[name] = _write([_declare("f", schema)], "f", arguments)
    return bodies


def measure(*, quick: bool) -> Row:
    """The slowest of all causes, in requests whose conversation has been read."""
    worst, slowest = 0.0, ""
    bodies = _list_bodies()
    for name, body in bodies.items():
        document = Document(body)
        open_conversation(document)
        took = min([cpu_us(partial(find_cause, document, _REPEAT), 1) / 1_000 for _ in range(_TIMES // 3 if quick else _TIMES)])
        if took > worst:
            worst, slowest = took, name
    return Row(f"worst of {len(bodies)} causes of a loop: {slowest}", worst, "ms", _LIMIT_MS)
