"""Every format is read into the same calls: what loops in one loops in all, with the same tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.conversations import INNOCENT, LOOPING, word
from tests.support.scanning import scan_values
from tests.support.transcripts import (
    FORMATS,
    AgentSession,
    write_atif,
    write_claude_code,
    write_codex,
    write_otlp,
    write_requests,
)
from tests.support.turn_writers import SHAPES, STYLES, Did, as_anthropic, as_text

TRUTH = [
    ("repeat", 1, 4, 8, 8),
    ("cycle", 1, 6, 14, 16),
    ("cycle", 1, 7, 22, 24),
    ("error", 1, 7, 0, 10),
]
"""Rule, first call, call with a note, refused call and last call of each of LOOPING."""

every_format = pytest.mark.parametrize("write", FORMATS.values(), ids=FORMATS)
FAILING = Did((("check", {"part": 1}),), ("Error: part 1 is broken. " + "It is. " * 30,))


def make_session(make: Callable[[Random], list[Did]], **more: Any) -> AgentSession:  # noqa: ANN401  # as declared
    """A session of an agent that does this."""
    random = Random(5)
    return AgentSession(word(make(random), random), **more)


@pytest.mark.slow
@every_format
@pytest.mark.parametrize(
    ("make", "truth"), list(zip(LOOPING, TRUTH, strict=True)), ids=[rule[0] + str(rule[4]) for rule in TRUTH]
)
def test_a_loop_is_found_where_it_begins(
    write: Callable[[AgentSession], list[Any]], make: Callable[[Random], list[Did]], truth: tuple[Any, ...], tmp_path: Path
) -> None:
    """Rule, first call, note and stop are known, and so are the tokens of all calls and of those after note and stop."""
    session = make_session(make)

    scanned = scan_values(tmp_path, write(session))

    assert scanned.loops == [truth]
    (run,) = scanned.runs
    (loop,) = run.loops
    assert run.spent[:2] == (session.calls, session.add_tokens(1, session.calls))
    assert loop.after_note[:2] == (session.calls - loop.noted + 1, session.add_tokens(loop.noted, session.calls))
    stopped = (session.calls - loop.stopped + 1, session.add_tokens(loop.stopped, session.calls)) if loop.stopped else (0, 0)
    assert loop.after_stop[:2] == stopped
    assert run.first == round(session.begins.timestamp() * 1000)
    assert scanned.problems == {}


@every_format
@pytest.mark.parametrize("make", INNOCENT)
def test_work_is_no_loop(
    write: Callable[[AgentSession], list[Any]], make: Callable[[Random], list[Did]], tmp_path: Path
) -> None:
    """An agent that makes progress, polls with new results, or repairs, is left alone."""
    session = make_session(make)

    scanned = scan_values(tmp_path, write(session))

    assert [(run.spent.calls, run.loops) for run in scanned.runs] == [(session.calls, [])]


@every_format
def test_waiting_gets_a_note_at_most(write: Callable[[AgentSession], list[Any]], tmp_path: Path) -> None:
    """Short results without an error are no reason to stop, and are told apart."""
    waiting = [Did((("status", {"job": 7}),), ("running",))] * 10

    scanned = scan_values(tmp_path, write(AgentSession(waiting)))

    (loop,) = scanned.runs[0].loops
    assert (loop.strong, loop.noted, loop.stopped) == (False, 4, 0)


@every_format
def test_a_loop_that_is_left_ends(write: Callable[[AgentSession], list[Any]], tmp_path: Path) -> None:
    """What the agent does after a loop, and before it, is not counted as part of it."""
    random = Random(3)
    before, after = (word([Did((("read", {"n": n}),), (f"line {n}",)) for n in range(k, k + 5)], random) for k in (0, 50))

    scanned = scan_values(tmp_path, write(AgentSession([*before, *[FAILING] * 5, *after])))

    assert scanned.loops == [("repeat", 6, 9, 0, 11)]


def test_several_formats_in_one_file(tmp_path: Path) -> None:
    """The format is that of the value, not of the file."""
    session = make_session(LOOPING[0])
    lines = [*write_claude_code(session), *write_codex(session), write_atif(session), *write_requests(session, "gemini")]

    scanned = scan_values(tmp_path, lines)

    assert sorted(run.about.kind for run in scanned.runs) == ["ATIF", "Claude Code", "Codex", "requests"]
    assert scanned.loops == [TRUTH[0]] * 4


def test_whose_conversation_it_was(tmp_path: Path) -> None:
    """Project, agent and session come from the transcript, or else from the file."""
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


class TestClaudeCode:
    """What is special about its transcripts."""

    def test_parallel_calls_are_one_turn(self, tmp_path: Path) -> None:
        """Each call has a line, with its result behind it; all have the message id of one answer, whose tokens count once."""
        turn = Did((("Read", {"n": 1}), ("Read", {"n": 2})), ("Error: no such file " * 20, "Error: no such file " * 20))
        lines = write_claude_code(AgentSession([turn] * 8))
        mixed: list[Any] = []
        for line in lines:
            content = line.get("message", {}).get("content")
            if isinstance(content, list) and content[0]["type"] == "tool_result" and content[0]["tool_use_id"].endswith("_0"):
                mixed.insert(-1, line)  # before the second call
            else:
                mixed.append(line)

        scanned = scan_values(tmp_path, mixed)

        assert scanned.loops == [TRUTH[0]]
        assert scanned.runs[0].spent[:2] == (8, AgentSession([turn] * 8).add_tokens(1, 8))

    def test_side_chains_in_the_session_are_told_apart(self, tmp_path: Path) -> None:
        """Older versions write sub-agents into the session's file, interleaved, and without a name."""
        sessions = [AgentSession([FAILING] * 8, name=name) for name in ("a", "b")]
        files = [[line for line in write_claude_code(session) if "message" in line] for session in sessions]
        lines = [{**line, "isSidechain": True, "sessionId": "s"} for pair in zip(*files, strict=True) for line in pair]

        scanned = scan_values(tmp_path, lines)

        assert scanned.loops == [TRUTH[0]] * 2
        assert {run.about.agent for run in scanned.runs} == {"claude-code sub-agent"}

    def test_a_summary_begins_a_new_history(self, tmp_path: Path) -> None:
        """Turns from before a compaction are not in requests after it."""
        lines = write_claude_code(AgentSession([FAILING] * 4))
        half = next(number for number, line in enumerate(lines) if "msg_s1_3" in json.dumps(line))
        compaction = {"type": "system", "subtype": "compact_boundary", "sessionId": "s1"}

        assert scan_values(tmp_path, lines).loops == [("repeat", 1, 4, 0, 4)]
        assert scan_values(tmp_path, [*lines[:half], compaction, *lines[half:]]).loops == []

    def test_errors_of_the_api_are_no_answers(self, tmp_path: Path) -> None:
        """What the program writes in place of an answer is neither a call nor a turn."""
        lines = write_claude_code(AgentSession([FAILING] * 8))
        error = {
            "type": "assistant",
            "sessionId": "s1",
            "isApiErrorMessage": True,
            "message": {
                "id": "e",
                "role": "assistant",
                "model": "<synthetic>",
                "content": [{"type": "text", "text": "API Error"}],
            },
        }

        scanned = scan_values(tmp_path, [line for each in lines for line in (each, error)])

        assert scanned.loops == [TRUTH[0]]
        assert scanned.runs[0].spent.calls == 8

    def test_printed_streams_are_read(self, tmp_path: Path) -> None:
        """`--output-format stream-json` names its keys otherwise, and has no times."""
        lines = [
            {"type": line["type"], "message": line["message"], "session_id": "s", "parent_tool_use_id": None}
            for line in write_claude_code(AgentSession([FAILING] * 8))
            if "message" in line
        ]

        assert scan_values(tmp_path, [{"type": "system", "subtype": "init", "session_id": "s"}, *lines]).loops == [TRUTH[0]]

    def test_files_about_sub_agents(self, tmp_path: Path) -> None:
        """Beside the transcript of each stands a file that is no transcript."""
        scanned = scan_values(tmp_path, [{"agentType": "general-purpose", "toolUseId": "t", "spawnDepth": 1}])

        assert (scanned.runs, scanned.problems) == ([], {})

    def test_unknown_lines_are_counted_and_named(self, tmp_path: Path) -> None:
        """A newer version may write other lines: these are told, and the others read."""
        lines = [*write_claude_code(AgentSession([FAILING] * 8)), *[{"type": "hologram", "sessionId": "s1"}] * 3]

        scanned = scan_values(tmp_path, lines)

        assert scanned.loops == [TRUTH[0]]
        assert scanned.problems["unknown_kind"].names == {"Claude Code: hologram": 3}


