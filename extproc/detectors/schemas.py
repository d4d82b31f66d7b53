"""What a JSON schema certainly refuses in a call's arguments, for notes.

It knows the part of JSON Schema 2020-12 that tools use, and OpenAPI's `nullable`. Other keywords
only refuse more, so they are skipped; if they could allow more, or a schema contradicts itself,
there is no result. The number of steps is bounded for any nesting and any references.
"""

# interpreted: runs only for notes

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec import Raw

from extproc.request.document import Json

MISSING: Final = "missing"
WRONG: Final = "wrong"
UNKNOWN: Final = "unknown"
"""Kinds of faults."""

_MOST_STEPS: Final = 400
_STEP_BITS: Final = 3
_PATH_BITS: Final = 8
"""Maximum steps for one schema. Comparing a value with a part of it takes one step, and so do 2 to
the power of these bits of names, or of letters in a path."""

_DEEPEST: Final = 16
_LONGEST_REFERENCE: Final = 512

_WORDS: Final[dict[str, str]] = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
"""The types of JSON Schema (section 6.1.1), in words."""

_BRANCHES: Final = ("allOf", "anyOf", "oneOf")
_LOOSE: Final = frozenset(
    {*_BRANCHES, "$ref", "$dynamicRef", "if", "patternProperties", "dependentSchemas", "not"}
)
"""Keywords beside which `additionalProperties` is often a mistake, so it is ignored."""

_NO_FORM: Final = "in one of the forms that its schema allows"


class Fault(NamedTuple):
    """Something that a schema refuses.

    Attributes:
        kind: MISSING, WRONG or UNKNOWN.
        path: place of the value, such as `filter.date` or `rows[2].id`; empty for the arguments as
            a whole. For missing or unknown names, place of their object.
        names: the missing names, one of which is enough if `any_of`; or the unknown name.
        wanted: descriptions of accepted values, any of which fits after `must be`.
        values: the accepted values, instead of descriptions.
        known: names that the object may have.
        long: there are no arguments at all, perhaps because a text was too long to write.
    """

    kind: str
    path: str = ""
    names: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    any_of: bool = False
    long: bool = False


class _TooMuchError(Exception):
    """The schema takes too many steps."""


def find_fault(schema: Json, value: Json) -> Fault | None:
    """The first thing that a schema certainly refuses; None if it may accept, or takes too long."""
    try:
        return _Search(schema).check(schema, value, "", 0)
    except _TooMuchError:
        return None


def join_path(path: str, name: str) -> str:
    """The path of a member of an object."""
    return f"{path}.{name}" if path else name


