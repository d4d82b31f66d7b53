"""The model that real clients talk to.

It answers in the API of the request, whole or streamed, from one of its scripts.

Other requests get what clients need: WebSockets 426, lists of models, counts of tokens.
"""

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, TypeAlias

from demo import read_body, serving
from fake_model import SHAPES, Answer, Call, stream_completion

from extproc.ext_proc.changes.steer import LANDING
from extproc.request.notes import OPENING
from tests.clients.catalog import Client, Step
from tests.support.listening import Handler

# Of honest work.
STEPS: Final = 20

# The person's words, which sub-agents do not get.
TASK: Final = "Read the files in this folder, one by one, and report."

# Steps after which the context is reported as full.
FULL_AFTER: Final = 2

SUBTASKS: Final = ("subtask alpha", "subtask beta")
# Start of the text that replaces an agent that was not started.
LIMITED: Final = "Agent limit reached"

# Equal answers after which the model gives up.
_LONGEST_LOOP: Final = 40

_LAST: Final = b"data: [DONE]"
# In the newest message of a client that asks for a summary.
_COMPACTION: Final = re.compile(r"(?i)summar|compact|continu|handoff")

SUMMARY: Final = "They are to be read."
# Codex asks its own provider by this; no other can read the summary.
_TRIGGER: Final = "compaction_trigger"

# A prompt that clients take for a full context, and not yet for too long.
_FULL: Final = 230_000

# The id of a sub-agent, in the result of the call that started it.
_AGENT: Final = re.compile(r'agent_id[\\]*":[\\]*"([^"\\]+)')

_STREAM_GEMINI: Final = ":streamGenerateContent"


@dataclass
class Given:
    """The steps that the model gave in a conversation.

    Attributes:
        steps: time of each.
        noted: number of steps before the first request with a note.
        landed: the same for a note that asks for a final answer.
    """

    steps: list[float] = field(default_factory=list)
    noted: int = 0
    landed: int = 0


class Model:
    """Plays one script for one client.

    Attributes:
        given: by conversation: the main agent's has an empty name, those of sub-agents the names of
            their tasks.
        requests: number of model requests.
        turns: number of those that are turns of an agent.
        bodies: those of all model requests.
        ended: the script has ended.
        compacted: the client has asked for a summary of its history.
        told: the agent that should have started another has read that it was not started.
        tokens: reported length of the newest prompt; 0 for a short one.
        folder: the client's working folder.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.begin("", "")

    def begin(self, script: str, folder: str) -> None:
        self.script = script
        self.folder = folder
        self.given: dict[str, Given] = {}
        self.requests = self.turns = 0
        self.bodies: list[dict[str, Any]] = []
        self.ended = False
        self.compacted = False
        self.told = False
        self.tokens = 0

    def answer(self, body: dict[str, Any]) -> Answer:
        self.requests += 1
        self.bodies.append(body)
        client, text = self.client, json.dumps(body)
        self.tokens = 0
        if self._is_full and _COMPACTION.search(_read_newest(body)):
            self.compacted = True
            return SUMMARY
        # In a turn, landing may have taken the tools away
        if OPENING not in text and self._is_aside(body):
            config = body.get("generationConfig") or {}
            schema = config.get("responseJsonSchema") or config.get("responseSchema")
            return json.dumps(_fit(schema)) if schema else "A title"
        self.turns += 1
        task = "" if TASK in text else next((task for task in SUBTASKS if task in text), "")
        given = self.given.setdefault(task, Given())
        if OPENING in text:
            given.noted = given.noted or len(given.steps)
        if LANDING in text:
            given.landed = given.landed or len(given.steps)
        self.told = self.told or (LIMITED in text and (not task or self.script == "nested"))
        answer = self._choose(task, given, text, noted=OPENING in text)
        if answer is None and task and self.script in {"agents", "nested"}:
            return f"{task} is done."
        if answer is None:
            self.ended = True
            return self._write(client.end, "")
        given.steps.append(time.time())
        self.tokens = _FULL if self._is_full else 0
        return answer

    @property
    def _is_full(self) -> bool:
        """Whether the context is reported as full, until the client has asked for a summary."""
        return (
            self.script == "compaction"
            and not self.compacted
            and "" in self.given
            and len(self.given[""].steps) >= FULL_AFTER
        )

    def _is_aside(self, body: dict[str, Any]) -> bool:
        """Whether a request is for a title, a summary or a choice of models."""
        step = self.client.step
        return isinstance(step, Call) and step.tool not in _read_tools(body)

    def _choose(self, task: str, given: Given, text: str, *, noted: bool) -> Answer | None:
        number = len(given.steps)
        match self.script:
            case "work":
                return (
                    self._write(self.client.step, f"file{number + 1}.txt")
                    if number < STEPS
                    else None
                )
            case "sub-agents" | "agents" if not task:
                return self._delegate(number, text)
            case "nested":
                return self._nest(task) if not number else None
            case "agents" if number:
                return None
            case "obey" | "sub-agents" if noted:
                return None
        files = self.client.loop
        return (
            self._write(self.client.step, files[number % len(files)])
            if number < _LONGEST_LOOP
            else None
        )

    def _delegate(self, number: int, text: str) -> Answer | None:
        """The main agent's next step: start sub-agents, wait for them if necessary, end."""
        spawn, wait = self.client.spawn, self.client.wait
        if spawn is not None and not number:
            return [self._fill(spawn, task) for task in SUBTASKS]
        agents = list(dict.fromkeys(_AGENT.findall(text)))
        return (
            [self._fill(wait, agents[number - 1])]
            if wait is not None and number <= len(agents)
            else None
        )

    def _nest(self, task: str) -> Answer | None:
        """The only step of an agent that starts another one, unless it is the deepest."""
        below = dict(zip(("", *SUBTASKS), SUBTASKS, strict=False)).get(task)
        return (
            [self._fill(self.client.spawn, below)]
            if self.client.spawn is not None and below is not None
            else None
        )

    def _write(self, step: Step, file: str) -> Answer:
        if isinstance(step, str):
            return step.replace("{file}", f"{self.folder}/{file}")
        return [self._fill(step, f"{self.folder}/{file}")]

    def _fill(self, call: Call, value: str) -> Call:
        return Call(
            call.tool,
            json.loads(
                json.dumps(call.arguments)
                .replace("{file}", value)
                .replace("{task}", value)
                .replace("{agents}", value)
            ),
        )


