"""Rules that compare fields of a policy, and warnings about policies that may not be intended.

Rules that find errors read raw JSON: a model's own validators do not run if one of its fields is
invalid, and all errors must be reported at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from math import prod
from typing import Any

from extproc.apis import API_NAMES, find_public_id, read_path
from extproc.budgets.rule_keys import (
    DEFAULT_ANSWER,
    FALLBACK,
    FIXED,
    MAX_AMOUNT,
    MEASURED,
    OUTPUT,
    TOKENS,
    Rule,
    find_rule_errors,
)
from extproc.decision import COMPLETION, NOTED, Action
from extproc.detectors import KINDS, Similarity
from extproc.detectors.keys import Escalation, LoopKeys
from extproc.objects import MAX_THRESHOLD, Place, is_annotation
from extproc.policy.bundle import (
    ANY_API,
    EVERYBODY,
    METHODS,
    SHADOW,
    Bypass,
    LoopDetection,
    Policy,
    Selector,
    Spec,
)
from extproc.policy.strict_json import write_pointer
from extproc.request.http import order_first_of
from extproc.request.limit_keys import (
    HEADER,
    IP_ADDRESS,
    UNSUPPORTED_KEYS,
    FirstOf,
    is_in_body,
    list_sources,
)
from extproc.request.secrets import CREDENTIAL
from extproc.sessions.session_limits import find_limit_errors, find_unnamed_errors, names_agents
from extproc.store.rules.back_to_back import BACK_TO_BACK

MAX_LOG_THRESHOLD = 10_000
"""Maximum threshold of a `sliding_log`, which stores a timestamp for each request."""

MAX_COMBINATIONS = 10_000
"""Maximum number of combinations of a selector's hosts, methods and routes; each is indexed."""

_SHOWN = 3
ACTIONS = [action.value for action in Action if action is not Action.ALLOW]
"""The actions against a loop, mildest first."""

_ORDER = ", ".join(ACTIONS)

_ANY = ("*", "ANY", "ALL")
_FEW_CALLERS = 3
_THRESHOLD = "threshold_identical_requests"
_LOWEST = 2
_ANCHORS = ("apis", "pathExact", "pathPrefix", "pathPrefixes", "routes")
"""A selector needs at least one of these."""

_ALWAYS_THERE = frozenset({IP_ADDRESS, f"{HEADER}:host"})

_OWNERS = {
    key: [name for name, kind in KINDS.items() if key in kind.keys.model_fields]
    for owner in KINDS.values()
    for key in owner.keys.model_fields
    if key not in LoopKeys.model_fields
}
"""Keys that only some similarities have, and those similarities."""

_USERS = {
    "steer_note": tuple([action.value for action in Action if action in NOTED]),
    "steer_share": ("steer",),
    "max_delay_ms": ("throttle",),
    "reject_status": ("throttle", "reject"),  # too many delayed requests are refused
    "refuse_as": ("throttle", "reject"),
}
"""Keys of an entry that only some actions use, and those actions."""

_SIGNED = (CREDENTIAL, f"{HEADER}:authorization")
"""Limit keys whose value in a signed request is taken from the signature."""

_OFF = 'not enabled, so it does nothing: set "enabled" to true, or to false if that is intended'
_REMEMBERING = [name for name, kind in KINDS.items() if kind.remembers]


def anchor_on_route(policy: Any) -> Any:  # noqa: ANN401  # raw JSON
    """Make a raw policy from a route apply to all its requests, unless it names a path or route."""
    if not isinstance(policy, dict) or not isinstance(policy.get("spec"), dict):
        return policy
    selector = policy["spec"].get("selector", {})
    if not isinstance(selector, dict) or any(selector.get(key) is not None for key in _ANCHORS):
        return policy
    return policy | {"spec": policy["spec"] | {"selector": selector | {"pathPrefix": "/"}}}


