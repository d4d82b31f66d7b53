"""Mutual TLS on both transports, with real certificates, a real Envoy and rotated files."""

import asyncio
import contextlib
import datetime as dt
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from extproc.cli.envoy_config.options import EnvoyOptions
from extproc.cli.main import main
from extproc.errors import UsageError
from extproc.metrics import Metrics
from extproc.options import read_options
from extproc.settings import (
    SubjectName,
    parse_address,
    parse_subject_name,
    parse_subject_names,
    read_settings,
)
from extproc.transport.fast import FastServer
from extproc.transport.health import EXT_PROC, Health
from extproc.transport.tls import Certificates
from tests.support.documents import bundle, policy
from tests.support.engine import ANY
from tests.support.harness import (
    PATIENCE,
    Envoy,
    Loopguard,
    Stack,
    eventually,
    stack,
    write_policies,
)
from tests.support.http2 import HELLO
from tests.support.messages import headers
from tests.support.service import make_service, sample
from tests.support.transport import TRANSPORTS

SERVER = "guard.example"
ENVOY = "spiffe://cluster.local/ns/gateways/sa/envoy"


class Files(NamedTuple):
    """Where a certificate, its key and an authority are."""

    cert: Path
    key: Path
    ca: Path


AUTHORITY = trustme.CA()
STRANGER = trustme.CA()


def issue(
    folder: Path,
    *names: str,
    by: trustme.CA = AUTHORITY,
    trusting: trustme.CA = AUTHORITY,
    **more: Any,  # noqa: ANN401  # of issue_cert
) -> Files:
    folder.mkdir(exist_ok=True)
    made = by.issue_cert(*names, **more)
    chain = b"".join(blob.bytes() for blob in made.cert_chain_pems)
    files = Files(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
    for file, text in zip(
        files, (chain, made.private_key_pem.bytes(), trusting.cert_pem.bytes()), strict=True
    ):
        fresh = file.with_suffix(".tmp")
        fresh.write_bytes(text)
        fresh.replace(file)
    return files


def issue_client(folder: Path, name: str, by: trustme.CA = AUTHORITY) -> Files:
    """A client's certificate. trustme cannot issue one for a URI."""
    files = issue(folder / name.replace("/", "-"), "10.0.0.1" if "://" in name else name, by=by)
    if "://" in name:
        files.cert.write_bytes(
            reissue(files.cert.read_bytes(), x509.UniformResourceIdentifier(name), by)
        )
    return files


def reissue(chain: bytes, name: x509.GeneralName, by: trustme.CA) -> bytes:
    old = x509.load_pem_x509_certificate(chain)
    made = x509.CertificateBuilder(old.issuer, old.subject, old.public_key(), old.serial_number)
    made = made.not_valid_before(old.not_valid_before_utc).not_valid_after(old.not_valid_after_utc)
    for extension in old.extensions:
        if extension.oid != x509.SubjectAlternativeName.oid:
            made = made.add_extension(extension.value, critical=extension.critical)
    made = made.add_extension(x509.SubjectAlternativeName([name]), critical=False)
    key = load_pem_private_key(by.private_key_pem.bytes(), None)
    assert isinstance(key, EllipticCurvePrivateKey)
    return made.sign(key, SHA256()).public_bytes(Encoding.PEM)


def of_server(files: Files, *san: str) -> dict[str, str]:
    chosen = {
        "tls_cert": str(files.cert),
        "tls_key": str(files.key),
        "tls_client_ca": str(files.ca),
    }
    return chosen | ({"tls_client_san": ",".join(san)} if san else {})


def on_command_line(chosen: dict[str, str]) -> list[str]:
    return [
        word for name, value in chosen.items() for word in (f"--{name.replace('_', '-')}", value)
    ]


def load(files: Files, metrics: Metrics | None = None) -> Certificates:
    return Certificates(read_settings(of_server(files), {}), metrics or Metrics())


def read_metric(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"loopguard_{name}", labels) or 0.0


def count_rotations(metrics: Metrics) -> list[float]:
    return [read_metric(metrics, "tls_reloads_total", result=result) for result in ("error", "ok")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


# ---- Names


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Envoy.Example", SubjectName("DNS", "envoy.example")),
        ("10.0.0.1", SubjectName("IP Address", "10.0.0.1")),
        ("2001:DB8:0:0::1", SubjectName("IP Address", "2001:db8::1")),
        (ENVOY, SubjectName("URI", ENVOY)),
    ],
)
def test_subject_names_are_told_apart_by_their_form(text: str, name: SubjectName) -> None:
    assert parse_subject_name(text) == name


