"""Edits a request's body if that is safe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from extproc.apis.locate import open_patch
from extproc.request.document import Document, NotCounted
from extproc.request.encodings import list_encodings, split_mark
from extproc.request.http import HttpRequest
from extproc.request.patch import Patch, Pieces

SIGNED: Final = "signed_body"
"""The reason for a body that its client signed: the signature would not match the edited body."""

_AWS: Final = b"AWS4-"
_HMAC: Final = b"HMAC"
_SIGNATURE: Final = b"SIGNATURE"
"""Authorization schemes that sign the body: AWS's (SigV4, SigV4a), similar ones of other clouds,
and those of drafts."""

_USUAL: Final = b"Bearer "
_LONGEST_SCHEME: Final = 64
_AWS_IN_QUERY: Final = "x-amz-signature="
_UNSIGNED: Final = frozenset({b"UNSIGNED-PAYLOAD", b"STREAMING-UNSIGNED-PAYLOAD-TRAILER"})
"""Values of AWS's digest header if the signature does not cover the body."""


class NotEdited(Exception):  # not an error: the request continues or is refused
    """The body cannot be edited.

    Attributes:
        reason: as in `unsteered_total` and `unnarrowed_total`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def edit(
    request: HttpRequest,
    body: bytes | memoryview,
    change: Callable[[Patch], object],
    document: Document | None = None,
) -> Pieces:
    """Edit a request's body.

    The result is in pieces, which are copied only into the answer to Envoy.

    Args:
        request: the request.
        body: its whole body.
        change: edits the open body; may raise NotEdited and NotCounted.
        document: the same body as read by policies, to reuse what they have decoded; may be None.

    Returns:
        a single piece if nothing changes.

    Raises:
        NotEdited: the body is signed, compressed, ambiguous, too large or not JSON, or does not
            allow the change.
    """
    if is_signed(request):
        raise NotEdited(SIGNED)
    encoding = request.headers.get("content-encoding")
    if encoding and list_encodings(encoding):
        raise NotEdited("content_encoding")
    mark, rest = split_mark(bytes(body))
    try:
        patch = open_patch(document, rest)
        change(patch)
        pieces = patch.apply()
    except NotCounted as why:
        raise NotEdited(why.reason) from None
    return [mark, *pieces] if len(pieces) > 1 else [bytes(body)]


def is_signed(request: HttpRequest) -> bool:
    """Whether the client signed the body, so that the upstream would refuse an edited one."""
    headers = request.headers
    if "signature-input" in headers or "signature" in headers:
        return True  # RFC 9421 or its drafts; it may cover the body
    shown = headers.get("authorization")
    scheme = (
        b""
        if not shown or shown.startswith(_USUAL)
        else shown.lstrip()[:_LONGEST_SCHEME].upper().partition(b" ")[0]
    )
    if scheme.startswith(_AWS) or (request.query and _AWS_IN_QUERY in request.query.lower()):
        return headers.get("x-amz-content-sha256", b"").strip().upper() not in _UNSIGNED
    return bool(scheme) and (_HMAC in scheme or scheme == _SIGNATURE)
