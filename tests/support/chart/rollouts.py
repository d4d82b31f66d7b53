"""Types of Argo Rollouts' and Flagger's objects, from their Go types.

Keys that the chart does not use are left out, and so refused. No package has them.
"""

from tests.support.chart.envoy_gateway import TEXT, Schema, a_list, a_map, an_object

# What Go's time.ParseDuration takes
_DURATION: Schema = {
    "type": "string",
    "pattern": "^[1-9][0-9]*[smh]$",
}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_URL: Schema = {"type": "string", "pattern": "^https?://[^/]+"}

_METRIC = a_map(
    "name provider",
    name=TEXT,
    interval=_DURATION,
    count=_COUNT,
    successCondition=TEXT,
    failureCondition=TEXT,
    failureLimit=_COUNT,
    inconclusiveLimit=_COUNT,
    provider=a_map("prometheus", prometheus=a_map("address query", address=_URL, query=TEXT)),
)
_TEMPLATE = an_object(
    "argoproj.io/v1alpha1",
    "ClusterAnalysisTemplate",
    a_map(
        "metrics",
        args=a_list(a_map("name", name=TEXT, value={"type": "string"})),
        metrics=a_list(_METRIC),
    ),
)
_TEMPLATE["properties"]["metadata"] = a_map(
    "name", name=TEXT, labels={"type": "object", "additionalProperties": {"type": "string"}}
)

ROLLOUTS: dict[str, Schema] = {
    "ClusterAnalysisTemplate": _TEMPLATE,
    "MetricTemplate": an_object(
        "flagger.app/v1beta1",
        "MetricTemplate",
        a_map(
            "provider query",
            provider=a_map("type address", type={"const": "prometheus"}, address=_URL),
            query=TEXT,
        ),
    ),
}

# Kinds without a namespace.
CLUSTER_WIDE = {"ClusterAnalysisTemplate"}
