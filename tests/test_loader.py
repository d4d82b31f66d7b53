"""Bytes to policies, or every error at once with its place."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from extproc.errors import BundleError, BundleErrors
from extproc.policy.bundle import make_schema
from extproc.policy.files import MAX_FILE
from extproc.policy.loader import PolicySet, load, parse
from tests.documents import bundle, policy

NOW = datetime(2026, 6, 1, tzinfo=UTC)
PAST = "2026-05-31T23:59:59Z"
FUTURE = "2026-06-01T00:00:01Z"

SHAPES = 'must be a bundle {"bundle_version", "policies"}, a policy {"id", "spec"} or a list of policies'
LIMIT_KEY = (
    "it must be 'jwt:<claim>', 'header:<name>', 'query:<name>' (names of letters, digits, '_' and '-'), 'ip:address' "
    "or 'body:/<JSON Pointer>'"
)
HOST = "it must be a host name such as 'api.example.com' (wildcards are not supported: list each host)"
TIME = "must be an ISO 8601 time with its zone, such as '2026-12-31T00:00:00Z'"
TWICE = "duplicate key; keep one"
ANNOTATION = "unknown key; only description and x-... can be added"

TOOL_KEYS = ("threshold", "window_calls", "reason", "allow")
SELECTOR_KEYS = ("pathExact", "pathPrefix", "methods", "hosts", "routes")
BYPASS_KEYS = ("header", "pathExact", "pathPrefix", "methods")
EXPIRED = "expired at 2026-05-31T23:59:59+00:00; it must be in the future"

Errors = list[tuple[str, str]]


def unknown(*keys: str) -> str:
    """The answer to an unknown key where the keys that there are are few."""
    return f"unknown key; known keys are {', '.join(keys)}"


def an_object(name: str, *keys: str) -> str:
    """The answer to anything else where an object with a few keys belongs."""
    return f"{name} must be an object {{{', '.join(f'{chr(34)}{key}{chr(34)}' for key in keys)}}}"


def good(identity: str = "p") -> dict[str, Any]:
    """A policy without any error or warning."""
    return policy(identity, {"pathExact": "/a"}, limit_keys=["jwt:org"])


def spec(**changes: object) -> dict[str, Any]:
    """A good policy with keys of its spec replaced."""
    made = good()
    made["spec"].update(changes)
    return made


def loop(**changes: object) -> dict[str, Any]:
    """A good policy with keys of its loop_detection replaced; `...` takes a key away."""
    made = spec()
    detection = made["spec"]["loop_detection"] | changes
    made["spec"]["loop_detection"] = {key: value for key, value in detection.items() if value is not ...}
    return made


def entries(*changes: Mapping[str, object]) -> dict[str, Any]:
    """A good policy whose loop_detection is a list of entries, each a good one with its keys replaced; `...` takes one away."""
    return spec(loop_detection=[loop(**each)["spec"]["loop_detection"] for each in changes])


def check(*documents: object, **named: object) -> PolicySet:
    """Load documents (bytes as they are, everything else as JSON) from files `0`, `1`, ... and those named."""
    files = {str(number): document for number, document in enumerate(documents)} | named
    return parse({name: d if isinstance(d, bytes) else json.dumps(d).encode() for name, d in files.items()}, NOW)


def refused(*documents: object) -> list[BundleError]:
    """The errors of documents that must not load."""
    with pytest.raises(BundleErrors) as failure:
        check(*documents)
    return list(failure.value.errors)


def plain(problems: object) -> Errors:
    """Pointers and messages alone."""
    assert isinstance(problems, list | tuple)
    return [(problem.pointer, problem.message) for problem in problems]


FOUND = re.compile(
    r""", not (?:'[^']*'|"[^"]*"|an (?:empty )?(?:array|object)|true|false|null|Infinity|-?\d+(?:\.\d+)?)(?=$|[:,] | \()"""
)


def right(problems: object) -> Errors:
    """Pointers, and what would be right; what was found has a table of its own."""
    return [(pointer, FOUND.sub("", message)) for pointer, message in plain(problems)]


def in_spec(place: str, message: str) -> Errors:
    """One error below the spec of a single policy, its message starting with the field's name."""
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
    ("action", "explode", "must be one of reject, throttle, steer, warn"),
    ("action", ["reject"], "must be one of reject, throttle, steer, warn"),
    ("similarity", "nearly", "must be one of exact, canonical, tail, tool_calls, turns, mcp"),
    ("window_type", "tumbling", "must be one of sliding_ttl, sliding_log, fixed"),
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
FITS = "threshold must be <= 14 with similarity turns: 32 turns are compared"
STEER: dict[str, Any] = {"action": "steer"}
ALREADY = ("/escalate/reject", "reject is already the action, from 3 on; remove one of them")
NAME = "name must be 1 to 128 of the characters A-Z a-z 0-9 _ . -"
POINTER = "it must be a JSON Pointer, such as '/metadata/request_id' or '/messages/*/id'"
BODY_KEY = "it must be 'body:' and a JSON Pointer, such as 'body:/model' or 'body:/metadata/session_id'"
BYPASSES_ALL = "needs at least one of header, pathExact, pathPrefix, methods, but has nothing; it would bypass everything"
ANCHORS = "needs at least one of pathExact, pathPrefix and routes"


def belongs(key: str, owner: str, here: str) -> tuple[str, str]:
    """The error of a key of another similarity."""
    return f"/{key}", f"{key} belongs to similarity {owner}, not {here}"


def milder(name: str, action: str) -> tuple[str, str]:
    """What is said where an entry of `escalate` is milder than the action."""
    order = "in the order warn, steer, throttle, reject"
    return f"/escalate/{name}", f"{name} is milder than the action, {action}; escalate takes stricter ones, {order}"


def never(place: str, threshold: int, window: int) -> tuple[str, str]:
    """The error of a threshold beyond its window."""
    message = f"a threshold of {threshold} is never reached among the last {window} calls; raise window_calls or lower it"
    return place, message


def one_of(key: str, values: Iterable[object], message: str, **more: object) -> list[tuple[dict[str, object], Errors]]:
    """An entry for each wrong value of one key, all with the same error."""
    return [({key: value, **more}, [(f"/{key}", message)]) for value in values]


