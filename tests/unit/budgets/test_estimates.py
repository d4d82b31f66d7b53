"""What a request reserves before its response reports usage."""

from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.apis import open_conversation
from extproc.apis.lengths import count_characters
from extproc.budgets.costs import PERIOD_UNITS, estimate_prompt
from extproc.request.document import MAX_STEPS, Document, NotCounted
from tests.support.budget_policies import CHAT, REJECT, ask, limited, rule, serve
from tests.support.service import metadata_of

TOKENS = rule("cost_based", budget=10**9, period="1d", cost_key="usage:output", staged_actions=REJECT)
HELLO = [{"role": "user", "content": "hello"}]
GEMINI = "/v1beta/models/gemini-2.5-pro:generateContent"
CONTENTS = [{"role": "user", "parts": [{"text": "hello"}]}]


def reserve(path: str, body: dict[str, Any]) -> int:
    service, _ = serve(limited(TOKENS))
    (described,) = json.loads(metadata_of(ask(service, path=path, content=json.dumps(body).encode()))["sessions"])
    return int(described["budgets"][0][3]) // PERIOD_UNITS


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        (CHAT, {"messages": HELLO, "max_tokens": 100, "n": 9}, 900),
        (CHAT, {"messages": HELLO, "n": 9}, 9_000),
        (CHAT, {"messages": HELLO, "max_tokens": 100, "n": 9.0}, 900),
        (CHAT, {"messages": HELLO, "max_tokens": "100", "n": "9"}, 900),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 100, "n": 2, "best_of": 5}, 500),
        ("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 100, "n": 2}, 600),
        ("/v1/completions", {"prompt": ["a" * 9_000, "b"], "max_tokens": 100}, 200),
        ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 100}, 200),
        ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 100}, 100),
        (GEMINI, {"contents": CONTENTS, "generationConfig": {"maxOutputTokens": 100, "candidateCount": 4}}, 400),
        (GEMINI, {"contents": CONTENTS, "generation_config": {"max_output_tokens": 100, "candidate_count": 4}}, 400),
        (CHAT, {"messages": HELLO, "max_tokens": 100, "n": 1}, 100),
        *[(CHAT, {"messages": HELLO, "max_tokens": 100, "n": n}, 100) for n in (0, -3, None, True, "many", [9], {"n": 9}, 0.5)],
        (CHAT, {"messages": HELLO, "max_completion_tokens": 1, "max_tokens": 5_000}, 5_000),
        (CHAT, {"messages": HELLO, "max_output_tokens": 1}, 1_000),
        (CHAT, {"messages": HELLO, "max_tokens": 1e30}, 10_000_000),
        (CHAT, {"messages": [], "max_tokens": 5_000}, 5_000),
        ("/ask", {"messages": HELLO, "max_tokens": 1, "max_output_tokens": 5_000}, 5_000),
    ],
)  # fmt: skip
def test_every_requested_answer_is_reserved(path: str, body: dict[str, Any], tokens: int) -> None:
    assert reserve(path, {"model": "m", **body}) == tokens


TEXT = {"type": "text", "text": "a"}


def _list_bodies(count: int) -> dict[str, dict[str, Any]]:
    user, texts = {"role": "user", "content": "x"}, [TEXT] * count
    result = {"type": "tool_result", "tool_use_id": "c", "content": texts}
    return {
        "system": {"messages": [user], "system": texts},
        "instructions": {"input": [user], "instructions": texts},
        "result": {"messages": [{"role": "user", "content": [result]}]},
        "parts": {"contents": [{"parts": [{"text": "x"}]}], "systemInstruction": {"parts": texts}},
    }


@pytest.mark.parametrize("place", _list_bodies(0))
def test_very_long_lists_are_estimated_by_bytes(place: str) -> None:
    data = json.dumps(_list_bodies(MAX_STEPS + 1)[place]).encode()

    with pytest.raises(NotCounted, match="inspect_limit"):
        count_characters(open_conversation(Document(data)), data)
    assert estimate_prompt(Document(data), len(data)) == -(-len(data) // 4)


@pytest.mark.parametrize("place", _list_bodies(0))
def test_shorter_lists_are_counted_by_characters(place: str) -> None:
    assert estimate_prompt(Document(json.dumps(_list_bodies(4_000)[place]).encode()), 0) in range(1_000, 1_010)
