"""Transcripts and logs of agents, in every format of `loopguard scan`."""

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from tests.support.labelled import as_atif
from tests.support.turn_writers import SHAPES, Did, as_anthropic, as_chat, as_gemini, as_responses

Json = dict[str, Any]


class AgentSession(NamedTuple):
    """A conversation of an agent.

    Attributes:
        turns: its turns.
        name: session name.
        begins: time of the first answer.
        seconds: between calls.
        project: folder of the work.
        agent: name, where a format has it.
        model: called model.
        side: id of a sub-agent; empty for the main one.
        prompt: tokens of the first prompt.
    """

    turns: Sequence[Did]
    name: str = "s1"
    begins: datetime = datetime(2026, 11, 2, 9, 0, tzinfo=UTC)
    seconds: int = 20
    project: str = "/home/ann/shop"
    agent: str = "agent"
    model: str = "claude-sonnet-4-5"
    side: str = ""
    prompt: int = 9_000

    def tell_time(self, number: int) -> datetime:
        return self.begins + timedelta(seconds=self.seconds * (number - 1))

    def count_tokens(self, number: int) -> tuple[int, int, int, int]:
        """Tokens of a call: fresh, output, read from a cache, written to it."""
        return 300, 90, self.prompt + 400 * number, 400

    def add_tokens(self, first: int, last: int) -> int:
        return sum(sum(self.count_tokens(number)) for number in range(first, last + 1))

    @property
    def calls(self) -> int:
        return len(self.turns)


# A step with the same error each time.
FAILING = Did((("check", {"part": 1}),), ("Error: part 1 is broken. " + "It is. " * 30,))

Lines = list[Json]


def write_claude_code(session: AgentSession) -> Lines:
    """Claude Code writes a line for each block of an answer, with results between them."""
    lines: Lines = [
        {"type": "queue-operation", "operation": "enqueue", "sessionId": session.name},
        {
            "type": "file-history-snapshot",
            "messageId": "m",
            "snapshot": {},
            "isSnapshotUpdate": False,
        },
    ]
    parent: str | None = None
    number = 0
    for message in as_anthropic(session.turns)["messages"]:
        answers = message["role"] == "assistant"
        number += answers
        content = (
            message["content"] if isinstance(message["content"], list) else [message["content"]]
        )
        blocks = [
            block for block in content if isinstance(block, str) or block.get("thinking") != ""
        ]
        for block in blocks:
            uuid = str(UUID(int=hash_name(session.name, len(lines))))
            said: Json = {
                "role": message["role"],
                "content": [block] if isinstance(block, dict) else block,
            }
            if answers:
                fresh, output, read, written = session.count_tokens(number)
                said |= {
                    "id": f"msg_{session.name}_{number}",
                    "type": "message",
                    "model": session.model,
                }
                said["usage"] = {
                    "input_tokens": fresh,
                    "cache_creation_input_tokens": written,
                    "cache_read_input_tokens": read,
                    "output_tokens": output if block is blocks[-1] else 1,
                }
            lines.append(
                {
                    "parentUuid": parent,
                    "isSidechain": bool(session.side),
                    **({"agentId": session.side} if session.side else {}),
                    **({"attributionAgent": "general-purpose"} if session.side and answers else {}),
                    "type": message["role"],
                    "message": said,
                    "uuid": uuid,
                    "timestamp": write_time(session.tell_time(max(number, 1))),
                    "cwd": session.project,
                    "sessionId": session.name,
                    "version": "2.1.331",
                }
            )
            parent = uuid
    return lines


