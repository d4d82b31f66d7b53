"""How long what a model reads is, for every API."""

import json
from typing import Any

import pytest

from extproc.apis import open_conversation
from extproc.apis.lengths import count_characters
from extproc.request.document import Document

PICTURE = "A" * 40_000
TOOLS: list[Any] = [{"name": "t", "description": "x" * 50}]

BODIES: dict[str, tuple[dict[str, Any], int]] = {
    "chat": (
        {
            "messages": [
                {"role": "system", "content": "x" * 7},
                {"role": "user", "content": "x" * 100},
            ]
        },
        107,
    ),
    "chat in blocks": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 100}]}]},
        100,
    ),
    "chat with a picture": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}]}
            ]
        },
        1_000,
    ),
    "chat with tools": (
        {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS},
        1 + len(json.dumps(TOOLS)),
    ),
    "messages with a system prompt": (
        {
            "system": "x" * 300,
            "max_tokens": 1,
            "messages": [{"role": "user", "content": "x" * 100}],
        },
        400,
    ),
    "a system prompt in blocks": (
        {
            "system": [{"type": "text", "text": "x"}],
            "max_tokens": 1,
            "messages": [{"role": "user", "content": "x"}],
        },
        2,
    ),
    "messages with a picture": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "source": {"type": "base64", "data": PICTURE}}],
                }
            ]
        },
        1_000,
    ),
    "instructions and input": ({"instructions": "x" * 20, "input": "x" * 100}, 120),
    "contents": (
        {
            "contents": [
                {
                    "role": "user",
                    "parts": [
                        {"text": "x" * 100},
                        {"inlineData": {"mimeType": "a/b", "data": PICTURE}},
                    ],
                }
            ]
        },
        1_100,
    ),
    "an instruction in parts": (
        {
            "systemInstruction": {"parts": [{"text": "x" * 50}]},
            "contents": [{"parts": [{"text": "x"}]}],
        },
        51,
    ),
    "a prompt": ({"prompt": "x" * 100}, 100),
    "characters, not bytes": (
        {"messages": [{"role": "user", "content": "\u00e9\u4e2d\n" * 10}]},
        30,
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_characters_a_model_reads_are_counted(name: str) -> None:
    """Texts count by character, pictures as 1,000; JSON and the bytes of pictures do not count."""
    body, expected = BODIES[name]
    data = json.dumps({"model": "m", **body}).encode()

    found = count_characters(open_conversation(Document(data)), data)

    assert expected <= found <= expected + 10


def test_calls_and_results_are_counted() -> None:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "search", "arguments": json.dumps({"q": "x" * 200})},
    }
    messages: list[Any] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "y" * 500},
    ]
    data = json.dumps({"model": "m", "messages": messages}).encode()

    assert 700 <= count_characters(open_conversation(Document(data)), data) <= 740


def test_very_long_body_counts_by_its_bytes() -> None:
    data = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": "x" * 800_000}] * 3}
    ).encode()

    assert count_characters(open_conversation(Document(data)), data) == len(data)


def test_nested_text_is_counted_to_a_depth() -> None:
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    data = json.dumps(
        {"model": "m", "system": deep, "messages": [{"role": "user", "content": "x"}]}
    ).encode()

    assert 390 <= count_characters(open_conversation(Document(data)), data) <= 410
