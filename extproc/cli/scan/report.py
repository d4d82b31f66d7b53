"""Adds up the results of all files, in bounded memory, and makes the report."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from heapq import heappush, heapreplace
from typing import Any, Final

import msgspec

from extproc.cli.packed import LONGEST, Problems
from extproc.cli.scan.limits import Total, recommend_limits
from extproc.cli.scan.lines import HARMLESS, PROBLEMS
from extproc.cli.scan.watch import IDENTIFIED, FoundLoop, RunReport, Spent
from extproc.cli.scan.work import BatchReport

NONE: Final = "unknown"
OTHERS: Final = "others"
GROUPS: Final = ("day", "project", "agent", "tool")
_MOST_GROUPS = 10_000
_MOST_KEPT = 2_000
_MOST_KNOWN = 1_000_000
_MOST_SESSIONS = 50_000

WORDS: Final = {
    "repeat": "the same input, the same result",
    "result": "the same result",
    "cycle": "the same steps in turn, the same results",
    "error": "the same error, whatever was tried",
    "talk": "answers without an action, to the same words each time",
    "nothing_new": "hardly a turn that was not there before",
    "similar_error": "the same error but for numbers, whatever was tried",
    "same_change": "the same change again and again, whatever came back",
    "action_cycle": "the same actions in turn, with mostly the same results",
    "nothing_found": "look-ups that found nothing, whatever was asked",
    "nested_prompt": "a prompt that contains itself",
    "repeated_ending": "a prompt that ends with the same lines again and again",
}
"""Descriptions of loops by the detector's rule."""


class _GroupTotals:
    def __init__(self) -> None:
        self.runs = self.looped = self.weak = self.loops = 0
        self.spent = self.after_note = self.after_stop = Spent()

    def add_run(self, run: RunReport) -> None:
        looped = any(is_loop(loop) for loop in run.loops)
        self.runs += 1
        self.looped += looped
        self.weak += bool(run.loops) and not looped
        self.spent = self.spent.plus(run.spent)
        for loop in run.loops:
            self.add_loop(loop)

    def add_loop(self, loop: FoundLoop) -> None:
        if is_loop(loop):
            self.loops += 1
            self.after_note = self.after_note.plus(loop.after_note)
            self.after_stop = self.after_stop.plus(loop.after_stop)

    def write(self) -> dict[str, Any]:
        return {
            "conversations": self.runs,
            "looped": self.looped,
            "only_noted": self.weak,
            "loops": self.loops,
            "spent": _write_spent(self.spent),
            "after_note": _write_spent(self.after_note),
            "after_stop": _write_spent(self.after_stop),
        }


def is_loop(loop: FoundLoop) -> bool:
    """Whether a loop is strong or long enough to be stopped; others only get a note."""
    return loop.strong or loop.stopped > 0


