"""How accurate policies are on labelled conversations; `make precision` runs it.

    make precision LABELLED=labelled.ndjson ARGS='--policy candidate.json --kinds'
    make precision ARGS='--detector turns --vary threshold_identical_requests=2,3,4,5'

Each line of a set is a conversation, as its last request shows it, and a `label`:

    {"label": {"loop": true, "begins": 1}, "messages": [{"role": "user", "content": "Fix it."}, ...]}

In a label, `loop` is true, false, or null if unclear; `begins` is the number of the model's first answer in the loop, starting
at 1; `success` is whether the agent reached its goal; `kind` groups conversations for `--kinds`. The conversation is
`messages`, `input` (Responses), `contents` (Gemini), `steps` (ATIF), `requests` (a list of bodies as sent), or a file:
`"file": "run/trajectory.json"`. Other keys of the body, such as `tools`, can stand beside it.

Each conversation is replayed in full, whatever is done about its requests, with its own caller. A loop is found if a request
that shows some of it is acted on; acting on an earlier request is too early. `spared` is the share of the bytes of loops, from
the first refusal on. Shares have Wilson's intervals of 95 %. `--json` also lists what is wrong or missed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

<<<<<<<< HEAD:tests/bench/precision/measure.py
========
from extproc.cli.commands import add_policy_flag, count, load_policies
from extproc.cli.replay.command import compile_policies
>>>>>>>> scan:tests/bench/precision.py
from extproc.cli.replay.judge import Judge
from extproc.cli.replay.records import Record, Recorded, UnusableError
from extproc.cli.replay.table import add_row, make_console, make_table, print_table
from extproc.decision import Action
from extproc.detectors import KINDS, Similarity
from extproc.detectors.keys import SimilarityKeys
from extproc.engine.recording import VERSION
from extproc.errors import LoopguardError, UsageError
from extproc.logs import escape_controls
from extproc.policy.loader import PolicySet, parse
<<<<<<<< HEAD:tests/bench/precision/measure.py
from tests.bench.precision.conversations import Label, Labelled
========
from extproc.policy.presets import DEFAULT_PRESET, find_preset
from tests.bench.conversations import Label, Labelled, read_conversation
>>>>>>>> scan:tests/bench/precision.py

LEVELS = ("acted on", "refused")
"""What may be done about a conversation: any action, and the strictest."""

ALL_DETECTORS = "all"
"""Name for all detectors of a policy together."""

_Z = 1.959964
_MAX_ENTRIES = 1_000_000
_BEGIN_MS = 1_700_000_000_000
_ADDRESS = "192.0.2.1"
_ID = re.compile(r"[^A-Za-z0-9_.-]+")
_LONGEST_ID = 128


class Proportion(NamedTuple):
    """A share, and the confidence interval of the true share, from 0 to 1."""

    found: int
    of: int
    low: float
    high: float


def make_share(found: int, of: int) -> Proportion:
    """Compute a share with Wilson's score interval (E. B. Wilson, JASA 22, 1927)."""
    if not of:
        return Proportion(0, 0, 0.0, 1.0)
    share, square = found / of, _Z * _Z
    middle, spread = share + square / (2 * of), _Z * sqrt(share * (1 - share) / of + square / (4 * of * of))
    whole = 1 + square / of
    return Proportion(found, of, max(0.0, (middle - spread) / whole), min(1.0, (middle + spread) / whole))


class Judged(NamedTuple):
    """What a setting did about one conversation.

    Attributes:
        place: its line.
        sizes: length of each request's body, in bytes.
        touched: for each level, the numbers of the requests acted on, starting at 1.
    """

    place: str
    name: str
    label: Label
    sizes: Sequence[int]
    touched: tuple[list[int], list[int]]

    def find_hit(self, level: int) -> int:
        """The first request acted on that shows some of the loop, 0 for none; the first acted on if no begin is known."""
        return next((number for number in self.touched[level] if number > self.label.begins), 0)

    def is_early(self, level: int) -> bool:
        """Whether a request was acted on before the loop begins."""
        return bool(self.touched[level]) and self.touched[level][0] <= self.label.begins


