"""Values that Helm refuses, and its messages."""

import json
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import helm_python
import pytest

from extproc.engine.engine import Engine
from extproc.engine.handover import HandedOver
from extproc.errors import BundleErrors, UsageError
from extproc.ext_proc.judging import HOLD_MARGIN_MS
from extproc.metrics import Metrics
from extproc.policy.bundle import MAX_DELAY_MS
from extproc.policy.loader import parse
from extproc.request.limit_keys import UNSUPPORTED_KEYS
from extproc.settings import is_scope
from extproc.store import open_store
from tests.support import ROOT
from tests.support.bundles import RULE
from tests.support.chart import (
    CHART,
    ENFORCING,
    Values,
    environment,
    merged,
    objects,
    one,
    problems,
    refusal,
    with_policies,
)
from tests.support.documents import bundle, policy

SHARE = (
    "name a store that they share, such as store.url=redis://redis:6379, or accept it with "
    "store.allowPerReplica=true"
)
REDIS: Values = {"store": {"url": "redis://redis"}}
SCALED: Values = {"autoscaling": {"enabled": True}}
CANARY: Values = {"canary": {"enabled": True}}
ACTING: Values = {"canary": {"enabled": True, "shadow": {"enabled": False}}}
GUARDED: Values = {"networkPolicy": {"gateways": [{"podSelector": {}}], "monitoring": []}}


def store(url: str, **more: object) -> Values:
    return {"store": {"url": url, **more}}


def throttle(**more: Any) -> Values:  # noqa: ANN401  # keys of loop_detection
    return with_policies(policy("slow", {"pathPrefix": "/"}, action="throttle", **more))


ON: Values = {"enabled": True, "workloadSelector": {"istio": "ingressgateway"}}
ISTIO: Values = {"istio": {**ON, "routes": [{"name": "chat"}]}}
GATEWAY: Values = {
    "envoyGateway": {
        "enabled": True,
        "targetRefs": [{"name": "chat"}],
        "clientTrafficPolicy": {"gateway": "public"},
    }
}
OWN_LIMITS: Values = {
    "envoyGateway": {
        "enabled": True,
        "targetRefs": [{"name": "a"}],
        "clientTrafficPolicy": {"enabled": False},
    }
}


def all_sidecars(context: str, namespace: str) -> Values:
    return {
        "istio": {
            "enabled": True,
            "context": context,
            "namespace": namespace,
            "routes": [{"name": "default"}],
        }
    }


def on_route(**more: object) -> Values:
    return {"istio": {**ON, "routes": [{"name": "chat", **more}]}}


MONITORS: Values = {
    "monitoring": {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}}
}
UNENFORCED: Values = {
    "rules": [RULE | {"limit_keys": ["ip:country"]}],
    "fallback_limit": RULE | {"name": "f", "match": {"ua:bot": "true"}},
}


def row(values: Values, *words: str) -> tuple[Values, str]:
    return values, " ".join(words)


