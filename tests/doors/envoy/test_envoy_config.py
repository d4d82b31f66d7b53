"""The Envoy bootstrap that is made from policies, tried on the real Envoy."""

import itertools
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest

from tests.support.budget_policies import bucket, limited
from tests.support.documents import bare_policy, bundle, policy
from tests.support.envoy_config import CERTIFICATE, DOCUMENTS, bootstrap, verdict
from tests.support.harness import Stack, envoy_version, eventually, stack

EVERYTHING = bundle(policy("all", {"pathPrefix": "/"}))


def limit_sessions(**limits: object) -> dict[str, Any]:
    return bundle(
        bare_policy("agents", "/v1/", limit_keys=["header:x-user-id"], session_limits=limits)
    )


COSTS = limit_sessions(max_cost_per_session=1, unknown_model={"input": 1, "output": 1})
ERRORS = limit_sessions(circuit_breaker={"consecutive_errors": 3})
READS = ("sse_to_metadata", "json_to_metadata", "accept-encoding")
TELLS = "envoy.access_loggers.http_grpc"
PARTIAL = "request_body_mode: BUFFERED_PARTIAL"
SAN = "match_typed_subject_alt_names"
HOST = ("auto_sni_san_validation", "auto_host_rewrite: true")
TLS = {"upstream_tls": True, "upstream_ca": "ca.pem"}


class Printed(NamedTuple):
    """A bootstrap by its policies and options, and texts that are in it and that are not."""

    document: object
    options: Mapping[str, Any]
    has: Sequence[str] = ()
    lacks: Sequence[str] = ()


SAMPLE = DOCUMENTS["sample"]
PRINTED = [
    *(Printed(document, {}) for document in DOCUMENTS.values()),
    Printed(SAMPLE, {"shadow_mode": "observability"}),
    Printed(
        SAMPLE,
        {
            "failure_mode": "deny",
            "buffer_limit": 2**31 - 1,
            "listen": ":10000",
            "admin": "[::1]:9901",
        },
    ),
    Printed(
        SAMPLE,
        {
            "endpoints": ["unix:/run/loopguard.sock", "127.0.0.1:50051", "[::1]:50051"],
            "otlp": "127.0.0.1:4317",
        },
    ),
    Printed(
        SAMPLE,
        {
            "upstream": "upstream.example:80",
            "endpoints": ["loopguard.example:50051", "127.0.0.1:50051"],
        },
    ),
    *(Printed(SAMPLE, {"upstream_protocol": protocol}) for protocol in ("http2", "as-client")),
    Printed(SAMPLE, {"body_mode": "tolerant"}, [PARTIAL]),
    Printed(SAMPLE, {"shadow_mode": "partial"}, [PARTIAL]),
    Printed(SAMPLE, {"body_mode": "duplex"}),
    Printed(bundle(limited(bucket())), {}, [], [TELLS, *READS]),
    *(
        Printed(COSTS, options, [TELLS, *READS])
        for options in ({"buffer_limit": 65_535}, {"body_mode": "duplex"})
    ),
    Printed(COSTS, {"usage": "estimated"}, [TELLS], READS),
    Printed(COSTS, {"shadow_mode": "observability"}, [], [TELLS, *READS]),
    Printed(ERRORS, {}, [TELLS], READS),
    Printed(limit_sessions(max_steps=3), {}, [], [TELLS, *READS]),
    Printed(SAMPLE, {"upstream": "api.example.com:443", "upstream_ca": "ca.pem"}, HOST),
    Printed(SAMPLE, {"upstream": "api.example.com:443", "upstream_protocol": "http1", **TLS}, HOST),
    Printed(
        SAMPLE, {"upstream": "192.0.2.1:443", "upstream_protocol": "http2", **TLS}, [SAN], HOST
    ),
    Printed(
        SAMPLE,
        {"upstream": "[2001:db8::1]:443", "upstream_protocol": "as-client", **TLS},
        [SAN],
        HOST,
    ),
]


