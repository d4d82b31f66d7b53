"""What `--record` tells the access log of a request: all that `loopguard replay` needs to judge it again, and no more.

A record is a JSON object, the metadata `record`; its fields are the ones in docs/replay.md. What says who sent the request is
hashed: values of headers, claims and query parameters, and the address. Equal values have equal hashes, so that callers can be
told apart and requests compared, but no name can be read, or a secret in a query, off the log. Hashes of API keys and other
secrets are keyed, and stand there even where values are recorded as they are. Of headers and claims only those are recorded
that a policy of the request reads; one that the request does not have is None. The body is a length and two sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any
from urllib.parse import quote, urlencode

from extproc.engine.plan import Plan
from extproc.request.fingerprint import Body, is_too_long, write_crc32
from extproc.request.http import MAX_DESCRIPTOR, Facts, HttpRequest
from extproc.request.limit_keys import VENDOR_SESSION
from extproc.request.secrets import CREDENTIAL, SECRET_HEADERS, SECRET_PARAMETER, list_places
from extproc.sessions.names import find_vendor_headers

VERSION = 1
"""Of the records that are written."""

TOO_LONG = False
"""Stands in a record for a value, or a query, that is longer than what is told apart."""

_MAX_PAIRS = 64
"""In a query; one of more is hashed as a whole, because each takes a microsecond."""


def record_head(request: HttpRequest, facts: Facts, plans: Sequence[Plan], *, plain: bool) -> dict[str, Any]:
    """The part of a record that is known before the body.

    Args:
        request: what is recorded.
        facts: about it; those of the request itself are let go once it is prepared.
        plans: the policies that matched.
        plain: values as they are, in place of their hashes.
    """
    headers: dict[str, Any] = {}
    claims: dict[str, Any] = {}
    for plan in plans:
        for source, name in _list_reads(plan, request):
            if source == CREDENTIAL:
                headers |= {name: _hide(request, name) for name in _list_credential_headers(request)}
            elif source == "header" and name in SECRET_HEADERS:
                headers[name] = _hide(request, name)
            elif source == "header" and name != "host" and name not in headers:
                headers[name] = _write_value(request.read_header(name), plain) if name in request.headers else None
            elif source == "jwt" and name not in claims:
                claims[name] = _write_value(facts.claim(name), plain) or None
    parameters = [name for plan in plans for source, name in plan.list_reads() if source == "query"]
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


def record_body(head: dict[str, Any], body: Body | None, reason: str, now: float) -> dict[str, Any]:
    """The whole record.

    Args:
        head: what `record_head` returned.
        body: None when it is not known, or it was not asked for.
        reason: why it is not known.
        now: when the request is counted, in seconds since 1970.
    """
    record = {**head, "time": round(now, 3)}
    if body is not None:
        sums = {"body_bytes": body.length, "body_crc32": write_crc32(body.crc32), "body_adler32": write_crc32(body.adler32)}
        return {**record, **sums}
    return {**record, "unknown": reason} if reason else record


def _list_reads(plan: Plan, request: HttpRequest) -> list[tuple[str, str]]:
    """What a policy reads of this request's head; each header that one key stands for is one."""
    found = []
    for source, name in plan.list_reads():
        vendors = f"{source}:{name}" == VENDOR_SESSION
        found += [(source, header) for header in find_vendor_headers(request)] if vendors else [(source, name)]
    return found


def _write_value(value: str, plain: bool) -> str | bool:  # noqa: FBT001  # as `record_head`
    if len(value) > MAX_DESCRIPTOR:
        return TOO_LONG
    return _clean(value) if plain or not value else hash_value(value)


def hash_value(value: str) -> str:
    """blake2b-64, 16 hex digits."""
    return blake2b(value.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def _hide(request: HttpRequest, header: str) -> str | None:
    return request.read_secret(f"header:{header}") or None


def _list_credential_headers(request: HttpRequest) -> list[str]:
    """The headers that say what the request's credential is: those in which it may stand, up to the one that has it."""
    names = []
    for place in list_places(request.path):
        source, _, name = place.partition(":")
        if source == "header":
            names.append(name)
        if request.read_secret(place):
            break
    return names


def _write_query(request: HttpRequest, parameters: Sequence[str], plain: bool) -> str:  # noqa: FBT001  # as `record_head`
    """The query as it is or with hashes of its values, always of a secret's.

    Of many pairs it has only the parameters that a policy reads, and a hash of them all.
    """
    pairs = request.read_shown_query()
    if plain:
        changed = pairs is not request.read_query()
        return urlencode([(_clean(name), _clean(value)) for name, value in pairs]) if changed else _clean(request.query)
    whole = ""
    if len(pairs) > _MAX_PAIRS:
        whole = hash_value("&".join(sorted([f"{name}={value}" for name, value in pairs])))
        first = dict(reversed(pairs))
        pairs = [(name, first.get(name, "")) for name in dict.fromkeys(parameters)]
    hashed = [
        f"{quote(_clean(name), safe='')}={value if name == SECRET_PARAMETER or not value else hash_value(value)}"
        for name, value in pairs
    ]
    return "&".join([*hashed, whole] if whole else hashed)


def _clean(text: str) -> str:
    """Bytes that are not UTF-8 made visible: nothing else can stand in the metadata."""
    return text if text.isascii() else text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
