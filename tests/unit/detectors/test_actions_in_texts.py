"""Actions of an assistant in its text, apart from its thoughts."""

import pytest
from hypothesis import given, strategies as st

from extproc.detectors.actions import read_text_action
from extproc.detectors.arguments import THOUGHTS
from extproc.request.document import INSPECTION

_LIST = "ls -la src"

SAME: dict[str, list[str]] = {
    "a fence": [
        f"I look.\n\n```bash\n{_LIST}\n```",
        f"Let me see:\n```sh\n{_LIST}\n```\nThat should do.",
        f"```\n{_LIST}```",
        f"First:\n```\nrm x\n```\nno, rather\n```\n{_LIST}\n```",
        f"Not closed:\n```bash\n{_LIST}\n",
        f"The next action is ```{_LIST}```",
        f"<think>```\nrm x\n```</think>\n```bash\n{_LIST}\n```",
        f"what I thought</think>```bash\n{_LIST}\n```",
    ],
    "a JSON object": [
        '{"thought": "a", "action": "click", "index": 4}',
        '{"index": 4, "thought": "b", "action": "click"}',
        '```json\n{"action": "click", "thought": "c", "index": 4.0}\n```',
    ],
    "a JSON object in prose": [
        'I click. {"name": "click", "arguments": {"index": 4}}',
        'Now: {"arguments": {"index": 4}, "name": "click"} as said {not JSON}',
        '{"plan": "none"} and {"thought": "x", "name": "click", "arguments": {"index": 4}}',
    ],
    "commands": [
        (
            '{"analysis": "a", "plan": "b", "commands": [{"keystrokes": "ls\\n", "duration": '
            "0.1}], "
            '"task_complete": false}'
        ),
        '{"state": "other", "commands": [{"duration": 1e-1, "keystrokes": "ls\\n"}]}',
    ],
    "a command and what it is for": [
        '{"command": "ls -la", "description": "Look around", "timeout": 5}',
        '{"timeout": 60, "command": "ls -la", "description": "See what is here"}',
    ],
    "tags": [
        f"I look.\n<execute_bash>{_LIST}</execute_bash>",
        f"<thinking>hm</thinking><execute_bash>{_LIST}</execute_bash> Done.",
        (
            "<thought>hm\n<execute_bash>rm "
            f"x</execute_bash></thought>\n<execute_bash>{_LIST}</execute_bash>"
        ),
    ],
    "tags around code": [
        "<write><path>README.md</path><content>\n```sh\nmake\n```\n</content></write>",
        "So:\n<write><path>README.md</path><content>\n```sh\nmake\n```\n</content></write>",
    ],
    "a line": [
        "Thought: a\nAction: search\nAction Input: cats",
        "Thought: b\n\nACTION:  Search\naction input: cats",
        "Thought 3: c\nAction 3: search\nAction Input: cats\nObservation: made up",
        "**Action:** search\nAction Input: cats",
    ],
    "words": ["Shall I go on?", "shall I  go on?\n"],
}

DIFFERENT = [
    f"```bash\n{_LIST}\n```",
    "```bash\nls -la tests\n```",
    "```bash\ncat > a.md <<EOF\n```python\nx = 1\n```\nEOF\n```",
    "```bash\ncat > a.md <<EOF\n```python\nx = 2\n```\nEOF\n```",
    '{"action": "click", "index": 4}',
    '{"action": "click", "index": 5}',
    '{"action": {"name": "click"}, "args": {"index": 5}}',
    '{"action": {"name": "click"}, "args": {"index": 6}}',
    "<run>a</run>",
    "<run>b</run>",
    "<edit>a</edit><run>b</run>",
    "<edit>b</edit><run>b</run>",
    "<write><path>README.md</path><content>\n```sh\nmake\n```\n</content></write>",
    "<write><path>README.txt</path><content>\n```sh\nmake\n```\n</content></write>",
    "Action: search[cats]",
    "Action: search[dogs]",
    "The <b>button</b> is there.\nAction: click[4]",
    "The <b>button</b> is there.\nAction: click[5]",
    "Shall I go on?",
    "Shall I stop?",
]


def action(text: str) -> bytes:
    INSPECTION.begin()
    return read_text_action(text, THOUGHTS)[1]


@pytest.mark.parametrize("name", SAME)
def test_action_is_found_beside_any_thoughts(name: str) -> None:
    assert len({action(text) for text in SAME[name]}) == 1


def test_different_actions_differ() -> None:
    assert len({action(text) for text in DIFFERENT}) == len(DIFFERENT)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f"```bash\n{_LIST}\n```", "ls"),
        ('{"thought": "a", "action": "click", "index": 4}', "click"),
        ('{"name": "get_user", "arguments": {}}', "get_user"),
        ('{"commands": [{"keystrokes": "ls -la\\n"}]}', "ls"),
        ('{"current_state": {}, "action": [{"click_element": {"index": 4}}]}', "click_element"),
        ('{"command": {"name": "browse", "args": {}}}', "browse"),
        ("<execute_bash>ls</execute_bash>", "execute_bash"),
        ('<function_calls><invoke name="bash"></invoke></function_calls>', "bash"),
        ("<function=str_replace><parameter=path>x</parameter></function>", "str_replace"),
        ("Action: search[cats]", "search"),
        ("Shall I go on?", ""),
        ("", ""),
    ],
)
def test_action_is_named_by_tool_or_command(text: str, name: str) -> None:
    assert read_text_action(text, THOUGHTS)[0] == name


_HOSTILE = {
    "fences": "```" * 20_000,
    "open fences": "```a\n" * 12_000,
    "backticks": "`" * 60_000,
    "braces": "{" * 60_000,
    "open objects": '{"a":' * 12_000,
    "objects": '{"a":1}' * 9_000,
    "open tags": "<a>" * 20_000,
    "many open tags": "".join([f"<a{n}>" for n in range(8_000)]),
    "tags": "<a></a>" * 9_000,
    "closing thoughts": "</think>" * 8_000,
    "open thoughts": "<think>" * 9_000,
    "actions": "Action: x\n" * 6_000,
    "empty actions": "Action:\n" * 8_000,
    "spaces": " " * 60_000,
    "deep JSON": '{"action":' + "[" * 20_000 + "]" * 20_000 + "}",
    "an integer too long": '{"action":' + "9" * 60_000 + "}",
    "half a pair": '{"action": "\\ud800"}',
    "a very long text": "x" * 2_000_000,
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_hostile_text_has_an_action(name: str) -> None:
    assert action(_HOSTILE[name]) == action(_HOSTILE[name])


_PIECES = [*'`<>/{}[]":a \n\\', "```", "</a>", "<a>", "Action:", '{"action":', "<think>"]


@given(st.lists(st.sampled_from(_PIECES), max_size=60).map("".join))
def test_any_text_has_an_action(text: str) -> None:
    name, spelled = read_text_action(text, THOUGHTS)

    assert isinstance(name, str)
    assert spelled
