"""Models' answers, whole and streamed."""

import json
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from extproc.sessions.rates import Usage
from tests.support.listening import Handler, Listener

JSON = "application/json; charset=utf-8"


EVENTS = "text/event-stream; charset=utf-8"


class Reply(NamedTuple):
    """A model's answer.

    Attributes:
        parts: written in order; a function is called, and its result written.
        kind: content type, empty for none.
        whole: with content-length, else in chunks.
        cut: the connection closes before the end.
        before: called first.
    """

    parts: Sequence[bytes | Callable[[], bytes]]
    kind: str = JSON
    status: int = 200
    headers: Mapping[str, str] = {}
    whole: bool = False
    cut: bool = False
    before: Callable[[], object] = lambda: None


def hang_up() -> bytes:
    raise ConnectionAbortedError


# Ends before its content-length.
HUNG_UP = Reply([hang_up], cut=True, headers={"content-length": "5"})


class Model:
    """An upstream that answers as told, and keeps the newest body and accepted encodings."""

    def __init__(self) -> None:
        self.reply = Reply([b"{}"])
        self.encodings: str | None = None
        self.body = b""
        outer = self

        class Serving(Handler):
            protocol_version = "HTTP/1.1"

            def serve(self) -> None:
                outer.body = self.read_body()
                outer.encodings = self.headers.get("accept-encoding")
                self._answer(outer.reply)

            def _answer(self, reply: Reply) -> None:
                reply.before()
                self.send_response(reply.status)
                kind = {"content-type": reply.kind} if reply.kind else {}
                for name, value in {**kind, **reply.headers}.items():
                    self.send_header(name, value)
                size = sum(len(part) for part in reply.parts if isinstance(part, bytes))
                self.send_header(
                    *(
                        ("content-length", str(size))
                        if reply.whole
                        else ("transfer-encoding", "chunked")
                    )
                )
                self.end_headers()
                for part in reply.parts:
                    data = part if isinstance(part, bytes) else part()
                    self.wfile.write(data if reply.whole else b"%x\r\n%b\r\n" % (len(data), data))
                if reply.cut:
                    self.close_connection = True
                elif not reply.whole:
                    self.wfile.write(b"0\r\n\r\n")

        self._server = Listener(Serving)
        self.address = self._server.address
        self.stop = self._server.stop


def whole(**answer: Any) -> Reply:  # noqa: ANN401  # JSON
    return Reply([json.dumps({"id": "1", "text": "a" * 2_000, **answer}).encode()])


def stream(*events: Mapping[str, Any] | str, named: bool = False, **more: Any) -> Reply:  # noqa: ANN401  # see `Reply`
    return Reply([write_event(event, named=named) for event in events], EVENTS, **more)


def write_event(event: Mapping[str, Any] | str, *, named: bool = False) -> bytes:
    if isinstance(event, str):
        return f"data: {event}\n\n".encode()
    head = f"event: {event['type']}\n" if named else ""
    return f"{head}data: {json.dumps(event)}\n\n".encode()


DELTA = {
    "model": "gpt-4o-2024-08-06",
    "choices": [{"index": 0, "delta": {"content": "word"}}],
    "usage": None,
}


CHAT_USAGE = {
    "prompt_tokens": 1_200,
    "completion_tokens": 34,
    "total_tokens": 1_234,
    "prompt_tokens_details": {"cached_tokens": 1_024, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 20},
}


RESPONSE_USAGE = {
    "input_tokens": 500,
    "input_tokens_details": {"cached_tokens": 100},
    "output_tokens": 60,
    "output_tokens_details": {"reasoning_tokens": 10},
    "total_tokens": 560,
}


MESSAGE_USAGE = {
    "input_tokens": 12,
    "cache_creation_input_tokens": 300,
    "cache_read_input_tokens": 9_000,
    "output_tokens": 77,
}


STARTED = {
    "type": "message_start",
    "message": {
        "type": "message",
        "model": "claude-sonnet-4-5",
        "usage": {**MESSAGE_USAGE, "output_tokens": 1},
    },
}


WORD = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "word"}}


GEMINI_USAGE = {
    "promptTokenCount": 90,
    "candidatesTokenCount": 8,
    "thoughtsTokenCount": 40,
    "toolUsePromptTokenCount": 5,
    "cachedContentTokenCount": 30,
    "totalTokenCount": 143,
}


