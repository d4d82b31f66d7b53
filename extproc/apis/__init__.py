"""The APIs that agents call: each has a file here with all that is peculiar to it, which is found by its `API`.

So adding one touches no other file; `api.Api` says what may stand in it. What names no API is shared: `conversation` and what
it is made of (`messages`, `contents`, `places`), `usage`, and `api`. What stands in contents and in lists of tools is read
alike for all APIs, because gateways mix them.
"""
# interpreted: finds the files, once, and what is called when a request is refused

from __future__ import annotations

import re
from functools import reduce
from importlib import import_module
from operator import or_
from pkgutil import iter_modules
from typing import Final

from extproc.apis.api import ASKED, Api, Endpoint, Question, ToolList, ToolWords
from extproc.apis.contents import READERS
from extproc.apis.conversation import Shapes
from extproc.apis.places import LOCATORS
from extproc.apis.usage import COUNTS, FINDERS, Counts
from extproc.request.secrets import ANYWHERE, OWN_PLACES, SECRET_HEADERS

_FILES: Final = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]
APIS: Final[list[Api]] = sorted([file.API for file in _FILES if hasattr(file, "API")], key=lambda api: api.default is None)
"""The one goes first whose language many speak: its conversation is the first that is looked for. Its keys are last, because
others have them, too."""

for _api in APIS:
    READERS.update(_api.blocks)
    LOCATORS.update(_api.locators)
    ASKED.update(_api.asked, *_api.keys)
for _api in reversed(APIS):
    FINDERS.extend(_api.models.items())

_SHAPES: Final = Shapes([shape for api in APIS for shape in api.shapes])
open_conversation: Final = _SHAPES.open_conversation
find_conversation: Final = _SHAPES.find_conversation
locate_results: Final = _SHAPES.locate_results

LIST_PATHS: Final = sorted({shape.path for api in APIS for shape in api.shapes if not shape.fallback})
"""Where the messages of a conversation may stand, as a list that goes on from its oldest to its newest."""

TOOL_WORDS: Final = ToolWords(*[reduce(or_, words) for words in zip(*[api.tool_words for api in APIS], strict=True)])
TOOL_LISTS: Final[dict[str, list[ToolList]]] = {}
"""By the key of the conversation beside which they stand."""

for _list in [tool_list for api in APIS for tool_list in api.tool_lists]:
    TOOL_LISTS.setdefault(_list.beside, []).append(_list)

COUNT_PLACES: Final = {
    name: list(dict.fromkeys([place for api in APIS for place in api.counts.get(name, ())])) for name in COUNTS
}
"""Where answers say how many tokens they took. Where one says a thing several times, the last one counts: what streams say
about output grows."""

EVENT_OBJECTS: Final = sorted({place for api in APIS for place in api.events}, key=lambda place: (-place.count("."), place))
"""Of events, in the order in which a stream tells them: what stands in an object that begins an answer, then what ends it."""

MODEL_PLACES: Final = list(dict.fromkeys([place for api in APIS for place in api.answered_by]))
"""Where answers name the model."""

STREAMED_DOCUMENTS: Final = [part for api in APIS for part in api.streamed_documents]
"""Parts of paths whose answers are one document of JSON that comes in pieces."""

read_counts: Final = Counts(COUNT_PLACES, EVENT_OBJECTS).read

_DEFAULT: Final = next(api.default for api in APIS if api.default is not None)
_CONTENT_TYPES: Final = [
    (re.compile(pattern.encode(), re.IGNORECASE).match, endpoint)
    for api in APIS
    for pattern, endpoint in api.content_types.items()
]
_PATHS: Final = [(re.compile(pattern).search, endpoint) for api in APIS for pattern, endpoint in api.paths.items()]
_USUAL = ("header:authorization", "header:x-api-key", "header:api-key", "header:x-goog-api-key", "query:key")
ANYWHERE.extend(dict.fromkeys([*_USUAL, *[key for api in APIS for key in api.credentials]]))
for _api in APIS:
    SECRET_HEADERS.update([key.removeprefix("header:") for key in _api.credentials if key.startswith("header:")])
    OWN_PLACES.extend([(re.compile(pattern).search, _api.credentials) for pattern in _api.paths])
_HEADERS: Final = [pair for api in APIS for pair in api.headers.items()]
_KEYS: Final = [pair for api in reversed(APIS) for pair in api.keys.items()]
_TOOLLESS: Final = [search for search, endpoint in _PATHS if not endpoint.needs_tool]
_MODELLESS: Final = [search for search, endpoint in _PATHS if not endpoint.asks_model]
_WEBSOCKETS: Final = [search for search, endpoint in _PATHS if endpoint.websocket]


def find_endpoint(question: Question) -> Endpoint:
    """What a request calls, which says how it is answered: as many clients understand it where that cannot be told."""
    request = question.request
    content_type = request.headers.get("content-type", b"")
    for match, endpoint in _CONTENT_TYPES:
        if match(content_type):
            return endpoint
    for search, endpoint in _PATHS:
        if search(request.path):
            return endpoint
    for name, endpoint in _HEADERS:
        if name in request.headers:
            return endpoint
    for keys, endpoint in _KEYS:
        if question.has(*keys):
            return endpoint
    return _DEFAULT


def needs_tool(path: str) -> bool:
    """Whether an API refuses a history with calls where no tool is declared; most do."""
    return not any(search(path) for search in _TOOLLESS)


def takes_websocket(path: str) -> bool:
    """Whether an API takes its calls over a WebSocket on this path."""
    return any(search(path) for search in _WEBSOCKETS)


def asks_model(path: str) -> bool:
    """Whether a model may answer what is asked on this path; an API's own counting of tokens is no such thing."""
    return not any(search(path) for search in _MODELLESS)


def list_models(model: str) -> list[str]:
    """The names that a model goes by, the one given first."""
    return list(dict.fromkeys([model, *[name for api in APIS for name in api.list_models(model)]]))
