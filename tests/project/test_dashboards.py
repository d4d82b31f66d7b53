"""The Grafana dashboard and the Prometheus alerts."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from grafana_foundation_sdk.cog import encoder, plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.support import ROOT
from tests.support.promql import Reading, run_promtool, series, write_series

CHART = ROOT / "helm" / "loopguard"
DASHBOARD: dict[str, Any] = json.loads((CHART / "dashboards" / "loopguard.json").read_text())
RULES_FILE = CHART / "alerts" / "loopguard.rules.yaml"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(RULES_FILE.read_text())["groups"] for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}

PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed (Debian: prometheus): when alerts go off is NOT tested",
)


def titles(panel: dict[str, Any]) -> str:
    return str(panel["title"])


def plain(text: str) -> str:
    return re.sub(r"\$__(rate_interval|range|interval)\b", "5m", text)


def read(text: str) -> Reading:
    known = series()
    for rule in RULES:
        if "record" in rule:
            known[rule["record"]] = Reading(rule["expr"], known).labels
    return Reading(plain(text), known)


def lost(ours: object, theirs: object, path: str = "") -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            yield from lost(value, theirs.get(key), f"{path}/{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from lost(one, other, f"{path}/{number}")
    elif ours != theirs:
        yield path


def test_dashboard_has_only_keys_known_to_grafana() -> None:
    plugins.register_default_plugins()

    back = json.loads(encoder.JSONEncoder().encode(Dashboard.from_json(DASHBOARD)))

    assert list(lost(DASHBOARD, back)) == []


def test_dashboard_names_no_data_source() -> None:
    assert DASHBOARD["schemaVersion"] >= 41  # Grafana 12
    assert "id" not in DASHBOARD
    assert list(VARIABLES) == ["datasource", "namespace", "job", "policy"]
    assert VARIABLES["datasource"]["type"] == "datasource"
    for name in ("namespace", "job", "policy"):
        assert VARIABLES[name]["datasource"] == SOURCE
        # A Prometheus outside of Kubernetes knows no namespace
        assert VARIABLES[name]["allValue"] == ".*"


@pytest.mark.parametrize("name", ["namespace", "job", "policy"])
def test_dashboard_variables_use_existing_labels(name: str) -> None:
    found = re.fullmatch(r"label_values\((.+), (\w+)\)", VARIABLES[name]["query"]["query"])
    assert found is not None
    before = list(VARIABLES)[1 : list(VARIABLES).index(name)]

    reading = read(found[1])

    assert (reading.problems, found[2]) == ([], name)
    assert name in reading.labels
    assert re.findall(r'(\w+)=~"\$\1"', found[1]) == before


@pytest.mark.parametrize("panel", PANELS, ids=titles)
def test_queries_use_existing_metrics_and_labels(panel: dict[str, Any]) -> None:
    assert panel["targets"]
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for target in panel["targets"]:
        reading = read(target["expr"])

        assert reading.problems == []
        assert set(re.findall(r"{{\s*(\w+)\s*}}", target["legendFormat"])) <= reading.labels


@pytest.mark.parametrize("panel", PANELS, ids=titles)
def test_queries_select_by_dashboard_variables(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        for name, matchers in re.findall(r"(loopguard_\w+)(?:{([^}]*)})?", target["expr"]):
            wanted = ["namespace", "job"] + ["policy"] * ("policy" in series()[name])

            assert [label for label in wanted if f'{label}=~"${label}"' not in matchers] == [], name


@pytest.mark.parametrize("name", ALERTS)
def test_alerts_have_severity_delay_and_action(name: str) -> None:
    alert = ALERTS[name]
    labels = read(alert["expr"]).labels
    texts = alert["annotations"]

    assert alert["labels"]["severity"] in {"warning", "critical"}
    assert re.fullmatch(r"[1-9]\d*m", alert["for"])
    assert texts.keys() == {"summary", "description"}
    assert {"job", *re.findall(r"\$labels\.(\w+)", " ".join(texts.values()))} <= labels


def test_rules_use_existing_metrics_and_labels() -> None:
    assert {rule["expr"]: read(rule["expr"]).problems for rule in RULES} == {
        rule["expr"]: [] for rule in RULES
    }


class Case(NamedTuple):
    alert: str
    minute: int
    fires: int
    series: dict[str, str]


ENFORCED = 'loops_detected_total{policy="p",mode="enforce",action="reject"}'

ALLOWED = 'requests_total{policy="p",mode="enforce",action="allow"}'

CASES = {
    "every replica has vanished": Case("Gone", 40, 1, {"policy_info": "1x20"}),
    "one of two replicas has vanished": Case(
        "Gone", 40, 0, {'policy_info{instance="a"}': "1x20", 'policy_info{instance="b"}': "1x60"}
    ),
    "a canary was turned off": Case("Gone", 40, 0, {'policy_info{job="loopguard-canary"}': "1x20"}),
    "requests have stopped": Case("Unasked", 90, 1, {"decision_seconds_count": "0+60x60 3600x60"}),
    "no requests for ten minutes": Case(
        "Unasked", 70, 0, {"decision_seconds_count": "0+60x60 3600x60"}
    ),
    "no requests ever": Case("Unasked", 90, 0, {"decision_seconds_count": "0x120"}),
    "hardly any requests ever": Case("Unasked", 90, 0, {"decision_seconds_count": "0x30 1x90"}),
    "no requests for hours": Case(
        "Unasked", 180, 0, {"decision_seconds_count": "0+60x60 3600x120"}
    ),
    "a route names a policy that is not there": Case(
        "HandoverErrors", 13, 1, {'handover_errors_total{reason="unknown_policy"}': "0x10 1x30"}
    ),
    "routes have the policies that they name": Case(
        "HandoverErrors", 13, 0, {'handover_errors_total{reason="invalid"}': "0x40"}
    ),
    "one request in ten finds no stream": Case(
        "NotGuarding", 20, 1, {"overload_total": "0+6x30", "decision_seconds_count": "0+60x30"}
    ),
    "one request in 60 finds no stream": Case(
        "NotGuarding", 20, 0, {"overload_total": "0+1x30", "decision_seconds_count": "0+60x30"}
    ),
    "nothing is decided but with an error": Case(
        "NotGuarding",
        20,
        1,
        {
            "overload_total": "0x30",
            'fail_open_total{reason="internal_error"}': "0+6x30",
            "decision_seconds_count": "0x30",
        },
    ),
    "the store's errors are decided locally": Case(
        "NotGuarding",
        20,
        0,
        {
            "overload_total": "0x30",
            'fail_open_total{reason="store_error"}': "0+60x30",
            "decision_seconds_count": "0+60x30",
        },
    ),
    "the first internal error of all": Case(
        "FailOpen", 13, 1, {'fail_open_total{reason="internal_error"}': "_x10 1x30"}
    ),
    "an internal error a while ago": Case(
        "FailOpen", 30, 0, {'fail_open_total{reason="internal_error"}': "_x10 1x30"}
    ),
    "one more internal error": Case(
        "FailOpen", 13, 1, {'fail_open_total{reason="internal_error"}': "7x10 8x30"}
    ),
    "one overloaded stream": Case("FailOpen", 13, 1, {"overload_total": "0x10 1x30"}),
    "no overload at all": Case("FailOpen", 13, 0, {"overload_total": "0x40"}),
    "a store error is no failing open": Case(
        "FailOpen", 13, 0, {'fail_open_total{reason="store_error"}': "_x10 1x30"}
    ),
    "an idle replica probes its store": Case(
        "StoreDown", 10, 1, {'store_errors_total{instance="a",kind="connection"}': "0+30x20"}
    ),
    "every request fails at the store": Case(
        "StoreDown",
        10,
        1,
        {f'store_errors_total{{instance="{i}",kind="unavailable"}}': "0+600x20" for i in "ab"},
    ),
    "a hiccup of the store": Case(
        "StoreDown", 7, 0, {'store_errors_total{instance="a",kind="timeout"}': "0x5 9x20"}
    ),
    "the store is back": Case(
        "StoreDown", 20, 0, {'store_errors_total{instance="a",kind="connection"}': "0+30x10 300x20"}
    ),
    "the files are refused from the start": Case(
        "PolicyReloadRefused", 15, 1, {"policy_reload_refused": "1x30"}
    ),
    "the files are never mended": Case(
        "PolicyReloadRefused", 900, 1, {"policy_reload_refused": "0x10 1x990"}
    ),
    "the files are mended": Case(
        "PolicyReloadRefused", 30, 0, {"policy_reload_refused": "0x10 1x10 0x30"}
    ),
    "one of two replicas is not mended": Case(
        "PolicyReloadRefused",
        30,
        1,
        {
            'policy_reload_refused{instance="a"}': "0x10 1x30",
            'policy_reload_refused{instance="b"}': "0x10 1x10 0x30",
        },
    ),
    "the replica that refused is gone": Case(
        "PolicyReloadRefused", 30, 0, {"policy_reload_refused": "0x10 1x5 stale"}
    ),
    "one looper with nine requests in ten seconds": Case("LoopSurge", 20, 1, {ENFORCED: "0+54x30"}),
    "one looper whose model takes its time": Case("LoopSurge", 20, 1, {ENFORCED: "0+4x30"}),
    "one looper under a shadow policy": Case(
        "LoopSurge",
        20,
        1,
        {'loops_detected_total{policy="p",mode="shadow",action="steer"}': "0+54x30"},
    ),
    "a loop that was stopped at once": Case("LoopSurge", 20, 0, {ENFORCED: "0x5 3x30"}),
    "two loops a minute": Case("LoopSurge", 20, 0, {ENFORCED: "0+2x30"}),
    "two loops a second as yesterday": Case("LoopSurge", 1600, 0, {ENFORCED: "0+120x1600"}),
    "twenty times what yesterday had": Case(
        "LoopSurge", 1540, 1, {ENFORCED: "0+6x1500 9000+120x60"}
    ),
    "a policy that counts nothing": Case(
        "MostlyUncounted", 40, 1, {'uncounted_total{policy="p",reason="no_body_phase"}': "0+6x60"}
    ),
    "a policy whose limit keys most do not have": Case(
        "MostlyUncounted",
        40,
        1,
        {'uncounted_total{policy="p",reason="missing_descriptor"}': "0+6x60"},
    ),
    "a policy for which a third has no limit key": Case(
        "MostlyUncounted",
        40,
        0,
        {
            'uncounted_total{policy="p",reason="missing_descriptor"}': "0+6x60",
            'requests_total{policy="p",mode="enforce",action="allow"}': "0+12x60",
        },
    ),
    "a third of the traffic has no limit key": Case(
        "PartlyUncounted",
        50,
        1,
        {
            'uncounted_total{policy="p",reason="missing_descriptor"}': "0+6x60",
            'requests_total{policy="p",mode="enforce",action="allow"}': "0+12x60",
        },
    ),
    "one request in thirty has no limit key": Case(
        "PartlyUncounted",
        50,
        0,
        {
            'uncounted_total{policy="p",reason="missing_descriptor"}': "0+6x60",
            'requests_total{policy="p",mode="enforce",action="allow"}': "0+180x60",
        },
    ),
    "paths have changed, and no policy matches any more": Case(
        "NothingMatches", 90, 1, {ALLOWED: "0+60x60 3600x60", "unmatched_total": "0x60 0+60x60"}
    ),
    "paths have changed, and a policy still matches": Case(
        "NothingMatches", 90, 0, {ALLOWED: "0+60x120", "unmatched_total": "0x60 0+60x60"}
    ),
    "only what no policy is for": Case("NothingMatches", 90, 0, {"unmatched_total": "0+60x120"}),
    "a policy that lets most pass by": Case(
        "MostlyUncounted", 40, 0, {'uncounted_total{policy="p",reason="bypass"}': "0+6x60"}
    ),
    "a policy that counts most": Case(
        "MostlyUncounted",
        40,
        0,
        {
            'uncounted_total{policy="p",reason="aborted"}': "0+6x60",
            'requests_total{policy="p",mode="enforce",action="allow"}': "0+9x60",
        },
    ),
    "the first failure of a shadow policy": Case(
        "ShadowFailing", 13, 1, {'fail_open_total{reason="shadow_error"}': "_x10 1x60"}
    ),
    "a shadow policy failed an hour ago": Case(
        "ShadowFailing", 70, 0, {'fail_open_total{reason="shadow_error"}': "_x10 1x90"}
    ),
    "a store that fails keeps what was taken from budgets": Case(
        "BudgetsLost", 20, 1, {"budget_lost_total": "0+3x30"}
    ),
    "a few takes were lost": Case("BudgetsLost", 20, 0, {"budget_lost_total": "0x5 4x30"}),
    "a bundle has expired": Case("PolicyExpired", 20, 1, {"policy_expired": "0x10 1x20"}),
    "no bundle has expired": Case("PolicyExpired", 20, 0, {"policy_expired": "0x30"}),
}


def test_alert_cases_cover_firing_and_silence() -> None:
    tried = {(f"Loopguard{case.alert}", bool(case.fires)) for case in CASES.values()}

    assert tried == {(alert, fires) for alert in ALERTS for fires in (True, False)}


@needs_promtool
def test_promtool_accepts_rules() -> None:
    done = subprocess.run(
        ["promtool", "check", "rules", RULES_FILE], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.deep
@needs_promtool
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_alerts_fire_in_promtool_cases(case: Case, tmp_path: Path) -> None:
    given = write_series(case.series, namespace="agents", job="loopguard", instance="a")
    firing = f'count(ALERTS{{alertname="Loopguard{case.alert}",alertstate="firing"}})'
    expected = [{"labels": "{}", "value": case.fires}] if case.fires else []
    asked = {"expr": firing, "eval_time": f"{case.minute}m", "exp_samples": expected}
    tests = [{"interval": "1m", "input_series": given, "promql_expr_test": [asked]}]

    run_promtool({"rule_files": [str(RULES_FILE)], "tests": tests}, tmp_path)
