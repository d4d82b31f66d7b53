"""Streams in mode FULL_DUPLEX_STREAMED: Envoy keeps no bodies, so every part must be handed back.

The upstream gets only the parts that are handed back. If the stream ends too early, even with OK,
Envoy continues without the rest, or waits for it forever: the upstream gets an incomplete request,
and answers 200. So the stream must last as long as its bodies. If it has to end earlier, it ends
with an error, and Envoy answers 500, whatever its failure mode.

The body of a request to be decided is held here until its end, and so are its headers: Envoy waits
for their answer without a timeout, and sends the body meanwhile. Then the request can be refused,
or its body edited. All other parts are handed back at once.
"""

from __future__ import annotations

from typing import Final

from extproc.ext_proc.answers.let_pass import hand_on
from extproc.ext_proc.held import HeldBody
from extproc.ext_proc.wire import BODY_DUPLEX, EnvoyMessage
from extproc.request.patch import Pieces

HELD_BYTES: Final = 10 * 2**20
"""Maximum length of a body to hold, in bytes, unless a policy inspects longer ones. Longer bodies
are forwarded before the decision."""

_PART: Final = 2**16 - 2**10
"""Maximum length of a part that is handed back, in bytes. Some gateways accept no message above 64
KiB."""


class Duplex:
    """The bodies of one stream that still have to be handed back.

    Attributes:
        holds: the request's body is held, and its headers are unanswered.
        untimed: Envoy waits without a timeout for answers about the request.
        held: the held body; None before its first part.
        before: messages to send before the next answer.
        part: the message that hands back the newest part of a body, to be merged with the answer;
            may be empty.
        whole: the pieces of the held body, once it has ended.
        has_trailers: the held body ends with trailers.
    """

    def __init__(self, first: EnvoyMessage) -> None:
        """Read the body modes from the first message of a stream."""
        self._request = self.untimed = first.body_mode == BODY_DUPLEX
        self._response = first.response_mode == BODY_DUPLEX
        self._begun = False  # a message about the response has arrived
        self.holds = False
        self.held: HeldBody | None = None
        self.before: list[bytes] = []
        self.part = b""
        self.whole: list[bytes | memoryview] | None = None
        self.has_trailers = False

    @property
    def over(self) -> bool:
        """Whether all bodies have been handed back."""
        return not (self._request or self._response)

    @property
    def carries(self) -> bool:
        """Whether ending the stream now would cut off a body."""
        return self._request or self.holds or (self._response and self._begun)

    def follow(self, message: EnvoyMessage) -> bool:
        """Take note of the next message; returns whether it is a part to hand back."""
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
        """The messages that hand back the held body, or the edited one.

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
    """The messages that hand back these pieces of a request's body; `ended`: they are its end."""
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
