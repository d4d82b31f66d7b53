"""Each credential of a request is a caller, so a junk header makes no new caller."""

import json
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest

from extproc.cli.replay.judge import Judge
from extproc.cli.replay.records import parse_line
from extproc.engine.orders import ALLOW, BLOCK, GRANT, Grant, Target
from extproc.engine.recording import record_body, record_head
from extproc.ext_proc.service import Service
from extproc.pb.external_processor_pb2 import ProcessingResponse
from extproc.request.fingerprint import NO_BODY
from extproc.request.hash_key import HashKey
from extproc.request.http import HttpRequest, StatedFacts
from tests.support.budget_policies import REJECT, bucket, limited, refused, rule
from tests.support.documents import policy
from tests.support.engine import ANY, make_engine
from tests.support.orders import apply_orders, order
from tests.support.service import ask, make_service, metadata_of, sample
from tests.support.session_limits import turns

KEY = HashKey(bytes(range(32)))
CHAT, MESSAGES, GEMINI, BEDROCK = (
    "/v1/chat/completions",
    "/v1/messages",
    "/v1beta/models/m:generateContent",
    "/model/m/converse",
)
CALLER = {"first_of": ["jwt:sub", "credential", "header:x-user-id"], "name": "caller"}
HEADERS = {"first_of": ["header:x-api-key", "header:authorization"], "name": "caller"}
TEAM = {"first_of": ["header:x-team", "credential"], "name": "caller"}
JUNK = count()
LOOPS = policy("p", ANY, limit_keys=["credential"])
PROMPT = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()

Send = Callable[[], ProcessingResponse]


def send(
    service: Service,
    path: str = MESSAGES,
    data: bytes = PROMPT,
    **named: Any,  # noqa: ANN401  # headers
) -> ProcessingResponse:
    shown: dict[str, Any] = {
        name: value.replace("JUNK", f"junk-{next(JUNK)}") for name, value in named.items()
    }
    return ask(service, data, path, **shown)


def judge(
    path: str = MESSAGES,
    keys: Any = ("credential",),  # noqa: ANN401  # a table's
    claims: Any = None,  # noqa: ANN401  # a table's
    **named: str,
) -> list[Any]:
    request = HttpRequest(
        "POST",
        path,
        "host",
        {name.replace("_", "-"): value.encode() for name, value in named.items()},
        StatedFacts(claims=claims or {}),
    )
    evaluation = make_engine(policy("p", ANY, limit_keys=[*keys])).prepare(request, key=KEY)
    assert evaluation is not None
    return [dict(candidate.values) for candidate in evaluation.enforcing.active]


PAIRS = [
    (MESSAGES, {"authorization": "Bearer sk-real", "x_api_key": "JUNK"}),
    (MESSAGES, {"x_api_key": "sk-real", "authorization": "Bearer JUNK"}),
    (
        MESSAGES,
        {
            "authorization": "Bearer sk-real",
            "x_api_key": "JUNK",
            "api_key": "JUNK",
            "x_goog_api_key": "JUNK",
        },
    ),
    (CHAT, {"api_key": "sk-real", "authorization": "Bearer JUNK"}),
    (CHAT, {"authorization": "Bearer sk-real", "api_key": "JUNK"}),
    (GEMINI, {"authorization": "Bearer sk-real", "x_goog_api_key": "JUNK"}),
    (f"{GEMINI}?key=sk-real", {"x_goog_api_key": "JUNK"}),
    (
        BEDROCK,
        {
            "x_api_key": "sk-real",
            "authorization": "AWS4-HMAC-SHA256 Credential=JUNK/20260101/us-east-1/bedrock/x",
        },
    ),
    ("/other", {"x_goog_api_key": "sk-real", "authorization": "JUNK"}),
]
"""A real credential, and one that is read before it and changes with every request."""


GUARDS: dict[str, tuple[Callable[[list[Any]], dict[str, Any]], str]] = {
    "loops": (lambda keys: policy("p", ANY, limit_keys=keys), "loop_detected"),
    "budgets": (lambda keys: limited(bucket(0.001, burst=2, keys=keys)), "token_bucket_exceeded"),
    "sessions": (lambda keys: only_steps(2, keys), "session_limit_exceeded"),
}


