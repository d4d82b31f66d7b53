"""What a policy bundle is: the JSON's own keys as typed, frozen models, and the JSON Schema made from them.

The format is Fairvisor's bundle plus Loopguard's own keys, so a drop-in bundle loads as it is. Field rules stand here, beside
the field; rules that compare fields stand in `rules.py`.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    model_validator,
)
from pydantic_core import PydanticCustomError

MAX_SECONDS = 31_536_000
"""Longest window or cooldown: a year, so that milliseconds always fit the stores' 64-bit fields."""

MAX_THRESHOLD = 1_000_000_000
MAX_CALLS = 200
"""Most calls, and most messages, that a detector compares with each other."""

MAX_CYCLE = 16
MAX_INSPECT_BYTES = 16 * 2**20

MAX_DELAY_MS = 30_000
"""Default and top of `max_delay_ms` (Fairvisor's cap on a throttled request)."""

HEADER = "header"
JWT = "jwt"
QUERY = "query"
IP_ADDRESS = "ip:address"
# What Fairvisor can derive and Loopguard cannot: reported like every other part that is not enforced.
UNSUPPORTED_KEYS = frozenset({"ip:country", "ip:asn", "ip:type", "ip:tor", "ua:bot", "ua:bot_category"})

BODY = "body"

_KEY = re.compile(r"(?:jwt|header|query):[A-Za-z0-9_-]+\Z")
_POINTER = re.compile(r"(?:/(?:[^~/]|~[01])*)+\Z")  # RFC 6901, without the empty one, which is the whole document
_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}\Z")
METHOD = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+\Z")  # RFC 9110 section 5.6.2, token
_HOST = re.compile(r"(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?\Z")


Place = tuple[str | int, ...]
"""The steps from a document down to one of its values."""


def normalized_host(authority: str) -> str:
    """An authority as selectors compare it: lower-case, without port and trailing dot.

    >>> normalized_host("API.Example.com.:8443")
    'api.example.com'
    """
    host = authority.lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].rstrip(".")


def _wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("loopguard", "{message}", {"message": message})


def _path(value: str) -> str:
    if not value.startswith("/"):
        raise _wrong("must start with '/'")
    if "?" in value or "#" in value:
        raise _wrong("must be a path alone, without '?' or '#': the query is part of every fingerprint")
    return value


def _method(value: str) -> str:
    if not METHOD.match(value):
        raise _wrong("must be an HTTP method such as 'POST'")
    return value.upper()


def _host(value: str) -> str:
    if not _HOST.match(value) or not normalized_host(value):
        raise _wrong("must be a host name such as 'api.example.com' (wildcards are not supported: list each host)")
    return normalized_host(value)


def _limit_key(value: str) -> str:
    source, _, name = value.partition(":")
    if source.lower() == HEADER:
        value = f"{HEADER}:{name.lower()}"  # header names are case-insensitive (RFC 9110 section 5.1)
    if source == BODY:
        if not _POINTER.match(name):
            raise _wrong("must be 'body:' and a JSON Pointer, such as 'body:/model' or 'body:/metadata/session_id'")
        return value
    if value != IP_ADDRESS and value not in UNSUPPORTED_KEYS and not _KEY.match(value):
        raise _wrong(
            "must be 'jwt:<claim>', 'header:<name>', 'query:<name>' (names of letters, digits, '_' and '-'), 'ip:address' "
            "or 'body:/<JSON Pointer>'"
        )
    return value


def _pointer(value: str) -> str:
    if not _POINTER.match(value):
        raise _wrong("must be a JSON Pointer, such as '/metadata/request_id' or '/messages/*/id'")
    return value


def _header(value: str) -> str:
    if not METHOD.match(value):
        raise _wrong("must be the name of a header, such as 'x-health-check'")
    if value.lower() == "host":
        raise _wrong("must not be host, which every request has; name the hosts in the selector")
    return value.lower()


def _id(value: str) -> str:
    if not _ID.match(value):
        raise _wrong("must be 1 to 128 of the characters A-Z a-z 0-9 _ . -")
    return value


def _timestamp(value: object) -> object:
    if not isinstance(value, str):
        raise _wrong("must be an ISO 8601 time with its zone, such as '2026-12-31T00:00:00Z'")
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise _wrong("must be an ISO 8601 time with its zone, such as '2026-12-31T00:00:00Z'")
    return moment


_TOKEN: dict[str, Any] = {"pattern": r"^[A-Za-z0-9!#\x24%&'*+.^_`|~-]+$"}
_HOST_PATTERN: dict[str, Any] = {"pattern": r"^([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?$"}
_KEY_PATTERN: dict[str, Any] = {
    "pattern": "^((jwt|query|[Hh][Ee][Aa][Dd][Ee][Rr]):[A-Za-z0-9_-]+|body:(/([^~/]|~[01])*)+"
    "|ip:(address|country|asn|type|tor)|ua:(bot|bot_category))$"
}

