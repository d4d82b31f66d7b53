"""The bundle format: the JSON's keys as typed, frozen models, and the JSON Schema from them.

The format is Fairvisor's bundle plus Loopguard's own keys, so drop-in bundles load unchanged. A
field's own rules are here; rules that compare fields are in `rules.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import datetime
from inspect import cleandoc
from string import Formatter
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
)

from extproc.apis import API_NAMES
from extproc.budgets.rule_keys import (
    CircuitBreaker,
    CostBased,
    FallbackLimit,
    Rule,
    TokenBucket,
    TokenBucketLlm,
)
from extproc.decision import NOTED
from extproc.detectors import KINDS
from extproc.detectors.keys import SimilarityKeys
from extproc.objects import (
    INSPECT_BYTES,
    MAX_SECONDS,
    NO_ITEMS,
    InspectBytes,
    JsonObject,
    Status,
    make_error,
)
from extproc.request.fingerprint import normalize_path
from extproc.request.limit_keys import (
    CallerKey,
    FirstOf,
    HeadCallerKey,
    HeadKey,
    ScopeKey,
    is_in_body,
    list_sources,
)
from extproc.request.notes import PLACEHOLDERS
from extproc.sessions.session_limits import Session, SessionLimits, UnnamedLimits
from extproc.store.rules.back_to_back import BACK_TO_BACK

MAX_DELAY_MS = 30_000
"""Default and maximum of `max_delay_ms` (Fairvisor's cap on a throttled request)."""

SHADOW: Final = "shadow"
ANY_API: Final = "any"

EVERYBODY: Final = 100
"""The percentage at which a policy acts on all callers, including unidentified ones."""

MAX_LABELS: Final = 8
NO_ALIASES: Any = Field(default_factory=dict, json_schema_extra={"default": {}})

_HASH = re.compile(r"[0-9a-f]{16}\Z")
ALIAS = re.compile(r"[A-Za-z0-9_.@-]{1,64}\Z")
"""A caller's name; a hash matches, too."""

_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}\Z")
_PATH_CHARACTERS = "/%!$&'()*+,;=:@-._~[]"
"""Characters that Envoy leaves as they are in a path; `%` starts an escape."""

METHOD = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+\Z")  # RFC 9110 section 5.6.2, token
METHODS = frozenset(
    """
    ACL BASELINE-CONTROL BIND CHECKIN CHECKOUT CONNECT COPY DELETE GET HEAD LABEL LINK LOCK
    MERGE MKACTIVITY MKCALENDAR MKCOL MKREDIRECTREF MKWORKSPACE MOVE OPTIONS ORDERPATCH PATCH
    POST PROPFIND PROPPATCH PUT QUERY REBIND REPORT SEARCH TRACE UNBIND UNCHECKOUT UNLINK UNLOCK
    UPDATE UPDATEREDIRECTREF VERSION-CONTROL
    BAN LIST M-SEARCH MSEARCH NOTIFY PURGE SOURCE SUBSCRIBE UNSUBSCRIBE
    """.split()  # noqa: SIM905  # a list literal would be 48 lines
)
"""Methods registered with IANA; the last line has unregistered ones in use. Servers may accept
more."""

_HOST = re.compile(r"(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?\Z")


def normalize_host(authority: str) -> str:
    """Normalize an authority for selectors: lower-case, without port and trailing dot.

    >>> normalize_host("API.Example.com.:8443")
    'api.example.com'
    """
    host = authority.lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].rstrip(".")


def is_below(path: str, prefix: str) -> bool:
    """Whether a `pathPrefix` matches a path.

    `/v1` matches `/v1` and `/v1/...`, `/v1/` all paths that start with it.
    """
    return path.startswith(prefix) and (
        prefix.endswith("/") or path[len(prefix) : len(prefix) + 1] in ("", "/")
    )


