"""Bytes to policies, or every error at once with its place."""

import json
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # published without type information
import pytest

from extproc.errors import BundleErrors
from extproc.policy.bundle import make_schema
from extproc.policy.files import MAX_FILE
from extproc.policy.loader import load
from tests.support.budget_policies import REJECT, rule
from tests.support.bundles import (
    BYPASSES_ALL,
    CALLS,
    CANONICAL,
    DOCUMENTS,
    ENTRIES,
    FULL,
    FUTURE,
    NOW,
    PAST,
    RULE,
    SELECTOR_KEYS,
    SHAPES,
    SPEC_FIELDS,
    TAIL,
    TIME,
    TWICE,
    Errors,
    an_object,
    check,
    entries,
    good,
    loop,
    never,
    plain,
    refused,
    spec,
)
from tests.support.command import fits
from tests.support.documents import bundle

FOUND = re.compile(
    r""", not (?:'[^']*'|"[^"]*"|an (?:empty )?(?:array|object)|true|false|null|Infinity"""
    r"""|-?\d+(?:\.\d+)?)(?=$|[:,] | \()"""
)


def right(problems: object) -> Errors:
    """Pointers and what would be right; what was found has a table of its own."""
    return [(pointer, FOUND.sub("", message)) for pointer, message in plain(problems)]


WATCHES_ALL = "enforce_percent needs mode enforce; this policy is in shadow mode"
NO_CALLER_KNOWN = (
    "enforce_percent chooses among callers, but no limit_keys identify them before "
    "the body is read; set ramp_by"
)


@pytest.mark.parametrize(("changes", "expected"), ENTRIES)
def test_each_field_of_loop_detection_is_checked(
    changes: dict[str, object], expected: Errors
) -> None:
    """In a list of entries the error is the same, at the entry's place."""
    alone, listed = (
        refused(loop(**changes)),
        refused(entries({"name": "first"}, changes, {"name": "last"})),
    )

    assert right(alone) == [
        (f"/spec/loop_detection{place}", message) for place, message in expected
    ]
    assert right(listed) == [
        (f"/spec/loop_detection/1{place}", message) for place, message in expected
    ]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            loop(action="explode"),
            "action must be one of reject, land, throttle, steer, warn, not 'explode'",
        ),
        (
            loop(action=["reject"]),
            "action must be one of reject, land, throttle, steer, warn, not an array",
        ),
        (loop(window_seconds=-1.5), "window_seconds must be a positive integer, not -1.5"),
        (loop(window_seconds=10**70), f"window_seconds must be <= 31536000, not 1{'0' * 59}..."),
        (loop(enabled=None), "enabled must be a boolean, not null"),
        (loop(count_refused="a\n'b'"), """count_refused must be a boolean, not "a\\n'b'\""""),
        (
            loop(name="n" * 129),
            f"name must be 1 to 128 of the characters A-Z a-z 0-9 _ . -, not '{'n' * 60}...'",
        ),
        (spec(selector=[]), an_object("selector", *SELECTOR_KEYS) + ", not an empty array"),
        (spec(limit_keys={"a": 1}), "limit_keys must be an array, not an object"),
        (
            spec(loop_detection=True),
            "loop_detection must be an object or an array of objects, not true",
        ),
        (
            spec(selector={"pathExact": "/a?b"}),
            (
                "pathExact must be a path alone, without '?' or '#', not '/a?b': the query is "
                "part of "
                "every fingerprint"
            ),
        ),
        (
            spec(selector={"pathExact": "/", "hosts": ["*"]}),
            (
                "it must be a host name such as 'api.example.com', not '*' (wildcards are not "
                "supported: list each host)"
            ),
        ),
        (
            spec(bypass=[{"header": "Host"}]),
            (
                "header must be another header, not 'Host', which every request has; use hosts in "
                "the "
                "selector"
            ),
        ),
        (
            loop(similarity="turns", threshold_identical_requests=9),
            "threshold_identical_requests must be <= 8 with similarity turns, not 9",
        ),
        (
            loop(similarity="turns", tools={"f": {"threshold": 31}}),
            (
                "threshold must be <= 30 with similarity turns, not 31: 64 turns are compared; to "
                "permit a tool more, set allow"
            ),
        ),
        (
            loop(window_type="sliding_log", threshold_identical_requests=10_001),
            (
                "threshold_identical_requests must be <= 10000 with window_type sliding_log, not "
                "10001: each request is stored"
            ),
        ),
        (spec(bypass=[{"header": None, "description": "x"}]), BYPASSES_ALL),
        (bundle(expires_at="soon"), f"expires_at {TIME}, not 'soon'"),
        (
            b'{"bundle_version": 1e999, "policies": []}',
            "bundle_version must be a finite number, not Infinity",
        ),
        ({"policy": []}, f"{SHAPES}, not an object"),
        (spec(mode="shadow", enforce_percent=25), WATCHES_ALL),
        (spec(mode="shadow", enforce_percent=100), WATCHES_ALL),
        *(
            (spec(enforce_percent=99, limit_keys=keys), NO_CALLER_KNOWN)
            for keys in ([], ["body:/a"])
        ),
        (
            spec(
                enforce_percent=1,
                limit_keys=[],
                rules=[RULE],
                fallback_limit=RULE | {"name": "f", "limit_keys": ["body:/a"]},
            ),
            NO_CALLER_KNOWN,
        ),
        ({}, f"{SHAPES}, not an empty object"),
        (
            entries(TAIL | {"extra_rules": ["long_action"]}),
            "extra_rules is gone: remove the key; similar errors are always noted",
        ),
    ],
)
def test_error_quotes_what_was_found(document: object, message: str) -> None:
    assert [error.message for error in refused(document)] == [message]


