"""Whether what an action brought back says that it failed, and how.

Results hold much that only mentions errors: sources, logs, listings, pages, lists of commits. So words alone decide nothing.
A result says that it failed by

- a field or a code: `"is_error": true`, `"success": false`, an exit code that is not zero, a status of HTTP from 400 on;
- a line that begins as messages of errors do: `error:`, `fatal:`, `ValueError:`, `FAILED`, `a.c:9:5: ...`, `3 failed`;
- a complaint (`not found`, `cannot`, `timed out`, ...) behind the name of a program, in the first or last line, or in a
  field for messages. Source code complains of nothing.

The worst case is `SAID_WITHIN` characters of beginnings of such lines: each pattern has bounds, and sees each line once.
"""

from __future__ import annotations

import re
from typing import Final, Literal, TypeAlias

from extproc.detectors.results import finds_any

Failure: TypeAlias = Literal["", "fatal", "transient", "missing"]

NO_FAILURE: Final = ""
FATAL: Final = "fatal"
TRANSIENT: Final = "transient"
"""It may go away by itself: refused or reset connections, timeouts, rate limits, statuses 429, 502, 503 and 504."""
MISSING: Final = "missing"
"""What was looked for is not there, which is often an answer; a tool or a command that is not there is FATAL."""

SAID_WITHIN = 3_000
"""A failure is told early, in characters."""

_LONGEST_LINE = 400
"""Characters of a line or a message that are read."""

_RARE = "*qxjkvbpygfwm'"
"""The rarest first."""


def _look_for(*words: str) -> list[re.Pattern[str]]:
    """Patterns for words, by a rare letter of each: the engine looks for one character faster than for all else."""
    parts: dict[str, list[str]] = {}
    for word in words:
        letter = ([rare for rare in _RARE if rare in word] or [word[0]])[0]
        parts.setdefault(letter, []).append(rf"{re.escape(word.partition(letter)[2])}(?<={re.escape(word)})")
    return [re.compile(f"{re.escape(letter)}(?:{'|'.join(behind)})") for letter, behind in parts.items()]


def _compile(patterns: str) -> list[re.Pattern[str]]:
    r"""Patterns with ` | ` between them. Each begins with a character; with `\bword`, by looking back from behind the word."""
    return [re.compile(re.sub(r"^\\b(\w+)", r"\1(?<!\\w\1)", pattern)) for pattern in re.split(r"\s+\|\s+", patterns.strip())]


# One of these is in every failure: a look for them is all that most results take.
_STEMS = _look_for(
    "err", "fail", "excep", "fatal", "panic", "fault", "killed", "abort", "traceback", "not ", "n't", "cannot", "no ",
    "invalid", "unable", "unknown", "unre", "unexp", "incor", "unter", "unmat", "undef", "unav", "unauth", "timed o",
    "timeo", "denied", "refused", "rejected", "forbid", "limit", "too many", "overl", "exceeded", "missing", "must ",
    "already ", "required", "problem", "locked", "busy", "try again", "gateway", "***", "exit", "return", "status",
    "usage:", "false", "non",
)  # fmt: skip  # one list

_WORDS: Final = _look_for("error", "fail", "exception", "invalid", "problem", "***")
"""One of these is in all that `_NO_FAILURE` and `_WITHIN` find."""

_WELL_WORDS: Final = _look_for("succe", 'ok"', "ok'")
"""One of these, or of those, is in all that `_FIELDS` find."""

# Nothing of the kind, and fields for failures that are empty. One by one, these patterns are fast, but cut in another order.
_NOTHING = [
    rf"{word}(?<!\w{word})\s+(?:of\ [0-9]+\s+)?(?:\w+\s+)?(?:errors?|exceptions?|failed|failures?)\b"
    for word in ("no", "0", "zero", "without any", "without")
]
_EMPTY = [
    rf"""
    {word}\w{{0,16}}+(?:
        ["']?\s{{0,8}}+[:=]\s{{0,8}}+(?:
            0++(?![.]?\w)
          | (?:null|none|nil|undefined|false|\[\s{{0,8}}+\]|\{{\s{{0,8}}+\}}|""|'')
            (?=[ \t]*+(?:[]}},;)<|"'\\]|\n|$|\w{{1,32}}+["']?[:=]))
        )
      | \s?/>
      | >\s{{0,8}}+</\w{{1,32}}+
    )
    """
    for word in ("error", "exception", "fail(?:ed|ure)", "invalid")
]
_NO_FAILURES = [re.compile(part, re.VERBOSE) for part in (*_NOTHING, *_EMPTY)]
_NO_FAILURE = re.compile("|".join((*_NOTHING, *_EMPTY)), re.VERBOSE)

