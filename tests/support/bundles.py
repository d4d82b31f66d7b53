"""Valid and invalid bundles, with every error of an invalid one."""

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from extproc.detectors import KINDS
from extproc.errors import BundleError, BundleErrors
from extproc.policy.loader import PolicySet, parse
from tests.support.documents import bundle, policy

NOW = datetime(2026, 6, 1, tzinfo=UTC)


PAST = "2026-05-31T23:59:59Z"


FUTURE = "2026-06-01T00:00:01Z"


SHAPES = (
    'must be a bundle {"bundle_version", "policies"}, a policy {"id", "spec"} or a list of policies'
)


LIMIT_KEY = (
    "it must be 'jwt:<claim>', 'header:<name>', 'query:<name>' (names of letters, digits, '_' and "
    "'-'), 'ip:address', "
    "'credential' or 'body:/<JSON Pointer>'"
)


HOST = (
    "it must be a host name such as 'api.example.com' (wildcards are not supported: list each host)"
)


TIME = "must be an ISO 8601 time with its zone, such as '2026-12-31T00:00:00Z'"


TWICE = "duplicate key; keep one"


ANNOTATION = "unknown key; only description and x-... can be added"


TOOL_KEYS = ("threshold", "window_calls", "reason", "allow")


SELECTOR_KEYS = ("apis", "pathExact", "pathPrefix", "pathPrefixes", "methods", "hosts", "routes")


BYPASS_KEYS = ("header", "pathExact", "pathPrefix", "methods")


EXPIRED = "expired at 2026-05-31T23:59:59+00:00; it must be in the future"


Errors = list[tuple[str, str]]


RULE: dict[str, Any] = {
    "name": "r",
    "algorithm": "token_bucket",
    "algorithm_config": {"tokens_per_second": 1, "burst": 2},
}


RULE_KEYS = ("name", "limit_keys", "algorithm", "algorithm_config", "reject_status", "match")


BREAKER_KEYS = (
    "enabled",
    "spend_rate_threshold_per_minute",
    "action",
    "auto_reset_after_minutes",
    "alert",
)


_REJECT = [{"threshold_percent": 100, "action": "reject"}]
_LAST = (
    'must contain {"threshold_percent": 100, "action": "reject"}: without it, the budget has no end'
)
_OF = "/spec/rules/0/algorithm_config"


def _configured(kind: str, **config: object) -> list[dict[str, Any]]:
    return [{"name": "r", "algorithm": kind, "algorithm_config": config}]


# A budget's keys, and the error.
RULE_FIELDS: list[tuple[str, object, Errors]] = [
    (
        "rules",
        [{"name": "r", "algorithm": "leaky", "algorithm_config": {}}],
        [
            (
                "/spec/rules/0/algorithm",
                "algorithm must be one of token_bucket, cost_based, token_bucket_llm",
            )
        ],
    ),
    (
        "rules",
        [RULE, RULE],
        [
            (
                "/spec/rules/1/name",
                (
                    "duplicate name 'r', also at rules/0; the rules of a policy need names of "
                    "their own, or they would share a "
                    "budget"
                ),
            )
        ],
    ),
    (
        "rules",
        [RULE | {"name": "a\nb"}],
        [("/spec/rules/0/name", "name must have no control characters")],
    ),
    (
        "rules",
        _configured("token_bucket", burst=1),
        [(_OF, "tokens_per_second or rps is required")],
    ),
    (
        "rules",
        _configured("token_bucket", rps=5, burst=2),
        [(f"{_OF}/burst", "burst must be >= rps, which is 5")],
    ),
    (
        "rules",
        _configured(
            "token_bucket",
            algorithm="cost_based",
            tokens_per_second=0,
            burst=1e300,
            cost_source="body:/a",
        ),
        [
            (f"{_OF}/algorithm", "algorithm must be token_bucket"),
            (f"{_OF}/tokens_per_second", "tokens_per_second must be >= 0.001"),
            (f"{_OF}/burst", "burst must be <= 1000000000, not 1e+300"),
            (
                f"{_OF}/cost_source",
                "cost_source must be 'fixed', 'header:<name>' or 'query:<name>'",
            ),
        ],
    ),
    (
        "rules",
        _configured("token_bucket", tokens_per_second=2, rps=1, burst=2),
        [
            (
                f"{_OF}/rps",
                "rps is another name for tokens_per_second, but has another value; leave one out",
            )
        ],
    ),
    (
        "rules",
        _configured("token_bucket", rps=1, burst=2, reject_status=400),
        [(f"{_OF}/reject_status", "unknown key; reject_status belongs in the rule itself")],
    ),
    (
        "rules",
        _configured("token_bucket_llm"),
        [(f"{_OF}/tokens_per_minute", "tokens_per_minute is required")],
    ),
    (
        "rules",
        _configured(
            "token_bucket_llm",
            tokens_per_minute=10,
            burst_tokens=9,
            token_source={"estimator": "x"},
        ),
        [
            (f"{_OF}/burst_tokens", "burst_tokens must be >= tokens_per_minute, which is 10"),
            (f"{_OF}/token_source/estimator", "estimator must be one of simple_word, header_hint"),
        ],
    ),
    (
        "rules",
        _configured(
            "cost_based",
            budget=-1,
            period="2h",
            timezone="Mars/Olympus",
            staged_actions=_REJECT,
            cost_key="body",
        ),
        [
            (f"{_OF}/budget", "budget must be greater than 0"),
            (f"{_OF}/period", "period must be one of 5m, 1h, 1d, 7d, month"),
            (f"{_OF}/timezone", "timezone must be an IANA time zone, such as 'Europe/Berlin'"),
            (
                f"{_OF}/cost_key",
                (
                    "cost_key must be 'fixed', 'header:<name>', 'query:<name>', 'usage:tokens', "
                    "'usage:input', 'usage:output' "
                    "or 'usage:dollars'"
                ),
            ),
        ],
    ),
    (
        "rules",
        _configured(
            "cost_based",
            budget=1,
            period="1h",
            timezone="UTC",
            unknown_model={"input": 1, "output": 1},
            staged_actions=[
                {"threshold_percent": 80, "action": "throttle"},
                {"threshold_percent": 80, "action": "warn", "delay_ms": 5},
                {"threshold_percent": 99, "action": "reject"},
            ],
        ),
        [
            (f"{_OF}/staged_actions/0", "throttle needs delay_ms, in milliseconds"),
            (
                f"{_OF}/staged_actions/1/threshold_percent",
                "duplicate threshold 80, also at staged_actions/0",
            ),
            (f"{_OF}/staged_actions/1/delay_ms", "delay_ms belongs to the action throttle"),
            (f"{_OF}/staged_actions", f"staged_actions {_LAST}"),
            (f"{_OF}/timezone", "timezone belongs to the periods 1d, 7d and month"),
            (f"{_OF}/unknown_model", "unknown_model belongs to cost_key usage:dollars"),
        ],
    ),
    (
        "rules",
        [RULE | {"match": {"body:/x": "1", "jwt:plan": ["x"], "header:x-a": True}}],
        [
            (
                "/spec/rules/0/match/body:~1x",
                "body:/x must not be in the body: rules are chosen before the body arrives",
            ),
            (
                "/spec/rules/0/match/jwt:plan",
                "jwt:plan must be a string, a number or a boolean, and not empty",
            ),
        ],
    ),
]


