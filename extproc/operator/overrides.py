"""Overrides: orders about callers that operators give and revoke while the server runs.

Overrides live in the store. Each replica polls the store once a second and applies what it finds.
While the store is away, replicas apply the last known overrides. The store has hashes of clients'
names, never the names themselves.
"""
# interpreted: takes what operators order

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from time import time
from typing import Any, Final, NamedTuple, Protocol

from extproc.budgets.rule_keys import MAX_AMOUNT
from extproc.engine.engine import Engine
from extproc.engine.handover import HandedOver
from extproc.engine.orders import (
    ALL_POLICIES,
    BLOCK,
    GRANT,
    KILL,
    KINDS,
    MAX_GRANT,
    MAX_SECONDS,
    RELEASE,
    ActiveOverride,
    Grant,
    Overrides,
    Target,
    hash_descriptor,
)
from extproc.engine.plan import Plan
from extproc.errors import BadOrderError, PartlyAwayError, StoreError
from extproc.logs import make_extra
from extproc.metrics import Metrics
from extproc.operator.budget_grants import concerns, find_credits
from extproc.operator.budget_rows import BudgetRow
from extproc.operator.table import write_time
from extproc.policy.bundle import ALIAS
from extproc.policy.messages import describe
from extproc.request.hash_key import PROCESS_KEY, HashKey
from extproc.request.limit_keys import VENDOR_SESSION, check_limit_key, is_in_body
from extproc.request.secrets import CREDENTIAL, extract_secret, is_secret, says_secret
from extproc.sessions.names import is_vendor_session
from extproc.sessions.session_limits import MAX_TOOLS
from extproc.store import Store
from extproc.store.rules.budget import Take
from extproc.store.rules.documents import MAX_ORDERS, ORDERS, refuse_more
from extproc.store.rules.session import NANO_DOLLARS

_LOG = logging.getLogger("loopguard")

_BOOK = "overrides"
POLL_SECONDS = 1.0

DEFAULT_SECONDS: Final = 1_800
SESSION_SECONDS: Final = 86_400
"""Default duration of a kill or a grant: longer than most sessions last."""

_LEAST_RELEASE_SECONDS = 3_600
"""Minimum duration of a release.

Policies in route metadata may have longer lifetimes than the loaded ones.
"""

_MARGIN_SECONDS = 60
_MAX_REASON = 256
_MAX_WHO = 64
_MAX_TOOL = 256
_MAX_DESCRIPTORS = 16
_MAX_KEY = 64
_MAX_RULE = 128

_AMOUNTS = Grant._fields
_GRANTED = {amount: f"max_{amount}" for amount in _AMOUNTS} | {"cost": "max_cost_per_session"}
_EVENTS = {RELEASE: "loop_released", GRANT: "session_granted"}
"""Event by kind of override; other kinds have `override_given`."""

_HASH = re.compile(r"[0-9a-f]{16}")
_FINGERPRINT = re.compile(r"[0-9a-f]{8}")
_POLICY = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_SURROGATE = re.compile("[\ud800-\udfff]")


_SHOWN = 20
_CALLER = (
    "the 16 hex digits of a tenant, as in logs, an alias, or an object of descriptor values by name"
)


class Seen(NamedTuple):
    """Hashes that replicas have reported in the last hour.

    Attributes:
        callers: number of callers by what identifies them: the caller's hash, the hash of a value,
            or an alias.
        sessions: hashes of session names.
        fingerprints: fingerprints of loops.
        policies: ids of the policies that reported a hash or alias.
    """

    callers: Mapping[str, int]
    sessions: Collection[str]
    fingerprints: Collection[str]
    policies: Mapping[str, Collection[str]] = {}


class Prepared(NamedTuple):
    """An order that is not applied yet.

    Attributes:
        notes: remarks for the operator.
        takes: what a one-time grant adds to budgets.
    """

    override: ActiveOverride
    notes: list[str]
    takes: Sequence[Take] = ()


class Serving(Protocol):
    """The part of the service that overrides need. `overrides` is None if there are none."""

    engine: Engine
    key: HashKey
    handed_over: HandedOver
    overrides: Overrides | None


