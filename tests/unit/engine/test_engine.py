"""Policies applied to requests, without clock, store or socket."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.decision import Action, Outcome, RefusalForm, Repeat
from extproc.detectors import make_similarity
from extproc.detectors.base import format_duration
from extproc.engine.candidates import Candidate
from extproc.engine.engine import Engine
from extproc.engine.evaluation import group_by_policy
from extproc.metrics import Metrics
from extproc.policy.bundle import LoopDetection
from extproc.request.fingerprint import NO_BODY, Body
from extproc.request.http import HttpRequest
from extproc.store.memory import MemoryStore
from extproc.store.rules.windows import Count, Hit
from tests.support.bundles import RULE
from tests.support.documents import policy
from tests.support.engine import ANY, LOOP, NOW, get, keys, make_engine
from tests.support.records import replace


def sealed(engine: Engine, request: HttpRequest, body: Body | None = NO_BODY) -> tuple[list[Candidate], list[Candidate]]:
    """What would be counted, enforcing and shadow."""
    check = engine.prepare(request)
    assert check is not None
    check.read_body(body, "reason")
    return check.enforcing.candidates, check.shadow.candidates


def verdict(engine: Engine, *counts: Count) -> Any:  # noqa: ANN401  # a Decision
    """The decision about a GET / whose policies counted so."""
    check = engine.prepare(get())
    assert check is not None
    check.read_body(NO_BODY)
    acting = len(check.enforcing.candidates)
    return check.decide(counts[:acting], counts[acting:])


EXACT = make_similarity(LoopDetection())
FINE = Count(1, looping=False, cooldown_ms=0, span_ms=0)


@pytest.mark.parametrize("user", ["ann", ""])
def test_the_query_of_a_request_that_is_not_counted_is_not_read(user: str) -> None:
    """A request without its policy's limit keys costs nothing for its query, however many escapes that has."""
    engine = make_engine(policy("p", ANY, limit_keys=["header:x-user"]))
    request = get("/?" + "%41" * 9_000, **({"x_user": user} if user else {}))

    sealed(engine, request)

    assert (request._pairs is not None) is bool(user)


