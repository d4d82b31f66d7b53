"""Bodies in every form and mode through Envoy: they stay whole, and are counted if possible."""

import json
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, cycle, product
from typing import Any, NamedTuple

import pytest

from tests.support.chart.istio import http_manager
from tests.support.documents import bundle, policy, read_yaml
from tests.support.harness import PATIENCE, Answer, Stack, envoy_version, eventually, stack
from tests.support.looping import chat
from tests.support.uploads import Upload, send

DUPLEX = "FULL_DUPLEX_STREAMED"
# By body mode, why a body that reaches the upstream is not counted; empty where it is counted.
REASONS = {
    "NONE": "no_body_phase",
    "STREAMED": "",
    "BUFFERED": "",
    "BUFFERED_PARTIAL": "body_truncated",
    DUPLEX: "",
    "GRPC": "body_mode",
}
MODES = list(REASONS) if envoy_version() >= (1, 40) else list(REASONS)[:-1]
RESPONSE_MODES = list(REASONS)[1:-1]
LIMIT = 65_536
LARGE = 3 * LIMIT
TRANSPORTS = ["fast", "grpcio"]

needs_tolerant = pytest.mark.skipif(
    envoy_version() < (1, 38), reason="tolerant mode needs Envoy 1.38"
)


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
        return f"/{self.mode}/{self.response_mode}/"

    @property
    def identity(self) -> str:
        return f"{self.mode}-{self.response_mode}"

    @property
    def user(self) -> str:
        return "-".join(
            str(int(value)) if isinstance(value, bool) else str(value) for value in self
        )

    def make_upload(self, pause: Callable[[], object] | None = None) -> Upload:
        body = random.Random(self.user).randbytes(self.size)
        waits: Callable[[], object] = partial(time.sleep, 0.004) if self.slow else bool
        headers = {"x-user-id": self.user}
        return Upload(
            f"{self.path}echo",
            body,
            self.http2,
            self.length,
            self.trailers,
            pause=pause or waits,
            headers=headers,
        )

    @property
    def why_uncounted(self) -> str:
        """The reason in the metric; empty if it is counted."""
        ends_with_headers = not (self.size or self.trailers) and (self.http2 or self.length)
        fits = self.mode == "BUFFERED_PARTIAL" and self.size <= LIMIT
        return "" if ends_with_headers or fits else REASONS[self.mode]

    @property
    def is_too_large(self) -> bool:
        return self.mode == "BUFFERED" and self.size > LIMIT

    def expect(self) -> list[int]:
        if self.is_too_large:
            return [413] * 3
        return [200] * 3 if self.why_uncounted else [200, 200, 429]


# HTTP/2, content-length, trailers. HTTP/1.1 has trailers only in chunks.
FORMS = [form for form in product((False, True), repeat=3) if form[0] or not (form[1] and form[2])]
CASES = [
    *(Case(mode, "NONE", size, *form) for mode, size, form in product(MODES, (0, LARGE), FORMS)),
    *(
        Case(mode, "NONE", LIMIT, http2=http2, length=not http2)
        for mode, http2 in product(MODES, (False, True))
    ),
    *(
        Case(mode, "NONE", size, http2=size == LARGE, slow=True)
        for mode, size in product(MODES, (700, LARGE))
    ),
    *(Case(mode, answer, 700) for mode, answer in product(MODES, RESPONSE_MODES)),
    # Envoy answers 500 in place of a response that its buffer cannot hold.
    *(
        Case(mode, answer, LARGE, True, trailers=True)
        for mode, answer in product(MODES, RESPONSE_MODES)
        if answer != "BUFFERED"
    ),
]
SOME = [
    case
    for case in CASES
    if case.size in (700, LARGE) and not (case.slow or case.length or case.is_too_large)
]


