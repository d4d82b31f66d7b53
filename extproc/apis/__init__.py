"""The APIs that agents call: one file for each, with an `API`.

No other module names an API; `api.Api` describes the content of such a file. Shared modules are
`conversation` and its parts (`messages`, `contents`), `locate` and `places` for edits, `usage` and
`api`. Contents and tool lists are read in the same way for all APIs, because gateways mix them.
"""
# interpreted: finds the files at start; the rest runs only for refusals

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import lru_cache, reduce
from importlib import import_module
from operator import or_
from os.path import commonprefix
from pkgutil import iter_modules
from typing import Final, NamedTuple

from extproc.apis.api import ASKED, Api, Changes, Endpoint, Question, ToolList, ToolWords
from extproc.apis.contents import READERS
from extproc.apis.conversation import Shapes
from extproc.apis.locate import Locations
from extproc.apis.places import LOCATORS
from extproc.apis.tools import ToolReader
from extproc.apis.usage import COUNTS, FINDERS, Counts
from extproc.request.fingerprint import MAX_TARGET
from extproc.request.patch import Fields, Patch
from extproc.request.secrets import ANYWHERE, OWN_PLACES

_FILES: Final = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]
APIS: Final[list[Api]] = sorted(
    [file.API for file in _FILES if hasattr(file, "API")], key=lambda api: api.default is None
)
"""The default API, which many programs speak, is first, so its conversations are tried first. Its
keys are tried last, because other APIs have them, too."""

for _api in APIS:
    READERS.update(_api.blocks)
    LOCATORS.update(_api.locators)
    ASKED.update(_api.asked, *_api.keys)
for _api in reversed(APIS):
    FINDERS.extend(_api.models.items())

_LONGEST_ANSWERS: Final = dict.fromkeys([place for api in APIS for place in api.longest_answers])
_COPIES: Final = dict.fromkeys([place for api in APIS for place in api.copies])
_SHAPES: Final = Shapes(
    [shape for api in APIS for shape in api.shapes], list(_LONGEST_ANSWERS), list(_COPIES)
)
_LOCATIONS: Final = Locations(_SHAPES.shapes)
open_conversation: Final = _SHAPES.open_conversation
find_conversation: Final = _LOCATIONS.find_conversation
locate_results: Final = _LOCATIONS.locate_results
hash_first_words: Final = _SHAPES.hash_first_words
find_longest_answer: Final = _SHAPES.find_longest_answer
count_copies: Final = _SHAPES.count_copies
read_options: Final = _SHAPES.read_options

LIST_PATHS: Final = sorted(
    {shape.path for api in APIS for shape in api.shapes if not shape.fallback}
)
"""Paths of keys at which a body may have a list of messages, oldest first."""

TOOL_WORDS: Final = ToolWords(
    *[reduce(or_, words) for words in zip(*[api.tool_words for api in APIS], strict=True)]
)
_TOOLS: Final = ToolReader(TOOL_WORDS)
read_tools: Final = _TOOLS.read
find_hints: Final = _TOOLS.find_hints
may_declare: Final = _TOOLS.may_declare
TOOL_LISTS: Final[dict[str, list[ToolList]]] = {}
"""Tool lists by the key of the conversation beside which they are declared."""

for _list in [tool_list for api in APIS for tool_list in api.tool_lists]:
    TOOL_LISTS.setdefault(_list.beside, []).append(_list)

COUNT_PLACES: Final = {
    name: list(dict.fromkeys([place for api in APIS for place in api.counts.get(name, ())]))
    for name in COUNTS
}
"""Where responses report token counts. If one is reported several times, the last one wins, because
streams report running totals."""

EVENT_OBJECTS: Final = sorted(
    {place for api in APIS for place in api.events}, key=lambda place: (-place.count("."), place)
)
"""Objects with counts in a stream's events, in order: first those at the start of a response."""

MODEL_PLACES: Final = list(dict.fromkeys([place for api in APIS for place in api.answered_by]))
"""Where responses name the model."""

STREAMED_DOCUMENTS: Final = [part for api in APIS for part in api.streamed_documents]
"""Parts of paths whose responses are one JSON document, streamed in pieces."""

ERROR_MARKS: Final = [
    spelled.encode()
    for api in APIS
    for mark in api.error_marks
    for spelled in (mark, mark.replace(":", ": ", 1))
]
"""Spellings of members that mark results as errors."""

read_counts: Final = Counts(COUNT_PLACES, EVENT_OBJECTS).read

_DEFAULT: Final = next(api.default for api in APIS if api.default is not None)
_CONTENT_TYPES: Final = [
    (re.compile(pattern.encode(), re.IGNORECASE).match, endpoint)
    for api in APIS
    for pattern, endpoint in api.content_types.items()
]
_PATHS: Final = [
    (re.compile(pattern).search, endpoint)
    for api in APIS
    for pattern, endpoint in api.paths.items()
]
_USUAL = (
    "header:authorization",
    "header:x-api-key",
    "header:api-key",
    "header:x-goog-api-key",
    "query:key",
)
ANYWHERE.extend(dict.fromkeys([*_USUAL, *[key for api in APIS for key in api.credentials]]))
for _api in APIS:
    _own = list(dict.fromkeys([*_api.credentials, *ANYWHERE]))
    if _own != ANYWHERE:
        OWN_PLACES.extend([(re.compile(pattern).search, _own) for pattern in _api.paths])
