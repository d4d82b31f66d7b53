"""Tools that are taken out of requests: which go, what the choice is then, and that every other byte stays."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extproc.apis import may_declare, open_conversation
from extproc.ext_proc.changes.edits import NotEdited
from extproc.ext_proc.changes.narrow import narrow
from extproc.request.document import Document
from extproc.request.http import HttpRequest
from extproc.request.patch import measure_known
from tests.support.examples import examples
from tests.support.model_requests import ANYTHING, HOSTILE, REQUESTS, spelled
from tests.support.turn_writers import SHAPES, Did

Choice = str | tuple[str, str | list[str]] | None
"""A mode; a tool; or a mode and the tools that it is about."""

_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
_NAMES = ("pay", "read", "write")


def _as_chat(tools: Sequence[str], choice: Choice) -> dict[str, Any]:
    wrapped = [{"type": "function", "function": {"name": name, "parameters": _SCHEMA}} for name in tools]
    named: Any = {"type": "function", "function": {"name": choice[1]}} if isinstance(choice, tuple) else choice
    if isinstance(choice, tuple) and isinstance(choice[1], list):
        allowed = [{"type": "function", "function": {"name": name}} for name in choice[1]]
        named = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": allowed}}
    return {"tools": wrapped, "tool_choice": named}


def _as_functions(tools: Sequence[str], choice: Choice) -> dict[str, Any]:
    named = {"name": choice[1]} if isinstance(choice, tuple) else choice
    return {"functions": [{"name": name, "parameters": _SCHEMA} for name in tools], "function_call": named}


def _as_responses(tools: Sequence[str], choice: Choice) -> dict[str, Any]:
    flat = [{"type": "function", "name": name, "parameters": _SCHEMA, "strict": True} for name in tools]
    named: Any = {"type": "function", "name": choice[1]} if isinstance(choice, tuple) else choice
    if isinstance(choice, tuple) and isinstance(choice[1], list):
        allowed = [{"type": "function", "name": name} for name in choice[1]]
        named = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    return {"tools": flat, "tool_choice": named}


def _as_anthropic(tools: Sequence[str], choice: Choice) -> dict[str, Any]:
    named: dict[str, Any] = {"type": "tool", "name": choice[1]} if isinstance(choice, tuple) else {"type": choice}
    return {"tools": [{"name": name, "input_schema": _SCHEMA} for name in tools], "tool_choice": named if choice else None}


def _as_bedrock(tools: Sequence[str], choice: Choice) -> dict[str, Any]:
    specs = [{"toolSpec": {"name": name, "inputSchema": {"json": _SCHEMA}}} for name in tools]
    named: dict[Any, Any] = {"tool": {"name": choice[1]}} if isinstance(choice, tuple) else {choice: {}}
    return {"toolConfig": {"tools": specs} | ({"toolChoice": named} if choice else {})}


def _as_gemini(tools: Sequence[str], choice: Choice) -> dict[str, Any]:
    mode = choice[0] if isinstance(choice, tuple) else choice
    calling: dict[str, Any] = {"mode": mode} | ({"allowedFunctionNames": choice[1]} if isinstance(choice, tuple) else {})
    declared = [{"functionDeclarations": [{"name": name, "parameters": _SCHEMA} for name in tools]}]
    return {"tools": declared, "toolConfig": {"functionCallingConfig": calling} if choice else None}


_TOOL = st.sampled_from(_NAMES).map(lambda name: ("tool", name))
_SOME = st.lists(st.sampled_from(_NAMES), min_size=1, unique=True)
_ALLOWED = _SOME.map(lambda names: ("allowed", names))


def _choose(*modes: str) -> st.SearchStrategy[Any]:
    return st.sampled_from([None, *modes])


# api -> (how history, tools and choice are written, which choices there are, those of the model's and of none)
_Api = tuple[str, Callable[[Sequence[str], Any], dict[str, Any]], st.SearchStrategy[Any], str, str]
APIS: dict[str, _Api] = {
    "chat": ("chat", _as_chat, _choose("auto", "none", "required") | _TOOL | _ALLOWED, "auto", "none"),
    "functions": ("chat", _as_functions, _choose("auto", "none") | _TOOL, "auto", "none"),
    "responses": ("responses", _as_responses, _choose("auto", "none", "required") | _TOOL | _ALLOWED, "auto", "none"),
    "anthropic": ("anthropic", _as_anthropic, _choose("auto", "any", "none") | _TOOL, "auto", "none"),
    "bedrock": ("bedrock", _as_bedrock, _choose("auto", "any") | _TOOL, "auto", ""),
    "gemini": ("gemini", _as_gemini, _choose("AUTO", "ANY", "NONE") | _SOME.map(lambda names: ("ANY", names)), "AUTO", "NONE"),
    "ollama": ("ollama", _as_chat, st.none(), "", ""),
}
every_api = pytest.mark.parametrize("api", APIS)


def write(api: str, turns: Sequence[Did], tools: Sequence[str] | None, choice: Choice) -> dict[str, Any]:
    """A request; `tools`: None where none are declared."""
    shape, declare = APIS[api][:2]
    declared = declare(tools, choice) if tools is not None else {}
    request = SHAPES[shape](turns) | {"generationConfig": {}}
    return request | {key: value for key, value in declared.items() if value is not None}


def expect(api: str, tools: list[str], without: Collection[str] | None, choice: Any, *, called: bool) -> Any:  # noqa: ANN401  # a Choice
    """The tools and the choice that there should be, None where it should be refused; `called`: the history has a call."""
    _, _, _, auto, none = APIS[api]
    left = [name for name in tools if without is not None and name not in without]
    if not left:
        if none:
            return tools, none
        return None if called and api == "bedrock" else (None, None)
    if isinstance(choice, tuple) and isinstance(choice[1], list):
        allowed = [name for name in choice[1] if name in left or name not in tools]
        choice = (choice[0], allowed) if allowed else none
    elif isinstance(choice, tuple) and choice[1] in tools and choice[1] not in left:
        choice = auto
    return left, choice


def request_of(api: str, **headers: bytes) -> HttpRequest:
    """A request to the API, as far as narrowing looks at it."""
    path = "/api/chat" if api == "ollama" else "/v1/x"
    return HttpRequest("POST", path, "", {name.replace("_", "-"): value for name, value in headers.items()})


def narrowed(body: bytes, *without: str, every: bool = False, path: str = "/v1/x") -> bytes:
    """A body without some tools, or without all of them."""
    return narrow(HttpRequest("POST", path), body, None if every else without)


def refused(body: bytes, *without: str, every: bool = False) -> str:
    """Why a body cannot be narrowed."""
    with pytest.raises(NotEdited) as why:
        narrowed(body, *without, every=every)
    return why.value.reason


def read_raw(body: bytes) -> dict[str, bytes]:
    """The members of a body, as they stand there."""
    return {key: bytes(item) for key, item in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items()}


_TURNS = st.lists(st.lists(st.sampled_from([*_NAMES, "old"]), min_size=1, max_size=2), max_size=2)
_WITHOUT = st.none() | st.sets(st.sampled_from([*_NAMES, "old"]))


@pytest.mark.slow
@every_api
@settings(max_examples=examples(40))
@given(st.data(), _TURNS, st.lists(st.sampled_from(_NAMES), min_size=1, unique=True), _WITHOUT)
def test_what_is_named_goes_and_the_choice_fits(
    api: str, data: st.DataObject, made: list[list[str]], tools: list[str], without: set[str] | None
) -> None:
    """However a body is spelled: the tools that are left, the choice among them, and every other member as it stood there."""
    turns = [Did(tuple((name, {}) for name in names), ("seen",) * len(names)) for names in made]
    choice = data.draw(APIS[api][2])
    old = write(api, turns, tools, choice)
    body = spelled(data.draw, old).encode()
    expected = expect(api, tools, without, choice, called=b'"toolUse"' in body)

    if expected is None:
        with pytest.raises(NotEdited, match="no_choice"):
            narrow(request_of(api), body, without)
        return
    new = narrow(request_of(api), body, without)

    assert json.loads(new) == write(api, turns, *expected)
    before, after = read_raw(body), read_raw(new)
    changed = {"tools", "tool_choice", "functions", "function_call", "toolConfig"}
    assert {key: after.get(key) for key in before.keys() - changed} == {key: before[key] for key in before.keys() - changed}


@every_api
@settings(max_examples=examples(20))
@given(st.data(), _TURNS, st.lists(st.sampled_from(_NAMES), min_size=1, unique=True), st.sets(st.sampled_from(_NAMES)))
def test_all_but_some_go_as_if_the_others_were_named(
    api: str, data: st.DataObject, made: list[list[str]], tools: list[str], kept: set[str]
) -> None:
    """What stays of a list, and the choice, are the same whether the tools that go are named, or those that stay."""
    turns = [Did(tuple((name, {}) for name in names), ("seen",) * len(names)) for names in made]
    body = spelled(data.draw, write(api, turns, tools, data.draw(APIS[api][2]))).encode()
    others = {*_NAMES, "old"} - kept if kept & set(tools) else None

    found: list[bytes] = []
    expected: list[bytes] = []
    for told, without, keep in ((found, None, kept), (expected, others, set[str]())):
        try:
            told.append(narrow(request_of(api), body, without, kept=keep))
        except NotEdited as why:
            told.append(why.reason.encode())

    assert found == expected


_HELD: dict[str, dict[str, Any]] = {
    "chat": {"parallel_tool_calls": False},
    "responses": {"parallel_tool_calls": False},
    "anthropic": {"disable_parallel_tool_use": True},
}


_PATHS = {
    "chat": "/v1/chat/completions",
    "functions": "/v1/chat/completions",
    "responses": "/v1/responses",
    "ollama": "/api/chat",
}


@every_api
@settings(max_examples=examples(20))
@given(st.data(), st.lists(st.sampled_from(_NAMES), min_size=1, unique=True), st.sets(st.sampled_from(_NAMES)))
def test_an_answer_is_held_to_one_call_if_a_tool_is_scarce(
    api: str, data: st.DataObject, tools: list[str], scarce: set[str]
) -> None:
    """Each API in its own way, if it has one and offers such a tool; every other member is as it stood there."""
    old = write(api, [Did((("pay", {}),), ("seen",))], tools, data.draw(APIS[api][2]))
    body = spelled(data.draw, old).encode()
    expected = dict(old)
    if scarce & set(tools) and api == "anthropic":
        choice = old.get("tool_choice", {"type": "auto"})
        expected["tool_choice"] = choice if choice["type"] == "none" else choice | _HELD[api]
    elif scarce & set(tools) and api in _HELD:
        expected |= _HELD[api]

    request = HttpRequest("POST", _PATHS.get(api, "/v1/x"))
    new = narrow(request, body, [], scarce=scarce)

    assert json.loads(new) == expected
    document = Document(body)
    assert may_declare(document, frozenset(scarce)) or new == body
    open_conversation(document)
    assert may_declare(document, frozenset(scarce)) or new == body
    assert new == body or expected != old
    before, after = read_raw(body), read_raw(new)
    assert {key: after[key] for key in before if key != "tool_choice"} == {
        key: raw for key, raw in before.items() if key != "tool_choice"
    }
    assert narrow(request, new, [], scarce=scarce) == new


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": False}}, True),
        ({"tool_choice": {"type": "tool", "name": "f"}}, True),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": False}}, True),
        ({"tool_choice": None}, True),
    ],
    ids=str,
)
def test_a_choice_that_is_mended_is_held_as_well(given: dict[str, Any], left: bool) -> None:
    """Whatever the choice said, and whether the tool that it named is gone."""
    tools = [{"name": name, "input_schema": _SCHEMA} for name in ("f", "g")]
    body = json.dumps({"messages": [{"role": "user", "content": "go"}], "tools": tools, **given}).encode()

    found = json.loads(narrow(request_of("anthropic"), body, ["f"], scarce=["g"]))

    assert found["tool_choice"] == {"type": "auto", "disable_parallel_tool_use": left}


@pytest.mark.parametrize(
    ("path", "model", "held"),
    [
        *(("/v1/chat/completions", model, False) for model in ("o1", "o3-mini", "o4-mini-2025-04-16", "openai/o3", "azure:o3")),
        ("/openai/deployments/o3-mini/chat/completions", None, False),
        ("/v2/chat", "command-a", False),
        *(("/v1/chat/completions", model, True) for model in ("gpt-4o", "gpt-o1", None)),
    ],
)
def test_what_refuses_the_switch_gets_none(path: str, model: str | None, held: bool) -> None:
    """OpenAI's older reasoning models answer 400 to it, whatever its value; Cohere's API answers 422 to any unknown key."""
    tools: Sequence[object] = [{"type": "function", "function": {"name": "pay"}}]
    body = _chat(tools, **({} if model is None else {"model": model}))

    new = narrow(HttpRequest("POST", path), body, [], scarce=["pay"])

    assert new == (body[:-1] + b',"parallel_tool_calls":false}' if held else body)


def test_among_the_tools_of_a_server_none_can_be_kept() -> None:
    """They are not declared one by one, so their calls could only be forbidden together with the others."""
    body = _responses([_flat("pay"), {"type": "mcp", "server_label": "a", "server_url": "http://a"}])

    with pytest.raises(NotEdited, match="no_choice"):
        narrow(request_of("responses"), body, None, kept=["pay"])
    assert json.loads(narrow(request_of("responses"), body, None, kept=["read"]))["tool_choice"] == "none"


def _chat(tools: Sequence[object], **more: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "go"}], "tools": tools, **more}).encode()


def _responses(tools: Sequence[object], **more: object) -> bytes:
    return json.dumps({"input": "go", "tools": tools, **more}).encode()


def _gemini(tools: Sequence[object], **more: object) -> bytes:
    return json.dumps({"contents": [{"parts": [{"text": "go"}]}], "tools": tools, **more}).encode()


def _flat(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name}


def _declare(*names: str) -> dict[str, Any]:
    return {"functionDeclarations": [{"name": name} for name in names]}


_CUSTOM = {"type": "custom", "custom": {"name": "sql"}}
_SERVER = {"type": "mcp", "server_label": "a", "server_url": "http://a"}
_TOOLSET = {"type": "mcp_toolset", "mcp_server_name": "a"}
_CACHE = {"cachePoint": {"type": "default"}}
_SPEC = {"toolSpec": {"name": "f"}}


@pytest.mark.parametrize(
    ("body", "without", "tools"),
    [
        (_chat([_CUSTOM, *_as_chat(["f"], None)["tools"]]), ["sql"], _as_chat(["f"], None)["tools"]),
        (_chat([{"type": "web_search_20250305", "name": "web_search"}, {"name": "f"}]), ["web_search"], [{"name": "f"}]),
        (_responses([{"type": "custom", "name": "sql"}, _flat("f")]), ["sql"], [_flat("f")]),
        (_responses([{"type": "web_search_preview_2025_03_11"}, _flat("f")]), ["web_search"], [_flat("f")]),
        (_responses([{"type": "web_search_preview"}, _flat("f")]), ["web_search_preview"], [_flat("f")]),
        (_responses([{"type": "computer_use_preview"}, _flat("f")]), ["computer"], [_flat("f")]),
        (_responses([_SERVER, _flat("f")]), ["f", "a"], [_SERVER]),
        (
            _responses([{"type": "namespace", "name": "crm", "tools": [_flat("f"), _flat("g")]}]),
            ["g"],
            [{"type": "namespace", "name": "crm", "tools": [_flat("f")]}],
        ),
        (_responses([{"type": "namespace", "name": "crm", "tools": [_flat("f")]}, _flat("g")]), ["f"], [_flat("g")]),
        (_gemini([_declare("f", "g"), {"googleSearch": {}}]), ["f"], [_declare("g"), {"googleSearch": {}}]),
        (
            _gemini([_declare("f") | {"googleSearch": {}}, {"codeExecution": {}}]),
            ["f", "code_execution"],
            [{"googleSearch": {}}],
        ),
        (_gemini([_declare("f"), {"mcpServers": [{}]}]), ["f"], [{"mcpServers": [{}]}]),
        (
            _gemini([{"function_declarations": [{"name": "f"}, {"name": "g"}]}]),
            ["f"],
            [{"function_declarations": [{"name": "g"}]}],
        ),
        (_chat([{"name": "f"}, {"name": "g"}, {"name": "f"}]), ["f"], [{"name": "g"}]),
    ],
)
def test_tools_of_every_kind_are_found(body: bytes, without: list[str], tools: object) -> None:
    """Custom tools, those that an API runs itself, by their own names or as calls of them go by, and groups of tools."""
    assert json.loads(narrowed(body, *without)) == json.loads(body) | {"tools": tools}


@pytest.mark.parametrize(
    ("body", "none"),
    [
        (_chat([*_as_chat(["f"], None)["tools"], _CUSTOM], tool_choice="required", parallel_tool_calls=False), "none"),
        (_responses([_flat("f"), {"type": "file_search"}], tool_choice={"type": "file_search"}), "none"),
        (_responses([_flat("f"), _flat("g")], previous_response_id="r"), "none"),
        (_responses([_SERVER, _flat("f")]), "none"),
        (_responses([_SERVER]), "none"),
        (_chat([{"name": "f"}, {"type": "bash_20250124", "name": "bash"}], tool_choice={"type": "any"}), {"type": "none"}),
        (_chat([_TOOLSET, {"name": "f"}]), {"type": "none"}),
        (_chat([_TOOLSET]), {"type": "none"}),
    ],
)
def test_tools_that_may_not_be_called_stay_declared(body: bytes, none: object) -> None:
    """Of any kind; nothing but the choice changes."""
    assert json.loads(narrowed(body, every=True)) == json.loads(body) | {"tool_choice": none}


def test_bedrock_without_calls_may_do_without_tools() -> None:
    """It has no choice that forbids them."""
    said = {"messages": [{"role": "user", "content": []}]}
    body = json.dumps(said | {"toolConfig": {"tools": [_SPEC, _CACHE]}}).encode()

    assert json.loads(narrowed(body, every=True)) == said


def test_a_choice_keeps_what_else_it_says() -> None:
    """A model that may not call tools side by side may not do so when the choice is its own."""
    choice = {"type": "tool", "name": "f", "disable_parallel_tool_use": True}
    found = json.loads(narrowed(_chat([{"name": "f"}, {"name": "g"}], tool_choice=choice), "f"))

    assert found["tool_choice"] == {"type": "auto", "disable_parallel_tool_use": True}


def test_servers_of_tools_stay_allowed() -> None:
    """Of what may be called no more goes than is named."""
    server = {"type": "mcp", "server_label": "a"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [_flat("f"), server]}
    found = json.loads(narrowed(_responses([_SERVER, _flat("f")], tool_choice=choice), "f"))

    assert found["tool_choice"] == choice | {"tools": [server]}


@pytest.mark.parametrize("config", [{}, {"retrievalConfig": {}}, {"functionCallingConfig": {"mode": "ANY"}}])
def test_gemini_is_told_in_the_configuration_that_is_there(config: dict[str, Any]) -> None:
    """An empty one included."""
    called = {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}}}]}
    body = json.dumps({"contents": [called], "tools": [_declare("f")], "toolConfig": config}).encode()

    assert json.loads(narrowed(body, "f"))["toolConfig"] == config | {"functionCallingConfig": {"mode": "NONE"}}


def test_under_limits_what_the_server_runs_goes() -> None:
    """Gemini runs code and searches whatever the choice is."""
    ran = [{"role": "model", "parts": [{"executableCode": {"code": "1"}}]}, {"role": "user", "parts": [{"text": "go"}]}]
    body = json.dumps({"contents": ran, "tools": [{"codeExecution": {}}]}).encode()
    both = json.loads(narrowed(_gemini([_declare("f") | {"googleSearch": {}}, {"codeExecution": {}}]), every=True))

    assert json.loads(narrowed(body, "code_execution")) == {"contents": ran}
    assert both["tools"] == [_declare("f")]
    assert both["toolConfig"] == {"functionCallingConfig": {"mode": "NONE"}}


def test_gemini_in_a_wrapper_is_narrowed() -> None:
    """As its own command line sends it."""
    inner = json.loads(_gemini([_declare("f", "g")], toolConfig={"functionCallingConfig": {"mode": "ANY"}}))
    body = json.dumps({"model": "m", "request": inner}).encode()

    assert json.loads(narrowed(body, "f")) == {"model": "m", "request": inner | {"tools": [_declare("g")]}}


@pytest.mark.parametrize(
    "body", [_chat([]), _responses([_SERVER]), b'{"input":"go","tools":null}', b'{"messages":[{"role":"a"}]}', b'{"a":1}']
)
def test_where_nothing_is_named_nothing_changes(body: bytes) -> None:
    """Not a byte."""
    assert narrowed(body, "f") == body


def test_space_hides_no_tool() -> None:
    """However much of it stands before a name."""
    body = (
        _chat([{"name": "f"}, {"name": "g"}])
        .replace(b'"f"', b" " * 5_000 + b'"f"')
        .replace(b'"name"', b'"name"' + b" " * 5_000)
    )

    assert json.loads(narrowed(body, "f"))["tools"] == [{"name": "g"}]


@pytest.mark.parametrize("conversation", [{"messages": []}, {"contents": []}, {"input": []}, {}])
def test_a_key_without_a_name_hides_no_tool(conversation: dict[str, Any]) -> None:
    """It is no conversation of another API."""
    body = json.dumps({"": True, **conversation, "tools": [{"name": "pay"}, {"name": "read"}]}).encode()

    narrowed = json.loads(narrow(HttpRequest("POST", "/"), body, ["pay"]))

    assert narrowed == {"": True, **conversation, "tools": [{"name": "read"}]}


@pytest.mark.parametrize("key", ["tools", "functions"])
def test_a_choice_is_mended_in_place_whatever_the_api(key: str) -> None:
    """Gateways mix what APIs say: what a choice says beside the tool stays."""
    choice = {"tools": "tool_choice", "functions": "function_call"}[key]
    sent = {
        "messages": [],
        key: [{"name": "pay"}, {"name": "read"}],
        choice: {"name": "pay", "disable_parallel_tool_use": True},
    }

    narrowed = json.loads(narrow(HttpRequest("POST", "/"), json.dumps(sent).encode(), ["pay"]))

    assert narrowed[choice] == {"disable_parallel_tool_use": True, "type": "auto"}


def test_where_nothing_is_declared_nothing_is_to_be_removed() -> None:
    """Of no tools all are gone already."""
    assert narrowed(_chat([]), every=True) == _chat([])


def test_every_other_byte_stays() -> None:
    """White space, order, escapes and numbers are as they were, and a byte order mark is."""
    before, after = (
        rb'{ "x" : 1.50e1 , "t\u006fols": [ ',
        rb', "messages":[{"role":"user","content":"\u00e9"}] ,"tool_choice" : ',
    )
    tools = rb'[ {"name" : "\u0066", "input_schema":{ }} , {"name":"g" , "n":1e0} ,  {"name":"h"} ]'

    body = BOM_UTF8 + before[:-2] + tools + after + rb'{"type":"tool", "name":"f"} }'

    assert narrowed(body, "f", "h") == BOM_UTF8 + before + rb'{"name":"g" , "n":1e0} ]' + after + rb'{"type":"auto"} }'


_CONFIGS = '"toolConfig":{},"tool_config":{}'
_TWICE = '"messages":[{"role":"user","content":"go"}],"tools":[{"name":"f"},{"name":"g"}]'


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("{" + _TWICE + ',"tools":[{"name":"f"},{"name":"g"}]}', "ambiguous_body"),
        ("{" + _TWICE + ',"tool\\u0073":[]}', "ambiguous_body"),
        ("{" + _TWICE.replace('"f"', '"f","name":"g"') + "}", "ambiguous_body"),
        ("{" + _TWICE + ',"input":"go"}', "ambiguous_body"),
        ("{" + _TWICE + ',"toolConfig":{}}', "ambiguous_body"),
        ("{" + _TWICE + ',"tool_choice":{"type":"tool","type":"auto"}}', "ambiguous_body"),
        ('{"request":{"contents":[]},"tools":[]}', "ambiguous_body"),
        (
            '{"contents":[{}],"tools":[{"functionDeclarations":[{"name":"f"},{"name":"g"}]}],' + _CONFIGS + "}",
            "ambiguous_body",
        ),
        ('{"contents":[],"tools":[{"type":"x","functionDeclarations":[{"name":"f"}]}]}', "ambiguous_body"),
        ('{"messages":[{"role":"user"}],"tools":{"name":"f"}}', "ambiguous_body"),
        ('{"messages":[{"role":"user"}],"tools":["f"]}', "ambiguous_body"),
        ('{"messages":[{"role":"user"}],"tools":"' + "f" * 9 + '"}', "ambiguous_body"),
        ('{"messages":[{"role":"user"}],"tools":[' + ",".join(['{"name":"f"}'] * 10_000) + "]}", "inspect_limit"),
        ('{"messages":[{"role":"user"}],"tools":[' + ",".join(['{"name":"f"}'] * 10_001) + "]}", "inspect_limit"),
        ('{"messages":' + "[" * 5_000, "not_json"),
        ("", "not_json"),
        ("[]", "ambiguous_body"),
    ],
    ids=lambda given: given[:60],
)
def test_what_may_be_read_in_two_ways_is_not_narrowed(body: str, reason: str) -> None:
    """No parser behind may find a tool in a body that was narrowed before."""
    assert refused(body.encode(), "f") == reason


def test_what_is_compressed_is_not_narrowed() -> None:
    """Its bytes are not the body's."""
    with pytest.raises(NotEdited, match="content_encoding"):
        narrow(request_of("chat", content_encoding=b"gzip"), gzip.compress(_chat([])), None)


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_are_narrowed_or_not(name: str, every: bool) -> None:
    """Whatever a body is, nothing but NotEdited is raised, and what comes out is JSON where what went in was."""
    body = HOSTILE[name][0]()
    with suppress(NotEdited):
        new = narrowed(body, "f", every=every)
        assert new == body or msgspec.json.decode(new, type=msgspec.Raw)


_ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["f", "g", ""]) | ANYTHING,
        "type": st.sampled_from(["function", "custom", "mcp", "namespace", "web_search_preview"]) | ANYTHING,
        "function": st.just({"name": "f"}) | ANYTHING,
        "functionDeclarations": st.just([{"name": "f"}, {"name": "g"}]) | ANYTHING,
        "tools": st.just([{"name": "f"}]) | ANYTHING,
        "toolSpec": st.just({"name": "f"}) | ANYTHING,
        "cachePoint": ANYTHING,
    },
)
_LIST = st.lists(_ENTRY, max_size=4) | ANYTHING
_WILD: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "tools": _LIST,
        "functions": _LIST,
        "contents": st.just([{"parts": []}]) | ANYTHING,
        "tool_choice": _ENTRY | st.fixed_dictionaries({"type": st.just("allowed_tools"), "tools": _LIST}) | ANYTHING,
        "function_call": ANYTHING,
        "toolConfig": st.fixed_dictionaries({}, optional={"tools": _LIST, "functionCallingConfig": ANYTHING}) | ANYTHING,
    },
)


@settings(max_examples=examples(150))
@given(REQUESTS | st.just({}), _WILD, st.booleans())
@example(
    request={"messages": []},
    wild={"functions": [{"function": {"name": "f"}}], "toolConfig": {"tools": [{"name": "f"}]}},
    every=False,
)
def test_nearly_right_bodies_are_narrowed_or_not(request: dict[str, Any], wild: dict[str, Any], every: bool) -> None:
    """With anything in any place: JSON comes out, of which tools and choices alone have changed, and nothing is left to do."""
    old = {**request, **wild}
    body = json.dumps(old).encode()
    try:
        new = narrowed(body, "f", every=every)
    except NotEdited:
        return

    found = json.loads(new, object_pairs_hook=_take_once)
    assert {key: found.get(key) for key in request} == {key: old.get(key) for key in request}
    assert narrowed(new, "f", every=every) == new


def _take_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object in which no key stands twice."""
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


@pytest.mark.slow
@pytest.mark.parametrize(("lists", "tools"), [(1_000, 2), (15, 300)])
def test_a_remembered_list_counts_with_all_that_it_takes(lists: int, tools: int) -> None:
    """However short its tools are: their bound is one of memory."""
    offered = [json.dumps([{"name": f"{number}.{place}"} for place in range(tools)]).encode() for number in range(lists)]
    bodies = [b'{"messages":[{"role":"user","content":"a"}],"tools":' + each + b"}" for each in offered]
    narrow(HttpRequest("POST", "/v1/x"), b'{"messages":[],"tools":[{"name":"a"}]}', ["a"])
    tracemalloc.start()
    for number, body in enumerate(bodies):
        narrow(HttpRequest("POST", "/v1/x"), body, [f"{number}.0"])
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert taken <= sum(measure_known(each, tools) for each in offered)
