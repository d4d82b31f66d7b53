"""Reads logs of requests to models, one JSON value each, for any API that Loopguard knows.

The body is the value itself, or a member such as `request` or `body`, as an object or a string. A
response next to it has the tokens. Each request contains its history; the chain links requests of a
conversation, as it does live.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import msgspec

from extproc.apis import APIS, COUNT_PLACES, open_conversation
from extproc.apis.conversation import ASSISTANT, ASSISTANTS, OTHER_ROLE, Conversation
from extproc.apis.messages import CALL, OTHER
from extproc.apis.usage import find_model
from extproc.cli.packed import FilePlace
from extproc.cli.scan.runs import Runs, TranscriptReader
from extproc.cli.scan.transcripts import (
    BAD_JSON,
    About,
    ModelCall,
    UnknownLineError,
    count_tokens,
    cut_name,
    mend_value,
    name_folder,
    read_time,
)
from extproc.cli.scan.watch import Watch
from extproc.detectors.chain import ChainPlace, Spoken, find_place, read_transcript
from extproc.detectors.scratchpad import unfold
from extproc.detectors.turn import digest
from extproc.request.document import ABSENT, NO_HISTORY, NO_MESSAGES, Document, NotCounted
from extproc.sessions.rates import Usage, estimate_tokens

_MOST_OPEN = 2_000
_OPENING = 512
"""Texts with this number of equal first bytes belong to one conversation."""

_BODIES: Final = (
    "request",
    "body",
    "request_body",
    "requestBody",
    "payload",
    "input",
    "kwargs",
    "loop_record",
)
_RESPONSES: Final = ("response", "response_body", "responseBody", "output", "completion")
_TIMES: Final = (
    "time",
    "timestamp",
    "ts",
    "created_at",
    "createdAt",
    "startTime",
    "start_time",
    "date",
    "created",
)
_PATHS: Final = ("path", "url", "uri", "endpoint")
_AGENTS: Final = ("agent", "agent_name", "service", "app", "application")
_HEADS: Final = frozenset(shape.path[0] for api in APIS for shape in api.shapes)
"""Keys of bodies that contain conversations."""

_COUNTED: Final = sorted(
    {place.split(".")[0] for places in COUNT_PLACES.values() for place in places}
    - {"message", "response"}
)
"""Keys of token counts in responses, which may also be next to a request."""

_MOST_KEYS: Final = 6
_LOOKED_AT: Final = 64
"""Number of newest messages to search for unknown forms."""

_CALLS: Final = re.compile("tool|call|func|action", re.IGNORECASE)
_CONTENTS: Final = re.compile("(?:content|refusal|audio|(?:tool|function)_calls?)$")
_NOTHING: Final = len("null")
_BESIDE: Final = frozenset(
    {"annotations", "reasoning_details", "thinking_blocks", "experimental_attachments"}
)
"""Lists in answers that contain no content and no calls."""

_OBJECTS: Final = re.compile(rb"\[\s*\{")
_DEEPEST = 3
_values = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list = msgspec.json.Decoder(list[msgspec.Raw])
_any = msgspec.json.Decoder()

Values = dict[str, msgspec.Raw]
_Turn = list[tuple[str, bytes]]
"""Speakers and messages of a turn, the assistant's first."""


@dataclass(eq=False)
class _Followed:
    """An open conversation.

    Attributes:
        node: the newest request's node of the chain.
    """

    number: int
    run: Watch
    node: bytes = b""
    own: bytes = b""


