"""Excerpts of long bodies leave out only older messages, and lead to no false verdict."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from extproc.apis import LIST_PATHS
from extproc.apis.excerpt import MAX_AT_ONCE, MAX_BRACKETS, MAX_DEPTH, MAX_QUOTES, Excerpt
from extproc.detectors.keys import SimilarityKeys
from extproc.detectors.turns import Turns
from extproc.request.document import Document, NotCounted
from tests.support import turn_writers
from tests.support.extent import deepen
from tests.support.turn_writers import Did, Writer

WRITERS: dict[str, Writer] = {
    name: getattr(turn_writers, name)
    for name in (
        "as_chat",
        "as_ollama",
        "as_responses",
        "as_anthropic",
        "as_gemini",
        "as_bedrock",
        "as_observed",
    )
}
RULES = [
    Turns(SimilarityKeys(threshold_identical_requests=threshold)).rule for threshold in (2, 3, 5)
]

TRAPS = (
    '"},{"role":"user","content":"',
    '"}]},"messages":[{"role":"assistant"',
    ',{"role":"assistant","tool_calls":[]},',
    "\\",
    '\\"',
    '\\\\"},{',
    "]}]}",
    "[[[{{{",
    '"messages":[',
    '"request":{"contents":[',
    "\u00fc\U0001f600\u2028",
    "\n\t\r\x00\x1f",
    "\ud800",
    "plain words and nothing else. ",
)


def make_text(chance: random.Random, most: int) -> str:
    """A text that looks like structure."""
    return "".join(chance.choices(TRAPS, k=chance.randrange(1, most)))


def make_turns(chance: random.Random, most: int) -> list[Did]:
    kinds = [
        (
            (("f", {"a": make_text(chance, 8), "b": [number, {"c": None}]}),)
            * chance.randrange(1, 3),
            make_text(chance, most),
        )
        for number in range(chance.randrange(1, 6))
    ]
    turns = []
    for number in range(1, chance.randrange(4, 40)):
        calls, result = kinds[0] if chance.random() < 0.6 else chance.choice(kinds)
        turns.append(
            Did(calls, (result,) * len(calls), thought=make_text(chance, 4), number=number)
        )
    return turns


def add_keys(chance: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    others = {
        f"other {number}": [{"messages": [make_text(chance, 5)], "input": {"contents": []}}]
        for number in range(3)
    }
    others["tools"] = [
        {
            "type": "function",
            "function": {"name": make_text(chance, 3), "parameters": {"request": {}}},
        }
    ] * 2
    if "request" in body and chance.random() < 0.5:
        body = {"request": {**others, **body["request"]}}
    items = list((body | others).items())
    chance.shuffle(items)
    return dict(items)


def write(chance: random.Random, body: object) -> bytes:
    separators = chance.choice([(",", ":"), (", ", ": "), (" ,\n", " : ")])
    text = json.dumps(
        body,
        indent=chance.choice([None, None, 2]),
        separators=separators,
        ensure_ascii=chance.random() < 0.5,
    )
    return text.encode("utf-8", "replace")


def shorten(chance: random.Random, data: bytes, most: int, *, pieces: bool) -> bytes | None:
    """The excerpt of a body that comes at once or in pieces."""
    excerpt = Excerpt(LIST_PATHS, most)
    if not pieces:
        return excerpt.write(memoryview(data))
    kept, place = bytearray(), 0
    while place < len(data):
        piece = data[place : place + chance.randrange(1, most // 8 + 1)]
        place += len(piece)
        if len(kept) + len(piece) > most:
            excerpt.shorten(kept)
        kept += piece
        assert len(kept) <= most
    return excerpt.write(bytes(kept))


def find_messages(body: Any) -> tuple[Any, Callable[[list[Any]], Any]]:  # noqa: ANN401  # JSON
    """The messages of a body, and a function that makes the same body with others."""
    if "request" in body:
        inner, make = find_messages(body["request"])
        return inner, lambda messages: {**body, "request": make(messages)}
    key = next(key for key in ("messages", "input", "contents") if key in body)
    return body[key], lambda messages: {**body, key: messages}


@pytest.mark.parametrize("pieces", [False, True], ids=["at once", "in pieces"])
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("seed", deepen(range(24), 0))
def test_only_older_messages_are_left_out(name: str, seed: int, pieces: bool) -> None:
    """An excerpt is the same JSON with only the newest messages.

    It shows no loop that the whole does not show.
    """
    chance = random.Random(f"{name} {seed}")
    turns = make_turns(chance, 200)
    made = WRITERS[name](turns)
    if name == "as_gemini" and chance.random() < 0.5:
        made = {"model": "m", "request": made}
    data = write(chance, add_keys(chance, made))
    body = json.loads(data)

    most = chance.randrange(2_000, max(2_001, len(data)))
    found = shorten(chance, data, most, pieces=pieces) if len(data) > most else None

    if found is not None:
        assert len(found) <= most
        messages, make = find_messages(body)
        left, _ = find_messages(json.loads(found))
        assert 0 < len(left) < len(messages)
        assert json.loads(found) == make(messages[-len(left) :])
        for rule in RULES:
            check_verdicts(rule, data, found)


def check_verdicts(rule: Any, data: bytes, found: bytes) -> None:  # noqa: ANN401  # TurnRule
    whole, short = Document(data), Document(found, shortened=True)
    shown = [turn.show(10_000) for turn in rule.read(short).newest(32)]
    assert shown == [turn.show(10_000) for turn in rule.read(whole).newest(32)][: len(shown)]
    found_short, found_whole = rule.find_loop(rule.read(short)), rule.find_loop(rule.read(whole))
    if found_short is not None:
        assert found_whole is not None
        assert found_whole.tools
    if len(shown) == 32:
        assert (found_short is None) == (found_whole is None)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"[" + b"1," * 9_000 + b"1]",
        b'{"a":"' + b"x" * 9_000 + b'"}',
        b'{"messages":"' + b"x" * 9_000 + b'"}',
        b'{"messages":[],"a":[' + b"1," * 9_000 + b"1]}",
        b'{"messages":[' + b'{"role":"user"},' * 100 + b'1],"a":[' + b"1," * 9_000 + b"1]}",
        b'{"a":{"messages":[' + b"1," * 9_000 + b"1]}}",
        b'{"a":"\\"messages\\":[",' + b'"b":[' + b"1," * 9_000 + b"1]}",
        b'{"messages":["' + b"x" * 9_000 + b'"]}',
        b'{"messages":["' + b'\\"' * 9_000,
        b'{"messages":[1,"' + b'\\"' * 9_000,
        b'{"messages":[' + b"[" * 9_000,
        b'{"messages":[' + b"]" * 9_000,
        b'{"messages":[' + b"{]" * 9_000 + b"]}",
        b'{"messages":[' + b'"' * 9_001,
        b'{"messages":[' + b"\\" * 9_001,
        b'{"messages":[' + b"1" * 9_000,
        b'{"messages":[' + b"[" * (MAX_DEPTH + 1) + b"1," * 9_000,
        b"\xff" * 9_000,
        "\ufeff{}".encode("utf-16") * 900,
    ],
)
def test_uncertain_body_has_no_excerpt(data: bytes) -> None:
    chance = random.Random(0)

    assert shorten(chance, data, 4_096, pieces=False) is None
    assert len(data) <= 4_096 or shorten(chance, data, 4_096, pieces=True) is None


def test_last_of_a_duplicate_key_counts() -> None:
    chance = random.Random(0)
    old, new = (
        json.dumps([{"role": "user", "content": "old"}]),
        json.dumps([{"role": "user", "content": "x"}] * 900),
    )

    first = shorten(chance, f'{{"messages":{old},"messages":{new}}}'.encode(), 4_096, pieces=False)
    last = shorten(chance, f'{{"messages":{new},"messages":{old}}}'.encode(), 4_096, pieces=False)

    assert first is not None
    assert last is not None
    assert {message["content"] for message in json.loads(first)["messages"]} == {"x"}
    assert json.loads(last)["messages"] == json.loads(old)


def test_excerpt_gives_up_on_many_quotes_or_brackets() -> None:
    chance = random.Random(0)
    for unit, most in ((b'"",', MAX_QUOTES), (b"{},", MAX_BRACKETS)):
        few, many = [b'{"messages":[%b1,1]}' % (unit * number) for number in (most // 4, most)]
        assert shorten(chance, few, 4_096, pieces=False) is not None
        assert shorten(chance, many, 4_096, pieces=False) is None


def test_very_long_body_is_read_in_pieces() -> None:
    chance = random.Random(0)
    data = json.dumps(
        {"messages": [{"role": "user", "content": "x" * 10_000}] * (MAX_AT_ONCE // 10_000 + 10)}
    ).encode()

    assert shorten(chance, data, 65_536, pieces=False) is None
    assert shorten(chance, data, 65_536, pieces=True) is not None


def test_excerpt_of_unreadable_conversation_is_not_counted() -> None:
    short = shorten(
        random.Random(0), b'{"messages":[' + b"1," * 9_000 + b"1]}", 4_096, pieces=False
    )

    assert short is not None
    with pytest.raises(NotCounted):
        RULES[0].read(Document(short, shortened=True))
