"""What keeps an agent stuck, as a note names it: by the declared tools, the newest call, and what came back."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # published without type information

from extproc.detectors.causes import (
    MISSING_ARGUMENT,
    OUTAGE,
    SAME_ERROR,
    SAME_RESULT,
    SAME_STEPS,
    UNKNOWN_TOOL,
    WRONG_ARGUMENT,
    Cause,
    find_cause,
)
from extproc.detectors.keys import SimilarityKeys
from extproc.detectors.schemas import find_fault
from extproc.detectors.turns import Turns
from extproc.request.document import Document
from tests.support.turn_writers import SHAPES, STYLES, Did, as_text

Schema = dict[str, Any]

SQL: Schema = {
    "type": "object",
    "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}, "mode": {"type": "string", "enum": ["ro", "rw"]}},
    "required": ["query"],
}


def _as_function(name: str, schema: Schema) -> Any:  # noqa: ANN401  # JSON
    return {"type": "function", "function": {"name": name, "parameters": schema}}


DECLARE: dict[str, Callable[[dict[str, Schema]], Schema]] = {
    "chat": lambda tools: {"tools": [_as_function(*tool) for tool in tools.items()]},
    "ollama": lambda tools: {"tools": [_as_function(*tool) for tool in tools.items()]},
    "responses": lambda tools: {
        "tools": [{"type": "function", "name": name, "parameters": schema} for name, schema in tools.items()]
    },
    "anthropic": lambda tools: {"tools": [{"name": name, "input_schema": schema} for name, schema in tools.items()]},
    "gemini": lambda tools: {
        "tools": [{"functionDeclarations": [{"name": name, "parameters": schema} for name, schema in tools.items()]}]
    },
    "bedrock": lambda tools: {
        "toolConfig": {
            "tools": [{"toolSpec": {"name": name, "inputSchema": {"json": schema}}} for name, schema in tools.items()]
        }
    },
}
"""Tools with their schemas, as each API declares them."""


def explain(body: dict[str, Any]) -> Cause | None:
    """The cause of the loop that a body shows."""
    document = Document(json.dumps(body).encode())
    similarity = Turns(SimilarityKeys(similarity="turns"))
    repeat = similarity.find_loop(similarity.rule.read(document))
    assert repeat is not None
    return find_cause(document, repeat)


def stuck(
    call: tuple[str, dict[str, Any]], result: str, api: str = "chat", tools: dict[str, Schema] | None = None
) -> Cause | None:
    """The cause where one call brings back the same three times."""
    tools = tools or {}
    return explain(SHAPES[api]([Did((call,), (result,))] * 3) | DECLARE[api](tools))


@pytest.mark.parametrize("api", sorted(DECLARE))
def test_a_missing_argument_is_named(api: str) -> None:
    """The schema requires what no call had; a call without any argument was perhaps too long to write."""
    some = stuck(("execute_sql", {"limit": 3}), "Error: invalid arguments", api, {"execute_sql": SQL})
    none = stuck(("execute_sql", {}), "Error: invalid arguments", api, {"execute_sql": SQL})

    left_out = "3 calls of execute_sql left out query, which is required."
    assert some == Cause(MISSING_ARGUMENT, left_out, "Add it.")
    assert none == Cause(MISSING_ARGUMENT, left_out, "Add it. If the text is too long for one call, send it in parts.")


def test_many_missing_arguments_are_counted() -> None:
    """Eight are named."""
    schema = {"properties": {letter: {"type": "integer"} for letter in "abcdefghij"}, "required": list("abcdefghij")}

    cause = stuck(("f", {}), "Error: invalid arguments", tools={"f": schema})

    assert cause is not None
    assert cause.text == "3 calls of f left out a, b, c, d, e, f, g, h and 2 more, which are required."
    assert cause.advice == "Add them."


@pytest.mark.parametrize("api", sorted(DECLARE))
def test_a_tool_that_does_not_exist_is_told_apart(api: str) -> None:
    """The declared tools with similar names are named, or else all of them."""
    near = stuck(("exec_sql", {}), "Unknown tool: exec_sql", api, {"execute_sql": SQL, "read_file": {}})
    far = stuck(("foo", {}), "Unknown tool: foo", api, {"execute_sql": SQL, "read_file": {}})

    assert near == Cause(UNKNOWN_TOOL, "There is no tool named exec_sql. Did you mean execute_sql?")
    assert far == Cause(UNKNOWN_TOOL, "There is no tool named foo. The tools are execute_sql and read_file.")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"query": 1}, "query must be a string."),
        ({"query": "a", "limit": "3"}, "limit must be an integer."),
        ({"query": "a", "limit": True}, "limit must be an integer."),
        ({"query": "a", "mode": "x"}, "mode must be ro or rw."),
    ],
)
def test_an_argument_of_the_wrong_type_is_named(arguments: dict[str, Any], told: str) -> None:
    """By the types of JSON Schema, and its `enum`."""
    cause = stuck(("execute_sql", arguments), "Error: invalid arguments", tools={"execute_sql": SQL})

    assert cause == Cause(WRONG_ARGUMENT, f"In calls of execute_sql, {told}")


def test_a_call_that_was_cut_off_is_told_from_one_without_arguments() -> None:
    """OpenAI sends arguments as a string, which ends too early if the model may write no more."""
    body = SHAPES["chat"]([Did((("execute_sql", {}),), ("Error: bad JSON",))] * 3) | DECLARE["chat"]({"execute_sql": SQL})
    for message in body["messages"]:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = '{"query": "insert into'

    cause = explain(body)

    assert cause == Cause(
        WRONG_ARGUMENT,
        "The arguments of execute_sql are cut off, so they are not valid JSON.",
        "If the text is too long for one call, send it in parts.",
    )


@pytest.mark.parametrize(
    "tools",
    [
        {"execute_sql": SQL},  # the call is right
        {"execute_sql": {}},
        {"execute_sql": {"properties": 1, "required": {"query": 1}}},
        {"execute_sql": {"properties": {"query": []}, "required": [1, None]}},
        {"execute_sql": {"properties": {"query": {"type": "made_up"}}}},
        {"execute_sql": {"properties": {"query": {"type": ["string", "null"]}}}},
        {},  # the server may have them
    ],
)
def test_nothing_is_blamed_on_a_call_that_may_be_right(tools: dict[str, Schema]) -> None:
    """What a schema does not say is allowed; the error itself is quoted then."""
    cause = stuck(("execute_sql", {"query": "a"}), "Error: no such table: a\nat line 3", tools=tools)

    assert cause == Cause(SAME_ERROR, "The error was \u201cError: no such table: a\u201d each time.")


@pytest.mark.parametrize(
    ("tools", "arguments"),
    [
        ({"execute_sql": SQL} | {f"tool_{number}": SQL for number in range(1_000)}, {}),
        ({"execute_sql": {**SQL, "anyOf": [{}] * 1_500}}, {}),
        ({"execute_sql": {**SQL, "enum": list(range(4_100))}}, {}),
        ({"execute_sql": {**SQL, "title": "a" * 66_000}}, {}),
        ({"execute_sql": SQL}, {"limit": "a" * 66_000}),
        ({"execute_sql": SQL}, {"limit": [[]] * 1_600}),
        ({"execute_sql": {"additionalProperties": {"properties": {"b": {"type": "null"}}}}}, {"a" * 60_000: {"b": 1, "c": 2}}),
    ],
)
def test_what_takes_long_to_read_is_not_blamed(tools: dict[str, Schema], arguments: dict[str, Any]) -> None:
    """However wrong the call is, the note then quotes the error."""
    cause = stuck(("execute_sql", arguments), "Error: invalid arguments", tools=tools)

    assert cause == Cause(SAME_ERROR, "The error was \u201cError: invalid arguments\u201d each time.")


def test_tools_of_servers_have_names_that_nobody_declares() -> None:
    """So a name that is not declared may be right."""
    body = SHAPES["responses"]([Did((("other", {}),), ("Error: no",))] * 3)
    body["tools"] = [{"type": "mcp", "server_label": "x"}, {"type": "function", "name": "mine", "parameters": {}}]

    cause = explain(body)

    assert cause is not None
    assert cause.kind == SAME_ERROR


def test_tools_of_a_namespace_are_declared() -> None:
    """A call of one is known, and a name like theirs is told apart."""
    tools = [{"type": "function", "name": "query", "parameters": SQL}]
    body = {"tools": [{"type": "namespace", "name": "db", "tools": tools}]}
    known = explain(SHAPES["responses"]([Did((("query", {"query": "a"}),), ("Error: no",))] * 3) | body)
    near = explain(SHAPES["responses"]([Did((("querry", {}),), ("Error: no",))] * 3) | body)

    assert known is not None
    assert known.kind == SAME_ERROR
    assert near == Cause(UNKNOWN_TOOL, "There is no tool named querry. Did you mean query?")


def test_an_outage_is_waited_for() -> None:
    """A failure that passes by itself is not the agent's."""
    down = stuck(("fetch", {}), "HTTP 503 Service Unavailable")
    slow = stuck(("run", {}), "Command timed out after 120 seconds")

    assert down == Cause(
        OUTAGE,
        "The failure may be temporary: \u201cHTTP 503 Service Unavailable\u201d.",
        "Wait before you try again, or finish without it.",
    )
    assert slow == Cause(
        OUTAGE,
        "It timed out: \u201cCommand timed out after 120 seconds\u201d.",
        "Ask for less at once, allow it more time, or finish without it.",
    )


