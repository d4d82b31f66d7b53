"""Bodies that are expensive to edit: too much of something in every place that an edit looks at."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from time import thread_time
from typing import NamedTuple, TypeAlias

from extproc.ext_proc.changes.edits import NotEdited
from extproc.ext_proc.changes.narrow import Tools, narrow
from extproc.ext_proc.changes.steer import steer
from extproc.request.http import HttpRequest
from extproc.request.patch import MAX_BYTES
from extproc.server import freeze_objects
from tests.bench.report import progress
from tests.support.messages import make_marks

_Edit: TypeAlias = Callable[[bytes], object]

_NOTE = "Loop detected: the same again. " * 20
_ROOM = 512
_OFTEN = 100
_AGAIN = 4
# Bytes: the longest body that is edited, and shorter ones, which leave more steps for their
# contents.
_SIZES = (MAX_BYTES, MAX_BYTES // 2, MAX_BYTES // 8, 2**15)

_FILLINGS: Mapping[str, tuple[str, str, str]] = {
    "text": ('"', "hello, this is a text ", '"'),
    "escapes": ('"', "\\n", '"'),
    "escaped letters": ('"', "\\u00e9", '"'),
    "pairs": ('"\\ud800', "\\ud83d\\ude00", '"'),
    "halves": ('"', "\\ud83d", '"'),
    "letters beyond ASCII": ('"', "\u03a3", '"'),
    "colons": ('"', "12:34:56 ", '"'),
    "numbers": ("[", "0,", "0]"),
    "fractions": ("[", "0.5,", "0]"),
    "texts": ("[", '"",', "0]"),
    "lists": ("[", "[],", "0]"),
    "lists in lists": ("[", "[[[[1]]]],", "0]"),
    "objects": ("[", "{},", "{}]"),
    "texts in blocks": ("[", '{"type":"text","text":"a"},', "{}]"),
    "texts in parts": ("[", '{"text":"a"},', "{}]"),
    "results": ("[", '{"type":"tool_result","content":"a"},', "{}]"),
    "results in parts": ("[", '{"toolResult":{"content":[{"text":"a"}]}},', "{}]"),
    "responses in parts": ("[", '{"functionResponse":{"response":{"output":"a"}}},', "{}]"),
    "tools": ("[", '{"type":"function","function":{"name":"f"}},', "{}]"),
    "tools by name": ("[", '{"name":"f"},', "{}]"),
    "tools in lists": ("[", '{"functionDeclarations":[{"name":"f"}]},', "{}]"),
    "kinds of tools": ("[", '{"googleSearch":{},"codeExecution":{}},', "{}]"),
    "messages": ("[", '{"role":"user","content":"a"},', '{"role":"user","content":"a"}]'),
    "messages of an assistant": (
        "[",
        '{"role":"assistant","content":"a"},',
        '{"role":"assistant","content":"a"}]',
    ),
    "messages of a model": (
        "[",
        '{"role":"model","parts":[{"text":"a"}]},',
        '{"role":"model","parts":[{"text":"a"}]}]',
    ),
    "members": ("{", '"%06d":0,', '"":0}'),
    "spread members": ("{", '"%06d" :0,', '"":0}'),
    "members of text": ("{", '"output%06d":"a",', '"":0}'),
    "space": ("[", " ", "0]"),
    "nested lists": ("[" * 400, "0,", "0" + "]" * 400),
    "nested results": (
        '[{"type":"tool_result","content":' * 400,
        "",
        '"a"' + '},{"type":"text","text":"b"}]' * 400,
    ),
    "nested results of text": (
        '[{"type":"tool_result","content":' * 200 + '"',
        "a",
        '"' + "}]" * 200,
    ),
}

_STEERED: Mapping[str, tuple[str, str]] = {
    "beside a chat": ('{"x":', ',"messages":[{"role":"user","content":"a"}]}'),
    "behind a chat": ('{"messages":[{"role":"user","content":"a"}],"x":', "}"),
    "a chat's messages": ('{"messages":', "}"),
    "an older message": (
        '{"messages":[{"role":"user","content":',
        '},{"role":"user","content":"a"}]}',
    ),
    "a message's content": ('{"messages":[{"role":"user","content":', "}]}"),
    "beside a content": ('{"messages":[{"role":"user","x":', ',"content":"a"}]}'),
    "a result of a chat": ('{"messages":[{"role":"assistant"},{"role":"tool","content":', "}]}"),
    "a role": ('{"messages":[{"content":"a","role":', "}]}"),
    "a result": (
        '{"messages":[{"role":"user","content":[{"type":"tool_result","content":',
        "}]}]}",
    ),
    "a kind": ('{"messages":[{"role":"user","content":[{"content":"a","type":', "}]}]}"),
    "beside a result's content": (
        '{"messages":[{"role":"user","content":[{"type":"tool_result","x":',
        "}]}]}",
    ),
    "a text in a result": (
        '{"messages":[{"role":"user","content":[{"type":"tool_result","content":[{"type":"text","text":',
        "}]}]}]}",
    ),
    "a text before results": (
        '{"messages":[{"role":"user","content":[{"type":"text","text":',
        "}" + ',{"type":"tool_result","content":"a"}' * 90 + "]}]}",
    ),
    "Bedrock's result": (
        '{"messages":[{"role":"user","content":[{"toolResult":{"content":',
        "}}]}]}",
    ),
    "Bedrock's text": (
        '{"messages":[{"role":"user","content":[{"toolResult":{"content":[{"text":',
        "}]}}]}]}",
    ),
    "Responses' items": ('{"input":', "}"),
    "Responses' output": ('{"input":[{"type":"function_call_output","output":', "}]}"),
    "Responses' content": ('{"input":[{"role":"user","content":', "}]}"),
    "Gemini's contents": ('{"contents":', "}"),
    "Gemini's parts": ('{"contents":[{"parts":', "}]}"),
    "Gemini's response": ('{"contents":[{"parts":[{"functionResponse":{"response":', "}}]}]}"),
    "Gemini's output": (
        '{"contents":[{"parts":[{"functionResponse":{"response":{"output":',
        "}}}]}]}",
    ),
    "Gemini's, wrapped": ('{"request":{"contents":[{"parts":', "}]}}"),
    "beside Gemini's, wrapped": ('{"request":{"x":', ',"contents":[{"parts":[{"text":"a"}]}]}}'),
    "a prompt": ('{"prompt":', "}"),
    "no conversation": ('{"x":', "}"),
    "a body": ("", ""),
}

_CALLED = (
    '"messages":[{"role":"assistant","tool_calls":'
    '[{"id":"1","function":{"name":"f","arguments":"{}"}}]}]'
)
_TWO = '[{"name":"f"},{"name":"g"}]'
_NARROWED: Mapping[str, tuple[str, str]] = {
    "beside tools": ('{"x":', f',{_CALLED},"tools":[{{"name":"f"}},{{"name":"g"}}]}}'),
    "a chat's tools": (f'{{{_CALLED},"tools":', "}"),
    "tools where nothing was called": ('{"messages":[{"role":"user","content":"a"}],"tools":', "}"),
    "functions": ('{"messages":[],"functions":', "}"),
    "a schema": (f'{{{_CALLED},"tools":[{{"name":"f","input_schema":', '},{"name":"g"}]}'),
    "a name": (f'{{{_CALLED},"tools":[{{"name":', '},{"name":"f"}]}'),
    "a kind of tool": (f'{{{_CALLED},"tools":[{{"type":', '},{"name":"f"}]}'),
    "a choice": (f'{{{_CALLED},"tools":[{{"name":"f"}},{{"name":"g"}}],"tool_choice":', "}"),
    "a choice of tools": (
        f'{{{_CALLED},"tools":[{{"name":"f"}},{{"name":"g"}}],"tool_choice":{{"type":"allowed_tools","tools":',
        "}}",
    ),
    "a history": ('{"tools":[{"name":"f"}],"messages":', "}"),
    "a content": ('{"tools":[{"name":"f"}],"messages":[{"role":"assistant","content":', "}]}"),
    "calls": ('{"tools":[{"name":"f"}],"messages":[{"role":"assistant","tool_calls":', "}]}"),
    "arguments": (
        '{"tools":[{"name":"f"}],"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"g","arguments":',
        "}}]}]}",
    ),
    "a history that is kept": ('{"tools":[{"name":"f"}],"input":"a","conversation":', "}"),
    "Responses' tools": ('{"input":"a","tools":', "}"),
    "tools of a namespace": (
        '{"input":"a","tools":[{"type":"namespace","name":"n","tools":',
        "}]}",
    ),
    "Responses' items": ('{"tools":[{"name":"f"}],"input":', "}"),
    "Bedrock's tools": (f'{{{_CALLED},"toolConfig":{{"tools":', "}}"),
    "Bedrock's choice": (
        f'{{{_CALLED},"toolConfig":{{"tools":[{{"toolSpec":{{"name":"f"}}}}],"toolChoice":',
        "}}",
    ),
    "Gemini's tools": (
        '{"contents":[{"role":"model","parts":[{"functionCall":{"name":"f"}}]}],"tools":',
        "}",
    ),
    "Gemini's functions": ('{"contents":[],"tools":[{"functionDeclarations":', "}]}"),
    "Gemini's names": (
        f'{{"contents":[],"tools":[{{"functionDeclarations":{_TWO}}}],"toolConfig":{{"functionCallingConfig":{{"allowedFunctionNames":',
        "}}}",
    ),
    "Gemini's history": ('{"tools":[{"functionDeclarations":[{"name":"f"}]}],"contents":', "}"),
    "wrapped tools": ('{"request":{"contents":[],"tools":', "}}"),
    "a body": ("", ""),
}


class Worst(NamedTuple):
    """The slowest edit: its milliseconds, the body's name, and the number of bodies tried."""

    milliseconds: float
    name: str
    bodies: int


