"""Canaries: a shadow policy is compared request by request, merged between replicas, and judged."""

import asyncio
import json
import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from extproc.engine.ramp import Ramp
from extproc.errors import BundleErrors, LoopguardError, StoreError
from extproc.ext_proc.service import Service
from extproc.metrics import Metrics
from extproc.operator.canary.pairs import SHOWN, Disagreements, Pair
from extproc.operator.canary.report import describe_canaries
from extproc.operator.canary.sharing import Sharing
from extproc.operator.canary.states import (
    State,
    decode_state,
    encode_state,
    merge_states,
    read_state,
)
from extproc.operator.canary.verdict import (
    KEEP_WATCHING,
    SAFE,
    TOO_STRICT,
    Evidence,
    Rules,
    find_bounds,
    judge,
)
from extproc.operator.sketch import SIZE, Sketch
from extproc.options import read_options
from extproc.policy.loader import parse
from extproc.policy.pairings import MAX_PAIRINGS
from extproc.request.fingerprint import hash_tenant
from extproc.request.http import HttpRequest, compile_descriptors
from extproc.store.memory import MemoryStore
from extproc.store.rules.documents import BOARDS, MAX_DOCUMENT
from tests.support.documents import bundle, policy
from tests.support.engine import ANY, NOW, make_engine
from tests.support.messages import body, headers
from tests.support.service import FailingStore, decoded, exchange, make_service

USER: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}
LIVE = policy("live", ANY, threshold_identical_requests=4, **USER)


# Kinds of disagreements that a pair has room for.
KEPT = 64


def shadow(name: str = "strict", **more: object) -> dict[str, Any]:
    """A shadow policy for the same requests, which by default refuses the second of them."""
    return policy(name, ANY, mode="shadow", **{"threshold_identical_requests": 2, **USER, **more})


def send(
    service: Service,
    times: int = 1,
    *,
    path: str = "/v1",
    user: str = "ann",
    **more: Any,  # noqa: ANN401  # as `headers`
) -> list[int]:
    """Equal requests; the status of each answer, 0 if it was let through."""
    request = headers(path, x_user_id=user, **more)
    return [
        decoded(exchange(service, request, body(b"{}"))[-1]).immediate_response.status.code
        for _ in range(times)
    ]


def pair_of(service: Service) -> Pair:
    (pair,) = service.pairs.list_pairs()
    return pair


def state_of(service: Service) -> State:
    return read_state(pair_of(service), 1_700_000_000.0)


def counts_of(service: Service) -> dict[str, int]:
    return {name: count for name, count in state_of(service).counts.items() if count}


# --- Which policies are compared


# Policies, and which of them are compared.
PAIRINGS: dict[str, tuple[list[dict[str, Any]], list[tuple[str, str]]]] = {
    "named": ([LIVE, policy("other", ANY), shadow(canary_of="live")], [("live", "strict")]),
    "named, with a selector of its own": (
        [LIVE, policy("s", {"pathExact": "/x"}, mode="shadow", canary_of="live")],
        [("live", "s")],
    ),
    "the same selector": (
        [LIVE, shadow(), shadow("loose")],
        [("live", "strict"), ("live", "loose")],
    ),
    "lists in another order": (
        [
            policy("live", {"pathExact": "/", "methods": ["POST", "PUT"]}),
            policy("s", {"methods": ["PUT", "POST"], "pathExact": "/"}, mode="shadow"),
        ],
        [("live", "s")],
    ),
    "another selector": ([LIVE, policy("s", {"pathExact": "/x"}, mode="shadow")], []),
    "two with the same selector": ([LIVE, policy("other", ANY), shadow()], []),
    "one that acts on a share": (
        [
            LIVE,
            policy("e", ANY, canary_of="live", enforce_percent=99, **USER),
            policy("f", ANY, enforce_percent=1, **USER),
        ],
        [("live", "e")],
    ),
    "no live": ([shadow()], []),
    "no shadow": ([LIVE], []),
    "a live that does nothing": (
        [policy("live", ANY, enabled=False), shadow(canary_of="live")],
        [],
    ),
    "more than are compared": (
        [LIVE, *(shadow(f"s{number}") for number in range(MAX_PAIRINGS + 1))],
        [("live", f"s{number}") for number in range(MAX_PAIRINGS)],
    ),
}


