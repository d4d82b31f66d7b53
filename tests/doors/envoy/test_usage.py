"""What the real Envoy reads in answers, and tells when they are over: tokens of every API, errors, what was cut off."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.envoy_config.options import EnvoyOptions
from extproc.engine.settlements import Entry
from extproc.ext_proc.access_log import AccessLog
from extproc.options import read_options
from extproc.sessions.rates import Usage
from extproc.settings import parse_address
from extproc.transport.health import Health
from tests.support.documents import bundle
from tests.support.envoy_config import choose_late
from tests.support.harness import PATIENCE, Envoy, envoy_version, eventually, write_policies
from tests.support.service import make_service
from tests.support.transport import TRANSPORTS
from tests.support.usage import (
    CHAT_USAGE,
    DELTA,
    EVENTS,
    JSON,
    RESPONSE_USAGE,
    STARTED,
    TOLD,
    WORD,
    Model,
    Reply,
    stream,
    whole,
    write_event,
)

pytestmark = pytest.mark.skipif(envoy_version() < (1, 38), reason="this Envoy reads no events: tokens are NOT tested")

LIMIT = 2**20

AGENTS: dict[str, Any] = {
    "id": "agents",
    "spec": {
        "selector": {"pathPrefix": "/v1/"},
        "limit_keys": ["header:x-user-id"],
        "session": {"keys": ["header:x-session-id"]},
        "session_limits": {"max_cost_per_session": 10.0, "unknown_model": {"input": 1, "output": 2}},
    },
}


class Gateway:
    """Envoy between a client and the model, and what it tells Loopguard."""

    def __init__(self, envoy: Envoy, model: Model, entries: list[Entry]) -> None:
        self.envoy = envoy
        self.model = model
        self._entries = entries
        self._seen = 0

    @contextmanager
    def send(
        self, reply: Reply, path: str = "/v1/x", body: bytes = b"x" * 400, **headers: str
    ) -> Iterator[http.client.HTTPResponse]:
        """A request of a session, and its answer as far as the headers."""
        self.model.reply = reply
        connection = http.client.HTTPConnection("127.0.0.1", self.envoy.port, timeout=PATIENCE)
        try:
            connection.request("POST", path, body, {"x-user-id": "ann", "x-session-id": "s", **headers})
            yield connection.getresponse()
        finally:
            connection.close()

    def tell(self) -> Entry:
        """The one entry about the newest request."""
        eventually(lambda: len(self._entries) > self._seen, "an entry")
        self._seen += 1
        assert len(self._entries) == self._seen
        return self._entries[-1]

    def ask(self, reply: Reply, path: str = "/v1/x", **headers: str) -> Entry:
        """What is told about a request whose answer was read to its end."""
        with self.send(reply, path, b"x" * 400, **headers) as answer:
            answer.read()
        return self.tell()


@contextmanager
def _serving(transport: str, folder: Path) -> Iterator[tuple[str, list[Entry]]]:
    """Loopguard in a thread of this process; yields its address and the entries that it gets."""
    entries: list[Entry] = []
    service = make_service(AGENTS)
    service.access_log = AccessLog(entries.append, service.metrics)
    listening: list[str] = []
    ready, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        health = Health()
        server = TRANSPORTS[transport](service, health)
        listening.append(await server.start(parse_address(f"unix:{folder}/loopguard.sock")))
        health.set(serving=True)
        listening.append("")
        ready.set()
        await stop.wait()
        await server.stop(0)

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert ready.wait(PATIENCE)
    try:
        yield listening[0], entries
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE)
        loop.close()


@pytest.fixture(scope="module", params=TRANSPORTS)
def gateway(request: pytest.FixtureRequest) -> Iterator[Gateway]:
    """One for all tests."""
    with tempfile.TemporaryDirectory(prefix="lg") as name:
        folder = Path(name)
        write_policies(folder, bundle(AGENTS))
        model = Model()
        with _serving(request.param, folder) as (address, entries):
            flags = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "buffer_limit": str(LIMIT)}
            options = read_options(EnvoyOptions, {"upstream": model.address, "endpoints": [address], **flags})
            envoy = Envoy(folder, options, choose_late)
            try:
                eventually(lambda: envoy.stat("cluster.loopguard.membership_healthy"), "a healthy Loopguard")
                yield Gateway(envoy, model, entries)
            finally:
                envoy.stop()
                model.stop()


COMPRESSED = gzip.compress(json.dumps({"model": "gpt-4o", "usage": CHAT_USAGE}).encode())


@pytest.mark.parametrize("api", TOLD)
def test_tokens_are_those_that_the_answer_tells(gateway: Gateway, api: str) -> None:
    """Of each API, whole and in a stream, each token once and none estimated."""
    reply, model, usage = TOLD[api]

    entry = gateway.ask(reply)

    assert (entry.model, entry.usage, entry.estimated) == (model, usage, False)
    assert (entry.status, entry.failed, entry.refused, entry.request_bytes) == (200, False, False, 400)
    assert entry.response_bytes == sum(len(part) for part in reply.parts if isinstance(part, bytes))
    assert [session["policy"] for session in entry.sessions] == ["agents"]


@pytest.mark.parametrize("kind", ["Application/JSON", "APPLICATION/JSON; charset=UTF-8", "application/json;charset=utf-8"])
def test_json_is_json_however_its_type_is_written(gateway: Gateway, kind: str) -> None:
    """Media types are compared without regard to case (RFC 9110 section 8.3.1)."""
    reply, model, usage = TOLD["chat"]

    entry = gateway.ask(reply._replace(kind=kind))

    assert (entry.model, entry.usage, entry.estimated) == (model, usage, False)


def test_events_are_events_however_their_type_is_written(gateway: Gateway) -> None:
    """As with documents: what a stream tells is read, and what it does not tell is estimated as of a stream."""
    reply, model, usage = TOLD["chat stream"]

    told = gateway.ask(reply._replace(kind="Text/Event-Stream; Charset=UTF-8"))
    untold = gateway.ask(stream(*[DELTA] * 20, "[DONE]")._replace(kind="TEXT/EVENT-STREAM"))

    assert (told.model, told.usage, told.estimated) == (model, usage, False)
    assert (untold.usage.output, untold.estimated) == (17, True)


@pytest.mark.parametrize("count", [7, 0, 12.9, "900", " 9 ", True, None, -1, 10**10, 1e300, "many", "nan", "", [7], {"n": 7}])
def test_a_stream_is_read_like_a_document(gateway: Gateway, count: object) -> None:
    """Whatever stands where a number should: the count is the same, or is estimated in both."""
    answer = {"model": "m", "usage": {"prompt_tokens": count, "completion_tokens": 5, "prompt_tokens_details": None}}

    document, event = gateway.ask(whole(**answer)), gateway.ask(stream(answer))

    assert (event.usage, event.estimated, event.model) == (document.usage, document.estimated, document.model)


@pytest.mark.parametrize(
    ("reply", "output"),
    [
        (stream(*[DELTA] * 20, "[DONE]"), 18),
        (Reply([b"a" * 1_000], "application/vnd.amazon.eventstream"), 7),
        (Reply([COMPRESSED], headers={"content-encoding": "gzip"}), len(COMPRESSED)),
        (Reply([b"a" * 1_000], "text/plain"), 250),
        (stream(*[{"usage": each, "text": "a" * 400} for each in ("none", {}, [CHAT_USAGE], {"a": "a" * 9_000})]), 85),
        (Reply([b'{"usage": "none", "text": "' + b"a" * 971 + b'"}']), 250),
    ],
    ids=["stream without usage", "converse stream", "gzip", "text", "stream of other usage", "JSON without usage"],
)
def test_tokens_that_the_answer_does_not_tell_are_estimated(gateway: Gateway, reply: Reply, output: int) -> None:
    """From the sizes, and marked so."""
    entry = gateway.ask(reply)

    assert (entry.usage.input, entry.estimated) == (100, True)
    assert entry.usage.output == pytest.approx(output, rel=0.2)


def test_upstreams_are_not_asked_to_compress(gateway: Gateway) -> None:
    """SDKs ask for it, and what is compressed tells Envoy nothing."""
    entry = gateway.ask(whole(usage=CHAT_USAGE), **{"accept-encoding": "gzip, br"})

    assert gateway.model.encodings is None
    assert not entry.estimated


def test_a_stream_that_breaks_off_upstream_has_failed(gateway: Gateway) -> None:
    """Its status is still 200; of its cost only the prompt is known."""
    got = threading.Event()

    def wait() -> bytes:
        assert got.wait(PATIENCE)
        return write_event(WORD, named=True)

    started = stream(STARTED, *[WORD] * 40, named=True)
    with gateway.send(started._replace(parts=[*started.parts, wait], cut=True)) as answer:
        assert answer.readline() == b"event: message_start\n"
        got.set()
        with pytest.raises(http.client.IncompleteRead):
            answer.read()
    entry = gateway.tell()

    assert (entry.status, entry.failed, entry.model, entry.estimated) == (200, True, "claude-sonnet-4-5", True)
    assert entry.usage._replace(output=0) == Usage(12, 0, 9_000, 300)
    assert 20 <= entry.usage.output <= 80


def test_a_client_that_hangs_up_pays_for_what_it_got(gateway: Gateway) -> None:
    """It is no failure of the upstream's."""
    gone = threading.Event()

    def wait() -> bytes:
        gone.wait(PATIENCE)
        return write_event(WORD, named=True)

    with gateway.send(stream(STARTED, WORD, named=True)._replace(parts=[write_event(STARTED, named=True), wait])) as answer:
        assert answer.readline() == b"event: message_start\n"
    entry = gateway.tell()
    gone.set()

    assert (entry.status, entry.failed, entry.estimated) == (200, False, True)
    assert entry.usage._replace(output=0) == Usage(12, 0, 9_000, 300)


