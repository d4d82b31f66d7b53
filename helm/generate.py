"""Make the chart's values.schema.json and README.md's tables from the comments of values.yaml.

The format of values.yaml:
- The comment right above a key documents it. Each value needs one; maps do not, because their keys
  have comments.
- A line `@schema {...}` in a comment extends the schema, which otherwise is the default's type.
  With `$ref` or `if`, it is the whole schema of the value, and keys below are ignored. A `$ref`
  names a definition: of Kubernetes, by its full name; `Bundle`, a policy bundle; `Settings`, the
  flags of `loopguard serve` without a value of their own; or one in `MESH`.
- A comment that starts with `##` is a heading of the README.

`envoy/` gets the access log and the usage filters of `loopguard envoy-config`.

The schema is draft-07, which every version of Helm reads. Policies have a 2020-12 schema: known
keywords are converted, and any other is an error. That schema lacks rules between a policy's
fields. The most important ones are derived by validating samples with `rules`; the process itself
checks them all.
"""  # noqa: INP001  # a script beside the chart, not a package

from __future__ import annotations

import json
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

import helm_python
import yaml

from extproc.apis import API_NAMES, write_header_regex
from extproc.cli.envoy_config.options import EnvoyOptions
from extproc.cli.envoy_config.render import write_shared_parts
from extproc.options import read_options
from extproc.policy import bundle, rules
from extproc.settings import Settings

Schema = dict[str, Any]

CHART = Path(__file__).parent / "loopguard"
KUBERNETES = "kubernetes-json-schema/v1.37.0-local-strict/_definitions.json"

OWN_VALUES = {
    *("policy", "namespace_of", "listen", "admin", "shadow", "drain_delay", "drain_timeout"),
    *("store", "store_password", "store_password_file"),
    *(
        "admin_token_file",
        "tls_cert",
        "tls_key",
        "tls_client_ca",
        "tls_client_san",
        "allow_plaintext",
    ),
}
"""Settings that the templates derive from values with other names."""

TABLES = re.compile(r"(?<=<!-- values -->\n).*(?=<!-- end of values -->)", re.DOTALL)
REFERENCE = "#/definitions/"


class ChartError(Exception):
    """values.yaml, or a source of the schema, is invalid."""


# ---- values.yaml


@dataclass
class Value:
    """One value of the chart.

    Attributes:
        path: its keys, from the outside in.
        words: the text of its comment.
        extra: the content of `@schema`.
        heading: the nearest heading above it.
        below: the values in it, if it is a plain map.
    """

    path: tuple[str, ...]
    words: str
    extra: Schema
    heading: str
    default: Any
    below: list[Value] = field(default_factory=list)


def read_values(text: str) -> list[Value]:
    """The values in order, nested by map; raises ChartError if one has no comment."""
    defaults = helm_python.values_from_yaml(text)
    top: list[Value] = []
    open_maps: list[Value] = []
    comment: list[str] = []
    heading = ""
    closed_at: int | None = None  # the indentation of a value whose content is ignored
    for line in text.splitlines():
        words = line.strip()
        indent = len(line) - len(line.lstrip())
        if words.startswith("#"):
            comment.append(words.lstrip("# "))
            heading = words[3:] if words.startswith("## ") else heading
            continue
        key = re.match(r"([A-Za-z]\w*):", words)
        inside = closed_at is not None and indent > closed_at
        if key and not inside:
            depth = indent // 2
            del open_maps[depth:]
            path = (*(open_maps[-1].path if open_maps else ()), key[1])
            value = _value(path, comment, heading, defaults)
            (open_maps[-1].below if open_maps else top).append(value)
            open_maps.append(value)
            closed_at = None if _is_map(value) else indent
        comment = []
    return top


def _value(path: tuple[str, ...], comment: Sequence[str], heading: str, defaults: Schema) -> Value:
    default: Any = defaults
    for step in path:
        default = default[step]
    extra: Schema = {}
    words = []
    for line in comment:
        if line.startswith("@schema "):
            extra |= json.loads(line.removeprefix("@schema "))
        else:
            words.append(line)
    value = Value(path, " ".join(words), extra, heading, default)
    if not words and not _is_map(value):
        raise ChartError(f"{'.'.join(path)} has no comment")
    return value


def _is_map(value: Value) -> bool:
    """Whether the value is a plain map, whose keys are values of their own."""
    return isinstance(value.default, dict) and not value.extra