class TestCodex:
    """What is special about its rollouts."""

    def test_rollouts_without_payloads(self, tmp_path: Path) -> None:
        """In 2025, items stood in lines as they are."""
        lines = [line["payload"] for line in write_codex(AgentSession([FAILING] * 8)) if line["type"] == "response_item"]
        head = {"id": "t", "timestamp": "2025-07-01T00:00:00Z", "instructions": None}

        scanned = scan_values(tmp_path, [head, {"record_type": "state"}, *lines])

        assert scanned.loops == [TRUTH[0]]

    def test_tokens_are_told_twice_and_count_once(self, tmp_path: Path) -> None:
        """Newer versions write a record of usage for each answer before its results, and the count behind them."""
        session = AgentSession([FAILING] * 8)
        lines = []
        for line in write_codex(session):
            lines.append(line)
            if line["type"] == "event_msg":
                usage = line["payload"]["info"]["last_token_usage"]
                lines.insert(-1, {"timestamp": line["timestamp"], "type": "token_usage_record", "payload": {"usage": usage}})

        assert scan_values(tmp_path, lines).runs[0].spent.tokens == session.add_tokens(1, 8)

    def test_a_fork_keeps_its_own_name(self, tmp_path: Path) -> None:
        """The file of a fork has the head of its parent behind its own."""
        own, parent = write_codex(AgentSession([FAILING] * 8, name="own")), write_codex(AgentSession([], name="parent"))

        (run,) = scan_values(tmp_path, [own[0], parent[0], *own[1:]]).runs

        assert run.about.session == "own"

    def test_a_summary_begins_a_new_history(self, tmp_path: Path) -> None:
        """Turns from before a compaction are not in requests after it."""
        lines = write_codex(AgentSession([FAILING] * 4))
        calls = [number for number, line in enumerate(lines) if line["payload"].get("type") == "reasoning"]

        compacted = [*lines[: calls[2]], {"type": "compacted", "payload": {"message": "..."}}, *lines[calls[2] :]]

        assert scan_values(tmp_path, compacted).loops == []

    def test_unknown_lines_are_counted_and_named(self, tmp_path: Path) -> None:
        """As above."""
        lines = [*write_codex(AgentSession([FAILING] * 8)), {"type": "dream", "payload": {"a": 1}}]

        assert scan_values(tmp_path, lines).problems["unknown_kind"].names == {"Codex: dream": 1}


