"""What comes out of every body mode is what came in, or the edited body, or a refusal."""

import gzip
import json
import sys
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import brotli
import pytest
from hypothesis import given, strategies as st

from extproc.ext_proc.duplex import HELD_BYTES
from extproc.ext_proc.judging import Reply
from extproc.ext_proc.service import Service
from extproc.ext_proc.stream import Stream
from extproc.ext_proc.upload import UploadMemory
from extproc.pb.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
)
from tests.support.documents import policy
from tests.support.looping import chat
from tests.support.messages import MODES as BODY_MODES, body, headers
from tests.support.service import (
    FailingStore,
    decoded,
    make_service,
    metadata_of,
    receive,
    repeat,
    sample,
)

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

DUPLEX = "FULL_DUPLEX_STREAMED"
MODES = ["BUFFERED", "STREAMED", DUPLEX]
ANY = {"pathPrefix": "/"}
TRAILERS = ProcessingRequest(request_trailers=HttpTrailers())
CHAT = "/v1/chat/completions"
STEERING: dict[str, Any] = {"action": "steer", "similarity": "turns"}
_RARE: dict[str, Any] = {"body": "ignore", "threshold_identical_requests": 1_000}


class Passed(NamedTuple):
    """What a gateway makes of one request's answers; `answer` is the refusal, or the first one."""

    status: int
    body: bytes
    ended: bool
    set_headers: dict[str, str]
    answer: ProcessingResponse
    hold_ms: int


class Gateway:
    """Emulates a data plane of one body mode, as strict as Envoy and agentgateway."""

    def __init__(self, service: Service, mode: str) -> None:
        self.stream = Stream(service)
        self.mode = mode
        self.answers: list[ProcessingResponse] = []
        self._over = False
        self.got = b""
        self.ended = False
        self.sent: list[bytes] = []
        self._trailers = 0
        self._hold_ms = 0

    def send(self, message: ProcessingRequest) -> None:
        if self._over:
            return
        kind = message.WhichOneof("request")
        if kind == "request_body":
            self.sent.append(message.request_body.body)
        before = len(self.answers)
        self.take(
            receive(self.stream, message),
            ended=kind == "request_trailers" or message.request_body.end_of_stream,
        )
        if self.mode != DUPLEX:
            assert len(self.answers) == before + 1  # one answer for each message, at once
            assert self.answers[-1].WhichOneof("response") in (kind, "immediate_response")

    def take(self, reply: Reply, *, ended: bool = False) -> None:
        assert reply.answer is not None or not reply.rest
        for data in [] if reply.answer is None else [reply.join_answer(), *reply.rest]:
            self._read(ProcessingResponse.FromString(data))
        self._over = reply.done
        self._hold_ms += reply.hold_ms
        if self.mode == DUPLEX:
            assert not reply.first, (
                "no more time is asked for: Envoy has no timeout then, and other gateways do not "
                "know that"
            )
            assert reply.done or not ended, (
                "nothing is left to hand back, and the response is not sent to us"
            )

    def take_handed_on(self) -> None:
        """Read what a transport sends without a message of ours."""
        for data in self.stream.take_handed_on():
            self._read(ProcessingResponse.FromString(data))

    def _read(self, answer: ProcessingResponse) -> None:
        kind = answer.WhichOneof("response") or ""
        assert not self.answers or self.answers[-1].WhichOneof("response") != "immediate_response"
        if self.mode == DUPLEX and kind != "immediate_response":
            assert (kind == "request_headers") == (not self.answers), (
                "the headers are answered first, and once"
            )
            assert not self._trailers, "nothing follows the trailers"
            assert not self.ended, "nothing follows the end"
        self._trailers += kind == "request_trailers"
        self.answers.append(answer)
        if kind == "request_body" and self.mode == DUPLEX:
            mutation = answer.request_body.response.body_mutation
            assert mutation.WhichOneof("mutation") == "streamed_response"
            assert answer.ByteSize() <= max(
                2**16, *[len(chunk) + 1_000 for chunk in (b"", *self.sent)]
            )
            self.got += mutation.streamed_response.body
            self.ended = mutation.streamed_response.end_of_stream
        elif kind == "request_body":
            mutation = answer.request_body.response.body_mutation
            self.got += mutation.body if mutation.WhichOneof("mutation") else self.sent[-1]

    def finish(self) -> Passed:
        self.stream.close()
        last = self.answers[-1]
        refused = last.WhichOneof("response") == "immediate_response"
        if refused and self.mode == DUPLEX:
            assert len(self.answers) == 1, "nothing was handed back of what is refused"
        options = [
            option
            for answer in self.answers
            for part in (answer.request_headers, answer.request_body)
            for option in part.response.header_mutation.set_headers
        ]
        return Passed(
            last.immediate_response.status.code if refused else 200,
            b"" if refused else self.got,
            self.ended or bool(self._trailers),
            {option.header.key: option.header.raw_value.decode() for option in options},
            last if refused else self.answers[0],
            self._hold_ms,
        )


