"""Streams for which Envoy keeps no bodies (FULL_DUPLEX_STREAMED): every part of a body has to be handed back.

In this mode, the upstream gets only the parts of a body that are handed back. If the stream ends earlier, even with OK, Envoy
continues without the rest, or waits for it forever: the upstream gets an incomplete request, and answers 200. So the stream
must last as long as the bodies that it carries. If it has to end earlier, it ends with an error, and Envoy answers 500, in any
failure mode.

The body of a request that is to be decided is held here until its end, and so are its headers: Envoy waits for their answer for
any time, and sends the body meanwhile. Then the request can be refused, or its body edited. All other parts of bodies are
handed back as they come.
"""

from __future__ import annotations

from typing import Final

from extproc.ext_proc.answers.go_on import hand_on
from extproc.ext_proc.held import HeldBody
from extproc.ext_proc.wire import BODY_DUPLEX, EnvoyMessage
from extproc.request.patch import Pieces

HELD_BYTES: Final = 10 * 2**20
"""Longest body to hold, in bytes, if no policy inspects longer ones. Longer bodies are handed on before they are decided."""

_PART: Final = 2**16 - 2**10
"""Maximum length of a part that is handed back, in bytes. Some gateways accept no message above 64 KiB."""


class Duplex:
    """The bodies of one stream that are still to be handed back.

    Attributes:
        holds: the request's body is held, and its headers are not answered.
        untimed: Envoy waits for answers about the request for any time.
        held: what is held of the body; None before its first part.
        before: messages to send before the next answer.
        part: the message that hands the newest part of a body back, to which the answer belongs; empty for none.
        whole: the pieces of the held body, once it has ended.
        has_trailers: the held body ends with trailers.
    """

    def __init__(self, first: EnvoyMessage) -> None:
        """Read the body modes from the first message of a stream."""
        self._request = self.untimed = first.body_mode == BODY_DUPLEX
        self._response = first.response_mode == BODY_DUPLEX
        self._begun = False  # a message about the response has come
        self.holds = False
        self.held: HeldBody | None = None
        self.before: list[bytes] = []
        self.part = b""
        self.whole: list[bytes | memoryview] | None = None
        self.has_trailers = False

    @property
    def over(self) -> bool:
        """Whether no body is left to hand back."""
        return not (self._request or self._response)

    @property
    def carries(self) -> bool:
        """Whether a body is under way, which would be cut off if the stream ended."""
        return self._request or self.holds or (self._response and self._begun)

    def follow(self, message: EnvoyMessage) -> bool:
        """Note the next message; returns whether it is part of a body that has to be handed back."""
        kind = message.kind
        if kind.startswith("request_"):
            expected = self._request
            self._request = expected and not message.ended
        else:
            self._begun = True
            expected = self._response
            self._response = expected and not message.ended
        return expected and kind.endswith("_body")

    def write_whole(self, edited: Pieces | None, trailers: bytes) -> list[bytes]:
        """The messages that hand the held body back, or the edited one in its place.

        Args:
            edited: the edited body; None if it is unchanged.
            trailers: the answer to trailers, if there are any.
        """
        whole, self.whole, self.holds = self.whole, None, False
        if edited is not None:
            whole = [b"".join(edited)]
        parts = write_parts(whole if whole is not None else [], ended=not self.has_trailers)
        return [*parts, trailers] if self.has_trailers else parts


def write_parts(pieces: Pieces, *, ended: bool) -> list[bytes]:
    """The messages that hand these pieces of a request's body back; with `ended`, they are its end."""
    if ended and len(pieces) == 1 and len(pieces[0]) <= _PART:  # as almost always
        return [hand_on(pieces, ended=True)]
    parts: list[bytes] = []
    group: Pieces = []
    room = _PART
    for piece in pieces:
        rest = memoryview(piece)
        while len(rest) > room:
            parts.append(hand_on([*group, rest[:room]], ended=False))
            rest, group, room = rest[room:], [], _PART
        group.append(rest)
        room -= len(rest)
    if group or ended:
        parts.append(hand_on(group, ended=ended))
    return parts