class ScanReport:
    """Counts conversations and loops.

    Attributes:
        problems: problems with lines and files.
        bytes: number of bytes in all files.
        files: number of files.
    """

    def __init__(self, files: int, size: int, problems: Problems, top: int) -> None:
        """Start empty; keep the `top` worst loops."""
        self.problems = problems
        self.files = files
        self.bytes = size
        self._top = top
        self._all = _GroupTotals()
        self._kinds: dict[str, int] = {}
        self._groups: dict[str, dict[str, _GroupTotals]] = {group: {} for group in GROUPS}
        self._worst: list[tuple[tuple[int, int, int], int, dict[str, Any]]] = []  # as a heap
        self._kept: list[dict[str, Any]] = []
        self._known: set[int] = set()
        self._totals: dict[tuple[str, str, int], Total] = {}
        self._copies = 0
        self._first = self._last = self._number = 0
        self._estimated = False

    def add(self, batch: BatchReport) -> None:
        self.problems.merge(batch.problems)
        for run in batch.runs:
            self._add(run)

    def _add(self, run: RunReport) -> None:
        whole, calls, copied = run, run.spent.calls, self._find_copies(run)
        if copied:
            run = _leave_out(run, copied)
            self._copies += len(copied)
            if not run.spent.calls:
                return
        self._add_total(whole)
        about, day = run.about, (_write_moment(run.first) or NONE)[:10]
        self._kinds[about.kind] = self._kinds.get(about.kind, 0) + 1
        self._all.add_run(run)
        for group, name in (
            ("day", day),
            ("project", about.project or NONE),
            ("agent", about.agent or NONE),
        ):
            self._group(group, name).add_run(run)
        for loop in run.loops:
            for tool in loop.tools[:1] or ("no tool",):
                sums = self._group("tool", tool)
                sums.add_loop(loop)
                sums.runs += 1
                sums.looped += is_loop(loop)
            self._keep(run, loop, calls)
        if run.first:
            self._first, self._last = (
                min(self._first or run.first, run.first),
                max(self._last, run.last),
            )
        self._estimated = self._estimated or run.estimated

    def _add_total(self, run: RunReport) -> None:
        """Add a conversation to its session's total, with copied calls, which limits see, too."""
        about, root = run.about, run.about.root
        key = (about.kind, root, 0) if root else (about.kind, about.session, len(self._totals) + 1)
        if key not in self._totals and len(self._totals) >= _MOST_SESSIONS:
            return
        total = self._totals.setdefault(key, Total(agents=0 if root else None))
        total.looped = total.looped or any(is_loop(loop) for loop in run.loops)
        total.steps += run.spent.calls
        total.tokens += run.spent.tokens
        total.nanos = (
            None if total.nanos is None or run.spent.unpriced else total.nanos + run.spent.nanos
        )
        total.tools.update(run.tools)
        if total.agents is not None and about.session != root:
            total.agents += 1

    def _find_copies(self, run: RunReport) -> dict[int, Spent]:
        """The calls, by number, that an earlier conversation has, too: clients copy history.

        A call without an identity is a copy if a later one is, because copies begin at the start.
        """
        identities = run.calls[::IDENTIFIED]
        last = max(
            (at for at, identity in enumerate(identities) if identity in self._known), default=-1
        )
        copied = {
            at + 1: Spent(1, *run.calls[at * IDENTIFIED + 1 : (at + 1) * IDENTIFIED])
            for at, identity in enumerate(identities[: last + 1])
            if not identity or identity in self._known
        }
        if len(self._known) < _MOST_KNOWN:
            self._known.update(identity for identity in identities if identity)
        return copied

    def _group(self, group: str, name: str) -> _GroupTotals:
        sums = self._groups[group]
        if name not in sums and len(sums) >= _MOST_GROUPS:
            name = OTHERS
        return sums.setdefault(name, _GroupTotals())

    def _sort(self, group: str) -> list[tuple[str, _GroupTotals]]:
        listed = sorted(self._groups[group].items())
        return (
            listed
            if group == "day"
            else sorted(listed, key=lambda item: (-item[1].after_note.tokens, -item[1].looped))
        )

    def _keep(self, run: RunReport, loop: FoundLoop, calls: int) -> None:
        self._number += 1
        written = _write_loop(run, loop, calls)
        if len(self._kept) < _MOST_KEPT:
            self._kept.append(written)
        rank = (
            int(is_loop(loop)),
            loop.after_note.nanos,
            loop.after_note.tokens or loop.after_note.calls,
        )
        item = (rank, -self._number, written)
        if len(self._worst) < self._top:
            heappush(self._worst, item)
        elif self._worst and item[:2] > self._worst[0][:2]:
            heapreplace(self._worst, item)

    def make_document(self) -> dict[str, Any]:
        return {
            "scan": 1,
            "files": self.files,
            "bytes": self.bytes,
            "first": _write_moment(self._first),
            "last": _write_moment(self._last),
            "formats": dict(sorted(self._kinds.items())),
            "estimated": self._estimated,
            "copies": self._copies,
            **self._all.write(),
            "by": {
                group: [{"name": name, **each.write()} for name, each in self._sort(group)]
                for group in GROUPS
            },
            "worst": [
                written
                for _, _, written in sorted(self._worst, key=lambda item: item[:2], reverse=True)
            ],
            "limits": recommend_limits(list(self._totals.values())),
            "found": sorted(self._kept, key=lambda loop: (loop["began"] or "", loop["place"])),
            "problems": {
                kind: {
                    "count": found.count,
                    "what": PROBLEMS[kind].format(longest=f"{LONGEST // 2**20} MiB"),
                    "harmless": kind in HARMLESS,
                    "names": dict(
                        sorted(found.names.items(), key=lambda item: (-item[1], item[0]))
                    ),
                    "first": [str(place) for place in found.places],
                }
                for kind, found in self.problems.by_kind.items()
            },
        }


def _leave_out(run: RunReport, copied: Mapping[int, Spent]) -> RunReport:
    """A conversation without copied calls; keeps the loops that continued after these."""
    left = msgspec.structs.replace(run, spent=run.spent.minus(*copied.values()), loops=[])
    for loop in run.loops:
        if loop.ends in copied:
            continue
        noted, stopped = [
            spent.minus(
                *[
                    price
                    for number, price in copied.items()
                    if first and first <= number <= loop.ends
                ]
            )
            for first, spent in ((loop.noted, loop.after_note), (loop.stopped, loop.after_stop))
        ]
        left.loops.append(msgspec.structs.replace(loop, after_note=noted, after_stop=stopped))
    return left


def _write_loop(run: RunReport, loop: FoundLoop, calls: int) -> dict[str, Any]:
    return {
        "kind": run.about.kind,
        "session": run.about.session,
        "project": run.about.project,
        "agent": run.about.agent or NONE,
        "place": str(loop.place),
        "began": _write_moment(loop.time),
        "begins": loop.begins,
        "ends": loop.ends,
        "ended": _write_moment(loop.ended),
        "turns": loop.ends - loop.begins,
        "calls": calls,
        "rule": loop.rule,
        "words": WORDS.get(loop.rule, loop.rule.replace("_", " ")),
        "what": loop.what,
        "tools": list(loop.tools),
        "strength": "strong" if loop.strong else "weak",
        "loop": is_loop(loop),
        "noted": loop.noted or None,
        "landed": loop.landed or None,
        "stopped": loop.stopped or None,
        "after_note": _write_spent(loop.after_note),
        "after_stop": _write_spent(loop.after_stop),
        "repeated": [turn._asdict() for turn in loop.turns],
    }


def _write_spent(spent: Spent) -> dict[str, Any]:
    dollars = None if spent.unpriced and not spent.nanos else round(spent.nanos / 1e9, 6)
    return {
        "calls": spent.calls,
        "tokens": spent.tokens,
        "dollars": dollars,
        "unpriced_tokens": spent.unpriced,
    }


def _write_moment(milliseconds: int) -> str | None:
    return (
        datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        if milliseconds
        else None
    )