PROBLEMS: list[tuple[Values, str]] = [
    row(
        merged(
            ISTIO,
            with_policies(
                {
                    "id": "agents",
                    "spec": {
                        "selector": {"pathPrefix": "/"},
                        "session_limits": {
                            "max_cost_per_session": 1,
                            "unknown_model": {"input": 1, "output": 1},
                        },
                    },
                }
            ),
        ),
        (
            "policies.bundle: policy agents limits costs or errors, which Loopguard learns only "
            "from "
            "Envoy: set"
        ),
        "envoy.usage=exact (Envoy 1.38, Istio 1.30), or estimated.",
    ),
    row(
        {"policies": {"teams": [{"configMap": "shop"}, {"configMap": "shop"}]}},
        "policies.teams[1].configMap=shop is mounted already: name each ConfigMap once.",
    ),
    row(
        {"policies": {"existingConfigMap": "shop", "teams": [{"configMap": "shop"}]}},
        "policies.teams[0].configMap=shop is mounted already: name each ConfigMap once.",
    ),
    row(
        with_policies(
            *(
                {**policy(f"p-{number}", {"pathPrefix": "/"}), "x-note": "n" * 450_000}
                for number in range(9)
            )
        ),
        (
            "policies.bundle takes 9 ConfigMaps of 900 KB, and a release of Helm has no room for "
            "more "
            "than 8: move policies to"
        ),
        "ConfigMaps of their own, and name these in policies.teams.",
    ),
    row(
        with_policies(
            {**policy("p", {"pathPrefix": "/"}), "x-note": "n" * 900_000},
            policy("q", {"pathPrefix": "/"}),
        ),
        (
            "policies.bundle has a policy, or kill switches, of more than 900 KB, and a ConfigMap "
            "has "
            "no room for more: make it"
        ),
        "smaller, or split it.",
    ),
    row(
        {"replicaCount": 3},
        (
            "replicaCount=3, and with store.url=memory:// each pod would count separately: "
            f"{SHARE}, "
            "or set replicaCount=1."
        ),
    ),
    row(
        SCALED,
        (
            "autoscaling.enabled may run several pods, and with store.url=memory:// each would "
            "count "
            f"separately: {SHARE}."
        ),
    ),
    row(
        {"canary": {"enabled": True, "replicaCount": 2}},
        (
            "canary.replicaCount=2, and with store.url=memory:// each pod would count separately: "
            f"{SHARE},"
        ),
        "or set canary.replicaCount=1.",
    ),
    row(
        ACTING,
        (
            "canary.shadow.enabled=false, and with store.url=memory:// the canary would count "
            "apart "
            "from the other pods, so that a"
        ),
        f"loop is split between them: {SHARE}, or leave the canary in shadow.",
    ),
    *(
        row(
            {"fullnameOverride": name},
            (
                f"{name} would be the name of the Service, which begins with a letter and has only "
                "small letters, digits and"
            ),
            "dashes: choose another in fullnameOverride, such as fullnameOverride=loopguard.",
        )
        for name in ("loop_guard", "1loopguard", "Loopguard", "loop.guard")
    ),
    *(
        row(
            {"image": {"repository": repository}},
            (
                f"image.repository={repository} has a tag or a digest in it, behind which the "
                "chart "
                "would put another: put it into"
            ),
            "image.tag or image.digest.",
        )
        for repository in ("loopguard:1", "host:5000/ai/loopguard:1", "host/loopguard@sha256:12")
    ),
    *(
        row(
            {"analysis": {tool: {"enabled": True}}},
            (
                "analysis.argoRollouts and analysis.flagger ask Prometheus, and nothing says where "
                "that is: set"
            ),
            "analysis.prometheusAddress, such as http://prometheus-operated.monitoring:9090.",
        )
        for tool in ("argoRollouts", "flagger")
    ),
    row(
        {"envoy": {"shadowMode": "observability"}},
        (
            "envoy.shadowMode=observability is for the filter that istio.enabled makes, and it is "
            "off, so nothing would keep"
        ),
        (
            "Loopguard from acting: enable istio, or set shadow.enabled=true in its place; for an "
            "Envoy of your own there is"
        ),
        "`loopguard envoy-config --shadow-mode observability`.",
    ),
    row(
        store("redis://redis/0?prefix=a:&password=hush"),
        (
            "store.url contains a password, which everybody who may read the Deployment would see: "
            "put it into a Secret, name that"
        ),
        "in store.existingSecret, and take it out of the URL.",
    ),
    row(
        store("redis://ann:hush@redis"),
        (
            "store.url contains a password, which everybody who may read the Deployment would see: "
            "put it into a Secret, name that"
        ),
        "in store.existingSecret, and take it out of the URL.",
    ),
    row(
        store("redis://ann@redis"),
        (
            "store.url names a user, and a user needs a password: name a Secret that holds it in "
            "store.existingSecret."
        ),
    ),
    row(
        store("redis+cluster://redis", tls={"existingSecret": "s"}),
        (
            "store.tls.existingSecret is for a store with TLS: write rediss in place of redis in "
            "store.url, or leave it out."
        ),
    ),
    row(
        store("rediss://redis", tls={"existingSecret": "s", "keyKey": "tls.key"}),
        (
            "store.tls.keyKey is the key of a certificate: name the certificate in "
            "store.tls.certKey "
            "as well."
        ),
    ),
    row(
        with_policies(
            policy("a", {"pathPrefix": "/"}),
            policy("b", {"pathPrefix": "/"}),
            policy("a", {"pathPrefix": "/b"}),
        ),
        "policies.bundle: two policies have the id a: give each an id of its own.",
    ),
    row(
        throttle(max_delay_ms=28_001) | {"envoy": {"maxMessageTimeoutSeconds": 30}},
        (
            "policies.bundle: policy slow may hold a request for 28001 ms, and "
            "envoy.maxMessageTimeoutSeconds=30 cuts that off:"
        ),
        "lower its max_delay_ms, or let Envoy wait at least 31 seconds.",
    ),
    row(
        throttle() | {"drain": {"timeoutSeconds": 10.5}},
        (
            "policies.bundle: policy slow may hold a request for 30000 ms, and "
            "drain.timeoutSeconds=10.5 cuts that off when a pod"
        ),
        "stops: lower its max_delay_ms, or set drain.timeoutSeconds to at least 32.",
    ),
    row(
        {
            "canary": {"enabled": True, "policies": throttle()["policies"]},
            "envoy": {"maxMessageTimeoutSeconds": 10},
            **with_policies(),
        },
        (
            "canary.policies.bundle: policy slow may hold a request for 30000 ms, and "
            "envoy.maxMessageTimeoutSeconds=10 cuts that"
        ),
        "off: lower its max_delay_ms, or let Envoy wait at least 32 seconds.",
    ),
    row(
        with_policies(
            policy("a", {"pathPrefix": "/"}),
            kill_switches=[{"scope_key": "ip:asn", "scope_value": "64496"}],
        ),
        (
            "policies.bundle: Loopguard cannot derive ip:asn, so kill_switches[0] stops no caller: "
            "take it out, or accept that"
        ),
        "with settings.allowUnenforced=true.",
    ),
    row(
        with_policies(merged(policy("drop-in", {"pathPrefix": "/"}), {"spec": UNENFORCED})),
        (
            "policies.bundle: policy drop-in has the descriptor ip:country and the descriptor "
            "ua:bot, "
            "which Loopguard does not"
        ),
        "enforce: take that out, or accept it with settings.allowUnenforced=true.",
    ),
    row(
        with_policies(expires_at="2020-01-01T00:00:00.5+02:00"),
        (
            "policies.bundle: expires_at=2020-01-01T00:00:00.5+02:00 has passed: give a later "
            "time, "
            "or take it out."
        ),
    ),
    row(
        with_policies(global_shadow={"enabled": True, "expires_at": "2020-01-01T00:00:00Z"}),
        (
            "policies.bundle: global_shadow.expires_at=2020-01-01T00:00:00Z has passed: give a "
            "later "
            "time, or take it out."
        ),
    ),
    row(
        merged(SCALED, REDIS, {"autoscaling": {"minReplicas": 11}}),
        (
            "autoscaling.minReplicas=11 is more than autoscaling.maxReplicas=10: lower the one or "
            "raise the other."
        ),
    ),
    row(
        merged(SCALED, REDIS, {"resources": {"requests": {"cpu": None}}}),
        (
            "autoscaling.enabled compares usage with resources.requests.cpu, and there is none: "
            "set "
            "it."
        ),
    ),
    row(
        MONITORS,
        (
            "monitoring.serviceMonitor.enabled and monitoring.podMonitor.enabled would have every "
            "pod "
            "scraped and counted twice:"
        ),
        "enable one of them.",
    ),
    row(
        {"networkPolicy": {"gateways": []}},
        (
            "networkPolicy.gateways is empty, and with shadow.enabled=false every pod of the "
            "cluster "
            "could have any caller"
        ),
        (
            "refused: say where the Envoys run, such as [{namespaceSelector: {matchLabels: "
            "{kubernetes.io/metadata.name:"
        ),
        "istio-ingress}}}], or accept it with networkPolicy.enabled=false.",
    ),
    row(
        merged(ISTIO, {"tls": {"existingSecret": "s"}}),
        (
            "tls.existingSecret and istio.enabled would have Istio's Envoys, which have "
            "certificates "
            "of the mesh, refused: take"
        ),
        "tls.existingSecret out, and leave it to istio.tls=ISTIO_MUTUAL to say who may ask.",
    ),
    *(
        row(
            {"tls": {name: value}},
            (
                "tls.clientSans, tls.serverName and tls.testSecret mean nothing without mutual "
                "TLS: "
                "name a Secret in"
            ),
            "tls.existingSecret, or leave them out.",
        )
        for name, value in {"clientSans": ["a"], "serverName": "a", "testSecret": "a"}.items()
    ),
    row(
        {**GUARDED, "monitoring": {"podMonitor": {"enabled": True}}},
        (
            "networkPolicy.enabled keeps Prometheus out: say in networkPolicy.monitoring where it "
            "runs, such as"
        ),
        "[{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}].",
    ),
    *(
        row(
            all_sidecars("SIDECAR_INBOUND", namespace),
            (
                "istio.context=SIDECAR_INBOUND and no istio.workloadSelector means every sidecar "
                "in "
                "the namespace guards, that of"
            ),
            (
                "Loopguard's own pods among them, so that Loopguard would be asked about its own "
                "requests: select workloads, such"
            ),
            "as {app: agent-api}, or name their namespace in istio.namespace.",
        )
        for namespace in ("", "guards")
    ),
    row(
        all_sidecars("SIDECAR_OUTBOUND", "istio-system"),
        "istio.namespace=istio-system is where Istio takes an EnvoyFilter for the whole mesh, and",
        (
            "istio.context=SIDECAR_OUTBOUND with no istio.workloadSelector means every sidecar "
            "there "
            "is, that of Loopguard's own"
        ),
        (
            "pods among them: select workloads, such as {app: agent-api}, or name their namespace "
            "in "
            "istio.namespace."
        ),
    ),
    row(
        merged(
            ISTIO,
            {
                "istio": {
                    "context": "SIDECAR_INBOUND",
                    "workloadSelector": {"app": "a"},
                    "listenerPort": 8080,
                }
            },
        ),
        (
            "istio.listenerPort=8080 is no listener of istio.context=SIDECAR_INBOUND, where one "
            "takes "
            "in every port: leave it out."
        ),
    ),
    row(
        {"istio": ON, **with_policies(policy("tools", {"pathPrefix": "/mcp"}))},
        (
            "policies.bundle: policy tools selects requests by more than `apis`, and with no "
            "istio.routes only requests of model"
        ),
        (
            "APIs are shown to Loopguard: add `apis: any` to its selector, or name its routes in "
            "istio.routes, such as"
        ),
        "[{name: chat}].",
    ),
    *(
        row(
            {"istio": ON, **changes},
            (
                "envoy.bodyMode=tolerant, envoy.shadowMode=partial and envoy.usage=exact change "
                "the "
                "routes that are guarded: name"
            ),
            "these in istio.routes, such as [{name: chat}].",
        )
        for changes in (
            {"envoy": {"bodyMode": "tolerant"}},
            {"envoy": {"shadowMode": "partial"}, "shadow": {"enabled": True}},
            {"envoy": {"usage": "exact"}},
        )
    ),
    row(
        {"istio": {"enabled": True, "routes": [{"name": "chat"}]}},
        (
            "istio.context=GATEWAY and neither istio.namespace nor istio.workloadSelector means "
            "gateways in the namespace guards,"
        ),
        (
            "that of Loopguard itself: name the namespace of the gateway's pods in "
            "istio.namespace, "
            "or, where that is this one,"
        ),
        "their labels in istio.workloadSelector, such as {istio: ingressgateway}.",
    ),
    row(
        {
            "istio": {
                **ON,
                "routes": [{"name": "a"}, {"name": "a", "virtualHost": "h:80"}, {"name": "a"}],
            }
        },
        (
            "istio.routes names the route a in any virtual host twice, and Istio would merge the "
            "two: "
            "make one entry of them."
        ),
    ),
    row(
        on_route(policies=["agents", "strict"]),
        (
            "istio.routes[0].policies names strict, and policies.bundle has no policy of that id: "
            "add "
            "it there, or name one of"
        ),
        "agents.",
    ),
    row(
        merged(on_route(policies=["a"]), CANARY, with_policies(policy("a", {"pathPrefix": "/"})))
        | {
            "canary": {
                "enabled": True,
                "policies": with_policies(policy("b", {"pathPrefix": "/"}))["policies"],
            }
        },
        (
            "istio.routes[0].policies names a, and canary.policies.bundle has no policy of that "
            "id: "
            "add it there, or name one of"
        ),
        "b.",
    ),
    row(
        on_route(
            bundle=bundle(
                *(policy(f"{number:0>100}", {"pathPrefix": "/"}) for number in range(300))
            )
        ),
        (
            "istio.routes[0].bundle is 75933 bytes of JSON, and no more than 65536 can be handed "
            "over "
            "with a route: move"
        ),
        "its policies to policies.bundle, and name them in istio.routes[0].policies.",
    ),
    row(
        {
            **on_route(bundle=bundle(policy("slow", {}, action="throttle"))),
            "envoy": {"maxMessageTimeoutSeconds": 9},
            **with_policies(),
        },
        (
            "istio.routes[0].bundle: policy slow may hold a request for 30000 ms, and "
            "envoy.maxMessageTimeoutSeconds=9 cuts that"
        ),
        "off: lower its max_delay_ms, or let Envoy wait at least 32 seconds.",
    ),
    row(
        on_route(bundle=bundle(policy("a", {"pathPrefix": "/"}), policy("a", {"pathPrefix": "/"}))),
        "istio.routes[0].bundle: two policies have the id a: give each an id of its own.",
    ),
    *(
        row(
            merged(mesh, throttle(), {"envoy": {"maxMessageTimeoutSeconds": 31}}),
            (
                "policies.bundle: policy slow may hold a request for 30000 ms, and "
                "envoy.maxMessageTimeoutSeconds=31 cuts that"
            ),
            "off: lower its max_delay_ms, or let Envoy wait at least 32 seconds.",
        )
        for mesh in (ISTIO, GATEWAY)
    ),
    *(
        row(
            merged(mesh, throttle(), {"envoy": {"requestTimeoutSeconds": 31}}),
            (
                "policies.bundle: policy slow may hold a request for 30000 ms, and "
                "envoy.requestTimeoutSeconds=31 cuts that off:"
            ),
            "lower its max_delay_ms, or let a request take at least 32 seconds.",
        )
        for mesh in (ISTIO, GATEWAY)
    ),
    row(
        merged(ISTIO, throttle(), {"envoy": {"idleTimeoutSeconds": 31}}),
        (
            "policies.bundle: policy slow may hold a request for 30000 ms, and "
            "envoy.idleTimeoutSeconds=31 cuts that off:"
        ),
        "lower its max_delay_ms, or let a request take at least 32 seconds.",
    ),
    row(
        merged(OWN_LIMITS, {"envoyGateway": {"targetRefs": []}}),
        (
            "envoyGateway.enabled guards nothing, as long as no route is named: name some in "
            "envoyGateway.targetRefs, such as"
        ),
        "[{name: chat}], or the Gateway of all routes in envoyGateway.clientTrafficPolicy.gateway.",
    ),
    row(
        merged(GATEWAY, {"envoyGateway": {"clientTrafficPolicy": {"gateway": ""}}}),
        (
            "envoyGateway.enabled needs the Gateway's limits raised, or every body above 32 KiB "
            "gets "
            "a 413: name the Gateway in"
        ),
        (
            "envoyGateway.clientTrafficPolicy.gateway, or raise them in a ClientTrafficPolicy of "
            "your "
            "own and set"
        ),
        "envoyGateway.clientTrafficPolicy.enabled=false.",
    ),
    row(
        merged(GATEWAY, {"envoy": {"traceTags": True}}),
        (
            "envoy.traceTags is for the filter that istio.enabled makes, and Envoy Gateway's "
            "tracing "
            "has no tags from metadata:"
        ),
        (
            "leave it out, and add what `loopguard envoy-config --snippet --trace-tags` prints "
            "with "
            "an EnvoyPatchPolicy."
        ),
    ),
    row(
        merged(GATEWAY, {"envoy": {"shadowMode": "observability"}}),
        (
            "envoy.shadowMode=observability is nothing that Envoy Gateway can be told: set "
            "envoy.shadowMode=partial and"
        ),
        "shadow.enabled=true.",
    ),
    *(
        row(
            {"istio": {"enabled": True, "waypoint": "w", "tls": "AUTO", **more}},
            "istio.waypoint=w selects the waypoint by name, and ztunnel encrypts its connections:",
            "set istio.tls=AUTO, and leave out istio.workloadSelector and istio.listenerPort.",
        )
        for more in ({"tls": "DISABLE"}, {"workloadSelector": {"app": "a"}}, {"listenerPort": 80})
    ),
    *(
        row(
            {name: {"enabled": True, "targetRefs": [{"name": "chat"}]}},
            f"{name}.enabled raises the body limit of a Gateway, and none is named: set",
            f"{name}.gateway.",
        )
        for name in ("kgateway", "agentgateway")
    ),
    *(
        row(
            {name: {"enabled": True, "gateway": "public"}, "tls": {"existingSecret": "s"}},
            f"tls.existingSecret: the chart does not configure TLS from {name} to Loopguard: take",
            "it out, and let networkPolicy.gateways say who can connect.",
        )
        for name in ("kgateway", "agentgateway")
    ),
    row(
        merged(ISTIO, {"envoy": {"shadowMode": "partial"}}),
        (
            "envoy.shadowMode=partial has Envoy wait for Loopguard's answer, and an answer may be "
            "a "
            "refusal: set"
        ),
        (
            "shadow.enabled=true as well, or, to let policies act, envoy.bodyMode=tolerant in its "
            "place."
        ),
    ),
    row(
        merged(ISTIO, {"envoy": {"shadowMode": "observability", "failureMode": "deny"}}),
        (
            "envoy.failureMode=deny has requests fail while Loopguard is away, and "
            "envoy.shadowMode=observability is to keep it"
        ),
        "out of their way: set one of them only.",
    ),
]