class OverrideService:
    """Takes orders from operators, and applies those that other replicas took.

    Attributes:
        emit: called with an event kind (`events.TYPES`) for each change made by this replica.
        list_seen: called in a thread for an order that names a hash; returns None if nothing is
            known.
        list_budgets: called in a thread for a budget grant; returns the rows of all replicas.
    """

    def __init__(self, store: Store, service: Serving, metrics: Metrics) -> None:
        self.emit: Callable[[str, ActiveOverride], None] = lambda _, __: None
        self.list_seen: Callable[[], Seen | None] = lambda: None
        self.list_budgets: Callable[[], Sequence[BudgetRow]] = tuple
        self._store = store
        self._service = service
        self._version = ""
        self._lock = asyncio.Lock()  # an older read must not overwrite a newer one
        self._standing: dict[str, ActiveOverride] = {}
        for kind in KINDS:
            metrics.overrides.labels(kind).set_function(partial(self._count, kind))

    def list_standing(self) -> list[ActiveOverride]:
        """All overrides that this replica applies now, newest first."""
        now = time()
        standing = [override for override in self._standing.values() if now < override.ends]
        return sorted(standing, key=lambda override: -override.since)

    async def prepare(self, order: object, who: str) -> Prepared:
        """The override that an order makes now, without applying it.

        Raises BadOrderError, or StoreError if the store is away.
        """
        plans = self._service.engine.plans
        override = parse_order(order, who, time(), plans, self._service.key)
        plans = [*plans, *self._service.handed_over.list_plans()]
        if override.budget:
            rows = await asyncio.to_thread(self.list_budgets)
            takes, notes = find_credits(override, rows, plans, time())
            met = sorted({row.policy for row in rows if concerns(override, row)})
            return Prepared(override._replace(meets=tuple(met)), notes, takes)
        if override.kind == RELEASE:
            await self.refresh()
            override = outlast_kills(override, self.list_standing())
        # The limit key of the order's session; empty if it has no session or gives a hash
        session = order.get("session") if isinstance(order, dict) else None
        session_key = next(map(check_limit_key, session), "") if isinstance(session, dict) else ""
        hashes = _find_hashes(override.target, session_key)
        seen = await asyncio.to_thread(self.list_seen) if hashes else None
        override = override._replace(
            meets=tuple(find_met(override, plans, [value for _, value in hashes], seen))
        )
        missed = remark_on_missed(override, plans) if seen is not None else ()
        notes = [
            *remark(override, plans, session_key),
            *_remark_on_hashes(hashes, seen),
            *missed,
        ]
        return Prepared(override, notes)

    async def give(self, order: object, who: str) -> tuple[ActiveOverride, list[str]]:
        """Apply an order: on this replica at once, on others within a second.

        Returns the override and remarks for the operator. Raises BadOrderError, or StoreError if it
        cannot be stored.
        """
        prepared = await self.prepare(order, who)
        override = prepared.override
        if override.budget:
            return await self._credit(prepared, who)
        if override.name not in self._standing and len(self.list_standing()) >= MAX_ORDERS:
            raise refuse_more()  # checked here to spare the store a request
        seconds = override.ends - override.since
        await self._store.documents.put(
            ORDERS, _BOOK, override.name, write_override(override), seconds
        )
        _announce("override given", override, who)
        self.emit(_EVENTS.get(override.kind, "override_given"), override)
        await self.refresh()
        return override, prepared.notes

    async def _credit(self, prepared: Prepared, who: str) -> tuple[ActiveOverride, list[str]]:
        """Add a grant's amount to its budgets, once; see `give`."""
        grant, notes, takes = prepared
        await self.refresh()
        if grant.name in self._standing:
            return grant, ["this grant was given before and is not added again"]
        if len(self.list_standing()) >= MAX_ORDERS:
            raise refuse_more()
        await self._store.documents.put(
            ORDERS, _BOOK, grant.name, write_override(grant), grant.ends - grant.since
        )
        try:
            answers = self._store.hit(takes) if takes else []
            if not isinstance(answers, list):
                await answers
        except PartlyAwayError:  # a retry would credit some callers twice
            notes.append(
                "part of the store is unavailable: some of the callers did not get the grant"
            )
        except StoreError:
            with suppress(StoreError):
                await self._store.documents.drop(ORDERS, _BOOK, grant.name)
            raise
        _announce("override given", grant, who)
        self.emit("budget_granted", grant)
        await self.refresh()
        return grant, notes

    async def revoke(self, name: str, who: str) -> bool:
        """End an override early; returns whether it existed.

        Raises StoreError if the store is away, and BadOrderError for a budget grant that has
        already been added.
        """
        await self.refresh()
        revoked = self._standing.get(name)
        if revoked is not None and has_acted(revoked):
            raise BadOrderError(
                f"{name} was already added to a budget and cannot be revoked; it is listed until "
                "it ends"
            )
        if not await self._store.documents.drop(ORDERS, _BOOK, name):
            return False
        if revoked is not None:
            _announce("override revoked", revoked, who)
            self.emit("override_revoked", revoked)
        await self.refresh()
        return True

    async def follow(self) -> None:
        """Poll the store for overrides until cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                await self.refresh()
            except StoreError:
                self._forget_ended()  # the last known overrides apply until they end
            except Exception:  # noqa: BLE001  # bad data in the store must not end the polling
                _LOG.exception("overrides cannot be read")

    async def refresh(self) -> None:
        """Apply the store's overrides if they have changed.

        If it raises StoreError, the current ones still apply.
        """
        async with self._lock:
            found = await self._store.documents.read(ORDERS, _BOOK, self._version)
            if found is None:
                self._forget_ended()
                return
            standing = await asyncio.to_thread(_read_all, found.documents)
            acting = [override for override in standing.values() if not has_acted(override)]
            filed = await asyncio.to_thread(Overrides, acting) if acting else None
            self._version, self._standing, self._service.overrides = found.version, standing, filed

    def _forget_ended(self) -> None:
        """Drop the overrides once all have ended, so that requests skip the lookup."""
        if self._standing and not self.list_standing():
            self._standing = {}
            self._service.overrides = None

    def _count(self, kind: str) -> float:
        return Counter(override.kind for override in self.list_standing())[kind]


def has_acted(override: ActiveOverride) -> bool:
    """Whether this is a one-time budget grant, which has no further effect."""
    return bool(override.budget) and not override.raises


def _announce(what: str, override: ActiveOverride, who: str) -> None:
    shown = {
        name: value
        for name, value in describe_override(override).items()
        if name not in ("who", "since")
    }
    _LOG.warning(what, extra=make_extra(**shown, who=who or None))


# ---- Parsing orders


def parse_order(
    order: object, who: str, now: float, plans: Sequence[Plan], key: HashKey = PROCESS_KEY
) -> ActiveOverride:
    """Parse an order given at `now` (seconds since 1970); raises BadOrderError with all problems.

    An order is an object with `kind` and at least one target: `caller` (a hash, an alias, or values
    by name), `session` (a hash, or one value by its key), `fingerprint` or `tool`. `policy`,
    `seconds` and `reason` are optional.

    A grant also has at least one of `steps`, `tool_calls`, `cost` (in dollars), `depth`, `agents`,
    `concurrent_agents`, `spawns_per_minute` and `tools` (calls by name). A budget grant instead has
    a `budget` (the name of a rule) and an `amount`, which is added once or, with `seconds`, raises
    the limit for that time. Grants with the same `key` are one grant.
    """
    given = _read_fields(order)
    kind = str(given["kind"])
    if problems := [*_find_misfits(kind, given), *_find_unknown_alias(given, plans)]:
        raise BadOrderError("; ".join(problems))
    policy = str(given.get("policy", ALL_POLICIES))
    default = SESSION_SECONDS if kind in (KILL, GRANT) else DEFAULT_SECONDS
    seconds = (
        _find_release_seconds(policy, plans)
        if kind == RELEASE
        else int(given.get("seconds", default))
    )
    caller = given.get("caller", "")
    named = Target(caller) if isinstance(caller, str) else _name_caller(caller, plans, key)
    named = named._replace(
        **{field: given[field] for field in ("fingerprint", "tool") if field in given}
    )
    target = (
        named._replace(session=_hash_session(given["session"], key))
        if "session" in given
        else named
    )
    identity: list[object] = [kind, policy, target]
    if kind == GRANT:
        identity.append(given.get("key") or secrets.token_hex(8))  # another grant adds to the first
    name = blake2b(json.dumps(identity).encode(), digest_size=6).hexdigest()
    grant = Grant(*(int(given.get(amount, 0)) for amount in _AMOUNTS))
    words = str(given.get("reason", "")), who[:_MAX_WHO]
    budget = str(given.get("budget", "")), float(given.get("amount", 0))
    raises = bool(budget[0]) and "seconds" in given
    tools = given.get("tools", ())
    return ActiveOverride(
        name, kind, target, policy, now, now + seconds, *words, grant, tools, *budget, raises=raises
    )


def _find_unknown_alias(given: Mapping[str, object], plans: Iterable[Plan]) -> Iterator[str]:
    caller = given.get("caller")
    if isinstance(caller, str) and not _HASH.fullmatch(caller):
        known = sorted({alias for plan in plans for alias in plan.aliases.values()})
        if caller not in known:
            there = f"; known aliases: {', '.join(known[:_SHOWN])}" if known else ""
            yield f"caller must be {_CALLER}, not {describe(caller)}{there}"


def _name_caller(values: Mapping[str, str], plans: Sequence[Plan], key: HashKey) -> Target:
    """The target for a caller's values.

    Secrets are hashed unless given as hashes; a single secret is the caller's name.
    """
    known = {name for plan in plans for name in plan.list_names()}
    forms = [form for plan in plans for form in plan.callers.forms]
    named: dict[str, str] = {}
    for given, written in values.items():
        # Without the source of a limit key
        name, text = given if given in known else given.rpartition(":")[2], written
        for form in forms:
            # As `explain` prints a `first_of`
            if form.start and form.descriptor == name and written.startswith(form.start):
                name, text = form.name, written[len(form.start) :]
                break
        named[name] = text
    claims = {name for name in named if any(plan.is_told_apart_by(f"jwt:{name}") for plan in plans)}
    secrets = {CREDENTIAL, *[form.name for form in forms if form.secret]}
    secrets |= {name for name in named if says_secret(name)} - claims
    shown = {
        name: _hide(text, name, key) if name in secrets else text for name, text in named.items()
    }
    if len(shown) == 1 and secrets.issuperset(shown):
        return Target(caller=next(iter(shown.values())))
    return Target(
        descriptors=tuple(
            sorted((name, hash_descriptor(name, text)) for name, text in shown.items())
        )
    )


def _hash_session(session: str | tuple[str, str], key: HashKey) -> str:
    if isinstance(session, str):
        return session
    name, text = session
    return hash_descriptor(
        name, _hide(text, name, key) if is_secret(name) and not is_in_body(name) else text
    )


def _hide(secret: str, name: str, key: HashKey) -> str:
    return secret if _HASH.fullmatch(secret) else key.hide(extract_secret(secret, name))


def _find_misfits(kind: str, given: Mapping[str, object]) -> Iterator[str]:
    if kind == RELEASE and "seconds" in given:
        yield "a release takes no seconds: it lasts until everything counted before it has expired"
    if kind in (KILL, GRANT):
        for key in ("fingerprint", "tool"):
            if key in given:
                yield (
                    f"{key} cannot be given for a {kind}, which applies to whole sessions: name "
                    "a session, or a caller"
                )
    if kind == GRANT:
        yield from _find_grant_misfits(given)
    for key in (*_AMOUNTS, "tools", "budget", "amount", "key") if kind != GRANT else ():
        if key in given:
            yield f"{key} is only valid for a grant"


def _find_grant_misfits(given: Mapping[str, object]) -> Iterator[str]:
    if "budget" in given:
        yield from _find_budget_misfits(given)
    elif "amount" in given:
        yield "amount needs a budget, which is the name of a rule"
    elif not given.keys() & {*_AMOUNTS, "tools"}:
        yield (
            f"at least one of these is required: {', '.join(_AMOUNTS)}, tools; or budget and amount"
        )


def _find_budget_misfits(given: Mapping[str, object]) -> Iterator[str]:
    for key in ("caller", "amount"):
        if key not in given:
            yield f"a grant of a budget needs {'a caller' if key == 'caller' else 'an amount'}"
    for key in (*_AMOUNTS, "tools", "session"):
        if key in given:
            yield f"{key} cannot be combined with budget and amount"


def outlast_kills(release: ActiveOverride, standing: Iterable[ActiveOverride]) -> ActiveOverride:
    """Extend a release to last at least as long as any kill it cancels."""
    undone = [kill.ends for kill in standing if kill.kind == KILL and _may_meet(kill, release)]
    return release._replace(ends=max([release.ends, *undone]))


def _may_meet(one: ActiveOverride, other: ActiveOverride) -> bool:
    named = [
        (one.policy, other.policy),
        (one.target.caller, other.target.caller),
        (one.target.session, other.target.session),
    ]
    others = dict(other.target.descriptors)
    named += [(value, others.get(name, "")) for name, value in one.target.descriptors]
    return all(not mine or not theirs or mine == theirs for mine, theirs in named)


def _find_release_seconds(policy: str, plans: Iterable[Plan]) -> int:
    lifetimes = [plan.lifetime_seconds for plan in plans if policy in ("", plan.id)]
    return max([_LEAST_RELEASE_SECONDS, *[seconds + _MARGIN_SECONDS for seconds in lifetimes]])


def _read_fields(order: object) -> dict[str, Any]:
    if not isinstance(order, dict):
        raise BadOrderError(f"an override is an object, not {describe(order)}")
    known = ", ".join(_READERS)
    problems = [
        f"{describe(key)}: unknown key; known keys are {known}"
        for key in order
        if key not in _READERS
    ]
    given: dict[str, Any] = {}
    for key, read in _READERS.items():
        if order.get(key) is None:
            continue
        if broken := _find_broken(order[key]):
            problems.append(f"{key} must be valid Unicode text, not {describe(broken)}")
            continue
        try:
            given[key] = read(order[key])
        except ValueError as error:
            message, *found = error.args
            problems.append(f"{key} {message}, not {describe(found[0] if found else order[key])}")
    if order.get("kind") is None:
        problems.append("kind is required")
    if not {"caller", "session", "fingerprint", "tool"} & order.keys():
        problems.append("a target is required: caller, session, fingerprint or tool")
    if problems:
        raise BadOrderError("; ".join(problems))
    return given


def _find_broken(value: object) -> str:
    """The first text with half of a surrogate pair, which UTF-8 cannot contain; empty for none."""
    texts = (
        [value]
        if isinstance(value, str)
        else [*value, *value.values()]
        if isinstance(value, dict)
        else []
    )
    return next((text for text in texts if isinstance(text, str) and _SURROGATE.search(text)), "")


def _read_caller(value: object) -> str | dict[str, str]:
    if isinstance(value, dict) and 0 < len(value) <= _MAX_DESCRIPTORS and _are_texts(value):
        return {name.lower(): text for name, text in value.items()}
    if isinstance(value, str) and ALIAS.match(value):
        return value
    raise ValueError(f"must be {_CALLER}")


def _read_session(value: object) -> str | tuple[str, str]:
    if isinstance(value, dict) and len(value) == 1 and _are_texts(value):
        ((key, text),) = value.items()
        try:
            return check_limit_key(key), text
        except ValueError as error:
            raise ValueError(f"has a key that {error}", key) from None
    if isinstance(value, str) and _HASH.fullmatch(value):
        return value
    raise ValueError(
        "must be 16 hex digits, or an object of one value by its key, such as header:x-session-id"
    )


def _are_texts(value: Mapping[object, object]) -> bool:
    return all(isinstance(part, str) and part for pair in value.items() for part in pair)


def _read_tools(value: object) -> tuple[tuple[str, int], ...]:
    most = MAX_GRANT.tool_calls
    if not isinstance(value, dict) or not 0 < len(value) <= MAX_TOOLS:
        raise ValueError(f"must be an object of numbers by tool name, of at most {MAX_TOOLS} tools")
    for tool, calls in value.items():
        if not 0 < len(tool) <= _MAX_TOOL:
            raise ValueError(f"must have names of 1 to {_MAX_TOOL} characters", tool)
        if not isinstance(calls, int) or isinstance(calls, bool) or not 0 < calls <= most:
            raise ValueError(f"must have numbers from 1 to {most}", calls)
    return tuple(sorted(value.items()))


def _make_reader(
    wanted: str,
    fits: Callable[[Any], object],
    convert: Callable[[Any], object] = lambda value: value,
) -> Callable[[object], object]:
    def read(value: object) -> object:
        if not fits(value):
            raise ValueError(f"must be {wanted}")
        return convert(value)

    return read


def _read_text(longest: int) -> Callable[[object], object]:
    return _make_reader(
        f"a text of 1 to {longest} characters",
        lambda value: isinstance(value, str) and 0 < len(value) <= longest,
    )


def _read_number(most: int, unit: str = "") -> Callable[[object], object]:
    return _make_reader(
        f"a number{unit} from 1 to {most}", lambda value: _is_number(value, most, int)
    )


def _is_number(value: Any, most: int, *kinds: type) -> bool:  # noqa: ANN401  # decoded JSON
    return type(value) in kinds and 0 < value <= most  # a bool is an int, but not of that type


def _read_pattern(pattern: re.Pattern[str], wanted: str) -> Callable[[object], object]:
    return _make_reader(wanted, lambda value: isinstance(value, str) and pattern.fullmatch(value))


_MOST_DOLLARS = MAX_GRANT.cost // NANO_DOLLARS

_READERS: dict[str, Callable[[object], object]] = {
    "kind": _make_reader(f"one of {', '.join(KINDS)}", lambda value: value in KINDS),
    "caller": _read_caller,
    "session": _read_session,
    "fingerprint": _read_pattern(_FINGERPRINT, "8 hex digits"),
    "tool": _read_text(_MAX_TOOL),
    "policy": _read_pattern(_POLICY, "the id of a policy"),
    "seconds": _read_number(MAX_SECONDS, " of seconds"),
    "reason": _read_text(_MAX_REASON),
    **{amount: _read_number(most) for amount, most in MAX_GRANT._asdict().items()},
    "cost": _make_reader(
        f"dollars, more than 0 and at most {_MOST_DOLLARS}",
        lambda value: _is_number(value, _MOST_DOLLARS, int, float),
        lambda dollars: max(1, round(dollars * NANO_DOLLARS)),
    ),
    "tools": _read_tools,
    "budget": _read_text(_MAX_RULE),
    "amount": _make_reader(
        f"a number, more than 0 and at most {MAX_AMOUNT}",
        lambda value: _is_number(value, MAX_AMOUNT, int, float),
        float,
    ),
    "key": _read_text(_MAX_KEY),
}


def remark(override: ActiveOverride, plans: Sequence[Plan], session_key: str = "") -> list[str]:
    """Remarks for the operator: why an override may do less than expected.

    `session_key` is the limit key of its session; empty if it has no session or gives a hash.
    """
    target = override.target
    meant = [plan for plan in plans if override.policy in ("", plan.id)]
    if not meant:
        return (
            [f"no policy {override.policy} is loaded"]
            if override.policy
            else ["no policy is loaded"]
        )
    ends_sessions, limits_alone = _tell_scope(override)
    acting = [plan for plan in meant if plan.limiter is not None] if limits_alone else meant
    if not acting:
        which = f"policy {override.policy} has no" if override.policy else "no policy has"
        instead = "; name a session, or use block" if override.kind == KILL else ""
        return [f"this {override.kind} does nothing: {which} session limits{instead}"]
    said = []
    known = {name for plan in acting for name in plan.list_names()}
    lacking = [name for name, _ in target.descriptors if name not in known]
    if lacking:
        there = ", ".join(sorted(known)) or "none"
        said.append(
            f"no policy identifies callers by {' or '.join(lacking)}; known descriptors: {there}"
        )
    if target.session:
        said += _remark_on_session(session_key, acting, limited=limits_alone or ends_sessions)
    if target.tool and not any(map(_looks_at_tools, acting)):
        said.append(
            f"this {override.kind} does nothing: no policy looks at tools (tool_calls, turns and "
            "mcp do)"
        )
    if override.kind in (BLOCK, KILL) and all(plan.shadow for plan in acting):
        said.append("the policies it applies to are in shadow mode, so nothing is refused")
    if override.kind == GRANT:
        said += _remark_on_grant(override, acting)
    reading = [
        f"{plan.id} ({detector.name})"
        for plan in acting
        for detector in plan.detectors
        if detector.stateless
    ]
    if override.kind == RELEASE and reading:
        said.append(
            "a release cannot reset loops that a request itself shows, as in "
            f"{', '.join(reading[:10])}: "
            "allow the caller for a while instead"
        )
    return said


def _tell_scope(override: ActiveOverride) -> tuple[bool, bool]:
    """Whether an order kills named sessions, and whether only policies with limits honour it."""
    ends_sessions = override.kind == KILL and override.target.session != ""
    return ends_sessions, override.kind in (KILL, GRANT) and not ends_sessions


def find_met(
    override: ActiveOverride, plans: Sequence[Plan], hashes: Sequence[str], seen: Seen | None
) -> list[str]:
    """The ids of the policies that an order may affect.

    A policy's configuration does not show which hashes it produces, so only policies that reported
    all `hashes` count.
    """
    ends_sessions, limits_alone = _tell_scope(override)
    target, met = override.target, []
    for plan in plans:
        if override.policy not in ("", plan.id) or (limits_alone and plan.limiter is None):
            continue
        fits = {name for name, _ in target.descriptors}.issubset(plan.list_names())
        if target.session:
            fits = fits and bool(plan.list_session_keys(limited=limits_alone or ends_sessions))
        if target.tool:
            fits = fits and _looks_at_tools(plan)
        if seen is not None:
            fits = fits and all(plan.id in seen.policies.get(value, ()) for value in hashes)
        if fits:
            met.append(plan.id)
    return list(dict.fromkeys(met))


def remark_on_missed(override: ActiveOverride, plans: Sequence[Plan]) -> Iterator[str]:
    """Warn if an order that names only a caller's hash applies to only some of its policies."""
    limits_alone = _tell_scope(override)[1]
    meant = [
        plan.id
        for plan in plans
        if override.policy in ("", plan.id) and (plan.limiter is not None or not limits_alone)
    ]
    missed = [policy for policy in dict.fromkeys(meant) if policy not in override.meets]
    if missed and override.meets and override.target == Target(override.target.caller):
        yield (
            f"this applies to {', '.join(override.meets[:_SHOWN])}, but not to "
            f"{', '.join(missed[:_SHOWN])}, which had no"
            " request from this caller in the last hour or identify it differently"
        )