def write_codex(session: AgentSession) -> Lines:
    meta = {
        "id": session.name,
        "cwd": session.project,
        "originator": "codex_exec",
        "cli_version": "0.169.0",
    }
    if session.side:
        meta["parent_thread_id"] = session.side
    begins = write_time(session.begins)
    lines: Lines = [
        {"timestamp": begins, "type": "session_meta", "payload": meta},
        {
            "timestamp": begins,
            "type": "turn_context",
            "payload": {"cwd": session.project, "model": session.model},
        },
    ]
    number, answering = 0, False
    for item in as_responses(session.turns)["input"]:
        kind = item.get("type", "message")
        answers = kind in {"reasoning", "function_call"} or item.get("role") == "assistant"
        number += answers and not answering
        if answering and not answers:
            lines.append(_count_codex(session, number))
        answering = answers
        time = write_time(session.tell_time(max(number, 1)))
        lines.append(
            {"timestamp": time, "type": "response_item", "payload": {"type": kind, **item}}
        )
    if answering:
        lines.append(_count_codex(session, number))
    return lines


def copy_claude_code(parent: AgentSession, session: AgentSession, calls: int) -> Lines:
    """A session that starts with copies of its parent's calls, under its own session id."""
    copied = _take_calls(
        write_claude_code(parent), calls, lambda line: line.get("message", {}).get("id")
    )
    own = write_claude_code(session)
    rest = own[len(_take_calls(own, calls, lambda line: line.get("message", {}).get("id"))) :]
    return [{**line, "sessionId": session.name} for line in [*copied, *rest]]


def fork_codex(parent: AgentSession, session: AgentSession, calls: int) -> Lines:
    """A rollout that starts with its parent's calls: its own head, all lines at the fork's time."""
    if not calls:
        return write_codex(session)
    copied = _take_calls(write_codex(parent), calls, _find_codex_answer)
    own = write_codex(session)
    rest = own[len(_take_calls(own, calls, _find_codex_answer)) :]
    return [own[0], *[{**line, "timestamp": own[0]["timestamp"]} for line in copied], *rest]


def _take_calls(lines: Lines, calls: int, find_answer: Callable[[Json], object]) -> Lines:
    answers = list(
        dict.fromkeys(answer for line in lines if (answer := find_answer(line)) is not None)
    )
    if len(answers) <= calls:
        return lines
    return lines[
        : next(place for place, line in enumerate(lines) if find_answer(line) == answers[calls])
    ]


def _find_codex_answer(line: Json) -> object:
    return (
        line["timestamp"] if line["payload"].get("type") in {"reasoning", "function_call"} else None
    )


COPIES: dict[str, Callable[[AgentSession, AgentSession, int], Lines]] = {
    "claude code": copy_claude_code,
    "codex": fork_codex,
}


def _count_codex(session: AgentSession, number: int) -> Json:
    fresh, output, read, written = session.count_tokens(number)
    last = {
        "input_tokens": fresh + read + written,
        "cached_input_tokens": read,
        "cache_write_input_tokens": written,
        "output_tokens": output,
    }
    payload = {"type": "token_count", "info": {"total_token_usage": {}, "last_token_usage": last}}
    return {
        "timestamp": write_time(session.tell_time(number)),
        "type": "event_msg",
        "payload": payload,
    }


def write_gemini_cli(session: AgentSession) -> Lines:
    """Gemini CLI writes each answer as it comes, and again with its results."""
    about = {
        "sessionId": session.name,
        "projectHash": "ab12",
        "startTime": write_time(session.begins),
        "kind": "main",
    }
    lines: Lines = [
        about,
        {"id": "u0", "type": "user", "content": "Fix it.", "timestamp": write_time(session.begins)},
    ]
    contents = as_gemini(session.turns)["contents"][1:]
    number = 0
    for place, content in enumerate(contents):
        if content["role"] == "user":
            said = [part for part in content["parts"] if "text" in part]
            lines += [{"id": f"u{place}", "type": "user", "content": said}] if said else []
            continue
        number += 1
        fresh, output, read, written = session.count_tokens(number)
        behind = (
            contents[place + 1]["parts"]
            if place + 1 < len(contents) and contents[place + 1]["role"] == "user"
            else []
        )
        results = [part for part in behind if "functionResponse" in part]
        calls = [part["functionCall"] for part in content["parts"] if "functionCall" in part]
        answer = {
            "id": f"{session.name}-{number}",
            "type": "gemini",
            "content": "".join(
                part["text"]
                for part in content["parts"]
                if "text" in part and not part.get("thought")
            ),
            "timestamp": write_time(session.tell_time(number)),
            "model": session.model,
            "tokens": {"input": fresh + read + written, "cached": read + written, "output": output},
        }
        called = [
            {
                "id": f"c{number}-{at}",
                **call,
                "status": "success",
                "result": results[at : at + 1] or None,
            }
            for at, call in enumerate(calls)
        ]
        lines += [
            answer,
            {"$set": {"lastUpdated": write_time(session.tell_time(number))}},
            {**answer, "toolCalls": called},
        ]
    return lines