# ---- values.schema.json


_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def values_schema(values: Sequence[Value]) -> Schema:
    """The content of values.schema.json."""
    properties: Schema = {value.path[-1]: _schema(value) for value in values}
    properties["global"] = {"type": "object", "description": "Values of a parent chart; ignored."}
    made = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the Loopguard chart",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }
    return {
        **made,
        "definitions": _used(made, {**kubernetes(), **policies(), **MESH, "Settings": settings()}),
    }


def _schema(value: Value) -> Schema:
    if _is_map(value):
        below = {item.path[-1]: _schema(item) for item in value.below}
        return {"type": "object", "additionalProperties": False, "properties": below}
    if "$ref" in value.extra or "if" in value.extra:
        return {**value.extra, "description": value.words}
    kind = _TYPES[type(value.default)]
    if kind in ("array", "object") and not value.extra:
        raise ChartError(f"{'.'.join(value.path)} needs a line '@schema' for its items")
    return {"type": kind, **value.extra, "description": value.words, "default": value.default}


MESH: Schema = {
    "Scope": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{0,57}$"},  # leaves room for `-canary`
    "IstioRoute": {
        "type": "object",
        "additionalProperties": False,
        "required": ["name"],
        "properties": {
            "name": {"type": "string", "minLength": 1},
            "virtualHost": {"type": "string", "minLength": 1},
            "bodyMode": {"enum": ["strict", "tolerant"]},
            "policies": {
                "type": "array",
                "minItems": 1,
                "items": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,128}$"},
            },
            "bundle": {"$ref": f"{REFERENCE}RouteBundle"},
        },
    },
    "Team": {
        "type": "object",
        "additionalProperties": False,
        "required": ["configMap"],
        "properties": {
            "configMap": {
                "type": "string",
                "pattern": "^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$",
                "maxLength": 253,
            },
            "hosts": {
                "type": "array",
                "items": {"type": "string", "pattern": r"^[A-Za-z0-9_.-]+$"},
            },
            "paths": {"type": "array", "items": {"type": "string", "pattern": r"^/[^,\s?#]*$"}},
            "routes": {"type": "array", "items": {"type": "string", "pattern": r"^[^,\s]+$"}},
            "ids": {
                "type": "array",
                "items": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,127}$"},
            },
        },
    },
    "TargetRef": {
        "type": "object",
        "additionalProperties": False,
        "required": ["name"],
        "properties": {
            "kind": {"enum": ["HTTPRoute", "GRPCRoute", "Gateway"]},
            "name": {"type": "string", "minLength": 1},
            "sectionName": {"type": "string", "minLength": 1},
        },
    },
}
"""Definitions of attachments to a mesh, and of teams."""


