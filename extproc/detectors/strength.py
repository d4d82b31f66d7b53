"""What kind of failure a result tells of: one that passes by itself, or something that was looked for and is not there.

Who waits for a service to come up, or looks many things up, gets the same error again and again and is in no loop.
"""

from __future__ import annotations

import re
from typing import Final

PASSING, MISSING = 16, 32
"""Flags: waiting may help; what was looked for is not there."""

_SAID_WITHIN: Final = 1_000
"""Kinds are told by so much of a result, in characters."""

_PASSING: Final = re.compile(
    r"""
      connection\W+(?:attempt\W+)?(?:was\W+|is\W+)?(?:refused|reset|aborted|closed) | econn(?:refused|reset)
    | refused\W+to\W+connect | connect\w*\W+(?:call\W+)?failed | failed\W+to\W+connect | couldn.?t\W+connect
    | (?<![\w.-])50[234](?![\w.-]) | bad\W+gateway | (?:service|temporarily)\W+(?:is\W+)?(?:temporarily\W+)?unavailable
    | (?<![\w.-])timed?[\W_]?out(?!\s*=) | etimedout | deadline\W*exceeded | timeout(?:error|exception)
    | rate[\W_]?limit | too\W+many\W+requests | (?<![\w.-])429(?![\w.-]) | throttl(?:ed|ing) | quota\W+will\W+reset
    | try\W+(?:it\W+)?again\W+(?:later|in\W+(?:a|\d)) | retry[\W_]?after | overloaded | not\W+(?:yet\W+)?ready
    | still\W+(?:starting|booting)
    """,
    re.VERBOSE,
)
_MISSING: Final = re.compile(
    r"not\W+(?:be\W+)?found|no\W+such|do(?:es)?\W?n.t\W+exist|does\W+not\W+exist|(?<![\w.-])404(?![\w.-])"
    r"|no\W+(?:\w+\W+){0,3}(?:found|match\w*|results?)|unknown\W+(?:\w+\W+)?(?:id|key|name|user|customer|order)\b|not\W+exist"
)
_BROKEN: Final = re.compile(
    r"\b(?:tools?|functions?|commands?|methods?|modules?|packages?)\b[^\n]{0,80}not\W+(?:be\W+)?found|\bno\W+module\b"
    r"|\bno\W+(?:\w+\W+){0,2}(?:tools?|functions?|commands?|methods?|modules?|actions?|code|json)\b"
    r"|(?:tool|function|command|method)\b[^\n]{0,80}n.t\W+exist"
)


def read_failure(text: str) -> int:
    """The flags of a failed result. That a tool itself is not there is no look-up."""
    said = text[:_SAID_WITHIN].lower()
    if _PASSING.search(said):
        return PASSING
    return MISSING if _MISSING.search(said) and not _BROKEN.search(said) else 0
