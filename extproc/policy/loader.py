"""Bytes to policies, or every error at once: nothing is half-loaded, nothing is silently dropped.

`load` is pure but for reading the files; it runs in a worker thread during a reload, so it checks policies one by one: no
single call keeps the interpreter lock for long.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from extproc.errors import BundleError, BundleErrors
from extproc.policy import bundle, rules
from extproc.policy.bundle import Envelope, Override, Policy
from extproc.policy.objects import Place
from extproc.similarity.keys import Tool

MAX_FILE = 64 * 2**20
"""Largest policy file, in bytes: room for a hundred thousand policies."""

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Source:
    """One policy file as it was read.

    Attributes:
        file: its path.
        sha256: of its bytes, in hex.
        policies: in the file's order.
        bundle_version: None for a single policy or a list.
        expires_at: when the bundle says that it is out of date.
        global_shadow: forces the file's policies into shadow mode while it is enabled and has not expired.
    """

    file: str
    sha256: str
    policies: tuple[Policy, ...]
    bundle_version: float | None = None
    expires_at: datetime | None = None
    global_shadow: Override | None = None

    def shadowed(self, now: datetime) -> bool:
        """True while `global_shadow` holds at `now`."""
        shadow = self.global_shadow
        return shadow is not None and shadow.enabled and (shadow.expires_at is None or now < shadow.expires_at)


@dataclass(frozen=True, slots=True)
class PolicySet:
    """Everything that was loaded, with what the user should know about it.

    Attributes:
        sources: one for each file.
        warnings: works as written, but perhaps not as meant.
        unenforced: parts of a drop-in bundle that this version does not enforce.
    """

    sources: tuple[Source, ...]
    warnings: tuple[BundleError, ...]
    unenforced: tuple[BundleError, ...]


def read_files(paths: Iterable[str]) -> dict[str, bytes]:
    """The bytes of every policy file below `paths`, in a stable order.

    A directory stands for all `*.json` below it, except names that start with a dot: a Kubernetes ConfigMap keeps its older
    versions in those.

    Raises:
        BundleErrors: a path is missing or unreadable, or a directory holds no policy file.
    """
    files, errors = _readable(paths)
    if errors:
        raise BundleErrors(errors)
    return files


def _readable(paths: Iterable[str]) -> tuple[dict[str, bytes], list[BundleError]]:
    """What can be read, and why the rest cannot."""
    files: dict[str, bytes] = {}
    errors: list[BundleError] = []
    for path in paths:
        try:
            found = sorted(_json_files(path)) if os.path.isdir(path) else [path]  # noqa: PTH112  # paths stay as the user wrote them
        except OSError as error:
            errors.append(BundleError(path, "", f"cannot be listed: {error.strerror}"))
            continue
        if not found:
            errors.append(BundleError(path, "", "the directory holds no *.json file; put at least one policy into it"))
        for file in found:
            try:
                files[file] = _content(file)
            except OSError as error:
                why = f"cannot be read: {error.strerror}" if error.strerror else str(error)
                errors.append(BundleError(file, "", why))
    return files, errors


def _content(file: str) -> bytes:
    """The bytes of a regular file: opening a FIFO would wait for somebody to write, and a device may never end."""
    with open(file, "rb", opener=_without_waiting) as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise OSError("is not a regular file")
        data = opened.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise OSError(f"is larger than {MAX_FILE >> 20} MiB")
    return data


def _without_waiting(file: str, flags: int) -> int:
    return os.open(file, flags | os.O_NONBLOCK | os.O_NOCTTY)


def load(paths: Iterable[str], now: datetime) -> PolicySet:
    """Read and check every policy file below `paths`; `now` is compared with each `expires_at`.

    Raises:
        BundleErrors: with every error of every file, those that cannot be read first.
    """
    files, errors = _readable(paths)
    try:
        policies = parse(files, now)
    except BundleErrors as error:
        raise BundleErrors([*errors, *error.errors]) from None
    if errors:
        raise BundleErrors(errors)
    return policies


def parse(files: Mapping[str, bytes], now: datetime, *, on_route: bool = False) -> PolicySet:
    """Check policy files that have been read already; otherwise as `load`.

    Args:
        files: contents by name.
        now: compared with each `expires_at`.
        on_route: they came with a route, so that a policy without a path or a route takes all of its requests.
    """
    # Hashed beforehand, not file by file below: hashing lets go of the interpreter lock for a moment. An event loop that waits
    # for the lock is woken to find it taken again, and its patience (5 ms) starts anew: every millisecond, that starves it.
    hashes = {file: hashlib.sha256(data).hexdigest() for file, data in files.items()}
    report = _Report(on_route=on_route)
    sources = []
    for file, data in files.items():
        report.file = file
        source = _source(data, hashes[file], now, report)
        if source is not None:
            sources.append(source)
    _duplicate_ids(report)
    if report.errors:
        raise BundleErrors(report.errors)
    return PolicySet(tuple(sources), tuple(report.warnings), tuple(report.unenforced))


class _Report:
    """Collects what is found in one file after the other."""

    def __init__(self, *, on_route: bool) -> None:
        self.on_route = on_route
        self.file = ""
        self.errors: list[BundleError] = []
        self.warnings: list[BundleError] = []
        self.unenforced: list[BundleError] = []
        self.ids: list[tuple[str, str, str]] = []  # (id, file, pointer), of broken policies too

    def error(self, place: Place, message: str) -> None:
        self.errors.append(BundleError(self.file, _pointer(place), message))

    def warn(self, place: Place, message: str) -> None:
        self.warnings.append(BundleError(self.file, _pointer(place), message))


def _source(data: bytes, sha256: str, now: datetime, report: _Report) -> Source | None:
    """One file's policies, or None when the file's shape is beyond use; errors go to `report`."""
    document = _decode(data, report)
    if document is None:
        return None
    envelope: Envelope | None = None
    entries: list[Any]
    place: Place
    if isinstance(document, list):
        entries, place = document, ()
    elif isinstance(document, dict) and _is_bundle(document):
        envelope = _checked(Envelope, document, (), report)
        listed = document.get("policies")
        entries, place = listed if isinstance(listed, list) else [], ("policies",)
        _check_times(document, now, report)
        if envelope is not None and envelope.kill_switches:
            report.unenforced.append(BundleError(report.file, "/kill_switches", "kill_switches are not enforced by Loopguard"))
    elif isinstance(document, dict) and ("id" in document or "spec" in document):
        policy = _policy(document, (), report)
        return Source(report.file, sha256, (policy,) if policy else ())
    else:
        shapes = 'a bundle {"bundle_version", "policies"}, a policy {"id", "spec"} or a list of policies'
        report.error((), f"must be {shapes}")
        return None
    if not entries:
        report.warn(place, "holds no policy: nothing is guarded")
    policies = [policy for number, entry in enumerate(entries) if (policy := _policy(entry, (*place, number), report))]
    if envelope is None:
        return Source(report.file, sha256, tuple(policies))
    return Source(report.file, sha256, tuple(policies), envelope.bundle_version, envelope.expires_at, envelope.global_shadow)


def _is_bundle(document: Mapping[str, Any]) -> bool:
    """Whether an object is meant as a bundle; a misspelt `policies` must not hide which key is wrong."""
    if "policies" in document:
        return True
    return not {"id", "spec"} & document.keys() and not Envelope.model_fields.keys().isdisjoint(document)


def _policy(entry: Any, place: Place, report: _Report) -> Policy | None:  # noqa: ANN401  # raw JSON
    if report.on_route:
        entry = rules.on_route(entry)
    policy = _checked(Policy, entry, place, report)
    before = len(report.errors)
    if isinstance(entry, dict):
        for where, message in rules.cross_field_errors(entry.get("spec")):
            report.error((*place, "spec", *where), message)
        if isinstance(entry.get("id"), str):
            report.ids.append((entry["id"], report.file, _pointer((*place, "id"))))
    if policy is None or len(report.errors) > before:
        return None
    if not policy.spec.detectors():
        report.warn((*place, "spec"), f"loop_detection is not enabled: policy {policy.id} does nothing")
    elif bundle.UNSUPPORTED_KEYS.issuperset(policy.spec.all_limit_keys()) and policy.spec.keeps_counts():
        report.warn((*place, "spec"), f"no limit_keys: all callers of policy {policy.id} share its counts")
    for below, message in rules.suspicious(policy):
        report.warn((*place, *below), message)
    for below, message in rules.unenforced(policy):
        report.unenforced.append(BundleError(report.file, _pointer((*place, *below)), message))
    return policy


def _check_times(document: Mapping[str, Any], now: datetime, report: _Report) -> None:
    """Refuse what has expired; over the raw JSON, because another field that is wrong must not hide this error."""
    expiries: list[tuple[Place, str, object]] = [(("expires_at",), "the bundle expired", document.get("expires_at"))]
    for name in ("global_shadow", "kill_switch_override"):
        override = document.get(name)
        if isinstance(override, dict) and override.get("enabled") is True:
            expiries.append(((name, "expires_at"), "expired", override.get("expires_at")))
    for place, what, value in expiries:
        moment = _moment(value)
        if moment is not None and moment <= now:
            report.error(place, f"{what} at {moment.isoformat()}; it must be in the future")


def _moment(value: object) -> datetime | None:
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return moment if moment is not None and moment.tzinfo is not None else None


def _duplicate_ids(report: _Report) -> None:
    first: dict[str, str] = {}
    for identity, file, pointer in report.ids:
        if identity in first:
            message = f"duplicate id {identity!r}, also at {first[identity]}; ids are unique across all files"
            report.errors.append(BundleError(file, pointer, message))
        else:
            first[identity] = f"{file} {pointer}"


class _Repeating(dict[str, Any]):
    """A JSON object in which a key stands twice; `repeated` names it."""

    repeated: tuple[str, ...] = ()


def _decode(data: bytes, report: _Report) -> Any:  # noqa: ANN401  # raw JSON
    """The document, or None when it is not JSON; a repeated key, which most parsers drop in silence, is an error."""
    repeating: list[_Repeating] = []
    try:
        document = json.loads(data.decode("utf-8-sig"), object_pairs_hook=partial(_object, repeating), parse_constant=_not_json)
    except (ValueError, RecursionError) as error:
        report.error((), _why_not_json(error))
        return None
    if document is None:
        report.error((), "is null; it must hold a bundle, a policy or a list of policies")
    if repeating:
        for place, item in _walk(document):
            for name in item.repeated if isinstance(item, _Repeating) else ():
                report.error((*place, name), "the key stands more than once in its object; keep one")
    return document


def _object(repeating: list[_Repeating], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    marked = _Repeating(made)
    marked.repeated = tuple(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
    repeating.append(marked)
    return marked


def _why_not_json(error: ValueError | RecursionError) -> str:
    match error:
        case UnicodeDecodeError():
            return f"is not UTF-8 (byte {error.start})"
        case json.JSONDecodeError():
            return f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        case _NotJsonError():
            return f"is not JSON: {error}"
        case RecursionError():
            return "is nested too deeply to be a policy file"
    return "holds a number of thousands of digits; no number of a policy is that long"  # what int() takes is bounded


class _NotJsonError(ValueError):
    """Python's parser takes it, JSON does not know it."""


