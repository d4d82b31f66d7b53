"""What a policy bundle is: the JSON's own keys as typed, frozen models, and the JSON Schema made from them.

The format is Fairvisor's bundle plus Loopguard's own keys, so a drop-in bundle loads as it is. Field rules stand here, beside
the field; rules that compare fields stand in `cross_field_errors`, over the raw JSON, because a model's own validators do not
run once one of its fields has failed, and every error has to be reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from math import prod
from typing import Annotated, Any, Literal
from urllib.parse import quote

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
MAX_LOG_THRESHOLD = 10_000
"""Highest threshold of a `sliding_log`, which remembers one timestamp for each request."""

MAX_CALLS = 200
"""Most calls, and most messages, that a detector compares with each other."""

MAX_COMBINATIONS = 10_000
"""Most combinations of a selector's hosts, methods and routes, each of which is filed for itself."""

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
        name: of this detector, in keys, logs and metrics; see `Spec.detectors`.
        window_seconds: length of the window, in seconds.
        threshold_identical_requests: the first identical request that is acted on; with `tool_calls`, the first call.
        similarity: what makes requests identical.
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


_ANCHORS = ("pathExact", "pathPrefix", "routes")
"""Of these a selector needs at least one."""

SIMILARITY_KEYS = {
    "canonical": ("ignore_fields",),
    "tail": ("tail_messages",),
    "tool_calls": ("window_calls", "reset_on_user_message", "compare_results", "max_cycle", "tools"),
}
"""The keys of LoopDetection that mean something with one similarity only."""

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


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a policy file: a bundle, one policy or a list of policies."""
    made = TypeAdapter(Bundle | Policy | list[Policy]).json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Loopguard policy file",
        **made,
    }


def on_route(policy: Any) -> Any:  # noqa: ANN401  # raw JSON
    """A raw policy that came with a route: without a path or a route of its own it takes all requests of that one."""
    if not isinstance(policy, dict) or not isinstance(policy.get("spec"), dict):
        return policy
    selector = policy["spec"].get("selector", {})
    if not isinstance(selector, dict) or any(selector.get(key) is not None for key in _ANCHORS):
        return policy
    return policy | {"spec": policy["spec"] | {"selector": selector | {"pathPrefix": "/"}}}


def cross_field_errors(spec: Any) -> Iterator[tuple[Place, str]]:  # noqa: ANN401  # raw JSON
    """Rules between fields of one raw policy spec; silent about anything whose type is wrong, which the models report.

    Yields:
        the place below the spec, and the message.
    """
    if not isinstance(spec, dict):
        return
    selector = spec.get("selector")
    if isinstance(selector, dict) and all(selector.get(key) is None for key in _ANCHORS):
        yield ("selector",), "selector needs at least one of pathExact, pathPrefix and routes"
    if isinstance(selector, dict):
        lists = [selector.get(key) for key in ("hosts", "methods", "routes")]
        combinations = prod(max(1, len(listed)) for listed in lists if isinstance(listed, list))
        if combinations > MAX_COMBINATIONS:
            many = f"hosts, methods and routes make {combinations} combinations, of which {MAX_COMBINATIONS} are taken"
            yield ("selector",), f"{many}; make several policies of it, or leave one of them out to match any"
    loops = spec.get("loop_detection")
    if isinstance(loops, list):
        for number, loop in enumerate(loops):
            yield from _loop_errors(loop, ("loop_detection", number))
        yield from _name_errors(loops)
    else:
        yield from _loop_errors(loops, ("loop_detection",))
    bypasses = spec.get("bypass")
    for number, entry in enumerate(bypasses if isinstance(bypasses, list) else ()):
        if isinstance(entry, dict) and all(entry.get(key) is None for key in Bypass.model_fields):
            yield (
                ("bypass", number),
                f"needs at least one of {', '.join(Bypass.model_fields)}; as it is, it would bypass everything",
            )


def _name_errors(loops: list[Any]) -> Iterator[tuple[Place, str]]:
    """Two detectors of one policy with one name, which would count as one."""
    first: dict[str, int] = {}
    for number, loop in enumerate(loops):
        if not isinstance(loop, dict):
            continue
        name = loop.get("name") or loop.get("similarity", "exact")
        if isinstance(name, str) and first.setdefault(name, number) != number:
            taken = f"duplicate name {name!r}, also at loop_detection/{first[name]}"
            yield ("loop_detection", number), f"{taken}; give each a name of its own (default: its similarity)"


def _loop_errors(loop: Any, place: Place) -> Iterator[tuple[Place, str]]:  # noqa: ANN401  # raw JSON
    """Rules between the fields of one raw loop_detection entry."""
    if not isinstance(loop, dict):
        return
    yield from _similarity_errors(loop, place)
    if loop.get("enabled") is not True:
        return
    stateless = loop.get("similarity") == "tool_calls"
    for field in ("window_seconds", "threshold_identical_requests"):
        if loop.get(field) is None and not (field == "window_seconds" and stateless):
            yield place, f"when enabled is true, {field} is required"
    threshold = loop.get("threshold_identical_requests")
    if (
        loop.get("window_type") == "sliding_log"
        and not stateless
        and isinstance(threshold, int)
        and MAX_LOG_THRESHOLD < threshold <= MAX_THRESHOLD
    ):
        yield (
            (*place, "threshold_identical_requests"),
            f"threshold_identical_requests must be <= {MAX_LOG_THRESHOLD} with window_type sliding_log, which remembers each",
        )
    if stateless:
        yield from _call_errors(loop, place)


def _similarity_errors(loop: dict[str, Any], place: Place) -> Iterator[tuple[Place, str]]:
    """Keys that mean nothing with the similarity of this entry."""
    similarity = loop.get("similarity", "exact")
    if similarity not in ("exact", *SIMILARITY_KEYS):
        return
    for owner, keys in SIMILARITY_KEYS.items():
        for key in keys:
            if key in loop and similarity != owner:
                yield (*place, key), f"{key} belongs to similarity {owner}, and this one is {similarity}"
    if loop.get("body") == "ignore" and similarity != "exact":
        yield (*place, "body"), f"body must not be ignore with similarity {similarity}, which compares what stands in the body"


def _call_errors(loop: dict[str, Any], place: Place) -> Iterator[tuple[Place, str]]:
    """Thresholds of tool calls that a window of so many calls can never reach."""
    threshold, window = loop.get("threshold_identical_requests"), loop.get("window_calls", 10)
    tools = loop.get("tools")
    limits: list[tuple[Place, Any, Any]] = [((*place, "threshold_identical_requests"), threshold, window)]
    for name, tool in tools.items() if isinstance(tools, dict) else ():
        if isinstance(tool, dict) and tool.get("allow") is not True and not {"threshold", "window_calls"}.isdisjoint(tool):
            own, last = tool.get("threshold"), tool.get("window_calls")
            limits.append(((*place, "tools", name), threshold if own is None else own, window if last is None else last))
    for where, least, most in limits:
        if isinstance(least, int) and isinstance(most, int) and least > most:
            yield where, f"a threshold of {least} is never reached among the last {most} calls; raise window_calls or lower it"


def suspicious(policy: Policy) -> Iterator[tuple[Place, str]]:
    """Paths that are good as they stand, but that hardly any request has.

    Yields:
        the place below the policy, and what may have been meant.
    """
    selector = policy.spec.selector
    for name, path in (("pathExact", selector.pathExact), ("pathPrefix", selector.pathPrefix)):
        if path is None:
            continue
        if "*" in path:
            meant = path.partition("*")[0]
            yield ("spec", "selector", name), f'\'*\' is matched literally; for all that is below, give "pathPrefix": "{meant}"'
        if not path.isascii() or not path.isprintable() or " " in path:
            arrives = quote(path, safe="/%!$&'()*+,;=:@")
            yield ("spec", "selector", name), f"is compared as it is sent, and that is percent-encoded: {arrives}"


def unenforced(policy: Policy) -> Iterator[tuple[Place, str]]:
    """The parts of a drop-in policy that this version reads but does not enforce.

    Yields:
        the place below the policy, and what is not enforced.
    """
    spec = policy.spec
    if spec.rules:
        names = ", ".join(rule.name for rule in spec.rules)
        yield ("spec", "rules"), f"rate-limit rules are not enforced by Loopguard: {names}"
    if spec.fallback_limit:
        yield ("spec", "fallback_limit"), "fallback_limit is not enforced by Loopguard"
    if spec.circuit_breaker and spec.circuit_breaker.get("enabled", True):
        yield ("spec", "circuit_breaker"), "circuit_breaker is not enforced by Loopguard"
    places: list[tuple[Place, list[str]]] = [
        (("spec", "limit_keys"), spec.limit_keys),
        *((("spec", "rules", number, "limit_keys"), rule.limit_keys) for number, rule in enumerate(spec.rules)),
    ]
    for place, keys in places:
        for number, key in enumerate(keys):
            if key in UNSUPPORTED_KEYS:
                yield (
                    (*place, number),
                    f"the descriptor {key} cannot be derived by Loopguard and is left out of fingerprints",
                )
