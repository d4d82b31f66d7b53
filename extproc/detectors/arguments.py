"""Which of a tool's arguments are compared.

Agents that repeat a call reword some of its arguments, so these are ignored: thoughts, remarks on a
shell command, the purpose of a call, its counters and clocks. An argument with such a name is
compared if it is the call's content: the only argument, an argument of a tool that records it, or a
chosen time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from extproc.request.document import Json

THOUGHTS: Final = frozenset(
    {
        "analysis",
        "current_state",
        "evaluation_previous_goal",
        "explanation",
        "justification",
        "memory",
        "next_goal",
        "plan",
        "rationale",
        "reasoning",
        "reflection",
        "state_analysis",
        "task_progress",
        "thinking",
        "thought",
        "thoughts",
        "toolAction",
        "toolSummary",
    }
)
"""Arguments for thoughts. `ignore_arguments` replaces them; purposes, counters and clocks are then
compared."""

_THINKERS = ("think", "thought", "reason", "reflect", "plan", "memor", "note", "expla", "analy")
"""If a tool's name contains one of these, arguments that are all thoughts are compared."""

_FOR_THINKING = re.compile(
    r"think|thinking|thoughts?|sequential_?thinking|reflect|reflection|scratchpad|(?:take_?|make_?)?notes?"
    r"|(?:write_?|read_?|update_?|manage_?|make_?|set_?)?(?:todos?|todo_?list|plan)(?:_?write|_?read|_?update)?",
    re.IGNORECASE,
)
_LONGEST_NAME: Final = 64

_COMMANDS = ("cmd", "command")
_REMARKS = frozenset(
    {
        "description",
        "goal",
        "max_output_tokens",
        "requires_approval",
        "summary",
        "timeout",
        "timeout_ms",
        "timeout_seconds",
        "yield_time_ms",
    }
)
"""Arguments beside a shell command that state its purpose, a timeout, or a maximum output."""

_PURPOSES = frozenset({"description", "explanation", "reason"})
_ATTEMPTS = frozenset({"attempt", "attempt_number", "retry_count"})
_NAMES = frozenset({"correlation_id", "idempotency_key", "nonce", "request_id", "trace_id"})
_TIMES = frozenset({"timestamp"})
_ASIDES = _PURPOSES | _ATTEMPTS | _NAMES | _TIMES

_RECORDING = frozenset(
    {
        *(
            "add",
            "append",
            "book",
            "comment",
            "create",
            "edit",
            "insert",
            "log",
            "make",
            "new",
            "post",
            "put",
            "record",
        ),
        *(
            "register",
            "report",
            "save",
            "schedule",
            "send",
            "set",
            "store",
            "submit",
            "transfer",
            "update",
            "write",
        ),
    }
)
_LOOKING = frozenset({"fetch", "find", "get", "list", "read", "search", "show", "view"})
_ABOUT_CALLS = frozenset({"log", "logs", "request", "requests", "trace", "traces"})
_NAME_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")

_QUERIES = ("keywords", "q", "query", "search", "search_query", "search_term", "search_terms")
_SEARCHING = frozenset({"browse", "find", "google", "lookup", "retrieve", "search"})
_LONGEST_QUERY: Final = 512
_PLAIN_QUERY = re.compile(r"[\w\s,.?!+-]+")

_LONGEST_COMMENTED: Final = 16_384
# A comment starts where a word could, unless it is quoted or escaped.
_COMMENTS = re.compile(r"""("(?:[^"\\]|\\.)*+"|'[^']*+'|\\.)|(?<![^\s;])\#[^\n]*+""", re.DOTALL)
_EXACT_MINUTE = re.compile(
    r"(?:[0-9/.-]{8,10}[T ])?[0-9]{2}:[0-9]{2}(?::00(?:[.,]0+)?)?(?:Z|[+-][0-9:]+)?|[0-9/. -]+"
)
_MINUTE: Final = 60


def reduce_arguments(
    value: Mapping[str, Json], tool: str, ignored: frozenset[str]
) -> Mapping[str, Json]:
    """The compared arguments of a call, in the form in which they are compared.

    Args:
        value: the arguments.
        tool: the tool's name.
        ignored: names of arguments that are thoughts.
    """
    if not value.keys().isdisjoint(ignored):
        value = _without_thoughts(value, tool, ignored)
    if not value.keys().isdisjoint(_COMMANDS):
        value = _tidy_command(_without_remarks(value))
    if not value.keys().isdisjoint(_ASIDES) and ignored == THOUGHTS:
        value = _without_asides(value, _split_name(tool))
    if not value.keys().isdisjoint(_QUERIES) and not _split_name(tool).isdisjoint(_SEARCHING):
        value = {key: _sort_words(item) if key in _QUERIES else item for key, item in value.items()}
    return value


