"""LOOPGUARD_ADMIN names the server that commands ask, or the command says why it cannot."""

from __future__ import annotations

import pytest

from extproc.cli.main import main
from extproc.errors import UsageError
from extproc.operator.admin.client import AdminClient, find_admin, open_clients

_OWN = "LOOPGUARD_ADMIN"


@pytest.mark.parametrize("url", ["http://10.0.0.1:8000", "https://gateway.example", "http://[::1]:9900/", "unix:/run/a.sock"])
def test_urls_are_taken_as_they_are(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever --admin takes, the variable takes."""
    monkeypatch.delenv("LOOPGUARD_ADMIN_SOCKET", raising=False)
    monkeypatch.setenv(_OWN, url)

    (client,) = open_clients(None)
    assert client.url == url
    client.close()


@pytest.mark.parametrize(
    "text",
    ["nonsense", "10.0.0.1", "http://", "ftp://h:1", "http://h:port", "http://a:1 http://b:1", "h:99999", "unix:a.sock", " "],
)
@pytest.mark.parametrize("command", ["allow --caller ann", "overrides", "top", "doctor", "sessions", "canary status"])
def test_nonsense_is_an_error_of_every_command(
    command: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No order goes to the default server instead, and the message names the variable."""
    monkeypatch.delenv("LOOPGUARD_ADMIN_SOCKET", raising=False)
    monkeypatch.setenv(_OWN, text)

    assert main(command.split()) == 2
    assert capsys.readouterr().err.startswith(f"loopguard: {_OWN} must be http://HOST:PORT or unix:/PATH")


def test_a_socket_that_is_no_path_is_an_error() -> None:
    """The message names its variable."""
    with pytest.raises(UsageError, match=r"^LOOPGUARD_ADMIN_SOCKET must be"):
        AdminClient(*find_admin({"LOOPGUARD_ADMIN_SOCKET": "a.sock"}))


@pytest.mark.parametrize("name", ["LOOPGUARD_ADMIN_URL", "LOOPGUARD_ADMINS", "LOOPGUARD_ADMIN_ADDRESS"])
def test_a_misspelt_variable_is_an_error(name: str) -> None:
    """It may name the server that is meant; with the right one beside it, nothing is in doubt."""
    with pytest.raises(UsageError, match=f"^{name} is not a setting"):
        find_admin({name: "http://10.0.0.1:8000"})
    assert find_admin({name: "", _OWN: "http://a:1"}) == ("http://a:1", _OWN)


@pytest.mark.parametrize("name", ["LOOPGUARD_ADMIN_SERVICE_HOST", "LOOPGUARD_ADMIN_PORT", "LOOPGUARD_ADMIN_PORT_9900_TCP"])
def test_variables_of_a_kubernetes_service_are_no_error(name: str) -> None:
    """Kubernetes sets them in each pod for a Service called loopguard-admin."""
    assert find_admin({name: "tcp://10.0.0.1:9900"})[0] == "http://127.0.0.1:9900"