@pytest.mark.parametrize(("values", "sentence"), PROBLEMS)
def test_invalid_combination_is_refused(values: Values, sentence: str) -> None:
    assert problems(values) == [sentence]


def test_release_name_with_leading_digit_is_refused() -> None:
    with pytest.raises(
        helm_python.HelmRenderError, match="1st-loopguard would be the name of the Service"
    ):
        objects({}, release="1st")


def test_all_problems_are_reported_at_once() -> None:
    found = problems(
        {"replicaCount": 2, "networkPolicy": {"gateways": [], "monitoring": []}, **MONITORS}
    )

    assert [sentence.partition(" ")[0] for sentence in found] == [
        "replicaCount=2,",
        "monitoring.serviceMonitor.enabled",
        "networkPolicy.enabled",
        "networkPolicy.gateways",
    ]


@pytest.mark.parametrize(
    "values",
    [
        {"replicaCount": 3, "store": {"allowPerReplica": True}},
        merged(SCALED, {"store": {"allowPerReplica": True}}),
        merged(SCALED, {"replicaCount": 3, "autoscaling": {"minReplicas": 1, "maxReplicas": 1}}),
        {"replicaCount": 0},
        merged(REDIS, {"replicaCount": 3}),
        {"image": {"repository": "host:5000/ai/loopguard"}},
        {"policies": {"existingConfigMap": "theirs"}},
        CANARY,
        merged(ACTING, REDIS),
        merged(ACTING, {"store": {"allowPerReplica": True}}),
        {"canary": {"enabled": False, "replicaCount": 5, "shadow": {"enabled": False}}},
        store("redis://redis:6379/0?prefix=a@b:c"),
        store("redis://ann@redis", existingSecret="s"),
        store(
            "rediss+sentinel://a,b/main", tls={"existingSecret": "s", "certKey": "c", "keyKey": "k"}
        ),
        throttle() | {"policies": {"existingConfigMap": "theirs"}, "drain": {"timeoutSeconds": 1}},
        with_policies(policy("quick", {"pathPrefix": "/"}, max_delay_ms=30_000))
        | {"drain": {"timeoutSeconds": 1}},
        with_policies(
            {
                "id": "idle",
                "spec": {"selector": {"routes": ["r"]}, "circuit_breaker": {"enabled": False}},
            }
        ),
        merged(SCALED, REDIS),
        GUARDED,
        with_policies(expires_at="2999-01-01T00:00:00Z"),
        with_policies(global_shadow={"enabled": False, "expires_at": "2020-01-01T00:00:00Z"}),
        {"istio": ON},
        {
            "istio": ON,
            **with_policies(policy("claude", {"apis": ["anthropic"], "pathPrefix": "/team-a"})),
        },
        {
            "istio": {
                **ON,
                "routes": [{"name": "a", "virtualHost": host} for host in ("g:80", "h:80")],
            }
        },
        merged(ISTIO, throttle(), {"envoy": {"requestTimeoutSeconds": 0, "idleTimeoutSeconds": 0}}),
        merged(GATEWAY, throttle(), {"envoy": {"idleTimeoutSeconds": 1}}),
        throttle() | {"envoy": {"requestTimeoutSeconds": 1}},
        throttle() | {"shadow": {"enabled": True}, "drain": {"timeoutSeconds": 1}},
        merged(OWN_LIMITS, throttle(), {"envoy": {"requestTimeoutSeconds": 1}}),
        merged(ISTIO, {"envoy": {"shadowMode": "partial"}, "shadow": {"enabled": True}}),
        merged(on_route(policies=["any"]), {"policies": {"existingConfigMap": "theirs"}}),
        merged(ISTIO, GATEWAY),
        {"istio": {"enabled": True, "waypoint": "w", "tls": "AUTO"}},
        merged(ISTIO, {"istio": {"context": "SIDECAR_INBOUND", "workloadSelector": {"app": "a"}}}),
        all_sidecars("SIDECAR_OUTBOUND", "agents"),
    ],
    ids=json.dumps,
)
def test_valid_combination_is_accepted(values: Values) -> None:
    assert objects(values)