@pytest.mark.parametrize(("policies", "expected"), PAIRINGS.values(), ids=PAIRINGS)
def test_candidate_is_paired_with_the_named_or_only_policy(
    policies: list[dict[str, Any]], expected: list[tuple[str, str]]
) -> None:
    assert [
        (pairing.live, pairing.candidate) for pairing in make_engine(*policies).pairings
    ] == expected


# Policies that cannot be compared, the place of the first error, and a part of its message.
REFUSED: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    "unknown": (
        [LIVE, shadow(canary_of="lvie")],
        "/policies/1/spec/canary_of",
        "there is no 'lvie'; did you mean 'live'?",
    ),
    "itself": ([LIVE, shadow(canary_of="strict")], "/policies/1/spec/canary_of", "not this one"),
    "another shadow": (
        [LIVE, shadow("a", canary_of="strict"), shadow()],
        "/policies/1/spec/canary_of",
        "'strict' is in shadow mode",
    ),
    "one that acts": (
        [LIVE, policy("e", ANY, canary_of="live")],
        "/policies/1/spec/canary_of",
        "belongs to a policy with mode shadow",
    ),
    "one that acts on all callers": (
        [LIVE, policy("e", ANY, canary_of="live", enforce_percent=100)],
        "/policies/1/spec/canary_of",
        (
            "belongs to a policy with mode shadow, or with an enforce_percent below 100; this one "
            "acts on all callers"
        ),
    ),
    "unknown, for a share": (
        [LIVE, policy("e", ANY, canary_of="lvie", enforce_percent=99, **USER)],
        "/policies/1/spec/canary_of",
        "there is no 'lvie'; did you mean 'live'?",
    ),
    "no id": ([LIVE, shadow(canary_of="a b")], "/policies/1/spec/canary_of", "not 'a b'"),
}


@pytest.mark.parametrize(("policies", "pointer", "message"), REFUSED.values(), ids=REFUSED)
def test_invalid_canary_of_is_an_error(
    policies: list[dict[str, Any]], pointer: str, message: str
) -> None:
    with pytest.raises(BundleErrors) as raised:
        parse({"bundle.json": json.dumps(bundle(*policies)).encode()}, NOW)

    assert raised.value.errors[0].pointer == pointer
    assert message in raised.value.errors[0].message


def test_pairs_are_found_across_files() -> None:
    candidate = json.dumps(shadow(canary_of="live")).encode()

    assert len(parse({"a.json": candidate, "b.json": json.dumps(LIVE).encode()}, NOW).sources) == 2
    assert (
        parse({"route": candidate}, NOW, on_route=True).sources[0].policies[0].spec.canary_of
        == "live"
    )


# --- What is compared


def test_callers_in_the_enforced_share_are_not_compared() -> None:
    ramped = policy(
        "strict", ANY, canary_of="live", enforce_percent=50, threshold_identical_requests=2, **USER
    )
    ramp = Ramp(50, compile_descriptors(USER["limit_keys"]), "strict")
    places = {
        name: ramp.find_place(HttpRequest("GET", "/", "", {"x-user-id": name.encode()}))
        for name in "abcdefgh"
    }
    insider, outsider = (
        min(places, key=lambda name: places[name]),
        max(places, key=lambda name: places[name]),
    )
    service = make_service(LIVE, ramped)

    assert send(service, 5, user=insider) == [0, 429, 429, 429, 429]
    assert counts_of(service) == {}
    assert send(service, 5, user=outsider) == [0, 0, 0, 429, 429]
    assert counts_of(service) == {
        "neither": 1,
        "only_candidate": 2,
        "both": 2,
        "extra": 2,
        "already": 2,
        "refused": 2,
    }