def _not_json(constant: str) -> NoReturn:
    raise _NotJsonError(f"{constant} is not a JSON number")


def _walk(document: Any) -> Iterator[tuple[Place, Any]]:  # noqa: ANN401  # raw JSON
    """Every value and its place, in the document's order; without recursion, because the parser goes deeper than Python may."""
    waiting: list[tuple[Place, Any]] = [((), document)]
    while waiting:
        place, value = waiting.pop()
        yield place, value
        items: Iterable[tuple[str | int, Any]] = ()
        if isinstance(value, dict):
            items = value.items()
        elif isinstance(value, list):
            items = enumerate(value)
        waiting += reversed([((*place, step), item) for step, item in items])


def _json_files(directory: str) -> Iterator[str]:
    for below in directories(directory):
        with os.scandir(below) as entries:
            yield from (entry.path for entry in entries if _counts(entry, ".json") and not entry.is_dir())


def directories(directory: str, above: frozenset[str] = frozenset()) -> Iterator[str]:
    """The directory and those below it that are read for policies."""
    real = os.path.realpath(directory)
    if real in above:  # a symbolic link that leads back up
        return
    yield directory
    with os.scandir(directory) as entries:
        below = [entry.path for entry in entries if _counts(entry) and entry.is_dir()]
    for path in below:
        yield from directories(path, above | {real})