# keys replaced in a good entry; errors, with pointers below the entry
ENTRIES: list[tuple[dict[str, object], Errors]] = [
    *(entry for name, value, message in LOOP_FIELDS for entry in one_of(name, [value], f"{name} {message}")),
    # Types and ranges of what belongs to one similarity, or to none.
    *one_of("name", ("", "a b", "a:b", "a\n", "a" * 129), NAME),
    ({"name": 5}, [("/name", "name must be a string")]),
    ({"max_inspect_bytes": 0}, [("/max_inspect_bytes", "max_inspect_bytes must be >= 1")]),
    ({"max_inspect_bytes": 2**24 + 1}, [("/max_inspect_bytes", "max_inspect_bytes must be <= 16777216")]),
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
    (CALLS | {"reset_on_user_message": "no"}, [("/reset_on_user_message", "reset_on_user_message must be a boolean")]),
    (CALLS | {"compare_results": 0}, [("/compare_results", "compare_results must be a boolean")]),
    (CALLS | {"max_cycle": 0}, [("/max_cycle", "max_cycle must be >= 1")]),
    (CALLS | {"max_cycle": 17}, [("/max_cycle", "max_cycle must be <= 16")]),
    (CALLS | {"max_cycle": None}, [("/max_cycle", "max_cycle must be an integer")]),
    (CALLS | {"tools": []}, [("/tools", "tools must be an object")]),
    (
        CALLS | {"tools": {"a/b~": 5, "f*": {"threshold": 1, "window_calls": 201, "reason": 5, "allow": "x"}}},
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
        TAIL | {"window_calls": 5, "tools": {}, "max_cycle": 2, "compare_results": True, "reset_on_user_message": True},
        [
            *(
                belongs(key, owners, "tail")
                for key, owners in (("tools", "tool_calls or turns or mcp"), ("max_cycle", "tool_calls or turns"))
            ),
            *(belongs(key, "tool_calls", "tail") for key in ("window_calls", "reset_on_user_message", "compare_results")),
        ],
    ),
    (
        CALLS | {"tail_messages": 3, "ignore_fields": ["/x"]},
        [belongs("ignore_fields", "canonical", "tool_calls"), belongs("tail_messages", "tail", "tool_calls")],
    ),
    (CANONICAL | {"enabled": False, "max_cycle": 1}, [belongs("max_cycle", "tool_calls or turns", "canonical")]),
    (
        {"similarity": "nearly", "tools": {}},
        [("/similarity", "similarity must be one of exact, canonical, tail, tool_calls, turns, mcp")],
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
        [("/refuse_as", "refuse_as must not be completion with similarity mcp, whose refusals are answers already")],
    ),
    # What has to be given, and thresholds that no window reaches.
    *(
        (TAIL | {"window_seconds": missing}, [("", "when enabled is true, window_seconds is required")])
        for missing in (None, ...)
    ),
    *(
        (
            CALLS | {"window_seconds": missing, "threshold_identical_requests": missing},
            [("", "when enabled is true, threshold_identical_requests is required")],
        )
        for missing in (None, ...)
    ),
    (CALLS | {"threshold_identical_requests": 11}, [never("/threshold_identical_requests", 11, 10)]),
    (CALLS | {"threshold_identical_requests": 5, "window_calls": 4}, [never("/threshold_identical_requests", 5, 4)]),
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
    (TURNS | {"normalize_results": 1}, [("/normalize_results", "normalize_results must be a boolean")]),
    (TURNS | {"ignore_arguments": "thought"}, [("/ignore_arguments", "ignore_arguments must be an array")]),
    (CALLS | {"ignore_arguments": []}, [belongs("ignore_arguments", "turns", "tool_calls")]),
    (TURNS | {"window_calls": 9}, [belongs("window_calls", "tool_calls", "turns")]),
    (
        TURNS | {"threshold_identical_requests": 9},
        [("/threshold_identical_requests", "threshold_identical_requests must be <= 8 with similarity turns")],
    ),
    (
        TURNS | {"tools": {"f": {"threshold": 15, "window_calls": 9}, "g": {"threshold": 14}}},
        [
            ("/tools/f/threshold", f"{FITS}; to permit a tool more, set allow"),
            ("/tools/f/window_calls", "window_calls belongs to similarity tool_calls"),
        ],
    ),
    # Calls are counted one by one.
    (MCP | {"max_cycle": 3}, [belongs("max_cycle", "tool_calls or turns", "mcp")]),
    (MCP | {"tools": {"f": {"window_calls": 9}}}, [("/tools/f/window_calls", "window_calls belongs to similarity tool_calls")]),
    # What follows later is stricter.
    ({"action": "warn", "escalate": {"warn": 4}}, [("/escalate/warn", unknown("steer", "throttle", "reject"))]),
    ({"action": "warn", "escalate": 5}, [("/escalate", an_object("escalate", "steer", "throttle", "reject"))]),
    ({"action": "warn", "escalate": {"reject": 1}}, [("/escalate/reject", "reject must be >= 2")]),
    ({"action": "warn", "escalate": {"reject": "5"}}, [("/escalate/reject", "reject must be an integer")]),
    (
        STEER | {"escalate": {"steer": 4, "reject": 5}},
        [("/escalate/steer", "steer is already the action, from 3 on; remove one of them")],
    ),
    ({"escalate": {"throttle": 5}}, [milder("throttle", "reject")]),
    ({"escalate": {"throttle": 2, "reject": 5}}, [milder("throttle", "reject"), ALREADY]),
    (
        STEER | {"escalate": {"throttle": 7, "reject": 5}},
        [("/escalate/reject", "reject must have a higher threshold than throttle, which begins at 7")],
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
        TURNS | STEER | {"escalate": {"reject": 5}, "tools": {"f": {"threshold": 12}, "g": {"threshold": 13}}},
        [("/escalate/reject", f"{FITS}; to permit a tool more, set allow; escalate raises /tools/g/threshold by 2")],
    ),
    (CALLS | STEER | {"escalate": {"reject": 11}}, [never("/escalate/reject", 11, 10)]),
    (
        STEER | {"window_type": "sliding_log", "escalate": {"reject": 10_001}},
        [("/escalate/reject", "reject must be <= 10000 with window_type sliding_log: each request is stored")],
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
        CALLS | {"tools": {"tools": {"thresold": 3, "action": "warn", "window": 1, "limit_keys": [], "header": "x", "zzz": 1}}},
        [
            ("/tools/tools/thresold", "unknown key; did you mean threshold?"),
            ("/tools/tools/action", "unknown key; action belongs in spec/loop_detection"),
            ("/tools/tools/window", "unknown key; did you mean window_calls?"),
            ("/tools/tools/limit_keys", "unknown key; limit_keys belongs in spec"),
            ("/tools/tools/header", "unknown key; header belongs in an entry of bypass"),
            ("/tools/tools/zzz", unknown(*TOOL_KEYS)),
        ],
    ),
    (CALLS | {"tools": {"x-a": 5}}, [("/tools/x-a", an_object("x-a", *TOOL_KEYS))]),  # no annotation: any name may be a tool's
]

