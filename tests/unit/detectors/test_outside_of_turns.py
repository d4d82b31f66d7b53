"""Loops outside of turns: scratchpads, prompts that nest themselves, and complaints."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.told import Told, find_reason, find_strength, tell

FORMAT = """Answer the following questions as best you can. You have these tools: search, calculator

Use the following format:

Question: the input question you must answer
Thought: you should always think about what to do
Action: the action to take, should be one of [search, calculator]
Action Input: the input to the action
Observation: the result of the action
... (this Thought/Action/Action Input/Observation can repeat N times)
Thought: I now know the final answer
Final Answer: the final answer to the original input question

Begin!

"""
EXAMPLES = "".join(
    f"Question: who is {'ABCDEF'[n]}?\nThought 1: I look.\nAction 1: Search[lamps]\nObservation "
    "1: Nothing.\n"
    "Thought 2: Again.\nAction 2: Finish[nobody]\n\n"
    for n in range(6)
)


def scratchpad(
    steps: list[tuple[str, str, str]],
    before: str = FORMAT,
    behind: str = "\nThought:",
    question: str = "Question: How many lamps?\n",
) -> str:
    """What LangChain's classic agents send."""
    done = "\n".join(
        (
            f"Thought: I try it in way no. {n}\nAction: {tool}\nAction Input: "
            f"{given}\nObservation: "
            f"{result}"
        )
        for n, (tool, given, result) in enumerate(steps)
    )
    return before + question + done + behind


def blob(steps: list[tuple[str, str, str]]) -> str:
    """The same of its agents for structured chats."""
    done = "\n".join(
        (
            f'Thought: no. {n}\nAction:\n```json\n{{"action": "{tool}", "action_input": '
            f'"{given}"}}\n```\nObservation: {result}'
        )
        for n, (tool, given, result) in enumerate(steps)
    )
    work = "This was your previous work (but I haven't seen any of it!):\n"
    return (
        f"How many lamps?\n\n{work}{done}\nThought:\n (reminder to respond in a JSON blob no "
        "matter what)"
    )


def chat(text: str, *before: str) -> dict[str, Any]:
    """A chat whose user says this; `before`: what user and assistant said before, in turn."""
    said = [
        {"role": ["user", "assistant"][n % 2], "content": each} for n, each in enumerate(before)
    ]
    return {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            *said,
            {"role": "user", "content": text},
        ],
    }


LADDER: dict[str, Any] = {"action": "steer", "escalate": {"reject": 7}, "weak_threshold": 14}


def look(body: dict[str, Any], **keys: Any) -> Told:  # noqa: ANN401  # of loop_detection
    return tell(body, **LADDER | keys)


def act(text: str, **keys: Any) -> str:  # noqa: ANN401  # of loop_detection
    return look(chat(text), **keys).action


SAME = [("search", "lamps", "nothing found")]
FAILING = [("search", "lamps", "error: permission denied")]
OTHER = [("search", f"lamps no. {n}", f"found: {n}") for n in range(6)]


@pytest.mark.parametrize("write", [scratchpad, blob])
def test_scratchpad_in_one_text_is_read_as_turns(
    write: Callable[[list[tuple[str, str, str]]], str],
) -> None:
    for body in (
        chat(write(SAME * 3)),
        chat(write(SAME * 3), "Hi", "Hello!"),
        {"model": "m", "prompt": write(SAME * 3)},
    ):
        assert look(body)[:3] == ("warn" if "prompt" in body else "steer", 3, "search")
        assert tell(body).rule == "repeat"
        assert find_strength(body) == "weak"
    assert act(write(FAILING * 7)) == "reject"
    assert act(write(SAME * 7)) == "steer"
    assert act(write((SAME + FAILING) * 3)) == "steer"
    assert act(write(SAME * 2)) == "allow"
    assert act(write(OTHER)) == "allow"
    assert act(write(SAME * 3), tools={"search": {"allow": True}}) == "allow"


def test_cycle_in_a_scratchpad_is_found() -> None:
    told = tell(chat(scratchpad([*SAME, ("calculator", "1+1", "2")] * 3)))

    assert (told.rule, told.tool) == ("cycle", "search calculator")


