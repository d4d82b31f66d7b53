"""The accuracy of detectors on labelled conversations.

Each conversation is replayed in full, whatever is done about its requests, with its own caller. A
loop is found if a request that shows some of it is acted on; acting on an earlier request is too
early. Shares have Wilson's intervals of 95 %.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import sqrt
from statistics import median
from typing import Any, NamedTuple

from extproc.cli.packed import FilePlace
from extproc.cli.replay.judge import Judge
from extproc.cli.replay.records import Record, Recorded
from extproc.decision import Action
from extproc.engine.recording import VERSION
from extproc.policy.loader import PolicySet
from tests.bench.precision.conversations import Label, Labelled
from tests.bench.precision.others import RULES, apply_rules

# Any action, and the strictest.
LEVELS = ("acted on", "refused")

ALL_DETECTORS = "all"
OTHERS = "others"
"""Stands for a policy: its detectors are the rules of other programs."""

_Z = 1.959964
_BEGIN_MS = 1_700_000_000_000
_ADDRESS = "192.0.2.1"
_ID = re.compile(r"[^A-Za-z0-9_.-]+")


class Proportion(NamedTuple):
    """A share, with the confidence interval of the true share."""

    found: int
    of: int
    low: float
    high: float


def make_share(found: int, of: int) -> Proportion:
    """Wilson's score interval (E. B. Wilson, JASA 22, 1927)."""
    if not of:
        return Proportion(0, 0, 0.0, 1.0)
    share, square = found / of, _Z * _Z
    middle, spread = (
        share + square / (2 * of),
        _Z * sqrt(share * (1 - share) / of + square / (4 * of * of)),
    )
    whole = 1 + square / of
    return Proportion(
        found, of, max(0.0, (middle - spread) / whole), min(1.0, (middle + spread) / whole)
    )


class Judged(NamedTuple):
    """Sizes of a conversation's requests; for each level, those acted on (from 1)."""

    place: FilePlace
    name: str
    label: Label
    sizes: Sequence[int]
    touched: tuple[list[int], list[int]]

    def find_hit(self, level: int) -> int:
        """The first request acted on that shows some of the loop, 0 for none."""
        return next((number for number in self.touched[level] if number > self.label.begins), 0)

    def is_early(self, level: int) -> bool:
        return bool(self.touched[level]) and self.touched[level][0] <= self.label.begins


class Setting:
    """One detector of a policy, or all together, and its outcomes."""

    def __init__(self, policy: str, detector: str) -> None:
        self.policy = policy
        self.detector = detector
        self.uncounted: Counter[str] = Counter()
        self.judged: list[Judged] = []


class Precision:
    """Judges conversations by all policies in one pass."""

    def __init__(self, judge: Judge, policies: PolicySet, seconds: float) -> None:
        self.settings: dict[tuple[str, str], Setting] = {}
        self._sources: list[str] = []
        for policy in policies.list_acting():
            names = [name for name, _ in policy.spec.detectors()]
            for name in [*names, ALL_DETECTORS] if len(names) > 1 else names:
                self.settings[policy.id, name] = Setting(policy.id, name)
            self._sources += policy.spec.list_sources()
        for name in RULES:
            self.settings[OTHERS, name] = Setting(OTHERS, name)
        self._judge = judge
        self._step_ms = round(seconds * 1000)
        self._now = _BEGIN_MS

    def add(self, place: FilePlace, conversation: Labelled) -> None:
        touched: dict[tuple[str, str], tuple[list[int], list[int]]] = {
            key: ([], []) for key in self.settings
        }
        _note_others(touched, conversation.bodies)
        for number, body in enumerate(conversation.bodies, 1):
            self._now += self._step_ms
            found = self._judge.judge(self._record(f"{place}", conversation, body))
            if found is None:
                continue
            evaluation, decision = found
            for policy, detector, reason in evaluation.list_left_out():
                for key, setting in self.settings.items():
                    if key in ((policy, detector), (policy, ALL_DETECTORS)) or (
                        key[0] == policy and not detector
                    ):
                        setting.uncounted[reason] += 1
            for outcome in decision.trace:
                for key in ((outcome.policy, outcome.detector), (outcome.policy, ALL_DETECTORS)):
                    if outcome.action is not Action.ALLOW and key in touched:
                        _note(touched[key], number, refused=outcome.action is Action.REJECT)
        sizes = [len(body) for body in conversation.bodies]
        for key, setting in self.settings.items():
            setting.judged.append(
                Judged(place, conversation.name, conversation.label, sizes, touched[key])
            )

    def _record(self, caller: str, conversation: Labelled, body: bytes) -> Recorded:
        headers: dict[str, str | bool | None] = {"authorization": f"Bearer {caller}"}
        claims: dict[str, Any] = {}
        query = ""
        for source, _, name in [key.partition(":") for key in self._sources]:
            if source == "header":
                headers.setdefault(name, caller)
            elif source == "jwt":
                claims[name] = caller
            elif source == "query":
                query += f"&{name}={_ID.sub('_', caller)}"
        headers |= {name.lower(): value for name, value in conversation.headers.items()}
        record = Record(
            record=VERSION,
            time=self._now / 1000,
            method="POST",
            path=conversation.path,
            query=query.removeprefix("&"),
            address=_ADDRESS,
            headers=headers,
            claims=claims,
        )
        return Recorded(self._now, record, partial=False, content=body, sums=None)


