"""Landing: a request that goes on with tool calls forbidden, and with a note that asks for a final answer."""

from __future__ import annotations

import json
from functools import partial
from itertools import count
from typing import Any

import pytest

from extproc.ext_proc.changes.steer import LANDING
from extproc.request.notes import OPENING
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.looping import encoded, looping
from tests.support.messages import body, headers
from tests.support.service import decoded, exchange, make_service, metadata_of, sample
from tests.support.steering import FORBIDDEN, ask, last_text, steered, without_notes
from tests.support.turn_writers import PATHS, SHAPES, STYLES, Did, as_text

LADDER: dict[str, Any] = {"similarity": "turns", "action": "steer", "escalate": {"land": 5, "reject": 7}}
NOTE: dict[str, Any] = {"similarity": "turns", "action": "land", "escalate": {"reject": 7}}

DECLARED: dict[str, dict[str, Any]] = {
    "chat": {"tools": [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g"}}]},
    "ollama": {"tools": [{"type": "function", "function": {"name": "f"}}]},
    "responses": {"tools": [{"type": "function", "name": "f"}], "tool_choice": "required"},
    "anthropic": {"tools": [{"name": "f", "input_schema": {}}, {"name": "g", "input_schema": {}}]},
    "gemini": {"tools": [{"functionDeclarations": [{"name": "f"}, {"name": "g"}]}]},
    "bedrock": {"toolConfig": {"tools": [{"toolSpec": {"name": "f"}}, {"toolSpec": {"name": "g"}}]}},
}
"""Two tools, or one, in each API."""


def test_a_loop_is_steered_then_landed_then_refused() -> None:
    """By its count; headers, metadata and metrics say which."""
    service = make_service(policy("p", ANY, **LADDER))
    tools = DECLARED["chat"] | {"tool_choice": "auto"}

    answers = [ask(service, looping(times, tool="f", **tools)) for times in range(2, 8)]

    assert [metadata_of(answer).get("action") for answer in answers[:-1]] == [None, "steer", "steer", "land", "land"]
    assert answers[-1].immediate_response.status.code == 429
    landed = answers[3]
    options = landed.request_body.response.header_mutation.set_headers
    assert {option.header.key: option.header.raw_value.decode() for option in options} == {
        "X-Fairvisor-Warning": "loop_land",
        "x-loopguard-steered": "1",
        "x-loopguard-narrowed": "1",
        "content-length": str(len(landed.request_body.response.body_mutation.body)),
    }
    assert steered(landed)["tool_choice"] == "none"
    assert LANDING in last_text(steered(landed))
    assert sample(service, "requests_total", policy="p", mode="enforce", action="land") == 2


def test_notes_say_what_comes_next() -> None:
    """The first note counts down to the landing, the second knows of the first."""
    service = make_service(policy("p", ANY, **LADDER))

    first, second = [last_text(steered(ask(service, looping(times)))) for times in (3, 4)]

    assert "After 2 more repetitions, tool calls are forbidden." in first
    assert "An earlier note said so" not in first
    assert "An earlier note said so, and nothing has changed." in second
    assert "At the next repetition, tool calls are forbidden." in second


@pytest.mark.sources  # compiled classes keep their methods
def test_an_edit_costs_its_tenant_little_however_long_other_processes_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """While an edit waits for the processor, the clock goes on."""
    service, spent = make_service(policy("p", ANY, **LADDER)), list[float]()
    monkeypatch.setattr("extproc.ext_proc.changes.changes.perf_counter", partial(next, count(0, 10)))
    monkeypatch.setattr(service.budget, "allows", lambda *_, **__: True)
    monkeypatch.setattr(service.budget, "spend", lambda _, seconds, **__: spent.append(seconds))

    steered(ask(service, looping(3)))

    assert max(spent) == 0.05


@pytest.mark.parametrize("api", sorted(DECLARED))
def test_each_api_lands_in_its_own_way(api: str) -> None:
    """No tool may be called, and nothing but the choice and the note is new."""
    sent = SHAPES[api]([Did((("f", {"a": 1}),), ("no such file",))] * 3) | DECLARED[api]
    service = make_service(policy("p", ANY, **NOTE))

    answer = decoded(exchange(service, headers(PATHS[api]), body(encoded(sent)))[-1])

    changed = answer.request_body.response.body_mutation.body
    assert changed.count(OPENING.encode()) == 1
    value = json.loads(without_notes(changed))
    assert value == sent | FORBIDDEN[api]
    assert sample(service, "unnarrowed_total", policy="p", reason="no_choice") == (not FORBIDDEN[api])


@pytest.mark.parametrize("declared", [[], DECLARED["gemini"]["tools"]])
def test_a_landing_leaves_the_tools_that_gemini_runs(declared: list[object]) -> None:
    """No choice forbids them; without them, the prompt would begin in another way."""
    history = SHAPES["gemini"]([Did((("f", {"a": 1}),), ("no such file",))] * 3)
    sent = history | {"tools": [*declared, {"googleSearch": {}}]}

    answer = decoded(exchange(make_service(policy("p", ANY, **NOTE)), headers(PATHS["gemini"]), body(encoded(sent)))[-1])

    changed = json.loads(without_notes(answer.request_body.response.body_mutation.body))
    assert changed == (sent | FORBIDDEN["gemini"] if declared else sent)


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("front", [False, True])
@pytest.mark.parametrize("api", sorted(DECLARED))
def test_every_byte_around_a_note_stays_as_the_history_grows(api: str, front: bool, spaced: bool) -> None:
    """Of later requests, only what is new is decoded, whether the tools are before the messages or behind them."""
    service = make_service(policy("p", ANY, similarity="turns", action="steer"))
    for times in (3, 4, 5):
        history = SHAPES[api]([Did((("f", {"a": 1}),), ("no such file",))] * times)
        sent = json.dumps(DECLARED[api] | history if front else history | DECLARED[api], indent=2 if spaced else None).encode()

        answer = decoded(exchange(service, headers(PATHS[api]), body(sent))[-1])

        changed = answer.request_body.response.body_mutation.body
        assert changed.count(OPENING.encode()) == 1
        assert without_notes(changed) == sent


@pytest.mark.parametrize("front", [False, True])
def test_a_landing_changes_only_the_choice_beside_its_note(front: bool) -> None:
    """Whether the tools are before the messages or behind them, and in each request of a growing history."""
    service = make_service(policy("p", ANY, **NOTE))
    tools = DECLARED["chat"] | {"tool_choice": "auto"}
    for times in (3, 4, 5):
        history = SHAPES["chat"]([Did((("f", {"a": 1}),), ("no such file",))] * times)

        answer = ask(service, encoded(tools | history if front else history | tools))

        left = tools | {"tool_choice": "none"}
        expected = encoded(left | history if front else history | left)
        assert without_notes(answer.request_body.response.body_mutation.body) == expected


def test_an_agent_that_writes_its_actions_lands_by_the_note_alone() -> None:
    """It declares no tools that could be forbidden."""
    sent = encoded(as_text([Did((("ls", {}),), ("no such file",))] * 3, STYLES["fence"]))

    answer = ask(make_service(policy("p", ANY, **NOTE)), sent)

    changed = answer.request_body.response.body_mutation.body
    assert LANDING.encode() in changed
    assert without_notes(changed) == sent
    options = [option.header.key for option in answer.request_body.response.header_mutation.set_headers]
    assert "x-loopguard-narrowed" not in options


@pytest.mark.parametrize("api", sorted(DECLARED))
def test_a_person_behind_a_landing_starts_anew(api: str) -> None:
    """The landed agent's answer and what a person says to it end the loop: the next one is steered at its third turn again."""
    service = make_service(policy("p", ANY, **LADDER))
    stuck = Did((("f", {"a": 1}),), ("no such file",))
    ended = [stuck] * 5 + [Did((), (), "Please try once more, with the new server.", "I could not read the file.")]

    actions = []
    for turns in ([stuck] * 5, *[[*ended, *[stuck] * times] for times in range(5)]):
        sent = encoded(SHAPES[api](turns) | DECLARED[api])
        answer = decoded(exchange(service, headers(PATHS[api]), body(sent))[-1])
        actions.append(metadata_of(answer).get("action"))

    assert actions == ["land", None, None, None, "steer", "steer"]


def test_what_cannot_be_edited_goes_on_with_a_warning() -> None:
    """A request without a place for the note keeps its tools as well."""
    turn = [*json.loads(looping(1))["messages"][1:2], {"role": "tool", "tool_call_id": "c", "content": None}]
    service = make_service(policy("p", ANY, **NOTE))

    answer = ask(service, encoded({"messages": turn * 3, **DECLARED["chat"]}))

    assert steered(answer) == {}
    assert metadata_of(answer)["action"] == "warn"
    assert sample(service, "unsteered_total", policy="p", reason="no_result") == 1


def test_operators_words_are_followed_by_what_a_landing_asks() -> None:
    """The model has to know that it may call no tools, whatever the operator says."""
    note = last_text(steered(ask(make_service(policy("p", ANY, **NOTE, steer_note="Stop: {cause}")), looping(3))))

    assert "Stop: The error was \u201cno such file\u201d each time." in note
    assert f" {LANDING}\n" in note