def settings() -> Schema:
    """The flags of `loopguard serve` that the chart passes on unchanged, in camelCase."""
    hints = typing.get_type_hints(Settings)
    properties: Schema = {}
    for item in fields(Settings):
        if item.name in OWN_VALUES:
            continue
        choices = typing.get_args(hints[item.name]) or re.fullmatch(
            r"[a-z]+(\|[a-z]+)+", item.metadata["metavar"]
        )
        described: Schema = {"type": _TYPES[type(item.default)]}
        if choices:
            described = {"enum": item.metadata["metavar"].split("|")}
        elif described["type"] in ("integer", "number") and not _accepts(
            item.metadata["parse"], "0"
        ):
            described["exclusiveMinimum"] = 0
        first, *rest = item.name.split("_")
        name = first + "".join(part.capitalize() for part in rest)
        properties[name] = {
            **described,
            "description": item.metadata["help"],
            "default": item.default,
        }
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _accepts(parse: Callable[[str], object], text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


def kubernetes() -> Schema:
    """Kubernetes' definitions, without descriptions."""
    text = resources.files("kubernetes_validate").joinpath(KUBERNETES).read_text()
    raw = {name: convert(_strip_remarks(made)) for name, made in json.loads(text)["$defs"].items()}
    return {name: choose(made, raw) for name, made in raw.items()}


def _strip_remarks(schema: Any) -> Any:  # noqa: ANN401  # raw JSON
    """Remove descriptions, formats and extensions."""
    if isinstance(schema, list):
        return [_strip_remarks(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _strip_remarks(item)
        for key, item in schema.items()
        if key != "format" and not _is_remark(key, item)
    }


def _is_remark(key: str, item: object) -> bool:
    return (key == "description" and isinstance(item, str)) or key.startswith("x-kubernetes-")


def _used(schema: Any, pool: Schema) -> Schema:  # noqa: ANN401  # raw JSON
    """The definitions that a schema references, directly or indirectly, by name."""
    found: Schema = {}
    waiting = list(_references(schema))
    while waiting:
        name = waiting.pop()
        if name not in pool:
            raise ChartError(f"there is no definition of {name}")
        if name not in found:
            found[name] = pool[name]
            waiting += _references(pool[name])
    return dict(sorted(found.items()))


def _references(schema: Any) -> Iterator[str]:  # noqa: ANN401  # raw JSON
    if isinstance(schema, list):
        for item in schema:
            yield from _references(item)
    elif isinstance(schema, dict):
        for key, item in schema.items():
            if key == "$ref" and isinstance(item, str):
                yield item.removeprefix(REFERENCE)
            else:
                yield from _references(item)


# ---- From draft 2020-12 to draft-07


def convert(schema: Any) -> Any:  # noqa: ANN401  # raw JSON
    """Convert a schema to draft-07; raises ChartError for an unknown keyword."""
    if not isinstance(schema, dict):  # true and false
        return schema
    if "$ref" in schema:
        if constraints := schema.keys() - {"$ref", "description", "default"}:
            raise ChartError(
                f"draft-07 ignores keywords beside $ref: {', '.join(sorted(constraints))}"
            )
        return {"$ref": REFERENCE + schema["$ref"].rpartition("/")[2]}
    # Both are annotations
    if unknown := schema.keys() - _KEYWORDS.keys() - {"title", "discriminator"}:
        raise ChartError(
            f"unknown keywords: {', '.join(sorted(unknown))}; check that they mean the same in "
            "draft-07"
        )
    return {
        key: _KEYWORDS[key](item)
        for key, item in schema.items()
        if key in _KEYWORDS and not (key == "default" and item is None)
    }


def _many(schemas: Sequence[Any]) -> list[Any]:
    return [convert(schema) for schema in schemas]


def _named(schemas: Mapping[str, Any]) -> Schema:
    return {name: convert(schema) for name, schema in schemas.items()}


def _as_it_is(value: Any) -> Any:  # noqa: ANN401  # raw JSON
    return value


def _first_paragraph(text: str) -> str:
    return text.partition("\n\n")[0].replace("\n", " ")


_KEYWORDS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(
        ("items", "additionalProperties", "propertyNames", "not", "if", "then", "else"), convert
    ),
    **dict.fromkeys(("anyOf", "oneOf", "allOf"), _many),
    **dict.fromkeys(("properties", "patternProperties"), _named),
    **dict.fromkeys(
        ("type", "enum", "const", "required", "pattern", "format", "default"), _as_it_is
    ),
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), _as_it_is
    ),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "uniqueItems"), _as_it_is),
    **dict.fromkeys(("minProperties", "maxProperties"), _as_it_is),
    "description": _first_paragraph,
}
"""The conversion of each keyword's value."""