def test_every_error_of_every_entry_is_reported_at_once() -> None:
    """Errors of single fields come first, then those between fields, then those between entries."""
    errors = refused(
        entries(
            {"window_seconds": 0, "action": "explode"},
            TAIL | {"tail_messages": 0, "tools": {}, "window_seconds": ...},
            CALLS
            | {"threshold_identical_requests": 20, "tools": {"f": {"threshold": 50, "alow": True}}},
            TAIL | {"name": "exact"},
        )
    )

    assert [
        (error.pointer.removeprefix("/spec/loop_detection/"), error.message) for error in errors
    ] == [
        ("0/window_seconds", "window_seconds must be a positive integer, not 0"),
        ("0/action", "action must be one of reject, land, throttle, steer, warn, not 'explode'"),
        ("1/tail_messages", "tail_messages must be >= 1, not 0"),
        ("2/tools/f/alow", "unknown key; did you mean allow?"),
        ("1/tools", "tools belongs to similarity tool_calls or turns or mcp, not tail"),
        ("1", "when enabled is true, window_seconds is required"),
        never("2/threshold_identical_requests", 20, 10),
        never("2/tools/f", 50, 10),
        (
            "3",
            (
                "duplicate name 'exact', also at loop_detection/0; give each its own name "
                "(default: "
                "its similarity)"
            ),
        ),
    ]


@pytest.mark.parametrize(
    ("document", "names"),
    [
        (loop(), ["default"]),
        (loop(**TAIL), ["default"]),
        (loop(name="mine"), ["mine"]),
        (entries({}), ["exact"]),
        (entries({}, CANONICAL, TAIL, CALLS), ["exact", "canonical", "tail", "tool_calls"]),
        (
            entries(TAIL, TAIL | {"name": "long"}, TAIL | {"name": "default"}),
            ["tail", "long", "default"],
        ),
        (entries({"name": None}, {"name": "A.b-c_9"}), ["exact", "A.b-c_9"]),
        (entries({"enabled": False}, TAIL), ["tail"]),
        (entries({"enabled": False}), []),
        (
            [entries({"name": "a"}, TAIL), {**entries({"name": "a"}, TAIL), "id": "q"}],
            ["a", "tail", "a", "tail"],
        ),
    ],
)
def test_detectors_have_names(document: object, names: list[str]) -> None:
    """An entry's name is its own, or its similarity, or `default` where it is the only one."""
    loaded = check(document)

    assert [
        name for item in loaded.sources[0].policies for name, _ in item.spec.detectors()
    ] == names
    assert plain(loaded.warnings) == ([] if names else [("/spec", IDLE)])


SCHEMA = jsonschema.Draft202012Validator(make_schema())
FULL["spec"] |= {
    "enforce_percent": 100,
    "ramp_by": ["jwt:a", "Header:X-B", "ip:address"],
    "ramp_seed": "s",
    "keep_counts": True,
}


def test_policy_with_every_key_loads_without_warning() -> None:
    loaded = check(FULL)

    made = loaded.sources[0].policies[0].spec
    bypass, turns, calls = made.bypass, made.detectors()[4][1], made.detectors()[5][1]
    assert plain(loaded.warnings) == []
    assert [
        (entry.header, entry.methods, entry.pathPrefix, entry.pathExact) for entry in bypass
    ] == [
        ("x-health", ["GET"], None, None),
        (None, None, "/a/", "/b"),
    ]
    assert made.limit_keys == ["body:/a~1b/0/C", "body:/", "header:x-a"]
    assert (
        calls.tools["f*"].threshold,
        calls.tools["description"].allow,
        calls.window_seconds,
    ) == (2, True, None)
    assert (
        turns.normalize_results,
        turns.ignore_arguments,
        turns.threshold_identical_requests,
    ) == (False, ["note"], None)


@pytest.mark.parametrize(("limits", "most"), [({}, 2**20), ({"max_inspect_bytes": 1_000}, 1_000)])
def test_session_limits_have_their_own_inspect_bytes(limits: dict[str, int], most: int) -> None:
    loaded = check(spec(loop_detection=None, session={}, session_limits={"max_steps": 9, **limits}))

    assert loaded.sources[0].policies[0].spec.find_session_inspect_bytes() == most


