"""The start of every edit of a request's body, and the reasons why one is impossible."""

from __future__ import annotations

from typing import Final

from extproc.request.document import NotCounted
from extproc.request.encodings import list_encodings, split_mark
from extproc.request.http import HttpRequest
from extproc.request.patch import Patch

SIGNED: Final = "signed_body"
"""The reason for a body that its client has signed: the signature would not match an edited one."""

_AWS: Final = b"AWS4-"
_HMAC: Final = b"HMAC"
_SIGNATURE: Final = b"SIGNATURE"
"""In the schemes of signatures over a body: AWS's (SigV4, SigV4a), those that other clouds made after it, and the drafts'."""

_LONGEST_SCHEME: Final = 64
_AWS_IN_QUERY: Final = "x-amz-signature="
_UNSIGNED: Final = frozenset({b"UNSIGNED-PAYLOAD", b"STREAMING-UNSIGNED-PAYLOAD-TRAILER"})
"""What stands in place of a body's digest where AWS's signature leaves the body out."""

_SIGNATURES: Final = ("signature-input", "signature")
"""Of RFC 9421, and of the drafts before it; which parts of a request they cover is not looked at."""


class NotEdited(Exception):  # says what becomes of the request
    """The body cannot be changed.

    Attributes:
        reason: why, as `unsteered_total` and `unnarrowed_total` show it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def open_patch(request: HttpRequest, body: bytes | memoryview) -> tuple[bytes, Patch]:
    """Open a request's body for an edit: its byte order mark, which is no part of its JSON, and the rest.

    Raises:
        NotEdited: it is signed, compressed, no JSON, ambiguous, or too much.
    """
    if is_signed(request):
        raise NotEdited(SIGNED)
    if list_encodings(request.headers.get("content-encoding", b"")):
        raise NotEdited("content_encoding")
    mark, rest = split_mark(bytes(body))
    try:
        return mark, Patch(rest)
    except NotCounted as why:
        raise NotEdited(why.reason) from None


def is_signed(request: HttpRequest) -> bool:
    """Whether a client has signed the body, so that its receiver would refuse an edited one."""
    headers = request.headers
    if any(name in headers for name in _SIGNATURES):
        return True
    scheme = headers.get("authorization", b"").lstrip()[:_LONGEST_SCHEME].upper().partition(b" ")[0]
    if scheme.startswith(_AWS) or _AWS_IN_QUERY in request.query.lower():
        return headers.get("x-amz-content-sha256", b"").strip().upper() not in _UNSIGNED
    return _HMAC in scheme or scheme == _SIGNATURE
