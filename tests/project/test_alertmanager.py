"""The example for Alertmanager, on Alertmanager's own tool."""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.cli.commands.dashboards import read_dashboard
from extproc.cli.main import main

EXAMPLE = "alertmanager.yaml"
AMTOOL = shutil.which("amtool")
MISSING = "is not installed (Debian: prometheus-alertmanager):"
needs_amtool = pytest.mark.skipif(
    AMTOOL is None, reason=f"amtool {MISSING} the example's routes are NOT tested"
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
