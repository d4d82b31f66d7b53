"""The admin endpoints."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from extproc.build import BUILD
from extproc.errors import LoopguardError, UsageError
from extproc.metrics import Metrics
from extproc.operator.admin import server as admin_server
from extproc.operator.admin.client import AdminClient, find_admin
from extproc.operator.admin.pages import MAX_BODY, Page, is_near, make_app, read_json, route_page, send_page
from extproc.operator.admin.server import AdminServer
from extproc.server import Server
from extproc.settings import Settings, parse_address
from tests.support.bundles import RULE
from tests.support.documents import bundle, policy
from tests.support.extent import deepen
from tests.support.harness import PATIENCE, eventually
from tests.support.promql import list_labels

Answer = tuple[int, dict[str, str], str]

NAMES = """
requests_total{policy,mode,action} loops_detected_total{policy,mode,action} unmatched_total uncounted_total{policy,reason}
decision_seconds throttled_in_flight streams_in_flight overload_total store_errors_total{kind} store_seconds store_batch_size
store_entries store_evictions_total policy_reloads_total{result} policy_info{bundle_version,sha256,file}
policy_file_refused{file} fail_open_total{reason}
unenforced{policy,part}
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
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


Pages = Mapping[str, Callable[[], Page]]


def make_admin(pages: Pages | None = None, metrics: Metrics | None = None, routes: Sequence[Route] = ()) -> AdminServer:
    """An admin server with these pages and routes, not started yet."""
    shown = [route_page(path, make) for path, make in (pages or {}).items()]
    return AdminServer(make_app(metrics or Metrics(), [*shown, *routes]))


@contextmanager
def serving(admin: AdminServer, socket_path: str = "") -> Iterator[int]:
    """Start an admin server on a free port and stop it at the end."""
    port = int(admin.start(parse_address("127.0.0.1:0"), socket_path).rpartition(":")[2])
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
    """A server with one policy, not started yet."""
    file = tmp_path / "p.json"
    file.write_text(
        json.dumps(bundle(policy("p", {"pathExact": "/a"}, limit_keys=["jwt:a"]), expires_at="2999-01-01T00:00:00Z"))
    )
    return made(Settings(policy=(str(file),)))


HOSTS = {
    **dict.fromkeys(
        ["localhost", "localhost:9900", "LOCALHOST", "127.0.0.1", "127.8.8.8:9900", "[::1]", "[::1]:9900", ""], True
    ),
    "[::ffff:127.0.0.1]:9900": True,
    **dict.fromkeys(["evil.example", "evil.example:9900", "localhost.evil.example", "192.0.2.7:9900", "[2001:db8::1]"], False),
    **dict.fromkeys(
        ["[::1", "::1", "[::1].evil.example", "[::1]:9900:1", "localhost:evil", ":9900", "[]", "127.0.0.1.evil"], False
    ),
}


@pytest.mark.parametrize(("host", "near"), HOSTS.items())
def test_a_local_client_uses_this_machines_own_name(host: str, near: bool) -> None:
    """A browser here that was sent by a page from elsewhere says so in `Host`; a loopback address needs no port in there."""

    async def tell(request: Request) -> Response:
        return send_page(Page(HTTPStatus.OK, is_near(request)))

    with serving(make_admin(routes=[Route("/near", tell)])) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        connection.request("GET", "/near", headers={"host": host})
        answer = json.loads(connection.getresponse().read())
        connection.close()

    assert answer is near


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
    metrics.decisions["p", "enforce", "reject"] = 1
    metrics.decisions["p", "enforce", "allow"] = 1
    metrics.loops["p", "enforce", "reject"] = 1
    with serving(make_admin(metrics=metrics)) as port:
        status, headers, body = ask(port, "/metrics?x=1")

    assert status == HTTPStatus.OK
    assert headers["content-type"].startswith("text/plain; version=")
    assert 'loopguard_requests_total{action="reject",mode="enforce",policy="p"} 1.0\n' in body
    assert 'loopguard_requests_total{action="allow",mode="enforce",policy="p"} 1.0\n' in body
    assert 'loopguard_loops_detected_total{action="reject",mode="enforce",policy="p"} 1.0\n' in body


