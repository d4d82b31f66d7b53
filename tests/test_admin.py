"""The admin endpoints."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from extproc.admin import Admin, Page
from extproc.errors import LoopguardError, UsageError
from extproc.metrics import Metrics
from extproc.server import Server
from extproc.settings import Settings, parse_address
from tests.documents import bundle, policy
from tests.promql import list_labels

Answer = tuple[int, dict[str, str], str]

NAMES = """
requests_total{policy,mode,action} loops_detected_total{policy,mode,action} unmatched_total uncounted_total{policy,reason}
decision_seconds throttled_in_flight streams_in_flight overload_total store_errors_total{kind} store_seconds store_batch_size
store_entries store_evictions_total policy_reloads_total{result} policy_info{bundle_version,sha256} fail_open_total{reason}
"""


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


IPV6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")


def ask(port: int, path: str) -> Answer:
    """Status, headers and body of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


@contextmanager
def serving(admin: Admin) -> Iterator[int]:
    """Start an admin server on a free port and stop it at the end."""
    port = int(admin.start(parse_address("127.0.0.1:0")).rpartition(":")[2])
    try:
        yield port
    finally:
        admin.stop()


def made(settings: Settings) -> Server:
    """A server, made where grpc wants it: in a running event loop."""

    async def make() -> Server:
        return Server(settings)

    return asyncio.run(make())


@pytest.fixture
def server(tmp_path: Path) -> Server:
    """A server with one policy, which nobody has started."""
    file = tmp_path / "p.json"
    file.write_text(
        json.dumps(bundle(policy("p", {"pathExact": "/a"}, limit_keys=["jwt:a"]), expires_at="2999-01-01T00:00:00Z"))
    )
    return made(Settings(policy=(str(file),)))


def test_metrics_have_the_promised_names_and_labels() -> None:
    """Every documented metric is there, with exactly its labels."""
    metrics = Metrics()
    families = {family.name: family for family in metrics.registry.collect()}
    label_names = list_labels(metrics.registry)

    for promised in NAMES.split():
        name, _, labels = promised.rstrip("}").partition("{")
        family = families[f"loopguard_{name.removesuffix('_total')}"]
        assert (family.type == "counter") == name.endswith("_total"), promised
        assert label_names[family.name] == tuple(labels.split(",") if labels else ()), promised


def test_metrics_are_served() -> None:
    """`/metrics` is Prometheus' text format with the current values; a query is ignored."""
    metrics = Metrics()
    metrics.decisions.add("p", "enforce", "reject")
    metrics.decisions.add("p", "enforce", "allow")
    with serving(Admin(metrics, {})) as port:
        status, headers, body = ask(port, "/metrics?x=1")

    assert status == HTTPStatus.OK
    assert headers["content-type"].startswith("text/plain; version=")
    assert 'loopguard_requests_total{action="reject",mode="enforce",policy="p"} 1.0\n' in body
    assert 'loopguard_requests_total{action="allow",mode="enforce",policy="p"} 1.0\n' in body
    assert 'loopguard_loops_detected_total{action="reject",mode="enforce",policy="p"} 1.0\n' in body
    assert 'loopguard_loops_detected_total{action="allow"' not in body


@given(st.lists(st.floats(0, 2) | st.sampled_from([0.000025, 0.001, 1.0]), max_size=20))
def test_histograms_are_what_prometheus_own_would_be(values: list[float]) -> None:
    """What is kept in plain numbers is exposed letter by letter as the client library exposes its own histogram."""
    metrics, registry = Metrics(), CollectorRegistry()
    bounds, text = metrics.decision_seconds.bounds, "From message to answer, holds excluded"
    theirs = Histogram("loopguard_decision_seconds", text, buckets=bounds, registry=registry)
    for value in values:
        metrics.decision_seconds.observe(value)
        theirs.observe(value)

    shown = generate_latest(metrics.registry).decode()

    assert generate_latest(registry).decode() in shown


def test_unknown_paths_name_the_known_ones() -> None:
    """A wrong path is 404 with a list of what there is; a page's own status is its own."""
    pages = {"/down": lambda: Page(HTTPStatus.SERVICE_UNAVAILABLE, {"status": "down"})}
    with serving(Admin(Metrics(), pages)) as port:
        wrong, down = ask(port, "/"), ask(port, "/down")

    assert (wrong[0], wrong[2]) == (404, "not found; there are /metrics, /down\n")
    assert (down[0], json.loads(down[2])) == (503, {"status": "down"})
    assert down[1]["content-type"] == "application/json"


