"""Steering: what a note says, where it stands, what is left as it was, and what becomes of requests that cannot have one."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from extproc.ext_proc.changes.steer import MAX_PLACES
from extproc.ext_proc.service import Service
from extproc.pb.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from extproc.request.notes import CLOSING, END, OPENING
from tests.support.documents import policy
from tests.support.engine import ANY, make_engine
from tests.support.looping import encoded, looked_into, looping, post, several
from tests.support.messages import body, headers
from tests.support.service import decoded, exchange, make_service, metadata_of, repeat, sample
from tests.support.steering import TURNS, ask, last_text, steered, without_notes
from tests.support.turn_writers import SHAPES, STYLES, Did, Writer, as_text


def mutated(answer: ProcessingResponse) -> dict[str, str]:
    """The headers that the upstream gets with it."""
    options = answer.request_body.response.header_mutation.set_headers
    return {option.header.key: option.header.raw_value.decode() for option in options}


def test_half_a_character_stays_as_it_was_sent() -> None:
    """Nothing but the note is new in a body that holds half of a surrogate pair."""
    sent = looping(3).replace(b"no such file", rb"no such file \ud83d")

    changed = ask(make_service(policy("p", ANY, **TURNS)), sent).request_body.response.body_mutation.body

    start = changed.rindex(rb"\ud83d") + 6
    assert changed[:start] == sent[:start]
    assert changed.endswith(sent[start:])
    assert len(changed) > len(sent)


def test_a_loop_goes_on_with_a_note() -> None:
    """The newest result says behind its own text what repeated, how often and what to do; headers and metadata say so, too."""
    service = make_service(policy("p", ANY, **TURNS))
    sent = looping(3)

    answer = ask(service, sent)

    note = last_text(steered(answer)).removeprefix("no such file")
    assert note.startswith(
        f"\n\n{OPENING}\nLoop detected: 3 of the last 3 turns were read_file with the same input and the same result."
    )
    assert "Progress means" in note
    assert note.endswith(f"After 2 more repetitions, requests will be refused.\n{CLOSING}{note[-18:-2]}{END}")
    assert mutated(answer) == {
        "X-Fairvisor-Warning": "loop_steer",
        "x-loopguard-steered": "1",
        "content-length": str(len(answer.request_body.response.body_mutation.body)),
    }
    assert metadata_of(answer) == {
        "action": "steer",
        "reason": "loop_detected",
        "policy": "p",
        "fingerprint": metadata_of(answer)["fingerprint"],
        "count": 3,
        "tenant": metadata_of(answer)["tenant"],
        "tool": "read_file",
        "cause": "same_error",
        "warning": "loop_steer",
    }
    assert sample(service, "requests_total", policy="p", mode="enforce", action="steer") == 1
    assert sample(service, "loops_detected_total", policy="p", mode="enforce", action="steer") == 1


def test_every_request_of_a_loop_gets_the_note_until_it_is_refused() -> None:
    """The client's own copy has no note: each request gets one on its newest result alone; a new result ends that."""
    service = make_service(policy("p", ANY, **TURNS))

    third, fourth, fifth = [ask(service, looping(times)) for times in (3, 4, 5)]
    other = ask(service, looping(4, result="found"))

    assert [json.dumps(steered(answer)).count(OPENING) for answer in (third, fourth)] == [1, 1]
    assert CLOSING in last_text(steered(fourth))
    assert fifth.immediate_response.status.code == 429
    assert steered(other) != {}
    assert steered(ask(service, looping(2))) == {}


@given(st.text(), st.sampled_from([None, 1, 2]))
@example(CLOSING, None)
@example(f"{OPENING} {CLOSING.removeprefix('~')}", None)
def test_nothing_but_the_note_is_added(result: str, indent: int | None) -> None:
    """Whatever the results are and however the body is spelled, cutting the note out gives the very bytes that were sent."""
    sent = json.dumps(json.loads(looping(3, result=result)), indent=indent, ensure_ascii=indent != 1).encode("utf-8", "replace")
    answer = ask(make_service(policy("p", ANY, **TURNS)), sent)

    changed = answer.request_body.response.body_mutation.body
    assert len(changed) > len(sent)
    assert without_notes(changed) == sent
    assert steered(answer)["messages"][:-1] == json.loads(sent)["messages"][:-1]


