"""Reads an assistant's action, without its thoughts: its tool calls, or an action written as text.

Agents without tool calls write their action as text. The search order is: the last fenced code
block, JSON objects with an action or a tool, then XML-like tags or a ReAct line, whichever is last.
A text that is JSON as a whole, or a tag around the code block, comes first, because the block is
only part of it.
"""

from __future__ import annotations

import json
import re
from typing import Final

from extproc.apis.contents import list_texts, read_arguments
from extproc.apis.messages import CALL, TEXT, Part
from extproc.detectors.alike import fold
from extproc.detectors.arguments import is_for_thinking, reduce_arguments, tidy_command
from extproc.request.clients import FAILED_CALL
from extproc.request.document import Json, NotJson, decode_json, open_value, write_canonical

MAX_NAME: Final = 256
"""Longer names of tools and commands are cut to this many characters."""

_ACTION_KEYS: Final = (
    "action",
    "actions",
    "command",
    "commands",
    "tool",
    "tools",
    "tool_name",
    "tool_call",
    "tool_calls",
    "function",
    "function_call",
    "next_action",
    "code",
    "cmd",
    "operation",
)
_ARGUMENT_KEYS: Final = frozenset(
    {
        "action_input",
        "args",
        "arguments",
        "input",
        "kwargs",
        "parameters",
        "params",
        "tool_args",
        "tool_input",
    }
)
_NAME_KEYS: Final = (
    "name",
    "tool",
    "tool_name",
    "function",
    "action",
    "command",
    "cmd",
    "keystrokes",
    "code",
    "type",
)

_THOUGHT_TAGS: Final = (
    "think",
    "thinking",
    "thought",
    "thoughts",
    "reasoning",
    "reflection",
    "rationale",
    "analysis",
    "plan",
    # One list
    "explanation",
    "discussion",
    "scratchpad",
    "memory",
    "observation",
)

_MAX_MARKED: Final = 65_536
"""Maximum length of a text to search for an action, in characters; a longer one is compared as a
whole."""

_TRIES: Final = 8
"""Number of false starts, such as a brace without JSON, after which a search stops, to bound its
time."""

_MAX_FENCES: Final = 1_000
_MAX_TAGS: Final = 1_000

_TAG: Final = re.compile(r"<([A-Za-z_][\w.:-]*)(?:[=\s][^<>]*)?>")
_NAMED_IN_TAG: Final = re.compile(
    r"<(?:[\w.-]+:)?(?:invoke|function|tool|action)(?:\s[^<>]*?name)?=[\"']?([\w.:-]+)"
)
_REACT: Final = re.compile(
    r"^[ \t>*#-]*(?:action|act)(?: *[0-9]+)?[* ]*:[* \t]*", re.IGNORECASE | re.MULTILINE
)
_REACT_END: Final = re.compile(
    r"^[ \t>*#-]*(?:observation|thought|think)(?: *[0-9]+)?[* ]*:", re.IGNORECASE | re.MULTILINE
)
_WORD: Final = re.compile(r"[^\s\[\](){}<>\"'`:;,=|]+")

_WRITTEN_CALLS: Final = "Calling tools:\n[{"
_WRITTEN_NAME: Final = re.compile(r"'function': \{'name': '([^'\\]{1,256})'")
_WRITTEN_ID: Final = re.compile(r"'id': '[^'\\]{0,256}', (?=(?:'type': 'function', )?'function': )")

_FENCE: Final = "```"
_COMMENTED: Final = frozenset({"bash", "console", "py", "python", "sh", "shell", "zsh"})
"""Languages whose comments start with a `#`."""
_SEPARATOR: Final = b"\xff"  # never in UTF-8
_JSON: Final = b"json"
_CODE: Final = b"code"
_TAGS: Final = b"tags"
_LINE: Final = b"line"
_TEXT: Final = b"text"

_scan_json: Final = json.JSONDecoder().raw_decode


class AssistantAction:
    """The assistant's action in one turn; immutable.

    Attributes:
        names: the tools, or the first word of an action in text; empty for mere text.
        spelled: the canonical form of the whole action; equal bytes mean equal actions.
        places: index of each call in `spelled`, by id, or by `number_id` without one; empty without
            calls.
        size: length of the action, in bytes.
    """

    def __init__(
        self, names: tuple[str, ...], spelled: bytes, places: dict[str, int], size: int = 0
    ) -> None:
        self.names = names
        self.spelled = spelled
        self.places = places
        self.size = size