def test_head_is_get_without_the_body() -> None:
    """HEAD has the status and the length of GET."""
    with serving(Admin(Metrics(), {"/p": lambda: Page(HTTPStatus.OK, {"a": 1})})) as port:
        get = ask(port, "/p")
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"HEAD /p HTTP/1.0\r\n\r\n")
            head = client.makefile("rb").read()

    assert head.startswith(b"HTTP/1.0 200 ")
    assert b"content-length: %d\r\n" % len(get[2]) in head
    assert head.endswith(b"\r\n\r\n")


def test_a_page_that_fails_says_so() -> None:
    """An error inside a page is a 500 with the reason, and the server lives on."""

    def broken() -> Page:
        raise ValueError("too deep")

    with serving(Admin(Metrics(), {"/p": broken})) as port:
        answers = [ask(port, "/p"), ask(port, "/metrics")]

    assert [answer[0] for answer in answers] == [500, 200]
    assert json.loads(answers[0][2]) == {"error": "too deep"}


def test_a_client_that_says_nothing_holds_nobody_up() -> None:
    """Each client has a thread of its own."""
    with serving(Admin(Metrics(), {})) as port, socket.create_connection(("127.0.0.1", port)):
        assert ask(port, "/metrics")[0] == 200


@pytest.mark.parametrize("text", ["127.0.0.1:0", pytest.param("[::1]:0", marks=IPV6), pytest.param(":0", marks=IPV6)])
def test_it_listens_where_it_is_told(text: str) -> None:
    """IPv4, IPv6 and all interfaces; the answer tells the real port."""
    admin = Admin(Metrics(), {})

    shown = admin.start(parse_address(text))
    admin.stop()

    assert shown.rpartition(":")[0] == parse_address(text).text.rpartition(":")[0]
    assert int(shown.rpartition(":")[2]) > 0


def test_an_address_in_use_is_one_clear_error() -> None:
    """The error names the address and the flag."""
    with serving(Admin(Metrics(), {})) as port, pytest.raises(LoopguardError) as failure:
        Admin(Metrics(), {}).start(parse_address(f"127.0.0.1:{port}"))

    assert str(failure.value) == f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another with --admin"


def test_a_socket_is_no_admin_address() -> None:
    """A Unix socket is a usage error, because scrapers and probes need a port."""
    with pytest.raises(UsageError) as failure:
        Admin(Metrics(), {}).start(parse_address("unix:/run/x"))

    assert str(failure.value) == "--admin must be HOST:PORT, not 'unix:/run/x'"


def test_an_admin_that_never_started_can_be_stopped() -> None:
    """Stopping is safe at any time."""
    Admin(Metrics(), {}).stop()


def test_ready_from_serving_until_draining(server: Server) -> None:
    """`/readyz` is 503 before the server serves and once it drains; the store is a detail in it."""
    seen = [server._readyz()]
    server._health.set(serving=True)
    seen.append(server._readyz())
    server._on_stop(signal.SIGTERM)
    seen.append(server._readyz())

    assert [(page.status, page.body) for page in seen] == [
        (status, {"status": word, "store": "ok"}) for status, word in ((503, "starting"), (200, "ready"), (503, "draining"))
    ]


def test_a_dead_store_leaves_the_server_ready(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with the store is told, and is no reason to be taken out of service."""
    server._health.set(serving=True)
    monkeypatch.setattr(server._store, "health", lambda: "connection refused")

    page = server._readyz()

    assert (page.status, page.body) == (200, {"status": "ready", "store": "connection refused"})


def test_healthy_until_the_event_loop_stalls(server: Server) -> None:
    """`/healthz` is 503 once the event loop has not run for a long time."""
    before = server._healthz()
    server._beat -= 60
    after = server._healthz()

    assert (before.status, before.body) == (200, {"status": "ok"})
    assert (after.status, after.body["status"]) == (503, "stalled")


def test_policies_shows_what_is_loaded(server: Server) -> None:
    """`/policies` has every file with its hash, version and policies as written, and the mode each policy runs in."""
    page = server._policies()

    (file,) = page.body["files"]
    assert page.body["modes"] == {"p": "enforce"}
    assert '"bundle_version": 1,' in json.dumps(page.body)
    assert (file["bundle_version"], file["expires_at"], len(file["sha256"])) == (1, "2999-01-01T00:00:00+00:00", 64)
    assert file["policies"] == [json.loads(json.dumps(policy("p", {"pathExact": "/a"}, limit_keys=["jwt:a"])))]


def test_shadow_for_all_shows_in_policies(server: Server) -> None:
    """With `--shadow` every policy is shown in shadow mode, whatever its file says."""
    shadowed = made(Settings(policy=server._settings.policy, shadow=True))

    assert shadowed._policies().body["modes"] == {"p": "shadow"}
