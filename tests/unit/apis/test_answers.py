"""Refusals as each API writes its errors, byte for byte what its clients look for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
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
from tests.support.service import FailingStore, decoded, exchange, headers_of, make_service, metadata_of, repeat, sample

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
    question = Question(HttpRequest("POST", path, headers=sent), content)
    refusal = Refusal(status, MESSAGE, "loop_detected", "recursive_loop_detected", DETAIL)
    return find_endpoint(question).write_error(refusal, question)


def complete(path: str, content: bytes | None) -> Framed | None:
    """The same as an answer of the model."""
    question = Question(HttpRequest("POST", path), content)
    completes = find_endpoint(question).complete
    return completes and completes(Completion(MESSAGE, question.model, "1f", 1_750_000_000), question)


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
        ("/api/chat", PLAIN),
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


@pytest.mark.parametrize("content_type", [b"application/grpc", b"application/grpc+proto", b"Application/gRPC; a=b"])
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
    """Bedrock's clients read the kind of error from that header."""
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


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ({}, 400),
        ({"user_agent": "OpenAI/Python 3.54.0"}, 400),
        ({"user_agent": "ai/6.0.326 ai-sdk/provider-utils/4.0.66 runtime/node.js/v20.20.2"}, 400),
        ({"user_agent": "claude-cli/2.0.65 (external, cli)"}, 429),
    ],
)
def test_a_final_refusal_is_not_retried_by_anyone(sent: dict[str, Any], status: int) -> None:
    """Where waiting does not help, `auto` is 400, but for a client that stops at a 429 and shows what it says."""
    service = make_service(policy("p", ANY, similarity="turns", threshold_identical_requests=3, reject_status="auto"))

    answer = decoded(exchange(service, headers("/v1/chat/completions", **sent), body(looping(3)))[-1])

    assert answer.immediate_response.status.code == status
    assert "Retry-After" not in headers_of(answer)
    assert headers_of(answer)["x-should-retry"] == "false"


@pytest.mark.parametrize(("similarity", "statuses"), [("turns", [404]), ("exact", [200, 200, 429])])
def test_a_program_that_only_ends_on_404_gets_that_where_waiting_does_not_help(similarity: str, statuses: list[int]) -> None:
    """mini-swe-agent, recognized by its prompt, retries a 400 for minutes. `make test-clients` runs the real program."""
    service = make_service(policy("p", ANY, similarity=similarity, threshold_identical_requests=3, reject_status="auto"))
    sent = looping(3).replace(b'"go"', b'"Then issue `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`."')

    answers = [decoded(exchange(service, headers("/v1/chat/completions"), body(sent))[-1]) for _ in statuses]

    assert [answer.immediate_response.status.code or 200 for answer in answers] == statuses


_PIECES = st.sampled_from(
    ["/model/", "/v1/messages", ":generateContent", "/converse", "/invoke", "%2F", "m", "\n", "/publishers"]
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=2)
)
_KEYS = st.sampled_from(["model", "stream", "stream_options", "messages", "contents", "jsonrpc", "id", "anthropic_version"])


@given(
    st.lists(_PIECES).map("".join),
    st.dictionaries(_KEYS, _JSON).map(lambda sent: json.dumps(sent).encode()) | st.binary() | st.none(),
    st.integers(400, 599),
)
def test_whatever_a_client_sends_is_answered(path: str, content: bytes | None, status: int) -> None:
    """No request keeps its own refusal from being written, and it is JSON with the message in it."""
    framed, completed = frame(f"/{path}", content=content, status=status), complete(f"/{path}", content)

    assert framed.status == status
    found = json.loads(framed.body.decode(), parse_constant=pytest.fail)
    assert found.get("message", found["error"]["message"]) == MESSAGE
    assert completed is None or completed.status == 200


BODY = b'{"model": "m", "messages": [], "stream": false}'
STREAM = b'{"model": "m", "messages": [], "stream": true, "stream_options": {"include_usage": true}}'


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
    """What a whole answer holds."""
    assert framed is not None
    assert (framed.status, framed.content_type) == (200, "application/json")
    return json.loads(framed.body)


