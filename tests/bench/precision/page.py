"""The tables of docs/detectors.md that `make precision` writes, about the generated set."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from statistics import median

from tests.bench.precision.measure import ALL_DETECTORS, OTHERS, Setting, list_kinds

BEGINS, ENDS = "<!-- make precision -->\n", "<!-- end -->"

SHOWN = ("shown as: ", "in one message: ")
"""How kinds begin that differ in what requests show. Other programs know their own history, so
these kinds say nothing about their rules."""

_OUTCOMES = {
    ("loop", 2): "**loop, refused**",
    ("loop", 1): "**loop, noted only**",
    ("loop", 0): "**loop, not seen**",
    ("other", 2): "no loop, but refused",
    ("other", 1): "no loop, but noted",
    ("other", 0): "no loop, untouched",
}


def fill_page(text: str, settings: Sequence[Setting]) -> str:
    """The page with the tables of these settings. Raises ValueError if it has no place for them."""
    before, _, rest = text.partition(BEGINS)
    _, found, behind = rest.partition(ENDS)
    if not found:
        raise ValueError(f"the page has no lines {BEGINS!r} and {ENDS!r}")
    compared = [
        each for each in settings if each.policy == OTHERS or each.detector == ALL_DETECTORS
    ]
    tables = f"{_list_seen(compared[0])}\n\n{_compare(compared)}"
    return f"{before}{BEGINS}\n{tables}\n\n{ENDS}{behind}"


def _list_seen(setting: Setting) -> str:
    """A row for each outcome, with the kinds of conversations that have it."""
    rows = []
    for kind, label, count, [(acted, refused)] in list_kinds([setting]):
        outcome = list(_OUTCOMES).index((label, (acted > 0) + (refused > 0)))
        rows.append((outcome, -refused, -acted, count, kind))
    lines = ["|outcome|noted|refused|conversations|", "|---|---|---|---|"]
    for (outcome, refused, acted, count), same in groupby(sorted(rows), itemgetter(slice(4))):
        groups: dict[str, list[str]] = {}
        for kind in [row[4] for row in same]:
            group, _, name = kind.rpartition(": ")
            groups.setdefault(group, []).append(name)
        names = "<br>".join(
            [f"{group}: " * bool(group) + "; ".join(groups[group]) for group in sorted(groups)]
        )
        what = list(_OUTCOMES.values())[outcome]
        lines.append(f"|{what}|{-acted} of {count}|{-refused} of {count}|{names}|")
    return "\n".join(lines)


def _compare(settings: Sequence[Setting]) -> str:
    lines = [
        "|rule|loops noted|after answers|loops ended|after answers|others noted|others ended|",
        "|---|---|---|---|---|---|---|",
    ]
    for setting in settings:
        judged = [each for each in setting.judged if not each.label.kind.startswith(SHOWN)]
        loops = [each for each in judged if each.label.loop]
        others = [each for each in judged if not each.label.loop]
        cells = [f"Loopguard, `{setting.policy}`" if setting.policy != OTHERS else setting.detector]
        for level in (0, 1):
            found = [hit - each.label.begins for each in loops if (hit := each.find_hit(level))]
            cells += [f"{len(found)} of {len(loops)}", f"{median(found):g}"]
        for level in (0, 1):
            wrong = sum(bool(each.touched[level]) for each in others)
            cells.append(f"{wrong} of {len(others)}")
        lines.append(f"|{'|'.join(cells)}|")
    return "\n".join(lines)
