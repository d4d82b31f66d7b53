"""Chats and spans in unknown formats are reported, never taken for free of loops."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import Run
from tests.support.scanning import scan_values
from tests.support.transcripts import AgentSession, write_otlp, write_requests
from tests.support.turn_writers import Did

TURNS = range(20)
GONE = "cat: x: No such file or directory"
ARGUMENTS = {"command": "cat x"}
FAILING = Did((("check", {"part": 1}),), ("Error: part 1 is broken. " + "It is. " * 30,))
SESSION = AgentSession([FAILING] * 8)


def make_chat(first: dict[str, Any], *turn: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    return {"messages": [first, *[write(number) for number in TURNS for write in turn]]}


def constructed(name: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401  # JSON
    return {
        "lc": 1,
        "type": "constructor",
        "id": ["langchain", "schema", "messages", name],
        "kwargs": fields,
    }


CHATS: dict[str, tuple[Any, str]] = {
    "opencode": (
        make_chat(
            {"info": {"role": "user"}, "parts": [{"type": "text", "text": "Fix it."}]},
            lambda at: {
                "info": {"role": "assistant", "id": f"m{at}"},
                "parts": [
                    {"type": "tool", "tool": "bash", "state": {"input": ARGUMENTS, "output": GONE}}
                ],
            },
        ),
        "messages with info, parts",
    ),
    "langchain": (
        make_chat(
            {"type": "human", "content": "Fix it."},
            lambda at: {
                "type": "ai",
                "content": "",
                "tool_calls": [{"name": "bash", "args": ARGUMENTS, "id": f"c{at}"}],
            },
            lambda at: {"type": "tool", "content": GONE, "tool_call_id": f"c{at}"},
        ),
        "messages with content, type",
    ),
    "langchain, one message with a role": (
        make_chat(
            {"role": "user", "content": "Fix it."},
            lambda at: {
                "type": "ai",
                "content": "",
                "tool_calls": [{"name": "bash", "args": ARGUMENTS, "id": f"c{at}"}],
            },
            lambda at: {"type": "tool", "content": GONE, "tool_call_id": f"c{at}"},
        ),
        "messages without a role",
    ),
    "langchain, serialized": (
        make_chat(
            constructed("HumanMessage", content="Fix it."),
            lambda at: constructed(
                "AIMessage",
                content="",
                tool_calls=[{"name": "bash", "args": ARGUMENTS, "id": f"c{at}"}],
            ),
            lambda at: constructed("ToolMessage", content=GONE, tool_call_id=f"c{at}"),
        ),
        "messages with id, kwargs, lc, type",
    ),
    "ai sdk": (
        make_chat(
            {"role": "user", "content": "Fix it."},
            lambda at: {
                "role": "assistant",
                "content": [{"type": "tool-call", "toolCallId": f"c{at}", "input": ARGUMENTS}],
            },
            lambda at: {
                "role": "tool",
                "content": [
                    {"type": "tool-result", "toolCallId": f"c{at}", "output": {"value": GONE}}
                ],
            },
        ),
        "calls of unknown kinds: tool-call",
    ),
    "ai sdk, for a page": (
        make_chat(
            {"role": "user", "content": "Fix it.", "parts": [{"type": "text", "text": "Fix it."}]},
            lambda at: {
                "role": "assistant",
                "content": "",
                "parts": [{"type": "tool-bash", "toolCallId": f"c{at}", "output": GONE}],
            },
        ),
        "answers with their content under parts",
    ),
    "ai sdk 4, for a page": (
        make_chat(
            {"role": "user", "content": "Fix it."},
            lambda at: {
                "role": "assistant",
                "content": "",
                "toolInvocations": [{"toolCallId": f"c{at}", "result": GONE}],
            },
        ),
        "answers with their content under toolInvocations",
    ),
    "slack": (
        make_chat(
            {"type": "message", "user": "U1", "text": "ping", "ts": "1"},
            lambda at: {"type": "message", "user": "U2", "text": "ping", "ts": f"2.{at}"},
        ),
        "messages with text, ts, type, user",
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}] * 9},
        "conversations",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("chat", "words"), CHATS.values(), ids=CHATS)
def test_chat_in_unknown_format_is_reported(
    chat: object, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chat.json").write_text(json.dumps(chat))
    page = tmp_path / "page.html"

    run = Run(capsys, "scan", str(tmp_path / "chat.json"), "--html", str(page))

    assert (run.code, words in run.err, "looped" in run.out) == (1, True, False)
    assert run.err.splitlines()[-1].endswith("no conversation in it was understood")
    assert (words in page.read_text(), "0 of 0" in page.read_text()) == (True, False)


def test_unknown_values_are_reported_beside_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        *write_requests(AgentSession([FAILING]), "chat"),
        CHATS["slack"][0],
        CHATS["sharegpt"][0],
    ]
    (tmp_path / "f.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    assert Run(capsys, "scan", str(tmp_path)).out.splitlines()[:3] == [
        "0 of 1 conversation looped.",
        "1 call cannot be judged: requests: no_messages.",
        "1 value was not understood: an object with conversations.",
    ]


def test_extra_keys_of_messages_are_ignored(tmp_path: Path) -> None:
    lines = write_requests(SESSION, "chat")
    for line in lines:
        for message in line["request"]["messages"]:
            message["provider_parts"] = [{"type": "tool-call"}]
            message["reasoning_details"] = [{"type": "reasoning.text", "text": "Hm."}]

    assert [loop[0] for loop in scan_values(tmp_path, lines).loops] == ["repeat"]


def make_export(*spans: dict[str, Any]) -> dict[str, Any]:
    made = [
        {
            "traceId": "t",
            "name": "x",
            "attributes": [
                {"key": key, "value": {"stringValue": each}} for key, each in span.items()
            ],
        }
        for span in spans
    ]
    return {"resourceSpans": [{"scopeSpans": [{"spans": made}]}]}


HISTORY = json.dumps([{"role": "user", "content": "Fix it."}])


UNKNOWN_PART = {"role": "assistant", "parts": [{"type": "tool-call", "toolName": "bash"}]}
UNKNOWN_CALL = {"role": "assistant", "tool_calls": [{"name": "bash", "args": {}}]}
FILES = {
    "role": "user",
    "parts": [
        {"type": "text", "content": "See this."},
        {"type": "blob", "content": "aGk="},
        {"type": "uri", "uri": "x"},
    ],
}
AGENT = {"gen_ai.operation.name": "invoke_agent", "pydantic_ai.all_messages": HISTORY}


def given(message: dict[str, Any]) -> dict[str, Any]:
    return {
        "gen_ai.request.model": "m",
        "gen_ai.input.messages": json.dumps([{"role": "user", "content": "Fix it."}, message]),
    }


@pytest.mark.parametrize(
    ("span", "words"),
    [
        (
            {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "events": HISTORY},
            "messages in events",
        ),
        ({"agent_name": "a", "all_messages_events": HISTORY}, "all_messages_events alone"),
        (
            {"gen_ai.operation.name": "invoke_agent", "pydantic_ai.all_messages": HISTORY},
            "pydantic_ai.all_messages alone",
        ),
        (
            {
                "gen_ai.system": "gcp.vertex.agent",
                "gcp.vertex.agent.llm_request": '{"contents": []}',
            },
            "gcp.vertex.agent.llm_request",
        ),
        ({"ai.model.id": "m", "ai.prompt.messages": HISTORY}, "messages in ai.prompt.messages"),
        ({"ai.operationId": "ai.generateText", "ai.prompt": '{"messages": []}'}, "ai.prompt alone"),
        (
            {"langsmith.span.kind": "llm", "gen_ai.prompt": '{"messages": []}'},
            "gen_ai.prompt alone",
        ),
        (
            {"openinference.span.kind": "LLM", "input.value": '{"messages": []}'},
            "input.value alone",
        ),
        (given(UNKNOWN_PART), "OTLP: a part of an unknown kind: tool-call"),
        (given(UNKNOWN_CALL), "OTLP: tool calls in another form"),
    ],
)
def test_unknown_spans_are_reported_by_attribute(
    span: dict[str, Any], words: str, tmp_path: Path
) -> None:
    scanned = scan_values(tmp_path, [make_export(span), make_export({"http.method": "POST"})])

    (name,) = scanned.problems["unread"].names
    assert (scanned.runs, words in name) == ([], True)


@pytest.mark.parametrize(
    ("values", "loops"),
    [
        ([make_export(AGENT), *write_otlp(SESSION), make_export(AGENT)], ["repeat"]),
        ([make_export(given(FILES))], []),
    ],
    ids=["agents beside their calls", "files, which the conventions know"],
)
def test_spans_of_agents_and_files_are_no_problem(
    values: list[Any], loops: list[str], tmp_path: Path
) -> None:
    scanned = scan_values(tmp_path, values)

    assert ([loop[0] for loop in scanned.loops], len(scanned.runs), scanned.problems) == (
        loops,
        1,
        {},
    )
