"""Types of kgateway's and agentgateway's objects, from their Go types (2.2 and 1.4).

No package has their CRDs. Keys that the chart does not use are left out, and so refused.
"""

from tests.support.chart.envoy_gateway import (
    DURATION,
    TEXT,
    Schema,
    a_list,
    a_map,
    an_object,
    target,
)

_LIMIT: Schema = {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
_COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_SEND = {"enum": ["DEFAULT", "SEND", "SKIP"]}
_BODY = {"enum": ["NONE", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL", "FULL_DUPLEX_STREAMED"]}
_BACKEND = a_map("name", name=TEXT, namespace=TEXT, port={"type": "integer"})
_ROUTES = a_list(target("Gateway", "HTTPRoute", "GRPCRoute"), maxItems=16)
_GATEWAYS = a_list(target("Gateway"), maxItems=16)


def _modes(send: Schema, body: Schema) -> Schema:
    return a_map(
        requestHeaderMode=send,
        requestBodyMode=body,
        requestTrailerMode=send,
        responseHeaderMode=send,
        responseBodyMode=body,
        responseTrailerMode=send,
    )


KGATEWAY: dict[str, Schema] = {
    kind: an_object("gateway.kgateway.dev/v1alpha1", kind, spec)
    for kind, spec in {
        "GatewayExtension": a_map(
            "extProc",
            type={"const": "ExtProc"},
            extProc=a_map(
                "grpcService",
                grpcService=a_map("backendRef", backendRef=_BACKEND),
                failOpen={"type": "boolean"},
                messageTimeout=DURATION,
                maxMessageTimeout=DURATION,
                statPrefix=TEXT,
                requestAttributes=a_list(TEXT),
                processingMode=_modes(_SEND, _BODY),
                metadataOptions=a_map(forwarding=a_map(untyped=a_list(TEXT))),
            ),
        ),
        "TrafficPolicy": a_map(
            "targetRefs extProc",
            targetRefs=_ROUTES,
            extProc=a_map("extensionRef", extensionRef=a_map("name", name=TEXT)),
        ),
        "ListenerPolicy": a_map(
            "targetRefs default",
            targetRefs=_GATEWAYS,
            default=a_map(
                perConnectionBufferLimitBytes=_COUNT,
                httpSettings=a_map(
                    earlyRequestHeaderModifier=a_map(remove=a_list(TEXT, maxItems=16))
                ),
            ),
        ),
        "BackendConfigPolicy": a_map(
            "targetRefs",
            targetRefs=a_list(
                a_map("group kind name", group={"const": ""}, kind={"const": "Service"}, name=TEXT)
            ),
            circuitBreakers=a_map(
                maxConnections=_LIMIT,
                maxPendingRequests=_LIMIT,
                maxRequests=_LIMIT,
                maxRetries=_COUNT,
            ),
            healthCheck=a_map(
                "interval timeout unhealthyThreshold healthyThreshold",
                interval=DURATION,
                timeout=DURATION,
                unhealthyThreshold=_COUNT,
                healthyThreshold=_COUNT,
                grpc=a_map(serviceName=TEXT),
            ),
        ),
    }.items()
}

AGENTGATEWAY: dict[str, Schema] = {
    "AgentgatewayPolicy": an_object(
        "agentgateway.dev/v1alpha1",
        "AgentgatewayPolicy",
        {
            "oneOf": [
                a_map(
                    "targetRefs traffic",
                    targetRefs=_ROUTES,
                    traffic=a_map(
                        extProc=a_map(
                            "backendRef",
                            backendRef=_BACKEND,
                            failureMode={"enum": ["FailOpen", "FailClosed"]},
                            requestAttributes={
                                "type": "object",
                                "additionalProperties": TEXT,
                            },
                            processingOptions=_modes(
                                {"enum": ["Send", "Skip"]},
                                {
                                    "enum": [
                                        "None",
                                        "Buffered",
                                        "BufferedPartial",
                                        "FullDuplexStreamed",
                                    ]
                                },
                            ),
                        )
                    ),
                ),
                a_map(
                    "targetRefs frontend",
                    targetRefs=_GATEWAYS,
                    frontend=a_map(
                        http=a_map(maxBufferSize={"type": "string", "pattern": "^[1-9][0-9]*$"})
                    ),
                ),
            ]
        },
    )
}
