"""What Envoy reads in answers and reports at their end: tokens of every API, errors, cuts."""

import gzip
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import pytest

from extproc.sessions.rates import Usage
from tests.support.documents import bare_policy, bundle
from tests.support.envoy_config import choose_late
from tests.support.harness import PATIENCE, Stack, envoy_version
from tests.support.stacks import await_session, open_before_model
from tests.support.usage import (
    CHAT_USAGE,
    DELTA,
    EVENTS,
    HUNG_UP,
    JSON,
    PRICES,
    STARTED,
    TOLD,
    WORD,
    Model,
    Reply,
    price,
    stream,
    whole,
    write_event,
)

pytestmark = pytest.mark.skipif(
    envoy_version() < (1, 38), reason="this Envoy reads no events: tokens are NOT tested"
)

LIMIT = 2**20
POLICIES = bundle(
    bare_policy(
        "agents",
        "/v1/",
        limit_keys=["header:x-user-id"],
        session={"keys": ["header:x-session-id"]},
        session_limits={"max_cost_per_session": 10.0, "prices": PRICES},
    )
)
COMPRESSED = gzip.compress(json.dumps({"model": "gpt-4o", "usage": CHAT_USAGE}).encode())


class Gateway:
    """Envoy between a client and the model; each request is a session of its own."""

    def __init__(self, made: Stack, model: Model) -> None:
        self.made = made
        self.model = model
        self._numbers = count()

    @contextmanager
    def send(
        self, reply: Reply, path: str = "/v1/x", **headers: str
    ) -> Iterator[http.client.HTTPResponse]:
        """Sends a request; yields the answer, of which only the headers are read."""
        self.model.reply = reply
        self.session = f"session-{next(self._numbers)}"
        connection = http.client.HTTPConnection("127.0.0.1", self.made.envoy.port, timeout=PATIENCE)
        try:
            connection.request(
                "POST",
                path,
                b"x" * 400,
                {"x-user-id": "ann", "x-session-id": self.session, **headers},
            )
            yield connection.getresponse()
        finally:
            connection.close()

    def tell(self) -> tuple[Usage, dict[str, Any]]:
        """The tokens of the newest request, and the report of its session, once it is over."""
        run = await_session(self.made, self.session, total_step_count=1, reserved_cost=0.0)
        used = [
            run["usage"][f"{name}_tokens"]
            for name in ("input", "output", "cache_read", "cache_write")
        ]
        return Usage(*used), run

    def ask(
        self, reply: Reply, path: str = "/v1/x", **headers: str
    ) -> tuple[Usage, dict[str, Any]]:
        with self.send(reply, path, **headers) as answer, suppress(http.client.IncompleteRead):
            answer.read()
        return self.tell()


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with open_before_model(POLICIES, edit=choose_late, buffer_limit=LIMIT) as opened:
        yield Gateway(*opened)


def spell(api: str, kind: str, *, sized: bool = False) -> tuple[Reply, str, Usage]:
    reply, *told = TOLD[api]
    return (reply._replace(kind=kind, whole=sized), *told)  # type: ignore[return-value]  # of TOLD


KINDS = (
    *(
        "application/vnd.api+json",
        "application/problem+json; charset=utf-8",
        "text/json;charset=utf-8",
        "Application/JSON",
    ),
    *("APPLICATION/JSON; charset=UTF-8", "application/json ; charset=utf-8", ""),
)
READ = {
    **TOLD,
    **{
        f"{kind} {sized}": spell("chat", kind, sized=sized)
        for kind in KINDS
        for sized in ((False, True) if kind in KINDS[:2] else (False,))
    },
    "events in capitals": spell("chat stream", "Text/Event-Stream; Charset=UTF-8"),
}


@pytest.mark.parametrize("answer", READ)
def test_reported_tokens_and_cost_are_exact(gateway: Gateway, answer: str) -> None:
    reply, model, expected = READ[answer]

    usage, run = gateway.ask(reply, **{"accept-encoding": "gzip, br"})

    assert usage == expected
    assert (run["actual_cost"], run["estimated_cost"]) == (float(price(model, expected)), 0)
    assert run["usage"]["failed_answers"] == 0
    assert gateway.model.encodings is None  # Envoy cannot read compressed answers


@pytest.mark.parametrize(
    "count",
    [7, 0, 12.9, "900", " 9 ", True, None, -1, 10**10, 1e300, "many", "nan", "", [7], {"n": 7}],
)
def test_odd_counts_are_read_alike_in_streams(gateway: Gateway, count: object) -> None:
    answer = {
        "model": "m",
        "usage": {"prompt_tokens": count, "completion_tokens": 5, "prompt_tokens_details": None},
    }

    (document, of_document), (event, of_event) = (
        gateway.ask(whole(**answer)),
        gateway.ask(stream(answer)),
    )

    assert (event, of_event["actual_cost"]) == (document, of_document["actual_cost"])
    assert of_event["estimated_cost"] == of_document["estimated_cost"]