def _check_path(value: str) -> str:
    if not value.startswith("/"):
        raise make_error("must start with '/'")
    if "?" in value or "#" in value:
        raise make_error(
            "must be a path alone, without '?' or '#'", ": the query is part of every fingerprint"
        )
    return normalize_path(quote(value, safe=_PATH_CHARACTERS))


def _check_method(value: str) -> str:
    if not METHOD.match(value):
        raise make_error("must be an HTTP method such as 'POST'")
    return value.upper()


def _check_host(value: str) -> str:
    if not _HOST.match(value) or not normalize_host(value):
        raise make_error(
            "must be a host name such as 'api.example.com'",
            " (wildcards are not supported: list each host)",
        )
    return normalize_host(value)


def _require(fits: Callable[[str], object], message: str) -> AfterValidator:
    def check(value: str) -> str:
        if not fits(value):
            raise make_error(message)
        return value

    return AfterValidator(check)


def _check_header(value: str) -> str:
    if not METHOD.match(value):
        raise make_error("must be the name of a header, such as 'x-health-check'")
    if value.lower() == "host":
        raise make_error(
            "must be another header", ", which every request has; use hosts in the selector"
        )
    return value.lower()


def _check_note(value: str) -> str:
    try:
        fields = list(Formatter().parse(value))
    except ValueError:
        raise make_error("must double each { and } outside placeholders") from None
    if not value.strip():
        raise make_error("must not be blank")
    for _, field, form, conversion in fields:
        if field is not None and (field not in PLACEHOLDERS or form or conversion):
            known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
            raise make_error(f"must only have the placeholders {known}")
    return value


def read_moment(value: object) -> datetime | None:
    """An ISO 8601 time with a zone; None for other values."""
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return moment if moment is not None and moment.tzinfo is not None else None


def _check_timestamp(value: object) -> object:
    moment = read_moment(value)
    if moment is None:
        raise make_error("must be an ISO 8601 time with its zone, such as '2026-12-31T00:00:00Z'")
    return moment


OBJECT, LIST = "(object)", "(list)"
"""Tags that pydantic inserts into the places of errors, for values that may be a list. No key
equals them, and messages omit them."""

_NAMES = ", ".join(API_NAMES)
_TOKEN: dict[str, Any] = {"pattern": r"^[A-Za-z0-9!#\x24%&'*+.^_`|~-]+$"}
_HOST_PATTERN: dict[str, Any] = {"pattern": r"^([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?$"}

Path = Annotated[
    str, AfterValidator(_check_path), Field(json_schema_extra={"pattern": "^/[^?#]*$"})
]
Method = Annotated[str, AfterValidator(_check_method), Field(json_schema_extra=_TOKEN)]
Host = Annotated[str, AfterValidator(_check_host), Field(json_schema_extra=_HOST_PATTERN)]
Api = Annotated[
    str,
    _require(API_NAMES.__contains__, f"must be one of {_NAMES}"),
    Field(json_schema_extra={"enum": [*API_NAMES]}),
]
Apis = Annotated[
    Annotated[
        str,
        _require(ANY_API.__eq__, f"must be '{ANY_API}', or a list of {_NAMES}"),
        Field(json_schema_extra={"const": ANY_API}),
        Tag(OBJECT),
    ]
    | Annotated[Annotated[list[Api], Field(min_length=1)], Tag(LIST)],
    Discriminator(lambda value: LIST if isinstance(value, list) else OBJECT),
]
Header = Annotated[str, AfterValidator(_check_header), Field(json_schema_extra=_TOKEN)]
Id = Annotated[
    str,
    _require(_ID.match, "must be 1 to 128 of the characters A-Z a-z 0-9 _ . -"),
    Field(json_schema_extra={"pattern": "^[A-Za-z0-9_.-]{1,128}$"}),
]
NoteTemplate = Annotated[str, Field(max_length=1_000), AfterValidator(_check_note)]
CallerHash = Annotated[
    str,
    _require(_HASH.match, "must be the 16 hex digits of a caller, as in logs"),
    Field(json_schema_extra={"pattern": "^[0-9a-f]{16}$"}),
]
Alias = Annotated[
    str,
    _require(
        lambda value: ALIAS.match(value) and not _HASH.match(value),
        "must be 1 to 64 of the characters A-Z a-z 0-9 _ . @ -, and no hash",
    ),
    Field(json_schema_extra={"pattern": "^[A-Za-z0-9_.@-]{1,64}$"}),
]
Timestamp = Annotated[AwareDatetime, BeforeValidator(_check_timestamp)]