def fill(filling: str, before: str, behind: str, size: int) -> bytes:
    """A body of at most this many bytes that consists of one filling."""
    opening, item, closing = _FILLINGS[filling]
    start, end = (before + opening).encode(), (closing + behind).encode()
    numbered = item % 0 if "%" in item else item
    count = max(0, size - _ROOM - len(start) - len(end)) // max(1, len(numbered.encode()))
    inner = "".join([item % number for number in range(count)]) if "%" in item else item * count
    return start + inner.encode() + end


def find_worst_note(*, quick: bool) -> Worst:
    request = HttpRequest("POST", "/v1/x")
    return _find_worst(
        "notes",
        _STEERED,
        [lambda body: b"".join(steer(request, body, _NOTE, make_marks))],
        quick=quick,
    )


def find_worst_narrowing(*, quick: bool) -> Worst:
    request = HttpRequest("POST", "/v1/x")
    edits: list[_Edit] = [
        lambda body: narrow(request, body, Tools({"f"})),
        lambda body: narrow(request, body, Tools(None)),
    ]
    return _find_worst("narrowing", _NARROWED, edits, quick=quick)


def _find_worst(
    title: str, places: Mapping[str, tuple[str, str]], edits: Sequence[_Edit], *, quick: bool
) -> Worst:
    worst = Worst(0.0, "", 0)
    freeze_objects()  # as in a server
    sizes = _SIZES[::3] if quick else _SIZES
    for number, (place, filling, size) in enumerate(product(places, _FILLINGS, sizes), 1):
        if number % _OFTEN == 1:
            progress(f"hostile: {title}", number, len(places) * len(_FILLINGS) * len(sizes))
        body = fill(filling, *places[place], size)
        for edit in edits:
            took = _measure(edit, body)
            if took > worst.milliseconds:  # what else the machine did is not the body's fault
                took = min(took, *[_measure(edit, body) for _ in range(_AGAIN)])
            if took > worst.milliseconds:
                worst = Worst(took, f"{size >> 10} KiB, {filling} in {place}", 0)
    return worst._replace(bodies=len(places) * len(_FILLINGS) * len(sizes))


def _measure(edit: _Edit, body: bytes) -> float:
    started = thread_time()
    with suppress(NotEdited):
        edit(body)
    return (thread_time() - started) * 1000