def cut(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = [0, *sorted(min(place, len(data)) for place in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(places)]


def end(last: str, data: bytes) -> ProcessingRequest:
    """A request's last message: with its last chunk (`end`), an empty one or trailers."""
    return TRAILERS if last == "trailers" else body(data if last == "end" else b"")


def pass_through(
    service: Service,
    mode: str,
    chunks: Sequence[bytes],
    *,
    last: str = "end",
    path: str = "/",
    length: bool = False,
    encoding: str = "",
) -> Passed:
    gateway = Gateway(service, mode)
    told = {"content_length": str(sum(map(len, chunks)))} if length else {}
    if encoding:
        told["content_encoding"] = encoding
    gateway.send(headers(path, mode=mode, **told))  # type: ignore[arg-type]  # only headers
    whole = [b"".join(chunks)] if mode == "BUFFERED" else list(chunks)
    last = "end" if mode == "BUFFERED" else last
    for chunk in whole[:-1] if last == "end" else whole:
        gateway.send(body(chunk, end=False))
    gateway.send(end(last, whole[-1]))
    passed = gateway.finish()
    assert service.kept.bytes == service.streams == service.given_up == len(service.waiting) == 0
    return passed


CHUNKS = st.tuples(st.integers(0, 300_000), st.lists(st.integers(0, 300_000), max_size=8))
LAST = ["end", "empty", "trailers"]


@given(shape=CHUNKS, last=st.sampled_from(LAST), mode=st.sampled_from(MODES), later=st.booleans())
def test_bodies_pass_whole_however_they_are_cut(
    shape: tuple[int, list[int]], last: str, mode: str, later: bool
) -> None:
    size, cuts = shape
    data = bytes(range(251)) * (size // 251 + 1)
    chunks = cut(data[:size], cuts)
    service = make_service(
        policy("p", ANY), store=FailingStore("nothing fails", later=True) if later else None
    )

    passed = [pass_through(service, mode, chunks, last=last) for _ in range(3)]

    assert [each.status for each in passed] == [200, 200, 429]
    assert {each.body for each in passed[:2]} == {data[:size]}
    assert all(each.ended for each in passed[:2]) or mode != DUPLEX


@given(
    cuts=st.lists(st.integers(0, 200_000), max_size=8),
    last=st.sampled_from(LAST),
    told=st.booleans(),
)
def test_edited_duplex_body_equals_the_buffered_one(cuts: list[int], last: str, told: bool) -> None:
    """Its length is told where the client told one."""
    data = chat(3, padding=150_000)
    answers = []
    for mode in ("BUFFERED", DUPLEX):
        service = make_service(policy("p", ANY, **STEERING))
        answers.append(
            pass_through(service, mode, cut(data, cuts), last=last, path=CHAT, length=told)
        )
    buffered, held = answers

    assert held.status == buffered.status == 200
    assert len(held.body) > len(data)
    assert json.loads(held.body)["messages"][:6] == json.loads(data)["messages"][:6]
    assert len(held.body) == len(buffered.body)
    assert held.set_headers.get("content-length") == (str(len(held.body)) if told else None)
    assert held.set_headers["x-loopguard-steered"] == "1"
    assert "content-md5" in held.answer.request_headers.response.header_mutation.remove_headers
    assert metadata_of(held.answer)["action"] == "steer"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("last", ["end", "trailers"])
def test_warned_and_delayed_bodies_pass_whole(mode: str, last: str) -> None:
    warning, delaying = [
        make_service(policy("p", ANY, action=action, threshold_identical_requests=2))
        for action in ("warn", "throttle")
    ]
    chunks = [b"a" * 70_000, b"", b"b"]

    warned = [pass_through(warning, mode, chunks, last=last) for _ in range(2)][-1]
    delayed = [pass_through(delaying, mode, chunks, last=last) for _ in range(2)][-1]

    assert warned.body == delayed.body == b"".join(chunks)
    assert (warned.hold_ms, delayed.hold_ms) == (0, 200)
    if mode != "STREAMED":
        assert warned.set_headers == {"X-Fairvisor-Warning": "loop_warn"}
    if mode == DUPLEX:
        assert metadata_of(delayed.answer)["action"] == "throttle"


@pytest.mark.parametrize("last", ["end", "trailers"])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            lambda: make_service(policy("s", ANY, mode="shadow"), policy("p", ANY, **_RARE)),
            id="watched",
        ),
        pytest.param(lambda: make_service(policy("p", {"pathExact": "/other"})), id="unmatched"),
        pytest.param(
            lambda: make_service(policy("p", ANY, action="warn", body="ignore")), id="warned"
        ),
        pytest.param(
            lambda: make_service(policy("p", ANY, **_RARE), store=FailingStore()), id="no store"
        ),
        pytest.param(
            lambda: make_service(policy("p", ANY, **_RARE), store=FailingStore(later=True)),
            id="no store, later",
        ),
    ],
)
def test_bodies_no_policy_waits_for_pass_as_they_come(
    make: Callable[[], Service], last: str
) -> None:
    service = make()
    for _ in range(3):
        gateway = Gateway(service, DUPLEX)
        gateway.send(headers(mode=DUPLEX))
        for chunk in (b"a", b"b" * 70_000):
            gateway.send(body(chunk, end=False))
            assert gateway.got.endswith(chunk)
        gateway.send(end(last, b"c"))
        passed = gateway.finish()

    assert (passed.status, passed.body, passed.ended) == (
        200,
        b"a" + b"b" * 70_000 + b"c" * (last == "end"),
        True,
    )
    assert service.kept.bytes == service.streams == service.given_up == 0


