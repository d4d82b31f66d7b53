"""What makes two requests the same: every byte, the meaning of a body, the end of a conversation, or what is called."""

from __future__ import annotations

from extproc.similarity.base import Similarity
from extproc.similarity.canonical import Canonical
from extproc.similarity.keys import SimilarityKeys
from extproc.similarity.mcp import Mcp
from extproc.similarity.tail import Tail
from extproc.similarity.tool_calls import ToolCalls
from extproc.similarity.turns import Turns

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