_WRITERS: dict[str, Writer] = {**SHAPES, "text": lambda turns: as_text(turns, STYLES["react"])}


@given(st.lists(st.text(min_size=1), min_size=1, max_size=3), st.sampled_from(sorted(_WRITERS)), st.sampled_from([None, 1]))
def test_in_every_api_nothing_but_the_note_is_added(results: list[str], api: str, indent: int | None) -> None:
    """The new body is the old one, to the byte, and the note; it stands in each of the newest results and nowhere else."""
    calls = tuple((f"f{number}", {"a": 1}) for number, _ in enumerate(results))
    value = _WRITERS[api]([Did(calls, tuple(results))] * 3)
    sent = json.dumps(value, indent=indent, ensure_ascii=indent is None).encode()

    changed = ask(make_service(policy("p", ANY, **TURNS)), sent).request_body.response.body_mutation.body

    assert without_notes(changed) == sent
    notes = changed.count(OPENING.encode())
    assert notes == (1 if api == "text" else len(results))


@pytest.mark.parametrize(
    "content",
    [
        [],
        [{"type": "image_url", "image_url": {"url": "data:"}}],
        [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}],
        [{"type": "text", "text": ""}],
        "",
        '\U0001f400 \\" \n',
    ],
)
def test_results_without_a_text_get_one(content: Any) -> None:  # noqa: ANN401  # of a message
    """Where the shape allows a block of text; what is there stays, whatever it is."""
    turn = [*json.loads(looping(1))["messages"][1:2], {"role": "tool", "tool_call_id": "c", "content": content}]
    sent = encoded({"messages": turn * 3})

    changed = ask(make_service(policy("p", ANY, **TURNS)), sent).request_body.response.body_mutation.body

    found = json.loads(changed)["messages"][-1]["content"]
    assert OPENING in json.dumps(found)
    assert without_notes(changed) == sent
    assert (
        isinstance(content, str) or [block["type"] for block in content] == [block["type"] for block in found][: len(content)]
    )


def test_a_result_that_takes_no_text_has_no_note() -> None:
    """Null is no text, and nothing is put in its place."""
    turn = [*json.loads(looping(1))["messages"][1:2], {"role": "tool", "tool_call_id": "c", "content": None}]
    service = make_service(policy("p", ANY, **TURNS))

    answer = ask(service, encoded({"messages": turn * 3}))

    assert steered(answer) == {}
    assert sample(service, "unsteered_total", policy="p", reason="no_result") == 1


def test_a_windowed_detector_steers_by_its_count() -> None:
    """`exact` looks into no body, and still has the note put into it."""
    service = make_service(policy("p", ANY, action="steer", escalate={"reject": 4}))

    answers = [ask(service, looping(1)) for _ in range(4)]

    assert [steered(answer) != {} for answer in answers] == [False, False, True, False]
    assert "this identical request (POST /v1/chat/completions) has been sent 3 times" in last_text(steered(answers[2]))
    assert answers[3].immediate_response.status.code == 429


# --- what the note says


def told(**loop: Any) -> str:  # noqa: ANN401  # keys of loop_detection
    """The note that a policy gives a loop of three."""
    return last_text(steered(ask(make_service(policy("p", ANY, **{**TURNS, **loop})), looping(3))))


def test_operators_can_write_the_note_in_their_own_words() -> None:
    """Placeholders are filled in, and the marks stay, so that the note is not taken for the tool's own words."""
    note = told(
        steer_note='Stop: {what} ({count}x {tools}, {policy}). {{Try}} "{reason}". {instead}',
        tools={"read_*": {"reason": " The file is gone. "}},
    )

    assert note.startswith(f"no such file\n\n{OPENING}\nStop: 3 of the last 3 turns were read_file with the same input and")
    assert "(3x read_file, p). {Try} 'The file is gone.'. Repeating it" in note


def test_the_reason_of_a_tool_is_part_of_the_note() -> None:
    """What the operator says about a tool comes between what repeated and what to do."""
    note = told(tools={"read_*": {"reason": "The file is gone."}})

    assert "the same result. " in note
    assert " The file is gone. Repeating it" in note


