"""The queries of Argo Rollouts and Flagger about a canary."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.chart import NAME, NAMESPACE, objects, of_kind, one
from tests.support.promql import Reading, run_promtool, series, write_series

VALUES: dict[str, Any] = {
    "analysis": {
        "argoRollouts": {"enabled": True},
        "flagger": {"enabled": True},
        "prometheusAddress": "http://prometheus:9090",
        "policy": "strict",
        "minRequests": 100,
    }
}
MADE = objects(VALUES)
TEMPLATE = one(MADE, "ClusterAnalysisTemplate", f"{NAMESPACE}-{NAME}")["spec"]
ARGUMENTS = {argument["name"]: argument["value"] for argument in TEMPLATE["args"]}
METRICS = {metric["name"]: metric for metric in TEMPLATE["metrics"]}
FLAGGER = {
    item["metadata"]["name"].removeprefix(f"{NAME}-"): item["spec"]
    for item in of_kind(MADE, "MetricTemplate")
}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed (Debian: prometheus): what queries answer is NOT tested",
)
each_metric = pytest.mark.parametrize("name", METRICS)


def filled(text: str) -> str:
    for name, value in ARGUMENTS.items():
        text = text.replace(f"{{{{args.{name}}}}}", value)
    assert "{{" not in text
    return text


def query_of(name: str) -> str:
    return filled(METRICS[name]["provider"]["prometheus"]["query"])


def judge(name: str, result: list[float]) -> str:
    """Argo Rollouts' verdict on an answer: inconclusive where neither condition holds."""
    names = {"result": result, "len": len, "false": False}
    holds = {}
    for condition in ("failureCondition", "successCondition"):
        text = filled(METRICS[name][condition]).replace("&&", "and")
        # The chart's own, in words that Python shares
        holds[condition] = eval(text, {"__builtins__": {}}, names)  # noqa: S307
    if holds["failureCondition"]:
        return "failed"
    return "successful" if holds["successCondition"] else "inconclusive"


@each_metric
def test_queries_use_existing_metrics_and_labels(name: str) -> None:
    reading = Reading(query_of(name).replace('"strict"', '"$policy"'), series())

    assert (reading.problems, reading.labels) == ([], frozenset())


def test_flagger_and_argo_rollouts_query_alike() -> None:
    assert {
        name: spec["query"].replace("{{ interval }}", "10m") for name, spec in FLAGGER.items()
    } == {name: query_of(name) for name in METRICS}


def test_analysis_without_traffic_is_inconclusive() -> None:
    for name in METRICS:
        assert (judge(name, []), judge(name, [float("nan")])) == ("inconclusive", "inconclusive")
    assert judge("requests", [99]) == "inconclusive"


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("new-refusals", 0.001, 0.0011),
        ("disagreement", 0.05, 0.06),
        ("fail-open", 0, 0.1),
        ("decision-p99", 0.05, 0.25),
    ],
)
def test_value_at_limit_succeeds(name: str, good: float, bad: float) -> None:
    assert (judge(name, [good]), judge(name, [bad])) == ("successful", "failed")
    assert judge("requests", [100]) == "successful"


def test_analysis_tolerates_inconclusive_answers() -> None:
    for metric in METRICS.values():
        assert (metric["count"], metric["inconclusiveLimit"], metric["failureLimit"]) == (10, 9, 0)


class Case(NamedTuple):
    """One value a minute in promtool's notation, and the answers after 20 minutes; {} for none."""

    series: dict[str, str]
    answers: dict[str, float]


PAIR = 'policy="strict",canary_of="live"'
QUIET = {
    **{
        f'canary_requests_total{{{PAIR},verdict="{verdict}"}}': "0x30"
        for verdict in ("both", "only_live", "only_candidate", "neither")
    },
    **{
        f'canary_refusals_total{{{PAIR},refusal="{refusal}"}}': "0x30"
        for refusal in ("extra", "already", "missed")
    },
    f"canary_refused_total{{{PAIR}}}": "0x30",
    'fail_open_total{reason="internal_error"}': "0x30",
    "decision_seconds_count": "0x30",
    'decision_seconds_bucket{le="0.05"}': "0x30",
    'decision_seconds_bucket{le="+Inf"}': "0x30",
}
BUSY = QUIET | {
    f'canary_requests_total{{{PAIR},verdict="neither"}}': "0+90x30",
    f'canary_requests_total{{{PAIR},verdict="both"}}': "0+8x30",
    f'canary_requests_total{{{PAIR},verdict="only_candidate"}}': "0+2x30",
    f'canary_refusals_total{{{PAIR},refusal="extra"}}': "0+1x30",
    f"canary_refused_total{{{PAIR}}}": "0+20x30",
    'fail_open_total{reason="internal_error"}': "0+5x30",
    "decision_seconds_count": "0+100x30",
    'decision_seconds_bucket{le="0.05"}': "0+100x30",
    'decision_seconds_bucket{le="+Inf"}': "0+100x30",
}
CASES = {
    "nothing is there": Case({}, {}),
    "no traffic": Case(QUIET, {}),
    "a canary on live traffic": Case(
        BUSY,
        {
            "requests": 1000,
            "new-refusals": 0.0125,
            "disagreement": 0.02,
            "fail-open": 0.05,
            "decision-p99": 0.0495,
        },
    ),
    "too few requests": Case(
        QUIET | {f'canary_requests_total{{{PAIR},verdict="neither"}}': "0+9x30"}, {"requests": 90}
    ),
    "another canary's": Case(
        {
            name.replace("strict", "other"): values
            for name, values in BUSY.items()
            if "canary" in name
        },
        {},
    ),
}


@needs_promtool
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_prometheus_evaluates_queries(case: Case, tmp_path: Path) -> None:
    given = write_series(case.series, namespace=NAMESPACE, job=NAME, instance="a")
    asked = [
        {
            "expr": f"round({query_of(name)}, 0.0001)",  # increase() extrapolates
            "eval_time": "20m",
            "exp_samples": [{"labels": "{}", "value": case.answers[name]}]
            if name in case.answers
            else [],
        }
        for name in METRICS
    ]
    run_promtool(
        {"tests": [{"interval": "1m", "input_series": given, "promql_expr_test": asked}]}, tmp_path
    )
