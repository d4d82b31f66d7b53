"""Why an agent is stuck, as far as its request shows: what a note for the model can name.

The newest turn decides: what it called, which tools the request declares, and what came back. If the request contradicts
itself, or declares too much, no cause is named.
"""
# interpreted: looks at requests that get a note; msgspec makes its Structs while Python runs

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final, NamedTuple

from msgspec import Raw, Struct, ValidationError, defstruct, json

from extproc.apis import TOOL_WORDS, open_conversation
from extproc.apis.contents import read_arguments
from extproc.apis.conversation import TOOL_KEYS, Conversation
from extproc.apis.messages import CALL
from extproc.decision import Repeat
from extproc.detectors.arguments import THOUGHTS
from extproc.detectors.failures import TRANSIENT
from extproc.detectors.loops import CYCLE, REPEAT
from extproc.detectors.turn import Turn, read_turns
from extproc.request.document import ABSENT, Document, Json, NotCounted, decode_json
from extproc.request.quoting import MAX_QUOTED, quote, quote_all

MISSING_ARGUMENT: Final = "missing_argument"
WRONG_ARGUMENT: Final = "wrong_argument"
UNKNOWN_TOOL: Final = "unknown_tool"
OUTAGE: Final = "outage"
SAME_ERROR: Final = "same_error"
SAME_RESULT: Final = "same_result"
SAME_STEPS: Final = "same_steps"
"""Kinds of causes."""

_LONGEST_LIST: Final = 262_144
"""Longest list of tools that is read, in bytes; decoding it takes half a millisecond."""

_LONGEST_SCHEMA: Final = 65_536
_MOST_NAMED: Final = 3
"""Most arguments, tools and values to name."""

_MOST_TOOLS: Final = 500
_MOST_COMPARED: Final = 256
"""Most tools whose names are compared with one that does not exist."""

_MOST_STEPS: Final = 10
_LONGEST_QUOTE: Final = 200
"""Characters of a result."""

_NEAR: Final = 0.4
"""Least share of pairs of letters that the names of similar tools have in common (Dice's coefficient)."""

_JOINTS: Final = {ord(sign): None for sign in "_-./: "}
_FAILED: Final = "\x15"  # as `Turn.result` marks a failure

_TYPES: Final[Mapping[str, tuple[tuple[type, ...], str]]] = {
    "string": ((str,), "a string"),
    "integer": ((int, Raw), "an integer"),  # Raw is a number with a fraction or an exponent, such as 1e3
    "number": ((int, Raw), "a number"),
    "boolean": ((bool,), "a boolean"),
    "array": ((list,), "an array"),
    "object": ((dict,), "an object"),
    "null": ((type(None),), "null"),
}
"""The types of JSON Schema (2020-12, section 6.1.1), in Python and in words."""


class Cause(NamedTuple):
    """What keeps an agent stuck.

    Attributes:
        kind: one of the kinds above.
        text: whole sentences for the model.
    """

    kind: str
    text: str


def find_cause(document: Document, repeat: Repeat | None) -> Cause | None:
    """The cause of a loop; None if the request shows none.

    Args:
        document: the request's body.
        repeat: the loop, as its history shows it; None if requests are counted.
    """
    if repeat is None:
        return None
    try:
        conversation = open_conversation(document)
        turns = read_turns(conversation, document, THOUGHTS)
        newest = next(turns, None)
        if newest is None:
            return None
        if not newest.failed:
            return _name_steps(newest, turns, repeat) if repeat.rule == CYCLE else _quote_result(newest)
        return _blame_call(conversation, newest, repeat) or _quote_failure(newest)
    except NotCounted:
        return None


def _quote_result(turn: Turn) -> Cause:
    said = _find_line(turn.result)
    told = f"The result was the same each time, and will not change: {said}." if said else "Each time, nothing came back."
    return Cause(SAME_RESULT, told)


def _quote_failure(turn: Turn) -> Cause:
    said = _find_line(turn.result)
    quoted = f": {said}" if said else ""
    if turn.failure == TRANSIENT:
        return Cause(OUTAGE, f"It fails because of an outage{quoted}. Wait before you try again, or finish without it.")
    return Cause(SAME_ERROR, f"Each time, it failed with the same error{quoted}.")