class _Search:
    """Compares a value with a schema."""

    def __init__(self, root: Json) -> None:
        self._root = root
        self._left = _MOST_STEPS

    def _take(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise _TooMuchError

    def check(
        self, schema: Json, value: Json, path: str, depth: int, *, loose: bool = False
    ) -> Fault | None:
        """What a part of the schema refuses; `loose`: other parts apply to the same value."""
        self._take(1)
        if depth > _DEEPEST:
            raise _TooMuchError
        if not isinstance(schema, dict) or _is_open(schema, value, depth):
            return None
        names = _read_types(schema)
        fault = _check_type(names, value, path) or self._check_values(schema, names, value, path)
        fault = fault or self._check_parts(schema, names, value, path, depth)
        if fault is None and isinstance(value, dict):
            return self._check_object(schema, value, path, depth, loose=loose)
        if fault is None and isinstance(value, list):
            return self._check_items(schema, value, path, depth)
        return fault

    def _check_values(
        self, schema: dict[str, Json], names: Sequence[str], value: Json, path: str
    ) -> Fault | None:
        """Compare a value with `enum` and `const`, if these contain only simple values."""
        allowed = [schema["const"]] if "const" in schema else schema.get("enum")
        if not isinstance(allowed, list) or not _is_plain(value):
            return None
        self._take(len(allowed) >> _STEP_BITS)
        possible = [each for each in allowed if not names or _fits(names, each)]
        if (
            not possible
            or not all(_is_plain(each) for each in possible)
            or any(_is_same(each, value) for each in allowed)
        ):
            return None
        return Fault(WRONG, path, values=tuple([_write(each) for each in possible]))

    def _follow(self, reference: Json) -> Json:
        """The part of the schema that a local reference names; None if there is none."""
        if (
            not isinstance(reference, str)
            or not reference.startswith("#")
            or len(reference) > _LONGEST_REFERENCE
        ):
            return None
        part = self._root
        for step in reference[1:].split("/")[1:]:
            self._take(1)
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(part, dict):
                part = part.get(key)
            elif (
                isinstance(part, list)
                and key.isdecimal()
                and len(key) <= _STEP_BITS
                and int(key) < len(part)
            ):
                part = part[int(key)]
            else:
                return None
        return part if reference == "#" or reference.startswith("#/") else None

    def _check_parts(
        self, schema: dict[str, Json], names: Sequence[str], value: Json, path: str, depth: int
    ) -> Fault | None:
        """What the other parts that apply to the same value refuse."""
        fault = (
            self.check(self._follow(schema["$ref"]), value, path, depth + 1, loose=True)
            if "$ref" in schema
            else None
        )
        for key in _BRANCHES:
            branches = schema.get(key)
            if fault is None and isinstance(branches, list) and branches:
                fault = self._check_branches(key, names, branches, value, path, depth)
        return fault

    def _check_branches(  # noqa: PLR0913  # what a check needs
        self,
        key: str,
        names: Sequence[str],
        branches: list[Json],
        value: Json,
        path: str,
        depth: int,
    ) -> Fault | None:
        """The fault if a part of `allOf`, or all of `anyOf` or `oneOf`, refuse the value."""
        faults: list[Fault] = []
        for branch in branches:
            found = self.check(branch, value, path, depth + 1, loose=True)
            if found is not None:
                faults.append(found)
                continue
            if key != "allOf":
                return None
        if key != "allOf":
            return _choose(faults, path)
        if not faults or _contradict(
            [names, *[_read_types(branch) for branch in branches if isinstance(branch, dict)]]
        ):
            return None
        return faults[0]

    def _check_object(
        self, schema: dict[str, Json], value: dict[str, Json], path: str, depth: int, *, loose: bool
    ) -> Fault | None:
        properties, required, others = (
            schema.get("properties", {}),
            schema.get("required"),
            schema.get("additionalProperties"),
        )
        if not isinstance(properties, dict):
            return None
        named = (
            [name for name in required if isinstance(name, str)]
            if isinstance(required, list)
            else []
        )
        self._take(len(named) >> _STEP_BITS)
        missing = [name for name in dict.fromkeys(named) if name not in value]
        if others is False and any(name not in properties for name in missing):
            return None  # no object fits
        missing = [name for name in missing if not _is_read_only(properties.get(name))]
        if missing:
            long = (
                not path and not value and any(_is_text(properties.get(name)) for name in missing)
            )
            return Fault(MISSING, path, tuple(missing), long=long)
        closed = others is False and not loose and _LOOSE.isdisjoint(schema)
        for name, item in value.items():
            self._take((len(path) + len(name)) >> _PATH_BITS)
            if name in properties:
                fault = self.check(properties[name], item, join_path(path, name), depth + 1)
            elif closed:
                self._take(len(properties) >> _STEP_BITS)
                fault = Fault(UNKNOWN, path, (name,), known=tuple(properties))
            else:
                inside = (
                    others
                    if isinstance(others, dict) and "patternProperties" not in schema
                    else None
                )
                fault = self.check(inside, item, join_path(path, name), depth + 1)
            if fault is not None:
                return fault
        return None

    def _check_items(
        self, schema: dict[str, Json], value: list[Json], path: str, depth: int
    ) -> Fault | None:
        items = schema.get("items")
        if "prefixItems" in schema or not isinstance(items, dict):
            return None
        for place, item in enumerate(value):
            fault = self.check(items, item, f"{path}[{place}]", depth + 1)
            if fault is not None:
                return fault
        return None


def _choose(faults: list[Fault], path: str) -> Fault:
    """One fault for a value that no branch accepts: the intended branch's, or a common one."""
    own = [fault for fault in faults if fault.kind == WRONG and fault.path == path]
    inside = [fault for fault in faults if fault not in own]
    if len(inside) == 1 or (inside and all(fault == inside[0] for fault in inside)):
        return inside[0]
    if not inside:
        wanted = dict.fromkeys([words for fault in own for words in fault.wanted])
        values = dict.fromkeys([text for fault in own for text in fault.values])
        if not (wanted and values):
            return Fault(WRONG, path, wanted=tuple(wanted), values=tuple(values))
    elif all(
        fault.kind == MISSING and fault.path == path and len(fault.names) == 1 for fault in inside
    ):
        return Fault(
            MISSING, path, tuple(dict.fromkeys([fault.names[0] for fault in inside])), any_of=True
        )
    return Fault(WRONG, path, wanted=(_NO_FORM,))


def _read_types(schema: dict[str, Json]) -> list[str]:
    """The types that a schema names; empty if it names none, or unknown ones."""
    given = schema.get("type")
    kinds = given if isinstance(given, list) else [given]
    names = [kind.lower() for kind in kinds[: len(_WORDS)] if isinstance(kind, str)]
    return names if len(names) == len(kinds) and all(name in _WORDS for name in names) else []


def _is_open(schema: dict[str, Json], value: Json, depth: int) -> bool:
    """Whether a schema allows null in OpenAPI's way, or has its own base for references."""
    return (value is None and schema.get("nullable") is True) or ("$id" in schema and depth > 0)


def _check_type(names: Sequence[str], value: Json, path: str) -> Fault | None:
    if not names or _fits(names, value):
        return None
    return Fault(WRONG, path, wanted=tuple([_WORDS[name] for name in dict.fromkeys(names)]))


def _fits(names: Sequence[str], value: Json) -> bool:
    """Whether a value has one of these types.

    Raw is a normalized number with a fraction or an exponent.
    """
    if value is None:
        return "null" in names
    if isinstance(value, bool):
        return "boolean" in names
    if isinstance(value, str):
        return "string" in names
    if isinstance(value, list):
        return "array" in names
    if isinstance(value, dict):
        return "object" in names
    return "number" in names or (
        "integer" in names and not (isinstance(value, Raw) and bytes(value).find(b"e-") >= 0)
    )


def _contradict(parts: Sequence[Sequence[str]]) -> bool:
    """Whether no value has all of these types."""
    known = [set(names) | ({"integer"} if "number" in names else set()) for names in parts if names]
    return bool(known) and not set.intersection(*known)


def _is_plain(value: Json) -> bool:
    return value is None or isinstance(value, (str, int))


def _is_same(one: Json, other: Json) -> bool:
    """Whether two values may be equal; exact only for simple values. `true` is not 1."""
    return isinstance(one, bool) == isinstance(other, bool) and (not _is_plain(one) or one == other)


def _write(value: Json) -> str:
    """A simple value, as in JSON but without quotes."""
    return (
        {True: "true", False: "false", None: "null"}[value]
        if value is None or isinstance(value, bool)
        else str(value)
    )


def _is_read_only(schema: Json) -> bool:
    return isinstance(schema, dict) and schema.get("readOnly") is True


def _is_text(schema: Json) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "string" and "enum" not in schema