@pytest.mark.parametrize(
    "keys",
    [
        {"limit_keys": ["header:x-user"]},
        {"rules": [RULE | {"limit_keys": ["header:x-user"]}]},
        {"fallback_limit": RULE | {"limit_keys": ["header:x-user"]}},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_callers_count_alone_wherever_the_bundle_names_the_key(keys: dict[str, Any]) -> None:
    """Requests of alice, bob and carol are three counts, by a key of the policy, of a rule or of the fallback limit alike."""
    item = policy("p", ANY)
    item["spec"] |= keys
    engine, store = make_engine(item), MemoryStore(Metrics(), 100)
    reference = make_engine(policy("p", ANY, limit_keys=["header:x-user"]))

    counts = []
    for _ in range(2):
        for user in ("alice", "bob", "carol"):
            candidate = sealed(engine, get(x_user=user))[0][0]  # the budget is behind it
            (expected,), _ = sealed(reference, get(x_user=user))
            counts += [count.count for count in store.hit([hit for hit in [candidate.hit] if isinstance(hit, Hit)], 0)]
            assert candidate.hit == expected.hit

    assert counts == [1, 1, 1, 2, 2, 2]


def test_all_matching_policies_count_for_themselves() -> None:
    """Two policies on one request have keys of their own."""
    live, _ = sealed(make_engine(policy("a", ANY), policy("b", ANY)), get())

    assert len(set(keys(live))) == 2


@pytest.mark.parametrize(
    ("headers", "counting"),
    [
        ({"x_a": "1", "x_b": "2"}, ["one", "skip", "share"]),
        ({"x_a": "1"}, ["one", "share"]),
        ({}, ["share"]),
    ],
)
def test_a_missing_descriptor_is_what_the_policy_says(headers: dict[str, str], counting: list[str]) -> None:
    """By default one of the descriptors is enough, `skip` takes all of them, `share` none; what is missing vanishes."""
    keys = ["header:x-a", "header:x-b"]
    modes = {"one": "require_one", "skip": "skip", "share": "share"}
    engine = make_engine(*(policy(name, ANY, limit_keys=keys, missing_descriptor=mode) for name, mode in modes.items()))
    evaluation = engine.prepare(get(**headers))
    assert evaluation is not None

    evaluation.read_body(NO_BODY)

    composite = "|".join(["GET|/||00000000", *(f"{name.replace('_', '-')}={value}" for name, value in headers.items())])
    assert {item.plan.id: item.composite for item in evaluation.enforcing.candidates} == dict.fromkeys(counting, composite)
    assert evaluation.list_uncounted() == [(name, "missing_descriptor") for name in modes if name not in counting]


def test_a_policy_without_keys_misses_none() -> None:
    """All callers share its counts, which is what it says."""
    live, _ = sealed(make_engine(policy("a", ANY), policy("b", ANY, limit_keys=["ip:country"])), get())

    assert [item.composite for item in live] == ["GET|/||00000000"] * 2


def test_an_unknown_body_is_not_counted_unless_ignored() -> None:
    """Without its body a request is counted only by policies that ignore bodies."""
    check = make_engine(policy("needs", ANY), policy("ignores", ANY, body="ignore")).prepare(get())
    assert check is not None

    check.read_body(None, "grpc")

    assert [item.plan.id for item in check.enforcing.candidates] == ["ignores"]
    assert check.list_uncounted() == [("needs", "grpc")]


def test_an_ignored_body_leaves_its_slot_empty() -> None:
    """`body: ignore` fingerprints like a request without a body."""
    live, _ = sealed(make_engine(policy("a", ANY, body="ignore")), get(), NO_BODY.plus(b"payload"))

    assert live[0].composite == "GET|/||00000000"


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (get("/" + "x" * 70_000), "target_too_long"),
        (get("/?" + "+&" * 30_000), "target_too_long"),
        (get("/?a=" + "%41" * 10_001), "target_too_long"),
        (get(x_a="y" * 9_000), "descriptor_too_long"),
    ],
)
def test_what_is_too_long_is_not_counted(request_: HttpRequest, reason: str) -> None:
    """A target or a descriptor past its bound leaves the request uncounted instead of costing time."""
    check = make_engine(policy("a", ANY, limit_keys=["header:x-a"])).prepare(request_)

    assert check is not None
    assert check.list_uncounted() == [("a", reason)]


def test_the_strictest_answer_wins() -> None:
    """Reject beats throttle beats warn; the warning of a policy that fired is kept."""
    three = [policy(action, ANY, action=action) for action in ("warn", "throttle", "reject")]

    assert verdict(make_engine(*three), LOOP, LOOP, LOOP).lead.policy == "reject"
    throttled = verdict(make_engine(*three), LOOP, LOOP, FINE)
    assert (throttled.action, throttled.warning) == (Action.THROTTLE, True)
    assert verdict(make_engine(*three), FINE, FINE, FINE).lead is None


def test_ties_go_to_the_longest_wait_then_to_the_first() -> None:
    """Among equals the longest Retry-After or delay wins, then bundle order."""
    engine = make_engine(policy("short", ANY), policy("long", ANY, window_seconds=600), policy("last", ANY, window_seconds=600))

    assert verdict(engine, LOOP, LOOP, LOOP).lead.policy == "long"
    slow = make_engine(policy("a", ANY, action="throttle", max_delay_ms=200), policy("b", ANY, action="throttle"))
    assert verdict(slow, LOOP, LOOP).lead.policy == "b"


