"""Refusals as each API writes its errors, byte for byte what its clients look for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.answers.apis import find_api
from extproc.answers.apis.api import Question, Refusal, read_question
from extproc.decision import Framed
from extproc.request import HttpRequest
from tests.documents import policy
from tests.messages import body, headers
from tests.test_service import FailingStore, decoded, exchange, headers_of, make_service, repeat

ANY = {"pathPrefix": "/"}
MESSAGE = "Loop detected: \u00fc. (recursive_loop_detected)"
DETAIL = {"error": "recursive_loop_detected", "message": MESSAGE, "cooldown_seconds": 60}
ERROR = {"message": MESSAGE, "type": "loop_detected", "param": None, "code": "recursive_loop_detected"}
PLAIN = {"error": ERROR, "detail": DETAIL}
ANTHROPIC = {"type": "error", **PLAIN}
BEDROCK = {"message": MESSAGE, **PLAIN}
INFO = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "RECURSIVE_LOOP_DETECTED", "domain": "loopguard"}
GEMINI = {**PLAIN, "error": {**ERROR, "code": 429, "status": "RESOURCE_EXHAUSTED", "details": [INFO]}}
RPC_ERROR = {"code": -32000, "message": MESSAGE, "data": {"type": "loop_detected", "code": "recursive_loop_detected", **DETAIL}}


def frame(path: str, sent: Mapping[str, bytes] | None = None, content: bytes | None = None, *, status: int = 429) -> Framed:
    """A refusal of a request."""
    question = read_question(content)
    refusal = Refusal(status, MESSAGE, "loop_detected", "recursive_loop_detected", DETAIL)
    return find_api(HttpRequest("POST", path, headers=sent), question).write_error(refusal, question)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/chat/completions", PLAIN),
        ("/v1/responses", PLAIN),
        ("/v1/threads/thread_1/messages", PLAIN),
        ("/v1beta/openai/chat/completions", PLAIN),
        ("/anything", PLAIN),
        ("/v1/messages?beta=true", ANTHROPIC),
        ("/v1/messages/count_tokens", ANTHROPIC),
        ("/proxy/v1/messages", ANTHROPIC),
        ("/v1/projects/p/locations/l/publishers/anthropic/models/claude:streamRawPredict", ANTHROPIC),
        ("/v1beta/models/gemini:generateContent", GEMINI),
        ("/v1beta/models/gemini:streamGenerateContent?alt=sse", GEMINI),
        ("/v1/projects/p/locations/l/publishers/google/models/gemini:countTokens", GEMINI),
        ("/v1beta/models/m:batchEmbedContents", GEMINI),
        ("/model/anthropic.claude-v2%3A1/converse", BEDROCK),
        ("/model/arn%3Aaws%3Abedrock%3A%3A1%3Aprofile%2Fm/converse-stream", BEDROCK),
        ("/model/m/invoke", BEDROCK),
        ("/model/m/invoke-with-response-stream", BEDROCK),
        ("/model/converse", PLAIN),
    ],
)
def test_the_path_says_which_api_is_called(path: str, expected: Mapping[str, Any]) -> None:
    """Its last steps are enough, wherever a gateway has it."""
    framed = frame(path)

    assert (framed.status, framed.content_type, json.loads(framed.body)) == (429, "application/json", expected)


@pytest.mark.parametrize(
    ("sent", "content", "expected"),
    [
        ({"anthropic-version": b"2023-06-01"}, None, ANTHROPIC),
        ({}, b'{"contents": []}', GEMINI),
        ({}, b'{"messages": [], "model": "m"}', PLAIN),
        ({}, b'{"jsonrpc": "2.0", "id": 7}', {"jsonrpc": "2.0", "id": 7, "error": RPC_ERROR}),
        ({}, b'{"jsonrpc": "2.0", "id": "a\\u0062"}', {"jsonrpc": "2.0", "id": "ab", "error": RPC_ERROR}),
        ({}, b'{"jsonrpc": "2.0", "id": "\xff"}', {"jsonrpc": "2.0", "id": None, "error": RPC_ERROR}),
        ({}, b'{"jsonrpc": "2.0", "id": {}}', {"jsonrpc": "2.0", "id": None, "error": RPC_ERROR}),
        ({}, b'{"jsonrpc": "2.0", "id": %s}' % (b"[" * 99 + b"]" * 99), {"jsonrpc": "2.0", "id": None, "error": RPC_ERROR}),
        ({}, b'{"jsonrpc": "2.0"}', {"jsonrpc": "2.0", "id": None, "error": RPC_ERROR}),
        ({}, b'{"contents": [', PLAIN),
        ({}, b"[7]", PLAIN),
        ({}, b"\xff", PLAIN),
    ],
)
def test_headers_and_body_say_it_where_the_path_does_not(
    sent: Mapping[str, bytes], content: bytes | None, expected: Mapping[str, Any]
) -> None:
    """A header of one API's clients, or a key of one API's bodies; a body that cannot be read says nothing."""
    assert json.loads(frame("/llm", sent, content).body) == expected


@pytest.mark.parametrize("content_type", [b"application/grpc", b"application/grpc+proto", b"application/grpc; a=b"])
def test_grpc_gets_words(content_type: bytes) -> None:
    """Envoy makes them the message of the RPC's status."""
    framed = frame("/v1/messages", {"content-type": content_type})

    assert (framed.content_type, framed.body) == ("text/plain", MESSAGE.encode())


def test_what_only_starts_like_grpc_is_not_grpc() -> None:
    """gRPC-Web has another framing, of which Envoy takes care elsewhere."""
    assert json.loads(frame("/x", {"content-type": b"application/grpc-web"}).body) == PLAIN


