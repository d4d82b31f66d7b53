"""Whether results say that something failed, and how."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.detectors.alike import _NUMBERS, leave_out_numbers
from extproc.detectors.failures import (
    _BEGINS,
    _CODES,
    _COMPLAINS,
    _FIELDS,
    _LONGEST_LINE,
    _MESSAGE,
    _MISSING,
    _NO_FAILURE,
    _TRANSIENT,
    _USAGE,
    _WITHIN,
    FATAL,
    MISSING,
    NO_FAILURE,
    SAID_WITHIN,
    TRANSIENT,
    _denies,
    _find_line,
    _has_stem,
    _holds_records,
    _is_marked,
    _may_be_marked,
    _may_be_within,
    _may_begin,
    _may_complain,
    _may_fail,
    _may_hold_messages,
    _may_miss,
    _may_pass,
    is_error,
    read_failure,
)
from extproc.detectors.results import finds_any
from tests.support.tool_results import TOOL_RESULTS


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("Traceback (most recent call last):", True),
        ("ValueError: x", True),
        ("bash: javac: command not found", True),
        ("No such file or directory", True),
        ("Usage: git [-v]", True),
        ("Permission denied", True),
        ("<returncode>1</returncode>", True),
        ("exit code 127", True),
        ("exited with code 2", True),
        ('{"exit_code": 1}', True),
        ("returned non-zero exit status", True),
        ("the command returned 1", True),
        ("make returned with code 2 and left", True),
        ("exit status 200", True),
        ('{"status": 500}', True),
        ("status: 2001", True),
        ("HTTP status code: 404", True),
        ("git: no command\n  usage: git [-v]", True),
        ("error: none of these is a file", True),
        ("Error: null is not an object", True),
        ("Error: 0.5 is no integer", True),
        ('{"error": "", "errors": ["x"]}', True),
        ("failed: 10, passed: 0", True),
        ('{"failed": 3}', True),
        ("exception: false alarm", True),
        ("exit code 0", False),
        ("<returncode>0</returncode>", False),
        ("3 passed, 0 failed", False),
        ("No errors found.", False),
        ("compiled without any errors", False),
        ("The file has been edited.", False),
        ("Unknown tool: x", True),
        ("Tool 'x' does not exist", True),
        ("x is not a valid tool, try one of [a, b].", True),
        ("tool not available", True),
        ("That wasn't valid JSON", True),
        ("503 Service Unavailable", True),
        ("You are being rate limited.", True),
        ("Could not parse LLM output: `so`", True),
        ("The request timed out", True),
        ('{"content": [{"type": "text", "text": "ok"}], "isError": true}', True),
        ('{"content": [], "isError": false}\\nmore', False),
        ("{'content': [], 'isError': False}\\n\\n", False),
        ("meta=None content=[] isError=False more", False),
        ('"{\\"isError\\": false}\\\\n"', False),
        ("src/a.py:3:    raise ValueError('not found')", False),
        ("def fail():\n    raise KeyError", False),
        ("error.log\nfailed-jobs.txt", False),
        ("", False),
        ("x" * 3_000 + " error", False),
        ('{"ok": true, "error": null}', False),
        ('{"error":null,"id":1}', False),
        ('{"errors": [], "failed": 0, "is_error": false}', False),
        ('{"error_message": "", "errorCode": 0, "exception": {}}', False),
        ('"{\\"error\\": \\"\\"}"', False),
        ("passed=5 failed=0 errors=0", False),
        ("error: none\ndone", False),
        ("Errors: 0. Warnings: 2.", False),
        ("<errors/><error></error>", False),
        ('{"status": 201, "message": "created"}', False),
        ("status: 200 OK", False),
        ("HTTP status code: 204", False),
        ("The query returned 5 rows", False),
        ("returned 1,024 rows", False),
        ('{"returned": 5}', False),
        ("cache invalidated", False),
        ("Memory usage: 40 %", False),
    ],
)
def test_an_error_says_so_early(text: str, error: bool) -> None:
    """Fields, codes, lines that begin as errors do, and complaints; within 3,000 characters."""
    assert is_error(text) is error


def test_results_of_tools_are_told_apart() -> None:
    """Of 400 results and more, at most 4 in 100 that are called errors are none, and at most 4 in 100 errors are missed."""
    right = sum(1 for kind, text in TOOL_RESULTS if kind != NO_FAILURE and is_error(text))
    said = sum(1 for _, text in TOOL_RESULTS if is_error(text))
    errors = sum(1 for kind, _ in TOOL_RESULTS if kind != NO_FAILURE)

    assert len(TOOL_RESULTS) >= 400
    assert right / said >= 0.96
    assert right / errors >= 0.96


def test_what_passes_and_what_is_not_there_are_told_from_what_stays() -> None:
    """Of the errors that are found, the kind of at most 4 in 100 is wrong."""
    found = [(kind, read_failure(text)) for kind, text in TOOL_RESULTS if kind != NO_FAILURE and is_error(text)]

    assert sum(1 for kind, read in found if kind == read) / len(found) >= 0.96


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("connect ECONNREFUSED 127.0.0.1:80", TRANSIENT),
        ("Error: connection refused", TRANSIENT),
        ("HTTP 502 Bad Gateway", TRANSIENT),
        ("503 Service Unavailable", TRANSIENT),
        ("504 Gateway Timeout", TRANSIENT),
        ("429 Too Many Requests", TRANSIENT),
        ('{"error": {"message": "Rate limit reached"}}', TRANSIENT),
        ("The command timed out.", TRANSIENT),
        ("Error: temporarily unavailable", TRANSIENT),
        ("Busy. Please try again later.", TRANSIENT),
        ("An error occurred while running the tool. Please try again.", FATAL),  # of openai-agents, whatever has failed
        ("Error: user 503 is blocked", FATAL),
        ("500 Internal Server Error", FATAL),
        ("Error: the timeout must be a number", FATAL),
        ("Error: order 17 not found", MISSING),
        ("cat: a.txt: No such file or directory", MISSING),
        ("The file does not exist.", MISSING),
        ("404 Not Found", MISSING),
        ("Error from server (NotFound): pods x", MISSING),
        ("bash: frob: command not found", FATAL),
        ("Tool 'frob' does not exist", FATAL),
        ("MCP error -32601: Method not found", FATAL),
        ("Permission denied", FATAL),
        ("3 passed", NO_FAILURE),
    ],
)
def test_a_failure_has_a_kind(text: str, kind: str) -> None:
    """What may go away by itself, what is not there, and the rest; a tool or a command that is not there is none of these."""
    assert read_failure(text) == kind


def test_what_the_api_marks_as_failed_has_failed() -> None:
    """Its kind is read all the same."""
    assert [read_failure(text, failed=True) for text in ("", "so be it", "later: timed out")] == [FATAL, FATAL, TRANSIENT]


_PIECES = [
    *("Exit", "return", "status", "code", "ed", "with ", "non", "zero ", "no ", "without", " any", "s", "can", "'t"),
    *("usage", "null", '":', "[]", "false", "true", "is_", "isError", "message", '"text": "', "\\n", "502 ", "http/1", "a.c"),
    *("error", "Failed", "exception", "failure", "not", "found", "timed out", "denied", "must ", *" _:=-10\nx\u00e9\x1e"),
]
_BEGINNINGS = [
    *("fatal", "panic", "\nkilled\n", "e:", "[a]:", "parse ", "err!", "a:1:2: ", "\n404 gone", "3 problems\n"),
    *("\n500 bad", "http/1.1 4", "\naborted\n", "segmentation fault", "err_", "build ", "--- ", "# "),
    *("traceback (most", "(", ")", ": ", "***"),
]


_COMPLAINTS = [
    *("cat: ", "no such ", "unable to ", "timeout", "refused", "rate limit", "unknown x", "missing", "is locked", "try again"),
    *("connection ", "503", "temporarily", "404", "no row found", "problem:", "error", "failed", ".", '{"message":"', "text='"),
]
_ODD = ["\u0307", "\u0130", "\u017f", "\u212a", "\xa0", "\u2028", "\x1c", "\u65e5", "\r", "\t", "a" * 390, "- " * 190]


@given(st.lists(st.sampled_from(_PIECES + _BEGINNINGS + _COMPLAINTS + _ODD), max_size=20).map("".join))
def test_a_quick_look_misses_nothing(text: str) -> None:
    """Whatever an exact pattern finds, the quick look before it does, too, in any letters and in lines that are cut."""
    assert_quick_looks_are_right(text[:SAID_WITHIN].lower())


@given(st.lists(st.sampled_from(_PIECES), max_size=30).map("".join))
def test_every_failure_has_a_stem(text: str) -> None:
    """A text without one of the stems needs no further look."""
    said = text.lower()

    assert _has_stem(said) or not (_find_line(said) or _is_marked(said))


@pytest.mark.slow
@pytest.mark.parametrize("kind_and_text", TOOL_RESULTS)
def test_a_quick_look_misses_none_of_the_results(kind_and_text: tuple[str, str]) -> None:
    """The same for what tools write."""
    said = kind_and_text[1].lower()

    assert_quick_looks_are_right(said)
    assert _has_stem(said) or not (_find_line(said) or _is_marked(said))


def assert_quick_looks_are_right(said: str) -> None:
    """Nothing is found that a quick look rules out."""
    lines = [line[:_LONGEST_LINE] for line in said.replace("\x1e", "\n").split("\n")]
    begins = any(_BEGINS.match(line) for line in lines)
    complains = any(_COMPLAINS.search("\n" + line) for line in lines)
    within = _WITHIN.search(said) is not None
    marked = finds_any(said, _FIELDS) or finds_any(said, _CODES) or _USAGE.search(said) is not None
    denied = _NO_FAILURE.search(said) is not None

    assert _may_fail(said) or not (begins or complains or within or marked or denied)
    assert _denies(said) or not denied
    assert _may_be_marked(said) or not marked
    assert _may_be_within(said) or not within
    assert _may_begin("\n".join(lines)) or not begins
    assert _may_complain("\n".join(lines)) or not complains
    assert _may_hold_messages(said) or not _MESSAGE.search(said)
    assert _holds_records(said) is any(line.startswith(("{", "[", '"{', "'{")) for line in said.split("\n"))
    for line in lines:
        assert _may_begin(line) or not _BEGINS.match(line)
        assert _may_complain(line) or not _COMPLAINS.search("\n" + line)
        assert _may_pass(line) or not finds_any(line, _TRANSIENT)
        assert _may_miss(line) or not finds_any(line, _MISSING)


_HOSTILE = [
    *("error ", "a: ", "1:1: ", "<", "<a", "[", '"', '"message":"', 'text="', "exit ", "status 200 ", "no errors ", "usage:\n"),
    *("404 ", "4000", "err!", "]:", "\ne:", "no of 1 ", "no a ", "fail\x1e", "1 error", "timeout ", "without "),
    *("0 ", "(error", "\n", "a\n", " " * 99 + "a", "not ", "cannot\n", "failed:", "x" * 99 + " ", "\\n", "\x1e", "2026-"),
]


@pytest.mark.parametrize("piece", _HOSTILE)
def test_a_result_of_nothing_but_one_piece_is_read(piece: str) -> None:
    """No input is catastrophic: a megabyte of anything ends, and twice as much of it is read alike."""
    text = piece * (2**20 // len(piece))

    assert read_failure(text) == read_failure(text + text)


_BITS = st.sampled_from(
    [
        *("1", "22", "3.5", "007", " ", "\n", ":", ": ", "=", '":', '": ', "%", " %", "/", " of ", "#", "\t", "\r", "-", "."),
        *(
            "failed",
            "Errors",
            "passed",
            "failures",
            "error",
            "tests",
            "line ",
            "Step ",
            "try ",
            "x",
            "\u00e9",
            "\u017f",
            "\u0663",
        ),
    ]
)


@given(st.lists(_BITS, max_size=30).map("".join))
def test_numbers_are_left_out_of_each_line_as_of_the_whole(text: str) -> None:
    """Lines of a known shape are cut in the same places."""
    assert leave_out_numbers(text) == leave_out_numbers(text) == _NUMBERS.sub("", text)
