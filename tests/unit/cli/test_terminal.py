"""What others have written never controls the terminal of who reads it, and no reply of an admin port fills the memory."""

from __future__ import annotations

import gzip
import json
import logging
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.envoy_check import document as check_document
from extproc.cli.main import main
from extproc.cli.replay.table import print_report
from extproc.errors import LoopguardError, UsageError
from extproc.logs import setup, write_json
from extproc.operator.admin import client as admin_client
from extproc.operator.admin.client import AdminClient, ask_all, read_bounded
from extproc.operator.events import UnreachableError, _Webhook

EVIL = "\x1b]0;owned\x07\x9b2J\x7f\r\u202e"
"""Sets a title, clears the screen, goes back to the start of the line, and turns the direction of text."""

Answer = tuple[int, dict[str, str], Callable[[], Iterator[bytes]]]


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """A server that gives this answer to everybody, and its URL."""
    status, headers, write = answer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                for piece in write():
                    self.wfile.write(piece)
            except OSError:
                """The client has had enough."""

        do_POST = do_DELETE = do_GET  # noqa: N815  # the base class's names

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
            """Silence."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def reply(body: object, status: int = 200) -> Answer:
    """A JSON answer."""
    return status, {"content-type": "application/json"}, lambda: iter([json.dumps(body).encode()])


def flood(start: bytes = b'{"a":"') -> Iterator[bytes]:
    """An answer without an end."""
    yield start
    while True:
        yield b"x" * 2**16


class TestReplies:
    """Of admin ports: whoever listens there may send anything."""

    @pytest.mark.parametrize("status", [200, 500])
    def test_an_endless_reply_is_an_error_in_bounded_memory(self, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """One line, after as much as a reply may have."""
        monkeypatch.setattr(admin_client, "_MOST_BYTES", 2**22)
        monkeypatch.setattr(read_bounded, "__defaults__", (2**22,))
        tracemalloc.start()

        with answering((status, {}, flood)) as url, pytest.raises(LoopguardError, match="sends more than 4 MiB"):
            AdminClient(url).ask("/loops")

        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**24

    def test_a_slow_reply_ends(self) -> None:
        """Each byte in time, but never all of them."""
        with pytest.raises(LoopguardError, match="sends for more than 60 s"):
            read_bounded(_dribble(), "http://h/p")

    def test_a_packed_reply_is_not_unpacked(self) -> None:
        """A megabyte may become a gigabyte."""
        packed = gzip.compress(b'{"replica": "r"}')
        with (
            answering((200, {"content-encoding": "gzip"}, lambda: iter([packed]))) as url,
            pytest.raises(LoopguardError, match="is not an admin endpoint of Loopguard"),
        ):
            AdminClient(url).ask("/loops")

    @pytest.mark.parametrize("body", [b"[" * 100_000, b"7", b"[]", b'"x"', b"\xff", b"", b"null", b"9" * 100_000])
    def test_a_reply_of_another_kind_is_one_line(self, body: bytes, capsys: pytest.CaptureFixture[str]) -> None:
        """However deep it is."""
        with answering((200, {}, lambda: iter([body]))) as url:
            code = main(["doctor", "--admin", url])

        assert code == 1
        assert capsys.readouterr().err == f"loopguard: {url}/coverage is not an admin endpoint of Loopguard\n"

    @pytest.mark.parametrize("command", ["top", "sessions"])
    def test_an_object_of_another_program_is_one_line(self, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        """A report says which replica has written it."""
        with answering(reply({"status": "ok"})) as url:
            code = main([command, "--admin", url])

        assert code == 1
        assert capsys.readouterr().err.endswith(" is not an admin endpoint of Loopguard\n")

    def test_reports_of_several_servers_are_joined(self) -> None:
        """As before."""
        report = {"replica": "r", "replicas": ["r"], "problem": None}
        with answering(reply(report)) as url:
            assert ask_all([AdminClient(url), AdminClient(url)], "/loops", {}) == report

    def test_a_dump_of_envoy_is_bounded_as_well(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As `check-envoy --admin` reads it."""
        monkeypatch.setattr(check_document, "_MOST_DUMPED", 2**20)

        with answering((200, {}, flood)) as url, pytest.raises(LoopguardError, match="sends more than 1 MiB"):
            check_document.fetch_dump(url)
        with answering((200, {}, lambda: iter([b"[" * 100_000]))) as url, pytest.raises(UsageError, match="no Envoy answered"):
            check_document.fetch_dump(url)

    @pytest.mark.parametrize("status", [200, 204, 500])
    def test_a_webhooks_reply_is_not_read_to_its_end(self, status: int) -> None:
        """Its status is all that counts."""
        with answering((status, {}, flood)) as url:
            webhook = _Webhook(url, b"", "")
            with pytest.raises(UnreachableError, match="500") if status == 500 else nullcontext():
                webhook.send([b"{}"])
            webhook.close()


def _dribble() -> Iterator[bytes]:
    """A byte every now and then, in a clock that runs fast."""
    with pytest.MonkeyPatch.context() as patch:
        now = [0.0]
        patch.setattr(admin_client, "monotonic", lambda: now[0])
        while True:
            now[0] += 9
            yield b" "


def is_clean(text: str) -> bool:
    """Whether every line of it is printable."""
    return all(line.isprintable() for line in text.split("\n"))


