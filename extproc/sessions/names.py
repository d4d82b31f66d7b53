"""Which session a request belongs to, and where the store keeps what its turns have shown.

A client chooses these names, so they only ever tell sessions of one tenant apart, and none of them is longer in a key than any
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import takewhile
from typing import Final, cast

from msgspec import DecodeError, Raw, ValidationError, defstruct, json

from extproc.apis import open_conversation
from extproc.apis.conversation import Conversation
from extproc.bounded import Memo
from extproc.detectors.base import Memory
from extproc.detectors.chain import ChainPlace
from extproc.detectors.loops import MAX_TURNS
from extproc.request.document import ABSENT, Document, NotCounted, decode_json, find, split_pointer
from extproc.request.fingerprint import join_descriptors
from extproc.request.http import Descriptor, HttpRequest, compile_descriptors
from extproc.request.limit_keys import BODY, HEADER, UNSUPPORTED_KEYS, VENDOR_SESSION
from extproc.sessions.changing import ChangingNames
from extproc.sessions.session_limits import PARENT_SESSION, SESSION_HEADERS, USER_ID, Session
from extproc.store.rules.chain import ChainLink
from extproc.store.rules.ring import Push

_DIGEST: Final = 8
_LONGEST_KNOWN: Final = 256
"""Longest name of a session that is remembered, in characters; longer ones fill no memory."""

_MAX_MS: Final = 2**32 - 1

MAX_CALLER_BYTES: Final = 16 * 2**20
"""The store takes conversations of this many bytes that a caller begins within ten minutes, for one detector."""

_KNOWN: Final[Memo[tuple[str, str], str]] = Memo(2_048)

_VENDOR_START, _, _VENDOR_END = VENDOR_SESSION.partition(":")[2].partition("*")
_NO_VENDORS: Final = frozenset({*SESSION_HEADERS, PARENT_SESSION})
"""Headers of that form that have a key of their own, or name another session than the request's."""

_SAME: Final = {f"{HEADER}:{PARENT_SESSION}": f"{HEADER}:x-session-id"}
"""Default keys whose values are those of another one: an agent names by it what its parent is called by the other."""

_SESSION_PART: Final = "_session_"
"""Of a user's id in which older clients name a session, before that."""

_SESSION_ID: Final = "session_id"
_decode_named: Final = json.Decoder(defstruct("Named", [(_SESSION_ID, str, "")])).decode
_decode_object = json.Decoder(dict[str, Raw]).decode


class SessionNames:
    """Where a policy looks for the name of a session."""

    def __init__(self, limit_keys: Sequence[str], *, usual: bool = False) -> None:
        """Compile; `usual` says that these are the default keys, of which some are read as the clients mean them."""
        keys = [_open_vendors(key) for key in compile_descriptors([key for key in limit_keys if key not in UNSUPPORTED_KEYS])]
        self._keys = keys
        self._usual = usual
        self._places = [
            (_SAME.get(key.key, key.key) if usual else key.key, split_pointer(key.argument) if key.source == BODY else [])
            for key in keys
        ]
        self._changing = ChangingNames()
        self._in_head = len(list(takewhile(lambda key: key.source != BODY, keys)))

    def list_keys(self) -> list[Descriptor]:
        """Where the name may stand."""
        return self._keys

    def read(self, request: HttpRequest, caller: str | None = None) -> list[str]:
        """A request's value for each key, up to the first that it has; empty for the others, and for those in the body.

        Of `VENDOR_SESSION` it is the name of the header that it has, and its value behind a `=`. What was found to change with
        every request of this caller is left out of default keys; None stands for a caller who is not known yet.
        """
        values = []
        changing = self._changing if self._usual and self._changing.finds_any and caller is not None else None
        for key in self._keys:
            value = key.read(request, key.argument)
            if value and changing is not None and changing.passes_over(caller or "", key.key):
                value = ""
            values.append(value)
            if value:
                break
        return values

    def watch(self, values: Sequence[str], name: str, document: Document | None, caller: str | None) -> str:
        """Notice a header that changes with every request of its caller; the key of one that was just found, else empty.

        Args:
            values: what `read` returned.
            name: what `find` returned.
            document: the body.
            caller: who sends it, None where that is not known from the head.
        """
        if caller is None or not name or not values[-1] or len(values) > self._in_head:
            return ""
        key = self._keys[len(values) - 1].key
        known = self._changing.callers.get((caller, key))
        if known is not None and not known.row and name in known.newest:  # as of most requests
            return ""
        return key if self._changing.note(caller, key, name, document) else ""

    def find(self, values: Sequence[str], document: Document | None) -> str:
        """The name of a request's session, 16 hex digits; empty where it has none.

        Args:
            values: what `read` returned.
            document: the body, None where it cannot be read.
        """
        if values and values[-1] and len(values) <= self._in_head:
            key, found = self._places[len(values) - 1][0], values[-1]
            return _KNOWN.get((key, found)) or hash_session(key, found)
        fields: _Fields | None = None
        for place in range(self._in_head, len(values)):  # up to there the request has none
            key, pointer = self._places[place]
            found = values[place]
            if pointer:
                fields = _Fields(document) if fields is None else fields
                found = fields.find(pointer)
                found = _cut_session(found) if self._usual and key == USER_ID else found
            if found:
                return hash_session(key, found)
        return ""


