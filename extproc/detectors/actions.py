"""What an assistant does, without what it thinks: from its calls of tools, or from the text in which it writes an action.

Agents that call no tools write their action as text. What is looked for, in this order: the last fenced code block, JSON
objects with an action or a tool in them, XML-like tags, a ReAct line. A text that is JSON as a whole, or a tag that has the
code block inside, goes first: their strings hold whatever code is written.
"""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import Final, NamedTuple

from extproc.apis.contents import list_texts, read_arguments, unpack
from extproc.apis.messages import CALL, TEXT, Part
from extproc.bounded import Memo
from extproc.detectors.alike import fold
from extproc.detectors.arguments import is_for_thinking, reduce_arguments, tidy_command
from extproc.request.clients import FAILED_CALL
from extproc.request.document import Json, NotJson, count_left, decode_json, write_canonical

MAX_NAME: Final = 256
"""So much of a tool's or command's name is matched and shown, in characters."""

_ACTION_KEYS: Final = (
    "action", "actions", "command", "commands", "tool", "tools", "tool_name", "tool_call", "tool_calls", "function",
    "function_call", "next_action", "code", "cmd", "operation",
)  # fmt: skip  # one list
_ARGUMENT_KEYS: Final = frozenset(
    {"action_input", "args", "arguments", "input", "kwargs", "parameters", "params", "tool_args", "tool_input"}
)
_NAME_KEYS: Final = ("name", "tool", "tool_name", "function", "action", "command", "cmd", "keystrokes", "code", "type")

_THOUGHT_TAGS: Final = ("think", "thinking", "thought", "thoughts", "reasoning", "reflection", "rationale", "analysis", "plan",
                 "explanation", "discussion", "scratchpad", "memory", "observation")  # fmt: skip  # one list

_MAX_MARKED: Final = 65_536
"""A longer text is not searched for an action, in characters: it is compared as it is."""

_LONGEST_KNOWN: Final = 768
_MOST_KNOWN: Final = 4_096
"""This many texts are in a generation of those whose actions are known, none of which has more bytes. They take 3 KB each at
most, and 25 MB in all under attack. JSON of so few bytes is not nested too deeply, wherever it is decoded."""

_TRIES: Final = 8
"""This many beginnings of something that turn out to be none are looked at, so that a text of nothing else takes no time."""

_MAX_FENCES: Final = 1_000
_MAX_TAGS: Final = 1_000

_TAG: Final = re.compile(r"<([A-Za-z_][\w.:-]*)(?:[=\s][^<>]*)?>")
_NAMED_IN_TAG: Final = re.compile(r"<(?:[\w.-]+:)?(?:invoke|function|tool|action)(?:\s[^<>]*?name)?=[\"']?([\w.:-]+)")
_REACT: Final = re.compile(r"^[ \t>*#-]*(?:action|act)(?: *[0-9]+)?[* ]*:[* \t]*", re.IGNORECASE | re.MULTILINE)
_REACT_END: Final = re.compile(r"^[ \t>*#-]*(?:observation|thought|think)(?: *[0-9]+)?[* ]*:", re.IGNORECASE | re.MULTILINE)
_WORD: Final = re.compile(r"[^\s\[\](){}<>\"'`:;,=|]+")

# What JSON spells one way alone: printable ASCII without the quote and the backslash.
_PLAIN: Final = re.compile(rb"[ !#-\[\]-~]{4,256}")
_PLAIN_VALUE: Final = re.compile(rb'[:\[]"([ !#-\[\]-~]{4,256})"')
_MARKED_WITHIN: Final = 4_096
"""A mark is looked for in so much of an action, in bytes."""

_WRITTEN_CALLS: Final = "Calling tools:\n[{"
_WRITTEN_NAME: Final = re.compile(r"'function': \{'name': '([^'\\]{1,256})'")
_WRITTEN_ID: Final = re.compile(r"'id': '[^'\\]{0,256}', (?=(?:'type': 'function', )?'function': )")

_FENCE: Final = "```"
_COMMENTED: Final = frozenset({"bash", "console", "py", "python", "sh", "shell", "zsh"})
"""Languages whose comments start with a `#`."""
_FENCES: Final = re.compile("`{3,}")
_SEPARATOR: Final = b"\xff"  # never in UTF-8
_JSON: Final = b"json"
_CODE: Final = b"code"
_TAGS: Final = b"tags"
_LINE: Final = b"line"
_TEXT: Final = b"text"

_scan_json: Final = json.JSONDecoder().raw_decode