def test_an_outage_is_no_fault_of_a_call() -> None:
    """Whatever the schema says."""
    cause = stuck(("execute_sql", {}), "HTTP 503 Service Unavailable", tools={"execute_sql": SQL})

    assert cause is not None
    assert cause.kind == OUTAGE


@pytest.mark.parametrize(
    ("result", "quoted"),
    [
        ("Traceback (most recent call last):\n  File 'a.py', line 1\nKeyError: 3", "KeyError: 3"),
        ('{\n "status": "error",\n "message": "File not found: a.txt"\n}', "File not found: a.txt"),
        ("<stderr>\nls: cannot access 'x': No such file or directory", "ls: cannot access 'x': No such file or directory"),
        ("```\nError: boom\n```", "Error: boom"),
        ("Error:\n\nCode execution failed at line 3\nTry again.", "Error: Code execution failed at line 3"),
        ("Exit code: 1\n\nSyntaxError: bad \u201cinput\u201d", "SyntaxError: bad  input"),
        ("===== test session starts =====\n\nE   assert 1 == 2\n===== 1 failed in 0.1s =====", "1 failed in 0.1s ====="),
    ],
)
def test_the_line_that_names_the_error_is_quoted(result: str, quoted: str) -> None:
    """Not a bracket, a tag, a fence or a heading before it."""
    assert stuck(("run", {}), result) == Cause(SAME_ERROR, f"The error was \u201c{quoted}\u201d each time.")


