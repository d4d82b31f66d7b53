"""The Envoy bootstrap that is made from policies, judged by the real Envoy."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from extproc.engine.engine import Index
from extproc.policy.bundle import Selector
from extproc.policy.outline import SlimSelector
from extproc.request.fingerprint import normalize_path
from tests.support.documents import bundle, policy
from tests.support.envoy_config import CERTIFICATE, DOCUMENTS, bootstrap, verdict
from tests.support.harness import ENVOY, Stack, Upstream, eventually, stack

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "fail closed": {"failure_mode": "deny"},
    "large bodies": {"buffer_limit": 2**31 - 1},
    "small bodies": {"buffer_limit": 65_535},
    "all interfaces": {"listen": ":10000", "admin": "[::1]:9901"},
    "unix socket": {"endpoints": ["unix:/run/loopguard.sock", "127.0.0.1:50051", "[::1]:50051"]},
    "HTTP/2 upstream": {"upstream_protocol": "http2"},
    "upstream of both": {"upstream_protocol": "as-client"},
    "names": {"upstream": "upstream.example:80", "endpoints": ["loopguard.example:50051", "127.0.0.1:50051"]},
    "looking on": {"shadow_mode": "observability"},
}


def version() -> tuple[int, int]:
    """Major and minor version of the Envoy under test."""
    told = subprocess.run([ENVOY, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"/(\d+)\.(\d+)\.\d+/", told)
    assert found, told
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_envoy_accepts_it(document: object, options: Mapping[str, Any], tmp_path: Path) -> None:
    """Whatever the policies and the options, the real Envoy finds nothing wrong with the bootstrap."""
    text = bootstrap(document, **options)

    assert verdict(text, tmp_path).endswith("OK\n")


COSTS: dict[str, Any] = {"max_cost_per_session": 1, "unknown_model": {"input": 1, "output": 1}}
ERRORS: dict[str, Any] = {"circuit_breaker": {"consecutive_errors": 3}}


@pytest.mark.parametrize(
    ("limits", "options", "told", "read"),
    [
        (COSTS, {}, True, True),
        (COSTS, {"usage": "estimated"}, True, False),
        (COSTS, {"shadow_mode": "observability"}, False, False),
        (COSTS, {"buffer_limit": 65_535}, True, True),
        (ERRORS, {}, True, False),
        ({"max_steps": 3}, {}, False, False),
    ],
)
def test_envoy_tells_what_answers_cost(
    limits: dict[str, Any], options: dict[str, Any], told: bool, read: bool, tmp_path: Path
) -> None:
    """Where a policy limits it, and as exactly as Envoy can; no other configuration looks into answers."""
    spec = {"selector": {"pathPrefix": "/v1/"}, "limit_keys": ["header:x-user-id"], "session_limits": limits}

    text = bootstrap(bundle({"id": "agents", "spec": spec}), **options)

    assert verdict(text, tmp_path).endswith("OK\n") == (version() >= (1, 38) or not read)
    assert ("envoy.access_loggers.http_grpc" in text) == told
    assert [name in text for name in ("sse_to_metadata", "json_to_metadata", "accept-encoding")] == [read] * 3


@pytest.mark.parametrize("protocol", ["http1", "http2", "as-client"])
@pytest.mark.parametrize("upstream", ["api.example.com:443", "192.0.2.1:443", "[2001:db8::1]:443"])
def test_envoy_accepts_tls(upstream: str, protocol: str, tmp_path: Path) -> None:
    """TLS to the upstream verifies its certificate against a name or an address, and Envoy accepts that."""
    authority = tmp_path / "ca.pem"
    authority.write_text(CERTIFICATE)
    flags = {"upstream": upstream, "upstream_protocol": protocol, "upstream_tls": True, "upstream_ca": str(authority)}

    text = bootstrap(DOCUMENTS["sample"], **flags)

    assert verdict(text, tmp_path).endswith("OK\n")
    assert "auto_sni_san_validation" in text or "match_typed_subject_alt_names" in text
    assert ("auto_host_rewrite: true" in text) == upstream.startswith("api")


@pytest.mark.parametrize("options", [{"body_mode": "tolerant"}, {"shadow_mode": "partial"}])
def test_envoy_accepts_tolerant(options: dict[str, Any], tmp_path: Path) -> None:
    """The tolerant body mode buffers what fits and keeps content-length; only Envoy 1.38 and newer can do that."""
    text = bootstrap(DOCUMENTS["sample"], **options)

    assert "request_body_mode: BUFFERED_PARTIAL" in text
    assert verdict(text, tmp_path).endswith("OK\n") == (version() >= (1, 38))


def test_the_jwt_example_works(tmp_path: Path) -> None:
    """The commented-out filter for verified claims is valid as soon as it is uncommented."""
    keys = tmp_path / "jwks.json"
    keys.write_text(json.dumps({"keys": [{"kty": "oct", "alg": "HS256", "kid": "k", "k": "c2VjcmV0"}]}))
    text = bootstrap(DOCUMENTS["sample"])
    example = re.search(r"( *# - name: envoy.filters.http.jwt_authn\n)( *#  .*\n)+", text)
    assert example
    live = re.sub(r"^( *)# ", r"\1", example[0], flags=re.MULTILINE).replace("/etc/envoy/jwks.json", str(keys))

    said = verdict(text.replace(example[0], live), tmp_path)

    assert said.endswith("OK\n")


def test_envoy_and_the_policies_agree_on_paths() -> None:
    """The real Envoy shows Loopguard exactly the requests whose path some selector takes, and both see one spelling of it."""
    odd = """/$y"'{}*&^|<>`~[]"""
    selectors = [{"pathPrefix": path} for path in ("/v1", "/v2/", "/d/e", "/m%3a1", "/n%3A/")]
    selectors += [{"pathExact": path} for path in ("/x", "/d/e/", "/e%2ff", odd)]
    targets = ["/", "/v1", "/v1/", "/v1/a", "/v1?q=/v2/", "/v1a", "/V1", "/v2", "/v2/", "/v2/a/b", "/v2//a"]
    targets += ["/x", "/x?y=1", "/x/", "/xy", "//x", "/./x", "/%78", "/d", "/d/e/f", "/d/e/", "/d/ef", "/?/v1", odd]
    targets += ["/m%3a1", "/m%3A1/x", "/m%3a1x", "/n%3A/x", "/n%3a/", "/n%3a", "/e%2Ff", "/e%2ff", "/e/f", "/e%2Ff/"]
    document = bundle(*(policy(f"p{number}", selector) for number, selector in enumerate(selectors)))
    index = Index([(SlimSelector(Selector.model_validate(selector), {}), number) for number, selector in enumerate(selectors)])
    with stack(document) as running:
        statuses = [running.send(target).status for target in targets]

        counted = running.loopguard.metric("requests_total")
        unmatched = running.loopguard.metric("unmatched_total")

    seen = [normalize_path(quote(target.partition("?")[0], safe="/%!$&'()*+,;=:@[]")) for target in targets]
    assert set(statuses) <= {200, 429}
    assert unmatched == 0
    assert counted == sum(len(index.match("GET", "", path)) for path in seen)


CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    "spelling",
    [
        "/v1/chat/complet%69ons",
        "//v1//chat/completions",
        "/./v1/chat/completions",
        "/v1/%2e/chat/completions",
        "/x/../v1/chat/completions",
        "/x/%2e%2e/v1/chat/completions",
        "/../%2E%2E/v1/chat/completions",
        "/%76%31/ch%61t/completions",
        "/v1\\chat\\completions",
    ],
)
def test_no_spelling_of_a_path_escapes(spelling: str, running: Stack) -> None:
    """Another spelling of a guarded path takes the guarded route, and the upstream sees the path that was guarded."""
    before = running.loopguard.metric("requests_total")
    seen = len(running.upstream.seen)

    running.send(f"{spelling}?{quote(spelling)}")

    assert running.loopguard.metric("requests_total") == before + 1
    assert [each.target.partition("?")[0] for each in running.upstream.seen[seen:]] == [CHAT]


@pytest.fixture(scope="module")
def running() -> Iterator[Stack]:
    """A guarded path, counted by user."""
    with stack(bundle(policy("chat", {"pathExact": CHAT}, limit_keys=["header:x-user", "ip:address"]))) as made:
        yield made


def test_a_route_alone_is_enough() -> None:
    """A policy that selects by nothing but a route's name sees the requests of that route, whatever their path."""
    document = bundle(policy("by-name", {"routes": ["main"]}))
    with stack(document) as running:
        statuses = [running.send("/anything").status for _ in range(3)]

    assert statuses == [200, 200, 429]


# ---- One count, one upstream request

RETRY = {"x-envoy-retry-on": "retriable-status-codes", "x-envoy-retriable-status-codes": "200", "x-envoy-max-retries": "5"}
SLOW = {"x-envoy-upstream-rq-per-try-timeout-ms": "50", "x-envoy-retry-on": "5xx", "x-envoy-max-retries": "5"}


