"""Results are compared without what changes by itself."""

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from extproc.detectors.results import (
    MAX_NORMALIZED,
    count_lines,
    differ_in_lines,
    may_be_equal,
    normalize,
    normalize_head,
)
from tests.support.exact import load_exact
from tests.support.told import tell
from tests.support.turn_writers import Did, as_chat

EXACT = load_exact("results")

GONE = {
    "an ISO timestamp": (
        ("at 2026-11-22T06:14:14.123Z", "at 2025-01-02 23:59:59,1+02:00"),
        ("on 2026-11-22.", "on 2026-11-23."),
    ),
    "a date in words": (
        ("Sun Nov 22 06:14:14 2026", "Mon Dec  1 07:00:01 2027"),
        ("Sun Nov 22 2026", "Mon Nov 23 2026"),
    ),
    "an HTTP date": (
        ("Sun, 22 Nov 2026 06:14:14 GMT", "Mon, 01 Dec 2027 07:00:01 GMT"),
        ("Sun, 22 Nov 2026", "Mon, 23 Nov 2026"),
    ),
    "a log's date": (
        ("[22/Nov/2026:06:14:14 +0000]", "[01/Dec/2027:07:00:01 +0000]"),
        ("[22/Nov/2026]", "[23/Nov/2026]"),
    ),
    "a file's date": (
        ("root 4096 Nov 22 06:14 a.py", "root 4096 Dec  1 23:59 a.py"),
        ("-rw-r--r-- 1 root 4096 Nov 22  2025 a.py", "-rw-r--r-- 1 root 4096 Nov 23  2025 a.py"),
    ),
    "a time": (("06:14:14 up", "6:14 AM up"), ("the score is 6 to 14", "the score is 6 to 15")),
    "a compact timestamp": (
        ("backup-20261122T061414Z", "backup-20271201T070001Z"),
        ("20261122", "20261123"),
    ),
    "seconds": (
        ("2 passed in 0.03s", "2 passed in 12.31s"),
        ("2 passed in 0.03s", "3 passed in 0.03s"),
    ),
    "milliseconds": (("took 7 ms.", "took 812.5 ms."), ("7 retries", "8 retries")),
    "minutes": (("after 5 minutes", "after 12 minutes"), ("after 5 attempts", "after 12 attempts")),
    "a span": (("took 1m 30s", "took 2h 1m 3s"), ("1m 30 errors", "1m 31 errors")),
    "a UUID": (
        ("job 123e4567-e89b-12d3-a456-426614174000", "job 98765432-AAAA-bbbb-cccc-ddddddddeeee"),
        ("job 123e", "job 987f"),
    ),
    "hex": (
        ("commit deadbeef01", "commit 0123456789abcdef0123456789abcdef01234567"),
        ("invalid 8d3f2", "invalid fa0b9"),
    ),
    "an address": (("<X at 0x7f12ab34cd>", "<X at 0x55d0aa00ffee>"), ("<X at 5>", "<X at 6>")),
    "an id with hex": (
        ("call_0123abcd99", "call_fedc9876"),
        ("call_center2024_a", "call_center2024_b"),
    ),
    "a Unix time": (("1763792054", "1763799999123"), ('{"id": 1763792054}', '{"id": 1763792055}')),
    "a Unix time with a fraction": (
        ('{"at": 1763792054.25}', '{"at": 1763799999.5}'),
        ("loss 0.1763792054", "loss 0.1763792055"),
    ),
    "a line in escaped JSON": (
        ('"{\\"x\\": 5}\\nline 7"', '"{\\"x\\": 5}\\nline 8"'),
        ('"{\\"x\\": 5}\\nline 7"', '"{\\"x\\": 6}\\nline 7"'),
    ),
    "a time with a short date": (
        ("due 22/11/2026 06:14", "due 01/12/2027 23:59"),
        ("on 22/11/2026", "on 23/11/2026"),
    ),
    "a line": (
        ("line 33969: javac: not found", "line 7: javac: not found"),
        ("line five", "line six"),
    ),
    "a step": (("Current step 5/20", "Current step 6/20"), ("12 sheep", "13 sheep")),
    "a pid": (("pid=12 and PID: 9", "pid=77812 and PID: 1"), ("rapid 5", "rapid 6")),
    "a port": (("on port 8080", "on port 51234"), ("report 5", "report 6")),
    "Codex's name of an output": (
        ("Chunk ID: 8d3f21\nok", "Chunk ID: fa0b97\nok"),
        ("id: 8d3f21x", "id: fa0b97x"),
    ),
    "the same in JSON": (
        ('{"chunk_id": "8d3f21"}', '{"chunk_id": "fa0b97"}'),
        ('{"id": "8d3f21"}', '{"id": "fa0b97"}'),
    ),
    "a position": (("a.py:12:5: error", "a.py:120: error"), ("ratio:0.5", "ratio:0.7")),
    "a position in a makefile": (
        ("Makefile:12: error", "Makefile:7: error"),
        ("done:50%", "done:60%"),
    ),
    "a temporary path": (
        ("see /tmp/abc/d.txt for", "see /tmp/x-1 for"),
        ("/tmpfile/a", "/tmpfile/b"),  # noqa: S108  # no file
    ),
    "a rate of transfer": (("at 1.2 MB/s so far", "at 870 kB/s so far"), ("3 MB", "4 MB")),
    "a rate of a bar": (
        ("100%|##| 8/8 [12.31it/s]", "100%|##| 8/8 [9.2it/s]"),
        ("120 req/s", "95 req/s"),
    ),
    "what is left to wait": (
        ("45 % ETA 0:03:10", "45 % ETA 0:00:07"),
        ("45 % at 3 MB/s", "46 % at 3 MB/s"),
    ),
    "a bar that was drawn again": (
        ("get\n10%\r40%\rdone", "get\n30%\rdone"),
        ("10%\rdone", "10%\rfailed"),
    ),
    "a request's own id": (
        ("failed (req_8fKs92mXa01)", "failed (req_Zx81kQp3Tt)"),
        ("request_handler_1", "request_handler_2"),
    ),
    "a request's id in JSON": (
        ('{"request_id": "aB3dE9xY", "n": 1}', '{"request_id": "Zz91xxYt-0", "n": 1}'),
        ('{"id": "101"}', '{"id": "102"}'),
    ),
    "a request's id in a header": (
        ("x-request-id: aB3dE9xY", "x-request-id: 0b3dE9xY"),
        ("request_id: 12", "request_id: 13"),
    ),
    "a trace's id": (
        ("traceId=4bf92f3577b34da6x", "traceId=9bf92f3577b34da6y"),
        ("customer cus_N3k2LLa91x", "customer cus_Zz1kkLLa1x"),
    ),
    "a nonce": (("nonce: 8fKs92", "nonce: Zx81kQ"), ("order aB3dE9xY81", "order Zz91xxYt81")),
    "a set": (("{'b', 'a', 'c'}", "{'c', 'a', 'b'}"), ("['b', 'a']", "['a', 'b']")),
    "a temporary path elsewhere": (
        ("file:///var/tmp/a", "file:///var/tmp/b"),
        ("/home/x/tmp/a", "/home/x/tmp/b"),
    ),
}

