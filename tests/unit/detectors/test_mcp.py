"""Similarity `mcp`: which JSON-RPC requests are equal calls, and how a call is refused."""

import json
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import given, strategies as st

from extproc.apis.json_rpc import MAX_ID
from extproc.ext_proc.service import Service
from extproc.pb.external_processor_pb2 import ProcessingResponse
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.messages import body, headers
from tests.support.service import (
    decoded,
    exchange,
    headers_of,
    list_uncounted,
    make_service,
    sample,
)

TOOL_CALL = "tools/call"
_ids = count()


# Of a policy
def make_guard(*, uncountable: str = "allow", **loop: Any) -> Service:  # noqa: ANN401
    made = policy("p", ANY, similarity="mcp", **{"threshold_identical_requests": 2, **loop})
    made["spec"]["uncountable"] = uncountable
    return make_service(made)


def call(params: object, method: object = TOOL_CALL, **more: object) -> bytes:
    return json.dumps(
        {"jsonrpc": "2.0", "id": next(_ids), "method": method, "params": params, **more}
    ).encode()


def send(service: Service, data: bytes, accept: str = "application/json") -> ProcessingResponse:
    *_, last = exchange(service, headers(accept=accept), body(data))
    return decoded(last)


def is_refused(answer: ProcessingResponse) -> bool:
    return answer.HasField("immediate_response")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            {"name": "f", "arguments": {"a": 1, "b": [1.0]}},
            {"arguments": {"b": [1], "a": 1e0}, "name": "f"},
        ),
        ({"name": "f"}, {"name": "f", "arguments": {}}),
        ({"name": "f"}, {"name": "f", "arguments": None}),
        (
            {"name": "f", "_meta": {"progressToken": 1}},
            {"name": "f", "_meta": {"progressToken": 2}},
        ),
        ({"name": "f", "task": {"ttl": 1}}, {"name": "f"}),
        ({"name": "\u00fc"}, {"name": "\u00fc"}),
        ({"name": "f", "requestState": "s"}, {"name": "f", "requestState": "s"}),
    ],
)
def test_call_is_its_tool_and_arguments(one: object, other: object) -> None:
    service = make_guard()

    assert [is_refused(send(service, call(params))) for params in (one, other)] == [False, True]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"name": "f"}, {"name": "g"}),
        ({"name": "f", "arguments": {"page": 1}}, {"name": "f", "arguments": {"page": 2}}),
        ({"name": "f", "arguments": {"id": 1}}, {"name": "f", "arguments": {"id": 2}}),
        ({"name": "f", "arguments": {}}, {"name": "f", "arguments": []}),
        (
            {"name": "f", "inputResponses": {"q": "yes"}},
            {"name": "f", "inputResponses": {"q": "no"}},
        ),
        ({"name": "f"}, {"name": "f", "requestState": "s"}),
    ],
)
def test_other_arguments_or_answers_make_another_call(one: object, other: object) -> None:
    service = make_guard()

    assert not any(is_refused(send(service, call(params))) for params in (one, other))
    assert list_uncounted(service) == {}


def message(*parts: object, **more: object) -> dict[str, Any]:
    return {"message": {"messageId": next(_ids), "parts": parts, **more}}


@pytest.mark.parametrize(
    "methods",
    [("message/send", "message/send"), ("message/stream", "message/send"), ("SendMessage",) * 2],
)
def test_a2a_message_is_its_parts(methods: Sequence[str]) -> None:
    service = make_guard()
    first, second = methods
    text, data = {"kind": "text", "text": "Done?"}, {"kind": "data", "data": {"id": 1}}

    answers = [
        send(service, call(message({**text, "metadata": {"id": 1}}, data, taskId="a"), first)),
        send(service, call(message(text, {**data, "data": {"id": 2}}), second)),
        send(service, call(message(text, data, contextId="b", metadata={"x": 1}), second)),
    ]

    assert [is_refused(answer) for answer in answers] == [False, False, True]


