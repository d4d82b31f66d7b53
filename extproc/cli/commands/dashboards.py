"""`loopguard dashboards`: writes a Grafana dashboard, Prometheus alerts and Alertmanager routes.

The Helm chart installs the dashboard and the alerts itself.
"""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path

from extproc.errors import UsageError

FILES = ("loopguard.json", "loopguard.rules.yaml", "alertmanager.yaml")

HELP = (
    "write the Grafana dashboard, the Prometheus alerts and an example for Alertmanager to a folder"
)
EXAMPLES = """files:
  loopguard.json         a dashboard to import into Grafana, or to provision from the folder
  loopguard.rules.yaml   alerts, for rule_files in prometheus.yml
  alertmanager.yaml      an example for Alertmanager, which sends them to Slack and PagerDuty

examples:
  loopguard dashboards monitoring/
  loopguard dashboards --force /etc/prometheus/rules

Existing files with other content are kept, unless --force is given."""


def read_dashboard(name: str) -> str:
    return (files("extproc.cli") / "dashboards" / name).read_text(encoding="utf-8")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="replace existing files")
    parser.add_argument("directory", metavar="DIR", help="folder to write to; created if missing")


def run(options: argparse.Namespace) -> int:
    folder = Path(options.directory)
    texts = {folder / name: read_dashboard(name) for name in FILES}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        changed = [
            path
            for path, text in texts.items()
            if path.exists() and path.read_bytes() != text.encode()
        ]
        if changed and not options.force:
            told = ", ".join(map(str, changed))
            raise UsageError(f"{told}: exists with other content; --force replaces it")
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
            print(path)
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from None
    return 0