def test_shadow_policies_count_duplex_bodies_once_passed() -> None:
    service = make_service(policy("s", ANY, mode="shadow"), policy("p", ANY, **_RARE))

    for _ in range(3):
        pass_through(service, DUPLEX, [b"a", b"b"], last="trailers")
    repeat(service, headers(mode=DUPLEX, end=True), times=3)

    assert sample(service, "loops_detected_total", policy="s", mode="shadow", action="reject") == 2
    assert sample(service, "requests_total", policy="p", mode="enforce", action="allow") == 6


def test_duplex_uploads_take_no_place_and_survive_overload() -> None:
    service = make_service(policy("p", {"pathExact": "/p"}), max_streams=1)
    open_ones: list[Stream] = []
    for _ in range(3):
        open_ones.append(Stream(service))
        receive(open_ones[-1], headers(mode=DUPLEX))
    refused = repeat(service, headers("/p"), body(b"x"), times=3)
    before = sample(service, "overload_total")
    open_ones.append(Stream(service))  # still decides

    overloaded = Gateway(service, DUPLEX)
    for message in (headers(mode=DUPLEX), body(b"x", end=False), TRAILERS):
        overloaded.send(message)

    assert (before, sample(service, "overload_total")) == (0, 1)
    assert refused.immediate_response.status.code == 429
    assert overloaded.finish().body == b"x"
    for stream in open_ones:
        stream.close()
    assert service.streams == service.given_up == 0