_SUCCESS = r"(?:10[0-3]|20[0-8]|226|30[0-8])(?!\w)"
_GAP = r"[^\w(]{1,4}"
_CODES = _compile(
    rf"""
      exit(?:[ _-]?(?:code|status|value){_GAP}|(?:ed)?(?: with(?: (?:exit )?(?:code|status))? |[:=] ?))-?[1-9]
    | return[ _-]?(?:code|status|value){_GAP}-?(?!{_SUCCESS})[1-9]
    | status(?:[ _-]?(?:code|value))?{_GAP}-?(?!{_SUCCESS})[1-9]
    | returned (?:with )?(?:code -?[1-9]|-?(?!{_SUCCESS})[1-9][0-9]*+(?![.,][0-9]| [a-z]))
    | non-?zero (?:exit|return|status|code)
    """
)

_IS = r"""["']\s{0,8}+:\s{0,8}+"""
_FIELDS = _compile(
    rf"""
      error(?:(?<=is_error)|(?<=iserror))["']?\s{{0,8}}+[:=]\s{{0,8}}+true
    | succe(?<=["']succe)(?:ss|eded){_IS}false
    | ok(?<=["']ok){_IS}false
    | status(?<=["']status){_IS}["'](?:error|fail)
    | type(?<=["']type){_IS}["'](?:error|fail)
    | error(?<=["']error)(?:s|_?(?:message|code|type))?{_IS}["'{{[tTd1-9-]
    | exception(?<=["']exception)s?{_IS}["'{{[tTd1-9-]
    | fail(?<=["']fail)(?:ed|ures?){_IS}[1-9]
    | <\w{{0,32}}error>(?!\s{{0,8}}+</)
    """
)
_RECORDS = ("{", "[", '"{', "'{")
_WELL = _compile(rf"""success(?<=["']success){_IS}true | ok(?<=["']ok){_IS}true""")
_MESSAGE = re.compile(
    rf"""
    ["'t](?:
        (?<!t)(?:(?:message|msg|details?|output|stderr|stdout|content|result)["']\s{{0,8}}+[:=]|type["']:\s?["']text["'],\s?["']text["']:)
        \s{{0,8}}+["']([^\n]{{1,{_LONGEST_LINE}}})
      | (?<=t)(?<!\wt)ext=["']([^\n]{{1,{_LONGEST_LINE}}})
    )
    """,
    re.VERBOSE,
)

