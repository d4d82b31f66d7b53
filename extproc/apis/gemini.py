"""Gemini's `generateContent`, also in Vertex AI: `contents` with parts named by their only key."""
# interpreted: msgspec creates Structs from annotations, which compiled classes do not keep

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from msgspec import Raw, Struct

from extproc.apis.api import (
    Api,
    Changes,
    Completion,
    Endpoint,
    Question,
    Refusal,
    ToolList,
    ToolsLeft,
    ToolWords,
    frame_events,
    frame_json,
    make_error,
)
from extproc.apis.contents import Block, read_content, read_object, read_string
from extproc.apis.conversation import ASSISTANT, ASSISTANTS, Shape
from extproc.apis.messages import CALL, OTHER, RESULT, Part
from extproc.apis.places import PLAIN, TEXT_PART, Place, locate_in_content
from extproc.apis.usage import decode_name
from extproc.decision import Framed
from extproc.request.document import ABSENT, Json, NotCounted
from extproc.request.patch import AMBIGUOUS, Fields, Patch, Value

_RESPONSE_TEXTS = ("output", "result", "error")
_NOTE = "gateway_note"
_FILES = frozenset({"inlineData", "inline_data", "fileData", "file_data"})
"""Keys of parts that are images or other files."""

_COLLECTIONS = ("/models", "/tunedModels", "/endpoints")
_NO_NAMES = frozenset({"count-tokens"})
"""Anthropic's SDK for Vertex AI sends these in place of the model, which is then in the body."""


class Content(Struct, gc=False):
    """A message."""

    role: str | None = None
    parts: Raw = ABSENT


class GeminiBody(Struct, gc=False):
    """A body with `contents`."""

    contents: list[Content]


class WrappedBody(Struct, gc=False):
    """A body inside a `request`, as Gemini's own command line sends it."""

    request: GeminiBody


def _name_speaker(content: Content) -> str:
    return ASSISTANT if content.role in ASSISTANTS else content.role or "user"


def _read(content: Content) -> list[Part]:
    return [Part(OTHER, ABSENT)] if content.parts is ABSENT else read_content(content.parts)


def _find_raw(content: Content) -> Raw:
    return content.parts


def _read_call(block: Block) -> Part:
    call = read_object(block.get("functionCall", block.get("function_call")))
    return Part(
        CALL, call.get("args", ABSENT), read_string(call.get("name")), read_string(call.get("id"))
    )


def _read_result(block: Block) -> Part:
    result = read_object(block.get("functionResponse", block.get("function_response")))
    response = result.get("response", ABSENT)
    failed = isinstance(response, dict) and bool(response.get("error"))
    parts: Json = result.get("parts")
    files = (
        [part for part in parts if isinstance(part, dict) and _FILES & part.keys()]
        if isinstance(parts, list)
        else []
    )
    return Part(
        RESULT, response, id=read_string(result.get("id")), failed=failed, images=files or ABSENT
    )


def _read_code(block: Block) -> Part:
    """Code that the server runs; its result is in the same message."""
    return Part(CALL, block.get("executableCode", block.get("executable_code")), "code_execution")


def _read_code_result(block: Block) -> Part:
    return Part(RESULT, block.get("codeExecutionResult", block.get("code_execution_result")))


def _locate(patch: Patch, _: Content, whole: Value) -> list[Place]:
    return locate_in_content(patch, patch.open_fields(whole).get("parts"), TEXT_PART)


def _locate_result(patch: Patch, fields: Fields, _: Value) -> list[Place]:
    """The place in the text of a structured response, or in a new member."""
    response = patch.open_fields(
        fields.get("functionResponse", fields.get("function_response"))
    ).get("response")
    if response is None or not patch.is_object(response):
        return []
    given = patch.open_fields(response)
    key = next(
        (key for key in _RESPONSE_TEXTS if key in given and patch.is_text(given[key])), _NOTE
    )
    # A tool must not block notes by using the key
    while key in given and not patch.is_text(given[key]):
        key += "_"
    return (
        [Place(given[key], result=True)]
        if key in given
        else [Place(response, PLAIN, key, result=True)]
    )


def _choose(patch: Patch, fields: Fields, outcome: ToolsLeft, gone: Collection[str]) -> Changes:
    """Edit the tool choice; returns the change to the member that contains it. See `ToolList`."""
    key = _pick(fields, "toolConfig", "tool_config")
    if key not in fields or not patch.is_object(fields[key]):
        forbidden = b'{"functionCallingConfig":{"mode":"NONE"}}'
        return {key: forbidden} if outcome is ToolsLeft.FORBIDDEN else {}
    config = fields[key]
    inner = patch.open_fields(config)
    calling = _pick(inner, "functionCallingConfig", "function_calling_config")
    if outcome is ToolsLeft.FEWER and calling in inner:
        outcome = _mend_names(patch, patch.open_fields(inner[calling]), gone)
    if outcome is ToolsLeft.FORBIDDEN:
        patch.change(config, {calling: b'{"mode":"NONE"}'})
    return {}


def _mend_names(patch: Patch, calling: Fields, gone: Collection[str]) -> ToolsLeft:
    """Edit the list of allowed functions; if none is left, all are forbidden."""
    key = _pick(calling, "allowedFunctionNames", "allowed_function_names")
    if key not in calling or not patch.is_list(calling[key]):
        return ToolsLeft.FEWER
    names = patch.open_items(calling[key])
    places = {place for place, name in enumerate(names) if patch.read_text(name) in gone}
    if places and len(places) == len(names):
        return ToolsLeft.FORBIDDEN
    patch.remove(calling[key], places)
    return ToolsLeft.FEWER