def write_atif(session: AgentSession) -> Json:
    trajectory = as_atif(session.turns)
    number = 0
    for step in trajectory["steps"]:
        if step["source"] == "agent":
            number += 1
            fresh, output, read, written = session.count_tokens(number)
            step["timestamp"] = write_time(session.tell_time(number))
            step["metrics"] = {
                "prompt_tokens": fresh + read + written,
                "cached_tokens": read,
                "completion_tokens": output,
                "extra": {"cache_creation_input_tokens": written},
            }
    agent = {**trajectory["agent"], "name": session.agent, "model_name": session.model}
    return {**trajectory, "session_id": session.name, "agent": agent}


_USAGE: dict[str, Callable[[int, int, int, int], Json]] = {
    "chat": lambda fresh, output, read, written: {
        "usage": {
            "prompt_tokens": fresh + read + written,
            "completion_tokens": output,
            "prompt_tokens_details": {"cached_tokens": read + written},
        }
    },
    "responses": lambda fresh, output, read, written: {
        "usage": {
            "input_tokens": fresh + read + written,
            "output_tokens": output,
            "input_tokens_details": {"cached_tokens": read + written},
        }
    },
    "anthropic": lambda fresh, output, read, written: {
        "usage": {
            "input_tokens": fresh,
            "output_tokens": output,
            "cache_read_input_tokens": read,
            "cache_creation_input_tokens": written,
        }
    },
    "gemini": lambda fresh, output, read, written: {
        "usageMetadata": {
            "promptTokenCount": fresh + read + written,
            "candidatesTokenCount": output,
            "cachedContentTokenCount": read + written,
        }
    },
    "bedrock": lambda fresh, output, read, written: {
        "usage": {
            "inputTokens": fresh,
            "outputTokens": output,
            "cacheReadInputTokens": read,
            "cacheWriteInputTokens": written,
        }
    },
    "ollama": lambda fresh, output, read, written: {
        "prompt_eval_count": fresh + read + written,
        "eval_count": output,
    },
}


def write_requests(session: AgentSession, api: str) -> Lines:
    path = f"/v1beta/models/{session.model}:generateContent" if api == "gemini" else "/"
    return [
        {
            "time": write_time(session.tell_time(number)),
            "path": path,
            "agent": session.agent,
            "request": SHAPES[api](session.turns[: number - 1])
            | ({} if api == "gemini" else {"model": session.model}),
            "response": _USAGE[api](*session.count_tokens(number)),
        }
        for number in range(1, session.calls + 1)
    ]


def write_otlp(session: AgentSession, way: str = "messages") -> Lines:
    """Spans of model calls, as the collector's file exporter writes them.

    `way` is the form of messages: `messages`, `structured`, `events`, `numbered` or
        `openinference`.
    """
    return [_write_span(session, number, way) for number in range(1, session.calls + 1)]