def unknown(*keys: str) -> str:
    return f"unknown key; known keys are {', '.join(keys)}"


def an_object(name: str, *keys: str) -> str:
    return f"{name} must be an object {{{', '.join(f'{chr(34)}{key}{chr(34)}' for key in keys)}}}"


def good(identity: str = "p") -> dict[str, Any]:
    return policy(identity, {"pathExact": "/a"}, limit_keys=["jwt:org"])


def spec(**changes: object) -> dict[str, Any]:
    made = good()
    made["spec"].update(changes)
    return made


def loop(**changes: object) -> dict[str, Any]:
    """A valid policy with keys of loop_detection replaced; `...` removes a key."""
    made = spec()
    detection = made["spec"]["loop_detection"] | changes
    made["spec"]["loop_detection"] = {
        key: value for key, value in detection.items() if value is not ...
    }
    return made


def entries(*changes: Mapping[str, object]) -> dict[str, Any]:
    """A valid policy with a list of detectors, each with keys replaced; `...` removes a key."""
    return spec(loop_detection=[loop(**each)["spec"]["loop_detection"] for each in changes])


def check(*documents: object, **named: object) -> PolicySet:
    """Load documents from files called `0`, `1`, ... and those named.

    Bytes are written as they are, all else as JSON.
    """
    files = {str(number): document for number, document in enumerate(documents)} | named
    return parse(
        {name: d if isinstance(d, bytes) else json.dumps(d).encode() for name, d in files.items()},
        NOW,
    )


def refused(*documents: object) -> list[BundleError]:
    with pytest.raises(BundleErrors) as failure:
        check(*documents)
    return list(failure.value.errors)


def plain(problems: object) -> Errors:
    assert isinstance(problems, list | tuple)
    return [(problem.pointer, problem.message) for problem in problems]


def in_spec(place: str, message: str) -> Errors:
    return [(f"/spec/{place}", f"{place.rpartition('/')[2]} {message}")]


LOOP_FIELDS: list[tuple[str, object, str]] = [
    ("enabled", "yes", "must be a boolean"),
    ("enabled", None, "must be a boolean"),
    ("window_seconds", 0, "must be a positive integer"),
    ("window_seconds", -1, "must be a positive integer"),
    ("window_seconds", 1.5, "must be a positive integer"),
    ("window_seconds", "60", "must be a positive integer"),
    ("window_seconds", True, "must be a positive integer"),
    ("window_seconds", 10**30, "must be <= 31536000"),
    ("threshold_identical_requests", 1, "must be >= 2"),
    ("threshold_identical_requests", 2.5, "must be a positive integer"),
    ("threshold_identical_requests", 10**10, "must be <= 1000000000"),
    ("action", "explode", "must be one of reject, land, throttle, steer, warn"),
    ("action", ["reject"], "must be one of reject, land, throttle, steer, warn"),
    ("similarity", "nearly", f"must be one of {', '.join(KINDS)}"),
    ("window_type", "tumbling", "must be one of sliding_ttl, sliding_log, fixed, back_to_back"),
    ("only_without_entries", 1, "must be a boolean"),
    ("cooldown_seconds", -1, "must be >= 0"),
    ("cooldown_seconds", "1", "must be an integer"),
    ("count_refused", 1, "must be a boolean"),
    ("reject_status", 399, "must be >= 400"),
    ("reject_status", 600, "must be <= 599"),
    ("reject_status", "429", "must be an integer or 'auto'"),
    ("reject_status", True, "must be an integer or 'auto'"),
    ("reject_status", 429.0, "must be an integer or 'auto'"),
    ("refuse_as", "answer", "must be one of error, completion"),
    ("max_delay_ms", 0, "must be >= 1"),
    ("max_delay_ms", 30_001, "must be <= 30000"),
    ("body", "maybe", "must be one of include, ignore"),
]


CANONICAL: dict[str, object] = {"similarity": "canonical"}


TAIL: dict[str, object] = {"similarity": "tail"}


CALLS: dict[str, object] = {"similarity": "tool_calls"}


TURNS: dict[str, object] = {"similarity": "turns"}


MCP: dict[str, object] = {"similarity": "mcp"}


COUNTING = ", ".join(name for name, kind in KINDS.items() if not kind.stateless)

