"""Bodies above `max_inspect_bytes`: `turns` reads their ends, buffered or streamed."""

import json
from typing import Any

import pytest

from extproc.ext_proc.service import Service
from extproc.ext_proc.stream import Stream
from extproc.pb.external_processor_pb2 import ProcessingResponse
from tests.support import turn_writers
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.messages import body, headers
from tests.support.service import decoded, exchange, make_service, receive, sample, status
from tests.support.turn_writers import Did, as_chat

LIMIT = 65_536
WRITERS = ["as_chat", "as_ollama", "as_responses", "as_anthropic", "as_gemini", "as_bedrock"]


def make_guard(*more: dict[str, Any], uncountable: str = "allow", **loop: Any) -> Service:  # noqa: ANN401  # of a policy
    made = policy("p", ANY, **{"similarity": "turns", "max_inspect_bytes": LIMIT, **loop})
    made["spec"]["uncountable"] = uncountable
    return make_service(made, *more)


def make_body(
    writer: str = "as_chat", *, times: int = 8, size: int = 2 * LIMIT, loops: bool = True
) -> bytes:
    """The request of an agent that has done the same this often, or something else each time."""
    turns = []
    for number in range(1, times + 1):
        name = "a.py" if loops else f"{number}.py"
        turns.append(
            Did(
                (("read", {"path": name}),),
                (f"{name} is no file " * (size // times // 17),),
                number=number,
            )
        )
    return json.dumps(
        {"tools": [], **getattr(turn_writers, writer)(turns), "metadata": {}}
    ).encode()


def send(service: Service, data: bytes, *, chunk: int = 0, **more: Any) -> ProcessingResponse:  # noqa: ANN401  # headers
    places = range(0, len(data), chunk or len(data))
    chunks = [body(data[place : place + places.step], end=place == places[-1]) for place in places]
    return decoded(
        exchange(service, headers(mode="STREAMED" if chunk else "BUFFERED", **more), *chunks)[-1]
    )


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [0, 1_000, 2 * LIMIT])
@pytest.mark.parametrize("writer", WRITERS)
def test_loop_in_a_long_history_is_refused(writer: str, chunk: int) -> None:
    service = make_guard()

    for size in (LIMIT // 4, 2 * LIMIT, 8 * LIMIT):
        assert status(send(service, make_body(writer, times=64, size=size), chunk=chunk)) == 429
        assert (
            status(send(service, make_body(writer, times=64, size=size, loops=False), chunk=chunk))
            == 200
        )
    assert sample(service, "uncounted_total", policy="p", reason="inspect_limit") == 0
    assert service.kept.bytes == 0


@pytest.mark.parametrize("chunk", [0, 10_000])
def test_uncertain_ends_are_uncounted(chunk: int) -> None:
    """One long result hides where messages begin, or nothing can be read."""
    service, strict = make_guard(), make_guard(uncountable="reject")

    for data in (
        make_body(times=1, size=4 * LIMIT),
        b"x" * 2 * LIMIT,
        b'{"messages":[' + b"1," * LIMIT + b"1]}",
    ):
        assert status(send(service, data, chunk=chunk)) == 200
        assert status(send(strict, data, chunk=chunk)) == 413

    assert sample(service, "uncounted_total", policy="p", reason="inspect_limit") == 3
    assert service.kept.bytes == 0


def test_stream_keeps_no_more_than_the_limit() -> None:
    service, data, kept = make_guard(), make_body(times=64, size=16 * LIMIT), []
    stream = Stream(service)
    receive(stream, headers(mode="STREAMED"))
    for place in range(0, len(data) - 5_000, 5_000):
        receive(stream, body(data[place : place + 5_000], end=False))
        kept.append(service.kept.bytes)
    stream.close()

    assert LIMIT // 2 < max(kept) <= LIMIT
    assert service.kept.bytes == 0


def test_other_detectors_do_not_read_long_bodies() -> None:
    others = [
        policy(name, ANY, similarity=name, max_inspect_bytes=LIMIT)
        for name in ("canonical", "tail", "tool_calls")
    ]
    service = make_guard(*others)

    assert status(send(service, make_body())) == 429
    for other in others:
        assert sample(service, "uncounted_total", policy=other["id"], reason="inspect_limit") == 1
    assert status(send(make_service(*others), make_body())) == 200


def test_each_policy_reads_up_to_its_own_limit() -> None:
    larger = policy("larger", ANY, similarity="turns", max_inspect_bytes=16 * LIMIT, mode="shadow")
    service = make_guard(larger)

    assert status(send(service, make_body(times=32))) == 429
    assert sample(service, "requests_total", policy="larger", mode="shadow", action="reject") == 1
    assert status(send(service, make_body(times=32, loops=False))) == 200


def test_long_compressed_body_is_uncounted() -> None:
    service = make_guard()

    assert status(send(service, make_body(), content_encoding="br")) == 200
    assert status(send(service, make_body(), content_encoding="identity")) == 429


def test_session_supplies_turns_that_the_ends_lack() -> None:
    made = policy(
        "p", ANY, similarity="turns", max_inspect_bytes=LIMIT, limit_keys=["header:x-user-id"]
    )
    made["spec"]["session"] = {"keys": ["header:x-session-id"]}
    service = make_service(made)
    turns = [
        Did((("read", {"path": "a.py"}),), ("no such file " * (LIMIT // 40),), number=number)
        for number in range(1, 9)
    ]

    for count in range(2, 9):
        answer = send(
            service, json.dumps(as_chat(turns[:count])).encode(), x_user_id="ann", x_session_id="s"
        )

    assert status(answer) == 429


def test_long_body_gets_no_note_and_names_the_model() -> None:
    service = make_guard(action="steer")

    warned = send(service, make_body())
    answered = send(make_guard(refuse_as="completion"), make_body())

    assert not warned.request_body.response.HasField("body_mutation")
    assert "loop_warn" in str(warned)
    assert sample(service, "unsteered_total", policy="p", reason="inspect_limit") == 1
    assert status(answered) == 200
    assert json.loads(answered.immediate_response.body)["model"] == "m"