class FollowedRequests:
    """Finds the conversation that a request continues and adds the new messages to it."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._open: OrderedDict[int, _Followed] = OrderedDict()
        self._number = 0
        self._nodes: dict[bytes, int] = {}
        self._suffixes: dict[bytes, int | None] = {}  # None if ambiguous
        self._texts: dict[bytes, int] = {}

    def take(self, body: bytes, call: ModelCall, about: About) -> None:
        unread = self._runs.find_unread(body)
        if unread in NO_HISTORY:
            raise UnknownLineError(unread, "unread")
        try:
            conversation = open_conversation(Document(body))
            speakers = conversation.list_speakers()
            place = find_place(conversation, prefilled=False)
            messages = _list_messages(body, conversation.shape.path)
            if ASSISTANT not in speakers and self._take_text(
                body, messages, conversation, call, about
            ):
                return
            if foreign := _find_foreign(conversation, messages):
                raise UnknownLineError(foreign, "unread")
        except NotCounted as why:
            raise UnknownLineError(unread or why.reason, "unread") from None
        if place is None or len(messages) != len(speakers):
            raise UnknownLineError(unread or "messages that cannot be told apart", "unread")
        turns = _split_turns(messages, speakers)
        # Not a request
        answered = next((speaker for speaker in reversed(speakers) if speaker), "") == ASSISTANT
        followed = self._find_conversation(place)
        if followed is None:
            followed = self._begin(about, conversation)
            known = any(node in self._nodes for node in (place.node, *place.parents))
            self._replay(followed, turns, call, known=known)
        elif place.node != followed.node:
            for turn in _list_new(turns, read_transcript(conversation).turns, place, followed.node):
                followed.run.add(turn)
        if not answered:
            followed.run.ask(call, unread)
        self._keep(followed, place)

    def _take_text(
        self,
        body: bytes,
        messages: Sequence[bytes],
        conversation: Conversation,
        call: ModelCall,
        about: About,
    ) -> bool:
        """Take a request whose history is a text, such as a scratchpad; False for others."""
        newest = next(conversation.read_backwards(), None)
        if newest is None or len(unfold(newest)) == 1:
            return False
        opening = digest(b"".join(messages[:2])[:_OPENING])
        followed = self._open.get(self._texts.get(opening, -1))
        if followed is None:
            followed = self._begin(about, conversation)
            self._texts[opening] = self._number
        followed.run.replace(body)
        followed.run.ask(call)
        return True

    def close(self) -> None:
        for followed in self._open.values():
            followed.run.close()

    def _find_conversation(self, place: ChainPlace) -> _Followed | None:
        near, far = place.parents[: place.near], place.parents[place.near :]
        found = self._find_at(*near, place.node)
        if found is not None or any(parent in self._nodes for parent in near):
            return found
        number = self._suffixes.get(place.before)
        linked = None if number is None else self._open.get(number)
        return linked if linked is not None and linked.own == place.before else self._find_at(*far)

    def _find_at(self, *nodes: bytes) -> _Followed | None:
        """The conversation whose newest node is the first of these, or None."""
        found = (self._open.get(self._nodes.get(node, -1)) for node in nodes)
        return next(
            (
                each
                for each, node in zip(found, nodes, strict=True)
                if each is not None and each.node == node
            ),
            None,
        )

    def _begin(self, about: About, conversation: Conversation) -> _Followed:
        if len(self._open) >= _MOST_OPEN:
            _, oldest = self._open.popitem(last=False)
            oldest.run.close()
        self._number += 1
        named = about if about.session else about._replace(session=f"conversation {self._number}")
        key = conversation.shape.path[-1]
        run = self._runs.open(named, key, tools=conversation.find_offer() != "no tools")
        followed = self._open[self._number] = _Followed(self._number, run)
        return followed

    def _replay(
        self, followed: _Followed, turns: Sequence[_Turn], call: ModelCall, *, known: bool
    ) -> None:
        """Add the turns in a conversation's first request; their calls count unless `known`."""
        size = 0
        for each in turns:
            turn = [message for _, message in each]
            if not known:
                answered = sum(map(len, turn[:1]))
                usage = Usage(estimate_tokens(size), estimate_tokens(answered))
                followed.run.ask(ModelCall(call.place, 0, call.model, usage, estimated=True))
            followed.run.add(turn)
            size += sum(map(len, turn))

    def _keep(self, followed: _Followed, place: ChainPlace) -> None:
        number = followed.number
        self._open.move_to_end(number)
        if len(self._nodes) >= 100 * _MOST_OPEN:
            self._nodes.clear()
            self._suffixes.clear()
            self._texts.clear()
        followed.node, followed.own = place.node, place.own
        self._nodes[place.node] = number
        if place.own:
            self._suffixes[place.own] = (
                number if self._suffixes.get(place.own, number) == number else None
            )