NO_METHODS: list[object] = [
    "initialize",
    "server/discover",
    "tools/list",
    "ping",
    "notifications/cancelled",
    "TOOLS/CALL",
    "tasks/get",
    None,
    7,
    [],
]
NO_PARAMS: list[object] = [
    None,
    [],
    ["f"],
    "f",
    {},
    {"name": ""},
    {"name": None},
    {"name": ["f"]},
    {"arguments": {}},
]
NO_MESSAGES: list[object] = [{}, {"message": None}, {"message": []}, {"message": {"parts": {}}}]
NO_CALLS = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b'"tools/call"',
    b'{"jsonrpc": "2.0", "id": 1, "result": {}}',
    b'{"method": "tools/call"}',
    b'[{"method": "ping"}, 7, {"method": "notifications/initialized"}, {"id": 1, "result": {}}]',
    *[call({"name": "f"}, method) for method in NO_METHODS],
    *[call(params) for params in NO_PARAMS],
    *[call(params, "message/send") for params in NO_MESSAGES],
]


@pytest.mark.parametrize("data", NO_CALLS)
def test_other_methods_are_never_refused(data: bytes) -> None:
    service = make_guard(uncountable="reject")

    assert not any(is_refused(send(service, data)) for _ in range(3))
    assert list_uncounted(service) == {"not_a_call": 3}


def test_request_without_body_is_no_call() -> None:
    service = make_guard(uncountable="reject")

    for method in ("GET", "DELETE"):
        (reply,) = exchange(service, headers(method=method, end=True))
        assert not is_refused(decoded(reply))
    assert list_uncounted(service) == {"not_a_call": 2}


@pytest.mark.parametrize(
    ("data", "reason", "status"),
    [
        (b" [%s]" % call({"name": "f"}), "batch", 400),
        (b"[%s, %s]" % (call({}, "ping"), call(message(), "message/send")), "batch", 400),
        (b"[" + b",".join([b"7"] * 5_001) + b"]", "inspect_limit", 413),
        (call(message(*[{}] * 5_001), "SendMessage"), "inspect_limit", 413),
        (call({"name": "f", "arguments": [[]] * 200_000}), "inspect_limit", 413),
        (call({"name": "f", "arguments": "x" * 2**20}), "inspect_limit", 413),
        (b"[" * 100_000, "not_json", 400),
        (
            b'{"method": "tools/call", "params": {"name": "f", "arguments": %s1%s}}'
            % (b"[" * 9_999, b"]" * 9_999),
            "not_json",
            400,
        ),
        (
            b'{"method": "tools/call", "params": {"name": "f", "arguments": %s}}' % (b"9" * 700),
            "not_json",
            400,
        ),
        (b'{"method": "tools/call", "params": {"name": "\xff"}}', "not_json", 400),
        (b'{"method": "tools/call", "id": "\xff", "params": {"name": "f"}}', "not_json", 400),
        (b'{"method": "tools/call"', "not_json", 400),
        (b"[1", "not_json", 400),
    ],
    ids=[
        "batch of one",
        "batch",
        "long batch",
        "many parts",
        "many arrays",
        "long",
        "open arrays",
        "deep",
        "long number",
        "tool not UTF-8",
        "id not UTF-8",
        "cut off",
        "batch cut off",
    ],
)
def test_batches_and_unreadable_calls_are_uncounted(data: bytes, reason: str, status: int) -> None:
    service, strict = make_guard(), make_guard(uncountable="reject")

    answers = [send(service, data) for _ in range(3)]
    refusal = send(strict, data)

    assert not any(map(is_refused, answers))
    assert list_uncounted(service) == {reason: 3}
    assert refusal.immediate_response.status.code == status
    assert sample(service, "fail_open_total", reason="internal_error") == 0


@pytest.mark.parametrize(
    "identity",
    [
        "1",
        "-7",
        "1.50",
        "1e3",
        '"a"',
        '"\\u00fc\\n"',
        '""',
        "null",
        "9" * MAX_ID,
        f'"{"x" * (MAX_ID - 2)}"',
    ],
)
def test_refusal_has_the_id_of_the_request(identity: str) -> None:
    service = make_guard()

    for own in ("0", identity):
        answer = send(
            service, b'{"id": %s, "method": "tools/call", "params": {"name": "f"}}' % own.encode()
        )

    refusal = answer.immediate_response
    assert refusal.status.code == 200
    assert refusal.body.startswith(b'{"jsonrpc": "2.0", "id": %s, "result": {' % identity.encode())
    assert json.loads(refusal.body)["result"]["isError"] is True


