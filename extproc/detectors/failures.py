"""Whether the result of an action reports a failure, and of which kind.

Many results only mention errors: source code, logs, listings, pages, lists of commits. So words
alone are not enough. A result reports a failure by

- a field or a code: `"is_error": true`, `"success": false`, a non-zero exit code, an HTTP status of
  at least 400;
- a line that starts like an error message: `error:`, `fatal:`, `ValueError:`, `FAILED`, `a.c:9:5:
  ...`, `3 failed`;
- a complaint (`not found`, `cannot`, `timed out`, ...) after the name of a program, in the first or
  last line, or in a field for messages. Lines of source code are not complaints.

The worst case is `SAID_WITHIN` characters of beginnings of such lines. All patterns are bounded,
and each reads a line once.
"""

from __future__ import annotations

import re
from typing import Final, Literal, TypeAlias

from extproc.detectors.results import finds_any
from extproc.looks import look_for

Failure: TypeAlias = Literal["", "fatal", "transient", "missing"]

NO_FAILURE: Final = ""
FATAL: Final = "fatal"
TRANSIENT: Final = "transient"
"""The failure may be temporary: refused or reset connections, timeouts, rate limits, statuses 429,
502, 503 and 504."""
MISSING: Final = "missing"
"""Something was not found, which is often a valid answer. A missing tool or command is FATAL."""

SAID_WITHIN: Final = 3_000
"""Number of characters of a result to read; failures are reported early."""

_LONGEST_LINE: Final = 400
"""Number of characters of a line or message to read."""

_LINES_AT_ONCE: Final = 8
"""Number of lines to check together, because each check takes as long as reading hundreds of
characters."""

# Patterns for quick checks find everything that the exact patterns below find, and more. They treat
# a letter beyond ASCII as any kind of character, which keeps them small.
_BEYOND = r"\x{80}-\x{10ffff}"
_WORD = rf"[0-9a-z_{_BEYOND}]"
_NO_WORD = "[^0-9a-z_]"
_SPACE = rf"[\t-\r\x1c-\x20{_BEYOND}]"


def _compile(patterns: str) -> list[re.Pattern[str]]:
    r"""Compile patterns separated by ` | `.

    Each starts with a character: `\b` becomes a lookbehind after its word.
    """
    return [
        re.compile(re.sub(r"^\\b(\w+)", r"\1(?<!\\w\1)", pattern))
        for pattern in re.split(r"\s+\|\s+", patterns.strip())
    ]


_has_stem: Final = look_for(
    r"""
      err|fail|excep|fatal|panic|fault|killed|abort|traceback|not\ |n't|cannot|no\ |invalid
    | unable|unknown|unre|unexp|incor|unter|unmat|undef|unav|unauth|timed\ o|timeo|denied
    | refused|rejected|forbid|limit|too\ many|overl|exceeded|missing|must\ |already\ |required
    | problem|locked|busy|try\ again|gateway|\*\*\*|exit|return|status|usage:|false|non
    | http/[0-9]|http\ |response[\ _-]?(?:code|status)|bad\ req|conflict|gone|unproc
    """
)
"""Every failure contains one of these."""

