"""A replica's counts of a canary pair as a document, and merging the documents of all replicas."""
# interpreted: tells operators, not requests

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable
from operator import attrgetter
from typing import Annotated, Any

import msgspec

from extproc.errors import LoopguardError
from extproc.operator.after_notes import AFTER, ARMS
from extproc.operator.canary.pairs import POLICIES, REFUSALS, SHOWN, VERDICTS, Pair, name_after
from extproc.operator.rows import COUNTS, MAX, MIN, SUM, Row, join, merge
from extproc.operator.sketch import HASH_DIGITS, Sketch
from extproc.policy.pairings import Pairing

_AFTER = tuple(name_after(who, arm, after) for who in POLICIES for arm in ARMS for after in AFTER)
_COUNTED = (*VERDICTS, *REFUSALS, "uncompared", "refused")
_COUNTS = (*_COUNTED, *_AFTER)
_SKETCHES = ("tenants", "refused_tenants", "refused_sessions", "refused_loops")
_ACTING = "acting_tenants"
"""A sketch that only candidates with `enforce_percent` have."""

_Moment = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
"""Seconds since 1970, up to the year 5138."""


class Disagreement(Row):
    """A kind of request about which two policies disagree.

    Attributes:
        about: `extra` or `missed` for refusals; `only_live` or `only_candidate` for other actions.
        path: the requests' path, without query.
        tenant: hash of the caller.
        tool: the repeated tools, if the detector considers tools.
        over: maximum overcount of `count`.
    """

    about: str
    method: str
    path: str
    tenant: str
    detector: str
    tool: str
    count: Annotated[int, SUM]
    over: Annotated[int, SUM]

    name = property(attrgetter("about", "method", "path", "tenant", "detector", "tool"))


def _join_sketches(one: State, other: State, _: str) -> dict[str, str]:
    both = {
        name: [*one.read_sketch(name).list_kept(), *other.read_sketch(name).list_kept()]
        for name in _list_sketches(one.percent)
    }
    return {name: _write_sketch(Sketch(kept)) for name, kept in both.items()}


_MOST_FREQUENT = join(
    lambda one, other: sorted(merge([*one, *other]), key=lambda entry: -entry.count)[:SHOWN]
)


class State(Row):
    """The counts of a pair. Other versions may have additional ones.

    Attributes:
        identity: see `Pairing`.
        since: when the first request could be compared, in seconds since 1970.
        counts: counts by name; see `Pair`.
        sketches: sketches by name, as base64 of 8 bytes per hash.
        percent: see `Pairing`.
    """

    live: str
    candidate: str
    identity: str
    since: Annotated[_Moment, MIN]
    until: Annotated[_Moment, MAX]
    counts: Annotated[dict[str, int], COUNTS]
    sketches: Annotated[dict[str, str], _join_sketches]
    disagreements: Annotated[list[Disagreement], _MOST_FREQUENT]
    percent: int = 0

    name = property(attrgetter("identity"))

    @property
    def pairing(self) -> Pairing:
        """The pair of policies."""
        return Pairing(self.live, self.candidate, self.identity, self.percent)

    @property
    def compared(self) -> int:
        """The number of requests that the candidate has counted."""
        return sum(self.counts[name] for name in VERDICTS)

    def read_sketch(self, name: str) -> Sketch:
        """One of the sketches."""
        digits = b64decode(self.sketches.get(name, "")).hex()
        return Sketch(digits[at : at + HASH_DIGITS] for at in range(0, len(digits), HASH_DIGITS))


def read_state(pair: Pair, now: float) -> State:
    """The counts of a pair as of `now`, in seconds since 1970."""
    counts = (
        {name: getattr(pair, name) for name in _COUNTED}
        | dict.fromkeys(_AFTER, 0)
        | pair.after_notes
    )
    sketches = {
        name: _write_sketch(getattr(pair, name)) for name in _list_sketches(pair.pairing.percent)
    }
    disagreements = [
        Disagreement(*kind, count, over) for kind, count, over in pair.disagreements.list_most()
    ]
    names, percent = pair.pairing[:-1], pair.pairing.percent
    return State(*names, pair.since, now, counts, sketches, disagreements, percent)


def _list_sketches(percent: int) -> tuple[str, ...]:
    return (*_SKETCHES, _ACTING) if percent else _SKETCHES


def _write_sketch(sketch: Sketch) -> str:
    return b64encode(bytes.fromhex("".join(sketch.list_kept()))).decode()


def encode_state(state: State) -> bytes:
    """Encode counts as a document."""
    return msgspec.json.encode(state)


def decode_state(document: bytes) -> State:
    """Decode a replica's document; raises LoopguardError if it is invalid for this version."""
    try:
        return convert_state(msgspec.json.decode(document))
    except msgspec.DecodeError as error:
        raise LoopguardError(f"not the state of a canary: {error}") from None


def convert_state(document: Any) -> State:  # noqa: ANN401  # decoded JSON
    """Like `decode_state`, for a document that was decoded from JSON."""
    try:
        state = msgspec.convert(document, State)
        for name in (*_SKETCHES, _ACTING):
            state.read_sketch(name)
    except (msgspec.MsgspecError, ValueError) as error:
        raise LoopguardError(f"not the state of a canary: {error}") from None
    return msgspec.structs.replace(
        state, counts={name: max(0, state.counts.get(name, 0)) for name in _COUNTS}
    )


def merge_states(states: Iterable[State]) -> State:
    """Merge the counts of one or more replicas for the same pair."""
    (merged,) = merge(states)
    return merged
