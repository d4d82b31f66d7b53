"""Mutual TLS on the port, with certificates that are reloaded when their files are rotated.

- A thread reads the files a few times a second. Comparing contents works on any file system and for
  any kind of rotation: writing, renaming, or swapping a link, as the kubelet does.
- New contents are used once two reads in a row agree, so that a new certificate is not paired with
  an old key.
- Invalid files are logged and counted, and change nothing. Valid ones apply to new connections; old
  connections continue.
- Each rotation makes a new context, so earlier TLS sessions cannot be resumed.
"""
# interpreted: subclasses of ssl's classes; OpenSSL takes the time

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, cast

from extproc.errors import UsageError
from extproc.logs import RateLimit, make_extra
from extproc.metrics import Metrics
from extproc.options import require_together
from extproc.settings import Settings, SubjectName

_LOG = logging.getLogger("loopguard")

_LOOK_SECONDS: Final = 0.25
_GOODBYE_SECONDS: Final = 5.0
"""Time to wait for a peer's close_notify."""

_LINES_PER_SECOND: Final = 5
_AGAIN: Final = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Pem(NamedTuple):
    """The contents of the files: the certificate chain, its key, and the client CAs."""

    chain: bytes
    key: bytes
    authorities: bytes


def open_certificates(settings: Settings, metrics: Metrics) -> Certificates | None:
    """The certificates of a port with mutual TLS, or None for plaintext; raises UsageError."""
    require_together(settings, ("tls_cert", "tls_key", "tls_client_ca"), ("tls_client_san",))
    return Certificates(settings, metrics) if settings.tls_cert else None


class Certificates:
    """The certificates in use, and the allowed clients."""

    pem: Pem

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        """Load the files; raises UsageError with the invalid file."""
        self._settings = settings
        self._metrics = metrics
        self._names = frozenset(settings.tls_client_san)
        self._refusals = RateLimit(_LINES_PER_SECOND)
        self._stopped = threading.Event()
        self._load()
        self._taken = self._looked_at = self._peek()

    def make_listen_options(self, handshake_seconds: float) -> Mapping[str, Any]:
        """Arguments that make `create_server` use TLS."""
        return {
            "ssl": _Current(self),
            "ssl_handshake_timeout": handshake_seconds,
            "ssl_shutdown_timeout": _GOODBYE_SECONDS,
        }

    @property
    def context(self) -> ssl.SSLContext:
        """The context for new connections."""
        return self._context

    def admits(self, names: Iterable[SubjectName]) -> bool:
        """Whether a client whose certificate has these names is allowed."""
        return not self._names or not self._names.isdisjoint(names)

    def watch(self) -> None:
        """Watch for rotations in a thread, so that a hanging file system delays no request."""
        threading.Thread(target=self._follow, name="certificates", daemon=True).start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def look(self) -> None:
        """Use new contents of the files, unless they have changed since the last look."""
        seen = self._peek()
        if seen == self._looked_at and seen != self._taken:
            self._taken = seen
            self._rotate()
        self._looked_at = seen

    def log_refusal(self, reason: str) -> None:
        """Count a refused peer, and log it at a limited rate."""
        self._metrics.tls_refused.inc()
        suppressed = self._refusals.admit(time.monotonic())
        if suppressed is not None:
            _LOG.info(
                "connection refused in its TLS handshake",
                extra=make_extra(error=reason, suppressed=suppressed or None),
            )

    def _follow(self) -> None:
        while not self._stopped.wait(_LOOK_SECONDS):
            self.look()

    def _rotate(self) -> None:
        try:
            self._load()
        except UsageError as error:
            self._metrics.tls_reloads.labels("error").inc()
            _LOG.error(
                "certificates not rotated, the last good ones stay in use",
                extra=make_extra(error=str(error)),
            )
        else:
            self._metrics.tls_reloads.labels("ok").inc()
            _LOG.info("certificates rotated")

    def _peek(self) -> Pem | str:
        """The contents of the files, or why they cannot be read."""
        try:
            return _read(self._settings)
        except UsageError as error:
            return str(error)

    def _load(self) -> None:
        """Read and check everything, then use it; raises UsageError with the invalid file."""
        pem = _read(self._settings)
        not_after = _check_certificate(self._settings, pem)
        context = _Guarded(self)
        _load_pair(context, self._settings)
        _trust_clients(context, self._settings, pem)
        # The ssl module reads the key from its file, which may have changed since
        if _read(self._settings) != pem:
            raise UsageError(f"--tls-cert {self._settings.tls_cert}: is being changed")
        self.pem, self._context = pem, context
        self._metrics.tls_not_after.set(not_after)


class _ServerContext(ssl.SSLContext):
    """A server's TLS context with a reference to the certificates."""

    def __new__(cls, certificates: Certificates) -> Self:
        del certificates
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, certificates: Certificates) -> None:
        self.certificates = certificates


