"""One HTTP request as policies see it, and the descriptors that identify its caller."""

from __future__ import annotations

import binascii
import json
import re
from base64 import urlsafe_b64decode
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl

from extproc.request.fingerprint import is_too_long, normalize_path
from extproc.request.hash_key import PROCESS_KEY, HashKey
from extproc.request.limit_keys import FIRST_OF, UNSUPPORTED_KEYS, FirstOf
from extproc.request.secrets import (
    CREDENTIAL,
    extract_secret,
    find_secrets,
    is_secret,
    list_places,
)

MAX_DESCRIPTOR = 8_192
"""Maximum length of a descriptor's value, in characters. With a longer one, the request is not
counted."""

MAX_TOKEN = 32_768
"""Maximum length of a bearer token to decode, in characters; a longer one counts as missing."""

RESPONSES_WEBSOCKET: Final = "responses_websocket"
"""The reason for requests that open a WebSocket for model calls, which Loopguard would not see."""

# Absolute-form up to its path (RFC 9112 section 3.2.2)
_ABSOLUTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*")


"""What Envoy appends to the host of a mirrored request, before the port."""


class Facts:
    """What is known about a request besides its headers, parsed only when a policy needs it.

    This base class knows nothing.
    """

    def route(self) -> str:
        """Envoy's route name; empty if unknown."""
        return ""

    def address(self) -> str:
        """The peer that Envoy trusts, without its port; empty if unknown."""
        return ""

    def claim(self, name: str) -> str:  # noqa: ARG002  # no claims are known
        """A JWT claim as text, verified or, if allowed, only decoded; empty if there is none."""
        return ""

    def identify(self) -> bytes | None:
        """Bytes that are equal only if all facts are equal; None if no facts may be cached."""
        return None

    def let_go(self) -> Facts:
        """The facts to keep after the policies have read them: only the route, for reports."""
        return NO_FACTS


class StatedFacts(Facts):
    """Facts given as values."""

    def __init__(
        self, *, route: str = "", address: str = "", claims: Mapping[str, str] | None = None
    ) -> None:
        self._route = route
        self._address = address
        self._claims: Mapping[str, str] = claims if claims is not None else {}

    def route(self) -> str:
        """See `Facts`."""
        return self._route

    def address(self) -> str:
        """See `Facts`."""
        return self._address

    def claim(self, name: str) -> str:
        """See `Facts`."""
        return self._claims.get(name, "")


NO_FACTS = Facts()


