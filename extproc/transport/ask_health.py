"""A client for health checks (grpc.health.v1)."""
# interpreted: runs once per command

from __future__ import annotations

import grpc

from extproc.pb.health_pb2 import HealthCheckRequest, HealthCheckResponse
from extproc.settings import Address
from extproc.transport.health import HEALTH


def ask_health(
    address: Address, timeout: float, credentials: object = None, server_name: str = ""
) -> str:
    """Check a server; returns its status, such as `SERVING`, or the error.

    Args:
        address: where the server listens.
        timeout: in seconds.
        credentials: gRPC's credentials for mutual TLS; None for plaintext.
        server_name: the name in the server's certificate; default: the host.
    """
    options: list[tuple[str, str | int]] = [("grpc.enable_http_proxy", 0)]
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    if credentials is None:
        channel = grpc.insecure_channel(address.text, options)
    else:
        channel = grpc.secure_channel(address.text, credentials, options)
    with channel:
        check = channel.unary_unary(
            f"/{HEALTH}/Check", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
        )
        try:
            return HealthCheckResponse.ServingStatus.Name(
                check(HealthCheckRequest(), timeout=timeout).status
            )
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
