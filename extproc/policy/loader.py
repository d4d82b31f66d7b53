"""From bytes to policies, or to every error at once.

No file is loaded partially, and nothing is dropped silently.

`load` is pure except that it reads files. During a reload, it runs in a worker thread. It checks
policies one by one, so that no call holds the interpreter lock for long.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

from msgspec import MsgspecError
from msgspec.msgpack import encode
from pydantic import BaseModel, ValidationError

from extproc.budgets.rule_keys import list_configs
from extproc.errors import BundleError, BundleErrors
from extproc.objects import Place
from extproc.policy import rules
from extproc.policy.bundle import Envelope, KillSwitch, Override, Policy, read_moment
from extproc.policy.files import read_all
from extproc.policy.messages import describe, explain
from extproc.policy.namespaces import (
    Namespace,
    find_policy_errors,
    find_switch_errors,
    name_namespace,
)
from extproc.policy.outline import Outline, Texts
from extproc.policy.pairings import Claim, find_pairing_errors, make_claim, read_claim
from extproc.policy.strict_json import NotJsonError, decode, write_pointer
from extproc.request.limit_keys import IP_ADDRESS, UNSUPPORTED_KEYS, list_sources
from extproc.sessions.session_limits import SessionLimits, UnnamedLimits

Model = TypeVar("Model", bound=BaseModel)

_MOST_SHAPES = 1_000
_SCHEMAS = ("https://json-schema.org/", "http://json-schema.org/")


@dataclass(frozen=True, slots=True)
class Source:
    """One policy file.

    Attributes:
        policies: in the file's order; empty once they are freed.
        bundle_version: None for a single policy or a list.
        expires_at: when the bundle expires.
        shadow_until: when the file's `global_shadow` ends; None if it is off.
        kill_switches: with their numbers in the file; empty once they are freed.
        override_until: when the file's `kill_switch_override` ends; None if it is off.
        namespace: the name of the file's namespaces; empty if it has none.
        outlines: of the policies; never freed.
    """

    file: str
    sha256: str
    policies: list[Policy]
    bundle_version: float | None = None
    expires_at: datetime | None = None
    shadow_until: datetime | None = None
    kill_switches: list[tuple[int, KillSwitch]] = field(default_factory=list)
    override_until: datetime | None = None
    namespace: str = ""
    outlines: Sequence[Outline] = ()

    def forces_shadow(self, now: datetime) -> bool:
        """Whether `global_shadow` applies at `now`."""
        return self.shadow_until is not None and now < self.shadow_until

    def overrides_switches(self, now: datetime) -> bool:
        """Whether `kill_switch_override` applies at `now`."""
        return self.override_until is not None and now < self.override_until


@dataclass(frozen=True, slots=True)
class Unenforced(BundleError):
    """An unsupported part of a drop-in bundle: a key of a policy's spec, or of the bundle."""

    policy: str
    part: str


