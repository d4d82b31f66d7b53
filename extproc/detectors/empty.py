"""Whether a result says that nothing was found.

Errors are failures, and good news, such as `no errors found`, is not empty.
"""

from __future__ import annotations

import re
from typing import Any, Final

from msgspec import DecodeError, json

_LONGEST: Final = 80
"""Maximum length of an empty result, in characters."""

_AROUND = r"[\s()\[\]<>\"'`.,:;!*-]{0,4}"
_SAYS: Final = re.compile(
    rf"""
    {_AROUND}(?:
        (?:(?:the\ |your\ )?(?:search|query)\ )?(?:(?:found|returned|matched)\ )?
        (?:no|0|zero)\ (?:(?:matching|relevant|search)\ )?
        (?:match(?:es)?|(?:result|hit|record|row|item|file|document|page|occurrence|reference|line)s?
          |entr(?:y|ies)|data|content|output)
        (?:\ (?:(?:was|were)\ )?(?:found|returned|matched|available))?
      | nothing(?:\ (?:was\ )?(?:found|returned|matched))?
      | null | none | nil | empty
    )?{_AROUND}
    """,
    re.VERBOSE | re.IGNORECASE,
)
_GOOD_NEWS: Final = re.compile("err|fail|fault|issue|problem|violat|warn|conflict", re.IGNORECASE)
"""Keys whose empty values say that all is well."""


def is_empty(text: str) -> bool:
    """Whether a result says that nothing was found.

    >>> is_empty("(0 rows)"), is_empty('{"results": [], "page": 1}'), is_empty('{"errors": []}')
    (True, True, False)
    """
    text = text.strip()
    if len(text) > _LONGEST:
        return False
    if text[:1] in {"{", "["}:
        try:
            return _has_no_values(json.decode(text))
        except (DecodeError, ValueError):
            pass
    return _SAYS.fullmatch(text) is not None


# What JSON contains
def _has_no_values(value: Any) -> bool:  # noqa: ANN401
    if not isinstance(value, dict) or not value:
        return value in (None, "", [], {})
    empty = [key for key, each in value.items() if _has_no_values(each)]
    rest = [each for key, each in value.items() if key not in empty]
    return any(_GOOD_NEWS.search(key) is None for key in empty) and all(
        isinstance(each, (bool, int, float)) or each in ("ok", "success") for each in rest
    )