@pytest.mark.parametrize("mode", ["NONE", "BUFFERED", DUPLEX])
def test_duplex_response_is_handed_back(mode: str) -> None:
    """While the stream carries a body, its transport must not end it with OK."""
    service = make_service(policy("p", ANY))
    first = headers(mode=mode)
    # Proto3 enums are open
    first.protocol_config.response_body_mode = BODY_MODES[DUPLEX]  # type: ignore[assignment]
    messages = [
        first,
        *([] if mode == "NONE" else [body(b"q")]),
        ProcessingRequest(response_headers=HttpHeaders()),
        ProcessingRequest(response_body=HttpBody(body=b"a")),
        ProcessingRequest(response_body=HttpBody(body=b"b", end_of_stream=True)),
    ]
    stream = Stream(service)

    replies, carries = [], [stream.carries]
    for message in messages:
        replies.append(receive(stream, message))
        carries.append(stream.carries)
    stream.close()

    parts = [
        decoded(reply).response_body.response.body_mutation.streamed_response
        for reply in replies[-2:]
    ]
    assert [reply.done for reply in replies] == [False] * (len(replies) - 1) + [True]
    assert [(part.body, part.end_of_stream) for part in parts] == [(b"a", False), (b"b", True)]
    assert carries == [False, mode == DUPLEX, *[False] * (mode != "NONE"), True, True, False]


def feed(gateway: Gateway, count: int, size: int) -> None:
    for _ in range(count):
        gateway.send(body(b"x" * size, end=False))