# What stands before the words of a line: a time, tags, brackets, bullets; but no signs of a difference, a table or a heading.
_LABEL = r"(?:(?:observation|output|result|response|std(?:out|err))s?:\ {1,8})?+"
_TIME = r"(?:\W?[0-9]{4}-[0-9]{2}-[0-9]{2}[t\ ][0-9:.,]{5,18}z?\W)?+"
_BEFORE = rf"{_LABEL}{_TIME}(?:<[^<>\n]{{1,64}}>|[^\w<+|\#`\n-]){{0,16}}+"
_BEGINS = re.compile(
    rf"""
    {_BEFORE}(?:
        (?:[a-z0-9.$]{{0,64}}(?:error|exception)|fatal|panic|e)(?:\[\w{{1,16}}\])?:(?!\s*[0-9.]+\s*%?$)
      | (?:[\w.-]{{1,32}}\ ){{0,3}}(?:parse|syntax|runtime|internal|fatal|validation|unhandled|uncaught)\ (?:error|exception)
      | (?:[\w.-]{{1,32}}\ )?(?:error|exception)(?:
            [\])!]
          | \ (?:-?[0-9]|ts[0-9]|e[0-9]|code|in|from|at|while|when|occurred|response|(?:execut|process|runn|call|pars|load)ing)
        )
      | an?\ (?:\w{{1,32}}\ )?(?:error|exception)\ (?:occurred|has)
      | \w{{1,16}}\ err!
      | err_\w{{1,64}}\ | \w{{1,64}}(?:error|exception)\)
      | traceback\ \(most
      | fail(?:ed|ure)?(?=[\s:!.]|$)
      | (?:http\ |status\ )?[45][0-9]{{2}}\ (?:[a-z]+\ )?(?:
            not\ |bad|unauthorized|forbidden|too|internal|service|gateway|gone|conflict|unprocessable|error|timeout|unavailable
        )
      | http/[0-9.]{{1,3}}\ [45]
      | build\ fail
      | [\w:]{{1,64}}\ {{1,2}}error\ [ ]
      | segmentation\ fault|killed$|aborted$
      | [^\s:]{{1,256}}:[0-9]{{1,7}}:[0-9]{{1,7}}:\ (?!warning|note|info|remark|hint|help)
      | [^\s:(]{{1,256}}(?:\([0-9,]{{1,16}}\)|:[0-9]{{1,7}}):\ (?:fatal\ )?error
      | [0-9]{{1,7}}:[0-9]{{1,7}}\ {{1,4}}error
    )
    | ---\ fail
    | \#\ fail\ [1-9]
    """,
    re.VERBOSE,
)
_MAY_BEGIN = [
    *_look_for("fatal", "panic", "traceback", "fail", "http/", "segmentation fault", "killed", "aborted"),
    *_compile(
        r"""
          err(?:[!_]|or(?:[\[\]:)! ]|(?<= error)))
        | exception(?:[\[\]:)! ]|(?<= exception))
        | 4[0-9]{2}[ ] | 5[0-9]{2}[ ] | :(?:[0-9]{1,7}:[0-9]{1,7}:[ ]|(?<=]:)|(?<=\We:))
        """
    ),
]
"""One of these is in every line that begins so."""

_MAY_BE_WITHIN = _compile(
    r"""
      error(?:(?<=[0-9] error)|s?[:=] ?[1-9]|\)) | fail(?:(?<=[0-9] fail)|(?:ed|ures?)[:=] ?[1-9])
    | problem(?<=[0-9] problem) | \*\*\*
    """
)
"""One of these is in all that `_WITHIN` finds."""

# Each alternative starts with a character of a small set.
_WITHIN = re.compile(
    r"""
      [1-9](?<![\w:.].)(?:[0-9]{0,8}+\ (?:errors|failed|failures|failing|problems)|(?<=1)\ (?:error|failure|problem))(?![\w/.-])
    | [:=](?:(?<=failed.)|(?<=failures.)|(?<=failure.)|(?<=errors.)|(?<=error.))\ ?[1-9](?![0-9]*[.])
    | \*\*\*
    | \((?:[\w.]{1,64})?error\)$
    """,
    re.VERBOSE | re.MULTILINE,
)
_COMPLAINS = re.compile(
    r"""
    \W(?:
        (?<![/.-])(?:
          not\ (?:found|available|permitted|allowed|authori[sz]ed|recogni[sz]ed|supported|respond|installed|implemented)
        | no\ (?:such|space|rule|matching|replacement)
        | (?:does|do|did|was|were|is|are|has|have|would)(?:n't|\ not)\ (?:
              exist|have|look|appear|respond|an?|in|be|valid|\w{3,16}\ to
          )
        | (?:wasn't|isn't|is\ not|was\ not)\ (?:an?\ )?(?:\w{1,16}\ )?valid
        | (?:cannot|could\ not|couldn't|can't)\ (?:be|connect|find|open|read|parse|access|resolve|load)(?!\ any)
        | (?:unable|failed)\ to | fail(?:ed|ure)(?=[:;.!]|\W{0,3}$)
        | timed\ out | timeout(?=\ (?:of|exceeded|expired|after|error|while|waiting)|$)
        | denied|refused|rejected|forbidden|unauthori[sz]ed|unavailable|overloaded|exceeded
        | rate[ -]limit(?:ed|s)?|too\ many\ requests
        | invalid|unknown\ \w+|unrecogni[sz]ed|unterminated|unmatched|unexpected|undefined|incorrect|missing|required
        | must\ (?:be|contain|not|have) | is\ (?:locked|busy)
        | already\ (?:exists|in\ use|allocated|taken|booked) | syntax\ error | try\ again
        | error(?=[.!]?$) | (?:error|problem)(?=:(?!\s*[0-9.]+\s*%?$))
        )(?![\w/-]|\.\w)
      | (?:net::err_|errno\b|econn|enoent|eacces|eperm|eaddrinuse)
      | (?:(?<=\n)\W{0,8}|(?<=:\ )|(?<=\ and\ ))(?:cannot|can't|could(?:\ not|n't))\b(?!\ find\ any)
    )
    """,
    re.VERBOSE,
)
"""Looked for in a line with the end of the line before it, or in the rest of a line with a space before it."""