@pytest.mark.parametrize("key", sorted(UNSUPPORTED_KEYS))
def test_underivable_descriptor_is_refused(key: str) -> None:
    (sentence,) = problems(
        with_policies(policy("a", {"pathPrefix": "/"}, limit_keys=["jwt:org", key]))
    )

    assert sentence.startswith(
        f"policies.bundle: policy a has the descriptor {key}, which Loopguard does not enforce: "
        "take that"
    )


def test_longest_throttle_of_all_detectors_counts(tmp_path: Path) -> None:
    copy = tmp_path / "loopguard"
    shutil.copytree(CHART, copy, ignore=shutil.ignore_patterns("values.schema.json"))
    slow = policy("slow", {"pathPrefix": "/"})
    slow["spec"]["loop_detection"] = [
        {"action": "throttle", "max_delay_ms": delay} for delay in (5_000, 20_000, 10_000)
    ]
    values = with_policies(slow) | {"drain": {"timeoutSeconds": 21}}

    with (
        helm_python.Chart.load(copy) as chart,
        pytest.raises(helm_python.HelmRenderError, match="may hold a request for 20000 ms"),
    ):
        chart.render(merged(ENFORCING, values))


def test_escalation_to_throttle_counts() -> None:
    drain = {"drain": {"timeoutSeconds": 21}}
    slow, never = (
        with_policies(
            policy(
                "slow",
                {"pathPrefix": "/"},
                action="warn",
                max_delay_ms=20_000,
                escalate={action: 8},
            )
        )
        | drain
        for action in ("throttle", "reject")
    )

    (problem,) = problems(slow)

    assert "may hold a request for 20000 ms" in problem
    assert objects(never)


