"""Client authentication: mutual TLS on the port, on both transports, with real certificates, a real Envoy and rotated files."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
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
from extproc.settings import SubjectName, parse_address, parse_subject_name, parse_subject_names, read_settings
from extproc.transport.fast import FastServer
from extproc.transport.health import EXT_PROC, Health
from extproc.transport.tls import Certificates
from tests.support.documents import bundle, policy
from tests.support.engine import ANY
from tests.support.harness import PATIENCE, Envoy, Loopguard, Stack, eventually, stack, write_policies
from tests.support.http2 import HELLO
from tests.support.messages import headers
from tests.support.service import make_service, sample
from tests.support.transport import LOOPS, TRANSPORTS

SERVER = "guard.example"
ENVOY = "spiffe://cluster.local/ns/gateways/sa/envoy"


class Files(NamedTuple):
    """Where a certificate, its key and an authority are."""

    cert: Path
    key: Path
    ca: Path


AUTHORITY = trustme.CA()
STRANGER = trustme.CA()


def issue(folder: Path, *names: str, by: trustme.CA = AUTHORITY, trusting: trustme.CA = AUTHORITY, **more: Any) -> Files:  # noqa: ANN401  # of issue_cert
    """Write a certificate, as a rotation by renaming does it."""
    folder.mkdir(exist_ok=True)
    made = by.issue_cert(*names, **more)
    chain = b"".join(blob.bytes() for blob in made.cert_chain_pems)
    files = Files(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
    for file, text in zip(files, (chain, made.private_key_pem.bytes(), trusting.cert_pem.bytes()), strict=True):
        fresh = file.with_suffix(".tmp")
        fresh.write_bytes(text)
        fresh.replace(file)
    return files


def issue_client(folder: Path, name: str, by: trustme.CA = AUTHORITY) -> Files:
    """A client's certificate, for a URI as well, which trustme cannot issue."""
    files = issue(folder / name.replace("/", "-"), "10.0.0.1" if "://" in name else name, by=by)
    if "://" in name:
        files.cert.write_bytes(reissue(files.cert.read_bytes(), x509.UniformResourceIdentifier(name), by))
    return files


def reissue(chain: bytes, name: x509.GeneralName, by: trustme.CA) -> bytes:
    """The same certificate, made out to another name."""
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
    """The flags of `serve`, by the names of its settings."""
    chosen = {"tls_cert": str(files.cert), "tls_key": str(files.key), "tls_client_ca": str(files.ca)}
    return chosen | ({"tls_client_san": ",".join(san)} if san else {})


def on_command_line(chosen: dict[str, str]) -> list[str]:
    """The same as arguments."""
    return [word for name, value in chosen.items() for word in (f"--{name.replace('_', '-')}", value)]


def load(files: Files, metrics: Metrics | None = None) -> Certificates:
    """Certificates as a server has them."""
    return Certificates(read_settings(of_server(files), {}), metrics or Metrics())


def read_metric(metrics: Metrics, name: str, **labels: str) -> float:
    """A metric's value."""
    return metrics.registry.get_sample_value(f"loopguard_{name}", labels) or 0.0