def test_a_result_that_will_not_change_is_quoted() -> None:
    """A model that does not believe its eyes is told once more."""
    assert stuck(("ls", {}), "a.txt\nb.txt") == Cause(
        SAME_RESULT, "The result was \u201ca.txt\u201d each time, and the same call will not change that."
    )
    assert stuck(("ls", {}), "") == Cause(SAME_RESULT, "Nothing came back each time, and the same call will not change that.")


@pytest.mark.parametrize("last", [0, 1, 2])
def test_the_step_of_a_cycle_that_fails_is_named(last: int) -> None:
    """Whichever comes last."""
    steps = [
        Did((("look", {}),), ("all is well",)),
        Did((("fix", {"path": "a"}),), ("Error: read-only file system",)),
        Did((("wait", {}),), ("ok",)),
    ]

    cause = explain(SHAPES["chat"]((steps * 4)[: 9 + last]))

    assert cause == Cause(SAME_ERROR, "In each round, fix failed: \u201cError: read-only file system\u201d.")


def test_the_steps_of_a_cycle_are_named_in_their_order() -> None:
    """With what tells calls of one tool apart."""
    steps = [Did((("read", {"path": path}),), (f"text of {path}",)) for path in ("a.py", "b.py", "c.py")]

    cause = explain(SHAPES["anthropic"](steps * 3))

    assert cause == Cause(SAME_STEPS, "The steps are read (a.py), read (b.py), read (c.py), over and over.")