def test_default_hold_matches_code() -> None:
    needed = -(-(MAX_DELAY_MS + HOLD_MARGIN_MS) // 1000)

    assert objects(
        throttle()
        | {"envoy": {"maxMessageTimeoutSeconds": needed}, "drain": {"timeoutSeconds": needed}}
    )
    assert len(problems(throttle() | {"envoy": {"maxMessageTimeoutSeconds": needed - 1}})) == 1
    assert len(problems(throttle() | {"drain": {"timeoutSeconds": needed - 1}})) == 1


# ---- What the schema refuses


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replicacount": 2}, "at '': additional properties 'replicacount' not allowed"),
        ({"image": {"tga": "1"}}, "at '/image': additional properties 'tga' not allowed"),
        ({"replicaCount": "2"}, "at '/replicaCount': got string, want integer"),
        ({"replicaCount": -1}, "at '/replicaCount': minimum: got -1, want 0"),
        (
            {"image": {"pullPolicy": "Sometimes"}},
            "at '/image/pullPolicy': value must be one of 'Always', 'IfNotPresent', 'Never'",
        ),
        ({"image": {"repository": ""}}, "at '/image/repository': minLength: got 0, want 1"),
        (
            {"image": {"digest": "sha256:12"}},
            "at '/image/digest': 'sha256:12' does not match pattern",
        ),
        (
            {"settings": {"max_streams": 1}},
            "at '/settings': additional properties 'max_streams' not allowed",
        ),
        (
            {"settings": {"maxStreams": 0}},
            "at '/settings/maxStreams': exclusiveMinimum: got 0, want 0",
        ),
        (
            {"settings": {"logLevel": "loud"}},
            "at '/settings/logLevel': value must be one of 'debug', 'info', 'warning', 'error'",
        ),
        (
            {"settings": {"drainDelay": 1}},
            "at '/settings': additional properties 'drainDelay' not allowed",
        ),
        ({"canary": {"enabled": "yes"}}, "at '/canary/enabled': got string, want boolean"),
        (
            {"resources": {"limit": {}}},
            "at '/resources': additional properties 'limit' not allowed",
        ),
        (
            {"tolerations": [{"keys": "a"}]},
            "at '/tolerations/0': additional properties 'keys' not allowed",
        ),
        (
            {"affinity": {"podAffinities": {}}},
            "at '/affinity': additional properties 'podAffinities' not allowed",
        ),
        (
            {"securityContext": {"privilege": True}},
            "at '/securityContext': additional properties 'privilege' not allowed",
        ),
        (
            {"podSecurityContext": {"runAsUser": "me"}},
            "at '/podSecurityContext/runAsUser': got string, want null or integer",
        ),
        (
            {"networkPolicy": {"gateways": [{"namespace": "a"}]}},
            "additional properties 'namespace' not allowed",
        ),
        (
            {"podDisruptionBudget": {"maxUnavailable": 0.5}},
            "at '/podDisruptionBudget/maxUnavailable': got number, want",
        ),
        ({"podLabels": {"a": 1}}, "at '/podLabels/a': got number, want string"),
        ({"drain": {"delaySeconds": -1}}, "at '/drain/delaySeconds': minimum: got -1, want 0"),
        (
            {"canary": {"policies": {"bundle": {"policies": []}}}},
            "missing property 'bundle_version'",
        ),
        ({"policies": {"bundle": []}}, "at '/policies/bundle': got array, want object"),
        (
            {"istio": {"context": "SIDECAR"}},
            (
                "at '/istio/context': value must be one of 'GATEWAY', 'SIDECAR_INBOUND', "
                "'SIDECAR_OUTBOUND'"
            ),
        ),
        ({"istio": {"routes": ["chat"]}}, "at '/istio/routes/0': got string, want object"),
        (
            {"istio": {"routes": [{"virtualHost": "h"}]}},
            "at '/istio/routes/0': missing property 'name'",
        ),
        (
            {"istio": {"routes": [{"name": "a", "policy": "p"}]}},
            "at '/istio/routes/0': additional properties 'policy' not allowed",
        ),
        (
            {"istio": {"routes": [{"name": "a", "policies": "p"}]}},
            "at '/istio/routes/0/policies': got string, want array",
        ),
        ({"istio": {"scope": "a b"}}, "at '/istio/scope': 'a b' does not match pattern"),
        ({"istio": {"scope": "a" * 58}}, "at '/istio/scope': 'aaa"),
        (
            {"istio": {"tls": "MUTUAL"}},
            "at '/istio/tls': value must be one of 'ISTIO_MUTUAL', 'AUTO', 'DISABLE'",
        ),
        ({"istio": {"port": 443}}, "at '/istio': additional properties 'port' not allowed"),
        (
            {"istio": {"listenerPort": 70_000}},
            "at '/istio/listenerPort': maximum: got 70,000, want 65,535",
        ),
        (
            {"istio": {"workloadSelector": {"labels": {}}}},
            "at '/istio/workloadSelector/labels': got object, want string",
        ),
        (
            {"envoyGateway": {"targetRefs": [{"kind": "Service", "name": "a"}]}},
            "at '/envoyGateway/targetRefs/0/kind': value must be",
        ),
        (
            {"envoy": {"bufferLimitBytes": 1_000}},
            "at '/envoy/bufferLimitBytes': minimum: got 1,000, want 65,535",
        ),
        (
            {"envoy": {"bodyMode": "partial"}},
            "at '/envoy/bodyMode': value must be one of 'strict', 'tolerant'",
        ),
        (
            {"envoy": {"failureMode": "open"}},
            "at '/envoy/failureMode': value must be one of 'allow', 'deny'",
        ),
        ({"envoy": {"shadowMode": "on"}}, "at '/envoy/shadowMode': value must be one of"),
    ],
)
def test_invalid_value_is_refused_at_its_place(values: Values, message: str) -> None:
    assert message in refusal(values)


