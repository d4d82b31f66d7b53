"""Similarity `canonical`: JSON bodies compared by meaning, without the fields that the policy ignores."""

from __future__ import annotations

from extproc.policy.bundle import LoopDetection
from extproc.similarity.document import Document, NotJson, canonical, steps


class Canonical:
    """A detector's `ignore_fields`, ready to look into bodies; one that is not JSON is compared byte for byte."""

    def __init__(self, loop: LoopDetection) -> None:
        """Compile."""
        self._ignored = [steps(pointer) for pointer in loop.ignore_fields]

    def compare(self, document: Document) -> tuple[bytes | None, None]:
        """See `Similarity`."""
        try:
            return canonical(document.value(), self._ignored), None
        except NotJson:
            return None, None

    def shown(self, document: Document) -> list[str]:
        """See `Similarity`."""
        if not len(document):
            return ["no body"]
        compared, _ = self.compare(document)
        return [compared.decode() if compared is not None else "the body byte for byte: it is not JSON"]
