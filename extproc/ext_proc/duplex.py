"""Streams in which Envoy keeps no bodies (FULL_DUPLEX_STREAMED): what comes of them is handed back as it is.

In this mode a body arrives only as far as it is handed back. If the stream ends before that, even with OK, Envoy goes on
without the rest, or waits for it forever: the upstream gets a part of the request, and answers 200. So such a stream lasts as
long as the bodies that it carries. One that has to end sooner ends with an error, to which Envoy answers 500, whatever its
failure mode.
"""

from __future__ import annotations

from extproc.ext_proc.wire import BODY_DUPLEX, EnvoyMessage


class Duplex:
    """What is still to be handed back on one stream.

    Attributes:
        over: nothing is.
    """

    __slots__ = ("_begun", "_request", "_response")

    def __init__(self, first: EnvoyMessage) -> None:
        """Ask the first message of a stream, which says how bodies come."""
        self._request = first.body_mode == BODY_DUPLEX
        self._response = first.response_mode == BODY_DUPLEX
        self._begun = False  # the response has

    @property
    def over(self) -> bool:
        """Nothing is."""
        return not (self._request or self._response)

    @property
    def carries(self) -> bool:
        """A body is under way, which would be cut off if the stream ended."""
        return self._request or (self._response and self._begun)

    def follow(self, message: EnvoyMessage) -> bool:
        """Take the next message; returns whether it is a part of a body that has to be handed back."""
        kind = message.kind
        if kind.startswith("request_"):
            expected = self._request
            self._request = expected and not message.ended
        else:
            self._begun = True
            expected = self._response
            self._response = expected and not message.ended
        return expected and kind.endswith("_body")


def is_duplex(first: EnvoyMessage) -> bool:
    """Whether some body of a stream has to be handed back, as its first message has it."""
    return BODY_DUPLEX in (first.body_mode, first.response_mode)
