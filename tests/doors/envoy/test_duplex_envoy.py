"""FULL_DUPLEX_STREAMED through the real Envoy: every action, on bodies of every size and form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest

from tests.support.chart.istio import http_manager
from tests.support.documents import bundle, policy, read_yaml
from tests.support.harness import Stack, envoy_version, eventually, stack
from tests.support.looping import chat
from tests.support.uploads import Upload, send

TRANSPORTS = ["fast", "grpcio"]
SIZES = [1, 70_000, 1_100_000]


def edit(config: str, *, keeps_length: bool = envoy_version() >= (1, 38)) -> str:
    """The same configuration with trailers; Envoy 1.36 cannot keep content-length."""
    document = read_yaml(config)
    manager = http_manager(document)
    manager["http_protocol_options"] = {"enable_trailers": True}
    if not keeps_length:
        del manager["http_filters"][0]["typed_config"]["allow_content_length_header"]
    return json.dumps(document)


FORMS = [
    Upload("", b"x" * size, http2, length, trailers, headers={"x-user-id": f"{size} {http2} {length} {trailers}"})
    for size, http2, length, trailers in product(SIZES, (False, True), (False, True), (False, True))
    if http2 or not (length and trailers)
]
_USER: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}
_TURNS: dict[str, Any] = {**_USER, "similarity": "turns", "threshold_identical_requests": 3, "max_inspect_bytes": 4_000_000}
DOCUMENT = bundle(
    policy("pass", {"pathPrefix": "/pass"}, threshold_identical_requests=100, **_USER),
    policy("warn", {"pathPrefix": "/warn"}, action="warn", threshold_identical_requests=2, **_USER),
    policy("reject", {"pathPrefix": "/reject"}, threshold_identical_requests=2, **_USER),
    policy("throttle", {"pathPrefix": "/throttle"}, action="throttle", threshold_identical_requests=2, **_USER),
    policy("headers", {"pathPrefix": "/headers"}, threshold_identical_requests=2, body="ignore", **_USER),
    policy("steer", {"pathPrefix": "/v1/chat"}, action="steer", **_TURNS),
)


@pytest.fixture(scope="module", params=TRANSPORTS)
def made(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """A stack whose Envoy keeps no bodies. Its limit is below most of them: it does not matter in this mode."""
    with stack(DOCUMENT, "--transport", request.param, body_mode="duplex", buffer_limit=65_536, edit=edit) as running:
        yield running


def arrived(made: Stack, path: str, form: Upload) -> list[bytes]:
    """The bodies that reached the upstream."""
    user = form.headers["x-user-id"]
    return [seen.body for seen in made.upstream.seen if seen.target == path and seen.header("x-user-id") == user]


@pytest.mark.parametrize(
    ("action", "statuses"),
    [("pass", [200, 200]), ("warn", [200, 200]), ("reject", [200, 429]), ("throttle", [200, 200]), ("headers", [200, 429])],
)
def test_each_action_keeps_bodies_whole(made: Stack, action: str, statuses: list[int]) -> None:
    """What passes comes whole, with its warning; what is refused never reaches the upstream, not even in part."""
    path = f"/{action}/all"

    for form in FORMS:
        answers = [send(made.envoy.port, form._replace(path=path)) for _ in range(2)]
        assert [answer.status for answer in answers] == statuses
        assert arrived(made, path, form) == [form.body] * statuses.count(200)

    warned = [seen.header("x-fairvisor-warning") for seen in made.upstream.seen if seen.target == path]
    assert warned.count("loop_warn") == (len(FORMS) if action == "warn" else 0)
    assert made.loopguard.metric("uncounted_total", policy=action) == 0
    eventually(lambda: made.loopguard.metric("streams_in_flight") == 0, "the end of all streams")


def test_a_steered_body_arrives_edited(made: Stack) -> None:
    """Its note is in it, whatever its form; a length that is told is right."""
    path = "/v1/chat/completions"
    for form in FORMS:
        body = chat(3, padding=len(form.body))
        assert send(made.envoy.port, form._replace(path=path, body=body)).status == 200
        [edited] = arrived(made, path, form)
        assert json.loads(edited)["messages"][:6] == json.loads(body)["messages"][:6]
        assert "Loop detected" in json.loads(edited)["messages"][6]["content"]

    assert {seen.header("x-loopguard-steered") for seen in made.upstream.seen if seen.target == path} == {"1"}
    assert made.loopguard.metric("unsteered_total") == 0


_NEEDS_KEPT = pytest.mark.skipif(envoy_version() < (1, 38), reason="keeping content-length needs Envoy 1.38")


@pytest.mark.parametrize("allowed", [False, pytest.param(True, marks=_NEEDS_KEPT)])
def test_the_told_length_is_that_of_the_body(allowed: bool) -> None:
    """Envoy removes it, or keeps ours where its filter allows that."""
    form = Upload("/pass/length", b"x" * 5_000, length=True, headers={"x-user-id": "ann"})
    with stack(DOCUMENT, body_mode="duplex", edit=partial(edit, keeps_length=allowed)) as made:
        for upload in (form, form._replace(path="/v1/chat/completions", body=chat(3, padding=5_000))):
            assert send(made.envoy.port, upload).status == 200

        told = [seen.header("content-length") for seen in made.upstream.seen]
        assert told == ([str(len(seen.body)) for seen in made.upstream.seen] if allowed else [None, None])
        assert b"Loop detected" in made.upstream.seen[1].body
