"""The chart's objects."""

import asyncio
import io
import json
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import helm_python
import jsonschema  # type: ignore[import-untyped]  # published without type information
import kubernetes_validate  # type: ignore[import-untyped]  # same
import pytest
import trustme

from extproc import settings
from extproc.cli.main import main
from extproc.policy.loader import load
from extproc.policy.presets import DEFAULT_PRESET, find_preset
from extproc.server import Server
from tests.support.chart import (
    CASES,
    CHART,
    DEFAULTS,
    NAME,
    NAMESPACE,
    RELEASE,
    Object,
    Values,
    chart,
    environment,
    merged,
    objects,
    of_kind,
    one,
    pods,
    rendered,
    split,
    strict,
    with_policies,
)
from tests.support.chart.envoy_gateway import ENVOY_GATEWAY
from tests.support.chart.kgateway import AGENTGATEWAY, KGATEWAY
from tests.support.chart.rollouts import CLUSTER_WIDE, ROLLOUTS
from tests.support.documents import bundle, policy

# The oldest supported version, a middle one, and the newest with published schemas.
KUBERNETES = ("1.27", "1.32", "1.37")

GATEWAY_TYPES = ENVOY_GATEWAY | KGATEWAY | AGENTGATEWAY

each_case = pytest.mark.parametrize("values", CASES.values(), ids=CASES)


# It reads megabytes of schemas for each object.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)


# The schemas take seconds to import.
needs_schemas = pytest.mark.deep


@cache
def find_validators() -> dict[str, jsonschema.Draft202012Validator]:
    from cloudcoil.models.istio.networking.v1 import DestinationRule
    from cloudcoil.models.istio.networking.v1alpha3 import EnvoyFilter
    from cloudcoil.models.prometheus_operator.v1 import PodMonitor, PrometheusRule, ServiceMonitor

    models = (ServiceMonitor, PodMonitor, PrometheusRule, EnvoyFilter, DestinationRule)
    schemas: dict[str, Any] = (
        {model.__name__: model.model_json_schema() for model in models} | GATEWAY_TYPES | ROLLOUTS
    )
    return {
        kind: jsonschema.Draft202012Validator(strict(schema)) for kind, schema in schemas.items()
    }


def wrong_with(item: Object, kubernetes: str = KUBERNETES[-1]) -> str:
    """An API server's complaint about an object; empty if it is valid."""
    error: jsonschema.ValidationError | None = None
    if validator := find_validators().get(item["kind"]):
        error = jsonschema.exceptions.best_match(validator.iter_errors(item))
    else:
        try:
            kubernetes_validate.validate(item, kubernetes, strict=True)
        except kubernetes_validate.ValidationError as failure:
            error = failure
    return (
        f"{item['kind']} {'/'.join(map(str, error.absolute_path))}: {error.message}"
        if error
        else ""
    )


# ---- Every case


@each_case
def test_chart_passes_strict_lint(values: Values) -> None:
    report = helm_python.lint(CHART, values, strict=True, namespace=NAMESPACE)

    assert report["errors"] == []
    assert [found for found in report["messages"] if found["severity"] > 1] == []


@each_case
def test_gateway_objects_match_their_types(values: Values) -> None:
    """`make test-mesh` compares them with the real CRDs, where these can be had."""
    for item in objects(values):
        if schema := GATEWAY_TYPES.get(item["kind"]):
            jsonschema.validate(item, strict(schema), jsonschema.Draft202012Validator)


@needs_schemas
@pytest.mark.parametrize("kubernetes", KUBERNETES)
@each_case
def test_objects_match_schemas(values: Values, kubernetes: str) -> None:
    made = objects(values)

    assert [wrong for item in made if (wrong := wrong_with(item, kubernetes))] == []


@each_case
def test_object_names_are_unique_and_in_namespace(values: Values) -> None:
    made = objects(values)
    elsewhere = {
        "EnvoyFilter": "istio",
        "EnvoyExtensionPolicy": "envoyGateway",
        "ClientTrafficPolicy": "envoyGateway",
        **dict.fromkeys(("GatewayExtension", "TrafficPolicy", "ListenerPolicy"), "kgateway"),
        "AgentgatewayPolicy": "agentgateway",
    }

    for item in made:
        mesh = values.get(elsewhere.get(item["kind"], ""), {})
        expected = None if item["kind"] in CLUSTER_WIDE else mesh.get("namespace", NAMESPACE)
        assert item["metadata"].get("namespace") == expected
    assert max(Counter((item["kind"], item["metadata"]["name"]) for item in made).values()) == 1


