"""Removed tools: which are removed, the remaining choice, and that every other byte stays."""

import gzip
import json
import tracemalloc
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from extproc.apis import may_declare, open_conversation
from extproc.ext_proc.changes.edits import NotEdited
from extproc.ext_proc.changes.narrow import Tools, measure_list, narrow
from extproc.request.document import Document
from extproc.request.http import HttpRequest
from tests.support.examples import examples
from tests.support.model_requests import HOSTILE, spelled
from tests.support.turn_writers import SHAPES, Did

# A mode; a tool; or a mode and the tools that it is about
Choice = str | tuple[str, str | list[str]] | None

_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
_NAMES = ("pay", "read", "write")


def _as_chat(tools: Sequence[str], choice: Choice) -> dict[str, Any]:
    wrapped = [
        {"type": "function", "function": {"name": name, "parameters": _SCHEMA}} for name in tools
    ]
    named: Any = (
        {"type": "function", "function": {"name": choice[1]}}
        if isinstance(choice, tuple)
        else choice
    )
    if isinstance(choice, tuple) and isinstance(choice[1], list):
        allowed = [{"type": "function", "function": {"name": name}} for name in choice[1]]
        named = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": allowed}}
    return {"tools": wrapped, "tool_choice": named}


def _as_functions(tools: Sequence[str], choice: Choice) -> dict[str, Any]:
    named = {"name": choice[1]} if isinstance(choice, tuple) else choice
    return {
        "functions": [{"name": name, "parameters": _SCHEMA} for name in tools],
        "function_call": named,
    }


def _as_responses(tools: Sequence[str], choice: Choice) -> dict[str, Any]:
    flat = [
        {"type": "function", "name": name, "parameters": _SCHEMA, "strict": True} for name in tools
    ]
    named: Any = {"type": "function", "name": choice[1]} if isinstance(choice, tuple) else choice
    if isinstance(choice, tuple) and isinstance(choice[1], list):
        allowed = [{"type": "function", "name": name} for name in choice[1]]
        named = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    return {"tools": flat, "tool_choice": named}


def _as_anthropic(tools: Sequence[str], choice: Choice) -> dict[str, Any]:
    named: dict[str, Any] = (
        {"type": "tool", "name": choice[1]} if isinstance(choice, tuple) else {"type": choice}
    )
    return {
        "tools": [{"name": name, "input_schema": _SCHEMA} for name in tools],
        "tool_choice": named if choice else None,
    }


def _as_bedrock(tools: Sequence[str], choice: Choice) -> dict[str, Any]:
    specs = [{"toolSpec": {"name": name, "inputSchema": {"json": _SCHEMA}}} for name in tools]
    named: dict[Any, Any] = (
        {"tool": {"name": choice[1]}} if isinstance(choice, tuple) else {choice: {}}
    )
    return {"toolConfig": {"tools": specs} | ({"toolChoice": named} if choice else {})}


def _as_gemini(tools: Sequence[str], choice: Choice) -> dict[str, Any]:
    mode = choice[0] if isinstance(choice, tuple) else choice
    calling: dict[str, Any] = {"mode": mode} | (
        {"allowedFunctionNames": choice[1]} if isinstance(choice, tuple) else {}
    )
    declared = [{"functionDeclarations": [{"name": name, "parameters": _SCHEMA} for name in tools]}]
    return {"tools": declared, "toolConfig": {"functionCallingConfig": calling} if choice else None}


_TOOL = st.sampled_from(_NAMES).map(lambda name: ("tool", name))
_SOME = st.lists(st.sampled_from(_NAMES), min_size=1, unique=True)
_ALLOWED = _SOME.map(lambda names: ("allowed", names))


def _choose(*modes: str) -> st.SearchStrategy[Any]:
    return st.sampled_from([None, *modes])


