"""The example for Alertmanager: its own tool routes it, and it posts to Slack and PagerDuty."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from extproc.cli.commands.dashboards import read_dashboard
from extproc.cli.main import main
from tests.support.harness import Process, eventually
from tests.support.listening import Handler, Listener

EXAMPLE = "alertmanager.yaml"
AMTOOL = shutil.which("amtool")
ALERTMANAGER = shutil.which("alertmanager") or shutil.which("prometheus-alertmanager")
MISSING = "is not installed (Debian: prometheus-alertmanager):"
needs_amtool = pytest.mark.skipif(
    AMTOOL is None, reason=f"amtool {MISSING} the example's routes are NOT tested"
)
needs_alertmanager = pytest.mark.skipif(
    ALERTMANAGER is None,
    reason=f"alertmanager {MISSING} what it posts to Slack and PagerDuty is NOT tested",
)

RULES = yaml.safe_load(read_dashboard("loopguard.rules.yaml"))["groups"][0]["rules"]
ALERTS: dict[str, dict[str, Any]] = {rule["alert"]: rule for rule in RULES}
LABELS = {"namespace": "agents", "job": "loopguard", "policy": "chat", "mode": "enforce"}


def run_amtool(
    folder: Path, *arguments: str, labels: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    main(["dashboards", str(folder)])
    given = [f"{name}={value}" for name, value in (labels or {}).items()]
    command = [AMTOOL or "", *arguments, *given]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, timeout=60
    )


@needs_amtool
def test_alertmanager_example_is_valid(tmp_path: Path) -> None:
    done = run_amtool(tmp_path, "check-config", EXAMPLE)

    assert done.returncode == 0, done.stderr
    assert "2 receivers" in done.stdout


@needs_amtool
@pytest.mark.parametrize("name", ALERTS)
def test_critical_alerts_also_go_to_pagerduty(name: str, tmp_path: Path) -> None:
    severity = ALERTS[name]["labels"]["severity"]
    about = {"alertname": name, "severity": severity, **LABELS}

    done = run_amtool(
        tmp_path, "config", "routes", "test", f"--config.file={EXAMPLE}", labels=about
    )

    receivers = {"critical": "loopguard-pagerduty,loopguard-slack", "warning": "loopguard-slack"}
    assert done.stdout.strip() == receivers[severity], done.stderr


class Desk:
    def __init__(self) -> None:
        self.posted: list[tuple[str, dict[str, Any]]] = []
        desk = self

        class Serving(Handler):
            def serve(self) -> None:
                body = self.read_body()
                desk.posted.append((self.path, json.loads(body)))
                self.send_response(202 if "pagerduty" in self.path else 200)  # as they answer
                self.end_headers()
                self.wfile.write(
                    b'{"status": "success", "dedup_key": "x"}'
                    if "pagerduty" in self.path
                    else b"ok"
                )

        self._server = Listener(Serving)
        self.url = f"http://{self._server.address}"
        self.close = self._server.stop

    def find(self, path: str, words: str) -> dict[str, Any]:
        def probe() -> dict[str, Any] | None:
            found = [
                body
                for where, body in list(self.posted)
                if where == path and words in json.dumps(body)
            ]
            return found[0] if found else None

        return eventually(probe, f"{words} at {path}")


@contextmanager
def alerting(folder: Path, desk: Desk) -> Iterator[str]:
    main(["dashboards", str(folder)])
    (folder / "slack-url").write_text(f"{desk.url}/slack")
    (folder / "pagerduty-key").write_text("0123456789abcdef0123456789abcdef")
    text = read_dashboard(EXAMPLE).replace(
        "global:", f"global:\n  pagerduty_url: {desk.url}/pagerduty"
    )
    for written, used in (
        ("/etc/alertmanager", str(folder)),
        ("group_wait: 30s", "group_wait: 0s"),
        ("l: 5m", "l: 1s"),
    ):
        assert written in text
        text = text.replace(written, used)
    (folder / EXAMPLE).write_text(text)
    flags = [
        f"--config.file={folder / EXAMPLE}",
        f"--storage.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
    ]
    process = Process(
        [ALERTMANAGER or "", *flags, "--cluster.listen-address="], folder / "alertmanager.log"
    )
    try:
        yield f"http://{process.wait_for(r'(?i)listening on.*?(127[.]0[.]0[.]1:[0-9]+)')[1]}"
    finally:
        process.stop()


def make_alert(name: str, **labels: str) -> dict[str, Any]:
    about = {"alertname": name, **ALERTS[name]["labels"], **LABELS, **labels}

    def fill(text: str) -> str:
        return re.sub(
            r"{{ \$labels\.(\w+) }}", lambda found: about.get(found[1], ""), text
        ).replace("{{ $value | humanize }}", "54")

    texts = {key: fill(text) for key, text in ALERTS[name]["annotations"].items()}
    return {
        "labels": about,
        "annotations": texts,
        "generatorURL": "http://prometheus.example/graph",
    }


@needs_alertmanager
def test_alertmanager_posts_actions_to_slack_and_pagerduty(tmp_path: Path) -> None:
    desk = Desk()
    try:
        with alerting(tmp_path, desk) as url:

            def post(*alerts: dict[str, Any]) -> None:
                httpx.post(f"{url}/api/v2/alerts", json=list(alerts)).raise_for_status()

            post(make_alert("LoopguardLoopSurge"))
            looper = desk.find("/slack", "LoopguardLoopSurge")
            post(make_alert("LoopguardGone"))
            called = desk.find("/pagerduty", "trigger")
            desk.find("/slack", "LoopguardGone")
            post(make_alert("LoopguardMostlyUncounted"), make_alert("LoopguardStoreDown"))
            desk.find("/pagerduty", "store")
    finally:
        desk.close()

    (message,) = looper["attachments"]
    assert (looper["channel"], message["title"]) == ("#agents", "LoopguardLoopSurge (warning)")
    assert "*agents/loopguard: 54 loops a minute in chat.*" in message["text"]
    event = called["payload"]
    assert (event["severity"], event["component"], event["group"]) == (
        "critical",
        "loopguard",
        "agents",
    )
    assert "failure_mode_allow" in event["custom_details"]["what to do"]
    assert called["routing_key"] == "0123456789abcdef0123456789abcdef"
    assert "LoopguardMostlyUncounted" not in json.dumps(desk.posted)
    assert "LoopSurge" not in json.dumps(
        [body for path, body in desk.posted if path == "/pagerduty"]
    )