def find_selector_errors(spec: Any) -> Iterator[tuple[Place, str]]:  # noqa: ANN401  # raw JSON
    """Check the fields of a raw selector against each other; yields as `find_errors`."""
    selector = spec.get("selector") if isinstance(spec, dict) else None
    if not isinstance(selector, dict):
        return
    if all(selector.get(key) is None for key in _ANCHORS):
        yield (
            ("selector",),
            (
                "selector needs at least one of apis, pathExact, pathPrefix and routes, but has "
                f"{_list_keys(selector)}"
            ),
        )
    lists = [API_NAMES if selector.get("apis") == ANY_API else selector.get("apis")]
    lists += [selector.get(key) for key in ("pathPrefixes", "hosts", "methods", "routes")]
    combinations = prod([max(1, len(listed)) for listed in lists if isinstance(listed, list)])
    if combinations > MAX_COMBINATIONS:
        many = (
            f"apis, hosts, methods and routes make {combinations} combinations, and at most "
            f"{MAX_COMBINATIONS} are allowed"
        )
        yield ("selector",), f"{many}; split the policy, or leave one of them out to match any"


def find_errors(spec: Any) -> Iterator[tuple[Place, str]]:  # noqa: ANN401  # raw JSON
    """Check the fields of a raw policy spec, except its selector, against each other.

    Yields the place below the spec, and the message. Wrong types are left to the models.
    """
    if not isinstance(spec, dict):
        return
    yield from _find_ramp_errors(spec)
    if (
        spec.get("canary_of") is not None
        and spec.get("mode", "enforce") == "enforce"
        and not is_watching(spec)
    ):
        owners = "a policy with mode shadow, or with an enforce_percent below 100"
        yield ("canary_of",), f"canary_of belongs to {owners}; this one acts on all callers"
    loops = spec.get("loop_detection")
    if isinstance(loops, list):
        for number, loop in enumerate(loops):
            yield from _find_loop_errors(loop, ("loop_detection", number))
        yield from _find_name_errors(loops)
    else:
        yield from _find_loop_errors(loops, ("loop_detection",))
    for below, message in find_limit_errors(spec.get("session_limits")):
        yield ("session_limits", *below), message
    for below, message in find_unnamed_errors(
        spec.get("unnamed_limits"), spec.get("session_limits")
    ):
        yield ("unnamed_limits", *below), message
    yield from _find_bypass_errors(spec.get("bypass"))
    yield from find_rule_errors(spec)


def _find_bypass_errors(bypasses: Any) -> Iterator[tuple[Place, str]]:  # noqa: ANN401  # raw JSON
    for number, entry in enumerate(bypasses if isinstance(bypasses, list) else ()):
        if isinstance(entry, dict) and all(entry.get(key) is None for key in Bypass.model_fields):
            needed = (
                f"needs at least one of {', '.join(Bypass.model_fields)}, but has "
                f"{_list_keys(entry)}"
            )
            yield ("bypass", number), f"{needed}; it would bypass everything"


def _find_ramp_errors(spec: dict[str, Any]) -> Iterator[tuple[Place, str]]:
    """Find an `enforce_percent` in a shadow policy, or in one that cannot identify callers."""
    percent, place = spec.get("enforce_percent"), ("enforce_percent",)
    if not isinstance(percent, int):
        return
    if spec.get("mode") == SHADOW:
        yield place, "enforce_percent needs mode enforce; this policy is in shadow mode"
    elif (
        percent < EVERYBODY
        and spec.get("ramp_by") is None
        and all(map(is_in_body, _list_limit_keys(spec)))
    ):
        needed = "no limit_keys identify them before the body is read; set ramp_by"
        yield place, f"enforce_percent chooses among callers, but {needed}"


def is_watching(spec: Mapping[str, Any]) -> bool:
    """Whether a raw policy spec is in shadow mode, for all callers or some."""
    percent = spec.get("enforce_percent")
    return spec.get("mode") == SHADOW or (isinstance(percent, int) and percent < EVERYBODY)


def _list_limit_keys(spec: dict[str, Any]) -> list[str | dict[str, Any]]:
    """All limit keys of a raw policy spec; see `Spec.all_limit_keys`."""
    rules = spec.get("rules")
    owners = [spec, *(rules if isinstance(rules, list) else ()), spec.get("fallback_limit")]
    lists = [owner.get("limit_keys") for owner in owners if isinstance(owner, dict)]
    return [
        key
        for keys in lists
        if isinstance(keys, list)
        for key in keys
        if isinstance(key, str | dict)
    ]


