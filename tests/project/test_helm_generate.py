"""The chart's schema and README are generated from its commented values."""

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # published without type information
import pytest

from helm.generate import ChartError, choose, convert, generated, read_values, values_schema
from tests.support.chart import CHART


def test_schema_and_readme_are_current() -> None:
    stale = [file.name for file, text in generated().items() if file.read_text() != text]

    assert stale == [], "run make chart"


def test_schema_is_draft_07() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    jsonschema.Draft7Validator.check_schema(schema)
    assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"


COMMENTED = """
## Heading

# Not of the value: a blank line follows.

# What it is.
# @schema {"minimum": 1}
count: 1
inner:
  # Words
  # on two lines.
  text: ""
  # Its own affair.
  # @schema {"$ref": "#/definitions/Bundle"}
  bundle:
    bundle_version: 1
    policies:
      - id: a
  # A list.
  # @schema {"items": {"type": "string"}}
  list:
    - a
# After all that.
last: true
"""


def test_schema_comes_from_comments_and_defaults() -> None:
    schema = values_schema(read_values(COMMENTED))

    assert schema["properties"]["count"] == {
        "type": "integer",
        "minimum": 1,
        "description": "What it is.",
        "default": 1,
    }
    assert schema["properties"]["inner"] == {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "text": {"type": "string", "description": "Words on two lines.", "default": ""},
            "bundle": {"$ref": "#/definitions/Bundle", "description": "Its own affair."},
            "list": {
                "type": "array",
                "items": {"type": "string"},
                "description": "A list.",
                "default": ["a"],
            },
        },
    }
    assert list(schema["properties"]) == ["count", "inner", "last", "global"]
    assert {"Bundle", "Policy", "LoopDetection"} <= schema["definitions"].keys()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\n", "a has no comment"),
        ("# Words.\n\na: 1\n", "a has no comment"),
        ("a:\n  # Words.\n  b: 1\n  c: 2\n", "a.c has no comment"),
        ("# Words.\na: []\n", "a needs a line '@schema' for its items"),
        (
            '# Words.\n# @schema {"$ref": "#/definitions/Nothing"}\na: {}\n',
            "there is no definition of Nothing",
        ),
    ],
)
def test_value_without_description_is_rejected(text: str, message: str) -> None:
    with pytest.raises(ChartError, match=message):
        values_schema(read_values(text))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"prefixItems": []},
            "unknown keywords: prefixItems; check that they mean the same in draft-07",
        ),
        (
            {"properties": {"a": {"unevaluatedProperties": False}}},
            "unknown keywords: unevaluatedProperties",
        ),
        ({"$ref": "#/$defs/A", "minimum": 1}, r"draft-07 ignores keywords beside \$ref: minimum"),
    ],
)
def test_keyword_newer_than_draft_07_is_rejected(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(ChartError, match=message):
        convert(schema)


A = {"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": False}
REFERENCE = {"$ref": "#/definitions/A"}
UNIONS = [
    {"anyOf": [REFERENCE, {"type": "null"}]},
    {
        "anyOf": [
            {"oneOf": [REFERENCE, {"type": "array", "items": REFERENCE, "minItems": 1}]},
            {"type": "null"},
        ]
    },
    {"anyOf": [{"type": "string", "pattern": "^a"}, {"type": "null"}]},
    {"anyOf": [{"enum": ["a", "b"], "type": "string"}, {"type": "null"}]},
    {"anyOf": [{"const": "a", "type": "string"}, {"type": "integer", "minimum": 2}]},
    {"oneOf": [{"type": ["string", "null"]}, {"type": ["number", "null"]}]},
    {"anyOf": [{"type": "integer", "minimum": 3}, {"type": "number", "maximum": 1}]},
    {"anyOf": [{"type": "string"}, {"minimum": 1}]},
]
SAMPLES: list[Any] = [
    None,
    "a",
    "b",
    "ab",
    0,
    1,
    2,
    3.5,
    {},
    {"n": 1},
    {"n": "1"},
    {"m": 1},
    [],
    [{}],
    [{"n": "1"}],
    [[]],
]


@pytest.mark.parametrize("union", UNIONS, ids=json.dumps)
def test_union_by_type_accepts_the_same_values(union: dict[str, Any]) -> None:
    definitions = {"A": A}
    decided = choose(union, definitions)

    for sample in SAMPLES:
        both = [
            jsonschema.Draft7Validator({**made, "definitions": definitions}).is_valid(sample)
            for made in (union, decided)
        ]
        if "oneOf" in union and sample is None:
            both[0] = (
                True  # Kubernetes' own unions mean either, and null is in both of their branches
            )
        assert both[0] == both[1], sample


def test_union_by_type_reports_one_branch() -> None:
    decided = {**choose(UNIONS[1], {"A": A}), "definitions": {"A": A}}

    (error,) = jsonschema.Draft7Validator(decided).iter_errors([{"m": 1}])

    assert error.message == "Additional properties are not allowed ('m' was unexpected)"