@dataclass(frozen=True, slots=True)
class PolicySet:
    """The result of a load, with messages for the user.

    Attributes:
        warnings: about valid parts that may not be intended.
        unenforced: parts of a drop-in bundle that this version does not enforce.
        scrap: temporary objects of parsing, to free together with the policies. If they were freed
            earlier, new objects would fill the gaps and keep the memory around them allocated.
        notes: the effects of defaults; each message once.
    """

    sources: tuple[Source, ...]
    warnings: tuple[BundleError, ...]
    unenforced: tuple[Unenforced, ...]
    scrap: list[object]
    notes: tuple[BundleError, ...] = ()

    def list_acting(self) -> list[Policy]:
        """The enabled policies."""
        return [
            policy
            for source in self.sources
            for policy in source.policies
            if policy.spec.is_enabled()
        ]

    def list_session_limits(self) -> list[SessionLimits | UnnamedLimits]:
        """The session limits of enabled policies."""
        specs = [policy.spec for policy in self.list_acting()]
        return [
            limits
            for spec in specs
            for limits in (spec.session_limits, spec.unnamed_limits)
            if limits is not None
        ]

    def needs_answers(self) -> bool:
        """Whether an enabled policy depends on the upstream's responses."""
        loops = [loop for policy in self.list_acting() for _, loop in policy.spec.detectors()]
        limits = self.list_session_limits()
        budgets = [
            rule.needs_answers()
            for policy in self.list_acting()
            for rule in policy.spec.list_budget_rules()
        ]
        return any(
            [
                *[limit.needs_answers() for limit in limits],
                *[loop.needs_entries for loop in loops],
                *budgets,
            ]
        )

    def needs_usage(self) -> bool:
        """Whether an enabled policy depends on the tokens that responses report."""
        rules = [
            rule.needs_answers()
            for policy in self.list_acting()
            for rule in policy.spec.list_budget_rules()
        ]
        return any(
            [
                *[limits.max_cost_per_session is not None for limits in self.list_session_limits()],
                *rules,
            ]
        )

    def list_steering(self) -> list[str]:
        """The ids of enforcing policies that add notes to requests."""
        acting = [policy for policy in self.list_acting() if policy.spec.mode == "enforce"]
        return [
            policy.id
            for policy in acting
            if any(loop.adds_notes for _, loop in policy.spec.detectors())
        ]

    def require_enforced(self) -> None:
        """Raise BundleErrors if a part of a bundle is not enforced: no limit is lost silently."""
        if self.unenforced:
            raise BundleErrors(refuse_unenforced(self.unenforced))


def refuse_unenforced(parts: Iterable[Unenforced]) -> list[BundleError]:
    """Convert unenforced parts to errors."""
    hint = "remove it, or start with --allow-unenforced"
    return [replace(part, message=f"{part.message}; {hint}") for part in parts]


def load(paths: Iterable[str], now: datetime) -> PolicySet:
    """Read and check every policy file below `paths` as of `now`.

    Raises BundleErrors with every error of every file.
    """
    files, errors = read_all(paths)
    try:
        policies = parse(files, now)
    except BundleErrors as error:
        raise BundleErrors([*errors, *error.errors]) from None
    if errors:
        raise BundleErrors(errors)
    return policies


def parse(
    files: Mapping[str, bytes],
    now: datetime,
    *,
    on_route: bool = False,
    namespaces: Sequence[Namespace] = (),
) -> PolicySet:
    """Check the contents of policy files; otherwise like `load`.

    A policy that comes with a route (`on_route`) applies to all of the route's requests, unless it
    names a path or a route.
    """
    # Hashing releases the interpreter lock for a moment. If it ran between files, an event loop
    # that waits for the lock would wake, find it taken and wait another 5 ms, again and again.
    hashes = {file: hashlib.sha256(data).hexdigest() for file, data in files.items()}
    parsed = [
        parse_file(file, data, hashes[file], now, on_route=on_route, namespaces=namespaces)
        for file, data in files.items()
    ]
    errors = [error for file in parsed for error in file.errors]
    errors += find_duplicates(parsed)
    if not on_route:
        errors += find_unpaired(parsed)
    if errors:
        raise BundleErrors(errors)
    return join(parsed)


def parse_file(  # noqa: PLR0913  # everything that decides the result
    file: str,
    data: bytes,
    sha256: str,
    now: datetime,
    *,
    on_route: bool = False,
    namespaces: Sequence[Namespace] = (),
) -> ParsedFile:
    """Check one file on its own."""
    parsed = ParsedFile(file, namespaces, on_route=on_route)
    source = _parse_file(data, sha256, now, parsed)
    parsed.shapes = {}
    if source is not None:
        shared: dict[Texts, Texts] = {}
        outlines = [Outline(policy, shared) for policy in source.policies]
        parsed.source = replace(source, namespace=parsed.namespace, outlines=outlines)
    return parsed