CONVERSE_USAGE = {
    "inputTokens": 20,
    "outputTokens": 6,
    "totalTokens": 26,
    "cacheReadInputTokens": 700,
    "cacheWriteInputTokens": 80,
}


# The last event repeats the whole response.
LONG = "x" * 100_000


TOLD: dict[str, tuple[Reply, str, Usage]] = {
    "chat": (whole(model="gpt-4o", usage=CHAT_USAGE), "gpt-4o", Usage(176, 34, 1_024, 0)),
    "chat stream": (
        stream(DELTA, DELTA, {**DELTA, "choices": [], "usage": CHAT_USAGE}, "[DONE]"),
        "gpt-4o-2024-08-06",
        Usage(176, 34, 1_024, 0),
    ),
    "responses": (whole(model="gpt-5", usage=RESPONSE_USAGE), "gpt-5", Usage(400, 60, 100, 0)),
    "responses stream": (
        stream(
            {"type": "response.created", "response": {"model": "gpt-5", "usage": None}},
            {"type": "response.output_text.delta", "delta": "word"},
            {
                "type": "response.completed",
                "response": {"model": "gpt-5", "output": LONG, "usage": RESPONSE_USAGE},
            },
            named=True,
        ),
        "gpt-5",
        Usage(400, 60, 100, 0),
    ),
    "messages": (
        whole(model="claude-opus-4-5", usage=MESSAGE_USAGE),
        "claude-opus-4-5",
        Usage(12, 77, 9_000, 300),
    ),
    "messages stream": (
        stream(
            STARTED,
            {"type": "ping"},
            WORD,
            {
                "type": "message_delta",
                "delta": {"stop_reason": "end_turn"},
                "usage": {"output_tokens": 77},
            },
            {"type": "message_stop"},
            named=True,
        ),
        "claude-sonnet-4-5",
        Usage(12, 77, 9_000, 300),
    ),
    "messages stream of a gateway that counts at the end": (
        stream(
            {
                "type": "message_start",
                "message": {"model": "m", "usage": {"input_tokens": 0, "output_tokens": 0}},
            },
            {"type": "message_delta", "delta": {}, "usage": MESSAGE_USAGE},
            named=True,
        ),
        "m",
        Usage(12, 77, 9_000, 300),
    ),
    "gemini": (
        whole(modelVersion="gemini-2.5-pro", usageMetadata=GEMINI_USAGE),
        "gemini-2.5-pro",
        Usage(65, 48, 30, 0),
    ),
    "gemini stream": (
        stream(
            {
                "modelVersion": "gemini-2.5-pro",
                "usageMetadata": {"promptTokenCount": 90, "candidatesTokenCount": 2},
            },
            {"modelVersion": "gemini-2.5-pro", "usageMetadata": GEMINI_USAGE},
        ),
        "gemini-2.5-pro",
        Usage(65, 48, 30, 0),
    ),
    "gemini stream that is followed by a word": (
        stream(
            {"modelVersion": "m", "usageMetadata": GEMINI_USAGE},
            {"modelVersion": "m", "usageMetadata": None},
        ),
        "m",
        Usage(65, 48, 30, 0),
    ),
    "converse stream of a gateway": (stream({"usage": CONVERSE_USAGE}), "", Usage(20, 6, 700, 80)),
    "converse": (whole(output={}, usage=CONVERSE_USAGE), "", Usage(20, 6, 700, 80)),
    "ollama": (
        whole(model="qwen3", prompt_eval_count=26, eval_count=298),
        "qwen3",
        Usage(26, 298, 0, 0),
    ),
}


PRICES = {
    "gpt-*": {"input": 2.5, "output": 10, "cache_read": 1.25},
    "claude-*": {"input": 3, "output": 15, "cache_read": 0.3, "cache_write": 3.75},
    "*": {"input": 0.7, "output": 2.1},
}


def price(model: str, usage: Usage) -> Decimal:
    rates: Any = next(rates for name, rates in PRICES.items() if model.startswith(name.rstrip("*")))
    listed = [
        Decimal(str(rates.get(name, rates["input"])))
        for name in ("input", "output", "cache_read", "cache_write")
    ]
    return sum(
        (rate * tokens / 10**6 for rate, tokens in zip(listed, usage, strict=True)), Decimal()
    )