def test_defaults_of_detector_keys() -> None:
    made = check(loop()).sources[0].policies[0].spec.detectors()[0][1]

    assert (made.max_inspect_bytes, made.ignore_fields, made.tail_messages) == (2**20, [], 3)
    assert (made.window_calls, made.reset_on_user_message, made.compare_results) == (10, True, True)
    assert (made.max_cycle, made.tools, made.name) == (10, {}, None)


@pytest.mark.parametrize(("name", "value", "expected"), SPEC_FIELDS)
def test_each_field_of_a_spec_is_checked(name: str, value: object, expected: Errors) -> None:
    errors = refused(spec(**{name: value}))

    assert right(errors) == expected


def test_schema_describes_each_key_in_whole_sentences() -> None:
    made = make_schema()["$defs"]

    said = {
        (kind, key): each.get("description", "")
        for kind in made
        for key, each in made[kind]["properties"].items()
    }
    assert [key for key, text in said.items() if not re.fullmatch(r"[^\n]{7,}\.", text)] == []
    assert all("Attributes" not in kind["description"] for kind in made.values())


MANY = {
    "pathPrefix": "/",
    "hosts": [f"h{n}" for n in range(101)],
    "methods": [f"M{n}" for n in range(100)],
}
NO_ANCHOR = {"id": "b", "spec": {**good()["spec"], "selector": {"methods": ["GET"]}}}
BODILESS = loop(similarity="canonical", body="ignore")
DAYS = [
    spec(rules=[rule("token_bucket_llm", tokens_per_minute=9_000, tokens_per_day=day)])
    for day in (None, 0)
]
INFINITE = json.dumps(bundle(DAYS[0], DAYS[1] | {"id": "q"})).replace(
    '"tokens_per_day": 0', '"tokens_per_day": 1e999'
)
LOOP, SAME_NAME = "/spec/loop_detection", "duplicate name…"


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (entries({}, {}), [(f"{LOOP}/1", SAME_NAME)]),
        (entries({"name": "tail"}, TAIL), [(f"{LOOP}/1", SAME_NAME)]),
        (
            entries({}, TAIL, {"name": "x"}, CALLS | {"name": "x", "enabled": False}),
            [(f"{LOOP}/3", SAME_NAME)],
        ),
        (
            spec(loop_detection=[5, *entries({}, {})["spec"]["loop_detection"]]),
            [(f"{LOOP}/0", "…"), (f"{LOOP}/2", SAME_NAME)],
        ),
        (loop(**CALLS, tools={"": {}}), [(f"{LOOP}/tools/", "it must not be empty…")]),
        (
            loop(**CALLS, tools={"f": {"threshold": None, "window_calls": 2}}),
            [never(f"{LOOP}/tools/f", 3, 2)],
        ),
        (
            loop(**CALLS, tools={"f": {"threshold": 11, "window_calls": None}}),
            [never(f"{LOOP}/tools/f", 11, 10)],
        ),
        *(
            (loop(**{key: 1}), [(f"{LOOP}/{key}", "unknown key…")])
            for key in ("(object)", "(list)", "[key]")
        ),
        *(
            (loop(**CALLS, tools={key: 5}), [(f"{LOOP}/tools/{key}", "…")])
            for key in ("(object)", "(list)", "[key]")
        ),
        (
            spec(selector=MANY),
            [
                (
                    "/spec/selector",
                    (
                        "apis, hosts, methods and routes make 10100 combinations, and at most "
                        "10000 "
                        "are allowed; split…"
                    ),
                )
            ],
        ),
        (INFINITE.encode(), [("/policies/1/spec/rules/0/algorithm_config/tokens_per_day", "…")]),
        (
            [good(), NO_ANCHOR, BODILESS | {"id": "w"}, BODILESS | {"id": "v"}],
            [
                ("/1/spec/selector", "…"),
                ("/2/spec/loop_detection/body", "…"),
                ("/3/spec/loop_detection/body", "…"),
            ],
        ),
    ],
)
def test_errors_point_to_their_places(document: object, expected: Errors) -> None:
    found = plain(refused(document))

    assert [place for place, _ in found] == [place for place, _ in expected]
    assert all(
        fits(message, wanted) for (_, message), (_, wanted) in zip(found, expected, strict=True)
    ), found


@pytest.mark.parametrize(("document", "expected"), DOCUMENTS)
def test_each_rule_of_a_document_is_checked(document: object, expected: Errors) -> None:
    errors = refused(document)

    assert right(errors) == expected