@pytest.mark.parametrize("text", ["*.example", "a b", "-a", "a/b"])
def test_invalid_subject_name_is_rejected(text: str) -> None:
    with pytest.raises(
        ValueError, match="must be a DNS name, an IP address or a URI such as spiffe://"
    ):
        parse_subject_names(f"good.example,{text}")


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("127.9.9.9:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("unix:/a", True),
        ("0.0.0.0:1", False),
        (":1", False),
        ("10.0.0.1:1", False),
        ("guard.example:1", False),
    ],
)
def test_loopback_and_unix_sockets_are_local(text: str, local: bool) -> None:
    assert parse_address(text).is_local is local


# ---- Flags


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--tls-cert", "c"], "--tls-cert needs --tls-key and --tls-client-ca as well"),
        (["--tls-cert", "c", "--tls-key", "k"], "--tls-cert needs --tls-client-ca as well"),
        (["--tls-client-ca", "a"], "--tls-client-ca needs --tls-cert and --tls-key as well"),
        (
            ["--tls-client-san", "a"],
            "--tls-client-san needs --tls-cert and --tls-key and --tls-client-ca as well",
        ),
        (
            ["--tls-client-san", "a b"],
            "--tls-client-san must be a DNS name, an IP address or a URI such as ",
        ),
    ],
)
def test_incomplete_tls_flags_name_the_missing_ones(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["serve", "--policy", "p", *arguments])

    assert (code, capsys.readouterr().err.startswith(f"loopguard: {line}")) == (2, True)


# ---- Files


def encrypted(key: Path) -> bytes:
    plain = load_pem_private_key(key.read_bytes(), None)
    return plain.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"hush"))


YESTERDAY = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)


def expire(files: Files) -> None:
    issue(
        files.cert.parent, SERVER, not_before=YESTERDAY - dt.timedelta(days=1), not_after=YESTERDAY
    )