def _fit(schema: dict[str, Any]) -> Any:  # noqa: ANN401  # JSON
    match schema.get("type", "").lower():
        case "object":
            return {name: _fit(inside) for name, inside in schema.get("properties", {}).items()}
        case "array":
            return []
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return False
    return schema["enum"][0] if "enum" in schema else "It is so."


def _read_newest(body: dict[str, Any]) -> str:
    return json.dumps([body[key][-1:] for key in ("messages", "input", "contents") if key in body])


def _read_tools(body: dict[str, Any]) -> dict[str, Any]:
    tools: dict[str, Any] = {}
    for tool in body.get("tools") or ():
        declared = tool.get("functionDeclarations") or [tool.get("function") or tool]
        tools |= {item["name"]: item for item in declared if "name" in item}
    return tools


Event: TypeAlias = tuple[str, dict[str, Any]]


def _list_message(message: dict[str, Any]) -> Iterator[Event]:
    yield "message_start", {"message": {**message, "content": [], "stop_reason": None}}
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            empty: dict[str, Any] = {"type": "text", "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield "content_block_start", {"index": index, "content_block": empty}
        yield "content_block_delta", {"index": index, "delta": delta}
        yield "content_block_stop", {"index": index}
    ending = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield (
        "message_delta",
        {"delta": ending, "usage": {"output_tokens": message["usage"]["output_tokens"]}},
    )
    yield "message_stop", {}


def _list_response(response: dict[str, Any]) -> Iterator[Event]:
    yield (
        "response.created",
        {"response": {**response, "status": "in_progress", "output": [], "usage": None}},
    )
    for index, item in enumerate(response["output"]):
        place = {"item_id": item["id"], "output_index": index}
        started: dict[str, Any] = {**item, "status": "in_progress"}
        if "arguments" in item:
            started["arguments"] = ""
        if "content" in item:
            started["content"] = []
        yield "response.output_item.added", {"output_index": index, "item": started}
        for number, part in enumerate(item.get("content", ())):
            inside = {**place, "content_index": number}
            yield "response.content_part.added", {**inside, "part": {**part, "text": ""}}
            yield "response.output_text.delta", {**inside, "delta": part["text"], "logprobs": []}
            yield "response.output_text.done", {**inside, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**inside, "part": part}
        if "arguments" in item:
            yield "response.function_call_arguments.delta", {**place, "delta": item["arguments"]}
            yield (
                "response.function_call_arguments.done",
                {**place, "name": item["name"], "arguments": item["arguments"]},
            )
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield "response.completed", {"response": response}


def _write_events(events: Iterator[Event]) -> bytes:
    pieces = [
        f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': number, **more})}\n\n"
        for number, (kind, more) in enumerate(events)
    ]
    return "".join(pieces).encode()


def _count(whole: dict[str, Any], tokens: int) -> dict[str, Any]:
    for key in ("usage", "usageMetadata"):
        for name in whole.get(key, ()) if tokens else ():
            if any(word in name.lower() for word in ("prompt", "input", "total")) and isinstance(
                whole[key][name], int
            ):
                whole[key][name] = tokens
    return whole


def write_answer(
    path: str, answer: Answer, number: int, *, streamed: bool, tokens: int = 0, remote: bool = False
) -> tuple[str, bytes]:
    """Content type and body of an answer in the API of a path.

    Raises:
        KeyError: no API has this path.
    """
    if path.endswith(_STREAM_GEMINI):
        content = _count(SHAPES[":generateContent"](answer, number), tokens)
        return "text/event-stream", f"data: {json.dumps(content)}\r\n\r\n".encode()
    end = next(end for end in (*SHAPES, path) if path.endswith(end))
    whole = _count(SHAPES[end](answer, number), tokens)
    if answer == SUMMARY and end == "/v1/responses" and remote:
        whole["output"] = [{"type": "compaction", "id": "cmp_1", "encrypted_content": answer}]
    for item in whole.get("output", ()):
        if item.get("type") == "function_call" and "." in item["name"]:
            item["namespace"], _, item["name"] = item["name"].partition(".")
    if not streamed:
        return "application/json", json.dumps(whole).encode()
    match end:
        case "/v1/messages":
            return "text/event-stream", _write_events(_list_message(whole))
        case "/v1/responses":
            return "text/event-stream", _write_events(_list_response(whole))
    used = {**whole, "object": "chat.completion.chunk", "choices": []}
    return "text/event-stream", stream_completion(whole).replace(
        _LAST, b"data: %b\n\n%b" % (json.dumps(used).encode(), _LAST)
    )


_LISTED: Final = {
    "id": "gpt-5",
    "object": "model",
    "type": "model",
    "created": 1,
    "owned_by": "x",
    "display_name": "x",
}
_OTHERS: Final[Sequence[tuple[str, dict[str, Any]]]] = (
    (r"/count_tokens$|:countTokens$", {"input_tokens": 1000, "totalTokens": 1000}),
    (r"/models(/|$)", {"object": "list", "data": [_LISTED], "models": [], "has_more": False}),
)


@contextmanager
def serve_model(model: Model) -> Iterator[int]:
    class Serving(Handler):
        protocol_version = "HTTP/1.1"

        def serve(self) -> None:
            asked, path = read_body(self), self.path.partition("?")[0]
            if self.headers.get("upgrade"):
                return self._send(HTTPStatus.UPGRADE_REQUIRED, "text/plain", b"no WebSockets here")
            try:
                body = json.loads(asked)
                write_answer(path, "", 0, streamed=False)
            except (KeyError, ValueError):
                other = next((answer for form, answer in _OTHERS if re.search(form, path)), None)
                status = HTTPStatus.NOT_FOUND if other is None else HTTPStatus.OK
                return self._send(
                    status,
                    "application/json",
                    json.dumps(other or {"error": {"message": "not here"}}).encode(),
                )
            answer = model.answer(body)
            kind, data = write_answer(
                path,
                answer,
                model.requests,
                streamed=bool(body.get("stream")),
                tokens=model.tokens,
                remote=_TRIGGER in _read_newest(body),
            )
            return self._send(HTTPStatus.OK, kind, data)

        def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    with serving(Serving) as port:
        yield port