# Behind which a line says who complains; `name:12:` is where something was found instead.
_PROGRAM = re.compile(r"(?![{\[\"'])[^\s:]{1,64}(?:\s[^\s:]{1,32}){0,2}\s?:\s")
_USAGE = re.compile(r"^\W{0,8}usage:(?![^\n]*\n(?:.*\n){0,8}?\s*(?:options|commands|flags|arguments):)", re.MULTILINE)
_QUOTES = re.compile(
    r"""
    \s*(?:
        [0-9]+(?:\u2192|\t|[:.|]\ ) | [+|\#] | -(?!\w+:\ ) | [0-9a-f]{7,40}\ | (?:\w+\ )?warn(?:ing)?\b
      | (?:def|class|import|from|raise|return|throw|if|else|export|const|let|var|func|fn|package|pub|public|private|impl|try)\s
    )
    | [^\s:]{1,256}:[0-9]{1,7}[:-]
    | .*(?:[{;]\s*$|=>|\)\s*:\s*$)
    """,
    re.VERBOSE,
)
"""A line of a source, a listing, a page, a difference; or a warning."""

_STATUS = r"(?:429|50[234])\b"
_TRANSIENT = _compile(
    rf"""
      connection(?<![^\W_]connection)[ _](?:was )?(?:refused|reset|aborted|closed|error|timed)
    | \beconn(?:refused|reset|aborted) | \bwas refused\b | \bfetch failed\b | \bfailed to connect\b | \bunable to connect\b
    | \bcannot connect\b | \bcould(?: not|n't) connect\b | \bnot respond | timed[ -]?out\b | deadline ?exceeded
    | timeout(?=\W*$|:| (?:of|exceeded|expired|after|error|while|waiting)| [0-9])
    | ^\W{{0,8}}{_STATUS} | >{_STATUS} | http\S{{0,4}} {_STATUS} | status\W{{1,3}}{_STATUS} | code\W{{1,3}}{_STATUS}
    | error\W{{1,3}}{_STATUS} | \btoo many requests | \brate[ _-]?limit | \brate exceeded | \bthrottl | throughput
    | \bunavailable\b | \btemporar(?:y|ily)\b | overloaded | \btry again (?:later|soon|shortly|in)\b | \bis locked\b
    """
)
_MISSING = _compile(
    r"""
      not(?<![^\W_]not)[ _](?:be )?found\b | notfound\b | \bno such\b | \bnosuch\w | \benoent\b
    | does(?:n't| not) (?:exist|match) | did(?:n't| not) (?:exist|match)
    | \bno (?!(?:\w{1,32} ){0,2}(?:actions?|code|json)\b)(?:\w{1,32} ){1,3}(?:found|match(?:e[sd])?)\b
    | 404(?:(?<![\w.:-]404)|(?<=e404)(?<![\w.:-]e404))\b(?![.]) | unable to (?:locate|find)\b | could not (?:locate|find)\b
    | cannot (?:locate|find)\b | could not resolve to
    """
)
_TOOL = r"(?:tool|command|method|function|module|script)"
_NO_TOOL = re.compile(
    rf"""
      \b{_TOOL}:?\ (?:\S{{1,64}}\ )?(?:not\ found|does) | \b(?:find|such|missing|no)\ {_TOOL}\b
    | ^(?:\S{{0,16}}/|-)?[a-z]{{0,4}}sh:[ ]
    """,
    re.VERBOSE,
)