def _note_others(
    touched: dict[tuple[str, str], tuple[list[int], list[int]]], bodies: Sequence[bytes]
) -> None:
    for name, number, ends in apply_rules(bodies):
        _note(touched[OTHERS, name], number, refused=ends)


def _note(touched: tuple[list[int], list[int]], number: int, *, refused: bool) -> None:
    for numbers in touched[: 2 if refused else 1]:
        if not numbers or numbers[-1] != number:
            numbers.append(number)


def summarize(setting: Setting) -> dict[str, Any]:
    return {
        "policy": setting.policy,
        "detector": setting.detector,
        **{
            level.replace(" ", "_"): _summarize_level(setting.judged, place)
            for place, level in enumerate(LEVELS)
        },
        "uncounted": dict(setting.uncounted),
    }


def count_conversations(judged: Sequence[Judged]) -> dict[str, int]:
    return {
        "conversations": len(judged),
        "requests": sum(len(each.sizes) for each in judged),
        "bytes": sum(sum(each.sizes) for each in judged),
        "loops": sum(each.label.loop is True for each in judged),
        "others": sum(each.label.loop is False for each in judged),
        "unclear": sum(each.label.loop is None for each in judged),
        "successes": sum(each.label.success is True for each in judged),
    }


def _summarize_level(judged: Sequence[Judged], level: int) -> dict[str, Any]:
    loops = [each for each in judged if each.label.loop]
    others = [each for each in judged if each.label.loop is False]
    hit = [(each, number) for each in loops if (number := each.find_hit(level))]
    wrong = [each for each in others if each.touched[level]]
    early = [each for each in loops if each.is_early(level)]
    turns = sorted(number - each.label.begins for each, number in hit if each.label.begins)
    succeeded = [each for each in judged if each.label.success]
    spared = sum(sum(each.sizes[number - 1 :]) for each, number in hit)
    return {
        "loops": make_share(len(hit), len(loops))._asdict(),
        "others": make_share(len(wrong), len(others))._asdict(),
        "right": make_share(len(hit), len(hit) + len(wrong))._asdict(),
        "early": len(early),
        "successes": make_share(
            sum(bool(each.touched[level]) for each in succeeded), len(succeeded)
        )._asdict(),
        "unclear": sum(bool(each.touched[level]) for each in judged if each.label.loop is None),
        "turns": {"median": median(turns), "longest": turns[-1]} if turns else None,
        "bytes_of_loops": spared / max(1, sum(sum(each.sizes) for each in loops)),
        "bytes_of_all": spared / max(1, sum(sum(each.sizes) for each in judged)),
        "found": [_name(each, number) for each, number in hit],
        "wrong": [_name(each, each.touched[level][0]) for each in [*wrong, *early]],
        "missed": [_name(each, 0) for each in loops if not each.find_hit(level)],
    }


def _name(judged: Judged, request: int) -> dict[str, Any]:
    found = {"place": str(judged.place), "id": judged.name, "kind": judged.label.kind}
    return {**found, "request": request} if request else found


def list_kinds(
    settings: Iterable[Setting],
) -> Iterator[tuple[str, str, int, list[tuple[int, int]]]]:
    """Kind, label, number of conversations; for each setting the numbers acted on and refused."""
    rows = [setting.judged for setting in settings]
    groups = sorted(
        {
            (each.label.kind, each.label.loop is True)
            for each in rows[0]
            if each.label.loop is not None
        }
    )
    for kind, loop in groups:
        chosen = [
            [each for each in judged if (each.label.kind, each.label.loop) == (kind, loop)]
            for judged in rows
        ]
        found = [
            tuple(sum(bool(each.touched[level]) for each in judged) for level in (0, 1))
            for judged in chosen
        ]
        yield (
            kind,
            "loop" if loop else "other",
            len(chosen[0]),
            [(acted, refused) for acted, refused in found],
        )
