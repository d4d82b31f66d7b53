"""Gemini's `generateContent`: `contents` whose parts are named by their one key."""
# interpreted: an API each; msgspec makes their Structs of annotations, which compiled classes do not keep

from __future__ import annotations

from msgspec import Raw, Struct

from extproc.apis.shapes.contents import Block, Reader, read_content, read_object, read_string
from extproc.apis.shapes.conversation import ASSISTANT, ASSISTANTS, Shape
from extproc.apis.shapes.messages import CALL, OTHER, RESULT, Part
from extproc.apis.shapes.places import PLAIN, TEXT_PART, Locator, Place, locate_in_content
from extproc.request.document import ABSENT
from extproc.request.patch import Fields, Patch, Value

_RESPONSE_TEXTS = ("output", "result", "error")
_NOTE = "gateway_note"


class Content(Struct, gc=False):
    """A message."""

    role: str | None = None
    parts: Raw = ABSENT


class Body(Struct, gc=False):
    """A body with `contents`."""

    contents: list[Content]


class WrappedBody(Struct, gc=False):
    """The same inside of a `request`, as Gemini's own command line sends it."""

    request: Body


def _name_speaker(content: Content) -> str:
    return ASSISTANT if content.role in ASSISTANTS else content.role or "user"


def _read(content: Content) -> list[Part]:
    return [Part(OTHER, ABSENT)] if content.parts is ABSENT else read_content(content.parts)


def _find_raw(content: Content) -> Raw:
    return content.parts


def _read_call(block: Block) -> Part:
    call = read_object(block.get("functionCall", block.get("function_call")))
    return Part(CALL, call.get("args", ABSENT), read_string(call.get("name")), read_string(call.get("id")))


def _read_result(block: Block) -> Part:
    result = read_object(block.get("functionResponse", block.get("function_response")))
    response = result.get("response", ABSENT)
    failed = isinstance(response, dict) and bool(response.get("error"))
    return Part(RESULT, response, id=read_string(result.get("id")), failed=failed)


def _read_code(block: Block) -> Part:
    """Code that the server runs, of which the result comes back in the same message."""
    return Part(CALL, block.get("executableCode", block.get("executable_code")), "code_execution")


def _read_code_result(block: Block) -> Part:
    return Part(RESULT, block.get("codeExecutionResult", block.get("code_execution_result")))


def _locate(patch: Patch, _: Content, whole: Value) -> list[Place]:
    return locate_in_content(patch, patch.open_fields(whole).get("parts"), TEXT_PART)


def _locate_result(patch: Patch, fields: Fields, _: Value) -> list[Place]:
    """In the text of a structured response, or as one more text of it."""
    response = patch.open_fields(fields.get("functionResponse", fields.get("function_response"))).get("response")
    if response is None or not patch.is_object(response):
        return []
    given = patch.open_fields(response)
    key = next((key for key in _RESPONSE_TEXTS if key in given and patch.is_text(given[key])), _NOTE)
    while key in given and not patch.is_text(given[key]):  # a tool must not keep a note away by taking its name
        key += "_"
    return [Place(given[key], result=True)] if key in given else [Place(response, PLAIN, key, result=True)]


SHAPES = (
    Shape(("contents",), Body, Content, _name_speaker, _read, _find_raw, locate=_locate),
    Shape(("request", "contents"), WrappedBody, Content, _name_speaker, _read, _find_raw, locate=_locate),
)

LOCATORS: dict[str, Locator] = {"functionResponse": _locate_result, "function_response": _locate_result}

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