def test_agents_that_write_their_actions_have_causes_too() -> None:
    """Their tools are declared in prose, so what came back is all that can be named."""
    cause = explain(as_text([Did((("ls", {}),), ("ls: cannot access 'x': No such file or directory",))] * 3, STYLES["fence"]))

    assert cause is not None
    assert cause.kind == SAME_ERROR
    assert "No such file or directory" in cause.text


Value = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=9,
)
Wild = st.dictionaries(st.sampled_from(["type", "properties", "required", "enum", "nullable", "query"]), Value, max_size=5)


@given(st.sampled_from(sorted(DECLARE)), Wild, st.dictionaries(st.sampled_from(["query", "x"]), Value), st.text(max_size=50))
def test_whatever_is_declared_there_is_a_cause_of_bounded_length(
    api: str, schema: Schema, arguments: dict[str, Any], result: str
) -> None:
    """Clients declare what they like."""
    cause = stuck(("execute_sql", arguments), f"Error: {result}", api, {"execute_sql": schema})

    assert cause is not None
    assert len(cause.text) < 1_000


@pytest.mark.parametrize("tools", ["x", 3, {"tools": 3}, [3], [{"name": 3}], [{"function": [1]}], [[[]]]])
def test_a_list_of_tools_that_no_api_has_declares_none(tools: object) -> None:
    """It is ignored."""
    body = SHAPES["chat"]([Did((("ls", {}),), ("Error: no",))] * 3) | {"tools": tools}

    assert explain(body) == Cause(SAME_ERROR, "The error was \u201cError: no\u201d each time.")


def test_tools_beyond_the_bound_are_not_called_unknown() -> None:
    """Their names are not read."""
    tools = {f"t{number}": SQL for number in range(501)}

    cause = stuck(("t500", {}), "Error: no", tools={name: {} for name in tools})

    assert cause is not None
    assert cause.kind == SAME_ERROR


def told(schema: Schema, arguments: dict[str, Any]) -> str:
    """What a note names of a call of `search` that fails; empty if that is only the error."""
    cause = stuck(("search", arguments), "Error: invalid arguments", tools={"search": schema})
    assert cause is not None
    return "" if cause.kind == SAME_ERROR else f"{cause.text} {cause.advice}".strip()


def an_object(properties: Schema, *required: str, **more: object) -> Schema:
    """The schema of an object."""
    return {"type": "object", "properties": properties, "required": list(required), **more}


TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer"}
FILTER = an_object({"date": TEXT, "limit": NUMBER}, "date")
CLOSED = an_object({"query": TEXT, "max_results": NUMBER}, "query", additionalProperties=False)
NODE: Schema = {**an_object({"name": TEXT, "child": {"$ref": "#/$defs/node"}}, "name")}