def join(parsed: Sequence[ParsedFile]) -> PolicySet:
    """Combine files without errors. Each file's warnings and notes are returned once."""
    notes: dict[str, tuple[BundleError, int]] = {}
    for file in parsed:
        for message, (first, policies) in file.notes.items():
            known, number = notes.get(message, (first, 0))
            notes[message] = known, number + policies
    warnings = tuple([warning for file in parsed for warning in file.warnings])
    return PolicySet(
        tuple(file.source for file in parsed if file.source is not None),
        warnings,
        tuple(part for file in parsed for part in file.unenforced),
        [part for file in parsed for part in file.shed()],
        tuple(
            replace(first, message=f"{first.message} (and {policies - 1} more)")
            if policies > 1
            else first
            for first, policies in notes.values()
        ),
    )


def find_duplicates(
    parsed: Iterable[ParsedFile], owners: Callable[[str], str] | None = None
) -> list[BundleError]:
    """An error for each duplicate id.

    The first policy keeps the id, unless `owners` returns the id's file; empty if it has none.
    """
    parsed = list(parsed)
    names = [name for file in parsed for name in file.list_names()]
    if len(set(names)) == len(names):  # almost always
        return []
    places: dict[str, tuple[str, str]] = {}
    again: dict[str, list[tuple[str, str]]] = {}
    for file in parsed:
        for identity, pointer in file.list_ids():
            if identity in places:
                again.setdefault(identity, [places[identity]]).append((file.file, pointer))
            else:
                places[identity] = file.file, pointer
    errors = []
    for identity, found in again.items():
        owner = owners(identity) if owners is not None else ""
        kept = next((place for place in found if place[0] == owner), found[0])
        for file_name, pointer in found:
            if (file_name, pointer) != kept:
                message = (
                    f"duplicate id {identity!r}, also at {kept[0]} {kept[1]}; ids are "
                    "unique across all files"
                )
                errors.append(BundleError(file_name, pointer, message))
    return errors


def find_unpaired(parsed: Iterable[ParsedFile]) -> list[BundleError]:
    """An error for each policy whose `canary_of` cannot be compared with."""
    parsed = list(parsed)
    claims = [claim for file in parsed for claim in file.list_claims()]
    if not any(claim is not None and claim.canary_of is not None for claim in claims):
        return []
    every = [(file, number) for file in parsed for number in range(file.count())]
    return [
        BundleError(file.file, write_pointer((*file.locate(number), "spec", "canary_of")), message)
        for (file, number), message in [
            (every[place], message) for place, message in find_pairing_errors(claims)
        ]
    ]


def list_raw(data: bytes) -> list[Any]:
    """The raw policies of a valid policy file."""
    document = decode(data).document
    if isinstance(document, dict):
        return cast("list[Any]", document["policies"]) if _is_bundle(document) else [document]
    return cast("list[Any]", document)


def locate_raw(data: bytes) -> dict[str, tuple[str, Any]]:
    """The raw policies by id, each with its JSON Pointer."""
    document = decode(data).document
    if isinstance(document, dict) and not _is_bundle(document):
        return {document["id"]: ("", document)}
    start = "/policies" if isinstance(document, dict) else ""
    return {
        policy["id"]: (f"{start}/{place}", policy) for place, policy in enumerate(list_raw(data))
    }