# api -> (how history, tools and choice are written, which choices there are, those of the model's
# and of none)
_Api = tuple[str, Callable[[Sequence[str], Any], dict[str, Any]], st.SearchStrategy[Any], str, str]
APIS: dict[str, _Api] = {
    "chat": (
        "chat",
        _as_chat,
        _choose("auto", "none", "required") | _TOOL | _ALLOWED,
        "auto",
        "none",
    ),
    "functions": ("chat", _as_functions, _choose("auto", "none") | _TOOL, "auto", "none"),
    "responses": (
        "responses",
        _as_responses,
        _choose("auto", "none", "required") | _TOOL | _ALLOWED,
        "auto",
        "none",
    ),
    "anthropic": (
        "anthropic",
        _as_anthropic,
        _choose("auto", "any", "none") | _TOOL,
        "auto",
        "none",
    ),
    "bedrock": ("bedrock", _as_bedrock, _choose("auto", "any") | _TOOL, "auto", ""),
    "gemini": (
        "gemini",
        _as_gemini,
        _choose("AUTO", "ANY", "NONE") | _SOME.map(lambda names: ("ANY", names)),
        "AUTO",
        "NONE",
    ),
    "ollama": ("ollama", _as_chat, st.none(), "", ""),
}
every_api = pytest.mark.parametrize("api", APIS)


_PATHS = {
    "chat": "/v1/chat/completions",
    "functions": "/v1/chat/completions",
    "responses": "/v1/responses",
    "ollama": "/api/chat",
}


def write(
    api: str, made: list[list[str]], tools: Sequence[str] | None, choice: Choice
) -> dict[str, Any]:
    """A request after turns with these calls; `tools`: None where none are declared."""
    shape, declare = APIS[api][:2]
    turns = [Did(tuple((name, {}) for name in names), ("seen",) * len(names)) for names in made]
    declared = declare(tools, choice) if tools is not None else {}
    request = SHAPES[shape](turns) | {"generationConfig": {}}
    return request | {key: value for key, value in declared.items() if value is not None}


def expect(
    api: str,
    tools: list[str],
    without: Collection[str] | None,
    choice: Any,  # noqa: ANN401  # a Choice
    *,
    called: bool,
) -> Any:  # noqa: ANN401  # a Choice
    """The expected tools and choice, None if refused; `called`: the history has a call."""
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


def request_of(api: str) -> HttpRequest:
    return HttpRequest("POST", _PATHS.get(api, "/v1/x"))


def narrowed(body: bytes, *without: str, every: bool = False, path: str = "/v1/x") -> bytes:
    return narrow(HttpRequest("POST", path), body, Tools(None if every else without))


def read_raw(body: bytes) -> dict[str, bytes]:
    return {
        key: bytes(item)
        for key, item in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items()
    }


_TURNS = st.lists(st.lists(st.sampled_from([*_NAMES, "old"]), min_size=1, max_size=2), max_size=2)
_WITHOUT = st.none() | st.sets(st.sampled_from([*_NAMES, "old"]))


@pytest.mark.slow
@every_api
@settings(max_examples=examples(40))
@given(st.data(), _TURNS, _SOME, _WITHOUT)
def test_named_tools_go_and_the_choice_fits(
    api: str, data: st.DataObject, made: list[list[str]], tools: list[str], without: set[str] | None
) -> None:
    choice = data.draw(APIS[api][2])
    body = spelled(data.draw, write(api, made, tools, choice)).encode()
    expected = expect(api, tools, without, choice, called=b'"toolUse"' in body)

    if expected is None:
        with pytest.raises(NotEdited, match="no_choice"):
            narrow(request_of(api), body, Tools(without))
        return
    new = narrow(request_of(api), body, Tools(without))

    assert json.loads(new) == write(api, made, *expected)
    before, after = read_raw(body), read_raw(new)
    others = before.keys() - {"tools", "tool_choice", "functions", "function_call", "toolConfig"}
    assert {key: after.get(key) for key in others} == {key: before[key] for key in others}


@every_api
@settings(max_examples=examples(20))
@given(st.data(), _TURNS, _SOME, st.sets(st.sampled_from(_NAMES)))
def test_keeping_some_tools_equals_naming_the_others(
    api: str, data: st.DataObject, made: list[list[str]], tools: list[str], kept: set[str]
) -> None:
    body = spelled(data.draw, write(api, made, tools, data.draw(APIS[api][2]))).encode()
    others = {*_NAMES, "old"} - kept if kept & set(tools) else None

    found = []
    for without, keep in ((None, kept), (others, set[str]())):
        try:
            found.append(narrow(request_of(api), body, Tools(without, keep)))
        except NotEdited as why:
            found.append(why.reason.encode())

    assert found[0] == found[1]


