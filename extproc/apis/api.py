"""The record in which each API's file describes the API."""
# interpreted: little work besides json; msgspec creates a Struct at run time

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
"""Maximum length of a value to read, in bytes; relevant values are short."""

_MOST_VALUES = 1_000_000
"""Maximum number of values in a body to read. Skipping this many takes 10 ms."""

ASKED: Final[set[str]] = {"model"}
"""Keys of a body that answers depend on; all others are skipped. Each API adds its own."""


@cache
def _make_decoder() -> Callable[[bytes | memoryview], msgspec.Struct]:
    """A decoder for all of ASKED. Values stay raw, because clients may send anything."""
    asked = [(key, msgspec.Raw, msgspec.Raw()) for key in sorted(ASKED)]
    return msgspec.json.Decoder(msgspec.defstruct("Asked", asked, gc=False)).decode


class Question:
    """The parts of a request that the answer depends on.

    Attributes:
        request: the request without its body.
        body: the body's keys in ASKED; None if it is unreadable or not a JSON object.
    """

    def __init__(self, request: HttpRequest, content: bytes | memoryview | None) -> None:
        """Read the body, if there is one and it may be inspected."""
        self.request = request
        self.body = _read_body(content) if content is not None else None

    def has(self, *keys: str) -> bool:
        """Whether the body has all these keys."""
        return all(bytes(self.find(key)) for key in keys)

    def find(self, key: str) -> msgspec.Raw:
        """A raw value of the body; empty if missing."""
        return getattr(self.body, key) if self.body is not None else msgspec.Raw()

    def read(self, key: str) -> Any:  # noqa: ANN401  # JSON
        """A short value of the body; None if missing or unreadable."""
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
    except (ValueError, RecursionError):  # errors of msgspec and Unicode are ValueErrors
        return None


class Refusal(NamedTuple):
    """A refusal, to be written in an API's format.

    Attributes:
        status: HTTP status.
        message: for models and people; contains the code, because some SDKs show only the message.
        reason: as in `X-Fairvisor-Reason`.
        code: for programs.
        detail: more, for clients that know Loopguard; may be empty.
    """

    status: int
    message: str
    reason: str
    code: str
    detail: Mapping[str, object]


class Completion(NamedTuple):
    """A refusal as an answer of the model.

    Attributes:
        text: text of the answer.
        model: the model's name in the request.
        name: unique id of the answer.
        created: seconds since 1970.
    """

    text: str
    model: str
    name: str
    created: int


Changes = dict[str, bytes | None]
"""New values of an object's members; None removes a member."""


class Endpoint(NamedTuple):
    """One kind of request of an API.

    Attributes:
        write_error: writes a refusal as an error of the API.
        complete: writes an answer of the model, streamed if requested; returns None if the format
            is unknown. None if no model answers here with text.
        takes_choice: the API supports tool choices; otherwise, only removing a tool prevents calls.
        websocket: calls are also accepted over a WebSocket on the same path.
        asks_model: a model answers; otherwise, tokens are only counted.
        ask_usage: asks for the usage of a stream, given the body and its members; returns changes
            to them. None if streams always or never report usage.
        prefills: the model continues an assistant message at the end.
    """

    write_error: Callable[[Refusal, Question], Framed]
    complete: Callable[[Completion, Question], Framed | None] | None = None
    takes_choice: bool = True
    websocket: bool = False
    asks_model: bool = True
    ask_usage: Callable[[Patch, Fields], Changes] | None = None
    prefills: bool = False


class ToolsLeft(Enum):
    """Which tools of a list are left."""

    SAME = "all stay"
    FEWER = "some stay"
    FORBIDDEN = "none may be called"
    GONE = "none stays"


class ToolList(NamedTuple):
    """A body's list of tools and the tool choice beside it, such as `tools` and `tool_choice`.

    Attributes:
        beside: key of the conversation beside them; empty for a body without one.
        tools: key of the list.
        choice: key of the tool choice.
        none: JSON of the choice that forbids all tools; empty if the API has none.
        auto: JSON of the choice that leaves it to the model.
        call: bytes that every body with a call in its history contains, if the API has no choice
            `none` and refuses such a body without tools; else empty.
        holder: key of an object beside the conversation that contains list and choice; may be
            empty.
        wraps: the conversation's key contains an object with conversation, list and choice.
        owns: returns whether an entry has this API's format, given its `type` and members; needed
            if several APIs use the same key. None accepts all entries.
        choose: edits the choice, given the body, the members beside it, the state of the tools, and
            the names of removed tools; returns other changes beside it. None if the choice is a
            tool, a list of tools, or a mode.
        hold: limits an answer to one call, given the body, the members beside the list, changes to
            them, and the path; returns all changes. None if the API has no such switch.
    """

    beside: str
    tools: str
    choice: str
    none: bytes = b'"none"'
    auto: bytes = b'"auto"'
    call: bytes = b""
    holder: str = ""
    wraps: bool = False
    owns: Callable[[str, Fields], bool] | None = None
    choose: Callable[[Patch, Fields, ToolsLeft, Collection[str]], Changes] | None = None
    hold: Callable[[Patch, Fields, Changes, str], Changes] | None = None