def _counts(entry: os.DirEntry[str], suffix: str = "") -> bool:
    return entry.name.endswith(suffix) and not entry.name.startswith(".")


def _pointer(place: Place) -> str:
    """A place as a JSON Pointer (RFC 6901)."""
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in place)


def _checked(model: type[Model], value: Any, place: Place, report: _Report) -> Model | None:  # noqa: ANN401
    """`value` as `model`, or None with every error reported."""
    try:
        return model.model_validate(value)
    except ValidationError as failure:
        for error in failure.errors(include_url=False):
            below = _keys(error["loc"])
            report.error((*place, *below), _message(model, error["type"], below, error.get("ctx", {}), error["msg"]))
        return None


def _keys(place: Place) -> Place:
    """A place without what pydantic puts in beside keys: what kind of loop_detection it took, and that a key is wrong."""
    if place[:2] == ("spec", "loop_detection") and place[2:3] in ((bundle.OBJECT,), (bundle.LIST,)):
        place = (*place[:2], *place[3:])
    return place[:-1] if place[-1:] == ("[key]",) and place[-3:-2] == ("tools",) else place


def _message(model: type[BaseModel], kind: str, place: Place, context: Mapping[str, Any], fallback: str) -> str:
    """Our sentence for a pydantic error: the field's name and what would be right."""
    name = str(place[-1]) if place and isinstance(place[-1], str) and place[-1] else "it"
    if place == ("spec", "loop_detection") and kind.startswith("model"):
        return f"{name} must be an object or an array of objects"
    phrase = _PHRASES.get(kind)
    if phrase is not None:
        return phrase(name, context)
    if kind == "extra_forbidden":
        return _unknown_key(model, name, place)
    return fallback


