"""The admin endpoints."""

import asyncio
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from extproc.build import BUILD
from extproc.errors import LoopguardError, UsageError
from extproc.metrics import Metrics
from extproc.operator.admin import server as admin_server
from extproc.operator.admin.client import AdminClient, find_admin
from extproc.operator.admin.pages import (
    MAX_BODY,
    Page,
    is_near,
    make_app,
    read_json,
    route_page,
    send_page,
)
from extproc.operator.admin.server import AdminServer
from extproc.server import Server
from extproc.settings import Settings, parse_address
from tests.support.bundles import RULE
from tests.support.documents import bundle, policy
from tests.support.extent import deepen
from tests.support.harness import PATIENCE, Loopguard, eventually, write_policies
from tests.support.promql import list_labels

NAMES = """
requests_total{policy,mode,action} loops_detected_total{policy,mode,action} unmatched_total
uncounted_total{policy,reason} decision_seconds throttled_in_flight streams_in_flight overload_total
store_errors_total{kind} store_seconds store_batch_size store_entries store_evictions_total
policy_reloads_total{result} policy_info{bundle_version,sha256,file} policy_file_refused{file}
fail_open_total{reason}
unenforced{policy,part}
"""


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


IPV6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")


def ask(
    port: int, path: str, method: str = "GET", data: bytes | None = None
) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request(method, path, data)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def make_broken() -> Page:
    raise ValueError("too deep")


DOWN = route_page("/down", lambda: Page(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "no store"}))
BROKEN = route_page("/broken", make_broken)


def make_admin(*routes: Route, metrics: Metrics | None = None) -> AdminServer:
    return AdminServer(make_app(metrics or Metrics(), routes))


@contextmanager
def serving(admin: AdminServer, socket_path: str = "") -> Iterator[int]:
    port = int(admin.start(parse_address("127.0.0.1:0"), socket_path).rpartition(":")[2])
    try:
        yield port
    finally:
        admin.stop()


FAR_HOSTS = [
    "evil.example",
    "evil.example:9900",
    "localhost.evil.example",
    "192.0.2.7:9900",
    "[2001:db8::1]",
    "[::1",
    "::1",
    "[::1].evil.example",
    "[::1]:9900:1",
    "localhost:evil",
    ":9900",
    "[]",
    "127.0.0.1.evil",
]
NEAR_HOSTS = [
    "localhost",
    "localhost:9900",
    "LOCALHOST",
    "127.0.0.1",
    "127.8.8.8:9900",
    "[::1]",
    "[::1]:9900",
    "",
]
HOSTS = {
    **dict.fromkeys([*NEAR_HOSTS, "[::ffff:127.0.0.1]:9900"], True),
    **dict.fromkeys(FAR_HOSTS, False),
}


@pytest.mark.parametrize(("host", "near"), HOSTS.items())
def test_local_client_is_recognised_by_address_and_host_header(host: str, near: bool) -> None:
    """A browser on this machine sends the name of a remote page in `Host`."""
    request: dict[str, Any] = {"type": "http", "headers": [(b"host", host.encode())]}

    assert is_near(Request({**request, "client": ("127.0.0.1", 1)})) is near
    assert not is_near(Request({**request, "client": ("192.0.2.7", 1)}))


def test_metrics_have_exactly_the_documented_names_and_labels() -> None:
    metrics = Metrics()
    families = {family.name: family for family in metrics.registry.collect()}
    label_names = list_labels(metrics.registry)

    for promised in NAMES.split():
        name, _, labels = promised.rstrip("}").partition("{")
        family = families[f"loopguard_{name.removesuffix('_total')}"]
        assert (family.type == "counter") == name.endswith("_total"), promised
        assert label_names[family.name] == tuple(labels.split(",") if labels else ()), promised


