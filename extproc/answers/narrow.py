"""placeholder until narrow-2"""

from __future__ import annotations

from collections.abc import Collection

from extproc.request import HttpRequest
from extproc.similarity.document import Document


class NotNarrowed(Exception):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def narrow(
    request: HttpRequest, body: bytes | memoryview, without: Collection[str] | None, document: Document | None = None
) -> bytes:
    raise NotNarrowed("x")
