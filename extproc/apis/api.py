"""The record in which each API's file describes the API."""
# interpreted: writes refusals, which is json's time; msgspec makes a Struct while Python runs

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from extproc.apis.contents import Reader
from extproc.apis.conversation import Shape
from extproc.apis.places import Locator
from extproc.apis.usage import Finder, find_model
from extproc.decision import Framed
from extproc.request.document import WORTH_COUNTING
from extproc.request.http import HttpRequest
from extproc.request.patch import Fields, Patch

JSON = "application/json"
EVENTS = "text/event-stream"

_LONGEST_VALUE = 4_096
"""Longest value to read, in bytes; those that matter are short."""

_MOST_VALUES = 1_000_000
"""Most values in a body to read: skipping this many takes 10 ms."""

ASKED: Final[set[str]] = {"model"}
"""The keys of a body that answers depend on; all others are skipped. Every API adds its own."""


@cache
def _make_decoder() -> Callable[[bytes | memoryview], msgspec.Struct]:
    """For all of ASKED, each raw, because clients send anything."""
    asked = [(key, msgspec.Raw, msgspec.Raw()) for key in sorted(ASKED)]
    return msgspec.json.Decoder(msgspec.defstruct("Asked", asked, gc=False)).decode


class Question:
    """A request, as far as the answer depends on it.

    Attributes:
        request: without its body.
        body: its keys in ASKED; None if it cannot be read, or is no JSON object.
    """

    def __init__(self, request: HttpRequest, content: bytes | memoryview | None) -> None:
        """Read the body, if there is one to inspect."""
        self.request = request
        self.body = _read_body(content) if content is not None else None

    def has(self, *keys: str) -> bool:
        """Whether the body has all these keys."""
        return all(bytes(self.find(key)) for key in keys)

    def find(self, key: str) -> msgspec.Raw:
        """A raw value of the body, empty if missing."""
        return getattr(self.body, key) if self.body is not None else msgspec.Raw()

    def read(self, key: str) -> Any:  # noqa: ANN401  # JSON
        """A short value of the body, None if missing or unreadable."""
        value = self.find(key)
        if not 0 < len(value) <= _LONGEST_VALUE:
            return None
        try:
            return msgspec.json.decode(value)
        except (ValueError, RecursionError):
            return None

    @property
    def model(self) -> str:
        """See `find_model`."""
        named = self.read("model")
        return find_model(self.request.path, named if isinstance(named, str) else "")


def _read_body(content: bytes | memoryview) -> msgspec.Struct | None:
    if len(content) > WORTH_COUNTING and bytes(content).count(b",") > _MOST_VALUES:
        return None
    try:
        return _make_decoder()(content)
    except (ValueError, RecursionError):  # msgspec's and Unicode's errors are ValueErrors
        return None


class Refusal(NamedTuple):
    """A refusal, for an API to write.

    Attributes:
        status: HTTP status.
        message: for models and people; contains the code, because some SDKs show nothing else.
        reason: as in `X-Fairvisor-Reason`.
        code: for programs.
        detail: more, for clients that know Loopguard; empty for none.
    """

    status: int
    message: str
    reason: str
    code: str
    detail: Mapping[str, object]


class Completion(NamedTuple):
    """A refusal as an answer of the model.

    Attributes:
        text: of the answer.
        model: name from the request.
        name: unique id of the answer.
        created: when, in seconds since 1970.
    """

    text: str
    model: str
    name: str
    created: int


class Endpoint(NamedTuple):
    """One kind of request of an API.

    Attributes:
        write_error: writes a refusal as an error of the API.
        complete: writes an answer of the model, whole or streamed as requested; returns None if this is unknown, or if the API
            has no such answers.
        needs_tool: a history with calls is refused if no tool is declared.
        websocket: calls are also accepted over a WebSocket on the same path.
        asks_model: a model answers; otherwise, tokens are counted.
    """

    write_error: Callable[[Refusal, Question], Framed]
    complete: Callable[[Completion, Question], Framed | None] = lambda _completion, _question: None
    needs_tool: bool = True
    websocket: bool = False
    asks_model: bool = True


Changes = dict[str, bytes | None]
"""New values of an object's members; None removes one."""


class ToolsLeft(Enum):
    """What has become of the tools in a list."""

    SAME = "all stay"
    FEWER = "some stay"
    FORBIDDEN = "some stay that may not be called"
    GONE = "none stays"


class ToolList(NamedTuple):
    """A list of tools that a body declares, and beside it the choice among them (such as `tools` and `tool_choice`).

    Attributes:
        beside: key of the conversation beside which both are; empty for a body without one.
        tools: key of the list.
        choice: key of the choice.
        none: JSON of the choice that forbids all tools; empty if the API has none.
        auto: JSON of the choice that leaves it to the model.
        along: other keys that are not allowed without tools.
        holder: key of an object, beside the conversation, that holds list and choice; empty for none.
        wraps: the conversation's key holds an object with all three: conversation, list and choice.
        owns: whether an entry, by its `type` and its members, is of this API, if a list of another API has the same key;
            None to accept all.
        choose: edits the choice, given the body, the members beside it, the state of the tools, and the names of removed tools;
            returns other changes beside it. None if the choice is a tool, a list of tools, or a mode.
    """

    beside: str
    tools: str
    choice: str
    none: bytes = b'"none"'
    auto: bytes = b'"auto"'
    along: tuple[str, ...] = ()
    holder: str = ""
    wraps: bool = False
    owns: Callable[[str, Fields], bool] | None = None
    choose: Callable[[Patch, Fields, ToolsLeft, Collection[str]], Changes] | None = None


