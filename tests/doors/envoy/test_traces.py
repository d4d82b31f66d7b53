"""Traces of the real Envoy have Loopguard's decisions as tags, and arrive at a collector; Loopguard itself sends none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from extproc.cli.main import main
from tests.support import ROOT
from tests.support.documents import policy
from tests.support.envoy_config import DOCUMENTS
from tests.support.harness import eventually, stack

OTLP: Any = trace_service_pb2  # its stubs name no messages
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
TAGS = "loopguard."


class Collector(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Keeps the attributes of every span that arrives."""

    def __init__(self) -> None:
        self.spans: list[dict[str, str]] = []

    def service(self, details: Any) -> Any:  # noqa: ANN401  # as grpc has it
        """Answer OTLP's only call."""
        if details.method != EXPORT:
            return None
        return grpc.unary_unary_rpc_method_handler(self._keep, OTLP.ExportTraceServiceRequest.FromString, lambda made: made)

    def _keep(self, request: Any, _: object) -> bytes:  # noqa: ANN401  # as above
        for resource in request.resource_spans:
            for scope in resource.instrumentation_library_spans:  # `scope_spans`, before it was renamed
                for span in scope.spans:
                    found = {each.key: each.value.string_value for each in span.attributes}
                    self.spans.append({"name": span.name, **found})
        answer: bytes = OTLP.ExportTraceServiceResponse().SerializeToString()
        return answer

    def find(self, path: str) -> list[dict[str, str]]:
        """Loopguard's tags on the spans of requests to this path, from clients."""
        own = [span for span in self.spans if span.get("http.url", "").endswith(path) and "upstream_cluster.name" in span]
        return [{key.removeprefix(TAGS): value for key, value in span.items() if key.startswith(TAGS)} for span in own]


@contextmanager
def collect() -> Iterator[tuple[Collector, str]]:
    """A collector that listens, and its address."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2), handlers=[collector])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"127.0.0.1:{port}"
    finally:
        server.stop(None)


def test_a_trace_shows_the_loop() -> None:
    """The span of a request has action, policy, count, cause and session of its loop; an innocent one has none of them."""
    keys: dict[str, Any] = {"limit_keys": ["header:x-user"]}
    session: dict[str, Any] = {"session": {"keys": ["header:x-session"]}, "session_limits": {"max_steps": 100}}
    loops = policy("agents", {"pathPrefix": "/v1"}, similarity="turns", **session, **keys)
    watched = policy("watched", {"pathPrefix": "/w"}, mode="shadow", threshold_identical_requests=2, **keys)
    stuck = (ROOT / "tests" / "support" / "bodies" / "chat_stuck.json").read_bytes()
    with collect() as (collector, address), stack([loops, watched], otlp=address) as made:
        refused = made.post("/v1/chat/completions", stuck, {"x-user": "ann", "x-session": "s1"})
        made.repeat("/w/x", 2, headers={"x-user": "ann"})
        eventually(lambda: len(collector.find("/w/x")) == 2 and collector.find("/v1/chat/completions"), "the spans")
        log = made.loopguard.output()

    assert refused.status == 429
    (loop,) = collector.find("/v1/chat/completions")
    assert (loop["action"], loop["reason"], loop["policy"]) == ("reject", "loop_detected", "agents")
    assert loop["cause"]
    assert f"session={loop['session']}" in log or len(loop["session"]) == 16
    assert [tags.get("shadow_policy") for tags in collector.find("/w/x")] == [None, "watched"]
    assert [span["name"] for span in collector.spans if "ext_proc" in span["name"] or "loopguard" in span["name"]]


def test_the_tags_are_a_part_of_the_snippet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are printed where they are asked for only, with the place they go to; `check-envoy` accepts them."""
    (tmp_path / "p.json").write_text(json.dumps(DOCUMENTS["sample"]))
    asked = ["envoy-config", "--policy", str(tmp_path / "p.json"), "--snippet"]
    assert [main(asked), main([*asked, "--trace-tags"])] == [0, 0]
    plain, tagged = capsys.readouterr().out.split("# The parts that an existing")[1:]
    flags = ["--policy", str(tmp_path / "p.json"), "--upstream", "127.0.0.1:80", "--trace-tags", "--otlp", "127.0.0.1:4317"]
    assert main(["envoy-config", *flags]) == 0
    (tmp_path / "envoy.yaml").write_text(capsys.readouterr().out)

    (part,) = [part for part in tagged.split("---\n") if "custom_tags" in part]
    assert "custom_tags" not in plain
    assert ".typed_config.tracing: beside your provider" in part
    assert {tag["tag"] for tag in yaml.safe_load(part)["custom_tags"]} >= {
        f"{TAGS}{name}" for name in ("policy", "cause", "session")
    }
    assert main(["check-envoy", "--policy", str(tmp_path / "p.json"), str(tmp_path / "envoy.yaml")]) == 0


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--snippet", "--otlp", "127.0.0.1:4317"], "--otlp must be left out with --snippet"),
        (["--upstream", "h:80", "--otlp", "unix:/x"], "must be HOST:PORT, such as 127.0.0.1:4317"),
        (["--upstream", "h:80", "--shadow-mode", "observability", "--trace-tags"], "--trace-tags must be left out where"),
    ],
)
def test_flags_that_contradict_are_refused(flags: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line that says why."""
    assert main(["envoy-config", *flags]) == 2
    assert why in capsys.readouterr().err
