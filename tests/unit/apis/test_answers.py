"""Refusals as each API writes its errors and answers."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, strategies as st
from pydantic import TypeAdapter

from extproc.apis import find_endpoint
from extproc.apis.api import Completion, Question, Refusal
from extproc.decision import Framed
from extproc.ext_proc.answers.let_pass import STEERED, replace_body
from extproc.ext_proc.answers.metadata import SESSIONS, write_metadata, write_sessions
from extproc.pb.external_processor_pb2 import ProcessingResponse
from extproc.request.http import HttpRequest
from extproc.request.notes import ANSWER
from tests.support.documents import policy
from tests.support.looping import looping
from tests.support.messages import body, headers
from tests.support.service import (
    FailingStore,
    ask,
    decoded,
    exchange,
    headers_of,
    make_service,
    metadata_of,
    repeat,
    sample,
)

ANY = {"pathPrefix": "/"}
MESSAGE = "Loop detected: \u00fc. (recursive_loop_detected)"
DETAIL = {"error": "recursive_loop_detected", "message": MESSAGE, "cooldown_seconds": 60}
ERROR = {
    "message": MESSAGE,
    "type": "loop_detected",
    "param": None,
    "code": "recursive_loop_detected",
}
PLAIN = {"error": ERROR, "detail": DETAIL}
ANTHROPIC = {"type": "error", **PLAIN}
BEDROCK = {"message": MESSAGE, **PLAIN}
INFO = {
    "@type": "type.googleapis.com/google.rpc.ErrorInfo",
    "reason": "RECURSIVE_LOOP_DETECTED",
    "domain": "loopguard",
}
GEMINI = {
    **PLAIN,
    "error": {**ERROR, "code": 429, "status": "RESOURCE_EXHAUSTED", "details": [INFO]},
}
RPC_ERROR = {
    "code": -32000,
    "message": MESSAGE,
    "data": {"type": "loop_detected", "code": "recursive_loop_detected", **DETAIL},
}


def frame(
    path: str,
    sent: Mapping[str, bytes] | None = None,
    content: bytes | None = None,
    *,
    status: int = 429,
) -> Framed:
    question = Question(HttpRequest("POST", path, headers=sent), content)
    refusal = Refusal(status, MESSAGE, "loop_detected", "recursive_loop_detected", DETAIL)
    return find_endpoint(question).write_error(refusal, question)


def complete(path: str, content: bytes | None) -> Framed | None:
    question = Question(HttpRequest("POST", path), content)
    completes = find_endpoint(question).complete
    return completes and completes(
        Completion(MESSAGE, question.model, "1f", 1_750_000_000), question
    )


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
        (
            "/v1/projects/p/locations/l/publishers/anthropic/models/claude:streamRawPredict",
            ANTHROPIC,
        ),
        ("/v1beta/models/gemini:generateContent", GEMINI),
        ("/v1beta/models/gemini:streamGenerateContent?alt=sse", GEMINI),
        ("/v1/projects/p/locations/l/publishers/google/models/gemini:countTokens", GEMINI),
        ("/v1beta/models/m:batchEmbedContents", GEMINI),
        ("/model/anthropic.claude-v2%3A1/converse", BEDROCK),
        ("/model/arn%3Aaws%3Abedrock%3A%3A1%3Aprofile%2Fm/converse-stream", BEDROCK),
        ("/model/m/invoke", BEDROCK),
        ("/model/m/invoke-with-response-stream", BEDROCK),
        ("/model/converse", PLAIN),
        ("/api/chat", PLAIN),
    ],
)
def test_path_tells_the_api(path: str, expected: Mapping[str, Any]) -> None:
    framed = frame(path)

    assert (framed.status, framed.content_type, json.loads(framed.body)) == (
        429,
        "application/json",
        expected,
    )


@pytest.mark.parametrize(
    ("sent", "content", "expected"),
    [
        ({"anthropic-version": b"2023-06-01"}, None, ANTHROPIC),
        ({"content-type": b"application/grpc-web"}, None, PLAIN),  # it has another framing
        ({}, b'{"contents": []}', GEMINI),
        ({}, b'{"messages": [], "model": "m"}', PLAIN),
        ({}, b'{"jsonrpc": "2.0", "id": 7}', {"jsonrpc": "2.0", "id": 7, "error": RPC_ERROR}),
        (
            {},
            b'{"jsonrpc": "2.0", "id": "a\\u0062"}',
            {"jsonrpc": "2.0", "id": "ab", "error": RPC_ERROR},
        ),
        (
            {},
            b'{"jsonrpc": "2.0", "id": "\xff"}',
            {"jsonrpc": "2.0", "id": None, "error": RPC_ERROR},
        ),
        ({}, b'{"jsonrpc": "2.0", "id": {}}', {"jsonrpc": "2.0", "id": None, "error": RPC_ERROR}),
        (
            {},
            b'{"jsonrpc": "2.0", "id": %s}' % (b"[" * 99 + b"]" * 99),
            {"jsonrpc": "2.0", "id": None, "error": RPC_ERROR},
        ),
        ({}, b'{"jsonrpc": "2.0"}', {"jsonrpc": "2.0", "id": None, "error": RPC_ERROR}),
        ({}, b'{"contents": [', PLAIN),
        ({}, b"[7]", PLAIN),
        ({}, b"\xff", PLAIN),
    ],
)
def test_headers_and_body_tell_api_of_unknown_path(
    sent: Mapping[str, bytes], content: bytes | None, expected: Mapping[str, Any]
) -> None:
    assert json.loads(frame("/llm", sent, content).body) == expected


@pytest.mark.parametrize(
    "content_type", [b"application/grpc", b"application/grpc+proto", b"Application/gRPC; a=b"]
)
def test_grpc_gets_plain_text(content_type: bytes) -> None:
    framed = frame("/v1/messages", {"content-type": content_type})

    assert (framed.content_type, framed.body) == ("text/plain", MESSAGE.encode())


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
def test_gemini_and_bedrock_errors_are_named_by_status(
    status: int, gemini: str, bedrock: str
) -> None:
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
def test_all_refusals_have_the_shape_of_their_api(path: str, message_at: tuple[str, ...]) -> None:
    uncountable = policy("p", ANY, similarity="turns")
    uncountable["spec"]["uncountable"] = "reject"
    down = make_service(policy("p", ANY), store=FailingStore(), on_store_error="reject")
    answers = {
        "recursive_loop_detected": repeat(
            make_service(policy("p", ANY)), headers(path, end=True), times=3
        ),
        "not_json": ask(make_service(uncountable), b"{", path),
        "store_unavailable": decoded(exchange(down, headers(path, end=True))[-1]),
    }

    for code, answer in answers.items():
        found = json.loads(answer.immediate_response.body)
        for key in message_at:
            found = found[key]
        assert f"({code})" in found


def test_uncountable_json_rpc_gets_an_error_with_its_id() -> None:
    document = policy("p", ANY, similarity="mcp")
    document["spec"]["uncountable"] = "reject"
    parts = b",".join([b"{}"] * 5_001)
    call = (
        b'{"jsonrpc": "2.0", "id": 7, "method": "SendMessage", "params": {"message": {"parts": '
        b"[%s]}}}"
    ) % parts

    answer = decoded(exchange(make_service(document), headers(), body(call))[-1]).immediate_response

    assert answer.status.code == 413
    found = json.loads(answer.body)
    assert (found["jsonrpc"], found["id"]) == ("2.0", 7)
    assert found["error"]["message"].endswith("(inspect_limit).")


def test_bedrock_refusal_has_its_error_header() -> None:
    answer = repeat(make_service(policy("p", ANY)), headers("/model/m/converse", end=True), times=3)

    assert headers_of(answer)["x-amzn-errortype"] == "ThrottlingException"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ({}, 429),
        ({"user_agent": "OpenAI/Python 3.54.0"}, 429),
        ({"user_agent": "ai/6.0.326 ai-sdk/provider-utils/4.0.66 runtime/node.js/v20.20.2"}, 400),
        (
            {
                "user_agent": (
                    "ai/5.0.0 ai-sdk/openai/2.0.0 ai-sdk/provider-utils/3.0.0 runtime/browser"
                )
            },
            400,
        ),
        (
            {
                "user_agent": "Boto3/1.44.5 md/Botocore#1.44.5",
                "amz_sdk_request": "attempt=1; max=3",
            },
            400,
        ),
        ({"x_goog_api_client": "google-genai-sdk/2.32.0 gl-node/v20.20.2"}, 400),
        ({"x_goog_api_client": "gl-java/17 gapic/1.0"}, 429),
        ({"user_agent": "cohere/7.3.1", "x_fern_sdk_name": "cohere"}, 400),
    ],
)
def test_auto_status_is_not_retried_by_the_client(sent: dict[str, Any], status: int) -> None:
    """`auto` is 429, or 400 for clients that are known to retry a 429."""
    chosen, fixed = (
        make_service(policy("p", ANY, reject_status=choice)) for choice in ("auto", 418)
    )

    answers = [
        repeat(service, headers(end=True, **sent), times=3).immediate_response
        for service in (chosen, fixed)
    ]

    assert [answer.status.code for answer in answers] == [status, 418]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ({}, 400),
        ({"user_agent": "OpenAI/Python 3.54.0"}, 400),
        ({"user_agent": "ai/6.0.326 ai-sdk/provider-utils/4.0.66 runtime/node.js/v20.20.2"}, 400),
        ({"user_agent": "claude-cli/2.0.65 (external, cli)"}, 429),
    ],
)
def test_auto_status_of_final_refusal_is_not_retried(sent: dict[str, Any], status: int) -> None:
    """`auto` is 400, or 429 for a client that stops at a 429 and shows what it says."""
    service = make_service(
        policy("p", ANY, similarity="turns", threshold_identical_requests=3, reject_status="auto")
    )

    answer = ask(service, looping(3), **sent)

    assert answer.immediate_response.status.code == status
    assert "Retry-After" not in headers_of(answer)
    assert headers_of(answer)["x-should-retry"] == "false"


@pytest.mark.parametrize(("similarity", "statuses"), [("turns", [404]), ("exact", [200, 200, 429])])
def test_mini_swe_agent_gets_404_for_final_refusals(similarity: str, statuses: list[int]) -> None:
    """mini-swe-agent, recognized by its prompt, retries a 400 for minutes.

    `make test-clients` runs the real program.
    """
    service = make_service(
        policy(
            "p", ANY, similarity=similarity, threshold_identical_requests=3, reject_status="auto"
        )
    )
    sent = looping(3).replace(
        b'"go"', b'"Then issue `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`."'
    )

    answers = [ask(service, sent) for _ in statuses]

    assert [answer.immediate_response.status.code or 200 for answer in answers] == statuses


_PIECES = st.sampled_from(
    [
        "/model/",
        "/v1/messages",
        ":generateContent",
        "/converse",
        "/invoke",
        "%2F",
        "m",
        "\n",
        "/publishers",
    ]
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=2),
)
_KEYS = st.sampled_from(
    [
        "model",
        "stream",
        "stream_options",
        "messages",
        "contents",
        "jsonrpc",
        "id",
        "anthropic_version",
    ]
)


@pytest.mark.slow
@given(
    st.lists(_PIECES).map("".join),
    st.dictionaries(_KEYS, _JSON).map(lambda sent: json.dumps(sent).encode())
    | st.binary()
    | st.none(),
    st.integers(400, 599),
)
def test_any_request_gets_its_refusal_written(
    path: str, content: bytes | None, status: int
) -> None:
    framed, completed = (
        frame(f"/{path}", content=content, status=status),
        complete(f"/{path}", content),
    )

    assert framed.status == status
    found = json.loads(framed.body.decode(), parse_constant=pytest.fail)
    assert found.get("message", found["error"]["message"]) == MESSAGE
    assert completed is None or completed.status == 200


BODY = b'{"model": "m", "messages": [], "stream": false}'
STREAM = (
    b'{"model": "m", "messages": [], "stream": true, "stream_options": {"include_usage": true}}'
)


def read_events(framed: Framed | None, *, named: bool = False) -> list[Any]:
    """What the events of a stream hold; a named one is called what its type says."""
    assert framed is not None
    assert (framed.status, framed.content_type) == (200, "text/event-stream")
    *events, end = framed.body.decode().split("\n\n")
    assert end == ""
    found = []
    for event in events:
        *names, data = event.split("\n")
        found.append(data.removeprefix("data: "))
        assert names == ([f"event: {json.loads(found[-1])['type']}"] if named else [])
    return [event if event == "[DONE]" else json.loads(event) for event in found]


def read_answer(framed: Framed | None) -> Any:  # noqa: ANN401  # JSON
    assert framed is not None
    assert (framed.status, framed.content_type) == (200, "application/json")
    return json.loads(framed.body)


@pytest.mark.slow
def test_chat_completion_is_valid_to_the_sdk() -> None:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    whole = ChatCompletion.model_validate(
        read_answer(complete("/v1/chat/completions", BODY)), strict=True
    )
    *events, end = read_events(complete("/v1/chat/completions", STREAM))
    chunks = [ChatCompletionChunk.model_validate(event, strict=True) for event in events]
    quiet = read_events(complete("/v1/chat/completions", b'{"model": "m", "stream": true}'))

    assert (whole.model, whole.choices[0].message.content, whole.choices[0].finish_reason) == (
        "m",
        MESSAGE,
        "stop",
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == MESSAGE
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, None, "stop"]
    assert (chunks[-1].choices, chunks[-1].usage is not None, end) == ([], True, "[DONE]")
    assert len(quiet) == len(events)


def test_text_completion_is_valid_to_the_sdk() -> None:
    from openai.types import Completion as OpenAICompletion

    whole = OpenAICompletion.model_validate(
        read_answer(complete("/v1/completions", BODY)), strict=True
    )
    *pieces, end = read_events(complete("/v1/completions", STREAM))

    assert whole.choices[0].text == MESSAGE
    assert [
        OpenAICompletion.model_validate(piece, strict=True).usage is None for piece in pieces
    ] == [True, False]
    assert (pieces[0]["choices"][0]["text"], end) == (MESSAGE, "[DONE]")


def test_response_is_valid_to_the_sdk() -> None:
    from openai.types.responses import Response, ResponseStreamEvent

    whole = Response.model_validate(read_answer(complete("/v1/responses", BODY)), strict=True)
    known: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
    events = [
        known.validate_python(event, strict=True)
        for event in read_events(complete("/v1/responses", STREAM), named=True)
    ]

    assert (whole.output_text, whole.status) == (MESSAGE, "completed")
    assert [event.sequence_number for event in events] == list(range(9))
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == MESSAGE


@pytest.mark.slow
def test_anthropic_message_is_valid_to_the_sdk() -> None:
    from anthropic.types import Message, RawMessageStreamEvent

    whole = Message.model_validate(read_answer(complete("/v1/messages", BODY)), strict=True)
    known: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
    path = "/v1/projects/p/locations/l/publishers/anthropic/models/claude%402:streamRawPredict"
    events = [
        known.validate_python(event, strict=True)
        for event in read_events(complete(path, b'{"stream":true}'), named=True)
    ]

    assert (whole.content[0].type, whole.stop_reason) == ("text", "end_turn")
    assert events[0].type == "message_start"
    assert events[0].message.model == "claude@2"
    assert events[-1].type == "message_stop"


@pytest.mark.slow
def test_gemini_content_is_valid_to_the_sdk() -> None:
    from google.genai.types import GenerateContentResponse

    path = "/v1beta/models/gemini-3:"
    found = [
        read_answer(complete(f"{path}generateContent", None)),
        *read_events(complete(f"{path}streamGenerateContent?alt=sse", None)),
        *read_answer(complete(f"{path}streamGenerateContent", None)),
    ]

    for content in found:
        answer = GenerateContentResponse.model_validate(content)
        assert (answer.text, answer.model_version) == (MESSAGE, "gemini-3")


def test_anthropic_on_bedrock_is_answered_in_its_format() -> None:
    """Other models on Bedrock have other formats, so no answer is made for them."""
    path, body = "/model/m/invoke", b'{"anthropic_version": "bedrock-2023-05-31"}'

    assert read_answer(complete(path, body))["content"] == [{"type": "text", "text": MESSAGE}]
    assert complete(path, b'{"inputText": "x"}') is None
    assert complete(f"{path}-with-response-stream", b"{}") is None


@pytest.mark.slow
def test_ollama_answer_is_streamed_by_default() -> None:
    import ollama

    whole = ollama.ChatResponse.model_validate(read_answer(complete("/api/chat", BODY)))
    framed = complete("/api/chat", b'{"model": "m"}')
    assert framed is not None
    lines = [ollama.ChatResponse.model_validate_json(line) for line in framed.body.splitlines()]
    text = ollama.GenerateResponse.model_validate(read_answer(complete("/api/generate", BODY)))

    assert (whole.message.content, whole.done, text.response) == (MESSAGE, True, MESSAGE)
    assert framed.content_type == "application/x-ndjson"
    assert [(line.message.content, line.done) for line in lines] == [(MESSAGE, False), ("", True)]
    assert complete("/api/chat", b'{"messages": []}') is None


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v1/chat/completions", None),
        ("/v1/chat/completions", b"[]"),
        ("/v1/chat/completions", b'{"messages": []}'),
        ("/v1/completions", None),
        ("/v1/responses", None),
        ("/v1/messages", None),
        ("/v1/messages/count_tokens", BODY),
        ("/v1beta/models/m:countTokens", BODY),
        ("/v1/embeddings", b'{"model": "m", "input": "x"}'),
        ("/anything", b'{"contents": []}'),
        ("/anything", b'{"messages": []}'),
    ],
)
def test_unanswerable_request_gets_no_completion(path: str, content: bytes | None) -> None:
    assert complete(path, content) is None


def test_chat_body_is_answered_on_any_path() -> None:
    assert read_answer(complete("/llm", BODY))["choices"][0]["message"]["content"] == MESSAGE


@pytest.mark.parametrize(
    "content",
    [
        b'{"model": "m", "stream_options": [%s1]}' % (b"[]," * 2_000),
        b'{"model": "%s"}' % (b"m" * 5_000),
        b'{"model": "m", "x": [%s1]}' % (b"1," * 1_000_001),
    ],
    ids=["a large value", "a long name", "many values"],
)
def test_question_reads_only_small_values(content: bytes) -> None:
    """Values that are longer than necessary count as missing."""
    question = Question(HttpRequest("POST", "/v1/chat/completions"), content)

    assert question.read("stream_options") is None
    assert question.model in ("m", "")
    assert (question.body is None) == (len(content) > 2**20)


@pytest.mark.parametrize("similarity", ["exact", "turns"])
def test_refusal_as_completion_is_reported_as_refusal(similarity: str) -> None:
    service = make_service(policy("p", ANY, similarity=similarity, refuse_as="completion"))
    turn = [{"role": "assistant", "content": "Action: a[]"}, {"role": "user", "content": "no"}]
    sent = json.dumps({"model": "m", "messages": turn * 3}).encode()

    answer = repeat(service, headers("/v1/chat/completions"), body(sent), times=3)

    immediate = answer.immediate_response
    assert (immediate.status.code, immediate.details) == (200, "loop_detected")
    assert headers_of(answer)["x-loopguard-policy"] == "p"
    assert json.loads(immediate.body)["choices"][0]["message"]["content"].startswith(
        f"{ANSWER}\nLoop detected: "
    )
    assert metadata_of(answer)["action"] == "reject"
    assert sample(service, "requests_total", policy="p", mode="enforce", action="reject") >= 1


@pytest.mark.parametrize(
    ("path", "sent"),
    [("/v1/embeddings", b'{"model": "m", "input": "x"}'), ("/v1/chat/completions", b"?")],
)
def test_refuse_as_completion_needs_a_model_call(path: str, sent: bytes) -> None:
    service = make_service(policy("p", ANY, refuse_as="completion", reject_status=422))

    immediate = repeat(service, headers(path), body(sent), times=3).immediate_response

    assert immediate.status.code == 422
    assert json.loads(immediate.body)["error"]["code"] == "recursive_loop_detected"


_LENGTHS = st.text(max_size=300) | st.sampled_from(
    ["x" * length for length in (127, 128, 16_383, 16_384)]
)


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers(-(2**53), 2**53)
            | st.floats(allow_nan=False)
            | _LENGTHS,
            lambda inner: st.dictionaries(st.text(max_size=5), inner, max_size=4),
            max_leaves=20,
        ),
        max_size=5,
    )
)
def test_metadata_is_written_as_protobuf_does(metadata: dict[str, Any]) -> None:
    expected = ProcessingResponse()
    expected.dynamic_metadata.update({"loopguard": metadata})

    assert ProcessingResponse.FromString(write_metadata(metadata)) == expected


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_384, 3_000_000])
@pytest.mark.parametrize("warning", ["", "loop_steer"])
def test_replaced_body_is_written_as_protobuf_does(size: int, warning: str) -> None:
    sent = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    expected = ProcessingResponse()
    expected.dynamic_metadata.update({"loopguard": {"count": 3}})
    common = expected.request_body.response
    warned = [("X-Fairvisor-Warning", warning)] if warning else []
    for name, value in [("x-loopguard-steered", "1"), ("content-length", str(size)), *warned]:
        option = common.header_mutation.set_headers.add(append_action="OVERWRITE_IF_EXISTS_OR_ADD")
        option.header.key, option.header.raw_value = name, value.encode()
    common.header_mutation.remove_headers.extend(
        ["content-md5", "digest", "content-digest", "repr-digest"]
    )
    common.body_mutation.body = sent

    assert (
        ProcessingResponse.FromString(
            b"".join(
                replace_body(
                    [sent[: size // 2], sent[size // 2 :]],
                    {"count": 3},
                    warning=warning,
                    marks=(STEERED,),
                )
            )
        )
        == expected
    )


@given(st.text(min_size=1, max_size=300) | st.integers(1, 2**17).map(lambda length: "x" * length))
def test_metadata_of_one_text_is_written_alike(text: str) -> None:
    assert write_sessions(text) == write_metadata({SESSIONS: text})