# Denials of failures, and empty fields for failures
_NOTHING = [
    (
        rf"{word}(?<!\w{word})\s+(?:of\ "
        r"[0-9]+\s+)?(?:\w+\s+)?(?:errors?|exceptions?|failed|failures?)\b"
    )
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
_NO_FAILURE: Final = re.compile("|".join((*_NOTHING, *_EMPTY)), re.VERBOSE)
_DENIES = rf"""
    (?:no|0|zero|without|any){_SPACE}+(?:of\ [0-9]+{_SPACE}+)?
    (?:{_WORD}+{_SPACE}+)?(?:error|exception|fail(?:ed|ure))
  | (?:error|exception|failed|failure|invalid){_WORD}*(?:
        ["']?{_SPACE}*[:=]{_SPACE}*(?:0|null|none|nil|undefined|false|\[{_SPACE}*\]|\{{{_SPACE}*\}}|""|'')
      | {_SPACE}?/>
      | >{_SPACE}*</
    )
"""
_denies: Final = look_for(_DENIES)

_SUCCESS = r"(?:10[0-3]|20[0-8]|226|30[0-8])(?!\w)"
_GAP = r"[^\w(]{1,4}"
_CODES: Final = _compile(
    rf"""
      exit[ _-]?(?:code|status|value){_GAP}-?[1-9]
    | exit(?:ed)?(?: with(?: (?:exit )?(?:code|status))? |[:=] ?)-?[1-9]
    | return[ _-]?(?:code|status|value){_GAP}-?(?!{_SUCCESS})[1-9]
    | status(?:[ _-]?(?:code|value))?{_GAP}-?(?!{_SUCCESS})[1-9]
    | returned (?:with )?(?:code -?[1-9]|-?(?!{_SUCCESS})[1-9][0-9]*+(?![.,][0-9]| [a-z]))
    | non-?zero (?:exit|return|status|code)
    | response[ _-]?(?:code|status){_GAP}[45][0-9]{{2}}(?!\w)
    """
)

_IS = r"""["']\s{0,8}+:\s{0,8}+"""
_FIELDS: Final = _compile(
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
    | <\w{{0,32}}exception>(?!\s{{0,8}}+</)
    """
)
_MARKED = rf"""
    is_?error["']?{_SPACE}*[:=]{_SPACE}*true
  | ["'](?:success|succeeded|ok)["']{_SPACE}*:{_SPACE}*false
  | ["'](?:status|type)["']{_SPACE}*:{_SPACE}*["'](?:error|fail)
  | ["'](?:error(?:s|_?(?:message|code|type))?|exceptions?)["']{_SPACE}*:{_SPACE}*["'{{\[td1-9-]
  | ["']fail(?:ed|ures?)["']{_SPACE}*:{_SPACE}*[1-9]
  | (?:error|exception)>
  | exit(?:[\ _-]?(?:code|status|value)[^0-9a-z_(]+|
      (?:ed)?(?:\ with(?:\ (?:exit\ )?(?:code|status))?\ |[:=]\ ?))-?[1-9]
  | (?:return[\ _-]?(?:code|value)|status(?:[\ _-]?(?:code|value))?)[^0-9a-z_(]+-?[1-9]
  | returned\ (?:with\ )?(?:code\ )?-?[1-9]
  | response[\ _-]?(?:code|status)[^0-9a-z_(]+[45]
  | non-?zero\ (?:exit|return|status|code)
  | usage:
"""
_may_be_marked: Final = look_for(_MARKED)
"""Whether a text may contain a match of `_FIELDS`, `_CODES` or `_USAGE`."""

_RECORDS: Final = ("{", "[", '"{', "'{")
_holds_records: Final = look_for(r"""(?:^|\n)(?:["']?\{|\[)""")
"""Whether a line begins like one of `_RECORDS`."""

_WELL: Final = _compile(rf"""success(?<=["']success){_IS}true | ok(?<=["']ok){_IS}true""")
_MESSAGE: Final = re.compile(
    rf"""
    ["'t](?:
        (?<!t)(?:(?:message|msg|details?|output|stderr|stdout|content|result)["']\s{{0,8}}+[:=]|type["']:\s?["']text["'],\s?["']text["']:)
        \s{{0,8}}+["']([^\n]{{1,{_LONGEST_LINE}}})
      | (?<=t)(?<!\wt)ext=["']([^\n]{{1,{_LONGEST_LINE}}})
    )
    """,
    re.VERBOSE,
)

_may_hold_messages: Final = look_for(
    rf"""
      ["'](?:message|msg|details?|output|stderr|stdout|content|result)["']{_SPACE}*[:=]
    | type["']:{_SPACE}?["']text["'],|text=["']
    """
)

# What may precede the words of a line: a time, tags, brackets, bullets, but not the signs of a
# diff, table or heading.
_LABEL = r"(?:(?:observation|output|result|response|std(?:out|err))s?:\ {1,8})?+"
_TIME = r"(?:\W?[0-9]{4}-[0-9]{2}-[0-9]{2}[t\ ][0-9:.,]{5,18}z?\W)?+"
_BEFORE = rf"{_LABEL}{_TIME}(?:<[^<>\n]{{1,64}}>|[^\w<+|\#`\n-]){{0,16}}+"
_KIND = "(?:parse|syntax|runtime|internal|fatal|validation|unhandled|uncaught)"
_WHEN = (
    r"(?:-?[0-9]|ts[0-9]|e[0-9]|code|in|from|at|while|when|occurred|response"
    r"|(?:execut|process|runn|call|pars|load)ing)"
)
_EXPLAINS = r"(?:is|are|means?|indicates?|stands|says|tells|describes)\b"
_SAYS_HTTP = r"""
    (?:http\ |status\ )?[45][0-9]{2}\ (?:[a-z]+\ )?(?:
        not\ |bad|unauthorized|forbidden|too|internal|service|gateway|gone|conflict
      | unprocessable|error|timeout|unavailable
    )
"""
_BEGINS: Final = re.compile(
    rf"""
    {_BEFORE}(?:
        (?:[a-z0-9.$]{{0,64}}(?:error|exception)|fatal|panic|e)(?:\[\w{{1,16}}\])?:(?!\s*[0-9.]+\s*%?$)
      | (?:[\w.-]{{1,32}}\ ){{0,3}}{_KIND}\ (?:error|exception)
      | (?:[\w.-]{{1,32}}\ )?(?:error|exception)(?:[\])!]|\ {_WHEN})
      | an?\ (?:\w{{1,32}}\ )?(?:error|exception)\ (?:occurred|has)
      | (?:errno|winerror)\ -?[1-9][0-9]{{0,5}}\]\ (?!{_EXPLAINS})
      | \w{{1,16}}\ err!
      | err_\w{{1,64}}\ | \w{{1,64}}(?:error|exception)\)
      | traceback\ \(most
      | fail(?:ed|ure)?(?=[\s:!.]|$)
      | {_SAYS_HTTP}(?![\w()\ ]{{0,32}}\ {_EXPLAINS})
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
_may_begin: Final = look_for(
    rf"""
    (?:^|\n)(?:
        (?:(?:observation|output|result|response|std(?:out|err))s?:\ +)?
        (?:{_NO_WORD}?[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}[t\ ][0-9:.,]+z?{_NO_WORD})?
        (?:<[^<>\n]+>|[^0-9a-z_<+|\#`\n-])*(?:
            (?:[a-z0-9.$]*(?:error|exception)|fatal|panic|e)(?:\[{_WORD}+\])?:
          | (?:[.{_BEYOND}0-9a-z_-]+\ )*{_KIND}\ (?:error|exception)
          | (?:[.{_BEYOND}0-9a-z_-]+\ )?(?:error|exception)(?:[\])!]|\ {_WHEN})
          | an?\ (?:{_WORD}+\ )?(?:error|exception)\ (?:occurred|has)
          | (?:errno|winerror)\ -?[1-9][0-9]*\]
          | {_WORD}+\ err!
          | err_ | {_WORD}+(?:error|exception)\)
          | traceback\ \(most
          | fail(?:ed|ure)?(?:{_SPACE}|[:!.]|$)
          | {_SAYS_HTTP}
          | http/[0-9.]+\ [45]
          | build\ fail
          | (?:{_WORD}|:)+\ +error\ [\ ]
          | segmentation\ fault|(?:killed|aborted)(?:\n|$)
          | [^:\t-\r\x1c-\x20]+:[0-9]+:(?:[0-9]+:\ |\ (?:fatal\ )?error)
          | [^:(\t-\r\x1c-\x20]+\([0-9,]+\):\ (?:fatal\ )?error
          | [0-9]+:[0-9]+\ +error
        )
      | ---\ fail
      | \#\ fail\ [1-9]
    )
    """
)
"""Whether `_BEGINS` may match a line."""

_BEGINNINGS = rf"""
    fatal|panic|traceback|fail|http/|segmentation\ fault|killed|aborted|err[!_]
  | (?:error|exception)[\[\]:)!\ ]|(?:errno|winerror)\ |\ (?:error|exception)
  | [45][0-9]{{2}}\ |:[0-9]+:[0-9]+:\ |\]:|(?:^|{_NO_WORD})e:
"""
"""A shorter version: a part of each alternative."""

_WITHIN_TEXT = (
    r"[0-9]\ (?:error|fail|problem)|(?:failed|failures?|errors?)[:=]\ ?[1-9]|error\)|\*\*\*"
)
_may_be_within: Final = look_for(_WITHIN_TEXT)

# Each alternative starts with a character of a small set.
_WITHIN: Final = re.compile(
    r"""
      [1-9](?<![\w:.].)(?:
        [0-9]{0,8}+\ (?:errors|failed|failures|failing|problems)
      | (?<=1)\ (?:error|failure|problem)
      )(?![\w/.-])
    | [:=](?:(?<=failed.)|(?<=failures.)|(?<=failure.)|(?<=errors.)|(?<=error.))\ ?
      [1-9](?![0-9]*[.])
    | \*\*\*
    | \((?:[\w.]{1,64})?error\)$
    """,
    re.VERBOSE | re.MULTILINE,
)
_COMPLAINS: Final = re.compile(
    r"""
    \W(?:
        (?<![/.-])(?:
          not\ (?:found|available|permitted|allowed|authori[sz]ed|recogni[sz]ed|supported
              |respond|installed|implemented)
        | no\ (?:such|space|rule|matching|replacement)
        | (?:does|do|did|was|were|is|are|has|have|would)(?:n't|\ not)\ (?:
              exist|have|look|appear|respond|an?|in|be|valid|\w{3,16}\ to
          )
        | (?:wasn't|isn't|is\ not|was\ not)\ (?:an?\ )?(?:\w{1,16}\ )?valid
        | (?:cannot|could\ not|couldn't|can't)\ (?:
              be|connect|find|open|read|parse|access|resolve|load
          )(?!\ any)
        | (?:unable|failed)\ to | fail(?:ed|ure)(?=[:;.!]|\W{0,3}$)
        | timed\ out | timeout(?=\ (?:of|exceeded|expired|after|error|while|waiting)|$)
        | denied|refused|rejected|forbidden|unauthori[sz]ed|unavailable|overloaded|exceeded
        | rate[ -]limit(?:ed|s)?|too\ many\ requests
        | invalid|unknown\ \w+|unrecogni[sz]ed|unterminated|unmatched|unexpected|undefined
        | incorrect|missing|required
        | must\ (?:be|contain|not|have) | is\ (?:locked|busy)
        | already\ (?:exists|in\ use|allocated|taken|booked) | syntax\ error | try\ again
        | error(?=[.!]?$) | (?:error|problem)(?=:(?!\s*[0-9.]+\s*%?$))
        | failed\ (?:(?:at|on)\ line|due\ to|with\ (?:an?\ |the\ following\ )?(?:error|exception))
        | raised\ (?:an?\ )?(?:\w{1,16}\ )?(?:error|exception)(?=[:.!]|$)
        | (?:error|exception)\ (?:raised|thrown)(?=:)
        | no\ (?:tool|function)\ (?:named|called)
        )(?![\w/-]|\.\w)
      | (?:net::err_|errno\b|econn|enoent|eacces|eperm|eaddrinuse)
      | (?:(?<=\n)\W{0,8}|(?<=:\ )|(?<=\ and\ ))(?:cannot|can't|could(?:\ not|n't))\b(?!\ find\ any)
      | (?<=\n)[^\w*+|\#`-]{0,8}(?:
            (?:(?:[\w.]{1,32}\ ){0,3}(?:returned|got|received|failed\ with)\ (?:an?\ )?)?
            http(?:/[0-9.]{1,3})?\ (?:error\ |status\ )?[45][0-9]{2}
            (?=\W*$|:|\ (?:-|\(|(?:at|for|from|on)\ (?:url|https?:|/|get|post)))
          | error\ -[ ]
        )
      | (?<=\n)\w{0,64}(?:error|exception)\((?:"[^\n]*"|'[^\n]*')?,?\)$
    )
    """,
    re.VERBOSE,
)
"""Searched for in a line after a newline, or in the rest of a line after a blank."""

_COMPLAINTS = rf"""
    (?:^|{_NO_WORD})(?:
        not\ (?:found|available|permitted|allowed|authori[sz]ed|recogni[sz]ed|supported
            |respond|installed|implemented)
      | no\ (?:such|space|rule|matching|replacement)
      | (?:cannot|could\ not|couldn't|can't)
      | (?:does|do|did|was|were|is|are|has|have|would)
        (?:n't|\ not)\ |(?:unable|failed)\ to
      | timed\ out|denied|refused|rejected|forbidden|unauthori[sz]ed
      | unavailable|overloaded|exceeded|rate[\ -]limit|too\ many\ requests|unknown\ |invalid
      | unrecogni[sz]ed|unterminated|unmatched|unexpected|undefined
      | incorrect|missing|required|must\ (?:be|contain|not|have)|is\ (?:locked|busy)
      | already\ (?:exists|in\ use|allocated|taken|booked)|syntax\ error|try\ again
      | (?:error|problem):
      | net::err_|errno|econn|enoent|eacces|eperm|eaddrinuse
      | failed\ (?:at|on|due|with)\ |raised\ |(?:error|exception)\ (?:raised|thrown):
      | no\ (?:tool|function)\ (?:named|called)
      | http(?:/[0-9.]+)?\ (?:error\ |status\ )?[45]|error\ -
    )
  | (?:error|exception)\(
"""
_may_complain: Final = look_for(
    rf"""
    {_COMPLAINTS}
  | timeout(?:\ (?:of|exceeded|expired|after|error|while|waiting)|\n|$)
  | fail(?:ed|ure)(?:[:;.!]|{_NO_WORD}*(?:\n|$))
  | error[.!]?(?:\n|$)
    """
)
"""Whether `_COMPLAINS` may match in a line."""

_may_fail: Final = look_for(
    f"{_DENIES}|{_MARKED}|{_BEGINNINGS}|{_WITHIN_TEXT}|{_COMPLAINTS}"
    f"|(?:^|{_NO_WORD})(?:timeout|error)"
)
"""Whether a text contains any of the above, even if its lines were cut."""

# The program that complains, at the start of a line. `name:12:` is the position of a match instead.
_PROGRAM: Final = re.compile(r"(?![{\[\"'])[^\s:]{1,64}(?:\s[^\s:]{1,32}){0,2}\s?:\s")
_USAGE: Final = re.compile(
    r"^\W{0,8}usage:(?![^\n]*\n(?:.*\n){0,8}?\s*(?:options|commands|flags|arguments):)",
    re.MULTILINE,
)
_QUOTES: Final = re.compile(
    rf"""
    \s*(?:
        [0-9]+(?:\u2192|\t|[:.|]\ ) | [+|\#] | -(?!\w+:\ )
      | [0-9a-f]{{7,40}}\ | (?:\w+\ )?warn(?:ing)?\b
      | (?:def|class|import|from|raise|return|throw|if|else|export|const|let|var|func|fn|package
          |pub|public|private|impl|try)\s
    )
    | [^\s:]{{1,256}}:[0-9]{{1,7}}[:-]
    | \W{{0,8}}(?:an?\ |the\ )?(?:http\ )?(?:status\ )?(?:code\ )?
      [1-5][0-9]{{2}}\ (?:[\w()]{{1,16}}\ ){{0,3}}{_EXPLAINS}
    | .*(?:[{{;]\s*$|=>|\)\s*:\s*$)
    """,
    re.VERBOSE,
)
"""A line of source code, a listing, a page or a diff; a warning; or the meaning of a status."""

_STATUS = r"(?:429|50[234])\b"
_TRANSIENT: Final = _compile(
    rf"""
      connection(?<![^\W_]connection)[ _](?:was )?(?:refused|reset|aborted|closed|error|timed)
    | \beconn(?:refused|reset|aborted) | \bwas refused\b | \bfetch failed\b | \bfailed to connect\b
    | \bunable to connect\b | \bcannot connect\b | \bcould(?: not|n't) connect\b | \bnot respond
    | timed[ -]?out\b | deadline ?exceeded
    | timeout(?=\W*$|:| (?:of|exceeded|expired|after|error|while|waiting)| [0-9])
    | ^\W{{0,8}}{_STATUS} | >{_STATUS} | http\S{{0,4}} {_STATUS} | status\W{{1,3}}{_STATUS}
    | code\W{{1,3}}{_STATUS} | error\W{{1,3}}{_STATUS}
    | \btoo many requests | \brate[ _-]?limit | \brate exceeded | \bthrottl | throughput
    | \bunavailable\b | \btemporar(?:y|ily)\b | overloaded
    | \btry again (?:later|soon|shortly|in)\b | \bis locked\b
    """
)
_MISSING: Final = _compile(
    r"""
      not(?<![^\W_]not)[ _](?:be )?found\b | notfound\b | \bno such\b | \bnosuch\w | \benoent\b
    | does(?:n't| not) (?:exist|match) | did(?:n't| not) (?:exist|match)
    | \bno (?!(?:\w{1,32} ){0,2}(?:actions?|code|json)\b)(?:\w{1,32} ){1,3}found\b
    | \bno (?!(?:\w{1,32} ){0,2}(?:actions?|code|json)\b)(?:\w{1,32} ){1,3}match(?:e[sd])?\b
    | 404(?:(?<![\w.:-]404)|(?<=e404)(?<![\w.:-]e404))\b(?![.])
    | unable to (?:locate|find)\b | could not (?:locate|find)\b | cannot (?:locate|find)\b
    | could not resolve to
    """
)
_may_pass: Final = look_for(
    r"""
      connect|econn|was\ refused|fetch\ failed|not\ respond|timed[\ -]?out|deadline|timeout
    | 429|50[234]|too\ many\ requests|rate[\ _-]?limit|rate\ exceeded|throttl|throughput
    | unavailable|temporar|overloaded|try\ again|is\ locked
    """
)
"""Whether a line may contain one of `_TRANSIENT`."""
_may_miss: Final = look_for(
    r"""
      found|nosuch|no\ |enoent|(?:does|did)(?:n't|\ not)\ (?:exist|match)|404
    | \ locate|\ find|resolve\ to
    """
)
"""Whether a line may contain one of `_MISSING`."""
_TOOL = r"(?:tool|command|method|function|module|script)"
_NO_TOOL: Final = re.compile(
    rf"""
      \b{_TOOL}:?\ (?:\S{{1,64}}\ )?(?:not\ found|does) | \b(?:find|such|missing|no)\ {_TOOL}\b
    | ^(?:\S{{0,16}}/|-)?[a-z]{{0,4}}sh:[ ]
    """,
    re.VERBOSE,
)


def is_error(text: str) -> bool:
    """Whether a result reports a failure near its start."""
    return read_failure(text) != NO_FAILURE


class _Last:
    """The result read last: its start, whether the API marked it, and the kind of failure."""

    def __init__(self) -> None:
        self.beginning = ""
        self.failed = False
        self.kind: Failure = NO_FAILURE


_LAST: Final = _Last()
"""A cache of one. The results of a loop are equal, and notes and reports read the newest again."""


def read_failure(text: str, *, failed: bool = False) -> Failure:
    """How an action failed, according to its result; `failed`: the API marks it as failed.

    >>> read_failure("cat: a.txt: No such file or directory"), read_failure("3 passed, 0 failed")
    ('missing', '')
    """
    beginning = text[:SAID_WITHIN]
    if beginning == _LAST.beginning and failed == _LAST.failed:
        return _LAST.kind
    kind: Failure = NO_FAILURE
    lower = str.lower(beginning)  # mypyc's own `lower` takes three times as long
    said = _unescape(lower)
    may_fail = _may_fail(said)
    if failed or (may_fail and _has_stem(lower)):
        said = _leave_out_denials(said) if may_fail else said
        line = _find_line(said) if may_fail else ""
        if line or failed or _is_marked(said):
            kind = _tell_kind(line or said[:_LONGEST_LINE])
    _LAST.beginning, _LAST.failed, _LAST.kind = beginning, failed, kind
    return kind


def find_complaint(text: str) -> str:
    """The line of a result that reports a failure, in lower case; empty if there is none."""
    said = _unescape(text[:SAID_WITHIN].lower())
    return _find_line(_leave_out_denials(said)) if _may_fail(said) else ""


def _unescape(said: str) -> str:
    """Unescape a text that may be a JSON or Python string."""
    return said.replace("\\n", "\n").replace('\\"', '"') if "\\" in said else said


def _leave_out_denials(said: str) -> str:
    return _NO_FAILURE.sub("", said) if _denies(said) else said


def _find_line(said: str) -> str:
    """The line or message that reports a failure; empty if there is none."""
    lines = [
        line[:_LONGEST_LINE]
        for line in said.replace("\x1e", "\n").split("\n")
        if line and not line.isspace()
    ]
    text = "\n".join(lines)
    messages = _list_messages(said, text)
    for line in messages:
        if _may_begin(line) and _BEGINS.match(line):
            return line
    for start in range(0, len(lines), _LINES_AT_ONCE) if _may_begin(text) else ():
        some = lines[start : start + _LINES_AT_ONCE]
        for line in some if _may_begin("\n".join(some)) else ():
            if _may_begin(line) and _BEGINS.match(line):
                return line
    found = _WITHIN.search(said) if _may_be_within(said) else None
    if found is not None:
        return said[found.start() : found.start() + _LONGEST_LINE]
    return _find_complaint(messages, lines) if messages or _may_complain(text) else ""


def _list_messages(said: str, lines: str) -> list[str]:
    """The message fields of a record; empty if its other fields report success."""
    if not (_may_hold_messages(said) and ("text=" in said or _holds_records(lines))) or finds_any(
        said, _WELL
    ):
        return []
    return [one or other for one, other in _MESSAGE.findall(said)]


def _find_complaint(messages: list[str], lines: list[str]) -> str:
    """The message, first or last line, or line after a program's name that complains."""
    ends = [line for line in lines[:1] + lines[1:][-1:] if not line.startswith(_RECORDS)]
    for line in messages + ends:
        if _may_complain(line) and _COMPLAINS.search("\n" + line) and not _QUOTES.match(line):
            return line
    for line in lines:
        program = _PROGRAM.match(line) if ":" in line and _may_complain(line) else None
        if (
            program is not None
            and not _QUOTES.match(line)
            and _COMPLAINS.search(" " + line[program.end() :])
        ):
            return line
    return ""


def _is_marked(said: str) -> bool:
    """Whether a field or a code reports a failure."""
    if not _may_be_marked(said):
        return False
    return (
        finds_any(said, _FIELDS)
        or finds_any(said, _CODES)
        or ("usage:" in said and _USAGE.search(said) is not None)
    )


def _tell_kind(line: str) -> Failure:
    if _may_pass(line) and finds_any(line, _TRANSIENT):
        return TRANSIENT
    if _may_miss(line) and finds_any(line, _MISSING) and not _NO_TOOL.search(line):
        return MISSING
    return FATAL
