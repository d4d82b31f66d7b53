"""The parts of a message of any API.

msgspec makes its Structs at run time, so this is separate from compiled code. They cost a fifth of what named tuples do.
"""
# interpreted: msgspec makes its Structs of annotations, which compiled classes do not keep

from __future__ import annotations

from typing import Final

from msgspec import Struct

from extproc.request.document import Json

TEXT: Final = "text"
CALL: Final = "call"
RESULT: Final = "result"
OTHER: Final = "other"


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