SPEC_FIELDS: list[tuple[str, object, Errors]] = [
    ("selector", 5, [("/spec/selector", an_object("selector", *SELECTOR_KEYS))]),
    ("selector", {}, in_spec("selector", f"{ANCHORS}, but has nothing")),
    ("selector", {"hosts": ["a"], "methods": ["GET"]}, in_spec("selector", f"{ANCHORS}, but has only hosts and methods")),
    ("selector", {"pathExact": None, "x-a": 1}, in_spec("selector", f"{ANCHORS}, but has nothing")),
    ("selector", {"pathExact": "v1"}, in_spec("selector/pathExact", "must start with '/'")),
    ("selector", {"pathPrefix": ""}, in_spec("selector/pathPrefix", "must start with '/'")),
    ("selector", {"pathExact": 1}, in_spec("selector/pathExact", "must be a string")),
    (
        "selector",
        {"pathExact": "/a?b"},
        in_spec("selector/pathExact", "must be a path alone, without '?' or '#': the query is part of every fingerprint"),
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
    *(("enforce_percent", value, in_spec("enforce_percent", "must be an integer")) for value in ("25", 25.0, True)),
    ("enforce_percentage", 25, [("/spec/enforce_percentage", "unknown key; did you mean enforce_percent?")]),
    ("ramp_by", "jwt:org", in_spec("ramp_by", "must be an array")),
    ("ramp_by", [], in_spec("ramp_by", "must not be an empty array; leave it out for the policy's limit_keys")),
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
    ("ramp_seed", "a b", in_spec("ramp_seed", "must be 1 to 128 of the characters A-Z a-z 0-9 _ . -")),
    ("keep_counts", 1, in_spec("keep_counts", "must be a boolean")),
    ("missing_descriptor", "x", in_spec("missing_descriptor", "must be one of require_one, skip, share")),
    ("limit_keys", "jwt:org", in_spec("limit_keys", "must be an array")),
    (
        "limit_keys",
        ["jwt:", "ip:peer", 5],
        [("/spec/limit_keys/0", LIMIT_KEY), ("/spec/limit_keys/1", LIMIT_KEY), ("/spec/limit_keys/2", "it must be a string")],
    ),
    ("session", [], [("/spec/session", an_object("session", "keys", "idle_seconds", "max_sessions_per_tenant"))]),
    (
        "session",
        {"keys": ["x-session-id", "body:session"], "idle_seconds": 0, "idle": 5},
        [
            ("/spec/session/keys/0", LIMIT_KEY),
            (
                "/spec/session/keys/1",
                "it must be 'body:' and a JSON Pointer, such as 'body:/model' or 'body:/metadata/session_id'",
            ),
            ("/spec/session/idle_seconds", "idle_seconds must be a positive integer"),
            ("/spec/session/idle", "unknown key; did you mean idle_seconds?"),
        ],
    ),
    (
        "session",
        {"keys": []},
        in_spec("session/keys", "must not be an empty array; leave it out for the headers that agents send anyway"),
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
        [*((f"/spec/limit_keys/{number}", BODY_KEY) for number in range(4)), ("/spec/limit_keys/4", LIMIT_KEY)],
    ),
    ("rules", [{"name": "r", "limit_keys": ["body:x"]}], [("/spec/rules/0/limit_keys/0", BODY_KEY)]),
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
                (f"/spec/bypass/{number}/header", "header must be the name of a header, such as 'x-health-check'")
                for number in range(3)
            ),
            ("/spec/bypass/3/header", "header must be a string"),
            ("/spec/bypass/4/pathPrefix", "pathPrefix must start with '/'"),
            (
                "/spec/bypass/5/pathExact",
                "pathExact must be a path alone, without '?' or '#': the query is part of every fingerprint",
            ),
            ("/spec/bypass/6/methods", "methods must not be an empty array; leave it out to match any"),
            ("/spec/bypass/7/methods/0", "it must be an HTTP method such as 'POST'"),
            ("/spec/bypass/7/methods/1", "it must be a string"),
            ("/spec/bypass/8/methods", "methods must be an array"),
        ],
    ),
    (
        "bypass",
        [
            {"methods": ["GET"], name: 1}
            for name in ("headers", "path", "pathPrefx", "selector", "hosts", "routes", "enabled", "threshold", "zzz")
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
    ("rules", [{"limit_keys": ["x"]}], [("/spec/rules/0/name", "name is required"), ("/spec/rules/0/limit_keys/0", LIMIT_KEY)]),
    ("fallback_limit", 1, in_spec("fallback_limit", "must be an object")),
    ("fallback_limit", {"limit_keys": ["x"], "any": 1}, [("/spec/fallback_limit/limit_keys/0", LIMIT_KEY)]),
    ("circuit_breaker", 1, in_spec("circuit_breaker", "must be an object")),
]

WATCHES_ALL = "enforce_percent needs mode enforce; this policy is in shadow mode"
NOBODY_KNOWN = "enforce_percent chooses among callers, but no limit_keys identify them before the body is read; set ramp_by"

DOCUMENTS: list[tuple[object, Errors]] = [
    # What is no document at all.
    (b"", [("", "is not JSON: Expecting value at line 1, column 1")]),
    (b'{"id": "x",\n "spec"}', [("", "is not JSON: Expecting ':' delimiter at line 2, column 8")]),
    (b'{"id": "\xff"}', [("", "is not UTF-8 (byte 8)")]),
    (b'{"bundle_version": NaN, "policies": []}', [("", "is not JSON: NaN is not a JSON number")]),
    (b'{"bundle_version": -Infinity, "policies": []}', [("", "is not JSON: -Infinity is not a JSON number")]),
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
        ({**good(), "id": name}, [("/id", "id must be 1 to 128 of the characters A-Z a-z 0-9 _ . -")])
        for name in ("", "a b", "a" * 129)
    ),
    ({**good(), "id": "p\n"}, [("/id", "id must be 1 to 128 of the characters A-Z a-z 0-9 _ . -")]),
    ({**good(), "id": 7}, [("/id", "id must be a string")]),
    # The bundle's own fields.
    ({"bundle_version": 1}, [("/policies", "policies is required")]),
    ({"policies": [good()]}, [("/bundle_version", "bundle_version is required")]),
    (
        {"bundle_version": 1, "polices": []},
        [("/policies", "policies is required"), ("/polices", "unknown key; did you mean policies?")],
    ),
    (bundle() | {"policies": None}, [("/policies", "policies must be an array")]),
    (bundle(bundle_version=0), [("/bundle_version", "bundle_version must be greater than 0")]),
    (bundle(bundle_version="1"), [("/bundle_version", "bundle_version must be a number")]),
    (bundle(bundle_version=True), [("/bundle_version", "bundle_version must be a number")]),
    (b'{"bundle_version": 1e999, "policies": []}', [("/bundle_version", "bundle_version must be a finite number")]),
    (bundle(kill_switches={}), [("/kill_switches", "kill_switches must be an array")]),
    *((bundle(issued_at=time), [("/issued_at", f"issued_at {TIME}")]) for time in ("yesterday", "2026-06-01T00:00:00", 1)),
    (bundle(expires_at=PAST), [("/expires_at", f"the bundle {EXPIRED}")]),
    (
        bundle(expires_at="2026-06-01T00:00:00Z"),
        [("/expires_at", f"the bundle {EXPIRED.replace('05-31T23:59:59', '06-01T00:00:00')}")],
    ),
    (bundle(expires_at="2026-07-01"), [("/expires_at", f"expires_at {TIME}")]),
    (bundle(global_shadow=True), [("/global_shadow", an_object("global_shadow", "enabled", "reason", "expires_at"))]),
    (bundle(global_shadow={}), [("/global_shadow/enabled", "enabled is required")]),
    (bundle(global_shadow={"enabled": "on"}), [("/global_shadow/enabled", "enabled must be a boolean")]),
    (
        bundle(global_shadow={"enabled": True, "reason": "x" * 257}),
        [("/global_shadow/reason", "reason must be at most 256 characters")],
    ),
    (bundle(global_shadow={"enabled": True, "expires_at": PAST}), [("/global_shadow/expires_at", EXPIRED)]),
    (bundle(kill_switch_override={"enabled": True, "expires_at": PAST}), [("/kill_switch_override/expires_at", EXPIRED)]),
    (
        bundle(global_shadow={"enabled": True, "expires_at": FUTURE.rstrip("Z")}),
        [("/global_shadow/expires_at", f"expires_at {TIME}")],
    ),
    # Unknown keys: what was meant, or where it belongs.
    (loop(window=1), [("/spec/loop_detection/window", "unknown key; did you mean window_type?")]),
    (loop(mode="shadow"), [("/spec/loop_detection/mode", "unknown key; mode belongs in spec")]),
    (spec(action="warn"), [("/spec/action", "unknown key; action belongs in spec/loop_detection")]),
    (spec(pathExact="/a"), [("/spec/pathExact", "unknown key; pathExact belongs in spec/selector")]),
    ({**good(), "mode": "shadow"}, [("/mode", "unknown key; mode belongs in spec")]),
    ({**good(), "zzz": 1}, [("/zzz", unknown("id", "spec"))]),
    ({**good(), "bypass": []}, [("/bypass", "unknown key; bypass belongs in spec")]),
    (spec(tail_messages=3), [("/spec/tail_messages", "unknown key; tail_messages belongs in spec/loop_detection")]),
    (spec(bypas=[]), [("/spec/bypas", "unknown key; did you mean bypass?")]),
    (bundle(id="x"), [("/id", "unknown key; id belongs in the policy")]),
    (bundle(global_shadow={"enabled": True, "reson": "x"}), [("/global_shadow/reson", "unknown key; did you mean reason?")]),
    (spec(rules=[{"name": "r", "limit_key": []}]), [("/spec/rules/0/limit_key", "unknown key; did you mean limit_keys?")]),
    (spec(**{"a/b~c": 1}), [("/spec/a~1b~0c", ANNOTATION)]),
    # Rules between fields.
    (loop(window_seconds=...), [("/spec/loop_detection", "when enabled is true, window_seconds is required")]),
    (loop(window_seconds=None), [("/spec/loop_detection", "when enabled is true, window_seconds is required")]),
    (
        loop(threshold_identical_requests=...),
        [("/spec/loop_detection", "when enabled is true, threshold_identical_requests is required")],
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
        json.dumps([good(), loop(action="warn", x=1)]).replace('"x": 1', '"action": "reject"').encode(),
        [
            ("/1/spec/loop_detection/action", TWICE),
            ("/1/id", "duplicate id 'p', also at 0 /0/id; ids are unique across all files"),
        ],
    ),
    # Another error in the same object hides nothing.
    (
        loop(window_seconds=..., action="explode", enabled=True, surprise=1),
        [
            ("/spec/loop_detection/action", "action must be one of reject, throttle, steer, warn"),
            ("/spec/loop_detection/surprise", ANNOTATION),
            ("/spec/loop_detection", "when enabled is true, window_seconds is required"),
        ],
    ),
    (
        spec(selector={"methods": [1]}),
        [
            ("/spec/selector/methods/0", "it must be a string"),
            ("/spec/selector", "selector needs at least one of pathExact, pathPrefix and routes, but has only methods"),
        ],
    ),
    (
        bundle(bundle_version="1", expires_at=PAST, global_shadow={"enabled": True, "expires_at": PAST, "reason": 1}),
        [
            ("/bundle_version", "bundle_version must be a number"),
            ("/global_shadow/reason", "reason must be a string"),
            ("/expires_at", f"the bundle {EXPIRED}"),
            ("/global_shadow/expires_at", EXPIRED),
        ],
    ),
]