def test_store_urls_are_accepted() -> None:
    with pytest.raises(UsageError) as told:
        open_store("http://redis", Metrics())
    schemes = re.findall(r"([\w+]+)://", str(told.value).partition("known schemes: ")[2])

    assert {"memory", "redis", "unix"} < set(schemes)
    for scheme in schemes:
        values = store(f"{scheme}://{'' if scheme == 'memory' else 'redis'}")
        assert "at '/store/url'" in refusal(values) if scheme == "unix" else objects(values)


@pytest.mark.parametrize(
    "url",
    [
        "redis",
        "unix:///run/redis.sock",
        "http://redis",
        "redis+sentinels://a/b",
        "memory+cluster://",
        "",
    ],
)
def test_invalid_store_url_is_refused(url: str) -> None:
    assert "at '/store/url'" in refusal(store(url))


# ---- Policies that do not validate


def changed(**changes: object) -> dict[str, Any]:
    made = policy("p", {"pathExact": "/a"}, limit_keys=["jwt:org"])
    detection = {**made["spec"]["loop_detection"], **changes}
    made["spec"]["loop_detection"] = {
        key: value for key, value in detection.items() if value is not ...
    }
    return made


def in_spec(**changes: object) -> dict[str, Any]:
    made = changed()
    made["spec"].update(changes)
    return made