@pytest.mark.parametrize(
    "printed", PRINTED, ids=lambda printed: " ".join(map(str, printed.options.values()))
)
def test_bootstrap_names_the_oldest_envoy_that_accepts_it(
    printed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filters that read answers are there only where a policy limits costs."""
    monkeypatch.chdir(tmp_path)
    Path("ca.pem").write_text(CERTIFICATE)

    text = bootstrap(printed.document, **printed.options)

    named = re.search(r"for Envoy (\d+)\.(\d+) and newer", text)
    assert named
    assert verdict(text, tmp_path).endswith("OK\n") == (
        envoy_version() >= (int(named[1]), int(named[2]))
    )
    assert [word for word in printed.has if word not in text] == []
    assert [word for word in printed.lacks if word in text] == []


def test_envoy_shows_exactly_the_paths_that_policies_select() -> None:
    """Each policy counts as much as where Envoy shows Loopguard everything."""
    odd = """/$y"'{}*&^|<>`~[]"""
    selectors = [{"pathPrefix": path} for path in ("/v1", "/v2/", "/d/e", "/m%3a1", "/n%3A/")]
    selectors += [{"pathExact": path} for path in ("/x", "/d/e/", "/e%2ff", odd)]
    targets = [
        "/",
        "/v1",
        "/v1/",
        "/v1/a",
        "/v1?q=/v2/",
        "/v1a",
        "/V1",
        "/v2",
        "/v2/",
        "/v2/a/b",
        "/v2//a",
    ]
    targets += [
        "/x",
        "/x?y=1",
        "/x/",
        "/xy",
        "//x",
        "/./x",
        "/%78",
        "/d",
        "/d/e/f",
        "/d/e/",
        "/d/ef",
        "/?/v1",
        odd,
    ]
    targets += [
        "/m%3a1",
        "/m%3A1/x",
        "/m%3a1x",
        "/n%3A/x",
        "/n%3a/",
        "/n%3a",
        "/e%2Ff",
        "/e%2ff",
        "/e/f",
        "/e%2Ff/",
    ]
    policies = [policy(f"p{number}", selector) for number, selector in enumerate(selectors)]
    counts = []
    for document in (bundle(*policies), bundle(*policies, policy("all", {"pathPrefix": "/"}))):
        with stack(document) as made:
            assert {made.send(target).status for target in targets} <= {200, 429}
            assert made.loopguard.metric("unmatched_total") == 0
            counts.append(
                [made.loopguard.metric("requests_total", policy=each["id"]) for each in policies]
            )

    assert counts[0] == counts[1]
    assert 0 not in counts[0]


CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Stack]:
    chat = policy("chat", {"pathPrefix": "/v1/chat"}, limit_keys=["header:x-user", "ip:address"])
    with stack(bundle(chat)) as made:
        yield made


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
def test_other_spellings_of_a_guarded_path_are_guarded(spelling: str, guarded: Stack) -> None:
    before = guarded.loopguard.metric("requests_total")

    guarded.send(f"{spelling}?{quote(spelling)}")

    assert guarded.loopguard.metric("requests_total") == before + 1
    assert guarded.upstream.seen[-1].target.partition("?")[0] == CHAT


# ---- One count, one upstream request

RETRY = {
    "x-envoy-retry-on": "retriable-status-codes",
    "x-envoy-retriable-status-codes": "200",
    "x-envoy-max-retries": "5",
}
SLOW = {
    "x-envoy-upstream-rq-per-try-timeout-ms": "50",
    "x-envoy-retry-on": "5xx",
    "x-envoy-max-retries": "5",
}


@pytest.mark.parametrize(
    "forged",
    [
        RETRY,
        {
            "x-envoy-retry-on": "retriable-headers",
            "x-envoy-retriable-header-names": "content-type",
            "x-envoy-max-retries": "9",
        },
        {
            "x-envoy-retry-on": "5xx,reset,connect-failure,gateway-error,retriable-4xx,"
            "refused-stream,http3-post-connect-failure"
        },
        {
            "x-envoy-retry-grpc-on": "cancelled,deadline-exceeded,internal,"
            "resource-exhausted,unavailable"
        },
        {"x-envoy-upstream-rq-timeout-ms": "50", "x-envoy-upstream-rq-timeout-alt-response": "1"},
        SLOW,
        {**SLOW, "x-envoy-hedge-on-per-try-timeout": "true"},
        {**SLOW, "x-envoy-is-timeout-retry": "true"},
        {"x-envoy-expected-rq-timeout-ms": "50"},
        {"x-envoy-upstream-stream-duration-ms": "50"},
        {"grpc-timeout": "50m"},
        {"x-envoy-upstream-alt-stat-name": "forged"},
        {
            "x-envoy-original-path": "/elsewhere",
            "x-envoy-original-url": "/elsewhere",
            "x-envoy-original-host": "elsewhere",
        },
        {"x-envoy-original-dst-host": "127.0.0.1:1"},
        {"x-envoy-decorator-operation": "forged"},
        {"x-envoy-force-trace": "true", "x-client-trace-id": "forged"},
        {"x-envoy-external-address": "203.0.113.9"},
        {"x-forwarded-for": "0.0.0.0, 10.0.0.1"},
        {**RETRY, "x-forwarded-for": "10.0.0.1"},
        {**RETRY, "x-envoy-internal": "true"},
        {"x-envoy-attempt-count": "7"},
        {
            "x-envoy-downstream-service-cluster": "forged",
            "x-envoy-downstream-service-node": "forged",
        },
        {"x-envoy-ip-tags": "forged"},
        {
            "x-envoy-overloaded": "true",
            "x-envoy-local-overloaded": "true",
            "x-envoy-ratelimited": "true",
        },
        {"x-envoy-degraded": "true", "x-envoy-immediate-health-check-fail": "true"},
        {"x-envoy-upstream-canary": "true", "x-envoy-upstream-healthchecked-cluster": "forged"},
    ],
    ids=" ".join,
)
def test_forged_envoy_headers_do_not_multiply_or_hide_requests(
    forged: dict[str, str], guarded: Stack
) -> None:
    hangs = re.search("timeout|duration", " ".join(forged)) is not None
    path = "/v1/chat/hang" if hangs else CHAT
    guarded.upstream.seen.clear()
    guarded.upstream.release.clear()
    # Later than any timeout that a client asks for
    answers_late = threading.Timer(0.3 * hangs, guarded.upstream.release.set)
    answers_late.start()

    statuses = guarded.repeat(path, 3, headers={"x-user": f"{forged}", **forged})

    answers_late.join()
    assert [status == 429 for status in statuses] == [False, False, True]
    assert [seen.target for seen in guarded.upstream.seen] == [path] * 2
    assert guarded.envoy.admin("/stats?filter=forged") == ""