FITS = "threshold must be <= 30 with similarity turns: 64 turns are compared"


STEER: dict[str, Any] = {"action": "steer"}


ALREADY = ("/escalate/reject", "reject is already the action, from 3 on; remove one of them")


NAME = "name must be 1 to 128 of the characters A-Z a-z 0-9 _ . -"


POINTER = "it must be a JSON Pointer, such as '/metadata/request_id' or '/messages/*/id'"


BODY_KEY = (
    "it must be 'body:' and a JSON Pointer, such as 'body:/model' or 'body:/metadata/session_id'"
)


BYPASSES_ALL = (
    "needs at least one of header, pathExact, pathPrefix, methods, but has nothing; it "
    "would bypass everything"
)


ANCHORS = "needs at least one of apis, pathExact, pathPrefix and routes"


def belongs(key: str, owner: str, here: str) -> tuple[str, str]:
    return f"/{key}", f"{key} belongs to similarity {owner}, not {here}"


def milder(name: str, action: str) -> tuple[str, str]:
    order = "in the order warn, steer, throttle, land, reject"
    return (
        f"/escalate/{name}",
        f"{name} is milder than the action, {action}; escalate takes stricter ones, {order}",
    )


def never(place: str, threshold: int, window: int) -> tuple[str, str]:
    message = (
        f"a threshold of {threshold} is never reached among the last {window} calls; raise "
        "window_calls or lower it"
    )
    return place, message


def one_of(
    key: str, values: Iterable[object], message: str, **more: object
) -> list[tuple[dict[str, object], Errors]]:
    """One case for each invalid value of a key, all with the same error."""
    return [({key: value, **more}, [(f"/{key}", message)]) for value in values]


