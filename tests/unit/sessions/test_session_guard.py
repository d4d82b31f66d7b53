"""Session limits, from a request's headers to the response."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from extproc.cli.main import main
from extproc.engine.orders import BLOCK, Target
from extproc.engine.settlements import Entry
from extproc.ext_proc.service import Service
from extproc.ext_proc.stream import Stream
from extproc.operator.coverage_rows import CROWDED
from extproc.pb.external_processor_pb2 import ProcessingResponse
from extproc.request.fingerprint import hash_tenant
from extproc.sessions.names import hash_session
from extproc.sessions.rates import Usage
from tests.support.command import find_missing
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.messages import body, headers
from tests.support.orders import apply_orders, order
from tests.support.service import (
    RecordingStore,
    decoded,
    exchange,
    headers_of,
    make_service,
    metadata_of,
    receive,
    sample,
    status,
)
from tests.support.session_limits import (
    TOOL,
    Request,
    ask,
    changed,
    kept,
    limit_of,
    limited,
    nameless,
    send,
    settle,
    told,
    turns,
)
from tests.support.turn_writers import Did, as_chat

DETECTOR = {
    "name": "t",
    "enabled": True,
    "similarity": "turns",
    "window_seconds": 60,
    "threshold_identical_requests": 3,
    "action": "warn",
}
PRICES = {"*": {"input": 1_000_000, "output": 1_000_000}}  # a dollar for each token


@pytest.mark.parametrize(
    ("own", "detector", "counted"),
    [
        ({}, {}, 0),
        ({"max_inspect_bytes": 4 * 2**20}, {}, 40),
        ({}, {"max_inspect_bytes": 4 * 2**20}, 40),
        ({"max_inspect_bytes": 2**20}, {"max_inspect_bytes": 4 * 2**20}, 0),
    ],
    ids=["neither", "the limits' own", "a detector's", "the limits' own comes first"],
)
def test_max_inspect_bytes_bounds_the_history_that_is_read(
    own: dict[str, Any], detector: dict[str, Any], counted: int
) -> None:
    document = limited(max_tool_calls=100, **own)
    if detector:
        loop = {
            "enabled": True,
            "window_seconds": 60,
            "threshold_identical_requests": 99,
            **detector,
        }
        document["spec"]["loop_detection"] = loop
    done = [
        Did((("run", {"step": at, "text": "x" * 30_000}),), ("y" * 30_000,), number=at)
        for at in range(1, 41)
    ]
    service = make_service(document)

    ask(service, json.dumps({**as_chat(done), "tools": [TOOL]}).encode())

    assert [run.standing.tool_calls for run in service.reporter.sessions.copy()] == [counted]


def named(*bodies: bytes, session: str = "s", **more: str) -> list[Request]:
    return [(data, {"session": session, **more}) for data in bodies]


def with_loop(**limits: Any) -> dict[str, Any]:  # noqa: ANN401  # keys of session_limits
    document = limited(**limits)
    document["spec"]["loop_detection"] = {
        "enabled": True,
        "window_seconds": 60,
        "threshold_identical_requests": 2,
    }
    return document


def strict(**limits: Any) -> dict[str, Any]:  # noqa: ANN401  # keys of session_limits
    document = limited(**limits)
    document["spec"]["uncountable"] = "reject"
    return document


TURNS = [turns(number) for number in range(10)]
# Some upstreams accept NaN, which our parser refuses.
HIDDEN = turns(3).replace(b'"tools"', b'"temperature": NaN, "tools"')
CASES: dict[str, tuple[dict[str, Any], Sequence[Request], list[int], str]] = {
    "the request after the last step is refused, but retries pass": (
        limited(max_steps=3),
        [
            *named(*TURNS[:5], TURNS[2], TURNS[3]),
            *named(TURNS[9], session="b"),
            *named(TURNS[9], team="other"),
        ],
        [200, 200, 200, 429, 429, 200, 429, 200, 200],
        "",
    ),
    "invalid JSON may hide calls": (
        limited(max_tool_calls=2),
        named(HIDDEN, b"name=ann"),
        [200, 200],
        "not_json",
    ),
    "invalid JSON is refused if the policy says so": (
        strict(max_tool_calls=2),
        named(HIDDEN, b"name=ann"),
        [400, 200],
        "not_json",
    ),
    "unnamed requests": (
        limited(max_steps=1),
        [kept(n) for n in range(3)],
        [200] * 3,
        "unnamed",
    ),
    "unnamed requests are refused if the policy says so": (
        strict(max_steps=1),
        [kept(1)],
        [400],
        "unnamed",
    ),
    "a request that a detector refuses is no step": (
        with_loop(max_steps=3, circuit_breaker={"consecutive_blocks": 2}),
        [*named(TURNS[1], *TURNS[1:5]), *named(TURNS[1], session="b")],
        [200, 429, 200, 200, 429, 429],
        "",
    ),
    "a step that a detector takes back is not the last one": (  # no model has seen it
        with_loop(max_tool_calls=1, max_tool_calls_mode="finish"),
        [*named(TURNS[1], session="b"), *named(*TURNS[1:4])],
        [200, 429, 200, 429],
        "",
    ),
    "a body that cannot be read is a step": (
        limited(max_steps=2),
        named(b"\x00", b"\x01", b"\x02", content_encoding="br"),
        [200, 200, 429],
        "content_encoding",
    ),
}


@pytest.mark.parametrize(("document", "requests", "expected", "reason"), CASES.values(), ids=CASES)
def test_only_requests_sent_upstream_are_steps(
    document: dict[str, Any], requests: Sequence[Request], expected: list[int], reason: str
) -> None:
    service = make_service(document)

    assert nameless(service, requests) == expected
    uncounted = {
        why: sample(service, "uncounted_total", policy="agents", reason=why)
        for why in ("not_json", "unnamed")
    }
    assert [why for why, number in uncounted.items() if number] == [reason] * (reason in uncounted)


def test_shadow_session_beside_bodiless_policy_is_reported() -> None:
    service = make_service(policy("p", ANY, body="ignore"), limited("shadow", max_steps=9))

    answer = ask(service, turns(1))

    assert [run.standing.steps for run in service.reporter.sessions.copy()] == [1]
    assert [told["mode"] for told in json.loads(metadata_of(answer)["sessions"])] == ["shadow"]


def test_model_in_path_may_be_invalid_utf8() -> None:
    service = make_service(limited(max_steps=1))
    named = headers(
        "/v1beta/models/MM:generateContent", x_team="t", x_session_id="s"
    ).SerializeToString()
    stream = Stream(service)
    stream.receive(named.replace(b"MM", b"\xe9\xe8"))

    answer = decoded(
        receive(
            stream,
            body(json.dumps({"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}).encode()),
        )
    )
    stream.close()

    assert json.loads(metadata_of(answer)["sessions"])[0]["model"] == r"\udce9\udce8"
    assert sample(service, "fail_open_total", reason="internal_error") == 0


def test_refusal_names_the_limit_and_its_use() -> None:
    service = make_service(limited(max_steps=1))

    refused = [ask(service, turns(number)) for number in (1, 2)][-1]

    assert (limit_of(refused), told(refused)["error"]) == (
        ("max_steps", 1, 1),
        "session_limit_exceeded",
    )
    assert headers_of(refused) == {
        "content-type": "application/json",
        "x-should-retry": "false",
        "X-Fairvisor-Reason": "session_limit_exceeded",
        "x-loopguard-policy": "agents",
        "x-loopguard-limit": "max_steps",
        "x-loopguard-used": "1",
        "x-loopguard-allowed": "1",
    }
    assert metadata_of(refused) | {"fingerprint": "", "tenant": "", "session": ""} == {
        "action": "reject",
        "reason": "session_limit_exceeded",
        "policy": "agents",
        "detector": "session",
        "limit": "max_steps",
        "count": 1,
        "used": 1,
        "allowed": 1,
        "fingerprint": "",
        "tenant": "",
        "session": "",
    }
    assert refused.immediate_response.details == "session_limit_exceeded"


@pytest.mark.parametrize("waits", [True, False])
def test_client_that_leaves_while_delayed_uses_nothing(waits: bool) -> None:
    limits = limited(max_steps=5, max_cost_per_session=1.0, unknown_model={"input": 2, "output": 8})
    held = policy(
        "held", ANY, action="throttle", threshold_identical_requests=2, limit_keys=["header:x-team"]
    )
    service = make_service(limits, held)
    ask(service, turns(1))
    once = service.reporter.sessions.copy()[0].standing.reserved
    stream = Stream(service)
    receive(stream, headers("/v1/chat/completions", x_team="t", x_session_id="s"))
    assert receive(stream, body(turns(1))).hold_ms > 0
    if waits:
        stream.end_hold()
    stream.close()

    (run,) = service.reporter.sessions.copy()
    standing = run.standing
    assert standing.reserved == (2 * once if waits else once) > 0
    # The same again is a retry
    assert (standing.steps, standing.blocks, standing.consecutive_blocks) == (
        1,
        0,
        0,
    )
    assert service.holds.held == 0


def test_refusals_are_logged_at_powers_of_two(caplog: pytest.LogCaptureFixture) -> None:
    service = make_service(limited(max_steps=1))
    for number in range(1, 10):
        ask(service, turns(number))

    lines = [
        vars(record)["fields"]
        for record in caplog.records
        if record.message == "session limit reached"
    ]
    session = service.reporter.sessions.copy()[0]
    assert len(lines) == 4
    assert lines[0] == {
        "policy": "agents",
        "mode": "enforce",
        "action": "reject",
        "limit": "max_steps",
        "used": 1,
        "allowed": 1,
        "session": session.name.session,
        "tenant": session.name.tenant,
    }


@pytest.mark.parametrize(
    ("limits", "record"),
    [
        ({"max_steps": 1}, False),
        ({"max_steps": 9, "escalate": {"warn": {"max_steps": 2}}}, False),
        ({"max_steps": 9}, True),
    ],
    ids=["refused", "warned", "recorded"],
)
def test_fingerprint_equals_that_of_a_detector(limits: dict[str, Any], record: bool) -> None:
    service, detector = (
        make_service(limited(**limits), record=record),
        policy("p", ANY, limit_keys=["header:x-team"]),
    )
    send(service, [turns(0)])

    found, expected = [
        metadata_of(ask(one, turns(2))) for one in (service, make_service(detector, record=True))
    ]

    assert found["fingerprint"] == expected["fingerprint"]


def test_block_of_a_fingerprint_applies_to_sessions() -> None:
    service = make_service(limited(max_steps=9), record=True)
    fingerprint = metadata_of(ask(service, turns(2)))["fingerprint"]
    apply_orders(service, order(BLOCK, Target(fingerprint=fingerprint)))

    assert send(service, [turns(2), turns(3)]) == [429, 200]


def test_status_402_has_the_code_of_exhausted_quota() -> None:
    service = make_service(limited(max_steps=1, reject_status=402))

    assert send(service, [turns(1), turns(2)]) == [200, 402]
    error = json.loads(ask(service, turns(3)).immediate_response.body)["error"]
    assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")


def test_guessed_call_ids_settle_nothing() -> None:
    service = make_service(limited(max_cost_per_session=100, prices=PRICES))
    large = json.dumps({"prompt": "x" * 500}).encode()
    victim, attacker = (
        ask(service, data, team=team) for data, team in ((large, "victim"), (b"{}", "attacker"))
    )
    own = bytes.fromhex(json.loads(metadata_of(attacker)["sessions"])[0]["call"])

    ends: tuple[Literal["little"], Literal["big"]] = ("little", "big")
    for end in ends:
        for step in range(-64, 65):
            near = (int.from_bytes(own, end) + step) % 2 ** (8 * len(own))
            settle(service, victim, Usage(0, 0), call=near.to_bytes(len(own), end).hex())

    assert status(ask(service, b"{}", team="victim")) == 429
    assert sample(service, "access_log_entries_total", result="unknown") == 2 * 129
    rows = service.reporter.sessions.make_document(shows_callers=False).rows
    assert [call.settled for row in rows for call in row.calls] == [False, False]


@pytest.mark.parametrize("call", ["", "00" * 8, "00" * 17, "g0" * 16, 7, None])
def test_malformed_call_id_settles_nothing(call: object) -> None:
    service = make_service(limited(max_cost_per_session=100, prices=PRICES))

    settle(service, ask(service, b"{}"), Usage(9, 9), call=call)

    assert sample(service, "access_log_entries_total", result="unknown") == 1


@pytest.mark.parametrize("similarity", ["exact", "turns"])
def test_each_policy_uses_its_own_session_keys(similarity: str) -> None:
    keys = {"first": "header:x-run", "second": "header:x-session-id", "third": "body:/run"}
    policies = [
        policy(name, ANY, similarity=similarity, limit_keys=["header:x-team"]) for name in keys
    ]
    for made, key in zip(policies, keys.values(), strict=True):
        made["spec"] |= {"session": {"keys": [key]}, "session_limits": {"max_steps": 9}}
    service = make_service(*policies)

    ask(service, turns(1, run="c"), session="b", x_run="a")

    named = {run.name.policy: run.name.session for run in service.reporter.sessions.copy()}
    assert named == {
        name: hash_session(key, value)
        for (name, key), value in zip(keys.items(), "abc", strict=True)
    }


def test_session_belongs_to_the_tenant_of_its_policy() -> None:
    service = make_service(policy("first", ANY, limit_keys=["header:x-user"]), limited(max_steps=9))

    ask(service, turns(1), team="t", x_user="u")

    assert [run.name.tenant for run in service.reporter.sessions.copy()] == [
        hash_tenant("x-team=t")
    ]


def test_new_session_per_request_is_never_refused() -> None:
    service = make_service(limited(max_steps=2, session={"max_sessions_per_tenant": 3}))

    assert [send(service, [turns(1)], session=f"s{number}") for number in range(40)] == [[200]] * 40
    assert sample(service, "session_overflow_total", policy="agents") == 37
    assert send(service, [turns(2), turns(3)], session="s39") == [200, 429]
    (row,) = [
        row
        for row in service.reporter.coverage.make_document(shows_callers=False).rows
        if row.reason == CROWDED
    ]
    assert row.total == 37


def test_shadow_limits_only_report() -> None:
    service = make_service(
        limited("shadow", max_steps=1, max_tool_calls=1, max_tool_calls_mode="finish")
    )

    answers = [ask(service, turns(number)) for number in range(1, 4)]

    assert [status(answer) for answer in answers] == [200] * 3
    assert not any(answer.request_body.response.HasField("body_mutation") for answer in answers)
    assert metadata_of(answers[2])["shadow_action"] == "reject"
    assert (
        sample(
            service,
            "session_limits_total",
            policy="agents",
            mode="shadow",
            limit="max_steps",
            action="reject",
        )
        == 2
    )


def test_escalation_warns_then_steers_before_refusing() -> None:
    service = make_service(
        limited(max_steps=4, escalate={"warn": {"max_steps": 2}, "steer": {"max_steps": 3}})
    )

    answers = [ask(service, turns(number)) for number in range(1, 6)]

    assert [status(answer) for answer in answers] == [200, 200, 200, 200, 429]
    warned, steered = answers[1].request_body.response, answers[2].request_body.response
    assert [
        (item.header.key, item.header.raw_value) for item in warned.header_mutation.set_headers
    ] == [("X-Fairvisor-Warning", b"session_warn")]
    assert "1 of this session's 4 steps are left" in steered.body_mutation.body.decode()
    assert metadata_of(answers[2])["warning"] == "session_steer"


def play_inputs(
    service: Service, inputs: Sequence[int], clients: Sequence[dict[str, str]] = ({},)
) -> list[bool]:
    """Requests whose answers report these tokens; whether each got a note to compact."""
    noted = []
    for number, tokens in enumerate(inputs, 1):
        who = clients[number % len(clients)]
        answer = ask(service, turns(number), **who)
        noted.append(b"Input growing" in answer.request_body.response.body_mutation.body)
        settle(service, answer, Usage(tokens // 2, 9, tokens // 4, tokens // 4))
    return noted


@pytest.mark.parametrize(
    ("inputs", "noted"),
    [
        ([12_000, 35_996, 36_000, 90_000, 14_000, 40_000, 0, 8, 8], [4, 5, 7, 8]),
        ([100, 29_996, 30_000, 8], [4]),
        ([0, 40_000, 90_000, 120_000, 8], [5]),
    ],
    ids=["until it falls", "a short start counts as 10,000", "the first reported answer"],
)
def test_grown_input_is_noted_and_never_refused(inputs: list[int], noted: list[int]) -> None:
    service = make_service(limited(max_input_growth=3, max_steps=90))

    assert play_inputs(service, inputs) == [at in noted for at in range(1, len(inputs) + 1)]


def test_note_to_compact_names_the_tokens_and_no_refusal() -> None:
    service = make_service(limited(max_input_growth=3))
    play_inputs(service, [12_000, 40_000])

    answer = ask(service, turns(3))

    note = answer.request_body.response.body_mutation.body.decode()
    assert "now has 40,000 input tokens; it should have fewer than 36,000" in note
    assert "refused" not in note
    assert metadata_of(answer)["limit"] == "max_input_growth"
    assert metadata_of(answer)["warning"] == "session_steer"


def test_input_of_agents_neither_grows_nor_is_noted() -> None:
    service = make_service(limited(max_input_growth=3))
    root = {"x_claude_code_session_id": "s"}
    agent = {**root, "x_claude_code_agent_id": "a"}

    noted = play_inputs(service, [90_000, 12_000] * 2 + [90_000] * 4, [root, agent])

    assert noted == [False] * 7 + [True]  # the session's own are the second, fourth, ...


def test_estimated_input_and_that_of_retries_is_not_compared() -> None:
    service = make_service(limited(max_input_growth=3))
    play_inputs(service, [12_000])
    estimated = Entry(
        json.loads(metadata_of(ask(service, turns(2)))["sessions"]), 200, usage=Usage(90_000, 9)
    )

    service.settle_entry(estimated)
    settle(service, ask(service, turns(2)), Usage(90_000, 9))

    assert not changed(ask(service, turns(3)))


def test_shadow_growth_is_only_reported() -> None:
    service = make_service(limited("shadow", max_input_growth=3))

    assert play_inputs(service, [12_000, 40_000, 40_000]) == [False] * 3
    assert metadata_of(ask(service, turns(4)))["shadow_action"] == "steer"


def test_request_without_body_phase_is_a_step() -> None:
    service = make_service(limited(max_steps=2))

    answers = [
        decoded(exchange(service, headers("/", x_team="t", x_session_id="c", mode="NONE"))[0])
        for _ in range(3)
    ]

    assert [status(answer) for answer in answers] == [200, 200, 429]


def tools_of(answer: ProcessingResponse) -> list[str] | None:
    body = changed(answer)
    return [tool["function"]["name"] for tool in body.get("tools", [])] if body else None


def test_finish_forbids_tools_for_a_last_answer() -> None:
    service = make_service(limited(max_tool_calls=2, max_tool_calls_mode="finish"))

    answers = [ask(service, turns(number)) for number in (1, 2, 2)]
    last = changed(answers[1])

    assert [status(answer) for answer in answers] == [200, 200, 200]
    assert [tools_of(answer) for answer in answers] == [None, ["run"], ["run"]]
    assert last["tool_choice"] == "none"
    assert {key: last[key] for key in ("model", "messages")} == {
        key: json.loads(turns(2))[key] for key in ("model", "messages")
    }
    assert [
        item.header.key for item in answers[1].request_body.response.header_mutation.set_headers
    ] == ["x-loopguard-narrowed", "content-length"]
    assert told(ask(service, turns(3)))["limit"] == "max_tool_calls"
    narrowed = {
        "policy": "agents",
        "mode": "enforce",
        "limit": "max_tool_calls",
        "action": "narrow",
    }
    assert sample(service, "session_limits_total", **narrowed) == 2


def test_request_that_cannot_be_narrowed_is_refused() -> None:
    service = make_service(limited(max_tool_calls=1, max_tool_calls_mode="finish"))
    bedrock = {
        "messages": [
            {"role": "user", "content": [{"text": "Fix it."}]},
            {
                "role": "assistant",
                "content": [{"toolUse": {"toolUseId": "1", "name": "run", "input": {}}}],
            },
            {
                "role": "user",
                "content": [{"toolResult": {"toolUseId": "1", "content": [{"text": "ok"}]}}],
            },
        ],
        "toolConfig": {"tools": [{"toolSpec": {"name": "run", "inputSchema": {"json": {}}}}]},
    }
    named = headers("/model/m/converse", x_team="t", x_session_id="s")

    refused = decoded(exchange(service, named, body(json.dumps(bedrock).encode()))[-1])

    assert (status(refused), told(refused)["limit"]) == (429, "max_tool_calls")
    assert len(metadata_of(refused)["fingerprint"]) == 8
    assert sample(service, "unnarrowed_total", policy="agents", reason="no_choice") == 1
    assert sample(service, "requests_total", policy="agents", mode="enforce", action="reject") == 1
    assert sample(service, "requests_total", policy="agents", mode="enforce", action="allow") == 0
    narrowed = {
        "policy": "agents",
        "mode": "enforce",
        "limit": "max_tool_calls",
        "action": "narrow",
    }
    assert sample(service, "session_limits_total", **narrowed) == 0


def test_narrowed_request_may_also_get_a_note() -> None:
    limits: dict[str, Any] = {
        "max_steps": 3,
        "max_tool_calls": 1,
        "max_tool_calls_mode": "finish",
        "escalate": {"steer": {"max_steps": 1}},
    }
    service = make_service(limited(**limits))

    sent_on = changed(ask(service, turns(1)))

    assert sent_on["tool_choice"] == "none"
    assert "2 of this session's 3 steps are left" in json.dumps(sent_on["messages"])


def test_explain_lists_the_keys_of_a_session(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "policy.json"
    file.write_text(
        json.dumps(limited(max_steps=1, session={"keys": ["header:x-run", "body:/run"]}))
    )

    assert (
        main(
            [
                "explain",
                "--policy",
                str(file),
                "-H",
                "x-team: t",
                "-d",
                "{}",
                "http://h/v1/chat/completions",
            ]
        )
        == 0
    )

    printed = capsys.readouterr().out
    assert find_missing(printed, "header:x-run, or", "body:/run", "unnamed") == []


@pytest.mark.parametrize(
    ("mode", "limits", "decision"),
    [
        ("enforce", {}, "allow, steer from 3 times the first input"),
        (
            "shadow",
            {"max_steps": 2},
            (
                "allow up to 2 steps, then report: would reject with 429, report: would steer from "
                "3 times the first input"
            ),
        ),
    ],
)
def test_explain_says_when_input_has_grown(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    mode: str,
    limits: dict[str, Any],
    decision: str,
) -> None:
    file = tmp_path / "p.json"
    file.write_text(json.dumps(limited(mode, max_input_growth=3, **limits)))
    asked = ["-H", "x-team: t", "-H", "x-session-id: s", "-d", "{}", "http://h/v1/messages"]

    assert main(["explain", "--policy", str(file), *asked]) == 0
    assert f"decision     {decision}\n" in capsys.readouterr().out


class _CallsStore(RecordingStore):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def hit(self, *asked: Any) -> Any:  # noqa: ANN401  # as in RecordingStore
        self.calls.append("hit")
        return super().hit(*asked)

    def push(self, *asked: Any) -> Any:  # noqa: ANN401  # as in RecordingStore
        self.calls.append("push")
        return super().push(*asked)


@pytest.mark.parametrize(
    ("named", "spec", "expected"),
    [
        (True, {"loop_detection": DETECTOR}, ["push"]),
        (False, {"loop_detection": DETECTOR}, ["push"]),
        (True, {"session_limits": {"max_steps": 9}}, ["hit"]),
        (False, {"session_limits": {"max_steps": 9}}, ["push", "hit"]),
        (False, {"session_limits": {"max_steps": 9}, "loop_detection": DETECTOR}, ["push", "hit"]),
    ],
)
def test_store_is_called_at_most_twice_per_request(
    named: bool, spec: dict[str, Any], expected: list[str]
) -> None:
    if named:
        spec = {**spec, "session": {"keys": ["header:x-session-id"]}}
    item = {"id": "p", "spec": {"selector": ANY, "limit_keys": ["header:x-team"], **spec}}
    store = _CallsStore()

    ask(make_service(item, store=store), turns(7), session="s" if named else "")

    assert store.calls == expected
