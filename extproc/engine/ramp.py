"""`enforce_percent`: a policy acts on a percentage of callers, and is in shadow mode for others.

A caller's place is a hash of its descriptors in the head, keyed by the policy's seed. It depends on
nothing else, so all replicas agree, even after a restart, and a larger percentage includes every
smaller one. If a request has several callers, the lowest place counts, so that a client cannot
leave the percentage by adding a credential.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from extproc.request.callers import compile_shown, list_others
from extproc.request.fingerprint import is_too_long, join_descriptors
from extproc.request.http import Descriptor, HttpRequest

PLACES = 100
"""Number of places. With a percentage of n, the policy acts on the first n places."""

_BITS = 32
"""Length of the hashes that are mapped to places."""

_MOST_SEEN = 1_000
"""Number of callers to remember, to report how many the policy acts on."""


class Ramp:
    """The ramp of one policy.

    Attributes:
        descriptors: the descriptors that identify callers.
        keys: the descriptors' limit keys.
        percent: percentage of callers to act on, 1 to 99.
        seed: policies with the same seed choose the same callers.
        inside, outside: hashes of the first callers that the policy acts on, and of the others.
    """

    def __init__(self, percent: int, descriptors: Sequence[Descriptor], seed: str) -> None:
        self.percent = percent
        self.seed = seed
        self.keys = [descriptor.key for descriptor in descriptors]
        self.descriptors = tuple(descriptors)
        self.inside: set[int] = set()
        self.outside: set[int] = set()
        self._shown = compile_shown(descriptors)
        self._key = blake2b(seed.encode(), digest_size=16).digest()

    def covers(self, place: int) -> bool:
        """Whether the policy acts on a caller with this place; never for callers without one."""
        return 0 < place <= self.percent

    def find_place(self, request: HttpRequest) -> int:
        """The caller's place, 1 to 100; 0 if the request has none of the keys."""
        if is_too_long(request.target, request.query):
            return 0  # not counted, so not read
        read = [
            (descriptor.name, descriptor.read(request, descriptor.argument))
            for descriptor in self.descriptors
        ]
        values = [(name, value) for name, value in read if value]
        if not values:
            return 0
        first = min(
            [self._hash(each) for each in [values, *list_others(self._shown, request, values)]]
        )
        place = (first * PLACES >> _BITS) + 1
        seen = self.inside if self.covers(place) else self.outside
        if first not in seen and len(seen) < _MOST_SEEN:
            seen.add(first)
        return place

    def _hash(self, values: Sequence[tuple[str, str]]) -> int:
        """The hash of one caller."""
        caller = join_descriptors(values)
        digest = blake2b(
            caller.encode("utf-8", "surrogateescape"), digest_size=_BITS // 8, key=self._key
        ).digest()
        return int.from_bytes(digest, "big")


def tell_share(percent: int, acting: int, callers: int) -> str:
    """The number of callers seen, and how many of them the policy acts on, in words."""
    told = (
        f"enforce_percent {percent} acts on {acting:,} of {callers:,} "
        f"caller{'' if callers == 1 else 's'}"
    )
    return told if acting or not callers else f"{told}, so it enforces nothing yet"