class Setting:
    """One detector of a policy, or all of its detectors together, and what it did about each conversation."""

    def __init__(self, policy: str, detector: str) -> None:
        self.policy = policy
        self.detector = detector
        self.uncounted: Counter[str] = Counter()
        self.judged: list[Judged] = []


class Precision:
    """Judges conversations by all policies in one pass."""

    def __init__(self, judge: Judge, policies: PolicySet, seconds: float) -> None:
        """Start without conversations; their requests are `seconds` apart."""
        self.settings: dict[tuple[str, str], Setting] = {}
        self._sources: list[str] = []
        for policy in policies.list_acting():
            names = [name for name, _ in policy.spec.detectors()]
            for name in [*names, ALL_DETECTORS] if len(names) > 1 else names:
                self.settings[policy.id, name] = Setting(policy.id, name)
            self._sources += policy.spec.list_sources()
        self._judge = judge
        self._step_ms = round(seconds * 1000)
        self._now = _BEGIN_MS

    def add(self, place: str, conversation: Labelled) -> None:
        """Judge one conversation."""
        touched: dict[tuple[str, str], tuple[list[int], list[int]]] = {key: ([], []) for key in self.settings}
        for number, body in enumerate(conversation.bodies, 1):
            self._now += self._step_ms
            found = self._judge.judge(self._record(place, conversation, body))
            if found is None:
                continue
            evaluation, decision = found
            for policy, detector, reason in evaluation.list_left_out():
                for key, setting in self.settings.items():
                    if key in ((policy, detector), (policy, ALL_DETECTORS)) or (key[0] == policy and not detector):
                        setting.uncounted[reason] += 1
            for outcome in decision.trace:
                for key in ((outcome.policy, outcome.detector), (outcome.policy, ALL_DETECTORS)):
                    if outcome.action is not Action.ALLOW and key in touched:
                        _note(touched[key], number, refused=outcome.action is Action.REJECT)
        sizes = [len(body) for body in conversation.bodies]
        for key, setting in self.settings.items():
            setting.judged.append(Judged(place, conversation.name, conversation.label, sizes, touched[key]))

    def _record(self, caller: str, conversation: Labelled, body: bytes) -> Recorded:
        """A request with everything that identifies its caller, which no other conversation has."""
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


def _note(touched: tuple[list[int], list[int]], number: int, *, refused: bool) -> None:
    for numbers in touched[: 2 if refused else 1]:
        if not numbers or numbers[-1] != number:
            numbers.append(number)


def vary(policies: PolicySet, wishes: Sequence[tuple[str, list[Any]]], detector: str | None) -> PolicySet:
    """A copy of each policy for each combination of values of keys.

    Args:
        policies: policies to vary.
        wishes: keys of loop_detection, each with its values.
        detector: name of the entries to change; None changes all that have the keys.

    Raises:
        UsageError: no entry has all of the keys.
        BundleErrors: a combination is invalid.
    """
    made = []
    for policy in policies.list_acting():
        names = [name for name, _ in policy.spec.detectors()]
        for values in product(*[values for _, values in wishes]):
            document = policy.model_dump(mode="json", by_alias=True, exclude_unset=True)
            loops = document["spec"]["loop_detection"]
            entries = [entry for entry in loops if entry.get("enabled")] if isinstance(loops, list) else [loops]
            pairs = [(key, value) for (key, _), value in zip(wishes, values, strict=True)]
            changed = [entry for name, entry in zip(names, entries, strict=True) if detector in (None, name)]
            if sum([_change(entry, pairs) for entry in changed]):
                told = "".join(f".{key}-{value if isinstance(value, str) else json.dumps(value)}" for key, value in pairs)
                document["id"] = _ID.sub("_", policy.id + told)[:_LONGEST_ID]
                made.append(document)
    if not made:
        raise UsageError(f"--vary: no detector has all of these keys: {', '.join(key for key, _ in wishes)}")
    return parse({"--vary": json.dumps(made).encode()}, datetime.now(UTC))