Path = Annotated[str, AfterValidator(_path), Field(json_schema_extra={"pattern": "^/[^?#]*$"})]
Method = Annotated[str, AfterValidator(_method), Field(json_schema_extra=_TOKEN)]
Host = Annotated[str, AfterValidator(_host), Field(json_schema_extra=_HOST_PATTERN)]
LimitKey = Annotated[str, AfterValidator(_limit_key), Field(json_schema_extra=_KEY_PATTERN)]
Pointer = Annotated[str, AfterValidator(_pointer), Field(json_schema_extra={"pattern": "^(/([^~/]|~[01])*)+$"})]
Header = Annotated[str, AfterValidator(_header), Field(json_schema_extra=_TOKEN)]
Id = Annotated[str, AfterValidator(_id), Field(json_schema_extra={"pattern": "^[A-Za-z0-9_.-]{1,128}$"})]
Timestamp = Annotated[AwareDatetime, BeforeValidator(_timestamp)]


def is_annotation(key: str) -> bool:
    """True for the keys that any object may carry and nobody reads: `description` and `x-...`."""
    return key == "description" or key.startswith("x-")


class _Part(BaseModel):
    """A JSON object of the bundle: unknown keys are errors, except `description` and `x-...`."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        json_schema_extra={"patternProperties": {"^x-": {}, "^description$": {}}},
    )

    @model_validator(mode="before")
    @classmethod
    def _without_annotations(cls, value: Any) -> Any:  # noqa: ANN401  # raw JSON, before any check
        if isinstance(value, dict) and any(isinstance(key, str) and is_annotation(key) for key in value):
            return {key: item for key, item in value.items() if not is_annotation(key)}
        return value


class Selector(_Part):
    """Which requests a policy sees: (`pathExact` or `pathPrefix`) and `methods` and `hosts` and `routes`."""

    pathExact: Path | None = None  # noqa: N815  # the JSON key is the attribute
    pathPrefix: Path | None = None  # noqa: N815  # the JSON key is the attribute
    methods: list[Method] | None = Field(default=None, min_length=1)
    hosts: list[Host] | None = Field(default=None, min_length=1)
    routes: list[Annotated[str, Field(min_length=1)]] | None = Field(default=None, min_length=1)


class Bypass(_Part):
    """Requests that are never counted: all that is given must match."""

    header: Header | None = None
    pathExact: Path | None = None  # noqa: N815  # the JSON key is the attribute
    pathPrefix: Path | None = None  # noqa: N815  # the JSON key is the attribute
    methods: list[Method] | None = Field(default=None, min_length=1)


class Tool(_Part):
    """What holds for the calls of one tool, or of all whose names match, in place of the detector's own.

    Attributes:
        threshold: in place of `threshold_identical_requests`.
        window_calls: in place of `window_calls`.
        reason: said to the model that is refused.
        allow: calls of this tool are never part of a loop.
    """

    threshold: Annotated[int, Field(ge=2, le=MAX_CALLS)] | None = None
    window_calls: Annotated[int, Field(ge=2, le=MAX_CALLS)] | None = None
    reason: Annotated[str, Field(max_length=256)] = ""
    allow: bool = False


class LoopDetection(_Part):
    """What counts as a loop and what is done about it.

    Attributes:
        name: of this detector, in keys, logs and metrics; default: its similarity, or `default` where there is only one.
        enabled: off unless this says so.
        window_seconds: length of the window, in seconds.
        threshold_identical_requests: the first identical request that is acted on; with `tool_calls`, the first call.
        action: what is done about a loop: refuse the request, hold it for a while, or let it through with a warning.
        similarity: what makes requests identical.
        window_type: whether every request restarts the window, exactly its last requests count, or it ends after its first.
        cooldown_seconds: after a trip the fingerprint stays acted on that long, even when its window has emptied.
        count_refused: False: a refused request leaves the count alone.
        reject_status: HTTP status of a refusal.
        max_delay_ms: longest hold of a throttled request, in milliseconds.
        body: `ignore` leaves the body out of the fingerprint.
        max_inspect_bytes: largest body that is looked into, in bytes.
        ignore_fields: of `canonical`: JSON Pointers to what is not compared; `*` stands for any one step.
        tail_messages: of `tail`: so many messages are compared.
        window_calls: of `tool_calls`: among so many of the newest calls.
        reset_on_user_message: of `tool_calls`: calls before the user's last message are not looked at.
        compare_results: of `tool_calls`: False: calls are equal whatever they brought back.
        max_cycle: of `tool_calls`: longest cycle of different calls that is looked for; 1 for none.
        tools: of `tool_calls`: by tool name, in which `*` stands for anything.
    """

    name: Id | None = None
    enabled: bool = False
    window_seconds: Annotated[int, Field(gt=0, le=MAX_SECONDS)] | None = None
    threshold_identical_requests: Annotated[int, Field(ge=2, le=MAX_THRESHOLD)] | None = None
    action: Literal["reject", "throttle", "warn"] = "reject"
    similarity: Literal["exact", "canonical", "tail", "tool_calls"] = "exact"
    window_type: Literal["sliding_ttl", "sliding_log", "fixed"] = "sliding_ttl"
    cooldown_seconds: Annotated[int, Field(ge=0, le=MAX_SECONDS)] = 0
    count_refused: bool = True
    reject_status: Annotated[int, Field(ge=400, le=599)] = 429
    max_delay_ms: Annotated[int, Field(ge=1, le=MAX_DELAY_MS)] = MAX_DELAY_MS
    body: Literal["include", "ignore"] = "include"
    max_inspect_bytes: Annotated[int, Field(ge=1, le=MAX_INSPECT_BYTES)] = 2**20
    ignore_fields: list[Pointer] = []
    tail_messages: Annotated[int, Field(ge=1, le=MAX_CALLS)] = 3
    window_calls: Annotated[int, Field(ge=2, le=MAX_CALLS)] = 10
    reset_on_user_message: bool = True
    compare_results: bool = True
    max_cycle: Annotated[int, Field(ge=1, le=MAX_CYCLE)] = 4
    tools: dict[Annotated[str, Field(min_length=1)], Tool] = {}


DEFAULT_DETECTOR = "default"

OBJECT, LIST = "(object)", "(list)"
"""Stand in the places of pydantic's errors below `loop_detection`, where no key can: the loader takes them out again."""