@each_case
def test_pod_starts_from_its_variables_and_files(values: Values, tmp_path: Path) -> None:
    made = objects(values)
    for deployment in of_kind(made, "Deployment"):
        root = tmp_path / deployment["metadata"]["name"]
        fill(root, deployment, made)
        given = {
            name: value.replace("/etc/loopguard", str(root))
            for name, value in environment(deployment).items()
        }

        chosen = settings.read_settings({}, given)
        asyncio.run(assemble(chosen))

        assert (check_first(deployment, root), settings.find_unknown(given)) == (0, [])
        assert (chosen.listen.host, chosen.listen.port, chosen.admin.port) == (
            "0.0.0.0",  # noqa: S104  # a pod's
            50051,
            9900,
        )


async def assemble(chosen: settings.Settings) -> None:
    Server(chosen)


def fill(root: Path, deployment: Object, made: list[Object]) -> None:
    """Put below `root` what the kubelet would mount.

    ConfigMaps and Secrets that the chart does not make are stand-ins.
    """
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    places = {
        mount["name"]: root / Path(mount["mountPath"]).relative_to("/etc/loopguard")
        for mount in container["volumeMounts"]
    }
    maps = {item["metadata"]["name"]: item["data"] for item in of_kind(made, "ConfigMap")}
    for volume in spec["volumes"]:
        place = places.pop(volume["name"])
        place.mkdir(parents=True)
        if "configMap" in volume:
            name = volume["configMap"]["name"]
            files = maps.get(
                name, {"own.json": json.dumps(policy(f"{name}-own", {"pathPrefix": f"/{name}"}))}
            )
        elif "projected" in volume:
            files = {
                key: text
                for each in volume["projected"]["sources"]
                for key, text in maps[each["configMap"]["name"]].items()
            }
        else:
            keys = {item["path"]: item["key"] for item in volume["secret"].get("items", ())}
            stored = secret(volume["secret"]["secretName"])
            files = {path: stored[key] for path, key in keys.items()} if keys else stored
        for name, text in files.items():
            (place / name).write_text(text)
    assert places == {}, "every mount has its volume"


def check_first(deployment: Object, root: Path) -> int:
    (container,) = deployment["spec"]["template"]["spec"]["initContainers"]
    return main([argument.replace("/etc/loopguard", str(root)) for argument in container["args"]])


def secret(name: str) -> dict[str, str]:
    if "tls" not in name:
        return {
            "password": "hush",
            "redis-password": "hush",
            "tokens": f"{'t' * 16}\n",
            "admin": f"{'t' * 16}\n",
            "hash-key": "k" * 64,
            "secret": "s" * 32,
        }
    authority = trustme.CA()
    client = authority.issue_cert("client")
    chain = b"".join(blob.bytes() for blob in client.cert_chain_pems)
    parts = {
        "ca.crt": authority.cert_pem.bytes(),
        "tls.crt": chain,
        "tls.key": client.private_key_pem.bytes(),
    }
    return {key: part.decode() for key, part in parts.items()}


TEAMS: Values = {
    "policies": {
        "teams": [
            {"configMap": "shop-policies", "paths": ["/shop-policies", "/cart"], "ids": ["shop-"]},
            {"configMap": "search.policies", "hosts": ["search.example.com"], "routes": ["search"]},
            {"configMap": "platform-policies"},
        ]
    }
}


def test_team_config_maps_are_mounted_with_namespaces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = objects(TEAMS)
    deployment = one(made, "Deployment")
    fill(tmp_path, deployment, made)
    given = environment(deployment)
    code = check_first(deployment, tmp_path)
    told = capsys.readouterr().err

    assert given["LOOPGUARD_POLICY"].split(":") == [
        "/etc/loopguard/policies",
        *(
            f"/etc/loopguard/teams/{name}"
            for name in ("shop-policies", "search.policies", "platform-policies")
        ),
    ]
    assert given["LOOPGUARD_NAMESPACE_OF"].split(" ") == [
        "/etc/loopguard/teams/shop-policies=id:shop-,path:/shop-policies,path:/cart",
        "/etc/loopguard/teams/search.policies=host:search.example.com,route:search",
    ]
    assert code == 1
    assert (
        f"{tmp_path}/teams/search.policies/own.json: /spec/selector/hosts: must name only "
        "search.example.com"
    ) in told
    assert "platform-policies" not in told


@pytest.mark.parametrize(
    ("values", "checks", "on_bad_file"),
    [
        ({}, True, []),
        ({"policies": {"validateFirst": False}}, False, ["skip"]),
        (
            {"policies": {"validateFirst": False}, "settings": {"onBadFile": "exit"}},
            False,
            ["exit"],
        ),
    ],
)
def test_init_container_is_optional(
    values: Values, checks: bool, on_bad_file: list[str]
) -> None:  # a table's
    spec = one(objects(values), "Deployment")["spec"]["template"]["spec"]
    given = [
        each["value"]
        for each in spec["containers"][0]["env"]
        if each["name"] == "LOOPGUARD_ON_BAD_FILE"
    ]

    assert ("initContainers" in spec, given) == (checks, on_bad_file)


