"""Normalizes results: removes volatile parts, which change by themselves.

Volatile are times of day with their dates, Unix times, durations with a unit, UUIDs, hex of 8
digits or more, numbers after `line`, `step`, `pid` and `port`, numbers that are the whole value of
a key or element for a duration or a process, `:123` positions after a file name, paths in temporary
folders, transfer rates, ids of the request itself, overwritten states of a progress bar, the order
of Python's sets, and what a validator quotes of an answer. Any other change is progress: `3 failed`
is not `4 failed`, `45 %` is not `46 %`, and records with different ids or dates are different.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from extproc.detectors.complaints import find_quote, leave_out_answer
from extproc.detectors.shapes import DIGIT, LONGEST_SHAPE, Stays, write_shapes
from extproc.looks import look_for

MAX_NORMALIZED: Final = 16_384
"""Number of characters of a result to normalize; the rest is compared unchanged."""

_SPARE: Final = 1_024
"""Up to this many characters fewer are normalized, to cut at the end of a line, which splits no
volatile part."""

_HEAD: Final = 128
_LONGEST: Final = 64
"""Maximum length of volatile parts whose extent depends on the text after them, in characters."""

_GONE: Final = "#"
_UNIT = r"(?:[mun\u00b5]?s|[mhd]|(?:milli|micro)?sec(?:ond)?s?|min(?:ute)?s?|h(?:ou)?rs?|days?)"
_SEPARATOR = r"[ \t\"':=\#(\[]"
_MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}+"
_CLOCK = r"[0-9]{2}(?::[0-9]{2})?+(?:[.,][0-9]++)?+"


def _after(words: str) -> str:
    """A pattern for a first digit after one of these words, of equal length, and separators."""
    return "|".join(
        [
            rf"(?<=(?:{words}){_SEPARATOR}{{{number}}}[0-9])(?<![A-Za-z](?:{words}){_SEPARATOR}{{{number}}}[0-9])"
            for number in (1, 2, 3, 4)
        ]
    )


_NO_ID = "".join([rf"(?<![iI][dD]{_SEPARATOR}{{{number}}}.)" for number in (1, 2, 3, 4)])
_CHUNK = "|".join(
    [rf"(?<=[cC]hunk[\ _][iI][dD]{_SEPARATOR}{{{number}}}.)" for number in (1, 2, 3, 4)]
)
_IN_FILE = "|".join(
    [
        *[rf"(?<=\.[A-Za-z]{{{length}}}:.)" for length in (1, 2, 3, 4, 5)],
        "(?<=akefile:.)",
        "(?<=ocalhost:.)",
    ]
)


# One pass in linear time: quantifiers are possessive, and every match starts with a character
# of one small set, which the engine finds fast. Lookbehinds check the text before it.
_VOLATILE: Final = re.compile(
    rf"""
    [0-9a-fA-F/JMNOSTW](?<![0-9A-Za-z].)(?:
      # a temporary path
      (?<=/)(?<![0-9A-Za-z_.-]/)(?:private/)?+(?:tmp|var/(?:tmp|folders))/[^\s"'`<>:;,()\[\]{{}}|*?]++
    | (?<=[A-Z])(?:
        (?:un|on|ue|ed|hu|ri|at)[a-z]{{0,6}}+,?\ (?:
          {_MONTH}\ {{1,2}}[0-9]{{1,2}}|[0-9]{{1,2}}\ {_MONTH}
        )
      | (?:an|eb|ar|pr|ay|un|ul|ug|ep|ct|ov|ec)[a-z]{{0,6}}+\ {{1,2}}[0-9]{{1,2}}
      )(?![0-9])(?:,?\ [0-9]{{4}}(?![0-9:]))?+                        # a time and its date in words
        ,?\ [0-9]{{2}}:{_CLOCK}(?:\ [A-Z]{{3,4}}\b)?+(?:\ [0-9]{{4}}\b)?+
    | (?<![/JMNOSTW])(?:
        (?=[0-9a-fA-F]{{7}})(?:
          # a UUID
          [0-9a-fA-F]{{7}}(?:-[0-9a-fA-F]{{4}}){{3}}-[0-9a-fA-F]{{12}}(?![0-9A-Za-z])
        # hex
        | (?:(?<=[a-fA-F])|(?=[0-9]*+[a-fA-F]))[0-9a-fA-F]{{7,}}+(?![0-9A-Za-z])
        # a Unix time
        | (?<=1)(?<!\..){_NO_ID}[5-9][0-9]{{8}}(?:[0-9]{{3}}){{0,3}}+
          (?:\.[0-9]{{1,9}}+)?+(?![0-9A-Za-z])
        )
      | (?<=[A-Za-z \t"':=\#(\[]{_SEPARATOR}.)(?:
          (?:{_CHUNK})[0-9a-fA-F]{{4,}}+(?![0-9A-Za-z])               # Codex's name of an output
        | (?<=[0-9])(?:
            {_after("[lL][iI][nN][eE]|[sS][tT][eE][pP]|[pP][oO][rR][tT]")}|{_after("[pP][iI][dD]")})
            [0-9]*+(?![.][0-9])                                       # a line, step, port or pid
        )
      | (?<=[0-9])(?:
          # a position in a file
          (?<=[A-Za-z]:.)(?:{_IN_FILE})[0-9]*+(?::[0-9]++)*+(?![0-9A-Za-z%]|[.][0-9])
        | [0-9]*+(?=\ ?[a-zA-Z\u00b5:./-])(?:
            (?:\.[0-9]++)?+\ ?(?:
              {_UNIT}(?:\ ?[0-9]++(?:\.[0-9]++)?+\ ?{_UNIT})*+        # a duration
            | (?:[kKMGT]?i?[bB]|it)/s(?:ec)?                          # how fast something moves
            )(?![0-9A-Za-z])
          | :{_CLOCK}(?:\ ?[AaPp][Mm]\b)?+                            # a time of day
          # with its date
          | [-/][0-9]{{2}}[-/][0-9]{{2}}[T\ _][0-9]{{2}}:{_CLOCK}
            (?:Z|\ ?[+-][0-9]{{2}}:?[0-9]{{2}})?+
          # the same in other orders
          | /(?:[0-9]{{1,2}}|[A-Z][a-z]{{2}})/[0-9]{{4}}[:\ ][0-9]{{2}}:{_CLOCK}
          | \ {_MONTH}\ [0-9]{{4}},?\ [0-9]{{2}}:{_CLOCK}
          | T[0-9]{{6}}Z?+
          | x[0-9a-fA-F]{{8,}}+(?![0-9A-Za-z])                        # an address
          )
        )
      )
    )
    """,
    re.VERBOSE | re.ASCII,
)

_KEYS = r"""
    (?i-u:uration|lapsed|atency|took|time|pid|process[_-]?id)
    (?i-u:[_-]?(?:time|taken|elapsed|spent))?(?i-u:[_-]?in)?(?:[_-]?[mMuUnNsS][A-Za-z]*)?
    (?:\\*["'][\ \t]*:|(?:\ [^<>\n]*)?>|=)[\ \t\\"']*-?[0-9]
  | _[mM][sS]:?\ -?[0-9]
"""
_may_have_keys: Final = look_for(_KEYS)
"""Whether a text may contain a match of `_OF_KEY`."""

_WITHOUT_DIGITS = r"/tmp/|/var/folders/|hunk[\ _][iI][dD]|[a-fA-F]{8}"  # noqa: S108  # not a file
_may_be_volatile_without_digits: Final = look_for(_WITHOUT_DIGITS)
_is_special: Final = look_for(f"{_WITHOUT_DIGITS}|{_KEYS}|AppData/")
"""Whether a text may contain a match of the rarer patterns below."""
_may_be_volatile: Final = look_for(
    rf"""
      {_WITHOUT_DIGITS}|[0-9a-fA-F]{{8}}
    | [0-9]\ ?{_UNIT}(?:[^A-Za-z]|$)
    | [bBt]/s|[0-9]:[0-9][0-9]|(?:\.[A-Za-z]{{1,5}}|akefile|ocalhost):[0-9]|[0-9]T[0-9]{{6}}
    | (?:[lL][iI][nN][eE]|[sS][tT][eE][pP]|[pP][oO][rR][tT]|[pP][iI][dD])[\ \t"':=\#(\[]+[0-9]
    | {_KEYS} | AppData/
    """
)
"""Whether a text or line may have volatile parts. `_VOLATILE` takes ten times as long."""

_UNIX_TIME: Final = "0000000000"
"""The shape of a possible Unix time, in seconds or smaller units.

Only there do the digits matter.
"""

_STAYS: Final = Stays(_VOLATILE, unless=_UNIX_TIME)

# Ids of this request or call, recognized by a prefix or by the word before; ids of records are
# content.
_PREFIXES = "|".join(
    [
        rf"(?<={word}_)(?<![A-Za-z0-9]{word}_)"
        for word in ("req", "request", "trace", "call", "toolu")
    ]
)
_PREFIXED: Final = re.compile(
    rf"_(?=[A-Za-z0-9]{{8}})(?=[A-Za-z]{{0,24}}+[0-9])(?:{_PREFIXES})[A-Za-z0-9]++(?![_-])"
)
_NAMED: Final = re.compile(
    r"""
    ([rtcnRTCN](?<![A-Za-z].)(?:
          (?:(?<=[rR])equest|(?<=[tT])race|(?<=[cC])orrelation)[ _-]?[iI][dD]|(?<=[nN])once
        )["']?\ ?[:=]\ ?["']?)
    (?=[A-Za-z_-]{0,24}[0-9])[A-Za-z0-9_-]{6,}+
    """,
    re.VERBOSE,
)

# Keys for a duration or a process, in JSON, Python and XML: their numbers are removed, quoted or
# not.
_IN_UNIT = r"""
    (?:[_-]?(?i:in))?(?:
        [_-](?i:(?:milli|micro|nano)(?:sec(?:ond)?)?s?|[mun]?sec(?:ond)?s?|[mun]?s)
      | (?:Milli|Micro|Nano)(?:[sS]ec(?:ond)?)?s?|[MUN]?Sec(?:ond)?s?|[MUN]?S|[MUN]s|ms
    )
"""
_TIMED = (
    *(
        "api",
        "build",
        "call",
        "compile",
        "compute",
        "cpu",
        "elapsed",
        "exec",
        "execution",
        "inference",
        "load",
        "parse",
    ),
    *(
        "process",
        "processing",
        "query",
        "real",
        "render",
        "request",
        "response",
        "run",
        "running",
        "search",
        "server",
        "sys",
    ),
    *("system", "total", "user", "wall"),
)
_TIMED_SO = "|".join([rf"(?<={word}.)|(?<={word}[_-].)" for word in _TIMED])
_KEY = rf"""
    [dDeElLpPtT](?=[uUlLaAoOiIpPrR][rRaAtToOmMiIdD])(?:
        (?:(?<![A-Za-z].)|(?<=[a-z][A-Z]))(?:
            (?i:(?<=d)uration|(?<=e)lapsed(?:[_-]?time)?|(?<=l)atency|(?<=t)ook|(?<=t)ime[_-]?(?:taken|elapsed|spent))
            (?:{_IN_UNIT})?+
          | (?<=[tT])(?i:ime){_IN_UNIT}
          | (?<=\ t)ime(?==\\{{0,4}}+["'][0-9]{{1,20}}+\.[0-9]{{3}})  # JUnit's, in seconds
          | (?<=[pP])(?i:p?id|rocess[_-]?id)
        )
      | (?<=[tT])(?i:(?:{_TIMED_SO})ime)(?:{_IN_UNIT})?+
    )
"""
_NUMBER = r"-?[0-9]{1,20}+(?:\.[0-9]{1,20}+)?+(?:[eE][+-]?[0-9]{1,3}+)?+"
_ENDS = r"[\ \t]{0,4}+(?:[\n,;})\]\\]|$)"
_OF_KEY: Final = re.compile(
    rf"""
    ({_KEY}(?:
        \\{{0,4}}+["'][\ \t]{{0,4}}+:[\ \t]{{0,4}}+(?:
          (\\{{0,4}}+["'])(?={_NUMBER}\2)|(?={_NUMBER}{_ENDS})
        )
      | (?:\ [^<>\n]{{0,64}}+)?>[\ \t]{{0,4}}+(?={_NUMBER}[\ \t]{{0,4}}+</)
      | =\\{{0,4}}+["'](?={_NUMBER}\\{{0,4}}+["'])
      | (?<=_ms)(?::?\ |=)(?={_NUMBER}{_ENDS})
    )){_NUMBER}
    """,
    re.VERBOSE | re.ASCII,
)

_IN_WINDOWS: Final = re.compile(
    r"""(AppData(\\{1,4}|/)Local\2Temp\2)(?:[^\s"'`<>:;,()\[\]{}|*?\\/]++|\2(?!\\))++"""
)
"""A path in the temporary folder of Windows. Where backslashes are doubled, a single one begins an
escape."""

_OVERWRITTEN: Final = re.compile(r"^[^\n]*\r(?=[^\r\n])", re.MULTILINE)
"""Text that a terminal no longer shows, such as earlier states of a progress bar."""

_SET_OPENS: Final = "{'"
_SET: Final = re.compile(r"\{'[^'{}\n]*+'(?:,\ '[^'{}\n]*+')++\}")
"""A set of strings as Python writes it, in a different order each time."""

_may_name_ids: Final = look_for(
    r"""
      (?:req|request|trace|call|toolu)_[A-Za-z0-9]{8}
    | (?:[rR]equest|[tT]race|[cC]orrelation)[\ _-]?[iI][dD]|[nN]once|\{'
    """
)
"""Whether a text may contain a match of `_PREFIXED`, `_NAMED` or `_SET`."""


def finds_any(text: str, patterns: Sequence[re.Pattern[str]]) -> bool:
    """Whether one of the patterns matches in a text."""
    for pattern in patterns:  # noqa: SIM110  # compiled, a generator is read to its end
        if pattern.search(text):
            return True
    return False


def normalize(text: str) -> str:
    """A result without its volatile parts; results that differ only in these become equal.

    >>> normalize("line 7: /tmp/x1: not found after 0.3s (3 failed)")
    'line #: #: not found after # (3 failed)'
    """
    if len(text) <= MAX_NORMALIZED:
        return _normalize(text)
    cut = text.rfind("\n", MAX_NORMALIZED - _SPARE, MAX_NORMALIZED)
    if cut < 0:
        cut = MAX_NORMALIZED
    return _normalize(text[:cut]) + text[cut:]


def _keep_key(found: re.Match[str]) -> str:
    return str(found.group(1)) + _GONE  # a template would take as long as the search


def _normalize(text: str) -> str:
    if "\r" in text:
        text = _OVERWRITTEN.sub("", text)
    text = leave_out_answer(text)
    if _may_name_ids(text):
        text = _NAMED.sub(rf"\1{_GONE}", text)
        text = _PREFIXED.sub(f"_{_GONE}", text)
        text = _SET.sub(
            lambda found: "{" + ", ".join(sorted(found.group()[1:-1].split(", "))) + "}", text
        )
    if "\\" in text:  # JSON in a string: the letter of an escape must not join the next word
        if "AppData" in text:
            text = _IN_WINDOWS.sub(_keep_key, text)
        text = text.replace("\\n", "\n").replace("\\t", "\t").replace('\\"', '"')
    return _leave_out(text) if _may_be_volatile(text) else text


def _leave_out(text: str) -> str:
    """A text without numbers of keys and matches of `_VOLATILE`."""
    mark = DIGIT
    if _is_special(text):
        if _may_have_keys(text):
            text = _OF_KEY.sub(_keep_key, text)
        if "AppData/" in text:
            text = _IN_WINDOWS.sub(_keep_key, text)
        if not _may_be_volatile(text):
            return text
        mark = "" if _may_be_volatile_without_digits(text) else DIGIT
    shapes = write_shapes(text)
    ascii_alone = text.isascii()
    lines = []
    for line, shape in zip(text.split("\n"), shapes.split("\n"), strict=True):
        if mark not in shape:
            lines.append(line)
        elif len(line) > LONGEST_SHAPE or not (ascii_alone or line.isascii()):
            # Its shape is unique, or ambiguous
            lines.append(_VOLATILE.sub(_GONE, line) if _may_be_volatile(line) else line)
        else:
            take = _STAYS.find(shape)
            if take is True:
                lines.append(_VOLATILE.sub(_GONE, line))
            else:
                lines.append(_GONE.join(take(line)) if take else line)
    return "\n".join(lines)


def normalize_head(text: str) -> str:
    """The normalized start of a long result; empty if short, or if it depends on the rest."""
    if len(text) <= _HEAD or "\r" in text:
        return ""
    head = text[:_HEAD]
    ends = [place for place in (head.find(_SET_OPENS), find_quote(head)) if place >= 0]
    return _normalize(head[: min(ends)] if ends else head)


def may_be_equal(one: str, other: str) -> bool:
    """False if the starts alone, from `normalize_head`, show that two normalized results differ."""
    certain = min(len(one), len(other)) - _LONGEST
    return certain <= 0 or one[:certain] == other[:certain]


def count_lines(text: str) -> int:
    """The number of line ends in a result, which are not volatile; -1 if some may be escaped."""
    return -1 if "\\" in text else text.count("\n")


def differ_in_lines(one: int, other: int) -> bool:
    """Whether results differ because their numbers of line ends, from `count_lines`, do."""
    return one != other and one >= 0 and other >= 0