BROKEN: dict[str, tuple[Callable[[Files], object], str]] = {
    "no certificate": (
        lambda files: files.cert.unlink(),
        "--tls-cert {cert}: No such file or directory",
    ),
    "no key": (lambda files: files.key.unlink(), "--tls-key {key}: No such file or directory"),
    "no authority": (
        lambda files: files.ca.unlink(),
        "--tls-client-ca {ca}: No such file or directory",
    ),
    "empty certificate": (
        lambda files: files.cert.write_bytes(b""),
        "--tls-cert {cert}: contains no PEM certificate",
    ),
    "rubbish key": (
        lambda files: files.key.write_bytes(b"\x00\xff"),
        "--tls-key {key}: contains no PEM private key",
    ),
    "rubbish authority": (
        lambda files: files.ca.write_bytes(b"hello"),
        "--tls-client-ca {ca}: contains no PEM certificate",
    ),
    "no authority's certificate": (
        lambda files: files.ca.write_bytes(files.cert.read_bytes()),
        "--tls-client-ca {ca}: contains no CA certificate",
    ),
    "another key": (
        lambda files: files.key.write_bytes(AUTHORITY.issue_cert("x").private_key_pem.bytes()),
        "--tls-key {key}: is not the key of --tls-cert {cert}",
    ),
    "encrypted key": (
        lambda files: files.key.write_bytes(encrypted(files.key)),
        "--tls-key {key}: is encrypted; give a key without a passphrase",
    ),
    "expired certificate": (expire, "--tls-cert {cert}: certificate has expired"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file_is_reported_and_last_good_files_stay(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start it is an error. The next good files are taken."""
    files, metrics = issue(tmp_path, SERVER), Metrics()
    certificates = load(files, metrics)
    before = certificates.pem
    break_it, message = BROKEN[case]
    told = message.format(**files._asdict())

    break_it(files)
    with pytest.raises(UsageError) as failure:
        load(files)
    for _ in range(4):
        certificates.look()
    kept = certificates.pem
    issue(tmp_path, SERVER)
    for _ in range(2):
        certificates.look()

    assert str(failure.value) == told
    assert kept == before
    assert [
        vars(record)["fields"]["error"] for record in caplog.records if record.levelname == "ERROR"
    ] == [told]
    assert count_rotations(metrics) == [1, 1]
    assert certificates.pem.chain == files.cert.read_bytes() != before.chain


def test_rotation_waits_until_certificate_and_key_fit(tmp_path: Path) -> None:
    files, metrics = issue(tmp_path, SERVER), Metrics()
    certificates = load(files, metrics)
    fresh = AUTHORITY.issue_cert(SERVER)

    files.cert.write_bytes(b"".join(blob.bytes() for blob in fresh.cert_chain_pems))
    certificates.look()
    files.key.write_bytes(fresh.private_key_pem.bytes())
    certificates.look()
    certificates.look()

    assert count_rotations(metrics) == [0, 1]
    assert certificates.pem.key == fresh.private_key_pem.bytes()


def test_swapped_link_is_a_rotation(tmp_path: Path) -> None:
    """As the kubelet rewrites a Secret. The gauge shows when the certificate expires."""
    for name, day in (("old", 1), ("new", 2)):
        issue(tmp_path / name, SERVER, not_after=dt.datetime.now(dt.UTC) + dt.timedelta(days=day))
    data = tmp_path / "..data"
    data.symlink_to("old")
    files = Files(*(tmp_path / name for name in ("tls.crt", "tls.key", "ca.crt")))
    for file in files:
        file.symlink_to(Path("..data") / file.name)
    metrics = Metrics()
    certificates = load(files, metrics)
    before = read_metric(metrics, "tls_not_after_seconds")

    (tmp_path / "..tmp").symlink_to("new")
    (tmp_path / "..tmp").replace(data)
    certificates.look()
    certificates.look()

    assert certificates.pem.chain == (tmp_path / "new" / "tls.crt").read_bytes()
    assert read_metric(metrics, "tls_not_after_seconds") - before == pytest.approx(86_400, abs=60)


def test_renegotiation_is_off(folder: Path) -> None:
    """CVE-2011-1473."""
    certificates = load(issue(folder / "server", SERVER))

    assert certificates.context.options & ssl.OP_NO_RENEGOTIATION


# ---- Both transports


class Door(NamedTuple):
    """A transport that listens with TLS."""

    port: int
    service: Any
    is_fast: bool

    async def ask(self, credentials: grpc.ChannelCredentials | None) -> grpc.StatusCode:
        """The status of an ext_proc call with one message."""
        options = [("grpc.ssl_target_name_override", SERVER)]
        where = f"127.0.0.1:{self.port}"
        channel = (
            grpc.aio.secure_channel(where, credentials, options)
            if credentials
            else grpc.aio.insecure_channel(where, options)
        )
        async with channel:
            call = channel.stream_stream(f"/{EXT_PROC}/Process")(timeout=PATIENCE)
            try:
                await call.write(headers("/a", end=True).SerializeToString())
                await call.done_writing()
                async for _ in call:
                    pass
            except grpc.aio.AioRpcError as error:
                return error.code()
            return await call.code()


@contextlib.asynccontextmanager
async def open_door(transport: str, folder: Path) -> AsyncIterator[Door]:
    """A transport that lets in `ENVOY` and `10.0.0.1` of AUTHORITY."""
    service, health = make_service(policy("all", ANY)), Health()
    server = TRANSPORTS[transport](service, health)
    chosen = read_settings(of_server(issue(folder / "server", SERVER), ENVOY, "10.0.0.1"), {})
    certificates = Certificates(chosen, service.metrics)
    where = await server.start(parse_address("127.0.0.1:0"), certificates)
    health.set(serving=True)
    try:
        yield Door(int(where.rpartition(":")[2]), service, transport == "fast")
    finally:
        await server.stop(0)


def credentials_of(files: Files | None) -> grpc.ChannelCredentials:
    trusted = AUTHORITY.cert_pem.bytes()
    if files is None:
        return grpc.ssl_channel_credentials(trusted)
    return grpc.ssl_channel_credentials(trusted, files.key.read_bytes(), files.cert.read_bytes())


def counted(door: Door) -> float:
    return sum(
        sample(door.service, "requests_total", policy="all", mode="enforce", action=action)
        for action in ("allow", "reject")
    )


# By client, what it shows, and what `fast` logs.
REFUSED: dict[str, tuple[Callable[[Path], grpc.ChannelCredentials | None], str]] = {
    "no certificate": (lambda _: credentials_of(None), "peer did not return a certificate"),
    "another authority": (
        lambda folder: credentials_of(issue_client(folder, ENVOY, by=STRANGER)),
        "unable to get local issuer certificate",
    ),
    "another name": (
        lambda folder: credentials_of(issue_client(folder, "stranger.example")),
        "no --tls-client-san is among the client's names: stranger.example",
    ),
    "no TLS": (lambda _: None, ""),
}


@pytest.mark.parametrize("who", REFUSED)
async def test_only_named_clients_of_the_authority_are_answered(
    transport: str, folder: Path, who: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The `fast` transport counts and logs the others."""
    caplog.set_level("INFO")
    show, logged = REFUSED[who]
    async with open_door(transport, folder) as door:
        status = await door.ask(show(folder))

        # A client that is refused while it still sends may report the end of the stream as
        # INTERNAL.
        assert status in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.PERMISSION_DENIED,
            grpc.StatusCode.INTERNAL,
        )
        assert counted(door) == 0
        if door.is_fast and logged:
            assert sample(door.service, "tls_refused_total") > 0  # grpc tries again
            assert logged in {
                record.fields["error"] for record in caplog.records if hasattr(record, "fields")
            }
        for number, name in enumerate((ENVOY, "10.0.0.1"), start=1):
            assert await door.ask(credentials_of(issue_client(folder, name))) is grpc.StatusCode.OK
            assert counted(door) == number


async def test_client_without_alpn_h2_is_refused(transport: str, folder: Path) -> None:
    async with open_door(transport, folder) as door:
        client = client_context(issue_client(folder, ENVOY))
        # TLS 1.3: the client is done before the server has looked
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", door.port, ssl=client, server_hostname=SERVER
            )
            assert await reader.read() == b""
            writer.close()


def client_context(files: Files | None) -> ssl.SSLContext:
    made = ssl.create_default_context()
    AUTHORITY.configure_trust(made)
    if files is not None:
        made.load_cert_chain(files.cert, files.key)
    return made


@pytest.mark.usefixtures("runner")
async def test_stalled_handshake_is_ended(folder: Path) -> None:
    server = FastServer(make_service(policy("all", ANY)), Health(), hello_seconds=0.05)
    where = await server.start(parse_address("127.0.0.1:0"), load(issue(folder / "server", SERVER)))
    for said in (b"", b"\x16\x03\x01\x02\x00"):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(where.rpartition(":")[2]))
        writer.write(said)
        async with asyncio.timeout(PATIENCE):
            assert await reader.read() == b""
        writer.close()
    await server.stop(0)