# keys replaced in a good entry; errors, with pointers below the entry
ENTRIES: list[tuple[dict[str, object], Errors]] = [
    *(
        entry
        for name, value, message in LOOP_FIELDS
        for entry in one_of(name, [value], f"{name} {message}")
    ),
    # Types and ranges of what belongs to one similarity, or to none.
    *one_of("name", ("", "a b", "a:b", "a\n", "a" * 129), NAME),
    ({"name": 5}, [("/name", "name must be a string")]),
    ({"max_inspect_bytes": 0}, [("/max_inspect_bytes", "max_inspect_bytes must be >= 1")]),
    (
        {"max_inspect_bytes": 2**24 + 1},
        [("/max_inspect_bytes", "max_inspect_bytes must be <= 16777216")],
    ),
    *one_of("max_inspect_bytes", ("1", 1.0, True), "max_inspect_bytes must be an integer"),
    (CANONICAL | {"ignore_fields": "/id"}, [("/ignore_fields", "ignore_fields must be an array")]),
    (
        CANONICAL | {"ignore_fields": ["id", 5, "/a~2", "", "/a~", "/", "/a/*/b~0~1"]},
        [
            ("/ignore_fields/0", POINTER),
            ("/ignore_fields/1", "it must be a string"),
            ("/ignore_fields/2", POINTER),
            ("/ignore_fields/3", POINTER),
            ("/ignore_fields/4", POINTER),
        ],
    ),
    (TAIL | {"tail_messages": 0}, [("/tail_messages", "tail_messages must be >= 1")]),
    (TAIL | {"tail_messages": 201}, [("/tail_messages", "tail_messages must be <= 200")]),
    (TAIL | {"tail_messages": "3"}, [("/tail_messages", "tail_messages must be an integer")]),
    (CALLS | {"window_calls": 201}, [("/window_calls", "window_calls must be <= 200")]),
    (
        CALLS | {"window_calls": 1, "threshold_identical_requests": 1},
        [
            ("/threshold_identical_requests", "threshold_identical_requests must be >= 2"),
            ("/window_calls", "window_calls must be >= 2"),
        ],
    ),
    (CALLS | {"window_calls": 2.5}, [("/window_calls", "window_calls must be an integer")]),
    (
        CALLS | {"reset_on_user_message": "no"},
        [("/reset_on_user_message", "reset_on_user_message must be a boolean")],
    ),
    (CALLS | {"compare_results": 0}, [("/compare_results", "compare_results must be a boolean")]),
    (TURNS | {"weak_threshold": 15}, [("/weak_threshold", "weak_threshold must be <= 14")]),
    (TURNS | {"weak_threshold": 1}, [("/weak_threshold", "weak_threshold must be >= 2")]),
    (TURNS | {"weak_threshold": "5"}, [("/weak_threshold", "weak_threshold must be an integer")]),
    (
        TURNS | {"threshold_identical_requests": 4, "weak_threshold": 3},
        [("/weak_threshold", "weak_threshold must be >= threshold_identical_requests, which is 4")],
    ),
    (
        TURNS | {"threshold_identical_requests": ..., "weak_threshold": 2},
        [("/weak_threshold", "weak_threshold must be >= threshold_identical_requests, which is 3")],
    ),
    (TAIL | {"weak_threshold": 3}, [belongs("weak_threshold", "turns", "tail")]),
    (CALLS | {"max_cycle": 0}, [("/max_cycle", "max_cycle must be >= 1")]),
    (CALLS | {"max_cycle": 17}, [("/max_cycle", "max_cycle must be <= 16")]),
    (CALLS | {"max_cycle": None}, [("/max_cycle", "max_cycle must be an integer")]),
    (CALLS | {"tools": []}, [("/tools", "tools must be an object")]),
    (
        CALLS
        | {
            "tools": {
                "a/b~": 5,
                "f*": {"threshold": 1, "window_calls": 201, "reason": 5, "allow": "x"},
            }
        },
        [
            ("/tools/a~1b~0", an_object("a/b~", *TOOL_KEYS)),
            ("/tools/f*/threshold", "threshold must be >= 2"),
            ("/tools/f*/window_calls", "window_calls must be <= 200"),
            ("/tools/f*/reason", "reason must be a string"),
            ("/tools/f*/allow", "allow must be a boolean"),
        ],
    ),
    (
        CALLS | {"tools": {"f": {"threshold": 201, "window_calls": 1, "reason": "x" * 257}}},
        [
            ("/tools/f/threshold", "threshold must be <= 200"),
            ("/tools/f/window_calls", "window_calls must be >= 2"),
            ("/tools/f/reason", "reason must be at most 256 characters"),
            never("/tools/f", 201, 1),
        ],
    ),
    # Keys of another similarity, whatever they hold, and also where they hold the default.
    ({"ignore_fields": []}, [belongs("ignore_fields", "canonical", "exact")]),
    ({"similarity": "exact", "tail_messages": 3}, [belongs("tail_messages", "tail", "exact")]),
    (
        TAIL
        | {
            "window_calls": 5,
            "tools": {},
            "max_cycle": 2,
            "compare_results": True,
            "reset_on_user_message": True,
        },
        [
            *(
                belongs(key, owners, "tail")
                for key, owners in (
                    ("tools", "tool_calls or turns or mcp"),
                    ("max_cycle", "tool_calls or turns"),
                )
            ),
            *(
                belongs(key, "tool_calls", "tail")
                for key in ("window_calls", "reset_on_user_message", "compare_results")
            ),
        ],
    ),
    (
        CALLS | {"tail_messages": 3, "ignore_fields": ["/x"]},
        [
            belongs("ignore_fields", "canonical", "tool_calls"),
            belongs("tail_messages", "tail", "tool_calls"),
        ],
    ),
    (
        CANONICAL | {"enabled": False, "max_cycle": 1},
        [belongs("max_cycle", "tool_calls or turns", "canonical")],
    ),
    (
        {"similarity": "nearly", "tools": {}},
        [("/similarity", f"similarity must be one of {', '.join(KINDS)}")],
    ),
    *(
        entry
        for similarity in ("canonical", "tail", "tool_calls", "turns")
        for entry in one_of(
            "body",
            ["ignore"],
            f"body must not be ignore with similarity {similarity}, which compares the body",
            similarity=similarity,
        )
    ),
    (
        {"refuse_as": "completion", "body": "ignore"},
        [("/refuse_as", "refuse_as completion needs the body, but body is ignore")],
    ),
    (
        MCP | {"refuse_as": "completion"},
        [
            (
                "/refuse_as",
                (
                    "refuse_as must not be completion with similarity mcp, whose refusals are "
                    "answers "
                    "already"
                ),
            )
        ],
    ),
    # What has to be given, and thresholds that no window reaches.
    *(
        (
            TAIL | {"window_seconds": missing},
            [("", "when enabled is true, window_seconds is required")],
        )
        for missing in (None, ...)
    ),
    *(
        (
            CALLS | {"window_seconds": missing, "threshold_identical_requests": missing},
            [("", "when enabled is true, threshold_identical_requests is required")],
        )
        for missing in (None, ...)
    ),
    (
        CALLS | {"threshold_identical_requests": 11},
        [never("/threshold_identical_requests", 11, 10)],
    ),
    (
        CALLS | {"threshold_identical_requests": 5, "window_calls": 4},
        [never("/threshold_identical_requests", 5, 4)],
    ),
    (
        CALLS
        | {
            "tools": {
                "above": {"threshold": 11},
                "short": {"window_calls": 2},
                "never": {"threshold": 99, "allow": True},
                "long": {"threshold": 20, "window_calls": 20},
                "own": {},
            }
        },
        [never("/tools/above", 11, 10), never("/tools/short", 3, 2)],
    ),
    # What does not fit into the turns that are looked at.
    (
        TURNS | {"normalize_results": 1},
        [("/normalize_results", "normalize_results must be a boolean")],
    ),
    (
        TURNS | {"ignore_arguments": "thought"},
        [("/ignore_arguments", "ignore_arguments must be an array")],
    ),
    (CALLS | {"ignore_arguments": []}, [belongs("ignore_arguments", "turns", "tool_calls")]),
    (TURNS | {"window_calls": 9}, [belongs("window_calls", "tool_calls", "turns")]),
    (
        TURNS | {"threshold_identical_requests": 9},
        [
            (
                "/threshold_identical_requests",
                "threshold_identical_requests must be <= 8 with similarity turns",
            )
        ],
    ),
    (
        TURNS | {"tools": {"f": {"threshold": 31, "window_calls": 9}, "g": {"threshold": 30}}},
        [
            ("/tools/f/threshold", f"{FITS}; to permit a tool more, set allow"),
            ("/tools/f/window_calls", "window_calls belongs to similarity tool_calls"),
        ],
    ),
    # Calls are counted one by one.
    (MCP | {"max_cycle": 3}, [belongs("max_cycle", "tool_calls or turns", "mcp")]),
    (
        MCP | {"tools": {"f": {"window_calls": 9}}},
        [("/tools/f/window_calls", "window_calls belongs to similarity tool_calls")],
    ),
    # What follows later is stricter.
    (
        {"action": "warn", "escalate": {"warn": 4}},
        [("/escalate/warn", unknown("steer", "throttle", "land", "reject"))],
    ),
    (
        {"action": "warn", "escalate": 5},
        [("/escalate", an_object("escalate", "steer", "throttle", "land", "reject"))],
    ),
    ({"action": "warn", "escalate": {"reject": 1}}, [("/escalate/reject", "reject must be >= 2")]),
    (
        {"action": "warn", "escalate": {"reject": "5"}},
        [("/escalate/reject", "reject must be an integer")],
    ),
    (
        STEER | {"escalate": {"steer": 4, "reject": 5}},
        [("/escalate/steer", "steer is already the action, from 3 on; remove one of them")],
    ),
    ({"escalate": {"throttle": 5}}, [milder("throttle", "reject")]),
    ({"escalate": {"throttle": 2, "reject": 5}}, [milder("throttle", "reject"), ALREADY]),
    (
        STEER | {"escalate": {"throttle": 7, "reject": 5}},
        [
            (
                "/escalate/reject",
                "reject must have a higher threshold than throttle, which begins at 7",
            )
        ],
    ),
    (
        STEER | {"escalate": {"reject": 3}},
        [("/escalate/reject", "reject must have a higher threshold than steer, which begins at 3")],
    ),
    (
        TURNS | STEER | {"threshold_identical_requests": ..., "escalate": {"reject": 2}},
        [("/escalate/reject", "reject must have a higher threshold than steer, which begins at 3")],
    ),
    (
        TURNS | STEER | {"escalate": {"throttle": 8, "reject": 9}},
        [("/escalate/reject", "reject must be <= 8 with similarity turns")],
    ),
    (
        TURNS
        | STEER
        | {"escalate": {"reject": 5}, "tools": {"f": {"threshold": 28}, "g": {"threshold": 29}}},
        [
            (
                "/escalate/reject",
                (
                    f"{FITS}; to permit a tool more, set allow; escalate raises "
                    "/tools/g/threshold by "
                    "2"
                ),
            )
        ],
    ),
    (CALLS | STEER | {"escalate": {"reject": 11}}, [never("/escalate/reject", 11, 10)]),
    (
        STEER | {"window_type": "sliding_log", "escalate": {"reject": 10_001}},
        [
            (
                "/escalate/reject",
                "reject must be <= 10000 with window_type sliding_log: each request is stored",
            )
        ],
    ),
    *(
        (
            similar | {"window_type": "back_to_back"},
            [
                (
                    "/window_type",
                    (
                        f"with window_type back_to_back, similarity must be one of {COUNTING}, not "
                        f"{similar['similarity']}, which counts no requests"
                    ),
                )
            ],
        )
        for similar in (CALLS, TURNS)
    ),
    # Unknown keys: what was meant, or where it belongs.
    ({"ignore_field": []}, [("/ignore_field", "unknown key; did you mean ignore_fields?")]),
    ({"tail_mesages": 3}, [("/tail_mesages", "unknown key; did you mean tail_messages?")]),
    ({"bypass": []}, [("/bypass", "unknown key; bypass belongs in spec")]),
    ({"threshold": 3}, [("/threshold", "unknown key; did you mean threshold_identical_requests?")]),
    ({"header": "x"}, [("/header", "unknown key; header belongs in an entry of bypass")]),
    ({"pathPrefix": "/"}, [("/pathPrefix", "unknown key; pathPrefix belongs in spec/selector")]),
    ({"zzz": 1}, [("/zzz", ANNOTATION)]),
    (
        CALLS
        | {
            "tools": {
                "tools": {
                    "thresold": 3,
                    "action": "warn",
                    "window": 1,
                    "limit_keys": [],
                    "header": "x",
                    "zzz": 1,
                }
            }
        },
        [
            ("/tools/tools/thresold", "unknown key; did you mean threshold?"),
            ("/tools/tools/action", "unknown key; action belongs in spec/loop_detection"),
            ("/tools/tools/window", "unknown key; did you mean window_calls?"),
            ("/tools/tools/limit_keys", "unknown key; limit_keys belongs in spec"),
            ("/tools/tools/header", "unknown key; header belongs in an entry of bypass"),
            ("/tools/tools/zzz", unknown(*TOOL_KEYS)),
        ],
    ),
    (
        CALLS | {"tools": {"x-a": 5}},
        [("/tools/x-a", an_object("x-a", *TOOL_KEYS))],
    ),  # no annotation: any name may be a tool's
]