STAYS = [
    ('{"id": 101}', '{"id": 102}'),
    ('{"id":101}', '{"id":102}'),
    ("id 101", "id 102"),
    ("id:101", "id:102"),
    ("ticket:101: a lamp is broken", "ticket:102: a lamp is broken"),
    ("task_id=5", "task_id=6"),
    ("customerId: 5", "customerId: 6"),
    ('"{\\"id\\": 5}\\n"', '"{\\"id\\": 6}\\n"'),
    ('{"id": 10000101}', '{"id": 10000102}'),
    ("order 45000123", "order 45000124"),
    ("order 4500012345", "order 4500012346"),
    ("12345678 bytes", "23456789 bytes"),
    ("loss 0.12345678", "loss 0.12345679"),
    ('{"opened":"2026-11-02"}', '{"opened":"2026-11-03"}'),
    ("Nov 2", "Nov 3"),
    ("{'b', 'a'}", "{'b', 'c'}"),
    ("{'b': 'a', 'c': 'd'}", "{'b': 'd', 'c': 'a'}"),
    ("a\r\nb", "c\r\nb"),
    ("3 failed", "4 failed"),
    ("10 %", "20 %"),
    ("50%", "60%"),
    ("page 1", "page 2"),
    ("0.5", "0.7"),
    ("1.2.3", "1.2.4"),
    ("deadline 5", "deadline 6"),
    ("abcdef", "fedcba"),
    ("5 id: added", "5 id: faded"),
    ("a line 5", "a step 5"),
    ("exit code 1", "exit code 2"),
    ('{"count": 5}', '{"count": 6}'),
    ('{"count":5}', '{"count":6}'),
]


