"""Every format gives the same loops with the same tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.conversations import INNOCENT, LOOPING, word
from tests.support.scanning import scan_file, scan_values
from tests.support.transcripts import (
    FAILING,
    FORMATS,
    AgentSession,
    write_atif,
    write_claude_code,
    write_codex,
    write_gemini_cli,
    write_lines,
    write_otlp,
    write_requests,
)
from tests.support.turn_writers import SHAPES, STYLES, Did, as_anthropic, as_text

TRUTH = [  # for each of LOOPING: rule, first call, call with a note, refused call, last call
    ("repeat", 1, 4, 8, 8),
    ("cycle", 1, 6, 14, 16),
    ("cycle", 1, 7, 22, 24),
    ("error", 1, 7, 0, 10),
]

every_format = pytest.mark.parametrize("write", FORMATS.values(), ids=FORMATS)


# As declared
def make_session(make: Callable[[Random], list[Did]], **more: Any) -> AgentSession:  # noqa: ANN401
    random = Random(5)
    return AgentSession(word(make(random), random), **more)


@pytest.mark.slow
@every_format
@pytest.mark.parametrize(
    ("make", "truth"),
    list(zip(LOOPING, TRUTH, strict=True)),
    ids=[rule[0] + str(rule[4]) for rule in TRUTH],
)
def test_loop_is_found_with_its_calls_and_tokens(
    write: Callable[[AgentSession], list[Any]],
    make: Callable[[Random], list[Did]],
    truth: tuple[Any, ...],
    tmp_path: Path,
) -> None:
    session = make_session(make)

    scanned = scan_values(tmp_path, write(session))

    assert scanned.loops == [truth]
    (run,) = scanned.runs
    (loop,) = run.loops
    assert run.spent[:2] == (session.calls, session.add_tokens(1, session.calls))
    assert loop.after_note[:2] == (
        session.calls - loop.noted + 1,
        session.add_tokens(loop.noted, session.calls),
    )
    stopped = (
        (session.calls - loop.stopped + 1, session.add_tokens(loop.stopped, session.calls))
        if loop.stopped
        else (0, 0)
    )
    assert (loop.after_stop[:2], run.first) == (stopped, round(session.begins.timestamp() * 1000))
    assert scanned.problems == {}


@every_format
@pytest.mark.parametrize("make", INNOCENT)
def test_progress_is_no_loop(
    write: Callable[[AgentSession], list[Any]], make: Callable[[Random], list[Did]], tmp_path: Path
) -> None:
    session = make_session(make)

    scanned = scan_values(tmp_path, write(session))

    assert [(run.spent.calls, run.loops) for run in scanned.runs] == [(session.calls, [])]


@every_format
def test_waiting_gets_at_most_a_note(
    write: Callable[[AgentSession], list[Any]], tmp_path: Path
) -> None:
    waiting = [Did((("status", {"job": 7}),), ("running",))] * 10

    scanned = scan_values(tmp_path, write(AgentSession(waiting)))

    (loop,) = scanned.runs[0].loops
    assert (loop.strong, loop.noted, loop.stopped) == (False, 4, 0)


@every_format
def test_work_around_a_loop_is_not_counted(
    write: Callable[[AgentSession], list[Any]], tmp_path: Path
) -> None:
    random = Random(3)
    before, after = (
        word([Did((("read", {"n": n}),), (f"line {n}",)) for n in range(k, k + 5)], random)
        for k in (0, 50)
    )

    scanned = scan_values(tmp_path, write(AgentSession([*before, *[FAILING] * 5, *after])))

    assert scanned.loops == [("repeat", 6, 9, 0, 11)]


def test_project_agent_and_session_are_read(tmp_path: Path) -> None:
    session = make_session(LOOPING[0], name="s7", project="/src/x", agent="porter", side="a1")

    found = {}
    for write in (write_claude_code, write_codex, lambda each: [write_atif(each)], write_otlp):
        (run,) = scan_values(tmp_path, write(session)).runs
        found[run.about.kind] = run.about[1:]

    assert found == {
        "Claude Code": ("s7/a1", "/src/x", "claude-code general-purpose", "s7"),
        "Codex": ("s7", "/src/x", "codex sub-agent", "a1"),
        "ATIF": ("s7", str(tmp_path), "porter", "s7"),
        "OTLP": ("s7", "/src/x", "porter", ""),
    }


# ---- What is special about each format

LOOPED = AgentSession([FAILING] * 8)
CLAUDE, CODEX, OTLP, ATIF = (
    write_claude_code(LOOPED),
    write_codex(LOOPED),
    write_otlp(LOOPED),
    write_atif(LOOPED),
)
CHAT, BODIES = (
    write_requests(LOOPED, "chat"),
    [line["request"] for line in write_requests(LOOPED, "chat")],
)
REPEAT = TRUTH[0]
SYNTHETIC = {
    "id": "e",
    "role": "assistant",
    "model": "<synthetic>",
    "content": [{"type": "text", "text": "API Error"}],
}
API_ERROR = {
    "type": "assistant",
    "sessionId": "s1",
    "isApiErrorMessage": True,
    "message": SYNTHETIC,
}
FOUR = write_claude_code(AgentSession([FAILING] * 4))
HALF = next(number for number, line in enumerate(FOUR) if "msg_s1_3" in json.dumps(line))
COMPACTION = {"type": "system", "subtype": "compact_boundary", "sessionId": "s1"}
FOUR_OF_CODEX = write_codex(AgentSession([FAILING] * 4))
THIRD = [
    number
    for number, line in enumerate(FOUR_OF_CODEX)
    if line["payload"].get("type") == "reasoning"
][2]
STEP = (
    "Thought: I look\nAction: search\nAction Input: lamps\nObservation: Error: the index is "
    "broken\n"
)
SPANS = [line["resourceSpans"][0]["scopeSpans"][0]["spans"][0] for line in OTLP]
OTHER_SPAN = {
    "traceId": "t",
    "name": "GET /",
    "attributes": [{"key": "http.method", "value": {"stringValue": "GET"}}],
}
NO_CONTENTS = {
    "traceId": "t",
    "attributes": [{"key": "gen_ai.usage.input_tokens", "value": {"intValue": "9"}}],
}


def interleave(*sessions: list[Any]) -> list[Any]:
    return [line for lines in zip(*sessions, strict=True) for line in lines]


def mix_parallel_calls() -> list[Any]:
    turn = Did(
        (("Read", {"n": 1}), ("Read", {"n": 2})),
        ("Error: no such file " * 20, "Error: no such file " * 20),
    )
    mixed: list[Any] = []
    for line in write_claude_code(AgentSession([turn] * 8)):
        content = line.get("message", {}).get("content")
        if (
            isinstance(content, list)
            and content[0]["type"] == "tool_result"
            and content[0]["tool_use_id"].endswith("_0")
        ):
            mixed.insert(-1, line)
        else:
            mixed.append(line)
    return mixed


def tell_tokens_twice() -> list[Any]:
    lines: list[Any] = []
    for line in CODEX:
        lines.append(line)
        if line["type"] == "event_msg":
            usage = line["payload"]["info"]["last_token_usage"]
            lines.insert(
                -1,
                {
                    "timestamp": line["timestamp"],
                    "type": "token_usage_record",
                    "payload": {"usage": usage},
                },
            )
    return lines


def write_side_chains() -> list[Any]:
    sessions = [write_claude_code(LOOPED._replace(name=name)) for name in ("a", "b")]
    lines = interleave(*[[line for line in session if "message" in line] for session in sessions])
    return [{**line, "isSidechain": True, "sessionId": "s"} for line in lines]


def keep_a_window() -> list[Any]:
    turns = word([FAILING] * 10, Random(4))
    bodies = [line["request"]["messages"] for line in write_requests(AgentSession(turns), "chat")]
    return [{"request": {"model": "m", "messages": [*body[:2], *body[2:][-8:]]}} for body in bodies]


def log_records() -> list[Any]:
    named = {"eventName": "gen_ai.client.inference.operation.details"}
    records = [
        {
            **named,
            "timeUnixNano": span["startTimeUnixNano"],
            "attributes": span["attributes"],
            "traceId": span["traceId"],
        }
        for span in SPANS
    ]
    resource = OTLP[0]["resourceSpans"][0]["resource"]
    return [
        {"resourceLogs": [{"resource": resource, "scopeLogs": [{"logRecords": [record]}]}]}
        for record in records
    ]


def wrap(key: str, body: object) -> list[Any]:
    return [{key: body, "ts": 1_780_000_000}, {"data": 1, "request": {key: body}}]


GEMINI, GEMINI_FOUR = write_gemini_cli(LOOPED), write_gemini_cli(AgentSession([FAILING] * 4))
GONE = "cat: x: No such file or directory, and nothing like it is anywhere near"


def with_results(result: object) -> list[Any]:
    lines = write_gemini_cli(LOOPED)
    for call in [call for line in lines for call in line.get("toolCalls", ())]:
        call |= {"result": result, "resultDisplay": GONE, "status": "error"}
    return lines


SPECIAL: dict[str, tuple[list[Any], list[tuple[Any, ...]], int, dict[str, int]]] = {
    # lines, loops, calls, and problems by name
    "formats in one file": (
        [*CLAUDE, *CODEX, ATIF, *write_requests(LOOPED, "gemini")],
        [REPEAT] * 4,
        32,
        {},
    ),
    "Claude Code: parallel calls are one turn": (mix_parallel_calls(), [REPEAT], 8, {}),
    "Claude Code: side chains are told apart": (write_side_chains(), [REPEAT] * 2, 16, {}),
    "Claude Code: no summary": (FOUR, [("repeat", 1, 4, 0, 4)], 4, {}),
    "Claude Code: a summary begins a new history": (
        [*FOUR[:HALF], COMPACTION, *FOUR[HALF:]],
        [],
        4,
        {},
    ),
    "Claude Code: errors of the API are no answers": (
        interleave(CLAUDE, [API_ERROR] * len(CLAUDE)),
        [REPEAT],
        8,
        {},
    ),
    "Claude Code: a printed stream": (
        [
            {"type": "system", "subtype": "init", "session_id": "s"},
            *(
                {
                    "type": line["type"],
                    "message": line["message"],
                    "session_id": "s",
                    "parent_tool_use_id": None,
                }
                for line in CLAUDE
                if "message" in line
            ),
        ],
        [REPEAT],
        8,
        {},
    ),
    "Claude Code: a file about a sub-agent": (
        [{"agentType": "general-purpose", "toolUseId": "t", "spawnDepth": 1}],
        [],
        0,
        {},
    ),
    "Claude Code: unknown lines": (
        [*CLAUDE, *[{"type": "hologram", "sessionId": "s1"}] * 3],
        [REPEAT],
        8,
        {"Claude Code: hologram": 3},
    ),
    "Codex: rollouts without payloads": (
        [
            {"id": "t", "timestamp": "2025-07-01T00:00:00Z", "instructions": None},
            {"record_type": "state"},
            *(line["payload"] for line in CODEX if line["type"] == "response_item"),
        ],
        [REPEAT],
        8,
        {},
    ),
    "Codex: tokens that are told twice": (tell_tokens_twice(), [REPEAT], 8, {}),
    "Codex: a summary begins a new history": (
        [
            *FOUR_OF_CODEX[:THIRD],
            {"type": "compacted", "payload": {"message": "..."}},
            *FOUR_OF_CODEX[THIRD:],
        ],
        [],
        4,
        {},
    ),
    "Codex: unknown lines": (
        [*CODEX, {"type": "dream", "payload": {"a": 1}}],
        [REPEAT],
        8,
        {"Codex: dream": 1},
    ),
    "ATIF: an indented document": ([json.dumps(ATIF, indent=2).encode()], [REPEAT], 8, {}),
    "ATIF: trajectories within another": (
        [
            {
                **write_atif(AgentSession([FAILING], name="outer")),
                "subagent_trajectories": [ATIF | {"session_id": "inner"}],
            }
        ],
        [REPEAT],
        9,
        {},
    ),
    "requests: an indented list": (
        [json.dumps(write_requests(LOOPED, "responses"), indent=1).encode()],
        [REPEAT],
        8,
        {},
    ),
    "requests: a retry is a call and no turn": (
        [line for line in write_requests(AgentSession([FAILING] * 3), "chat") for _ in range(3)],
        [],
        9,
        {},
    ),
    "requests: a client that keeps a window": (keep_a_window(), [("repeat", 1, 4, 8, 10)], 10, {}),
    "requests: a log that begins in the middle": (CHAT[5:], [REPEAT], 8, {}),
    "requests: a conversation that is whole": (
        [SHAPES["chat"]([*[FAILING] * 8, Did((), (), "", "I give up.")])],
        [("repeat", 1, 4, 8, 9)],
        9,
        {},
    ),
    "requests: a text that grows": (
        [
            {"model": "m", "prompt": f"Question: which lamps?\n{STEP * count}Thought:"}
            for count in range(9)
        ],
        [("repeat", 1, 2, 6, 7)],
        7,
        {"requests: no_history": 2},
    ),
    "requests: bodies alone": (BODIES, [REPEAT], 8, {}),
    **{
        f"requests: {'text' if as_text else 'object'} under {key}, {depth}": (
            [wrap(key, json.dumps(body) if as_text else body)[depth] for body in BODIES],
            [REPEAT],
            8,
            {},
        )
        for key, as_text, depth in (
            ("request", False, 1),
            ("body", True, 0),
            ("payload", False, 0),
            ("kwargs", True, 1),
        )
    },
    "requests: keys that lines of transcripts have": (
        [{"type": "request", "body": as_anthropic([FAILING] * count)} for count in range(9)],
        [("repeat", 1, 4, 8, 9)],
        9,
        {},
    ),
    "requests: a type of lines of transcripts": (
        [{"type": "system", **line} for line in CHAT],
        [REPEAT],
        8,
        {},
    ),
    "Gemini CLI: a rewound session begins anew": (
        [
            *GEMINI_FOUR,
            {"$rewindTo": "u0"},
            *write_gemini_cli(AgentSession([FAILING] * 4, name="s2"))[2:],
        ],
        [("repeat", 1, 4, 0, 4), ("repeat", 5, 8, 0, 8)],
        8,
        {},
    ),
    "Gemini CLI: messages of a new kind": (
        [
            *GEMINI[:1],
            {"id": "i", "type": "info", "content": "x"},
            {"id": "n", "type": "novelty"},
            {"id": "b", "type": "gemini", "toolCalls": 5},
            *GEMINI[1:],
        ],
        [REPEAT],
        8,
        {
            "Gemini CLI: novelty": 1,
            "Gemini CLI: a message: Expected `array | null`, got `int` - at `$.toolCalls`": 1,
        },
    ),
    **{
        f"Gemini CLI: {kind}": (with_results(result), [REPEAT], 8, {})
        for kind, result in {
            "a text": GONE,
            "parts without a response": [{"text": GONE}],
            "only what was shown": None,
        }.items()
    },
    "OTLP: log records": (log_records(), [REPEAT], 8, {}),
    "OTLP: spans in any order": (
        [
            {"resourceSpans": [{"scopeSpans": [{"spans": [*SPANS[::-1], OTHER_SPAN]}]}]},
            {"resourceMetrics": []},
        ],
        [REPEAT],
        8,
        {},
    ),
    "OTLP: spans without contents": (
        [{"resourceSpans": [{"scopeSpans": [{"spans": [NO_CONTENTS]}]}]}],
        [],
        0,
        {},
    ),
}


@pytest.mark.parametrize(("lines", "loops", "calls", "problems"), SPECIAL.values(), ids=SPECIAL)
def test_special_forms_are_read(
    lines: list[Any],
    loops: list[tuple[Any, ...]],
    calls: int,
    problems: dict[str, int],
    tmp_path: Path,
) -> None:
    scanned = scan_values(tmp_path, lines)

    assert (scanned.loops, sum(run.spent.calls for run in scanned.runs)) == (loops, calls)
    assert {
        told: count for found in scanned.problems.values() for told, count in found.names.items()
    } == problems


def test_interleaved_conversations_are_separated(tmp_path: Path) -> None:
    random = Random(2)
    logs = [
        write_requests(AgentSession(word([FAILING] * 8, random)), "anthropic") for _ in range(3)
    ]

    scanned = scan_values(tmp_path, interleave(*logs))

    assert [loop[0] for loop in scanned.loops] == ["repeat"] * 3
    assert sum(run.spent.calls for run in scanned.runs) == 24


@pytest.mark.parametrize(
    "name", ["Claude Code: parallel calls are one turn", "Codex: tokens that are told twice"]
)
def test_repeated_tokens_of_an_answer_count_once(name: str, tmp_path: Path) -> None:
    (run,) = scan_values(tmp_path, SPECIAL[name][0]).runs

    assert run.spent.tokens == LOOPED.add_tokens(1, 8)


def test_sub_agents_and_forks_keep_their_names(tmp_path: Path) -> None:
    own, parent = (
        write_codex(LOOPED._replace(name="own")),
        write_codex(AgentSession([], name="parent")),
    )
    nested = {
        **write_atif(AgentSession([FAILING], name="outer")),
        "subagent_trajectories": [write_atif(LOOPED)],
    }

    sides, forks, runs = [
        scan_values(tmp_path, lines).runs
        for lines in (write_side_chains(), [own[0], parent[0], *own[1:]], [nested])
    ]

    assert {run.about.agent for run in sides} == {"claude-code sub-agent"}
    assert [run.about.session for run in forks] == ["own"]
    assert [(run.about.session, len(run.loops)) for run in runs] == [("outer", 0), ("s1", 1)]


def test_gemini_cli_document_equals_its_lines(tmp_path: Path) -> None:
    head, *messages = GEMINI
    last = {message["id"]: message for message in messages if "$set" not in message}
    chats = tmp_path / "shop" / "chats"
    files = [
        write_lines(chats / "session-1.jsonl", GEMINI),
        write_lines(
            chats / "s1" / "agent-7.jsonl",
            [{**head, "sessionId": "agent-7", "kind": "subagent"}, *messages],
        ),
        write_lines(chats / "session-1.json", []),
    ]
    files[2].write_text(json.dumps({**head, "messages": list(last.values())}, indent=2))

    scanned = [scan_file(file) for file in files]

    assert [each.loops for each in scanned] == [[REPEAT]] * 3
    runs = [run for each in scanned for run in each.runs]
    assert [run.spent[:2] for run in runs] == [(8, LOOPED.add_tokens(1, 8))] * 3
    assert runs[0].calls[::4] == runs[2].calls[::4]
    assert [(run.about.session, run.about.root, run.about.agent) for run in runs[:2]] == [
        ("s1", "s1", "gemini-cli"),
        ("agent-7", "s1", "gemini-cli sub-agent"),
    ]
    assert {run.about.project for run in runs} == {str(tmp_path / "shop")}


def test_copied_steps_are_history_without_cost(tmp_path: Path) -> None:
    trajectory = write_atif(LOOPED)
    for step in trajectory["steps"][1:5]:
        step["is_copied_context"] = True

    (run,) = scan_values(tmp_path, [trajectory]).runs

    assert (run.spent.calls, run.loops[0].noted) == (4, 1)


def test_dollars_of_a_trajectory_are_used(tmp_path: Path) -> None:
    trajectory = write_atif(LOOPED._replace(model="nobody-knows"))
    for step in trajectory["steps"][1:]:
        step["metrics"]["cost_usd"] = 0.25

    (run,) = scan_values(tmp_path, [trajectory]).runs

    assert (run.spent.nanos, run.spent.unpriced, run.loops[0].after_stop.nanos) == (
        2_000_000_000,
        0,
        250_000_000,
    )


@pytest.mark.parametrize(
    "lines", [BODIES, CHAT[5:]], ids=["without responses", "from the middle on"]
)
def test_tokens_without_usage_are_estimated(lines: list[Any], tmp_path: Path) -> None:
    (run,) = scan_values(tmp_path, lines).runs

    assert run.estimated


@pytest.mark.parametrize("style", STYLES)
def test_loop_of_actions_in_text_is_found(style: str, tmp_path: Path) -> None:
    turns = word([Did((("run", {"n": 1}),), ("Error: no such thing. " * 15,))] * 8, Random(6))

    loops = scan_values(
        tmp_path, [as_text(turns[:count], STYLES[style]) for count in range(8)]
    ).loops

    assert [loop[1:4] for loop in loops] == [(1, 4, 8)]


def test_values_without_conversation_are_reported(tmp_path: Path) -> None:
    scanned = scan_values(
        tmp_path, [{"model": "m", "messages": [1, 2]}, {"model": "m", "messages": "x"}, {"a": 1}]
    )

    assert (scanned.runs, sum(found.count for found in scanned.problems.values())) == ([], 3)