DETECTION = "at '/policies/bundle/policies/0/spec/loop_detection"
WRONG: list[tuple[dict[str, Any], str]] = [
    (bundle(changed(enbled=True)), f"{DETECTION}': additional properties 'enbled' not allowed"),
    (bundle(changed(window_seconds=...)), f"{DETECTION}': missing property 'window_seconds'"),
    (bundle(changed(window_seconds=None)), f"{DETECTION}/window_seconds': got null, want integer"),
    (
        bundle(changed(threshold_identical_requests=...)),
        f"{DETECTION}': missing property 'threshold_identical_requests'",
    ),
    (
        bundle(changed(window_seconds=0)),
        f"{DETECTION}/window_seconds': exclusiveMinimum: got 0, want 0",
    ),
    (bundle(changed(window_seconds="60")), f"{DETECTION}/window_seconds': got string, want"),
    (
        bundle(changed(threshold_identical_requests=1)),
        f"{DETECTION}/threshold_identical_requests': minimum: got 1, want 2",
    ),
    (
        bundle(changed(action="block")),
        f"{DETECTION}/action': value must be one of 'reject', 'land', 'throttle', 'steer', 'warn'",
    ),
    (bundle(changed(similarity="fuzzy")), f"{DETECTION}/similarity': value must be"),
    (
        bundle(changed(max_delay_ms=30_001)),
        f"{DETECTION}/max_delay_ms': maximum: got 30,001, want 30,000",
    ),
    (bundle(changed(reject_status=200)), f"{DETECTION}/reject_status': minimum: got 200, want 400"),
    (
        bundle(changed(window_type="sliding_log", threshold_identical_requests=10_001)),
        f"{DETECTION}/threshold_identical_requests': maximum: got 10,001, want 10,000",
    ),
    (bundle(in_spec(loop_detection="on")), f"{DETECTION}': got string, want"),
    (bundle(in_spec(mode="canary")), "/spec/mode': value must be one of 'enforce', 'shadow'"),
    (bundle(in_spec(limit_keys="jwt:org")), "/spec/limit_keys': got string, want array"),
    (
        bundle(in_spec(selector={"methods": ["POST"]})),
        "/spec/selector': missing property 'pathExact'",
    ),
    (
        bundle(in_spec(selector={"pathExact": None})),
        "/spec/selector/pathExact': got null, want string",
    ),
    (
        bundle(in_spec(selector={"pathExact": "v1"})),
        "/spec/selector/pathExact': 'v1' does not match pattern '^/[^?#]*$'",
    ),
    (
        bundle(in_spec(selector={"pathPrefix": "/", "hosts": []})),
        "/spec/selector/hosts': minItems: got 0, want 1",
    ),
    (bundle({"id": "p"}), "at '/policies/bundle/policies/0': missing property 'spec'"),
    (
        bundle({**changed(), "id": "a b"}),
        "at '/policies/bundle/policies/0/id': 'a b' does not match pattern",
    ),
    (
        bundle(changed(), bundle_version=0),
        "at '/policies/bundle/bundle_version': exclusiveMinimum: got 0, want 0",
    ),
    (
        bundle(changed(), expires_at="tomorrow"),
        "at '/policies/bundle/expires_at': 'tomorrow' is not valid date-time",
    ),
    (
        bundle(changed(), policys=[]),
        "at '/policies/bundle': additional properties 'policys' not allowed",
    ),
    *(
        (bundle(changed(**{key: value})), f"{DETECTION}': missing property 'similarity'")
        for key, value in {
            "ignore_fields": ["/a"],
            "tail_messages": 2,
            "window_calls": 5,
            "compare_results": False,
            "reset_on_user_message": False,
            "max_cycle": 2,
            "tools": {"read": {"allow": True}},
        }.items()
    ),
    (
        bundle(changed(similarity="tail", ignore_fields=["/a"])),
        f"{DETECTION}/similarity': value must be 'canonical'",
    ),
    (
        bundle(changed(similarity="canonical", tail_messages=2)),
        f"{DETECTION}/similarity': value must be 'tail'",
    ),
    (
        bundle(changed(similarity="canonical", tools={})),
        f"{DETECTION}/similarity': value must be one of 'tool_calls', 'turns'",
    ),
    (
        bundle(changed(similarity="tail", window_seconds=...)),
        f"{DETECTION}': missing property 'window_seconds'",
    ),
    (bundle(changed(similarity="tail", tail_messages=0)), f"{DETECTION}/tail_messages': "),
    (
        bundle(changed(similarity="tool_calls", max_cycle=99)),
        f"{DETECTION}/max_cycle': maximum: got 99, want 16",
    ),
    (
        bundle(changed(similarity="tool_calls", tools={"a": {"treshold": 2}})),
        f"{DETECTION}/tools/a': additional properties",
    ),
    (
        bundle(changed(similarity="canonical", ignore_fields=["a"])),
        f"{DETECTION}/ignore_fields/0': 'a' does not match",
    ),
    (bundle(changed(similarity="tail", max_inspect_bytes=0)), f"{DETECTION}/max_inspect_bytes': "),
    (bundle(in_spec(loop_detection=[])), f"{DETECTION}': minItems: got 0, want 1"),
    (
        bundle(
            in_spec(
                loop_detection=[
                    {"enabled": True, "similarity": "tail", "threshold_identical_requests": 3}
                ]
            )
        ),
        f"{DETECTION}/0': missing property 'window_seconds'",
    ),
    (bundle(in_spec(limit_keys=["cookie:a"])), "/spec/limit_keys/0': 'cookie:a' does not match"),
    (
        bundle(in_spec(bypass=[{"path": "/a"}])),
        "/spec/bypass/0': additional properties 'path' not allowed",
    ),
]


@pytest.mark.parametrize(("document", "message"), WRONG)
def test_invalid_policy_is_refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleErrors):
        parse({"bundle.json": json.dumps(document).encode()}, datetime.now(UTC))

    assert message in refusal({"policies": {"bundle": document}})


DOCUMENTED = re.findall(
    r"```json\n(\{\"bundle_version\".*?)```", (ROOT / "docs" / "policies.md").read_text(), re.DOTALL
)
GOOD: list[dict[str, Any]] = [
    json.loads(DOCUMENTED[0]),
    bundle(*json.loads((ROOT / "envoy" / "policy.json").read_text())["policies"]),
    bundle(),
    bundle(changed(enabled=False, window_seconds=None, threshold_identical_requests=...)),
    bundle(
        {
            "id": "p",
            "spec": {"selector": {"routes": ["r"], "pathExact": None}, "loop_detection": None},
        }
    ),
    bundle({**changed(), "description": {"any": "thing"}, "x-owner": 1}),
    bundle(
        changed(),
        bundle_version=1.5,
        global_shadow={"enabled": True, "expires_at": "2999-01-01T00:00:00+02:00"},
    ),
]


@pytest.mark.parametrize("document", GOOD)
def test_valid_policy_is_accepted(document: dict[str, Any]) -> None:
    parse({"bundle.json": json.dumps(document).encode()}, datetime.now(UTC))

    assert objects({"policies": {"bundle": document}})


# ---- Policies of routes


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (bundle(in_spec(loop_detection="on")), "/spec/loop_detection': got string, want"),
        (
            bundle(changed(enbled=True)),
            "/spec/loop_detection': additional properties 'enbled' not allowed",
        ),
        (
            bundle(changed(window_seconds=...)),
            "/spec/loop_detection': missing property 'window_seconds'",
        ),
        (bundle({"id": "p"}), "at '/istio/routes/0/bundle/policies/0': missing property 'spec'"),
        (
            bundle(in_spec(selector={"pathexact": "/a"})),
            "/spec/selector': additional properties 'pathexact' not allowed",
        ),
        ({"policies": []}, "at '/istio/routes/0/bundle': missing property 'bundle_version'"),
    ],
)
def test_invalid_policy_of_route_is_refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleErrors):
        parse({"route metadata": json.dumps(document).encode()}, datetime.now(UTC), on_route=True)

    assert message in refusal(on_route(bundle=document))


@pytest.mark.parametrize(
    "document",
    [
        bundle(policy("a", {})),
        bundle(policy("a", {"methods": ["POST"]})),
        bundle(policy("a", {"pathExact": None})),
        bundle({"id": "a", "spec": {"loop_detection": {"enabled": False}}}),
        *GOOD,
    ],
)
def test_policy_of_route_needs_no_selector(document: dict[str, Any]) -> None:
    parse({"route metadata": json.dumps(document).encode()}, datetime.now(UTC), on_route=True)
    (found,) = (
        item for item in objects(on_route(bundle=document)) if item["kind"] == "EnvoyFilter"
    )

    (patch,) = (
        each["patch"]["value"]
        for each in found["spec"]["configPatches"]
        if each["applyTo"] == "HTTP_ROUTE"
    )
    text = patch["metadata"]["filter_metadata"]["loopguard"]["policy_json"]
    made = HandedOver(shadow=False, allow_unenforced=False).compile(text, datetime.now(UTC))

    assert isinstance(made, Engine)
    assert json.loads(text) == document