class HttpRequest:
    """One request as Envoy describes it.

    Header names are in lower case; the first of repeated headers wins.

    Attributes:
        method: as sent.
        target: `:path` as received, including the query.
        path: the target without its query, normalized, for selectors and fingerprints.
        query: the part after the first `?`.
        authority: `:authority`; empty if missing.
        headers: raw values by lower-case name.
        facts: other facts.
        opens_responses: it opens a WebSocket for model calls; set by the parser of Envoy's message.
        hash_key: for hashes of its secrets; set it before reading a secret.
        vendor_sessions: see `find_vendor_headers`; None until then.
    """

    def __init__(
        self,
        method: str,
        target: str,
        authority: str = "",
        headers: Mapping[str, bytes] | None = None,
        facts: Facts = NO_FACTS,
    ) -> None:
        """Split the target and normalize its path."""
        if not target.startswith("/") and (absolute := _ABSOLUTE.match(target)):
            rest = target[absolute.end() :]
            target = rest if rest.startswith("/") else f"/{rest}"
        self.method = method
        self.target = target
        path, _, self.query = target.partition("?")
        self.path = normalize_path(path)
        self.authority = authority
        self.headers: Mapping[str, bytes] = headers if headers is not None else {}
        self.facts = facts
        self.opens_responses = False
        self.hash_key: HashKey = PROCESS_KEY
        self.vendor_sessions: list[str] | None = None
        self._pairs: list[tuple[str, str]] | None = None
        self._hidden: dict[str, str] | None = None
        self._credentials: list[str] | None = None

    def read_header(self, name: str) -> str:
        """A header's value; empty if missing. Invalid UTF-8 becomes surrogates."""
        if name == "host":
            return self.authority
        return self.headers.get(name, b"").decode("utf-8", "surrogateescape")

    def read_query(self) -> list[tuple[str, str]]:
        """The decoded pairs of the query in order: `+` is a space, blank values are included.

        Invalid UTF-8 becomes surrogates, so different bytes stay different. A query that would take
        too long to read has no pairs.
        """
        if self._pairs is None:
            query = self.query if not is_too_long(self.target, self.query) else ""
            if "%" in query or "+" in query:
                self._pairs = parse_qsl(query, keep_blank_values=True, errors="surrogateescape")
            else:  # the same result, faster
                parts = (pair.partition("=") for pair in query.split("&") if pair)
                self._pairs = [(name, value) for name, _, value in parts]
        return self._pairs

    def read_parameter(self, name: str) -> str:
        """The first value of a query parameter; empty if missing."""
        return next((value for key, value in self.read_query() if key == name), "")

    def read_shown_query(self) -> list[tuple[str, str]]:
        """The pairs of `read_query`, with secrets hashed."""
        pairs = self.read_query()
        secrets = find_secrets({name for name, _ in pairs})
        if not secrets:
            return pairs
        hide = self.hash_key.hide
        return [
            (name, hide(value) if value and name in secrets else value) for name, value in pairs
        ]

    def read_shown_header(self, name: str) -> str:
        """A header's value, or its hash if it is a secret; empty if missing."""
        key = f"header:{name}"
        return self.read_secret(key) if is_secret(key) else self.read_header(name)

    def read_secret(self, limit_key: str) -> str:
        """The hash of the secret that a limit key names, 16 hex digits; empty if there is none."""
        if self._hidden is None:
            self._hidden = {}
        found = self._hidden.get(limit_key)
        if found is None:
            if limit_key == CREDENTIAL:
                found = self._read_credential()
            else:
                source, _, name = limit_key.partition(":")
                secret = (
                    extract_secret(self.read_header(name), name)
                    if source == "header"
                    else self.read_parameter(name)
                )
                found = self.hash_key.hide(secret) if secret else ""
            self._hidden[limit_key] = found
        return found

    def _read_credential(self) -> str:
        for place in list_places(self.path):
            found = self.read_secret(place)
            if found:
                return found
        return ""

    def list_credentials(self) -> list[str]:
        """The hashes of all credentials, without duplicates, in the order of `list_places`.

        `read_secret` finds the first.
        """
        if self._credentials is None:
            found: list[str] = []
            for place in list_places(self.path):
                if place.startswith("header:") and place[7:] not in self.headers:
                    continue  # most places
                secret = self.read_secret(place)
                if secret and secret not in found:
                    found.append(secret)
            self._credentials = found
        return self._credentials


def cut_text(text: str, length: int) -> str:
    """Shorten a client's text for reports. Invalid UTF-8, which cannot be written, is escaped."""
    if len(text) <= length and text.isascii():
        return text
    return text[:length].encode("utf-8", "backslashreplace").decode()


def opens_websocket(request: HttpRequest) -> bool:
    """Whether the request opens a WebSocket.

    Over HTTP/1.1 that is an upgrade (RFC 6455 section 4.1), over HTTP/2 a CONNECT with a
    `:protocol` (RFC 8441), which Envoy also shows as an upgrade.
    """
    headers = request.headers
    if "upgrade" not in headers and ":protocol" not in headers:
        return False
    wanted = headers.get("upgrade", b"") + b"," + headers.get(":protocol", b"")
    names = [item.strip().partition(b"/")[0] for item in wanted.lower().split(b",")]
    return b"websocket" in names


def explain_unknowable_body(request: HttpRequest) -> str:
    """Why the request has no body to compare; empty if it may have one.

    The body of an RPC, an upgrade or a tunnel is a stream that may never end. A body of known
    length is not a stream, and its bytes show whether it is gRPC.
    """
    if request.opens_responses:
        return RESPONSES_WEBSOCKET
    if "content-length" not in request.headers and is_grpc(request):
        return "grpc"
    if request.method == "CONNECT":
        return "connect"
    if "upgrade" in request.headers:
        return "upgrade"
    return ""


def is_grpc(request: HttpRequest) -> bool:
    """Whether method, content type and `te` are those of gRPC (grpc/doc/PROTOCOL-HTTP2.md)."""
    headers = request.headers
    content_type = headers.get("content-type", b"").lower()
    return (
        content_type.startswith(b"application/grpc")
        and content_type[16:17] in (b"", b"+", b";")
        and request.method == "POST"
        and headers.get("te", b"").lower() == b"trailers"
    )


