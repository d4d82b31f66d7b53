"""Errors as Python, HTTP and frameworks for agents write them, and texts that only talk about errors."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.detectors.failures import FATAL, MISSING, NO_FAILURE, TRANSIENT, read_failure
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.looping import encoded
from tests.support.service import make_service
from tests.support.steering import ask
from tests.support.turn_writers import SHAPES, Did

ERRORS = {
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
    "Validation Error found:\n1 validation error for Report\nRecall the function correctly, fix the errors": FATAL,
    "Error when executing tool search with arguments {'q': 'x'}: boom": FATAL,
    "Code execution failed at line 'x = 1/0' due to: ZeroDivisionError: division by zero": FATAL,
    "Code parsing failed on line 1 due to: SyntaxError": FATAL,
    "Error:\nCode execution failed at line 'x'\nNow let's retry: take care not to repeat previous errors!": FATAL,
    "Task failed with exception": FATAL,
}
"""Each is a strong loop if it comes back: Python, HTTP, LlamaIndex, AutoGen, LangChain, DSPy, instructor, smolagents."""

PASSING = [
    *("[Errno 111] Connection refused", "[Errno 110] Connection timed out", "HTTP 503", "HTTP 429", "HTTP/1.1 503"),
    *("Encountered error: 429 Too Many Requests", "Execution error in search: the request timed out"),
    *("Error: ToolException('rate limit exceeded')", "HTTP 502 Bad Gateway", "The server returned HTTP 503"),
]
"""These may go away by themselves."""

NONE = [
    *("0 errors", "no error", "No errors found.", "errors: 0", "0 validation errors for Report", "No validation errors"),
    *("[Errno 0] Success", "[Errno 2] is the code for ENOENT.", "HTTP 200", "HTTP/1.1 200", "HTTP/2 304", "HTTP 4040"),
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


def refuses(result: str, times: int, shape: str = "chat") -> bool:
    """Whether the preset's thresholds refuse a request after the same call came back with this result so many times."""
    ladder: dict[str, Any] = {"action": "steer", "escalate": {"land": 5, "reject": 7}, "weak_threshold": 14}
    service = make_service(policy("p", ANY, similarity="turns", **ladder))
    turns = [Did((("use", {"q": "x"}),), (result,), "", f"Thought no. {number}!") for number in range(times)]
    return ask(service, encoded(SHAPES[shape](turns))).HasField("immediate_response")


@pytest.mark.parametrize(("text", "kind"), ERRORS.items())
def test_an_error_is_refused_at_the_seventh(text: str, kind: str) -> None:
    """Its kind is known, and nothing is refused before."""
    assert read_failure(text) == kind
    assert [refuses(text, times) for times in (6, 7)] == [False, True]


@pytest.mark.parametrize("shape", SHAPES)
def test_an_error_is_refused_in_every_api(shape: str) -> None:
    """However the API writes a result."""
    assert [refuses("[Errno 13] Permission denied", times, shape) for times in (6, 7)] == [False, True]


@pytest.mark.parametrize("text", PASSING)
def test_what_may_pass_by_itself_waits(text: str) -> None:
    """Like any short result that is no error."""
    assert read_failure(text) == TRANSIENT
    assert not refuses(text, 15)


@pytest.mark.parametrize("text", NONE)
def test_a_text_about_errors_is_none(text: str) -> None:
    """Sources, documents, listings, counts of nothing."""
    assert read_failure(text) == NO_FAILURE
    assert not refuses(text, 15)
