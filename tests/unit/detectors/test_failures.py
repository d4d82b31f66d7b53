"""Whether results say that something failed, and how."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.detectors.alike import leave_out_numbers
from extproc.detectors.failures import FATAL, MISSING, NO_FAILURE, TRANSIENT, find_complaint, is_error, read_failure
from tests.support.exact import load_exact
from tests.support.tool_results import TOOL_RESULTS

EXACT, EXACT_NUMBERS = load_exact("failures"), load_exact("alike")


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
    """Of 400 results and more, at most 4 in 100 that are called errors are none, 4 errors are missed, 4 of another kind."""
    errors = [(kind, text) for kind, text in TOOL_RESULTS if kind != NO_FAILURE]
    found = [(kind, read_failure(text)) for kind, text in errors if is_error(text)]
    said = sum(is_error(text) for _, text in TOOL_RESULTS)

    assert len(TOOL_RESULTS) >= 400
    assert len(found) / said >= 0.96
    assert len(found) / len(errors) >= 0.96
    assert sum(kind == read for kind, read in found) / len(found) >= 0.96


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


_STEM = "\nreturn"
"""Without a word that failures have, nothing is looked at, not even the position in a file."""


@given(
    st.lists(st.sampled_from(_PIECES), max_size=30).map("".join)
    | st.lists(st.sampled_from(_PIECES + _BEGINNINGS + _COMPLAINTS + _ODD), max_size=20).map("".join).map(_STEM.__add__)
    | st.lists(st.sampled_from(_PIECES + _BEGINNINGS + _COMPLAINTS + _ODD), max_size=20).map(lambda some: "".join(some) + _STEM)
)
def test_a_quick_look_misses_nothing(text: str) -> None:
    """Whatever the exact patterns find is found behind the quick looks, too, in any letters and in lines that are cut."""
    assert read_failure(text) == EXACT.read_failure(text)
    assert find_complaint(text) == EXACT.find_complaint(text)


@pytest.mark.slow
def test_a_quick_look_misses_none_of_the_results() -> None:
    """The same for what tools write, as a whole and line by line."""
    whole = [text for _, text in TOOL_RESULTS]
    texts = {*whole, *[line + _STEM for text in whole for line in text.split("\n")]}

    assert [text for text in texts if read_failure(text) != EXACT.read_failure(text)] == []


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
def test_numbers_are_left_out_of_lines_of_a_known_shape(text: str) -> None:
    """In the same places as without shapes, when the shape is new and when it is known."""
    expected = EXACT_NUMBERS.leave_out_numbers(text)

    assert [leave_out_numbers(text) for _ in range(2)] == [expected, expected]