def _change(entry: dict[str, Any], pairs: Sequence[tuple[str, Any]]) -> bool:
    """Give an entry these values; returns whether it has all of the keys."""
    wished = dict(pairs)
    kind = KINDS.get(wished.get("similarity", entry.get("similarity", "exact")))
    if kind is None or not all(_has(kind, key) for key in wished):
        return False
    entry |= wished
    for key in [key for key in entry if not _has(kind, key)]:  # a key of the previous similarity
        del entry[key]
    return True


def _has(kind: type[Similarity], key: str) -> bool:
    """Whether entries of a similarity have a key."""
    return key == "similarity" or key in kind.keys.model_fields or key not in SimilarityKeys.model_fields


def summarize(setting: Setting) -> dict[str, Any]:
    """The results of a setting, as JSON."""
    return {
        "policy": setting.policy,
        "detector": setting.detector,
        **{level.replace(" ", "_"): _summarize_level(setting.judged, place) for place, level in enumerate(LEVELS)},
        "uncounted": dict(setting.uncounted),
    }


def count_conversations(judged: Sequence[Judged]) -> dict[str, int]:
    """Counts of conversations by label, of requests and of bytes."""
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
        "successes": make_share(sum(bool(each.touched[level]) for each in succeeded), len(succeeded))._asdict(),
        "unclear": sum(bool(each.touched[level]) for each in judged if each.label.loop is None),
        "turns": {"median": median(turns), "longest": turns[-1]} if turns else None,
        "bytes_of_loops": spared / max(1, sum(sum(each.sizes) for each in loops)),
        "bytes_of_all": spared / max(1, sum(sum(each.sizes) for each in judged)),
        "wrong": [_name(each, each.touched[level][0]) for each in [*wrong, *early]],
        "missed": [_name(each, 0) for each in loops if not each.find_hit(level)],
    }


def _name(judged: Judged, request: int) -> dict[str, Any]:
    found = {"place": judged.place, "id": judged.name, "kind": judged.label.kind}
    return {**found, "request": request} if request else found


def list_kinds(settings: Iterable[Setting]) -> Iterator[tuple[str, str, int, list[tuple[int, int]]]]:
    """Kind, label (`loop` or `other`), number of conversations, and for each setting how many were acted on and refused."""
    rows = [setting.judged for setting in settings]
    groups = sorted({(each.label.kind, each.label.loop is True) for each in rows[0] if each.label.loop is not None})
    for kind, loop in groups:
        chosen = [[each for each in judged if (each.label.kind, each.label.loop) == (kind, loop)] for judged in rows]
        found = [tuple(sum(bool(each.touched[level]) for each in judged) for level in (0, 1)) for judged in chosen]
        yield kind, "loop" if loop else "other", len(chosen[0]), [(acted, refused) for acted, refused in found]


def read_values(text: str) -> list[Any]:
    """The values of a flag: a JSON list, or values separated by commas, each JSON or else a text."""
    if text.startswith("["):
        try:
            values = msgspec.json.decode(text.encode())
        except msgspec.DecodeError:
            raise UsageError(f"--vary: {text!r} is no JSON list") from None
        return list(values)
    return [_read_value(part) for part in text.split(",")]


