"""What makes two requests the same: every byte, the meaning of a body, the end of a conversation, or what is called."""

from __future__ import annotations

from extproc.detectors.base import Similarity
from extproc.detectors.canonical import Canonical
from extproc.detectors.keys import SimilarityKeys
from extproc.detectors.mcp import Mcp
from extproc.detectors.tail import Tail
from extproc.detectors.tool_calls import ToolCalls
from extproc.detectors.turns import Turns

__all__ = ["KINDS", "Similarity", "make_similarity"]

KINDS: dict[str, type[Similarity]] = {
    "exact": Similarity,
    "canonical": Canonical,
    "tail": Tail,
    "tool_calls": ToolCalls,
    "turns": Turns,
    "mcp": Mcp,
}


def make_similarity(keys: SimilarityKeys) -> Similarity:
    """The similarity that a loop_detection entry asks for, with its keys."""
    return KINDS[keys.similarity](keys)
