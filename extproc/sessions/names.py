"""Which session a request belongs to, and where the store keeps what its turns have shown.

A client chooses these names, so they only ever tell sessions of one tenant apart, and none of them is longer in a key than any
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Final, cast

from msgspec import Raw, ValidationError, json

from extproc.bounded import Memo
from extproc.detectors.base import Memory
from extproc.detectors.chain import ChainPlace
from extproc.detectors.loops import MAX_TURNS
from extproc.request.document import Document, NotCounted, decode_json, find, split_pointer
from extproc.request.fingerprint import join_descriptors
from extproc.request.http import Descriptor, HttpRequest, compile_descriptors
from extproc.request.limit_keys import BODY, UNSUPPORTED_KEYS
from extproc.sessions.session_limits import Session
from extproc.store.rules.chain import Link
from extproc.store.rules.ring import Push

_DIGEST: Final = 8
_LONGEST_KNOWN: Final = 256
"""Longest name of a session that is remembered, in characters; longer ones fill no memory."""

_MAX_MS: Final = 2**32 - 1

MAX_CALLER_BYTES: Final = 16 * 2**20
"""The store takes conversations of this many bytes that a caller begins within ten minutes, for one detector."""

_KNOWN: Final[Memo[tuple[str, str], str]] = Memo(2_048)

_decode_object = json.Decoder(dict[str, Raw]).decode


class SessionNames:
    """Where a policy looks for the name of a session.

    Attributes:
        reads_body: some name may stand there.
    """

    def __init__(self, limit_keys: Sequence[str]) -> None:
        keys = compile_descriptors([key for key in limit_keys if key not in UNSUPPORTED_KEYS])
        self._keys = list(keys)
        self._places = [(key.key, split_pointer(key.argument) if key.source == BODY else []) for key in keys]
        self._in_head = len(list(takewhile(lambda key: key.source != BODY, keys)))
        self.reads_body = self._in_head < len(keys)

    def list_keys(self) -> list[Descriptor]:
        """Where the name may stand."""
        return self._keys

    def read(self, request: HttpRequest) -> list[str]:
        """A request's value for each key, up to the first that it has; empty for the others, and for those in the body."""
        values = []
        for key in self._keys:
            value = key.read(request, key.argument)
            values.append(value)
            if value:
                break
        return values

    def find(self, values: Sequence[str], document: Document | None) -> str:
        """The name of a request's session, 16 hex digits; empty where it has none.

        Args:
            values: what `read` returned.
            document: the body, None where it cannot be read.
        """
        if values and values[-1] and len(values) <= self._in_head:
            return hash_session(self._places[len(values) - 1][0], values[-1])
        fields: _Fields | None = None
        for place, value in enumerate(values):
            key, pointer = self._places[place]
            found = value
            if pointer:
                fields = _Fields(document) if fields is None else fields
                found = fields.find(pointer)
            if found:
                return hash_session(key, found)
        return ""


class Rings(SessionNames):
    """What a policy's conversations remember of their turns: by their names, and by what they show.

    Attributes:
        idle_seconds: how long after its last request a conversation is forgotten.
    """

    def __init__(self, policy: str, session: Session | None, *, namespace: str) -> None:
        """Compile; every key starts with the namespace. Without a session no conversation has a name."""
        super().__init__(session.keys if session is not None else ())
        self._ring = f"{namespace}ring:{policy}:"
        self._chain = f"{namespace}chain:{policy}:"
        self.idle_seconds = (session or Session()).idle_seconds
        self._idle_ms = self.idle_seconds * 1000

    def make_push(self, detector: str, scope: str, tenant: str, session: str, memory: Memory) -> Push:
        """What the store is asked to keep of a request for one detector."""
        key = f"{self._ring}{detector}:{scope}:{tenant}:{session}"
        return Push(key, memory.entry, memory.identity, MAX_TURNS, self._idle_ms)

    def make_link(  # noqa: PLR0913  # all that tells conversations apart
        self, detector: str, scope: str, tenant: str, session: str, place: ChainPlace, entry: bytes
    ) -> Link:
        """The same by what the request shows; below the session's name, where it has one."""
        start, end = f"{self._chain}{detector}:{scope}:{session}:", f":{tenant}"
        return Link(
            f"{start}{place.node.hex()}{end}",
            f"{start}{place.parent.hex()}{end}" if place.parent else "",
            f"{start}{place.before.hex()}{end}" if place.before else "",
            f"{start}{place.own.hex()}{end}" if place.own else "",
            f"{self._chain}{detector}:{scope}:*{end}",
            place.node[:_DIGEST],
            place.parent[:_DIGEST],
            entry,
            min(self._idle_ms, _MAX_MS),
            MAX_CALLER_BYTES,
        )


def hash_session(key: str, value: str) -> str:
    """What a session is called, by the limit key that names it and the value of that: 16 hex digits."""
    known = _KNOWN.get((key, value))
    if known is None:
        joined = join_descriptors([(key, value)])
        known = blake2b(joined.encode("utf-8", "surrogateescape"), digest_size=_DIGEST).hexdigest()
        if len(value) <= _LONGEST_KNOWN:
            _KNOWN.put((key, value), known)
    return known


class _Fields:
    """The fields of a body in which a session may be named, decoded only as far as is asked."""

    def __init__(self, document: Document | None) -> None:
        self._document = document
        self._fields: dict[str, Raw] | None = None

    def find(self, pointer: Sequence[str]) -> str:
        """The scalar that a pointer leads to, as text; empty where there is none."""
        if self._fields is None:
            self._fields = _decode_fields(self._document)
        value = self._fields.get(pointer[0])
        if value is None:
            return ""
        try:
            return find(decode_json(value), pointer[1:])
        except NotCounted:
            return ""


def _decode_fields(document: Document | None) -> dict[str, Raw]:
    """The fields of the object that a body is, as they stand there; none where it is something else."""
    if document is None:
        return {}
    try:
        return cast("dict[str, Raw]", decode_json(document.data(), _decode_object))
    except (NotCounted, ValidationError):
        return {}
