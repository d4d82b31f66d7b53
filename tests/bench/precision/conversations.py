"""Parses a line of a labelled set into a conversation's requests and its label.

`__main__` has the format.

A conversation is written as its last request, which contains all others: each answer of the model
had a request with everything before it. If the client left something out, the set has the requests
themselves.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from extproc.apis import open_conversation
from extproc.apis.conversation import ASSISTANT
from extproc.cli.replay.records import UnusableError
from extproc.cli.scan.atif import TrajectoryStep, write_step
from extproc.request.document import Document, NotCounted

LABEL = '{"loop": true, "begins": 4, "success": false, "kind": "a broken tool"}'

_PATH = "/"
_OWN = frozenset({"id", "label", "file", "path", "headers", "requests"})

_STEPS = "steps"


class Label(NamedTuple):
    """A person's judgement.

    Attributes:
        loop: whether the agent loops; None if unclear.
        begins: number of the model's first answer in the loop, from 1; 0 if unknown.
        success: whether the agent succeeded; None if unknown.
        kind: group of conversations that are counted together; empty for none.
    """

    loop: bool | None
    begins: int = 0
    success: bool | None = None
    kind: str = ""


class Labelled(NamedTuple):
    name: str
    label: Label
    path: str
    headers: dict[str, str]
    bodies: list[bytes]


_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_TRAJECTORY = msgspec.json.Decoder(list[TrajectoryStep])
_TEXTS = msgspec.json.Decoder(dict[str, str])
_TEXT = msgspec.json.Decoder(str)
_BAD = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def read_conversation(line: bytes, folder: Path) -> Labelled:
    """The conversation on a line; paths of files are relative to `folder`.

    Raises:
        UnusableError: says what would be right.
    """
    try:
        found = _OBJECT.decode(line)
    except _BAD:
        raise _reject(
            f'a line must be a JSON object, such as {{"label": {LABEL}, "messages": [...]}}'
        ) from None
    if "label" not in found:
        raise _reject(f"label is missing: it must be an object such as {LABEL}")
    label = _read_label(found["label"])
    if "file" in found:
        found = {
            **_read_file(folder, _decode(_TEXT, found["file"], "file", "the path of a JSON file")),
            **found,
        }
    own = {key: found.pop(key) for key in _OWN & found.keys()}
    bodies = _list_bodies(found, own)
    if label.begins > len(bodies):
        raise _reject(
            f"label.begins must be at most {len(bodies)}, the number of requests, not "
            f"{label.begins}"
        )
    path = (
        _decode(_TEXT, own["path"], "path", "a path such as /v1/chat") if "path" in own else _PATH
    )
    headers = (
        _decode(_TEXTS, own["headers"], "headers", "an object of texts") if "headers" in own else {}
    )
    name = bytes(own.get("id", b"")).decode().strip('"')
    return Labelled(name, label, path, headers, bodies)


def _reject(why: str) -> UnusableError:
    return UnusableError("invalid", why)


# As the decoder has it
def _decode(decoder: Any, raw: msgspec.Raw, name: str, right: str) -> Any:  # noqa: ANN401
    try:
        return decoder.decode(raw)
    except _BAD:
        raise _reject(f"{name} must be {right}") from None


def _read_label(raw: msgspec.Raw) -> Label:
    label = msgspec.json.decode(raw)
    if not isinstance(label, dict):
        raise _reject(f"label must be an object such as {LABEL}")
    for key in label.keys() - set(Label._fields):
        raise _reject(f"label.{key} is unknown: a label has loop, begins, success and kind")
    if "loop" not in label or not isinstance(label["loop"], bool | None):
        raise _reject("label.loop must be true, false, or null where it is unclear")
    begins, success, kind = label.get("begins"), label.get("success"), label.get("kind", "")
    if begins is not None and not (label["loop"] and isinstance(begins, int) and begins >= 1):
        raise _reject(
            "label.begins must be the number of the loop's first answer, from 1 on, and is for "
            "loops only"
        )
    if success is not None and not isinstance(success, bool):
        raise _reject("label.success must be true, false, or null where it is unknown")
    if not isinstance(kind, str):
        raise _reject('label.kind must be a text, such as "polling"')
    return Label(label["loop"], begins or 0, success, kind)


def _read_file(folder: Path, name: str) -> dict[str, msgspec.Raw]:
    try:
        data = (folder / name).read_bytes()
    except OSError as error:
        raise _reject(f"file {name} cannot be read: {error.strerror}") from None
    if data.lstrip().startswith(b"["):
        return {"messages": msgspec.Raw(data)}
    found: dict[str, msgspec.Raw] = _decode(
        _OBJECT, msgspec.Raw(data), f"file {name}", "a JSON object or a list of messages"
    )
    return found


def _list_bodies(found: dict[str, msgspec.Raw], own: dict[str, msgspec.Raw]) -> list[bytes]:
    if "requests" in own:
        bodies = [
            bytes(raw) for raw in _decode(_LIST, own["requests"], "requests", "a list of bodies")
        ]
        if not bodies or not all(body.startswith(b"{") for body in bodies):
            raise _reject("requests must be a list of JSON objects")
        return bodies
    if _STEPS in found:
        steps = _decode(
            _TRAJECTORY, found[_STEPS], _STEPS, "a list of ATIF's steps, each with a source"
        )
        found = {
            "messages": msgspec.Raw(msgspec.json.encode(list(_write_steps(steps)))),
            "tools": msgspec.Raw(
                msgspec.json.encode(_list_tools(found.get("agent", msgspec.Raw(b"{}"))))
            ),
        }
    try:
        conversation = open_conversation(Document(msgspec.json.encode(found)))
        speakers = conversation.list_speakers()
    except NotCounted:
        raise _reject(
            "there is no conversation: give messages as an API or ATIF has them, requests, or a "
            "file"
        ) from None
    key, *deeper = conversation.shape.path
    entries = [] if deeper else _decode(_LIST, found[key], key, "a list of messages")
    if not entries or len(entries) != len(speakers):
        raise _reject(
            f"{'.'.join([key, *deeper])} cannot be taken apart: give the bodies of the requests "
            "as requests"
        )
    return list(_write_bodies(found, key, entries, _find_ends(speakers)))


def _find_ends(speakers: Sequence[str]) -> Iterator[int]:
    """Sizes of the requests: the messages before an answer, and all if no answer comes last."""
    answering = False
    for place, speaker in enumerate(speakers):
        answers = speaker in (ASSISTANT, "")  # a thought begins an answer
        if answers and not answering and place:
            yield place
        answering = answers
    if not answering:
        yield len(speakers)


def _write_bodies(
    found: dict[str, msgspec.Raw], key: str, entries: Sequence[msgspec.Raw], ends: Iterable[int]
) -> Iterator[bytes]:
    rest = {name: value for name, value in found.items() if name != key}
    head = msgspec.json.encode(rest)[:-1] + (b"," if rest else b"") + b'"%b":[' % key.encode()
    texts = [bytes(entry) for entry in entries]
    for end in ends:
        yield head + b",".join(texts[:end]) + b"]}"


def _write_steps(steps: Sequence[TrajectoryStep]) -> Iterator[dict[str, Any]]:
    """A trajectory (ATIF) as chat messages; a result without a call becomes a user's message."""
    try:
        for step in steps:
            yield from write_step(step)
    except ValueError as error:
        raise _reject(str(error)) from None


def _list_tools(agent: msgspec.Raw) -> list[Any]:
    found = msgspec.json.decode(agent)
    tools = found.get("tool_definitions") if isinstance(found, dict) else None
    return tools if isinstance(tools, list) else []
