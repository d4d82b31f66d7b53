"""The parts of a message of any API.

msgspec makes its Structs at run time, so this is separate from compiled code. They cost a fifth of what named tuples do.
"""
# interpreted: msgspec makes its Structs of annotations, which compiled classes do not keep

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
    """One thing in a message.

    Attributes:
        kind: TEXT, CALL, RESULT, OTHER, or REFERENCE for an id of something that the server keeps.
        value: the text, arguments or result, or the whole of anything else; may have to be unpacked. ABSENT for an OTHER
            that is the whole message.
        name: the tool of a CALL; the client's word for an OTHER.
        id: connects a RESULT with its CALL; empty if the client sends none.
        failed: the API marks the RESULT as an error.
        images: images beside the value, if the API has them in a place of their own; ABSENT for none. Clients drop older
            images, so these are only compared with other images.
    """

    kind: str
    value: Json
    name: str = ""
    id: str = ""
    failed: bool = False
    images: Json = ABSENT
