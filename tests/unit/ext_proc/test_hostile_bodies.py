"""Bodies made to break their readers: each gets one answer, and nothing is raised."""

import gc
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st

from extproc.ext_proc.service import Service
from extproc.pb.external_processor_pb2 import ProcessingResponse
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.messages import body, headers
from tests.support.model_requests import (
    BODIES,
    HOSTILE,
    LIMIT,
    MIB,
    REQUESTS,
    chat_body,
    tool_call,
    user_message,
)
from tests.support.service import (
    decoded,
    exchange,
    headers_of,
    list_uncounted,
    make_service,
    metadata_of,
    sample,
)


def _looking(identity: str, mode: str, **more: object) -> dict[str, Any]:
    made = policy(identity, ANY, mode=mode, limit_keys=["body:/model"], missing_descriptor="share")
    common = {"enabled": True, "window_seconds": 60, "threshold_identical_requests": 3, **more}
    made["spec"]["loop_detection"] = [
        {**common, "similarity": "exact"},
        {
            **common,
            "similarity": "canonical",
            "ignore_fields": ["/messages/*/id", "/*/*", "/input/0", "/metadata/request_id"],
        },
        {**common, "similarity": "tail"},
        {
            **common,
            "similarity": "tool_calls",
            "tools": {"wait*": {"allow": True}, "*poll*": {"threshold": 5}},
        },
    ]
    return made


def _service(**more: object) -> Service:
    return make_service(_looking("e", "enforce", **more), _looking("s", "shadow", **more))


def _send(service: Service, data: bytes) -> ProcessingResponse:
    first, last = exchange(service, headers(), body(data))
    answer = decoded(last)
    assert not first.done
    assert decoded(first).WhichOneof("response") == "request_headers"
    assert last.done
    assert answer.WhichOneof("response") in {"request_body", "immediate_response"}
    assert list_uncounted(service, "e") == list_uncounted(service, "s")
    for reason in ("internal_error", "shadow_error", "store_error"):
        assert sample(service, "fail_open_total", reason=reason) == 0, reason
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_body_gets_its_answer_and_is_freed(name: str) -> None:
    """It is uncounted for the right reason or, sent three times, a loop, and the same in shadow."""
    make, reasons, looping = HOSTILE[name]
    service, data = _service(), make()

    answer = _send(service, data)

    assert set(list_uncounted(service, "e")) == reasons
    assert (answer.WhichOneof("response") == "immediate_response") is looping
    assert (metadata_of(answer).get("shadow_action") == "reject") is looping
    gc.collect()
    gc.freeze()  # or each collection would walk all imported SDKs
    gc.disable()
    try:
        _send(service, data)
        assert gc.collect() == 0
    finally:
        gc.enable()
    refused = _send(service, data).WhichOneof("response") == "immediate_response"
    assert reasons == LIMIT or refused is ("descriptor_too_long" not in reasons)


@pytest.mark.parametrize("name", ["a huge tool name", "a tool name that is a header"])
def test_refusal_bounds_and_cleans_tool_names(name: str) -> None:
    answer = _send(_service(), HOSTILE[name][0]())

    assert len(answer.SerializeToString()) < 4_096
    assert all(value.isascii() and value.isprintable() for value in headers_of(answer).values())
    assert json.loads(answer.immediate_response.body)["error"]["type"] == "loop_detected"


@pytest.mark.parametrize(
    ("size", "limit", "counted"),
    [
        (MIB, None, True),
        (MIB + 1, None, False),
        (1_000, 1_000, True),
        (1_001, 1_000, False),
        (2 * MIB, 3 * MIB, True),
    ],
)
def test_bodies_above_max_inspect_bytes_are_uncounted(
    size: int, limit: int | None, counted: bool
) -> None:
    service = _service(**({} if limit is None else {"max_inspect_bytes": limit}))
    data = chat_body(user_message('"?"'))
    data = data.replace(b"?", b"x" * (size - len(data) + 1))

    kinds = [_send(service, data).WhichOneof("response") for _ in range(3)]

    assert (len(data), kinds[-1]) == (size, "immediate_response" if counted else "request_body")
    assert list_uncounted(service, "e") == (
        {} if counted else {"inspect_limit": list_uncounted(service, "e")["inspect_limit"]}
    )


def test_exact_counts_bodies_that_are_too_large_to_inspect() -> None:
    service = make_service(_looking("e", "enforce"), policy("plain", ANY))
    data = b"[" * 2 * MIB

    kinds = [
        decoded(exchange(service, headers(), body(data))[-1]).WhichOneof("response")
        for _ in range(3)
    ]

    assert kinds == ["request_body", "request_body", "immediate_response"]
    assert set(list_uncounted(service, "e")) == LIMIT
    assert list_uncounted(service, "plain") == {}


@pytest.mark.parametrize(
    "name",
    [
        "nested arrays",
        "one id in every turn",
        "invalid UTF-8 in a text",
        "a million tiny messages",
        "keys in escapes",
    ],
)
def test_streamed_body_gets_the_answer_of_a_whole_one(name: str) -> None:
    data = HOSTILE[name][0]()
    whole, streamed = _service(), _service()
    cuts = [0, 1, 17, len(data) // 3, len(data) // 2, len(data) - 1, len(data)]
    pieces = [body(data[start:stop], end=stop == len(data)) for start, stop in pairwise(cuts)]

    expected = _send(whole, data)
    replies = exchange(streamed, headers(mode="STREAMED"), *pieces)

    assert decoded(replies[-1]) == expected
    assert [reply.done for reply in replies] == [False] * len(pieces) + [True]
    assert list_uncounted(streamed, "e") == list_uncounted(whole, "e")
    assert sample(streamed, "fail_open_total", reason="internal_error") == 0


@pytest.mark.slow
@given(REQUESTS)
def test_nearly_right_bodies_are_answered(value: dict[str, Any]) -> None:
    _send(_service(), json.dumps(value).encode())


@pytest.mark.slow
@given(st.sampled_from(sorted(BODIES)), st.data())
def test_damaged_bodies_are_answered(name: str, data: st.DataObject) -> None:
    damaged = bytearray(BODIES[name])
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(damaged)))
        stop = start + data.draw(st.integers(0, 40))
        piece = bytes(damaged[start:stop])
        damaged[start:stop] = data.draw(
            st.one_of(
                st.just(piece * 2), st.just(b""), st.binary(max_size=4), st.sampled_from(_BITS)
            )
        )

    _send(_service(), bytes(damaged))


_BITS = [
    b"null",
    b"[]",
    b"{}",
    b'"',
    b"\\",
    b"\\ud800",
    b"1e5",
    b",",
    b"\x00",
    b"\xff",
    b"-",
    b"[" * 1_000,
]


@pytest.mark.deep
@pytest.mark.parametrize("nest", ["[%s]", '{"a":%s}'], ids=["arrays", "objects"])
def test_bodies_of_every_depth_are_answered(nest: str) -> None:
    opening, closing = nest.split("%s")
    shapes: list[Callable[[str], bytes]] = [
        lambda value: chat_body(user_message(value)),
        chat_body,
        lambda value: chat_body(*[tool_call(value)] * 3),
        lambda value: chat_body(user_message(), model=value),
        lambda value: f'{{"prompt":{value}}}'.encode(),
    ]
    service = _service()
    for shape in shapes:
        for depth in range(900, 1_000):
            _send(service, shape(opening * depth + "1" + closing * depth))
