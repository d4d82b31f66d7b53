"""Why STREAMED bodies are not held: what the real Envoy does with a processor that clears all parts but the last one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent import futures
from typing import Any
from urllib.parse import urlsplit

import grpc

from extproc.cli.probe.client import send
from extproc.cli.probe.spellings import HTTP_2, Spelling
from extproc.pb.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from extproc.pb.health_pb2 import HealthCheckResponse
from tests.support.documents import bundle, policy
from tests.support.harness import stack

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
                url = urlsplit(f"http://127.0.0.1:{running.envoy.port}")
                for trailers in (False, True):
                    spelling = Spelling("", "/", body=_BODY, version=HTTP_2, trailers=trailers)
                    assert send(url, spelling, [], 30).status == 200
                bodies = [seen.body for seen in running.upstream.seen]
        finally:
            server.stop(None)

    assert bodies == [b"edited " + _BODY, b""]
