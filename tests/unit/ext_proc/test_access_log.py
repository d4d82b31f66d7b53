"""What Envoy's access log tells about requests of sessions."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.engine.settlements import Entry
from extproc.errors import ProtocolError
from extproc.ext_proc.access_log import MAX_ENTRIES, MAX_MESSAGE, AccessLog, read_message
from extproc.metrics import Metrics
from extproc.pb.als_pb2 import StreamAccessLogsMessage
from extproc.sessions.rates import Usage
from tests.support.envoy_logs import JSON, SESSION, log
from tests.support.protobuf import field

STREAM = {"content-type": "text/event-stream; charset=utf-8"}


def read_entries(message: bytes) -> list[Entry]:
    """Those of sessions."""
    return read_message(message)[0]


def read(**entry: Any) -> Entry:  # noqa: ANN401  # see `add_entry`
    """The one entry, read."""
    (found,) = read_entries(log(entry))
    return found


def test_an_entry_says_what_became_of_a_request() -> None:
    """Sessions as the guard named them, sizes and status as Envoy saw them, model and tokens as the answer told them."""
    entry = read(told={"model": "gpt-4o-2024-08-06", "input": 900, "output": 40})

    assert (entry.sessions, entry.status, entry.model) == ((SESSION,), 200, "gpt-4o-2024-08-06")
    assert (entry.usage, entry.estimated) == (Usage(900, 40, 0, 0), False)
    assert (entry.failed, entry.refused) == (False, False)


@pytest.mark.parametrize(
    ("told", "usage"),
    [
        ({"input": 1_000, "output": 50, "cached": 800}, Usage(200, 50, 800, 0)),
        ({"input": 10, "output": 50, "cache_read": 800, "cache_write": 90}, Usage(10, 50, 800, 90)),
        ({"input": 1_000, "output": 50, "cached": 300, "thoughts": 70, "tool_input": 9}, Usage(709, 120, 300, 0)),
        ({"input": 5, "output": 1, "cached": 800}, Usage(0, 1, 800, 0)),
    ],
    ids=["openai", "anthropic", "gemini", "more cached than there was"],
)
def test_each_token_is_counted_once(told: dict[str, int], usage: Usage) -> None:
    """Some APIs count cached tokens as part of the prompt and others beside it; thoughts are output."""
    entry = read(told=told)

    assert (entry.usage, entry.estimated) == (usage, False)


@pytest.mark.parametrize(
    ("gateway", "usage", "estimated"),
    [
        ({"input": 1_000, "output": 50}, Usage(1_000, 50, 0, 0), False),
        ({"input": 1_000, "output": 50, "cached_input": 800, "cache_creation_input": 90}, Usage(110, 50, 800, 90), False),
        ({"input": 0, "output": 0, "cached_input": 0, "cache_creation_input": 0}, Usage(1_000, 200, 0, 0), True),
        ({"input": 20}, Usage(20, 200, 0, 0), True),
        ({"input": "900", "output": -1, "cached_input": float("inf")}, Usage(1_000, 200, 0, 0), True),
        ({"input": 5, "output": 1, "cache_creation_input": 800}, Usage(1_000, 1, 0, 800), True),
    ],
    ids=["tokens", "cached", "nothing found", "no output", "no numbers", "more cached than there was"],
)
def test_an_ai_gateway_s_counts_are_taken(gateway: dict[str, Any], usage: Usage, estimated: bool) -> None:
    """Its input includes all cached tokens; it reports zeros for an answer without counts."""
    named = {f"llm_{name}_token": count for name, count in gateway.items()}
    entry = read(gateway={**named, "model_name_override": "gpt-x"})

    assert (entry.usage, entry.estimated, entry.model) == (usage, estimated, "gpt-x")


def test_what_the_answer_says_comes_before_a_gateway_s_counts() -> None:
    """They are not mixed: each has its own way to count what is cached."""
    counts = {"llm_input_token": 9, "llm_cached_input_token": 8}
    entry = read(told={"model": "m", "input": 10, "output": 50, "cache_read": 800}, gateway=counts)

    assert (entry.usage, entry.model) == (Usage(10, 50, 800, 0), "m")


@pytest.mark.parametrize(
    ("headers", "output"),
    [
        (JSON, 200),
        (STREAM, 6),
        ({"content-type": "application/vnd.amazon.eventstream"}, 6),
        ({**JSON, "content-encoding": "gzip"}, 800),
        ({**STREAM, "content-encoding": "br"}, 25),
        ({"content-type": "Text/Event-Stream"}, 6),
        ({**JSON, "content-encoding": "Identity"}, 200),
        ({**JSON, "content-encoding": "identity"}, 200),
        ({}, 200),
    ],
)
def test_what_an_answer_does_not_say_is_estimated(headers: dict[str, str], output: int) -> None:
    """From the sizes of both bodies; a stream has an event for each few letters, and what is compressed has less air."""
    entry = read(headers=headers)

    assert (entry.usage, entry.estimated) == (Usage(1_000, output, 0, 0), True)


def test_a_stream_that_was_cut_off_has_the_prompt_it_told() -> None:
    """Only the part that is missing is estimated."""
    entry = read(told={"input": 20, "cache_read": 5_000}, headers=STREAM, sizes=(4_000, 1_280))

    assert (entry.usage, entry.estimated) == (Usage(20, 10, 5_000, 0), True)


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503, 529])
def test_errors_cost_nothing(status: int) -> None:
    """A request that got an error is not billed."""
    entry = read(status=status)

    assert (entry.usage, entry.estimated, entry.failed) == (Usage(0, 0, 0, 0), False, status >= 500)


@pytest.mark.parametrize(
    "flag", ["upstream_remote_reset", "upstream_connection_termination", "upstream_protocol_error", "local_reset"]
)
def test_an_answer_that_broke_off_upstream_failed(flag: str) -> None:
    """Whatever its status was; and what came of it is paid for."""
    entry = read(**{flag: True})

    assert (entry.failed, entry.status, entry.estimated) == (True, 200, True)


def test_an_upstream_that_failed_without_an_answer_costs_nothing() -> None:
    """Nothing came, whatever was sent."""
    entry = read(sizes=(4_000, 0), upstream_remote_reset=True)

    assert (entry.failed, entry.usage, entry.estimated) == (True, Usage(0, 0), False)


@pytest.mark.parametrize(
    ("took", "expected"),
    [((0.25, 2.75), 2_500), ((0.001, 90.002), 90_001), ((0, 3), 0), ((2, 1), 0), ((10**9, 10**12), 0), (None, 0)],
)
def test_the_upstream_s_time_is_told(took: tuple[float, float] | None, expected: int) -> None:
    """From its first byte of the request to the last one of the answer, in milliseconds; 0 where it got none."""
    assert read(took=took).model_ms == expected


def test_a_client_that_hung_up_is_no_failure() -> None:
    """There is no status then, and the call is paid for."""
    entry = read(status=0, headers={}, sizes=(400, 0))

    assert (entry.failed, entry.usage, entry.estimated) == (False, Usage(100, 0, 0, 0), True)


def test_what_we_refused_is_said_to_be_refused() -> None:
    """It is not an upstream failure, whatever status a policy gives it."""
    entry = read(action="reject", status=503)

    assert (entry.refused, entry.failed) == (True, False)
    assert not read(action="warn").refused


@pytest.mark.parametrize(
    "told",
    [
        {"input": -5, "output": float("nan"), "cached": float("inf"), "model": 7},
        {"input": "900", "output": True, "cache_read": None, "model": ["x"]},
        {"input": 1e300, "output": {"a": 1}, "cache_write": -1e9},
    ],
)
def test_numbers_that_are_none_are_not_believed(told: dict[str, Any]) -> None:
    """The numbers in an answer were written by a model, or by a server that poses as one."""
    entry = read(told=told)

    assert (entry.usage, entry.estimated, entry.model) == (Usage(1_000, 200, 0, 0), True, "")


DETAILS = {"cached_tokens": 800}
CHAT = {"prompt_tokens": 1_000, "completion_tokens": 50, "prompt_tokens_details": DETAILS}
RESPONSE = {"input_tokens": 1_000, "output_tokens": 50, "input_tokens_details": DETAILS}
STARTED = {"input_tokens": 10, "cache_read_input_tokens": 800, "cache_creation_input_tokens": 90, "output_tokens": 1}
GEMINI = {
    "promptTokenCount": 1_000,
    "candidatesTokenCount": 50,
    "cachedContentTokenCount": 300,
    "thoughtsTokenCount": 70,
    "toolUsePromptTokenCount": 9,
}
CONVERSE = {"inputTokens": 10, "outputTokens": 50, "cacheReadInputTokens": 800, "cacheWriteInputTokens": 90}


@pytest.mark.parametrize(
    ("objects", "usage"),
    [
        ({"usage": CHAT}, Usage(200, 50, 800, 0)),
        ({"response.usage": RESPONSE}, Usage(200, 50, 800, 0)),
        ({"message.usage": STARTED, "usage": {"output_tokens": 50}}, Usage(10, 50, 800, 90)),
        ({"message.usage": STARTED, "usage": {**STARTED, "input_tokens": 12, "output_tokens": 50}}, Usage(12, 50, 800, 90)),
        ({"message.usage": STARTED, "usage": {"input_tokens": None, "output_tokens": 50}}, Usage(10, 50, 800, 90)),
        ({"usageMetadata": GEMINI}, Usage(709, 120, 300, 0)),
        ({"usage": CONVERSE}, Usage(10, 50, 800, 90)),
    ],
    ids=["chat", "responses", "messages", "counted at the end", "null at the end", "gemini", "converse"],
)
def test_a_stream_tells_objects(objects: dict[str, Any], usage: Usage) -> None:
    """Envoy hands them over as text; what a later one does not say stays as an earlier one said it."""
    entry = read(told={"model": "m", **{place: json.dumps(found) for place, found in objects.items()}}, headers=STREAM)

    assert (entry.model, entry.usage, entry.estimated) == ("m", usage, False)


def test_a_message_that_only_began_has_written_nothing() -> None:
    """The output in it is none to count: it is estimated."""
    entry = read(told={"message.usage": json.dumps(STARTED)}, headers=STREAM, sizes=(4_000, 1_280))

    assert (entry.usage, entry.estimated) == (Usage(10, 10, 800, 90), True)


def _write_counts(value: str) -> str:
    """Both of a chat's counts are so."""
    return f'{{"prompt_tokens": {value}, "completion_tokens": {value}}}'