class ParsedFile:
    """The result of parsing one file.

    Attributes:
        source: its policies; None if the file's structure is unknown.
        place: of the list of policies; None for a single policy.
        ids: ids and their pointers, including those of invalid policies.
        entries: raw policies.
        shapes: notes on policies without other messages, by the result of `_encode_shape`.
            Generated files repeat a few shapes thousands of times.
    """

    def __init__(
        self, file: str, namespaces: Sequence[Namespace] = (), *, on_route: bool = False
    ) -> None:
        self.file = file
        self.namespaces = namespaces
        self.namespace = name_namespace(file, namespaces)
        self.on_route = on_route
        self.source: Source | None = None
        self.place: Place | None = None
        self.errors: list[BundleError] = []
        self.warnings: list[BundleError] = []
        self.unenforced: list[Unenforced] = []
        self.notes: dict[
            str, tuple[BundleError, int]
        ] = {}  # message to first place, number of policies
        self.ids: list[tuple[str, str]] = []
        self.entries: list[object] = []
        self.shapes: dict[bytes | None, list[tuple[Place, str]]] = {}

    def list_ids(self) -> list[tuple[str, str]]:
        """Ids and their pointers, including those of invalid policies."""
        if self.errors or self.source is None:
            return self.ids
        return [
            (policy.id, write_pointer((*self.locate(number), "id")))
            for number, policy in enumerate(self.source.outlines)
        ]

    def list_names(self) -> list[str]:
        """Ids, including those of invalid policies."""
        if self.errors or self.source is None:
            return [name for name, _ in self.ids]
        return [policy.id for policy in self.source.outlines]

    def count(self) -> int:
        """The number of policies, including invalid ones."""
        return (
            len(self.entries) if self.errors or self.source is None else len(self.source.outlines)
        )

    def list_claims(self) -> list[Claim | None]:
        """The `Claim` of each policy, including invalid ones."""
        if self.errors or self.source is None:
            return [read_claim(entry, self.namespace) for entry in self.entries]
        return [make_claim(policy, self.namespace) for policy in self.source.outlines]

    def locate(self, number: int) -> Place:
        """The place of a policy."""
        return () if self.place is None else (*self.place, number)

    def shed(self) -> list[object]:
        """Return objects that the compiled file does not need (`PolicySet.scrap`), and messages."""
        scrap: list[object] = [*self.entries, *self.ids, *self.warnings]
        self.entries, self.ids, self.warnings, self.notes = [], [], [], {}
        return scrap

    def refuse(self, place: Place, message: str) -> None:
        """Report an error."""
        self.errors.append(BundleError(self.file, write_pointer(place), message))

    def refuse_all(self, place: Place, found: Iterable[tuple[Place, str]]) -> None:
        """Report errors below a place."""
        self.errors += [
            BundleError(self.file, write_pointer((*place, *below)), message)
            for below, message in found
        ]

    def warn(self, place: Place, message: str) -> None:
        """Report a warning."""
        self.warnings.append(BundleError(self.file, write_pointer(place), message))

    def warn_all(self, place: Place, found: Iterable[tuple[Place, str]]) -> None:
        """Report warnings below a place."""
        self.warnings += [
            BundleError(self.file, write_pointer((*place, *below)), message)
            for below, message in found
        ]

    def disclaim(self, place: Place, message: str, part: str, policy: str = "") -> None:
        """Report a part that is not enforced."""
        self.unenforced.append(Unenforced(self.file, write_pointer(place), message, policy, part))

    def note(self, place: Place, message: str) -> None:
        """Report the effect of a default, once for all policies."""
        first, policies = self.notes.get(message) or (
            BundleError(self.file, write_pointer(place), message),
            0,
        )
        self.notes[message] = first, policies + 1


def _parse_file(data: bytes, sha256: str, now: datetime, report: ParsedFile) -> Source | None:
    """Parse one file; None if its structure is unknown. Errors go to `report`."""
    document = _decode(data, report)
    if isinstance(document, list):
        return Source(report.file, sha256, _parse_policies(document, (), report))
    if isinstance(document, dict):
        if _is_bundle(document):
            return _parse_bundle(document, sha256, now, report)
        if "id" in document or "spec" in document:
            policy = _parse_policy(document, (), report)
            return Source(report.file, sha256, [policy] if policy else [])
        # The output of `loopguard schema`, saved beside the policies
        if str(document.get("$schema", "")).startswith(_SCHEMAS):
            report.note((), "is a JSON Schema, so it has no policies")
            return Source(report.file, sha256, [])
    if document is not None:
        shapes = (
            'a bundle {"bundle_version", "policies"}, a policy {"id", "spec"} or a list of policies'
        )
        report.refuse((), f"must be {shapes}, not {describe(document)}")
    return None


