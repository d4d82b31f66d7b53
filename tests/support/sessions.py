"""Sessions of stuck agents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from extproc.ext_proc.judging import Reply
from extproc.ext_proc.service import Service
from extproc.ext_proc.stream import Stream
from extproc.pb.external_processor_pb2 import ProcessingResponse
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.messages import body, headers
from tests.support.service import decoded, run
from tests.support.turn_writers import Did, as_chat

STUCK = Did((("run", {"tests": "all"}),), ("3 failed",))


USER = {"x_user_id": "ann"}


def agents(**more: Any) -> dict[str, Any]:  # noqa: ANN401  # of a policy
    return policy(
        "agents",
        ANY,
        **{"similarity": "turns", "limit_keys": ["header:x-user-id"], "session": {}, **more},
    )


def turn(number: int, done: Did = STUCK) -> bytes:
    """A request whose history is condensed to its newest turn."""
    return json.dumps(
        as_chat([done._replace(number=number, thought=f"Thought {number}.")])
    ).encode()


def ask(service: Service, data: bytes, **named: Any) -> tuple[ProcessingResponse, bool]:  # noqa: ANN401  # of `headers`
    """The answer, and whether it came without waiting for the store."""

    async def exchange() -> tuple[Reply, bool]:
        stream = Stream(service)
        try:
            stream.receive(headers(**{**USER, **named}).SerializeToString())
            reply = stream.receive(body(data).SerializeToString())
            if isinstance(reply, Reply):
                for _ in range(3):  # what is not waited for is done as well
                    await asyncio.sleep(0)
                return reply, True
            return await reply, False
        finally:
            stream.close()

    reply, at_once = run(exchange())
    return decoded(reply), at_once


def send(service: Service, data: bytes, **named: Any) -> int:  # noqa: ANN401  # of `headers`
    answer, _ = ask(service, data, **named)
    return answer.immediate_response.status.code if answer.HasField("immediate_response") else 200


# Of `headers`
def send_all(service: Service, bodies: Sequence[bytes], **named: Any) -> list[int]:  # noqa: ANN401
    return [send(service, data, **named) for data in bodies]
