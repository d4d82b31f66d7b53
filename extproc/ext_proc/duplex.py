"""Streams for which Envoy keeps no bodies (FULL_DUPLEX_STREAMED): every part of a body is handed back unchanged.

In this mode, the upstream gets only the parts of a body that are handed back. If the stream ends earlier, even with OK, Envoy
continues without the rest, or waits for it forever: the upstream gets an incomplete request, and answers 200. So the stream
must last as long as the bodies that it carries. If it has to end earlier, it ends with an error, and Envoy answers 500, in any
failure mode.
"""

from __future__ import annotations

from extproc.ext_proc.wire import BODY_DUPLEX, EnvoyMessage


class Duplex:
    """The bodies of one stream that are still to be handed back.

    Attributes:
        over: no body is left to hand back.
    """

    __slots__ = ("_begun", "_request", "_response")

    def __init__(self, first: EnvoyMessage) -> None:
        """Read the body modes from the first message of a stream."""
        self._request = first.body_mode == BODY_DUPLEX
        self._response = first.response_mode == BODY_DUPLEX
        self._begun = False  # a message about the response has come

    @property
    def over(self) -> bool:
        """Whether no body is left to hand back."""
        return not (self._request or self._response)

    @property
    def carries(self) -> bool:
        """Whether a body is under way, which would be cut off if the stream ended."""
        return self._request or (self._response and self._begun)

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