def test_a_chat_completion_is_one_to_the_sdk() -> None:
    """It has the fields, and the types, that the SDK's own model of it asks for; so has each chunk, and the usage if wanted."""
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    whole = ChatCompletion.model_validate(read_answer(complete("/v1/chat/completions", BODY)), strict=True)
    *events, end = read_events(complete("/v1/chat/completions", STREAM))
    chunks = [ChatCompletionChunk.model_validate(event, strict=True) for event in events]
    quiet = read_events(complete("/v1/chat/completions", b'{"model": "m", "stream": true}'))

    assert (whole.model, whole.choices[0].message.content, whole.choices[0].finish_reason) == ("m", MESSAGE, "stop")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == MESSAGE
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, None, "stop"]
    assert (chunks[-1].choices, chunks[-1].usage is not None, end) == ([], True, "[DONE]")
    assert len(quiet) == len(events)


def test_a_text_completion_is_one_to_the_sdk() -> None:
    """Whole, and as the one piece of a stream."""
    from openai.types import Completion as OpenAICompletion

    whole = OpenAICompletion.model_validate(read_answer(complete("/v1/completions", BODY)), strict=True)
    *pieces, end = read_events(complete("/v1/completions", STREAM))

    assert whole.choices[0].text == MESSAGE
    assert [OpenAICompletion.model_validate(piece, strict=True).usage is None for piece in pieces] == [True, False]
    assert (pieces[0]["choices"][0]["text"], end) == (MESSAGE, "[DONE]")


def test_a_response_is_one_to_the_sdk() -> None:
    """Each event is one that the SDK knows, in order; the last one holds the whole response."""
    from openai.types.responses import Response, ResponseStreamEvent

    whole = Response.model_validate(read_answer(complete("/v1/responses", BODY)), strict=True)
    known: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
    events = [known.validate_python(event, strict=True) for event in read_events(complete("/v1/responses", STREAM), named=True)]

    assert (whole.output_text, whole.status) == (MESSAGE, "completed")
    assert [event.sequence_number for event in events] == list(range(9))
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == MESSAGE


@pytest.mark.slow
def test_a_message_is_one_to_the_sdk() -> None:
    """Of Anthropic, also on Vertex AI, where the path names the model."""
    from anthropic.types import Message, RawMessageStreamEvent

    whole = Message.model_validate(read_answer(complete("/v1/messages", BODY)), strict=True)
    known: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
    path = "/v1/projects/p/locations/l/publishers/anthropic/models/claude%402:streamRawPredict"
    events = [
        known.validate_python(event, strict=True) for event in read_events(complete(path, b'{"stream":true}'), named=True)
    ]

    assert (whole.content[0].type, whole.stop_reason) == ("text", "end_turn")
    assert events[0].type == "message_start"
    assert events[0].message.model == "claude@2"
    assert events[-1].type == "message_stop"


def test_a_content_is_one_to_the_sdk() -> None:
    """Of Gemini: whole, as the only event of a stream, or as the only element of an array."""
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


def test_anthropic_on_bedrock_is_answered_in_its_own_language() -> None:
    """Other models on Bedrock have other formats, so no answer is made for them."""
    path, body = "/model/m/invoke", b'{"anthropic_version": "bedrock-2023-05-31"}'

    assert read_answer(complete(path, body))["content"] == [{"type": "text", "text": MESSAGE}]
    assert complete(path, b'{"inputText": "x"}') is None
    assert complete(f"{path}-with-response-stream", b"{}") is None


def test_ollama_streams_unless_told_otherwise() -> None:
    """Each line is one that the SDK can parse; on a path like Ollama's, a body without a model is not answered."""
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
def test_what_cannot_be_answered_is_refused(path: str, content: bytes | None) -> None:
    """The API is unknown, or has no such answers, or it is unclear whether a stream is wanted."""
    assert complete(path, content) is None


def test_a_chat_is_one_wherever_it_is_sent() -> None:
    """A body with messages and a model is answered, whatever the path says."""
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
def test_what_is_expensive_to_read_is_not_read(content: bytes) -> None:
    """A refusal costs little, whatever stands in the request: what is longer than it need be counts as missing."""
    question = Question(HttpRequest("POST", "/v1/chat/completions"), content)

    assert question.read("stream_options") is None
    assert question.model in ("m", "")
    assert (question.body is None) == (len(content) > 2**20)