@given(st.lists(st.floats(0, 2) | st.sampled_from([0.000025, 0.001, 1.0]), max_size=20))
def test_histograms_are_exposed_like_the_prometheus_clients_own(values: list[float]) -> None:
    metrics, registry = Metrics(), CollectorRegistry()
    bounds, text = (
        metrics.decision_seconds.bounds,
        "Time from message to answer, without delays by throttle",
    )
    theirs = Histogram("loopguard_decision_seconds", text, buckets=bounds, registry=registry)
    for value in values:
        metrics.decision_seconds.observe(value)
        theirs.observe(value)

    shown = generate_latest(metrics.registry).decode()

    assert generate_latest(registry).decode() in shown


@pytest.mark.slow
def test_pages_have_their_status_and_errors_a_reason() -> None:
    metrics = Metrics()
    metrics.decisions["p", "enforce", "reject"] = 1
    with serving(make_admin(DOWN, BROKEN, metrics=metrics)) as port:
        wrong, down, broken, good = (
            ask(port, path) for path in ("/", "/down", "/broken", "/metrics?x=1")
        )

    assert (wrong[0], wrong[2]) == (404, "not found; available: /metrics, /down, /broken\n")
    assert (down[0], json.loads(down[2]), down[1]["content-type"]) == (
        503,
        {"error": "no store"},
        "application/json",
    )
    assert (broken[0], json.loads(broken[2])) == (500, {"error": "too deep"})
    assert (good[0], good[1]["content-type"].partition("=")[0]) == (200, "text/plain; version")
    assert 'loopguard_requests_total{action="reject",mode="enforce",policy="p"} 1.0\n' in good[2]


def test_longest_silent_client_is_dropped_above_the_bound() -> None:
    with serving(make_admin()) as port, ExitStack() as clients:
        silent = [
            clients.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(300)
        ]

        assert ask(port, "/metrics")[0] == 200
        assert silent[0].recv(1) == b""


def test_client_that_sends_slowly_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_server, "CLIENT_SECONDS", 0.2)

    with serving(make_admin()) as port, socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n")
        client.settimeout(0.01)
        assert eventually(lambda: _dribble(client), "the end of the connection")


def _dribble(client: socket.socket) -> bool:
    try:
        client.sendall(b"a: b\r\n")
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


async def _echo(request: Request) -> Response:
    return send_page(Page(HTTPStatus.OK, await read_json(request)))


@pytest.mark.parametrize(
    ("method", "data", "status", "document"),
    [
        ("POST", b'{"a": 1}', 200, {"a": 1}),
        ("POST", b"[", 400, {"error": "the body is not JSON"}),
        ("POST", b"[" * MAX_BODY, 400, {"error": "the body is not JSON"}),
        ("POST", b"1" * 70_000, 413, {"error": "the body must be at most 65536 bytes"}),
        ("PUT", b"", 405, {"error": "Method Not Allowed"}),
    ],
)
def test_request_body_is_json_of_bounded_length(
    method: str, data: bytes, status: int, document: dict[str, Any]
) -> None:
    with serving(make_admin(Route("/echo", _echo, methods=["POST"]))) as port:
        answer = ask(port, "/echo", method, data)

    assert (answer[0], json.loads(answer[2])) == (status, document)


def test_unix_socket_has_the_endpoints_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with serving(
        make_admin(route_page("/p", lambda: Page(HTTPStatus.OK, {"a": 1}))), str(path)
    ) as port:
        client = AdminClient(f"unix:{path}")
        answers = [client.ask("/p"), json.loads(ask(port, "/p")[2])]
        client.close()

        assert answers == [{"a": 1}, {"a": 1}]
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "text", ["127.0.0.1:0", pytest.param("[::1]:0", marks=IPV6), pytest.param(":0", marks=IPV6)]
)
def test_server_listens_on_ipv4_ipv6_and_all_interfaces(text: str) -> None:
    admin = make_admin()

    shown = admin.start(parse_address(text))
    admin.stop()

    assert shown.rpartition(":")[0] == parse_address(text).text.rpartition(":")[0]
    assert int(shown.rpartition(":")[2]) > 0


