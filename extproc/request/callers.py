"""The callers of a request that contains several credentials.

Clients choose their headers, and Loopguard cannot know which of several credentials the upstream
reads: that differs by server, even for one API. If only one of them identified the caller, a client
could add another one that changes with every request, and be a new caller each time.

So each credential is a caller: the guards of a policy count, limit and judge a request for each of
them, and the strictest outcome wins. This applies only to secrets, because no client can send those
of others to use up their limits. Claims that Envoy has verified are tried before secrets, and a
request with a verified claim has no other caller.

The number of callers is bounded, because each place in which APIs have credentials has one.

A caller has one name, a hash, in all policies. A single descriptor gives it the name of its value:
for a secret its keyed hash, for a claim or header the hash of `name=value`, whether the limit key
stands alone or in a `first_of`. Several descriptors together have a hash of all of them; operators
may use the name of each of them, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

from extproc.request.document import Json, find
from extproc.request.fingerprint import hash_tenant, join_descriptors
from extproc.request.hash_key import HashKey
from extproc.request.http import Descriptor, HttpRequest, name_key
from extproc.request.secrets import CREDENTIAL, is_secret

Values: TypeAlias = list[tuple[str, str]]
"""Values of descriptors, by name."""

NO_OTHERS: Final[list[Values]] = []

_MOST_NAMES: Final = 256


class NameForm(NamedTuple):
    """How the value of a descriptor names a caller.

    Attributes:
        descriptor: the descriptor's name.
        start: the prefix of the value in a `first_of`: the limit key and a colon.
        name: the value's own name, not that of the `first_of`.
        secret: the value is a secret's hash.
    """

    descriptor: str
    start: str
    name: str
    secret: bool


class NamedValue(NamedTuple):
    """A value that identifies a caller, alone or with others; see `NameForm`."""

    name: str
    value: str
    secret: bool

    def hash(self) -> str:
        """The name of a caller without other values, 16 hex digits."""
        return (
            self.value if self.secret else hash_tenant(join_descriptors([(self.name, self.value)]))
        )


class CallerNames:
    """The names of a policy's or rule's callers.

    Attributes:
        forms: for secrets, and for the alternatives of each `first_of`.
    """

    def __init__(self, descriptors: tuple[Descriptor, ...]) -> None:
        """Compile the descriptors; see `find_names`."""
        keys = [part.key for descriptor in descriptors for part in descriptor.list_sources()]
        names = Counter([name_key(key) for key in dict.fromkeys(keys)])
        self.forms: list[NameForm] = []
        for descriptor in descriptors:
            for part in descriptor.list_sources():
                secret = is_secret(part.key)
                if descriptor.parts:
                    name = name_key(part.key)
                    form = NameForm(
                        descriptor.name,
                        f"{part.key}:",
                        name if names[name] == 1 else part.key,
                        secret,
                    )
                    self.forms.append(form)
                elif secret:
                    self.forms.append(NameForm(descriptor.name, "", descriptor.name, secret))

    def split(self, values: Sequence[tuple[str, str]]) -> list[NamedValue]:
        """The values that identify a caller, each with its own name."""
        return [self._find(name, value) for name, value in values]

    def _find(self, descriptor: str, value: str) -> NamedValue:
        for form in self.forms:
            if form.descriptor == descriptor and value.startswith(form.start):
                return NamedValue(form.name, value[len(form.start) :], form.secret)
        return NamedValue(descriptor, value, False)

    def name_caller(self, values: Sequence[tuple[str, str]], joined: str) -> str:
        """The caller's name, 16 hex digits; `joined` comes from `join_descriptors`."""
        if not self.forms:
            return hash_tenant(joined)
        named: dict[str, NamedValue] = {}
        for each in self.split(values):
            named.setdefault(each.hash(), each)
        if len(named) == 1:
            return next(iter(named))
        return hash_tenant(join_descriptors([(each.name, each.value) for each in named.values()]))

    def list_parts(self, values: Sequence[tuple[str, str]]) -> list[str]:
        """The names of the values that identify a caller together; empty if there is only one."""
        if len(values) == 1:
            return []
        found = list(dict.fromkeys([each.hash() for each in self.split(values)]))
        return found if len(found) > 1 else []

    def list_secrets(self, values: Sequence[tuple[str, str]]) -> list[str]:
        """The hashes of secrets that identify a caller, without duplicates."""
        return (
            list(dict.fromkeys([each.value for each in self.split(values) if each.secret]))
            if self.forms
            else []
        )


find_names: Final = lru_cache(_MOST_NAMES)(CallerNames)
"""The `CallerNames` of these descriptors, shared by policies with the same descriptors."""


class Shown:
    """A descriptor that may have several values in one request.

    Attributes:
        name: the descriptor's name.
    """

    def __init__(self, name: str, keys: list[str]) -> None:
        """`keys` are the alternatives that are secrets; empty for `credential` alone."""
        self.name = name
        self._keys = keys
        self._starts = tuple([f"{key}:" for key in keys])

    def list_values(self, request: HttpRequest, first: str) -> list[str]:
        """All values in a request, given the first."""
        if not self._keys:
            return request.list_credentials()
        if not first.startswith(self._starts):
            return [first]  # verified, or not a secret
        values: dict[str, str] = {}
        for key in self._keys:
            for secret in (
                request.list_credentials() if key == CREDENTIAL else [request.read_secret(key)]
            ):
                if secret:
                    values.setdefault(secret, f"{key}:{secret}")
        found = list(values.values())
        return [first, *[value for value in found if value != first]]


def find_hidden(value: Json, descriptor: Descriptor, pointer: Sequence[str], key: HashKey) -> str:
    """The scalar at a pointer in a body as text, hashed if it is a secret; empty if none."""
    text = find(value, pointer)
    return key.hide(text) if text and is_secret(descriptor.key) else text


def compile_shown(descriptors: Sequence[Descriptor]) -> tuple[Shown, ...]:
    """The descriptors of a policy that may have several values in one request."""
    found: list[Shown] = []
    for descriptor in descriptors:
        keys = [part.key for part in descriptor.parts if is_secret(part.key)]
        if descriptor.key == CREDENTIAL or len(keys) > 1 or CREDENTIAL in keys:
            found.append(Shown(descriptor.name, keys))
    return tuple(found)


def list_others(
    shown: tuple[Shown, ...], request: HttpRequest, values: Sequence[tuple[str, str]]
) -> list[Values]:
    """The other callers of a request, given the first one's values."""
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
    """The values of one of the other callers. A descriptor with fewer values repeats its first."""
    taken: Values = []
    for name, value in values:
        found = several.get(name)
        taken.append((name, found[place] if found is not None and place < len(found) else value))
    return taken
