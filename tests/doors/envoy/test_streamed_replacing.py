"""Why STREAMED bodies are not held: what the real Envoy does with a processor that clears all parts but the last one."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
from h2.connection import H2Connection
from h2.events import ResponseReceived

from extproc.pb.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from extproc.pb.health_pb2 import HealthCheckResponse
from tests.support.documents import bundle, policy
from tests.support.harness import PATIENCE, stack

_CLEAR_BODY = b"\x10\x01"
"""`clear_body: true` of a BodyMutation, which our own protos do not have."""

_BODY = b"x" * 10


def _replace(messages: Iterator[ProcessingRequest], _: object) -> Iterator[ProcessingResponse]:
    """Hold the body, and put it back, edited, in place of its last part."""
    held = b""
    for message in messages:
        answer, kind = ProcessingResponse(), message.WhichOneof("request")
        assert kind is not None
        if kind != "request_body":
            getattr(answer, kind).SetInParent()
        else:
            held += message.request_body.body
            mutation = answer.request_body.response.body_mutation
            if message.request_body.end_of_stream:
                mutation.body = b"edited " + held
            else:
                mutation.MergeFromString(_CLEAR_BODY)
        yield answer


class _Processor(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc is untyped
    def service(self, call: Any) -> Any:  # noqa: ANN401  # grpc is untyped
        if "Health" in call.method:
            serving = HealthCheckResponse(status=HealthCheckResponse.SERVING).SerializeToString()
            return grpc.unary_unary_rpc_method_handler(lambda *_: serving)
        write = ProcessingResponse.SerializeToString
        return grpc.stream_stream_rpc_method_handler(_replace, ProcessingRequest.FromString, write)


def _stream(config: str) -> str:
    streamed = config.replace("request_body_mode: BUFFERED", "request_body_mode: STREAMED")
    assert streamed != config
    return streamed


def _send(port: int, *, trailers: bool) -> bytes:
    """The status of a request over HTTP/2."""
    client = H2Connection()
    client.initiate_connection()
    client.send_headers(1, [(":method", "POST"), (":scheme", "http"), (":path", "/"), (":authority", "a")])
    client.send_data(1, _BODY, end_stream=not trailers)
    if trailers:
        client.send_headers(1, [("x-trailer", "1")], end_stream=True)
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as connected:
        connected.sendall(client.data_to_send())
        while received := connected.recv(65_536):
            for event in client.receive_data(received):
                if isinstance(event, ResponseReceived):
                    return dict(event.headers)[b":status"]
            connected.sendall(client.data_to_send())
    return b""


def test_a_streamed_body_that_was_held_is_lost_if_trailers_follow() -> None:
    """It can be replaced in its last part, but parts do not tell whether trailers follow, and no answer to these has a body."""
    server = grpc.server(futures.ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers((_Processor(),))
    with tempfile.TemporaryDirectory(prefix="lg") as folder:
        address = f"unix:{folder}/processor.sock"
        server.add_insecure_port(address)
        server.start()
        document = bundle(policy("p", {"pathPrefix": "/"}))
        try:
            with stack(document, edit=_stream, endpoints=[address]) as running:
                for trailers in (False, True):
                    assert _send(running.envoy.port, trailers=trailers) == b"200"
                bodies = [seen.body for seen in running.upstream.seen]
        finally:
            server.stop(None)

    assert bodies == [b"edited " + _BODY, b""]
