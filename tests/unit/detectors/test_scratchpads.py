"""Histories in one message: each form that programs write, looping and honest."""

from itertools import product
from typing import Any

import pytest

from tests.support.scratchpads import FORMS, TEXTS, Step, in_chat
from tests.support.told import tell, tell_all

PRESET: dict[str, Any] = {"action": "steer", "escalate": {"reject": 7}, "weak_threshold": 14}
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
def send(form: str, steps: list[Step], *, window: int) -> list[str]:
    """The requests of a program that shows the newest steps, or cuts all results but the newest."""
    thought = [step._replace(thought=f"Way {chr(97 + n)}.") for n, step in enumerate(steps)]
    bodies = []
    for end in range(len(steps) + 1):
        shown = thought[:end]
        if not window:
            shown = [step._replace(result="[cut]") for step in shown[:-1]] + shown[-1:]
        bodies.append(FORMS[form](shown[-window:]))
    return [told.action for told in tell_all(bodies, **PRESET)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", [0, 3, 4])
def test_memory_completes_what_one_message_leaves_out(form: str, window: int) -> None:
    for tool, result in VARIANTS[::3]:
        work = [Step("look", f"at {number}", f"page {number}") for number in range(12)]

        looping = send(form, work[:4] + loop(tool, result, 9), window=window)

        assert set(looping[:7]) == {"allow"}
        assert "allow" not in looping[-4:], (tool, result)
        assert set(send(form, work, window=window)) == {"allow"}


@pytest.mark.parametrize("form", FORMS)
def test_samples_of_one_message_are_no_loop(form: str) -> None:
    """Programs draw many answers to one prompt."""
    body = FORMS[form]([Step("look", f"at {number}", "some") for number in range(3)])

    assert {told.action for told in tell_all([body] * 20, **PRESET)} == {"allow"}


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