SPEC_FIELDS: list[tuple[str, object, Errors]] = [
    ("selector", 5, [("/spec/selector", an_object("selector", *SELECTOR_KEYS))]),
    ("selector", {}, in_spec("selector", f"{ANCHORS}, but has nothing")),
    (
        "selector",
        {"hosts": ["a"], "methods": ["GET"]},
        in_spec("selector", f"{ANCHORS}, but has only hosts and methods"),
    ),
    ("selector", {"pathExact": None, "x-a": 1}, in_spec("selector", f"{ANCHORS}, but has nothing")),
    ("selector", {"pathExact": "v1"}, in_spec("selector/pathExact", "must start with '/'")),
    ("selector", {"pathPrefix": ""}, in_spec("selector/pathPrefix", "must start with '/'")),
    ("selector", {"pathExact": 1}, in_spec("selector/pathExact", "must be a string")),
    (
        "selector",
        {"pathExact": "/a?b"},
        in_spec(
            "selector/pathExact",
            "must be a path alone, without '?' or '#': the query is part of every fingerprint",
        ),
    ),
    (
        "selector",
        {"pathExact": "/a", "methods": []},
        in_spec("selector/methods", "must not be an empty array; leave it out to match any"),
    ),
    (
        "selector",
        {"routes": ["r", ""], "methods": ["A B"], "hosts": ["*.example.com", "."]},
        [
            ("/spec/selector/methods/0", "it must be an HTTP method such as 'POST'"),
            ("/spec/selector/hosts/0", HOST),
            ("/spec/selector/hosts/1", HOST),
            ("/spec/selector/routes/1", "it must not be empty"),
        ],
    ),
    ("mode", "dry", in_spec("mode", "must be one of enforce, shadow")),
    ("enforce_percent", 0, in_spec("enforce_percent", "must be >= 1")),
    ("enforce_percent", 101, in_spec("enforce_percent", "must be <= 100")),
    *(
        ("enforce_percent", value, in_spec("enforce_percent", "must be an integer"))
        for value in ("25", 25.0, True)
    ),
    (
        "enforce_percentage",
        25,
        [("/spec/enforce_percentage", "unknown key; did you mean enforce_percent?")],
    ),
    ("ramp_by", "jwt:org", in_spec("ramp_by", "must be an array")),
    (
        "ramp_by",
        [],
        in_spec("ramp_by", "must not be an empty array; leave it out for the policy's limit_keys"),
    ),
    (
        "ramp_by",
        ["x-user", "header:x-user", "body:/user", "body:user", 5],
        [
            ("/spec/ramp_by/0", LIMIT_KEY),
            (
                "/spec/ramp_by/2",
                "it must not be in the body: callers are chosen before the body arrives",
            ),
            ("/spec/ramp_by/3", BODY_KEY),
            ("/spec/ramp_by/4", "it must be a string"),
        ],
    ),
    (
        "ramp_seed",
        "a b",
        in_spec("ramp_seed", "must be 1 to 128 of the characters A-Z a-z 0-9 _ . -"),
    ),
    ("keep_counts", 1, in_spec("keep_counts", "must be a boolean")),
    (
        "missing_descriptor",
        "x",
        in_spec("missing_descriptor", "must be one of require_one, skip, share"),
    ),
    ("limit_keys", "jwt:org", in_spec("limit_keys", "must be an array")),
    (
        "limit_keys",
        ["jwt:", "ip:peer", 5],
        [
            ("/spec/limit_keys/0", LIMIT_KEY),
            ("/spec/limit_keys/1", LIMIT_KEY),
            ("/spec/limit_keys/2", "it must be a string"),
        ],
    ),
    (
        "session",
        [],
        [
            (
                "/spec/session",
                an_object(
                    "session",
                    "keys",
                    "idle_seconds",
                    "max_sessions_per_tenant",
                    "agent_keys",
                    "parent_keys",
                ),
            )
        ],
    ),
    (
        "session",
        {"keys": ["x-session-id", "body:session"], "idle_seconds": 0, "idle": 5},
        [
            ("/spec/session/keys/0", LIMIT_KEY),
            (
                "/spec/session/keys/1",
                (
                    "it must be 'body:' and a JSON Pointer, such as 'body:/model' or "
                    "'body:/metadata/session_id'"
                ),
            ),
            ("/spec/session/idle_seconds", "idle_seconds must be a positive integer"),
            ("/spec/session/idle", "unknown key; did you mean idle_seconds?"),
        ],
    ),
    (
        "session",
        {"keys": []},
        in_spec(
            "session/keys",
            "must not be an empty array; leave it out for the headers that agents send anyway",
        ),
    ),
    ("loop_detection", [], in_spec("loop_detection", "must not be an empty array; leave it out")),
    ("loop_detection", "on", in_spec("loop_detection", "must be an object or an array of objects")),
    (
        "loop_detection",
        [good()["spec"]["loop_detection"], 5, None, []],
        [(f"/spec/loop_detection/{number}", "it must be an object") for number in (1, 2, 3)],
    ),
    (
        "limit_keys",
        ["body:", "body:model", "body:/a~", "body:/a~2", "Body:/a", "body:/a~0~1/0", "body:/"],
        [
            *((f"/spec/limit_keys/{number}", BODY_KEY) for number in range(4)),
            ("/spec/limit_keys/4", LIMIT_KEY),
        ],
    ),
    ("rules", [RULE | {"limit_keys": ["body:x"]}], [("/spec/rules/0/limit_keys/0", BODY_KEY)]),
    ("bypass", {}, in_spec("bypass", "must be an array")),
    ("bypass", None, in_spec("bypass", "must be an array")),
    (
        "bypass",
        [5, {}, {"header": None, "methods": None}, {"description": "all"}],
        [
            ("/spec/bypass/0", an_object("it", *BYPASS_KEYS)),
            *((f"/spec/bypass/{number}", BYPASSES_ALL) for number in (1, 2, 3)),
        ],
    ),
    (
        "bypass",
        [
            *({"header": name} for name in ("a b", "", ":path", 5)),
            {"pathPrefix": "x"},
            {"pathExact": "/a?b"},
            {"methods": []},
            {"methods": ["A B", 1]},
            {"methods": "GET"},
        ],
        [
            *(
                (
                    f"/spec/bypass/{number}/header",
                    "header must be the name of a header, such as 'x-health-check'",
                )
                for number in range(3)
            ),
            ("/spec/bypass/3/header", "header must be a string"),
            ("/spec/bypass/4/pathPrefix", "pathPrefix must start with '/'"),
            (
                "/spec/bypass/5/pathExact",
                (
                    "pathExact must be a path alone, without '?' or '#': the query is part of "
                    "every "
                    "fingerprint"
                ),
            ),
            (
                "/spec/bypass/6/methods",
                "methods must not be an empty array; leave it out to match any",
            ),
            ("/spec/bypass/7/methods/0", "it must be an HTTP method such as 'POST'"),
            ("/spec/bypass/7/methods/1", "it must be a string"),
            ("/spec/bypass/8/methods", "methods must be an array"),
        ],
    ),
    (
        "bypass",
        [
            {"methods": ["GET"], name: 1}
            for name in (
                "headers",
                "path",
                "pathPrefx",
                "selector",
                "hosts",
                "routes",
                "enabled",
                "threshold",
                "zzz",
            )
        ],
        [
            ("/spec/bypass/0/headers", "unknown key; did you mean header?"),
            ("/spec/bypass/1/path", "unknown key; did you mean pathExact?"),
            ("/spec/bypass/2/pathPrefx", "unknown key; did you mean pathPrefix?"),
            ("/spec/bypass/3/selector", "unknown key; selector belongs in spec"),
            ("/spec/bypass/4/hosts", "unknown key; hosts belongs in spec/selector"),
            ("/spec/bypass/5/routes", "unknown key; routes belongs in spec/selector"),
            ("/spec/bypass/6/enabled", "unknown key; enabled belongs in spec/loop_detection"),
            ("/spec/bypass/7/threshold", "unknown key; threshold belongs in an entry of tools"),
            ("/spec/bypass/8/zzz", unknown(*BYPASS_KEYS)),
        ],
    ),
    ("rules", {}, in_spec("rules", "must be an array")),
    (
        "rules",
        [{"limit_keys": ["x"]}],
        [
            ("/spec/rules/0/name", "name is required"),
            ("/spec/rules/0/limit_keys/0", LIMIT_KEY),
            ("/spec/rules/0/algorithm", "algorithm is required"),
            ("/spec/rules/0/algorithm_config", "algorithm_config is required"),
        ],
    ),
    ("fallback_limit", 1, [("/spec/fallback_limit", an_object("fallback_limit", *RULE_KEYS))]),
    (
        "fallback_limit",
        {**RULE, "limit_keys": ["x"], "any": 1},
        [
            ("/spec/fallback_limit/limit_keys/0", LIMIT_KEY),
            ("/spec/fallback_limit/any", unknown(*RULE_KEYS)),
        ],
    ),
    (
        "circuit_breaker",
        1,
        [("/spec/circuit_breaker", an_object("circuit_breaker", *BREAKER_KEYS))],
    ),
    (
        "circuit_breaker",
        {"enabled": True},
        [("/spec/circuit_breaker", f"when enabled is true, {BREAKER_KEYS[1]} is required")],
    ),
    *RULE_FIELDS,
]


