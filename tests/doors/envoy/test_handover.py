"""Policies that come with a route, and observing filters, through the real Envoy."""

import json
import re
import signal
from collections.abc import Iterator

import pytest

from extproc.engine.handover import POLICY_ATTRIBUTE, POLICY_METADATA
from tests.support import ROOT
from tests.support.documents import bundle, policy
from tests.support.harness import Stack, envoy_version, eventually, stack

NOWHERE = {"pathExact": "/nowhere"}  # only a route can apply a policy with this selector

PAGE = ROOT / "docs" / "policies.md"


# ---- Policies of routes


@pytest.fixture(scope="module", params=["fast", "grpcio"])
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def _replaced(config: str, old: str, new: str, after: str = "") -> str:
    """The first `old` behind `after` replaced; fails where there is none."""
    at = config.index(old, config.index(after))
    return config[:at] + new + config[at + len(old) :]


def _route(path: str) -> str:
    return f'- name: "guarded:{path}*"'


def _naming(config: str, path: str, value: str) -> str:
    metadata = f"{{key: {POLICY_METADATA}, value: {json.dumps(value)}}}"
    named = f"overrides:\n{' ' * 22}grpc_initial_metadata: [{metadata}]\n"
    return _replaced(config, "overrides:\n", named, _route(path))


def _carrying(config: str, path: str, value: str) -> str:
    metadata = json.dumps({"filter_metadata": {"loopguard": {"policy_json": value}}})
    return _replaced(
        config, "match:", f"metadata: {metadata}\n                match:", _route(path)
    )


def _handing_over(config: str) -> str:
    """Routes that name policies, routes that carry them, and a filter that asks for them."""
    asked = "request_attributes: [source.address, xds.route_name"
    config = _replaced(config, asked, f"{asked}, {json.dumps(POLICY_ATTRIBUTE)}")
    config = _naming(config, "/named", "strict, gentle")
    config = _naming(config, "/formatted", "%REQ(x-policy)%")
    config = _carrying(config, "/carried", json.dumps(policy("carried", {}, reject_status=418)))
    return _carrying(
        config, "/large", json.dumps(policy("large", {}) | {"description": "x" * 65_000})
    )


_ROUTES = ("/plain", "/named", "/formatted", "/carried", "/large")


@pytest.fixture(scope="module")
def routes(transport: str) -> Iterator[Stack]:
    document = bundle(
        policy(
            "gentle", {"pathPrefix": "/elsewhere"}, threshold_identical_requests=50, action="warn"
        ),
        policy("strict", {"pathPrefix": "/elsewhere"}, threshold_identical_requests=2),
        *(
            policy(path[1:], {"pathPrefix": path}, threshold_identical_requests=4, body="ignore")
            for path in _ROUTES
        ),
    )
    with stack(document, "--transport", transport, edit=_handing_over, failure_mode="deny") as made:
        yield made


@pytest.mark.parametrize(
    ("path", "headers", "statuses", "by"),
    [
        ("/named/x", {}, [200, 429, 429], "strict"),
        ("/plain/x", {}, [200, 200, 200, 429], "plain"),
        (
            "/plain/y",
            {POLICY_METADATA: "strict"},
            [200, 200, 200, 429],
            "plain",
        ),  # a client names no policy
        ("/formatted/x", {"x-policy": "strict"}, [200, 429, 429], "strict"),
        ("/formatted/y", {}, [200, 200, 200, 429], "formatted"),
        ("/carried/x", {}, [200, 200, 418], "carried"),
        ("/large/x", {}, [200, 200, 429], "large"),
    ],
)
def test_policies_of_a_route_replace_the_selected_one(
    routes: Stack, path: str, headers: dict[str, str], statuses: list[int], by: str
) -> None:
    errors = routes.loopguard.metric("handover_errors_total")

    answers = [routes.post(path, b"x", headers) for _ in statuses]

    assert [answer.status for answer in answers] == statuses
    assert answers[-1].headers["x-loopguard-policy"] == by
    assert routes.loopguard.metric("handover_errors_total") == errors
    assert (
        routes.loopguard.metric("fail_open_total")
        == routes.loopguard.metric("requests_total", policy="named")
        == 0
    )


def _as_the_docs_say(config: str) -> str:
    """The snippets of the page's section in place of the bootstrap's parts."""
    section = PAGE.read_text().partition("## A policy for a route")[2].partition("\n## ")[0]
    naming, carrying = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    metadata, asking = carrying.split("# on the filter\n")
    config = _replaced(
        config, "request_attributes: [source.address, xds.route_name]", asking.strip()
    )
    config = _replaced(config, "match:", f"{_indented(metadata)}match:", _route("/carried"))
    start = config.index("typed_per_filter_config:", config.index(_route("/named")))
    last = "response_header_mode: SEND\n"
    end = config.index(last, start) + len(last)
    return config[:start] + _indented(naming).rstrip(" ") + config[end:]


def _indented(text: str) -> str:
    return text.replace("\n", "\n" + " " * 16)


def test_snippets_in_the_docs_work() -> None:
    document = bundle(
        policy("named", {"pathPrefix": "/named"}),
        policy("carried", {"pathPrefix": "/carried"}, threshold_identical_requests=100),
        policy("chat-strict", NOWHERE, threshold_identical_requests=2),
    )
    with stack(document, edit=_as_the_docs_say) as made:
        assert made.repeat("/named", 3) == [200, 429, 429]
        assert made.repeat("/carried", 3, headers={"x-user-id": "ann"}) == [200, 200, 429]
        assert made.repeat("/carried", 1, headers={"x-user-id": "bob"}) == [200]
        assert made.loopguard.metric("handover_errors_total") == 3  # `agents` is not loaded