@pytest.mark.parametrize(("changes", "expected"), ENTRIES)
def test_each_field_of_loop_detection_is_checked(changes: dict[str, object], expected: Errors) -> None:
    """A wrong value is one error that names the field and what would be right."""
    errors = refused(loop(**changes))

    assert right(errors) == [(f"/spec/loop_detection{place}", message) for place, message in expected]


@pytest.mark.parametrize(("changes", "expected"), ENTRIES)
def test_each_field_of_an_entry_is_checked(changes: dict[str, object], expected: Errors) -> None:
    """In a list of entries the errors are the same, at the entry's place, and those beside it are not touched."""
    errors = refused(entries({"name": "first"}, changes, {"name": "last"}))

    assert right(errors) == [(f"/spec/loop_detection/1{place}", message) for place, message in expected]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (loop(action="explode"), "action must be one of reject, throttle, steer, warn, not 'explode'"),
        (loop(action=["reject"]), "action must be one of reject, throttle, steer, warn, not an array"),
        (loop(window_seconds=-1.5), "window_seconds must be a positive integer, not -1.5"),
        (loop(window_seconds=10**70), f"window_seconds must be <= 31536000, not 1{'0' * 59}..."),
        (loop(enabled=None), "enabled must be a boolean, not null"),
        (loop(count_refused="a\n'b'"), """count_refused must be a boolean, not "a\\n'b'\""""),
        (loop(name="n" * 129), f"name must be 1 to 128 of the characters A-Z a-z 0-9 _ . -, not '{'n' * 60}...'"),
        (spec(selector=[]), an_object("selector", *SELECTOR_KEYS) + ", not an empty array"),
        (spec(limit_keys={"a": 1}), "limit_keys must be an array, not an object"),
        (spec(loop_detection=True), "loop_detection must be an object or an array of objects, not true"),
        (
            spec(selector={"pathExact": "/a?b"}),
            "pathExact must be a path alone, without '?' or '#', not '/a?b': the query is part of every fingerprint",
        ),
        (
            spec(selector={"pathExact": "/", "hosts": ["*"]}),
            "it must be a host name such as 'api.example.com', not '*' (wildcards are not supported: list each host)",
        ),
        (
            spec(bypass=[{"header": "Host"}]),
            "header must be another header, not 'Host', which every request has; use hosts in the selector",
        ),
        (
            loop(similarity="turns", threshold_identical_requests=9),
            "threshold_identical_requests must be <= 8 with similarity turns, not 9",
        ),
        (
            loop(similarity="turns", tools={"f": {"threshold": 15}}),
            ("threshold must be <= 14 with similarity turns, not 15: 32 turns are compared; to permit a tool more, set allow"),
        ),
        (
            loop(window_type="sliding_log", threshold_identical_requests=10_001),
            "threshold_identical_requests must be <= 10000 with window_type sliding_log, not 10001: each request is stored",
        ),
        (spec(bypass=[{"header": None, "description": "x"}]), BYPASSES_ALL),
        (bundle(expires_at="soon"), f"expires_at {TIME}, not 'soon'"),
        (b'{"bundle_version": 1e999, "policies": []}', "bundle_version must be a finite number, not Infinity"),
        ({"policy": []}, f"{SHAPES}, not an object"),
        (spec(mode="shadow", enforce_percent=25), WATCHES_ALL),
        (spec(mode="shadow", enforce_percent=100), WATCHES_ALL),
        *((spec(enforce_percent=99, limit_keys=keys), NOBODY_KNOWN) for keys in ([], ["body:/a"])),
        (
            spec(enforce_percent=1, limit_keys=[], rules=[{"name": "r"}], fallback_limit={"limit_keys": ["body:/a"]}),
            NOBODY_KNOWN,
        ),
        ({}, f"{SHAPES}, not an empty object"),
    ],
)
def test_what_was_found_is_told_as_well(document: object, message: str) -> None:
    """An error says what stands there, cut to a length that fits on a line."""
    assert [error.message for error in refused(document)] == [message]


def test_every_error_of_every_entry_is_reported_at_once() -> None:
    """What is wrong with the fields of any entry comes first, then what is wrong between them, then between entries."""
    errors = refused(
        entries(
            {"window_seconds": 0, "action": "explode"},
            TAIL | {"tail_messages": 0, "tools": {}, "window_seconds": ...},
            CALLS | {"threshold_identical_requests": 20, "tools": {"f": {"threshold": 50, "alow": True}}},
            TAIL | {"name": "exact"},
        )
    )

    assert [(error.pointer.removeprefix("/spec/loop_detection/"), error.message) for error in errors] == [
        ("0/window_seconds", "window_seconds must be a positive integer, not 0"),
        ("0/action", "action must be one of reject, throttle, steer, warn, not 'explode'"),
        ("1/tail_messages", "tail_messages must be >= 1, not 0"),
        ("2/tools/f/alow", "unknown key; did you mean allow?"),
        ("1/tools", "tools belongs to similarity tool_calls or turns or mcp, not tail"),
        ("1", "when enabled is true, window_seconds is required"),
        never("2/threshold_identical_requests", 20, 10),
        never("2/tools/f", 50, 10),
        ("3", "duplicate name 'exact', also at loop_detection/0; give each its own name (default: its similarity)"),
    ]


