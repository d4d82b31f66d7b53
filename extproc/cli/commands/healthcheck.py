"""`loopguard healthcheck`: checks a running server's grpc.health.v1."""

from __future__ import annotations

import argparse
import os
import ssl
import sys
from dataclasses import dataclass

from extproc import settings
from extproc.errors import UsageError
from extproc.logs import escape_controls
from extproc.options import add_flags as add_options, option, read_options, require_together

HELP = "check the health of a running server (grpc.health.v1)"
EXAMPLES = """examples:
  loopguard healthcheck
  loopguard healthcheck --address unix:/run/loopguard.sock
  loopguard healthcheck --tls-ca ca.pem --tls-cert probe.pem --tls-key probe.key

exit code: 0 serving, 1 anything else"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthcheckTls:
    tls_ca: str = option(
        "", str, "CA certificates to verify the server with, if the port uses mutual TLS", "PATH"
    )
    tls_cert: str = option("", str, "client certificate", "PATH")
    tls_key: str = option("", str, "private key of the client certificate", "PATH")
    tls_server_name: str = option(
        "", str, "name in the server's certificate, if it is not the host", "NAME"
    )

    def __post_init__(self) -> None:
        require_together(self, ("tls_ca", "tls_cert", "tls_key"), ("tls_server_name",))


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        default=_find_listen_address(),
        metavar="HOST:PORT|unix:/PATH",
        help="default: LOOPGUARD_LISTEN, else 127.0.0.1:50051",
    )
    parser.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS", help="default 3")
    add_options(parser, HealthcheckTls)


def run(options: argparse.Namespace) -> int:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC logs to stderr
    # Takes long to import; other commands do not need it
    from extproc.transport.ask_health import ask_health  # noqa: PLC0415

    tls = read_options(HealthcheckTls, vars(options))
    try:
        address = settings.parse_address(options.address)
    except ValueError as error:
        raise UsageError(f"--address {error}, not {options.address!r}") from None
    status = ask_health(address, options.timeout, _make_credentials(tls), tls.tls_server_name)
    serving = status == "SERVING"
    print(
        status.lower() if serving else escape_controls(status),
        file=sys.stdout if serving else sys.stderr,
    )
    return int(not serving)


def _make_credentials(tls: HealthcheckTls) -> object:
    """Credentials for mutual TLS, or None; raises UsageError."""
    import grpc  # noqa: PLC0415  # as above

    from extproc.transport.tls import read_file  # noqa: PLC0415  # as above

    if not tls.tls_ca:
        return None
    ca, cert, key = [
        read_file(f"--tls-{name}", getattr(tls, f"tls_{name}")) for name in ("ca", "cert", "key")
    ]
    try:  # gRPC would only report that it cannot connect
        ssl.create_default_context(cafile=tls.tls_ca).load_cert_chain(tls.tls_cert, tls.tls_key)
    except ssl.SSLError as error:
        raise UsageError(
            f"--tls-ca, --tls-cert and --tls-key must be PEM files that belong together: {error}"
        ) from None
    return grpc.ssl_channel_credentials(ca, key, cert)


def _find_listen_address() -> str:
    text = os.environ.get(f"{settings.ENV_PREFIX}LISTEN", "127.0.0.1:50051")
    try:
        address = settings.parse_address(text)
    except ValueError:
        return text
    # Recognised, not bound
    if address.is_unix or address.host not in ("::", "0.0.0.0"):  # noqa: S104
        return text
    return f"127.0.0.1:{address.port}"
