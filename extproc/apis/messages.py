"""Messages of any API, and what they are made of.

Structs are made by msgspec while Python runs, so these stand apart from the code that is compiled; they cost a fifth of what
named tuples do.
"""
# interpreted: msgspec makes its Structs of annotations, which compiled classes do not keep

from __future__ import annotations

from typing import Any

from msgspec import Struct

from extproc.request.document import ABSENT, Document, Json, walk

TEXT, CALL, RESULT, OTHER = "text", "call", "result", "other"

_LABELS = frozenset({"role", "type", "id", "name", "status"})


class Part(Struct, gc=False):
    """One thing in a message.

    Attributes:
        kind: TEXT, CALL, RESULT or OTHER.
        value: the text, the arguments, the result, or all of what is none of these; may have to be unpacked. ABSENT of an OTHER
            that is the whole message.
        name: of the tool, where this is a CALL; what a client calls an OTHER.
        id: what connects a RESULT with its CALL, empty where a client names nothing.
        failed: the API marks the RESULT as an error.
    """

    kind: str
    value: Json
    name: str = ""
    id: str = ""
    failed: bool = False


class Message(Struct, gc=False):
    """One message; nothing in it is read before it is asked for.

    Attributes:
        shape: how its API writes it; see `Shape`.
        speaker: who says it.
        value: what the shape has made of it.
        place: among the messages.
        joined: calls that stand before it and were made at once with it.
    """

    shape: Any
    speaker: str
    value: Any
    place: int
    joined: list[Message] | None = None
    _parts: list[Part] | None = None

    def join(self, older: Message) -> None:
        """Take a call that was made at once with this one, and stands before it."""
        self.joined = [older, *(self.joined or ())]

    def read_parts(self) -> list[Part]:
        """What stands in it, in order.

        Raises:
            NotCounted: it cannot be read, or is too much.
        """
        if self._parts is None:
            walk(1)
            self._parts = self.shape.read(self.value)
            if self.joined is not None:
                self._parts = [part for message in self.joined for part in message.read_parts()] + self._parts
        return self._parts

    def list_values(self) -> list[Any]:
        """What the shape has made of it, and of the calls that it was made at once with."""
        return [*[message.value for message in self.joined or ()], self.value]

    def find_whole(self, document: Document) -> Json:
        """All of it; ABSENT where nothing is said.

        Args:
            document: in which it stands. It keeps the conversation, which therefore does not keep it.

        Raises:
            NotCounted: the body is not JSON, or too much of it.
        """
        value = document.value()
        for step in self.shape.path:
            value = value[step]
        whole = value[self.place]
        return ABSENT if isinstance(whole, dict) and _says_nothing(whole) else whole


def _says_nothing(message: dict[str, Json]) -> bool:
    """Whether a speaker is named who says nothing."""
    return isinstance(message.get("role"), str) and not any(message[key] for key in message.keys() - _LABELS)