def test_every_error_of_every_file_is_reported_at_once() -> None:
    first = bundle(
        loop(action="x", window_seconds=0), {**spec(mode="y"), "id": 1}, bundle_version=0
    )

    errors = refused(first, b"{", good("ok"), spec(selector={}), [good("c"), good("ok")])

    assert [str(error) for error in errors] == [
        "0: /bundle_version: bundle_version must be greater than 0, not 0",
        (
            "0: /policies/0/spec/loop_detection/window_seconds: window_seconds must be a positive "
            "integer, not 0"
        ),
        (
            "0: /policies/0/spec/loop_detection/action: action must be one of reject, land, "
            "throttle, "
            "steer, warn, not 'x'"
        ),
        "0: /policies/1/id: id must be a string, not 1",
        "0: /policies/1/spec/mode: mode must be one of enforce, shadow, not 'y'",
        "1: /: is not JSON: Expecting property name enclosed in double quotes at line 1, column 2",
        (
            "3: /spec/selector: selector needs at least one of apis, pathExact, pathPrefix and "
            "routes, but has nothing"
        ),
        "3: /id: duplicate id 'p', also at 0 /policies/0/id; ids are unique across all files",
        "4: /1/id: duplicate id 'ok', also at 2 /id; ids are unique across all files",
    ]


def test_repeated_key_is_found_at_any_depth() -> None:
    errors = refused(b"[" * 900 + b'{"a": 1, "a": 2}' + b"]" * 900)

    assert ("/0" * 900 + "/a", TWICE) in plain(errors)


@pytest.mark.parametrize(
    "document",
    [
        bundle(good()),
        good(),
        [good()],
        b"\xef\xbb\xbf" + json.dumps(good()).encode(),
        bundle(
            spec(rules=[], circuit_breaker={"enabled": False}), kill_switches=[]
        ),  # nothing that is missing
        *(
            {"$schema": name, **good()}
            for name in ("./loopguard.schema.json", "https://json-schema.org/draft/2020-12/schema")
        ),
        {"$schema": "./loopguard.schema.json", **bundle(good())},
    ],
)
def test_file_is_a_bundle_a_policy_or_a_list(document: object) -> None:
    """A byte order mark and `$schema` are allowed."""
    loaded = check(document)
    assert isinstance(document, bytes) or SCHEMA.is_valid(document)

    (source,) = loaded.sources
    assert [item.id for item in source.policies] == ["p"]
    assert source.bundle_version == (
        1 if isinstance(document, dict) and "policies" in document else None
    )
    assert (loaded.warnings, loaded.unenforced) == ((), ())


def test_description_and_x_keys_are_allowed_everywhere() -> None:
    note = {"description": ["any", None], "x-owner": {"team": 1}, "x-": 0}
    selector = {"pathExact": "/a", **note}
    detection = {"enabled": True, "window_seconds": 1, "threshold_identical_requests": 2, **note}
    rules = [RULE | note]
    item = {
        "id": "p",
        "spec": {
            "selector": selector,
            "limit_keys": ["jwt:a"],
            "loop_detection": detection,
            "rules": rules,
            **note,
        },
    }

    loaded = check(bundle(item | note, global_shadow={"enabled": False, **note}, **note))

    assert loaded.sources[0].policies[0].spec.selector.pathExact == "/a"
    assert plain(loaded.warnings) == [
        ("/policies/0/spec/rules/0", "no limit_keys: all callers share the budget of the rule r")
    ]