def test_a_note_without_words_is_written_in_ours() -> None:
    """An operator's text may consist of placeholders for what is not there."""
    assert "Loop detected: 3 of the last 3 turns" in told(steer_note=" {reason} ")


def test_weak_loops_are_not_counted_down() -> None:
    """How long they may go on depends on more than their count."""
    note = last_text(steered(ask(make_service(policy("p", ANY, **TURNS, weak_threshold=14)), looping(3, result="queued"))))

    assert note.rstrip("0123456789abcdef~]").endswith(f"If this continues, requests will be refused.\n{CLOSING}")


def test_no_refusal_is_announced_where_none_follows() -> None:
    """A policy that steers and nothing else does not threaten."""
    assert "refused" not in told(escalate={})


def test_a_tool_cannot_break_out_of_a_note() -> None:
    """A model may call its tool what it likes: quotes and marks in there end neither the note nor its recognition."""
    name = f'f"{CLOSING}{OPENING}"'
    sent = looping(3, tool=name)

    answer = ask(make_service(policy("p", ANY, **TURNS)), sent)

    changed = answer.request_body.response.body_mutation.body
    before, _, _ = changed.rpartition(b"\\n\\n" + OPENING.encode())
    assert sent.startswith(before)
    assert last_text(steered(answer)).count(CLOSING) == 1


# --- notes that are there already


@pytest.mark.parametrize("similarity", ["canonical", "tail", "tool_calls", "turns"])
def test_a_note_is_not_compared(similarity: str) -> None:
    """A second Loopguard sees the requests as the client sent them: with the first one's notes they are equal."""
    first = make_service(policy("p", ANY, **TURNS))
    engine = make_engine(policy("q", ANY, similarity=similarity, threshold_identical_requests=3))
    sent = looping(3)
    noted = ask(first, sent).request_body.response.body_mutation.body

    plain, second = [looked_into(engine, data).enforcing.candidates[0] for data in (sent, noted)]

    assert plain.fingerprint == second.fingerprint
    assert plain.repeat == second.repeat


def test_a_note_is_not_repeated() -> None:
    """What a Loopguard on the way has steered is left as it is, and reported as steered."""
    service = make_service(policy("p", ANY, **TURNS))
    noted = ask(service, looping(3)).request_body.response.body_mutation.body

    answer = ask(service, noted)

    assert answer.request_body.response.body_mutation.body == noted
    assert metadata_of(answer)["action"] == "steer"
    assert mutated(answer)["x-loopguard-steered"] == "1"


# --- what cannot be steered


def stream(*messages: ProcessingRequest, **loop: Any) -> tuple[Service, ProcessingResponse]:  # noqa: ANN401  # keys of loop_detection
    """The answer to the third of equal requests under a policy that steers."""
    service = make_service(policy("p", ANY, **{"action": "steer", **loop}))
    return service, repeat(service, *messages, times=3)


@pytest.mark.parametrize(
    ("messages", "loop", "reason"),
    [
        ([headers(end=True)], {}, "no_body"),
        ([headers()], {"body": "ignore"}, "no_body"),
        ([headers(), body(b'{"messages"')], {}, "not_json"),
        ([headers(), body(b'{"a": 1}')], {}, "no_messages"),
        ([headers(), body(encoded({"messages": [{"role": "assistant", "content": "x"}]}))], {}, "no_result"),
        ([headers(content_encoding="gzip"), body(gzip.compress(looping(3), mtime=0))], {}, "content_encoding"),
        ([headers(content_encoding="br"), body(b"?")], {}, "content_encoding"),
        ([headers(), body(looping(3).decode().encode("utf-16"))], {}, "not_json"),
        ([headers(), body(looping(3))], {"max_inspect_bytes": 9}, "inspect_limit"),
        ([headers(mode="STREAMED"), body(looping(3))], {}, "body_mode"),
        ([headers(mode="BUFFERED_PARTIAL"), body(looping(3))], {}, "body_mode"),
        ([headers(mode=None), body(looping(3))], {}, "body_mode"),
    ],
)
def test_what_cannot_have_a_note_gets_a_warning(messages: list[ProcessingRequest], loop: dict[str, Any], reason: str) -> None:
    """Its body is not changed; it passes as under `warn`, is reported as such everywhere, and is counted by its reason."""
    service, answer = stream(*messages, **loop)

    kind = answer.WhichOneof("response")
    assert kind is not None
    response = getattr(answer, kind).response
    assert not response.HasField("body_mutation")
    assert [option.header.raw_value for option in response.header_mutation.set_headers] == [b"loop_warn"]
    assert metadata_of(answer)["action"] == "warn"
    assert metadata_of(answer)["warning"] == "loop_warn"
    assert sample(service, "unsteered_total", policy="p", reason=reason) == 1
    assert sample(service, "requests_total", policy="p", mode="enforce", action="warn") == 1
    assert sample(service, "requests_total", policy="p", mode="enforce", action="steer") == 0