def _list_keys(value: dict[str, Any]) -> str:
    """The first few keys of an object that are set, as text."""
    keys = [key for key in value if value[key] is not None and not is_annotation(key)][:_SHOWN]
    return f"only {' and '.join(keys)}" if keys else "nothing"


def _find_name_errors(loops: list[Any]) -> Iterator[tuple[Place, str]]:
    """Find detectors of a policy with the same name; they would share counts."""
    first: dict[str, int] = {}
    for number, loop in enumerate(loops):
        if not isinstance(loop, dict):
            continue
        name = loop.get("name") or loop.get("similarity", "exact")
        if isinstance(name, str) and first.setdefault(name, number) != number:
            taken = f"duplicate name {name!r}, also at loop_detection/{first[name]}"
            yield (
                ("loop_detection", number),
                f"{taken}; give each its own name (default: its similarity)",
            )


# Raw JSON
def _find_loop_errors(loop: Any, place: Place) -> Iterator[tuple[Place, str]]:  # noqa: ANN401
    if not isinstance(loop, dict):
        return
    name = loop.get("similarity", "exact")
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is not None:
        yield from _find_similarity_errors(loop, place, name, kind)
    if loop.get("refuse_as") == COMPLETION and loop.get("body") == "ignore":
        yield (*place, "refuse_as"), "refuse_as completion needs the body, but body is ignore"
    if loop.get("enabled") is not True:
        return
    stateless = kind is not None and kind.stateless
    spans = loop.get("window_type") == BACK_TO_BACK
    if stateless and spans:
        counting = ", ".join([other for other in KINDS if not KINDS[other].stateless])
        yield (
            (*place, "window_type"),
            (
                f"with window_type {BACK_TO_BACK}, similarity must be one of {counting}, not "
                f"{name}, which counts no requests"
            ),
        )
    optional = {"window_seconds"} if stateless or spans else set()
    if kind is not None and kind.default_threshold is not None:
        optional.add(_THRESHOLD)
    for field in ("window_seconds", _THRESHOLD):
        if loop.get(field) is None and field not in optional:
            yield place, f"when enabled is true, {field} is required"
    if kind is not None:
        yield from _find_threshold_errors(loop, place, kind)
        yield from _find_escalation_errors(loop, place, kind)


def _find_threshold_errors(
    loop: dict[str, Any], place: Place, kind: type[Similarity]
) -> Iterator[tuple[Place, str]]:
    threshold = loop.get(_THRESHOLD)
    if (
        loop.get("window_type") == "sliding_log"
        and not kind.stateless
        and isinstance(threshold, int)
        and MAX_LOG_THRESHOLD < threshold <= MAX_THRESHOLD
    ):
        most = f"threshold_identical_requests must be <= {MAX_LOG_THRESHOLD}"
        yield (
            (*place, _THRESHOLD),
            f"{most} with window_type sliding_log, not {threshold}: each request is stored",
        )
    yield from kind.find_errors(loop, place)


def _find_escalation_errors(
    loop: dict[str, Any], place: Place, kind: type[Similarity]
) -> Iterator[tuple[Place, str]]:
    """Find actions of `escalate` that are not stricter and later than the last, or never apply."""
    action, escalate = loop.get("action", Action.REJECT.value), loop.get("escalate")
    first = _find_threshold(loop, kind)
    if not isinstance(escalate, dict) or action not in ACTIONS or first is None:
        return
    before, latest = action, first
    for name in ACTIONS:
        threshold = escalate.get(name)
        if (
            name not in Escalation.model_fields
            or not isinstance(threshold, int)
            or threshold < _LOWEST
        ):
            continue
        where = (*place, "escalate", name)
        if name == action:
            yield where, f"{name} is already the action, from {first} on; remove one of them"
        elif ACTIONS.index(name) < ACTIONS.index(action):
            yield (
                where,
                (
                    f"{name} is milder than the action, {action}; escalate takes stricter ones, in "
                    f"the order {_ORDER}"
                ),
            )
        elif threshold <= latest:
            yield (
                where,
                f"{name} must have a higher threshold than {before}, which begins at {latest}",
            )
        else:
            yield from _find_raised_errors(loop, place, kind, name, threshold - first)
            before, latest = name, threshold


