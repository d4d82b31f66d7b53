"""Types of Envoy Gateway's objects, from its Go types, and Gateway API's `ReferenceGrant`.

Keys that the chart does not use are left out, and so refused. No package has them.
"""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
# Gateway API's, GEP-2257
DURATION: Schema = {
    "type": "string",
    "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$",
}
QUANTITY: Schema = {"type": "string", "pattern": "^[1-9][0-9]*(Ki|Mi|Gi)?$"}
LIMIT: Schema = {"type": "integer", "minimum": 0, "maximum": 4_294_967_295}
ATTRIBUTE: Schema = {
    "type": "string",
    "pattern": r"^((connection|source|destination|request|response|upstream)\.|xds\.route_)"
    "[a-z_1-9]*$",
}


def a_map(required: str = "", **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": required.split()}


def a_list(items: Schema, **more: int) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, **more}


def target(*kinds: str) -> Schema:
    group = {"const": "gateway.networking.k8s.io"}
    return a_map(
        "group kind name", group=group, kind={"enum": [*kinds]}, name=TEXT, sectionName=TEXT
    )


def an_object(version: str, kind: str, spec: Schema) -> Schema:
    labels = {"type": "object", "additionalProperties": {"type": "string"}}
    metadata = a_map("name namespace", name=TEXT, namespace=TEXT, labels=labels)
    return a_map(
        "apiVersion kind metadata spec",
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=metadata,
        spec=spec,
    )


_BODY = {"enum": ["Streamed", "Buffered", "BufferedPartial", "FullDuplexStreamed"]}
_MODE = a_map(body=_BODY, attributes=a_list(ATTRIBUTE))
_BREAKER = a_map(
    maxConnections=LIMIT,
    maxPendingRequests=LIMIT,
    maxParallelRequests=LIMIT,
    maxParallelRetries=LIMIT,
)
_TRIGGER = {
    "enum": [
        "5xx",
        "gateway-error",
        "reset",
        "reset-before-request",
        "connect-failure",
        "refused-stream",
    ]
}
_RETRY = a_map(
    numRetries={"type": "integer", "minimum": 0},
    perRetry=a_map(backOff=a_map(baseInterval=DURATION, maxInterval=DURATION)),
    retryOn=a_map(triggers=a_list(_TRIGGER)),
)
_THRESHOLD = {"type": "integer", "minimum": 1}
_CHECK = a_map(
    "type",
    type={"const": "GRPC"},
    grpc=a_map(service=TEXT),
    interval=DURATION,
    timeout=DURATION,
    unhealthyThreshold=_THRESHOLD,
    healthyThreshold=_THRESHOLD,
)
_EXT_PROC = a_map(
    "backendRefs",
    backendRefs=a_list(
        a_map("name port", name=TEXT, namespace=TEXT, port={"type": "integer"}), maxItems=1
    ),
    backendSettings=a_map(circuitBreaker=_BREAKER, healthCheck=a_map(active=_CHECK), retry=_RETRY),
    messageTimeout=DURATION,
    failOpen={"type": "boolean"},
    processingMode=a_map(request=_MODE, response=_MODE, allowModeOverride={"type": "boolean"}),
    metadata=a_map(
        accessibleNamespaces=a_list(TEXT),
        writableNamespaces=a_list(
            {**TEXT, "not": {"pattern": r"^envoy\.filters\.http"}}, maxItems=8
        ),
    ),
)

ENVOY_GATEWAY: dict[str, Schema] = {
    "EnvoyExtensionPolicy": an_object(
        "gateway.envoyproxy.io/v1alpha1",
        "EnvoyExtensionPolicy",
        a_map(
            "targetRefs",
            targetRefs=a_list(target("Gateway", "HTTPRoute", "GRPCRoute")),
            extProc=a_list(_EXT_PROC, maxItems=16),
        ),
    ),
    "ClientTrafficPolicy": an_object(
        "gateway.envoyproxy.io/v1alpha1",
        "ClientTrafficPolicy",
        a_map(
            "targetRefs",
            targetRefs=a_list(target("Gateway")),
            connection=a_map(bufferLimit=QUANTITY),
            http2=a_map(initialStreamWindowSize=QUANTITY),
            timeout=a_map(http=a_map(requestReceivedTimeout=DURATION)),
            headers=a_map(earlyRequestHeaders=a_map(remove=a_list(TEXT, maxItems=64))),
        ),
    ),
    "BackendTLSPolicy": an_object(
        "gateway.networking.k8s.io/v1",
        "BackendTLSPolicy",
        a_map(
            "targetRefs validation",
            targetRefs=a_list(
                a_map("group kind name", group={"const": ""}, kind={"const": "Service"}, name=TEXT)
            ),
            validation=a_map(
                "caCertificateRefs hostname",
                caCertificateRefs=a_list(
                    a_map(
                        "group kind name", group={"const": ""}, kind={"const": "Secret"}, name=TEXT
                    )
                ),
                hostname=TEXT,
            ),
        ),
    ),
    "ReferenceGrant": an_object(
        "gateway.networking.k8s.io/v1beta1",
        "ReferenceGrant",
        a_map(
            "from to",
            **{
                "from": a_list(a_map("group kind namespace", group=TEXT, kind=TEXT, namespace=TEXT))
            },
            to=a_list(a_map("group kind", group={"type": "string"}, kind=TEXT, name=TEXT)),
        ),
    ),
}