def test_who_only_looks_on_changes_nothing() -> None:
    """In observability mode the answer is not read: it is a warning, and counted."""
    first = headers(mode=None)
    first.observability_mode = True

    service, answer = stream(first, body(looping(3)))

    assert steered(answer) == {}
    assert sample(service, "unsteered_total", policy="p", reason="observed") == 1


def test_a_shadow_policy_never_steers() -> None:
    """What it would have done is reported, and the body stays as it is, also beside a policy that enforces."""
    service = make_service(policy("s", ANY, mode="shadow", **TURNS), policy("e", ANY, action="warn"))

    answer = [ask(service, looping(3)) for _ in range(3)][-1]

    assert steered(answer) == {}
    assert metadata_of(answer) | {"shadow_action": "steer", "shadow_policy": "s", "action": "warn"} == metadata_of(answer)
    assert sample(service, "unsteered_total", policy="s", reason="no_result") == 0
    assert sample(service, "requests_total", policy="s", mode="shadow", action="steer") == 3


def test_a_shadow_policy_that_steers_keeps_no_body() -> None:
    """Nothing is going to be changed, so no bytes are kept for it; those of an enforcing policy are."""
    kept = [make_engine(policy("p", ANY, mode=mode, action="steer")).prepare(post()) for mode in ("shadow", "enforce")]

    assert [evaluation.steers for evaluation in kept if evaluation is not None] == [0, 2**20]


# --- beside other policies


def test_a_note_is_added_whatever_else_happens_to_a_request_that_goes_on() -> None:
    """A policy that holds the request is stricter and leads; the note goes along, and its warning is the steering one."""
    service = make_service(policy("w", ANY, action="warn"), policy("s", ANY, **TURNS), policy("t", ANY, action="throttle"))

    for _ in range(3):
        reply = exchange(service, headers(), body(looping(3)))[-1]

    answer = decoded(reply)
    assert reply.hold_ms == 300
    assert OPENING in last_text(steered(answer))
    assert metadata_of(answer)["action"] == "throttle"
    assert metadata_of(answer)["warning"] == mutated(answer)["X-Fairvisor-Warning"] == "loop_steer"


def test_a_refusal_has_no_note() -> None:
    """The strictest answer wins, of another policy or of another detector."""
    service = make_service(several("p", TURNS, {"threshold_identical_requests": 2}))

    answers = [ask(service, looping(3)) for _ in range(2)]

    assert OPENING in last_text(steered(answers[0]))
    assert answers[1].immediate_response.status.code == 429


def test_many_results_at_once_get_a_bounded_number_of_notes() -> None:
    """Each of the newest results gets it, up to a number of which the model sees enough."""
    calls = [{"id": f"c{number}", "function": {"name": "f", "arguments": "{}"}} for number in range(MAX_PLACES + 5)]
    turn = [
        {"role": "assistant", "tool_calls": calls},
        *[{"role": "tool", "tool_call_id": call["id"], "content": "none"} for call in calls],
    ]

    answer = ask(make_service(policy("p", ANY, **TURNS)), encoded({"messages": turn * 3}))

    assert [OPENING in message["content"] for message in steered(answer)["messages"][-len(calls) :]] == [False] * 5 + [
        True
    ] * MAX_PLACES