def test_drop_in_bundle_loads_and_names_unenforced_parts() -> None:
    rule = {
        "name": "per-org",
        "limit_keys": ["jwt:org_id", "ua:bot"],
        "algorithm": "token_bucket",
        "algorithm_config": {"tokens_per_second": 10, "burst": 20},
        "match": {"jwt:plan": "free"},
    }
    item = spec(
        limit_keys=["ip:country", "header:X-Key"],
        rules=[rule],
        fallback_limit=rule | {"name": "rest", "match": {"ip:asn": 64496}},
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
    instead = "use ip:address or a header that your proxy sets, such as header:x-country"
    idle = f"cannot be derived by Loopguard, so the rule {{}} never applies; {instead}"
    assert plain(loaded.unenforced) == [
        (f"{here}/limit_keys/0", f"the descriptor ip:country {left_out}"),
        (f"{here}/ramp_by/0", f"the descriptor ip:tor {left_out}"),
        (f"{here}/session/keys/1", f"the descriptor ip:asn {left_out}"),
        (f"{here}/rules/0/limit_keys/1", f"the descriptor ua:bot {idle.format('per-org')}"),
        (f"{here}/fallback_limit/limit_keys/1", f"the descriptor ua:bot {idle.format('rest')}"),
        (f"{here}/fallback_limit/match/ip:asn", f"the descriptor ip:asn {idle.format('rest')}"),
    ]
    assert loaded.warnings == ()
    assert loaded.sources[0].policies[0].spec.all_limit_keys() == [
        "ip:country",
        "header:x-key",
        "jwt:org_id",
        "ua:bot",
    ]


SHARED = "no limit_keys: all callers of policy p share its counts"
OFF = 'not enabled, so it does nothing: set "enabled" to true, or to false if that is intended'
COUNTED = {"enabled": True, "threshold_identical_requests": 3}
UNKNOWN_METHODS = {
    **dict.fromkeys(("*", "any", "ALL"), "leave methods out to match any"),
    **dict.fromkeys(("POSTT", "psot"), "did you mean POST?"),
    **dict.fromkeys(("GET|POST", "FROB"), "no HTTP method known"),
}
BACK_TO_BACK = {"name": "back", "window_type": "back_to_back", "window_seconds": ...}
STAND_IN = {"name": "log", "window_type": "sliding_log", "only_without_entries": True}
IDLE = "loop_detection is not enabled: policy p does nothing"


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (spec(limit_keys=[]), [("/spec", SHARED)]),
        (spec(limit_keys=["ip:country"]), [("/spec", SHARED)]),
        (spec(limit_keys=[], rules=[RULE | {"limit_keys": ["jwt:a"]}]), []),
        (
            spec(
                rules=[RULE],
                circuit_breaker={"spend_rate_threshold_per_minute": 1},
                loop_detection=None,
            ),
            [
                ("/spec/circuit_breaker", OFF),
                ("/spec/rules/0", "no limit_keys: all callers share the budget of the rule r"),
            ],
        ),
        (
            spec(
                rules=[
                    {
                        "name": "r",
                        "limit_keys": ["jwt:a"],
                        "algorithm": "cost_based",
                        "algorithm_config": {
                            "budget": 1,
                            "period": "5m",
                            "cost_key": "header:X-Cost",
                            "staged_actions": [{"threshold_percent": 100, "action": "reject"}],
                        },
                    }
                ]
            ),
            [
                (
                    "/spec/rules/0/algorithm_config/cost_key",
                    (
                        "header:X-Cost is the client's choice, so a client can choose what a "
                        "request costs; let a proxy set "
                        "it, and remove it from clients' requests"
                    ),
                )
            ],
        ),
        (
            spec(
                rules=[
                    rule(
                        "token_bucket",
                        "a",
                        rps=1,
                        burst=2,
                        cost_source="header:x-cost",
                        fixed_cost=2,
                    ),
                    rule("token_bucket_llm", "b", tokens_per_minute=9_000, tokens_per_day=8_000),
                    rule("token_bucket", "c", rps=1, burst=2, default_cost=2),
                ]
            ),
            [
                (
                    "/spec/rules/0/algorithm_config/fixed_cost",
                    "fixed_cost is ignored, because requests cost header:x-cost",
                ),
                (
                    "/spec/rules/0/algorithm_config/cost_source",
                    (
                        "header:x-cost is the client's choice, so a client can choose what a "
                        "request costs; let a proxy set "
                        "it, and remove it from clients' requests"
                    ),
                ),
                (
                    "/spec/rules/1/algorithm_config/tokens_per_day",
                    (
                        "tokens_per_day is below tokens_per_minute, 9000: a day allows less than a "
                        "minute"
                    ),
                ),
                (
                    "/spec/rules/2/algorithm_config/default_cost",
                    "default_cost is ignored, because requests cost fixed",
                ),
            ],
        ),
        (
            spec(
                rules=[
                    rule("token_bucket_llm", "a", tokens_per_minute=1_500),
                    rule(
                        "token_bucket_llm",
                        "b",
                        tokens_per_minute=1_500,
                        burst_tokens=5_000,
                        tokens_per_day=1_999,
                    ),
                    rule(
                        "token_bucket_llm", "c", tokens_per_minute=1_500, default_max_completion=750
                    ),
                    rule(
                        "token_bucket_llm", "d", tokens_per_minute=1_500, max_completion_tokens=750
                    ),
                    rule(
                        "cost_based",
                        "e",
                        budget=800,
                        period="1h",
                        cost_key="usage:output",
                        staged_actions=REJECT,
                    ),
                    rule(
                        "cost_based",
                        "f",
                        budget=800,
                        period="1h",
                        cost_key="usage:input",
                        staged_actions=REJECT,
                    ),
                ]
            ),
            [
                (
                    "/spec/rules/0/algorithm_config/default_max_completion",
                    (
                        "a request without max_tokens reserves 1000 of 1500 tokens for its "
                        "answer, and is refused while less "
                        "is left; lower default_max_completion"
                    ),
                ),
                (
                    "/spec/rules/1/algorithm_config/default_max_completion",
                    (
                        "a request without max_tokens reserves 1000 of 1999 tokens for its "
                        "answer, and is refused while less "
                        "is left; lower default_max_completion"
                    ),
                ),
                (
                    "/spec/rules/4/algorithm_config/budget",
                    (
                        "a request without max_tokens reserves 800 of 800 tokens for its answer, "
                        "and is refused while less "
                        "is left; raise it, or have clients send max_tokens"
                    ),
                ),
            ],
        ),
        (spec(loop_detection=None), [("/spec", IDLE)]),
        (loop(enabled=False, window_seconds=...), [("/spec", IDLE)]),
        (loop(enabled=...), [("/spec", IDLE), ("/spec/loop_detection", OFF)]),
        (spec(loop_detection={}), [("/spec", IDLE)]),
        (
            spec(
                loop_detection=[
                    {"similarity": "turns"},
                    {"similarity": "tail", "enabled": False},
                    {},
                ]
            ),
            [("/spec", IDLE), ("/spec/loop_detection/0", OFF)],
        ),
        (entries({}, {"similarity": "tail", "enabled": ...}), [("/spec/loop_detection/1", OFF)]),
        (bundle(spec(limit_keys=[])), [("/policies/0/spec", SHARED)]),
        (
            spec(selector={"pathExact": "/v1/*/chat", "pathPrefix": "/a b/\u00e9"}),
            [
                (
                    "/spec/selector/pathExact",
                    (
                        "'*' is matched literally; to match everything below, "
                        'use "pathPrefix": "/v1/"'
                    ),
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
                (
                    "/spec/ramp_by",
                    "ramp_by does nothing without enforce_percent: it acts on all callers",
                ),
                (
                    "/spec/ramp_seed",
                    "ramp_seed does nothing without enforce_percent: it acts on all callers",
                ),
            ],
        ),
        (spec(mode="shadow", ramp_by=["jwt:org"], ramp_seed="s", keep_counts=True), []),
        (spec(enforce_percent=1, ramp_by=["jwt:org"], ramp_seed="s", keep_counts=True), []),
        (
            spec(
                enforce_percent=25, limit_keys=["body:/a"], rules=[RULE | {"limit_keys": ["jwt:a"]}]
            ),
            [],
        ),
        (spec(enforce_percent=100, limit_keys=["body:/a"]), []),
        (
            loop(similarity="mcp", action="land"),
            [
                (
                    "/spec/loop_detection",
                    (
                        "land cannot add a note to requests without a conversation: they continue "
                        "with a warning"
                    ),
                )
            ],
        ),
        (
            loop(action="steer", escalate={"land": 5, "reject": 7}, body="ignore"),
            [
                (
                    "/spec/loop_detection",
                    (
                        "steer and land cannot add a note to requests whose body is not read: they "
                        "continue with a warning"
                    ),
                )
            ],
        ),
        (
            loop(
                action="warn",
                steer_note="Stop.",
                steer_share=50,
                max_delay_ms=5,
                reject_status=400,
                refuse_as="completion",
            ),
            [
                (
                    "/spec/loop_detection/steer_note",
                    "steer_note does nothing without the action steer or land",
                ),
                (
                    "/spec/loop_detection/steer_share",
                    "steer_share does nothing without the action steer",
                ),
                (
                    "/spec/loop_detection/max_delay_ms",
                    "max_delay_ms does nothing without the action throttle",
                ),
                (
                    "/spec/loop_detection/reject_status",
                    "reject_status does nothing without the action throttle or reject",
                ),
                (
                    "/spec/loop_detection/refuse_as",
                    "refuse_as does nothing without the action throttle or reject",
                ),
            ],
        ),
        (loop(action="warn", escalate={"throttle": 6}, max_delay_ms=5, reject_status=400), []),
        *(
            (
                spec(selector={"pathPrefix": "/", "methods": ["GET", method]}),
                [("/spec/selector/methods/1", f"…{told}…")],
            )
            for method, told in UNKNOWN_METHODS.items()
        ),
        (
            spec(
                selector={
                    "pathPrefix": "/",
                    "methods": ["post", "QUERY", "PROPFIND", "PURGE", "M-SEARCH", "CONNECT"],
                }
            ),
            [],
        ),
        (
            spec(bypass=[{"methods": ["ANY"]}, {"pathPrefix": "/health*"}]),
            [("/spec/bypass/0/methods/0", "…"), ("/spec/bypass/1/pathPrefix", "…")],
        ),
        (
            spec(
                selector={"pathPrefix": "/", "routes": ["*", "httproute/a/b/rule/0/match/0/*"]}
            ),  # as Envoy Gateway names them
            [
                (
                    "/spec/selector/routes/0",
                    "'*' is matched literally; leave routes out to match any",
                )
            ],
        ),
        (
            spec(selector={"apis": ["anthropic"], "pathExact": "/v1/responses"}),
            [("/spec/selector/pathExact", "is no path of these apis,…")],
        ),
        (spec(selector={"apis": "any", "pathExact": "/v1/responses"}), []),
        (entries(BACK_TO_BACK, STAND_IN), []),
        (
            loop(window_type="back_to_back"),
            [("/spec/loop_detection/window_type", "back_to_back counts nothing while…")],
        ),
        *(
            (
                entries({}, entry),
                [("/spec/loop_detection/1/only_without_entries", "has no effect without another…")],
            )
            for entry in (STAND_IN, BACK_TO_BACK | {"only_without_entries": True})
        ),
        (spec(limit_keys=[], loop_detection={**COUNTED, **CALLS}), []),
        (
            spec(limit_keys=[], loop_detection={**COUNTED, "cooldown_seconds": 9, **CALLS}),
            [("/spec", SHARED)],
        ),
        (bundle(), [("/policies", "has no policies: nothing is guarded")]),
        ([], [("", "has no policies: nothing is guarded")]),
    ],
)
def test_valid_but_doubtful_settings_are_warnings(document: object, expected: Errors) -> None:
    found = plain(check(document).warnings)

    assert [place for place, _ in found] == [place for place, _ in expected]
    assert all(
        fits(message, wanted) for (_, message), (_, wanted) in zip(found, expected, strict=True)
    ), found