@pytest.mark.parametrize(
    ("more", "count", "seconds"),
    [
        ({}, LOOP, 60),
        ({"cooldown_seconds": 90}, replace(LOOP, cooldown_ms=88_001), 89),
        ({"cooldown_seconds": 90}, replace(LOOP, cooldown_ms=1_001), 60),  # the window outlasts the cooldown
        ({"cooldown_seconds": 90}, replace(LOOP, cooldown_ms=1_001, count=1), 2),  # the window has emptied
        ({"window_type": "fixed"}, replace(LOOP, span_ms=50_001), 10),
        ({"count_refused": False}, LOOP, 60),
        ({"count_refused": False, "cooldown_seconds": 90}, replace(LOOP, cooldown_ms=5_000, count=2), 5),
    ],
)
def test_retry_after_is_when_the_same_request_passes(more: dict[str, Any], count: Count, seconds: int) -> None:
    """What is left of the cooldown or of the window, whichever is longer, in whole seconds."""
    assert verdict(make_engine(policy("a", ANY, **more)), count).lead.retry_after == seconds


@given(
    st.sampled_from(["sliding_ttl", "sliding_log", "fixed"]),
    st.integers(1, 9),
    st.integers(2, 4),
    st.integers(0, 9),
    st.booleans(),
    st.lists(st.integers(0, 4_000), min_size=1, max_size=12),
)
def test_no_retry_after_is_too_early(  # what a window is made of
    window_type: str, window: int, threshold: int, cooldown: int, count_refused: bool, pauses: list[int]
) -> None:
    """A client that waits as long as its refusal said is let through, whatever happened before."""
    loop: dict[str, Any] = {
        "window_type": window_type,
        "window_seconds": window,
        "cooldown_seconds": cooldown,
        "count_refused": count_refused,
    }
    engine = make_engine(policy("a", ANY, threshold_identical_requests=threshold, **loop))
    store, now = MemoryStore(Metrics()), 1_000_000

    def send(at: int) -> Outcome | None:
        evaluation = engine.prepare(get())
        assert evaluation is not None
        evaluation.read_body(NO_BODY)
        return evaluation.decide(store.hit(evaluation.enforcing.list_hits(), at)).lead

    for pause in pauses:
        now += pause
        refused = send(now)
    if refused is not None:
        assert refused.retry_after is not None
        assert send(now + refused.retry_after * 1_000) is None


def test_a_throttle_waits_for_its_count_up_to_the_cap() -> None:
    """The delay is 100 ms for each request counted, at most max_delay_ms."""
    engine = make_engine(policy("a", ANY, action="throttle"))

    assert verdict(engine, LOOP).lead.delay_ms == 300
    assert verdict(engine, replace(LOOP, count=100_000)).lead.delay_ms == 30_000


def test_shadow_policies_never_lead() -> None:
    """A shadow policy's loop is reported and decides nothing."""
    decision = verdict(make_engine(policy("s", ANY, mode="shadow"), policy("e", ANY, action="warn")), LOOP, LOOP)

    assert decision.lead.policy == "e"
    assert decision.shadow.policy == "s"


def test_a_policy_can_be_forced_into_shadow() -> None:
    """`--shadow` and `global_shadow` move every policy to the shadow group, the latter until it expires."""
    until = NOW + timedelta(hours=1)
    override = {"enabled": True, "reason": "canary", "expires_at": until.isoformat()}

    assert make_engine(policy("a", ANY), shadow=True).plans[0].shadow
    assert make_engine(policy("a", ANY), global_shadow=override).plans[0].shadow
    assert not make_engine(policy("a", ANY), global_shadow=override, now=until).plans[0].shadow
    assert not make_engine(policy("a", ANY), global_shadow={"enabled": False}).plans[0].shadow


def test_count_refused_is_about_refusals_alone() -> None:
    """A throttled or warned request reaches the upstream, so it counts even with count_refused off."""
    engine = make_engine(
        *(policy(action, ANY, action=action, count_refused=False) for action in ("reject", "throttle", "warn"))
    )

    live, _ = sealed(engine, get())

    assert [candidate.hit.count_refused for candidate in live if isinstance(candidate.hit, Hit)] == [False, True, True]


