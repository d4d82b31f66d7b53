"""Whether results report a failure, and of which kind."""

import pytest
from hypothesis import given, strategies as st

from extproc.detectors.alike import leave_out_numbers
from extproc.detectors.failures import (
    FATAL,
    MISSING,
    NO_FAILURE,
    TRANSIENT,
    find_complaint,
    is_error,
    read_failure,
)
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
def test_error_is_found_within_3000_characters(text: str, error: bool) -> None:
    assert is_error(text) is error


def test_recorded_results_are_classified() -> None:
    """At most 4 % of reported errors are none, 4 % are missed, and 4 % get a wrong kind."""
    errors = [(kind, text) for kind, text in TOOL_RESULTS if kind != NO_FAILURE]
    found = [(kind, read_failure(text)) for kind, text in errors if is_error(text)]
    said = sum(is_error(text) for _, text in TOOL_RESULTS)

    assert len(TOOL_RESULTS) >= 400
    assert len(found) / said >= 0.96
    assert len(found) / len(errors) >= 0.96
    assert sum(kind == read for kind, read in found) / len(found) >= 0.96


# As Python, HTTP, LlamaIndex, AutoGen, LangChain, DSPy, instructor and smolagents write them.
OF_FRAMEWORKS = {
    "[Errno 2] No such file or directory": MISSING,
    "[Errno 2] No such file or directory: 'a.txt'": MISSING,
    "[Errno 13] Permission denied": FATAL,
    "[Errno 13] Permission denied: '/etc/shadow'": FATAL,
    "[Errno 28] No space left on device": FATAL,
    "[WinError 2] The system cannot find the file specified": MISSING,
    "[WinError 5] Access is denied: 'C:\\x'": FATAL,
    "HTTP 404": MISSING,
    "HTTP 404: https://example.com/a": MISSING,
    "HTTP 403": FATAL,
    "HTTP 400 Bad Request": FATAL,
    "HTTP 409 Conflict": FATAL,
    "HTTP 500": FATAL,
    "HTTP/1.1 500": FATAL,
    "HTTP/2 404": MISSING,
    "HTTP/1.1 400 Bad Request\nServer: x": FATAL,
    "HTTP Error 404: Not Found": MISSING,
    "The server returned HTTP 404": MISSING,
    "HTTP response code: 500": FATAL,
    "Exception: boom": FATAL,
    "Exception('boom')": FATAL,
    "ValueError('boom')": FATAL,
    "Exception raised: boom": FATAL,
    "<exception>boom</exception>": FATAL,
    "Error - boom": FATAL,
    "Encountered error: boom": FATAL,
    "Encountered error: 'NoneType' object has no attribute 'x'": FATAL,
    "Tool search raised an exception: boom": FATAL,
    "No tool named search": FATAL,
    "Error: boom\nYou argument should follow json format.": FATAL,
    "Error: Function search not found.": FATAL,
    "exitcode: 1 (execution failed)\nCode output: boom": FATAL,
    "execution failed (exitcode: 1)": FATAL,
    "Error: ToolException('boom')\n Please fix your mistakes.": FATAL,
    "ToolException('boom')": FATAL,
    "search is not a valid tool, try one of [find, read].": FATAL,
    "Error: search is not a valid tool, try one of [find, read].": FATAL,
    "Execution error in search: boom": FATAL,
    "Validation error: 1 validation error for Report\nname\n  Field required": FATAL,
    (
        "Validation Error found:\n1 validation error for Report\nRecall the function correctly, "
        "fix "
        "the errors"
    ): FATAL,
    "Error when executing tool search with arguments {'q': 'x'}: boom": FATAL,
    "Code execution failed at line 'x = 1/0' due to: ZeroDivisionError: division by zero": FATAL,
    "Code parsing failed on line 1 due to: SyntaxError": FATAL,
    (
        "Error:\nCode execution failed at line 'x'\nNow let's retry: take care not to repeat "
        "previous "
        "errors!"
    ): FATAL,
    "Task failed with exception": FATAL,
}

PASSING = [
    *(
        "[Errno 111] Connection refused",
        "[Errno 110] Connection timed out",
        "HTTP 503",
        "HTTP 429",
        "HTTP/1.1 503",
    ),
    *(
        "Encountered error: 429 Too Many Requests",
        "Execution error in search: the request timed out",
    ),
    *(
        "Error: ToolException('rate limit exceeded')",
        "HTTP 502 Bad Gateway",
        "The server returned HTTP 503",
    ),
]

ABOUT_ERRORS = [
    *(
        "0 errors",
        "no error",
        "No errors found.",
        "errors: 0",
        "0 validation errors for Report",
        "No validation errors",
    ),
    *(
        "[Errno 0] Success",
        "[Errno 2] is the code for ENOENT.",
        "HTTP 200",
        "HTTP/1.1 200",
        "HTTP/2 304",
        "HTTP 4040",
    ),
    *(
        "HTTP 404 is returned when the page does not exist.",
        "HTTP 404 means that the page was not found.",
        "HTTP 404 pages: 12",
    ),
    *(
        "A 404 means that nothing was found.",
        "404 Not Found is what the server answers.",
        "## HTTP 404",
        "- HTTP 404: not found",
    ),
    *(
        "| HTTP 404 | not found |",
        "* HTTP 404",
        "See the page about HTTP 404",
        '3 hits for "HTTP 404"',
        "HTTP response code: 204",
    ),
    'def find():\n    raise Exception("boom")\n',
    'class ToolException(Exception):\n    """Raised by tools."""',
    "    ValueError('boom'),",
    "src/a.py:3:    raise Exception('boom')",
    "12: Exception: boom",
    "try:\n    run()\nexcept Exception as error:\n    log.exception('boom')",
    "# How to handle errors\n\nTools may raise ToolException.\n\nThen the agent sees its text.",
    "Exception handling in Python",
    "exceptions.py\nerrors.md",
    "Encountered errors are logged to a file",
    "exitcode: 0 (execution succeeded)\nCode output: 2",
    "Execution logs:\nAll good\nLast output from code snippet:\n4",
    "<exception></exception>",
    "tools: search, find; each is a valid tool",
    "The code ran without raising an exception",
]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        *OF_FRAMEWORKS.items(),
        *((text, TRANSIENT) for text in PASSING),
        *((text, NO_FAILURE) for text in ABOUT_ERRORS),
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
        (
            "An error occurred while running the tool. Please try again.",
            FATAL,
        ),  # of openai-agents, whatever has failed
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
def test_failure_has_a_kind(text: str, kind: str) -> None:
    """What may pass by itself, what is missing, and the rest.

    A missing tool or command is of the rest.
    """
    assert read_failure(text) == kind