@pytest.mark.parametrize(
    "text",
    [
        FORMAT + EXAMPLES + "Question: How many lamps?\nThought:",
        EXAMPLES + "Question: How many lamps?\nThought 1:",
        EXAMPLES + scratchpad(SAME * 2, before=""),
        "Why does my agent do this?\n```\n" + scratchpad(SAME * 5, before="") + "\n```",
        "Thought: I like lamps.\nAction: " * 9,
        "Observation: it rains.\n" * 9,
        "Action: look\nObservation: it rains.\n",
    ],
)
def test_examples_and_quotes_are_no_turns(text: str) -> None:
    assert act(text) == "allow"


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("a page\nQuestion: who?\nFinal Answer: she\nmore of it", "steer"),
        ("a page\nQuestion: who?\nFinal Answer: she\n@ more of it", "allow"),
        ("a page\nBegin!", "allow"),
    ],
)
def test_observation_may_contain_words_of_the_format(page: str, expected: str) -> None:
    """A question in an observation is part of it; `Begin!` never is."""
    assert (
        act(scratchpad([("open", "a", page.replace("@", "lamps " * n)) for n in range(3)]))
        == expected
    )


def test_scratchpad_in_an_assistant_message_is_read() -> None:
    body = chat("How many lamps?")
    body["messages"].append(
        {"role": "assistant", "content": scratchpad(SAME * 3, before="", question="")}
    )

    assert (tell(body).rule, look(body).action) == ("repeat", "warn")


def test_plain_prompt_without_steps_is_uncounted() -> None:
    assert (
        find_reason({"model": "m", "prompt": "Question: How many lamps?\nThought:"}) == "no_history"
    )


COMPLAINT = "That wasn't valid JSON. Try again: "
TASK = "List the five largest lamps of the world."


@pytest.mark.parametrize(
    "words",
    [
        COMPLAINT,
        "Please answer with JSON only.\n\n",
        "这不是有效的JSON格式请再试一次 ",
        "Error in your answer!\n",
    ],
)
def test_prompt_that_nests_itself_is_a_loop(words: str) -> None:
    """It is weak. A prompt without messages has no place for a note."""
    body = chat(words * 3 + TASK)

    assert look(body)[:3] == ("steer", 3, "")
    assert tell(body).rule == "nested_prompt"
    assert find_strength(body) == "weak"
    assert act(words * 2 + TASK) == "allow"
    assert look({"model": "m", "prompt": words * 3 + TASK}).action == "warn"
    assert look({"model": "m", "input": words * 3 + TASK}).action == "steer"
    assert [act(words * times + TASK) for times in (7, 13, 14, 16)] == [
        "steer",
        "steer",
        "reject",
        "reject",
    ]
    assert act(words * 7 + TASK, weak_threshold=None) == "reject"
    assert act(words * 3 + TASK, action="reject", escalate={}) == "warn"


@pytest.mark.parametrize(
    "text",
    [
        "-" * 80 + "\nList the lamps.",
        "+----------------" * 6 + "+\n| a table |",
        "ha ha ha ha ha ha ha ha ha ha ha ha ha, very funny",
        "1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, what comes next?",
        "The quick brown fox. " * 50,
        "The quick brown fox. " * 50 + "Sum this up.",
        "Translate this: a lamp. Translate that: a lamp. Translate this: a lamp.",
        TASK + COMPLAINT * 5,
        "Try again: " * 3,
        "",
    ],
)
def test_similar_texts_are_no_nesting(text: str) -> None:
    assert act(text) == "allow"


def test_nesting_after_turns_is_ignored() -> None:
    assert look(chat(COMPLAINT * 9 + TASK, "Hi", "Hello!")).action == "allow"


STEPS = [
    "You asked: search for lamps\nYou got: nothing",
    "> open door\nThe door is locked.\n",
    "$ make test\nmake: *** No rule to make target 'test'.  Stop.",
    "Thought: I should try again.\n<tool>list_files</tool>\n<result>\n\n</result>",
    "SELECT * FROM lamps;\n[]\nReward: 0.0",
]
"""Steps of agents, as programs write them into one prompt."""

INSTRUCTIONS = [
    "",
    "What is next?",
    "Thought:",
    "\nYou have 3 steps left.\nAnswer with one action.\n\nAction:",
    "\n" * 8,
]


