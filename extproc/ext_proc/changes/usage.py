"""Asks for the usage of a streamed answer, which some APIs report only on request.

The client gets one more event, with the usage. So this happens only if the policy says so.
"""

from __future__ import annotations

from extproc.apis import read_path
from extproc.ext_proc.changes.edits import NotEdited, open_patch
from extproc.request.document import Document, NotCounted
from extproc.request.http import HttpRequest
from extproc.request.patch import Pieces


def request_usage(request: HttpRequest, body: bytes | memoryview, document: Document | None = None) -> Pieces:
    """Change a body so that its answer reports usage; only one piece if nothing changes.

    `document`: see `open_patch`.

    Raises:
        NotEdited: the body cannot be edited.
    """
    ask = read_path(request.path).ask_usage
    if ask is None:
        return [bytes(body)]
    mark, patch = open_patch(request, body, document)
    try:
        if patch.is_object(patch.root):
            patch.change(patch.root, ask(patch, patch.open_fields(patch.root)))
        pieces = patch.apply()
    except NotCounted as why:
        raise NotEdited(why.reason) from None
    return [mark, *pieces] if mark and len(pieces) > 1 else pieces
