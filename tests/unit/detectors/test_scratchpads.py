"""Histories in one message: each form that programs write, looping and honest."""

from itertools import product

import pytest

from tests.support.scratchpads import FORMS, TEXTS, Step, in_chat
from tests.support.told import tell

PRESET = {"action": "steer", "escalate": {"reject": 7}, "weak_threshold": 14}
TOOLS = ["search", "read_file", "mcp__shop__count", "open_page", "list_rows", "query"]
RESULTS = [
    "nothing found",
    "error: permission denied",
    "A page about lamps.\n\nResult pages: 3\nIt is empty.",
    '{"rows": [], "status": "ok"}',
    "one line\nand another",
]
VARIANTS = list(product(TOOLS, RESULTS))


def loop(tool: str, result: str, times: int) -> list[Step]:
    return [Step(tool, "lamps", result)] * times


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_loop_in_one_message_is_found(form: str) -> None:
    """At the third equal step; a repeated error is refused at the seventh."""
    for tool, result in VARIANTS:
        begun = [Step(tool, "chairs", "some")]
        found = [
            tell(FORMS[form](begun + loop(tool, result, times)), **PRESET).action
            for times in (2, 3, 7)
        ]
        assert found == ["allow", "steer", "reject" if "error" in result else "steer"], (
            tool,
            result,
        )


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_progress_in_one_message_is_no_loop(form: str) -> None:
    for tool, result in VARIANTS:
        argued = [Step(tool, f"lamps {'x' * number}", result) for number in range(4)]
        answered = [Step(tool, "lamps", f"{result} {'x' * number}") for number in range(9)]
        edited = [
            step
            for number in range(4)
            for step in (Step("edit", "x" * number, "done"), Step(tool, "lamps", result))
        ]
        for steps in (argued, answered, edited, loop(tool, result, 1)):
            assert tell(FORMS[form](steps), **PRESET).action == "allow", (tool, result, steps)


@pytest.mark.slow
def test_quoted_steps_are_no_turns() -> None:
    """DSPy's RLM writes code blocks itself, so that a quotation of it has no end."""
    forms = [item for item in TEXTS.items() if item[0] != "DSPy, RLM"]
    for (form, write), (tool, result) in product(forms, VARIANTS):
        quoted = write(loop(tool, result, 5))
        text = f"Why does it do this?\n```\n{quoted}\n```\nThank you."
        assert tell(in_chat(text), **PRESET).action == "allow", (form, tool, result)


def test_equal_tasks_of_babyagi_are_a_loop() -> None:
    """It lists the tasks that it has done, without results."""
    for tool, argument in product(TOOLS, ["lamps", "chairs", "a", "the list", "all"]):
        task = f"{tool} {argument}"
        lists = [[task] * 3, [task, f"{task} again", f"{task} and again"], [task] * 2]
        prompts = [
            "You are an AI who performs one task based on the following objective: Count lamps."
            f"Take into account these previously completed tasks: {done}. Your task: {task}. "
            "Response:"
            for done in map("\n".join, lists)
        ]
        found = [tell(in_chat(prompt), **PRESET).action for prompt in prompts]
        assert found == ["steer", "allow", "allow"]
