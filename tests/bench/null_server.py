"""The cheapest honest ext_proc server on grpc.aio: `python -m tests.bench.null_server PORT`.

It parses each message, answers with prepared bytes, and ends the stream after the body, as a guard
does. Its cost is the transport's.
"""

import asyncio
import sys
from typing import Any

import grpc
import grpc.aio

from extproc.pb.external_processor_pb2 import (
    BodyResponse,
    HeadersResponse,
    ProcessingRequest,
    ProcessingResponse,
)

_HEADERS = ProcessingResponse(request_headers=HeadersResponse()).SerializeToString()
_BODY = ProcessingResponse(request_body=BodyResponse()).SerializeToString()
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)]


async def process(_: object, context: Any) -> None:  # noqa: ANN401  # grpc is untyped
    """One stream. An async generator took a twentieth more."""
    while (data := await context.read()) is not grpc.aio.EOF:
        if ProcessingRequest.FromString(data).WhichOneof("request") == "request_body":
            await context.write(_BODY)
            return
        await context.write(_HEADERS)


async def serve(port: int) -> None:
    server = grpc.aio.server(options=_OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(process)  # bytes in, bytes out
    service = grpc.method_handlers_generic_handler(
        "envoy.service.ext_proc.v3.ExternalProcessor", {"Process": handler}
    )
    server.add_generic_rpc_handlers((service,))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