def long_policy(number: int) -> Object:
    return {
        **policy(f"p-{number:02}", {"pathPrefix": f"/{number}"}, limit_keys=["jwt:org"]),
        "x-note": "n" * 100_000,
    }


def test_large_bundle_is_split_into_config_maps(tmp_path: Path) -> None:
    switch = {"scope_key": "header:x", "scope_value": "y"}
    shadow = {"enabled": True}
    policies = [long_policy(number) for number in range(20)]
    made = objects(
        with_policies(
            *policies, kill_switches=[switch], global_shadow=shadow, kill_switch_override=shadow
        )
    )
    maps = [item for item in of_kind(made, "ConfigMap") if "policies" in item["metadata"]["name"]]
    fill(tmp_path, one(made, "Deployment"), made)
    loaded = load([str(tmp_path / "policies")], datetime.now(UTC))

    assert [item["metadata"]["name"] for item in maps] == [
        f"{NAME}-policies-{number}-of-3" for number in (1, 2, 3)
    ]
    assert max(len(text) for item in maps for text in item["data"].values()) <= 900_000
    assert [each.id for source in loaded.sources for each in source.policies] == [
        each["id"] for each in policies
    ]
    assert [source.shadow_until is not None for source in loaded.sources] == [True] * 3
    assert [len(source.kill_switches) for source in loaded.sources] == [1, 0, 0]
    assert loaded.sources[0].override_until is not None


@each_case
def test_pods_are_restricted(values: Values) -> None:
    made = list(pods(objects(values)))

    for spec in made:
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert {"hostNetwork", "hostPID", "hostIPC"}.isdisjoint(spec)
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]


@each_case
def test_selectors_match_one_deployment(values: Values) -> None:
    made = objects(values)
    labels = {
        item["metadata"]["name"]: item["spec"]["template"]["metadata"]["labels"]
        for item in of_kind(made, "Deployment")
    }
    labels |= {
        item["metadata"]["name"]: item["metadata"]["labels"] for item in of_kind(made, "Pod")
    }

    def selected(selector: dict[str, str]) -> list[str]:
        return [name for name, own in labels.items() if selector.items() <= own.items()]

    for item in of_kind(made, "Deployment"):
        assert selected(item["spec"]["selector"]["matchLabels"]) == [item["metadata"]["name"]]
    for item in of_kind(made, "Service"):
        assert selected(item["spec"]["selector"]) == [item["metadata"]["name"]]
        (container,) = one(made, "Deployment", item["metadata"]["name"])["spec"]["template"][
            "spec"
        ]["containers"]
        numbers = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert numbers == {port["targetPort"]: port["port"] for port in item["spec"]["ports"]}
        assert "grpc-extproc" in numbers
    for item in of_kind(made, "PodDisruptionBudget"):
        assert selected(item["spec"]["selector"]["matchLabels"]) == [item["metadata"]["name"]]
    for item in of_kind(made, "HorizontalPodAutoscaler"):
        assert (
            "replicas"
            not in one(made, "Deployment", item["spec"]["scaleTargetRef"]["name"])["spec"]
        )


@each_case
def test_monitors_scrape_each_target_once(values: Values) -> None:
    made = objects(values)
    for item in [*of_kind(made, "ServiceMonitor"), *of_kind(made, "PodMonitor")]:
        spec = item["spec"]
        (endpoint,) = (
            spec["endpoints"] if item["kind"] == "ServiceMonitor" else spec["podMetricsEndpoints"]
        )
        wanted = spec["selector"]["matchLabels"].items()
        if item["kind"] == "ServiceMonitor":
            targets = [
                (target["metadata"]["labels"], target["spec"]["ports"])
                for target in of_kind(made, "Service")
            ]
        else:
            templates = [target["spec"]["template"] for target in of_kind(made, "Deployment")]
            targets = [
                (template["metadata"]["labels"], template["spec"]["containers"][0]["ports"])
                for template in templates
            ]

        jobs = [labels[spec["jobLabel"]] for labels, _ in targets if wanted <= labels.items()]

        assert jobs == [
            deployment["metadata"]["name"] for deployment in of_kind(made, "Deployment")
        ]
        assert all(endpoint["port"] in [port["name"] for port in ports] for _, ports in targets)


