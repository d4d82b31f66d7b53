"""Finds a request's session, and makes the store's keys for conversations.

Clients choose session names. So a name only distinguishes sessions of one caller, and keys contain
its hash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import takewhile
from typing import Final, cast

from msgspec import DecodeError, Raw, ValidationError, defstruct, json

from extproc.apis import open_conversation
from extproc.apis.conversation import Conversation
from extproc.detectors.base import Memory
from extproc.detectors.chain import ChainPlace
from extproc.detectors.history import USUAL_TURNS
from extproc.request.clients import AGENTS, PARENT_SESSION, SESSION_HEADERS, USER_ID
from extproc.request.document import (
    ABSENT,
    Document,
    NotCounted,
    check_members,
    decode_json,
    find,
    split_pointer,
)
from extproc.request.fingerprint import join_descriptors
from extproc.request.http import Descriptor, HttpRequest, compile_descriptors
from extproc.request.limit_keys import BODY, HEADER, UNSUPPORTED_KEYS, VENDOR_SESSION
from extproc.sessions.changing import ChangingNames
from extproc.sessions.session_limits import Session
from extproc.store.rules.chain import ChainLink
from extproc.store.rules.ring import Push

_DIGEST: Final = 8
_MAX_MS: Final = 2**32 - 1

MAX_CALLER_BYTES: Final = 16 * 2**20
"""Bytes of conversations that the store keeps for a caller and detector, if they begin within ten
minutes."""

_VENDOR_START, _, _VENDOR_END = VENDOR_SESSION.partition(":")[2].partition("*")
_NO_VENDORS: Final = frozenset({*SESSION_HEADERS, PARENT_SESSION})
"""Headers of the vendors' form that have keys of their own, or name another session than the
request's."""

_SAME: Final = {
    f"{HEADER}:{form.root}": f"{HEADER}:{form.agent}" for form in AGENTS if form.root == form.parent
}
"""Default keys that name the same session: an agent sends its parent's id in the first, the parent
sends it in the second."""

_FEW_HEADERS: Final = 4
"""Up to this many headers, single look-ups are faster than a comparison of sets."""

_SESSION_PART: Final = "_session_"
"""Precedes the session's name in a user id from older clients."""

_SESSION_ID: Final = "session_id"
_decode_named: Final = json.Decoder(defstruct("Named", [(_SESSION_ID, str, "")])).decode
_decode_object = json.Decoder(dict[str, Raw]).decode