@pytest.mark.parametrize(
    "text",
    [
        *["", "null", "true", "7", '"none"', "[]", "{}", "none", "{", '{"prompt_tokens": 1, "completion_tokens": 1} {}'],
        *["[" * 8_000, '{"a":' * 1_000, '{"usage": "\\ud800"}', '{"prompt_tokens_details": [1], "input_tokens_details": 7}'],
        *map(_write_counts, ["null", "-1", "1e300", "1" * 400, "[7]", "{}", '"many"', '"nan"', '"inf"', '""', '"-7"']),
        _write_counts("7").ljust(9_000),
    ],
)
def test_a_text_that_tells_nothing_loses_nothing_else(text: str) -> None:
    """Neither the model nor what the message told before, nor the entry; what is missing is estimated."""
    entry = read(told={"model": "m", "usage": text})
    began = read(told={"message.usage": json.dumps(STARTED), "usage": text.replace("prompt", "no")})

    assert (entry.model, entry.usage, entry.estimated) == ("m", Usage(1_000, 200, 0, 0), True)
    assert (began.usage, began.estimated) == (Usage(10, 200, 800, 90), True)


@given(st.sampled_from(["usage", "message.usage", "response.usage", "usageMetadata"]), st.text())
def test_any_text_is_an_object_or_tells_nothing(place: str, text: str) -> None:
    """No text costs the entry that it came with."""
    assert read(told={place: text}).usage.input >= 0


