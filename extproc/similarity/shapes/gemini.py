"""Gemini's `generateContent`: `contents` whose parts are named by their one key."""

from __future__ import annotations

from msgspec import Raw

from extproc.similarity.document import ABSENT, Json, open_value
from extproc.similarity.shapes.conversation import ASSISTANTS, Block, Reader, Shape, read_content
from extproc.similarity.shapes.structs import CALL, RESULT, Content, Conversation, GeminiBody, Part, WrappedGeminiBody


def _open(body: GeminiBody) -> Conversation:
    return Conversation(reversed(body.contents), _is_assistant, _read, _raw)


def _open_wrapped(body: WrappedGeminiBody) -> Conversation:
    return _open(body.request)


def _is_assistant(content: Content) -> bool:
    return content.role in ASSISTANTS


def _read(content: Content) -> list[Part]:
    return read_content(content.parts)


def _raw(content: Content) -> Raw:
    return content.parts


def _read_call(block: Block) -> Part:
    call = _read_object(block.get("functionCall", block.get("function_call")))
    return Part(CALL, call.get("args", ABSENT), _text(call.get("name")), _text(call.get("id")))


def _read_result(block: Block) -> Part:
    result = _read_object(block.get("functionResponse", block.get("function_response")))
    response = result.get("response", ABSENT)
    failed = isinstance(response, dict) and bool(response.get("error"))
    return Part(RESULT, response, id=_text(result.get("id")), failed=failed)


def _read_code(block: Block) -> Part:
    """Code that the server runs, of which the result comes back in the same message."""
    return Part(CALL, block.get("executableCode", block.get("executable_code")), "code_execution")


def _read_code_result(block: Block) -> Part:
    return Part(RESULT, block.get("codeExecutionResult", block.get("code_execution_result")))


def _read_object(value: Raw | None) -> dict[str, Json]:
    found = open_value(value)
    return found if isinstance(found, dict) else {}


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""


SHAPE = Shape(GeminiBody, _open)
WRAPPED = Shape(WrappedGeminiBody, _open_wrapped)

BLOCKS: dict[str, Reader] = {
    "functionCall": _read_call,
    "function_call": _read_call,
    "functionResponse": _read_result,
    "function_response": _read_result,
    "executableCode": _read_code,
    "executable_code": _read_code,
    "codeExecutionResult": _read_code_result,
    "code_execution_result": _read_code_result,
}