@pytest.mark.parametrize(
    "identity", ["true", "{}", "[1]", f'"{"x" * (MAX_ID - 1)}"', "9" * 700, None]
)
def test_call_without_valid_id_gets_http_error(identity: str | None) -> None:
    """A notification, or an id that JSON-RPC does not know or that is too long to repeat."""
    service = make_guard()
    field = f'"id": {identity}, ' if identity is not None else ""
    data = f'{{{field}"method": "tools/call", "params": {{"name": "f"}}}}'.encode()

    send(service, data)
    refusal = send(service, data).immediate_response

    assert refusal.status.code == 429
    assert json.loads(refusal.body)["error"]["message"].startswith(
        "Loop detected: f has been called 2 times"
    )


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "application/json"),
        ("*/*", "application/json"),
        ("application/json, text/event-stream", "application/json"),
        ("text/event-stream, */*;q=0.1", "application/json"),
        ("text/event-stream", "text/event-stream"),
        ("Text/Event-Stream", "text/event-stream"),
        ("Text/Event-Stream, Application/JSON", "application/json"),
    ],
)
def test_refusal_has_an_accepted_content_type(accept: str, content_type: str) -> None:
    service = make_guard()

    for _ in range(2):
        answer = send(service, call({"name": "f"}), accept=accept)

    assert headers_of(answer)["content-type"] == content_type
    assert answer.immediate_response.body.startswith(
        b"event: message\ndata: {" if "event" in content_type else b"{"
    )


def test_message_names_the_tool_without_arguments() -> None:
    service = make_guard(tools={"f*": {"reason": " Ask a human. "}})

    for _ in range(2):
        answer = send(service, call({"name": "f" * 10_000, "arguments": {"key": "hidden"}}))

    text = json.loads(answer.immediate_response.body)["result"]["content"][0]["text"]
    assert text.startswith(
        f"Loop detected: {'f' * 63}\u2026 has been called 2 times with the same arguments within "
    )
    assert text.endswith(
        ", and was refused. Ask a human. Repeating it will be refused again. "
        "To continue, use other arguments, try another way, or finish with the result you have so "
        "far."
        " (recursive_loop_detected)"
    )
    assert "hidden" not in text


def test_tools_have_their_own_limits() -> None:
    service = make_guard(tools={"slow": {"threshold": 4}, "wait*": {"allow": True}})

    answers = {
        name: [is_refused(send(service, call({"name": name}))) for _ in range(5)]
        for name in ("f", "slow", "wait_a")
    }

    assert answers["f"] == [False] + [True] * 4
    assert answers["slow"] == [False] * 3 + [True] * 2
    assert answers["wait_a"] == [False] * 5
    assert list_uncounted(service) == {"allowed_tool": 5}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "arguments", "parts", "message", "x"]), inner)
    ),
    max_leaves=8,
)


@given(
    st.fixed_dictionaries(
        {}, optional={name: JSON | st.just(TOOL_CALL) for name in ("id", "method", "params")}
    )
)
def test_any_json_gets_one_answer(request: dict[str, Any]) -> None:
    service = make_guard()
    data = json.dumps(request).encode()

    answers = [send(service, data) for _ in range(2)]

    assert sample(service, "fail_open_total", reason="internal_error") == 0
    assert is_refused(answers[1]) == (list_uncounted(service) == {})


NEW_VERSION = "2026-07-28"
F = {"name": "f"}


def send_with(service: Service, data: bytes, **claims: Any) -> list[ProcessingResponse]:  # noqa: ANN401  # headers
    return [decoded(answer) for answer in exchange(service, headers(**claims), body(data))]