# ---- A running Loopguard, and Envoy


POLICIES = bundle(
    policy(
        "all", {"pathPrefix": "/"}, threshold_identical_requests=3, limit_keys=["header:x-user-id"]
    )
)


@contextlib.contextmanager
def mutual(folder: Path, transport: str, **more: Any) -> Iterator[tuple[Stack, Files, Files]]:  # noqa: ANN401  # of `stack`
    """Loopguard that lets in `ENVOY` alone, an Envoy with its certificate, and their files."""
    server, client = issue(folder / "server", SERVER), issue_client(folder, ENVOY)
    flags = on_command_line(of_server(server, ENVOY))
    options = {**of_envoy(client), "failure_mode": "deny", **more}
    with stack(POLICIES, "--transport", transport, *flags, **options) as made:
        yield made, server, client


def of_envoy(files: Files) -> dict[str, str]:
    return {
        "endpoint_cert": str(files.cert),
        "endpoint_key": str(files.key),
        "endpoint_ca": str(files.ca),
        "endpoint_san": SERVER,
    }


@pytest.fixture(scope="module", params=TRANSPORTS)
def guarded(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[Stack, Files, Files]]:
    with mutual(folder, request.param) as made:
        yield made


Guarded = tuple[Stack, Files, Files]


def test_envoy_with_the_right_certificate_is_guarded(guarded: Guarded) -> None:
    made, *_ = guarded

    statuses = [made.send("/loop", headers={"x-user-id": "ann"}).status for _ in range(4)]

    assert statuses == [200, 200, 429, 429]


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def test_envoy_rejects_a_server_of_another_name(guarded: Guarded, tmp_path: Path) -> None:
    made, _, client = guarded
    before = made.loopguard.metric("requests_total"), made.loopguard.metric("unmatched_total")
    options = {
        "upstream": made.upstream.address,
        "listen": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "endpoints": made.loopguard.address,
        "failure_mode": "deny",
        **of_envoy(client),
        "endpoint_san": "another.example",
    }
    write_policies(tmp_path, POLICIES)
    envoy = Envoy(tmp_path, read_options(EnvoyOptions, options))
    try:
        other = Stack(tmp_path, made.upstream, made.loopguard, envoy)
        # It waits for the first health check
        eventually(lambda: listens(envoy.port), "Envoy's listener")
        statuses = {other.send("/loop", headers={"x-user-id": "victim"}).status for _ in range(5)}
    finally:
        envoy.stop()

    assert statuses == {500}
    assert (
        made.loopguard.metric("requests_total"),
        made.loopguard.metric("unmatched_total"),
    ) == before


