"""Steering and landing: a landed request forbids tools and asks for a final answer."""

import gzip
import json
from functools import partial
from itertools import count
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from extproc.ext_proc.changes.steer import LANDING, MAX_PLACES
from extproc.pb.external_processor_pb2 import ProcessingRequest
from extproc.request.notes import CLOSING, END, OPENING
from tests.support.documents import policy
from tests.support.engine import ANY, make_engine
from tests.support.looping import looked_into, looping, post, several
from tests.support.messages import body, encoded, headers
from tests.support.service import (
    ask,
    decoded,
    exchange,
    make_service,
    metadata_of,
    repeat,
    sample,
    status,
)
from tests.support.steering import (
    DECLARED,
    FORBIDDEN,
    TURNS,
    changed,
    last_text,
    set_headers,
    steered,
    without_notes,
)
from tests.support.turn_writers import PATHS, SHAPES, STYLES, Did, Writer, as_text

LADDER: dict[str, Any] = {
    "similarity": "turns",
    "action": "steer",
    "escalate": {"land": 5, "reject": 7},
}
NOTE: dict[str, Any] = {"similarity": "turns", "action": "land", "escalate": {"reject": 7}}
STUCK = Did((("f", {"a": 1}),), ("no such file",))


def test_loop_gets_a_note_headers_and_metadata() -> None:
    service = make_service(policy("p", ANY, **TURNS))

    answer = ask(service, looping(3))

    note = last_text(steered(answer)).removeprefix("no such file")
    assert note.startswith(
        f"\n\n{OPENING}\nLoop detected: 3 of the last 3 turns were read_file with the same input "
        "and the same result."
    )
    assert "Progress means" in note
    assert note.endswith(
        f"After 2 more repetitions, requests will be refused.\n{CLOSING}{note[-18:-2]}{END}"
    )
    assert set_headers(answer) == {
        "X-Fairvisor-Warning": "loop_steer",
        "x-loopguard-steered": "1",
        "content-length": str(len(changed(answer))),
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


def test_loop_is_steered_then_landed_then_refused() -> None:
    service = make_service(policy("p", ANY, **LADDER))
    tools = DECLARED["chat"] | {"tool_choice": "auto"}

    answers = [ask(service, looping(times, tool="f", **tools)) for times in range(2, 8)]
    other = ask(service, looping(4, result="found"))

    assert [metadata_of(answer).get("action") for answer in answers] == [
        None,
        "steer",
        "steer",
        "land",
        "land",
        "reject",
    ]
    assert [changed(answer).count(OPENING.encode()) for answer in (*answers, other)] == [
        0,
        1,
        1,
        1,
        1,
        0,
        1,
    ]
    assert status(answers[-1]) == 429
    assert set_headers(answers[3]) == {
        "X-Fairvisor-Warning": "loop_land",
        "x-loopguard-steered": "1",
        "x-loopguard-narrowed": "1",
        "content-length": str(len(changed(answers[3]))),
    }
    assert LANDING in last_text(steered(answers[3]))
    assert sample(service, "requests_total", policy="p", mode="enforce", action="land") == 2


_WRITERS: dict[str, Writer] = {**SHAPES, "text": lambda turns: as_text(turns, STYLES["react"])}


@given(
    st.lists(st.text(min_size=1), min_size=1, max_size=3),
    st.sampled_from(sorted(_WRITERS)),
    st.sampled_from([None, 1, 2]),
)
@example([CLOSING], "chat", None)
@example([f"{OPENING} {CLOSING.removeprefix('~')}"], "chat", None)
def test_only_the_note_is_added_in_every_api(
    results: list[str], api: str, indent: int | None
) -> None:
    calls = tuple((f"f{number}", {"a": 1}) for number, _ in enumerate(results))
    value = _WRITERS[api]([Did(calls, tuple(results))] * 3)
    sent = json.dumps(value, indent=indent, ensure_ascii=indent != 1).encode("utf-8", "replace")

    new = changed(ask(make_service(policy("p", ANY, **TURNS)), sent))

    assert without_notes(new) == sent
    assert new.count(OPENING.encode()) - sent.count(OPENING.encode()) == (
        1 if api == "text" else len(results)
    )


@pytest.mark.parametrize("loop", [TURNS, NOTE], ids=["steer", "land"])
@pytest.mark.parametrize(("front", "spaced"), [(False, True), (True, False)])
@pytest.mark.parametrize("api", [*sorted(DECLARED), "auto"])
def test_only_note_and_tool_choice_change(
    api: str, front: bool, spaced: bool, loop: dict[str, Any]
) -> None:
    service = make_service(policy("p", ANY, **loop | {"escalate": {}}))
    api, declared = (
        ("chat", DECLARED["chat"] | {"tool_choice": "auto"})
        if api == "auto"
        else (api, DECLARED[api])
    )
    for times in (3, 4, 5):
        history = SHAPES[api]([STUCK] * times)
        value = declared | history if front else history | declared
        sent = json.dumps(value, indent=2 if spaced else None).encode()

        new = changed(decoded(exchange(service, headers(PATHS[api]), body(sent))[-1]))

        left = without_notes(new)
        assert new.count(OPENING.encode()) == 1
        if loop is TURNS or not FORBIDDEN[api]:
            assert left == sent
        assert [*json.loads(left).items()] == [
            *(value | (FORBIDDEN[api] if loop is NOTE else {})).items()
        ]
    unable = loop is NOTE and not FORBIDDEN[api]
    assert sample(service, "unnarrowed_total", policy="p", reason="no_choice") == (
        3 if unable else 0
    )


@pytest.mark.parametrize("declared", [[], DECLARED["gemini"]["tools"]])
def test_landing_leaves_tools_that_gemini_runs_itself(declared: list[object]) -> None:
    """Without them, the prompt would begin in another way."""
    sent = SHAPES["gemini"]([STUCK] * 3) | {"tools": [*declared, {"googleSearch": {}}]}

    answer = decoded(
        exchange(
            make_service(policy("p", ANY, **NOTE)), headers(PATHS["gemini"]), body(encoded(sent))
        )[-1]
    )

    assert json.loads(without_notes(changed(answer))) == (
        sent | FORBIDDEN["gemini"] if declared else sent
    )


def test_agent_without_declared_tools_lands_by_the_note() -> None:
    sent = encoded(as_text([Did((("ls", {}),), ("no such file",))] * 3, STYLES["fence"]))

    answer = ask(make_service(policy("p", ANY, **NOTE)), sent)

    assert LANDING.encode() in changed(answer)
    assert without_notes(changed(answer)) == sent
    assert "x-loopguard-narrowed" not in set_headers(answer)


@pytest.mark.parametrize("api", sorted(DECLARED))
def test_message_of_a_person_after_a_landing_starts_anew(api: str) -> None:
    service = make_service(policy("p", ANY, **LADDER))
    ended = [STUCK] * 5 + [
        Did((), (), "Please try once more, with the new server.", "I could not read the file.")
    ]

    actions = []
    for turns in ([STUCK] * 5, *[[*ended, *[STUCK] * times] for times in range(5)]):
        sent = encoded(SHAPES[api](turns) | DECLARED[api])
        answer = decoded(exchange(service, headers(PATHS[api]), body(sent))[-1])
        actions.append(metadata_of(answer).get("action"))

    assert actions == ["land", None, None, None, "steer", "steer"]


def _return(content: object) -> bytes:
    """Three calls that bring this back, of tools that are declared."""
    turn = [
        *json.loads(looping(1))["messages"][1:2],
        {"role": "tool", "tool_call_id": "c", "content": content},
    ]
    return encoded({"messages": turn * 3, **DECLARED["chat"]})


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
def test_results_without_text_get_the_note(content: Any) -> None:  # noqa: ANN401  # of a message
    new = changed(ask(make_service(policy("p", ANY, **TURNS)), _return(content)))

    found = json.loads(new)["messages"][-1]["content"]
    assert OPENING in json.dumps(found)
    assert without_notes(new) == _return(content)
    if isinstance(content, list):
        assert [block["type"] for block in found[: len(content)]] == [
            block["type"] for block in content
        ]


def test_notes_on_parallel_results_are_bounded() -> None:
    results = MAX_PLACES + 5
    sent = SHAPES["chat"]([Did((("f", {}),) * results, ("none",) * results)] * 3)

    answer = ask(make_service(policy("p", ANY, **TURNS)), encoded(sent))

    noted = [OPENING in json.dumps(message) for message in steered(answer)["messages"][-results:]]
    assert noted == [False] * 5 + [True] * MAX_PLACES


def test_windowed_detector_steers_by_its_count() -> None:
    service = make_service(policy("p", ANY, action="steer", escalate={"reject": 4}))

    answers = [ask(service, looping(1)) for _ in range(4)]

    assert [steered(answer) != {} for answer in answers] == [False, False, True, False]
    assert "this identical request (POST /v1/chat/completions) has been sent 3 times" in last_text(
        steered(answers[2])
    )
    assert status(answers[3]) == 429


# ---- The text of a note

FILE_GONE = {"tools": {"read_*": {"reason": " The file is gone. "}}}
OWN_WORDS = 'Stop: {what} ({count}x {tools}, {policy}). {{Try}} "{reason}". {instead}'
SAID: dict[str, tuple[dict[str, Any], bytes, str, bool]] = {
    "operators' words": (
        TURNS | FILE_GONE | {"steer_note": OWN_WORDS},
        looping(3),
        f"\n\n{OPENING}\nStop: 3 of the last 3 turns were read_file with the same input and",
        True,
    ),
    "placeholders": (
        TURNS | FILE_GONE | {"steer_note": OWN_WORDS},
        looping(3),
        "(3x read_file, p). {Try} 'The file is gone.'. Repeating it",
        True,
    ),
    "a reason": (TURNS | FILE_GONE, looping(3), " The file is gone. Repeating it", True),
    "no words": (
        TURNS | {"steer_note": " {reason} "},
        looping(3),
        "Loop detected: 3 of the last 3 turns",
        True,
    ),
    "a weak loop": (  # its end depends on more than its count
        TURNS | {"weak_threshold": 14},
        looping(3, result="queued"),
        f"If this continues, requests will be refused.\n{CLOSING}",
        True,
    ),
    "no refusal": (TURNS | {"escalate": {}}, looping(3), "refused", False),
    "a landing follows": (
        LADDER,
        looping(3),
        "After 2 more repetitions, tool calls are forbidden.",
        True,
    ),
    "the first note": (LADDER, looping(3), "An earlier note said so", False),
    "the second note": (
        LADDER,
        looping(4),
        "An earlier note said so, and nothing has changed.",
        True,
    ),
    "a landing is next": (
        LADDER,
        looping(4),
        "At the next repetition, tool calls are forbidden.",
        True,
    ),
    "operators' words, landing": (
        NOTE | {"steer_note": "Stop: {cause}"},
        looping(3),
        f" {LANDING}\n",
        True,
    ),
    "a cause": (
        NOTE | {"steer_note": "Stop: {cause}"},
        looping(3),
        "Stop: The error was \u201cno such file\u201d each time.",
        True,
    ),
}


@pytest.mark.parametrize(("loop", "sent", "words", "said"), SAID.values(), ids=SAID)
def test_note_says_what_repeats_and_what_comes_next(
    loop: dict[str, Any], sent: bytes, words: str, said: bool
) -> None:
    note = last_text(steered(ask(make_service(policy("p", ANY, **loop)), sent)))

    assert (words in note) is said


def test_tool_name_cannot_break_out_of_a_note() -> None:
    sent = looping(3, tool=f'f"{CLOSING}{OPENING}"')

    answer = ask(make_service(policy("p", ANY, **TURNS)), sent)

    before, _, _ = changed(answer).rpartition(b"\\n\\n" + OPENING.encode())
    assert sent.startswith(before)
    assert last_text(steered(answer)).count(CLOSING) == 1


# ---- Bodies that have a note


@pytest.mark.parametrize("similarity", ["canonical", "tail", "tool_calls", "turns"])
def test_notes_are_left_out_of_comparisons(similarity: str) -> None:
    """With the notes of another Loopguard, requests are equal to those that the client sent."""
    engine = make_engine(policy("q", ANY, similarity=similarity, threshold_identical_requests=3))
    sent = looping(3)
    noted = changed(ask(make_service(policy("p", ANY, **TURNS)), sent))

    plain, second = [looked_into(engine, data).enforcing.active[0] for data in (sent, noted)]

    assert (plain.fingerprint, plain.repeat) == (second.fingerprint, second.repeat)


# ---- Requests that cannot be steered


def _observed() -> ProcessingRequest:
    first = headers(mode=None)
    first.observability_mode = True
    return first


@pytest.mark.parametrize(
    ("messages", "loop", "reason"),
    [
        ([headers(end=True)], {}, "no_body"),
        ([headers()], {"body": "ignore"}, "no_body"),
        ([headers(), body(b'{"messages"')], {}, "not_json"),
        ([headers(), body(b'{"a": 1}')], {}, "no_messages"),
        (
            [headers(), body(encoded({"messages": [{"role": "assistant", "content": "x"}]}))],
            {},
            "no_result",
        ),
        (
            [headers(), body(_return(None))],
            {},
            "no_result",
        ),  # null is no text, and nothing is put in its place
        (
            [headers(), body(_return(None))],
            {"action": "land"},
            "no_result",
        ),  # its tools stay as well
        (
            [headers(content_encoding="gzip"), body(gzip.compress(looping(3), mtime=0))],
            {},
            "content_encoding",
        ),
        ([headers(content_encoding="br"), body(b"?")], {}, "content_encoding"),
        ([headers(), body(looping(3).decode().encode("utf-16"))], {}, "not_json"),
        ([headers(), body(looping(3))], {"max_inspect_bytes": 9}, "inspect_limit"),
        ([headers(mode="STREAMED"), body(looping(3))], {}, "body_mode"),
        ([headers(mode="BUFFERED_PARTIAL"), body(looping(3))], {}, "body_mode"),
        ([headers(mode=None), body(looping(3))], {}, "body_mode"),
        ([_observed(), body(looping(3))], {}, "observed"),  # the answer is not read
    ],
)
def test_request_that_cannot_have_a_note_gets_a_warning(
    messages: list[ProcessingRequest], loop: dict[str, Any], reason: str
) -> None:
    service = make_service(policy("p", ANY, **{"action": "steer", **loop}))

    answer = repeat(service, *messages, times=3)

    response = (
        answer.request_body.response
        if answer.HasField("request_body")
        else answer.request_headers.response
    )
    assert not response.HasField("body_mutation")
    assert [option.header.raw_value for option in response.header_mutation.set_headers] == [
        b"loop_warn"
    ]
    assert metadata_of(answer)["action"] == "warn"
    assert metadata_of(answer)["warning"] == "loop_warn"
    assert sample(service, "unsteered_total", policy="p", reason=reason) == 1
    assert sample(service, "requests_total", policy="p", mode="enforce", action="warn") == 1
    assert sample(service, "requests_total", policy="p", mode="enforce", action="steer") == 0


def test_shadow_policy_never_steers() -> None:
    shadow = policy("s", ANY, mode="shadow", **TURNS)
    service = make_service(shadow, policy("e", ANY, action="warn"))
    keeping = [make_engine(made).prepare(post()) for made in (shadow, policy("p", ANY, **TURNS))]

    answer = [ask(service, looping(3)) for _ in range(3)][-1]

    assert steered(answer) == {}
    assert (
        metadata_of(answer).items()
        >= {"shadow_action": "steer", "shadow_policy": "s", "action": "warn"}.items()
    )
    assert sample(service, "unsteered_total", policy="s", reason="no_result") == 0
    assert sample(service, "requests_total", policy="s", mode="shadow", action="steer") == 3
    # Bytes of the body
    assert [evaluation.steers for evaluation in keeping if evaluation is not None] == [
        0,
        2**20,
    ]


@pytest.mark.sources  # compiled classes keep their methods
def test_edit_is_charged_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits for the processor, the clock goes on."""
    service, spent = make_service(policy("p", ANY, **LADDER)), list[float]()
    monkeypatch.setattr(
        "extproc.ext_proc.changes.changes.perf_counter", partial(next, count(0, 10))
    )
    monkeypatch.setattr(service.budget, "allows", lambda *_, **__: True)
    monkeypatch.setattr(service.budget, "spend", lambda _, seconds, **__: spent.append(seconds))

    steered(ask(service, looping(3)))

    assert max(spent) == 0.05


# ---- Beside other policies


def test_refusal_has_no_note() -> None:
    service = make_service(several("p", TURNS, {"threshold_identical_requests": 2}))

    answers = [ask(service, looping(3)) for _ in range(2)]

    assert OPENING in last_text(steered(answers[0]))
    assert status(answers[1]) == 429