def _decode(data: bytes, report: ParsedFile) -> Any:  # noqa: ANN401  # raw JSON
    """The document, or None. Repeated keys, which most parsers ignore, are errors."""
    try:
        document, repeated = decode(data)
    except NotJsonError as error:
        report.refuse((), str(error))
        return None
    if document is None:
        report.refuse((), "is null; it must hold a bundle, a policy or a list of policies")
    for place in repeated:
        report.refuse(place, "duplicate key; keep one")
    return document


def _is_bundle(document: Mapping[str, Any]) -> bool:
    """Whether an object is meant as a bundle.

    Even if `policies` is misspelt, the errors must be about a bundle.
    """
    if "policies" in document:
        return True
    return not {"id", "spec"} & document.keys() and not Envelope.model_fields.keys().isdisjoint(
        document
    )


def _parse_bundle(
    document: Mapping[str, Any], sha256: str, now: datetime, report: ParsedFile
) -> Source:
    envelope = _validate(Envelope, document, (), report)
    _check_times(document, now, report)
    # The model reports other values than arrays
    below = [document.get(key) for key in ("kill_switches", "policies")]
    entries, raw = [value if isinstance(value, list) else [] for value in below]
    switches = _parse_kill_switches(entries, now, report)
    policies = _parse_policies(raw, ("policies",), report)
    if envelope is None:
        return Source(report.file, sha256, policies)
    return Source(
        report.file,
        sha256,
        policies,
        envelope.bundle_version,
        envelope.expires_at,
        _find_end(envelope.global_shadow),
        switches,
        _find_end(envelope.kill_switch_override),
    )


def _parse_kill_switches(
    entries: list[Any], now: datetime, report: ParsedFile
) -> list[tuple[int, KillSwitch]]:
    switches = []
    for number, entry in enumerate(entries):
        place: Place = ("kill_switches", number)
        switch = _validate(KillSwitch, entry, place, report)
        if switch is not None:
            report.refuse_all(place, find_switch_errors(report.file, switch, report.namespaces))
            if _remark_on_switch(switch, place, now, report):
                switches.append((number, switch))
    return switches


def _remark_on_switch(switch: KillSwitch, place: Place, now: datetime, report: ParsedFile) -> bool:
    """Report warnings about a valid kill switch; returns whether it can have an effect."""
    key, route, end = switch.scope_key, switch.route, switch.expires_at
    if key.startswith(("ip:", "ua:")) and key != IP_ADDRESS:
        why = (
            f"the descriptor {key} cannot be derived by Loopguard, so this kill switch stops no one"
        )
        report.disclaim(place, why, "kill_switches")
        return False
    if end is not None and end <= now:
        report.warn(
            (*place, "expires_at"), f"expired at {end.isoformat()}: this kill switch does nothing"
        )
        return False
    if route is not None and (route[1:].endswith("/") or "*" in route):
        report.warn(
            (*place, "route"),
            f"{route!r} is compared with the whole path of a request; it is not a prefix",
        )
    return True


def _find_end(override: Override | None) -> datetime | None:
    """When an override ends; None if it is off."""
    if override is None or not override.enabled:
        return None
    return override.expires_at or datetime.max.replace(tzinfo=UTC)


def _parse_policies(entries: list[Any], place: Place, report: ParsedFile) -> list[Policy]:
    report.place = place
    if not entries:
        report.warn(place, "has no policies: nothing is guarded")
    return [
        policy
        for number, entry in enumerate(entries)
        if (policy := _parse_policy(entry, (*place, number), report))
    ]


# Raw JSON
def _parse_policy(entry: Any, place: Place, report: ParsedFile) -> Policy | None:  # noqa: ANN401
    report.entries.append(entry)
    if report.on_route:
        entry = rules.anchor_on_route(entry)
    policy = _validate(Policy, entry, place, report)
    before = len(report.errors)
    shape = _encode_shape(entry["spec"]) if policy is not None else None
    if isinstance(entry, dict):
        _find_errors(entry.get("spec"), shape, (*place, "spec"), report)
        if isinstance(entry.get("id"), str):
            report.ids.append((entry["id"], write_pointer((*place, "id"))))
    if policy is not None:
        report.refuse_all(place, find_policy_errors(report.file, policy, report.namespaces))
    if policy is None or len(report.errors) > before:
        return None
    for below, message in _find_notes(policy, shape, place, report):
        report.note((*place, *below), message)
    report.warn_all(
        place, [*rules.find_suspicious_matches(policy), *rules.find_public_callers(policy)]
    )
    return policy