class Chains:
    """Where the store keeps a policy's conversations that are known by what they show."""

    __slots__ = ("_start", "_ttl_ms")

    def __init__(self, policy: str, idle_seconds: int, *, namespace: str) -> None:
        """Every key starts with the namespace; `idle_seconds` after its last request a conversation is forgotten."""
        self._start = f"{namespace}chain2:{policy}:"
        self._ttl_ms = min(idle_seconds * 1000, _MAX_MS)

    def make_link(  # noqa: PLR0913  # all that tells conversations apart
        self, detector: str, scope: str, tenant: str, session: str, place: ChainPlace, entry: bytes, fresh: bytes = b""
    ) -> ChainLink:
        """What the store is asked about a request, for one detector; below the session's name, where it has one.

        `fresh` is the name of the conversation if it begins there; empty where no names are asked for.
        """
        start, end = f"{self._start}{detector}:{scope}:{session}:", f":{tenant}"
        return ChainLink(
            f"{start}{place.node.hex()}{end}",
            f"{start}{place.parent.hex()}{end}" if place.parent else "",
            f"{start}{place.before.hex()}{end}" if place.before else "",
            f"{start}{place.own.hex()}{end}" if place.own else "",
            f"{self._start}{detector}:{scope}:*{end}",
            place.node[:_DIGEST],
            place.parent[:_DIGEST],
            entry,
            self._ttl_ms,
            MAX_CALLER_BYTES,
            fresh,
        )


class Rings(SessionNames):
    """What a policy's conversations remember of their turns: by their names, and by what they show.

    Attributes:
        idle_seconds: how long after its last request a conversation is forgotten.
        chains: where they are by what they show.
    """

    def __init__(self, policy: str, session: Session | None, *, namespace: str) -> None:
        """Compile; every key starts with the namespace. Without a session no conversation has a name."""
        super().__init__(session.keys if session is not None else (), usual=session is not None and not session.has_own_keys)
        self._ring = f"{namespace}ring:{policy}:"
        self.idle_seconds = (session or Session()).idle_seconds
        self.chains = Chains(policy, self.idle_seconds, namespace=namespace)
        self._idle_ms = self.idle_seconds * 1000

    def make_push(self, detector: str, scope: str, tenant: str, session: str, memory: Memory) -> Push:
        """What the store is asked to keep of a request for one detector."""
        key = f"{self._ring}{detector}:{scope}:{tenant}:{session}"
        return Push(key, memory.entry, memory.identity, MAX_TURNS, self._idle_ms)


def hash_session(key: str, value: str) -> str:
    """What a session is called, by the limit key that names it and the value of that: 16 hex digits."""
    if key == VENDOR_SESSION:  # people name such a session by its header
        header, _, value = value.partition("=")
        return hash_session(f"{HEADER}:{header}", value)
    known = _KNOWN.get((key, value))
    if known is None:
        joined = join_descriptors([(key, value)])
        known = blake2b(joined.encode("utf-8", "surrogateescape"), digest_size=_DIGEST).hexdigest()
        if len(value) <= _LONGEST_KNOWN:
            _KNOWN.put((key, value), known)
    return known


def _open_vendors(key: Descriptor) -> Descriptor:
    return key._replace(read=_read_vendor) if key.key == VENDOR_SESSION else key


def _read_vendor(request: HttpRequest, _: str) -> str:
    """The first header by name that has the form of `VENDOR_SESSION`, its name and its value; empty where there is none."""
    for name in find_vendor_headers(request):
        value = request.read_header(name)
        if value:
            return f"{name}={value}"
    return ""


def find_vendor_headers(request: HttpRequest) -> list[str]:
    """The names of a request's headers that `VENDOR_SESSION` stands for, sorted: proxies may change their order."""
    return sorted([name for name in request.headers if name.endswith(_VENDOR_END) and is_vendor_session(name)])


def is_vendor_session(header: str) -> bool:
    """Whether `VENDOR_SESSION` stands for a header, by its name in lower case."""
    vendor = header.removeprefix(_VENDOR_START).removesuffix(_VENDOR_END)
    return len(vendor) + len(_VENDOR_START) + len(_VENDOR_END) == len(header) and bool(vendor) and header not in _NO_VENDORS


def _cut_session(user_id: str) -> str:
    """The part of a user's id that names a session; all of it where no part does."""
    if user_id.startswith("{"):
        try:
            named = str(getattr(_decode_named(user_id), _SESSION_ID))
        except (ValidationError, DecodeError):
            named = ""
        return named or user_id
    user, _, session = user_id.rpartition(_SESSION_PART)
    return session if user and session else user_id


class _Fields:
    """The fields of a body in which a session may be named, decoded only as far as is asked."""

    def __init__(self, document: Document | None) -> None:
        self._document = document
        self._conversation: Conversation | None = None
        if document is not None:
            with suppress(NotCounted):
                self._conversation = open_conversation(document)
        self._fields: dict[str, Raw] | None = None

    def find(self, pointer: Sequence[str]) -> str:
        """The scalar that a pointer leads to, as text; empty where there is none."""
        value = self._conversation.find_field(pointer[0]) if self._conversation is not None else None
        if value is None:
            if self._fields is None:
                self._fields = _decode_fields(self._document)
            value = self._fields.get(pointer[0], ABSENT)
        try:
            return find(decode_json(value), pointer[1:]) if value is not ABSENT else ""
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