@pytest.mark.slow
@pytest.mark.parametrize("last", ["end", "trailers"])
def test_body_above_the_bound_passes_whole_and_counted(last: str) -> None:
    service = make_service(policy("p", ANY))
    data = [b"%d" % number * (HELD_BYTES // 7) for number in range(9)]

    passed = [pass_through(service, DUPLEX, data, last=last) for _ in range(4)]
    small = [pass_through(service, DUPLEX, [b"x"]).status for _ in range(3)]

    assert [(each.status, each.body, each.ended) for each in passed] == [
        (200, b"".join(data), True)
    ] * 4
    assert small == [200, 200, 429]
    assert sample(service, "requests_total", policy="p", mode="enforce", action="warn") == 2
    assert sample(service, "requests_total", policy="p", mode="enforce", action="allow") == 4
    assert sample(service, "fail_open_total", reason="sent_on") == 2
    assert sample(service, "uncounted_total", policy="p", reason="inspect_limit") == 0


@pytest.mark.slow
def test_ends_of_a_body_above_the_bound_are_inspected() -> None:
    service = make_service(policy("p", ANY, similarity="turns", max_inspect_bytes=50_000))
    data = chat(8, padding=0).replace(
        b'"role": "user"', b'"role": "user", "more": "%b"' % (b"x" * 20_000)
    )
    filler = json.dumps({"role": "user", "content": "y" * HELD_BYTES}).encode()
    data = data.replace(b'"messages": [', b'"messages": [' + filler + b", ")

    gateway = Gateway(service, DUPLEX)
    gateway.send(headers(CHAT, mode=DUPLEX))
    held = []
    for chunk in cut(data, range(0, len(data), 1_000_000)):
        gateway.send(body(chunk, end=False))
        held.append(service.kept.bytes)
    gateway.send(body(b""))

    assert gateway.finish().body == data
    assert max(held) <= HELD_BYTES
    assert sample(service, "loops_detected_total", policy="p", mode="enforce", action="warn") == 1
    assert service.kept.bytes == 0


def test_largest_body_gives_way_when_memory_is_full() -> None:
    service = make_service(policy("p", ANY, threshold_identical_requests=2))
    service.kept = UploadMemory(1_000_000)
    large, *small = gateways = [Gateway(service, DUPLEX) for _ in range(9)]
    large.stream.on_given_up = large.take_handed_on
    for gateway in gateways:
        gateway.send(headers(mode=DUPLEX))
    feed(large, 6, 100_000)
    held = large.got
    for gateway in small:
        feed(gateway, 1, 70_000)
    handed_on = large.got
    feed(large, 6, 100_000)
    for gateway in (*small, large):
        gateway.send(body(b"end"))
    passed = [gateway.finish() for gateway in gateways]

    assert (held, len(handed_on)) == (b"", 600_000)
    assert [each.status for each in passed] == [200, 200, *[429] * 7]
    assert (passed[0].body, service.kept.bytes) == (b"x" * 1_200_000 + b"end", 0)


def test_upload_that_alone_fills_memory_passes() -> None:
    service = make_service(policy("p", ANY))
    service.kept = UploadMemory(50_000)
    data = [b"x" * 20_000] * 5

    passed = [pass_through(service, DUPLEX, data) for _ in range(3)]

    assert [(each.status, each.body) for each in passed] == [(200, b"".join(data))] * 3
    assert sample(service, "requests_total", policy="p", mode="enforce", action="warn") == 1


@pytest.mark.sources
@pytest.mark.parametrize(
    ("broken", "policies"),
    [
        ("make_memory", [policy("p", ANY)]),
        ("counting", [policy("p", ANY)]),
        (
            "metrics.decision_seconds",
            [policy("p", ANY, body="ignore", threshold_identical_requests=2)],
        ),
    ],
    ids=["while it is held", "when it is decided", "once it is refused"],
)
def test_error_loses_no_byte_of_a_body(
    broken: str, policies: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make_service(*policies)
    pass_through(service, DUPLEX, [b"a"])
    *inner, name = broken.split(".")
    monkeypatch.setattr(service.metrics if inner else service, name, None)

    passed = pass_through(service, DUPLEX, [b"a" * 70_000, b"b"], last="trailers")

    assert (passed.status, passed.body, passed.ended) == (200, b"a" * 70_000 + b"b", True)
    assert sample(service, "fail_open_total", reason="internal_error") == 1


@pytest.mark.parametrize(
    ("mode", "encoding"),
    [(mode, "gzip") for mode in MODES]
    + [(DUPLEX, encoding) for encoding in ("deflate", "br", "zstd", "identity", "gzip, gzip")],
)
def test_equal_bodies_count_as_equal_however_compressed(mode: str, encoding: str) -> None:
    pack: dict[str, Callable[[bytes, int], bytes]] = {
        "gzip": lambda data, number: gzip.compress(data, 1 + number, mtime=number),
        "deflate": lambda data, number: zlib.compress(data, 1 + number),
        "br": lambda data, number: brotli.compress(data, quality=number),
        "zstd": lambda data, number: zstd.compress(data, 1 + number),
        "identity": lambda data, _: data,
        "gzip, gzip": lambda data, number: gzip.compress(
            gzip.compress(data, 1 + number), mtime=number
        ),
    }
    data = json.dumps([{"line": number % 7} for number in range(20_000)]).encode()
    service = make_service(policy("p", ANY, threshold_identical_requests=4))

    packed = [pack[encoding](data, number) for number in range(3)]
    passed = [
        pass_through(service, mode, cut(each, [100, 5_000]), encoding=encoding) for each in packed
    ]
    plain = pass_through(service, mode, cut(data, [100_000]))
    other = pass_through(service, mode, [pack[encoding](b"other", 0)], encoding=encoding)

    assert ([each.status for each in passed], [each.body for each in passed]) == ([200] * 3, packed)
    assert (plain.status, other.status) == (429, 200)


@pytest.mark.parametrize("mode", MODES)
def test_bodies_that_cannot_be_unpacked_count_as_sent(mode: str) -> None:
    bomb = [gzip.compress(bytes(20_000_000), level, mtime=0) for level in (1, 9)]
    service = make_service(policy("p", ANY, threshold_identical_requests=2))

    found = [
        pass_through(service, mode, [each], encoding="gzip").status
        for each in (*bomb, b"no gzip", b"other", b"no gzip")
    ]

    assert found == [200, 200, 200, 200, 429]
