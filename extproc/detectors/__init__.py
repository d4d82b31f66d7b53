"""Similarities: what makes two requests identical, such as all bytes or the last messages."""

from __future__ import annotations

from extproc.detectors.base import Similarity
from extproc.detectors.canonical import Canonical
from extproc.detectors.keys import SimilarityKeys
from extproc.detectors.mcp import Mcp
from extproc.detectors.prompt import Prompt
from extproc.detectors.tail import Tail
from extproc.detectors.tool_calls import ToolCalls
from extproc.detectors.turns import Turns

__all__ = ["KINDS", "Similarity", "make_similarity"]

KINDS: dict[str, type[Similarity]] = {
    "exact": Similarity,
    "canonical": Canonical,
    "prompt": Prompt,
    "tail": Tail,
    "tool_calls": ToolCalls,
    "turns": Turns,
    "mcp": Mcp,
}


def make_similarity(keys: SimilarityKeys) -> Similarity:
    """Create the similarity of a loop_detection entry."""
    return KINDS[keys.similarity](keys)
