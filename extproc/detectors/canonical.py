"""Similarity `canonical`: compares JSON bodies by meaning, without ignored fields."""

from __future__ import annotations

from typing import ClassVar

from extproc.detectors.base import Similarity
from extproc.detectors.keys import CanonicalKeys, SimilarityKeys
from extproc.objects import JsonObject
from extproc.request.document import Document, NotJson, split_pointer, write_canonical


class Canonical(Similarity):
    """Compares JSON bodies without a detector's `ignore_fields`, and other bodies byte by byte."""

    keys: ClassVar[type[JsonObject]] = CanonicalKeys
    looks: ClassVar[bool] = True

    def __init__(self, keys: SimilarityKeys) -> None:
        self._ignored = [split_pointer(pointer) for pointer in keys.ignore_fields]

    def compare(self, document: Document) -> tuple[bytes | None, None]:
        """See `Similarity`."""
        try:
            return write_canonical(document.value(), self._ignored), None
        except NotJson:
            return None, None

    def show(self, document: Document) -> list[str]:
        """See `Similarity`."""
        if not len(document):
            return ["no body"]
        compared, _ = self.compare(document)
        return [
            compared.decode() if compared is not None else "the body byte for byte: it is not JSON"
        ]

    def name_repeated(self, place: str) -> str:
        """See `Similarity`."""
        return f"a request with the same content {place}"