def test_address_that_cannot_be_used_is_one_error(tmp_path: Path) -> None:
    admin, missing = make_admin(), f"{tmp_path}/no/such/folder"
    with serving(make_admin()) as port, pytest.raises(LoopguardError) as in_use:
        admin.start(parse_address(f"127.0.0.1:{port}"))
    with pytest.raises(LoopguardError) as nowhere:
        admin.start(parse_address("127.0.0.1:0"), missing)
    admin.stop()

    assert (
        str(in_use.value)
        == f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another with --admin"
    )
    problem = "No such file or directory; choose another with --admin-socket"
    assert str(nowhere.value) == f"cannot listen on unix:{missing}: {problem}"


def complain(client: AdminClient, path: str) -> str:
    with pytest.raises(LoopguardError) as failure:
        client.ask(path)
    return str(failure.value)


def test_client_reports_each_failure_in_one_line() -> None:
    with serving(make_admin(DOWN)) as port:
        client = AdminClient(f"127.0.0.1:{port}")
        messages = [complain(client, path) for path in ("/nothing", "/down", "/metrics")]
    messages.append(complain(client, "/down"))
    client.close()

    url = f"127.0.0.1:{port}"
    assert messages == [
        f"{url}/nothing answered 404: not found; available: /metrics, /down",
        f"{url}/down answered 503: no store",
        f"{url}/metrics is not an admin endpoint of Loopguard",
        f"cannot ask {url}: [Errno 111] Connection refused; set --admin to a running server",
    ]


@pytest.mark.parametrize(
    "url", ["ftp://h", "http://", "http://h:port", "http://h/policies", "unix:admin.sock", ""]
)
def test_malformed_admin_url_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError, match="--admin must be"):
        AdminClient(url)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "http://127.0.0.1:9900"),
        ({"LOOPGUARD_ADMIN": ""}, "http://127.0.0.1:9900"),
        ({"LOOPGUARD_ADMIN": "10.0.0.1:8000"}, "http://10.0.0.1:8000"),
        ({"LOOPGUARD_ADMIN": "0.0.0.0:8000"}, "http://127.0.0.1:8000"),
        ({"LOOPGUARD_ADMIN": ":8000"}, "http://127.0.0.1:8000"),
        ({"LOOPGUARD_ADMIN": "[::1]:8000"}, "http://[::1]:8000"),
        (
            {"LOOPGUARD_ADMIN": "10.0.0.1:8000", "LOOPGUARD_ADMIN_SOCKET": "/run/a.sock"},
            "unix:/run/a.sock",
        ),
    ],
)
def test_environment_names_the_local_server(environ: dict[str, str], expected: str) -> None:
    assert find_admin(environ)[0] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    deepen(
        ["extproc.cli.main", "extproc.ext_proc.stream", "extproc.transport.fast"],
        "extproc.cli.main",
    ),
)
def test_requests_and_commands_do_not_import_the_web_server(module: str) -> None:
    heavy = "{'starlette', 'uvicorn', 'httpx', 'jinja2', 'rich', 'cloudevents'}"
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"

    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout
        == "[]\n"
    )


# Pages of the server


GUARD = policy("p", {"pathExact": "/a"}, limit_keys=["jwt:a"])


class Made:
    def __init__(self, folder: Path, document: dict[str, Any], **settings: Any) -> None:  # noqa: ANN401  # of the process
        file = folder / "p.json"
        file.write_text(json.dumps(document))
        self.server = asyncio.run(self._make(Settings(policy=(str(file),), **settings)))
        self._client = TestClient(self.server.app)

    async def _make(self, settings: Settings) -> Server:  # in an event loop, where grpc wants it
        return Server(settings)

    def ask(self, path: str) -> tuple[int, dict[str, Any]]:
        answer = self._client.get(path)
        return answer.status_code, answer.json()

    def read_metric(self, name: str) -> list[str]:
        return [
            line
            for line in self._client.get("/metrics").text.splitlines()
            if line.startswith(f"loopguard_{name}")
        ]