def count_rotations(metrics: Metrics) -> list[float]:
    """How many failed, and how many did not."""
    return [read_metric(metrics, "tls_reloads_total", result=result) for result in ("error", "ok")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For certificates that are not rotated."""
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
def test_a_name_is_of_the_kind_that_it_looks_like(text: str, name: SubjectName) -> None:
    """DNS names, IP addresses and URIs are told apart, and compared in one spelling."""
    assert parse_subject_name(text) == name


@pytest.mark.parametrize("text", ["*.example", "a b", "-a", "a/b"])
def test_what_is_no_name_is_told(text: str) -> None:
    """A wildcard, or what no certificate is made out to, is an error that says what would be right."""
    with pytest.raises(ValueError, match="must be a DNS name, an IP address or a URI such as spiffe://"):
        parse_subject_names(f"good.example,{text}")


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("127.0.0.1:1", True),
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
def test_which_addresses_no_stranger_reaches(text: str, local: bool) -> None:
    """Loopback and Unix sockets are local, anything else may be reached from elsewhere."""
    assert parse_address(text).is_local is local


# ---- Flags


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--tls-cert", "c"], "--tls-cert needs --tls-key and --tls-client-ca as well"),
        (["--tls-cert", "c", "--tls-key", "k"], "--tls-cert needs --tls-client-ca as well"),
        (["--tls-client-ca", "a"], "--tls-client-ca needs --tls-cert and --tls-key as well"),
        (["--tls-client-san", "a"], "--tls-client-san needs --tls-cert and --tls-key and --tls-client-ca as well"),
        (["--tls-client-san", "a b"], "--tls-client-san must be a DNS name, an IP address or a URI such as "),
    ],
)
def test_half_of_tls_is_a_usage_error(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags that mean nothing without others say which."""
    code = main(["serve", "--policy", "p", *arguments])

    assert (code, capsys.readouterr().err.startswith(f"loopguard: {line}")) == (2, True)


# ---- Files


def encrypted(key: Path) -> bytes:
    """A private key with a passphrase."""
    plain = load_pem_private_key(key.read_bytes(), None)
    return plain.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"hush"))


YESTERDAY = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)


def expire(files: Files) -> None:
    """A certificate of the past."""
    issue(files.cert.parent, SERVER, not_before=YESTERDAY - dt.timedelta(days=1), not_after=YESTERDAY)


