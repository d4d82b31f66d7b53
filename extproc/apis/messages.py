"""Messages of any API, and their parts.

msgspec makes its Structs at run time, so these are separate from compiled code. They cost a fifth of what named tuples do.
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
        value: the text, arguments or result, or the whole of anything else; may have to be unpacked. ABSENT for an OTHER
            that is the whole message.
        name: the tool of a CALL; the client's word for an OTHER.
        id: connects a RESULT with its CALL; empty if the client sends none.
        failed: the API marks the RESULT as an error.
    """

    kind: str
    value: Json
    name: str = ""
    id: str = ""
    failed: bool = False


class Message(Struct, gc=False):
    """One message, which is read on demand.

    Attributes:
        shape: see `Shape`.
        speaker: who says it.
        value: the message as a struct of the shape.
        place: index among the messages.
        joined: calls before it that were made at once with it.
    """

    shape: Any
    speaker: str
    value: Any
    place: int
    joined: list[Message] | None = None
    _parts: list[Part] | None = None

    def join(self, older: Message) -> None:
        """Add the preceding call, which was made at once with this one."""
        self.joined = [older, *(self.joined or ())]

    def read_parts(self) -> list[Part]:
        """The message's parts, in order.

        Raises:
            NotCounted: it cannot be read, or is too large.
        """
        if self._parts is None:
            walk(1)
            self._parts = self.shape.read(self.value)
            if self.joined is not None:
                self._parts = [part for message in self.joined for part in message.read_parts()] + self._parts
        return self._parts

    def list_values(self) -> list[Any]:
        """The message's value, and those of the calls that were made at once with it."""
        return [*[message.value for message in self.joined or ()], self.value]

    def find_whole(self, document: Document) -> Json:
        """The whole message; ABSENT if it says nothing.

        Args:
            document: the document that contains it. It refers to the conversation, which must therefore not refer to it.

        Raises:
            NotCounted: the body is not JSON, or too large.
        """
        value = document.value()
        for step in self.shape.path:
            value = value[step]
        whole = value[self.place]
        return ABSENT if isinstance(whole, dict) and _says_nothing(whole) else whole


def _says_nothing(message: dict[str, Json]) -> bool:
    """Whether the message names a speaker but has no content."""
    return isinstance(message.get("role"), str) and not any(message[key] for key in message.keys() - _LABELS)