def read_action(parts: list[Part], ignored: frozenset[str]) -> AssistantAction:
    """The action in an assistant message.

    Args:
        parts: the message's parts.
        ignored: names of arguments that are thoughts.

    Raises:
        NotCounted: it is unreadable.
    """
    calls = [part for part in parts if part.kind == CALL]
    if calls:
        return _read_calls(calls, ignored)
    others = [
        write_canonical(open_value(part.value)) for part in parts if part.kind not in {TEXT, CALL}
    ]
    name, spelled = read_text_action("\n".join(list_texts(parts)), ignored)
    size = len(spelled) - spelled.find(_SEPARATOR) - 1  # without the prefix for the kind of action
    return AssistantAction((name,) if name else (), _SEPARATOR.join([spelled, *others]), {}, size)


def read_failed_call(text: str) -> AssistantAction | None:
    """The call that a harness reports as failed; None if the text is not such a report."""
    found = FAILED_CALL.match(text)
    if found is None:
        return None
    name, arguments, unknown = found.groups(default="")
    spelled = _SEPARATOR.join([_TEXT, (name or unknown).encode(), arguments.encode()])
    return AssistantAction((name or unknown,), spelled, {}, len(arguments))


def _read_calls(calls: list[Part], ignored: frozenset[str]) -> AssistantAction:
    """Parallel calls, as a set: order and duplicates do not matter."""
    if len(calls) == 1:
        call = calls[0]
        one = spell_call(call, ignored)
        return AssistantAction((call.name[:MAX_NAME],), one, {call.id or number_id(0): 0}, len(one))
    spelled = [spell_call(call, ignored) for call in calls]
    unique = {call: place for place, call in enumerate(sorted(set(spelled)))}
    ranked = sorted(
        [
            (is_for_thinking(call.name), one, call.name[:MAX_NAME])
            for one, call in zip(spelled, calls, strict=True)
        ]
    )
    names = dict.fromkeys([name for _, _, name in ranked])
    places = {
        call.id or number_id(number): unique[spelled[number]] for number, call in enumerate(calls)
    }
    joined = _SEPARATOR.join(unique)
    return AssistantAction(tuple(names), joined, places, len(joined))


def number_id(number: int) -> str:
    """A substitute id for a call or result without one; some APIs match them by order."""
    return f"\0{number}"


def spell_call(call: Part, ignored: frozenset[str]) -> bytes:
    """The canonical form of a call: its tool, and its arguments without thoughts."""
    value = read_arguments(call.value)
    if isinstance(value, dict):
        value = dict(reduce_arguments(value, call.name, ignored))
    return call.name.encode() + _SEPARATOR + write_canonical(value)


def read_text_action(text: str, ignored: frozenset[str]) -> tuple[str, bytes]:
    """The first word of the action in a text, and the canonical action.

    Without an action, no word and the text.
    """
    if len(text) > _MAX_MARKED:
        return "", _TEXT + _SEPARATOR + fold(text)
    text = _cut_thoughts(text).strip() or text.strip()
    if text.startswith("{") and text.endswith("}"):
        value = _whole_json(text)
        if value is not None:
            return _name_of(value, ignored), _JSON + _SEPARATOR + write_canonical(
                _action_in(value, ignored)
            )
    return (
        _read_written_calls(text)
        or _read_marked(text, ignored)
        or ("", _TEXT + _SEPARATOR + fold(text))
    )


def _read_written_calls(text: str) -> tuple[str, bytes] | None:
    """The calls in smolagents' Python list, without their ids; None if there are none."""
    place = text.rfind(_WRITTEN_CALLS)
    calls = text[place + len(_WRITTEN_CALLS) :] if place >= 0 else ""
    named = _WRITTEN_NAME.search(calls)
    if named is None:
        return None
    return named[1], _CODE + _SEPARATOR + _WRITTEN_ID.sub("\x1e", calls).encode()