BROKEN: dict[str, tuple[Callable[[Files], object], str]] = {
    "no certificate": (lambda files: files.cert.unlink(), "--tls-cert {cert}: No such file or directory"),
    "no key": (lambda files: files.key.unlink(), "--tls-key {key}: No such file or directory"),
    "no authority": (lambda files: files.ca.unlink(), "--tls-client-ca {ca}: No such file or directory"),
    "empty certificate": (lambda files: files.cert.write_bytes(b""), "--tls-cert {cert}: contains no PEM certificate"),
    "rubbish key": (lambda files: files.key.write_bytes(b"\x00\xff"), "--tls-key {key}: contains no PEM private key"),
    "rubbish authority": (lambda files: files.ca.write_bytes(b"hello"), "--tls-client-ca {ca}: contains no PEM certificate"),
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
def test_a_broken_file_is_told_and_its_rotation_changes_nothing(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start that is an error; later the last good ones stay in use, and the next good ones are taken."""
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
    assert [vars(record)["fields"]["error"] for record in caplog.records if record.levelname == "ERROR"] == [told]
    assert count_rotations(metrics) == [1, 1]
    assert certificates.pem.chain == files.cert.read_bytes() != before.chain


def test_a_rotation_is_taken_when_it_has_settled(tmp_path: Path) -> None:
    """A certificate whose key has not been written yet is no failure."""
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


def test_the_swap_of_a_link_is_a_rotation(tmp_path: Path) -> None:
    """A Secret that the kubelet has rewritten is loaded, and the gauge shows when its certificate expires."""
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


def test_a_handshake_is_one(folder: Path) -> None:
    """A client cannot make the server repeat its handshake on a connection (CVE-2011-1473)."""
    certificates = load(issue(folder / "server", SERVER))

    assert certificates.context.options & ssl.OP_NO_RENEGOTIATION


# ---- Both transports


class Door(NamedTuple):
    """A transport that listens with TLS."""

    port: int
    service: Any

    async def ask(self, credentials: grpc.ChannelCredentials | None) -> grpc.StatusCode:
        """The status of an ext_proc call with one message."""
        options = [("grpc.ssl_target_name_override", SERVER)]
        where = f"127.0.0.1:{self.port}"
        channel = (
            grpc.aio.secure_channel(where, credentials, options) if credentials else grpc.aio.insecure_channel(where, options)
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


@pytest.fixture(params=TRANSPORTS)
def at_door(request: pytest.FixtureRequest, folder: Path) -> Callable[[Callable[[Door], Awaitable[None]]], None]:
    """Run a scenario against each transport, which lets in `ENVOY` and `10.0.0.1` of AUTHORITY."""

    def scenario(steps: Callable[[Door], Awaitable[None]]) -> None:
        async def run() -> None:
            service, health = make_service(policy("all", ANY)), Health()
            server = TRANSPORTS[request.param](service, health)
            chosen = read_settings(of_server(issue(folder / "server", SERVER), ENVOY, "10.0.0.1"), {})
            where = await server.start(parse_address("127.0.0.1:0"), Certificates(chosen, service.metrics))
            health.set(serving=True)
            try:
                await steps(Door(int(where.rpartition(":")[2]), service))
            finally:
                await server.stop(0)

        asyncio.run(run())

    return scenario


AtDoor = Callable[[Callable[[Door], Awaitable[None]]], None]


def credentials_of(files: Files | None) -> grpc.ChannelCredentials:
    """What a client shows."""
    trusted = AUTHORITY.cert_pem.bytes()
    if files is None:
        return grpc.ssl_channel_credentials(trusted)
    return grpc.ssl_channel_credentials(trusted, files.key.read_bytes(), files.cert.read_bytes())


@pytest.mark.parametrize("name", [ENVOY, "10.0.0.1"])
def test_the_right_certificate_may_ask(at_door: AtDoor, folder: Path, name: str) -> None:
    """A client of the authority with one of the names is answered."""

    async def steps(door: Door) -> None:
        assert await door.ask(credentials_of(issue_client(folder, name))) is grpc.StatusCode.OK
        assert counted(door) == 1

    at_door(steps)


def counted(door: Door) -> float:
    """Requests that the service has counted."""
    return sum(
        sample(door.service, "requests_total", policy="all", mode="enforce", action=action) for action in ("allow", "reject")
    )


@pytest.mark.parametrize("who", ["no certificate", "another authority", "another name", "no TLS"])
def test_no_other_client_can_ask(at_door: AtDoor, folder: Path, who: str) -> None:
    """No certificate, one of another authority, one for another name, or no TLS at all: nothing is counted."""
    shown = {
        "no certificate": credentials_of(None),
        "another authority": credentials_of(issue_client(folder, ENVOY, by=STRANGER)),
        "another name": credentials_of(issue_client(folder, "stranger.example")),
    }

    async def steps(door: Door) -> None:
        status = await door.ask(shown.get(who))

        # A client that is refused while it still sends may report the end of the stream as INTERNAL.
        assert status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INTERNAL)
        assert counted(door) == 0
        assert await door.ask(credentials_of(issue_client(folder, ENVOY))) is grpc.StatusCode.OK
        assert counted(door) == 1

    at_door(steps)


def test_a_client_has_to_speak_http2(at_door: AtDoor, folder: Path) -> None:
    """One that does not say so by ALPN is not let in, whatever its certificate."""

    async def steps(door: Door) -> None:
        client = client_context(issue_client(folder, ENVOY))
        with contextlib.suppress(OSError):  # TLS 1.3: the client is done before the server has looked
            reader, writer = await asyncio.open_connection("127.0.0.1", door.port, ssl=client, server_hostname=SERVER)
            assert await reader.read() == b""
            writer.close()

    at_door(steps)


def client_context(files: Files | None) -> ssl.SSLContext:
    """A client's context that trusts AUTHORITY."""
    made = ssl.create_default_context()
    AUTHORITY.configure_trust(made)
    if files is not None:
        made.load_cert_chain(files.cert, files.key)
    return made


@pytest.mark.parametrize("new_loop", LOOPS.values(), ids=LOOPS)
def test_a_handshake_that_stalls_is_ended(folder: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """A peer that connects and says nothing, or half of its first message, is closed when its time is over."""

    async def run() -> None:
        server = FastServer(make_service(policy("all", ANY)), Health(), hello_seconds=0.05)
        where = await server.start(parse_address("127.0.0.1:0"), load(issue(folder / "server", SERVER)))
        for said in (b"", b"\x16\x03\x01\x02\x00"):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(where.rpartition(":")[2]))
            writer.write(said)
            async with asyncio.timeout(PATIENCE):
                assert await reader.read() == b""
            writer.close()
        await server.stop(0)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


def test_a_refusal_is_counted_and_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A client that `fast` does not let in is counted in a metric, and the log says why."""
    caplog.set_level("INFO")

    async def run() -> Metrics:
        metrics = Metrics()
        server = TRANSPORTS["fast"](make_service(policy("all", ANY)), Health())
        chosen = read_settings(of_server(issue(folder / "server", SERVER), ENVOY), {})
        where = await server.start(parse_address("127.0.0.1:0"), Certificates(chosen, metrics))
        door = Door(int(where.rpartition(":")[2]), None)
        for files in (None, issue_client(folder, ENVOY, by=STRANGER), issue_client(folder, "stranger.example")):
            await door.ask(credentials_of(files))
        await server.stop(0)
        return metrics

    assert read_metric(asyncio.run(run()), "tls_refused_total") >= 3  # grpc tries again
    told = {record.fields["error"] for record in caplog.records if hasattr(record, "fields")}
    assert told >= {
        "peer did not return a certificate",
        "unable to get local issuer certificate",
        "no --tls-client-san is among the client's names: stranger.example",
    }


# ---- A running Loopguard, and Envoy


POLICIES = bundle(policy("all", {"pathPrefix": "/"}, threshold_identical_requests=3, limit_keys=["header:x-user-id"]))


@contextlib.contextmanager
def mutual(folder: Path, transport: str, **more: Any) -> Iterator[tuple[Stack, Files, Files]]:  # noqa: ANN401  # of `stack`
    """Loopguard that lets in `ENVOY` alone, and an Envoy that has its certificate; with the files of both."""
    server, client = issue(folder / "server", SERVER), issue_client(folder, ENVOY)
    flags = on_command_line(of_server(server, ENVOY))
    options = {**of_envoy(client), "failure_mode": "deny", **more}
    with stack(POLICIES, "--transport", transport, *flags, **options) as made:
        yield made, server, client


def of_envoy(files: Files) -> dict[str, str]:
    """The flags of `envoy-config`, by name."""
    return {
        "endpoint_cert": str(files.cert),
        "endpoint_key": str(files.key),
        "endpoint_ca": str(files.ca),
        "endpoint_san": SERVER,
    }


@pytest.fixture(scope="module", params=TRANSPORTS)
def guarded(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[Stack, Files, Files]]:
    """One for all tests that rotate nothing."""
    with mutual(folder, request.param) as made:
        yield made


Guarded = tuple[Stack, Files, Files]


def test_an_envoy_with_the_right_certificate_is_guarded(guarded: Guarded) -> None:
    """Requests pass through Loopguard, and a loop is refused."""
    made, *_ = guarded

    statuses = [made.send("/loop", headers={"x-user-id": "ann"}).status for _ in range(4)]

    assert statuses == [200, 200, 429, 429]


def listens(port: int) -> bool:
    """Whether connections are accepted there."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def test_an_envoy_takes_no_other_server_for_loopguard(guarded: Guarded, tmp_path: Path) -> None:
    """One whose certificate has another name is asked nothing."""
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
        eventually(lambda: listens(envoy.port), "Envoy's listener")  # it waits for the first health check
        statuses = {other.send("/loop", headers={"x-user-id": "victim"}).status for _ in range(5)}
    finally:
        envoy.stop()

    assert statuses == {500}
    assert (made.loopguard.metric("requests_total"), made.loopguard.metric("unmatched_total")) == before


def test_a_health_check_shows_its_certificate(guarded: Guarded, capsys: pytest.CaptureFixture[str]) -> None:
    """`loopguard healthcheck` asks over mutual TLS, and is told nothing without a certificate."""
    made, server, client = guarded
    flags = ["--tls-ca", str(server.ca), "--tls-cert", str(client.cert), "--tls-key", str(client.key)]
    asked = ["healthcheck", "--address", made.loopguard.address]

    codes = [main([*asked, *flags, "--tls-server-name", SERVER]), main([*asked, *flags]), main(asked)]

    printed = capsys.readouterr()
    assert codes == [0, 1, 1]
    assert printed.out == "serving\n"
    assert [line.split(":")[0] for line in printed.err.splitlines()] == ["UNAVAILABLE", "UNAVAILABLE"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rotation_under_traffic_costs_no_request_anything(tmp_path: Path, transport: str) -> None:
    """New connections see the new certificate, Envoy's old one continues, and every request is answered."""
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
            eventually(lambda: seen_certificate(made.loopguard.address, client) != before, "the rotation")
            so_far = len(statuses)
            eventually(lambda: len(statuses) > so_far + 20, "more traffic")
        finally:
            stop.set()
            sender.join()

        assert set(statuses) == {200}
        assert made.envoy.stat("cluster.loopguard.upstream_cx_total") == 1
        assert made.loopguard.metric("tls_reloads_total", result="ok") == 1


def test_clients_of_a_new_authority_replace_those_of_the_old_one(tmp_path: Path) -> None:
    """Once the authority is rotated, new connections of its predecessor's clients are refused, resumed sessions as well."""
    with mutual(tmp_path, "fast") as (made, server, client):
        context = client_context(client)
        context.set_alpn_protocols(["h2"])
        context.maximum_version = ssl.TLSVersion.TLSv1_2  # in which sessions are resumed without being asked for anything
        session, _ = greet(made.loopguard.address, context)
        assert greet(made.loopguard.address, context, session)[1]

        issue(server.cert.parent, SERVER, trusting=STRANGER)
        made.loopguard.wait_for("certificates rotated")

        with pytest.raises(OSError):  # noqa: PT011  # of TLS, or of a connection that is gone
            greet(made.loopguard.address, context, session)


def greet(
    where: str, context: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> tuple[ssl.SSLSession | None, bool | None]:
    """Say hello in HTTP/2 on a connection; its session, and whether it is the one that was given.

    Raises:
        OSError: it was refused.
    """
    with socket.socket(socket.AF_UNIX) as plain:
        plain.settimeout(PATIENCE)
        plain.connect(where.removeprefix("unix:"))
        with context.wrap_socket(plain, server_hostname=SERVER, session=session) as secure:
            secure.sendall(HELLO)
            if secure.recv(1) == b"":
                raise ConnectionResetError
            return secure.session, secure.session_reused


def seen_certificate(where: str, client: Files) -> bytes | None:
    """What a new connection is shown."""
    context = client_context(client)
    context.set_alpn_protocols(["h2"])
    with socket.socket(socket.AF_UNIX) as plain:
        plain.settimeout(PATIENCE)
        plain.connect(where.removeprefix("unix:"))
        with context.wrap_socket(plain, server_hostname=SERVER) as secure:
            return secure.getpeercert(binary_form=True)


@pytest.mark.parametrize(
    ("listen", "arguments", "warned"),
    [
        ("127.1:0", [], True),  # loopback, in a spelling that does not look it
        ("127.1:0", ["--allow-plaintext"], False),
        ("127.1:0", ["TLS"], False),
        ("127.0.0.1:0", [], False),
        ("", [], False),
    ],
)
def test_a_port_for_strangers_is_warned_about(tmp_path: Path, listen: str, arguments: list[str], warned: bool) -> None:
    """One line at the start says what to do, unless TLS, the address or the operator say who may ask."""
    write_policies(tmp_path, POLICIES)
    flags = on_command_line(of_server(issue(tmp_path / "server", SERVER))) if arguments == ["TLS"] else arguments
    running = Loopguard(tmp_path, *flags, listen=listen)
    try:
        lines = [line for line in running.output().splitlines() if "anyone who can reach this port can submit requests" in line]
    finally:
        running.stop()

    assert len(lines) == warned


def test_a_bad_file_keeps_it_from_starting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command exits 2 with one line that names the file."""
    write_policies(tmp_path, POLICIES)
    files = issue(tmp_path / "server", SERVER)
    files.key.unlink()

    code = main(["serve", "--policy", str(tmp_path / "policies"), *on_command_line(of_server(files))])

    assert (code, capsys.readouterr().err) == (2, f"loopguard: --tls-key {files.key}: No such file or directory\n")
