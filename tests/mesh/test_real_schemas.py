"""Every object of the chart against the CRDs of Istio, Envoy Gateway and Gateway API.

CEL rules are not evaluated. The CRDs of kgateway and agentgateway are in no package that can be
had: tests/support/chart/kgateway.py has their types.
"""

from functools import cache
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]  # published without type information
import pytest
import yaml

from tests.support.chart import CASES, Object, Values, merged, objects, strict
from tests.support.meshes import BUILT

pytestmark = pytest.mark.skipif(
    not BUILT, reason="`make test-mesh` was not asked for: the real CRDs are NOT read"
)


def _add_header(schema: Object) -> Object:
    """The keys that every object has, which Istio's CRDs leave out."""
    made: Object = schema["openAPIV3Schema"]
    header: Object = {"apiVersion": {}, "kind": {}, "metadata": {}}
    return {**made, "properties": header | made["properties"]}


@cache
def find_validators() -> dict[tuple[str, str], jsonschema.Draft202012Validator]:
    """By apiVersion and kind."""
    definitions = [
        item["spec"]
        for item in yaml.load_all(Path(f"{BUILT}/crds.yaml").read_text(), yaml.CSafeLoader)
        if item and item["kind"] == "CustomResourceDefinition"
    ]
    return {
        (f"{crd['group']}/{version['name']}", crd["names"]["kind"]): (
            jsonschema.Draft202012Validator(strict(_add_header(version["schema"])))
        )
        for crd in definitions
        for version in crd["versions"]
    }


def find_errors(made: list[Object]) -> tuple[set[str], list[str]]:
    """The kinds that have a CRD, and what is wrong with their objects."""
    kinds, errors = set(), []
    for item in made:
        if validator := find_validators().get((item["apiVersion"], item["kind"])):
            kinds.add(item["kind"])
            errors += [
                f"{item['kind']} {error.json_path}: {error.message}"
                for error in validator.iter_errors(item)
            ]
    return kinds, errors


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_objects_match_real_crds(values: Values) -> None:
    kinds, errors = find_errors(objects(values))

    assert errors == []
    if values.get("istio", {}).get("enabled"):
        assert {"EnvoyFilter", "DestinationRule"} <= kinds
    if values.get("envoyGateway", {}).get("enabled"):
        assert {"EnvoyExtensionPolicy", "ClientTrafficPolicy", "ReferenceGrant"} <= kinds


def test_unknown_field_does_not_match() -> None:
    made = objects(merged(CASES["example-envoy-gateway"], {}))
    (extension,) = (item for item in made if item["kind"] == "EnvoyExtensionPolicy")
    extension["spec"]["extProc"][0]["maxMessageTimeout"] = "35s"

    (error,) = find_errors(made)[1]
    assert error.startswith("EnvoyExtensionPolicy $.spec.extProc[0]: ")
    assert "'maxMessageTimeout' was unexpected" in error