class Selector(JsonObject):
    """Which requests a policy applies to: those that match every key; one matching path is enough.

    Attributes:
        apis: `any` for all paths on which a model answers, or a list of the APIs that `loopguard
            schema` names. The end of the path tells the API, whatever the path begins with.
        pathExact: this path, without the query.
        pathPrefix: `/v1` matches `/v1` and `/v1/...`, `/v1/` all paths that start with it, `/`
            everything.
        pathPrefixes: any of several such prefixes.
        methods: any of these HTTP methods.
        hosts: any of these hosts, without port; case is ignored.
        routes: any of these Envoy route names.
    """

    apis: Apis | None = None
    pathExact: Path | None = None  # noqa: N815  # the JSON key is the attribute
    pathPrefix: Path | None = None  # noqa: N815  # the JSON key is the attribute
    pathPrefixes: list[Path] | None = Field(default=None, min_length=1)  # noqa: N815  # as above
    methods: list[Method] | None = Field(default=None, min_length=1)
    hosts: list[Host] | None = Field(default=None, min_length=1)
    routes: list[Annotated[str, Field(min_length=1)]] | None = Field(default=None, min_length=1)

    def list_prefixes(self) -> list[str]:
        """Every prefix, without duplicates."""
        own = [self.pathPrefix] if self.pathPrefix is not None else []
        return list(dict.fromkeys([*own, *(self.pathPrefixes or ())]))

    def list_apis(self) -> list[str]:
        """The APIs that it selects; empty if it selects any path."""
        return API_NAMES if self.apis == ANY_API else list(dict.fromkeys(self.apis or ()))

    def spans_apis(self) -> bool:
        """Whether it selects paths only by API."""
        return self.apis is not None and self.pathExact is None and not self.list_prefixes()


class Bypass(JsonObject):
    """Requests that are never counted: those that match every key; one matching path is enough.

    Attributes:
        header: requests with this header, whatever its value.
        pathExact: as in the selector.
        pathPrefix: as in the selector.
        methods: as in the selector.
    """

    header: Header | None = None
    pathExact: Path | None = None  # noqa: N815  # the JSON key is the attribute
    pathPrefix: Path | None = None  # noqa: N815  # the JSON key is the attribute
    methods: list[Method] | None = Field(default=None, min_length=1)