def only_steps(most: int, keys: Sequence[Any] = ("credential",)) -> dict[str, Any]:
    return {
        "id": "p",
        "spec": {"selector": ANY, "limit_keys": [*keys], "session_limits": {"max_steps": most}},
    }


@pytest.mark.parametrize(
    ("path", "shown", "guard", "keys"),
    [
        *((*pair, "loops", [keys]) for pair in PAIRS for keys in ("credential", CALLER)),
        *(
            (*PAIRS[0], guard, [keys])
            for guard in ("budgets", "sessions")
            for keys in ("credential", CALLER)
        ),
    ],
)
def test_junk_credential_makes_no_new_caller(
    path: str, shown: dict[str, Any], guard: str, keys: list[Any]
) -> None:
    make, reason = GUARDS[guard]
    service = make_service(make(keys))
    bodies = [turns(place if guard == "sessions" else 1) for place in range(4)]

    answers = [refused(send(service, path, data, x_session_id="s", **shown)) for data in bodies]
    others: dict[str, Any] = {
        name: value.replace("sk-real", "sk-other") for name, value in shown.items()
    }
    other = refused(
        send(service, path.replace("sk-real", "sk-other"), bodies[0], x_session_id="s", **others)
    )

    assert [*answers, other] == ["", "", reason, reason, ""]


@pytest.mark.parametrize(("path", "shown"), PAIRS)
def test_junk_credential_does_not_hide_a_blocked_one(path: str, shown: dict[str, Any]) -> None:
    for made in (
        policy("p", ANY, limit_keys=[CALLER], threshold_identical_requests=99),
        limited(bucket(burst=9, keys=[CALLER])),
    ):
        service = make_service(made)
        apply_orders(service, order(BLOCK, Target(caller=service.key.hide("sk-real"))))

        assert refused(send(service, path, **shown)) == "blocked"
        assert refused(send(service, x_api_key="sk-other")) == ""


FREE = "AWS4-HMAC-SHA256 Credential=AKIAFREE/20260101/us-east-1/bedrock/x"
REAL: dict[str, Any] = {"authorization": "Bearer sk-real", "x_api_key": "JUNK"}
BREAKER = {"enabled": True, "spend_rate_threshold_per_minute": 3, "auto_reset_after_minutes": 5}
SPENDING = limited(bucket(burst=99, keys=["credential"]), circuit_breaker=BREAKER)


@pytest.mark.parametrize(
    ("made", "orders", "shown", "reasons"),
    [
        (LOOPS, {"AKIAFREE": ALLOW}, {"authorization": FREE}, ["", "", "", ""]),
        (
            LOOPS,
            {"AKIAFREE": ALLOW},
            {"authorization": FREE, "x_api_key": "sk-real"},
            ["", "", *["loop_detected"] * 2],
        ),
        (
            only_steps(1),
            {"sk-a": GRANT},
            {"authorization": "t", "x_api_key": "sk-a"},
            ["", *["session_limit_exceeded"] * 3],
        ),
        (SPENDING, {}, REAL, ["", "", *["circuit_breaker_open"] * 2]),
        (policy("p", ANY, limit_keys=[HEADERS]), {}, REAL, ["", "", *["loop_detected"] * 2]),
    ],
    ids=[
        "allowed",
        "allowed, and another one",
        "granted, and another one",
        "a breaker",
        "headers in first_of",
    ],
)
def test_order_for_one_caller_frees_no_other(
    made: dict[str, Any], orders: dict[str, str], shown: dict[str, str], reasons: list[str]
) -> None:
    """The strictest verdict holds, so an allowed key id is no pass for another caller."""
    service = make_service(made)
    for secret, kind in orders.items():
        apply_orders(
            service, order(kind, Target(caller=service.key.hide(secret)), grant=Grant(steps=9))
        )

    steps = range(4) if GRANT in orders.values() else [1] * 4

    assert [
        refused(send(service, CHAT, turns(step), x_session_id="s", **shown)) for step in steps
    ] == reasons