def test_healthcheck_needs_a_client_certificate(
    guarded: Guarded, capsys: pytest.CaptureFixture[str]
) -> None:
    made, server, client = guarded
    flags = [
        "--tls-ca",
        str(server.ca),
        "--tls-cert",
        str(client.cert),
        "--tls-key",
        str(client.key),
    ]
    asked = ["healthcheck", "--address", made.loopguard.address]

    codes = [
        main([*asked, *flags, "--tls-server-name", SERVER]),
        main([*asked, *flags]),
        main(asked),
    ]

    printed = capsys.readouterr()
    assert codes == [0, 1, 1]
    assert printed.out == "serving\n"
    assert [line.split(":")[0] for line in printed.err.splitlines()] == [
        "UNAVAILABLE",
        "UNAVAILABLE",
    ]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rotation_under_traffic_costs_no_request(tmp_path: Path, transport: str) -> None:
    with mutual(tmp_path, transport) as (made, server, client):
        statuses: list[int] = []
        stop = threading.Event()

        def send() -> None:
            while not stop.is_set():
                statuses.append(made.send(f"/{len(statuses)}", headers={"x-user-id": "ann"}).status)

        sender = threading.Thread(target=send)
        sender.start()
        try:
            before = seen_certificate(made.loopguard.address, client)
            issue(server.cert.parent, SERVER)
            eventually(
                lambda: seen_certificate(made.loopguard.address, client) != before, "the rotation"
            )
            so_far = len(statuses)
            eventually(lambda: len(statuses) > so_far + 20, "more traffic")
        finally:
            stop.set()
            sender.join()

        assert set(statuses) == {200}
        assert made.envoy.stat("cluster.loopguard.upstream_cx_total") == 1
        assert made.loopguard.metric("tls_reloads_total", result="ok") == 1


def test_clients_of_a_replaced_authority_are_refused(tmp_path: Path) -> None:
    """Also where they resume a session."""
    with mutual(tmp_path, "fast") as (made, server, client):
        context = client_context(client)
        with connect(made.loopguard.address, context) as secure:
            session = secure.session
        with connect(made.loopguard.address, context, session) as secure:
            assert secure.session_reused

        issue(server.cert.parent, SERVER, trusting=STRANGER)
        made.loopguard.wait_for("certificates rotated")

        with pytest.raises(OSError), connect(made.loopguard.address, context, session):  # noqa: PT011  # of TLS, or of a closed connection
            pass


@contextlib.contextmanager
def connect(
    where: str, context: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> Iterator[ssl.SSLSocket]:
    """A connection on which the server has answered a greeting.

    TLS 1.2 resumes sessions without a question.
    """
    context.set_alpn_protocols(["h2"])
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.socket(socket.AF_UNIX) as plain:
        plain.settimeout(PATIENCE)
        plain.connect(where.removeprefix("unix:"))
        with context.wrap_socket(plain, server_hostname=SERVER, session=session) as secure:
            secure.sendall(HELLO)
            if secure.recv(1) == b"":
                raise ConnectionResetError
            yield secure


def seen_certificate(where: str, client: Files) -> bytes | None:
    with connect(where, client_context(client)) as secure:
        return secure.getpeercert(binary_form=True)


@pytest.mark.parametrize(
    ("listen", "arguments", "warned"),
    [
        ("127.1:0", [], True),  # loopback, in an unusual spelling
        ("127.1:0", ["--allow-plaintext"], False),
        ("127.1:0", ["TLS"], False),
        ("127.0.0.1:0", [], False),
    ],
)
def test_plaintext_port_open_to_others_is_warned_about(
    tmp_path: Path, listen: str, arguments: list[str], warned: bool
) -> None:
    write_policies(tmp_path, POLICIES)
    flags = (
        on_command_line(of_server(issue(tmp_path / "server", SERVER)))
        if arguments == ["TLS"]
        else arguments
    )
    running = Loopguard(tmp_path, *flags, listen=listen)
    try:
        lines = [
            line
            for line in running.output().splitlines()
            if "anyone who can reach this port can submit requests" in line
        ]
    finally:
        running.stop()

    assert len(lines) == warned
