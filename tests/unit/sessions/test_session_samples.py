"""A session reserves each answer that a request asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.request.document import Document
from extproc.sessions.history import read_tool_calls

HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("more", "tokens"),
    [({"max_tokens": 70, "n": 9}, 630), ({"n": 9}, 9_000), ({"max_tokens": 10**12, "n": 2}, 262_144), ({"n": 1}, 0), ({}, 0)],
)
def test_a_request_reserves_all_of_its_answers(more: dict[str, Any], tokens: int) -> None:
    """A thousand tokens for each whose length is open."""
    assert read_tool_calls(Document(json.dumps(HELLO | more).encode())).answer == tokens
