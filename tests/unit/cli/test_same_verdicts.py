"""Service, `explain`, `scan` and `replay` give equal verdicts on a body.

The policy is the detector `turns` of the preset, as in `scan`, without a session: a file of
requests does not show what a server remembers.
"""

import json
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.agreement import AGENTS, ask_preset
from tests.support.command import Run, written
from tests.support.service import make_service, metadata_of
from tests.support.turn_writers import PATHS, SHAPES, Did

TURNS = {
    "id": "agents",
    "spec": {
        **{key: value for key, value in AGENTS["spec"].items() if key != "session"},
        "loop_detection": AGENTS["spec"]["loop_detection"][:1],
    },
}
LOOP, NONE = "loop", "no loop"
NO_MESSAGES, NO_HISTORY, NOT_JSON, LIMIT = "no_messages", "no_history", "not_json", "inspect_limit"

Case = tuple[str, object, str]  # path, body, verdict


def loop(more: str = "") -> list[Did]:
    return [
        Did((("run", {"cmd": "ls x"}),), (f"Error: no such file or directory.{more}",), number=n)
        for n in range(1, 9)
    ]


def work(more: str = "") -> list[Did]:
    return [
        Did((("run", {"cmd": f"ls {n * 'x'}"}),), (f"a file of {n * 'lines '}{more}",), number=n)
        for n in range(1, 9)
    ]


def user(text: str = "go on") -> dict[str, Any]:
    return {"role": "user", "content": text}


def spoil(body: object, word: str, *, last: bool = False) -> bytes:
    data = json.dumps(body).encode()
    place = data.rfind(word.encode()) if last else data.find(word.encode())
    return data[:place] + b"\xff" + data[place:]


def list_cases_of(api: str) -> Mapping[str, tuple[object, str]]:
    """Cases that each API has; malformed messages are the same for all, so one API has these."""
    write, key = SHAPES[api], {"responses": "input", "gemini": "contents"}.get(api, "messages")
    looping = write(loop())
    words: dict[str, object] = {"null": None, "[]": [], "[[]]": [[]]}
    words |= {"1": 1, "{}": {}, "[1]": [1], "[null]": [None]} if api == "chat" else {}
    huge = write(work()[:1])
    huge[key][-1] = json.loads(json.dumps(huge[key][-1]).replace("a file", "x" * 1_200_000))
    return {
        "a loop": (looping, LOOP),
        "a loop, then other work": (write(loop() + work()[1:]), NONE),
        "work": (write(work()), NONE),
        "work, then a loop": (write(work() + loop()), LOOP),
        "one turn": (write(loop()[:1]), NONE),
        "no turn": (write([]), NONE),
        "a loop in 1.2 MB": (write(loop("x" * 150_000)), LOOP),
        "one message of 1.2 MB": (huge, LIMIT),
        **(
            {
                f"messages are {name}": (looping | {key: value}, NO_MESSAGES)
                for name, value in words.items()
            }
        ),
        "no messages": (
            {name: value for name, value in looping.items() if name != key},
            NO_MESSAGES,
        ),
    }


def list_items(*items: Mapping[str, object], **more: object) -> dict[str, Any]:
    return {
        "model": "m",
        "input": [user(), *[{**item, "id": f"i{n}"} for n in range(8) for item in items]],
        **more,
    }