def _find_raised_errors(
    loop: dict[str, Any], place: Place, kind: type[Similarity], name: str, more: int
) -> Iterator[tuple[Place, str]]:
    """Find invalid thresholds of an `escalate` entry.

    It raises those of `tools` as much as the detector's own.
    """
    tools = loop.get("tools")
    raised = loop | {_THRESHOLD: (_find_threshold(loop, kind) or 0) + more, "weak_threshold": None}
    if isinstance(tools, dict):
        limited = [
            tool
            for tool, entry in tools.items()
            if isinstance(entry, dict) and isinstance(entry.get("threshold"), int)
        ]
        raised["tools"] = tools | {
            tool: tools[tool] | {"threshold": tools[tool]["threshold"] + more} for tool in limited
        }
    known = {where for where, _ in _find_threshold_errors(loop, place, kind)}
    for where, message in _find_threshold_errors(raised, place, kind):
        if where == (*place, _THRESHOLD):
            yield (*place, "escalate", name), message.replace(_THRESHOLD, name)
        elif where not in known:
            yield (
                (*place, "escalate", name),
                f"{message}; escalate raises {write_pointer(where[len(place) :])} by {more}",
            )


def _find_threshold(loop: dict[str, Any], kind: type[Similarity]) -> int | None:
    threshold = loop.get(_THRESHOLD)
    if threshold is None:
        return kind.default_threshold
    return threshold if isinstance(threshold, int) else None


def _find_similarity_errors(
    loop: dict[str, Any], place: Place, similarity: str, kind: type[Similarity]
) -> Iterator[tuple[Place, str]]:
    for key, owners in _OWNERS.items():
        if key in loop and similarity not in owners:
            yield (
                (*place, key),
                f"{key} belongs to similarity {' or '.join(owners)}, not {similarity}",
            )
    if loop.get("body") == "ignore" and kind.looks:
        yield (
            (*place, "body"),
            f"body must not be ignore with similarity {similarity}, which compares the body",
        )


def find_suspicious(policy: Policy) -> Iterator[tuple[Place, str]]:
    """Find valid settings with little effect: the place below the policy, and a likely fix."""
    looks = policy.spec.session_limits is not None or any(
        loop.similarity in _REMEMBERING for _, loop in policy.spec.detectors()
    )
    if policy.spec.session is not None and not looks:
        looking = f"similarity {' or '.join(_REMEMBERING)} and session_limits do"
        yield ("spec", "session"), f"nothing in this policy uses sessions; {looking}"
    yield from _find_unnamed_agents(policy)
    for place, loop in _list_entries(policy):
        if loop.model_fields_set and "enabled" not in loop.model_fields_set:
            yield place, _OFF
    yield from _find_missing_stand_ins(policy)
    yield from _find_idle_steering(policy)
    yield from _find_idle_keys(policy)
    yield from _find_idle_ramp(policy.spec)
    yield from _find_suspicious_rules(policy)


def _find_missing_stand_ins(policy: Policy) -> Iterator[tuple[Place, str]]:
    """Find `back_to_back` without a detector for the time without entries, and the opposite."""
    entries = [(place, loop) for place, loop in _list_entries(policy) if loop.enabled]
    spanning = [place for place, loop in entries if loop.window_type == BACK_TO_BACK]
    standing_in = [place for place, loop in entries if loop.only_without_entries]
    if spanning and not standing_in:
        yield (
            (*spanning[0], "window_type"),
            (
                "back_to_back counts nothing while no access log entries arrive; add a detector "
                "with window_type sliding_log and only_without_entries"
            ),
        )
    for place in standing_in if not spanning or spanning == standing_in else ():
        yield (
            (*place, "only_without_entries"),
            "has no effect without another detector with window_type back_to_back",
        )