@given(st.lists(st.floats(0, 2) | st.sampled_from([0.000025, 0.001, 1.0]), max_size=20))
def test_histograms_are_what_prometheus_own_would_be(values: list[float]) -> None:
    """What is kept in plain numbers is exposed letter by letter as the client library exposes its own histogram."""
    metrics, registry = Metrics(), CollectorRegistry()
    bounds, text = metrics.decision_seconds.bounds, "Time from message to answer, without delays by throttle"
    theirs = Histogram("loopguard_decision_seconds", text, buckets=bounds, registry=registry)
    for value in values:
        metrics.decision_seconds.observe(value)
        theirs.observe(value)

    shown = generate_latest(metrics.registry).decode()

    assert generate_latest(registry).decode() in shown


def test_unknown_paths_name_the_known_ones() -> None:
    """A wrong path is 404 with a list of what there is; a page's own status is its own."""
    pages = {"/down": lambda: Page(HTTPStatus.SERVICE_UNAVAILABLE, {"status": "down"})}
    with serving(make_admin(pages)) as port:
        wrong, down = ask(port, "/"), ask(port, "/down")

    assert (wrong[0], wrong[2]) == (404, "not found; available: /metrics, /down\n")
    assert (down[0], json.loads(down[2])) == (503, {"status": "down"})
    assert down[1]["content-type"] == "application/json"


def test_a_page_that_fails_says_so() -> None:
    """An error inside a page is a 500 with the reason, and the server lives on."""

    def broken() -> Page:
        raise ValueError("too deep")

    with serving(make_admin({"/p": broken})) as port:
        answers = [ask(port, "/p"), ask(port, "/metrics")]

    assert [answer[0] for answer in answers] == [500, 200]
    assert json.loads(answers[0][2]) == {"error": "too deep"}


def test_more_silent_clients_than_there_is_room_for_delay_no_other() -> None:
    """Past the bound the client that has been silent longest is dropped, and a client that asks gets an answer."""
    with serving(make_admin()) as port, ExitStack() as clients:
        silent = [clients.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(300)]
        status = ask(port, "/metrics")[0]

        assert status == 200
        assert silent[0].recv(1) == b""