class AssistantAction(NamedTuple):
    """What an assistant does in one turn.

    Attributes:
        names: of the tools, or the first word of a text action; empty where it does nothing but speak.
        spelled: all of it in one spelling: equal bytes, equal actions.
        places: of the calls in `spelled`, by id, or by number where they have none; empty where none is made.
        first: of the calls, as in `spelled`.
        size: of what was done, in bytes.
    """

    names: tuple[str, ...]
    spelled: bytes
    places: dict[str, int]
    first: bytes = b""
    size: int = 0


_KNOWN: Final[Memo[tuple[frozenset[str], bytes], tuple[str, bytes]]] = Memo(_MOST_KNOWN)
"""The actions in texts, by the arguments that are thoughts and the text: a history comes again with each request."""


def read_action(parts: list[Part], ignored: frozenset[str]) -> AssistantAction:
    """What a message of the assistant's does.

    Args:
        parts: of the message.
        ignored: names of arguments that are thoughts.

    Raises:
        NotCounted: it cannot be read.
    """
    calls = [part for part in parts if part.kind == CALL]
    if calls:
        return _read_calls(calls, ignored)
    others = [write_canonical(unpack(part.value)) for part in parts if part.kind not in {TEXT, CALL}]
    name, spelled = read_text_action("\n".join(list_texts(parts)), ignored)
    size = len(spelled) - spelled.find(_SEPARATOR) - 1  # before it stands what kind of action it is
    return AssistantAction((name,) if name else (), _SEPARATOR.join([spelled, *others]), {}, b"", size)


def read_failed_call(text: str) -> AssistantAction | None:
    """The call that failed, from what a harness says of it; None where it says nothing of the kind."""
    found = FAILED_CALL.match(text)
    if found is None:
        return None
    name, arguments, unknown = found.groups(default="")
    spelled = _SEPARATOR.join([_TEXT, (name or unknown).encode(), arguments.encode()])
    return AssistantAction((name or unknown,), spelled, {}, b"", len(arguments))


def _read_calls(calls: list[Part], ignored: frozenset[str]) -> AssistantAction:
    """Calls made at once: a set, whose order and duplicates do not matter."""
    if len(calls) == 1:
        call = calls[0]
        one = spell_call(call, ignored)
        return AssistantAction((call.name[:MAX_NAME],), one, {call.id or number_id(0): 0}, one, len(one))
    spelled = [spell_call(call, ignored) for call in calls]
    unique = {call: place for place, call in enumerate(sorted(set(spelled)))}
    ranked = sorted([(is_for_thinking(call.name), one, call.name[:MAX_NAME]) for one, call in zip(spelled, calls, strict=True)])
    names = dict.fromkeys([name for _, _, name in ranked])
    places = {call.id or number_id(number): unique[spelled[number]] for number, call in enumerate(calls)}
    joined = _SEPARATOR.join(unique)
    return AssistantAction(tuple(names), joined, places, spelled[0], len(joined))


def find_mark(action: AssistantAction) -> bytes:
    """Bytes that no request spells otherwise, unless it escapes what need not be escaped; empty where there are none."""
    return find_mark_in_call(action.first) if action.places else _mark_in_text(action.spelled)


def may_hold(raw: str, mark: str) -> bool:
    """Whether some JSON may spell what has a mark; `raw` is its text, or its bytes as Latin-1; empty if it is not known."""
    # In a text, `in` takes a tenth of the time that looking for bytes does.
    return not raw or not mark or mark in raw or "\\u" in raw or "\\/" in raw


def find_mark_in_call(call: bytes) -> bytes:
    """The longest of a call's arguments that are plain strings; see `find_mark`."""
    return max(_PLAIN_VALUE.findall(call, 0, _MARKED_WITHIN), key=len, default=b"")


def _mark_in_text(spelled: bytes) -> bytes:
    """The same of an action in a text."""
    kind, _, action = spelled[:_MARKED_WITHIN].partition(_SEPARATOR)
    if kind == _JSON:
        return find_mark_in_call(action)
    return max(_PLAIN.findall(action), key=len, default=b"") if kind in {_CODE, _TAGS} else b""


def number_id(number: int) -> str:
    """Stands for the id of a call, or of a result, that has none: some APIs connect them by their order."""
    return f"\0{number}"


def spell_call(call: Part, ignored: frozenset[str]) -> bytes:
    """A call in one spelling: its tool, and its arguments without thoughts."""
    value = read_arguments(call.value)
    if isinstance(value, dict):
        value = dict(reduce_arguments(value, call.name, ignored))
    return call.name.encode() + _SEPARATOR + write_canonical(value)