def _pick(fields: Fields, *keys: str) -> str:
    """The spelling of a key that is present; the first one if none is.

    Raises:
        NotCounted: several spellings are present.
    """
    found = [key for key in keys if key in fields]
    if len(found) > 1:
        raise NotCounted(AMBIGUOUS)
    return found[0] if found else keys[0]


def _find_model(path: str) -> str:
    """The model in a path of Google's APIs: the last segment, without a colon and the method."""
    before, _, last = path.rpartition("/")
    name = last.rpartition(":")[0]
    return decode_name(name) if before.endswith(_COLLECTIONS) and name not in _NO_NAMES else ""


_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
"""Names of statuses (google/rpc/code.proto)."""


def write_error(refusal: Refusal, _: Question) -> Framed:
    """Write a google.rpc.Status (google.aip.dev/193).

    `code` is the HTTP status; the code for programs is in the details.
    """
    status = _STATUSES.get(refusal.status) or (
        "FAILED_PRECONDITION" if refusal.status < 500 else "INTERNAL"  # noqa: PLR2004  # HTTP's
    )
    reason = {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": refusal.code.upper(),
        "domain": "loopguard",
    }
    body = make_error(refusal)
    body["error"] |= {"code": refusal.status, "status": status, "details": [reason]}
    return frame_json(refusal.status, body)


def complete(completion: Completion, _: Question) -> Framed:
    """A response with one content."""
    return frame_json(200, _make_content(completion))


def complete_in_pieces(completion: Completion, question: Question) -> Framed:
    """The response as the only event of a stream or element of an array, as the query asks."""
    content = _make_content(completion)
    if question.request.read_parameter("alt") == "sse":
        return frame_events([content])
    return frame_json(200, [content])


def _make_content(completion: Completion) -> dict[str, Any]:
    content = {"role": "model", "parts": [{"text": completion.text}]}
    return {
        "candidates": [{"index": 0, "content": content, "finishReason": "STOP"}],
        "usageMetadata": {"promptTokenCount": 0, "candidatesTokenCount": 0, "totalTokenCount": 0},
        "modelVersion": completion.model,
        "responseId": completion.name,
    }


API = Api(
    name="gemini",
    paths={
        r"(?::|%3[Aa])generateContent\Z": Endpoint(write_error, complete),
        r"(?::|%3[Aa])streamGenerateContent\Z": Endpoint(write_error, complete_in_pieces),
        r"/[^/:%]+:countTokens\Z": Endpoint(write_error, asks_model=False),
        r":(?:embedContent|batchEmbedContents)\Z": Endpoint(write_error),
    },
    # Gemini, Vertex AI, Code Assist, gateways.
    samples=(
        "/v1beta/models/x:generateContent",
        "/v1/models/x:streamGenerateContent",
        "/v1beta1/projects/x/locations/x/publishers/google/models/x:generateContent",
        "/v1/projects/x/locations/x/publishers/google/models/x:streamGenerateContent",
        "/v1internal:generateContent",
        "/v1internal:streamGenerateContent",
        "/genai/v1beta/models/x:generateContent",
    ),
    keys={("contents",): Endpoint(write_error)},  # only the path tells whether to stream
    shapes=(
        Shape(
            ("contents",),
            GeminiBody,
            Content,
            _name_speaker,
            _read,
            _find_raw,
            locate=_locate,
            mark=b'"model"',
        ),
        Shape(
            ("request", "contents"),
            WrappedBody,
            Content,
            _name_speaker,
            _read,
            _find_raw,
            locate=_locate,
        ),
    ),
    blocks={
        "functionCall": _read_call,
        "function_call": _read_call,
        "functionResponse": _read_result,
        "function_response": _read_result,
        "executableCode": _read_code,
        "executable_code": _read_code,
        "codeExecutionResult": _read_code_result,
        "code_execution_result": _read_code_result,
    },
    locators={"functionResponse": _locate_result, "function_response": _locate_result},
    tool_lists=(
        ToolList("contents", "tools", "toolConfig", choose=_choose),
        ToolList("request", "tools", "toolConfig", choose=_choose, wraps=True),
    ),
    tool_words=ToolWords(
        lists=frozenset({"functionDeclarations", "function_declarations"}),
        servers=frozenset({"mcpServers", "mcp_servers"}),
        schemas=frozenset({"parameters", "parametersJsonSchema", "parameters_json_schema"}),
    ),
    models={":": _find_model},
    counts={
        "input": ("usageMetadata.promptTokenCount",),
        "output": ("usageMetadata.candidatesTokenCount",),
        "cached": ("usageMetadata.cachedContentTokenCount",),
        "thoughts": ("usageMetadata.thoughtsTokenCount",),
        "tool_input": ("usageMetadata.toolUsePromptTokenCount",),
    },
    events=("usageMetadata",),
    answered_by=("modelVersion",),
    streamed_documents=(":streamGenerateContent",),
    credentials=("header:x-goog-api-key", "query:key"),
    longest_answers=("generationConfig.maxOutputTokens", "generation_config.max_output_tokens"),
    copies=("generationConfig.candidateCount", "generation_config.candidate_count"),
)