def _looks_at_tools(plan: Plan) -> bool:
    return any("tools" in detector.similarity.keys.model_fields for detector in plan.detectors)


def _remark_on_session(key: str, plans: Sequence[Plan], *, limited: bool) -> Iterator[str]:
    keys = list(
        dict.fromkeys(known for plan in plans for known in plan.list_session_keys(limited=limited))
    )
    if not keys:
        yield "this does nothing: no policy looks for sessions"
    elif (
        key
        and key not in keys
        and not (VENDOR_SESSION in keys and is_vendor_session(key.partition(":")[2]))
    ):
        yield f"no policy finds sessions by {key}; known keys: {', '.join(keys)}"


def _remark_on_grant(override: ActiveOverride, plans: Sequence[Plan]) -> Iterator[str]:
    limiters = [plan.limiter for plan in plans if plan.limiter is not None]
    limited = {name for limiter in limiters for name, _, _ in limiter.list_limits("")}
    for amount, limit in _GRANTED.items():
        if getattr(override.grant, amount) and limit not in limited:
            yield f"granting {amount} does nothing: no policy has {limit}"
    for tool, _ in override.tools:
        if not any(limiter.limits_tool(tool) for limiter in limiters):
            yield f"granting calls of {tool} does nothing: no policy has max_calls_per_tool for it"