@pytest.mark.parametrize(
    ("schema", "arguments", "said"),
    [
        (an_object({"filter": FILTER}), {"filter": {}}, "3 calls of search left out filter.date, which is required. Add it."),
        (an_object({"filter": FILTER}), {"filter": "x"}, "In calls of search, filter must be an object."),
        (an_object({"filter": FILTER}), {"filter": {"date": 1}}, "In calls of search, filter.date must be a string."),
        (
            an_object({"rows": {"type": "array", "items": FILTER}}),
            {"rows": [{"date": "a"}, {"date": "a", "limit": 1.5}]},
            "In calls of search, 'rows[1].limit' must be an integer.",
        ),
        (an_object({"q": {"type": ["string", "null"]}}), {"q": 1}, "In calls of search, q must be a string or null."),
        (an_object({"q": {"anyOf": [TEXT, {"type": "null"}]}}), {"q": 1}, "In calls of search, q must be a string or null."),
        (an_object({"q": {"oneOf": [{"enum": ["a"]}, {"const": "b"}]}}), {"q": "c"}, "In calls of search, q must be a or b."),
        (
            an_object({"q": {"anyOf": [FILTER, TEXT]}}),
            {"q": {"limit": 1}},
            "3 calls of search left out q.date, which is required. Add it.",
        ),
        (
            an_object({"q": {"anyOf": [an_object({"a": TEXT, "b": TEXT}, "a"), an_object({"c": TEXT}, "b")]}}),
            {"q": {}},
            "3 calls of search left out q.a and q.b, one of which is required. Add one of them.",
        ),
        (
            an_object({"q": {"anyOf": [FILTER, an_object({"limit": TEXT}, "limit"), TEXT]}}),
            {"q": {"limit": 1}},
            "In calls of search, q must be in one of the forms that its schema allows.",
        ),
        (an_object({"q": {"allOf": [TEXT, {"enum": ["a"]}]}}), {"q": 1}, "In calls of search, q must be a string."),
        (
            {"$ref": "#/$defs/all", "$defs": {"all": FILTER}},
            {"limit": 1},
            "3 calls of search left out date, which is required. Add it.",
        ),
        (
            an_object({"root": {"$ref": "#/definitions/a~1b"}}, definitions={"a/b": NUMBER}),
            {"root": "x"},
            "In calls of search, root must be an integer.",
        ),
        (
            {**NODE, "$defs": {"node": NODE}},
            {"name": "a", "child": {"name": "b", "child": {}}},
            "3 calls of search left out child.child.name, which is required. Add it.",
        ),
        (
            an_object({"q": {"enum": list("abcdefghij")}}),
            {"q": "x"},
            "In calls of search, q must be a, b, c, d, e, f, g, h or 2 more.",
        ),
        (an_object({"q": {"enum": [1, True, None]}}), {"q": False}, "In calls of search, q must be 1, true or null."),
        (
            CLOSED,
            {"query": "a", "maxResults": 3},
            "search takes no argument named maxResults. Did you mean max_results?",
        ),
        (CLOSED, {"query": "a", "zzz": 3}, "search takes no argument named zzz. It takes query and max_results."),
        (an_object({}, additionalProperties=False), {"a": 1}, "search takes no argument named a. It takes none."),
        (
            an_object({"in": CLOSED}),
            {"in": {"query": "a", "x": 3}},
            "In calls of search, in takes no argument named x. It takes query and max_results.",
        ),
        (an_object({}, additionalProperties=NUMBER), {"a": "x"}, "In calls of search, a must be an integer."),
    ],
)
def test_what_a_schema_refuses_is_named(schema: Schema, arguments: dict[str, Any], said: str) -> None:
    """Wherever it is, by its path."""
    assert told(schema, arguments) == said


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        (an_object({"q": {"anyOf": [TEXT, {"$ref": "https://example.com/a"}]}}), {"q": 1}),
        (an_object({"q": {"oneOf": [NUMBER, {"type": "number"}]}}), {"q": 1}),
        (an_object({"q": {"anyOf": [TEXT, {}]}}), {"q": 1}),
        (an_object({"q": {"anyOf": [TEXT, True]}}), {"q": 1}),
        (an_object({"q": {"type": "string", "nullable": True}}), {"q": None}),
        (an_object({"q": {"type": "string", "enum": [1, 2]}}), {"q": "x"}),
        (an_object({"q": {"allOf": [TEXT, NUMBER]}}), {"q": "x"}),
        (an_object({"q": {"type": "string", "allOf": [NUMBER]}}), {"q": "x"}),
        (an_object({"q": TEXT}, "x", additionalProperties=False), {"q": "x"}),
        (an_object({"q": {"type": "integer"}}), {"q": 3.0}),
        (an_object({"q": {"enum": [1.5, 2]}}), {"q": 1}),
        (an_object({"q": TEXT}, additionalProperties=False, patternProperties={"^x": {}}), {"q": "x", "x1": 1}),
        (an_object({}, additionalProperties=False, allOf=[CLOSED]), {"query": "a"}),
        (an_object({}, allOf=[CLOSED, an_object({"b": TEXT}, additionalProperties=False)]), {"query": "a", "b": "x"}),
        (an_object({"id": {"type": "string", "readOnly": True}}, "id"), {"x": 1}),
        (an_object({"q": {"$id": "x", "$ref": "#/$defs/a", "$defs": {"a": NUMBER}}}, **{"$defs": {"a": TEXT}}), {"q": 1}),
        (an_object({"q": {"type": "array", "prefixItems": [TEXT], "items": NUMBER}}), {"q": ["x", "y"]}),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, {"q": 1}),
        ({"$ref": "#"}, {"q": 1}),
        ({"$ref": "#/$defs/none"}, {"q": 1}),
        ({"anyOf": [{"$ref": "#"}] * 9}, {"q": 1}),
        (an_object({f"p{number}": {"anyOf": [TEXT] * 100} for number in range(100)}), {"p50": 1, "p99": 2}),
    ],
)
def test_nothing_is_claimed_that_is_not_certain(schema: Schema, arguments: dict[str, Any]) -> None:
    """A branch may accept it, the schema contradicts itself or refers to elsewhere or to itself, or there is too much of it."""
    arguments = {**dict.fromkeys([f"p{number}" for number in range(50)], "x"), **arguments} if "p99" in arguments else arguments

    assert not told(schema, arguments)