def is_error(text: str) -> bool:
    """Whether a result says early that something went wrong."""
    return read_failure(text) != NO_FAILURE


def read_failure(text: str, *, failed: bool = False) -> Failure:
    """How an action failed, by what it brought back; `failed`: its API says that it did.

    >>> read_failure("cat: a.txt: No such file or directory"), read_failure("3 passed, 0 failed")
    ('missing', '')
    """
    said = text[:SAID_WITHIN].lower()
    if not failed and not finds_any(said, _STEMS):
        return NO_FAILURE
    said, worded = _prepare(said)
    line = _find_line(said, worded=worded)
    if line:
        return _tell_kind(line)
    return _tell_kind(said[:_LONGEST_LINE]) if failed or _is_marked(said, worded=worded) else NO_FAILURE


def find_complaint(text: str) -> str:
    """The line, or the message, by which a result says that something failed, in lower case; empty where none does."""
    said, worded = _prepare(text[:SAID_WITHIN].lower())
    return _find_line(said, worded=worded)


def _prepare(said: str) -> tuple[str, bool]:
    """A text to be searched, without what says that nothing failed; and whether one of `_WORDS` is in it."""
    if "\\" in said:  # JSON in a string, or a string as Python writes it
        said = said.replace("\\n", "\n").replace('\\"', '"')
    worded = finds_any(said, _WORDS)
    if worded and finds_any(said, _NO_FAILURES):
        said = _NO_FAILURE.sub("", said)
    return said, worded


def _find_line(said: str, *, worded: bool) -> str:
    """The line or the message that says that something failed, empty for none; `worded`: one of `_WORDS` is in the text."""
    lines = [line[:_LONGEST_LINE] for line in said.replace("\x1e", "\n").split("\n") if line and not line.isspace()]
    ends = [line for line in lines[:1] + lines[1:][-1:] if not line.startswith(_RECORDS)]
    messages: list[str] = []
    if "text=" in said or any(line.startswith(_RECORDS) for line in lines):
        messages = [] if finds_any(said, _WELL) else [one or other for one, other in _MESSAGE.findall(said)]
    text = "\n" + "\n".join(lines)
    places = [text.rfind("\n", 0, found.start()) for pattern in _MAY_BEGIN for found in pattern.finditer(text)]
    for line in messages + [_read_line(text, place) for place in sorted(set(places))]:
        if _BEGINS.match(line):
            return line
    found = _WITHIN.search(said) if worded and finds_any(said, _MAY_BE_WITHIN) else None
    if found is not None:
        return said[found.start() : found.start() + _LONGEST_LINE]
    for line in messages + ends:
        if _COMPLAINS.search("\n" + line) and not _QUOTES.match(line):
            return line
    for line in lines:
        program = _PROGRAM.match(line) if ":" in line else None
        if program is not None and not _QUOTES.match(line) and _COMPLAINS.search(" " + line[program.end() :]):
            return line
    return ""


def _read_line(text: str, end: int) -> str:
    """The line behind the end of another."""
    return text[end + 1 : end + 1 + _LONGEST_LINE].partition("\n")[0]


def _is_marked(said: str, *, worded: bool) -> bool:
    """Whether a field or a code says that it failed; `worded` as above."""
    if (worded or finds_any(said, _WELL_WORDS)) and finds_any(said, _FIELDS):
        return True
    return finds_any(said, _CODES) or ("usage:" in said and _USAGE.search(said) is not None)


def _tell_kind(line: str) -> Failure:
    if finds_any(line, _TRANSIENT):
        return TRANSIENT
    if finds_any(line, _MISSING) and not _NO_TOOL.search(line):
        return MISSING
    return FATAL