def _name_steps(newest: Turn, older: Iterator[Turn], repeat: Repeat) -> Cause | None:
    length = repeat.calls // max(repeat.count, 1)
    steps = [_name_step(turn) for turn in [newest, *islice(older, min(length, _MOST_STEPS) - 1)]]
    if not all(steps):
        return None
    more = ["..."] if length > _MOST_STEPS else []
    return Cause(SAME_STEPS, f"The steps are {', '.join([*more, *steps[::-1]])}, and again from the start.")


def _name_step(turn: Turn) -> str:
    """A step: the tools, and the first text among their arguments."""
    calls = [part for part in turn.parts if part.kind == CALL]
    if len(calls) != 1:
        return quote_all(turn.names)
    arguments = read_arguments(calls[0].value)
    texts = [text for text in arguments.values() if isinstance(text, str)] if isinstance(arguments, dict) else []
    return quote(calls[0].name) + (f" ({quote(texts[0])})" if texts else "")


def _find_line(result: str) -> str:
    """The line that says most: the first, or the last of a traceback of Python; quoted, empty if there is none."""
    lines = [line.strip() for line in result.replace(_FAILED, "").splitlines() if line and not line.isspace()]
    if not lines:
        return ""
    return quote(lines[-1 if lines[0].startswith("Traceback (most recent") else 0].rstrip("."), _LONGEST_QUOTE)


# --- calls that no tool takes


def _blame_call(conversation: Conversation, turn: Turn, repeat: Repeat) -> Cause | None:
    """What is wrong with the calls of a turn, by the tools that the request declares."""
    tools = _list_declared(conversation)
    for part in turn.parts if tools else ():
        if part.kind != CALL:
            continue
        name = TOOL_WORDS.called.get(part.name, part.name)
        if name in tools:
            found = _blame_arguments(name, _open_schema(tools[name]), read_arguments(part.value), repeat)
        else:
            found = _name_similar(name, list(tools)) if _OTHERS not in tools else None
        if found is not None:
            return found
    return None


def _name_similar(name: str, known: list[str]) -> Cause:
    plain = _strip(name)
    pairs = {plain[place : place + 2] for place in range(len(plain) - 1)}
    near = sorted([(_measure(pairs, _strip(each)), each) for each in known[:_MOST_COMPARED]], reverse=True)[:_MOST_NAMED]
    names = [each for share, each in near if share >= _NEAR]
    if names:
        hint = f"Did you mean {quote(names[0])}?" if len(names) == 1 else f"Similar tools are {quote_all(names)}."
    else:
        hint = f"The tools are {quote_all(known)}."
    return Cause(UNKNOWN_TOOL, f"There is no tool named {quote(name)}. {hint}")


def _strip(name: str) -> str:
    return name[:MAX_QUOTED].casefold().translate(_JOINTS)


def _measure(pairs: set[str], other: str) -> float:
    """The share of pairs of letters that are in another name, too."""
    return 2 * sum([pair in other for pair in pairs]) / max(len(pairs) + len(other) - 1, 1)