class Descriptor(NamedTuple):
    """One limit key, compiled.

    Attributes:
        key: as in the policy.
        name: in the composite: the part after the source, in lower case, or the whole key if two
            names would be equal.
        source: `jwt`, `header`, `query`, `ip`, `body`, `credential` or `first_of`.
        argument: a claim, header or parameter, a JSON Pointer, or the limit key of a secret.
        read: takes a request and the argument; returns the request's value, or a secret's hash.
            Empty if it is missing or in the body.
        parts: the alternatives of `first_of`.
    """

    key: str
    name: str
    source: str
    argument: str
    read: Callable[[HttpRequest, str], str]
    parts: tuple[Any, ...] = ()  # Descriptors, which mypyc would reject as circular

    def list_sources(self) -> list[Descriptor]:
        """The descriptor itself, or its alternatives."""
        return list(self.parts) or [self]


_READERS: dict[str, Callable[[HttpRequest, str], str]] = {
    "jwt": lambda request, claim: request.facts.claim(claim),
    "header": HttpRequest.read_header,
    "query": HttpRequest.read_parameter,
    "ip": lambda request, _: request.facts.address(),
    "body": lambda _request, _pointer: "",
}


def _read_secret(request: HttpRequest, limit_key: str) -> str:
    return request.read_secret(limit_key)


def compile_descriptors(limit_keys: Sequence[str | FirstOf]) -> tuple[Descriptor, ...]:
    """The descriptors of a policy's limit keys."""
    unique = list(dict.fromkeys(limit_keys))
    names = Counter([name_key(key) for key in unique])
    made = [
        _compile_first(key) if isinstance(key, FirstOf) else compile_plainly(key) for key in unique
    ]
    return tuple(
        [
            descriptor._replace(name=name if names[name] == 1 else descriptor.key)
            for descriptor, name in zip(made, map(name_key, unique), strict=True)
        ]
    )


def compile_plainly(key: str, *, hidden: bool = True) -> Descriptor:
    """The descriptor of one limit key; with `hidden`, secrets are read as hashes."""
    source, _, argument = key.partition(":")
    read = _read_secret if hidden and source != "body" and is_secret(key) else _READERS[source]
    return Descriptor(key, key, source, key if read is _read_secret else argument, read)


def name_key(key: str | FirstOf) -> str:
    """The usual name of a limit key's descriptor; see `Descriptor`."""
    if isinstance(key, FirstOf):
        return key.name.lower()
    return key.partition(":")[2].lower() or key


def order_first_of(limit_keys: Sequence[str]) -> list[str]:
    """Order of alternatives: claims, which Envoy verifies, before secrets, which clients choose."""
    first = next((place for place, key in enumerate(limit_keys) if is_secret(key)), len(limit_keys))
    later = limit_keys[first:]
    verified = [key for key in later if key.startswith("jwt:")]
    return [*limit_keys[:first], *verified, *[key for key in later if key not in verified]]


def _compile_first(key: FirstOf) -> Descriptor:
    parts = tuple(
        [
            compile_plainly(part)
            for part in order_first_of(key.first_of)
            if part not in UNSUPPORTED_KEYS
        ]
    )

    def read(request: HttpRequest, _: str) -> str:
        for part in parts:
            value = part.read(request, part.argument)
            if value:
                return f"{part.key}:{value}"  # equal values of two sources are different callers
        return ""

    return Descriptor(key.name, key.name, FIRST_OF, key.name, read, parts)


def write_claim(value: object) -> str:
    """Write a claim as a descriptor: strings as they are, whole numbers as integers, other scalars.

    Envoy passes verified claims as protobuf Structs, in which every number is a double.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, int | float):
        return str(value)
    return ""


def decode_claims(authorization: str) -> dict[str, str]:
    """The unverified claims of a bearer token; empty if it is not a JWT (RFC 7519 section 7.2)."""
    scheme, _, token = authorization.partition(" ")
    parts = token.strip().split(".")
    # Header.payload.signature
    if scheme.lower() != "bearer" or len(parts) != 3 or len(token) > MAX_TOKEN:  # noqa: PLR2004
        return {}
    try:
        payload: Any = json.loads(urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        return {}
    if not isinstance(payload, dict):
        return {}
    # JSON can contain an unpaired surrogate, which cannot be encoded. Its bytes are preserved, as
    # in any invalid UTF-8.
    texts = {
        name: write_claim(value).encode("utf-8", "surrogatepass") for name, value in payload.items()
    }
    return {name: text.decode("utf-8", "surrogateescape") for name, text in texts.items() if text}