def _read_value(text: str) -> Any:  # noqa: ANN401  # JSON
    try:
        return msgspec.json.decode(text.encode())
    except msgspec.DecodeError:
        return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if all lines were judged, 1 if some cannot be used."""
    parser = argparse.ArgumentParser(prog="make precision", description="how accurate policies are on labelled conversations")
    add_policy_flag(parser, required=False)
    parser.add_argument("set", nargs="+", metavar="SET", help="labelled conversations, one per line, plain or gzip")
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="try these values of a key of loop_detection, or a JSON list of values; repeatable",
    )
    parser.add_argument("--detector", metavar="NAME", help="only this detector: change and show no other")
    parser.add_argument("--seconds", type=float, default=10.0, help="time between two requests of a conversation (default 10)")
    parser.add_argument("--kinds", action="store_true", help="also show each kind of conversation")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON document")
    options = parser.parse_args(arguments)
    policies = _load_settings(options)
    engine = compile_policies(policies)
    judge = Judge(engine, _MAX_ENTRIES, pinned=[plan.id for plan in engine.plans])
    precision = Precision(judge, policies, options.seconds)
    settings = [each for each in precision.settings.values() if options.detector in (None, each.detector)]
    if not settings:
        raise UsageError(f"--detector must be one of {', '.join(dict.fromkeys(name for _, name in precision.settings))}")
    errors = _judge_files(precision, options.set)
    for problem in errors:
        print(escape_controls(f"error: {problem}"), file=sys.stderr)
    counts = count_conversations(settings[0].judged)
    if not counts["conversations"]:
        raise LoopguardError("no conversation can be judged")
    document = {"precision": 1, **counts, "settings": [summarize(setting) for setting in settings]}
    if options.json:
        print(json.dumps(document))
    else:
        _print_tables(document, settings if options.kinds else ())
    return 1 if errors else 0


def _load_settings(options: argparse.Namespace) -> PolicySet:
    """The policies to compare; raises UsageError or BundleErrors."""
    policies = load_policies(options.policy or [find_preset(DEFAULT_PRESET)])
    pairs = [wish.partition("=") for wish in options.vary]
    if not all(equals for _, equals, _ in pairs):
        raise UsageError("--vary must be KEY=VALUE,..., such as threshold_identical_requests=2,3,5")
    wishes = [(key, read_values(values)) for key, _, values in pairs]
    return vary(policies, wishes, options.detector) if wishes else policies


def _judge_files(precision: Precision, names: Sequence[str]) -> list[str]:
    """What is wrong with lines that are no labelled conversations; all others are judged."""
    errors = []
    for name in names:
        data = Path(name).read_bytes()
        lines = (gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data).split(b"\n")
        for number, line in enumerate(lines, 1):
            place = f"{name}:{number}"
            try:
                if line.strip():
                    precision.add(place, read_conversation(line, Path(name).parent))
            except UnusableError as error:
                errors.append(f"{place}: {error}")
    return errors


def _print_tables(document: dict[str, Any], by_kind: Sequence[Setting]) -> None:
    console = make_console()
    columns = ("#loops found", "#others", "#too early", "#successes", "#turns", "#spared")
    table = make_table("setting", "", *columns)
    for setting in document["settings"]:
        for level in LEVELS:
            found = setting[level.replace(" ", "_")]
            turns = "" if found["turns"] is None else f"{found['turns']['median']:g}, up to {found['turns']['longest']}"
            spared = f"{found['bytes_of_loops']:.0%}"
            name = f"{setting['policy']}/{setting['detector']}" if level == LEVELS[0] else ""
            shares = _write_share(found["loops"]), _write_share(found["others"])
            cells = (*shares, found["early"], _write_share(found["successes"]), turns, spared if level == LEVELS[1] else "")
            add_row(table, name, level, *cells)
    about = ", ".join([count(document["loops"], "loop"), count(document["others"], "other"), f"{document['unclear']} unclear"])
    print_table(console, f"{count(document['conversations'], 'conversation')}: {about} (shares, with 95% intervals)", table)
    uncounted = [(setting, item) for setting in document["settings"] for item in setting["uncounted"].items()]
    if uncounted:
        table = make_table("setting", "reason", "#requests")
        for setting, (reason, requests) in uncounted:
            add_row(table, f"{setting['policy']}/{setting['detector']}", reason, requests)
        print_table(console, "Not counted", table)
    if by_kind:
        table = make_table("kind", "label", "#conversations", *(f"#{each.policy}/{each.detector}" for each in by_kind))
        for kind, label, conversations, found in list_kinds(by_kind):
            add_row(table, kind, label, conversations, *(f"{acted}, {refused} refused" for acted, refused in found))
        print_table(console, "Acted on and refused, by kind", table)


def _write_share(share: dict[str, Any]) -> str:
    if not share["of"]:
        return "-"
    interval = f"{100 * share['low']:.0f}-{100 * share['high']:.0f}"
    return f"{share['found'] / share['of']:.0%} ({interval})"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LoopguardError as error:
        sys.exit(f"precision: {error}")