def in_every_mode(config: str) -> str:
    """Sets the modes that each route's path names.

    Trailers pass, and Envoy waits for a busy machine.
    """
    document = read_yaml(config.replace("timeout: 0.15s", "timeout: 30s"))
    manager = http_manager(document)
    manager["http_protocol_options"] = {"enable_trailers": True}
    guard = next(
        item for item in manager["http_filters"] if item["name"] == "envoy.filters.http.ext_proc"
    )
    guard["typed_config"]["message_timeout"] = "30s"
    for route in manager["route_config"]["virtual_hosts"][0]["routes"]:
        named = route["match"].get("prefix", "").split("/")[1:-1]
        if len(named) == 2:
            mode, response_mode = named
            overrides = route["typed_per_filter_config"]["envoy.filters.http.ext_proc"]["overrides"]
            overrides["processing_mode"] = {
                "request_header_mode": "SEND",
                "request_body_mode": mode,
                "request_trailer_mode": "SEND",
                "response_header_mode": "SEND",
                "response_body_mode": response_mode,
                "response_trailer_mode": "SKIP" if response_mode == "NONE" else "SEND",
            }
    return json.dumps(document)


def guard(cases: Sequence[Case], *more: dict[str, Any], **selector: object) -> dict[str, Any]:
    """A policy, and so a route, for each pair of modes."""
    paths = {case.identity: case.path for case in cases}
    keys = ["header:x-user-id"]
    made = [
        policy(name, {"pathPrefix": path, **selector}, limit_keys=keys)
        for name, path in paths.items()
    ]
    return bundle(*made, *more)


OPTIONS: dict[str, Any] = {
    "body_mode": "tolerant",
    "buffer_limit": LIMIT,
    "edit": in_every_mode,
    "failure_mode": "deny",
}


def send_all(made: Stack, cases: Sequence[Case], times: int = 1) -> dict[Case, list[Answer]]:
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(
            lambda case: [send(made.envoy.port, case.make_upload()) for _ in range(times)], cases
        )
        return dict(zip(cases, answers, strict=True))


def check(
    made: Stack,
    answers: dict[Case, list[Answer]],
    expect: Callable[[Case], list[int]] = lambda _: [200],
) -> None:
    """Each status is the expected one.

    Exactly the bodies of those with 200 reached the upstream, and came back, whole.
    """
    found = {case: [answer.status for answer in several] for case, several in answers.items()}
    assert [
        (case.user, several) for case, several in found.items() if several != expect(case)
    ] == []
    arrived: defaultdict[str, list[bytes]] = defaultdict(list)
    for seen in made.upstream.seen:
        arrived[seen.header("x-user-id") or ""].append(seen.body)
    torn = []
    for case, several in answers.items():
        body = case.make_upload().body
        good = [answer for answer in several if answer.status == 200]
        if arrived[case.user] != [body] * len(good) or any(answer.body != body for answer in good):
            torn.append(
                (
                    case.user,
                    [len(each) for each in arrived[case.user]],
                    [len(answer.body) for answer in good],
                )
            )
    assert torn == []


@needs_tolerant
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bodies_pass_whole_and_are_counted(transport: str) -> None:
    with stack(guard(CASES), "--transport", transport, **OPTIONS) as made:
        check(made, send_all(made, CASES, times=3), Case.expect)

        told = {
            (seen.header("x-user-id"), seen.header("content-length")) for seen in made.upstream.seen
        }
        sized = [
            case
            for case in CASES
            if case.length and case.mode in ("NONE", "BUFFERED", "BUFFERED_PARTIAL")
        ]
        assert {(case.user, str(case.size)) for case in sized if not case.is_too_large} <= told
        metric = made.loopguard.metric
        expected = Counter(
            (case.identity, case.why_uncounted) for case in CASES if case.expect() == [200] * 3
        )
        eventually(lambda: metric("streams_in_flight") == 0, "the end of all streams")
        for (identity, reason), number in expected.items():
            assert metric("uncounted_total", policy=identity, reason=reason) == 3 * number
        refused = [case for case in CASES if case.is_too_large]
        assert metric("uncounted_total", reason="too_large") == 3 * len(refused)
        assert metric("uncounted_total") == 3 * (expected.total() + len(refused))
        assert metric("fail_open_total") == 0


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
    [
        ({"methods": ["PUT"]}, ""),
        pytest.param({"methods": ["PUT"]}, _BUG, marks=pytest.mark.deep),
        ({}, _BUG),
    ],
    ids=["unmatched", "unmatched, and an error", "an error"],
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_unmatched_and_failing_requests_pass_whole(
    transport: str, selector: dict[str, Any], preamble: str
) -> None:
    with stack(
        guard(SOME, **selector), "--transport", transport, preamble=preamble, **OPTIONS
    ) as made:
        check(made, send_all(made, SOME))

        assert (made.loopguard.metric("fail_open_total", reason="internal_error") > 0) == bool(
            preamble
        )


