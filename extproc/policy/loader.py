"""Bytes to policies, or every error at once: nothing is half-loaded, nothing is silently dropped.

`load` is pure but for reading the files; it runs in a worker thread during a reload, so it checks policies one by one: no single
call keeps the interpreter lock for long.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from extproc.errors import BundleError, BundleErrors
from extproc.policy import bundle
from extproc.policy.bundle import Envelope, Override, Policy

Place = tuple[str | int, ...]
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
                files[file] = Path(file).read_bytes()
            except OSError as error:
                errors.append(BundleError(file, "", f"cannot be read: {error.strerror}"))
    if errors:
        raise BundleErrors(errors)
    return files


def load(paths: Iterable[str], now: datetime) -> PolicySet:
    """Read and check every policy file below `paths`; `now` is compared with each `expires_at`.

    Raises:
        BundleErrors: with every error of every file.
    """
    return parse(read_files(paths), now)


def parse(files: Mapping[str, bytes], now: datetime) -> PolicySet:
    """Check policy files that have been read already; otherwise as `load`."""
    report = _Report()
    sources = []
    for file, data in files.items():
        report.file = file
        source = _source(data, now, report)
        if source is not None:
            sources.append(source)
    _duplicate_ids(report)
    if report.errors:
        raise BundleErrors(report.errors)
    return PolicySet(tuple(sources), tuple(report.warnings), tuple(report.unenforced))


class _Report:
    """Collects what is found in one file after the other."""

    def __init__(self) -> None:
        self.file = ""
        self.errors: list[BundleError] = []
        self.warnings: list[BundleError] = []
        self.unenforced: list[BundleError] = []
        self.ids: list[tuple[str, str, str]] = []  # (id, file, pointer), of broken policies too

    def error(self, place: Place, message: str) -> None:
        self.errors.append(BundleError(self.file, _pointer(place), message))

    def warn(self, place: Place, message: str) -> None:
        self.warnings.append(BundleError(self.file, _pointer(place), message))


def _source(data: bytes, now: datetime, report: _Report) -> Source | None:
    """One file's policies, or None when the file's shape is beyond use; errors go to `report`."""
    document = _decode(data, report)
    if document is None:
        return None
    envelope: Envelope | None = None
    entries: list[Any]
    place: Place
    if isinstance(document, list):
        entries, place = document, ()
    elif isinstance(document, dict) and "policies" in document:
        envelope = _checked(Envelope, document, (), report)
        listed = document["policies"]
        entries, place = listed if isinstance(listed, list) else [], ("policies",)
        _check_times(document, envelope, now, report)
        if envelope is not None and envelope.kill_switches:
            report.unenforced.append(BundleError(report.file, "/kill_switches", "kill_switches are not enforced by Loopguard"))
    elif isinstance(document, dict) and ("id" in document or "spec" in document):
        policy = _policy(document, (), report)
        return Source(report.file, hashlib.sha256(data).hexdigest(), (policy,) if policy else ())
    else:
        shapes = 'a bundle {"bundle_version", "policies"}, a policy {"id", "spec"} or a list of policies'
        report.error((), f"must be {shapes}")
        return None
    if not entries:
        report.warn(place, "holds no policy")
    policies = [policy for number, entry in enumerate(entries) if (policy := _policy(entry, (*place, number), report))]
    digest = hashlib.sha256(data).hexdigest()
    if envelope is None:
        return Source(report.file, digest, tuple(policies))
    return Source(report.file, digest, tuple(policies), envelope.bundle_version, envelope.expires_at, envelope.global_shadow)


def _policy(entry: Any, place: Place, report: _Report) -> Policy | None:  # noqa: ANN401  # raw JSON
    policy = _checked(Policy, entry, place, report)
    before = len(report.errors)
    if isinstance(entry, dict):
        for where, message in bundle.cross_field_errors(entry.get("spec")):
            report.error((*place, "spec", *where), message)
        if isinstance(entry.get("id"), str):
            report.ids.append((entry["id"], report.file, _pointer((*place, "id"))))
    if policy is None or len(report.errors) > before:
        return None
    loop = policy.spec.loop_detection
    if loop is None or not loop.enabled:
        report.warn((*place, "spec"), f"loop_detection is not enabled: policy {policy.id} does nothing")
    elif not policy.spec.all_limit_keys():
        report.warn((*place, "spec"), f"no limit_keys: all callers of policy {policy.id} share its counts")
    for below, message in bundle.unenforced(policy):
        report.unenforced.append(BundleError(report.file, _pointer((*place, *below)), message))
    return policy


def _check_times(document: Mapping[str, Any], envelope: Envelope | None, now: datetime, report: _Report) -> None:
    """Refuse an expired bundle; `envelope` is None when a field of it is wrong, which must not hide this error."""
    expiries: list[tuple[Place, str, datetime | None]]
    if envelope is not None:
        overrides = [("global_shadow", envelope.global_shadow), ("kill_switch_override", envelope.kill_switch_override)]
        expiries = [
            (("expires_at",), "the bundle expired", envelope.expires_at),
            *(((name, "expires_at"), "expired", item.expires_at) for name, item in overrides if item and item.enabled),
        ]
    else:
        expiries = [(("expires_at",), "the bundle expired", _moment(document.get("expires_at")))]
    for place, what, moment in expiries:
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
    """The document, or None when it is not JSON or repeats a key (which most parsers would drop in silence)."""
    found: list[_Repeating] = []

    def keep(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) == len(pairs):
            return made
        names = [name for name, _ in pairs]
        repeating = _Repeating(made)
        repeating.repeated = tuple(name for name in made if names.count(name) > 1)
        found.append(repeating)
        return repeating

    try:
        document = json.loads(data.decode("utf-8-sig"), object_pairs_hook=keep, parse_constant=_not_json)
    except UnicodeDecodeError as error:
        report.error((), f"is not UTF-8 (byte {error.start})")
        return None
    except json.JSONDecodeError as error:
        report.error((), f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}")
        return None
    except ValueError as error:
        report.error((), f"is not JSON: {error}")
        return None
    except RecursionError:
        report.error((), "is nested too deeply to be a policy file")
        return None
    if document is None:
        report.error((), "is null; it must hold a bundle, a policy or a list of policies")
    if not found:
        return document
    for place, item in _walk(document, ()):
        if isinstance(item, _Repeating):
            for name in item.repeated:
                report.error((*place, name), "the key stands more than once in its object; keep one")
    return None


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _walk(value: Any, place: Place) -> Iterator[tuple[Place, Any]]:  # noqa: ANN401  # raw JSON
    yield place, value
    items: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for step, item in items:
        yield from _walk(item, (*place, step))


def _json_files(directory: str, seen: frozenset[str] = frozenset()) -> Iterator[str]:
    real = os.path.realpath(directory)
    if real in seen:  # a symbolic link that leads back up
        return
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _json_files(entry.path, seen | {real})
            elif entry.name.endswith(".json"):
                yield entry.path


def _pointer(place: Place) -> str:
    """A place as a JSON Pointer (RFC 6901)."""
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in place)


def _checked(model: type[Model], value: Any, place: Place, report: _Report) -> Model | None:  # noqa: ANN401
    """`value` as `model`, or None with every error reported."""
    try:
        return model.model_validate(value)
    except ValidationError as failure:
        for error in failure.errors(include_url=False):
            where = (*place, *error["loc"])
            report.error(where, _message(model, error["type"], error["loc"], error.get("ctx", {}), error["msg"]))
        return None


def _message(model: type[BaseModel], kind: str, place: Place, context: Mapping[str, Any], fallback: str) -> str:
    """Our sentence for a pydantic error: the field's name and what would be right."""
    name = str(place[-1]) if place and isinstance(place[-1], str) else "it"
    phrase = _PHRASES.get(kind)
    if phrase is not None:
        return phrase(name, context)
    if kind == "extra_forbidden":
        return _unknown_key(model, name, place)
    return fallback