@each_case
def test_grace_period_covers_drain(values: Values) -> None:
    for deployment in of_kind(objects(values), "Deployment"):
        spec = deployment["spec"]["template"]["spec"]
        given = settings.read_settings({}, environment(deployment))
        (container,) = spec["containers"]

        assert spec["terminationGracePeriodSeconds"] > given.drain_delay + given.drain_timeout + 1
        assert given.drain_delay > 0
        assert "lifecycle" not in container
        for probe in ("startupProbe", "readinessProbe"):  # the kubelet's gRPC probes speak no TLS
            over_http = {"path": "/readyz", "port": "http-admin"} if given.tls_cert else None
            assert container[probe].get("httpGet") == over_http
            assert container[probe].get("grpc") == (
                None if given.tls_cert else {"port": given.listen.port}
            )
        assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http-admin"}


@each_case
def test_helm_test_checks_every_service(values: Values) -> None:
    made = objects(values)
    (pod,) = of_kind(made, "Pod")
    asked = [
        argument.removeprefix("--address=")
        for container in pod["spec"]["containers"]
        for argument in container["args"]
        if argument.startswith("--address=")
    ]

    assert sorted(asked) == sorted(
        f"{item['metadata']['name']}:50051" for item in of_kind(made, "Service")
    )
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["spec"]["restartPolicy"] == "Never"


@each_case
def test_notes_name_objects_of_release(values: Values) -> None:
    made = objects(values)
    notes = rendered(values)["loopguard/templates/NOTES.txt"]

    assert (
        f"kubectl -n {NAMESPACE} rollout status "
        f"deployment/{of_kind(made, 'Deployment')[0]['metadata']['name']}"
    ) in notes
    assert (
        f"kubectl -n {NAMESPACE} port-forward "
        f"service/{of_kind(made, 'Service')[0]['metadata']['name']} 9900"
    ) in notes
    assert f"helm -n {NAMESPACE} test lg" in notes
    for item in of_kind(made, "Service"):
        assert f"{item['metadata']['name']}.{NAMESPACE}:50051" in notes


GATEWAYS = ("istio", "envoyGateway", "kgateway", "agentgateway")


@each_case
def test_notes_detach_gateway_before_removal(values: Values) -> None:
    """`helm uninstall` deletes the Service before a gateway's policy."""
    notes = rendered(values)["loopguard/templates/NOTES.txt"]
    attached = [name for name in GATEWAYS if values.get(name, {}).get("enabled")]

    _, _, removal = notes.partition("To remove Loopguard, detach the gateway first.")
    assert re.findall(r"--set (\w+)\.enabled=false", removal) == attached
    assert bool(attached) == (f"helm -n {NAMESPACE} uninstall lg" in removal)
    off = merged(values, {name: {"enabled": False} for name in attached})
    if "--set envoy.shadowMode=\n" in removal:  # observability mode needs Istio
        off["envoy"]["shadowMode"] = ""
    assert not {item["kind"] for item in objects(off)} & {
        "EnvoyFilter",
        "EnvoyExtensionPolicy",
        "TrafficPolicy",
        "AgentgatewayPolicy",
    }


# ---- Switches


def kinds(values: Values) -> set[tuple[str, str]]:
    return {(item["kind"], item["metadata"]["name"]) for item in objects(values)}


def test_defaults_need_no_custom_resources() -> None:
    made = kinds({})

    assert made == {
        ("Deployment", NAME),
        ("Service", NAME),
        ("ConfigMap", f"{NAME}-policies"),
        ("ServiceAccount", NAME),
        ("PodDisruptionBudget", NAME),
        ("NetworkPolicy", NAME),
        ("Pod", f"{NAME}-test"),
    }


