"""Every way in which a body can come, through the real Envoy in every body mode: it stays whole, and what can be is counted."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest

from tests.support.chart.istio import http_manager
from tests.support.documents import bundle, policy, read_yaml
from tests.support.harness import PATIENCE, Answer, Stack, envoy_version, eventually, stack
from tests.support.looping import chat
from tests.support.uploads import Upload, send

DUPLEX = "FULL_DUPLEX_STREAMED"
REASONS = {
    "NONE": "no_body_phase",
    "STREAMED": "",
    "BUFFERED": "",
    "BUFFERED_PARTIAL": "body_truncated",
    DUPLEX: "",
    "GRPC": "body_mode",
}
"""Body modes, and why a body is not counted that Envoy shows in them, as far as it is not."""

MODES = list(REASONS) if envoy_version() >= (1, 40) else list(REASONS)[:-1]
RESPONSE_MODES = list(REASONS)[:-1]
LIMIT = 65_536
SIZES = [0, 700, LIMIT, 3 * LIMIT]
TRANSPORTS = ["fast", "grpcio"]

needs_tolerant = pytest.mark.skipif(envoy_version() < (1, 38), reason="tolerant mode needs Envoy 1.38")


class Case(NamedTuple):
    """A request, and the modes of its route."""

    mode: str
    response_mode: str
    size: int
    http2: bool = False
    length: bool = False
    trailers: bool = False
    slow: bool = False

    @property
    def path(self) -> str:
        """Of its route."""
        return f"/{self.mode}/{self.response_mode}/"

    @property
    def identity(self) -> str:
        """Of the policy for it."""
        return f"{self.mode}-{self.response_mode}"

    @property
    def user(self) -> str:
        """A name that no other case has."""
        return "-".join(str(int(value)) if isinstance(value, bool) else str(value) for value in self)

    def make_upload(self, pause: Callable[[], object] | None = None) -> Upload:
        """What is sent; it comes back from the upstream."""
        body = random.Random(self.user).randbytes(self.size)
        waits: Callable[[], object] = partial(time.sleep, 0.004) if self.slow else bool
        headers = {"x-user-id": self.user}
        path = f"{self.path}echo"
        return Upload(path, body, self.http2, self.length, self.trailers, pause=pause or waits, headers=headers)

    def why_uncounted(self) -> str:
        """The reason, empty where it can be counted."""
        if not (self.size or self.trailers) and (self.http2 or self.length):
            return ""  # it ends with its headers
        if self.mode == "BUFFERED_PARTIAL" and self.size <= LIMIT:
            return ""
        return REASONS[self.mode]

    @property
    def is_too_large(self) -> bool:
        """Envoy refuses it by itself."""
        return self.mode == "BUFFERED" and self.size > LIMIT

    def expect(self) -> list[int]:
        """What becomes of three equal ones."""
        if self.is_too_large:
            return [413] * 3
        return [200] * 3 if self.why_uncounted() else [200, 200, 429]


MATRIX = [
    Case(mode, "NONE", size, http2, length, trailers, slow)
    for mode, size in product(MODES, SIZES)
    for http2, length, trailers, slow in product((False, True), repeat=4)
    if http2 or not (length and trailers)
]
ANSWERS = [
    Case(mode, response_mode, size, http2, trailers=http2)
    for mode, response_mode, size, http2 in product(MODES, RESPONSE_MODES, (700, LIMIT, 3 * LIMIT), (False, True))
    if response_mode != "BUFFERED" or size <= LIMIT  # Envoy's own 500 for a larger answer
]
LARGE = [
    Case(DUPLEX, "NONE", size, http2, length, trailers)
    for size in (1, 70_000, 1_100_000, 11_000_000)
    for http2, length, trailers in ((False, True, False), (False, False, False), (True, True, False), (True, False, True))
]
SOME = [
    case
    for case in dict.fromkeys([*MATRIX, *ANSWERS])
    if case.size in (700, 3 * LIMIT) and not (case.slow or case.length or case.is_too_large)
]


def write_mode(mode: str, response_mode: str) -> dict[str, str]:
    """A processing mode, as Envoy has it."""
    return {
        "request_header_mode": "SEND",
        "request_body_mode": mode,
        "request_trailer_mode": "SEND",
        "response_header_mode": "SEND",
        "response_body_mode": response_mode,
        "response_trailer_mode": "SKIP" if response_mode == "NONE" else "SEND",
    }


def in_every_mode(config: str) -> str:
    """The same configuration with routes in the modes that their paths name; Envoy is patient, and passes trailers on."""
    document = read_yaml(config.replace("timeout: 0.15s", "timeout: 30s"))  # of keepalive: this machine may be busy
    manager = http_manager(document)
    manager["http_protocol_options"] = {"enable_trailers": True}
    guard = next(item for item in manager["http_filters"] if item["name"] == "envoy.filters.http.ext_proc")
    guard["typed_config"]["message_timeout"] = "30s"
    for route in manager["route_config"]["virtual_hosts"][0]["routes"]:
        named = route["match"].get("prefix", "").split("/")[1:-1]
        if len(named) == 2:
            overrides = route["typed_per_filter_config"]["envoy.filters.http.ext_proc"]["overrides"]
            overrides["processing_mode"] = write_mode(*named)
    return json.dumps(document)


def guard(cases: Sequence[Case], *more: dict[str, Any], **selector: object) -> dict[str, Any]:
    """A policy for each pair of modes, and so a route."""
    paths = {case.identity: case.path for case in cases}
    keys = ["header:x-user-id"]
    made = [policy(name, {"pathPrefix": path, **selector}, limit_keys=keys) for name, path in paths.items()]
    return bundle(*made, *more)


OPTIONS: dict[str, Any] = {"body_mode": "tolerant", "buffer_limit": LIMIT, "edit": in_every_mode}


def send_all(made: Stack, cases: Sequence[Case], times: int = 3) -> dict[Case, list[Answer]]:
    """This many equal requests of each, one behind the other."""

    def send_one(case: Case) -> list[Answer]:
        return [send(made.envoy.port, case.make_upload()) for _ in range(times)]

    with ThreadPoolExecutor(8) as pool:
        return dict(zip(cases, pool.map(send_one, cases), strict=True))


def check_whole(made: Stack, answers: dict[Case, list[Answer]]) -> None:
    """What was answered with 200 has come to the upstream as it was sent, nothing else has, and all of it came back."""
    arrived: defaultdict[str, list[bytes]] = defaultdict(list)
    for seen in made.upstream.seen:
        arrived[seen.header("x-user-id") or ""].append(seen.body)
    torn = []
    for case, found in answers.items():
        body = case.make_upload().body
        good = [answer for answer in found if answer.status == 200]
        if arrived[case.user] != [body] * len(good) or any(answer.body != body for answer in good):
            lengths = [len(each) for each in arrived[case.user]], [len(answer.body) for answer in good]
            torn.append((case.user, [answer.status for answer in found], *lengths))
    assert torn == []


def check_statuses(answers: dict[Case, list[Answer]], expect: Callable[[Case], list[int]]) -> None:
    """Each is what it should be."""
    found = {case: [answer.status for answer in several] for case, several in answers.items()}
    assert [(case.user, several) for case, several in found.items() if several != expect(case)] == []


@needs_tolerant
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("cases", [MATRIX, ANSWERS], ids=["requests", "answers"])
def test_what_goes_on_keeps_its_body_and_what_can_be_counted_is(cases: list[Case], transport: str) -> None:
    """Whatever mode, version, length, trailers, size and pace: the third is refused, or all are whole and in the metric.

    However Envoy shows responses, which Loopguard has no use for, they reach the client whole.
    """
    with stack(guard(cases), "--transport", transport, **OPTIONS) as made:
        answers = send_all(made, cases)

        check_statuses(answers, Case.expect)
        check_whole(made, answers)
        told = {(seen.header("x-user-id"), seen.header("content-length")) for seen in made.upstream.seen}
        for case in cases:
            if case.length and not case.is_too_large and case.mode in ("NONE", "BUFFERED", "BUFFERED_PARTIAL"):
                assert (case.user, str(case.size)) in told
        metric = made.loopguard.metric
        expected = Counter((case.identity, case.why_uncounted()) for case in cases if case.expect() == [200] * 3)
        for (identity, reason), number in expected.items():
            uncounted = partial(metric, "uncounted_total", policy=identity)
            eventually(lambda: uncounted() == 3 * number, f"{identity} in the metric")  # noqa: B023  # called at once
            assert uncounted(reason=reason) == 3 * number
        assert metric("fail_open_total") == 0
        eventually(lambda: metric("streams_in_flight") == 0, "the end of all streams")


@needs_tolerant
@pytest.mark.deep
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_large_bodies_pass_whole_in_full_duplex(transport: str) -> None:
    """Envoy keeps nothing there, so bodies may be larger than its buffer limit."""
    with stack(guard(LARGE), "--transport", transport, **OPTIONS) as made:
        answers = send_all(made, LARGE, times=1)

        check_statuses(answers, lambda _: [200])
        check_whole(made, answers)
        assert made.loopguard.metric("uncounted_total") == 0
        assert made.loopguard.metric("requests_total", policy=f"{DUPLEX}-NONE", action="allow") == len(LARGE)


_BUG = """
from extproc.metrics import Metrics
make = Metrics.__init__
def break_it(self):
    make(self)
    self.decision_seconds = self.unmatched = None