def find_suspicious_matches(policy: Policy) -> Iterator[tuple[Place, str]]:
    """Find paths and methods that no request has; yields as `find_suspicious`."""
    selector = policy.spec.selector
    matchers: list[tuple[Place, Selector | Bypass]] = [(("spec", "selector"), selector)]
    matchers += [
        (("spec", "bypass", number), entry) for number, entry in enumerate(policy.spec.bypass)
    ]
    for place, matcher in matchers:
        several = [
            ("pathPrefixes", path) for path in selector.pathPrefixes or () if matcher is selector
        ]
        for name, path in [
            ("pathExact", matcher.pathExact),
            ("pathPrefix", matcher.pathPrefix),
            *several,
        ]:
            if path is not None and "*" in path:
                meant = path.partition("*")[0]
                yield (
                    (*place, name),
                    (
                        "'*' is matched literally; to match everything below, use \"pathPrefix\": "
                        f'"{meant}"'
                    ),
                )
        for number, method in enumerate(matcher.methods or ()):
            if method not in METHODS:
                yield (*place, "methods", number), _explain_method(method)
    if (
        selector.pathExact
        and selector.apis
        and read_path(selector.pathExact).api not in selector.list_apis()
    ):
        yield (
            ("spec", "selector", "pathExact"),
            "is no path of these apis, so no request matches both; leave one of them out",
        )
    for number, route in enumerate(selector.routes or ()):
        if route == "*":
            yield (
                ("spec", "selector", "routes", number),
                "'*' is matched literally; leave routes out to match any",
            )


def _explain_method(method: str) -> str:
    """Suggest what an unregistered method may mean.

    It may be correct, because HTTP allows custom methods.
    """
    if method in _ANY:
        return f"{method!r} is matched literally; leave methods out to match any"
    told = (
        f"{method} is no HTTP method known to Loopguard, so this matches only clients that "
        "send exactly that"
    )
    close = get_close_matches(method, METHODS, n=1)
    return f"{told}; did you mean {close[0]}?" if close else told


def find_public_callers(policy: Policy) -> Iterator[tuple[Place, str]]:
    """Find callers identified only by a credential that is public on the policy's paths."""
    selector = policy.spec.selector
    several = [(path, False) for path in selector.list_prefixes()]
    several += [(selector.pathExact, True)] if selector.pathExact is not None else []
    apis = selector.list_apis() or API_NAMES
    # Routes may have any path
    shown = [find_public_id(path, apis, exact=exact) for path, exact in several or [("/", False)]]
    public = next((name for name in shown if name), "")
    for place, keys, what in _list_callers(policy) if public else ():
        credential = _find_credential(keys)
        if credential:
            why = (
                f"in a signed request, {credential} is the {public}, which is no secret: a "
                f"stranger who sends it {what}"
            )
            instead = f'{{"first_of": ["jwt:sub", "{credential}"], "name": "caller"}}'
            yield place, f"{why}; where Envoy verifies a token, use {instead}"


def _list_callers(policy: Policy) -> Iterator[tuple[Place, Sequence[str | FirstOf], str]]:
    """Places that identify callers: the place, its limit keys, and what an impostor does there."""
    spec = policy.spec
    if spec.session_limits is not None or spec.detectors():
        yield ("spec", "limit_keys"), spec.limit_keys, "is counted as its owner"
    for place, rule in list_rules(policy):
        yield (*place, "limit_keys"), rule.limit_keys, "uses up its owner's budget"
    first = next((rule.limit_keys[:1] for rule in spec.rules if rule.limit_keys), None)
    if spec.has_breaker() and first is not None:
        yield ("spec", "circuit_breaker"), first, "can open its owner's circuit breaker"


def _find_credential(keys: Sequence[str | FirstOf]) -> str:
    """The limit key of a credential, unless a verified key is beside it; empty if there is none."""
    sources = list_sources(keys)
    if any(source.startswith("jwt:") for source in sources):
        return ""
    return next((source for source in sources if source in _SIGNED), "")


