"""Prompts that are equal but for clocks and attempts repeat; those of one template do not."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from extproc.apis import open_conversation
from extproc.detectors import make_similarity
from extproc.detectors.keys import SimilarityKeys
from extproc.request.document import Document, NotCounted

PROMPT = make_similarity(SimilarityKeys(similarity="prompt"))

BODIES: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "chat": lambda system, user: {
        "model": "m",
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
    },
    "responses": lambda system, user: {"model": "m", "instructions": system, "input": user},
    "anthropic": lambda system, user: {
        "model": "m",
        "system": [{"type": "text", "text": system}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": user}]}],
    },
    "gemini": lambda system, user: {
        "systemInstruction": {"parts": [{"text": system}]},
        "contents": [{"role": "user", "parts": [{"text": user}]}],
    },
    "bedrock": lambda system, user: {
        "system": [{"text": system}],
        "messages": [{"role": "user", "content": [{"text": user}]}],
    },
    "generate": lambda system, user: {"model": "m", "system": system, "prompt": user},
}

MOVING: dict[str, Callable[[int], str]] = {
    "iso": lambda n: f"Now: 2026-11-26T12:00:{n:02}.{n:03}Z.",
    "offset": lambda n: f"Today is 2026-11-26 12:{n:02}:07 +0100.",
    "current time": lambda n: (
        f"Be brief.\nCurrent time: Thu, 26 Nov 2026 12:{n:02}:00 GMT\nAnswer in German."
    ),
    "hours and minutes": lambda n: f"It is 09:{n:02}.",
    "in the afternoon": lambda n: f"It is 9:{n:02} PM.",
    "at the start of a line": lambda n: f"Hello\n14:03:{n:02}: check",
    "compact": lambda n: f"Run of 20261126T1200{n:02}Z",
    "unix": lambda n: f"Timestamp: {1795694400 + n}.25",
    "attempt": lambda n: f"Fetch the page (attempt {n})",
    "attempts of": lambda n: f"Attempt {n}/20: fetch the page",
    "attempts in brackets": lambda n: f"[Attempt #{n} of 20] Fetch the page",
    "retry": lambda n: f"Fetch the page. Retry: {n}",
    "try": lambda n: f"Fetch the page (try {n})",
    "json": lambda n: json.dumps({"task": "fetch", "retry_count": n}),
}

CONTENT: dict[str, Callable[[int], str]] = {
    "documents": lambda n: f"{'word ' * n} Summarize this document.",
    "ids": lambda n: f"Classify the ticket T-{1000 + n}.",
    "bare ids": lambda n: f"Classify the ticket {1795694400 + n}.",
    "hex": lambda n: f"Look up {n:016x}.",
    "items": lambda n: f"Translate item {n} of 200.",
    "pages": lambda n: f"Translate page ({n}/200).",
    "orders": lambda n: f"Try {n} recipes.",
    "attempts by id": lambda n: f"Explain attempt {10_000 + n}.",
    "dates": lambda n: f"List the events of 2026-11-{n:02}.",
    "verses": lambda n: f"Explain John 3:{n:02}.",
    "addresses": lambda n: f"Whose is 00:11:22:33:44:{n:02}?",
}


ASKED = {"role": "user", "content": "a"}


def compare(content: dict[str, Any]) -> bytes:
    compared, _ = PROMPT.compare(Document(json.dumps(content).encode()))
    assert compared is not None
    return compared


@pytest.mark.parametrize(
    ("api", "moving"), [*(("chat", name) for name in MOVING), *((api, "iso") for api in BODIES)]
)
def test_clocks_and_attempts_are_left_out(api: str, moving: str) -> None:
    write, move = BODIES[api], MOVING[moving]

    assert len({compare(write(move(number), "Go")) for number in range(10, 30)}) == 1
    assert len({compare(write("Be brief.", move(number))) for number in range(10, 30)}) == 1
    assert compare(write(move(10), "Go")) != compare(write(move(10), "Stop"))


@pytest.mark.parametrize(
    ("api", "content"), [*(("chat", name) for name in CONTENT), *((api, "ids") for api in BODIES)]
)
def test_requests_of_one_template_differ(api: str, content: str) -> None:
    write, fill = BODIES[api], CONTENT[content]

    assert len({compare(write("Be brief.", fill(number))) for number in range(10, 30)}) == 20
    assert len({compare(write(fill(number), "Go")) for number in range(10, 30)}) == 20


@pytest.mark.parametrize(
    ("api", "write"),
    [
        ("chat", lambda n: {"metadata": {"request_id": f"r-{n}"}}),
        ("chat", lambda n: {"seed": n}),
        ("responses", lambda n: {"temperature": n / 100}),
        ("anthropic", lambda n: {"metadata": {"user_id": str(n)}, "temperature": n / 100}),
        (
            "gemini",
            lambda n: {
                "generationConfig": {"seed": n, "temperature": n / 100},
                "labels": {"run": str(n)},
            },
        ),
        (
            "bedrock",
            lambda n: {
                "requestMetadata": {"run": str(n)},
                "inferenceConfig": {"temperature": n / 100},
            },
        ),
        ("generate", lambda n: {"options": {"seed": n, "temperature": n / 100}}),
    ],
)
def test_sampling_options_and_metadata_are_left_out(
    api: str, write: Callable[[int], dict[str, Any]]
) -> None:
    prompt = BODIES[api]("Be brief.", "Go")

    assert len({compare(prompt | write(number)) for number in range(20)}) == 1


@pytest.mark.parametrize(
    "more",
    [{"model": "other"}, {"user": "ann"}, {"tools": []}, {"prompt": {"variables": {"id": "1"}}}],
)
def test_model_user_tools_and_variables_are_compared(more: dict[str, Any]) -> None:
    prompt = BODIES["chat"]("Be brief.", "Go")

    assert compare(prompt | more) != compare(prompt)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"messages": [ASKED, {"role": "assistant", "content": "b"}, ASKED]}, "has_history"),
        (
            {"messages": [ASKED, {"role": "tool", "tool_call_id": "1", "content": "c"}]},
            "has_history",
        ),
        (
            {"contents": [{"role": "model", "parts": [{"text": "b"}]}, {"parts": [{"text": "c"}]}]},
            "has_history",
        ),
        ({"input": "go on", "conversation": "c"}, "has_history"),
        ({"data": 1}, "no_messages"),
    ],
)
def test_uncounted_requests_have_a_reason(content: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotCounted, match=f"^{reason}$"):
        compare(content)


def test_start_of_an_answer_is_no_history() -> None:
    started = {
        "messages": [{"role": "user", "content": "As JSON"}, {"role": "assistant", "content": "{"}]
    }

    assert b"As JSON" in compare(started)


def test_only_first_clocks_are_left_out() -> None:
    few, many = ({"prompt": f"{'12:00 ' * count}14:03:"} for count in (10, 5_000))

    assert compare(few | {"prompt": few["prompt"] + "01"}) == compare(
        few | {"prompt": few["prompt"] + "02"}
    )
    assert compare(many | {"prompt": many["prompt"] + "01"}) != compare(
        many | {"prompt": many["prompt"] + "02"}
    )


def test_explain_marks_what_is_left_out() -> None:
    document = Document(json.dumps(BODIES["chat"]("It is 12:00.", "Go (attempt 2)")).encode())

    assert open_conversation(document).model == "m"
    (line,) = PROMPT.show(document)
    assert "It is #." in line
    assert "Go (#)" in line