REJECT_SECOND: dict[str, Any] = {"threshold_identical_requests": 2, **USER}
BY_HEAD: dict[str, Any] = {"body": "ignore", "threshold_identical_requests": 2, **USER}
# Policies, the number of equal requests, and what is counted.
COMPARED: dict[str, tuple[list[dict[str, Any]], int, dict[str, int]]] = {
    "what live refuses is told apart from what would be new": (
        [LIVE, shadow()],
        5,
        {"neither": 1, "only_candidate": 2, "both": 2, "extra": 2, "already": 2, "refused": 2},
    ),
    "what live does not count it lets through": (
        [policy("live", {"pathExact": "/elsewhere"}), shadow(canary_of="live")],
        2,
        {"neither": 1, "only_candidate": 1, "extra": 1},
    ),
    "what the candidate does not count is not compared": (
        [LIVE, policy("s", {"pathExact": "/elsewhere"}, mode="shadow", canary_of="live", **USER)],
        2,
        {"uncompared": 2},
    ),
    "nor is a body that live refuses to wait for": (
        [policy("live", ANY, **BY_HEAD), shadow()],
        3,
        {"neither": 1, "uncompared": 2},
    ),
    "a milder candidate misses refusals": (
        [policy("live", ANY, **REJECT_SECOND), shadow(threshold_identical_requests=4)],
        5,
        {"neither": 1, "only_live": 2, "both": 2, "missed": 2, "already": 2, "refused": 4},
    ),
    "a warning of the live policy is no refusal": (
        [policy("live", ANY, action="warn", **REJECT_SECOND), shadow()],
        3,
        {"neither": 1, "both": 2, "extra": 2},
    ),
    "a candidate that warns refuses nothing": (
        [LIVE, shadow(action="warn")],
        3,
        {"neither": 1, "only_candidate": 2},
    ),
    "what another policy refuses is no extra refusal": (
        [LIVE, shadow(), policy("other", {"pathPrefix": "/v1"}, **REJECT_SECOND)],
        2,
        {"neither": 1, "only_candidate": 1, "already": 1, "refused": 1},
    ),
}


@pytest.mark.parametrize(("policies", "times", "expected"), COMPARED.values(), ids=COMPARED)
def test_disagreements_are_counted_by_kind(
    policies: list[dict[str, Any]], times: int, expected: dict[str, int]
) -> None:
    service = make_service(*policies)

    send(service, times)

    assert counts_of(service) == expected


@pytest.mark.parametrize("later", [False, True])
def test_verdicts_on_headers_and_body_are_compared(*, later: bool) -> None:
    service = make_service(
        policy("live", ANY, action="warn", **BY_HEAD),
        shadow(),
        store=FailingStore("never", later=later),
    )
    send(service, 3)

    assert counts_of(service) == {"neither": 1, "both": 2, "extra": 2}


def test_reload_keeps_counts_of_unchanged_policies() -> None:
    service = make_service(LIVE, shadow())
    send(service, 2)

    service.follow(make_engine(policy("new", {"pathExact": "/new"}), LIVE, shadow()))
    kept = counts_of(service)
    service.follow(make_engine(LIVE, shadow(threshold_identical_requests=3)))

    assert kept == {"neither": 1, "only_candidate": 1, "extra": 1}
    assert counts_of(service) == {}


def test_metrics_have_the_counts_from_the_start() -> None:
    service = make_service(LIVE, shadow())

    def read(name: str, **labels: str) -> float | None:
        own = {"policy": "strict", "canary_of": "live", **labels}
        return service.metrics.registry.get_sample_value(f"loopguard_canary_{name}_total", own)

    before = read("requests", verdict="both"), read("refusals", refusal="extra"), read("refused")
    send(service, 5)

    assert before == (0, 0, 0)
    assert [
        read("requests", verdict=word)
        for word in ("both", "only_live", "only_candidate", "neither")
    ] == [2, 0, 2, 1]
    assert [read("refusals", refusal=word) for word in ("extra", "already", "missed")] == [2, 2, 0]
    assert read("refused") == 2


