"""`loopguard check-envoy --probe`: what a live Envoy guards, request by request."""

from __future__ import annotations

import copy
import json
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme

from extproc.cli.main import main
from extproc.cli.probe.spellings import list_names
from tests.support.documents import bundle, policy, read_yaml
from tests.support.envoy_config import find_places
from tests.support.harness import Stack, envoy_version, stack
from tests.support.servers import listening

CHAT = bundle(policy("chat", {"pathExact": "/v1/chat"}, limit_keys=["header:x-user-id"]))
USER = ("-H", "x-user-id: ann")


def probe(
    running: Stack, capsys: pytest.CaptureFixture[str], *flags: str, scheme: str = "http", port: int = 0
) -> tuple[int, dict[str, tuple[str, str]]]:
    """Exit code, and the verdict and the reason for each request."""
    url = f"{scheme}://127.0.0.1:{port or running.envoy.port}/v1/chat"
    code = main(["check-envoy", "--probe", url, "--loopguard", running.loopguard.admin_url, "--json", *flags])
    results: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["probes"]
    return code, {result["request"]: (result["verdict"], result["why"]) for result in results}


def tell_unguarded(found: dict[str, tuple[str, str]]) -> dict[str, str]:
    """Why requests pass unguarded."""
    return {name: why for name, (verdict, why) in found.items() if verdict == "UNGUARDED"}


def test_a_probe_tells_what_is_guarded(capsys: pytest.CaptureFixture[str]) -> None:
    """Every spelling of a guarded path is counted, or does not pass; other spellings and upgrades are named."""
    with stack(CHAT) as running:
        before = len(running.upstream.seen)
        code, found = probe(running, capsys, *USER)
        seen = running.upstream.seen[before:]
        accepted, _ = probe(running, capsys, *USER, *(flag for name in tell_unguarded(found) for flag in ("--ignore", name)))

    guarded = {name for name, (verdict, _) in found.items() if verdict == "guarded"}
    assert guarded == {name for name in list_names() if "HTTP/3" not in name} - {
        *tell_unguarded(found),
        "WebSocket over HTTP/2",
    }
    assert found["HTTP/3"] == ("stopped", "the gateway does not offer HTTP/3")
    assert found["WebSocket over HTTP/2"][0] == "stopped"  # by Envoy, which is not told to take it
    assert found["large body"] == ("guarded", "counted by chat")
    assert {*tell_unguarded(found)} == {"trailing slash", "upper case", "%2F", "WebSocket upgrade"}
    assert code == 1
    assert accepted == 0
    assert all(request.header("x-loopguard-probe") for request in seen)


def test_a_probe_finds_what_only_looks_guarded(capsys: pytest.CaptureFixture[str]) -> None:
    """Where large bodies pass uncounted, and where a filter does not send trailers, the table says so."""
    if envoy_version() < (1, 38):
        pytest.skip("needs Envoy 1.38")
    with stack(CHAT, body_mode="tolerant", buffer_limit=100_000) as running:
        _, found = probe(running, capsys, *USER)

    assert "chat" in tell_unguarded(found)["large body, chunked"]
    assert found["HTTP/1.1"] == ("guarded", "counted by chat")


def allow_connect(config: str) -> str:
    """A gateway that takes WebSockets over HTTP/2, too."""
    options = "http2_protocol_options:\n            initial_stream"
    assert options in config
    return config.replace(options, options.replace("initial", "allow_connect: true\n            initial"), 1)


def switch_protocols(client: socket.socket) -> None:
    """An upstream that accepts each handshake, and answers all else with 200; Envoy must not use a connection again."""
    head = client.recv(65_536)
    upgrade = b"101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket"
    client.sendall(
        b"HTTP/1.1 %b\r\n\r\n" % (upgrade if b"sec-websocket" in head else b"200 OK\r\nconnection: close\r\ncontent-length: 0")
    )


def test_a_probe_opens_websockets(capsys: pytest.CaptureFixture[str]) -> None:
    """They pass uncounted, over HTTP/1.1 and over HTTP/2, as the reason says; a handshake is all that is sent."""
    with listening(switch_protocols) as upstream, stack(CHAT, upstream=upstream, edit=allow_connect) as running:
        _, found = probe(running, capsys, *USER, "--probe-size", "1000")

    unguarded = tell_unguarded(found)
    assert {unguarded[name] for name in ("WebSocket upgrade", "WebSocket over HTTP/2")} == {
        "matches chat, but is not counted (chat: upgrade)"
    }


def test_a_probe_of_a_route_that_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    """A route without Loopguard is unguarded in every spelling, whatever the policies say."""
    with stack(bundle(policy("other", {"pathExact": "/v2"}))) as running:
        code, found = probe(running, capsys, *USER)

    assert (code, found["HTTP/1.1"]) == (1, ("UNGUARDED", "Loopguard is not asked"))


def test_a_request_without_a_caller_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """The probe needs the credentials of a client; the reason says so."""
    with stack(CHAT) as running:
        code, found = probe(running, capsys)

    assert code == 1
    assert found["HTTP/1.1"][0] == "UNGUARDED"
    assert "chat: " in found["HTTP/1.1"][1]


