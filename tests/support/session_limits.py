"""Sessions with limits."""

import json
from collections.abc import Sequence
from time import time
from typing import Any

from extproc.engine.settlements import Entry
from extproc.ext_proc.service import Service
from extproc.operator.admin.session_report import describe_session
from extproc.operator.session_rows import SessionDocument
from extproc.pb.external_processor_pb2 import ProcessingResponse
from extproc.sessions.rates import Usage
from tests.support.engine import ANY
from tests.support.service import ask as service_ask, metadata_of, status
from tests.support.turn_writers import (
    Did,
    as_anthropic,
    as_bedrock,
    as_chat,
    as_gemini,
    as_ollama,
    as_responses,
)

TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}


def limited(
    mode: str = "enforce",
    session: dict[str, Any] | None = None,
    **limits: Any,  # noqa: ANN401  # of a policy
) -> dict[str, Any]:
    named = {} if session is None else {"session": session}
    spec = {
        "selector": ANY,
        "mode": mode,
        "limit_keys": ["header:x-team"],
        **named,
        "session_limits": limits,
    }
    return {"id": "agents", "spec": spec}


def turns(count: int, tool: str = "run", **more: Any) -> bytes:  # noqa: ANN401  # of a body
    """A request whose history has this many calls with different arguments."""
    done = [
        Did(((tool, {"step": number}),), (f"result {number}",), number=number)
        for number in range(1, count + 1)
    ]
    return json.dumps({**as_chat(done), "tools": [TOOL], **more}).encode()


def kept(count: int) -> bytes:
    """The same calls in a request whose history is at the server."""
    done = [
        Did((("run", {"step": number}),), (f"result {number}",), number=number)
        for number in range(1, count + 1)
    ]
    return json.dumps({**as_responses(done), "tools": [TOOL], "previous_response_id": "r"}).encode()


def ask(
    service: Service, data: bytes, session: str = "s", team: str = "t", **more: str
) -> ProcessingResponse:
    return service_ask(service, data, **{"x_team": team, "x_session_id": session, **more})


def told(answer: ProcessingResponse) -> dict[str, Any]:
    return dict(json.loads(answer.immediate_response.body)["detail"])


def limit_of(answer: ProcessingResponse) -> tuple[str, float, float]:
    """The limit that refuses a request: name, used, allowed."""
    said = told(answer)
    return said["limit"], said["used"], said["allowed"]


def send(service: Service, bodies: Sequence[bytes], **more: str) -> list[int]:
    return [status(ask(service, data, **more)) for data in bodies]


def changed(answer: ProcessingResponse) -> dict[str, Any]:
    """The edited body, empty if there is none."""
    response = answer.request_body.response
    return (
        dict(json.loads(response.body_mutation.body)) if response.HasField("body_mutation") else {}
    )


def settle(
    service: Service, answer: ProcessingResponse, usage: Usage, status: int = 200, **named: object
) -> None:
    """The access log entry of a request; `named` replaces its session's fields."""
    sessions = tuple({**each, **named} for each in json.loads(metadata_of(answer)["sessions"]))
    service.settle_entry(
        Entry(sessions, status, status >= 500, 0, 0, "", usage, estimated=False, refused=False)
    )


WRITERS = [as_chat, as_responses, as_anthropic, as_gemini, as_bedrock, as_ollama]

# A body, perhaps with headers: `session`, `team` and others, see `ask`.
Request = bytes | tuple[bytes, dict[str, str]]


def unnamed(
    mode: str = "enforce",
    limits: dict[str, Any] | None = None,
    **own: Any,  # noqa: ANN401  # keys
) -> dict[str, Any]:
    """A policy with session limits, and other limits for requests without a session."""
    document = limited(mode, **(limits or {"max_steps": 100}))
    document["spec"] |= {"unnamed_limits": own}
    return document


def do(*steps: object) -> list[Did]:
    """A turn for each value; equal values make equal turns."""
    return [
        Did((("run", {"step": step}),), (f"did {step}",), number=at)
        for at, step in enumerate(steps, 1)
    ]


# Of turn_writers, of a body
def write(done: Sequence[Did], writer: Any = as_chat, **more: Any) -> bytes:  # noqa: ANN401
    return json.dumps({**writer(done), "tools": [TOOL], **more}).encode()


def nameless(service: Service, requests: Sequence[Request]) -> list[int]:
    """Outcomes of requests that name no session unless they say so."""
    pairs = [(request, {}) if isinstance(request, bytes) else request for request in requests]
    return [status(ask(service, data, **{"session": "", **named})) for data, named in pairs]


def describe(service: Service) -> list[dict[str, Any]]:
    document = SessionDocument.merge(
        [service.reporter.sessions.make_document(shows_callers=False)], time()
    )
    return [describe_session(row, shows_callers=False) for row in document.rows]