class SessionNames:
    """The limit keys in which a policy finds the name of a session.

    Attributes:
        looks_in: equal for objects that find the same names.
    """

    def __init__(
        self,
        limit_keys: Sequence[str],
        *,
        usual: bool = False,
        same: Mapping[str, str] | None = None,
    ) -> None:
        """Compile the keys.

        Args:
            limit_keys: in the order in which they are tried.
            usual: these are the default keys, which allow for the habits of known clients.
            same: maps a key to another that names the same sessions. Default for `usual` keys:
                `_SAME`.
        """
        known = same if same is not None else _SAME if usual else {}
        keys = [
            key._replace(read=_read_vendor) if key.key == VENDOR_SESSION else key
            for key in compile_descriptors(
                [key for key in limit_keys if key not in UNSUPPORTED_KEYS]
            )
        ]
        self._keys = keys
        self._usual = usual
        self._places = [
            (known.get(key.key, key.key), split_pointer(key.argument) if key.source == BODY else [])
            for key in keys
        ]
        self.looks_in = (
            usual,
            tuple([key.key for key in keys]),
            tuple([key for key, _ in self._places]),
        )
        self._headers = [
            key.argument if key.read is HttpRequest.read_header and key.argument != "host" else ""
            for key in keys
        ]
        self._all_headers = frozenset(self._headers) - {""}
        self._every = list(range(len(keys)))
        self._others = [place for place, header in enumerate(self._headers) if not header]
        self._changing = ChangingNames()
        self._in_head = len(list(takewhile(lambda key: key.source != BODY, keys)))

    def list_keys(self) -> list[Descriptor]:
        """The descriptors that may contain the name."""
        return self._keys

    def read(self, request: HttpRequest, caller: str | None = None) -> list[str]:
        """A request's value for each key, up to the first one found.

        Others, and those in the body, are empty.

        For `VENDOR_SESSION`, the value is `header=value`. Default keys that change with every
        request of this caller are skipped; `caller` is None while it is unknown.
        """
        values: list[str] = []
        changing = (
            self._changing
            if self._usual and self._changing.finds_any and caller is not None
            else None
        )
        headers = request.headers
        # The usual case
        missing = len(self._all_headers) > _FEW_HEADERS and self._all_headers.isdisjoint(headers)
        for place in self._others if missing else self._every:
            while len(values) < place:
                values.append("")
            key, header = self._keys[place], self._headers[place]
            value = "" if header and header not in headers else key.read(request, key.argument)
            if value and changing is not None and changing.passes_over(caller or "", key.key):
                value = ""
            values.append(value)
            if value:
                return values
        while len(values) < len(self._keys):
            values.append("")
        return values

    def tell_key(self, values: Sequence[str]) -> str:
        """The key in the head that names the session, given the result of `read`; else empty."""
        return (
            self._keys[len(values) - 1].key
            if values and values[-1] and len(values) <= self._in_head
            else ""
        )

    def watch(
        self, values: Sequence[str], name: str, document: Document | None, caller: str | None
    ) -> str:
        """The key of a header just found to change with every request of its caller; else empty.

        Args:
            values: the result of `read`.
            name: the result of `find`.
            document: the body.
            caller: the caller; None if the head does not tell it.
        """
        if caller is None or not name or not values[-1] or len(values) > self._in_head:
            return ""
        key = self._keys[len(values) - 1].key
        known = self._changing.callers.get((caller, key))
        if known is not None and not known.row and name in known.newest:  # most requests
            return ""
        return key if self._changing.note(caller, key, name, document) else ""

    def find(self, values: Sequence[str], document: Document | None) -> str:
        """The hash of the session's name, 16 hex digits; empty if the request names no session.

        Args:
            values: the result of `read`.
            document: the body; None if it is unreadable.
        """
        if values and values[-1] and len(values) <= self._in_head:
            key, found = self._places[len(values) - 1][0], values[-1]
            return hash_session(key, found)
        fields: _Fields | None = None
        for place in range(self._in_head, len(values)):  # the head has no name
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
    """The store's keys for conversations that are recognized by their content."""

    def __init__(self, policy: str, idle_seconds: int, *, namespace: str) -> None:
        """Every key starts with the namespace.

        A conversation expires `idle_seconds` after its last request.
        """
        self._start = f"{namespace}chain2:{policy}:"
        self._ttl_ms = min(idle_seconds * 1000, _MAX_MS)

    def make_link(  # noqa: PLR0913  # everything that distinguishes conversations
        self,
        detector: str,
        scope: str,
        tenant: str,
        session: str,
        place: ChainPlace,
        entry: bytes,
        fresh: bytes = b"",
    ) -> ChainLink:
        """The store's question about a request, for one detector and the session's name, if any.

        `fresh` names the conversation if it begins here; empty if no name is needed. A name passes
        to requests with at most one more turn, or with more messages in the newest turn, because
        session limits count every turn in a history.
        """
        parents = place.parents[: place.near] if fresh else place.parents
        start, end = f"{self._start}{detector}:{scope}:{session}:", f":{tenant}"
        return ChainLink(
            f"{start}{place.node.hex()}{end}",
            tuple([f"{start}{parent.hex()}{end}" for parent in parents]),
            place.near,
            f"{start}{place.before.hex()}{end}" if place.before else "",
            f"{start}{place.own.hex()}{end}" if place.own else "",
            f"{start}{place.answer.hex()}{end}" if place.answer else "",
            f"{self._start}{detector}:{scope}:*{end}",
            place.node[:_DIGEST],
            entry,
            self._ttl_ms,
            MAX_CALLER_BYTES,
            fresh,
        )