def test_server_is_ready_from_serving_until_draining(tmp_path: Path) -> None:
    """Also while its store is away, which is a detail beside the parts that are not enforced."""
    starting = Made(tmp_path, bundle(GUARD)).ask("/readyz")
    write_policies(tmp_path, bundle({"id": "p", "spec": GUARD["spec"] | {"labels": ["ip:tor"]}}))
    running = Loopguard(
        tmp_path, "--store", "redis://127.0.0.1:1", "--allow-unenforced", "--drain-delay", "60"
    )
    try:
        ready = running.ask("/readyz")
        write_policies(tmp_path, bundle(GUARD))
        eventually(lambda: "unenforced" not in running.ask("/readyz"), "the reload")
        running.signal(signal.SIGTERM)
        eventually(lambda: running.get("/readyz")[0] == 503, "the drain")
        draining = json.loads(running.get("/readyz")[1])
        running.signal(signal.SIGTERM)
        running.wait()
    finally:
        running.stop()

    assert starting == (503, {"status": "starting", "build": BUILD, "store": "ok"})
    assert "unavailable" in ready.pop("store")
    assert ready == {"status": "ready", "build": BUILD, "unenforced": 1}
    assert draining["status"] == "draining"


def test_healthz_fails_when_the_event_loop_stalls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, now = Made(tmp_path, bundle(GUARD)), time.monotonic
    before = made.ask("/healthz")
    monkeypatch.setattr(time, "monotonic", lambda: now() + 60)

    assert before == (200, {"status": "ok"})
    assert made.ask("/healthz") == (503, {"status": "stalled", "seconds": 60})


@pytest.mark.parametrize(("shadow", "mode"), [(False, "enforce"), (True, "shadow")])
def test_policies_page_shows_files_hashes_and_modes(
    tmp_path: Path, shadow: bool, mode: str
) -> None:
    document = bundle(GUARD, expires_at="2999-01-01T00:00:00Z")
    _, page = Made(tmp_path, document, shadow=shadow).ask("/policies")

    (file,) = page["files"]
    assert page["modes"] == {"p": mode}
    assert '"bundle_version": 1,' in json.dumps(page)
    assert (file["bundle_version"], file["expires_at"], len(file["sha256"])) == (
        1,
        "2999-01-01T00:00:00+00:00",
        64,
    )
    assert file["policies"] == [GUARD]


def test_unenforced_parts_are_on_pages_and_in_metrics(tmp_path: Path) -> None:
    more = {"rules": [RULE | {"limit_keys": ["ip:asn", "ua:bot"]}], "labels": ["ip:tor"]}
    document = bundle(
        {"id": "p", "spec": GUARD["spec"] | more},
        kill_switches=[{"scope_key": "ua:bot", "scope_value": "x"}],
    )
    made = Made(tmp_path, document, allow_unenforced=True)
    idle = RULE | {"match": {"ip:country": "de"}}
    route = {"id": "route", "spec": {"loop_detection": {"enabled": False}, "fallback_limit": idle}}
    made.server.service.compile_handed_over(json.dumps(route))

    parts = made.ask("/policies")[1]["unenforced"]

    assert [(part["policy"], part["part"], part["pointer"]) for part in parts] == [
        ("", "kill_switches", "/kill_switches/0"),
        ("p", "labels", "/policies/0/spec/labels/0"),
        ("p", "rules", "/policies/0/spec/rules/0/limit_keys/0"),
        ("p", "rules", "/policies/0/spec/rules/0/limit_keys/1"),
        ("route", "fallback_limit", "/spec/fallback_limit/match/ip:country"),
    ]
    assert made.ask("/readyz")[1]["unenforced"] == 5
    assert sorted(made.read_metric("unenforced")) == [
        'loopguard_unenforced{part="fallback_limit",policy="route"} 1.0',
        'loopguard_unenforced{part="kill_switches",policy=""} 1.0',
        'loopguard_unenforced{part="labels",policy="p"} 1.0',
        'loopguard_unenforced{part="rules",policy="p"} 2.0',
    ]