def _write_span(session: AgentSession, number: int, way: str) -> Json:
    fresh, output, read, written = session.count_tokens(number)
    chat = as_chat(session.turns[: number - 1])["messages"]
    attributes: Json = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": session.model,
        "gen_ai.agent.name": session.agent,
        "gen_ai.conversation.id": session.name,
        "gen_ai.usage.input_tokens": fresh + read + written,
        "gen_ai.usage.output_tokens": output,
        "gen_ai.usage.cache_read.input_tokens": read,
        "gen_ai.usage.cache_creation.input_tokens": written,
    }
    events: list[Json] = []
    match way:
        case "messages":
            attributes["gen_ai.input.messages"] = json.dumps(_write_parts(chat))
        case "structured":
            attributes["gen_ai.input.messages"] = _write_parts(chat)
        case "events":
            events = [
                {
                    "name": f"gen_ai.{message['role']}.message",
                    "attributes": _write_attributes(_flatten(message)),
                }
                for message in chat
            ]
        case "numbered" | "openinference":
            openinference = way == "openinference"
            head, inner = (
                ("llm.input_messages", "message.") if openinference else ("gen_ai.prompt", "")
            )
            for place, message in enumerate(chat):
                for key, value in _number(message, openinference=openinference).items():
                    attributes[f"{head}.{place}.{inner}{key}"] = value
    start = int(session.tell_time(number).timestamp() * 1e9)
    span = {
        "traceId": session.name,
        "spanId": f"{number:016x}",
        "name": "chat",
        "startTimeUnixNano": str(start),
        "attributes": _write_attributes(attributes),
        "events": events,
    }
    resource = {"attributes": _write_attributes({"service.name": session.project})}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": [span]}]}]}


def _write_parts(chat: Iterable[Json]) -> list[Json]:
    written = []
    for message in chat:
        if message["role"] == "tool":
            response = {
                "type": "tool_call_response",
                "id": message["tool_call_id"],
                "response": message["content"],
            }
            written.append({"role": "tool", "parts": [response]})
            continue
        parts: list[Json] = (
            [{"type": "text", "content": message["content"]}] if message["content"] else []
        )
        parts += [
            {
                "type": "tool_call",
                "id": call["id"],
                "name": call["function"]["name"],
                "arguments": json.loads(call["function"]["arguments"]),
            }
            for call in message.get("tool_calls", ())
        ]
        written.append({"role": message["role"], "parts": parts})
    return written


def _flatten(message: Json) -> Json:
    flat = {"content": _join(message["content"]), "id": message.get("tool_call_id")}
    if "tool_calls" in message:
        flat["tool_calls"] = json.dumps(message["tool_calls"])
    return {key: value for key, value in flat.items() if value is not None}


def _number(message: Json, *, openinference: bool) -> Json:
    found = {
        "role": message["role"],
        "content": _join(message["content"]),
        "tool_call_id": message.get("tool_call_id"),
    }
    inner = ("tool_call.", "tool_call.function.") if openinference else ("", "")
    for place, call in enumerate(message.get("tool_calls", ())):
        found[f"tool_calls.{place}.{inner[0]}id"] = call["id"]
        for key in ("name", "arguments"):
            found[f"tool_calls.{place}.{inner[1]}{key}"] = call["function"][key]
    return {key: value for key, value in found.items() if value is not None}


def _join(content: Any) -> str | None:  # noqa: ANN401  # JSON
    return "".join(block["text"] for block in content) if isinstance(content, list) else content


def _write_attributes(values: Json) -> list[Json]:
    return [{"key": key, "value": _write_value(value)} for key, value in values.items()]


def _write_value(value: Any) -> Json:  # noqa: ANN401  # JSON
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_write_value(each) for each in value]}}
    if isinstance(value, dict):
        return {"kvlistValue": {"values": _write_attributes(value)}}
    return {"stringValue": value}


FORMATS: dict[str, Callable[[AgentSession], Lines]] = {
    "claude code": write_claude_code,
    "codex": write_codex,
    "gemini cli": write_gemini_cli,
    "atif": lambda session: [write_atif(session)],
    **{api: (lambda session, api=api: write_requests(session, api)) for api in SHAPES},  # type: ignore[misc]
    **{
        f"otlp {way}": (lambda session, way=way: write_otlp(session, way))  # type: ignore[misc]
        for way in ("messages", "structured", "events", "numbered", "openinference")
    },
}


def hash_name(name: str, number: int) -> int:
    return sum(byte << 8 * place for place, byte in enumerate(f"{name}{number}".encode()[:12]))


def write_time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.000Z")


def write_lines(file: Path, lines: Iterable[Json]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines))
    return file
