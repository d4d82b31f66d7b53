"""Services that answer by their input alone: clocks stand still, and speed decides nothing."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from extproc.engine.guards import Kept
from extproc.ext_proc.service import Service
from extproc.ext_proc.stream import Stream
from extproc.store.pushes import AnyPush
from extproc.store.rules.session import Question
from tests.support.messages import body, headers
from tests.support.random_agents import Agent
from tests.support.service import FailingStore, decoded, metadata_of, run
from tests.support.turn_writers import PATHS

_SECONDS = 5.0

# A session's name in a message: random, of constant length.
_NAME = re.compile(rb"--session [0-9a-f]{16}")


class SteadyStore(FailingStore):
    """A store with a stopped clock that can do harm to shadow policies' questions."""

    def __init__(self, harm: Callable[[list[Any]], Any] | None = None, **more: Any) -> None:  # noqa: ANN401  # of FailingStore
        super().__init__(**{"failing": "never", **more})
        self._harm = harm

    def hit(
        self,
        hits: Sequence[Question],
        now: int | None = None,  # noqa: ARG002  # stands
    ) -> list[Any] | Awaitable[list[Any]]:
        answers: list[Any] | Awaitable[list[Any]] = self._treat(
            [hit.key for hit in hits], super().hit(hits, 1_000_000)
        )
        return answers

    def push(
        self,
        pushes: Sequence[AnyPush],
        now: int | None = None,  # noqa: ARG002  # stands
    ) -> Sequence[Kept] | Awaitable[Sequence[Kept]]:
        answers: list[Kept] = self._treat(
            [pushed.key for pushed in pushes], super().push(pushes, 1_000_000)
        )
        return answers

    # Whatever the harm makes of them
    def _treat(self, keys: Sequence[str], answers: Any) -> Any:  # noqa: ANN401
        return (
            answers
            if self._harm is None or not any("shadow:" in key for key in keys)
            else self._harm(answers)
        )


# The answer without metadata, its delay, what is sent first, and the metadata.
Told = tuple[bytes, int, bytes, dict[str, Any]]


def ask(service: Service, agent: Agent, data: bytes) -> list[Told]:
    """The answer to a request of an agent, without session names, which are random."""
    stream, told = Stream(service), []
    try:
        for message in (headers(PATHS[agent.shape], **agent.sent), body(data)):  # type: ignore[arg-type]  # of **more
            reply = run(_receive(stream, message.SerializeToString()))
            answer = decoded(reply)
            told_of = {
                key: value
                for key, value in metadata_of(answer).items()
                if not key.startswith("session")
            }
            answer.ClearField("dynamic_metadata")
            told.append(
                (_NAME.sub(b"", answer.SerializeToString()), reply.hold_ms, reply.first, told_of)
            )
            if reply.done:
                break
    finally:
        stream.close()
    return told


async def _receive(stream: Stream, data: bytes) -> Any:  # noqa: ANN401  # a Reply
    reply = stream.receive(data)
    if not isinstance(reply, Awaitable):
        return reply
    return await asyncio.wait_for(asyncio.ensure_future(reply), _SECONDS)


def give_time(service: Service) -> None:
    """Refill the budget for inspection."""
    for shadow in (False, True):
        service.budget.spend("", -9.0, shadow=shadow)