@pytest.mark.sources  # compiled classes keep their methods
def test_failed_comparison_is_logged_and_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    service = make_service(LIVE, shadow())
    monkeypatch.setattr(Pair, "compare", None)  # as a bug would

    assert send(service, 4) == [0, 0, 0, 429]
    assert (
        service.metrics.registry.get_sample_value(
            "loopguard_fail_open_total", {"reason": "shadow_error"}
        )
        == 4
    )


# --- What is told of them


def test_examples_of_disagreements_have_no_query_or_body() -> None:
    calls = [
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "c", "function": {"name": "rm_rf", "arguments": '{"a": "SECRET"}'}}
            ],
        }
    ]
    results = [{"role": "tool", "tool_call_id": "c", "content": "SECRET"}]
    document = json.dumps(
        {"messages": [{"role": "user", "content": "SECRET"}, *(calls + results) * 3]}
    ).encode()
    service = make_service(LIVE, shadow(similarity="tool_calls", threshold_identical_requests=3))

    exchange(
        service,
        headers("/v1?token=SECRET", x_user_id="ann", authorization="SECRET"),
        body(document),
    )

    state = state_of(service)
    (entry,) = state.disagreements
    assert (entry.about, entry.method, entry.path, entry.detector, entry.tool) == (
        "extra",
        "POST",
        "/v1",
        "default",
        "rm_rf",
    )
    assert (entry.tenant, entry.count, entry.over) == (hash_tenant("x-user-id=ann"), 1, 0)
    assert b"SECRET" not in encode_state(state)
    call = (
        b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "search", '
        b'"arguments": {}}}'
    )
    one_by_one = make_service(LIVE, shadow(similarity="mcp"))
    for _ in range(2):
        exchange(one_by_one, headers("/mcp", x_user_id="ann"), body(call))
    assert [entry.tool for entry in state_of(one_by_one).disagreements] == ["search"]


def test_client_chosen_text_fits_into_a_board_document() -> None:
    service = make_service(LIVE, shadow())
    for number in range(KEPT + 10):
        send(service, 3, path=f"/{number}" + "\udcff\x01" * 3_000, method="M" * 3_000)

    state = state_of(service)
    assert len(state.disagreements) == SHOWN
    assert len(encode_state(state)) < MAX_DOCUMENT
    assert decode_state(encode_state(state)) == state


@given(st.lists(st.sampled_from([*"abcdefgh", *map(str, range(100))]), max_size=400))
def test_frequent_disagreements_are_kept_with_bounded_error(paths: list[str]) -> None:
    found = Disagreements()
    for path in paths:
        found.add(("extra", "POST", path, "0" * 16, "default", ""))

    shown = {kind[2]: (count, over) for kind, count, over in found.list_most()}
    assert len(found.list_most()) <= SHOWN
    assert all(count - over <= paths.count(path) <= count for path, (count, over) in shown.items())
    frequent = {
        path for path in paths if paths.count(path) > max(len(paths) / SHOWN, len(paths) / KEPT)
    }
    assert frequent <= shown.keys()


# --- Sketches


def _hashes(start: int, count: int) -> list[str]:
    return [hash_tenant(f"user={number}") for number in range(start, start + count)]


@pytest.mark.parametrize("count", [0, 1, 100, SIZE - 1, 1_000, 20_000])
def test_sketch_is_exact_up_to_its_size(count: int) -> None:
    sketch = Sketch([*_hashes(0, count), *_hashes(0, count)])

    assert (sketch.exact, len(sketch.list_kept())) == (count < SIZE, min(count, SIZE))
    assert abs(sketch.count() - count) <= (0 if sketch.exact else 4 * count / math.sqrt(SIZE))


@given(st.integers(0, 1_500), st.integers(0, 1_500), st.integers(0, 1_500))
def test_merged_sketches_equal_the_sketch_of_all(start: int, one: int, other: int) -> None:
    merged = Sketch(
        [*Sketch(_hashes(0, one)).list_kept(), *Sketch(_hashes(start, other)).list_kept()]
    )

    assert merged.list_kept() == sorted({*_hashes(0, one), *_hashes(start, other)})[:SIZE]