class _Guarded(_ServerContext):
    """The context for one version of the files; it refuses clients that are not allowed."""

    def __init__(self, certificates: Certificates) -> None:
        """Require a client certificate, HTTP/2 and TLS 1.2; one handshake per connection."""
        super().__init__(certificates)
        self.sslobject_class = _GuardedObject
        self.minimum_version = ssl.TLSVersion.TLSv1_2
        # It would be another handshake, without a limit (CVE-2011-1473)
        self.options |= ssl.OP_NO_RENEGOTIATION
        self.verify_mode = ssl.CERT_REQUIRED
        self.set_alpn_protocols(["h2"])


class _GuardedObject(ssl.SSLObject):
    def do_handshake(self) -> None:
        """Do the handshake, and refuse a peer that is not allowed."""
        certificates = cast("_Guarded", self.context).certificates
        try:
            super().do_handshake()
            self._check_peer(certificates)
        except _AGAIN:
            raise
        except ssl.SSLError as error:
            certificates.log_refusal(_explain_error(error))
            raise

    def _check_peer(self, certificates: Certificates) -> None:
        if self.selected_alpn_protocol() != "h2":
            raise ssl.SSLError("the client did not offer h2 by ALPN")
        names = read_names(self.getpeercert())
        if not certificates.admits(names):
            shown = ", ".join(name.value for name in names) or "no one by name"
            raise ssl.SSLCertVerificationError(
                f"no --tls-client-san is among the client's names: {shown}"
            )


class _Current(_ServerContext):
    """The listening socket's context; creates each connection with the newest context."""

    def wrap_bio(
        self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *_: object, **__: object
    ) -> ssl.SSLObject:
        """See `ssl`; always the server's side."""
        return self.certificates.context.wrap_bio(incoming, outgoing, server_side=True)


def read_names(certificate: Mapping[str, Any] | None) -> list[SubjectName]:
    """The subjectAltNames of a certificate, in the format of `SSLObject.getpeercert`."""
    return [make_name(kind, value) for kind, value in (certificate or {}).get("subjectAltName", ())]


def make_name(kind: str, value: str) -> SubjectName:
    """A subjectAltName in its normal form, for comparison."""
    if kind == "IP Address":
        with contextlib.suppress(ValueError):
            value = str(ip_address(value.strip()))
    return SubjectName(kind, value.lower() if kind == "DNS" else value)


def _read(settings: Settings) -> Pem:
    return Pem(
        read_file("--tls-cert", settings.tls_cert),
        read_file("--tls-key", settings.tls_key),
        read_file("--tls-client-ca", settings.tls_client_ca),
    )


def read_file(flag: str, path: str) -> bytes:
    """The bytes of a file that a flag names; raises UsageError if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}") from None


def _check_certificate(settings: Settings, pem: Pem) -> float:
    """Test the certificate with an in-memory handshake; returns its expiry as a Unix time.

    Raises UsageError if a client that trusts only this certificate refuses it.
    """
    flag = f"--tls-cert {settings.tls_cert}"
    client, server = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
    )
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    _trust(client, pem.chain, flag)
    _load_pair(server, settings)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_side = client.wrap_bio(to_client, to_server)
    server_side = server.wrap_bio(to_server, to_client, server_side=True)
    try:
        for side in (client_side, server_side, client_side):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLError as error:
        raise UsageError(f"{flag}: {_explain_error(error)}") from None
    found = cast("dict[str, str]", client_side.getpeercert())  # present, because it was verified
    return ssl.cert_time_to_seconds(found["notAfter"])


def _load_pair(context: ssl.SSLContext, settings: Settings) -> None:
    key = f"--tls-key {settings.tls_key}"
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key, _refuse_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UsageError(f"{key}: is not the key of --tls-cert {settings.tls_cert}") from None
        raise UsageError(f"{key}: contains no PEM private key") from None
    except OSError as error:
        raise UsageError(f"{key}: {error.strerror}") from None
    except _PassphraseError:
        raise UsageError(f"{key}: is encrypted; give a key without a passphrase") from None


class _PassphraseError(Exception):
    """The key needs a passphrase."""


def _refuse_passphrase() -> str:
    raise _PassphraseError


def _trust_clients(context: ssl.SSLContext, settings: Settings, pem: Pem) -> None:
    flag = f"--tls-client-ca {settings.tls_client_ca}"
    _trust(context, pem.authorities, flag)
    ends = [ssl.cert_time_to_seconds(str(found["notAfter"])) for found in context.get_ca_certs()]
    if not ends:
        raise UsageError(f"{flag}: contains no CA certificate")
    if max(ends) <= time.time():
        raise UsageError(
            f"{flag}: expired at {datetime.fromtimestamp(max(ends), UTC):%Y-%m-%d %H:%M} UTC"
        )


def _trust(context: ssl.SSLContext, pem: bytes, flag: str) -> None:
    try:
        # Comments may be in any language
        context.load_verify_locations(cadata=pem.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):  # ValueError if it is empty
        raise UsageError(f"{flag}: contains no PEM certificate") from None


def _explain_error(error: ssl.SSLError) -> str:
    told: str = getattr(error, "verify_message", "")
    # An error that OpenSSL did not raise has no reason
    reason: str = getattr(error, "reason", "") or ""
    return told or reason.replace("_", " ").lower() or str(error.args[-1])