TOKENS = {
    "name": "t",
    "algorithm": "token_bucket_llm",
    "algorithm_config": {"tokens_per_minute": 9},
    "limit_keys": ["ip:address"],
}


@pytest.mark.parametrize(
    ("document", "places"),
    [
        (good(), ["/spec"]),
        (spec(limit_keys=["ip:address"]), []),
        (spec(limit_keys=["header:x-user-id", "ip:address"]), ["/spec/limit_keys"]),
        (spec(limit_keys=["header:x-user-id", "ip:address"], missing_descriptor="skip"), []),
        (spec(session={}, session_limits={"max_steps": 9}), ["/spec/session_limits", "/spec"]),
        (
            spec(
                loop_detection=None,
                limit_keys=["header:a", "ip:address"],
                rules=[RULE | {"limit_keys": ["ip:address"]}],
            ),
            [],
        ),
        (
            spec(loop_detection=None, rules=[RULE | {"limit_keys": ["header:a"]}]),
            ["/spec/rules/0/limit_keys"],
        ),
        (
            spec(
                loop_detection=None,
                rules=[RULE | {"limit_keys": ["header:a"]}],
                uncountable="reject",
            ),
            [],
        ),
        (spec(loop_detection=None, rules=[TOKENS]), ["/spec/rules/0/algorithm_config"]),
    ],
)
def test_consequences_of_defaults_are_notes(document: object, places: list[str]) -> None:
    notes = plain(check(document).notes)

    assert [place for place, message in notes if "reject_status" not in message] == places