def _find_errors(spec: Any, shape: bytes | None, place: Place, report: ParsedFile) -> None:  # noqa: ANN401  # raw JSON
    """Report errors beyond the models' own. A known shape can only have them in its selector."""
    report.refuse_all(place, rules.find_selector_errors(spec))
    if shape in report.shapes:
        return
    report.refuse_all(place, rules.find_errors(spec))
    for where, model, config in list_configs(spec) if isinstance(spec, dict) else ():
        _validate(model, config, (*place, *where), report)


def _find_notes(
    policy: Policy, shape: bytes | None, place: Place, report: ParsedFile
) -> list[tuple[Place, str]]:
    """The notes on a valid policy; warnings are reported.

    Shapes without warnings are cached, because warnings name the policy.
    """
    known = report.shapes.get(shape)
    if known is not None:
        return known
    before = len(report.warnings) + len(report.unenforced)
    notes = _remark(policy, place, report)
    said = len(report.warnings) + len(report.unenforced) > before
    if shape is not None and not said and len(report.shapes) < _MOST_SHAPES:
        report.shapes[shape] = notes
    return notes


def _encode_shape(spec: Any) -> bytes | None:  # noqa: ANN401  # raw JSON
    """A value that is equal for policies equal but for id and selector; None if not encodable.

    JSON would not do, because msgspec writes infinite numbers as null.
    """
    try:
        return encode({key: value for key, value in spec.items() if key != "selector"})
    except (AttributeError, MsgspecError, OverflowError, RecursionError, TypeError, ValueError):
        return None


def _remark(policy: Policy, place: Place, report: ParsedFile) -> list[tuple[Place, str]]:
    """Report warnings about a valid policy, except its selector, and return its notes."""
    if not policy.spec.is_enabled():
        report.warn(
            (*place, "spec"), f"loop_detection is not enabled: policy {policy.id} does nothing"
        )
    elif (
        UNSUPPORTED_KEYS.issuperset(list_sources(policy.spec.all_limit_keys()))
        and policy.spec.keeps_counts()
    ):
        report.warn(
            (*place, "spec"), f"no limit_keys: all callers of policy {policy.id} share its counts"
        )
    report.warn_all(place, rules.find_suspicious(policy))
    for below, message in rules.find_unenforced(policy):
        _, part, *_ = below
        report.disclaim((*place, *below), message, str(part), policy.id)
    return list(rules.explain_defaults(policy))


def _check_times(document: Mapping[str, Any], now: datetime, report: ParsedFile) -> None:
    """Refuse an expired bundle.

    This reads raw JSON, so that errors in other fields do not hide it.
    """
    expiries: list[tuple[Place, str, object]] = [
        (("expires_at",), "the bundle expired", document.get("expires_at"))
    ]
    for name in ("global_shadow", "kill_switch_override"):
        override = document.get(name)
        if isinstance(override, dict) and override.get("enabled") is True:
            expiries.append(((name, "expires_at"), "expired", override.get("expires_at")))
    for place, what, value in expiries:
        moment = read_moment(value)  # the models report other values
        if moment is not None and moment <= now:
            report.refuse(place, f"{what} at {moment.isoformat()}; it must be in the future")


def _validate(model: type[Model], value: Any, place: Place, report: ParsedFile) -> Model | None:  # noqa: ANN401  # raw JSON
    """Validate `value`; None if it has errors, which are reported."""
    try:
        return model.model_validate(value)
    except ValidationError as failure:
        report.refuse_all(place, explain(model, failure))
        return None