@pytest.mark.parametrize(
    ("document", "names"),
    [
        (loop(), ["default"]),
        (loop(**TAIL), ["default"]),
        (loop(name="mine"), ["mine"]),
        (entries({}), ["exact"]),
        (entries({}, CANONICAL, TAIL, CALLS), ["exact", "canonical", "tail", "tool_calls"]),
        (entries(TAIL, TAIL | {"name": "long"}, TAIL | {"name": "default"}), ["tail", "long", "default"]),
        (entries({"name": None}, {"name": "A.b-c_9"}), ["exact", "A.b-c_9"]),
        (entries({"enabled": False}, TAIL), ["tail"]),
        (entries({"enabled": False}), []),
    ],
)
def test_detectors_have_names(document: dict[str, Any], names: list[str]) -> None:
    """An entry's name is its own, else its similarity, or `default` where it stands alone; those that are off do not act."""
    loaded = check(document)

    assert [name for name, _ in loaded.sources[0].policies[0].spec.detectors()] == names
    assert plain(loaded.warnings) == ([] if names else [("/spec", IDLE)])


@pytest.mark.parametrize(
    ("changes", "name", "second"),
    [
        ([{}, {}], "exact", 1),
        ([{"name": "tail"}, TAIL], "tail", 1),
        ([{}, TAIL, {"name": "x"}, CALLS | {"name": "x", "enabled": False}], "x", 3),
    ],
)
def test_names_are_unique_in_a_policy(changes: list[dict[str, object]], name: str, second: int) -> None:
    """Two entries that would count under one name are refused, where one is off as well, or only one is given."""
    first = second - 1
    message = f"duplicate name {name!r}, also at loop_detection/{first}; give each its own name (default: its similarity)"

    assert right(refused(entries(*changes))) == [(f"/spec/loop_detection/{second}", message)]


def test_the_same_name_may_stand_in_two_policies() -> None:
    """A name is unique in its policy, as an id is everywhere."""
    loaded = check([{**entries({"name": "a"}, TAIL), "id": "p"}, {**entries({"name": "a"}, TAIL), "id": "q"}])

    assert [len(item.spec.detectors()) for item in loaded.sources[0].policies] == [2, 2]


FULL = entries(
    {"max_inspect_bytes": 2**24},
    CANONICAL | {"ignore_fields": ["/", "/a/*/b~0~1"], "max_inspect_bytes": 1},
    TAIL | {"tail_messages": 200, "window_type": "sliding_log"},
    TURNS
    | {
        "window_seconds": ...,
        "threshold_identical_requests": ...,
        "max_cycle": 16,
        "normalize_results": False,
        "ignore_arguments": ["note"],
        "tools": {"f*": {"threshold": 14, "reason": "x" * 256}, "g": {"allow": True}},
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
        "tools": {"f*": {"threshold": 2, "window_calls": 2, "reason": "x" * 256}, "description": {"allow": True, "x-note": 1}},
    },
)
FULL["spec"]["bypass"] = [{"header": "X-Health", "methods": ["get"], "x-why": 1}, {"pathPrefix": "/a/", "pathExact": "/b"}]
FULL["spec"]["limit_keys"] = ["body:/a~1b/0/C", "body:/", "header:x-a"]
FULL["spec"] |= {
    "enforce_percent": 100,
    "ramp_by": ["jwt:a", "Header:X-B", "ip:address"],
    "ramp_seed": "s",
    "keep_counts": True,
}


def test_every_new_key_is_read() -> None:
    """A policy that uses everything loads without a warning; methods and header names are normalised, pointers are not."""
    loaded = check(FULL)

    made = loaded.sources[0].policies[0].spec
    bypass, turns, calls = made.bypass, made.detectors()[3][1], made.detectors()[4][1]
    assert plain(loaded.warnings) == []
    assert [(entry.header, entry.methods, entry.pathPrefix, entry.pathExact) for entry in bypass] == [
        ("x-health", ["GET"], None, None),
        (None, None, "/a/", "/b"),
    ]
    assert made.limit_keys == ["body:/a~1b/0/C", "body:/", "header:x-a"]
    assert (calls.tools["f*"].threshold, calls.tools["description"].allow, calls.window_seconds) == (2, True, None)
    assert (turns.normalize_results, turns.ignore_arguments, turns.threshold_identical_requests) == (False, ["note"], None)


def test_the_defaults_of_new_keys() -> None:
    """Without them a detector looks into 1 MiB, at 3 messages or 10 calls with their results, since the user's last message."""
    made = check(loop()).sources[0].policies[0].spec.detectors()[0][1]

    assert (made.max_inspect_bytes, made.ignore_fields, made.tail_messages) == (2**20, [], 3)
    assert (made.window_calls, made.reset_on_user_message, made.compare_results) == (10, True, True)
    assert (made.max_cycle, made.tools, made.name) == (10, {}, None)


def test_an_empty_tool_name_is_named_in_its_error() -> None:
    """A key without a character gets a sentence all the same."""
    errors = refused(loop(**CALLS, tools={"": {}}))

    assert right(errors) == [("/spec/loop_detection/tools/", "it must not be empty")]


@pytest.mark.parametrize("tool", [{"threshold": None, "window_calls": 2}, {"threshold": 11, "window_calls": None}])
def test_null_is_what_leaving_out_is_for_a_tool(tool: dict[str, object]) -> None:
    """A tool's threshold beyond its window is an error, however the half that is the detector's is left out."""
    threshold, window = tool["threshold"] or 3, tool["window_calls"] or 10
    assert isinstance(threshold, int)
    assert isinstance(window, int)

    assert right(refused(loop(**CALLS, tools={"f": tool}))) == [never("/spec/loop_detection/tools/f", threshold, window)]


@pytest.mark.parametrize("key", ["(object)", "(list)", "[key]"])
def test_no_key_vanishes_from_a_pointer(key: str) -> None:
    """Whatever a key is called, the error stands at its place."""
    errors = refused(loop(**{key: 1})) + refused(loop(**CALLS, tools={key: 5}))

    assert [error.pointer for error in errors] == [f"/spec/loop_detection/{key}", f"/spec/loop_detection/tools/{key}"]


@pytest.mark.parametrize(("name", "value", "expected"), SPEC_FIELDS)
def test_each_field_of_a_spec_is_checked(name: str, value: object, expected: Errors) -> None:
    """A wrong value is reported at its own place, every element of an array for itself."""
    errors = refused(spec(**{name: value}))

    assert right(errors) == expected


def test_calls_without_a_cooldown_share_no_counts() -> None:
    """A policy that keeps nothing needs no limit_keys; with a cooldown, or beside a detector that counts, it does."""
    warned = [
        [warning.message for warning in check(spec(limit_keys=[], loop_detection=loops)).warnings]
        for loops in (
            {"enabled": True, "threshold_identical_requests": 3, **CALLS},
            {"enabled": True, "threshold_identical_requests": 3, "cooldown_seconds": 9, **CALLS},
        )
    ]

    assert warned[0] == []
    assert len(warned[1]) == 1


def test_the_schema_says_what_each_key_means() -> None:
    """Editors show a description at every key, as whole sentences."""
    made = make_schema()["$defs"]

    said = {(kind, key): each.get("description", "") for kind in made for key, each in made[kind]["properties"].items()}
    assert [key for key, text in said.items() if not re.fullmatch(r"[^\n]{7,}\.", text)] == []
    assert all("Attributes" not in kind["description"] for kind in made.values())