@every_api
@settings(max_examples=examples(20))
@given(st.data(), _SOME, st.sets(st.sampled_from(_NAMES)))
def test_answer_is_held_to_one_call_beside_scarce_tools(
    api: str, data: st.DataObject, tools: list[str], scarce: set[str]
) -> None:
    old = write(api, [["pay"]], tools, data.draw(APIS[api][2]))
    body = spelled(data.draw, old).encode()
    changes: dict[str, Any] = {}
    if scarce & set(tools) and api == "anthropic":
        choice = old.get("tool_choice", {"type": "auto"})
        changes = {
            "tool_choice": choice
            if choice["type"] == "none"
            else choice | {"disable_parallel_tool_use": True}
        }
    elif scarce & set(tools) and api in ("chat", "responses"):
        changes = {"parallel_tool_calls": False}

    new = narrow(request_of(api), body, Tools([], scarce=scarce))

    before, after = read_raw(body), read_raw(new)
    document = Document(body)
    assert json.loads(new) == old | changes
    assert may_declare(document, frozenset(scarce)) or new == body
    open_conversation(document)
    assert may_declare(document, frozenset(scarce)) or new == body
    assert new == body or old | changes != old
    assert {key: after[key] for key in before.keys() - changes.keys()} == {
        key: before[key] for key in before.keys() - changes.keys()
    }
    assert narrow(request_of(api), new, Tools([], scarce=scarce)) == new


def _chat(tools: Sequence[object], **more: object) -> bytes:
    return json.dumps(
        {"messages": [{"role": "user", "content": "go"}], "tools": tools, **more}
    ).encode()


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
_TALKS: list[dict[str, Any]] = [{"messages": []}, {"contents": []}, {"input": []}, {}]


class Case(NamedTuple):
    """A body, the changed members of the new body (or GONE), and the tools to remove or keep.

    Without tools to remove, all go but those to keep. An answer may not call several tools beside a
    scarce one.
    """

    body: bytes
    changes: Mapping[str, Any] = {}
    without: Sequence[str] | None = ("f",)
    kept: Sequence[str] = ()
    scarce: Sequence[str] = ()
    path: str = "/v1/x"


GONE = object()
_F, _G = {"name": "f"}, {"name": "g"}
_PAY = [{"type": "function", "function": {"name": "pay"}}]
_GO = {"messages": [{"role": "user", "content": "go"}]}
_RAN = [
    {"role": "model", "parts": [{"executableCode": {"code": "1"}}]},
    {"role": "user", "parts": [{"text": "go"}]},
]
_ANY_MODE = {"functionCallingConfig": {"mode": "ANY"}}
_NONE_MODE = {"functionCallingConfig": {"mode": "NONE"}}
_GEMINI = json.loads(_gemini([_declare("f", "g")], toolConfig=_ANY_MODE))
_SEARCHING = [_declare("f") | {"googleSearch": {}}, {"codeExecution": {}}]
_ALLOWING = {
    "type": "allowed_tools",
    "mode": "auto",
    "tools": [_flat("f"), {"type": "mcp", "server_label": "a"}],
}
_FIRST_OF_SERVER = [_flat("pay"), _SERVER]


def _write(**members: object) -> bytes:
    return json.dumps(members).encode()


def _choose_again(**choice: Any) -> Case:  # noqa: ANN401  # any JSON value
    """Anthropic's choice, in a request that loses a tool while another one is scarce."""
    held = {"type": "auto", "disable_parallel_tool_use": True}
    return Case(
        _chat([_F | {"input_schema": {}}, _G | {"input_schema": {}}], **choice),
        {"tools": [_G | {"input_schema": {}}], "tool_choice": held},
        scarce="g",
    )