def test_marked_failure_is_a_failure() -> None:
    assert [read_failure(text, failed=True) for text in ("", "so be it", "later: timed out")] == [
        FATAL,
        FATAL,
        TRANSIENT,
    ]


_PIECES = [
    *(
        "Exit",
        "return",
        "status",
        "code",
        "ed",
        "with ",
        "non",
        "zero ",
        "no ",
        "without",
        " any",
        "s",
        "can",
        "'t",
    ),
    *(
        "usage",
        "null",
        '":',
        "[]",
        "false",
        "true",
        "is_",
        "isError",
        "message",
        '"text": "',
        "\\n",
        "502 ",
        "http/1",
        "a.c",
    ),
    *(
        "error",
        "Failed",
        "exception",
        "failure",
        "not",
        "found",
        "timed out",
        "denied",
        "must ",
        *" _:=-10\nx\u00e9\x1e",
    ),
]
_BEGINNINGS = [
    *(
        "fatal",
        "panic",
        "\nkilled\n",
        "e:",
        "[a]:",
        "parse ",
        "err!",
        "a:1:2: ",
        "\n404 gone",
        "3 problems\n",
    ),
    *(
        "\n500 bad",
        "http/1.1 4",
        "\naborted\n",
        "segmentation fault",
        "err_",
        "build ",
        "--- ",
        "# ",
    ),
    *("traceback (most", "(", ")", ": ", "***"),
]


_COMPLAINTS = [
    *(
        "cat: ",
        "no such ",
        "unable to ",
        "timeout",
        "refused",
        "rate limit",
        "unknown x",
        "missing",
        "is locked",
        "try again",
    ),
    *(
        "connection ",
        "503",
        "temporarily",
        "404",
        "no row found",
        "problem:",
        "error",
        "failed",
        ".",
        '{"message":"',
        "text='",
    ),
]
_ODD = [
    "\u0307",
    "\u0130",
    "\u017f",
    "\u212a",
    "\xa0",
    "\u2028",
    "\x1c",
    "\u65e5",
    "\r",
    "\t",
    "a" * 390,
    "- " * 190,
]


_STEM = "\nreturn"  # without a word that failures have, nothing is read


@given(
    st.lists(st.sampled_from(_PIECES), max_size=30).map("".join)
    | st.lists(st.sampled_from(_PIECES + _BEGINNINGS + _COMPLAINTS + _ODD), max_size=20)
    .map("".join)
    .map(_STEM.__add__)
    | st.lists(st.sampled_from(_PIECES + _BEGINNINGS + _COMPLAINTS + _ODD), max_size=20).map(
        lambda some: "".join(some) + _STEM
    )
)
def test_quick_look_misses_no_failure(text: str) -> None:
    assert read_failure(text) == EXACT.read_failure(text)
    assert find_complaint(text) == EXACT.find_complaint(text)


@pytest.mark.slow
def test_quick_look_misses_no_recorded_failure() -> None:
    whole = [text for _, text in TOOL_RESULTS]
    texts = {*whole, *[line + _STEM for text in whole for line in text.split("\n")]}

    assert [text for text in texts if read_failure(text) != EXACT.read_failure(text)] == []


_HOSTILE = [
    *(
        "error ",
        "a: ",
        "1:1: ",
        "<",
        "<a",
        "[",
        '"',
        '"message":"',
        'text="',
        "exit ",
        "status 200 ",
        "no errors ",
        "usage:\n",
    ),
    *(
        "404 ",
        "4000",
        "err!",
        "]:",
        "\ne:",
        "no of 1 ",
        "no a ",
        "fail\x1e",
        "1 error",
        "timeout ",
        "without ",
    ),
    *(
        "0 ",
        "(error",
        "\n",
        "a\n",
        " " * 99 + "a",
        "not ",
        "cannot\n",
        "failed:",
        "x" * 99 + " ",
        "\\n",
        "\x1e",
        "2026-",
    ),
]


@pytest.mark.parametrize("piece", _HOSTILE)
def test_hostile_result_is_read(piece: str) -> None:
    text = piece * (2**20 // len(piece))

    assert read_failure(text) == read_failure(text + text)


_BITS = st.sampled_from(
    [
        *(
            "1",
            "22",
            "3.5",
            "007",
            " ",
            "\n",
            ":",
            ": ",
            "=",
            '":',
            '": ',
            "%",
            " %",
            "/",
            " of ",
            "#",
            "\t",
            "\r",
            "-",
            ".",
        ),
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
def test_numbers_are_left_out_of_known_line_shapes(text: str) -> None:
    expected = EXACT_NUMBERS.leave_out_numbers(text)

    assert [leave_out_numbers(text) for _ in range(2)] == [expected, expected]