# --- Replicas


def test_states_of_replicas_add_up() -> None:
    first, second = make_service(LIVE, shadow()), make_service(LIVE, shadow())
    send(first, 3)
    send(second, 2)
    send(second, 2, user="bob", x_session_id="a")
    pair_of(first).since, pair_of(second).since = 1_000.0, 2_000.0

    merged = merge_states([state_of(first), state_of(second)])

    assert merged.compared == 7
    assert {name: count for name, count in merged.counts.items() if count} == {
        "neither": 3,
        "only_candidate": 4,
        "extra": 4,
    }
    assert merged.since == 1_000.0
    assert {name: merged.read_sketch(name).count() for name in merged.sketches} == {
        "tenants": 2, "refused_tenants": 2, "refused_sessions": 1, "refused_loops": 2,
    }  # fmt: skip
    assert [entry.count for entry in merged.disagreements] == [3, 1]


# States on the board, without the fields that all have, and the counts read; None if invalid.
DOCUMENTS: dict[bytes, dict[str, int] | None] = {
    **dict.fromkeys([b"", b"x", b"[]", b"{}", b'{"live": 1}', b"\xff", b"null"]),
    b'{"later": 1, "counts": {"neither": 7, "later": 1}, "sketches": {}}': {"neither": 7},
}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_document_of_another_version_is_read_or_skipped(
    document: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store, service, counts = (
        MemoryStore(Metrics()),
        make_service(LIVE, shadow()),
        DOCUMENTS[document],
    )
    state = (
        document
        if counts is None
        else json.dumps(json.loads(encode_state(state_of(service))) | json.loads(document)).encode()
    )
    asyncio.run(
        store.documents.put(BOARDS, f"canary:{pair_of(service).pairing.identity}", "odd", state, 60)
    )

    found = asyncio.run(Sharing(service.pairs, store, "one").collect())

    assert [each.compared for each in found.get("odd", ())] == ([] if counts is None else [7])
    assert ("the state of a canary cannot be read" in caplog.text) is (counts is None)


def test_replicas_share_their_counts() -> None:
    store, others = MemoryStore(Metrics()), shadow(threshold_identical_requests=3)
    services = [make_service(LIVE, candidate) for candidate in (shadow(), shadow(), others)]
    sharing = [
        Sharing(service.pairs, store, name)
        for service, name in zip(services, ("one", "other", "new"), strict=True)
    ]
    for number, service in enumerate(services):
        send(service, 2 + number)
        for _ in range(2):  # nothing has changed the second time
            asyncio.run(sharing[number].publish())
    send(services[0], 1)

    known = [asyncio.run(each.collect()) for each in sharing]

    assert [
        {replica: sum(state.compared for state in states) for replica, states in found.items()}
        for found in known
    ] == [
        {"one": 3, "other": 3},
        {"one": 2, "other": 3},
        {"new": 4},
    ]
    assert len(describe_canaries([state_of(services[0]), state_of(services[2])], Rules())) == 2


def test_replica_without_store_reports_its_own_counts(caplog: pytest.LogCaptureFixture) -> None:
    service = make_service(LIVE, shadow())
    sharing = Sharing(
        service.pairs,
        FailingStore(failing="canary", error=StoreError("down", kind="connection")),
        "one",
    )
    send(service, 2)
    asyncio.run(sharing.publish())
    asyncio.run(sharing.publish())

    assert [state.compared for state in asyncio.run(sharing.collect())["one"]] == [2]
    assert caplog.text.count("canary counts cannot be shared") == 1


# --- The verdict


@pytest.mark.parametrize(
    ("part", "whole", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_bounds_are_wilsons(part: int, whole: int, low: float, high: float) -> None:
    """The bounds are those that R.

    G. Newcombe (Statistics in Medicine 17, 1998, table I) has for Wilson's method at 95 %.
    """
    bounds = find_bounds(part, whole)

    assert bounds.share == part / whole
    assert [round(bounds.low, 4), round(bounds.high, 4)] == [low, high]


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.floats(0, 0.999999))
def test_bounds_always_contain_the_share(one: int, other: int, confidence: float) -> None:
    part, whole = sorted((one, other))

    bounds = find_bounds(part, whole, confidence)

    assert (bounds.share is None) == (whole == 0)
    assert 0 <= bounds.low <= (bounds.share if bounds.share is not None else 0.5) + 1e-12
    assert bounds.low <= bounds.high <= 1
    assert bounds.share is None or bounds.share - 1e-12 <= bounds.high


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("min_requests", "-1"),
        ("max_new_refusals", "1"),
        ("max_new_refusals", "nan"),
        ("confidence", "1"),
        ("confidence", "x"),
    ],
)
def test_invalid_rules_are_usage_errors(flag: str, value: str) -> None:
    with pytest.raises(LoopguardError, match=f"--{flag.replace('_', '-')} must be a number"):
        read_options(Rules, {flag: value})