def _read_marked(text: str, ignored: frozenset[str]) -> tuple[str, bytes] | None:
    """The action that a text marks as such; None if it marks none."""
    fence = _last_fence(text) if _FENCE in text else None
    tags = _tags(text) if "</" in text or "<" in text else []
    if fence is not None and not any(start < fence[0] and fence[1] < end for _, start, end in tags):
        language = (
            text[max(0, fence[0] - MAX_NAME) : fence[0]].rpartition(_FENCE)[2].strip().lower()
        )
        return _read_code(text[fence[0] : fence[1]], language, ignored)
    if fence is None and "{" in text and '"' in text:
        found = _read_objects(text, ignored)
        if found is not None:
            return found
    line = _react_line(text) if "ct" in text or "CT" in text else None
    if tags and (line is None or line.start() < tags[-1][2]):
        return _read_tags(text, tags)
    return _read_react(text, line) if line is not None else None


def _read_code(code: str, language: str, ignored: frozenset[str]) -> tuple[str, bytes]:
    """The action in a code block: JSON without thoughts, commands without comments."""
    code = code.strip()
    if code.startswith("{") and code.endswith("}"):
        value = _whole_json(code)
        if value is not None:
            return _name_of(value, ignored), _JSON + _SEPARATOR + write_canonical(
                _action_in(value, ignored)
            )
    spelled = tidy_command(code) if language in _COMMENTED else code
    return _first_word(code), _CODE + _SEPARATOR + spelled.encode()


def _last_fence(text: str) -> tuple[int, int] | None:
    """The start and end of the last code block's content; an unclosed block ends with the text.

    Inside a block, a fence that starts a line and has a word after it is content, as in a script
    that writes Markdown.
    """
    found: tuple[int, int] | None = None
    opened, end = -1, 0
    for _ in range(_MAX_FENCES):
        start = text.find(_FENCE, end)
        if start < 0:
            break
        end = start + len(_FENCE)
        while text.startswith("`", end):
            end += 1
        if opened < 0:
            opened = end
        elif _is_blank(text, end) or not _starts_line(text, start):
            if text[opened:start].strip():
                found = opened, start
            opened = -1
    if opened >= 0 and text[opened:].strip():
        found = opened, len(text)
    if found is None:
        return None
    line = text.find("\n", *found)
    return (line if line >= 0 and len(text[found[0] : line].split()) <= 1 else found[0]), found[1]


def _is_blank(text: str, place: int) -> bool:
    """Whether only blanks follow in the line."""
    while place < len(text) and text[place] in " \t\r":
        place += 1
    return place == len(text) or text[place] == "\n"


def _starts_line(text: str, place: int) -> bool:
    """Whether only blanks precede in the line."""
    while place > 0 and text[place - 1] in " \t":
        place -= 1
    return place == 0 or text[place - 1] == "\n"


def _whole_json(text: str) -> dict[str, Json] | None:
    """The JSON object that is the whole text; None for anything else."""
    try:
        value = decode_json(text)
    except NotJson:
        return None
    return value if isinstance(value, dict) else None


def _read_objects(text: str, ignored: frozenset[str]) -> tuple[str, bytes] | None:
    """The JSON objects in a text that name an action or a tool; None if there are none."""
    actions: list[Json] = []
    name = ""
    place = text.find("{")
    tries = _TRIES
    while place >= 0 and tries:
        try:
            _, end = _scan_json(text, place)
        except json.JSONDecodeError as error:
            tries -= 1
            end = max(place + 1, error.pos)  # the text up to the error is one broken object
        except (ValueError, RecursionError):
            break
        else:
            value = _whole_json(text[place:end])
            if value is not None and names_action(value):
                name = name or _name_of(value, ignored)
                actions.append(_action_in(value, ignored))
        place = text.find("{", end)
    return (name, _JSON + _SEPARATOR + write_canonical(actions)) if actions else None


def names_action(value: dict[str, Json]) -> bool:
    """Whether an object names an action or a tool."""
    return any(key in value for key in _ACTION_KEYS) or (
        "name" in value and not _ARGUMENT_KEYS.isdisjoint(value)
    )


