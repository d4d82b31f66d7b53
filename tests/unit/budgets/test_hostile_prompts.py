"""Prompts of very many parts, whose length budgets estimate by their bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.apis import open_conversation
from extproc.apis.lengths import count_characters
from extproc.budgets.costs import estimate_prompt
from extproc.request.document import MAX_STEPS, Document, NotCounted

TEXT = {"type": "text", "text": "a"}


def _list_bodies(count: int) -> dict[str, dict[str, Any]]:
    """Bodies with this many texts where only budgets look."""
    user, texts = {"role": "user", "content": "x"}, [TEXT] * count
    result = {"type": "tool_result", "tool_use_id": "c", "content": texts}
    return {
        "system": {"messages": [user], "system": texts},
        "instructions": {"input": [user], "instructions": texts},
        "result": {"messages": [{"role": "user", "content": [result]}]},
        "parts": {"contents": [{"parts": [{"text": "x"}]}], "systemInstruction": {"parts": texts}},
    }


@pytest.mark.parametrize("place", _list_bodies(0))
def test_long_lists_are_estimated_by_their_bytes(place: str) -> None:
    """Counting them one by one would take too long."""
    data = json.dumps(_list_bodies(MAX_STEPS + 1)[place]).encode()

    with pytest.raises(NotCounted, match="inspect_limit"):
        count_characters(open_conversation(Document(data)), data)
    assert estimate_prompt(Document(data), len(data)) == -(-len(data) // 4)


@pytest.mark.parametrize("place", _list_bodies(0))
def test_shorter_lists_are_counted_one_by_one(place: str) -> None:
    assert estimate_prompt(Document(json.dumps(_list_bodies(4_000)[place]).encode()), 0) in range(1_000, 1_010)
