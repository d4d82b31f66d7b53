"""What makes two requests the same, besides every byte of them: bodies compared by meaning, and conversations by their end.

`exact` is not here: it needs nothing but the body's checksums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from extproc.decision import Repeat
from extproc.policy.bundle import LoopDetection
from extproc.similarity.canonical import Canonical
from extproc.similarity.document import Document
from extproc.similarity.tail import Tail
from extproc.similarity.tool_calls import ToolCalls


class Similarity(Protocol):
    """What a detector compares in place of the body."""

    def compare(self, document: Document) -> tuple[bytes | None, Repeat | None]:
        """Look into a body.

        Returns:
            what is compared, in one spelling; None where that is the body itself;
            what the request itself says about a loop; None where requests are counted.

        Raises:
            NotCounted: there is nothing to compare.
        """

    def shown(self, document: Document) -> list[str]:
        """What is compared, as lines for people.

        Raises:
            NotCounted: as `compare`.
        """


SIMILARITIES: dict[str, Callable[[LoopDetection], Similarity | None]] = {
    "exact": lambda _: None,
    "canonical": Canonical,
    "tail": Tail,
    "tool_calls": ToolCalls,
}
