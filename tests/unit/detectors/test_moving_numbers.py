"""Numbers that move by themselves under their keys, and temporary folders; what looks like them is content."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.detectors.results import may_be_equal, normalize, normalize_head
from tests.support.exact import load_exact
from tests.support.told import tell
from tests.support.turn_writers import Did, as_chat

EXACT = load_exact("results")

KEYS = [
    *("duration", "duration_s", "duration_ms", "duration_seconds", "durationMs", "durationSeconds", "Duration", "DURATION_MS"),
    *("duration_in_ms", "durationInMillis", "durationNanos", "total_duration", "totalDurationMs", "took", "took_ms", "tookMs"),
    *("elapsed", "Elapsed", "elapsed_ms", "elapsedMs", "elapsed_time", "time_elapsed", "latency", "latency_ms", "latencyMs"),
    *("wall_time", "wall-time", "walltime", "wallTimeSeconds", "execution_time", "executionTimeMs", "response_time_ms"),
    *(
        "query_time",
        "time_ms",
        "timeMs",
        "time_taken",
        "pid",
        "PID",
        "ppid",
        "worker_pid",
        "parentPid",
        "process_id",
        "processId",
    ),
]
"""Their numbers say how long something took, or which process did it."""

CONTENT = [
    *("percent", "count", "price", "date", "id", "total", "size", "durations", "duration_count", "time", "times", "timeout"),
    *("start_time", "end_time", "lifetime", "rapid", "cupid", "pids", "pid_count", "overtook", "process", "tookCount"),
]
"""Their numbers are what was asked for."""

WRITTEN = {
    "JSON": '{{"{key}": {number}, "ok": true}}',
    "compact JSON": '{{"ok":true,"{key}":{number}}}',
    "quoted": '{{"{key}": "{number}"}}',
    "lines of JSON": '{{\n  "{key}": {number}\n}}',
    "JSON in a string": '"{{\\"{key}\\": {number}}}\\nmore"',
    "Python": "{{'{key}': {number}}}",
    "XML": "<r><{key}>{number}</{key}></r>",
    "XML with attributes": '<r><{key} of="it">{number}</{key}></r>',
    "an attribute": '<r {key}="{number}"/>',
}

NUMBERS = ["4", "0.3", "12345678", "1.5e-05"]

ELSEWHERE = [
    ('{"duration": "4 of 9"}', '{"duration": "5 of 9"}'),
    ('{"duration": "part 4"}', '{"duration": "part 5"}'),
    ('{"duration": [4, 5]}', '{"duration": [4, 6]}'),
    ("<duration>4 of 9</duration>", "<duration>5 of 9</duration>"),
    ("duration 4", "duration 5"),
    ("took 4 of them", "took 5 of them"),
    ('<t time="4">', '<t time="5">'),
    ("/var/folders.txt 4", "/var/folders.txt 5"),
    ("/var/log/a4", "/var/log/a5"),
    ("/workspace/tmp/a4", "/workspace/tmp/a5"),
    (r"C:\Users\x\AppData\Roaming\a4", r"C:\Users\x\AppData\Roaming\a5"),
    (r"C:\Users\x\AppData\Local\Temporal\a4", r"C:\Users\x\AppData\Local\Temporal\a5"),
    ("C:/Users/x/AppData/Local/Tempo/a4", "C:/Users/x/AppData/Local/Tempo/a5"),
]
"""Values that are no numbers, or no keys; other folders."""

EQUAL = [
    ("# duration_ms 56.7", "# duration_ms 4"),
    ('<testcase name="a" time="0.034">', '<testcase name="a" time="1.200">'),
    ("/var/folders/zz/a_1/T/tmpx/a.txt: gone", "/var/folders/zz/b_2/T/tmpy/c.txt: gone"),
    ("/private/var/folders/zz/a_1/T/x gone", "/private/var/folders/zz/b_2/T/longer-y gone"),
    ("/private/tmp/x gone", "/private/tmp/longer-y gone"),
    ("/private/var/tmp/x gone", "/private/var/tmp/longer-y gone"),
    (r"C:\Users\x\AppData\Local\Temp\tmpab\n.txt is gone", r"C:\Users\x\AppData\Local\Temp\tmpcde\n.txt is gone"),
    (r'"C:\\Users\\x\\AppData\\Local\\Temp\\tmpab\\n.txt\ngone"', r'"C:\\Users\\x\\AppData\\Local\\Temp\\nab\\t.txt\ngone"'),
    ("C:/Users/x/AppData/Local/Temp/a gone", "C:/Users/x/AppData/Local/Temp/longer-b gone"),
]


@pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)
@pytest.mark.parametrize("key", KEYS)
def test_numbers_of_durations_and_processes_are_left_out(key: str, written: str) -> None:
    """However they are written."""
    texts = [written.format(key=key, number=number) for number in NUMBERS]

    assert len({normalize(text) for text in texts}) == 1
    assert key in normalize(texts[0])


@pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)
@pytest.mark.parametrize("key", CONTENT)
def test_numbers_under_other_keys_stay(key: str, written: str) -> None:
    """These are records."""
    assert len({normalize(written.format(key=key, number=number)) for number in ("4", "5", "46")}) == 3


@pytest.mark.parametrize(("one", "other"), ELSEWHERE)
def test_what_is_not_the_whole_value_stays(one: str, other: str) -> None:
    """Only numbers move by themselves."""
    assert normalize(one) != normalize(other)


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_temporary_folders_and_test_reports_are_left_out(one: str, other: str) -> None:
    """Those of macOS and Windows; times in reports of Node and JUnit."""
    assert normalize(one) == normalize(other)
    assert may_be_equal(normalize_head(one), normalize_head(other))


_PIECES = st.sampled_from(
    [
        *("duration", "Elapsed", "latency", "took", "time", "Time", "wall", "query", "pid", "process", "id", "in", "ms", "Ms"),
        *("_", "-", "s", "S", "seconds", "Millis", "taken", '"', "'", '": ', ":", "=", ">", "<", "</", " ", "\\", "\\n", "\n"),
        *("4", "0.3", "e-5", ",", "}", "]", "AppData", "Local", "Temp", "/", "x", "\u00e9", "\u017f", "/var/folders/"),
    ]
)


@given(st.lists(_PIECES, max_size=30).map("".join))
def test_a_quick_look_misses_no_key(text: str) -> None:
    """Whatever the patterns find, each look before them does, too."""
    assert normalize(text) == EXACT.normalize(text)


@given(st.lists(_PIECES, max_size=60).map("".join), st.lists(_PIECES, max_size=30).map("".join), st.data())
def test_starts_of_results_do_not_tell_equal_ones_apart(start: str, end: str, data: st.DataObject) -> None:
    """Wherever the start of a result is cut, it does not show a difference that is none."""
    numbers = st.sampled_from([*NUMBERS, "12345678901234567890.12345678901234567890e-100"])
    one, other = [
        f'{start}, "duration": {data.draw(numbers)}, "path": "/var/folders/{data.draw(numbers)}"'
        f', "pid": "{data.draw(numbers)}"{end}'
        for _ in range(2)
    ]

    assert normalize(one) != normalize(other) or may_be_equal(normalize_head(one), normalize_head(other))


@pytest.mark.parametrize(
    "piece",
    [
        *(
            "duration",
            '"duration": ',
            '"duration": 1',
            "<pid ",
            "<pid>1",
            "wall_time",
            "time_",
            "total_",
            "Millis",
            '"took":"1',
        ),
        *(
            "AppData",
            "AppData/Local/Temp/",
            "AppData\\\\Local\\\\Temp\\\\",
            "AppData\\Local\\Temp\\",
            "/var/folders/",
            "time=\\",
        ),
    ],
)
def test_a_result_of_keys_alone_is_normalised(piece: str) -> None:
    """No input is catastrophic: a megabyte of anything ends, and twice as much of it starts alike."""
    text = piece * (2**20 // len(piece))

    assert normalize(text + piece).startswith(normalize(text)[:1_000])


def codex(number: int) -> str:
    """What Codex returns for a command that failed."""
    duration = [0.3, 0.1, 1.2, 0.05][number % 4]
    return json.dumps({"output": "cat: x: No such file", "metadata": {"exit_code": 1, "duration_seconds": duration}})


def call(tool: str, result: str, number: int, **arguments: object) -> Did:
    """A turn in which a tool is called."""
    return Did(((tool, arguments),), (result,), "", f"No. {number}!")


LADDER: dict[str, Any] = {"action": "steer", "escalate": {"land": 5, "reject": 7}, "weak_threshold": 14}
SEARCHES = [call("find", f'{{"took": {n}, "hits": []}}', n, q="x") for n in range(16)]
CONVERSATIONS: dict[str, tuple[list[Did], bool]] = {
    "an error with other durations": ([call("shell", codex(n), n, command="cat x") for n in range(7)], True),
    "the same six times": ([call("shell", codex(n), n, command="cat x") for n in range(6)], False),
    "searches that differ in time": ([call("find", f'{{"took": {n}, "hits": []}}', n, q="x") for n in range(16)], True),
    "the same, which wait as weak loops do": (
        [call("find", f'{{"took": {n}, "hits": []}}', n, q="x") for n in range(15)],
        False,
    ),
    "the same wait": ([call("wait", "error: boom", n, duration=5) for n in range(7)], True),
    "other waits": ([call("wait", f'{{"waited": {n}}}', n, duration=n, pid=n) for n in range(7)], False),
    "other records": ([call("next", f'{{"id": {n}, "duration_ms": 4}}', n) for n in range(16)], False),
}


@pytest.mark.parametrize(("turns", "refused"), CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_conversations_with_moving_numbers(turns: list[Did], refused: bool) -> None:
    """Durations hide no loop, and neither make one: among arguments they are content, and so is all the rest of a result."""
    assert (tell(as_chat(turns), **LADDER).action == "reject") is refused