@pytest.mark.parametrize(
    "document",
    [
        good(),
        spec(limit_keys=[]),
        spec(loop_detection=None),
        spec(session={}),
        spec(selector={"pathExact": "/a*"}),
        loop(enabled=...),
        loop(similarity="turns"),
        spec(limit_keys=["header:authorization"]),
        spec(limit_keys=["ip:address", "jwt:a"]),
    ],
)
def test_policies_of_one_shape_get_equal_warnings(document: dict[str, Any]) -> None:
    """A warning about many policies that differ only in id and selector names each of them."""
    several = [{**document, "id": name} for name in "pqr"]
    several.append({"id": "s", "spec": {**document["spec"], "selector": {"pathPrefix": "/b/*"}}})

    together, alone = check(several), [check(one) for one in several]

    assert plain(together.warnings) == [
        (f"/{number}{place}", message)
        for number, one in enumerate(alone)
        for place, message in plain(one.warnings)
    ]
    notes = [
        (f"/0{place}", f"{message} (and {len(several) - 1} more)")
        for place, message in plain(alone[0].notes)
    ]
    assert plain(together.notes) == notes


def test_expiry_of_a_bundle_is_read_in_any_zone() -> None:
    loaded = check(bundle(good(), expires_at="2026-06-01T02:00:01+02:00", issued_at=PAST))

    assert loaded.sources[0].expires_at == datetime(2026, 6, 1, 0, 0, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("changes", "noted"),
    [
        ({"similarity": "turns"}, True),
        ({"similarity": "turns", "action": "steer", "escalate": {"reject": 5}}, True),
        ({"similarity": "turns", "action": "steer"}, False),
        ({"similarity": "turns", "reject_status": 429}, False),
        ({"similarity": "exact"}, False),
    ],
)
def test_final_refusal_with_default_status_is_a_note(changes: dict[str, Any], noted: bool) -> None:
    messages = [note.message for note in check(loop(**changes)).notes]

    assert any("reject_status is not set" in message for message in messages) == noted


@pytest.mark.parametrize(
    ("override", "shadowed"),
    [
        (None, (False, False)),
        ({"enabled": False, "expires_at": PAST}, (False, False)),
        ({"enabled": True}, (True, True)),
        ({"enabled": True, "expires_at": FUTURE, "reason": "x" * 256}, (True, False)),
    ],
)
def test_global_shadow_holds_until_it_expires(
    override: object, shadowed: tuple[bool, bool]
) -> None:
    """`global_shadow` covers its file up to, and not including, its end."""
    (source,) = check(bundle(good(), global_shadow=override)).sources

    assert (
        source.forces_shadow(NOW),
        source.forces_shadow(datetime.fromisoformat(FUTURE)),
    ) == shadowed


