"""Which arguments of a tool are compared; each case has its opposite."""

from collections.abc import Mapping

import pytest

from extproc.detectors.arguments import THOUGHTS, is_for_thinking, reduce_arguments, tidy_command
from extproc.request.document import Json

_SAME: dict[str, tuple[str, Mapping[str, Json], Mapping[str, Json]]] = {
    "a reason": (
        "read_file",
        {"path": "a", "reason": "to look"},
        {"path": "a", "reason": "to look again"},
    ),
    "a description": (
        "click",
        {"index": 4, "description": "the button"},
        {"index": 4, "description": "OK"},
    ),
    "an attempt": ("create_issue", {"title": "a", "attempt": 1}, {"title": "a", "attempt": 2}),
    "a request's id": (
        "read_file",
        {"path": "a", "request_id": "r-1"},
        {"path": "a", "request_id": "r-2"},
    ),
    "the moment": (
        "read_file",
        {"path": "a", "timestamp": "2026-11-24T10:00:07Z"},
        {"path": "a", "timestamp": 1763792054},
    ),
    "none at all": (
        "read_file",
        {"path": "a"},
        {"path": "a", "reason": "x", "attempt": 2, "request_id": "r-2"},
    ),
    "blanks": ("bash", {"command": "ls -la"}, {"command": "ls -la  \n"}),
    "a comment": ("bash", {"command": "ls -la"}, {"command": "# look\nls -la # again"}),
    "a comment in a list": (
        "shell",
        {"command": ["bash", "-lc", "ls -la"]},
        {"command": ["bash", "-lc", "ls -la # b"]},
    ),
    "words of a search": (
        "web_search",
        {"query": "python asyncio timeout"},
        {"query": "Timeout python  asyncio"},
    ),
}

_OTHER: dict[str, tuple[str, Mapping[str, Json], Mapping[str, Json]]] = {
    "a reason alone": ("escalate", {"reason": "fire"}, {"reason": "water"}),
    "a description that is recorded": (
        "create_issue",
        {"list": "a", "description": "x"},
        {"list": "a", "description": "y"},
    ),
    "the same in another spelling": (
        "addTask",
        {"list": "a", "description": "x"},
        {"list": "a", "description": "y"},
    ),
    "an attempt alone": ("get_log", {"attempt": 1}, {"attempt": 2}),
    "an attempt and a reason alone": (
        "retry",
        {"attempt": 1, "reason": "x"},
        {"attempt": 2, "reason": "x"},
    ),
    "a request that is looked up": (
        "get_request",
        {"request_id": "a", "as": "x"},
        {"request_id": "b", "as": "x"},
    ),
    "an id and how much of it": (
        "get_job",
        {"request_id": "a", "limit": 3},
        {"request_id": "b", "limit": 3},
    ),
    "an id": ("get_ticket", {"id": 101, "as": "json"}, {"id": 102, "as": "json"}),
    "a time alone": ("get_price", {"timestamp": 1763792054}, {"timestamp": 1763792055}),
    "a day": (
        "get_price",
        {"of": "a", "timestamp": "2026-11-24"},
        {"of": "a", "timestamp": "2026-11-25"},
    ),
    "a full hour": (
        "get_price",
        {"of": "a", "timestamp": "2026-11-24T10:00:00Z"},
        {"of": "a", "timestamp": "2026-11-24T11:00:00Z"},
    ),
    "a full minute": (
        "get_price",
        {"of": "a", "timestamp": 1763791980},
        {"of": "a", "timestamp": 1763792040},
    ),
    "a time that is recorded": (
        "log_event",
        {"of": "a", "timestamp": 1763792054},
        {"of": "a", "timestamp": 1763792055},
    ),
    "a quoted hash": ("bash", {"command": "echo '# 1'"}, {"command": "echo '# 2'"}),
    "a hash in a word": ("bash", {"command": "git show a#1"}, {"command": "git show a#2"}),
    "an escaped hash": ("bash", {"command": "echo \\# 1"}, {"command": "echo \\# 2"}),
    "a text of its own": ("bash", {"command": "cat <<E\n# 1\nE"}, {"command": "cat <<E\n# 2\nE"}),
    "nothing but comments": ("bash", {"command": "# to do"}, {"command": "# to don't"}),
    "words of SQL": ("execute_sql", {"query": "select a from b"}, {"query": "select b from a"}),
    "a phrase": ("web_search", {"query": '"man bites dog"'}, {"query": '"dog bites man"'}),
    "a pattern": ("search_code", {"query": "a.*b c"}, {"query": "c a.*b"}),
    "another word": ("web_search", {"query": "python timeout"}, {"query": "python timeouts"}),
}


@pytest.mark.parametrize(("tool", "one", "other"), _SAME.values(), ids=_SAME)
def test_arguments_agents_reword_are_left_out(
    tool: str, one: Mapping[str, Json], other: Mapping[str, Json]
) -> None:
    assert reduce_arguments(one, tool, THOUGHTS) == reduce_arguments(other, tool, THOUGHTS)


@pytest.mark.parametrize(("tool", "one", "other"), _OTHER.values(), ids=_OTHER)
def test_arguments_a_call_is_about_are_compared(
    tool: str, one: Mapping[str, Json], other: Mapping[str, Json]
) -> None:
    assert reduce_arguments(one, tool, THOUGHTS) != reduce_arguments(other, tool, THOUGHTS)


def test_ignore_arguments_replaces_the_default_list() -> None:
    assert reduce_arguments(
        {"path": "a", "reason": "b", "why": "c"}, "read", frozenset({"why"})
    ) == {
        "path": "a",
        "reason": "b",
    }


@pytest.mark.parametrize(
    "text",
    [
        "ls",
        "a 'b # c' d",
        'a "b \\" # c" d',
        "echo it's",
        "${a#b} $# a#",
        "x = 'it\\'s'",
        "#",
        "",
        "cat << E\n # a\nE",
    ],
)
def test_command_without_comments_is_unchanged(text: str) -> None:
    assert tidy_command(text) == text


@pytest.mark.parametrize(
    ("tool", "thinks"),
    [
        *[
            (name, True)
            for name in (
                "think",
                "TodoWrite",
                "write_todos",
                "update_plan",
                "mcp__a__sequentialthinking",
                "notes",
            )
        ],
        *[
            (name, False)
            for name in (
                "create_note",
                "list_notes",
                "rethink",
                "plan_trip",
                "todo_app__delete",
                "read_file",
                "",
            )
        ],
    ],
)
def test_thinking_tools_are_known_by_name(tool: str, thinks: bool) -> None:
    assert is_for_thinking(tool) is thinks