@pytest.mark.parametrize(("status", "failed"), [(500, True), (503, True), (529, True), (429, False), (400, False)])
def test_errors_of_the_upstream_are_told(gateway: Gateway, status: int, failed: bool) -> None:
    """They cost nothing, and those that are not the client's fault are failures."""
    entry = gateway.ask(whole(error={"message": "no"})._replace(status=status))

    assert (entry.status, entry.failed, entry.usage, entry.estimated) == (status, failed, Usage(0, 0, 0, 0), False)


def test_an_answer_that_never_came_has_failed(gateway: Gateway) -> None:
    """Envoy answers in place of an upstream that closed the connection."""

    def hang_up() -> bytes:
        raise ConnectionAbortedError

    entry = gateway.ask(Reply([hang_up], cut=True)._replace(headers={"content-length": "5"}))

    assert (entry.failed, entry.refused) == (True, False)


@pytest.mark.parametrize("path", ["/v1/x", "/v1beta/models/m:streamGenerateContent"])
def test_a_stream_is_not_held(gateway: Gateway, path: str) -> None:
    """Its first event is with the client before the upstream writes the second one; Gemini streams JSON, too."""
    got = threading.Event()

    def wait() -> bytes:
        assert got.wait(PATIENCE), "the first part was held"
        return b", {}]"

    first = b'[{"usageMetadata": {}}'
    kind = EVENTS if path == "/v1/x" else JSON
    with gateway.send(Reply([first, wait], kind), path.replace("/v1beta", "/v1/beta")) as answer:
        assert answer.read(len(first)) == first
        got.set()
        assert answer.read() == b", {}]"
    gateway.tell()


