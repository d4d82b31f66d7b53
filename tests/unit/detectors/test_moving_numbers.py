"""Numbers that move by themselves under their keys, and temporary folders; what looks like them is content."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.detectors.results import (
    _IN_WINDOWS,
    _OF_KEY,
    _is_special,
    _may_be_volatile,
    _may_have_keys,
    may_be_equal,
    normalize,
    normalize_head,
)
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.looping import encoded
from tests.support.service import make_service
from tests.support.steering import ask
from tests.support.turn_writers import SHAPES, Did

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
    """Whatever the pattern finds, each look before it does, too."""
    if _OF_KEY.search(text):
        assert _may_have_keys(text)
        assert _is_special(text)
        assert _may_be_volatile(text)
    if "\\" not in text and _IN_WINDOWS.search(text):
        assert _is_special(text)
        assert _may_be_volatile(text)


@given(st.lists(_PIECES, max_size=60).map("".join), st.lists(_PIECES, max_size=30).map("".join), st.data())
def test_starts_of_results_do_not_tell_equal_ones_apart(start: str, end: str, data: st.DataObject) -> None:
    """Wherever the start of a result is cut, it does not show a difference that is none."""
    numbers = st.sampled_from([*NUMBERS, "12345678901234567890.12345678901234567890e-100"])
    one, other = [
        f'{start}, "duration": {data.draw(numbers)}, "path": "/var/folders/{data.draw(numbers)}", '
        f'"pid": "{data.draw(numbers)}"{end}'
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
    return json.dumps(
        {"output": "cat: x: No such file", "metadata": {"exit_code": 1, "duration_seconds": [0.3, 0.1, 1.2, 0.05][number % 4]}}
    )


def refuses(turns: Sequence[Did], shape: str = "chat") -> bool:
    """Whether the preset's thresholds refuse the last request of a conversation."""
    ladder: dict[str, Any] = {"action": "steer", "escalate": {"land": 5, "reject": 7}, "weak_threshold": 14}
    service = make_service(policy("p", ANY, similarity="turns", **ladder))
    return ask(service, encoded(SHAPES[shape](turns))).HasField("immediate_response")


def test_an_error_with_other_durations_is_refused() -> None:
    """At the seventh, as if the durations were equal."""
    turns = [Did((("shell", {"command": "cat x"}),), (codex(number),), "", f"No. {number}!") for number in range(7)]

    assert refuses(turns)
    assert not refuses(turns[:6])


def test_searches_that_differ_only_in_time_are_weak() -> None:
    """Short results without an error wait for the weak threshold."""
    turns = [Did((("search", {"q": "x"}),), (json.dumps({"took": n + 3, "hits": []}),), "", f"No. {n}!") for n in range(16)]

    assert not refuses(turns[:15])
    assert refuses(turns)


def test_a_duration_that_is_an_argument_is_content() -> None:
    """Waits of other lengths are other actions, whatever they return."""
    failed = "error: boom"
    same = [Did((("wait", {"duration": 5}),), (failed,), "", f"No. {n}!") for n in range(7)]
    other = [Did((("wait", {"duration": n, "pid": n}),), (f'{{"waited": {n}}}',), "", f"No. {n}!") for n in range(7)]

    assert refuses(same)
    assert not refuses(other)


def test_records_with_other_ids_are_not_refused() -> None:
    """Their durations are left out, and the rest still differs."""
    turns = [Did((("next", {}),), (json.dumps({"id": n, "duration_ms": 4}),), "", f"No. {n}!") for n in range(16)]

    assert not refuses(turns)