def _find_idle_keys(policy: Policy) -> Iterator[tuple[Place, str]]:
    for place, loop in _list_entries(policy):
        named = {loop.action, *[name for name, _ in loop.escalate.list_steps()]}
        for key, users in _USERS.items():
            if key in loop.model_fields_set and named.isdisjoint(users):
                yield (*place, key), f"{key} does nothing without the action {' or '.join(users)}"


def _find_idle_ramp(spec: Spec) -> Iterator[tuple[Place, str]]:
    """Find keys that choose callers in a policy that acts on all callers."""
    if spec.mode == SHADOW or spec.enforce_percent is not None:
        return  # a policy in shadow may be prepared for later
    for name in ("ramp_by", "ramp_seed"):
        if getattr(spec, name) is not None:
            yield (
                ("spec", name),
                f"{name} does nothing without enforce_percent: it acts on all callers",
            )


def _list_entries(policy: Policy) -> list[tuple[Place, LoopDetection]]:
    """The entries of `loop_detection`, enabled or not, with their places below the policy."""
    loops, place = policy.spec.loop_detection, ("spec", "loop_detection")
    if isinstance(loops, list):
        return [((*place, number), loop) for number, loop in enumerate(loops)]
    return [(place, loops)] if loops is not None else []


def _find_idle_steering(policy: Policy) -> Iterator[tuple[Place, str]]:
    """Find detectors that steer, but whose requests cannot have notes."""
    for place, loop in _list_entries(policy):
        if not loop.enabled or not loop.adds_notes:
            continue
        why = (
            "requests without a conversation"
            if loop.similarity == "mcp"
            else "requests whose body is not read"
        )
        if loop.similarity == "mcp" or loop.body == "ignore":
            named = [loop.action, *[name for name, _ in loop.escalate.list_steps()]]
            noted = " and ".join(
                [action.value for action in Action if action in NOTED and action.value in named]
            )
            yield place, f"{noted} cannot add a note to {why}: they continue with a warning"


def find_unenforced(policy: Policy) -> Iterator[tuple[Place, str]]:
    """The parts of a drop-in policy that are not enforced, with their places below the policy."""
    spec = policy.spec
    places: list[tuple[Place, Sequence[str | FirstOf]]] = [
        (("spec", "limit_keys"), spec.limit_keys),
        (("spec", "ramp_by"), spec.ramp_by or []),
        (("spec", "labels"), spec.labels),
        (("spec", "session", "keys"), spec.session.keys if spec.session else []),
    ]
    for place, keys in places:
        for number, key in enumerate(keys):
            listed: list[tuple[Place, str]] = (
                [((*place, number, "first_of", at), part) for at, part in enumerate(key.first_of)]
                if isinstance(key, FirstOf)
                else [((*place, number), key)]
            )
            for where, source in listed:
                if source in UNSUPPORTED_KEYS:
                    yield (
                        where,
                        (
                            f"the descriptor {source} cannot be derived by Loopguard and is left "
                            "out "
                            "of fingerprints"
                        ),
                    )
    yield from _find_idle_rules(policy)


def _find_idle_rules(policy: Policy) -> Iterator[tuple[Place, str]]:
    """Find rules that never apply because Loopguard cannot derive their keys."""
    for place, rule in list_rules(policy):
        keys = [((*place, "limit_keys", number), key) for number, key in enumerate(rule.limit_keys)]
        keys += [((*place, "match", key), key) for key in rule.match or ()]
        for where, key in keys:
            lacking = [source for source in list_sources([key]) if source in UNSUPPORTED_KEYS]
            if lacking:
                instead = (
                    "use ip:address or a header that your proxy sets, such as header:x-country"
                )
                why = (
                    f"the descriptor {lacking[0]} cannot be derived by Loopguard, so the rule "
                    f"{rule.name} never applies"
                )
                yield where, f"{why}; {instead}"


def list_rules(policy: Policy) -> list[tuple[Place, Rule]]:
    """The rules of a policy and its fallback, with their places."""
    spec = policy.spec
    placed: list[tuple[Place, Rule]] = [
        (("spec", "rules", number), rule) for number, rule in enumerate(spec.rules)
    ]
    return [
        *placed,
        *([(("spec", FALLBACK), spec.fallback_limit)] if spec.fallback_limit is not None else []),
    ]


