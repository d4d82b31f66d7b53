"""ext_proc streams in this process."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from extproc.engine.guards import Kept
from extproc.errors import StoreError
from extproc.ext_proc.judging import Reply
from extproc.ext_proc.service import Service
from extproc.ext_proc.stream import Stream
from extproc.metrics import Metrics
from extproc.pb.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from extproc.settings import Settings
from extproc.store import Store
from extproc.store.memory import MemoryStore
from extproc.store.pushes import AnyPush
from extproc.store.rules.documents import Documents, MemoryDocuments
from extproc.store.rules.session import Question
from tests.support.engine import make_engine
from tests.support.messages import body, encoded, headers

CHAT = "/v1/chat/completions"

T = TypeVar("T")


class FailingDocuments(MemoryDocuments):
    def __init__(self, check: Callable[[str], None]) -> None:
        super().__init__(lambda: 0)
        self._check = check

    # As in MemoryDocuments
    async def put(self, kind: str, subject: str, *more: Any, **named: Any) -> None:  # noqa: ANN401
        self._check(subject)
        await super().put(kind, subject, *more, **named)

    # As above
    async def drop(self, kind: str, subject: str, *more: Any, **named: Any) -> bool:  # noqa: ANN401
        self._check(subject)
        return await super().drop(kind, subject, *more, **named)

    async def read(self, kind: str, subject: str, *more: Any, **named: Any) -> Documents | None:  # noqa: ANN401  # as above
        self._check(subject)
        return await super().read(kind, subject, *more, **named)


class FailingStore:
    """A store that fails for keys that contain `failing`, at once or later."""

    def __init__(
        self, failing: str = "", error: Exception | None = None, *, later: bool = False
    ) -> None:
        self._failing = failing
        self._error = error or StoreError("down", kind="connection")
        self._later = later
        self._memory = MemoryStore(Metrics())
        self.documents = FailingDocuments(self._check)

    def hit(
        self, hits: Sequence[Question], now: int | None = None
    ) -> list[Any] | Awaitable[list[Any]]:
        return self._answer([hit.key for hit in hits], lambda: self._memory.hit(hits, now))

    def push(
        self, pushes: Sequence[AnyPush], now: int | None = None
    ) -> Sequence[Kept] | Awaitable[Sequence[Kept]]:
        return self._answer(
            [pushed.key for pushed in pushes], lambda: self._memory.push(pushes, now)
        )

    async def share_secret(self, name: str, secret: bytes) -> bytes:
        self._check(name)
        return secret

    def _check(self, name: str) -> None:
        if self._failing in name:
            raise self._error

    def _answer(
        self, keys: Sequence[str], ask: Callable[[], list[T]]
    ) -> list[T] | Awaitable[list[T]]:
        failing = any(self._failing in key for key in keys)

        async def answer() -> list[T]:
            await asyncio.sleep(0)
            if failing:
                raise self._error
            return ask()

        if self._later:
            return answer()
        if failing:
            raise self._error
        return ask()

    def health(self) -> str:
        return "down"

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass


class RecordingStore(FailingStore):
    def __init__(self) -> None:
        super().__init__(failing="never")
        self.keys: list[str] = []

    def hit(
        self, hits: Sequence[Question], now: int | None = None
    ) -> list[Any] | Awaitable[list[Any]]:
        self.keys += [hit.key for hit in hits]
        return super().hit(hits, now)

    def push(
        self, pushes: Sequence[AnyPush], now: int | None = None
    ) -> Sequence[Kept] | Awaitable[Sequence[Kept]]:
        self.keys += [pushed.key for pushed in pushes]
        return super().push(pushes, now)


def make_service(
    *policies: Mapping[str, Any],
    store: Store | None = None,
    local: MemoryStore | None = None,
    **settings: Any,  # noqa: ANN401
) -> Service:
    """A service for one bundle; `local` decides while the store is down."""
    metrics = Metrics()
    if local is None:
        local = MemoryStore(metrics)
    return Service(
        make_engine(*policies),
        local if store is None else store,
        local,
        metrics,
        Settings(**settings),
    )


@cache
def _make_loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on one reused loop: a new one takes ten times as long as most messages."""
    return _make_loop().run_until_complete(coroutine)


def receive(stream: Stream, message: Message) -> Reply:
    async def settled() -> Reply:
        reply = stream.receive(message.SerializeToString())
        answer = await reply if inspect.isawaitable(reply) else reply
        for _ in range(3):  # what is not waited for is done as well
            await asyncio.sleep(0)
        return answer

    return run(settled())


def decoded(reply: Reply) -> ProcessingResponse:
    assert reply.answer is not None
    return ProcessingResponse.FromString(reply.join_answer())


def exchange(service: Service, *messages: ProcessingRequest) -> list[Reply]:
    """One stream; stops where the server ends it."""
    stream = Stream(service)
    replies = []
    try:
        for message in messages:
            replies.append(receive(stream, message))
            if replies[-1].done:
                stream.end_hold()
                break
    finally:
        stream.close()
    return replies


def ask(
    service: Service,
    data: object = b"{}",
    path: str = CHAT,
    **named: Any,  # noqa: ANN401  # of `headers`
) -> ProcessingResponse:
    """The answer to one request; headers without a value are not sent."""
    sent = headers(path, **{name: value for name, value in named.items() if value != ""})
    return decoded(exchange(service, sent, body(encoded(data)))[-1])


def status(answer: ProcessingResponse) -> int:
    return answer.immediate_response.status.code or 200


# Of `ask`
def send(service: Service, bodies: Iterable[object], **named: Any) -> list[int]:  # noqa: ANN401
    return [status(ask(service, data, **named)) for data in bodies]


def repeat(service: Service, *messages: ProcessingRequest, times: int) -> ProcessingResponse:
    for _ in range(times):
        replies = exchange(service, *messages)
    return decoded(replies[-1])


def sample(service: Service, name: str, **labels: str) -> float:
    return service.metrics.registry.get_sample_value(f"loopguard_{name}", labels) or 0.0


def list_uncounted(service: Service, identity: str = "") -> dict[str, float]:
    """Uncounted requests of a policy, or of all, by reason."""
    found: dict[str, float] = {}
    for metric in service.metrics.uncounted.collect():
        for each in metric.samples:
            if each.name.endswith("_total") and identity in ("", each.labels["policy"]):
                found[each.labels["reason"]] = found.get(each.labels["reason"], 0) + each.value
    return found


def metadata_of(answer: ProcessingResponse) -> dict[str, Any]:
    metadata: dict[str, Any] = MessageToDict(answer.dynamic_metadata).get("loopguard", {})
    return metadata


def headers_of(answer: ProcessingResponse) -> dict[str, str]:
    return {
        item.header.key: item.header.raw_value.decode()
        for item in answer.immediate_response.headers.set_headers
    }
