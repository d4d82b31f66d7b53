"""Commands do not trust servers or files: control characters, long replies, bad addresses."""

import gzip
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from extproc.errors import LoopguardError
from extproc.metrics import Metrics
from extproc.operator.admin.client import find_admin, open_clients, read_bounded
from extproc.operator.events import open_events
from extproc.settings import Settings
from tests.support.answering import Answer, answering, flood, reply
from tests.support.command import Run, written
from tests.support.receivers import CA

# Sets a title, clears the screen, returns to the start of the line, and changes the direction of
# text.
EVIL = "\x1b]0;owned\x07\x9b2J\x7f\r\u202e"

ENDLESS = Answer(200, {}, flood)


# ---- Replies: whoever listens on an admin port may send anything


@pytest.mark.parametrize("status", [200, 500])
def test_endless_reply_is_a_one_line_error(status: int, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(ENDLESS._replace(status=status)) as url:
        run = Run(capsys, "top", "--admin", url)

    assert (run.code, run.complaint) == (
        1,
        f"loopguard: {url}/loops sends more than 64 MiB, as no admin port does",
    )


def test_reply_is_read_in_bounded_memory() -> None:
    tracemalloc.start()

    with pytest.raises(LoopguardError, match="sends more than 4 MiB"):
        read_bounded(flood(), "http://h/p", 2**22)

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24


def test_slow_reply_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("extproc.operator.admin.client.monotonic", lambda: now[0])

    def dribble() -> Iterator[bytes]:
        while True:
            now[0] += 9
            yield b" "

    with pytest.raises(LoopguardError, match="sends for more than 60 s"):
        read_bounded(dribble(), "http://h/p")


PACKED = Answer(
    200, {"content-encoding": "gzip"}, lambda: iter([gzip.compress(b'{"replica": "r"}')])
)
FOREIGN = [b"[" * 100_000, b"7", b"[]", b'"x"', b"\xff", b"", b"null", b"9" * 100_000]


@pytest.mark.parametrize(
    ("answer", "command", "path"),
    [
        *((reply(body), "doctor", "coverage") for body in FOREIGN),
        (PACKED, "top", "loops"),  # a megabyte may become a gigabyte
        (reply({"status": "ok"}), "top", "loops"),
        (reply({"status": "ok"}), "sessions", "sessions"),
    ],
)
def test_foreign_reply_is_a_one_line_error(
    answer: Answer, command: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(answer) as url:
        run = Run(capsys, command, "--admin", url)

    assert (run.code, run.complaint) == (
        1,
        f"loopguard: {url}/{path} is not an admin endpoint of Loopguard",
    )


def test_server_named_twice_counts_once(capsys: pytest.CaptureFixture[str]) -> None:
    report = {"replica": "r", "replicas": ["r"], "problem": None}
    with answering(reply(report)) as url:
        assert (
            json.loads(Run(capsys, "top", "--json", "--admin", url, "--admin", url).out) == report
        )


@pytest.mark.parametrize(
    ("answer", "told"),
    [(ENDLESS, "sends more than 1 MiB"), (reply(b"[" * 100_000), "no Envoy answered")],
    ids=["endless", "deep"],
)
def test_dump_of_envoy_is_bounded(
    answer: Answer, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.cli.envoy_check.document.MOST_DUMPED", 2**20)

    with answering(answer) as url:
        assert told in Run(capsys, "check-envoy", "--admin", url).complaint


@pytest.mark.parametrize("status", [200, 204])
def test_reply_of_a_webhook_is_not_read(status: int, tmp_path: Path) -> None:
    metrics = Metrics()
    CA.cert_pem.write_to_path(str(tmp_path / "ca.pem"))

    with answering(ENDLESS._replace(status=status), tls=True) as url:
        events = open_events(
            Settings(events=url, events_ca=str(tmp_path / "ca.pem")), "replica", metrics
        )
        assert events is not None
        events.emit("loop_began", "", {})
        events.close()

    assert metrics.registry.get_sample_value("loopguard_events_total", {"result": "sent"}) == 1


# ---- Texts of others


def is_clean(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


ORDER = dict.fromkeys(
    ("override", "kind", "caller", "tool", "policy", "ends", "who", "reason"), EVIL
)
FINDING = dict.fromkeys(
    ("level", "text", "change", "place", "policy", "detector", "route", "reason"), EVIL
)
COVERAGE = {
    "replica": EVIL,
    "replicas": [EVIL],
    "line": EVIL,
    "build": EVIL,
    "problem": EVIL,
    "policies": [
        {"policy": EVIL, "mode": EVIL, "counted": 1, "requests": 2, "exempt": 0, "place": EVIL}
    ],
    "findings": [{**FINDING, "requests": 1, "of": 2}],
}


@pytest.mark.parametrize(
    ("answer", "command"),
    [
        (reply({"error": f"no {EVIL}\n{EVIL}"}, 500), ["top"]),
        (reply(EVIL.encode(), 404), ["sessions"]),
        (reply(COVERAGE), ["doctor"]),
        (reply(COVERAGE), ["doctor", "--json"]),
        (reply({"overrides": [ORDER]}), ["overrides"]),
        (reply({"overrides": [ORDER]}), ["overrides", "--json"]),
        (reply({**ORDER, "notes": [EVIL]}), ["allow", "--caller", "0123456789abcdef"]),
        (reply({"replicas": {EVIL: []}}), ["canary", "status", "--policy", "p"]),
    ],
    ids=["error", "plain error", "doctor", "json", "orders", "orders in json", "order", "canary"],
)
def test_server_cannot_control_the_terminal(
    answer: Answer, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(answer) as url:
        run = Run(capsys, *command, "--admin", url)

    assert run.out + run.err
    assert is_clean(run.out + run.err)


ROUTE = {"name": EVIL, "match": {"prefix": "/"}, "route": {"cluster": EVIL}}
MANAGER = {
    "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3."
    "HttpConnectionManager",
    "stat_prefix": EVIL,
    "route_config": {"virtual_hosts": [{"name": EVIL, "domains": ["*"], "routes": [ROUTE]}]},
    "http_filters": [{"name": EVIL}],
}
LISTENER = {
    "name": EVIL,
    "filter_chains": [{"filters": [{"name": "hcm", "typed_config": MANAGER}]}],
}


@pytest.mark.parametrize(
    "command",
    [
        ["scan", "FOLDER"],
        ["scan", f"FOLDER/{EVIL}.json"],
        ["validate", f"FOLDER/{EVIL}.json"],
        ["replay", "--policy", "FOLDER/gone", EVIL],
        ["check-envoy", f"FOLDER/{EVIL}.json"],
        ["check-envoy", "FOLDER/envoy"],
        ["check-envoy", "FOLDER/envoy", "--json"],
        ["explain", "--policy", "FOLDER", EVIL],
        ["top", "--admin", EVIL],
        [EVIL],
        ["scan", f"--{EVIL}"],
    ],
    ids=lambda command: command[0],
)
def test_files_and_arguments_cannot_control_the_terminal(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(
        tmp_path / f"{EVIL}.json", [{EVIL: EVIL, "messages": [{EVIL: 1}]}, {"id": "p", "a\nb": 1}]
    )
    written(tmp_path / f"{EVIL}.zst", b"\x28\xb5\x2f\xfdxxxx")
    written(tmp_path / "envoy", {"static_resources": {"listeners": [LISTENER]}})
    (tmp_path / f"{EVIL}.link").symlink_to("/etc/passwd")

    run = Run(capsys, *(word.replace("FOLDER", str(tmp_path)) for word in command))

    assert run.code in {1, 2}
    assert is_clean(run.out + run.err)


_OWN = "LOOPGUARD_ADMIN"


@pytest.mark.parametrize(
    "url",
    ["http://10.0.0.1:8000", "https://gateway.example", "http://[::1]:9900/", "unix:/run/a.sock"],
)
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
            for name in (
                "LOOPGUARD_ADMIN_SERVICE_HOST",
                "LOOPGUARD_ADMIN_PORT",
                "LOOPGUARD_ADMIN_PORT_9900_TCP",
            )
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
        *(
            (_OWN, text, f"{_OWN} must be http://HOST:PORT or unix:/PATH", "top")
            for text in NONSENSE
        ),
        *(
            (_OWN, "nonsense", f"{_OWN} must be http://HOST:PORT or unix:/PATH", command)
            for command in (
                "allow --caller ann",
                "overrides",
                "doctor",
                "sessions",
                "canary status",
            )
        ),
        ("LOOPGUARD_ADMIN_SOCKET", "a.sock", "LOOPGUARD_ADMIN_SOCKET must be", "top"),
        *(
            (name, "http://10.0.0.1:8000", f"{name} is not a setting", "top")
            for name in ("LOOPGUARD_ADMIN_URL", "LOOPGUARD_ADMINS", "LOOPGUARD_ADMIN_ADDRESS")
        ),
    ],
)
def test_invalid_variable_is_an_error_of_every_command(
    name: str,
    text: str,
    told: str,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for each in (_OWN, "LOOPGUARD_ADMIN_SOCKET"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, text)

    run = Run(capsys, *command.split())

    assert (run.code, run.complaint.startswith(f"loopguard: {told}")) == (2, True), run.complaint