def test_requests_of_no_session_are_left_out() -> None:
    """And so are those that are not over yet."""
    message = StreamAccessLogsMessage.FromString(log({}, {}, {}))
    message.http_logs.log_entry[0].common_properties.metadata.filter_metadata["loopguard"].Clear()
    message.http_logs.log_entry[1].common_properties.intermediate_log_entry = True

    assert len(read_entries(message.SerializeToString())) == 1
    assert read_entries(b"") == []


UNKNOWN = b"\x98\x06\x01" + b"\x99\x06" + bytes(8) + b"\x9a\x06\x02\xff\xff" + b"\x9d\x06" + bytes(4)
"""A field of each type, of the number 99."""


def test_what_else_envoy_tells_is_passed_over() -> None:
    """Fields that are not read, of every type, in every message; the parts of an entry come in any order."""
    told = {"model": "m", "input": 900, "output": 40}
    message = StreamAccessLogsMessage.FromString(log({"told": told, "upstream_remote_reset": True}))
    (entry,) = message.http_logs.log_entry
    common = entry.common_properties
    metadata = common.metadata.filter_metadata
    metadata["envoy.filters.http.jwt_authn"].update({"claims": {"sub": "s"}})
    wrapped = entry.response.response_code
    named = [metadata["loopguard"], metadata["loopguard.usage"].fields["input"], common.response_flags, common.metadata]
    for each in (*named, wrapped, common, entry.request, entry.response):
        each.MergeFromString(UNKNOWN)
    parts = field(1, common.SerializeToString()), field(3, entry.request.SerializeToString()), UNKNOWN

    for order in itertools.permutations([*parts, field(4, entry.response.SerializeToString())]):
        (found,) = read_entries(field(2, UNKNOWN + field(1, b"".join(order))) + UNKNOWN)
        assert (found.sessions, found.status, found.failed, found.model) == ((SESSION,), 200, True, "m")
        assert (found.request_bytes, found.response_bytes, found.usage) == (4_000, 800, Usage(900, 40))


