"""The records that `--record` adds to the access log: exactly what `loopguard replay` needs to judge a request again.

A record is a JSON object, the metadata `record`; docs/replay.md lists its fields. Values that identify the sender are hashed:
those of headers, claims and query parameters, and the address. Equal values have equal hashes, so callers can be told apart and
requests compared, but the log shows no names, and no secrets of a query. Hashes of API keys and other secrets are keyed, and
are recorded even if other values are plain. Only headers and claims that a policy of the request reads are recorded; a missing
one is recorded as None. Of the body, the record has the length, two checksums, and digests of the turns that it shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final
from urllib.parse import quote, urlencode

from extproc.bounded import Memo
from extproc.engine.evaluation import Evaluation
from extproc.engine.plan import Plan
from extproc.request.fingerprint import Body, is_too_long
from extproc.request.hash_key import HashKey
from extproc.request.http import MAX_DESCRIPTOR, Facts, HttpRequest
from extproc.request.limit_keys import VENDOR_SESSION
from extproc.request.secrets import CREDENTIAL, SECRET_HEADERS, SECRET_PARAMETER, list_places
from extproc.sessions.call_digests import KnownLedger, write_calls
from extproc.sessions.names import find_vendor_headers

_SECRET_PAIR: Final = f"{SECRET_PARAMETER}="
_MOST_DIGESTS: Final = 2
"""Maximum number of digests in a record: one, or two while a canary with other `ignore_arguments` watches."""

VERSION = 1
"""Version of the records' format."""

TOO_LONG = False
"""Recorded in place of a value, or a query, that is too long to be hashed."""

_SESSIONS: Final = "sessions"
_PER_SECOND: Final = 1_000
"""The precision of the time, in milliseconds."""

_MOST_HEADS: Final = 1_024
_LONGEST_KNOWN: Final = 1_024
"""Number of heads that are kept, and maximum length of a target or of a header's value in them."""

_MAX_PAIRS = 64
"""Maximum number of pairs of a query to hash separately, at a microsecond each; longer queries are hashed as a whole."""


class RecordedHead:
    """The part of a record that is known before the body; equal requests share it.

    Attributes:
        values: its fields; never changed.
        written: the same in the form of metadata; empty until it is written.
        callers: `RequestRecord.callers` of the newest request.
        written_callers: the same in the form of metadata.
    """

    __slots__ = ("callers", "values", "written", "written_callers")

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.written = b""
        self.callers: dict[str, dict[str, str]] = {}
        self.written_callers = b""


class RequestRecord:
    """The record of a request.

    Attributes:
        head: the part that is known before the body.
        time: when the request is counted, in seconds since 1970.
        body: the body; None if it is unknown or not needed.
        unknown: why it is unknown.
        callers: hashes of callers and sessions, by the field's name.
        turns: digests of turns.
        limits: the digest of what session limits have counted.
    """

    __slots__ = ("body", "callers", "head", "limits", "time", "turns", "unknown")

    def __init__(self, head: RecordedHead) -> None:
        self.head = head
        self.time = 0.0
        self.body: Body | None = None
        self.unknown = ""
        self.callers: dict[str, dict[str, str]] = {}
        self.turns = ""
        self.limits = ""

    def add_callers(self, field: str, found: dict[str, str]) -> None:
        """Add hashes to those of a field, of a part that was decided without the body."""
        if found:
            known = self.callers.get(field)
            self.callers[field] = found if known is None else known | found


