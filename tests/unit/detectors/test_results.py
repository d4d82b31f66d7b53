"""Results without what changes by itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.detectors.results import MAX_NORMALIZED, count_lines, differ_in_lines, may_be_equal, normalize, normalize_head
from tests.support.exact import load_exact

EXACT = load_exact("results")

GONE = {
    "an ISO timestamp": (
        ("at 2026-11-22T06:14:14.123Z", "at 2025-01-02 23:59:59,1+02:00"),
        ("on 2026-11-22.", "on 2026-11-23."),
    ),
    "a date in words": (("Sun Nov 22 06:14:14 2026", "Mon Dec  1 07:00:01 2027"), ("Sun Nov 22 2026", "Mon Nov 23 2026")),
    "an HTTP date": (
        ("Sun, 22 Nov 2026 06:14:14 GMT", "Mon, 01 Dec 2027 07:00:01 GMT"),
        ("Sun, 22 Nov 2026", "Mon, 23 Nov 2026"),
    ),
    "a log's date": (("[22/Nov/2026:06:14:14 +0000]", "[01/Dec/2027:07:00:01 +0000]"), ("[22/Nov/2026]", "[23/Nov/2026]")),
    "a file's date": (
        ("root 4096 Nov 22 06:14 a.py", "root 4096 Dec  1 23:59 a.py"),
        ("-rw-r--r-- 1 root 4096 Nov 22  2025 a.py", "-rw-r--r-- 1 root 4096 Nov 23  2025 a.py"),
    ),
    "a time": (("06:14:14 up", "6:14 AM up"), ("the score is 6 to 14", "the score is 6 to 15")),
    "a compact timestamp": (("backup-20261122T061414Z", "backup-20271201T070001Z"), ("20261122", "20261123")),
    "seconds": (("2 passed in 0.03s", "2 passed in 12.31s"), ("2 passed in 0.03s", "3 passed in 0.03s")),
    "milliseconds": (("took 7 ms.", "took 812.5 ms."), ("7 retries", "8 retries")),
    "minutes": (("after 5 minutes", "after 12 minutes"), ("after 5 attempts", "after 12 attempts")),
    "a span": (("took 1m 30s", "took 2h 1m 3s"), ("1m 30 errors", "1m 31 errors")),
    "a UUID": (
        ("job 123e4567-e89b-12d3-a456-426614174000", "job 98765432-AAAA-bbbb-cccc-ddddddddeeee"),
        ("job 123e", "job 987f"),
    ),
    "hex": (("commit deadbeef01", "commit 0123456789abcdef0123456789abcdef01234567"), ("invalid 8d3f2", "invalid fa0b9")),
    "an address": (("<X at 0x7f12ab34cd>", "<X at 0x55d0aa00ffee>"), ("<X at 5>", "<X at 6>")),
    "an id with hex": (("call_0123abcd99", "call_fedc9876"), ("call_center2024_a", "call_center2024_b")),
    "a Unix time": (("1763792054", "1763799999123"), ('{"id": 1763792054}', '{"id": 1763792055}')),
    "a Unix time with a fraction": (
        ('{"at": 1763792054.25}', '{"at": 1763799999.5}'),
        ("loss 0.1763792054", "loss 0.1763792055"),
    ),
    "a line in escaped JSON": (
        ('"{\\"x\\": 5}\\nline 7"', '"{\\"x\\": 5}\\nline 8"'),
        ('"{\\"x\\": 5}\\nline 7"', '"{\\"x\\": 6}\\nline 7"'),
    ),
    "a time with a short date": (("due 22/11/2026 06:14", "due 01/12/2027 23:59"), ("on 22/11/2026", "on 23/11/2026")),
    "a line": (("line 33969: javac: not found", "line 7: javac: not found"), ("line five", "line six")),
    "a step": (("Current step 5/20", "Current step 6/20"), ("12 sheep", "13 sheep")),
    "a pid": (("pid=12 and PID: 9", "pid=77812 and PID: 1"), ("rapid 5", "rapid 6")),
    "a port": (("on port 8080", "on port 51234"), ("report 5", "report 6")),
    "Codex's name of an output": (("Chunk ID: 8d3f21\nok", "Chunk ID: fa0b97\nok"), ("id: 8d3f21x", "id: fa0b97x")),
    "the same in JSON": (('{"chunk_id": "8d3f21"}', '{"chunk_id": "fa0b97"}'), ('{"id": "8d3f21"}', '{"id": "fa0b97"}')),
    "a position": (("a.py:12:5: error", "a.py:120: error"), ("ratio:0.5", "ratio:0.7")),
    "a position in a makefile": (("Makefile:12: error", "Makefile:7: error"), ("done:50%", "done:60%")),
    "a temporary path": (("see /tmp/abc/d.txt for", "see /tmp/x-1 for"), ("/tmpfile/a", "/tmpfile/b")),  # noqa: S108  # no file
    "a rate of transfer": (("at 1.2 MB/s so far", "at 870 kB/s so far"), ("3 MB", "4 MB")),
    "a rate of a bar": (("100%|##| 8/8 [12.31it/s]", "100%|##| 8/8 [9.2it/s]"), ("120 req/s", "95 req/s")),
    "what is left to wait": (("45 % ETA 0:03:10", "45 % ETA 0:00:07"), ("45 % at 3 MB/s", "46 % at 3 MB/s")),
    "a bar that was drawn again": (("get\n10%\r40%\rdone", "get\n30%\rdone"), ("10%\rdone", "10%\rfailed")),
    "a request's own id": (("failed (req_8fKs92mXa01)", "failed (req_Zx81kQp3Tt)"), ("request_handler_1", "request_handler_2")),
    "a request's id in JSON": (
        ('{"request_id": "aB3dE9xY", "n": 1}', '{"request_id": "Zz91xxYt-0", "n": 1}'),
        ('{"id": "101"}', '{"id": "102"}'),
    ),
    "a request's id in a header": (("x-request-id: aB3dE9xY", "x-request-id: 0b3dE9xY"), ("request_id: 12", "request_id: 13")),
    "a trace's id": (
        ("traceId=4bf92f3577b34da6x", "traceId=9bf92f3577b34da6y"),
        ("customer cus_N3k2LLa91x", "customer cus_Zz1kkLLa1x"),
    ),
    "a nonce": (("nonce: 8fKs92", "nonce: Zx81kQ"), ("order aB3dE9xY81", "order Zz91xxYt81")),
    "a set": (("{'b', 'a', 'c'}", "{'c', 'a', 'b'}"), ("['b', 'a']", "['a', 'b']")),
    "a temporary path elsewhere": (("file:///var/tmp/a", "file:///var/tmp/b"), ("/home/x/tmp/a", "/home/x/tmp/b")),
}
"""What is left out: two results that differ in nothing else, and two of the kind that are not equal."""

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
"""More that is news."""


@pytest.mark.parametrize(("equal", "unequal"), GONE.values(), ids=GONE)
def test_what_changes_by_itself_is_left_out(equal: tuple[str, str], unequal: tuple[str, str]) -> None:
    """Two results that differ in nothing else are equal, and neither is empty; what only looks like it stays."""
    one, other = equal
    assert normalize(one) == normalize(other) != ""
    assert one != other
    assert may_be_equal(normalize_head(one), normalize_head(other))
    one, other = unequal
    assert normalize(one) != normalize(other)


@pytest.mark.parametrize(("one", "other"), STAYS)
def test_anything_else_stays(one: str, other: str) -> None:
    """What a result says is news."""
    assert normalize(one) != normalize(other)


def test_what_is_far_back_is_compared_as_it_is() -> None:
    """Normalising stops at the end of a line, however long what is left out before is."""
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
_ODD = st.sampled_from(["\u00e9", "\u00b5s", "\u65e5", "x" * 600, "fe", "1234567", "hours", "%", ".5", "Z"])


@given(st.lists(_PIECES | _MORE | _ODD, max_size=60).map("".join), st.integers(1, 3))
def test_a_look_at_each_line_finds_what_the_pattern_finds(text: str, times: int) -> None:
    """Line by line, those of one shape alike, the same is left out as by one pass over the whole text."""
    digits = str.maketrans("0123456789", "5678901234")
    repeated = "\n".join([text, text.translate(digits)] * times)

    assert normalize(repeated) == EXACT.normalize(repeated)
    assert normalize(text) == EXACT.normalize(text)


def test_a_line_that_is_not_ascii_is_read_for_itself() -> None:
    """A letter that no shape can express is not mistaken for another character."""
    assert normalize("see /tmp/\u65e5x end\nsee /tmp/?x end") == "see # end\nsee /tmp/?x end"


@given(st.lists(_PIECES | _MORE | _ODD, max_size=60).map("".join), st.lists(_PIECES, max_size=60).map("".join))
def test_results_of_other_lengths_in_lines_differ_however_they_are_normalised(one: str, other: str) -> None:
    """No line end changes by itself."""
    if differ_in_lines(count_lines(one), count_lines(other)):
        assert normalize(one) != normalize(other)
    if "\\" not in one:
        assert normalize(one).count("\n") == one.count("\n")


@given(st.lists(_PIECES, max_size=80).map("".join), st.lists(_PIECES, max_size=80).map("".join))
def test_a_quick_look_never_tells_equal_results_apart(one: str, other: str) -> None:
    """What `may_be_equal` denies is never equal."""
    if normalize(one) == normalize(other):
        assert may_be_equal(normalize_head(one), normalize_head(other))


@given(st.lists(_PIECES, min_size=30, max_size=80).map("".join), st.data())
def test_a_quick_look_takes_long_results_that_are_equal(start: str, data: st.DataObject) -> None:
    """Durations, line numbers and temporary paths of any length do not tell long results apart."""
    numbers = st.integers(0, 10**9)

    def text() -> str:
        """The same again."""
        path = "x" * data.draw(st.integers(1, 90))
        return f"{start} line {data.draw(numbers)} {start} {data.draw(numbers)} ms /tmp/{path} end" * 3  # no file

    one, other = text(), text()
    assert may_be_equal(normalize_head(one), normalize_head(other)) or normalize(one) != normalize(other)


_HOSTILE = [
    *("\r", "a\ra", "{'", "{'a', 'b', ", "', '", "req_", "req_a1", "request_id: ", "nonce=", "1 M", "1it/"),
    *("_a1b2c3d4-", "id:", "hunk id", "00000000 ", "1763792054 ", "b/s ", "1 0 ", "pid: ", "p"),
    *(":1", "a:1", "1s", "1:", "1 s", "1.", "1m", "1/1/", "'1", "12:30", "line ", "line 1", "ab", "0x", "-", "M"),
    *("/tmp/", "aaaaaaaa-", "11111111-1111-1111-", "2026-11-22 ", "1 1s ", "Nov 1 ", "Sun, 1 Nov "),  # noqa: S108  # no file
]


@pytest.mark.parametrize("piece", _HOSTILE)
def test_a_result_of_nothing_but_one_piece_is_normalised(piece: str) -> None:
    """No input is catastrophic: a megabyte of anything ends, and twice as much of it starts alike."""
    text = piece * (2**20 // len(piece))

    assert normalize(text + piece).startswith(normalize(text)[:1_000])


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


@given(st.lists(st.sampled_from(_NAMES), max_size=12).map("".join))
def test_a_quick_look_misses_no_id_of_a_call(text: str) -> None:
    """Looking for the names first spares the patterns their search, and changes nothing; sets are looked for with them."""
    assert normalize(text) == EXACT.normalize(text)


def test_ids_of_a_call_are_left_out() -> None:
    """Those of requests, traces and calls; what stands before them stays."""
    assert normalize("id: req_a1B2c3D4, 'request_id': 'a-1_b2'") == "id: req_#, 'request_id': '#'"
