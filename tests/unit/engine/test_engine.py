"""Policies applied to requests: what each counts, and which of their answers a client gets."""

from binascii import crc32
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, strategies as st

from extproc.decision import Action, Outcome, RefusalForm, Repeat
from extproc.detectors import make_similarity
from extproc.detectors.base import format_duration
from extproc.engine.exchange import group_by_policy
from extproc.policy.bundle import LoopDetection
from tests.support.budget_policies import ask, bucket, chat, limited, refused, serve
from tests.support.bundles import RULE
from tests.support.documents import policy
from tests.support.engine import ANY, NOW, make_engine
from tests.support.looping import looping, several
from tests.support.messages import body, headers
from tests.support.records import replace
from tests.support.service import (
    RecordingStore,
    decoded,
    exchange,
    headers_of,
    list_uncounted,
    make_service,
    metadata_of,
    repeat,
    sample,
)


@pytest.mark.parametrize(
    "keys",
    [
        {"limit_keys": ["header:x-user"]},
        {"rules": [RULE | {"limit_keys": ["header:x-user"]}]},
        {"fallback_limit": RULE | {"limit_keys": ["header:x-user"]}},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_keys_of_policy_rules_and_fallback_tell_callers_apart(keys: dict[str, Any]) -> None:
    item = policy("p", ANY)
    item["spec"] |= keys
    store, reference = RecordingStore(), RecordingStore()
    services = (
        make_service(item, store=store),
        make_service(policy("p", ANY, limit_keys=["header:x-user"]), store=reference),
    )

    for service in services:
        for user in ("alice", "bob", "carol", "alice"):
            exchange(service, headers(end=True, x_user=user))

    assert [key for key in store.keys if key.startswith("loop:")] == reference.keys
    assert [reference.keys.index(key) for key in reference.keys] == [0, 1, 2, 0]


BOTH: dict[str, Any] = {"limit_keys": ["header:x-a", "header:x-b"]}
MODES = [
    policy("one", ANY, **BOTH, missing_descriptor="require_one"),
    policy("skip", ANY, **BOTH, missing_descriptor="skip"),
    policy("share", ANY, **BOTH, missing_descriptor="share"),
]
NO_KEYS = [policy("a", ANY), policy("b", ANY, limit_keys=["ip:country"])]
BODIES = [policy("needs", ANY), policy("ignores", ANY, body="ignore")]
KEYED = [policy("a", ANY, limit_keys=["header:x-a"])]
EMPTY = "POST|/||00000000"
PAYLOAD = f"POST|/||{crc32(b'payload'):08x}"
GRPC = {"content_type": "application/grpc", "te": "trailers"}


@pytest.mark.parametrize(
    ("policies", "request_", "composites", "uncounted"),
    [
        (
            MODES,
            {"x_a": "1", "x_b": "2"},
            dict.fromkeys(["one", "skip", "share"], f"{EMPTY}|x-a=1|x-b=2"),
            "",
        ),
        (
            MODES,
            {"x_a": "1"},
            dict.fromkeys(["one", "share"], f"{EMPTY}|x-a=1"),
            "skip missing_descriptor",
        ),
        (MODES, {}, {"share": EMPTY}, "one missing_descriptor, skip missing_descriptor"),
        (NO_KEYS, {}, {"a": EMPTY, "b": EMPTY}, ""),
        (BODIES, {}, {"needs": PAYLOAD, "ignores": EMPTY}, ""),
        (BODIES, GRPC, {"ignores": EMPTY}, "needs grpc"),
        (KEYED, {"path": "/" + "x" * 70_000}, {}, "a target_too_long"),
        (KEYED, {"path": "/?" + "+&" * 30_000}, {}, "a target_too_long"),
        (KEYED, {"path": "/?a=" + "%41" * 10_001}, {}, "a target_too_long"),
        (KEYED, {"x_a": "y" * 9_000}, {}, "a descriptor_too_long"),
    ],
)
def test_each_policy_counts_by_its_own_keys_and_body(
    policies: list[dict[str, Any]],
    request_: dict[str, str],
    composites: dict[str, str],
    uncounted: str,
) -> None:
    store = RecordingStore()
    service = make_service(*policies, store=store)
    data = body(b"payload" if policies is BODIES else b"")

    exchange(service, headers(**request_), data)  # type: ignore[arg-type]  # headers alone

    fields = [key.split(":") for key in store.keys]
    assert {field[1]: field[6][:8] for field in fields} == {
        name: f"{crc32(text.encode()):08x}" for name, text in composites.items()
    }
    found = [
        f"{made['id']} {reason}"
        for made in policies
        for reason in list_uncounted(service, made["id"])
    ]
    assert ", ".join(found) == uncounted


ACTING = [policy(action, ANY, action=action) for action in ("warn", "throttle", "reject")]


@pytest.mark.parametrize(
    ("policies", "told"),
    [
        (ACTING, {"action": "reject", "policy": "reject"}),
        (ACTING[:2], {"action": "throttle", "policy": "throttle", "warning": "loop_warn"}),
        ([policy("a", ANY, threshold_identical_requests=4)], {}),
        (
            [
                policy("short", ANY),
                *(policy(name, ANY, window_seconds=600) for name in ("long", "last")),
            ],
            {"policy": "long"},
        ),
        (
            [
                policy("a", ANY, action="throttle", max_delay_ms=200),
                policy("b", ANY, action="throttle"),
            ],
            {"policy": "b", "action": "throttle"},
        ),
        (
            [policy("s", ANY, mode="shadow"), *ACTING[:1]],
            {"policy": "warn", "action": "warn", "shadow_policy": "s"},
        ),
    ],
    ids=["strictest", "next", "nothing", "longest Retry-After", "longest delay", "shadow"],
)
def test_strictest_answer_wins(policies: list[dict[str, Any]], told: dict[str, str]) -> None:
    found = metadata_of(repeat(make_service(*policies), headers(end=True), times=3))

    assert {key: found[key] for key in told} == told
    assert bool(found) is bool(told)


@pytest.mark.parametrize(
    ("more", "times", "seconds"),
    [
        ({}, [0, 0, 1_000], 60),
        ({"cooldown_seconds": 90}, [0, 0, 0, 1_999], 89),
        (
            {"cooldown_seconds": 90},
            [0, 0, 0, 50_000, 88_999],
            60,
        ),  # the window outlasts the cooldown
        ({"cooldown_seconds": 90}, [0, 0, 0, 88_999], 2),  # the window has emptied
        ({"window_type": "fixed"}, [0, 0, 50_001], 10),
        ({"count_refused": False}, [0, 0, 0], 60),
        (
            {"count_refused": False, "cooldown_seconds": 90, "window_type": "sliding_log"},
            [0, 59_000, 59_000, 144_000],
            5,
        ),
        (
            {"count_refused": False, "cooldown_seconds": 90, "window_type": "sliding_log"},
            [0, 9_000, 9_000, 65_000],
            34,
        ),
    ],
)
def test_retry_after_is_when_same_request_passes(
    more: dict[str, Any], times: list[int], seconds: int
) -> None:
    """The rest of the cooldown or of the window, whichever is longer, in whole seconds."""
    service, clock = serve(policy("a", ANY, **more))
    start = clock.now

    for time in times:
        clock.now = start + time
        (reply,) = exchange(service, headers(end=True))

    assert headers_of(decoded(reply))["Retry-After"] == str(seconds)


@given(
    st.sampled_from(["sliding_ttl", "sliding_log", "fixed"]),
    st.integers(1, 9),
    st.integers(2, 4),
    st.integers(0, 9),
    st.booleans(),
    st.lists(st.integers(0, 4_000), min_size=1, max_size=12),
)
def test_request_passes_after_its_retry_after(  # what a window is made of
    window_type: str,
    window: int,
    threshold: int,
    cooldown: int,
    count_refused: bool,
    pauses: list[int],
) -> None:
    loop: dict[str, Any] = {
        "window_type": window_type,
        "window_seconds": window,
        "count_refused": count_refused,
    }
    service, clock = serve(
        policy("a", ANY, threshold_identical_requests=threshold, cooldown_seconds=cooldown, **loop)
    )

    for pause in pauses:
        clock.now += pause
        refused = headers_of(decoded(exchange(service, headers(end=True))[0]))
    clock.now += int(refused.get("Retry-After", 0)) * 1_000
    last = decoded(exchange(service, headers(end=True))[0])

    assert not refused or not last.HasField("immediate_response")


def test_throttle_delay_grows_with_count_up_to_cap() -> None:
    service = make_service(policy("a", ANY, action="throttle"))

    holds = [exchange(service, headers(end=True))[0].hold_ms for _ in range(302)]

    assert holds[2:4] == [300, 400]
    assert holds[298:] == [29_900, 30_000, 30_000, 30_000]


def test_flag_or_global_shadow_forces_shadow_mode() -> None:
    until = NOW + timedelta(hours=1)
    override = {"enabled": True, "reason": "canary", "expires_at": until.isoformat()}

    assert make_engine(policy("a", ANY), shadow=True).plans[0].shadow
    assert make_engine(policy("a", ANY), global_shadow=override).plans[0].shadow
    assert not make_engine(policy("a", ANY), global_shadow=override, now=until).plans[0].shadow
    assert not make_engine(policy("a", ANY), global_shadow={"enabled": False}).plans[0].shadow


@pytest.mark.parametrize(
    ("action", "counts"), [("reject", [2, 2, 2]), ("throttle", [2, 3, 4]), ("warn", [2, 3, 4])]
)
def test_count_refused_only_leaves_out_refusals(action: str, counts: list[int]) -> None:
    service = make_service(
        policy("a", ANY, action=action, count_refused=False, threshold_identical_requests=2)
    )

    answers = [decoded(exchange(service, headers(end=True))[0]) for _ in range(4)]

    assert [metadata_of(answer)["count"] for answer in answers[1:]] == counts


@pytest.mark.parametrize(
    ("similarity", "repeat", "said"),
    [
        (
            "exact",
            None,
            "this identical request (POST /v1) has been sent 7 times within 2.5 minutes",
        ),
        (
            "tail",
            None,
            "a conversation that ends with the same messages (POST /v1) has been sent 7 times",
        ),
        (
            "canonical",
            None,
            "a request with the same content (POST /v1) has been sent 7 times within 2.5 minutes",
        ),
        (
            "tool_calls",
            Repeat(("grep",), 3, 8, 3, True),
            (
                "3 of the last 8 tool calls were grep with the same arguments and the same "
                "result, so "
                "this request was refused. "
            ),
        ),
        (
            "tool_calls",
            Repeat(("grep",), 3, 8, 3, False, " Read the file. "),
            (
                "3 of the last 8 tool calls were grep with the same arguments, so this request was "
                "refused. Read the file. Neither"
            ),
        ),
        (
            "tool_calls",
            Repeat(("read", "edit"), 3, 6, 3, True),
            (
                "the last 6 tool calls were 3 rounds of the same 2 calls (read, edit), so this "
                "request was refused. Neither"
            ),
        ),
    ],
)
def test_message_names_what_was_compared(similarity: str, repeat: Repeat | None, said: str) -> None:
    teller = make_similarity(LoopDetection.model_validate({"similarity": similarity}))
    outcome = replace(OUTCOME, action=Action.REJECT, subject=teller, repeat=repeat)

    message = teller.write_message(outcome, "POST", "/v1")
    long = teller.write_message(outcome, "POST", "/v1/" + "x" * 1_000 + "\udcff")

    assert message.startswith(f"Loop detected: {said}")
    assert "change the approach" in message
    assert len(long.encode()) < 800


OUTCOME = Outcome(
    "a",
    "enforce",
    Action.ALLOW,
    "f" * 8,
    "t" * 16,
    7,
    150_000,
    60,
    0,
    60,
    RefusalForm(429),
    "one",
    make_similarity(LoopDetection()),
)


def test_policy_is_represented_by_its_strictest_outcome() -> None:
    trace = [
        OUTCOME,
        replace(OUTCOME, action=Action.WARN, detector="two"),
        replace(OUTCOME, action=Action.WARN, detector="three"),
        replace(OUTCOME, policy="b"),
        replace(OUTCOME, policy="b", detector="two"),
        replace(OUTCOME, policy="b", mode="shadow", action=Action.REJECT),
    ]

    found = [
        (outcome.policy, outcome.mode, outcome.action.value, outcome.detector)
        for outcome in group_by_policy(trace)
    ]

    assert found == [
        ("a", "enforce", "warn", "two"),
        ("b", "enforce", "allow", "one"),
        ("b", "shadow", "reject", "one"),
    ]
    assert list(group_by_policy(trace[:1])) == trace[:1]


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "a second"),
        (999, "a second"),
        (1_500, "1.5 seconds"),
        (150_000, "2.5 minutes"),
        (7_200_000, "2 hours"),
        (864_000_000, "10 days"),
    ],
)
def test_durations_are_written_in_plain_words(milliseconds: int, text: str) -> None:
    assert format_duration(milliseconds) == text