class TestAtif:
    """What is special about trajectories."""

    def test_a_document_of_many_lines(self, tmp_path: Path) -> None:
        """Harbor writes one trajectory per file, indented."""
        text = json.dumps(write_atif(AgentSession([FAILING] * 8)), indent=2)

        assert scan_values(tmp_path, [text.encode()]).loops == [TRUTH[0]]

    def test_nested_trajectories(self, tmp_path: Path) -> None:
        """Sub-agents may stand in the document of the agent that started them."""
        inner = write_atif(AgentSession([FAILING] * 8, name="inner"))
        outer = {**write_atif(AgentSession([FAILING], name="outer")), "subagent_trajectories": [inner]}

        scanned = scan_values(tmp_path, [outer])

        assert [(run.about.session, len(run.loops)) for run in scanned.runs] == [("outer", 0), ("inner", 1)]

    def test_copied_steps_are_history_and_cost_nothing(self, tmp_path: Path) -> None:
        """After a summary, a trajectory repeats steps of the one before."""
        trajectory = write_atif(AgentSession([FAILING] * 8))
        for step in trajectory["steps"][1:5]:
            step["is_copied_context"] = True

        (run,) = scan_values(tmp_path, [trajectory]).runs

        assert run.spent.calls == 4
        assert run.loops[0].noted == 1

    def test_its_own_dollars_count(self, tmp_path: Path) -> None:
        """A trajectory may say what a step cost."""
        trajectory = write_atif(AgentSession([FAILING] * 8, model="nobody-knows"))
        for step in trajectory["steps"][1:]:
            step["metrics"]["cost_usd"] = 0.25

        (run,) = scan_values(tmp_path, [trajectory]).runs

        assert (run.spent.nanos, run.spent.unpriced) == (2_000_000_000, 0)
        assert run.loops[0].after_stop.nanos == 250_000_000