def test_a_large_answer_passes_unread(gateway: Gateway) -> None:
    """It would not fit into Envoy's buffer; its tokens are estimated, and never more than a model writes."""
    data = json.dumps({"usage": CHAT_USAGE, "b64_json": "a" * 2 * LIMIT}).encode()
    with gateway.send(Reply([data], whole=True)) as answer:
        assert answer.read() == data
    entry = gateway.tell()

    assert (entry.status, entry.usage, entry.estimated) == (200, Usage(100, 131_072, 0, 0), True)


def test_requests_of_no_session_are_not_told(gateway: Gateway) -> None:
    """Envoy sends no entry for a request outside of the guarded routes: the next entry is about the next request."""
    with gateway.send(whole(usage=CHAT_USAGE), "/other") as answer:
        answer.read()

    assert gateway.ask(whole(usage=RESPONSE_USAGE)).usage == Usage(400, 60, 100, 0)


@pytest.mark.parametrize("reply", [whole(usage=CHAT_USAGE), stream({**DELTA, "usage": CHAT_USAGE})], ids=["document", "stream"])
def test_tokens_are_read_on_a_route_that_is_chosen_late(gateway: Gateway, reply: Reply) -> None:
    """What reads them is there for every request, and acts where Loopguard counts a session."""
    entry = gateway.ask(reply, "/late/v1/x")

    assert (entry.usage, entry.estimated) == (Usage(176, 34, 1_024, 0), False)


def test_answers_of_no_session_are_not_held(gateway: Gateway) -> None:
    """One that is above the buffer limit, and whose length is not told, passes where nothing is guarded."""
    data = json.dumps({"b64_json": "a" * 2 * LIMIT}).encode()

    with gateway.send(Reply([data]), "/other") as answer:
        assert (answer.status, answer.read()) == (200, data)