def serve_quic(text: str, folder: Path, *, advertised: bool, guarded: bool, window: int = 2**24) -> str:
    """A gateway with TLS and a listener for HTTP/3, each with the same routes."""
    document = read_yaml(text)
    (over_tcp,) = document["static_resources"]["listeners"]
    with socket.socket(type=socket.SOCK_DGRAM) as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    over_udp = copy.deepcopy(over_tcp)
    options = {"quic_protocol_options": {"initial_stream_window_size": window}}
    address = {"socket_address": {"protocol": "UDP", "address": "127.0.0.1", "port_value": port}}
    over_udp |= {"name": "quic", "address": address, "udp_listener_config": {"quic_options": options}}
    for listener, kind, protocols in ((over_tcp, "tls", ["h2", "http/1.1"]), (over_udp, "quic", ["h3"])):
        (chain,) = listener["filter_chains"]
        files = {"certificate_chain": {"filename": f"{folder}/chain.pem"}, "private_key": {"filename": f"{folder}/key.pem"}}
        context: dict[str, Any] = {"common_tls_context": {"tls_certificates": [files], "alpn_protocols": protocols}}
        message, kinds = "tls.v3.DownstreamTlsContext", "type.googleapis.com/envoy.extensions.transport_sockets"
        if kind == "quic":
            message, context = "quic.v3.QuicDownstreamTransport", {"downstream_tls_context": context}
        typed = {"@type": f"{kinds}.{message}", **context}
        chain["transport_socket"] = {"name": f"envoy.transport_sockets.{kind}", "typed_config": typed}
    (manager,) = find_places(over_udp, "filter_chains[].filters[].typed_config")
    manager |= {"codec_type": "HTTP3", "http3_protocol_options": {"allow_extended_connect": True}}
    if not guarded:
        manager["http_filters"] = manager["http_filters"][-1:]
        for route in find_places(manager, "route_config.virtual_hosts[].routes[]"):
            route.pop("typed_per_filter_config", None)
    if advertised:
        (routes,) = find_places(over_tcp, "filter_chains[].filters[].typed_config.route_config")
        routes["response_headers_to_add"] = [{"header": {"key": "alt-svc", "value": f'h3=":{port}"; ma=86400'}}]
    document["static_resources"]["listeners"].append(over_udp)
    return json.dumps(document)


@pytest.fixture
def certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a gateway's certificate, which clients accept."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "chain.pem"))
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    return tmp_path


def test_http3_is_probed_like_the_rest(certificates: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over HTTP/3, which the gateway advertises, each spelling has the verdict that it has over HTTP/1.1 and HTTP/2."""
    with stack(CHAT, edit=partial(serve_quic, folder=certificates, advertised=True, guarded=True)) as running:
        _, found = probe(running, capsys, *USER, scheme="https")

    assert {*found} == {*list_names()}
    assert found["HTTP/3"] == found["HTTP/3, large body"] == ("guarded", "counted by chat")
    for name in found:
        twin = name.replace("HTTP/3, trailers", "HTTP/2, trailers").removeprefix("HTTP/3, ")
        assert "WebSocket" in name or found[name] == found[twin], name
    assert found["WebSocket over HTTP/3"] == ("UNGUARDED", "matches chat, but is not counted (chat: upgrade)")


def test_a_listener_for_http3_without_loopguard_is_found(certificates: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing asks Loopguard about what comes over HTTP/3: the probe says so, and so does a look at the configuration."""
    with stack(CHAT, edit=partial(serve_quic, folder=certificates, advertised=True, guarded=False)) as running:
        code, found = probe(running, capsys, *USER, scheme="https")
        main(["check-envoy", "--json", f"{running.folder}/envoy.yaml"])
        problems = {each["code"]: each["problem"] for each in json.loads(capsys.readouterr().out)["findings"]}

    assert (code, found["HTTP/1.1"][0], found["HTTP/3"]) == (1, "guarded", ("UNGUARDED", "Loopguard is not asked"))
    assert problems["second-listener"].startswith("quic 127.0.0.1:")


def test_a_port_for_http3_may_be_named(
    certificates: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--http3` asks a listener that nothing advertises, at the port of the URL, if its certificate is good."""
    edit = partial(serve_quic, folder=certificates, advertised=False, guarded=True, window=2**20)
    with stack(CHAT, edit=edit) as running:
        (port,) = (
            entry["local_address"]["socket_address"]["port_value"]
            for entry in json.loads(running.envoy.admin("/listeners?format=json"))["listener_statuses"]
            if entry["name"] == "quic"
        )
        _, found = probe(running, capsys, *USER, "--http3", scheme="https", port=port)
        _, without = probe(running, capsys, *USER, "--probe-size", "1000", scheme="https")
        monkeypatch.setenv("SSL_CERT_FILE", f"{certificates}/chain.pem")
        _, distrusted = probe(running, capsys, *USER, "--http3", scheme="https", port=port)

    assert (found["HTTP/1.1"][0], found["HTTP/3"][0]) == ("stopped", "guarded")
    refused = "too_large" if envoy_version() >= (1, 38) else "aborted"  # 1.36 resets the stream
    assert refused in found["HTTP/3, large body"][1]  # for the stream's window
    assert without["HTTP/3"] == ("stopped", "the gateway does not offer HTTP/3")
    assert "HTTP/3, query" not in without
    assert distrusted["HTTP/3"] == ("stopped", "unable to get local issuer certificate")
