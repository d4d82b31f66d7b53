"""Libraries that ask a model again until its answer is valid: other answers, the same complaint.

The requests are those of instructor 1.17.0, langchain 1.5.2 and langchain-classic 1.0.8, recorded
with a model that never gives a valid answer. guardrails-ai 0.11.0 and OutputFixingParser send
neither the task nor earlier answers, so a retry looks like the next item of a batch. outlines 1.3.3
does not retry.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.support.told import tell, tell_all

Body = dict[str, Any]
TASK = {"role": "user", "content": "Who is it? Ann is forty."}
ANSWERS = [
    json.dumps({"name": name, "age": age})
    for name in ("Ann", "Bob Miller", "C. Dale", "D", "Eve")
    for age in ("n/a", "unknown, but not old", "forty")
]
FAULTS = {
    "type": "age\n  Input should be a valid integer [type=int_type, {}]",
    "missing": "address.street\n  Field required [type=missing, {}]",
    "choice": "kind\n  Input should be 'cat' or 'dog' [type=literal_error, {}]",
    "item": "items.3.price\n  Input should be greater than 0 [type=greater_than, {}]",
    "two": "age\n  Not a number [type=int_type, {}]\nname\n  Not a text [type=string_type, {}]",
}
PLACES = "  Invalid JSON: EOF while parsing a string at line 1 column {} [type=json_invalid, {}]"


def quote(number: int) -> str:
    return f"input_value={ANSWERS[number % len(ANSWERS)][:30]!r}, input_type=str"


def complain(fault: str, number: int) -> str:
    """A complaint of pydantic 2.14 about an answer."""
    lines = fault.format(*[quote(number)] * 2)
    count = lines.count("[type=")
    more = "\n    For further information visit https://errors.pydantic.dev/2.14/v/int_type"
    return f"{count} validation error{'s' * (count > 1)} for Person\n{lines}{more}"


def call(number: int) -> Body:
    called = {"name": "Person", "arguments": ANSWERS[number % len(ANSWERS)]}
    made = {"id": f"c{number}", "type": "function", "function": called}
    return {"role": "assistant", "content": "", "tool_calls": [made]}


def returned(number: int, said: str) -> Body:
    return {"role": "tool", "tool_call_id": f"c{number}", "name": "Person", "content": said}


TOOL = {"type": "function", "function": {"name": "Person", "parameters": {"type": "object"}}}
FORCED = {"type": "function", "function": {"name": "Person"}}
RECALL = "Validation Error found:\n{}\nRecall the function correctly, fix the errors"
CORRECT = "Correct your JSON ONLY RESPONSE, based on the following errors:\n{}"
PARSE = (
    "Error: Failed to parse structured output for tool 'Person': Failed to parse data to Person: "
    "{}.\n Please fix your mistakes."
)


def chat(said: Sequence[str], form: str, **more: object) -> Body:
    """Calls of a tool, and what comes back."""
    rounds = [(call(n), returned(n, form.format(text))) for n, text in enumerate(said)]
    messages = [TASK, *[message for each in rounds for message in each]]
    return {"model": "m", "messages": messages, "tools": [TOOL], **more}


def instructor_tools(said: Sequence[str]) -> Body:
    return chat(said, RECALL, tool_choice=FORCED)


def langchain_agent(said: Sequence[str]) -> Body:
    """The agent of `create_agent` with `ToolStrategy`."""
    return chat(said, PARSE, tool_choice="required")


def instructor_anthropic_tools(said: Sequence[str]) -> Body:
    messages: list[Body] = [TASK]
    for n, text in enumerate(said):
        used = {"type": "tool_use", "id": f"t{n}", "name": "Person"}
        used |= {"input": json.loads(ANSWERS[n % len(ANSWERS)])}
        result = {"type": "tool_result", "tool_use_id": f"t{n}", "is_error": True}
        result |= {"content": RECALL.format(text)}
        messages += [
            {"role": "assistant", "content": [used]},
            {"role": "user", "content": [result]},
        ]
    choice = {"type": "tool", "name": "Person", "disable_parallel_tool_use": True}
    tools = [{"name": "Person", "input_schema": {"type": "object"}}]
    return {"max_tokens": 9, "messages": messages, "tools": tools, "tool_choice": choice}


def instructor_json(said: Sequence[str]) -> Body:
    messages: list[Body] = [TASK]
    for n, text in enumerate(said):
        messages.append({"role": "assistant", "content": ANSWERS[n % len(ANSWERS)]})
        messages.append({"role": "user", "content": CORRECT.format(text)})
    return {"model": "m", "messages": messages, "response_format": {"type": "json_object"}}


def instructor_json_schema(said: Sequence[str]) -> Body:
    form = {"type": "json_schema", "json_schema": {"name": "Person", "schema": {"type": "object"}}}
    return instructor_json(said) | {"response_format": form}


def instructor_anthropic_json(said: Sequence[str]) -> Body:
    """It leaves the answers out, and quotes each in the complaint."""
    form = (
        "Validation Errors found:\n{}\nRecall the function correctly, "
        "fix the errors found in the following attempt:\n{}"
    )
    asked = [
        {"role": "user", "content": form.format(text, ANSWERS[n % len(ANSWERS)])}
        for n, text in enumerate(said)
    ]
    return {"max_tokens": 9, "messages": [TASK, *asked], "system": "Answer in JSON."}


def instructor_responses(said: Sequence[str]) -> Body:
    """It leaves the answers out as well."""
    form = "{} with {} (tool call name=Person, id=f{})"
    asked = [
        {"role": "user", "content": form.format(RECALL.format(text), ANSWERS[n % len(ANSWERS)], n)}
        for n, text in enumerate(said)
    ]
    choice = {"type": "function", "name": "Person"}
    tools = [{"type": "function", "name": "Person", "parameters": {"type": "object"}}]
    return {"model": "m", "input": [TASK, *asked], "tools": tools, "tool_choice": choice}


LIBRARIES = [
    instructor_tools,
    instructor_anthropic_tools,
    instructor_json,
    instructor_json_schema,
    instructor_anthropic_json,
    instructor_responses,
    langchain_agent,
]
every_library = pytest.mark.parametrize("write", LIBRARIES)


def act(body: Body) -> str:
    escalate = {"land": 5, "reject": 7}
    return tell(body, action="steer", escalate=escalate, weak_threshold=14).action


@pytest.mark.parametrize("fault", [*FAULTS, "places"])
@every_library
def test_same_complaint_is_noted_and_then_refused(
    write: Callable[[Sequence[str]], Body], fault: str
) -> None:
    """Whatever the answers are. A client that forces a tool or a schema cannot be landed."""
    if fault in FAULTS:
        said = [complain(FAULTS[fault], n) for n in range(14)]
    else:
        said = [complain(PLACES.format(9 + n * n, "{}"), n) for n in range(14)]
    lands = write in {instructor_json, instructor_anthropic_json}

    assert [act(write(said[:times])) for times in (2, 5, 6, 10, 14)] == [
        "allow",
        "allow",
        "steer",
        "land" if lands else "steer",
        "reject",
    ]


@every_library
def test_other_complaints_are_progress(write: Callable[[Sequence[str]], Body]) -> None:
    """The model fixes one fault after the other.

    If it fixes one item after the other, there is a note, because only numbers differ.
    """
    kinds = [complain(FAULTS[fault], n) for n in range(3) for fault in FAULTS]
    fewer = [f"{9 - n} validation errors for Person, {quote(n)}" for n in range(8)]
    items = [complain(FAULTS["item"].replace("3", str(n)), n) for n in range(14)]
    pairs = [complain(FAULTS[fault], n) for fault in FAULTS for n in range(2)]

    for said in (kinds, fewer, pairs):
        assert {act(write(said[:end])) for end in range(1, len(said) + 1)} == {"allow"}
    assert {act(write(items[:end])) for end in (4, 9, 14)} <= {"allow", "steer"}


@every_library
def test_complaint_before_a_valid_answer_is_forgotten(
    write: Callable[[Sequence[str]], Body],
) -> None:
    """If most of the recent ones are the same, there is a note, but nothing more."""
    said = [complain(FAULTS["type"], n) for n in range(5)]
    often = [*said[:2], "ok, saved"] * 8

    assert act(write([*said[:2], "ok, saved"])) == act(write([*said, "ok, saved"])) == "allow"
    assert {act(write(often[:end])) for end in range(1, len(often) + 1)} <= {"allow", "steer"}


@pytest.mark.parametrize(
    "words",
    [
        "Again, please.",
        "No.",
        "Not like that.",
        "Another one, please.",
        "That is not what I mean.",
    ],
)
def test_people_may_complain_in_the_same_words(words: str) -> None:
    """They get a note at most, and only after ten times."""
    talk = instructor_json([words] * 20)
    for message in talk["messages"][2::2]:
        message["content"] = words

    assert act(talk | {"messages": talk["messages"][:17]}) == "allow"
    assert act(talk) in {"allow", "steer"}
    assert act({"messages": [TASK, *[{"role": "user", "content": words}] * 20]}) == "allow"


PROMPT = (
    "Prompt:\n{}\nAnswer in JSON.\nCompletion:\n{}\n\nAbove, the Completion did not satisfy the "
    "constraints given in the Prompt.\n{}Please try again:"
)
MORE = "\nFor troubleshooting, visit: https://docs.langchain.com/OUTPUT_PARSING_FAILURE "
ERRORS = {
    "": "",
    "parse": "Failed to parse Person from completion {answer}. Got: {complaint}" + MORE,
    "json": "Invalid json output: {answer}" + MORE,
}
"""RetryOutputParser, and RetryWithErrorOutputParser with its errors."""


def retry(number: int, error: str, fault: str = "type", task: str = "Who is it?") -> Body:
    answer = ANSWERS[number % len(ANSWERS)]
    if error == "json":
        answer = f"It's\n\n{answer}" if number % 2 else f'"I" think: {answer}'
    complaint = complain(FAULTS[fault], number)
    raised = Exception(ERRORS[error].format(answer=answer, complaint=complaint))
    details = f"Details: OutputParser{raised!r}\n" if error else ""
    return {"messages": [{"role": "user", "content": PROMPT.format(task, answer, details)}]}


KEYS: Any = {"similarity": "prompt", "window_seconds": 60, "threshold_identical_requests": 5}


@pytest.mark.parametrize("error", ERRORS)
def test_retry_parser_repeats_a_prompt(error: str) -> None:
    told = tell_all([retry(number, error) for number in range(6)], **KEYS)

    assert [each.action for each in told] == ["allow"] * 4 + ["reject"] * 2


@pytest.mark.parametrize("error", ERRORS)
def test_retries_of_other_tasks_are_other_prompts(error: str) -> None:
    tasks = [retry(number, error, task=f"Who is no. {number}?") for number in range(12)]
    faults = [retry(number, "parse", fault) for number in range(4) for fault in FAULTS][:16]

    assert {each.action for each in tell_all([*tasks, *faults], **KEYS)} == {"allow"}
