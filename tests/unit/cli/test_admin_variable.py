"""LOOPGUARD_ADMIN names the server that commands ask; a value that cannot be used is an error."""

from __future__ import annotations

import pytest

from extproc.operator.admin.client import find_admin, open_clients
from tests.support.command import Run

_OWN = "LOOPGUARD_ADMIN"


@pytest.mark.parametrize("url", ["http://10.0.0.1:8000", "https://gateway.example", "http://[::1]:9900/", "unix:/run/a.sock"])
def test_url_in_the_variable_is_used(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOOPGUARD_ADMIN_SOCKET", raising=False)
    monkeypatch.setenv(_OWN, url)

    (client,) = open_clients(None)
    assert client.url == url
    client.close()


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        *(
            (
                {name: "tcp://10.0.0.1:9900"},
                "http://127.0.0.1:9900",
            )  # Kubernetes sets them for a Service called loopguard-admin
            for name in ("LOOPGUARD_ADMIN_SERVICE_HOST", "LOOPGUARD_ADMIN_PORT", "LOOPGUARD_ADMIN_PORT_9900_TCP")
        ),
        ({"LOOPGUARD_ADMINS": "", _OWN: "http://a:1"}, "http://a:1"),
    ],
)
def test_variables_of_kubernetes_are_ignored(environ: dict[str, str], found: str) -> None:
    assert find_admin(environ)[0] == found


NONSENSE = [
    "nonsense",
    "10.0.0.1",
    "http://",
    "ftp://h:1",
    "http://h:port",
    "http://a:1 http://b:1",
    "h:99999",
    "unix:a.sock",
    " ",
]


@pytest.mark.parametrize(
    ("name", "text", "told", "command"),
    [
        *((_OWN, text, f"{_OWN} must be http://HOST:PORT or unix:/PATH", "top") for text in NONSENSE),
        *(
            (_OWN, "nonsense", f"{_OWN} must be http://HOST:PORT or unix:/PATH", command)
            for command in ("allow --caller ann", "overrides", "doctor", "sessions", "canary status")
        ),
        ("LOOPGUARD_ADMIN_SOCKET", "a.sock", "LOOPGUARD_ADMIN_SOCKET must be", "top"),
        *(
            (name, "http://10.0.0.1:8000", f"{name} is not a setting", "top")
            for name in ("LOOPGUARD_ADMIN_URL", "LOOPGUARD_ADMINS", "LOOPGUARD_ADMIN_ADDRESS")
        ),
    ],
)
def test_invalid_variable_is_an_error_of_every_command(
    name: str, text: str, told: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for each in (_OWN, "LOOPGUARD_ADMIN_SOCKET"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, text)

    run = Run(capsys, *command.split())

    assert (run.code, run.complaint.startswith(f"loopguard: {told}")) == (2, True), run.complaint