@pytest.mark.parametrize("similarity", ["exact", "turns"])
def test_a_refusal_as_a_completion_is_still_a_refusal(similarity: str) -> None:
    """To the client it is an answer of the model; details, headers, metadata and metrics say what it is."""
    service = make_service(policy("p", ANY, similarity=similarity, refuse_as="completion"))
    turn = [{"role": "assistant", "content": "Action: a[]"}, {"role": "user", "content": "no"}]
    sent = json.dumps({"model": "m", "messages": turn * 3}).encode()

    answer = repeat(service, headers("/v1/chat/completions"), body(sent), times=3)

    immediate = answer.immediate_response
    assert (immediate.status.code, immediate.details) == (200, "loop_detected")
    assert headers_of(answer)["x-loopguard-policy"] == "p"
    assert json.loads(immediate.body)["choices"][0]["message"]["content"].startswith(f"{ANSWER}\nLoop detected: ")
    assert metadata_of(answer)["action"] == "reject"
    assert sample(service, "requests_total", policy="p", mode="enforce", action="reject") >= 1


@pytest.mark.parametrize(
    ("path", "sent"), [("/v1/embeddings", b'{"model": "m", "input": "x"}'), ("/v1/chat/completions", b"?")]
)
def test_a_request_that_is_not_to_a_model_is_refused_as_usual(path: str, sent: bytes) -> None:
    """It gets the policy's status and the error of its API."""
    service = make_service(policy("p", ANY, refuse_as="completion", reject_status=422))

    immediate = repeat(service, headers(path), body(sent), times=3).immediate_response

    assert immediate.status.code == 422
    assert json.loads(immediate.body)["error"]["code"] == "recursive_loop_detected"


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=300),
            lambda inner: st.dictionaries(st.text(max_size=5), inner, max_size=4),
            max_leaves=20,
        ),
        max_size=5,
    )
)
def test_metadata_is_what_protobuf_would_write(metadata: dict[str, Any]) -> None:
    """Our own bytes are read as the Struct that protobuf fills."""
    expected = ProcessingResponse()
    expected.dynamic_metadata.update({"loopguard": metadata})

    assert ProcessingResponse.FromString(write_metadata(metadata)) == expected


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_384, 3_000_000])
@pytest.mark.parametrize("warning", ["", "loop_steer"])
def test_a_body_is_replaced_as_protobuf_would_write_it(size: int, warning: str) -> None:
    """Our own bytes are read as the message that protobuf fills, however long the body is."""
    sent = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    expected = ProcessingResponse()
    expected.dynamic_metadata.update({"loopguard": {"count": 3}})
    common = expected.request_body.response
    warned = [("X-Fairvisor-Warning", warning)] if warning else []
    for name, value in [("x-loopguard-steered", "1"), ("content-length", str(size)), *warned]:
        option = common.header_mutation.set_headers.add(append_action="OVERWRITE_IF_EXISTS_OR_ADD")
        option.header.key, option.header.raw_value = name, value.encode()
    common.header_mutation.remove_headers.extend(["content-md5", "digest", "content-digest", "repr-digest"])
    common.body_mutation.body = sent

    assert (
        ProcessingResponse.FromString(
            b"".join(replace_body([sent[: size // 2], sent[size // 2 :]], {"count": 3}, warning=warning, marks=(STEERED,)))
        )
        == expected
    )


def test_long_metadata_has_long_lengths() -> None:
    """A text of more bytes than two digits of a length can say is read as it was written."""
    for length in (127, 128, 16_383, 16_384, 3_000_000):
        read = ProcessingResponse.FromString(write_metadata({"text": "x" * length}))
        assert read.dynamic_metadata["loopguard"]["text"] == "x" * length  # type: ignore[index]  # a Struct


@given(st.text(min_size=1, max_size=300) | st.integers(1, 2**17).map(lambda length: "x" * length))
def test_metadata_of_one_text_is_what_it_would_be_among_others(text: str) -> None:
    """A text that is alone in the metadata is written by a way of its own, to the same bytes."""
    assert write_sessions(text) == write_metadata({SESSIONS: text})
