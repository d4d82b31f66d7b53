"""Why an agent is stuck, for the note to the model.

The newest turn decides: its calls, the tools that the request declares, and the results. If the
request contradicts itself, or declares too much, no cause is named: the search takes a millisecond
at most.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from typing import Final, NamedTuple

from msgspec import Raw

from extproc.apis import TOOL_WORDS, open_conversation, read_tools
from extproc.apis.contents import read_arguments
from extproc.apis.conversation import Conversation
from extproc.apis.messages import CALL
from extproc.apis.tools import OTHERS
from extproc.decision import Repeat
from extproc.detectors.arguments import THOUGHTS
from extproc.detectors.failures import SAID_WITHIN, TRANSIENT, find_complaint
from extproc.detectors.loops import CYCLE, ERROR, REPEAT, RESULT
from extproc.detectors.schemas import MISSING, UNKNOWN, Fault, find_fault, join_path
from extproc.detectors.turn import FAILURE_MARK, Turn, read_turns
from extproc.request.document import (
    ABSENT,
    INSPECTION,
    STEP,
    Document,
    Json,
    NotCounted,
    decode_json,
)
from extproc.request.quoting import MAX_QUOTED, quote

MISSING_ARGUMENT: Final = "missing_argument"
WRONG_ARGUMENT: Final = "wrong_argument"
UNKNOWN_TOOL: Final = "unknown_tool"
OUTAGE: Final = "outage"
SAME_ERROR: Final = "same_error"
SAME_RESULT: Final = "same_result"
SAME_STEPS: Final = "same_steps"
"""Kinds of causes."""

_LONGEST_VALUE: Final = 65_536
_MOST_CONTAINERS: Final = 1_500
_MOST_VALUES: Final = 4_000
"""Maximum bytes of a schema or of arguments, and maximum objects and lists, and commas, in them."""

_UNITS: Final = 200 * STEP
"""Units for the search; see `Inspection`."""

_LONGEST_PATH: Final = 128
_MOST_NAMED: Final = 3
"""Maximum number of similar tools to name."""

_MOST_JOINED: Final = 8
_IN_PARTS: Final = "If the text is too long for one call, send it in parts."

_MOST_COMPARED: Final = 128
_MOST_PAIRS: Final = 2_560
"""Maximum number of names to compare with an unknown one, and of pairs of letters."""

_MOST_STEPS: Final = 10
_LONGEST_QUOTE: Final = 200
"""Maximum length of a quotation, in characters."""

_NEAR: Final = 0.4
"""Minimum share of pairs of letters that names of similar tools have in common (Dice's
coefficient)."""

_EQUAL: Final = frozenset({REPEAT, RESULT, ERROR, ""})
"""Rules by which all results are equal."""

_WORD: Final = re.compile(r"[^\W\d_]{2}.")
"""The start of a word that does not end the line."""

_AROUND: Final = " .,'\"`"
_OPEN: Final = "\u201c"
_CLOSE: Final = "\u201d"
_JOINTS: Final = "_-./: "


class Cause(NamedTuple):
    """Why an agent is stuck.

    Attributes:
        kind: one of the kinds above.
        text: what is wrong, in whole sentences for the model.
        advice: what to do about it, likewise; may be empty.
    """

    kind: str
    text: str
    advice: str = ""


def find_cause(document: Document, repeat: Repeat | None, newer: int = 0) -> Cause | None:
    """The cause of a loop; None if the request shows none.

    Args:
        document: the request's body.
        repeat: the loop in its history; None if requests are counted.
        newer: number of turns since then.
    """
    if repeat is None:
        return None
    try:
        conversation = open_conversation(document)
        INSPECTION.left = _UNITS
        turns = islice(read_turns(conversation, document, THOUGHTS), newer, None)
        newest = next(turns, None)
        if newest is None:
            return None
        if repeat.rule == CYCLE:
            length = repeat.calls // max(repeat.count, 1)
            return _explain_cycle(conversation, [newest, *islice(turns, length - 1)], repeat)
        if not newest.failed:
            return _quote_result(newest) if repeat.rule in _EQUAL else None
        return _blame_call(conversation, newest, repeat) or _quote_failure(newest, repeat)
    except NotCounted:
        return None


def _quote_result(turn: Turn) -> Cause:
    said = _quote_line(turn.result, failed=False)
    came = f"The result was {said} each time" if said else "Nothing came back each time"
    return Cause(SAME_RESULT, f"{came}, and the same call will not change that.")


def _quote_failure(turn: Turn, repeat: Repeat) -> Cause:
    said = _quote_line(turn.result, failed=True)
    if turn.failure == TRANSIENT:
        if "timed out" in said.lower() or "timeout" in said.lower():
            return Cause(
                OUTAGE,
                f"It timed out: {said}.",
                "Ask for less at once, allow it more time, or finish without it.",
            )
        quoted = f": {said}" if said else ""
        return Cause(
            OUTAGE,
            f"The failure may be temporary{quoted}.",
            "Wait before you try again, or finish without it.",
        )
    if not said:
        return Cause(SAME_ERROR, "It failed.")
    return Cause(
        SAME_ERROR,
        f"The error was {said} each time."
        if repeat.rule in _EQUAL
        else f"The last error was {said}.",
    )


def _explain_cycle(conversation: Conversation, steps: list[Turn], repeat: Repeat) -> Cause | None:
    """What fails in each round, or else the steps; `steps` are newest first."""
    for turn in steps:
        if turn.failed:
            said = _quote_line(turn.result, failed=True)
            failed = (
                f"In each round, {_list_names(turn.names) or 'a step'} "
                f"failed{f': {said}' if said else ''}."
            )
            return _blame_call(conversation, turn, repeat) or Cause(SAME_ERROR, failed)
    named = [_name_step(turn) for turn in steps[:_MOST_STEPS]]
    if not all(named):
        return None
    more = ["..."] if len(steps) > _MOST_STEPS else []
    return Cause(SAME_STEPS, f"The steps are {', '.join([*more, *named[::-1]])}, over and over.")


def _name_step(turn: Turn) -> str:
    """A step: the tools, and the first string among their arguments."""
    calls = [part for part in turn.parts if part.kind == CALL]
    if len(calls) != 1:
        return _list_names(turn.names)
    arguments = read_arguments(calls[0].value)
    texts = (
        [text for text in arguments.values() if isinstance(text, str)]
        if isinstance(arguments, dict)
        else []
    )
    return quote(calls[0].name) + (f" ({quote(texts[0])})" if texts else "")


def _quote_line(result: str, *, failed: bool) -> str:
    """The most telling line of a result, quoted; empty if there is none."""
    text = result.replace(FAILURE_MARK, "").strip()
    traced = text.startswith("Traceback (most recent")  # the last line tells what is wrong
    text = text[-SAID_WITHIN:] if traced else text[:SAID_WITHIN]
    lines = [line.strip() for line in text.splitlines()]
    said = find_complaint(text) if failed and not traced else ""
    if said:
        place = text.lower().find(said)
        said = text[place : place + len(said)] if place >= 0 else said
    else:
        said = next(
            (line for line in (lines[::-1] if traced else lines) if _is_worth_quoting(line)), ""
        )
    if said.endswith(":") and said in lines:  # a heading
        said = " ".join([said, *[line for line in lines[lines.index(said) + 1 :] if line][:1]])
    plain = said[: 2 * _LONGEST_QUOTE].replace(_OPEN, " ").replace(_CLOSE, " ")
    if not plain.isprintable():
        plain = "".join([letter if letter.isprintable() else " " for letter in plain])
    plain = plain.strip(_AROUND)
    return (
        f"{_OPEN}{plain[:_LONGEST_QUOTE]}{'...' if len(plain) > _LONGEST_QUOTE else ''}{_CLOSE}"
        if plain
        else ""
    )


def _is_worth_quoting(line: str) -> bool:
    """Whether a line has a word in it, and is more than a tag."""
    last = line[-1:]
    return last.isalnum() or (last != ">" and _WORD.search(line) is not None)


def _list_names(names: Sequence[str], word: str = "and") -> str:
    """Names as in a sentence; if there are many, only the first ones."""
    quoted = [quote(name) for name in names[:_MOST_JOINED]]
    if len(names) > _MOST_JOINED:
        quoted.append(f"{len(names) - _MOST_JOINED} more")
    return _join(quoted, word)


def _join(items: Sequence[str], word: str) -> str:
    """Items as in a sentence: `a`, `a or b`, `a, b or c`."""
    return (
        f" {word} ".join([", ".join(items[:-1]), items[-1]]) if len(items) > 1 else "".join(items)
    )


# --- calls that no tool accepts


def _blame_call(conversation: Conversation, turn: Turn, repeat: Repeat) -> Cause | None:
    """What is wrong with the calls of a turn, according to the declared tools."""
    if turn.failure == TRANSIENT:
        return None
    tools = read_tools(conversation)
    for part in turn.parts if tools else ():
        if part.kind != CALL or _is_large(part.value):
            continue
        name = TOOL_WORDS.called.get(part.name, part.name)
        if name in tools:
            found = _blame_arguments(
                name, _open_schema(tools[name].schema), read_arguments(part.value), repeat
            )
        else:
            found = _name_similar(name, list(tools)) if OTHERS not in tools else None
        if found is not None:
            return found
    return None


def _name_similar(name: str, known: list[str]) -> Cause:
    near = _list_similar(name, known)
    if near:
        hint = f"Did you mean {_list_names(near, 'or')}?"
    else:
        hint = (
            f"The tools are {_list_names(known)}."
            if len(known) > 1
            else f"The only tool is {_list_names(known)}."
        )
    return Cause(UNKNOWN_TOOL, f"There is no tool named {quote(name)}. {hint}")


def _list_similar(name: str, known: list[str]) -> list[str]:
    """The names that are most similar to another one; may be empty."""
    plain = _strip(name)
    pairs = {plain[place : place + 2] for place in range(len(plain) - 1)}
    compared = known[: min(_MOST_COMPARED, _MOST_PAIRS // max(len(pairs), 1))]
    near = sorted([(_measure(pairs, _strip(each)), each) for each in compared], reverse=True)[
        :_MOST_NAMED
    ]
    return [each for share, each in near if share >= _NEAR]


def _strip(name: str) -> str:
    plain = name[:MAX_QUOTED].casefold()
    for joint in _JOINTS:  # `translate` takes three times as long
        plain = plain.replace(joint, "")
    return plain


def _measure(pairs: set[str], other: str) -> float:
    """The share of pairs of letters that another name contains, too."""
    return 2 * sum([pair in other for pair in pairs]) / max(len(pairs) + len(other) - 1, 1)


def _blame_arguments(
    tool: str, schema: dict[str, Json], given: Json, repeat: Repeat
) -> Cause | None:
    """What is wrong with the arguments of a call, according to the tool's schema."""
    if schema and not isinstance(given, dict):
        cut = isinstance(given, str) and given.startswith("{") and not given.endswith("}")
        wrong = "are cut off, so they are not valid JSON" if cut else "are not a JSON object"
        return Cause(
            WRONG_ARGUMENT, f"The arguments of {quote(tool)} {wrong}.", _IN_PARTS if cut else ""
        )
    fault = find_fault(schema, given)
    if fault is None:
        return None
    if fault.kind == MISSING:
        return _name_missing(tool, fault, repeat)
    if fault.kind == UNKNOWN:
        return _name_unknown(tool, fault)
    place = (
        f"In calls of {quote(tool)}, {_quote_path(fault.path)}"
        if fault.path
        else f"The arguments of {quote(tool)}"
    )
    wanted = _join(list(fault.wanted), "or") or _list_names(fault.values, "or")
    return Cause(WRONG_ARGUMENT, f"{place} must be {wanted}.")