ERROR = "Error: no such file or directory, and there is no other"
OUTPUT = {
    "type": "shell_call_output",
    "call_id": "c",
    "output": [{"stdout": "", "stderr": ERROR, "outcome": {"type": "exit"}}],
}
CODE = {
    "type": "code_interpreter_call",
    "code": "f()",
    "outputs": [{"type": "logs", "logs": ERROR}],
}
MCP = {"type": "mcp_call", "name": "f", "arguments": "{}", "output": ERROR}
SEARCH = {"type": "web_search_call", "action": {"type": "search", "query": "q"}}
REFERENCE = {"type": "item_reference"}
RESPONSES, CHAT, COMPLETIONS = PATHS["responses"], PATHS["chat"], "/v1/completions"
STUCK = SHAPES["responses"](loop())
EXPORTS: dict[str, list[dict[str, Any]]] = {
    "Slack": [{"type": "message", "user": "U1", "text": "again"}],
    "LangChain": [
        {"type": "human", "data": {"content": "go"}},
        {"type": "ai", "data": {"content": "again"}},
    ],
    "OpenCode": [{"info": {"role": "assistant"}, "parts": [{"type": "text", "text": "again"}]}],
    "Gemini CLI": [{"type": "user", "content": "go"}, {"type": "gemini", "content": "again"}],
}
CASES: dict[str, Case] = {
    **{
        f"{api}: {name}": (PATHS[api], *case)
        for api in SHAPES
        for name, case in list_cases_of(api).items()
    },
    "code that is run with the same error": (RESPONSES, list_items(CODE, user()), LOOP),
    "a server's tool with the same error": (RESPONSES, list_items(MCP, user()), LOOP),
    "the same search": (RESPONSES, list_items(SEARCH, user()), LOOP),
    "code with other results": (
        RESPONSES,
        {
            "input": [
                item
                for n in range(8)
                for item in ({**CODE, "outputs": [{"type": "logs", "logs": f"{n * 'x'}"}]}, user())
            ]
        },
        NONE,
    ),
    "outputs of referenced calls": (RESPONSES, list_items(REFERENCE, OUTPUT), LOOP),
    "answers by reference": (RESPONSES, list_items(REFERENCE, user()), NO_HISTORY),
    "items of an unknown type": (
        RESPONSES,
        {"input": [{"type": "made_up", "value": "x"}] * 8},
        NO_MESSAGES,
    ),
    "unknown items beside a loop": (
        RESPONSES,
        STUCK | {"input": [{"type": "made_up"}, *STUCK["input"]]},
        LOOP,
    ),
    "input is a text": (RESPONSES, {"model": "m", "input": "go on"}, NONE),
    "input is an empty text": (RESPONSES, {"model": "m", "input": ""}, NO_MESSAGES),
    "a text behind a response": (
        RESPONSES,
        {"model": "m", "input": "go on", "previous_response_id": "r"},
        NO_HISTORY,
    ),
    "outputs behind a response": (
        RESPONSES,
        {"input": [OUTPUT], "previous_response_id": "r"},
        NO_HISTORY,
    ),
    "a loop behind a response": (RESPONSES, STUCK | {"previous_response_id": "r"}, NO_HISTORY),
    "a loop behind an interaction": (
        RESPONSES,
        STUCK | {"previous_interaction_id": "r"},
        NO_HISTORY,
    ),
    "work in a server's conversation": (
        RESPONSES,
        SHAPES["responses"](work()) | {"conversation": {"id": "c"}},
        NO_HISTORY,
    ),
    "a thread": (
        PATHS["anthropic"],
        {"messages": [user()], "thread": {"previous_message_id": "m"}},
        NO_HISTORY,
    ),
    "a plain prompt": (COMPLETIONS, {"model": "m", "prompt": "say"}, NO_HISTORY),
    "several prompts": (COMPLETIONS, {"model": "m", "prompt": ["say", "write"]}, NO_HISTORY),
    "a prompt of tokens": (COMPLETIONS, {"model": "m", "prompt": [1, 2, 3]}, NO_HISTORY),
    "wrong types in calls": (
        CHAT,
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": 5}}]},
                user(),
            ]
            * 8
        },
        LOOP,
    ),
    "messages without a role": (CHAT, {"messages": [{}] * 8}, NO_MESSAGES),
    **{
        f"an export of {name}": (CHAT, {"messages": messages * 8}, NO_MESSAGES)
        for name, messages in EXPORTS.items()
    },
    "an empty object": (CHAT, {}, NO_MESSAGES),
    "a list": (CHAT, [], NO_MESSAGES),
    "no body": (CHAT, b"", NO_MESSAGES),
    "words": (CHAT, b"hello", NOT_JSON),
    "work in 1.2 MB": (CHAT, SHAPES["chat"](work("x" * 150_000)), NONE),
    "too many messages": (CHAT, {"messages": [{}] * 20_000}, LIMIT),
    "a bad byte in the oldest result": (RESPONSES, spoil(STUCK, "no such"), NOT_JSON),
    "a bad byte in the newest result": (RESPONSES, spoil(STUCK, "no such", last=True), NOT_JSON),
    "a bad byte in an argument": (RESPONSES, spoil(STUCK, "ls x", last=True), NOT_JSON),
    "cut off": (RESPONSES, json.dumps(STUCK)[:-9].encode(), NOT_JSON),
}


# The problems that `scan` reports, in the words of the others.
OTHER_FILES = {"unknown": NO_MESSAGES, "not_json": NOT_JSON, "foreign": NOT_JSON}


def ask_gateway(data: bytes, path: str) -> str:
    service = make_service(TURNS)
    action = metadata_of(ask_preset(service, data, path)).get("action", "allow")
    reasons = [
        found.labels["reason"]
        for metric in service.metrics.uncounted.collect()
        for found in metric.samples
        if found.name.endswith("_total") and found.value
    ]
    return reasons[0] if reasons else NONE if action == "allow" else LOOP


def read_explained(printed: str) -> str:
    told = dict(line.split(None, 1) for line in printed.splitlines() if line.strip())
    return told.get("uncounted") or (NONE if told["decision"].startswith("allow") else LOOP)


def read_replayed(printed: str) -> str:
    (told,) = json.loads(printed)["policies"]
    return next(iter(told["uncounted"]), LOOP if told["loops"] else NONE)


def read_scanned(printed: str, errors: str) -> str:
    report = json.loads(printed)
    for kind, found in report["problems"].items():
        assert f"{found['what']}" in errors
        return OTHER_FILES.get(kind) or next(iter(found["names"])).removeprefix("requests: ")
    if not report["conversations"]:
        assert "no file contains a conversation" in errors
        return NO_MESSAGES
    # Its newest call
    return LOOP if any(found["ends"] == found["calls"] for found in report["found"]) else NONE


@pytest.mark.parametrize("name", CASES)
def test_all_readers_agree(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, content, verdict = CASES[name]
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    file, policy = (
        written(tmp_path / "requests.jsonl", data),
        written(tmp_path / "policy.json", TURNS),
    )
    record = {
        "record": 1,
        "time": 1_790_000_000,
        "method": "POST",
        "path": path,
        "body_base64": b64encode(data).decode(),
    }
    log = written(tmp_path / "log", record | {"headers": {"authorization": "Bearer sk-one"}})

    explained = Run(
        capsys,
        "explain",
        "--policy",
        policy,
        "-X",
        "POST",
        "-H",
        "authorization: Bearer sk-one",
        "-d",
        f"@{file}",
        f"http://host{path}",
    )
    replayed = Run(capsys, "replay", "--policy", policy, "--json", log)
    scanned = Run(capsys, "scan", "--json", "--jobs", "1", file)

    said = [
        read_explained(explained.out),
        read_replayed(replayed.out),
        read_scanned(scanned.out, scanned.err),
    ]
    assert [ask_gateway(data, path), *said] == [verdict] * 4