@pytest.mark.parametrize(
    ("values", "added", "removed"),
    [
        (
            {"autoscaling": {"enabled": True}, "store": {"url": "redis://r"}},
            {("HorizontalPodAutoscaler", NAME)},
            set(),
        ),
        ({"podDisruptionBudget": {"enabled": False}}, set(), {("PodDisruptionBudget", NAME)}),
        ({"serviceAccount": {"create": False}}, set(), {("ServiceAccount", NAME)}),
        ({"policies": {"existingConfigMap": "mine"}}, set(), {("ConfigMap", f"{NAME}-policies")}),
        ({"networkPolicy": {"enabled": False}}, set(), {("NetworkPolicy", NAME)}),
        ({"tls": {"existingSecret": "s"}}, set(), {("Pod", f"{NAME}-test")}),
        ({"tls": {"existingSecret": "s", "testSecret": "t"}}, set(), set()),
        ({"monitoring": {"serviceMonitor": {"enabled": True}}}, {("ServiceMonitor", NAME)}, set()),
        ({"monitoring": {"podMonitor": {"enabled": True}}}, {("PodMonitor", NAME)}, set()),
        ({"monitoring": {"prometheusRule": {"enabled": True}}}, {("PrometheusRule", NAME)}, set()),
        (
            {"monitoring": {"grafanaDashboard": {"enabled": True}}},
            {("ConfigMap", f"{NAME}-dashboards")},
            set(),
        ),
        (
            {"analysis": {"argoRollouts": {"enabled": True}, "prometheusAddress": "http://p:9090"}},
            {("ClusterAnalysisTemplate", f"{NAMESPACE}-{NAME}")},
            set(),
        ),
        (
            {"analysis": {"flagger": {"enabled": True}, "prometheusAddress": "http://p:9090"}},
            {
                ("MetricTemplate", f"{NAME}-{name}")
                for name in (
                    "new-refusals",
                    "disagreement",
                    "requests",
                    "fail-open",
                    "decision-p99",
                )
            },
            set(),
        ),
        (
            {"canary": {"enabled": True}},
            {("Deployment", f"{NAME}-canary"), ("Service", f"{NAME}-canary")},
            set(),
        ),
        (
            {
                "canary": {
                    "enabled": True,
                    "policies": {"bundle": {"bundle_version": 2, "policies": []}},
                }
            },
            {(kind, f"{NAME}-canary") for kind in ("Deployment", "Service")}
            | {("ConfigMap", f"{NAME}-canary-policies")},
            set(),
        ),
    ],
    ids=lambda item: json.dumps(item) if isinstance(item, dict) else "",
)
def test_switch_adds_only_its_objects(
    values: Values, added: set[tuple[str, str]], removed: set[tuple[str, str]]
) -> None:
    before, after = kinds({}), kinds(values)

    assert (after - before, before - after) == (added, removed)


# ---- Policies


def test_default_policy_is_preset_in_shadow() -> None:
    watching = chart().render({}, name=RELEASE, namespace=NAMESPACE)
    made = split(watching)
    (text,) = one(made, "ConfigMap", f"{NAME}-policies")["data"].values()
    preset = json.loads(Path(find_preset(DEFAULT_PRESET)).read_text())
    enforcing = objects({"shadow": {"enabled": False}})

    assert (json.loads(text), preset["spec"]["mode"]) == (bundle(preset), "enforce")
    assert environment(one(made, "Deployment"))["LOOPGUARD_SHADOW"] == "true"
    assert environment(one(enforcing, "Deployment"))["LOOPGUARD_SHADOW"] == "false"
    assert one(enforcing, "ConfigMap", f"{NAME}-policies") == one(
        made, "ConfigMap", f"{NAME}-policies"
    )


def test_command_in_notes_enforces() -> None:
    notes = rendered(DEFAULTS)["loopguard/templates/NOTES.txt"]
    (gateways,) = re.findall(r"--set-json 'networkPolicy.gateways=(.*)'", notes)

    made = objects(
        merged(
            DEFAULTS,
            {"shadow": {"enabled": False}, "networkPolicy": {"gateways": json.loads(gateways)}},
        )
    )

    assert environment(one(made, "Deployment"))["LOOPGUARD_SHADOW"] == "false"


def test_policy_change_restarts_no_pod() -> None:
    before = {(item["kind"], item["metadata"]["name"]): item for item in objects(CASES["memory"])}
    changed = policy("slow", {"pathPrefix": "/"}, action="throttle", max_delay_ms=30_000)
    after = {
        (item["kind"], item["metadata"]["name"]): item
        for item in objects(merged(CASES["memory"], with_policies(changed)))
    }

    assert [name for name, item in after.items() if before[name] != item] == [
        ("ConfigMap", f"{NAME}-policies")
    ]
    for spec in pods(list(after.values())):
        assert [
            mount
            for container in spec["containers"]
            for mount in container.get("volumeMounts", ())
            if "subPath" in mount
        ] == []


CANARY_BUNDLE = {"bundle_version": 2, "policies": [policy("new", {"pathPrefix": "/"})]}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"stable": (False, "")}),
        ({"shadow": {"enabled": True}}, {"stable": (True, "")}),
        ({"canary": {"enabled": True}}, {"stable": (False, ""), "canary": (True, "canary")}),
        (
            {"canary": {"enabled": True}, "settings": {"scope": "gateway"}},
            {"stable": (False, "gateway"), "canary": (True, "gateway-canary")},
        ),
        (
            {
                "canary": {"enabled": True, "shadow": {"enabled": False}},
                "store": {"url": "redis://r"},
            },
            {"stable": (False, ""), "canary": (False, "")},
        ),
        (
            {
                "canary": {"enabled": True, "shadow": {"enabled": False}},
                "shadow": {"enabled": True},
                "store": {"url": "redis://r"},
            },
            {"stable": (True, ""), "canary": (True, "")},
        ),
    ],
)
def test_shadow_replicas_count_in_own_scope(
    values: Values, expected: dict[str, tuple[bool, str]]
) -> None:
    found = {}
    for deployment in of_kind(objects(values), "Deployment"):
        given = settings.read_settings({}, environment(deployment))
        found[deployment["metadata"]["labels"]["app.kubernetes.io/component"]] = (
            given.shadow,
            given.scope,
        )

    assert found == expected