def _call_gemini(config: dict[str, Any]) -> Case:
    called = {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}}}]}
    body = _write(contents=[called], tools=[_declare("f")], toolConfig=config)
    return Case(body, {"toolConfig": config | _NONE_MODE})


def _hold(
    model: str | None = None, path: str = "/v1/chat/completions", *, held: bool = False
) -> Case:
    body = _chat(_PAY) if model is None else _chat(_PAY, model=model)
    return Case(body, {"parallel_tool_calls": False} if held else {}, (), scarce=["pay"], path=path)


CASES = [
    # custom tools, tools that an API runs itself, by their own names or by those of their calls,
    # and groups of tools
    Case(
        _chat([_CUSTOM, *_as_chat(["f"], None)["tools"]]),
        {"tools": _as_chat(["f"], None)["tools"]},
        ["sql"],
    ),
    Case(
        _chat([{"type": "web_search_20250305", "name": "web_search"}, _F]),
        {"tools": [_F]},
        ["web_search"],
    ),
    Case(
        _responses([{"type": "custom", "name": "sql"}, _flat("f")]),
        {"tools": [_flat("f")]},
        ["sql"],
    ),
    Case(
        _responses([{"type": "web_search_preview_2025_03_11"}, _flat("f")]),
        {"tools": [_flat("f")]},
        ["web_search"],
    ),
    Case(
        _responses([{"type": "web_search_preview"}, _flat("f")]),
        {"tools": [_flat("f")]},
        ["web_search_preview"],
    ),
    Case(
        _responses([{"type": "computer_use_preview"}, _flat("f")]),
        {"tools": [_flat("f")]},
        ["computer"],
    ),
    Case(_responses([_SERVER, _flat("f")]), {"tools": [_SERVER]}, ["f", "a"]),
    Case(
        _responses([{"type": "namespace", "name": "crm", "tools": [_flat("f"), _flat("g")]}]),
        {"tools": [{"type": "namespace", "name": "crm", "tools": [_flat("f")]}]},
        ["g"],
    ),
    Case(
        _responses([{"type": "namespace", "name": "crm", "tools": [_flat("f")]}, _flat("g")]),
        {"tools": [_flat("g")]},
    ),
    Case(
        _gemini([_declare("f", "g"), {"googleSearch": {}}]),
        {"tools": [_declare("g"), {"googleSearch": {}}]},
    ),
    Case(_gemini(_SEARCHING), {"tools": [{"googleSearch": {}}]}, ["f", "code_execution"]),
    Case(_gemini([_declare("f"), {"mcpServers": [{}]}]), {"tools": [{"mcpServers": [{}]}]}),
    Case(
        _gemini([{"function_declarations": [_F, _G]}]), {"tools": [{"function_declarations": [_G]}]}
    ),
    Case(_chat([_F, _G, _F]), {"tools": [_G]}),
    Case(  # as Gemini's own command line sends it
        _write(model="m", request=_GEMINI), {"request": _GEMINI | {"tools": [_declare("g")]}}
    ),
    # however much space stands before a name, and though a key without a name stands before the
    # conversation
    Case(
        _chat([_F, _G])
        .replace(b'"f"', b" " * 5_000 + b'"f"')
        .replace(b'"name"', b'"name"' + b" " * 5_000),
        {"tools": [_G]},
    ),
    *[Case(_write(**{"": True, **talk}, tools=[_F, _G]), {"tools": [_G]}) for talk in _TALKS],
    # tools that may not be called stay declared where the API has a choice that forbids them
    Case(
        _chat(
            [*_as_chat(["f"], None)["tools"], _CUSTOM],
            tool_choice="required",
            parallel_tool_calls=False,
        ),
        {"tool_choice": "none"},
        None,
    ),
    Case(
        _responses([_flat("f"), {"type": "file_search"}], tool_choice={"type": "file_search"}),
        {"tool_choice": "none"},
        None,
    ),
    Case(
        _responses([_flat("f"), _flat("g")], previous_response_id="r"),
        {"tool_choice": "none"},
        None,
    ),
    Case(_responses([_SERVER, _flat("f")]), {"tool_choice": "none"}, None),
    Case(_responses([_SERVER]), {"tool_choice": "none"}, None),
    Case(
        _chat([_F, {"type": "bash_20250124", "name": "bash"}], tool_choice={"type": "any"}),
        {"tool_choice": {"type": "none"}},
        None,
    ),
    Case(_chat([_TOOLSET, _F]), {"tool_choice": {"type": "none"}}, None),
    Case(_chat([_TOOLSET]), {"tool_choice": {"type": "none"}}, None),
    Case(_responses(_FIRST_OF_SERVER), {"tool_choice": "none"}, None, kept=["read"]),
    Case(
        _write(messages=[{"role": "user", "content": []}], toolConfig={"tools": [_SPEC, _CACHE]}),
        {"toolConfig": GONE},
        None,
    ),
    _call_gemini({}),
    _call_gemini({"retrievalConfig": {}}),
    _call_gemini(_ANY_MODE),
    # Gemini runs code and searches whatever the choice is
    Case(_write(contents=_RAN, tools=[{"codeExecution": {}}]), {"tools": GONE}, ["code_execution"]),
    Case(_gemini(_SEARCHING), {"tools": [_declare("f")], "toolConfig": _NONE_MODE}, None),
    # what a choice says beside the tool stays, also where gateways mix what APIs say; named tools
    # leave the allowed ones
    *[
        Case(
            _write(
                **_GO, **{key: [_F, _G], choice: _F | {"disable_parallel_tool_use": True, **kind}}
            ),
            {key: [_G], choice: {"type": "auto", "disable_parallel_tool_use": True}},
        )
        for key, choice, kind in (
            ("tools", "tool_choice", {"type": "tool"}),
            ("tools", "tool_choice", {}),
            ("functions", "function_call", {}),
        )
    ],
    Case(
        _responses([_SERVER, _flat("f")], tool_choice=_ALLOWING),
        {"tools": [_SERVER], "tool_choice": _ALLOWING | {"tools": _ALLOWING["tools"][1:]}},
    ),
    # a choice that is mended is held to one call as well
    _choose_again(tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": False}),
    _choose_again(tool_choice={"type": "tool", "name": "f"}),
    _choose_again(tool_choice={"type": "auto", "disable_parallel_tool_use": False}),
    _choose_again(tool_choice=None),
    # OpenAI's older reasoning models answer 400 to the switch, whatever its value; Cohere's API
    # answers 422 to any unknown key
    *map(_hold, ["o1", "o3-mini", "o4-mini-2025-04-16", "openai/o3", "azure:o3"]),
    _hold(path="/openai/deployments/o3-mini/chat/completions"),
    _hold("command-a", "/v2/chat"),
    *[_hold(model, held=True) for model in ("gpt-4o", "gpt-o1", None)],
    # where no tool is named or declared, no byte changes
    *map(
        Case,
        [
            _chat([]),
            _responses([_SERVER]),
            b'{"input":"go","tools":null}',
            b'{"messages":[{"role":"a"}]}',
            b'{"a":1}',
        ],
    ),
    Case(_chat([]), {}, None),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.body.decode()[:60])
def test_each_kind_of_tool_and_choice_is_narrowed(case: Case) -> None:
    new = narrow(
        HttpRequest("POST", case.path), case.body, Tools(case.without, case.kept, case.scarce)
    )

    found = json.loads(case.body) | case.changes
    assert json.loads(new) == {key: value for key, value in found.items() if value is not GONE}
    assert case.changes or new == case.body


def test_every_other_byte_stays() -> None:
    before, after = (
        rb'{ "x" : 1.50e1 , "t\u006fols": [ ',
        rb', "messages":[{"role":"user","content":"\u00e9"}] ,"tool_choice" : ',
    )
    tools = rb'[ {"name" : "\u0066", "input_schema":{ }} , {"name":"g" , "n":1e0} ,  {"name":"h"} ]'

    body = BOM_UTF8 + before[:-2] + tools + after + rb'{"type":"tool", "name":"f"} }'

    assert (
        narrowed(body, "f", "h")
        == BOM_UTF8 + before + rb'{"name":"g" , "n":1e0} ]' + after + rb'{"type":"auto"} }'
    )


_CONFIGS = '"toolConfig":{},"tool_config":{}'
_TWICE = '"messages":[{"role":"user","content":"go"}],"tools":[{"name":"f"},{"name":"g"}]'


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("{" + _TWICE + ',"tools":[{"name":"f"},{"name":"g"}]}', "ambiguous_body"),
        ("{" + _TWICE + ',"tool\\u0073":[]}', "ambiguous_body"),
        ("{" + _TWICE.replace('"f"', '"f","name":"g"') + "}", "ambiguous_body"),
        (
            "{" + _TWICE.replace('"name":"f"', '"function":{"name":"f","n\\u0061me":"f"}') + "}",
            "ambiguous_body",
        ),
        ("{" + _TWICE + ',"input":"go"}', "ambiguous_body"),
        ("{" + _TWICE + ',"toolConfig":{}}', "ambiguous_body"),
        ("{" + _TWICE + ',"tool_choice":{"type":"tool","type":"auto"}}', "ambiguous_body"),
        ('{"request":{"contents":[]},"tools":[]}', "ambiguous_body"),
        (
            '{"contents":[{}],"tools":[{"functionDeclarations":[{"name":"f"},{"name":"g"}]}],'
            + _CONFIGS
            + "}",
            "ambiguous_body",
        ),
        (
            '{"contents":[],"tools":[{"type":"x","functionDeclarations":[{"name":"f"}]}]}',
            "ambiguous_body",
        ),
        ('{"messages":[{"role":"user"}],"tools":{"name":"f"}}', "ambiguous_body"),
        ('{"messages":[{"role":"user"}],"tools":["f"]}', "ambiguous_body"),
        ('{"messages":[{"role":"user"}],"tools":"' + "f" * 9 + '"}', "ambiguous_body"),
        (
            '{"messages":[{"role":"user"}],"tools":[' + ",".join(['{"name":"f"}'] * 10_000) + "]}",
            "inspect_limit",
        ),
        (
            '{"messages":[{"role":"user"}],"tools":[' + ",".join(['{"name":"f"}'] * 10_001) + "]}",
            "inspect_limit",
        ),
        ('{"messages":' + "[" * 5_000, "not_json"),
        ("", "not_json"),
        ("[]", "ambiguous_body"),
    ],
    ids=lambda given: given[:60],
)
def test_ambiguous_bodies_are_not_narrowed(body: str, reason: str) -> None:
    """Another parser could find the tool in them."""
    with pytest.raises(NotEdited) as why:
        narrowed(body.encode(), "f")

    assert why.value.reason == reason