@pytest.mark.parametrize(("equal", "unequal"), GONE.values(), ids=GONE)
def test_volatile_parts_are_left_out(equal: tuple[str, str], unequal: tuple[str, str]) -> None:
    """Two results that differ only in this are equal; two that only look alike are not."""
    one, other = equal
    assert normalize(one) == normalize(other) != ""
    assert one != other
    assert may_be_equal(normalize_head(one), normalize_head(other))
    one, other = unequal
    assert normalize(one) != normalize(other)


@pytest.mark.parametrize(("one", "other"), STAYS)
def test_other_parts_are_compared(one: str, other: str) -> None:
    assert normalize(one) != normalize(other)


def test_far_parts_of_results_are_compared_unchanged() -> None:
    """Normalising stops at the end of a line."""
    rest = "x" * MAX_NORMALIZED
    short, long = ["took 7 ms\n" * 1_500 + rest, "took 812 ms\n" * 1_500 + rest]

    assert normalize("7 ms\n" + rest) == normalize("812 ms\n" + rest)
    assert normalize(rest + " 7 ms") != normalize(rest + " 8 ms")
    assert normalize(short) != normalize(long)


_PIECES = st.sampled_from(
    [*'5:-.Tx a\n"\\', "12", "line ", "ms", "deadbeef", "/tmp/", "2026-11-22", "id=", "Nov ", "0x"]  # noqa: S108  # no file
)


_MORE = st.sampled_from(
    [
        "\n",
        "\n",
        " ",
        " 3",
        "/",
        ",",
        "_",
        "(",
        "pid: ",
        "PORT ",
        "Step=",
        "Line:",
        "Chunk ID: ",
        "1763792054",
        "a.py:",
        "Tue, ",
        "Sun ",
        "22",
        "06:14:14",
        "123e4567-e89b",
        "abcd",
        "kB/s",
        "it/s",
        "T061414",
        "0x7f12ab34cd",
    ]
)
_NAMES = [
    "req",
    "uest",
    "Request",
    "trace",
    "Correlation",
    "ion",
    "call",
    "toolu",
    "Nonce",
    "once",
    "id",
    "ID",
    "a1B2c3D4",
    *("{'", "', '", "'}", "Ab1"),
    *"_- :=\"'x",
]
_KEYED = st.sampled_from(
    [
        *(
            "duration",
            "Elapsed",
            "latency",
            "took",
            "time",
            "Time",
            "wall",
            "query",
            "pid",
            "process",
            "id",
            "in",
            "ms",
            "Ms",
        ),
        *(
            "_",
            "-",
            "s",
            "S",
            "seconds",
            "Millis",
            "taken",
            '"',
            "'",
            '": ',
            ":",
            "=",
            ">",
            "<",
            "</",
            " ",
            "\\",
            "\\n",
            "\n",
        ),
        *(
            "4",
            "0.3",
            "e-5",
            ",",
            "}",
            "]",
            "AppData",
            "Local",
            "Temp",
            "/",
            "x",
            "\u00e9",
            "\u017f",
            "/var/folders/",
        ),
    ]
)
_ODD = st.sampled_from(
    ["\u00e9", "\u00b5s", "\u65e5", "x" * 600, "fe", "1234567", "hours", "%", ".5", "Z"]
)


@given(st.lists(_PIECES | _MORE | _ODD, max_size=60).map("".join), st.integers(1, 3))
def test_line_by_line_normalising_equals_one_pass(text: str, times: int) -> None:
    digits = str.maketrans("0123456789", "5678901234")
    repeated = "\n".join([text, text.translate(digits)] * times)

    assert normalize(repeated) == EXACT.normalize(repeated)
    assert normalize(text) == EXACT.normalize(text)


@given(
    st.lists(st.sampled_from(_NAMES), max_size=12).map("".join)
    | st.lists(_KEYED, max_size=30).map("".join)
)
def test_quick_look_misses_no_key_or_id(text: str) -> None:
    assert normalize(text) == EXACT.normalize(text)