def test_a_selector_of_too_many_combinations_is_refused() -> None:
    """Each combination of host, method and route is filed for itself, so their number is bounded."""
    selector = {"pathPrefix": "/", "hosts": [f"h{n}" for n in range(101)], "methods": [f"M{n}" for n in range(100)]}

    (error,) = refused(spec(selector=selector))

    assert error.pointer == "/spec/selector"
    assert error.message.startswith("hosts, methods and routes make 10100 combinations, and at most 10000 are allowed; split")


@pytest.mark.parametrize(("document", "expected"), DOCUMENTS)
def test_each_rule_of_a_document_is_checked(document: object, expected: Errors) -> None:
    """A document that breaks a rule is refused with exactly these places and messages."""
    errors = refused(document)

    assert right(errors) == expected


def test_every_error_of_every_file_is_reported_at_once() -> None:
    """Three broken files are reported together, in their order, each error as `file: pointer: message`."""
    first = bundle(loop(action="x", window_seconds=0), {**spec(mode="y"), "id": 1}, bundle_version=0)

    errors = refused(first, b"{", good("ok"), spec(selector={}))

    assert [str(error) for error in errors] == [
        "0: /bundle_version: bundle_version must be greater than 0, not 0",
        "0: /policies/0/spec/loop_detection/window_seconds: window_seconds must be a positive integer, not 0",
        "0: /policies/0/spec/loop_detection/action: action must be one of reject, throttle, steer, warn, not 'x'",
        "0: /policies/1/id: id must be a string, not 1",
        "0: /policies/1/spec/mode: mode must be one of enforce, shadow, not 'y'",
        "1: /: is not JSON: Expecting property name enclosed in double quotes at line 1, column 2",
        "3: /spec/selector: selector needs at least one of pathExact, pathPrefix and routes, but has nothing",
        "3: /id: duplicate id 'p', also at 0 /policies/0/id; ids are unique across all files",
    ]


def test_ids_are_unique_across_files() -> None:
    """An id that another file has already is refused, and the error says where the first one stands."""
    errors = refused(bundle(good("a"), good("b")), [good("c"), good("b")], good("a"))

    assert [(error.file, error.pointer, error.message) for error in errors] == [
        ("1", "/1/id", "duplicate id 'b', also at 0 /policies/1/id; ids are unique across all files"),
        ("2", "/id", "duplicate id 'a', also at 0 /policies/0/id; ids are unique across all files"),
    ]


def test_a_repeated_key_is_found_however_deep_it_stands() -> None:
    """The search for the place of a repeated key does not run out of stack where the parser did not."""
    errors = refused(b"[" * 900 + b'{"a": 1, "a": 2}' + b"]" * 900)

    assert ("/0" * 900 + "/a", TWICE) in plain(errors)


@pytest.mark.parametrize("document", [bundle(good()), good(), [good()], b"\xef\xbb\xbf" + json.dumps(good()).encode()])
def test_a_file_is_a_bundle_a_policy_or_a_list(document: object) -> None:
    """All three shapes load the same policy without a warning; a byte order mark is no obstacle."""
    loaded = check(document)

    (source,) = loaded.sources
    assert [item.id for item in source.policies] == ["p"]
    assert source.bundle_version == (1 if isinstance(document, dict) and "policies" in document else None)
    assert (loaded.warnings, loaded.unenforced) == ((), ())


def test_description_and_x_keys_may_stand_anywhere() -> None:
    """`description` and `x-...` are allowed in every object, whatever they hold."""
    note = {"description": ["any", None], "x-owner": {"team": 1}, "x-": 0}
    selector = {"pathExact": "/a", **note}
    detection = {"enabled": True, "window_seconds": 1, "threshold_identical_requests": 2, **note}
    rules = [{"name": "r", **note}]
    item = {
        "id": "p",
        "spec": {"selector": selector, "limit_keys": ["jwt:a"], "loop_detection": detection, "rules": rules, **note},
    }

    loaded = check(bundle(item | note, global_shadow={"enabled": False, **note}, **note))

    assert loaded.sources[0].policies[0].spec.selector.pathExact == "/a"
    assert loaded.warnings == ()


def test_a_drop_in_fairvisor_bundle_loads_and_names_what_is_not_enforced() -> None:
    """Every part of a Fairvisor bundle is read; each that Loopguard does not enforce is named at its place."""
    rule = {
        "name": "per-org",
        "limit_keys": ["jwt:org_id", "ua:bot"],
        "algorithm": "token_bucket",
        "algorithm_config": {"tokens_per_second": 10, "burst": 20},
        "match": {"jwt:plan": "free"},
    }
    item = spec(
        limit_keys=["ip:country", "header:X-Key"],
        rules=[rule, {"name": "cost", "limit_keys": ["jwt:org_id"], "algorithm": "cost_based"}],
        fallback_limit=rule,
        circuit_breaker={"enabled": True, "spend_rate_threshold_per_minute": 5},
        session={"keys": ["jwt:sid", "ip:asn"]},
        enforce_percent=5,
        ramp_by=["ip:tor"],
        loop_detection={"enabled": True, "similarity": "turns"},
    )
    override = {"enabled": True, "reason": "planned", "expires_at": FUTURE}
    kill = {"scope_key": "jwt:org_id", "scope_value": "bad", "reason": "abuse"}

    loaded = check(
        bundle(
            item,
            bundle_version=42,
            issued_at="2026-01-01T00:00:00Z",
            expires_at=FUTURE,
            kill_switches=[kill],
            global_shadow=override,
            kill_switch_override=override,
            defaults={"algorithm": "token_bucket"},
        )
    )

    here = "/policies/0/spec"
    left_out = "cannot be derived by Loopguard and is left out of fingerprints"
    assert plain(loaded.unenforced) == [
        (f"{here}/rules", "rate-limit rules are not enforced by Loopguard: per-org, cost"),
        (f"{here}/fallback_limit", "fallback_limit is not enforced by Loopguard"),
        (f"{here}/circuit_breaker", "circuit_breaker is not enforced by Loopguard"),
        (f"{here}/limit_keys/0", f"the descriptor ip:country {left_out}"),
        (f"{here}/rules/0/limit_keys/1", f"the descriptor ua:bot {left_out}"),
        (f"{here}/fallback_limit/limit_keys/1", f"the descriptor ua:bot {left_out}"),
        (f"{here}/ramp_by/0", f"the descriptor ip:tor {left_out}"),
        (f"{here}/session/keys/1", f"the descriptor ip:asn {left_out}"),
    ]
    assert loaded.warnings == ()
    assert loaded.sources[0].policies[0].spec.all_limit_keys() == ["ip:country", "header:x-key", "jwt:org_id", "ua:bot"]


def test_what_a_drop_in_bundle_switches_off_is_not_reported() -> None:
    """A circuit breaker that is off, and empty parts, are no limits that anybody could miss."""
    loaded = check(bundle(spec(rules=[], fallback_limit={}, circuit_breaker={"enabled": False}), kill_switches=[]))

    assert loaded.unenforced == ()


