"""What Envoy's access log reports about requests of sessions."""

import itertools
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, strategies as st

from extproc.engine.settlements import Entry
from extproc.errors import ProtocolError
from extproc.ext_proc.access_log import MAX_ENTRIES, MAX_MESSAGE, AccessLog, read_message
from extproc.pb.als_pb2 import StreamAccessLogsMessage
from extproc.sessions.rates import Usage
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.envoy_logs import JSON, SESSION, log
from tests.support.protobuf import field
from tests.support.service import make_service, sample

STREAM = {"content-type": "text/event-stream; charset=utf-8"}
UNTOLD = {"usage": Usage(1_000, 200, 0, 0), "estimated": True, "model": ""}


def read(**entry: Any) -> Entry:  # noqa: ANN401  # see `add_entry`
    ((found,), _) = read_message(log(entry))
    return found


DETAILS = {"cached_tokens": 800}
CHAT = {"prompt_tokens": 1_000, "completion_tokens": 50, "prompt_tokens_details": DETAILS}
RESPONSE = {"input_tokens": 1_000, "output_tokens": 50, "input_tokens_details": DETAILS}
STARTED = {
    "input_tokens": 10,
    "cache_read_input_tokens": 800,
    "cache_creation_input_tokens": 90,
    "output_tokens": 1,
}
GEMINI = {
    "promptTokenCount": 1_000,
    "candidatesTokenCount": 50,
    "cachedContentTokenCount": 300,
    "thoughtsTokenCount": 70,
    "toolUsePromptTokenCount": 9,
}
CONVERSE = {
    "inputTokens": 10,
    "outputTokens": 50,
    "cacheReadInputTokens": 800,
    "cacheWriteInputTokens": 90,
}

Case = tuple[dict[str, Any], dict[str, Any]]


# See `add_entry`
def _tell(told: dict[str, Any], usage: Usage, **entry: Any) -> Case:  # noqa: ANN401
    return {"told": told, **entry}, {"usage": usage, "estimated": False}


def _tell_objects(expected: Usage, *, estimated: bool = False, **objects: Any) -> Case:  # noqa: ANN401  # JSON
    """Objects in a streamed answer, which Envoy hands over as text."""
    told = {place.replace("__", "."): json.dumps(found) for place, found in objects.items()}
    entry = {"told": {"model": "m", **told}, "headers": STREAM, "sizes": (4_000, 1_280)}
    return entry, {"model": "m", "usage": expected, "estimated": estimated}


# Anything
def _tell_gateway(usage: Usage, *, estimated: bool = False, **counts: Any) -> Case:  # noqa: ANN401
    # Its input includes all cached tokens, and it reports zeros for an answer without counts.
    named = {f"llm_{name}_token": count for name, count in counts.items()}
    gateway = {**named, "model_name_override": "gpt-x"}
    return {"gateway": gateway}, {"usage": usage, "estimated": estimated, "model": "gpt-x"}


def _guess(output: int, *more: tuple[str, str]) -> Case:
    return {"headers": dict(more)}, {"usage": Usage(1_000, output, 0, 0), "estimated": True}


def _take(expected: int, *took: float) -> Case:
    return {"took": took or None}, {"model_ms": expected}