def _find_hashes(target: Target, session_key: str) -> list[tuple[str, str]]:
    """The hashes in an order, each after the name of its field in `Seen`."""
    session = "" if session_key else target.session
    named = (
        ("callers", target.caller),
        ("sessions", session),
        ("fingerprints", target.fingerprint),
    )
    return [(kind, value) for kind, value in named if value]


def _remark_on_hashes(hashes: Sequence[tuple[str, str]], seen: Seen | None) -> Iterator[str]:
    if seen is None:
        return
    for kind, value in hashes:
        if kind == "callers" and (shared := seen.callers.get(value, 0)) > 1:
            yield f"this applies to {shared} callers, which share {value}"
        if value not in getattr(seen, kind):
            yield (
                f"this probably does nothing: the {kind[:-1]} {value} was not reported in the "
                "last hour. "
                "Take hashes from the server's log, from /loops, or from a replay of recorded "
                "requests"
            )


# ---- Storage format


def write_override(override: ActiveOverride) -> bytes:
    """Encode an override for the store."""
    target = override.target
    document = {
        "kind": override.kind,
        "policy": override.policy,
        **target._asdict(),
        "descriptors": dict(target.descriptors),
        "since": override.since,
        "ends": override.ends,
        "reason": override.reason,
        "who": override.who,
        "grant": override.grant,
        "tools": override.tools,
        "budget": override.budget,
        "amount": override.amount,
        "meets": override.meets,
        "raises": override.raises,
    }
    return json.dumps(document, ensure_ascii=False).encode("utf-8", "backslashreplace")