class ToolWords(NamedTuple):
    """An API's words in lists of tools. All lists are read with the words of all APIs, because gateways mix them.

    Attributes:
        wrappers: keys of an object that has the tool's name.
        lists: keys of an entry that hold a list of tools.
        groups: types of entries that are lists of tools, each with the key of its list.
        servers: types, or keys, of entries for servers, whose tools are not declared one by one.
        others: keys of an entry that are no tools.
        modes: types of choices that name no tool.
        allowed: types of choices that list tools.
        kept: keys of a choice that apply to any tool: a choice with one is edited, not replaced.
        called: names in calls, for tools that are declared by another name.
        schemas: keys of a tool that hold the JSON schema of its arguments.
    """

    wrappers: frozenset[str] = frozenset()
    lists: frozenset[str] = frozenset()
    groups: Mapping[str, str] = MappingProxyType({})
    servers: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    modes: frozenset[str] = frozenset()
    allowed: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    called: Mapping[str, str] = MappingProxyType({})
    schemas: frozenset[str] = frozenset()


class Api(NamedTuple):
    """One API; patterns are regular expressions, which must take linear time.

    An endpoint is found by content type, path, header, then key of the body: the first that matches.

    Attributes:
        default: endpoint for requests whose API is not recognized; exactly one API has it, and is tried last.
        content_types: endpoints by patterns of the `content-type`, for any path.
        paths: endpoints by patterns, which are searched for in the path.
        prefixes: paths of client calls, as `pathPrefixes` of a policy; the preset `agents` must have them.
        headers: endpoints by names of headers that only clients of this API send.
        keys: endpoints by keys that a body has.
        asked: further keys of bodies that `write_error` and `complete` read.
        shapes: how conversations are written in bodies.
        blocks: readers for blocks of a content, by `type` or by the one key that names the block.
        locators: for such blocks, where a note can be put.
        tool_lists: where tools are declared.
        tool_words: the API's words in these lists.
        models: functions that find the model in a path, each by a word that such paths contain.
        list_models: other names of a model, for prices, the longer first.
        counts: places of token counts in responses, keys joined by dots, by the names in `usage.COUNTS`.
        events: the objects in events of a stream that hold counts.
        answered_by: where responses name the model.
        streamed_documents: parts of paths whose responses are one JSON document, streamed in pieces.
        credentials: where clients show their secret, as limit keys; the first that a request has counts.
    """

    default: Endpoint | None = None
    content_types: Mapping[str, Endpoint] = MappingProxyType({})
    paths: Mapping[str, Endpoint] = MappingProxyType({})
    prefixes: tuple[str, ...] = ()
    headers: Mapping[str, Endpoint] = MappingProxyType({})
    keys: Mapping[tuple[str, ...], Endpoint] = MappingProxyType({})
    asked: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    blocks: Mapping[str, Reader] = MappingProxyType({})
    locators: Mapping[str, Locator] = MappingProxyType({})
    tool_lists: tuple[ToolList, ...] = ()
    tool_words: ToolWords = ToolWords()
    models: Mapping[str, Finder] = MappingProxyType({})
    list_models: Callable[[str], list[str]] = lambda _model: []
    counts: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    events: tuple[str, ...] = ()
    answered_by: tuple[str, ...] = ()
    streamed_documents: tuple[str, ...] = ()
    credentials: tuple[str, ...] = ()


def make_error(refusal: Refusal) -> dict[str, Any]:
    """The error body that most clients understand, with Loopguard's own `detail`; some APIs add to it."""
    error = {"message": refusal.message, "type": refusal.reason, "param": None, "code": refusal.code}
    return {"error": error, "detail": refusal.detail} if refusal.detail else {"error": error}


def write_error(refusal: Refusal, _: Question) -> Framed:
    """The same as a complete response."""
    return frame_json(refusal.status, make_error(refusal))


def frame_json(status: int, body: object, *headers: tuple[str, str]) -> Framed:
    """A JSON body, and headers."""
    return Framed(status, JSON, json.dumps(body).encode(), headers)


def frame_events(events: Iterable[str | Mapping[str, Any]], *, named: bool = False) -> Framed:
    """A stream of server-sent events, all of them at once.

    Args:
        events: the data of each; texts are sent unchanged.
        named: events have their `type` as name.
    """
    lines = []
    for event in events:
        if named and not isinstance(event, str):
            lines.append(f"event: {event['type']}\n")
        lines.append(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n")
    return Framed(200, EVENTS, "".join(lines).encode())