@needs_tolerant
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bodies_pass_whole_during_an_overload(transport: str) -> None:
    """A held request uses up --max-streams."""
    # It is held for 25 seconds: on a busy machine the others take a while.
    hold = policy(
        "hold", {"pathExact": "/hold"}, action="throttle", threshold_identical_requests=250
    )
    flags = ["--transport", transport, "--max-streams", "1", "--drain-timeout", "0"]
    with stack(guard(SOME, hold), *flags, **OPTIONS) as made:
        assert set(made.repeat("/hold", 249)) == {200}
        with made.connect() as held:
            held.sendall(b"GET /hold HTTP/1.1\r\nhost: h\r\n\r\n")
            eventually(lambda: made.loopguard.metric("throttled_in_flight") == 1, "a hold")

            answers = send_all(made, SOME)

        check(made, answers)
        assert made.loopguard.metric("overload_total") == len(SOME)


@needs_tolerant
@pytest.mark.parametrize("drain_timeout", ["30", "0"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_uploads_pass_whole_during_a_stop(transport: str, drain_timeout: str) -> None:
    """A full-duplex upload that cannot be completed is refused, never sent on in part."""
    cases = [case for case in SOME if case.size == LARGE and case.response_mode == "NONE"]
    halfway, goes_on = threading.Barrier(len(cases) + 1, timeout=PATIENCE), threading.Event()

    def stop_halfway() -> bool:
        halfway.wait()
        return goes_on.wait(PATIENCE)

    def send_one(case: Case) -> Answer:
        pieces = count()
        return send(made.envoy.port, case.make_upload(lambda: next(pieces) == 1 and stop_halfway()))

    flags = ["--transport", transport, "--drain-timeout", drain_timeout]
    options = {**OPTIONS, "failure_mode": "allow"}
    with stack(guard(cases), *flags, **options) as made, ThreadPoolExecutor(len(cases)) as pool:
        found = [pool.submit(send_one, case) for case in cases]
        halfway.wait()
        waiting = [case for case in cases if case.mode in ("STREAMED", "BUFFERED_PARTIAL", DUPLEX)]
        metric = made.loopguard.metric
        eventually(
            lambda: metric("uncounted_total") == len(cases) - len(waiting), "the others' decisions"
        )
        eventually(
            lambda: metric("streams_in_flight") == len(waiting), "the streams of the uploads"
        )
        made.loopguard.signal(signal.SIGTERM)
        made.loopguard.wait_for("draining|stopping|shutting down")
        if drain_timeout == "0":
            made.loopguard.wait()
        goes_on.set()
        answers = {case: [each.result()] for case, each in zip(cases, found, strict=True)}

        refused = [500] if drain_timeout == "0" else [200]
        check(made, answers, lambda case: refused if case.mode == DUPLEX else [200])


# ---- The duplex mode of `envoy-config`

KEEPS_LENGTH = envoy_version() >= (1, 38)


def with_trailers(config: str) -> str:
    document = read_yaml(config)
    manager = http_manager(document)
    manager["http_protocol_options"] = {"enable_trailers": True}
    if not KEEPS_LENGTH:
        del manager["http_filters"][0]["typed_config"]["allow_content_length_header"]
    return json.dumps(document)


UPLOADS = [
    Upload(
        "",
        b"x" * size,
        http2,
        length,
        trailers,
        headers={"x-user-id": f"{size} {http2} {length} {trailers}"},
    )
    for size, (http2, length, trailers) in zip(
        cycle([1, 70_000, 1_100_000]), [*FORMS, FORMS[0]], strict=False
    )
]
_USER: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}
_TURNS: dict[str, Any] = {
    **_USER,
    "similarity": "turns",
    "threshold_identical_requests": 3,
    "max_inspect_bytes": 4_000_000,
}
DOCUMENT = bundle(
    policy("pass", {"pathPrefix": "/pass"}, threshold_identical_requests=100, **_USER),
    policy("warn", {"pathPrefix": "/warn"}, action="warn", threshold_identical_requests=2, **_USER),
    policy("reject", {"pathPrefix": "/reject"}, threshold_identical_requests=2, **_USER),
    policy(
        "throttle",
        {"pathPrefix": "/throttle"},
        action="throttle",
        threshold_identical_requests=2,
        **_USER,
    ),
    policy(
        "headers",
        {"pathPrefix": "/headers"},
        threshold_identical_requests=2,
        body="ignore",
        **_USER,
    ),
    policy("steer", {"pathPrefix": "/v1/chat"}, action="steer", **_TURNS),
)


@pytest.fixture(scope="module", params=TRANSPORTS)
def duplex(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """The buffer limit is below most bodies, which does not matter in this mode."""
    with stack(
        DOCUMENT,
        "--transport",
        request.param,
        body_mode="duplex",
        buffer_limit=65_536,
        edit=with_trailers,
    ) as running:
        yield running


def find_arrived(duplex: Stack, path: str, upload: Upload) -> list[bytes]:
    """The bodies that reached the upstream, with a content-length only if the client sent one."""
    user = upload.headers["x-user-id"]
    found = [
        seen
        for seen in duplex.upstream.seen
        if seen.target == path and seen.header("x-user-id") == user
    ]
    kept = upload.length and KEEPS_LENGTH
    assert [seen.header("content-length") for seen in found] == [
        str(len(seen.body)) if kept else None for seen in found
    ]
    return [seen.body for seen in found]


@pytest.mark.parametrize(
    ("action", "statuses"),
    [
        ("pass", [200, 200]),
        ("warn", [200, 200]),
        ("reject", [200, 429]),
        ("throttle", [200, 200]),
        ("headers", [200, 429]),
    ],
)
def test_each_action_keeps_duplex_bodies_whole(
    duplex: Stack, action: str, statuses: list[int]
) -> None:
    path = f"/{action}/all"

    for upload in UPLOADS:
        answers = [send(duplex.envoy.port, upload._replace(path=path)) for _ in range(2)]
        assert [answer.status for answer in answers] == statuses
        assert find_arrived(duplex, path, upload) == [upload.body] * statuses.count(200)

    warned = [
        seen.header("x-fairvisor-warning") for seen in duplex.upstream.seen if seen.target == path
    ]
    assert warned.count("loop_warn") == (len(UPLOADS) if action == "warn" else 0)
    assert duplex.loopguard.metric("uncounted_total", policy=action) == 0
    eventually(lambda: duplex.loopguard.metric("streams_in_flight") == 0, "the end of all streams")


def test_steered_duplex_body_arrives_edited(duplex: Stack) -> None:
    path = "/v1/chat/completions"
    for upload in UPLOADS:
        body = chat(3, padding=len(upload.body))
        assert send(duplex.envoy.port, upload._replace(path=path, body=body)).status == 200
        [edited] = find_arrived(duplex, path, upload)
        assert json.loads(edited)["messages"][:6] == json.loads(body)["messages"][:6]
        assert "Loop detected" in json.loads(edited)["messages"][6]["content"]

    assert {
        seen.header("x-loopguard-steered") for seen in duplex.upstream.seen if seen.target == path
    } == {"1"}
    assert duplex.loopguard.metric("unsteered_total") == 0


def test_duplex_body_may_exceed_every_buffer(duplex: Stack) -> None:
    upload = Upload(
        "/pass/large", b"x" * 11_000_000, http2=True, trailers=True, headers={"x-user-id": "large"}
    )

    assert send(duplex.envoy.port, upload).status == 200
    assert find_arrived(duplex, upload.path, upload) == [upload.body]
    assert duplex.loopguard.metric("uncounted_total") == 0