CASES: dict[str, Case] = {
    "what became of it": (
        {"told": {"model": "gpt-4o-2024-08-06", "input": 900, "output": 40}},
        {
            "calls": (SESSION,),
            "status": 200,
            "model": "gpt-4o-2024-08-06",
            "failed": False,
            "refused": False,
        },
    ),
    # Some APIs count cached tokens as part of the prompt and others beside it; thoughts are output.
    "openai": _tell({"input": 1_000, "output": 50, "cached": 800}, Usage(200, 50, 800, 0)),
    "anthropic": _tell(
        {"input": 10, "output": 50, "cache_read": 800, "cache_write": 90}, Usage(10, 50, 800, 90)
    ),
    "gemini": _tell(
        {"input": 1_000, "output": 50, "cached": 300, "thoughts": 70, "tool_input": 9},
        Usage(709, 120, 300, 0),
    ),
    "more cached than there was": _tell(
        {"input": 5, "output": 1, "cached": 800}, Usage(0, 1, 800, 0)
    ),
    "an answer before a gateway": _tell(  # they are not mixed
        {"input": 10, "output": 50, "cache_read": 800},
        Usage(10, 50, 800, 0),
        gateway={"llm_input_token": 9, "llm_cached_input_token": 8},
    ),
    "gateway": _tell_gateway(Usage(1_000, 50, 0, 0), input=1_000, output=50),
    "gateway, cached": _tell_gateway(
        Usage(110, 50, 800, 90), input=1_000, output=50, cached_input=800, cache_creation_input=90
    ),
    "gateway, nothing found": _tell_gateway(
        Usage(1_000, 200, 0, 0),
        estimated=True,
        input=0,
        output=0,
        cached_input=0,
        cache_creation_input=0,
    ),
    "gateway, no output": _tell_gateway(Usage(20, 200, 0, 0), estimated=True, input=20),
    "gateway, no numbers": _tell_gateway(
        Usage(1_000, 200, 0, 0), estimated=True, input="900", output=-1, cached_input=float("inf")
    ),
    "gateway, more cached than there was": _tell_gateway(
        Usage(1_000, 1, 0, 800), estimated=True, input=5, output=1, cache_creation_input=800
    ),
    # Envoy hands objects over as text; what a later one does not say stays as an earlier one said
    # it.
    "chat, streamed": _tell_objects(Usage(200, 50, 800, 0), usage=CHAT),
    "responses, streamed": _tell_objects(Usage(200, 50, 800, 0), response__usage=RESPONSE),
    "messages, streamed": _tell_objects(
        Usage(10, 50, 800, 90), message__usage=STARTED, usage={"output_tokens": 50}
    ),
    "counted at the end": _tell_objects(
        Usage(12, 50, 800, 90),
        message__usage=STARTED,
        usage={**STARTED, "input_tokens": 12, "output_tokens": 50},
    ),
    "null at the end": _tell_objects(
        Usage(10, 50, 800, 90),
        message__usage=STARTED,
        usage={"input_tokens": None, "output_tokens": 50},
    ),
    "gemini, streamed": _tell_objects(Usage(709, 120, 300, 0), usageMetadata=GEMINI),
    "converse, streamed": _tell_objects(Usage(10, 50, 800, 90), usage=CONVERSE),
    "only begun": _tell_objects(Usage(10, 10, 800, 90), estimated=True, message__usage=STARTED),
    # Estimates come from sizes: a stream has an event for each few letters, and compressed answers
    # hold more text.
    "JSON": _guess(200, *JSON.items()),
    "stream": _guess(6, *STREAM.items()),
    "AWS's stream": _guess(6, ("content-type", "application/vnd.amazon.eventstream")),
    "gzip": _guess(800, *JSON.items(), ("content-encoding", "gzip")),
    "compressed stream": _guess(25, *STREAM.items(), ("content-encoding", "br")),
    "any case": _guess(6, ("content-type", "Text/Event-Stream")),
    "Identity": _guess(200, *JSON.items(), ("content-encoding", "Identity")),
    "identity": _guess(200, *JSON.items(), ("content-encoding", "identity")),
    "no headers": _guess(200),
    "cut off": (
        {"told": {"input": 20, "cache_read": 5_000}, "headers": STREAM, "sizes": (4_000, 1_280)},
        {"usage": Usage(20, 10, 5_000, 0), "estimated": True},
    ),
    # The numbers in an answer were written by a model, or by a server that poses as one.
    "odd numbers": (
        {"told": {"input": -5, "output": float("nan"), "cached": float("inf"), "model": 7}},
        UNTOLD,
    ),
    "other types": (
        {"told": {"input": "900", "output": True, "cache_read": None, "model": ["x"]}},
        UNTOLD,
    ),
    "huge numbers": ({"told": {"input": 1e300, "output": {"a": 1}, "cache_write": -1e9}}, UNTOLD),
    **{
        f"status {status}": (
            {"status": status},
            {
                "usage": Usage(0, 0, 0, 0),
                "estimated": False,
                "failed": status >= 500,
                "unsent": status < 500,
            },
        )
        for status in (400, 404, 429, 500, 503, 529)
    },
    **{  # whatever the status; the received part is paid for
        flag: ({flag: True}, {"failed": True, "status": 200, "estimated": True})
        for flag in (
            "upstream_remote_reset",
            "upstream_connection_termination",
            "upstream_protocol_error",
            "local_reset",
        )
    },
    "no answer": (
        {"sizes": (4_000, 0), "upstream_remote_reset": True},
        {"failed": True, "usage": Usage(0, 0), "estimated": False},
    ),
    "client hung up": (  # without a status; the call is paid for
        {"status": 0, "headers": {}, "sizes": (400, 0)},
        {"failed": False, "usage": Usage(100, 0, 0, 0), "estimated": True},
    ),
    "refused by us": ({"action": "reject", "status": 503}, {"refused": True, "failed": False}),
    "warned by us": ({"action": "warn"}, {"refused": False}),
    "Envoy's own answer": ({"status": 200}, {"unsent": False}),
    "upstream's time": _take(2_500, 0.25, 2.75),
    "a long time": _take(90_001, 0.001, 90.002),
    "no first byte": _take(0, 0, 3),
    "ended before it began": _take(0, 2, 1),
    "longer than anything": _take(0, 10**9, 10**12),
    "no upstream": _take(0),
}