SHARED = "no limit_keys: all callers of policy p share its counts"
OFF = 'not enabled, so it does nothing: set "enabled" to true, or to false if that is intended'
IDLE = "loop_detection is not enabled: policy p does nothing"


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (spec(limit_keys=[]), [("/spec", SHARED)]),
        (spec(limit_keys=["ip:country"]), [("/spec", SHARED)]),
        (spec(limit_keys=[], rules=[{"name": "r", "limit_keys": ["jwt:a"]}]), []),
        (spec(loop_detection=None), [("/spec", IDLE)]),
        (loop(enabled=False, window_seconds=...), [("/spec", IDLE)]),
        (loop(enabled=...), [("/spec", IDLE), ("/spec/loop_detection", OFF)]),
        (spec(loop_detection={}), [("/spec", IDLE)]),
        (
            spec(loop_detection=[{"similarity": "turns"}, {"similarity": "tail", "enabled": False}, {}]),
            [("/spec", IDLE), ("/spec/loop_detection/0", OFF)],
        ),
        (entries({}, {"similarity": "tail", "enabled": ...}), [("/spec/loop_detection/1", OFF)]),
        (bundle(spec(limit_keys=[])), [("/policies/0/spec", SHARED)]),
        (
            spec(selector={"pathExact": "/v1/*/chat", "pathPrefix": "/a b/\u00e9"}),
            [
                (
                    "/spec/selector/pathExact",
                    """'*' is matched literally; to match everything below, use "pathPrefix": "/v1/\"""",
                ),
            ],
        ),
        (spec(selector={"pathExact": "/v1/%7Bid%7D/a:b@c;d=e"}), []),
        (
            spec(session={}),
            [
                (
                    "/spec/session",
                    "nothing in this policy uses sessions; similarity turns and session_limits do",
                )
            ],
        ),
        (
            spec(ramp_by=["jwt:org"], ramp_seed="s", keep_counts=True),
            [
                ("/spec/ramp_by", "ramp_by does nothing without enforce_percent: it acts on all callers"),
                ("/spec/ramp_seed", "ramp_seed does nothing without enforce_percent: it acts on all callers"),
            ],
        ),
        (spec(mode="shadow", ramp_by=["jwt:org"], ramp_seed="s", keep_counts=True), []),
        (spec(enforce_percent=1, ramp_by=["jwt:org"], ramp_seed="s", keep_counts=True), []),
        (spec(enforce_percent=25, limit_keys=["body:/a"], rules=[{"name": "r", "limit_keys": ["jwt:a"]}]), []),
        (spec(enforce_percent=100, limit_keys=["body:/a"]), []),
        (bundle(), [("/policies", "has no policies: nothing is guarded")]),
        ([], [("", "has no policies: nothing is guarded")]),
    ],
)
def test_what_works_but_is_perhaps_not_meant_is_a_warning(document: object, expected: Errors) -> None:
    """A policy that shares counts, or does nothing, loads with a warning at its place."""
    loaded = check(document)

    assert plain(loaded.warnings) == expected


def test_times_of_a_bundle_are_kept() -> None:
    """A bundle that expires in the future loads, and its expiry is known, whatever the zone it is written in."""
    loaded = check(bundle(good(), expires_at="2026-06-01T02:00:01+02:00", issued_at=PAST))

    assert loaded.sources[0].expires_at == datetime(2026, 6, 1, 0, 0, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("override", "shadowed"),
    [
        (None, (False, False)),
        ({"enabled": False, "expires_at": PAST}, (False, False)),
        ({"enabled": True}, (True, True)),
        ({"enabled": True, "expires_at": FUTURE, "reason": "x" * 256}, (True, False)),
    ],
)
def test_global_shadow_holds_until_it_expires(override: object, shadowed: tuple[bool, bool]) -> None:
    """An enabled `global_shadow` covers its file up to, and not including, its end; one that is off may be past it."""
    (source,) = check(bundle(good(), global_shadow=override)).sources

    assert (source.forces_shadow(NOW), source.forces_shadow(datetime.fromisoformat(FUTURE))) == shadowed


def test_selectors_and_keys_are_normalised() -> None:
    """Paths have one spelling, methods are upper-case, hosts lower-case without port and dot, header names lower-case."""
    selector = {
        "pathPrefix": "//v1/./%7euser/a b/{x}%2f",
        "methods": ["post", "GET"],
        "hosts": ["API.Example.com.:8443", "[2001:DB8::1]:80"],
    }

    loaded = check(spec(selector=selector, limit_keys=["Header:X-User-ID", "jwt:Org", "query:Q", "ip:address"]))

    made = loaded.sources[0].policies[0].spec
    assert made.selector.pathPrefix == "/v1/~user/a%20b/%7Bx%7D%2F"
    assert made.selector.methods == ["POST", "GET"]
    assert made.selector.hosts == ["api.example.com", "[2001:db8::1]"]
    assert made.limit_keys == ["header:x-user-id", "jwt:Org", "query:Q", "ip:address"]


def write(root: Path, files: Mapping[str, object]) -> None:
    """Files with JSON, or bytes, or links to what a Path names."""
    for name, content in files.items():
        place = root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            place.symlink_to(content)
        else:
            place.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def ids(*paths: Path | str) -> list[str]:
    """The ids loaded from paths, in order."""
    return [item.id for source in load(map(str, paths), NOW).sources for item in source.policies]


def test_directories_are_read_all_the_way_down(tmp_path: Path) -> None:
    """All `*.json` below a directory are policy files, in a stable order; dot-entries and other files are skipped."""
    skipped: dict[str, object] = dict.fromkeys(
        (".git/x.json", ".hidden.json", "a.json.bak", "README.md", "x/.y/z.json"), b"broken"
    )
    names = [f"p{number}" for number in range(30, 10, -1)]
    write(tmp_path, {f"{name}.json": good(name) for name in names})
    write(tmp_path, {"x/y/c.json": good("c"), "d.json/e.json": good("e"), **skipped})

    found = ids(tmp_path)

    assert found == ["e", *sorted(names), "c"]


def test_a_config_map_is_read_once(tmp_path: Path) -> None:
    """In Kubernetes' layout of links through `..data` every file counts once."""
    write(tmp_path, {"..2026_06_01/p.json": good(), "..data": Path("..2026_06_01"), "p.json": Path("..data/p.json")})

    assert ids(tmp_path) == ["p"]
    assert ids(tmp_path / "p.json") == ["p"]


def test_a_link_that_leads_back_up_ends(tmp_path: Path) -> None:
    """A directory that contains itself through a link is read once."""
    write(tmp_path, {"sub/p.json": good(), "sub/again": tmp_path})

    assert ids(tmp_path) == ["p"]


def test_a_file_given_twice_counts_once(tmp_path: Path) -> None:
    """A file and the directory around it may both be given."""
    write(tmp_path, {"p.json": good(), "q.json": good("q")})

    assert ids(tmp_path, tmp_path / "p.json") == ["p", "q"]