class LoopDetection(SimilarityKeys):
    """What counts as a loop, and what happens to its requests.

    Attributes:
        name: the detector's name in logs and metrics. Default: `default`, or in a list its
            similarity.
        enabled: `true` turns detection on; `validate` warns if the key is missing.
        window_seconds: length of the window; required, except with `turns` and `tool_calls`.
        action: what happens to a request in a loop: `reject` refuses, `land` asks the model for a
            final answer without tool calls, `throttle` delays, `steer` adds a note for the model,
            `warn` a header.
        window_type: `sliding_ttl`: every request restarts the window; `sliding_log`: the last
            `window_seconds` count; `fixed`: the first request starts the window; `back_to_back`:
            each request begins at most `window_seconds` (default 2) after the answer to the one
            before, and overlaps none.
        only_without_entries: with `true`, acts only while no access log entries arrive, in place of
            a detector with `back_to_back`.
        count_refused: with `false`, refused requests don't count.
        count_failed: with `false`, requests that get a 5xx or no answer, or that another filter
            refuses before they reach the upstream, don't count, if Envoy's access log reports them.
        reject_status: status of a refusal, 400 to 599; `auto`: 400 if waiting does not help, else
            429.
        refuse_as: `error`, or `completion`: an answer with the reason as the model's text.
        max_delay_ms: longest delay of `throttle`, in milliseconds.
        body: `ignore` compares requests without their bodies.
        max_inspect_bytes: longest body to inspect, at most 16 MiB; `turns` reads the end of longer
            ones, and `exact` without a `body:` key counts them.
        steer_note: text of the note, with `{what}`, `{count}`, `{tools}`, `{instead}`, `{reason}`,
            `{policy}` and `{cause}`.
        steer_share: percentage of the conversations that `steer` gives notes to, 0 to 100; the
            others get none.
    """

    name: Id | None = None
    enabled: bool = False
    window_seconds: Annotated[int, Field(gt=0, le=MAX_SECONDS)] | None = None
    action: Literal["reject", "land", "throttle", "steer", "warn"] = "reject"
    window_type: Literal["sliding_ttl", "sliding_log", "fixed", "back_to_back"] = "sliding_ttl"
    only_without_entries: bool = False
    count_refused: bool = True
    count_failed: bool = True
    reject_status: Status = 429
    refuse_as: Literal["error", "completion"] = "error"
    max_delay_ms: Annotated[int, Field(ge=1, le=MAX_DELAY_MS)] = MAX_DELAY_MS
    body: Literal["include", "ignore"] = "include"
    steer_note: NoteTemplate | None = None
    steer_share: Annotated[int, Field(ge=0, le=EVERYBODY)] = EVERYBODY
    max_inspect_bytes: InspectBytes = INSPECT_BYTES

    @property
    def needs_entries(self) -> bool:
        """Whether it needs Envoy's access log entries."""
        return self.window_type == BACK_TO_BACK or not self.count_failed

    @property
    def steers(self) -> bool:
        """Whether one of its actions is `steer`."""
        return self.action == "steer" or self.escalate.steer is not None

    @property
    def adds_notes(self) -> bool:
        """Whether one of its actions adds a note to requests."""
        named = [self.action, *[name for name, _ in self.escalate.list_steps()]]
        return any(action.value in named for action in NOTED)


DEFAULT_DETECTOR = "default"

Detections = Annotated[
    Annotated[LoopDetection, Tag(OBJECT)]
    | Annotated[Annotated[list[LoopDetection], Field(min_length=1)], Tag(LIST)],
    Discriminator(lambda value: LIST if isinstance(value, list) else OBJECT),
]