def _find_suspicious_rules(policy: Policy) -> Iterator[tuple[Place, str]]:
    breaker = policy.spec.circuit_breaker
    if breaker is not None and "enabled" not in breaker.model_fields_set:
        yield ("spec", "circuit_breaker"), _OFF
    if (
        breaker is not None
        and breaker.enabled
        and not any(rule.limit_keys for _, rule in list_rules(policy))
    ):
        yield (
            ("spec", "circuit_breaker"),
            "no rule has limit_keys: all callers share the circuit breaker",
        )
    for place, rule in list_rules(policy):
        if not rule.limit_keys:
            yield place, f"no limit_keys: all callers share the budget of the rule {rule.name}"
        config = rule.algorithm_config
        for name, message in _find_large_default(rule):
            yield (*place, "algorithm_config", name), message
        if config.get("default_max_completion_tokens") is not None:
            where = (*place, "algorithm_config", "default_max_completion_tokens")
            yield (
                where,
                (
                    "default_max_completion_tokens is ignored; use default_max_completion, whose "
                    "default is 1000"
                ),
            )
        for name, message in _find_ignored(config):
            yield (*place, "algorithm_config", name), message
        for name in ("cost_key", "cost_source"):
            source = config.get(name)
            if isinstance(source, str) and ":" in source and source not in MEASURED:
                chosen = (
                    f"{source} is the client's choice, so a client can choose what a request costs"
                )
                yield (
                    (*place, "algorithm_config", name),
                    f"{chosen}; let a proxy set it, and remove it from clients' requests",
                )


def _find_large_default(rule: Rule) -> Iterator[tuple[str, str]]:
    """Find budgets where a request without a maximum reserves more than half for its answer."""
    config = rule.algorithm_config
    if rule.algorithm == "token_bucket_llm":
        reserved = min(
            config.get("default_max_completion", DEFAULT_ANSWER),
            config.get("max_completion_tokens") or MAX_AMOUNT,
        )
        holds = config.get("burst_tokens") or config["tokens_per_minute"]
        holds, name = (
            min(holds, config.get("tokens_per_day") or MAX_AMOUNT),
            "default_max_completion",
        )
        remedy = f"lower {name}"
    elif config.get("cost_key") in (TOKENS, OUTPUT):
        reserved, holds, name = DEFAULT_ANSWER, config["budget"], "budget"
        remedy = "raise it, or have clients send max_tokens"
    else:
        return
    if 2 * reserved > holds:
        told = (
            f"a request without max_tokens reserves {min(reserved, holds):g} of {holds:g} "
            "tokens for its answer"
        )
        yield name, f"{told}, and is refused while less is left; {remedy}"


