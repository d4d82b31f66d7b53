"""Sessions of stuck agents."""

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
from tests.support.service import ask as service_ask, run, status
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


def ask(service: Service, data: bytes, **named: Any) -> ProcessingResponse:  # noqa: ANN401  # of `headers`
    return service_ask(service, data, **{"path": "/", **USER, **named})


def waits_for_store(service: Service, data: bytes, **named: Any) -> bool:  # noqa: ANN401  # of `headers`
    """Send a request. Returns whether its answer waits for the store."""

    async def exchange() -> bool:
        stream = Stream(service)
        stream.receive(headers(**{**USER, **named}).SerializeToString())
        reply = stream.receive(body(data).SerializeToString())
        if waits := not isinstance(reply, Reply):
            await reply
        await asyncio.sleep(0)
        stream.close()
        return waits

    return run(exchange())


def send(service: Service, data: bytes, **named: Any) -> int:  # noqa: ANN401  # of `headers`
    return status(ask(service, data, **named))


# Of `headers`
def send_all(service: Service, bodies: Sequence[bytes], **named: Any) -> list[int]:  # noqa: ANN401
    return [send(service, data, **named) for data in bodies]
