"""The report of a replay as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from extproc.cli.tables import make_console, print_rows
from extproc.logs import escape_controls
from extproc.operator.after_notes import write_after

_COUNTS = ("requests", "loops", "refused", "landed", "throttled", "steered", "warned")


def print_report(document: dict[str, Any]) -> None:
    console = make_console()
    log, policies = document["log"], document["policies"]
    console.print(
        escape_controls(
            f"{log['requests']:,} requests in {log['lines']:,} lines, {log['first']} to "
            f"{log['last']}"
        )
    )
    if log["unmatched"]:
        console.print(escape_controls(f"{log['unmatched']:,} of them match no policy"))
    if log["killed"]:
        console.print(
            escape_controls(
                f"{log['killed']:,} of them are stopped by a kill switch, before any policy"
            )
        )
    rows: list[Sequence[object]] = []
    for policy in policies:
        about = "" if policy["tenants_exact"] else "~"
        tenants = [f"{about}{policy[name]:,}" for name in ("tenants", "tenants_touched")]
        rows.append(
            (policy["policy"], policy["mode"], *[policy[name] for name in _COUNTS], *tenants)
        )
    columns = ("policy", "mode", *[f"#{name}" for name in _COUNTS], "#tenants", "#touched")
    print_rows(console, "What each policy would have done", columns, rows)
    rows = [
        (policy["policy"], rule, count)
        for policy in policies
        for rule, count in policy["rules"].items()
    ]
    print_rows(console, "Loops by rule", ("policy", "rule", "#requests"), rows)
    for policy in policies:
        for arm, counts in policy["after_notes"].items():
            console.print(
                escape_controls(
                    f"{policy['policy']} ({policy['mode']}): "
                    f"{write_after(counts, noted=arm == 'noted')}"
                )
            )
    rows = []
    for policy in policies if any(policy["uncounted"] for policy in policies) else ():
        rows += [(policy["policy"], reason, count) for reason, count in policy["uncounted"].items()]
        if policy["refused_uncountable"]:
            rows.append(
                (
                    policy["policy"],
                    "of these refused (`uncountable`)",
                    policy["refused_uncountable"],
                )
            )
    print_rows(console, "Not counted", ("policy", "reason", "#requests"), rows)
    columns = (
        "policy",
        "tenant",
        "fingerprint",
        "#requests",
        "#refused",
        "#highest count",
        "request",
        "first seen at",
    )
    rows = []
    for item in document["worst"]:
        names = (item["policy"], item["tenant"], item["fingerprint"])
        request = f"{item['method']} {item['path']}"
        rows.append(
            (
                *names,
                item["requests"],
                item["refused"],
                item["highest_count"],
                request,
                item["example"],
            )
        )
    print_rows(console, "Worst offenders", columns, rows)