LOOP: dict[str, Any] = {"enabled": True, "window_seconds": 60, "threshold_identical_requests": 2}
KEYS = ["header:x-api-key"]
BUDGET = bucket(burst=1, per_second=0.001)
ONE_STEP: dict[str, Any] = {
    "limit_keys": KEYS,
    "session": {"keys": ["header:x-session-id"]},
    "session_limits": {"max_steps": 1},
}


@pytest.mark.parametrize(
    ("policies", "said", "told"),
    [
        (
            [limited(loop_detection=LOOP, limit_keys=KEYS), limited(BUDGET, identity="b")],
            "aa",
            "loop_detected",
        ),
        (
            [limited(BUDGET, identity="b"), limited(loop_detection=LOOP, limit_keys=KEYS)],
            "aa",
            "loop_detected",
        ),
        ([limited(BUDGET, loop_detection=LOOP)], "aa", "loop_detected"),
        ([limited(BUDGET, loop_detection=LOOP, **ONE_STEP)], "aaaaaa", "loop_detected"),
        ([limited(BUDGET, **ONE_STEP)], "ab", "session_limit_exceeded"),
        (
            [limited(BUDGET, loop_detection=LOOP | {"action": "warn"})],
            "aa",
            "token_bucket_exceeded",
        ),
    ],
)
def test_loop_speaks_before_session_before_budget(
    policies: list[dict[str, Any]], said: str, told: str
) -> None:
    """Then a session, whose end is final, then a budget, in any order of the policies."""
    service, _ = serve(*policies)

    answers = [ask(service, content=chat(word), x_session_id="s") for word in said]

    assert refused(answers[-1]) == told


@pytest.mark.parametrize(
    ("spec", "loop", "acts"),
    [
        ({}, {}, True),
        ({"session": {}}, {}, True),
        ({"missing_descriptor": "skip"}, {}, False),
        ({"uncountable": "reject"}, {}, False),
        ({}, {"cooldown_seconds": 60}, False),
    ],
)
def test_detectors_without_counts_need_no_caller(
    spec: dict[str, Any], loop: dict[str, Any], acts: bool
) -> None:
    """A request that shows its own loop needs no caller.

    Counts need one, or all strangers would share them.
    """
    loops = [
        {"name": similarity, "similarity": similarity, **loop}
        for similarity in ("turns", "canonical")
    ]
    service = make_service(several("p", *loops, limit_keys=["header:x-user-id"], **spec))

    answer = repeat(service, headers("/v1/chat/completions"), body(looping(4)), times=4)

    assert answer.HasField("immediate_response") is (acts or "uncountable" in spec)
    assert sample(service, "loops_detected_total", policy="p", mode="enforce", action="reject") == (
        4 if acts else 0
    )
    assert sample(service, "uncounted_total", policy="p", reason="missing_descriptor") == 4