@pytest.mark.parametrize("case", CASES)
def test_entry_has_usage_time_and_outcome(case: str) -> None:
    told, expected = CASES[case]

    entry = read(**told)

    assert {name: getattr(entry, name) for name in expected} == expected


@pytest.mark.parametrize(
    "text",
    [
        *[
            "",
            "null",
            "true",
            "7",
            '"none"',
            "[]",
            "{}",
            "none",
            "{",
            '{"prompt_tokens": 1, "completion_tokens": 1} {}',
        ],
        *[
            "[" * 8_000,
            '{"a":' * 1_000,
            '{"usage": "\\ud800"}',
            '{"prompt_tokens_details": [1], "input_tokens_details": 7}',
        ],
        *[
            f'{{"prompt_tokens": {value}, "completion_tokens": {value}}}'.ljust(
                9_000 if value == "7" else 0
            )
            for value in [
                "null",
                "-1",
                "1e300",
                "1" * 400,
                "[7]",
                "{}",
                '"many"',
                '"nan"',
                '"inf"',
                '""',
                '"-7"',
                "7",
            ]
        ],
    ],
)
def test_odd_usage_text_costs_no_other_part(text: str) -> None:
    entry = read(told={"model": "m", "usage": text})
    began = read(told={"message.usage": json.dumps(STARTED), "usage": text.replace("prompt", "no")})

    assert (entry.model, entry.usage, entry.estimated) == ("m", Usage(1_000, 200, 0, 0), True)
    assert (began.usage, began.estimated) == (Usage(10, 200, 800, 90), True)


def test_unfinished_and_sessionless_requests_are_left_out() -> None:
    message = StreamAccessLogsMessage.FromString(log({}, {}, {}))
    message.http_logs.log_entry[0].common_properties.metadata.filter_metadata["loopguard"].Clear()
    message.http_logs.log_entry[1].common_properties.intermediate_log_entry = True

    assert [len(read_message(each)[0]) for each in (message.SerializeToString(), b"")] == [1, 0]


# A field of each type, with the number 99.
UNKNOWN = (
    b"\x98\x06\x01" + b"\x99\x06" + bytes(8) + b"\x9a\x06\x02\xff\xff" + b"\x9d\x06" + bytes(4)
)


def test_unknown_fields_and_any_order_are_accepted() -> None:
    told = {"model": "m", "input": 900, "output": 40}
    message = StreamAccessLogsMessage.FromString(log({"told": told, "upstream_remote_reset": True}))
    (entry,) = message.http_logs.log_entry
    common = entry.common_properties
    metadata = common.metadata.filter_metadata
    metadata["envoy.filters.http.jwt_authn"].update({"claims": {"sub": "s"}})
    wrapped = entry.response.response_code
    named = [
        metadata["loopguard"],
        metadata["loopguard.usage"].fields["input"],
        common.response_flags,
        common.metadata,
    ]
    for each in (*named, wrapped, common, entry.request, entry.response):
        each.MergeFromString(UNKNOWN)
    parts = (
        field(1, common.SerializeToString()),
        field(3, entry.request.SerializeToString()),
        UNKNOWN,
    )

    for order in itertools.permutations([*parts, field(4, entry.response.SerializeToString())]):
        ((found,), _) = read_message(field(2, UNKNOWN + field(1, b"".join(order))) + UNKNOWN)
        assert (found.calls, found.status, found.failed, found.model) == (
            (SESSION,),
            200,
            True,
            "m",
        )
        assert (found.request_bytes, found.response_bytes, found.usage) == (
            4_000,
            800,
            Usage(900, 40),
        )