@pytest.mark.parametrize("step", STEPS)
def test_prompt_that_repeats_its_end_gets_a_note(step: str) -> None:
    """From the fourth time on, whatever follows; it never gets more than a note."""
    step += "\n"
    for behind in INSTRUCTIONS:
        body = chat("Find the lamps.\n" + step * 4 + behind)
        told = look(body)
        assert (told.action, told.rule, told.count, find_strength(body)) == (
            "steer",
            "repeated_ending",
            4,
            "weak",
        )
        assert act("Find the lamps.\n" + step * 3 + behind) == "allow"
        assert act("Find the lamps.\n" + step * 40 + behind) == "steer"
    assert look({"model": "m", "prompt": step * 4}).action == "warn"
    assert look(chat(step * 9, "Hi", "Hello!")).action == "allow"


DATA = [
    "2026-01-01 12:00:{n:02} INFO worker started\n2026-01-01 12:01:{n:02} INFO worker ended",
    "{n},lamp,red,{n}\n{n},chair,blue,{n}",
    "| {n} | lamp | red |\n|---|---|---|",
    '"id": {n}, "name": "lamp"\n"id": {n}, "name": "chair"',
    "    at com.example.lamps.Lamp.light(Lamp.java:12)",
    "Question: what is a lamp of kind {letter}?\nAnswer: a lamp of kind {letter}.",
    "la la la la la la la la la la la la",
    "{n:02} 3f 1c aa\n{n:02} 00 ff 1d",
]
"""Lines of logs, tables, data, examples and songs."""


@pytest.mark.parametrize("lines", DATA)
def test_data_at_the_end_of_a_prompt_is_no_loop(lines: str) -> None:
    """Rows that differ only in numbers, examples, and one line again and again."""
    rows = "\n".join([lines.format(n=n, letter=chr(65 + n)) for n in range(12)])

    for behind in INSTRUCTIONS:
        assert act(f"What is this?\n{rows}\n{behind}") == "allow"


def test_quoted_steps_are_no_loop() -> None:
    quoted = "\n".join(STEPS[:1] * 9)

    assert act(f"Why does my agent do this?\n```\n{quoted}\n```\nThank you.") == "allow"


def complained(
    times: int, said: str = "Your response did not contain an action, attempt {}."
) -> dict[str, Any]:
    """An assistant that answers in other words each time and gets the same complaint."""
    words = [f"I could do this in way no. {n}, or in another." for n in range(times)]
    return chat(
        said.format(times),
        TASK,
        *[each for n in range(times) for each in (words[n], said.format(n + 1))][:-1],
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Your response did not contain an action.", True),
        ("That wasn\u2019t valid JSON.", True),
        ("Your answer is not in the right format.", True),
        ("No tool call was found in your last message.", True),
        ("Please always provide EXACTLY ONE action in triple backticks, found 0 actions.", True),
        ("Expected a JSON object but got text", True),
        ("You did not use a tool.", True),
        ("Wrong format!", True),
        ("Please answer in JSON, without a code block.", False),
        ("Give me another name.", False),
        ("Keep going until all tests pass; none may be skipped.", False),
        ("Do not use a tool for this.", False),
        ("It is not working.", False),
        ("Is the format not described anywhere?", False),
    ],
)
def test_complaints_are_told_from_wishes(text: str, expected: bool) -> None:
    assert (look(complained(6, text)).action == "steer") is expected


@pytest.mark.parametrize("threshold", [2, 3])
def test_same_complaint_six_times_is_a_loop(threshold: int) -> None:
    same, found = (
        "Your response did not contain an action.",
        [(6, "steer"), (5, "allow"), (14, "reject")],
    )

    assert tell(complained(6, same), threshold_identical_requests=threshold).rule == "error"
    for times, action in found:
        assert (
            look(complained(times, same), threshold_identical_requests=threshold).action == action
        )
    assert (
        look(complained(9, "Give me another name."), threshold_identical_requests=threshold).action
        == "allow"
    )


def test_complaint_with_a_number_gets_a_note() -> None:
    assert [look(complained(times)).action for times in (5, 9, 20)] == ["allow", "steer", "reject"]
