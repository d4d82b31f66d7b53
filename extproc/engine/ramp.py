"""`enforce_percent`: a policy acts on a share of its callers, and only watches the others.

A caller's place is a hash of its descriptors in the request's head, keyed by the policy. It depends on nothing else, so every
replica finds the same place, even after a restart, and a larger share includes every smaller one.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from extproc.request.fingerprint import is_too_long, join_descriptors
from extproc.request.http import Descriptor, HttpRequest

PLACES = 100
"""Number of places. A percentage enforces this number of places, starting with the first."""

_BITS = 32
"""Range of the hashes that are mapped to places."""


class Ramp:
    """The ramp of one policy.

    Attributes:
        descriptors: the descriptors that choose callers.
        keys: the descriptors' limit keys.
        percent: share of callers to act on, 1 to 99.
        seed: policies with the same seed choose the same callers.
    """

    __slots__ = ("_key", "descriptors", "keys", "percent", "seed")

    def __init__(self, percent: int, descriptors: Sequence[Descriptor], seed: str) -> None:
        self.percent = percent
        self.seed = seed
        self.keys = [descriptor.key for descriptor in descriptors]
        self.descriptors = tuple(descriptors)
        self._key = blake2b(seed.encode(), digest_size=16).digest()

    def covers(self, place: int) -> bool:
        """Whether the policy acts on a caller in this place; callers without a place are only watched."""
        return 0 < place <= self.percent

    def find_place(self, request: HttpRequest) -> int:
        """The caller's place, 1 to 100; 0 if the request has none of the keys."""
        if is_too_long(request.target, request.query):
            return 0  # not counted, so not read
        read = [(descriptor.name, descriptor.read(request, descriptor.argument)) for descriptor in self.descriptors]
        caller = join_descriptors([(name, value) for name, value in read if value])
        if not caller:
            return 0
        digest = blake2b(caller.encode("utf-8", "surrogateescape"), digest_size=_BITS // 8, key=self._key).digest()
        return (int.from_bytes(digest, "big") * PLACES >> _BITS) + 1