Detections = Annotated[
    Annotated[LoopDetection, Tag(OBJECT)] | Annotated[Annotated[list[LoopDetection], Field(min_length=1)], Tag(LIST)],
    Discriminator(lambda value: LIST if isinstance(value, list) else OBJECT),
]


class Rule(_Part):
    """A Fairvisor rate-limit rule: its `limit_keys` are united with the policy's; the limit itself is not enforced."""

    name: str
    limit_keys: list[LimitKey] = []
    algorithm: Literal["token_bucket", "cost_based", "token_bucket_llm"] | None = None
    algorithm_config: dict[str, Any] | None = None
    match: dict[str, Any] | None = None


class Spec(_Part):
    """One policy: where it applies, whom it tells apart, what it does."""

    selector: Selector
    mode: Literal["enforce", "shadow"] = "enforce"
    limit_keys: list[LimitKey] = []
    missing_descriptor: Literal["share", "skip"] = "share"
    bypass: list[Bypass] = []
    loop_detection: Detections | None = None
    rules: list[Rule] = []
    fallback_limit: dict[str, Any] | None = None
    circuit_breaker: dict[str, Any] | None = None

    def all_limit_keys(self) -> list[str]:
        """`limit_keys` of the policy united with those of its rules, each once, in order."""
        return list(dict.fromkeys([*self.limit_keys, *(key for rule in self.rules for key in rule.limit_keys)]))

    def keeps_counts(self) -> bool:
        """Some detector stores something that callers without descriptors would share."""
        return any(loop.similarity != "tool_calls" or loop.cooldown_seconds for _, loop in self.detectors())

    def detectors(self) -> list[tuple[str, LoopDetection]]:
        """The enabled entries of `loop_detection`, by name: their own, else their similarity, or `default` for a single one."""
        loops = self.loop_detection
        if loops is None:
            return []
        named = (
            [(loop.name or loop.similarity, loop) for loop in loops]
            if isinstance(loops, list)
            else [(loops.name or DEFAULT_DETECTOR, loops)]
        )
        return [(name, loop) for name, loop in named if loop.enabled]


class Policy(_Part):
    """A policy and its identity, which is unique across all files."""

    id: Id
    spec: Spec


class Override(_Part):
    """`global_shadow` and `kill_switch_override`: a temporary switch with a reason and an end."""

    enabled: bool
    reason: Annotated[str, Field(max_length=256)] | None = None
    expires_at: Timestamp | None = None


class Envelope(_Part):
    """A bundle around its policies, which are checked one by one."""

    bundle_version: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    policies: list[Any]
    issued_at: Timestamp | None = None
    expires_at: Timestamp | None = None
    global_shadow: Override | None = None
    kill_switch_override: Override | None = None
    kill_switches: list[Any] = []
    defaults: Any = None


class Bundle(Envelope):
    """A whole bundle file; what `loopguard schema` describes."""

    policies: list[Policy]


def _describe(definition: dict[str, Any]) -> None:
    """Put what a model's docstring says about each of its attributes beside the property itself, where editors show it."""
    text, _, attributes = definition.get("description", "").partition("\n\nAttributes:\n")
    if text:
        definition["description"] = text
    for line in attributes.splitlines():
        name, _, said = line.strip().partition(": ")
        if name in definition["properties"]:
            definition["properties"][name]["description"] = said


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a policy file: a bundle, one policy or a list of policies."""
    made = TypeAdapter(Bundle | Policy | list[Policy]).json_schema()
    for definition in made["$defs"].values():
        _describe(definition)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Loopguard policy file",
        **made,
    }
