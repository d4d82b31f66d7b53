import json
from collections.abc import Mapping
from typing import Any

from extproc.engine.engine import Engine
from extproc.engine.exchange import Exchange
from extproc.request.fingerprint import NO_BODY
from extproc.request.http import HttpRequest
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.messages import encoded


def several(
    identity: str, *loops: Mapping[str, Any], mode: str = "enforce", **spec: object
) -> dict[str, Any]:
    """A policy with a list of detectors, each with keys replaced; `spec` is added to its spec."""
    made = policy(identity, ANY, mode=mode)
    made["spec"] |= {
        "loop_detection": [made["spec"]["loop_detection"] | loop for loop in loops],
        **spec,
    }
    return made


def looping(
    times: int,
    *,
    result: str = "no such file",
    argument: str = "a.txt",
    tool: str = "read_file",
    said: str = "go",
    **more: object,
) -> bytes:
    """A chat completion in which a tool was called this often with the same argument and result."""
    turn = [
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "function": {"name": tool, "arguments": json.dumps({"path": argument})},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": result},
    ]
    return encoded(
        {"model": "m", "messages": [{"role": "user", "content": said}, *turn * times], **more}
    )


def chat(times: int, padding: int = 0) -> bytes:
    """The same with a declared tool whose calls fail, and `size` more bytes of user text."""
    tools = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
    said = "go" + "x" * padding
    return looping(times, result="Error: no such file", tool="read", said=said, tools=tools)


def post(**headers: str) -> HttpRequest:
    return HttpRequest(
        "POST",
        "/v1/chat/completions",
        "host",
        {k.replace("_", "-"): v.encode() for k, v in headers.items()},
    )


def looked_into(engine: Engine, data: bytes, request: HttpRequest | None = None) -> Exchange:
    check = engine.prepare(request or post())
    assert check is not None
    check.read_body(NO_BODY.plus(data), content=data if len(data) <= check.inspects else None)
    return check
