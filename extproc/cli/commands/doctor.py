"""`loopguard doctor`: asks running servers what is not guarded, why, and what to change."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from extproc.build import describe_build
from extproc.logs import escape_controls, write_json
from extproc.operator.admin.client import AdminClient, add_admin_flag, open_clients

HELP = "show which requests are not guarded, why, and what to change"
EXAMPLES = """examples:
  loopguard doctor
  loopguard doctor --admin http://10.0.0.7:9900 --admin http://10.0.0.8:9900
  loopguard doctor --json | jq '.[0].findings[] | select(.level == "problem")'

Replicas that share a store know of all requests: ask any of them.
For replicas with separate stores, repeat --admin for each.

exit code: 0 no problem, 1 a problem, or a server cannot be asked"""

_PROBLEM = "problem"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_admin_flag(parser)
    parser.add_argument(
        "--json", action="store_true", help="print the JSON of /coverage of each server, in a list"
    )


def run(options: argparse.Namespace) -> int:
    reports = _ask(open_clients(options.admin))
    if options.json:
        print(write_json(reports, indent=2))
    else:
        for report in reports:
            for line in write_report(report, named=len(reports) > 1):
                print(escape_controls(line))
    return int(
        any(finding["level"] == _PROBLEM for report in reports for finding in report["findings"])
    )


def _ask(clients: Sequence[AdminClient]) -> list[dict[str, Any]]:
    reports: list[dict[str, Any]] = []
    for client in clients:
        report = client.ask("/coverage")
        if not any(report["replica"] in other["replicas"] for other in reports):
            reports.append(report)
    if len(reports) > 1:
        for report in reports:
            _report_separate_memory(report, len(reports))
    return reports


def _report_separate_memory(report: dict[str, Any], servers: int) -> None:
    """Make separate memory stores a problem; for a single server they are fine."""
    for finding in report["findings"]:
        if finding["reason"] == "memory_store":
            finding["level"] = _PROBLEM
            finding["text"] = (
                f"{servers} servers each count separately (memory://), so limits hold for "
                "each of them alone"
            )
            finding["change"] = "`serve --store redis://HOST:6379` for all of them"
    report["findings"].sort(key=lambda finding: finding["level"] != _PROBLEM)


def write_report(report: Mapping[str, Any], *, named: bool) -> list[str]:
    """One server's report in lines, with its name if `named`."""
    lines = [f"{report['replica']}:"] if named else []
    lines.append(report["line"])
    lines.append(f"build: {describe_build(report['build'])}")
    if "memory" in report:  # older servers lack it
        lines.append(f"memory: at most {report['memory']}")
    if report["problem"]:
        lines.append(f"other replicas' numbers are missing or old: {report['problem']}")
    for policy in report["policies"]:
        told = (
            f"{policy['counted']:,} of {policy['requests'] - policy['exempt']:,} requests counted"
        )
        lines.append(
            f"  {policy['policy']} ({policy['mode']}): {told}{_write_place(policy['place'])}"
        )
    for finding in report["findings"]:
        lines += ["", f"{finding['level']}: {_write_subject(finding)}{finding['text']}"]
        if finding["change"]:
            lines.append(f"  change: {finding['change']}{_write_place(finding['place'])}")
    if not report["findings"]:
        lines += ["", "nothing to change"]
    return lines


def _write_place(place: str | None) -> str:
    return f" ({place})" if place else ""


def _write_subject(finding: Mapping[str, Any]) -> str:
    if not finding["policy"]:
        return ""
    detector = (
        f"/{finding['detector']}"
        if finding["detector"] and finding["detector"] != "default"
        else ""
    )
    route = f" on route {finding['route']}" if finding["route"] else ""
    return (
        f"{finding['policy']}{detector}: {finding['requests']:,} of {finding['of']:,} "
        f"requests{route} ({finding['reason']}) "
    )