def test_selectors_and_keys_are_normalised() -> None:
    selector = {
        "pathPrefix": "//v1/./%7euser/a b/{x}%2f",
        "methods": ["post", "GET"],
        "hosts": ["API.Example.com.:8443", "[2001:DB8::1]:80"],
    }

    loaded = check(
        spec(selector=selector, limit_keys=["Header:X-User-ID", "jwt:Org", "query:Q", "ip:address"])
    )

    made = loaded.sources[0].policies[0].spec
    assert made.selector.pathPrefix == "/v1/~user/a%20b/%7Bx%7D%2F"
    assert made.selector.methods == ["POST", "GET"]
    assert made.selector.hosts == ["api.example.com", "[2001:db8::1]"]
    assert made.limit_keys == ["header:x-user-id", "jwt:Org", "query:Q", "ip:address"]


def write(root: Path, files: Mapping[str, object]) -> None:
    for name, content in files.items():
        place = root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            place.symlink_to(content)
        else:
            place.write_bytes(
                content if isinstance(content, bytes) else json.dumps(content).encode()
            )


NUMBERED = [f"p{number}" for number in range(11, 31)]
SKIPPED = dict.fromkeys(
    (".git/x.json", ".hidden.json", "a.json.bak", "README.md", "x/.y/z.json"), b"broken"
)
FOLDER = {f"{name}.json": good(name) for name in reversed(NUMBERED)} | {
    "x/y/c.json": good("c"),
    "d.json/e.json": good("e"),
}


@pytest.mark.parametrize(
    ("files", "paths", "ids"),
    [
        (FOLDER | SKIPPED, [""], ["e", *NUMBERED, "c"]),
        ({"sub/p.json": good(), "sub/again": Path("..")}, [""], ["p"]),
        ({"p.json": good(), "q.json": good("q")}, ["", "p.json"], ["p", "q"]),
    ],
    ids=["all the way down", "a link that leads back up", "a file given twice"],
)
def test_directories_are_read_once_and_in_order(
    files: Mapping[str, object], paths: list[str], ids: list[str], tmp_path: Path
) -> None:
    write(tmp_path, files)

    sources = load([str(tmp_path / path) for path in paths], NOW).sources

    assert [item.id for source in sources for item in source.policies] == ids


def test_every_path_that_cannot_be_read_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        tmp_path,
        {
            "locked.json": good("x"),
            "bad.json": b"{",
            "links/dangling.json": Path("nowhere"),
            "empty/.p.json": good(),
        },
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
    names = [
        "missing.json",
        "locked.json",
        "bad.json",
        "links",
        "empty",
        "barred",
        "fifo.json",
        "large.json",
    ]
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
        (
            "bad.json: /: is not JSON: Expecting property name enclosed in double quotes at line "
            "1, "
            "column 2"
        ),
    ]


def test_schema_is_closed_and_complete() -> None:
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
    assert [name for name, kind in kinds.items() if kind["additionalProperties"] is not False] == []
    assert all("^x-" in kind["patternProperties"] for kind in kinds.values())
    assert kinds["Bundle"]["required"] == ["bundle_version", "policies"]
    assert kinds["Policy"]["properties"]["id"]["pattern"] == "^[A-Za-z0-9_.-]{1,128}$"
    assert detection["properties"]["action"]["enum"] == [
        "reject",
        "land",
        "throttle",
        "steer",
        "warn",
    ]
    assert {"exclusiveMinimum": 0, "maximum": 31_536_000, "type": "integer"} in detection[
        "properties"
    ]["window_seconds"]["anyOf"]


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
def test_schema_accepts_what_loads(document: object) -> None:
    check(document)

    assert SCHEMA.is_valid(document)


_BETWEEN_FIELDS = re.compile(
    r"belongs to similarity|is required$|never reached|must not be \w+ with|with similarity "
    r"turns|with window_type"
    r"|but body is ignore|is already the action|is milder than|must have a higher threshold|>= "
    r"threshold_identical"
)
REFUSED_FIELDS = [
    changes
    for changes, expected in ENTRIES
    if not all(_BETWEEN_FIELDS.search(message) for _, message in expected)
    and "a\n" not in changes.values()  # where Python's `$` differs from that of JSON Schema
    and not any(
        isinstance(value, float) and value.is_integer() for value in changes.values()
    )  # an integer to JSON Schema
]
REFUSED_SHAPES: list[dict[str, object]] = [
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
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "document",
    [
        *(loop(**changes) for changes in REFUSED_FIELDS),
        *(entries({"name": "other"}, changes) for changes in REFUSED_FIELDS[:5]),
        *(spec(**changes) for changes in REFUSED_SHAPES),
    ],
)
def test_schema_rejects_what_does_not_load(document: dict[str, Any]) -> None:
    refused(document)

    assert not SCHEMA.is_valid(document)