DOCUMENTS: list[tuple[object, Errors]] = [
    # What is no document at all.
    (b"", [("", "is not JSON: Expecting value at line 1, column 1")]),
    (b'{"id": "x",\n "spec"}', [("", "is not JSON: Expecting ':' delimiter at line 2, column 8")]),
    (b'{"id": "\xff"}', [("", "is not UTF-8 (byte 8)")]),
    (b'{"bundle_version": NaN, "policies": []}', [("", "is not JSON: NaN is not a JSON number")]),
    (
        b'{"bundle_version": -Infinity, "policies": []}',
        [("", "is not JSON: -Infinity is not a JSON number")],
    ),
    (b"[" * 100_000, [("", "is nested too deeply to be a policy file")]),
    (b'{"a":' * 100_000, [("", "is nested too deeply to be a policy file")]),
    (b"1" * 5000, [("", "has a number with thousands of digits")]),
    (b"null", [("", "is null; it must hold a bundle, a policy or a list of policies")]),
    # Shapes.
    ({}, [("", SHAPES)]),
    (5, [("", SHAPES)]),
    ("x", [("", SHAPES)]),
    ({"policy": []}, [("", SHAPES)]),
    ([5], [("/0", an_object("it", "id", "spec"))]),
    ([good(), None], [("/1", an_object("it", "id", "spec"))]),
    ({"id": "p"}, [("/spec", "spec is required")]),
    ({"spec": good()["spec"]}, [("/id", "id is required")]),
    *(
        (
            {**good(), "id": name},
            [("/id", "id must be 1 to 128 of the characters A-Z a-z 0-9 _ . -")],
        )
        for name in ("", "a b", "a" * 129)
    ),
    ({**good(), "id": "p\n"}, [("/id", "id must be 1 to 128 of the characters A-Z a-z 0-9 _ . -")]),
    ({**good(), "id": 7}, [("/id", "id must be a string")]),
    # The bundle's own fields.
    ({"bundle_version": 1}, [("/policies", "policies is required")]),
    ({"policies": [good()]}, [("/bundle_version", "bundle_version is required")]),
    (
        {"bundle_version": 1, "polices": []},
        [
            ("/policies", "policies is required"),
            ("/polices", "unknown key; did you mean policies?"),
        ],
    ),
    (bundle() | {"policies": None}, [("/policies", "policies must be an array")]),
    (bundle(bundle_version=0), [("/bundle_version", "bundle_version must be greater than 0")]),
    (bundle(bundle_version="1"), [("/bundle_version", "bundle_version must be a number")]),
    (bundle(bundle_version=True), [("/bundle_version", "bundle_version must be a number")]),
    (
        b'{"bundle_version": 1e999, "policies": []}',
        [("/bundle_version", "bundle_version must be a finite number")],
    ),
    (bundle(kill_switches={}), [("/kill_switches", "kill_switches must be an array")]),
    *(
        (bundle(issued_at=time), [("/issued_at", f"issued_at {TIME}")])
        for time in ("yesterday", "2026-06-01T00:00:00", 1)
    ),
    (bundle(expires_at=PAST), [("/expires_at", f"the bundle {EXPIRED}")]),
    (
        bundle(expires_at="2026-06-01T00:00:00Z"),
        [("/expires_at", f"the bundle {EXPIRED.replace('05-31T23:59:59', '06-01T00:00:00')}")],
    ),
    (bundle(expires_at="2026-07-01"), [("/expires_at", f"expires_at {TIME}")]),
    (
        bundle(global_shadow=True),
        [("/global_shadow", an_object("global_shadow", "enabled", "reason", "expires_at"))],
    ),
    (bundle(global_shadow={}), [("/global_shadow/enabled", "enabled is required")]),
    (
        bundle(global_shadow={"enabled": "on"}),
        [("/global_shadow/enabled", "enabled must be a boolean")],
    ),
    (
        bundle(global_shadow={"enabled": True, "reason": "x" * 257}),
        [("/global_shadow/reason", "reason must be at most 256 characters")],
    ),
    (
        bundle(global_shadow={"enabled": True, "expires_at": PAST}),
        [("/global_shadow/expires_at", EXPIRED)],
    ),
    (
        bundle(kill_switch_override={"enabled": True, "expires_at": PAST}),
        [("/kill_switch_override/expires_at", EXPIRED)],
    ),
    (
        bundle(global_shadow={"enabled": True, "expires_at": FUTURE.rstrip("Z")}),
        [("/global_shadow/expires_at", f"expires_at {TIME}")],
    ),
    # Unknown keys: what was meant, or where it belongs.
    (loop(window=1), [("/spec/loop_detection/window", "unknown key; did you mean window_type?")]),
    (loop(mode="shadow"), [("/spec/loop_detection/mode", "unknown key; mode belongs in spec")]),
    (spec(action="warn"), [("/spec/action", "unknown key; action belongs in spec/loop_detection")]),
    (
        spec(pathExact="/a"),
        [("/spec/pathExact", "unknown key; pathExact belongs in spec/selector")],
    ),
    ({**good(), "mode": "shadow"}, [("/mode", "unknown key; mode belongs in spec")]),
    ({**good(), "zzz": 1}, [("/zzz", unknown("id", "spec"))]),
    ({**good(), "bypass": []}, [("/bypass", "unknown key; bypass belongs in spec")]),
    (
        spec(tail_messages=3),
        [("/spec/tail_messages", "unknown key; tail_messages belongs in spec/loop_detection")],
    ),
    (spec(bypas=[]), [("/spec/bypas", "unknown key; did you mean bypass?")]),
    (bundle(id="x"), [("/id", "unknown key; id belongs in the policy")]),
    (
        bundle(global_shadow={"enabled": True, "reson": "x"}),
        [("/global_shadow/reson", "unknown key; did you mean reason?")],
    ),
    (
        spec(rules=[RULE | {"limit_key": []}]),
        [("/spec/rules/0/limit_key", "unknown key; did you mean limit_keys?")],
    ),
    (spec(**{"a/b~c": 1}), [("/spec/a~1b~0c", ANNOTATION)]),
    # Rules between fields.
    (
        loop(window_seconds=...),
        [("/spec/loop_detection", "when enabled is true, window_seconds is required")],
    ),
    (
        loop(window_seconds=None),
        [("/spec/loop_detection", "when enabled is true, window_seconds is required")],
    ),
    (
        loop(threshold_identical_requests=...),
        [
            (
                "/spec/loop_detection",
                "when enabled is true, threshold_identical_requests is required",
            )
        ],
    ),
    (
        loop(window_type="sliding_log", threshold_identical_requests=10_001),
        in_spec(
            "loop_detection/threshold_identical_requests",
            "must be <= 10000 with window_type sliding_log: each request is stored",
        ),
    ),
    # Repeated keys, at any depth.
    (b'{"id": "p", "id": "q", "spec": 5}', [("/id", TWICE), ("/spec", "spec must be an object")]),
    (
        json.dumps([good(), loop(action="warn", x=1)])
        .replace('"x": 1', '"action": "reject"')
        .encode(),
        [
            ("/1/spec/loop_detection/action", TWICE),
            ("/1/id", "duplicate id 'p', also at 0 /0/id; ids are unique across all files"),
        ],
    ),
    # Another error in the same object hides nothing.
    (
        loop(window_seconds=..., action="explode", enabled=True, surprise=1),
        [
            (
                "/spec/loop_detection/action",
                "action must be one of reject, land, throttle, steer, warn",
            ),
            ("/spec/loop_detection/surprise", ANNOTATION),
            ("/spec/loop_detection", "when enabled is true, window_seconds is required"),
        ],
    ),
    (
        spec(selector={"methods": [1]}),
        [
            ("/spec/selector/methods/0", "it must be a string"),
            (
                "/spec/selector",
                (
                    "selector needs at least one of apis, pathExact, pathPrefix and routes, but "
                    "has "
                    "only methods"
                ),
            ),
        ],
    ),
    (
        bundle(
            bundle_version="1",
            expires_at=PAST,
            global_shadow={"enabled": True, "expires_at": PAST, "reason": 1},
        ),
        [
            ("/bundle_version", "bundle_version must be a number"),
            ("/global_shadow/reason", "reason must be a string"),
            ("/expires_at", f"the bundle {EXPIRED}"),
            ("/global_shadow/expires_at", EXPIRED),
        ],
    ),
]


