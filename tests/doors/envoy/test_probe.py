"""`loopguard check-envoy --probe`: what a live Envoy guards, request by request."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.main import main
from extproc.cli.probe import list_names
from tests.support.documents import bundle, policy
from tests.support.harness import Stack, envoy_version, stack
from tests.support.servers import listening

CHAT = bundle(policy("chat", {"pathExact": "/v1/chat"}, limit_keys=["header:x-user-id"]))
USER = ("-H", "x-user-id: ann")


Found = dict[str, tuple[str, str]]
"""The verdict and the reason for each request."""


def probe(made: Stack, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, Found]:
    """Exit code, and what is found."""
    url = f"http://127.0.0.1:{made.envoy.port}/v1/chat"
    code = main(["check-envoy", "--probe", url, "--loopguard", made.loopguard.admin_url, "--json", *flags])
    results: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["probes"]
    return code, {result["request"]: (result["verdict"], result["why"]) for result in results}


@pytest.fixture(scope="module")
def running() -> Iterator[Stack]:
    """A guarded path."""
    with stack(CHAT) as made:
        yield made


def test_a_probe_tells_what_is_guarded(running: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """Each request to a guarded path is counted; an upgrade and spellings that Envoy keeps, which are not, are named."""
    others = ("escaped slash", "upper case", "path parameter", "path parameter of the first segment")
    before = len(running.upstream.seen)

    code, found = probe(running, capsys, *USER)

    assert found == {
        **dict.fromkeys(list_names(), ("guarded", "counted by chat")),
        **dict.fromkeys(others, ("UNGUARDED", "Loopguard is not asked")),  # this upstream answers any path
        "WebSocket upgrade": ("UNGUARDED", "matches chat, but is not counted (chat: upgrade)"),
    }
    assert code == 1
    assert all(request.header("x-loopguard-probe") for request in running.upstream.seen[before:])
    accepted = [flag for name in (*others, "WebSocket upgrade") for flag in ("--ignore", name)]
    assert probe(running, capsys, *USER, *accepted)[0] == 0


def test_a_probe_finds_what_only_looks_guarded(capsys: pytest.CaptureFixture[str]) -> None:
    """Where large bodies pass uncounted, and where a filter does not send trailers, the table says so."""
    if envoy_version() < (1, 38):
        pytest.skip("needs Envoy 1.38")
    with stack(CHAT, body_mode="tolerant", buffer_limit=100_000) as running:
        _, found = probe(running, capsys, *USER)

    verdict, why = found["HTTP/1.1, large body, chunked"]
    assert (verdict, "chat" in why) == ("UNGUARDED", True)
    assert found["HTTP/1.1"] == ("guarded", "counted by chat")


def test_probe_tries_a_path_of_each_selected_api(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A listener without a path is probed on the paths of the policies."""
    document = bundle(policy("local", {"apis": ["ollama"]}, limit_keys=["header:x-user-id"]))
    file = tmp_path / "policies.json"
    file.write_text(json.dumps(document))
    with stack(document) as running:
        listener, admin = f"http://127.0.0.1:{running.envoy.port}", running.loopguard.admin_url
        main(["check-envoy", "--probe", listener, "--loopguard", admin, "--policy", str(file), "--json", *USER])

    found = {each["request"]: (each["path"], each["verdict"]) for each in json.loads(capsys.readouterr().out)["probes"]}
    assert found["HTTP/1.1"] == ("/api/chat", "guarded")


def switch_protocols(client: socket.socket) -> None:
    """An upstream that accepts each handshake, and answers all else with 200; Envoy must not use a connection again."""
    head = client.recv(65_536)
    upgrade = b"101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket"
    client.sendall(
        b"HTTP/1.1 %b\r\n\r\n" % (upgrade if b"sec-websocket" in head else b"200 OK\r\nconnection: close\r\ncontent-length: 0")
    )


def test_probe_opens_websockets(capsys: pytest.CaptureFixture[str]) -> None:
    """They pass uncounted, as the reason says; a handshake is all that is sent."""
    with listening(switch_protocols) as upstream, stack(CHAT, upstream=upstream) as made:
        _, found = probe(made, capsys, *USER, "--probe-size", "1000")

    assert found["WebSocket upgrade"] == ("UNGUARDED", "matches chat, but is not counted (chat: upgrade)")


def test_a_probe_of_a_route_that_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    """A route without Loopguard is unguarded, whatever the policies say."""
    with stack(bundle(policy("other", {"pathExact": "/v2"}))) as running:
        code, found = probe(running, capsys, *USER)

    assert (code, found["HTTP/1.1"]) == (1, ("UNGUARDED", "Loopguard is not asked"))


def test_a_request_without_a_caller_is_not_counted(running: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """The probe needs the credentials of a client; the reason says so."""
    code, found = probe(running, capsys, "--probe-size", "1000")

    assert (code, found["HTTP/1.1"][0]) == (1, "UNGUARDED")
    assert "chat: " in found["HTTP/1.1"][1]