def _blame_arguments(tool: str, schema: dict[str, Json], given: Json, repeat: Repeat) -> Cause | None:
    """What is wrong with the arguments of a call, by the schema of the tool."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return None
    cut = not isinstance(given, dict)  # JSON that ends too early, or nothing of it
    arguments: dict[str, Json] = {} if cut else given
    missing = (
        [name for name in required if isinstance(name, str) and name not in arguments] if isinstance(required, list) else []
    )
    if missing:
        return _name_missing(tool, missing, repeat, cut=cut or not arguments)
    for name, value in islice(arguments.items(), _MOST_TOOLS):
        wanted = _find_wanted(properties.get(name), value)
        if wanted:
            return Cause(WRONG_ARGUMENT, f"In calls of {quote(tool)}, {quote(name)} must be {wanted}.")
    return None


def _name_missing(tool: str, missing: list[str], repeat: Repeat, *, cut: bool) -> Cause:
    names = quote_all(missing[:_MOST_NAMED])
    times = f"{repeat.count} calls" if repeat.rule == REPEAT and repeat.count > 1 else "the call"
    them = "it" if len(missing) == 1 else "them"
    text = f"{quote(tool)} requires {names}, and {times} left {them} out."
    return Cause(
        MISSING_ARGUMENT, f"{text} If the text is too long for one call, send it in parts." if cut else f"{text} Add {them}."
    )


def _find_wanted(schema: Json, value: Json) -> str:
    """What a schema wants instead of a value; empty if it may take that, or says it in another way."""
    if not isinstance(schema, dict):
        return ""
    kinds = schema.get("type")
    names = [kind.lower() for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)]
    known = [_TYPES[name] for name in names if name in _TYPES]
    if not known or len(known) < len(names) or (schema.get("nullable") is True and value is None):
        return ""
    if not any(isinstance(value, types) and (types == (bool,) or not isinstance(value, bool)) for types, _ in known):
        return " or ".join([words for _, words in known])
    values = schema.get("enum")
    if isinstance(values, list) and isinstance(value, str) and value not in values:
        texts = [text for text in values if isinstance(text, str)]
        return f"one of {quote_all(texts)}" if texts else ""
    return ""


# --- declared tools


def _make_entry() -> type[Struct]:
    """An entry of a list of tools of any API."""
    schemas = [(key, Raw, ABSENT) for key in sorted(TOOL_WORDS.schemas)]
    inner = defstruct("Inner", [("name", str, ""), *schemas], gc=False)
    fields: list[tuple[str, Any, Any]] = [("name", str, ""), *schemas]
    fields += [(key, inner | None, None) for key in sorted(TOOL_WORDS.wrappers)]
    fields += [(key, list[inner] | None, None) for key in sorted(TOOL_WORDS.lists | {*TOOL_WORDS.groups.values()})]  # type: ignore[valid-type]  # made at run time
    return defstruct("Entry", fields, gc=False)


_Entry: Final[Any] = _make_entry()
_Holder: Final[Any] = defstruct("Holder", [("tools", list[_Entry])], gc=False)
_decode_list: Final = json.Decoder(list[_Entry]).decode
_decode_holder: Final = json.Decoder(_Holder).decode
_INSIDE: Final = (*sorted(TOOL_WORDS.wrappers), *sorted(TOOL_WORDS.lists), *sorted({*TOOL_WORDS.groups.values()}))
_SCHEMAS: Final = sorted(TOOL_WORDS.schemas)
_OTHERS: Final = ""
"""Stands for tools that are not declared by name: built-in ones, and those of servers."""


def _list_declared(conversation: Conversation) -> dict[str, Any]:
    """The declared tools by their names; empty if they cannot be read."""
    tools: dict[str, Any] = {}
    for key in TOOL_KEYS:
        raw = conversation.find_field(key)
        if raw is None or raw is ABSENT or len(raw) > _LONGEST_LIST:
            continue
        try:
            held = bytes(raw).startswith(b"{")
            entries = decode_json(raw, _decode_holder).tools if held else decode_json(raw, _decode_list)
        except ValidationError:
            continue
        for entry in entries[:_MOST_TOOLS]:
            _add_declared(entry, tools)
    return tools


def _add_declared(entry: Any, tools: dict[str, Any]) -> None:  # noqa: ANN401  # made at run time
    if entry.name:
        tools[entry.name] = entry
        return
    inside = [value for value in [getattr(entry, key) for key in _INSIDE] if value]
    for each in [inner for value in inside for inner in (value if isinstance(value, list) else [value])] or [entry]:
        tools[each.name or _OTHERS] = each


def _open_schema(tool: Any) -> dict[str, Json]:  # noqa: ANN401  # made at run time
    """The schema of a tool's arguments, which may be one level below; empty if it is too long, or none."""
    raw: Raw = next((raw for raw in [getattr(tool, key) for key in _SCHEMAS] if raw), ABSENT)
    if raw is ABSENT or len(raw) > _LONGEST_SCHEMA:
        return {}
    value = decode_json(raw)
    if isinstance(value, dict) and "properties" not in value:
        value = next(iter(value.values()), None)
    return value if isinstance(value, dict) else {}
