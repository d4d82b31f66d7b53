"""How a conversation without a name is told from others of its caller: by how it opens."""

from __future__ import annotations

from extproc.apis.conversation import Conversation
from extproc.detectors.chain import Transcript


def read_opening(conversation: Conversation) -> bytes:
    """What the user and the assistant said first, which stays when a conversation grows.

    The assistant's turn is left out if nothing has read the transcript.

    Raises:
        NotCounted: it cannot be read.
    """
    shown = conversation.transcript
    turn = shown.turns[0].hash if isinstance(shown, Transcript) and shown.turns else b""
    return b"%b %b" % (conversation.read_first_words().encode("utf-8", "surrogatepass"), turn)