class Spec(JsonObject):
    """One policy: which requests it applies to, how it tells callers apart, and what it does.

    Attributes:
        selector: which requests the policy applies to.
        mode: `shadow` counts and reports, and never acts.
        enforce_percent: percentage of the callers to act on, 1 to 100. Default: all.
        ramp_by: limit keys that choose these callers. Default: the policy's limit keys outside the
            body.
        ramp_seed: policies with the same seed choose the same callers. Default: the policy's id.
        keep_counts: with `true`, enforcing and shadow mode share counts.
        canary_of: id of the enforcing policy to compare with. Default: the only one with the same
            selector.
        limit_keys: what tells callers apart: `jwt:<claim>`, `header:<name>`, `query:<name>`,
            `ip:address`, `credential`, `body:<JSON Pointer>`, or the first of several.
        labels: up to 8 limit keys outside the body whose values are only shown, beside the caller's
            hash.
        aliases: names for callers of all policies, by the hash of the caller or of its credential.
        missing_descriptor: requests that lack limit keys: `require_one` counts them by the keys
            they have, if any; `skip` never counts them; `share` counts all with none as one caller.
            If it is not set, a rule skips requests that lack one of its own keys.
        uncountable: `reject` refuses requests that a detector or a rule cannot count.
        bypass: requests that are never counted.
        session: which conversation a request belongs to.
        session_limits: limits of a session.
        unnamed_limits: limits of a caller's requests without a session. Default: none.
        loop_detection: a detector, or a list of them.
        rules: budgets of callers: rates of requests and tokens, and costs in a period.
        fallback_limit: the budget of requests for which no rule's `match` holds.
        circuit_breaker: refuses the requests of callers that spend too fast.
    """

    selector: Selector
    mode: Literal["enforce", "shadow"] = "enforce"
    enforce_percent: Annotated[int, Field(ge=1, le=EVERYBODY)] | None = None
    ramp_by: Annotated[list[HeadCallerKey], Field(min_length=1)] | None = None
    ramp_seed: Id | None = None
    keep_counts: bool = False
    canary_of: Id | None = None
    limit_keys: list[CallerKey] = NO_ITEMS
    labels: Annotated[list[HeadKey], Field(max_length=MAX_LABELS)] = NO_ITEMS
    aliases: dict[CallerHash, Alias] = NO_ALIASES
    missing_descriptor: Literal["require_one", "skip", "share"] = "require_one"
    uncountable: Literal["allow", "reject"] = "allow"
    bypass: list[Bypass] = NO_ITEMS
    session: Session | None = None
    session_limits: SessionLimits | None = None
    unnamed_limits: UnnamedLimits | None = None
    loop_detection: Detections | None = None
    rules: list[Rule] = NO_ITEMS
    fallback_limit: FallbackLimit | None = None
    circuit_breaker: CircuitBreaker | None = None

    def all_limit_keys(self) -> list[str | FirstOf]:
        """The `limit_keys` of the policy, its rules and its fallback, without duplicates."""
        keys = [*self.limit_keys, *(key for rule in self.rules for key in rule.limit_keys)]
        return list(
            dict.fromkeys(
                [
                    *keys,
                    *(self.fallback_limit.limit_keys if self.fallback_limit is not None else ()),
                ]
            )
        )

    def list_sources(self) -> list[str]:
        """The limit keys of the policy and its labels, with the alternatives of each `first_of`."""
        return list(
            dict.fromkeys(
                list_sources([*self.all_limit_keys(), *self.list_ramp_keys(), *self.labels])
            )
        )

    def list_ramp_keys(self) -> list[str | FirstOf]:
        """The limit keys that choose the callers of `enforce_percent`."""
        return self.ramp_by or [key for key in self.all_limit_keys() if not is_in_body(key)]

    def is_enabled(self) -> bool:
        """Whether any guard is enabled."""
        return self.session_limits is not None or bool(self.detectors()) or self.has_budgets()

    def has_budgets(self) -> bool:
        """Whether it has a budget or a circuit breaker."""
        return bool(self.rules) or self.fallback_limit is not None or self.has_breaker()

    def has_breaker(self) -> bool:
        """Whether its circuit breaker is on."""
        return self.circuit_breaker is not None and self.circuit_breaker.enabled

    def list_budget_rules(self) -> list[Rule]:
        """Its rules and its fallback."""
        return [*self.rules, *([self.fallback_limit] if self.fallback_limit is not None else [])]

    def keeps_counts(self) -> bool:
        """Whether it stores state that callers without descriptors would share."""
        counting = any(
            not KINDS[loop.similarity].stateless or loop.cooldown_seconds
            for _, loop in self.detectors()
        )
        return counting or self.session_limits is not None

    def find_session_inspect_bytes(self) -> int:
        """Maximum body length for `session_limits`: their own, or the largest of the detectors."""
        own = self.session_limits.max_inspect_bytes if self.session_limits is not None else None
        return own or max(
            [INSPECT_BYTES, *[loop.max_inspect_bytes for _, loop in self.detectors()]]
        )

    def detectors(self) -> list[tuple[str, LoopDetection]]:
        """The enabled entries of `loop_detection` by name.

        The default name is the similarity, or `default` if `loop_detection` is not a list.
        """
        loops = self.loop_detection
        if loops is None:
            return []
        named = (
            [(loop.name or loop.similarity, loop) for loop in loops]
            if isinstance(loops, list)
            else [(loops.name or DEFAULT_DETECTOR, loops)]
        )
        return [(name, loop) for name, loop in named if loop.enabled]