def test_a_slow_client_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has not sent its request in time is dropped, even if bytes keep coming."""
    monkeypatch.setattr(admin_server, "_CLIENT_SECONDS", 0.2)

    with serving(make_admin()) as port, socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n")
        client.settimeout(0.01)
        assert eventually(lambda: _dribble(client), "the end of the connection")


def _dribble(client: socket.socket) -> bool:
    """Send a little more; returns whether the server has hung up."""
    try:
        client.sendall(b"a: b\r\n")
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def _echo(path: str) -> Route:
    async def echo(request: Request) -> Response:
        return send_page(Page(HTTPStatus.OK, await read_json(request)))

    return Route(path, echo, methods=["POST"])


def test_what_is_sent_is_bounded_json() -> None:
    """A body that is JSON reaches its endpoint; another is 400, one too large 413, a wrong method 405, each with the reason."""
    bodies = [b'{"a": 1}', b"[", b"[" * MAX_BODY, b"1" * 70_000]
    cases = [*(("POST", body) for body in bodies), ("PUT", b"")]
    answers = []
    with serving(make_admin(routes=[_echo("/echo")])) as port:
        for method, body in cases:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
            connection.request(method, "/echo", body)
            answer = connection.getresponse()
            answers.append((answer.status, json.loads(answer.read())))
            connection.close()

    assert answers == [
        (200, {"a": 1}),
        (400, {"error": "the body is not JSON"}),
        (400, {"error": "the body is not JSON"}),
        (413, {"error": "the body must be at most 65536 bytes"}),
        (405, {"error": "Method Not Allowed"}),
    ]


def test_a_unix_socket_beside_the_port(tmp_path: Path) -> None:
    """The same endpoints are there on a Unix socket that only its owner may open."""
    path = tmp_path / "admin.sock"
    with serving(make_admin({"/p": lambda: Page(HTTPStatus.OK, {"a": 1})}), str(path)) as port:
        client = AdminClient(f"unix:{path}")
        answers = [client.ask("/p"), json.loads(ask(port, "/p")[2])]
        client.close()

        assert answers == [{"a": 1}, {"a": 1}]
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_unix_socket_that_cannot_be_is_one_clear_error(tmp_path: Path) -> None:
    """The error names the path and the flag, and the port is free again."""
    admin = make_admin()
    with pytest.raises(LoopguardError) as failure:
        admin.start(parse_address("127.0.0.1:0"), f"{tmp_path}/no/such/folder")

    expected = f"cannot listen on unix:{tmp_path}/no/such/folder: No such file or directory; choose another with --admin-socket"
    assert str(failure.value) == expected


def test_the_client_says_why_there_is_no_answer() -> None:
    """No server, an unknown path, a page's own error, an answer that is no JSON: each is one clear line."""
    pages: Pages = {"/down": lambda: Page(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "no store"})}
    messages = []
    with serving(make_admin(pages)) as port:
        client = AdminClient(f"127.0.0.1:{port}")
        for path in ("/nothing", "/down", "/metrics"):
            with pytest.raises(LoopguardError) as failure:
                client.ask(path)
            messages.append(str(failure.value))
    with pytest.raises(LoopguardError) as failure:
        client.ask("/down")
    messages.append(str(failure.value))
    client.close()

    url = f"127.0.0.1:{port}"
    assert messages == [
        f"{url}/nothing answered 404: not found; available: /metrics, /down",
        f"{url}/down answered 503: no store",
        f"{url}/metrics is not an admin endpoint of Loopguard",
        f"cannot ask {url}: [Errno 111] Connection refused; set --admin to a running server",
    ]


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:port", "http://h/policies", "unix:admin.sock", ""])
def test_a_url_that_is_none_is_a_usage_error(url: str) -> None:
    """What no server can be asked at is told before anything is asked."""
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
        ({"LOOPGUARD_ADMIN": "10.0.0.1:8000", "LOOPGUARD_ADMIN_SOCKET": "/run/a.sock"}, "unix:/run/a.sock"),
    ],
)
def test_the_machines_own_server_is_found_by_its_environment(environ: dict[str, str], expected: str) -> None:
    """Without `--admin` a command asks where the environment has the server listen."""
    assert find_admin(environ)[0] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", deepen(["extproc.cli.main", "extproc.ext_proc.stream", "extproc.transport.fast"], "extproc.cli.main")
)
def test_neither_requests_nor_other_commands_load_the_web_server(module: str) -> None:
    """What every request runs through, and the command line, import nothing of the admin port's."""
    heavy = "{'starlette', 'uvicorn', 'httpx', 'jinja2', 'rich', 'cloudevents'}"
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"

    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize("text", ["127.0.0.1:0", pytest.param("[::1]:0", marks=IPV6), pytest.param(":0", marks=IPV6)])
def test_it_listens_where_it_is_told(text: str) -> None:
    """IPv4, IPv6 and all interfaces; the answer tells the real port."""
    admin = make_admin()

    shown = admin.start(parse_address(text))
    admin.stop()

    assert shown.rpartition(":")[0] == parse_address(text).text.rpartition(":")[0]
    assert int(shown.rpartition(":")[2]) > 0


def test_an_address_in_use_is_one_clear_error() -> None:
    """The error names the address and the flag."""
    with serving(make_admin()) as port, pytest.raises(LoopguardError) as failure:
        make_admin().start(parse_address(f"127.0.0.1:{port}"))

    assert str(failure.value) == f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another with --admin"


