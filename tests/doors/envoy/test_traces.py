"""Traces of the real Envoy have Loopguard's decisions as tags, and arrive at a collector."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import yaml
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from extproc.cli.envoy_config.options import EnvoyOptions
from extproc.cli.envoy_config.snippet import render_snippet
from extproc.options import read_options
from tests.support import ROOT
from tests.support.check_envoy import found
from tests.support.documents import policy
from tests.support.envoy_config import DOCUMENTS, bootstrap, loaded
from tests.support.harness import eventually, stack

OTLP: Any = trace_service_pb2  # its stubs name no messages
SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
TAGS = "loopguard."


Spans = list[dict[str, str]]  # the name and the attributes of each


@contextmanager
def collect() -> Iterator[tuple[Spans, str]]:
    """The spans that come to a collector, and its address."""
    spans: Spans = []

    def keep(request: Any, _: object) -> Any:  # noqa: ANN401  # grpc has no types
        for resource in request.resource_spans:
            for (
                scope
            ) in resource.instrumentation_library_spans:  # `scope_spans`, before it was renamed
                for span in scope.spans:
                    spans.append(
                        {
                            "name": span.name,
                            **{each.key: each.value.string_value for each in span.attributes},
                        }
                    )
        return OTLP.ExportTraceServiceResponse().SerializeToString()

    export = grpc.unary_unary_rpc_method_handler(keep, OTLP.ExportTraceServiceRequest.FromString)
    service = grpc.method_handlers_generic_handler(SERVICE, {"Export": export})
    server = grpc.server(ThreadPoolExecutor(2), handlers=[service])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield spans, f"127.0.0.1:{port}"
    finally:
        server.stop(None)


def find(spans: Spans, path: str) -> Spans:
    """Loopguard's tags on the spans of clients' requests to this path."""
    own = [
        span
        for span in spans
        if span.get("http.url", "").endswith(path) and "upstream_cluster.name" in span
    ]
    return [
        {key.removeprefix(TAGS): value for key, value in span.items() if key.startswith(TAGS)}
        for span in own
    ]


def test_spans_of_loops_have_loopguards_tags() -> None:
    keys: dict[str, Any] = {"limit_keys": ["header:x-user"]}
    session: dict[str, Any] = {
        "session": {"keys": ["header:x-session"]},
        "session_limits": {"max_steps": 100},
    }
    loops = policy("agents", {"pathPrefix": "/v1"}, similarity="turns", **session, **keys)
    watched = policy(
        "watched", {"pathPrefix": "/w"}, mode="shadow", threshold_identical_requests=2, **keys
    )
    stuck = (ROOT / "tests" / "support" / "bodies" / "chat_stuck.json").read_bytes()
    with collect() as (spans, address), stack([loops, watched], otlp=address) as made:
        refused = made.post("/v1/chat/completions", stuck, {"x-user": "ann", "x-session": "s1"})
        made.repeat("/w/x", 2, headers={"x-user": "ann"})
        eventually(
            lambda: len(find(spans, "/w/x")) == 2 and find(spans, "/v1/chat/completions"),
            "the spans",
        )
        log = made.loopguard.output()

    assert refused.status == 429
    (loop,) = find(spans, "/v1/chat/completions")
    assert (loop["action"], loop["reason"], loop["policy"]) == ("reject", "loop_detected", "agents")
    assert loop["cause"]
    assert f"session={loop['session']}" in log or len(loop["session"]) == 16
    assert [tags.get("shadow_policy") for tags in find(spans, "/w/x")] == [None, "watched"]
    assert [
        span["name"] for span in spans if "ext_proc" in span["name"] or "loopguard" in span["name"]
    ]


def test_snippet_has_the_tags_where_asked_for() -> None:
    document = DOCUMENTS["sample"]
    plain, tagged = (
        render_snippet(
            loaded(document), read_options(EnvoyOptions, {"snippet": True, "trace_tags": tags})
        )
        for tags in (False, True)
    )

    (part,) = [part for part in tagged.split("---\n") if "custom_tags" in part]
    assert "custom_tags" not in plain
    assert ".typed_config.tracing: beside your provider" in part
    tags = {tag["tag"] for tag in yaml.safe_load(part)["custom_tags"]}
    assert tags >= {f"{TAGS}{name}" for name in ("policy", "cause", "session")}
    assert not found(
        yaml.safe_load(bootstrap(document, trace_tags=True, otlp="127.0.0.1:4317")), document
    )
