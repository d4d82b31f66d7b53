"""The cause that keeps an agent stuck, as a note names it."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, strategies as st

# Published without type information
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

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
    "properties": {
        "query": {"type": "string"},
        "limit": {"type": "integer"},
        "mode": {"type": "string", "enum": ["ro", "rw"]},
    },
    "required": ["query"],
}


DECLARE: dict[str, Callable[[dict[str, Schema]], Schema]] = {
    **dict.fromkeys(
        ("chat", "ollama"),
        lambda tools: {
            "tools": [
                {"type": "function", "function": {"name": name, "parameters": schema}}
                for name, schema in tools.items()
            ]
        },
    ),
    "responses": lambda tools: {
        "tools": [
            {"type": "function", "name": name, "parameters": schema}
            for name, schema in tools.items()
        ]
    },
    "anthropic": lambda tools: {
        "tools": [{"name": name, "input_schema": schema} for name, schema in tools.items()]
    },
    "gemini": lambda tools: {
        "tools": [
            {
                "functionDeclarations": [
                    {"name": name, "parameters": schema} for name, schema in tools.items()
                ]
            }
        ]
    },
    "bedrock": lambda tools: {
        "toolConfig": {
            "tools": [
                {"toolSpec": {"name": name, "inputSchema": {"json": schema}}}
                for name, schema in tools.items()
            ]
        }
    },
}


Call = tuple[str, dict[str, Any]]


def repeat(call: Call, result: str, api: str = "chat", **tools: Schema) -> Schema:
    return SHAPES[api]([Did((call,), (result,))] * 3) | DECLARE[api](tools)


def explain(body: Schema) -> Cause:
    document = Document(json.dumps(body).encode())
    similarity = Turns(SimilarityKeys(similarity="turns"))
    loop = similarity.find_loop(similarity.rule.read(document))
    assert loop is not None
    cause = find_cause(document, loop)
    assert cause is not None
    return cause


INVALID, SPLIT = (
    "Error: invalid arguments",
    "If the text is too long for one call, send it in parts.",
)
LEFT_OUT = "3 calls of execute_sql left out query, which is required."
LETTERED = {
    "properties": {letter: {"type": "integer"} for letter in "abcdefghij"},
    "required": list("abcdefghij"),
}
NEEDED = "3 calls of f left out a, b, c, d, e, f, g, h and 2 more, which are required."
OUT = "HTTP 503 Service Unavailable"
SLOW = "Command timed out after 120 seconds"
SAME = "each time, and the same call will not change that."
CUT_OFF = json.loads(
    json.dumps(repeat(("execute_sql", {}), "Error: bad JSON", execute_sql=SQL)).replace(
        '"{}"', r'"{\"query\": \"x"'
    )
)
SERVED = [
    {"type": "mcp", "server_label": "x"},
    {"type": "function", "name": "mine", "parameters": {}},
]
SPACE = {
    "tools": [
        {
            "type": "namespace",
            "name": "db",
            "tools": [{"type": "function", "name": "query", "parameters": SQL}],
        }
    ]
}
MANY: Schema = {f"t{number}": {} for number in range(501)}
FAILS = [
    Did((("look", {}),), ("all is well",)),
    Did((("fix", {"path": "a"}),), ("Error: read-only file system",)),
    Did((("wait", {}),), ("ok",)),
] * 4
READS = [
    Did((("read", {"path": path}),), (f"text of {path}",)) for path in ("a.py", "b.py", "c.py")
] * 3
WRONG: dict[str, dict[str, Any]] = {
    "query must be a string.": {"query": 1},
    "limit must be an integer.": {"query": "a", "limit": True},
    "mode must be ro or rw.": {"query": "a", "mode": "x"},
}
CERTAIN: list[
    Schema
] = [  # of a schema that may allow the call; without any, a server may have the tool
    {"execute_sql": SQL},
    {"execute_sql": {}},
    {"execute_sql": {"properties": 1, "required": {"query": 1}}},
    {"execute_sql": {"properties": {"query": []}, "required": [1, None]}},
    {"execute_sql": {"properties": {"query": {"type": "made_up"}}}},
    {"execute_sql": {"properties": {"query": {"type": ["string", "null"]}}}},
    {},
]
LARGE: list[tuple[Schema, dict[str, Any]]] = [
    ({"execute_sql": SQL} | {f"tool_{number}": SQL for number in range(1_000)}, {}),
    ({"execute_sql": {**SQL, "anyOf": [{}] * 1_500}}, {}),
    ({"execute_sql": {**SQL, "enum": list(range(4_100))}}, {}),
    ({"execute_sql": {**SQL, "title": "a" * 66_000}}, {}),
    ({"execute_sql": SQL}, {"limit": "a" * 66_000}),
    ({"execute_sql": SQL}, {"limit": [[]] * 1_600}),
    (
        {"execute_sql": {"additionalProperties": {"properties": {"b": {"type": "null"}}}}},
        {"a" * 60_000: {"b": 1, "c": 2}},
    ),
]
NO_LISTS: list[object] = ["x", 3, {"tools": 3}, [3], [{"name": 3}], [{"function": [1]}], [[[]]]]


def quote_error(text: str) -> Cause:
    return Cause(SAME_ERROR, f"The error was \u201c{text}\u201d each time.")


def unknown(said: str) -> Cause:
    return Cause(UNKNOWN_TOOL, f"There is no tool named {said}")


CAUSES: dict[str, tuple[Schema, Cause]] = {
    **{
        f"{kind}, {api}": (repeat((name, given), result, api, execute_sql=SQL, read_file={}), cause)
        for api in sorted(DECLARE)
        for kind, name, given, result, cause in (
            (
                "an argument left out",
                "execute_sql",
                {"limit": 3},
                INVALID,
                Cause(MISSING_ARGUMENT, LEFT_OUT, "Add it."),
            ),
            (
                "all arguments left out",
                "execute_sql",
                {},
                INVALID,
                Cause(MISSING_ARGUMENT, LEFT_OUT, f"Add it. {SPLIT}"),
            ),
            (
                "a tool nearly right",
                "exec_sql",
                {},
                "Unknown tool",
                unknown("exec_sql. Did you mean execute_sql?"),
            ),
            (
                "an unknown tool",
                "foo",
                {},
                "Unknown tool",
                unknown("foo. The tools are execute_sql and read_file."),
            ),
        )
    },
    "many arguments left out": (
        repeat(("f", {}), INVALID, f=LETTERED),
        Cause(MISSING_ARGUMENT, NEEDED, "Add them."),
    ),
    **{
        said: (
            repeat(("execute_sql", given), INVALID, execute_sql=SQL),
            Cause(WRONG_ARGUMENT, f"In calls of execute_sql, {said}"),
        )
        for said, given in WRONG.items()
    },
    "arguments cut off": (
        CUT_OFF,
        Cause(
            WRONG_ARGUMENT,
            "The arguments of execute_sql are cut off, so they are not valid JSON.",
            SPLIT,
        ),
    ),
    **{
        f"a call that may be right {number}": (
            repeat(("execute_sql", {"query": "a"}), "Error: no such table: a\nat line 3", **tools),
            quote_error("Error: no such table: a"),
        )
        for number, tools in enumerate(CERTAIN)
    },
    **{
        f"too much to read {number}": (
            repeat(("execute_sql", given), INVALID, **tools),
            quote_error(INVALID),
        )
        for number, (tools, given) in enumerate(LARGE)
    },
    **{
        f"no list of tools {tools}": (
            repeat(("ls", {}), "Error: no") | {"tools": tools},
            quote_error("Error: no"),
        )
        for tools in NO_LISTS
    },
    "tools of a server": (
        repeat(("other", {}), "Error: no", "responses") | {"tools": SERVED},
        quote_error("Error: no"),
    ),
    "a tool of a namespace": (
        repeat(("query", {"query": "a"}), "Error: no", "responses") | SPACE,
        quote_error("Error: no"),
    ),
    "none of a namespace": (
        repeat(("querry", {}), "Error: no", "responses") | SPACE,
        unknown("querry. Did you mean query?"),
    ),
    "more tools than are read": (
        repeat(("t500", {}), "Error: no", **MANY),
        quote_error("Error: no"),
    ),
    "an outage, whatever the schema says": (
        repeat(("execute_sql", {}), OUT, execute_sql=SQL),
        Cause(
            OUTAGE,
            f"The failure may be temporary: \u201c{OUT}\u201d.",
            "Wait before you try again, or finish without it.",
        ),
    ),
    "a timeout": (
        repeat(("run", {}), SLOW),
        Cause(
            OUTAGE,
            f"It timed out: \u201c{SLOW}\u201d.",
            "Ask for less at once, allow it more time, or finish without it.",
        ),
    ),
    "the same result": (
        repeat(("ls", {}), "a.txt\nb.txt"),
        Cause(SAME_RESULT, f"The result was \u201ca.txt\u201d {SAME}"),
    ),
    "no result": (repeat(("ls", {}), ""), Cause(SAME_RESULT, f"Nothing came back {SAME}")),
    **{
        f"a step that fails, {last} before the last": (
            SHAPES["chat"](FAILS[: 9 + last]),
            Cause(
                SAME_ERROR, "In each round, fix failed: \u201cError: read-only file system\u201d."
            ),
        )
        for last in range(3)
    },
    "a cycle": (
        SHAPES["anthropic"](READS),
        Cause(SAME_STEPS, "The steps are read (a.py), read (b.py), read (c.py), over and over."),
    ),
    "an agent that writes its actions": (
        as_text([Did((("ls", {}),), ("Error: no such file",))] * 3, STYLES["fence"]),
        quote_error("Error: no such file"),
    ),
}


@pytest.mark.parametrize(("body", "cause"), CAUSES.values(), ids=CAUSES)
def test_cause_of_a_loop_is_named(body: Schema, cause: Cause) -> None:
    assert explain(body) == cause


@pytest.mark.parametrize(
    ("result", "quoted"),
    [
        ("Traceback (most recent call last):\n  File 'a.py', line 1\nKeyError: 3", "KeyError: 3"),
        ('{\n "status": "error",\n "message": "File not found: a.txt"\n}', "File not found: a.txt"),
        (
            "<stderr>\nls: cannot access 'x': No such file or directory",
            "ls: cannot access 'x': No such file or directory",
        ),
        ("```\nError: boom\n```", "Error: boom"),
        (
            "Error:\n\nCode execution failed at line 3\nTry again.",
            "Error: Code execution failed at line 3",
        ),
        ("Exit code: 1\n\nSyntaxError: bad \u201cinput\u201d", "SyntaxError: bad  input"),
        (
            "===== test session starts =====\n\nE   assert 1 == 2\n===== 1 failed in 0.1s =====",
            "1 failed in 0.1s =====",
        ),
    ],
)
def test_line_that_names_the_error_is_quoted(result: str, quoted: str) -> None:
    assert explain(repeat(("run", {}), result)) == quote_error(quoted)


Value = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=9,
)
Wild = st.dictionaries(
    st.sampled_from(["type", "properties", "required", "enum", "nullable", "query"]),
    Value,
    max_size=5,
)


@given(
    st.sampled_from(sorted(DECLARE)),
    Wild,
    st.dictionaries(st.sampled_from(["query", "x"]), Value),
    st.text(max_size=50),
)
def test_cause_is_bounded_for_any_schema(
    api: str, schema: Schema, arguments: dict[str, Any], result: str
) -> None:
    body = repeat(("execute_sql", arguments), f"Error: {result}", api, execute_sql=schema)

    assert len(explain(body).text) < 1_000


def told(schema: Schema, arguments: dict[str, Any]) -> str:
    """What a note says about a failing call of `search`; empty if it only quotes the error."""
    cause = explain(repeat(("search", arguments), INVALID, search=schema))
    return "" if cause.kind == SAME_ERROR else f"{cause.text} {cause.advice}".strip()


def an_object(properties: Schema, *required: str, **more: object) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), **more}


TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer"}
FILTER = an_object({"date": TEXT, "limit": NUMBER}, "date")
CLOSED = an_object({"query": TEXT, "max_results": NUMBER}, "query", additionalProperties=False)
NODE: Schema = {**an_object({"name": TEXT, "child": {"$ref": "#/$defs/node"}}, "name")}


@pytest.mark.parametrize(
    ("schema", "arguments", "said"),
    [
        (
            an_object({"filter": FILTER}),
            {"filter": {}},
            "3 calls of search left out filter.date, which is required. Add it.",
        ),
        (
            an_object({"filter": FILTER}),
            {"filter": "x"},
            "In calls of search, filter must be an object.",
        ),
        (
            an_object({"filter": FILTER}),
            {"filter": {"date": 1}},
            "In calls of search, filter.date must be a string.",
        ),
        (
            an_object({"rows": {"type": "array", "items": FILTER}}),
            {"rows": [{"date": "a"}, {"date": "a", "limit": 1.5}]},
            "In calls of search, 'rows[1].limit' must be an integer.",
        ),
        (
            an_object({"q": {"type": ["string", "null"]}}),
            {"q": 1},
            "In calls of search, q must be a string or null.",
        ),
        (
            an_object({"q": {"anyOf": [TEXT, {"type": "null"}]}}),
            {"q": 1},
            "In calls of search, q must be a string or null.",
        ),
        (
            an_object({"q": {"oneOf": [{"enum": ["a"]}, {"const": "b"}]}}),
            {"q": "c"},
            "In calls of search, q must be a or b.",
        ),
        (
            an_object({"q": {"anyOf": [FILTER, TEXT]}}),
            {"q": {"limit": 1}},
            "3 calls of search left out q.date, which is required. Add it.",
        ),
        (
            an_object(
                {
                    "q": {
                        "anyOf": [
                            an_object({"a": TEXT, "b": TEXT}, "a"),
                            an_object({"c": TEXT}, "b"),
                        ]
                    }
                }
            ),
            {"q": {}},
            "3 calls of search left out q.a and q.b, one of which is required. Add one of them.",
        ),
        (
            an_object({"q": {"anyOf": [FILTER, an_object({"limit": TEXT}, "limit"), TEXT]}}),
            {"q": {"limit": 1}},
            "In calls of search, q must be in one of the forms that its schema allows.",
        ),
        (
            an_object({"q": {"allOf": [TEXT, {"enum": ["a"]}]}}),
            {"q": 1},
            "In calls of search, q must be a string.",
        ),
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
        (
            an_object({"q": {"enum": [1, True, None]}}),
            {"q": False},
            "In calls of search, q must be 1, true or null.",
        ),
        (
            CLOSED,
            {"query": "a", "maxResults": 3},
            "search takes no argument named maxResults. Did you mean max_results?",
        ),
        (
            CLOSED,
            {"query": "a", "zzz": 3},
            "search takes no argument named zzz. It takes query and max_results.",
        ),
        (
            an_object({}, additionalProperties=False),
            {"a": 1},
            "search takes no argument named a. It takes none.",
        ),
        (
            an_object({"in": CLOSED}),
            {"in": {"query": "a", "x": 3}},
            "In calls of search, in takes no argument named x. It takes query and max_results.",
        ),
        (
            an_object({}, additionalProperties=NUMBER),
            {"a": "x"},
            "In calls of search, a must be an integer.",
        ),
    ],
)
def test_argument_a_schema_refuses_is_named_by_path(
    schema: Schema, arguments: dict[str, Any], said: str
) -> None:
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
        (
            an_object({"q": TEXT}, additionalProperties=False, patternProperties={"^x": {}}),
            {"q": "x", "x1": 1},
        ),
        (an_object({}, additionalProperties=False, allOf=[CLOSED]), {"query": "a"}),
        (
            an_object({}, allOf=[CLOSED, an_object({"b": TEXT}, additionalProperties=False)]),
            {"query": "a", "b": "x"},
        ),
        (an_object({"id": {"type": "string", "readOnly": True}}, "id"), {"x": 1}),
        (
            an_object(
                {"q": {"$id": "x", "$ref": "#/$defs/a", "$defs": {"a": NUMBER}}},
                **{"$defs": {"a": TEXT}},
            ),
            {"q": 1},
        ),
        (
            an_object({"q": {"type": "array", "prefixItems": [TEXT], "items": NUMBER}}),
            {"q": ["x", "y"]},
        ),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, {"q": 1}),
        ({"$ref": "#"}, {"q": 1}),
        ({"$ref": "#/$defs/none"}, {"q": 1}),
        ({"anyOf": [{"$ref": "#"}] * 9}, {"q": 1}),
        (
            an_object({f"p{number}": {"anyOf": [TEXT] * 100} for number in range(100)}),
            {"p50": 1, "p99": 2},
        ),
    ],
)
def test_uncertain_fault_is_not_named(schema: Schema, arguments: dict[str, Any]) -> None:
    """A branch may accept it, or the schema is contradictory, refers elsewhere or is too large."""
    arguments = (
        {**dict.fromkeys([f"p{number}" for number in range(50)], "x"), **arguments}
        if "p99" in arguments
        else arguments
    )

    assert not told(schema, arguments)


LETTERS = st.sampled_from("abc")
Part = st.recursive(
    st.sampled_from(
        [
            {},
            TEXT,
            NUMBER,
            {"type": ["boolean", "null"]},
            {"enum": ["a", 1, None]},
            {"const": "a"},
            {"$ref": "#/$defs/d"},
        ]
    ),
    lambda inner: (
        st.dictionaries(
            st.sampled_from(["anyOf", "oneOf", "allOf"]),
            st.lists(inner, min_size=1, max_size=3),
            min_size=1,
            max_size=1,
        )
        | st.fixed_dictionaries(
            {
                "properties": st.dictionaries(LETTERS, inner, max_size=3),
                "required": st.lists(LETTERS, unique=True, max_size=2),
                "additionalProperties": st.booleans() | inner,
            }
        )
        | st.fixed_dictionaries({"type": st.just("array"), "items": inner})
    ),
    max_leaves=6,
)
Given = st.recursive(
    st.sampled_from([None, True, 1, 1.5, "a", "b"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(Part, Part, st.dictionaries(st.sampled_from("abcd"), Given, max_size=3))
def test_named_fault_is_refused_by_a_validator(
    schema: Schema, shared: Schema, value: dict[str, Any]
) -> None:
    """Compared with the reference implementation in Python."""
    whole = {**schema, "$defs": {"d": shared}}
    fault = find_fault(whole, Document(json.dumps(value).encode()).value())

    if fault is not None:
        with suppress(RecursionError):
            assert not Draft202012Validator(whole).is_valid(value)