@pytest.mark.parametrize(
    ("status", "gemini", "bedrock"),
    [
        (400, "INVALID_ARGUMENT", "ValidationException"),
        (403, "PERMISSION_DENIED", "AccessDeniedException"),
        (422, "FAILED_PRECONDITION", "ValidationException"),
        (429, "RESOURCE_EXHAUSTED", "ThrottlingException"),
        (503, "UNAVAILABLE", "ServiceUnavailableException"),
        (599, "INTERNAL", "InternalServerException"),
    ],
)
def test_errors_have_the_names_of_their_status(status: int, gemini: str, bedrock: str) -> None:
    """A client of Gemini or Bedrock tells errors apart by name, and retries what is called throttled."""
    error = json.loads(frame("/models/m:generateContent", status=status).body)["error"]

    assert (error["code"], error["status"]) == (status, gemini)
    assert frame("/model/m/converse", status=status).headers == (("x-amzn-errortype", bedrock),)


@pytest.mark.parametrize(
    ("path", "message_at"),
    [
        ("/v1/chat/completions", ("error", "message")),
        ("/v1/messages", ("error", "message")),
        ("/v1beta/models/m:generateContent", ("error", "message")),
        ("/model/m/converse", ("message",)),
    ],
)
def test_all_refusals_have_the_shape_of_the_api(path: str, message_at: tuple[str, ...]) -> None:
    """Of a loop, of what cannot be counted, of a store that is down: the reason and its code stand where clients look."""
    uncountable = policy("p", ANY, similarity="turns")
    uncountable["spec"]["uncountable"] = "reject"
    down = make_service(policy("p", ANY), store=FailingStore(), on_store_error="reject")
    answers = {
        "recursive_loop_detected": repeat(make_service(policy("p", ANY)), headers(path, end=True), times=3),
        "not_json": decoded(exchange(make_service(uncountable), headers(path), body(b"{"))[-1]),
        "store_unavailable": decoded(exchange(down, headers(path, end=True))[-1]),
    }

    for code, answer in answers.items():
        found = json.loads(answer.immediate_response.body)
        for key in message_at:
            found = found[key]
        assert f"({code})" in found


def test_what_cannot_be_counted_of_json_rpc_is_refused_as_an_error_of_it() -> None:
    """Under the id of the request, where that can be read: a client shows its program nothing else."""
    document = policy("p", ANY, similarity="mcp")
    document["spec"]["uncountable"] = "reject"
    parts = b",".join([b"{}"] * 5_001)
    call = b'{"jsonrpc": "2.0", "id": 7, "method": "SendMessage", "params": {"message": {"parts": [%s]}}}' % parts

    answer = decoded(exchange(make_service(document), headers(), body(call))[-1]).immediate_response

    assert answer.status.code == 413
    found = json.loads(answer.body)
    assert (found["jsonrpc"], found["id"]) == ("2.0", 7)
    assert found["error"]["message"].endswith("(inspect_limit).")


def test_a_header_of_the_api_goes_with_the_refusal() -> None:
    """Bedrock's clients read there what kind of error it is."""
    answer = repeat(make_service(policy("p", ANY)), headers("/model/m/converse", end=True), times=3)

    assert headers_of(answer)["x-amzn-errortype"] == "ThrottlingException"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ({}, 429),
        ({"user_agent": "OpenAI/Python 3.54.0"}, 429),
        ({"user_agent": "ai/6.0.326 ai-sdk/provider-utils/4.0.66 runtime/node.js/v20.20.2"}, 400),
        ({"user_agent": "ai/5.0.0 ai-sdk/openai/2.0.0 ai-sdk/provider-utils/3.0.0 runtime/browser"}, 400),
        ({"user_agent": "Boto3/1.44.5 md/Botocore#1.44.5", "amz_sdk_request": "attempt=1; max=3"}, 400),
        ({"x_goog_api_client": "google-genai-sdk/2.32.0 gl-node/v20.20.2"}, 400),
        ({"x_goog_api_client": "gl-java/17 gapic/1.0"}, 429),
        ({"user_agent": "cohere/7.3.1", "x_fern_sdk_name": "cohere"}, 400),
    ],
)
def test_the_status_is_one_that_the_client_does_not_retry(sent: dict[str, Any], status: int) -> None:
    """`auto` is 429, and 400 for clients that are known to retry that; a status of the operator's choice holds for all."""
    chosen, fixed = (make_service(policy("p", ANY, reject_status=choice)) for choice in ("auto", 418))

    answers = [repeat(service, headers(end=True, **sent), times=3).immediate_response for service in (chosen, fixed)]

    assert [answer.status.code for answer in answers] == [status, 418]


_PIECES = st.sampled_from(
    ["/model/", "/v1/messages", ":generateContent", "/converse", "/invoke", "%2F", "m", "\n", "/publishers"]
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=2)
)
_KEYS = st.sampled_from(["model", "stream", "messages", "contents", "jsonrpc", "id", "input"])


@given(
    st.lists(_PIECES).map("".join),
    st.dictionaries(_KEYS, _JSON).map(lambda sent: json.dumps(sent).encode()) | st.binary() | st.none(),
    st.integers(400, 599),
)
def test_whatever_a_client_sends_is_answered(path: str, content: bytes | None, status: int) -> None:
    """No request keeps its own refusal from being written, and it is JSON with the message in it."""
    framed = frame(f"/{path}", content=content, status=status)

    assert framed.status == status
    found = json.loads(framed.body.decode(), parse_constant=pytest.fail)
    assert found.get("message", found["error"]["message"]) == MESSAGE


def test_a_question_is_read_from_any_bytes() -> None:
    """Of a body that is no object nothing is known."""
    assert all(read_question(content) == Question() for content in (None, b"", b"[]", b"\xff\xfe", b"[" * 10_000))