COVERAGE = {
    "replica": EVIL, "replicas": [EVIL], "line": EVIL, "build": EVIL, "problem": EVIL,
    "policies": [{"policy": EVIL, "mode": EVIL, "counted": 1, "requests": 2, "exempt": 0, "place": EVIL}],
    "findings": [
        {"level": EVIL, "text": EVIL, "change": EVIL, "place": EVIL, "policy": EVIL, "detector": EVIL, "route": EVIL,
         "reason": EVIL, "requests": 1, "of": 2},
    ],
}  # fmt: skip
ORDER = {
    "override": EVIL,
    "kind": EVIL,
    "caller": EVIL,
    "tool": EVIL,
    "policy": EVIL,
    "ends": EVIL,
    "who": EVIL,
    "reason": EVIL,
}


@pytest.mark.parametrize(
    ("answer", "command"),
    [
        (reply({"error": f"no {EVIL}\n{EVIL}"}, 500), ["top"]),
        ((404, {}, lambda: iter([EVIL.encode()])), ["sessions"]),
        (reply(COVERAGE), ["doctor"]),
        (reply(COVERAGE), ["doctor", "--json"]),
        (reply({"overrides": [ORDER]}), ["overrides"]),
        (reply({"overrides": [ORDER]}), ["overrides", "--json"]),
        (reply({**ORDER, "notes": [EVIL]}), ["allow", "--caller", "0123456789abcdef"]),
        (reply({"replicas": {EVIL: []}}), ["canary", "status", "--policy", "p"]),
    ],
    ids=["error", "plain error", "doctor", "json", "orders", "orders in json", "order", "canary"],
)
def test_a_server_cannot_control_the_terminal(answer: Answer, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever it says is shown, and escaped."""
    with answering(answer) as url:
        main([*command, "--admin", url])

    printed = capsys.readouterr()
    assert printed.out + printed.err
    assert is_clean(printed.out + printed.err)


def test_errors_about_names_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file may have any name, and so may what an archive puts into a folder."""
    (tmp_path / f"{EVIL}.json").write_text(json.dumps([{EVIL: EVIL, "messages": [{EVIL: 1}]}]))
    (tmp_path / f"{EVIL}.zst").write_bytes(b"\x28\xb5\x2f\xfdxxxx")
    (tmp_path / f"{EVIL}.link").symlink_to("/etc/passwd")
    for command in (
        ["scan", str(tmp_path)],
        ["scan", str(tmp_path / f"{EVIL}.json")],
        ["validate", str(tmp_path / f"{EVIL}.json")],
        ["replay", "--policy", str(tmp_path / "gone"), EVIL],
        ["check-envoy", str(tmp_path / f"{EVIL}.json")],
        ["explain", "--policy", str(tmp_path), EVIL],
        ["top", "--admin", EVIL],
        [EVIL],
        ["scan", f"--{EVIL}"],
    ):
        assert main(command) in {1, 2}

    printed = capsys.readouterr()
    assert is_clean(printed.out + printed.err)


def test_tables_of_replay_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """Names of policies come from files, and methods and paths from clients."""
    counts = dict.fromkeys(
        ("requests", "loops", "refused", "landed", "throttled", "steered", "warned", "tenants", "tenants_touched"), 1
    )
    policy = {**counts, "policy": EVIL, "mode": EVIL, "tenants_exact": True, "rules": {EVIL: 1}, "after_notes": {}}
    policy |= {"uncounted": {EVIL: 1}, "refused_uncountable": 1}
    worst = {**dict.fromkeys(("method", "path", "policy", "tenant", "fingerprint", "example"), EVIL), "requests": 1}
    log = {"requests": 1, "lines": 1, "first": EVIL, "last": EVIL}

    print_report(
        {"log": log, "unmatched": 0, "policies": [policy], "worst": [{**worst, "refused": 1, "highest_count": 1}]}
        | {"log": {**log, "unmatched": 1, "killed": 1}}
    )

    assert is_clean(capsys.readouterr().out)


def test_a_configuration_cannot_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of routes and listeners are anybody's who may write one."""
    match = {"name": EVIL, "match": {"prefix": "/"}, "route": {"cluster": EVIL}}
    hosts = [{"name": EVIL, "domains": ["*"], "routes": [match]}]
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": EVIL,
        "route_config": {"virtual_hosts": hosts},
        "http_filters": [{"name": EVIL}],
    }
    chain = {"filters": [{"name": "hcm", "typed_config": manager}]}
    (tmp_path / "envoy.json").write_text(
        json.dumps({"static_resources": {"listeners": [{"name": EVIL, "filter_chains": [chain]}]}})
    )

    main(["check-envoy", str(tmp_path / "envoy.json")])
    main(["check-envoy", str(tmp_path / "envoy.json"), "--json"])

    printed = capsys.readouterr()
    assert "owned" in printed.out
    assert is_clean(printed.out + printed.err)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_logs_are_escaped_to_the_last_traceback(log_format: Any, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: ANN401
    """Message, fields, and what an exception says; no text can begin a line that it has not."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        setup(log_format, "info")
        try:
            int(f"{EVIL}\x1b[2J")
        except ValueError:
            logging.getLogger("loopguard").exception(EVIL, extra={"fields": {"path": EVIL, "quoted": f'"{EVIL}'}})
    finally:
        root.handlers[:], root.level = handlers, level
    printed = capsys.readouterr().err

    assert "ValueError" in printed
    assert is_clean(printed)


def test_json_has_no_control_characters() -> None:
    """Not even DEL, which the standard library leaves; it reads as the same value."""
    every = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x202E, 0xD800, 0x1F600]))

    assert write_json({every: [every]}).isprintable()
    assert json.loads(write_json({every: [every]})) == {every: [every]}
