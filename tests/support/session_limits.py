"""Sessions with limits, asked for the next step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from extproc.engine.settlements import Entry
from extproc.ext_proc.service import Service
from extproc.pb.external_processor_pb2 import ProcessingResponse
from extproc.sessions.rates import Usage
from tests.support.engine import ANY
from tests.support.messages import body, headers
from tests.support.service import decoded, exchange, metadata_of
from tests.support.turn_writers import Did, as_chat, as_responses

TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}


def limited(mode: str = "enforce", session: dict[str, Any] | None = None, **limits: Any) -> dict[str, Any]:  # noqa: ANN401  # of a policy
    """A policy with these limits of sessions, and nothing beside them."""
    named = {} if session is None else {"session": session}
    spec = {"selector": ANY, "mode": mode, "limit_keys": ["header:x-team"], **named, "session_limits": limits}
    return {"id": "agents", "spec": spec}


def turns(count: int, tool: str = "run", **more: Any) -> bytes:  # noqa: ANN401  # of a body
    """A request whose history shows this many calls, each with arguments of its own."""
    done = [Did(((tool, {"step": number}),), (f"result {number}",), number=number) for number in range(1, count + 1)]
    return json.dumps({**as_chat(done), "tools": [TOOL], **more}).encode()


def kept(count: int) -> bytes:
    """The same calls in a request that nothing tells apart from others: its server keeps what was before."""
    done = [Did((("run", {"step": number}),), (f"result {number}",), number=number) for number in range(1, count + 1)]
    return json.dumps({**as_responses(done), "tools": [TOOL], "previous_response_id": "r"}).encode()


def ask(service: Service, data: bytes, session: str = "s", team: str = "t", **more: str) -> ProcessingResponse:
    """The answer to one request."""
    named: dict[str, Any] = {"x_team": team, **({"x_session_id": session} if session else {}), **more}
    return decoded(exchange(service, headers("/v1/chat/completions", **named), body(data))[-1])


def status(answer: ProcessingResponse) -> int:
    """Of the refusal, 200 for none."""
    return answer.immediate_response.status.code if answer.HasField("immediate_response") else 200


def told(answer: ProcessingResponse) -> dict[str, Any]:
    """What the body of a refusal says about its limit."""
    return dict(json.loads(answer.immediate_response.body)["detail"])


def limit_of(answer: ProcessingResponse) -> tuple[str, float, float]:
    """Which limit refuses a request, how much of it is used and how much is allowed."""
    said = told(answer)
    return said["limit"], said["used"], said["allowed"]


def send(service: Service, bodies: Sequence[bytes], **more: str) -> list[int]:
    """What becomes of requests, one after the other."""
    return [status(ask(service, data, **more)) for data in bodies]


def changed(answer: ProcessingResponse) -> dict[str, Any]:
    """The body that goes on, if it was edited; empty if not."""
    response = answer.request_body.response
    return dict(json.loads(response.body_mutation.body)) if response.HasField("body_mutation") else {}


def settle(service: Service, answer: ProcessingResponse, usage: Usage, status: int = 200, **named: object) -> None:
    """The access log's entry about a request that went on; `named` replaces what it says of the session."""
    sessions = tuple({**each, **named} for each in json.loads(metadata_of(answer)["sessions"]))
    service.settle_entry(Entry(sessions, status, status >= 500, 0, 0, "", usage, estimated=False, refused=False))