# ---- Observing: Envoy sends everything and waits for nothing

_SENT = "http.ingress.ext_proc.loopguard.stream_msgs_sent"


def _observing(config: str) -> str:
    """A stream that Loopguard leaves open would stay so for ten minutes."""
    config = config.replace("request_body_mode: BUFFERED", "request_body_mode: STREAMED")
    observed = "failure_mode_allow: true"
    indent = "\n" + " " * 14
    return _replaced(
        config,
        observed,
        f"{observed}{indent}observability_mode: true{indent}deferred_close_timeout: 600s",
    )


OBSERVED = bundle(
    policy("reject", {"pathPrefix": "/reject"}),
    policy("throttle", {"pathPrefix": "/throttle"}, action="throttle", max_delay_ms=30_000),
)


def _skip_where_observers_are_cut_off(transport: str) -> None:
    if transport == "grpcio" and envoy_version() == (1, 38):
        pytest.skip(
            "Envoy 1.38 resets observed streams as soon as all is sent, and grpc drops what has "
            "not been read by then"
        )


@pytest.fixture(scope="module")
def observed(transport: str) -> Iterator[Stack]:
    _skip_where_observers_are_cut_off(transport)
    with stack(OBSERVED, "--transport", transport, edit=_observing) as made:
        yield made


def _in_parts(made: Stack, data: bytes) -> Iterator[bytes]:
    """The next body in three parts; the first goes to Loopguard before the others come."""
    sent = made.envoy.stat(_SENT)

    def parts() -> Iterator[bytes]:
        yield data[:100_000]
        eventually(lambda: made.envoy.stat(_SENT) >= sent + 2, "headers and a part of the body")
        yield data[100_000:200_000]
        yield data[200_000:]

    return parts()


def _handled(made: Stack, name: str) -> float:
    return made.loopguard.metric("requests_total", policy=name) + made.loopguard.metric(
        "uncounted_total", policy=name
    )


@pytest.mark.parametrize("length", [False, True])
def test_observed_bodies_are_counted_whole(observed: Stack, length: bool) -> None:
    """Each stream ends once its request is counted, long before Envoy's deferred_close_timeout."""
    handled, refused = (
        _handled(observed, "reject"),
        observed.loopguard.metric("loops_detected_total", policy="reject"),
    )
    data = b"x" * 300_000
    bodies = [data, data, data, data[:-1] + b"1", data[:-1] + b"2", data[:-1] + b"3"]
    path, headers = f"/reject/{length}", {"content-length": "300000"} if length else {}

    answers = [
        observed.send(path, method="POST", body=_in_parts(observed, each), headers=headers)
        for each in bodies
    ]

    eventually(lambda: _handled(observed, "reject") == handled + 6, "six requests")
    assert observed.loopguard.metric("loops_detected_total", policy="reject") == refused + 1
    assert {answer.status for answer in answers} == {200}
    assert not any(
        name.startswith(("x-loopguard", "x-fairvisor"))
        for answer in answers
        for name in answer.headers
    )
    assert [seen.body for seen in observed.upstream.seen if seen.target == path] == bodies
    eventually(
        lambda: observed.loopguard.metric("streams_in_flight") == 0, "the end of all streams"
    )
    eventually(
        lambda: observed.envoy.stat("cluster.loopguard.upstream_rq_active") == 0,
        "their end in Envoy",
    )


def test_observed_requests_never_wait_for_loopguard(transport: str) -> None:
    _skip_where_observers_are_cut_off(transport)
    with stack(OBSERVED, "--transport", transport, edit=_observing) as made:
        made.send("/else")  # connects

        made.loopguard.signal(signal.SIGSTOP)
        try:
            standing = made.repeat("/throttle", 4, body=b"x") + made.repeat(
                "/reject", 4, body=b"x" * 300_000
            )
        finally:
            made.loopguard.signal(signal.SIGCONT)
        eventually(lambda: _handled(made, "throttle") == 4, "four requests")
        made.loopguard.signal(signal.SIGKILL)
        made.loopguard.wait()
        dead = made.repeat("/reject", 3, body=b"x" * 300_000)

        assert (standing, dead) == ([200] * 8, [200] * 3)


def test_observed_upload_of_a_leaving_client_is_not_counted(transport: str) -> None:
    """Envoy hides from observers that it broke off; the stream ends at deferred_close_timeout."""

    def impatient(config: str) -> str:
        return _replaced(
            _observing(config), "deferred_close_timeout: 600s", "deferred_close_timeout: 0.1s"
        )

    _skip_where_observers_are_cut_off(transport)
    with stack(OBSERVED, "--transport", transport, edit=impatient) as made:
        parts = _in_parts(made, b"x" * 300_000)
        with made.connect() as connection:
            connection.sendall(
                b"POST /reject HTTP/1.1\r\nhost: h\r\ncontent-length: 300000\r\n\r\n"
            )
            connection.sendall(next(parts))
            connection.sendall(next(parts))

        eventually(lambda: _handled(made, "reject"), "the upload's end")
        assert made.loopguard.metric("uncounted_total", policy="reject", reason="aborted") == 1