class Requests(TranscriptReader):
    kind = "requests"

    def __init__(self, runs: Runs) -> None:
        super().__init__(runs)
        self._followed = FollowedRequests(runs)

    def read(self, data: bytes, place: FilePlace) -> bool:
        try:
            values = _values.decode(data)
        except BAD_JSON:
            return False
        found = _find_body(data, values, _DEEPEST)
        if found is None:
            return False
        body, inside, around = found
        everything = [values, around]
        model = find_model(_read_text(everything, _PATHS), cut_name(_open(inside.get("model"))))
        response = next(
            (
                raw
                for outer in everything
                for name in _RESPONSES
                if (raw := outer.get(name)) is not None
            ),
            None,
        )
        usage, estimated = _read_usage(response, values, body)
        time = next(
            (
                time
                for outer in everything
                for name in _TIMES
                if (time := read_time(_open(outer.get(name))))
            ),
            0,
        )
        agent = _read_text(everything, _AGENTS)
        about = About(self.kind, "", name_folder(place.file), cut_name(agent))
        try:
            self._followed.take(
                body, ModelCall(place, time, cut_name(model), usage, estimated), about
            )
        except UnknownLineError as unknown:
            keys = _list_first_keys(body) if unknown.name == NO_MESSAGES else ""
            if not keys:
                raise
            self._runs.pass_over(self.kind, unknown, place)
            raise UnknownLineError(f"messages with {keys}", "form") from None
        return True

    def close(self) -> None:
        self._followed.close()


def _find_body(data: bytes, values: Values, deeper: int) -> tuple[bytes, Values, Values] | None:
    """A body, its values, and those of the object around it; None if there is none."""
    first = next((bytes(values[key]).lstrip()[:1] for key in _HEADS if key in values), b"")
    if (  # a list, a text next to a model's name, or an object around a list
        first == b"["
        or (first == b'"' and "model" in values)
        or (first == b"{" and b"contents" in bytes(values.get("request", b"")))
    ):
        return data, values, values
    for key in _BODIES if deeper else ():
        inner = values.get(key)
        text = bytes(inner).strip() if inner is not None else b""
        if text.startswith(b'"{'):
            text = mend_value(str(_open(inner)).encode("utf-8", "surrogatepass"))
        if not text.startswith(b"{"):
            continue
        try:
            inside = _values.decode(text)
        except BAD_JSON:
            continue
        found = _find_body(text, inside, deeper - 1)
        if found is not None:
            return found[0], found[1], inside if found[2] is not found[1] else values
    return None


def _list_messages(body: bytes, path: Sequence[str]) -> list[bytes]:
    raw = msgspec.Raw(body)
    try:
        for key in path:
            raw = _values.decode(raw)[key]
        return [bytes(message) for message in _list.decode(raw)]
    except (*BAD_JSON, KeyError):
        return [b""]


def _list_first_keys(body: bytes) -> str:
    try:
        values = _values.decode(body)
        listed = [
            _list.decode(values[key])
            for key in _HEADS
            if bytes(values.get(key, b"")).startswith(b"[")
        ]
        keys = [
            ", ".join(sorted(_values.decode(messages[0]))[:_MOST_KEYS])
            for messages in listed
            if messages
        ]
    except BAD_JSON:
        return ""
    return keys[0] if keys else ""


def _find_foreign(conversation: Conversation, messages: Sequence[bytes]) -> str:
    """Describe content of the newest answers in an unknown form, which would hide loops."""
    read = (part for message in conversation.read_backwards() for part in message.read_parts())
    # No content under the API's keys
    if all(part.kind == OTHER and part.value is ABSENT for part in read):
        return "messages with their content under unknown keys"
    newest = list(islice(conversation.read_backwards(), _LOOKED_AT))
    chat = conversation.shape.path == ("messages",)
    if chat and any(message.speaker == OTHER_ROLE for message in newest):
        return "messages without a role"
    answers = [message for message in newest if message.speaker == ASSISTANT]
    parts = [part for message in answers for part in message.read_parts()]
    kinds = {
        kind
        for part in parts
        if part.kind == OTHER
        for kind in [_name_kind(part.value)]
        if _CALLS.search(kind)
    }
    if kinds and all(part.kind != CALL for part in parts):
        return f"calls of unknown kinds: {', '.join(sorted(kinds))}"
    keys = (
        {key for message in messages[-_LOOKED_AT:] for key in _list_foreign_keys(message)}
        if chat
        else set()
    )
    return f"answers with their content under {', '.join(sorted(keys))}" if keys else ""