def read_text_action(text: str, ignored: frozenset[str]) -> tuple[str, bytes]:
    """The first word of the action in a text, and the action in one spelling; no word where there is none but the text.

    One that was read recently is known, but for one with bounded numbers.
    """
    if len(text) > _LONGEST_KNOWN:
        return _read_text(text, ignored)
    key = ignored, text.encode()
    found = _KNOWN.get(key)
    if found is None:
        _, fractions = count_left()
        found = _read_text(text, ignored)
        if len(key[1]) <= _LONGEST_KNOWN and count_left()[1] == fractions:
            _KNOWN.put(key, found)
    return found


def _read_text(text: str, ignored: frozenset[str]) -> tuple[str, bytes]:
    if len(text) > _MAX_MARKED:
        return "", _TEXT + _SEPARATOR + fold(text)
    text = _cut_thoughts(text).strip() or text.strip()
    if text.startswith("{") and text.endswith("}"):
        value = _whole_json(text)
        if value is not None:
            return _name_of(value, ignored), _JSON + _SEPARATOR + write_canonical(_action_in(value, ignored))
    return _read_written_calls(text) or _read_marked(text, ignored) or ("", _TEXT + _SEPARATOR + fold(text))


def _read_written_calls(text: str) -> tuple[str, bytes] | None:
    """The calls that smolagents writes into a text, as a list of Python's, without their ids."""
    place = text.rfind(_WRITTEN_CALLS)
    calls = text[place + len(_WRITTEN_CALLS) :] if place >= 0 else ""
    named = _WRITTEN_NAME.search(calls)
    if named is None:
        return None
    # What replaces an id is nothing that a mark consists of.
    return named[1], _CODE + _SEPARATOR + _WRITTEN_ID.sub("\x1e", calls).encode()


def _read_marked(text: str, ignored: frozenset[str]) -> tuple[str, bytes] | None:
    """The action that is marked as one in a text."""
    fence = _last_fence(text) if _FENCE in text else None
    tags = _tags(text) if "</" in text or "<" in text else []
    if fence is not None and not any(start < fence[0] and fence[1] < end for _, start, end in tags):
        return _read_code(text[fence[0] : fence[1]], _language(text, fence[0]), ignored)
    if fence is None and "{" in text and '"' in text:
        found = _read_objects(text, ignored)
        if found is not None:
            return found
    line = _react_line(text) if "ct" in text or "CT" in text else None
    if tags and (line is None or line.start() < tags[-1][2]):
        return _read_tags(text, tags)
    return _read_react(text, line) if line is not None else None


def _read_code(code: str, language: str, ignored: frozenset[str]) -> tuple[str, bytes]:
    """What stands in a code block; JSON goes without its thoughts, and commands go without comments."""
    code = code.strip()
    if code.startswith("{") and code.endswith("}"):
        value = _whole_json(code)
        if value is not None:
            return _name_of(value, ignored), _JSON + _SEPARATOR + write_canonical(_action_in(value, ignored))
    spelled = tidy_command(code) if language in _COMMENTED else code
    return _first_word(code), _CODE + _SEPARATOR + spelled.encode()


def _last_fence(text: str) -> tuple[int, int] | None:
    """Where the content of the last code block starts and ends; one that is not closed ends with the text.

    A fence with a word behind it, at the start of a line inside of a block, belongs to what the block holds: a script that
    writes Markdown.
    """
    found: tuple[int, int] | None = None
    opened = -1
    for fence in islice(_FENCES.finditer(text), _MAX_FENCES):
        if opened < 0:
            opened = fence.end()
        elif _is_blank(text, fence.end()) or not _starts_line(text, fence.start()):
            if text[opened : fence.start()].strip():
                found = opened, fence.start()
            opened = -1
    if opened >= 0 and text[opened:].strip():
        found = opened, len(text)
    return None if found is None else (_behind_info(text, *found), found[1])


def _is_blank(text: str, place: int) -> bool:
    """Nothing but space stands between a place and the end of its line."""
    while place < len(text) and text[place] in " \t\r":
        place += 1
    return place == len(text) or text[place] == "\n"


def _starts_line(text: str, place: int) -> bool:
    """Nothing but space stands between the start of a line and a place."""
    while place > 0 and text[place - 1] in " \t":
        place -= 1
    return place == 0 or text[place - 1] == "\n"


def _behind_info(text: str, start: int, end: int) -> int:
    """Where a block's content starts, behind the language that its first line may name."""
    line = text.find("\n", start, end)
    return line if line >= 0 and len(text[start:line].split()) <= 1 else start