@pytest.mark.parametrize(
    "forged",
    [
        RETRY,
        {"x-envoy-retry-on": "retriable-headers", "x-envoy-retriable-header-names": "content-type", "x-envoy-max-retries": "9"},
        {"x-envoy-retry-on": "5xx,reset,connect-failure,gateway-error,retriable-4xx,refused-stream,http3-post-connect-failure"},
        {"x-envoy-retry-grpc-on": "cancelled,deadline-exceeded,internal,resource-exhausted,unavailable"},
        {"x-envoy-upstream-rq-timeout-ms": "50", "x-envoy-upstream-rq-timeout-alt-response": "1"},
        SLOW,
        {**SLOW, "x-envoy-hedge-on-per-try-timeout": "true"},
        {**SLOW, "x-envoy-is-timeout-retry": "true"},
        {"x-envoy-expected-rq-timeout-ms": "50"},
        {"x-envoy-upstream-stream-duration-ms": "50"},
        {"grpc-timeout": "50m"},
        {"x-envoy-upstream-alt-stat-name": "forged"},
        {"x-envoy-original-path": "/elsewhere", "x-envoy-original-url": "/elsewhere", "x-envoy-original-host": "elsewhere"},
        {"x-envoy-original-dst-host": "127.0.0.1:1"},
        {"x-envoy-decorator-operation": "forged"},
        {"x-envoy-force-trace": "true", "x-client-trace-id": "forged"},
        {"x-envoy-external-address": "203.0.113.9"},
        {"x-forwarded-for": "0.0.0.0, 10.0.0.1"},
        {**RETRY, "x-forwarded-for": "10.0.0.1"},
        {**RETRY, "x-envoy-internal": "true"},
        {"x-envoy-attempt-count": "7"},
        {"x-envoy-downstream-service-cluster": "forged", "x-envoy-downstream-service-node": "forged"},
        {"x-envoy-ip-tags": "forged"},
        {"x-envoy-overloaded": "true", "x-envoy-local-overloaded": "true", "x-envoy-ratelimited": "true"},
        {"x-envoy-degraded": "true", "x-envoy-immediate-health-check-fail": "true"},
        {"x-envoy-upstream-canary": "true", "x-envoy-upstream-healthchecked-cluster": "forged"},
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("path", ["/v1/chat", "/v1/hang"])
def test_a_request_that_counts_once_reaches_the_upstream_once(path: str, forged: dict[str, str], gate: Stack) -> None:
    """Whatever a client says in headers of Envoy's own, its request is neither multiplied nor hidden by them."""
    user = {"x-user": f"{path} {forged}"}
    gate.upstream.seen.clear()
    with later(gate.upstream, 0.3 if "hang" in path else 0):
        refused = [gate.send(path, headers={**user, **forged}).status == 429 for _ in range(3)]

    assert refused == [False, False, True]
    assert [seen.target for seen in gate.upstream.seen] == [path] * 2
    assert gate.envoy.admin("/stats?filter=forged") == ""


@contextmanager
def later(upstream: Upstream, seconds: float) -> Iterator[None]:
    """Answer what hangs only after this many seconds, which is longer than any timeout that a client asks for."""
    upstream.release.clear()
    timer = threading.Timer(seconds, upstream.release.set)
    timer.start()
    yield
    timer.join()


@pytest.fixture(scope="module")
def gate() -> Iterator[Stack]:
    """Everything guarded, counted by user and by the address that Envoy believes."""
    with stack(bundle(policy("all", {"pathPrefix": "/"}, limit_keys=["header:x-user", "ip:address"]))) as made:
        yield made


# ---- A Loopguard that has died


def test_a_dead_replica_costs_no_request_anything() -> None:
    """Under `deny` a request that finds its Loopguard dead is decided by another one, before health checks have noticed."""
    document = bundle(policy("all", {"pathPrefix": "/"}))
    with stack(document, replicas=3, failure_mode="deny") as made:
        made.replicas[1].signal(signal.SIGKILL)
        made.replicas[1].wait()

        found = {made.send(f"/{number}", method="POST", body=b"x" * 100_000).status for number in range(100)}

        assert found == {200}
        assert made.envoy.stat("cluster.loopguard.upstream_rq_retry") > 0
        assert made.envoy.stat("http.ingress.ext_proc.loopguard.streams_failed") == 0


@pytest.mark.parametrize("seconds", [0.02, 0.2])
def test_a_replica_that_hangs_costs_no_request_anything(seconds: float) -> None:
    """Under `deny` requests that come every so often find their Loopguard silent, and are decided in time by another one."""

    def in_time(config: str) -> str:
        """Envoy hangs up before it decides by itself; here each has ten times as long as it is given."""
        assert "message_timeout: 0.2s" in config
        assert "timeout: 0.15s" in config
        return config.replace("message_timeout: 0.2s", "message_timeout: 5s").replace("timeout: 0.15s", "timeout: 1.5s")

    document = bundle(policy("all", {"pathPrefix": "/"}))
    with stack(document, replicas=3, failure_mode="deny", edit=in_time, hasty=True) as made:
        found = [made.send(f"/before/{number}").status for number in range(20)]
        made.replicas[1].signal(signal.SIGSTOP)
        time.sleep(0.1)  # a stream that is opened earlier takes the silence for that of a moment
        for number in range(20):
            found.append(made.send(f"/{number}", method="POST", body=b"x" * 1_000).status)
            time.sleep(seconds)
        made.replicas[1].signal(signal.SIGCONT)

        assert found == [200] * 40
        assert made.envoy.stat("cluster.loopguard.upstream_rq_retry") > 0
        eventually(lambda: made.envoy.stat("cluster.loopguard.membership_healthy") == 3, "all are asked again")


def test_the_only_replica_is_asked_again_after_a_stall() -> None:
    """One Loopguard that stood still for a moment is not left out: the next request is counted."""
    with stack(bundle(policy("all", {"pathPrefix": "/"})), failure_mode="deny", hasty=True) as made:
        made.send("/")
        made.loopguard.signal(signal.SIGSTOP)
        time.sleep(0.1)
        missed = made.send("/").status
        made.loopguard.signal(signal.SIGCONT)

        assert missed in (500, 504)
        numbers = itertools.count()
        assert eventually(lambda: made.send(f"/{next(numbers)}").status == 200, "an answer")
        assert made.envoy.stat("cluster.loopguard.membership_healthy") == 1


# ---- Looking on

needs_content_length = pytest.mark.skipif(version() < (1, 38), reason="Envoy 1.38 is the first that buffers in part like this")
SHADOW_MODES = ["observability", pytest.param("partial", marks=needs_content_length)]
LIMIT = 65_535


@pytest.mark.parametrize("mode", SHADOW_MODES)
def test_a_shadow_mode_touches_nothing(mode: str) -> None:
    """Loops are counted, no request is refused, held or warned, bodies of any size pass unchanged; Loopguard may be gone."""
    document = bundle(
        policy("refuse", {"pathExact": "/refuse"}),
        policy("hold", {"pathExact": "/hold"}, action="throttle"),
        policy("warn", {"pathExact": "/warn"}, action="warn"),
    )
    flags = ["--shadow"] if mode == "partial" else []
    with stack(document, *flags, shadow_mode=mode, buffer_limit=LIMIT) as made:
        answers = [made.send(path, method="POST", body=b"same") for path in ("/refuse", "/hold", "/warn") for _ in range(4)]
        larger = made.send("/refuse", method="POST", body=b"x" * 50 * LIMIT)
        received = made.upstream.seen[-1]
        eventually(lambda: made.loopguard.metric("loops_detected_total") == 6, "six loops")
        made.loopguard.stop()
        without = made.send("/refuse", method="POST", body=b"same")

    assert [answer.status for answer in (*answers, larger, without)] == [200] * 14
    assert all("x-fairvisor-warning" not in answer.headers for answer in answers)
    assert all(seen.header("x-fairvisor-warning") is None for seen in made.upstream.seen)
    assert (received.header("content-length"), len(received.body)) == (str(50 * LIMIT), 50 * LIMIT)


@pytest.mark.parametrize(
    ("mode", "counted"),
    [("observability", 3), pytest.param("partial", 0, marks=needs_content_length)],
)
def test_what_a_shadow_mode_counts_of_large_bodies(mode: str, counted: int) -> None:
    """Looking on sees whole bodies however large they are; buffering in part sees a part, and does not count it."""
    with stack(bundle(policy("p", {"pathPrefix": "/"})), "--shadow", shadow_mode=mode, buffer_limit=LIMIT) as made:
        for _ in range(3):
            made.send("/", method="POST", body=b"x" * 50 * LIMIT)
        seen = eventually(
            lambda: (
                (
                    made.loopguard.metric("requests_total", policy="p"),
                    made.loopguard.metric("uncounted_total", reason="body_truncated"),
                )
                if made.loopguard.metric("requests_total") + made.loopguard.metric("uncounted_total") == 3
                else None
            )
        )

    assert seen == (counted, 3 - counted)


@needs_content_length
def test_an_enforcing_policy_acts_on_a_partial_body() -> None:
    """What the snippet's head says: without --shadow it is the policies that decide."""
    with stack(bundle(policy("p", {"pathPrefix": "/"})), shadow_mode="partial") as made:
        found = [made.send("/", method="POST", body=b"same").status for _ in range(3)]

    assert found == [200, 200, 429]