def choose(schema: Any, definitions: Schema) -> Any:  # noqa: ANN401  # raw JSON
    """Replace `anyOf` and `oneOf` by choices on the value's type: errors name the right branch."""
    if isinstance(schema, list):
        return [choose(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: choose(item, definitions) for key, item in schema.items()}
    for key in ("anyOf", "oneOf"):
        if isinstance(made.get(key), list):
            decided = _by_type(made[key], definitions)
            if decided is not None:
                rest = {name: item for name, item in made.items() if name != key}
                made = {**decided, **rest}
    return made


def _by_type(branches: Sequence[Schema], definitions: Schema) -> Schema | None:
    """A schema that chooses a branch by the value's type, or None if types are not enough."""
    kinds = [_kinds(branch, definitions) for branch in branches]
    every = [kind for found in kinds for kind in found]
    if all(branch.keys() == {"type"} for branch in branches):
        return {"type": sorted(set(every))}
    if not all(kinds) or len(set(every)) < len(every) or {"integer", "number"} <= set(every):
        return None
    made: Schema = {}
    for branch, found in zip(reversed(branches), reversed(kinds), strict=True):
        if branch.keys() == {"type"}:
            continue
        if (
            len(branches) == 2  # noqa: PLR2004
            and ["null"] in kinds
            and branch.keys().isdisjoint({"$ref", "enum", "const"})
        ):
            made = branch  # its other keywords ignore null
        else:
            step: Schema = {"if": {"type": found}, "then": branch}
            made = {**step, "else": made} if made else step
    return {**made, "type": sorted(every)}


def _kinds(schema: Schema, definitions: Schema) -> list[str]:
    """The types that a schema accepts; empty if it has no type."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].removeprefix(REFERENCE)]
    kinds = schema.get("type", [])
    return [kinds] if isinstance(kinds, str) else list(kinds)


# ---- Policies


def policies() -> Schema:
    """Definitions of a bundle and its parts."""
    raw = {name: convert(made) for name, made in bundle.make_schema()["$defs"].items()}
    definitions: Schema = {name: choose(made, raw) for name, made in raw.items()}
    definitions |= _on_routes(definitions)
    definitions["Spec"]["allOf"] = [_selector_rule(definitions)]
    definitions["LoopDetection"]["allOf"] = [
        *_required_rules(definitions),
        *_ownership_rules(definitions),
        _log_rule(),
    ]
    return definitions


def _on_routes(definitions: Schema) -> Schema:
    """A bundle of a route, whose policies need no selector."""
    spec = {
        **definitions["Spec"],
        "required": [key for key in definitions["Spec"]["required"] if key != "selector"],
    }
    renamed = {f"{REFERENCE}{name}": f"{REFERENCE}Route{name}" for name in ("Policy", "Spec")}
    made = {
        "RouteSpec": spec,
        "RoutePolicy": definitions["Policy"],
        "RouteBundle": definitions["Bundle"],
    }
    return {name: _rename_references(schema, renamed) for name, schema in made.items()}


def _rename_references(schema: Any, renamed: Mapping[str, str]) -> Any:  # noqa: ANN401  # raw JSON
    """Replace references."""
    if isinstance(schema, list):
        return [_rename_references(item, renamed) for item in schema]
    if not isinstance(schema, dict):
        return renamed.get(schema, schema) if isinstance(schema, str) else schema
    return {key: _rename_references(item, renamed) for key, item in schema.items()}


def _selector_rule(definitions: Schema) -> Schema:
    """A selector needs one of the keys that are enough for the loader."""
    enough = [
        key
        for key in definitions["Selector"]["properties"]
        if not _complaints({"selector": {key: "/"}})
    ]
    given = [_required([key], definitions["Selector"]) for key in enough]
    return {"properties": {"selector": {"anyOf": given}}}


def _required(keys: Sequence[str], definition: Schema) -> Schema:
    """Require all of these keys, and values other than null."""
    kinds = {
        key: [kind for kind in _kinds(definition["properties"][key], {}) if kind != "null"]
        for key in keys
    }
    return {
        "required": [*keys],
        "properties": {key: {"type": found} for key, found in kinds.items()},
    }


SAMPLE = {"enabled": True, "window_seconds": 60, "threshold_identical_requests": 5}


def _required_rules(definitions: Schema) -> Iterator[Schema]:
    """The keys that an enabled detector needs, by similarity."""
    for similarity in _similarities(definitions):
        sample = SAMPLE | {"similarity": similarity}
        needed = [
            key
            for key in SAMPLE
            if _loop_complaints({name: sample[name] for name in sample if name != key})
        ]
        when = {
            "properties": {"enabled": {"const": True}, "similarity": {"const": similarity}},
            "required": ["enabled"],
        }
        if similarity != definitions["LoopDetection"]["properties"]["similarity"]["default"]:
            when["required"] = ["enabled", "similarity"]
        yield {"if": when, "then": _required(needed, definitions["LoopDetection"])}


def _ownership_rules(definitions: Schema) -> Iterator[Schema]:
    """Keys that are valid for some similarities only."""
    default = definitions["LoopDetection"]["properties"]["similarity"]["default"]
    similarities = _similarities(definitions)
    for key, described in definitions["LoopDetection"]["properties"].items():
        sample = {key: described.get("default")}
        owners = [
            name for name in similarities if not _loop_complaints({"similarity": name, **sample})
        ]
        if key not in SAMPLE and key != "similarity" and owners != similarities:
            rule = {
                "properties": {"similarity": {"enum": owners}},
                "required": [] if default in owners else ["similarity"],
            }
            yield {"if": {"required": [key]}, "then": rule}


def _log_rule() -> Schema:
    """A sliding log, which stores every request, limits the threshold."""
    log = {"enabled": {"const": True}, "window_type": {"const": "sliding_log"}}
    most = {"threshold_identical_requests": {"maximum": rules.MAX_LOG_THRESHOLD}}
    return {"if": {"properties": log, "required": [*log]}, "then": {"properties": most}}


def _similarities(definitions: Schema) -> list[str]:
    described = definitions["LoopDetection"]["properties"]["similarity"]
    return list(described.get("enum") or [described["const"]])


def _loop_complaints(loop: Schema) -> bool:
    return _complaints({"selector": {"pathExact": "/"}, "loop_detection": loop})


def _complaints(spec: Schema) -> bool:
    return any(True for _ in (*rules.find_selector_errors(spec), *rules.find_errors(spec)))


# ---- README.md


def tables(values: Sequence[Value], definitions: Schema) -> str:
    """A table of values for each heading."""
    made: dict[str, list[str]] = {}
    for value in _leaves(values):
        rows = made.setdefault(value.heading, [])
        rows.append(_row(".".join(value.path), value.default, value.words))
        if value.extra.get("$ref") == f"{REFERENCE}Settings":
            for name, described in definitions["Settings"]["properties"].items():
                default = value.default.get(name, described["default"])
                rows.append(
                    _row(f"{'.'.join(value.path)}.{name}", default, described["description"])
                )
    head = "| value | default | |\n|---|---|---|\n"
    return "\n".join(
        f"### {heading}\n\n{head}" + "\n".join(rows) + "\n" for heading, rows in made.items()
    )


def _leaves(values: Sequence[Value]) -> Iterator[Value]:
    for value in values:
        if value.below:
            yield from _leaves(value.below)
        else:
            yield value


def _row(name: str, default: object, words: str) -> str:
    shown = json.dumps(default)
    # Wider cells break the table
    shown = f"`{shown}`" if len(shown) <= 60 else "see values.yaml"  # noqa: PLR2004
    return f"| `{name}` | {shown} | {words.replace('|', '&#124;')} |"


# ---- The command


_OPTIONS = read_options(EnvoyOptions, {"upstream": "upstream:1"})
"""Default options; the templates insert the chart's values."""


def keep_health(cluster: str) -> str:
    """The cluster's settings that detect a Loopguard that hangs or is gone."""
    (loopguard,) = yaml.safe_load(cluster)
    kept = (
        "typed_extension_protocol_options",
        "health_checks",
        "outlier_detection",
        "common_lb_config",
    )
    return yaml.safe_dump({key: loopguard[key] for key in kept}, sort_keys=False)


def skip_others() -> str:
    """A matcher that skips all requests but those to model APIs, as YAML."""
    kinds = "type.googleapis.com/envoy"
    predicates = [
        {
            "single_predicate": {
                "input": {
                    "name": "path",
                    "typed_config": {
                        "@type": f"{kinds}.type.matcher.v3.HttpRequestHeaderMatchInput",
                        "header_name": ":path",
                    },
                },
                "value_match": {
                    "safe_regex": {"google_re2": {}, "regex": write_header_regex(name)}
                },
            }
        }
        for name in API_NAMES
    ]
    skip = {"@type": f"{kinds}.extensions.filters.common.matcher.action.v3.SkipFilter"}
    matcher = {
        "predicate": {"not_matcher": {"or_matcher": {"predicate": predicates}}},
        "on_match": {"action": {"name": "skip", "typed_config": skip}},
    }
    return yaml.safe_dump({"matcher_list": {"matchers": [matcher]}}, sort_keys=False, width=1000)


def generated() -> dict[Path, str]:
    """All generated files of the chart, with their content."""
    values = read_values((CHART / "values.yaml").read_text())
    schema = values_schema(values)
    readme = (CHART / "README.md").read_text()
    if not TABLES.search(readme):
        raise ChartError(
            "README.md lacks the lines '<!-- values -->' and '<!-- end of values -->' around the "
            "tables"
        )
    made = tables(values, schema["definitions"])
    parts = write_shared_parts(_OPTIONS)
    parts["cluster"] = keep_health(parts["cluster"])
    parts["apis"] = skip_others()
    return {
        CHART / "values.schema.json": json.dumps(schema, indent=2) + "\n",
        CHART / "README.md": TABLES.sub(lambda _: f"\n{made}\n", readme),
        **{CHART / "envoy" / f"{name}.yaml": text for name, text in parts.items()},
    }


if __name__ == "__main__":
    for path, content in generated().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
