"""Bodies that Envoy does not keep, through each transport: several messages answer one, and some answer none."""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio

from extproc.ext_proc.service import Service
from extproc.pb.external_processor_pb2 import HttpTrailers, ProcessingRequest, ProcessingResponse
from tests.support.documents import policy
from tests.support.messages import body, headers
from tests.support.service import make_service
from tests.support.transport import Run, Running, until

DUPLEX = "FULL_DUPLEX_STREAMED"
TRAILERS = ProcessingRequest(request_trailers=HttpTrailers())


async def converse(running: Running, *messages: ProcessingRequest) -> list[ProcessingResponse]:
    """Send all messages, and read until the server ends the call."""
    call = running.process()
    for message in messages:
        await call.write(message.SerializeToString())
    return [ProcessingResponse.FromString(data) async for data in call]


def join(answers: Sequence[ProcessingResponse]) -> bytes:
    """What is handed back of a request's body."""
    return b"".join([answer.request_body.response.body_mutation.streamed_response.body for answer in answers])


def make() -> Service:
    """A service that refuses the third equal request."""
    return make_service(policy("p", {"pathPrefix": "/"}))


def test_a_whole_body_comes_back(run: Run) -> None:
    """In parts, behind the headers, before the trailers; what is refused gets one answer."""

    async def steps(running: Running) -> None:
        chunks = [body(bytes([number]) * 50_000, end=False) for number in range(30)]
        passed = [await converse(running, headers(mode=DUPLEX), *chunks, TRAILERS) for _ in range(2)]
        [refused] = await converse(running, headers(mode=DUPLEX), *chunks, TRAILERS)

        for answers in passed:
            kinds = [answer.WhichOneof("response") for answer in answers]
            assert (kinds[0], set(kinds[1:-1]), kinds[-1]) == ("request_headers", {"request_body"}, "request_trailers")
            assert join(answers) == b"".join([chunk.request_body.body for chunk in chunks])
        assert refused.immediate_response.status.code == 429
        await until(lambda: running.service.streams == 0)
        assert running.service.kept.bytes == 0

    run(make(), steps)


def test_what_is_given_up_is_sent_without_a_message(run: Run) -> None:
    """When the server is about to stop, a held body goes on at once, and its end comes back when it is there."""

    async def steps(running: Running) -> None:
        call = running.process()
        await call.write(headers(mode=DUPLEX).SerializeToString())
        await call.write(body(b"a" * 100_000, end=False).SerializeToString())
        await until(lambda: running.service.kept.bytes == 100_000)

        running.service.release()
        early = [ProcessingResponse.FromString(await call.read()) for _ in range(3)]
        await call.write(body(b"b").SerializeToString())
        late = []
        while (data := await call.read()) is not grpc.aio.EOF:
            late.append(ProcessingResponse.FromString(data))

        assert early[0].WhichOneof("response") == "request_headers"
        assert join(early) == b"a" * 100_000
        assert join(late) == b"b"
        assert late[-1].request_body.response.body_mutation.streamed_response.end_of_stream
        assert running.service.kept.bytes == 0

    run(make(), steps)


def test_a_call_that_is_cancelled_frees_its_body(run: Run) -> None:
    """A client that leaves in the middle of its upload."""

    async def steps(running: Running) -> None:
        call = running.process()
        await call.write(headers(mode=DUPLEX).SerializeToString())
        await call.write(body(b"a" * 100_000, end=False).SerializeToString())
        await until(lambda: running.service.kept.bytes == 100_000)

        call.cancel()

        await until(lambda: running.service.streams == 0)
        assert running.service.kept.bytes == len(running.service.waiting) == 0

    run(make(), steps)
