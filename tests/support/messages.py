"""ext_proc messages of Envoy."""

import json
from collections.abc import Mapping

from extproc.apis import hash_first_words
from extproc.pb.external_processor_pb2 import HttpBody, HttpHeaders, ProcessingRequest
from extproc.pb.processing_mode_pb2 import ProcessingMode
from extproc.request.document import Document
from extproc.request.hash_key import PROCESS_KEY
from extproc.request.notes import Marks

# A dict of a descriptor's items
MODES = {name: number for name, number in ProcessingMode.BodySendMode.items()}  # noqa: C416
ATTRIBUTES = "envoy.filters.http.ext_proc"


def headers(
    path: str = "/",
    *,
    method: str = "POST",
    end: bool = False,
    mode: str | None = "BUFFERED",
    attributes: Mapping[str, str] | None = None,
    **more: str,
) -> ProcessingRequest:
    """A request_headers message; `x_a` becomes the header `x-a`."""
    message = ProcessingRequest(request_headers=HttpHeaders(end_of_stream=end))
    pairs = {
        ":method": method,
        ":path": path,
        ":authority": "host",
        **{key.replace("_", "-"): more[key] for key in more},
    }
    for name, value in pairs.items():
        message.request_headers.headers.headers.add(
            key=name, raw_value=value.encode("utf-8", "surrogateescape")
        )
    if mode is not None:
        # Proto3 enums are open
        message.protocol_config.request_body_mode = MODES[mode]  # type: ignore[assignment]
    if attributes is not None:
        message.attributes[ATTRIBUTES].update(attributes)
    return message


def encoded(value: object) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


def body(data: bytes = b"", *, end: bool = True) -> ProcessingRequest:
    return ProcessingRequest(request_body=HttpBody(body=data, end_of_stream=end))


def make_marks(data: bytes, caller: str = "") -> Marks:
    """The marks that this process puts on notes for a caller in a body's conversation."""
    return Marks(PROCESS_KEY, [caller], hash_first_words(Document(data)))
