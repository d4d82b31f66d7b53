"""Overrides: what operators have ordered about callers, sessions, loops and tools, each until its end.

A request asks an index in memory, once for each combination of fields that overrides name, whatever their number. Nobody asks
where there are none. Time is an argument, in seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Final, NamedTuple

from extproc.fingerprint import hash_tenant, join_descriptors

RELEASE: Final = "release"
ALLOW: Final = "allow"
BLOCK: Final = "block"

ALL_POLICIES: Final = ""


class Target(NamedTuple):
    """Whom an override is about: all that is named must hold. Names and values of clients are hashes, 16 hex digits.

    Attributes:
        caller: hash of all of the caller's descriptors together, as logs show it; empty for any.
        descriptors: (name, hash of that descriptor alone), sorted; the caller may have others beside them.
        session: hash of its name; empty for any.
        fingerprint: 8 hex digits; empty for any.
        tool: that is called; empty for any.
    """

    caller: str = ""
    descriptors: tuple[tuple[str, str], ...] = ()
    session: str = ""
    fingerprint: str = ""
    tool: str = ""


class Override(NamedTuple):
    """One order; times in seconds since 1970.

    Attributes:
        name: the same for two overrides that differ in nothing but times and words.
        kind: `release`, `allow` or `block`; others are another version's and do nothing here.
        target: whom it is about.
        policy: the id of the one that it is about; empty for all.
        since: when it was given.
        ends: when it ends.
        reason: why.
        who: gave it.
    """

    name: str
    kind: str
    target: Target
    policy: str
    since: float
    ends: float
    reason: str
    who: str

    @property
    def epoch(self) -> str:
        """Of what is counted under a release: no key has it that was in use before."""
        return f"{int(self.since * 1000):x}"


class Seen(NamedTuple):
    """What is known of a request, as far as it is known.

    Attributes:
        values: its descriptors, (name, value).
        caller: hash of all of them.
        session: hash of its name.
        fingerprint: of the request.
        tools: that are called.
    """

    values: Sequence[tuple[str, str]]
    caller: str
    session: str = ""
    fingerprint: str = ""
    tools: Sequence[str] = ()


class _Shape(NamedTuple):
    """The fields that some overrides name."""

    caller: bool
    descriptors: tuple[str, ...]
    session: bool
    fingerprint: bool
    tool: bool


_Key = tuple[str, str, tuple[str, ...], str, str, str]
"""Policy, caller, descriptors' hashes, session, fingerprint, tool; empty where they are not named."""


class Overrides:
    """Those that stand, filed."""

    def __init__(self, overrides: Iterable[Override] = ()) -> None:
        """File them."""
        self._filed: dict[_Shape, dict[_Key, list[Override]]] = {}
        for override in overrides:
            target = override.target
            names = tuple([name for name, _ in target.descriptors])
            shape = _Shape(bool(target.caller), names, bool(target.session), bool(target.fingerprint), bool(target.tool))
            hashes = tuple([value for _, value in target.descriptors])
            key = override.policy, target.caller, hashes, target.session, target.fingerprint, target.tool
            self._filed.setdefault(shape, {}).setdefault(key, []).append(override)

    def __len__(self) -> int:
        """How many combinations of fields are looked up for a request."""
        return len(self._filed)

    def find(self, policy: str, seen: Seen, now: float) -> list[Override]:
        """All that hold for a request under a policy."""
        found: list[Override] = []
        for shape, filed in self._filed.items():
            for key in _list_keys(shape, policy, seen):
                found += [override for override in filed.get(key, ()) if now < override.ends]
        return found


def _list_keys(shape: _Shape, policy: str, seen: Seen) -> Iterator[_Key]:
    """Under which overrides of this shape are filed that hold for a request."""
    if (shape.session and not seen.session) or (shape.fingerprint and not seen.fingerprint):
        return
    hashes = _hash_descriptors(shape.descriptors, seen.values)
    if hashes is None:
        return
    caller = seen.caller if shape.caller else ""
    session = seen.session if shape.session else ""
    fingerprint = seen.fingerprint if shape.fingerprint else ""
    for owner, tool in product((policy, ALL_POLICIES), dict.fromkeys(seen.tools) if shape.tool else ("",)):
        yield owner, caller, hashes, session, fingerprint, tool


def _hash_descriptors(names: Sequence[str], values: Sequence[tuple[str, str]]) -> tuple[str, ...] | None:
    """The hash of each of these descriptors of a request, None where it lacks one."""
    if not names:
        return ()
    known = dict(values)
    if any(name not in known for name in names):
        return None
    return tuple([hash_descriptor(name, known[name]) for name in names])


def hash_descriptor(name: str, value: str) -> str:
    """A descriptor alone, 16 hex digits; a caller that has no other is called the same."""
    return hash_tenant(join_descriptors([(name, value)]))


def find_kind(overrides: Sequence[Override], kind: str) -> Override | None:
    """The newest override of a kind, None for none."""
    found = None
    for override in overrides:
        if override.kind == kind and (found is None or (override.since, override.name) > (found.since, found.name)):
            found = override
    return found


class Standing(NamedTuple):
    """The overrides that one request obeys, from its beginning to its end.

    Attributes:
        overrides: all of them.
        now: when the request came.
    """

    overrides: Overrides
    now: float
