"""Policies and requests for measurements, and a service in this process."""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

from extproc.engine.engine import Engine
from extproc.ext_proc.judging import Reply
from extproc.ext_proc.service import Service
from extproc.ext_proc.stream import Stream
from extproc.metrics import Metrics
from extproc.pb.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
)
from extproc.pb.processing_mode_pb2 import ProcessingMode
from extproc.policy.loader import parse
from extproc.settings import Settings
from extproc.store.memory import MemoryStore

PATH = "/v1/chat/completions"
HOST = "api.example.com"
_ATTRIBUTES = "envoy.filters.http.ext_proc"


def policy(
    number: int = 0, selector: dict[str, Any] | None = None, **loop: object
) -> dict[str, Any]:
    detection = {"enabled": True, "window_seconds": 60, "threshold_identical_requests": 5, **loop}
    return {
        "id": f"policy-{number:05d}",
        "spec": {
            "selector": selector or {"pathExact": PATH, "methods": ["POST"]},
            "limit_keys": ["header:x-user-id"],
            "loop_detection": detection,
        },
    }


def canary(number: int = 1, **loop: Any) -> dict[str, Any]:  # noqa: ANN401  # as `policy`
    """A shadow policy that is compared with `policy(0)`."""
    made = policy(number, **loop)
    made["spec"] |= {"mode": "shadow", "canary_of": policy()["id"]}
    return made


def budget(number: int = 0, **loop: Any) -> dict[str, Any]:  # noqa: ANN401  # as `policy`
    """`policy` with session limits that no request reaches."""
    tools = loop.pop("max_calls_per_tool", {"send_email": 5})
    made = policy(number, **loop)
    limits = {
        "max_steps": 1_000_000,
        "max_tool_calls": 1_000,
        "max_calls_per_tool": tools,
        "max_cost_per_session": 100.0,
    }
    price = {"input": 2.5, "output": 10}
    made["spec"] |= {
        "session": {"keys": ["header:x-user-id"]},
        "session_limits": {**limits, "unknown_model": price},
    }
    return made


def talk() -> dict[str, Any]:
    """`policy` that looks at turns, of sessions."""
    made = budget(similarity="turns")
    del made["spec"]["session_limits"]
    return made


def rule() -> dict[str, Any]:
    """`policy` with a rule that lets every request pass."""
    made = policy()
    bucket = {"tokens_per_second": 1_000, "burst": 1_000_000}
    made["spec"]["rules"] = [
        {
            "name": "r",
            "limit_keys": ["header:x-user-id"],
            "algorithm": "token_bucket",
            "algorithm_config": bucket,
        }
    ]
    return made


def bundle(policies: Sequence[dict[str, Any]], version: int = 1) -> bytes:
    return json.dumps({"bundle_version": version, "policies": policies}).encode()


def engine(policies: Sequence[dict[str, Any]]) -> Engine:
    now = datetime.now(UTC)
    return Engine(parse({"bench.json": bundle(policies)}, now), now)


def service(compiled: Engine, settings: Settings | None = None) -> Service:
    metrics = Metrics()
    store = MemoryStore(metrics)
    return Service(compiled, store, store, metrics, settings or Settings())


def chat_body(number: int, length: int = 1024) -> bytes:
    start = b'{"model":"gpt-4o","messages":[{"role":"user","content":"%08d ' % number
    end = b'"}]}'
    return start + b"x" * (length - len(start) - len(end)) + end


def agent_body(user: int, calls: int) -> bytes:
    """A chat request of an agent that has called a tool this often, with a new result each time."""
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "x" * 500},
        {"role": "user", "content": f"task {user}"},
    ]
    for number in range(calls):
        name = f"call_{user}_{number}"
        arguments = json.dumps({"path": f"/src/{user}/{number}.py", "limit": 200})
        call = {
            "id": name,
            "type": "function",
            "function": {"name": "read_file", "arguments": arguments},
        }
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append(
            {
                "role": "tool",
                "tool_call_id": name,
                "content": f"{user} {number}: a line of text\n" * 12,
            }
        )
    return json.dumps({"model": "gpt-4o", "messages": messages}).encode()


def headers_message(
    path: str = PATH,
    *,
    host: str = HOST,
    user: str = "user-1",
    length: int = 1024,
    more: Mapping[str, str] | None = None,
) -> bytes:
    """A stream's first message: the 16 headers of an LLM client behind Envoy, and attributes."""
    headers = {
        ":authority": host,
        ":path": path,
        ":method": "POST",
        ":scheme": "https",
        "user-agent": "OpenAI/Python 3.54.0",
        "accept": "application/json",
        "accept-encoding": "gzip, deflate, br",
        "content-type": "application/json",
        "content-length": str(length),
        "authorization": "Bearer sk-0123456789abcdef0123456789abcdef0123456789abcdef",
        "x-user-id": user,
        "x-stainless-lang": "python",
        "x-stainless-retry-count": "0",
        "x-forwarded-for": "203.0.113.7",
        "x-forwarded-proto": "https",
        "x-request-id": "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9",
        **(more or {}),
    }
    message = ProcessingRequest(request_headers=HttpHeaders())
    for name, value in headers.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    message.attributes[_ATTRIBUTES].update(
        {"source.address": "203.0.113.7:51234", "xds.route_name": "llm"}
    )
    message.protocol_config.request_body_mode = ProcessingMode.BUFFERED
    return message.SerializeToString()


def body_message(body: bytes) -> bytes:
    return ProcessingRequest(
        request_body=HttpBody(body=body, end_of_stream=True)
    ).SerializeToString()


def process(serving: Service, messages: Sequence[bytes]) -> ProcessingResponse:
    """The last answer to a stream. Raises RuntimeError if the request is refused."""
    with closing(Stream(serving)) as stream:
        *_, reply = [stream.receive(message) for message in messages]
    answer = (
        ProcessingResponse.FromString(reply.join_answer())
        if isinstance(reply, Reply) and reply.done
        else None
    )
    if answer is None or answer.HasField("immediate_response"):
        raise RuntimeError(f"the request was not let through: {answer}")
    return answer