Metrics.__init__ = break_it
"""


@needs_tolerant
@pytest.mark.parametrize(
    ("selector", "preamble"),
    [({"methods": ["PUT"]}, ""), pytest.param({"methods": ["PUT"]}, _BUG, marks=pytest.mark.deep), ({}, _BUG)],
    ids=["no policy matches", "no policy matches, and an error", "an error"],
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bodies_outlive_policies_that_do_not_match_and_errors_of_ours(
    transport: str, selector: dict[str, Any], preamble: str
) -> None:
    """In every mode, and where Envoy is fail-closed: what is let through is whole."""
    document = guard(SOME, **selector)
    with stack(document, "--transport", transport, preamble=preamble, failure_mode="deny", **OPTIONS) as made:
        answers = send_all(made, SOME, times=1)

        check_statuses(answers, lambda _: [200])
        check_whole(made, answers)
        assert (made.loopguard.metric("fail_open_total", reason="internal_error") > 0) == bool(preamble)


@needs_tolerant
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bodies_outlive_an_overload(transport: str) -> None:
    """While --max-streams is used up by a held request, all others pass whole."""
    # For 25 seconds: on a busy machine the others take a while.
    hold = policy("hold", {"pathExact": "/hold"}, action="throttle", threshold_identical_requests=250)
    flags = ["--transport", transport, "--max-streams", "1", "--drain-timeout", "0"]
    with stack(guard(SOME, hold), *flags, failure_mode="deny", **OPTIONS) as made:
        assert set(made.repeat("/hold", 249)) == {200}
        with made.connect() as held:
            held.sendall(b"GET /hold HTTP/1.1\r\nhost: h\r\n\r\n")
            eventually(lambda: made.loopguard.metric("throttled_in_flight") == 1, "a hold")

            answers = send_all(made, SOME, times=1)

        check_statuses(answers, lambda _: [200])
        check_whole(made, answers)
        assert made.loopguard.metric("overload_total") == len(SOME)


@needs_tolerant
@pytest.mark.parametrize("drain_timeout", ["30", "0"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bodies_outlive_a_stop(transport: str, drain_timeout: str) -> None:
    """An upload under way when Loopguard stops arrives whole; a duplex that cannot is refused, never sent on in part."""
    cases = [case for case in SOME if case.size == 3 * LIMIT and case.response_mode == "NONE"]
    halfway, goes_on = threading.Barrier(len(cases) + 1, timeout=PATIENCE), threading.Event()

    def stop_halfway() -> None:
        halfway.wait()
        goes_on.wait(PATIENCE)

    def send_one(case: Case) -> Answer:
        pauses: Iterator[Callable[[], object]] = iter([bool, stop_halfway, bool])

        def pause() -> None:
            next(pauses, bool)()

        return send(made.envoy.port, case.make_upload(pause))

    flags = ["--transport", transport, "--drain-timeout", drain_timeout]
    with stack(guard(cases), *flags, **OPTIONS) as made, ThreadPoolExecutor(len(cases)) as pool:
        found = [pool.submit(send_one, case) for case in cases]
        halfway.wait()
        waiting = [case for case in cases if case.mode in ("STREAMED", "BUFFERED_PARTIAL", DUPLEX)]
        metric = made.loopguard.metric
        eventually(lambda: metric("uncounted_total") == len(cases) - len(waiting), "the others' decisions")
        eventually(lambda: metric("streams_in_flight") == len(waiting), "what is under way")
        made.loopguard.signal(signal.SIGTERM)
        made.loopguard.wait_for("draining|stopping|shutting down")
        if drain_timeout == "0":
            made.loopguard.wait()
        goes_on.set()
        answers = {case: [each.result()] for case, each in zip(cases, found, strict=True)}

        refused = [500] if drain_timeout == "0" else [200]
        check_statuses(answers, lambda case: refused if case.mode == DUPLEX else [200])
        check_whole(made, answers)


FORM_SIZES = [1, 70_000, 1_100_000]


def in_duplex(config: str, *, keeps_length: bool = envoy_version() >= (1, 38)) -> str:
    """The same configuration with trailers; Envoy 1.36 cannot keep content-length."""
    document = read_yaml(config)
    manager = http_manager(document)
    manager["http_protocol_options"] = {"enable_trailers": True}
    if not keeps_length:
        del manager["http_filters"][0]["typed_config"]["allow_content_length_header"]
    return json.dumps(document)


FORMS = [
    Upload("", b"x" * size, http2, length, trailers, headers={"x-user-id": f"{size} {http2} {length} {trailers}"})
    for size, http2, length, trailers in product(FORM_SIZES, (False, True), (False, True), (False, True))
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
def duplex(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """A stack whose Envoy keeps no bodies. Its limit is below most of them: it does not matter in this mode."""
    with stack(DOCUMENT, "--transport", request.param, body_mode="duplex", buffer_limit=65_536, edit=in_duplex) as running:
        yield running


def arrived(duplex: Stack, path: str, form: Upload) -> list[bytes]:
    """The bodies that reached the upstream."""
    user = form.headers["x-user-id"]
    return [seen.body for seen in duplex.upstream.seen if seen.target == path and seen.header("x-user-id") == user]


@pytest.mark.parametrize(
    ("action", "statuses"),
    [("pass", [200, 200]), ("warn", [200, 200]), ("reject", [200, 429]), ("throttle", [200, 200]), ("headers", [200, 429])],
)
def test_each_action_keeps_bodies_whole(duplex: Stack, action: str, statuses: list[int]) -> None:
    """What passes comes whole, with its warning; what is refused never reaches the upstream, not even in part."""
    path = f"/{action}/all"

    for form in FORMS:
        answers = [send(duplex.envoy.port, form._replace(path=path)) for _ in range(2)]
        assert [answer.status for answer in answers] == statuses
        assert arrived(duplex, path, form) == [form.body] * statuses.count(200)

    warned = [seen.header("x-fairvisor-warning") for seen in duplex.upstream.seen if seen.target == path]
    assert warned.count("loop_warn") == (len(FORMS) if action == "warn" else 0)
    assert duplex.loopguard.metric("uncounted_total", policy=action) == 0
    eventually(lambda: duplex.loopguard.metric("streams_in_flight") == 0, "the end of all streams")


def test_a_steered_body_arrives_edited(duplex: Stack) -> None:
    """Its note is in it, whatever its form; a length that is told is right."""
    path = "/v1/chat/completions"
    for form in FORMS:
        body = chat(3, padding=len(form.body))
        assert send(duplex.envoy.port, form._replace(path=path, body=body)).status == 200
        [edited] = arrived(duplex, path, form)
        assert json.loads(edited)["messages"][:6] == json.loads(body)["messages"][:6]
        assert "Loop detected" in json.loads(edited)["messages"][6]["content"]

    assert {seen.header("x-loopguard-steered") for seen in duplex.upstream.seen if seen.target == path} == {"1"}
    assert duplex.loopguard.metric("unsteered_total") == 0


_NEEDS_KEPT = pytest.mark.skipif(envoy_version() < (1, 38), reason="keeping content-length needs Envoy 1.38")


@pytest.mark.parametrize("allowed", [False, pytest.param(True, marks=_NEEDS_KEPT)])
def test_the_told_length_is_that_of_the_body(allowed: bool) -> None:
    """Envoy removes it, or keeps ours where its filter allows that."""
    form = Upload("/pass/length", b"x" * 5_000, length=True, headers={"x-user-id": "ann"})
    with stack(DOCUMENT, body_mode="duplex", edit=partial(in_duplex, keeps_length=allowed)) as duplex:
        for upload in (form, form._replace(path="/v1/chat/completions", body=chat(3, padding=5_000))):
            assert send(duplex.envoy.port, upload).status == 200

        told = [seen.header("content-length") for seen in duplex.upstream.seen]
        assert told == ([str(len(seen.body)) for seen in duplex.upstream.seen] if allowed else [None, None])
        assert b"Loop detected" in duplex.upstream.seen[1].body
