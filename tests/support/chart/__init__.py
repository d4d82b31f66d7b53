"""The chart, rendered by Helm's own engine."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import helm_python
import pytest

from tests.support import ROOT

CHART = ROOT / "helm" / "loopguard"
NAMESPACE = "guards"
RELEASE = "lg"
NAME = "lg-loopguard"

Values = dict[str, Any]
Object = dict[str, Any]

# Values of a release that enforces and is monitored; every rendering starts from them.
ENFORCING: Values = {
    "shadow": {"enabled": False},
    "networkPolicy": {"gateways": [{"podSelector": {}}], "monitoring": [{"podSelector": {}}]},
}

# The chart's own defaults for these.
DEFAULTS: Values = {
    "shadow": {"enabled": True},
    "networkPolicy": {"gateways": [], "monitoring": []},
}


def read_cases() -> dict[str, Values]:
    files = sorted((CHART / "ci").glob("*-values.yaml"))
    found = {
        file.name.removesuffix("-values.yaml"): helm_python.values_from_yaml(file.read_text())
        for file in files
    }
    return {"defaults": DEFAULTS, **found}


def read_examples() -> dict[str, Values]:
    files = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
    return {
        f"example-{file.stem}": helm_python.values_from_yaml(file.read_text()) for file in files
    }


CASES = {**read_cases(), **read_examples()}


@cache
def chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def rendered(
    values: Values, *, release: str = RELEASE, namespace: str = NAMESPACE
) -> dict[str, str]:
    return chart().render(merged(ENFORCING, values), name=release, namespace=namespace)


def objects(values: Values, *, release: str = RELEASE, namespace: str = NAMESPACE) -> list[Object]:
    made: list[Object] = json.loads(render_objects(json.dumps(values), release, namespace))
    return made


@cache
def render_objects(values: str, release: str, namespace: str) -> str:
    """`objects` from and to JSON, cached: many tests render the same values."""
    return json.dumps(split(rendered(json.loads(values), release=release, namespace=namespace)))


def split(texts: Mapping[str, str]) -> list[Object]:
    documents = [
        part
        for name, text in texts.items()
        if name.endswith(".yaml")
        for part in f"\n{text}".split("\n---\n")
    ]
    return [made for made in map(helm_python.values_from_yaml, documents) if made]


def of_kind(made: list[Object], kind: str) -> list[Object]:
    return [item for item in made if item["kind"] == kind]


def strict(schema: Any) -> Any:  # noqa: ANN401  # raw JSON
    """A JSON Schema without unknown keys."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(item) for key, item in schema.items()}
    return (
        {"additionalProperties": False, **made}
        if "properties" in made and made.get("type") == "object"
        else made
    )


def one(made: list[Object], kind: str, name: str = NAME) -> Object:
    (found,) = (item for item in of_kind(made, kind) if item["metadata"]["name"] == name)
    return found


def pods(made: list[Object]) -> Iterator[Object]:
    for item in made:
        if item["kind"] == "Pod":
            yield item["spec"]
        elif item["kind"] == "Deployment":
            yield item["spec"]["template"]["spec"]


def environment(deployment: Object) -> dict[str, str]:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {item["name"]: item["value"] for item in container["env"]}


def refusal(values: Values) -> str:
    with pytest.raises((helm_python.HelmValuesError, helm_python.HelmRenderError)) as failure:
        rendered(values)
    return str(failure.value)


def problems(values: Values) -> list[str]:
    """The sentences of the chart's own checks that refuse values."""
    return [
        line.removeprefix("- ") for line in refusal(values).splitlines() if line.startswith("- ")
    ]


def with_policies(*policies: Object, **more: object) -> Values:
    return {"policies": {"bundle": {"bundle_version": 1, "policies": list(policies), **more}}}


def merged(*several: Values) -> Values:
    made: Values = {}
    for values in several:
        for key, item in values.items():
            below = made.get(key)
            made[key] = (
                merged(below, item)
                if isinstance(below, dict) and isinstance(item, dict)
                else json.loads(json.dumps(item))
            )
    return made