_HEADERS: Final = [pair for api in APIS for pair in api.headers.items()]
_KEYS: Final = [pair for api in reversed(APIS) for pair in api.keys.items()]
_COMPLETING: Final[
    dict[str, list[str]]
] = {}  # API name to patterns of paths on which a model answers
for _api in APIS:
    _COMPLETING.setdefault(_api.name, []).extend(
        [pattern for pattern, endpoint in _api.paths.items() if endpoint.complete]
    )
_COMPLETING.pop("")  # protocols without models
API_NAMES: Final = sorted(_COMPLETING)
_NAMED: Final = [
    (name, re.compile("|".join(patterns).replace(r"\Z", r"/?\Z")).search)
    for name, patterns in _COMPLETING.items()
]

SAMPLES: Final = {
    name: [path for api in APIS if api.name == name for path in api.samples] for name in API_NAMES
}
"""Example paths of each API's calls."""

_AMBIGUOUS: Final = re.compile(r"[;\\#]|%(?:00|23|25|3B|3F|5C)", re.IGNORECASE).search
_MOST_PATHS: Final = 128
"""Number of cached paths. Without the cache, the benchmark's rows about session limits, and about
turns, take up to 80 % longer."""


def find_endpoint(question: Question) -> Endpoint:
    """The request's endpoint, which has the format of answers; if unknown, the default API's."""
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


class PathFacts(NamedTuple):
    """What the path of a request tells about it.

    Attributes:
        api: the name of the API whose model answers on the path, with any prefix; empty if there is
            none.
        takes_choice: see `Endpoint`.
        websocket: an API accepts calls over a WebSocket on the path.
        asks_model: a model may answer; false if the API only counts tokens.
        prefills: the model continues an assistant message at the end of a request.
        ask_usage: see `Endpoint`.
        longest_answers: see `Api`, for the APIs with such a path; empty if it is unknown or
            ambiguous.
    """

    api: str
    takes_choice: bool
    websocket: bool
    asks_model: bool
    prefills: bool
    ask_usage: Callable[[Patch, Fields], Changes] | None
    longest_answers: frozenset[str]


def read_path(path: str) -> PathFacts:
    """What a path tells.

    Patterns match the end of a path, so only the end of a very long one is read.
    """
    return _read_path(path[-MAX_TARGET:])


@lru_cache(_MOST_PATHS)
def _read_path(path: str) -> PathFacts:
    """What a path tells.

    `x:generate;:count` is ambiguous: servers that know path parameters read `x:generate`.
    """
    ambiguous = _AMBIGUOUS(path) is not None
    apis = [
        api
        for api in APIS
        if not ambiguous and any(re.search(pattern, path) for pattern in api.paths)
    ]
    endpoints = [endpoint for search, endpoint in _PATHS if search(path)]
    return PathFacts(
        api=next((name for name, search in _NAMED if search(path)), ""),
        takes_choice=all(endpoint.takes_choice for endpoint in endpoints),
        websocket=any(endpoint.websocket for endpoint in endpoints),
        asks_model=ambiguous or all(endpoint.asks_model for endpoint in endpoints),
        prefills=any(endpoint.prefills for endpoint in endpoints),
        ask_usage=endpoints[0].ask_usage if endpoints else None,
        longest_answers=frozenset([place for api in apis for place in api.longest_answers]),
    )


def write_regex(name: str) -> str:
    """Matches whole paths on which a model answers; Python and Envoy's RE2 read it alike."""
    patterns = [
        pattern.replace(r"\A(?>.*?", "(?:").removesuffix(r"\Z") for pattern in _COMPLETING[name]
    ]
    # Of strings; Envoy before 1.40 accepts at most 100 instructions
    start = commonprefix(patterns)  # noqa: RUF071
    return f".*{start}(?:{'|'.join([pattern.removeprefix(start) for pattern in patterns])})/?"


def write_header_regex(name: str) -> str:
    """The same for Envoy's `:path`, which includes the query."""
    return rf"{write_regex(name)}(?:\?.*)?"


def find_public_id(path: str, apis: Collection[str], *, exact: bool) -> str:
    """The `Api.public_id` of one of these APIs that clients may call on this path; else empty.

    Unless `exact`, paths below this one count, too.
    """
    for api in APIS:
        if api.public_id and api.name in apis:
            known = any(re.search(pattern, path) for pattern in api.paths)
            below = any(sample.startswith(path) for sample in api.samples) or any(
                w in f"{path.lower()}/" for w in api.gateways
            )
            if known if exact else below:
                return api.public_id
    return ""


def list_models(model: str) -> list[str]:
    """All names of a model, the given one first."""
    return list(dict.fromkeys([model, *[name for api in APIS for name in api.list_models(model)]]))