FULL = entries(
    {"max_inspect_bytes": 2**24},
    CANONICAL | {"ignore_fields": ["/", "/a/*/b~0~1"], "max_inspect_bytes": 1},
    TAIL | {"tail_messages": 200, "window_type": "sliding_log", "only_without_entries": True},
    {"name": "back", "window_type": "back_to_back", "window_seconds": ...},
    TURNS
    | {
        "window_seconds": ...,
        "threshold_identical_requests": ...,
        "max_cycle": 16,
        "weak_threshold": 5,
        "escalate": {"reject": 7},
        "action": "steer",
        "normalize_results": False,
        "ignore_arguments": ["note"],
        "tools": {"f*": {"threshold": 10, "reason": "x" * 256}, "g": {"allow": True}},
    },
    CALLS
    | {
        "window_seconds": ...,
        "window_calls": 200,
        "threshold_identical_requests": 200,
        "reset_on_user_message": False,
        "compare_results": False,
        "max_cycle": 16,
        "cooldown_seconds": 9,
        "tools": {
            "f*": {"threshold": 2, "window_calls": 2, "reason": "x" * 256},
            "description": {"allow": True, "x-note": 1},
        },
    },
)


FULL["spec"]["bypass"] = [
    {"header": "X-Health", "methods": ["get"], "x-why": 1},
    {"pathPrefix": "/a/", "pathExact": "/b"},
]


FULL["spec"]["limit_keys"] = ["body:/a~1b/0/C", "body:/", "header:x-a"]