@pytest.mark.parametrize(
    ("canary", "config_map"),
    [
        ({}, f"{NAME}-policies"),
        ({"policies": {"bundle": CANARY_BUNDLE}}, f"{NAME}-canary-policies"),
        ({"policies": {"existingConfigMap": "theirs"}}, "theirs"),
    ],
)
def test_canary_mounts_own_or_stable_policies(canary: Values, config_map: str) -> None:
    deployment = one(
        objects({"canary": {"enabled": True, **canary}}), "Deployment", f"{NAME}-canary"
    )

    assert deployment["spec"]["template"]["spec"]["volumes"][0]["configMap"] == {"name": config_map}


@pytest.mark.parametrize(
    ("image", "canary", "expected"),
    [
        ({}, {}, [f"loopguard:{version('extproc-loopguard')}"] * 2),
        ({"tag": "1"}, {}, ["loopguard:1", "loopguard:1"]),
        ({"tag": "1"}, {"tag": "2"}, ["loopguard:1", "loopguard:2"]),
        (
            {"digest": f"sha256:{'1' * 64}"},
            {"tag": "2"},
            [f"loopguard@sha256:{'1' * 64}", "loopguard:2"],
        ),
        (
            {"tag": "1"},
            {"digest": f"sha256:{'2' * 64}"},
            ["loopguard:1", f"loopguard@sha256:{'2' * 64}"],
        ),
    ],
)
def test_image_digest_precedes_tag(image: Values, canary: Values, expected: list[str]) -> None:
    made = objects({"image": image, "canary": {"enabled": True, "image": canary}})
    images = [
        item["spec"]["template"]["spec"]["containers"][0]["image"]
        for item in of_kind(made, "Deployment")
    ]

    assert images == expected


# ---- Settings, store, network


def test_every_setting_reaches_process() -> None:
    described = json.loads((CHART / "values.schema.json").read_text())["definitions"]["Settings"][
        "properties"
    ]
    samples = {"boolean": True, "integer": 1_000_000, "number": 0.25, "string": "gateway"}
    wanted = {
        name: item["enum"][-1] if "enum" in item else samples[item["type"]]
        for name, item in described.items()
    } | {"showResults": 200}  # the maximum

    mounted: Values = {
        "extraVolumes": [{"name": "extra", "emptyDir": {}}],
        "extraVolumeMounts": [
            {"name": "extra", "mountPath": "/gateway"}
        ],  # the container's folder is /
    }
    given = settings.read_settings(
        {}, environment(one(objects({"settings": wanted, **mounted}), "Deployment"))
    )

    found = {
        name: getattr(given, re.sub("[A-Z]", lambda capital: f"_{capital[0].lower()}", name))
        for name in wanted
    }
    assert found == wanted


@pytest.mark.parametrize(
    ("url", "tls", "expected"),
    [
        ("rediss://r", {}, "rediss://r?ssl_ca_certs=/etc/loopguard/store-tls/ca.crt"),
        (
            "rediss+cluster://r?prefix=a:",
            {},
            "rediss+cluster://r?prefix=a:&ssl_ca_certs=/etc/loopguard/store-tls/ca.crt",
        ),
        (
            "rediss://r",
            {"caKey": "", "certKey": "c", "keyKey": "k"},
            "rediss://r?ssl_certfile=/etc/loopguard/store-tls/c&ssl_keyfile=/etc/loopguard/store-tls/k",
        ),
    ],
)
def test_store_url_names_tls_files(url: str, tls: Values, expected: str) -> None:
    deployment = one(
        objects({"store": {"url": url, "tls": {"existingSecret": "s", **tls}}}), "Deployment"
    )

    assert environment(deployment)["LOOPGUARD_STORE"] == expected


