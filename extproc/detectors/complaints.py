"""Recognizes a program's complaint about the format of an answer.

Libraries that validate answers quote them: pydantic each wrong value, a JSON parser the place,
instructor the whole answer. The complaint is the same if only these differ.
"""

from __future__ import annotations

import re
from typing import Final

_SAID_WITHIN: Final = 600
"""Number of characters of a text in which to look for a complaint."""

_STEMS: Final = (
    " not ",
    "n't",
    " no ",
    "wrong",
    "bad ",
    "malformed",
    "improper",
    "expected",
    "found 0",
    "lack",
    "without",
    "validation error",
)
"""Every complaint contains one of these."""

_ANSWER = r"(?:answer|response|output|reply|message|command|action|submission)"
_FORM = (
    r"(?:format|json|xml|yaml|schema|tool|function|action|code\ "
    r"block|code|backtick|tag|block|structure|syntax)"
)
_COMPLAINT: Final = re.compile(
    rf"""
      \b{_ANSWER}\ (?:
        (?:did|does|was|is)(?:\ not|n't)|could\ not|ha[sd]\ no|lacks|contain(?:s|ed)\ no
      )\b
    | \b(?:that|this|it)\ (?:was\ not|wasn't|is\ not|isn't)\ (?:\w{{1,16}}\ ){{0,2}}{_FORM}
    | \b(?:wrong|bad|malformed|improper)\ (?:{_ANSWER}|{_FORM})
    | \byou\ (?:did\ not|didn't|have\ not|haven't)\ (?:\w{{1,16}}\ ){{1,3}}?(?:\w{{1,16}}\ )?{_FORM}
    | \bno\ (?:valid\ )?(?:(?:tool|function)\ calls?|actions?|commands?|code\ blocks?|json)
      \ (?:was\ |were\ |could\ be\ )?(?:found|given|provided|detected|recogni[sz]ed|made)
    | \bfound\ 0\ (?:\w{{1,16}}\ )?(?:actions?|code|blocks?|commands?|tool)
    | \bvalidation\ errors?\ (?:for|found)\b
    | \bexpected\ (?:an?\ |exactly\ |valid\ |one\ ){{1,2}}(?:\w{{1,16}}\ )?{_FORM}
    """,
    re.VERBOSE,
)

_QUOTES: Final = ("input_value=", "(char ", "[type=json_", "fix the errors")
_QUOTED: Final = re.compile(
    r"""
      input_value=[^\n]{0,256}?,\ input_type=\w{1,64}
    | column\ [0-9]{1,9}(?=\ \(char\ |\ \[type=json_) | \(char\ [0-9]{1,9}\)
    | (?<=Recall\ the\ function\ correctly,\ fix\ the\ errors)\b.*
    """,
    re.VERBOSE | re.DOTALL,
)


def find_quote(text: str) -> int:
    """Where a complaint may begin to quote the answer; -1 if it does not."""
    places = [place for quote in _QUOTES if (place := text.find(quote)) >= 0]
    return min(places, default=-1)


def leave_out_answer(text: str) -> str:
    """A text without what a complaint in it quotes of the answer.

    >>> leave_out_answer("Not a number [type=int_type, input_value='ten', input_type=str]")
    'Not a number [type=int_type, #]'
    """
    return _QUOTED.sub("#", text) if find_quote(text) >= 0 else text


def complains(text: str) -> bool:
    """Whether a user's text complains about the format of the previous answer.

    >>> complains("Your response did not contain an action."), complains("Please answer in JSON.")
    (True, False)
    """
    said = " " + text[:_SAID_WITHIN].lower().replace("\u2019", "'")
    may = sum([stem in said for stem in _STEMS]) > 0
    return may and _COMPLAINT.search(said) is not None