class Rings(SessionNames):
    """The store's keys for the turns of conversations, by name and by content.

    Attributes:
        idle_seconds: a conversation expires this long after its last request.
        chains: keys for conversations that are recognized by their content.
    """

    def __init__(self, policy: str, session: Session | None, *, namespace: str) -> None:
        """Every key starts with the namespace. Without a session, conversations have no names."""
        super().__init__(
            session.keys if session is not None else (),
            usual=session is not None and not session.has_own_keys,
        )
        self._ring = f"{namespace}ring:{policy}:"
        self.idle_seconds = (session or Session()).idle_seconds
        self.chains = Chains(policy, self.idle_seconds, namespace=namespace)
        self._idle_ms = self.idle_seconds * 1000

    def make_push(
        self, detector: str, scope: str, tenant: str, session: str, memory: Memory
    ) -> Push:
        """The entry of a request to store, for one detector."""
        key = f"{self._ring}{detector}:{scope}:{tenant}:{session}"
        return Push(key, memory.entry, memory.identity, USUAL_TURNS, self._idle_ms)


def hash_session(key: str, value: str) -> str:
    """The hash of a session's name, 16 hex digits, given its limit key and value."""
    if key == VENDOR_SESSION:  # operators name such a session by its header
        header, _, value = value.partition("=")
        return hash_session(f"{HEADER}:{header}", value)
    joined = join_descriptors([(key, value)])
    return blake2b(joined.encode("utf-8", "surrogateescape"), digest_size=_DIGEST).hexdigest()


def _read_vendor(request: HttpRequest, _: str) -> str:
    """The first matching header in alphabetical order, as `name=value`; empty if there is none."""
    for name in find_vendor_headers(request):
        value = request.read_shown_header(name)
        if value:
            return f"{name}={value}"
    return ""


def find_vendor_headers(request: HttpRequest) -> list[str]:
    """The headers that match `VENDOR_SESSION`, sorted, because proxies may reorder them."""
    if request.vendor_sessions is None:
        end: str = _VENDOR_END
        found = [name for name in request.headers if name.endswith(end) and is_vendor_session(name)]
        request.vendor_sessions = sorted(found) if len(found) > 1 else found
    return request.vendor_sessions


def is_vendor_session(header: str) -> bool:
    """Whether a header, in lower case, matches `VENDOR_SESSION`."""
    vendor = header.removeprefix(_VENDOR_START).removesuffix(_VENDOR_END)
    return (
        len(vendor) + len(_VENDOR_START) + len(_VENDOR_END) == len(header)
        and bool(vendor)
        and header not in _NO_VENDORS
    )


def _cut_session(user_id: str) -> str:
    """The part of a user id that names a session; the whole id if there is none."""
    if user_id.startswith("{"):
        try:
            named = str(getattr(_decode_named(user_id), _SESSION_ID))
        except (ValidationError, DecodeError):
            named = ""
        return named or user_id
    user, _, session = user_id.rpartition(_SESSION_PART)
    return session if user and session else user_id


class _Fields:
    """Fields of a body that may name a session, decoded lazily."""

    def __init__(self, document: Document | None) -> None:
        self._document = document
        self._conversation: Conversation | None = None
        if document is not None:
            with suppress(NotCounted):
                self._conversation = open_conversation(document)
        self._fields: dict[str, Raw] | None = None

    def find(self, pointer: Sequence[str]) -> str:
        """The scalar at a pointer, as text; empty if there is none."""
        value = (
            self._conversation.find_field(pointer[0]) if self._conversation is not None else None
        )
        if value is None:
            if self._fields is None:
                self._fields = _decode_fields(self._document)
            value = self._fields.get(pointer[0], ABSENT)
        try:
            return find(decode_json(value), pointer[1:]) if value is not ABSENT else ""
        except NotCounted:
            return ""


def _decode_fields(document: Document | None) -> dict[str, Raw]:
    """The raw fields of a body; empty unless it is an object of acceptable size."""
    if document is None:
        return {}
    try:
        check_members(document.data())
        return cast("dict[str, Raw]", decode_json(document.data(), _decode_object))
    except (NotCounted, ValidationError):
        return {}