_HEADS: Final[Memo[tuple[object, ...], RecordedHead]] = Memo(_MOST_HEADS // 2)


def record_head(request: HttpRequest, facts: Facts, plans: Sequence[Plan], *, plain: bool) -> RequestRecord:
    """The record of a request before its body is known.

    Args:
        request: the request to record.
        facts: the request's facts, because the request drops them when it is prepared.
        plans: the policies that matched.
        plain: record values instead of their hashes.
    """
    key = _identify_head(request, facts, plans, plain)
    head = _HEADS.get(key) if key is not None else None
    if head is None:
        head = RecordedHead(_record_head(request, facts, plans, plain))
        if key is not None:
            _HEADS.put(key, head)
    return RequestRecord(head)


def _identify_head(
    request: HttpRequest,
    facts: Facts,
    plans: Sequence[Plan],
    plain: bool,  # noqa: FBT001  # as `record_head`
) -> tuple[object, ...] | None:
    """All on which the head of a record depends, without secrets; None if it is too long, or may have secrets."""
    known = facts.identify()
    if known is None or len(request.target) > _LONGEST_KNOWN or _SECRET_PAIR in request.query or "%" in request.query:
        return None
    headers = request.headers
    parts: list[object] = [known, plain, request.method, request.authority, request.target]
    for plan in plans:
        reads = plan.list_reads()
        parts.append(reads)
        for name in [*reads.headers, *find_vendor_headers(request)] if reads.vendors else reads.headers:
            if name in headers:
                value = headers[name]
                if len(value) > _LONGEST_KNOWN:
                    return None
                parts.append(name)
                parts.append(value)
        parts += [request.read_secret(f"header:{name}") for name in reads.secrets]
        for place in list_places(request.path) if reads.credential else ():
            secret = request.read_secret(place)
            parts.append(secret)
            if secret:
                break
    return tuple(parts)


def _record_head(
    request: HttpRequest,
    facts: Facts,
    plans: Sequence[Plan],
    plain: bool,  # noqa: FBT001  # as `record_head`
) -> dict[str, Any]:
    """The head's fields."""
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
    parameters = [name for plan in plans for source, name in plan.list_reads().pairs if source == "query"]
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


def record_body(record: RequestRecord, body: Body | None, reason: str, now: float) -> None:
    """Add the body to a record.

    Args:
        record: the result of `record_head`.
        body: the body; None if it is unknown or not needed.
        reason: why it is unknown.
        now: when the request is counted, in seconds since 1970.
    """
    record.time = int(now * _PER_SECOND + 0.5) / _PER_SECOND  # as `round` does, in a tenth of the time
    record.body = body
    if body is None:
        record.unknown = reason


def record_callers(record: RequestRecord, evaluation: Evaluation) -> None:
    """Add the callers' hashes to a record with hashed values, by the limit keys that name them; call it after the body."""
    record.add_callers(
        "tenants",
        {each.plan.callers: each.tenant for group in evaluation.groups for each in group.candidates if each.tenant},
    )


def record_turns(record: RequestRecord, evaluation: Evaluation) -> None:
    """Add digests of turns to a record, if a detector compares turns; call it when all candidates have read the body."""
    digests = evaluation.write_digests(_MOST_DIGESTS)
    if not digests:
        return
    record.turns = ",".join(digests)
    record.add_callers(
        _SESSIONS,
        {
            each.plan.rings.id: each.session
            for each, _ in evaluation.list_readers()
            if each.plan.rings is not None and each.looks_for_session
        },
    )


def record_calls(record: RequestRecord, evaluation: Evaluation, key: HashKey, *, rejected: bool, refused: bool) -> None:
    """Add what session limits have counted to a record; call it when the request is decided.

    Args:
        record: the record.
        evaluation: the request; some policy limits sessions.
        key: for the hashes.
        rejected: policies decided to refuse it.
        refused: it is refused.
    """
    described = [(each.describe_shown(), each) for each in evaluation.sessions]
    asked = [(shown, each) for shown, each in described if shown is not None]
    if not asked:
        return
    shown, first = next(((shown, each) for shown, each in asked if each.call and not shown.unreadable), asked[0])
    shown.place = next((each.place for _, each in asked if each.place is not None), None)
    shown.rejected, shown.refused = rejected, refused
    ledgers: dict[bytes, KnownLedger] = {}
    for _, each in asked:
        ledger = each.describe_ledger()
        first_of_shape = ledgers.setdefault(ledger.shape, ledger)
        first_of_shape.ended = max(first_of_shape.ended, ledger.ended)  # only some policies kill sessions
    record.limits = write_calls(shown, list(ledgers.values()), first.known_messages, key.secret)
    record.add_callers(_SESSIONS, {each.limiter.names.id: each.named for _, each in asked})


def _list_reads(plan: Plan, request: HttpRequest) -> list[tuple[str, str]]:
    """What a policy reads of this request's head; a key that stands for several headers is expanded."""
    found = []
    for source, name in plan.list_reads().pairs:
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
    """The headers that determine the request's credential: all places where it may be, up to the first that has one."""
    names = []
    for place in list_places(request.path):
        source, _, name = place.partition(":")
        if source == "header":
            names.append(name)
        if request.read_secret(place):
            break
    return names


def _write_query(request: HttpRequest, parameters: Sequence[str], plain: bool) -> str:  # noqa: FBT001  # as `record_head`
    """The query, plain or with hashes of its values; secrets are always hashed.

    A query with too many pairs is reduced to the parameters that a policy reads, and a hash of the whole query.
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
    """Make invalid UTF-8 visible, because metadata allows only valid text."""
    return text if text.isascii() else text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