def test_network_policy_admits_named_peers() -> None:
    made = objects(CASES["everything"])
    spec = one(made, "NetworkPolicy", "loop-guard")["spec"]
    values = CASES["everything"]["networkPolicy"]
    test_labels = one(made, "Pod", "loop-guard-test")["metadata"]["labels"]

    grpc, admin = spec["ingress"]
    assert [rule["ports"] for rule in (grpc, admin)] == [[{"port": 50051}], [{"port": 9900}]]
    assert grpc["from"][:-1] == values["gateways"]
    assert grpc["from"][-1]["podSelector"]["matchLabels"].items() <= test_labels.items()
    assert (admin["from"], spec["egress"]) == (values["monitoring"], values["egress"])
    (expression,) = spec["podSelector"]["matchExpressions"]
    covered = {
        item["spec"]["template"]["metadata"]["labels"][expression["key"]]
        for item in of_kind(made, "Deployment")
    }
    assert set(expression["values"]) == covered
    assert test_labels[expression["key"]] not in expression["values"]


# The source of probes in Istio's ambient mode.
KUBELET = {"ipBlock": {"cidr": "169.254.7.127/32"}}


def mesh(tls: str) -> Values:
    istio = {
        "enabled": True,
        "namespace": "istio-ingress",
        "routes": [{"name": "chat"}],
        "tls": tls,
    }
    return {"istio": istio, "networkPolicy": {"monitoring": []}}


@pytest.mark.parametrize(
    ("values", "ports", "others"),
    [
        (mesh("AUTO"), [50051, 15008], [[KUBELET]]),
        (mesh("ISTIO_MUTUAL"), [50051], []),
        (mesh("DISABLE"), [50051], []),
        (DEFAULTS, [50051], []),
    ],
)
def test_network_policy_admits_mesh_port_in_ambient_mode(
    values: Values, ports: list[int], others: list[list[Object]]
) -> None:
    spec = one(objects(values), "NetworkPolicy")["spec"]
    first, *more = spec["ingress"]

    assert [port["port"] for port in first["ports"]] == ports
    assert all(peer.keys() <= {"podSelector", "namespaceSelector"} for peer in first["from"])
    assert ({"namespaceSelector": {}} in first["from"]) == (values is DEFAULTS)
    assert [rule["from"] for rule in more] == others
    assert (spec["policyTypes"], "egress" in spec) == (["Ingress"], False)


# ---- Secrets


@pytest.mark.parametrize(
    ("values", "secrets", "files"),
    [
        ({}, {}, {"ADMIN_TOKEN_FILE": None, "TLS_CERT": None}),
        (
            {"adminToken": {"existingSecret": "operators", "key": "night"}},
            {"admin-token": "operators"},
            {"ADMIN_TOKEN_FILE": "admin-token/night"},
        ),
        (
            {
                "hashKey": {"existingSecret": "hashes", "key": "k"},
                "events": {"existingSecret": "signing", "caKey": "ca.crt"},
                "settings": {"events": "https://events.example.com"},
            },
            {"hash-key": "hashes", "events": "signing"},
            {
                "HASH_KEY_FILE": "hash-key/k",
                "EVENTS_SECRET_FILE": "events/secret",
                "EVENTS_CA": "events/ca.crt",
            },
        ),
        (
            CASES["mutual-tls"],
            {"tls": "loopguard-tls"},
            {"TLS_CERT": "tls/tls.crt", "TLS_KEY": "tls/tls.key", "TLS_CLIENT_CA": "tls/ca.crt"},
        ),
    ],
)
def test_secrets_are_mounted_as_files(
    values: Values, secrets: dict[str, str], files: dict[str, str | None]
) -> None:
    deployment = one(objects(values), "Deployment")
    spec = deployment["spec"]["template"]["spec"]
    mounts = {mount["name"]: mount for mount in spec["containers"][0]["volumeMounts"]}
    given = environment(deployment)

    named = {
        volume["name"]: volume["secret"]["secretName"]
        for volume in spec["volumes"]
        if "secret" in volume
    }
    assert named == secrets
    assert all(mounts[name]["readOnly"] for name in named)
    for variable, file in files.items():
        name, _, key = (file or "").partition("/")
        assert given.get(f"LOOPGUARD_{variable}") == (
            f"{mounts[name]['mountPath']}/{key}" if file else None
        )


# ---- Mutual TLS


def test_client_sans_reach_process() -> None:
    given = settings.read_settings({}, environment(one(objects(CASES["mutual-tls"]), "Deployment")))

    assert [name.value for name in given.tls_client_san] == CASES["mutual-tls"]["tls"]["clientSans"]


def test_backend_tls_policy_names_authority_and_host() -> None:
    made = one(objects(CASES["mutual-tls"]), "BackendTLSPolicy")["spec"]
    by_service = merged(CASES["mutual-tls"], {"tls": {"serverName": ""}})

    assert made["targetRefs"] == [{"group": "", "kind": "Service", "name": NAME}]
    assert made["validation"]["caCertificateRefs"] == [
        {"group": "", "kind": "Secret", "name": "loopguard-tls"}
    ]
    assert made["validation"]["hostname"] == "loopguard.example"
    assert (
        one(objects(by_service), "BackendTLSPolicy")["spec"]["validation"]["hostname"]
        == f"{NAME}.{NAMESPACE}.svc"
    )