class TestRequests:
    """What is special about logged requests."""

    @pytest.mark.parametrize("key", ["request", "body", "payload", "kwargs"])
    @pytest.mark.parametrize("as_text", [False, True])
    def test_where_a_body_may_be(self, key: str, *, as_text: bool, tmp_path: Path) -> None:
        """It is in the line, under one of several names, as an object or as text, or one level deeper."""
        bodies = [line["request"] for line in write_requests(AgentSession([FAILING] * 8), "chat")]

        for lines in (
            bodies,
            [{key: json.dumps(body) if as_text else body, "ts": 1_780_000_000} for body in bodies],
            [{"data": 1, "request": {key: json.dumps(body) if as_text else body}} for body in bodies],
        ):
            scanned = scan_values(tmp_path, lines)
            assert scanned.loops == [TRUTH[0]]
            assert scanned.runs[0].estimated

    def test_a_list_of_requests_in_one_document(self, tmp_path: Path) -> None:
        """A JSON list is read value by value."""
        text = json.dumps(write_requests(AgentSession([FAILING] * 8), "responses"), indent=1)

        assert scan_values(tmp_path, [text.encode()]).loops == [TRUTH[0]]

    def test_conversations_side_by_side(self, tmp_path: Path) -> None:
        """Requests of several conversations of one task are told apart by their histories."""
        random = Random(2)
        sessions = [AgentSession(word([FAILING] * 8, random)) for _ in range(3)]
        logs = [write_requests(session, "anthropic") for session in sessions]

        scanned = scan_values(tmp_path, [line for lines in zip(*logs, strict=True) for line in lines])

        assert sorted(loop[0] for loop in scanned.loops) == ["repeat"] * 3
        assert sum(run.spent.calls for run in scanned.runs) == 24

    def test_a_retry_is_a_call_and_no_turn(self, tmp_path: Path) -> None:
        """The same request again costs again, and shows nothing new."""
        lines = write_requests(AgentSession([FAILING] * 3), "chat")

        scanned = scan_values(tmp_path, [line for line in lines for _ in range(3)])

        assert (scanned.loops, scanned.runs[0].spent.calls) == ([], 9)

    def test_a_history_that_leaves_out_its_oldest_messages(self, tmp_path: Path) -> None:
        """A client that keeps a window is followed by its last two answers."""
        turns = word([FAILING] * 10, Random(4))
        lines = []
        for line in write_requests(AgentSession(turns), "chat"):
            messages = line["request"]["messages"]
            lines.append({**line, "request": {"model": "m", "messages": [*messages[:2], *messages[2:][-8:]]}})

        scanned = scan_values(tmp_path, lines)

        assert len(scanned.runs) == 1
        assert scanned.loops == [("repeat", 1, 4, 8, 10)]

    def test_a_log_that_begins_in_the_middle(self, tmp_path: Path) -> None:
        """Calls that only later requests show are counted, with an estimate."""
        lines = write_requests(AgentSession([FAILING] * 8), "chat")[5:]

        (run,) = scan_values(tmp_path, lines).runs

        assert (run.spent.calls, run.estimated) == (8, True)
        assert run.loops[0].begins == 1

    def test_whole_conversations(self, tmp_path: Path) -> None:
        """A value that ends with an answer is a conversation, not a request."""
        body = SHAPES["chat"]([*[FAILING] * 8, Did((), (), "", "I give up.")])

        (run,) = scan_values(tmp_path, [body]).runs

        assert (run.spent.calls, [loop.noted for loop in run.loops]) == (9, [4])

    @pytest.mark.parametrize("style", STYLES)
    def test_actions_in_texts(self, style: str, tmp_path: Path) -> None:
        """Agents without tools write their actions as text."""
        random = Random(6)
        turns = word([Did((("run", {"n": 1}),), ("Error: no such thing. " * 15,))] * 8, random)
        lines = [as_text(turns[:count], STYLES[style]) for count in range(8)]

        assert [loop[1:4] for loop in scan_values(tmp_path, lines).loops] == [(1, 4, 8)]

    def test_scratchpads(self, tmp_path: Path) -> None:
        """All turns may stand in one text that grows."""
        step = "Thought: I look\nAction: search\nAction Input: lamps\nObservation: Error: the index is broken\n"
        lines = [{"model": "m", "prompt": f"Question: which lamps?\n{step * count}Thought:"} for count in range(9)]

        scanned = scan_values(tmp_path, lines)

        assert [loop[0] for loop in scanned.loops] == ["repeat"]

    def test_what_is_no_conversation(self, tmp_path: Path) -> None:
        """Embeddings and the like are named, and nothing else."""
        scanned = scan_values(tmp_path, [{"model": "m", "messages": [1, 2]}, {"model": "m", "messages": "x"}, {"a": 1}])

        assert scanned.runs == []
        assert sum(found.count for found in scanned.problems.values()) == 3