class ToolWords(NamedTuple):
    """An API's words in tool lists.

    All lists are read with the words of all APIs, because gateways mix them.

    Attributes:
        wrappers: keys of an object that contains the tool's name.
        lists: keys of an entry that contain a list of tools.
        groups: types of entries that are lists of tools, each with the key of its list.
        servers: types or keys of entries for servers, whose tools are not declared individually.
        others: keys of an entry that are not tools.
        modes: types of choices that name no tool.
        allowed: types of choices that list tools.
        kept: keys of a choice that apply to any tool: a choice with one is edited, not replaced.
        called: names in calls of tools that are declared by another name.
        schemas: keys of a tool that contain the JSON schema of its arguments.
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

    An endpoint is found by content type, path, header, then key of the body; the first match wins.

    Attributes:
        default: endpoint for requests of unknown APIs; exactly one API has it, and is tried last.
        content_types: endpoints by patterns of the `content-type`, for any path.
        name: as in `apis` of a selector; files with the same name are one API there.
        paths: endpoints by patterns that are searched for in the path.
        samples: paths of client calls, one for each form.
        headers: endpoints by headers that only clients of this API send.
        keys: endpoints by keys of the body.
        asked: further keys of bodies that `write_error` and `complete` read.
        shapes: formats of conversations in bodies.
        blocks: readers for content blocks, by `type` or by the one key that names the block.
        locators: functions that find a place for a note in such blocks.
        tool_lists: where tools are declared.
        tool_words: the API's words in these lists.
        models: functions that find the model in a path, each by a word that such paths contain.
        list_models: returns other names of a model, for prices, longest first.
        counts: places of token counts in responses, as keys joined by dots, by the names in
            `usage.COUNTS`.
        events: objects with counts in a stream's events.
        answered_by: where responses name the model.
        streamed_documents: parts of paths whose responses are one JSON document, streamed in
            pieces.
        credentials: where clients send their secret, as limit keys; the first that a request has
            wins.
        public_id: what identifies signed requests instead of a secret; empty if clients always send
            a secret.
        gateways: parts of the paths under which gateways offer such an API, in lower case.
        error_marks: a member, as compact JSON, that marks a result as an error.
        longest_answers: where bodies limit the tokens of an answer, as keys joined by dots.
        copies: where bodies ask for several answers: a number, or a list of prompts.
    """

    default: Endpoint | None = None
    content_types: Mapping[str, Endpoint] = MappingProxyType({})
    name: str = ""
    paths: Mapping[str, Endpoint] = MappingProxyType({})
    samples: tuple[str, ...] = ()
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
    public_id: str = ""
    gateways: tuple[str, ...] = ()
    error_marks: tuple[str, ...] = ()
    longest_answers: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()


def make_error(refusal: Refusal) -> dict[str, Any]:
    """The error body that most clients understand, with Loopguard's `detail`."""
    error = {
        "message": refusal.message,
        "type": refusal.reason,
        "param": None,
        "code": refusal.code,
    }
    return {"error": error, "detail": refusal.detail} if refusal.detail else {"error": error}


def write_error(refusal: Refusal, _: Question) -> Framed:
    """Write the error that most clients understand as a JSON response."""
    return frame_json(refusal.status, make_error(refusal))


def frame_json(status: int, body: object, *headers: tuple[str, str]) -> Framed:
    """A response with a JSON body."""
    return Framed(status, JSON, json.dumps(body).encode(), headers)


def frame_events(events: Iterable[str | Mapping[str, Any]], *, named: bool = False) -> Framed:
    """All server-sent events of a stream in one response.

    Args:
        events: the data of each event; strings are sent unchanged.
        named: name each event by its `type`.
    """
    lines = []
    for event in events:
        if named and not isinstance(event, str):
            lines.append(f"event: {event['type']}\n")
        lines.append(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n")
    return Framed(200, EVENTS, "".join(lines).encode())
