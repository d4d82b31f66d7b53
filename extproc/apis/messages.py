"""The parts of a message in any API.

msgspec creates Structs at run time, so they are separate from compiled code. They cost a fifth of
what named tuples do.
"""
# interpreted: msgspec creates Structs from annotations, which compiled classes do not keep

from __future__ import annotations

from typing import Final

from msgspec import Struct

from extproc.request.document import ABSENT, Json

TEXT: Final = "text"
CALL: Final = "call"
RESULT: Final = "result"
OTHER: Final = "other"
REFERENCE: Final = "reference"


class Part(Struct, gc=False):
    """One part of a message.

    Attributes:
        kind: TEXT, CALL, RESULT, OTHER, or REFERENCE for the id of something on the server.
        value: the text, arguments or result, or the whole of anything else; may be raw. ABSENT for
            an OTHER that is the whole message.
        name: the tool of a CALL; the client's word for an OTHER.
        id: connects a RESULT with its CALL; empty if the client sends none.
        failed: the API marks the RESULT as an error.
        images: images beside the value, if the API has a separate place for them; else ABSENT.
            Clients drop older images, so these are only compared with other images.
    """

    kind: str
    value: Json
    name: str = ""
    id: str = ""
    failed: bool = False
    images: Json = ABSENT