def _language(text: str, start: int) -> str:
    """What is said of the code block whose content starts there."""
    return text[max(0, start - MAX_NAME) : start].rpartition(_FENCE)[2].strip().lower()


def _whole_json(text: str) -> dict[str, Json] | None:
    """The object that a text is as a whole."""
    try:
        value = decode_json(text)
    except NotJson:
        return None
    return value if isinstance(value, dict) else None


def _read_objects(text: str, ignored: frozenset[str]) -> tuple[str, bytes] | None:
    """The JSON objects in a text that have an action or a tool in them."""
    actions: list[Json] = []
    name = ""
    place = text.find("{")
    tries = _TRIES
    while place >= 0 and tries:
        try:
            _, end = _scan_json(text, place)
        except json.JSONDecodeError as error:
            tries -= 1
            end = max(place + 1, error.pos)  # what is before that was sound, as far as it went
        except (ValueError, RecursionError):
            break
        else:
            value = _whole_json(text[place:end])
            if value is not None and _acts(value):
                name = name or _name_of(value, ignored)
                actions.append(_action_in(value, ignored))
        place = text.find("{", end)
    return (name, _JSON + _SEPARATOR + write_canonical(actions)) if actions else None


def _acts(value: dict[str, Json]) -> bool:
    """Whether an object has an action or a tool in it."""
    return any(key in value for key in _ACTION_KEYS) or ("name" in value and not _ARGUMENT_KEYS.isdisjoint(value))


def _action_in(value: dict[str, Json], ignored: frozenset[str]) -> Json:
    """An object without its thoughts; an action that is an object or a list says all, but for arguments that have a key."""
    name = _name_of(value, ignored)
    acting = {key for key in _ACTION_KEYS if isinstance(value.get(key), dict | list)}
    if acting:
        return {key: item for key, item in value.items() if key in acting or key in _ARGUMENT_KEYS}
    left: dict[str, Json] = {key: item for key, item in value.items() if key not in ignored} or value
    for key in left.keys() & _ARGUMENT_KEYS:
        given = left[key]
        if isinstance(given, dict):
            left = {**left, key: dict(reduce_arguments(given, name, ignored))}
    return dict(reduce_arguments(left, name, ignored))


def _name_of(value: dict[str, Json], ignored: frozenset[str]) -> str:
    """The name of the action in an object: of the tool, or the first word of the command."""
    found: Json = next((value[key] for key in _ACTION_KEYS if value.get(key)), value)
    for _ in range(4):  # levels of lists and objects around a name
        if isinstance(found, list):
            found = found[0] if found else ""
        elif isinstance(found, dict):
            named = next((found[key] for key in _NAME_KEYS if isinstance(found.get(key), str | dict)), None)
            found = named if named is not None else next((key for key in found if key not in ignored), "")
        else:
            break
    return _first_word(found) if isinstance(found, str) else ""


def _tags(text: str) -> list[tuple[str, int, int]]:
    """The elements of a text that stand in no other, with their places; one at the end need not be closed."""
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
    """The elements, without what stands between them."""
    _, start, end = tags[0]
    named = _NAMED_IN_TAG.search(text, start, min(end, start + 4 * MAX_NAME))
    name = named.group(1) if named is not None else tags[0][0]
    return name[:MAX_NAME], _TAGS + _SEPARATOR + "\n".join([text[start:end] for _, start, end in tags]).encode()


def _react_line(text: str) -> re.Match[str] | None:
    """The last `Action:` at the start of a line."""
    last = None
    for match in _REACT.finditer(text):
        last = match
    return last


def _read_react(text: str, line: re.Match[str]) -> tuple[str, bytes] | None:
    """What stands behind an `Action:`, up to the next thought or an observation that the model makes up."""
    end = _REACT_END.search(text, line.end())
    action = text[line.end() : end.start() if end is not None else len(text)].strip()
    return (_first_word(action), _LINE + _SEPARATOR + fold(action)) if action else None


def _cut_thoughts(text: str) -> str:
    """A text without the elements in which a model thinks; a closing tag alone ends a thought that started with the text."""
    if "<" not in text:
        return text
    for tag in _THOUGHT_TAGS:
        if f"{tag}>" in text:
            text = _cut_elements(text, f"<{tag}>", f"</{tag}>")
    return text


def cut_thinking(text: str) -> str:
    """A text without the elements in which models think and which clients leave out of older messages."""
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
    """The first word of a command."""
    found = _WORD.search(text, 0, 4 * MAX_NAME)
    return found.group()[:MAX_NAME] if found is not None else ""