def _action_in(value: dict[str, Json], ignored: frozenset[str]) -> Json:
    """An object without thoughts.

    If its action is an object or list, only that and argument keys remain.
    """
    name = _name_of(value, ignored)
    acting = {key for key in _ACTION_KEYS if isinstance(value.get(key), dict | list)}
    if acting:
        return {key: item for key, item in value.items() if key in acting or key in _ARGUMENT_KEYS}
    left: dict[str, Json] = {
        key: item for key, item in value.items() if key not in ignored
    } or value
    for key in left.keys() & _ARGUMENT_KEYS:
        given = left[key]
        if isinstance(given, dict):
            left = {**left, key: dict(reduce_arguments(given, name, ignored))}
    return dict(reduce_arguments(left, name, ignored))


def _name_of(value: dict[str, Json], ignored: frozenset[str]) -> str:
    """The name of an object's action: the tool, or the first word of the command."""
    found: Json = next((value[key] for key in _ACTION_KEYS if value.get(key)), value)
    for _ in range(4):  # levels of lists and objects around a name
        if isinstance(found, list):
            found = found[0] if found else ""
        elif isinstance(found, dict):
            named = next(
                (found[key] for key in _NAME_KEYS if isinstance(found.get(key), str | dict)), None
            )
            found = (
                named
                if named is not None
                else next((key for key in found if key not in ignored), "")
            )
        else:
            break
    return _first_word(found) if isinstance(found, str) else ""


def _tags(text: str) -> list[tuple[str, int, int]]:
    """The outermost elements of a text, with start and end.

    If no element is closed: the last unclosed one that starts a line.
    """
    found: list[tuple[str, int, int]] = []
    tries = _TRIES
    unclosed: list[tuple[str, int, int]] = []
    place = 0
    while tries and len(found) < _MAX_TAGS:
        tag = _TAG.search(text, place)
        if tag is None:
            break
        place = tag.end()
        if tag.group().endswith("/>"):
            continue
        name = tag.group(1)
        closing = f"</{name}>"
        end = text.find(closing, place)
        if end >= 0:
            place = end + len(closing)
            found.append((name, tag.start(), place))
        else:
            tries -= 1
            if _starts_line(text, tag.start()):
                unclosed = [(name, tag.start(), len(text))]
    return found or unclosed


def _read_tags(text: str, tags: list[tuple[str, int, int]]) -> tuple[str, bytes]:
    """The action in these elements, without the text between them."""
    _, start, end = tags[0]
    named = _NAMED_IN_TAG.search(text, start, min(end, start + 4 * MAX_NAME))
    name = named.group(1) if named is not None else tags[0][0]
    return name[:MAX_NAME], _TAGS + _SEPARATOR + "\n".join(
        [text[start:end] for _, start, end in tags]
    ).encode()


def _react_line(text: str) -> re.Match[str] | None:
    """The last `Action:` at the start of a line."""
    last = None
    for match in _REACT.finditer(text):
        last = match
    return last


def _read_react(text: str, line: re.Match[str]) -> tuple[str, bytes] | None:
    """The action after `Action:`, up to the next thought or an observation of the model's own."""
    end = _REACT_END.search(text, line.end())
    action = text[line.end() : end.start() if end is not None else len(text)].strip()
    return (_first_word(action), _LINE + _SEPARATOR + fold(action)) if action else None


def _cut_thoughts(text: str) -> str:
    """A text without its elements for thoughts.

    A lone closing tag ends a thought that began with the text.
    """
    if "<" not in text:
        return text
    for tag in _THOUGHT_TAGS:
        if f"{tag}>" in text:
            text = _cut_elements(text, f"<{tag}>", f"</{tag}>")
    return text


def cut_thinking(text: str) -> str:
    """A text without the elements for thoughts that clients cut from older messages."""
    if "</think" in text:
        for tag in _THOUGHT_TAGS[:2]:
            text = _cut_elements(text, f"<{tag}>", f"</{tag}>")
    return text


def _cut_elements(text: str, opening: str, closing: str) -> str:
    kept = []
    place = 0
    while True:
        end = text.find(closing, place)
        if end < 0:
            break
        start = text.find(opening, place, end)
        if start >= 0:
            kept.append(text[place:start])
        elif place:
            kept.append(text[place:end])
        place = end + len(closing)
    start = text.find(opening, place)
    kept.append(text[place:start] if start >= 0 else text[place:])
    return "\n".join(kept)


def _first_word(text: str) -> str:
    found = _WORD.search(text, 0, 4 * MAX_NAME)
    return found.group()[:MAX_NAME] if found is not None else ""