def test_a_flag_that_is_not_the_upstreams_is_no_failure() -> None:
    """Envoy has flags for rate limits and faults of its own making, which we do not name."""
    message = StreamAccessLogsMessage.FromString(log({}))
    message.http_logs.log_entry[0].common_properties.response_flags.MergeFromString(b"\x60\x01")  # rate_limited

    assert not read_entries(message.SerializeToString())[0].failed


def test_a_message_that_is_cut_off_is_refused_or_read_as_far_as_it_goes() -> None:
    """Whatever is missing, no entry is made up."""
    whole = log({"told": {"input": 900, "output": 40, "model": "m"}})
    refused = 0
    for end in range(len(whole)):
        try:
            assert read_entries(whole[:end]) == []
        except ProtocolError:
            refused += 1

    assert refused == len(whole) - 1


def test_text_that_is_no_text_costs_its_own_entry_nothing() -> None:
    """Whatever name a model gives itself, the other entries of the message are read."""
    message = log({"told": {"model": "m-0", "input": 900, "output": 40}}, {"status": 201}).replace(b"m-0", b"m\xff0")

    first, second = read_entries(message)

    assert (first.model, first.usage, second.status) == ("m�0", Usage(900, 40), 201)


@given(st.binary(max_size=200))
def test_any_bytes_are_entries_or_a_protocol_error(data: bytes) -> None:
    """Nothing else comes of them."""
    for message in (data, log({}) + data):
        try:
            found = read_entries(message)
        except ProtocolError:
            continue
        assert len(found) <= MAX_ENTRIES


def _make_log(take: Callable[[Entry], None]) -> tuple[AccessLog, Callable[[str], float | None]]:
    metrics = Metrics()
    counted = "loopguard_access_log_entries_total"
    return AccessLog(take, metrics), lambda result: metrics.registry.get_sample_value(counted, {"result": result})


def test_an_entry_that_cannot_be_taken_does_not_cost_the_others() -> None:
    """What goes wrong with one is counted, and logged once a second."""
    taken: list[Entry] = []

    def take(entry: Entry) -> None:
        if entry.status == 201:
            raise ValueError
        taken.append(entry)

    access_log, counted = _make_log(take)
    access_log.receive(log({}, {"status": 201}, {"status": 202}))

    assert [entry.status for entry in taken] == [200, 202]
    assert (counted("taken"), counted("error"), counted("dropped")) == (2, 1, 0)


def test_a_flood_in_one_message_is_bounded() -> None:
    """Of too many entries the first are taken, and a message that is too large is not even parsed."""
    taken: list[Entry] = []
    access_log, counted = _make_log(taken.append)
    message = StreamAccessLogsMessage.FromString(log({}))
    for _ in range(MAX_ENTRIES + 4):
        message.http_logs.log_entry.add()

    assert access_log.receive(message.SerializeToString()) == MAX_ENTRIES + 5
    assert access_log.receive(b"\xff" * (MAX_MESSAGE + 1)) == 0
    assert (len(taken), counted("taken"), counted("dropped")) == (1, 1, 6)


@pytest.mark.parametrize("status", [0, 401, 403, 429])
def test_what_another_filter_refused_is_taken_back(status: int) -> None:
    """Nothing of it went to an upstream: it was no step, and its counts are undone. What an upstream refused stays counted."""
    counted = {"counted": [["w", "loop:p:default:sliding_ttl::0123456789abcdef:00"]]}
    unsent = read(status=status, sessions=[SESSION, counted])
    sent = read(status=status, sessions=[SESSION, counted], took=(0, 0.5))
    ours = read(status=status, sessions=[SESSION, counted], action="reject")

    assert (unsent.unsent, unsent.failed, len(unsent.counted)) == (True, False, 1)
    assert (sent.unsent, len(sent.counted)) == (False, 0)
    assert (ours.unsent, len(ours.counted)) == (False, 0)


def test_an_answer_of_envoy_itself_is_no_refusal() -> None:
    """A direct response of a route reaches no upstream either, and stays counted."""
    assert not read(status=200).unsent
    assert read(status=503).failed
    assert not read(status=503).unsent