def read_override(name: str, document: bytes) -> ActiveOverride:
    """Decode an override from the store, perhaps of another version; raises ValueError."""
    try:
        found = json.loads(document)
        descriptors = tuple(
            sorted((str(key), str(value)) for key, value in found["descriptors"].items())
        )
        caller, session, fingerprint, tool = [
            str(found[key]) for key in ("caller", "session", "fingerprint", "tool")
        ]
        kind, policy, reason, who = [str(found[key]) for key in ("kind", "policy", "reason", "who")]
        target = Target(caller, descriptors, session, fingerprint, tool)
        grant = Grant(
            *(
                min(max(0, int(given)), most)
                for given, most in zip(found.get("grant", ()), MAX_GRANT, strict=False)
            )
        )
        tools = tuple(
            [
                (str(tool), min(max(0, int(calls)), MAX_GRANT.tool_calls))
                for tool, calls in found.get("tools", ())
            ]
        )
        since, ends = float(found["since"]), float(found["ends"])
        budget = str(found.get("budget", "")), float(found.get("amount", 0))
        meets = tuple([str(policy) for policy in found.get("meets", ())])
        return ActiveOverride(
            name,
            kind,
            target,
            policy,
            since,
            ends,
            reason,
            who,
            grant,
            tools,
            *budget,
            meets,
            bool(found.get("raises")),
        )
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"no override: {error}") from None


def _read_all(documents: Mapping[str, bytes]) -> dict[str, ActiveOverride]:
    read = {}
    for name, document in documents.items():
        try:
            read[name] = read_override(name, document)
        except ValueError as error:
            _LOG.warning(
                "an override in the store is invalid",
                extra=make_extra(override=name, error=str(error)),
            )
    return read


def describe_override(override: ActiveOverride) -> dict[str, Any]:
    """An override as JSON for operators, without empty fields."""
    target = override.target
    shown: dict[str, Any] = {
        "override": override.name,
        "kind": override.kind,
        "policy": override.policy,
        "caller": target.caller or dict(target.descriptors),
        "session": target.session,
        "fingerprint": target.fingerprint,
        "tool": target.tool,
        **override.grant._asdict(),
        "cost": override.grant.cost / NANO_DOLLARS,
        "tools": dict(override.tools),
        "budget": override.budget,
        "amount": override.amount,
        "raises": override.raises,
        "meets": override.meets,
        "reason": override.reason,
        "who": override.who,
        "since": write_time(override.since),
        "ends": write_time(override.ends),
    }
    return {name: value for name, value in shown.items() if value}