@pytest.mark.parametrize(
    ("reply", "output"),
    [
        (stream(*[DELTA] * 20, "[DONE]"), 18),
        (stream(*[DELTA] * 20, "[DONE]")._replace(kind="TEXT/EVENT-STREAM"), 18),
        (Reply([b"a" * 1_000], "application/vnd.amazon.eventstream"), 7),
        (Reply([COMPRESSED], headers={"content-encoding": "gzip"}), len(COMPRESSED)),
        (Reply([b"a" * 1_000], "text/plain"), 250),
        (Reply([b"a" * 1_000], ""), 250),
        (
            stream(
                *[
                    {"usage": each, "text": "a" * 400}
                    for each in ("none", {}, [CHAT_USAGE], {"a": "a" * 9_000})
                ]
            ),
            85,
        ),
        (Reply([b'{"usage": "none", "text": "' + b"a" * 971 + b'"}']), 250),
        (
            Reply(
                [json.dumps({"usage": CHAT_USAGE, "b64_json": "a" * 2 * LIMIT}).encode()],
                whole=True,
            ),
            131_072,
        ),
    ],
    ids=[
        "stream",
        "in capitals",
        "converse stream",
        "gzip",
        "text",
        "no type",
        "other usage",
        "JSON without usage",
        "large",
    ],
)
def test_tokens_of_answers_without_usage_are_estimated(
    gateway: Gateway, reply: Reply, output: int
) -> None:
    """From the sizes. An answer that exceeds Envoy's buffer passes unread."""
    with gateway.send(reply) as answer:
        assert answer.read() == b"".join([part for part in reply.parts if isinstance(part, bytes)])
    usage, run = gateway.tell()

    # Compares as a number
    assert usage == Usage(100, pytest.approx(output, rel=0.2), 0, 0)  # type: ignore[arg-type]
    assert run["estimated_cost"] == run["actual_cost"] > 0


def test_stream_cut_off_by_the_upstream_has_failed(gateway: Gateway) -> None:
    usage, run = gateway.ask(stream(STARTED, *[WORD] * 40, named=True, cut=True))

    assert usage._replace(output=0) == Usage(12, 0, 9_000, 300)
    assert 20 <= usage.output <= 80
    assert run["usage"]["failed_answers"] == 1
    assert run["estimated_cost"] > 0


def test_client_that_hangs_up_pays_for_what_came(gateway: Gateway) -> None:
    gone = threading.Event()

    def wait() -> bytes:
        gone.wait(PATIENCE)
        return write_event(WORD, named=True)

    with gateway.send(Reply([write_event(STARTED, named=True), wait], EVENTS)) as answer:
        assert answer.readline() == b"event: message_start\n"
    usage, run = gateway.tell()
    gone.set()

    assert usage._replace(output=0) == Usage(12, 0, 9_000, 300)
    assert run["usage"]["failed_answers"] == 0


@pytest.mark.parametrize(
    ("reply", "failed"),
    [
        (whole(error={})._replace(status=status), failed)
        for status, failed in ((500, 1), (503, 1), (529, 1), (429, 0), (400, 0))
    ]
    + [(HUNG_UP, 1)],  # Envoy answers in place of an upstream that closed the connection
)
def test_upstream_errors_cost_nothing_and_count_as_failures(
    gateway: Gateway, reply: Reply, failed: int
) -> None:
    """Errors of the client are no failures."""
    usage, run = gateway.ask(reply)

    assert usage == Usage(0, 0, 0, 0)
    assert (run["usage"]["failed_answers"], run["actual_cost"]) == (failed, 0)


@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/x", EVENTS), ("/v1/beta/models/m:streamGenerateContent", JSON)]
)
def test_stream_reaches_the_client_event_by_event(gateway: Gateway, path: str, kind: str) -> None:
    """Gemini streams JSON as well."""
    got = threading.Event()

    def wait() -> bytes:
        assert got.wait(PATIENCE), "the first part was held"
        return b", {}]"

    first = b'[{"usageMetadata": {}}'
    with gateway.send(Reply([first, wait], kind), path) as answer:
        assert answer.read(len(first)) == first
        got.set()
        assert answer.read() == b", {}]"


@pytest.mark.parametrize(
    "reply",
    [whole(usage=CHAT_USAGE), stream({**DELTA, "usage": CHAT_USAGE})],
    ids=["document", "stream"],
)
def test_tokens_are_read_on_routes_chosen_late(gateway: Gateway, reply: Reply) -> None:
    usage, run = gateway.ask(reply, "/late/v1/x")

    assert (usage, run["estimated_cost"]) == (Usage(176, 34, 1_024, 0), 0)


def test_answers_outside_sessions_are_not_held_or_reported(gateway: Gateway) -> None:
    data = json.dumps({"b64_json": "a" * 2 * LIMIT}).encode()
    taken = gateway.made.loopguard.metric("access_log_entries_total")

    with gateway.send(Reply([data]), "/other") as answer:
        assert (answer.status, answer.read()) == (200, data)
    gateway.ask(whole(usage=CHAT_USAGE))

    assert gateway.made.loopguard.metric("access_log_entries_total") == taken + 1