def test_shared_budget_is_charged_once_for_several_callers() -> None:
    team = bucket(0.001, burst=3, name="team", keys=["header:x-team"])
    service = make_service(limited(bucket(0.001, burst=9, keys=["credential"]), team))
    both: dict[str, Any] = {"x_api_key": "sk-a", "authorization": "Bearer sk-b", "x_team": "t"}

    answers = [refused(send(service, **both)) for _ in range(4)]

    assert answers == ["", "", "", "token_bucket_exceeded"]
    rows = service.reporter.budgets.make_document(shows_callers=False).rows
    assert sorted((row.rule, row.requests) for row in rows) == [("r", 4), ("r", 4), ("team", 4)]
    left = {(row.rule, row.left // row.units) for row in rows}
    assert left == {("r", 6), ("team", 0)}, "the refused request was given back by all"


def test_each_caller_settles_its_own_reservation() -> None:
    tokens = rule(
        "cost_based",
        keys=["credential"],
        budget=100_000,
        period="1h",
        cost_key="usage:tokens",
        staged_actions=REJECT,
    )
    service = make_service(limited(tokens))

    told = json.loads(
        metadata_of(send(service, x_api_key="sk-a", authorization="Bearer sk-b"))["sessions"]
    )

    (first,), (second,) = [each["budgets"] for each in told]
    assert (first[:2], first[3:]) == (second[:2], second[3:])
    assert first[2] != second[2]
    assert told[0]["call"] != told[1]["call"]


def test_request_of_several_callers_is_reported_once() -> None:
    service = make_service(LOOPS)

    answers = [send(service, **REAL) for _ in range(3)]

    labels = {"policy": "p", "mode": "enforce"}
    assert sample(service, "requests_total", **labels, action="allow") == 2
    assert sample(service, "requests_total", **labels, action="reject") == 1
    assert (
        sample(
            service, "detections_total", **labels, detector="default", action="reject", strength=""
        )
        == 1
    )
    (loop,) = service.reporter.loops.make_document(shows_callers=True).loops
    assert loop.caller == [("credential", service.key.hide("sk-real"))]
    assert metadata_of(answers[-1])["count"] == 3


def test_canary_counts_all_credentials_as_its_policy_does() -> None:
    live, canary = (
        policy("live", ANY, limit_keys=["credential"]),
        policy("try", ANY, mode="shadow", limit_keys=["credential"]),
    )
    shown: dict[str, Any] = {"authorization": "Bearer sk-real", "x_api_key": "JUNK"}
    alone, beside = make_service(canary), make_service(live, canary)

    answers = [(send(alone, **shown), send(beside, **shown)) for _ in range(3)]

    assert [(refused(first), refused(second)) for first, second in answers] == [
        ("", ""),
        ("", ""),
        ("", "loop_detected"),
    ]
    assert [metadata_of(answer)["shadow_action"] for answer in answers[-1]] == ["reject", "reject"]


def test_ramp_acts_if_it_covers_any_caller() -> None:
    service = make_service(policy("p", ANY, limit_keys=["credential"], enforce_percent=50))

    def acts(path: str = MESSAGES, **shown: Any) -> bool:  # noqa: ANN401  # headers
        before = sample(service, "requests_total", policy="p", mode="enforce", action="allow")
        send(service, path, **shown)
        return (
            sample(service, "requests_total", policy="p", mode="enforce", action="allow") > before
        )

    secrets = [f"k{number}" for number in range(40)]
    inside = next(secret for secret in secrets if acts(authorization=secret))
    outside = [secret for secret in secrets if not acts(x_api_key=secret)]

    assert len(outside) > 9
    assert all(
        acts(f"/{secret}", authorization=f"{inside}", x_api_key=secret) for secret in outside
    )


@pytest.mark.parametrize("header", ["cookie", "authorization"])
def test_cookie_is_compared_whole(header: str) -> None:
    service = make_service(
        policy("p", ANY, limit_keys=[f"header:{header}"], threshold_identical_requests=2)
    )

    shown: list[dict[str, Any]] = [{header: "session=ann; dark"}, {header: "session=bob; dark"}]

    answers = [refused(send(service, **named)) for named in shown]

    assert answers == ["", "" if header == "cookie" else "loop_detected"]


@pytest.mark.parametrize(
    ("keys", "claims", "shown", "expected"),
    [
        ([CALLER], {"sub": "ann"}, {"x_api_key": "k", "authorization": "t"}, ["jwt:sub:ann"]),
        (
            [{**CALLER, "first_of": ["credential", "jwt:sub"]}],
            {"sub": "ann"},
            {"x_api_key": "k"},
            ["jwt:sub:ann"],
        ),
        (
            [{**CALLER, "first_of": ["header:x-a", "credential", "jwt:sub"]}],
            {"sub": "ann"},
            {"x_a": "1"},
            ["header:x-a:1"],
        ),
        ([CALLER], {}, {"x_api_key": "k", "x_user_id": "ann"}, [f"credential:{KEY.hide('k')}"]),
        ([CALLER], {}, {"x_user_id": "ann"}, ["header:x-user-id:ann"]),
        (
            [TEAM],
            {},
            {"x_team": "a", "x_api_key": "k", "authorization": "t"},
            ["header:x-team:a"],
        ),  # no secret, but the end
        (
            [CALLER],
            {},
            {"x_api_key": "k", "authorization": "Bearer k"},
            [f"credential:{KEY.hide('k')}"],
        ),
        (
            [CALLER],
            {},
            {"x_api_key": "k", "authorization": "t"},
            [f"credential:{KEY.hide(each)}" for each in "kt"],
        ),
        (
            [{**CALLER, "first_of": ["header:x-api-key", "credential"]}],
            {},
            {"x_api_key": "k", "authorization": "t"},
            [f"header:x-api-key:{KEY.hide('k')}", f"credential:{KEY.hide('t')}"],
        ),
    ],
)
def test_verified_claim_is_the_only_caller(
    keys: Any,  # noqa: ANN401  # a table's
    claims: Any,  # noqa: ANN401  # a table's
    shown: dict[str, str],
    expected: list[str],
) -> None:
    assert [each["caller"] for each in judge(keys=keys, claims=claims, **shown)] == expected


def test_number_of_callers_is_bounded() -> None:
    more = {f"x_{number}_api_key": f"v{number}" for number in range(200)}
    known = {"authorization": "a", "x_api_key": "b", "api_key": "c", "x_goog_api_key": "d"}

    callers = judge("/v1/messages?key=e&key=f&key=g", **known, **more)

    assert len(callers) == 5


def test_body_is_read_once_for_all_callers() -> None:
    looping: dict[str, Any] = {
        "similarity": "turns",
        "window_seconds": None,
        "limit_keys": ["credential"],
        "session": {},
    }
    request = HttpRequest("POST", CHAT, "host", {"api-key": b"k", "authorization": b"t"})
    limits = policy("p", ANY, session_limits={"max_tool_calls": 99}, **looping)
    evaluation = make_engine(limits).prepare(request, key=KEY)
    assert evaluation is not None
    data = turns(3)

    evaluation.read_body(NO_BODY.plus(data), content=data)

    loop, session, other_loop, other_session = evaluation.enforcing.active
    assert other_loop.memory is loop.memory
    # Of a SessionCandidate
    assert other_session.calls is session.calls  # type: ignore[attr-defined]
    assert loop.tenant != other_loop.tenant


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(("path", "shown"), PAIRS)
def test_replay_finds_all_callers(
    path: str, shown: dict[str, Any], plain: bool
) -> None:  # a parameter
    named = {name.replace("_", "-"): value.encode() for name, value in shown.items()}
    engine = make_engine(policy("p", ANY, limit_keys=["credential"]))
    request = HttpRequest("POST", path, "host", named)
    live = engine.prepare(request, key=KEY)
    assert live is not None
    made = record_head(request, request.facts, live.plans, plain=plain)
    record_body(made, NO_BODY, "", 1.0)

    replayed = Judge(engine, 100, HashKey()).judge(
        parse_line(json.dumps({"loop_record": made}).encode())
    )

    assert replayed is not None
    values = [each.values for each in live.enforcing.active]
    assert len(values) > 1
    assert [each.values for each in replayed[0].enforcing.active] == values
    assert "sk-real" not in json.dumps(made)