def test_an_admin_that_never_started_can_be_stopped() -> None:
    """Stopping is safe at any time."""
    make_admin().stop()


def test_ready_from_serving_until_draining(server: Server) -> None:
    """`/readyz` is 503 before the server serves and once it drains; the store is a detail in it."""
    seen = [server._readyz()]
    server._health.set(serving=True)
    seen.append(server._readyz())
    server._on_stop(signal.SIGTERM)
    seen.append(server._readyz())

    assert [(page.status, page.body) for page in seen] == [
        (status, {"status": word, "build": BUILD, "store": "ok"})
        for status, word in ((503, "starting"), (200, "ready"), (503, "draining"))
    ]


@pytest.mark.sources  # compiled classes keep their methods
def test_a_dead_store_leaves_the_server_ready(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with the store is told, and is no reason to be taken out of service."""
    server._health.set(serving=True)
    monkeypatch.setattr(server._store, "health", lambda: "connection refused")

    page = server._readyz()

    assert (page.status, page.body) == (200, {"status": "ready", "build": BUILD, "store": "connection refused"})


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


def test_what_is_not_enforced_shows_as_long_as_it_is_in_force(tmp_path: Path) -> None:
    """With --allow-unenforced each part stands in `/policies` and a metric, and `/readyz` has their number."""
    more = {"rules": [RULE | {"limit_keys": ["ip:asn", "ua:bot"]}], "labels": ["ip:tor"]}
    plain = policy("p", {"pathExact": "/a"})
    switches = [{"scope_key": "ua:bot", "scope_value": "x"}]
    file = tmp_path / "p.json"
    file.write_text(json.dumps(bundle({"id": "p", "spec": plain["spec"] | more}, kill_switches=switches)))
    running = made(Settings(policy=(str(file),), allow_unenforced=True))
    running._health.set(serving=True)

    def show() -> tuple[list[tuple[str, str, str]], int | None, dict[tuple[str, str], float]]:
        parts = running._policies().body["unenforced"]
        (family,) = [family for family in running._metrics.registry.collect() if family.name == "loopguard_unenforced"]
        samples = {(sample.labels["policy"], sample.labels["part"]): sample.value for sample in family.samples}
        listed = [(part["policy"], part["part"], part["pointer"]) for part in parts]
        return listed, running._readyz().body.get("unenforced"), samples

    before = show()
    idle = RULE | {"match": {"ip:country": "de"}}
    route = json.dumps({"id": "route", "spec": {"loop_detection": {"enabled": False}, "fallback_limit": idle}})
    running.service.compile_handed_over(route)
    with_route = show()
    file.write_text(json.dumps(bundle(plain)))
    asyncio.run(running._reloader.reload(running._swap))
    after = show()

    expected = [
        ("", "kill_switches", "/kill_switches/0"),
        ("p", "labels", "/policies/0/spec/labels/0"),
        ("p", "rules", "/policies/0/spec/rules/0/limit_keys/0"),
        ("p", "rules", "/policies/0/spec/rules/0/limit_keys/1"),
    ]
    counts = {("", "kill_switches"): 1, ("p", "rules"): 2, ("p", "labels"): 1}
    assert before == (expected, 4, counts)
    of_route = [("route", "fallback_limit", "/spec/fallback_limit/match/ip:country")]
    assert with_route == ([*expected, *of_route], 5, counts | {("route", "fallback_limit"): 1})
    assert after == (of_route, 1, {("route", "fallback_limit"): 1})


def test_shadow_for_all_shows_in_policies(server: Server) -> None:
    """With `--shadow` every policy is shown in shadow mode, whatever its file says."""
    shadowed = made(Settings(policy=server._settings.policy, shadow=True))

    assert shadowed._policies().body["modes"] == {"p": "shadow"}