def test_lines_that_are_not_ascii_are_normalised_separately() -> None:
    assert normalize("see /tmp/\u65e5x end\nsee /tmp/?x end") == "see # end\nsee /tmp/?x end"


@given(
    st.lists(_PIECES | _MORE | _ODD, max_size=60).map("".join),
    st.lists(_PIECES, max_size=60).map("".join),
)
def test_normalising_keeps_line_ends(one: str, other: str) -> None:
    if differ_in_lines(count_lines(one), count_lines(other)):
        assert normalize(one) != normalize(other)
    if "\\" not in one:
        assert normalize(one).count("\n") == one.count("\n")


_HOSTILE = [
    *(
        "\r",
        "a\ra",
        "{'",
        "{'a', 'b', ",
        "', '",
        "req_",
        "req_a1",
        "request_id: ",
        "nonce=",
        "1 M",
        "1it/",
    ),
    *("_a1b2c3d4-", "id:", "hunk id", "00000000 ", "1763792054 ", "b/s ", "1 0 ", "pid: ", "p"),
    *(
        ":1",
        "a:1",
        "1s",
        "1:",
        "1 s",
        "1.",
        "1m",
        "1/1/",
        "'1",
        "12:30",
        "line ",
        "line 1",
        "ab",
        "0x",
        "-",
        "M",
    ),
    *("/tmp/", "aaaaaaaa-", "11111111-1111-1111-", "2026-11-22 ", "1 1s ", "Nov 1 ", "Sun, 1 Nov "),  # noqa: S108  # no file
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
        "AppData/Local/Temp/",
        "AppData\\\\Local\\\\Temp\\\\",
        "AppData\\Local\\Temp\\",
        "/var/folders/",
        "time=\\",
    ),
]