def test_helm_test_uses_client_certificate() -> None:
    (pod,) = of_kind(objects(CASES["mutual-tls"]), "Pod")
    (container,) = pod["spec"]["containers"]

    assert pod["spec"]["volumes"][0]["secret"]["secretName"] == "probe-tls"
    assert container["volumeMounts"][0]["mountPath"] == "/etc/loopguard/tls"
    assert container["args"][-4:] == [
        "--tls-ca=/etc/loopguard/tls/ca.crt",
        "--tls-cert=/etc/loopguard/tls/tls.crt",
        "--tls-key=/etc/loopguard/tls/tls.key",
        "--tls-server-name=loopguard.example",
    ]


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        ({}, True),
        ({"networkPolicy": {"enabled": False}}, False),
        (DEFAULTS, False),
        (merged(CASES["istio-gateway"], {"networkPolicy": {"enabled": False}}), True),
        (
            merged(
                CASES["istio-gateway"],
                {"networkPolicy": {"enabled": False}, "istio": {"tls": "DISABLE"}},
            ),
            False,
        ),
        (CASES["mutual-tls"], False),
    ],
)
def test_plaintext_warning_is_silenced_by_network_policy_or_mesh(
    values: Values, allowed: bool
) -> None:
    given = settings.read_settings({}, environment(of_kind(objects(values), "Deployment")[0]))

    assert given.allow_plaintext is allowed


# ---- Monitoring


def test_alerts_and_dashboards_equal_files() -> None:
    made = objects(CASES["everything"])
    rules = helm_python.values_from_yaml((CHART / "alerts" / "loopguard.rules.yaml").read_text())
    dashboards = {
        file.name: json.loads(file.read_text()) for file in (CHART / "dashboards").glob("*.json")
    }

    assert one(made, "PrometheusRule", "loop-guard")["spec"] == rules
    found = one(made, "ConfigMap", "loop-guard-dashboards")["data"]
    assert {name: json.loads(text) for name, text in found.items()} == dashboards
    assert dashboards


# ---- The chart as a package


@needs_schemas
def test_values_in_chart_readme_are_valid() -> None:
    shown = re.findall(r"```yaml\n(.*?)```", (CHART / "README.md").read_text(), re.DOTALL)

    made = objects(merged(*map(helm_python.values_from_yaml, shown)))

    assert [wrong for item in made if (wrong := wrong_with(item))] == []
    assert {"NetworkPolicy", "ServiceMonitor", "PrometheusRule"} <= {item["kind"] for item in made}


def test_app_version_is_project_version() -> None:
    with helm_python.Chart.load(CHART) as chart:
        assert chart.metadata["appVersion"] == version("extproc-loopguard")


def test_packaged_chart_renders_alike(tmp_path: Path) -> None:
    archive = Path(helm_python.package(CHART, destination=tmp_path))
    with helm_python.Chart.load(archive) as packed:
        made = packed.render(CASES["everything"], name="lg", namespace=NAMESPACE)

    assert made == rendered(CASES["everything"])
    with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as files:
        assert [name for name in files.getnames() if "/ci/" in name] == []


def label_values(item: Any) -> Iterator[str]:  # noqa: ANN401  # raw JSON
    if isinstance(item, dict):
        for key, below in item.items():
            if key in ("labels", "matchLabels"):
                yield from below.values()
            else:
                yield from label_values(below)
    elif isinstance(item, list):
        for below in item:
            yield from label_values(below)


def test_long_release_names_give_valid_names() -> None:
    values = merged(
        {
            "canary": {"enabled": True, "policies": {"bundle": CANARY_BUNDLE}},
            "nameOverride": "n" * 63,
        }
    )
    made = objects(values, release="r" * 53)
    names = {item["metadata"]["name"] for item in made}

    assert [
        name for name in names if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name)
    ] == []
    assert [text for text in label_values(made) if len(text) > 63] == []
    assert len(of_kind(made, "Deployment")) == 2


def test_own_labels_keep_selector_labels() -> None:
    own = {"app.kubernetes.io/component": "mine", "team": "ai"}
    made = objects(
        {"podLabels": own, "monitoring": {"podMonitor": {"enabled": True, "labels": own}}}
    )

    labels = one(made, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert (labels["app.kubernetes.io/component"], labels["team"]) == ("stable", "ai")
    assert one(made, "PodMonitor")["metadata"]["labels"]["team"] == "ai"