@pytest.mark.parametrize(
    ("seen", "rules", "verdict", "reason"),
    [
        (
            Evidence(0, 100, 0),
            {},
            KEEP_WATCHING,
            "compared 100 of the 1000 requests that a verdict needs",
        ),
        (
            Evidence(40, 100, 20),
            {},
            KEEP_WATCHING,
            "compared 100 of the 1000 requests that a verdict needs",
        ),
        (
            Evidence(0, 3_838, 0),
            {},
            SAFE,
            "it refuses at most 0.100% of the requests that pass today; the limit is 0.100%",
        ),
        (Evidence(0, 3_837, 0), {}, KEEP_WATCHING, "it refuses between 0.000% and 0.100%"),
        (Evidence(40, 10_000, 1), {}, TOO_STRICT, "it refuses at least 0.294%"),
        (
            Evidence(3, 10_000, 3),
            {"max_new_loops": 2},
            TOO_STRICT,
            "it refuses 3 loops that pass today; the limit is 2",
        ),
        (
            Evidence(3, 10_000, 2, 2),
            {"max_new_tenants": 1},
            TOO_STRICT,
            "it refuses 2 tenants that pass today; the limit is 1",
        ),
        (
            Evidence(3, 10_000, 2, 2, 2),
            {"max_new_sessions": 0},
            TOO_STRICT,
            "it refuses 2 sessions that pass today; the limit is 0",
        ),
        (
            Evidence(3, 10_000, 2, 2, 2),
            {"max_new_sessions": 2, "max_new_tenants": 2, "max_new_loops": 2},
            SAFE,
            "it refuses at most",
        ),
    ],
)
def test_verdict_follows_from_counts(
    seen: Evidence, rules: dict[str, Any], verdict: str, reason: str
) -> None:
    found = judge(seen, Rules(**rules))

    assert found.word == verdict
    assert found.reasons[0].startswith(reason)


def test_report_has_verdict_counts_bounds_and_examples() -> None:
    service = make_service(LIVE, shadow())
    (unused,) = describe_canaries([state_of(service)], Rules())
    send(service, 5)

    (canary,) = describe_canaries([state_of(service)], Rules(min_requests=3))

    assert (unused["verdict"], unused["rates"]["new_refusals"]) == (
        KEEP_WATCHING,
        {"share": None, "low": 0.0, "high": 1.0},
    )
    expected: dict[str, object] = {
        "policy": "strict",
        "canary_of": "live",
        "verdict": TOO_STRICT,
        "requests": {
            "compared": 5, "both": 2, "only_live": 0, "only_candidate": 2, "neither": 1,
            "refused": 2, "went_on": 3, "uncompared": 0,
        },
        "refusals": {"new": 2, "already": 2, "missed": 0},
        "new": {"loops": 1, "tenants": 1, "sessions": 0, "of_tenants": 1, "exact": True},
        "summary": "1 new loop: too strict",
        "until": "2023-11-14T22:13:20+00:00",
    }  # fmt: skip
    assert canary | expected == canary
    assert canary["rates"]["new_refusals"]["share"] == pytest.approx(2 / 3)
    assert json.loads(json.dumps(canary, allow_nan=False)) == canary