def _find_ignored(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    source = config.get("cost_key", config.get("cost_source", FIXED))
    if "fixed_cost" in config and source != FIXED:
        yield "fixed_cost", f"fixed_cost is ignored, because requests cost {source}"
    if "default_cost" in config and (source == FIXED or source in MEASURED):
        yield "default_cost", f"default_cost is ignored, because requests cost {source}"
    day, minute = config.get("tokens_per_day"), config.get("tokens_per_minute")
    if day is not None and minute is not None and day < minute:
        yield (
            "tokens_per_day",
            (
                f"tokens_per_day is below tokens_per_minute, {minute:g}: a day allows less than a "
                "minute"
            ),
        )


def _name(key: str | FirstOf) -> str:
    return key.name if isinstance(key, FirstOf) else key


def _find_unnamed_agents(policy: Policy) -> Iterator[tuple[Place, str]]:
    """Find agent limits in a policy whose keys name no agents."""
    limits, session = policy.spec.session_limits, policy.spec.session
    if (
        limits is None
        or not limits.limits_agents()
        or session is None
        or session.agent_keys is not None
    ):
        return
    if not names_agents(session.list_budget_keys()):
        known = (
            "agents are known by headers of Claude Code, Codex and opencode, which name "
            "sessions by other keys than these"
        )
        yield (
            ("spec", "session", "keys"),
            f"nothing names agents, so their limits have no effect: {known}; set agent_keys",
        )


def _find_retried_refusals(policy: Policy) -> Iterator[tuple[Place, str]]:
    """Find final refusals with the default status."""
    message = (
        'reject_status is not set: several agents retry a 429 for minutes; with "auto", '
        "final refusals are 400"
    )
    for place, loop in _list_entries(policy):
        refuses = loop.action == Action.REJECT.value or loop.escalate.reject is not None
        if (
            loop.enabled
            and refuses
            and KINDS[loop.similarity].stateless
            and "reject_status" not in loop.model_fields_set
        ):
            yield place, message
    limits = policy.spec.session_limits
    if limits is not None and "reject_status" not in limits.model_fields_set:
        yield ("spec", "session_limits"), message


def _explain_order(policy: Policy) -> Iterator[tuple[Place, str]]:
    """Explain a `first_of` whose claims are tried earlier than listed."""
    for key in policy.spec.all_limit_keys():
        if isinstance(key, FirstOf) and order_first_of(key.first_of) != key.first_of:
            order = ", ".join(order_first_of(key.first_of))
            why = "a verified claim is tried before credentials, which clients choose"
            yield ("spec", "limit_keys"), f"{why}, so the order of {key.name} is {order}"


def _explain_unpaid(spec: Spec) -> Iterator[tuple[Place, str]]:
    """Explain rules that a request can evade by omitting a limit key."""
    if "missing_descriptor" in spec.model_fields_set or spec.uncountable == "reject":
        return
    for number, rule in enumerate(spec.rules):
        lacking = [
            _name(key) for key in rule.limit_keys if _ALWAYS_THERE.isdisjoint(list_sources([key]))
        ]
        if lacking:
            passing = f"requests without {' or '.join(lacking)} do not pay"
            share = (
                "with missing_descriptor share, they share a budget; with uncountable reject, "
                "they are refused"
            )
            yield ("spec", "rules", number, "limit_keys"), f"{passing}: {share}"


def explain_defaults(policy: Policy) -> Iterator[tuple[Place, str]]:
    """Explain the effects of defaults; yields the place below the policy, and the message."""
    spec = policy.spec
    if spec.session_limits is not None and spec.unnamed_limits is None:
        passing = "requests without a session are reported as unnamed, and pass"
        yield ("spec", "session_limits"), f"{passing}: unnamed_limits would limit them"
    percent = spec.enforce_percent
    if percent is not None and percent < EVERYBODY:
        none = (1 - percent / EVERYBODY) ** _FEW_CALLERS
        few = (
            f"a hash chooses whole callers: of {_FEW_CALLERS} callers, it acts on none in "
            f"{none:.0%} of all cases"
        )
        yield ("spec", "enforce_percent"), f"{few}; `loopguard doctor` says on how many it acts"
    yield from _find_retried_refusals(policy)
    yield from _explain_order(policy)
    yield from _explain_unpaid(spec)
    for number, rule in enumerate(spec.rules):
        if rule.needs_answers() and not rule.algorithm_config.get("usage"):
            paying = (
                "some APIs' streams report no usage unless asked, and then pay for their "
                "size, many times what they use"
            )
            yield (
                ("spec", "rules", number, "algorithm_config"),
                f"{paying}: usage request would ask for it",
            )
    keys = [
        key for key in spec.all_limit_keys() if not UNSUPPORTED_KEYS.issuperset(list_sources([key]))
    ]
    always = [_name(key) for key in keys if not _ALWAYS_THERE.isdisjoint(list_sources([key]))]
    # A rule is skipped by its own keys
    judging = spec.session_limits is not None or spec.detectors()
    if "missing_descriptor" in spec.model_fields_set or not judging or len(always) == len(keys):
        return
    if always:
        named = " and ".join(sorted(always))
        yield (
            ("spec", "limit_keys"),
            (
                f"every request has {named}, so requests without the other limit keys are counted "
                "by "
                "that alone"
            ),
        )
    else:
        now = (
            "missing_descriptor is not set: requests with none of the limit keys are not "
            "counted (default: require_one)"
        )
        yield ("spec",), f"{now}; with share, they share one count"