@pytest.mark.parametrize(
    ("claims", "trust"),
    [
        *(
            (claims, trust)
            for trust in (False, True)
            for claims in (
                {"mcp_method": "tools/list"},
                {"mcp_method": "tools/call", "mcp_name": "allowed"},
                {"mcp_method": "tools/call"},
                {"mcp_method": "tools/call", "mcp_name": "=?base64?!?="},
                {"mcp_method": "tools/list", "mcp_protocol_version": "2025-06-18"},
                {"mcp_method": "tools/list", "mcp_protocol_version": "9"},
                {"mcp_method": "tools/call", "mcp_name": "g", "mcp_protocol_version": NEW_VERSION},
            )
        ),
        # a client chooses the version, so only a policy that trusts its server goes by it
        ({"mcp_method": "ping", "mcp_protocol_version": NEW_VERSION}, False),
        (
            {
                "mcp_method": "tools/call",
                "mcp_name": "allowed",
                "mcp_protocol_version": NEW_VERSION,
            },
            False,
        ),
    ],
)
def test_false_headers_hide_no_loop(claims: dict[str, str], trust: bool) -> None:
    service = make_guard(tools={"allowed": {"allow": True}}, trust_headers=trust)

    refused = [is_refused(send_with(service, call(F), **claims)[-1]) for _ in range(3)]

    assert refused == [False, True, True]
    assert sample(service, "header_mismatch_total", policy="p") == 3


@pytest.mark.parametrize(
    ("claims", "data"),
    [
        ({"mcp_method": "tools/call", "mcp_name": "f"}, call(F)),
        ({"mcp_method": "tools/call", "mcp_name": "=?base64?w7w=?="}, call({"name": "\u00fc"})),
        ({"mcp_method": "tools/call", "mcp_name": "=?BASE64?w7w=?="}, call({"name": "\u00fc"})),
        ({"mcp_method": "tools/list"}, call({}, "tools/list")),
        (
            {"mcp_method": "resources/read", "mcp_name": "file:///a"},
            call({"uri": "file:///a"}, "resources/read"),
        ),
        ({"mcp_method": "ping"}, b"no json"),
        ({"mcp_method": "ping"}, b""),
        ({"mcp_method": "ping"}, b'{"id": 1, "result": {}}'),
    ],
)
def test_matching_headers_are_not_reported(claims: dict[str, str], data: bytes) -> None:
    service = make_guard()

    send_with(service, data, mcp_protocol_version=NEW_VERSION, **claims)

    assert sample(service, "header_mismatch_total", policy="p") == 0


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"mcp_method": "tasks/get", "mcp_name": "t"}, "not_a_call"),
        ({"mcp_method": "tools/list"}, "not_a_call"),
        ({"mcp_method": "tools/call", "mcp_name": "allowed"}, "allowed_tool"),
    ],
)
def test_trusted_header_decides_before_the_body(claims: dict[str, str], reason: str) -> None:
    """No body is waited for, and no session id is needed."""
    service = make_guard(tools={"allowed": {"allow": True}}, trust_headers=True)

    answers = send_with(service, call(F), mcp_protocol_version=NEW_VERSION, **claims)
    later = [
        is_refused(
            send_with(
                service,
                call(F),
                mcp_protocol_version=NEW_VERSION,
                mcp_method=TOOL_CALL,
                mcp_name="f",
            )[-1]
        )
        for _ in range(2)
    ]

    assert [answer.WhichOneof("response") for answer in answers] == ["request_headers"]
    assert list_uncounted(service) == {reason: 1}
    assert later == [False, True]


def test_each_detector_decides_whether_to_trust_headers() -> None:
    trusting = {
        "similarity": "mcp",
        "window_seconds": 60,
        "threshold_identical_requests": 2,
        "trust_headers": True,
    }
    made = policy("p", ANY)
    made["spec"]["loop_detection"] = [
        {"name": "a", "enabled": True, **trusting},
        {"name": "b", "enabled": True, **trusting, "trust_headers": False},
    ]
    service = make_service(made)

    lying = {"mcp_method": "ping", "mcp_protocol_version": NEW_VERSION}
    assert [is_refused(send_with(service, call(F), **lying)[-1]) for _ in range(2)] == [False, True]