def is_for_thinking(tool: str) -> bool:
    """Whether a tool, by its name, only takes thoughts, notes, plans or to-do lists.

    >>> [is_for_thinking(tool) for tool in ("TodoWrite", "mcp__mind__sequentialthinking",
        "create_note", "list_notes")]
    [True, True, False, False]
    """
    own = tool[-_LONGEST_NAME:].rpartition("__")[2]
    return _FOR_THINKING.fullmatch(own) is not None


def tidy_command(text: str) -> str:
    """Remove comments, trailing blanks and empty lines from a command.

    A long command, or one with a multi-line string, stays unchanged.
    """
    text = text.strip()
    if "<<" in text or '"""' in text or "'''" in text or len(text) > _LONGEST_COMMENTED:
        return text
    if "#" in text:
        tidy = _COMMENTS.sub(lambda found: found.group(1) or "", text)
        text = tidy.strip() or text
    if " \n" in text or "\t\n" in text or "\n\n" in text:
        text = "\n".join(
            [line.rstrip() for line in text.split("\n") if line and not line.isspace()]
        )
    return text


def _without_thoughts(
    value: Mapping[str, Json], name: str, ignored: frozenset[str]
) -> Mapping[str, Json]:
    left = {key: item for key, item in value.items() if key not in ignored}
    if not left:
        lower = name.lower()
        if any(word in lower for word in _THINKERS):
            return value
    return left


def _without_remarks(value: Mapping[str, Json]) -> Mapping[str, Json]:
    if value.keys().isdisjoint(_REMARKS) or not any(_is_shell(value.get(key)) for key in _COMMANDS):
        return value
    return {key: item for key, item in value.items() if key not in _REMARKS}


def _is_shell(command: Json) -> bool:
    """Whether a command has arguments.

    A single word, such as `create`, may determine the meaning of other arguments.
    """
    return isinstance(command, list) or (
        isinstance(command, str) and len(command.split(maxsplit=1)) > 1
    )


def _tidy_command(value: Mapping[str, Json]) -> Mapping[str, Json]:
    tidied = dict(value)
    for key in _COMMANDS:
        command = value.get(key)
        if isinstance(command, str):
            tidied[key] = tidy_command(command)
        elif isinstance(command, list):
            tidied[key] = [
                tidy_command(part) if isinstance(part, str) and " " in part else part
                for part in command
            ]
    return tidied


def _without_asides(value: Mapping[str, Json], words: frozenset[str]) -> Mapping[str, Json]:
    """Remove a call's purpose, counters and clocks, if enough remains to describe the call."""
    records = not words.isdisjoint(_RECORDING) and words.isdisjoint(_LOOKING)
    left = {
        key: item
        for key, item in value.items()
        if key not in _ATTEMPTS and (records or key not in _PURPOSES)
    }
    if not left:
        return value
    about = {
        key: item
        for key, item in left.items()
        if not _is_of_the_call(key, item, words, records=records)
    }
    return about if any(isinstance(item, str | list | dict) for item in about.values()) else left


def _is_of_the_call(key: str, item: Json, words: frozenset[str], *, records: bool) -> bool:
    """Whether an argument is an id or the time of the call itself."""
    if key in _NAMES:
        return words.isdisjoint(_ABOUT_CALLS)
    return key in _TIMES and not records and not _is_chosen(item)


def _is_chosen(time: Json) -> bool:
    """Whether a time was chosen, not read from a clock: it is a date or a full minute."""
    if isinstance(time, str):
        return _EXACT_MINUTE.fullmatch(time) is not None
    return isinstance(time, int) and time % _MINUTE == 0


def _split_name(tool: str) -> frozenset[str]:
    """The words of a tool's name in lower case; equal for `createIssue` and `create_issue`."""
    return frozenset([word.lower() for word in _NAME_WORD.findall(tool[-_LONGEST_NAME:])])


def _sort_words(query: Json) -> Json:
    """The sorted words of a search query; unchanged if it has operators or quoted phrases."""
    if (
        not isinstance(query, str)
        or len(query) > _LONGEST_QUERY
        or _PLAIN_QUERY.fullmatch(query) is None
    ):
        return query
    words: list[Json] = [*sorted(query.lower().split())]
    return words
