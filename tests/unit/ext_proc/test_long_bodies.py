"""Bodies above `max_inspect_bytes`: `turns` reads their ends, whichever way they come, and all else stays as it was."""

from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.ext_proc.service import Service
from extproc.ext_proc.stream import Stream
from extproc.pb.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from tests.support import turn_writers
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.messages import body, headers
from tests.support.service import decoded, exchange, make_service, sample
from tests.support.turn_writers import Did, as_chat

LIMIT = 65_536
WRITERS = ["as_chat", "as_ollama", "as_responses", "as_anthropic", "as_gemini", "as_bedrock"]


def make_guard(*more: dict[str, Any], uncountable: str = "allow", **loop: Any) -> Service:  # noqa: ANN401  # of a policy
    """A service with a policy that looks for turns in bodies of up to this many bytes, and with others."""
    made = policy("p", ANY, **{"similarity": "turns", "max_inspect_bytes": LIMIT, **loop})
    made["spec"]["uncountable"] = uncountable
    return make_service(made, *more)


def make_body(writer: str = "as_chat", *, times: int = 8, size: int = 2 * LIMIT, loops: bool = True) -> bytes:
    """The request of an agent that has done the same so often, or something else each time."""
    turns = []
    for number in range(1, times + 1):
        name = "a.py" if loops else f"{number}.py"
        turns.append(Did((("read", {"path": name}),), (f"{name} is no file " * (size // times // 17),), number=number))
    return json.dumps({"tools": [], **getattr(turn_writers, writer)(turns), "metadata": {}}).encode()


def send(service: Service, data: bytes, *, chunk: int = 0, **more: Any) -> ProcessingResponse:  # noqa: ANN401  # headers
    """The last answer; streamed in chunks of this many bytes, or buffered."""
    if not chunk:
        return decoded(exchange(service, headers(**more), body(data))[-1])
    chunks: list[ProcessingRequest] = [
        body(data[place : place + chunk], end=place + chunk >= len(data)) for place in range(0, len(data), chunk)
    ]
    return decoded(exchange(service, headers(mode="STREAMED", **more), *chunks)[-1])


def status(answer: ProcessingResponse) -> int:
    """Of the refusal, 0 for none."""
    return int(answer.immediate_response.status.code)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [0, 1_000, 16_384, 2 * LIMIT])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_loop_is_refused_however_long_the_history(writer: str, chunk: int) -> None:
    """It is as much of a loop below the limit as above it; one who makes progress is let through."""
    service = make_guard()

    sizes = (LIMIT // 4, 2 * LIMIT, 8 * LIMIT)
    refused = [status(send(service, make_body(writer, times=64, size=size), chunk=chunk)) for size in sizes]
    passed = [status(send(service, make_body(writer, times=64, size=size, loops=False), chunk=chunk)) for size in sizes]

    assert refused == [429, 429, 429]
    assert passed == [0, 0, 0]
    assert sample(service, "uncounted_total", policy="p", reason="inspect_limit") == 0
    assert service.kept.bytes == 0


@pytest.mark.parametrize("chunk", [0, 10_000])
def test_what_is_not_certain_is_uncounted_under_its_reason(chunk: int) -> None:
    """One result that is longer than what is kept hides where messages begin; and what cannot be read at all says nothing."""
    service, strict = make_guard(), make_guard(uncountable="reject")

    for data in (make_body(times=1, size=4 * LIMIT), b"x" * 2 * LIMIT, b'{"messages":[' + b"1," * LIMIT + b"1]}"):
        assert status(send(service, data, chunk=chunk)) == 0
        assert status(send(strict, data, chunk=chunk)) == 413

    assert sample(service, "uncounted_total", policy="p", reason="inspect_limit") == 3
    assert service.kept.bytes == 0


def test_no_stream_keeps_more_than_the_limit() -> None:
    """However long the upload: what is kept of it is bounded, and is freed."""
    service, data, most = make_guard(), make_body(times=64, size=16 * LIMIT), []
    stream = Stream(service)
    stream.receive(headers(mode="STREAMED").SerializeToString())
    for place in range(0, len(data) - 5_000, 5_000):
        stream.receive(body(data[place : place + 5_000], end=False).SerializeToString())
        most.append(service.kept.bytes)
    stream.close()

    assert LIMIT // 2 < max(most) <= LIMIT
    assert service.kept.bytes == 0


def test_a_note_is_not_put_into_such_a_body() -> None:
    """It goes on with a warning, and that is counted."""
    service = make_guard(action="steer")

    answer = send(service, make_body())

    assert not answer.request_body.response.HasField("body_mutation")
    assert "loop_warn" in str(answer)
    assert sample(service, "unsteered_total", policy="p", reason="inspect_limit") == 1


def test_other_detectors_do_not_read_it() -> None:
    """Part of a body is not what they compare."""
    others = [policy(name, ANY, similarity=name, max_inspect_bytes=LIMIT) for name in ("canonical", "tail", "tool_calls")]
    service = make_guard(*others)

    assert status(send(service, make_body())) == 429
    for other in others:
        assert sample(service, "uncounted_total", policy=other["id"], reason="inspect_limit") == 1
    assert status(send(make_service(*others), make_body())) == 0


def test_each_policy_keeps_to_its_own_limit() -> None:
    """One that may look into all of a body does; one beside it with a lower limit reads the ends."""
    larger = policy("larger", ANY, similarity="turns", max_inspect_bytes=16 * LIMIT, mode="shadow")
    service = make_guard(larger)

    assert status(send(service, make_body(times=32))) == 429
    assert sample(service, "requests_total", policy="larger", mode="shadow", action="reject") == 1
    assert status(send(service, make_body(times=32, loops=False))) == 0


def test_a_compressed_body_is_left_alone() -> None:
    """Its bytes are not JSON."""
    service = make_guard()

    assert status(send(service, make_body(), content_encoding="br")) == 0
    assert status(send(service, make_body(), content_encoding="identity")) == 429


def test_its_session_supplies_what_the_ends_do_not_show() -> None:
    """Of turns so long that only the newest is certain, each request brings one."""
    made = policy("p", ANY, similarity="turns", max_inspect_bytes=LIMIT, limit_keys=["header:x-user-id"])
    made["spec"]["session"] = {"keys": ["header:x-session-id"]}
    service = make_service(made)

    turns = [Did((("read", {"path": "a.py"}),), ("no such file " * (LIMIT // 40),), number=number) for number in range(1, 9)]
    answers = [
        status(send(service, json.dumps(as_chat(turns[:count])).encode(), x_user_id="ann", x_session_id="s"))
        for count in range(2, 9)
    ]

    assert 429 in answers
    assert answers[-1] == 429


def test_a_refusal_is_written_for_the_model_that_was_asked() -> None:
    """The keys beside the messages are known: an answer as if of the model names it."""
    service = make_guard(refuse_as="completion")

    answer = send(service, make_body())

    assert status(answer) == 200
    assert json.loads(answer.immediate_response.body)["model"] == "m"