class Policy(JsonObject):
    """A policy and its id.

    Attributes:
        id: unique in all files: letters, digits, `_`, `.` and `-`.
        spec: what the policy does.
    """

    id: Id
    spec: Spec


class Override(JsonObject):
    """A temporary switch.

    Attributes:
        enabled: whether it is on.
        reason: for the log.
        expires_at: when it ends.
    """

    enabled: bool
    reason: Annotated[str, Field(max_length=256)] | None = None
    expires_at: Timestamp | None = None


class KillSwitch(JsonObject):
    """Requests to refuse before any policy sees them.

    Attributes:
        scope_key: what to compare: `jwt:<claim>`, `header:<name>`, `query:<name>` or `ip:address`.
        scope_value: the value, compared exactly.
        route: the full path of the requests, not a prefix. Default: all paths.
        reason: for the log; clients don't see it.
        expires_at: when the switch ends, without a reload.
    """

    scope_key: ScopeKey
    scope_value: Annotated[str, Field(min_length=1)]
    route: Path | None = None
    reason: str | None = None
    expires_at: Timestamp | None = None


class Envelope(JsonObject):
    """A bundle whose policies and kill switches are still unchecked.

    Attributes:
        bundle_version: number of this version of the bundle.
        policies: the policies.
        issued_at: when the bundle was made, as ISO 8601 with a time zone.
        expires_at: when the bundle expires; a running server keeps it and warns.
        global_shadow: puts all policies of the bundle in shadow mode.
        kill_switch_override: turns off all kill switches of the bundle.
        kill_switches: requests to refuse before any policy sees them.
        defaults: ignored.
    """

    bundle_version: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    policies: list[Any]
    issued_at: Timestamp | None = None
    expires_at: Timestamp | None = None
    global_shadow: Override | None = None
    kill_switch_override: Override | None = None
    kill_switches: list[Any] = NO_ITEMS
    defaults: Any = None


class Bundle(Envelope):
    """A bundle: policies and kill switches in one file."""

    policies: list[Policy]
    kill_switches: list[KillSwitch] = NO_ITEMS


_ATTRIBUTE = re.compile(r"^    (\w+): (.+(?:\n {5,}.+)*)", re.MULTILINE)
"""An attribute in a docstring, with continuation lines."""


def _describe(definition: dict[str, Any], model: type[JsonObject]) -> None:
    """Copy attributes' descriptions from the docstrings of a model and its bases, for editors."""
    definition["description"] = cleandoc(model.__doc__ or "").partition("\n\nAttributes:\n")[0]
    for owner in reversed(model.__mro__):
        _, _, attributes = cleandoc(owner.__doc__ or "").partition("Attributes:\n")
        for name, text in _ATTRIBUTE.findall(attributes):
            if name in model.model_fields:
                definition["properties"][name]["description"] = " ".join(text.split())


def _list_models(model: type[JsonObject]) -> Iterator[type[JsonObject]]:
    for below in model.__subclasses__():
        yield below
        yield from _list_models(below)


def make_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a policy file: a bundle, one policy or a list of policies."""
    made = TypeAdapter(Bundle | Policy | list[Policy]).json_schema()
    configs = TypeAdapter(TokenBucket | CostBased | TokenBucketLlm).json_schema()
    made["$defs"] |= configs["$defs"]
    for name in (Rule.__name__, FallbackLimit.__name__):
        made["$defs"][name]["properties"]["algorithm_config"] = {"anyOf": configs["anyOf"]}
    models = {model.__name__: model for model in _list_models(JsonObject)}
    for name, definition in made["$defs"].items():
        _describe(definition, models[name])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Loopguard policy file",
        **made,
    }