@pytest.mark.parametrize("scope", ["", "a", "A.b_c-9", "x" * 57, "a b", "a/b", "\u00e9", "x" * 58])
def test_scopes_match_process(scope: str) -> None:
    try:
        taken = bool(objects(merged(ISTIO, {"istio": {"scope": scope}})))
    except helm_python.HelmValuesError:
        taken = False

    assert taken == is_scope(f"{scope}-canary")


MOUNTED: Values = {
    "extraVolumes": [{"name": "extra", "secret": {"secretName": "keys"}}],
    "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
}
HOW = "mount one there with extraVolumes and extraVolumeMounts."


def test_extra_volumes_and_variables_are_added() -> None:
    extra = merged(
        MOUNTED, {"extraEnv": [{"name": "TZ", "value": "UTC"}], "canary": {"enabled": True}}
    )

    for name in ("lg-loopguard", "lg-loopguard-canary"):
        deployment = one(objects(extra), "Deployment", name)
        pod = deployment["spec"]["template"]["spec"]

        assert MOUNTED["extraVolumes"][0] in pod["volumes"]
        assert MOUNTED["extraVolumeMounts"][0] in pod["containers"][0]["volumeMounts"]
        assert environment(deployment)["TZ"] == "UTC"


MODULE = (
    "store.url names a credential_provider, and the image has no such module: mount its folder "
    "with extraVolumes and "
    "extraVolumeMounts, and name that folder as PYTHONPATH in extraEnv."
)
SECRET = "leave it out and name a Secret in"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"settings": {"hashKeyFile": "/keys/hash"}},
            (
                f"settings.hashKeyFile=/keys/hash is in no volume of the pod: {SECRET} "
                f"hashKey.existingSecret, or {HOW}"
            ),
        ),
        (
            {"settings": {"hashKeyFile": "hash.key"}},
            (
                f"settings.hashKeyFile=hash.key is in no volume of the pod: {SECRET} "
                f"hashKey.existingSecret, or {HOW}"
            ),
        ),
        (
            {"settings": {"events": "-", "eventsSecretFile": "/keys/s"}},
            (
                f"settings.eventsSecretFile=/keys/s is in no volume of the pod: {SECRET} "
                f"events.existingSecret, or {HOW}"
            ),
        ),
        (
            {"settings": {"events": "https://e", "eventsCa": "/extras/ca.crt"}, **MOUNTED},
            (
                f"settings.eventsCa=/extras/ca.crt is in no volume of the pod: {SECRET} "
                f"events.existingSecret, or {HOW}"
            ),
        ),
        (
            {"settings": {"events": "/log/events"}},
            f"settings.events=/log/events is in no volume of the pod: {HOW}",
        ),
        (
            {"settings": {"adminSocket": "/run/a.sock"}},
            f"settings.adminSocket=/run/a.sock is in no volume of the pod: {HOW}",
        ),
        (
            {"store": {"url": "rediss://r?ssl_ca_certs=%2Fkeys%2Fca.crt"}},
            (
                f"store.url?ssl_ca_certs=/keys/ca.crt is in no volume of the pod: {SECRET} "
                f"store.tls.existingSecret, or {HOW}"
            ),
        ),
        (
            {"store": {"url": "rediss://r?credential_provider=ours:make"}, **MOUNTED},
            MODULE,
        ),
        (
            merged(
                MOUNTED,
                {"hashKey": {"existingSecret": "s"}, "settings": {"hashKeyFile": "/extra/k"}},
            ),
            (
                "hashKey.existingSecret and settings.hashKeyFile both name the key: leave one of "
                "them "
                "out."
            ),
        ),
        (
            {"events": {"existingSecret": "s"}},
            (
                "events.existingSecret is for events, and none are sent: say where to in "
                "settings.events, or leave it out."
            ),
        ),
        (
            merged(
                MOUNTED,
                {
                    "events": {"existingSecret": "s"},
                    "settings": {"events": "-", "eventsCa": "/extra/ca"},
                },
            ),
            (
                "events.existingSecret takes the place of settings.eventsSecretFile and "
                "settings.eventsCa: leave these out."
            ),
        ),
        (
            {"extraEnv": [{"name": "LOOPGUARD_LOG_FORMAT", "value": "text"}]},
            (
                "extraEnv names LOOPGUARD_LOG_FORMAT, which the chart sets from other values: "
                "change "
                "these."
            ),
        ),
        (
            {"extraVolumes": [{"name": "policies", "emptyDir": {}}]},
            (
                "extraVolumes has a volume named policies, as the pod has already: choose another "
                "name."
            ),
        ),
        (
            {"extraVolumeMounts": [{"name": "lost", "mountPath": "/x"}]},
            "extraVolumeMounts mounts lost, which is no volume of the pod: add it to extraVolumes.",
        ),
    ],
)
def test_unmounted_file_is_refused(values: Values, sentence: str) -> None:
    assert problems(values) == [sentence]


@pytest.mark.parametrize(
    "values",
    [
        {
            "settings": {
                "hashKeyFile": "/extra/hash.key",
                "events": "/extra/events",
                "adminSocket": "/extra/admin.sock",
            }
        },
        {
            "settings": {
                "events": "https://events.example.com",
                "eventsCa": "/etc/ssl/certs/ca-certificates.crt",
            }
        },
        {"settings": {"events": "-", "eventsSecretFile": ""}},
        {
            "store": {
                "url": "rediss://r?ssl_ca_certs=/extra/ca.crt&ssl_certfile=/extra/c&ssl_keyfile=/extra/k"
            }
        },
        {
            "store": {"url": "redis://r?credential_provider=ours:make"},
            "extraEnv": [{"name": "PYTHONPATH", "value": "/extra"}],
        },
    ],
)
def test_mounted_files_are_accepted(values: Values) -> None:
    assert objects(merged(MOUNTED, values))