# ---- Dead and hanging replicas


def test_dead_replica_costs_no_request() -> None:
    """Under `deny`, and before health checks notice."""
    with stack(EVERYTHING, replicas=3, failure_mode="deny") as made:
        made.replicas[1].signal(signal.SIGKILL)
        made.replicas[1].wait()

        assert {made.post(f"/{number}", b"x" * 100_000).status for number in range(40)} == {200}
        assert made.envoy.stat("cluster.loopguard.upstream_rq_retry") > 0
        assert made.envoy.stat("http.ingress.ext_proc.loopguard.streams_failed") == 0


@pytest.mark.parametrize("seconds", [0.02, 0.2])
def test_hanging_replica_costs_no_request(seconds: float) -> None:
    """Under `deny`, each request that finds a silent Loopguard is decided in time by another."""

    def in_time(config: str) -> str:
        """Envoy hangs up before it decides by itself; here it waits ten times as long for each."""
        for old, new in (
            ("message_timeout: 0.2s", "message_timeout: 5s"),
            ("timeout: 0.15s", "timeout: 1.5s"),
        ):
            assert old in config
            config = config.replace(old, new)
        return config

    with stack(EVERYTHING, replicas=3, failure_mode="deny", edit=in_time, hasty=True) as made:
        found = [made.send(f"/before/{number}").status for number in range(20)]
        made.replicas[1].signal(signal.SIGSTOP)
        time.sleep(0.1)  # a stream that opens earlier counts as a short silence
        for number in range(12):
            found.append(made.post(f"/{number}", b"x" * 1_000).status)
            time.sleep(seconds)
        made.replicas[1].signal(signal.SIGCONT)

        assert found == [200] * 32
        assert made.envoy.stat("cluster.loopguard.upstream_rq_retry") > 0
        eventually(
            lambda: made.envoy.stat("cluster.loopguard.membership_healthy") == 3,
            "all are asked again",
        )


def test_only_replica_is_asked_again_after_a_stall() -> None:
    with stack(EVERYTHING, failure_mode="deny", hasty=True) as made:
        made.send("/")
        made.loopguard.signal(signal.SIGSTOP)
        time.sleep(0.1)
        missed = made.send("/").status
        made.loopguard.signal(signal.SIGCONT)

        assert missed in (500, 504)
        numbers = itertools.count()
        assert eventually(lambda: made.send(f"/{next(numbers)}").status == 200, "an answer")
        assert made.envoy.stat("cluster.loopguard.membership_healthy") == 1


# ---- Shadow modes

needs_content_length = pytest.mark.skipif(
    envoy_version() < (1, 38), reason="Envoy 1.38 is the first that buffers in part"
)
LIMIT = 65_535


@pytest.mark.parametrize(
    ("mode", "uncounted"),
    [("observability", 0), pytest.param("partial", 3, marks=needs_content_length)],
)
def test_shadow_modes_change_no_request(mode: str, uncounted: int) -> None:
    """Observing sees whole bodies; buffering in part does not count large ones.

    Loopguard may be gone.
    """
    actions = {
        action: policy(action, {"pathExact": f"/{action}"}, action=action)
        for action in ("reject", "throttle", "warn")
    }
    flags = ["--shadow"] if mode == "partial" else []
    with stack(bundle(*actions.values()), *flags, shadow_mode=mode, buffer_limit=LIMIT) as made:
        answers = [made.post(f"/{action}", b"same") for action in actions for _ in range(4)]
        eventually(lambda: made.loopguard.metric("loops_detected_total") == 6, "six loops")
        answers += [made.post("/reject", b"x" * 50 * LIMIT) for _ in range(3)]
        metric = made.loopguard.metric
        eventually(
            lambda: metric("requests_total") + metric("uncounted_total") == 15, "all of them"
        )
        assert metric("uncounted_total", reason="body_truncated") == uncounted
        received = made.upstream.seen[-1]
        made.loopguard.stop()
        answers.append(made.post("/reject", b"same"))

    assert {answer.status for answer in answers} == {200}
    assert all("x-fairvisor-warning" not in answer.headers for answer in answers)
    assert all(seen.header("x-fairvisor-warning") is None for seen in made.upstream.seen)
    assert (received.header("content-length"), len(received.body)) == (str(50 * LIMIT), 50 * LIMIT)