def test_compressed_bodies_and_server_tools_are_not_narrowed() -> None:
    compressed = HttpRequest("POST", "/v1/x", "", {"content-encoding": b"gzip"})

    with pytest.raises(NotEdited, match="content_encoding"):
        narrow(compressed, gzip.compress(_chat([])), Tools(None))
    with pytest.raises(NotEdited, match="no_choice"):
        narrow(request_of("responses"), _responses(_FIRST_OF_SERVER), Tools(None, ["pay"]))


@pytest.mark.slow
@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_are_narrowed_or_refused(name: str, every: bool) -> None:
    """Only NotEdited is raised, and the result is JSON."""
    body = HOSTILE[name][0]()
    with suppress(NotEdited):
        new = narrowed(body, "f", every=every)
        assert new == body or msgspec.json.decode(new, type=msgspec.Raw)


@pytest.mark.slow
@pytest.mark.parametrize(("lists", "tools"), [(1_000, 2), (15, 300)])
def test_remembered_lists_of_tools_are_charged_their_memory(lists: int, tools: int) -> None:
    offered = [
        json.dumps([{"name": f"{number}.{place}"} for place in range(tools)]).encode()
        for number in range(lists)
    ]
    narrowed(b'{"messages":[],"tools":[{"name":"a"}]}', "a")
    tracemalloc.start()
    for number, each in enumerate(offered):
        narrowed(
            b'{"messages":[{"role":"user","content":"a"}],"tools":' + each + b"}", f"{number}.0"
        )
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert taken <= sum(measure_list(each, tools) for each in offered)
