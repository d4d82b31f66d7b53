"""What an API is: all that is peculiar to it, in the one record that its file gives."""
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
"""Of the body, in bytes; those that are asked for are short."""

_MOST_VALUES = 1_000_000
"""In a body that is looked into: passing over as many takes 10 ms."""

ASKED: Final[set[str]] = {"model"}
"""The keys of a body that are read before it is answered, all others are passed over. Every API adds its own."""


@cache
def _make_decoder() -> Callable[[bytes | memoryview], msgspec.Struct]:
    """For all of ASKED, each raw, because clients send anything."""
    asked = [(key, msgspec.Raw, msgspec.Raw()) for key in sorted(ASKED)]
    return msgspec.json.Decoder(msgspec.defstruct("Asked", asked, gc=False)).decode


class Question:
    """What a client has asked, as far as the answer depends on it.

    Attributes:
        request: without its body.
        body: its keys in ASKED; None where it could not be read, or where it is no JSON object.
    """

    def __init__(self, request: HttpRequest, content: bytes | memoryview | None) -> None:
        """Look into the body, where that may be done."""
        self.request = request
        self.body = _read_body(content) if content is not None else None

    def has(self, *keys: str) -> bool:
        """Whether the body has all these keys."""
        return all(bytes(self.find(key)) for key in keys)

    def find(self, key: str) -> msgspec.Raw:
        """A value of the body as it was sent, empty where it is not there."""
        return getattr(self.body, key) if self.body is not None else msgspec.Raw()

    def read(self, key: str) -> Any:  # noqa: ANN401  # JSON
        """A short value of the body, None where it is not there or cannot be read."""
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
    """Why a request is refused.

    Attributes:
        status: of HTTP.
        message: for models and people, with the code in it: some SDKs show nothing else.
        reason: as it stands in `X-Fairvisor-Reason`.
        code: for programs.
        detail: the same once more, for those who know Loopguard; empty for none.
    """

    status: int
    message: str
    reason: str
    code: str
    detail: Mapping[str, object]


class Completion(NamedTuple):
    """An answer as if of the model.

    Attributes:
        text: that it says.
        model: as the client calls it.
        name: of this one answer, which no other has.
        created: when, in seconds since 1970.
    """

    text: str
    model: str
    name: str
    created: int


class Endpoint(NamedTuple):
    """One kind of request that an API takes.

    Attributes:
        write_error: a refusal as the API writes its errors.
        complete: an answer of the model, whole or in pieces as it was asked for; None where that cannot be told, or where the
            API has no such answers.
        needs_tool: a history with calls is refused where no tool is declared.
        websocket: calls are also taken over a WebSocket on the same path.
        asks_model: a model answers; else tokens are counted.
    """

    write_error: Callable[[Refusal, Question], Framed]
    complete: Callable[[Completion, Question], Framed | None] = lambda _completion, _question: None
    needs_tool: bool = True
    websocket: bool = False
    asks_model: bool = True


Changes = dict[str, bytes | None]
"""New values of an object's members; None where one goes."""


class ToolsLeft(Enum):
    """What has become of the tools in a list."""

    SAME = "all stay"
    FEWER = "some stay"
    FORBIDDEN = "some stay that may not be called"
    GONE = "none stays"


class ToolList(NamedTuple):
    """A list of tools that a body declares, and beside it the choice among them.

    Attributes:
        beside: key of the conversation beside which both stand; empty for a body that shows none.
        tools: key of the list.
        choice: key of the choice.
        none: the choice of none; empty where the API has no such choice.
        auto: the choice that is the model's.
        along: keys that may not stand there without tools either.
        holder: key of an object, beside the conversation, in which list and choice stand; empty for none.
        wraps: the conversation's key holds an object in which they stand, and the conversation, too.
        owns: whether an entry, by its `type` and its members, is one of this API, where a list of another API has the same key.
            Tried where that list is read; None for a list that is read without.
        choose: edits the choice, given the body, the members beside it, what has become of the tools, and the names of those
            that have gone; says what else changes beside it. None where it is one tool, a list of them, or a mode.
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
    """What an API calls things in a list of tools. All lists are read with the words of all APIs, because gateways mix them.

    Attributes:
        wrappers: keys of an object that says what a tool is called.
        lists: keys of an entry under which a list of tools stands.
        groups: the types of entries that are lists of tools, and the key of each under which these stand.
        servers: types, or keys, of entries for servers, whose tools are not declared one by one.
        others: keys of an entry that are no tools.
        modes: types of choices that are no tool's.
        allowed: types of choices that list tools.
        kept: keys of a choice that hold for any tool: a choice that has one is changed, and not replaced.
        called: how calls go by of a tool that is declared by another name.
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


class Api(NamedTuple):
    """All that is peculiar to one API; patterns are regular expressions, which take time in proportion to what they look at.

    Attributes:
        default: how requests are answered whose API is not recognized; one API has this, and is asked last.
        content_types: patterns of the `content-type` that tell the API whatever the path is, and what is called there.
        paths: patterns of the path, searched for, and what is called there.
        prefixes: where clients send their calls, as `pathPrefixes` of a policy: what the preset for agents guards.
        headers: names of those that clients of this API alone send, asked where the path says nothing.
        keys: of bodies, asked where the headers say nothing either.
        asked: other keys of bodies that `write_error` and `complete` read.
        shapes: how conversations stand in bodies.
        blocks: how what stands in a content is read, by its `type` or by the one key that names it.
        locators: where in such a block a note has its place.
        tool_lists: where tools are declared.
        tool_words: what is read there.
        models: where the path names the model: a word that has to be in it, and what finds the name.
        list_models: other names of a model, for prices, the longer first.
        counts: where answers say how many tokens they took, by the names in `usage.COUNTS`.
        events: the objects in events of a stream that hold counts.
        answered_by: where answers name the model.
        streamed_documents: parts of paths whose answers are one document of JSON, which comes in pieces.
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
    """The body that most clients understand, and everybody who was told of it; some APIs add to it."""
    error = {"message": refusal.message, "type": refusal.reason, "param": None, "code": refusal.code}
    return {"error": error, "detail": refusal.detail} if refusal.detail else {"error": error}


def write_error(refusal: Refusal, _: Question) -> Framed:
    """The same as a whole answer."""
    return frame_json(refusal.status, make_error(refusal))


def frame_json(status: int, body: object, *headers: tuple[str, str]) -> Framed:
    """A body of JSON, and headers beside it."""
    return Framed(status, JSON, json.dumps(body).encode(), headers)


def frame_events(events: Iterable[str | Mapping[str, Any]], *, named: bool = False) -> Framed:
    """A stream of server-sent events, all of them at once.

    Args:
        events: what stands in each, texts as they are.
        named: each is called what its `type` says.
    """
    lines = []
    for event in events:
        if named and not isinstance(event, str):
            lines.append(f"event: {event['type']}\n")
        lines.append(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n")
    return Framed(200, EVENTS, "".join(lines).encode())