class TestOtlp:
    """What is special about exports."""

    def test_log_records(self, tmp_path: Path) -> None:
        """Messages may stand in the attributes of an event that is logged."""
        lines = []
        for line in write_otlp(AgentSession([FAILING] * 8)):
            (scopes,) = line["resourceSpans"]
            (span,) = scopes["scopeSpans"][0]["spans"]
            record = {
                "timeUnixNano": span["startTimeUnixNano"],
                "eventName": "gen_ai.client.inference.operation.details",
                "attributes": span["attributes"],
                "traceId": span["traceId"],
            }
            lines.append({"resourceLogs": [{"resource": scopes["resource"], "scopeLogs": [{"logRecords": [record]}]}]})

        assert scan_values(tmp_path, lines).loops == [TRUTH[0]]

    def test_spans_of_one_export_are_put_in_order(self, tmp_path: Path) -> None:
        """A batch may have its spans in any order, beside spans of other kinds."""
        lines = write_otlp(AgentSession([FAILING] * 8))
        spans = [line["resourceSpans"][0]["scopeSpans"][0]["spans"][0] for line in lines][::-1]
        spans.append({"traceId": "t", "name": "GET /", "attributes": [{"key": "http.method", "value": {"stringValue": "GET"}}]})

        export = {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}

        assert scan_values(tmp_path, [export, {"resourceMetrics": []}]).loops == [TRUTH[0]]

    def test_spans_without_contents(self, tmp_path: Path) -> None:
        """By default, no contents are exported: there is nothing to judge."""
        span = {"traceId": "t", "attributes": [{"key": "gen_ai.usage.input_tokens", "value": {"intValue": "9"}}]}

        scanned = scan_values(tmp_path, [{"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}])

        assert (scanned.runs, scanned.problems) == ([], {})


def test_messages_of_anthropic_are_not_taken_for_a_transcript(tmp_path: Path) -> None:
    """A body may have keys that lines of transcripts have."""
    turns: Sequence[Did] = [FAILING] * 8
    lines = [{"type": "request", "body": as_anthropic(turns[:count])} for count in range(9)]

    assert [loop[0] for loop in scan_values(tmp_path, lines).loops] == ["repeat"]


def test_lines_of_other_programs_are_not_taken_for_claude_codes(tmp_path: Path) -> None:
    """Without a session, a word in `type` says little."""
    lines = [{"type": "system", **line} for line in write_requests(AgentSession([FAILING] * 8), "chat")]

    assert scan_values(tmp_path, lines).loops == [TRUTH[0]]
