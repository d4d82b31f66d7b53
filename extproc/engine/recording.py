"""The records that `--record` adds to the access log, so that `loopguard replay` needs no bodies.

A record is a JSON object, the metadata `record`; docs/replay.md lists its fields. Values that
identify the sender are hashed: headers, claims, query parameters, and the address. Equal values
have equal hashes, so callers can be distinguished and requests compared, but the log contains no
names and no secrets of a query. Hashes of API keys and other secrets are keyed, and stay hashed
even if other values are plain. Only headers and claims that a policy reads are recorded; missing
ones as None. Of the body, only the length and two checksums are recorded.
"""

# interpreted: runs only with --record

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final
from urllib.parse import quote, urlencode

from extproc.engine.plan import Plan
from extproc.request.fingerprint import Body, is_too_long, write_crc32
from extproc.request.http import MAX_DESCRIPTOR, Facts, HttpRequest
from extproc.request.limit_keys import VENDOR_SESSION
from extproc.request.secrets import CREDENTIAL, is_secret, list_places, says_secret
from extproc.sessions.names import find_vendor_headers

VERSION: Final = 1
"""Version of the records' format."""

TOO_LONG: Final = False
"""Replaces a value or query that is too long to be hashed."""

_MAX_PAIRS: Final = 64
"""Maximum number of query pairs to hash separately, at a microsecond each; longer queries are
hashed as a whole."""


def record_head(
    request: HttpRequest, facts: Facts, plans: Sequence[Plan], *, plain: bool
) -> dict[str, Any]:
    """The record of a request before its body is known.

    Args:
        request: the request to record.
        facts: passed separately, because a prepared request has dropped them.
        plans: the policies that matched.
        plain: record values instead of their hashes.
    """
    headers: dict[str, Any] = {}
    claims: dict[str, Any] = {}
    parameters: list[str] = []
    for source, name in dict.fromkeys([read for plan in plans for read in plan.list_reads()]):
        if source == CREDENTIAL:
            headers |= {
                each: request.read_secret(f"header:{each}") or None
                for each in _list_credential_headers(request)
            }
        elif f"{source}:{name}" == VENDOR_SESSION:
            headers |= {
                each: _write_header(request, each, plain) for each in find_vendor_headers(request)
            }
        elif source == "header" and name != "host":
            headers[name] = _write_header(request, name, plain)
        elif source == "jwt":
            claims[name] = _write_value(facts.claim(name), plain) or None
        elif source == "query":
            parameters.append(name)
    record: dict[str, Any] = {
        "record": VERSION,
        "method": _clean(request.method),
        "authority": _clean(request.authority),
        "path": _clean(request.path),
        "route": _clean(facts.route()),
        "address": _write_value(facts.address(), plain),
        "headers": headers,
        "claims": claims,
    }
    if is_too_long(request.target, request.query):
        record["query"] = TOO_LONG
    elif request.query:
        record["query"] = _write_query(request, parameters, plain)
    return record


def record_body(record: dict[str, Any], body: Body | None, reason: str, now: float) -> None:
    """Add the body to a record.

    Args:
        record: the result of `record_head`.
        body: the body; None if it is unknown or not needed.
        reason: why it is unknown.
        now: when the request is counted, in seconds since 1970.
    """
    record["time"] = round(now, 3)
    if body is not None:
        record |= {
            "body_bytes": body.length,
            "body_crc32": write_crc32(body.crc32),
            "body_adler32": write_crc32(body.adler32),
        }
    elif reason:
        record["unknown"] = reason


def _write_value(value: str, plain: bool) -> str | bool:  # noqa: FBT001  # as `record_head`
    if len(value) > MAX_DESCRIPTOR:
        return TOO_LONG
    return _clean(value) if plain or not value else hash_value(value)


def _write_header(request: HttpRequest, name: str, plain: bool) -> str | bool | None:  # noqa: FBT001  # as `record_head`
    """A header's value; None if it is missing."""
    if is_secret(f"header:{name}"):
        return request.read_shown_header(name) or None
    return _write_value(request.read_header(name), plain) if name in request.headers else None


def hash_value(value: str) -> str:
    """blake2b-64, 16 hex digits."""
    return blake2b(value.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def _list_credential_headers(request: HttpRequest) -> list[str]:
    """The headers that determine the request's credentials.

    These are all candidates up to the first that has one, and later ones that have one.
    """
    names, found = [], False
    for place in list_places(request.path):
        source, _, name = place.partition(":")
        has_one = request.read_secret(place) != ""
        if source == "header" and (has_one or not found):
            names.append(name)
        found = found or has_one
    return names


def _write_query(request: HttpRequest, parameters: Sequence[str], plain: bool) -> str:  # noqa: FBT001  # as `record_head`
    """The query, plain or with hashes of its values; secrets are always hashed.

    If it has too many pairs, only the parameters that a policy reads are written, and a hash of the
    whole query.
    """
    pairs = request.read_shown_query()
    if plain:
        changed = pairs is not request.read_query()
        return (
            urlencode([(_clean(name), _clean(value)) for name, value in pairs])
            if changed
            else _clean(request.query)
        )
    whole = ""
    if len(pairs) > _MAX_PAIRS:
        whole = hash_value("&".join(sorted([f"{name}={value}" for name, value in pairs])))
        first = dict(reversed(pairs))
        pairs = [(name, first.get(name, "")) for name in dict.fromkeys(parameters)]
    hashed = [
        f"{quote(_clean(name), safe='')}="
        f"{hash_value(value) if value and not says_secret(name) else value}"
        for name, value in pairs
    ]
    return "&".join([*hashed, whole] if whole else hashed)


def _clean(text: str) -> str:
    """Escape invalid UTF-8, because metadata allows only valid text."""
    return (
        text
        if text.isascii()
        else text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    )