def test_every_path_that_cannot_be_read_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing, unreadable and empty places are all named at once, and then what is wrong with the files that can be read."""
    write(
        tmp_path, {"locked.json": good("x"), "bad.json": b"{", "links/dangling.json": Path("nowhere"), "empty/.p.json": good()}
    )
    (tmp_path / "barred").mkdir()
    os.mkfifo(tmp_path / "fifo.json")
    with (tmp_path / "large.json").open("wb") as large:
        large.truncate(MAX_FILE + 1)
    opens, scan = os.open, os.scandir

    def open_(path: str, flags: int, *more: int) -> int:
        if path.endswith("locked.json"):
            raise PermissionError(13, "Permission denied")
        return opens(path, flags, *more)

    def scandir(path: str) -> Any:  # noqa: ANN401  # os names its type for stubs alone
        if path.endswith("barred"):
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "scandir", scandir)
    names = ["missing.json", "locked.json", "bad.json", "links", "empty", "barred", "fifo.json", "large.json"]
    with pytest.raises(BundleErrors) as failure:
        load([*(str(tmp_path / name) for name in names), "/dev/zero"], NOW)

    assert [str(error).removeprefix(f"{tmp_path}/") for error in failure.value.errors] == [
        "missing.json: /: cannot be read: No such file or directory",
        "locked.json: /: cannot be read: Permission denied",
        "links/dangling.json: /: cannot be read: No such file or directory",
        "empty: /: the directory has no *.json file; add at least one policy",
        "barred: /: cannot be listed: Permission denied",
        "fifo.json: /: is not a regular file",
        "large.json: /: is larger than 64 MiB",
        "/dev/zero: /: is not a regular file",
        "bad.json: /: is not JSON: Expecting property name enclosed in double quotes at line 1, column 2",
    ]


def test_the_schema_describes_the_models() -> None:
    """`schema` is draft 2020-12 with every reference resolved, closed objects, and the rules that editors can show."""
    made = make_schema()

    text = json.dumps(made)
    kinds = made["$defs"]
    detection = kinds["LoopDetection"]
    assert made["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert made["anyOf"] == [
        {"$ref": "#/$defs/Bundle"},
        {"$ref": "#/$defs/Policy"},
        {"items": {"$ref": "#/$defs/Policy"}, "type": "array"},
    ]
    assert all(f'"#/$defs/{name}"' in text for name in kinds)
    assert text.count('"$ref"') == sum(text.count(f'"#/$defs/{name}"') for name in kinds)
    assert [name for name, kind in kinds.items() if kind["additionalProperties"] is not False] == ["FallbackLimit"]
    assert all("^x-" in kind["patternProperties"] for kind in kinds.values())
    assert kinds["Bundle"]["required"] == ["bundle_version", "policies"]
    assert kinds["Policy"]["properties"]["id"]["pattern"] == "^[A-Za-z0-9_.-]{1,128}$"
    assert detection["properties"]["action"]["enum"] == ["reject", "throttle", "steer", "warn"]
    assert {"exclusiveMinimum": 0, "maximum": 31_536_000, "type": "integer"} in detection["properties"]["window_seconds"][
        "anyOf"
    ]


_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def fits(value: Any, rule: Mapping[str, Any], kinds: Mapping[str, Any]) -> bool:  # noqa: ANN401  # JSON
    """Whether a value is what a JSON Schema says, as far as ours says anything; an unknown keyword raises."""

    def of_type(name: str | list[str]) -> bool:
        if isinstance(name, list):
            return any(map(of_type, name))
        return isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool))

    def properties(known: Mapping[str, Any]) -> bool:
        patterns = rule.get("patternProperties", {})
        for key, item in value.items():
            rules = [known[key]] if key in known else []
            rules += [other for pattern, other in patterns.items() if re.search(pattern, key)]
            if not rules and rule.get("additionalProperties", True) is False:
                return False
            if not rules and isinstance(rule.get("additionalProperties"), dict):
                rules = [rule["additionalProperties"]]
            if not all(fits(item, other, kinds) for other in rules):
                return False
        return True

    keywords: dict[str, tuple[str, Any]] = {  # of which type, and what holds
        "$ref": ("", lambda name: fits(value, kinds[name.rpartition("/")[2]], kinds)),
        "anyOf": ("", lambda rules: any(fits(value, other, kinds) for other in rules)),
        "oneOf": ("", lambda rules: sum(fits(value, other, kinds) for other in rules) == 1),
        "type": ("", of_type),
        "enum": ("", lambda choices: value in choices),
        "minimum": ("number", lambda least: value >= least),
        "maximum": ("number", lambda most: value <= most),
        "exclusiveMinimum": ("number", lambda least: value > least),
        "minLength": ("string", lambda least: len(value) >= least),
        "maxLength": ("string", lambda most: len(value) <= most),
        "pattern": ("string", lambda pattern: re.search(pattern.replace("$", r"\Z"), value)),
        "minItems": ("array", lambda least: len(value) >= least),
        "items": ("array", lambda other: all(fits(item, other, kinds) for item in value)),
        "required": ("object", lambda names: value.keys() >= set(names)),
        "properties": ("object", properties),
        "propertyNames": ("object", lambda other: all(fits(name, other, kinds) for name in value)),
        "additionalProperties": ("object", lambda _: "properties" in rule or properties({})),
        **dict.fromkeys(("patternProperties", "title", "description", "default", "format", "$schema", "$defs"), ("", bool)),
    }
    for name, argument in rule.items():
        kind, holds = keywords[name]
        silent = name in ("patternProperties", "title", "description", "default", "format", "$schema", "$defs")
        if not silent and (not kind or isinstance(value, _TYPES[kind])) and not holds(argument):
            return False
    return True


def in_schema(document: object) -> bool:
    """Whether our JSON Schema takes a document."""
    made = make_schema()
    return fits(document, made, made["$defs"])


@pytest.mark.parametrize(
    "document",
    [
        FULL,
        bundle(FULL),
        [FULL],
        loop(**TAIL),
        loop(**CALLS, window_seconds=None, name=None),
        entries({}),
        spec(loop_detection=None),
        spec(bypass=[{"header": "X-A", "description": "why"}]),
        loop(**CALLS, tools={"x-tool": {"threshold": None, "reason": ""}}),
    ],
)
def test_the_schema_takes_what_loads(document: object) -> None:
    """Everything that may be written, in every shape, is right to an editor as well."""
    check(document)

    assert in_schema(document)


_BETWEEN_FIELDS = re.compile(
    r"belongs to similarity|is required$|never reached|must not be \w+ with|with similarity turns|with window_type"
    r"|but body is ignore|is already the action|is milder than|must have a higher threshold"
)
REFUSED_FIELDS = [
    changes
    for changes, expected in ENTRIES
    if not all(_BETWEEN_FIELDS.search(message) for _, message in expected)
    and 1.0 not in changes.values()  # an integer to JSON Schema
]


@pytest.mark.parametrize("changes", REFUSED_FIELDS)
def test_the_schema_refuses_what_does_not_load(changes: dict[str, object]) -> None:
    """A field that is wrong by itself is wrong to an editor as well, in an object and in a list."""
    assert not in_schema(loop(**changes))
    assert not in_schema(entries({"name": "other"}, changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"loop_detection": []},
        {"loop_detection": "on"},
        {"loop_detection": [5]},
        {"bypass": {}},
        {"bypass": None},
        {"bypass": [{"headers": "x"}]},
        {"bypass": [{"header": 5}]},
        {"bypass": [{"header": "a b"}]},
        {"bypass": [{"methods": ["A B"]}]},
        {"limit_keys": ["body:model"]},
        {"limit_keys": ["body:/a~2"]},
        {"rules": [{"name": "r", "limit_keys": ["body:"]}]},
        {"bypass": [{"pathPrefix": "x"}]},
        {"bypass": [{"methods": []}]},
        {"bypas": []},
        {"enforce_percent": 0},
        {"enforce_percent": 101},
        {"ramp_by": []},
        {"ramp_by": ["body:/a"]},
        {"ramp_by": ["x-user"]},
        {"ramp_seed": ""},
        {"keep_counts": "yes"},
    ],
)
def test_the_schema_refuses_shapes_of_a_spec_that_do_not_load(changes: dict[str, object]) -> None:
    """A list without entries, an entry that is none and a bypass of a wrong shape are wrong to both."""
    refused(spec(**changes))

    assert in_schema(spec())
    assert not in_schema(spec(**changes))