def _name_kind(value: Any) -> str:  # noqa: ANN401  # JSON
    """The type of a part of an unknown kind, else its first key."""
    if not isinstance(value, dict):
        return ""
    kind = _open(value["type"]) if "type" in value else next(iter(value), "")
    return cut_name(kind)


def _list_foreign_keys(message: bytes) -> list[str]:
    """The unknown keys with lists of objects in an answer without content and calls."""
    try:
        values = _values.decode(message)
    except BAD_JSON:
        return []
    role = _open(values.get("role"))
    said = any(len(value) > _NOTHING for key, value in values.items() if _CONTENTS.match(key))
    if said or not isinstance(role, str) or role not in ASSISTANTS:
        return []
    return [
        key for key, value in values.items() if key not in _BESIDE and _OBJECTS.match(bytes(value))
    ]


def _split_turns(messages: Sequence[bytes], speakers: Sequence[str]) -> list[_Turn]:
    """The turns of a history: an answer and the messages after it; thoughts begin an answer."""
    turns: list[_Turn] = []
    answering = False
    for message, speaker in zip(messages, speakers, strict=True):
        answers = speaker in (ASSISTANT, "")
        if answers and not answering:
            turns.append([])
        answering = answers
        if turns:
            turns[-1].append((speaker, message))
    return turns


def _list_new(
    turns: Sequence[_Turn], shown: Sequence[Spoken], place: ChainPlace, node: bytes
) -> list[list[bytes]]:
    """The messages that a request adds to a node's, by turn; the first may be partly known."""
    links = (
        place.links[::-1].index(node)
        if node in place.links
        else len(shown[-1].hashes)
        if shown
        else 0
    )
    new: list[list[bytes]] = []
    for turn, said in zip(reversed(turns), reversed(shown), strict=False):
        if links <= 0:
            break
        spoken = [at for at, (speaker, _) in enumerate(turn) if speaker == ASSISTANT]
        start = 0 if links >= len(said.hashes) else spoken[-links]
        new.append([message for _, message in turn[start:]])
        links -= len(said.hashes)
    return new[::-1]


def _open(raw: msgspec.Raw | None) -> Any:  # noqa: ANN401  # JSON
    if raw is None or len(raw) > 2**25:
        return None
    try:
        return _any.decode(raw)
    except BAD_JSON:
        return None


def _read_text(outers: Sequence[Values], names: Sequence[str]) -> str:
    found = (_open(outer.get(name)) for outer in outers for name in names)
    return next((text for text in found if isinstance(text, str)), "")


def _read_usage(response: msgspec.Raw | None, values: Values, body: bytes) -> tuple[Usage, bool]:
    """The tokens from the response or the record, else from bytes, and whether that is a guess."""
    answer = _open(response)
    if isinstance(answer, str) and answer.startswith("{"):
        answer = _open(msgspec.Raw(answer.encode("utf-8", "surrogatepass")))
    beside = {name: _open(values.get(name)) for name in _COUNTED}
    told = {
        name: count
        for name, places in COUNT_PLACES.items()
        if (count := _find_count((answer, beside), places)) is not None
    }
    prompt, output = told.get("input"), told.get("output")
    cached = told.get("cached", 0)
    fresh = max(0, prompt - cached) if prompt is not None else estimate_tokens(len(body))
    usage = Usage(
        fresh + told.get("tool_input", 0),
        (output or 0) + told.get("thoughts", 0),
        cached + told.get("cache_read", 0),
        told.get("cache_write", 0),
    )
    return usage, prompt is None or output is None


def _find_count(sources: Sequence[Any], places: Sequence[str]) -> int | None:
    for source in sources:
        for place in places:
            value = source
            for key in place.split("."):
                value = value.get(key) if isinstance(value, dict) else None
            if isinstance(value, int | float) and not isinstance(value, bool):
                return count_tokens(value)
    return None