def _expected(name: str, context: Mapping[str, Any]) -> str:
    return f"{name} must be one of {str(context['expected']).replace(' or ', ', ').replace(chr(39), '')}"


def _greater_than(name: str, context: Mapping[str, Any]) -> str:
    if name.endswith("_seconds"):
        return f"{name} must be a positive integer"
    return f"{name} must be greater than {context['gt']:g}"


def _at_least(name: str, context: Mapping[str, Any]) -> str:
    return f"{name} must be >= {context['ge']}"


def _just(text: str) -> Callable[[str, Mapping[str, Any]], str]:
    return lambda name, _: f"{name} {text}"


_PHRASES: dict[str, Callable[[str, Mapping[str, Any]], str]] = {
    "missing": _just("is required"),
    "literal_error": _expected,
    "greater_than": _greater_than,
    "greater_than_equal": _at_least,
    "less_than_equal": lambda name, context: f"{name} must be <= {context['le']}",
    "bool_type": _just("must be a boolean"),
    "int_type": _just("must be an integer"),
    "int_from_float": _just("must be an integer"),
    "float_type": _just("must be a number"),
    "finite_number": _just("must be a finite number"),
    "string_type": _just("must be a string"),
    "string_too_short": _just("must not be empty"),
    "string_too_long": lambda name, context: f"{name} must be at most {context['max_length']} characters",
    "list_type": _just("must be an array"),
    "too_short": _just("must not be an empty array; leave it out to match any"),
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
    }
    here = {"selector": "spec/selector", "loop_detection": "spec/loop_detection", "spec": "spec"}
    parent = place[-2] if len(place) > 1 else None
    own = here.get(str(parent), "the bundle" if model is Envelope else "the policy")
    owner = next((other for other, fields in objects.items() if name in fields and other != own), None)
    if owner is not None:
        return f"unknown key; {name} belongs into {owner}"
    close = difflib.get_close_matches(name, objects[own], n=1)
    if close:
        return f"unknown key; did you mean {close[0]}?"
    return "unknown key; only description and x-... may be added"
