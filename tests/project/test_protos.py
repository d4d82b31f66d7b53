"""Our .proto files against the official descriptors, each in its own process."""

import json
import subprocess
import sys
from typing import Any

_DESCRIBE = """
import importlib, json, sys
found = {}

def describe(message):
    found[message.full_name] = {
        field.name: [
            field.number, field.type, field.is_repeated,
            getattr(field.containing_oneof, "name", None),
            getattr(
field.message_type or field.enum_type, "full_name", None),
        ]
        for field in message.fields
    }
    for nested in message.nested_types:
        describe(nested)
    for enum in message.enum_types:
        found[enum.full_name] = {value.name: value.number for value in enum.values}

for name in sys.argv[1:]:
    descriptor = importlib.import_module(name).DESCRIPTOR
    for message in descriptor.message_types_by_name.values():
        describe(message)
    for enum in descriptor.enum_types_by_name.values():
        found[enum.full_name] = {value.name: value.number for value in enum.values}
    for service in descriptor.services_by_name.values():
        found[service.full_name] = {
            method.name: [method.input_type.full_name, method.output_type.full_name,
                          method.client_streaming, method.server_streaming]
            for method in service.methods
        }
print(json.dumps(found))
"""

_OURS = [
    "accesslog",
    "als",
    "base",
    "external_processor",
    "health",
    "http_status",
    "processing_mode",
]
_OFFICIAL = [
    "envoy.config.core.v3.base_pb2",
    "envoy.data.accesslog.v3.accesslog_pb2",
    "envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2",
    "envoy.service.accesslog.v3.als_pb2",
    "envoy.service.ext_proc.v3.external_processor_pb2",
    "envoy.type.v3.http_status_pb2",
]
# grpc.health.v1 is not in xds-protos; these are the numbers of the gRPC health checking protocol,
# version 1.
_HEALTH: dict[str, dict[str, Any]] = {
    "grpc.health.v1.HealthCheckRequest": {"service": [1, 9, False, None, None]},
    "grpc.health.v1.HealthCheckResponse": {
        "status": [1, 14, False, None, "grpc.health.v1.HealthCheckResponse.ServingStatus"],
    },
    "grpc.health.v1.HealthCheckResponse.ServingStatus": {
        "UNKNOWN": 0,
        "SERVING": 1,
        "NOT_SERVING": 2,
        "SERVICE_UNKNOWN": 3,
    },
    "grpc.health.v1.Health": {
        "Check": [
            "grpc.health.v1.HealthCheckRequest",
            "grpc.health.v1.HealthCheckResponse",
            False,
            False,
        ],
        "Watch": [
            "grpc.health.v1.HealthCheckRequest",
            "grpc.health.v1.HealthCheckResponse",
            False,
            True,
        ],
    },
}


def _described(modules: list[str]) -> dict[str, dict[str, Any]]:
    run = subprocess.run(
        [sys.executable, "-c", _DESCRIBE, *modules], capture_output=True, text=True, check=True
    )
    found: dict[str, dict[str, Any]] = json.loads(run.stdout)
    return found


def test_protos_match_official_descriptors() -> None:
    ours = _described([f"extproc.pb.{name}_pb2" for name in _OURS])
    official = {**_described(_OFFICIAL), **_HEALTH}

    assert len(ours) > 20
    wrong = {
        f"{name}.{part}": (detail, official.get(name, {}).get(part))
        for name, parts in ours.items()
        for part, detail in parts.items()
        if official.get(name, {}).get(part) != detail
    }
    assert wrong == {}
    assert ours.keys() <= official.keys()