def test_flags_of_envoy_itself_are_no_failure() -> None:
    message = StreamAccessLogsMessage.FromString(log({}))
    # rate_limited
    message.http_logs.log_entry[0].common_properties.response_flags.MergeFromString(b"\x60\x01")

    assert not read_message(message.SerializeToString())[0][0].failed


UNREADABLE = {
    "a group": b"\x0b\x0c",
    "the end of a group": b"\x0c",
    "a field without a number": b"\0\0",
    "a type that does not exist": b"\x0e\x00",
    "a varint of eleven bytes": b"\x08" + b"\xff" * 10 + b"\x01",
    "a length behind the end": b"\x0a\x05abc",
    "a length beyond all memory": b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01abc",
    "a fixed number that is cut off": b"\x09\0\0\0\0\0\0\0",
    "a varint that is cut off": b"\x08\x80",
    "a tag alone": b"\x0a",
}


@pytest.mark.parametrize("data", UNREADABLE.values(), ids=UNREADABLE)
def test_malformed_fields_are_a_protocol_error(data: bytes) -> None:
    for message in (data, field(2, data) + bytes(20), field(2, field(1, data)) + bytes(20)):
        with pytest.raises(ProtocolError):
            read_message(message)


def test_cut_off_message_is_refused() -> None:
    whole = log({"told": {"input": 900, "output": 40, "model": "m"}})

    for end in range(1, len(whole)):
        with pytest.raises(ProtocolError):
            read_message(whole[:end])


def test_invalid_utf_8_costs_no_entry() -> None:
    message = log({"told": {"model": "m-0", "input": 900, "output": 40}}, {"status": 201}).replace(
        b"m-0", b"m\xff0"
    )

    first, second = read_message(message)[0]

    assert (first.model, first.usage, second.status) == ("m\ufffd0", Usage(900, 40), 201)


@given(
    st.binary(max_size=200),
    st.sampled_from(["usage", "message.usage", "response.usage", "usageMetadata"]),
    st.text(),
)
def test_any_bytes_are_entries_or_a_protocol_error(data: bytes, place: str, text: str) -> None:
    for message in (data, log({}) + data):
        with suppress(ProtocolError):
            assert len(read_message(message)[0]) <= MAX_ENTRIES
    assert read(told={place: text}).usage.input >= 0


def test_failing_entry_costs_no_other_entry() -> None:
    service, taken = make_service(policy("p", ANY)), list[int]()

    def take(entry: Entry) -> None:
        taken.append(entry.status)
        if entry.status == 201:
            raise ValueError

    AccessLog(take, service.metrics).receive(log({}, {"status": 201}, {"status": 202}))

    assert taken == [200, 201, 202]
    assert [
        sample(service, "access_log_entries_total", result=each)
        for each in ("taken", "error", "dropped")
    ] == [2, 1, 0]


def test_entries_of_one_message_are_bounded() -> None:
    service, taken = make_service(policy("p", ANY)), list[Entry]()
    access_log = AccessLog(taken.append, service.metrics)
    message = StreamAccessLogsMessage.FromString(log({}))
    for _ in range(MAX_ENTRIES + 4):
        message.http_logs.log_entry.add()

    assert access_log.receive(message.SerializeToString()) == MAX_ENTRIES + 5
    assert access_log.receive(b"\xff" * (MAX_MESSAGE + 1)) == 0
    assert len(taken) == sample(service, "access_log_entries_total", result="taken") == 1
    assert sample(service, "access_log_entries_total", result="dropped") == 6


@pytest.mark.parametrize("status", [0, 401, 403, 429])
def test_counts_of_requests_refused_elsewhere_are_undone(status: int) -> None:
    counted = {"counted": [["w", "loop:p:default:sliding_ttl::0123456789abcdef:00"]]}
    cases: list[dict[str, Any]] = [{}, {"took": (0, 0.5)}, {"action": "reject"}]

    found = [read(status=status, sessions=[SESSION, counted], **case) for case in cases]

    assert [(entry.unsent, len(entry.counted)) for entry in found] == [
        (True, 1),
        (False, 0),
        (False, 0),
    ]
    assert not found[0].failed