@pytest.mark.parametrize("mode", ["enforce", "shadow"])
def test_a_detector_that_raises_leaves_the_others_verdict_standing(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever one policy's evaluation raises, and wherever, the policy beside it refuses the loop that it saw."""
    for raising in ("_descriptors", "detectors"):
        engine = make_engine(policy("bad", ANY, limit_keys=["header:x-a"], mode=mode), policy("good", ANY, action="warn"))
        monkeypatch.setattr(engine.plans[0], raising, (None,))
        evaluation = engine.prepare(get(x_a="1"))
        assert evaluation is not None

        evaluation.read_body(NO_BODY)
        decision = evaluation.decide([LOOP] * len(evaluation.enforcing.list_hits()), [])

        assert decision.lead is not None
        assert decision.lead.policy == "good"
        assert [identity for group in evaluation.groups for identity, _ in group.failures] == ["bad"]


def test_the_message_says_what_to_do() -> None:
    """What repeated, how often, over what span; a long path is cut, odd bytes cannot break the JSON."""
    outcome = Outcome(
        "p", "enforce", Action.REJECT, "f" * 8, "t" * 16, 7, 150_000, 60, 0, 60, RefusalForm(429), "default", EXACT
    )

    message = EXACT.write_message(outcome, "POST", "/v1/" + "x" * 1_000 + "\udcff")

    assert "POST /v1/xxx" in message
    assert "7 times within 2.5 minutes" in message
    assert "change the approach" in message
    assert len(message) < 600


@pytest.mark.parametrize(
    ("similarity", "repeat", "said"),
    [
        ("tail", None, "a conversation that ends with the same messages (POST /v1) has been sent 7 times"),
        ("canonical", None, "a request with the same content (POST /v1) has been sent 7 times within 2.5 minutes"),
        (
            "tool_calls",
            Repeat(("grep",), 3, 8, 3, True),
            "3 of the last 8 tool calls were grep with the same arguments and the same result, so this request was refused. ",
        ),
        (
            "tool_calls",
            Repeat(("grep",), 3, 8, 3, False, " Read the file. "),
            "3 of the last 8 tool calls were grep with the same arguments, so this request was refused. Read the file. Neither",
        ),
        (
            "tool_calls",
            Repeat(("read", "edit"), 3, 6, 3, True),
            "the last 6 tool calls were 3 rounds of the same 2 calls (read, edit), so this request was refused. Neither",
        ),
    ],
)
def test_the_message_says_what_was_compared(similarity: str, repeat: Repeat | None, said: str) -> None:
    """Each similarity says what repeated in its own words; calls are told by tool and number, with the operator's reason."""
    teller = make_similarity(LoopDetection.model_validate({"similarity": similarity}))
    outcome = Outcome(
        "p", "enforce", Action.REJECT, "f" * 8, "t" * 16, 7, 150_000, 60, 0, 60, RefusalForm(429), "name", teller, repeat
    )

    message = teller.write_message(outcome, "POST", "/v1")

    assert message.startswith(f"Loop detected: {said}")
    assert "change the approach" in message


def test_the_strictest_outcome_of_each_policy_counts() -> None:
    """A policy is told by one outcome, the first among equals; the same policy's place in the other group is its own."""
    base = Outcome("a", "enforce", Action.ALLOW, "f", "t", 1, 0, 60, 0, 60, RefusalForm(429), "one", EXACT)
    trace = [
        base,
        replace(base, action=Action.WARN, detector="two"),
        replace(base, action=Action.WARN, detector="three"),
        replace(base, policy="b"),
        replace(base, policy="b", detector="two"),
        replace(base, policy="b", mode="shadow", action=Action.REJECT),
    ]

    found = [(outcome.policy, outcome.mode, outcome.action.value, outcome.detector) for outcome in group_by_policy(trace)]

    assert found == [
        ("a", "enforce", "warn", "two"),
        ("b", "enforce", "allow", "one"),
        ("b", "shadow", "reject", "one"),
    ]
    assert list(group_by_policy(trace[:1])) == trace[:1]


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [(0, "a second"), (999, "a second"), (1_500, "1.5 seconds"), (150_000, "2.5 minutes"),
     (7_200_000, "2 hours"), (864_000_000, "10 days")],
)  # fmt: skip
def test_spans_read_as_a_person_would_say_them(milliseconds: int, text: str) -> None:
    """The unit grows with the span."""
    assert format_duration(milliseconds) == text