@pytest.mark.parametrize("piece", _HOSTILE)
def test_hostile_result_is_normalised(piece: str) -> None:
    text = piece * (2**20 // len(piece))

    assert normalize(text + piece).startswith(normalize(text)[:1_000])


def test_ids_of_a_call_are_left_out() -> None:
    assert normalize("id: req_a1B2c3D4, 'request_id': 'a-1_b2'") == "id: req_#, 'request_id': '#'"


KEYS = [
    *(
        "duration",
        "duration_s",
        "duration_ms",
        "duration_seconds",
        "durationMs",
        "durationSeconds",
        "Duration",
        "DURATION_MS",
    ),
    *(
        "duration_in_ms",
        "durationInMillis",
        "durationNanos",
        "total_duration",
        "totalDurationMs",
        "took",
        "took_ms",
        "tookMs",
    ),
    *(
        "elapsed",
        "Elapsed",
        "elapsed_ms",
        "elapsedMs",
        "elapsed_time",
        "time_elapsed",
        "latency",
        "latency_ms",
        "latencyMs",
    ),
    *(
        "wall_time",
        "wall-time",
        "walltime",
        "wallTimeSeconds",
        "execution_time",
        "executionTimeMs",
        "response_time_ms",
    ),
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

CONTENT = [
    *(
        "percent",
        "count",
        "price",
        "date",
        "id",
        "total",
        "size",
        "durations",
        "duration_count",
        "time",
        "times",
        "timeout",
    ),
    *(
        "start_time",
        "end_time",
        "lifetime",
        "rapid",
        "cupid",
        "pids",
        "pid_count",
        "overtook",
        "process",
        "tookCount",
    ),
]

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

EQUAL = [
    ("# duration_ms 56.7", "# duration_ms 4"),
    ('<testcase name="a" time="0.034">', '<testcase name="a" time="1.200">'),
    ("/var/folders/zz/a_1/T/tmpx/a.txt: gone", "/var/folders/zz/b_2/T/tmpy/c.txt: gone"),
    ("/private/var/folders/zz/a_1/T/x gone", "/private/var/folders/zz/b_2/T/longer-y gone"),
    ("/private/tmp/x gone", "/private/tmp/longer-y gone"),
    ("/private/var/tmp/x gone", "/private/var/tmp/longer-y gone"),
    (
        r"C:\Users\x\AppData\Local\Temp\tmpab\n.txt is gone",
        r"C:\Users\x\AppData\Local\Temp\tmpcde\n.txt is gone",
    ),
    (
        r'"C:\\Users\\x\\AppData\\Local\\Temp\\tmpab\\n.txt\ngone"',
        r'"C:\\Users\\x\\AppData\\Local\\Temp\\nab\\t.txt\ngone"',
    ),
    ("C:/Users/x/AppData/Local/Temp/a gone", "C:/Users/x/AppData/Local/Temp/longer-b gone"),
]


@pytest.mark.parametrize(
    ("key", "written"),
    [
        *((key, WRITTEN["JSON"]) for key in KEYS),
        *(("duration_ms", form) for form in WRITTEN.values()),
    ],
)
def test_durations_and_process_ids_are_left_out(key: str, written: str) -> None:
    texts = [written.format(key=key, number=number) for number in NUMBERS]

    assert len({normalize(text) for text in texts}) == 1
    assert key in normalize(texts[0])


@pytest.mark.parametrize(
    ("key", "written"),
    [*((key, WRITTEN["JSON"]) for key in CONTENT), *(("count", form) for form in WRITTEN.values())],
)
def test_numbers_under_other_keys_are_compared(key: str, written: str) -> None:
    assert (
        len({normalize(written.format(key=key, number=number)) for number in ("4", "5", "46")}) == 3
    )


@pytest.mark.parametrize(("one", "other"), ELSEWHERE)
def test_numbers_in_longer_values_are_compared(one: str, other: str) -> None:
    assert normalize(one) != normalize(other)


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_temporary_folders_and_test_times_are_left_out(one: str, other: str) -> None:
    assert normalize(one) == normalize(other)
    assert may_be_equal(normalize_head(one), normalize_head(other))


@given(
    st.lists(_KEYED, max_size=60).map("".join),
    st.lists(_KEYED, max_size=30).map("".join),
    st.data(),
)
def test_quick_look_accepts_equal_starts(start: str, end: str, data: st.DataObject) -> None:
    """Wherever the start of a result is cut."""
    numbers = st.sampled_from([*NUMBERS, "12345678901234567890.12345678901234567890e-100"])
    one, other = [
        f'{start}, "duration": {data.draw(numbers)}, "path": "/var/folders/{data.draw(numbers)}"'
        f', "pid": "{data.draw(numbers)}"{end}'
        for _ in range(2)
    ]

    assert normalize(one) != normalize(other) or may_be_equal(
        normalize_head(one), normalize_head(other)
    )


# JSON
def repeat(tool: str, result: str, times: int, **arguments: Any) -> dict[str, Any]:  # noqa: ANN401
    """A chat in which a tool is called again and again; `@` is the number of the turn."""
    return as_chat(
        [
            Did(
                ((tool, json.loads(json.dumps(arguments).replace('"@"', str(n)))),),
                (result.replace("@", str(n)),),
                "",
                f"No. {n}!",
            )
            for n in range(times)
        ]
    )


LADDER: dict[str, Any] = {
    "action": "steer",
    "escalate": {"land": 5, "reject": 7},
    "weak_threshold": 14,
}
CODEX = '{"output": "cat: x: No such file", "metadata": {"exit_code": 1, "duration_seconds": 0.@}}'
CONVERSATIONS: dict[str, tuple[dict[str, Any], bool]] = {
    "an error with other durations": (repeat("shell", CODEX, 7, command="cat x"), True),
    "the same six times": (repeat("shell", CODEX, 6, command="cat x"), False),
    "searches that differ in time": (repeat("find", '{"took": @, "hits": []}', 16, q="x"), True),
    "the same, which wait as weak loops do": (
        repeat("find", '{"took": @, "hits": []}', 15, q="x"),
        False,
    ),
    "the same wait": (repeat("wait", "error: boom", 7, duration=5), True),
    "other waits": (repeat("wait", '{"waited": @}', 7, duration="@", pid="@"), False),
    "other records": (repeat("next", '{"id": @, "duration_ms": 4}', 16), False),
}


@pytest.mark.parametrize(("body", "refused"), CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_conversations_with_moving_numbers(body: dict[str, Any], refused: bool) -> None:
    """Durations neither hide a loop nor make one: in arguments they are content."""
    assert (tell(body, **LADDER).action == "reject") is refused
