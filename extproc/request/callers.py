"""The callers of a request that shows several credentials.

Clients choose their headers, and Loopguard cannot know which of several credentials the upstream reads: that differs by server,
even for one API. If only one of them identified the caller, a client could put another one in front that changes with every
request, and be a new caller each time.

So each credential is a caller: the guards of a policy count, limit and judge a request for each of them, and the strictest
verdict holds. Only secrets are callers of their own, because no client can show those of others to use up what is theirs.
Claims that Envoy has verified are tried before secrets, and a request that has one has no other caller.

The number of callers is bounded by the number of places in which APIs have credentials: each place has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from extproc.request.document import Json, find
from extproc.request.hash_key import HashKey
from extproc.request.http import Descriptor, HttpRequest
from extproc.request.secrets import CREDENTIAL, is_secret

Values: TypeAlias = list[tuple[str, str]]
"""Values of descriptors, by name."""

NO_OTHERS: Final[list[Values]] = []


class Shown:
    """A descriptor that may have several values in one request.

    Attributes:
        name: the descriptor's.
    """

    __slots__ = ("_keys", "_starts", "name")

    def __init__(self, name: str, keys: list[str]) -> None:
        """Compile; `keys` are the alternatives that are secrets, or empty for the limit key `credential` alone."""
        self.name = name
        self._keys = keys
        self._starts = tuple([f"{key}:" for key in keys])

    def list_values(self, request: HttpRequest, first: str) -> list[str]:
        """All values that a request shows, given the first."""
        if not self._keys:
            return request.list_credentials()
        if not first.startswith(self._starts):
            return [first]  # verified, or no secret
        values: dict[str, str] = {}
        for key in self._keys:
            for secret in request.list_credentials() if key == CREDENTIAL else [request.read_secret(key)]:
                if secret:
                    values.setdefault(secret, f"{key}:{secret}")
        found = list(values.values())
        return [first, *[value for value in found if value != first]]


def find_hidden(value: Json, descriptor: Descriptor, pointer: Sequence[str], key: HashKey) -> str:
    """The scalar at a pointer in a body, as text, or its hash if it is a secret; empty if there is none."""
    text = find(value, pointer)
    return key.hide(text) if text and is_secret(descriptor.key) else text


def compile_shown(descriptors: Sequence[Descriptor]) -> tuple[Shown, ...]:
    """Those of a policy's descriptors that may have several values in one request."""
    found: list[Shown] = []
    for descriptor in descriptors:
        keys = [part.key for part in descriptor.parts if is_secret(part.key)]
        if descriptor.key == CREDENTIAL or len(keys) > 1 or CREDENTIAL in keys:
            found.append(Shown(descriptor.name, keys))
    return tuple(found)


def list_others(shown: tuple[Shown, ...], request: HttpRequest, values: Sequence[tuple[str, str]]) -> list[Values]:
    """The other callers of a request, given the values of the first."""
    if not shown:
        return NO_OTHERS
    several: dict[str, list[str]] = {}
    most = 1
    for each in shown:
        for name, value in values:
            if name == each.name:
                found = each.list_values(request, value)
                if len(found) > 1:
                    several[name] = found
                    most = max(most, len(found))
    if most == 1:
        return NO_OTHERS
    return [_take(values, several, place) for place in range(1, most)]


def _take(values: Sequence[tuple[str, str]], several: dict[str, list[str]], place: int) -> Values:
    """The values of one of the other callers; a descriptor that has fewer values keeps its first."""
    taken: Values = []
    for name, value in values:
        found = several.get(name)
        taken.append((name, found[place] if found is not None and place < len(found) else value))
    return taken
