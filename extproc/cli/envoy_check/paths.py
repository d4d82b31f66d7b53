"""Which paths a route's `match` takes, with three answers: True, False, or None if unknown.

Every form of match is converted to a literal prefix and a regular expression for the rest, so each
question is answered in one place. Envoy's expressions are RE2's; Python shares most of that syntax.
An unknown form or syntax has the expression None and is reported as not judged; it never counts as
a match of nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from extproc.apis import SAMPLES
from extproc.cli.envoy_check.document import ConfigPlace
from extproc.policy.bundle import is_below

ANYTHING = ".*"
BELOW = "(?:/.*)?"
_WIDE = {
    ANYTHING: ANYTHING,
    "(.*)": ANYTHING,
    "(?:.*)": ANYTHING,
    "[^?]*": ANYTHING,
    "(/.*)?": BELOW,
    BELOW: BELOW,
}
"""Spellings of expressions that take everything below a literal, and the one used here."""

_PLAIN = ("", ANYTHING, BELOW)
_NAMED = {"prefix": ANYTHING, "path": "", "path_separated_prefix": BELOW}
_FORMS = (*_NAMED, "safe_regex", "connect_matcher", "path_match_policy")
_MODIFIERS = (*_FORMS, "case_sensitive", "runtime_fraction")
_DENOMINATORS = {"HUNDRED": 100, "TEN_THOUSAND": 10_000, "MILLION": 1_000_000}

_TEMPLATE = "UriTemplateMatchConfig"
_SEGMENT = r"[-A-Za-z0-9._~%!$&'()+,;:=@*]+"
"""A path segment in a URI template (Envoy's kPathGlob)."""

_OPERATOR = re.compile(r"\{(\w+)(?:=([^{}]*))?\}|\*\*|\*")
_FLAGS = re.compile(r"\^?\(\?([a-zA-Z]+)\)\^?|\^")
_ESCAPED = re.compile(r"\\[^A-Za-z0-9]")
_CHOICE = re.compile(
    r"(?:\((?:\?:|\?P<\w+>)?(?=[^()]*\|))([^\\^$.?*+()\[\]{}]*)\)(?![?*+{])((?s:.*))"
)
"""A group of plain alternatives, and the rest."""

_SPECIAL = "\\^$.|?*+()[]{}"
_QUANTIFIERS = "?*{"
_FOREIGN = re.compile(r"\[\[|\[:|\\[pPQECzZ]|\(\?(?!:|P<|[ims]+:)")
"""Syntax that RE2 or Python lacks, or that they read differently."""

_SAMPLES = [path for paths in SAMPLES.values() for path in paths]
"""Paths of model calls, to test expressions with."""


@dataclass(frozen=True, slots=True)
class PathPattern:
    """The paths of a match: a literal prefix, and a regular expression for the rest.

    Attributes:
        rest: the expression; None if unknown.
        folds: whether the case of letters is ignored.
        never: whether it takes only CONNECT, which has no path.
    """

    literal: str
    rest: str | None
    folds: bool = False
    never: bool = False

    def takes(self, path: str) -> bool | None:
        """Whether it takes this path."""
        if self.never or not self._begins(path, self.literal):
            return False
        if self.rest in (None, ANYTHING):
            return None if self.rest is None else True
        if self.rest in ("", BELOW):
            return path[len(self.literal) :][:1] in (("", "/") if self.rest else ("",))
        flags = re.ASCII | (re.IGNORECASE if self.folds else 0)
        return re.fullmatch(re.escape(self.literal) + self.rest, path, flags) is not None

    def reaches(self, prefix: str) -> bool | None:
        """Whether it takes any path that a `pathPrefix` matches."""
        if self.never or not (
            self._begins(self.literal, prefix) or self._begins(prefix, self.literal)
        ):
            return False
        if branches := self._list_branches():
            answers = [branch.reaches(prefix) for branch in branches]
            return True if True in answers else None if None in answers else False
        lower = str.lower if self.folds else str
        if self.rest is None or is_below(lower(self.literal), lower(prefix)):
            return None if self.rest is None else True
        base = prefix.rstrip("/")
        below = [prefix, f"{base}/"]
        below += (
            [f"{base}/x", *[path for path in _SAMPLES if is_below(path, prefix)]]
            if self.rest not in _PLAIN
            else []
        )
        found = any(self.takes(path) for path in below)
        return found if found or self.rest in _PLAIN else None

    def _list_branches(self) -> list[PathPattern]:
        """A pattern for each alternative, if the rest begins with a group of plain ones."""
        if found := _CHOICE.fullmatch(self.rest or ""):
            flags, start = "(?i)" if self.folds else "", re.escape(self.literal)
            return [read_regex(f"{flags}{start}{text}{found[2]}") for text in found[1].split("|")]
        return []

    def covers(self, prefix: str) -> bool:
        """Whether it is known to take every path that a `pathPrefix` matches."""
        return self.rest in (ANYTHING, BELOW) and self.takes(prefix) is True and not self.never

    def includes(self, other: PathPattern) -> bool | None:
        """Whether it takes every path that another pattern takes."""
        everything = self.rest in (ANYTHING, BELOW) and self.literal in ("", "/")
        if (
            self.never
            or other.never
            or not (everything or self._begins(other.literal, self.literal))
        ):
            return False
        if everything or self.rest is None or other.rest is None:
            return True if everything else None
        if (
            other.folds
            and not self.folds
            and _has_letters(self.literal + ("" if self.rest in _WIDE else self.rest))
        ):
            return False
        if other.rest == "":
            return self.takes(other.literal)
        if self.rest == BELOW:
            return self.takes(other.literal) is True and (
                other.rest == BELOW or len(other.literal) > len(self.literal)
            )
        return self.rest in (ANYTHING, other.rest) and (
            self.rest == ANYTHING or self.literal == other.literal
        )

    def meets(self, other: PathPattern) -> bool | None:
        """Whether both take some path."""
        for one, another in ((self, other), (other, self)):
            if one.rest == "" and not one.folds:
                return another.takes(one.literal)
        if self.never or other.never:
            return False
        both = [self.literal, other.literal]
        shorter, longer = sorted(
            [text.lower() for text in both] if self.folds or other.folds else both, key=len
        )
        if not longer.startswith(shorter):
            return False
        if self.rest is None or other.rest is None:
            return None
        if (
            self.includes(other)
            or other.includes(self)
            or any(self.takes(path) and other.takes(path) for path in _SAMPLES)
        ):
            return True
        wide = self.rest in _WIDE and other.rest in _WIDE
        return False if wide else None

    def list_spellings(self) -> list[str]:
        """Two spellings that match the path but not a policy; empty if it is case-sensitive."""
        return (
            [self.literal.lower(), self.literal.upper()]
            if self.folds and _has_letters(self.literal)
            else []
        )

    def find_example(self) -> str:
        """A path that it takes, or empty."""
        if self.rest in _PLAIN:
            return self.literal
        return next((path for path in _SAMPLES if self.takes(path)), "")

    def _begins(self, text: str, start: str) -> bool:
        return text.lower().startswith(start.lower()) if self.folds else text.startswith(start)


def _has_letters(text: str) -> bool:
    return text.lower() != text.upper()


def read_match(match: ConfigPlace) -> PathPattern:
    folds = not match.get("case_sensitive").flag(default=True)
    for name, rest in _NAMED.items():
        if match.get(name).is_there:
            return PathPattern(match.get(name).text(), rest, folds)
    if match.get("connect_matcher").is_there:
        return PathPattern("", None, never=True)
    if match.get("safe_regex").is_there:
        return read_regex(match.get("safe_regex", "regex").text())
    kind, template = match.get("path_match_policy", "typed_config").message()
    if kind.endswith(_TEMPLATE):
        return _read_template(template.get("path_template").text())
    return PathPattern("", None)


def read_regex(regex: str) -> PathPattern:
    """The pattern of a regular expression that must match a whole path."""
    folds, rest, literal = False, regex, ""
    if flags := _FLAGS.match(rest):
        folds, rest = "i" in (flags[1] or ""), rest[flags.end() :]
        if set(flags[1] or "") - {"i", "s", "m"}:
            return PathPattern("", None)
    if _has_alternatives(rest):  # no common literal
        return PathPattern(
            "", None if _FOREIGN.search(rest) or not _compiles(rest) else rest, folds
        )
    while rest:
        escaped = _ESCAPED.match(rest)
        if escaped is None and rest[0] in _SPECIAL:
            break
        size = 2 if escaped else 1
        if rest[size : size + 1] and rest[size] in _QUANTIFIERS:
            break
        literal, rest = literal + rest[size - 1], rest[size:]
        if rest[:1] == "+":
            rest = f"{re.escape(literal[-1])}*{rest[1:]}"
            break
    if rest.endswith("$") and not rest.endswith("\\$"):
        rest = rest[:-1]
    if _FOREIGN.search(rest) or not _compiles(rest):
        return PathPattern(literal, None, folds)
    return PathPattern(literal, _WIDE.get(rest, rest), folds)


def _has_alternatives(regex: str) -> bool:
    """Whether there is a `|` outside groups."""
    outside, before = re.sub(r"\\.|\[\^?\]?[^]]*\]", "", regex), ""
    while outside != before:
        before, outside = outside, re.sub(r"\([^()]*\)", "", outside)
    return "|" in outside


def matches(regex: str, text: str) -> bool | None:
    """Whether Envoy's expression matches a whole text; None if unknown."""
    return read_regex(regex).takes(text)


def _compiles(regex: str) -> bool:
    try:
        re.compile(regex, re.ASCII)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def _read_template(template: str) -> PathPattern:
    """Envoy's URI template: `*` and `{x}` match a segment, `**` any number."""

    def translate(operator: re.Match[str]) -> str:
        inner = operator[2] if operator[2] is not None else "*" if operator[1] else operator[0]
        return (
            _OPERATOR.sub(translate, inner)
            if inner not in ("*", "**")
            else ANYTHING
            if inner == "**"
            else _SEGMENT
        )

    first = _OPERATOR.search(template)
    if first is None:
        return PathPattern(template, "" if not set(template) & set("{}*") else None)
    literal, regex, end = template[: first.start()], "", first.start()
    for operator in _OPERATOR.finditer(template):
        regex += re.escape(template[end : operator.start()]) + translate(operator)
        end = operator.end()
    regex += re.escape(template[end:])
    return PathPattern(
        literal, None if set("{}") & set(template[end:]) else _WIDE.get(regex, regex)
    )


def find_share(match: ConfigPlace) -> float:
    """The fraction of requests that a route takes by default."""
    fraction = match.get("runtime_fraction", "default_value")
    if not match.get("runtime_fraction").is_there:
        return 1
    return min(
        1,
        fraction.get("numerator").number(0)
        / _DENOMINATORS.get(fraction.get("denominator").text("HUNDRED"), 100),
    )


def list_conditions(match: ConfigPlace) -> list[str]:
    """The conditions of a match beside the path, by field name."""
    known = [place.pointer for name in _MODIFIERS if (place := match.get(name)).is_there]
    conditions = [
        name
        for name, place in match.entries()
        if place.pointer not in known and place.value not in ([], None)
    ]
    return [*conditions, *(["runtime_fraction"] if find_share(match) < 1 else [])]


def list_methods(match: ConfigPlace) -> set[str] | None:
    """The methods that it takes; None for any."""
    for header in match.get("headers").items():
        if header.get("name").text() == ":method" and not header.get("invert_match").flag():
            exact = header.get("string_match", "exact").text() or header.get("exact_match").text()
            if exact:
                return {exact}
    return None


def describe_match(match: ConfigPlace) -> str:
    for name in _FORMS:
        value = match.get(name)
        if value.is_there:
            told = (
                value.text()
                or value.get("regex").text()
                or value.get("typed_config").message()[1].get("path_template").text()
            )
            more = " ..." if isinstance(match.value, dict) and len(match.value) > 1 else ""
            return f"{name.replace('_', ' ')} {told}".strip() + more
    return ""