def _name_missing(tool: str, fault: Fault, repeat: Repeat) -> Cause:
    calls = f"{repeat.count} calls" if repeat.rule == REPEAT and repeat.count > 1 else "The call"
    names = [join_path(fault.path, name) for name in fault.names]
    if fault.any_of:
        text = (
            f"{calls} of {quote(tool)} left out {_list_names(names, 'and')}, one of which is "
            "required."
        )
        return Cause(MISSING_ARGUMENT, text, "Add one of them.")
    text = (
        f"{calls} of {quote(tool)} left out {_list_names(names)}, which "
        f"{'is' if len(names) == 1 else 'are'} required."
    )
    add = f"Add {'it' if len(names) == 1 else 'them'}."
    return Cause(MISSING_ARGUMENT, text, f"{add} {_IN_PARTS}" if fault.long else add)


def _name_unknown(tool: str, fault: Fault) -> Cause:
    name, known = fault.names[0], list(fault.known)
    place = f"In calls of {quote(tool)}, {_quote_path(fault.path)}" if fault.path else quote(tool)
    near = _list_similar(name, known)
    if near:
        hint = f"Did you mean {_list_names(near, 'or')}?"
    else:
        hint = f"It takes {_list_names(known)}." if known else "It takes none."
    return Cause(WRONG_ARGUMENT, f"{place} takes no argument named {quote(name)}. {hint}")


def _quote_path(path: str) -> str:
    return quote(path, _LONGEST_PATH)


def _open_schema(raw: Raw) -> dict[str, Json]:
    """The schema of a tool's arguments, which may be wrapped; empty if missing or too long."""
    if raw is ABSENT or _is_large(raw):
        return {}
    value = decode_json(raw)
    # Some APIs wrap it
    if isinstance(value, dict) and len(value) == 1 and isinstance(value.get("json"), dict):
        value = value["json"]
    return value if isinstance(value, dict) else {}


def _is_large(value: Json) -> bool:
    """Whether a value takes long to decode."""
    if not isinstance(value, (str, Raw)):
        return False
    if len(value) > _LONGEST_VALUE:
        return True
    text = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
    return text.count(b"{") + text.count(b"[") > _MOST_CONTAINERS or text.count(b",") > _MOST_VALUES
