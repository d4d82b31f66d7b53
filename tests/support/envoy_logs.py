"""Messages of Envoy's access log service."""

import json
from collections.abc import Mapping
from typing import Any

from extproc.pb.als_pb2 import StreamAccessLogsMessage

SESSION = {
    "policy": "p",
    "mode": "enforce",
    "name": "0123456789abcdef",
    "call": "00" * 8,
    "model": "gpt-4o",
    "reserve": 1500.0,
}
JSON = {"content-type": "application/json"}


def log(*entries: Mapping[str, Any]) -> bytes:
    message = StreamAccessLogsMessage()
    message.http_logs.SetInParent()
    for entry in entries:
        add_entry(message, **entry)
    return message.SerializeToString()


def add_entry(
    message: StreamAccessLogsMessage,
    told: Mapping[str, Any] | None = None,
    sessions: list[Any] | None = None,
    status: int = 200,
    sizes: tuple[int, int] = (4_000, 800),
    headers: Mapping[str, str] | None = None,
    action: str = "",
    took: tuple[float, float] | None = None,
    gateway: Mapping[str, Any] | None = None,
    times: Mapping[str, int] | None = None,
    **flags: bool,
) -> None:
    """Add the entry of a finished request.

    Args:
        message: the message to add to.
        told: usage that filters read in the response; with `gateway`, as Envoy AI Gateway writes
            it.
        sessions: sessions in Loopguard's metadata.
        status: response code.
        sizes: bytes of both bodies.
        headers: response headers.
        action: Loopguard's action.
        took: when the upstream began and ended.
        gateway: see `told`.
        times: durations of the entry by name, in milliseconds.
        **flags: response flags.
    """
    entry = message.http_logs.log_entry.add()
    entry.request.request_body_bytes, entry.response.response_body_bytes = sizes
    entry.response.response_code.value = status
    entry.response.response_headers.update(JSON if headers is None else headers)
    decided: dict[str, Any] = {"sessions": json.dumps([SESSION] if sessions is None else sessions)}
    if action:
        decided["action"] = action
    metadata = entry.common_properties.metadata.filter_metadata
    metadata["loopguard"].update(decided)
    if told:
        metadata["loopguard.usage"].update(told)
    if gateway:
        metadata["io.envoy.ai_gateway"].update(gateway)
    if took is not None:
        common = entry.common_properties
        for moment, seconds in zip(
            (common.time_to_first_upstream_tx_byte, common.time_to_last_upstream_rx_byte),
            took,
            strict=True,
        ):
            moment.seconds, moment.nanos = int(seconds), round(seconds % 1 * 10**9)
    for name, milliseconds in (times or {}).items():
        getattr(entry.common_properties, name).FromMilliseconds(milliseconds)
    for name, value in flags.items():
        setattr(entry.common_properties.response_flags, name, value)