def _expected(name: str, context: Mapping[str, Any]) -> str:
    choices = str(context["expected"]).replace(" or ", ", ").replace("'", "")
    return f"{name} must be {'one of ' if ',' in choices else ''}{choices}"


def _integer(name: str, _: Mapping[str, Any]) -> str:
    kind = "a positive integer" if name in {"window_seconds", "threshold_identical_requests"} else "an integer"
    return f"{name} must be {kind}"


def _greater_than(name: str, context: Mapping[str, Any]) -> str:
    if name.endswith("_seconds"):
        return f"{name} must be a positive integer"
    return f"{name} must be greater than {context['gt']:g}"


def _at_least(name: str, context: Mapping[str, Any]) -> str:
    return f"{name} must be >= {context['ge']}"


def _just(text: str) -> Callable[[str, Mapping[str, Any]], str]:
    return lambda name, _: f"{name} {text}"


_NOTHING_LEFT_OUT = {"loop_detection": ""}
"""What leaving out a field means, where that is not that any value matches."""

_PHRASES: dict[str, Callable[[str, Mapping[str, Any]], str]] = {
    "missing": _just("is required"),
    "literal_error": _expected,
    "greater_than": _greater_than,
    "greater_than_equal": _at_least,
    "less_than_equal": lambda name, context: f"{name} must be <= {context['le']}",
    "bool_type": _just("must be a boolean"),
    "int_type": _integer,
    "float_type": _just("must be a number"),
    "finite_number": _just("must be a finite number"),
    "string_type": _just("must be a string"),
    "string_too_short": _just("must not be empty"),
    "string_too_long": lambda name, context: f"{name} must be at most {context['max_length']} characters",
    "list_type": _just("must be an array"),
    "too_short": lambda name, _: (
        f"{name} must not be an empty array; leave it out{_NOTHING_LEFT_OUT.get(name, ' to match any')}"
    ),
    "dict_type": _just("must be an object"),
    "model_type": _just("must be an object"),
    "model_attributes_type": _just("must be an object"),
    "loopguard": lambda name, context: f"{name} {context['message']}",
}


def _unknown_key(model: type[BaseModel], name: str, place: Place) -> str:
    """Say which key was meant, or where it belongs."""
    objects: dict[str, Sequence[str]] = {
        "the bundle": list(Envelope.model_fields),
        "the policy": list(Policy.model_fields),
        "spec": list(bundle.Spec.model_fields),
        "spec/selector": list(bundle.Selector.model_fields),
        "spec/loop_detection": list(bundle.LoopDetection.model_fields),
        "an entry of tools": list(Tool.model_fields),
        "an entry of bypass": list(bundle.Bypass.model_fields),
        "a rule": list(bundle.Rule.model_fields),
        "an override": list(bundle.Override.model_fields),
    }
    above = [str(step) for step in place[:-1] if isinstance(step, str)]
    own = "the bundle" if model is Envelope else "the policy"
    if "tools" in above:
        own = "an entry of tools"
    elif above:
        here = {
            "selector": "spec/selector",
            "loop_detection": "spec/loop_detection",
            "bypass": "an entry of bypass",
            "spec": "spec",
        }
        own = here.get(above[-1], "an override" if model is Envelope else "a rule")
    started = [key for key in objects[own] if key.startswith(f"{name}_")]
    if len(started) == 1:
        return f"unknown key; did you mean {started[0]}?"
    owner = next((other for other, fields in objects.items() if name in fields and other != own), None)
    if owner is not None:
        return f"unknown key; {name} belongs into {owner}"
    close = difflib.get_close_matches(name, objects[own], n=1)
    if close:
        return f"unknown key; did you mean {close[0]}?"
    return "unknown key; only description and x-... may be added"