def _join(key: str, parts: list[Schema]) -> Schema:
    return {key: parts}


def _hold(properties: Schema, required: list[str], others: object) -> Schema:
    return {"properties": properties, "required": required, "additionalProperties": others}


def _repeat(items: Schema) -> Schema:
    return {"type": "array", "items": items}


LETTERS = st.sampled_from("abc")
Part = st.recursive(
    st.sampled_from(
        [{}, TEXT, NUMBER, {"type": ["boolean", "null"]}, {"enum": ["a", 1, None]}, {"const": "a"}, {"$ref": "#/$defs/d"}]
    ),
    lambda inner: (
        st.builds(_join, st.sampled_from(["anyOf", "oneOf", "allOf"]), st.lists(inner, min_size=1, max_size=3))
        | st.builds(
            _hold,
            st.dictionaries(LETTERS, inner, max_size=3),
            st.lists(LETTERS, unique=True, max_size=2),
            st.booleans() | inner,
        )
        | st.builds(_repeat, inner)
    ),
    max_leaves=6,
)
Given = st.recursive(
    st.sampled_from([None, True, 1, 1.5, "a", "b"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=6,
)


@given(Part, Part, st.dictionaries(st.sampled_from("abcd"), Given, max_size=3))
def test_what_is_claimed_is_refused_by_a_validator(schema: Schema, shared: Schema, value: dict[str, Any]) -> None:
    """Compared with the reference implementation in Python."""
    whole = {**schema, "$defs": {"d": shared}}
    fault = find_fault(whole, Document(json.dumps(value).encode()).value())

    if fault is not None:
        with suppress(RecursionError):
            assert not Draft202012Validator(whole).is_valid(value)
